//! Choosing tokens where the logits are, so that only tokens come back (`kernels/cuda/choose.cu`).
//!
//! Two ways: [`Choose::best`] for rows of which nothing but the likeliest token is wanted, which a graph can record; and
//! [`Choose::sample`] for penalties, biases, temperature, top-k, top-p, min-p and the keyed noise of [`crate::sample`].
//!
//! The sampler's answer is that of the host, always: all operations are the host's, but for logarithms and exponentials,
//! whose last bits differ between libraries. Where those could decide (13 of 272 rows of the tests),
//! where the tokens that hold the share top-p are more than can be sorted, or logits tie at its edge, the
//! answer is [`Chosen::Host`]: the host reads the row, which has its penalties and biases by then, and goes on with
//! [`crate::sample::finish`]. Not for the device are logprobs, sets of allowed tokens, and what [`Choose::serves`]
//! declines.

use std::sync::Arc;

use super::{Args, Buffer, CudaError, Device, DevicePtr, Kernel, ptx, stage::Stages};
use crate::sample::{History, SampleError, SamplingParams};

/// Threads and tokens of a block, as in the source.
const THREADS: usize = 256;
const PART: usize = 4096;
const SAMPLERS: usize = 1024;
/// Bytes of a part's result.
const FOUND: usize = 16;
/// Words of a [`Pick`], in the order of its fields.
const PICK: usize = 16;

/// The kernels, and what they note in between.
pub struct Choose {
    device: Arc<Device>,
    parts: Kernel,
    rows: Kernel,
    sampler: Kernel,
    follow: Kernel,
    vocab: usize,
    most: usize,
    found: Buffer<u8>,
    /// Picks of all rows, then pairs of words: the changes.
    words: Buffer<u32>,
    stages: Stages<u32>,
    /// Zeros, one per token.
    uses: Vec<u32>,
}

/// A row to choose a token from.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    /// Row of the logits; of each row once.
    pub row: usize,
    /// How; [`Choose::serves`] said yes.
    pub params: &'a SamplingParams,
    /// The tokens so far.
    pub history: History<'a>,
    /// Position of the token, as [`crate::sample::sample`] takes it.
    pub position: u64,
}

/// The struct `Pick` of the source.
#[derive(Clone, Copy)]
struct Pick {
    seed: u64,
    position: u64,
    scale: f32,
    floor: f32,
    top_p: f32,
    repetition: f32,
    presence: f32,
    frequency: f32,
    greedy: u32,
    top_k: u32,
    row: u32,
    first: u32,
    penalized: u32,
    biased: u32,
}

impl Pick {
    fn words(self) -> [u32; PICK] {
        let halves = |x: u64| [x as u32, (x >> 32) as u32];
        let [[a, b], [c, d]] = [self.seed, self.position].map(halves);
        let floats =
            [self.scale, self.floor, self.top_p, self.repetition, self.presence, self.frequency].map(f32::to_bits);
        let [e, f, g, h, i, j] = floats;
        let Pick { greedy, top_k, row, first, penalized, biased, .. } = self;
        [a, b, c, d, e, f, g, h, i, j, greedy, top_k, row, first, penalized, biased]
    }
}

impl Choose {
    /// For up to `rows` rows of `vocab` logits at a time.
    pub fn new(device: &Arc<Device>, rows: usize, vocab: usize) -> Result<Choose, CudaError> {
        let len = rows * PICK + 2048;
        Ok(Choose {
            device: device.clone(),
            parts: device.kernel(&ptx::CHOOSE, "best_of_parts")?,
            rows: device.kernel(&ptx::CHOOSE, "best_of_rows")?,
            sampler: device.kernel(&ptx::CHOOSE, "sample_rows")?,
            follow: device.kernel(&ptx::CHOOSE, "follow")?,
            vocab,
            most: rows,
            found: Buffer::new(device, "the likeliest tokens", rows * vocab.div_ceil(PART) * FOUND)?,
            words: Buffer::new(device, "sampling", len)?,
            stages: Stages::new(device, len)?,
            uses: vec![],
        })
    }

    /// Bytes of device memory that it takes, but for penalties of many tokens.
    pub fn bytes(rows: usize, vocab: usize) -> usize {
        rows * vocab.div_ceil(PART) * FOUND + 4 * (rows * PICK + 2048)
    }

    /// The likeliest token of `rows` rows of logits, f32 `[rows][vocab]`, to `to`, u32 `[rows][4]`, which [`read`]
    /// understands.
    pub fn best(&self, logits: DevicePtr, rows: usize, to: DevicePtr) -> Result<(), CudaError> {
        assert!(rows <= self.most, "{rows} rows of {}", self.most);
        let parts = self.vocab.div_ceil(PART);
        let mut first = Args::new().with(logits).with(self.vocab as u32).with(self.found.ptr());
        let mut second = Args::new().with(self.found.ptr()).with(parts as u32).with(to);
        // SAFETY: the kernels' parameters; the caller keeps logits and result, which have the stated shapes.
        unsafe {
            self.device.launch(&self.parts, [parts, rows, 1], THREADS, 0, &mut first)?;
            self.device.launch(&self.rows, [rows, 1, 1], 32, 0, &mut second)
        }
    }

