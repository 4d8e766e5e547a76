//! What is guessed for one step of a sequence.

use quern_kernels::sample::Distribution;

use super::{Place, tree::Limits};

/// Tokens that may come next: one behind the other, or a tree.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Guess {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// Where each comes from, which tells how likely it is right.
    pub places: Vec<Place>,
    /// Of a tree: what each token hangs on, one before it or (`None`) the text. Empty: each hangs on the one before.
    pub parents: Vec<Option<usize>>,
    /// So many, one behind the other, are to be written instead, by a small model or a head.
    pub to_write: usize,
    /// In which shape; `None`: as a chain.
    pub shape: Option<Limits>,
    /// What each was drawn from, where it was drawn and that matters; else it was chosen.
    pub from: Vec<Distribution>,
}

impl Guess {
    /// Rows that it needs.
    pub fn room(&self) -> usize {
        let written = self.shape.map_or(self.to_write, |limits| limits.nodes);
        self.tokens.len().max(if self.to_write > 0 { written } else { 0 })
    }

    /// What a token hangs on.
    pub fn parent(&self, i: usize) -> Option<usize> {
        parent(&self.parents, i)
    }

    /// Leaves out tokens, and what hangs on them.
    pub fn keep(&mut self, wanted: &[bool]) {
        if self.parents.is_empty() {
            let end = wanted.iter().position(|wanted| !wanted).unwrap_or(self.tokens.len());
            self.tokens.truncate(end);
            self.places.truncate(end);
            self.from.truncate(end);
            return;
        }
        let mut new: Vec<Option<usize>> = vec![];
        let (mut places, mut parents, mut tokens) = (vec![], vec![], vec![]);
        for (i, &wanted) in wanted.iter().enumerate() {
            let above = self.parents[i].map(|parent| new[parent]);
            new.push((wanted && above != Some(None)).then_some(tokens.len()));
            if new[i].is_some() {
                tokens.push(self.tokens[i]);
                places.extend(self.places.get(i));
                parents.push(above.flatten());
            }
        }
        (self.tokens, self.places, self.parents) = (tokens, places, parents);
        // What was drawn is never left out of a tree.
        self.from.clear();
        self.straighten();
    }

    /// Makes a tree without siblings the chain that it is.
    pub fn straighten(&mut self) {
        if self.parents.iter().enumerate().all(|(i, parent)| *parent == i.checked_sub(1)) {
            self.parents.clear();
        }
    }
}

/// What guess `i` hangs on, where the parents of a chain are not written down.
pub fn parent(parents: &[Option<usize>], i: usize) -> Option<usize> {
    if parents.is_empty() { i.checked_sub(1) } else { parents[i] }
}

#[cfg(test)]
mod tests {
    use super::{super::Source, *};

    #[test]
    fn what_hangs_on_what_is_left_out_goes_with_it() {
        let places: Vec<Place> = (1..=6).map(|i| Place::new(Source::Given, i)).collect();
        let parents = vec![None, Some(0), Some(1), Some(0), None, Some(4)];
        let tree = Guess { tokens: (10..16).collect(), places: places.clone(), parents, ..Guess::default() };
        let kept = |wanted: [bool; 6]| {
            let mut tree = tree.clone();
            tree.keep(&wanted);
            assert_eq!(tree.tokens.len(), tree.places.len());
            (tree.tokens, tree.parents)
        };
        assert_eq!(kept([true; 6]), (tree.tokens.clone(), tree.parents.clone()));
        assert_eq!(
            kept([true, false, true, true, true, true]),
            (vec![10, 13, 14, 15], vec![None, Some(0), None, Some(2)])
        );
        assert_eq!(kept([false, true, true, true, true, true]), (vec![14, 15], vec![]), "a chain");
        assert_eq!(kept([false; 6]), (vec![], vec![]));
        let mut chain = Guess { parents: vec![], ..tree.clone() };
        chain.keep(&[true, true, false, true, true, true]);
        assert_eq!((chain.tokens, chain.places), (vec![10, 11], places[..2].to_vec()));
        assert_eq!([0, 1, 5].map(|i| tree.parent(i)), [None, Some(0), Some(4)]);
        assert_eq!([0, 1, 5].map(|i| parent(&[], i)), [None, Some(0), Some(4)]);
    }
}
