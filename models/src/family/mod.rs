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
