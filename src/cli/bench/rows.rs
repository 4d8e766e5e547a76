//! Measuring one row.

use std::{error::Error, fmt, time::Instant};

use quern_kernels::{
    cpu::kv::{BLOCK, KvType},
    exec::{Chunk, Executor, Mask, Output, Plan, block_bytes},
    sample::SamplingParams,
};
use quern_models::{ModelFile, TensorInfo, spec::Mlp};

/// One thing to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Test {
    /// Generate, or compute a prompt.
    pub generate: bool,
    /// Tokens of the prompt, or of the generation per sequence.
    pub tokens: usize,
    /// Tokens in the cache before.
    pub depth: usize,
    /// Sequences at once.
    pub batch: usize,
}

/// A measured row.
#[derive(Debug)]
pub struct Measured {
    /// What was measured.
    pub test: Test,
    /// Threads used.
    pub threads: usize,
    /// Numeric mode and instruction set.
    pub mode: String,
    /// Median tokens per second.
    pub median: f64,
    /// Standard deviation of the samples.
    pub deviation: f64,
    /// Tokens per second of each repetition.
    pub samples: Vec<f64>,
    /// Bytes of weights and cache read per second; generation only.
    pub bytes_per_second: Option<f64>,
    /// Multiply-adds of linear layers per second.
    pub macs_per_second: f64,
    /// Read bandwidth of the machine, bytes per second, measured in the same run; filled in after the tests.
    pub bandwidth: f64,
    /// int8 multiply-adds per second that the instruction set does on registers alone; likewise.
    pub peak: f64,
    /// Most memory this process ever had resident, the mapped file included.
    pub peak_memory: u64,
}

impl fmt::Display for Test {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.generate { "tg" } else { "pp" }, self.tokens)?;
        if self.depth > 0 {
            write!(f, " @ d{}", self.depth)?;
        }
        if self.batch > 1 {
            write!(f, " x {}", self.batch)?;
        }
        Ok(())
    }
}

impl Test {
    /// Blocks of one sequence.
    fn blocks_each(&self) -> usize {
        (self.depth + self.tokens).div_ceil(BLOCK)
    }

    /// KV blocks the test needs.
    pub fn blocks(&self) -> usize {
        self.blocks_each() * self.batch
    }
}

/// Tokens of one step of a prompt.
pub const STEP: usize = 512;

/// Runs a test `repetitions` times after warming up.
pub fn measure(
    executor: &mut dyn Executor,
    file: &ModelFile,
    test: Test,
    repetitions: usize,
    threads: usize,
    kv: KvType,
) -> Result<Measured, Box<dyn Error>> {
    let vocab = file.spec().vocab as u32;
    let each = test.blocks_each() as u32;
    let tables: Vec<Vec<u32>> = (0..test.batch as u32).map(|s| (s * each..(s + 1) * each).collect()).collect();
    for table in &tables {
        prompt(executor, table, 0, test.depth, vocab)?;
    }
    let mut samples = vec![];
    for repetition in 0..=repetitions {
        let start = Instant::now();
        if test.generate {
            generate(executor, &tables, test.depth, test.tokens, vocab)?;
        } else {
            prompt(executor, &tables[0], test.depth, test.tokens, vocab)?;
        }
        if repetition > 0 {
            samples.push((test.tokens * test.batch) as f64 / start.elapsed().as_secs_f64());
        }
    }
    let median = super::median(samples.clone());
    let mean = samples.iter().sum::<f64>() / samples.len() as f64;
    let variance = samples.iter().map(|s| (s - mean) * (s - mean)).sum::<f64>() / samples.len() as f64;
    // One step reads the weights once and each sequence's cache up to the middle of the generation.
    let step = weight_bytes(file, test.batch)
        + test.batch as f64 * kv_bytes(file, kv) * (test.depth as f64 + test.tokens as f64 / 2.0);
    let bytes_per_second = test.generate.then(|| step * median / test.batch as f64);
    // A prompt computes the head once a step, for its last token.
    let (layers, head) = macs(file);
    let heads = if test.generate { 1.0 } else { test.tokens.div_ceil(STEP) as f64 / test.tokens as f64 };
    let macs_per_second = (layers + heads * head) * median;
    Ok(Measured {
        test,
        threads,
        mode: executor.describe(),
        median,
        deviation: variance.sqrt(),
        samples,
        bytes_per_second,
        macs_per_second,
        bandwidth: f64::NAN,
        peak: f64::NAN,
        peak_memory: peak_memory(),
    })
}

