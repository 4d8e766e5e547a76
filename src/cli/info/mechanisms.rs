//! The mechanisms of a model in a line each, where layers differ with how many have them.

use quern_models::{
    ModelSpec,
    spec::{Act, Attn, Head, HeadKind, Layer, Mlp, Norm, Rope, RopeScaling, States},
};

/// Positions, windows, norms and biases of attention: `rope 10000 in 27 of 36 layers; window 4096; RMS norms`.
pub(super) fn attention(spec: &ModelSpec) -> String {
    let mut parts = vec![];
    if let Some(rows) = spec.positions {
        parts.push(format!("{rows} learned positions"));
    }
    parts.extend(kinds(spec, |l| of(l).rope.map(rope)));
    parts.extend(kinds(spec, |l| of(l).window.map(|w| format!("window {w}"))));
    parts.extend(kinds(spec, |l| of(l).cap.map(|cap| format!("scores capped at {cap}"))));
    parts.extend(kinds(spec, |l| of(l).sinks.then(|| "sinks".into())));
    parts.extend(kinds(spec, |l| of(l).qk_norm.then(|| "norms of q and k heads".into())));
    let norm = |norm: &Norm| match norm {
        Norm::Rms { .. } => Some("RMS norms".to_string()),
        Norm::Layer { .. } => Some("layer norms".to_string()),
        Norm::Identity => None,
    };
    parts.extend(kinds(spec, |l| norm(&l.attn_norm)));
    parts.extend(kinds(spec, |l| l.attn_post_norm.as_ref().map(|_| "norm behind".into())));
    parts.extend(kinds(spec, |l| biases(&[(of(l).qkv_bias, "q, k, v"), (of(l).o_bias, "o")])));
    parts.extend(kinds(spec, |l| of(l).ordered.then(|| "act-order".into())));
    parts.join("; ")
}

/// Kind, activation and biases of the feed-forward blocks: `gated, silu`.
pub(super) fn mlp(spec: &ModelSpec) -> String {
    let kind = |l: &Layer| {
        let (kind, act, bias, order) = match l.mlp {
            Mlp::Gated { act, bias, mlp_order, .. } => ("gated".to_string(), act, bias, mlp_order),
            Mlp::Plain { act, bias, mlp_order, .. } => ("plain".to_string(), act, bias, mlp_order),
            Mlp::Experts { experts, top, inner, act, .. } => {
                (format!("{top} of {experts} gated experts of inner {inner}"), act, false, false)
            }
        };
        let act = match act {
            Act::Silu => "silu",
            Act::Gelu => "gelu",
            Act::GeluTanh => "gelu (tanh)",
        };
        let (bias, order) = (if bias { ", biases" } else { "" }, if order { ", act-order" } else { "" });
        let behind = if l.mlp_post_norm.is_some() { ", norm behind" } else { "" };
        Some(format!("{kind}, {act}{bias}{order}{behind}"))
    };
    kinds(spec, kind).join("; ")
}

/// `2 layers`.
pub(super) fn layers(spec: &ModelSpec) -> String {
    match spec.layers.len() {
        1 => "1 layer".into(),
        n => format!("{n} layers"),
    }
}

/// How a head guesses, and from what: `eagle, from states before layers 2, 15, 27; knows 9000 of 49152 tokens`.
pub(super) fn head(head: &Head, spec: &ModelSpec) -> String {
    let from = match &head.states {
        States::Normed => "the state behind the final norm".to_string(),
        States::Before { layers } => {
            let layers = layers.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
            format!("states before layers {layers}")
        }
    };
    let mut parts = vec![format!("{}, from {from} of width {}", head.method(), head.model_hidden)];
    match head.kind {
        HeadKind::Medusa { guesses, .. } => parts.push(format!("{guesses} tokens at once")),
        HeadKind::Block { size, .. } => parts.push(format!("{} tokens at once", size.saturating_sub(1))),
        _ => {}
    }
    let (known, all) = (spec.vocab, head.model_vocab);
    parts.push(if head.mapped { format!("knows {known} of {all} tokens") } else { format!("knows all {all} tokens") });
    match (head.shared_embed, head.shared_head) {
        (true, true) => parts.push("embedding and head are the model's".into()),
        (true, false) => parts.push("the embedding is the model's".into()),
        (false, true) => parts.push("the head is the model's".into()),
        (false, false) => {}
    }
    parts.join("; ")
}

