//! Guesses of the sequences of a step: who gets how many, and what is learned from what became of them.

use std::{borrow::Cow, collections::BTreeMap};

use quern_kernels::{
    exec::{Mask, tree_mask},
    sample::Distribution,
};

use super::{active::Active, writer::Ability};
use crate::{
    draft::{
        Chances, Counts, Guess, Limits, Lookup, MOST, MOST_WIDTH, Method, Past, Place, Source, Speculation, Times,
        Tree, depth, lengths, parent, worth,
    },
    sched::{Budget, Scheduler, Sequence},
};

/// What the engine knows about guesses of all requests.
pub(super) struct Guesser {
    /// How requests are guessed that do not say it.
    pub speculation: Speculation,
    /// What became of all guesses.
    pub counts: Counts,
    times: Times,
    chances: Chances,
    /// Answers that ended.
    pub past: Past,
    /// What the writer can do; `None`: there is none.
    pub writer: Option<Ability>,
    /// Most ends of paths of a tree that the device checks.
    pub leaves: usize,
    /// Of the step that is planned: its rows without guesses, and the answers among them.
    step: (usize, usize),
    /// Guesses checked for each level of a tree that was written, in the mean.
    checked: f64,
}

/// A request's part.
pub(super) struct Ahead {
    /// How it is guessed.
    pub speculation: Speculation,
    lookup: Lookup,
    chances: Chances,
    /// Whether its text may be guessed from others' and theirs from its.
    shares: bool,
    /// Of the guesses of this step.
    places: Vec<Place>,
    /// What they hang on, and the mask of the step's rows; both empty for a chain.
    parents: Vec<Option<usize>>,
    rows: Vec<u64>,
    /// Levels that were written of their tree.
    depth: usize,
    /// What they were drawn from, where that matters.
    pub from: Vec<Distribution>,
}

/// A guess of which not as many are right as one in twenty is never worth a look.
const LEAST: f64 = 0.05;

/// How sure a head is where it is very sure.
const SURE: f64 = 0.9;

/// Guesses of one sequence in a tree whose size nobody asked for.
const MOST_AT_ONCE: usize = 32;

/// A tree that was written for a request.
pub(super) struct Written {
    pub id: u64,
    pub tree: Tree,
    /// Rows that it may have.
    pub room: usize,
}

/// Whether guesses that cost nothing bring a text at most as many tokens in its time as those that are written, by the chances of
/// both.
fn said_pays_no_more(times: &Times, pass: f64, at_once: bool, said: Vec<f64>, written: Vec<f64>) -> bool {
    let fastest = |chances: &[f64], cost: f64, each: f64| {
        let (mut value, mut tokens, mut best) = (1.0, 1.0, 1.0 / times.ratio(1));
        for (i, chance) in chances.iter().enumerate() {
            value *= chance;
            tokens += value;
            let time = times.ratio(i + 2) + cost + each * (i + 1) as f64;
            best = f64::max(best, tokens / time);
        }
        best
    };
    let (cost, each) = if at_once { (pass, 0.0) } else { (0.0, pass) };
    said.is_empty() || fastest(&said, 0.0, 0.0) <= fastest(&written, cost, each)
}

/// Where guesses come from that are written.
pub(super) fn written_places(count: usize) -> impl Iterator<Item = Place> {
    (1..=count).map(|i| Place::new(Source::Model, i))
}

impl Ahead {
    pub fn new(speculation: Speculation, shares: bool) -> Ahead {
        let (lookup, chances) = (Lookup::default(), Chances::of_one());
        let (places, parents, rows, from) = (vec![], vec![], vec![], vec![]);
        Ahead { speculation, lookup, chances, shares, places, parents, rows, depth: 0, from }
    }
}

impl Guesser {
    pub fn new(speculation: Speculation) -> Guesser {
        let (counts, times, chances) = (Counts::default(), Times::default(), Chances::of_all());
        let (past, writer, leaves, step) = (Past::default(), None, 1, (0, 0));
        Guesser { speculation, counts, times, chances, past, writer, leaves, step, checked: 1.0 }
    }

