//! The engine: requests in, tokens out, step by step on one thread.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Instant};

use quern_kernels::{
    cpu::kv::BLOCK,
    exec::{self, Chunk, ChunkOutput, ExecError, ExecOptions, Executor, Plan},
    sample::Sampled,
};
use quern_models::{ModelFile, ModelSpec, spec::Attn};

use super::{
    EngineError, Event, Failure, Finish, Generator, Limits, Pooling, Request, Stats,
    active::{Active, Got},
    ahead::{self, Ahead, Guesser, written_places},
    flight::Flight,
    head::Head,
    keep,
    memory::MemoryPlan,
    options::{EngineOptions, OpenError},
    pace::Pace,
    small::Small,
    writer::{Asked, Writer, Written},
};
use crate::draft::{Guess, Past, Speculation};
use crate::random;
use crate::sched::{Arrival, KvPool, LOGIT_ROWS, Node, Scheduled, Scheduler, Step};

/// Continues texts with one model.
pub struct Engine {
    file: Arc<ModelFile>,
    pub(super) executor: Box<dyn Executor>,
    pub(super) scheduler: Scheduler,
    pub(super) active: BTreeMap<u64, Active>,
    /// Events of requests that ended outside a step.
    ended: Vec<Event>,
    next: u64,
    pub(super) context: usize,
    /// Makes nodes of salts that nobody outside can foresee.
    secret: u64,
    pub(super) pace: Pace,
    pub(super) guesser: Guesser,
    /// What guesses besides, if there is something.
    pub(super) writer: Option<Box<dyn Writer>>,
    pub(super) stats: Stats,
    keep: Option<keep::Keep>,
    /// A step that was submitted and not collected.
    pub(super) flight: Option<Flight>,
    /// When the last step was collected.
    pub(super) landed: Instant,
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
        let mut guesser = Guesser::new(options.speculation);
        guesser.leaves = executor.tree_leaves();
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
            guesser,
            writer: None,
            stats: Stats::default(),
            keep: None,
            flight: None,
            landed: Instant::now(),
        }
    }

    /// Takes a file to guess from: a small model with the same tokens, or a head of this model.
    pub fn with_draft(&mut self, file: Arc<ModelFile>, options: EngineOptions) -> Result<(), OpenError> {
        if window(self.file.spec()).is_some() {
            return Err(OpenError::Draft(
                "a model whose layers all have a window gives blocks back that the draft needs",
            ));
        }
        let (vocab, spec) = (self.file.spec().vocab, file.spec().clone());
        if spec.draft_head.is_some() {
            let head = Head::new(self.executor.head(file)?, &spec);
            self.guesser.writer = Some(head.ability());
            self.writer = Some(Box::new(head));
            return Ok(());
        }
        let blocks = self.executor.blocks();
        let options = ExecOptions { blocks, gpu_layers: None, ..options.exec(file.spec()) };
        let executor = exec::open(file, options, |_| {})?;
        let small = Small::new(executor, &spec, vocab);
        self.guesser.writer = Some(small.ability());
        self.writer = Some(Box::new(small));
        Ok(())
    }

    /// Finds computed beginnings in a folder, and keeps them there when the engine closes. Returns what was found.
    pub fn keep_in(&mut self, dir: PathBuf) -> String {
        let keep = keep::Keep::new(dir, &self.file, &*self.executor);
        let note = keep.load(self.scheduler.pool_mut(), &mut *self.executor);
        self.keep = Some(keep);
        note
    }

    /// Exchanges the answers of the past, from which others are guessed, for other ones.
    pub fn exchange_past(&mut self, past: &mut Past) {
        std::mem::swap(&mut self.guesser.past, past);
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

    /// Plans and starts one step; `None`: there is nothing to do.
    fn start(&mut self, events: &mut Vec<Event>) -> Result<Option<Flight>, EngineError> {
        let budget = self.pace.budget(self.scheduler.load().0);
        self.scheduler.set_budget(budget);
        let guesses = self.guesser.guess(&self.scheduler, &mut self.active, budget, self.context);
        let room = |id| guesses.get(&id).map_or(0, Guess::room);
        let step = self.scheduler.schedule(room);
        let at = Instant::now();
        for &(request, cached) in &step.started {
            events.push(Event::Started { request, cached, at });
        }
        let shares = self.masked(step, guesses, events)?;
        if shares.is_empty() {
            return Ok(None);
        }
        let start = Instant::now();
        let plan = plan(&self.scheduler, &self.active, &shares);
        let ticket = self.executor.submit(&plan).map_err(failed)?;
        Ok(Some(Flight { ticket, shares, start, asked: true, told: false }))
    }

    /// Copies the step's blocks, asks the constraints what may come, and puts guesses behind the texts that have room for
    /// them. A request whose constraint fails is out.
    fn masked(
        &mut self,
        step: Step,
        mut guesses: BTreeMap<u64, Guess>,
        events: &mut Vec<Event>,
    ) -> Result<Vec<Scheduled>, EngineError> {
        for &(from, to) in &step.copies {
            self.executor.copy_block(from, to).map_err(failed)?;
            if let Some(Err(error)) = self.writer.as_mut().map(|writer| writer.copy_block(&self.scheduler, from, to)) {
                self.without_writer(&error);
            }
        }
        let mut shares = step.shares;
        if let Err(error) = self.write(&shares, &mut guesses) {
            self.without_writer(&error);
        }
        shares.retain_mut(|share| {
            let active = self.active.get_mut(&share.id).expect("a scheduled sequence is active");
            if !share.last {
                return true;
            }
            let mut guess = guesses.remove(&share.id).unwrap_or_default();
            let room: Vec<bool> = (0..guess.tokens.len()).map(|i| i < share.guesses).collect();
            guess.keep(&room);
            let written = !guess.tokens.is_empty() && guess.places.first().is_some_and(|place| place.is_written());
            match active.mask(&mut guess) {
                Ok(()) => {
                    if written && guess.tokens.is_empty() {
                        self.guesser.wasted(active.ahead_mut());
                    }
                    *share = self.scheduler.guess(*share, &guess.tokens);
                    active.ahead_mut().expects(guess, share.count - share.guesses);
                    true
                }
                Err(reason) => {
                    self.scheduler.remove(share.id);
                    self.active.remove(&share.id);
                    events.push(Event::Failed { request: share.id, error: Failure::Constraint(reason) });
                    false
                }
            }
        });
        Ok(shares)
    }

    /// Lets the writer read what is computed, and write the guesses that are wanted of it.
    fn write(&mut self, shares: &[Scheduled], guesses: &mut BTreeMap<u64, Guess>) -> Result<(), ExecError> {
        let Some(writer) = &mut self.writer else { return Ok(()) };
        let method = writer.ability().method;
        let mut asked = vec![];
        for share in shares {
            let active = &self.active[&share.id];
            if let Some((params, prompt_len, from)) = active.written(method) {
                let guess = guesses.get(&share.id);
                let wanted =
                    guess.filter(|guess| guess.to_write > 0).map_or(0, |guess| guess.room().min(share.guesses));
                // Others' guesses may have the room.
                let share = Scheduled { count: share.count - share.guesses + wanted, guesses: wanted, ..*share };
                let depth = guess.map_or(0, |guess| guess.to_write.min(wanted));
                let shape = guess.and_then(|guess| guess.shape);
                asked.push(Asked { share, depth, shape, params, prompt_len, from });
            }
        }
        let of = |asked: &Asked| (asked.share.id, asked.share.guesses);
        let wanted: BTreeMap<u64, usize> = asked.iter().map(of).collect();
        let mut trees = vec![];
        for (id, written) in writer.write(&self.scheduler, &asked)? {
            let guess = guesses.entry(id).or_default();
            let active = &self.active[&id];
            match written {
                Written::Chain(tokens, _) if tokens.is_empty() => {}
                Written::Chain(tokens, from) => {
                    guess.places = written_places(tokens.len()).collect();
                    // Where the text may end, nothing need be guessed; but a guess that was drawn must not be kept back for
                    // what it is, or the others would be drawn from something else.
                    let end = tokens.iter().position(|&token| active.ends(token)).filter(|_| from.is_empty());
                    guess.tokens = tokens;
                    guess.tokens.truncate(end.unwrap_or(guess.tokens.len()));
                    guess.from = from;
                }
                Written::Tree(mut tree) => {
                    tree.without(|token| active.ends(token));
                    trees.push(ahead::Written { id, tree, room: wanted[&id] });
                }
            }
        }
        self.guesser.writer = Some(writer.ability());
        if !trees.is_empty() {
            let written = |id: &u64| trees.iter().any(|written| written.id == *id);
            let others = guesses.iter().filter(|(id, _)| !written(id)).map(|(_, guess)| guess.tokens.len()).sum();
            guesses.extend(self.guesser.choose(trees, others, LOGIT_ROWS, &mut self.active));
        }
        Ok(())
    }

    /// Goes on without the writer: what it fails at is no text's fault.
    fn without_writer(&mut self, error: &ExecError) {
        let method = self.guesser.writer.map_or("draft", |writer| writer.method.name());
        eprintln!("guessing ({method}) failed, going on without: {}", crate::text::printable(&error.to_string()));
        (self.writer, self.guesser.writer) = (None, None);
    }

    /// Takes what a share gave. `told`: the scheduler has been told that it was computed, and not yet of the token.
    pub(super) fn receive(
        &mut self,
        share: Scheduled,
        output: ChunkOutput,
        told: bool,
        events: &mut Vec<Event>,
    ) -> Result<(), EngineError> {
        let request = share.id;
        let active = self.active.get_mut(&request).expect("a scheduled sequence is active");
        let sequence = self.scheduler.running(request).expect("it was scheduled");
        let got = match active.take(share, sequence.computed, output, &sequence.tokens) {
            Ok(got) => got,
            Err(error) => {
                self.scheduler.remove(request);
                self.active.remove(&request);
                events.push(Event::Failed { request, error });
                return Ok(());
            }
        };
        if let Some(tokens) = active.prompt_scores() {
            events.push(Event::Prompt { request, tokens });
        }
        let (sampled, error, path) = match got {
            Got::Nothing => {
                self.scheduler.computed(share, &[]);
                return Ok(());
            }
            Got::Vector(values) => {
                self.scheduler.computed(share, &[]);
                events.push(Event::Embedding { request, values });
                self.finish(request, Finish::Stop, events);
                return Ok(());
            }
            Got::PromptOnly => {
                self.scheduler.computed(share, &[]);
                self.finish(request, Finish::Length, events);
                return Ok(());
            }
            Got::Tokens { next, error, path } => (next, error, path),
        };
        let (drafted, accepted) = (share.guesses, path.len());
        if drafted > 0 {
            self.together(share, &path)?;
            let active = self.active.get_mut(&request).expect("as above");
            self.guesser.checked(active.ahead_mut(), drafted, &path);
            events.push(Event::Guessed { request, drafted, accepted });
        }
        let active = self.active.get_mut(&request).expect("as above");
        let mut tokens = vec![];
        let mut end = None;
        for Sampled { token: id, logprob, top } in sampled {
            tokens.push(id);
            events.push(Event::Token { request, id, logprob, top });
            match active.follow(id, self.context) {
                Ok(None) => {}
                Ok(Some(finish)) => end = Some(Ok(finish)),
                Err(reason) => end = Some(Err(Failure::Constraint(reason))),
            }
            // What was guessed beyond the end is none of the text.
            if end.is_some() {
                break;
            }
        }
        match tokens[..] {
            [token] if told => self.scheduler.known(request, token),
            // One that has failed goes, without its unknown token.
            _ if told => {}
            _ => self.scheduler.computed(share, &tokens),
        }
        match end.or(error.map(|error| Err(error.into()))) {
            None => {}
            Some(Ok(finish)) => self.finish(request, finish, events),
            Some(Err(error)) => {
                self.scheduler.remove(request);
                self.active.remove(&request);
                events.push(Event::Failed { request, error });
            }
        }
        Ok(())
    }

    /// Moves what was computed of a path of guesses together, behind the text.
    fn together(&mut self, share: Scheduled, path: &[usize]) -> Result<(), EngineError> {
        let sequence = self.scheduler.running(share.id).expect("it was scheduled");
        let first = sequence.computed + share.count - share.guesses;
        // The best path lies right.
        let right = path.iter().enumerate().take_while(|(i, guess)| i == *guess).count();
        let from: Vec<usize> = path[right..].iter().map(|guess| first + guess).collect();
        if from.is_empty() {
            return Ok(());
        }
        self.executor.move_rows(&sequence.blocks, &from, first + right).map_err(failed)?;
        if let Some(writer) = &mut self.writer {
            writer.moved(share.id, &from, first + right);
        }
        Ok(())
    }

    fn finish(&mut self, request: u64, finish: Finish, events: &mut Vec<Event>) {
        if let (Some(active), Some(sequence)) = (self.active.get(&request), self.scheduler.running(request)) {
            let known = sequence.tokens.len();
            self.guesser.ended(active.ahead(), &sequence.tokens[known - active.generated()..]);
        }
        self.scheduler.remove(request);
        self.active.remove(&request);
        events.push(Event::Finished { request, finish });
    }
}

