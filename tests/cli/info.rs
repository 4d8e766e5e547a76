//! `quern info`: summary, tensor list, JSON, and damage that `--verify` must find.

use std::{fs, path::PathBuf};

use quern_models::ModelFile;
use serde_json::Value;

use super::converted;
use crate::support::{
    Random, Scratch,
    program::{arg, quern},
};

#[test]
fn the_summary_names_model_weights_and_origin() {
    let (_scratch, file) = converted("models/smollm2-gptq-2layer");
    quern(&["info", arg(&file)]).ok().prints(&[
        "model.qrn",
        "llama, 2 layers, hidden 576, 9/3 heads of 64, inner 1536, vocabulary 1024, context 8192",
        "int4 g64 sym",
        "14 tensors",
        "tied to the embedding",
        "template     chat",
        "gptq",
    ]);
    let (_scratch, file) = converted("models/llama");
    quern(&["info", arg(&file)]).ok().prints(&["head         its own", "template     none", "bf16"]);
}

#[test]
fn every_tensor_is_listed() {
    let (_scratch, path) = converted("models/llama-gptq-w4-g64-asym");
    let file = ModelFile::open(&path).unwrap();
    let listed = quern(&["info", arg(&path), "--tensors"]).ok().out;
    let rows = listed.lines().skip_while(|line| !line.starts_with("tensor ")).skip(1);
    assert_eq!(rows.clone().count(), file.tensors().len(), "{listed}");
    for (tensor, row) in file.tensors().iter().zip(rows) {
        let shape = tensor.dims.iter().map(u64::to_string).collect::<Vec<_>>().join(" x ");
        assert!(row.starts_with(&tensor.name) && row.contains(&shape), "{row}");
        let columns: Vec<&str> = row.split_whitespace().rev().collect();
        let (scheme, len) = (tensor.scheme.to_string(), tensor.len.to_string());
        assert_eq!(columns[..2], [&tensor.offset.to_string(), &len], "{row}");
        assert!(row.contains(&scheme), "{row}");
    }
}

#[test]
fn json_has_everything_the_summary_has() {
    let (_scratch, path) = converted("models/smollm2-gptq-2layer");
    let file = ModelFile::open(&path).unwrap();
    let all = quern(&["info", arg(&path), "--json"]).ok().json();
    assert_eq!(all["bytes"], fs::metadata(&path).unwrap().len());
    assert_eq!(all["spec"]["vocab"], 1024);
    assert_eq!(all["spec"]["layers"].as_array().unwrap().len(), 2);
    assert_eq!(all["provenance"]["method"], "gptq");
    assert!(all["chat_template"].as_str().unwrap().contains("im_start"));
    let sum = |key: &str| all["schemes"].as_array().unwrap().iter().map(|s| s[key].as_u64().unwrap()).sum::<u64>();
    assert_eq!(sum("tensors"), file.tensors().len() as u64);
    assert_eq!(sum("bytes"), file.tensors().iter().map(|t| t.len).sum::<u64>());
    assert_eq!((all.get("tensors"), all.get("verified")), (None, None));

    let all = quern(&["info", arg(&path), "--json", "--tensors", "--verify"]).ok().json();
    let tensors = all["tensors"].as_array().unwrap();
    let names: Vec<&str> = tensors.iter().map(|t| t["name"].as_str().unwrap()).collect();
    assert_eq!(names, file.tensors().iter().map(|t| &t.name[..]).collect::<Vec<_>>());
    assert_eq!(all["verified"]["bytes"], all["bytes"]);
}

#[test]
fn a_good_file_verifies() {
    let (_scratch, path) = converted("gguf/llama-q4_1/model.gguf");
    let bytes = fs::metadata(&path).unwrap().len();
    quern(&["info", arg(&path), "--verify"]).ok().prints(&["every hash is right", &format!("{bytes} bytes")]);
}

/// A file with one bit flipped, as a user would come upon it.
struct Damage {
    _scratch: Scratch,
    path: PathBuf,
    good: Vec<u8>,
    /// Name, first byte, bytes and owned bytes of every tensor.
    tensors: Vec<(String, usize, usize, usize)>,
    header_len: usize,
}

impl Damage {
    fn new(fixture: &str) -> Damage {
        let (scratch, path) = converted(fixture);
        let file = ModelFile::open(&path).unwrap();
        let of = |t: &quern_models::TensorInfo| (t.name.clone(), t.offset as usize, t.len as usize, t.owned() as usize);
        let tensors = file.tensors().iter().map(of).collect();
        let header_len = file.header_len() as usize;
        Damage { _scratch: scratch, good: fs::read(&path).unwrap(), path, tensors, header_len }
    }

