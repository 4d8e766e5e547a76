//! One group of query vectors against one key/value head, split by split.
//!
//! A group is `rows` consecutive rows times the `heads` query heads that share the key/value head; vector
//! `v = row * heads + head`. Vectors are worked on in tiles of up to [`TILE`], whose accumulators fill the registers;
//! the arithmetic is in `loops`. Tokens that no row of a tile sees are never multiplied into anything: their memory may
//! hold NaN.

use std::marker::PhantomData;
use std::ops::Range;

use super::super::kv::{BLOCK, KvMemory};
use super::super::lanes::{Lanes, Portable, sum};
use super::loops::{Element, Loops, Single, Tile};
use super::{Line, SPLIT, Scratch};

/// Vectors of a full tile: two accumulators each, two registers for keys or values, one for the broadcast.
const TILE: usize = 6;

/// A group and everything that it reads.
pub(super) struct Group<'a> {
    pub kv: &'a KvMemory,
    pub layer: usize,
    pub kv_head: usize,
    /// Blocks up to that of the last row.
    pub table: &'a [u32],
    /// Query of the first row's first head; a row's heads are contiguous.
    pub q: &'a [f32],
    pub q_stride: usize,
    pub rows: usize,
    pub heads: usize,
    pub head_dim: usize,
    /// Position of the first row.
    pub pos: usize,
    pub window: Option<usize>,
    pub scale: f32,
}

impl Group<'_> {
    fn vectors(&self) -> usize {
        self.rows * self.heads
    }

    /// Tokens that a row sees.
    pub fn sees(&self, row: usize) -> Range<usize> {
        let end = self.pos + row + 1;
        self.window.map_or(0, |w| end.saturating_sub(w))..end
    }

    /// Whether rows `first..=last` all see the whole block starting at `start`.
    fn full(&self, first: usize, last: usize, start: usize) -> bool {
        self.sees(last).start <= start && self.sees(first).end >= start + BLOCK
    }

    /// Tokens of the block starting at `start` that a row sees, relative to it; empty if none.
    fn sees_of(&self, row: usize, start: usize) -> Range<usize> {
        let sees = self.sees(row);
        let clip = |x: usize| x.saturating_sub(start).min(BLOCK);
        clip(sees.start)..clip(sees.end)
    }
}

/// State of a group inside one split, in borrowed working memory.
pub(super) struct State<'s> {
    /// Scaled queries, `[tile][head_dim][vectors of the tile]`.
    q: *mut f32,
    /// Softmax of all vectors.
    all: Tile,
    /// A block's keys or values as f32, `[BLOCK * head_dim]`.
    wide: *mut f32,
    vectors: usize,
    /// (vectors, how many) of the shorter and of the longer tiles.
    tiles: ((usize, usize), (usize, usize)),
    scratch: PhantomData<&'s mut Scratch>,
}

