//! A persistent team of threads that runs one closure in several parts, region after region.
//!
//! A generation runs a region every few tens of microseconds, so workers wait in three stages: spin (a region starts
//! in well under a microsecond), then yield (an oversubscribed machine still makes progress), then park (an idle
//! engine burns nothing). The calling thread runs part 0. Nothing here knows what a region computes.
//!
//! A thread that the system gives no time must not hold up the rest. So a part belongs to a worker only once the
//! worker has started it: the caller runs what nobody has started when it is done with its own. [`Team::deal`] goes
//! further: what is left of a share is taken over, down to the item that its thread is busy with.
//!
//! Regions of one team never overlap: [`Team::run`] takes a lock, so any number of threads may call it. A region
//! cannot start another region, of this or of any team: that is a bug in the caller and panics.

mod deal;
mod parts;

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use deal::{Deal, MOST_ITEMS};
pub use parts::{Disjoint, split};

/// What a region runs in every part; the argument is the part's number.
type Job<'a> = &'a (dyn Fn(usize) + Sync);

/// The first panic of a region.
type Panic = Option<Box<dyn Any + Send>>;

/// Threads that wait for work together; see the module's text.
pub struct Team {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held for the length of a region.
    region: Mutex<()>,
    deal: Deal,
    spins: usize,
}

impl Team {
    /// A team of `threads` threads including the caller; fewer if the system refuses to start more, never fewer
    /// than one. [`Team::threads`] tells.
    pub fn new(threads: usize) -> Team {
        let cores = thread::available_parallelism().map_or(1, |n| n.get());
        // Spinning on a core that another thread of the team needs only delays that thread.
        let spins = if threads <= cores { SPINS } else { SPINS / 64 };
        Team::with(threads, spins, Shared::work)
    }

    /// A team whose workers do `work`.
    fn with(threads: usize, spins: usize, work: fn(&Shared, usize, usize)) -> Team {
        let shared = Arc::new(Shared {
            epoch: Line(AtomicUsize::new(0)),
            job: AtomicPtr::new(std::ptr::null_mut()),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
            workers: (1..threads).map(|_| Line(Worker::new())).collect(),
        });
        let mut workers = Vec::new();
        for part in 1..threads {
            let shared = shared.clone();
            let worker = thread::Builder::new().name(format!("quern-{part}")).spawn(move || work(&shared, part, spins));
            match worker {
                Ok(worker) => workers.push(worker),
                Err(_) => break,
            }
        }
        let deal = Deal::new(workers.len() + 1);
        Team { shared, workers, region: Mutex::new(()), deal, spins }
    }

