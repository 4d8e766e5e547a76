//! The plan of memory against what a process takes. The only test of its binary, because it looks at the whole process.

#![allow(clippy::unwrap_used)]

use std::{fs, path::Path, sync::Arc};

use quern::{
    draft::{Accept, Speculation},
    engine::{Engine, EngineOptions, Event, Generator, Request},
};
use quern_kernels::sample::SamplingParams;
use quern_models::{FileWriter, FloatType, Generation, Meta, ModelFile, ModelSpec, Scheme, TensorPlan};
use serde_json::{Value, json};

const VOCAB: usize = 32768;
const HIDDEN: usize = 64;

/// A line of /proc/self/status in bytes; `None` on other systems.
fn status(name: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let kilobytes = text.lines().find_map(|l| l.strip_prefix(name))?.trim().trim_end_matches(" kB");
    Some(1024 * kilobytes.parse::<u64>().ok()?)
}

fn layer() -> Value {
    let rms = json!({"kind": "rms", "eps": 1e-5});
    json!({
        "attn_norm": rms, "mlp_norm": rms,
        "attn": {"kind": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 16, "scale": 0.25},
        "mlp": {"kind": "gated", "inner": 128, "act": "silu"},
    })
}

fn spec(layers: Vec<Value>, norm: Value, tied: bool, guesses: Option<Value>) -> ModelSpec {
    let mut spec = json!({
        "family": "zeros", "vocab": VOCAB, "hidden": HIDDEN, "max_context": 4096, "layers": layers, "norm": norm,
        "tied_head": tied,
    });
    if let Some(guesses) = guesses {
        spec["guesses"] = guesses;
    }
    serde_json::from_value(spec).unwrap()
}

/// A file whose weights are zeros: all tokens are equally likely, so that nothing is small.
fn zeros(name: &str, spec: ModelSpec) -> Arc<ModelFile> {
    let path = std::env::temp_dir().join(format!("quern-plan-{name}-{}.qrn", std::process::id()));
    let plans: Vec<TensorPlan> = spec
        .tensors()
        .into_iter()
        .map(|t| TensorPlan { scheme: Scheme::Float(FloatType::F16), name: t.name, dims: t.dims })
        .collect();
    let meta =
        Meta { spec, tokenizer: None, chat_template: None, generation: Generation::default(), provenance: json!({}) };
    let mut writer = FileWriter::create(&path, &meta, plans.clone()).unwrap();
    for plan in plans {
        writer.write(&vec![0; 2 * plan.dims.iter().product::<u64>() as usize]).unwrap();
    }
    writer.finish().unwrap();
    let open = |path: &Path| Arc::new(ModelFile::open(path).unwrap());
    let file = open(&path);
    fs::remove_file(path).unwrap();
    file
}

/// A model of one layer, and a head of a kind for it.
fn files(method: &str) -> (Arc<ModelFile>, Arc<ModelFile>) {
    let rms = json!({"kind": "rms", "eps": 1e-5});
    let mut head = json!({"model_hidden": HIDDEN, "model_vocab": VOCAB});
    let head = if method == "medusa" {
        head["states"] = json!({"kind": "normed"});
        head["kind"] = json!({"kind": "medusa", "guesses": 8, "depth": 1});
        spec(vec![], json!({"kind": "identity"}), false, Some(head))
    } else {
        head["states"] = json!({"kind": "before", "layers": [1]});
        head["kind"] = json!({"kind": "block", "size": 16, "mask": 7, "state_norm": rms});
        (head["shared_embed"], head["shared_head"]) = (true.into(), true.into());
        spec(vec![layer()], rms.clone(), false, Some(head))
    };
    (zeros("model", spec(vec![layer()], rms, true, None)), zeros("head", head))
}

/// Bytes taken, at most at any time, and planned, by an engine of many sequences with a head.
fn measured(speculation: Speculation) -> (u64, u64) {
    let (model, head) = files(speculation.method.name());
    let options = EngineOptions { speculation, sequences: 63, context: 128, threads: 1, ..EngineOptions::default() };
    let planned = Engine::memory(&model, &options).with_draft(&head, &options).needed();
    let before = status("VmRSS:").unwrap();
    fs::write("/proc/self/clear_refs", FORGET_PEAK).unwrap();
    let mut engine = Engine::new(model, options).unwrap();
    engine.with_draft(head, options).unwrap();
    for seed in 0..63 {
        let sampling = SamplingParams { temperature: 1.0, seed, ..SamplingParams::default() };
        let prompt = (0..20).map(|j| (7 * seed as u32 + j) % VOCAB as u32).collect();
        engine.add(Request { prompt, sampling, max_tokens: 8, ignore_eos: true, ..Request::default() }).unwrap();
    }
    let mut events = vec![];
    while engine.step(&mut events).unwrap() {}
    assert!(events.iter().all(|event| !matches!(event, Event::Failed { .. })), "{speculation}");
    assert!(engine.stats().guesses.drafted > 63, "{speculation}");
    (status("VmHWM:").unwrap().saturating_sub(before), planned)
}

/// To /proc/self/clear_refs: the most memory that was resident is counted anew.
const FORGET_PEAK: &str = "5";

/// What the test says to itself.
const CASE: &str = "QUERN_MEMORY_CASE";

/// Medusa's heads and a block's, many sequences at once, whose guesses are chosen or drawn. Each in a process of its own:
/// what is given back stays with a process for a while.
#[test]
fn plans_of_heads_are_from_above() {
    if status("VmHWM:").is_none() || fs::write("/proc/self/clear_refs", FORGET_PEAK).is_err() {
        println!("SKIPPED memory::plans_of_heads_are_from_above: needs /proc/self/clear_refs");
        return;
    }
    if let Ok(case) = std::env::var(CASE) {
        let (method, accept) = case.split_once(' ').unwrap();
        let accept: Accept = accept.parse().unwrap();
        let (taken, planned) = measured(Speculation { accept, ..method.parse().unwrap() });
        println!("{case}: {:.1} MB taken, {:.1} planned", taken as f64 / 1e6, planned as f64 / 1e6);
        assert!(taken < planned && planned < 6 * taken, "{case}: {taken} bytes taken, {planned} planned");
        return;
    }
    for method in ["medusa:1", "medusa:8", "medusa:4x16", "dflash:1", "dflash:8"] {
        for accept in ["exact", "rejection"] {
            let mut again = std::process::Command::new(std::env::current_exe().unwrap());
            again.args(["--exact", "plans_of_heads_are_from_above", "--nocapture"]);
            let ran = again.env(CASE, format!("{method} {accept}")).output().unwrap();
            let said = [&ran.stdout[..], &ran.stderr].concat();
            let said = String::from_utf8_lossy(&said);
            println!("{}", said.lines().find(|line| line.contains(" MB taken")).unwrap_or_default());
            assert!(ran.status.success(), "{said}");
        }
    }
}
