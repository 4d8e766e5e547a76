//! Byte pair encoding read straight from a tokenizer.json into a few flat tables.
//!
//! The `tokenizers` crate keeps every token as two strings of its own and builds the model from a tree of JSON
//! values: most of a cold start, and more memory than the keys and values of a chat. This model is the crate's in
//! everything it computes (same merges, same order, same treatment of unknown text; tests compare them) and takes
//! over where the file is an ordinary BPE. Whatever is unusual (affixes, dropout, ids given twice) is an error
//! here, and the caller lets the crate read the file.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    fmt,
    hash::{BuildHasherDefault, Hasher},
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use tokenizers::{Model, Token, models::bpe::BpeTrainer};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// A BPE model; clones share the tables.
#[derive(Debug, Clone)]
pub(super) struct Bpe(Arc<Tables>);

#[derive(Debug, Default)]
struct Tables {
    vocab: Vocab,
    /// Two tokens side by side: rank of the merge and the token it gives.
    merges: HashMap<u64, (u32, u32), BuildHasherDefault<Mixed>>,
    unk: Option<String>,
    fuse_unk: bool,
    byte_fallback: bool,
    ignore_merges: bool,
}

/// Tokens and their texts, both ways.
#[derive(Debug, Default)]
struct Vocab {
    /// The texts, one after another.
    texts: String,
    /// Of each id: start and end of its text; end 0 where no token has the id.
    spans: Vec<(u32, u32)>,
    /// Hash of a text to its id.
    ids: HashMap<u64, u32, BuildHasherDefault<Mixed>>,
    seed: u64,
    tokens: usize,
}

impl Vocab {
    fn hash(&self, text: &str) -> u64 {
        xxh3_64_with_seed(text.as_bytes(), self.seed)
    }

    fn text(&self, id: u32) -> Option<&str> {
        let &(start, end) = self.spans.get(id as usize)?;
        (end > 0).then(|| &self.texts[start as usize..end as usize])
    }

    fn id(&self, text: &str) -> Option<u32> {
        let &id = self.ids.get(&self.hash(text))?;
        (self.text(id) == Some(text)).then_some(id)
    }

    /// Adds the token whose text is the end of `texts`, from `start` on.
    fn add(&mut self, start: usize, id: u32) -> Result<(), &'static str> {
        // The empty text would look like no token.
        if start == self.texts.len() || self.texts.len() > u32::MAX as usize {
            return Err("an empty or endless token");
        }
        // Ids are dense in every real file; a table by id must not grow with a number in a hostile one.
        if id as usize > 2 * self.tokens + 4096 {
            return Err("a token id far beyond the number of tokens");
        }
        if self.spans.len() <= id as usize {
            self.spans.resize(id as usize + 1, (0, 0));
        }
        let hash = self.hash(&self.texts[start..]);
        if self.spans[id as usize].1 != 0 || self.ids.insert(hash, id).is_some() {
            return Err("a token or id twice");
        }
        self.spans[id as usize] = (start as u32, self.texts.len() as u32);
        self.tokens += 1;
        Ok(())
    }
}

impl Bpe {
    /// One more than the highest token.
    pub fn end(&self) -> usize {
        self.0.vocab.spans.len()
    }

    fn word(&self, text: &str) -> tokenizers::Result<Vec<Symbol>> {
        let (t, vocab) = (&*self.0, &self.0.vocab);
        let mut word: Vec<Symbol> = Vec::with_capacity(text.len());
        let mut unknown: Option<Symbol> = None;
        let mut letter = [0; 4];
        for c in text.chars() {
            let c = &*c.encode_utf8(&mut letter);
            if let Some(id) = vocab.id(c) {
                word.extend(unknown.take());
                word.push(Symbol { id, len: c.len() });
                continue;
            }
            if t.byte_fallback {
                let bytes: Option<Vec<u32>> = c.bytes().map(|b| vocab.id(&format!("<{b:#04X}>"))).collect();
                if let Some(bytes) = bytes {
                    // An unknown character before them stays pending, as in the library.
                    word.extend(bytes.into_iter().map(|id| Symbol { id, len: 1 }));
                    continue;
                }
            }
            if let Some(unk) = &t.unk {
                let id = vocab.id(unk).ok_or_else(|| format!("the token for unknown text, {unk}, is no token"))?;
                match &mut unknown {
                    Some(unknown) if t.fuse_unk => unknown.len += c.len(),
                    _ => word.extend(unknown.replace(Symbol { id, len: c.len() })),
                }
            }
        }
        word.extend(unknown);
        self.merge(&mut word);
        Ok(word)
    }

