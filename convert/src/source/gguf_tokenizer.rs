//! tokenizer.json from a GGUF's vocabulary: byte-level BPE (`tokenizer.ggml.model = gpt2`).
//!
//! A GGUF names the pre-tokenizer (`tokenizer.ggml.pre`) instead of describing it; the pipelines
//! below are those of the models the names stand for, as their own tokenizer.json has them.

use serde_json::{Value as Json, json};

use super::gguf::{Gguf, Value};
use crate::Malformed;

/// Builds tokenizer.json; `None` for a file without a vocabulary.
pub fn tokenizer_json(gguf: &Gguf, notes: &mut Vec<String>) -> Result<Option<Vec<u8>>, Malformed> {
    if !gguf.meta.contains_key("tokenizer.ggml.model") {
        notes.push("the GGUF has no vocabulary: the file can be run on token ids only".into());
        return Ok(None);
    }
    let model = gguf.text("tokenizer.ggml.model")?;
    if model != "gpt2" {
        let what = match model {
            "llama" => "a SentencePiece vocabulary (tokenizer.ggml.model = llama)".to_string(),
            other => format!("a vocabulary of kind {other} (tokenizer.ggml.model)"),
        };
        let next = "this version rebuilds byte-level BPE (gpt2) only; convert the safetensors version of the model";
        return Err(Malformed::Unsupported { what, next: next.into() });
    }
    let pre = pre(gguf, notes)?;
    let tokens = texts(gguf, "tokenizer.ggml.tokens")?;
    let mut merges = vec![];
    for merge in texts(gguf, "tokenizer.ggml.merges")? {
        // Neither half contains a space: byte-level BPE writes it as U+0120.
        let pair = merge.split_once(' ').filter(|(_, right)| !right.contains(' '));
        let (left, right) =
            pair.ok_or_else(|| Malformed::field("tokenizer.ggml.merges", "two parts", format!("{merge:?}")))?;
        merges.push(json!([left, right]));
    }
    let mut vocab = serde_json::Map::new();
    for (id, token) in tokens.iter().enumerate() {
        if vocab.insert(token.to_string(), id.into()).is_some() {
            return Err(Malformed::field("tokenizer.ggml.tokens", "each once", format!("{token:?} twice")));
        }
    }
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added(gguf, tokens)?,
        "normalizer": pre.normalizer,
        "pre_tokenizer": pre.pre_tokenizer,
        "post_processor": post_processor(gguf, &pre, tokens)?,
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": pre.ignore_merges,
            "vocab": vocab,
            "merges": merges,
        },
    });
    Ok(Some(serde_json::to_vec(&tokenizer).expect("a JSON value can be written")))
}

/// How text is cut before merging, and what the name implies besides.
struct Pre {
    normalizer: Json,
    pre_tokenizer: Json,
    /// A pre-token that is a token is not built from merges.
    ignore_merges: bool,
    /// What an absent `add_bos_token` means.
    add_bos: bool,
}

fn pre(gguf: &Gguf, notes: &mut Vec<String>) -> Result<Pre, Malformed> {
    let byte_level = |use_regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex });
    let sequence =
        |first: Json, use_regex| json!({ "type": "Sequence", "pretokenizers": [first, byte_level(use_regex)] });
    let split = |digits: &str| {
        let regex = format!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        );
        json!({ "type": "Split", "pattern": { "Regex": regex }, "behavior": "Isolated", "invert": false })
    };
    let plain = |pre_tokenizer| Pre { normalizer: Json::Null, pre_tokenizer, ignore_merges: false, add_bos: false };
    let name = gguf.optional("tokenizer.ggml.pre").unwrap_or("default");
    Ok(match name {
        "smollm" => plain(sequence(json!({ "type": "Digits", "individual_digits": true }), true)),
        "gpt-2" => plain(byte_level(true)),
        "default" => {
            notes.push(
                "the GGUF does not name its pre-tokenizer: taken as GPT-2's, which may split text differently".into(),
            );
            plain(byte_level(true))
        }
        // llama.cpp adds the beginning token for these whatever the model, unless the file says otherwise.
        "llama-bpe" | "llama3" | "llama-v3" => {
            Pre { ignore_merges: true, add_bos: true, ..plain(sequence(split("{1,3}"), false)) }
        }
        "qwen2" => Pre { normalizer: json!({ "type": "NFC" }), ..plain(sequence(split(""), false)) },
        other => {
            return Err(Malformed::Unsupported {
                what: format!("pre-tokenizer {other} (tokenizer.ggml.pre)"),
                next: "this version knows smollm, gpt-2, llama-bpe and qwen2; convert the safetensors version of the model"
                    .into(),
            });
        }
    })
}

/// Control tokens (type 3) are special; user-defined ones (type 4) are kept whole but are text.
fn added(gguf: &Gguf, tokens: &[&str]) -> Result<Vec<Json>, Malformed> {
    let key = "tokenizer.ggml.token_type";
    let types = match gguf.meta.get(key) {
        Some(Value::Numbers(n)) if n.len() == tokens.len() => n,
        Some(Value::Numbers(n)) => return Err(Malformed::field(key, format!("{} numbers", tokens.len()), n.len())),
        _ => return Err(Malformed::field(key, format!("{} numbers", tokens.len()), "none")),
    };
    let kept = types.iter().zip(tokens).enumerate().filter_map(|(id, (kind, token))| {
        let special = match kind.whole() {
            Some(3) => true,
            Some(4) => false,
            _ => return None,
        };
        Some(json!({
            "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": special,
        }))
    });
    Ok(kept.collect())
}

fn post_processor(gguf: &Gguf, pre: &Pre, tokens: &[&str]) -> Result<Json, Malformed> {
    let add_bos = gguf.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(pre.add_bos);
    let add_eos = gguf.flag("tokenizer.ggml.add_eos_token")?.unwrap_or(false);
    let token = |wanted: bool, which: &str| {
        if !wanted {
            return Ok(None);
        }
        let key = format!("tokenizer.ggml.{which}_token_id");
        let id = gguf.whole(&key)?;
        let text = id.and_then(|id| tokens.get(id as usize));
        let found = id.zip(text).map(|(id, text)| (id, text.to_string()));
        found.map(Some).ok_or_else(|| Malformed::field(&key, "the id of a token", format!("{id:?}")))
    };
    let (bos, eos) = (token(add_bos, "bos")?, token(add_eos, "eos")?);
    if bos.is_none() && eos.is_none() {
        return Ok(Json::Null);
    }
    let mut special = serde_json::Map::new();
    for (id, text) in bos.iter().chain(&eos) {
        special.insert(text.clone(), json!({ "id": text, "ids": [id], "tokens": [text] }));
    }
    let wrapped = |sequence: &str, type_id: u32| {
        let one = |t: &Option<(u64, String)>| {
            t.as_ref().map(|t| json!({ "SpecialToken": { "id": t.1, "type_id": type_id } }))
        };
        let middle = json!({ "Sequence": { "id": sequence, "type_id": type_id } });
        one(&bos).into_iter().chain([middle]).chain(one(&eos)).collect::<Vec<_>>()
    };
    let pair = [wrapped("A", 0), wrapped("B", 1)].concat();
    Ok(json!({ "type": "TemplateProcessing", "single": wrapped("A", 0), "pair": pair, "special_tokens": special }))
}

fn texts<'g>(gguf: &'g Gguf, key: &str) -> Result<&'g [&'g str], Malformed> {
    match gguf.meta.get(key) {
        Some(Value::Texts(texts)) => Ok(texts),
        _ => Err(Malformed::field(key, "an array of texts", "none")),
    }
}
