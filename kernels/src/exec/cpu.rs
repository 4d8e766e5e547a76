//! The CPU executor: the mapped file, KV memory, a team of threads, and plans checked before use.

use std::sync::Arc;

use quern_models::{ModelFile, ModelSpec, spec::HeadKind};

use super::{
    ChunkOutput, ExecError, Executor, Fed, HeadExecutor, Plan, Ready, Ticket,
    check::{check, check_fed, check_head, check_move},
    forward::Forward,
    kv_layers,
};
use crate::{
    cores::default_threads,
    cpu::{
        acts::Mode,
        isa::Isa,
        kv::{BLOCK, KvMemory, KvType},
    },
    team::Team,
};

/// How a model is run on the CPU.
#[derive(Debug, Clone, Copy)]
pub struct CpuOptions {
    /// Threads; 0 takes [`default_threads`].
    pub threads: usize,
    /// KV blocks of 16 tokens.
    pub blocks: usize,
    /// Activations of integer weights.
    pub mode: Mode,
    /// Keys and values.
    pub kv: KvType,
}

/// A model on the CPU.
pub struct CpuExecutor {
    forward: Forward,
    /// Outputs of submitted steps that were not collected yet.
    ready: Ready,
}

impl CpuExecutor {
    /// Prepares buffers; weights stay in the mapped file.
    pub fn new(file: Arc<ModelFile>, options: CpuOptions) -> Result<CpuExecutor, ExecError> {
        let layers = file.spec().layers.len();
        CpuExecutor::first(file, options, layers)
    }

    /// The same of the embedding and the first layers, for [`CpuExecutor::run`]; all else needs all layers.
    pub(super) fn first(file: Arc<ModelFile>, options: CpuOptions, layers: usize) -> Result<CpuExecutor, ExecError> {
        let layers = &kv_layers(file.spec())[..layers];
        let bytes = KvMemory::block_bytes(layers, options.kv).saturating_mul(options.blocks);
        let memory = ExecError::Memory { bytes, blocks: options.blocks };
        let kv = KvMemory::new(layers, options.blocks, options.kv).ok_or(memory)?;
        let threads = match options.threads {
            0 => default_threads(),
            n => n,
        };
        let isa = Isa::best();
        let forward = Forward::new(file, kv, options.mode, Arc::new(Team::new(threads)), isa, isa.simd());
        Ok(CpuExecutor { forward, ready: Ready::default() })
    }

    /// Bytes of one KV block of a model.
    pub fn block_bytes(spec: &ModelSpec, kv: KvType) -> usize {
        KvMemory::block_bytes(&kv_layers(spec), kv)
    }

    /// The residual stream of a checked plan's rows behind the layers that there are, `[rows][hidden]`.
    pub(crate) fn run(&mut self, plan: &Plan) -> &[f32] {
        self.forward.run(plan)
    }

    /// Parallel regions run so far; a region costs a synchronisation of all threads.
    pub fn regions(&self) -> usize {
        self.forward.regions()
    }
}

impl Executor for CpuExecutor {
    fn submit(&mut self, plan: &Plan) -> Result<Ticket, ExecError> {
        check(plan, self.forward.spec(), self.blocks())?;
        let outputs = if plan.chunks.is_empty() { vec![] } else { self.forward.step(plan) };
        Ok(self.ready.put(outputs))
    }

    fn collect(&mut self, ticket: Ticket) -> Result<Vec<ChunkOutput>, ExecError> {
        self.ready.take(&ticket)
    }

    fn blocks(&self) -> usize {
        self.forward.kv().blocks()
    }

    fn copy_block(&mut self, from: u32, to: u32) -> Result<(), ExecError> {
        assert!((from as usize) < self.blocks() && (to as usize) < self.blocks(), "block {from} or {to}");
        // SAFETY: `&mut self`: no step is running, so nobody reads or writes either block.
        unsafe { self.forward.kv().copy_block(from, to) };
        Ok(())
    }

