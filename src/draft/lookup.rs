//! Guesses from what was said before: earlier in the same text (prompt lookup), or in other answers.
//!
//! The longest end of the text that occurred before says what comes next: what followed it then. Where the text repeats
//! itself within itself, the guess goes on past its end. Over several requests this is suffix decoding
//! ([Oliaro et al.](https://arxiv.org/abs/2411.04975)) with the latest place instead of the most frequent one.

use super::{Automaton, Follower, Found, Guess, Place, Source};

/// Answers of the past, a bounded number of tokens: the older of two halves is forgotten at a time.
#[derive(Debug, Default)]
pub struct Past {
    /// The newer half, and the older.
    halves: [Automaton; 2],
    /// How often a half was forgotten.
    epoch: u64,
    texts: u32,
}

/// Tokens of a half; about each are kept at most two states and three edges.
const HALF: usize = 32 << 10;

/// Between two texts stands what is no token of any model, and never twice the same.
const SEPARATOR: u32 = 1 << 31;

/// Tokens at the end of a text that are looked for in the past when it begins, or has been forgotten.
const CONTEXT: usize = 32;

impl Past {
    /// Remembers an answer.
    pub fn add(&mut self, answer: &[u32]) {
        let newest = &answer[answer.len().saturating_sub(HALF)..];
        if self.halves[0].tokens().len() + newest.len() >= HALF {
            self.halves[1] = std::mem::take(&mut self.halves[0]);
            self.epoch += 1;
        }
        newest.iter().for_each(|&token| self.halves[0].push(token));
        self.halves[0].push(SEPARATOR | self.texts);
        self.texts = (self.texts + 1) % SEPARATOR;
    }
}

/// Tokens of a prompt that are looked up, the last ones: a bound of the memory for a text and of the time to read it.
const MOST: usize = 16 << 10;

/// One text in progress, and where it stands in the past.
#[derive(Debug, Default)]
pub struct Lookup {
    own: Automaton,
    /// Tokens before those of the automaton.
    skipped: usize,
    /// In the halves of the past as they were at the epoch.
    others: [Follower; 2],
    epoch: u64,
    /// Tokens that `others` have seen.
    seen: usize,
}

impl Lookup {
    /// What may follow `text`, at most `most` tokens. `text` is that of the last call and what was added since.
    pub fn guess(&mut self, text: &[u32], past: Option<&Past>, most: usize) -> Guess {
        if self.own.tokens().is_empty() {
            self.skipped = text.len().saturating_sub(MOST);
        }
        let text = &text[self.skipped..];
        let known = self.own.tokens().len();
        text[known..].iter().for_each(|&token| self.own.push(token));
        let own = self.own.repeated();
        let others = past.and_then(|past| Some((past, self.follow(text, past)?)));
        let (source, place, from) = match (own, others) {
            (Some(own), Some((_, (_, other)))) if own.length >= other.length => (Source::Own, own, None),
            (_, Some((past, (half, other)))) => (Source::Others, other, Some(&past.halves[half])),
            (Some(own), None) => (Source::Own, own, None),
            (None, None) => return Guess::default(),
        };
        let there = from.map_or(text, Automaton::tokens);
        let mut tokens: Vec<u32> = Vec::with_capacity(most);
        for i in 0..most {
            let at = place.next + i;
            let token = match (there.get(at), from) {
                (Some(&token), _) if token < SEPARATOR => token,
                // Past its own end: the text is expected to go on as it has just gone on.
                (None, None) => tokens[at - there.len()],
                _ => break,
            };
            tokens.push(token);
        }
        let places = (0..tokens.len()).map(|i| Place::new(source, place.length + i)).collect();
        Guess { tokens, places, ..Guess::default() }
    }

