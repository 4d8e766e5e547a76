//! A small model that writes ahead of the large one.
//!
//! It has the same tokens and reads the same text. Its keys and values lie in the same blocks of its own memory, so
//! that what the scheduler gives, shares, copies and takes back holds for both. What it has not read of a text it
//! reads when it is asked about it. It chooses tokens with the large one's noise: where both think alike, they choose
//! alike, at any temperature (see `quern_kernels::sample`).
//!
//! What it thinks changes no text: a block that it has not written, or that holds what it thought of another text,
//! costs right guesses and nothing else.

use std::{collections::BTreeMap, time::Instant};

use quern_kernels::{
    exec::{Chunk, ChunkOutput, ExecError, Executor, Output, Plan},
    sample::{Distribution, History, SamplingParams},
};

use quern_models::ModelSpec;

use crate::sched::{Scheduled, Scheduler, Sequence};

/// Tokens that it reads in one step of what it has missed, because nobody asked it for a while.
const MOST_MISSED: usize = 64;

/// The small model, and what it has read.
pub(super) struct Small {
    executor: Box<dyn Executor>,
    /// Tokens of each running sequence that are in its cache.
    read: BTreeMap<u64, usize>,
    /// Tokens that the large model knows, and the longest text that this one was made for.
    vocab: usize,
    context: usize,
    /// Tokens that this one knows.
    own_vocab: usize,
    /// Seconds of a pass that reads a token or two of each text; 0 before the first.
    pass: f64,
}

/// A sequence that is guessed, and has a share of the step.
pub(super) struct Asked<'a> {
    /// The share, with room for guesses if some are wanted.
    pub share: Scheduled,
    /// How tokens are chosen.
    pub params: &'a SamplingParams,
    /// Tokens of the prompt.
    pub prompt_len: usize,
    /// What tokens are drawn from is wanted with them.
    pub from: bool,
}

/// What was written: guesses, and what each was drawn from where that is wanted.
pub(super) type Written = (Vec<u32>, Vec<Distribution>);

/// A sequence on its way through the passes.
struct Writing<'a> {
    id: u64,
    params: &'a SamplingParams,
    prompt_len: usize,
    blocks: &'a [u32],
    /// Text and guesses.
    text: Vec<u32>,
    /// Where the guesses begin.
    known: usize,
    read: usize,
    /// Guesses still wanted.
    left: usize,
    /// What they were drawn from, where that is wanted.
    from: Option<Vec<Distribution>>,
}

impl<'a> Writing<'a> {
    fn chunk(&self) -> Chunk<'_> {
        let tokens = &self.text[self.read..];
        let from = tokens.len() - 1;
        let output = match self.from {
            Some(_) => Output::Logits { from },
            None => Output::Tokens {
                from,
                params: self.params,
                history: &self.text,
                prompt_len: self.prompt_len,
                logprobs: None,
                allowed: None,
            },
        };
        Chunk { tokens, start: self.read, blocks: self.blocks, output }
    }

    /// Takes the next guess; without one it is done.
    fn take(&mut self, output: ChunkOutput, vocab: usize) {
        self.read = self.text.len();
        self.left -= 1;
        let next = match output {
            ChunkOutput::Tokens(tokens) => tokens.into_iter().next().and_then(Result::ok).map(|next| next.token),
            ChunkOutput::Logits(mut logits) => self.draw(&mut logits),
            _ => None,
        };
        match next.filter(|&token| (token as usize) < vocab) {
            Some(token) => self.text.push(token),
            None => self.left = 0,
        }
    }

    /// Draws a token and keeps what it was drawn from.
    fn draw(&mut self, logits: &mut [f32]) -> Option<u32> {
        let history = History { tokens: &self.text, prompt_len: self.prompt_len };
        let from = Distribution::of(logits, self.params, history, None).ok()?;
        let token = from.draw(self.params.seed, self.text.len() as u64);
        self.from.as_mut()?.push(from);
        Some(token)
    }
}

