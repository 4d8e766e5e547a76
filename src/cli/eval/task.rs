//! What is scored: the tokens of a text, cut into windows.

use std::{error::Error, path::Path};

use quern_models::ModelFile;
use xxhash_rust::xxh3::Xxh3;

use super::protocol::{Kind, Protocol, Window};
use crate::text::Tokenizer;

/// A text as one tokenizer has it, and the windows that are scored.
#[derive(Debug, Clone, PartialEq)]
pub struct Task {
    /// The rule.
    pub protocol: Protocol,
    /// The whole text.
    pub tokens: Vec<u32>,
    /// What the first token of each window is replaced by; [`Kind::LlamaCpp`] only.
    pub bos: Option<u32>,
    /// At least one, each with at least one scored row.
    pub windows: Vec<Window>,
    /// XXH3-64 of the bytes that the tokens of the windows stand for: the same tokens of another
    /// vocabulary are another text.
    pub text: u64,
}

/// Limits of the work.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Tokens of the text.
    pub tokens: Option<usize>,
    /// Windows.
    pub chunks: Option<usize>,
}

impl Task {
    /// Tokenizes a text; `name` is the text's.
    pub fn new(
        tokenizer: &Tokenizer,
        text: &str,
        name: &Path,
        protocol: Protocol,
        limits: Limits,
    ) -> Result<Task, Box<dyn Error>> {
        let name = name.display();
        if text.is_empty() {
            return Err(format!("{name}: the text is empty; give a file with a few hundred words or more").into());
        }
        let bos = bos(tokenizer)?;
        let mut tokens: Vec<u32> = bos.into_iter().collect();
        tokens.extend(match protocol.kind {
            // As llama-perplexity reads it: without a final line break, special tokens are letters.
            Kind::LlamaCpp => tokenizer.encode(text.strip_suffix('\n').unwrap_or(text), false)?,
            Kind::Strided => tokenizer.encode(text, true)?,
        });
        tokens.truncate(limits.tokens.unwrap_or(usize::MAX));
        let mut windows = protocol.windows(tokens.len());
        windows.truncate(limits.chunks.unwrap_or(usize::MAX));
        if windows.is_empty() {
            let (got, needed) = match protocol.kind {
                Kind::LlamaCpp => (tokens.len(), protocol.context),
                Kind::Strided => (tokens.len(), 2),
            };
            let help = if protocol.kind == Kind::LlamaCpp { " or a smaller --context" } else { "" };
            return Err(
                format!("{name}: {got} tokens, the {protocol}, needs {needed}: give a longer text{help}").into()
            );
        }
        let bos = bos.filter(|_| protocol.kind == Kind::LlamaCpp);
        let mut task = Task { protocol, tokens, bos, windows, text: 0 };
        task.text = task.bytes(tokenizer);
        Ok(task)
    }

    /// Scored rows of all windows.
    pub fn rows(&self) -> usize {
        self.windows.iter().map(Window::rows).sum()
    }

    /// The tokens that are computed for a window, and after each of them the token that follows: the last token of
    /// a window is only predicted.
    pub fn window(&self, w: &Window) -> (Vec<u32>, &[u32]) {
        let mut tokens = self.tokens[w.start..w.end - 1].to_vec();
        if let Some(bos) = self.bos {
            tokens[0] = bos;
        }
        (tokens, &self.tokens[w.start + 1..w.end])
    }

    /// [`Task::text`] in the eyes of a tokenizer.
    pub fn bytes(&self, tokenizer: &Tokenizer) -> u64 {
        let mut hash = Xxh3::new();
        let end = self.windows.last().map_or(0, |w| w.end);
        for &token in &self.tokens[..end] {
            // A token without bytes is none that the tokenizer knows; no text has the byte 0xFF.
            hash.update(&tokenizer.token_bytes(token).unwrap_or(vec![0xFF]));
        }
        hash.digest()
    }
}

/// A file's tokenizer; needed even for given tokens, to know that they mean the same.
pub fn tokenizer(path: &Path, file: &ModelFile) -> Result<Tokenizer, Box<dyn Error>> {
    let json = file.tokenizer_json().ok_or_else(|| {
        let help = "convert the checkpoint again from a folder with tokenizer.json";
        format!("{}: the file has no tokenizer; {help}", path.display())
    })?;
    Tokenizer::from_json(json).map_err(|e| format!("{}: {e}", path.display()).into())
}

