//! One group of query vectors against one key/value head, split by split.
//!
//! A group is `rows` consecutive rows times the `heads` query heads that share the key/value head; vector
//! `v = row * heads + head`. Vectors are worked on in tiles of up to [`TILE`], whose accumulators fill the registers;
//! the arithmetic is in `loops`. Tokens that no row of a tile sees are never multiplied into anything: their memory may
//! hold NaN.

use std::marker::PhantomData;
use std::ops::Range;

use super::super::kv::{BLOCK, KvMemory, KvType, SCALES, copy_slot};
use super::super::lanes::{Lanes, Portable, sum};
use super::loops::{Element, Loops, Single, Tile};
use super::{Line, SPLIT};

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
    fn pairs<V: Loops>(_: &State) -> bool {
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

/// What the rows of a group see of each other.
#[derive(Clone, Copy)]
pub(super) enum Rows<'a> {
    /// Each one token more than the row before.
    Rising,
    /// All the same.
    Level,
    /// Each its path in a tree of the rows of a chunk that begins at token `start`; words as in `Mask::Tree`, `[rows]`.
    Tree { start: usize, masks: &'a [u64] },
}

/// A group and everything that it reads.
#[derive(Clone, Copy)]
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
    /// Last token that the first row sees.
    pub pos: usize,
    pub order: Rows<'a>,
    pub window: Option<usize>,
    pub scale: f32,
    pub cap: Option<f32>,
    /// Of the group's heads, `[heads]`, or empty.
    pub sinks: &'a [f32],
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

    /// Cap of the scores as they are in a state, in powers of two.
    fn cap(&self) -> Option<f32> {
        self.cap.map(|cap| cap * std::f32::consts::LOG2_E)
    }

    /// Caps the scores of vectors of a state, if there is a cap.
    ///
    /// # Safety
    /// The CPU can run `V`; there are these vectors.
    #[cold]
    pub unsafe fn cap_scores<V: Loops>(&self, s: &State, vectors: Range<usize>) {
        if let Some(cap) = self.cap() {
            // SAFETY: the caller's promise.
            unsafe { V::cap(vectors.len(), cap, s.tile(vectors.start)) }
        }
    }

    /// Last token that a row sees, in the order of the tokens that it sees.
    pub fn last(&self, row: usize) -> usize {
        match self.order {
            Rows::Rising => self.pos + row,
            Rows::Level => self.pos,
            Rows::Tree { start, masks } => start + masks[row].count_ones() as usize - 1,
        }
    }

    /// Tokens that a row sees.
    pub fn sees(&self, row: usize) -> Range<usize> {
        let end = self.last(row) + 1;
        self.window.map_or(0, |w| end.saturating_sub(w))..end
    }

    /// What rows `first..=last` see: of those who see the least and the most, from where and until where.
    fn edges(&self, first: usize, last: usize) -> [Range<usize>; 2] {
        let (a, b) = match self.order {
            Rows::Tree { .. } => {
                let ends = (first..=last).map(|row| self.sees(row));
                ends.fold((usize::MAX..usize::MAX, 0..0), |(a, b), s| {
                    (a.start.min(s.start)..a.end.min(s.end), b.start.max(s.start)..b.end.max(s.end))
                })
            }
            _ => (self.sees(first), self.sees(last)),
        };
        [a, b]
    }

    /// Tokens that some row sees, and those between.
    pub fn seen(&self) -> Range<usize> {
        let [a, b] = self.edges(0, self.rows - 1);
        a.start..b.end
    }

    /// Whether rows `first..=last` all see the whole block starting at `start`, and scores go into the softmax as they
    /// are: a cap takes the way of rows that do not see all.
    pub fn full(&self, first: usize, last: usize, start: usize) -> bool {
        let [a, b] = self.edges(first, last);
        b.start <= start && a.end >= start + BLOCK && self.cap.is_none()
    }

    /// Tokens of the block starting at `start` that rows `first..=last` all see, relative to it.
    fn common(&self, first: usize, last: usize, start: usize) -> Range<usize> {
        let [a, b] = self.edges(first, last).map(|sees| clip(sees, start));
        b.start.min(a.end)..a.end
    }

    /// First block that rows of a tree do not share.
    fn own(&self) -> usize {
        match self.order {
            Rows::Tree { start, .. } => start / BLOCK,
            _ => usize::MAX,
        }
    }

    /// Tokens of the block starting at `start` that a row sees, relative to it; empty if none.
    pub fn sees_of(&self, row: usize, start: usize) -> Range<usize> {
        clip(self.sees(row), start)
    }
}

