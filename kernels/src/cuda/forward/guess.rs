//! What a head's passes have besides its layers: states that come up, what rows begin with, Medusa's guesses; and states
//! of a model that are kept for a head.

use std::sync::Arc;

use quern_models::{
    ModelSpec,
    spec::{Head, HeadKind, States},
};

use super::{Forward, keys, norm};
use crate::{
    cpu::acts::Forms,
    cuda::{
        Buffer, CudaError, Device, DevicePtr, Pinned,
        acts::{Acts, Form},
        exec::{HEAD_ROWS, Part},
        heads::{Half, HeadOps, Join},
        linear::{Linear, Output},
        model::{Guess, Input, Model},
        ops::Ops,
    },
    exec::{Fed, Plan},
};

/// Buffers of a head's pass.
pub(super) struct Guessing {
    ops: HeadOps,
    /// What `fuse` reads, and then `project` or the first layer of a wide head.
    pub input: Acts,
    /// The model's states, `[rows][width]`, where they go through `fuse`; others go into the residual stream.
    fed: Buffer<f32>,
    fed_host: Pinned<f32>,
    /// `[rows][hidden]`.
    embedding: Buffer<f32>,
    /// What a block of Medusa's gives, `[HEAD_ROWS][hidden]`.
    block: Buffer<f32>,
}

/// How many values the buffers hold: fed, fed on the host, embedding, block.
fn sizes(spec: &ModelSpec, head: &Head, rows: usize) -> [usize; 4] {
    let (hidden, width) = (spec.hidden, head.width());
    let medusa = matches!(head.kind, HeadKind::Medusa { .. });
    let there = |there: bool, len: usize| if there { len } else { 0 };
    [
        there(head.fuses(), rows * width),
        rows * width.max(hidden),
        there(!medusa, rows * hidden),
        there(medusa, HEAD_ROWS * hidden),
    ]
}

impl Guessing {
    /// For passes of up to `rows` rows; makes room for the linear layers, too.
    pub fn new(
        device: &Arc<Device>,
        spec: &ModelSpec,
        model: &Model,
        linear: &mut Linear,
        form: Form,
        rows: usize,
    ) -> Result<Option<Guessing>, CudaError> {
        let Some(guess) = &model.guess else { return Ok(None) };
        let first: Vec<_> = model.layers.iter().take(usize::from(model.wide())).flat_map(|l| &l.qkv).collect();
        let (forms, columns) = guess.input(&first);
        for weight in guess.fuse.iter().chain(&guess.project) {
            linear.reserve(&[weight], rows)?;
        }
        for weight in guess.medusa_weights() {
            linear.reserve(&[weight], HEAD_ROWS)?;
        }
        let [fed, fed_host, embedding, block] = sizes(spec, &guess.head, rows);
        let what = "buffers of a head";
        Ok(Some(Guessing {
            ops: HeadOps::new(device)?,
            input: Acts::with(device, form, forms, if columns > 0 { rows } else { 0 }, columns)?,
            fed: Buffer::new(device, what, fed)?,
            fed_host: Pinned::new(device, fed_host)?,
            embedding: Buffer::new(device, what, embedding)?,
            block: Buffer::new(device, what, block)?,
        }))
    }

    /// Bytes of device memory that [`Guessing::new`] takes, and of the states that are kept of the model and of the head,
    /// from above. `held`: forms of the int8 form.
    pub fn bytes(spec: &ModelSpec, form: Form, held: Forms, rows: usize) -> usize {
        let Some(head) = &spec.draft_head else { return 0 };
        let [fed, _, embedding, block] = sizes(spec, head, rows);
        let kept = rows * (head.width() + spec.hidden);
        let columns = head.width().max(2 * spec.hidden).next_multiple_of(256);
        4 * (fed + embedding + block + kept) + Acts::bytes(form, held, rows, columns)
    }

