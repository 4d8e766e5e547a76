//! Heads of other people's layouts: what they draft, by an independent implementation, and that texts are the same with
//! them.

use std::sync::Arc;

use quern::{
    draft::{Accept, Speculation},
    engine::{Engine, EngineOptions, Generator, Request},
};
use quern_convert::{Options, convert};
use quern_kernels::{
    cpu::kv::BLOCK,
    exec::{Chunk, ChunkOutput, Executor, Fed, HeadExecutor, Mask, Output, Plan},
    sample::SamplingParams,
};
use quern_models::{ModelFile, spec::HeadKind};

use crate::support::{
    Scratch, fixture,
    golden::{Floats, Golden},
    model::{Run, answer},
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

/// The model's states of a text, `[tokens][width]`.
fn states(executor: &mut dyn Executor, text: &[u32], blocks: &[u32]) -> Vec<f32> {
    let chunk = Chunk { tokens: text, start: 0, blocks, mask: Mask::Causal, output: Output::None };
    let ticket = executor.submit(&Plan { chunks: vec![chunk] }).unwrap();
    executor.collect(ticket).unwrap();
    executor.states().unwrap().to_vec()
}

/// A head and what it has read of a text.
struct Drafter<'a> {
    head: Box<dyn HeadExecutor>,
    kind: &'a HeadKind,
    states: &'a Floats,
    blocks: Vec<u32>,
    read: usize,
}

impl Drafter<'_> {
    fn pass(&mut self, tokens: &[u32], start: usize, mask: Mask, output: Output, fed: &Fed) -> ChunkOutput {
        let chunk = Chunk { tokens, start, blocks: &self.blocks, mask, output };
        self.head.guess(&Plan { chunks: vec![chunk] }, fed).unwrap().remove(0)
    }

    /// Logits behind a text: a row for each of `ids`, which are drafted.
    fn logits(&mut self, text: &[u32], ids: &[u32]) -> Vec<f32> {
        let (read, end, width) = (self.read, text.len() - 1, self.states.cols);
        let data = self.states.data[read * width..end * width].to_vec();
        let fed = Fed::Model(vec![&data]);
        self.read = end;
        let logits = |output| match output {
            ChunkOutput::Logits(logits) => logits,
            other => panic!("{other:?}"),
        };
        if let HeadKind::Block { size, mask, .. } = *self.kind {
            self.pass(&text[read + 1..], read, Mask::Causal, Output::None, &fed);
            let mut block = vec![mask; size];
            block[0] = text[end];
            return logits(self.pass(&block, end, Mask::Full, Output::Logits { from: 1 }, &Fed::Nothing));
        }
        let from = end - read - 1;
        let mut all = logits(self.pass(&text[read + 1..], read, Mask::Causal, Output::Logits { from }, &fed));
        if matches!(self.kind, HeadKind::Medusa { .. }) {
            return all;
        }
        for (i, &id) in ids[..ids.len() - 1].iter().enumerate() {
            let own = self.head.own().unwrap();
            let own = own[own.len() - own.len() / if i == 0 { from + 1 } else { 1 }..].to_vec();
            let fed = Fed::Own(vec![&own]);
            all.extend(logits(self.pass(&[id], end + i, Mask::Causal, Output::Logits { from: 0 }, &fed)));
        }
        all
    }
}

/// Drafts after a prompt, and after a step that took one of them and something else: logits within 1e-4 of their range.
#[test]
fn drafts_are_those_of_an_independent_implementation() {
    for (name, model) in HEADS {
        let scratch = Scratch::new("heads");
        let (file, head) = with_head(name, model, &scratch);
        let golden = Golden::read(&fixture(name));
        let (tokens, want) = (golden.ids("tokens"), golden.floats("states"));
        let known = golden.json["prompt_tokens"].as_u64().unwrap() as usize + 1;
        let mut executor = Run::Exact.executor(&file, 64usize.div_ceil(BLOCK));
        let blocks: Vec<u32> = (0..64u32.div_ceil(BLOCK as u32)).collect();
        let drafter = executor.head(head.clone()).unwrap();
        let got = states(&mut *executor, &tokens[..tokens.len() - 1], &blocks);
        let apart = far(&got, &want.data);
        assert!(apart < 1e-4, "{name}: states are {apart:.1e} of their range away");
        let kind = &head.spec().guesses.as_ref().unwrap().kind;
        let mut drafter = Drafter { head: drafter, kind, states: want, blocks, read: 0 };
        for (scenario, text) in [("first", &tokens[..known]), ("second", tokens)] {
            let (ids, want) = (golden.ids(&format!("{scenario}.ids")), golden.floats(&format!("{scenario}.logits")));
            let got = drafter.logits(text, ids);
            // By the model's tokens: those that a head does not know are impossible.
            let known: Vec<f32> = got.iter().copied().filter(|l| l.is_finite()).collect();
            let apart = far(&known, &want.data);
            assert!(apart < 1e-4, "{name}, {scenario}: logits are {apart:.1e} of their range away");
            let likeliest = |row: &[f32]| (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap() as u32;
            let drafts: Vec<u32> = got.chunks_exact(file.spec().vocab).map(likeliest).collect();
            assert_eq!(drafts, ids, "{name}, {scenario}");
        }
    }
}

/// Largest difference as a share of the range.
fn far(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let (min, max) = want.iter().fold((f32::MAX, f32::MIN), |(a, b), &x| (a.min(x), b.max(x)));
    got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / (max - min)
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

/// Greedy and sampled, alone, in a batch, preempted, in chunks, after shared beginnings.
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
    assert!(tokens > 100_000 && right > 1_000 && preempted > 50, "{tokens} {right} {preempted}");
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
    let requests = requests(file.spec().vocab);
    let got = answer(&mut engine, &requests);
    assert!(got.iter().zip(&requests).take(7).all(|(got, request)| got.tokens.len() == request.max_tokens));
    assert!(engine.stats().guesses.accepted > 0);
}
