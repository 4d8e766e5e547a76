//! Guesses of what comes next, which the model checks many at a time.
//!
//! A step that computes one token reads all weights, and a step that computes five reads them once as well. So a
//! guess of the next tokens is computed along with the last known token, and as many of its tokens as are those that
//! would have been chosen anyway are kept ([speculative decoding](https://arxiv.org/abs/2211.17192)). The text is the
//! same with guesses and without: tokens are chosen by noise that depends on seed and position alone
//! (`quern_kernels::sample`), and a guess is right if it is that token.
//!
//! Here is what guesses, how likely a guess is right, and how many are worth their time; pure, without clock or
//! model. The engine asks and reports back.

mod automaton;
mod chances;
mod guess;
mod lookup;
mod method;
mod times;
mod tree;

pub use automaton::{Automaton, Follower, Found};
pub use chances::{Chances, Place, Source, Sure};
pub use guess::{Guess, parent};
pub use lookup::{Lookup, Past};
pub use method::{Accept, Method, Speculation};
pub use times::{Times, depth, lengths, worth};
pub use tree::{Limits, MOST_NODES, MOST_WIDTH, Tree};

/// Most guesses of a sequence in one step, one behind the other.
pub const MOST: usize = 16;

/// What became of guesses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Steps of a sequence that had guesses.
    pub drafts: u64,
    /// Tokens guessed: of a tree all nodes, of which at most as many can be right as a path has.
    pub drafted: u64,
    /// Of them right, and after none that was wrong.
    pub accepted: u64,
    /// How often a guess for the first, second ... position of a step was accepted.
    pub accepted_at: [u64; MOST],
}

impl Counts {
    /// Takes in other counts.
    pub fn add(&mut self, other: &Counts) {
        self.drafts += other.drafts;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
        self.accepted_at.iter_mut().zip(other.accepted_at).for_each(|(count, more)| *count += more);
    }

    /// A step had `drafted` guesses, of which `accepted`, one behind the other, were right.
    pub fn note(&mut self, drafted: usize, accepted: usize) {
        if drafted == 0 {
            return;
        }
        self.drafts += 1;
        self.drafted += drafted as u64;
        self.accepted += accepted as u64;
        self.accepted_at.iter_mut().take(accepted).for_each(|count| *count += 1);
    }
}
