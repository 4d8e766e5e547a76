//! Steps that are started before the tokens of the last one are known: the same texts.
//!
//! On the virtual GPU, which is told to work as late as it may, and on an executor that computes on the CPU but not
//! before it is asked for the results, and that now and then does not know a token that the next step was to read.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use quern::{
    draft::{Method, Speculation},
    engine::{Engine, EngineOptions, Finish, Generator, Request, Stats},
};
use quern_kernels::{
    exec::{Chunk, ChunkOutput, ExecError, Executor, HeadExecutor, Mask, Output, Plan, Ticket},
    sample::SamplingParams,
};
use quern_models::ModelFile;

use crate::support::{
    Random, Scratch, fixture,
    model::{Got, Run, answer, kept, receive},
};

const CONTEXT: usize = 160;

/// Computes a step when its results are asked for.
struct Late {
    inner: Box<dyn Executor>,
    steps: VecDeque<Step>,
    next: u64,
    random: Random,
    /// One of so many tokens is not known to the step behind.
    misses: usize,
}

struct Step {
    number: u64,
    chunks: Vec<Own>,
    /// Chunks of the step before whose tokens these read.
    from: Vec<usize>,
    /// Chunks whose token was missed.
    unknown: Vec<bool>,
}

/// A chunk, kept.
struct Own {
    tokens: Vec<u32>,
    start: usize,
    blocks: Vec<u32>,
    output: Option<(usize, SamplingParams, Vec<u32>, usize)>,
}

impl Own {
    fn of(chunk: &Chunk) -> Option<Own> {
        let output = match &chunk.output {
            Output::None => None,
            Output::Tokens { from, params, history, prompt_len, logprobs: None, allowed: None } => {
                Some((*from, (*params).clone(), history.to_vec(), *prompt_len))
            }
            _ => return None,
        };
        let Chunk { tokens, start, blocks, .. } = *chunk;
        let own = Own { tokens: tokens.to_vec(), start, blocks: blocks.to_vec(), output };
        (chunk.mask == Mask::Causal).then_some(own)
    }

    fn chunk(&self) -> Chunk<'_> {
        let output = match &self.output {
            None => Output::None,
            Some((from, params, history, prompt_len)) => {
                Output::Tokens { from: *from, params, history, prompt_len: *prompt_len, logprobs: None, allowed: None }
            }
        };
        Chunk { tokens: &self.tokens, start: self.start, blocks: &self.blocks, mask: Mask::Causal, output }
    }
}

impl Late {
    fn new(inner: Box<dyn Executor>, misses: usize) -> Late {
        // Tickets of its own, which are none of the other one's.
        Late { inner, steps: VecDeque::new(), next: 1 << 32, random: Random::new(7), misses }
    }

    fn keep(&mut self, chunks: Vec<Own>, from: Vec<usize>) -> Ticket {
        self.next += 1;
        let unknown = vec![false; chunks.len()];
        self.steps.push_back(Step { number: self.next, chunks, from, unknown });
        Ticket(self.next)
    }

    fn run(&mut self) -> Result<Vec<ChunkOutput>, ExecError> {
        let step = self.steps.pop_front().expect("a step is under way");
        let plan = Plan { chunks: step.chunks.iter().map(Own::chunk).collect() };
        let ticket = self.inner.submit(&plan)?;
        let mut outputs = self.inner.collect(ticket)?;
        let last = |output: &ChunkOutput| match output {
            ChunkOutput::Tokens(tokens) => tokens.last().and_then(|t| t.as_ref().ok()).map(|t| t.token),
            _ => None,
        };
        let mut known: Vec<Option<u32>> = outputs.iter().map(last).collect();
        for (i, &unknown) in step.unknown.iter().enumerate() {
            if unknown {
                (outputs[i], known[i]) = (ChunkOutput::Unknown, None);
            }
        }
        if self.misses > 0 {
            let random = &mut self.random;
            known.iter_mut().filter(|_| random.below(self.misses) == 0).for_each(|token| *token = None);
        }
        if let Some(next) = self.steps.front_mut() {
            for (i, &from) in next.from.iter().enumerate() {
                let token = known[from].unwrap_or(0);
                next.unknown[i] = known[from].is_none();
                next.chunks[i].tokens = vec![token];
                if let Some((_, _, history, _)) = &mut next.chunks[i].output {
                    *history.last_mut().unwrap() = token;
                }
            }
        }
        Ok(outputs)
    }
}

