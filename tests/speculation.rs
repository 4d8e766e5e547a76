//! Guesses change when tokens come, never which: the same requests with every method, number of guesses, sampler,
//! company and cache.

use std::sync::Arc;

use quern::{
    draft::{Accept, Speculation},
    engine::{Constraint, Engine, EngineOptions, Finish, Generator, Grammar, Request, TokenSet},
    grammar::GrammarFactory,
    text::TextModel,
};
use quern_kernels::{cpu::kv::KvType, sample::SamplingParams};
use quern_models::ModelFile;
use serde_json::json;

use crate::support::{
    Random, Scratch, fixture,
    model::{Got, Run, answer, kept, same_distribution},
};

const MODEL: &str = "models/llama-gptq-w4-g64-asym";

fn model(scratch: &Scratch) -> Arc<ModelFile> {
    kept(&fixture(MODEL), scratch).1
}

fn speculate(text: &str) -> Speculation {
    text.parse().unwrap()
}

/// Numbers in turn: one of two, then two that are given.
#[derive(Clone)]
struct Turns {
    at: usize,
    ends: usize,
}

impl Turns {
    const GIVEN: [u32; 2] = [17, 4];
}

impl Grammar for Turns {
    fn allow(&mut self, allowed: &mut TokenSet) -> Result<(), String> {
        match self.at % 3 {
            0 => [5, 9].into_iter().for_each(|t| allowed.insert(t)),
            n => allowed.insert(Turns::GIVEN[n - 1]),
        }
        Ok(())
    }

    fn follow(&mut self, token: u32) -> Result<(), String> {
        let right = if self.at.is_multiple_of(3) { [5, 9] } else { [Turns::GIVEN[self.at % 3 - 1]; 2] };
        if self.ended() || !right.contains(&token) {
            return Err(format!("{token} at {}", self.at));
        }
        self.at += 1;
        Ok(())
    }

    fn ended(&self) -> bool {
        self.at >= self.ends
    }

    fn boxed_clone(&self) -> Box<dyn Grammar> {
        Box::new(self.clone())
    }
}

/// Texts that repeat themselves and texts that do not, with every sampler.
fn requests(vocab: usize) -> Vec<Request> {
    let mut random = Random::new(11);
    let mut text = |n: usize| -> Vec<u32> { (0..n).map(|_| random.below(vocab) as u32).collect() };
    let stem = text(20);
    let plain = SamplingParams::greedy();
    let warm = SamplingParams { temperature: 0.3, seed: 5, ..SamplingParams::default() };
    let samplers = [
        plain.clone(),
        warm.clone(),
        SamplingParams { temperature: 1.0, seed: 6, ..warm.clone() },
        SamplingParams { top_k: 3, top_p: 0.8, ..warm.clone() },
        SamplingParams { min_p: 0.2, logit_bias: vec![(7, 2.0), (9, f32::NEG_INFINITY)], ..warm.clone() },
        SamplingParams { repetition_penalty: 1.3, presence_penalty: 0.5, frequency_penalty: 0.2, ..warm.clone() },
        SamplingParams { repetition_penalty: 1.2, penalty_last_n: Some(8), ..plain.clone() },
    ];
    let request = |prompt: Vec<u32>, max_tokens, sampling: &SamplingParams| Request {
        prompt,
        max_tokens,
        sampling: sampling.clone(),
        ignore_eos: true,
        ..Request::default()
    };
    let mut all = vec![];
    for (i, sampling) in samplers.iter().enumerate() {
        all.push(request([&stem[..], &text(5 + i), &stem].concat(), 60 + i, sampling));
    }
    all.push(Request { logprobs: Some(2), ..request(stem.repeat(3), 50, &warm) });
    all.push(Request { ignore_eos: false, stop_ids: (0..40).collect(), ..request(stem.repeat(3), 50, &plain) });
    all.push(Request { cache_salt: Some("s".into()), ..request(stem.repeat(2), 40, &plain) });
    let turns = Constraint(Box::new(Turns { at: 0, ends: 40 }));
    all.push(Request { constraint: Some(turns.clone()), ..request(stem.clone(), 50, &warm) });
    all.push(Request { constraint: Some(turns), ..request(stem.clone(), 31, &plain) });
    // As long as the context.
    all.push(request(stem.repeat(7), 1000, &plain));
    all
}

const CONTEXT: usize = 176;

fn engine(file: &Arc<ModelFile>, options: EngineOptions) -> Engine {
    Engine::new(file.clone(), EngineOptions { context: CONTEXT, ..options }).unwrap()
}

