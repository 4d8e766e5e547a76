//! Causal attention over a paged cache, query heads grouped by the key/value head they share.
//!
//! Work is cut into units: some rows of one sequence's chunk, one key/value head, and one split or all splits of the
//! context. Splits lie at absolute multiples of [`SPLIT`] tokens. Inside a split the softmax is online, block by
//! block; splits are folded from left to right. All of it depends on the row's own position and window only, so a
//! row gets the same bits alone or in a chunk, however units are cut and whoever runs them.
//!
//! Rows of a tree share the blocks before the chunk; of the chunk's own tokens each gets those of its path, copied one
//! behind the other, where a plain sequence would have them. So it computes what it would compute there, in the same
//! order.
//!
//! [`attend`] does a whole step; the unit functions below it are for callers that plan regions themselves. The
//! arithmetic is in `tile`, its inner loops in `loops` and `codes`, those of AVX-512 in `wide`.

mod codes;
mod fp8;
mod ints;
mod loops;
mod tile;
#[cfg(target_arch = "x86_64")]
mod wide;

use std::ops::Range;

use super::kv::{KvMemory, KvType};
#[cfg(target_arch = "x86_64")]
use super::lanes::Avx2;
#[cfg(target_arch = "aarch64")]
use super::lanes::Neon;
use super::lanes::{Kind, Portable, Simd};
use crate::{
    mask::Mask,
    team::{Disjoint, Team, split as share},
};
use codes::Codes;
use fp8::Small;
use loops::{Half, Loops, Single};
use tile::{Group, Own, Rows, State, Storage};
#[cfg(target_arch = "x86_64")]
use wide::Avx512;

/// Calls `$f::<lanes, storage>` for what the CPU and the cache are.
macro_rules! run {
    ($simd:expr, $kv:expr, $f:ident $args:tt) => {
        match ($simd.kind(), $kv.kind()) {
            (Kind::Portable, KvType::F16) => $f::<Portable, Half> $args,
            (Kind::Portable, KvType::F32) => $f::<Portable, Single> $args,
            (Kind::Portable, KvType::Int8) => $f::<Portable, Codes> $args,
            (Kind::Portable, KvType::Fp8) => $f::<Portable, Small> $args,
            #[cfg(target_arch = "x86_64")]
            (Kind::Avx2, KvType::F16) => $f::<Avx2, Half> $args,
            #[cfg(target_arch = "x86_64")]
            (Kind::Avx2, KvType::F32) => $f::<Avx2, Single> $args,
            #[cfg(target_arch = "x86_64")]
            (Kind::Avx2, KvType::Int8) => $f::<Avx2, Codes> $args,
            #[cfg(target_arch = "x86_64")]
            (Kind::Avx2, KvType::Fp8) => $f::<Avx2, Small> $args,
            #[cfg(target_arch = "x86_64")]
            (Kind::Avx512, KvType::F16) => $f::<Avx512, Half> $args,
            #[cfg(target_arch = "x86_64")]
            (Kind::Avx512, KvType::F32) => $f::<Avx512, Single> $args,
            #[cfg(target_arch = "x86_64")]
            (Kind::Avx512, KvType::Int8) => $f::<Avx512, Codes> $args,
            #[cfg(target_arch = "x86_64")]
            (Kind::Avx512, KvType::Fp8) => $f::<Avx512, Small> $args,
            #[cfg(target_arch = "aarch64")]
            (Kind::Neon, KvType::F16) => $f::<Neon, Half> $args,
            #[cfg(target_arch = "aarch64")]
            (Kind::Neon, KvType::F32) => $f::<Neon, Single> $args,
            #[cfg(target_arch = "aarch64")]
            (Kind::Neon, KvType::Int8) => $f::<Neon, Codes> $args,
            #[cfg(target_arch = "aarch64")]
            (Kind::Neon, KvType::Fp8) => $f::<Neon, Small> $args,
        }
    };
}

/// Tokens of a split of the context.
pub const SPLIT: usize = 256;

/// What is the same for every sequence of one layer.
#[derive(Debug, Clone, Copy)]
pub struct Params<'a> {
    /// Layer of the cache.
    pub layer: usize,
    /// Query heads; a multiple of the layer's key/value heads.
    pub heads: usize,
    /// Factor on `q . k`.
    pub scale: f32,
    /// A row sees only the last so many tokens, itself included; at least 1.
    pub window: Option<usize>,
    /// Soft cap of the scores.
    pub cap: Option<f32>,
    /// A score of each query head that has no value, `[heads]`; none if empty.
    pub sinks: &'a [f32],
}

