//! A model's tokens as `llguidance` wants them: their bytes in a tree.

use std::sync::Arc;

use llguidance::toktrie::{INVALID_TOKEN, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

use super::GrammarError;
use crate::text::TextModel;

/// The tree holds up to 1024 bytes of one token; longer ones (there are none) are never produced.
const LONGEST: usize = 1000;

/// The tree holds up to 2^22 nodes and token numbers below 2^24.
const MOST_TOKENS: usize = 1 << 20;

/// Only masks are computed: nothing is ever tokenized on a grammar's behalf.
struct Tokens(TokTrie);

impl TokenizerEnv for Tokens {
    fn tok_trie(&self) -> &TokTrie {
        &self.0
    }

    fn tokenize_bytes(&self, text: &[u8]) -> Vec<TokenId> {
        self.0.greedy_tokenize(text)
    }

    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}

/// The tokens of a model with `vocab` rows. Control tokens and the tokens that end an answer stand for no text.
pub fn environment(text: &TextModel, vocab: usize) -> Result<TokEnv, GrammarError> {
    let words = words(text, vocab);
    let ends: Vec<u32> = text.stop_ids().iter().copied().filter(|&id| (id as usize) < vocab).collect();
    trie(&words, &ends).map(|trie| Arc::new(Tokens(trie)) as TokEnv)
}

fn words(text: &TextModel, vocab: usize) -> Vec<Vec<u8>> {
    let tokenizer = text.tokenizer();
    let word = |id: u32| {
        // A row beyond the tokenizer's tokens is never produced.
        let bytes = tokenizer.token_bytes(id).unwrap_or_default();
        if tokenizer.is_special(id) || text.stop_ids().contains(&id) {
            return [&[TokTrie::SPECIAL_TOKEN_MARKER][..], &bytes].concat();
        }
        // The mark of special tokens is no part of any UTF-8 text.
        if bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER) || bytes.len() > LONGEST { vec![] } else { bytes }
    };
    (0..vocab as u32).map(word).collect()
}

fn trie(words: &[Vec<u8>], ends: &[u32]) -> Result<TokTrie, GrammarError> {
    let bytes: usize = words.iter().map(Vec::len).sum();
    if words.is_empty() || words.len() > MOST_TOKENS || bytes >= 1 << 22 {
        let reason = format!("{} tokens of {bytes} bytes, at most {MOST_TOKENS} of {} fit", words.len(), 1 << 22);
        return Err(GrammarError::Vocabulary(reason));
    }
    let end = ends.first().copied().unwrap_or(INVALID_TOKEN);
    let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, end), words);
    Ok(if ends.is_empty() { trie } else { trie.with_eos_tokens(ends) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vocabulary_of_150_000_tokens_is_ready_within_a_second() {
        let words: Vec<Vec<u8>> =
            (0..150_000u32).map(|i| format!("{:x}", i.wrapping_mul(2_654_435_761)).into()).collect();
        let begun = std::time::Instant::now();
        let trie = trie(&words, &[7]).unwrap();
        let took = begun.elapsed();
        println!("150000 tokens: {took:?}");
        assert!(took.as_secs_f64() < 5.0, "{took:?}"); // unoptimised and shared machines are slower
        assert_eq!(trie.vocab_size(), 150_000);
    }

    #[test]
    fn vocabularies_beyond_the_tree_are_refused() {
        assert!(trie(&[], &[]).is_err());
        let error = trie(&vec![vec![b'a'; 999]; 5000], &[]).err().unwrap();
        assert!(error.to_string().contains("5000 tokens"));
    }
}
