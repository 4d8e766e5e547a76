//! The end of a step: final norm and head of the rows that something is wanted of, and their tokens.
//!
//! What a row needs decides what the head's one region leaves of it: the likeliest token alone, logits with a survey
//! of each panel of 64, or logits. Choosing from those is little work and runs on the calling thread.

use std::sync::atomic::{AtomicU64, Ordering};

use quern_models::{ModelSpec, PANEL};

use super::{Forward, Readers, guess::Guess, linear::Linear, tensors::Input};
use crate::{
    cpu::{
        lanes::Simd,
        ops,
        survey::{Ask, survey},
    },
    exec::{Chunk, ChunkOutput, Output, Plan, spread},
    sample::{History, Need, SampleError, Sampled, Scratch, Surveyed, choose_surveyed, sample_allowed},
    team::Disjoint,
};

/// What the head leaves, kept between steps.
#[derive(Default)]
pub(super) struct Heads {
    rows: Vec<Row>,
    /// `[rows that keep them][vocab]`.
    logits: Vec<f32>,
    /// Surveys, `[rows that keep logits][panels]`.
    max: Vec<f32>,
    more: Vec<f32>,
    scratch: Scratch,
    /// Of a head: the model's token of each of its own (empty: they are the same), and how many the model has.
    tokens: Vec<u32>,
    model_vocab: usize,
    /// How far behind its own position the token is that a row gives: 1, of a head 2, of a block 0.
    ahead: usize,
    /// Logits by the model's tokens.
    spread: Vec<f32>,
}

/// A row of the head.
struct Row {
    /// Which row of the step.
    from: usize,
    need: Need,
    /// Which row of the logits, if they are kept.
    kept: Option<usize>,
    best: Best,
}

/// The likeliest token, found by several threads: the larger logit, of equal ones the lower token.
struct Best(AtomicU64);

impl Best {
    const NONE: u64 = 0;

    /// Orders logits as numbers do (-0 as 0), and above [`Best::NONE`].
    fn key(logit: f32) -> u64 {
        let bits = (logit + 0.0).to_bits();
        u64::from(if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }) << 32
    }

    /// Takes part with the tokens from `first` on, of which `max`, no NaN, is the largest logit.
    fn offer(&self, max: f32, first: usize, logits: &[f32]) {
        let key = Best::key(max);
        // Equal logits: the lower half decides.
        if max == f32::NEG_INFINITY || key | u64::from(u32::MAX) < self.0.load(Ordering::Relaxed) {
            return;
        }
        let at = logits.iter().position(|&l| l == max).expect("max is one of them");
        self.0.fetch_max(key | u64::from(!((first + at) as u32)), Ordering::Relaxed);
    }

    /// The token, and whether its logit is infinite.
    fn token(&self) -> Option<(u32, bool)> {
        let found = self.0.load(Ordering::Relaxed);
        (found != Best::NONE).then(|| (!(found as u32), found >> 32 == Best::key(f32::INFINITY) >> 32))
    }
}

