//! A head that guesses from the model's states.
//!
//! The states of every row that the model computes are kept until the head reads them: with the next guesses, or when
//! there are many. What it reads is where the model's keys and values are, in blocks of the same numbers, so that what
//! the scheduler gives, shares, copies and takes back holds for both.
//!
//! A head's row reads a token and the state before it (`quern_models::spec::Head`), so the last row of a block that was
//! found in the cache was read with another's token. That, and whatever it could not read (rows of a block whose text
//! ended before they were read), costs right guesses and nothing else: what it guesses changes no text. Rows of a block
//! that is copied before they were read are read for the copy, too.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Instant,
};

use quern_kernels::{
    cpu::kv::BLOCK,
    exec::{Chunk, ChunkOutput, ExecError, Fed, HeadExecutor, Mask, Output, Plan},
};
use quern_models::{
    ModelSpec,
    spec::{Head as HeadSpec, HeadKind},
};

use super::{
    grow::{Growing, Vocab},
    writer::{Ability, Asked, Draft, Writer, Written, mean},
};
use crate::{
    draft::{MOST, Method},
    sched::{LOGIT_ROWS, Scheduled, Scheduler},
};

/// States of a text that are read without a guess when there are so many: a pass of many rows costs little for each.
pub(super) const MANY: usize = 64;

/// A head, and the states that it has not read.
pub(super) struct Head {
    executor: Box<dyn HeadExecutor>,
    spec: HeadSpec,
    /// Numbers of a row's states, and of what a pass gives for the next.
    width: usize,
    hidden: usize,
    context: usize,
    /// How many tokens it has, and the model's of each ([`HeadExecutor::tokens`]).
    vocab: usize,
    tokens: Arc<[u32]>,
    /// Sequences that may be guessed, of the last step.
    asked: BTreeSet<u64>,
    kept: BTreeMap<u64, Kept>,
    pass: f64,
}

/// States of consecutive positions of a text.
struct Kept {
    start: usize,
    states: Vec<f32>,
}

impl Kept {
    fn end(&self, width: usize) -> usize {
        self.start + self.states.len() / width
    }

    /// Forgets those before a position.
    fn forget(&mut self, before: usize, width: usize) {
        let rows = (before - self.start).min(self.states.len() / width);
        self.states.drain(..rows * width);
        self.start = before;
    }
}

/// A sequence on its way through the passes.
struct Writing<'a> {
    id: u64,
    blocks: &'a [u32],
    draft: Draft<'a>,
    /// The tree that is wanted instead of a chain.
    growing: Option<Growing>,
    /// What the last pass gave for the next.
    own: Vec<f32>,
}

/// A draft block, which is guessed at once: the last token and masks, where its keys and values are, and the text with it.
struct DraftBlock {
    start: usize,
    tokens: Vec<u32>,
    blocks: Vec<u32>,
    text: Vec<u32>,
}

impl Writing<'_> {
    /// What is wanted of the row that reads the text's last token.
    fn output(&self, from: usize) -> Output<'_> {
        match self.growing {
            Some(_) => Output::Own { from },
            None => self.draft.output(from),
        }
    }

    /// Takes what a pass gave; `at_once`: all that there will be.
    fn take(&mut self, output: ChunkOutput, own: Vec<f32>, vocab: Vocab, at_once: bool) {
        match &mut self.growing {
            Some(growing) if at_once => growing.take_all(output, vocab),
            Some(growing) => growing.take(output, own, vocab),
            None => {
                self.own = own;
                self.draft.take(output, vocab.model, vocab.model);
                if at_once {
                    self.draft.left = 0;
                }
            }
        }
    }

    /// Gets the next pass ready; false: it is done.
    fn next(&mut self, hidden: usize, leaves: usize) -> bool {
        match &mut self.growing {
            Some(growing) => growing.next(hidden, leaves),
            None => self.draft.left > 0,
        }
    }

    /// The row of the last guess, or those of the tree.
    fn chunk(&self) -> Chunk<'_> {
        if let Some(growing) = &self.growing {
            return growing.chunk(self.blocks);
        }
        let text = &self.draft.text;
        let start = text.len() - 2;
        let (tokens, output) = (&text[start + 1..], self.draft.output(0));
        Chunk { tokens, start, blocks: self.blocks, mask: Mask::Causal, output }
    }

    /// What they read.
    fn fed(&self) -> &[f32] {
        self.growing.as_ref().map_or(&self.own, Growing::fed)
    }

    /// What was written.
    fn done(self) -> (u64, Written) {
        (self.id, self.growing.map_or_else(|| self.draft.done(), |growing| Written::Tree(growing.done())))
    }
}

