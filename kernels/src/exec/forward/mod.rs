//! One step of a decoder on the CPU: embedding, layers, head.
//!
//! All rows of a step, whatever sequence they belong to, go through the linear layers together; only
//! attention looks at sequences. A layer is eight stages (norm, q/k/v, rope and append, attention,
//! o and residual, norm, gate/up and activation, down and residual); with few rows the small ones
//! run on the calling thread, where a parallel region would cost more than it saves.

mod attention;
mod head;
mod linear;
mod mlp;
mod tensors;

use std::sync::Arc;

use quern_models::{ModelFile, ModelSpec};

use self::{
    head::Heads,
    linear::PerThread,
    tensors::{Input, LayerTensors, index},
};
use super::{Angles, ChunkOutput, Plan};
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

/// A model's first layers (as many as its cache has), their cache and the buffers of a step.
pub(super) struct Forward {
    file: Arc<ModelFile>,
    kv: KvMemory,
    mode: Mode,
    team: Team,
    isa: &'static Isa,
    simd: Simd,
    layers: Vec<LayerTensors>,
    embed: usize,
    positions: Option<usize>,
    head_in: Input,
    head: usize,
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
    /// Input of the next linear layer.
    acts: Acts,
    /// Input of the down projection.
    inner: Acts,
    heads: Heads,
    /// Per distinct rope: frequencies and `[m][head_dim / 2]` cosines and sines.
    angles: Vec<Angles>,
    /// One per thread.
    threads: Vec<ThreadBuffers>,
    attend: attend::Workspace,
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
        team: Team,
        isa: &'static Isa,
        simd: Simd,
    ) -> Self {
        let (mut bufs, spec) = (Buffers::default(), file.spec());
        let layers = spec.layers.iter().take(kv.layers()).enumerate();
        let layers = layers.map(|(i, layer)| LayerTensors::new(&file, i, layer, &mut bufs.angles)).collect();
        let embed = index(&file, "embed");
        let positions = spec.positions.map(|_| index(&file, "positions"));
        let head_in = Input::new(&file, "norm", &spec.norm, spec.head_order.then(|| "head_order".into()));
        let head = if spec.tied_head { embed } else { index(&file, "head") };
        bufs.threads.resize_with(team.threads(), ThreadBuffers::default);
        Forward { file, kv, mode, team, isa, simd, layers, embed, positions, head_in, head, bufs, regions: 0 }
    }

    pub(super) fn spec(&self) -> &ModelSpec {
        self.file.spec()
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

    /// Computes a checked plan's embedding and layers; the residual stream behind them, `[m][hidden]`.
    pub(super) fn run(&mut self, plan: &Plan) -> &[f32] {
        let m: usize = plan.chunks.iter().map(|c| c.tokens.len()).sum();
        self.bufs.x.resize(m * self.spec().hidden, 0.0);
        self.embed(plan);
        self.bufs.angles.iter_mut().for_each(|a| a.turn(plan));
        for i in 0..self.layers.len() {
            self.norm_into_acts(Readers::Attention(i), None, m);
            self.qkv(i, m);
            self.rope_and_append(i, plan);
            self.attend(i, plan, m);
            self.output(i, m);
            self.norm_into_acts(Readers::Mlp(i), None, m);
            self.up(i, m);
            self.down(i);
        }
        &self.bufs.x
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
        let table = self.file.view(self.embed);
        let positions = self.positions.map(|t| self.file.view(t));
        let hidden = table.k;
        let place = |c: &super::Chunk, i: usize| (c.tokens[i] as usize, c.start + i);
        let places = plan.chunks.iter().flat_map(|c| (0..c.tokens.len()).map(move |i| place(c, i)));
        let places: Vec<(usize, usize)> = places.collect();
        let (simd, x) = (self.simd, Disjoint::new(&mut self.bufs.x));
        let threads = PerThread::new(&mut self.bufs.threads);
        Self::rows(&self.team, &mut self.regions, places.len(), &|t, row| {
            // SAFETY: each row is written by one call only.
            let out = unsafe { x.part(row * hidden..(row + 1) * hidden) };
            let (token, position) = places[row];
            embed_row(&table, token, out);
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
        let (input, tensors) = match readers {
            Readers::Attention(i) => (&self.layers[i].attn_in, self.layers[i].qkv.to_vec()),
            Readers::Mlp(i) => {
                let layer = &self.layers[i];
                (&layer.mlp_in, layer.gate.into_iter().chain([layer.up]).collect())
            }
            Readers::Head => (&self.head_in, vec![self.head]),
        };
        let hidden = self.file.spec().hidden;
        let forms = tensors.iter().map(|&t| Forms::of(self.file.view(t).scheme, self.mode));
        let forms = forms.reduce(Forms::and).expect("a norm has readers");
        self.bufs.acts.reset(m, hidden, forms);
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
