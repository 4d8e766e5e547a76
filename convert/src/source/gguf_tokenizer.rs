//! tokenizer.json from a GGUF's vocabulary: SentencePiece (`tokenizer.ggml.model` = `llama`, `t5`) and
//! byte-level BPE (`gpt2`).
//!
//! A GGUF names the pre-tokenizer (`tokenizer.ggml.pre`) instead of describing it: see
//! [`crate::tokenizer::pre`].

use super::gguf::{Gguf, Value};
use crate::{
    Malformed,
    tokenizer::{
        Added,
        byte_level::{self, ByteLevel},
        pieces::{self, Around, Prefix},
        pre::{self, Pre},
        sentencepiece::{Algorithm, Kind, Model, Normalizer, Piece},
    },
};

/// Builds tokenizer.json; `None` for a file without a vocabulary.
pub fn tokenizer_json(gguf: &Gguf, notes: &mut Vec<String>) -> Result<Option<Vec<u8>>, Malformed> {
    let model = match gguf.meta.get("tokenizer.ggml.model") {
        None | Some(Value::Text("none" | "no_vocab")) => {
            notes.push("the GGUF has no vocabulary: the file can be run on token ids only".into());
            return Ok(None);
        }
        Some(_) => gguf.text("tokenizer.ggml.model")?,
    };
    let algorithm = match model {
        "gpt2" => return byte_level(gguf, notes).map(Some),
        "llama" => Algorithm::Bpe,
        "t5" => Algorithm::Unigram,
        other => {
            let kind = match other {
                "bert" => "WordPiece",
                "gemma4" => "byte pairs of characters",
                "rwkv" => "RWKV's own",
                "plamo2" => "PLaMo's own",
                _ => "an unknown kind",
            };
            return Err(Malformed::Unsupported {
                what: format!("a vocabulary of kind {other} ({kind}; tokenizer.ggml.model)"),
                next: "this version rebuilds llama, t5 and gpt2; convert the safetensors version of the model".into(),
            });
        }
    };
    sentencepiece(gguf, algorithm).map(Some)
}

/// llama.cpp keeps what SentencePiece knows, and its habits: a space before every stretch of text,
/// user-defined tokens found before anything else.
fn sentencepiece(gguf: &Gguf, algorithm: Algorithm) -> Result<Vec<u8>, Malformed> {
    let texts = tokens(gguf)?;
    let kinds = kinds(gguf, texts.len())?;
    let key = "tokenizer.ggml.scores";
    let scores = match gguf.meta.get(key) {
        Some(Value::Numbers(n)) if n.len() == texts.len() => n,
        _ => return Err(Malformed::field(key, format!("{} numbers", texts.len()), gguf.shown(key))),
    };
    let mut list = vec![];
    for ((text, score), kind) in texts.iter().zip(scores.iter()).zip(kinds) {
        let number = match score {
            Value::Float(f) => f as f32,
            Value::Signed(n) => n as f32,
            _ => f32::NAN,
        };
        if !number.is_finite() {
            return Err(Malformed::field(format!("{key}: of {text:?}"), "a finite number", format!("{score:?}")));
        }
        list.push(Piece { text, score: number, kind });
    }
    let unigram = algorithm == Algorithm::Unigram;
    let add_space = gguf.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(!unigram);
    let charsmap = match gguf.meta.get("tokenizer.ggml.precompiled_charsmap") {
        Some(Value::Numbers(n)) if unigram => n.bytes(),
        _ => &[],
    };
    let model = Model {
        algorithm,
        byte_fallback: list.iter().any(|piece| piece.kind == Kind::Byte),
        bos: None,
        eos: None,
        normalizer: Normalizer {
            charsmap,
            add_dummy_prefix: add_space,
            remove_extra_whitespaces: unigram && gguf.flag("tokenizer.ggml.remove_extra_whitespaces")?.unwrap_or(false),
            escape_whitespaces: true,
        },
        pieces: list,
    };
    let (bos, eos) = ends(gguf, &texts, !unigram, unigram)?;
    let prefix = if add_space { Prefix::Every } else { Prefix::Never };
    pieces::tokenizer_json(&model, Around { prefix, normalizer: true, in_text: false, added: vec![], bos, eos })
}

