//! The engine on a thread of its own: requests and events go through channels.
//!
//! The thread never waits for a client: events go into queues. Tokens that nobody reads are bounded ([`MOST_UNREAD`]);
//! beyond, what was submitted fails with [`Failure::Unread`]. A request whose [`Submission`] is dropped is cancelled before the next step. A failing engine ends every
//! request with [`Failure::Engine`] and takes no more.

use std::{
    collections::HashMap,
    panic::AssertUnwindSafe,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread::JoinHandle,
};

use tokio::sync::{
    Notify,
    mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
};

use super::{EngineError, Event, Failure, Finish, Generator, Limits, Request, Stats};

/// Why requests were not taken.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// The queue is full; later there may be room.
    #[error("the queue is full: {waiting} requests wait, at most {most} may (--max-queue); try again later")]
    Full {
        /// Requests waiting.
        waiting: usize,
        /// Requests that may wait.
        most: usize,
    },
    /// The server is about to stop.
    #[error("the server is shutting down and takes no new requests")]
    Draining,
    /// The engine has failed.
    #[error("the engine failed: {0}; restart the server")]
    Failed(String),
    /// A request that can never run.
    #[error(transparent)]
    Invalid(#[from] EngineError),
}

/// The way to an engine on its thread; clones lead to the same one.
#[derive(Clone)]
pub struct Handle {
    commands: mpsc::Sender<Command>,
    shared: Arc<Shared>,
}

struct Shared {
    limits: Limits,
    /// Requests that may wait.
    most_waiting: usize,
    /// Requests submitted and not started yet.
    waiting: AtomicUsize,
    /// Requests submitted and not ended yet.
    open: AtomicUsize,
    draining: AtomicBool,
    failed: Mutex<Option<String>>,
    stats: Mutex<Stats>,
}

enum Command {
    Submit { requests: Vec<Request>, submission: u64, events: Queue },
    Cancel { submission: u64, index: Option<u64> },
    Stop,
}

/// Bytes of tokens of one submission that may wait to be read: some ten thousand without logprobs.
pub const MOST_UNREAD: usize = 4 << 20;

/// Tokens on their way to a reader.
#[derive(Debug, Default)]
pub struct Unread {
    bytes: AtomicUsize,
    over: AtomicBool,
    changed: Notify,
}

impl Unread {
    /// Returns when there are too many; the submission has failed then.
    pub async fn over(&self) -> Failure {
        while !self.over.load(Ordering::Acquire) {
            self.changed.notified().await;
        }
        self.failure()
    }

    fn failure(&self) -> Failure {
        Failure::Unread { waiting: self.bytes.load(Ordering::Acquire) }
    }
}

/// The sending end of a submission's events.
#[derive(Clone)]
struct Queue {
    events: UnboundedSender<Event>,
    unread: Arc<Unread>,
}

impl Queue {
    fn send(&self, event: Event) {
        let weight = weight(&event);
        if weight > 0 {
            if self.unread.over.load(Ordering::Acquire) {
                return;
            }
            if self.unread.bytes.fetch_add(weight, Ordering::AcqRel) > MOST_UNREAD {
                self.unread.over.store(true, Ordering::Release);
                return self.unread.changed.notify_one();
            }
        }
        // A reader that went away has cancelled the request.
        let _ = self.events.send(event);
    }
}

/// Bytes in the queue of what comes with every step. Other events come once for each request and count for nothing.
fn weight(event: &Event) -> usize {
    match event {
        Event::Token { top, .. } => size_of::<Event>() + size_of_val(&top[..]),
        Event::Guessed { .. } => size_of::<Event>(),
        _ => 0,
    }
}

/// Requests in progress. Dropping it cancels those that have not ended.
pub struct Submission {
    id: u64,
    left: usize,
    events: UnboundedReceiver<Event>,
    unread: Arc<Unread>,
    commands: mpsc::Sender<Command>,
}

impl Submission {
    /// The next event; `request` in it is the index in what was submitted. `None` after the last one of all requests.
    pub async fn next(&mut self) -> Option<Event> {
        if self.left == 0 {
            return None;
        }
        let event = self.events.recv().await;
        self.seen(event)
    }

    /// As [`Submission::next`], for a thread that may wait.
    pub fn next_blocking(&mut self) -> Option<Event> {
        if self.left == 0 {
            return None;
        }
        let event = self.events.blocking_recv();
        self.seen(event)
    }

