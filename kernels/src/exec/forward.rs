//! One step of a decoder on the CPU: embedding, layers, head.
//!
//! All rows of a step, whatever sequence they belong to, go through the linear layers together; only
//! attention looks at sequences. A layer is eight stages (norm, q/k/v, rope and append, attention,
//! o and residual, norm, gate/up and activation, down and residual); with few rows the small ones
//! run on the calling thread, where a parallel region would cost more than it saves.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use quern_models::{
    ModelFile, ModelSpec, PANEL, Scheme, TensorView,
    spec::{Attn, Rope},
};

use super::{Chunk, Plan};
use crate::{
    cpu::{
        acts::{Acts, Forms, MR, Mode},
        attend::{self, Params},
        isa::Isa,
        kv::{BLOCK, KvMemory, KvType},
        lanes::Simd,
        linear::{self, linear_panel},
        ops,
    },
    team::{Disjoint, Team, split},
};

/// Most activation rows of one unit of a linear layer: what a panel's weights are unpacked for.
const ROWS: usize = 64;

/// With at most so many rows, panels are dealt out once, contiguously: reading weights is the work.
const FEW_ROWS: usize = 16;

/// A model, its cache and the buffers of a step.
pub(super) struct Forward {
    file: Arc<ModelFile>,
    kv: KvMemory,
    mode: Mode,
    team: Team,
    isa: &'static Isa,
    simd: Simd,
    layers: Vec<LayerTensors>,
    embed: usize,
    head: usize,
    norm: Vec<f32>,
    bufs: Buffers,
    regions: usize,
}

/// Tensor indices and small vectors of one layer.
struct LayerTensors {
    attn_norm: Vec<f32>,
    mlp_norm: Vec<f32>,
    qkv: [usize; 3],
    o: usize,
    gate_up: [usize; 2],
    down: usize,
    /// Index into `Buffers::angles`: layers with the same rope share their angles.
    rope: usize,
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
    /// `[output rows][vocab]`.
    logits: Vec<f32>,
    /// Per distinct rope: frequencies and `[m][head_dim / 2]` cosines and sines.
    angles: Vec<Angles>,
    /// One per thread.
    threads: Vec<ThreadBuffers>,
    attend: attend::Workspace,
}

struct Angles {
    rope: Rope,
    head_dim: usize,
    inv_freq: Vec<f32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

#[derive(Default)]
struct ThreadBuffers {
    tile: Vec<f32>,
    tile2: Vec<f32>,
    row: Vec<f32>,
    linear: linear::Scratch,
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
        let index = |name: &str| file.index(name).expect("ModelFile::open checked every tensor of the spec");
        let vector = |name: &str| {
            let view = file.view(index(name));
            (0..view.k).map(|i| view.at(0, i)).collect::<Vec<f32>>()
        };
        let mut bufs = Buffers::default();
        let layers = file.spec().layers.iter().enumerate().map(|(i, layer)| {
            let at = |name: &str| index(&format!("layers.{i}.{name}"));
            let Attn::Gqa { head_dim, ref rope, .. } = layer.attn;
            let rope = rope.as_ref().expect("layers without rope come with the next change");
            LayerTensors {
                attn_norm: vector(&format!("layers.{i}.attn_norm")),
                mlp_norm: vector(&format!("layers.{i}.mlp_norm")),
                qkv: ["q", "k", "v"].map(at),
                o: at("o"),
                gate_up: ["gate", "up"].map(at),
                down: at("down"),
                rope: bufs.rope(rope, head_dim),
            }
        });
        let layers = layers.collect();
        let embed = index("embed");
        let head = if file.spec().tied_head { embed } else { index("head") };
        let norm = vector("norm");
        bufs.threads.resize_with(team.threads(), ThreadBuffers::default);
        Forward { file, kv, mode, team, isa, simd, layers, embed, head, norm, bufs, regions: 0 }
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
        let kv = match self.kv.kind() {
            KvType::F16 => "f16",
            KvType::F32 => "f32",
        };
        let (isa, threads) = (self.isa.name, self.team.threads());
        format!("{acts} activations, {kv} KV, {isa}, {threads} thread{}", if threads == 1 { "" } else { "s" })
    }

