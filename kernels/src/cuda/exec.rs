//! The CUDA executor: a model on a device, its cache, and plans cut into passes of as many rows as there is room for.
//!
//! A chunk may be cut anywhere: a row's result does not depend on what it is computed with, so a pass is as good as the
//! whole. Tokens are chosen on the device and only they come back; where logits or logprobs are wanted, or a set of
//! tokens is given, logits come back and the host chooses as it does for the CPU.

mod head;
mod later;

use std::{borrow::Cow, collections::VecDeque, ops::Range, sync::Arc};

use quern_models::{ModelFile, ModelSpec, spec::Attn};

pub use self::head::CudaHead;
use self::{head::Guesses, later::Later};
use super::{
    CudaError, Device, Upload,
    acts::Form,
    batch,
    choose::{self, Ask, Choose, Chosen},
    forward::Forward,
    kv::KvPool,
    model::Model,
};
use crate::{
    cpu::kv::{BLOCK, KvType},
    exec::{
        Chunk, ChunkOutput, CpuExecutor, ExecError, Executor, Fed, HeadExecutor, Mask, Output, Plan, Ready, Ticket,
        check, check_move, kv_layers,
    },
    sample::{History, Need, SampleError, Sampled, finish, sample_allowed},
};

/// How a model is run on a device.
#[derive(Debug, Clone, Copy)]
pub struct CudaOptions {
    /// The driver's number of the device.
    pub ordinal: usize,
    /// KV blocks of 16 tokens.
    pub blocks: usize,
    /// What linear layers read.
    pub form: Form,
    /// Keys and values.
    pub kv: KvType,
    /// Rows of the largest pass wanted; no more than [`MOST_ROWS`] are taken at once.
    pub rows: usize,
    /// Blocks more, in which paths of trees are laid out; a tree with siblings needs one or two for each leaf.
    pub tree_blocks: usize,
}

/// Most rows of a pass: beyond it weights are read often enough, and buffers grow.
pub const MOST_ROWS: usize = 512;

/// Most rows whose logits are in memory at once.
pub const HEAD_ROWS: usize = 64;

/// A model on a device, or its last layers.
pub struct CudaExecutor {
    forward: Forward,
    ready: Ready,
    /// What a head reads of the rows of the last step, `[rows][width]`, but for the last pass's, which stay on the device
    /// until somebody wants them.
    states: Vec<f32>,
    /// Rows of the last pass, if its states are still there.
    waiting: usize,
    /// Steps under way, the oldest first: at most two.
    later: VecDeque<Later>,
}

/// Bytes that a model takes on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaPlan {
    /// Weights.
    pub weights: usize,
    /// Keys and values.
    pub cache: usize,
    /// Buffers of a step.
    pub scratch: usize,
}

impl CudaPlan {
    /// What an executor of the layers from `first` on will allocate.
    pub fn of(file: &ModelFile, options: &CudaOptions, first: usize) -> CudaPlan {
        let form = options.form;
        let tensors = Model::tensors(file, first).count();
        let block = CudaExecutor::block_bytes(file.spec(), options.kv, first);
        // A head runs with the code that its model brought.
        let other = if file.spec().draft_head.is_some() { OTHER_OF_HEAD } else { OTHER };
        CudaPlan {
            weights: Model::bytes(file, form, first),
            cache: block.saturating_mul(options.blocks),
            scratch: (Forward::scratch(file, form, first, rows_of(options)) + tensors * ROUNDING + other)
                .saturating_add(block.saturating_mul(options.tree_blocks)),
        }
    }

    /// Most layers, fewer than those from `first` on and at least one, that fit into so many bytes.
    pub fn fitting(file: &ModelFile, options: &CudaOptions, first: usize, bytes: usize) -> Option<usize> {
        let layers = file.spec().layers.len();
        let fits = |&first: &usize| CudaPlan::of(file, options, first).total() <= bytes;
        (first + 1..layers).find(fits).map(|first| layers - first)
    }

    /// Refuses it where it does not fit. `layers`: how many would, where it is a matter of layers, in so many bytes.
    fn check(
        &self,
        what: &'static str,
        device: &Device,
        layers: Option<&dyn Fn(usize) -> Option<usize>>,
    ) -> Result<(), CudaError> {
        let (free, total) = device.memory()?;
        if self.total() <= free {
            return Ok(());
        }
        let CudaPlan { weights, cache, scratch } = *self;
        let layers = layers.and_then(|layers| layers(free));
        Err(CudaError::Plan { what, weights, cache, scratch, free, total, layers })
    }

