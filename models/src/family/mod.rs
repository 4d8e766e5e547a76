//! Families: from a Hugging Face `config.json` to a spec and the tensors to take.
//!
//! A family is a table row and one file. Its rules name every source module exactly once; what a
//! checkpoint holds beyond them is an error in the converter, and so is what it lacks.

mod config;
mod decoder;
mod gemma2;
mod gemma3;
mod gpt;
mod gpt2;
mod gpt_neo;
mod heads;
mod layer;
mod llama;
mod mistral;
mod mixtral;
mod names;
mod qwen2;
mod qwen3;
mod qwen3_moe;
mod rope;
mod smollm3;

use serde_json::{Map, Value};

pub use config::{Config, FamilyError};
pub use heads::{HeadLayout, plan_head};
pub use names::Tensors;

use crate::spec::ModelSpec;

/// A family: the `model_type`s it reads and how.
struct Family {
    model_types: &'static [&'static str],
    /// What a nested config may leave out, as transformers' config class has it.
    defaults: &'static str,
    plan: fn(&Config, &dyn Tensors) -> Result<FamilyPlan, FamilyError>,
}

/// Every family this version reads.
const FAMILIES: &[Family] = &[
    Family { model_types: &["llama"], defaults: llama::DEFAULTS, plan: llama::plan },
    Family { model_types: &["mistral"], defaults: mistral::DEFAULTS, plan: mistral::plan },
    Family {
        model_types: &["qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_omni_text"],
        defaults: qwen2::DEFAULTS,
        plan: qwen2::plan,
    },
    Family { model_types: &["qwen3", "qwen3_vl_text"], defaults: qwen3::DEFAULTS, plan: qwen3::plan },
    Family { model_types: &["mixtral"], defaults: mixtral::DEFAULTS, plan: mixtral::plan },
    Family { model_types: &["qwen3_moe"], defaults: qwen3_moe::DEFAULTS, plan: qwen3_moe::plan },
    Family { model_types: &["mimo"], defaults: qwen2::DEFAULTS, plan: heads::mimo::plan },
    Family { model_types: &["smollm3"], defaults: smollm3::DEFAULTS, plan: smollm3::plan },
    Family { model_types: &["gemma2"], defaults: gemma2::DEFAULTS, plan: gemma2::plan },
    Family { model_types: &["gemma3_text"], defaults: gemma3::DEFAULTS, plan: gemma3::plan },
    Family { model_types: &["gpt2"], defaults: gpt2::DEFAULTS, plan: gpt2::plan },
    Family { model_types: &["gpt_neo"], defaults: gpt_neo::DEFAULTS, plan: gpt_neo::plan },
];

/// What a checkpoint becomes.
#[derive(Debug, Clone)]
pub struct FamilyPlan {
    /// The model as data. `tied_head` holds what the config says; the converter decides by presence.
    pub spec: ModelSpec,
    /// Source modules, in the order in which their tensors are written.
    pub rules: Vec<Rule>,
    /// Endings of source tensor names that carry nothing (buffers saved by mistake).
    pub ignore: &'static [&'static str],
    /// Parts of a multimodal checkpoint that are left out, as components of tensor names. Empty for a text model.
    pub others: &'static [&'static str],
    /// Only tensors whose names begin so are of the head; others are of a model beside it. `None`: all are.
    pub within: Option<String>,
    /// A head that the checkpoint has besides the model.
    pub head: Option<Box<FamilyPlan>>,
    /// Things the user should know: config keys that were not understood, sizes taken from the tensors.
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
    /// Which part of the module, and how it lies.
    pub take: Take,
}

/// How a module of the source holds what a rule wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Take {
    /// A float weight has its inputs first: `[k, n]`. Packed codes never do, nor do GGUF files.
    pub transposed: bool,
    /// First output, and all outputs of the module, if only some are wanted.
    pub part: Option<(usize, usize)>,
}

