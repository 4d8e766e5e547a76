//! The distribution that a row of logits and a request's parameters define.
//!
//! What `sample_allowed` draws from, as probabilities: the classical rule of speculation needs them, and drafters that
//! draw say with them what they drew from. The filters are those of the sampler itself, not a second telling of them.

use super::{Candidate, History, Reach, SampleError, SamplingParams, adjust, forbid, noise, refuse_infinite};

/// The tokens that can be drawn from a row, and how likely each is.
///
/// Tokens ascend, each has a probability above 0, and the probabilities sum to 1 but for rounding. (Noise ends: a token
/// 26 below the likeliest in scaled logits, which is e^-26 as likely, has its probability here and is never drawn.)
#[derive(Debug, Clone, PartialEq)]
pub struct Distribution {
    tokens: Vec<(Candidate, f64)>,
}

impl Distribution {
    /// What [`super::sample_allowed`] draws from with the same arguments, using `logits` as scratch. Its errors, too.
    ///
    /// Without noise, one token has all the probability: the first of the largest logits.
    pub fn of(
        logits: &mut [f32],
        params: &SamplingParams,
        history: History<'_>,
        allowed: Option<&[u32]>,
    ) -> Result<Distribution, SampleError> {
        refuse_infinite(logits)?;
        forbid(logits, allowed);
        adjust(logits, params, history)?;
        Ok(Distribution::from_candidates(match Reach::of(logits, params)? {
            Reach::One(token) => vec![Candidate { token, logit: 0.0 }],
            Reach::All(scaled) => scaled.all(logits).collect(),
            Reach::Kept(scaled, kept) => scaled.likely(kept).collect(),
        }))
    }

    /// The softmax of candidates.
    fn from_candidates(mut kept: Vec<Candidate>) -> Distribution {
        kept.sort_unstable_by_key(|c| c.token);
        let weighed = kept.into_iter().map(|c| (c, f64::from(c.logit).exp()));
        let mut tokens: Vec<(Candidate, f64)> = weighed.filter(|&(_, weight)| weight > 0.0).collect();
        let total: f64 = tokens.iter().map(|&(_, weight)| weight).sum();
        tokens.iter_mut().for_each(|(_, weight)| *weight /= total);
        Distribution { tokens }
    }

    /// Tokens, ascending, and their probabilities.
    pub fn iter(&self) -> impl Iterator<Item = (u32, f64)> + Clone + '_ {
        self.tokens.iter().map(|&(c, p)| (c.token, p))
    }

    /// The probability of a token; 0 for those that cannot be drawn.
    pub fn probability(&self, token: u32) -> f64 {
        self.tokens.binary_search_by_key(&token, |(c, _)| c.token).map_or(0.0, |at| self.tokens[at].1)
    }

    /// The token at `position`: what [`super::sample_allowed`] chooses with this seed.
    pub fn draw(&self, seed: u64, position: u64) -> u32 {
        noise::draw(self.tokens.iter().map(|&(c, _)| c), seed, position)
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            sample_allowed,
            surveyed::tests::{Dice, params, row},
        },
        *,
    };

    #[test]
    fn drawing_from_it_is_sampling() {
        let mut dice = Dice(7);
        let (mut drawn, mut refused) = (0, 0);
        for case in 0..4000 {
            let logits = row(&mut dice);
            let vocab = logits.len();
            let params = params(&mut dice, vocab);
            let tokens: Vec<u32> = (0..dice.roll(12)).map(|_| dice.roll(vocab + 1) as u32).collect();
            let history = History { tokens: &tokens, prompt_len: dice.roll(tokens.len() + 1) };
            let words: Vec<u32> = (0..vocab.div_ceil(32)).map(|_| (dice.roll(1 << 30) * 5) as u32).collect();
            let allowed = dice.of(&[None, None, Some(&words[..]), Some(&words[..vocab.div_ceil(64)])]);
            let got = Distribution::of(&mut logits.clone(), &params, history, allowed);
            for position in [0, 1, 1 << 33] {
                let plain = sample_allowed(&mut logits.clone(), &params, history, position, None, allowed);
                match (&got, plain) {
                    (Ok(got), Ok(plain)) => {
                        assert_eq!(got.draw(params.seed, position), plain.token, "case {case}: {params:?}");
                        drawn += 1;
                    }
                    (Err(got), Err(plain)) => {
                        assert_eq!(*got, plain, "case {case}: {params:?}");
                        refused += 1;
                    }
                    (got, plain) => panic!("case {case}: {got:?}, {plain:?}, {params:?}"),
                }
            }
            let Ok(got) = got else { continue };
            let ids: Vec<u32> = got.iter().map(|(token, _)| token).collect();
            assert!(ids.is_sorted_by(|a, b| a < b), "case {case}: {ids:?}");
            assert!(got.iter().all(|(token, p)| p > 0.0 && p == got.probability(token)), "case {case}");
            let sum: f64 = got.iter().map(|(_, p)| p).sum();
            assert!((sum - 1.0).abs() < 1e-9, "case {case}: {sum}");
        }
        assert!(drawn > 5000 && refused > 500, "{drawn} {refused}");
    }

    #[test]
    fn without_noise_one_token_is_certain() {
        let none = History { tokens: &[], prompt_len: 0 };
        let of = |logits: &[f32], params: &SamplingParams, allowed: Option<&[u32]>| {
            Distribution::of(&mut logits.to_vec(), params, none, allowed).unwrap().iter().collect::<Vec<_>>()
        };
        let greedy = SamplingParams::greedy();
        assert_eq!(of(&[0.0, 3.0, 3.0, 1.0], &greedy, None), [(1, 1.0)]);
        assert_eq!(of(&[0.0, 3.0, 3.0, 1.0], &greedy, Some(&[0b1100])), [(2, 1.0)]);
        let sure = SamplingParams { logit_bias: vec![(3, f32::INFINITY)], ..SamplingParams::default() };
        assert_eq!(of(&[0.0, 3.0, 3.0, 1.0], &sure, None), [(3, 1.0)]);
        let half = SamplingParams { top_k: 2, ..SamplingParams::default() };
        let got = Distribution::of(&mut [0.0, 3.0, f32::NAN, 3.0], &half, none, None).unwrap();
        assert_eq!(got.iter().collect::<Vec<_>>(), [(1, 0.5), (3, 0.5)]);
        assert_eq!([0, 2, 4].map(|token| got.probability(token)), [0.0; 3]);
    }
}