impl Small {
    /// A model on its device, with as many blocks as the large one has, which knows `vocab` tokens.
    pub fn new(executor: Box<dyn Executor>, spec: &ModelSpec, vocab: usize) -> Small {
        let (context, own_vocab) = (spec.max_context, spec.vocab);
        Small { executor, read: BTreeMap::new(), vocab, context, own_vocab, pass: 0.0 }
    }

    /// Copies a block, as the large one does.
    pub fn copy_block(&mut self, from: u32, to: u32) -> Result<(), ExecError> {
        self.executor.copy_block(from, to)
    }

    /// Seconds that a guess more takes; 0 where none was made yet.
    pub fn pass(&self) -> f64 {
        self.pass
    }

    /// Longest text that it can guess from.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Tokens of a sequence that it has read. What others computed of a text that is new, it has read for them.
    fn known(&self, s: &Sequence) -> usize {
        // Guesses that turned out wrong do not count, nor what a text had that had to start again.
        self.read.get(&s.id).map_or(s.computed, |&read| read.min(s.computed))
    }

    /// Reads what the step computes of prompts, and guesses for those that have room for guesses.
    pub fn write(&mut self, scheduler: &Scheduler, asked: &[Asked]) -> Result<BTreeMap<u64, Written>, ExecError> {
        self.read.retain(|&id, _| scheduler.running(id).is_some());
        let (mut prompts, mut writing) = (vec![], vec![]);
        for Asked { share, params, prompt_len, from } in asked {
            let Some(s) = scheduler.running(share.id) else { continue };
            let read = self.known(s);
            // It may know fewer tokens (rows that pad a vocabulary), and shorter texts.
            let end = s.computed + share.count;
            let unknown = |&token: &u32| token as usize >= self.own_vocab;
            let biased = params.logit_bias.iter().any(|(token, _)| unknown(token));
            if end > self.context || biased || s.tokens[read..end.min(s.tokens.len())].iter().any(unknown) {
                continue;
            }
            if share.guesses > 0 && s.tokens.len() - read > MOST_MISSED {
                // It catches up first, a bit in each step.
                prompts.push((s, read, read + MOST_MISSED));
            } else if share.guesses > 0 {
                let (id, known, left) = (s.id, s.tokens.len(), share.guesses);
                let (text, blocks, prompt_len) = (s.tokens.clone(), &s.blocks[..], *prompt_len);
                let from = from.then(Vec::new);
                writing.push(Writing { id, params, prompt_len, blocks, text, known, read, left, from });
            } else if !share.last || share.count > 1 {
                prompts.push((s, read, s.computed + share.count));
            }
            self.read.insert(s.id, read);
        }
        let vocab = self.vocab;
        let mut first = true;
        while first || writing.iter().any(|w| w.left > 0) {
            let mut plan = Plan::default();
            plan.chunks.extend(writing.iter().filter(|w| w.left > 0).map(Writing::chunk));
            if std::mem::take(&mut first) {
                plan.chunks.extend(prompts.iter().filter(|(_, read, end)| read < end).map(|&(s, read, end)| Chunk {
                    tokens: &s.tokens[read..end],
                    start: read,
                    blocks: &s.blocks,
                    output: Output::None,
                }));
            }
            if plan.chunks.is_empty() {
                break;
            }
            let (rows, started) = (plan.chunks.iter().map(|c| c.tokens.len()).sum::<usize>(), Instant::now());
            let most = 2 * plan.chunks.len();
            let ticket = self.executor.submit(&plan)?;
            let outputs = self.executor.collect(ticket)?;
            if rows <= most {
                let took = started.elapsed().as_secs_f64();
                self.pass = if self.pass == 0.0 { took } else { self.pass + (took - self.pass) * 0.1 };
            }
            writing.iter_mut().filter(|w| w.left > 0).zip(outputs).for_each(|(w, output)| w.take(output, vocab));
        }
        for (s, _, end) in prompts {
            self.read.insert(s.id, end);
        }
        let mut guesses = BTreeMap::new();
        for Writing { id, mut text, known, read, from, .. } in writing {
            self.read.insert(id, read);
            let tokens = text.split_off(known);
            let mut from = from.unwrap_or_default();
            from.truncate(tokens.len());
            guesses.insert(id, (tokens, from));
        }
        Ok(guesses)
    }
}
