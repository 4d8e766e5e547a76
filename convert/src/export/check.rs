//! Reading an export back, as `convert` would, and comparing it with the file it was made from.
//!
//! The export is read through the importers' definitions, which know nothing of the code that wrote
//! it, so what is compared here is what other programs that follow the formats will see.

use std::path::Path;

use quern_models::{
    ModelFile, ModelSpec, Scheme,
    p64::Shape,
    spec::{Attn, Mlp},
};
use rayon::prelude::*;

use super::items::{Item, Piece};
use crate::{
    ConvertError, Options, Phase, Progress, Verified,
    import::{Integers, float::Floats},
    pipeline::{Data, Job, Pass, Plan, go_on},
    source::Source,
    threads::Threads,
};

/// Compares every tensor of the export at `path` with `file`, whose tensors are `items`.
pub fn check(
    path: &Path,
    file: &ModelFile,
    items: &[Item],
    threads: &Threads,
    progress: &mut dyn Progress,
) -> Result<Verified, ConvertError> {
    let files = Source::open(path)?;
    let checkpoint = files.read()?;
    let plan = threads.run(|| Plan::new(&checkpoint, &Options::default()))?;
    let (expected, got) = (unordered(file.spec()), unordered(&plan.family.spec));
    if expected != got {
        return Err(differ("(spec)", "the model's description", format!("{expected:?}"), format!("{got:?}")));
    }
    let mut verified = Verified::default();
    let mut pass = Pass::new(&plan.jobs, Phase::Verify);
    for job in &plan.jobs {
        go_on(progress)?;
        verified += threads.run(|| one(job, file, items))?;
        pass.done(job, progress);
    }
    Ok(verified)
}

fn one(job: &Job, file: &ModelFile, items: &[Item]) -> Result<Verified, ConvertError> {
    let view = file.tensor(&job.target).ok_or_else(|| differ(&job.target, "tensor", "none", "one"))?;
    let piece = items.iter().find_map(|i| i.piece(&job.target));
    match (&job.data, piece) {
        (Data::Float { floats, stored }, Some(piece)) => {
            // An export without the order has the columns as the source.
            let source = piece.ordered() && floats.arrange.is_natural();
            match source || view.scheme != Scheme::Float(*stored) {
                true => numbers(piece, floats, source),
                false => job.verify(&view).map_err(swapped),
            }
        }
        (Data::Codes(codes), Some(piece)) if job.scheme() != view.scheme => values(piece, &**codes),
        _ => job.verify(&view).map_err(swapped),
    }
}

/// Compares floats with the numbers of a tensor, rounded to their type. Columns are in the order of the `source`, or
/// of the file.
fn numbers(piece: &Piece, floats: &Floats, source: bool) -> Result<Verified, ConvertError> {
    if floats.n * floats.k != piece.view.n * piece.view.k {
        let (expected, got) = ([piece.view.n, piece.view.k], [floats.n, floats.k]);
        return Err(differ(&piece.target, "shape", format!("{expected:?}"), format!("{got:?}")));
    }
    // Whether every number is exactly the file's.
    let exact = (0..floats.n).into_par_iter().map(|row| {
        let mut rounded = vec![];
        let mut exact = true;
        for col in 0..floats.k {
            let number = if source { piece.at(row, col) } else { piece.view.at(row, col) };
            rounded.clear();
            floats.kind.push(number, &mut rounded);
            let (expected, got) = (floats.kind.read(&rounded, 0), floats.at(row, col));
            if expected.to_bits() != got.to_bits() {
                return Err(differ(&piece.target, format!("element [{row}, {col}]"), expected, got));
            }
            exact &= expected == number;
        }
        Ok(exact)
    });
    let exact = exact.try_reduce(|| true, |a, b| Ok(a && b))?;
    let count = (floats.n * floats.k) as u64;
    let (floats, rounded) = if exact { (count, 0) } else { (0, count) };
    Ok(Verified { floats, rounded, ..Verified::default() })
}

/// Compares codes, and the numbers they stand for, where groups or zero-points are written in another way.
fn values(piece: &Piece, codes: &dyn Integers) -> Result<Verified, ConvertError> {
    let s = codes.shape();
    let Some((bits, group)) = piece
        .view
        .scheme
        .coded()
        .filter(|c| (s.n, s.k, s.bits) == (piece.view.n, piece.view.k, c.0) && !piece.ordered())
    else {
        let got = format!("{} [{}, {}]", s.scheme(), s.n, s.k);
        return Err(differ(&piece.target, "scheme and shape", piece.view.scheme, got));
    };
    let at = Shape::new(s.n, s.k, bits, group);
    (0..s.n).into_par_iter().try_for_each(|row| {
        for col in 0..s.k {
            let (expected, got) = (at.code(piece.view.codes, row, col), codes.code(row, col));
            if expected != got {
                return Err(differ(&piece.target, format!("code [{row}, {col}]"), expected, got));
            }
            let (expected, got) = (piece.view.at(row, col), codes.value(row, col));
            if expected != got {
                return Err(differ(&piece.target, format!("value [{row}, {col}]"), expected, got));
            }
        }
        Ok(())
    })?;
    Ok(Verified { codes: (s.n * s.k) as u64, scales: (s.n * s.groups()) as u64, ..Verified::default() })
}

/// A spec without what only says how its tensors are stored, and by which family's rules.
fn unordered(spec: &ModelSpec) -> ModelSpec {
    let mut spec = ModelSpec { family: String::new(), head_order: false, ..spec.clone() };
    for layer in &mut spec.layers {
        let Attn::Gqa { attn_order, o_order, .. } = &mut layer.attn;
        (*attn_order, *o_order) = (false, false);
        if let Mlp::Gated { mlp_order, .. } | Mlp::Plain { mlp_order, .. } = &mut layer.mlp {
            *mlp_order = false;
        }
    }
    spec
}

/// The comparison's "source" is the export here.
fn swapped(error: ConvertError) -> ConvertError {
    match error {
        ConvertError::Verify { tensor, what, expected, got } => {
            ConvertError::Exported { tensor, what, expected: got, got: expected }
        }
        other => other,
    }
}

fn differ(tensor: &str, what: impl ToString, expected: impl ToString, got: impl ToString) -> ConvertError {
    ConvertError::Exported {
        tensor: tensor.into(),
        what: what.to_string(),
        expected: expected.to_string(),
        got: got.to_string(),
    }
}