    /// Computes a checked plan; logits of the wanted rows, `[rows][vocab]`, in plan order.
    pub(super) fn step(&mut self, plan: &Plan) -> &mut [f32] {
        let file = self.file.clone();
        let spec = file.spec();
        let m: usize = plan.chunks.iter().map(|c| c.tokens.len()).sum();
        self.bufs.x.resize(m * spec.hidden, 0.0);
        self.embed(plan);
        self.bufs.turn(plan);
        for (i, layer) in spec.layers.iter().enumerate() {
            let eps = layer.attn_norm.eps();
            self.norm_into_acts(i, true, eps, m);
            self.qkv(i, m);
            self.rope_and_append(i, plan);
            self.attend(i, plan, m);
            self.output(i, m);
            let eps = layer.mlp_norm.eps();
            self.norm_into_acts(i, false, eps, m);
            self.gate_up(i, m);
            self.down(i);
        }
        self.head(plan)
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
        let hidden = table.k;
        let tokens: Vec<u32> = plan.chunks.iter().flat_map(|c| c.tokens).copied().collect();
        let x = Disjoint::new(&mut self.bufs.x);
        Self::rows(&self.team, &mut self.regions, tokens.len(), &|_, row| {
            // SAFETY: each row is written by one call only.
            let out = unsafe { x.part(row * hidden..(row + 1) * hidden) };
            embed_row(&table, tokens[row] as usize, out);
        });
    }

    /// Normalises every row of the residual stream into `acts`, in the forms that the layer's q/k/v
    /// (`attn`) or gate/up read.
    fn norm_into_acts(&mut self, layer: usize, attn: bool, eps: f32, m: usize) {
        let tensors = &self.layers[layer];
        let (weight, readers) =
            if attn { (&tensors.attn_norm, &tensors.qkv[..]) } else { (&tensors.mlp_norm, &tensors.gate_up[..]) };
        let hidden = weight.len();
        let forms = readers.iter().map(|&t| Forms::of(self.file.view(t).scheme, self.mode));
        let forms = forms.reduce(Forms::and).expect("a layer has readers");
        self.bufs.acts.reset(m, hidden, forms);
        let (isa, simd, acts, x) = (self.isa, self.simd, &self.bufs.acts, &self.bufs.x);
        let threads = PerThread::new(&mut self.bufs.threads);
        Self::rows(&self.team, &mut self.regions, m, &|t, row| {
            // SAFETY: `rows` gives each thread its own number.
            let buf = unsafe { threads.get(t) };
            buf.row.resize(hidden, 0.0);
            ops::rms_norm(simd, &x[row * hidden..(row + 1) * hidden], weight, eps, &mut buf.row);
            // SAFETY: each row is written by one call only and read in later regions.
            unsafe { acts.write_row(isa, row, &buf.row) }
        });
    }

    fn qkv(&mut self, layer: usize, m: usize) {
        let weights = self.layers[layer].qkv.map(|t| self.file.view(t));
        let stride: usize = weights.iter().map(|w| w.n).sum();
        self.bufs.qkv.resize(m * stride, 0.0);
        let out = Disjoint::new(&mut self.bufs.qkv);
        let store = |row: usize, at: usize, tile: &[f32]| {
            // SAFETY: a unit writes its own panel of its own rows.
            let to = unsafe { out.part(row * stride + at..row * stride + at + tile.len()) };
            to.copy_from_slice(tile);
        };
        let mut run = Linear {
            isa: self.isa,
            mode: self.mode,
            team: &self.team,
            regions: &mut self.regions,
            threads: &mut self.bufs.threads,
        };
        run.linears(&weights, &self.bufs.acts, &store);
    }

