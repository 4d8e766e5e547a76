//! Small random models, and runs of them, for tests of executors.

#![allow(clippy::unwrap_used, dead_code)]

pub mod guessing;
pub mod trees;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use quern_kernels::exec::{Chunk, ChunkOutput, Executor, Mask, Output, Plan};
use quern_models::{
    FileWriter, FloatType, Generation, Meta, ModelFile, Scheme, TensorPlan, ZeroKind,
    spec::{Act, Attn, Head, HeadKind, JoinedMethod, Layer, Mlp, ModelSpec, Norm, Rope, RopeScaling, States},
};

/// A small random model; `linear` is the scheme of its matrices.
pub fn model(name: &str, linear: Scheme, embed: Scheme, tied: bool) -> Arc<ModelFile> {
    made(name, linear, embed, plain(tied))
}

/// RMS norms, rope, grouped heads, a gated MLP.
pub fn plain(tied: bool) -> ModelSpec {
    let norm = Norm::Rms { eps: 1e-5 };
    let layer = Layer {
        attn_norm: norm.clone(),
        attn: Attn::Gqa {
            heads: 6,
            kv_heads: 2,
            head_dim: 16,
            scale: 0.25,
            rope: Some(Rope { theta: 10000.0, scaling: RopeScaling::Linear { factor: 2.0 } }),
            window: None,
            cap: None,
            sinks: false,
            qk_norm: None,
            qkv_bias: false,
            o_bias: false,
            attn_order: false,
            o_order: false,
        },
        attn_post_norm: None,
        mlp_norm: norm.clone(),
        mlp: Mlp::Gated { inner: 200, act: Act::Silu, bias: false, mlp_order: false },
        mlp_post_norm: None,
    };
    ModelSpec {
        family: "llama".into(),
        vocab: 290,
        hidden: 72,
        max_context: 2048,
        layers: vec![layer; 2],
        norm,
        tied_head: tied,
        head_order: false,
        positions: None,
        embed_scale: None,
        logit_cap: None,
        draft_head: None,
    }
}

/// Every mechanism that a spec can have: biases, orders, layer norms, windows, learned positions, norms of heads,
/// layers with and without rope, both kinds of MLP, every activation, soft caps, sinks, norms behind the halves of a
/// layer, scaled embeddings.
pub fn everything() -> ModelSpec {
    let mut spec = plain(false);
    (spec.positions, spec.head_order, spec.norm) = (Some(2048), true, Norm::Layer { eps: 1e-5 });
    (spec.embed_scale, spec.logit_cap) = (Some(1.7), Some(3.0));
    let [rms, layer_norm] = [Norm::Rms { eps: 1e-5 }, Norm::Layer { eps: 1e-3 }];
    let yarn = RopeScaling::Yarn {
        factor: 4.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_context: 64,
        attention_factor: 1.25,
        truncate: true,
    };
    let attn = |rope: Option<RopeScaling>, window, qk_norm: Option<Norm>, bias, order| Attn::Gqa {
        heads: 6,
        kv_heads: 2,
        head_dim: 16,
        scale: 0.25,
        rope: rope.map(|scaling| Rope { theta: 10000.0, scaling }),
        window,
        cap: None,
        sinks: false,
        qk_norm,
        qkv_bias: bias,
        o_bias: bias,
        attn_order: order,
        o_order: order,
    };
    let gated = |act, bias, mlp_order| Mlp::Gated { inner: 200, act, bias, mlp_order };
    let free = |act, bias, mlp_order| Mlp::Plain { inner: 136, act, bias, mlp_order };
    let layer = |attn_norm: &Norm, attn, mlp_norm: &Norm, mlp| Layer {
        attn_norm: attn_norm.clone(),
        attn,
        attn_post_norm: None,
        mlp_norm: mlp_norm.clone(),
        mlp,
        mlp_post_norm: None,
    };
    spec.layers = vec![
        layer(
            &layer_norm,
            attn(Some(yarn), Some(9), Some(rms.clone()), true, true),
            &rms,
            gated(Act::GeluTanh, true, true),
        ),
        layer(&rms, attn(None, Some(40), None, true, false), &layer_norm, free(Act::Gelu, true, false)),
        layer(
            &rms,
            attn(Some(RopeScaling::None), None, Some(rms.clone()), false, true),
            &rms,
            free(Act::GeluTanh, false, true),
        ),
        layer(&layer_norm, attn(None, None, None, false, false), &rms, gated(Act::Gelu, false, false)),
    ];
    // (cap, sinks, norms behind attention and the MLP)
    let more = [(Some(1.5), false, true, true), (None, true, false, false), (Some(4.0), true, true, false)];
    for (layer, (cap, sinks, attn_out, mlp_out)) in spec.layers.iter_mut().zip(more) {
        let Attn::Gqa { cap: its_cap, sinks: its_sinks, .. } = &mut layer.attn;
        (*its_cap, *its_sinks) = (cap, sinks);
        layer.attn_post_norm = attn_out.then(|| rms.clone());
        layer.mlp_post_norm = mlp_out.then(|| rms.clone());
    }
    spec
}

