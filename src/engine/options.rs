//! How an engine is made, and why one could not be.

use quern_kernels::{
    cpu::kv::{BLOCK, KvType},
    exec::{Activations, Device, ExecError, ExecOptions},
};
use quern_models::ModelSpec;

use crate::draft::Speculation;

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
    /// How answers are guessed ahead, unless a request says it.
    pub speculation: Speculation,
    /// KV blocks more that a GPU has for trees of guesses, two for each end of a path but one; with none there are chains.
    pub tree_blocks: usize,
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
            speculation: Speculation::OFF,
            tree_blocks: 0,
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
        ExecOptions {
            device,
            threads,
            blocks: self.blocks_of(spec),
            activations,
            kv,
            rows: self.rows(),
            tree_blocks: self.tree_blocks,
            gpu_layers,
        }
    }

    /// Tokens of the largest step: a budget that follows the machine may grow to 2048.
    pub fn rows(&self) -> usize {
        if self.batch_tokens == 0 { 2048 } else { self.batch_tokens }.max(self.sequences)
    }

    /// KV blocks.
    pub fn blocks_of(&self, spec: &ModelSpec) -> usize {
        let whole = self.context_of(spec).div_ceil(BLOCK);
        match self.cache_tokens {
            0 => whole.saturating_mul(self.sequences.max(1)),
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
    /// Nothing besides can guess for this model.
    #[error("{0}")]
    Draft(&'static str),
    /// What was to guess cannot.
    #[error("{of}: {source}")]
    Guesses {
        /// The flag, or what of the file.
        of: String,
        /// Why.
        source: Box<OpenError>,
    },
    /// An option contradicts the model.
    #[error("--ctx {asked}: the model was made for at most {most} tokens")]
    Context {
        /// Tokens asked.
        asked: usize,
        /// Tokens the model can use.
        most: usize,
    },
}

/// Context where nothing is asked: enough for a chat, and small enough not to ask for gigabytes.
const DEFAULT_CONTEXT: usize = 4096;