    /// What the layers of `m` rows begin with. The residual stream `x`, f32 `[m][hidden]`, has the head's own states, or
    /// the model's where they are not `fused` here; `numbers` are tokens and positions, u32 `[m]`.
    pub fn begin(
        &self,
        model: &Model,
        linear: &mut Linear,
        ops: &Ops,
        numbers: [DevicePtr; 2],
        x: DevicePtr,
        fused: bool,
        m: usize,
    ) -> Result<(), CudaError> {
        let guess = model.guess.as_ref().expect("a head");
        if let (HeadKind::Block { .. }, Some(embed)) = (&guess.head.kind, &model.embed) {
            return linear.embed(embed, numbers[0], None, 1.0, x, m);
        }
        if let (true, Some(fuse)) = (fused, &guess.fuse) {
            ops.rows(self.fed.ptr(), None, fuse.k, &self.input, m)?;
            linear.run(&[fuse], &self.input, m, Output::Store { to: x, stride: fuse.n, bias: None })?;
        }
        let (Some(embed), Some(embed_norm), Some(state_norm)) = (&model.embed, &guess.embed_norm, &guess.state_norm)
        else {
            return Ok(());
        };
        let hidden = embed.k;
        let [tokens, positions] = numbers;
        linear.embed(embed, tokens, None, 1.0, self.embedding.ptr(), m)?;
        let half = |x: DevicePtr, input: &Input| Half { x, norm: input.norm() };
        let (embedding, state) = (half(self.embedding.ptr(), embed_norm), half(x, state_norm));
        let join = Join { embedding, state, state_first: false, order: None, zero_first: None };
        match guess.head.kind {
            HeadKind::Joined { state_first, zero_first, .. } => {
                let join = Join { state_first, zero_first: zero_first.then_some(positions), ..join };
                self.ops.join(&join, hidden, &self.input, m)?;
                let project = guess.project.as_ref().expect("a joined head projects");
                let bias = guess.project_bias.as_ref().map(Buffer::ptr);
                linear.run(&[project], &self.input, m, Output::Store { to: x, stride: hidden, bias })
            }
            HeadKind::Wide { normed_residual, .. } => {
                let order = model.layers[0].attn_in.order.as_ref().map(Buffer::ptr);
                self.ops.join(&Join { order, ..join }, hidden, &self.input, m)?;
                // In place: a thread reads what it writes itself, and the others' before a barrier.
                if normed_residual { ops.normed(x, None, &state.norm, hidden, x, m) } else { Ok(()) }
            }
            HeadKind::Medusa { .. } | HeadKind::Block { .. } => unreachable!("neither has both norms"),
        }
    }
}

/// States of every row of a pass, for a head: the residual stream in front of some layers, or its end behind the norm.
pub(super) struct Kept {
    states: States,
    /// `[rows][states][hidden]`.
    values: Buffer<f32>,
}

impl Kept {
    /// Copies what is kept of the stream `x`, f32 `[m][hidden]`, in front of a layer or behind the `last`.
    pub fn keep(
        &self,
        ops: &Ops,
        [layer, last]: [usize; 2],
        norm: &Input,
        x: DevicePtr,
        hidden: usize,
        m: usize,
    ) -> Result<(), CudaError> {
        match &self.states {
            States::Normed if layer == last => ops.normed(x, None, &norm.norm(), hidden, self.values.ptr(), m),
            States::Normed => Ok(()),
            States::Before { layers } => match layers.iter().position(|&l| l == layer) {
                Some(at) => ops.copy(x, None, hidden, self.values.at(at * hidden), layers.len() * hidden, m),
                None => Ok(()),
            },
        }
    }
}

impl Forward {
    /// Keeps states of every row from the next pass on.
    pub fn keep(&mut self, states: States) -> Result<(), CudaError> {
        let len = self.rows * states.count() * self.spec().hidden;
        let values = Buffer::new(&self.device, "states for a head", len)?;
        // Recorded passes keep others, or none.
        self.graphs.clear();
        self.kept = Some(Kept { states, values });
        Ok(())
    }

    /// Appends the states that were kept of the `m` rows of the last pass, and waits for them: 4 bytes a number cross
    /// the bus.
    pub fn kept(&mut self, m: usize, to: &mut Vec<f32>) -> Result<(), CudaError> {
        let Some(kept) = &self.kept else { return Ok(()) };
        let start = to.len();
        to.resize(start + m * kept.states.count() * self.file.spec().hidden, 0.0);
        kept.values.read(0, &mut to[start..])
    }

