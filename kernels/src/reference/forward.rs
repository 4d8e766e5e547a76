//! A whole forward pass in the slowest obvious way: the oracle of the executors.
//!
//! Every weight is read element by element through [`TensorView::at`], every sum is f64, nothing is
//! cached, attention is a plain softmax. Intermediate results are rounded to f32 where the reference
//! library has f32 tensors.

use quern_models::{
    ModelFile, TensorView,
    spec::{Act, Attn, Layer, Mlp, Norm},
};

use crate::exec::Mask;

use super::ops::{act, capped, layer_norm, rms_norm, softmax};

/// Rows of activations.
pub(super) type Rows = Vec<Vec<f32>>;

/// Logits `[tokens.len()][vocab]` after each token.
pub fn logits(file: &ModelFile, tokens: &[u32]) -> Vec<f32> {
    masked(file, tokens, tokens.len(), Mask::Causal)
}

/// The same where `mask` says which of the tokens from `start` on see each other.
pub fn masked(file: &ModelFile, tokens: &[u32], start: usize, mask: Mask) -> Vec<f32> {
    let context = Context::of(tokens.len(), start, mask);
    let spec = file.spec();
    let all = Tensors { file, at: String::new() };
    let embed = all.get("embed");
    let scale = spec.embed_scale.unwrap_or(1.0);
    let row = |&t: &u32| (0..spec.hidden).map(|i| embed.at(t as usize, i) * scale).collect::<Vec<f32>>();
    let mut x: Rows = tokens.iter().map(row).collect();
    if spec.positions.is_some() {
        let table = all.get("positions");
        for (&p, row) in context.positions.iter().zip(&mut x) {
            row.iter_mut().enumerate().for_each(|(i, x)| *x += table.at(p, i));
        }
    }
    for (i, layer) in spec.layers.iter().enumerate() {
        let tensors = Tensors { file, at: format!("layers.{i}.") };
        let attended = attention(&tensors, layer, &context, &tensors.norm("attn_norm", &layer.attn_norm, &x));
        add(&mut x, &attended);
        let fed = feed_forward(&tensors, layer, &x);
        add(&mut x, &fed);
    }
    let head = if spec.tied_head { embed } else { all.get("head") };
    let normed = all.norm("norm", &spec.norm, &x);
    let logits = linear(&head, None, &all.ordered("head_order", spec.head_order, normed)).concat();
    logits.iter().map(|&l| capped(l as f64, spec.logit_cap) as f32).collect()
}

/// What tokens have to do with each other.
pub(super) struct Context {
    /// Position of each.
    positions: Vec<usize>,
    /// Which tokens each sees, ascending, but for windows.
    seen: Vec<Vec<usize>>,
}

impl Context {
    /// Of so many tokens, of which those from `start` on see each other as `mask` says.
    pub fn of(tokens: usize, start: usize, mask: Mask) -> Context {
        let place = |t: usize| if t < start { t } else { start + mask.depth(t - start) };
        let see = |t: usize, other: usize| match (t < start, other < start) {
            (true, _) => other <= t,
            (false, true) => true,
            (false, false) => mask.sees(t - start, other - start),
        };
        let seen = |t: usize| (0..tokens).filter(|&other| see(t, other)).collect();
        Context { positions: (0..tokens).map(place).collect(), seen: (0..tokens).map(seen).collect() }
    }
}

/// Tensors whose names begin alike.
pub(super) struct Tensors<'a> {
    pub file: &'a ModelFile,
    pub at: String,
}