impl Executor for Late {
    fn submit(&mut self, plan: &Plan) -> Result<Ticket, ExecError> {
        assert!(self.steps.is_empty(), "a step is under way");
        match plan.chunks.iter().map(Own::of).collect() {
            Some(chunks) => Ok(self.keep(chunks, vec![])),
            None => self.inner.submit(plan),
        }
    }

    fn has_next(&self) -> bool {
        self.steps.len() == 1 && !self.steps[0].unknown.contains(&true)
    }

    fn submit_next(&mut self, plan: &Plan, from: &[usize]) -> Result<Option<Ticket>, ExecError> {
        assert!(self.has_next() && from.len() == plan.chunks.len());
        let chunks: Option<Vec<Own>> = plan.chunks.iter().map(Own::of).collect();
        let mut chunks = chunks.expect("plain chunks");
        for chunk in &mut chunks {
            assert_eq!(chunk.tokens.len(), 1);
            // Whoever looked at it would go wrong.
            chunk.tokens = vec![1];
        }
        Ok(Some(self.keep(chunks, from.to_vec())))
    }

    fn collect(&mut self, ticket: Ticket) -> Result<Vec<ChunkOutput>, ExecError> {
        match self.steps.front() {
            Some(step) if step.number == ticket.0 => self.run(),
            _ => self.inner.collect(ticket),
        }
    }

    fn blocks(&self) -> usize {
        self.inner.blocks()
    }

    fn copy_block(&mut self, from: u32, to: u32) -> Result<(), ExecError> {
        assert!(self.steps.is_empty(), "a step is under way");
        self.inner.copy_block(from, to)
    }

    fn move_rows(&mut self, blocks: &[u32], from: &[usize], to: usize) -> Result<(), ExecError> {
        self.inner.move_rows(blocks, from, to)
    }

    fn tree_leaves(&self) -> usize {
        self.inner.tree_leaves()
    }

    fn block_bytes(&self) -> usize {
        self.inner.block_bytes()
    }

    fn read_block(&mut self, block: u32, to: &mut [u8]) -> Result<(), ExecError> {
        self.inner.read_block(block, to)
    }

    fn write_block(&mut self, block: u32, from: &[u8]) -> Result<(), ExecError> {
        self.inner.write_block(block, from)
    }

    fn head(&mut self, file: Arc<ModelFile>) -> Result<Box<dyn HeadExecutor>, ExecError> {
        self.inner.head(file)
    }

    fn states(&mut self) -> Result<&[f32], ExecError> {
        self.inner.states()
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }
}

/// Texts of all kinds: some end with a token, some are sampled, some cannot be planned ahead.
fn requests(vocab: usize, count: usize) -> Vec<Request> {
    let mut random = Random::new(vocab as u64 + 5);
    let sampled = |seed| SamplingParams { seed, ..SamplingParams::default() };
    let request = |i: usize| {
        let seed = 300 + i as u64;
        let sampling = match i % 5 {
            0 => SamplingParams::greedy(),
            1 => sampled(seed),
            2 => SamplingParams { top_k: 20, top_p: 0.9, ..sampled(seed) },
            3 => SamplingParams { temperature: 1.5, min_p: 0.02, logit_bias: vec![(3, 2.0)], ..sampled(seed) },
            _ if i.is_multiple_of(2) => SamplingParams { repetition_penalty: 1.2, ..sampled(seed) },
            _ => SamplingParams { temperature: 0.5, ..sampled(seed) },
        };
        let length = [1, 3, 15, 16, 17, 40, 90][i % 7];
        Request {
            prompt: (0..length).map(|_| random.below(vocab) as u32).collect(),
            max_tokens: 12 + i % 50,
            sampling,
            // Some of them end early: any token may.
            stop_ids: if i.is_multiple_of(3) { (0..vocab as u32).filter(|t| t % 17 == 5).collect() } else { vec![] },
            ignore_eos: !i.is_multiple_of(3),
            ..Request::default()
        }
    };
    let mut requests: Vec<Request> = (0..count).map(request).collect();
    requests[1].prompt = requests[5].prompt.clone();
    requests
}

