//! GPT-2: linear layers stored as `Conv1D` (inputs first), q, k and v in one of them.
//!
//! Reference: transformers `modeling_gpt2.py`.

use super::{Config, FamilyError, FamilyPlan, Tensors, decoder::layers, gpt::Gpt};
use crate::spec::{Act, Attn};

pub(super) fn plan(config: &Config, tensors: &dyn Tensors) -> Result<FamilyPlan, FamilyError> {
    let hidden = config.size("n_embd")?;
    let inner = config.size_or("n_inner", Some(4 * hidden))?;
    let context = config.size_or("n_positions", Some(1024))?;
    let mut gpt = Gpt::new(tensors, hidden, config.size("n_head")?, inner, context);
    gpt.transposed = true;
    let head_dim = gpt.head_dim()?;
    let scaled = config.bool_or("scale_attn_weights", true)?;
    let by_layer = config.bool_or("scale_attn_by_inverse_layer_idx", false)?;
    let act = config.act("activation_function", Act::GeluTanh)?;
    let eps = config.float_or("layer_norm_epsilon", 1e-5)?;
    for i in 0..layers(config, "n_layer")? {
        for (part, name) in ["q", "k", "v"].into_iter().enumerate() {
            gpt.linear(name, "attn.c_attn", hidden, hidden, Some((part * hidden, 3 * hidden)));
        }
        gpt.linear("o", "attn.c_proj", hidden, hidden, None);
        let scale = if scaled { 1.0 / (head_dim as f32).sqrt() } else { 1.0 };
        let attn = Attn::Gqa {
            heads: gpt.heads,
            kv_heads: gpt.heads,
            head_dim,
            scale: if by_layer { scale / (i + 1) as f32 } else { scale },
            rope: None,
            window: None,
            cap: None,
            sinks: false,
            qk_norm: None,
            qkv_bias: true,
            o_bias: true,
            attn_order: false,
            o_order: false,
        };
        gpt.layer(attn, act, eps);
    }
    gpt.plan(config, tensors, "gpt2")
}

/// What a `text_config` may leave out.
pub(super) const DEFAULTS: &str = r#"{"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}"#;
