//! The threads of a conversion. The global pool would panic where the system starts no thread.

use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};

use crate::ConvertError;

/// A pool of our own, or the one that the current thread belongs to.
#[derive(Debug)]
pub struct Threads(Option<ThreadPool>);

impl Threads {
    /// As many threads as there are processors (or `RAYON_NUM_THREADS`), else the current one.
    pub fn new() -> Result<Threads, ConvertError> {
        // In a pool already: its threads are the ones to use.
        if rayon::current_thread_index().is_some() {
            return Ok(Threads(None));
        }
        Threads::or_current(ThreadPoolBuilder::new().build())
    }

    fn or_current(built: Result<ThreadPool, ThreadPoolBuildError>) -> Result<Threads, ConvertError> {
        let pool = built.or_else(|_| ThreadPoolBuilder::new().num_threads(1).use_current_thread().build());
        pool.map(|p| Threads(Some(p))).map_err(|source| ConvertError::Threads { source })
    }

    /// Runs `work`, whose parallel parts use these threads.
    pub fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match &self.0 {
            Some(pool) => pool.install(work),
            None => work(),
        }
    }
}

#[cfg(test)]
mod tests {
    use rayon::prelude::*;

    use super::*;

    #[test]
    fn without_new_threads_the_current_one_works() {
        // In a thread of its own, which stays part of the pool.
        let worker = std::thread::spawn(|| {
            let sum = |threads: &Threads| threads.run(|| (0..1000u64).into_par_iter().sum::<u64>());
            let none = ThreadPoolBuilder::new().spawn_handler(|_| Err(std::io::Error::other("no thread"))).build();
            let threads = Threads::or_current(none).unwrap();
            assert_eq!(sum(&threads), 499_500);
            drop(threads);
            let again = Threads::new().unwrap();
            assert!(again.0.is_none());
            assert_eq!(sum(&again), 499_500);
        });
        worker.join().unwrap();
    }
}
