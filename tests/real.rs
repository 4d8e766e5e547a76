//! SmolLM2-135M-Instruct, three times: as GPTQ, as AWQ and as GGUF.
//!
//! The checkpoints are too large to commit. QUERN_SHARED names a folder with
//! `fixtures/real/{gptq-w4-g64-sym,awq-w4-g64-gemm}` and `fixtures/text/eval.txt`, QUERN_SMOLLM2_GGUF
//! the Q4_1 file that the demo fetches. The first shard of both checkpoints (the embeddings) is not
//! stored there: it is made here from the GGUF file, which holds the same numbers.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Stdio,
    sync::Arc,
};

use quern::text::Tokenizer;
use quern_convert::{
    Report,
    source::{Block, Dtype, gguf},
};
use quern_models::{ModelFile, Scheme, map::Mapped};
use serde_json::Value;

use crate::support::{
    Scratch, fixture,
    golden::{Golden, distance, one_f16_tensor, range},
    model::{self, Run, Sequence, kept},
    program::{arg, command, interrupt, quern, wait_for},
    skip,
};

/// Mean KL divergence of default mode against exact mode; measured .0026 (GPTQ) and .0007 (AWQ).
const MOST_KL: f64 = 0.004;

#[test]
fn gptq_keeps_its_codes_and_gives_its_golden() {
    checkpoint("gptq_keeps_its_codes_and_gives_its_golden", "gptq-w4-g64-sym", "gptq");
}

#[test]
fn awq_keeps_its_codes_and_gives_its_golden() {
    checkpoint("awq_keeps_its_codes_and_gives_its_golden", "awq-w4-g64-gemm", "awq");
}

fn checkpoint(test: &str, name: &str, method: &str) {
    let Some(real) = Real::new(test, name) else { return };
    assert_eq!(real.report.method, method);
    every_code_was_compared(&real.report, &real.file);
    golden_numbers(&real, name);
    divergence(&real, name);
    sensible(&real, name);
}

/// The report counts exactly the integers that the file has.
fn every_code_was_compared(report: &Report, file: &ModelFile) {
    let (mut codes, mut scales, mut zeros, mut floats) = (0, 0, 0, 0);
    for info in file.tensors() {
        let (n, k) = info.shape();
        match info.scheme {
            Scheme::Int { group, zero, .. } => {
                codes += n * k;
                scales += n * k.div_ceil(group as u64);
                zeros += if zero == quern_models::ZeroKind::Code { n * k.div_ceil(group as u64) } else { 0 };
            }
            Scheme::Float(_) => floats += n * k,
            other => panic!("{}: {other}", info.name),
        }
    }
    // All linear layers of the model.
    assert_eq!(codes, 106_168_320);
    let v = report.verified;
    assert_eq!((v.codes, v.scales, v.floats), (codes, scales, floats), "{v}");
    assert!(v.zeros >= zeros, "{v}: the file has {zeros} zeros");
    assert_eq!((v.nearest, v.rounded), (0, 0), "{v}");
    println!("{}: {v}", report.method);
}

/// Exact mode against transformers: logits at all positions, and 32 greedy tokens.
fn golden_numbers(real: &Real, name: &str) {
    for case in ["chat", "eval"] {
        let golden = &real.golden;
        let (prompt, ids) = (golden.ids(&format!("{case}.input_ids")), golden.ids(&format!("{case}.greedy_ids")));
        let wanted = golden.floats(&format!("{case}.logits_last"));
        let bound = golden.exact_bound(wanted.range());
        let all = model::logits(&real.file, Run::Exact, prompt);
        let vocab = wanted.cols;
        let last = distance(&all[all.len() - vocab..], &wanted.data);

        let top_ids = golden.ids(&format!("{case}.topk_ids"));
        let top = golden.floats(&format!("{case}.topk_values"));
        let at = |(i, &id): (usize, &u32)| all[i / top.cols * vocab + id as usize];
        let ours: Vec<f32> = top_ids.iter().enumerate().map(at).collect();
        let top = distance(&ours, &top.data);
        let sums: Vec<f32> = all.chunks_exact(vocab).map(|row| log_sum(row) as f32).collect();
        let sums = distance(&sums, &golden.floats(&format!("{case}.logsumexp")).data);

        let got = model::greedy(&real.file, Run::Exact, &[prompt.to_vec()], ids.len()).remove(0);
        let agree = got.tokens.iter().zip(ids).take_while(|(a, b)| a == b).count();
        let measured = format!(
            "{name} {case}: range {:.2}, bound {:.2e} of it; last position {:.2e}, 16 largest of all positions {:.2e}, \
             logsumexp {:.2e}; greedy {agree} of {} equal",
            wanted.range(),
            bound / wanted.range(),
            last / wanted.range(),
            top / wanted.range(),
            sums / wanted.range(),
            ids.len(),
        );
        println!("{measured}");
        assert!(last.max(top).max(sums) <= bound, "{measured}");
        // A step that was not decided by more than the bound may go either way.
        assert!(agree == ids.len() || got.gaps[agree] < 2.0 * bound, "{measured}: {:?}, golden {ids:?}", got.tokens);
    }
}

