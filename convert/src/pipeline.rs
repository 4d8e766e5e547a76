//! From a checkpoint on disk to a verified file: plan everything, stream tensor by tensor, compare, name.
//!
//! At most one tensor is in memory beside the maps. The file takes its name only after the comparison.

use std::{collections::BTreeSet, path::Path, time::Instant};

use quern_models::{
    FileWriter, FloatType, Meta, ModelFile, Scheme, TensorPlan, TensorView,
    family::{self, FamilyPlan, Rule, RuleKind},
};
use serde_json::{Value, json};

use crate::{
    ConvertError, Options, Phase, Progress, Quant, Report, Row, Step, Verified,
    import::{
        IntShape, Integers,
        awq::Awq,
        blocks::Blocks,
        config::{Hint, Method},
        float::Floats,
        gptq::{self, Gptq},
        rtn::{self, Rtn},
    },
    pack::pack,
    source::{Checkpoint, Dtype, Source},
    threads::Threads,
    verify,
};

/// Converts `source` (a directory, a .safetensors or a .gguf file) into `out`.
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
    let files = Source::open(source)?;
    if let Ok(there) = out.canonicalize()
        && files.paths().iter().any(|p| p.canonicalize().is_ok_and(|p| p == there))
    {
        return Err(ConvertError::OwnSource { path: out.into() });
    }
    let checkpoint = files.read()?;
    let threads = Threads::new()?;
    let plan = threads.run(|| Plan::new(&checkpoint, options))?;
    plan.notes.iter().for_each(|n| progress.note(n));

    let meta = Meta {
        provenance: plan.provenance(&checkpoint, options),
        spec: plan.family.spec.clone(),
        tokenizer: checkpoint.tokenizer.clone(),
        chat_template: checkpoint.chat_template.clone(),
        generation: checkpoint.generation.clone(),
    };
    let plans: Vec<TensorPlan> = plan.jobs.iter().map(Job::plan).collect();
    let mut writer = FileWriter::create(out, &meta, plans)?;
    let mut pass = Pass::new(&plan.jobs, Phase::Write);
    for job in &plan.jobs {
        go_on(progress)?;
        threads.run(|| job.write(&mut writer))?;
        pass.done(job, progress);
    }
    let temp = writer.seal()?.to_path_buf();
    let mut verified = Verified::default();
    let file_bytes;
    {
        let file = ModelFile::open(&temp)?;
        file_bytes = file.file_len();
        let mut pass = Pass::new(&plan.jobs, Phase::Verify);
        for job in &plan.jobs {
            go_on(progress)?;
            let view = file.tensor(&job.target).expect("the writer's plan has every job's tensor");
            verified += threads.run(|| job.verify(&view))?;
            pass.done(job, progress);
        }
    }
    writer.finish()?;
    let (rows, seconds) = (rows(&plan.jobs), start.elapsed().as_secs_f64());
    Ok(Report { path: out.into(), method: plan.method, rows, file_bytes, verified, seconds })
}

/// An error if the caller wants to stop; dropping the writer then removes the temporary file.
fn go_on(progress: &dyn Progress) -> Result<(), ConvertError> {
    if progress.cancelled() { Err(ConvertError::Interrupted) } else { Ok(()) }
}

/// Everything decided before the first byte is written.
struct Plan<'a> {
    family: FamilyPlan,
    jobs: Vec<Job<'a>>,
    method: &'static str,
    tools: Vec<String>,
    notes: Vec<String>,
}

/// One tensor of the output.
struct Job<'a> {
    /// Our name.
    target: String,
    /// The source's name, for messages.
    origin: String,
    dims: Vec<u64>,
    data: Data<'a>,
    /// How it was quantized, if it was.
    method: Option<&'static str>,
}

