//! Texts are the same with heads: every layout, whatever the company.

use std::sync::Arc;

use quern::{
    draft::{Accept, Speculation},
    engine::{Constraint, Engine, EngineOptions, Generator, Grammar, Request, TokenSet},
};
use quern_convert::{Options, Quant, convert};
use quern_kernels::sample::SamplingParams;
use quern_models::ModelFile;

use crate::support::{
    Scratch, fixture,
    model::{Run, answer, same_distribution},
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

/// Even and odd tokens by turns.
#[derive(Clone)]
struct Turns {
    vocab: u32,
    at: u32,
}

impl Grammar for Turns {
    fn allow(&mut self, allowed: &mut TokenSet) -> Result<(), String> {
        (0..self.vocab).filter(|token| token % 2 == self.at % 2).for_each(|token| allowed.insert(token));
        Ok(())
    }

    fn follow(&mut self, token: u32) -> Result<(), String> {
        if token % 2 != self.at % 2 {
            return Err(format!("{token} at {}", self.at));
        }
        self.at += 1;
        Ok(())
    }

    fn ended(&self) -> bool {
        false
    }

    fn boxed_clone(&self) -> Box<dyn Grammar> {
        Box::new(self.clone())
    }
}

/// Tokens that all heads for `models/llama` know.
const FEW: [u32; 5] = [1, 4, 6, 10, 12];

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
    let constraint = Some(Constraint(Box::new(Turns { vocab: vocab as u32, at: 0 })));
    all.push(Request { constraint, ..one(5) });
    // Few tokens can come: of a tree one is right, and mostly not the first.
    let few = SamplingParams {
        temperature: 3.0,
        top_k: 5,
        seed: 8,
        logit_bias: FEW.map(|token| (token, 30.0)).to_vec(),
        ..SamplingParams::default()
    };
    all.push(Request { sampling: few, ..one(2) });
    // It may end.
    all.push(Request { ignore_eos: false, stop_ids: (0..vocab as u32 / 40).collect(), ..one(0) });
    all
}

/// Tiny heads with random weights are seldom right; their guesses are as good a test as any. Greedy and sampled, alone, in a batch, preempted, in chunks, after shared beginnings.
#[test]
fn texts_are_the_same_with_heads() {
    let (mut tokens, mut right, mut preempted) = (0, 0, 0);
    let (mut in_trees, mut in_chains) = ([0, 0], [0, 0]);
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
            for k in ["", ":1", ":2", ":3", ":5", ":16", ":1x5", ":2x4", ":3x9", ":5x30", ":16x63"] {
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
                    assert_eq!(stats.guesses.accepted, stats.guesses.accepted_at.iter().sum::<u64>());
                    (right, preempted) = (right + stats.guesses.accepted, preempted + stats.preemptions);
                    let of = if k.contains('x') { &mut in_trees } else { &mut in_chains };
                    let steps = [stats.guesses.accepted_at[0], stats.guesses.drafts];
                    of.iter_mut().zip(steps).for_each(|(sum, more)| *sum += more);
                }
            }
        }
    }
    println!("{tokens} tokens, {right} guessed right, {preempted} preemptions");
    // The head's first choice is right as often in a tree as alone: the others are why a step of a tree has one more often.
    let rate = |[first, steps]: [u64; 2]| first as f64 / steps as f64;
    println!("the first token right: {:.3} in trees, {:.3} in chains", rate(in_trees), rate(in_chains));
    assert!(rate(in_trees) > 1.2 * rate(in_chains), "{in_trees:?} {in_chains:?}");
    assert!(tokens > 100_000 && right > 300 && preempted > 100, "{tokens} {right} {preempted}");
}

/// The other rule: guesses that are drawn are judged with the probability that leaves the distribution as it is, and so
/// are those of trees, which are chosen.
#[test]
fn heads_may_be_judged_by_rejection() {
    let scratch = Scratch::new("heads-rejection");
    let (file, head) = with_head("heads/eagle3", "models/llama", &scratch);
    for speculation in ["eagle:3", "eagle:3x30", "eagle"] {
        let speculation = Speculation { accept: Accept::Rejection, ..speculation.parse().unwrap() };
        let options = EngineOptions { speculation, sequences: 9, threads: 1, ..Run::Default.engine() };
        let mut engine = engine(&file, options);
        engine.with_draft(head.clone(), options).unwrap();
        let mut requests = requests(file.spec().vocab);
        // Random weights agree seldom, but where little is likelier than the rest.
        requests.iter_mut().for_each(|request| request.sampling.temperature *= 4.0);
        let got = answer(&mut engine, &requests);
        assert!(got.iter().zip(&requests).take(7).all(|(got, request)| got.tokens.len() == request.max_tokens));
        let guesses = engine.stats().guesses;
        assert!(speculation.fixed.is_none() || guesses.accepted > 0, "{speculation}: {guesses:?}");
    }
}

