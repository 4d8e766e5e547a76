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

/// A head of a model on the model's device. It runs between the model's steps.
pub struct CudaHead {
    executor: CudaExecutor,
}

impl CudaExecutor {
    /// A head of this model; from the next step on the states that it reads are kept.
    pub(super) fn head_of(&mut self, file: Arc<ModelFile>) -> Result<CudaHead, ExecError> {
        check_head(self.forward.spec(), file.spec())?;
        let head = file.spec().draft_head.as_ref().expect("checked above");
        let refused = |what, expected: &str, got: String| Err(ExecError::Head { what, expected: expected.into(), got });
        if let HeadKind::Block { .. } = head.kind {
            return refused("kind on a GPU", "eagle, mtp or medusa", head.method().into());
        }
        if self.forward.model().first > 0 {
            return refused("needs", "all layers of the model on one device", self.describe());
        }
        let (form, kind, device) = (self.forward.form(), self.forward.kv().kind(), self.device().clone());
        let (ordinal, blocks, rows) = (device.info().ordinal, self.blocks(), self.forward.rows());
        let tree_blocks = self.forward.kv().spare().len();
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
        check(plan, self.executor.forward.spec(), self.executor.blocks())?;
        check_fed(plan, fed, self.executor.forward.spec())?;
        self.executor.check_masks(plan)?;
        Ok(self.executor.step(plan, None, fed)?)
    }

    fn own(&mut self) -> Result<&[f32], ExecError> {
        self.executor.states()
    }

    fn copy_block(&mut self, from: u32, to: u32) -> Result<(), ExecError> {
        self.executor.copy_block(from, to)
    }

    fn tree_leaves(&self) -> usize {
        // A chain's rows lie where the text goes on, and need none.
        (self.executor.forward.kv().spare().len() / 2).max(1)
    }
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

    /// Tokens behind the next that a row's first guess is: the history of a head has one more.
    pub fn ahead(self) -> usize {
        usize::from(self.head.is_some())
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
