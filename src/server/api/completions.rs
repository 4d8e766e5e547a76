//! `/v1/completions`: text that is continued.

use super::{
    answer::{Kind, Task},
    fields::Fields,
    input::{Input, inputs},
    params::{MOST_LOGPROBS, Params},
    run::server_error,
};
use crate::server::{ApiError, State};

/// Most answers of one request.
const MOST_ANSWERS: usize = 2048;

/// Reads a request.
pub fn parse(fields: Fields<'_>, state: &State) -> Result<Task, ApiError> {
    let params = Params::parse(fields, state, 0)?;
    let echo = fields.boolean("echo")?.unwrap_or(false);
    let logprobs = fields.integer("logprobs", 0..=MOST_LOGPROBS)?.map(|n| n as usize);
    let form = super::constrain::format(fields)?;
    let inputs = inputs(fields, "prompt", state)?;
    if inputs.len() * params.n > MOST_ANSWERS {
        let message =
            format!("{} prompts with {} choices each, expected at most {MOST_ANSWERS} answers", inputs.len(), params.n);
        return Err(ApiError::invalid(message).at("n"));
    }
    let mut requests = vec![];
    for input in &inputs {
        requests.extend(params.requests(&input.tokens, state, &input.path)?);
    }
    for request in &mut requests {
        request.logprobs = logprobs;
        request.prompt_logprobs = logprobs.filter(|_| echo);
    }
    let echo = if echo { inputs.into_iter().map(|i| text(i, state)).collect::<Result<_, _>>()? } else { vec![] };
    Ok(Task {
        kind: Kind::Completion { echo },
        requests,
        form,
        n: params.n,
        stops: params.stops,
        stream: params.stream,
        include_usage: params.include_usage,
    })
}

/// What is repeated of a prompt.
fn text(input: Input, state: &State) -> Result<String, ApiError> {
    match input.text {
        Some(text) => Ok(text),
        None => state.text.tokenizer().decode(&input.tokens, false).map_err(|error| server_error(error.to_string())),
    }
}
