//! What the machine can do: read bandwidth, measured the way weights are read, and int8 multiply-adds.

use std::{hint::black_box, time::Instant};

use super::isa::Isa;
use crate::team::{Team, split};

/// Best of a few passes over `bytes` of memory by all threads of a team, in bytes per second.
///
/// Each thread sums a contiguous share, as decoding reads weights. Take a size well beyond the last
/// level of cache. `None` if the memory cannot be had.
pub fn read_bandwidth(team: &Team, bytes: usize) -> Option<f64> {
    let mut words = Vec::new();
    words.try_reserve_exact(bytes / 8).ok()?;
    words.resize(bytes / 8, 1u64);
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let start = Instant::now();
        team.run(&|t| {
            let mut sums = [0u64; 16];
            let (chunks, _) = words[split(words.len(), team.threads(), t)].as_chunks::<16>();
            for chunk in chunks {
                for (sum, word) in sums.iter_mut().zip(chunk) {
                    *sum ^= word;
                }
            }
            black_box(sums);
        });
        best = best.min(start.elapsed().as_secs_f64());
    }
    Some((words.len() * 8) as f64 / best)
}

/// Best of a few runs of a table's int8 multiply-add on registers, on all threads of a team: multiply-adds per second.
///
/// No kernel reaches it: nothing is loaded, unpacked or scaled.
pub fn multiply_peak(isa: &Isa, team: &Team) -> f64 {
    let mut best = 0f64;
    for _ in 0..5 {
        let start = Instant::now();
        let done = std::sync::atomic::AtomicU64::new(0);
        team.run(&|_| {
            // SAFETY: an Isa exists only where its instructions do.
            let macs = unsafe { (isa.peak)(ROUNDS) };
            done.fetch_add(macs, std::sync::atomic::Ordering::Relaxed);
        });
        best = best.max(done.into_inner() as f64 / start.elapsed().as_secs_f64());
    }
    best
}

/// A few milliseconds of the fast tables.
const ROUNDS: u64 = 2_000_000;
