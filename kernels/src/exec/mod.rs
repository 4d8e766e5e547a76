//! Running a [`ModelSpec`]: what the engine asks of a device and gets back.
//!
//! The interface is asynchronous so that a device can work while the engine schedules: `submit` a
//! plan, later `collect` its tokens. Where a device can, the step after it is submitted before that
//! (`submit_next`), with rows that read the tokens to be chosen. The CPU computes inside `submit`.
//! An executor keeps weights, activations and KV memory, and no scheduling state: which block
//! belongs to whom is the plan's business. One dynamic call a step.

mod angles;
mod check;
mod cpu;
mod device;
mod forward;
mod split;

pub(crate) use angles::Angles;
pub(crate) use check::{check, check_fed, check_head, check_move};
pub use cpu::{CpuExecutor, CpuHead, CpuOptions};
pub use device::{Activations, Device, DeviceMemory, ExecOptions, HostMemory, block_bytes, device_memory, open};
pub use split::SplitExecutor;

pub use crate::mask::{MOST_MASKED, Mask, tree_mask};

use std::{borrow::Cow, collections::BTreeMap, sync::Arc};

use crate::cpu::kv::KvLayer;
use quern_models::{
    ModelFile, ModelSpec,
    spec::{Attn, OtherModel},
};

use crate::sample::{SampleError, Sampled, SamplingParams};

/// Work of one step: new tokens of some sequences.
#[derive(Debug, Default)]
pub struct Plan<'a> {
    /// Chunks, each of another sequence. A chunk may be a whole prompt, a part of it or one token:
    /// it is computed the same way.
    pub chunks: Vec<Chunk<'a>>,
}

impl Plan<'_> {
    /// New tokens of all sequences.
    pub fn rows(&self) -> usize {
        self.chunks.iter().map(|c| c.tokens.len()).sum()
    }
}

/// What the rows of a head are fed besides tokens: for each chunk `[tokens][width]`.
#[derive(Debug)]
pub enum Fed<'a> {
    /// Nothing: a model, or a pass that needs none.
    Nothing,
    /// The model's states, as [`Executor::states`] gives them.
    Model(Vec<&'a [f32]>),
    /// What the head itself gave in the pass before ([`HeadExecutor::own`]).
    Own(Vec<&'a [f32]>),
}

/// New tokens of one sequence.
#[derive(Debug)]
pub struct Chunk<'a> {
    /// The tokens, at least one.
    pub tokens: &'a [u32],
    /// Position of the first; everything before it is in the cache.
    pub start: usize,
    /// The sequence's blocks, at least up to the last token; [`NO_BLOCK`] where every layer's window has passed.
    pub blocks: &'a [u32],
    /// Which of these tokens see each other. [`Mask::Causal`] but for trees of guesses and blocks that are guessed at
    /// once.
    pub mask: Mask<'a>,
    /// What is wanted back.
    pub output: Output<'a>,
}

impl Chunk<'_> {
    /// Position of a row: of its rotary or learned embedding, and one less than that of the token chosen after it. Its
    /// keys and values go to slot `start + row`.
    pub(crate) fn position(&self, row: usize) -> usize {
        self.start + self.mask.depth(row)
    }

    /// Tokens before the one that a row gives, which is `ahead` behind its position, of those up to the chunk's end: of a
    /// tree, those on the row's path.
    pub(crate) fn history<'h>(&self, all: &'h [u32], row: usize, ahead: usize) -> Cow<'h, [u32]> {
        match self.mask {
            Mask::Tree(_) if self.mask.depth(row) < row => {
                let start = self.start + ahead - 1;
                let path = self.mask.path(row).map(|j| all[start + j]);
                Cow::Owned(all[..start].iter().copied().chain(path).collect())
            }
            _ => Cow::Borrowed(&all[..self.start + row + ahead]),
        }
    }
}

/// What a chunk gives back.
#[derive(Debug)]
pub enum Output<'a> {
    /// Nothing: the prompt goes on in a later step.
    None,
    /// The next token after each of `tokens[from..]`.
    Tokens {
        /// First row that is sampled.
        from: usize,
        /// How tokens are chosen.
        params: &'a SamplingParams,
        /// Every token of the sequence up to the end of the chunk. A row of a tree is chosen by the tokens before the
        /// chunk and those on its path.
        history: &'a [u32],
        /// How many of them are the prompt.
        prompt_len: usize,
        /// `Some(n)`: report logprobs, of the choice and of the `n` likeliest.
        logprobs: Option<usize>,
        /// Tokens that may be chosen, `[rows from `from` on][words]`: bit `t % 32` of word `t / 32` allows token `t`.
        allowed: Option<&'a [u32]>,
    },
    /// The logits after each of `tokens[from..]`.
    Logits {
        /// First row wanted.
        from: usize,
    },
    /// The same, of a head by its own tokens ([`HeadExecutor::tokens`]): most heads know few of the model's.
    Own {
        /// First row wanted.
        from: usize,
    },
    /// The hidden states of `tokens[from..]` after the final norm.
    Hidden {
        /// First row wanted.
        from: usize,
    },
}