impl Head {
    /// A head on its device.
    pub fn new(executor: Box<dyn HeadExecutor>, spec: &ModelSpec) -> Head {
        let head = spec.draft_head.clone().expect("an executor of a head has the spec of one");
        let (hidden, context, width) = (spec.hidden, spec.max_context, head.width());
        let (asked, kept, vocab, tokens) = (BTreeSet::new(), BTreeMap::new(), spec.vocab, executor.tokens().into());
        Head { executor, spec: head, width, hidden, context, vocab, tokens, asked, kept, pass: 0.0 }
    }

    /// Guesses that one pass gives.
    fn at_once(&self) -> Option<usize> {
        match self.spec.kind {
            HeadKind::Medusa { guesses, .. } => Some(guesses),
            HeadKind::Block { size, .. } => Some(size - 1),
            HeadKind::Joined { .. } | HeadKind::Wide { .. } => None,
        }
    }

    /// Outputs of a pass, and what the last row of each chunk, of a tree all rows, gave for the next.
    fn pass(&mut self, plan: &Plan, fed: &Fed) -> Result<Vec<(ChunkOutput, Vec<f32>)>, ExecError> {
        let started = Instant::now();
        let outputs = self.executor.guess(plan, fed)?;
        // Those that guess all at once feed nothing back.
        let (own, hidden) = (if self.at_once().is_none() { self.executor.own()? } else { &[] }, self.hidden);
        let mut end = 0;
        let both = outputs.into_iter().zip(&plan.chunks).map(|(output, chunk)| {
            let start = end;
            end += chunk.tokens.len() * hidden;
            let start = if chunk.mask == Mask::Causal { end - hidden } else { start };
            (output, own.get(start..end).unwrap_or_default().to_vec())
        });
        let both = both.collect();
        let blocks = matches!(self.spec.kind, HeadKind::Block { .. });
        // Trees have many rows; texts that are read, too, and those passes are others.
        if plan.chunks.iter().all(|c| c.tokens.len() <= 2 || c.mask != Mask::Causal) && !blocks {
            mean(&mut self.pass, started.elapsed().as_secs_f64());
        }
        Ok(both)
    }

    /// Lets draft blocks be guessed behind texts whose states are all read: as many at once as there is spare memory for.
    fn guess_blocks(&mut self, writing: &mut [Writing], size: usize, mask: u32) -> Result<(), ExecError> {
        let tokens = self.tokens.clone();
        let vocab = Vocab { own: self.vocab, model: self.spec.model_vocab, tokens: &tokens };
        let mut done = 0;
        while done < writing.len() {
            let mut spare = self.executor.spare();
            let mut group = vec![];
            for w in &writing[done..] {
                let start = w.draft.text.len() - 1;
                let more = (start + size).div_ceil(BLOCK).saturating_sub(w.blocks.len());
                if more > spare.len() || !group.is_empty() && (group.len() + 1) * size > LOGIT_ROWS {
                    break;
                }
                let mut blocks = w.blocks.to_vec();
                blocks.extend(spare.by_ref().take(more));
                let mut tokens = vec![mask; size];
                tokens[0] = w.draft.text[start];
                let text = [&w.draft.text[..start], &tokens].concat();
                group.push(DraftBlock { start, tokens, blocks, text });
            }
            assert!(!group.is_empty(), "a head that guesses blocks of {size} has memory for one");
            let mut plan = Plan::default();
            for (b, w) in group.iter().zip(&writing[done..]) {
                let output = match w.growing {
                    Some(_) => Output::Own { from: 1 },
                    None => w.draft.output_of(1, &b.text),
                };
                let (tokens, start, blocks) = (&b.tokens[..], b.start, &b.blocks[..]);
                plan.chunks.push(Chunk { tokens, start, blocks, mask: Mask::Full, output });
            }
            let outputs = self.executor.guess(&plan, &Fed::Nothing)?;
            drop(plan);
            for (w, output) in writing[done..].iter_mut().zip(outputs) {
                w.take(output, vec![], vocab, true);
            }
            done += group.len();
        }
        Ok(())
    }
}