/// New tokens of one sequence. Their keys and values are in the cache already.
#[derive(Debug, Clone, Copy)]
pub struct Chunk<'a> {
    /// Queries, `[rows, stride]`; a row starts with `[heads, head_dim]`.
    pub q: &'a [f32],
    /// Elements from row to row.
    pub stride: usize,
    /// Rows.
    pub rows: usize,
    /// Slot of row 0; that of row `r` is `pos0 + r`.
    pub pos0: usize,
    /// Blocks of the sequence in order, at least up to the last row's token. What lies further is never looked at.
    pub table: &'a [u32],
    /// Which rows see each other; one that `Mask::check` passed.
    pub mask: Mask<'a>,
}

impl Chunk<'_> {
    /// Position of the last token that a row sees, in the order of the tokens that it sees. It sees all up to there but
    /// for the window.
    fn last(&self, row: usize) -> usize {
        self.pos0 + self.mask.last(self.rows, row)
    }

    /// Least and greatest [`Chunk::last`] of some rows, at least one.
    fn lasts(&self, rows: Range<usize>) -> (usize, usize) {
        match self.mask {
            Mask::Tree(_) => rows.fold((usize::MAX, 0), |(a, b), r| (a.min(self.last(r)), b.max(self.last(r)))),
            _ => (self.last(rows.start), self.last(rows.end - 1)),
        }
    }
}

/// Working memory of [`attend`], kept from step to step.
#[derive(Default)]
pub struct Workspace {
    scratch: Vec<Scratch>,
    partials: Vec<f32>,
    units: Vec<Unit>,
    merges: Vec<Merge>,
}

/// Working memory of one thread; grows as needed.
#[derive(Default)]
pub struct Scratch {
    lines: Vec<Line>,
    own: Own,
}

/// A cache line; only ever looked at through pointers.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[allow(dead_code)] [f32; 16]);

/// Attention of one layer for all chunks of a step; `out` is `[rows of all chunks, heads * head_dim]` in chunk order.
///
/// Runs one region of the team, and a second, short one if a long context was shared between threads.
///
/// # Safety
/// Nobody may append to a block of a chunk's table meanwhile.
pub unsafe fn attend(
    simd: Simd,
    team: &Team,
    space: &mut Workspace,
    kv: &KvMemory,
    params: &Params,
    chunks: &[Chunk],
    out: &mut [f32],
) {
    let threads = team.threads();
    let width = params.heads * kv.layer(params.layer).head_dim;
    space.plan(threads, kv, params, chunks);
    space.scratch.resize_with(threads.max(space.scratch.len()), Scratch::default);
    let total: usize = space.units.iter().map(|u| u.cost).sum();
    let scratch = Disjoint::new(&mut space.scratch);
    let partials = Disjoint::new(&mut space.partials);
    let rows_out = Disjoint::new(out);
    team.run(&|tid| {
        let mine = share(total, threads, tid);
        let mut before = 0;
        // SAFETY: each thread has its own number.
        let scratch = unsafe { &mut scratch.part(tid..tid + 1)[0] };
        for unit in &space.units {
            // A unit belongs to the thread whose share its middle falls into.
            let middle = before + unit.cost / 2;
            before += unit.cost;
            if !mine.contains(&middle) {
                continue;
            }
            let (chunk, rows, head) = (&chunks[unit.chunk], unit.rows.clone(), unit.kv_head);
            // SAFETY: units differ in rows, head or split, so no two write the same elements; no appends by the
            // caller's promise.
            unsafe {
                match unit.split {
                    None => {
                        let at = At { start: unit.out, stride: width };
                        attend_rows(simd, kv, params, chunk, rows, head, scratch, &rows_out, at);
                    }
                    Some(split) => {
                        let at = unit.out;
                        attend_split(simd, kv, params, chunk, rows, head, split, scratch, &partials, at);
                    }
                }
            }
        }
    });
    if space.merges.is_empty() {
        return;
    }
    let (merges, partials) = (&space.merges, &space.partials);
    let heads = merges.len() * params.heads;
    let d = width / params.heads;
    team.run(&|tid| {
        for i in share(heads, threads, tid) {
            let (row, h) = (&merges[i / params.heads], i % params.heads);
            // SAFETY: (row, head) pairs go to one thread each.
            let out = unsafe { rows_out.part(row.out + h * d..row.out + (h + 1) * d) };
            let from = row.partials + h * row.slots * partial_len(d);
            let sink = params.sinks.get(h).copied();
            merge(simd, &partials[from..from + row.splits * partial_len(d)], sink, out);
        }
    });
}

