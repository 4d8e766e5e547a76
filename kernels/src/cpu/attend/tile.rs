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
pub(super) const TILE: usize = 6;

/// How a (block, head) is stored, and what a group does with one.
pub(super) trait Storage {
    /// Fills in the scaled queries of a state.
    ///
    /// # Safety
    /// The CPU can run `V`; `s` has room for the group's queries.
    unsafe fn queries<V: Loops>(g: &Group, s: &State);

    /// Takes a state through the block that starts at token `start`; `at` is its (block, head), `next` one that will
    /// be needed soon.
    ///
    /// # Safety
    /// As [`split`]; `at` and `next` are starts of a (block, head).
    unsafe fn block<V: Loops>(g: &Group, s: &State, start: usize, at: *const u8, next: *const u8);

    /// How many steps ahead blocks are asked for.
    const AHEAD: usize = 1;

    /// Whether two blocks at once are faster.
    fn pairs(_: &State) -> bool {
        false
    }

    /// Two blocks, one after the other.
    ///
    /// # Safety
    /// As `block`, twice.
    unsafe fn two_blocks<V: Loops>(g: &Group, s: &State, start: usize, at: [*const u8; 2], next: [*const u8; 2]) {
        // SAFETY: the caller's promise.
        unsafe {
            Self::block::<V>(g, s, start, at[0], next[0]);
            Self::block::<V>(g, s, start + BLOCK, at[1], next[1]);
        }
    }
}

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

    /// Query of vector `v`.
    pub fn query(&self, v: usize) -> &[f32] {
        let (row, head) = (v / self.heads, v % self.heads);
        &self.q[row * self.q_stride + head * self.head_dim..][..self.head_dim]
    }

    /// Factor on queries. Scores in powers of two save the exponential a multiplication.
    pub fn scale(&self) -> f32 {
        self.scale * std::f32::consts::LOG2_E
    }

    /// Tokens that a row sees.
    pub fn sees(&self, row: usize) -> Range<usize> {
        let end = self.pos + row + 1;
        self.window.map_or(0, |w| end.saturating_sub(w))..end
    }

    /// Whether rows `first..=last` all see the whole block starting at `start`.
    pub fn full(&self, first: usize, last: usize, start: usize) -> bool {
        self.sees(last).start <= start && self.sees(first).end >= start + BLOCK
    }

    /// Tokens of the block starting at `start` that a row sees, relative to it; empty if none.
    pub fn sees_of(&self, row: usize, start: usize) -> Range<usize> {
        let sees = self.sees(row);
        let clip = |x: usize| x.saturating_sub(start).min(BLOCK);
        clip(sees.start)..clip(sees.end)
    }
}

/// State of a group inside one split, in borrowed working memory.
pub(super) struct State<'s> {
    /// Scaled queries, `[tile][head_dim][vectors of the tile]`; as codes `[tile][head_dim / 2][vectors of the tile][2]`.
    pub q: *mut f32,
    /// What a code of a query stands for, `[vectors]`.
    pub q_unit: *mut f32,
    /// Softmax of all vectors.
    pub all: Tile,
    /// A block's keys or values as f32, `[BLOCK * head_dim]`.
    wide: *mut f32,
    vectors: usize,
    /// (vectors, how many) of the shorter and of the longer tiles.
    tiles: ((usize, usize), (usize, usize)),
    scratch: PhantomData<&'s mut Scratch>,
}

impl<'s> State<'s> {
    /// Lays the arrays out in `scratch`, growing it, and fills in the queries.
    ///
    /// # Safety
    /// The CPU can run `V`.
    pub unsafe fn new<V: Loops, S: Storage>(g: &Group, scratch: &'s mut Scratch) -> State<'s> {
        let (n, d) = (g.vectors(), g.head_dim);
        let sizes = [n * d, n * d, 2 * n * BLOCK, n * 8, n, n, n, BLOCK * d].map(|x| x.div_ceil(16));
        let lines: usize = sizes.iter().sum();
        if scratch.lines.len() < lines {
            scratch.lines.resize(lines, Line([0.0; 16]));
        }
        let mut at = scratch.lines.as_mut_ptr();
        let [q, o, w, l, m, unit, q_unit, wide] = sizes.map(|size| {
            let start = at;
            // SAFETY: the sizes add up to `lines`, which the vector holds.
            at = unsafe { at.add(size) };
            start.cast::<f32>()
        });
        let count = n.div_ceil(TILE);
        let tiles = ((n / count, count - n % count), (n / count + 1, n % count));
        let all = Tile { w, m, l, unit, o, d };
        let state = State { q, q_unit, all, wide, vectors: n, tiles, scratch: PhantomData };
        // SAFETY: the caller's promise; the arrays have the sizes above.
        unsafe { S::queries::<V>(g, &state) };
        state
    }

    /// Tiles that the vectors are cut into, as even as possible: (first vector, vectors).
    pub fn tiles(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (short, longer) = self.tiles;
        let mut first = 0;
        (0..longer.1 + short.1).map(move |i| {
            let len = if i < longer.1 { longer.0 } else { short.0 };
            first += len;
            (first - len, len)
        })
    }

    /// The same state with other room for weights.
    fn second(&self) -> State<'s> {
        // SAFETY: `new` laid out two blocks of weights.
        let w = unsafe { self.all.w.add(self.vectors * BLOCK) };
        State { all: Tile { w, ..self.all }, scratch: PhantomData, ..*self }
    }