/// Frequencies of the next tokens with trees judged by rejection, against those of plain sampling.
#[test]
fn trees_judged_by_rejection_leave_frequencies_as_they_are() {
    const RUNS: u64 = 6000;
    for (name, method) in [("heads/eagle3", "eagle:2x5"), ("heads/medusa", "medusa:2x6")] {
        let scratch = Scratch::new("trees-rejection");
        let (file, head) = with_head(name, "models/llama", &scratch);
        let request = |seed| Request {
            prompt: [&FEW[..], &FEW].concat(),
            max_tokens: 3,
            sampling: SamplingParams {
                temperature: 6.0,
                top_k: 5,
                seed,
                logit_bias: FEW.map(|token| (token, 30.0)).to_vec(),
                ..SamplingParams::default()
            },
            ignore_eos: true,
            ..Request::default()
        };
        let count = |speculation: Speculation| {
            let options = EngineOptions { sequences: 32, speculation, threads: 1, ..Run::Default.engine() };
            let mut engine = engine(&file, options);
            engine.with_draft(head.clone(), options).unwrap();
            let requests: Vec<Request> = (0..RUNS).map(request).collect();
            let mut counts = std::collections::BTreeMap::new();
            for got in answer(&mut engine, &requests) {
                *counts.entry(got.tokens).or_insert(0u64) += 1;
            }
            (counts, engine.stats().guesses)
        };
        let (plain, _) = count(Speculation::OFF);
        let (got, guesses) = count(Speculation { accept: Accept::Rejection, ..method.parse().unwrap() });
        assert!(guesses.accepted > 2000 && guesses.accepted < guesses.drafted, "{guesses:?}");
        assert_ne!(got, plain, "the text is another one");
        same_distribution(method, &plain, &got);
    }
}

/// The same on a GPU: greedy and sampled, with heads that share the model's matrices and heads that have their own.
#[test]
fn texts_are_the_same_with_heads_on_a_gpu() {
    let gpu = quern_vgpu::load();
    gpu.set("check", "fatal");
    let mut drafted = 0;
    let heads = [
        ("heads/eagle1", "models/llama", "eagle:2"),
        ("heads/eagle3", "models/llama", "eagle:2x5"),
        ("heads/medusa", "models/llama", "medusa:2x6"),
        ("heads/dflash", "models/smollm3", "dflash:3"),
        ("heads/dflash", "models/smollm3", "dflash:2x6"),
    ];
    for (name, model, method) in heads {
        let scratch = Scratch::new("heads-gpu");
        let (file, head) = with_head(name, model, &scratch);
        // A virtual GPU is slow.
        let all = requests(file.spec().vocab);
        let requests: Vec<Request> =
            [0, 1, 2, 10].into_iter().map(|i| Request { max_tokens: 9, ..all[i].clone() }).collect();
        let base = EngineOptions { tree_blocks: 12, ..Run::GpuDefault.engine() };
        let plain = EngineOptions { sequences: 3, speculation: Speculation::OFF, ..base };
        let want = answer(&mut engine(&file, plain), &requests);
        let options = EngineOptions { sequences: 3, speculation: method.parse().unwrap(), ..base };
        let mut engine = engine(&file, options);
        engine.with_draft(head, options).unwrap();
        assert_eq!(answer(&mut engine, &requests), want, "{name}");
        let guesses = engine.stats().guesses;
        // More guesses than positions, and right ones: they were trees, and not only first choices were kept.
        assert!(!method.contains('x') || guesses.drafted > 2 * guesses.drafts && guesses.accepted > 3, "{guesses:?}");
        drafted += guesses.drafted;
    }
    assert!(drafted > 20, "{drafted}");
    assert_eq!(gpu.reports(), Vec::<String>::new());
}