    /// The tokens that wait.
    pub fn unread(&self) -> Arc<Unread> {
        self.unread.clone()
    }

    fn seen(&mut self, event: Option<Event>) -> Option<Event> {
        if self.unread.over.load(Ordering::Acquire) {
            // Some were left out; what is still open is cancelled when this is dropped.
            return Some(Event::Failed { request: 0, error: self.unread.failure() });
        }
        match &event {
            Some(event @ (Event::Token { .. } | Event::Guessed { .. })) => {
                self.unread.bytes.fetch_sub(weight(event), Ordering::AcqRel);
            }
            None => self.left = 0,
            Some(Event::Finished { .. } | Event::Failed { .. }) => self.left -= 1,
            Some(_) => {}
        }
        event
    }

    /// Ends one request with [`Finish::Cancelled`]; one that has ended is left alone.
    pub fn cancel(&self, index: u64) {
        let _ = self.commands.send(Command::Cancel { submission: self.id, index: Some(index) });
    }
}

impl Drop for Submission {
    fn drop(&mut self) {
        if self.left > 0 {
            let _ = self.commands.send(Command::Cancel { submission: self.id, index: None });
        }
    }
}

/// The engine's thread.
pub struct Worker {
    handle: Handle,
    thread: JoinHandle<Box<dyn Generator + Send>>,
}

impl Worker {
    /// Starts the thread. At most `most_waiting` requests may wait for their first step.
    pub fn start(engine: Box<dyn Generator + Send>, most_waiting: usize) -> std::io::Result<Worker> {
        let (commands, received) = mpsc::channel();
        let shared = Arc::new(Shared {
            limits: engine.limits(),
            most_waiting,
            waiting: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
            draining: AtomicBool::new(false),
            failed: Mutex::new(None),
            stats: Mutex::new(engine.stats()),
        });
        let handle = Handle { commands, shared: shared.clone() };
        let work = move || {
            let mut thread = Thread { engine, commands: received, shared, requests: HashMap::new() };
            // A panic is a bug, and everybody must learn of it: those who wait, those to come, and /health.
            if std::panic::catch_unwind(AssertUnwindSafe(|| thread.run())).is_err() {
                thread.fail("it panicked; the log says where");
            }
            thread.engine
        };
        // Grammars are followed here, and they may be deeply nested. A stack that is not touched costs nothing.
        let thread = std::thread::Builder::new().name("engine".into()).stack_size(STACK).spawn(work)?;
        Ok(Worker { handle, thread })
    }

    /// The way to it.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Cancels what is in progress, ends the thread and returns the engine; `None` if it panicked.
    pub fn stop(self) -> Option<Box<dyn Generator + Send>> {
        let _ = self.handle.commands.send(Command::Stop);
        self.thread.join().ok()
    }
}

impl Handle {
    /// Submits requests together: all are taken or none.
    pub fn submit(&self, requests: Vec<Request>) -> Result<Submission, Refused> {
        let shared = &*self.shared;
        if let Some(reason) = lock(&shared.failed).clone() {
            return Err(Refused::Failed(reason));
        }
        if shared.draining.load(Ordering::Acquire) {
            return Err(Refused::Draining);
        }
        requests.iter().try_for_each(|r| shared.limits.check(r))?;
        let count = requests.len();
        let most = shared.most_waiting;
        let room =
            |waiting: usize| (waiting + count <= most.max(count) && waiting < most.max(1)).then_some(waiting + count);
        shared
            .waiting
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, room)
            .map_err(|waiting| Refused::Full { waiting, most })?;
        shared.open.fetch_add(count, Ordering::AcqRel);
        let (sender, events) = unbounded_channel();
        let unread = Arc::new(Unread::default());
        let queue = Queue { events: sender, unread: unread.clone() };
        let id = next_id();
        if self.commands.send(Command::Submit { requests, submission: id, events: queue }).is_err() {
            shared.waiting.fetch_sub(count, Ordering::AcqRel);
            shared.open.fetch_sub(count, Ordering::AcqRel);
            return Err(Refused::Failed("its thread has ended".into()));
        }
        Ok(Submission { id, left: count, events, unread, commands: self.commands.clone() })
    }

    /// What a request must keep to.
    pub fn limits(&self) -> Limits {
        self.shared.limits
    }

    /// State after the last step; `waiting` counts what was submitted since, too.
    pub fn stats(&self) -> Stats {
        Stats { waiting: self.shared.waiting.load(Ordering::Acquire), ..*lock(&self.shared.stats) }
    }

    /// Requests that have not ended.
    pub fn open(&self) -> usize {
        self.shared.open.load(Ordering::Acquire)
    }

    /// Takes no more requests from now on.
    pub fn drain(&self) {
        self.shared.draining.store(true, Ordering::Release);
    }

    /// Whether [`Handle::drain`] was called.
    pub fn draining(&self) -> bool {
        self.shared.draining.load(Ordering::Acquire)
    }

    /// Why the engine cannot go on, if so.
    pub fn failure(&self) -> Option<String> {
        lock(&self.shared.failed).clone()
    }
}

