//! The arithmetic of attention: one group of query vectors against one key/value head, written once for all
//! instruction sets.
//!
//! A group is `rows` consecutive rows times the `heads` query heads that share the key/value head; vector
//! `v = row * heads + head`. Vectors are worked on in tiles of up to [`TILE`], whose accumulators fill the registers.
//! What one vector goes through is the same in every tile: scores are one fma chain over `d`; the running sum keeps
//! eight lanes until the split ends; weighted values are one fma chain over the tokens that its row sees.
//! Tokens that no row sees are never multiplied into anything: their memory may hold NaN.

use std::ops::Range;

use super::super::kv::{BLOCK, KvMemory};
#[cfg(target_arch = "x86_64")]
use super::super::lanes::Avx2;
use super::super::lanes::{Lanes, Portable, exp, greatest, sum};
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

    /// Tokens of the block starting at `start` that a row sees, relative to it; empty if none.
    fn sees_of(&self, row: usize, start: usize) -> Range<usize> {
        let sees = self.sees(row);
        let clip = |x: usize| x.saturating_sub(start).min(BLOCK);
        clip(sees.start)..clip(sees.end)
    }
}

/// Storage of elements in a block.
pub(super) trait Element {
    type Raw;
    const CONVERTED: bool;
    /// # Safety
    /// The CPU can run `V`; `p` is valid for reading 8 elements.
    unsafe fn load<V: Lanes>(p: *const Self::Raw) -> V;
}

/// binary16.
pub(super) struct Half;
/// binary32.
pub(super) struct Single;

impl Element for Half {
    type Raw = u16;
    const CONVERTED: bool = true;
    #[inline(always)]
    unsafe fn load<V: Lanes>(p: *const u16) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_f16(p) }
    }
}

impl Element for Single {
    type Raw = f32;
    const CONVERTED: bool = false;
    #[inline(always)]
    unsafe fn load<V: Lanes>(p: *const f32) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load(p) }
    }
}

/// The inner loops, compiled for one instruction set. They are the unit of code generation: what calls them is ordinary
/// code, so that a dozen tile shapes do not end up in one function.
///
/// Arguments are those of the free functions of the same names.
pub(super) trait Loops: Lanes {
    /// # Safety
    /// As the free function; so for all.
    unsafe fn scores<E: Element, const N: usize, const AHEAD: bool>(
        q: *const f32,
        k: *const E::Raw,
        next: *const u8,
        d: usize,
        w: *mut f32,
    );
    /// # Safety
    /// See `scores`.
    unsafe fn values<E: Element, const N: usize, const STRIP: usize, const AHEAD: bool>(
        w: *const f32,
        tokens: Range<usize>,
        at: *const E::Raw,
        next: *const u8,
        d: usize,
        o: *mut f32,
    );
    /// # Safety
    /// See `scores`.
    unsafe fn weigh(w: *mut f32, sees: Range<usize>, m: &mut f32, l: *mut f32, o: *mut f32, d: usize);
    /// # Safety
    /// See `scores`.
    unsafe fn widen<E: Element>(from: *const E::Raw, next: *const E::Raw, to: *mut f32, n: usize);
    /// # Safety
    /// See `scores`.
    unsafe fn fold(m: &mut f32, l: &mut f32, o: &mut [f32], next: (f32, f32, &[f32]));
    /// # Safety
    /// See `scores`.
    unsafe fn normalize(l: f32, o: &mut [f32]);
}

