//! The tokenizer of a model: the `tokenizers` crate on a tokenizer.json, plus the bytes of a token.
//!
//! A token stands for bytes, not for text: one character may be spread over several tokens. So what
//! streams out of the engine goes through [`Tokenizer::token_bytes`] and `text::stream`, and
//! [`Tokenizer::decode`] (the library's own way back) serves whole texts.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Once, OnceLock};

use serde_json::Value;
use tokenizers::{
    AddedVocabulary, DecoderWrapper, ModelWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper,
    TokenizerImpl,
};

use super::{bpe::Bpe, printable};

/// Why text and tokens could not be converted.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The JSON could not be read.
    #[error("the tokenizer ({bytes} bytes of tokenizer.json) cannot be read: {}", printable(reason))]
    Read {
        /// Length of the JSON.
        bytes: usize,
        /// What the library says.
        reason: String,
    },
    /// A decoder whose tokens have no bytes of their own.
    #[error(
        "the tokenizer's decoder is `{}`, expected ByteLevel, or ByteFallback/Metaspace/Replace/BPEDecoder \
         (with Fuse and Strip); such a model cannot be streamed",
        printable(found)
    )]
    Decoder {
        /// The decoder's type, or its JSON where it has none.
        found: String,
    },
    /// The library refused a text.
    #[error("{bytes} bytes of text could not be tokenized: {}", printable(reason))]
    Encode {
        /// Length of the text.
        bytes: usize,
        /// What the library says.
        reason: String,
    },
    /// The library refused tokens.
    #[error("{tokens} tokens could not be turned into text: {}", printable(reason))]
    Decode {
        /// How many tokens.
        tokens: usize,
        /// What the library says.
        reason: String,
    },
}

/// A tokenizer.json, ready to use from any thread.
pub struct Tokenizer {
    inner: Inner,
    /// The same, but special tokens in the text are ordinary text; built when first needed.
    plain: OnceLock<Inner>,
    bytes: Bytes,
    /// One more than the highest token.
    vocab_size: usize,
    /// Bytes of text that one token takes at most; worked out when first needed.
    longest: OnceLock<usize>,
}

/// The library with our model, or whole.
#[derive(Clone)]
enum Inner {
    Compact(Box<Compact>),
    Library(Box<tokenizers::Tokenizer>),
}

type Compact = TokenizerImpl<Bpe, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// The same expression on either; both offer the library's methods.
macro_rules! either {
    ($inner:expr, $t:ident => $do:expr) => {
        match $inner {
            Inner::Compact($t) => $do,
            Inner::Library($t) => $do,
        }
    };
}

impl Inner {
    fn from_json(json: &[u8]) -> tokenizers::Result<Inner> {
        if let Ok(compact) = serde_json::from_slice::<Compact>(json) {
            return Ok(Inner::Compact(Box::new(compact)));
        }
        let mut library = tokenizers::Tokenizer::from_bytes(json)?;
        // A text has one tokenization; dropout is for training.
        if let ModelWrapper::BPE(bpe) = library.get_model()
            && bpe.dropout.is_some()
        {
            let mut bpe = bpe.clone();
            bpe.dropout = None;
            library.with_model(bpe);
        }
        Ok(Inner::Library(Box::new(library)))
    }

    fn added(&self) -> &AddedVocabulary {
        either!(self, t => t.get_added_vocabulary())
    }

    /// One more than the highest token.
    fn vocab_size(&self) -> usize {
        let highest = match self {
            Inner::Compact(t) => {
                let added = self.added().get_vocab().values().map(|&id| id as usize + 1);
                return added.fold(t.get_model().end(), usize::max);
            }
            Inner::Library(t) => t.get_vocab(true).into_values().max(),
        };
        highest.map_or(0, |highest| highest as usize + 1)
    }
}

impl Tokenizer {
    /// Reads the bytes of a tokenizer.json.
    pub fn from_json(json: &[u8]) -> Result<Tokenizer, TokenizerError> {
        let unreadable = |reason: String| TokenizerError::Read { bytes: json.len(), reason };
        let mut inner = caught(|| Inner::from_json(json)).map_err(unreadable)?;
        // Some files carry the truncation and padding that training happened to use.
        either!(&mut inner, t => t.with_truncation(None).map(drop)).map_err(|e| unreadable(e.to_string()))?;
        either!(&mut inner, t => drop(t.with_padding(None)));
        let decoder = either!(&inner, t => serde_json::to_value(t.get_decoder()));
        let bytes = Bytes::from_decoder(&decoder.map_err(|e| unreadable(e.to_string()))?)?;
        let vocab_size = inner.vocab_size();
        Ok(Tokenizer { inner, plain: OnceLock::new(), bytes, vocab_size, longest: OnceLock::new() })
    }