    fn flip(&self, at: usize, bit: u8) {
        let mut bad = self.good.clone();
        bad[at] ^= 1 << bit;
        fs::write(&self.path, bad).unwrap();
    }

    /// What a message about byte `at` must name.
    fn part(&self, at: usize) -> String {
        let owner = self.tensors.iter().find(|(_, from, _, owned)| (*from..from + owned).contains(&at));
        owner.map_or("header".to_string(), |(name, ..)| format!("tensor {name}: its hash"))
    }
}

#[test]
fn any_flipped_bit_is_found() {
    let damage = Damage::new("models/llama-gptq-w4-g64-sym");
    let tensors: usize = damage.tensors.iter().map(|t| t.3).sum();
    assert_eq!(damage.header_len + tensors, damage.good.len(), "every byte belongs to something");
    let mut random = Random::new(7);
    let mut places = vec![];
    for _ in 0..150 {
        places.push(random.below(damage.good.len()));
        places.push(random.below(damage.header_len));
    }
    places.extend(damage.tensors.iter().map(|(_, from, len, owned)| from + len + random.below((owned - len).max(1))));
    for at in places.into_iter().filter(|&at| at < damage.good.len()) {
        damage.flip(at, random.below(8) as u8);
        let found = ModelFile::open(&damage.path).and_then(|file| file.verify().map(drop));
        let message = found.expect_err("a flipped bit").to_string();
        if at >= damage.header_len {
            assert!(message.contains(&damage.part(at)), "byte {at}: {message}");
        }
    }
}

#[test]
fn verify_names_the_damaged_part() {
    let damage = Damage::new("models/llama-gptq-w4-g64-asym");
    let mut random = Random::new(8);
    let header = damage.good[..damage.header_len].iter().rposition(|&b| b != 0).unwrap();
    let (name, from, len, owned) = damage.tensors.iter().find(|t| t.2 < t.3).expect("a tensor with padding").clone();
    let mut places = vec![
        // Fixed header: features, lengths, counts, the hash itself.
        (0, "not a .qrn file"),
        (8, "version"),
        (16, "features"),
        (24, "header"),
        (33, "header"),
        (41, "bytes"),
        (49, "header"),
        (60, "header"),
        // Section table, somewhere in the sections, the last record, the padding behind it.
        (70, "header"),
        (header / 2, "header"),
        (header, "header"),
        (damage.header_len - 1, "header"),
    ];
    let expected: Vec<(usize, String)> = damage
        .tensors
        .iter()
        .map(|(_, from, len, _)| from + random.below(*len))
        .chain([from + len, from + owned - 1, damage.good.len() - 1])
        .map(|at| (at, damage.part(at)))
        .collect();
    assert!(expected.iter().any(|(_, part)| part.contains(&name)));
    places.extend(expected.iter().map(|(at, part)| (*at, part.as_str())));
    for (at, part) in places {
        damage.flip(at, random.below(8) as u8);
        quern(&["info", arg(&damage.path), "--verify"]).fails(&["model.qrn", part]);
    }
}

#[test]
fn a_damaged_header_is_refused_without_verify() {
    let damage = Damage::new("models/llama");
    damage.flip(damage.header_len / 2, 3);
    for args in [&["info", "FILE"][..], &["run", "FILE", "-p", "x"], &["bench", "FILE"]] {
        let args: Vec<&str> = args.iter().map(|&a| if a == "FILE" { arg(&damage.path) } else { a }).collect();
        quern(&args).fails(&["model.qrn", "the header: its hash", "damaged"]);
    }
    fs::write(&damage.path, &damage.good[..damage.good.len() - 1]).unwrap();
    let (full, cut) = (damage.good.len().to_string(), (damage.good.len() - 1).to_string());
    quern(&["info", arg(&damage.path)]).fails(&["model.qrn", &full, &cut]);
}

#[test]
fn json_of_a_damaged_file_is_an_error() {
    let damage = Damage::new("models/llama");
    damage.flip(damage.good.len() - 1, 0);
    quern(&["info", arg(&damage.path), "--json", "--verify"]).fails(&["its hash"]);
    let all: Value = quern(&["info", arg(&damage.path), "--json"]).ok().json();
    assert_eq!(all["spec"]["vocab"], 320);
}
