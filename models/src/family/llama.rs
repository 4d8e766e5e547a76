//! Llama and everything that keeps its architecture: SmolLM2, TinyLlama, Yi, ...
//!
//! Reference: transformers `modeling_llama.py`.

use super::{
    Config, FamilyError, FamilyPlan, Tensors,
    decoder::{Decoder, Usual},
};

pub(super) fn plan(config: &Config, tensors: &dyn Tensors) -> Result<FamilyPlan, FamilyError> {
    let usual = Usual { theta: 10000.0, local_theta: None, context: 2048, head_dim: None, tied: false };
    let mut model = Decoder::read(config, tensors, usual)?;
    model.attention_bias(config)?;
    model.mlp_bias = config.bool_or("mlp_bias", false)?;
    model.plan(config, "llama")
}

/// What a `text_config` may leave out.
pub(super) const DEFAULTS: &str = r#"{"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "vocab_size": 32000}"#;
