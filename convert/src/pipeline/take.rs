//! The tensors of one source module, in whatever format they are.
//!
//! Formats are asked in turn ([`Module::FORMATS`]); each says by the presence of its tensors whether the module is its own.
//! A new one is a function in that list.

use std::collections::BTreeSet;

use quern_models::{
    FloatType,
    family::{Rule, RuleKind, Take},
};

use super::job::{Data, Job};
use crate::{
    ConvertError, Options, Quant,
    import::{
        awq::{self, Packing},
        blocks::Blocks,
        compressed::Parts,
        config::{Hint, Method},
        float::Floats,
        gptq::{self, Gptq},
        order::{Arrange, Order},
        rtn, tokens,
    },
    source::{Checkpoint, Dtype, RawTensor},
};

/// What float tensors become.
#[derive(Clone, Copy)]
pub(super) struct Choice {
    linear: Quant,
    head: Quant,
    group: Option<usize>,
}

impl Choice {
    pub fn new(options: &Options, imported: bool) -> Choice {
        let head = match (options.lm_head, options.quant) {
            (Some(asked), _) => asked,
            (None, _) if imported => Quant::Keep,
            (None, Quant::Int4 | Quant::Int8) => Quant::Int8,
            (None, asked) => asked,
        };
        Choice { linear: options.quant, head, group: options.group }
    }

    /// For a head: all of its matrices alike, for they change only how often it guesses right.
    pub fn head(options: &Options) -> Choice {
        let quant = options.of_head();
        Choice { linear: quant, head: quant, group: options.group }
    }

    fn of(self, kind: RuleKind) -> Quant {
        match kind {
            RuleKind::Linear { .. } => self.linear,
            RuleKind::Embedding { .. } | RuleKind::Head { .. } => self.head,
            RuleKind::Table { .. } if self.linear == Quant::F16 => Quant::F16,
            RuleKind::Table { .. } | RuleKind::Router { .. } => Quant::Keep,
            RuleKind::Vector { .. } | RuleKind::OnePlus { .. } => Quant::Keep,
            RuleKind::Bias { .. } | RuleKind::Tokens { .. } => Quant::Keep,
        }
    }
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

/// What a format makes of a module: the numbers, the name for messages, and the method if it is a quantized one.
type Taken<'a> = (Data<'a>, String, Option<&'static str>);

/// A rule of the family, to be filled from the checkpoint.
pub(super) struct Module<'a, 'b> {
    pub checkpoint: &'b Checkpoint<'a>,
    pub rule: &'b Rule,
    pub hint: &'b Hint,
    pub choice: Choice,
    /// Names of all tensors taken so far.
    pub used: &'b mut BTreeSet<String>,
}

/// Whether a linear of the checkpoint comes with integers.
pub(super) fn is_quantized(checkpoint: &Checkpoint, rule: &Rule) -> bool {
    let has = |part: &str| checkpoint.tensors.get(&format!("{}.{part}", rule.source));
    let compressed = || Parts::new(checkpoint, &rule.source).present();
    let block = || has("weight").is_some_and(|raw| matches!(raw.dtype, Dtype::Block(_)));
    matches!(rule.kind, RuleKind::Linear { .. }) && (has("qweight").is_some() || block() || compressed())
}

/// A format: takes the tensors of a module if they are its own.
type Format<'a, 'b> = fn(&mut Module<'a, 'b>) -> Result<Option<Taken<'a>>, ConvertError>;

impl<'a, 'b> Module<'a, 'b> {
    /// Every format, in the order in which they are asked.
    const FORMATS: [Format<'a, 'b>; 4] = [Module::packed, Module::blocks, Module::compressed, Module::floats];

