//! From a checkpoint on disk to a verified file: plan everything, stream tensor by tensor, compare, name.
//!
//! At most one tensor is in memory beside the maps. The file takes its name only after the comparison.

mod head;
mod job;
mod orders;
mod presence;
mod take;

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    time::Instant,
};

use quern_models::{
    FileWriter, FloatType, Meta, ModelFile, ModelSpec, TensorPlan,
    family::{self, FamilyPlan},
};
use serde_json::{Map, Value, json};

pub use self::head::convert_head;
pub(crate) use self::job::{Data, Job};
use self::take::{Choice, Module};
use crate::{
    ConvertError, Options, Phase, Progress, Quant, Report, Row, Step, Verified,
    import::{compressed, config::Hint, refused},
    source::{Checkpoint, Source},
    threads::Threads,
};

/// Converts `source` (a directory, a .safetensors or a .gguf file) into `out`, with the head that is in it or that the
/// options name.
///
/// `out` appears only when every element has been compared with the source; an error or an
/// interruption leaves what was there before.
pub fn convert(
    source: &Path,
    out: &Path,
    options: &Options,
    progress: &mut dyn Progress,
) -> Result<Report, ConvertError> {
    let start = Instant::now();
    asked(out, options)?;
    let files = open(source, out)?;
    let checkpoint = files.read()?;
    let beside = options.head.as_deref().map(|path| head::open(path, out)).transpose()?;
    let beside = beside.as_ref().map(Source::read).transpose()?;
    let threads = Threads::new()?;
    let mut plan = threads.run(|| Plan::new(&checkpoint, options))?;
    let mut head = plan.head.take().map(|plan| (&checkpoint, *plan));
    if let Some(beside) = &beside {
        if head.is_some() {
            plan.notes.push("the source's own head is left out for the one of --head".into());
        }
        head = Some((beside, threads.run(|| head::plan(beside, &plan.family.spec, options))?));
    }
    plan.notes.iter().for_each(|n| progress.note(n));

    let meta = Meta {
        provenance: plan.provenance(&checkpoint, options.quant),
        spec: plan.family.spec.clone(),
        tokenizer: checkpoint.tokenizer.clone(),
        chat_template: checkpoint.chat_template.clone(),
        generation: checkpoint.generation.clone(),
    };
    let made = Made::new(&plan, &meta, out, &threads, progress)?;
    let head = match head {
        None => {
            let report = made.report(out, &plan, start);
            made.writer.finish()?;
            return Ok(report);
        }
        Some((of, plan)) => head::make(of, plan, &made.file()?, out, true, options, &threads, progress, start)?,
    };
    Ok(Report { head: Some(Box::new(head)), ..made.report(out, &plan, start) })
}

/// The spec of the model in a source, as [`convert`] plans it, before anything is read of its tensors but their names and
/// shapes.
pub fn spec_of(source: &Path) -> Result<ModelSpec, ConvertError> {
    let files = Source::open(source)?;
    Ok(family_of(&files.read()?)?.spec)
}

/// What a checkpoint of a model has; refuses what is none.
fn family_of(checkpoint: &Checkpoint) -> Result<FamilyPlan, ConvertError> {
    refused::by_tensors(checkpoint)?;
    head::refuse(checkpoint)?;
    let family = family::plan(&checkpoint.config, checkpoint);
    family.map_err(|source| ConvertError::Family { origin: checkpoint.name.clone(), source })
}

/// Checks what was asked for.
fn asked(out: &Path, options: &Options) -> Result<(), ConvertError> {
    // A link that leads nowhere is there too.
    if out.symlink_metadata().is_ok() && !options.force {
        return Err(ConvertError::Exists { path: out.into() });
    }
    if let Some(group) = options.group.filter(|g| *g == 0 || *g > 1 << 16 || g % 32 != 0) {
        return Err(ConvertError::unsupported(
            format!("a group of {group} columns"),
            "give a multiple of 32 up to 65536, such as 32, 64 or 128",
        ));
    }
    Ok(())
}

/// Opens a source that `out` is no part of.
fn open(source: &Path, out: &Path) -> Result<Source, ConvertError> {
    let files = Source::open(source)?;
    if let Ok(there) = out.canonicalize()
        && files.paths().iter().any(|p| p.canonicalize().is_ok_and(|p| p == there))
    {
        return Err(ConvertError::OwnSource { path: out.into() });
    }
    Ok(files)
}

/// A file that is written and compared, but has no name yet.
struct Made {
    writer: FileWriter,
    temp: PathBuf,
    file_bytes: u64,
    verified: Verified,
}