/// Mixtures of experts around a layer that is none: more experts than a text has rows for and few, all of them, weights
/// of a softmax over all and over those picked.
pub fn mixtures() -> ModelSpec {
    let mut spec = plain(true);
    let mixture = |experts, top, inner, act, normalized| Mlp::Experts { experts, top, inner, act, normalized };
    let mut layers = vec![spec.layers[0].clone(); 4];
    layers[0].mlp = mixture(70, 3, 40, Act::Silu, true);
    layers[2].mlp = mixture(5, 2, 136, Act::GeluTanh, false);
    layers[2].mlp_norm = Norm::Layer { eps: 1e-3 };
    layers[3].mlp = mixture(4, 4, 72, Act::Silu, true);
    spec.layers = layers;
    spec
}

/// Heads of [`plain`]`(true)`: each kind, with whatever each can have.
pub fn heads() -> Vec<(&'static str, ModelSpec)> {
    let base = plain(false);
    let rms = Norm::Rms { eps: 1e-3 };
    let head = |kind, states| Head {
        states,
        model_hidden: base.hidden,
        model_vocab: base.vocab,
        kind,
        shared_embed: true,
        shared_head: true,
        mapped: false,
    };
    let before = |layers: &[usize]| States::Before { layers: layers.to_vec() };
    let joined = |method, norm: &Norm, state_first, bias, zero_first, normed| HeadKind::Joined {
        method,
        embed_norm: norm.clone(),
        state_norm: norm.clone(),
        state_first,
        bias,
        zero_first,
        normed,
    };
    let wide = |normed_residual, normed| HeadKind::Wide {
        embed_norm: rms.clone(),
        state_norm: rms.clone(),
        normed_residual,
        normed,
    };
    let spec = |layers: usize, first: &Norm, norm: &Norm, guesses: Head| {
        let mut spec = ModelSpec { norm: norm.clone(), draft_head: Some(guesses), ..base.clone() };
        spec.layers.truncate(layers);
        if let Some(layer) = spec.layers.first_mut() {
            layer.attn_norm = first.clone();
        }
        spec
    };
    let none = Norm::Identity;
    let eagle = head(joined(JoinedMethod::Eagle, &none, false, true, false, false), States::Normed);
    let mtp = head(joined(JoinedMethod::Mtp, &rms, true, false, true, true), before(&[2]));
    let all = before(&[0, 1, 2]);
    let own = Head { shared_embed: false, shared_head: false, mapped: true, ..head(wide(false, false), all.clone()) };
    let two = Head { shared_head: false, ..head(wide(true, true), before(&[1])) };
    let medusa = head(HeadKind::Medusa { guesses: 3, depth: 2 }, States::Normed);
    let medusa = Head { shared_embed: false, shared_head: false, ..medusa };
    let mut mapped = spec(1, &none, &rms, own);
    mapped.vocab = 90;
    vec![
        ("eagle", spec(1, &none, &none, eagle)),
        ("mtp", spec(1, &rms, &rms, mtp)),
        ("eagle3", mapped),
        ("eagle3-two", spec(2, &none, &rms, two)),
        ("medusa", spec(0, &none, &none, medusa)),
    ]
}

/// A head of [`plain`]`(true)` that guesses blocks of 5.
pub fn block_head() -> ModelSpec {
    let rms = Norm::Rms { eps: 1e-3 };
    let mut spec = plain(false);
    spec.layers[0] = everything().layers[2].clone();
    spec.draft_head = Some(Head {
        states: States::Before { layers: vec![1, 2] },
        model_hidden: spec.hidden,
        model_vocab: spec.vocab,
        kind: HeadKind::Block { size: 5, mask: 7, state_norm: rms.clone() },
        shared_embed: true,
        shared_head: true,
        mapped: false,
    });
    spec
}

pub fn made(name: &str, linear: Scheme, embed: Scheme, spec: ModelSpec) -> Arc<ModelFile> {
    let path = path(name);
    written(&path, linear, embed, spec);
    let file = ModelFile::open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    Arc::new(file)
}

/// Where a model of this process is.
pub fn path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("quern-exec-{name}-{}.qrn", std::process::id()))
}

