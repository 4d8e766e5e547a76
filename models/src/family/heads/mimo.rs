//! MiMo: Qwen2 with a layer behind the last that predicts one token further (multi-token prediction).
//!
//! Reference: vLLM `mimo.py`, `mimo_mtp.py`; the states are those before the final norm, and what the next pass reads
//! is behind the layer's own.

use serde_json::Value;

use super::{Config, Ends, FamilyError, FamilyPlan, Reader, Tensors, module_base};
use crate::{
    family::qwen2,
    spec::{HeadKind, JoinedMethod, ModelSpec, States},
};

/// The model, with its head where the checkpoint has one.
pub(in crate::family) fn plan(config: &Config, tensors: &dyn Tensors) -> Result<FamilyPlan, FamilyError> {
    let said = config.whole_or("num_nextn_predict_layers", 0)?;
    // Of q, k and v, as in Qwen2, which does not ask.
    config.get("attention_bias");
    let mut plan = qwen2::named(config, tensors, "mimo")?;
    if tensors.names().any(|name| module_base(name, LAYER).is_some()) {
        let mut head = read(config, tensors, &plan.spec)?;
        plan.warnings.append(&mut head.warnings);
        plan.head = Some(Box::new(head));
    } else if said > 0 {
        plan.warnings.push(format!(
            "config.json: num_nextn_predict_layers is {said}, but there is none: the file guesses without them; --head \
             takes them from another copy of the model"
        ));
    }
    Ok(plan)
}

/// The module that shows that there is a prediction layer.
const LAYER: &str = "mtp_layers.0.input_proj";

/// The head alone, of a checkpoint that may have the model, too.
pub(super) fn head(config: &Value, tensors: &dyn Tensors, model: &ModelSpec) -> Result<FamilyPlan, FamilyError> {
    let config = Config::new(config, "")?;
    let plan = read(&config, tensors, model)?;
    if let Some(said) = config.get("vocab_size").filter(|said| said.as_u64() != Some(model.vocab as u64)) {
        let expected = format!("{} tokens, as the model has that the head is for", model.vocab);
        return Err(config.wrong("vocab_size", &expected, Some(said)));
    }
    Ok(plan)
}

fn read(config: &Config, tensors: &dyn Tensors, model: &ModelSpec) -> Result<FamilyPlan, FamilyError> {
    let mut head = Reader::new(config, tensors, model, "mtp_layers.0", 10000.0)?;
    head.same_width(config)?;
    let (hidden, norm) = (head.hidden, head.norm());
    head.linear("project", "mtp_layers.0.input_proj", hidden, 2 * hidden, false);
    head.vector("embed_norm", "mtp_layers.0.token_layernorm", hidden);
    head.vector("state_norm", "mtp_layers.0.hidden_layernorm", hidden);
    head.layer("mtp_layers.0", hidden, Some("input_layernorm"));
    head.vector("norm", "mtp_layers.0.final_layernorm", hidden);
    let kind = HeadKind::Joined {
        method: JoinedMethod::Mtp,
        embed_norm: norm.clone(),
        state_norm: norm.clone(),
        state_first: true,
        bias: false,
        zero_first: true,
        normed: true,
    };
    let states = States::Before { layers: vec![model.layers.len()] };
    // Embedding and head are the model's, which lie in the same checkpoint.
    let ends = Ends { embed: None, head: None, mapped: false, vocab: model.vocab };
    let within = format!("{}mtp_layers.", head.base);
    Ok(FamilyPlan { within: Some(within), ..head.plan(ends, "mimo_mtp", norm, states, kind) })
}
