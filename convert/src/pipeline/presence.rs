//! Presence decides: whether the head is the embedding, and that no tensor is left over.

use std::collections::BTreeSet;

use quern_models::{
    FloatType,
    family::{FamilyPlan, RuleKind, Tensors},
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
    notes: &mut Vec<String>,
) -> Result<(), ConvertError> {
    let other = |name: &str| name.split('.').find(|part| family.others.contains(part)).map(String::from);
    let harmless = |name: &str| {
        let raw = &checkpoint.tensors[name];
        let zero_bias = name.ends_with(".bias") && matches!(raw.dtype, Dtype::Float(t) if all_zero(t, raw.bytes));
        zero_bias || family.ignore.iter().any(|end| name.ends_with(end))
    };
    let (others, rest): (Vec<&String>, Vec<&String>) = checkpoint
        .tensors
        .keys()
        .filter(|name| family.within.as_ref().is_none_or(|within| name.starts_with(within)))
        .filter(|name| !used.contains(*name) && !harmless(name))
        .partition(|name| other(name).is_some());
    if !others.is_empty() {
        let parts: BTreeSet<String> = others.iter().filter_map(|name| other(name)).collect();
        let parts = parts.into_iter().collect::<Vec<_>>().join(", ");
        notes
            .push(format!("a multimodal model: its text part is taken, {} tensor(s) of {parts} are not", others.len()));
    }
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

/// What the families ask about a checkpoint.
impl Tensors for Checkpoint<'_> {
    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(self.tensors.keys().map(String::as_str))
    }

    fn any(&self, prefix: &str) -> bool {
        let from = (std::ops::Bound::Included(prefix), std::ops::Bound::Unbounded);
        self.tensors.range::<str, _>(from).next().is_some_and(|(name, _)| name.starts_with(prefix))
    }

    fn outputs(&self, module: &str, transposed: bool, said: usize) -> Option<usize> {
        let get = |part: &str| self.tensors.get(&format!("{module}.{part}"));
        let shape = |part: &str| match get(part).map(|raw| &raw.shape[..]) {
            Some(&[n, k]) => Some((n as usize, k as usize)),
            _ => None,
        };
        if let Some((n, k)) = shape("weight") {
            return Some(if transposed && !self.gguf { k } else { n });
        }
        if let Some((n, _)) = shape("weight_packed") {
            return Some(n);
        }
        // GPTQ and most of AWQ have outputs along the rows of their scales, AWQ's gemv down the columns of both.
        let ((first, _), (rows, cols)) = (shape("qweight")?, shape("scales")?);
        let gemv = first == rows && get("qweight")?.dtype == Dtype::I32;
        Some(if gemv && cols != said { rows } else { cols })
    }
}
