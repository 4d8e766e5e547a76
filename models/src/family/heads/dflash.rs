//! DFlash, as z-lab stores it: Qwen3's layers over what the model's states fuse to, which guess a block at once.
//!
//! `target_layer_ids` means what layers output. Reference: z-lab/dflash `dflash/model.py` (also the usual layers);
//! vLLM `qwen3_dflash.py`.

use serde_json::Value;

use super::{Config, FamilyError, FamilyPlan, Reader, Tensors, layers_before};
use crate::spec::{HeadKind, ModelSpec, States};

pub(super) fn plan(config: &Value, tensors: &dyn Tensors, model: &ModelSpec) -> Result<FamilyPlan, FamilyError> {
    let config = Config::new(config, "")?;
    let own = config.get("dflash_config");
    let empty = Value::Object(Default::default());
    let own = Config::new(own.unwrap_or(&empty), "dflash_config.")?;
    for key in ["causal", "use_swa"] {
        if own.bool_or(key, false)? {
            return Err(own.unsupported(key, "false", true));
        }
    }
    let mut head = Reader::new(&config, tensors, model, "layers.0", 1e6)?;
    head.same_width(&config)?;
    let layers = super::super::decoder::layers(&config, "num_hidden_layers")?;
    let states = match own.get("target_layer_ids") {
        Some(list) => layers_before(&own, "target_layer_ids", list, 1, model)?,
        None => {
            let list = usual(model.layers.len(), layers).into();
            layers_before(&own, "target_layer_ids (not given, so the usual ones)", &list, 1, model)?
        }
    };
    let states = States::Before { layers: states };
    let (hidden, norm) = (head.hidden, head.norm());
    head.linear("fuse", "fc", hidden, states.count() * model.hidden, false);
    head.vector("state_norm", "hidden_norm", hidden);
    for i in 0..layers {
        head.layer(&format!("layers.{i}"), hidden, Some("input_layernorm"));
    }
    head.vector("norm", "norm", hidden);
    let size = config.size("block_size")?;
    let mask = own.get("mask_token_id").and_then(Value::as_u64).and_then(|id| u32::try_from(id).ok());
    let mask = mask.ok_or_else(|| own.wrong("mask_token_id", "a token", own.get("mask_token_id")))?;
    let kind = HeadKind::Block { size, mask, state_norm: norm.clone() };
    let ends = head.ends(&config, &config)?;
    let mut plan = head.plan(ends, "dflash", norm, states, kind);
    for key in ["num_target_layers", "max_window_layers", "swa_window_size"] {
        config.get(key);
        own.get(key);
    }
    plan.warnings = [config.finish()?, own.finish()?].concat();
    Ok(plan)
}

/// The model's layers that as many layers of a head read where none are named: from the second to the third last, evenly.
fn usual(model: usize, layers: usize) -> Vec<usize> {
    if layers <= 1 {
        return vec![model / 2];
    }
    let span = model.saturating_sub(4) as f64;
    (0..layers).map(|i| (1.0 + i as f64 * span / (layers - 1) as f64).round_ties_even() as usize).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_spread_evenly() {
        assert_eq!(usual(36, 5), [1, 9, 17, 25, 33]);
        assert_eq!(usual(36, 1), [18]);
    }
}