/// The token that the tokenizer begins a text with.
fn bos(tokenizer: &Tokenizer) -> Result<Option<u32>, Box<dyn Error>> {
    let (plain, with) = (tokenizer.encode("a", true)?, tokenizer.encode_with_bos("a")?);
    let before = (0..with.len()).find(|&i| with[i..].starts_with(&plain)).unwrap_or(0);
    Ok(with.first().copied().filter(|_| before > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/llama/tokenizer.json");
    const ALL: Limits = Limits { tokens: None, chunks: None };

    /// The tiny tokenizer; `bos`: one that begins texts with `<|bos|>`.
    fn tiny(bos: bool) -> Tokenizer {
        let mut json: serde_json::Value = serde_json::from_slice(&std::fs::read(TINY).unwrap()).unwrap();
        if bos {
            json["post_processor"] = serde_json::json!({
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<|bos|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [1], "tokens": ["<|bos|>"]}},
            });
        }
        Tokenizer::from_json(&serde_json::to_vec(&json).unwrap()).unwrap()
    }

    fn task(bos: bool, kind: Kind, text: &str) -> Task {
        Task::new(&tiny(bos), text, Path::new("t"), Protocol::new(kind, 4, None).unwrap(), ALL).unwrap()
    }

    #[test]
    fn bos_begins_the_text_or_each_window() {
        let plain = tiny(false).encode("abcdefgh", true).unwrap();
        let none = task(false, Kind::LlamaCpp, "abcdefgh\n");
        assert_eq!((&none.tokens, none.bos), (&plain, None));
        let each = task(true, Kind::LlamaCpp, "abcdefgh");
        assert_eq!((each.tokens[0], &each.tokens[1..], each.bos), (1, &plain[..], Some(1)));
        let (tokens, next) = each.window(&each.windows[1]);
        assert_eq!(tokens, [1, each.tokens[5], each.tokens[6]]);
        assert_eq!(next, &each.tokens[5..8]);
        let once = task(true, Kind::Strided, "abcdefgh");
        assert_eq!((once.tokens[0], once.bos), (1, None));
        assert_eq!(once.window(&once.windows[1]).0[0], once.tokens[2]);
    }

    #[test]
    fn special_tokens_are_what_the_protocol_says() {
        assert!(!task(false, Kind::LlamaCpp, "a<|eos|>b and more").tokens.contains(&2));
        assert!(task(false, Kind::Strided, "a<|eos|>b").tokens.contains(&2));
    }

    #[test]
    fn limits_and_texts_that_are_too_short() {
        let protocol = Protocol::new(Kind::LlamaCpp, 4, None).unwrap();
        let new = |text: &str, limits| Task::new(&tiny(false), text, Path::new("t.txt"), protocol, limits);
        let text = "0123456789012345678901234567890123456789";
        assert!(new(text, ALL).unwrap().windows.len() > 2);
        assert_eq!(new(text, Limits { chunks: Some(2), ..ALL }).unwrap().windows.len(), 2);
        assert_eq!(new(text, Limits { tokens: Some(11), ..ALL }).unwrap().windows.len(), 2);
        for (text, limits, part) in [
            ("", ALL, "the text is empty"),
            ("\n", ALL, "0 tokens"),
            ("ab", ALL, "needs 4: give a longer text or a smaller --context"),
            (text, Limits { tokens: Some(3), ..ALL }, "3 tokens"),
        ] {
            let error = new(text, limits).unwrap_err().to_string();
            assert!(error.contains(part) && error.starts_with("t.txt"), "{error}");
        }
    }

    #[test]
    fn the_same_tokens_of_another_vocabulary_are_another_text() {
        let one = task(false, Kind::LlamaCpp, "abcdefgh");
        assert_eq!(one.bytes(&tiny(true)), one.text);
        let mut json: serde_json::Value = serde_json::from_slice(&std::fs::read(TINY).unwrap()).unwrap();
        let vocab = json["model"]["vocab"].as_object_mut().unwrap();
        (vocab["a"], vocab["b"]) = (vocab["b"].clone(), vocab["a"].clone());
        let swapped = Tokenizer::from_json(&serde_json::to_vec(&json).unwrap()).unwrap();
        assert_ne!(one.bytes(&swapped), one.text);
    }
}
