//! Heads on the CPU against the oracle, and batch invariance of their rows.

#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;

use quern_kernels::{
    cpu::{acts::Mode, kv::KvType},
    exec::{Chunk, ChunkOutput, CpuExecutor, CpuOptions, ExecError, Executor, Fed, HeadExecutor, Mask, Output, Plan},
    reference::head::{State, block, guesses},
    sample::{History, SamplingParams, sample_allowed},
};
use quern_models::{FloatType, ModelFile, Scheme, ZeroKind, spec::HeadKind};
use support::{
    block_head, deviation,
    guessing::{TEXT, block_of, medusa_rows, of_own, run, states, tree_and_paths},
    heads, int, made, plain, tokens,
};

fn executor(file: &Arc<ModelFile>, mode: Mode, kv: KvType, threads: usize) -> CpuExecutor {
    CpuExecutor::new(file.clone(), CpuOptions { threads, blocks: 64, mode, kv }).unwrap()
}

#[test]
fn heads_equal_the_oracle() {
    let f = |t| Scheme::Float(t);
    let schemes = [("f32", f(FloatType::F32)), ("f16", f(FloatType::F16)), ("int4", int(4, 32, ZeroKind::Mid))];
    let text = tokens(TEXT);
    for (name, scheme) in schemes {
        let model = made(&format!("of-{name}"), scheme, int(8, 32, ZeroKind::Mid), plain(true));
        for (kind, spec) in heads() {
            let (vocab, medusa) = (spec.vocab, spec.layers.is_empty());
            let width = spec.draft_head.as_ref().unwrap().width();
            let file = made(&format!("{kind}-{name}"), scheme, f(FloatType::F16), spec);
            for (mode, kv, bound) in [(Mode::F32, KvType::F32, 2e-6), (Mode::Int8, KvType::F16, 0.03)] {
                let mut executor = executor(&model, mode, kv, 2);
                let mut head = executor.head(file.clone()).unwrap();
                let states = states(&mut executor, &text, 7);
                assert_eq!(states.len(), TEXT * width);
                // Medusa gives guesses of the last row of a chunk only.
                let sizes = if medusa { &[1][..] } else { &[TEXT] };
                let all = if medusa { &text[..TEXT - 3] } else { &text[..] };
                let row = |p: usize| match p < TEXT - 4 {
                    true => (all[p + 1], State::Model(states[p * width..(p + 1) * width].to_vec())),
                    false => (all[p + 1], State::Own),
                };
                let rows: Vec<(u32, State)> = (0..all.len() - 1).map(row).collect();
                let want = guesses(&file, &model, &rows);
                let got = match medusa {
                    true => medusa_rows(&mut *head, &text, &states, width),
                    false => run(&mut *head, &text, &states, width, sizes, 0),
                };
                let d = deviation(&of_own(&got, vocab, 290), &want);
                assert!(d < bound, "{kind}, {name}, {mode:?}: {d:.1e} of the range away");
            }
        }
    }
}

/// Alone, chunked, in a batch, on another number of threads: the same bits.
#[test]
fn rows_do_not_depend_on_the_company() {
    let text = tokens(TEXT);
    let model = made("company", int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), plain(true));
    for (kind, spec) in heads().into_iter().filter(|(_, spec)| !spec.layers.is_empty()) {
        let width = spec.draft_head.as_ref().unwrap().width();
        let file = made(&format!("company-{kind}"), int(4, 32, ZeroKind::Code), int(8, 32, ZeroKind::Mid), spec);
        for (mode, kv) in [(Mode::Int8, KvType::F16), (Mode::F32, KvType::Int8)] {
            let run = |threads, of: usize, sizes: &[usize], others| {
                let mut executor = executor(&model, mode, kv, threads);
                let mut head = executor.head(file.clone()).unwrap();
                let states = states(&mut executor, &text, of);
                run(&mut *head, &text, &states, width, sizes, others)
            };
            let want = run(1, TEXT, &[1], 0);
            for (threads, of, sizes, others) in [(2, 5, &[TEXT][..], 0), (2, 1, &[3, 1, 8], 4), (3, 16, &[2], 7)] {
                let got = run(threads, of, sizes, others);
                let same = got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(
                    same && got.len() == want.len(),
                    "{kind} {mode:?}: {threads} threads, {sizes:?}, {others} others"
                );
            }
        }
    }
}

