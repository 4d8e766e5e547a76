//! Attention and the row operations in f64, written the obvious way: the oracle for accuracy.
//!
//! For bits there is another oracle: the portable instantiation of the kernels ([`crate::cpu::lanes`]), which fixes
//! every operation and its order.

use crate::cpu::attend::{Chunk, Params};
use crate::cpu::kv::{BLOCK, KvMemory};

/// Two-pass softmax attention of row `row` of a chunk over the tokens it sees, `[heads * head_dim]`.
pub fn attention(kv: &KvMemory, params: &Params, chunk: &Chunk, row: usize) -> Vec<f64> {
    let layer = kv.layer(params.layer);
    let (d, group) = (layer.head_dim, params.heads / layer.kv_heads);
    let end = chunk.pos0 + row + 1;
    let start = params.window.map_or(0, |w| end.saturating_sub(w));
    let mut out = vec![];
    for kv_head in 0..layer.kv_heads {
        let tokens: Vec<(Vec<f32>, Vec<f32>)> =
            (start..end).map(|t| kv.read(params.layer, chunk.table[t / BLOCK], t % BLOCK, kv_head)).collect();
        for h in kv_head * group..(kv_head + 1) * group {
            let q = &chunk.q[row * chunk.stride + h * d..][..d];
            let mut w: Vec<f64> = tokens.iter().map(|(k, _)| dot(q, k) * params.scale as f64).collect();
            softmax(&mut w);
            out.extend((0..d).map(|i| w.iter().zip(&tokens).map(|(w, (_, v))| w * v[i] as f64).sum::<f64>()));
        }
    }
    out
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

/// `gate / (1 + e^-gate) * up`.
pub fn silu_mul(gate: f32, up: f32) -> f64 {
    gate as f64 / (1.0 + (-gate as f64).exp()) * up as f64
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
