//! A whole forward pass in the slowest obvious way: the oracle of the executors.
//!
//! Every weight is read element by element through [`TensorView::at`], every sum is f64, nothing is
//! cached, attention is a plain softmax. Intermediate results are rounded to f32 where the reference
//! library has f32 tensors.

use quern_models::{
    ModelFile, TensorView,
    spec::{Attn, Norm},
};

/// Logits `[tokens.len()][vocab]` after each token.
pub fn logits(file: &ModelFile, tokens: &[u32]) -> Vec<f32> {
    let spec = file.spec();
    let tensor = |name: &str| file.tensor(name).expect("ModelFile::open checked every tensor of the spec");
    let embed = tensor("embed");
    let row = |&t: &u32| (0..spec.hidden).map(|i| embed.at(t as usize, i)).collect::<Vec<f32>>();
    let mut x: Vec<Vec<f32>> = tokens.iter().map(row).collect();
    for (i, layer) in spec.layers.iter().enumerate() {
        let at = |name: &str| tensor(&format!("layers.{i}.{name}"));
        let normed = norm(&x, &at("attn_norm"), &layer.attn_norm);
        let (q, k, v) = (linear(&at("q"), &normed), linear(&at("k"), &normed), linear(&at("v"), &normed));
        add(&mut x, &linear(&at("o"), &attention(&layer.attn, q, k, &v)));
        let normed = norm(&x, &at("mlp_norm"), &layer.mlp_norm);
        let (gate, up) = (linear(&at("gate"), &normed), linear(&at("up"), &normed));
        let silu = |g: f32| g as f64 / (1.0 + (-g as f64).exp());
        let product =
            |(g, u): (&Vec<f32>, &Vec<f32>)| g.iter().zip(u).map(|(&g, &u)| (silu(g) * u as f64) as f32).collect();
        add(&mut x, &linear(&at("down"), &gate.iter().zip(&up).map(product).collect::<Vec<Vec<f32>>>()));
    }
    let head = if spec.tied_head { embed } else { tensor("head") };
    linear(&head, &norm(&x, &tensor("norm"), &spec.norm)).concat()
}

/// `[rows][n]` = `[rows][k]` times the weight's rows.
fn linear(w: &TensorView, x: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let mut out = vec![vec![0.0; w.n]; x.len()];
    for n in 0..w.n {
        let weights: Vec<f32> = (0..w.k).map(|k| w.at(n, k)).collect();
        for (row, out) in x.iter().zip(&mut out) {
            out[n] = row.iter().zip(&weights).map(|(&a, &b)| a as f64 * b as f64).sum::<f64>() as f32;
        }
    }
    out
}

fn norm(x: &[Vec<f32>], weight: &TensorView, norm: &Norm) -> Vec<Vec<f32>> {
    let eps = norm.eps();
    let one = |row: &Vec<f32>| {
        let mean = row.iter().map(|&v| v as f64 * v as f64).sum::<f64>() / row.len() as f64;
        let r = 1.0 / (mean + eps as f64).sqrt();
        row.iter().enumerate().map(|(i, &v)| (v as f64 * r * weight.at(0, i) as f64) as f32).collect()
    };
    x.iter().map(one).collect()
}

fn add(x: &mut [Vec<f32>], y: &[Vec<f32>]) {
    for (x, y) in x.iter_mut().flatten().zip(y.iter().flatten()) {
        *x += y;
    }
}

fn attention(attn: &Attn, mut q: Vec<Vec<f32>>, mut k: Vec<Vec<f32>>, v: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let Attn::Gqa { heads, kv_heads, head_dim: d, scale, ref rope, .. } = *attn;
    let freq = rope.as_ref().map_or(vec![0.0; d / 2], |r| r.inv_freq(d));
    for (position, row) in q.iter_mut().chain(&mut k).enumerate() {
        let position = position % v.len();
        for head in row.chunks_exact_mut(d) {
            for (i, f) in freq.iter().enumerate() {
                let (sin, cos) = ((position as f32 * f) as f64).sin_cos();
                let (a, b) = (head[i] as f64, head[i + d / 2] as f64);
                head[i] = (a * cos - b * sin) as f32;
                head[i + d / 2] = (b * cos + a * sin) as f32;
            }
        }
    }
    let mut out = vec![vec![0.0; heads * d]; v.len()];
    for (t, out) in out.iter_mut().enumerate() {
        for h in 0..heads {
            let kv = h / (heads / kv_heads) * d;
            let dot =
                |s: usize| (0..d).map(|i| q[t][h * d + i] as f64 * k[s][kv + i] as f64).sum::<f64>() * scale as f64;
            let scores: Vec<f64> = (0..=t).map(dot).collect();
            let max = scores.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for i in 0..d {
                let value: f64 = weights.iter().enumerate().map(|(s, w)| w * v[s][kv + i] as f64).sum();
                out[h * d + i] = (value / sum) as f32;
            }
        }
    }
    out
}
