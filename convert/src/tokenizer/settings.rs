//! What the JSON files beside a vocabulary say about it (tokenizer_config.json, special_tokens_map.json,
//! added_tokens.json), read as transformers 5 reads them.

use std::collections::HashMap;

use serde_json::Value as Json;

use super::{
    Added,
    byte_level::{self, ByteLevel},
    pieces::{self, Around, Prefix},
    pre, sentencepiece,
};
use crate::Malformed;

/// The files, `null` where there is none.
#[derive(Debug, Default)]
pub struct Settings {
    /// tokenizer_config.json.
    pub config: Json,
    /// special_tokens_map.json.
    pub special: Json,
    /// added_tokens.json: text -> id.
    pub added: Json,
    /// `model_type` of config.json.
    pub model_type: String,
}

/// Families whose tokenizer transformers 5 builds from the model's own settings, whatever class is named.
const OWN_SETTINGS: [&str; 9] =
    ["granite", "internlm2", "ministral", "ministral3", "mistral", "mixtral", "olmo2", "phi3", "stablelm"];
/// Classes that number the pieces of their SentencePiece model anew.
const RENUMBERED: [&str; 12] = [
    "BarthezTokenizer",
    "CamembertTokenizer",
    "M2M100Tokenizer",
    "MBart50Tokenizer",
    "MBartTokenizer",
    "NllbTokenizer",
    "PLBartTokenizer",
    "PegasusTokenizer",
    "SeamlessM4TTokenizer",
    "Speech2TextTokenizer",
    "XGLMTokenizer",
    "XLMRobertaTokenizer",
];
/// Special tokens with a role, in the order in which new ones are numbered.
const ROLES: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
/// Ids are below this: 64 times the largest vocabulary.
const MOST_IDS: u32 = 1 << 24;

impl Settings {
    /// tokenizer.json of a SentencePiece model.
    pub fn sentencepiece(&self, bytes: &[u8], notes: &mut Vec<String>) -> Result<Vec<u8>, Malformed> {
        if is_tiktoken(bytes) {
            return Err(tiktoken("tokenizer.model"));
        }
        let mut model = sentencepiece::parse(bytes)?;
        if let Some(class) = self.class().filter(|class| RENUMBERED.contains(class)) {
            return Err(Malformed::Unsupported {
                what: format!("tokenizer_class {class}, which numbers the pieces anew"),
                next: NEXT.into(),
            });
        }
        let decoder = self.decoder()?;
        // A name that another piece has already stays there.
        let named: HashMap<&str, usize> = model.pieces.iter().enumerate().map(|(id, p)| (p.text, id)).collect();
        for token in &decoder {
            let id = token.id as usize;
            let taken =
                named.get(token.text.as_str()).is_some_and(|&other| !decoder.iter().any(|t| t.id as usize == other));
            if let Some(piece) = model.pieces.get_mut(id).filter(|_| !taken) {
                piece.text = token.text.as_str();
            }
        }
        let llama = matches!(self.class(), Some("LlamaTokenizer" | "CodeLlamaTokenizer"))
            && !OWN_SETTINGS.contains(&self.model_type.as_str());
        let dummy = model.normalizer.add_dummy_prefix;
        let prefix = match (llama, self.flag("legacy")?, self.flag("add_prefix_space")?) {
            (true, _, Some(false)) => Prefix::Never,
            (true, Some(true), _) => Prefix::EveryUnlessSpace,
            (true, ..) => Prefix::First,
            (false, ..) if !dummy => Prefix::Never,
            (false, Some(false), _) => Prefix::First,
            (false, ..) => Prefix::Every,
        };
        let piece =
            |id: Option<u32>| id.and_then(|id| model.pieces.get(id as usize)).map(|piece| piece.text.to_string());
        let usual = [("bos_token", piece(model.bos)), ("eos_token", piece(model.eos))];
        let texts = model.pieces.iter().map(|piece| piece.text).zip(0..);
        let tokens = self.tokens(texts, decoder.clone(), &usual)?;
        // LlamaTokenizer documents that it begins a text with BOS.
        let (bos, eos) = tokens.ends(self, llama)?;
        notes.push(format!(
            "tokenizer.json was made from tokenizer.model ({} pieces, {}; {})",
            model.pieces.len(),
            match model.algorithm {
                sentencepiece::Algorithm::Bpe => "byte pairs",
                sentencepiece::Algorithm::Unigram => "unigram",
            },
            self.about_bos(bos),
        ));
        let around = Around { prefix, normalizer: !llama, in_text: !llama, added: tokens.added.clone(), bos, eos };
        pieces::tokenizer_json(&model, around)
    }