fn byte_level(gguf: &Gguf, notes: &mut Vec<String>) -> Result<Vec<u8>, Malformed> {
    let pre = pre(gguf, notes)?;
    let texts = tokens(gguf)?;
    let kinds = kinds(gguf, texts.len())?;
    let key = "tokenizer.ggml.merges";
    let Some(Value::Texts(lines)) = gguf.meta.get(key) else {
        return Err(Malformed::field(key, "an array of texts", gguf.shown(key)));
    };
    let mut merges = vec![];
    for line in lines {
        merges.push(byte_level::pair(line).ok_or_else(|| Malformed::field(key, "two parts", format!("{line:?}")))?);
    }
    // Control tokens are special; user-defined ones are kept whole but are text.
    let added = kinds.iter().zip(&texts).zip(0..).filter_map(|((kind, text), id)| match kind {
        Kind::Control => Some(Added::new(id, text, true)),
        Kind::UserDefined => Some(Added::new(id, text, false)),
        _ => None,
    });
    let added = added.collect();
    let (bos, eos) = ends(gguf, &texts, pre.add_bos, false)?;
    let vocab = texts.iter().map(String::as_str).zip(0..).collect();
    ByteLevel { vocab, merges, pre, added, bos, eos }.tokenizer_json(key)
}

fn pre(gguf: &Gguf, notes: &mut Vec<String>) -> Result<Pre, Malformed> {
    let name = gguf.optional("tokenizer.ggml.pre").unwrap_or("default");
    if name == "default" {
        notes.push(
            "the GGUF does not name its pre-tokenizer: taken as GPT-2's, which may split text differently".into(),
        );
    }
    pre::named(name, false).ok_or_else(|| Malformed::Unsupported {
        what: format!("pre-tokenizer {name} (tokenizer.ggml.pre)"),
        next: format!("this version knows {}; convert the safetensors version of the model", pre::NAMES.join(", ")),
    })
}

/// The tokens' texts; one that is empty is called as llama.cpp calls it.
fn tokens(gguf: &Gguf) -> Result<Vec<String>, Malformed> {
    let key = "tokenizer.ggml.tokens";
    let Some(Value::Texts(texts)) = gguf.meta.get(key) else {
        return Err(Malformed::field(key, "an array of texts", gguf.shown(key)));
    };
    let name = |(id, text): (usize, &&str)| if text.is_empty() { format!("[EMPTY_{id}]") } else { text.to_string() };
    Ok(texts.iter().enumerate().map(name).collect())
}

fn kinds(gguf: &Gguf, tokens: usize) -> Result<Vec<Kind>, Malformed> {
    let key = "tokenizer.ggml.token_type";
    let types = match gguf.meta.get(key) {
        Some(Value::Numbers(n)) if n.len() == tokens => n,
        _ => return Err(Malformed::field(key, format!("{tokens} numbers"), gguf.shown(key))),
    };
    // llama.cpp takes any other number for none of these.
    Ok(types.iter().map(|kind| kind.whole().and_then(Kind::of).unwrap_or(Kind::Normal)).collect())
}

/// Id and text of a token.
type Token<'a> = (u32, &'a str);

/// What begins and ends a text, if the file says so or is silent and the default holds.
fn ends<'a>(
    gguf: &Gguf,
    texts: &'a [String],
    add_bos: bool,
    add_eos: bool,
) -> Result<(Option<Token<'a>>, Option<Token<'a>>), Malformed> {
    let token = |wanted: bool, which: &str, usual: u64| {
        if !wanted {
            return Ok(None);
        }
        let key = format!("tokenizer.ggml.{which}_token_id");
        let id = gguf.whole(&key)?.unwrap_or(usual);
        let text = usize::try_from(id).ok().and_then(|id| texts.get(id));
        let found = text.map(|text| (id as u32, text.as_str()));
        found.map(Some).ok_or_else(|| Malformed::field(&key, "the id of a token", gguf.shown(&key)))
    };
    let add_bos = gguf.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(add_bos);
    let add_eos = gguf.flag("tokenizer.ggml.add_eos_token")?.unwrap_or(add_eos);
    // llama.cpp's own defaults, where a SentencePiece file names no token.
    let sentencepiece = gguf.optional("tokenizer.ggml.model") == Some("llama");
    let usual = |id: u64| if sentencepiece { id } else { u64::MAX };
    Ok((token(add_bos, "bos", usual(1))?, token(add_eos, "eos", usual(2))?))
}
