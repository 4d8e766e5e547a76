//! Llama and everything that keeps its architecture: SmolLM2, TinyLlama, Yi, ...
//!
//! Reference: transformers `modeling_llama.py`.

use super::{Config, FamilyError, FamilyPlan, Rule, RuleKind};
use crate::spec::{Act, Attn, Layer, MAX_LAYERS, Mlp, ModelSpec, Norm};

pub(super) fn plan(config: &Config) -> Result<FamilyPlan, FamilyError> {
    let hidden = config.size("hidden_size")?;
    let heads = config.size("num_attention_heads")?;
    let kv_heads = config.size_or("num_key_value_heads", Some(heads))?;
    let head_dim = config.size_or("head_dim", Some(hidden / heads))?;
    let inner = config.size("intermediate_size")?;
    let layers = config.size("num_hidden_layers")?;
    if layers > MAX_LAYERS {
        return Err(FamilyError::Spec(format!("num_hidden_layers is {layers}, expected at most {MAX_LAYERS}")));
    }
    let vocab = config.size("vocab_size")?;
    let act = match config.get("hidden_act").map_or(Ok("silu"), |_| config.str("hidden_act"))? {
        "silu" | "swish" => Act::Silu,
        other => {
            let (key, expected, got) = ("hidden_act".into(), "silu".into(), format!("{other:?}"));
            return Err(FamilyError::Unsupported { key, expected, got });
        }
    };
    let norm = Norm::Rms { eps: config.float_or("rms_norm_eps", 1e-6)? };
    let layer = Layer {
        attn_norm: norm.clone(),
        attn: Attn::Gqa {
            heads,
            kv_heads,
            head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            rope: Some(config.rope()?),
            window: None,
            qk_norm: None,
            qkv_bias: false,
            o_bias: false,
            attn_order: false,
            o_order: false,
        },
        mlp_norm: norm.clone(),
        mlp: Mlp::Gated { inner, act, bias: false, mlp_order: false },
    };
    let spec = ModelSpec {
        family: "llama".into(),
        vocab,
        hidden,
        max_context: config.size_or("max_position_embeddings", Some(2048))?,
        layers: vec![layer; layers],
        norm,
        head_order: false,
        positions: None,
        tied_head: config.bool_or("tie_word_embeddings", false)?,
    };
    let warnings = config.finish()?;

    let (q, kv) = (heads * head_dim, kv_heads * head_dim);
    let mut rules = vec![];
    let mut rule = |target: String, source: String, kind| rules.push(Rule { target, source, kind });
    rule("embed".into(), "model.embed_tokens".into(), RuleKind::Embedding { n: vocab, k: hidden });
    for i in 0..spec.layers.len() {
        let (to, from) = (format!("layers.{i}"), format!("model.layers.{i}"));
        let mut linear = |name: &str, module: &str, n, k| {
            rule(format!("{to}.{name}"), format!("{from}.{module}"), RuleKind::Linear { n, k });
        };
        linear("q", "self_attn.q_proj", q, hidden);
        linear("k", "self_attn.k_proj", kv, hidden);
        linear("v", "self_attn.v_proj", kv, hidden);
        linear("o", "self_attn.o_proj", hidden, q);
        linear("gate", "mlp.gate_proj", inner, hidden);
        linear("up", "mlp.up_proj", inner, hidden);
        linear("down", "mlp.down_proj", hidden, inner);
        rule(format!("{to}.attn_norm"), format!("{from}.input_layernorm"), RuleKind::Vector { n: hidden });
        rule(format!("{to}.mlp_norm"), format!("{from}.post_attention_layernorm"), RuleKind::Vector { n: hidden });
    }
    rule("norm".into(), "model.norm".into(), RuleKind::Vector { n: hidden });
    rule("head".into(), "lm_head".into(), RuleKind::Head { n: vocab, k: hidden });
    Ok(FamilyPlan { spec, rules, ignore: &["rotary_emb.inv_freq"], warnings })
}