    /// All parts.
    pub fn total(&self) -> usize {
        self.weights.saturating_add(self.cache).saturating_add(self.scratch)
    }
}

/// What the driver rounds an allocation up by, on average.
const ROUNDING: usize = 1 << 20;

/// Code of the kernels, recorded steps, and what grows a little while serving.
const OTHER: usize = 192 << 20;

/// The same of a head beside its model: its recorded steps, at most 64 of few launches each, an estimate from above.
const OTHER_OF_HEAD: usize = 16 << 20;

fn rows_of(options: &CudaOptions) -> usize {
    options.rows.clamp(1, MOST_ROWS)
}

impl CudaExecutor {
    /// Checks that the model fits, then uploads it. `progress` is told how many bytes of weights are done.
    pub fn new(
        file: Arc<ModelFile>,
        options: CudaOptions,
        progress: Box<dyn FnMut(usize)>,
    ) -> Result<CudaExecutor, CudaError> {
        CudaExecutor::last(file, options, 0, progress)
    }

    /// The same of the layers from `first` on and the head. If that is not all, only [`CudaExecutor::step`] can compute.
    pub(crate) fn last(
        file: Arc<ModelFile>,
        options: CudaOptions,
        first: usize,
        progress: Box<dyn FnMut(usize)>,
    ) -> Result<CudaExecutor, CudaError> {
        let device = Device::open(options.ordinal)?;
        let layers = |free: usize| CudaPlan::fitting(&file, &options, first, free);
        CudaPlan::of(&file, &options, first).check("the model", &device, Some(&layers))?;
        let mut upload = Upload::new(&device, progress)?;
        let model = Model::upload(&file, options.form, first, &mut upload)?;
        drop(upload);
        let CudaOptions { blocks, tree_blocks, .. } = options;
        let kv = KvPool::with_spare(&device, &kv_layers(file.spec())[first..], blocks, tree_blocks, options.kv)?;
        let forward = Forward::new(device, file, model, kv, options.form, rows_of(&options))?;
        Ok(CudaExecutor::of(forward))
    }

    fn of(forward: Forward) -> CudaExecutor {
        CudaExecutor { forward, ready: Ready::default(), states: vec![], waiting: 0, later: VecDeque::new() }
    }

    /// Bytes of one KV block of a model's layers from `first` on.
    pub fn block_bytes(spec: &ModelSpec, kv: KvType, first: usize) -> usize {
        KvPool::block_bytes(&kv_layers(spec)[first..], kv)
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        self.forward.device()
    }

    /// Refuses chunks with masks that there is no room for.
    pub(crate) fn check_masks(&self, plan: &Plan) -> Result<(), ExecError> {
        let (rows, blocks) = (self.forward.rows(), self.forward.kv().spare().len());
        for (chunk, c) in plan.chunks.iter().enumerate().filter(|(_, c)| c.mask != Mask::Causal) {
            let bad = |what, expected: usize, got: usize| {
                Err(ExecError::Plan { chunk, what, expected: format!("at most {expected}"), got: got.to_string() })
            };
            if c.tokens.len() > rows {
                return bad("rows of a chunk with a mask, as a step has", rows, c.tokens.len());
            }
            let needs = batch::tree_blocks(&c.mask, c.start);
            if needs > blocks {
                return bad("blocks for the paths of a tree (tree_blocks of the options)", blocks, needs);
            }
        }
        Ok(())
    }