pub(super) fn failed(error: ExecError) -> EngineError {
    EngineError::Backend(Box::new(error))
}

/// What the executor is to do for the shares of a step.
pub(super) fn plan<'a>(scheduler: &'a Scheduler, active: &'a BTreeMap<u64, Active>, shares: &[Scheduled]) -> Plan<'a> {
    let chunk = |share: &Scheduled| {
        let s = scheduler.running(share.id).expect("schedule() returns running sequences");
        let end = s.computed + share.count;
        let active = &active[&share.id];
        Chunk {
            tokens: &s.tokens[s.computed..end],
            start: s.computed,
            blocks: &s.blocks,
            mask: active.ahead().mask(share.guesses),
            output: active.output(*share, &s.tokens[..end]),
        }
    };
    Plan { chunks: shares.iter().map(chunk).collect() }
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
        let usual = self.guesser.speculation;
        // The rule is the engine's in any case.
        let speculation = Speculation { accept: usual.accept, ..request.speculation.unwrap_or(usual) };
        let ahead = Ahead::new(speculation, request.shares.unwrap_or(request.cache_salt.is_none()));
        self.active.insert(id, Active::new(request, self.file.spec().vocab, ahead));
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
        let flight = match self.flight.take() {
            None if self.scheduler.is_idle() => return Ok(false),
            None => self.start(events)?,
            flight => flight,
        };
        if let Some(mut flight) = flight {
            let next = self.next(&mut flight)?;
            self.land(flight, events)?;
            self.flight = next;
        }
        if self.scheduler.is_idle() {
            self.forget()?;
            return Ok(false);
        }
        Ok(true)
    }

    fn max_context(&self) -> usize {
        self.context
    }

    fn limits(&self) -> Limits {
        let spec = self.file.spec();
        let writer = self.guesser.writer.map(|writer| writer.method);
        Limits { vocab: spec.vocab, context: self.context, hidden: spec.hidden, writer }
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
            guesses: self.guesser.counts,
            ..self.stats
        }
    }

    fn close(&mut self) -> Result<Option<String>, EngineError> {
        let ids: Vec<u64> = self.active.keys().copied().collect();
        ids.into_iter().for_each(|id| self.cancel(id));
        self.forget()?;
        let Some(keep) = &self.keep else { return Ok(None) };
        keep.save(self.scheduler.pool(), &mut *self.executor).map(Some)
    }
}
