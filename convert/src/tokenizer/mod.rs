//! tokenizer.json made from other vocabularies: SentencePiece models, byte-level BPE files, and the
//! vocabularies of GGUF files.
//!
//! The runtime reads tokenizer.json only. What is written here gives the ids that transformers gives
//! for the same files, and for a GGUF those of llama.cpp; [`pieces`] says where these two differ.

pub mod byte_level;
pub mod json;
mod merges;
pub mod pieces;
pub mod pre;
pub mod sentencepiece;
pub mod settings;

/// A token that is found in the text before anything else happens to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Added {
    /// Its id.
    pub id: u32,
    /// Its text.
    pub text: String,
    /// A control token: not part of the text.
    pub special: bool,
    /// Takes the spaces before it with it.
    pub lstrip: bool,
    /// Takes the spaces after it with it.
    pub rstrip: bool,
    /// Only between characters that belong to no word.
    pub single_word: bool,
}

impl Added {
    /// A token without further wishes.
    pub fn new(id: u32, text: &str, special: bool) -> Added {
        Added { id, text: text.into(), special, lstrip: false, rstrip: false, single_word: false }
    }
}
