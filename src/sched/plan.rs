//! The scheduler: hands out each step's token budget.
//!
//! One rule: every sequence has `computed` chasing the tokens it has. Prompts in chunks, decoding
//! and starting again after preemption are the same thing. Running sequences come first, in the
//! order of their admission, then waiting ones. When blocks run out, the youngest running sequence
//! gives its blocks back and starts again later, from the front of the queue.

use std::collections::VecDeque;

use super::kv::KvPool;

/// One text in progress.
#[derive(Debug)]
pub struct Sequence {
    /// Number given by the caller.
    pub id: u64,
    /// Prompt and output so far.
    pub tokens: Vec<u32>,
    /// Tokens whose keys and values are in the cache.
    pub computed: usize,
    /// Blocks held, in order.
    pub blocks: Vec<u32>,
}

/// A sequence's share of a step: compute `tokens[computed..computed + count]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scheduled {
    /// The sequence.
    pub id: u64,
    /// Tokens to compute.
    pub count: usize,
    /// All its tokens are computed after the step: the next one can be sampled.
    pub last: bool,
}

/// Sequences, running and waiting.
#[derive(Debug)]
pub struct Scheduler {
    pool: KvPool,
    running: Vec<Sequence>,
    waiting: VecDeque<Sequence>,
    /// Most tokens of a step.
    budget: usize,
    /// Most running sequences.
    most: usize,
    /// Times a sequence had to start again.
    preemptions: u64,
}

impl Scheduler {
    /// An idle scheduler. `budget` tokens a step, at most `most` sequences at once.
    pub fn new(pool: KvPool, budget: usize, most: usize) -> Scheduler {
        assert!(budget >= most && most > 0, "every running sequence must get a token in a step");
        Scheduler { pool, running: vec![], waiting: VecDeque::new(), budget, most, preemptions: 0 }
    }

    /// Tokens that fit when a sequence has the pool alone.
    pub fn room(&self) -> usize {
        self.pool.room()
    }

    /// Times a sequence gave its blocks back and had to start again.
    pub fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// Queues a sequence.
    pub fn add(&mut self, id: u64, tokens: Vec<u32>) {
        self.waiting.push_back(Sequence { id, tokens, computed: 0, blocks: vec![] });
    }

    /// Whether nothing runs or waits.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// A sequence that runs.
    pub fn running(&self, id: u64) -> Option<&Sequence> {
        self.running.iter().find(|s| s.id == id)
    }

    /// Ends a sequence, running or waiting, and takes its blocks back.
    pub fn remove(&mut self, id: u64) {
        if let Some(i) = self.running.iter().position(|s| s.id == id) {
            let mut gone = self.running.remove(i);
            self.pool.free(&mut gone.blocks);
        }
        self.waiting.retain(|s| s.id != id);
    }

    /// Chooses the next step. Empty only when idle: a sequence that fits the pool alone always runs.
    pub fn schedule(&mut self) -> Vec<Scheduled> {
        let mut budget = self.budget;
        let mut step: Vec<Scheduled> = vec![];
        let mut preempted = false;
        let mut i = 0;
        while i < self.running.len() && budget > 0 {
            // Later sequences keep at least one token each: a long prompt must not stop the others.
            let others = self.running.len() - i - 1;
            let count = self.running[i].pending().min(budget.saturating_sub(others).max(1));
            let s = &mut self.running[i];
            if self.pool.grow(&mut s.blocks, s.computed + count).is_ok() {
                budget -= count;
                step.push(s.scheduled(count));
                i += 1;
                continue;
            }
            // Later sequences have not been scheduled yet, so the victim costs the step nothing.
            let mut victim = self.running.pop().expect("i is in range");
            self.pool.free(&mut victim.blocks);
            victim.computed = 0;
            self.waiting.push_front(victim);
            preempted = true;
            self.preemptions += 1;
        }
        while !preempted && budget > 0 && self.running.len() < self.most {
            let Some(mut s) = self.waiting.pop_front() else { break };
            let count = s.pending().min(budget);
            // Room for the whole text, or it would soon be preempted; and a block to go on.
            let whole = s.tokens.len() + 1;
            let fits = whole.div_ceil(self.pool.block_tokens()) <= self.pool.idle() || self.running.is_empty();
            if !fits || self.pool.grow(&mut s.blocks, count).is_err() {
                self.waiting.push_front(s);
                break;
            }
            budget -= count;
            step.push(s.scheduled(count));
            self.running.push(s);
        }
        step
    }

