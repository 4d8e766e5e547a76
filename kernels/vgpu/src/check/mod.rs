//! What a GPU does not say: accesses outside of memory, unwritten bytes, races, barriers that not all reach.

pub mod global;
pub mod shared;

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// A kernel ended early; why is in the reports.
#[derive(Debug)]
pub struct Fault;

/// Kinds of mistakes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    OutOfBounds,
    Misaligned,
    Uninitialised,
    Race,
    CtaRace,
    Divergence,
    CopyWait,
    PartialWarp,
    Deadlock,
    Trap,
    Assert,
    Endless,
}

impl Kind {
    /// What a report begins with.
    pub fn name(self) -> &'static str {
        match self {
            Kind::OutOfBounds => "out of bounds",
            Kind::Misaligned => "misaligned",
            Kind::Uninitialised => "uninitialised",
            Kind::Race => "race",
            Kind::CtaRace => "race between CTAs",
            Kind::Divergence => "divergent barrier",
            Kind::CopyWait => "missing cp.async wait",
            Kind::PartialWarp => "partial warp",
            Kind::Deadlock => "deadlock",
            Kind::Trap => "trap",
            Kind::Assert => "assertion failed",
            Kind::Endless => "endless",
        }
    }

    /// The driver's error for a kernel that ends so.
    pub fn code(self) -> u32 {
        match self {
            Kind::OutOfBounds => 700,
            Kind::Misaligned => 716,
            Kind::Assert => 710,
            Kind::Endless => 702,
            _ => 719,
        }
    }
}

/// Which instructions were reported for what, and the messages.
type Found = (HashSet<(Kind, u32)>, Vec<String>);

/// Reports of one launch: each kind once for an instruction, and not more than [`Reports::MOST`].
#[derive(Default)]
pub struct Reports {
    found: Mutex<Found>,
    /// Error code of a fault, or 0.
    stopped: AtomicU32,
}

impl Reports {
    const MOST: usize = 32;

    pub fn add(&self, kind: Kind, pc: u32, message: impl FnOnce() -> String) {
        let mut found = self.found.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if found.1.len() < Self::MOST && found.0.insert((kind, pc)) {
            let message = message();
            found.1.push(message);
        }
    }

    /// Ends the launch with the error of `kind`.
    pub fn stop(&self, kind: Kind) {
        let _ = self.stopped.compare_exchange(0, kind.code(), Relaxed, Relaxed);
    }

    pub fn stopped(&self) -> bool {
        self.stopped.load(Relaxed) != 0
    }

    /// The messages and the error code, if a fault ended the launch.
    pub fn finish(self) -> (Vec<String>, Option<u32>) {
        let found = self.found.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
        let code = self.stopped.into_inner();
        (found.1, (code != 0).then_some(code))
    }
}
