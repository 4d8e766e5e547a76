//! Act-order: tensors whose columns must be sorted by group, and what that asks of their neighbours.
//!
//! Tensors that share an input share one order, which the file stores once and the runtime applies to the input:
//! q, k and v; gate and up; o; the head. For `down` there is nothing to apply: its input is what gate and up make, so
//! their rows are moved instead. A tensor that needs another order than its neighbours is stored as the f32 values
//! that it means, which any order suits.

use quern_models::{
    FloatType,
    spec::{Attn, Mlp, ModelSpec},
};

use super::job::{Data, Job};
use crate::import::{
    float::Floats,
    order::{Arrange, Columns, Order},
    rtn,
};

/// Tensors that share an input.
struct Input {
    /// Their names.
    of: Vec<String>,
    to: To,
}

/// What makes an input's order right.
enum To {
    /// Stored as this tensor.
    Order(String),
    /// The rows of these tensors are moved.
    Rows(Vec<String>),
}

/// Puts every tensor's columns in an order that its groups allow, or widens it. Returns what the user should know.
pub(super) fn settle(jobs: &mut Vec<Job>, spec: &mut ModelSpec) -> Vec<String> {
    let mut widened = vec![];
    for job in jobs.iter_mut() {
        if let Some(why) = job.codes().and_then(|t| t.misfit()) {
            widen(job, why, &mut widened);
        }
    }
    for Input { of, to } in inputs(spec) {
        let there = |name: &str| jobs.iter().any(|j| j.target == name);
        if matches!(&to, To::Rows(names) if !names.iter().any(|n| n.ends_with(".up") && there(n))) {
            continue;
        }
        let Some(order) = common(jobs, &of, &mut widened) else { continue };
        jobs.iter_mut().filter(|j| of.contains(&j.target)).for_each(|j| take_columns(j, &order));
        match to {
            To::Rows(names) => jobs.iter_mut().filter(|j| names.contains(&j.target)).for_each(|j| take_rows(j, &order)),
            To::Order(target) => {
                flag(spec, &target);
                let at = jobs.iter().position(|j| of.contains(&j.target)).expect("one of them asked for the order");
                jobs.insert(at, Job::order(target, order));
            }
        }
    }
    // What is in no list above.
    for job in jobs.iter_mut().filter(|j| j.arrange.cols.is_none()) {
        if matches!(job.codes().map(|t| t.order()), Some(Columns::Ordered(_))) {
            widen(job, "this version cannot apply its g_idx here".into(), &mut widened);
        }
    }
    notes(widened)
}

/// Every input of the model that several orders are possible for.
fn inputs(spec: &ModelSpec) -> Vec<Input> {
    let mut all = vec![];
    for i in 0..spec.layers.len() {
        let names = |list: &[&str]| list.iter().map(|n| format!("layers.{i}.{n}")).collect::<Vec<_>>();
        let order = |name: &str| To::Order(format!("layers.{i}.{name}"));
        // `down` first: it moves rows of tensors whose columns move later, which is the same in any sequence.
        let made_by = ["gate", "up", "gate_bias", "up_bias"];
        all.push(Input { of: names(&["down"]), to: To::Rows(names(&made_by)) });
        all.push(Input { of: names(&["q", "k", "v"]), to: order("attn_order") });
        all.push(Input { of: names(&["o"]), to: order("o_order") });
        all.push(Input { of: names(&["gate", "up"]), to: order("mlp_order") });
        // Gates and ups of experts have no order in common.
        let experts = match spec.layers[i].mlp {
            Mlp::Experts { experts, .. } => experts,
            _ => 0,
        };
        for e in 0..experts {
            let of = |name: &str| vec![format!("layers.{i}.experts.{e}.{name}")];
            all.push(Input { of: of("down"), to: To::Rows([of("gate"), of("up")].concat()) });
        }
    }
    all.push(Input { of: vec!["head".into()], to: To::Order("head_order".into()) });
    all
}

/// The order that most weights of these tensors need, if it is not the source's. Those that need another are widened.
fn common(jobs: &mut [Job], of: &[String], widened: &mut Vec<(String, String)>) -> Option<Order> {
    let mut needs: Vec<(Option<Order>, u64, String)> = vec![];
    for job in jobs.iter().filter(|j| of.contains(&j.target)) {
        let order = match job.codes().map(|t| t.order()) {
            Some(Columns::Ordered(order)) => Some(order),
            Some(Columns::Natural) => None,
            Some(Columns::Any) | None => continue,
        };
        match needs.iter_mut().find(|n| n.0 == order) {
            Some(need) => need.1 += job.weights(),
            None => needs.push((order, job.weights(), job.origin.clone())),
        }
    }
    // Of several with as many, the first.
    needs.sort_by_key(|n| std::cmp::Reverse(n.1));
    let (chosen, _, first) = needs.into_iter().next()?;
    for job in jobs.iter_mut().filter(|j| of.contains(&j.target)) {
        let fits = match job.codes().map(|t| t.order()) {
            Some(Columns::Ordered(order)) => chosen.as_ref() == Some(&order),
            Some(Columns::Natural) => chosen.is_none(),
            Some(Columns::Any) | None => true,
        };
        if !fits {
            widen(job, format!("its g_idx is not that of {first}, which has the same input"), widened);
        }
    }
    chosen
}

