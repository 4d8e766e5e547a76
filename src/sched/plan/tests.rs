use std::collections::HashMap;

use super::*;
use crate::random::Random;

/// A seeded source of numbers below `n`.
fn dice(seed: u64) -> impl FnMut(usize) -> usize {
    let mut random = Random::new(seed);
    move |n| random.below(n)
}

/// The "model": the next token is a hash of all tokens before it.
fn next(tokens: &[u32]) -> u32 {
    state(tokens) as u32 % 2
}

fn state(tokens: &[u32]) -> u64 {
    tokens.iter().fold(7u64, |h, &t| h.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(9) ^ u64::from(t + 1))
}

fn alone(prompt: &[u32], n: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    for _ in 0..n {
        tokens.push(next(&tokens));
    }
    tokens
}

/// KV memory: each slot holds a hash of the text up to its token, so a wrong block is found out.
struct Memory {
    slots: Vec<Vec<u64>>,
    size: usize,
    window: Option<usize>,
}

impl Memory {
    fn new(blocks: usize, size: usize, window: Option<usize>) -> Memory {
        Memory { slots: vec![vec![0; size]; blocks], size, window }
    }

    /// Runs a step as an executor does: copies, then all shares; returns the tokens that follow each: right guesses, and
    /// one more.
    fn run(&mut self, s: &Scheduler, step: &Step) -> Vec<Vec<u32>> {
        for &(from, to) in &step.copies {
            self.slots[to as usize] = self.slots[from as usize].clone();
        }
        let mut written = std::collections::HashSet::new();
        for share in &step.shares {
            let q = s.running(share.id).unwrap();
            for p in q.computed..q.computed + share.count {
                assert!(written.insert((q.blocks[p / self.size], p % self.size)), "two write one slot");
                self.slots[q.blocks[p / self.size] as usize][p % self.size] = content(q, p);
            }
        }
        let look = |share: &Scheduled| {
            let q = s.running(share.id).unwrap();
            let end = q.computed + share.count;
            let first = self.window.map_or(0, |w| (q.computed + 1).saturating_sub(w));
            for p in first..end {
                let held = self.slots[q.blocks[p / self.size] as usize][p % self.size];
                assert_eq!(held, content(q, p), "position {p} of {} tokens, from {}", end, q.computed);
            }
            let mut follows = vec![];
            for known in q.tokens.len() - share.guesses..=q.tokens.len() {
                follows.push(next(&q.tokens[..known]));
                if q.tokens.get(known) != follows.last() {
                    break;
                }
            }
            if share.last { follows } else { vec![] }
        };
        step.shares.iter().map(look).collect()
    }
}

/// Keys and values at a position: those of the text up to there, and of nobody with another salt.
fn content(q: &Sequence, p: usize) -> u64 {
    let salted = q.root != Node::ROOT;
    state(&q.tokens[..=p]) ^ u64::from(salted)
}