    fn rope_and_append(&mut self, layer: usize, plan: &Plan) {
        let Attn::Gqa { heads, kv_heads, head_dim, .. } = self.file.spec().layers[layer].attn;
        let (q, kv) = (heads * head_dim, kv_heads * head_dim);
        let stride = q + 2 * kv;
        let angles = &self.bufs.angles[self.layers[layer].rope];
        let half = head_dim / 2;
        let m = self.bufs.qkv.len() / stride;
        let places = places(plan);
        let (simd, cache, qkv) = (self.simd, &self.kv, Disjoint::new(&mut self.bufs.qkv));
        Self::rows(&self.team, &mut self.regions, m, &|_, row| {
            // SAFETY: each row is used by one call only.
            let all = unsafe { qkv.part(row * stride..(row + 1) * stride) };
            let (cos, sin) = (&angles.cos[row * half..(row + 1) * half], &angles.sin[row * half..(row + 1) * half]);
            let (turned, v) = all.split_at_mut(q + kv);
            ops::rope(simd, turned, head_dim, cos, sin);
            let (block, slot) = places[row];
            for h in 0..kv_heads {
                let part = h * head_dim..(h + 1) * head_dim;
                let k = &turned[q..][part.clone()];
                // SAFETY: the plan's rows have distinct (block, slot) places, and attention, which
                // reads them, is a later region.
                unsafe { cache.append(layer, block, slot, h, k, &v[part]) }
            }
        });
    }

    fn attend(&mut self, layer: usize, plan: &Plan, m: usize) {
        let Attn::Gqa { heads, kv_heads, head_dim, scale, .. } = self.file.spec().layers[layer].attn;
        let stride = (heads + 2 * kv_heads) * head_dim;
        self.bufs.attended.resize(m * heads * head_dim, 0.0);
        let mut row = 0;
        let mut chunks = Vec::with_capacity(plan.chunks.len());
        for c in &plan.chunks {
            let rows = c.tokens.len();
            let q = &self.bufs.qkv[row * stride..(row + rows) * stride];
            chunks.push(attend::Chunk { q, stride, rows, pos0: c.start, table: c.blocks });
            row += rows;
        }
        let params = Params { layer, heads, scale, window: None };
        self.regions += 1;
        let (scratch, out) = (&mut self.bufs.attend, &mut self.bufs.attended);
        // SAFETY: `&mut self`: this step is the only one, and its appends ended with the last region.
        unsafe { attend::attend(self.simd, &self.team, scratch, &self.kv, &params, &chunks, out) }
    }

    /// Output projection, added to the residual stream.
    fn output(&mut self, layer: usize, m: usize) {
        let file = self.file.clone();
        let w = file.view(self.layers[layer].o);
        let k = w.k;
        self.bufs.acts.reset(m, k, Forms::of(w.scheme, self.mode));
        let (isa, acts, from) = (self.isa, &self.bufs.acts, &self.bufs.attended);
        Self::rows(&self.team, &mut self.regions, m, &|_, row| {
            // SAFETY: each row is written by one call only and read in later regions.
            unsafe { acts.write_row(isa, row, &from[row * k..(row + 1) * k]) }
        });
        self.add_linear(&w, false);
    }

    fn down(&mut self, layer: usize) {
        let file = self.file.clone();
        self.add_linear(&file.view(self.layers[layer].down), true);
    }

    /// `x += w * acts`, of the down projection's input if `inner`.
    fn add_linear(&mut self, w: &TensorView, inner: bool) {
        let hidden = w.n;
        let (simd, x) = (self.simd, Disjoint::new(&mut self.bufs.x));
        let add = |row: usize, at: usize, tile: &[f32]| {
            // SAFETY: a unit adds to its own panel of its own rows.
            let to = unsafe { x.part(row * hidden + at..row * hidden + at + tile.len()) };
            ops::add(simd, to, tile);
        };
        let acts = if inner { &self.bufs.inner } else { &self.bufs.acts };
        let mut run = Linear {
            isa: self.isa,
            mode: self.mode,
            team: &self.team,
            regions: &mut self.regions,
            threads: &mut self.bufs.threads,
        };
        run.linears(std::slice::from_ref(w), acts, &add);
    }

