//! A byte-level BPE tokenizer.json as GGUF metadata.
//!
//! GGUF names the pre-tokenizer instead of describing it: one that has no name is refused, because
//! another would split text differently.

use serde_json::{Value, json};

use super::{Model, gguf::Metadata};
use crate::ConvertError;

/// Writes vocabulary, merges, special tokens and template.
pub fn write(model: &Model, meta: &mut Metadata) -> Result<(), ConvertError> {
    let Some(bytes) = model.file.tokenizer_json() else {
        return Err(refuse("the file has no tokenizer, and llama.cpp opens no GGUF without one"));
    };
    let tokenizer: Value =
        serde_json::from_slice(bytes).map_err(|e| refuse(&format!("tokenizer.json cannot be read ({e})")))?;
    let kind = text(&tokenizer["model"], "type");
    if kind != "BPE" {
        return Err(refuse(&format!("a tokenizer of kind {kind:?}; this version writes byte-level BPE")));
    }
    let pre = pre(&tokenizer).ok_or_else(|| refuse("the tokenizer's way of splitting text has no name in GGUF"))?;
    let vocab = vocabulary(&tokenizer, model.file.spec().vocab)?;
    meta.text("tokenizer.ggml.model", "gpt2");
    meta.text("tokenizer.ggml.pre", pre);
    meta.texts("tokenizer.ggml.tokens", vocab.iter().map(|t| t.0.as_str()));
    meta.i32s("tokenizer.ggml.token_type", &vocab.iter().map(|t| t.1).collect::<Vec<_>>());
    let merges = merges(&tokenizer)?;
    meta.texts("tokenizer.ggml.merges", merges.iter().map(String::as_str));

    let g = model.file.generation();
    let ends = g.eos.iter().zip(["eos", "eot", "eom"]).map(|(id, key)| (key, *id));
    for (key, id) in ends.chain(g.bos.map(|id| ("bos", id))).chain(g.pad.map(|id| ("padding", id))) {
        meta.u32(&format!("tokenizer.ggml.{key}_token_id"), id);
    }
    let (first, last) = added_around(&tokenizer);
    meta.flag("tokenizer.ggml.add_bos_token", first);
    meta.flag("tokenizer.ggml.add_eos_token", last);
    if let Some(template) = model.file.chat_template() {
        meta.text("tokenizer.chat_template", template);
    }
    Ok(())
}

/// The name of the way that text is split before merging.
fn pre(tokenizer: &Value) -> Option<&'static str> {
    let byte_level =
        |use_regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "use_regex": use_regex });
    let split = |digits: &str| {
        let regex = format!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        );
        json!({ "type": "Split", "pattern": { "Regex": regex }, "behavior": "Isolated", "invert": false })
    };
    let sequence =
        |first: Value, use_regex| json!({ "type": "Sequence", "pretokenizers": [first, byte_level(use_regex)] });
    let digits = json!({ "type": "Digits", "individual_digits": true });
    let known = [
        ("gpt-2", Value::Null, byte_level(true), false),
        ("smollm", Value::Null, sequence(digits, true), false),
        ("llama-bpe", Value::Null, sequence(split("{1,3}"), false), true),
        ("qwen2", json!({ "type": "NFC" }), sequence(split(""), false), false),
    ];
    let mut own = tokenizer["pre_tokenizer"].clone();
    plain(&mut own);
    let ignore_merges = tokenizer["model"]["ignore_merges"].as_bool().unwrap_or(false);
    let same = known.into_iter().find(|k| k.1 == tokenizer["normalizer"] && k.2 == own && k.3 == ignore_merges);
    same.map(|k| k.0)
}

/// Drops what does not change where text is split.
fn plain(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.shift_remove("trim_offsets");
            map.values_mut().for_each(plain);
        }
        Value::Array(list) => list.iter_mut().for_each(plain),
        _ => {}
    }
}

/// Every token by its id: text, and llama.cpp's type (1 normal, 3 control, 4 user-defined, 5 unused).
fn vocabulary(tokenizer: &Value, count: usize) -> Result<Vec<(String, i32)>, ConvertError> {
    let mut all: Vec<Option<(String, i32)>> = vec![None; count];
    let mut put = |text: &str, id: Option<u64>, kind: i32| match id.and_then(|id| all.get_mut(id as usize)) {
        Some(place) => {
            *place = Some((text.to_string(), kind));
            Ok(())
        }
        None => Err(refuse(&format!("token {text:?} has id {id:?}, and the model has {count} tokens"))),
    };
    let vocab = tokenizer["model"]["vocab"].as_object().ok_or_else(|| refuse("tokenizer.json has no vocabulary"))?;
    for (text, id) in vocab {
        put(text, id.as_u64(), 1)?;
    }
    for token in tokenizer["added_tokens"].as_array().into_iter().flatten() {
        let kind = if token["special"].as_bool() == Some(true) { 3 } else { 4 };
        put(text(token, "content"), token["id"].as_u64(), kind)?;
    }
    let padded = all.into_iter().enumerate();
    Ok(padded.map(|(id, token)| token.unwrap_or_else(|| (format!("[PAD{id}]"), 5))).collect())
}

fn merges(tokenizer: &Value) -> Result<Vec<String>, ConvertError> {
    let list = tokenizer["model"]["merges"].as_array().ok_or_else(|| refuse("tokenizer.json has no merges"))?;
    let one = |merge: &Value| match merge {
        Value::String(s) => Some(s.clone()),
        Value::Array(pair) => match &pair[..] {
            [Value::String(a), Value::String(b)] => Some(format!("{a} {b}")),
            _ => None,
        },
        _ => None,
    };
    list.iter().map(|m| one(m).ok_or_else(|| refuse(&format!("tokenizer.json has a merge {m}")))).collect()
}

/// Whether a beginning and an end token are put around a text.
fn added_around(tokenizer: &Value) -> (bool, bool) {
    let processor = &tokenizer["post_processor"];
    let nested = processor["processors"].as_array().into_iter().flatten();
    let template = std::iter::once(processor).chain(nested).find(|p| text(p, "type") == "TemplateProcessing");
    let single = template.and_then(|t| t["single"].as_array()).map_or(&[][..], Vec::as_slice);
    let special = |piece: Option<&Value>| piece.is_some_and(|p| p.get("SpecialToken").is_some());
    (special(single.first()), special(single.last()))
}

fn text<'v>(value: &'v Value, key: &str) -> &'v str {
    value.get(key).and_then(Value::as_str).unwrap_or_default()
}

fn refuse(what: &str) -> ConvertError {
    ConvertError::unsupported(
        format!("--to gguf: {what}"),
        "export it with --to float and use llama.cpp's own converter",
    )
}
