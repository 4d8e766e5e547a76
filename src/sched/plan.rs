//! The scheduler: hands out each step's token budget.
//!
//! One rule (vLLM's): every sequence has `computed` chasing the tokens it has. Prompts in chunks, decoding, beginnings
//! found in the cache and starting again after preemption are the same thing. A step:
//!
//! 1. Sequences that lack one token come first, each gets it. When blocks run out, the running sequence that comes
//!    last (by priority, then arrival) gives its blocks back and starts again later, before those that came after it.
//! 2. If nobody had to, waiting sequences are admitted in order while their whole text fits and a block is left for
//!    everybody who runs. One whose beginning a running sequence is about to compute is passed over until that is
//!    done: what many share is computed once.
//! 3. Sequences that lack one token may get room for guesses of what follows it, from what nobody else holds: guesses
//!    make nobody start again, and are in the budget and the cache what tokens are.
//! 4. Prompts share what is left of the budget: the first in order gets at least half of it, the others are served
//!    shortest first, so that neither a long prompt nor a stream of short ones makes the others wait.

use std::collections::BTreeMap;

use super::kv::{Hit, KvPool, NO_BLOCK, Node};

/// One text in progress.
#[derive(Debug)]
pub struct Sequence {
    /// Number given by the caller.
    pub id: u64,
    /// Prompt and output so far, and at its end the guesses of [`Scheduler::guess`].
    pub tokens: Vec<u32>,
    /// How many are guesses: none but between [`Scheduler::guess`] and [`Scheduler::computed`].
    guesses: usize,
    /// Tokens whose keys and values are in the cache.
    pub computed: usize,
    /// Blocks held, in order; [`NO_BLOCK`] for those given back because the window has passed.
    pub blocks: Vec<u32>,
    order: Order,
    root: Node,
    /// The text up to the end of each full block, as far as it is remembered.
    nodes: Vec<Node>,
    looks_up: bool,
    logits: bool,
    started: bool,
}

/// A text to come.
#[derive(Debug, Clone)]
pub struct Arrival {
    /// Number given by the caller.
    pub id: u64,
    /// The prompt, at least one token.
    pub tokens: Vec<u32>,
    /// Lower goes first.
    pub priority: i32,
    /// With whom it shares.
    pub root: Node,
    /// Whether a beginning that is in the cache may be left out; else every token is computed.
    pub looks_up: bool,
    /// Whether the logits of every token are kept, for which a step has [`Budget::logits`].
    pub logits: bool,
}

impl Arrival {
    /// A text with nothing special about it.
    pub fn new(id: u64, tokens: Vec<u32>) -> Arrival {
        Arrival { id, tokens, priority: 0, root: Node::ROOT, looks_up: true, logits: false }
    }
}

/// Who goes first: by priority, then by arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Order {
    priority: i32,
    arrival: u64,
}

/// A sequence's share of a step: compute `tokens[computed..computed + count]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scheduled {
    /// The sequence.
    pub id: u64,
    /// Tokens to compute, with guesses.
    pub count: usize,
    /// How many of them, at the end, are guesses; as scheduled: for how many there is room.
    pub guesses: usize,
    /// All its tokens are computed after the step: the next one can be sampled.
    pub last: bool,
}

/// What to do next.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Blocks to copy, (from, to), in this order and before anything is computed.
    pub copies: Vec<(u32, u32)>,
    /// Shares, each of another sequence.
    pub shares: Vec<Scheduled>,
    /// Sequences that left the queue for the first time, and how many of their tokens were found in the cache.
    pub started: Vec<(u64, usize)>,
}

/// Most tokens of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// When somebody waits for the next token of an answer.
    pub mixed: usize,
    /// When there are only prompts.
    pub prompts: usize,
    /// Of sequences together that keep the logits of every token; a last token counts for nothing.
    pub logits: usize,
}

/// Logits take room: so many rows of a step have them, beside those of which a token is chosen.
pub const LOGIT_ROWS: usize = 64;

impl From<usize> for Budget {
    fn from(tokens: usize) -> Budget {
        Budget { mixed: tokens, prompts: tokens, logits: LOGIT_ROWS }
    }
}

/// Stands for a token that the step under way chooses, until [`Scheduler::known`] is told.
pub const UNKNOWN: u32 = 0;

