//! Choosing the next token from a row of logits.
//!
//! The order is: penalties, logit bias, temperature, top-k, top-p, min-p, then
//! `argmax(logit + Gumbel(seed, position, token))`, which draws from the softmax of what is left.
//! The noise is a counter-based hash of `(seed, position, token)`, never a generator with state, so
//! a token does not depend on batching, preemption or speculation, and a draft that guessed right
//! is exactly the token that would have been drawn.
//!
//! Pure: no clock, thread or device. What a GPU sampler does must equal what is written here.

use std::cmp::Ordering;

mod accept;
mod branches;
mod choices;
mod distribution;
mod noise;
mod params;
mod surveyed;

pub use accept::{Draft, Verdict, matching, rejection};
pub use branches::{Path, matching_path, rejection_path};
pub use choices::choices;
pub use distribution::Distribution;
pub use noise::gumbel;
pub(crate) use noise::philox16;
pub use params::{SampleError, SamplingParams};
pub use surveyed::{Need, Scratch, Surveyed, choose_surveyed};

/// A token and its logit, after penalties, bias and temperature.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Candidate {
    token: u32,
    logit: f32,
}

/// The tokens a request consists of so far.
#[derive(Debug, Clone, Copy)]
pub struct History<'a> {
    /// Prompt and output.
    pub tokens: &'a [u32],
    /// How many of them are the prompt; the rest are output.
    pub prompt_len: usize,
}

/// What was chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampled {
    /// The token.
    pub token: u32,
    /// Its logprob under the model's own distribution (before penalties and temperature), if asked.
    pub logprob: Option<f32>,
    /// The most likely tokens and their logprobs, likeliest first, if asked.
    pub top: Vec<(u32, f32)>,
}

/// Chooses the token at `position` (its index in prompt + output), using `logits` as scratch.
///
/// `logprobs`: `Some(n)` also reports the logprob of the choice and of the `n` likeliest tokens.
/// NaN never wins; a row in which nothing can be chosen, or with an infinity, is an error. Equal logits: the lower id.
pub fn sample(
    logits: &mut [f32],
    params: &SamplingParams,
    history: History<'_>,
    position: u64,
    logprobs: Option<usize>,
) -> Result<Sampled, SampleError> {
    sample_allowed(logits, params, history, position, logprobs, None)
}

/// As [`sample`], of the tokens in a set only: bit `t % 32` of word `t / 32` allows token `t`. Logprobs are still those
/// of the model's own distribution.
pub fn sample_allowed(
    logits: &mut [f32],
    params: &SamplingParams,
    history: History<'_>,
    position: u64,
    logprobs: Option<usize>,
    allowed: Option<&[u32]>,
) -> Result<Sampled, SampleError> {
    refuse_infinite(logits)?;
    let report = logprobs.map(|n| (log_sum_exp(logits), n));
    let (normalizer, top) = match report {
        Some((sum, n)) => (sum, likeliest(logits, n).into_iter().map(|c| (c.token, c.logit - sum)).collect()),
        None => (0.0, Vec::new()),
    };
    // The model's own logits are needed again for the choice, after they were overwritten.
    let original = report.map(|_| logits.to_vec());
    forbid(logits, allowed);
    adjust(logits, params, history)?;
    let token = choose_penalized(logits, params, position)?;
    Ok(Sampled { token, logprob: original.map(|l| l[token as usize] - normalizer), top })
}

/// The logprob of a token under the model's own distribution, and the `n` likeliest tokens with theirs.
pub fn logprobs(logits: &[f32], token: u32, n: usize) -> (f32, Vec<(u32, f32)>) {
    let sum = log_sum_exp(logits);
    (logits[token as usize] - sum, likeliest(logits, n).into_iter().map(|c| (c.token, c.logit - sum)).collect())
}

/// The likeliest token: the first of the largest logits, or `None` where every logit is NaN or -inf.
pub fn argmax(logits: &[f32]) -> Option<u32> {
    let mut best = Candidate { token: 0, logit: f32::NEG_INFINITY };
    for (token, &logit) in logits.iter().enumerate() {
        // False for NaN.
        if logit > best.logit {
            best = Candidate { token: token as u32, logit };
        }
    }
    (best.logit > f32::NEG_INFINITY).then_some(best.token)
}

/// A model never means an infinity.
fn refuse_infinite(logits: &[f32]) -> Result<(), SampleError> {
    // Without a way out of the inner loop it is one for vectors.
    let infinite = |row: &[f32]| row.iter().fold(false, |found, &x| found | (x == f32::INFINITY));
    if !logits.chunks(STRIDE).any(infinite) {
        return Ok(());
    }
    let token = logits.iter().position(|&x| x == f32::INFINITY).expect("one is");
    Err(SampleError::Infinite { token: token as u32 })
}

