//! Heads: planned for the model that they are for, written to a file of their own or behind the model.

use std::{path::Path, time::Instant};

use quern_models::{
    Generation, Meta, ModelFile, TensorView,
    family::{self, HeadLayout},
    join,
    spec::ModelSpec,
};

use super::{Data, Job, Made, Plan, asked, hint, presence, refused, take::Choice};
use crate::{
    ConvertError, Options, Progress, Report,
    import::{compressed, float::Floats},
    source::{Checkpoint, Source},
    threads::Threads,
};

/// Converts the head in `source` for the model in `model` into `out`: a file of its own, or one with the model
/// (`whole`), which may be the model's.
pub fn convert_head(
    source: &Path,
    model: &ModelFile,
    out: &Path,
    whole: bool,
    options: &Options,
    progress: &mut dyn Progress,
) -> Result<Report, ConvertError> {
    let start = Instant::now();
    asked(out, options)?;
    let files = open(source, out)?;
    let checkpoint = files.read()?;
    let threads = Threads::new()?;
    let plan = threads.run(|| plan(&checkpoint, model.spec(), options))?;
    make(&checkpoint, plan, model, out, whole, options, &threads, progress, start)
}

/// Opens the checkpoint of a head.
pub(super) fn open(source: &Path, out: &Path) -> Result<Source, ConvertError> {
    if let Some(pickle) = pickle(source) {
        let name = pickle.file_name().unwrap_or_default().to_string_lossy().into_owned();
        return Err(ConvertError::Source {
            path: pickle,
            what: "a PyTorch pickle, which can run code when it is loaded and is not read".into(),
            next: format!(
                "turn it into safetensors once, in Python: import torch, safetensors.torch as s; \
                 s.save_file({{k: v.clone() for k, v in torch.load({name:?}, map_location=\"cpu\", \
                 weights_only=True).items()}}, \"model.safetensors\")"
            ),
        });
    }
    // Medusa's own name for its heads, whatever lies beside them.
    let medusa = source.join("medusa_lm_head.safetensors");
    let whole = ["model.safetensors", "model.safetensors.index.json"].iter().any(|name| source.join(name).exists());
    super::open(if medusa.exists() && !whole { &medusa } else { source }, out)
}

/// The pickle of a source that has nothing better.
fn pickle(source: &Path) -> Option<std::path::PathBuf> {
    let ends = |path: &Path, ends: &[&str]| {
        let ending = path.extension().map(|e| e.to_string_lossy().to_lowercase());
        ending.is_some_and(|e| ends.contains(&&*e))
    };
    const PICKLES: &[&str] = &["bin", "pt", "pth", "ckpt"];
    if !source.is_dir() {
        return (source.exists() && ends(source, PICKLES)).then(|| source.into());
    }
    let mut files: Vec<_> = std::fs::read_dir(source).ok()?.flatten().map(|entry| entry.path()).collect();
    files.sort();
    if files.iter().any(|path| ends(path, &["safetensors", "gguf"])) {
        return None;
    }
    files.into_iter().find(|path| ends(path, PICKLES) && !path.ends_with("training_args.bin"))
}

/// Refuses a head that is converted as if it were a model.
pub(super) fn refuse(checkpoint: &Checkpoint) -> Result<(), ConvertError> {
    match HeadLayout::of(&checkpoint.config, checkpoint) {
        None | Some(HeadLayout::Mimo) => Ok(()),
        Some(layout) => Err(ConvertError::unsupported(
            format!("{}: a head ({}), not a model", checkpoint.name, layout.name()),
            "put it into its model's file (quern convert MODEL --head DIR), or make a file of it (quern convert DIR --for \
             MODEL.qrn)",
        )),
    }
}

/// Plans a head for a model.
pub(super) fn plan<'a>(
    checkpoint: &Checkpoint<'a>,
    model: &ModelSpec,
    options: &Options,
) -> Result<Plan<'a>, ConvertError> {
    let hint = hint(checkpoint)?;
    refused::by_tensors(checkpoint)?;
    let family = family::plan_head(&checkpoint.config, checkpoint, model);
    let mut family = family.map_err(|source| ConvertError::Family { origin: checkpoint.name.clone(), source })?;
    let (mut used, notes) = (Default::default(), std::mem::take(&mut family.warnings));
    let mut plan = Plan::of(checkpoint, family, &hint, Choice::head(options), &mut used, notes)?;
    compressed::set_aside(checkpoint, &hint.compressed, &mut used, &mut plan.notes);
    presence::left_over(checkpoint, &plan.family, &used, &mut plan.notes)?;
    Ok(plan)
}

/// Writes a planned head, after a look at which of its tensors are the model's.
#[expect(clippy::too_many_arguments, reason = "what both conversions have at hand")]
pub(super) fn make(
    checkpoint: &Checkpoint,
    mut plan: Plan,
    model: &ModelFile,
    out: &Path,
    whole: bool,
    options: &Options,
    threads: &Threads,
    progress: &mut dyn Progress,
    start: Instant,
) -> Result<Report, ConvertError> {
    threads.run(|| share(&mut plan, model));
    plan.notes.iter().for_each(|n| progress.note(n));
    let meta = Meta {
        provenance: plan.provenance(checkpoint, options.of_head()),
        spec: plan.family.spec.clone(),
        tokenizer: None,
        chat_template: None,
        generation: Generation::default(),
    };
    let made = Made::new(&plan, &meta, out, threads, progress)?;
    if whole {
        join(model, &made.file()?, out)?;
        let report = made.report(out, &plan, start);
        return Ok(report);
    }
    let report = made.report(out, &plan, start);
    made.writer.finish()?;
    Ok(report)
}

/// Leaves out the embedding and the head that are the model's: many heads come with copies of them.
fn share(plan: &mut Plan, model: &ModelFile) {
    let spec = &mut plan.family.spec;
    let Some(head) = spec.draft_head.as_mut().filter(|head| head.model_hidden == spec.hidden) else { return };
    let tied = if model.spec().tied_head { "embed" } else { "head" };
    for (target, of) in [("embed", "embed"), ("head", tied)] {
        let Some(at) = plan.jobs.iter().position(|job| job.target == target) else { continue };
        let same = match (&plan.jobs[at].data, model.tensor(of)) {
            (Data::Float { floats, .. } | Data::Rtn { floats, .. }, Some(view)) => alike(floats, &view),
            _ => false,
        };
        if !same || target == "head" && (head.mapped || model.spec().head_order) {
            continue;
        }
        let Job { origin, .. } = plan.jobs.remove(at);
        plan.notes.push(format!("{origin} is the model's own, but for rounding: it is not stored again"));
        match target {
            "embed" => head.shared_embed = true,
            _ => head.shared_head = true,
        }
    }
}

/// Whether two tables are the same but for what quantizing to 4 bits loses (a hundredth of the squares), by some rows.
fn alike(floats: &Floats, view: &TensorView) -> bool {
    const ROWS: usize = 1024;
    if (floats.n, floats.k) != (view.n, view.k) {
        return false;
    }
    let (mut off, mut all) = (0f64, 0f64);
    for (row, col) in (0..floats.n).step_by(floats.n.div_ceil(ROWS)).flat_map(|r| (0..floats.k).map(move |c| (r, c))) {
        let (ours, models) = (floats.at(row, col) as f64, view.at(row, col) as f64);
        off += (ours - models).powi(2);
        all += ours.powi(2);
    }
    off <= all / 32.0
}