    /// tokenizer.json of vocab.json and merges.txt, GPT-2's two files.
    pub fn byte_level(&self, vocab: &Json, merges: &str, notes: &mut Vec<String>) -> Result<Vec<u8>, Malformed> {
        let class = self.class();
        let name = match (class, self.model_type.as_str()) {
            (Some("GPT2Tokenizer"), _) | (None, "gpt2" | "gpt_neo" | "starcoder2") => "gpt-2",
            (Some("Qwen2Tokenizer"), _) | (None, "qwen2" | "qwen2_moe" | "qwen3" | "qwen3_moe") => "qwen2",
            _ => {
                let what = match class {
                    Some(class) => format!("vocab.json of a {class} (tokenizer_class)"),
                    None => format!("vocab.json of a model of type {} and no tokenizer_class", self.model_type),
                };
                return Err(Malformed::Unsupported { what, next: NEXT.into() });
            }
        };
        let add_prefix_space = self.flag("add_prefix_space")?.unwrap_or(false);
        let pre = pre::named(name, add_prefix_space).expect("both names are known");
        let object = vocab.as_object().ok_or_else(|| Malformed::field("vocabulary", "an object", shown(vocab)))?;
        let mut entries = vec![];
        for (text, id) in object {
            entries.push((text.as_str(), id_of(text, id)?));
        }
        let end = Some("<|endoftext|>".to_string());
        let bos = if name == "gpt-2" { end.clone() } else { None };
        let usual = [("bos_token", bos), ("eos_token", end.clone()), ("unk_token", end)];
        let tokens = self.tokens(entries.iter().copied(), self.decoder()?, &usual)?;
        let (bos, eos) = tokens.ends(self, false)?;
        let mut pairs = vec![];
        for line in merges.lines().filter(|line| !line.starts_with("#version") && !line.trim_end().is_empty()) {
            let pair = byte_level::pair(line.trim_end());
            pairs.push(pair.ok_or_else(|| Malformed::field("merges.txt: line", "two parts", format!("{line:?}")))?);
        }
        notes.push(format!(
            "tokenizer.json was made from vocab.json and merges.txt ({} tokens, cut as {name} cuts; {})",
            entries.len(),
            self.about_bos(bos),
        ));
        let beyond = tokens.added.iter().filter(|token| !object.contains_key(&token.text));
        let vocab = entries.iter().copied().chain(beyond.map(|token| (token.text.as_str(), token.id))).collect();
        ByteLevel { vocab, merges: pairs, pre, added: tokens.added.clone(), bos, eos }.tokenizer_json("merges.txt")
    }

