//! A mixture of experts: rows sorted by the experts that the router picks for them.
//!
//! Each expert that any row has gets an input of its own, with its rows alone, so that a row's numbers depend neither on
//! what other rows pick nor on how many there are. What its experts give is added up in the order of the picks.
//! Six stages: norm, router, rows to their experts, gates and ups, downs, sum.

use quern_models::{PANEL, TensorView};

use super::{
    Forward,
    linear::{Linear, PerThread},
};
use crate::{
    cpu::{
        act,
        acts::{Acts, Forms, MR},
        linear::linear_panel,
        route::{Groups, Pick, pick},
    },
    team::Disjoint,
};

/// Kept between steps. `pairs` are a row and one of its experts.
#[derive(Default)]
pub(super) struct Buffers {
    /// `[m][hidden]`.
    normed: Vec<f32>,
    /// `[m][experts]`.
    logits: Vec<f32>,
    /// `[m][top]`.
    picks: Vec<Pick>,
    groups: Groups,
    /// Of each group, `[rows][hidden]` and `[rows][inner]`.
    inputs: Vec<Acts>,
    inner: Vec<Acts>,
    /// `[pairs][hidden]`.
    out: Vec<f32>,
}

/// Rows of a group that meet a panel at a time.
struct Unit {
    group: usize,
    panel: usize,
    first: usize,
}

impl Forward {
    /// The feed-forward half of a layer of experts, added to the residual stream.
    pub(super) fn mixture(&mut self, layer: usize, m: usize) {
        // Taken out, so that it can be used beside everything else.
        let mut bufs = std::mem::take(&mut self.bufs.experts);
        self.route(layer, m, &mut bufs);
        self.ups(layer, m, &mut bufs);
        self.downs(layer, &mut bufs);
        self.sum(layer, m, &bufs);
        self.bufs.experts = bufs;
    }

    /// Norm, router, and which rows each expert gets.
    fn route(&mut self, layer: usize, m: usize, bufs: &mut Buffers) {
        let (tensors, hidden) = (&self.layers[layer], self.file.spec().hidden);
        let experts = tensors.experts();
        let router = self.file.view(experts.router);
        let forms = Forms::of(router.scheme, self.mode);
        // One row has one input for all.
        let forms = if m == 1 { forms.and(self.forms(&experts.schemes[0])) } else { forms };
        self.bufs.acts.reset(self.isa, m, hidden, forms);
        bufs.normed.resize(m * hidden, 0.0);
        let (isa, simd, acts, x) = (self.isa, self.simd, &self.bufs.acts, &self.bufs.x);
        let normed = Disjoint::new(&mut bufs.normed);
        Self::rows(&self.team, &mut self.regions, m, &|_, row| {
            let part = row * hidden..(row + 1) * hidden;
            // SAFETY: each row is written by one call only and read in later regions.
            let to = unsafe { normed.part(part.clone()) };
            tensors.mlp_in.norm(simd, &x[part], to);
            // SAFETY: as above.
            unsafe { acts.write_row(isa, row, to) }
        });
        let count = router.n;
        let mut run = Linear {
            isa,
            mode: self.mode,
            team: &self.team,
            regions: &mut self.regions,
            threads: &mut self.bufs.threads,
        };
        run.store(&[router], acts, &[], &mut bufs.logits);
        let (top, normalized) = (experts.top, experts.normalized);
        bufs.picks.resize(m * top, Pick::default());
        let (picks, logits) = (Disjoint::new(&mut bufs.picks), &bufs.logits);
        Self::rows(&self.team, &mut self.regions, m, &|_, row| {
            // SAFETY: each row is written by one call only.
            let to = unsafe { picks.part(row * top..(row + 1) * top) };
            pick(&logits[row * count..(row + 1) * count], normalized, to);
        });
        bufs.groups.sort(&bufs.picks, top, count);
    }