/// Some rows of one chunk against one key/value head.
struct Unit {
    chunk: usize,
    rows: Range<usize>,
    kv_head: usize,
    /// One split, or `None` for all of them.
    split: Option<usize>,
    /// Where the chunk's results start: in the output, or in the partials if only one split is done.
    out: usize,
    /// Estimate for sharing units between threads.
    cost: usize,
}

/// A row whose splits were done separately.
struct Merge {
    /// Where the partials of the row's first head start.
    partials: usize,
    /// Partials from head to head.
    slots: usize,
    /// Partials that the row has, from the first slot on.
    splits: usize,
    /// Where the row starts in the output.
    out: usize,
}

impl Workspace {
    /// Fills in `units`, `merges` and the size of `partials`. Any plan gives the same bits.
    fn plan(&mut self, threads: usize, kv: &KvMemory, params: &Params, chunks: &[Chunk]) {
        let layer = kv.layer(params.layer);
        let group = params.heads / layer.kv_heads;
        self.units.clear();
        self.merges.clear();
        let work: usize = chunks.iter().map(|c| cost(params, c, 0..c.rows, group)).sum::<usize>() * layer.kv_heads;
        let (mut out, mut partials) = (0, 0);
        for (index, chunk) in chunks.iter().enumerate() {
            let step = rows_of_unit(group);
            let all = splits_of(params, chunk, 0..chunk.rows);
            let slots = all.len();
            let size = chunk.rows * params.heads * slots * partial_len(layer.head_dim);
            let largest = cost(params, chunk, chunk.rows.saturating_sub(step)..chunk.rows, group);
            let cut = threads > 1 && slots > 1 && largest * 8 * threads > work && size <= MAX_PARTIALS;
            for kv_head in 0..layer.kv_heads {
                let mut first = 0;
                while first < chunk.rows {
                    // Units end at multiples of the step, where the causal edge is a block's edge.
                    let end = ((chunk.pos0 + first) / step + 1) * step - chunk.pos0;
                    let rows = first..end.min(chunk.rows);
                    first = rows.end;
                    let cost = cost(params, chunk, rows.clone(), group);
                    if !cut {
                        self.units.push(Unit { chunk: index, rows, kv_head, split: None, out, cost });
                        continue;
                    }
                    let seen = splits_of(params, chunk, rows.clone());
                    for split in seen.clone() {
                        let (rows, cost) = (rows.clone(), cost / seen.len());
                        self.units.push(Unit { chunk: index, rows, kv_head, split: Some(split), out: partials, cost });
                    }
                }
            }
            let width = params.heads * layer.head_dim;
            if cut {
                for r in 0..chunk.rows {
                    let seen = splits(chunk.last(r), params.window);
                    let skipped = seen.start - all.start;
                    let at = partials + (r * params.heads * slots + skipped) * partial_len(layer.head_dim);
                    self.merges.push(Merge { partials: at, slots, splits: seen.len(), out: out + r * width });
                }
                partials += size;
            }
            out += chunk.rows * width;
        }
        if self.partials.len() < partials {
            self.partials.resize(partials, 0.0);
        }
    }
}

/// Most f32 that one chunk's partials may take; a longer chunk has enough rows to share.
const MAX_PARTIALS: usize = 4 << 20;

/// Rows that one unit takes: enough vectors to make up for widening a block once, whole blocks of rows.
fn rows_of_unit(group: usize) -> usize {
    if group <= 2 { 32 } else { 16 }
}

/// Time of a unit in some measure: a block costs at least its bytes, and each vector its arithmetic.
fn cost(params: &Params, chunk: &Chunk, rows: Range<usize>, group: usize) -> usize {
    let last = chunk.pos0 + rows.end;
    let tokens = params.window.map_or(last, |w| last.min(w + rows.len()));
    tokens * (4 + rows.len() * group)
}

/// Splits that the row at `pos` sees.
pub fn splits(pos: usize, window: Option<usize>) -> Range<usize> {
    let first = window.map_or(0, |w| (pos + 1).saturating_sub(w));
    first / SPLIT..pos / SPLIT + 1
}

/// Splits that some rows of a chunk see together.
fn splits_of(params: &Params, chunk: &Chunk, rows: Range<usize>) -> Range<usize> {
    let (first, last) = if rows.is_empty() { (chunk.pos0, chunk.pos0) } else { chunk.lasts(rows) };
    splits(first, params.window).start..last / SPLIT + 1
}

