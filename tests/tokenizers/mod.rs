//! Vocabularies in other forms than tokenizer.json: what is made of them gives the ids that the
//! library of their makers gives.
//!
//! A case is a JSON file that `make_cases.py` wrote: a vocabulary, mixed lines and the library's ids.
//! Small ones are in `tests/fixtures/tokenizers`; QUERN_TOKENIZER_CASES names a folder with the large
//! ones (real vocabularies, 10,000 lines each), which are too large to commit.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use quern::text::{TextStream, Tokenizer};
use quern_convert::{
    source::{gguf, gguf_tokenizer},
    tokenizer::settings::Settings,
};
use serde_json::Value;

use crate::support::{
    Scratch, fixture,
    program::{arg, quern},
    skip,
};

#[test]
fn small_vocabularies_give_the_library_s_ids() {
    let cases = cases(&fixture("tokenizers"));
    assert!(cases.len() >= 8, "{}", cases.len());
    cases.iter().for_each(|path| check(path));
}

#[test]
fn real_vocabularies_give_the_library_s_ids() {
    let test = "real_vocabularies_give_the_library_s_ids";
    let Ok(folder) = env::var("QUERN_TOKENIZER_CASES") else {
        return skip(test, "needs QUERN_TOKENIZER_CASES=FOLDER (tests/tokenizers/make_cases.py makes it)");
    };
    let cases = cases(Path::new(&folder));
    assert!(!cases.is_empty(), "{folder} has no cases");
    cases.iter().for_each(|path| check(path));
}

