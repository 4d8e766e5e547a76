//! One step of a decoder on the CPU: embedding, layers, head.
//!
//! All rows of a step, whatever sequence they belong to, go through the linear layers together; only
//! attention looks at sequences. A layer is eight stages (norm, q/k/v, rope and append, attention,
//! o and residual, norm, gate/up and activation, down and residual); with few rows the small ones
//! run on the calling thread, where a parallel region would cost more than it saves.

mod attention;
mod experts;
mod guess;
mod head;
mod linear;
mod mlp;
mod tensors;

use std::sync::Arc;

use quern_models::{ModelFile, ModelSpec, spec::States};

use self::{
    guess::{Guess, Tensor},
    head::Heads,
    linear::PerThread,
    tensors::{Input, LayerTensors, columns, index},
};
use super::{Angles, ChunkOutput, Fed, Plan};
use crate::{
    cpu::{
        acts::{Acts, Forms, Mode},
        attend,
        embed::embed_row,
        isa::Isa,
        kv::KvMemory,
        lanes::Simd,
        linear as kernel, ops,
    },
    team::{Disjoint, Team, split},
};

/// A model's first layers (as many as its cache has), or a head, their cache and the buffers of a step.
pub(super) struct Forward {
    file: Arc<ModelFile>,
    kv: KvMemory,
    mode: Mode,
    team: Arc<Team>,
    isa: &'static Isa,
    simd: Simd,
    layers: Vec<LayerTensors>,
    /// A head of Medusa has neither.
    embed: Option<Tensor>,
    head: Option<Tensor>,
    positions: Option<usize>,
    head_in: Input,
    guess: Option<Guess>,
    /// States of every row that are kept.
    keep: Option<States>,
    bufs: Buffers,
    regions: usize,
}

/// Buffers of a step, kept between steps. `m` rows.
#[derive(Default)]
struct Buffers {
    /// Residual stream, `[m][hidden]`.
    x: Vec<f32>,
    /// Queries, keys, values side by side, `[m][q + 2 kv]`.
    qkv: Vec<f32>,
    /// Attention's output, `[m][q]`.
    attended: Vec<f32>,
    /// What a half of a layer gives, where a norm is behind it, `[m][hidden]`.
    half: Vec<f32>,
    /// Input of the next linear layer.
    acts: Acts,
    /// Input of the down projection.
    inner: Acts,
    experts: experts::Buffers,
    heads: Heads,
    /// Per distinct rope: frequencies and `[m][head_dim / 2]` cosines and sines.
    angles: Vec<Angles>,
    /// One per thread.
    threads: Vec<ThreadBuffers>,
    attend: attend::Workspace,
    /// States that are kept, `[m][states][hidden]`.
    states: Vec<f32>,
}

#[derive(Default)]
struct ThreadBuffers {
    tile: Vec<f32>,
    tile2: Vec<f32>,
    row: Vec<f32>,
    ordered: Vec<f32>,
    linear: kernel::Scratch,
}

impl Forward {
    pub(super) fn new(
        file: Arc<ModelFile>,
        kv: KvMemory,
        mode: Mode,
        team: Arc<Team>,
        isa: &'static Isa,
        simd: Simd,
    ) -> Self {
        Forward::with(file, None, kv, mode, team, isa, simd)
    }

    /// A head of the model in `of`, on the same team of threads.
    pub(super) fn head_of(&self, of: &Arc<ModelFile>, file: Arc<ModelFile>, kv: KvMemory) -> Self {
        Forward::with(file, Some(of), kv, self.mode, self.team.clone(), self.isa, self.simd)
    }