    /// Guesses for the next step, by request; `context` is the longest sequence.
    pub fn guess(
        &mut self,
        scheduler: &Scheduler,
        active: &mut BTreeMap<u64, Active>,
        budget: Budget,
        context: usize,
    ) -> BTreeMap<u64, Guess> {
        let mut guesses = BTreeMap::new();
        let (mut ids, mut offers, mut answers) = (vec![], vec![], 0);
        let (mut writing, mut written) = (vec![], vec![]);
        // What one asks for must not make others wait, unless it is asked for all.
        let alone = scheduler.load() == (1, 0);
        for sequence in scheduler.decoding() {
            answers += 1;
            let Some(active) = active.get_mut(&sequence.id) else { continue };
            let guess = self.of(sequence, active, context);
            let ahead = active.ahead();
            let obeys = alone || ahead.speculation == self.speculation;
            if ahead.speculation.fixed.is_none() || !obeys {
                let chance = |place| ahead.chances.of(place, &self.chances);
                if guess.to_write > 0 {
                    writing.push(sequence.id);
                    written.push(written_places(guess.to_write).map(chance).collect());
                }
                ids.push(sequence.id);
                offers.push(guess.places.iter().map(|&place| chance(place)).collect::<Vec<f64>>());
            }
            guesses.insert(sequence.id, guess);
        }
        let rows = answers + scheduler.prompts().min(budget.mixed);
        self.step = (rows, answers);
        if let Some(writer) = self.writer.filter(|_| !writing.is_empty()) {
            let (pass, Ability { at_once, branches, .. }) = (self.pass(writer), writer);
            let cost = |depth: usize| if at_once { pass } else { pass * depth as f64 };
            let checked = if branches { self.checked } else { 1.0 };
            let pays = |checked, offers: &_| depth(&self.times, rows, answers, budget.logits, cost, checked, offers);
            let depth = pays(checked, &written);
            // A tree goes on where its head is sure of what it has.
            let deepest = if depth > 0 && !at_once {
                let sure = written.iter().map(|offer: &Vec<f64>| {
                    let first = offer.first().map(|chance| chance.max(SURE));
                    first.into_iter().chain(offer.iter().skip(1).copied()).collect()
                });
                depth.max(pays(1.0, &sure.collect::<Vec<Vec<f64>>>()))
            } else {
                depth
            };
            let each = pass / writing.len() as f64;
            for id in writing {
                let Some(guess) = guesses.get_mut(&id) else { continue };
                guess.to_write = guess.to_write.min(if guess.shape.is_some() { deepest } else { depth });
                if let (Some(limits), Some(active)) = (&mut guess.shape, active.get(&id)) {
                    self.limit(limits, guess.to_write, each, &active.ahead().chances);
                }
            }
            if depth == 0 {
                self.chances.rest();
                for id in &ids {
                    active.get_mut(id).into_iter().for_each(|active| active.ahead_mut().chances.rest());
                }
            }
            // What is written is not looked up; what is not worth a pass may be worth a look.
            for (id, offer) in ids.iter().zip(&mut offers) {
                if guesses[id].to_write > 0 {
                    offer.clear();
                }
            }
        }
        for (id, length) in ids.into_iter().zip(lengths(&self.times, rows, answers, budget.logits, &offers)) {
            guesses.entry(id).and_modify(|guess| guess.tokens.truncate(length));
        }
        guesses.retain(|_, guess| guess.to_write > 0 || !guess.tokens.is_empty());
        guesses
    }

    /// What a pass of the writer costs, in steps of one row; before the first one as if it were a fifth.
    fn pass(&self, writer: Ability) -> f64 {
        if writer.pass > 0.0 { self.times.relative(writer.pass) } else { 0.2 }
    }