/// Random arrivals, priorities, salts and aborts in tiny pools of two tokens: everyone ends with the tokens of a lone
/// run, and every block always holds what its holders think.
#[test]
fn simulation() {
    let mut random = dice(1);
    let (mut total, mut shared, mut copies, mut passed, mut split) = (Counts::default(), 0, 0, 0, 0);
    let (mut guesses, mut right) = (0, 0);
    for round in 0..400 {
        let (size, blocks, most) = (1 + random(4), 8 + random(12), 1 + random(5));
        let room = size * blocks;
        let guessing = round % 2 == 1;
        let window = (random(3) == 0).then(|| 1 + random(room / 2));
        let budget = Budget { mixed: most + random(12), prompts: most + random(20), logits: 1 + random(6) };
        let mut s = Scheduler::new(KvPool::new(blocks, size), budget, most, window);
        let mut memory = Memory::new(blocks, size, window);
        let mut want: HashMap<u64, Vec<u32>> = HashMap::new();
        let mut lookers = HashMap::new();
        let (mut finished, mut added) = (0, 0);
        let stem: Vec<u32> = (0..room / 2).map(|_| random(2) as u32).collect();
        for step_number in 0..10_000 {
            if added < 20 && random(3) == 0 {
                let mut prompt = stem[..random(stem.len())].to_vec();
                prompt.extend((0..1 + random(room / 2 - prompt.len() + 1)).map(|_| random(2) as u32));
                prompt.truncate(room - 1);
                let n = 1 + random(room - prompt.len());
                want.insert(added, alone(&prompt, n));
                let root = if random(4) == 0 { Node::salted("a", 5) } else { Node::ROOT };
                let looks_up = random(5) > 0;
                lookers.insert(added, looks_up);
                let logits = random(4) == 0;
                s.add(Arrival { id: added, tokens: prompt, priority: random(3) as i32, root, looks_up, logits });
                added += 1;
            }
            if random(40) == 0 && added > 0 {
                let id = random(added as usize) as u64;
                s.remove(id);
                want.remove(&id);
            }
            let wants: HashMap<u64, usize> =
                s.decoding().map(|q| (q.id, if guessing { random(6) } else { 0 })).collect();
            let mut step = s.schedule(|id| wants.get(&id).copied().unwrap_or(0));
            assert_eq!(step.shares.is_empty(), s.is_idle(), "round {round}: stuck");
            for share in &mut step.shares {
                let q = s.running(share.id).unwrap();
                let room = share.guesses.min(want[&share.id].len() - q.tokens.len());
                assert!(share.guesses <= wants.get(&share.id).copied().unwrap_or(0));
                let mut text = q.tokens.clone();
                for _ in 0..room {
                    // Now and then a wrong one.
                    let right = next(&text);
                    text.push(if random(4) == 0 { 1 - right } else { right });
                }
                let from = text.len() - room;
                *share = s.guess(*share, &text[from..]);
                guesses += room;
            }
            s.check();
            let count: usize = step.shares.iter().map(|x| x.count).sum();
            assert!(count <= s.budget.mixed.max(s.budget.prompts), "{step:?}");
            let logits = |x: &&Scheduled| s.running(x.id).is_some_and(|q| q.logits && q.pending() > 1);
            let rows: usize = step.shares.iter().filter(logits).map(|x| x.count).sum();
            assert!(rows <= s.budget.logits, "{step:?} with {:?}", s.budget);
            split += usize::from(rows == s.budget.logits);
            for (id, found) in &step.started {
                assert!(lookers[id] || *found == 0);
            }
            copies += step.copies.len();
            let tokens = memory.run(&s, &step);
            for (done, mut tokens) in step.shares.into_iter().zip(tokens) {
                let q = s.running(done.id).unwrap();
                tokens.truncate(want[&done.id].len() + done.guesses - q.tokens.len());
                right += tokens.len().saturating_sub(1);
                s.computed(done, &tokens);
                s.check();
                let q = s.running(done.id).unwrap();
                assert!(q.guesses == 0 && q.computed < q.tokens.len() || tokens.is_empty());
                passed += q.blocks.iter().filter(|&&b| b == NO_BLOCK).count();
                if q.tokens.len() == want[&done.id].len() {
                    assert_eq!(q.tokens, want[&done.id], "round {round} step {step_number}");
                    s.remove(done.id);
                    want.remove(&done.id);
                    finished += 1;
                }
            }
            shared += s.pool.blocks().saturating_sub(s.pool.idle());
            if added == 20 && want.is_empty() {
                break;
            }
        }
        assert!(want.is_empty() && finished > 0, "round {round}: {} requests never ended", want.len());
        assert!(s.is_idle() && s.pool.idle() == blocks);
        s.check();
        total.preemptions += s.counts().preemptions;
        total.looked_up += s.counts().looked_up;
        total.found += s.counts().found;
    }
    assert!(guesses > 10_000 && right > 5_000, "{right} of {guesses} guesses were right");
    assert!(split > 500, "{split} steps had as many rows with logits as they may");
    assert!(total.preemptions > 200, "only {} preemptions: the pools were not tiny enough", total.preemptions);
    assert!(
        total.found * 5 > total.looked_up && copies > 1000 && passed > 1000,
        "{total:?} {copies} {passed} {shared}"
    );
}

fn prompt(n: usize, seed: u64) -> Vec<u32> {
    let mut random = dice(seed);
    (0..n).map(|_| random(1000) as u32).collect()
}

