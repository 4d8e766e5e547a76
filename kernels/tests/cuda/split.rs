//! Layers on the CPU and on the virtual GPU: against the oracle, against each alone, and in other company.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use quern_kernels::{
    cpu::kv::KvType,
    exec::{
        self, Activations, Chunk, ChunkOutput, Device, ExecError, ExecOptions, Executor, Mask, NO_BLOCK, Output, Plan,
    },
    reference,
    sample::{History, SamplingParams, sample},
};
use quern_models::{FloatType, ModelFile, Scheme, ZeroKind};

use crate::{
    common::device,
    support::{deviation, everything, int, made, model, plain, run, tokens, trees},
};

const EXACT: (Option<Activations>, KvType) = (Some(Activations::F32), KvType::F32);
const USUAL: (Option<Activations>, KvType) = (None, KvType::F16);

fn options(gpu_layers: Option<usize>, (activations, kv): (Option<Activations>, KvType), rows: usize) -> ExecOptions {
    ExecOptions { device: Device::Cuda(0), threads: 2, blocks: 64, activations, kv, rows, tree_blocks: 64, gpu_layers }
}

fn executor(file: &Arc<ModelFile>, n: usize, mode: (Option<Activations>, KvType), rows: usize) -> Box<dyn Executor> {
    exec::open(file.clone(), options(Some(n), mode, rows), |_| {}).unwrap()
}

/// None, one, all but one, all.
fn counts(file: &ModelFile) -> Vec<usize> {
    let layers = file.spec().layers.len();
    let mut counts = vec![0, 1, layers - 1, layers];
    counts.dedup();
    counts
}

fn same(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

#[test]
fn any_number_of_layers_equals_the_oracle() {
    if device("any_number_of_layers_equals_the_oracle").is_none() {
        return;
    }
    let (f, tokens) = (Scheme::Float, tokens(41));
    let cases = [
        ("sp-f32", f(FloatType::F32), f(FloatType::F16), plain(true), 2e-6),
        ("sp-int4", int(4, 64, ZeroKind::Code), f(FloatType::F16), plain(false), 2e-6),
        ("sp-int8", int(8, 64, ZeroKind::Mid), int(8, 64, ZeroKind::Mid), plain(true), 2e-6),
        ("sp-all", int(4, 32, ZeroKind::Min), f(FloatType::F32), everything(), 4e-6),
    ];
    for (name, linear, embed, spec, bound) in cases {
        let file = made(name, linear, embed, spec);
        let want = reference::forward::logits(&file, &tokens);
        let mut all = vec![];
        for n in counts(&file) {
            let exact = run(&mut *executor(&file, n, EXACT, 64), &tokens, &[41], 0);
            let d = deviation(&exact, &want);
            assert!(d < bound, "{name}: exact mode with {n} layers is {d:.1e} of the range away");
            let usual = run(&mut *executor(&file, n, USUAL, 64), &tokens, &[41], 0);
            let d = deviation(&usual, &want);
            assert!(d < 0.03, "{name}: default mode with {n} layers is {d:.1e} of the range away");
            assert!(d > 1e-6, "{name}: default mode with {n} layers is exact ({d:.1e})");
            all.push(usual);
        }
        // Each number of layers computes in a way of its own.
        let differ = (1..all.len()).all(|i| !all[..i].iter().any(|other| same(other, &all[i])));
        assert!(differ, "{name}");
    }
}

#[test]
fn none_is_the_cpu_and_all_is_the_gpu() {
    if device("none_is_the_cpu_and_all_is_the_gpu").is_none() {
        return;
    }
    let (file, tokens) =
        (made("sp-ends", int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), everything()), tokens(20));
    let layers = file.spec().layers.len();
    for mode in [EXACT, USUAL] {
        let open = |options| exec::open(file.clone(), options, |_| {}).unwrap();
        let mut cpu = open(ExecOptions { device: Device::Cpu, ..options(None, mode, 64) });
        let mut gpu = open(options(None, mode, 64));
        for (n, whole) in [(0, &mut cpu), (layers, &mut gpu)] {
            let mut executor = executor(&file, n, mode, 64);
            assert_eq!(executor.describe(), whole.describe());
            assert_eq!(executor.block_bytes(), whole.block_bytes());
            let [got, want] = [&mut executor, whole].map(|e| run(&mut **e, &tokens, &[20], 0));
            assert!(same(&got, &want), "{n} layers, {mode:?}");
        }
    }
    let split = executor(&file, 1, USUAL, 64).describe();
    assert!(split.starts_with("last 1 layer: f16 activations, f16 KV, cuda:0 "), "{split}");
    assert!(
        split.contains("; first 3 layers: int8 activations, f16 KV, ") && split.ends_with(", 2 threads"),
        "{split}"
    );
}