    /// `model`: the file of the model whose tensors a head shares.
    fn with(
        file: Arc<ModelFile>,
        model: Option<&Arc<ModelFile>>,
        kv: KvMemory,
        mode: Mode,
        team: Arc<Team>,
        isa: &'static Isa,
        simd: Simd,
    ) -> Self {
        let (mut bufs, spec) = (Buffers::default(), file.spec());
        let layers = spec.layers.iter().take(kv.layers()).enumerate();
        let layers: Vec<_> = layers.map(|(i, layer)| LayerTensors::new(&file, i, layer, &mut bufs.angles)).collect();
        let positions = spec.positions.map(|_| index(&file, "positions"));
        let mut head_in = Input::new(&file, "norm", &spec.norm, spec.head_order.then(|| "head_order".into()));
        let (embed, head) = match (&spec.draft_head, model) {
            (Some(head), Some(model)) => {
                if head.shared_head && model.spec().head_order {
                    head_in.order = columns(model, "head_order");
                }
                let of = |shared: bool| if shared { model } else { &file };
                let medusa = spec.layers.is_empty();
                let embed = (!medusa).then(|| Tensor::new(of(head.shared_embed), "embed"));
                let tied = spec.tied_head || head.shared_head && model.spec().tied_head;
                (embed, (!medusa).then(|| Tensor::new(of(head.shared_head), if tied { "embed" } else { "head" })))
            }
            _ => {
                let head = if spec.tied_head { "embed" } else { "head" };
                (Some(Tensor::new(&file, "embed")), Some(Tensor::new(&file, head)))
            }
        };
        bufs.threads.resize_with(team.threads(), ThreadBuffers::default);
        let guess = Guess::new(&file);
        let keep = spec.draft_head.as_ref().map(|head| match head.feeds_normed() {
            true => States::Normed,
            false => States::Before { layers: vec![layers.len()] },
        });
        bufs.heads.guesses(spec, guess.as_ref());
        let regions = 0;
        Forward { file, kv, mode, team, isa, simd, layers, embed, head, positions, head_in, guess, keep, bufs, regions }
    }

    /// Keeps states of every row from the next step on.
    pub(super) fn keep(&mut self, states: States) {
        self.keep = Some(states);
    }

    /// States of the rows of the last step that are kept, `[m][states][hidden]`.
    pub(super) fn states(&self) -> &[f32] {
        &self.bufs.states
    }

    pub(super) fn file(&self) -> &Arc<ModelFile> {
        &self.file
    }

    pub(super) fn spec(&self) -> &ModelSpec {
        self.file.spec()
    }

    /// The model's token of each of a head's own; empty: they are the same.
    pub(super) fn own_tokens(&self) -> &[u32] {
        self.bufs.heads.tokens()
    }

    pub(super) fn kv(&self) -> &KvMemory {
        &self.kv
    }

    pub(super) fn regions(&self) -> usize {
        self.regions
    }

    pub(super) fn describe(&self) -> String {
        let acts = match self.mode {
            Mode::Int8 => "int8",
            Mode::F32 => "f32",
        };
        let kv = self.kv.kind().name();
        let (isa, threads) = (self.isa.name, self.team.threads());
        format!("{acts} activations, {kv} KV, {isa}, {threads} thread{}", if threads == 1 { "" } else { "s" })
    }

    /// Computes a checked plan with all layers; one output per chunk, in plan order.
    pub(super) fn step(&mut self, plan: &Plan) -> Vec<ChunkOutput> {
        self.run(plan);
        self.head(plan)
    }

    /// The same for a head, which is fed the model's states or its own.
    pub(super) fn guess(&mut self, plan: &Plan, fed: &Fed) -> Vec<ChunkOutput> {
        if let Some(outputs) = self.context(plan, fed) {
            return outputs;
        }
        self.run_fed(plan, fed);
        match self.medusa(plan) {
            Some(outputs) => outputs,
            None => self.head(plan),
        }
    }

    /// Computes a checked plan's embedding and layers; the residual stream behind them, `[m][hidden]`.
    pub(super) fn run(&mut self, plan: &Plan) -> &[f32] {
        self.run_fed(plan, &Fed::Nothing)
    }

    fn run_fed(&mut self, plan: &Plan, fed: &Fed) -> &[f32] {
        let m = plan.rows();
        self.begin(plan, fed);
        self.bufs.angles.iter_mut().for_each(|a| a.turn(plan));
        let wide = self.guess.as_ref().is_some_and(Guess::is_wide);
        for i in 0..self.layers.len() {
            self.keep_states(i, m);
            if i > 0 || !wide {
                self.norm_into_acts(Readers::Attention(i), None, m);
            }
            self.qkv(i);
            self.rope_and_append(i, plan);
            self.attend(i, plan, m);
            self.output(i, m);
            self.feed_forward(i, m);
        }
        self.keep_states(self.layers.len(), m);
        &self.bufs.x
    }

    /// Keeps the residual stream in front of a layer, or behind the last, if it is wanted.
    fn keep_states(&mut self, layer: usize, m: usize) {
        let Some(keep) = &self.keep else { return };
        let hidden = self.file.spec().hidden;
        let width = keep.count() * hidden;
        let at = match keep {
            States::Normed if layer == self.layers.len() => Some(0),
            States::Normed => None,
            States::Before { layers } => layers.iter().position(|&l| l == layer),
        };
        let Some(at) = at else { return };
        self.bufs.states.resize(m * width, 0.0);
        let rows = self.bufs.states.chunks_exact_mut(width).zip(self.bufs.x.chunks_exact(hidden));
        for (states, x) in rows {
            let to = &mut states[at * hidden..(at + 1) * hidden];
            match keep {
                States::Normed => self.head_in.norm(self.simd, x, to),
                States::Before { .. } => to.copy_from_slice(x),
            }
        }
    }