    /// Records that a scheduled share was computed, and the token sampled after it.
    pub fn computed(&mut self, done: Scheduled, next: Option<u32>) {
        if let Some(s) = self.running.iter_mut().find(|s| s.id == done.id) {
            s.computed += done.count;
            s.tokens.extend(next);
        }
    }
}

impl Sequence {
    fn pending(&self) -> usize {
        self.tokens.len() - self.computed
    }

    fn scheduled(&self, count: usize) -> Scheduled {
        Scheduled { id: self.id, count, last: count == self.pending() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    /// The "model": the next token is a hash of all tokens before it.
    fn next(tokens: &[u32]) -> u32 {
        tokens.iter().fold(7u32, |h, &t| h.wrapping_mul(31).wrapping_add(t + 1)) % 2
    }

    fn alone(prompt: &[u32], n: usize) -> Vec<u32> {
        let mut tokens = prompt.to_vec();
        for _ in 0..n {
            tokens.push(next(&tokens));
        }
        tokens
    }

    /// Random arrivals and aborts in tiny pools: everyone ends with the tokens of a lone run.
    #[test]
    fn simulation() {
        let mut seed = 1u64;
        let mut random = move |n: usize| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) as usize % n
        };
        let mut preemptions = 0;
        for round in 0..200 {
            let (block, blocks, most) = (1 + random(4), 8 + random(12), 1 + random(5));
            let room = block * blocks;
            let mut s = Scheduler::new(KvPool::new(blocks, block), most + random(12), most);
            let mut want: HashMap<u64, (Vec<u32>, usize)> = HashMap::new();
            let mut finished = 0;
            let mut added = 0;
            for step_number in 0..10_000 {
                if added < 20 && random(3) == 0 {
                    let prompt: Vec<u32> = (0..1 + random(room / 2)).map(|_| random(2) as u32).collect();
                    let n = 1 + random(room - prompt.len());
                    want.insert(added, (alone(&prompt, n), n));
                    s.add(added, prompt);
                    added += 1;
                }
                if random(40) == 0 && added > 0 {
                    let id = random(added as usize) as u64;
                    s.remove(id);
                    want.remove(&id);
                }
                let step = s.schedule();
                assert_eq!(step.is_empty(), s.is_idle(), "round {round}: stuck");
                assert!(step.iter().map(|x| x.count).sum::<usize>() <= s.budget);
                s.pool.check(s.running.iter().map(|q| &q.blocks));
                for done in step {
                    let q = s.running(done.id).unwrap();
                    assert!(q.blocks.len() * block >= q.computed + done.count);
                    let token = done.last.then(|| next(&q.tokens));
                    s.computed(done, token);
                    let q = s.running(done.id).unwrap();
                    if q.tokens.len() == want[&done.id].0.len() {
                        assert_eq!(q.tokens, want[&done.id].0, "round {round} step {step_number}");
                        s.remove(done.id);
                        want.remove(&done.id);
                        finished += 1;
                    }
                }
                if added == 20 && want.is_empty() {
                    break;
                }
            }
            assert!(want.is_empty() && finished > 0, "round {round}: {} requests never ended", want.len());
            assert!(s.is_idle() && s.pool.idle() == blocks);
            preemptions += s.preemptions();
        }
        assert!(preemptions > 100, "only {preemptions} preemptions: the pools were not tiny enough");
    }
}