    /// Merges neighbours, the lowest rank first and of equal ranks the leftmost, until none can be merged.
    fn merge(&self, word: &mut Vec<Symbol>) {
        let merges = &self.0.merges;
        let found = |a: u32, b: u32| merges.get(&(u64::from(a) << 32 | u64::from(b)));
        let ends = word.len();
        // Neighbours of the symbols that are left; `ends`: none.
        let mut next: Vec<usize> = (1..=ends).collect();
        let mut before: Vec<usize> = (0..ends).map(|i| i.checked_sub(1).unwrap_or(ends)).collect();
        let pairs = word.windows(2).enumerate();
        let pairs = pairs.filter_map(|(at, w)| found(w[0].id, w[1].id).map(|&(rank, id)| Reverse((rank, at, id))));
        let mut queue: BinaryHeap<_> = pairs.collect();
        while let Some(Reverse((_, at, id))) = queue.pop() {
            let right = next[at];
            // Merged into its left neighbour, the last one, or no longer the pair that was queued.
            if word[at].len == 0 || right == ends || found(word[at].id, word[right].id).is_none_or(|m| m.1 != id) {
                continue;
            }
            word[at] = Symbol { id, len: word[at].len + word[right].len };
            word[right].len = 0;
            next[at] = next[right];
            if next[at] < ends {
                before[next[at]] = at;
                if let Some(&(rank, new)) = found(id, word[next[at]].id) {
                    queue.push(Reverse((rank, at, new)));
                }
            }
            if before[at] < ends
                && let Some(&(rank, new)) = found(word[before[at]].id, id)
            {
                queue.push(Reverse((rank, before[at], new)));
            }
        }
        word.retain(|s| s.len != 0);
    }
}

/// A token of a word, and how many bytes of the text it covers.
#[derive(Debug, Clone, Copy)]
struct Symbol {
    id: u32,
    len: usize,
}

impl Model for Bpe {
    type Trainer = BpeTrainer;

    fn tokenize(&self, text: &str) -> tokenizers::Result<Vec<Token>> {
        let t = &*self.0;
        if t.ignore_merges
            && let Some(id) = t.vocab.id(text)
        {
            return Ok(vec![Token::new(id, text.to_string(), (0, text.len()))]);
        }
        let mut at = 0;
        let token = |s: Symbol| {
            let start = at;
            at += s.len;
            Token::new(s.id, t.vocab.text(s.id).unwrap_or_default().to_string(), (start, at))
        };
        Ok(self.word(text)?.into_iter().map(token).collect())
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.0.vocab.id(token)
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.0.vocab.text(id).map(String::from)
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        (0..self.end() as u32).filter_map(|id| Some((self.id_to_token(id)?, id))).collect()
    }

    fn get_vocab_size(&self) -> usize {
        self.0.vocab.tokens
    }

    fn save(&self, _: &Path, _: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        Err("a tokenizer of a model file is not written again".into())
    }

    fn get_trainer(&self) -> BpeTrainer {
        BpeTrainer::default()
    }
}

impl<'de> Deserialize<'de> for Bpe {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Bpe, D::Error> {
        from.deserialize_map(ModelVisitor)
    }
}

struct ModelVisitor;

impl<'de> Visitor<'de> for ModelVisitor {
    type Value = Bpe;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a BPE model")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Bpe, A::Error> {
        let (mut tables, mut typed, mut merged) = (Tables::default(), false, false);
        tables.vocab.seed = crate::random::unforeseen();
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "type" if map.next_value::<String>()? == "BPE" => typed = true,
                "vocab" if tables.vocab.tokens == 0 => map.next_value_seed(ReadVocab(&mut tables.vocab))?,
                // Merges name tokens, which must be known by then.
                "merges" if tables.vocab.tokens > 0 && !merged => {
                    map.next_value_seed(ReadMerges(&mut tables))?;
                    merged = true;
                }
                "continuing_subword_prefix" | "end_of_word_suffix"
                    if map.next_value::<Option<String>>()?.unwrap_or_default().is_empty() => {}
                // For training: a text has one tokenization.
                "dropout" if (0.0..=1.0).contains(&map.next_value::<Option<f32>>()?.unwrap_or(0.0)) => {}
                "type" | "vocab" | "merges" | "continuing_subword_prefix" | "end_of_word_suffix" | "dropout" => {
                    return Err(A::Error::custom("an unusual BPE model"));
                }
                "unk_token" => tables.unk = map.next_value()?,
                "fuse_unk" => tables.fuse_unk = map.next_value::<Option<bool>>()?.unwrap_or(false),
                "byte_fallback" => tables.byte_fallback = map.next_value::<Option<bool>>()?.unwrap_or(false),
                "ignore_merges" => tables.ignore_merges = map.next_value::<Option<bool>>()?.unwrap_or(false),
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        if typed && merged { Ok(Bpe(Arc::new(tables))) } else { Err(A::Error::custom("no BPE model")) }
    }
}