/// Logits that are looked at together.
const STRIDE: usize = 64;

/// Puts the tokens that are not in the set out of reach.
fn forbid(logits: &mut [f32], allowed: Option<&[u32]>) {
    let Some(allowed) = allowed else { return };
    for (token, logit) in logits.iter_mut().enumerate() {
        if allowed.get(token / 32).is_none_or(|word| word >> (token % 32) & 1 == 0) {
            *logit = f32::NEG_INFINITY;
        }
    }
}

/// Penalties, then biases.
fn adjust(logits: &mut [f32], params: &SamplingParams, history: History<'_>) -> Result<(), SampleError> {
    penalize(logits, params, history, &mut Vec::new(), |_| ());
    for &(token, bias) in &params.logit_bias {
        let vocab = logits.len();
        *logits.get_mut(token as usize).ok_or(SampleError::BiasToken { token, vocab })? += bias;
    }
    Ok(())
}

/// What is left to do for a row whose logits have their penalties and biases: [`sample`] from there on.
pub fn finish(logits: &mut [f32], params: &SamplingParams, position: u64) -> Result<u32, SampleError> {
    choose_penalized(logits, params, position)
}

/// What follows penalties and bias.
fn choose_penalized(logits: &mut [f32], params: &SamplingParams, position: u64) -> Result<u32, SampleError> {
    Ok(match Reach::of(logits, params)? {
        Reach::One(token) => token,
        Reach::All(scaled) => noise::draw(scaled.all(logits), params.seed, position),
        Reach::Kept(scaled, kept) => scaled.draw(kept, params, position),
    })
}

/// The tokens that can be drawn from a row.
enum Reach {
    /// The likeliest, whatever the noise.
    One(u32),
    /// Those of the whole row, scaled by now, that are not below the floor.
    All(Scaled),
    /// Those of these, in any order, that are not below the floor.
    Kept(Scaled, Vec<Candidate>),
}

impl Reach {
    /// Of a row that has its penalties and biases: temperature, top-k, top-p. The row is scaled unless one token is
    /// certain.
    fn of(logits: &mut [f32], params: &SamplingParams) -> Result<Reach, SampleError> {
        let best =
            argmax(logits).ok_or_else(|| SampleError::NothingToChoose { vocab: logits.len(), nans: nans(logits) })?;
        let max = logits[best as usize];
        // Only a bias makes a logit infinite here; it has all the probability.
        if params.is_greedy() || max == f32::INFINITY {
            return Ok(Reach::One(best));
        }
        let scaled = Scaled::new(max, params);
        for logit in logits.iter_mut() {
            *logit = scaled.of(*logit);
        }
        let vocab = logits.len();
        let top_k = params.top_k_of(vocab);
        if top_k == vocab && params.top_p >= 1.0 {
            return Ok(Reach::All(scaled));
        }
        let kept = if params.top_p >= 1.0 { likeliest(logits, top_k) } else { nucleus(logits, top_k, params.top_p) };
        Ok(Reach::Kept(scaled, kept))
    }
}

/// Logits relative to the largest, so that a tiny temperature cannot overflow, over the temperature.
#[derive(Clone, Copy)]
struct Scaled {
    max: f32,
    scale: f32,
    /// Scaled logits below it are less likely than min_p asks.
    floor: f32,
}

impl Scaled {
    fn new(max: f32, params: &SamplingParams) -> Scaled {
        Scaled { max, scale: params.scale(), floor: params.floor() }
    }

    /// NaN becomes unreachable.
    fn of(self, logit: f32) -> f32 {
        if logit.is_nan() { f32::NEG_INFINITY } else { (logit - self.max) * self.scale }
    }

    /// The candidates of a scaled row.
    fn all(self, logits: &[f32]) -> impl Iterator<Item = Candidate> {
        let all = logits.iter().enumerate().map(|(token, &logit)| Candidate { token: token as u32, logit });
        all.filter(move |c| c.logit >= self.floor)
    }

    /// Those of scaled candidates that are not below the floor.
    fn likely(self, kept: Vec<Candidate>) -> impl Iterator<Item = Candidate> {
        kept.into_iter().filter(move |c| c.logit >= self.floor)
    }

    /// Draws from scaled candidates.
    fn draw(self, kept: Vec<Candidate>, params: &SamplingParams, position: u64) -> u32 {
        let mut draw = noise::Draw::new(params.seed, position);
        self.likely(kept).for_each(|c| draw.offer_single(c));
        draw.token()
    }
}