/// A row of a tree of guesses has the bits of the chain that is its path.
#[test]
fn rows_of_trees_are_those_of_their_paths() {
    let text = tokens(TEXT);
    let model = made("trees", int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), plain(true));
    for (kind, spec) in heads().into_iter().filter(|(_, spec)| !spec.layers.is_empty()) {
        let width = spec.draft_head.as_ref().unwrap().width();
        let file = made(&format!("trees-{kind}"), int(4, 32, ZeroKind::Code), int(8, 32, ZeroKind::Mid), spec);
        for (mode, kv) in [(Mode::Int8, KvType::F16), (Mode::F32, KvType::Int8)] {
            let mut executor = executor(&model, mode, kv, 2);
            let mut head = executor.head(file.clone()).unwrap();
            let states = states(&mut executor, &text, TEXT);
            let own: Vec<Vec<f32>> = (0..6).map(|i| states[i * width..][..72].to_vec()).collect();
            let [tree, paths] = tree_and_paths(&mut *head, &text, &states, width, &own);
            let same =
                |a: &[f32], b: &[f32]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same(&tree.0, &paths.0) && same(&tree.1, &paths.1), "{kind} {mode:?}");
            assert_ne!(tree.0[..290], tree.0[290..580], "{kind}: the same twice");
        }
    }
}

/// Tokens are those that the plain sampler takes from the logits, at the position behind the next.
#[test]
fn tokens_are_those_of_the_plain_sampler() {
    let text = tokens(TEXT);
    let model = made("tokens", int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), plain(true));
    let warm = SamplingParams { temperature: 1.5, seed: 7, ..SamplingParams::greedy() };
    let careful = SamplingParams { frequency_penalty: 1.0, top_k: 20, temperature: 2.0, seed: 3, ..warm.clone() };
    for (kind, spec) in heads() {
        let medusa = matches!(spec.draft_head.as_ref().unwrap().kind, HeadKind::Medusa { .. });
        let width = spec.draft_head.as_ref().unwrap().width();
        let file = made(&format!("tokens-{kind}"), int(4, 32, ZeroKind::Code), int(8, 32, ZeroKind::Mid), spec);
        let mut executor = executor(&model, Mode::Int8, KvType::F16, 2);
        let mut head = executor.head(file).unwrap();
        let states = states(&mut executor, &text, TEXT);
        for params in [&SamplingParams::greedy(), &warm, &careful] {
            let mut ask = |output| {
                let chunk = Chunk { tokens: &text[1..12], start: 0, blocks: &[9, 2], mask: Mask::Causal, output };
                let fed = Fed::Model(vec![&states[..11 * width]]);
                head.guess(&Plan { chunks: vec![chunk] }, &fed).unwrap().remove(0)
            };
            let ChunkOutput::Logits(mut logits) = ask(Output::Logits { from: 10 }) else { panic!("no logits") };
            let history = &text[..12];
            let tokens = Output::Tokens { from: 10, params, history, prompt_len: 5, logprobs: None, allowed: None };
            let ChunkOutput::Tokens(got) = ask(tokens) else { panic!("no tokens") };
            let got: Vec<u32> = got.into_iter().map(|t| t.unwrap().token).collect();
            let history = History { tokens: history, prompt_len: 5 };
            let rows = logits.chunks_exact_mut(290).enumerate();
            let want: Vec<u32> = rows
                .map(|(i, row)| sample_allowed(row, params, history, 12 + i as u64, None, None).unwrap().token)
                .collect();
            assert_eq!((got.len(), got), (if medusa { 3 } else { 1 }, want), "{kind}");
        }
    }
}

