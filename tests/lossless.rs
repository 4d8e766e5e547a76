//! The same text, alone or in a crowd.
//!
//! Tokens, and every bit of their probabilities, must not depend on the other requests, on how
//! prompts are cut into chunks, on preemption, on when a request comes or on the number of threads.

use std::{collections::HashMap, sync::Arc};

use quern::engine::{Engine, EngineOptions, Finish, Generator, Request};
use quern_kernels::sample::SamplingParams;
use quern_models::ModelFile;
use serde_json::{Value, json};

use crate::support::{
    Random, Scratch, fixture,
    model::{Got, Run, answer, kept, receive},
    program::{arg, quern},
};

/// Long enough that some prompts take several chunks and blocks.
const CONTEXT: usize = 192;

#[test]
fn real_layers_in_default_mode() {
    lossless("models/smollm2-gptq-2layer", Run::Default, 10);
}

#[test]
fn real_layers_with_int8_keys_and_values() {
    lossless("models/smollm2-gptq-2layer", Run::Small, 10);
}

#[test]
fn real_layers_with_fp8_keys_and_values() {
    lossless("models/smollm2-gptq-2layer", Run::Fp8, 10);
}

#[test]
fn real_layers_in_exact_mode() {
    lossless("models/smollm2-gptq-2layer", Run::Exact, 12);
}

#[test]
fn asymmetric_integers_in_default_mode() {
    lossless("models/llama-gptq-w4-g64-asym", Run::Default, 24);
}

#[test]
fn asymmetric_integers_with_int8_keys_and_values() {
    lossless("models/llama-gptq-w4-g64-asym", Run::Small, 24);
}

#[test]
fn experts_in_default_mode() {
    lossless("models/qwen3_moe-gptq-w4-g32-sym", Run::Default, 24);
}

#[test]
fn experts_in_exact_mode() {
    lossless("models/mixtral", Run::Exact, 24);
}

#[test]
fn bf16_weights_in_exact_mode() {
    lossless("models/llama", Run::Exact, 24);
}

#[test]
fn gemma2_int8_mode() {
    lossless("models/gemma2", Run::Default, 24);
}

#[test]
fn gemma3_small_cache() {
    lossless("models/gemma3", Run::Small, 24);
}

#[test]
fn minima_and_bytes_in_default_mode() {
    lossless("gguf/llama-q4_1/model.gguf", Run::Default, 24);
}

/// Every way to compute the same texts, and that they are the same to the last bit of their probabilities.
pub fn lossless(name: &str, run: Run, count: usize) {
    let scratch = Scratch::new("lossless");
    let (_, file) = kept(&fixture(name), &scratch);
    let requests = requests(file.spec().vocab, count);
    let options = EngineOptions { context: CONTEXT, threads: 1, ..run.engine() };
    let open = |options| Engine::new(file.clone(), options).unwrap();

    let mut engine = open(options);
    let alone: Vec<Got> = requests.iter().map(|r| answer(&mut engine, std::slice::from_ref(r)).remove(0)).collect();
    for (got, request) in alone.iter().zip(&requests) {
        assert_eq!(got.logprobs.len(), got.tokens.len(), "every token has a logprob");
        assert_eq!(got.finish, Some(Finish::Length), "{request:?}");
    }
    let distinct: std::collections::HashSet<u32> = alone.iter().flat_map(|got| got.tokens.iter().copied()).collect();
    assert!(distinct.len() > 20, "{name}: only {} tokens, too few to compare", distinct.len());

    let same = |what: &str, got: Vec<Got>| {
        for (i, (got, alone)) in got.iter().zip(&alone).enumerate() {
            assert_eq!(got.tokens, alone.tokens, "{name} {run:?}: {what}, request {i}: tokens");
            assert_eq!(got, alone, "{name} {run:?}: {what}, request {i}: probabilities");
        }
    };
    same("all together", answer(&mut open(EngineOptions { sequences: count, ..options }), &requests));
    same("three at a time", answer(&mut open(EngineOptions { sequences: 3, ..options }), &requests));
    let chunked = EngineOptions { batch_tokens: 7, sequences: 4, ..options };
    same("chunks of 7 tokens", answer(&mut open(chunked), &requests));
    let slow = EngineOptions { batch_tokens: 1, ..options };
    same("one token a step", answer(&mut open(slow), &requests[..3]));
    for threads in [2, 3] {
        let options = EngineOptions { threads, sequences: count, batch_tokens: 29, ..options };
        same(&format!("{threads} threads"), answer(&mut open(options), &requests));
    }
    same("preempted", preempted(&file, run, &requests));
    let [first, second, third] = cached(&file, options, &requests);
    same("with beginnings that others computed", first);
    same("with all beginnings cached", second);
    same("with beginnings from a file", third);
    same(
        "one after another, some given up",
        staggered(&mut open(EngineOptions { sequences: 4, ..options }), &requests),
    );
}

