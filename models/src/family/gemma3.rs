//! Gemma 3: Gemma 2 with norms of the heads of q and k instead of soft caps, five layers with a window to one without,
//! and a rope of its own for those.
//!
//! Reference: transformers `modeling_gemma3.py`.

use super::{
    Config, FamilyError, FamilyPlan, Tensors,
    decoder::{Decoder, Usual},
    gemma2,
};

pub(super) fn plan(config: &Config, tensors: &dyn Tensors) -> Result<FamilyPlan, FamilyError> {
    let local_theta = Some(10000.0);
    let usual = Usual { theta: 1e6, local_theta, context: 131072, head_dim: Some(256), tied: true };
    let mut model = Decoder::read(config, tensors, usual)?;
    gemma2::common(&mut model, config)?;
    model.qk_norm = true;
    let key = ["sliding_window_pattern", "_sliding_window_pattern"].into_iter().find(|key| config.get(key).is_some());
    let pattern = key.map_or(Ok(6), |key| config.size(key))?;
    model.alternating(config, |i| (i + 1) % pattern != 0)?;
    model.cap = config.float_or_none("attn_logit_softcapping", None)?;
    model.logit_cap = config.float_or_none("final_logit_softcapping", None)?;
    model.plan(config, "gemma3")
}

/// What a `text_config` may leave out.
pub(super) const DEFAULTS: &str = r#"{"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208}"#;
