//! Models of which some layers run on the CPU and the others on the virtual GPU (`--gpu-layers`).

use crate::{
    lossless::lossless,
    support::{
        Scratch, fixture,
        golden::{Golden, distance, margin},
        model::{self, Run, Sequence, kept},
        program::{arg, quern, quern_on_gpu},
    },
};

/// Largest deviation of each device's usual activations and an f16 cache, as a share of the logit range: the CPU's.
const DEFAULT_SHARE: f32 = 0.05;

/// With none, one, all but one and all layers on the GPU: exact mode within the golden's bound and with its greedy
/// tokens, default mode within its share; one by one as at once, bit for bit.
#[test]
fn fixtures_with_any_number_of_layers_on_the_gpu() {
    let gpu = quern_vgpu::load();
    gpu.set("check", "fatal");
    for name in [
        "models/gpt2",
        "models/gpt_neo",
        "models/qwen3",
        "models/gemma2",
        "models/gemma3",
        "models/smollm3",
        "models/llama-gptq-w4-g32-sym-descact",
        "models/llama-ct-mxfp4a16",
        "gguf/qwen2-q5/model.gguf",
        "gguf/llama-q4_k_m/model.gguf",
    ] {
        compare(name);
    }
    assert_eq!(gpu.reports(), Vec::<String>::new());
}

fn compare(name: &str) {
    let source = fixture(name);
    let golden = Golden::read(if source.is_dir() { &source } else { source.parent().unwrap() });
    let scratch = Scratch::new("offload");
    let (_, file) = kept(&source, &scratch);
    let (prompt, logits) = (golden.ids("input_ids"), golden.weights_only());
    let prompt = &prompt[..prompt.len().min(10)];
    let want = &logits.data[..prompt.len() * logits.cols];
    let range = logits.range();
    let exact_bound = golden.exact_bound(range);
    let layers = file.spec().layers.len();
    let mut counts = vec![0, 1, layers - 1, layers];
    counts.dedup();
    for n in counts {
        for (run, bound) in [(Run::SplitExact(n), exact_bound), (Run::SplitDefault(n), DEFAULT_SHARE * range)] {
            let at_once = model::logits(&file, run, prompt);
            let far = distance(&at_once, want);
            println!("{name} {run:?}: {:.2e} of the range {range:.2}, bound {:.2e}", far / range, bound / range);
            assert!(far <= bound, "{name} {run:?}: {far:e}, bound {bound:e}");
            let mut sequence = Sequence::new(&file, run, prompt.len());
            let one_by_one: Vec<f32> = prompt.iter().flat_map(|&id| sequence.push(&[id])).collect();
            let same = at_once.iter().zip(&one_by_one).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{name} {run:?}: one by one is {:e} away", distance(&at_once, &one_by_one));
        }
        if golden.rounds_activations() {
            continue;
        }
        let (ids, steps) = (golden.ids("greedy_ids"), golden.floats("greedy_logits"));
        let margins: Vec<f32> = steps.rows().map(margin).collect();
        let decided = margins.iter().take(3).position(|&m| m <= 4.0 * exact_bound).unwrap_or(3.min(ids.len()));
        let whole = golden.ids("input_ids");
        let greedy = model::greedy(&file, Run::SplitExact(n), &[whole.to_vec()], decided).remove(0).tokens;
        assert_eq!(greedy, ids[..decided], "{name}, {n} layers on the GPU");
    }
}

/// Batches, chunks, threads, preemption, cached beginnings, also from a file.
#[test]
fn texts_do_not_depend_on_company_on_two_devices() {
    let gpu = quern_vgpu::load();
    gpu.set("check", "fatal");
    lossless("models/llama-gptq-w4-g64-asym", Run::SplitDefault(1), 4);
    assert_eq!(gpu.reports(), Vec::<String>::new());
}