    /// Limits a tree with paths of `depth` to what can pay: `pass` is what a pass of the writer costs, in steps of one
    /// row, where it serves many its share.
    fn limit(&self, limits: &mut Limits, depth: usize, pass: f64, chances: &Chances) {
        let (rows, answers) = self.step;
        let at_once = self.writer.is_none_or(|writer| writer.at_once);
        let second = chances.of(Place::new(Source::Model, 2), &self.chances);
        // A guess must bring in its time what the step brings without guesses, at least.
        let speed = answers as f64 / self.times.ratio(rows);
        let floor = (self.times.slope(rows) * speed).clamp(LEAST, 1.0);
        // Paths of one level are right with a chance of 1 together.
        let side_by_side = (1.0 / floor) as usize;
        // The rows are kept from others' prompts: not many more than are usually taken.
        let usual = (depth as f64 * (1.0 + 2.0 * self.checked)).ceil() as usize;
        *limits = Limits {
            nodes: limits.nodes.min(depth * side_by_side).min(usual).min(MOST_AT_ONCE),
            width: side_by_side.clamp(1, MOST_WIDTH),
            floor,
            // What follows must bring the time of a pass and of its row.
            expand: if at_once { floor } else { ((pass * speed + floor) / second.max(floor)).max(floor) },
            sure: Some(chances.sure(&self.chances)),
        };
    }

    /// Chooses what is checked of trees that were written: the best guesses of all, as many as pay beside `others` guesses;
    /// of trees of a size that was asked for, all.
    pub fn choose(
        &mut self,
        trees: Vec<Written>,
        others: usize,
        most: usize,
        active: &mut BTreeMap<u64, Active>,
    ) -> Vec<(u64, Guess)> {
        let free = |written: &Written| match written.tree.limits().sure {
            Some(_) => written.tree.values().into_iter().take(written.room).collect(),
            None => vec![],
        };
        let values: Vec<Vec<f64>> = trees.iter().map(free).collect();
        let (rows, answers) = self.step;
        let counts = worth(&self.times, rows + others, answers, most, &values);
        let choose = |(Written { id, tree, room }, count): (Written, usize)| {
            let (free, depth) = (tree.limits().sure.is_some(), tree.levels());
            let mut guess = tree.best(if free { count } else { room }, self.leaves);
            guess.to_write = depth;
            if free {
                self.checked += (guess.tokens.len() as f64 / depth.max(1) as f64 - self.checked) * 0.05;
            }
            if let Some(active) = active.get_mut(&id).filter(|_| guess.tokens.is_empty()) {
                self.wasted(active.ahead_mut());
            }
            (id, guess)
        };
        trees.into_iter().zip(counts).map(choose).collect()
    }

    /// What may follow a sequence.
    fn of(&self, sequence: &Sequence, active: &mut Active, context: usize) -> Guess {
        let text = &sequence.tokens[..];
        // The token that is chosen in any case needs none.
        let most = active.left().min(context.saturating_sub(text.len())).saturating_sub(1).min(MOST);
        let method = active.ahead().speculation.method;
        if most == 0 || method == Method::Off {
            return Guess::default();
        }
        // Guesses that a constraint cannot look at are not checked.
        let guided = active.guided();
        let ahead = active.ahead();
        if let Some(tokens) = active.expected(ahead.speculation.fixed.unwrap_or(MOST).min(most)) {
            let places = (1..=tokens.len()).map(|i| Place::new(Source::Given, i)).collect();
            return Guess { tokens, places, ..Guess::default() };
        }
        let mut guess = Guess::default();
        if matches!(method, Method::Auto | Method::Grammar) {
            guess.tokens = active.forced(most);
            guess.places = (1..=guess.tokens.len()).map(|i| Place::new(Source::Grammar, i)).collect();
        }
        let ahead = active.ahead_mut();
        if guess.tokens.is_empty() && matches!(method, Method::Auto | Method::Ngram | Method::Suffix) {
            let past = (method != Method::Ngram && ahead.shares).then_some(&self.past);
            guess = ahead.lookup.guess(text, past, most);
        }
        let most = ahead.speculation.fixed.unwrap_or(MOST).min(most);
        if let Some(writer) = self.writer.filter(|writer| guided && method.allows(writer.method)) {
            let chance = |place: Place| ahead.chances.of(place, &self.chances);
            let to_write = most.min(writer.most).min(writer.context.saturating_sub(text.len()));
            // What was said before costs no pass.
            let said = guess.places.iter().map(|&place| chance(place)).collect();
            let written = written_places(to_write).map(chance).collect();
            if said_pays_no_more(&self.times, self.pass(writer), writer.at_once, said, written) {
                guess.to_write = to_write;
                guess.shape = self.shape(active, to_write, writer);
            }
        }
        let end = guess.tokens.iter().take(most).position(|&token| active.ends(token));
        guess.tokens.truncate(end.unwrap_or(most));
        guess.places.truncate(guess.tokens.len());
        guess
    }

