//! EAGLE-3, as SafeAILab stores it (`midlayer.*`) and as speculators does (`layers.0.*`, `transformer_layer_config`).
//!
//! The head fuses states of three layers; q, k and v of its first layer read the embedding and the state side by
//! side, each behind a norm. Layers beyond the first are plain.
//!
//! A list of layers means the stream in front of them (vLLM's `llama_eagle3.py` and the models it takes states from;
//! speculators trains with vLLM's), but in `eagle_config` what they output (NVIDIA's and SGLang's
//! `set_eagle3_layers_to_capture`, which adds 1). Where there is none it is SafeAILab's: in front of layers 2, half of
//! all, and all but 3.

use serde_json::{Value, json};

use super::{Config, FamilyError, FamilyPlan, Reader, Tensors, layers_before};
use crate::spec::{HeadKind, ModelSpec, States};

pub(super) fn plan(config: &Value, tensors: &dyn Tensors, model: &ModelSpec) -> Result<FamilyPlan, FamilyError> {
    let outer = Config::new(config, "")?;
    let nested = outer.get("transformer_layer_config");
    let at = if nested.is_some() { "transformer_layer_config." } else { "" };
    let inner = Config::new(nested.unwrap_or(config), at)?;
    // Without nesting both are the same object, and only one says what it does not know.
    let layer = if nested.is_some() { &inner } else { &outer };
    let midlayer = tensors.names().any(|name| super::module_base(name, "midlayer.self_attn.q_proj").is_some());
    let first = if midlayer { "midlayer" } else { "layers.0" };
    let mut head = Reader::new(layer, tensors, model, first, 10000.0)?;
    let states = states(&outer, model)?;
    for key in ["norm_before_fc", "fc_norm"] {
        if outer.bool_or(key, false)? {
            return Err(outer.unsupported(key, "false", true));
        }
    }
    if let Some(width) = outer.get("target_hidden_size").filter(|w| w.as_u64() != Some(model.hidden as u64)) {
        let expected = format!("{}, the width of the model that the head is for", model.hidden);
        return Err(outer.wrong("target_hidden_size", &expected, Some(width)));
    }
    let (hidden, norm) = (head.hidden, head.norm());
    head.linear("fuse", "fc", hidden, states.count() * model.hidden, false);
    head.vector("embed_norm", &format!("{first}.input_layernorm"), hidden);
    head.vector("state_norm", &format!("{first}.hidden_norm"), hidden);
    head.layer(first, 2 * hidden, None);
    let layers = super::super::decoder::layers(layer, "num_hidden_layers")?;
    for i in 1..layers {
        head.layer(&format!("layers.{i}"), hidden, Some("input_layernorm"));
    }
    head.vector("norm", "norm", hidden);
    let kind = HeadKind::Wide {
        embed_norm: norm.clone(),
        state_norm: norm.clone(),
        normed_residual: outer.bool_or("norm_before_residual", false)?,
        normed: outer.bool_or("norm_output", false)?,
    };
    let ends = head.ends(layer, &outer)?;
    let mut plan = head.plan(ends, "eagle3", norm, states, kind);
    plan.warnings = layer.finish()?;
    if nested.is_some() {
        plan.warnings.extend(rest(&outer)?);
    }
    Ok(plan)
}

/// The states that it reads.
fn states(config: &Config, model: &ModelSpec) -> Result<States, FamilyError> {
    let key = "eagle_aux_hidden_state_layer_ids";
    let nvidia = config.get("eagle_config");
    if let Some(no) = nvidia.and_then(|c| c.get("use_aux_hidden_state")).filter(|v| **v == json!(false)) {
        return Err(config.unsupported("eagle_config.use_aux_hidden_state", "true", no));
    }
    let nvidia = nvidia.and_then(|c| c.get(key));
    let given = |list: &&Value| list.as_array().is_none_or(|l| !l.is_empty());
    let layers = match (config.get(key).filter(given), nvidia.filter(given)) {
        (Some(list), _) => layers_before(config, key, list, 0, model)?,
        (None, Some(list)) => layers_before(config, &format!("eagle_config.{key}"), list, 1, model)?,
        (None, None) => {
            let layers = model.layers.len();
            let usual = json!([2, layers / 2, layers.saturating_sub(3)]);
            layers_before(config, &format!("{key} (not given, so the usual ones)"), &usual, 0, model)?
        }
    };
    Ok(States::Before { layers })
}

/// What else a config of speculators says.
fn rest(outer: &Config) -> Result<Vec<String>, FamilyError> {
    for key in [
        "speculators_model_type",
        "speculators_config",
        "speculators_version",
        "has_no_defaults_at_init",
        "embed_requires_grad",
    ] {
        outer.get(key);
    }
    outer.finish()
}