impl Forward {
    /// Final norm and head of the rows that want something, and what they give, in plan order.
    pub(super) fn head(&mut self, plan: &Plan) -> Vec<ChunkOutput> {
        let (vocab, hidden) = (self.spec().vocab, self.spec().hidden);
        let mut rows = vec![];
        let (mut row, mut kept) = (0, 0);
        for chunk in &plan.chunks {
            for i in of_head(chunk) {
                let need = match &chunk.output {
                    Output::Tokens { params, logprobs, allowed: None, .. } => {
                        Need::of(params, vocab, self.bufs.heads.position(chunk, i), *logprobs)
                    }
                    _ => Need::Logits,
                };
                // Penalties, biases and noise are of the model's tokens.
                let spread = !self.bufs.heads.tokens.is_empty() && need != Need::Best;
                let need = if spread { Need::Logits } else { need };
                let keeps = need != Need::Best;
                rows.push(Row {
                    from: row + i,
                    need,
                    kept: keeps.then_some(kept),
                    best: Best(AtomicU64::new(Best::NONE)),
                });
                kept += usize::from(keeps);
            }
            row += chunk.tokens.len();
        }
        self.bufs.heads.rows = rows;
        self.run_head(kept);
        // Such a row is an error, and the message counts its NaN.
        if self.bufs.heads.rows.iter().any(|r| r.need == Need::Best && r.best.token().is_none()) {
            for (i, row) in self.bufs.heads.rows.iter_mut().enumerate() {
                (row.need, row.kept) = (if row.need == Need::Best { Need::Logits } else { row.need }, Some(i));
            }
            self.run_head(self.bufs.heads.rows.len());
        }
        let (simd, heads, x, norm) = (self.simd, &mut self.bufs.heads, &self.bufs.x, &self.head_in);
        let (mut first, mut start) = (0, 0);
        let outputs = plan.chunks.iter().map(|chunk| {
            let rows = first..first + of_head(chunk).len();
            first = rows.end;
            let states = start..start + chunk.tokens.len();
            start = states.end;
            match &chunk.output {
                Output::None => ChunkOutput::None,
                Output::Hidden { from } => {
                    ChunkOutput::Hidden(normed(simd, norm, x, hidden, states.start + from..states.end))
                }
                Output::Logits { .. } => ChunkOutput::Logits(heads.logits(rows, vocab, false)),
                Output::Own { .. } => ChunkOutput::Logits(heads.logits(rows, vocab, true)),
                Output::Tokens { .. } => ChunkOutput::Tokens(
                    rows.enumerate().map(|(i, row)| heads.choose(simd, row, chunk, i, vocab)).collect(),
                ),
            }
        });
        outputs.collect()
    }

    /// Norm and head of the rows; `kept` of them keep their logits.
    fn run_head(&mut self, kept: usize) {
        let vocab = self.spec().vocab;
        let panels = vocab.div_ceil(PANEL);
        let wanted: Vec<usize> = self.bufs.heads.rows.iter().map(|r| r.from).collect();
        let heads = &mut self.bufs.heads;
        heads.logits.resize(kept * vocab, 0.0);
        heads.max.resize(kept * panels, 0.0);
        heads.more.resize(kept * panels, 0.0);
        if wanted.is_empty() {
            return;
        }
        self.norm_into_acts(Readers::Head, Some(&wanted), wanted.len());
        let w = self.head.as_ref().expect("whatever has layers has it").view();
        let Heads { rows, logits, max, more, .. } = &mut self.bufs.heads;
        let (logits, max, more) = (Disjoint::new(logits), Disjoint::new(max), Disjoint::new(more));
        let (simd, rows, cap) = (self.simd, &*rows, self.file.spec().logit_cap);
        let store = |row: usize, at: usize, tile: &[f32]| {
            assert!(at.is_multiple_of(PANEL), "a survey is of a whole panel");
            let mut capped = [0.0; PANEL];
            let tile = match cap {
                None => tile,
                Some(cap) => {
                    let capped = &mut capped[..tile.len()];
                    capped.copy_from_slice(tile);
                    ops::soft_cap(simd, capped, cap);
                    capped
                }
            };
            let row = &rows[row];
            let Some(kept) = row.kept else {
                return row.best.offer(survey(simd, Ask::Max, at as u32, tile).max, at, tile);
            };
            // SAFETY: a unit writes its own panel of its own rows, here and below.
            let to = unsafe { logits.part(kept * vocab + at..kept * vocab + at + tile.len()) };
            to.copy_from_slice(tile);
            if let Need::Surveyed(ask) = row.need {
                let (found, panel) = (survey(simd, ask, at as u32, tile), kept * panels + at / PANEL);
                // SAFETY: as above.
                let (max, more) = unsafe { (max.part(panel..panel + 1), more.part(panel..panel + 1)) };
                (max[0], more[0]) = (found.max, found.more);
            }
        };
        let mut run = Linear {
            isa: self.isa,
            mode: self.mode,
            team: &self.team,
            regions: &mut self.regions,
            threads: &mut self.bufs.threads,
        };
        run.panels(&w, &self.bufs.acts, &store);
    }
}