/// Mean KL divergence of default mode against exact mode over passages of the evaluation text.
fn divergence(real: &Real, name: &str) {
    const PASSAGES: usize = 3;
    const TOKENS: usize = 192;
    const STEP: usize = 64;
    let text = fs::read_to_string(real.shared.join("fixtures/text/eval.txt")).unwrap();
    let tokenizer = Tokenizer::from_json(real.file.tokenizer_json().unwrap()).unwrap();
    let (mut sum, mut worst, mut same) = (0.0, 0f64, 0);
    for passage in 0..PASSAGES {
        // Spread over the text, each from the beginning of a line.
        let before = &text.as_bytes()[..text.len() / PASSAGES * passage];
        let from = before.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        let words: String = text[from..].chars().take(8 * TOKENS).collect();
        let ids = tokenizer.encode(&words, false).unwrap();
        assert!(ids.len() >= TOKENS, "{} tokens", ids.len());
        let mut exact = Sequence::new(&real.file, Run::Exact, TOKENS);
        let mut quick = Sequence::new(&real.file, Run::Default, TOKENS);
        for step in ids[..TOKENS].chunks(STEP) {
            let vocab = real.file.spec().vocab;
            let (p, q) = (exact.push(step), quick.push(step));
            for (p, q) in p.chunks_exact(vocab).zip(q.chunks_exact(vocab)) {
                let kl = kl(p, q);
                sum += kl;
                worst = worst.max(kl);
                same += usize::from(largest(p) == largest(q));
            }
        }
    }
    let positions = PASSAGES * TOKENS;
    let mean = sum / positions as f64;
    let measured = format!(
        "{name}: KL divergence of default mode from exact mode over {positions} tokens: mean {mean:.5}, largest \
         {worst:.3}; same first token {:.2} %",
        100.0 * same as f64 / positions as f64
    );
    println!("{measured}");
    assert!(mean <= MOST_KL, "{measured}");
}

/// The program answers a question from the converted file.
fn sensible(real: &Real, name: &str) {
    let file = real.scratch.at("model.qrn");
    let question = "What is the capital of France?";
    let ran = quern(&["run", arg(&file), "-p", question, "--temperature", "0", "-n", "40"]).ok();
    println!("{name}: {}", ran.out.trim());
    ran.prints(&["Paris"]);
}

#[test]
fn gguf_gives_the_golden_tokens() {
    let test = "gguf_gives_the_golden_tokens";
    let Some(path) = gguf_path(test) else { return };
    let scratch = Scratch::new("real-gguf");
    let (report, file) = kept(&path, &scratch);
    assert_eq!(report.method, "gguf");
    assert_eq!(report.verified.nearest + report.verified.rounded, 0, "{}", report.verified);
    let golden = json(&fixture("golden/smollm2_q4_1.json"));
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 10);
    let prompts: Vec<Vec<u32>> = cases.iter().map(|case| list(&case["prompt_ids"])).collect();
    let answers = model::greedy(&file, Run::Exact, &prompts, 64);
    let mut wrong = vec![];
    for (case, got) in cases.iter().zip(&answers) {
        let ids: Vec<u32> = list(&case["greedy_ids"]);
        let (gaps, ranges): (Vec<f32>, Vec<f32>) = (list(&case["gap"]), list(&case["range"]));
        assert_eq!(ids.len(), 64);
        let agree = got.tokens.iter().zip(&ids).take_while(|(a, b)| a == b).count();
        // Logprobs differ as logits do.
        let apart = got.gaps[..agree].iter().zip(&gaps).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        let measured = format!("{}: {agree} of 64 equal, gaps within {apart:.1e}", case["name"]);
        println!("{measured}");
        if agree < 64 && gaps[agree] >= 1e-4 * ranges[agree] {
            wrong.push(format!("{measured}; golden gap {} of range {}", gaps[agree], ranges[agree]));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn an_interrupted_conversion_leaves_nothing() {
    let test = "an_interrupted_conversion_leaves_nothing";
    let Some(path) = gguf_path(test) else { return };
    let scratch = Scratch::new("real-interrupted");
    let out = scratch.at("model.qrn");
    let child = command(&["convert", arg(&path), "--out", arg(&out)]).stderr(Stdio::piped()).spawn().unwrap();
    wait_for("the temporary file", || !scratch.names().is_empty());
    interrupt(&child);
    let status = child.wait_with_output().unwrap().status;
    if status.success() {
        return skip(&format!("real::{test}"), "signals are ignored here, or the machine is too fast");
    }
    assert_eq!(scratch.names(), [""; 0], "left behind");
}

#[test]
fn tokenizer_of_the_checkpoint() {
    let test = "tokenizer_of_the_checkpoint";
    let Some(shared) = folder(test) else { return };
    let json = fs::read(shared.join("fixtures/real/gptq-w4-g64-sym/tokenizer.json")).unwrap();
    tokenizer(&json, "tokenizer_smollm2.json");
}

#[test]
fn tokenizer_rebuilt_from_the_gguf() {
    let test = "tokenizer_rebuilt_from_the_gguf";
    let Some(path) = gguf_path(test) else { return };
    let scratch = Scratch::new("real-tokenizer");
    let (_, file) = kept(&path, &scratch);
    tokenizer(file.tokenizer_json().unwrap(), "tokenizer_smollm2_pre_smollm.json");
}

fn tokenizer(tokenizer_json: &[u8], golden: &str) {
    let tokenizer = Tokenizer::from_json(tokenizer_json).unwrap();
    let golden = json(&fixture("golden").join(golden));
    let cases = golden["cases"].as_array().unwrap();
    assert!(cases.len() > 150);
    for case in cases {
        let (text, ids) = (case["text"].as_str().unwrap(), list(&case["ids"]));
        assert_eq!(tokenizer.encode(text, true).unwrap(), ids, "{text:?}");
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), case["decoded"].as_str().unwrap(), "{text:?}");
    }
}

