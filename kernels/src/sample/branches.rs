//! Which drafts of a tree stand: the rules of `accept.rs`, where several drafts are offered for one position.
//!
//! A tree is given by parents: draft `i` hangs on draft `parents[i]`, which comes before it, or on the text. What stands
//! is a path from the text. *Matching*: the token that is chosen after a draft that stands says which of those that hang
//! on it stands, if any. *Rejection*: siblings are tried in turn; each that falls takes what it was drawn from out of
//! the target's distribution, and the next is judged by the rest (SpecInfer, Miao et al. 2024; without replacement,
//! Jeon et al. 2024; EAGLE, Li et al. 2024). Siblings that were chosen fall with probability 1 - p each, so that one of
//! them stands as often as by matching.

use super::{
    accept::{Draft, pick, stands},
    distribution::Distribution,
    noise,
};

/// What became of the drafts of a tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Path {
    /// The drafts that stand, each hanging on the one before.
    pub accepted: Vec<usize>,
    /// The token after them.
    pub next: u32,
}

/// Drafts that hang on draft `at`, in order; on the text for `None`.
fn hanging(parents: &[Option<usize>], at: Option<usize>) -> impl Iterator<Item = usize> + '_ {
    let first = at.map_or(0, |at| at + 1);
    (first..parents.len()).filter(move |&i| parents[i] == at)
}

/// The drafts of a tree that stand by matching: `sampled(0)` was chosen after the text, `sampled(i + 1)` after the path
/// that ends with draft `i`, with penalties and masks that saw it; `None`: nothing could be chosen there.
pub fn matching_path(
    drafts: &[u32],
    parents: &[Option<usize>],
    mut sampled: impl FnMut(usize) -> Option<u32>,
) -> Vec<usize> {
    let (mut accepted, mut at) = (vec![], None);
    loop {
        let token = sampled(at.map_or(0, |at| at + 1));
        let Some(next) = hanging(parents, at).find(|&i| Some(drafts[i]) == token) else { return accepted };
        accepted.push(next);
        at = Some(next);
    }
}

