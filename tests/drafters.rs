//! Texts are the same with heads: every layout, whatever the company.

use std::sync::Arc;

use quern::{
    draft::{Accept, Speculation},
    engine::{Engine, EngineOptions, Event, Generator, Request},
};
use quern_convert::{Options, convert};
use quern_kernels::{
    exec::{Chunk, ChunkOutput, Executor, Fed, HeadExecutor, Mask, Output, Plan},
    sample::SamplingParams,
};
use quern_models::{ModelFile, spec::HeadKind};

use crate::{
    speculation::{frequencies, same_frequencies},
    support::{
        Scratch, fixture,
        model::{Run, answer},
    },
};

/// Heads, and the models that they are for.
const HEADS: [(&str, &str); 7] = [
    ("heads/eagle1", "models/llama"),
    ("heads/eagle1-no-bias", "models/llama"),
    ("heads/eagle3", "models/llama"),
    ("heads/eagle3-speculators", "models/smollm3"),
    ("heads/mimo", "heads/mimo"),
    ("heads/medusa", "models/llama"),
    ("heads/dflash", "models/smollm3"),
];

/// A model with a head behind it in the same file.
fn with_head(name: &str, model: &str, scratch: &Scratch) -> (Arc<ModelFile>, Arc<ModelFile>) {
    let head = (name != model).then(|| fixture(name));
    let options = Options { head, ..Options::default() };
    let report = convert(&fixture(model), &scratch.at("model.qrn"), &options, &mut ());
    let report = report.unwrap_or_else(|e| panic!("{name}: {e}"));
    let file = ModelFile::open(&report.path).unwrap();
    let head = file.draft().unwrap_or_else(|| panic!("{name}: no head in the file")).clone();
    head.verify().unwrap();
    (Arc::new(file), head)
}

const CONTEXT: usize = 150;

fn engine(file: &Arc<ModelFile>, options: EngineOptions) -> Engine {
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
        let method = head.spec().guesses.as_ref().unwrap().method();
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

/// A head that has read nothing, and the model's states of a text.
struct Fresh<'a> {
    executor: Box<dyn Executor>,
    head: Box<dyn HeadExecutor>,
    file: &'a ModelFile,
    request: &'a Request,
}

const BLOCKS: &[u32] = &[1, 0, 5, 4, 3, 2, 6, 7, 8, 9, 10, 11];

impl<'a> Fresh<'a> {
    fn new(model: &Arc<ModelFile>, head: &'a Arc<ModelFile>, run: Run, request: &'a Request) -> Fresh<'a> {
        let mut executor = run.executor(model, BLOCKS.len());
        let head_executor = executor.head(head.clone()).unwrap();
        Fresh { executor, head: head_executor, file: head, request }
    }

    /// Tokens of one chunk.
    fn pass(
        &mut self,
        tokens: &[u32],
        start: usize,
        mask: Mask,
        history: Option<(usize, &[u32])>,
        fed: &Fed,
    ) -> Vec<u32> {
        let params = self.request.sampling.clone();
        let prompt_len = self.request.prompt.len();
        let output = history.map_or(Output::None, |(from, history)| Output::Tokens {
            from,
            params: &params,
            history,
            prompt_len,
            logprobs: None,
            allowed: None,
        });
        let chunk = Chunk { tokens, start, blocks: BLOCKS, mask, output };
        match self.head.guess(&Plan { chunks: vec![chunk] }, fed).unwrap().pop() {
            Some(ChunkOutput::Tokens(tokens)) => tokens.into_iter().map(|t| t.unwrap().token).collect(),
            _ => vec![],
        }
    }

    /// Guesses of what follows a text.
    fn guesses(mut self, text: &[u32], count: usize) -> Vec<u32> {
        let n = text.len();
        let chunk =
            Chunk { tokens: &text[..n - 1], start: 0, blocks: BLOCKS, mask: Mask::Causal, output: Output::None };
        let ticket = self.executor.submit(&Plan { chunks: vec![chunk] }).unwrap();
        self.executor.collect(ticket).unwrap();
        let states = self.executor.states().unwrap().to_vec();
        let head = self.file.spec().guesses.clone().unwrap();
        let (all, width) = (Fed::Model(vec![&states]), head.width());
        let mut guesses = match head.kind {
            HeadKind::Medusa { .. } => {
                let last = Fed::Model(vec![&states[(n - 2) * width..]]);
                self.pass(&text[n - 1..], n - 2, Mask::Causal, Some((0, text)), &last)
            }
            HeadKind::Block { size, mask, .. } => {
                self.pass(&text[1..], 0, Mask::Causal, None, &all);
                let mut block = vec![mask; size];
                block[0] = text[n - 1];
                let history = [&text[..n - 1], &block].concat();
                self.pass(&block, n - 1, Mask::Full, Some((1, &history)), &Fed::Nothing)
            }
            HeadKind::Joined { .. } | HeadKind::Wide { .. } => {
                let mut guesses = self.pass(&text[1..], 0, Mask::Causal, Some((n - 2, text)), &all);
                while guesses.len() < count {
                    let own = self.head.own().unwrap();
                    let own = own[own.len() - self.file.spec().hidden..].to_vec();
                    let history = [text, &guesses].concat();
                    let (last, start) = (&history[history.len() - 1..], history.len() - 2);
                    let next = self.pass(last, start, Mask::Causal, Some((0, &history)), &Fed::Own(vec![&own]));
                    guesses.extend(next);
                }
                guesses
            }
        };
        guesses.truncate(count);
        guesses
    }
}