impl Output<'_> {
    /// First row that needs logits; `rows` if none does.
    pub(crate) fn from(&self, rows: usize) -> usize {
        match self {
            Output::None => rows,
            Output::Tokens { from, .. } | Output::Logits { from } | Output::Own { from } | Output::Hidden { from } => {
                *from
            }
        }
    }
}

/// A submitted plan, to be collected once: the executor's number of it, larger for later ones.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// Outputs of submitted steps that were not collected yet.
#[derive(Default)]
pub(crate) struct Ready {
    outputs: BTreeMap<u64, Vec<ChunkOutput>>,
    next: u64,
}

impl Ready {
    /// Keeps a step's outputs under a new ticket.
    pub fn put(&mut self, outputs: Vec<ChunkOutput>) -> Ticket {
        let number = self.number();
        self.keep(number, outputs);
        Ticket(number)
    }

    /// The number of a ticket whose outputs come later.
    pub fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Outputs of a ticket that has its number.
    pub fn keep(&mut self, number: u64, outputs: Vec<ChunkOutput>) {
        self.outputs.insert(number, outputs);
    }

    /// Hands them out, once.
    pub fn take(&mut self, ticket: &Ticket) -> Result<Vec<ChunkOutput>, ExecError> {
        self.outputs.remove(&ticket.0).ok_or(ExecError::Ticket(ticket.0))
    }
}

/// What a chunk gave.
#[derive(Debug)]
pub enum ChunkOutput {
    /// Nothing was asked.
    None,
    /// The token of each row in order, or why none could be chosen (after this row only; others are unaffected).
    Tokens(Vec<Result<Sampled, SampleError>>),
    /// Logits `[rows, vocab]`; of a head the model's `vocab`, or its own ([`Output::Own`]).
    Logits(Vec<f32>),
    /// Hidden states `[rows, hidden]`.
    Hidden(Vec<f32>),
    /// Nothing: the device did not know the token that it was to read ([`Executor::submit_next`]). The step before gives
    /// it, and it is to be computed as if it had not been.
    Unknown,
}

/// In a chunk's blocks: a block that was given back because no new token sees it (all layers have a window).
pub const NO_BLOCK: u32 = u32::MAX;

