//! The engine: requests in, tokens out, step by step on one thread.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Instant};

use quern_kernels::{
    cpu::kv::{BLOCK, KvType},
    exec::{self, Activations, Chunk, ChunkOutput, Device, ExecError, ExecOptions, Executor, Plan},
};
use quern_models::{ModelFile, ModelSpec, spec::Attn};

use super::{
    EngineError, Event, Failure, Finish, Generator, Limits, Pooling, Request, Stats,
    active::{Active, Got},
    keep,
    memory::MemoryPlan,
    pace::Pace,
};
use crate::random;
use crate::sched::{Arrival, KvPool, Node, Scheduled, Scheduler, Step};

/// How an engine runs a model.
#[derive(Debug, Clone, Copy)]
pub struct EngineOptions {
    /// Where.
    pub device: Device,
    /// Layers on the GPU, the last ones, those before on the CPU; `None`: all.
    pub gpu_layers: Option<usize>,
    /// Threads; 0 takes the fast physical cores that this process may use.
    pub threads: usize,
    /// Longest sequence, tokens; 0 takes the model's own, at most 4096.
    pub context: usize,
    /// Most sequences at once.
    pub sequences: usize,
    /// Tokens that the KV cache holds, all sequences together; 0: as many as all sequences at full length have.
    pub cache_tokens: usize,
    /// Most tokens of one step; 0: beside answers as many of prompts as take about 50 ms, by measurement.
    pub batch_tokens: usize,
    /// What quantized weights are multiplied with; `None`: what the device usually takes.
    pub activations: Option<Activations>,
    /// Keys and values.
    pub kv: KvType,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            device: Device::Cpu,
            gpu_layers: None,
            threads: 0,
            context: 0,
            sequences: 1,
            cache_tokens: 0,
            batch_tokens: 0,
            activations: None,
            kv: KvType::F16,
        }
    }
}

impl EngineOptions {
    /// Tokens of the longest sequence.
    pub fn context_of(&self, spec: &ModelSpec) -> usize {
        if self.context == 0 { spec.max_context.min(DEFAULT_CONTEXT) } else { self.context }
    }

    /// What they say to an executor.
    pub fn exec(&self, spec: &ModelSpec) -> ExecOptions {
        let EngineOptions { device, gpu_layers, threads, activations, kv, .. } = *self;
        ExecOptions { device, threads, blocks: self.blocks_of(spec), activations, kv, rows: self.rows(), gpu_layers }
    }

    /// Tokens of the largest step: a budget that follows the machine may grow to 2048.
    pub fn rows(&self) -> usize {
        if self.batch_tokens == 0 { 2048 } else { self.batch_tokens }.max(self.sequences)
    }

    /// KV blocks.
    pub fn blocks_of(&self, spec: &ModelSpec) -> usize {
        let whole = self.context_of(spec).div_ceil(BLOCK);
        match self.cache_tokens {
            0 => whole * self.sequences.max(1),
            tokens => tokens.div_ceil(BLOCK).max(whole),
        }
    }
}

/// Why an engine could not be made.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The device cannot run it.
    #[error(transparent)]
    Exec(#[from] ExecError),
    /// An option contradicts the model.
    #[error("--ctx {asked}: the model was made for at most {most} tokens")]
    Context {
        /// Tokens asked.
        asked: usize,
        /// Tokens the model can use.
        most: usize,
    },
}

/// Continues texts with one model.
pub struct Engine {
    file: Arc<ModelFile>,
    executor: Box<dyn Executor>,
    scheduler: Scheduler,
    active: BTreeMap<u64, Active>,
    /// Events of requests that ended outside a step.
    ended: Vec<Event>,
    next: u64,
    context: usize,
    /// Makes nodes of salts that nobody outside can foresee.
    secret: u64,
    pace: Pace,
    stats: Stats,
    keep: Option<keep::Keep>,
}

impl Engine {
    /// Prepares the device for an opened file.
    pub fn new(file: Arc<ModelFile>, options: EngineOptions) -> Result<Engine, OpenError> {
        Engine::open(file, options, |_| {})
    }

    /// The same; `progress` is told how many bytes of weights went to a device that has its own memory.
    pub fn open(
        file: Arc<ModelFile>,
        options: EngineOptions,
        progress: impl FnMut(usize) + 'static,
    ) -> Result<Engine, OpenError> {
        let most = file.spec().max_context;
        if options.context > most {
            return Err(OpenError::Context { asked: options.context, most });
        }
        let executor = exec::open(file.clone(), options.exec(file.spec()), progress)?;
        Ok(Engine::with_executor(file, executor, options))
    }

