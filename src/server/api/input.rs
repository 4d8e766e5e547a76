//! Texts and tokens to work on: `prompt` of completions, `input` of embeddings.

use serde_json::Value;

use super::{
    fields::{Fields, wrong},
    params::token,
};
use crate::{
    server::{ApiError, State},
    text::PromptError,
};

/// Most texts of one request.
const MOST_TEXTS: usize = 2048;

/// One of possibly several inputs.
#[derive(Debug, Clone, PartialEq)]
pub struct Input {
    /// Where it stands in the request: `prompt`, or `prompt[2]`.
    pub path: String,
    /// Its tokens, at least one, all known to the model.
    pub tokens: Vec<u32>,
    /// Its text, where it came as one.
    pub text: Option<String>,
}

const EXPECTED: &str = "a string, a list of strings, a list of token ids, or a list of lists of token ids";

/// Reads a field that holds one text or several, as strings or as tokens. Texts get BOS where the tokenizer adds it.
pub fn inputs(fields: Fields<'_>, name: &str, state: &State) -> Result<Vec<Input>, ApiError> {
    let list = match fields.get(name) {
        Some(value @ Value::String(_)) => return Ok(vec![one(value, name.to_string(), state)?]),
        Some(Value::Array(list)) if !list.is_empty() => list,
        None => return Err(ApiError::invalid(format!("{name} is missing, expected {EXPECTED}")).at(name)),
        Some(_) => return Err(fields.wrong(name, EXPECTED)),
    };
    if list[0].is_number() {
        return Ok(vec![tokens(list, name.to_string(), state)?]);
    }
    if list.len() > MOST_TEXTS {
        return Err(fields.wrong(name, &format!("at most {MOST_TEXTS} texts")));
    }
    list.iter().enumerate().map(|(i, value)| one(value, format!("{name}[{i}]"), state)).collect()
}

fn one(value: &Value, path: String, state: &State) -> Result<Input, ApiError> {
    match value {
        Value::String(text) => {
            fits(text, state, &path)?;
            let tokens = state.text.continuation(text).map_err(|error| refuse(error, &path))?;
            Ok(Input { path, tokens, text: Some(text.clone()) })
        }
        Value::Array(list) => tokens(list, path, state),
        other => Err(wrong(&path, other, "a string or a list of token ids")),
    }
}

fn tokens(list: &[Value], path: String, state: &State) -> Result<Input, ApiError> {
    let vocab = state.engine.limits().vocab.min(u32::MAX as usize);
    if list.is_empty() {
        return Err(wrong(&path, &Value::Array(vec![]), "at least one token"));
    }
    let token = |(i, value)| token(value, vocab, &format!("{path}[{i}]"));
    let tokens = list.iter().enumerate().map(token).collect::<Result<_, _>>()?;
    Ok(Input { path, tokens, text: None })
}

/// Refuses a text that cannot fit before all of it is tokenized, which takes a hundred bytes for each token: one of more
/// bytes than the context has tokens for, and one that is seen, part by part, to have twice the tokens.
pub fn fits(text: &str, state: &State, path: &str) -> Result<(), ApiError> {
    let (context, tokenizer) = (state.engine.limits().context, state.text.tokenizer());
    let too_long = |what: String| {
        let message = format!(
            "the prompt has {what}; the context holds {context} tokens: shorten the prompt, or restart the server with \
             a larger --ctx"
        );
        Err(ApiError { code: Some("context_length_exceeded"), ..ApiError::invalid(message).at(path) })
    };
    let longest = tokenizer.longest_token();
    if text.len() > context.saturating_mul(longest) {
        return too_long(format!("{} bytes, and a token stands for at most {longest}", text.len()));
    }
    let part = context.saturating_mul(4).max(MOST_PART);
    if text.len() <= part {
        return Ok(());
    }
    // Parts cut a token or two; nobody is refused for those.
    let (mut rest, mut tokens) = (text, 0);
    while !rest.is_empty() {
        let end = (0..=part.min(rest.len())).rev().find(|&at| rest.is_char_boundary(at)).unwrap_or(rest.len());
        let (one, more) = rest.split_at(end);
        tokens += tokenizer.encode(one, true).map_err(|error| refuse(error.into(), path))?.len();
        if tokens > context.saturating_mul(2) {
            return too_long(format!("more than {} tokens in {} bytes", context.saturating_mul(2), text.len()));
        }
        rest = more;
    }
    Ok(())
}

/// Bytes of a text that may be tokenized at once in any case.
const MOST_PART: usize = 1 << 10;

/// A text or conversation that cannot become a prompt: the client's to mend.
pub fn refuse(error: PromptError, path: &str) -> ApiError {
    let message = match error {
        PromptError::NoTemplate { .. } => "the model has no chat template, so it cannot answer conversations; \
             send plain text to /v1/completions"
            .to_string(),
        error => error.to_string(),
    };
    ApiError::invalid(message).at(path)
}