/// Stack of the engine's thread, bytes.
const STACK: usize = 512 << 20;

/// An error with its causes.
fn chain(error: &EngineError) -> String {
    let mut reason = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(e) = cause {
        reason += &format!(": {e}");
        cause = e.source();
    }
    reason
}

fn next_id() -> u64 {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// What is behind these locks is whole at any time.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Thread {
    engine: Box<dyn Generator + Send>,
    commands: mpsc::Receiver<Command>,
    shared: Arc<Shared>,
    /// By the engine's number.
    requests: HashMap<u64, Open>,
}

/// A request that has not ended.
struct Open {
    submission: u64,
    index: u64,
    events: Queue,
    started: bool,
}

impl Thread {
    fn run(&mut self) {
        let mut events = vec![];
        loop {
            // Without work it sleeps until somebody comes; with work it only looks.
            while let Some(command) = self.next_command() {
                if !self.obey(command) {
                    return self.end_all(|request| Event::Finished { request, finish: Finish::Cancelled });
                }
            }
            let stepped = self.engine.step(&mut events);
            *lock(&self.shared.stats) = self.engine.stats();
            events.drain(..).for_each(|event| self.deliver(event));
            if let Err(error) = stepped {
                return self.fail(&chain(&error));
            }
        }
    }

    fn next_command(&mut self) -> Option<Command> {
        if self.requests.is_empty() {
            // All handles are gone: nobody can ever come.
            return Some(self.commands.recv().unwrap_or(Command::Stop));
        }
        self.commands.try_recv().ok()
    }

    /// False: stop.
    fn obey(&mut self, command: Command) -> bool {
        match command {
            Command::Stop => return false,
            Command::Cancel { submission, index } => {
                let meant = |r: &Open| r.submission == submission && index.is_none_or(|i| i == r.index);
                let ids: Vec<u64> = self.requests.iter().filter(|(_, r)| meant(r)).map(|(&id, _)| id).collect();
                ids.into_iter().for_each(|id| self.engine.cancel(id));
            }
            Command::Submit { requests, submission, events } => {
                for (index, request) in (0u64..).zip(requests) {
                    let open = Open { submission, index, events: events.clone(), started: false };
                    match self.engine.add(request) {
                        Ok(id) => drop(self.requests.insert(id, open)),
                        // Checked before: only an engine with limits of its own comes here.
                        Err(error) => self
                            .end(open, |request| Event::Failed { request, error: Failure::Engine(error.to_string()) }),
                    }
                }
            }
        }
        true
    }

    fn deliver(&mut self, mut event: Event) {
        let id = *event.request_mut();
        if matches!(event, Event::Finished { .. } | Event::Failed { .. }) {
            if let Some(open) = self.requests.remove(&id) {
                self.end(open, |index| {
                    *event.request_mut() = index;
                    event
                });
            }
            return;
        }
        let Some(open) = self.requests.get_mut(&id) else { return };
        if !std::mem::replace(&mut open.started, true) {
            self.shared.waiting.fetch_sub(1, Ordering::AcqRel);
        }
        *event.request_mut() = open.index;
        open.events.send(event);
    }

    fn end(&self, open: Open, last: impl FnOnce(u64) -> Event) {
        if !open.started {
            self.shared.waiting.fetch_sub(1, Ordering::AcqRel);
        }
        self.shared.open.fetch_sub(1, Ordering::AcqRel);
        open.events.send(last(open.index));
    }

    fn end_all(&mut self, last: impl Fn(u64) -> Event) {
        for (_, open) in std::mem::take(&mut self.requests) {
            self.end(open, &last);
        }
    }