/// Drives the scheduler until it is idle; calls `each` with every step before it is run. Sequences end after `answer`
/// tokens of their own.
fn drive(s: &mut Scheduler, memory: &mut Memory, answer: usize, mut each: impl FnMut(&Scheduler, &Step)) {
    let mut left: HashMap<u64, usize> = HashMap::new();
    while !s.is_idle() {
        let step = s.schedule(|_| 0);
        each(s, &step);
        let tokens = memory.run(s, &step);
        for (done, tokens) in step.shares.into_iter().zip(tokens) {
            s.computed(done, &tokens);
            if !tokens.is_empty() {
                let left = left.entry(done.id).or_insert(answer);
                *left -= 1;
                if *left == 0 {
                    s.remove(done.id);
                }
            }
        }
    }
}

#[test]
fn what_many_share_is_computed_once() {
    let mut s = Scheduler::new(KvPool::new(200, 16), Budget::from(128), 40, None);
    let mut memory = Memory::new(200, 16, None);
    let stem = prompt(1000, 1);
    for id in 0..32 {
        s.add(Arrival::new(id, [&stem[..], &prompt(10, 2 + id)].concat()));
    }
    let mut computed = 0;
    drive(&mut s, &mut memory, 1, |_, step| computed += step.shares.iter().map(|x| x.count).sum::<usize>());
    // 1000 once, and the ten of each; a block's rest is copied.
    assert_eq!(computed, 1000 + 32 * 10);
    assert_eq!(s.counts().preemptions, 0);
}

#[test]
fn a_fork_copies_the_last_block() {
    let mut s = Scheduler::new(KvPool::new(16, 16), Budget::from(64), 4, None);
    let mut memory = Memory::new(16, 16, None);
    let text = prompt(40, 9);
    (0..3).for_each(|id| s.add(Arrival::new(id, text.clone())));
    let (mut computed, mut copies) = (0, 0);
    drive(&mut s, &mut memory, 4, |_, step| {
        computed += step.shares.iter().map(|x| x.count).sum::<usize>();
        copies += step.copies.len();
    });
    assert_eq!((computed, copies), (40 + 2 + 3 * 3, 2));
}

#[test]
fn a_long_prompt_makes_nobody_wait() {
    let mut s = Scheduler::new(KvPool::new(400, 16), Budget { mixed: 64, prompts: 256, logits: LOGIT_ROWS }, 8, None);
    let mut memory = Memory::new(400, 16, None);
    s.add(Arrival::new(0, prompt(10, 1)));
    s.add(Arrival::new(1, prompt(2500, 2)));
    let mut steps = 0;
    let mut short_done = None;
    let mut long_done = None;
    let mut added = false;
    drive(&mut s, &mut memory, 60, |s, step| {
        steps += 1;
        let count: usize = step.shares.iter().map(|x| x.count).sum();
        if steps > 1 && s.running(0).is_some_and(|q| q.pending() == 1) {
            assert!(step.shares.iter().any(|x| x.id == 0), "who decodes gets a token in every step");
            assert!(count <= 64);
        }
        long_done = long_done.or(step.shares.iter().any(|x| x.id == 1 && x.last).then_some(steps));
    });
    assert!(long_done.unwrap() <= 2500 / 63 + 2, "{long_done:?}");
    // A short prompt that comes behind a long one.
    s.add(Arrival::new(1, prompt(2500, 3)));
    steps = 0;
    while short_done.is_none() {
        if steps == 2 && !std::mem::replace(&mut added, true) {
            s.add(Arrival::new(2, prompt(120, 4)));
        }
        let step = s.schedule(|_| 0);
        let tokens = memory.run(&s, &step);
        for (done, tokens) in step.shares.into_iter().zip(tokens) {
            if done.id == 2 && done.last {
                short_done = Some(steps);
            }
            s.computed(done, &tokens);
        }
        steps += 1;
    }
    assert!(short_done.unwrap() <= 4, "{short_done:?}");
}

#[test]
fn lower_priorities_wait_and_lose_their_blocks_first() {
    let mut s = Scheduler::new(KvPool::new(4, 4), Budget::from(16), 2, None);
    let mut memory = Memory::new(4, 4, None);
    let arrival = |id, priority| Arrival { priority, ..Arrival::new(id, prompt(5, id)) };
    s.add(arrival(0, 5));
    s.add(arrival(1, -1));
    s.add(arrival(2, 5));
    let mut order = vec![];
    let mut last = vec![];
    drive(&mut s, &mut memory, 8, |_, step| {
        order.extend(step.started.iter().map(|&(id, _)| id));
        last = step.shares.iter().map(|x| x.id).collect();
    });
    assert_eq!(order, [1, 0, 2]);
    assert_eq!(last, [2]);
}

