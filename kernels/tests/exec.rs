//! The CPU executor against the oracle, and batch invariance of whole steps.

#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;

use quern_kernels::{
    cpu::{acts::Mode, kv::KvType},
    exec::{Chunk, ChunkOutput, CpuExecutor, CpuOptions, ExecError, Executor, Mask, NO_BLOCK, Output, Plan},
    reference,
    sample::{History, SampleError, SamplingParams, sample},
};
use quern_models::{FloatType, ModelFile, Scheme, ZeroKind, spec::Attn};
use support::{deviation, everything, int, made, mixtures, model, plain, run, tokens, trees};

fn executor(file: &Arc<ModelFile>, mode: Mode, kv: KvType, threads: usize) -> CpuExecutor {
    CpuExecutor::new(file.clone(), CpuOptions { threads, blocks: 64, mode, kv }).unwrap()
}

#[test]
fn exact_mode_equals_the_oracle() {
    let f = Scheme::Float;
    let cases = [
        ("f32", f(FloatType::F32), f(FloatType::F16), true),
        ("bf16", f(FloatType::BF16), f(FloatType::BF16), false),
        ("int4-sym", int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), true),
        ("int4-zero", int(4, 64, ZeroKind::Code), f(FloatType::F16), false),
        ("int4-min", int(4, 32, ZeroKind::Min), int(4, 32, ZeroKind::Min), true),
        ("int4-channel", int(4, 96, ZeroKind::Mid), int(8, 128, ZeroKind::Code), false),
        ("int8", int(8, 64, ZeroKind::Mid), int(8, 64, ZeroKind::Mid), true),
    ];
    let tokens = tokens(41);
    for (name, linear, embed, tied) in cases {
        let file = model(name, linear, embed, tied);
        let want = reference::forward::logits(&file, &tokens);
        let exact = run(&mut executor(&file, Mode::F32, KvType::F32, 2), &tokens, &[41], 0);
        let d = deviation(&exact, &want);
        assert!(d < 2e-6, "{name}: exact mode is {d:.1e} of the range away");
        let default = run(&mut executor(&file, Mode::Int8, KvType::F16, 2), &tokens, &[41], 0);
        let d = deviation(&default, &want);
        assert!(d < 0.02, "{name}: default mode is {d:.1e} of the range away");
        let integers = matches!(linear, Scheme::Int { .. });
        assert!(!integers || d > 1e-5, "{name}: default mode did not quantize activations ({d:.1e})");
    }
}

/// Fixtures of the families show that the oracle is right about each mechanism; here they all meet.
#[test]
fn every_mechanism_equals_the_oracle() {
    let tokens = tokens(53);
    let f32s = Scheme::Float(FloatType::F32);
    for (name, linear, embed) in [("all-f32", f32s, f32s), ("all-int4", int(4, 32, ZeroKind::Code), f32s)] {
        let file = made(name, linear, embed, everything());
        let want = reference::forward::logits(&file, &tokens);
        let exact = run(&mut executor(&file, Mode::F32, KvType::F32, 2), &tokens, &[53], 0);
        let d = deviation(&exact, &want);
        assert!(d < 3e-6, "{name}: exact mode is {d:.1e} of the range away");
        let default = run(&mut executor(&file, Mode::Int8, KvType::F16, 2), &tokens, &[53], 0);
        let d = deviation(&default, &want);
        assert!(d < 0.03, "{name}: default mode is {d:.1e} of the range away");
    }
}

/// What is near is not asked of default mode here: an expert that is barely picked may not be.
#[test]
fn mixtures_of_experts_equal_the_oracle() {
    let tokens = tokens(53);
    let f32s = Scheme::Float(FloatType::F32);
    for (name, linear) in
        [("mix-f32", f32s), ("mix-int4", int(4, 32, ZeroKind::Code)), ("mix-int8", int(8, 64, ZeroKind::Mid))]
    {
        let file = made(name, linear, f32s, mixtures());
        let want = reference::forward::logits(&file, &tokens);
        for (threads, sizes) in [(1, &[53][..]), (2, &[1]), (2, &[17, 1])] {
            let exact = run(&mut executor(&file, Mode::F32, KvType::F32, threads), &tokens, sizes, 0);
            let d = deviation(&exact, &want);
            assert!(d < 4e-6, "{name}: exact mode is {d:.1e} of the range away");
        }
    }
}