/// Counts since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Times a sequence had to start again.
    pub preemptions: u64,
    /// Tokens looked up in the cache.
    pub looked_up: u64,
    /// Tokens found there.
    pub found: u64,
}

/// Sequences, running and waiting.
#[derive(Debug)]
pub struct Scheduler {
    pool: KvPool,
    /// In order.
    running: Vec<Sequence>,
    waiting: BTreeMap<Order, Sequence>,
    budget: Budget,
    /// Most running sequences.
    most: usize,
    /// Tokens that a new token sees, itself included, where every layer has a window.
    window: Option<usize>,
    arrivals: u64,
    counts: Counts,
}

/// Waiting sequences that one step looks at: the others wait for their turn, or for the same as these.
const LOOKED_AT: usize = 64;

impl Scheduler {
    /// An idle scheduler: at most `most` sequences at once.
    pub fn new(pool: KvPool, budget: Budget, most: usize, window: Option<usize>) -> Scheduler {
        assert!(most > 0, "at least one sequence must run");
        Scheduler {
            pool,
            running: vec![],
            waiting: BTreeMap::new(),
            budget,
            most,
            window,
            arrivals: 0,
            counts: Counts::default(),
        }
    }

    /// Changes the budget. Whoever lacks one token gets it in any case, and prompts together at least one.
    pub fn set_budget(&mut self, budget: Budget) {
        self.budget = budget;
    }

    /// Blocks and what is remembered of them.
    pub fn pool(&self) -> &KvPool {
        &self.pool
    }

    /// Blocks and what is remembered of them; nothing may run.
    pub fn pool_mut(&mut self) -> &mut KvPool {
        assert!(self.running.is_empty(), "blocks of running sequences are the scheduler's");
        &mut self.pool
    }

    /// Tokens that fit when a sequence has the pool alone.
    pub fn room(&self) -> usize {
        self.pool.room()
    }

    /// What happened so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Sequences running and waiting.
    pub fn load(&self) -> (usize, usize) {
        (self.running.len(), self.waiting.len())
    }

    /// Queues a sequence.
    pub fn add(&mut self, new: Arrival) {
        let order = Order { priority: new.priority, arrival: self.arrivals };
        self.arrivals += 1;
        let sequence = Sequence {
            id: new.id,
            tokens: new.tokens,
            guesses: 0,
            computed: 0,
            blocks: vec![],
            order,
            root: new.root,
            nodes: vec![],
            looks_up: new.looks_up,
            logits: new.logits,
            started: false,
        };
        self.waiting.insert(order, sequence);
    }

    /// Whether nothing runs or waits.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// A sequence that runs.
    pub fn running(&self, id: u64) -> Option<&Sequence> {
        self.running.iter().find(|s| s.id == id)
    }

    /// Sequences that run, in order.
    pub fn sequences(&self) -> impl Iterator<Item = &Sequence> {
        self.running.iter()
    }

    /// Ends a sequence, running or waiting, and takes its blocks back.
    pub fn remove(&mut self, id: u64) {
        if let Some(i) = self.running.iter().position(|s| s.id == id) {
            let mut gone = self.running.remove(i);
            gone.give_back(&mut self.pool);
        }
        self.waiting.retain(|_, s| s.id != id);
    }

    /// Sequences that lack one token: who may have guesses in the next step.
    pub fn decoding(&self) -> impl Iterator<Item = &Sequence> {
        self.running.iter().filter(|s| s.pending() == 1)
    }

    /// Tokens that running prompts lack.
    pub fn prompts(&self) -> usize {
        self.running.iter().map(Sequence::pending).filter(|&n| n > 1).sum()
    }

