//! The attention half of a layer: q/k/v, norms of heads, rope, append, attention, output projection.

use quern_models::{TensorView, spec::Attn};

use super::{
    Forward, Plan,
    linear::{Linear, PerThread},
    tensors::gather,
};
use crate::{
    cpu::{
        acts::Forms,
        attend::{self, Params},
        kv::BLOCK,
        ops,
    },
    exec::Chunk,
    team::Disjoint,
};

impl Forward {
    pub(super) fn qkv(&mut self, layer: usize) {
        let tensors = &self.layers[layer];
        let weights = tensors.qkv.map(|t| self.file.view(t));
        let mut run = Linear {
            isa: self.isa,
            mode: self.mode,
            team: &self.team,
            regions: &mut self.regions,
            threads: &mut self.bufs.threads,
        };
        run.store(&weights, &self.bufs.acts, &tensors.qkv_bias, &mut self.bufs.qkv);
    }

    pub(super) fn rope_and_append(&mut self, layer: usize, plan: &Plan) {
        let Attn::Gqa { heads, kv_heads, head_dim, .. } = self.file.spec().layers[layer].attn;
        let (q, kv) = (heads * head_dim, kv_heads * head_dim);
        let stride = q + 2 * kv;
        let tensors = &self.layers[layer];
        let angles = tensors.rope.map(|i| &self.bufs.angles[i]);
        let m = self.bufs.qkv.len() / stride;
        let places = places(plan);
        let (simd, cache, qkv) = (self.simd, &self.kv, Disjoint::new(&mut self.bufs.qkv));
        Self::rows(&self.team, &mut self.regions, m, &|_, row| {
            // SAFETY: each row is used by one call only.
            let all = unsafe { qkv.part(row * stride..(row + 1) * stride) };
            let (turned, v) = all.split_at_mut(q + kv);
            if let Some(([q_norm, k_norm], eps)) = &tensors.qk_norm {
                let mut normed = [0.0; MAX_HEAD];
                let normed = &mut normed[..head_dim];
                for (h, head) in turned.chunks_exact_mut(head_dim).enumerate() {
                    let weight = if h < heads { q_norm } else { k_norm };
                    ops::rms_norm(simd, head, weight, *eps, normed);
                    head.copy_from_slice(normed);
                }
            }
            if let Some((cos, sin)) = angles.map(|a| a.row(row)) {
                ops::rope(simd, turned, head_dim, cos, sin);
            }
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

    pub(super) fn attend(&mut self, layer: usize, plan: &Plan, m: usize) {
        let Attn::Gqa { heads, kv_heads, head_dim, scale, window, cap, .. } = self.file.spec().layers[layer].attn;
        let stride = (heads + 2 * kv_heads) * head_dim;
        self.bufs.attended.resize(m * heads * head_dim, 0.0);
        let mut row = 0;
        let mut chunks = Vec::with_capacity(plan.chunks.len());
        for c in &plan.chunks {
            let rows = c.tokens.len();
            let q = &self.bufs.qkv[row * stride..(row + rows) * stride];
            chunks.push(attend::Chunk { q, stride, rows, pos0: c.start, table: c.blocks, mask: c.mask });
            row += rows;
        }
        let params = Params { layer, heads, scale, window, cap, sinks: &self.layers[layer].sinks };
        self.regions += 1;
        let (scratch, out) = (&mut self.bufs.attend, &mut self.bufs.attended);
        // SAFETY: `&mut self`: this step is the only one, and its appends ended with the last region.
        unsafe { attend::attend(self.simd, &self.team, scratch, &self.kv, &params, &chunks, out) }
    }

    /// Output projection, added to the residual stream.
    pub(super) fn output(&mut self, layer: usize, m: usize) {
        let file = self.file.clone();
        let w = file.view(self.layers[layer].o);
        let k = w.k;
        self.bufs.acts.reset(self.isa, m, k, Forms::of(w.scheme, self.mode));
        let (isa, acts, from) = (self.isa, &self.bufs.acts, &self.bufs.attended);
        let order = &self.layers[layer].o_order;
        let threads = PerThread::new(&mut self.bufs.threads);
        Self::rows(&self.team, &mut self.regions, m, &|t, row| {
            // SAFETY: `rows` gives each thread its own number.
            let buf = unsafe { threads.get(t) };
            let x = gather(order, &from[row * k..(row + 1) * k], &mut buf.ordered);
            // SAFETY: each row is written by one call only and read in later regions.
            unsafe { acts.write_row(isa, row, x) }
        });
        self.add_linear(&w, layer, Half::Attention);
    }

    /// `x += w * acts + bias`, of one half of a layer, or `x += norm(w * acts + bias)`.
    pub(super) fn add_linear(&mut self, w: &TensorView, layer: usize, half: Half) {
        let hidden = w.n;
        let tensors = &self.layers[layer];
        let (acts, bias) = match half {
            Half::Attention => (&self.bufs.acts, &tensors.o_bias),
            Half::Mlp => (&self.bufs.inner, &tensors.block().down_bias),
        };
        if let Some(norm) = match half {
            Half::Attention => &tensors.attn_out,
            Half::Mlp => &tensors.mlp_out,
        } {
            let m = acts.m();
            let mut run = Linear {
                isa: self.isa,
                mode: self.mode,
                team: &self.team,
                regions: &mut self.regions,
                threads: &mut self.bufs.threads,
            };
            run.store(std::slice::from_ref(w), acts, bias, &mut self.bufs.half);
            let (simd, from, x) = (self.simd, &self.bufs.half, Disjoint::new(&mut self.bufs.x));
            let threads = PerThread::new(&mut self.bufs.threads);
            return Self::rows(&self.team, &mut self.regions, m, &|t, row| {
                let part = row * hidden..(row + 1) * hidden;
                // SAFETY: `rows` gives each thread its own number, and each row to one call only.
                let (buf, to) = unsafe { (threads.get(t), x.part(part.clone())) };
                buf.row.resize(hidden, 0.0);
                norm.norm(simd, &from[part], &mut buf.row);
                ops::add(simd, to, &buf.row);
            });
        }
        let (simd, x) = (self.simd, Disjoint::new(&mut self.bufs.x));
        let add = |row: usize, at: usize, tile: &[f32]| {
            // SAFETY: a unit adds to its own panel of its own rows.
            let to = unsafe { x.part(row * hidden + at..row * hidden + at + tile.len()) };
            if bias.is_empty() {
                ops::add(simd, to, tile);
            } else {
                to.iter_mut().zip(tile).zip(&bias[at..]).for_each(|((x, y), b)| *x += y + b);
            }
        };
        let mut run = Linear {
            isa: self.isa,
            mode: self.mode,
            team: &self.team,
            regions: &mut self.regions,
            threads: &mut self.bufs.threads,
        };
        run.linears(std::slice::from_ref(w), acts, &add);
    }
}

/// Largest head that a spec may have.
const MAX_HEAD: usize = 256;

/// The half of a layer whose last projection is added to the residual stream.
#[derive(Clone, Copy)]
pub(super) enum Half {
    Attention,
    Mlp,
}

/// Block and slot of every row of a plan.
fn places(plan: &Plan) -> Vec<(u32, usize)> {
    let place = |c: &Chunk, i: usize| (c.blocks[(c.start + i) / BLOCK], (c.start + i) % BLOCK);
    plan.chunks.iter().flat_map(|c| (0..c.tokens.len()).map(move |i| place(c, i))).collect()
}