    /// Runs `f` on every thread of the team.
    fn region(team: &Team, regions: &mut usize, f: &(dyn Fn(usize) + Sync)) {
        *regions += 1;
        team.run(f);
    }

    /// Runs `f(thread, row)` for every row: on this thread if there are few, else split over the team.
    fn rows(team: &Team, regions: &mut usize, m: usize, f: &(dyn Fn(usize, usize) + Sync)) {
        if m < 2 * team.threads() {
            (0..m).for_each(|row| f(0, row));
            return;
        }
        Self::region(team, regions, &|t| split(m, team.threads(), t).for_each(|row| f(t, row)));
    }

    fn embed(&mut self, plan: &Plan) {
        let table = self.embed.as_ref().expect("whatever reads tokens has it").view();
        let positions = self.positions.map(|t| self.file.view(t));
        let (hidden, scale) = (table.k, self.file.spec().embed_scale);
        let place = |c: &super::Chunk, i: usize| (c.tokens[i] as usize, c.position(i));
        let places = plan.chunks.iter().flat_map(|c| (0..c.tokens.len()).map(move |i| place(c, i)));
        let places: Vec<(usize, usize)> = places.collect();
        self.bufs.x.resize(places.len() * hidden, 0.0);
        let (simd, x) = (self.simd, Disjoint::new(&mut self.bufs.x));
        let threads = PerThread::new(&mut self.bufs.threads);
        Self::rows(&self.team, &mut self.regions, places.len(), &|t, row| {
            // SAFETY: each row is written by one call only.
            let out = unsafe { x.part(row * hidden..(row + 1) * hidden) };
            let (token, position) = places[row];
            embed_row(&table, token, out);
            if let Some(scale) = scale {
                ops::scale(simd, out, scale);
            }
            if let Some(positions) = &positions {
                // SAFETY: `rows` gives each thread its own number.
                let buf = unsafe { threads.get(t) };
                buf.row.resize(hidden, 0.0);
                embed_row(positions, position, &mut buf.row);
                ops::add(simd, out, &buf.row);
            }
        });
    }

    /// Normalises rows of the residual stream into `acts`, in the order and the forms that the readers want:
    /// the first `m`, or those that `wanted` names.
    fn norm_into_acts(&mut self, readers: Readers, wanted: Option<&[usize]>, m: usize) {
        let forms = |tensors: &[usize]| {
            let forms = tensors.iter().map(|&t| Forms::of(self.file.view(t).scheme, self.mode));
            forms.reduce(Forms::and).expect("a norm has readers")
        };
        let (input, forms) = match readers {
            Readers::Attention(i) => (&self.layers[i].attn_in, forms(&self.layers[i].qkv)),
            Readers::Mlp(i) => {
                let layer = &self.layers[i];
                let block = layer.block();
                let up = forms(&[block.up]);
                (&layer.mlp_in, block.gate.map_or(up, |gate| forms(&[gate]).and(up)))
            }
            Readers::Head => {
                let head = self.head.as_ref().expect("whatever has layers has it");
                (&self.head_in, Forms::of(head.view().scheme, self.mode))
            }
        };
        let hidden = self.file.spec().hidden;
        self.bufs.acts.reset(self.isa, m, hidden, forms);
        let (isa, simd, acts, x) = (self.isa, self.simd, &self.bufs.acts, &self.bufs.x);
        let threads = PerThread::new(&mut self.bufs.threads);
        Self::rows(&self.team, &mut self.regions, m, &|t, row| {
            // SAFETY: `rows` gives each thread its own number.
            let buf = unsafe { threads.get(t) };
            let from = wanted.map_or(row, |w| w[row]) * hidden;
            let row_in = input.prepare(simd, &x[from..from + hidden], &mut buf.row, &mut buf.ordered);
            // SAFETY: each row is written by one call only and read in later regions.
            unsafe { acts.write_row(isa, row, row_in) }
        });
    }
}

/// Which linear layers read a normed row; of which layer.
#[derive(Clone, Copy)]
enum Readers {
    Attention(usize),
    Mlp(usize),
    Head,
}
