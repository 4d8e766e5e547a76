//! `quern eval --text`: the table's numbers against a computation of our own from the logits that
//! `--ids --logits` writes, saved predictions, and what is refused.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Stdio,
};

use quern::text::Tokenizer;
use quern_models::{FileWriter, Meta, ModelFile, TensorPlan, format::FormatError};
use serde_json::Value;

use super::super::converted;
use crate::support::{
    Scratch, fixture,
    golden::Golden,
    model::kept,
    program::{Ran, arg, command, interrupt, quern, wait_for},
};

/// 150 tokens or so of the tiny tokenizer.
const TEXT: &str = "The mill by the river grinds wheat, rye and barley. The stone turns slowly; 12 bags an hour, \
                    no more. \"Why hurry?\" says the miller: flour that is ground cold keeps its taste.\n";

/// Two models of the same tokenizer, and a text.
struct Mill {
    scratch: Scratch,
    float: PathBuf,
    int4: PathBuf,
    text: PathBuf,
    tokens: Vec<u32>,
}

impl Mill {
    fn new() -> Mill {
        let scratch = Scratch::new("eval");
        let convert = |name: &str, to: &str| {
            kept(&fixture(name), &scratch);
            let path = scratch.at(to);
            fs::rename(scratch.at("model.qrn"), &path).unwrap();
            path
        };
        let (float, int4) = (convert("models/llama", "float.qrn"), convert("gguf/llama-q4_0/model.gguf", "int4.qrn"));
        let tokenizer = Tokenizer::from_json(ModelFile::open(&float).unwrap().tokenizer_json().unwrap()).unwrap();
        let tokens = tokenizer.encode(TEXT.trim_end(), false).unwrap();
        assert!(tokens.len() > 96, "{}", tokens.len());
        let text = scratch.write("text.txt", TEXT);
        Mill { scratch, float, int4, text, tokens }
    }

    fn eval(&self, file: &Path, flags: &[&str]) -> Ran {
        quern(&[&["eval", arg(file), "--text", arg(&self.text)], flags].concat())
    }

    fn rows(&self, file: &Path, flags: &[&str]) -> Vec<Value> {
        let ran = self.eval(file, &[flags, &["-o", "json"]].concat()).ok();
        assert_eq!(ran.err, "", "no progress where there is no terminal");
        ran.json().as_array().unwrap().clone()
    }

    /// Log probabilities after each of some tokens, in f64 from the logits that the command writes.
    fn log_probabilities(&self, file: &Path, tokens: &[u32], mode: &[&str]) -> Vec<Vec<f64>> {
        let ids = tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let out = self.scratch.at("logits.safetensors");
        quern(&[&["eval", arg(file), "--ids", &ids, "--logits", arg(&out)], mode].concat()).ok();
        let golden = Golden::of(&fs::read(&out).unwrap());
        let normalized = |row: &[f32]| {
            let most = row.iter().fold(f64::NEG_INFINITY, |m, &x| m.max(x.into()));
            let sum: f64 = row.iter().map(|&x| (f64::from(x) - most).exp()).sum();
            row.iter().map(|&x| f64::from(x) - most - sum.ln()).collect()
        };
        golden.floats("logits").rows().map(normalized).collect()
    }
}

const EXACT: [&str; 4] = ["--activations", "f32", "--kv", "f32"];

fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or_else(|| panic!("{key} in {row}"))
}