    /// Gates and ups; what is activated is quantized where it is computed.
    fn ups(&mut self, layer: usize, m: usize, bufs: &mut Buffers) {
        let Buffers { normed, groups, inputs, inner, .. } = bufs;
        let experts = self.layers[layer].experts();
        let [forms, down_forms] = [0, 1].map(|i| self.forms(&experts.schemes[i]));
        let (isa, simd, mode, hidden) = (self.isa, self.simd, self.mode, self.file.spec().hidden);
        let all = groups.all();
        if inner.len() < all.len() {
            inputs.resize_with(all.len(), Acts::new);
            inner.resize_with(all.len(), Acts::new);
        }
        inner
            .iter_mut()
            .zip(all)
            .for_each(|(acts, group)| acts.reset(isa, group.rows.len(), experts.inner, down_forms));
        if m > 1 {
            inputs.iter_mut().zip(all).for_each(|(acts, group)| acts.reset(isa, group.rows.len(), hidden, forms));
            let inputs = &*inputs;
            Self::rows(&self.team, &mut self.regions, groups.pairs(), &|_, pair| {
                let (row, group) = groups.of(pair);
                // SAFETY: each pair is a row of its own of its group's input, read in later regions.
                unsafe {
                    inputs[group].write_row(
                        isa,
                        pair - all[group].rows.start,
                        &normed[row * hidden..(row + 1) * hidden],
                    )
                }
            });
        }
        let views = all.iter().map(|group| experts.each[group.expert].map(|t| self.file.view(t))).collect::<Vec<_>>();
        let units = units(groups, experts.inner.div_ceil(PANEL), isa.rows);
        let (inputs, inner, shared, kind) = (&*inputs, &*inner, &self.bufs.acts, experts.act);
        let threads = PerThread::new(&mut self.bufs.threads);
        self.regions += 1;
        self.team.deal(units.len(), &|t, item| {
            let Unit { group, panel, first } = units[item];
            let [gate, up, _] = &views[group];
            let acts = if m > 1 { &inputs[group] } else { shared };
            let rows = first..(first + isa.rows).min(acts.m());
            // SAFETY: `deal` gives each thread its own number.
            let buf = unsafe { threads.get(t) };
            buf.tile.resize(rows.len() * PANEL, 0.0);
            buf.tile2.resize(rows.len() * PANEL, 0.0);
            linear_panel(isa, up, acts, mode, panel, rows.clone(), &mut buf.tile, &mut buf.linear);
            linear_panel(isa, gate, acts, mode, panel, rows.clone(), &mut buf.tile2, &mut buf.linear);
            let width = (up.n - panel * PANEL).min(PANEL);
            let mut product = [0.0; PANEL];
            let product = &mut product[..width];
            for (i, row) in rows.enumerate() {
                let part = i * PANEL..i * PANEL + width;
                act::act_mul(simd, kind, &buf.tile2[part.clone()], &buf.tile[part], product);
                // SAFETY: a unit writes its own 64 columns of its own rows, read in later regions.
                unsafe { inner[group].write_part(isa, row, panel, product) }
            }
        });
    }

    /// What every expert gives its rows.
    fn downs(&mut self, layer: usize, bufs: &mut Buffers) {
        let Buffers { groups, inner, out, .. } = bufs;
        let experts = self.layers[layer].experts();
        let (isa, mode, hidden) = (self.isa, self.mode, self.file.spec().hidden);
        let all = groups.all();
        out.resize(groups.pairs() * hidden, 0.0);
        let views: Vec<TensorView> = all.iter().map(|group| self.file.view(experts.each[group.expert][2])).collect();
        let units = units(groups, hidden.div_ceil(PANEL), isa.rows);
        let (out, inner) = (Disjoint::new(out), &*inner);
        let threads = PerThread::new(&mut self.bufs.threads);
        self.regions += 1;
        self.team.deal(units.len(), &|t, item| {
            let Unit { group, panel, first } = units[item];
            let rows = first..(first + isa.rows).min(inner[group].m());
            // SAFETY: `deal` gives each thread its own number.
            let buf = unsafe { threads.get(t) };
            buf.tile.resize(rows.len() * PANEL, 0.0);
            let (down, acts) = (&views[group], &inner[group]);
            linear_panel(isa, down, acts, mode, panel, rows.clone(), &mut buf.tile, &mut buf.linear);
            let width = (hidden - panel * PANEL).min(PANEL);
            for (tile, row) in buf.tile.chunks_exact(PANEL).zip(rows) {
                let at = (all[group].rows.start + row) * hidden + panel * PANEL;
                // SAFETY: a unit writes its own 64 columns of its own rows.
                unsafe { out.part(at..at + width) }.copy_from_slice(&tile[..width]);
            }
        });
    }

    /// `x += sum of w * y` over a row's experts, in the order of its picks.
    fn sum(&mut self, layer: usize, m: usize, bufs: &Buffers) {
        let (top, hidden) = (self.layers[layer].experts().top, self.file.spec().hidden);
        let x = Disjoint::new(&mut self.bufs.x);
        let threads = PerThread::new(&mut self.bufs.threads);
        Self::rows(&self.team, &mut self.regions, m, &|t, row| {
            // SAFETY: `rows` gives each thread its own number.
            let sum = unsafe { &mut threads.get(t).row };
            sum.clear();
            sum.resize(hidden, 0.0);
            for pair in row * top..(row + 1) * top {
                let (weight, at) = (bufs.picks[pair].weight, bufs.groups.place(pair) * hidden);
                sum.iter_mut().zip(&bufs.out[at..at + hidden]).for_each(|(sum, y)| *sum += weight * y);
            }
            // SAFETY: each row is written by one call only.
            let x = unsafe { x.part(row * hidden..(row + 1) * hidden) };
            x.iter_mut().zip(&*sum).for_each(|(x, y)| *x += y);
        });
    }

    /// What serves weights of all these schemes.
    fn forms(&self, schemes: &[quern_models::Scheme]) -> Forms {
        schemes.iter().map(|&scheme| Forms::of(scheme, self.mode)).fold(Forms::default(), Forms::and)
    }
}

/// Every panel of every group, some rows at a time; one expert's follow each other, as the memory likes it.
fn units(groups: &Groups, panels: usize, rows: usize) -> Vec<Unit> {
    debug_assert!(rows.is_multiple_of(MR), "{rows} rows cut a block");
    let mut units = vec![];
    for (group, of) in groups.all().iter().enumerate() {
        for panel in 0..panels {
            units.extend((0..of.rows.len()).step_by(rows).map(|first| Unit { group, panel, first }));
        }
    }
    units
}
