//! A head on a device: an executor of its own beside the model's, on the same stream, which shares the weights that the
//! head shares.
//!
//! States cross the bus when they are wanted: the model's to the host behind a step, f32, 4 bytes for each of a row's
//! `states * hidden` numbers, and back for the head's first pass; the head's own, 4 bytes for each of `hidden` numbers,
//! both ways with every further pass. Nothing crosses it without a head, or while no text is guessed (but of a step of
//! several passes, those before the last).

use std::sync::Arc;

use quern_models::{
    ModelFile,
    spec::{Head, HeadKind},
};

use super::{CudaExecutor, CudaOptions, CudaPlan, Forward, KvPool, Model, Upload};
use crate::{
    exec::{
        ChunkOutput, ExecError, Executor, Fed, HeadExecutor, Plan, check, check_fed, check_head, kv_layers, spread,
    },
    sample::Sampled,
};

/// Blocks for the rows of blocks that are guessed, as on the CPU: enough for a few sequences at once.
const SPARE: usize = 32;

/// A head of a model on the model's device. It runs between the model's steps.
pub struct CudaHead {
    executor: CudaExecutor,
}

impl CudaExecutor {
    /// A head of this model; from the next step on the states that it reads are kept.
    pub(super) fn head_of(&mut self, file: Arc<ModelFile>) -> Result<CudaHead, ExecError> {
        check_head(self.forward.spec(), file.spec())?;
        let head = file.spec().draft_head.as_ref().expect("checked above");
        if self.forward.model().first > 0 {
            let (expected, got) = ("all layers of the model on one device".into(), self.describe());
            return Err(ExecError::Head { what: "needs", expected, got });
        }
        let (form, kind, device) = (self.forward.form(), self.forward.kv().kind(), self.device().clone());
        let (ordinal, blocks) = (device.info().ordinal, self.blocks());
        // A block that is guessed is one pass, however small those of the model are.
        let rows = match head.kind {
            HeadKind::Block { size, .. } => self.forward.rows().max(size),
            _ => self.forward.rows(),
        };
        // What a block's rows lie in, or paths of trees.
        let tree_blocks = if is_block(head) { SPARE } else { self.forward.kv().spare().len() };
        let options = CudaOptions { ordinal, blocks, form, kv: kind, rows, tree_blocks };
        CudaPlan::of(&file, &options, 0).check("the head", &device, None)?;
        let mut upload = Upload::new(&device, Box::new(|_| {}))?;
        let model = self.forward.model().upload_head(self.forward.file(), &file, form, &mut upload)?;
        drop(upload);
        let kv = KvPool::with_spare(&device, &kv_layers(file.spec()), blocks, tree_blocks, kind)?;
        let states = head.states.clone();
        let forward = Forward::new(device, file, model, kv, form, rows)?;
        self.forward.keep(states)?;
        // Of a step before there was a head there are none.
        self.waiting = 0;
        Ok(CudaHead { executor: CudaExecutor::of(forward) })
    }
}

impl HeadExecutor for CudaHead {
    fn guess(&mut self, plan: &Plan, fed: &Fed) -> Result<Vec<ChunkOutput>, ExecError> {
        let block = self.is_block();
        let spare = if block { self.spare().len() } else { 0 };
        check(plan, self.executor.forward.spec(), self.executor.blocks() + spare)?;
        check_fed(plan, fed, self.executor.forward.spec())?;
        self.executor.check_masks(plan)?;
        match fed {
            Fed::Model(_) if block => Ok(self.executor.context(plan, fed)?),
            _ => Ok(self.executor.step(plan, None, fed)?),
        }
    }

    fn tokens(&self) -> &[u32] {
        Guesses::of(self.executor.forward.model()).tokens
    }

    fn own(&mut self) -> Result<&[f32], ExecError> {
        self.executor.states()
    }

    fn copy_block(&mut self, from: u32, to: u32) -> Result<(), ExecError> {
        self.executor.copy_block(from, to)
    }

    fn spare(&self) -> std::ops::Range<u32> {
        if self.is_block() { self.executor.forward.kv().spare() } else { 0..0 }
    }

    fn tree_leaves(&self) -> usize {
        if self.is_block() {
            // A block gives the tokens of every place of a tree at once.
            return usize::MAX;
        }
        // A chain's rows lie where the text goes on, and need none.
        (self.executor.forward.kv().spare().len() / 2).max(1)
    }
}

impl CudaHead {
    fn is_block(&self) -> bool {
        self.executor.forward.spec().draft_head.as_ref().is_some_and(is_block)
    }
}

/// Whether a head guesses blocks at once.
fn is_block(head: &Head) -> bool {
    matches!(head.kind, HeadKind::Block { .. })
}

/// What an executor's own tokens are, and which it guesses.
#[derive(Clone, Copy)]
pub(super) struct Guesses<'a> {
    head: Option<&'a Head>,
    /// The model's token of each of its own; empty: they are the same.
    tokens: &'a [u32],
}

impl<'a> Guesses<'a> {
    /// Of a model, or of a head.
    pub fn of(model: &'a Model) -> Guesses<'a> {
        let guess = model.guess.as_ref();
        Guesses { head: guess.map(|g| &g.head), tokens: guess.map_or(&[], |g| &g.tokens) }
    }

    /// How far behind its own position a row's first token is: that of a model the next, of a head the one behind that,
    /// of a block's row its own.
    pub fn ahead(self) -> usize {
        self.head.map_or(1, |head| if is_block(head) { 0 } else { 2 })
    }

    /// Medusa's guesses after the last row of a chunk.
    pub fn medusa(self) -> Option<usize> {
        self.head.and_then(|head| match head.kind {
            HeadKind::Medusa { guesses, .. } => Some(guesses),
            _ => None,
        })
    }

    /// It knows some of the model's tokens: penalties, biases and noise, which are of those, are for the host.
    pub fn mapped(self) -> bool {
        !self.tokens.is_empty()
    }

    /// What was chosen among its own tokens, as the model's.
    pub fn map(self, sampled: Sampled) -> Sampled {
        let token = self.tokens.get(sampled.token as usize).copied().unwrap_or(sampled.token);
        Sampled { token, ..sampled }
    }

    /// Logits by the model's tokens.
    pub fn spread(self, logits: Vec<f32>) -> Vec<f32> {
        let Some(head) = self.head.filter(|_| self.mapped()) else { return logits };
        let mut all = vec![];
        spread(self.tokens, &logits, head.model_vocab, &mut all);
        all
    }
}