    /// Computes a checked plan. `before` has the layers in front of those here; it computes a pass while the device is
    /// busy with the one before. `fed` is what a head reads.
    pub(crate) fn step(
        &mut self,
        plan: &Plan,
        mut before: Option<&mut CpuExecutor>,
        fed: &Fed,
    ) -> Result<Vec<ChunkOutput>, CudaError> {
        let guesses = Guesses::of(self.forward.model());
        let medusa = guesses.medusa().is_some();
        let mut got: Vec<Got> = plan.chunks.iter().map(|c| Got::new(&c.output)).collect();
        self.states.clear();
        self.waiting = 0;
        for pass in passes(plan, self.forward.rows(), self.forward.kv().spare().len()) {
            let (states, rows) = wanted(plan, &pass, medusa);
            let numbers: Vec<u32> = states.iter().chain(&rows).map(|w| w.row).collect();
            let stream = before.as_mut().map(|cpu| cpu.run(&plan_of(plan, &pass)));
            // The pass takes the place of the states of the one before.
            self.fetch()?;
            self.forward.layers(plan, &pass, &numbers, stream, fed, &[])?;
            self.waiting = pass.iter().map(|part| part.tokens.len()).sum();
            self.hidden(&states, &mut got)?;
            self.tokens(plan, states.len(), &rows, &mut got)?;
        }
        Ok(got.into_iter().map(Got::done).collect())
    }

    /// Takes the model's states as what blocks that are guessed see; gives nothing back.
    pub(crate) fn context(&mut self, plan: &Plan, fed: &Fed) -> Result<Vec<ChunkOutput>, CudaError> {
        (self.states, self.waiting) = (vec![], 0);
        for pass in passes(plan, self.forward.rows(), 0) {
            self.forward.context(plan, &pass, fed)?;
        }
        Ok(plan.chunks.iter().map(|_| ChunkOutput::None).collect())
    }

    /// Copies the states of the last pass that are on the device.
    fn fetch(&mut self) -> Result<(), CudaError> {
        let rows = std::mem::take(&mut self.waiting);
        if rows == 0 { Ok(()) } else { self.forward.kept(rows, &mut self.states) }
    }

    /// Hidden states of the first of the wanted rows.
    fn hidden(&mut self, states: &[Wanted], got: &mut [Got]) -> Result<(), CudaError> {
        let hidden = self.forward.spec().hidden;
        for first in (0..states.len()).step_by(HEAD_ROWS) {
            let some = &states[first..states.len().min(first + HEAD_ROWS)];
            let values = self.forward.normed(first..first + some.len())?;
            for (wanted, values) in some.iter().zip(values.chunks_exact(hidden)) {
                got[wanted.chunk].states(values);
            }
        }
        Ok(())
    }

    /// Tokens or logits of the wanted rows from `first` on; of Medusa, all guesses.
    fn tokens(&mut self, plan: &Plan, first: usize, rows: &[Wanted], got: &mut [Got]) -> Result<(), CudaError> {
        let guesses = Guesses::of(self.forward.model()).medusa().unwrap_or(1);
        for (i, rows) in rows.chunks(HEAD_ROWS).enumerate() {
            let first = first + i * HEAD_ROWS;
            for guess in 0..guesses {
                self.forward.head(first..first + rows.len(), guess)?;
                self.choose(plan, rows, guess, got)?;
            }
        }
        Ok(())
    }

    /// Tokens or logits of rows that went through the head, or the `guess`-th of Medusa's.
    fn choose(&mut self, plan: &Plan, rows: &[Wanted], guess: usize, got: &mut [Got]) -> Result<(), CudaError> {
        let vocab = self.forward.spec().vocab;
        let guesses = Guesses::of(self.forward.model());
        let histories: Vec<Cow<[u32]>> = rows.iter().map(|r| r.history(&plan.chunks[r.chunk], guesses)).collect();
        let ask = |i: usize| rows[i].ask(&plan.chunks[rows[i].chunk], &histories[i], i, guess, guesses, vocab);
        let asks: Vec<Ask> = (0..rows.len()).filter_map(ask).collect();
        let found = match asks.is_empty() {
            true => vec![],
            false => match self.forward.choose(&asks) {
                // Many penalties need memory; without, the host chooses.
                Err(CudaError::Memory { .. }) => vec![],
                found => found?,
            },
        };
        let mut chosen = asks.iter().zip(found).peekable();
        let half = self.forward.half();
        for (i, wanted) in rows.iter().enumerate() {
            let chunk = &plan.chunks[wanted.chunk];
            let got = &mut got[wanted.chunk];
            if let Some((ask, found)) = chosen.next_if(|(ask, _)| ask.row == i) {
                let token = match choose::chosen(found, vocab) {
                    Ok(Chosen::Token(token)) => Ok(token),
                    Ok(Chosen::Host) => finish(&mut self.forward.logits(half, i)?, ask.params, ask.position),
                    Err(error) => Err(error),
                };
                got.token(token.map(|token| Guesses::of(self.forward.model()).map(plain(token))));
                continue;
            }
            let logits = self.forward.logits(half, i)?;
            let guesses = Guesses::of(self.forward.model());
            match &chunk.output {
                Output::Own { .. } => got.states(&logits),
                Output::Logits { .. } => got.states(&guesses.spread(logits)),
                _ => got.token(wanted.choose(chunk, &histories[i], guess, &mut guesses.spread(logits))),
            }
        }
        Ok(())
    }
}