    /// An engine on any device, which has its own number of blocks.
    pub fn with_executor(file: Arc<ModelFile>, executor: Box<dyn Executor>, options: EngineOptions) -> Engine {
        let pool = KvPool::new(executor.blocks(), BLOCK);
        let pace = Pace::new(options.batch_tokens);
        let scheduler = Scheduler::new(pool, pace.budget(0), options.sequences.max(1), window(file.spec()));
        let context = options.context_of(file.spec()).min(scheduler.room());
        Engine {
            file,
            executor,
            scheduler,
            active: BTreeMap::new(),
            ended: vec![],
            next: 0,
            context,
            secret: random::unforeseen(),
            pace,
            stats: Stats::default(),
            keep: None,
        }
    }

    /// Finds computed beginnings in a folder, and keeps them there when the engine closes. Returns what was found.
    pub fn keep_in(&mut self, dir: PathBuf) -> String {
        let keep = keep::Keep::new(dir, &self.file, &*self.executor);
        let note = keep.load(self.scheduler.pool_mut(), &mut *self.executor);
        self.keep = Some(keep);
        note
    }

    /// The memory that an engine needs, and the memory there is.
    pub fn memory(file: &ModelFile, options: &EngineOptions) -> MemoryPlan {
        MemoryPlan::new(file, options)
    }

    /// The model's file.
    pub fn file(&self) -> &Arc<ModelFile> {
        &self.file
    }

    /// Numeric mode, instruction set and threads.
    pub fn describe(&self) -> String {
        self.executor.describe()
    }

    /// Plans and runs one step; returns what each scheduled sequence got.
    fn run(&mut self, events: &mut Vec<Event>) -> Result<Vec<(Scheduled, ChunkOutput)>, EngineError> {
        self.scheduler.set_budget(self.pace.budget(self.scheduler.load().0));
        let step = self.scheduler.schedule();
        let at = Instant::now();
        for &(request, cached) in &step.started {
            events.push(Event::Started { request, cached, at });
        }
        let shares = self.masked(step, events)?;
        if shares.is_empty() {
            return Ok(vec![]);
        }
        let mut plan = Plan::default();
        for share in &shares {
            let s = self.scheduler.running(share.id).expect("schedule() returns running sequences");
            let end = s.computed + share.count;
            plan.chunks.push(Chunk {
                tokens: &s.tokens[s.computed..end],
                start: s.computed,
                blocks: &s.blocks,
                output: self.active[&share.id].output(*share, &s.tokens[..end]),
            });
        }
        let start = Instant::now();
        let ticket = self.executor.submit(&plan).map_err(failed)?;
        let outputs = self.executor.collect(ticket).map_err(failed)?;
        let tokens = shares.iter().map(|s| s.count).sum();
        self.stats.steps += 1;
        self.stats.computed += tokens as u64;
        let prompts = shares.iter().map(|s| s.count).filter(|&count| count > 1).sum();
        self.pace.took(tokens, prompts, start.elapsed());
        Ok(shares.into_iter().zip(outputs).collect())
    }

    /// Copies the step's blocks and asks the constraints what may come; a request whose constraint fails is out.
    fn masked(&mut self, step: Step, events: &mut Vec<Event>) -> Result<Vec<Scheduled>, EngineError> {
        for &(from, to) in &step.copies {
            self.executor.copy_block(from, to).map_err(failed)?;
        }
        let mut shares = step.shares;
        shares.retain(|share| {
            let active = self.active.get_mut(&share.id).expect("a scheduled sequence is active");
            let masked = if share.last { active.mask() } else { Ok(()) };
            if let Err(reason) = masked {
                self.scheduler.remove(share.id);
                self.active.remove(&share.id);
                events.push(Event::Failed { request: share.id, error: Failure::Constraint(reason) });
                return false;
            }
            true
        });
        Ok(shares)
    }