    /// Tells everybody, now and later.
    fn fail(&mut self, reason: &str) {
        let reason = reason.to_string();
        *lock(&self.shared.failed) = Some(reason.clone());
        {
            let mut stats = lock(&self.shared.stats);
            (stats.running, stats.blocks_held) = (0, 0);
        }
        let failed = |request| Event::Failed { request, error: Failure::Engine(reason.clone()) };
        self.end_all(failed);
        // Whoever came meanwhile.
        while let Ok(command) = self.commands.recv() {
            match command {
                Command::Stop => return,
                Command::Cancel { .. } => {}
                Command::Submit { requests, submission, events } => {
                    for index in 0..requests.len() as u64 {
                        self.end(Open { submission, index, events: events.clone(), started: false }, failed);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Panics in its second step.
    struct Broken(usize);

    impl Generator for Broken {
        fn add(&mut self, _: Request) -> Result<u64, EngineError> {
            Ok(0)
        }

        fn cancel(&mut self, _: u64) {}

        fn step(&mut self, _: &mut Vec<Event>) -> Result<bool, EngineError> {
            self.0 += 1;
            assert!(self.0 < 2, "a bug");
            Ok(true)
        }

        fn max_context(&self) -> usize {
            100
        }
    }

    /// Gives a token to everybody in every step, for ever.
    #[derive(Default)]
    struct Endless(Vec<u64>, u64);

    impl Generator for Endless {
        fn add(&mut self, _: Request) -> Result<u64, EngineError> {
            self.1 += 1;
            self.0.push(self.1);
            Ok(self.1)
        }

        fn cancel(&mut self, request: u64) {
            self.0.retain(|&r| r != request);
        }

        fn step(&mut self, events: &mut Vec<Event>) -> Result<bool, EngineError> {
            let top = vec![(5, -1.0); 20];
            events.extend(self.0.iter().map(|&request| Event::Token {
                request,
                id: 5,
                logprob: None,
                top: top.clone(),
            }));
            Ok(true)
        }

        fn max_context(&self) -> usize {
            100
        }
    }

    #[test]
    fn tokens_that_nobody_reads_are_bounded() {
        let worker = Worker::start(Box::new(Endless::default()), 300).unwrap();
        let handle = worker.handle();
        let request = || Request { prompt: vec![1], max_tokens: 5, ..Request::default() };
        let mut stands = handle.submit(vec![request(); 128]).unwrap();
        let mut reads = handle.submit(vec![request()]).unwrap();
        // The other goes on.
        while !stands.unread().over.load(Ordering::Acquire) {
            assert!(matches!(reads.next_blocking(), Some(Event::Token { .. })));
        }
        let waiting = stands.unread().bytes.load(Ordering::Acquire);
        assert!((MOST_UNREAD..MOST_UNREAD + 1000).contains(&waiting), "{waiting}");
        let failed =
            |e| matches!(e, Some(Event::Failed { error: Failure::Unread { waiting }, .. }) if waiting > MOST_UNREAD);
        assert!(failed(stands.next_blocking()));
        let waiting = stands.events.len();
        assert!(
            waiting > 10_000 && waiting * weight(&reads.next_blocking().unwrap()) <= MOST_UNREAD + 1000,
            "{waiting}"
        );
        // Beyond that nothing is kept.
        for _ in 0..100 {
            assert!(matches!(reads.next_blocking(), Some(Event::Token { .. })));
        }
        assert_eq!(stands.events.len(), waiting);
    }

    #[test]
    fn a_panic_of_the_engine_reaches_everybody() {
        let worker = Worker::start(Box::new(Broken(0)), 2).unwrap();
        let handle = worker.handle();
        let request = || Request { prompt: vec![1], max_tokens: 5, ..Request::default() };
        let mut waiting = handle.submit(vec![request()]).unwrap();
        let failed =
            |e| matches!(e, Some(Event::Failed { error: Failure::Engine(reason), .. }) if reason.contains("panicked"));
        assert!(failed(waiting.next_blocking()));
        assert!(waiting.next_blocking().is_none());
        assert!(handle.failure().is_some());
        assert_eq!((handle.stats().waiting, handle.open()), (0, 0));
        assert!(matches!(handle.submit(vec![request()]), Err(Refused::Failed(_))));
        assert!(worker.stop().is_some());
    }
}