/// Some at once, others while those run; some are given up. Then everything again, from the cache.
fn all(engine: &mut Engine, requests: &[Request], seed: u64) -> (Vec<Got>, Stats) {
    let mut random = Random::new(seed);
    let mut answers = vec![Got::default(); requests.len()];
    let mut index: HashMap<u64, usize> = HashMap::new();
    let mut given_up: Vec<u64> = vec![];
    let mut waiting = requests.iter().enumerate();
    for step in 0.. {
        // Long pauses, so that there are steps in which nobody comes.
        let come = if step % 23 == 0 { 1 + random.below(5) } else { 0 };
        for (i, request) in waiting.by_ref().take(come) {
            index.insert(engine.add(request.clone()).unwrap(), i);
            if random.below(3) == 0 {
                let other = Request { prompt: request.prompt[..1].to_vec(), ..request.clone() };
                given_up.push(engine.add(other).unwrap());
            }
        }
        if step % 11 == 7
            && let Some(id) = given_up.pop()
        {
            engine.cancel(id);
            given_up.clear();
        }
        let mut events = vec![];
        let more = engine.step(&mut events).unwrap();
        events.retain_mut(|event| index.contains_key(event.request_mut()));
        receive(events, &mut answers, |id| index[&id]);
        if !more && answers.iter().all(|a| a.finish.is_some()) {
            break;
        }
        assert!(step < 10_000, "the engine does not come to an end");
    }
    let stats = engine.stats();
    assert_eq!((stats.running, stats.waiting, stats.blocks_held), (0, 0, 0), "{stats:?}");
    (answers, stats)
}

/// The answers without steps ahead: those with logprobs have none.
fn alone(mut engine: Engine, requests: &[Request]) -> Vec<Got> {
    let plain = |r: &Request| Request { logprobs: Some(0), speculation: Some(Speculation::OFF), ..r.clone() };
    let answers = requests.iter().map(|r| answer(&mut engine, &[plain(r)]).remove(0));
    let answers = answers.map(|got| Got { logprobs: vec![], ..got }).collect();
    assert_eq!(engine.stats().overlapped, 0);
    answers
}

fn same(what: &str, requests: &[Request], got: &[Got], want: &[Got]) {
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got, want, "{what}: request {i} {:?}", requests[i].sampling);
    }
}