/// Reads `{"text": id, ..}`.
struct ReadVocab<'a>(&'a mut Vocab);

impl<'de> DeserializeSeed<'de> for ReadVocab<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for ReadVocab<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("tokens and their ids")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let vocab = self.0;
        loop {
            let start = vocab.texts.len();
            if map.next_key_seed(Append(&mut vocab.texts))?.is_none() {
                vocab.texts.shrink_to_fit();
                return Ok(());
            }
            vocab.add(start, map.next_value()?).map_err(A::Error::custom)?;
        }
    }
}

/// Reads `[["a", "b"], ..]`, or the older `["a b", ..]`.
struct ReadMerges<'a>(&'a mut Tables);

impl<'de> DeserializeSeed<'de> for ReadMerges<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for ReadMerges<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a list of merges")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        let Tables { vocab, merges, .. } = self.0;
        merges.reserve(vocab.tokens);
        let (mut pair, mut kind, mut rank, mut likely) = (String::new(), None, 0, 0);
        loop {
            pair.clear();
            let Some((middle, as_list)) = list.next_element_seed(ReadPair(&mut pair))? else { break };
            if *kind.get_or_insert(as_list) != as_list {
                return Err(A::Error::custom("merges of two kinds"));
            }
            let id = |text: &str| vocab.id(text).ok_or_else(|| A::Error::custom("a merge of what is no token"));
            let (a, b) = (id(&pair[..middle])?, id(&pair[middle..])?);
            // Tokens are usually numbered in the order of the merges that make them.
            let both = if vocab.text(likely) == Some(&pair) { likely } else { id(&pair)? };
            merges.insert(u64::from(a) << 32 | u64::from(b), (rank, both));
            (rank, likely) = (rank + 1, both.saturating_add(1));
        }
        Ok(())
    }
}

/// Reads one merge into a string; gives where its right side begins, and whether it was a list.
struct ReadPair<'a>(&'a mut String);

impl<'de> DeserializeSeed<'de> for ReadPair<'_> {
    type Value = (usize, bool);

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(usize, bool), D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ReadPair<'_> {
    type Value = (usize, bool);

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a merge")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(usize, bool), A::Error> {
        let short = || A::Error::custom("a merge of other than two texts");
        list.next_element_seed(Append(self.0))?.ok_or_else(short)?;
        let middle = self.0.len();
        list.next_element_seed(Append(self.0))?.ok_or_else(short)?;
        if list.next_element::<IgnoredAny>()?.is_some() { Err(short()) } else { Ok((middle, true)) }
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<(usize, bool), E> {
        let parts = text.split_once(' ').filter(|(_, b)| !b.contains(' ') && !text.starts_with("#version"));
        let (a, b) = parts.ok_or_else(|| E::custom("a merge of other than two texts"))?;
        self.0.push_str(a);
        self.0.push_str(b);
        Ok((a.len(), false))
    }
}

/// Appends a string of the JSON, without one of its own.
struct Append<'a>(&'a mut String);

impl<'de> DeserializeSeed<'de> for Append<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_str(self)
    }
}

impl Visitor<'_> for Append<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a text")
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        self.0.push_str(text);
        Ok(())
    }
}

/// A hasher of numbers that are random already, or nearly so.
#[derive(Debug, Default)]
struct Mixed(u64);

impl Hasher for Mixed {
    fn write(&mut self, _: &[u8]) {
        unreachable!("only u64 keys are hashed");
    }