    /// Chooses the next step. Empty only when idle: a sequence that fits the pool alone always runs. `wanted` says how
    /// many guesses a sequence wants room for; it may get fewer, and need not use what it gets.
    pub fn schedule(&mut self, wanted: impl Fn(u64) -> usize) -> Step {
        let mut step = Step::default();
        let decoding = self.running.iter().any(|s| s.pending() == 1);
        let mut budget = if decoding { self.budget.mixed } else { self.budget.prompts };
        let mut preempted = false;
        let mut i = 0;
        while i < self.running.len() {
            if self.running[i].pending() > 1 {
                i += 1;
            } else if self.grow(i, 1) {
                step.shares.push(self.running[i].scheduled(1));
                budget = budget.saturating_sub(1);
                i += 1;
            } else {
                self.preempt_last(&mut step);
                preempted = true;
            }
        }
        let mut rows = self.budget.logits;
        if !preempted {
            self.admit(&mut step);
            // Prompts go on beside guesses, and with a window take blocks as they go on.
            let room = match (self.prompts(), self.window) {
                (0, _) => budget.min(rows).saturating_sub(1),
                (_, None) => (budget / 4).min(rows / 2),
                (_, Some(_)) => 0,
            };
            let given = self.make_room(room, wanted, &mut step);
            (budget, rows) = (budget - given, rows - given);
        }
        self.share_out(budget.max(1), rows.max(1), &mut step);
        step
    }

    /// Lengthens shares by room for guesses, at most `most` in all; returns how many there are. Nobody gets less than
    /// another who wants no more.
    fn make_room(&mut self, most: usize, wanted: impl Fn(u64) -> usize, step: &mut Step) -> usize {
        let mut left = most;
        let wants = step.shares.iter().map(|share| wanted(share.id)).enumerate();
        let mut wants: Vec<_> = wants.filter(|&(_, count)| count > 0).map(|(at, count)| (count, at)).collect();
        // What those leave who want little is for the others.
        wants.sort_unstable();
        for (before, &(count, at)) in wants.iter().enumerate() {
            let share = &mut step.shares[at];
            let fair = left.div_ceil(wants.len() - before);
            let Some(i) = self.running.iter().position(|s| s.id == share.id) else { continue };
            // Whoever runs may need one more block soon.
            let idle = self.pool.idle().saturating_sub(self.running.len());
            let held = (self.running[i].blocks.len() + idle) * self.pool.block_tokens();
            let fits = held.saturating_sub(self.running[i].computed + share.count);
            let count = count.min(fair).min(fits);
            if self.grow(i, share.count + count) {
                share.guesses = count;
                share.count += count;
                left -= count;
            }
        }
        most - left
    }

    /// Puts guesses behind a scheduled sequence's tokens and returns its share, of as many as there is room for.
    pub fn guess(&mut self, share: Scheduled, guesses: &[u32]) -> Scheduled {
        let Some(s) = self.running.iter_mut().find(|s| s.id == share.id) else { return share };
        debug_assert_eq!(s.guesses, 0);
        let guesses = &guesses[..guesses.len().min(share.guesses)];
        s.tokens.extend_from_slice(guesses);
        s.guesses = guesses.len();
        Scheduled { count: share.count - share.guesses + guesses.len(), guesses: guesses.len(), ..share }
    }

    /// Lets waiting sequences in.
    fn admit(&mut self, step: &mut Step) {
        let orders: Vec<Order> = self.waiting.keys().take(LOOKED_AT).copied().collect();
        for order in orders {
            if self.running.len() >= self.most {
                break;
            }
            let s = &self.waiting[&order];
            let hit = if s.looks_up { self.hit(s) } else { Hit::default() };
            let found = hit.blocks.len() * self.pool.block_tokens() + hit.part.map_or(0, |(_, n)| n);
            if s.looks_up && self.is_awaited(s, found) {
                continue;
            }
            // Room for the whole text, or it would soon be preempted; as much as it will ever hold, with a window.
            let whole = s.tokens.len() + usize::from(!self.running.is_empty());
            let held = self.window.map_or(whole, |w| whole.min(found + w + self.most_of(s)));
            let new = held.div_ceil(self.pool.block_tokens()).saturating_sub(hit.blocks.len());
            let spare = if self.running.is_empty() { 0 } else { self.running.len() + 1 };
            if new + spare > self.pool.idle() - self.pool.idle_of(&hit) {
                break;
            }
            let mut s = self.waiting.remove(&order).expect("a key of the map");
            self.pool.take(&hit);
            let at = hit.blocks.len();
            (s.blocks, s.nodes, s.computed) = (hit.blocks, hit.nodes, found);
            // With a window it may need less than its text, and takes the rest as it goes on.
            let tokens = held.min(s.tokens.len());
            self.pool.grow(&mut s.blocks, tokens).expect("there is room");
            step.copies.extend(hit.part.map(|(from, _)| (from, s.blocks[at])));
            if s.looks_up && !s.started {
                self.counts.looked_up += s.tokens.len() as u64;
                self.counts.found += found as u64;
            }
            if !std::mem::replace(&mut s.started, true) {
                step.started.push((s.id, found));
            }
            let place = self.running.partition_point(|r| r.order < s.order);
            self.running.insert(place, s);
        }
    }

