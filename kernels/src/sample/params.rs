//! What a request may ask of the sampler, and which values make sense.

/// How to choose tokens. The defaults change nothing: plain sampling at temperature 1.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 always takes the likeliest token.
    pub temperature: f32,
    /// Only this many of the likeliest tokens; 0: all.
    pub top_k: u32,
    /// Only the likeliest tokens that hold this share of the probability; 1: all.
    pub top_p: f32,
    /// Only tokens at least this share as likely as the likeliest; 0: all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in the prompt or output; 1: off.
    pub repetition_penalty: f32,
    /// Subtracted once from the logits of tokens in the output.
    pub presence_penalty: f32,
    /// Subtracted from the logits of tokens in the output, once per occurrence.
    pub frequency_penalty: f32,
    /// Penalties look only at this many of the last tokens; `None`: at all.
    pub penalty_last_n: Option<usize>,
    /// Added to the logits of single tokens, after the penalties; -inf forbids a token.
    pub logit_bias: Vec<(u32, f32)>,
    /// Together with a token's position, decides the noise.
    pub seed: u64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            penalty_last_n: None,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

impl SamplingParams {
    /// Always the likeliest token (after penalties and bias).
    pub fn greedy() -> Self {
        SamplingParams { temperature: 0.0, ..SamplingParams::default() }
    }

    /// Whether noise plays no part. Temperatures below 1e-5 count as 0, as in vLLM.
    pub fn is_greedy(&self) -> bool {
        self.temperature < 1e-5
    }

    /// Scaled logits below it are less likely than min_p asks.
    pub(crate) fn floor(&self) -> f32 {
        if self.min_p > 0.0 { self.min_p.ln() } else { f32::NEG_INFINITY }
    }

    /// One over the temperature.
    pub(crate) fn scale(&self) -> f32 {
        1.0 / self.temperature
    }

    /// How many tokens top-k leaves of `vocab`.
    pub(crate) fn top_k_of(&self, vocab: usize) -> usize {
        if self.top_k == 0 { vocab } else { (self.top_k as usize).min(vocab) }
    }

    /// Whether a penalty is on.
    pub fn penalizes(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Refuses values outside their range; call it once, at the edge.
    pub fn validate(&self) -> Result<(), SampleError> {
        let range = |name, value: f32, ok: bool, expected| match ok {
            true => Ok(()),
            false => Err(SampleError::Range { name, value, expected }),
        };
        // Comparisons with NaN are false, so NaN is refused everywhere.
        let (t, p, m) = (self.temperature, self.top_p, self.min_p);
        range("temperature", t, (0.0..=100.0).contains(&t), "0 (greedy) to 100")?;
        range("top_p", p, p > 0.0 && p <= 1.0, "more than 0, up to 1 (off)")?;
        range("min_p", m, (0.0..=1.0).contains(&m), "0 (off) to 1")?;
        let r = self.repetition_penalty;
        range("repetition_penalty", r, r > 0.0 && r <= 100.0, "more than 0, up to 100; 1 is off")?;
        for (name, value) in
            [("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)]
        {
            range(name, value, (-100.0..=100.0).contains(&value), "-100 to 100; 0 is off")?;
        }
        for &(token, bias) in &self.logit_bias {
            if bias.is_nan() || bias == f32::INFINITY {
                return Err(SampleError::Bias { token, bias });
            }
        }
        Ok(())
    }
}

/// Parameters that make no sense, or logits that nothing can be chosen from.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SampleError {
    /// The model computed an infinity.
    #[error("the logit of token {token} is infinite: the model's weights are damaged or too large")]
    Infinite {
        /// The token.
        token: u32,
    },
    /// A value out of its range.
    #[error("{name} is {value}, expected {expected}")]
    Range {
        /// The parameter.
        name: &'static str,
        /// What was given.
        value: f32,
        /// What is allowed, in words.
        expected: &'static str,
    },
    /// A bias that would make every other token impossible or the sum undefined.
    #[error("logit bias of token {token} is {bias}, expected a number, or -inf to forbid the token")]
    Bias {
        /// The token.
        token: u32,
        /// What was given.
        bias: f32,
    },
    /// A bias for a token that does not exist.
    #[error("logit bias for token {token}, the vocabulary has {vocab} tokens (0 to {})", vocab.saturating_sub(1))]
    BiasToken {
        /// The token.
        token: u32,
        /// Tokens the model knows.
        vocab: usize,
    },
    /// All logits are NaN or -inf.
    #[error(
        "no token can be chosen: of {vocab} logits {nans} are NaN and the rest -inf; \
         NaN means that the model's weights or activations overflowed, -inf that every token is forbidden"
    )]
    NothingToChoose {
        /// Tokens the model knows.
        vocab: usize,
        /// How many logits are NaN.
        nans: usize,
    },
}
