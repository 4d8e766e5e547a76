//! EAGLE 1 and 2, as SafeAILab stores them: `fc` over embedding and state, then llama's layers, of which the first has
//! no norm in front of it, and no norm before the model's head.
//!
//! Reference: SafeAILab/EAGLE `eagle/model/cnets1.py`; vLLM `llama_eagle.py`.

use serde_json::Value;

use super::{Config, FamilyError, FamilyPlan, Reader, Tensors};
use crate::spec::{HeadKind, JoinedMethod, ModelSpec, Norm, States};

pub(super) fn plan(config: &Value, tensors: &dyn Tensors, model: &ModelSpec) -> Result<FamilyPlan, FamilyError> {
    let config = Config::new(config, "")?;
    let mut head = Reader::new(&config, tensors, model, "layers.0", 10000.0)?;
    head.same_width(&config)?;
    let (hidden, bias) = (head.hidden, head.has("fc.bias"));
    head.linear("project", "fc", hidden, 2 * hidden, bias);
    for i in 0..super::super::decoder::layers(&config, "num_hidden_layers")? {
        let module = format!("layers.{i}");
        let normed = i > 0 || head.has("layers.0.input_layernorm.");
        head.layer(&module, hidden, normed.then_some("input_layernorm"));
    }
    let kind = HeadKind::Joined {
        method: JoinedMethod::Eagle,
        embed_norm: Norm::Identity,
        state_norm: Norm::Identity,
        state_first: false,
        bias,
        zero_first: false,
        normed: false,
    };
    let ends = head.ends(&config, &config)?;
    let mut plan = head.plan(ends, "eagle", Norm::Identity, States::Normed, kind);
    plan.warnings = config.finish()?;
    Ok(plan)
}
