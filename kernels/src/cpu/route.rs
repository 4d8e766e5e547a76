//! Which experts a row goes to, and which rows an expert gets.

use std::ops::Range;

/// An expert of a row.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Pick {
    /// Which.
    pub expert: u32,
    /// What its output counts.
    pub weight: f32,
}

/// Fills `picks`, `[top]`, with the experts of the largest logits, the largest first, of equal ones the lower. Weights are
/// those of a softmax over all logits, `[experts]`; `normalized`: over those picked. Each is rounded once, from f64.
///
/// A logit that is NaN counts as the smallest; the weights of such a row are NaN.
///
/// # Panics
/// If more are wanted than there are.
pub fn pick(logits: &[f32], normalized: bool, picks: &mut [Pick]) {
    assert!(picks.len() <= logits.len(), "{} of {} experts", picks.len(), logits.len());
    let key = |l: f32| if l.is_nan() { f32::NEG_INFINITY } else { l };
    // Those behind the last one in the order of largest logit, lowest expert.
    let mut last: Option<(f32, usize)> = None;
    for pick in picks.iter_mut() {
        let mut best: Option<(f32, usize)> = None;
        for (e, l) in logits.iter().map(|&l| key(l)).enumerate() {
            let behind = last.is_none_or(|(of, at)| l < of || l == of && e > at);
            if behind && best.is_none_or(|(of, _)| l > of) {
                best = Some((l, e));
            }
        }
        let (_, e) = *last.insert(best.expect("fewer were taken than there are"));
        pick.expert = e as u32;
    }
    let Some(first) = picks.first() else { return };
    let max = logits[first.expert as usize] as f64;
    let exp = |l: f32| (l as f64 - max).exp();
    let sum: f64 = match normalized {
        true => picks.iter().map(|pick| exp(logits[pick.expert as usize])).sum(),
        false => logits.iter().map(|&l| exp(l)).sum(),
    };
    for pick in picks {
        pick.weight = (exp(logits[pick.expert as usize]) / sum) as f32;
    }
}

/// Rows sorted by expert. A pair is a row and one of its experts; sorted, those of one expert follow each other.
#[derive(Debug, Default)]
pub struct Groups {
    all: Vec<Group>,
    /// Row and group of each sorted pair.
    of: Vec<(u32, u32)>,
    /// Where each pair went, `[m][top]`.
    place: Vec<u32>,
    /// Pairs of each expert, then where its next one goes.
    next: Vec<u32>,
}

/// An expert that has rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Which.
    pub expert: usize,
    /// Its sorted pairs.
    pub rows: Range<usize>,
}

impl Groups {
    /// Sorts `picks`, `[m][top]`, by expert, rows in their order.
    pub fn sort(&mut self, picks: &[Pick], top: usize, experts: usize) {
        self.next.clear();
        self.next.resize(experts, 0);
        picks.iter().for_each(|pick| self.next[pick.expert as usize] += 1);
        self.all.clear();
        let mut start = 0;
        for (expert, next) in self.next.iter_mut().enumerate().filter(|(_, count)| **count > 0) {
            let end = start + *next as usize;
            self.all.push(Group { expert, rows: start..end });
            (*next, start) = (start as u32, end);
        }
        self.of.resize(picks.len(), (0, 0));
        self.place.resize(picks.len(), 0);
        for (pair, pick) in picks.iter().enumerate() {
            let at = &mut self.next[pick.expert as usize];
            self.place[pair] = *at;
            self.of[*at as usize].0 = (pair / top) as u32;
            *at += 1;
        }
        for (g, group) in self.all.iter().enumerate() {
            self.of[group.rows.clone()].iter_mut().for_each(|of| of.1 = g as u32);
        }
    }

    /// Experts that have rows, ascending.
    pub fn all(&self) -> &[Group] {
        &self.all
    }

    /// All pairs.
    pub fn pairs(&self) -> usize {
        self.of.len()
    }

    /// Row and group of a sorted pair.
    pub fn of(&self, pair: usize) -> (usize, usize) {
        (self.of[pair].0 as usize, self.of[pair].1 as usize)
    }

    /// Where pair `row * top + i` went.
    pub fn place(&self, pair: usize) -> usize {
        self.place[pair] as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picked(logits: &[f32], top: usize, normalized: bool) -> Vec<Pick> {
        let mut picks = vec![Pick::default(); top];
        pick(logits, normalized, &mut picks);
        picks
    }

    #[test]
    fn the_largest_are_picked_and_of_equal_ones_the_lower() {
        let experts = |logits: &[f32], top| picked(logits, top, true).iter().map(|p| p.expert).collect::<Vec<_>>();
        assert_eq!(experts(&[1.0, 3.0, 2.0, 3.0], 3), [1, 3, 2]);
        assert_eq!(experts(&[0.0, -0.0, 0.0], 3), [0, 1, 2]);
        assert_eq!(experts(&[f32::NEG_INFINITY; 4], 2), [0, 1]);
        assert_eq!(experts(&[f32::NAN, 1.0, f32::NAN, -1.0], 4), [1, 3, 0, 2]);
        assert!(picked(&[f32::NAN; 3], 2, true).iter().all(|p| p.weight.is_nan()));
    }

    #[test]
    fn weights_are_a_softmax_over_all_or_over_those_picked() {
        let logits = [0.5f32, -1.0, 2.0, 0.0];
        let all: f64 = logits.iter().map(|&l| (l as f64).exp()).sum();
        let two = 2f64.exp() + 0.5f64.exp();
        for (normalized, sum) in [(false, all), (true, two)] {
            let got = picked(&logits, 2, normalized);
            assert!((got[0].weight as f64 - 2f64.exp() / sum).abs() < 1e-7, "{got:?}");
            assert!((got[1].weight as f64 - 0.5f64.exp() / sum).abs() < 1e-7, "{got:?}");
        }
    }

    #[test]
    fn rows_are_sorted_by_expert_and_found_again() {
        let picks = [3, 1, 1, 0, 3, 0, 1, 3].map(|expert| Pick { expert, weight: 1.0 });
        let mut groups = Groups::default();
        for _ in 0..2 {
            groups.sort(&picks, 2, 5);
            let all: Vec<_> = groups.all().iter().map(|g| (g.expert, g.rows.clone())).collect();
            assert_eq!(all, [(0, 0..2), (1, 2..5), (3, 5..8)]);
            for (pair, pick) in picks.iter().enumerate() {
                let (row, group) = groups.of(groups.place(pair));
                assert_eq!((row, groups.all()[group].expert), (pair / 2, pick.expert as usize));
            }
            assert_eq!((0..8).map(|p| groups.of(p).0).collect::<Vec<_>>(), [1, 2, 0, 1, 3, 0, 2, 3]);
        }
    }
}