    /// Threads of the team, the caller of [`Team::run`] included: the parts of a region.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `f(part)` once for every `part` below [`Team::threads`], on as many threads as come, and returns when
    /// all are done. No two calls get the same number, so buffers may belong to parts.
    ///
    /// If calls panic, the others finish first and one of the panics goes on in the caller; the team stays usable.
    /// Panics if called from inside a region.
    pub fn run(&self, f: Job) {
        let inside = InRegion::enter();
        let held = self.hold();
        let panic = self.region(f);
        drop((held, inside));
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Calls `f(part, item)` once for every item of `0..items`; otherwise like [`Team::run`].
    ///
    /// Each part has a contiguous share, in order; a part that is done takes over from others' shares.
    pub fn deal(&self, items: usize, f: &(dyn Fn(usize, usize) + Sync)) {
        assert!(items <= MOST_ITEMS, "{items} items, at most {MOST_ITEMS}");
        let inside = InRegion::enter();
        let held = self.hold();
        self.deal.begin(items);
        let panic = self.region(&|part| self.deal.run(part, &|item| f(part, item)));
        drop((held, inside));
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    fn hold(&self) -> MutexGuard<'_, ()> {
        self.region.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a region; the lock is held.
    fn region(&self, f: Job) -> Panic {
        if self.workers.is_empty() {
            return catch_unwind(AssertUnwindSafe(|| f(0))).err();
        }
        let epoch = self.start(&f);
        let mut panic = catch_unwind(AssertUnwindSafe(|| f(0))).err();
        let workers = &self.shared.workers[..self.workers.len()];
        for (i, worker) in workers.iter().enumerate() {
            if worker.0.take(epoch, DONE) {
                panic = panic.or(catch_unwind(AssertUnwindSafe(|| f(i + 1))).err());
            }
        }
        let mut wait = Wait::new(self.spins);
        for worker in workers {
            while worker.0.state.load(Ordering::Acquire) != epoch.wrapping_add(DONE) {
                wait.pause();
            }
        }
        let theirs = self.shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        panic.or(theirs)
    }

    /// Publishes the job and wakes whoever is parked; returns the region's number.
    fn start(&self, job: &Job) -> usize {
        let shared = &self.shared;
        shared.job.store(job as *const Job as *mut (), Ordering::Relaxed);
        // SeqCst here and in `work`: either the worker sees the new epoch before it parks, or we see that it parked.
        let epoch = shared.epoch.0.fetch_add(STEP, Ordering::SeqCst).wrapping_add(STEP);
        for (worker, line) in self.workers.iter().zip(&shared.workers) {
            if line.0.parked.load(Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
        epoch
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.epoch.0.fetch_add(STEP, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches every panic of a job, so it cannot have ended with one.
            let _ = worker.join();
        }
    }
}

/// Keeps its content alone on its cache lines (two: adjacent lines are fetched in pairs).
#[repr(align(128))]
struct Line<T>(T);

/// What a worker and the caller of a region share about one part.
struct Worker {
    /// The last region whose part was taken or done: its number, plus [`DONE`] when it is done.
    state: AtomicUsize,
    /// Whether the worker may be asleep.
    parked: AtomicBool,
}

impl Worker {
    /// Of a team that ran no region: number 0 counts as done.
    fn new() -> Worker {
        Worker { state: AtomicUsize::new(DONE), parked: AtomicBool::new(false) }
    }

    /// Makes the part of region `epoch` that nobody started ours, `as_state`; false if somebody has it.
    fn take(&self, epoch: usize, as_state: usize) -> bool {
        // Every region leaves every part done, so there is one value to expect.
        let (last, next) = (epoch.wrapping_sub(STEP - DONE), epoch.wrapping_add(as_state));
        self.state.compare_exchange(last, next, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

/// Region numbers are multiples of this.
const STEP: usize = 2;

/// Added to a region's number in [`Worker::state`].
const DONE: usize = 1;

struct Shared {
    /// Number of the last region that was started.
    epoch: Line<AtomicUsize>,
    /// Points to the `Job` on the stack of the thread inside `region`.
    job: AtomicPtr<()>,
    stop: AtomicBool,
    /// First panic of a worker in the current region.
    panic: Mutex<Panic>,
    /// Of parts 1 and up.
    workers: Vec<Line<Worker>>,
}

impl Shared {
    fn work(&self, part: usize, spins: usize) {
        let _inside = InRegion::enter();
        let worker = &self.workers[part - 1].0;
        let mut seen = 0;
        loop {
            seen = self.await_epoch(worker, seen, spins);
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            if !worker.take(seen, 0) {
                continue;
            }
            let job = self.job.load(Ordering::Relaxed) as *const Job;
            // SAFETY: `start` stored a pointer to a live `Job` before it moved the epoch to `seen`, which
            // `await_epoch` read with acquire order, and `region` keeps the job alive until our state says done.
            let job: Job = unsafe { *job };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(part))) {
                self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
            }
            worker.state.store(seen.wrapping_add(DONE), Ordering::Release);
        }
    }

    /// Returns the epoch once it has left `seen`.
    fn await_epoch(&self, worker: &Worker, seen: usize, spins: usize) -> usize {
        let mut wait = Wait::new(spins);
        loop {
            let epoch = self.epoch.0.load(Ordering::Acquire);
            if epoch != seen {
                return epoch;
            }
            if !wait.pause() {
                continue;
            }
            worker.parked.store(true, Ordering::SeqCst);
            if self.epoch.0.load(Ordering::SeqCst) == seen {
                thread::park();
            }
            worker.parked.store(false, Ordering::SeqCst);
        }
    }
}

/// Rounds of `pause` before a waiter starts to yield: 30-100 us, the length of a usual region.
const SPINS: usize = 2048;

/// How long a waiter yields before it may park. Waking costs up to 0.6 ms, so parking must mean that the engine idles.
const YIELD: Duration = Duration::from_millis(2);

/// The stages of waiting.
struct Wait {
    spins: usize,
    yielding: Option<Instant>,
}

impl Wait {
    fn new(spins: usize) -> Wait {
        Wait { spins, yielding: None }
    }

    /// Waits a moment; true when it has been long enough to park.
    fn pause(&mut self) -> bool {
        if self.spins > 0 {
            self.spins -= 1;
            std::hint::spin_loop();
            return false;
        }
        thread::yield_now();
        self.yielding.get_or_insert_with(Instant::now).elapsed() > YIELD
    }
}

thread_local! {
    static IN_REGION: Cell<bool> = const { Cell::new(false) };
}

/// Marks this thread as inside a region until dropped.
struct InRegion;

impl InRegion {
    fn enter() -> InRegion {
        assert!(!IN_REGION.replace(true), "Team::run called from inside a region: regions do not nest");
        InRegion
    }
}

impl Drop for InRegion {
    fn drop(&mut self) {
        IN_REGION.set(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A worker that gets no time until the end.
    fn idle(shared: &Shared, _: usize, _: usize) {
        while !shared.stop.load(Ordering::Acquire) {
            thread::park();
        }
    }

    #[test]
    fn workers_that_get_no_time_hold_nobody_up() {
        let team = Team::with(4, SPINS, idle);
        assert_eq!(team.threads(), 4);
        for region in 0..100 {
            let (parts, items) = (Mutex::new(vec![]), Mutex::new(vec![]));
            team.run(&|part| parts.lock().expect("no panic").push(part));
            assert_eq!(*parts.lock().expect("no panic"), [0, 1, 2, 3]);
            team.deal(region, &|part, item| items.lock().expect("no panic").push((part, item)));
            let mut items = items.into_inner().expect("no panic");
            items.sort();
            assert_eq!(items, (0..region).map(|item| (0, item)).collect::<Vec<_>>());
        }
        // The caller's own panic lets it finish the parts of the others.
        let count = AtomicUsize::new(0);
        let result = catch_unwind(AssertUnwindSafe(|| {
            team.run(&|part| {
                assert!(part != 0, "part 0 fell");
                count.fetch_add(1, Ordering::Relaxed);
            })
        }));
        assert!(result.is_err());
        assert_eq!(count.into_inner(), 3);
    }
}
