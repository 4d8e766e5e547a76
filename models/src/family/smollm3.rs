//! SmolLM3: llama in which every fourth layer has no rotary embedding.
//!
//! Reference: transformers `modeling_smollm3.py`.

use serde_json::Value;

use super::{
    Config, FamilyError, FamilyPlan, Tensors,
    decoder::{Decoder, Usual},
};

pub(super) fn plan(config: &Config, tensors: &dyn Tensors) -> Result<FamilyPlan, FamilyError> {
    let usual = Usual { theta: 2_000_000.0, local_theta: None, context: 32768, head_dim: None, tied: true };
    let mut model = Decoder::read(config, tensors, usual)?;
    model.attention_bias(config)?;
    model.mlp_bias = config.bool_or("mlp_bias", false)?;
    let layers = model.ropes.len();
    let interval = config.size_or("no_rope_layer_interval", Some(4))?;
    model.ropes = match config.get("no_rope_layers") {
        None => (1..=layers).map(|i| i % interval != 0).collect(),
        // Whatever its name says, 1 is a layer with rope.
        Some(value) => {
            let list = value.as_array().filter(|l| l.len() >= layers);
            let flag = |v: &Value| v.as_u64().filter(|&n| n <= 1).map(|n| n == 1).or(v.as_bool());
            let flags = list.and_then(|l| l[..layers].iter().map(flag).collect());
            flags.ok_or_else(|| {
                config.wrong("no_rope_layers", &format!("a list of {layers} zeros and ones"), Some(value))
            })?
        }
    };
    let ropes = model.ropes.clone();
    model.sliding(config, |i| !ropes[i])?;
    model.plan(config, "smollm3")
}

/// What a `text_config` may leave out.
pub(super) const DEFAULTS: &str = r#"{"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
    "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 128256}"#;
