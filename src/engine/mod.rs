//! What the engine is asked for and what it answers.
//!
//! A caller adds requests, calls [`Generator::step`] until it says that nothing is left, and reads
//! the events of each step. Tokens in, tokens out: text, templates and stop strings belong to the
//! caller (`crate::text`, `crate::cli`, the server), who cancels a request when a stop string
//! appears. The commands are written against the trait, so their tests run on a fake engine.

mod active;
mod ahead;
mod constraint;
mod defaults;
mod flight;
mod grow;
mod head;
mod keep;
mod memory;
mod options;
mod pace;
#[cfg(test)]
mod policy_tests;
mod run;
mod small;
pub mod worker;
mod writer;

pub use constraint::{Constraint, Grammar, TokenSet};
pub use defaults::defaults;
pub use memory::MemoryPlan;
pub use options::{EngineOptions, OpenError};
pub use run::Engine;

use std::{sync::Arc, time::Instant};

use quern_kernels::sample::{SampleError, SamplingParams};

use crate::draft::{self, Speculation};

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
    /// `Some(n)`: report the same for every token of the prompt but the first, before the first token is chosen.
    pub prompt_logprobs: Option<usize>,
    /// Who goes first when not all can run: the lower value, of equal ones the older request.
    pub priority: i32,
    /// Requests share computed prefixes only with those of the same salt.
    pub cache_salt: Option<String>,
    /// What the answer may be.
    pub constraint: Option<Constraint>,
    /// How it is guessed ahead; `None`: as the engine does. The text is the same in any case.
    pub speculation: Option<Speculation>,
    /// What the answer will be, perhaps wrong in places: all guesses are taken from it, to measure what they gain where
    /// a known share of them is right.
    pub expected: Option<Arc<[u32]>>,
    /// Whether it may be guessed from others' answers and theirs from its; `None`: if it has no salt.
    pub shares: Option<bool>,
    /// Report the hidden states of the prompt instead of continuing it; `max_tokens` is not looked at.
    pub embed: Option<Pooling>,
}

/// Logprob of a token, and the likeliest tokens in its place with theirs, likeliest first.
pub type Score = (f32, Vec<(u32, f32)>);

/// How the hidden states of a text (after the final norm) become one vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// That of the last token.
    Last,
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
    /// A request left the queue: its prompt is computed from now on. Comes once, before everything else but
    /// [`Event::Finished`] and [`Event::Failed`], which may come without it.
    Started {
        /// As returned by [`Generator::add`].
        request: u64,
        /// Tokens of the prompt that another request had computed.
        cached: usize,
        /// When: the event comes with those of the first step, which takes its time.
        at: Instant,
    },
    /// Logprobs of the prompt, where they were asked for.
    Prompt {
        /// As returned by [`Generator::add`].
        request: u64,
        /// Of each token but the first: its logprob, and the likeliest tokens in its place with theirs.
        tokens: Vec<Score>,
    },
    /// The vector of an [embedded](Request::embed) text, `[hidden]`, of no particular length. Then the request finishes.
    Embedding {
        /// As returned by [`Generator::add`].
        request: u64,
        /// The vector.
        values: Vec<f32>,
    },
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
    /// A step checked guesses of a request; comes before the tokens of the step.
    Guessed {
        /// As returned by [`Generator::add`].
        request: u64,
        /// Tokens guessed, at least one; of a tree all of them.
        drafted: usize,
        /// Of them right, and after none that was wrong.
        accepted: usize,
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
        error: Failure,
    },
}

impl Event {
    /// The request it is about.
    pub fn request_mut(&mut self) -> &mut u64 {
        match self {
            Event::Started { request, .. }
            | Event::Prompt { request, .. }
            | Event::Embedding { request, .. }
            | Event::Token { request, .. }
            | Event::Guessed { request, .. }
            | Event::Finished { request, .. }
            | Event::Failed { request, .. } => request,
        }
    }
}

/// Why a request failed on its way.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Failure {
    /// Nothing can be chosen from its logits.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// Its constraint cannot be followed.
    #[error("the constraint of the answer failed: {0}")]
    Constraint(String),
    /// The engine cannot go on.
    #[error("the engine failed: {0}")]
    Engine(String),
    /// Nobody takes the tokens.
    #[error("the answer was ended: {waiting} bytes of tokens waited for a reader that takes too few")]
    Unread {
        /// Bytes that waited.
        waiting: usize,
    },
}

/// The state of an engine, for people and metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Stats {
    /// Requests that are being computed.
    pub running: usize,
    /// Requests in the queue.
    pub waiting: usize,
    /// Tokens of a KV block.
    pub block_tokens: usize,
    /// KV blocks there are.
    pub blocks: usize,
    /// KV blocks that running requests hold.
    pub blocks_held: usize,
    /// Times a request had to give its blocks back and start again.
    pub preemptions: u64,
    /// Prompt tokens that were looked up in the prefix cache.
    pub prefix_queries: u64,
    /// Prompt tokens found there.
    pub prefix_hits: u64,
    /// What became of guesses.
    pub guesses: draft::Counts,
    /// Steps.
    pub steps: u64,
    /// Steps that were submitted while the one before was under way.
    pub overlapped: u64,
    /// Tokens computed.
    pub computed: u64,
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
    /// A request that failed on its way.
    #[error(transparent)]
    Request(#[from] Failure),
    /// The folder of computed beginnings.
    #[error("--cache-dir: {}: {source}", path.display())]
    Cache {
        /// The file or folder.
        path: std::path::PathBuf,
        /// What happened.
        source: std::io::Error,
    },
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

    /// What [`Generator::add`] checks.
    fn limits(&self) -> Limits {
        Limits { vocab: usize::MAX, context: self.max_context(), hidden: 0, writer: None }
    }

    /// State of the engine.
    fn stats(&self) -> Stats {
        Stats::default()
    }

    /// Ends what is in progress, and keeps what is to be kept for the next time; returns what there is to say about it.
    fn close(&mut self) -> Result<Option<String>, EngineError> {
        Ok(None)
    }
}

/// What a request must keep to, and may count on.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Tokens the model knows.
    pub vocab: usize,
    /// Tokens that fit into the context.
    pub context: usize,
    /// Numbers of a vector.
    pub hidden: usize,
    /// The method of the small model or head that guesses, if there is one.
    pub writer: Option<draft::Method>,
}

impl Limits {
    /// Refuses a request that can never run.
    pub fn check(&self, request: &Request) -> Result<(), EngineError> {
        let Limits { vocab, context, .. } = *self;
        if request.prompt.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        // A text that is only looked at needs no room for an answer.
        let room = if request.embed.is_some() || request.max_tokens == 0 { context + 1 } else { context };
        if request.prompt.len() >= room {
            return Err(EngineError::ContextFull { prompt: request.prompt.len(), context });
        }
        if let Some(position) = request.prompt.iter().position(|&t| t as usize >= vocab) {
            return Err(EngineError::UnknownToken { token: request.prompt[position], position, vocab });
        }
        request.sampling.validate()?;
        if let Some(&(token, _)) = request.sampling.logit_bias.iter().find(|(t, _)| *t as usize >= vocab) {
            return Err(SampleError::BiasToken { token, vocab }.into());
        }
        Ok(())
    }
}
