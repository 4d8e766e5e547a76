//! Attention and the row operations in f64, written the obvious way: the oracle for accuracy.
//!
//! For bits there is another oracle: the portable instantiation of the kernels ([`crate::cpu::lanes`]), which fixes
//! every operation and its order.

use quern_models::spec::Act;

use crate::cpu::attend::{Chunk, Params};
use crate::cpu::kv::{BLOCK, KvMemory};

/// Two-pass softmax attention of row `row` of a chunk over the tokens it sees, `[heads * head_dim]`: all before the chunk
/// and those of the chunk that the mask shows, of which a window leaves the last ones.
pub fn attention(kv: &KvMemory, params: &Params, chunk: &Chunk, row: usize) -> Vec<f64> {
    let layer = kv.layer(params.layer);
    let (d, group) = (layer.head_dim, params.heads / layer.kv_heads);
    let shown = (0..chunk.rows).filter(|&other| chunk.mask.sees(row, other)).map(|other| chunk.pos0 + other);
    let seen: Vec<usize> = (0..chunk.pos0).chain(shown).collect();
    let seen = &seen[params.window.map_or(0, |w| seen.len().saturating_sub(w))..];
    let mut out = vec![];
    for kv_head in 0..layer.kv_heads {
        let tokens: Vec<(Vec<f32>, Vec<f32>)> =
            seen.iter().map(|&t| kv.read(params.layer, chunk.table[t / BLOCK], t % BLOCK, kv_head)).collect();
        for h in kv_head * group..(kv_head + 1) * group {
            let q = &chunk.q[row * chunk.stride + h * d..][..d];
            let score = |k: &[f32]| capped(dot(q, k) * params.scale as f64, params.cap);
            let mut w: Vec<f64> = tokens.iter().map(|(k, _)| score(k)).collect();
            // A score without a value.
            w.extend(params.sinks.get(h).map(|&s| s as f64));
            softmax(&mut w);
            out.extend((0..d).map(|i| w.iter().zip(&tokens).map(|(w, (_, v))| w * v[i] as f64).sum::<f64>()));
        }
    }
    out
}

/// `cap * tanh(x / cap)`, if there is a cap.
pub fn capped(x: f64, cap: Option<f32>) -> f64 {
    cap.map_or(x, |cap| cap as f64 * (x / cap as f64).tanh())
}

/// `x / sqrt(mean(x * x) + eps) * weight`.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f64> {
    let r = 1.0 / (dot(x, x) / x.len() as f64 + eps as f64).sqrt();
    x.iter().zip(weight).map(|(&x, &w)| x as f64 * r * w as f64).collect()
}

/// One head with its first `2 * cos.len()` elements rotated, pairing `i` with `i + cos.len()`.
pub fn rope(head: &[f32], cos: &[f32], sin: &[f32]) -> Vec<f64> {
    let half = cos.len();
    let mut out: Vec<f64> = head.iter().map(|&x| x as f64).collect();
    for i in 0..half {
        let (x0, x1) = (head[i] as f64, head[i + half] as f64);
        out[i] = x0 * cos[i] as f64 - x1 * sin[i] as f64;
        out[i + half] = x1 * cos[i] as f64 + x0 * sin[i] as f64;
    }
    out
}

/// `(x - mean) / sqrt(var + eps) * weight + bias`.
pub fn layer_norm(x: &[f32], weight: &[f32], bias: &[f32], eps: f32) -> Vec<f64> {
    let n = x.len() as f64;
    let mean = x.iter().map(|&x| x as f64).sum::<f64>() / n;
    let var = x.iter().map(|&x| (x as f64 - mean).powi(2)).sum::<f64>() / n;
    let r = 1.0 / (var + eps as f64).sqrt();
    x.iter().zip(weight).zip(bias).map(|((&x, &w), &b)| (x as f64 - mean) * r * w as f64 + b as f64).collect()
}

/// One activation.
pub fn act(kind: Act, x: f32) -> f64 {
    let x = x as f64;
    match kind {
        Act::Silu => x / (1.0 + (-x).exp()),
        Act::Gelu => x * erfc(-x / std::f64::consts::SQRT_2) / 2.0,
        Act::GeluTanh => {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            // 1 + tanh u, without its cancellation.
            x / (1.0 + (-2.0 * u).exp())
        }
    }
}

/// Complementary error function to about 1e-13: the series of erf near zero, else the continued fraction.
fn erfc(z: f64) -> f64 {
    if z < 0.0 {
        return 2.0 - erfc(-z);
    }
    let scale = (-z * z).exp() / std::f64::consts::PI.sqrt();
    if z < 2.0 {
        // erf z = 2 e^(-z^2) / sqrt(pi) * sum of 2^n z^(2n + 1) / (1 * 3 * ... * (2n + 1))
        let (mut term, mut sum) = (z, z);
        for n in 1..60 {
            term *= 2.0 * z * z / (2 * n + 1) as f64;
            sum += term;
        }
        return 1.0 - 2.0 * scale * sum;
    }
    // erfc z = e^(-z^2) / sqrt(pi) / (z + (1/2) / (z + 1 / (z + (3/2) / (z + ...))))
    let fraction = (1..120).rev().fold(z, |below, n| z + n as f64 / 2.0 / below);
    scale / fraction
}

/// In place.
pub fn softmax(x: &mut [f64]) {
    let top = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    for x in x.iter_mut() {
        *x = (*x - top).exp();
    }
    let sum: f64 = x.iter().sum();
    for x in x.iter_mut() {
        *x /= sum;
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| a as f64 * b as f64).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn erfc_has_the_values_of_tables() {
        // From mpmath, 15 digits.
        for (z, want) in [
            (0.0, 1.0),
            (0.5, 0.479500122186953),
            (-1.0, 1.84270079294971),
            (1.9, 0.00720957076474253),
            (2.1, 0.00297946665633299),
            (5.0, 1.53745979442803e-12),
        ] {
            let got = erfc(z);
            assert!((got / want - 1.0).abs() < 1e-12, "{z}: {got}, expected {want}");
        }
    }
}
