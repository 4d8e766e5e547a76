//! The CUDA executor on the virtual GPU: against the oracle, against itself in other company, and what it refuses.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use quern_kernels::{
    cpu::{acts::Mode, kv::KvType},
    cuda::{CudaExecutor, CudaOptions, acts::Form},
    exec::{Chunk, ChunkOutput, CpuExecutor, CpuOptions, ExecError, Executor, Mask, Output, Plan},
    reference,
    sample::{History, SampleError, SamplingParams, sample},
};
use quern_models::{FloatType, ModelFile, Scheme, ZeroKind};

use crate::{
    common::device,
    support::{deviation, everything, int, made, mixtures, model, plain, run, tokens, trees},
};

fn executor(file: &Arc<ModelFile>, form: Form, kv: KvType, rows: usize) -> CudaExecutor {
    let options = CudaOptions { ordinal: 0, blocks: 64, form, kv, rows, tree_blocks: 64 };
    CudaExecutor::new(file.clone(), options, Box::new(|_| {})).unwrap()
}

#[test]
fn all_forms_equal_the_oracle() {
    if device("all_forms_equal_the_oracle").is_none() {
        return;
    }
    let f = Scheme::Float;
    let cases = [
        ("cu-f32", f(FloatType::F32), f(FloatType::F16), true),
        ("cu-bf16", f(FloatType::BF16), f(FloatType::BF16), false),
        ("cu-int4-sym", int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), true),
        ("cu-int4-zero", int(4, 64, ZeroKind::Code), f(FloatType::F16), false),
        ("cu-int4-min", int(4, 32, ZeroKind::Min), int(4, 32, ZeroKind::Min), true),
        ("cu-int4-channel", int(4, 96, ZeroKind::Mid), int(8, 128, ZeroKind::Code), false),
        ("cu-int8", int(8, 64, ZeroKind::Mid), int(8, 64, ZeroKind::Mid), true),
    ];
    let tokens = tokens(41);
    for (name, linear, embed, tied) in cases {
        let file = model(name, linear, embed, tied);
        let want = reference::forward::logits(&file, &tokens);
        let exact = run(&mut executor(&file, Form::F32, KvType::F32, 64), &tokens, &[41], 0);
        let d = deviation(&exact, &want);
        assert!(d < 2e-6, "{name}: exact mode is {d:.1e} of the range away");
        let default = run(&mut executor(&file, Form::F16, KvType::F16, 64), &tokens, &[41], 0);
        let d = deviation(&default, &want);
        assert!(d < 4e-3, "{name}: default mode is {d:.1e} of the range away");
        assert!(d > 1e-6, "{name}: default mode is exact ({d:.1e})");
        // int8: the CPU's bound; and where attention is f32, too, what the CPU computes but for a code that is
        // rounded otherwise.
        let int8 = |kv| run(&mut executor(&file, Form::Int8, kv, 64), &tokens, &[41], 0);
        let options = CpuOptions { threads: 1, blocks: 64, mode: Mode::Int8, kv: KvType::F32 };
        let cpu = run(&mut CpuExecutor::new(file.clone(), options).unwrap(), &tokens, &[41], 0);
        let (d, apart) = (deviation(&int8(KvType::F16), &want), deviation(&int8(KvType::F32), &cpu));
        println!("{name}: int8 mode is {d:.1e} of the range away, {apart:.1e} from the CPU's");
        assert!(d < 0.02 && apart < 3e-3, "{name}: int8 mode is {d:.1e} of the range away, {apart:.1e} from the CPU's");
    }
}

#[test]
fn every_mechanism_equals_the_oracle() {
    if device("every_mechanism_equals_the_oracle").is_none() {
        return;
    }
    let tokens = tokens(53);
    let f32s = Scheme::Float(FloatType::F32);
    for (name, linear, embed) in [("cu-all-f32", f32s, f32s), ("cu-all-int4", int(4, 32, ZeroKind::Code), f32s)] {
        let file = made(name, linear, embed, everything());
        let want = reference::forward::logits(&file, &tokens);
        let exact = run(&mut executor(&file, Form::F32, KvType::F32, 64), &tokens, &[53], 0);
        let d = deviation(&exact, &want);
        assert!(d < 4e-6, "{name}: exact mode is {d:.1e} of the range away");
        let default = run(&mut executor(&file, Form::F16, KvType::F16, 64), &tokens, &[53], 0);
        let d = deviation(&default, &want);
        assert!(d < 6e-3, "{name}: default mode is {d:.1e} of the range away");
        let int8 = run(&mut executor(&file, Form::Int8, KvType::F16, 64), &tokens, &[53], 0);
        let d = deviation(&int8, &want);
        assert!(d < 0.03, "{name}: int8 mode is {d:.1e} of the range away");
    }
}