    fn move_rows(&mut self, blocks: &[u32], from: &[usize], to: usize) -> Result<(), ExecError> {
        check_move(blocks, from, to, self.blocks())?;
        let place = |slot: usize| (blocks[slot / BLOCK], slot % BLOCK);
        for (i, &slot) in from.iter().enumerate() {
            // SAFETY: `&mut self`: no step is running, so nobody reads or writes either slot.
            unsafe { self.forward.kv().copy_slot(place(slot), place(to + i)) };
        }
        Ok(())
    }

    fn tree_leaves(&self) -> usize {
        usize::MAX
    }

    fn block_bytes(&self) -> usize {
        self.forward.kv().bytes_of_block()
    }

    fn read_block(&mut self, block: u32, to: &mut [u8]) -> Result<(), ExecError> {
        // SAFETY: `&mut self`: no step is running, so nobody writes the block.
        unsafe { self.forward.kv().read_block(block, to) };
        Ok(())
    }

    fn write_block(&mut self, block: u32, from: &[u8]) -> Result<(), ExecError> {
        // SAFETY: `&mut self`: no step is running, so nobody reads or writes the block.
        unsafe { self.forward.kv().write_block(block, from) };
        Ok(())
    }

    fn head(&mut self, file: Arc<ModelFile>) -> Result<Box<dyn HeadExecutor>, ExecError> {
        check_head(self.forward.spec(), file.spec())?;
        let (layers, blocks, kind) = (kv_layers(file.spec()), self.blocks(), self.forward.kv().kind());
        let bytes = KvMemory::block_bytes(&layers, kind).saturating_mul(blocks);
        let head = file.spec().draft_head.as_ref().expect("checked above");
        let spare = if matches!(head.kind, HeadKind::Block { .. }) { SPARE } else { 0 };
        let kv = KvMemory::new(&layers, blocks + spare, kind).ok_or(ExecError::Memory { bytes, blocks })?;
        self.forward.keep(head.states.clone());
        let blocks = blocks as u32;
        Ok(Box::new(CpuHead { blocks, forward: self.forward.head_of(&self.forward.file().clone(), file, kv) }))
    }

    fn states(&mut self) -> Result<&[f32], ExecError> {
        Ok(self.forward.states())
    }

    fn describe(&self) -> String {
        self.forward.describe()
    }
}

/// A head of a model on the CPU. It runs on the model's threads, between its steps.
pub struct CpuHead {
    forward: Forward,
    /// The model's blocks; behind them are spare ones.
    blocks: u32,
}

/// Spare blocks: enough for a few sequences' blocks of guesses at once.
const SPARE: usize = 32;

impl HeadExecutor for CpuHead {
    fn guess(&mut self, plan: &Plan, fed: &Fed) -> Result<Vec<ChunkOutput>, ExecError> {
        check(plan, self.forward.spec(), self.forward.kv().blocks())?;
        check_fed(plan, fed, self.forward.spec())?;
        Ok(if plan.chunks.is_empty() { vec![] } else { self.forward.guess(plan, fed) })
    }

    fn tokens(&self) -> &[u32] {
        self.forward.own_tokens()
    }

    fn own(&mut self) -> Result<&[f32], ExecError> {
        Ok(self.forward.states())
    }

    fn copy_block(&mut self, from: u32, to: u32) -> Result<(), ExecError> {
        let blocks = self.forward.kv().blocks();
        assert!((from as usize) < blocks && (to as usize) < blocks, "block {from} or {to}");
        // SAFETY: `&mut self`: no pass is running, so nobody reads or writes either block.
        unsafe { self.forward.kv().copy_block(from, to) };
        Ok(())
    }

    fn tree_leaves(&self) -> usize {
        usize::MAX
    }

    fn spare(&self) -> std::ops::Range<u32> {
        self.blocks..self.forward.kv().blocks() as u32
    }
}
