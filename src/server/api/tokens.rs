//! `/tokenize` and `/detokenize`, as llama-server and vLLM have them.

use serde_json::{Value, json};

use super::{chat, constrain, fields::Fields, params::token, run::server_error};
use crate::server::{ApiError, State};

/// Most bytes of a text to be tokenized, and most tokens to be written out.
const MOST_BYTES: usize = 1 << 20;
const MOST_TOKENS: usize = 1 << 18;

/// Tokens of a `content` (llama-server: nothing added unless `add_special`), a `prompt` (vLLM: BOS unless
/// `add_special_tokens` is false) or of `messages`.
pub fn tokenize(fields: Fields<'_>, state: &State) -> Result<Value, ApiError> {
    let pieces = fields.boolean("with_pieces")?.unwrap_or(false);
    let strings = fields.boolean("return_token_strs")?.unwrap_or(false);
    let tokens = match fields.any(&["content", "prompt", "messages"]) {
        Some("messages") => chat::prompt(fields, state, constrain::tools(fields, state)?.as_ref())?,
        Some(name) => {
            let text = fields.text(name)?.unwrap_or_default();
            if text.len() > MOST_BYTES {
                let message = format!("{name} has {} bytes, at most {MOST_BYTES} are taken", text.len());
                return Err(ApiError::invalid(message).at(name));
            }
            let flag = fields.any(&["add_special", "add_special_tokens"]).unwrap_or("add_special");
            let add = fields.boolean(flag)?.unwrap_or(name == "prompt");
            let parse = fields.boolean("parse_special")?.unwrap_or(true);
            let tokenizer = state.text.tokenizer();
            let tokens = match (add, parse) {
                (true, true) => tokenizer.encode_with_bos(text),
                (true, false) => {
                    return Err(ApiError::invalid(
                        "parse_special is false, expected true where special tokens are added",
                    )
                    .at("parse_special"));
                }
                (false, parse) => tokenizer.encode(text, parse),
            };
            tokens.map_err(|error| ApiError::invalid(error.to_string()).at(name))?
        }
        None => {
            return Err(ApiError::invalid("content is missing, expected content, prompt or messages").at("content"));
        }
    };
    let bytes = |id: u32| state.text.tokenizer().token_bytes(id).unwrap_or_default();
    let listed: Value = match pieces {
        false => tokens.clone().into(),
        true => {
            let piece = |&id: &u32| match String::from_utf8(bytes(id)) {
                Ok(text) => json!({"id": id, "piece": text}),
                Err(error) => json!({"id": id, "piece": error.into_bytes()}),
            };
            tokens.iter().map(piece).collect()
        }
    };
    let mut body = json!({"tokens": listed, "count": tokens.len(), "max_model_len": state.engine.limits().context});
    if strings {
        body["token_strs"] = tokens.iter().map(|&id| String::from_utf8_lossy(&bytes(id)).into_owned()).collect();
    }
    Ok(body)
}

/// The text of `tokens`: as `content` for llama-server's clients, as `prompt` for vLLM's.
pub fn detokenize(fields: Fields<'_>, state: &State) -> Result<Value, ApiError> {
    let list = fields.list("tokens")?;
    let list = list.ok_or_else(|| ApiError::invalid("tokens is missing, expected a list of token ids").at("tokens"))?;
    if list.len() > MOST_TOKENS {
        let message = format!("tokens has {} ids, at most {MOST_TOKENS} are taken", list.len());
        return Err(ApiError::invalid(message).at("tokens"));
    }
    let tokenizer = state.text.tokenizer();
    let vocab = tokenizer.vocab_size().max(state.engine.limits().vocab.min(u32::MAX as usize));
    let token = |(i, value)| token(value, vocab, &format!("tokens[{i}]"));
    let tokens: Vec<u32> = list.iter().enumerate().map(token).collect::<Result<_, _>>()?;
    let text = tokenizer.decode(&tokens, false).map_err(|error| server_error(error.to_string()))?;
    Ok(json!({"content": text, "prompt": text}))
}