/// The forms that round may pick another expert here and there; in the int8 form the CPU's are picked but for a code that
/// is rounded otherwise.
#[test]
fn mixtures_of_experts_equal_the_oracle() {
    if device("mixtures_of_experts_equal_the_oracle").is_none() {
        return;
    }
    let tokens = tokens(29);
    let f32s = Scheme::Float(FloatType::F32);
    for (name, linear) in [("cu-mix-f32", f32s), ("cu-mix-int4", int(4, 32, ZeroKind::Mid))] {
        let file = made(name, linear, f32s, mixtures());
        let want = reference::forward::logits(&file, &tokens);
        let exact = run(&mut executor(&file, Form::F32, KvType::F32, 64), &tokens, &[29], 0);
        let d = deviation(&exact, &want);
        assert!(d < 4e-6, "{name}: exact mode is {d:.1e} of the range away");
        let rows = |all: &[f32]| all.chunks(file.spec().vocab).map(<[f32]>::to_vec).collect::<Vec<_>>();
        let near = |got: &[f32], want: &[f32], bound: f32| {
            rows(got).iter().zip(&rows(want)).filter(|(got, want)| deviation(got, want) < bound).count()
        };
        let default = run(&mut executor(&file, Form::F16, KvType::F16, 64), &tokens, &[29], 0);
        let int8 = run(&mut executor(&file, Form::Int8, KvType::F32, 64), &tokens, &[29], 0);
        let options = CpuOptions { threads: 1, blocks: 64, mode: Mode::Int8, kv: KvType::F32 };
        let cpu = run(&mut CpuExecutor::new(file.clone(), options).unwrap(), &tokens, &[29], 0);
        let (default, int8) = (near(&default, &want, 8e-3), near(&int8, &cpu, 8e-3));
        println!("{name}: of 29 rows {default} are near the oracle, {int8} near the CPU");
        assert!(default >= 27 && int8 >= 27, "{name}: of 29 rows {default} are near the oracle, {int8} near the CPU");
    }
}

/// Alone, chunked, in a batch, cut into small passes, as a replayed graph: the same bits.
#[test]
fn logits_do_not_depend_on_the_company() {
    if device("logits_do_not_depend_on_the_company").is_none() {
        return;
    }
    let tokens = tokens(37);
    let (half, whole, bytes) = ((Form::F16, KvType::F16), (Form::F32, KvType::F32), (Form::F16, KvType::Int8));
    let (ints, small) = ((Form::Int8, KvType::F16), (Form::F16, KvType::Fp8));
    for (name, scheme, spec, forms) in [
        ("cu-inv4", int(4, 64, ZeroKind::Mid), plain(true), &[half, ints, small][..]),
        ("cu-inv8", int(8, 32, ZeroKind::Code), plain(true), &[half, ints]),
        ("cu-inv4-all", int(4, 32, ZeroKind::Min), everything(), &[half, bytes, whole, ints]),
        ("cu-invf-all", Scheme::Float(FloatType::F16), everything(), &[half]),
        ("cu-inv4-mix", int(4, 32, ZeroKind::Min), mixtures(), &[half, ints]),
    ] {
        let file = made(name, scheme, int(8, 32, ZeroKind::Mid), spec);
        for &(form, kv) in forms {
            // One token at a time: every step but the first of a shape is a replayed graph.
            let want = run(&mut executor(&file, form, kv, 64), &tokens, &[1], 0);
            assert!(want.iter().all(|x| x.is_finite()), "{name}");
            for (rows, sizes, others) in [(128, &[37][..], 3), (16, &[37], 0), (64, &[1], 5), (64, &[17, 7, 1], 1)] {
                let got = run(&mut executor(&file, form, kv, rows), &tokens, sizes, others);
                let same = got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(
                    same,
                    "{name} {form:?}: passes of {rows}, chunks {sizes:?}, {others} others: {:e}",
                    deviation(&got, &want)
                );
            }
        }
    }
}

