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

use quern_kernels::exec::{Chunk, ExecError, Executor, Mask, Output, Plan};
use quern_models::ModelSpec;

use super::writer::{Ability, Asked, Draft, Writer, Written, mean};
use crate::{
    draft::{MOST, Method},
    sched::{Scheduler, Sequence},
};

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

/// A sequence on its way through the passes.
struct Writing<'a> {
    id: u64,
    blocks: &'a [u32],
    read: usize,
    draft: Draft<'a>,
}

impl Writing<'_> {
    fn chunk(&self) -> Chunk<'_> {
        let tokens = &self.draft.text[self.read..];
        let output = self.draft.output(tokens.len() - 1);
        Chunk { tokens, start: self.read, blocks: self.blocks, mask: Mask::Causal, output }
    }
}

impl Small {
    /// A model on its device, with as many blocks as the large one has, which knows `vocab` tokens.
    pub fn new(executor: Box<dyn Executor>, spec: &ModelSpec, vocab: usize) -> Small {
        let (context, own_vocab) = (spec.max_context, spec.vocab);
        Small { executor, read: BTreeMap::new(), vocab, context, own_vocab, pass: 0.0 }
    }

    /// Tokens of a sequence that it has read. What others computed of a text that is new, it has read for them.
    fn known(&self, s: &Sequence) -> usize {
        // Guesses that turned out wrong do not count, nor what a text had that had to start again.
        self.read.get(&s.id).map_or(s.computed, |&read| read.min(s.computed))
    }
}

impl Writer for Small {
    fn ability(&self) -> Ability {
        let (method, pass, context) = (Method::Draft, self.pass, self.context);
        Ability { method, pass, at_once: false, context, most: MOST, branches: false }
    }

    fn copy_block(&mut self, _: &Scheduler, from: u32, to: u32) -> Result<(), ExecError> {
        self.executor.copy_block(from, to)
    }

    fn write(&mut self, scheduler: &Scheduler, asked: &[Asked]) -> Result<BTreeMap<u64, Written>, ExecError> {
        self.read.retain(|&id, _| scheduler.running(id).is_some());
        let (mut prompts, mut writing) = (vec![], vec![]);
        for asked in asked {
            let Asked { share, params, .. } = asked;
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
                writing.push(Writing { id: s.id, blocks: &s.blocks, read, draft: Draft::new(asked, &s.tokens) });
            } else if !share.last || share.count > 1 {
                prompts.push((s, read, s.computed + share.count));
            }
            self.read.insert(s.id, read);
        }
        let vocab = self.vocab;
        let mut first = true;
        while first || writing.iter().any(|w| w.draft.left > 0) {
            let mut plan = Plan::default();
            plan.chunks.extend(writing.iter().filter(|w| w.draft.left > 0).map(Writing::chunk));
            if std::mem::take(&mut first) {
                plan.chunks.extend(prompts.iter().filter(|(_, read, end)| read < end).map(|&(s, read, end)| Chunk {
                    tokens: &s.tokens[read..end],
                    start: read,
                    blocks: &s.blocks,
                    mask: Mask::Causal,
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
                mean(&mut self.pass, started.elapsed().as_secs_f64());
            }
            for (w, output) in writing.iter_mut().filter(|w| w.draft.left > 0).zip(outputs) {
                w.read = w.draft.text.len();
                w.draft.take(output, vocab, self.own_vocab);
            }
        }
        for (s, _, end) in prompts {
            self.read.insert(s.id, end);
        }
        let mut guesses = BTreeMap::new();
        for Writing { id, read, draft, .. } in writing {
            self.read.insert(id, read);
            guesses.insert(id, draft.done());
        }
        Ok(guesses)
    }
}
