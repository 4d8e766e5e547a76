//! A text that is looked up in: where did its end, or another text's, occur before?
//!
//! A suffix automaton (Blumer et al. 1985), built token by token: appending and following cost constant time on
//! average, whatever the length of text and match. Each state also keeps where its strings ended last, so that the
//! latest occurrence is found and not the first: what was said last is more often said again.
//!
//! Pure: no clock, thread or model.

use std::{
    collections::HashMap,
    hash::{BuildHasher, Hasher},
    sync::OnceLock,
};

/// Where a text's end occurred before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// Tokens that are the same.
    pub length: usize,
    /// Index after the last of them: what came next then.
    pub next: usize,
}

/// A text and all its parts.
#[derive(Debug, Clone)]
pub struct Automaton {
    tokens: Vec<u32>,
    states: Vec<State>,
    edges: Vec<Edge>,
    /// Edge of a state and a token.
    edge: HashMap<(u32, u32), u32, Seed>,
    /// State of the whole text.
    last: u32,
    /// Where the whole text's end occurred before.
    found: Option<Found>,
}

/// Strings that end at the same places of the text.
#[derive(Debug, Clone, Copy)]
struct State {
    /// Tokens of the longest.
    length: u32,
    /// State of the longest suffix that ends at more places.
    link: u32,
    /// Index after the last token of an occurrence: the latest, if the text is not of the kind `UPDATED` is for.
    end: u32,
    /// The first of its edges, or [`NONE`].
    edges: u32,
}

/// What a state becomes by a token.
#[derive(Debug, Clone, Copy)]
struct Edge {
    token: u32,
    to: u32,
    /// The next edge of the same state, or [`NONE`].
    more: u32,
}

const NONE: u32 = u32::MAX;

const ROOT: u32 = 0;

/// Most states whose latest place is written down at one token. A text that repeats itself within itself (`aaaa`) has
/// as many as it has tokens; there an older place is as good.
const UPDATED: usize = 64;

impl Default for Automaton {
    fn default() -> Automaton {
        let root = State { length: 0, link: ROOT, end: 0, edges: NONE };
        let (states, edge) = (vec![root], HashMap::default());
        Automaton { tokens: vec![], states, edges: vec![], edge, last: ROOT, found: None }
    }
}

impl Automaton {
    /// The text.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Where the end of the text occurred before: the longest such end, at the latest such place.
    pub fn repeated(&self) -> Option<Found> {
        self.found
    }

    /// Appends a token.
    pub fn push(&mut self, token: u32) {
        let length = self.states[self.last as usize].length + 1;
        self.tokens.push(token);
        let new = self.state(State { length, link: ROOT, end: length, edges: NONE });
        let mut at = Some(self.last);
        let mut link = ROOT;
        while let Some(state) = at {
            let Some(next) = self.after(state, token) else {
                self.connect(state, token, new);
                at = self.before(state);
                continue;
            };
            link = self.split(state, token, next);
            break;
        }
        self.states[new as usize].link = link;
        self.last = new;
        let suffix = self.states[link as usize];
        self.found = (link != ROOT).then_some(Found { length: suffix.length as usize, next: suffix.end as usize });
        let mut state = link;
        for _ in 0..UPDATED {
            if state == ROOT {
                break;
            }
            self.states[state as usize].end = length;
            state = self.states[state as usize].link;
        }
    }

    /// The state that `token` leads to from `state`, made one whose longest string is one longer than `state`'s.
    fn split(&mut self, state: u32, token: u32, next: u32) -> u32 {
        let (short, long) = (self.states[state as usize].length + 1, self.states[next as usize]);
        if long.length == short {
            return next;
        }
        let copy = self.state(State { length: short, edges: NONE, ..long });
        self.states[next as usize].link = copy;
        // What follows is the same for both.
        let mut edge = long.edges;
        while edge != NONE {
            let Edge { token, to, more } = self.edges[edge as usize];
            self.connect(copy, token, to);
            edge = more;
        }
        let mut at = Some(state);
        while let Some(state) = at {
            match self.edge.get(&(state, token)) {
                Some(&edge) if self.edges[edge as usize].to == next => self.edges[edge as usize].to = copy,
                _ => break,
            }
            at = self.before(state);
        }
        copy
    }

    fn connect(&mut self, from: u32, token: u32, to: u32) {
        let edge = self.edges.len() as u32;
        self.edges.push(Edge { token, to, more: self.states[from as usize].edges });
        self.states[from as usize].edges = edge;
        self.edge.insert((from, token), edge);
    }

    fn after(&self, state: u32, token: u32) -> Option<u32> {
        self.edge.get(&(state, token)).map(|&edge| self.edges[edge as usize].to)
    }

    fn state(&mut self, state: State) -> u32 {
        self.states.push(state);
        (self.states.len() - 1) as u32
    }