#[track_caller]
fn close(a: f64, b: f64, within: f64) {
    assert!((a - b).abs() <= within, "{a} {b}");
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Standard error of a mean, by its textbook formula.
fn error(values: &[f64]) -> f64 {
    let (n, mean) = (values.len() as f64, mean(values));
    (values.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / n / (n - 1.0)).sqrt()
}

#[test]
fn perplexity_is_that_of_the_logits() {
    let mill = Mill::new();
    let rows = mill.rows(&mill.int4, &["-c", "32"]);
    let names: Vec<&str> = rows.iter().map(|r| r["mode"].as_str().unwrap()).collect();
    assert_eq!(names, ["exact", "default"]);
    for (row, mode) in rows.iter().zip([&EXACT[..], &[]]) {
        // llama-perplexity's protocol: of each full window of 32, the predictions after tokens 16 to 30.
        let mut losses = vec![];
        for window in mill.tokens.chunks_exact(32) {
            let log_p = mill.log_probabilities(&mill.int4, window, mode);
            losses.extend((16..31).map(|i| -log_p[i][window[i + 1] as usize]));
        }
        assert_eq!(row["tokens"], losses.len());
        assert_eq!((&row["protocol"], &row["context"]), (&"llama.cpp".into(), &32.into()));
        close(number(row, "nll"), mean(&losses), 1e-9);
        close(number(row, "nll_error"), error(&losses), 1e-9);
        close(number(row, "perplexity"), mean(&losses).exp(), 1e-9 * mean(&losses).exp());
        close(number(row, "perplexity_error"), error(&losses) * mean(&losses).exp(), 1e-6);
    }
    assert_ne!(rows[0]["nll"], rows[1]["nll"]);
}

#[test]
fn strides_score_every_token_of_the_text() {
    let mill = Mill::new();
    let tokens = &mill.tokens[..100];
    let flags = ["--protocol", "strided", "-c", "40", "--stride", "25", "--tokens", "100", "--modes", "exact"];
    let rows = mill.rows(&mill.float, &flags);
    // As transformers' documentation has it: windows at 0, 25, 50 and 75, each scores what is new in it.
    let (mut losses, mut end) = (vec![], 1);
    for start in [0, 25, 50, 75] {
        let window = &tokens[start..100.min(start + 40)];
        let log_p = mill.log_probabilities(&mill.float, window, &EXACT);
        losses.extend((end..start + window.len()).map(|i| -log_p[i - 1 - start][tokens[i] as usize]));
        end = start + window.len();
        if end == 100 {
            break;
        }
    }
    assert_eq!((rows.len(), rows[0]["tokens"].as_u64()), (1, Some(99)));
    assert_eq!(losses.len(), 99);
    assert_eq!(rows[0]["stride"], 25);
    close(number(&rows[0], "nll"), mean(&losses), 1e-9);
    mill.eval(&mill.float, &flags).ok().prints(&["text.txt, strided protocol: windows of 40 tokens every 25 tokens"]);
}

#[test]
fn distances_are_those_of_the_logits() {
    let mill = Mill::new();
    let row = &mill.rows(&mill.int4, &["-c", "32", "--modes", "default", "--against", arg(&mill.float)])[0];
    let (mut kl, mut ratio, mut same, mut delta, mut theirs) = (vec![], vec![], vec![], vec![], vec![]);
    for window in mill.tokens.chunks_exact(32) {
        let p = mill.log_probabilities(&mill.float, window, &EXACT);
        let q = mill.log_probabilities(&mill.int4, window, &[]);
        let top = |row: &[f64]| (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
        for i in 16..31 {
            let next = window[i + 1] as usize;
            kl.push(p[i].iter().zip(&q[i]).map(|(p, q)| p.exp() * (p - q)).sum::<f64>());
            ratio.push(p[i][next] - q[i][next]);
            theirs.push(-p[i][next]);
            same.push(f64::from(u8::from(top(&p[i]) == top(&q[i]))));
            delta.push(q[i][next].exp() - p[i][next].exp());
        }
    }
    assert_eq!((&row["reference"], &row["reference_mode"]), (&"float".into(), &"exact".into()));
    for (key, values) in [("kl", &kl), ("ln_ratio", &ratio), ("same_top", &same), ("delta_p", &delta)] {
        close(number(row, key), mean(values), 1e-9);
        close(number(row, &format!("{key}_error")), error(values), 1e-9);
    }
    let squares: Vec<f64> = delta.iter().map(|d| d * d).collect();
    close(number(row, "delta_p_rms"), mean(&squares).sqrt(), 1e-9);
    close(number(row, "reference_perplexity"), mean(&theirs).exp(), 1e-9 * mean(&theirs).exp());
    kl.sort_by(f64::total_cmp);
    close(number(row, "kl_max"), kl[kl.len() - 1], 1e-9);
    close(number(row, "kl_median"), (kl[kl.len() / 2] + kl[(kl.len() - 1) / 2]) / 2.0, 1e-9);
    assert!(mean(&kl) > 0.01, "rounding to four bits changes something: {}", mean(&kl));
}

#[test]
fn a_file_is_at_no_distance_from_itself() {
    let mill = Mill::new();
    let rows = mill.rows(&mill.int4, &["-c", "32", "--against", arg(&mill.int4)]);
    for key in ["kl", "kl_error", "kl_median", "kl_99", "kl_max", "ln_ratio", "ln_ratio_error", "delta_p_rms"] {
        assert_eq!(number(&rows[0], key), 0.0, "{key}");
    }
    assert_eq!((number(&rows[0], "same_top"), number(&rows[0], "same_top_error")), (1.0, 0.0));
    // What int8 activations cost: the reference is in exact mode.
    assert!(number(&rows[1], "kl") > 0.0);
    assert_eq!(rows[1]["reference_mode"], "exact");
}

#[test]
fn saved_predictions_stand_for_the_model() {
    let mill = Mill::new();
    let saved = mill.scratch.at("float.safetensors");
    for protocol in [&["-c", "32"][..], &["--protocol", "strided", "-c", "48", "--stride", "16"]] {
        let direct = mill.rows(&mill.int4, &[protocol, &["--against", arg(&mill.float)]].concat());
        let save = [protocol, &["--save-logits", arg(&saved)]].concat();
        assert_eq!(mill.rows(&mill.float, &save)[0]["mode"], "exact");
        let rows = quern(&["eval", arg(&mill.int4), "--against", arg(&saved), "-o", "json"]).ok().json();
        for (row, direct) in rows.as_array().unwrap().iter().zip(&direct) {
            let same = [
                "mode",
                "protocol",
                "context",
                "stride",
                "tokens",
                "nll",
                "ln_ratio",
                "ln_ratio_error",
                "same_top",
                "delta_p",
                "delta_p_rms",
                "reference",
                "reference_mode",
                "reference_perplexity",
            ];
            for key in same {
                assert_eq!(row[key], direct[key], "{key}");
            }
            for key in ["kl", "kl_error", "kl_median", "kl_99", "kl_max"] {
                close(number(row, key), number(direct, key), 1e-4 * (1.0 + number(direct, key)));
            }
        }
        let itself = quern(&["eval", arg(&mill.float), "--against", arg(&saved), "-o", "json"]).ok().json();
        assert!(number(&itself[0], "kl_max") < 1e-7, "{}", itself[0]);
        assert_eq!((number(&itself[0], "same_top"), number(&itself[0], "ln_ratio")), (1.0, 0.0));
        assert_eq!(mill.scratch.names(), ["float.qrn", "float.safetensors", "int4.qrn", "text.txt"]);
    }
    // Fewer windows than were saved: its first ones.
    let first = |n: &str| {
        let args = ["eval", arg(&mill.int4), "--against", arg(&saved), "--chunks", n, "--modes", "exact", "-o", "json"];
        quern(&args).ok().json()[0]["tokens"].as_u64().unwrap()
    };
    assert_eq!((first("1"), first("2")), (47, 63));
}

#[test]
fn saved_predictions_that_do_not_fit_are_refused() {
    let mill = Mill::new();
    let saved = mill.scratch.at("p.safetensors");
    mill.eval(&mill.float, &["-c", "32", "--save-logits", arg(&saved)]).ok();
    let against = |flags: &[&str]| quern(&[&["eval", arg(&mill.int4), "--against", arg(&saved)], flags].concat());
    against(&["--context", "64"]).misused(&["llama.cpp protocol: windows of 32 tokens", "leave out"]);
    against(&["--protocol", "strided"]).misused(&["llama.cpp protocol", "save again"]);
    against(&["--text", arg(&mill.text)]).misused(&["--text", "leave out --text"]);
    against(&["--tokens", "50"]).misused(&["--tokens", "--chunks"]);
    // A vocabulary of another size, and another one of the same size.
    let (_scratch, other) = converted("models/smollm2-gptq-2layer");
    quern(&["eval", arg(&other), "--against", arg(&saved)]).fails(&["1024 tokens", "320", "one vocabulary"]);
    let bytes = fs::read(&saved).unwrap();
    let damage = |name: &str, change: &dyn Fn(&mut Vec<u8>), parts: &[&str]| {
        let mut bytes = bytes.clone();
        change(&mut bytes);
        let path = mill.scratch.write(name, bytes);
        quern(&["eval", arg(&mill.int4), "--against", arg(&path)]).fails(&[parts, &[name]].concat());
    };
    let replace = |from: &'static str, to: &'static str| {
        assert_eq!(from.len(), to.len());
        move |b: &mut Vec<u8>| {
            let at = b.windows(from.len()).position(|w| w == from.as_bytes()).unwrap();
            b[at..at + to.len()].copy_from_slice(to.as_bytes());
        }
    };
    damage("empty", &|b| b.clear(), &["neither a .qrn file nor predictions"]);
    damage("short", &|b| b.truncate(5), &["neither"]);
    damage("header", &|b| b.truncate(100), &["neither"]);
    damage("cut", &|b| b.truncate(b.len() - 1), &["bytes, expected", "damaged"]);
    damage("long", &|b| b.push(0), &["bytes, expected", "damaged"]);
    damage("huge", &|b| b[..8].fill(0xFF), &["neither"]);
    damage("later", &replace("predictions-1", "predictions-9"), &["predictions-9", "update quern"]);
    damage("other", &replace("quern-pred", "other-pred"), &["neither"]);
    damage("rule", &replace("\"llama.cpp\"", "\"llama.cxx\""), &["protocol", "damaged"]);
    damage("context", &replace("\"context\":\"32\"", "\"context\":\"16\""), &["stride", "damaged"]);
    damage("type", &replace("U16", "I16"), &["tensor codes", "damaged"]);
    damage("name", &replace("\"nll\"", "\"nlL\""), &["tensor nll", "damaged"]);
    damage("bos", &replace("\"bos\":\"\"", "\"bos\":[]"), &["bos", "damaged"]);
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let rows = mill.tokens.len() / 32 * 15;
    damage("nan", &|b| b[header..header + 8].copy_from_slice(&f64::NAN.to_le_bytes()), &["a loss of NaN", "damaged"]);
    let token = header + 8 * rows;
    damage("token", &|b| b[token..token + 4].fill(0xFF), &["token 4294967295", "320"]);
    damage("text", &|b| b[token] ^= 1, &["another text", "one vocabulary"]);
    quern(&["eval", arg(&mill.int4), "--against", arg(&mill.text)]).fails(&["text.txt", "neither"]);
    quern(&["eval", arg(&mill.int4), "--against", "missing.qrn"]).fails(&["missing.qrn", "No such file"]);
}

#[test]
fn one_table_holds_several_files() {
    let mill = Mill::new();
    let all = ["eval", arg(&mill.int4), arg(&mill.float), "--text", arg(&mill.text), "-c", "32", "-t", "1"];
    let ran = quern(&[&all[..], &["--against", arg(&mill.float)]].concat()).ok();
    let rows: Vec<Vec<&str>> =
        ran.out.lines().filter(|l| l.starts_with("| ")).map(|l| l.split('|').map(str::trim).collect()).collect();
    let names: Vec<(&str, &str)> = rows.iter().map(|row| (row[1], row[3])).collect();
    let want = [
        ("file", "mode"),
        ("reference: float", "exact"),
        ("int4", "exact"),
        ("int4", "default"),
        ("float", "exact"),
        ("float", "default"),
    ];
    assert_eq!(names, want);
    assert!(rows.iter().all(|row| row.len() == rows[0].len()));
    assert_eq!((rows[1][5], rows[4][6], rows[4][7]), (rows[4][5], "0.00000 ± 0.00000", "0.000000 ± 0.000000"));
    ran.prints(&[
        "text.txt, llama.cpp protocol: windows of 32 tokens, the second half scored",
        "exact: f32 activations, f32 KV",
        "default: int8 activations, f16 KV",
        "KL mean",
        "same top %",
    ]);
    // A table without a reference has none of its columns.
    let plain = quern(&all).ok();
    assert!(!plain.out.contains("KL") && plain.out.contains("perplexity"), "{}", plain.out);
    assert!(!plain.out.contains("cannot be compared"), "{}", plain.out);
    // The mode that the other commands' flags name.
    let named = |flags: &[&str]| mill.rows(&mill.int4, &[&["-c", "32"], flags].concat());
    assert_eq!(named(&EXACT)[0], mill.rows(&mill.int4, &["-c", "32", "--modes", "exact"])[0]);
    let mixed = named(&["--kv", "f32"]);
    assert_eq!((mixed.len(), &mixed[0]["mode"]), (1, &"int8, f32 KV".into()));
    let both = named(&["--modes", "default,exact"]);
    assert_eq!([&both[0]["mode"], &both[1]["mode"]], ["default", "exact"]);
}

#[test]
fn limits_of_the_work() {
    let mill = Mill::new();
    let tokens = |flags: &[&str]| mill.rows(&mill.float, flags)[0]["tokens"].as_u64().unwrap();
    assert_eq!(tokens(&["-c", "32", "--chunks", "2"]), 30);
    assert_eq!(tokens(&["-c", "32", "--tokens", "95"]), 30);
    let strided = ["--protocol", "strided", "--tokens", "61"];
    assert_eq!(tokens(&strided), 60);
    assert_eq!(mill.rows(&mill.float, &strided)[0]["context"], 256, "what the model was made for");
    // Threads change nothing.
    let one = mill.rows(&mill.int4, &["-c", "32", "--against", arg(&mill.float), "-t", "1", "--modes", "default"]);
    let three = mill.rows(&mill.int4, &["-c", "32", "--against", arg(&mill.float), "-t", "3", "--modes", "default"]);
    for key in ["nll", "kl", "kl_max", "delta_p_rms"] {
        assert_eq!(one[0][key], three[0][key]);
    }
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let mill = Mill::new();
    let float = &mill.float;
    let text = |bytes: &[u8]| {
        let path = mill.scratch.write("bad.txt", bytes);
        quern(&["eval", arg(float), "--text", arg(&path), "-c", "32"])
    };
    text(b"").fails(&["bad.txt", "the text is empty"]);
    text(b"short").fails(&["bad.txt", "llama.cpp protocol", "needs 32", "longer text or a smaller --context"]);
    text(b"abc \xff def").fails(&["bad.txt", "byte 4", "UTF-8"]);
    quern(&["eval", arg(float), "--text", "/nonexistent.txt"]).fails(&["/nonexistent.txt", "No such file"]);
    mill.eval(float, &[]).fails(&["needs 256"]);
    mill.eval(float, &["-c", "257"]).misused(&["257 tokens", "at most 256", "float.qrn"]);
    mill.eval(float, &["-c", "3"]).misused(&["--context 3", "at least 4"]);
    mill.eval(float, &["--stride", "16"]).misused(&["--stride", "--protocol strided"]);
    mill.eval(float, &["--protocol", "strided", "-c", "8", "--stride", "9"]).misused(&["--stride 9", "1 to 8"]);
    mill.eval(float, &["--protocol", "gptq"]).misused(&["llama.cpp", "strided"]);
    mill.eval(float, &["--chunks", "0"]).misused(&["--chunks"]);
    mill.eval(float, &["--modes", "exact,exact"]).misused(&["exact is there twice"]);
    mill.eval(float, &["--modes", "exact", "--kv", "f32"]).misused(&["cannot be used with"]);
    mill.eval(float, &["--ids", "1"]).misused(&["cannot be used with"]);
    quern(&["eval", arg(float), "--against", arg(float)]).misused(&["--text FILE"]);
    quern(&["eval", arg(float), arg(float), "--ids", "1", "--logits", "x"]).misused(&["one file, got 2"]);
    quern(&["eval", arg(float)]).misused(&["required"]);
    // Saved predictions are one row, and replace nothing that is read.
    let out = mill.scratch.at("p.safetensors");
    mill.eval(float, &["--save-logits", arg(&out), "--modes", "exact,default"])
        .misused(&["in 2 modes", "--modes exact"]);
    mill.eval(float, &["-c", "32", "--save-logits", arg(float)]).misused(&["float.qrn is read by this command"]);
    mill.eval(float, &["-c", "32", "--save-logits", arg(&mill.text)]).misused(&["text.txt is read"]);
    mill.eval(float, &["-c", "32", "--save-logits", "/dev/null"]).fails(&["/dev/null", "not a regular file"]);
    let nowhere = mill.scratch.at("no/p.safetensors");
    mill.eval(float, &["-c", "32", "--save-logits", arg(&nowhere)]).fails(&["no/p.safetensors", "No such file"]);
    assert!(!out.exists());
    let (_scratch, other) = converted("models/smollm2-gptq-2layer");
    mill.eval(&other, &["-c", "32", "--against", arg(float)]).fails(&[
        "1024 tokens",
        "the reference's 320",
        "one vocabulary",
    ]);
}

/// The models of `mill` written again with something changed.
fn changed(from: &Path, to: &Path, tokenizer: Option<Vec<u8>>, damage: bool) {
    let write = || -> Result<(), FormatError> {
        let (file, whole) = (ModelFile::open(from)?, fs::read(from).unwrap());
        let meta = Meta {
            spec: file.spec().clone(),
            tokenizer,
            chat_template: None,
            generation: file.generation().clone(),
            provenance: file.provenance().clone(),
        };
        let plan =
            |t: &quern_models::TensorInfo| TensorPlan { name: t.name.clone(), dims: t.dims.clone(), scheme: t.scheme };
        let mut writer = FileWriter::create(to, &meta, file.tensors().iter().map(plan).collect())?;
        for info in file.tensors() {
            let at = info.offset as usize;
            let mut bytes = whole[at..at + info.len as usize].to_vec();
            if damage && info.name == "norm" {
                bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes());
            }
            writer.write(&bytes)?;
        }
        writer.finish()
    };
    write().unwrap();
}

#[test]
fn files_that_cannot_be_measured_are_refused() {
    let mill = Mill::new();
    let path = mill.scratch.at("changed.qrn");
    let tokenizer = ModelFile::open(&mill.float).unwrap().tokenizer_json().unwrap().to_vec();
    changed(&mill.float, &path, None, false);
    mill.eval(&path, &["-c", "32"]).fails(&["changed.qrn", "no tokenizer", "tokenizer.json"]);
    mill.eval(&mill.int4, &["-c", "32", "--against", arg(&path)]).fails(&["changed.qrn", "no tokenizer"]);
    changed(&mill.float, &path, Some(tokenizer.clone()), true);
    let saved = mill.scratch.at("p.safetensors");
    mill.eval(&path, &["-c", "32", "--save-logits", arg(&saved)]).fails(&[
        "changed.qrn, exact",
        "not finite",
        "--verify",
    ]);
    assert!(!mill.scratch.names().iter().any(|name| name.contains("p.safetensors")), "{:?}", mill.scratch.names());
    mill.eval(&mill.int4, &["-c", "32", "--against", arg(&path)]).fails(&["changed.qrn, exact", "not finite"]);
    // The same number of tokens, two of them exchanged.
    let mut json: Value = serde_json::from_slice(&tokenizer).unwrap();
    let vocab = json["model"]["vocab"].as_object_mut().unwrap();
    (vocab["e"], vocab["q"]) = (vocab["q"].clone(), vocab["e"].clone());
    changed(&mill.float, &path, Some(serde_json::to_vec(&json).unwrap()), false);
    mill.eval(&path, &["-c", "32", "--against", arg(&mill.int4)]).fails(&[
        "changed.qrn",
        "another text",
        "one vocabulary",
    ]);
    quern(&["eval", arg(&mill.float), arg(&path), "--text", arg(&mill.text), "-c", "32", "--modes", "exact"])
        .ok()
        .prints(&["cut the text differently: their perplexities cannot be compared"]);
    // The file that could be measured is shown, the command still fails.
    let ran = quern(&[
        "eval",
        arg(&mill.float),
        arg(&path),
        "--text",
        arg(&mill.text),
        "-c",
        "32",
        "--against",
        arg(&mill.int4),
    ]);
    assert_eq!(ran.code, Some(1));
    ran.prints(&["| float"]).says(&["another text"]);
}

#[test]
fn ctrl_c_leaves_nothing_behind() {
    let mill = Mill::new();
    let text = mill.scratch.write("long.txt", TEXT.repeat(400));
    let out = mill.scratch.at("p.safetensors");
    let args = ["eval", arg(&mill.float), "--text", arg(&text), "-c", "256", "--save-logits", arg(&out), "-t", "1"];
    let child = command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let started = || mill.scratch.names().iter().any(|name| name.ends_with(".part"));
    wait_for("the output", started);
    interrupt(&child);
    let ran = Ran::new(child.wait_with_output().unwrap());
    assert_eq!((ran.code, ran.out.as_str()), (Some(130), ""), "{ran:?}");
    assert!(ran.err.contains("interrupted"), "{ran:?}");
    assert!(!out.exists() && !started(), "{:?}", mill.scratch.names());
}
