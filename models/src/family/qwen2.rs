//! Qwen2 and Qwen2.5: llama with biases of q, k and v, and windows in the upper layers if asked.
//!
//! The text parts of Qwen2-VL and its successors are the same: their rope in three sections turns text, whose
//! sections all have one position, as the plain one does.
//!
//! Reference: transformers `modeling_qwen2.py`.

use super::{
    Config, FamilyError, FamilyPlan, Tensors,
    decoder::{Decoder, Usual},
};

pub(super) fn plan(config: &Config, tensors: &dyn Tensors) -> Result<FamilyPlan, FamilyError> {
    named(config, tensors, "qwen2")
}

/// The plan of a model that is Qwen2 but for its name.
pub(super) fn named(config: &Config, tensors: &dyn Tensors, family: &str) -> Result<FamilyPlan, FamilyError> {
    let usual = Usual { theta: 10000.0, local_theta: None, context: 32768, head_dim: None, tied: false };
    let mut model = Decoder::read(config, tensors, usual)?;
    model.qkv_bias = true;
    let first = config.whole_or("max_window_layers", 28)?;
    model.sliding(config, |i| i >= first)?;
    model.plan(config, family)
}

/// What a `text_config` may leave out.
pub(super) const DEFAULTS: &str = r#"{"hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "vocab_size": 151936}"#;