    /// The shape in which a request's guesses are written; `None`: a chain. Chains are drawn, where guesses are judged by
    /// rejection, and trees are not, so that they are for those who ask for them.
    fn shape(&self, active: &Active, depth: usize, writer: Ability) -> Option<Limits> {
        let Speculation { fixed, tree, .. } = active.ahead().speculation;
        if !writer.branches || depth == 0 {
            return None;
        }
        match (fixed, tree) {
            (_, Some(nodes)) if self.leaves > 1 => Some(Limits::fixed(nodes, depth)),
            (None, None) if !active.rejects() => Some(Limits::fixed(MOST_AT_ONCE, depth)),
            _ => None,
        }
    }

    /// Guesses were written of which none is checked: they were no help.
    pub fn wasted(&mut self, ahead: &mut Ahead) {
        let first = Place::new(Source::Model, 1);
        self.chances.note(first, false);
        ahead.chances.note(first, false);
    }

    /// A request's guesses of a step were checked: `path` were right.
    pub fn checked(&mut self, ahead: &mut Ahead, guesses: usize, path: &[usize]) {
        self.counts.note(guesses, path.len());
        let mut note = |place, right| {
            self.chances.note(place, right);
            ahead.chances.note(place, right);
        };
        for (i, &place) in ahead.places.iter().take(guesses).enumerate() {
            // What hangs on a wrong guess may be right or not.
            if parent(&ahead.parents, i).is_none_or(|above| path.contains(&above)) {
                note(place, path.contains(&i));
            }
        }
        if ahead.places.first().is_some_and(|place| place.is_sure()) {
            // How far what is written reaches, whatever its shape; what was not worth a look was no help, either.
            for (i, place) in written_places(ahead.depth.min(path.len() + 1)).enumerate() {
                note(place, i < path.len());
            }
        }
    }

    /// A step without prompts took so long.
    pub fn took(&mut self, rows: usize, seconds: f64) {
        self.times.note(rows, seconds);
    }

    /// A request ended, whose answer may be guessed from.
    pub fn ended(&mut self, ahead: &Ahead, answer: &[u32]) {
        if ahead.shares && ahead.speculation.method != Method::Off && !answer.is_empty() {
            self.past.add(answer);
            self.chances.fade();
        }
    }
}

impl Ahead {
    /// These guesses are checked in this step, behind `before` rows.
    pub fn expects(&mut self, guess: Guess, before: usize) {
        let hangs = |parent: &Option<usize>| Some(before - 1 + parent.map_or(0, |parent| parent + 1));
        self.rows = match guess.parents.is_empty() {
            true => vec![],
            false => {
                let chain = (0..before).map(|row| row.checked_sub(1));
                tree_mask(&chain.chain(guess.parents.iter().map(hangs)).collect::<Vec<_>>())
            }
        };
        (self.places, self.parents, self.from) = (guess.places, guess.parents, guess.from);
        self.depth = guess.to_write;
    }

    /// What the `count` guesses of this step hang on.
    pub fn parents(&self, count: usize) -> Cow<'_, [Option<usize>]> {
        match self.parents.is_empty() {
            true => (0..count).map(|i| i.checked_sub(1)).collect(),
            false => Cow::Borrowed(&self.parents),
        }
    }

    /// How the rows of the step see each other, if there are guesses.
    pub fn mask(&self, guesses: usize) -> Mask<'_> {
        if guesses == 0 || self.rows.is_empty() { Mask::Causal } else { Mask::Tree(&self.rows) }
    }
}
