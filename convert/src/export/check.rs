//! Reading an export back, as `convert` would, and comparing it with the file it was made from.
//!
//! The export is read through the importers' definitions, which know nothing of the code that wrote
//! it, so what is compared here is what other programs that follow the formats will see.

use std::path::Path;

use quern_models::{
    ModelFile, ModelSpec, ZeroKind,
    spec::{Attn, Mlp},
};
use rayon::prelude::*;

use super::items::Item;
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
    let item = items.iter().find(|i| i.target == job.target);
    match (&job.data, item) {
        // Columns come in the order of the source.
        (Data::Float { floats, .. }, Some(item)) => numbers(item, floats),
        (Data::Codes(codes), Some(item)) if job.scheme() != view.scheme => values(item, &**codes),
        _ => job.verify(&view).map_err(swapped),
    }
}

/// Compares floats with the numbers of a tensor, rounded to their type.
fn numbers(item: &Item, floats: &Floats) -> Result<Verified, ConvertError> {
    if floats.n * floats.k != item.view.n * item.view.k {
        let (expected, got) = ([item.view.n, item.view.k], [floats.n, floats.k]);
        return Err(differ(&item.target, "shape", format!("{expected:?}"), format!("{got:?}")));
    }
    let exact = (0..floats.n).into_par_iter().try_fold_with(true, |exact, row| {
        let mut rounded = vec![];
        let mut same = exact;
        for col in 0..floats.k {
            let (number, got) = (item.at(row, col), floats.at(row, col));
            rounded.clear();
            floats.kind.push(number, &mut rounded);
            let expected = floats.kind.read(&rounded, 0);
            if expected.to_bits() != got.to_bits() {
                return Err(differ(&item.target, format!("element [{row}, {col}]"), expected, got));
            }
            same &= expected == number;
        }
        Ok(same)
    });
    let exact = exact.try_reduce(|| true, |a, b| Ok(a && b))?;
    let count = (floats.n * floats.k) as u64;
    let (floats, rounded) = if exact { (count, 0) } else { (0, count) };
    Ok(Verified { floats, rounded, ..Verified::default() })
}

/// Compares codes, and the numbers they stand for, where groups or zero-points are written in another way.
fn values(item: &Item, codes: &dyn Integers) -> Result<Verified, ConvertError> {
    let (s, coded) = (codes.shape(), item.coded());
    let Some(coded) = coded.filter(|c| (s.n, s.k, s.bits) == (item.view.n, item.view.k, c.bits)) else {
        let got = format!("{} [{}, {}]", s.scheme(), s.n, s.k);
        return Err(differ(&item.target, "scheme and shape", item.view.scheme, got));
    };
    (0..s.n).into_par_iter().try_for_each(|row| {
        for col in 0..s.k {
            let (expected, got) = (coded.code(row, col), codes.code(row, col));
            if expected != got {
                return Err(differ(&item.target, format!("code [{row}, {col}]"), expected, got));
            }
            let group = col / s.group;
            let scale = codes.scale(row, group);
            let (expected, got) = (
                item.at(row, col),
                match s.zero {
                    ZeroKind::Min => scale * got as f32 + codes.min(row, group),
                    _ => scale * (got as f32 - codes.zero(row, group) as f32),
                },
            );
            if expected != got {
                return Err(differ(&item.target, format!("value [{row}, {col}]"), expected, got));
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
        let (Mlp::Gated { mlp_order, .. } | Mlp::Plain { mlp_order, .. }) = &mut layer.mlp;
        *mlp_order = false;
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
