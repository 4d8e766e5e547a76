//! From rows of logits to numbers per token: negative log-likelihood, KL divergence, the likeliest token.
//!
//! Natural logarithms, everything in f64. A token's numbers do not depend on the threads.

use std::thread;

/// Numbers of one scored token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Score {
    /// `-ln q(token)`.
    pub nll: f64,
    /// Against the reference, if there is one.
    pub against: Option<Against>,
}

/// How a prediction differs from the reference's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Against {
    /// `-ln p(token)` of the reference.
    pub nll: f64,
    /// `KL(p || q)` over the whole vocabulary, p the reference.
    pub kl: f64,
    /// Whether both find the same token likeliest (of equals, the first).
    pub same_top: bool,
}

/// The reference's predictions of the same tokens.
#[derive(Debug, Clone, Copy)]
pub struct Reference<'a> {
    /// Logits, or anything that differs from them by a constant per row, `[rows, vocab]`.
    pub logits: &'a [f32],
    /// `-ln p(token)` per row where it is known better than the logits tell.
    pub nll: Option<&'a [f64]>,
}

/// Scores rows of logits `[rows, vocab]` on the token that follows each.
///
/// `Err(row)`: the first row with a logit that is not finite, in either input.
pub fn score(
    logits: &[f32],
    targets: &[u32],
    reference: Option<Reference<'_>>,
    threads: usize,
) -> Result<Vec<Score>, usize> {
    let rows = targets.len();
    let vocab = logits.len() / rows.max(1);
    let one = |row: usize| {
        let own = row * vocab..(row + 1) * vocab;
        let p = reference.map(|r| (&r.logits[own.clone()], r.nll.map(|nll| nll[row])));
        score_row(&logits[own], targets[row] as usize, p).ok_or(row)
    };
    let share = rows.div_ceil(threads.max(1)).max(1);
    let parts: Vec<Result<Vec<Score>, usize>> = thread::scope(|scope| {
        let part = |first: usize| (first..rows.min(first + share)).map(one).collect();
        let others: Vec<_> = (share..rows).step_by(share).map(|first| scope.spawn(move || part(first))).collect();
        let mine = part(0);
        let join = |t: thread::ScopedJoinHandle<'_, _>| t.join().expect("scoring a row does not panic");
        std::iter::once(mine).chain(others.into_iter().map(join)).collect()
    });
    let mut scores = Vec::with_capacity(rows);
    for part in parts {
        scores.extend(part?);
    }
    Ok(scores)
}

/// `None`: a logit is not finite.
fn score_row(q: &[f32], target: usize, reference: Option<(&[f32], Option<f64>)>) -> Option<Score> {
    let ln_q = log_normalizer(q)?;
    let nll = ln_q - f64::from(q[target]);
    let Some((p, known)) = reference else { return Some(Score { nll, against: None }) };
    let ln_p = log_normalizer(p)?;
    let mut kl = 0.0;
    for (&p, &q) in p.iter().zip(q) {
        let (p, q) = (f64::from(p) - ln_p, f64::from(q) - ln_q);
        kl += p.exp() * (p - q);
    }
    let against = Against {
        nll: known.unwrap_or(ln_p - f64::from(p[target])),
        // Never negative but for the last bit of the sum.
        kl: kl.max(0.0),
        same_top: top(p) == top(q),
    };
    Some(Score { nll, against: Some(against) })
}

/// `ln sum exp(x)`.
fn log_normalizer(row: &[f32]) -> Option<f64> {
    let mut most = f32::NEG_INFINITY;
    for &x in row {
        if !x.is_finite() {
            return None;
        }
        most = most.max(x);
    }
    let most = f64::from(most);
    Some(most + row.iter().map(|&x| (f64::from(x) - most).exp()).sum::<f64>().ln())
}

/// The first of the largest.
fn top(row: &[f32]) -> usize {
    let larger = |best: usize, i: usize| if row[i] > row[best] { i } else { best };
    (0..row.len()).fold(0, larger)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-12, "{a} {b}");
    }

    #[test]
    fn numbers_that_are_known() {
        // p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4); a constant added to logits changes nothing.
        let ln = |p: f32| p.ln();
        let p = [ln(0.5), ln(0.25), ln(0.25)].map(|x| x + 3.0);
        let q = [ln(0.25), ln(0.5), ln(0.25)].map(|x| x - 40.0);
        let scores = score(&q, &[1], Some(Reference { logits: &p, nll: None }), 1).unwrap();
        let against = scores[0].against.unwrap();
        assert!((scores[0].nll - 2f64.ln()).abs() < 1e-5);
        assert!((against.nll - 4f64.ln()).abs() < 1e-5);
        // 1/2 ln 2 - 1/4 ln 2
        assert!((against.kl - 0.25 * 2f64.ln()).abs() < 1e-5);
        assert!(!against.same_top);
        let known = score(&q, &[1], Some(Reference { logits: &p, nll: Some(&[7.5]) }), 1).unwrap();
        assert_eq!(known[0].against.unwrap().nll, 7.5);
    }

    #[test]
    fn large_logits_do_not_overflow() {
        let score = score(&[1e30, 0.0], &[0], None, 1).unwrap();
        close(score[0].nll, 0.0);
        close(super::score(&[1000.0, 1000.0], &[1], None, 1).unwrap()[0].nll, 2f64.ln());
    }

    #[test]
    fn a_model_is_at_no_distance_from_itself() {
        let row: Vec<f32> = (0..999).map(|i| ((i * 7919) % 1000) as f32 / 37.0).collect();
        let same = score(&row, &[5], Some(Reference { logits: &row, nll: None }), 1).unwrap()[0];
        assert_eq!(same.against, Some(Against { nll: same.nll, kl: 0.0, same_top: true }));
    }

    #[test]
    fn threads_change_nothing_and_bad_rows_are_named() {
        let vocab = 17;
        let logits: Vec<f32> = (0..13 * vocab).map(|i| ((i * 31) % 101) as f32 / 9.0).collect();
        let other: Vec<f32> = (0..13 * vocab).map(|i| ((i * 57) % 103) as f32 / 9.0).collect();
        let targets: Vec<u32> = (0..13).collect();
        let reference = Reference { logits: &other, nll: None };
        let one = score(&logits, &targets, Some(reference), 1).unwrap();
        assert_eq!(one.len(), 13);
        for threads in [2, 3, 12, 13, 40] {
            assert_eq!(score(&logits, &targets, Some(reference), threads).unwrap(), one);
            let mut bad = logits.clone();
            bad[9 * vocab + 4] = f32::NAN;
            bad[11 * vocab] = f32::INFINITY;
            assert_eq!(score(&bad, &targets, Some(reference), threads), Err(9));
            let broken = Reference { logits: &bad, nll: None };
            assert_eq!(score(&logits, &targets, Some(broken), threads), Err(9));
        }
        assert_eq!(score(&[], &[], None, 2), Ok(vec![]));
    }
}