/// A plan the device cannot run, or a device that failed.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    /// The plan contradicts itself or the model: a bug in the caller.
    #[error("plan, chunk {chunk}: {what}: expected {expected}, got {got}")]
    Plan {
        /// Index of the chunk.
        chunk: usize,
        /// Field concerned.
        what: &'static str,
        /// What would be right.
        expected: String,
        /// What was found.
        got: String,
    },
    /// Rows that cannot be moved: a bug in the caller.
    #[error("rows to be moved: {what}: expected {expected}, got {got}")]
    Move {
        /// What is wrong.
        what: &'static str,
        /// What would be right.
        expected: String,
        /// What was found.
        got: String,
    },
    /// A ticket that was never issued or was collected before.
    #[error("ticket {0} is not there to be collected")]
    Ticket(u64),
    /// The KV cache does not fit into memory.
    #[error(
        "the KV cache needs {bytes} bytes ({blocks} blocks of 16 tokens), which cannot be had; ask for a smaller context"
    )]
    Memory {
        /// Bytes asked.
        bytes: usize,
        /// Blocks asked.
        blocks: usize,
    },
    /// Activations that the device does not have.
    #[error("{device} has no {} activations: expected {}", activations.name(), match device {
        Device::Cpu => "int8 or f32",
        Device::Cuda(_) => "f16, int8 or f32",
    })]
    Activations {
        /// The device.
        device: Device,
        /// What was asked for.
        activations: Activations,
    },
    /// Activations that not both devices of a model have.
    #[error(
        "{device} with the first layers on the CPU has no {} activations: expected int8, f32 or nothing (f16 on the GPU, int8 on the CPU)",
        activations.name()
    )]
    SplitActivations {
        /// The GPU.
        device: Device,
        /// What was asked for.
        activations: Activations,
    },
    /// More layers for the GPU than there are.
    #[error("--gpu-layers {asked}: expected at most {most}, {}", match most {
        0 => "as there is no GPU on --device cpu",
        _ => "the layers of this model; without the flag all are on the GPU",
    })]
    GpuLayers {
        /// Layers asked for.
        asked: usize,
        /// Layers there are; none where the device is no GPU.
        most: usize,
    },
    /// A head that cannot guess for this model.
    #[error("the head {what}: expected {expected}, got {got}")]
    Head {
        /// Property concerned.
        what: &'static str,
        /// What would be right.
        expected: String,
        /// What was found.
        got: String,
    },
    /// A head of another model.
    #[error(transparent)]
    OtherModel(#[from] OtherModel),
    /// The GPU cannot do it, or failed.
    #[error(transparent)]
    Cuda(#[from] crate::cuda::CudaError),
}

/// A device with a model on it.
pub trait Executor: Send {
    /// Starts a step.
    fn submit(&mut self, plan: &Plan) -> Result<Ticket, ExecError>;

    /// Whether [`Executor::submit_next`] may be called: the device can, and exactly one step is under way, all of whose
    /// rows read tokens that it knew.
    fn has_next(&self) -> bool {
        false
    }

    /// Starts a step behind the one that is under way: each chunk is one token, which is the one that chunk `from[i]` of
    /// that step chooses after its last row; what the chunks and their histories have in its place is not read. `None`:
    /// such a step has to wait until the tokens are known, and nothing was started. What may start: [`Output::Tokens`]
    /// without penalties, logprobs and allowed tokens.
    fn submit_next(&mut self, plan: &Plan, from: &[usize]) -> Result<Option<Ticket>, ExecError> {
        let _ = (plan, from);
        Ok(None)
    }

    /// Waits for a step and returns one output per chunk, in plan order.
    fn collect(&mut self, ticket: Ticket) -> Result<Vec<ChunkOutput>, ExecError>;

    /// KV blocks there are.
    fn blocks(&self) -> usize;

    /// Copies a block's keys and values, for a sequence that leaves a shared one.
    fn copy_block(&mut self, from: u32, to: u32) -> Result<(), ExecError>;

    /// Moves keys and values within a sequence that has these `blocks`: those of slot `from[i]` to slot `to + i`. For
    /// the accepted path of a [`Mask::Tree`]: `from` are the slots of its rows, ascending, none below where it goes. The
    /// rows have the positions of their new slots already, so that the sequence goes on as if it had been plain.
    fn move_rows(&mut self, blocks: &[u32], from: &[usize], to: usize) -> Result<(), ExecError>;

    /// Most ends of paths of a tree whose first path lies in its first rows ([`Mask::Tree`]).
    fn tree_leaves(&self) -> usize;

    /// Bytes of a block's keys and values, all layers together.
    fn block_bytes(&self) -> usize;

    /// A block's keys and values, `[block_bytes]`, to be kept elsewhere; what the bytes mean depends on the model, the
    /// KV type and the version of this program.
    fn read_block(&mut self, block: u32, to: &mut [u8]) -> Result<(), ExecError>;

    /// Puts back what [`Executor::read_block`] gave.
    fn write_block(&mut self, block: u32, from: &[u8]) -> Result<(), ExecError>;

    /// A head of this model, on the same device, with as many KV blocks; from the next step on the states that it
    /// reads are kept. It replaces one that was there.
    fn head(&mut self, file: Arc<ModelFile>) -> Result<Box<dyn HeadExecutor>, ExecError>;

    /// States of all rows of the last step, in plan order, `[rows][width]`, where there is a head.
    fn states(&mut self) -> Result<&[f32], ExecError>;

    /// Numeric mode and instruction set, as shown to people: `int8 activations, f16 KV, avx2, 2 threads`.
    fn describe(&self) -> String;
}

/// A head on a device: it guesses a model's tokens from its states. What rows are: [`quern_models::spec::Head`].
pub trait HeadExecutor: Send {
    /// Reads rows and guesses. [`Output::Tokens`], without logprobs and allowed tokens, and [`Output::Logits`] are of the
    /// model's tokens; there are no others. A history has the token of the row it ends with (of a block, it ends with the
    /// masks). Medusa and blocks give all their guesses after the last row of a chunk.
    fn guess(&mut self, plan: &Plan, fed: &Fed) -> Result<Vec<ChunkOutput>, ExecError>;

    /// The model's token of each of the head's own; empty: they are the same.
    fn tokens(&self) -> &[u32];

    /// What all rows of the last pass gave for the next, `[rows][hidden]`.
    fn own(&mut self) -> Result<&[f32], ExecError>;

    /// Copies a block's keys and values, as the model does.
    fn copy_block(&mut self, from: u32, to: u32) -> Result<(), ExecError>;

    /// Most ends of paths of a tree ([`Mask::Tree`]).
    fn tree_leaves(&self) -> usize;

    /// Blocks besides those of the model, for what is not kept: rows of a block that is guessed.
    fn spare(&self) -> std::ops::Range<u32> {
        0..0
    }
}

/// Logits of a head's own `tokens` by those of its model, `to` `[known]`: tokens that the head does not know are
/// impossible.
pub fn spread(tokens: &[u32], logits: &[f32], known: usize, to: &mut Vec<f32>) {
    to.clear();
    to.resize(known, f32::NEG_INFINITY);
    tokens.iter().zip(logits).for_each(|(&token, &logit)| to[token as usize] = logit);
}

/// Positions below it are seen by no layer from the row at `pos` on.
pub(crate) fn passed(spec: &ModelSpec, pos: usize) -> usize {
    let first = |attn: &Attn| {
        let Attn::Gqa { window, .. } = *attn;
        window.map_or(0, |w| (pos + 1).saturating_sub(w))
    };
    spec.layers.iter().map(|layer| first(&layer.attn)).min().unwrap_or(0)
}

/// Shapes of the cache of each layer.
pub(crate) fn kv_layers(spec: &ModelSpec) -> Vec<KvLayer> {
    let layer = |attn: &Attn| {
        let Attn::Gqa { kv_heads, head_dim, .. } = *attn;
        KvLayer { kv_heads, head_dim }
    };
    spec.layers.iter().map(|l| layer(&l.attn)).collect()
}
