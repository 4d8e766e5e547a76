//! A converted model, as tests use it: logits of given tokens, and continuations.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::Arc,
};

use quern::engine::{Engine, EngineOptions, Event, Finish, Generator, Request};
use quern_convert::{Options, Report, convert};
use quern_kernels::{
    cpu::kv::{BLOCK, KvType},
    exec::{self, Activations, Chunk, ChunkOutput, Device, ExecOptions, Executor, Mask, Output, Plan},
    sample::SamplingParams,
};
use quern_models::ModelFile;

use super::Scratch;

/// A numeric mode of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Run {
    /// Nothing is rounded: f32 activations, f32 KV.
    Exact,
    /// int8 activations, f16 KV.
    Default,
    /// int8 activations, int8 KV.
    Small,
    /// int8 activations, fp8 KV.
    Fp8,
    /// On a GPU: nothing is rounded.
    GpuExact,
    /// On a GPU: f16 activations, f16 KV.
    GpuDefault,
    /// On a GPU: int8 activations, f16 KV.
    GpuInt8,
    /// On a GPU: f16 activations, fp8 KV.
    GpuFp8,
    /// So many layers on a GPU, the others on the CPU: nothing is rounded.
    SplitExact(usize),
    /// The same with each device's usual activations, f16 KV.
    SplitDefault(usize),
}

impl Run {
    pub fn activations(self) -> Option<Activations> {
        match self {
            Run::Exact | Run::GpuExact | Run::SplitExact(_) => Some(Activations::F32),
            Run::Default | Run::Small | Run::Fp8 | Run::GpuInt8 => Some(Activations::Int8),
            Run::GpuDefault | Run::GpuFp8 => Some(Activations::F16),
            Run::SplitDefault(_) => None,
        }
    }

    fn gpu_layers(self) -> Option<usize> {
        match self {
            Run::SplitExact(n) | Run::SplitDefault(n) => Some(n),
            _ => None,
        }
    }

    pub fn device(self) -> Device {
        match self {
            Run::Exact | Run::Default | Run::Small | Run::Fp8 => Device::Cpu,
            _ => Device::Cuda(0),
        }
    }

    /// An executor with so many blocks.
    pub fn executor(self, file: &Arc<ModelFile>, blocks: usize) -> Box<dyn Executor> {
        let (activations, kv) = (self.activations(), self.kv());
        let options = ExecOptions {
            device: self.device(),
            threads: 2,
            blocks,
            activations,
            kv,
            rows: 64,
            tree_blocks: 0,
            gpu_layers: self.gpu_layers(),
        };
        exec::open(file.clone(), options, |_| {}).unwrap()
    }

    pub fn kv(self) -> KvType {
        match self {
            Run::Exact | Run::GpuExact | Run::SplitExact(_) => KvType::F32,
            Run::Default | Run::GpuDefault | Run::GpuInt8 | Run::SplitDefault(_) => KvType::F16,
            Run::Small => KvType::Int8,
            Run::Fp8 | Run::GpuFp8 => KvType::Fp8,
        }
    }

    pub fn engine(self) -> EngineOptions {
        let (device, activations, kv) = (self.device(), self.activations(), self.kv());
        let gpu_layers = self.gpu_layers();
        EngineOptions { device, gpu_layers, threads: 2, activations, kv, ..EngineOptions::default() }
    }
}

/// Converts with everything kept; the file goes away with the scratch folder.
pub fn kept(source: &Path, scratch: &Scratch) -> (Report, Arc<ModelFile>) {
    let report = convert(source, &scratch.at("model.qrn"), &Options::default(), &mut ());
    let report = report.unwrap_or_else(|e| panic!("{}: {e}", source.display()));
    let file = ModelFile::open(&report.path).unwrap();
    file.verify().unwrap();
    (report, Arc::new(file))
}

/// A model at work on one sequence.
pub struct Sequence {
    executor: Box<dyn Executor>,
    blocks: Vec<u32>,
    computed: usize,
}

impl Sequence {
    pub fn new(file: &Arc<ModelFile>, run: Run, room: usize) -> Sequence {
        let blocks = room.div_ceil(BLOCK);
        Sequence { executor: run.executor(file, blocks), blocks: (0..blocks as u32).collect(), computed: 0 }
    }

    /// Logits after each of the next tokens, `[tokens, vocab]`.
    pub fn push(&mut self, tokens: &[u32]) -> Vec<f32> {
        let output = Output::Logits { from: 0 };
        let plan = Plan {
            chunks: vec![Chunk { tokens, start: self.computed, blocks: &self.blocks, mask: Mask::Causal, output }],
        };
        let ticket = self.executor.submit(&plan).unwrap();
        self.computed += tokens.len();
        match self.executor.collect(ticket).unwrap().remove(0) {
            ChunkOutput::Logits(logits) => logits,
            other => panic!("logits were asked, got {other:?}"),
        }
    }
}

