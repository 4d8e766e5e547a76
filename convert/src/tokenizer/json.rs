//! The parts of a tokenizer.json, as the `tokenizers` library names them.

use serde::{Serialize, Serializer};
use serde_json::{Value as Json, json};

use super::Added;

/// A whole tokenizer.json.
#[derive(Debug, Serialize)]
pub struct Tokenizer<M> {
    version: &'static str,
    truncation: Option<()>,
    padding: Option<()>,
    added_tokens: Vec<Json>,
    normalizer: Json,
    pre_tokenizer: Json,
    post_processor: Json,
    decoder: Json,
    model: M,
}

impl<M: Serialize> Tokenizer<M> {
    /// `added` in any order; what is `null` does nothing.
    pub fn new(
        model: M,
        mut added: Vec<Added>,
        normalizer: Json,
        pre_tokenizer: Json,
        post_processor: Json,
        decoder: Json,
    ) -> Tokenizer<M> {
        added.sort_by_key(|token| token.id);
        let added_tokens = added.iter().map(added_token).collect();
        Tokenizer {
            version: "1.0",
            truncation: None,
            padding: None,
            added_tokens,
            normalizer,
            pre_tokenizer,
            post_processor,
            decoder,
            model,
        }
    }

    /// The bytes of the file.
    pub fn bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("finite numbers and text can be written")
    }
}

fn added_token(token: &Added) -> Json {
    json!({
        "id": token.id, "content": token.text, "single_word": token.single_word, "lstrip": token.lstrip,
        "rstrip": token.rstrip, "normalized": false, "special": token.special,
    })
}

/// The model of a byte-pair encoding.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "BPE")]
pub struct Bpe<'a> {
    /// Always none: a text has one tokenization.
    pub dropout: Option<f32>,
    /// What stands for a character that has no token.
    pub unk_token: Option<&'a str>,
    /// Empty for the byte-level kind.
    pub continuing_subword_prefix: Option<&'a str>,
    /// As the former.
    pub end_of_word_suffix: Option<&'a str>,
    /// Unknown characters side by side are one unknown token.
    pub fuse_unk: bool,
    /// A character without a token becomes the tokens of its bytes.
    pub byte_fallback: bool,
    /// A pre-token that is a token is not built from merges.
    pub ignore_merges: bool,
    /// Tokens and ids.
    pub vocab: Entries<'a>,
    /// Best first.
    pub merges: Vec<(&'a str, &'a str)>,
}

/// The model of a unigram vocabulary: the place in the list is the id.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "Unigram")]
pub struct Unigram<'a> {
    /// What stands for a character that has no token.
    pub unk_id: Option<usize>,
    /// Tokens and log probabilities.
    pub vocab: Vec<(&'a str, f64)>,
    /// A character without a token becomes the tokens of its bytes.
    pub byte_fallback: bool,
}

/// Tokens and ids, each token once.
#[derive(Debug)]
pub struct Entries<'a>(pub Vec<(&'a str, u32)>);

impl Serialize for Entries<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(text, id)| (text, id)))
    }
}

/// Cuts at every match; matches are pieces of their own.
pub fn split(regex: &str) -> Json {
    json!({ "type": "Split", "pattern": { "Regex": regex }, "behavior": "Isolated", "invert": false })
}

/// Several steps in turn, or the only one, or nothing.
pub fn sequence(kind: &str, list: &str, mut steps: Vec<Json>) -> Json {
    match steps.len() {
        0 => Json::Null,
        1 => steps.remove(0),
        _ => json!({ "type": kind, list: steps }),
    }
}

/// Bytes as characters that can be printed, after GPT-2's own splitting if `use_regex`.
pub fn byte_level(use_regex: bool, add_prefix_space: bool) -> Json {
    json!({
        "type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": true, "use_regex": use_regex,
    })
}

/// Puts a text's beginning and end tokens (id and text) around it.
pub fn template(bos: Option<(u32, &str)>, eos: Option<(u32, &str)>) -> Json {
    if bos.is_none() && eos.is_none() {
        return Json::Null;
    }
    let mut special = serde_json::Map::new();
    for (id, text) in bos.iter().chain(&eos) {
        special.insert(text.to_string(), json!({ "id": text, "ids": [id], "tokens": [text] }));
    }
    let wrapped = |sequence: &str, type_id: u32| {
        let one = |token: Option<(u32, &str)>| {
            token.map(|(_, text)| json!({ "SpecialToken": { "id": text, "type_id": type_id } }))
        };
        let middle = json!({ "Sequence": { "id": sequence, "type_id": type_id } });
        one(bos).into_iter().chain([middle]).chain(one(eos)).collect::<Vec<_>>()
    };
    let pair = [wrapped("A", 0), wrapped("B", 1)].concat();
    json!({ "type": "TemplateProcessing", "single": wrapped("A", 0), "pair": pair, "special_tokens": special })
}

/// Base64 (RFC 4648, with padding): how a tokenizer.json holds SentencePiece's character map.
pub fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let word = group.iter().fold(0u32, |word, &byte| word << 8 | u32::from(byte)) << (8 * (3 - group.len()));
        for place in 0..4 {
            let digit = ALPHABET[(word >> (18 - 6 * place) & 63) as usize];
            text.push(if place > group.len() { '=' } else { digit as char });
        }
    }
    text
}

/// A regular expression that matches exactly this text.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if r"\.+*?()|[]{}^$#&-~/<>".contains(c) || c == ' ' {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_of_the_rfc() {
        let cases = ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYg==", "Zm9vYmE=", "Zm9vYmFy"];
        for (len, expected) in cases.iter().enumerate() {
            assert_eq!(base64(&b"foobar"[..len]), *expected);
        }
        assert_eq!(base64(&[0xfb, 0xff]), "+/8=");
    }

    #[test]
    fn template_with_and_without_ends() {
        assert_eq!(template(None, None), Json::Null);
        let both = template(Some((1, "<s>")), Some((2, "</s>")));
        assert_eq!(both["single"].as_array().map(Vec::len), Some(3));
        assert_eq!(both["pair"].as_array().map(Vec::len), Some(6));
        assert_eq!(both["special_tokens"]["</s>"]["ids"][0], 2);
    }
}