impl Writer for Head {
    fn ability(&self) -> Ability {
        let method = Method::of_head(&self.spec);
        let (pass, context, most) = (self.pass, self.context, self.at_once().unwrap_or(MOST).min(MOST));
        Ability { method, pass, at_once: self.at_once().is_some(), context, most, branches: true }
    }

    fn copy_block(&mut self, scheduler: &Scheduler, from: u32, to: u32) -> Result<(), ExecError> {
        self.executor.copy_block(from, to)?;
        let holders = |block| scheduler.sequences().filter(move |s| s.blocks.contains(&block));
        let Some(new) = holders(to).next() else { return Ok(()) };
        let first = new.blocks.iter().position(|&b| b == to).map_or(0, |at| at * BLOCK);
        // Whoever has read less knows more of what the copy lacks.
        let kept = holders(from).filter_map(|old| self.kept.get(&old.id));
        let kept = kept.filter(|kept| kept.start < new.computed && kept.end(self.width) >= new.computed);
        if let Some(kept) = kept.min_by_key(|kept| kept.start) {
            let start = kept.start.max(first);
            let rows = (start - kept.start) * self.width..(new.computed - kept.start) * self.width;
            let states = kept.states[rows].to_vec();
            self.kept.insert(new.id, Kept { start, states });
        }
        Ok(())
    }

    fn keeps(&self) -> bool {
        !self.asked.is_empty()
    }

    fn keep(&mut self, scheduler: &Scheduler, shares: &[Scheduled], states: &[f32]) {
        let (width, mut at) = (self.width, 0);
        for share in shares {
            let of = at..at + share.count * width;
            at = of.end;
            let Some(s) = scheduler.running(share.id).filter(|s| self.asked.contains(&s.id)) else { continue };
            let kept = self.kept.entry(share.id).or_insert(Kept { start: s.computed, states: vec![] });
            if s.computed < kept.start || s.computed > kept.end(width) {
                (kept.start, kept.states) = (s.computed, vec![]);
            }
            kept.states.truncate((s.computed - kept.start) * width);
            // The rest of a step whose states are not there.
            let Some(states) = states.get(of) else { continue };
            kept.states.extend_from_slice(states);
        }
    }

    fn moved(&mut self, id: u64, from: &[usize], to: usize) {
        let Some(kept) = self.kept.get_mut(&id) else { return };
        let (width, end) = (self.width, kept.end(self.width));
        for (i, &slot) in from.iter().enumerate() {
            if to + i >= kept.start && slot < end {
                let at = (slot - kept.start) * width;
                kept.states.copy_within(at..at + width, (to + i - kept.start) * width);
            }
        }
    }