    /// Sends the states of a pass's rows to where they are read; returns whether `fuse` reads them. The pinned copy may
    /// be written.
    pub(super) fn feed(&mut self, pass: &[Part], fed: &Fed) -> Result<bool, CudaError> {
        let (Some(guessing), Some(guess)) = (&mut self.guessing, &self.model.guess) else { return Ok(false) };
        let (states, width, fused) = match fed {
            Fed::Nothing => return Ok(false),
            Fed::Model(states) => (states, guess.head.width(), guess.fuse.is_some()),
            Fed::Own(states) => (states, self.file.spec().hidden, false),
        };
        let mut len = 0;
        for part in pass {
            let from = &states[part.chunk][part.tokens.start * width..part.tokens.end * width];
            guessing.fed_host[len..len + from.len()].copy_from_slice(from);
            len += from.len();
        }
        let to = if fused { &mut guessing.fed } else { &mut self.bufs.x };
        // SAFETY: the pinned memory is next changed by the next pass, after it has waited for the stream.
        unsafe { to.write_async(0, &guessing.fed_host, len)? };
        Ok(fused)
    }

    /// Keys and values of a pass's states, for blocks that are guessed to see: of a head that guesses blocks, fed with the
    /// model's states. Returns before the device is done.
    pub fn context(&mut self, plan: &Plan, pass: &[Part], fed: &Fed) -> Result<(), CudaError> {
        let m = self.upload(plan, pass, &[], None, &[])?;
        let fused = self.feed(pass, fed)?;
        let ropes = self.ropes();
        let Forward { model, kv, linear, ops, bufs, file, guessing, .. } = self;
        let (spec, x) = (file.spec(), bufs.x.ptr());
        let (Some(guessing), Some(guess)) = (guessing, &model.guess) else { unreachable!("a head has both") };
        let state_norm = guess.state_norm.as_ref().expect("a head of blocks has it").norm();
        if let (true, Some(fuse)) = (fused, &guess.fuse) {
            ops.rows(guessing.fed.ptr(), None, fuse.k, &guessing.input, m)?;
            linear.run(&[fuse], &guessing.input, m, Output::Store { to: x, stride: fuse.n, bias: None })?;
        }
        for (i, (layer, shape)) in model.layers.iter().zip(&spec.layers).enumerate() {
            let order = layer.attn_in.order.as_ref().map(Buffer::ptr);
            ops.norm(x, None, &state_norm, order, spec.hidden, &bufs.hidden, m)?;
            keys(linear, ops, kv, bufs, layer, &shape.attn, &ropes, None, i, m)?;
        }
        Ok(())
    }

    /// What the head, or one of Medusa's, reads of the rows that `from`, u32 `[m]`, names.
    pub(super) fn last(&mut self, from: DevicePtr, guess: usize, m: usize) -> Result<(), CudaError> {
        let Forward { model, linear, ops, bufs, file, guessing, .. } = self;
        let hidden = file.spec().hidden;
        let (Some(Guess { medusa, .. }), Some(guessing)) = (&model.guess, guessing) else {
            return norm(ops, &model.norm, bufs.x.ptr(), Some(from), &bufs.last, hidden, m);
        };
        let Some(weights) = medusa.get(guess) else {
            return norm(ops, &model.norm, bufs.x.ptr(), Some(from), &bufs.last, hidden, m);
        };
        let y = bufs.states.ptr();
        ops.copy(bufs.x.ptr(), Some(from), hidden, y, hidden, m)?;
        for (block, bias) in &weights.blocks {
            ops.rows(y, None, hidden, &bufs.last, m)?;
            let to = guessing.block.ptr();
            linear.run(&[block], &bufs.last, m, Output::Store { to, stride: hidden, bias: Some(bias.ptr()) })?;
            guessing.ops.add_silu(to, hidden, y, m)?;
        }
        ops.rows(y, None, hidden, &bufs.last, m)
    }
}
