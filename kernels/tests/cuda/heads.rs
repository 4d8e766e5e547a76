//! Heads on the virtual GPU: against the oracle and the CPU, against themselves in other company, and what is refused.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use quern_kernels::{
    cpu::{acts::Mode, kv::KvType},
    cuda::{
        CudaExecutor, CudaOptions,
        acts::Form,
        heads::{Half, HeadOps, Join},
        ops::{self, NormKind, Ops},
    },
    exec::{
        Chunk, ChunkOutput, CpuExecutor, CpuOptions, Device, ExecError, ExecOptions, Executor, Fed, HeadExecutor, Mask,
        Output, Plan, open,
    },
    reference::{
        head::{State, block, guesses},
        ops as oracle,
    },
    sample::{History, SampleError, Sampled, SamplingParams, sample_allowed},
};
use quern_models::{FloatType, ModelFile, Scheme, ZeroKind};

use crate::{
    common::{Random, acts, bits, bound, close, device, read_acts, up},
    support::{
        block_head, deviation,
        guessing::{TEXT, block_of, medusa_rows, of_own, run, states, tree_and_paths},
        heads, int, made, plain, tokens,
    },
};

fn options(form: Form, kv: KvType, rows: usize) -> CudaOptions {
    CudaOptions { ordinal: 0, blocks: 64, form, kv, rows, tree_blocks: 0 }
}

fn executor(file: &Arc<ModelFile>, form: Form, kv: KvType, rows: usize) -> CudaExecutor {
    CudaExecutor::new(file.clone(), options(form, kv, rows), Box::new(|_| {})).unwrap()
}

fn is_medusa(file: &ModelFile) -> bool {
    file.spec().layers.is_empty()
}

/// Every kind of head, which shares and which does not, with every form: logits, and the states that it reads.
#[test]
fn heads_on_the_gpu_equal_the_oracle() {
    if device("heads_on_the_gpu_equal_the_oracle").is_none() {
        return;
    }
    let f = |t| Scheme::Float(t);
    let schemes = [("cu-bf16", f(FloatType::BF16), false), ("cu-int4", int(4, 32, ZeroKind::Code), true)];
    let forms = [
        (Form::F32, KvType::F32, Mode::F32, 4e-6),
        (Form::F16, KvType::F16, Mode::F32, 8e-3),
        (Form::Int8, KvType::F16, Mode::Int8, 0.03),
    ];
    let text = tokens(TEXT);
    for (name, scheme, tied) in schemes {
        let model = made(&format!("of-{name}"), scheme, int(8, 32, ZeroKind::Mid), plain(tied));
        for (kind, spec) in heads() {
            let (vocab, width) = (spec.vocab, spec.draft_head.as_ref().unwrap().width());
            let file = made(&format!("{kind}-{name}"), scheme, f(FloatType::F16), spec);
            let medusa = is_medusa(&file);
            for (form, kv, mode, bound) in forms {
                let mut executor = executor(&model, form, kv, 64);
                let mut head = executor.head(file.clone()).unwrap();
                let states = states(&mut executor, &text, 7);
                assert_eq!(states.len(), TEXT * width);
                let cpu = CpuOptions { threads: 1, blocks: 64, mode, kv };
                let mut cpu = CpuExecutor::new(model.clone(), cpu).unwrap();
                let _ = cpu.head(file.clone()).unwrap();
                let d = deviation(&states, &self::states(&mut cpu, &text, TEXT));
                assert!(d < bound, "{kind}, {name}, {form:?}: states are {d:.1e} of their range from the CPU's");
                let all = if medusa { &text[..TEXT - 3] } else { &text[..] };
                let row = |p: usize| match p < TEXT - 4 {
                    true => (all[p + 1], State::Model(states[p * width..(p + 1) * width].to_vec())),
                    false => (all[p + 1], State::Own),
                };
                let rows: Vec<(u32, State)> = (0..all.len() - 1).map(row).collect();
                let want = guesses(&file, &model, &rows);
                let got = match medusa {
                    true => medusa_rows(&mut *head, &text, &states, width),
                    false => run(&mut *head, &text, &states, width, &[TEXT], 0),
                };
                let d = deviation(&of_own(&got, vocab, 290), &want);
                assert!(d < bound, "{kind}, {name}, {form:?}: {d:.1e} of the range away");
                assert!(form != Form::F16 || d > 1e-7, "{kind}, {name}, {form:?} is exact ({d:.1e})");
            }
        }
    }
}

