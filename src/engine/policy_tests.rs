//! What the policy of guesses reaches with a head that is right so-and-so often, on a machine whose times are given: no
//! model and no clock, but the engine's own [`Guesser`], scheduler and counts.

use std::collections::BTreeMap;

use quern_kernels::cpu::kv::BLOCK;

use super::{
    Request,
    active::Active,
    ahead::{Ahead, Guesser, Written, written_places},
    writer::{Ability, mean},
};
use crate::{
    draft::{Guess, Method, Tree},
    random::Random,
    sched::{Arrival, Budget, KvPool, LOGIT_ROWS, Node, Scheduler},
};

/// A machine and a head on it.
#[derive(Debug, Clone, Copy)]
struct Setting {
    /// Times of steps of 1, 2 ... rows; beyond they go on as between the last two.
    steps: [f64; 5],
    /// Time of a pass of the head, in steps of one row.
    pass: f64,
    /// How often a guess of the first, second, third place is right if all before it are.
    right: [f64; 3],
    /// The head says for each guess how likely it is right: this often it is rather sure or rather not, and else as sure
    /// as in the mean.
    tells: f64,
}

/// SmolLM2-135M with an EAGLE-3 head on two cores (BENCHMARKS.md), near enough.
const USUAL: Setting =
    Setting { steps: [1.0, 1.10, 1.21, 1.40, 1.55], pass: 0.12, right: [0.47, 0.40, 0.35], tells: 0.5 };

impl Setting {
    fn step(&self, rows: usize) -> f64 {
        let last = self.steps.len();
        match rows <= last {
            true => self.steps[rows - 1],
            false => self.steps[last - 1] + (rows - last) as f64 * (self.steps[last - 1] - self.steps[last - 2]),
        }
    }

    /// How sure the head is of its likeliest guess for a place; it is right as often as it is sure.
    fn sure(&self, place: usize, random: &mut Random) -> f64 {
        let mean = self.right[place.min(self.right.len() - 1)];
        if random.fraction() >= self.tells {
            return mean;
        }
        // Two values whose mean is the mean, half way to 0 and 1 or further.
        let (low, high) = (mean * 0.25, mean + (1.0 - mean) * 0.75);
        if random.fraction() < (mean - low) / (high - low) { high } else { low }
    }

    /// Time of a step, which others on the machine disturb now and then.
    fn took(&self, time: f64, random: &mut Random) -> f64 {
        let noise = 0.97 + 0.06 * random.fraction();
        time * if random.fraction() < 0.01 { 2.5 } else { noise }
    }
}

/// A right guess; others are larger.
const RIGHT: u32 = 1;

/// A tree as the head grows it: every pass costs as much. Returns it and how many passes there were.
fn grow(setting: &Setting, guess: &Guess, depth: usize, random: &mut Random) -> (Tree, usize) {
    let limits = guess.shape.expect("a tree is wanted");
    let (mut tree, mut passes, mut nodes) = (Tree::new(limits), 0, vec![None]);
    while passes < depth && !nodes.is_empty() {
        let mut level = vec![];
        for node in &nodes {
            let sure = setting.sure(passes, random);
            let second = (1.0 - sure).min(sure) * 0.3;
            let chosen = random.fraction();
            let may = node.is_none_or(|node| tree.node(node).0 == RIGHT);
            let is =
                |from: f64, share: f64| if may && (from..from + share).contains(&chosen) { RIGHT } else { RIGHT + 1 };
            level.push((*node, [(is(0.0, sure), sure), (is(sure, second), second)]));
        }
        tree.grow(level.iter().map(|(node, choices)| (*node, &choices[..])));
        passes += 1;
        nodes = tree.frontier(limits.width).into_iter().map(Some).collect();
    }
    (tree, passes)
}

