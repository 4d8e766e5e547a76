//! The CPU executor: the mapped file, KV memory, a team of threads, and plans checked before use.

use std::{collections::BTreeMap, sync::Arc};

use quern_models::{ModelFile, ModelSpec, spec::Attn};

use super::{ChunkOutput, ExecError, Executor, NO_BLOCK, Output, Plan, Ticket, forward::Forward};
use crate::{
    cores::default_threads,
    cpu::{
        acts::Mode,
        isa::Isa,
        kv::{BLOCK, KvLayer, KvMemory, KvType},
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
    ready: BTreeMap<u64, Vec<ChunkOutput>>,
    next: u64,
}

impl CpuExecutor {
    /// Prepares buffers; weights stay in the mapped file.
    pub fn new(file: Arc<ModelFile>, options: CpuOptions) -> Result<CpuExecutor, ExecError> {
        let spec = file.spec();
        let layers = kv_layers(spec);
        let bytes = KvMemory::block_bytes(&layers, options.kv).saturating_mul(options.blocks);
        let memory = ExecError::Memory { bytes, blocks: options.blocks };
        let kv = KvMemory::new(&layers, options.blocks, options.kv).ok_or(memory)?;
        let threads = match options.threads {
            0 => default_threads(),
            n => n,
        };
        let isa = Isa::best();
        let forward = Forward::new(file, kv, options.mode, Team::new(threads), isa, isa.simd());
        Ok(CpuExecutor { forward, ready: BTreeMap::new(), next: 0 })
    }

    /// Bytes of one KV block of a model.
    pub fn block_bytes(spec: &ModelSpec, kv: KvType) -> usize {
        KvMemory::block_bytes(&kv_layers(spec), kv)
    }

    /// Parallel regions run so far; a region costs a synchronisation of all threads.
    pub fn regions(&self) -> usize {
        self.forward.regions()
    }

    fn check(&self, plan: &Plan) -> Result<(), ExecError> {
        let (vocab, positions) = (self.forward.spec().vocab, self.forward.spec().positions);
        for (chunk, c) in plan.chunks.iter().enumerate() {
            let bad = |what, expected: String, got: String| Err(ExecError::Plan { chunk, what, expected, got });
            if c.tokens.is_empty() {
                return bad("tokens", "at least 1".into(), "0".into());
            }
            if let Some(t) = c.tokens.iter().find(|&&t| t as usize >= vocab) {
                return bad("token", format!("below {vocab}"), t.to_string());
            }
            if let Some(rows) = positions.filter(|&rows| c.start + c.tokens.len() > rows) {
                return bad("position", format!("below {rows}"), (c.start + c.tokens.len() - 1).to_string());
            }
            let needed = (c.start + c.tokens.len()).div_ceil(BLOCK);
            if c.blocks.len() < needed {
                return bad("blocks", format!("at least {needed}"), c.blocks.len().to_string());
            }
            let gone = self.forward.passed(c.start) / BLOCK;
            let wrong = |(i, b): &(usize, &u32)| **b as usize >= self.blocks() && !(**b == NO_BLOCK && *i < gone);
            if let Some((_, b)) = c.blocks.iter().enumerate().find(wrong) {
                return bad("block", format!("below {}", self.blocks()), b.to_string());
            }
            if c.output.from(c.tokens.len()) > c.tokens.len() {
                return bad("first output row", format!("at most {}", c.tokens.len()), c.output.from(0).to_string());
            }
            if let Output::Tokens { history, .. } = &c.output
                && history.len() != c.start + c.tokens.len()
            {
                return bad("history", (c.start + c.tokens.len()).to_string(), history.len().to_string());
            }
            if let Output::Tokens { from, allowed: Some(allowed), .. } = &c.output
                && allowed.len() != (c.tokens.len() - from) * vocab.div_ceil(32)
            {
                let expected = (c.tokens.len() - from) * vocab.div_ceil(32);
                return bad("words of allowed tokens", expected.to_string(), allowed.len().to_string());
            }
            let own = &c.blocks[c.start / BLOCK..needed];
            let shared = plan.chunks[..chunk].iter().any(|o| {
                o.blocks[o.start / BLOCK..(o.start + o.tokens.len()).div_ceil(BLOCK)].iter().any(|b| own.contains(b))
            });
            let twice = own.iter().enumerate().any(|(i, b)| own[..i].contains(b));
            if shared || twice {
                return bad("blocks written in this step", "each once".into(), format!("{own:?} used twice"));
            }
        }
        Ok(())
    }
}

impl Executor for CpuExecutor {
    fn submit(&mut self, plan: &Plan) -> Result<Ticket, ExecError> {
        self.check(plan)?;
        let outputs = if plan.chunks.is_empty() { vec![] } else { self.forward.step(plan) };
        self.next += 1;
        self.ready.insert(self.next, outputs);
        Ok(Ticket(self.next))
    }

    fn collect(&mut self, ticket: Ticket) -> Result<Vec<ChunkOutput>, ExecError> {
        self.ready.remove(&ticket.0).ok_or(ExecError::Ticket(ticket.0))
    }

    fn blocks(&self) -> usize {
        self.forward.kv().blocks()
    }

    fn copy_block(&mut self, from: u32, to: u32) {
        assert!((from as usize) < self.blocks() && (to as usize) < self.blocks(), "block {from} or {to}");
        // SAFETY: `&mut self`: no step is running, so nobody reads or writes either block.
        unsafe { self.forward.kv().copy_block(from, to) }
    }

    fn block_bytes(&self) -> usize {
        self.forward.kv().bytes_of_block()
    }

    fn read_block(&mut self, block: u32, to: &mut [u8]) {
        // SAFETY: `&mut self`: no step is running, so nobody writes the block.
        unsafe { self.forward.kv().read_block(block, to) }
    }

    fn write_block(&mut self, block: u32, from: &[u8]) {
        // SAFETY: `&mut self`: no step is running, so nobody reads or writes the block.
        unsafe { self.forward.kv().write_block(block, from) }
    }

    fn describe(&self) -> String {
        self.forward.describe()
    }
}

fn kv_layers(spec: &ModelSpec) -> Vec<KvLayer> {
    let layer = |attn: &Attn| {
        let Attn::Gqa { kv_heads, head_dim, .. } = *attn;
        KvLayer { kv_heads, head_dim }
    };
    spec.layers.iter().map(|l| layer(&l.attn)).collect()
}