/// Answers of requests, each alone and without guesses.
fn alone(file: &Arc<ModelFile>, options: EngineOptions, requests: &[Request]) -> Vec<Got> {
    let one = |request: &Request| {
        let options = EngineOptions { sequences: 1, speculation: Speculation::OFF, ..options };
        answer(&mut engine(file, options), std::slice::from_ref(request)).remove(0)
    };
    requests.iter().map(one).collect()
}

#[test]
fn texts_are_the_same_with_guesses() {
    let scratch = Scratch::new("speculation");
    let file = model(&scratch);
    let requests = requests(file.spec().vocab);
    let (mut tokens, mut right, mut wrong, mut preempted) = (0, 0, 0, 0);
    for run in [Run::Default, Run::Small, Run::Exact] {
        let base = EngineOptions { threads: 1, ..run.engine() };
        let want = alone(&file, base, &requests);
        assert_eq!(want.last().unwrap().finish, Some(Finish::Context));
        assert_eq!(want[10].tokens.len(), 40, "the grammar ended it");
        let methods: Vec<String> = match run {
            Run::Default => ["ngram", "suffix", "auto", "grammar"]
                .iter()
                .flat_map(|name| (1..=16).map(move |k| format!("{name}:{k}")).chain([name.to_string()]))
                .collect(),
            _ => ["auto", "suffix:5", "ngram:16", "grammar:3"].map(String::from).into(),
        };
        for method in &methods {
            let base = EngineOptions { speculation: speculate(method), ..base };
            let (sequences, room) = (requests.len(), CONTEXT + 200);
            let companies = [
                EngineOptions { sequences, ..base },
                EngineOptions { sequences, cache_tokens: room, ..base },
                EngineOptions { sequences: 5, batch_tokens: 9, ..base },
            ];
            // One after the other, too: what the second finds in the cache and in the past is of the first.
            for (i, options) in companies.into_iter().chain([EngineOptions { sequences: 1, ..base }]).enumerate() {
                let mut engine = engine(&file, options);
                let got = answer(&mut engine, &requests);
                for (at, (got, want)) in got.iter().zip(&want).enumerate() {
                    assert_eq!(got, want, "{run:?}, {method}, company {i}, request {at}");
                }
                let stats = engine.stats();
                assert_eq!(stats.blocks_held, 0);
                tokens += got.iter().map(|got| got.tokens.len()).sum::<usize>();
                right += stats.guesses.accepted;
                wrong += stats.guesses.drafted - stats.guesses.accepted;
                preempted += stats.preemptions;
                assert_eq!(stats.guesses.accepted, stats.guesses.accepted_at.iter().sum::<u64>());
            }
        }
    }
    println!("{tokens} tokens, {right} guessed right, {wrong} wrong, {preempted} preemptions");
    assert!(tokens > 100_000 && right > 10_000 && wrong > 20_000 && preempted > 100);
}

#[test]
fn a_request_says_how_it_is_guessed() {
    let scratch = Scratch::new("speculation-request");
    let file = model(&scratch);
    let request = |speculation| Request {
        prompt: [1, 2, 3, 4].repeat(8),
        max_tokens: 100,
        sampling: SamplingParams::greedy(),
        ignore_eos: true,
        speculation,
        ..Request::default()
    };
    let drafted = |of_engine: &str, of_request: Option<&str>| {
        let options = EngineOptions { speculation: speculate(of_engine), ..Run::Default.engine() };
        let mut engine = engine(&file, options);
        answer(&mut engine, &[request(of_request.map(speculate))]);
        engine.stats().guesses
    };
    assert_eq!(drafted("off", None).drafts, 0);
    assert_eq!(drafted("ngram:3", Some("off")).drafts, 0);
    assert_eq!(drafted("ngram:3", Some("grammar")).drafts, 0, "it has none");
    for (of_engine, of_request) in [("ngram:3", None), ("off", Some("ngram:3"))] {
        let counts = drafted(of_engine, of_request);
        assert!(counts.drafts > 20 && counts.drafted > counts.drafts, "{counts:?}");
        assert!(counts.drafted <= 3 * counts.drafts && counts.accepted_at[3..].iter().all(|&n| n == 0), "{counts:?}");
    }
}