impl<'a> Tensors<'a> {
    pub fn get(&self, name: &str) -> TensorView<'a> {
        let name = format!("{}{name}", self.at);
        self.file.tensor(&name).expect("ModelFile::open checked every tensor of the spec")
    }

    pub fn vector(&self, name: &str) -> Vec<f32> {
        let view = self.get(name);
        (0..view.k).map(|i| view.at(0, i)).collect()
    }

    /// A linear layer `name`, with `name_bias` if `biased`.
    pub fn linear(&self, name: &str, biased: bool, x: &Rows) -> Rows {
        let bias = biased.then(|| self.vector(&format!("{name}_bias")));
        linear(&self.get(name), bias.as_deref(), x)
    }

    pub fn norm(&self, name: &str, norm: &Norm, x: &Rows) -> Rows {
        if *norm == Norm::Identity {
            return x.clone();
        }
        let weight = self.vector(name);
        let bias = if norm.biased() { self.vector(&format!("{name}_bias")) } else { vec![] };
        let one = |row: &Vec<f32>| match *norm {
            Norm::Rms { eps } => rms_norm(row, &weight, eps),
            Norm::Layer { eps } => layer_norm(row, &weight, &bias, eps),
            Norm::Identity => unreachable!("returned above"),
        };
        x.iter().map(|row| one(row).iter().map(|&y| y as f32).collect()).collect()
    }

    /// What a half of a layer gives, behind the norm that it may have.
    pub fn after(&self, name: &str, norm: &Option<Norm>, x: Rows) -> Rows {
        norm.as_ref().map_or_else(|| x.clone(), |norm| self.norm(name, norm, &x))
    }

    /// Column `j` of the result is column `order[j]` of `x`, if there is an order.
    pub fn ordered(&self, name: &str, there: bool, x: Rows) -> Rows {
        if !there {
            return x;
        }
        let order = self.get(name);
        x.iter().map(|row| (0..row.len()).map(|j| row[order.order(j) as usize]).collect()).collect()
    }
}

/// `[rows][n]` = `[rows][k]` times the weight's rows, plus the bias.
pub(super) fn linear(w: &TensorView, bias: Option<&[f32]>, x: &Rows) -> Rows {
    let mut out = vec![vec![0.0; w.n]; x.len()];
    for n in 0..w.n {
        let weights: Vec<f32> = (0..w.k).map(|k| w.at(n, k)).collect();
        let bias = bias.map_or(0.0, |b| b[n] as f64);
        for (row, out) in x.iter().zip(&mut out) {
            let dot = row.iter().zip(&weights).map(|(&a, &b)| a as f64 * b as f64).sum::<f64>();
            out[n] = (dot + bias) as f32;
        }
    }
    out
}

pub(super) fn add(x: &mut Rows, y: &Rows) {
    for (x, y) in x.iter_mut().flatten().zip(y.iter().flatten()) {
        *x += y;
    }
}

pub(super) fn feed_forward(tensors: &Tensors, layer: &Layer, x: &Rows) -> Rows {
    let (gated, kind, bias, order) = match layer.mlp {
        Mlp::Gated { act, bias, mlp_order, .. } => (true, act, bias, mlp_order),
        Mlp::Plain { act, bias, mlp_order, .. } => (false, act, bias, mlp_order),
        Mlp::Experts { top, act, normalized, .. } => {
            let normed = tensors.norm("mlp_norm", &layer.mlp_norm, x);
            let logits = tensors.linear("router", false, &normed);
            let mixed = normed.iter().zip(&logits).map(|(x, logits)| mixture(tensors, top, act, normalized, x, logits));
            return mixed.collect();
        }
    };
    let normed = tensors.ordered("mlp_order", order, tensors.norm("mlp_norm", &layer.mlp_norm, x));
    let mut inner = tensors.linear("up", bias, &normed);
    if gated {
        let gate = tensors.linear("gate", bias, &normed);
        for (up, gate) in inner.iter_mut().flatten().zip(gate.iter().flatten()) {
            *up = (act(kind, *gate) * *up as f64) as f32;
        }
    } else {
        inner.iter_mut().flatten().for_each(|up| *up = act(kind, *up) as f32);
    }
    tensors.after("mlp_post_norm", &layer.mlp_post_norm, tensors.linear("down", bias, &inner))
}

