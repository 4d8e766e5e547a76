//! What a server asks of the engine beyond texts: vectors, probabilities of prompts, constraints, salts, kept files.

use std::{fs, sync::Arc};

use quern::engine::{
    Constraint, Engine, EngineOptions, Event, Failure, Finish, Generator, Grammar, Pooling, Request, TokenSet,
    worker::{Refused, Worker},
};
use quern_kernels::sample::SamplingParams;
use quern_models::ModelFile;

use crate::support::{
    Random, Scratch, fixture,
    model::{Run, answer, kept, logits},
};

const MODEL: &str = "models/llama-gptq-w4-g64-asym";

fn model(scratch: &Scratch) -> Arc<ModelFile> {
    kept(&fixture(MODEL), scratch).1
}

fn open(file: &Arc<ModelFile>, options: EngineOptions) -> Engine {
    Engine::new(file.clone(), EngineOptions { context: 192, ..options }).unwrap()
}

/// All events until nothing is left.
fn events(engine: &mut Engine, requests: &[Request]) -> Vec<Event> {
    for request in requests {
        engine.add(request.clone()).unwrap();
    }
    let mut events = vec![];
    while engine.step(&mut events).unwrap() {}
    events
}

fn prompt(vocab: usize, n: usize) -> Vec<u32> {
    let mut random = Random::new(n as u64);
    (0..n).map(|_| random.below(vocab) as u32).collect()
}

#[test]
fn vectors_do_not_depend_on_chunks_or_company() {
    let scratch = Scratch::new("embed");
    let file = model(&scratch);
    let texts: Vec<Vec<u32>> = [1, 16, 70, 192].map(|n| prompt(file.spec().vocab, n)).into();
    for pooling in [Pooling::Mean, Pooling::Last] {
        let requests: Vec<Request> = texts
            .iter()
            .map(|text| Request { prompt: text.clone(), embed: Some(pooling), ..Request::default() })
            .collect();
        let vectors = |options: EngineOptions, requests: &[Request]| -> Vec<Vec<f32>> {
            let mut vectors = vec![vec![]; requests.len()];
            for event in events(&mut open(&file, options), requests) {
                match event {
                    Event::Embedding { request, values } => vectors[request as usize] = values,
                    Event::Started { .. } | Event::Finished { finish: Finish::Stop, .. } => {}
                    other => panic!("{other:?}"),
                }
            }
            vectors
        };
        let alone: Vec<Vec<f32>> =
            requests.iter().map(|r| vectors(Run::Default.engine(), std::slice::from_ref(r)).remove(0)).collect();
        assert!(alone.iter().all(|v| v.len() == file.spec().hidden && v.iter().any(|x| *x != 0.0)));
        for batch_tokens in [5, 64, 0] {
            let options = EngineOptions { batch_tokens, sequences: 4, ..Run::Default.engine() };
            // The same texts twice: what is cached must not be missing from a mean.
            let twice = [&requests[..], &requests[..]].concat();
            let got = vectors(options, &twice);
            assert_eq!(got[..4], alone, "{pooling:?}, {batch_tokens} tokens a step");
            assert_eq!(got[4..], alone, "{pooling:?}, {batch_tokens} tokens a step, again");
        }
    }
}

#[test]
fn logprobs_of_a_prompt_are_those_of_its_logits() {
    let scratch = Scratch::new("echo");
    let file = model(&scratch);
    let text = prompt(file.spec().vocab, 150);
    let rows = logits(&file, Run::Default, &text);
    let vocab = file.spec().vocab;
    let want: Vec<f32> = (1..text.len())
        .map(|i| {
            let row = &rows[(i - 1) * vocab..i * vocab];
            let max = row.iter().copied().fold(f32::MIN, f32::max);
            let sum: f64 = row.iter().map(|x| f64::from(x - max).exp()).sum();
            row[text[i] as usize] - max - sum.ln() as f32
        })
        .collect();
    for (max_tokens, batch_tokens) in [(0, 0), (4, 7), (4, 0)] {
        let greedy = SamplingParams::greedy();
        let request = Request {
            prompt: text.clone(),
            max_tokens,
            sampling: greedy,
            prompt_logprobs: Some(2),
            logprobs: Some(1),
            ignore_eos: true,
            ..Request::default()
        };
        let mut engine = open(&file, EngineOptions { batch_tokens, sequences: 3, ..Run::Default.engine() });
        let plain = Request { prompt_logprobs: None, max_tokens: 4, ..request.clone() };
        let continued = answer(&mut engine, std::slice::from_ref(&plain)).remove(0);
        let (mut scores, mut tokens, mut end) = (None, vec![], None);
        for event in events(&mut engine, std::slice::from_ref(&request)) {
            match event {
                Event::Prompt { tokens, .. } => assert!(scores.replace(tokens).is_none()),
                Event::Token { id, .. } => {
                    assert!(scores.is_some(), "the prompt's come first");
                    tokens.push(id);
                }
                Event::Finished { finish, .. } => end = Some(finish),
                Event::Started { cached, .. } => assert_eq!(cached, 0),
                other => panic!("{other:?}"),
            }
        }
        let scores = scores.unwrap();
        assert_eq!(scores.len(), 149);
        for (i, ((got, top), want)) in scores.iter().zip(&want).enumerate() {
            assert!((got - want).abs() < 1e-4, "token {}: {got}, {want}", i + 1);
            assert!(top.len() == 2 && top[0].1 >= top[1].1 && top[0].1 >= *got);
        }
        assert_eq!(end, Some(Finish::Length));
        assert_eq!(tokens, continued.tokens[..max_tokens]);
    }
}