    /// Gate and up; the activated product goes panel by panel into `inner`, quantized where it is computed.
    fn gate_up(&mut self, layer: usize, m: usize) {
        let tensors = &self.layers[layer];
        let [gate, up] = tensors.gate_up.map(|t| self.file.view(t));
        self.bufs.inner.reset(m, gate.n, Forms::of(self.file.view(tensors.down).scheme, self.mode));
        let (isa, simd, mode) = (self.isa, self.simd, self.mode);
        let (acts, inner) = (&self.bufs.acts, &self.bufs.inner);
        let threads = PerThread::new(&mut self.bufs.threads);
        Linear::units(&self.team, &mut self.regions, gate.panels(), m, &|t, panel, rows| {
            // SAFETY: `units` gives each thread its own number.
            let buf = unsafe { threads.get(t) };
            buf.tile.resize(rows.len() * PANEL, 0.0);
            buf.tile2.resize(rows.len() * PANEL, 0.0);
            linear_panel(isa, &gate, acts, mode, panel, rows.clone(), &mut buf.tile, &mut buf.linear);
            linear_panel(isa, &up, acts, mode, panel, rows.clone(), &mut buf.tile2, &mut buf.linear);
            let width = (gate.n - panel * PANEL).min(PANEL);
            let mut product = [0.0; PANEL];
            let product = &mut product[..width];
            for (i, row) in rows.enumerate() {
                let part = i * PANEL..i * PANEL + width;
                ops::silu_mul(simd, &buf.tile[part.clone()], &buf.tile2[part], product);
                // SAFETY: a unit writes its own 64 columns of its own rows, read in later regions.
                unsafe { inner.write_part(isa, row, panel, product) }
            }
        });
    }

    /// Final norm and head of the rows that want logits.
    fn head(&mut self, plan: &Plan) -> &mut [f32] {
        let w = self.file.view(self.head);
        let eps = self.file.spec().norm.eps();
        let mut wanted = vec![];
        let mut row = 0;
        for c in &plan.chunks {
            wanted.extend(row + c.output.from(c.tokens.len())..row + c.tokens.len());
            row += c.tokens.len();
        }
        let (hidden, vocab) = (w.k, w.n);
        self.bufs.logits.resize(wanted.len() * vocab, 0.0);
        if wanted.is_empty() {
            return &mut self.bufs.logits;
        }
        self.bufs.acts.reset(wanted.len(), hidden, Forms::of(w.scheme, self.mode));
        let (isa, simd, acts, x, norm) = (self.isa, self.simd, &self.bufs.acts, &self.bufs.x, &self.norm);
        let threads = PerThread::new(&mut self.bufs.threads);
        Self::rows(&self.team, &mut self.regions, wanted.len(), &|t, i| {
            // SAFETY: `rows` gives each thread its own number.
            let buf = unsafe { threads.get(t) };
            buf.row.resize(hidden, 0.0);
            ops::rms_norm(simd, &x[wanted[i] * hidden..(wanted[i] + 1) * hidden], norm, eps, &mut buf.row);
            // SAFETY: each row is written by one call only and read in later regions.
            unsafe { acts.write_row(isa, i, &buf.row) }
        });
        let out = Disjoint::new(&mut self.bufs.logits);
        let store = |row: usize, at: usize, tile: &[f32]| {
            // SAFETY: a unit writes its own panel of its own rows.
            let to = unsafe { out.part(row * vocab + at..row * vocab + at + tile.len()) };
            to.copy_from_slice(tile);
        };
        let mut run = Linear {
            isa: self.isa,
            mode: self.mode,
            team: &self.team,
            regions: &mut self.regions,
            threads: &mut self.bufs.threads,
        };
        run.linears(std::slice::from_ref(&w), &self.bufs.acts, &store);
        &mut self.bufs.logits
    }
}

/// What a linear layer needs besides weights and activations.
struct Linear<'a> {
    isa: &'static Isa,
    mode: Mode,
    team: &'a Team,
    regions: &'a mut usize,
    threads: &'a mut [ThreadBuffers],
}