/// Alone, chunked, in a batch, cut into small passes, as a replayed graph: the same bits.
#[test]
fn logits_of_two_devices_do_not_depend_on_the_company() {
    if device("logits_of_two_devices_do_not_depend_on_the_company").is_none() {
        return;
    }
    let tokens = tokens(37);
    let bytes = (None, KvType::Int8);
    for (name, scheme, spec, modes) in [
        ("sp-inv4", int(4, 64, ZeroKind::Mid), plain(true), &[USUAL, bytes, EXACT][..]),
        ("sp-inv-all", int(4, 32, ZeroKind::Min), everything(), &[USUAL]),
    ] {
        let file = made(name, scheme, int(8, 32, ZeroKind::Mid), spec);
        for &mode in modes {
            for n in counts(&file).into_iter().filter(|&n| 0 < n && n < file.spec().layers.len()) {
                let want = run(&mut *executor(&file, n, mode, 64), &tokens, &[1], 0);
                assert!(want.iter().all(|x| x.is_finite()), "{name}");
                for (rows, sizes, others) in [(128, &[37][..], 3), (16, &[37], 0), (64, &[1], 5), (64, &[17, 7, 1], 1)]
                {
                    let got = run(&mut *executor(&file, n, mode, rows), &tokens, sizes, others);
                    let far = deviation(&got, &want);
                    assert!(
                        same(&got, &want),
                        "{name} {mode:?}, {n} layers: {rows} rows, {sizes:?}, {others}: {far:e}"
                    );
                }
            }
        }
    }
}

#[test]
fn tokens_of_two_devices_are_those_of_the_logits() {
    if device("tokens_of_two_devices_are_those_of_the_logits").is_none() {
        return;
    }
    let file = model("sp-sample", int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), false);
    // Passes of 8 rows: a chunk's tokens come from several, and a step has rows that are only computed.
    let mut executor = executor(&file, 1, USUAL, 8);
    let (tokens, vocab) = (tokens(20), file.spec().vocab);
    let logits = run(&mut *executor, &tokens, &[20], 0);
    let greedy = SamplingParams::greedy();
    let drawn = SamplingParams { temperature: 0.9, top_p: 0.95, seed: 7, ..SamplingParams::default() };
    for (params, logprobs) in [(&greedy, None), (&drawn, None), (&drawn, Some(3))] {
        let output = Output::Tokens { from: 3, params, history: &tokens, prompt_len: 20, logprobs, allowed: None };
        let hidden = Chunk {
            tokens: &tokens[..11],
            start: 0,
            blocks: &[5],
            mask: Mask::Causal,
            output: Output::Hidden { from: 9 },
        };
        let plan = Plan {
            chunks: vec![hidden, Chunk { tokens: &tokens, start: 0, blocks: &[1, 0], mask: Mask::Causal, output }],
        };
        let ticket = executor.submit(&plan).unwrap();
        let outputs = executor.collect(ticket).unwrap();
        let [ChunkOutput::Hidden(states), ChunkOutput::Tokens(got)] = &outputs[..] else { panic!("{outputs:?}") };
        assert_eq!((states.len(), got.len()), (2 * file.spec().hidden, 17));
        for (i, got) in got.iter().enumerate() {
            let mut row = logits[(3 + i) * vocab..(4 + i) * vocab].to_vec();
            let history = History { tokens: &tokens[..i + 4], prompt_len: 20 };
            let want = sample(&mut row, params, history, i as u64 + 4, logprobs).unwrap();
            assert_eq!(*got, Ok(want), "row {i}, {params:?}");
        }
    }
    let empty = executor.submit(&Plan::default()).unwrap();
    assert!(executor.collect(empty).unwrap().is_empty());
}