/// As a person would: the program and its flags.
#[test]
fn the_program_takes_layers_for_the_gpu() {
    let scratch = Scratch::new("offload-run");
    kept(&fixture("models/smollm2-gptq-2layer"), &scratch);
    let file = scratch.at("model.qrn");
    let args = ["run", arg(&file), "-p", "The harbour", "-n", "6", "--temperature", "0", "--json", "--ctx", "64"];
    let with = |more: &[&'static str]| -> Vec<&str> { args.iter().chain(more).copied().collect() };
    // Without JSON, stderr says how it was computed.
    let told = |more: &[&'static str]| with(more).into_iter().filter(|&flag| flag != "--json").collect::<Vec<_>>();
    let exact = ["--activations", "f32", "--kv", "f32", "--gpu-layers"];
    let answer = |n: &'static str| quern_on_gpu(&with(&[&exact[..], &[n]].concat()), &[]).ok().json();
    let want = answer("0");
    assert_eq!(want["tokens"].as_array().unwrap().len(), 6);
    for n in ["1", "2"] {
        assert_eq!(answer(n)["tokens"], want["tokens"], "{n} layers");
    }
    // Every spelling, and what is said about it.
    for flags in [&["-ngl", "1"][..], &["--n-gpu-layers", "1", "--device", "cuda"], &["--gpu-layers=1", "--kv", "int8"]]
    {
        let answer = quern_on_gpu(&told(flags), &[]).ok();
        answer.says(&["last 1 layer: f16 activations, ", " KV, cuda:0 ", "; first 1 layer: int8 activations, "]);
    }
    let int8 = quern_on_gpu(&told(&["-ngl", "1", "--activations", "int8"]), &[]).ok();
    int8.says(&["last 1 layer: int8 activations, f16 KV, cuda:0 ", "; first 1 layer: int8 activations, "]);
    let none = quern_on_gpu(&told(&["-ngl", "0", "--device", "cuda"]), &[]).ok().says(&["int8 activations, f16 KV, "]);
    assert!(!none.err.contains("cuda"), "{}", none.err);
    // What cannot be meant.
    let misused = |flags: &[&'static str], what: &str| drop(quern_on_gpu(&with(flags), &[]).misused(&[what]));
    misused(&["-ngl", "3"], "--gpu-layers 3: expected at most 2, the layers of this model");
    misused(
        &["-ngl", "1", "--device", "cpu"],
        "--gpu-layers 1: expected at most 0, as there is no GPU on --device cpu",
    );
    misused(&["-ngl", "-1"], "-1");
    misused(&["--gpu-layers", "18446744073709551616"], "--gpu-layers");
    let eval = ["eval", arg(&file), "--ids", "1,2", "--logits", "/dev/null/none", "-ngl", "3"];
    quern_on_gpu(&eval, &[]).misused(&["--gpu-layers 3: expected at most 2"]);
    let fails = |flags: &[&'static str], env: &[(&str, &str)], what: &[&str]| {
        drop(quern_on_gpu(&with(flags), env).fails(what));
    };
    let common = "has no f16 activations: expected int8, f32 or nothing (f16 on the GPU, int8 on the CPU)";
    fails(&["-ngl", "1", "--activations", "f16"], &[], &["cuda:0 with the first layers on the CPU", common]);
    fails(&["-ngl", "1"], &[("VGPU_CC", "7.5")], &["compute capability 7.5, the kernels need 8.0"]);
    fails(&["-ngl", "1"], &[("VGPU_FAIL", "cuGraphLaunch:2:719")], &["start it again"]);
    if !std::path::Path::new("/dev/nvidiactl").exists() {
        quern(&with(&["-ngl", "1"])).fails(&["no NVIDIA driver here", "--device cpu"]);
    }
}

/// A card that lacks one byte for the whole model: what would fit is said, and fits.
#[test]
fn what_would_fit_the_gpu_is_said() {
    let scratch = Scratch::new("offload-memory");
    kept(&fixture("models/smollm2-gptq-2layer"), &scratch);
    let file = scratch.at("model.qrn");
    let args = ["run", arg(&file), "-p", "The harbour", "-n", "2", "--temperature", "0", "--ctx", "64"];
    let run = |flags: &[&str], memory: &str| {
        quern_on_gpu(&args.iter().chain(flags).copied().collect::<Vec<_>>(), &[("VGPU_MEMORY", memory)])
    };
    let refused = run(&["--device", "cuda"], "1000000").fails(&["the model needs ", "use a smaller context"]);
    assert!(!refused.err.contains("--gpu-layers"), "{}", refused.err);
    let needed = |text: &str| -> u64 {
        let number = text.split("the model needs ").nth(1).unwrap().split(' ').next().unwrap();
        number.parse().unwrap()
    };
    let enough = needed(&refused.err);
    run(&["--device", "cuda"], &enough.to_string()).ok();
    let less = (enough - 1).to_string();
    run(&["--device", "cuda"], &less).fails(&["are free: --gpu-layers 1 would fit; or use a smaller context"]);
    run(&[], &less).ok().says(&["device: cpu (memory of cuda:0: ", " are there; --gpu-layers 1 would fit)"]);
    run(&["-ngl", "1"], &less).ok().says(&["last 1 layer: "]);
    let half = needed(&run(&["-ngl", "1"], "1000000").fails(&["the model needs "]).err);
    assert!(half < enough, "{half} {enough}");
    run(&["-ngl", "1"], &half.to_string()).ok();
    // A server counts more and says both sides.
    let serve = ["serve", arg(&file), "--port", "0", "--ctx", "64", "--device", "cuda"];
    let refused = quern_on_gpu(&serve, &[("VGPU_MEMORY", "1000000")]).fails(&["the model needs ", "MB weights"]);
    assert!(!refused.err.contains("--gpu-layers"), "{}", refused.err);
    let serve: Vec<&str> = serve.into_iter().chain(["-ngl", "1"]).collect();
    let refused = quern_on_gpu(&serve, &[("VGPU_MEMORY", "1000000")]);
    refused.fails(&["memory of cuda:0: ", "; of the CPU: ", "the layers on cuda:0 need "]);
}

#[test]
fn bench_and_eval_take_layers_for_the_gpu() {
    let scratch = Scratch::new("offload-measure");
    kept(&fixture("models/smollm2-gptq-2layer"), &scratch);
    let file = scratch.at("model.qrn");
    let split = "last 1 layer: f16 activations, f16 KV, cuda:0 ";
    let bench = ["bench", arg(&file), "-p", "4", "-n", "2", "-r", "1", "-ngl", "1", "--threads", "2"];
    quern_on_gpu(&bench, &[]).ok().prints(&[split, "| pp4 |", "| tg2 |"]);
    let text =
        scratch.write("t.txt", "The harbour was quiet, and two men sat on the wall and talked of rain. ".repeat(4));
    let eval = ["eval", arg(&file), "--text", arg(&text), "-c", "16", "--chunks", "1", "-ngl", "1"];
    quern_on_gpu(&eval, &[]).ok().prints(&[split, "exact", "default"]);
    let int8: Vec<&str> = eval.into_iter().chain(["--kv", "int8"]).collect();
    quern_on_gpu(&int8, &[]).ok().prints(&["default, int8 KV"]);
    let logits = scratch.at("l.safetensors");
    let eval = ["eval", arg(&file), "--ids", "1,2,3", "--logits", arg(&logits), "-ngl", "1"];
    quern_on_gpu(&eval, &[]).ok().prints(&[split]);
}