#[test]
fn tokens_are_those_of_the_logits() {
    if device("tokens_are_those_of_the_logits").is_none() {
        return;
    }
    let file = model("cu-sample", int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), true);
    let mut executor = executor(&file, Form::F16, KvType::F16, 64);
    let tokens = tokens(20);
    let logits = run(&mut executor, &tokens, &[20], 0);
    let vocab = file.spec().vocab;
    let greedy = SamplingParams::greedy();
    let drawn = SamplingParams { temperature: 0.9, top_p: 0.95, seed: 7, ..SamplingParams::default() };
    for (params, logprobs) in [(&greedy, None), (&greedy, Some(2)), (&drawn, None), (&drawn, Some(3))] {
        let output = Output::Tokens { from: 0, params, history: &tokens, prompt_len: 20, logprobs, allowed: None };
        let plan =
            Plan { chunks: vec![Chunk { tokens: &tokens, start: 0, blocks: &[1, 0], mask: Mask::Causal, output }] };
        let ticket = executor.submit(&plan).unwrap();
        let Some(ChunkOutput::Tokens(got)) = executor.collect(ticket).unwrap().pop() else { panic!("no tokens") };
        for (i, got) in got.iter().enumerate() {
            let mut row = logits[i * vocab..(i + 1) * vocab].to_vec();
            let history = History { tokens: &tokens[..i + 1], prompt_len: 20 };
            let want = sample(&mut row, params, history, i as u64 + 1, logprobs).unwrap();
            assert_eq!(*got, Ok(want), "row {i}, {params:?}");
        }
    }
}

#[test]
fn a_damaged_model_is_an_error_of_its_row_alone() {
    if device("a_damaged_model_is_an_error_of_its_row_alone").is_none() {
        return;
    }
    let file = model("nan", int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), true);
    let mut executor = executor(&file, Form::F16, KvType::F16, 8);
    let params = SamplingParams::greedy();
    let output =
        Output::Tokens { from: 0, params: &params, history: &[5], prompt_len: 1, logprobs: None, allowed: None };
    let ticket = executor
        .submit(&Plan { chunks: vec![Chunk { tokens: &[5], start: 0, blocks: &[0], mask: Mask::Causal, output }] })
        .unwrap();
    match executor.collect(ticket).unwrap().pop() {
        Some(ChunkOutput::Tokens(got)) => {
            let vocab = file.spec().vocab;
            assert_eq!(got, [Err(SampleError::NothingToChoose { vocab, nans: vocab })]);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn blocks_can_be_copied_read_and_written() {
    if device("blocks_can_be_copied_read_and_written").is_none() {
        return;
    }
    let file = model("cu-blocks", int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), true);
    let tokens = tokens(20);
    for kv in [KvType::F16, KvType::F32, KvType::Int8, KvType::Fp8] {
        let mut executor = executor(&file, Form::F16, kv, 32);
        let last = |executor: &mut CudaExecutor, start: usize, blocks: &[u32]| {
            let output = Output::Logits { from: 0 };
            let chunk = Chunk { tokens: &tokens[start..], start, blocks, mask: Mask::Causal, output };
            let ticket = executor.submit(&Plan { chunks: vec![chunk] }).unwrap();
            match executor.collect(ticket).unwrap().pop() {
                Some(ChunkOutput::Logits(logits)) => logits[logits.len() - file.spec().vocab..].to_vec(),
                other => panic!("{other:?}"),
            }
        };
        let want = last(&mut executor, 0, &[3, 4]);
        executor.copy_block(3, 7).unwrap();
        let mut bytes = vec![0; executor.block_bytes()];
        executor.read_block(3, &mut bytes).unwrap();
        executor.write_block(9, &bytes).unwrap();
        executor.write_block(3, &vec![0; bytes.len()]).unwrap();
        assert_eq!(last(&mut executor, 16, &[7, 5]), want, "{kv:?}: a copied block");
        assert_eq!(last(&mut executor, 16, &[9, 6]), want, "{kv:?}: a written block");
        assert_ne!(last(&mut executor, 16, &[3, 6]), want, "{kv:?}: an emptied block");
    }
}

#[test]
fn what_cannot_be_is_refused() {
    if device("what_cannot_be_is_refused").is_none() {
        return;
    }
    let file = model("cu-refused", int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), true);
    let options = CudaOptions { ordinal: 9, blocks: 4, form: Form::F16, kv: KvType::F16, rows: 8, tree_blocks: 0 };
    let error = CudaExecutor::new(file.clone(), options, Box::new(|_| {})).err().unwrap().to_string();
    assert!(error.contains("there is no device cuda:9: expected a number below 1"), "{error}");
    let options = CudaOptions { ordinal: 0, blocks: 1 << 40, ..options };
    let error = CudaExecutor::new(file.clone(), options, Box::new(|_| {})).err().unwrap().to_string();
    assert!(error.starts_with("the model needs ") && error.contains("use a smaller context"), "{error}");
    let mut executor = executor(&file, Form::F16, KvType::F16, 8);
    let chunk = Chunk { tokens: &[1], start: 0, blocks: &[64], mask: Mask::Causal, output: Output::None };
    let error = executor.submit(&Plan { chunks: vec![chunk] }).unwrap_err();
    assert!(matches!(error, ExecError::Plan { what: "block", .. }), "{error}");
}