impl<'s> State<'s> {
    /// Lays the arrays out in `scratch`, growing it, and fills in the queries.
    pub fn new(g: &Group, scratch: &'s mut Scratch) -> State<'s> {
        let (n, d) = (g.vectors(), g.head_dim);
        let sizes = [n * d, n * d, n * BLOCK, n * 8, n, BLOCK * d].map(|x| x.div_ceil(16));
        let lines: usize = sizes.iter().sum();
        if scratch.lines.len() < lines {
            scratch.lines.resize(lines, Line([0.0; 16]));
        }
        let mut at = scratch.lines.as_mut_ptr();
        let [q, o, w, l, m, wide] = sizes.map(|size| {
            let start = at;
            // SAFETY: the sizes add up to `lines`, which the vector holds.
            at = unsafe { at.add(size) };
            start.cast::<f32>()
        });
        let count = n.div_ceil(TILE);
        let tiles = ((n / count, count - n % count), (n / count + 1, n % count));
        let state = State { q, all: Tile { w, m, l, o, d }, wide, vectors: n, tiles, scratch: PhantomData };
        // Scores in powers of two save the exponential a multiplication.
        let scale = g.scale * std::f32::consts::LOG2_E;
        for (first, len) in state.tiles() {
            let mut from = [&g.q[..0]; TILE];
            for (j, from) in from[..len].iter_mut().enumerate() {
                let (row, head) = ((first + j) / g.heads, (first + j) % g.heads);
                *from = &g.q[row * g.q_stride + head * d..][..d];
            }
            for i in 0..d {
                for (j, from) in from[..len].iter().enumerate() {
                    // SAFETY: first + j < n and i < d, so the index is below n * d.
                    unsafe { *q.add(first * d + i * len + j) = from[i] * scale };
                }
            }
        }
        state
    }

    /// Tiles that the vectors are cut into, as even as possible: (first vector, vectors).
    fn tiles(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (short, longer) = self.tiles;
        let mut first = 0;
        (0..longer.1 + short.1).map(move |i| {
            let len = if i < longer.1 { longer.0 } else { short.0 };
            first += len;
            (first - len, len)
        })
    }

    /// # Safety
    /// There is a vector `first`.
    unsafe fn tile(&self, first: usize) -> Tile {
        // SAFETY: the caller's promise.
        unsafe { self.all.vector(first) }
    }

    /// Result of the split for vector `v`: maximum, sum, weighted values.
    pub fn result(&self, v: usize) -> (f32, f32, &[f32]) {
        assert!(v < self.vectors);
        // SAFETY: v is in range; the arrays were laid out by `new` and written by `split`.
        unsafe {
            let t = self.all.vector(v);
            (*t.m, sum(Portable::load(t.l)), std::slice::from_raw_parts(t.o, t.d))
        }
    }
}

/// Runs the group through split `split`. Vectors whose rows see nothing of it end with sum 0.
///
/// # Safety
/// The CPU can run `V`; `E` is how `g.kv` stores elements; `s` was made from `g`; nobody appends to the table's blocks.
pub(super) unsafe fn split<V: Loops, E: Element>(g: &Group, s: &State, split: usize) {
    // SAFETY: all pointers come from `State::new` with these sizes and from `KvMemory::head`.
    unsafe {
        for i in 0..s.vectors {
            *s.all.m.add(i) = f32::NEG_INFINITY;
        }
        std::ptr::write_bytes(s.all.l, 0, s.vectors * 8);
        std::ptr::write_bytes(s.all.o, 0, s.vectors * s.all.d);
        let start = (split * SPLIT).max(g.sees(0).start);
        let end = ((split + 1) * SPLIT).min(g.sees(g.rows - 1).end);
        for block in start / BLOCK..end.div_ceil(BLOCK) {
            let at = g.kv.head(g.layer, g.table[block], g.kv_head);
            let next = g.table.get(block + 1).map_or(at, |&b| g.kv.head(g.layer, b, g.kv_head));
            one_block::<V, E>(g, s, block * BLOCK, at.cast(), next.cast());
        }
    }
}

/// # Safety
/// As [`split`]; `k` and `next` are the starts of a (block, head).
unsafe fn one_block<V: Loops, E: Element>(g: &Group, s: &State, start: usize, k: *const E::Raw, next: *const E::Raw) {
    let d = s.all.d;
    let full = g.full(0, g.rows - 1, start);
    // SAFETY: V lies behind K^T; the arrays of `s` have the sizes that the callees need.
    unsafe {
        let (v, next_v) = (k.add(BLOCK * d), next.add(BLOCK * d));
        if E::CONVERTED && s.vectors > TILE {
            V::widen::<E>(k, next, s.wide, BLOCK * d);
            all_scores::<V, Single>(g, s, start, full, s.wide, s.wide);
            V::widen::<E>(v, next_v, s.wide, BLOCK * d);
            all_values::<V, Single>(g, s, start, full, s.wide, s.wide);
        } else {
            all_scores::<V, E>(g, s, start, full, k, next);
            all_values::<V, E>(g, s, start, full, v, next_v);
        }
    }
}

/// `V::scores` for a tile of `n` vectors.
///
/// # Safety
/// As `scores`.
unsafe fn scores_of<V: Loops, E: Element, const AHEAD: bool>(
    n: usize,
    q: *const f32,
    k: *const E::Raw,
    next: *const u8,
    full: bool,
    t: Tile,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match n {
            1 => V::scores::<E, 1, AHEAD>(q, k, next, full, t),
            2 => V::scores::<E, 2, AHEAD>(q, k, next, full, t),
            3 => V::scores::<E, 3, AHEAD>(q, k, next, full, t),
            4 => V::scores::<E, 4, AHEAD>(q, k, next, full, t),
            5 => V::scores::<E, 5, AHEAD>(q, k, next, full, t),
            _ => V::scores::<E, TILE, AHEAD>(q, k, next, full, t),
        }
    }
}

