//! GPT-Neo: scores are not scaled, and some layers see a window only.
//!
//! Reference: transformers `modeling_gpt_neo.py`.

use serde_json::{Value, json};

use super::{Config, FamilyError, FamilyPlan, RuleKind, Tensors, decoder, gpt::Gpt};
use crate::spec::{Act, Attn, MAX_LAYERS};

pub(super) fn plan(config: &Config, tensors: &dyn Tensors) -> Result<FamilyPlan, FamilyError> {
    let hidden = config.size("hidden_size")?;
    let inner = config.size_or("intermediate_size", Some(4 * hidden))?;
    let context = config.size_or("max_position_embeddings", Some(2048))?;
    let mut gpt = Gpt::new(tensors, hidden, config.size("num_heads")?, inner, context);
    let head_dim = gpt.head_dim()?;
    let window = config.size_or("window_size", Some(256))?;
    let act = config.act("activation_function", Act::GeluTanh)?;
    let eps = config.float_or("layer_norm_epsilon", 1e-5)?;
    for local in locals(config)? {
        for name in ["q", "k", "v"] {
            let module = format!("attn.attention.{name}_proj");
            gpt.rule(name, &module, RuleKind::Linear { n: hidden, k: hidden }, None);
        }
        gpt.linear("o", "attn.attention.out_proj", hidden, hidden, None);
        let attn = Attn::Gqa {
            heads: gpt.heads,
            kv_heads: gpt.heads,
            head_dim,
            scale: 1.0,
            rope: None,
            window: local.then_some(window),
            cap: None,
            sinks: false,
            qk_norm: None,
            qkv_bias: false,
            o_bias: true,
            attn_order: false,
            o_order: false,
        };
        gpt.layer(attn, act, eps);
    }
    gpt.plan(config, tensors, "gpt_neo")
}

/// Which layers are local: `attention_types` repeats lists of names, and must give as many as there are layers.
fn locals(config: &Config) -> Result<Vec<bool>, FamilyError> {
    let layers = decoder::layers(config, "num_layers")?;
    let usual = json!([[["global", "local"], 12]]);
    let value = config.get("attention_types").unwrap_or(&usual);
    // Some files have the expanded list as well; it is made from the other.
    config.get("attention_layers");
    let wrong =
        || config.wrong("attention_types", &format!("lists of global and local for {layers} layers"), Some(value));
    let mut all = vec![];
    for item in value.as_array().ok_or_else(wrong)? {
        let names = item.get(0).and_then(Value::as_array).ok_or_else(wrong)?;
        let times = item.get(1).and_then(Value::as_u64).filter(|&n| n <= MAX_LAYERS as u64).ok_or_else(wrong)?;
        for _ in 0..times {
            for name in names {
                all.push(match name.as_str() {
                    Some("global") => false,
                    Some("local") => true,
                    _ => return Err(wrong()),
                });
            }
            if all.len() > layers {
                return Err(wrong());
            }
        }
    }
    if all.len() == layers { Ok(all) } else { Err(wrong()) }
}

/// What a `text_config` may leave out.
pub(super) const DEFAULTS: &str = r#"{"hidden_size": 2048, "num_layers": 24, "num_heads": 16, "vocab_size": 50257}"#;