/// Compiles the free functions for an instruction set.
macro_rules! loops {
    ($lanes:ty $(, $feature:meta)?) => {
        impl Loops for $lanes {
            $(#[$feature])?
            unsafe fn scores<E: Element, const N: usize, const AHEAD: bool>(
                q: *const f32,
                k: *const E::Raw,
                next: *const u8,
                d: usize,
                w: *mut f32,
            ) {
                // SAFETY: the caller's promise; so for all.
                unsafe { scores::<Self, E, N, AHEAD>(q, k, next, d, w) }
            }
            $(#[$feature])?
            unsafe fn values<E: Element, const N: usize, const STRIP: usize, const AHEAD: bool>(
                w: *const f32,
                tokens: Range<usize>,
                at: *const E::Raw,
                next: *const u8,
                d: usize,
                o: *mut f32,
            ) {
                // SAFETY: see `scores`.
                unsafe { values::<Self, E, N, STRIP, AHEAD>(w, tokens, at, next, d, o) }
            }
            $(#[$feature])?
            unsafe fn weigh(w: *mut f32, sees: Range<usize>, m: &mut f32, l: *mut f32, o: *mut f32, d: usize) {
                // SAFETY: see `scores`.
                unsafe { weigh::<Self>(w, sees, m, l, o, d) }
            }
            $(#[$feature])?
            unsafe fn widen<E: Element>(from: *const E::Raw, next: *const E::Raw, to: *mut f32, n: usize) {
                // SAFETY: see `scores`.
                unsafe { widen::<Self, E>(from, next, to, n) }
            }
            $(#[$feature])?
            unsafe fn fold(m: &mut f32, l: &mut f32, o: &mut [f32], next: (f32, f32, &[f32])) {
                // SAFETY: see `scores`.
                unsafe { fold::<Self>(m, l, o, next) }
            }
            $(#[$feature])?
            unsafe fn normalize(l: f32, o: &mut [f32]) {
                // SAFETY: see `scores`.
                unsafe { normalize::<Self>(l, o) }
            }
        }
    };
}

loops!(Portable);
#[cfg(target_arch = "x86_64")]
loops!(Avx2, target_feature(enable = "avx2,fma,f16c"));

/// State of a group inside one split, and its working memory.
pub(super) struct State {
    /// Scaled queries, `[tile][head_dim][vectors of the tile]`.
    q: *mut f32,
    /// `[vectors][head_dim]`
    o: *mut f32,
    /// Scores, then weights of one block, `[vectors][BLOCK]`.
    w: *mut f32,
    /// Lane sums, `[vectors][8]`.
    l: *mut f32,
    /// `[vectors]`
    m: *mut f32,
    /// A block's keys or values as f32, `[BLOCK * head_dim]`.
    wide: *mut f32,
    vectors: usize,
    head_dim: usize,
}

impl State {
    /// Lays the arrays out in `scratch`, growing it, and fills in the queries.
    pub fn new(g: &Group, scratch: &mut Scratch) -> State {
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
        let state = State { q, o, w, l, m, wide, vectors: n, head_dim: d };
        for (first, len) in tiles(n) {
            for j in 0..len {
                let (row, head) = ((first + j) / g.heads, (first + j) % g.heads);
                let from = &g.q[row * g.q_stride + head * d..][..d];
                for (i, x) in from.iter().enumerate() {
                    // SAFETY: first + j < n and i < d, so the index is below n * d.
                    unsafe { *q.add(first * d + i * len + j) = x * g.scale };
                }
            }
        }
        state
    }

    /// Result of the split for vector `v`: maximum, sum, weighted values.
    pub fn result(&self, v: usize) -> (f32, f32, &[f32]) {
        assert!(v < self.vectors);
        // SAFETY: v is in range; the arrays were laid out by `new` and written by `split`.
        unsafe {
            let o = std::slice::from_raw_parts(self.o.add(v * self.head_dim), self.head_dim);
            (*self.m.add(v), sum(Portable::load(self.l.add(v * 8))), o)
        }
    }
}

/// Tiles that `n` vectors are cut into, as even as possible: (first vector, vectors).
fn tiles(n: usize) -> impl Iterator<Item = (usize, usize)> {
    let count = n.div_ceil(TILE);
    (0..count).map(move |i| {
        let first = n * i / count;
        (first, n * (i + 1) / count - first)
    })
}

/// Runs the group through split `split`. Vectors whose rows see nothing of it end with sum 0.
///
/// # Safety
/// The CPU can run `V`; `E` is how `g.kv` stores elements; `s` was made from `g`; nobody appends to the table's blocks.
pub(super) unsafe fn split<V: Loops, E: Element>(g: &Group, s: &State, split: usize) {
    // SAFETY: all pointers come from `State::new` with these sizes and from `KvMemory::head`.
    unsafe {
        for i in 0..s.vectors {
            *s.m.add(i) = f32::NEG_INFINITY;
        }
        std::ptr::write_bytes(s.l, 0, s.vectors * 8);
        std::ptr::write_bytes(s.o, 0, s.vectors * s.head_dim);
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
    let d = s.head_dim;
    let full = g.sees(g.rows - 1).start <= start && g.sees(0).end >= start + BLOCK;
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
/// As [`scores`].
unsafe fn scores_of<V: Loops, E: Element, const AHEAD: bool>(
    n: usize,
    q: *const f32,
    k: *const E::Raw,
    next: *const u8,
    d: usize,
    w: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match n {
            1 => V::scores::<E, 1, AHEAD>(q, k, next, d, w),
            2 => V::scores::<E, 2, AHEAD>(q, k, next, d, w),
            3 => V::scores::<E, 3, AHEAD>(q, k, next, d, w),
            4 => V::scores::<E, 4, AHEAD>(q, k, next, d, w),
            5 => V::scores::<E, 5, AHEAD>(q, k, next, d, w),
            _ => V::scores::<E, TILE, AHEAD>(q, k, next, d, w),
        }
    }
}

/// `V::values` for a tile of `n` vectors: strips as wide as the registers allow.
///
/// # Safety
/// As [`values`].
unsafe fn values_of<V: Loops, E: Element, const AHEAD: bool>(
    n: usize,
    w: *const f32,
    tokens: Range<usize>,
    at: *const E::Raw,
    next: *const u8,
    d: usize,
    o: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match n {
            1 => V::values::<E, 1, 8, AHEAD>(w, tokens, at, next, d, o),
            2 => V::values::<E, 2, 4, AHEAD>(w, tokens, at, next, d, o),
            3 => V::values::<E, 3, 4, AHEAD>(w, tokens, at, next, d, o),
            4 => V::values::<E, 4, 2, AHEAD>(w, tokens, at, next, d, o),
            5 => V::values::<E, 5, 2, AHEAD>(w, tokens, at, next, d, o),
            _ => V::values::<E, TILE, 2, AHEAD>(w, tokens, at, next, d, o),
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
    let d = s.head_dim;
    for (first, len) in tiles(s.vectors) {
        // SAFETY: as the caller's; offsets stay in the arrays because first + len <= vectors.
        unsafe {
            let (q, w) = (s.q.add(first * d), s.w.add(first * BLOCK));
            if first == 0 && k != next {
                scores_of::<V, E, true>(len, q, k, next.cast(), d, w);
            } else {
                scores_of::<V, E, false>(len, q, k, next.cast(), d, w);
            }
            for v in first..first + len {
                let sees = if full { 0..BLOCK } else { g.sees_of(v / g.heads, start) };
                if !sees.is_empty() {
                    V::weigh(s.w.add(v * BLOCK), sees, &mut *s.m.add(v), s.l.add(v * 8), s.o.add(v * d), d);
                }
            }
        }
    }
}

/// `w[v][t] = sum over i of q[i][v] * k[i][t]` for all tokens of the block, seen or not: tokens are lanes and do not mix.
///
/// # Safety
/// The CPU can run `V`; `q` is `[d][N]`, `k` `[d][BLOCK]`, `w` `[N][BLOCK]`.
#[inline(always)]
unsafe fn scores<V: Lanes, E: Element, const N: usize, const AHEAD: bool>(
    q: *const f32,
    k: *const E::Raw,
    next: *const u8,
    d: usize,
    w: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[V::splat(0.0); 2]; N];
        for i in 0..d {
            if AHEAD {
                V::prefetch(next.wrapping_add(i * BLOCK * size_of::<E::Raw>()));
            }
            let (k0, k1) = (E::load::<V>(k.add(i * BLOCK)), E::load::<V>(k.add(i * BLOCK + 8)));
            for v in 0..N {
                let x = V::splat(*q.add(i * N + v));
                acc[v][0] = x.fma(k0, acc[v][0]);
                acc[v][1] = x.fma(k1, acc[v][1]);
            }
        }
        for v in 0..N {
            acc[v][0].store(w.add(v * BLOCK));
            acc[v][1].store(w.add(v * BLOCK + 8));
        }
    }
}

/// Online softmax of one vector over one block: scores in `w` become weights, exactly 0 for tokens not seen.
///
/// # Safety
/// The CPU can run `V`; `w` holds BLOCK elements, `l` 8, `o` `d`.
#[inline(always)]
unsafe fn weigh<V: Lanes>(w: *mut f32, sees: Range<usize>, m: &mut f32, l: *mut f32, o: *mut f32, d: usize) {
    let full = sees == (0..BLOCK);
    // SAFETY: the caller's promise; mask loads start at 0..=16 of 32 elements plus at most 8.
    unsafe {
        let (mut x0, mut x1) = (V::load(w), V::load(w.add(8)));
        let none = V::splat(f32::NEG_INFINITY);
        let (from, until) = (FROM.as_ptr().add(BLOCK - sees.start), UNTIL.as_ptr().add(BLOCK - sees.end));
        if !full {
            x0 = V::load(until).select(V::load(from).select(x0, none), none);
            x1 = V::load(until.add(8)).select(V::load(from.add(8)).select(x1, none), none);
        }
        let top = x0.max(x1);
        if top.any_gt(V::splat(*m)) {
            let risen = greatest(top);
            let c = exp(V::splat(*m - risen));
            V::load(l).mul(c).store(l);
            for i in (0..d).step_by(8) {
                V::load(o.add(i)).mul(c).store(o.add(i));
            }
            *m = risen;
        }
        let m = V::splat(*m);
        let (mut e0, mut e1) = (exp(x0.sub(m)), exp(x1.sub(m)));
        if !full {
            let zero = V::splat(0.0);
            e0 = V::load(until).select(V::load(from).select(e0, zero), zero);
            e1 = V::load(until.add(8)).select(V::load(from.add(8)).select(e1, zero), zero);
        }
        V::load(l).add(e0.add(e1)).store(l);
        e0.store(w);
        e1.store(w.add(8));
    }
}

/// `FROM[BLOCK - a + t]` is negative where `t >= a`.
static FROM: [f32; 2 * BLOCK] = halves(1.0, -1.0);
/// `UNTIL[BLOCK - b + t]` is negative where `t < b`.
static UNTIL: [f32; 2 * BLOCK] = halves(-1.0, 1.0);

const fn halves(low: f32, high: f32) -> [f32; 2 * BLOCK] {
    let mut a = [low; 2 * BLOCK];
    let mut i = BLOCK;
    while i < 2 * BLOCK {
        a[i] = high;
        i += 1;
    }
    a
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
    values_at: *const E::Raw,
    next: *const E::Raw,
) {
    let d = s.head_dim;
    for (first, len) in tiles(s.vectors) {
        // SAFETY: as the caller's; offsets stay in the arrays because first + len <= vectors.
        unsafe {
            let (w, o) = (s.w.add(first * BLOCK), s.o.add(first * d));
            if full && first == 0 && values_at != next {
                values_of::<V, E, true>(len, w, 0..BLOCK, values_at, next.cast(), d, o);
                continue;
            } else if full {
                values_of::<V, E, false>(len, w, 0..BLOCK, values_at, next.cast(), d, o);
                continue;
            }
            // Tokens that all rows of the tile see, and before and after them what single rows see: every vector
            // still goes through its own tokens in ascending order.
            let (a, b) = (g.sees_of(first / g.heads, start), g.sees_of((first + len - 1) / g.heads, start));
            let common = b.start.min(a.end)..a.end.max(b.start.min(a.end));
            for v in first..first + len {
                let sees = g.sees_of(v / g.heads, start);
                let before = sees.start..sees.end.min(common.start);
                V::values::<E, 1, 8, false>(s.w.add(v * BLOCK), before, values_at, next.cast(), d, s.o.add(v * d));
            }
            values_of::<V, E, false>(len, w, common.clone(), values_at, next.cast(), d, o);
            for v in first..first + len {
                let sees = g.sees_of(v / g.heads, start);
                let after = sees.start.max(common.end)..sees.end;
                V::values::<E, 1, 8, false>(s.w.add(v * BLOCK), after, values_at, next.cast(), d, s.o.add(v * d));
            }
        }
    }
}

/// `o[v] += w[v][t] * values[t]`, `t` ascending.
///
/// # Safety
/// The CPU can run `V`; `w` is `[N][BLOCK]`, `at` `[BLOCK][d]`, `o` `[N][d]`; tokens are below BLOCK.
#[inline(always)]
unsafe fn values<V: Lanes, E: Element, const N: usize, const STRIP: usize, const AHEAD: bool>(
    w: *const f32,
    tokens: Range<usize>,
    at: *const E::Raw,
    next: *const u8,
    d: usize,
    o: *mut f32,
) {
    if tokens.is_empty() {
        return;
    }
    let mut i = 0;
    // SAFETY: the caller's promise; strips end at or before d, a multiple of 8.
    unsafe {
        while i + 8 * STRIP <= d {
            strip::<V, E, N, STRIP, AHEAD>(w, tokens.clone(), at, next, d, i, o);
            i += 8 * STRIP;
        }
        while i < d {
            strip::<V, E, N, 1, AHEAD>(w, tokens.clone(), at, next, d, i, o);
            i += 8;
        }
    }
}

/// Columns `i..i + 8 * STRIP` of [`values`].
///
/// # Safety
/// As [`values`].
#[inline(always)]
unsafe fn strip<V: Lanes, E: Element, const N: usize, const STRIP: usize, const AHEAD: bool>(
    w: *const f32,
    tokens: Range<usize>,
    at: *const E::Raw,
    next: *const u8,
    d: usize,
    i: usize,
    o: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[V::splat(0.0); STRIP]; N];
        for v in 0..N {
            for c in 0..STRIP {
                acc[v][c] = V::load(o.add(v * d + i + 8 * c));
            }
        }
        for t in tokens {
            let row = t * d + i;
            if AHEAD {
                for line in 0..(8 * STRIP * size_of::<E::Raw>()).div_ceil(64) {
                    V::prefetch(next.wrapping_add(row * size_of::<E::Raw>() + 64 * line));
                }
            }
            let mut x = [V::splat(0.0); STRIP];
            for c in 0..STRIP {
                x[c] = E::load::<V>(at.add(row + 8 * c));
            }
            for v in 0..N {
                let weight = V::splat(*w.add(v * BLOCK + t));
                for c in 0..STRIP {
                    acc[v][c] = weight.fma(x[c], acc[v][c]);
                }
            }
        }
        for v in 0..N {
            for c in 0..STRIP {
                acc[v][c].store(o.add(v * d + i + 8 * c));
            }
        }
    }
}

/// `to = from` as f32, `n` elements, a multiple of 8.
///
/// # Safety
/// The CPU can run `V`; both are valid for `n` elements.
#[inline(always)]
unsafe fn widen<V: Lanes, E: Element>(from: *const E::Raw, next: *const E::Raw, to: *mut f32, n: usize) {
    for i in (0..n).step_by(8) {
        V::prefetch(next.wrapping_add(i).cast());
        // SAFETY: the caller's promise.
        unsafe { E::load::<V>(from.add(i)).store(to.add(i)) };
    }
}

/// Folds the next split's `(m, l, o)` into the running one. Always left to right: not associative in f32.
///
/// # Safety
/// The CPU can run `V`. Both `o` have the same length, a multiple of 8.
#[inline(always)]
unsafe fn fold<V: Lanes>(m: &mut f32, l: &mut f32, o: &mut [f32], next: (f32, f32, &[f32])) {
    assert!(o.len() == next.2.len() && o.len().is_multiple_of(8));
    let top = if next.0 > *m { next.0 } else { *m };
    // SAFETY: the caller's promise; the lengths were checked.
    unsafe {
        let (a, b) = (exp(V::splat(*m - top)), exp(V::splat(next.0 - top)));
        for i in (0..o.len()).step_by(8) {
            let scaled = b.mul(V::load(next.2.as_ptr().add(i)));
            a.fma(V::load(o.as_ptr().add(i)), scaled).store(o.as_mut_ptr().add(i));
        }
        *l = a.fma(V::splat(*l), b.mul(V::splat(next.1))).to_array()[0];
    }
    *m = top;
}

/// `o /= l`.
///
/// # Safety
/// The CPU can run `V`. The length is a multiple of 8.
#[inline(always)]
unsafe fn normalize<V: Lanes>(l: f32, o: &mut [f32]) {
    assert!(o.len().is_multiple_of(8));
    for i in (0..o.len()).step_by(8) {
        // SAFETY: the caller's promise; i + 8 <= length.
        unsafe { V::load(o.as_ptr().add(i)).div(V::splat(l)).store(o.as_mut_ptr().add(i)) };
    }
}
