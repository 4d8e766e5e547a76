//! Whole models on the virtual GPU, through the driver's interface and with the PTX that is shipped.
//!
//! Logits of every fixture that the CPU passes, greedy tokens, and the same texts in every company.

use std::path::Path;

use serde_json::json;

use crate::{
    lossless::lossless,
    parity,
    serve::server::{self, Server},
    support::{
        Scratch, fixture,
        golden::{Golden, distance, margin},
        model::{self, Run, Sequence, kept},
        program::{arg, command, quern, quern_on_gpu, virtual_gpu},
        skip,
    },
};

/// Largest deviation of f16 activations and an f16 cache, as a share of the logit range.
const DEFAULT_SHARE: f32 = 0.01;

/// Every fixture: exact mode within the golden's bound, default mode within its share; greedy tokens where the golden's
/// margin is more than four times the bound; one by one as at once, bit for bit.
#[test]
fn every_fixture_on_the_gpu() {
    let gpu = quern_vgpu::load();
    gpu.set("check", "fatal");
    let mut seen = 0;
    for folder in ["models", "gguf"] {
        for entry in std::fs::read_dir(fixture(folder)).unwrap() {
            let name = format!("{folder}/{}", entry.unwrap().file_name().to_string_lossy());
            compare(&name, &fixture(&name));
            seen += 1;
        }
    }
    assert!(seen >= 30, "{seen} fixtures");
    assert_eq!(gpu.reports(), Vec::<String>::new());
}

fn compare(name: &str, dir: &Path) {
    let golden = Golden::read(dir);
    let scratch = Scratch::new("cuda");
    let gguf = dir.join("model.gguf");
    let (_, file) = kept(if gguf.exists() { &gguf } else { dir }, &scratch);
    let (prompt, logits) = (golden.ids("input_ids"), golden.weights_only());
    // A virtual GPU is slow; the beginning tells as much.
    let prompt = &prompt[..prompt.len().min(10)];
    let want = &logits.data[..prompt.len() * logits.cols];
    let range = logits.range();
    let exact_bound = golden.exact_bound(range);
    let int8_bound = parity::DEFAULT_SHARE * range;
    let runs = [(Run::GpuExact, exact_bound), (Run::GpuDefault, DEFAULT_SHARE * range), (Run::GpuInt8, int8_bound)];
    for (run, bound) in runs {
        let at_once = model::logits(&file, run, prompt);
        let far = distance(&at_once, want);
        println!("{name} {run:?}: {:.2e} of the range {range:.2}, bound {:.2e}", far / range, bound / range);
        let fits =
            if run == Run::GpuExact { far <= bound } else { parity::rounding_fits(&file, &at_once, want, bound) };
        assert!(fits, "{name} {run:?}: {far:e}, bound {bound:e}");
        if run == Run::GpuExact {
            continue;
        }
        let mut sequence = Sequence::new(&file, run, prompt.len());
        let one_by_one: Vec<f32> = prompt.iter().flat_map(|&id| sequence.push(&[id])).collect();
        let same = at_once.iter().zip(&one_by_one).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "{name} {run:?}: one by one is {:e} away", distance(&at_once, &one_by_one));
    }
    let (ids, steps) = (golden.ids("greedy_ids"), golden.floats("greedy_logits"));
    if golden.rounds_activations() {
        return;
    }
    let margins: Vec<f32> = steps.rows().map(margin).collect();
    let decided = margins.iter().take(3).position(|&m| m <= 4.0 * exact_bound).unwrap_or(3.min(ids.len()));
    let whole = golden.ids("input_ids");
    let greedy = model::greedy(&file, Run::GpuExact, &[whole.to_vec()], decided).remove(0).tokens;
    assert_eq!(greedy, ids[..decided], "{name}");
}

#[test]
fn texts_do_not_depend_on_company_on_the_gpu() {
    let gpu = quern_vgpu::load();
    gpu.set("check", "fatal");
    lossless("models/llama-gptq-w4-g64-asym", Run::GpuDefault, 4);
    assert_eq!(gpu.reports(), Vec::<String>::new());
}

#[test]
fn texts_of_experts_do_not_depend_on_company_on_the_gpu() {
    quern_vgpu::load().set("check", "fatal");
    lossless("models/qwen3_moe-gptq-w4-g32-sym", Run::GpuDefault, 4);
    assert_eq!(quern_vgpu::load().reports(), Vec::<String>::new());
}

#[test]
fn texts_in_int8_do_not_depend_on_company_on_the_gpu() {
    let gpu = quern_vgpu::load();
    gpu.set("check", "fatal");
    lossless("models/llama-gptq-w4-g64-asym", Run::GpuInt8, 4);
    assert_eq!(gpu.reports(), Vec::<String>::new());
}

#[test]
fn texts_with_an_fp8_cache_do_not_depend_on_company_on_the_gpu() {
    let gpu = quern_vgpu::load();
    gpu.set("check", "fatal");
    lossless("models/llama-gptq-w4-g64-asym", Run::GpuFp8, 4);
    assert_eq!(gpu.reports(), Vec::<String>::new());
}