/// What a layer's attention has.
struct Has<'a> {
    rope: Option<&'a Rope>,
    window: Option<usize>,
    cap: Option<f32>,
    sinks: bool,
    qk_norm: bool,
    qkv_bias: bool,
    o_bias: bool,
    ordered: bool,
}

fn of(layer: &Layer) -> Has<'_> {
    let Attn::Gqa { ref rope, window, cap, sinks, ref qk_norm, qkv_bias, o_bias, attn_order, o_order, .. } = layer.attn;
    let (rope, qk_norm) = (rope.as_ref(), qk_norm.is_some());
    Has { rope, window, cap, sinks, qk_norm, qkv_bias, o_bias, ordered: attn_order || o_order }
}

/// Every distinct answer, in order; with a count where not all layers give it.
fn kinds(spec: &ModelSpec, of: impl Fn(&Layer) -> Option<String>) -> Vec<String> {
    let mut all: Vec<(String, usize)> = vec![];
    for kind in spec.layers.iter().filter_map(of) {
        match all.iter_mut().find(|k| k.0 == kind) {
            Some(known) => known.1 += 1,
            None => all.push((kind, 1)),
        }
    }
    let layers = spec.layers.len();
    let text = |(kind, count)| if count == layers { kind } else { format!("{kind} in {count} of {layers} layers") };
    all.into_iter().map(text).collect()
}

fn biases(of: &[(bool, &str)]) -> Option<String> {
    let names: Vec<&str> = of.iter().filter(|b| b.0).map(|b| b.1).collect();
    (!names.is_empty()).then(|| format!("biases of {}", names.join(", ")))
}

fn rope(rope: &Rope) -> String {
    let change = match rope.scaling {
        RopeScaling::None => String::new(),
        RopeScaling::Linear { factor } => format!(", linear by {factor}"),
        RopeScaling::Llama3 { factor, original_context, .. } => {
            format!(", llama3 by {factor} from {original_context} tokens")
        }
        RopeScaling::Yarn { factor, original_context, .. } => {
            format!(", YaRN by {factor} from {original_context} tokens")
        }
    };
    format!("rope {}{change}", rope.theta)
}

#[cfg(test)]
mod tests {
    use quern_models::family;
    use serde_json::{Value, json};

    use super::*;

    fn lines(config: Value) -> (String, String) {
        let spec = family::plan(&config, &()).expect("a config of a known family").spec;
        (attention(&spec), mlp(&spec))
    }

    #[test]
    fn layers_that_differ_are_counted() {
        let smollm3 = lines(json!({
            "model_type": "smollm3", "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96,
            "num_hidden_layers": 4, "vocab_size": 320, "attention_bias": true, "use_sliding_window": true,
            "sliding_window": 16, "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
        }));
        let attention = "rope 2000000, YaRN by 2 from 64 tokens in 3 of 4 layers; window 16 in 1 of 4 layers; RMS norms; \
                         biases of q, k, v, o";
        assert_eq!(smollm3, (attention.into(), "gated, silu".into()));
        let gemma2 = lines(json!({
            "model_type": "gemma2", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 320, "head_dim": 16,
        }));
        let attention = "rope 10000; window 4096 in 1 of 2 layers; scores capped at 50; RMS norms; norm behind";
        assert_eq!(gemma2, (attention.into(), "gated, gelu (tanh), norm behind".into()));
        let gpt2 = lines(json!({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 320}));
        let attention = "1024 learned positions; layer norms; biases of q, k, v, o";
        assert_eq!(gpt2, (attention.into(), "plain, gelu (tanh), biases".into()));
    }
}