/// How many guesses each step of an answer had, and how many of them were right, if a head read the whole text each time.
fn steps(
    model: &Arc<ModelFile>,
    head: &Arc<ModelFile>,
    run: Run,
    request: &Request,
    answer: &[u32],
    k: usize,
) -> Vec<(usize, usize)> {
    let text = [&request.prompt[..], answer].concat();
    let (mut known, mut steps) = (request.prompt.len() + 1, vec![]);
    while known < text.len() {
        // The token that is chosen in any case needs no guess.
        let count = k.min(text.len() - known - 1);
        if count == 0 {
            break;
        }
        let guesses = Fresh::new(model, head, run, request).guesses(&text[..known], count);
        let right = guesses.iter().zip(&text[known..]).take_while(|(guess, token)| guess == token).count();
        steps.push((guesses.len(), right));
        known += right + 1;
    }
    steps
}

/// What the engine guesses is what a head guesses that reads the whole text: alone, and where a text goes on inside a
/// block that another, which began alike, has and whose head has not read it yet.
#[test]
fn guesses_are_those_of_a_head_that_reads_the_whole_text() {
    let (mut guessed, mut right) = (0, 0);
    for (name, model) in HEADS {
        let scratch = Scratch::new("heads-fresh");
        let (file, head) = with_head(name, model, &scratch);
        let method = head.spec().guesses.as_ref().unwrap().method();
        let vocab = file.spec().vocab;
        for (run, length, before, k) in [
            (Run::Default, 5, 1, 2),
            (Run::Default, 12, 0, 3),
            (Run::Exact, 12, 1, 3),
            (Run::Default, 23, 2, 1),
            (Run::Default, 40, 3, 3),
        ] {
            let request = |seed| Request {
                prompt: (0..length).map(|j| ((j * j * 7 + 31) % vocab) as u32).collect(),
                max_tokens: 24,
                sampling: SamplingParams { temperature: 5.0, seed, ..SamplingParams::default() },
                ignore_eos: true,
                ..Request::default()
            };
            let speculation = format!("{method}:{k}").parse().unwrap();
            let options = EngineOptions { sequences: 2, speculation, ..run.engine() };
            let mut engine = engine(&file, options);
            engine.with_draft(head.clone(), options).unwrap();
            let requests = [request(3), request(4)];
            let mut events = vec![];
            let first = engine.add(requests[0].clone()).unwrap();
            for _ in 0..before {
                engine.step(&mut events).unwrap();
            }
            let second = engine.add(requests[1].clone()).unwrap();
            while engine.step(&mut events).unwrap() {}
            for (id, request) in [first, second].into_iter().zip(&requests) {
                let mut answer = vec![];
                let mut got = vec![];
                for event in &events {
                    match event {
                        Event::Token { request, id: token, .. } if *request == id => answer.push(*token),
                        Event::Guessed { request, drafted, accepted } if *request == id => {
                            got.push((*drafted, *accepted))
                        }
                        _ => {}
                    }
                }
                assert_eq!(answer.len(), request.max_tokens);
                let want = steps(&file, &head, run, request, &answer, k.min(3));
                assert_eq!(got, want, "{name}, {run:?}, {length} tokens, second after {before} steps, request {id}");
                guessed += got.iter().map(|step| step.0).sum::<usize>();
                right += got.iter().map(|step| step.1).sum::<usize>();
            }
        }
    }
    println!("{guessed} guesses, {right} right");
    assert!(guessed > 1000 && right > 50, "{guessed} {right}");
}

/// Guesses of Medusa's heads that are drawn and judged by rejection: frequencies of texts against those of plain sampling.
#[test]
fn rejection_with_medusa_leaves_frequencies_as_they_are() {
    let scratch = Scratch::new("medusa-rejection");
    let (file, head) = with_head("heads/medusa", "models/llama", &scratch);
    let (plain, _) = frequencies(&file, Speculation::OFF, None);
    let speculation = Speculation { accept: Accept::Rejection, ..("medusa:2".parse().unwrap()) };
    let (got, guesses) = frequencies(&file, speculation, Some(&head));
    same_frequencies("medusa:2", &plain, &got, guesses);
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
