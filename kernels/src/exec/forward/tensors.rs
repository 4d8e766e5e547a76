//! What a layer is made of: indices of its matrices in the file, and its vectors, loaded once.

use quern_models::{
    ModelFile, Scheme,
    spec::{Act, Attn, Layer, Mlp, Norm},
};

use super::super::Angles;
use crate::cpu::{lanes::Simd, ops};

/// A norm, and the order in which the linear layers behind it take its columns.
pub(super) struct Input {
    norm: Norm,
    weight: Vec<f32>,
    /// Empty for an RMS norm.
    bias: Vec<f32>,
    /// Empty: as they are.
    pub order: Vec<u32>,
}

/// One layer.
pub(super) struct LayerTensors {
    pub attn_in: Input,
    pub qkv: [usize; 3],
    /// `[q + 2 kv]`, or empty.
    pub qkv_bias: Vec<f32>,
    /// Weights of the norms of q's and k's heads, `[head_dim]` each, and eps.
    pub qk_norm: Option<([Vec<f32>; 2], f32)>,
    /// A score without a value of each query head, `[heads]`, or empty.
    pub sinks: Vec<f32>,
    /// Index of the [`Angles`].
    pub rope: Option<usize>,
    pub o_order: Vec<u32>,
    pub o: usize,
    pub o_bias: Vec<f32>,
    /// Norm of what attention gives.
    pub attn_out: Option<Input>,
    pub mlp_in: Input,
    pub mlp: MlpTensors,
    /// Norm of what the MLP gives.
    pub mlp_out: Option<Input>,
}

/// The feed-forward half of a layer.
pub(super) enum MlpTensors {
    One(Block),
    Experts(Experts),
}

/// One block for all tokens.
pub(super) struct Block {
    pub gate: Option<usize>,
    pub gate_bias: Vec<f32>,
    pub up: usize,
    pub up_bias: Vec<f32>,
    pub act: Act,
    pub down: usize,
    pub down_bias: Vec<f32>,
}

/// A mixture.
pub(super) struct Experts {
    pub router: usize,
    /// Gate, up and down of each.
    pub each: Vec<[usize; 3]>,
    /// What gates and ups are stored in, and what downs are: each scheme once.
    pub schemes: [Vec<Scheme>; 2],
    pub inner: usize,
    pub top: usize,
    pub act: Act,
    pub normalized: bool,
}

impl LayerTensors {
    /// The block of a layer that is no mixture.
    pub fn block(&self) -> &Block {
        match &self.mlp {
            MlpTensors::One(block) => block,
            MlpTensors::Experts(_) => unreachable!("a mixture has a pass of its own"),
        }
    }

    /// The experts of a layer that is a mixture.
    pub fn experts(&self) -> &Experts {
        match &self.mlp {
            MlpTensors::Experts(experts) => experts,
            MlpTensors::One(_) => unreachable!("the caller asked what the layer is"),
        }
    }

