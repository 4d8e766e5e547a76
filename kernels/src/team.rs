//! A persistent team of threads that runs one closure on every thread, region after region.
//!
//! A generation runs a region every few tens of microseconds, so workers wait in three stages: spin (a region starts
//! in well under a microsecond), then yield (an oversubscribed machine still makes progress), then park (an idle
//! engine burns nothing). The calling thread is thread 0. Nothing here knows what a region computes.
//!
//! Regions of one team never overlap: [`Team::run`] takes a lock, so any number of threads may call it. A region
//! cannot start another region, of this or of any team: that is a bug in the caller and panics.

use std::any::Any;
use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// What a region runs on every thread; the argument is the thread's number.
type Job<'a> = &'a (dyn Fn(usize) + Sync);

/// Threads that wait for work together; see the module's text.
pub struct Team {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held for the length of a region.
    region: Mutex<()>,
    spins: usize,
}

impl Team {
    /// A team of `threads` threads including the caller; fewer if the system refuses to start more, never fewer
    /// than one. [`Team::threads`] tells.
    pub fn new(threads: usize) -> Team {
        let cores = thread::available_parallelism().map_or(1, |n| n.get());
        // Spinning on a core that another thread of the team needs only delays that thread.
        let spins = if threads <= cores { SPINS } else { SPINS / 64 };
        let shared = Arc::new(Shared {
            epoch: Line(AtomicUsize::new(0)),
            done: Line(AtomicUsize::new(0)),
            job: AtomicPtr::new(std::ptr::null_mut()),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
            parked: (1..threads).map(|_| Line(AtomicBool::new(false))).collect(),
        });
        let mut workers = Vec::new();
        for tid in 1..threads {
            let shared = shared.clone();
            let worker = thread::Builder::new().name(format!("quern-{tid}")).spawn(move || shared.work(tid, spins));
            match worker {
                Ok(worker) => workers.push(worker),
                Err(_) => break,
            }
        }
        Team { shared, workers, region: Mutex::new(()), spins }
    }

    /// Threads of the team, the caller of [`Team::run`] included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `f(tid)` for every `tid` below [`Team::threads`], each on its own thread, and returns when all are done.
    ///
    /// If calls panic, the others finish first and one of the panics goes on in the caller; the team stays usable.
    /// Panics if called from inside a region.
    pub fn run(&self, f: Job) {
        let inside = InRegion::enter();
        let held = self.region.lock().unwrap_or_else(PoisonError::into_inner);
        let mine = if self.workers.is_empty() {
            catch_unwind(AssertUnwindSafe(|| f(0)))
        } else {
            self.start(&f);
            let mine = catch_unwind(AssertUnwindSafe(|| f(0)));
            let mut wait = Wait::new(self.spins);
            while self.shared.done.0.load(Ordering::Acquire) != self.workers.len() {
                wait.pause();
            }
            mine
        };
        let theirs = self.shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(held);
        drop(inside);
        match (mine, theirs) {
            (Err(panic), _) | (Ok(()), Some(panic)) => resume_unwind(panic),
            (Ok(()), None) => {}
        }
    }

    /// Publishes the job and wakes whoever is parked.
    fn start(&self, job: &Job) {
        let shared = &self.shared;
        shared.done.0.store(0, Ordering::Relaxed);
        shared.job.store(job as *const Job as *mut (), Ordering::Relaxed);
        // SeqCst here and in `work`: either the worker sees the new epoch before it parks, or we see that it parked.
        shared.epoch.0.fetch_add(1, Ordering::SeqCst);
        for (worker, parked) in self.workers.iter().zip(&shared.parked) {
            if parked.0.load(Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.epoch.0.fetch_add(1, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches every panic of a job, so it cannot have ended with one.
            let _ = worker.join();
        }
    }
}

/// Part `index` of `total` things cut into `parts` contiguous ranges whose lengths differ by at most one.
pub fn split(total: usize, parts: usize, index: usize) -> Range<usize> {
    total * index / parts..total * (index + 1) / parts
}

/// A slice that the threads of a region fill at places that do not overlap.
pub struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: it is a `&mut [T]` whose parts go to different threads, as `chunks_mut` would hand them out.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}
// SAFETY: as above; every access goes through `part`, whose contract forbids overlap.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    /// Takes the slice for as long as parts of it may be handed out.
    pub fn new(slice: &'a mut [T]) -> Self {
        Disjoint { start: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// Elements of the whole slice.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the slice has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements of `range`. Panics when out of bounds, like indexing.
    ///
    /// # Safety
    /// While the result is alive, no other part that shares an element with it may be alive, on any thread.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "part {range:?} of {} elements", self.len);
        // SAFETY: in bounds by the line above, unshared by the caller's promise, alive for 'a >= &self.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.end - range.start) }
    }
}

/// Keeps its content alone on its cache lines (two: adjacent lines are fetched in pairs).
#[repr(align(128))]
struct Line<T>(T);

struct Shared {
    /// Regions started so far.
    epoch: Line<AtomicUsize>,
    /// Workers that finished the current region.
    done: Line<AtomicUsize>,
    /// Points to the `Job` on the stack of the thread inside `run`.
    job: AtomicPtr<()>,
    stop: AtomicBool,
    /// First panic of a worker in the current region.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    parked: Vec<Line<AtomicBool>>,
}

impl Shared {
    fn work(&self, tid: usize, spins: usize) {
        let _inside = InRegion::enter();
        let mut seen = 0;
        loop {
            self.await_epoch(tid, seen, spins);
            seen += 1;
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            let job = self.job.load(Ordering::Relaxed) as *const Job;
            // SAFETY: `run` stored a pointer to a live `Job` before it moved the epoch, which `await_epoch` read with
            // acquire order, and keeps the job alive until `done` counts this worker.
            let job: Job = unsafe { *job };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(tid))) {
                self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
            }
            self.done.0.fetch_add(1, Ordering::Release);
        }
    }

    /// Returns once the epoch has left `seen`.
    fn await_epoch(&self, tid: usize, seen: usize, spins: usize) {
        let parked = &self.parked[tid - 1].0;
        let mut wait = Wait::new(spins);
        while self.epoch.0.load(Ordering::Acquire) == seen {
            if !wait.pause() {
                continue;
            }
            parked.store(true, Ordering::SeqCst);
            if self.epoch.0.load(Ordering::SeqCst) == seen {
                thread::park();
            }
            parked.store(false, Ordering::SeqCst);
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