    /// The tokens of a text, and nothing else: no BOS or other added tokens.
    ///
    /// `parse_special`: whether the text of a special token stands for that token (chat templates
    /// need this) or for its letters.
    pub fn encode(&self, text: &str, parse_special: bool) -> Result<Vec<u32>, TokenizerError> {
        self.encode_as(text, parse_special, false)
    }

    /// As [`Tokenizer::encode`] with special tokens parsed, plus what the model's post-processor
    /// adds to a text that is not a rendered conversation, usually BOS.
    pub fn encode_with_bos(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.encode_as(text, true, true)
    }

    /// The text of tokens, as the library decodes a whole text.
    pub fn decode(&self, tokens: &[u32], skip_special: bool) -> Result<String, TokenizerError> {
        caught(|| either!(&self.inner, t => t.decode(tokens, skip_special)))
            .map_err(|reason| TokenizerError::Decode { tokens: tokens.len(), reason })
    }

    /// The bytes that a token stands for; special tokens: their text. `None`: no such token.
    pub fn token_bytes(&self, token: u32) -> Option<Vec<u8>> {
        let text = self.token_text(token)?;
        if self.inner.added().get_added_tokens_decoder().get(&token).is_some_and(|added| {
            // Byte-level alphabets apply to the model's own tokens only.
            added.special || self.bytes.byte_level
        }) {
            return Some(text.into_bytes());
        }
        Some(self.bytes.of(&text))
    }

    /// Whether a token is marked special: a control token, not part of the text.
    pub fn is_special(&self, token: u32) -> bool {
        self.inner.added().get_added_tokens_decoder().get(&token).is_some_and(|t| t.special)
    }

    /// The token with this text (in the vocabulary's own alphabet), e.g. `<|im_end|>`.
    pub fn id_of(&self, token: &str) -> Option<u32> {
        either!(&self.inner, t => t.token_to_id(token))
    }

    /// The text of a token in the vocabulary's own alphabet.
    pub fn token_text(&self, token: u32) -> Option<String> {
        either!(&self.inner, t => t.id_to_token(token))
    }

    /// One more than the highest token. A model may have more rows (padding) or fewer tokens.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Most bytes of text that one token stands for: a longer text has more tokens than one.
    ///
    /// Where a normalizer may shorten the text, or unknown text of any length may become one token, it is four times
    /// the longest token's bytes: more than composing (NFC), folding case or full-width forms (NFKC) save.
    pub fn longest_token(&self) -> usize {
        *self.longest.get_or_init(|| {
            let bytes = |id| self.token_bytes(id as u32).map_or(0, |bytes| bytes.len());
            let longest = (0..self.vocab_size).map(bytes).max().unwrap_or(0).max(1);
            let normalizes = either!(&self.inner, t => t.get_normalizer().is_some());
            if normalizes || !self.bytes.byte_level { 4 * longest } else { longest }
        })
    }

    /// Whether a text's first token begins with a space that is not part of the text
    /// (SentencePiece's dummy prefix).
    pub fn strips_leading_space(&self) -> bool {
        self.bytes.strip_leading
    }

    fn encode_as(&self, text: &str, parse_special: bool, add_special: bool) -> Result<Vec<u32>, TokenizerError> {
        let tokenizer = match parse_special {
            true => &self.inner,
            false => self.plain.get_or_init(|| {
                let mut plain = self.inner.clone();
                either!(&mut plain, t => t.set_encode_special_tokens(true));
                plain
            }),
        };
        let encoding = caught(|| either!(tokenizer, t => t.encode_fast(text, add_special)))
            .map_err(|reason| TokenizerError::Encode { bytes: text.len(), reason })?;
        Ok(encoding.get_ids().to_vec())
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size).finish_non_exhaustive()
    }
}

/// Runs the library, which panics on some settings of a tokenizer.json that make no sense.
fn caught<T>(library: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    thread_local! { static QUIET: Cell<bool> = const { Cell::new(false) } }
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            if !QUIET.get() {
                before(panic)
            }
        }));
    });
    let before = QUIET.replace(true);
    let result = panic::catch_unwind(AssertUnwindSafe(library));
    QUIET.set(before);
    match result {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("it gives up");
            Err(format!("the tokenizer's own settings cannot be used: {text}"))
        }
    }
}

