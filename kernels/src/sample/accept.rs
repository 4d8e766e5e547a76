//! Which drafted tokens stand, and what follows them.
//!
//! Two rules, both exact. *Matching* (the default): a draft stands if it is the token that the sampler, whose noise is
//! keyed by seed and position, chooses there; so the text is the same with drafts or without, and a drafter that
//! samples its own logits with the same noise agrees as often as two parties who cannot talk can promise (Daliri,
//! Musco, Suresh 2024: at least (1 - d) / (1 + d), d the total variation distance). *Rejection* (Leviathan et al., Chen
//! et al. 2023): a draft stands with probability min(1, p / q), which is the most any rule can reach; the text follows
//! the same distribution, but is another one than without drafts.
//!
//! Pure: a target's distributions are asked for, never computed here.

use super::{branches::rejection_path, distribution::Distribution};

/// A token that a drafter proposes.
#[derive(Debug, Clone, Copy)]
pub struct Draft<'a> {
    /// The token.
    pub token: u32,
    /// What it was drawn from; `None` where it was not drawn but chosen: the distribution that gives this token all the
    /// probability.
    pub from: Option<&'a Distribution>,
}

/// What became of the drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// This many of the first drafts stand.
    pub accepted: usize,
    /// The token after them.
    pub next: u32,
}

/// How many drafts stand: those before the first that differs from the token sampled at its position.
///
/// `sampled[i]` was chosen after `drafts[..i]`, with penalties and masks that saw them; the token after the drafts that
/// stand is `sampled[matching]`. What was sampled after a draft that fell has no meaning and is not looked at.
pub fn matching(drafts: &[u32], sampled: &[u32]) -> usize {
    drafts.iter().zip(sampled).take_while(|(draft, sampled)| draft == sampled).count()
}

/// Accepts drafts by the classical rule; `position` is the first draft's index in prompt + output.
///
/// `target(i)` is the distribution at the position of draft `i`, after `drafts[..i]`, `target(drafts.len())` the one
/// after all of them; asked for in order, as far as needed. Draft `i` stands if `u < p(draft) / q(draft)`, strictly, so
/// that what the target cannot draw never stands. The first that falls is replaced by a token drawn from
/// `max(p - q, 0)` (from `p`, where the two are equal and nothing is left); if none falls, a token is sampled after the
/// last exactly as without drafts.
///
/// `u` and the draw of the replacement are two more numbers of (seed, position), independent of the sampling noise (see
/// `noise.rs`), so the outcome depends on the drafts, the distributions and the seed alone, and drafters may use the
/// sampling noise.
///
/// Exact if each draft with a `from` was drawn from it, and if a drafter that decides how many drafts to offer does not
/// look at the last one to decide whether to offer it: leaving out, say, only unlikely tokens changes what was drawn
/// from. (Looking at `from`, or at the drafts before, is fine; so is a draft without `from` in any case, and anything
/// with [`matching`].)
pub fn rejection<E>(
    drafts: &[Draft<'_>],
    mut target: impl FnMut(usize) -> Result<Distribution, E>,
    seed: u64,
    position: u64,
) -> Result<Verdict, E> {
    let chain: Vec<Option<usize>> = (0..drafts.len()).map(|i| i.checked_sub(1)).collect();
    let path = rejection_path(drafts, &chain, &mut target, seed, position)?;
    Ok(Verdict { accepted: path.accepted.len(), next: path.next })
}

/// `u < p / q`, for u from 0 to below 1; false where p is 0, and where q is 0, as such a draft cannot have been drawn.
pub(super) fn stands(u: f64, p: f64, q: f64) -> bool {
    q > 0.0 && u * q < p
}

/// The token of the share `v`, from 0 to below 1, of weights that are all above 0; `None` if there are none.
pub(super) fn pick(weights: impl Iterator<Item = (u32, f64)> + Clone, v: f64) -> Option<u32> {
    let total: f64 = weights.clone().map(|(_, weight)| weight).sum();
    let mut left = v * total;
    let mut found = None;
    for (token, weight) in weights {
        found = Some(token);
        if left < weight {
            break;
        }
        left -= weight;
    }
    found
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
    fn drafts_match_up_to_the_first_that_differs() {
        assert_eq!(matching(&[], &[5]), 0);
        assert_eq!(matching(&[5], &[5, 6]), 1);
        assert_eq!(matching(&[5, 7, 8], &[5, 6, 8, 9]), 1);
        assert_eq!(matching(&[5, 6, 8], &[5, 6, 8, 9]), 3);
        assert_eq!(matching(&[4, 6, 8], &[5, 6, 8, 9]), 0);
        assert_eq!(matching(&[5, 6, 8], &[5]), 1, "nothing was sampled for the others");
    }

    #[test]
    fn a_draft_stands_strictly_below_the_ratio() {
        assert!(!stands(0.0, 0.0, 0.5), "what has no probability never stands, even at 0");
        assert!(!stands(0.0, 0.0, 0.0));
        assert!(!stands(0.0, 0.5, 0.0), "what cannot have been drawn does not stand");
        assert!(stands(0.0, 1e-300, 1.0));
        assert!(stands(1.0 - f64::EPSILON, 1.0, 1.0), "greedy: certain on both sides");
        assert!(!stands(0.5, 0.25, 0.5));
        assert!(stands(0.499_999, 0.25, 0.5));
        assert!(stands(0.999, 0.5, 0.25));
    }

    #[test]
    fn a_share_belongs_to_one_token() {
        let weights = [(3, 1.0), (5, 2.0), (9, 1.0)];
        let token = |v| pick(weights.into_iter(), v);
        assert_eq!(
            [0.0, 0.2499, 0.25, 0.7499, 0.75, 1.0 - f64::EPSILON / 2.0].map(token),
            [3, 3, 5, 5, 9, 9].map(Some)
        );
        assert_eq!(pick([].into_iter(), 0.5), None);
    }

    #[test]
    fn the_target_is_asked_no_further_than_needed() {
        let p = of(&[0.0, 1.0]);
        let chosen = |token| Draft { token, from: None };
        let run = |drafts: &[Draft<'_>]| {
            let mut asked = Vec::new();
            let target = |i| {
                asked.push(i);
                Ok::<_, SampleError>(p.clone())
            };
            let verdict = rejection(drafts, target, 1, 10).unwrap();
            (verdict.accepted, verdict.next, asked)
        };
        assert_eq!(run(&[]), (0, 1, vec![0]));
        assert_eq!(run(&[chosen(1), chosen(1)]), (2, 1, vec![0, 1, 2]));
        assert_eq!(run(&[chosen(1), chosen(0), chosen(1)]), (1, 1, vec![0, 1]));
        assert_eq!(run(&[chosen(u32::MAX)]), (0, 1, vec![0]), "no such token");
        let refused = rejection(&[chosen(1)], |_| Err(SampleError::Infinite { token: 3 }), 1, 10);
        assert_eq!(refused, Err(SampleError::Infinite { token: 3 }));
    }
}