    fn before(&self, state: u32) -> Option<u32> {
        (state != ROOT).then(|| self.states[state as usize].link)
    }
}

/// Another text on its way through an automaton: which of its ends occurs there.
#[derive(Debug, Clone, Copy, Default)]
pub struct Follower {
    state: u32,
    length: usize,
}

impl Follower {
    /// Goes on by a token: the longest end of the text that occurs in the automaton's.
    pub fn push(&mut self, of: &Automaton, token: u32) {
        loop {
            if let Some(next) = of.after(self.state, token) {
                (self.state, self.length) = (next, self.length + 1);
                return;
            }
            let Some(shorter) = of.before(self.state) else {
                self.length = 0;
                return;
            };
            // The automaton may have grown since: the state then stands for longer strings than the one that was found.
            let length = self.length.min(of.states[shorter as usize].length as usize);
            (self.state, self.length) = (shorter, length);
        }
    }

    /// Where the end occurs, at the latest place that is followed by something.
    pub fn found(&self, of: &Automaton) -> Option<Found> {
        let next = of.states[self.state as usize].end as usize;
        (self.length > 0 && next < of.tokens.len()).then_some(Found { length: self.length, next })
    }
}

/// Hashes a state and a token from a start that nobody outside knows: clients choose tokens.
#[derive(Debug, Clone)]
struct Seed(u64);

impl Default for Seed {
    fn default() -> Seed {
        static SEED: OnceLock<u64> = OnceLock::new();
        Seed(*SEED.get_or_init(crate::random::unforeseen))
    }
}

impl BuildHasher for Seed {
    type Hasher = Mix;

    fn build_hasher(&self) -> Mix {
        Mix(self.0)
    }
}

struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&b| self.write_u32(b.into()));
    }

    fn write_u32(&mut self, n: u32) {
        // The multiplier of PCG (O'Neill 2014); the fold brings high bits down, where the table looks.
        let mixed = (self.0 ^ u64::from(n)).wrapping_mul(0x5851_f42d_4c95_7f2d);
        self.0 = mixed ^ mixed >> 32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The longest end of `text` that occurs in `of[..most]` ending before `most`: every such place.
    fn slow(of: &[u32], text: &[u32], ends: std::ops::Range<usize>) -> Option<(usize, Vec<usize>)> {
        (1..=text.len()).rev().find_map(|n| {
            let end = &text[text.len() - n..];
            let places: Vec<usize> = ends.clone().filter(|&e| e >= n && of[e - n..e] == *end).collect();
            (!places.is_empty()).then_some((n, places))
        })
    }

    fn texts() -> impl Iterator<Item = Vec<u32>> {
        let mut random = crate::random::Random::new(5);
        let mut texts: Vec<Vec<u32>> = vec![vec![], vec![7; 40], (0..50).collect(), [1, 2, 3].repeat(20)];
        for round in 0..200 {
            let letters = 1 + round % 5;
            texts.push((0..round % 70).map(|_| random.below(letters + 1) as u32).collect());
        }
        texts.into_iter()
    }

    #[test]
    fn the_longest_repeated_end_is_found_where_it_was_last() {
        for text in texts() {
            let mut automaton = Automaton::default();
            for (i, &token) in text.iter().enumerate() {
                automaton.push(token);
                let end = i + 1;
                let want = slow(&text, &text[..end], 1..end);
                let got = automaton.repeated();
                assert_eq!(got.map(|f| f.length), want.as_ref().map(|w| w.0), "{:?}", &text[..end]);
                if let (Some(got), Some((_, places))) = (got, want) {
                    assert!(places.contains(&got.next), "{:?}: {got:?} of {places:?}", &text[..end]);
                    // Texts this short never have more states to update than are updated.
                    if text.len() < UPDATED {
                        assert_eq!(got.next, *places.last().unwrap(), "{:?}", &text[..end]);
                    }
                }
            }
            assert_eq!(automaton.tokens(), text);
            assert!(automaton.states.len() <= 2 * text.len() + 1 && automaton.edges.len() <= 3 * text.len() + 1);
        }
    }

    #[test]
    fn another_text_is_followed() {
        let all: Vec<Vec<u32>> = texts().collect();
        for (of, text) in all.iter().zip(all.iter().rev()) {
            let mut automaton = Automaton::default();
            of.iter().for_each(|&t| automaton.push(t));
            let mut follower = Follower::default();
            for (i, &token) in text.iter().enumerate() {
                follower.push(&automaton, token);
                let want = slow(of, &text[..i + 1], 1..of.len() + 1);
                assert_eq!(follower.length, want.as_ref().map_or(0, |w| w.0), "{:?} in {of:?}", &text[..i + 1]);
                if let Some(found) = follower.found(&automaton) {
                    assert!(want.unwrap().1.contains(&found.next));
                }
            }
        }
    }
}