    /// The tensor of the output.
    pub fn take(mut self) -> Result<Job<'a>, ConvertError> {
        if let RuleKind::Tokens { n, known } = self.rule.kind {
            return self.tokens(n, known);
        }
        for format in Self::FORMATS {
            if let Some((data, origin, method)) = format(&mut self)? {
                let dims = self.wanted().iter().map(|&d| d as u64).collect();
                let (target, arrange) = (self.rule.target.clone(), Arrange::default());
                let part = self.rule.take.part.map(|(first, _)| (first, self.wanted()[0]));
                let mut job = Job { target, origin, dims, data, part, arrange, method };
                job.cut();
                return Ok(job);
            }
        }
        Err(ConvertError::Missing {
            origin: self.checkpoint.name.clone(),
            tensor: self.name(self.float()),
            what: format!("{} {:?}", self.rule.target, self.wanted()),
        })
    }

    /// Shape of the tensor of the output.
    fn wanted(&self) -> Vec<usize> {
        match self.rule.kind {
            RuleKind::Linear { n, k } | RuleKind::Embedding { n, k } => vec![n, k],
            RuleKind::Head { n, k } | RuleKind::Table { n, k } | RuleKind::Router { n, k } => vec![n, k],
            RuleKind::Vector { n } | RuleKind::OnePlus { n } => vec![n],
            RuleKind::Bias { n } | RuleKind::Tokens { n, .. } => vec![n],
        }
    }

    /// Shape of the module: of all its rows, where only some are wanted.
    fn dims(&self) -> Vec<usize> {
        let mut dims = self.wanted();
        dims[0] = self.rule.take.part.map_or(dims[0], |(_, all)| all);
        dims
    }