/// Alone, chunked, in a batch, cut into small passes, as a replayed graph: the same bits, of the model's states too.
#[test]
fn rows_of_heads_do_not_depend_on_the_company() {
    if device("rows_of_heads_do_not_depend_on_the_company").is_none() {
        return;
    }
    let text = tokens(TEXT);
    let model = made("cu-company", int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), plain(true));
    for (kind, spec) in heads() {
        let width = spec.draft_head.as_ref().unwrap().width();
        let file = made(&format!("cu-company-{kind}"), int(4, 32, ZeroKind::Code), int(8, 32, ZeroKind::Mid), spec);
        for (form, kv) in [(Form::F16, KvType::F16), (Form::F32, KvType::Int8), (Form::Int8, KvType::F16)] {
            let run = |rows, of: usize, sizes: &[usize], others| {
                let mut executor = executor(&model, form, kv, rows);
                // What was recorded before there is a head keeps no states.
                for (start, token) in text[..2].chunks(1).enumerate() {
                    let chunk = Chunk {
                        tokens: token,
                        start,
                        blocks: &[3],
                        mask: Mask::Causal,
                        output: Output::Logits { from: 0 },
                    };
                    let ticket = executor.submit(&Plan { chunks: vec![chunk] }).unwrap();
                    executor.collect(ticket).unwrap();
                    assert!(executor.states().unwrap().is_empty());
                }
                let mut head = executor.head(file.clone()).unwrap();
                let states = states(&mut executor, &text, of);
                let logits = match is_medusa(&file) {
                    true => medusa_rows(&mut *head, &text, &states, width),
                    false => run(&mut *head, &text, &states, width, sizes, others),
                };
                (states, logits)
            };
            let (of_model, want) = run(64, 1, &[1], 0);
            for (rows, of, sizes, others) in [(64, TEXT, &[TEXT][..], 0), (4, 16, &[9], 1), (16, 5, &[3, 1, 8], 3)] {
                let (states, logits) = run(rows, of, sizes, others);
                let what = format!("{kind} {form:?}: passes of {rows}, {sizes:?}, {others} others");
                assert!(bits(&states) == bits(&of_model), "{what}: states");
                assert!(bits(&logits) == bits(&want), "{what}: {:e}", deviation(&logits, &want));
            }
        }
    }
}