    /// `tokenizer_class`, slow and fast alike.
    fn class(&self) -> Option<&str> {
        let class = self.config.get("tokenizer_class")?.as_str()?;
        let class = class.strip_suffix("Fast").unwrap_or(class);
        // These say that tokenizer.json says everything.
        Some(class).filter(|class| !matches!(*class, "PreTrainedTokenizer" | "TokenizersBackend"))
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, Malformed> {
        match self.config.get(key) {
            None | Some(Json::Null) => Ok(None),
            Some(Json::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => {
                Err(Malformed::field(format!("tokenizer_config.json: {key}"), "true or false", shown(other)))
            }
        }
    }

    fn about_bos(&self, bos: Option<(u32, &str)>) -> String {
        let silent = if self.config.get("add_bos_token").is_none_or(Json::is_null) { ", by default" } else { "" };
        match bos {
            Some((_, text)) => format!("a text begins with {text}{silent}"),
            None => format!("nothing is put before a text{silent}"),
        }
    }

    /// The tokens that `added_tokens_decoder` and added_tokens.json list.
    fn decoder(&self) -> Result<Vec<Added>, Malformed> {
        let mut list = vec![];
        for (id, token) in self.config.get("added_tokens_decoder").and_then(Json::as_object).into_iter().flatten() {
            let what = format!("tokenizer_config.json: added_tokens_decoder: {id:?}");
            let number = id.parse::<u32>().ok().filter(|&id| id < MOST_IDS);
            let number = number.ok_or_else(|| Malformed::field(&what, format!("an id below {MOST_IDS}"), id))?;
            let text = text_of(token).ok_or_else(|| Malformed::field(&what, "a token with content", shown(token)))?;
            list.push(with_flags(Added::new(number, text, false), token));
        }
        for (text, id) in self.added.as_object().into_iter().flatten() {
            let id = id_of(text, id)?;
            if !list.iter().any(|token| token.id == id || token.text == *text) {
                list.push(Added::new(id, text, false));
            }
        }
        list.sort_by_key(|token| token.id);
        if let Some(pair) = list.windows(2).find(|pair| pair[0].id == pair[1].id) {
            let got = format!("{:?} and {:?}", pair[0].text, pair[1].text);
            return Err(Malformed::field(format!("added tokens with id {}", pair[0].id), "one", got));
        }
        Ok(list)
    }

    /// A value of tokenizer_config.json, or else of special_tokens_map.json.
    fn either(&self, key: &str) -> Option<&Json> {
        [&self.config, &self.special].into_iter().find_map(|file| file.get(key).filter(|value| !value.is_null()))
    }

    /// All added tokens with their ids: those of the vocabulary keep theirs, new ones follow it.
    fn tokens<'v>(
        &self,
        vocab: impl Iterator<Item = (&'v str, u32)>,
        decoder: Vec<Added>,
        usual: &[(&str, Option<String>)],
    ) -> Result<Tokens, Malformed> {
        let vocab: HashMap<&str, u32> = vocab.collect();
        let taken: HashMap<u32, &str> = vocab.iter().map(|(&text, &id)| (id, text)).collect();
        let mut added: Vec<Added> = vec![];
        for mut token in decoder {
            match vocab.get(token.text.as_str()) {
                Some(&id) => token.id = id,
                None => {
                    if let Some(other) = taken.get(&token.id) {
                        let what = format!("id {} of the added token {:?}", token.id, token.text);
                        return Err(Malformed::field(what, "an id of its own", format!("that of {other:?}")));
                    }
                }
            }
            if !added.iter().any(|other| other.id == token.id) {
                added.push(token);
            }
        }
        let highest = vocab.values().copied().chain(added.iter().map(|token| token.id)).max();
        let mut next = highest.map_or(0, |id| id + 1);
        let mut special = |token: Added| -> Token {
            if let Some(same) = added.iter_mut().find(|other| other.text == token.text) {
                same.special = true;
                return (same.id, same.text.clone());
            }
            let id = vocab.get(token.text.as_str()).copied().unwrap_or_else(|| {
                next += 1;
                next - 1
            });
            let named = (id, token.text.clone());
            added.push(Added { id, special: true, ..token });
            named
        };
        let mut roles = HashMap::new();
        for role in ROLES {
            let value = self.either(role);
            let by_default = || usual.iter().find(|(name, _)| *name == role).and_then(|(_, text)| text.clone());
            let token = match value {
                Some(value) => text_of(value).map(|text| with_flags(Added::new(0, text, true), value)),
                None => by_default().map(|text| Added::new(0, &text, true)),
            };
            if let Some(token) = token {
                roles.insert(role, special(token));
            }
        }
        for key in ["additional_special_tokens", "extra_special_tokens"] {
            let list: Vec<&Json> = match self.either(key) {
                Some(Json::Array(list)) => list.iter().collect(),
                Some(Json::Object(named)) => named.values().collect(),
                _ => vec![],
            };
            for value in list {
                if let Some(text) = text_of(value) {
                    special(with_flags(Added::new(0, text, true), value));
                }
            }
        }
        Ok(Tokens { added, roles })
    }
}

/// Id and text.
type Token = (u32, String);

/// The added tokens, and which of them have a role.
struct Tokens {
    added: Vec<Added>,
    roles: HashMap<&'static str, Token>,
}

impl Tokens {
    /// What begins and ends a text.
    #[allow(clippy::type_complexity)]
    fn ends(
        &self,
        settings: &Settings,
        add_bos: bool,
    ) -> Result<(Option<(u32, &str)>, Option<(u32, &str)>), Malformed> {
        let end = |flag: &str, usual: bool, role: &str| {
            if !settings.flag(flag)?.unwrap_or(usual) {
                return Ok(None);
            }
            let token = self.roles.get(role).map(|(id, text)| (*id, text.as_str()));
            token.map(Some).ok_or_else(|| Malformed::field(format!("{flag} is set: {role}"), "a token", "none"))
        };
        Ok((end("add_bos_token", add_bos, "bos_token")?, end("add_eos_token", false, "eos_token")?))
    }
}

/// What to do with a vocabulary that is not read.
pub const NEXT: &str = "take a version of the model with tokenizer.json, or have transformers make it \
                        (AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR))";

/// The refusal of a vocabulary in tiktoken's form, found in `file`.
pub fn tiktoken(file: &str) -> Malformed {
    Malformed::Unsupported {
        what: format!("{file} is a tiktoken vocabulary, which does not say how a text is cut"),
        next: NEXT.into(),
    }
}

/// tiktoken's form: lines of a token in Base64, a space and the rank.
fn is_tiktoken(bytes: &[u8]) -> bool {
    let line = bytes.split(|&b| b == b'\n').next().unwrap_or_default();
    let Some(space) = line.iter().position(|&b| b == b' ') else { return false };
    let (token, rank) = (&line[..space], line[space + 1..].trim_ascii_end());
    let base64 = |b: &u8| b.is_ascii_alphanumeric() || b"+/=".contains(b);
    !token.is_empty() && token.iter().all(base64) && !rank.is_empty() && rank.iter().all(u8::is_ascii_digit)
}

fn id_of(text: &str, id: &Json) -> Result<u32, Malformed> {
    let number = id.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|&id| id < MOST_IDS);
    number.ok_or_else(|| Malformed::field(format!("id of the token {text:?}"), format!("below {MOST_IDS}"), shown(id)))
}

/// A token given by its text, or as an object.
fn text_of(token: &Json) -> Option<&str> {
    token.as_str().or_else(|| token.get("content")?.as_str()).filter(|text| !text.is_empty())
}

fn with_flags(token: Added, json: &Json) -> Added {
    let flag = |key: &str| json.get(key).and_then(Json::as_bool).unwrap_or(false);
    let special = token.special || flag("special");
    Added { special, lstrip: flag("lstrip"), rstrip: flag("rstrip"), single_word: flag("single_word"), ..token }
}

fn shown(json: &Json) -> String {
    let text = json.to_string();
    text.chars().take(60).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vocab_of(json: &[u8]) -> Json {
        serde_json::from_slice(json).unwrap()
    }

    fn settings(config: Json, model_type: &str) -> Settings {
        Settings { config, model_type: model_type.into(), ..Settings::default() }
    }

    #[test]
    fn vocab_and_merges_with_added_tokens() {
        let vocab = serde_json::json!({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3});
        let config = serde_json::json!({
            "tokenizer_class": "Qwen2Tokenizer", "add_bos_token": true, "bos_token": "<|im_start|>",
            "added_tokens_decoder": {"6": {"content": "<|im_start|>", "special": true, "rstrip": true}},
            "additional_special_tokens": ["<|new|>", "a"],
        });
        let mut notes = vec![];
        let json = settings(config, "qwen2").byte_level(&vocab, "#version: 0.2\na b\n\n", &mut notes).unwrap();
        let json = vocab_of(&json);
        let added: Vec<_> = json["added_tokens"]
            .as_array()
            .unwrap()
            .iter()
            .map(|t| (t["id"].as_u64().unwrap(), &t["content"]))
            .collect();
        assert_eq!(
            added,
            [(0, &"a".into()), (3, &"<|endoftext|>".into()), (6, &"<|im_start|>".into()), (7, &"<|new|>".into())]
        );
        assert_eq!(json["model"]["vocab"]["<|new|>"], 7);
        assert_eq!(json["added_tokens"][2]["rstrip"], true);
        assert_eq!(json["model"]["merges"], serde_json::json!([["a", "b"]]));
        assert_eq!(json["normalizer"]["type"], "NFC");
        assert_eq!(json["post_processor"]["single"][0]["SpecialToken"]["id"], "<|im_start|>");
        assert!(notes[0].contains("cut as qwen2 cuts; a text begins with <|im_start|>"), "{notes:?}");
    }

    #[test]
    fn what_is_wrong_is_named() {
        let build = |config: Json, model_type: &str, vocab: Json, merges: &str| {
            settings(config, model_type).byte_level(&vocab, merges, &mut vec![]).unwrap_err().to_string()
        };
        let ab = || serde_json::json!({"a": 0, "b": 1});
        let json = |text: &str| -> Json { serde_json::from_str(text).unwrap() };
        let cases = [
            (build(json("{}"), "gpt2", ab(), "a b"), "\"ab\" is not in the vocabulary"),
            (build(json("{}"), "gpt2", ab(), "a b c"), "merges.txt: line: expected two parts"),
            (build(json("{}"), "gpt2", json(r#"{"a": -1}"#), ""), "id of the token \"a\""),
            (build(json("{}"), "gpt2", json(r#"{"a": 4000000000}"#), ""), "expected below 16777216"),
            (build(json("{}"), "gpt2", json("[]"), ""), "vocabulary: expected an object"),
            (build(json("{}"), "llama", ab(), ""), "vocab.json of a model of type llama and no tokenizer_class"),
            (
                build(json(r#"{"tokenizer_class": "BartTokenizerFast"}"#), "gpt2", ab(), ""),
                "vocab.json of a BartTokenizer",
            ),
            (
                build(json(r#"{"legacy": 1, "add_bos_token": "x"}"#), "gpt2", ab(), ""),
                "add_bos_token: expected true or false",
            ),
            (
                build(json(r#"{"added_tokens_decoder": {"0": {"content": "x"}}}"#), "gpt2", ab(), ""),
                "id 0 of the added token \"x\": expected an id of its own, got that of \"a\"",
            ),
            (
                build(json(r#"{"added_tokens_decoder": {"x": {"content": "x"}}}"#), "gpt2", ab(), ""),
                "expected an id below",
            ),
            (build(json(r#"{"added_tokens_decoder": {"5": {}}}"#), "gpt2", ab(), ""), "expected a token with content"),
            (
                build(json(r#"{"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": true}"#), "", ab(), ""),
                "add_bos_token is set: bos_token: expected a token, got none",
            ),
        ];
        for (got, expected) in cases {
            assert!(got.contains(expected), "{got}\n{expected}");
        }
    }

    #[test]
    fn tiktoken_files_are_recognised() {
        assert!(is_tiktoken(b"IQ== 0\nIg== 1\n"));
        assert!(is_tiktoken(b"IQ== 0\r\n"));
        for other in [&b""[..], b"\n", b"IQ==\n", b"IQ== x\n", b" 0\n", b"\x0a\x0e\x0a\x05<unk> 0"] {
            assert!(!is_tiktoken(other), "{other:?}");
        }
        let error = settings(Json::Null, "llama").sentencepiece(b"IQ== 0\n", &mut vec![]).unwrap_err().to_string();
        assert!(
            error.contains("tokenizer.model is a tiktoken vocabulary") && error.contains("save_pretrained"),
            "{error}"
        );
    }
}
