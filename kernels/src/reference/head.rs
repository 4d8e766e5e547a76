//! Heads in the slowest obvious way: the oracle of [`HeadExecutor`](crate::exec::HeadExecutor).

use quern_models::{
    ModelFile,
    spec::{HeadKind, Norm},
};

use crate::exec::Mask;

use super::forward::{Context, Rows, Tensors, add, attention, feed_forward, linear};

/// What a row of a head reads besides its token.
#[derive(Debug, Clone)]
pub enum State {
    /// The model's states, `[width]`.
    Model(Vec<f32>),
    /// What the row before gave.
    Own,
}

/// Logits `[rows][guesses of a row][vocab]` of a head's own vocabulary; row `p` has position `p`. Not of blocks.
pub fn guesses(file: &ModelFile, model: &ModelFile, rows: &[(u32, State)]) -> Vec<f32> {
    let mut own: Rows = vec![];
    let mut logits = vec![];
    // A row that reads what the one before gave needs all before it: everything again for each.
    for n in 1..=rows.len() {
        let (x, of_last) = pass(file, model, &rows[..n], &own);
        own.push(x);
        logits.extend(of_last);
    }
    logits
}

/// Logits `[size - 1][vocab]` of a block of the last token and masks, behind the states `[width]` of the positions before
/// it (`Block` of [`HeadKind`]).
pub fn block(file: &ModelFile, model: &ModelFile, states: &Rows, last: u32) -> Vec<f32> {
    let spec = file.spec();
    let head = spec.draft_head.as_ref().expect("a head");
    let HeadKind::Block { size, mask, ref state_norm } = head.kind else { panic!("no block") };
    let all = Tensors { file, at: String::new() };
    let of_model = Tensors { file: model, at: String::new() };
    let context = all.norm("state_norm", state_norm, &linear(&all.get("fuse"), None, states));
    let embed = if head.shared_embed { of_model.get("embed") } else { all.get("embed") };
    let row = |token: u32| (0..spec.hidden).map(|i| embed.at(token as usize, i)).collect();
    let seen = Context::of(context.len() + size, context.len(), Mask::Full);
    let mut x: Rows = (0..size).map(|i| row(if i == 0 { last } else { mask })).collect();
    for (i, layer) in spec.layers.iter().enumerate() {
        let tensors = Tensors { file, at: format!("layers.{i}.") };
        let normed = tensors.norm("attn_norm", &layer.attn_norm, &x);
        // Every row of the block sees all keys: those of the context and of the whole block.
        let attended = attention(&tensors, layer, &seen, &[&context[..], &normed].concat());
        add(&mut x, &attended[context.len()..].to_vec());
        let fed = feed_forward(&tensors, layer, &x);
        add(&mut x, &fed);
    }
    let normed = all.norm("norm", &spec.norm, &x);
    let from = if head.shared_head { &of_model } else { &all };
    let tied = from.file.spec().tied_head;
    linear(&from.get(if tied { "embed" } else { "head" }), None, &normed[1..].to_vec()).concat()
}

/// What the last row gives for the next, and its logits.
fn pass(file: &ModelFile, model: &ModelFile, rows: &[(u32, State)], own: &Rows) -> (Vec<f32>, Vec<f32>) {
    let spec = file.spec();
    let head = spec.draft_head.as_ref().expect("a head");
    let all = Tensors { file, at: String::new() };
    let of_model = Tensors { file: model, at: String::new() };
    let state = |(p, (_, state)): (usize, &(u32, State))| match state {
        State::Model(state) if head.fuses() => linear(&all.get("fuse"), None, &vec![state.clone()]).concat(),
        State::Model(state) => state.clone(),
        State::Own => own[p - 1].clone(),
    };
    let states: Rows = rows.iter().enumerate().map(state).collect();
    if let HeadKind::Medusa { guesses, depth } = head.kind {
        let last = vec![states.last().expect("a row").clone()];
        let guess = |i: usize| {
            let mut y = last.clone();
            for j in 0..depth {
                let mut z = all.linear(&format!("guess.{i}.block.{j}"), true, &y);
                z.iter_mut().flatten().for_each(|z| *z = (*z as f64 / (1.0 + (-*z as f64).exp())) as f32);
                add(&mut y, &z);
            }
            all.linear(&format!("guess.{i}.head"), false, &y).concat()
        };
        return (vec![], (0..guesses).flat_map(guess).collect());
    }
    let embed = if head.shared_embed { of_model.get("embed") } else { all.get("embed") };
    let row = |&(token, _): &(u32, State)| (0..spec.hidden).map(|i| embed.at(token as usize, i)).collect();
    let mut embedded: Rows = rows.iter().map(row).collect();
    let both = |embedded: &Rows, embed_norm: &Norm, state_norm: &Norm, state_first: bool| -> Rows {
        let embedded = all.norm("embed_norm", embed_norm, embedded);
        let states = all.norm("state_norm", state_norm, &states);
        let pair = |(e, s): (&Vec<f32>, &Vec<f32>)| match state_first {
            true => [&s[..], e].concat(),
            false => [&e[..], s].concat(),
        };
        embedded.iter().zip(&states).map(pair).collect()
    };
    let (mut x, mut first) = match &head.kind {
        HeadKind::Joined { embed_norm, state_norm, state_first, bias, zero_first, .. } => {
            if *zero_first {
                embedded[0].fill(0.0);
            }
            (all.linear("project", *bias, &both(&embedded, embed_norm, state_norm, *state_first)), None)
        }
        HeadKind::Wide { embed_norm, state_norm, normed_residual, .. } => {
            let both = both(&embedded, embed_norm, state_norm, false);
            (if *normed_residual { all.norm("state_norm", state_norm, &states) } else { states.clone() }, Some(both))
        }
        HeadKind::Medusa { .. } | HeadKind::Block { .. } => panic!("not here"),
    };
    let context = Context::of(x.len(), x.len(), Mask::Causal);
    for (i, layer) in spec.layers.iter().enumerate() {
        let tensors = Tensors { file, at: format!("layers.{i}.") };
        let normed = first.take().unwrap_or_else(|| tensors.norm("attn_norm", &layer.attn_norm, &x));
        let attended = attention(&tensors, layer, &context, &normed);
        add(&mut x, &attended);
        let fed = feed_forward(&tensors, layer, &x);
        add(&mut x, &fed);
    }
    let normed = all.norm("norm", &spec.norm, &x);
    let own = if head.feeds_normed() { &normed } else { &x }.last().expect("a row").clone();
    let last = vec![normed.last().expect("a row").clone()];
    let from = if head.shared_head { &of_model } else { &all };
    let tied = from.file.spec().tied_head;
    let logits = linear(&from.get(if tied { "embed" } else { "head" }), None, &last).concat();
    (own, logits)
}
