//! Qwen3-MoE (Qwen3-30B-A3B, ...): Qwen3 with a mixture of experts in all layers but some.
//!
//! Reference: transformers `modeling_qwen3_moe.py`: layer `i` is a mixture unless `mlp_only_layers` has it or `i + 1` is
//! no multiple of `decoder_sparse_step`.

use super::{
    Config, FamilyError, FamilyPlan, Tensors,
    decoder::{Decoder, Usual},
    layer::Experts,
};

pub(super) fn plan(config: &Config, tensors: &dyn Tensors) -> Result<FamilyPlan, FamilyError> {
    let usual = Usual { theta: 10000.0, context: 32768, head_dim: None, tied: false, local_theta: None };
    let mut model = Decoder::read(config, tensors, usual)?;
    model.qk_norm = true;
    model.attention_bias(config)?;
    // Unlike Qwen3's, every layer slides if any does.
    if config.bool_or("use_sliding_window", false)? {
        let window = config.size_or("sliding_window", Some(4096))?;
        model.windows.fill(Some(window));
    } else {
        config.get("sliding_window");
    }
    config.get("max_window_layers");
    let layers = model.windows.len();
    let dense = config.wholes("mlp_only_layers")?;
    let step = config.size_or("decoder_sparse_step", Some(1))?;
    // Older checkpoints call them num_experts.
    let key = if config.has("num_experts") { "num_experts" } else { "num_local_experts" };
    let count = config.whole_or(key, 128)?;
    let mixed: Vec<bool> = (0..layers).map(|i| count > 0 && !dense.contains(&i) && (i + 1) % step == 0).collect();
    if mixed.contains(&true) {
        let experts = Experts {
            count,
            top: config.size_or("num_experts_per_tok", Some(8))?,
            inner: config.size_or("moe_intermediate_size", Some(768))?,
            normalized: config.bool_or("norm_topk_prob", false)?,
            router: "mlp.gate",
            each: "mlp.experts",
            names: ["gate_proj", "up_proj", "down_proj"],
        };
        model.experts = Some((experts, mixed));
    }
    model.plan(config, "qwen3_moe")
}

/// What a `text_config` may leave out.
pub(super) const DEFAULTS: &str = r#"{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936}"#;