/// Tokens are those that the plain sampler takes from the logits, at the position behind the next.
#[test]
fn tokens_of_heads_are_those_of_the_plain_sampler() {
    if device("tokens_of_heads_are_those_of_the_plain_sampler").is_none() {
        return;
    }
    let text = tokens(TEXT);
    let model = made("cu-tokens", int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), plain(true));
    let warm = SamplingParams { temperature: 1.5, seed: 7, ..SamplingParams::greedy() };
    let careful = SamplingParams { frequency_penalty: 1.0, top_k: 20, temperature: 2.0, seed: 3, ..warm.clone() };
    let greedy = SamplingParams::greedy();
    // A bias that is given twice is for the host.
    let hosted = SamplingParams { logit_bias: vec![(4, 2.0), (4, 2.0)], ..warm.clone() };
    for (kind, spec) in heads() {
        let width = spec.draft_head.as_ref().unwrap().width();
        let file = made(&format!("cu-tokens-{kind}"), int(4, 32, ZeroKind::Code), int(8, 32, ZeroKind::Mid), spec);
        let medusa = is_medusa(&file);
        let mut executor = executor(&model, Form::F16, KvType::F16, 64);
        let mut head = executor.head(file).unwrap();
        let states = states(&mut executor, &text, TEXT);
        // One chunk each for how it is chosen: some by the device and some by the host, in one step.
        let cases = [&greedy, &warm, &careful, &hosted, &greedy];
        let tables: Vec<[u32; 1]> = (0..cases.len() as u32).map(|i| [9 + i]).collect();
        let mut ask = |outputs: Vec<Output>| {
            let chunk = |(blocks, output)| Chunk { tokens: &text[1..12], start: 0, blocks, mask: Mask::Causal, output };
            let chunks = tables.iter().map(|t| &t[..]).zip(outputs).map(chunk).collect();
            let fed = Fed::Model(vec![&states[..11 * width]; cases.len()]);
            head.guess(&Plan { chunks }, &fed).unwrap()
        };
        let (history, prompt_len) = (&text[..12], 5);
        let logits = ask(cases.iter().map(|_| Output::Logits { from: 10 }).collect());
        let output = |&params| Output::Tokens { from: 10, params, history, prompt_len, logprobs: None, allowed: None };
        let tokens = ask(cases.iter().map(output).collect());
        for ((params, logits), tokens) in cases.iter().zip(logits).zip(tokens) {
            let (ChunkOutput::Logits(mut logits), ChunkOutput::Tokens(got)) = (logits, tokens) else { panic!() };
            let history = History { tokens: history, prompt_len };
            let rows = logits.chunks_exact_mut(290).enumerate();
            let want: Vec<Result<Sampled, SampleError>> =
                rows.map(|(i, row)| sample_allowed(row, params, history, 12 + i as u64, None, None)).collect();
            assert_eq!((got.len(), got), (if medusa { 3 } else { 1 }, want), "{kind} {params:?}");
        }
    }
}

/// A pass may have more chunks than logits fit: every chunk gets what it gets alone.
#[test]
fn many_sequences_guess_at_once() {
    if device("many_sequences_guess_at_once").is_none() {
        return;
    }
    let text = tokens(TEXT);
    let model = made("cu-many", int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), plain(true));
    for (kind, spec) in heads().into_iter().filter(|(kind, _)| ["eagle3", "medusa"].contains(kind)) {
        let width = spec.draft_head.as_ref().unwrap().width();
        let file = made(&format!("cu-many-{kind}"), int(4, 32, ZeroKind::Code), int(8, 32, ZeroKind::Mid), spec);
        let options = CudaOptions { blocks: 80, ..options(Form::F16, KvType::F16, 128) };
        let mut executor = CudaExecutor::new(model.clone(), options, Box::new(|_| {})).unwrap();
        let mut head = executor.head(file).unwrap();
        let states = states(&mut executor, &text, TEXT);
        let params = SamplingParams::greedy();
        let mut ask = |sequences: std::ops::Range<usize>| {
            let tables: Vec<[u32; 1]> = sequences.clone().map(|s| [s as u32]).collect();
            let chunk = |s: usize| Chunk {
                tokens: &text[s % 20 + 1..s % 20 + 2],
                start: 0,
                blocks: &tables[s - sequences.start],
                mask: Mask::Causal,
                output: Output::Tokens {
                    from: 0,
                    params: &params,
                    history: &text[s % 20..s % 20 + 2],
                    prompt_len: 1,
                    logprobs: None,
                    allowed: None,
                },
            };
            let chunks = sequences.clone().map(chunk).collect();
            let fed = sequences.clone().map(|s| &states[s % 20 * width..(s % 20 + 1) * width]).collect();
            let got = head.guess(&Plan { chunks }, &Fed::Model(fed)).unwrap();
            let tokens = |output| match output {
                ChunkOutput::Tokens(tokens) => tokens.into_iter().map(|t| t.unwrap().token).collect::<Vec<u32>>(),
                other => panic!("{other:?}"),
            };
            got.into_iter().map(tokens).collect::<Vec<_>>()
        };
        let all = ask(0..75);
        let each = if kind == "medusa" { 3 } else { 1 };
        assert!(all.iter().all(|t| t.len() == each), "{kind}");
        for s in [0, 19, 63, 64, 74] {
            assert_eq!(ask(s..s + 1)[0], all[s], "{kind}: sequence {s}");
        }
        assert!(all.iter().any(|t| t != &all[0]), "{kind}: all the same");
    }
}

