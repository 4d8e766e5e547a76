//! How to answer: the fields that chat and completions share.

use quern_kernels::sample::{SampleError, SamplingParams};
use serde_json::Value;

use super::fields::{Fields, integer, wrong};
use crate::{
    draft::{Method, Speculation},
    engine::Request,
    random,
    server::{ApiError, State},
};

/// Most choices of one prompt, as OpenAI has it.
const MOST_CHOICES: i64 = 128;
/// Most stop texts, and the bytes of one.
const MOST_STOPS: usize = 32;
const MOST_STOP_BYTES: usize = 1024;
/// Most tokens that may end an answer beyond the model's own.
const MOST_STOP_IDS: usize = 128;
/// Most tokens with a bias.
const MOST_BIASES: usize = 4096;
/// Most likely tokens that may be reported.
pub const MOST_LOGPROBS: i64 = 20;

/// What chat and completions have in common.
#[derive(Debug, Clone, PartialEq)]
pub struct Params {
    /// How tokens are chosen; the seed is that of the first choice.
    pub sampling: SamplingParams,
    /// Choices for each prompt.
    pub n: usize,
    /// `None`: as many as fit.
    pub max_tokens: Option<usize>,
    /// Texts that end an answer.
    pub stops: Vec<String>,
    /// Tokens that end it.
    pub stop_ids: Vec<u32>,
    /// Answer as it comes.
    pub stream: bool,
    /// Send a last chunk with the token counts.
    pub include_usage: bool,
    /// Lower goes first.
    pub priority: i32,
    /// Requests share prefixes with those of the same salt only.
    pub cache_salt: Option<String>,
    /// How it is guessed ahead.
    pub speculation: Option<Speculation>,
}

/// Fields of other servers that change the answer and that we do not have, and the values that change nothing.
const UNSUPPORTED: &[(&str, &[&str])] = &[
    ("best_of", &["1"]),
    ("suffix", &["\"\""]),
    ("use_beam_search", &["false"]),
    ("length_penalty", &["1", "1.0"]),
    ("min_tokens", &["0"]),
    ("truncate_prompt_tokens", &[]),
    ("include_stop_str_in_output", &["false"]),
    ("skip_special_tokens", &["true"]),
    ("allowed_token_ids", &[]),
    ("bad_words", &["[]"]),
    ("prompt_embeds", &[]),
    ("functions", &["[]"]),
    ("function_call", &["\"none\""]),
    ("audio", &[]),
    ("modalities", &["[\"text\"]"]),
    ("web_search_options", &[]),
    ("mirostat", &["0"]),
    ("typical_p", &["1", "1.0"]),
    ("tfs_z", &["1", "1.0"]),
    ("top_a", &["0", "0.0"]),
    ("dynatemp_range", &["0", "0.0"]),
    ("dry_multiplier", &["0", "0.0"]),
    ("xtc_probability", &["0", "0.0"]),
    ("top_n_sigma", &["-1", "-1.0", "0", "0.0"]),
    ("lora", &["[]"]),
];

impl Params {
    /// Reads the shared fields. `least_tokens`: 0 where an answer may be empty.
    pub fn parse(fields: Fields<'_>, state: &State, least_tokens: i64) -> Result<Params, ApiError> {
        for (name, harmless) in UNSUPPORTED {
            if let Some(value) = fields.get(name)
                && !harmless.contains(&value.to_string().as_str())
            {
                let expected = match harmless.first() {
                    Some(value) => format!("{value}: other values are not supported"),
                    None => "nothing: it is not supported".into(),
                };
                return Err(fields.wrong(name, &expected));
            }
        }
        let priority = fields.integer("priority", i64::from(i32::MIN)..=i64::from(i32::MAX))?.unwrap_or(0) as i32;
        if priority != 0 && !state.priorities {
            return Err(fields.wrong("priority", "0 or nothing: this server takes no others (--no-priority)"));
        }
        let vocab = state.engine.limits().vocab;
        let stream = fields.boolean("stream")?.unwrap_or(false);
        let options = fields.object("stream_options")?;
        let options = options.map(|o| Fields::inside(o, "stream_options."));
        let include_usage = options.map_or(Ok(None), |o| o.boolean("include_usage"))?.unwrap_or(false);
        let mut stop_ids = match fields.boolean("ignore_eos")?.unwrap_or(false) {
            true => vec![],
            false => state.text.stop_ids().to_vec(),
        };
        let more = fields.list("stop_token_ids")?.map_or(&[][..], Vec::as_slice);
        if more.len() > MOST_STOP_IDS {
            return Err(fields.wrong("stop_token_ids", &format!("at most {MOST_STOP_IDS} token ids")));
        }
        for (i, value) in more.iter().enumerate() {
            stop_ids.push(token(value, vocab, &format!("stop_token_ids[{i}]"))?);
        }
        Ok(Params {
            sampling: sampling(fields, &state.model.defaults, vocab)?,
            n: fields.integer("n", 1..=MOST_CHOICES)?.unwrap_or(1) as usize,
            max_tokens: max_tokens(fields, least_tokens)?,
            stops: stops(fields)?,
            stop_ids,
            stream,
            include_usage: include_usage && stream,
            priority,
            cache_salt: fields.text("cache_salt")?.map(str::to_string),
            speculation: speculation(fields, state.engine.limits().writer)?,
        })
    }