/// Where rows go in a shared output.
#[derive(Debug, Clone, Copy)]
pub struct At {
    /// Start of the chunk's row 0.
    pub start: usize,
    /// Elements from row to row.
    pub stride: usize,
}

/// Whole context of some rows and one key/value head; writes the head group's columns of those rows,
/// `out[at.start + r * at.stride + h * head_dim..]`.
///
/// # Safety
/// Nobody else may use those elements of `out` meanwhile, nor append to the chunk's blocks.
pub unsafe fn attend_rows(
    simd: Simd,
    kv: &KvMemory,
    params: &Params,
    chunk: &Chunk,
    rows: Range<usize>,
    kv_head: usize,
    scratch: &mut Scratch,
    out: &Disjoint<f32>,
    at: At,
) {
    let Some(g) = group(kv, params, chunk, rows.clone(), kv_head) else { return };
    let start = at.start + rows.start * at.stride + kv_head * g.heads * g.head_dim;
    let mut row = |v: usize| {
        let from = start + v / g.heads * at.stride + v % g.heads * g.head_dim;
        // SAFETY: inside what the caller promised to us; one vector at a time.
        unsafe { out.part(from..from + g.head_dim) }
    };
    // SAFETY: a `Simd` exists only where it can run; the element type is the cache's; no appends by the caller's
    // promise.
    unsafe { run!(simd, kv, whole(&g, scratch, &mut row)) }
}

/// One split of the context of some rows and one key/value head; writes partials at `start` of `[rows of the chunk,
/// heads, slots, partial_len]`. Slot 0 is the first split that row 0 of the chunk sees, and there are as many slots
/// as splits that the chunk's rows see together. Partials of rows that see nothing of the split are left alone.
///
/// # Safety
/// Nobody else may use those partials meanwhile, nor append to the chunk's blocks.
pub unsafe fn attend_split(
    simd: Simd,
    kv: &KvMemory,
    params: &Params,
    chunk: &Chunk,
    rows: Range<usize>,
    kv_head: usize,
    split: usize,
    scratch: &mut Scratch,
    partials: &Disjoint<f32>,
    start: usize,
) {
    let Some(g) = group(kv, params, chunk, rows.clone(), kv_head) else { return };
    let all = splits_of(params, chunk, 0..chunk.rows);
    assert!(all.contains(&split), "split {split} of {all:?}");
    let len = partial_len(g.head_dim);
    let mut slot = |v: usize| {
        let (row, head) = (rows.start + v / g.heads, kv_head * g.heads + v % g.heads);
        let from = start + ((row * params.heads + head) * all.len() + split - all.start) * len;
        // SAFETY: inside what the caller promised to us; one vector at a time.
        unsafe { partials.part(from..from + len) }
    };
    // SAFETY: as in `attend_rows`.
    unsafe { run!(simd, kv, part(&g, scratch, split, &mut slot)) }
}

/// Elements of one partial: maximum, sum, padding, `head_dim` weighted values.
pub const fn partial_len(head_dim: usize) -> usize {
    HEADER + head_dim
}

const HEADER: usize = 8;

/// Folds the partials of one row and head, `[splits, partial_len]` in split order, and the head's sink, if it has one,
/// into its output, `[head_dim]`.
pub fn merge(simd: Simd, partials: &[f32], sink: Option<f32>, out: &mut [f32]) {
    assert!(
        !partials.is_empty() && partials.len().is_multiple_of(partial_len(out.len())),
        "{} partial",
        partials.len()
    );
    // SAFETY: a `Simd` exists only where it can run.
    unsafe {
        match simd.kind() {
            Kind::Portable => merge_in::<Portable>(partials, sink, out),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => merge_in::<Avx2>(partials, sink, out),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => merge_in::<Avx512>(partials, sink, out),
            #[cfg(target_arch = "aarch64")]
            Kind::Neon => merge_in::<Neon>(partials, sink, out),
        }
    }
}

