//! What a path means.
//!
//! A body is read, understood and tokenized on a thread that may take its time; the engine's events are turned into
//! answers here, a few microseconds at a time.

mod answer;
mod chat;
mod completions;
mod constrain;
mod embeddings;
mod fields;
mod input;
mod params;
mod run;
mod tokens;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use bytes::Bytes;
use hyper::Method;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use super::{
    ApiError, Call, Reply, State,
    intake::{self, Share},
    page,
};
use crate::engine::{EngineError, worker::Refused};
use fields::{Fields, short};

/// Answers a request.
pub async fn route(state: Arc<State>, mut call: Call) -> Reply {
    match endpoint(&call.path) {
        None => {
            let message = format!("{} {}: there is no such endpoint", call.method, call.path);
            ApiError::new(404, "not_found_error", message).into()
        }
        Some((method, _)) if call.method != method && !(method == Method::GET && call.method == Method::HEAD) => {
            let message = format!("{} {}: expected {method}", call.method, call.path);
            let mut reply = Reply::from(ApiError::new(405, "invalid_request_error", message));
            if let Reply::Whole { headers, .. } = &mut reply {
                headers.push(("allow", method.to_string()));
            }
            reply
        }
        Some((_, endpoint)) => reply(state, endpoint, &mut call).await.unwrap_or_else(Reply::from),
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Endpoint {
    Page,
    Models,
    Model,
    Chat,
    Completions,
    Embeddings,
    Tokenize,
    Detokenize,
}

fn endpoint(path: &str) -> Option<(Method, Endpoint)> {
    Some(match path {
        "/" => (Method::GET, Endpoint::Page),
        "/v1/models" => (Method::GET, Endpoint::Models),
        "/v1/chat/completions" => (Method::POST, Endpoint::Chat),
        "/v1/completions" => (Method::POST, Endpoint::Completions),
        "/v1/embeddings" => (Method::POST, Endpoint::Embeddings),
        "/tokenize" => (Method::POST, Endpoint::Tokenize),
        "/detokenize" => (Method::POST, Endpoint::Detokenize),
        _ if path.starts_with("/v1/models/") => (Method::GET, Endpoint::Model),
        _ => return None,
    })
}

/// A request that has been understood, or answered already.
enum Parsed {
    Answer(Box<answer::Task>),
    Embed(embeddings::Task),
    Done(Bytes),
}

async fn reply(state: Arc<State>, endpoint: Endpoint, call: &mut Call) -> Result<Reply, ApiError> {
    match endpoint {
        Endpoint::Page => return Ok(page::page()),
        Endpoint::Models => return Ok(Reply::json(&models(&state))),
        Endpoint::Model => return model(&state, &call.path).map(|m| Reply::json(&m)),
        _ => {}
    }
    // Both are gone when the body has been read.
    let (body, share) = (std::mem::take(&mut call.body), std::mem::take(&mut call.share));
    let shared = state.clone();
    let lane = (body.len() > LARGE_BODY).then_some(&state.lanes.read);
    let parsing = aside(lane, move || parse(&shared, endpoint, body, share));
    match answer::in_time(answer::late(&state, call.arrived), parsing).await??? {
        Parsed::Answer(task) => answer::answer(state, &call.id, call.arrived, *task).await,
        Parsed::Embed(task) => embeddings::answer(state, call.arrived, task).await,
        Parsed::Done(body) => Ok(Reply::text(200, body)),
    }
}

/// Bytes of a body that is read in the lane for large ones.
const LARGE_BODY: usize = 128 << 10;

/// Does work on another thread, in a lane where it is long. Where the client leaves before its turn has come, nobody
/// does it.
async fn aside<T: Send + 'static>(
    lane: Option<&Arc<Semaphore>>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiError> {
    let turn = match lane {
        Some(lane) => lane.clone().acquire_owned().await.ok(),
        None => None,
    };
    let task = tokio::task::spawn_blocking(move || {
        let _turn = turn;
        work()
    });
    let _undone = Abandoned(task.abort_handle());
    task.await.map_err(|_| run::server_error("the request could not be read or answered: an error of the server"))
}

/// Takes work out of the queue when it is dropped; work that has begun goes on.
struct Abandoned(tokio::task::AbortHandle);

impl Drop for Abandoned {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn parse(state: &State, endpoint: Endpoint, body: Bytes, mut share: Share) -> Result<Parsed, ApiError> {
    share.grow(intake::reading(&body))?;
    let value: Value =
        serde_json::from_slice(&body).map_err(|error| ApiError::invalid(format!("the body is no JSON: {error}")))?;
    let Value::Object(map) = &value else {
        return Err(ApiError::invalid(format!("the body is {}, expected an object", short(&value))));
    };
    let fields = Fields::new(map);
    known(state, fields)?;
    Ok(match endpoint {
        Endpoint::Chat => Parsed::Answer(Box::new(chat::parse(fields, state)?)),
        Endpoint::Completions => Parsed::Answer(Box::new(completions::parse(fields, state)?)),
        Endpoint::Embeddings => Parsed::Embed(embeddings::parse(fields, state)?),
        Endpoint::Detokenize => Parsed::Done(written(&tokens::detokenize(fields, state)?)),
        _ => Parsed::Done(written(&tokens::tokenize(fields, state)?)),
    })
}

/// An object whose empty list has these parts, each written out before: a large answer is in memory as text only.
fn with_list(object: &Value, name: &str, parts: &[String]) -> Bytes {
    let text = object.to_string();
    let list = format!("\"{name}\":[]");
    let at = text.find(&list).expect("the object has the list") + list.len() - 1;
    Bytes::from([&text[..at], &parts.join(","), &text[at..]].concat())
}

fn written(value: &Value) -> Bytes {
    Bytes::from(value.to_string())
}

/// Whether the request means this model.
fn known(state: &State, fields: Fields<'_>) -> Result<(), ApiError> {
    match fields.text("model")? {
        Some(name) if !names(state).any(|known| known == name) => Err(unknown(state, name)),
        _ => Ok(()),
    }
}

fn names(state: &State) -> impl Iterator<Item = &str> {
    std::iter::once(&state.model.name).chain(&state.model.aliases).map(String::as_str)
}

fn unknown(state: &State, name: &str) -> ApiError {
    let names: Vec<&str> = names(state).collect();
    let message = format!(
        "the model {} does not exist here, expected {}; other names can be given to it with --alias",
        short(&name.into()),
        names.join(" or ")
    );
    ApiError { code: Some("model_not_found"), ..ApiError::new(404, "invalid_request_error", message).at("model") }
}

fn models(state: &State) -> Value {
    json!({"object": "list", "data": names(state).map(|name| about(state, name)).collect::<Value>()})
}

fn model(state: &State, path: &str) -> Result<Value, ApiError> {
    let name = decoded(path.strip_prefix("/v1/models/").unwrap_or_default());
    let known = names(state).find(|&known| known == name);
    known.map(|name| about(state, name)).ok_or_else(|| unknown(state, &name))
}

fn about(state: &State, name: &str) -> Value {
    let parent = (name != state.model.name).then_some(&state.model.name);
    json!({
        "id": name,
        "object": "model",
        "created": state.model.created,
        "owned_by": "quern",
        "root": state.model.name,
        "parent": parent,
        "max_model_len": state.engine.limits().context,
    })
}

/// A path with `%2F` and the like written out.
fn decoded(path: &str) -> String {
    let hex = |two: &[u8]| u8::from_str_radix(std::str::from_utf8(two).ok()?, 16).ok();
    let (mut out, mut rest) = (vec![], path.as_bytes());
    while let [first, after @ ..] = rest {
        match (first, after.get(..2).and_then(hex)) {
            (b'%', Some(byte)) => {
                out.push(byte);
                rest = &after[2..];
            }
            _ => {
                out.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// Why the engine did not take a request.
fn refused(refused: Refused) -> ApiError {
    let message = refused.to_string();
    match refused {
        Refused::Full { .. } => ApiError {
            code: Some("rate_limit_exceeded"),
            retry_after: Some(1),
            ..ApiError::new(429, "rate_limit_error", message)
        },
        Refused::Draining => {
            ApiError { retry_after: Some(1), ..ApiError::new(503, "service_unavailable_error", message) }
        }
        Refused::Failed(_) => ApiError::new(503, "service_unavailable_error", message),
        Refused::Invalid(EngineError::ContextFull { .. }) => {
            ApiError { code: Some("context_length_exceeded"), ..ApiError::invalid(message) }
        }
        Refused::Invalid(_) => ApiError::invalid(message),
    }
}