/// Prompts of every length around chunk and block borders, sampled in every way.
fn requests(vocab: usize, count: usize) -> Vec<Request> {
    let mut random = Random::new(vocab as u64);
    let lengths = [1, 2, 15, 16, 17, 31, 48, 64, 65, 90, 130];
    let greedy = SamplingParams::greedy;
    let request = |i: usize| {
        let seed = 1000 + i as u64;
        let sampling = match i % 6 {
            0 => greedy(),
            1 => SamplingParams { seed, ..SamplingParams::default() },
            2 => SamplingParams { seed, top_p: 0.95, temperature: 6.0, ..SamplingParams::default() },
            3 => SamplingParams { repetition_penalty: 1.3, frequency_penalty: 0.4, ..greedy() },
            4 => SamplingParams { seed, top_k: 40, min_p: 0.02, presence_penalty: 0.7, ..SamplingParams::default() },
            _ => {
                let logit_bias = vec![(7, 3.0), (9, f32::NEG_INFINITY)];
                SamplingParams { seed, temperature: 3.0, logit_bias, ..SamplingParams::default() }
            }
        };
        // Some prompts are the same: what differs is the noise.
        let prompt = (0..lengths[i % lengths.len()]).map(|_| random.below(vocab) as u32).collect();
        // Short prompts with long answers outgrow a small cache.
        let max_tokens = 10 + i % 17 + if i.is_multiple_of(3) { 40 } else { 0 };
        Request { prompt, max_tokens, sampling, ignore_eos: true, logprobs: Some(2), ..Request::default() }
    };
    let mut requests: Vec<Request> = (0..count).map(request).collect();
    requests[1].prompt = requests[0].prompt.clone();
    requests
}

/// So few blocks that running sequences must give theirs back and start again.
fn preempted(file: &Arc<ModelFile>, run: Run, requests: &[Request]) -> Vec<Got> {
    let longest = requests.iter().map(|r| r.prompt.len() + r.max_tokens).max().unwrap();
    let executor = run.executor(file, longest.div_ceil(16) + 2);
    let options = EngineOptions { context: CONTEXT, batch_tokens: 64, sequences: 6, ..run.engine() };
    let mut engine = Engine::with_executor(file.clone(), executor, options);
    let answers = answer(&mut engine, requests);
    let stats = engine.stats();
    assert!(stats.preemptions > 0, "nothing was preempted: {stats:?}");
    assert_eq!(stats.blocks_held, 0, "{stats:?}");
    answers
}

/// Beginnings that were computed before, by the same requests and by others; then an engine that finds them in a file.
fn cached(file: &Arc<ModelFile>, options: EngineOptions, requests: &[Request]) -> [Vec<Got>; 3] {
    let scratch = Scratch::new("kept");
    let options = EngineOptions { sequences: 3, cache_tokens: 4096, ..options };
    let mut engine = Engine::new(file.clone(), options).unwrap();
    engine.keep_in(scratch.path().into());
    // Beginnings of the prompts with other ends, and of lengths that end inside of blocks.
    let other = |(i, r): (usize, &Request)| {
        let mut prompt = r.prompt[..r.prompt.len() - r.prompt.len() / (2 + i % 3)].to_vec();
        prompt.push(1);
        Request { prompt, max_tokens: 3, ..r.clone() }
    };
    let others: Vec<Request> = requests.iter().enumerate().map(other).collect();
    answer(&mut engine, &others);
    let before = engine.stats();
    let first = answer(&mut engine, requests);
    let between = engine.stats();
    assert!(between.prefix_hits > before.prefix_hits, "{between:?}");
    let second = answer(&mut engine, requests);
    let after = engine.stats();
    let prompts: usize = requests.iter().map(|r| r.prompt.len()).sum();
    let found = (after.prefix_hits - between.prefix_hits) as usize;
    assert_eq!(found, prompts - requests.len(), "everything but the last token of each prompt was there");
    let note = engine.close().unwrap().unwrap();
    assert!(note.contains("kept"), "{note}");
    let mut engine = Engine::new(file.clone(), options).unwrap();
    let note = engine.keep_in(scratch.path().into());
    assert!(note.ends_with("tokens of computed beginnings"), "{note}");
    let third = answer(&mut engine, requests);
    let hits = engine.stats().prefix_hits as usize;
    // Whole blocks are kept; what was in the last one of a prompt is found where an answer filled it.
    assert!(hits + 16 * requests.len() > prompts, "{hits} of {prompts}");
    [first, second, third]
}