    pub fn new(file: &ModelFile, i: usize, layer: &Layer, angles: &mut Vec<Angles>) -> LayerTensors {
        let name = |name: &str| format!("layers.{i}.{name}");
        let at = |tensor: &str| index(file, &name(tensor));
        let bias = |there: bool, tensor: &str| if there { vector(file, &name(tensor)) } else { vec![] };
        let Attn::Gqa { head_dim, ref rope, ref qk_norm, sinks, qkv_bias, o_bias, attn_order, o_order, .. } =
            layer.attn;
        let block = |gated: bool, act, biased: bool| {
            MlpTensors::One(Block {
                gate: gated.then(|| at("gate")),
                gate_bias: bias(biased && gated, "gate_bias"),
                up: at("up"),
                up_bias: bias(biased, "up_bias"),
                act,
                down: at("down"),
                down_bias: bias(biased, "down_bias"),
            })
        };
        let (mlp, mlp_order) = match layer.mlp {
            Mlp::Gated { act, bias, mlp_order, .. } => (block(true, act, bias), mlp_order),
            Mlp::Plain { act, bias, mlp_order, .. } => (block(false, act, bias), mlp_order),
            Mlp::Experts { experts, top, inner, act, normalized } => {
                let of = |e: usize| ["gate", "up", "down"].map(|tensor| at(&format!("experts.{e}.{tensor}")));
                let each: Vec<_> = (0..experts).map(of).collect();
                let stored = |which: std::ops::Range<usize>| {
                    let mut schemes: Vec<Scheme> = vec![];
                    for &t in each.iter().flat_map(|each| &each[which.clone()]) {
                        let scheme = file.view(t).scheme;
                        if !schemes.contains(&scheme) {
                            schemes.push(scheme);
                        }
                    }
                    schemes
                };
                let schemes = [stored(0..2), stored(2..3)];
                (
                    MlpTensors::Experts(Experts { router: at("router"), each, schemes, inner, top, act, normalized }),
                    false,
                )
            }
        };
        let order = |there: bool, tensor: &str| there.then(|| name(tensor));
        let after = |norm: &Option<Norm>, tensor: &str| norm.as_ref().map(|n| Input::new(file, &name(tensor), n, None));
        LayerTensors {
            attn_in: Input::new(file, &name("attn_norm"), &layer.attn_norm, order(attn_order, "attn_order")),
            qkv: ["q", "k", "v"].map(at),
            qkv_bias: ["q_bias", "k_bias", "v_bias"].map(|b| bias(qkv_bias, b)).concat(),
            qk_norm: qk_norm.as_ref().map(|n| (["q_norm", "k_norm"].map(|w| vector(file, &name(w))), n.eps())),
            sinks: bias(sinks, "sinks"),
            rope: rope.as_ref().map(|rope| Angles::of(angles, rope, head_dim)),
            o_order: order(o_order, "o_order").map_or(vec![], |o| columns(file, &o)),
            o: at("o"),
            o_bias: bias(o_bias, "o_bias"),
            attn_out: after(&layer.attn_post_norm, "attn_post_norm"),
            mlp_in: Input::new(file, &name("mlp_norm"), &layer.mlp_norm, order(mlp_order, "mlp_order")),
            mlp,
            mlp_out: after(&layer.mlp_post_norm, "mlp_post_norm"),
        }
    }
}

impl Input {
    pub fn new(file: &ModelFile, name: &str, norm: &Norm, order: Option<String>) -> Input {
        let bias = if norm.biased() { vector(file, &format!("{name}_bias")) } else { vec![] };
        let order = order.map_or(vec![], |o| columns(file, &o));
        let weight = if norm.weighted() { vector(file, name) } else { vec![] };
        Input { norm: norm.clone(), weight, bias, order }
    }

    /// The normed row as the linear layers take it, `[hidden]`; in one of the two buffers.
    pub fn prepare<'a>(&self, simd: Simd, x: &[f32], row: &'a mut Vec<f32>, ordered: &'a mut Vec<f32>) -> &'a [f32] {
        row.resize(x.len(), 0.0);
        self.norm(simd, x, row);
        gather(&self.order, row, ordered)
    }

    /// The normed row in natural order, `[hidden]`.
    pub fn norm(&self, simd: Simd, x: &[f32], out: &mut [f32]) {
        match self.norm {
            Norm::Rms { eps } => ops::rms_norm(simd, x, &self.weight, eps, out),
            Norm::Layer { eps } => ops::layer_norm(simd, x, &self.weight, &self.bias, eps, out),
            Norm::Identity => out.copy_from_slice(x),
        }
    }
}

/// Element `order[j]` of `from` at place `j`; `from` itself without an order.
pub(super) fn gather<'a>(order: &[u32], from: &'a [f32], to: &'a mut Vec<f32>) -> &'a [f32] {
    if order.is_empty() {
        return from;
    }
    to.clear();
    to.extend(order.iter().map(|&j| from[j as usize]));
    to
}

/// Adds a bias, if there is one, to the outputs `at ..` of one row.
pub(super) fn add_bias(outputs: &mut [f32], bias: &[f32], at: usize) {
    if !bias.is_empty() {
        let bias = &bias[at..at + outputs.len()];
        outputs.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
    }
}

pub(super) fn index(file: &ModelFile, name: &str) -> usize {
    file.index(name).expect("ModelFile::open checked every tensor of the spec")
}

pub(super) fn vector(file: &ModelFile, name: &str) -> Vec<f32> {
    let view = file.view(index(file, name));
    (0..view.k).map(|i| view.at(0, i)).collect()
}

pub(super) fn columns(file: &ModelFile, name: &str) -> Vec<u32> {
    let view = file.view(index(file, name));
    (0..view.k).map(|i| view.order(i)).collect()
}
