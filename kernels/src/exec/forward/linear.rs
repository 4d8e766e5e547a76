//! Linear layers over the team: panels of 64 outputs, dealt out or taken.

use std::{
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering},
};

use quern_models::{PANEL, TensorView};

use super::{Forward, ThreadBuffers, tensors::add_bias};
use crate::{
    cpu::{
        acts::{Acts, MR, Mode, block},
        isa::Isa,
        linear::{STRIPS, linear_strips},
    },
    team::{Disjoint, Team, split},
};

/// With at least so many panels a thread, a panel more or less for one of them does not matter.
const MANY_PANELS: usize = 16;

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
        // Half a panel is half the work only for kernels that know of it.
        let halves = self.isa.strips && weights.iter().all(|w| block(w.scheme, self.mode).is_some());
        self.run(weights, acts, halves, put);
    }

    /// Several weights on one input, side by side in the rows of `to`, `[rows of acts][sum of n]`, with their biases
    /// behind each other (or none: empty).
    pub fn store(&mut self, weights: &[TensorView], acts: &Acts, bias: &[f32], to: &mut Vec<f32>) {
        let stride: usize = weights.iter().map(|w| w.n).sum();
        to.resize(acts.m() * stride, 0.0);
        let to = Disjoint::new(to);
        self.linears(weights, acts, &|row, at, tile| {
            // SAFETY: a unit writes its own panel of its own rows.
            let to = unsafe { to.part(row * stride + at..row * stride + at + tile.len()) };
            to.copy_from_slice(tile);
            add_bias(to, bias, at);
        });
    }

    /// As [`Linear::linears`] with whole panels of one: `put` is called once for each.
    pub fn panels(&mut self, weight: &TensorView, acts: &Acts, put: &(dyn Fn(usize, usize, &[f32]) + Sync)) {
        self.run(std::slice::from_ref(weight), acts, false, put);
    }

    fn run(&mut self, weights: &[TensorView], acts: &Acts, halves: bool, put: &(dyn Fn(usize, usize, &[f32]) + Sync)) {
        let panels: usize = weights.iter().map(TensorView::panels).sum();
        let (isa, mode) = (self.isa, self.mode);
        let threads = PerThread::new(self.threads);
        let f = |t: usize, panel: usize, strips: Range<usize>, rows: Range<usize>| {
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
            let (of, rest) = ((panel, strips.clone()), &mut buf.linear);
            linear_strips(isa, w, acts, mode, of, rows.clone(), &mut buf.tile, rest);
            let width = (w.n - panel * PANEL).min(PANEL);
            let some = strips.start * 16..width.min(strips.end * 16);
            if some.is_empty() {
                return;
            }
            for (tile, row) in buf.tile.chunks_exact(PANEL).zip(rows) {
                put(row, column + panel * PANEL + some.start, &tile[some.clone()]);
            }
        };
        let m = acts.m();
        if !halves || m > FEW_ROWS || panels >= MANY_PANELS * self.team.threads() {
            return Self::units(isa, self.team, self.regions, panels, m, &|t, panel, rows| {
                f(t, panel, 0..STRIPS, rows)
            });
        }
        let halves = Halves::new(panels, self.team.threads());
        *self.regions += 1;
        self.team.deal(halves.items(), &|t, item| {
            let (panel, strips) = halves.item(item);
            f(t, panel, strips, 0..m);
        });
    }

    /// Runs `f(thread, panel, rows)` so that every panel meets every row once.
    ///
    /// Few rows: a contiguous share of the panels per thread, as the memory likes it, and threads that are done
    /// take over from others. Many: units of some rows, taken by whoever is free, all panels of some rows before
    /// the next rows, which then stay in the cache.
    pub fn units(
        isa: &Isa,
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
        let chunks = m.div_ceil(isa.rows);
        // Chunks of equal length rather than a short last one; starts stay multiples of MR.
        let rows = m.div_ceil(chunks).next_multiple_of(MR);
        let next = AtomicUsize::new(0);
        Forward::region(team, regions, &|t| {
            loop {
                let unit = next.fetch_add(1, Ordering::Relaxed);
                if unit >= panels * chunks {
                    return;
                }
                let start = unit / panels * rows;
                if start < m {
                    f(t, unit % panels, start..(start + rows).min(m));
                }
            }
        });
    }
}

/// Panels shared evenly by cutting those that are left over in halves: 9 panels are 4 and a half for each of two
/// threads. Only those, because half a panel uses every other cache line of what it reads.
struct Halves {
    panels: usize,
    threads: usize,
}

impl Halves {
    fn new(panels: usize, threads: usize) -> Halves {
        Halves { panels, threads }
    }

    /// Whole panels and halves.
    fn items(&self) -> usize {
        self.panels + self.panels % self.threads
    }

    /// Panel and strips of an item. A thread's share of the items ([`split`]) is its panels, then its halves.
    fn item(&self, item: usize) -> (usize, Range<usize>) {
        let each = self.panels / self.threads;
        let share = |t: usize| split(self.items(), self.threads, t);
        let t = (0..self.threads).find(|&t| share(t).contains(&item)).expect("an item of some share");
        let (start, at) = (share(t).start, item - share(t).start);
        if at < each {
            return (t * each + at, 0..STRIPS);
        }
        let half = start - t * each + at - each;
        let strips = half % 2 * (STRIPS / 2)..(half % 2 + 1) * (STRIPS / 2);
        (each * self.threads + half / 2, strips)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_cover_every_strip_once_and_shares_differ_by_half_a_panel() {
        for threads in 1..=9 {
            for panels in 0..=40 {
                let halves = Halves::new(panels, threads);
                let mut seen = vec![0; panels * STRIPS];
                let mut most = (usize::MAX, 0);
                for t in 0..threads {
                    let mut size = 0;
                    for item in split(halves.items(), threads, t) {
                        let (panel, strips) = halves.item(item);
                        size += strips.len();
                        strips.for_each(|s| seen[panel * STRIPS + s] += 1);
                    }
                    most = (most.0.min(size), most.1.max(size));
                }
                assert!(seen.iter().all(|&n| n == 1), "{panels} panels, {threads} threads: {seen:?}");
                assert!(most.1 - most.0 <= STRIPS / 2, "{panels} panels, {threads} threads: {most:?}");
            }
        }
    }
}
