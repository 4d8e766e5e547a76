//! Medusa: heads that each guess one token from the model's last state, through residual blocks.
//!
//! How many there are is counted: some configs say less. Reference: FasterDecoding/Medusa `medusa_model.py`.

use serde_json::Value;

use super::{Config, FamilyError, FamilyPlan, Rule, RuleKind, Take, Tensors, module_base};
use crate::spec::{Head, HeadKind, ModelSpec, Norm, States};

/// What stands before the heads' numbers, if there are any.
pub(super) fn base(tensors: &dyn Tensors) -> Option<String> {
    tensors.names().find_map(|name| module_base(name, "0.0.linear")).map(String::from)
}

pub(super) fn plan(config: &Value, tensors: &dyn Tensors, model: &ModelSpec) -> Result<FamilyPlan, FamilyError> {
    let config = Config::new(config, "")?;
    let base = base(tensors).unwrap_or_default();
    let count = |at: &str, end: &str| (0..MOST).take_while(|i| tensors.any(&format!("{base}{at}{i}{end}"))).count();
    let (guesses, depth) = (count("", ".0.linear."), count("0.", ".linear."));
    for (key, found) in [("medusa_num_heads", guesses), ("medusa_num_layers", depth)] {
        if config.whole_or(key, found)? != found {
            let said = config.get(key).unwrap_or(&Value::Null);
            config.warn(format!("config.json: {key} is {said}, but the tensors have {found}: {found} is taken"));
        }
    }
    for (module, what, expected) in
        [("0.0.linear".to_string(), "width", model.hidden), (format!("0.{depth}"), "tokens", model.vocab)]
    {
        let module = format!("{base}{module}");
        if let Some(got) = tensors.outputs(&module, false, expected).filter(|&got| got != expected) {
            let expected = format!("{expected}, the {what} of the model that the head is for");
            return Err(config.wrong(&module, &expected, Some(&got.into())));
        }
    }
    let (hidden, vocab, mut rules) = (model.hidden, model.vocab, vec![]);
    let mut rule = |target: String, source: String, kind| {
        rules.push(Rule { target, source, kind, take: Take::WHOLE });
    };
    for i in 0..guesses {
        for j in 0..depth {
            let (target, source) = (format!("guess.{i}.block.{j}"), format!("{base}{i}.{j}.linear"));
            rule(target.clone(), source.clone(), RuleKind::Linear { n: hidden, k: hidden });
            rule(format!("{target}_bias"), source, RuleKind::Bias { n: hidden });
        }
        rule(format!("guess.{i}.head"), format!("{base}{i}.{depth}"), RuleKind::Head { n: vocab, k: hidden });
    }
    for key in
        ["base_model_name_or_path", "vocab_size", "hidden_size", "version", "medusa_choices", "num_hidden_layers"]
    {
        config.get(key);
    }
    let guesses = Head {
        states: States::Normed,
        model_hidden: hidden,
        model_vocab: vocab,
        kind: HeadKind::Medusa { guesses, depth },
        shared_embed: false,
        shared_head: false,
        mapped: false,
    };
    let spec = ModelSpec {
        family: "medusa".into(),
        vocab,
        hidden,
        max_context: model.max_context,
        layers: vec![],
        norm: Norm::Identity,
        tied_head: false,
        head_order: false,
        positions: None,
        embed_scale: None,
        logit_cap: None,
        draft_head: Some(guesses),
    };
    // Beside the whole model in some checkpoints.
    let within = Some(base).filter(|base| !base.is_empty());
    Ok(FamilyPlan { spec, rules, ignore: &[], others: &[], within, head: None, warnings: config.finish()? })
}

/// Most heads, and blocks of one, that are counted.
const MOST: usize = 64;