    /// # Safety
    /// There is a vector `first`.
    pub unsafe fn tile(&self, first: usize) -> Tile {
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
/// The CPU can run `V`; `S` is how `g.kv` stores elements; `s` was made from `g`; nobody appends to the table's blocks.
pub(super) unsafe fn split<V: Loops, S: Storage>(g: &Group, s: &State, split: usize) {
    // SAFETY: all pointers come from `State::new` with these sizes and from `KvMemory::head`.
    unsafe {
        for i in 0..s.vectors {
            *s.all.m.add(i) = f32::NEG_INFINITY;
        }
        std::ptr::write_bytes(s.all.l, 0, s.vectors * 8);
        std::ptr::write_bytes(s.all.o, 0, s.vectors * s.all.d);
        let start = (split * SPLIT).max(g.sees(0).start);
        let end = ((split + 1) * SPLIT).min(g.sees(g.rows - 1).end);
        let (mut block, end) = (start / BLOCK, end.div_ceil(BLOCK));
        let head = |block: usize| g.kv.head(g.layer, g.table[block.min(g.table.len() - 1)], g.kv_head).cast_const();
        while block < end {
            let step = if end - block > 1 && S::pairs(s) { 2 } else { 1 };
            let at = [head(block), head(block + 1)];
            let ahead = block + step * S::AHEAD;
            // The last ones have no successors.
            let next = if ahead < g.table.len() { [head(ahead), head(ahead + 1)] } else { at };
            if step == 2 {
                S::two_blocks::<V>(g, s, block * BLOCK, at, next);
            } else {
                S::block::<V>(g, s, block * BLOCK, at[0], next[0]);
            }
            block += step;
        }
    }
}

impl<E: Element> Storage for E {
    unsafe fn queries<V: Loops>(g: &Group, s: &State) {
        let d = g.head_dim;
        let scale = g.scale();
        for (first, len) in s.tiles() {
            let mut from = [&g.q[..0]; TILE];
            for (j, from) in from[..len].iter_mut().enumerate() {
                *from = g.query(first + j);
            }
            for i in 0..d {
                for (j, from) in from[..len].iter().enumerate() {
                    // SAFETY: first + j is below the vectors and i < d, so the index is below vectors * d.
                    unsafe { *s.q.add(first * d + i * len + j) = from[i] * scale };
                }
            }
        }
    }

    unsafe fn block<V: Loops>(g: &Group, s: &State, start: usize, at: *const u8, next: *const u8) {
        let d = s.all.d;
        let full = g.full(0, g.rows - 1, start);
        let (k, next): (*const E::Raw, *const E::Raw) = (at.cast(), next.cast());
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

    fn pairs(s: &State) -> bool {
        s.vectors <= 3
    }

    unsafe fn two_blocks<V: Loops>(g: &Group, s: &State, start: usize, at: [*const u8; 2], next: [*const u8; 2]) {
        let second = s.second();
        let (k, next_v) =
            (at.map(|at| at.cast::<E::Raw>()), next.map(|n| n.cast::<E::Raw>().wrapping_add(BLOCK * s.all.d)));
        // SAFETY: as in `block`.
        unsafe {
            let t = [s.tile(0), second.tile(0)];
            match s.vectors {
                1 => V::two_scores::<E, 1>(s.q, k, next, t),
                2 => V::two_scores::<E, 2>(s.q, k, next, t),
                _ => V::two_scores::<E, 3>(s.q, k, next, t),
            }
            for (b, s) in [s, &second].into_iter().enumerate() {
                let start = start + b * BLOCK;
                let full = g.full(0, g.rows - 1, start);
                match s.vectors {
                    _ if !full => weigh_seen::<V>(g, s, start, 0..s.vectors),
                    1 => V::weigh_all::<1>(t[b]),
                    2 => V::weigh_all::<2>(t[b]),
                    _ => V::weigh_all::<3>(t[b]),
                }
                all_values::<V, E>(g, s, start, full, k[b].add(BLOCK * s.all.d), next_v[b]);
            }
        }
    }
}

/// Softmax of single vectors over what they see of a block.
///
/// # Safety
/// As [`Storage::block`]; scores of these vectors are there.
unsafe fn weigh_seen<V: Loops>(g: &Group, s: &State, start: usize, vectors: Range<usize>) {
    for v in vectors {
        let sees = g.sees_of(v / g.heads, start);
        if !sees.is_empty() {
            // SAFETY: the caller's promise.
            unsafe { V::weigh_some(sees, s.tile(v)) };
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
/// As [`Storage::block`].
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
            if !full {
                weigh_seen::<V>(g, s, start, first..first + len);
            }
        }
    }
}

/// Adds the block's weighted values to every tile.
///
/// # Safety
/// As [`Storage::block`]; `all_scores` ran on the block.
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
