//! Mistral 7B and its relatives: llama in which every layer may see a window only.
//!
//! Reference: transformers `modeling_mistral.py`.

use super::{
    Config, FamilyError, FamilyPlan, Tensors,
    decoder::{Decoder, Usual},
};

pub(super) fn plan(config: &Config, tensors: &dyn Tensors) -> Result<FamilyPlan, FamilyError> {
    let usual = Usual { theta: 10000.0, local_theta: None, context: 4096 * 32, head_dim: None, tied: false };
    let mut model = Decoder::read(config, tensors, usual)?;
    // `null` is no window; where the key is missing, transformers assumes the first model's.
    let window = match config.has("sliding_window") {
        true => config.get("sliding_window").map(|_| config.size("sliding_window")).transpose()?,
        false => Some(4096),
    };
    model.windows.fill(window);
    model.plan(config, "mistral")
}

/// What a `text_config` may leave out.
pub(super) const DEFAULTS: &str = r#"{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000}"#;