    fn write_u64(&mut self, x: u64) {
        // Both halves of the product reach both ends of the result, which the table reads.
        let product = u128::from(x) * 0x9E37_79B9_7F4A_7C15;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tokenizers::models::bpe::BPE;

    use super::*;
    use crate::random::Random;

    /// A vocabulary of some letters and what random merges make of them.
    fn model(dice: &mut Random) -> Value {
        let mut tokens: Vec<String> = ["a", "b", "c", "é", "你", "<unk>"].map(String::from).to_vec();
        tokens.extend((0..=255).filter(|_| dice.below(3) > 0).map(|b: u8| format!("<0x{b:02X}>")));
        let letters = 5;
        let mut made: Vec<usize> = (0..letters).collect();
        let mut merges: Vec<(String, String)> = vec![];
        for _ in 0..dice.below(60) {
            let (a, b) = (tokens[made[dice.below(made.len())]].clone(), tokens[made[dice.below(made.len())]].clone());
            let both = format!("{a}{b}");
            // Sometimes another way to a token that is there, or a pair twice.
            if !tokens.contains(&both) {
                made.push(tokens.len());
                tokens.push(both);
            }
            merges.push((a, b));
        }
        for i in (1..tokens.len()).rev() {
            tokens.swap(i, dice.below(i + 1)); // ids say nothing about ranks
        }
        let vocab: serde_json::Map<String, Value> =
            tokens.into_iter().enumerate().map(|(id, token)| (token, id.into())).collect();
        let merges = match dice.below(2) {
            0 => json!(merges),
            _ => merges.iter().map(|(a, b)| format!("{a} {b}")).collect(),
        };
        let mut flag = || dice.below(2) == 0;
        json!({"type": "BPE", "dropout": null, "unk_token": if flag() { Some("<unk>") } else { None },
            "continuing_subword_prefix": if flag() { Some("") } else { None }, "end_of_word_suffix": null,
            "fuse_unk": flag(), "byte_fallback": flag(), "ignore_merges": flag(), "vocab": vocab, "merges": merges})
    }

    #[test]
    fn random_models_are_the_librarys() {
        let mut dice = Random::new(1);
        for round in 0..300 {
            let json = model(&mut dice).to_string();
            let ours: Bpe = serde_json::from_str(&json).unwrap();
            let theirs: BPE = serde_json::from_str(&json).unwrap();
            for _ in 0..20 {
                let letters = ['a', 'b', 'c', 'a', 'b', 'c', 'é', '你', 'x', 'ß', '好'];
                let text: String = (0..dice.below(30)).map(|_| letters[dice.below(letters.len())]).collect();
                let (ours, theirs) = (ours.tokenize(&text).unwrap(), theirs.tokenize(&text).unwrap());
                assert_eq!(ours, theirs, "round {round}: {text:?} with {json}");
            }
            assert_eq!(ours.get_vocab(), theirs.get_vocab());
            assert_eq!(ours.get_vocab_size(), theirs.get_vocab_size());
            for id in 0..ours.end() as u32 + 2 {
                assert_eq!(ours.id_to_token(id), theirs.id_to_token(id));
            }
            assert_eq!(ours.token_to_id("no such token"), None);
        }
    }

    #[test]
    fn unusual_models_are_left_to_the_library() {
        let usual = json!({"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]});
        assert!(serde_json::from_str::<Bpe>(&usual.to_string()).is_ok());
        let with = |key: &str, value: Value| {
            let mut model = usual.clone();
            model[key] = value;
            serde_json::from_str::<Bpe>(&model.to_string())
        };
        assert!(with("dropout", 0.5.into()).is_ok() && with("ignored", 0.5.into()).is_ok());
        for (key, value) in [
            ("type", json!("WordLevel")),
            ("dropout", json!(1.5)),
            ("continuing_subword_prefix", json!("##")),
            ("end_of_word_suffix", json!("</w>")),
            ("vocab", json!({})),
            ("vocab", json!([["a", 0.0], ["b", 0.0], ["ab", 0.0]])),
            ("vocab", json!({"a": 0, "b": 0, "ab": 2})),
            ("vocab", json!({"a": 0, "b": 1, "ab": u32::MAX})),
            ("vocab", json!({"a": 0, "b": 1, "ab": -1})),
            ("vocab", json!({"a": 0, "b": 1, "ab": 2, "": 3})),
            ("merges", json!([["a", "b"], "b a"])),
            ("merges", json!([["a", "b", "a"]])),
            ("merges", json!([["a"]])),
            ("merges", json!(["a b ab"])),
            ("merges", json!([["b", "a"]])),
            ("merges", json!([["a", "c"]])),
        ] {
            assert!(with(key, value.clone()).is_err(), "{key}: {value}");
        }
        // Merges before the tokens that they name.
        assert!(
            serde_json::from_str::<Bpe>(r#"{"type":"BPE","merges":[["a","b"]],"vocab":{"a":0,"b":1,"ab":2}}"#).is_err()
        );
        let twice = r#"{"type":"BPE","vocab":{"a":0,"b":1,"ab":2,"a":3},"merges":[["a","b"]]}"#;
        assert!(serde_json::from_str::<Bpe>(twice).is_err());
    }
}
