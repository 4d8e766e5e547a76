//! Presence decides: whether the head is the embedding, and that no tensor is left over.

use std::collections::BTreeSet;

use quern_models::{
    FloatType,
    family::{FamilyPlan, RuleKind},
};

use crate::{
    ConvertError,
    source::{Checkpoint, Dtype},
};

/// Rule 8 of the import rules: presence decides whether the head is the embedding.
pub(super) fn tie_head(
    checkpoint: &Checkpoint,
    family: &mut FamilyPlan,
    used: &mut BTreeSet<String>,
    notes: &mut Vec<String>,
) {
    let find = |head: bool| {
        let rule = family.rules.iter().find(|r| match r.kind {
            RuleKind::Head { .. } => head,
            RuleKind::Embedding { .. } => !head,
            _ => false,
        });
        rule.map(|r| r.source.clone())
    };
    let (Some(head), Some(embed)) = (find(true), find(false)) else { return };
    let prefix = format!("{head}.");
    let present = checkpoint.tensors.keys().any(|name| name.starts_with(&prefix) && !name.ends_with(".bias"));
    if !present || !family.spec.tied_head {
        // Absent and not tied is reported as a missing tensor.
        family.set_tied(!present && family.spec.tied_head);
        return;
    }
    let (head, embed) = (format!("{head}.weight"), format!("{embed}.weight"));
    let same = match (checkpoint.tensors.get(&head), checkpoint.tensors.get(&embed)) {
        (Some(h), Some(e)) => h.dtype == e.dtype && h.shape == e.shape && h.bytes == e.bytes,
        _ => false,
    };
    if same {
        used.insert(head);
    } else if checkpoint.tensors.contains_key(&head) {
        notes.push(format!(
            "the config ties the head to the embedding, but {head} differs from it: kept as its own tensor"
        ));
    }
    family.set_tied(same);
}

/// Every tensor must have been used, but for what carries nothing.
pub(super) fn left_over(
    checkpoint: &Checkpoint,
    family: &FamilyPlan,
    used: &BTreeSet<String>,
) -> Result<(), ConvertError> {
    let harmless = |name: &str| {
        let raw = &checkpoint.tensors[name];
        let zero_bias = name.ends_with(".bias") && matches!(raw.dtype, Dtype::Float(t) if all_zero(t, raw.bytes));
        zero_bias || family.ignore.iter().any(|end| name.ends_with(end))
    };
    let rest: Vec<&String> = checkpoint.tensors.keys().filter(|n| !used.contains(*n) && !harmless(n)).collect();
    match rest.first() {
        None => Ok(()),
        Some(first) => Err(ConvertError::LeftOver {
            origin: checkpoint.name.clone(),
            family: family.spec.family.clone(),
            first: first.to_string(),
            count: rest.len(),
        }),
    }
}

fn all_zero(kind: FloatType, bytes: &[u8]) -> bool {
    (0..bytes.len() / kind.size()).all(|i| kind.read(bytes, i) == 0.0)
}
