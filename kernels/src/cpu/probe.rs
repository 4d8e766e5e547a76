//! What the machine can do: read bandwidth, measured the way weights are read.

use std::{hint::black_box, time::Instant};

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