#[test]
fn a_window_holds_no_more_than_it_sees() {
    let mut s = Scheduler::new(KvPool::new(8, 16), Budget::from(32), 2, Some(50));
    let mut memory = Memory::new(8, 16, Some(50));
    s.add(Arrival::new(0, prompt(100, 1)));
    let mut most = 0;
    let mut id = 0;
    drive(&mut s, &mut memory, 25, |s, _| {
        most = most.max(s.pool.blocks() - s.pool.idle());
        id += 1;
    });
    assert!(most <= (50usize + 32).div_ceil(16) + 1, "{most} blocks held");
}

/// A prompt that goes first needs more blocks while one that decodes has its share of the step already.
#[test]
fn whoever_loses_its_blocks_loses_its_share_of_the_step() {
    let mut s = Scheduler::new(KvPool::new(7, 4), Budget::from(8), 2, Some(8));
    let mut memory = Memory::new(7, 4, Some(8));
    s.add(Arrival { priority: 1, ..Arrival::new(0, prompt(2, 1)) });
    let (mut steps, mut lost) = (0, 0);
    while s.running(1).is_none_or(|q| q.pending() > 1) {
        // While the first one holds one block, and will hold three.
        if steps == 1 {
            s.add(Arrival::new(1, prompt(100, 2)));
        }
        let before = s.counts().preemptions;
        let step = s.schedule(|_| 0);
        s.check();
        if s.counts().preemptions > before {
            lost += 1;
            assert!(step.shares.iter().all(|share| s.running(share.id).is_some()), "{step:?}");
        }
        let tokens = memory.run(&s, &step);
        for (done, tokens) in step.shares.into_iter().zip(tokens) {
            s.computed(done, &tokens);
        }
        steps += 1;
        assert!(steps < 200, "the prompt does not get through");
    }
    assert!(lost > 0, "nobody lost anything in {steps} steps");
}

#[test]
fn a_budget_below_the_number_of_answers_stops_neither_them_nor_prompts() {
    let mut s = Scheduler::new(KvPool::new(64, 4), Budget::from(2), 6, None);
    let mut memory = Memory::new(64, 4, None);
    (0..5).for_each(|id| s.add(Arrival::new(id, prompt(1, id))));
    s.add(Arrival::new(9, prompt(20, 9)));
    let mut ended = None;
    let mut steps = 0;
    drive(&mut s, &mut memory, 40, |s, step| {
        steps += 1;
        let short = s.running.iter().filter(|q| q.pending() == 1);
        let (all, before) = (short.clone().count(), short.filter(|q| q.computed > 0).count());
        let count: usize = step.shares.iter().map(|x| x.count).sum();
        assert!(step.shares.len() >= before && count <= all + 1, "{step:?}");
        ended = ended.or(step.shares.iter().any(|x| x.id == 9 && x.last).then_some(steps));
    });
    assert!(ended.unwrap() <= 5 + 20, "{ended:?}");
}

#[test]
fn rows_with_logits_are_few_in_a_step_and_take_nothing_from_others() {
    let budget = Budget { mixed: 256, prompts: 256, logits: 40 };
    let mut s = Scheduler::new(KvPool::new(400, 16), budget, 12, None);
    let mut memory = Memory::new(400, 16, None);
    for id in 0..8 {
        s.add(Arrival { logits: true, looks_up: false, ..Arrival::new(id, prompt(100, id)) });
    }
    s.add(Arrival::new(9, prompt(600, 9)));
    let (mut steps, mut others) = (0, 0);
    drive(&mut s, &mut memory, 1, |s, step| {
        let of = |logits: bool| {
            let mine = |x: &&Scheduled| s.running(x.id).is_some_and(|q| q.logits == logits && q.pending() > 1);
            step.shares.iter().filter(mine).map(|x| x.count).sum::<usize>()
        };
        assert!(of(true) <= 40, "{step:?}");
        steps += 1;
        others += of(false);
    });
    assert_eq!(others, 600);
    assert!((800 / 40..=800 / 40 + 3).contains(&steps), "{steps} steps");
}