#[test]
fn logprobs_of_many_prompts_at_once_are_those_of_each_alone() {
    let scratch = Scratch::new("echoes");
    let file = model(&scratch);
    let text = prompt(file.spec().vocab, 160);
    let request = |i: usize| Request {
        prompt: text[i..i + 90 + 5 * i].to_vec(),
        max_tokens: i % 2 * 3,
        sampling: SamplingParams::greedy(),
        prompt_logprobs: Some(2),
        ignore_eos: true,
        ..Request::default()
    };
    let requests: Vec<Request> = (0..8).map(request).collect();
    let of = |requests: &[Request], at: u64| -> Vec<Event> {
        let mut engine = open(&file, EngineOptions { sequences: 8, ..Run::Default.engine() });
        let mine = |mut event: Event| {
            let own = *event.request_mut() == at && !matches!(event, Event::Started { .. });
            *event.request_mut() = 0;
            own.then_some(event)
        };
        events(&mut engine, requests).into_iter().filter_map(mine).collect()
    };
    for i in 0..8 {
        let alone = of(&requests[i..=i], 0);
        assert!(matches!(&alone[0], Event::Prompt { tokens, .. } if tokens.len() == requests[i].prompt.len() - 1));
        assert_eq!(of(&requests, i as u64), alone, "request {i}");
    }
}

/// Allows multiples of a number, and so many of them.
#[derive(Clone)]
struct Multiples {
    of: u32,
    left: usize,
    breaks: bool,
}

impl Grammar for Multiples {
    fn allow(&mut self, allowed: &mut TokenSet) -> Result<(), String> {
        if self.breaks && self.left == 1 {
            return Err("it broke".into());
        }
        (0..1000).step_by(self.of as usize).for_each(|t| allowed.insert(t));
        Ok(())
    }

    fn follow(&mut self, token: u32) -> Result<(), String> {
        assert_eq!(token % self.of, 0);
        self.left -= 1;
        Ok(())
    }

    fn ended(&self) -> bool {
        self.left == 0
    }

    fn boxed_clone(&self) -> Box<dyn Grammar> {
        Box::new(self.clone())
    }
}

#[test]
fn a_constraint_holds_for_its_request_alone() {
    let scratch = Scratch::new("mask");
    let file = model(&scratch);
    let constraint = |of, breaks| Some(Constraint(Box::new(Multiples { of, left: 5, breaks })));
    let sampling = SamplingParams { seed: 3, ..SamplingParams::default() };
    let text = prompt(file.spec().vocab, 20);
    let plain = Request { prompt: text, max_tokens: 20, sampling, ignore_eos: true, ..Request::default() };
    let alone = answer(&mut open(&file, Run::Default.engine()), std::slice::from_ref(&plain)).remove(0);
    let requests = [
        plain.clone(),
        Request { constraint: constraint(7, false), ..plain.clone() },
        Request { constraint: constraint(5, true), ..plain.clone() },
        Request { constraint: constraint(1, false), prompt_logprobs: Some(0), ..plain.clone() },
    ];
    let mut engine = open(&file, EngineOptions { sequences: 4, ..Run::Default.engine() });
    let mut tokens = vec![vec![]; 4];
    let mut ends = vec![];
    for event in events(&mut engine, &requests) {
        match event {
            Event::Token { request, id, .. } => tokens[request as usize].push(id),
            Event::Finished { request, finish } => ends.push((request, finish)),
            Event::Failed { request, error } => {
                assert_eq!((request, error), (2, Failure::Constraint("it broke".into())));
            }
            _ => {}
        }
    }
    assert_eq!(tokens[0], alone.tokens, "others' constraints are none of its business");
    assert!(tokens[1].len() == 5 && tokens[1].iter().all(|t| t % 7 == 0), "{tokens:?}");
    assert!(tokens[2].len() == 4 && tokens[2].iter().all(|t| t % 5 == 0), "{tokens:?}");
    assert_eq!(tokens[3], alone.tokens[..5], "a constraint that allows everything changes nothing");
    ends.sort_by_key(|&(request, _)| request);
    assert_eq!(ends, [(0, Finish::Length), (1, Finish::Stop), (3, Finish::Stop)]);
    assert_eq!(engine.stats().blocks_held, 0);
}

