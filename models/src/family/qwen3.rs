//! Qwen3: llama with norms of the heads of q and k, and windows in the upper layers if asked.
//!
//! The text part of Qwen3-VL is the same (see [`super::qwen2`] on its rope).
//!
//! Reference: transformers `modeling_qwen3.py`.

use super::{
    Config, FamilyError, FamilyPlan, Tensors,
    decoder::{Decoder, Usual},
};

pub(super) fn plan(config: &Config, tensors: &dyn Tensors) -> Result<FamilyPlan, FamilyError> {
    let usual = Usual { theta: 10000.0, local_theta: None, context: 32768, head_dim: Some(128), tied: false };
    let mut model = Decoder::read(config, tensors, usual)?;
    model.qk_norm = true;
    model.attention_bias(config)?;
    let first = config.whole_or("max_window_layers", 28)?;
    model.sliding(config, |i| i >= first)?;
    model.plan(config, "qwen3")
}

/// What a `text_config` may leave out.
pub(super) const DEFAULTS: &str = r#"{"hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "vocab_size": 151936}"#;
