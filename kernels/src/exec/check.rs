//! Plans are checked before a device uses them: a wrong one would write where it must not.

use quern_models::{
    ModelSpec,
    spec::{Head, HeadKind},
};

use super::{ExecError, Fed, Mask, NO_BLOCK, Output, Plan};
use crate::cpu::kv::BLOCK;

/// Refuses a plan that contradicts itself, the model, or the number of KV blocks.
pub(crate) fn check(plan: &Plan, spec: &ModelSpec, blocks: usize) -> Result<(), ExecError> {
    for (chunk, c) in plan.chunks.iter().enumerate() {
        let bad = |what, expected: String, got: String| Err(ExecError::Plan { chunk, what, expected, got });
        if c.tokens.is_empty() {
            return bad("tokens", "at least 1".into(), "0".into());
        }
        if let Some(t) = c.tokens.iter().find(|&&t| t as usize >= spec.known_tokens()) {
            return bad("token", format!("below {}", spec.known_tokens()), t.to_string());
        }
        if let Err((what, expected, got)) = c.mask.check(c.tokens.len()) {
            return bad(what, expected, got);
        }
        if is_block(spec) && matches!(c.mask, Mask::Tree(_)) {
            return bad("mask", "Causal or Full, of a head that guesses a block at once".into(), "a tree".into());
        }
        let positions = c.start + c.mask.positions(c.tokens.len());
        if let Some(rows) = spec.positions.filter(|&rows| positions > rows) {
            return bad("position", format!("below {rows}"), (positions - 1).to_string());
        }
        let needed = (c.start + c.tokens.len()).div_ceil(BLOCK);
        if c.blocks.len() < needed {
            return bad("blocks", format!("at least {needed}"), c.blocks.len().to_string());
        }
        let gone = super::passed(spec, c.start) / BLOCK;
        let wrong = |(i, b): &(usize, &u32)| **b as usize >= blocks && !(**b == NO_BLOCK && *i < gone);
        if let Some((_, b)) = c.blocks.iter().enumerate().find(wrong) {
            return bad("block", format!("below {blocks}"), b.to_string());
        }
        if c.output.from(c.tokens.len()) > c.tokens.len() {
            return bad("first output row", format!("at most {}", c.tokens.len()), c.output.from(0).to_string());
        }
        if let Output::Tokens { history, .. } = &c.output
            && history.len() != c.start + c.tokens.len() + usize::from(spec.draft_head.is_some() && !is_block(spec))
        {
            let ahead = usize::from(spec.draft_head.is_some() && !is_block(spec));
            return bad("history", (c.start + c.tokens.len() + ahead).to_string(), history.len().to_string());
        }
        if let Output::Tokens { from, allowed: Some(allowed), .. } = &c.output
            && allowed.len() != (c.tokens.len() - from) * spec.vocab.div_ceil(32)
        {
            let expected = (c.tokens.len() - from) * spec.vocab.div_ceil(32);
            return bad("words of allowed tokens", expected.to_string(), allowed.len().to_string());
        }
        let own = &c.blocks[c.start / BLOCK..needed];
        let shared = plan.chunks[..chunk].iter().any(|o| {
            o.blocks[o.start / BLOCK..(o.start + o.tokens.len()).div_ceil(BLOCK)].iter().any(|b| own.contains(b))
        });
        let twice = own.iter().enumerate().any(|(i, b)| own[..i].contains(b));
        if shared || twice {
            return bad("blocks written in this step", "each once".into(), format!("{own:?} used twice"));
        }
    }
    Ok(())
}

/// Refuses states that do not fit a checked plan of a head, and outputs that heads do not have.
pub(crate) fn check_fed(plan: &Plan, fed: &Fed, spec: &ModelSpec) -> Result<(), ExecError> {
    for (chunk, c) in plan.chunks.iter().enumerate() {
        let got = match c.output {
            Output::Tokens { logprobs: Some(_), .. } => "logprobs",
            Output::Tokens { allowed: Some(_), .. } => "allowed tokens",
            Output::Hidden { .. } => "hidden states",
            _ => continue,
        };
        let expected = "tokens, logits or nothing of a head".into();
        return Err(ExecError::Plan { chunk, what: "output", expected, got: got.into() });
    }
    let (states, width) = match fed {
        // A block reads tokens, and sees what was fed before.
        Fed::Nothing if is_block(spec) => return Ok(()),
        Fed::Nothing => {
            return Err(ExecError::Head { what: "reads", expected: "states".into(), got: "nothing".into() });
        }
        Fed::Model(states) => (states, spec.draft_head.as_ref().map_or(0, |head| head.width())),
        Fed::Own(states) => (states, spec.hidden),
    };
    let wanted = plan.chunks.iter().map(|c| c.tokens.len() * width);
    let got = states.iter().map(|s| s.len());
    if !wanted.clone().eq(got.clone()) {
        let shown = |all: &mut dyn Iterator<Item = usize>| format!("{:?} numbers", all.collect::<Vec<_>>());
        let (expected, got) = (shown(&mut wanted.into_iter()), shown(&mut got.into_iter()));
        return Err(ExecError::Head { what: "reads", expected, got });
    }
    Ok(())
}

/// Whether rows guess the tokens of their own positions.
fn is_block(spec: &ModelSpec) -> bool {
    matches!(spec.draft_head, Some(Head { kind: HeadKind::Block { .. }, .. }))
}

/// Refuses a head that is of another model.
pub(crate) fn check_head(model: &ModelSpec, spec: &ModelSpec) -> Result<(), ExecError> {
    match &spec.draft_head {
        Some(head) => Ok(head.fits(model)?),
        None => Err(ExecError::Head { what: "is", expected: "a head".into(), got: "a model".into() }),
    }
}

/// Refuses moves that do not go towards the front in order, or concern slots of no block.
pub(crate) fn check_move(block_ids: &[u32], from: &[usize], to: usize, blocks: usize) -> Result<(), ExecError> {
    let bad = |what, expected: String, got: String| Err(ExecError::Move { what, expected, got });
    for (i, &slot) in from.iter().enumerate() {
        if i > 0 && slot <= from[i - 1] {
            return bad("slots in order", format!("above {}", from[i - 1]), slot.to_string());
        }
        if slot < to || slot - to < i {
            return bad("a slot's new place", format!("at most {slot}, where it is"), format!("{to} and {i} more"));
        }
        for slot in [to + i, slot] {
            let block = block_ids.get(slot / BLOCK).copied();
            if block.is_none_or(|b| b as usize >= blocks) {
                let got = block.map_or("none".into(), |b| b.to_string());
                return bad("block of a slot", format!("one below {blocks} for slot {slot}"), got);
            }
        }
    }
    Ok(())
}