#[test]
fn texts_are_the_same_when_steps_overlap() {
    let scratch = Scratch::new("overlap");
    let (_, file) = kept(&fixture("models/llama-gptq-w4-g64-asym"), &scratch);
    let run = Run::Default;
    let options = EngineOptions { context: CONTEXT, ..run.engine() };
    let requests = requests(file.spec().vocab, 60);
    let want = alone(Engine::new(file.clone(), options).unwrap(), &requests);
    let ended = want.iter().filter(|got| got.finish == Some(Finish::Stop)).count();
    assert!((5..40).contains(&ended), "{ended} texts end with a token");
    let tokens: usize = want.iter().map(|got| got.tokens.len()).sum();
    let mut compared = 0;
    let auto = Speculation { method: Method::Auto, ..Speculation::OFF };
    for (sequences, blocks, misses, speculation) in [
        (1, 16, 0, Speculation::OFF),
        (4, 60, 0, Speculation::OFF),
        (8, 200, 0, Speculation::OFF),
        // So few blocks that some start again.
        (6, 16, 0, Speculation::OFF),
        (8, 200, 5, Speculation::OFF),
        (6, 18, 3, Speculation::OFF),
        (4, 200, 0, auto),
        (8, 40, 6, auto),
    ] {
        let options = EngineOptions { sequences, speculation, ..options };
        let late = Late::new(run.executor(&file, blocks), misses);
        let mut engine = Engine::with_executor(file.clone(), Box::new(late), options);
        for round in 0..2 {
            let before = engine.stats();
            let (got, stats) = all(&mut engine, &requests, 31 * round + sequences as u64);
            let what = format!("{sequences} at once, {blocks} blocks, misses {misses}, {:?}", speculation.method);
            same(&what, &requests, &got, &want);
            compared += tokens;
            let (steps, overlapped) = (stats.steps - before.steps, stats.overlapped - before.overlapped);
            println!("{what}: {overlapped} of {steps} steps overlapped, {} started again", stats.preemptions);
            // How often texts are guessed instead depends on the machine's times.
            let least = if speculation.method == Method::Off { steps / 8 } else { 0 };
            assert!(overlapped > least, "{what}: {overlapped} of {steps}");
            assert!(blocks > 18 || sequences == 1 || stats.preemptions > 0, "{what}");
        }
    }
    println!("{compared} tokens");
}

/// Where the device leaves a choice to the host, the step behind has read another token, and is done again.
#[test]
fn choices_of_the_host_are_no_obstacle() {
    let gpu = quern_vgpu::load();
    gpu.set("check", "fatal");
    let scratch = Scratch::new("overlap-host");
    let (_, file) = kept(&fixture("models/smollm2-gptq-2layer"), &scratch);
    // So many tokens are possible that the device cannot sort them.
    let wild = |seed| SamplingParams { temperature: 8.0, top_p: 0.99, seed, ..SamplingParams::default() };
    let request = |i: u64| Request {
        prompt: vec![10 + i as u32, 400, 7],
        max_tokens: 6,
        sampling: if i == 1 { SamplingParams::greedy() } else { wild(i) },
        ignore_eos: true,
        ..Request::default()
    };
    let requests: Vec<Request> = (0..3).map(request).collect();
    let options = EngineOptions { context: 32, sequences: 3, ..Run::GpuDefault.engine() };
    let want = alone(Engine::new(file.clone(), options).unwrap(), &requests);
    let mut engine = Engine::new(file, options).unwrap();
    same("with choices of the host", &requests, &answer(&mut engine, &requests), &want);
    let stats = engine.stats();
    assert!(stats.overlapped >= 3 && stats.computed > 9 + 3 * 5, "nothing was done again: {stats:?}");
    assert_eq!(gpu.reports(), Vec::<String>::new());
}

/// On a device that works as late as it may, a step whose numbers are changed or read too early gives other texts.
#[test]
fn texts_are_the_same_when_steps_overlap_on_the_gpu() {
    let gpu = quern_vgpu::load();
    gpu.set("check", "fatal");
    gpu.set("lazy", "1");
    let scratch = Scratch::new("overlap-gpu");
    let (_, file) = kept(&fixture("models/llama-gptq-w4-g64-asym"), &scratch);
    let options = EngineOptions { context: CONTEXT, ..Run::GpuDefault.engine() };
    let requests = requests(file.spec().vocab, 12);
    let want = alone(Engine::new(file.clone(), options).unwrap(), &requests);
    for sequences in [1, 5] {
        let options = EngineOptions { sequences, ..options };
        let mut engine = Engine::new(file.clone(), options).unwrap();
        let (got, stats) = all(&mut engine, &requests, 3);
        same("on the GPU", &requests, &got, &want);
        println!("{sequences} at once: {} of {} steps overlapped", stats.overlapped, stats.steps);
        assert!(stats.overlapped * 4 > stats.steps, "{stats:?}");
    }
    gpu.set("lazy", "0");
    assert_eq!(gpu.reports(), Vec::<String>::new());
}
