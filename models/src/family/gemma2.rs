//! Gemma 2: norms before and behind both halves of a layer, soft caps of scores and logits, windows in every other
//! layer, scaled embeddings.
//!
//! Norms multiply by one plus their weights. The factor on embeddings is the root of the width in f32, as transformers
//! has it in f32 (in bf16 it rounds it to bf16).
//!
//! Reference: transformers `modeling_gemma2.py`.

use super::{
    Config, FamilyError, FamilyPlan, Tensors,
    decoder::{Decoder, Usual},
};
use crate::spec::Act;

pub(super) fn plan(config: &Config, tensors: &dyn Tensors) -> Result<FamilyPlan, FamilyError> {
    let usual = Usual { theta: 10000.0, local_theta: None, context: 8192, head_dim: Some(256), tied: true };
    let mut model = Decoder::read(config, tensors, usual)?;
    common(&mut model, config)?;
    model.alternating(config, |i| i % 2 == 0)?;
    model.cap = config.float_or_none("attn_logit_softcapping", Some(50.0))?;
    model.logit_cap = config.float_or_none("final_logit_softcapping", Some(30.0))?;
    model.plan(config, "gemma2")
}

/// What Gemma 2 and 3 have alike.
pub(super) fn common(model: &mut Decoder, config: &Config) -> Result<(), FamilyError> {
    (model.post_norms, model.one_plus) = (true, true);
    model.attention_bias(config)?;
    model.sizes.act = config.act("hidden_activation", Act::GeluTanh)?;
    model.sizes.scale = (config.float_or("query_pre_attn_scalar", 256.0)? as f64).powf(-0.5) as f32;
    model.embed_scale = Some((model.sizes.hidden as f64).sqrt() as f32);
    Ok(())
}

/// What a `text_config` may leave out.
pub(super) const DEFAULTS: &str = r#"{"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 256000}"#;