fn cases(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<_> = entries.filter(|path| path.to_string_lossy().ends_with(".case.json")).collect();
    paths.sort();
    paths
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// tokenizer.json of a case's vocabulary.
fn built(path: &Path, case: &Value) -> Vec<u8> {
    let beside = |name: &str| path.parent().unwrap().join(case[name].as_str().unwrap());
    let settings = Settings {
        config: case["tokenizer_config"].clone(),
        special: case["special_tokens_map"].clone(),
        added: case["added_tokens"].clone(),
        model_type: case["model_type"].as_str().unwrap_or_default().into(),
    };
    let mut notes = vec![];
    match case["kind"].as_str().unwrap() {
        "sentencepiece" => settings.sentencepiece(&fs::read(beside("file")).unwrap(), &mut notes).unwrap(),
        "vocab" => {
            let merges = fs::read_to_string(beside("merges")).unwrap();
            settings.byte_level(&json(&beside("file")), &merges, &mut notes).unwrap()
        }
        "gguf" => {
            let bytes = fs::read(beside("file")).unwrap();
            let mut parsed = gguf::parse(&bytes).unwrap();
            if let Some(pre) = case["pre"].as_str() {
                parsed.meta.insert("tokenizer.ggml.pre", gguf::Value::Text(pre));
            }
            gguf_tokenizer::tokenizer_json(&parsed, &mut notes).unwrap().unwrap()
        }
        "tokenizer.json" => fs::read(beside("file")).unwrap(),
        other => panic!("{other}"),
    }
}

fn check(path: &Path) {
    let case = json(path);
    let tokenizer = Tokenizer::from_json(&built(path, &case)).unwrap();
    let texts = match &case["texts"] {
        Value::String(name) => json(&path.parent().unwrap().join(name)),
        list => list.clone(),
    };
    let texts: Vec<String> = serde_json::from_value(texts).unwrap();
    let ids: Vec<Vec<u32>> = serde_json::from_value(case["ids"].clone()).unwrap();
    let plain = case["plain"] == true;
    let skipped: Vec<usize> = serde_json::from_value(case["skipped"].clone()).unwrap_or_default();
    let mut different = 0;
    for (line, (text, expected)) in texts.iter().zip(&ids).enumerate() {
        if skipped.contains(&line) {
            continue;
        }
        let got = tokenizer.encode(text, !plain).unwrap();
        if got != *expected {
            different += 1;
            if different <= 10 {
                let at = got.iter().zip(expected).take_while(|(a, b)| a == b).count();
                let shown = |ids: &[u32]| {
                    let end = ids.len().min(at + 6);
                    let text = |id: &u32| format!("{id}={:?}", tokenizer.token_text(*id).unwrap_or_default());
                    ids[at.saturating_sub(1).min(end)..end].iter().map(text).collect::<Vec<_>>().join(" ")
                };
                println!("{text:?}\n  expected {}\n  got      {}", shown(expected), shown(&got));
            }
            continue;
        }
        streams(&tokenizer, expected, text);
    }
    let name = path.file_name().unwrap().to_string_lossy();
    println!("{name}: {} lines, {} skipped, {different} different", ids.len(), skipped.len());
    assert_eq!(texts.len(), ids.len(), "{name}");
    if let Some(with_bos) = case["with_bos"].as_array() {
        for (text, expected) in texts.iter().zip(with_bos) {
            let expected: Vec<u32> = serde_json::from_value(expected.clone()).unwrap();
            assert_eq!(tokenizer.encode_with_bos(text).unwrap(), expected, "{name}: {text:?}");
        }
    }
    assert_eq!(different, 0, "{name}: lines with other ids than the library's");
}

/// The text as it streams out, one token at a time, is the text of all tokens at once.
fn streams(tokenizer: &Tokenizer, ids: &[u32], text: &str) {
    let ids: Vec<u32> = ids.iter().copied().filter(|&id| !tokenizer.is_special(id)).collect();
    let whole = tokenizer.decode(&ids, true).unwrap();
    let mut stream = TextStream::new(vec![], tokenizer.strips_leading_space());
    let mut streamed = String::new();
    for id in ids {
        streamed.push_str(&stream.push(&tokenizer.token_bytes(id).unwrap()));
    }
    streamed.push_str(&stream.finish());
    // The library takes an added token such as `ü` for a byte of the byte-level alphabet.
    if !(whole.contains('\u{FFFD}') && streamed == text) {
        assert_eq!(streamed, whole, "{text:?}");
    }
}

/// The text of a control token, meant as text, never becomes the token.
#[test]
fn control_tokens_can_be_plain_text() {
    for name in ["bpe-own", "bpe-users-own", "bpe-bare-own", "unigram-own", "unigram-bytes-own", "bpe-chat"] {
        let path = fixture("tokenizers").join(format!("{name}.case.json"));
        let tokenizer = Tokenizer::from_json(&built(&path, &json(&path))).unwrap();
        for text in ["</s>", "[IMG]</s>", "x<s>y</s>", "<|im_end|>"] {
            let plain = tokenizer.encode(text, false).unwrap();
            // 0 is unknown: the tiny vocabularies lack letters.
            assert!(plain.iter().all(|&id| id == 0 || !tokenizer.is_special(id)), "{name}: {text} {plain:?}");
        }
        assert_eq!(tokenizer.encode("</s>", true).unwrap(), [2], "{name}");
    }
}

#[test]
fn a_directory_without_tokenizer_json() {
    let scratch = Scratch::new("vocabularies");
    let out = scratch.at("out.qrn");
    let convert = |dir: &Path| quern(&["convert", arg(dir), "--force", "--out", arg(&out)]);
    let dir = |name: &str, files: &[(&str, &[u8])]| {
        let dir = scratch.copy(&fixture("models/llama"), name);
        fs::remove_file(dir.join("tokenizer.json")).unwrap();
        files.iter().for_each(|(file, bytes)| fs::write(dir.join(file), bytes).unwrap());
        dir
    };
    let bytes = |name: &str| fs::read(fixture("tokenizers").join(name)).unwrap();
    let bpe = bytes("bpe.model");
    convert(&dir("bpe", &[("tokenizer.model", &bpe)]))
        .ok()
        .says(&["made from tokenizer.model (560 pieces, byte pairs"]);
    let (vocab, merges) = (bytes("vocab.json"), bytes("merges.txt"));
    let config: &[u8] = br#"{"tokenizer_class": "GPT2Tokenizer"}"#;
    let files: [(&str, &[u8]); 3] =
        [("vocab.json", &vocab), ("merges.txt", &merges), ("tokenizer_config.json", config)];
    convert(&dir("gpt2", &files)).ok().says(&["made from vocab.json and merges.txt (480 tokens, cut as gpt-2 cuts"]);
    convert(&dir("cut", &[("tokenizer.model", &bpe[..bpe.len() - 3])])).fails(&["tokenizer.model: ", "bytes"]);
    convert(&dir("tiktoken", &[("tokenizer.model", b"IQ== 0\n")])).fails(&["a tiktoken vocabulary", "save_pretrained"]);
    convert(&dir("qwen", &[("qwen.tiktoken", b"IQ== 0\n")])).fails(&["qwen.tiktoken is a tiktoken vocabulary"]);
    convert(&dir("tekken", &[("tekken.json", b"{}")])).fails(&["tekken.json: ", "mistral-common", "save_pretrained"]);
}