/// Logits after each token, `[tokens, vocab]`, computed in one chunk.
pub fn logits(file: &Arc<ModelFile>, run: Run, tokens: &[u32]) -> Vec<f32> {
    Sequence::new(file, run, tokens.len()).push(tokens)
}

/// What a request gave.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Got {
    pub tokens: Vec<u32>,
    /// Bits of the logprobs of the chosen tokens.
    pub logprobs: Vec<u32>,
    /// Difference of the two likeliest tokens' logprobs, per token.
    pub gaps: Vec<f32>,
    pub finish: Option<Finish>,
}

/// Collects events into answers; `of[request]` is an index of the answers.
pub fn receive(events: Vec<Event>, answers: &mut [Got], of: impl Fn(u64) -> usize) {
    for event in events {
        match event {
            Event::Token { request, id, logprob, top } => {
                let got = &mut answers[of(request)];
                assert_eq!(got.finish, None, "a token after the end of request {request}");
                got.tokens.push(id);
                got.logprobs.extend(logprob.map(f32::to_bits));
                if let [first, second, ..] = top[..] {
                    got.gaps.push(first.1 - second.1);
                }
            }
            Event::Finished { request, finish } => {
                let before = answers[of(request)].finish.replace(finish);
                assert_eq!(before, None, "request {request} ended twice");
            }
            Event::Failed { request, error } => panic!("request {request}: {error}"),
            Event::Guessed { request, drafted, accepted } => {
                assert!(drafted > 0 && accepted <= drafted && answers[of(request)].finish.is_none());
            }
            Event::Started { .. } | Event::Prompt { .. } | Event::Embedding { .. } => {}
        }
    }
}

/// Answers all requests at once.
pub fn answer(engine: &mut dyn Generator, requests: &[Request]) -> Vec<Got> {
    let ids: Vec<u64> = requests.iter().map(|r| engine.add(r.clone()).unwrap()).collect();
    let mut answers = vec![Got::default(); requests.len()];
    loop {
        let mut events = vec![];
        let more = engine.step(&mut events).unwrap();
        receive(events, &mut answers, |id| ids.iter().position(|&i| i == id).unwrap());
        if !more {
            break;
        }
    }
    let open = answers.iter().position(|a| a.finish.is_none());
    assert_eq!(open, None, "an idle engine has ended every request");
    answers
}

/// Greedy continuations of exactly `count` tokens, whatever the model says, computed together.
pub fn greedy(file: &Arc<ModelFile>, run: Run, prompts: &[Vec<u32>], count: usize) -> Vec<Got> {
    let longest = prompts.iter().map(Vec::len).max().unwrap();
    let options = EngineOptions { sequences: prompts.len(), context: longest + count, ..run.engine() };
    let mut engine = Engine::new(file.clone(), options).unwrap();
    let request = |prompt: &Vec<u32>| Request {
        prompt: prompt.clone(),
        max_tokens: count,
        sampling: SamplingParams::greedy(),
        ignore_eos: true,
        logprobs: Some(2),
        ..Request::default()
    };
    answer(&mut engine, &prompts.iter().map(request).collect::<Vec<_>>())
}

/// Asserts that two samples, of texts and how often each came, can be of one distribution: chi-square of both against
/// their mean, cells of at least 10.
pub fn same_distribution(what: &str, a: &BTreeMap<Vec<u32>, u64>, b: &BTreeMap<Vec<u32>, u64>) {
    let (mut chi, mut cells, mut rest) = (0.0, 0, (0, 0));
    let keys: BTreeSet<_> = a.keys().chain(b.keys()).collect();
    let mut add = |a: u64, b: u64| {
        chi += (a as f64 - b as f64).powi(2) / (a + b) as f64;
        cells += 1;
    };
    for key in keys {
        let (a, b) = (a.get(key).copied().unwrap_or(0), b.get(key).copied().unwrap_or(0));
        if a + b >= 20 { add(a, b) } else { rest = (rest.0 + a, rest.1 + b) }
    }
    if rest.0 + rest.1 > 0 {
        add(rest.0, rest.1);
    }
    let free = f64::from(cells - 1);
    println!("{what}: chi-square {chi:.1} of {free} degrees of freedom");
    // Five standard deviations.
    assert!(free > 20.0 && chi < free + 5.0 * (2.0 * free).sqrt(), "{what}: {chi} of {free}");
}