#[test]
fn a_position_beyond_the_table_is_refused() {
    let mut spec = everything();
    (spec.max_context, spec.positions) = (16, Some(16));
    let file = made("positions", Scheme::Float(FloatType::F16), Scheme::Float(FloatType::F16), spec);
    let mut executor = executor(&file, Mode::F32, KvType::F32, 1);
    let mut submit = |start| {
        let chunk = Chunk { tokens: &[1], start, blocks: &[0, 1], mask: Mask::Causal, output: Output::None };
        executor.submit(&Plan { chunks: vec![chunk] }).map_err(|e| e.to_string())
    };
    submit(15).unwrap();
    assert!(submit(16).unwrap_err().contains("position: expected below 16, got 16"));
}

/// Alone, chunked, in a batch, on another number of threads: the same bits.
#[test]
fn logits_do_not_depend_on_the_company() {
    let tokens = tokens(150);
    for (name, scheme, spec) in [
        ("inv4", int(4, 64, ZeroKind::Mid), plain(true)),
        ("inv8", int(8, 32, ZeroKind::Code), plain(true)),
        ("invf", Scheme::Float(FloatType::F16), plain(true)),
        ("inv4-all", int(4, 32, ZeroKind::Code), everything()),
        ("invf-all", Scheme::Float(FloatType::BF16), everything()),
        ("inv4-mix", int(4, 32, ZeroKind::Mid), mixtures()),
        ("invf-mix", Scheme::Float(FloatType::F16), mixtures()),
    ] {
        let file = made(name, scheme, int(8, 32, ZeroKind::Mid), spec);
        let small = [(Mode::Int8, KvType::Int8), (Mode::Int8, KvType::Fp8)];
        for (mode, kv) in [(Mode::Int8, KvType::F16), (Mode::F32, KvType::F32)].into_iter().chain(small) {
            let want = run(&mut executor(&file, mode, kv, 1), &tokens, &[1], 0);
            assert!(want.iter().all(|x| x.is_finite()));
            for (threads, sizes, others) in
                [(1, &[150][..], 0), (2, &[150], 3), (2, &[1], 5), (3, &[64, 7, 1], 1), (2, &[17, 40], 4)]
            {
                let got = run(&mut executor(&file, mode, kv, threads), &tokens, sizes, others);
                let same = got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(
                    same,
                    "{name} {mode:?}: {threads} threads, chunks {sizes:?}, {others} others: {:e}",
                    deviation(&got, &want)
                );
            }
        }
    }
}

#[test]
fn sampled_tokens_follow_the_logits_and_the_seed() {
    let file = model("sample", int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), true);
    let mut executor = executor(&file, Mode::Int8, KvType::F16, 2);
    let tokens = tokens(20);
    let logits = run(&mut executor, &tokens, &[20], 0);
    let mut ask = |params: &SamplingParams| {
        let output =
            Output::Tokens { from: 15, params, history: &tokens, prompt_len: 20, logprobs: Some(2), allowed: None };
        let plan =
            Plan { chunks: vec![Chunk { tokens: &tokens, start: 0, blocks: &[7, 9], mask: Mask::Causal, output }] };
        let ticket = executor.submit(&plan).unwrap();
        match executor.collect(ticket).unwrap().remove(0) {
            ChunkOutput::Tokens(t) => t.into_iter().map(Result::unwrap).collect::<Vec<_>>(),
            other => panic!("{other:?}"),
        }
    };
    let greedy = ask(&SamplingParams::greedy());
    assert_eq!(greedy.len(), 5);
    for (i, s) in greedy.iter().enumerate() {
        let row = &logits[(15 + i) * 290..(16 + i) * 290];
        assert!(row.iter().all(|&x| x <= row[s.token as usize]));
        assert_eq!(s.top[0].0, s.token);
    }
    let warm = SamplingParams { temperature: 3.0, seed: 5, ..SamplingParams::greedy() };
    assert_eq!(ask(&warm), ask(&warm));
    let other = SamplingParams { seed: 6, ..warm.clone() };
    assert_ne!(ask(&warm), ask(&other));
}