/// Rows of a chunk that go through the head.
fn of_head(chunk: &Chunk) -> std::ops::Range<usize> {
    let rows = chunk.tokens.len();
    match chunk.output {
        Output::Hidden { .. } => rows..rows,
        _ => chunk.output.from(rows)..rows,
    }
}

/// Rows of the residual stream after the final norm, `[rows, hidden]`.
fn normed(simd: Simd, norm: &Input, x: &[f32], hidden: usize, rows: std::ops::Range<usize>) -> Vec<f32> {
    let mut out = vec![0.0; rows.len() * hidden];
    for (out, row) in out.chunks_exact_mut(hidden).zip(rows) {
        norm.norm(simd, &x[row * hidden..(row + 1) * hidden], out);
    }
    out
}

impl Heads {
    /// The model's token of each of a head's own; empty: they are the same.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Learns what a head guesses.
    pub fn guesses(&mut self, spec: &ModelSpec, guess: Option<&Guess>) {
        self.model_vocab = spec.known_tokens();
        self.ahead = guess.map_or(1, |guess| if guess.is_block() { 0 } else { 2 });
        self.tokens = guess.map_or(vec![], |guess| guess.tokens.clone());
    }

    /// Position of the token that a row `i` of a chunk gives: the length of its history.
    fn position(&self, chunk: &Chunk, i: usize) -> u64 {
        (chunk.position(i) + self.ahead) as u64
    }

    /// Logits of rows that keep them, side by side, by the model's tokens or by its `own`.
    fn logits(&mut self, rows: std::ops::Range<usize>, vocab: usize, own: bool) -> Vec<f32> {
        let Some(first) = self.rows[rows.clone()].first().and_then(|r| r.kept) else { return vec![] };
        if !self.tokens.is_empty() && !own {
            let rows = first..first + rows.len();
            return rows.flat_map(|row| self.spread(row, vocab).to_vec()).collect();
        }
        if first == 0 && rows.len() * vocab == self.logits.len() {
            return std::mem::take(&mut self.logits);
        }
        self.logits[first * vocab..(first + rows.len()) * vocab].to_vec()
    }

    /// Logits of a row by the model's tokens.
    fn spread(&mut self, kept: usize, vocab: usize) -> &mut [f32] {
        let logits = &self.logits[kept * vocab..(kept + 1) * vocab];
        spread(&self.tokens, logits, self.model_vocab, &mut self.spread);
        &mut self.spread
    }

    /// The token after the `i`-th wanted row of a chunk that wants tokens.
    fn choose(
        &mut self,
        simd: Simd,
        row: usize,
        chunk: &Chunk,
        i: usize,
        vocab: usize,
    ) -> Result<Sampled, SampleError> {
        let Output::Tokens { from, params, history, prompt_len, logprobs, allowed } = &chunk.output else {
            unreachable!("the caller matched it")
        };
        let position = self.position(chunk, from + i);
        let tokens = chunk.history(history, from + i, self.ahead);
        let history = History { tokens: &tokens, prompt_len: *prompt_len };
        let row = &self.rows[row];
        let plain = |token| Sampled { token, logprob: None, top: vec![] };
        let Some(kept) = row.kept else {
            return match row.best.token() {
                Some((token, false)) => Ok(plain(self.tokens.get(token as usize).copied().unwrap_or(token))),
                Some((token, true)) => Err(SampleError::Infinite { token }),
                None => unreachable!("head() computes such rows again"),
            };
        };
        if !self.tokens.is_empty() {
            return sample_allowed(self.spread(kept, vocab), params, history, position, None, None);
        }
        let panels = vocab.div_ceil(PANEL);
        let logits = &mut self.logits[kept * vocab..(kept + 1) * vocab];
        let Need::Surveyed(ask) = row.need else {
            let words = vocab.div_ceil(32);
            let allowed = allowed.map(|a| &a[i * words..(i + 1) * words]);
            return sample_allowed(logits, params, history, position, *logprobs, allowed);
        };
        let surveys = kept * panels..(kept + 1) * panels;
        let surveyed = Surveyed { logits, max: &mut self.max[surveys.clone()], more: &mut self.more[surveys] };
        choose_surveyed(simd, ask, surveyed, params, history, position, &mut self.scratch).map(plain)
    }
}