fn plain(token: u32) -> Sampled {
    Sampled { token, logprob: None, top: vec![] }
}

/// Rows of a pass whose hidden states are wanted, and those of the head; of Medusa, the last of each chunk.
fn wanted(plan: &Plan, pass: &[Part], medusa: bool) -> (Vec<Wanted>, Vec<Wanted>) {
    let (mut states, mut rows) = (vec![], vec![]);
    let mut first = 0;
    for part in pass {
        let (output, len) = (&plan.chunks[part.chunk].output, plan.chunks[part.chunk].tokens.len());
        let from = match output {
            Output::Tokens { .. } | Output::Logits { .. } | Output::Own { .. } if medusa => len - 1,
            _ => output.from(len),
        };
        for token in part.tokens.clone().filter(|&i| i >= from) {
            let row = (first + token - part.tokens.start) as u32;
            let to = if matches!(output, Output::Hidden { .. }) { &mut states } else { &mut rows };
            to.push(Wanted { chunk: part.chunk, token, row });
        }
        first += part.tokens.len();
    }
    (states, rows)
}

/// A row that something is wanted of.
struct Wanted {
    chunk: usize,
    /// Index in the chunk.
    token: usize,
    /// Index in the pass.
    row: u32,
}

impl Wanted {
    /// Tokens up to the one that follows, if tokens are wanted: their number is its position.
    fn history<'a>(&self, chunk: &Chunk<'a>, guesses: Guesses) -> Cow<'a, [u32]> {
        match chunk.output {
            Output::Tokens { history, .. } => chunk.history(history, self.token, guesses.ahead()),
            _ => Cow::Borrowed(&[]),
        }
    }

    /// What to ask of the device about row `row` of the logits, with `tokens` before it, if it can choose the token.
    fn ask<'a>(
        &self,
        chunk: &'a Chunk,
        tokens: &'a [u32],
        row: usize,
        guess: usize,
        guesses: Guesses,
        vocab: usize,
    ) -> Option<Ask<'a>> {
        let Output::Tokens { params, prompt_len, logprobs, allowed, .. } = &chunk.output else { return None };
        let plain = logprobs.is_none() && allowed.is_none();
        let position = (tokens.len() + guess) as u64;
        let serves = match guesses.mapped() {
            true => Need::of(params, vocab, position, None) == Need::Best,
            false => Choose::serves(params, vocab),
        };
        let history = History { tokens, prompt_len: *prompt_len };
        (plain && serves).then_some(Ask { row, params, history, position })
    }

    fn choose(&self, chunk: &Chunk, tokens: &[u32], guess: usize, logits: &mut [f32]) -> Result<Sampled, SampleError> {
        let Output::Tokens { from, params, prompt_len, logprobs, allowed, .. } = &chunk.output else {
            unreachable!("the caller matched it")
        };
        let history = History { tokens, prompt_len: *prompt_len };
        let position = (tokens.len() + guess) as u64;
        let words = logits.len().div_ceil(32);
        let allowed = allowed.map(|a| &a[(self.token - from) * words..][..words]);
        sample_allowed(logits, params, history, position, *logprobs, allowed)
    }
}

/// What a chunk got so far.
enum Got {
    None,
    Tokens(Vec<Result<Sampled, SampleError>>),
    Logits(Vec<f32>),
    Hidden(Vec<f32>),
}

impl Got {
    fn new(output: &Output) -> Got {
        match output {
            Output::None => Got::None,
            Output::Tokens { .. } => Got::Tokens(vec![]),
            Output::Logits { .. } | Output::Own { .. } => Got::Logits(vec![]),
            Output::Hidden { .. } => Got::Hidden(vec![]),
        }
    }