/// Repetition over prompt and output (Hugging Face's rule), presence and frequency over the output.
///
/// `uses` is room to count in, empty or all zeros before and all zeros after; `changed` gets the tokens whose logits
/// were touched.
fn penalize(
    logits: &mut [f32],
    params: &SamplingParams,
    history: History<'_>,
    uses: &mut Vec<u32>,
    mut changed: impl FnMut(u32),
) {
    if !params.penalizes() {
        return;
    }
    let SamplingParams { repetition_penalty, presence_penalty, frequency_penalty, .. } = *params;
    let skipped = params.penalty_last_n.map_or(0, |last| history.tokens.len().saturating_sub(last));
    let tokens = history.tokens.iter().enumerate().skip(skipped);
    // One more than how often the output has a token; 0: not seen, or done with.
    uses.resize(logits.len(), 0);
    for (index, &token) in tokens.clone() {
        if let Some(uses) = uses.get_mut(token as usize) {
            *uses = (*uses).max(1) + u32::from(index >= history.prompt_len);
        }
    }
    for (_, &token) in tokens {
        let times = match uses.get_mut(token as usize).map(std::mem::take) {
            None | Some(0) => continue,
            Some(uses) => uses - 1,
        };
        let logit = &mut logits[token as usize];
        *logit = if *logit > 0.0 { *logit / repetition_penalty } else { *logit * repetition_penalty };
        if times > 0 {
            *logit -= presence_penalty + frequency_penalty * times as f32;
        }
        changed(token);
    }
}

/// The smallest set of the `top_k` likeliest tokens that holds the share `top_p` of their
/// probability, in any order; always at least one token.
fn nucleus(logits: &[f32], top_k: usize, top_p: f32) -> Vec<Candidate> {
    let all = top_k == logits.len();
    // Usually a handful of tokens suffices.
    let mut kept = likeliest(logits, if all { FEW.min(top_k) } else { top_k });
    let total = if all { logits.iter().map(|&logit| f64::from(logit.exp())).sum() } else { mass(&kept) };
    let missing = f64::from(top_p) * total;
    if all && mass(&kept) < missing {
        kept = logits.iter().enumerate().map(|(token, &logit)| Candidate { token: token as u32, logit }).collect();
    }
    cut(kept, missing)
}

fn mass(candidates: &[Candidate]) -> f64 {
    candidates.iter().map(|c| f64::from(c.logit.exp())).sum()
}

/// The likeliest candidates that together hold the mass `missing`, or all; in any order, at least one if there is one.
fn cut(mut kept: Vec<Candidate>, mut missing: f64) -> Vec<Candidate> {
    // Halving: `..start` is in, `end..` is out, and `start..end` holds the token that crosses the share.
    let (mut start, mut end) = (0, kept.len());
    while end - start > 1 {
        let middle = (end - start) / 2;
        kept[start..end].select_nth_unstable_by(middle, likelier);
        let half = mass(&kept[start..start + middle]);
        if half >= missing {
            end = start + middle;
        } else {
            missing -= half;
            start += middle;
        }
    }
    kept.truncate(end);
    kept
}

/// Tokens that are tried before the whole vocabulary is halved.
const FEW: usize = 64;

/// The larger logit first, equal ones by id. There is no NaN among candidates, and total_cmp would
/// tell 0.0 from -0.0.
fn likelier(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.partial_cmp(&a.logit).unwrap_or(Ordering::Equal).then(a.token.cmp(&b.token))
}

/// The `count` largest logits, largest first, equal ones by id; NaN and -inf are left out.
///
/// One pass with a threshold: only what beats the worst of the best so far is kept, so the whole
/// vocabulary is never sorted.
fn likeliest(logits: &[f32], count: usize) -> Vec<Candidate> {
    if count == 0 {
        return Vec::new();
    }
    let room = count.saturating_mul(2).max(64);
    let mut best: Vec<Candidate> = Vec::with_capacity(room.min(logits.len()));
    let mut threshold = f32::NEG_INFINITY;
    for (i, some) in logits.chunks(STRIDE).enumerate() {
        // A later token with an equal logit loses to the earlier one, so `>` is enough; false for NaN.
        let least = threshold;
        if !some.iter().fold(false, |found, &logit| found | (logit > least)) {
            continue;
        }
        for (j, &logit) in some.iter().enumerate() {
            if logit > threshold {
                best.push(Candidate { token: (i * STRIDE + j) as u32, logit });
                if best.len() == room {
                    best.select_nth_unstable_by(count - 1, likelier);
                    best.truncate(count);
                    threshold = best[count - 1].logit;
                }
            }
        }
    }
    best.sort_unstable_by(likelier);
    best.truncate(count);
    best
}

/// log(sum(exp(logits))); NaN counts as nothing.
fn log_sum_exp(logits: &[f32]) -> f32 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if max.is_infinite() {
        return max;
    }
    let sum: f64 = logits.iter().filter(|l| !l.is_nan()).map(|l| f64::from((l - max).exp())).sum();
    max + sum.ln() as f32
}

fn nans(logits: &[f32]) -> usize {
    logits.iter().filter(|l| l.is_nan()).count()
}

#[cfg(test)]
mod tests;
