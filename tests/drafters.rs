//! Texts are the same with heads: every layout, whatever the company.

use std::sync::Arc;

use quern::{
    draft::{Accept, Speculation},
    engine::{Engine, EngineOptions, Generator, Request},
};
use quern_convert::{Options, Quant, convert};
use quern_kernels::sample::SamplingParams;
use quern_models::ModelFile;

use crate::support::{
    Scratch, fixture,
    model::{Run, answer},
};

/// Heads, and the models that they are for.
pub const HEADS: [(&str, &str); 7] = [
    ("heads/eagle1", "models/llama"),
    ("heads/eagle1-no-bias", "models/llama"),
    ("heads/eagle3", "models/llama"),
    ("heads/eagle3-speculators", "models/smollm3"),
    ("heads/mimo", "heads/mimo"),
    ("heads/medusa", "models/llama"),
    ("heads/dflash", "models/smollm3"),
];

/// A model with a head behind it in the same file.
pub fn with_head(name: &str, model: &str, scratch: &Scratch) -> (Arc<ModelFile>, Arc<ModelFile>) {
    let head = (name != model).then(|| fixture(name));
    let options = Options { head, head_quant: Some(Quant::Keep), ..Options::default() };
    let report = convert(&fixture(model), &scratch.at("model.qrn"), &options, &mut ());
    let report = report.unwrap_or_else(|e| panic!("{name}: {e}"));
    let file = ModelFile::open(&report.path).unwrap();
    let head = file.draft().unwrap_or_else(|| panic!("{name}: no head in the file")).clone();
    head.verify().unwrap();
    (Arc::new(file), head)
}

const CONTEXT: usize = 150;

pub fn engine(file: &Arc<ModelFile>, options: EngineOptions) -> Engine {
    Engine::new(file.clone(), EngineOptions { context: CONTEXT, ..options }).unwrap()
}

fn requests(vocab: usize) -> Vec<Request> {
    let samplers = [
        SamplingParams::greedy(),
        SamplingParams { temperature: 0.7, seed: 3, ..SamplingParams::default() },
        SamplingParams { temperature: 1.0, seed: 4, top_k: 9, repetition_penalty: 1.2, ..SamplingParams::default() },
    ];
    let one = |i: usize| Request {
        prompt: (0..3 + 17 * (i % 4)).map(|j| ((j * j * 7 + i * 31) % vocab) as u32).collect(),
        max_tokens: 40 + i,
        sampling: samplers[i % 3].clone(),
        ignore_eos: true,
        logprobs: (i == 4).then_some(1),
        ..Request::default()
    };
    let mut all: Vec<Request> = (0..7).map(one).collect();
    // The same beginning again, and one as long as the context.
    let again = [&all[3].prompt[..], &[1, 2, 3]].concat();
    all.push(Request { prompt: again, ..one(3) });
    all.push(Request { max_tokens: 1000, ..one(1) });
    all
}

/// Tiny heads with random weights are seldom right; their guesses are as good a test as any. Greedy and sampled, alone, in a batch, preempted, in chunks, after shared beginnings.
#[test]
fn texts_are_the_same_with_heads() {
    let (mut tokens, mut right, mut preempted) = (0, 0, 0);
    for (name, model) in HEADS {
        let scratch = Scratch::new("heads-text");
        let (file, head) = with_head(name, model, &scratch);
        let method = head.spec().draft_head.as_ref().unwrap().method();
        let requests = requests(file.spec().vocab);
        for run in [Run::Default, Run::Exact] {
            let base = EngineOptions { threads: 1, ..run.engine() };
            let one = |request: &Request| {
                let options = EngineOptions { sequences: 1, speculation: Speculation::OFF, ..base };
                answer(&mut engine(&file, options), std::slice::from_ref(request)).remove(0)
            };
            let want: Vec<_> = requests.iter().map(one).collect();
            for k in ["", ":1", ":2", ":3", ":5", ":16"] {
                let speculation: Speculation = format!("{method}{k}").parse().unwrap();
                let options = EngineOptions { speculation, sequences: requests.len(), ..base };
                let companies = [
                    options,
                    EngineOptions { cache_tokens: CONTEXT + 100, ..options },
                    EngineOptions { sequences: 4, batch_tokens: 9, ..options },
                    EngineOptions { sequences: 1, ..options },
                ];
                for (i, options) in companies.into_iter().enumerate() {
                    let mut engine = engine(&file, options);
                    engine.with_draft(head.clone(), options).unwrap();
                    let got = answer(&mut engine, &requests);
                    for (at, (got, want)) in got.iter().zip(&want).enumerate() {
                        assert_eq!(got, want, "{name}, {run:?}, {method}{k}, company {i}, request {at}");
                    }
                    let stats = engine.stats();
                    assert_eq!(stats.blocks_held, 0);
                    assert!(k.is_empty() || stats.guesses.drafted > 100, "{name}{k}: {:?}", stats.guesses);
                    tokens += got.iter().map(|got| got.tokens.len()).sum::<usize>();
                    (right, preempted) = (right + stats.guesses.accepted, preempted + stats.preemptions);
                }
            }
        }
    }
    println!("{tokens} tokens, {right} guessed right, {preempted} preemptions");
    assert!(tokens > 100_000 && right > 300 && preempted > 100, "{tokens} {right} {preempted}");
}

/// The other rule: guesses that are drawn are judged with the probability that leaves the distribution as it is.
#[test]
fn heads_may_be_judged_by_rejection() {
    let scratch = Scratch::new("heads-rejection");
    let (file, head) = with_head("heads/eagle3", "models/llama", &scratch);
    let speculation = Speculation { accept: Accept::Rejection, ..format!("{}:3", "eagle").parse().unwrap() };
    let options = EngineOptions { speculation, sequences: 9, threads: 1, ..Run::Default.engine() };
    let mut engine = engine(&file, options);
    engine.with_draft(head, options).unwrap();
    let mut requests = requests(file.spec().vocab);
    // Random weights agree seldom, but where little is likelier than the rest.
    requests.iter_mut().for_each(|request| request.sampling.temperature *= 4.0);
    let got = answer(&mut engine, &requests);
    assert!(got.iter().zip(&requests).take(7).all(|(got, request)| got.tokens.len() == request.max_tokens));
    assert!(engine.stats().guesses.accepted > 0);
}

/// The same on a GPU: greedy and sampled, with heads that share the model's matrices and heads that have their own.
#[test]
fn texts_are_the_same_with_heads_on_a_gpu() {
    let gpu = quern_vgpu::load();
    gpu.set("check", "fatal");
    let mut drafted = 0;
    for (name, model) in [("heads/eagle1", "models/llama"), ("heads/eagle3", "models/llama")] {
        let scratch = Scratch::new("heads-gpu");
        let (file, head) = with_head(name, model, &scratch);
        // A virtual GPU is slow.
        let requests: Vec<Request> =
            requests(file.spec().vocab).into_iter().take(3).map(|r| Request { max_tokens: 9, ..r }).collect();
        let base = Run::GpuDefault.engine();
        let plain = EngineOptions { sequences: 3, speculation: Speculation::OFF, ..base };
        let want = answer(&mut engine(&file, plain), &requests);
        let options = EngineOptions { sequences: 3, speculation: "eagle:2".parse().unwrap(), ..base };
        let mut engine = engine(&file, options);
        engine.with_draft(head, options).unwrap();
        assert_eq!(answer(&mut engine, &requests), want, "{name}");
        drafted += engine.stats().guesses.drafted;
    }
    assert!(drafted > 20, "{drafted}");
    assert_eq!(gpu.reports(), Vec::<String>::new());
}
