//! What the server measured, for `/metrics`.

use std::time::{Duration, Instant};

/// Counters and histograms; shared by all requests.
#[derive(Debug, Default)]
pub struct Metrics {}

/// One choice of a request, at its end.
#[derive(Debug, Clone, Copy)]
pub struct Done {
    /// The request's head had been read.
    pub arrived: Instant,
    /// It left the queue.
    pub started: Option<Instant>,
    /// Its first token came.
    pub first: Option<Instant>,
    /// Its last token came.
    pub last: Option<Instant>,
    /// Tokens of its prompt.
    pub prompt_tokens: usize,
    /// Those that were found in the prefix cache.
    pub cached: usize,
    /// Tokens it generated.
    pub generated: usize,
    /// `stop`, `length`, `abort` or `error`.
    pub reason: &'static str,
}

impl Metrics {
    /// A token came so long after the one before it.
    pub fn token_gap(&self, _gap: Duration) {}

    /// A choice ended.
    pub fn done(&self, _done: &Done) {}
}
