//! Guesses of the sequences of a step: who gets how many, and what is learned from what became of them.

use std::collections::BTreeMap;

use quern_kernels::sample::Distribution;

use super::{active::Active, writer::Ability};
use crate::{
    draft::{Chances, Counts, Guess, Lookup, MOST, Method, Past, Place, Source, Speculation, Times, depth, lengths},
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
    /// What they were drawn from, where that matters.
    pub from: Vec<Distribution>,
}

/// Where guesses come from that are written.
pub(super) fn written_places(count: usize) -> impl Iterator<Item = Place> {
    (1..=count).map(|i| Place::new(Source::Model, i))
}

impl Ahead {
    pub fn new(speculation: Speculation, shares: bool) -> Ahead {
        let (lookup, chances) = (Lookup::default(), Chances::of_one());
        Ahead { speculation, lookup, chances, shares, places: vec![], from: vec![] }
    }
}

impl Guesser {
    pub fn new(speculation: Speculation) -> Guesser {
        let (counts, times, chances) = (Counts::default(), Times::default(), Chances::of_all());
        Guesser { speculation, counts, times, chances, past: Past::default(), writer: None }
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
        // What one asks for must not make others wait.
        let obeys = self.speculation.fixed.is_some() || scheduler.load() == (1, 0);
        for sequence in scheduler.decoding() {
            answers += 1;
            let Some(active) = active.get_mut(&sequence.id) else { continue };
            let guess = self.of(sequence, active, context);
            let ahead = active.ahead();
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
        if let Some(Ability { pass, at_once, .. }) = self.writer.filter(|_| !writing.is_empty()) {
            // Before the first one: as if it were a fifth of a step.
            let pass = if pass > 0.0 { self.times.relative(pass) } else { 0.2 };
            let cost = |depth: usize| if at_once { pass } else { pass * depth as f64 };
            let depth = depth(&self.times, rows, answers, budget.logits, cost, &written);
            for id in writing {
                guesses.entry(id).and_modify(|guess| guess.to_write = guess.to_write.min(depth));
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

    /// What may follow a sequence.
    fn of(&self, sequence: &Sequence, active: &mut Active, context: usize) -> Guess {
        let text = &sequence.tokens[..];
        // The token that is chosen in any case needs none.
        let most = active.left().min(context.saturating_sub(text.len())).saturating_sub(1).min(MOST);
        let method = active.ahead().speculation.method;
        if most == 0 || method == Method::Off {
            return Guess::default();
        }
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
        if let Some(writer) = self.writer.filter(|writer| method.allows(writer.method)) {
            let chance = |place: Place| ahead.chances.of(place, &self.chances);
            let to_write = most.min(writer.most).min(writer.context.saturating_sub(text.len()));
            // What was said before is free, and taken where it is as sure.
            if guess.places.first().is_none_or(|&first| chance(first) < chance(Place::new(Source::Model, 1))) {
                guess.to_write = to_write;
            }
        }
        let end = guess.tokens.iter().take(most).position(|&token| active.ends(token));
        guess.tokens.truncate(end.unwrap_or(most));
        guess.places.truncate(guess.tokens.len());
        guess
    }

    /// A request's guesses of a step were checked: the first `accepted` of `guesses` were right.
    pub fn checked(&mut self, ahead: &mut Ahead, guesses: usize, accepted: usize) {
        self.counts.note(guesses, accepted);
        for (i, &place) in ahead.places.iter().take(guesses.min(accepted + 1)).enumerate() {
            self.chances.note(place, i < accepted);
            ahead.chances.note(place, i < accepted);
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
    /// These guesses are checked in this step.
    pub fn expects(&mut self, guess: Guess) {
        (self.places, self.from) = (guess.places, guess.from);
    }
}