    /// Goes on to the end of the text, and returns the longest end that is in the past, and in which half.
    fn follow(&mut self, text: &[u32], past: &Past) -> Option<(usize, Found)> {
        match past.epoch - self.epoch {
            0 => {}
            // What was the newer half is the older now, and the newer is empty or has nothing that was seen.
            1 => (self.others, self.epoch) = ([Follower::default(), self.others[0]], past.epoch),
            _ => (self.others, self.epoch, self.seen) = (Default::default(), past.epoch, 0),
        }
        let from = self.seen.max(text.len().saturating_sub(CONTEXT));
        for &token in &text[from..] {
            self.others.iter_mut().zip(&past.halves).for_each(|(follower, half)| follower.push(half, token));
        }
        self.seen = text.len();
        let found = |half: usize| Some((half, self.others[half].found(&past.halves[half])?));
        // Of equal ones the newer.
        (0..2).rev().filter_map(found).max_by_key(|(_, found)| found.length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(guess: Guess) -> Vec<u32> {
        assert_eq!(guess.tokens.len(), guess.places.len());
        guess.tokens
    }

    #[test]
    fn a_text_goes_on_as_it_did_before() {
        let mut lookup = Lookup::default();
        assert!(tokens(lookup.guess(&[1, 2, 3], None, 4)).is_empty());
        assert_eq!(tokens(lookup.guess(&[1, 2, 3, 4, 1, 2], None, 3)), [3, 4, 1]);
        assert!(tokens(lookup.guess(&[1, 2, 3, 4, 1, 2, 9], None, 3)).is_empty());
        let all = [1, 2, 3, 4, 1, 2, 9, 1, 2];
        assert_eq!(tokens(lookup.guess(&all, None, 1)), [9], "as it did last");
        assert!(tokens(lookup.guess(&all, None, 0)).is_empty());
        // Only so far back.
        let long = [&[1, 2][..], &vec![9; MOST], &[8, 1]].concat();
        let mut far = Lookup::default();
        assert!(tokens(far.guess(&long, None, 1)).is_empty());
        assert_eq!(tokens(far.guess(&[&long[..], &[8]].concat(), None, 2)), [1, 8]);
        // Past its end.
        assert_eq!(tokens(Lookup::default().guess(&[7; 5], None, 6)), [7; 6]);
        assert_eq!(tokens(Lookup::default().guess(&[5, 8, 5, 8, 5], None, 5)), [8, 5, 8, 5, 8]);
    }

    #[test]
    fn answers_of_others_are_looked_up_and_forgotten() {
        let mut past = Past::default();
        past.add(&[1, 2, 3, 4, 5]);
        past.add(&[8, 9]);
        let mut lookup = Lookup::default();
        assert_eq!(tokens(lookup.guess(&[0, 2, 3], Some(&past), 9)), [4, 5], "not beyond the end of an answer");
        assert!(tokens(lookup.guess(&[0, 2, 3, 8, 9], Some(&past), 9)).is_empty());
        // Both have it: the longer match is taken, of equal ones the text's own.
        let mut lookup = Lookup::default();
        assert_eq!(tokens(lookup.guess(&[3, 7, 7, 2, 3], Some(&past), 2)), [4, 5]);
        assert_eq!(tokens(Lookup::default().guess(&[3, 7, 6, 6, 3], Some(&past), 2)), [7, 6]);
        // A half later it is still there, two halves later it is gone.
        let filler: Vec<u32> = (0..HALF as u32 / 2).map(|i| 100 + i).collect();
        past.add(&filler);
        past.add(&filler);
        assert_eq!(past.epoch, 1);
        assert_eq!(tokens(lookup.guess(&[3, 7, 7, 2, 3], Some(&past), 2)), [4, 5]);
        assert_eq!(tokens(Lookup::default().guess(&[3, 7, 7, 2, 3], Some(&past), 2)), [4, 5]);
        past.add(&filler);
        past.add(&filler);
        past.add(&filler);
        assert!(past.epoch >= 2 && past.halves.iter().all(|half| half.tokens().len() <= HALF + 1));
        assert_eq!(tokens(lookup.guess(&[3, 7, 7, 2, 3], Some(&past), 2)), [7, 7]);
        past.add(&vec![5; 3 * HALF]);
        assert!(past.halves.iter().all(|half| half.tokens().len() <= HALF + 1));
    }

    /// Whatever the past and the text are, a guess is what followed the same tokens somewhere.
    #[test]
    fn guesses_follow_the_same_tokens() {
        let mut random = crate::random::Random::new(3);
        for _ in 0..300 {
            let letters = 1 + random.below(5);
            let mut text = |n: usize| -> Vec<u32> { (0..n).map(|_| random.below(letters) as u32).collect() };
            let answers: Vec<Vec<u32>> = (0..4).map(|i| text(10 + i)).collect();
            let own = text(40);
            let (mut past, mut lookup) = (Past::default(), Lookup::default());
            for (i, answer) in answers.iter().enumerate() {
                past.add(answer);
                let text = &own[..10 * (i + 1)];
                let guess = lookup.guess(text, Some(&past), 4);
                let Some(&first) = guess.tokens.first() else { continue };
                let places = [text].into_iter().chain(answers[..=i].iter().map(|a| &a[..]));
                let mut followed = places.flat_map(|t| t.windows(2).map(|w| (w[0], w[1])).collect::<Vec<_>>());
                assert!(followed.any(|pair| pair == (*text.last().unwrap(), first)));
            }
        }
    }
}