/// How the text of a vocabulary entry stands for bytes: the decoder, one token at a time.
#[derive(Debug, Default)]
struct Bytes {
    byte_level: bool,
    byte_fallback: bool,
    strip_leading: bool,
    /// Replacements, in order: SentencePiece's `▁` by a space, or a word-end mark at the end.
    replace: Vec<(String, String)>,
    word_end: Option<String>,
}

impl Bytes {
    fn from_decoder(decoder: &Value) -> Result<Bytes, TokenizerError> {
        let mut bytes = Bytes::default();
        bytes.add(decoder)?;
        Ok(bytes)
    }

    fn add(&mut self, step: &Value) -> Result<(), TokenizerError> {
        if step.is_null() {
            return Ok(()); // no decoder: tokens are their text
        }
        let unsupported = |found: &str| TokenizerError::Decoder { found: found.to_string() };
        let text = |field: &Value| field.as_str().map(String::from).ok_or_else(|| unsupported(&step.to_string()));
        match step["type"].as_str().unwrap_or_default() {
            "Sequence" => {
                let steps = step["decoders"].as_array().ok_or_else(|| unsupported(&step.to_string()))?;
                steps.iter().try_for_each(|step| self.add(step))?;
            }
            "ByteLevel" => self.byte_level = true,
            "ByteFallback" => self.byte_fallback = true,
            "Fuse" => {}
            "Strip" => self.strip_leading |= step["content"] == " " && step["start"] != 0,
            "Replace" => self.replace.push((text(&step["pattern"]["String"])?, text(&step["content"])?)),
            "Metaspace" => {
                self.replace.push((text(&step["replacement"])?, " ".to_string()));
                self.strip_leading |= step["prepend_scheme"] != "never";
            }
            "BPEDecoder" => self.word_end = Some(text(&step["suffix"])?),
            "" => return Err(unsupported(&step.to_string())),
            other => return Err(unsupported(other)),
        }
        Ok(())
    }

    fn of(&self, token: &str) -> Vec<u8> {
        if self.byte_fallback
            && let Some(byte) = fallback_byte(token)
        {
            return vec![byte];
        }
        if self.byte_level {
            // An entry with any other character is no byte-level entry: it is its text.
            let bytes: Option<Vec<u8>> = token.chars().map(byte_of).collect();
            return bytes.unwrap_or_else(|| token.as_bytes().to_vec());
        }
        let mut text = token.to_string();
        if let Some(mark) = &self.word_end
            && let Some(word) = text.strip_suffix(mark.as_str())
        {
            text = format!("{word} ");
        }
        for (from, to) in &self.replace {
            text = text.replace(from.as_str(), to);
        }
        text.into_bytes()
    }
}

/// The byte of a `<0x0A>` token.
fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok())?
}

