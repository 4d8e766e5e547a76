//! `/v1/embeddings`: a text as one vector of length 1.

use std::{sync::Arc, time::Instant};

use bytes::Bytes;
use serde_json::{Value, json};

use super::{
    answer::{in_time, late},
    aside,
    fields::Fields,
    input::inputs,
    run::{Run, Update, server_error},
};
use crate::{
    engine::{Limits, Pooling, Request},
    server::{ApiError, Reply, State},
    text::TextStream,
};

/// A request that has been understood.
#[derive(Debug)]
pub struct Task {
    requests: Vec<Request>,
    base64: bool,
}

/// Reads a request.
pub fn parse(fields: Fields<'_>, state: &State) -> Result<Task, ApiError> {
    let base64 = match fields.text("encoding_format")? {
        None | Some("float") => false,
        Some("base64") => true,
        Some(_) => return Err(fields.wrong("encoding_format", "float or base64")),
    };
    let pooling = match fields.text("pooling")? {
        None | Some("mean") => Pooling::Mean,
        Some("last") => Pooling::Last,
        Some(_) => return Err(fields.wrong("pooling", "mean or last")),
    };
    let Limits { context, hidden, .. } = state.engine.limits();
    if let Some(asked) = fields.integer("dimensions", 1..=i64::MAX)?.filter(|&n| n != hidden as i64) {
        let message = format!("dimensions is {asked}, expected {hidden} or nothing: vectors cannot be cut");
        return Err(ApiError::invalid(message).at("dimensions"));
    }
    let cache_salt = fields.text("cache_salt")?.map(str::to_string);
    let mut requests = vec![];
    for input in inputs(fields, "input", state)? {
        if input.tokens.len() > context {
            let message = format!("{} has {} tokens, the context holds {context}", input.path, input.tokens.len());
            let error = ApiError::invalid(message).at(input.path);
            return Err(ApiError { code: Some("context_length_exceeded"), ..error });
        }
        let (prompt, cache_salt) = (input.tokens, cache_salt.clone());
        requests.push(Request { prompt, embed: Some(pooling), cache_salt, ..Request::default() });
    }
    Ok(Task { requests, base64 })
}

/// Answers a task.
pub async fn answer(state: Arc<State>, arrived: Instant, task: Task) -> Result<Reply, ApiError> {
    let tokens: usize = task.requests.iter().map(|r| r.prompt.len()).sum();
    let mut vectors: Vec<Option<Vec<f32>>> = vec![None; task.requests.len()];
    let mut run = Run::start(state.clone(), arrived, task.requests, &TextStream::default(), None)?;
    let late = late(&state, arrived);
    while let Some((at, update)) = in_time(late, run.next()).await?? {
        if let Update::Embedding(values) = update {
            vectors[at] = Some(values);
        }
    }
    let vectors: Option<Vec<Vec<f32>>> = vectors.into_iter().collect();
    let vectors = vectors.ok_or_else(|| server_error("the engine gave no vector"))?;
    let large = vectors.iter().map(Vec::len).sum::<usize>() >= LARGE;
    let (shared, base64) = (state.clone(), task.base64);
    let write = move || written(&shared, vectors, base64, tokens);
    let body = if large { in_time(late, aside(Some(&state.lanes.write), write)).await?? } else { write() };
    Ok(Reply::text(200, body))
}

/// Numbers of an answer that is written on another thread.
const LARGE: usize = 4096;

/// The answer.
fn written(state: &State, vectors: Vec<Vec<f32>>, base64: bool, tokens: usize) -> Bytes {
    let vector = |(index, mut values): (usize, Vec<f32>)| {
        normalize(&mut values);
        let vector: Value = match base64 {
            true => self::base64(&values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()).into(),
            false => values.iter().map(|&x| super::answer::decimal(x)).collect(),
        };
        json!({"object": "embedding", "index": index, "embedding": vector}).to_string()
    };
    let data: Vec<String> = vectors.into_iter().enumerate().map(vector).collect();
    let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
    super::with_list(&json!({"object": "list", "data": [], "model": state.model.name, "usage": usage}), "data", &data)
}

/// Length 1; a vector of zeros stays.
fn normalize(values: &mut [f32]) {
    let length = values.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
    if length > 0.0 {
        values.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
}

/// RFC 4648, with padding.
fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let bits = (0..3).fold(0, |bits, i| bits << 8 | u32::from(three.get(i).copied().unwrap_or(0)));
        for i in 0..4 {
            let letter = LETTERS[(bits >> (18 - 6 * i) & 63) as usize];
            out.push(if i <= three.len() { letter.into() } else { '=' });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_rfc_4648() {
        for (bytes, text) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")] {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
        assert_eq!(base64(&[0xFF, 0xEF, 0xBE]), "/+++");
    }

    #[test]
    fn vectors_have_length_one_or_none() {
        let mut v = [3.0, 0.0, -4.0];
        normalize(&mut v);
        assert_eq!(v, [0.6, 0.0, -0.8]);
        let mut zeros = [0.0, 0.0];
        normalize(&mut zeros);
        assert_eq!(zeros, [0.0, 0.0]);
    }
}
