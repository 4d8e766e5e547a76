//! A launch: its CTAs over the host's threads, and what was counted and found.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::bytes::Bytes;
use super::cta::FILL;
use super::warp::Shape;
use super::{Cta, Warp};
use crate::check::global::{Sharing, Touched};
use crate::check::{Fault, Kind, Reports};
use crate::memory::{Memory, TAG};
use crate::ptx::{Kernel, Module};
use crate::stats::{KernelStats, Traffic};

/// What is to run, and what is noted of it.
pub struct Launch<'l> {
    pub module: &'l Module,
    pub kernel: &'l Kernel,
    pub shape: Shape,
    pub params: &'l Bytes,
    pub memory: Arc<Memory>,
    /// Whether races, unwritten bytes and the like are looked for.
    pub checks: bool,
    /// Which CTAs touched which bytes, if that is looked for.
    pub sharing: Option<Sharing>,
    /// Sectors that were touched, if traffic is counted.
    pub touched: Option<Touched>,
    pub reports: Reports,
}

unsafe extern "C" {
    fn clock_gettime(clock: i32, to: *mut [i64; 2]) -> i32;
}

/// Processor time of this thread.
fn thread_time() -> Duration {
    const CLOCK_THREAD_CPUTIME_ID: i32 = 3;
    let mut time = [0; 2];
    // SAFETY: a `timespec` is two 64-bit integers on 64-bit Linux.
    unsafe { clock_gettime(CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time[0] as u64, time[1] as u32)
}

/// Warp instructions of one CTA after which it is taken for endless.
const MOST_SPENT: u64 = 1 << 33;

impl Launch<'_> {
    /// Runs all CTAs on up to `threads` threads; what they cost.
    pub fn run(&self, threads: usize) -> KernelStats {
        let ctas = self.shape.grid.iter().map(|&n| u64::from(n)).product::<u64>();
        let next = AtomicU64::new(0);
        let total = Mutex::new((KernelStats { launches: 1, ctas, ..KernelStats::default() }, Duration::ZERO));
        let work = || {
            let start = thread_time();
            let mut cta = Cta::new(self);
            let warps = self.shape.threads().div_ceil(32);
            let mut warps: Vec<Warp> = (0..warps).map(|id| Warp::new(self.kernel, id, &self.shape)).collect();
            let watch = self.checks || self.touched.is_some();
            loop {
                let number = next.fetch_add(1, Relaxed);
                if number >= ctas || self.reports.stopped() {
                    break;
                }
                let done = if watch {
                    cta.run_all::<true>(&mut warps, number as u32)
                } else {
                    cta.run_all::<false>(&mut warps, number as u32)
                };
                if done.is_err() {
                    break;
                }
            }
            let mut total = total.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            self.sum(&mut total.0, &cta.counts, &cta.traffic);
            total.1 += thread_time().saturating_sub(start);
        };
        let others = threads.min(ctas as usize).saturating_sub(1);
        if others == 0 {
            work();
        } else {
            std::thread::scope(|scope| {
                for _ in 0..others {
                    scope.spawn(work);
                }
                work();
            });
        }
        let (mut stats, time) = total.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(touched) = &self.touched {
            (stats.unique_read, stats.unique_written) = touched.bytes();
        }
        stats.nanoseconds = time.as_nanos() as u64;
        stats
    }

    fn sum(&self, stats: &mut KernelStats, counts: &[(u64, u64)], traffic: &Traffic) {
        for (&(warps, lanes), class) in counts.iter().zip(&self.kernel.classes) {
            stats.warp_instructions += warps;
            stats.thread_instructions += lanes;
            if warps != 0 {
                *stats.classes.entry(class.name()).or_default() += warps;
            }
        }
        stats.traffic.add(traffic);
    }

    /// The text at a device address, up to its zero; for messages.
    pub fn text(&self, at: u64) -> String {
        let mut text = String::new();
        for at in at..at.saturating_add(200) {
            if self.memory.find(at, 1).is_none() {
                break;
            }
            // SAFETY: the byte lies in an allocation.
            let byte = unsafe { *((at & !TAG) as *const u8) };
            if byte == 0 {
                break;
            }
            text.push(byte as char);
        }
        text
    }
}

impl Cta<'_> {
    /// Runs one CTA to its end.
    fn run_all<const WATCH: bool>(&mut self, warps: &mut [Warp], number: u32) -> Result<(), Fault> {
        self.begin(number);
        for w in warps.iter_mut() {
            w.begin(&self.launch.shape, self.at, number, FILL);
        }
        loop {
            let before = self.spent;
            for w in warps.iter_mut() {
                if w.live & !w.held() != 0 {
                    self.run::<WATCH>(w)?;
                }
            }
            if warps.iter().all(Warp::done) {
                return Ok(());
            }
            if self.spent > MOST_SPENT {
                let w = warps.iter().find(|w| !w.done()).expect("not all are done");
                let lane = w.live.trailing_zeros() as usize;
                return Err(self.fault(w, w.pcs[lane], lane, Kind::Endless, "a CTA that does not end"));
            }
            let running = warps.iter().any(|w| w.live & !w.held() != 0);
            if !self.release(warps)? && !running && self.spent == before {
                return Err(self.stuck(warps));
            }
        }
    }

    #[cold]
    fn stuck(&self, warps: &[Warp]) -> Fault {
        let waiting = warps.iter().find_map(|w| w.waiting.map(|waiting| (w, waiting)));
        match waiting {
            Some((w, waiting)) => {
                let what = format!("barrier {} waits for threads that do not come", waiting.id);
                self.fault(w, waiting.pc, 0, Kind::Deadlock, &what)
            }
            None => self.fault(&warps[0], 0, 0, Kind::Deadlock, "no warp can go on"),
        }
    }
}