    /// Takes what a share gave.
    fn receive(&mut self, share: Scheduled, output: ChunkOutput, events: &mut Vec<Event>) {
        let request = share.id;
        let active = self.active.get_mut(&request).expect("a scheduled sequence is active");
        let sequence = self.scheduler.running(request).expect("it was scheduled");
        let got = match active.take(share, sequence.computed, output, &sequence.tokens) {
            Ok(got) => got,
            Err(error) => {
                self.scheduler.remove(request);
                self.active.remove(&request);
                return events.push(Event::Failed { request, error });
            }
        };
        if let Some(tokens) = active.prompt_scores() {
            events.push(Event::Prompt { request, tokens });
        }
        let sampled = match got {
            Got::Nothing => return self.scheduler.computed(share, None),
            Got::Vector(values) => {
                self.scheduler.computed(share, None);
                events.push(Event::Embedding { request, values });
                return self.finish(request, Finish::Stop, events);
            }
            Got::PromptOnly => {
                self.scheduler.computed(share, None);
                return self.finish(request, Finish::Length, events);
            }
            Got::Token(sampled) => sampled,
        };
        self.scheduler.computed(share, Some(sampled.token));
        let active = self.active.get_mut(&request).expect("as above");
        let finish = active.follow(sampled.token, self.context);
        let (id, logprob, top) = (sampled.token, sampled.logprob, sampled.top);
        events.push(Event::Token { request, id, logprob, top });
        match finish {
            Ok(None) => {}
            Ok(Some(finish)) => self.finish(request, finish, events),
            Err(reason) => {
                self.scheduler.remove(request);
                self.active.remove(&request);
                events.push(Event::Failed { request, error: Failure::Constraint(reason) });
            }
        }
    }

    fn finish(&mut self, request: u64, finish: Finish, events: &mut Vec<Event>) {
        self.scheduler.remove(request);
        self.active.remove(&request);
        events.push(Event::Finished { request, finish });
    }
}

/// Context where nothing is asked: enough for a chat, and small enough not to ask for gigabytes.
const DEFAULT_CONTEXT: usize = 4096;

fn failed(error: ExecError) -> EngineError {
    EngineError::Backend(Box::new(error))
}

/// The widest window, if every layer has one.
fn window(spec: &ModelSpec) -> Option<usize> {
    let windows = spec.layers.iter().map(|layer| {
        let Attn::Gqa { window, .. } = layer.attn;
        window
    });
    windows.reduce(|a, b| Some(a?.max(b?))).flatten()
}

impl Generator for Engine {
    fn add(&mut self, request: Request) -> Result<u64, EngineError> {
        self.limits().check(&request)?;
        let id = self.next;
        self.next += 1;
        if request.max_tokens == 0 && request.prompt_logprobs.is_none() && request.embed.is_none() {
            self.ended.push(Event::Finished { request: id, finish: Finish::Length });
            return Ok(id);
        }
        // Every token's state is wanted, so every token is computed.
        let looks_up = request.prompt_logprobs.is_none() && request.embed != Some(Pooling::Mean);
        self.scheduler.add(Arrival {
            id,
            tokens: request.prompt.clone(),
            priority: request.priority,
            root: request.cache_salt.as_ref().map_or(Node::ROOT, |salt| Node::salted(salt, self.secret)),
            looks_up,
            logits: request.prompt_logprobs.is_some(),
        });
        self.active.insert(id, Active::new(request, self.file.spec().vocab));
        Ok(id)
    }

    fn cancel(&mut self, request: u64) {
        if self.active.contains_key(&request) {
            let mut events = std::mem::take(&mut self.ended);
            self.finish(request, Finish::Cancelled, &mut events);
            self.ended = events;
        }
    }

    fn step(&mut self, events: &mut Vec<Event>) -> Result<bool, EngineError> {
        events.append(&mut self.ended);
        if self.scheduler.is_idle() {
            return Ok(false);
        }
        for (share, output) in self.run(events)? {
            self.receive(share, output, events);
        }
        Ok(!self.scheduler.is_idle())
    }

    fn max_context(&self) -> usize {
        self.context
    }

    fn limits(&self) -> Limits {
        let spec = self.file.spec();
        Limits { vocab: spec.vocab, context: self.context, hidden: spec.hidden }
    }

    fn stats(&self) -> Stats {
        let (running, waiting) = self.scheduler.load();
        let (pool, counts) = (self.scheduler.pool(), self.scheduler.counts());
        Stats {
            running,
            waiting,
            block_tokens: pool.block_tokens(),
            blocks: pool.blocks(),
            blocks_held: pool.blocks() - pool.idle(),
            preemptions: counts.preemptions,
            prefix_queries: counts.looked_up,
            prefix_hits: counts.found,
            ..self.stats
        }
    }

    fn close(&mut self) -> Result<Option<String>, EngineError> {
        let ids: Vec<u64> = self.active.keys().copied().collect();
        ids.into_iter().for_each(|id| self.cancel(id));
        let Some(keep) = &self.keep else { return Ok(None) };
        keep.save(self.scheduler.pool(), &mut *self.executor).map(Some)
    }
}