/// One of the two checkpoints, complete and converted.
struct Real {
    shared: PathBuf,
    scratch: Scratch,
    report: Report,
    file: Arc<ModelFile>,
    golden: Golden,
}

impl Real {
    fn new(test: &str, name: &str) -> Option<Real> {
        let (shared, gguf) = (folder(test)?, gguf_path(test)?);
        let dir = shared.join("fixtures/real").join(name);
        let scratch = Scratch::new(name);
        let source = scratch.at(name);
        fs::create_dir(&source).unwrap();
        for entry in fs::read_dir(&dir).unwrap() {
            let entry = entry.unwrap();
            std::os::unix::fs::symlink(entry.path(), source.join(entry.file_name())).unwrap();
        }
        scratch.write(&format!("{name}/model-00001-of-00002.safetensors"), embeddings(&gguf));
        let (report, file) = kept(&source, &scratch);
        let golden = Golden::of(&fs::read(dir.join("golden.safetensors")).unwrap());
        Some(Real { shared, scratch, report, file, golden })
    }
}

/// The first shard: the GGUF's Q8_0 embeddings, dequantized in f32 and rounded to f16.
fn embeddings(gguf: &Path) -> Vec<u8> {
    let map = Mapped::open(gguf).unwrap();
    let parsed = gguf::parse(&map).unwrap();
    let tensor = parsed.tensors.iter().find(|t| t.name == "token_embd.weight").unwrap();
    assert_eq!(tensor.dtype, Dtype::Block(Block::Q8_0));
    let [n, k] = tensor.shape[..] else { panic!("{:?}", tensor.shape) };
    let values = tensor.bytes.chunks_exact(34).flat_map(|block| {
        let scale = half::f16::from_le_bytes([block[0], block[1]]).to_f32();
        block[2..].iter().map(move |&code| scale * f32::from(code as i8))
    });
    one_f16_tensor("model.embed_tokens.weight", [n as usize, k as usize], values)
}

fn folder(test: &str) -> Option<PathBuf> {
    named(test, "QUERN_SHARED", "the folder with fixtures/real")
}

fn gguf_path(test: &str) -> Option<PathBuf> {
    named(test, "QUERN_SMOLLM2_GGUF", "SmolLM2-135M-Instruct.Q4_1.gguf, as the demo fetches it")
}

fn named(test: &str, variable: &str, what: &str) -> Option<PathBuf> {
    let path = env::var_os(variable).map(PathBuf::from);
    if path.is_none() {
        skip(&format!("real::{test}"), &format!("set {variable} to {what}"));
    }
    path
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn list<T: serde::de::DeserializeOwned>(value: &Value) -> Vec<T> {
    serde_json::from_value(value.clone()).unwrap()
}

fn largest(logits: &[f32]) -> usize {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap()
}

fn log_sum(logits: &[f32]) -> f64 {
    let top = logits[largest(logits)] as f64;
    top + logits.iter().map(|&x| (x as f64 - top).exp()).sum::<f64>().ln()
}

/// Divergence of `q` from `p`, natural logarithm.
fn kl(p: &[f32], q: &[f32]) -> f64 {
    assert!(range(p).is_finite() && range(q).is_finite());
    let (p_sum, q_sum) = (log_sum(p), log_sum(q));
    let term = |(&p, &q): (&f32, &f32)| {
        let p = p as f64 - p_sum;
        p.exp() * (p - (q as f64 - q_sum))
    };
    p.iter().zip(q).map(term).sum()
}
