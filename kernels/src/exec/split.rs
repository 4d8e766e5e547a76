//! A model on two devices: the embedding and the first layers on the CPU, the last layers and the head on a GPU, for a
//! model that is larger than the GPU's memory.
//!
//! In this order because the head is read whole for every token and is as large as several layers, while of the
//! embedding a few rows are looked up: so the faster device has the head, and tokens are chosen beside it. What crosses
//! the bus is the residual stream of each row, once, f32 `[rows][hidden]`; logits do not. The other way round the stream
//! would come back, and the slower device would compute the head.
//!
//! Each layer's keys and values are where the layer is, and a block id means the same tokens on both sides. A plan is
//! cut into the GPU's passes; the CPU computes a pass of a long prompt while the GPU is busy with the one before, and
//! otherwise they take turns. Each promises that a row does not depend on its company, so together they do, too. Each
//! has the activations that are usual there; int8 is on both, and f32, exact mode.

use std::sync::Arc;

use quern_models::{ModelFile, ModelSpec};

use super::{ChunkOutput, CpuExecutor, CpuOptions, ExecError, Executor, Fed, HeadExecutor, Plan, Ready, Ticket, check};
use crate::cuda::{CudaExecutor, CudaOptions};

/// A model on the CPU and a GPU.
pub struct SplitExecutor {
    file: Arc<ModelFile>,
    cpu: CpuExecutor,
    cuda: CudaExecutor,
    /// Layers on the CPU.
    first: usize,
    ready: Ready,
}

impl SplitExecutor {
    /// The layers from `first` on, at least one, go to the GPU; `progress` is told how many bytes of weights are done.
    /// Both sides have as many blocks.
    pub fn new(
        file: Arc<ModelFile>,
        first: usize,
        cpu: CpuOptions,
        cuda: CudaOptions,
        progress: Box<dyn FnMut(usize)>,
    ) -> Result<SplitExecutor, ExecError> {
        let layers = file.spec().layers.len();
        assert!(0 < first && first < layers, "{first} of {layers} layers on the CPU");
        assert_eq!(cpu.blocks, cuda.blocks, "a block has its slots in every layer");
        let cpu = CpuExecutor::first(file.clone(), cpu, first)?;
        let cuda = CudaExecutor::last(file.clone(), cuda, first, progress)?;
        Ok(SplitExecutor { file, cpu, cuda, first, ready: Ready::default() })
    }

    fn spec(&self) -> &ModelSpec {
        self.file.spec()
    }

    /// Where the GPU's part of a block's bytes begins: behind the CPU's.
    fn cut(&self) -> usize {
        self.cpu.block_bytes()
    }
}

impl Executor for SplitExecutor {
    fn submit(&mut self, plan: &Plan) -> Result<Ticket, ExecError> {
        check(plan, self.spec(), self.blocks())?;
        self.cuda.check_masks(plan)?;
        let outputs = self.cuda.step(plan, Some(&mut self.cpu), &Fed::Nothing)?;
        Ok(self.ready.put(outputs))
    }

    fn collect(&mut self, ticket: Ticket) -> Result<Vec<ChunkOutput>, ExecError> {
        self.ready.take(&ticket)
    }

    fn blocks(&self) -> usize {
        self.cuda.blocks()
    }

    fn copy_block(&mut self, from: u32, to: u32) -> Result<(), ExecError> {
        self.cpu.copy_block(from, to)?;
        self.cuda.copy_block(from, to)
    }

    fn move_rows(&mut self, blocks: &[u32], from: &[usize], to: usize) -> Result<(), ExecError> {
        self.cpu.move_rows(blocks, from, to)?;
        self.cuda.move_rows(blocks, from, to)
    }

    fn tree_leaves(&self) -> usize {
        self.cuda.tree_leaves()
    }

    fn block_bytes(&self) -> usize {
        self.cpu.block_bytes() + self.cuda.block_bytes()
    }

    fn read_block(&mut self, block: u32, to: &mut [u8]) -> Result<(), ExecError> {
        let (cpu, cuda) = to.split_at_mut(self.cut());
        self.cpu.read_block(block, cpu)?;
        self.cuda.read_block(block, cuda)
    }

    fn write_block(&mut self, block: u32, from: &[u8]) -> Result<(), ExecError> {
        let (cpu, cuda) = from.split_at(self.cut());
        self.cpu.write_block(block, cpu)?;
        self.cuda.write_block(block, cuda)
    }

    /// The CPU comes last: whoever leaves out the threads, which make no difference, looks for them at the end.
    fn head(&mut self, _: Arc<ModelFile>) -> Result<Box<dyn HeadExecutor>, ExecError> {
        let (expected, got) = ("a model on the CPU".into(), self.describe());
        Err(ExecError::Head { what: "needs", expected, got })
    }

    fn states(&mut self) -> Result<&[f32], ExecError> {
        Ok(&[])
    }

    fn describe(&self) -> String {
        let (first, last) = (self.first, self.spec().layers.len() - self.first);
        let s = |n: usize| if n == 1 { "" } else { "s" };
        let (cpu, cuda) = (self.cpu.describe(), self.cuda.describe());
        format!("last {last} layer{}: {cuda}; first {first} layer{}: {cpu}", s(last), s(first))
    }
}