    /// The requests for one prompt, one for each choice, where prompt and answer fit.
    pub fn requests(&self, prompt: &[u32], state: &State, param: &str) -> Result<Vec<Request>, ApiError> {
        let max_tokens = room(prompt.len(), self.max_tokens, state, param)?;
        let request = |i: usize| Request {
            prompt: prompt.to_vec(),
            max_tokens,
            sampling: SamplingParams { seed: self.sampling.seed.wrapping_add(i as u64), ..self.sampling.clone() },
            stop_ids: self.stop_ids.clone(),
            priority: self.priority,
            cache_salt: self.cache_salt.clone(),
            speculation: self.speculation,
            ..Request::default()
        };
        Ok((0..self.n).map(request).collect())
    }
}

/// How the answer is guessed ahead, where the request says it.
fn speculation(fields: Fields<'_>, writer: Option<Method>) -> Result<Option<Speculation>, ApiError> {
    let Some(text) = fields.text("speculate")? else { return Ok(None) };
    let wanted: Speculation = text.parse().map_err(|_: String| fields.wrong("speculate", Speculation::EXPECTED))?;
    if wanted.method.needs_file() && writer != Some(wanted.method) {
        let there = match writer {
            Some(method) => format!("{} or a method that needs no file", method.name()),
            None => "a method that needs no file".into(),
        };
        let expected = format!("{there} (off, auto, ngram, suffix, grammar): this server has no other (--draft)");
        return Err(fields.wrong("speculate", &expected));
    }
    Ok(Some(wanted))
}

/// Tokens that may be generated after a prompt.
fn room(prompt: usize, asked: Option<usize>, state: &State, param: &str) -> Result<usize, ApiError> {
    let context = state.engine.limits().context;
    let left = context.saturating_sub(prompt);
    // Without a number there must be room for one.
    if asked.unwrap_or(1) <= left {
        return Ok(asked.unwrap_or(left));
    }
    let message = match asked.filter(|_| left > 0) {
        None => format!(
            "the prompt has {prompt} tokens, the context holds {context} and needs room for at least 1 more; \
             shorten the prompt, or restart the server with a larger --ctx"
        ),
        Some(asked) => format!(
            "the prompt has {prompt} tokens and {asked} more are asked for, {} in all; the context holds {context}: \
             ask for at most {left} (max_tokens), or leave it out",
            prompt.saturating_add(asked)
        ),
    };
    Err(ApiError { code: Some("context_length_exceeded"), ..ApiError::invalid(message).at(param) })
}

fn sampling(fields: Fields<'_>, defaults: &SamplingParams, vocab: usize) -> Result<SamplingParams, ApiError> {
    let number = |name: &str, default: f32| fields.number(name).map(|x| x.unwrap_or(default));
    let d = defaults;
    let penalty = fields.any(&["repetition_penalty", "repeat_penalty"]).unwrap_or("repetition_penalty");
    let top_k = fields.integer("top_k", -1..=i64::from(u32::MAX))?;
    let last = fields.integer("repeat_last_n", -1..=i64::from(u32::MAX))?;
    let params = SamplingParams {
        temperature: number("temperature", d.temperature)?,
        // -1 is vLLM's way to say all.
        top_k: top_k.map_or(d.top_k, |k| k.max(0) as u32),
        top_p: number("top_p", d.top_p)?,
        min_p: number("min_p", d.min_p)?,
        repetition_penalty: number(penalty, d.repetition_penalty)?,
        presence_penalty: number("presence_penalty", d.presence_penalty)?,
        frequency_penalty: number("frequency_penalty", d.frequency_penalty)?,
        penalty_last_n: last.map_or(d.penalty_last_n, |n| usize::try_from(n).ok()),
        logit_bias: logit_bias(fields, vocab)?,
        seed: match fields.integer("seed", i64::MIN..=i64::MAX)? {
            // llama-server's way to ask for any.
            None | Some(-1) => random::seed(),
            Some(seed) => seed as u64,
        },
    };
    params.validate().map_err(|error| {
        let message = error.to_string();
        match error {
            SampleError::Range { name, .. } => {
                ApiError::invalid(message).at(if name == "repetition_penalty" { penalty } else { name })
            }
            _ => ApiError::invalid(message),
        }
    })?;
    Ok(params)
}