/// The head keeps as little as each row needs; the tokens are those that whole rows of logits give.
#[test]
fn tokens_are_those_of_the_plain_sampler() {
    let file = model("tokens", int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), true);
    let tokens = tokens(20);
    let logits = run(&mut executor(&file, Mode::Int8, KvType::F16, 2), &tokens, &[20], 0);
    let greedy = SamplingParams::greedy();
    let warm = SamplingParams { temperature: 2.0, seed: 5, ..greedy.clone() };
    let kinds = [
        (greedy.clone(), None),
        (SamplingParams { frequency_penalty: 0.5, ..greedy.clone() }, None),
        (warm.clone(), None),
        (SamplingParams { top_k: 2, ..warm.clone() }, None),
        (SamplingParams { top_k: 40, min_p: 0.1, ..warm.clone() }, None),
        (SamplingParams { top_p: 0.8, ..warm.clone() }, None),
        (SamplingParams { repetition_penalty: 1.3, logit_bias: vec![(129, 2.0)], ..warm }, None),
        (greedy, Some(3)),
    ];
    let expected: Vec<Vec<_>> = kinds
        .iter()
        .map(|(params, logprobs)| {
            let row = |i: usize| {
                let history = History { tokens: &tokens[..=i], prompt_len: 4 };
                let row = &mut logits[i * 290..(i + 1) * 290].to_vec();
                sample(row, params, history, i as u64 + 1, *logprobs).unwrap()
            };
            (12..20).map(row).collect()
        })
        .collect();
    for threads in 1..4 {
        let mut executor = executor(&file, Mode::Int8, KvType::F16, threads);
        let blocks: Vec<[u32; 2]> = (0..10).map(|i| [2 * i, 2 * i + 1]).collect();
        let chunk =
            |i: usize, output| Chunk { tokens: &tokens, start: 0, blocks: &blocks[i], mask: Mask::Causal, output };
        let mut chunks: Vec<Chunk> = kinds
            .iter()
            .enumerate()
            .map(|(i, (params, logprobs))| {
                let (history, prompt_len, logprobs) = (&tokens[..], 4, *logprobs);
                chunk(i, Output::Tokens { from: 12, params, history, prompt_len, logprobs, allowed: None })
            })
            .collect();
        chunks.insert(3, chunk(8, Output::Logits { from: 18 }));
        chunks.insert(5, chunk(9, Output::None));
        let ticket = executor.submit(&Plan { chunks }).unwrap();
        let mut outputs = executor.collect(ticket).unwrap();
        assert!(matches!(outputs.remove(5), ChunkOutput::None));
        match outputs.remove(3) {
            ChunkOutput::Logits(rows) => assert_eq!(rows, logits[18 * 290..]),
            other => panic!("{other:?}"),
        }
        for ((output, expected), kind) in outputs.into_iter().zip(&expected).zip(&kinds) {
            match output {
                ChunkOutput::Tokens(got) => {
                    let got: Vec<_> = got.into_iter().map(Result::unwrap).collect();
                    assert_eq!(&got, expected, "{kind:?}, {threads} threads");
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn rows_without_a_number_are_errors_of_their_chunk() {
    let file = model("nan", int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), true);
    let mut executor = executor(&file, Mode::Int8, KvType::F16, 2);
    let greedy = SamplingParams::greedy();
    let warm = SamplingParams { temperature: 1.0, ..greedy.clone() };
    let chunk = |blocks, params| Chunk {
        tokens: &[1, 2],
        start: 0,
        blocks,
        mask: Mask::Causal,
        output: Output::Tokens { from: 1, params, history: &[1, 2], prompt_len: 2, logprobs: None, allowed: None },
    };
    let plan = Plan { chunks: vec![chunk(&[0], &greedy), chunk(&[1], &warm), chunk(&[2], &greedy)] };
    let ticket = executor.submit(&plan).unwrap();
    for output in executor.collect(ticket).unwrap() {
        match output {
            ChunkOutput::Tokens(got) => {
                assert_eq!(got, [Err(SampleError::NothingToChoose { vocab: 290, nans: 290 })]);
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_cache_that_cannot_be_had_is_refused() {
    let file = model("memory", int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), true);
    let options = CpuOptions { threads: 1, blocks: 1 << 36, mode: Mode::Int8, kv: KvType::F32 };
    assert!(matches!(CpuExecutor::new(file, options), Err(ExecError::Memory { .. })));
}

/// What ARCHITECTURE.md says about a decoding step: six regions a layer with a mixture, whose router has one.
#[test]
fn a_mixture_has_six_regions() {
    let file = made("regions-mix", int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), mixtures());
    let mut executor = executor(&file, Mode::Int8, KvType::F16, 2);
    let tokens = tokens(9);
    for start in 0..3 {
        let before = executor.regions();
        let chunk =
            Chunk { tokens: &tokens[start..=start], start, blocks: &[0], mask: Mask::Causal, output: Output::None };
        let ticket = executor.submit(&Plan { chunks: vec![chunk] }).unwrap();
        executor.collect(ticket).unwrap();
        assert_eq!(executor.regions() - before, 3 * 6 + 5);
    }
}

/// What ARCHITECTURE.md says about a decoding step: five regions a layer and one for the head.
#[test]
fn a_decoding_step_has_five_regions_a_layer() {
    let file = model("regions", int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), true);
    let mut executor = executor(&file, Mode::Int8, KvType::F16, 2);
    run(&mut executor, &tokens(20), &[20], 0);
    let before = executor.regions();
    let chunk =
        Chunk { tokens: &[1], start: 20, blocks: &[3, 8], mask: Mask::Causal, output: Output::Logits { from: 0 } };
    executor.submit(&Plan { chunks: vec![chunk] }).unwrap();
    assert_eq!(executor.regions() - before, 2 * 5 + 1);
    for params in [SamplingParams::greedy(), SamplingParams { top_p: 0.9, ..SamplingParams::default() }] {
        let before = executor.regions();
        let output = Output::Tokens {
            from: 0,
            params: &params,
            history: &[1; 21],
            prompt_len: 20,
            logprobs: None,
            allowed: None,
        };
        let chunk = Chunk { tokens: &[1], start: 20, blocks: &[3, 8], mask: Mask::Causal, output };
        executor.submit(&Plan { chunks: vec![chunk] }).unwrap();
        assert_eq!(executor.regions() - before, 2 * 5 + 1, "{params:?}");
    }
}

#[test]
fn a_wrong_plan_is_refused() {
    let file = model("plan", int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), true);
    let mut executor = executor(&file, Mode::Int8, KvType::F16, 1);
    let mut refused = |tokens: &[u32], start, blocks: &[u32]| {
        let chunk = Chunk { tokens, start, blocks, mask: Mask::Causal, output: Output::None };
        executor.submit(&Plan { chunks: vec![chunk] }).unwrap_err().to_string()
    };
    assert!(refused(&[], 0, &[0]).contains("tokens"));
    assert!(refused(&[290], 0, &[0]).contains("below 290"));
    assert!(refused(&[1], 16, &[0]).contains("blocks"));
    assert!(refused(&[1], 0, &[64]).contains("below 64"));
    assert!(refused(&[1; 17], 0, &[3, 3]).contains("twice"));
    let ticket = executor.submit(&Plan::default()).unwrap();
    assert!(executor.collect(ticket).unwrap().is_empty());
    let chunk = |blocks| Chunk { tokens: &[1], start: 0, blocks, mask: Mask::Causal, output: Output::None };
    let plan = Plan { chunks: vec![chunk(&[2, 5]), chunk(&[2, 6])] };
    assert!(matches!(executor.submit(&plan), Err(ExecError::Plan { chunk: 1, .. })));
}

/// Only allowed tokens are chosen, each row by its own set; a row that allows nothing is an error.
#[test]
fn masks_allow_what_they_say() {
    let file = model("masks", int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), true);
    let tokens = tokens(12);
    let mut executor = executor(&file, Mode::Int8, KvType::F16, 2);
    let logits = run(&mut executor, &tokens, &[12], 0);
    let words = 290usize.div_ceil(32);
    let mut allowed = vec![0u32; 2 * words];
    for token in [3u32, 100, 288] {
        allowed[token as usize / 32] |= 1 << (token % 32);
    }
    allowed[words + 289 / 32] |= 1 << (289 % 32);
    for params in [SamplingParams::greedy(), SamplingParams { seed: 4, top_p: 0.9, ..SamplingParams::default() }] {
        let mut ask = |allowed: &[u32]| {
            let (history, allowed) = (&tokens[..], Some(allowed));
            let output =
                Output::Tokens { from: 10, params: &params, history, prompt_len: 12, logprobs: Some(1), allowed };
            let chunk = Chunk { tokens: &tokens, start: 0, blocks: &[1], mask: Mask::Causal, output };
            let ticket = executor.submit(&Plan { chunks: vec![chunk] }).map_err(|e| e.to_string())?;
            match executor.collect(ticket).unwrap().remove(0) {
                ChunkOutput::Tokens(t) => Ok::<_, String>(t),
                other => panic!("{other:?}"),
            }
        };
        let got: Vec<_> = ask(&allowed).unwrap().into_iter().map(Result::unwrap).collect();
        assert!([3, 100, 288].contains(&got[0].token) && got[1].token == 289);
        let row = &logits[10 * 290..11 * 290];
        if params.is_greedy() {
            assert!([3usize, 100, 288].iter().all(|&t| row[t] <= row[got[0].token as usize]));
        }
        // Probabilities are the model's own.
        let best = (0..290).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
        assert_eq!(got[0].top[0].0 as usize, best);
        let nothing = Err(SampleError::NothingToChoose { vocab: 290, nans: 0 });
        assert_eq!(ask(&vec![0; 2 * words]).unwrap(), [nothing.clone(), nothing]);
        assert!(ask(&allowed[..words]).unwrap_err().contains("words of allowed tokens: expected 20, got 10"));
    }
}

/// Hidden states times the head are the logits.
#[test]
fn hidden_states_are_what_the_head_reads() {
    for (name, spec) in [("hidden", plain(true)), ("hidden-all", everything())] {
        let float = Scheme::Float(FloatType::F32);
        let file = made(name, float, float, spec);
        let (hidden, vocab) = (file.spec().hidden, file.spec().vocab);
        let tokens = tokens(20);
        let logits = run(&mut executor(&file, Mode::F32, KvType::F32, 1), &tokens, &[20], 0);
        let mut executor = executor(&file, Mode::F32, KvType::F32, 2);
        let chunk = |blocks, output| Chunk { tokens: &tokens, start: 0, blocks, mask: Mask::Causal, output };
        let chunks = vec![chunk(&[2, 3], Output::Hidden { from: 5 }), chunk(&[0, 1], Output::Logits { from: 19 })];
        let ticket = executor.submit(&Plan { chunks }).unwrap();
        let mut outputs = executor.collect(ticket).unwrap();
        assert!(matches!(outputs.remove(1), ChunkOutput::Logits(l) if l == logits[19 * vocab..]));
        let ChunkOutput::Hidden(states) = outputs.remove(0) else { panic!("no states") };
        assert_eq!(states.len(), 15 * hidden);
        let name = if file.spec().tied_head { "embed" } else { "head" };
        let head = file.view(file.index(name).unwrap());
        let order: Option<Vec<u32>> = file.spec().head_order.then(|| {
            let order = file.view(file.index("head_order").unwrap());
            (0..hidden).map(|j| order.order(j)).collect()
        });
        for (row, state) in states.chunks(hidden).enumerate() {
            for token in [0, 17, vocab - 1] {
                let at = |j: usize| state[order.as_ref().map_or(j, |o| o[j] as usize)];
                let want: f32 = (0..hidden).map(|j| at(j) * head.at(token, j)).sum();
                let want = file.spec().logit_cap.map_or(want, |cap| cap * (want / cap).tanh());
                let got = logits[(5 + row) * vocab + token];
                assert!((want - got).abs() < 1e-4, "row {row}, token {token}: {want} and {got}");
            }
        }
    }
}

/// Blocks that every window has passed may be gone; a block that was taken out and put back elsewhere is the same.
#[test]
fn blocks_may_leave_and_move() {
    let mut spec = plain(true);
    for layer in &mut spec.layers {
        let Attn::Gqa { window, .. } = &mut layer.attn;
        *window = Some(20);
    }
    let file = made("window", int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), spec);
    let tokens = tokens(60);
    for kv in [KvType::F16, KvType::Int8, KvType::Fp8] {
        let want = run(&mut executor(&file, Mode::Int8, kv, 2), &tokens, &[60], 0);
        let mut executor = executor(&file, Mode::Int8, kv, 2);
        let step = |executor: &mut CpuExecutor, range: std::ops::Range<usize>, blocks: &[u32]| {
            let output = Output::Logits { from: 0 };
            let chunk =
                Chunk { tokens: &tokens[range.clone()], start: range.start, blocks, mask: Mask::Causal, output };
            let ticket = executor.submit(&Plan { chunks: vec![chunk] }).map_err(|e| e.to_string())?;
            match executor.collect(ticket).unwrap().remove(0) {
                ChunkOutput::Logits(l) => Ok::<_, String>(l),
                other => panic!("{other:?}"),
            }
        };
        step(&mut executor, 0..52, &[0, 1, 2, 3]).unwrap();
        let error = step(&mut executor, 50..55, &[NO_BLOCK, NO_BLOCK, 2, 3]).unwrap_err();
        assert!(error.contains("block: expected below"), "row 50 sees 31: {error}");
        let mut bytes = vec![0; executor.block_bytes()];
        for (from, to) in [(2, 9), (3, 2)] {
            executor.read_block(from, &mut bytes).unwrap();
            executor.write_block(to, &bytes).unwrap();
            executor.write_block(from, &vec![0xff; bytes.len()]).unwrap();
        }
        let got = step(&mut executor, 52..60, &[NO_BLOCK, NO_BLOCK, 9, 2]).unwrap();
        assert_eq!(got, want[52 * 290..], "{kv:?}");
    }
}

const MODES: [(Mode, KvType, usize); 5] = [
    (Mode::Int8, KvType::F16, 1),
    (Mode::Int8, KvType::F16, 3),
    (Mode::F32, KvType::F32, 2),
    (Mode::Int8, KvType::Int8, 2),
    (Mode::Int8, KvType::Fp8, 2),
];

/// Verification of trees is exact: nobody can tell from the text that there were guesses beside those accepted.
#[test]
fn rows_of_trees_are_ends_of_their_paths() {
    for (name, spec) in [("trees", plain(true)), ("trees-all", everything())] {
        let file = made(name, int(4, 32, ZeroKind::Code), int(8, 32, ZeroKind::Mid), spec);
        for (mode, kv, threads) in MODES {
            let mut executor = executor(&file, mode, kv, threads);
            let what = format!("{name} {mode:?} {kv:?}");
            let sizes = [(0, 1), (0, 6), (13, 20), (30, 5), (41, 64), (63, 2), (100, 9)];
            trees::trees_are_their_paths(&mut executor, 290, &sizes, 64, &what);
            trees::chains_are_plain(&mut executor, 290, &[(0, 5), (15, 64), (33, 7)], &what);
        }
    }
}

/// A block whose rows see each other, against the oracle.
#[test]
fn full_blocks_equal_the_oracle() {
    let f32s = Scheme::Float(FloatType::F32);
    for (name, spec) in [("full", plain(true)), ("full-all", everything())] {
        let file = made(name, f32s, f32s, spec);
        for (start, rows) in [(0, 3), (20, 16), (30, 5), (7, 64)] {
            let tokens = tokens(start + rows);
            let want = reference::forward::masked(&file, &tokens, start, Mask::Full);
            let got = trees::full_block(&mut executor(&file, Mode::F32, KvType::F32, 2), &tokens, start);
            let d = deviation(&got, &want);
            assert!(d < 3e-6, "{name}, {rows} rows at {start}: {d:.1e} of the range away");
            let causal = reference::forward::logits(&file, &tokens);
            assert!(deviation(&causal, &want) > 1e-3, "{name}: the mask changes nothing");
        }
    }
}

#[test]
fn wrong_masks_and_moves_are_refused() {
    let file = model("masked", int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), true);
    trees::wrong_masks_are_refused(&mut executor(&file, Mode::Int8, KvType::F16, 1));
}