    fn token(&mut self, token: Result<Sampled, SampleError>) {
        if let Got::Tokens(all) = self {
            all.push(token);
        }
    }

    fn states(&mut self, values: &[f32]) {
        if let Got::Logits(all) | Got::Hidden(all) = self {
            all.extend_from_slice(values);
        }
    }

    fn done(self) -> ChunkOutput {
        match self {
            Got::None => ChunkOutput::None,
            Got::Tokens(tokens) => ChunkOutput::Tokens(tokens),
            Got::Logits(logits) => ChunkOutput::Logits(logits),
            Got::Hidden(states) => ChunkOutput::Hidden(states),
        }
    }
}

/// Tokens of a chunk that are computed in one pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Part {
    pub chunk: usize,
    pub tokens: Range<usize>,
}

/// A pass as a plan of its own that wants nothing back.
fn plan_of<'a>(plan: &Plan<'a>, pass: &[Part]) -> Plan<'a> {
    let chunk = |part: &Part| {
        let Chunk { tokens, start, blocks, mask, .. } = plan.chunks[part.chunk];
        let (tokens, start) = (&tokens[part.tokens.clone()], start + part.tokens.start);
        Chunk { tokens, start, blocks, mask, output: Output::None }
    };
    Plan { chunks: pass.iter().map(chunk).collect() }
}

/// Cuts a plan into passes of at most `rows` rows, in order, whose trees need at most so many blocks. A chunk with a mask
/// stays whole.
fn passes(plan: &Plan, rows: usize, tree_blocks: usize) -> Vec<Vec<Part>> {
    let mut all: Vec<Vec<Part>> = vec![];
    let (mut left, mut lent) = (0, 0);
    for (chunk, c) in plan.chunks.iter().enumerate() {
        let needs = batch::tree_blocks(&c.mask, c.start);
        let whole = c.mask != Mask::Causal;
        let mut at = 0;
        while at < c.tokens.len() {
            if left == 0 || whole && (left < c.tokens.len() || lent < needs) {
                all.push(vec![]);
                (left, lent) = (rows, tree_blocks);
            }
            let count = left.min(c.tokens.len() - at);
            all.last_mut().expect("pushed above").push(Part { chunk, tokens: at..at + count });
            (at, left, lent) = (at + count, left - count, lent - needs);
        }
    }
    all
}

impl Executor for CudaExecutor {
    fn submit(&mut self, plan: &Plan) -> Result<Ticket, ExecError> {
        check(plan, self.forward.spec(), self.blocks())?;
        self.check_masks(plan)?;
        self.land_all()?;
        if let Some(ticket) = self.submit_later(plan, &[])? {
            return Ok(ticket);
        }
        let outputs = self.step(plan, None, &Fed::Nothing)?;
        Ok(self.ready.put(outputs))
    }

    fn has_next(&self) -> bool {
        self.forward.overlaps() && self.later.len() == 1 && self.later.iter().all(Later::is_known)
    }

    fn submit_next(&mut self, plan: &Plan, from: &[usize]) -> Result<Option<Ticket>, ExecError> {
        check(plan, self.forward.spec(), self.blocks())?;
        Ok(if self.has_next() { self.submit_later(plan, from)? } else { None })
    }

    fn collect(&mut self, ticket: Ticket) -> Result<Vec<ChunkOutput>, ExecError> {
        while self.later.front().is_some_and(|later| later.number <= ticket.0) {
            self.land()?;
        }
        self.ready.take(&ticket)
    }

    fn blocks(&self) -> usize {
        self.forward.kv().blocks()
    }

    fn copy_block(&mut self, from: u32, to: u32) -> Result<(), ExecError> {
        Ok(self.forward.kv_mut().copy_block(from, to)?)
    }

    fn move_rows(&mut self, blocks: &[u32], from: &[usize], to: usize) -> Result<(), ExecError> {
        check_move(blocks, from, to, self.blocks())?;
        let place = |slot: usize| blocks[slot / BLOCK] * BLOCK as u32 + (slot % BLOCK) as u32;
        let places: Vec<[u32; 2]> = from.iter().enumerate().map(|(i, &slot)| [place(slot), place(to + i)]).collect();
        Ok(self.forward.move_slots(&places)?)
    }