#[test]
fn steps_become_fewer() {
    let scratch = Scratch::new("speculation-steps");
    let file = model(&scratch);
    let turns = Constraint(Box::new(Turns { at: 0, ends: 90 }));
    let request = |constraint| Request {
        prompt: vec![1; 8],
        max_tokens: 90,
        sampling: SamplingParams { temperature: 1.0, seed: 4, ..SamplingParams::default() },
        ignore_eos: true,
        constraint,
        ..Request::default()
    };
    let steps = |method: &str, requests: &[Request]| {
        let options = EngineOptions { speculation: speculate(method), kv: KvType::F16, ..Run::Default.engine() };
        let mut engine = engine(&file, options);
        for request in requests {
            answer(&mut engine, std::slice::from_ref(request));
        }
        engine.stats().steps
    };
    let constrained = [request(Some(turns))];
    assert_eq!(steps("off", &constrained), 90);
    // Two of three are given.
    assert!(steps("grammar:8", &constrained) <= 31, "{}", steps("grammar:8", &constrained));
    // The same question again: what it has not of its own to guess from, the past has.
    let twice = [request(None), request(None)];
    let (own, past) = (steps("ngram:8", &twice), steps("suffix:8", &twice));
    assert!(past + 40 < own, "{past} steps with the first answer, {own} without");
}

/// The same model as its own draft knows every token; another one with the same tokens knows some.
#[test]
fn texts_are_the_same_with_a_draft_model() {
    let scratch = [Scratch::new("draft-large"), Scratch::new("draft-other")];
    let large = model(&scratch[0]);
    let other = kept(&fixture("models/llama-gptq-w2-g32-sym"), &scratch[1]).1;
    assert_eq!(large.spec().vocab, other.spec().vocab);
    let requests = requests(large.spec().vocab);
    let base = EngineOptions { threads: 1, ..Run::Default.engine() };
    let want = alone(&large, base, &requests);
    let mut tokens = 0;
    for (small, knows) in [(&large, true), (&other, false)] {
        let mut counts = (0, 0);
        for method in ["draft:1", "draft:3", "draft:4", "draft:16", "draft", "auto"] {
            let options = EngineOptions { speculation: speculate(method), ..base };
            let sequences = requests.len();
            let companies = [
                EngineOptions { sequences, ..options },
                EngineOptions { sequences, cache_tokens: CONTEXT + 200, ..options },
                EngineOptions { sequences: 5, batch_tokens: 9, ..options },
                EngineOptions { sequences: 1, ..options },
            ];
            for (i, options) in companies.into_iter().enumerate() {
                let mut engine = engine(&large, options);
                engine.with_draft(small.clone(), options).unwrap();
                let got = answer(&mut engine, &requests);
                for (at, (got, want)) in got.iter().zip(&want).enumerate() {
                    assert_eq!(got, want, "{method}, company {i}, request {at}");
                }
                tokens += got.iter().map(|got| got.tokens.len()).sum::<usize>();
                let guesses = engine.stats().guesses;
                if method.contains(':') {
                    counts = (counts.0 + guesses.drafted, counts.1 + guesses.accepted);
                }
            }
        }
        println!("{tokens} tokens, {} guessed, {} right", counts.0, counts.1);
        // A constraint that the draft does not know, and the ends of texts, keep some back or make them wrong.
        let share = counts.1 as f64 / counts.0 as f64;
        assert!(counts.0 > 5_000 && if knows { share > 0.9 } else { share < 0.9 }, "{share}");
    }
}

/// Rejection leaves the distribution as it is: frequencies of the next two tokens against those of plain sampling.
#[test]
fn rejection_leaves_frequencies_as_they_are() {
    let scratch = [Scratch::new("rejection"), Scratch::new("rejection-draft")];
    let file = model(&scratch[0]);
    let other = kept(&fixture("models/llama-gptq-w2-g32-sym"), &scratch[1]).1;
    const RUNS: u64 = 6000;
    // Few tokens, so that each has stood in the text before.
    let prompt = vec![3, 1, 4, 1, 5, 3, 5, 4, 4, 3, 1, 1, 5, 5];
    let bias = 30.0;
    let request = |seed| Request {
        prompt: prompt.clone(),
        max_tokens: 4,
        sampling: SamplingParams {
            temperature: 6.0,
            top_k: 4,
            seed,
            logit_bias: [1, 3, 4, 5].map(|token| (token, bias)).to_vec(),
            ..SamplingParams::default()
        },
        ignore_eos: true,
        ..Request::default()
    };
    let count = |speculation: Speculation, draft: bool| {
        let options = EngineOptions { sequences: 32, speculation, threads: 1, ..Run::Default.engine() };
        let mut engine = engine(&file, options);
        if draft {
            engine.with_draft(other.clone(), options).unwrap();
        }
        let requests: Vec<Request> = (0..RUNS).map(request).collect();
        let mut counts = std::collections::BTreeMap::new();
        for got in answer(&mut engine, &requests) {
            *counts.entry(got.tokens).or_insert(0u64) += 1;
        }
        (counts, engine.stats().guesses)
    };
    let (plain, _) = count(Speculation::OFF, false);
    for (method, draft) in [("ngram:2", false), ("draft:2", true)] {
        let speculation = Speculation { accept: Accept::Rejection, ..speculate(method) };
        let (got, guesses) = count(speculation, draft);
        assert!(guesses.accepted > 500 && guesses.accepted < guesses.drafted, "{guesses:?}");
        assert_ne!(got, plain, "the text is another one");
        same_distribution(method, &plain, &got);
    }
}