/// As a person would: the program, a device on the command line.
#[test]
fn the_program_answers_on_the_gpu() {
    let scratch = Scratch::new("cuda-run");
    kept(&fixture("models/smollm2-gptq-2layer"), &scratch);
    let file = scratch.at("model.qrn");
    let args = ["run", arg(&file), "-p", "The harbour", "-n", "6", "--temperature", "0", "--json", "--ctx", "64"];
    let gpu: Vec<&str> = args.iter().copied().chain(["--device", "cuda"]).collect();
    let answer = quern_on_gpu(&gpu, &[]).ok().json();
    assert_eq!(answer["tokens"].as_array().unwrap().len(), 6);
    // The other modes, as asked for; int8 is no reason to stay on the CPU.
    for (mode, device) in [("f32", "cuda"), ("int8", "cuda:0"), ("int8", "auto")] {
        let asked = ["--device", device, "--activations", mode];
        let other = quern_on_gpu(&args.iter().copied().chain(asked).collect::<Vec<_>>(), &[]).ok();
        assert_eq!(other.json()["tokens"].as_array().unwrap().len(), 6, "{mode} on {device}");
        assert!(!other.err.contains("device: cpu"), "{}", other.err);
    }
    let listed = quern_on_gpu(&["info", "--devices"], &[]).ok();
    listed.prints(&["cuda:0", "compute capability"]);
    // What goes wrong is one line and a status.
    let fails = |env: &[(&str, &str)], what: &str| {
        let ran = quern_on_gpu(&gpu, env);
        ran.fails(&[what]);
    };
    fails(&[("VGPU_DRIVER_VERSION", "11080")], "speaks CUDA 11.8, the kernels need 12.0");
    fails(&[("VGPU_CC", "7.5")], "compute capability 7.5, the kernels need 8.0");
    fails(&[("VGPU_MEMORY", "1000000")], "the model needs");
    // A library that is no driver, and none at all; a device that is lost between two steps.
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let other = maps.lines().find_map(|line| line.split(' ').next_back().filter(|path| path.contains("/libc.so")));
    std::os::unix::fs::symlink(other.unwrap(), scratch.at("libcuda.so")).unwrap();
    fails(&[("LD_LIBRARY_PATH", arg(scratch.path()))], "has no function cuCtxSetCurrent");
    if !Path::new("/dev/nvidiactl").exists() {
        quern(&gpu).fails(&["no NVIDIA driver here", "--device cpu"]);
        quern(&["info", "--devices"]).ok().prints(&["cpu ", "no NVIDIA driver here"]);
    }
    fails(&[("VGPU_FAIL", "cuGraphLaunch:2:719")], "start it again");
    let auto: Vec<&str> = args.iter().copied().chain(["--device", "auto"]).collect();
    quern_on_gpu(&auto, &[("VGPU_MEMORY", "1000000")]).ok().says(&["device: cpu (memory of cuda:0"]);
    quern_on_gpu(&auto, &[("VGPU_DRIVER_VERSION", "11080")]).ok().says(&["device: cpu", "CUDA 11.8"]);
    // A device in the host's memory: the file's pages are given up, and it is all the same.
    let shares = [("VGPU_INTEGRATED", "1")];
    quern_on_gpu(&["info", "--devices"], &shares).ok().prints(&["shares the host's memory"]);
    assert_eq!(quern_on_gpu(&gpu, &shares).ok().json()["tokens"], answer["tokens"]);
    // Less shared memory, another number of multiprocessors, every check.
    let other = [("VGPU_CC", "8.6"), ("VGPU_SMS", "128"), ("VGPU_CHECK", "fatal")];
    assert_eq!(quern_on_gpu(&gpu, &other).ok().json()["tokens"], answer["tokens"]);
}

/// A server whose device is lost: the request fails, and `/health` says that nothing works.
#[test]
fn a_lost_device_is_told_to_clients() {
    let (_scratch, file) = server::model();
    let mut command = command(&["serve", arg(&file), "--port", "0", "--device", "cuda", "--ctx", "128"]);
    command.env("LD_LIBRARY_PATH", virtual_gpu()).env("VGPU_FAIL", "cuGraphLaunch:2:719");
    let mut server = Server::spawn(command);
    server.wait_until_ready();
    let asked = server.post("/v1/completions", &json!({"prompt": "The harbour", "max_tokens": 8, "temperature": 0}));
    assert!(asked.status >= 500, "{asked:?}");
    let health = server.get("/health");
    assert_eq!(health.status, 503, "{health:?}");
    assert!(health.body.contains("cuGraphLaunch") || health.body.contains("failed"), "{health:?}");
}

/// A few tokens of the real model: those of the CPU, which follow transformers.
#[test]
fn a_real_model_on_the_gpu() {
    let Some(source) = std::env::var_os("QUERN_SMOLLM2_GGUF") else {
        return skip("cuda::a_real_model_on_the_gpu", "set QUERN_SMOLLM2_GGUF to the file that the demo fetches");
    };
    quern_vgpu::load().set("check", "fatal");
    let scratch = Scratch::new("cuda-real");
    let (_, file) = kept(Path::new(&source), &scratch);
    // "The capital of France is".
    let prompt = [vec![504, 3575, 282, 4649, 314]];
    let tokens = |run| model::greedy(&file, run, &prompt, 3).remove(0).tokens;
    assert_eq!(tokens(Run::GpuExact), tokens(Run::Exact));
    let [gpu, cpu] = [Run::GpuDefault, Run::Exact].map(|run| model::logits(&file, run, &prompt[0]));
    let (low, high) = cpu.iter().fold((f32::MAX, f32::MIN), |(a, b), &x| (a.min(x), b.max(x)));
    let far = distance(&gpu, &cpu) / (high - low);
    println!("SmolLM2 in f16 mode: {far:.2e} of the range");
    assert!(far < DEFAULT_SHARE, "{far:e}");
}