/// A row of a tree of guesses has the bits of the chain that is its path; without room for its branches it is refused.
#[test]
fn rows_of_trees_of_heads_are_those_of_their_paths() {
    if device("rows_of_trees_of_heads_are_those_of_their_paths").is_none() {
        return;
    }
    let text = tokens(TEXT);
    let model = made("cu-trees", int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), plain(true));
    for (kind, spec) in heads().into_iter().filter(|(_, spec)| !spec.layers.is_empty()) {
        let width = spec.draft_head.as_ref().unwrap().width();
        let file = made(&format!("cu-trees-{kind}"), int(4, 32, ZeroKind::Code), int(8, 32, ZeroKind::Mid), spec);
        for (form, kv) in [(Form::F16, KvType::F16), (Form::F32, KvType::Int8), (Form::Int8, KvType::F16)] {
            let options = CudaOptions { tree_blocks: 8, ..options(form, kv, 64) };
            let mut executor = CudaExecutor::new(model.clone(), options, Box::new(|_| {})).unwrap();
            assert_eq!(executor.tree_leaves(), 5);
            let mut head = executor.head(file.clone()).unwrap();
            assert_eq!(head.tree_leaves(), 4);
            let states = states(&mut executor, &text, TEXT);
            let own: Vec<Vec<f32>> = (0..6).map(|i| states[i * width..][..72].to_vec()).collect();
            let [tree, paths] = tree_and_paths(&mut *head, &text, &states, width, &own);
            assert!(bits(&tree.0) == bits(&paths.0) && bits(&tree.1) == bits(&paths.1), "{kind} {form:?}");
        }
    }
    let mut executor = executor(&model, Form::F16, KvType::F16, 64);
    assert_eq!(executor.tree_leaves(), 1);
    let mut head = executor
        .head(made("cu-no-trees", Scheme::Float(FloatType::F16), Scheme::Float(FloatType::F16), heads().remove(0).1))
        .unwrap();
    let (mask, output) = (Mask::Tree(&[1, 2]), Output::Logits { from: 0 });
    let chunk = Chunk { tokens: &[1, 2], start: 0, blocks: &[0], mask, output };
    let refused = head.guess(&Plan { chunks: vec![chunk] }, &Fed::Own(vec![&[0.5; 144]])).unwrap_err().to_string();
    assert!(refused.contains("tree_blocks"), "{refused}");
}

#[test]
fn blocks_of_heads_are_copied() {
    if device("blocks_of_heads_are_copied").is_none() {
        return;
    }
    let text = tokens(TEXT);
    let model = made("cu-copied", int(4, 32, ZeroKind::Mid), int(8, 32, ZeroKind::Mid), plain(true));
    for (kind, spec) in heads() {
        let width = spec.draft_head.as_ref().unwrap().width();
        let medusa = spec.layers.is_empty();
        let file = made(&format!("cu-copied-{kind}"), int(4, 32, ZeroKind::Code), int(8, 32, ZeroKind::Mid), spec);
        let mut executor = executor(&model, Form::F16, KvType::F16, 64);
        let mut head = executor.head(file).unwrap();
        let states = states(&mut executor, &text, TEXT);
        let ask = |head: &mut dyn HeadExecutor, start: usize, blocks: &[u32]| {
            let output = Output::Logits { from: 20 - start };
            let chunk = Chunk { tokens: &text[start + 1..22], start, blocks, mask: Mask::Causal, output };
            let fed = Fed::Model(vec![&states[start * width..21 * width]]);
            match head.guess(&Plan { chunks: vec![chunk] }, &fed).unwrap().remove(0) {
                ChunkOutput::Logits(logits) => logits,
                other => panic!("{other:?}"),
            }
        };
        let want = ask(&mut *head, 0, &[3, 4]);
        head.copy_block(3, 7).unwrap();
        assert!(bits(&ask(&mut *head, 16, &[7, 5])) == bits(&want), "{kind}: a copied block");
        assert!(medusa || bits(&ask(&mut *head, 16, &[8, 5])) != bits(&want), "{kind}: an empty block");
    }
}