/// Parses a unit; `None` if it has no rows. Panics if the chunk is shorter than it says.
fn group<'a>(
    kv: &'a KvMemory,
    params: &Params<'a>,
    chunk: &Chunk<'a>,
    rows: Range<usize>,
    kv_head: usize,
) -> Option<Group<'a>> {
    if rows.is_empty() {
        return None;
    }
    let layer = kv.layer(params.layer);
    let heads = params.heads / layer.kv_heads;
    assert!(heads * layer.kv_heads == params.heads, "{} heads over {} kv heads", params.heads, layer.kv_heads);
    assert!(rows.end <= chunk.rows && params.window != Some(0), "rows {rows:?} of {}", chunk.rows);
    let q = rows.start * chunk.stride + kv_head * heads * layer.head_dim;
    let (order, end) = match chunk.mask {
        Mask::Causal => (Rows::Rising, rows.end),
        Mask::Full => (Rows::Level, chunk.rows),
        Mask::Tree(masks) => (Rows::Tree { start: chunk.pos0, masks: &masks[rows.clone()] }, rows.end),
    };
    Some(Group {
        kv,
        layer: params.layer,
        kv_head,
        table: &chunk.table[..(chunk.pos0 + end).div_ceil(super::kv::BLOCK)],
        q: &chunk.q[q..],
        q_stride: chunk.stride,
        rows: rows.len(),
        heads,
        head_dim: layer.head_dim,
        pos: chunk.last(rows.start),
        order,
        window: params.window,
        scale: params.scale,
        cap: params.cap,
        sinks: if params.sinks.is_empty() { &[] } else { &params.sinks[kv_head * heads..(kv_head + 1) * heads] },
    })
}

/// # Safety
/// The CPU can run `V`; `S` is how the cache stores elements; nobody appends to the table's blocks.
unsafe fn whole<'o, V: Loops, S: Storage>(
    g: &Group,
    scratch: &mut Scratch,
    out: &mut dyn FnMut(usize) -> &'o mut [f32],
) {
    // SAFETY: the caller's promise.
    let state = unsafe { State::new::<V, S>(g, &mut scratch.lines) };
    let vectors = g.rows * g.heads;
    // Running (m, l) of every vector over the splits so far; the values run in the output itself.
    let mut running = vec![(0.0f32, 0.0f32); vectors];
    let seen = g.seen();
    for split in seen.start / SPLIT..(seen.end - 1) / SPLIT + 1 {
        // SAFETY: the caller's promise.
        unsafe { tile::split::<V, S>(g, &state, split, &mut scratch.own) };
        for (v, (m, l)) in running.iter_mut().enumerate() {
            let seen = splits(g.last(v / g.heads), g.window);
            if !seen.contains(&split) {
                continue;
            }
            let next = state.result(v);
            let o = out(v);
            if split == seen.start {
                (*m, *l) = (next.0, next.1);
                o.copy_from_slice(next.2);
            } else {
                // SAFETY: the caller's promise.
                unsafe { V::fold(m, l, o, next) };
            }
            if split + 1 == seen.end {
                // SAFETY: the caller's promise.
                unsafe { finish::<V>(*m, *l, g.sinks.get(v % g.heads).copied(), o) };
            }
        }
    }
}

/// # Safety
/// As [`whole`].
unsafe fn part<'o, V: Loops, S: Storage>(
    g: &Group,
    scratch: &mut Scratch,
    split: usize,
    out: &mut dyn FnMut(usize) -> &'o mut [f32],
) {
    // SAFETY: the caller's promise.
    let state = unsafe { State::new::<V, S>(g, &mut scratch.lines) };
    // SAFETY: the caller's promise.
    unsafe { tile::split::<V, S>(g, &state, split, &mut scratch.own) };
    for v in 0..g.rows * g.heads {
        if splits(g.last(v / g.heads), g.window).contains(&split) {
            let (m, l, o) = state.result(v);
            let to = out(v);
            (to[0], to[1]) = (m, l);
            to[HEADER..].copy_from_slice(o);
        }
    }
}

/// # Safety
/// The CPU can run `V`.
unsafe fn merge_in<V: Loops>(partials: &[f32], sink: Option<f32>, out: &mut [f32]) {
    let mut running = (0.0, 0.0);
    for (i, p) in partials.chunks_exact(partial_len(out.len())).enumerate() {
        if i == 0 {
            running = (p[0], p[1]);
            out.copy_from_slice(&p[HEADER..]);
        } else {
            // SAFETY: the caller's promise.
            unsafe { V::fold(&mut running.0, &mut running.1, out, (p[0], p[1], &p[HEADER..])) };
        }
    }
    // SAFETY: the caller's promise.
    unsafe { finish::<V>(running.0, running.1, sink, out) };
}

/// The result of a row and head whose splits are folded: its sink, a score without a value, comes last.
///
/// # Safety
/// The CPU can run `V`.
unsafe fn finish<V: Loops>(m: f32, mut l: f32, sink: Option<f32>, o: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        if let Some(sink) = sink {
            V::sink(m, &mut l, o, sink * std::f32::consts::LOG2_E);
        }
        V::normalize(l, o);
    }
}