impl Linear<'_> {
    /// Several weights on one input, in one region. `put(row, column, outputs)` gets up to 64 outputs
    /// at a time; columns count through the weights.
    fn linears(&mut self, weights: &[TensorView], acts: &Acts, put: &(dyn Fn(usize, usize, &[f32]) + Sync)) {
        let panels: usize = weights.iter().map(TensorView::panels).sum();
        let (isa, mode) = (self.isa, self.mode);
        let threads = PerThread::new(self.threads);
        Self::units(self.team, self.regions, panels, acts.m(), &|t, panel, rows| {
            let (mut panel, mut column, mut w) = (panel, 0, &weights[0]);
            for next in &weights[1..] {
                if panel < w.panels() {
                    break;
                }
                panel -= w.panels();
                column += w.n;
                w = next;
            }
            // SAFETY: `units` gives each thread its own number.
            let buf = unsafe { threads.get(t) };
            buf.tile.resize(rows.len() * PANEL, 0.0);
            linear_panel(isa, w, acts, mode, panel, rows.clone(), &mut buf.tile, &mut buf.linear);
            let width = (w.n - panel * PANEL).min(PANEL);
            for (tile, row) in buf.tile.chunks_exact(PANEL).zip(rows) {
                put(row, column + panel * PANEL, &tile[..width]);
            }
        });
    }

    /// Runs `f(thread, panel, rows)` so that every panel meets every row once.
    ///
    /// Few rows: a contiguous share of the panels per thread, as the memory likes it. Many: units of
    /// up to 64 rows, taken by whoever is free.
    fn units(
        team: &Team,
        regions: &mut usize,
        panels: usize,
        m: usize,
        f: &(dyn Fn(usize, usize, Range<usize>) + Sync),
    ) {
        if m <= FEW_ROWS {
            Forward::region(team, regions, &|t| split(panels, team.threads(), t).for_each(|p| f(t, p, 0..m)));
            return;
        }
        let chunks = m.div_ceil(ROWS);
        // Chunks of equal length rather than a short last one; starts stay multiples of MR.
        let rows = m.div_ceil(chunks).next_multiple_of(MR);
        let next = AtomicUsize::new(0);
        Forward::region(team, regions, &|t| {
            loop {
                let unit = next.fetch_add(1, Ordering::Relaxed);
                if unit >= panels * chunks {
                    return;
                }
                let start = unit % chunks * rows;
                if start < m {
                    f(t, unit / chunks, start..(start + rows).min(m));
                }
            }
        });
    }
}

/// Buffers of which each thread uses its own.
struct PerThread<'a, T>(Disjoint<'a, T>);

impl<'a, T> PerThread<'a, T> {
    fn new(all: &'a mut [T]) -> Self {
        PerThread(Disjoint::new(all))
    }

    /// # Safety
    /// Only thread `t` of the region asks for `t`, and keeps one result at a time.
    #[allow(clippy::mut_from_ref)]
    unsafe fn get(&self, t: usize) -> &mut T {
        // SAFETY: the caller's promise.
        unsafe { &mut self.0.part(t..t + 1)[0] }
    }
}

impl Buffers {
    /// Index of the angles of a rope, shared with earlier layers where equal.
    fn rope(&mut self, rope: &Rope, head_dim: usize) -> usize {
        if let Some(i) = self.angles.iter().position(|a| a.rope == *rope && a.head_dim == head_dim) {
            return i;
        }
        let inv_freq = rope.inv_freq(head_dim);
        self.angles.push(Angles { rope: rope.clone(), head_dim, inv_freq, cos: vec![], sin: vec![] });
        self.angles.len() - 1
    }

    /// Computes every row's angles. The product is rounded to f32 first, as the reference library does.
    fn turn(&mut self, plan: &Plan) {
        for a in &mut self.angles {
            a.cos.clear();
            a.sin.clear();
            let positions = plan.chunks.iter().flat_map(|c| c.start..c.start + c.tokens.len());
            for position in positions {
                for &f in &a.inv_freq {
                    let angle = (position as f32 * f) as f64;
                    a.cos.push(angle.cos() as f32);
                    a.sin.push(angle.sin() as f32);
                }
            }
        }
    }
}

/// Block and slot of every row of a plan.
fn places(plan: &Plan) -> Vec<(u32, usize)> {
    let place = |c: &Chunk, i: usize| (c.blocks[(c.start + i) / BLOCK], (c.start + i) % BLOCK);
    plan.chunks.iter().flat_map(|c| (0..c.tokens.len()).map(move |i| place(c, i))).collect()
}

/// One row of an embedding table in f32, equal to [`TensorView::at`] element by element.
fn embed_row(table: &TensorView, row: usize, out: &mut [f32]) {
    match table.scheme {
        Scheme::Float(t) => {
            let bytes = &table.codes[row * table.k * t.size()..(row + 1) * table.k * t.size()];
            out.iter_mut().enumerate().for_each(|(i, o)| *o = t.read(bytes, i));
        }
        _ => out.iter_mut().enumerate().for_each(|(i, o)| *o = table.at(row, i)),
    }
}