/// Tokens in the time of a step of one row, of texts of 128 tokens that are guessed as `speculation` says.
fn speed(setting: &Setting, speculation: &str, texts: u64, seed: u64) -> f64 {
    const STEP: f64 = 0.004;
    let mut random = Random::new(seed);
    let speculation = speculation.parse().expect("a method");
    let mut guesser = Guesser::new(speculation);
    let ability = Ability { method: Method::Eagle, pass: 0.0, at_once: false, context: 4096, most: 16, branches: true };
    guesser.writer = Some(ability);
    guesser.leaves = usize::MAX;
    let budget = Budget { mixed: 64, prompts: 512, logits: LOGIT_ROWS };
    let mut scheduler = Scheduler::new(KvPool::new(64, BLOCK), budget, 4, None);
    let (mut time, mut pass, mut count) = (0.0, 0.0, 0);
    for id in 0..texts {
        let prompt: Vec<u32> = (0..20).map(|_| random.below(1 << 20) as u32).collect();
        let (root, priority) = (Node::ROOT, 0);
        scheduler.add(Arrival { id, tokens: prompt.clone(), priority, root, looks_up: false, logits: false });
        let request = Request { prompt, max_tokens: 128, ..Request::default() };
        let mut active = BTreeMap::from([(id, Active::new(request, 1 << 20, Ahead::new(speculation, false)))]);
        while active[&id].left() > 0 {
            let mut guesses = guesser.guess(&scheduler, &mut active, budget, 4096);
            let step = scheduler.schedule(|id| guesses.get(&id).map_or(0, Guess::room));
            let share = step.shares[0];
            let mut guess = guesses.remove(&id).unwrap_or_default();
            let room = guess.room().min(share.guesses);
            let depth = guess.to_write.min(room);
            let mut passes = 0;
            if depth > 0 && guess.shape.is_some() {
                let tree;
                (tree, passes) = grow(setting, &guess, depth, &mut random);
                let written = Written { id, tree, room };
                guess = guesser.choose(vec![written], 0, LOGIT_ROWS, &mut active).remove(0).1;
            } else if depth > 0 {
                passes = depth;
                let right = |i| {
                    let sure = setting.sure(i, &mut random);
                    if random.fraction() < sure { RIGHT } else { RIGHT + 1 }
                };
                guess.tokens = (0..depth).map(right).collect();
                guess.places = written_places(depth).collect();
            }
            for _ in 0..passes {
                let took = setting.took(setting.pass * STEP, &mut random);
                mean(&mut pass, took);
                time += took;
            }
            guesser.writer = Some(Ability { pass, ..ability });
            let mut path = vec![];
            while let Some(next) =
                (0..guess.tokens.len()).find(|&i| guess.parent(i) == path.last().copied() && guess.tokens[i] == RIGHT)
            {
                path.push(next);
            }
            let share = scheduler.guess(share, &guess.tokens);
            let answer = share.last;
            let active = active.get_mut(&id).expect("it runs");
            active.ahead_mut().expects(guess, share.count - share.guesses);
            if share.count - share.guesses == 1 {
                let took = setting.took(setting.step(share.count) * STEP, &mut random);
                guesser.took(share.count, took);
                time += took;
                count += path.len() + 1;
            }
            if share.guesses > 0 {
                guesser.checked(active.ahead_mut(), share.guesses, &path);
            }
            let tokens: Vec<u32> = (0..path.len() + 1).map(|_| random.below(1 << 20) as u32).collect();
            tokens.iter().filter(|_| answer).for_each(|&token| drop(active.follow(token, 4096)));
            scheduler.computed(share, &tokens);
        }
        let text = scheduler.running(id).expect("it runs").tokens.clone();
        guesser.ended(active[&id].ahead(), &text[20..]);
        scheduler.remove(id);
    }
    count as f64 * STEP / time
}

/// The fastest fixed number of guesses, none among them.
fn best(setting: &Setting) -> f64 {
    let speeds = ["off", "eagle:1", "eagle:2", "eagle:3"].map(|fixed| speed(setting, fixed, 40, 1));
    speeds.into_iter().fold(0.0, f64::max)
}

/// The head and the machine that there are: as fast as the best fixed number of guesses, with what else `auto` may take.
#[test]
fn what_pays_with_a_usual_head_is_found() {
    for setting in [USUAL, Setting { tells: 0.0, ..USUAL }, Setting { pass: 0.2, ..USUAL }] {
        let best = best(&setting);
        for method in ["eagle", "auto"] {
            let got = speed(&setting, method, 40, 2);
            assert!(got >= 0.97 * best && best > 1.1, "{method}: {got:.3}, fixed {best:.3}: {setting:?}");
        }
    }
}

/// Whatever they are like: not much slower than the best fixed number of guesses, nor than none.
#[test]
fn what_pays_is_found() {
    for pass in [0.05, 0.12, 0.2, 0.3] {
        for right in [0.05, 0.2, 0.35, 0.47, 0.8] {
            for tells in [0.0, 0.5] {
                let setting = Setting { pass, right: [right, right * 0.85, right * 0.75], tells, ..USUAL };
                let (best, off) = (best(&setting), speed(&setting, "off", 40, 1));
                let got = speed(&setting, "eagle", 40, 1);
                assert!(got >= 0.96 * best, "{got:.3}, fixed {best:.3}: {setting:?}");
                assert!(got >= 0.98 * off, "{got:.3}, none {off:.3}: {setting:?}");
            }
        }
    }
}
