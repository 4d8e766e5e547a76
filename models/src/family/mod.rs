//! Families: from a Hugging Face `config.json` to a spec and the tensors to take.
//!
//! A family is a table row and one file. Its rules name every source module exactly once; what a
//! checkpoint holds beyond them is an error in the converter, and so is what it lacks.

mod config;
mod llama;

pub use config::{Config, FamilyError};

use crate::spec::ModelSpec;

/// A family: the `model_type`s it reads and how.
struct Family {
    model_types: &'static [&'static str],
    plan: fn(&Config) -> Result<FamilyPlan, FamilyError>,
}

/// Every family this version reads.
const FAMILIES: &[Family] = &[Family { model_types: &["llama"], plan: llama::plan }];

/// What a checkpoint becomes.
#[derive(Debug, Clone)]
pub struct FamilyPlan {
    /// The model as data. `tied_head` holds what the config says; the converter decides by presence.
    pub spec: ModelSpec,
    /// Source modules, in the order in which their tensors are written.
    pub rules: Vec<Rule>,
    /// Endings of source tensor names that carry nothing (buffers saved by mistake).
    pub ignore: &'static [&'static str],
    /// Things the user should know: config keys that were not understood.
    pub warnings: Vec<String>,
}

/// One source module becomes one tensor of ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// Our name.
    pub target: String,
    /// Module name in the source, without `.weight`.
    pub source: String,
    /// Shape and kind.
    pub kind: RuleKind,
}

/// What a module is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuleKind {
    /// A matrix `[n, k]` that multiplies activations; quantized or float.
    Linear {
        /// Outputs.
        n: usize,
        /// Inputs.
        k: usize,
    },
    /// A vector, always float.
    Vector {
        /// Elements.
        n: usize,
    },
    /// A table `[n, k]` of which rows are taken.
    Embedding {
        /// Rows.
        n: usize,
        /// Columns.
        k: usize,
    },
    /// The output head `[n, k]`: may be absent when tied to the embedding.
    Head {
        /// Rows.
        n: usize,
        /// Columns.
        k: usize,
    },
}

impl FamilyPlan {
    /// Says whether the head is the embedding; drops the head's rule if so.
    pub fn set_tied(&mut self, tied: bool) {
        self.spec.tied_head = tied;
        if tied {
            self.rules.retain(|r| !matches!(r.kind, RuleKind::Head { .. }));
        }
    }
}

/// Reads a `config.json` of any known family.
pub fn plan(config: &serde_json::Value) -> Result<FamilyPlan, FamilyError> {
    let config = Config::new(config)?;
    let model_type = config.str("model_type")?;
    let known = || FAMILIES.iter().flat_map(|f| f.model_types).copied().collect::<Vec<_>>().join(", ");
    let family = FAMILIES.iter().find(|f| f.model_types.contains(&model_type));
    let family = family.ok_or_else(|| FamilyError::ModelType { got: model_type.into(), known: known() })?;
    let plan = (family.plan)(&config)?;
    plan.spec.check().map_err(|e| FamilyError::Spec(e.to_string()))?;
    Ok(plan)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::spec::{Attn, RopeScaling};

    fn config(change: Value) -> Value {
        let mut config = json!({
            "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 320, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 256, "rope_theta": 500000.0, "tie_word_embeddings": true,
        });
        for (key, value) in change.as_object().into_iter().flatten() {
            config[key] = value.clone();
        }
        config
    }

    fn rope(change: Value) -> crate::spec::Rope {
        let Attn::Gqa { rope, .. } = plan(&config(change)).unwrap().spec.layers.remove(0).attn;
        rope.unwrap()
    }

    #[test]
    fn rules_and_spec_name_the_same_tensors() {
        for tied in [true, false] {
            let mut plan = plan(&config(json!({}))).unwrap();
            assert!(plan.spec.tied_head && plan.warnings.is_empty());
            plan.set_tied(tied);
            let mut rules: Vec<_> = plan.rules.iter().map(|r| r.target.clone()).collect();
            let mut needed: Vec<_> = plan.spec.tensors().into_iter().map(|t| t.name).collect();
            rules.sort();
            needed.sort();
            assert_eq!(rules, needed);
        }
    }

    #[test]
    fn rope_is_read_in_the_old_and_the_new_way() {
        assert_eq!(rope(json!({})), crate::spec::Rope { theta: 500000.0, scaling: RopeScaling::None });
        let new = json!({"rope_theta": null, "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}});
        assert_eq!(rope(new).theta, 20000.0);
        let linear = rope(json!({"rope_scaling": {"type": "linear", "factor": 4}}));
        assert_eq!(linear.scaling, RopeScaling::Linear { factor: 4.0 });
        let llama3 = json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}});
        assert!(matches!(rope(llama3).scaling, RopeScaling::Llama3 { original_context: 8192, .. }));
    }

    #[test]
    fn what_would_change_the_mathematics_is_refused_by_name() {
        for (change, words) in [
            (json!({"model_type": "mamba"}), "model_type \"mamba\""),
            (json!({"attention_bias": true}), "attention_bias is true"),
            (json!({"hidden_act": "gelu"}), "hidden_act"),
            (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor is 0.5"),
            (json!({"rope_scaling": {"type": "yarn", "factor": 2}}), "rope_type"),
            (json!({"rope_scaling": {"type": "linear"}}), "rope_scaling.factor"),
            (json!({"rope_scaling": {"type": "linear", "factor": 0}}), "must be finite and positive"),
            (json!({"rope_scaling": {"rope_type": 3}}), "rope_type: expected a string"),
            (json!({"rms_norm_eps": -1.0}), "eps is -1"),
            (json!({"rms_norm_eps": 1e39}), "rms_norm_eps: expected a number that fits 32 bits"),
            (json!({"rope_scaling": {"factor": 8.0}}), "rope_type: expected a string"),
            (json!({"rope_scaling": {"rope_type": null, "type": "dynamic"}}), "dynamic"),
            (json!({"rope_scaling": "linear"}), "rope_scaling: expected an object"),
            (json!({"hidden_size": "64"}), "hidden_size"),
            (json!({"num_hidden_layers": 1_000_000_000}), "num_hidden_layers"),
            (json!({"num_key_value_heads": 3}), "kv_heads"),
            (json!({"head_dim": 7}), "head_dim"),
        ] {
            let error = plan(&config(change)).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        assert!(plan(&json!([])).is_err());
        let plan = plan(&config(json!({"mlp_bias": false, "brand_new_key": 3}))).unwrap();
        assert!(plan.warnings.len() == 1 && plan.warnings[0].contains("brand_new_key"));
    }
}
