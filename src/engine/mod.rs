//! What the engine is asked for and what it answers.
//!
//! A caller adds requests, calls [`Generator::step`] until it says that nothing is left, and reads
//! the events of each step. Tokens in, tokens out: text, templates and stop strings belong to the
//! caller (`crate::text`, `crate::cli`, the server), who cancels a request when a stop string
//! appears. The commands are written against the trait, so their tests run on a fake engine.

mod run;

pub use run::{Engine, EngineOptions, OpenError};

use quern_kernels::sample::{SampleError, SamplingParams};

/// One text to continue.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// The tokens to continue; at least one, and fewer than [`Generator::max_context`].
    pub prompt: Vec<u32>,
    /// Most tokens to generate; the stop token counts.
    pub max_tokens: usize,
    /// How each next token is chosen.
    pub sampling: SamplingParams,
    /// Tokens that end the text, usually the model's end-of-text tokens.
    pub stop_ids: Vec<u32>,
    /// Take `stop_ids` as ordinary tokens.
    pub ignore_eos: bool,
    /// `Some(n)`: report the logprob of each chosen token and of the `n` most likely ones.
    pub logprobs: Option<usize>,
}

/// Why a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// The model produced one of the stop tokens (which was reported as a token).
    Stop,
    /// `max_tokens` were generated.
    Length,
    /// No room is left in the context.
    Context,
    /// [`Generator::cancel`] was called.
    Cancelled,
}

/// Something that happened in a step.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// One more token of a request, in order.
    Token {
        /// As returned by [`Generator::add`].
        request: u64,
        /// The token.
        id: u32,
        /// Natural logarithm of its probability before penalties and temperature, when the request
        /// asked for it.
        logprob: Option<f32>,
        /// The most likely tokens and their logprobs, likeliest first, when the request asked.
        top: Vec<(u32, f32)>,
    },
    /// The last event of a request; its number is free afterwards.
    Finished {
        /// As returned by [`Generator::add`].
        request: u64,
        /// Why it ended.
        finish: Finish,
    },
    /// The last event of a request for which no token could be chosen. Other requests go on.
    Failed {
        /// As returned by [`Generator::add`].
        request: u64,
        /// Why not.
        error: SampleError,
    },
}

/// Why the engine could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// Nothing to continue.
    #[error("the prompt has no tokens, at least 1 is needed; a model without a BOS token needs text")]
    EmptyPrompt,
    /// The prompt leaves no room for an answer.
    #[error("the prompt has {prompt} tokens, the context holds {context} and needs room for at least 1 answer token")]
    ContextFull {
        /// Tokens in the prompt.
        prompt: usize,
        /// Tokens the context holds.
        context: usize,
    },
    /// A token that the model does not have.
    #[error("token {token} at position {position} of the prompt, the vocabulary has {vocab} tokens")]
    UnknownToken {
        /// The token.
        token: u32,
        /// Where it stands.
        position: usize,
        /// Tokens the model knows.
        vocab: usize,
    },
    /// A sampling parameter out of range, or logits that nothing can be chosen from.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// The model could not be run.
    #[error("the model could not be run")]
    Backend(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// Something that continues texts: the engine, or a fake in tests.
pub trait Generator {
    /// Queues a request and returns its number.
    fn add(&mut self, request: Request) -> Result<u64, EngineError>;

    /// Ends a request at the next step, with [`Finish::Cancelled`]; unknown numbers are ignored.
    fn cancel(&mut self, request: u64);

    /// Runs one step and appends what happened to `events`; false when nothing is left to do.
    fn step(&mut self, events: &mut Vec<Event>) -> Result<bool, EngineError>;

    /// Tokens that fit into the context: prompt and answer together.
    fn max_context(&self) -> usize;
}
