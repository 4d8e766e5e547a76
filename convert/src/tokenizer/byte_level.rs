//! tokenizer.json of a byte-level BPE vocabulary (GPT-2's kind): from a GGUF, or from vocab.json and
//! merges.txt.

use std::collections::HashSet;

use serde_json::json;

use super::{
    Added,
    json::{Bpe, Entries, Tokenizer, template},
    pre::Pre,
};
use crate::Malformed;

/// What such a vocabulary consists of.
#[derive(Debug)]
pub struct ByteLevel<'a> {
    /// Tokens and ids, each text once, in GPT-2's alphabet of bytes.
    pub vocab: Vec<(&'a str, u32)>,
    /// Pairs to merge, best first.
    pub merges: Vec<(&'a str, &'a str)>,
    /// How a text is cut first.
    pub pre: Pre,
    /// Tokens that are found in the text before that.
    pub added: Vec<Added>,
    /// What begins a text, by id and text.
    pub bos: Option<(u32, &'a str)>,
    /// What ends a text.
    pub eos: Option<(u32, &'a str)>,
}

impl ByteLevel<'_> {
    /// Builds the file's bytes. `what`: where the merges stand, for errors.
    pub fn tokenizer_json(self, what: &str) -> Result<Vec<u8>, Malformed> {
        let mut known = HashSet::new();
        if let Some((text, _)) = self.vocab.iter().find(|(text, _)| !known.insert(*text)) {
            return Err(Malformed::field("tokens of the vocabulary", "each once", format!("{text:?} twice")));
        }
        let mut joint = String::new();
        for (left, right) in &self.merges {
            joint.clear();
            joint.extend([*left, *right]);
            let unknown = [left, right, joint.as_str()].into_iter().find(|text| !known.contains(text));
            if let Some(text) = unknown {
                let got = format!("{left:?} and {right:?}; {text:?} is not in the vocabulary");
                return Err(Malformed::field(what, "pairs of tokens that make a token", got));
            }
        }
        let ends = template(self.bos, self.eos);
        let decoder = json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true });
        let bpe = Bpe {
            dropout: None,
            unk_token: None,
            continuing_subword_prefix: Some(""),
            end_of_word_suffix: Some(""),
            fuse_unk: false,
            byte_fallback: false,
            ignore_merges: self.pre.ignore_merges,
            vocab: Entries(self.vocab),
            merges: self.merges,
        };
        Ok(Tokenizer::new(bpe, self.added, self.pre.normalizer, self.pre.pre_tokenizer, ends, decoder).bytes())
    }
}

/// The two halves of a merge as merges.txt and a GGUF write it. Neither contains a space.
pub fn pair(merge: &str) -> Option<(&str, &str)> {
    merge.split_once(' ').filter(|(left, right)| !left.is_empty() && !right.is_empty() && !right.contains(' '))
}