    fn write(&mut self, scheduler: &Scheduler, asked: &[Asked]) -> Result<BTreeMap<u64, Written>, ExecError> {
        self.asked = asked.iter().map(|asked| asked.share.id).collect();
        self.kept.retain(|&id, _| scheduler.running(id).is_some());
        let (width, reads_all) = (self.width, !matches!(self.spec.kind, HeadKind::Medusa { .. }));
        let (mut writing, mut rows, mut ends, mut written) = (vec![], vec![], vec![], BTreeSet::<u32>::new());
        for asked in asked {
            let share = &asked.share;
            let (Some(s), Some(kept)) = (scheduler.running(share.id), self.kept.get_mut(&share.id)) else { continue };
            // What was computed of wrong guesses is none of the text.
            let end = kept.end(width).min(s.computed).min(s.tokens.len().saturating_sub(1));
            if end > self.context {
                (kept.start, kept.states) = (end, vec![]);
            }
            if end <= kept.start {
                continue;
            }
            let guesses = asked.depth > 0 && end + 1 == s.tokens.len() && end + asked.depth < self.context;
            if !reads_all {
                kept.forget(end - 1, width);
            }
            // Two texts that began alike and were interrupted may wait to write the same block: one of them goes on waiting.
            let of = &s.blocks[kept.start / BLOCK..end.div_ceil(BLOCK)];
            let reads = guesses || end - kept.start >= MANY;
            if reads && of.iter().any(|block| written.contains(block)) {
                continue;
            }
            if reads {
                written.extend(of);
            }
            if guesses {
                let growing = asked.shape.map(|limits| Growing::new(asked, limits, &s.tokens));
                let draft = Draft::new(asked, &s.tokens);
                writing.push(Writing { id: s.id, blocks: &s.blocks, draft, growing, own: vec![] });
                rows.push((s, kept.start..end));
            } else if end - kept.start >= MANY {
                ends.push((s, kept.start..end));
            }
        }
        let guessing = rows.len();
        let block = match self.spec.kind {
            HeadKind::Block { size, mask, .. } => Some((size, mask)),
            _ => None,
        };
        rows.append(&mut ends);
        if rows.is_empty() {
            return Ok(BTreeMap::new());
        }
        let kept = std::mem::take(&mut self.kept);
        let (mut plan, mut fed) = (Plan::default(), vec![]);
        for (i, (s, rows)) in rows.iter().enumerate() {
            let (tokens, start) = (&s.tokens[rows.start + 1..rows.end + 1], rows.start);
            let output = if i < guessing && block.is_none() { writing[i].output(rows.len() - 1) } else { Output::None };
            plan.chunks.push(Chunk { tokens, start, blocks: &s.blocks, mask: Mask::Causal, output });
            fed.push(&kept[&s.id].states[..rows.len() * width]);
        }
        let (started, few) = (Instant::now(), plan.rows() <= 2 * plan.chunks.len());
        let mut got = self.pass(&plan, &Fed::Model(fed));
        drop(plan);
        self.kept = kept;
        for (s, rows) in rows {
            if let Some(kept) = self.kept.get_mut(&s.id).filter(|_| reads_all) {
                kept.forget(rows.end, width);
            }
        }
        if let Some((size, mask)) = block {
            got?;
            self.guess_blocks(&mut writing, size, mask)?;
            if few {
                mean(&mut self.pass, started.elapsed().as_secs_f64());
            }
            return Ok(writing.into_iter().map(Writing::done).collect());
        }
        let tokens = self.tokens.clone();
        let vocab = Vocab { own: self.vocab, model: self.spec.model_vocab, tokens: &tokens };
        let (hidden, at_once) = (self.hidden, self.at_once().is_some());
        let leaves = self.executor.tree_leaves();
        let mut open: Vec<bool> = vec![true; writing.len()];
        loop {
            let waiting = writing.iter_mut().zip(&open).filter(|(_, open)| **open);
            for ((w, _), (output, own)) in waiting.zip(got?) {
                w.take(output, own, vocab, at_once);
            }
            open = writing.iter_mut().zip(open).map(|(w, open)| open && w.next(hidden, leaves)).collect();
            let left: Vec<&Writing> = writing.iter().zip(&open).filter(|(_, open)| **open).map(|(w, _)| w).collect();
            if left.is_empty() {
                break;
            }
            let plan = Plan { chunks: left.iter().map(|w| w.chunk()).collect() };
            got = self.pass(&plan, &Fed::Own(left.iter().map(|w| w.fed()).collect()));
        }
        Ok(writing.into_iter().map(Writing::done).collect())
    }
}