#[test]
fn blocks_of_two_devices_can_be_copied_read_and_written() {
    if device("blocks_of_two_devices_can_be_copied_read_and_written").is_none() {
        return;
    }
    let file = made("sp-blocks", int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), {
        let mut spec = everything();
        spec.layers.truncate(3);
        spec
    });
    let (tokens, vocab) = (tokens(20), file.spec().vocab);
    for (n, kv) in [(1, KvType::F16), (2, KvType::F32), (1, KvType::Int8), (2, KvType::Int8)] {
        let mut executor = executor(&file, n, (None, kv), 64);
        let last = |executor: &mut dyn Executor, start: usize, blocks: &[u32]| {
            let chunk = Chunk {
                tokens: &tokens[start..],
                start,
                blocks,
                mask: Mask::Causal,
                output: Output::Logits { from: 0 },
            };
            let ticket = executor.submit(&Plan { chunks: vec![chunk] }).unwrap();
            match executor.collect(ticket).unwrap().pop() {
                Some(ChunkOutput::Logits(logits)) => logits[logits.len() - vocab..].to_vec(),
                other => panic!("{other:?}"),
            }
        };
        let want = last(&mut *executor, 0, &[3, 4]);
        executor.copy_block(3, 7).unwrap();
        let mut bytes = vec![0; executor.block_bytes()];
        assert_eq!(bytes.len(), exec::block_bytes(file.spec(), kv));
        executor.read_block(3, &mut bytes).unwrap();
        executor.write_block(9, &bytes).unwrap();
        let each = bytes.len() / 3;
        // Either side's part alone is not enough.
        for (block, emptied) in [(10, 0..(3 - n) * each), (11, (3 - n) * each..bytes.len())] {
            let mut half = bytes.clone();
            half[emptied].fill(0);
            executor.write_block(block, &half).unwrap();
            assert_ne!(last(&mut *executor, 16, &[block, 6]), want, "{n} layers, {kv:?}: a half-empty block");
        }
        let mut again = vec![1; bytes.len()];
        executor.read_block(9, &mut again).unwrap();
        assert_eq!(again, bytes);
        executor.write_block(3, &vec![0; bytes.len()]).unwrap();
        assert_eq!(last(&mut *executor, 16, &[7, 5]), want, "{n} layers, {kv:?}: a copied block");
        assert_eq!(last(&mut *executor, 16, &[9, 6]), want, "{n} layers, {kv:?}: a written block");
        assert_ne!(last(&mut *executor, 16, &[3, 6]), want, "{n} layers, {kv:?}: an emptied block");
    }
}

/// Trees, on both sides at once.
#[test]
fn rows_of_trees_are_ends_of_their_paths() {
    if device("rows_of_trees_are_ends_of_their_paths").is_none() {
        return;
    }
    let file = made("sp-trees", int(4, 32, ZeroKind::Code), int(8, 32, ZeroKind::Mid), everything());
    for mode in [USUAL, (Some(Activations::Int8), KvType::Int8)] {
        let mut executor = executor(&file, 2, mode, 32);
        trees::trees_are_their_paths(&mut *executor, 290, &[(0, 6), (13, 20)], 3, "two of four layers");
        trees::chains_are_plain(&mut *executor, 290, &[(13, 20)], "two of four layers");
        trees::wrong_masks_are_refused(&mut *executor);
    }
}

