//! What may be chosen at a position, the likeliest choice first: what a drafter offers as siblings.
//!
//! A token is chosen by logit + temperature * noise, and the noise is known in advance. So where a drafter and a model
//! are alike, the second choice of the drafter by that sum is the one that a model with a little other logits takes, at
//! any temperature; and the softmax of the sums, which without noise is that of the logits, says by how much the first
//! choice leads. It costs a guess and no text if that is wrong.

use super::{
    Candidate, History, SampleError, SamplingParams, adjust, likelier, likeliest, mass, nans, noise, refuse_infinite,
};

/// Only so many tokens, those with the largest logits, are weighed: with a long tail, what is drawn may be another one.
const WEIGHED: usize = 64;

/// At most `count` tokens that may be chosen at `position`, the likeliest first, with a share of 1 each; using `logits` as
/// scratch. The first is what [`sample`](super::sample) chooses, if it is among the 64 with the largest logits.
///
/// `tokens`: which token each of the logits is of; empty: they are those of all tokens, in order. Penalties and biases
/// are only for those.
pub fn choices(
    logits: &mut [f32],
    tokens: &[u32],
    params: &SamplingParams,
    history: History<'_>,
    position: u64,
    count: usize,
) -> Result<Vec<(u32, f64)>, SampleError> {
    refuse_infinite(logits)?;
    if tokens.is_empty() {
        adjust(logits, params, history)?;
    }
    let greedy = params.is_greedy();
    let most = if greedy { logits.len() } else { params.top_k_of(logits.len()) };
    let mut kept = likeliest(logits, most.min(WEIGHED));
    let Some(&Candidate { logit: max, .. }) = kept.first() else {
        return Err(SampleError::NothingToChoose { vocab: logits.len(), nans: nans(logits) });
    };
    if max == f32::INFINITY {
        // Only a bias makes a logit infinite here.
        return Ok(vec![(kept[0].token, 1.0)]);
    }
    let of = |token: u32| tokens.get(token as usize).copied().unwrap_or(token);
    kept.iter_mut().for_each(|c| *c = Candidate { token: of(c.token), logit: c.logit - max });
    if !greedy {
        let scaled = |c: &Candidate| Candidate { logit: c.logit * params.scale(), ..*c };
        let mut scaled: Vec<Candidate> = kept.iter().map(scaled).collect();
        let mut missing = f64::from(params.top_p) * mass(&scaled);
        let end = scaled.iter().position(|c| {
            missing -= f64::from(c.logit.exp());
            missing <= 0.0
        });
        scaled.truncate(end.filter(|_| params.top_p < 1.0).map_or(scaled.len(), |end| end + 1));
        scaled.retain(|c| c.logit >= params.floor());
        kept = scaled;
        for c in &mut kept {
            let sum = f64::from(c.logit) + noise::gumbel(params.seed, position, c.token);
            c.logit = (sum * f64::from(params.temperature)) as f32;
        }
        kept.sort_unstable_by(likelier);
        let first = kept[0].logit;
        kept.iter_mut().for_each(|c| c.logit -= first);
    }
    let total = mass(&kept);
    kept.truncate(count);
    Ok(kept.into_iter().map(|c| (c.token, f64::from(c.logit.exp()) / total)).collect())
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            sample,
            surveyed::tests::{Dice, params, row},
        },
        *,
    };

    #[test]
    fn the_first_choice_is_what_is_chosen() {
        let mut dice = Dice(11);
        let mut same = 0;
        for case in 0..4000 {
            let logits = row(&mut dice);
            let vocab = logits.len();
            let params = params(&mut dice, vocab);
            let tokens: Vec<u32> = (0..dice.roll(12)).map(|_| dice.roll(vocab) as u32).collect();
            let history = History { tokens: &tokens, prompt_len: dice.roll(tokens.len() + 1) };
            let position = case as u64;
            let got = choices(&mut logits.clone(), &[], &params, history, position, 5);
            match (got, sample(&mut logits.clone(), &params, history, position, None)) {
                (Ok(got), Ok(sampled)) => {
                    assert!(!got.is_empty() && got.len() <= 5, "case {case}");
                    let shares: Vec<f64> = got.iter().map(|&(_, share)| share).collect();
                    assert!(shares.is_sorted_by(|a, b| a >= b), "case {case}: {shares:?}");
                    assert!(shares.iter().sum::<f64>() <= 1.0 + 1e-9 && shares.iter().all(|s| *s >= 0.0), "{shares:?}");
                    let mut of = got.iter().map(|&(token, _)| token).collect::<Vec<_>>();
                    of.sort_unstable();
                    assert!(of.windows(2).all(|pair| pair[0] < pair[1]), "case {case}: twice in {of:?}");
                    if vocab <= WEIGHED {
                        // Sums that differ by less than f32 tells apart may come the other way round.
                        let close = shares.get(1).is_some_and(|second| shares[0] - second < 1e-4);
                        assert!(got[0].0 == sampled.token || close, "case {case}: {got:?}, {sampled:?}, {params:?}");
                        same += usize::from(got[0].0 == sampled.token);
                    }
                }
                (Err(got), Err(sampled)) => assert_eq!(got, sampled, "case {case}"),
                (got, sampled) => panic!("case {case}: {got:?}, {sampled:?}, {params:?}"),
            }
        }
        assert!(same > 500, "{same}");
    }

    /// Logits of some tokens are chosen from as those of all are where the others are impossible.
    #[test]
    fn some_tokens_are_as_all_without_the_others() {
        let mut dice = Dice(12);
        for case in 0..1000 {
            let (mut logits, mut params) = (row(&mut dice), params(&mut dice, 1));
            logits.iter_mut().for_each(|logit| *logit = if logit.is_finite() { *logit } else { 0.0 });
            (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) = (1.0, 0.0, 0.0);
            params.logit_bias.clear();
            let mut tokens = vec![];
            for _ in &logits {
                tokens.push(tokens.last().map_or(0, |last| last + 1) + dice.roll(3) as u32);
            }
            let mut all = vec![];
            crate::exec::spread(&tokens, &logits, tokens.last().map_or(0, |last| *last as usize + 3), &mut all);
            let none = History { tokens: &[], prompt_len: 0 };
            let got = choices(&mut logits, &tokens, &params, none, case, 7);
            // What has no chance is left out of some and may be kept of all.
            let want = choices(&mut all, &[], &params, none, case, 7).map(|mut want| {
                want.retain(|(token, _)| tokens.contains(token));
                want
            });
            assert_eq!(got, want, "case {case}: {params:?}");
        }
    }

    #[test]
    fn without_noise_shares_are_probabilities() {
        let none = History { tokens: &[], prompt_len: 0 };
        let mut logits = [0.5f32, 0.3, f32::NAN, 0.2].map(f32::ln);
        let got = choices(&mut logits, &[], &SamplingParams::greedy(), none, 3, 9).unwrap();
        assert_eq!(got.iter().map(|c| c.0).collect::<Vec<_>>(), [0, 1, 3]);
        assert!(got.iter().zip([0.5, 0.3, 0.2]).all(|(got, want)| (got.1 - want).abs() < 1e-6), "{got:?}");
    }
}