    /// A path of at most 16 rows needs two blocks at most, and the first one none.
    fn tree_leaves(&self) -> usize {
        1 + self.forward.kv().spare().len() / 2
    }

    fn block_bytes(&self) -> usize {
        self.forward.kv().bytes_of_block()
    }

    fn read_block(&mut self, block: u32, to: &mut [u8]) -> Result<(), ExecError> {
        Ok(self.forward.kv_mut().read_block(block, to)?)
    }

    fn write_block(&mut self, block: u32, from: &[u8]) -> Result<(), ExecError> {
        Ok(self.forward.kv_mut().write_block(block, from)?)
    }

    fn head(&mut self, file: Arc<ModelFile>) -> Result<Box<dyn HeadExecutor>, ExecError> {
        Ok(Box::new(self.head_of(file)?))
    }

    fn states(&mut self) -> Result<&[f32], ExecError> {
        self.fetch()?;
        Ok(&self.states)
    }

    fn describe(&self) -> String {
        let acts = match self.forward.form() {
            Form::F16 => "f16",
            Form::F32 => "f32",
            Form::Int8 => "int8",
        };
        let kv = self.forward.kv().kind().name();
        let info = self.device().info();
        let ((major, minor), name) = (info.capability, info.name.replace(',', " "));
        let device = format!("cuda:{} {name} {major}.{minor}, {} multiprocessors", info.ordinal, info.processors);
        format!("{acts} activations, {kv} KV, {device}")
    }
}

/// Widest row of queries, keys and values of a layer.
pub(super) fn widths(attn: &Attn) -> (usize, usize) {
    let Attn::Gqa { heads, kv_heads, head_dim, .. } = *attn;
    (heads * head_dim, kv_heads * head_dim)
}

/// Blocks of a chunk that hold a token below `end`.
pub(super) fn table<'a>(chunk: &Chunk<'a>, end: usize) -> &'a [u32] {
    &chunk.blocks[..end.div_ceil(BLOCK)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::tree_mask;

    #[test]
    fn plans_are_cut_anywhere() {
        let tokens = [0u32; 100];
        let chunk =
            |n: usize| Chunk { tokens: &tokens[..n], start: 0, blocks: &[], mask: Mask::Causal, output: Output::None };
        let plan = Plan { chunks: vec![chunk(5), chunk(1), chunk(20), chunk(6)] };
        for rows in 1..40 {
            let passes = passes(&plan, rows, 0);
            let sizes: Vec<usize> = passes.iter().map(|p| p.iter().map(|p| p.tokens.len()).sum()).collect();
            assert!(sizes[..sizes.len() - 1].iter().all(|&s| s == rows) && sizes.iter().sum::<usize>() == 32, "{rows}");
            for (i, c) in plan.chunks.iter().enumerate() {
                let parts = passes.iter().flatten().filter(|p| p.chunk == i);
                let end = parts.fold(0, |at, part| {
                    assert_eq!(part.tokens.start, at);
                    part.tokens.end
                });
                assert_eq!(end, c.tokens.len());
            }
        }
        assert!(passes(&Plan::default(), 7, 0).is_empty());
        // Trees and blocks stay whole; here each of the trees needs two blocks.
        let masks = tree_mask(&[None, Some(0), Some(0), Some(0)]);
        let masked = |n, mask| Chunk { mask, ..chunk(n) };
        let tree = || masked(4, Mask::Tree(&masks));
        let plan = Plan { chunks: vec![chunk(3), tree(), tree(), chunk(2), masked(3, Mask::Full), tree()] };
        assert_eq!(batch::tree_blocks(&Mask::Tree(&masks), 0), 2);
        let parts = |rows, blocks| -> Vec<Vec<usize>> {
            let passes = passes(&plan, rows, blocks);
            passes.iter().map(|p| p.iter().map(|p| p.tokens.len()).collect()).collect()
        };
        assert_eq!(parts(100, 6), [vec![3, 4, 4, 2, 3, 4]]);
        assert_eq!(parts(100, 3), [vec![3, 4], vec![4, 2, 3], vec![4]]);
        assert_eq!(parts(5, 9), [vec![3], vec![4], vec![4, 1], vec![1, 3], vec![4]]);
    }
}