/// Real grammars go ahead of themselves on copies: JSON, expressions, choices, control tokens.
#[test]
fn answers_with_grammars_are_the_same_with_guesses() {
    let scratch = Scratch::new("speculation-grammar");
    let file = kept(&fixture("models/smollm2-gptq-2layer"), &scratch).1;
    let text = Arc::new(TextModel::of(&file).unwrap().unwrap());
    let factory = GrammarFactory::new(text.clone(), file.spec().vocab);
    let mark = (0..file.spec().vocab as u32).find(|&t| text.tokenizer().is_special(t)).unwrap();
    let schema = json!({
        "type": "object",
        "properties": {
            "identifier": {"type": "integer", "minimum": 10, "maximum": 9999},
            "description": {"enum": ["a rather long description", "a rather short one"]},
            "elements": {"type": "array", "items": {"const": "element of the list"}, "minItems": 3, "maxItems": 4},
        },
        "required": ["identifier", "description", "elements"], "additionalProperties": false,
    });
    let lark = format!(
        "start: \"the first part\" <[{mark}]> \"the second part: \" NUMBER <[{mark}]> \"and the end\"\nNUMBER: /[0-9]{{3}}/"
    );
    let grammars = [
        factory.json_schema(&schema),
        factory.json_object(),
        factory.regex("(yes, certainly|no, never), because [a-d ]{5,12}\\."),
        factory.choice(&["the very first of the choices", "the very last of the choices"]),
        factory.lark(&lark),
    ];
    let prompt = text.tokenizer().encode("An object in JSON: ", false).unwrap();
    let warm = SamplingParams { temperature: 0.9, seed: 3, ..SamplingParams::default() };
    let mut requests = vec![];
    for grammar in grammars {
        let constraint = Some(grammar.unwrap());
        for sampling in [SamplingParams::greedy(), warm.clone()] {
            let (prompt, stop_ids) = (prompt.clone(), text.stop_ids().to_vec());
            let constraint = constraint.clone();
            requests.push(Request { prompt, max_tokens: 70, sampling, stop_ids, constraint, ..Request::default() });
        }
    }
    let base = EngineOptions { threads: 1, ..Run::Default.engine() };
    let want = alone(&file, base, &requests);
    assert!(want[8].tokens.iter().filter(|&&t| t == mark).count() == 2, "{:?}", want[8].tokens);
    for method in ["auto", "grammar", "grammar:8", "grammar:16", "suffix:4"] {
        let options = EngineOptions { sequences: requests.len(), speculation: speculate(method), ..base };
        let mut engine = engine(&file, options);
        let got = answer(&mut engine, &requests);
        for (at, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_eq!(got, want, "{method}, request {at}");
        }
        let guesses = engine.stats().guesses;
        println!("{method}: {guesses:?}");
        if method.starts_with("grammar:") {
            assert!(guesses.accepted > 10, "{guesses:?}");
        }
    }
}

/// On a GPU a guess is a chunk of several rows that are chosen from, where without there are steps of one row.
#[test]
fn texts_are_the_same_with_guesses_on_a_gpu() {
    let gpu = quern_vgpu::load();
    gpu.set("check", "fatal");
    let scratch = Scratch::new("speculation-gpu");
    let file = model(&scratch);
    // A virtual GPU is slow.
    let short = |mut request: Request| {
        let from = request.prompt.len() - 18;
        request.prompt = [&request.prompt[from..], &request.prompt[from..]].concat();
        request.max_tokens = 12;
        request
    };
    let all = requests(file.spec().vocab);
    let requests: Vec<Request> = [0, 1, 3, 5, 7, 10].into_iter().map(|i| short(all[i].clone())).collect();
    let base = Run::GpuDefault.engine();
    let want = alone(&file, base, &requests);
    let mut right = 0;
    for method in ["ngram:3", "auto"] {
        let options = EngineOptions { sequences: requests.len(), speculation: speculate(method), ..base };
        let mut engine = engine(&file, options);
        assert_eq!(answer(&mut engine, &requests), want, "{method}");
        right += engine.stats().guesses.accepted;
    }
    assert!(right > 10, "{right}");
    assert_eq!(gpu.reports(), Vec::<String>::new());
}
