//! `quern serve`: an OpenAI-compatible HTTP endpoint over the engine's thread.
//!
//! Connections, sizes and time limits are `http`'s business, what a path means `api`'s, and what
//! was measured `metrics`'. Nothing here waits for the engine or makes it wait.

pub mod api;
pub mod gate;
pub mod http;
pub mod intake;
pub mod listen;
pub mod log;
pub mod metrics;
pub mod page;
pub mod peer;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use hyper::{HeaderMap, Method};
use serde_json::{Map, Value, json};
use tokio::sync::Semaphore;

use crate::{engine::worker::Handle, grammar::GrammarFactory, text::TextModel};

/// What every request needs.
pub struct State {
    /// The engine.
    pub engine: Handle,
    /// Tokenizer and template.
    pub text: Arc<TextModel>,
    /// What the model is called and how it is run.
    pub model: ModelInfo,
    /// What was measured.
    pub metrics: metrics::Metrics,
    /// What makes constraints of answers.
    pub grammars: GrammarFactory,
    /// Where requests and answers that take long to read and write wait for each other.
    pub lanes: Lanes,
    /// Says something to whoever runs the server.
    pub note: Arc<dyn Fn(&str) + Send + Sync>,
    /// Whether requests may say who goes first.
    pub priorities: bool,
    /// Longest time from a request's head to its last token; `None`: any.
    pub timeout: Option<Duration>,
}

impl State {
    /// A server that has measured nothing yet and gives requests any time.
    pub fn new(engine: Handle, text: Arc<TextModel>, model: ModelInfo) -> State {
        let grammars = GrammarFactory::new(text.clone(), engine.limits().vocab);
        State {
            engine,
            text,
            model,
            metrics: metrics::Metrics::default(),
            grammars,
            lanes: Lanes::default(),
            note: Arc::new(|_| {}),
            priorities: true,
            timeout: None,
        }
    }
}

/// One large request is read at a time and one large answer written, so that small ones always find a thread.
#[derive(Debug, Clone)]
pub struct Lanes {
    /// Large requests.
    pub read: Arc<Semaphore>,
    /// Large answers.
    pub write: Arc<Semaphore>,
}

impl Default for Lanes {
    fn default() -> Lanes {
        Lanes { read: Arc::new(Semaphore::new(1)), write: Arc::new(Semaphore::new(1)) }
    }
}

/// The model, as the endpoints name it.
#[derive(Debug, Clone, Default)]
pub struct ModelInfo {
    /// Its name.
    pub name: String,
    /// Other names that requests may use.
    pub aliases: Vec<String>,
    /// Seconds since 1970, when it was loaded.
    pub created: u64,
    /// Numeric mode, instruction set and threads.
    pub device: String,
    /// Sampling defaults of the file: temperature, top_k, top_p, min_p, repetition_penalty.
    pub defaults: quern_kernels::sample::SamplingParams,
}

/// A request whose body has arrived.
#[derive(Debug)]
pub struct Call {
    /// GET, POST ...
    pub method: Method,
    /// `/v1/models`
    pub path: String,
    /// What stands behind `?`.
    pub query: Option<String>,
    /// Headers.
    pub headers: HeaderMap,
    /// The whole body.
    pub body: Bytes,
    /// The memory that reading the body may take.
    pub share: intake::Share,
    /// Names the request in logs, answers and the `X-Request-Id` header.
    pub id: String,
    /// When its head had been read.
    pub arrived: Instant,
}

/// What is sent back.
#[derive(Debug)]
pub enum Reply {
    /// A body at once.
    Whole {
        /// HTTP status.
        status: u16,
        /// MIME type.
        content_type: &'static str,
        /// Further headers.
        headers: Vec<(&'static str, String)>,
        /// The body.
        body: Bytes,
    },
    /// Server-sent events, each item flushed as it comes. The receiver is dropped when the client vanishes.
    Events(tokio::sync::mpsc::Receiver<Bytes>),
}

impl Reply {
    /// Status 200 and JSON.
    pub fn json(value: &Value) -> Reply {
        Reply::with_status(200, value)
    }

    /// JSON.
    pub fn with_status(status: u16, value: &Value) -> Reply {
        Reply::text(status, Bytes::from(value.to_string()))
    }

    /// JSON that has been written out.
    pub fn text(status: u16, body: Bytes) -> Reply {
        Reply::Whole { status, content_type: "application/json", headers: vec![], body }
    }
}

/// An answer that says what went wrong, in OpenAI's shape.
#[derive(Debug, Clone, PartialEq)]
pub struct ApiError {
    /// HTTP status.
    pub status: u16,
    /// `invalid_request_error` ...
    pub kind: &'static str,
    /// What, which, expected, got.
    pub message: String,
    /// The field concerned.
    pub param: Option<String>,
    /// `context_length_exceeded` ...
    pub code: Option<&'static str>,
    /// Seconds after which it may be tried again.
    pub retry_after: Option<u64>,
}

impl ApiError {
    /// Status 400: the request can never be answered.
    pub fn invalid(message: impl Into<String>) -> ApiError {
        ApiError::new(400, "invalid_request_error", message)
    }

    /// Any status.
    pub fn new(status: u16, kind: &'static str, message: impl Into<String>) -> ApiError {
        ApiError { status, kind, message: message.into(), param: None, code: None, retry_after: None }
    }

    /// Names the field.
    pub fn at(self, param: impl Into<String>) -> ApiError {
        ApiError { param: Some(param.into()), ..self }
    }

    /// The body.
    pub fn body(&self) -> Value {
        let mut error = Map::new();
        error.insert("message".into(), self.message.clone().into());
        error.insert("type".into(), self.kind.into());
        error.insert("param".into(), self.param.clone().map_or(Value::Null, Value::from));
        error.insert("code".into(), self.code.map_or(Value::Null, Value::from));
        json!({ "error": error })
    }
}

impl From<ApiError> for Reply {
    fn from(error: ApiError) -> Reply {
        let mut reply = Reply::with_status(error.status, &error.body());
        if let (Reply::Whole { headers, .. }, Some(seconds)) = (&mut reply, error.retry_after) {
            headers.push(("retry-after", seconds.to_string()));
        }
        reply
    }
}
