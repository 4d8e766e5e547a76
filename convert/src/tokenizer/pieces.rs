//! tokenizer.json of a SentencePiece vocabulary, from `tokenizer.model` or from a GGUF.
//!
//! SentencePiece puts a space before a text and writes every space as `▁`. The libraries around it
//! disagree about texts that begin with a space or stand after a special token ([`Prefix`]); with no
//! special tokens in it and no space at its beginning a text has the same ids everywhere.

use serde_json::{Value as Json, json};

use super::{
    Added,
    json::{Bpe, Entries, Tokenizer, Unigram, base64, escape, sequence, split, template},
    merges,
    sentencepiece::{Algorithm, Kind, Model},
};
use crate::Malformed;

/// Where the space before a text goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prefix {
    /// Before every stretch between special tokens: SentencePiece itself, llama.cpp, transformers
    /// where no tokenizer class says otherwise.
    Every,
    /// The same, but not before a stretch that begins with a space: LlamaTokenizer with `legacy`.
    EveryUnlessSpace,
    /// Only at the beginning of the text, and not before a space: LlamaTokenizer.
    First,
    /// Nowhere.
    Never,
}

/// What goes around a SentencePiece model.
#[derive(Debug, Clone)]
pub struct Around<'a> {
    /// Where the space before a text goes.
    pub prefix: Prefix,
    /// Whether the model's own normalizer applies; LlamaTokenizer has none.
    pub normalizer: bool,
    /// Whether user-defined pieces are found inside a stretch of text, as SentencePiece does it;
    /// otherwise they are added tokens, which divide the text into stretches.
    pub in_text: bool,
    /// Tokens with properties of their own, or that the model does not have.
    pub added: Vec<Added>,
    /// What begins a text, by id and text.
    pub bos: Option<(u32, &'a str)>,
    /// What ends a text.
    pub eos: Option<(u32, &'a str)>,
}

/// Builds the file's bytes. Texts of pieces must be distinct.
pub fn tokenizer_json(model: &Model<'_>, around: Around<'_>) -> Result<Vec<u8>, Malformed> {
    let mut seen = std::collections::HashSet::new();
    if let Some(piece) = model.pieces.iter().find(|piece| !seen.insert(piece.text)) {
        return Err(Malformed::field("pieces of the vocabulary", "each once", format!("{:?} twice", piece.text)));
    }
    let mut added = around.added;
    for (id, piece) in model.pieces.iter().enumerate() {
        let kept = match piece.kind {
            Kind::Control | Kind::Unknown => true,
            Kind::UserDefined => !around.in_text,
            _ => false,
        };
        if kept && !added.iter().any(|token| token.id as usize == id) {
            added.push(Added::new(id as u32, piece.text, piece.kind != Kind::UserDefined));
        }
    }
    let user_defined: Vec<&str> = match around.in_text {
        true => model.pieces.iter().filter(|p| p.kind == Kind::UserDefined).map(|p| p.text).collect(),
        false => vec![],
    };
    // Where these would be found without being merged, the text of a control token must fall apart
    // when it is meant as text.
    let broken = model.algorithm == Algorithm::Unigram || !user_defined.is_empty();
    let controls: Vec<&str> = added.iter().filter(|t| broken && t.special).map(|t| t.text.as_str()).collect();
    let normalizer = normalizer(model, around.prefix, around.normalizer);
    let pre_tokenizer = pre_tokenizer(around.prefix, around.normalizer, &user_defined, &controls);
    let decoder = decoder(model, around.prefix);
    let ends = template(around.bos, around.eos);
    let beyond: Vec<(String, u32)> = added
        .iter()
        .filter(|token| token.id as usize >= model.pieces.len())
        .map(|token| (token.text.clone(), token.id))
        .collect();
    if let Some((text, _)) = beyond.iter().find(|(text, _)| !seen.insert(text)) {
        return Err(Malformed::field("added tokens", "texts of their own", format!("{text:?} twice")));
    }
    let unknown = model.pieces.iter().position(|piece| piece.kind == Kind::Unknown);
    match model.algorithm {
        Algorithm::Bpe => {
            let joined = |kind| kind == Kind::Normal || kind == Kind::UserDefined && !around.in_text;
            let scored: Vec<(&str, f32)> =
                model.pieces.iter().filter(|p| joined(p.kind)).map(|p| (p.text, p.score)).collect();
            let vocab = model.pieces.iter().map(|piece| piece.text).zip(0..);
            let bpe = Bpe {
                dropout: None,
                unk_token: unknown.map(|id| model.pieces[id].text),
                continuing_subword_prefix: None,
                end_of_word_suffix: None,
                fuse_unk: true,
                byte_fallback: model.byte_fallback,
                // A user-defined piece need not be made of others.
                ignore_merges: !user_defined.is_empty(),
                vocab: Entries(vocab.chain(beyond.iter().map(|(text, id)| (text.as_str(), *id))).collect()),
                merges: merges::derive(&scored)?,
            };
            Ok(Tokenizer::new(bpe, added, normalizer, pre_tokenizer, ends, decoder).bytes())
        }
        Algorithm::Unigram => {
            // The library numbers them itself, in order.
            let mut ids: Vec<u32> = beyond.iter().map(|(_, id)| *id).collect();
            ids.sort();
            if let Some((id, next)) = ids.iter().zip(model.pieces.len() as u32..).find(|(id, next)| *id != next) {
                return Err(Malformed::field("ids of added tokens", format!("{next} next"), id));
            }
            let unigram = Unigram {
                unk_id: unknown,
                vocab: model.pieces.iter().map(|piece| (piece.text, f64::from(piece.score))).collect(),
                byte_fallback: model.byte_fallback,
            };
            Ok(Tokenizer::new(unigram, added, normalizer, pre_tokenizer, ends, decoder).bytes())
        }
    }
}

/// SentencePiece's order: characters, extra spaces, `▁` for a space, the space before the text.
fn normalizer(model: &Model<'_>, prefix: Prefix, own: bool) -> Json {
    let replace = |pattern: Json, content: &str| json!({ "type": "Replace", "pattern": pattern, "content": content });
    let spec = &model.normalizer;
    let mut steps = vec![];
    if own && !spec.charsmap.is_empty() {
        steps.push(json!({ "type": "Precompiled", "precompiled_charsmap": base64(spec.charsmap) }));
    }
    if own && spec.remove_extra_whitespaces {
        steps.push(replace(json!({ "Regex": r"\A +| +\z" }), ""));
        steps.push(replace(json!({ "Regex": " {2,}" }), " "));
    }
    if own && spec.escape_whitespaces {
        steps.push(replace(json!({ "String": " " }), "▁"));
    }
    if prefix == Prefix::Every {
        steps.push(json!({ "type": "Prepend", "prepend": if spec.escape_whitespaces { "▁" } else { " " } }));
    }
    sequence("Sequence", "normalizers", steps)
}

fn pre_tokenizer(prefix: Prefix, own: bool, user_defined: &[&str], controls: &[&str]) -> Json {
    let metaspace =
        |scheme: &str| json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false });
    let mut steps = match prefix {
        // The normalizer has done it.
        Prefix::Every => vec![],
        Prefix::Never if own => vec![],
        Prefix::EveryUnlessSpace => vec![metaspace("always")],
        Prefix::First => vec![metaspace("first")],
        Prefix::Never => vec![metaspace("never")],
    };
    if !user_defined.is_empty() {
        let mut longest_first = user_defined.to_vec();
        longest_first.sort_by_key(|text| std::cmp::Reverse(text.len()));
        steps.push(split(&longest_first.iter().map(|text| escape(text)).collect::<Vec<_>>().join("|")));
    }
    // The first character of each, followed by its rest.
    let heads = controls.iter().filter_map(|text| {
        let (at, _) = text.char_indices().nth(1)?;
        Some(format!("{}(?={})", escape(&text[..at]), escape(&text[at..])))
    });
    let heads = heads.collect::<Vec<_>>().join("|");
    if !heads.is_empty() {
        steps.push(split(&heads));
    }
    sequence("Sequence", "pretokenizers", steps)
}

fn decoder(model: &Model<'_>, prefix: Prefix) -> Json {
    let mut steps = vec![json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " })];
    if model.byte_fallback {
        steps.push(json!({ "type": "ByteFallback" }));
    }
    if model.byte_fallback || prefix != Prefix::Never {
        steps.push(json!({ "type": "Fuse" }));
    }
    if prefix != Prefix::Never {
        steps.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    sequence("Sequence", "decoders", steps)
}