/// Writes a random model.
pub fn written(path: &Path, linear: Scheme, embed: Scheme, spec: ModelSpec) {
    let scheme = |t: &quern_models::spec::Needed| match (t.dims.len(), t.name.as_str()) {
        (1, _) if t.order => Scheme::Order,
        (1, _) => Scheme::Float(FloatType::F32),
        (_, "positions") => Scheme::Float(FloatType::F16),
        (_, "embed" | "head") => embed,
        _ => linear,
    };
    let plans: Vec<_> =
        spec.tensors().into_iter().map(|t| TensorPlan { scheme: scheme(&t), name: t.name, dims: t.dims }).collect();
    let meta = Meta {
        spec,
        tokenizer: None,
        chat_template: None,
        generation: Generation::default(),
        provenance: serde_json::json!({}),
    };
    let mut writer = FileWriter::create(path, &meta, plans.clone()).unwrap();
    let mut state = 88172645463325252u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    for plan in &plans {
        let (n, k) = if plan.dims.len() == 2 { (plan.dims[0], plan.dims[1]) } else { (1, plan.dims[0]) };
        let planes = plan.scheme.planes(n, k).unwrap();
        let mut bytes = vec![];
        let size = 3.0 / (k as f32).sqrt();
        match plan.scheme {
            Scheme::Nested { .. } | Scheme::Mini { .. } => panic!("{}", plan.scheme),
            Scheme::Order => {
                let mut order: Vec<u32> = (0..k as u32).collect();
                (1..k as usize).for_each(|i| order.swap(i, ((random() + 0.5) * (i + 1) as f32) as usize));
                order.iter().for_each(|j| bytes.extend(j.to_le_bytes()));
            }
            Scheme::Float(t) if plan.name == "tokens" => (0..k).for_each(|i| t.push((3 * i + 1) as f32, &mut bytes)),
            Scheme::Float(t) => {
                let mean = if n == 1 && !plan.name.ends_with("_bias") { 1.0 } else { 0.0 };
                let size = if n == 1 { 1.0 } else { size };
                // A damaged model, by its name.
                let nan = path.to_string_lossy().contains("-nan-");
                let mean = if nan && plan.name == "norm" { f32::NAN } else { mean };
                (0..n * k).for_each(|_| t.push(mean + random() * size, &mut bytes))
            }
            Scheme::Int { bits, zero, scale, .. } => {
                let grid = if bits == 4 { 8.0 } else { 128.0 };
                while bytes.len() < planes.codes.1 as usize {
                    bytes.push((random() * 256.0) as i32 as u8);
                }
                bytes.resize(planes.scales.0 as usize, 0);
                while bytes.len() < (planes.scales.0 + planes.scales.1) as usize {
                    scale.push(random() * size / grid, &mut bytes);
                }
                bytes.resize(planes.zeros.0 as usize, 0);
                while bytes.len() < planes.total as usize {
                    match zero {
                        ZeroKind::Min => scale.push(random() * size, &mut bytes),
                        _ => bytes.push((random() * 256.0) as i32 as u8),
                    }
                }
            }
        }
        writer.write(&bytes).unwrap();
    }
    writer.finish().unwrap();
}

pub fn int(bits: u8, group: u32, zero: ZeroKind) -> Scheme {
    Scheme::Int { bits, group, zero, scale: FloatType::F16 }
}

pub fn tokens(n: usize) -> Vec<u32> {
    (0..n).map(|i| (i * 37 % 130) as u32).collect()
}

/// Logits of every token, computed in chunks of the given sizes with `others` running beside.
pub fn run(executor: &mut dyn Executor, tokens: &[u32], sizes: &[usize], others: usize) -> Vec<f32> {
    let mut logits = vec![];
    let (mut at, mut step) = (0, 0);
    // Scattered blocks, and other sequences with blocks between them.
    let blocks: Vec<u32> = (0..10).map(|i| (i * 5 + 3) % 50).collect();
    let other: Vec<Vec<u32>> = (0..others as u32).map(|o| vec![50 + 2 * o, 51 + 2 * o]).collect();
    while at < tokens.len() {
        let n = sizes[step % sizes.len()].min(tokens.len() - at);
        let mut chunks = vec![];
        for (o, table) in other.iter().enumerate() {
            let start = (step * (o + 1)).min(24);
            chunks.push(Chunk {
                tokens: &tokens[o..o + 1 + o % 3],
                start,
                blocks: table,
                mask: Mask::Causal,
                output: Output::Logits { from: 0 },
            });
        }
        chunks.push(Chunk {
            tokens: &tokens[at..at + n],
            start: at,
            blocks: &blocks,
            mask: Mask::Causal,
            output: Output::Logits { from: 0 },
        });
        let ticket = executor.submit(&Plan { chunks }).unwrap();
        let ChunkOutput::Logits(rows) = executor.collect(ticket).unwrap().pop().unwrap() else { panic!("no logits") };
        logits.extend(rows);
        (at, step) = (at + n, step + 1);
    }
    logits
}

/// Largest difference, as a share of the range of the oracle's logits.
pub fn deviation(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let (min, max) = want.iter().fold((f32::MAX, f32::MIN), |(a, b), &x| (a.min(x), b.max(x)));
    // A NaN is as far away as can be; `f32::max` would skip it.
    let far = |d: f32| if d.is_nan() { f32::INFINITY } else { d };
    got.iter().zip(want).map(|(a, b)| far((a - b).abs())).fold(0.0, f32::max) / (max - min)
}
