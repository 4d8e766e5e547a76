//! Mixtral: Mistral with a mixture of experts in every layer.
//!
//! Reference: transformers `modeling_mixtral.py`. Weights of the picked experts are a softmax over them; checkpoints name
//! an expert's gate, down and up `w1`, `w2` and `w3`.

use super::{
    Config, FamilyError, FamilyPlan, Tensors,
    decoder::{Decoder, Usual},
    layer::Experts,
};

pub(super) fn plan(config: &Config, tensors: &dyn Tensors) -> Result<FamilyPlan, FamilyError> {
    let usual = Usual { theta: 1e6, context: 4096 * 32, head_dim: None, tied: false, local_theta: None };
    let mut model = Decoder::read(config, tensors, usual)?;
    // Here a missing window is none.
    let window = config.get("sliding_window").map(|_| config.size("sliding_window")).transpose()?;
    model.windows.fill(window);
    let experts = Experts {
        count: config.size_or("num_local_experts", Some(8))?,
        top: config.size_or("num_experts_per_tok", Some(2))?,
        inner: model.inner(),
        normalized: true,
        router: "block_sparse_moe.gate",
        each: "block_sparse_moe.experts",
        names: ["w1", "w3", "w2"],
    };
    let layers = model.windows.len();
    model.experts = Some((experts, vec![true; layers]));
    model.plan(config, "mixtral")
}

/// What a `text_config` may leave out.
pub(super) const DEFAULTS: &str = r#"{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000}"#;