    /// Whether [`Choose::sample`] takes such a request.
    pub fn serves(params: &SamplingParams, vocab: usize) -> bool {
        let mut biased: Vec<u32> = params.logit_bias.iter().map(|b| b.0).collect();
        biased.sort_unstable();
        let distinct = biased.windows(2).all(|w| w[0] != w[1]) && biased.last().is_none_or(|&t| (t as usize) < vocab);
        let top_k = params.top_k_of(vocab);
        distinct && (top_k == vocab || top_k <= SAMPLERS)
    }

    /// Chooses from rows of `logits`, f32 `[..][vocab]`, which get their penalties and biases, to `to`, u32
    /// `[asks][4]`, which [`chosen`] understands. Copies what was asked to the device and launches; does not wait.
    pub fn sample(&mut self, logits: DevicePtr, asks: &[Ask], to: DevicePtr) -> Result<(), CudaError> {
        assert!(asks.len() <= self.most, "{} rows of {}", asks.len(), self.most);
        let (mut picks, mut changes) = (vec![], vec![]);
        for ask in asks {
            let first = changes.len();
            let penalized = self.penalties(ask, &mut changes);
            changes.extend(ask.params.logit_bias.iter().map(|&(token, bias)| [token, bias.to_bits()]));
            let p = ask.params;
            picks.extend(
                Pick {
                    seed: p.seed,
                    position: ask.position,
                    scale: p.scale(),
                    floor: p.floor(),
                    top_p: p.top_p,
                    repetition: p.repetition_penalty,
                    presence: p.presence_penalty,
                    frequency: p.frequency_penalty,
                    greedy: u32::from(p.is_greedy()),
                    top_k: p.top_k_of(self.vocab) as u32,
                    row: ask.row as u32,
                    first: first as u32,
                    penalized: penalized as u32,
                    biased: p.logit_bias.len() as u32,
                }
                .words(),
            );
        }
        let len = picks.len() + 2 * changes.len();
        if len > self.words.len() {
            let len = len.next_power_of_two();
            self.device.synchronize()?;
            let words = Buffer::new(&self.device, "sampling", len)?;
            self.stages = Stages::new(&self.device, len)?;
            self.words = words;
        }
        self.stages.send(&mut self.words, 0, len, |to| {
            let (of_picks, of_changes) = to.split_at_mut(picks.len());
            of_picks.copy_from_slice(&picks);
            of_changes.copy_from_slice(changes.as_flattened());
        })?;
        let (picked, changed) = (self.words.ptr(), self.words.at(picks.len()));
        let mut args = Args::new().with(logits).with(self.vocab as u32).with(picked).with(changed).with(to);
        // SAFETY: the kernel's parameters; the caller keeps logits and result, which have the stated shapes.
        unsafe { self.device.launch(&self.sampler, [asks.len(), 1, 1], SAMPLERS, 0, &mut args) }
    }

    /// Sets `tokens`, u32 `[rows]`, to what was `chosen`, u32 `[..][4]`: token `i` to that of row `from[i]`, u32 `[rows]`.
    /// Where none was chosen, token 0 stands for it.
    pub fn follow(&self, tokens: DevicePtr, from: DevicePtr, chosen: DevicePtr, rows: usize) -> Result<(), CudaError> {
        let mut args = Args::new().with(tokens).with(from).with(chosen).with(rows as u32);
        // SAFETY: the kernel's parameters; the caller keeps the memory, which has the stated shapes.
        unsafe { self.device.launch(&self.follow, [rows.div_ceil(THREADS), 1, 1], THREADS, 0, &mut args) }
    }

    /// Appends the tokens that penalties touch, with how often the output has them; how many there are.
    fn penalties(&mut self, ask: &Ask, changes: &mut Vec<[u32; 2]>) -> usize {
        if !ask.params.penalizes() {
            return 0;
        }
        let History { tokens, prompt_len } = ask.history;
        let skipped = ask.params.penalty_last_n.map_or(0, |last| tokens.len().saturating_sub(last));
        let first = changes.len();
        // One more than how often the output has a token; 0: not seen, or noted.
        self.uses.resize(self.vocab, 0);
        for (index, &token) in tokens.iter().enumerate().skip(skipped) {
            if let Some(uses) = self.uses.get_mut(token as usize) {
                *uses = (*uses).max(1) + u32::from(index >= prompt_len);
            }
        }
        for &token in &tokens[skipped..] {
            match self.uses.get_mut(token as usize).map(std::mem::take) {
                None | Some(0) => {}
                Some(uses) => changes.push([token, uses - 1]),
            }
        }
        changes.len() - first
    }
}

/// What was found in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chosen {
    /// The token.
    Token(u32),
    /// The host has to choose, from the row as it is now, with [`crate::sample::finish`].
    Host,
}

/// What [`Choose::best`] found in a row of `vocab` logits.
pub fn read(found: [u32; 4], vocab: usize) -> Result<u32, SampleError> {
    match chosen(found, vocab)? {
        Chosen::Token(token) => Ok(token),
        Chosen::Host => unreachable!("the likeliest token is never left to the host"),
    }
}

/// What [`Choose::sample`] found in a row of `vocab` logits.
pub fn chosen([token, logit, nans, status]: [u32; 4], vocab: usize) -> Result<Chosen, SampleError> {
    match status {
        0 => Err(SampleError::NothingToChoose { vocab, nans: nans as usize }),
        1 if f32::from_bits(logit) == f32::INFINITY => Err(SampleError::Infinite { token }),
        1 => Ok(Chosen::Token(token)),
        _ => Ok(Chosen::Host),
    }
}
