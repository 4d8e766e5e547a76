//! Merge rules from a vocabulary with scores, as SentencePiece uses it and transformers writes it down.
//!
//! SentencePiece joins the two neighbours whose joint piece has the best score. The `tokenizers`
//! library joins the two that stand first in a list. So the list has every way to cut a piece into two
//! pieces, the best scored piece first, as transformers makes it (convert_slow_tokenizer.py).

use std::collections::HashSet;

use crate::Malformed;

/// The pairs, best first. `pieces`: those that may be joined or be the result of joining; each text once.
///
/// Of equal scores the piece that comes first wins, then the pair with the shorter left half.
pub fn derive<'a>(pieces: &[(&'a str, f32)]) -> Result<Vec<(&'a str, &'a str)>, Malformed> {
    // Pieces of one letter, each twice as long as the last, have more cuts than a file can justify.
    let (bytes, cuts) = pieces.iter().fold((0u64, 0u64), |(bytes, cuts), (text, _)| {
        let len = text.len() as u64;
        (bytes + len, cuts.saturating_add(len * len))
    });
    let most = (1 << 15) + 64 * bytes;
    if cuts > most {
        let got = format!("{} bytes on average (weighted by length)", cuts / bytes.max(1));
        return Err(Malformed::field("length of the vocabulary's pieces", "at most 64 bytes", got));
    }
    let known: HashSet<&str> = pieces.iter().map(|piece| piece.0).collect();
    let mut ranked: Vec<usize> = (0..pieces.len()).collect();
    // Stable: equal scores stay in the order of ids.
    // Minus zero is zero.
    let score = |id: usize| pieces[id].1 + 0.0;
    ranked.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
    let mut pairs = vec![];
    for id in ranked {
        let text = pieces[id].0;
        let cuts = text.char_indices().skip(1).map(|(at, _)| text.split_at(at));
        pairs.extend(cuts.filter(|(left, right)| known.contains(left) && known.contains(right)));
    }
    Ok(pairs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cut_best_first() {
        let pieces = [("a", -9.0), ("b", -8.0), ("ab", -3.0), ("ba", -2.0), ("aba", -3.0), ("é", -1.0), ("éa", -1.0)];
        let pairs = derive(&pieces).unwrap();
        assert_eq!(pairs, [("é", "a"), ("b", "a"), ("a", "b"), ("a", "ba"), ("ab", "a")]);
    }

    #[test]
    fn equal_scores_keep_their_order() {
        let pieces = [("x", 0.0), ("y", 0.0), ("yx", 0.0), ("xy", 0.0), ("-0", -0.0)];
        assert_eq!(derive(&pieces).unwrap(), [("y", "x"), ("x", "y")]);
    }

    #[test]
    fn more_cuts_than_bytes_are_refused() {
        let texts: Vec<String> = (1..3000).map(|n| "a".repeat(n)).collect();
        let pieces: Vec<(&str, f32)> = texts.iter().map(|t| (t.as_str(), 0.0)).collect();
        let error = derive(&pieces).unwrap_err().to_string();
        assert!(error.contains("pieces: expected at most 64 bytes"), "{error}");
        let long = "x".repeat(180);
        assert_eq!(derive(&[(long.as_str(), 0.0)]).unwrap(), []);
    }
}