/// A token that differs from place to place.
fn token(i: usize, vocab: u32) -> u32 {
    (i as u32).wrapping_mul(2654435761) % vocab
}

fn prompt(
    executor: &mut dyn Executor,
    blocks: &[u32],
    start: usize,
    tokens: usize,
    vocab: u32,
) -> Result<(), Box<dyn Error>> {
    let ids: Vec<u32> = (start..start + tokens).map(|i| token(i, vocab)).collect();
    let greedy = SamplingParams::greedy();
    let mut history: Vec<u32> = (0..start).map(|i| token(i, vocab)).collect();
    for tokens in ids.chunks(STEP) {
        let start = history.len();
        history.extend(tokens);
        let from = tokens.len() - 1;
        let output = Output::Tokens {
            from,
            params: &greedy,
            history: &history,
            prompt_len: history.len(),
            logprobs: None,
            allowed: None,
        };
        let ticket =
            executor.submit(&Plan { chunks: vec![Chunk { tokens, start, blocks, mask: Mask::Causal, output }] })?;
        executor.collect(ticket)?;
    }
    Ok(())
}

fn generate(
    executor: &mut dyn Executor,
    tables: &[Vec<u32>],
    depth: usize,
    tokens: usize,
    vocab: u32,
) -> Result<(), Box<dyn Error>> {
    let greedy = SamplingParams::greedy();
    let ids: Vec<u32> = (0..depth + tokens).map(|i| token(i, vocab)).collect();
    let plan = |start: usize| {
        let (tokens, history) = (&ids[start..start + 1], &ids[..start + 1]);
        let chunk = |blocks| {
            let output =
                Output::Tokens { from: 0, params: &greedy, history, prompt_len: depth, logprobs: None, allowed: None };
            Chunk { tokens, start, blocks, mask: Mask::Causal, output }
        };
        Plan { chunks: tables.iter().map(|t| chunk(t)).collect() }
    };
    let from: Vec<usize> = (0..tables.len()).collect();
    let mut ticket = executor.submit(&plan(depth))?;
    // As the engine does it: the next step is under way before the last one is looked at, where the device can.
    for start in depth + 1..depth + tokens {
        let next = if executor.has_next() { executor.submit_next(&plan(start), &from)? } else { None };
        executor.collect(ticket)?;
        ticket = match next {
            Some(ticket) => ticket,
            None => executor.submit(&plan(start))?,
        };
    }
    executor.collect(ticket)?;
    Ok(())
}

/// Bytes of weights that a step of so many tokens reads: everything but an embedding of its own, of which a row is taken;
/// of experts as many as are picked, if each is as often.
fn weight_bytes(file: &ModelFile, tokens: usize) -> f64 {
    let read = |t: &&TensorInfo| t.name != "embed" || file.spec().tied_head;
    let share = |t: &TensorInfo| 1.0 - (1.0 - picked(file, t)).powi(tokens as i32);
    file.tensors().iter().filter(read).map(|t| t.len as f64 * share(t)).sum()
}

/// The share of tokens that a tensor is for: less than one of an expert's.
fn picked(file: &ModelFile, tensor: &TensorInfo) -> f64 {
    let layer = tensor.name.split_once(".experts.").and_then(|(layer, _)| layer.strip_prefix("layers.")?.parse().ok());
    match layer.and_then(|i: usize| file.spec().layers.get(i)).map(|l| &l.mlp) {
        Some(&Mlp::Experts { experts, top, .. }) => top as f64 / experts as f64,
        _ => 1.0,
    }
}

/// Multiply-adds of one token in the linear layers, and in the head.
fn macs(file: &ModelFile) -> (f64, f64) {
    let size = |t: &TensorInfo| t.dims.iter().map(|&d| d as f64).product::<f64>() * picked(file, t);
    let matrices = || file.tensors().iter().filter(|t| t.dims.len() == 2);
    let head = if file.spec().tied_head { "embed" } else { "head" };
    let aside = |t: &&TensorInfo| !["embed", "head", "positions"].contains(&t.name.as_str());
    (matrices().filter(aside).map(size).sum(), matrices().filter(|t| t.name == head).map(size).sum())
}

/// Bytes of keys and values of one token.
fn kv_bytes(file: &ModelFile, kv: KvType) -> f64 {
    block_bytes(file.spec(), kv) as f64 / BLOCK as f64
}

/// VmHWM of this process; 0 where the system does not tell.
fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    let kilobytes = line.and_then(|l| l.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kilobytes.unwrap_or(0) * 1024
}
