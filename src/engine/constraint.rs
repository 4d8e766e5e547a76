//! What an answer may be: a grammar that says, token by token, which may come next.

/// Follows one answer. Pure state: the same tokens always lead to the same sets.
pub trait Grammar: Send {
    /// Adds the tokens that may come next to an empty set; the end-of-text token where the answer may end.
    fn allow(&mut self, allowed: &mut TokenSet) -> Result<(), String>;

    /// Takes the token that was chosen.
    fn follow(&mut self, token: u32) -> Result<(), String>;

    /// The token of a set that the text certainly goes on with, up to its end or beyond: the only one, or one of which all
    /// others are beginnings.
    fn one_way(&self, allowed: &TokenSet) -> Option<u32> {
        allowed.only()
    }

    /// A copy that goes ahead of this one, and shares no limits with it: what it tries out costs this one nothing.
    fn scout(&self) -> Box<dyn Grammar> {
        self.boxed_clone()
    }

    /// Whether the answer is complete and nothing more may come.
    fn ended(&self) -> bool;

    /// The same state again, for another answer.
    fn boxed_clone(&self) -> Box<dyn Grammar>;
}

/// A grammar at the start of an answer.
pub struct Constraint(pub Box<dyn Grammar>);

impl Clone for Constraint {
    fn clone(&self) -> Self {
        Constraint(self.0.boxed_clone())
    }
}

impl std::fmt::Debug for Constraint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Constraint")
    }
}

/// A set of tokens: bit `t % 32` of word `t / 32` stands for token `t`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenSet {
    words: Vec<u32>,
    vocab: usize,
}

impl TokenSet {
    /// The empty set of a vocabulary.
    pub fn new(vocab: usize) -> TokenSet {
        TokenSet { words: vec![0; vocab.div_ceil(32)], vocab }
    }

    /// Empties the set.
    pub fn clear(&mut self) {
        self.words.fill(0);
    }

    /// Adds a token; one beyond the vocabulary is ignored.
    pub fn insert(&mut self, token: u32) {
        if (token as usize) < self.vocab {
            self.words[token as usize / 32] |= 1 << (token % 32);
        }
    }

    /// Adds all tokens of a set given as words of 32 bits; tokens beyond the vocabulary are ignored.
    pub fn insert_words(&mut self, words: &[u32]) {
        self.words.iter_mut().zip(words).for_each(|(to, from)| *to |= from);
        if let Some(last) = self.words.last_mut()
            && !self.vocab.is_multiple_of(32)
        {
            *last &= (1 << (self.vocab % 32)) - 1;
        }
    }

    /// Whether a token is in it.
    pub fn contains(&self, token: u32) -> bool {
        (token as usize) < self.vocab && self.words[token as usize / 32] >> (token % 32) & 1 == 1
    }

    /// The token, if it is one.
    pub fn only(&self) -> Option<u32> {
        let mut words = self.words.iter().enumerate().filter(|(_, word)| **word != 0);
        let (i, word) = words.next()?;
        (words.next().is_none() && word.is_power_of_two()).then(|| i as u32 * 32 + word.trailing_zeros())
    }

    /// Its tokens, in order.
    pub fn tokens(&self) -> impl Iterator<Item = u32> + '_ {
        let bits = |(i, &word): (usize, &u32)| {
            (0..32).filter(move |bit| word >> bit & 1 == 1).map(move |bit| i as u32 * 32 + bit)
        };
        self.words.iter().enumerate().filter(|(_, word)| **word != 0).flat_map(bits)
    }

    /// Whether no token is in it.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|&w| w == 0)
    }

    /// The bits.
    pub fn words(&self) -> &[u32] {
        &self.words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_beyond_the_vocabulary_are_never_in_it() {
        let mut set = TokenSet::new(35);
        assert!(set.is_empty());
        set.insert(35);
        set.insert(u32::MAX);
        assert!(set.is_empty());
        set.insert(34);
        set.insert(0);
        assert!(set.contains(0) && set.contains(34) && !set.contains(33) && !set.contains(35));
        set.clear();
        set.insert_words(&[1 << 31, u32::MAX, 7]);
        assert_eq!(set.words(), [1 << 31, 7]);
        assert_eq!((set.tokens().collect::<Vec<_>>(), set.only()), (vec![31, 32, 33, 34], None));
        let mut one = TokenSet::new(100);
        assert_eq!(one.only(), None);
        one.insert(64);
        assert_eq!(one.only(), Some(64));
        one.insert(99);
        assert_eq!(one.only(), None);
        assert!(!set.contains(64));
    }
}