    /// What the cache, and running sequences, have of a waiting one. Its last token is always computed.
    fn hit(&self, s: &Sequence) -> Hit {
        let tokens = &s.tokens[..s.tokens.len() - 1];
        let mut hit = self.pool.find(s.root, tokens);
        let size = self.pool.block_tokens();
        let (at, before) = (hit.blocks.len(), hit.nodes.last());
        for r in self.running.iter().filter(|r| r.root == s.root && r.computed > at * size) {
            let same = at == 0 || r.nodes.get(at - 1) == before;
            if same && r.blocks[at] != NO_BLOCK {
                let theirs = &r.tokens[at * size..r.computed.min((at + 1) * size)];
                let n = common(theirs, &tokens[at * size..]);
                if n > hit.part.map_or(0, |(_, n)| n) {
                    hit.part = Some((r.blocks[at], n));
                }
            }
        }
        hit
    }

    /// Whether a running prompt is about to compute more of a text than the `found` tokens that are there.
    fn is_awaited(&self, s: &Sequence, found: usize) -> bool {
        let size = self.pool.block_tokens();
        let most = s.tokens.len() - 1;
        let worth = |r: &Sequence| {
            let soon = common(&r.tokens, &s.tokens).min(most) / size * size;
            r.computed < soon && soon >= found + size
        };
        let before = |r: &&Sequence| r.root == s.root && r.pending() > 1 && r.order.priority <= s.order.priority;
        // With a window, what it computes may be gone before it is done.
        self.window.is_none() && self.running.iter().filter(before).any(worth)
    }

    /// Shares the rest of the budget between prompts.
    fn share_out(&mut self, mut budget: usize, mut rows: usize, step: &mut Step) {
        let waits = |s: &&Sequence| !step.shares.iter().any(|share| share.id == s.id);
        let mut prompts: Vec<(Order, usize, bool)> =
            self.running.iter().filter(waits).map(|s| (s.order, s.pending().min(self.most_of(s)), s.logits)).collect();
        let Some(&(first, wanted, logits)) = prompts.first() else { return };
        let wanted = if logits { wanted.min(rows) } else { wanted };
        let mut counts = vec![(first, wanted.min(budget.div_ceil(2)))];
        budget -= counts[0].1;
        if logits {
            rows -= counts[0].1;
        }
        prompts.remove(0);
        prompts.sort_by_key(|&(order, wanted, _)| (order.priority, wanted, order.arrival));
        for (order, wanted, logits) in prompts {
            let count = wanted.min(budget).min(if logits { rows } else { usize::MAX });
            budget -= count;
            if logits {
                rows -= count;
            }
            counts.push((order, count));
        }
        let more = if logits { budget.min(rows) } else { budget };
        counts[0].1 = wanted.min(counts[0].1 + more);
        for (order, count) in counts.into_iter().filter(|&(_, count)| count > 0) {
            // One that has gone meanwhile has given its blocks to those before it.
            while let Ok(i) = self.running.binary_search_by_key(&order, |s| s.order) {
                if self.grow(i, count) {
                    step.shares.push(self.running[i].scheduled(count));
                    break;
                }
                self.preempt_last(step);
            }
        }
    }

    /// Most tokens of a prompt in one step, as far as it is up to the prompt.
    fn most_of(&self, s: &Sequence) -> usize {
        if s.logits { self.budget.prompts.min(self.budget.logits.max(1)) } else { self.budget.prompts }
    }

    /// Blocks for `count` more tokens of a running sequence.
    fn grow(&mut self, i: usize, count: usize) -> bool {
        let s = &mut self.running[i];
        self.pool.grow(&mut s.blocks, s.computed + count).is_ok()
    }