#[test]
fn salts_keep_texts_apart() {
    let scratch = Scratch::new("salt");
    let file = model(&scratch);
    let request = |salt: Option<&str>| Request {
        prompt: prompt(file.spec().vocab, 100),
        max_tokens: 2,
        cache_salt: salt.map(String::from),
        ..Request::default()
    };
    let mut engine = open(&file, EngineOptions { cache_tokens: 2048, ..Run::Default.engine() });
    let mut found = |salt| {
        let of = |event: &Event| if let Event::Started { cached, .. } = event { Some(*cached) } else { None };
        events(&mut engine, &[request(salt)]).iter().find_map(of).unwrap()
    };
    assert_eq!([found(None), found(Some("a")), found(Some("b"))], [0, 0, 0]);
    assert_eq!([found(None), found(Some("a")), found(Some("b"))], [99, 99, 99]);
}

#[test]
fn a_damaged_file_of_beginnings_is_used_as_far_as_it_is_whole() {
    let scratch = Scratch::new("damaged");
    let file = model(&scratch);
    let options = EngineOptions { cache_tokens: 1024, ..Run::Default.engine() };
    let request = Request { prompt: prompt(file.spec().vocab, 100), max_tokens: 3, ..Request::default() };
    let dir = scratch.path().join("kept");
    let mut engine = open(&file, options);
    assert!(engine.keep_in(dir.clone()).ends_with("nothing there yet"));
    let want = answer(&mut engine, std::slice::from_ref(&request));
    engine.close().unwrap();
    let path = fs::read_dir(&dir).unwrap().next().unwrap().unwrap().path();
    let whole = fs::read(&path).unwrap();
    let entry = (whole.len() - 16) / 6; // six blocks and a short description
    let check = |bytes: &[u8], note: &str, least: u64, most: u64| {
        fs::write(&path, bytes).unwrap();
        let mut engine = open(&file, options);
        let said = engine.keep_in(dir.clone());
        assert!(said.contains(note), "{said}, expected {note}");
        assert_eq!(answer(&mut engine, std::slice::from_ref(&request)), want, "{note}");
        let hits = engine.stats().prefix_hits;
        assert!((least..=most).contains(&hits), "{note}: {hits} hits");
    };
    check(&whole, ": 96 tokens", 96, 99);
    check(&whole[..whole.len() - 1], "80 tokens of computed beginnings, then a cut-off end", 80, 80);
    check(&whole[..12], "not used: it is cut off", 0, 0);
    check(b"", "not used: it is cut off", 0, 0);
    let mut other = whole.clone();
    other[20] ^= 1;
    check(&other, "not used: it was made with another model", 0, 0);
    let mut bad = whole.clone();
    let at = whole.len() - entry / 2;
    bad[at] ^= 1;
    check(&bad, "then block 5 is damaged", 80, 80);
    let mut magic = whole.clone();
    magic[0] = b'X';
    check(&magic, "expected a file of kept beginnings", 0, 0);
    // Another way of computing looks for another file.
    let mut exact = open(&file, EngineOptions { cache_tokens: 1024, ..Run::Exact.engine() });
    assert!(exact.keep_in(dir.clone()).ends_with("nothing there yet"));
}

#[test]
fn the_worker_takes_what_fits_and_ends_what_is_dropped() {
    let scratch = Scratch::new("worker");
    let file = model(&scratch);
    let options = EngineOptions { sequences: 2, cache_tokens: 1024, ..Run::Default.engine() };
    let worker = Worker::start(Box::new(open(&file, options)), 3).unwrap();
    let handle = worker.handle();
    let text = prompt(file.spec().vocab, 20);
    let request = Request { prompt: text, max_tokens: 150, ignore_eos: true, ..Request::default() };
    let invalid = handle.submit(vec![Request { prompt: vec![], ..request.clone() }]);
    assert!(matches!(invalid, Err(Refused::Invalid(_))));
    let mut three = handle.submit(vec![request.clone(), request.clone(), request.clone()]).unwrap();
    let mut tokens = vec![vec![]; 3];
    let mut cancelled = false;
    while let Some(event) = three.next_blocking() {
        match event {
            Event::Token { request, id, .. } => {
                tokens[request as usize].push(id);
                if request == 1 && !std::mem::replace(&mut cancelled, true) {
                    three.cancel(1);
                }
            }
            Event::Finished { request, finish } => {
                assert_eq!(finish, if request == 1 { Finish::Cancelled } else { Finish::Length });
            }
            _ => {}
        }
    }
    assert_eq!((tokens[0].len(), tokens[2].len()), (150, 150));
    assert_eq!(tokens[0], tokens[2]);
    assert!(tokens[1].len() < 150 && tokens[0].starts_with(&tokens[1]));
    // Dropped requests end, and give their blocks back.
    drop(handle.submit(vec![request.clone(), request.clone()]).unwrap());
    drop(three);
    let wait = std::time::Instant::now();
    while handle.open() > 0 || handle.stats().blocks_held > 0 {
        assert!(wait.elapsed().as_secs() < 60, "{:?}", handle.stats());
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    assert_eq!(handle.stats().waiting, 0);
    handle.drain();
    assert!(matches!(handle.submit(vec![request]), Err(Refused::Draining)));
    assert!(worker.stop().is_some());
}