    /// The module's float tensor.
    fn float(&self) -> &'static str {
        if matches!(self.rule.kind, RuleKind::Bias { .. }) { "bias" } else { "weight" }
    }

    /// Name of a tensor of the module.
    fn name(&self, part: &str) -> String {
        format!("{}.{part}", self.rule.source)
    }

    /// A tensor of the module, if it is there.
    fn get(&self, part: &str) -> Option<&RawTensor<'a>> {
        self.checkpoint.tensors.get(&self.name(part))
    }

    /// Says that these tensors of the module have their place.
    fn uses(&mut self, parts: &[&str]) {
        self.used.extend(parts.iter().map(|part| format!("{}.{part}", self.rule.source)));
    }

    /// The model's tokens of a head's own.
    fn tokens(self, n: usize, known: usize) -> Result<Job<'a>, ConvertError> {
        let name = self.rule.source.clone();
        let raw = self.checkpoint.tensors.get(&name).ok_or_else(|| ConvertError::Missing {
            origin: self.checkpoint.name.clone(),
            tensor: name.clone(),
            what: format!("{} [{n}]", self.rule.target),
        })?;
        let ids = tokens::read(&name, raw, n, known, self.checkpoint.tensors.get("t2d"))?;
        self.used.insert(name.clone());
        Ok(Job {
            target: self.rule.target.clone(),
            origin: name,
            dims: vec![n as u64],
            data: Data::Tokens(ids),
            part: None,
            arrange: Arrange::default(),
            method: None,
        })
    }

    /// GPTQ and AWQ: codes in `qweight`.
    fn packed(&mut self) -> Result<Option<Taken<'a>>, ConvertError> {
        let (Some(raw), &[n, k]) = (self.get("qweight"), &self.dims()[..]) else { return Ok(None) };
        let (packed, hint) = (self.name("qweight"), self.hint);
        if self.get("weight").is_some() {
            return Err(ConvertError::tensor(&packed, "form", "packed codes or a float weight", "both"));
        }
        let awq = Packing::of(raw, self.get("scales"), [n, k], hint.packing).is_some();
        let by_shape = match hint.method {
            Some(Method::Gptq) if gptq::fits(raw, n, k) => Method::Gptq,
            _ if awq => Method::Awq,
            _ => Method::Gptq,
        };
        if let Some(said) = hint.method.filter(|&m| m != by_shape) {
            let expected = format!("{}, as {} says", said.name(), hint.file);
            let got = format!("{:?} like {}", raw.shape, by_shape.name());
            return Err(ConvertError::tensor(&packed, "layout", expected, got));
        }
        let source = &self.rule.source;
        let data = match by_shape {
            Method::Awq => {
                let (codes, read) = awq::open(self.checkpoint, source, n, k, hint)?;
                self.used.extend(read);
                Data::Codes(codes)
            }
            _ => {
                let tensor = Gptq::new(self.checkpoint, source, n, k, hint)?;
                self.uses(&["qweight", "qzeros", "scales", "g_idx"]);
                Data::Gptq(tensor)
            }
        };
        Ok(Some((data, self.rule.source.clone(), Some(by_shape.name()))))
    }

    /// GGUF's block types.
    fn blocks(&mut self) -> Result<Option<Taken<'a>>, ConvertError> {
        let (Some(raw), &[n, k]) = (self.get("weight"), &self.dims()[..]) else { return Ok(None) };
        let Dtype::Block(block) = raw.dtype else { return Ok(None) };
        let name = self.name("weight");
        if raw.shape != [n as u64, k as u64] {
            return Err(ConvertError::tensor(&name, "shape", format!("[{n}, {k}]"), format!("{:?}", raw.shape)));
        }
        let data = Data::Codes(Box::new(Blocks::new(&name, raw, block, n, k)?));
        self.uses(&["weight"]);
        Ok(Some((data, name, None)))
    }

    /// compressed-tensors, FP8 and FP4.
    fn compressed(&mut self) -> Result<Option<Taken<'a>>, ConvertError> {
        let &[n, k] = &self.dims()[..] else { return Ok(None) };
        let parts = Parts::new(self.checkpoint, &self.rule.source);
        let Some(codes) = parts.take(n, k, &self.hint.compressed)? else { return Ok(None) };
        let name = self.name(if self.get("weight").is_some() { "weight" } else { "weight_packed" });
        if let Some(said) = self.hint.method.filter(|m| !m.is_compressed()) {
            let expected = format!("{}, as {} says", said.name(), self.hint.file);
            return Err(ConvertError::tensor(&name, "layout", expected, "that of compressed-tensors or FP8"));
        }
        self.used.extend(parts.names());
        let method = self.hint.method.unwrap_or(Method::Compressed).name();
        Ok(Some((Data::Codes(codes), name, Some(method))))
    }

    /// Floats, kept or quantized by us.
    fn floats(&mut self) -> Result<Option<Taken<'a>>, ConvertError> {
        let part = self.float();
        let Some(raw) = self.get(part) else { return Ok(None) };
        let (name, quant) = (self.name(part), self.choice.of(self.rule.kind));
        // GGUF files have outputs first, whatever the model.
        let take = Take { transposed: self.rule.take.transposed && !self.checkpoint.gguf, ..self.rule.take };
        let floats = Floats::new(&name, raw, &self.wanted(), take)?;
        let data = match self.rule.kind {
            RuleKind::OnePlus { .. } if !self.checkpoint.gguf => Data::OnePlus(floats),
            _ => float(floats, quant, self.choice.group),
        };
        self.uses(&[part]);
        Ok(Some((data, name, None)))
    }
}

/// One decision for all GPTQ tensors of a model; see [`gptq::convention`].
pub(super) fn settle_zeros(jobs: &mut [Job], hint: &Hint) -> Result<(), ConvertError> {
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
    for job in jobs.iter_mut().filter(|j| matches!(j.data, Data::Gptq(_))) {
        let (name, pattern) = patterns.next().expect("one pattern per GPTQ tensor");
        if let Data::Gptq(mut t) = std::mem::replace(&mut job.data, Data::Order(Order::default())) {
            t.set_convention(name, convention, *pattern)?;
            job.data = Data::Codes(Box::new(t));
            job.cut();
        }
    }
    Ok(())
}