    /// The last in order gives everything back and waits; the cache remembers what it had, while room lasts.
    fn preempt_last(&mut self, step: &mut Step) {
        let mut victim = self.running.pop().expect("somebody holds the blocks");
        step.shares.retain(|share| share.id != victim.id);
        victim.give_back(&mut self.pool);
        self.waiting.insert(victim.order, victim);
        self.counts.preemptions += 1;
    }

    /// Records that a share was computed, and the tokens that follow it: as many of its guesses as were right, and the
    /// one sampled after them. What was computed of wrong guesses is written over later.
    pub fn computed(&mut self, done: Scheduled, next: &[u32]) {
        let Some(s) = self.running.iter_mut().find(|s| s.id == done.id) else { return };
        s.drop_guesses();
        let right = next.len().saturating_sub(1);
        debug_assert!(right <= done.guesses);
        s.tokens.extend_from_slice(next);
        s.computed += done.count - done.guesses + right;
        s.remember(&mut self.pool);
        // What a tree of guesses took and the next token does not need is for others.
        if done.guesses > 0 {
            for block in s.blocks.drain(s.tokens.len().div_ceil(self.pool.block_tokens()).min(s.blocks.len())..) {
                self.pool.release(block);
            }
        }
        if let Some(window) = self.window {
            // The next row sees itself and what comes before in the window.
            let passed = (s.computed + 1).saturating_sub(window) / self.pool.block_tokens();
            for block in &mut s.blocks[..passed] {
                self.pool.release(std::mem::replace(block, NO_BLOCK));
            }
        }
    }

    /// The token that was recorded as [`UNKNOWN`], of a sequence that runs.
    pub fn known(&mut self, id: u64, token: u32) {
        let last = self.running.iter_mut().find(|s| s.id == id).and_then(|s| s.tokens.last_mut());
        if let Some(last) = last {
            *last = token;
        }
    }

    /// Whether the step behind one that is under way, with the last token of each of `count` sequences, is one more token
    /// of each: nobody else runs or can be let in, and there are blocks.
    pub fn is_steady(&self, count: usize) -> bool {
        let full = self.running.len() >= self.most;
        (self.waiting.is_empty() || full) && self.running.len() == count && self.pool.idle() >= count
    }

    /// Panics unless the pool's invariants hold.
    #[cfg(test)]
    fn check(&self) {
        self.pool.check(self.running.iter().map(|s| &s.blocks));
        assert!(self.running.is_sorted_by_key(|s| s.order));
        assert!(self.waiting.values().all(|s| s.blocks.is_empty() && s.computed == 0 && s.nodes.is_empty()));
    }
}

impl Sequence {
    fn pending(&self) -> usize {
        self.tokens.len() - self.guesses - self.computed
    }

    fn scheduled(&self, count: usize) -> Scheduled {
        Scheduled { id: self.id, count, guesses: 0, last: count == self.pending() }
    }

    fn drop_guesses(&mut self) {
        self.tokens.truncate(self.tokens.len() - self.guesses);
        self.guesses = 0;
    }

    /// Lets the pool remember blocks that have become full.
    fn remember(&mut self, pool: &mut KvPool) {
        let size = pool.block_tokens();
        while (self.nodes.len() + 1) * size <= self.computed {
            let at = self.nodes.len();
            let before = self.nodes.last().copied().unwrap_or(self.root);
            let tokens = &self.tokens[at * size..(at + 1) * size];
            if self.blocks[at] == NO_BLOCK {
                return;
            }
            match pool.remember(before, tokens, self.blocks[at]) {
                Some(node) => self.nodes.push(node),
                // Two texts of one hash: this one is not remembered.
                None => return,
            }
        }
    }

    /// Gives all blocks back; what was computed may be found again.
    fn give_back(&mut self, pool: &mut KvPool) {
        self.drop_guesses();
        let size = pool.block_tokens();
        let at = self.nodes.len();
        if at == self.computed / size && !self.computed.is_multiple_of(size) {
            let before = self.nodes.last().copied().unwrap_or(self.root);
            pool.remember(before, &self.tokens[at * size..self.computed], self.blocks[at]);
        }
        pool.free(&mut self.blocks);
        self.computed = 0;
        self.nodes.clear();
    }
}

/// Tokens that two texts have in common at their beginning.
fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests;
