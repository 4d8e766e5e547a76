//! What the head and the sampler cost: microseconds per row that a decoding step takes longer when it gives a token.
//!
//! `cargo run --release -p quern-kernels --example head_bench -- FILE.qrn|VOCAB HIDDEN [THREADS [ROWS]]` measures a
//! model, or a random int4 head (groups of 32) of this shape on a model of one small layer. Kinds take turns, medians
//! are printed; a share of the step is only of interest for a real model.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use quern_kernels::{
    cpu::{acts::Mode, kv::KvType},
    exec::{Chunk, CpuExecutor, CpuOptions, Executor, Mask, Output, Plan},
    sample::SamplingParams,
};
use quern_models::{
    FileWriter, FloatType, Generation, Meta, ModelFile, Scheme, TensorPlan, ZeroKind,
    spec::{Act, Attn, Layer, Mlp, ModelSpec, Norm},
};

/// Tokens before the measured one: what penalties look at.
const DEPTH: usize = 512;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, usual: usize| args.get(i).map_or(usual, |n| n.parse().expect("a number"));
    let shape = args.first().and_then(|vocab| vocab.parse().ok());
    let (file, rest) = match shape {
        Some(vocab) => (random(vocab, number(1, 576)), 2),
        None => (ModelFile::open(Path::new(args.first().expect("FILE.qrn, or VOCAB HIDDEN"))).expect("a .qrn file"), 1),
    };
    let (threads, rows) = (number(rest, 0), number(rest + 1, 1));
    let vocab = file.spec().vocab;
    let each = DEPTH / 16 + 1;
    let options = CpuOptions { threads, blocks: each * rows, mode: Mode::Int8, kv: KvType::F16 };
    let mut executor = CpuExecutor::new(Arc::new(file), options).expect("memory for the cache");
    let greedy = SamplingParams::greedy();
    let warm = SamplingParams { temperature: 0.8, ..greedy.clone() };
    let kinds: [(&str, Option<SamplingParams>); 8] = [
        ("no token", None),
        ("greedy", Some(greedy.clone())),
        ("greedy, penalties", Some(SamplingParams { frequency_penalty: 0.3, ..greedy })),
        ("temperature 0.8", Some(warm.clone())),
        ("  min-p 0.05", Some(SamplingParams { min_p: 0.05, ..warm.clone() })),
        ("  top-k 40, top-p 0.95", Some(SamplingParams { top_k: 40, top_p: 0.95, ..warm.clone() })),
        ("  top-p 0.95", Some(SamplingParams { top_p: 0.95, ..warm.clone() })),
        ("  the first with penalties", Some(SamplingParams { repetition_penalty: 1.1, ..warm })),
    ];
    let mut times = vec![vec![]; kinds.len()];
    let (mut round, begin) = (0, Instant::now());
    while round < 8 || (begin.elapsed() < Duration::from_secs(20) && round < 200) {
        for ((_, params), times) in kinds.iter().zip(&mut times) {
            let history: Vec<u32> = (0..=DEPTH).map(|i| ((i + round) * 7919 % vocab) as u32).collect();
            let blocks: Vec<Vec<u32>> =
                (0..rows).map(|r| (r * each..(r + 1) * each).map(|b| b as u32).collect()).collect();
            let output = || match params {
                None => Output::None,
                Some(params) => Output::Tokens {
                    from: 0,
                    params,
                    history: &history,
                    prompt_len: DEPTH / 2,
                    logprobs: None,
                    allowed: None,
                },
            };
            let chunk = |blocks| Chunk {
                tokens: &history[DEPTH..],
                start: DEPTH,
                blocks,
                mask: Mask::Causal,
                output: output(),
            };
            let plan = Plan { chunks: blocks.iter().map(|b| chunk(&b[..])).collect() };
            let start = Instant::now();
            let ticket = executor.submit(&plan).expect("a plan that can be run");
            executor.collect(ticket).expect("a step that was run");
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
        round += 1;
    }
    let medians: Vec<f64> = times.iter_mut().map(|t| median(&mut t[4..])).collect();
    println!("{}, {rows} rows, vocabulary of {vocab}, {} rounds", executor.describe(), round);
    println!("{:28} {:>10.0} us a step", kinds[0].0, medians[0]);
    for ((name, _), time) in kinds.iter().zip(&medians).skip(1) {
        let (head, over) = ((time - medians[0]) / rows as f64, (time - medians[1]) / rows as f64);
        let share = 100.0 * (time - medians[1]) / time;
        println!("{name:28} {head:>10.1} us a row, {over:>7.1} more than greedy, {share:>5.1} % of the step");
    }
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// A model of one small layer with a random head; logits deviate by about 3.
fn random(vocab: usize, hidden: usize) -> ModelFile {
    let norm = Norm::Rms { eps: 1e-5 };
    let layer = Layer {
        attn_norm: norm.clone(),
        attn: Attn::Gqa {
            heads: 1,
            kv_heads: 1,
            head_dim: 64,
            scale: 0.125,
            rope: None,
            window: None,
            cap: None,
            sinks: false,
            qk_norm: None,
            qkv_bias: false,
            o_bias: false,
            attn_order: false,
            o_order: false,
        },
        attn_post_norm: None,
        mlp_norm: norm.clone(),
        mlp: Mlp::Gated { inner: 64, act: Act::Silu, bias: false, mlp_order: false },
        mlp_post_norm: None,
    };
    let spec = ModelSpec {
        family: "llama".into(),
        vocab,
        hidden,
        max_context: 2048,
        layers: vec![layer],
        norm,
        tied_head: true,
        head_order: false,
        positions: None,
        embed_scale: None,
        logit_cap: None,
        draft_head: None,
    };
    let int4 = Scheme::Int { bits: 4, group: 32, zero: ZeroKind::Mid, scale: FloatType::F16 };
    let scheme = |dims: usize| if dims == 2 { int4 } else { Scheme::Float(FloatType::F32) };
    let needed = spec.tensors().into_iter();
    let plans: Vec<_> =
        needed.map(|t| TensorPlan { scheme: scheme(t.dims.len()), name: t.name, dims: t.dims }).collect();
    let meta = Meta {
        spec,
        tokenizer: None,
        chat_template: None,
        generation: Generation::default(),
        provenance: Default::default(),
    };
    let path = std::env::temp_dir().join(format!("quern-head-bench-{}.qrn", std::process::id()));
    let mut writer = FileWriter::create(&path, &meta, plans.clone()).expect("room for a file");
    let mut state = 1u64;
    for plan in &plans {
        let (n, k) = if plan.dims.len() == 2 { (plan.dims[0], plan.dims[1]) } else { (1, plan.dims[0]) };
        let planes = plan.scheme.planes(n, k).expect("a scheme that fits");
        let mut bytes = vec![0; planes.total as usize];
        if plan.dims.len() == 1 {
            bytes.chunks_exact_mut(4).for_each(|b| b.copy_from_slice(&1f32.to_le_bytes()));
        } else {
            for b in bytes[..planes.codes.1 as usize].chunks_exact_mut(8) {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                b.copy_from_slice(&(state ^ state >> 29).to_le_bytes());
            }
            // Uniform codes deviate by 4.6, a normed row by 1.
            let scale = half::f16::from_f32(3.0 / 4.6 / (k as f32).sqrt()).to_le_bytes();
            let scales = planes.scales.0 as usize..(planes.scales.0 + planes.scales.1) as usize;
            bytes[scales].chunks_exact_mut(2).for_each(|b| b.copy_from_slice(&scale));
        }
        writer.write(&bytes).expect("room for a file");
    }
    writer.finish().expect("room for a file");
    let file = ModelFile::open(&path).expect("the file just written");
    std::fs::remove_file(path).expect("the file just written");
    file
}