/// Stores the values of a tensor of codes instead of the codes.
fn widen(job: &mut Job, why: String, widened: &mut Vec<(String, String)>) {
    let place_holder = Data::Order(Order::default());
    job.data = match std::mem::replace(&mut job.data, place_holder) {
        Data::Codes(codes) => Data::Values(codes),
        other => other,
    };
    widened.push((job.origin.clone(), why));
}

/// One note for all tensors that were widened for the same reason.
fn notes(widened: Vec<(String, String)>) -> Vec<String> {
    let mut all: Vec<(String, String, usize)> = vec![];
    for (name, why) in widened {
        match all.iter_mut().find(|n| n.1 == why) {
            Some(note) => note.2 += 1,
            None => all.push((name, why, 1)),
        }
    }
    let more = |count: usize| if count > 1 { format!(" and {} more", count - 1) } else { String::new() };
    all.into_iter()
        .map(|(name, why, count)| format!("{name}{} is stored as f32, the values its codes mean: {why}", more(count)))
        .collect()
}

/// Moves the columns of a tensor.
fn take_columns(job: &mut Job, order: &Order) {
    rearrange(job, |arrange| arrange.cols = Some(order.clone()));
}

/// Moves the rows of a tensor, or the elements of a vector.
fn take_rows(job: &mut Job, order: &Order) {
    let vector = job.dims.len() == 1;
    rearrange(
        job,
        |arrange| {
            if vector { arrange.cols = Some(order.clone()) } else { arrange.rows = Some(order.clone()) }
        },
    );
}

fn rearrange(job: &mut Job, change: impl Fn(&mut Arrange)) {
    let again = |floats: &mut Floats| change(&mut floats.arrange);
    match &mut job.data {
        Data::Float { floats, .. } => again(floats),
        Data::Rtn { floats, shape } => {
            again(floats);
            *shape = rtn::shape(floats, shape.bits, shape.group);
        }
        _ => change(&mut job.arrange),
    }
}

/// Says in the spec that there is an order.
fn flag(spec: &mut ModelSpec, target: &str) {
    let Some((layer, name)) = target.strip_prefix("layers.").and_then(|t| t.split_once('.')) else {
        spec.head_order = true;
        return;
    };
    let layer = layer.parse().ok().and_then(|i: usize| spec.layers.get_mut(i)).expect("a layer of the spec");
    let Attn::Gqa { attn_order, o_order, .. } = &mut layer.attn;
    match (name, &mut layer.mlp) {
        ("attn_order", _) => *attn_order = true,
        ("o_order", _) => *o_order = true,
        (_, Mlp::Gated { mlp_order, .. } | Mlp::Plain { mlp_order, .. }) => *mlp_order = true,
        (_, Mlp::Experts { .. }) => unreachable!("`inputs` names no input of experts"),
    }
}

/// What the file says of codes that take more bits than in the source: `(codes, tensors, share of the file)`.
pub(super) fn wider(jobs: &[Job]) -> Vec<(String, usize, f64)> {
    let file: u64 = jobs.iter().map(Job::bytes).sum();
    let mut all: Vec<(String, usize, u64)> = vec![];
    for job in jobs {
        let (what, saved) = match &job.data {
            Data::Codes(t) if t.source_bits() != t.shape().bits => {
                let (from, to) = (t.source_bits(), t.shape().bits);
                (format!("{from}-bit codes in {to}-bit fields"), job.weights() * (to - from) as u64 / 8)
            }
            Data::Values(t) => {
                let bits = t.source_bits();
                let kept = job.weights() * (8 * FloatType::F32.size() as u64 - bits as u64) / 8;
                (format!("{bits}-bit codes as f32 values"), kept)
            }
            _ => continue,
        };
        match all.iter_mut().find(|w| w.0 == what) {
            Some(w) => (w.1, w.2) = (w.1 + 1, w.2 + saved),
            None => all.push((what, 1, saved)),
        }
    }
    all.into_iter()
        .map(|(what, tensors, saved)| (what, tensors, 100.0 * saved as f64 / (file - saved).max(1) as f64))
        .collect()
}