impl Made {
    fn new(
        plan: &Plan,
        meta: &Meta,
        out: &Path,
        threads: &Threads,
        progress: &mut dyn Progress,
    ) -> Result<Made, ConvertError> {
        let plans: Vec<TensorPlan> = plan.jobs.iter().map(Job::plan).collect();
        let mut writer = FileWriter::create(out, meta, plans)?;
        let mut pass = Pass::new(&plan.jobs, Phase::Write);
        for job in &plan.jobs {
            go_on(progress)?;
            threads.run(|| job.write(&mut writer))?;
            pass.done(job, progress);
        }
        let temp = writer.seal()?.to_path_buf();
        let mut verified = Verified::default();
        let file = ModelFile::open(&temp)?;
        let mut pass = Pass::new(&plan.jobs, Phase::Verify);
        for job in &plan.jobs {
            go_on(progress)?;
            let view = file.tensor(&job.target).expect("the writer's plan has every job's tensor");
            verified += threads.run(|| job.verify(&view))?;
            pass.done(job, progress);
        }
        Ok(Made { writer, temp, file_bytes: file.file_len(), verified })
    }

    fn file(&self) -> Result<ModelFile, ConvertError> {
        Ok(ModelFile::open(&self.temp)?)
    }

    fn report(&self, out: &Path, plan: &Plan, start: Instant) -> Report {
        Report {
            path: out.into(),
            method: plan.method,
            rows: rows(&plan.jobs),
            file_bytes: self.file_bytes,
            verified: self.verified,
            seconds: start.elapsed().as_secs_f64(),
            head: None,
        }
    }
}

/// An error if the caller wants to stop; dropping the writer then removes the temporary file.
pub(crate) fn go_on(progress: &dyn Progress) -> Result<(), ConvertError> {
    if progress.cancelled() { Err(ConvertError::Interrupted) } else { Ok(()) }
}

/// Everything decided before the first byte is written.
pub(crate) struct Plan<'a> {
    pub family: FamilyPlan,
    pub jobs: Vec<Job<'a>>,
    method: &'static str,
    tools: Vec<String>,
    notes: Vec<String>,
    /// Of a head in the same checkpoint.
    head: Option<Box<Plan<'a>>>,
}

impl<'a> Plan<'a> {
    pub fn new(checkpoint: &Checkpoint<'a>, options: &Options) -> Result<Plan<'a>, ConvertError> {
        let hint = hint(checkpoint)?;
        let mut family = family_of(checkpoint)?;
        let mut notes = [checkpoint.notes.clone(), std::mem::take(&mut family.warnings)].concat();
        let mut used = BTreeSet::new();
        presence::tie_head(checkpoint, &mut family, &mut used, &mut notes);
        let imported = family.rules.iter().any(|r| take::is_quantized(checkpoint, r));
        let head = family.head.take();
        let mut plan = Plan::of(checkpoint, family, &hint, Choice::new(options, imported), &mut used, notes)?;
        if let Some(head) = head {
            let head = Plan::of(checkpoint, *head, &hint, Choice::head(options), &mut used, vec![])?;
            plan.head = Some(Box::new(head));
        }
        compressed::set_aside(checkpoint, &hint.compressed, &mut used, &mut plan.notes);
        presence::left_over(checkpoint, &plan.family, &used, &mut plan.notes)?;
        if imported && options.quant != Quant::Keep {
            plan.notes.push(
                "the source is quantized already: its integers are kept, --quant applies to float weights only".into(),
            );
        }
        if let (Some(method), true) = (hint.method, plan.jobs.iter().all(|j| j.method.is_none())) {
            plan.notes.push(format!("{} says {}, but no tensor is quantized", hint.file, method.name()));
        }
        Ok(plan)
    }

    /// Takes every tensor that the rules name; says in `used` which they are.
    fn of(
        checkpoint: &Checkpoint<'a>,
        mut family: FamilyPlan,
        hint: &Hint,
        choice: Choice,
        used: &mut BTreeSet<String>,
        mut notes: Vec<String>,
    ) -> Result<Plan<'a>, ConvertError> {
        let mut jobs = vec![];
        for rule in &family.rules {
            jobs.push(Module { checkpoint, rule, hint, choice, used: &mut *used }.take()?);
        }
        let small = |j: &&Job| matches!(&j.data, Data::Rtn { shape, .. } if shape.scale == FloatType::F32);
        if let Some(first) = jobs.iter().find(small) {
            notes.push(format!(
                "{} tensor(s), the first is {}, have weights too small for f16 scales: their scales are f32",
                jobs.iter().filter(small).count(),
                first.origin
            ));
        }
        let found = jobs.iter().find_map(|j| j.method);
        take::settle_zeros(&mut jobs, hint)?;
        notes.extend(orders::settle(&mut jobs, &mut family.spec));
        let wider = orders::wider(&jobs);
        notes.extend(wider.iter().map(|(what, tensors, share)| {
            format!("{tensors} tensor(s) have {what}: the file is {share:.0} % larger for it")
        }));
        let method = if checkpoint.gguf { "gguf" } else { found.unwrap_or("float") };
        Ok(Plan { family, jobs, method, tools: hint.tools.clone(), notes, head: None })
    }