/// Blocks that are guessed at once, behind contexts of several lengths: the oracle's logits, the same bits in any company
/// and wherever the block's rows lie, and the plain sampler's tokens.
#[test]
fn blocks_on_the_gpu_equal_the_oracle() {
    if device("blocks_on_the_gpu_equal_the_oracle").is_none() {
        return;
    }
    let text = tokens(TEXT);
    let forms = [
        (Form::F32, KvType::F32, 4e-6, Scheme::Float(FloatType::BF16)),
        (Form::F16, KvType::F16, 8e-3, int(4, 32, ZeroKind::Mid)),
        (Form::Int8, KvType::F16, 0.03, int(4, 32, ZeroKind::Code)),
    ];
    for (form, kv, bound, scheme) in forms {
        let model = made(&format!("cu-of-block-{form:?}"), scheme, int(8, 32, ZeroKind::Mid), plain(true));
        let file = made(&format!("cu-block-{form:?}"), scheme, scheme, block_head());
        let width = 2 * 72;
        for n in [1, 2, 15, 17, TEXT - 1] {
            let run =
                |rows, size, others| block_of(&mut executor(&model, form, kv, rows), &file, &text, n, size, others);
            let (states, got) = run(64, 7, 0);
            let context = states[..n * width].chunks_exact(width).map(<[f32]>::to_vec).collect();
            let d = deviation(&got, &block(&file, &model, &context, text[n]));
            assert!(d < bound, "{form:?}, {n}: {d:.1e} of the range away");
            // A block of 5 rows is one pass, too, where the model's have 2.
            for (rows, size, others) in [(64, 1, 0), (2, 16, 3)] {
                assert!(bits(&got) == bits(&run(rows, size, others).1), "{form:?}, {n}: {others} others");
            }
        }
    }
}

#[test]
fn heads_that_do_not_fit_the_gpu_are_refused() {
    if device("heads_that_do_not_fit_the_gpu_are_refused").is_none() {
        return;
    }
    let f16 = Scheme::Float(FloatType::F16);
    let model = made("cu-fits", f16, f16, plain(true));
    let mut executor = executor(&model, Form::F32, KvType::F32, 8);
    let error = |got: Result<Box<dyn HeadExecutor>, ExecError>| got.err().unwrap().to_string();
    assert!(error(executor.head(model.clone())).contains("expected a head, got a model"));
    let mut head = executor.head(made("cu-fits-not", f16, f16, heads().remove(0).1)).unwrap();
    let guess = |head: &mut dyn HeadExecutor, fed: &Fed| {
        let chunk = Chunk { tokens: &[1], start: 0, blocks: &[0], mask: Mask::Causal, output: Output::None };
        head.guess(&Plan { chunks: vec![chunk] }, fed).map(drop).map_err(|e| e.to_string())
    };
    assert!(guess(&mut *head, &Fed::Nothing).unwrap_err().contains("nothing"));
    assert!(guess(&mut *head, &Fed::Model(vec![&[0.0; 71]])).unwrap_err().contains("[72] numbers"));
    guess(&mut *head, &Fed::Model(vec![&[0.5; 72]])).unwrap();
    // Layers on the CPU.
    let split = ExecOptions {
        device: Device::Cuda(0),
        threads: 1,
        blocks: 8,
        activations: None,
        kv: KvType::F16,
        rows: 8,
        tree_blocks: 0,
        gpu_layers: Some(1),
    };
    let mut split = open(model.clone(), split, |_| {}).unwrap();
    let refused = error(split.head(made("cu-fits-split", f16, f16, heads().remove(0).1)));
    assert!(refused.contains("the head needs"), "{refused}");
}

