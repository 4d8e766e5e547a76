//! Means and their standard errors over the scored tokens, as llama-perplexity reports them.
//!
//! Tokens are taken as independent, which those of a text are not quite: true errors are somewhat larger.

use super::score::Score;

/// A number and its standard error.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// The number.
    pub value: f64,
    /// Standard error; NaN for fewer than two tokens.
    pub error: f64,
}

impl Estimate {
    /// The same in percent.
    pub fn percent(self) -> Estimate {
        Estimate { value: 100.0 * self.value, error: 100.0 * self.error }
    }

    /// With its error, where there is one.
    pub fn shown(self, digits: usize) -> String {
        match self.error.is_nan() {
            true => format!("{:.digits$}", self.value),
            false => format!("{:.digits$} ± {:.digits$}", self.value, self.error),
        }
    }
}

/// What the scores of a text say about a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// Tokens scored.
    pub tokens: usize,
    /// Mean negative log-likelihood, nats per token.
    pub nll: Estimate,
    /// `exp` of it.
    pub perplexity: Estimate,
    /// Against the reference, if there is one.
    pub against: Option<Distance>,
}

/// How far a model is from the reference.
#[derive(Debug, Clone, PartialEq)]
pub struct Distance {
    /// The reference's perplexity on the same tokens.
    pub perplexity: Estimate,
    /// `ln(perplexity / reference's)`; the error is that of the differences, so what both find hard cancels.
    pub ln_ratio: Estimate,
    /// Mean KL divergence, nats.
    pub kl: Estimate,
    /// Median KL divergence.
    pub kl_median: f64,
    /// 99th percentile of the KL divergence.
    pub kl_99: f64,
    /// Largest KL divergence.
    pub kl_max: f64,
    /// Share of tokens for which both find the same token likeliest.
    pub same_top: Estimate,
    /// Mean change of the probability of the text's own token.
    pub delta_p: Estimate,
    /// Root mean square of that change.
    pub delta_p_rms: Estimate,
}

impl Summary {
    /// Summary of at least one score; the distance is there if every score has one.
    pub fn new(scores: &[Score]) -> Summary {
        let nll = mean(scores.iter().map(|s| s.nll));
        let against: Option<Vec<_>> = scores.iter().map(|s| s.against.map(|a| (s.nll, a))).collect();
        let distance = |pairs: Vec<(f64, super::score::Against)>| {
            let mut kls: Vec<f64> = pairs.iter().map(|(_, a)| a.kl).collect();
            let delta = |(nll, a): &(f64, super::score::Against)| (-nll).exp() - (-a.nll).exp();
            let squares = mean(pairs.iter().map(|pair| delta(pair).powi(2)));
            let rms = squares.value.sqrt();
            let kl = mean(kls.iter().copied());
            kls.sort_by(f64::total_cmp);
            Distance {
                perplexity: perplexity(mean(pairs.iter().map(|(_, a)| a.nll))),
                ln_ratio: mean(pairs.iter().map(|(nll, a)| nll - a.nll)),
                kl,
                kl_median: percentile(&kls, 0.5),
                kl_99: percentile(&kls, 0.99),
                kl_max: percentile(&kls, 1.0),
                same_top: mean(pairs.iter().map(|(_, a)| f64::from(u8::from(a.same_top)))),
                delta_p: mean(pairs.iter().map(delta)),
                // d sqrt(x) = dx / 2 sqrt(x)
                delta_p_rms: Estimate {
                    value: rms,
                    error: if rms > 0.0 { 0.5 * squares.error / rms } else { squares.error },
                },
            }
        };
        Summary { tokens: scores.len(), nll, perplexity: perplexity(nll), against: against.map(distance) }
    }
}

/// `exp` of a mean; the error to first order.
fn perplexity(nll: Estimate) -> Estimate {
    let value = nll.value.exp();
    Estimate { value, error: value * nll.error }
}

/// Mean and its standard error.
fn mean(values: impl Iterator<Item = f64> + Clone) -> Estimate {
    let n = values.clone().count() as f64;
    let mean = values.clone().sum::<f64>() / n;
    let variance = values.map(|v| (v - mean).powi(2)).sum::<f64>() / n;
    Estimate { value: mean, error: if n < 2.0 { f64::NAN } else { (variance / (n - 1.0)).sqrt() } }
}

/// Of sorted values, with linear interpolation; `fraction` 0 to 1.
fn percentile(sorted: &[f64], fraction: f64) -> f64 {
    let at = fraction * (sorted.len() - 1) as f64;
    let (below, part) = (at.floor() as usize, at.fract());
    let above = (below + 1).min(sorted.len() - 1);
    sorted[below] * (1.0 - part) + sorted[above] * part
}

#[cfg(test)]
mod tests {
    use super::super::score::Against;
    use super::*;

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-12, "{a} {b}");
    }

    #[test]
    fn perplexity_of_known_losses() {
        let scores = [1.0, 2.0, 3.0, 6.0].map(|nll| Score { nll, against: None });
        let s = Summary::new(&scores);
        // Population variance 14/4, over n - 1 = 3.
        close(s.nll.value, 3.0);
        close(s.nll.error, (3.5f64 / 3.0).sqrt());
        close(s.perplexity.value, 3f64.exp());
        close(s.perplexity.error, 3f64.exp() * (3.5f64 / 3.0).sqrt());
        assert_eq!((s.tokens, s.against), (4, None));
        assert!(Summary::new(&scores[..1]).nll.error.is_nan());
    }

    #[test]
    fn distances_of_known_pairs() {
        let pair = |nll: f64, reference: f64, kl, same_top| Score {
            nll,
            against: Some(Against { nll: reference, kl, same_top }),
        };
        let ln2 = 2f64.ln();
        // Probabilities 1/2 against 1/4, and 1/4 against 1/2.
        let scores = [pair(ln2, 2.0 * ln2, 0.1, true), pair(2.0 * ln2, ln2, 0.3, true), pair(ln2, ln2, 0.2, false)];
        let d = Summary::new(&scores).against.unwrap();
        close(d.ln_ratio.value, 0.0);
        close(d.ln_ratio.error, (2.0 * ln2 * ln2 / 3.0 / 2.0).sqrt());
        close(d.perplexity.value, (4.0 * ln2 / 3.0).exp());
        close(d.kl.value, 0.2);
        close(d.kl_median, 0.2);
        close(d.kl_99, 0.298);
        close(d.kl_max, 0.3);
        close(d.same_top.value, 2.0 / 3.0);
        close(d.same_top.error, (2.0f64 / 9.0 / 2.0).sqrt());
        close(d.delta_p.value, 0.0);
        close(d.delta_p_rms.value, (2.0f64 / 16.0 / 3.0).sqrt());
        let squares = [1.0 / 16.0, 1.0 / 16.0, 0.0];
        close(d.delta_p_rms.error, 0.5 * mean(squares.into_iter()).error / d.delta_p_rms.value);
    }

    #[test]
    fn the_same_model_has_no_distance_and_no_error() {
        let same = Score { nll: 1.5, against: Some(Against { nll: 1.5, kl: 0.0, same_top: true }) };
        let d = Summary::new(&[same; 3]).against.unwrap();
        let zero = Estimate { value: 0.0, error: 0.0 };
        assert_eq!([d.ln_ratio, d.kl, d.delta_p, d.delta_p_rms], [zero; 4]);
        assert_eq!(d.same_top, Estimate { value: 1.0, error: 0.0 });
    }
}