/// Trees and chains are verified exactly, in every form, whatever else is in the step.
#[test]
fn rows_of_trees_are_ends_of_their_paths() {
    if device("rows_of_trees_are_ends_of_their_paths").is_none() {
        return;
    }
    let (half, whole, bytes) = ((Form::F16, KvType::F16), (Form::F32, KvType::F32), (Form::F16, KvType::Int8));
    let ints = (Form::Int8, KvType::F16);
    for (name, spec, forms) in
        [("cu-trees", plain(true), &[half, bytes][..]), ("cu-trees-all", everything(), &[half, whole, bytes, ints])]
    {
        let file = made(name, int(4, 32, ZeroKind::Code), int(8, 32, ZeroKind::Mid), spec);
        for (i, &(form, kv)) in forms.iter().enumerate() {
            let mut executor = executor(&file, form, kv, 96);
            let what = format!("{name} {form:?} {kv:?}");
            let sizes = [(0, 1), (13, 9), (30, 4), (7, 40)];
            let sizes = &sizes[..if i == 0 { 4 } else { 3 }];
            trees::trees_are_their_paths(&mut executor, 290, sizes, 3, &what);
            trees::chains_are_plain(&mut executor, 290, &[(0, 5), (13, 20)], &what);
        }
    }
}

/// A block whose rows see each other, against the oracle.
#[test]
fn full_blocks_equal_the_oracle() {
    if device("full_blocks_equal_the_oracle").is_none() {
        return;
    }
    let f32s = Scheme::Float(FloatType::F32);
    let file = made("cu-full", f32s, f32s, everything());
    for (start, rows) in [(0, 3), (20, 16), (7, 40)] {
        let tokens = tokens(start + rows);
        let want = reference::forward::masked(&file, &tokens, start, Mask::Full);
        for (form, kv, bound) in [(Form::F32, KvType::F32, 4e-6), (Form::F16, KvType::F16, 6e-3)] {
            let got = trees::full_block(&mut executor(&file, form, kv, 64), &tokens, start);
            let d = deviation(&got, &want);
            assert!(d < bound, "{form:?}, {rows} rows at {start}: {d:.1e} of the range away");
        }
    }
}

#[test]
fn wrong_masks_and_moves_are_refused() {
    if device("wrong_masks_and_moves_are_refused").is_none() {
        return;
    }
    let file = model("cu-masked", int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), true);
    trees::wrong_masks_are_refused(&mut executor(&file, Form::F16, KvType::F16, 96));
    let options = CudaOptions { ordinal: 0, blocks: 64, form: Form::F16, kv: KvType::F16, rows: 4, tree_blocks: 1 };
    let mut executor = CudaExecutor::new(file, options, Box::new(|_| {})).unwrap();
    let mut submit = |rows: usize, mask| {
        let tokens = vec![1; rows];
        let chunk = Chunk { tokens: &tokens, start: 3, blocks: &[0, 1], mask, output: Output::None };
        executor.submit(&Plan { chunks: vec![chunk] }).map_err(|e| e.to_string())
    };
    // One sibling lies in its own block, two do not; a chain needs none.
    submit(3, Mask::Tree(&[1, 3, 5])).unwrap();
    submit(4, Mask::Tree(&[1, 3, 7, 15])).unwrap();
    submit(4, Mask::Full).unwrap();
    let error = submit(4, Mask::Tree(&[1, 3, 5, 9])).unwrap_err();
    assert!(error.contains("(tree_blocks of the options): expected at most 1, got 2"), "{error}");
    let error = submit(5, Mask::Full).unwrap_err();
    assert!(error.contains("rows of a chunk with a mask, as a step has: expected at most 4, got 5"), "{error}");
}