/// Both halves with every norm, in any order, with zeros at position 0; and in company.
#[test]
fn halves_come_side_by_side() {
    let Some(device) = device("halves_come_side_by_side") else { return };
    let (heads, rows_ops) = (HeadOps::new(&device).unwrap(), Ops::new(&device).unwrap());
    let kinds = [NormKind::Rms, NormKind::Layer, NormKind::Identity];
    for (i, n) in [1, 7, 8, 31, 64, 100, 576, 1001].into_iter().enumerate() {
        let mut random = Random(n as u64 + 5);
        let m = 4;
        let (x, s) = (random.floats(m * n), random.floats(m * n));
        let vectors = [0; 4].map(|_| random.floats(n));
        let (order, positions) = (random.order(2 * n), [3u32, 0, 1, 0]);
        let (dx, ds, dorder, dpositions) =
            (up(&device, &x), up(&device, &s), up(&device, &order), up(&device, &positions));
        let of = vectors.each_ref().map(|v| up(&device, v));
        for (j, form) in [Form::F16, Form::F32, Form::Int8].into_iter().enumerate() {
            for (first, second) in kinds.iter().flat_map(|a| kinds.map(|b| (*a, b))) {
                let state_first = (i + j) % 2 == 0;
                let (ordered, zero) = ((i + j) % 3 > 0, j % 2 == 0 || n == 7);
                let norm = |kind, at: usize| ops::Norm {
                    kind,
                    eps: 1e-5,
                    weight: of[at].ptr(),
                    bias: (kind == NormKind::Layer).then(|| of[at + 1].ptr()),
                };
                let join = |row: usize| Join {
                    embedding: Half { x: dx.at(row * n), norm: norm(first, 0) },
                    state: Half { x: ds.at(row * n), norm: norm(second, 2) },
                    state_first,
                    order: ordered.then(|| dorder.ptr()),
                    zero_first: zero.then(|| dpositions.at(row)),
                };
                let to = acts(&device, form, m, 2 * n + 70);
                heads.join(&join(0), n, &to, m).unwrap();
                for (row, got) in read_acts(&to, m, 2 * n).iter().enumerate() {
                    let part = |all: &[f32]| all[row * n..(row + 1) * n].to_vec();
                    let embedding = if zero && positions[row] == 0 { vec![0.0; n] } else { part(&x) };
                    let normed = |kind, x: Vec<f32>, at: usize| match kind {
                        NormKind::Rms => oracle::rms_norm(&x, &vectors[at], 1e-5),
                        NormKind::Layer => oracle::layer_norm(&x, &vectors[at], &vectors[at + 1], 1e-5),
                        NormKind::Identity => x.iter().map(|&x| x as f64).collect(),
                    };
                    let (e, s) = (normed(first, embedding, 0), normed(second, part(&s), 2));
                    let both = if state_first { [s, e].concat() } else { [e, s].concat() };
                    let want: Vec<f64> =
                        (0..2 * n).map(|j| both[if ordered { order[j] as usize } else { j }]).collect();
                    let bound = |w: f64| if n < 3 { 1e-3 } else { bound::LAYER.max(bound::RMS * w.abs()) };
                    let what = format!("{first:?} {second:?} {form:?} {n} row {row}");
                    close(got, form, &want, bound, &what);
                    let alone = acts(&device, form, 1, 2 * n + 70);
                    heads.join(&join(row), n, &alone, 1).unwrap();
                    assert_eq!(&read_acts(&alone, 1, 2 * n)[0], got, "{what} alone");
                }
            }
        }
        // Rows as they are, some of them, apart; and silu.
        let (rows, stride) = ([2u32, 0, 3], n + 3);
        let (drows, to) = (up(&device, &rows), up(&device, &vec![-1.0f32; 3 * stride]));
        rows_ops.copy(dx.ptr(), Some(drows.ptr()), n, to.ptr(), stride, 3).unwrap();
        for (got, &row) in to.to_vec().unwrap().chunks(stride).zip(&rows) {
            assert_eq!(got[..n], x[row as usize * n..(row as usize + 1) * n]);
            assert_eq!(got[n..], [-1.0; 3]);
        }
        heads.add_silu(ds.ptr(), n, dx.ptr(), m).unwrap();
        for ((got, x), s) in dx.to_vec().unwrap().iter().zip(&x).zip(&s) {
            let want = *x as f64 + *s as f64 / (1.0 + (-*s as f64).exp());
            assert!((*got as f64 - want).abs() < 1e-6, "{got}, expected {want}");
        }
    }
}