    fn provenance(&self, checkpoint: &Checkpoint, quant: Quant) -> Value {
        let ints = self.jobs.iter().find_map(|j| match (j.codes(), j.scheme().coded()) {
            (codes, Some((bits, group))) if j.dims.len() == 2 && j.target.contains('.') => {
                Some((codes.map_or(bits, |t| t.source_bits()), group))
            }
            _ => None,
        });
        let mut all = json!({
            "source": checkpoint.name,
            "method": self.method,
            "quern": env!("CARGO_PKG_VERSION"),
        });
        let mut put = |key: &str, value: Option<Value>| {
            if let Some(value) = value {
                all[key] = value;
            }
        };
        put("model", checkpoint.model.clone().map(Value::from));
        put("licence", checkpoint.licence.clone().map(Value::from));
        put("bits", ints.map(|i| i.0.into()));
        put("group", ints.map(|i| i.1.into()));
        let wider = orders::wider(&self.jobs);
        let wider = wider.iter().map(|(what, tensors, share)| format!("{tensors} x {what} (+{share:.0} %)"));
        put("wider", Some(wider.collect::<Vec<_>>()).filter(|w| !w.is_empty()).map(Value::from));
        put("tools", Some(self.tools.clone()).filter(|t| !t.is_empty()).map(Value::from));
        let made = self.jobs.iter().any(|j| matches!(j.data, Data::Rtn { .. }));
        put("quantizer", made.then(|| json!({ "name": "rtn", "scale": "signed max / lowest code" })));
        let fewer = |j: &Job| j.codes().filter(|t| t.source_bits() != t.shape().bits).map(|t| t.source_bits());
        let fewer = self.jobs.iter().filter_map(|j| Some((j.target.clone(), fewer(j)?.into())));
        put("source_bits", Some(fewer.collect::<Map<_, _>>()).filter(|f| !f.is_empty()).map(Value::from));
        put("config", Some(unquantized(&checkpoint.config)).filter(Value::is_object));
        put("asked", Some(format!("{quant:?}").to_lowercase().into()));
        all
    }
}

/// What the checkpoint says about how it is quantized.
fn hint(checkpoint: &Checkpoint) -> Result<Hint, ConvertError> {
    match &checkpoint.quant_config {
        Some((file, config)) => Hint::new(file, config),
        None => Ok(Hint::default()),
    }
}

/// The config that an export builds on: all but what says how the tensors were packed.
fn unquantized(config: &Value) -> Value {
    let mut config = config.clone();
    if let Some(map) = config.as_object_mut() {
        map.shift_remove("quantization_config");
        map.values_mut().filter_map(Value::as_object_mut).for_each(|m| drop(m.shift_remove("quantization_config")));
    }
    config
}

/// Counts tensors and bytes of one pass.
pub(crate) struct Pass {
    phase: Phase,
    tensors: usize,
    tensors_done: usize,
    bytes: u64,
    bytes_done: u64,
}

impl Pass {
    pub fn new(jobs: &[Job], phase: Phase) -> Pass {
        Pass { phase, tensors: jobs.len(), tensors_done: 0, bytes: jobs.iter().map(Job::bytes).sum(), bytes_done: 0 }
    }

    pub fn done(&mut self, job: &Job, progress: &mut dyn Progress) {
        self.tensors_done += 1;
        self.bytes_done += job.bytes();
        progress.step(&Step {
            phase: self.phase,
            tensor: &job.target,
            tensors_done: self.tensors_done,
            tensors: self.tensors,
            bytes_done: self.bytes_done,
            bytes: self.bytes,
        });
    }
}

fn rows(jobs: &[Job]) -> Vec<Row> {
    let mut rows: Vec<Row> = vec![];
    for job in jobs {
        let scheme = job.scheme().to_string();
        let (weights, bytes) = (job.weights(), job.bytes());
        match rows.iter_mut().find(|r| r.scheme == scheme) {
            Some(row) => {
                row.tensors += 1;
                row.weights += weights;
                row.bytes += bytes;
            }
            None => rows.push(Row { scheme, tensors: 1, weights, bytes }),
        }
    }
    rows.sort_by_key(|r| std::cmp::Reverse(r.bytes));
    rows
}