/// OpenAI's object of token ids and numbers, or llama-server's list of pairs, where `false` forbids a token.
fn logit_bias(fields: Fields<'_>, vocab: usize) -> Result<Vec<(u32, f32)>, ApiError> {
    let bias = |value: &Value, path: String| match (value, value.as_f64()) {
        (Value::Bool(false), _) => Ok(f32::NEG_INFINITY),
        (_, Some(x)) if x <= -100.0 => Ok(f32::NEG_INFINITY),
        (_, Some(x)) => Ok(x.min(100.0) as f32),
        _ => Err(wrong(&path, value, "a number from -100 (never) to 100")),
    };
    let mut out = vec![];
    let count = match fields.get("logit_bias") {
        Some(Value::Object(map)) => map.len(),
        Some(Value::Array(pairs)) => pairs.len(),
        _ => 0,
    };
    // Each choice has its own copy.
    if count > MOST_BIASES {
        return Err(fields.wrong("logit_bias", &format!("at most {MOST_BIASES} token ids")));
    }
    match fields.get("logit_bias") {
        None => {}
        Some(Value::Object(map)) => {
            for (key, value) in map {
                let path = format!("logit_bias.{key}");
                let id =
                    key.parse::<i64>().map_err(|_| wrong("logit_bias", &key.as_str().into(), "token ids as keys"))?;
                out.push((token(&id.into(), vocab, &path)?, bias(value, path)?));
            }
        }
        Some(Value::Array(pairs)) => {
            for (i, pair) in pairs.iter().enumerate() {
                let path = format!("logit_bias[{i}]");
                let Some([id, value]) = pair.as_array().map(Vec::as_slice) else {
                    return Err(wrong(&path, pair, "a pair of token id and number"));
                };
                out.push((token(id, vocab, &path)?, bias(value, path)?));
            }
        }
        Some(_) => return Err(fields.wrong("logit_bias", "an object of token ids and numbers")),
    }
    Ok(out)
}

fn max_tokens(fields: Fields<'_>, least: i64) -> Result<Option<usize>, ApiError> {
    let Some(name) = fields.any(&["max_completion_tokens", "max_tokens", "n_predict"]) else { return Ok(None) };
    // llama-server's -1: until the context ends.
    if name == "n_predict" && fields.get(name).and_then(integer) == Some(-1) {
        return Ok(None);
    }
    Ok(fields.integer(name, least..=i64::MAX)?.map(|n| n as usize))
}

fn stops(fields: Fields<'_>) -> Result<Vec<String>, ApiError> {
    let list = match fields.get("stop") {
        None => return Ok(vec![]),
        Some(Value::Array(list)) => list.as_slice(),
        Some(one) => std::slice::from_ref(one),
    };
    if list.len() > MOST_STOPS {
        return Err(fields.wrong("stop", &format!("at most {MOST_STOPS} texts")));
    }
    let stop = |value: &Value| match value.as_str() {
        Some(text) if !text.is_empty() && text.len() <= MOST_STOP_BYTES => Ok(text.to_string()),
        _ => Err(wrong("stop", value, &format!("a string of 1 to {MOST_STOP_BYTES} bytes, or a list of such"))),
    };
    list.iter().map(stop).collect()
}

/// A token of the model.
pub fn token(value: &Value, vocab: usize, path: &str) -> Result<u32, ApiError> {
    let id = integer(value).and_then(|id| u32::try_from(id).ok()).filter(|&id| (id as usize) < vocab);
    id.ok_or_else(|| wrong(path, value, &format!("a token id from 0 to {}", vocab.saturating_sub(1))))
}