/// What the experts that the router picks for one row give.
fn mixture(tensors: &Tensors, top: usize, kind: Act, normalized: bool, x: &[f32], logits: &[f32]) -> Vec<f32> {
    let mut weights: Vec<f64> = logits.iter().map(|&l| l as f64).collect();
    softmax(&mut weights);
    let mut picked: Vec<usize> = (0..logits.len()).collect();
    // Stable: of equal ones the lower first.
    picked.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).expect("a logit is a number"));
    picked.truncate(top);
    let all: f64 = if normalized { picked.iter().map(|&e| weights[e]).sum() } else { 1.0 };
    let mut out = vec![0.0; x.len()];
    for e in picked {
        let x = vec![x.to_vec()];
        let [gate, mut up] = ["gate", "up"].map(|name| tensors.linear(&format!("experts.{e}.{name}"), false, &x));
        up[0].iter_mut().zip(&gate[0]).for_each(|(up, gate)| *up = (act(kind, *gate) * *up as f64) as f32);
        let down = tensors.linear(&format!("experts.{e}.down"), false, &up);
        out.iter_mut().zip(&down[0]).for_each(|(out, y)| *out += weights[e] / all * *y as f64);
    }
    out.iter().map(|&y| y as f32).collect()
}

/// The attention half of a layer, of normed rows.
pub(super) fn attention(tensors: &Tensors, layer: &Layer, context: &Context, normed: &Rows) -> Rows {
    let Attn::Gqa { ref qk_norm, sinks, qkv_bias, o_bias, attn_order, o_order, head_dim, .. } = layer.attn;
    let normed = tensors.ordered("attn_order", attn_order, normed.clone());
    let [mut q, mut k, v] = ["q", "k", "v"].map(|name| tensors.linear(name, qkv_bias, &normed));
    if let Some(norm) = qk_norm {
        for (rows, name) in [(&mut q, "q_norm"), (&mut k, "k_norm")] {
            for row in rows {
                let heads: Rows = row.chunks(head_dim).map(<[f32]>::to_vec).collect();
                *row = tensors.norm(name, norm, &heads).concat();
            }
        }
    }
    rope(&layer.attn, &context.positions, &mut q);
    rope(&layer.attn, &context.positions, &mut k);
    let sinks = if sinks { tensors.vector("sinks") } else { vec![] };
    let attended = attend(&layer.attn, &sinks, &context.seen, &q, &k, &v);
    let out = tensors.linear("o", o_bias, &tensors.ordered("o_order", o_order, attended));
    tensors.after("attn_post_norm", &layer.attn_post_norm, out)
}

/// Turns every head of the row at position `p` by `p` times the rope's frequencies.
fn rope(attn: &Attn, positions: &[usize], x: &mut Rows) {
    let Attn::Gqa { head_dim: d, rope: Some(ref rope), .. } = *attn else { return };
    let freq = rope.inv_freq(d);
    let factor = rope.attention_factor() as f64;
    for (&position, row) in positions.iter().zip(x) {
        for head in row.chunks_exact_mut(d) {
            for (i, f) in freq.iter().enumerate() {
                let (sin, cos) = ((position as f32 * f) as f64).sin_cos();
                let (sin, cos) = (sin * factor, cos * factor);
                let (a, b) = (head[i] as f64, head[i + d / 2] as f64);
                head[i] = (a * cos - b * sin) as f32;
                head[i + d / 2] = (b * cos + a * sin) as f32;
            }
        }
    }
}

fn attend(attn: &Attn, sinks: &[f32], seen: &[Vec<usize>], q: &Rows, k: &Rows, v: &Rows) -> Rows {
    let Attn::Gqa { heads, kv_heads, head_dim: d, scale, window, cap, .. } = *attn;
    let mut out = vec![vec![0.0; heads * d]; v.len()];
    for (t, out) in out.iter_mut().enumerate() {
        let seen = &seen[t][window.map_or(0, |w| seen[t].len().saturating_sub(w))..];
        for h in 0..heads {
            let kv = h / (heads / kv_heads) * d;
            let dot =
                |s: usize| (0..d).map(|i| q[t][h * d + i] as f64 * k[s][kv + i] as f64).sum::<f64>() * scale as f64;
            let mut weights: Vec<f64> = seen.iter().map(|&s| capped(dot(s), cap)).collect();
            // A score without a value.
            weights.extend(sinks.get(h).map(|&s| s as f64));
            softmax(&mut weights);
            for i in 0..d {
                let value: f64 = weights.iter().zip(seen).map(|(w, &s)| w * v[s][kv + i] as f64).sum();
                out[h * d + i] = value as f32;
            }
        }
    }
    out
}
