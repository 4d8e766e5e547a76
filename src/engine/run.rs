//! The engine: requests in, tokens out, step by step on one thread.

use std::{collections::BTreeMap, sync::Arc};

use quern_kernels::{
    cpu::{
        acts::Mode,
        kv::{BLOCK, KvType},
    },
    exec::{Chunk, ChunkOutput, CpuExecutor, CpuOptions, ExecError, Executor, Output, Plan},
};
use quern_models::ModelFile;

use super::{EngineError, Event, Finish, Generator, Limits, Request};
use crate::sched::{KvPool, Scheduler};

/// How an engine runs a model.
#[derive(Debug, Clone, Copy)]
pub struct EngineOptions {
    /// Threads; 0 takes the fast physical cores that this process may use.
    pub threads: usize,
    /// Longest sequence, tokens; 0 takes the model's own, at most 4096.
    pub context: usize,
    /// Sequences at once; the KV cache has room for this many of full length.
    pub sequences: usize,
    /// Tokens of one step: prompts are computed in chunks of at most this many.
    pub batch_tokens: usize,
    /// Activations of integer weights: int8 (default mode) or f32 (exact mode).
    pub activations: Mode,
    /// Keys and values.
    pub kv: KvType,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            threads: 0,
            context: 0,
            sequences: 1,
            batch_tokens: 512,
            activations: Mode::Int8,
            kv: KvType::F16,
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
}

/// A request in progress.
struct Active {
    request: Request,
    /// Tokens generated.
    generated: usize,
}

impl Engine {
    /// Prepares the CPU for an opened file.
    pub fn new(file: Arc<ModelFile>, options: EngineOptions) -> Result<Engine, OpenError> {
        let most = file.spec().max_context;
        if options.context > most {
            return Err(OpenError::Context { asked: options.context, most });
        }
        let context = if options.context == 0 { most.min(DEFAULT_CONTEXT) } else { options.context };
        let sequences = options.sequences.max(1);
        let blocks = context.div_ceil(BLOCK) * sequences;
        let cpu = CpuOptions { threads: options.threads, blocks, mode: options.activations, kv: options.kv };
        let executor = Box::new(CpuExecutor::new(file.clone(), cpu)?);
        Ok(Engine::with_executor(file, executor, context, options.batch_tokens, sequences))
    }

    /// An engine on any device.
    pub fn with_executor(
        file: Arc<ModelFile>,
        executor: Box<dyn Executor>,
        context: usize,
        batch_tokens: usize,
        sequences: usize,
    ) -> Engine {
        let pool = KvPool::new(executor.blocks(), BLOCK);
        let scheduler = Scheduler::new(pool, batch_tokens.max(sequences), sequences);
        let context = context.min(scheduler.room());
        Engine { file, executor, scheduler, active: BTreeMap::new(), ended: vec![], next: 0, context }
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
    fn run(&mut self) -> Result<Vec<(crate::sched::Scheduled, ChunkOutput)>, EngineError> {
        let step = self.scheduler.schedule();
        let mut plan = Plan::default();
        for share in &step {
            let s = self.scheduler.running(share.id).expect("schedule() returns running sequences");
            let active = &self.active[&share.id];
            let end = s.computed + share.count;
            let output = if share.last {
                Output::Tokens {
                    from: share.count - 1,
                    params: &active.request.sampling,
                    history: &s.tokens[..end],
                    prompt_len: active.request.prompt.len(),
                    logprobs: active.request.logprobs,
                }
            } else {
                Output::None
            };
            plan.chunks.push(Chunk {
                tokens: &s.tokens[s.computed..end],
                start: s.computed,
                blocks: &s.blocks,
                output,
            });
        }
        let failed = |e| EngineError::Backend(Box::new(e));
        let ticket = self.executor.submit(&plan).map_err(failed)?;
        let outputs = self.executor.collect(ticket).map_err(failed)?;
        Ok(step.into_iter().zip(outputs).collect())
    }

    fn finish(&mut self, request: u64, finish: Finish, events: &mut Vec<Event>) {
        self.scheduler.remove(request);
        self.active.remove(&request);
        events.push(Event::Finished { request, finish });
    }
}

/// Context where nothing is asked: enough for a chat, and small enough not to ask for gigabytes.
const DEFAULT_CONTEXT: usize = 4096;

impl Generator for Engine {
    fn add(&mut self, request: Request) -> Result<u64, EngineError> {
        self.limits().check(&request)?;
        let id = self.next;
        self.next += 1;
        if request.max_tokens == 0 {
            self.ended.push(Event::Finished { request: id, finish: Finish::Length });
            return Ok(id);
        }
        self.scheduler.add(id, request.prompt.clone());
        self.active.insert(id, Active { request, generated: 0 });
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
        for (share, output) in self.run()? {
            let tokens = match output {
                ChunkOutput::Tokens(Ok(tokens)) => tokens,
                ChunkOutput::Tokens(Err(error)) => {
                    self.scheduler.remove(share.id);
                    self.active.remove(&share.id);
                    events.push(Event::Failed { request: share.id, error: error.into() });
                    continue;
                }
                ChunkOutput::None | ChunkOutput::Logits(_) => vec![],
            };
            let Some(sampled) = tokens.into_iter().next() else {
                self.scheduler.computed(share, None);
                continue;
            };
            self.scheduler.computed(share, Some(sampled.token));
            let active = self.active.get_mut(&share.id).expect("a running sequence is active");
            active.generated += 1;
            let r = &active.request;
            let stopped = !r.ignore_eos && r.stop_ids.contains(&sampled.token);
            let finish = if stopped {
                Some(Finish::Stop)
            } else if active.generated >= r.max_tokens {
                Some(Finish::Length)
            } else if r.prompt.len() + active.generated >= self.context {
                Some(Finish::Context)
            } else {
                None
            };
            let (id, logprob, top) = (sampled.token, sampled.logprob, sampled.top);
            events.push(Event::Token { request: share.id, id, logprob, top });
            if let Some(finish) = finish {
                self.finish(share.id, finish, events);
            }
        }
        Ok(!self.scheduler.is_idle())
    }

    fn max_context(&self) -> usize {
        self.context
    }

    fn limits(&self) -> Limits {
        Limits { vocab: self.file.spec().vocab, context: self.context }
    }
}