/// Blocks behind contexts of several lengths: the oracle's logits, the same bits whatever the company, and the tokens of
/// the plain sampler at the rows' own positions.
#[test]
fn blocks_equal_the_oracle() {
    let text = tokens(TEXT);
    for (name, scheme) in [("f32", Scheme::Float(FloatType::F32)), ("int4", int(4, 32, ZeroKind::Mid))] {
        let model = made(&format!("of-block-{name}"), scheme, int(8, 32, ZeroKind::Mid), plain(true));
        let file = made(&format!("block-{name}"), scheme, scheme, block_head());
        let width = 2 * 72;
        for (mode, kv, bound) in [(Mode::F32, KvType::F32, 2e-6), (Mode::Int8, KvType::F16, 0.03)] {
            for n in [1, 2, 15, 17, TEXT - 1] {
                let run = |threads, size: usize, others: u32| {
                    block_of(&mut executor(&model, mode, kv, threads), &file, &text, n, size, others)
                };
                let (states, got) = run(2, 7, 0);
                let context = states[..n * width].chunks_exact(width).map(<[f32]>::to_vec).collect();
                let want = block(&file, &model, &context, text[n]);
                let d = deviation(&got, &want);
                assert!(d < bound, "{name}, {mode:?}, {n}: {d:.1e} of the range away");
                for (threads, size, others) in [(1, 1, 0), (2, 3, 4)] {
                    let again = run(threads, size, others).1;
                    assert!(got.iter().zip(&again).all(|(a, b)| a.to_bits() == b.to_bits()), "{name}, {mode:?}, {n}");
                }
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let text = tokens(TEXT);
    let f16 = Scheme::Float(FloatType::F16);
    let model = made("fits", f16, f16, plain(true));
    let mut executor = executor(&model, Mode::F32, KvType::F32, 1);
    let error = |got: Result<Box<dyn HeadExecutor>, ExecError>| got.err().unwrap().to_string();
    assert!(error(executor.head(model.clone())).contains("expected a head, got a model"));
    for (change, what) in [(0, "got 72, 290 and 2;"), (1, "vocabulary 291 and"), (2, "at least 3 layers")] {
        let mut spec = heads().remove(2).1;
        let head = spec.draft_head.as_mut().unwrap();
        match change {
            0 => head.model_hidden += 8,
            1 => head.model_vocab += 1,
            _ => head.states = quern_models::spec::States::Before { layers: vec![0, 3] },
        }
        let error = error(executor.head(made(&format!("fits-{change}"), f16, f16, spec)));
        assert!(error.contains(what), "{error}");
    }
    let mut head = executor.head(made("fits-not", f16, f16, heads().remove(0).1)).unwrap();
    let states = states(&mut executor, &text, TEXT);
    let mut guess = |tokens: &[u32], fed: &Fed, history: &[u32]| {
        let params = SamplingParams::greedy();
        let output = Output::Tokens { from: 0, params: &params, history, prompt_len: 1, logprobs: None, allowed: None };
        let chunk = Chunk { tokens, start: 0, blocks: &[0], mask: Mask::Causal, output };
        head.guess(&Plan { chunks: vec![chunk] }, fed).map(drop).map_err(|e| e.to_string())
    };
    assert!(guess(&[1], &Fed::Nothing, &[0, 1]).unwrap_err().contains("nothing"));
    assert!(guess(&[1], &Fed::Model(vec![&states[..71]]), &[0, 1]).unwrap_err().contains("[72] numbers"));
    assert!(guess(&[1], &Fed::Own(vec![]), &[0, 1]).unwrap_err().contains("numbers"));
    assert!(guess(&[1], &Fed::Model(vec![&states[..72]]), &[1]).unwrap_err().contains("history"));
    assert!(guess(&[300], &Fed::Model(vec![&states[..72]]), &[0, 300]).unwrap_err().contains("below 290"));
    guess(&[1], &Fed::Model(vec![&states[..72]]), &[0, 1]).unwrap();
    // Heads give tokens or logits.
    let mut refused = |output| {
        let chunk = Chunk { tokens: &[1], start: 0, blocks: &[0], mask: Mask::Causal, output };
        head.guess(&Plan { chunks: vec![chunk] }, &Fed::Model(vec![&states[..72]])).unwrap_err().to_string()
    };
    let params = SamplingParams::greedy();
    let tokens = |logprobs, allowed| Output::Tokens {
        from: 0,
        params: &params,
        history: &[0, 1],
        prompt_len: 1,
        logprobs,
        allowed,
    };
    let allowed = [u32::MAX; 10];
    let outputs = [
        (tokens(Some(0), None), "logprobs"),
        (tokens(None, Some(&allowed)), "allowed tokens"),
        (Output::Hidden { from: 0 }, "hidden states"),
    ];
    for (output, got) in outputs {
        let error = refused(output);
        assert!(
            error.ends_with(&format!("output: expected tokens, logits or nothing of a head, got {got}")),
            "{error}"
        );
    }
    // A block has no trees.
    let mut head = executor.head(made("fits-block", f16, f16, block_head())).unwrap();
    let (mask, output) = (Mask::Tree(&[1, 3]), Output::None);
    let chunk = Chunk { tokens: &[1, 7], start: 0, blocks: &[0], mask, output };
    let error = head.guess(&Plan { chunks: vec![chunk] }, &Fed::Nothing).unwrap_err().to_string();
    assert!(error.contains("mask: expected Causal or Full") && error.ends_with("got a tree"), "{error}");
}