impl Take {
    /// The whole module as it lies.
    pub const WHOLE: Take = Take { transposed: false, part: None };
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
    /// A matrix `[n, k]` that picks experts: small, and a wrong pick is no small error, so it stays as it is.
    Router {
        /// Experts.
        n: usize,
        /// Inputs.
        k: usize,
    },
    /// The vector `1 + weight`, always f32; a GGUF file holds the sum already.
    OnePlus {
        /// Elements.
        n: usize,
    },
    /// The vector `.bias` of a module, always float.
    Bias {
        /// Elements.
        n: usize,
    },
    /// A table `[n, k]` of which rows are taken, never quantized: learned positions.
    Table {
        /// Rows.
        n: usize,
        /// Columns.
        k: usize,
    },
    /// A table `[n, k]` of which rows are taken.
    Embedding {
        /// Rows.
        n: usize,
        /// Columns.
        k: usize,
    },
    /// The model's token of each of a head's own: integers `[n]` in a tensor of the module's name alone, as distances
    /// from the head's token or as they are.
    Tokens {
        /// Tokens of the head.
        n: usize,
        /// Tokens of the model.
        known: usize,
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

/// Reads a `config.json` of any known family, with the tensors that it describes.
///
/// Of a multimodal model the text part is taken.
pub fn plan(config: &Value, tensors: &dyn Tensors) -> Result<FamilyPlan, FamilyError> {
    let outer = Config::new(config, "")?;
    let (text, at) = text_part(config);
    let wrapped = !at.is_empty() || WRAPS.iter().any(|key| outer.has(key));
    let key = format!("{at}model_type");
    let model_type = text.get("model_type");
    let model_type = model_type.and_then(Value::as_str).ok_or_else(|| outer.wrong(&key, "a string", model_type))?;
    // Its text model sees the whole prompt from each of its tokens.
    if config.get("model_type").and_then(Value::as_str) == Some("paligemma") {
        return Err(outer.unsupported("model_type", "models whose tokens see what is before them", "\"paligemma\""));
    }
    let family = FAMILIES.iter().find(|f| f.model_types.contains(&model_type));
    let family = family.ok_or_else(|| {
        let known = FAMILIES.iter().flat_map(|f| f.model_types).copied().collect::<Vec<_>>().join(", ");
        FamilyError::ModelType { key, got: model_type.into(), known }
    })?;
    let whole;
    let mut text = text;
    if !at.is_empty() {
        whole = completed(config, text, family.defaults);
        text = &whole;
    }
    let mut plan = (family.plan)(&Config::new(text, &at)?, tensors)?;
    if wrapped {
        plan.others = names::OTHER_PARTS;
        plan.warnings.retain(|w| !WRAPS.iter().any(|key| w.contains(&format!(": {key} is not known"))));
    }
    plan.spec.check().map_err(|e| FamilyError::Spec(e.to_string()))?;
    Ok(plan)
}

/// Keys of a flat config that has other parts than text.
const WRAPS: &[&str] = &["vision_config", "audio_config"];

/// The config of the text model and where it stands; the whole config of a text model.
fn text_part(config: &Value) -> (&Value, String) {
    let object = |key: &str| config.get(key).filter(|v| v.is_object());
    if let Some(thinker) = object("thinker_config") {
        let (text, at) = text_part(thinker);
        return (text, format!("thinker_config.{at}"));
    }
    let nested = ["text_config", "llm_config", "language_config"].into_iter();
    nested.filter_map(|key| Some((object(key)?, format!("{key}.")))).next().unwrap_or((config, String::new()))
}

/// A nested config with what its class assumes. Its head is tied unless all that is said denies it: where a checkpoint
/// has a head of its own, that is seen by its tensor.
fn completed(outer: &Value, text: &Value, defaults: &str) -> Value {
    let mut all: Map<String, Value> = serde_json::from_str(defaults).unwrap_or_default();
    let said = text.as_object().into_iter().flatten();
    for (key, value) in said.filter(|(k, v)| !(v.is_null() && defaults.contains(&format!("{k:?}")))) {
        all.insert(key.clone(), value.clone());
    }
    let said = [outer, text].map(|c| c.get("tie_word_embeddings").and_then(Value::as_bool));
    let tied = said.contains(&Some(true)) || said == [None, None];
    all.insert("tie_word_embeddings".into(), tied.into());
    Value::Object(all)
}

#[cfg(test)]
mod tests;