/// `V::values` for a tile of `n` vectors: strips as wide as the registers allow.
///
/// # Safety
/// As `values`.
unsafe fn values_of<V: Loops, E: Element, const AHEAD: bool>(
    n: usize,
    tokens: Range<usize>,
    at: *const E::Raw,
    next: *const u8,
    t: Tile,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match n {
            1 => V::values::<E, 1, 8, AHEAD>(tokens, at, next, t),
            2 => V::values::<E, 2, 4, AHEAD>(tokens, at, next, t),
            3 => V::values::<E, 3, 4, AHEAD>(tokens, at, next, t),
            4 => V::values::<E, 4, 2, AHEAD>(tokens, at, next, t),
            5 => V::values::<E, 5, 2, AHEAD>(tokens, at, next, t),
            _ => V::values::<E, TILE, 2, AHEAD>(tokens, at, next, t),
        }
    }
}

/// Scores and weights of a block for every tile.
///
/// # Safety
/// As [`one_block`].
unsafe fn all_scores<V: Loops, E: Element>(
    g: &Group,
    s: &State,
    start: usize,
    full: bool,
    k: *const E::Raw,
    next: *const E::Raw,
) {
    for (first, len) in s.tiles() {
        // SAFETY: as the caller's; offsets stay in the arrays because first + len <= vectors.
        unsafe {
            let (q, t) = (s.q.add(first * s.all.d), s.tile(first));
            let full = full || g.full(first / g.heads, (first + len - 1) / g.heads, start);
            if first == 0 && k != next {
                scores_of::<V, E, true>(len, q, k, next.cast(), full, t);
            } else {
                scores_of::<V, E, false>(len, q, k, next.cast(), full, t);
            }
            if full {
                continue;
            }
            for v in first..first + len {
                let sees = g.sees_of(v / g.heads, start);
                if !sees.is_empty() {
                    V::weigh_some(sees, s.tile(v));
                }
            }
        }
    }
}

/// Adds the block's weighted values to every tile.
///
/// # Safety
/// As [`one_block`]; `all_scores` ran on the block.
unsafe fn all_values<V: Loops, E: Element>(
    g: &Group,
    s: &State,
    start: usize,
    full: bool,
    at: *const E::Raw,
    next: *const E::Raw,
) {
    for (first, len) in s.tiles() {
        // SAFETY: as the caller's; offsets stay in the arrays because first + len <= vectors.
        unsafe {
            let t = s.tile(first);
            if full || g.full(first / g.heads, (first + len - 1) / g.heads, start) {
                if first == 0 && at != next {
                    values_of::<V, E, true>(len, 0..BLOCK, at, next.cast(), t);
                } else {
                    values_of::<V, E, false>(len, 0..BLOCK, at, next.cast(), t);
                }
                continue;
            }
            // Tokens that all rows of the tile see, and before and after them what single rows see: every vector
            // still goes through its own tokens in ascending order.
            let (a, b) = (g.sees_of(first / g.heads, start), g.sees_of((first + len - 1) / g.heads, start));
            let common = b.start.min(a.end)..a.end;
            for v in first..first + len {
                let sees = g.sees_of(v / g.heads, start);
                V::values::<E, 1, 8, false>(sees.start..sees.end.min(common.start), at, next.cast(), s.tile(v));
            }
            values_of::<V, E, false>(len, common.clone(), at, next.cast(), t);
            for v in first..first + len {
                let sees = g.sees_of(v / g.heads, start);
                V::values::<E, 1, 8, false>(sees.start.max(common.end)..sees.end, at, next.cast(), s.tile(v));
            }
        }
    }
}