/// A block that no layer sees any more may be gone, whichever side a layer is on.
#[test]
fn blocks_behind_every_window_are_not_needed() {
    if device("blocks_behind_every_window_are_not_needed").is_none() {
        return;
    }
    let mut spec = everything();
    spec.layers.truncate(2);
    let file = made("sp-window", int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), spec);
    let tokens = tokens(70);
    let mut executor = executor(&file, 1, USUAL, 64);
    let mut last = |blocks: &[u32]| {
        let chunk =
            Chunk { tokens: &tokens[69..], start: 69, blocks, mask: Mask::Causal, output: Output::Logits { from: 0 } };
        let ticket = executor.submit(&Plan { chunks: vec![chunk] }).unwrap();
        match executor.collect(ticket).unwrap().pop() {
            Some(ChunkOutput::Logits(logits)) => logits,
            other => panic!("{other:?}"),
        }
    };
    let (whole, cut) = (last(&[2, 4, 6, 8, 9]), last(&[NO_BLOCK, 4, 6, 8, 9]));
    assert!(same(&whole, &cut));
}

#[test]
fn what_cannot_be_split_is_refused() {
    if device("what_cannot_be_split_is_refused").is_none() {
        return;
    }
    let file = model("sp-refused", int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), true);
    let error = |options| exec::open(file.clone(), options, |_| {}).err().unwrap();
    let many = error(options(Some(3), USUAL, 8));
    assert!(matches!(many, ExecError::GpuLayers { asked: 3, most: 2 }), "{many}");
    assert!(many.to_string().starts_with("--gpu-layers 3: expected at most 2, the layers of this model"), "{many}");
    let cpu = error(ExecOptions { device: Device::Cpu, ..options(Some(1), USUAL, 8) }).to_string();
    assert!(cpu.contains("--gpu-layers 1: expected at most 0, as there is no GPU on --device cpu"), "{cpu}");
    let half = error(options(Some(1), (Some(Activations::F16), KvType::F16), 8)).to_string();
    assert!(half.contains("cuda:0 with the first layers on the CPU has no f16 activations"), "{half}");
    let mut executor = executor(&file, 1, USUAL, 8);
    let chunk = Chunk { tokens: &[1], start: 0, blocks: &[64], mask: Mask::Causal, output: Output::None };
    let error = executor.submit(&Plan { chunks: vec![chunk] }).unwrap_err();
    assert!(matches!(error, ExecError::Plan { what: "block", .. }), "{error}");
}

/// What is planned for each side is what is there; and as many layers as would fit are named.
#[test]
fn memory_is_counted_on_both_sides() {
    if device("memory_is_counted_on_both_sides").is_none() {
        return;
    }
    for tied in [true, false] {
        let name = if tied { "sp-memory-tied" } else { "sp-memory" };
        let file = model(name, int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), tied);
        let memory = |n, blocks| exec::device_memory(&file, &ExecOptions { blocks, ..options(Some(n), USUAL, 8) });
        assert_eq!(memory(0, 8), None);
        assert_eq!(memory(3, 8), None);
        let (whole, half) = (memory(2, 8).unwrap(), memory(1, 8).unwrap());
        let (host, bytes) = (half.host.unwrap(), |name: &str| file.tensors()[file.index(name).unwrap()].len);
        assert_eq!(whole.host, None);
        assert_eq!((whole.block, half.block, host.block), (2 * half.block, half.block, half.block));
        let tensors = |prefix| file.tensors().iter().filter(move |t| t.name.starts_with(prefix));
        assert_eq!(host.weights, tensors("layers.0.").map(|t| t.len).sum::<u64>() + bytes("embed"));
        // A head that is the embedding is on both sides.
        let matrices: u64 = tensors("layers.1.").filter(|t| t.dims.len() == 2).map(|t| t.len).sum();
        let head = bytes(if tied { "embed" } else { "head" });
        assert!(half.weights >= matrices + head && half.weights < matrices + head + 4096, "{half:?}");
        assert!(whole.scratch > half.scratch, "{whole:?} {half:?}");
        // A cache of three halves of the free memory: that of one layer fits.
        let blocks = (whole.free.unwrap() / 4 * 3 / half.block) as usize;
        assert_eq!(memory(2, blocks).unwrap().layers, Some(1));
        assert_eq!(memory(1, 4 * blocks).unwrap().layers, None);
        assert_eq!(memory(1, 8).unwrap().layers, None);
    }
}