/// Where a tensor's numbers come from.
enum Data<'a> {
    Gptq(Gptq<'a>),
    /// Any other tensor of codes.
    Codes(Box<dyn Integers + 'a>),
    /// Stored as `stored`: the source's type or f16.
    Float {
        floats: Floats<'a>,
        stored: FloatType,
    },
    /// Quantized by us.
    Rtn {
        floats: Floats<'a>,
        shape: IntShape,
    },
}

impl<'a> Plan<'a> {
    fn new(checkpoint: &Checkpoint<'a>, options: &Options) -> Result<Plan<'a>, ConvertError> {
        let hint = match &checkpoint.quant_config {
            Some((file, config)) => Hint::new(file, config)?,
            None => Hint::default(),
        };
        let family = family::plan(&checkpoint.config);
        let mut family = family.map_err(|source| ConvertError::Family { origin: checkpoint.name.clone(), source })?;
        let mut notes = [checkpoint.notes.clone(), std::mem::take(&mut family.warnings)].concat();
        let mut used = BTreeSet::new();
        tie_head(checkpoint, &mut family, &mut used, &mut notes);
        let quantized = |r: &Rule| {
            let block = weight(checkpoint, r).is_some_and(|(_, dtype)| matches!(dtype, Dtype::Block(_)));
            block || checkpoint.tensors.contains_key(&format!("{}.qweight", r.source))
        };
        let imported = family.rules.iter().filter(|r| matches!(r.kind, RuleKind::Linear { .. })).any(quantized);
        let choice = Choice::new(options, imported);
        let mut jobs = vec![];
        for rule in &family.rules {
            jobs.push(job(checkpoint, rule, &hint, choice, &mut used)?);
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
        settle_zeros(&mut jobs, &hint)?;
        left_over(checkpoint, &family, &used)?;
        if imported && options.quant != Quant::Keep {
            notes.push(
                "the source is quantized already: its integers are kept, --quant applies to float weights only".into(),
            );
        }
        if let (Some(method), None) = (hint.method, found) {
            notes.push(format!("{} says {}, but no tensor is quantized", hint.file, method.name()));
        }
        let method = if checkpoint.gguf { "gguf" } else { found.unwrap_or("float") };
        Ok(Plan { family, jobs, method, tools: hint.tools, notes })
    }

    fn provenance(&self, checkpoint: &Checkpoint, options: &Options) -> Value {
        let ints = self.jobs.iter().find_map(|j| match (j.dims.len(), j.scheme()) {
            (2, Scheme::Int { bits, group, zero, .. }) if j.target.contains('.') => Some((bits, group, zero)),
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
        put("tools", Some(self.tools.clone()).filter(|t| !t.is_empty()).map(Value::from));
        let made = self.jobs.iter().any(|j| matches!(j.data, Data::Rtn { .. }));
        put("quantizer", made.then(|| json!({ "name": "rtn", "scale": "signed max / lowest code" })));
        put("asked", Some(format!("{:?}", options.quant).to_lowercase().into()));
        all
    }
}

/// What float tensors become.
#[derive(Clone, Copy)]
struct Choice {
    linear: Quant,
    head: Quant,
    group: Option<usize>,
}

impl Choice {
    fn new(options: &Options, imported: bool) -> Choice {
        let head = match (options.lm_head, options.quant) {
            (Some(asked), _) => asked,
            (None, _) if imported => Quant::Keep,
            (None, Quant::Int4 | Quant::Int8) => Quant::Int8,
            (None, asked) => asked,
        };
        Choice { linear: options.quant, head, group: options.group }
    }
}

/// Rule 8 of the import rules: presence decides whether the head is the embedding.
fn tie_head(checkpoint: &Checkpoint, family: &mut FamilyPlan, used: &mut BTreeSet<String>, notes: &mut Vec<String>) {
    let find = |head: bool| {
        let rule = family.rules.iter().find(|r| match r.kind {
            RuleKind::Head { .. } => head,
            RuleKind::Embedding { .. } => !head,
            _ => false,
        });
        rule.map(|r| r.source.clone())
    };
    let (Some(head), Some(embed)) = (find(true), find(false)) else { return };
    let prefix = format!("{head}.");
    let present = checkpoint.tensors.keys().any(|name| name.starts_with(&prefix) && !name.ends_with(".bias"));
    if !present || !family.spec.tied_head {
        // Absent and not tied is reported as a missing tensor.
        family.set_tied(!present && family.spec.tied_head);
        return;
    }
    let (head, embed) = (format!("{head}.weight"), format!("{embed}.weight"));
    let same = match (checkpoint.tensors.get(&head), checkpoint.tensors.get(&embed)) {
        (Some(h), Some(e)) => h.dtype == e.dtype && h.shape == e.shape && h.bytes == e.bytes,
        _ => false,
    };
    if same {
        used.insert(head);
    } else if checkpoint.tensors.contains_key(&head) {
        notes.push(format!(
            "the config ties the head to the embedding, but {head} differs from it: kept as its own tensor"
        ));
    }
    family.set_tied(same);
}

/// Name and type of a rule's float (or block) tensor.
fn weight(checkpoint: &Checkpoint, rule: &Rule) -> Option<(String, Dtype)> {
    let name = format!("{}.weight", rule.source);
    checkpoint.tensors.get(&name).map(|raw| (name, raw.dtype))
}

/// Takes the tensors of one rule.
fn job<'a>(
    checkpoint: &Checkpoint<'a>,
    rule: &Rule,
    hint: &Hint,
    choice: Choice,
    used: &mut BTreeSet<String>,
) -> Result<Job<'a>, ConvertError> {
    let (shape, quant) = match rule.kind {
        RuleKind::Linear { n, k } => (vec![n, k], choice.linear),
        RuleKind::Embedding { n, k } | RuleKind::Head { n, k } => (vec![n, k], choice.head),
        RuleKind::Vector { n } => (vec![n], Quant::Keep),
    };
    let dims = shape.iter().map(|&d| d as u64).collect();
    let packed = format!("{}.qweight", rule.source);
    if let (Some(raw), &[n, k]) = (checkpoint.tensors.get(&packed), &shape[..]) {
        for part in ["qweight", "qzeros", "scales", "g_idx"] {
            used.insert(format!("{}.{part}", rule.source));
        }
        if checkpoint.tensors.contains_key(&format!("{}.weight", rule.source)) {
            return Err(ConvertError::tensor(&packed, "form", "packed codes or a float weight", "both"));
        }
        let by_shape = if raw.shape.first() == Some(&(k as u64)) { Method::Awq } else { Method::Gptq };
        if let Some(said) = hint.method.filter(|&m| m != by_shape) {
            let (expected, got) = (
                format!("{}, as {} says", said.name(), hint.file),
                format!("{:?} like {}", raw.shape, by_shape.name()),
            );
            return Err(ConvertError::tensor(&packed, "layout", expected, got));
        }
        let data = match by_shape {
            Method::Gptq => Data::Gptq(Gptq::new(checkpoint, &rule.source, n, k, hint)?),
            Method::Awq => Data::Codes(Box::new(Awq::new(checkpoint, &rule.source, n, k, hint)?)),
        };
        let method = Some(by_shape.name());
        return Ok(Job { target: rule.target.clone(), origin: rule.source.clone(), dims, data, method });
    }
    let Some((name, dtype)) = weight(checkpoint, rule) else {
        return Err(ConvertError::Missing {
            origin: checkpoint.name.clone(),
            tensor: format!("{}.weight", rule.source),
            what: format!("{} {shape:?}", rule.target),
        });
    };
    let raw = &checkpoint.tensors[&name];
    used.insert(name.clone());
    let data = match (dtype, &shape[..]) {
        (Dtype::Block(block), &[n, k]) => {
            if raw.shape != [n as u64, k as u64] {
                return Err(ConvertError::tensor(&name, "shape", format!("[{n}, {k}]"), format!("{:?}", raw.shape)));
            }
            Data::Codes(Box::new(Blocks::new(&name, raw, block, n, k)?))
        }
        _ => float(Floats::new(&name, raw, &shape)?, quant, choice.group),
    };
    Ok(Job { target: rule.target.clone(), origin: name, dims, data, method: None })
}

fn float(floats: Floats, quant: Quant, asked: Option<usize>) -> Data {
    let rtn = |bits, usual| {
        let shape = rtn::shape(&floats, bits, rtn::group_for(floats.k, asked.unwrap_or(usual)));
        Data::Rtn { floats: floats.clone(), shape }
    };
    match quant {
        Quant::Keep => Data::Float { stored: floats.kind, floats },
        Quant::F16 => Data::Float { stored: FloatType::F16, floats },
        Quant::Int4 => rtn(4, 64),
        Quant::Int8 => rtn(8, 128),
    }
}

/// One decision for all GPTQ tensors of a model; see [`gptq::convention`].
fn settle_zeros(jobs: &mut [Job], hint: &Hint) -> Result<(), ConvertError> {
    let patterns: Vec<(String, gptq::Pattern)> = jobs
        .iter()
        .filter_map(|j| match &j.data {
            Data::Gptq(t) => Some((j.origin.clone(), t.pattern())),
            _ => None,
        })
        .collect();
    let named: Vec<_> = patterns.iter().map(|(name, p)| (name.as_str(), *p)).collect();
    let convention = gptq::convention(&named, hint)?;
    let mut patterns = patterns.iter();
    for job in jobs {
        if let Data::Gptq(t) = &mut job.data {
            let (name, pattern) = patterns.next().expect("one pattern per GPTQ tensor");
            t.set_convention(name, convention, *pattern)?;
        }
    }
    Ok(())
}

/// Every tensor must have been used, but for what carries nothing.
fn left_over(checkpoint: &Checkpoint, family: &FamilyPlan, used: &BTreeSet<String>) -> Result<(), ConvertError> {
    let harmless = |name: &str| {
        let raw = &checkpoint.tensors[name];
        let zero_bias = name.ends_with(".bias") && matches!(raw.dtype, Dtype::Float(t) if all_zero(t, raw.bytes));
        zero_bias || family.ignore.iter().any(|end| name.ends_with(end))
    };
    let rest: Vec<&String> = checkpoint.tensors.keys().filter(|n| !used.contains(*n) && !harmless(n)).collect();
    match rest.first() {
        None => Ok(()),
        Some(first) => Err(ConvertError::LeftOver {
            origin: checkpoint.name.clone(),
            family: family.spec.family.clone(),
            first: first.to_string(),
            count: rest.len(),
        }),
    }
}

fn all_zero(kind: FloatType, bytes: &[u8]) -> bool {
    (0..bytes.len() / kind.size()).all(|i| kind.read(bytes, i) == 0.0)
}

impl Job<'_> {
    fn scheme(&self) -> Scheme {
        match &self.data {
            Data::Gptq(t) => t.shape().scheme(),
            Data::Codes(t) => t.shape().scheme(),
            Data::Float { stored, .. } => Scheme::Float(*stored),
            Data::Rtn { shape, .. } => shape.scheme(),
        }
    }

    fn plan(&self) -> TensorPlan {
        TensorPlan { name: self.target.clone(), dims: self.dims.clone(), scheme: self.scheme() }
    }

    fn weights(&self) -> u64 {
        self.dims.iter().product()
    }

    fn bytes(&self) -> u64 {
        let (n, k) = if let [n, k] = self.dims[..] { (n, k) } else { (1, self.weights()) };
        self.scheme().planes(n, k).map_or(0, |p| p.total)
    }

    fn write(&self, writer: &mut FileWriter) -> Result<(), ConvertError> {
        match &self.data {
            Data::Gptq(t) => writer.write(&pack(t))?,
            Data::Codes(t) => writer.write(&pack(&**t))?,
            Data::Float { floats, stored } if *stored == floats.kind => writer.write(&floats.kept(&self.origin)?)?,
            Data::Float { floats, .. } => writer.write(&floats.rounded(&self.origin)?)?,
            Data::Rtn { floats, shape } => writer.write(&pack(&Rtn::new(&self.origin, floats.clone(), *shape)?))?,
        }
        Ok(())
    }

    fn verify(&self, view: &TensorView) -> Result<Verified, ConvertError> {
        match &self.data {
            Data::Gptq(t) => verify::integers(&self.target, t, view),
            Data::Codes(t) => verify::integers(&self.target, &**t, view),
            Data::Float { floats, stored } => verify::floats(&self.target, floats, *stored, view),
            Data::Rtn { floats, shape } => verify::nearest(&self.target, floats, *shape, view),
        }
    }
}

/// Counts tensors and bytes of one pass.
struct Pass {
    phase: Phase,
    tensors: usize,
    tensors_done: usize,
    bytes: u64,
    bytes_done: u64,
}

impl Pass {
    fn new(jobs: &[Job], phase: Phase) -> Pass {
        Pass { phase, tensors: jobs.len(), tensors_done: 0, bytes: jobs.iter().map(Job::bytes).sum(), bytes_done: 0 }
    }

    fn done(&mut self, job: &Job, progress: &mut dyn Progress) {
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