/// Tokens as those of the block starting at `start`, relative to it.
fn clip(tokens: Range<usize>, start: usize) -> Range<usize> {
    let clip = |x: usize| x.saturating_sub(start).min(BLOCK);
    clip(tokens.start)..clip(tokens.end)
}

/// Working memory of rows of a tree: one row's state, and its path's keys and values in blocks.
#[derive(Default)]
pub(super) struct Own {
    lines: Vec<Line>,
    blocks: Vec<Line>,
}

/// State of a group inside one split, in borrowed working memory.
pub(super) struct State<'s> {
    /// Scaled queries, `[tile][head_dim][vectors of the tile]`; as codes `[tile][head_dim / 2][vectors of the tile][2]`.
    pub q: *mut f32,
    /// What a code of a query stands for, `[vectors]`.
    pub q_unit: *mut f32,
    /// Softmax of all vectors.
    pub all: Tile,
    /// Two blocks' keys or values as f32, `[2][BLOCK * head_dim]`.
    pub wide: *mut f32,
    vectors: usize,
    /// (vectors, how many) of the shorter and of the longer tiles.
    tiles: ((usize, usize), (usize, usize)),
    scratch: PhantomData<&'s mut [Line]>,
}

impl<'s> State<'s> {
    /// Lays the arrays out in `scratch`, growing it, and fills in the queries.
    ///
    /// # Safety
    /// The CPU can run `V`.
    pub unsafe fn new<V: Loops, S: Storage>(g: &Group, scratch: &'s mut Vec<Line>) -> State<'s> {
        let (n, d) = (g.vectors(), g.head_dim);
        let sizes = [n * d, n * d, 2 * n * BLOCK, n * 8, n, n, n, 2 * BLOCK * d].map(|x| x.div_ceil(16));
        let lines: usize = sizes.iter().sum();
        if scratch.len() < lines {
            scratch.resize(lines, Line([0.0; 16]));
        }
        let mut at = scratch.as_mut_ptr();
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
pub(super) unsafe fn split<V: Loops, S: Storage>(g: &Group, s: &State, split: usize, own: &mut Own) {
    // SAFETY: all pointers come from `State::new` with these sizes and from `KvMemory::head`.
    unsafe {
        for i in 0..s.vectors {
            *s.all.m.add(i) = f32::NEG_INFINITY;
        }
        std::ptr::write_bytes(s.all.l, 0, s.vectors * 8);
        std::ptr::write_bytes(s.all.o, 0, s.vectors * s.all.d);
        let all = blocks_of(split, g.seen());
        let head = |block: usize| g.kv.head(g.layer, g.table[block.min(g.table.len() - 1)], g.kv_head).cast_const();
        through::<V, S>(g, s, all.start..all.end.min(g.own()), g.table.len(), head);
        if let Rows::Tree { start, masks } = g.order {
            for (row, &mask) in masks.iter().enumerate() {
                own_blocks::<V, S>(g, s, row, (start, mask), split, own);
            }
        }
    }
}

/// Blocks of a split with tokens of a range.
fn blocks_of(split: usize, tokens: Range<usize>) -> Range<usize> {
    (split * SPLIT).max(tokens.start) / BLOCK..((split + 1) * SPLIT).min(tokens.end).div_ceil(BLOCK)
}

/// Takes a state through blocks, one after the other; `head` says where each begins, of `there` that there are.
///
/// # Safety
/// As [`split`]; `head` gives starts of a (block, head).
#[inline(always)]
unsafe fn through<V: Loops, S: Storage>(
    g: &Group,
    s: &State,
    blocks: Range<usize>,
    there: usize,
    head: impl Fn(usize) -> *const u8,
) {
    let (mut block, end) = (blocks.start, blocks.end);
    while block < end {
        let step = if end - block > 1 && S::pairs::<V>(s) { 2 } else { 1 };
        let at = [head(block), head(block + 1)];
        let ahead = block + step * S::AHEAD;
        // The last ones have no successors.
        let next = if ahead < there { [head(ahead), head(ahead + 1)] } else { at };
        // SAFETY: the caller's promise.
        unsafe {
            if step == 2 {
                S::two_blocks::<V>(g, s, block * BLOCK, at, next);
            } else {
                S::block::<V>(g, s, block * BLOCK, at[0], next[0]);
            }
        }
        block += step;
    }
}

/// Takes the vectors of one row of a tree through the blocks that it does not share, from that of the chunk's first
/// token on: there the tokens of its path lie one behind the other, as in a plain sequence, and so the row is worked on
/// like the last one of that. `tree`: the chunk's first token and what the row sees of the chunk.
///
/// # Safety
/// As [`split`]; the shared blocks of the split are done.
unsafe fn own_blocks<V: Loops, S: Storage>(
    g: &Group,
    s: &State,
    row: usize,
    (start, mask): (usize, u64),
    split: usize,
    own: &mut Own,
) {
    let (pos, d, kind) = (g.last(row), g.head_dim, g.kv.kind());
    let one = Group { pos, order: Rows::Rising, rows: 1, q: &g.q[row * g.q_stride..], ..*g };
    let seen = blocks_of(split, one.sees(0));
    let blocks = seen.start.max(g.own())..seen.end;
    if blocks.is_empty() {
        return;
    }
    let lines = kind.head_bytes(d).div_ceil(size_of::<Line>());
    if own.blocks.len() < blocks.len() * lines {
        own.blocks.resize(blocks.len() * lines, Line([0.0; 16]));
    }
    let base = own.blocks.as_mut_ptr();
    // SAFETY: clamped to the blocks that there is room for.
    let copy = |block: usize| unsafe { base.add((block.min(blocks.end - 1) - blocks.start) * lines).cast::<u8>() };
    let real = |block: usize| g.kv.head(g.layer, g.table[block], g.kv_head).cast_const();
    // SAFETY: `real` and `copy` are whole (block, head)s of this kind and size, in different memory.
    unsafe {
        for block in blocks.clone() {
            if block * BLOCK < start {
                std::ptr::copy_nonoverlapping(real(block), copy(block), kind.head_bytes(d));
            } else if kind == KvType::Int8 {
                // Weights of tokens that nobody sees are 0, which hides any scale but NaN.
                std::ptr::write_bytes(copy(block), 0, SCALES);
            }
        }
        let mut left = mask;
        for token in start..pos + 1 {
            let from = start + left.trailing_zeros() as usize;
            left &= left - 1;
            if blocks.contains(&(token / BLOCK)) {
                copy_slot(kind, d, (real(from / BLOCK), from % BLOCK), (copy(token / BLOCK), token % BLOCK));
            }
        }
    }
    // SAFETY: the caller's promise; both states hold these vectors, one of them from its first on.
    unsafe {
        let state = State::new::<V, S>(&one, &mut own.lines);
        let (all, single) = (s.tile(row * g.heads), state.tile(0));
        all.copy_to(single, g.heads);
        through::<V, S>(&one, &state, blocks.clone(), blocks.end, |block| copy(block).cast_const());
        single.copy_to(all, g.heads);
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

    fn pairs<V: Loops>(s: &State) -> bool {
        s.vectors <= V::PAIRS
    }

    unsafe fn two_blocks<V: Loops>(g: &Group, s: &State, start: usize, at: [*const u8; 2], next: [*const u8; 2]) {
        let (states, n) = ([s, &s.second()], BLOCK * s.all.d);
        let k = at.map(|at| at.cast::<E::Raw>());
        let next_k = next.map(|next| next.cast::<E::Raw>());
        let wide = E::CONVERTED && s.vectors > TILE;
        // SAFETY: as in `block`.
        unsafe {
            if wide {
                let to = [s.wide, s.wide.add(n)];
                (0..2).for_each(|b| V::widen::<E>(k[b], next_k[b], to[b], n));
                both_scores::<V, Single>(states, to.map(|to| to.cast_const()), to.map(|to| to.cast_const()));
            } else {
                both_scores::<V, E>(states, k, next_k);
            }
            for (b, s) in states.into_iter().enumerate() {
                let start = start + b * BLOCK;
                let full = g.full(0, g.rows - 1, start);
                for (first, len) in s.tiles() {
                    let t = s.tile(first);
                    match len {
                        _ if !(full || g.full(first / g.heads, (first + len - 1) / g.heads, start)) => {
                            weigh_seen::<V>(g, s, start, first..first + len);
                        }
                        1 => V::weigh_all::<1>(t),
                        2 => V::weigh_all::<2>(t),
                        3 => V::weigh_all::<3>(t),
                        4 => V::weigh_all::<4>(t),
                        5 => V::weigh_all::<5>(t),
                        _ => V::weigh_all::<TILE>(t),
                    }
                }
                let (v, next_v) = (k[b].add(n), next_k[b].wrapping_add(n));
                if wide {
                    V::widen::<E>(v, next_v, s.wide, n);
                    all_values::<V, Single>(g, s, start, full, s.wide, s.wide);
                } else {
                    all_values::<V, E>(g, s, start, full, v, next_v);
                }
            }
        }
    }
}

/// Scores of two blocks for every tile, left in `w` of their states.
///
/// # Safety
/// As [`Storage::two_blocks`].
unsafe fn both_scores<V: Loops, E: Element>(s: [&State; 2], k: [*const E::Raw; 2], next: [*const E::Raw; 2]) {
    for (first, len) in s[0].tiles() {
        // SAFETY: as the caller's; offsets stay in the arrays because first + len <= vectors.
        unsafe {
            let (q, t) = (s[0].q.add(first * s[0].all.d), s.map(|s| s.tile(first)));
            if first == 0 && k != next {
                two_scores_of::<V, E, true>(len, q, k, next.map(|next| next.cast()), t);
            } else {
                two_scores_of::<V, E, false>(len, q, k, next.map(|next| next.cast()), t);
            }
        }
    }
}

/// `V::two_scores` for a tile of `n` vectors.
///
/// # Safety
/// As `two_scores`.
unsafe fn two_scores_of<V: Loops, E: Element, const AHEAD: bool>(
    n: usize,
    q: *const f32,
    k: [*const E::Raw; 2],
    next: [*const u8; 2],
    t: [Tile; 2],
) {
    // SAFETY: the caller's promise.
    unsafe {
        match n {
            1 => V::two_scores::<E, 1, AHEAD>(q, k, next, t),
            2 => V::two_scores::<E, 2, AHEAD>(q, k, next, t),
            3 => V::two_scores::<E, 3, AHEAD>(q, k, next, t),
            4 => V::two_scores::<E, 4, AHEAD>(q, k, next, t),
            5 => V::two_scores::<E, 5, AHEAD>(q, k, next, t),
            _ => V::two_scores::<E, TILE, AHEAD>(q, k, next, t),
        }
    }
}

/// Softmax of single vectors over what they see of a block, under the cap.
///
/// # Safety
/// As [`Storage::block`]; scores of these vectors are there.
unsafe fn weigh_seen<V: Loops>(g: &Group, s: &State, start: usize, vectors: Range<usize>) {
    if g.cap.is_some() {
        // SAFETY: the caller's promise.
        unsafe { g.cap_scores::<V>(s, vectors.clone()) };
    }
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
pub(super) unsafe fn all_scores<V: Loops, E: Element>(
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
pub(super) unsafe fn all_values<V: Loops, E: Element>(
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
            let common = g.common(first / g.heads, (first + len - 1) / g.heads, start);
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
