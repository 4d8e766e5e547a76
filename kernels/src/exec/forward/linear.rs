//! Linear layers over the team: panels of 64 outputs, dealt out or taken.

use std::{
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering},
};

use quern_models::{PANEL, TensorView};

use super::{Forward, ThreadBuffers};
use crate::{
    cpu::{
        acts::{Acts, MR, Mode},
        isa::Isa,
        linear::linear_panel,
    },
    team::{Disjoint, Team},
};

/// Most activation rows of one unit of a linear layer: what a panel's weights are unpacked for.
const ROWS: usize = 32;

/// With at most so many rows, panels are dealt out once, contiguously: reading weights is the work.
const FEW_ROWS: usize = 16;

/// What a linear layer needs besides weights and activations.
pub(super) struct Linear<'a> {
    pub isa: &'static Isa,
    pub mode: Mode,
    pub team: &'a Team,
    pub regions: &'a mut usize,
    pub threads: &'a mut [ThreadBuffers],
}

impl Linear<'_> {
    /// Several weights on one input, in one region. `put(row, column, outputs)` gets up to 64 outputs
    /// at a time; columns count through the weights.
    pub fn linears(&mut self, weights: &[TensorView], acts: &Acts, put: &(dyn Fn(usize, usize, &[f32]) + Sync)) {
        let panels: usize = weights.iter().map(TensorView::panels).sum();
        let (isa, mode) = (self.isa, self.mode);
        let threads = PerThread::new(self.threads);
        Self::units(self.team, self.regions, panels, acts.m(), &|t, panel, rows| {
            let (mut panel, mut column, mut w) = (panel, 0, &weights[0]);
            for next in &weights[1..] {
                if panel < w.panels() {
                    break;
                }
                panel -= w.panels();
                column += w.n;
                w = next;
            }
            // SAFETY: `units` gives each thread its own number.
            let buf = unsafe { threads.get(t) };
            buf.tile.resize(rows.len() * PANEL, 0.0);
            linear_panel(isa, w, acts, mode, panel, rows.clone(), &mut buf.tile, &mut buf.linear);
            let width = (w.n - panel * PANEL).min(PANEL);
            for (tile, row) in buf.tile.chunks_exact(PANEL).zip(rows) {
                put(row, column + panel * PANEL, &tile[..width]);
            }
        });
    }

    /// Runs `f(thread, panel, rows)` so that every panel meets every row once.
    ///
    /// Few rows: a contiguous share of the panels per thread, as the memory likes it, and threads that are done
    /// take over from others. Many: units of up to 64 rows, taken by whoever is free.
    pub fn units(
        team: &Team,
        regions: &mut usize,
        panels: usize,
        m: usize,
        f: &(dyn Fn(usize, usize, Range<usize>) + Sync),
    ) {
        if m <= FEW_ROWS {
            *regions += 1;
            return team.deal(panels, &|t, panel| f(t, panel, 0..m));
        }
        let chunks = m.div_ceil(ROWS);
        // Chunks of equal length rather than a short last one; starts stay multiples of MR.
        let rows = m.div_ceil(chunks).next_multiple_of(MR);
        let next = AtomicUsize::new(0);
        Forward::region(team, regions, &|t| {
            loop {
                let unit = next.fetch_add(1, Ordering::Relaxed);
                if unit >= panels * chunks {
                    return;
                }
                let start = unit % chunks * rows;
                if start < m {
                    f(t, unit / chunks, start..(start + rows).min(m));
                }
            }
        });
    }
}

/// Buffers of which each thread uses its own.
pub(super) struct PerThread<'a, T>(Disjoint<'a, T>);

impl<'a, T> PerThread<'a, T> {
    pub fn new(all: &'a mut [T]) -> Self {
        PerThread(Disjoint::new(all))
    }

    /// # Safety
    /// Only thread `t` of the region asks for `t`, and keeps one result at a time.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn get(&self, t: usize) -> &mut T {
        // SAFETY: the caller's promise.
        unsafe { &mut self.0.part(t..t + 1)[0] }
    }
}