/// Accepts drafts of a tree by the classical rule; `position` is the index in prompt + output of those that hang on the
/// text.
///
/// `target(0)` is the distribution after the text, `target(i + 1)` that after the path that ends with draft `i`; asked for
/// along the path that stands. The drafts of one position with a `from` were drawn from it in their order, each of what
/// those before it had left (without replacement), and all have the same; those without were chosen. If none of them
/// stands, a token is drawn from the rest; where nothing hangs, a token is sampled exactly as without drafts.
///
/// Exact under the conditions of [`rejection`](super::rejection); chosen drafts have none, whatever the shape.
pub fn rejection_path<E>(
    drafts: &[Draft<'_>],
    parents: &[Option<usize>],
    mut target: impl FnMut(usize) -> Result<Distribution, E>,
    seed: u64,
    position: u64,
) -> Result<Path, E> {
    let (mut accepted, mut at) = (vec![], None);
    loop {
        let p = target(at.map_or(0, |at| at + 1))?;
        let position = position + accepted.len() as u64;
        let mut siblings = hanging(parents, at).peekable();
        if siblings.peek().is_none() {
            return Ok(Path { next: p.draw(seed, position), accepted });
        }
        let mut rest = Rest::of(&p);
        let stood = siblings.enumerate().find(|&(i, draft)| {
            let [u, _] = noise::uniforms(seed, position, i as u32);
            rest.stands(&drafts[draft], u)
        });
        let Some((_, draft)) = stood else {
            let [_, v] = noise::uniforms(seed, position, 0);
            return Ok(Path { next: rest.draw(v), accepted });
        };
        accepted.push(draft);
        at = Some(draft);
    }
}

/// What the target's distribution has left after drafts that fell.
struct Rest {
    /// Tokens, ascending, and their weights, all above 0; at least one.
    weights: Vec<(u32, f64)>,
    total: f64,
    /// Siblings that fell.
    fallen: Vec<u32>,
}

impl Rest {
    fn of(p: &Distribution) -> Rest {
        Rest { weights: p.iter().collect(), total: 1.0, fallen: vec![] }
    }

    /// Whether a draft stands by `u`; if not, it is taken out.
    fn stands(&mut self, draft: &Draft<'_>, u: f64) -> bool {
        let token = draft.token;
        let at = self.weights.binary_search_by_key(&token, |&(token, _)| token);
        let p = at.map_or(0.0, |at| self.weights[at].1 / self.total);
        let q = draft.from.map_or(1.0, |q| self.undrawn(q, token));
        if stands(u, p, q) {
            return true;
        }
        let beyond: Vec<(u32, f64)> = match draft.from {
            None => self.weights.iter().copied().filter(|&(other, _)| other != token).collect(),
            Some(q) => {
                let (total, left) = (self.total, self.left(q));
                let mut of_q = q.iter().filter(|(token, _)| !self.fallen.contains(token)).peekable();
                let beyond = self.weights.iter().map(|&(token, p)| {
                    while of_q.next_if(|&(other, _)| other < token).is_some() {}
                    (token, p / total - of_q.next_if(|&(other, _)| other == token).map_or(0.0, |(_, q)| q / left))
                });
                beyond.filter(|&(_, rest)| rest > 0.0).collect()
            }
        };
        self.fallen.push(token);
        // Where the two are equal but for rounding, nothing is left.
        if !beyond.is_empty() {
            self.total = beyond.iter().map(|&(_, weight)| weight).sum();
            self.weights = beyond;
        }
        false
    }

    /// The share of what a drafter draws from that the fallen have left.
    fn left(&self, q: &Distribution) -> f64 {
        if self.fallen.is_empty() {
            1.0
        } else {
            1.0 - self.fallen.iter().map(|&token| q.probability(token)).sum::<f64>()
        }
    }

    /// The probability with which a draft was drawn from what the fallen have left.
    fn undrawn(&self, q: &Distribution, token: u32) -> f64 {
        let left = self.left(q);
        if left > 0.0 && !self.fallen.contains(&token) { q.probability(token) / left } else { 0.0 }
    }

    fn draw(&self, v: f64) -> u32 {
        pick(self.weights.iter().copied(), v).expect("a distribution has a token")
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{History, SampleError, SamplingParams},
        *,
    };

    fn of(weights: &[f32]) -> Distribution {
        let mut logits: Vec<f32> = weights.iter().map(|w| w.ln()).collect();
        let none = History { tokens: &[], prompt_len: 0 };
        Distribution::of(&mut logits, &SamplingParams::default(), none, None).unwrap()
    }

    #[test]
    fn a_path_matches_down_to_where_nothing_hangs() {
        // 0: 5 -> (1: 6, 2: 7 -> 3: 8); 4: 9 beside 0.
        let (drafts, parents) = ([5, 6, 7, 8, 9], [None, Some(0), Some(0), Some(2), None]);
        let path = |sampled: [u32; 6]| matching_path(&drafts, &parents, |row| Some(sampled[row]));
        assert_eq!(path([5, 7, 0, 8, 0, 0]), [0, 2, 3]);
        assert_eq!(path([5, 7, 0, 1, 0, 0]), [0, 2]);
        assert_eq!(path([5, 6, 7, 0, 0, 0]), [0, 1], "nothing hangs on 1");
        assert_eq!(path([9, 6, 7, 0, 0, 5]), [4]);
        assert!(path([8, 0, 0, 0, 0, 0]).is_empty());
        assert!(matching_path(&[], &[], |_| Some(1)).is_empty());
        let failed = matching_path(&drafts, &parents, |row| if row == 0 { Some(5) } else { None });
        assert_eq!(failed, [0], "nothing could be chosen");
    }

    #[test]
    fn a_replacement_comes_from_what_p_has_beyond_q() {
        let p = of(&[0.5, 0.25, 0.0, 0.25]);
        let many = |draft: Draft<'_>| -> Vec<u32> {
            let mut rest = Rest::of(&p);
            assert!(!rest.stands(&draft, 1.0));
            let mut found: Vec<u32> = (0..100).map(|i| rest.draw(f64::from(i) / 100.0)).collect();
            found.dedup();
            found
        };
        assert_eq!(many(Draft { token: 0, from: None }), [1, 3]);
        assert_eq!(many(Draft { token: 2, from: None }), [0, 1, 3], "a draft that p cannot draw");
        let q = of(&[0.5, 0.3, 0.2, 0.0]);
        assert_eq!(many(Draft { token: 1, from: Some(&q) }), [3]);
        let far = of(&[0.0, 0.0, 1.0]);
        assert_eq!(many(Draft { token: 2, from: Some(&far) }), [0, 1, 3]);
        assert_eq!(many(Draft { token: 2, from: Some(&p) }), [0, 1, 3], "nothing beyond: p itself");
        let sure = of(&[0.0, 1.0]);
        let mut rest = Rest::of(&sure);
        assert!(!rest.stands(&Draft { token: 1, from: None }, 1.0));
        assert_eq!(rest.draw(0.5), 1, "nothing but the draft: p itself");
    }

    /// Of two siblings that were chosen, one stands as often as the target has them.
    #[test]
    fn siblings_share_what_the_target_has() {
        let p = of(&[0.5, 0.25, 0.125, 0.125]);
        let drafts = [1, 0].map(|token| Draft { token, from: None });
        let runs = 20_000;
        let mut counts = [0; 4];
        let mut stood = [0; 3];
        for seed in 0..runs {
            let path = rejection_path(&drafts, &[None, None], |_| Ok::<_, SampleError>(p.clone()), seed, 7).unwrap();
            match path.accepted[..] {
                [] => {
                    stood[2] += 1;
                    counts[path.next as usize] += 1;
                }
                [i] => {
                    stood[i] += 1;
                    counts[drafts[i].token as usize] += 1;
                }
                _ => unreachable!("{path:?}"),
            }
        }
        for (got, want) in stood.iter().zip([0.25, 0.5, 0.25]).chain(counts.iter().zip([0.5, 0.25, 0.125, 0.125])) {
            assert!((f64::from(*got) / runs as f64 - want).abs() < 0.02, "{stood:?} {counts:?}");
        }
    }

    #[test]
    fn what_cannot_be_drawn_never_stands() {
        let p = of(&[0.5, 0.5, 0.0, 0.0]);
        let q = of(&[0.0, 0.0, 0.5, 0.5]);
        let drawn = [2, 3, 2].map(|token| Draft { token, from: Some(&q) });
        let chosen = [2, 7, 3].map(|token| Draft { token, from: None });
        for seed in 0..200 {
            for drafts in [&drawn, &chosen] {
                let target = |_| Ok::<_, SampleError>(p.clone());
                let path = rejection_path(drafts, &[None; 3], target, seed, 0).unwrap();
                assert!(path.accepted.is_empty() && path.next < 2, "{path:?}");
            }
        }
        // Equal but for the order in which they are drawn: the first always stands.
        let same = [0, 1].map(|token| Draft { token, from: Some(&p) });
        let path = rejection_path(&same, &[None; 2], |_| Ok::<_, SampleError>(p.clone()), 1, 0).unwrap();
        assert_eq!(path.accepted, [0]);
        let refused = rejection_path(&same, &[None; 2], |_| Err(SampleError::Infinite { token: 3 }), 1, 10);
        assert_eq!(refused, Err(SampleError::Infinite { token: 3 }));
    }
}