/// Inverse of GPT-2's byte alphabet: printable bytes stand for themselves, the 68 others for
/// U+0100 onwards, in order.
fn byte_of(c: char) -> Option<u8> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    match u32::from(c) {
        code @ 0..=0xFF => Some(code as u8).filter(|&byte| printable(byte)),
        code => (0..=u8::MAX).filter(|&byte| !printable(byte)).nth((code - 0x100) as usize),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/llama/tokenizer.json");
    const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/golden");

    fn tiny() -> Tokenizer {
        Tokenizer::from_json(&std::fs::read(TINY).unwrap()).unwrap()
    }

    /// The real tokenizer (3.5 MB) lives outside the repository.
    fn smollm2() -> Option<Tokenizer> {
        let shared = std::env::var("QUERN_SHARED").unwrap_or_default();
        let path = std::path::Path::new(&shared).join("fixtures/real/gptq-w4-g64-sym/tokenizer.json");
        match std::fs::read(path) {
            Ok(json) => Some(Tokenizer::from_json(&json).unwrap()),
            Err(_) => {
                println!("SKIPPED text::tokenizer: goldens of SmolLM2 need QUERN_SHARED=<folder with fixtures/real>");
                None
            }
        }
    }

    fn streamed(tokenizer: &Tokenizer, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id).unwrap()).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn check_goldens(tokenizer: &Tokenizer, name: &str) {
        let golden: Value = serde_json::from_slice(&std::fs::read(format!("{GOLDEN}/{name}")).unwrap()).unwrap();
        let cases = golden["cases"].as_array().unwrap();
        assert!(cases.len() > 100);
        for case in cases {
            let text = case["text"].as_str().unwrap();
            let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
            assert_eq!(tokenizer.encode(text, true).unwrap(), ids, "{text:?}");
            let decoded = case["decoded"].as_str().unwrap();
            assert_eq!(tokenizer.decode(&ids, false).unwrap(), decoded, "{text:?}");
            assert_eq!(streamed(tokenizer, &ids), decoded, "{text:?}");
            let skipped = case["decoded_skip"].as_str().unwrap_or(decoded);
            assert_eq!(tokenizer.decode(&ids, true).unwrap(), skipped, "{text:?}");
            let text_only: Vec<u32> = ids.into_iter().filter(|&id| !tokenizer.is_special(id)).collect();
            assert_eq!(streamed(tokenizer, &text_only), skipped, "{text:?}");
        }
    }

    #[test]
    fn tiny_matches_the_reference_library() {
        check_goldens(&tiny(), "tokenizer_tiny.json");
    }

    #[test]
    fn smollm2_matches_the_reference_library() {
        if let Some(tokenizer) = smollm2() {
            check_goldens(&tokenizer, "tokenizer_smollm2.json");
        }
    }

    #[test]
    fn no_text_has_fewer_tokens_than_its_bytes_need() {
        let tokenizer = tiny();
        let most = tokenizer.longest_token();
        let mut random = crate::random::Random::new(7);
        let words = ["the", " the", "once upon", " ", "  ", "\n\n", "é", "你", "<|eos|>", "x"];
        for _ in 0..300 {
            let text: String = (0..random.below(40)).map(|_| words[random.below(words.len())]).collect();
            let tokens = tokenizer.encode(&text, true).unwrap().len();
            assert!(text.len() <= tokens * most, "{text:?}: {tokens} tokens of at most {most} bytes");
        }
        let longest = (0..320).filter_map(|id| tokenizer.token_bytes(id)).map(|bytes| bytes.len()).max().unwrap();
        assert!(most == longest || most == 4 * longest, "{most}, {longest}");
        // Its normalizer may shorten a text.
        assert_eq!(sentencepiece(llama2_decoder()).unwrap().longest_token(), 4 * "<unk>".len());
    }

    #[test]
    fn special_tokens_can_be_plain_text() {
        let tokenizer = tiny();
        assert_eq!(tokenizer.encode("<|eos|>", true).unwrap(), [2]);
        let plain = tokenizer.encode("<|eos|>", false).unwrap();
        assert!(plain.len() > 1 && !plain.contains(&2), "{plain:?}");
        assert_eq!(streamed(&tokenizer, &plain), "<|eos|>");
    }

    #[test]
    fn facts_about_the_vocabulary() {
        let tokenizer = tiny();
        assert_eq!(tokenizer.vocab_size(), 320);
        assert_eq!(tokenizer.id_of("<|bos|>"), Some(1));
        assert_eq!(tokenizer.id_of("no such token"), None);
        assert_eq!(tokenizer.token_text(2).as_deref(), Some("<|eos|>"));
        assert!(tokenizer.is_special(0) && !tokenizer.is_special(100));
        assert_eq!(tokenizer.token_bytes(320), None);
        assert!(!tokenizer.strips_leading_space());
        // Its post-processor adds nothing.
        assert_eq!(tokenizer.encode_with_bos("a").unwrap(), [67]);
    }

    #[test]
    fn the_byte_alphabet_is_a_bijection() {
        let mut bytes: Vec<u8> = (0..0x180).filter_map(char::from_u32).filter_map(byte_of).collect();
        bytes.sort();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!(
            [byte_of('Ġ'), byte_of('Ċ'), byte_of('A'), byte_of('é')],
            [Some(32), Some(10), Some(65), Some(0xE9)]
        );
        assert_eq!([byte_of(' '), byte_of('\n'), byte_of('▁'), byte_of('\u{144}')], [None; 4]);
    }

    /// A SentencePiece-like tokenizer as Llama 2 has it.
    fn sentencepiece(decoder: Value) -> Result<Tokenizer, TokenizerError> {
        let vocab = ["<unk>", "<s>", "</s>", "<0x0A>", "<0xE4>", "<0xBD>", "<0xA0>", "▁", "a", "▁a", "▁▁"];
        let vocab: serde_json::Map<String, Value> =
            vocab.iter().enumerate().map(|(id, token)| (token.to_string(), id.into())).collect();
        let added = |id: u32, content: &str| {
            serde_json::json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true})
        };
        let json = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "pre_tokenizer": null,
            "added_tokens": [added(0, "<unk>"), added(1, "<s>"), added(2, "</s>")],
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
            "post_processor": {"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
            "decoder": decoder,
            "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
                "vocab": vocab, "merges": [["▁", "a"], ["▁", "▁"]]},
        });
        Tokenizer::from_json(json.to_string().as_bytes())
    }

    fn llama2_decoder() -> Value {
        serde_json::json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]})
    }

    #[test]
    fn byte_fallback_and_spaces() {
        let tokenizer = sentencepiece(llama2_decoder()).unwrap();
        let bytes = |token: &str| tokenizer.token_bytes(tokenizer.id_of(token).unwrap()).unwrap();
        assert_eq!(bytes("<0x0A>"), b"\n");
        assert_eq!(bytes("<0xE4>"), [0xE4]);
        assert_eq!(bytes("▁a"), b" a");
        assert_eq!(bytes("▁▁"), b"  ");
        assert_eq!(bytes("</s>"), b"</s>");
        assert!(tokenizer.strips_leading_space());
        assert_eq!(tokenizer.encode("a 你", true).unwrap(), [9, 7, 4, 5, 6]);
        assert_eq!(streamed(&tokenizer, &[9, 7, 4, 5, 6]), " a 你");
        assert_eq!(tokenizer.decode(&[9, 7, 4, 5, 6], true).unwrap(), "a 你");
        // The post-processor adds BOS, but only where it is asked to.
        assert_eq!(tokenizer.encode_with_bos("a").unwrap(), [1, 9]);
        assert_eq!(tokenizer.encode("</s>a", true).unwrap()[0], 2);
    }

    #[test]
    fn metaspace_is_understood_and_the_rest_refused() {
        let metaspace =
            serde_json::json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
        let tokenizer = sentencepiece(metaspace).unwrap();
        assert_eq!(tokenizer.token_bytes(9).unwrap(), b" a");
        assert!(tokenizer.strips_leading_space());
        let wordpiece = serde_json::json!({"type": "WordPiece", "prefix": "##", "cleanup": true});
        let error = sentencepiece(wordpiece).unwrap_err().to_string();
        assert!(error.contains("decoder is `WordPiece`"), "{error}");
    }

    #[test]
    fn a_panic_of_the_library_is_an_error() {
        let error = caught::<()>(|| panic!("odd {}", 1)).unwrap_err();
        assert_eq!(error, "the tokenizer's own settings cannot be used: odd 1");
        assert_eq!(caught::<()>(|| Err("no".into())).unwrap_err(), "no");
        assert_eq!(caught(|| Ok(1)), Ok(1));
    }

    #[test]
    fn nothing_is_dropped() {
        let mut json: Value = serde_json::from_slice(&std::fs::read(TINY).unwrap()).unwrap();
        json["model"]["dropout"] = 0.9.into();
        let tokenizer = Tokenizer::from_json(json.to_string().as_bytes()).unwrap();
        let text = "once upon a time there was a tokenizer";
        assert_eq!(tokenizer.encode(text, true).unwrap(), tiny().encode(text, true).unwrap());
    }

    #[test]
    fn ordinary_files_are_read_compactly() {
        assert!(matches!(tiny().inner, Inner::Compact(_)));
        assert!(matches!(sentencepiece(llama2_decoder()).unwrap().inner, Inner::Compact(_)));
        let mut json: Value = serde_json::from_slice(&std::fs::read(TINY).unwrap()).unwrap();
        json["model"]["end_of_word_suffix"] = "</w>".into();
        let tokenizer = Tokenizer::from_json(json.to_string().as_bytes()).unwrap();
        assert!(matches!(tokenizer.inner, Inner::Library(_)));
        assert_eq!((tokenizer.vocab_size(), tokenizer.is_special(0)), (320, true));
    }

    #[test]
    fn unreadable_json_is_an_error() {
        for json in [&b""[..], b"{}", b"\xff\xfe", b"{\"version\":\"1.0\"}"] {
            let error = Tokenizer::from_json(json).unwrap_err().to_string();
            assert!(error.contains(&format!("{} bytes of tokenizer.json", json.len())), "{error}");
        }
    }
}