/// A request comes every other step; beside each one comes another that is given up after a while.
fn staggered(engine: &mut Engine, requests: &[Request]) -> Vec<Got> {
    let mut answers = vec![Got::default(); requests.len() * 2];
    let mut index: HashMap<u64, usize> = HashMap::new();
    let mut waiting = requests.iter().enumerate();
    let mut given_up = vec![];
    for step in 0.. {
        if step % 2 == 0
            && let Some((i, request)) = waiting.next()
        {
            index.insert(engine.add(request.clone()).unwrap(), i);
            let mut other = request.clone();
            other.prompt.rotate_left(1);
            let other = engine.add(other).unwrap();
            index.insert(other, requests.len() + i);
            given_up.push((step + 1 + i % 5, other));
        }
        given_up.iter().filter(|(at, _)| *at == step).for_each(|&(_, request)| engine.cancel(request));
        let mut events = vec![];
        let more = engine.step(&mut events).unwrap();
        receive(events, &mut answers, |id| index[&id]);
        if !more && index.len() == answers.len() && answers.iter().all(|a| a.finish.is_some()) {
            break;
        }
        assert!(step < 10_000, "the engine does not come to an end");
    }
    let others = answers.split_off(requests.len());
    assert!(others.iter().any(|a| a.finish == Some(Finish::Cancelled)));
    answers
}

#[test]
fn a_batch_of_prompts_gives_the_texts_of_single_runs() {
    let scratch = Scratch::new("batch");
    kept(&fixture("models/smollm2-gptq-2layer"), &scratch);
    let file = scratch.at("model.qrn");
    let prompts =
        ["Hello", "The harbour was quiet.", "One", "two men sat on the wall and talked", "rain", "é 你", "a b c"];
    let row = |(i, prompt): (usize, &&str)| {
        let mut row = json!({"id": format!("row{i}"), "prompt": prompt, "max_tokens": 6 + i});
        if i % 2 == 1 {
            row["temperature"] = 1.0.into();
            row["seed"] = (40 + i).into();
            row["top_p"] = 0.5.into();
        }
        row
    };
    let rows: Vec<Value> = prompts.iter().enumerate().map(row).collect();
    let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
    let (input, output) = (scratch.write("in.jsonl", lines), scratch.at("out.jsonl"));
    let batch =
        ["run", arg(&file), "--batch", arg(&input), "--out", arg(&output), "--temperature", "0", "--ctx", "256"];
    quern(&batch).ok().says(&["7 rows answered, 0 of them with an error"]);
    let text = std::fs::read_to_string(&output).unwrap();
    let answers: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(answers.len(), rows.len());
    for row in &rows {
        let of = |key: &str| row.get(key).map_or("0".to_string(), Value::to_string);
        let prompt = row["prompt"].as_str().unwrap();
        let mut args = vec!["run", arg(&file), "-p", prompt, "--json", "--ctx", "256"];
        let (n, temperature, seed) = (of("max_tokens"), of("temperature"), of("seed"));
        args.extend(["-n", &n, "--temperature", &temperature, "--seed", &seed]);
        if row.get("top_p").is_some() {
            args.extend(["--top-p", "0.5"]);
        }
        let single = quern(&args).ok().json();
        let answer = answers.iter().find(|a| a["id"] == row["id"]).unwrap();
        for key in ["text", "tokens", "finish_reason", "usage"] {
            assert_eq!(answer[key], single[key], "{row}: {key}");
        }
    }
}
