//! The state of a CTA while its warps run, and how what goes wrong is said.

use super::Warp;
use super::barrier::Arrivals;
use super::bytes::Bytes;
use super::launch::Launch;
use crate::check::shared::SharedShadow;
use crate::check::{Fault, Kind};
use crate::stats::Traffic;

/// One CTA after the other runs in this, on one host thread.
pub struct Cta<'l> {
    pub launch: &'l Launch<'l>,
    pub shared: Bytes,
    pub at: [u32; 3],
    /// Number of the CTA in the grid.
    pub number: u32,
    /// First byte and end of the allocation that was used last.
    pub block: (u64, u64, usize),
    /// Of each instruction: how often a warp, and how many lanes, ran it.
    pub counts: Vec<(u64, u64)>,
    pub traffic: Traffic,
    pub arrivals: Arrivals,
    /// What is known of shared memory's bytes, if it is checked.
    pub shadow: Option<Box<SharedShadow>>,
    /// Instructions of the present CTA, to end those that never do.
    pub spent: u64,
}

impl<'l> Cta<'l> {
    pub fn new(launch: &'l Launch<'l>) -> Cta<'l> {
        let bytes = launch.shape.shared as usize;
        Cta {
            launch,
            shared: Bytes::new(bytes),
            at: [0; 3],
            number: 0,
            block: (1, 0, 0),
            counts: vec![(0, 0); launch.kernel.code.len()],
            traffic: Traffic::default(),
            arrivals: Arrivals::default(),
            shadow: launch.checks.then(|| Box::new(SharedShadow::new(bytes))),
            spent: 0,
        }
    }

    /// Turns to CTA `number`.
    pub fn begin(&mut self, number: u32) {
        let grid = self.launch.shape.grid;
        self.number = number;
        self.at = [number % grid[0], number / grid[0] % grid[1], number / grid[0] / grid[1]];
        // What nobody wrote must not look like a zero.
        self.shared.fill(FILL);
        self.spent = 0;
        self.arrivals = Arrivals::default();
        if let Some(shadow) = &mut self.shadow {
            shadow.begin();
        }
    }

    /// Something that a check found; the kernel goes on.
    #[cold]
    pub fn report(&self, w: &Warp, pc: u32, lane: usize, kind: Kind, what: &str) {
        let launch = self.launch;
        launch.reports.add(kind, pc, || {
            let [x, y, z] = self.at;
            format!(
                "{}: {what}; kernel {}, CTA ({x},{y},{z}), warp {}, lane {lane}, {}",
                kind.name(),
                launch.kernel.name,
                w.id,
                launch.module.place(launch.kernel.code[pc as usize].line)
            )
        });
    }

    /// Something that ends the kernel.
    #[cold]
    pub fn fault(&self, w: &Warp, pc: u32, lane: usize, kind: Kind, what: &str) -> Fault {
        self.report(w, pc, lane, kind, what);
        self.launch.reports.stop(kind);
        Fault
    }
}

/// What memory holds that nobody wrote: NaN, whatever float it is read as.
pub const FILL: u8 = 0xff;
