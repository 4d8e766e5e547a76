//! Attention over int8 keys and values in integers.
//!
//! Queries become 16-bit codes once, weights once per block; both lose 2^-16 of their vector's greatest element, far
//! less than the cache's own codes did. `q . k` and `w . v` of a block are then exact in i32, whatever the order, and
//! f32 begins behind the scales: `score = f32(sum) * (unit of q * scale of k)`, `o += f32(sum) * unit of w` where
//! weights were multiplied by the scales of V before they became codes. Codes are finite, so that tokens nobody sees
//! may be multiplied by 0: one whole block is the only case.

// Loops over registers: indices are what must be unrolled.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use super::super::kv::{BLOCK, SCALES};
use super::ints::Ints;
use super::loops::{Loops, Rise, Tile, keep, weigh};
use super::tile::{Group, State, Storage, TILE};

/// int8 codes with a scale per token.
pub(super) struct Codes;

/// Greatest 16-bit code.
pub(super) const MOST: f32 = 32767.0;

/// Weights of a block none of which is greater count as 0: their inverse could overflow.
pub(super) const LEAST: f32 = 1e-30;

impl Storage for Codes {
    /// A block is done sooner than its successor arrives.
    const AHEAD: usize = 2;

    unsafe fn queries<V: Loops>(g: &Group, s: &State) {
        let d = g.head_dim;
        for (first, len) in s.tiles() {
            for j in 0..len {
                // SAFETY: the caller's promise; first + j is below the vectors, of which each has d / 2 pairs.
                unsafe {
                    let to = s.q.cast::<[i16; 2]>().add(first * d / 2 + j);
                    V::code_query(g.query(first + j), g.scale(), len, to, s.q_unit.add(first + j));
                }
            }
        }
    }

    unsafe fn block<V: Loops>(g: &Group, s: &State, start: usize, at: *const u8, next: *const u8) {
        let d = s.all.d;
        let all = g.full(0, g.rows - 1, start);
        // SAFETY: the caller's promise; scales, K and V lie one behind the other; offsets stay in the arrays because
        // first + len is at most the number of vectors.
        unsafe {
            for (first, len) in s.tiles() {
                let q = s.q.cast::<[i16; 2]>().add(first * d / 2).cast_const();
                let (unit, t) = (s.q_unit.add(first).cast_const(), s.tile(first));
                let full = all || g.full(first / g.heads, (first + len - 1) / g.heads, start);
                if first == 0 && at != next {
                    scores_of::<V, true>(len, q, unit, at, next, full, t);
                } else {
                    scores_of::<V, false>(len, q, unit, at, next, full, t);
                }
                if !full {
                    let scales = at.cast::<u16>().add(BLOCK);
                    if g.cap.is_some() {
                        g.cap_scores::<V>(s, first..first + len);
                    }
                    (first..first + len).for_each(|v| V::code_some(g.sees_of(v / g.heads, start), scales, s.tile(v)));
                }
            }
            let (v, next_v) = (at.add(SCALES + BLOCK * d).cast::<i8>(), next.add(SCALES + BLOCK * d));
            for (first, len) in s.tiles() {
                if first == 0 && at != next {
                    values_of::<V, true>(len, v, next_v, s.tile(first));
                } else {
                    values_of::<V, false>(len, v, next_v, s.tile(first));
                }
            }
        }
    }
}

/// # Safety
/// As [`scores`] for a tile of `n` vectors.
unsafe fn scores_of<V: Loops, const AHEAD: bool>(
    n: usize,
    q: *const [i16; 2],
    unit: *const f32,
    at: *const u8,
    next: *const u8,
    full: bool,
    t: Tile,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match n {
            1 => V::code_scores::<1, AHEAD>(q, unit, at, next, full, t),
            2 => V::code_scores::<2, AHEAD>(q, unit, at, next, full, t),
            3 => V::code_scores::<3, AHEAD>(q, unit, at, next, full, t),
            4 => V::code_scores::<4, AHEAD>(q, unit, at, next, full, t),
            5 => V::code_scores::<5, AHEAD>(q, unit, at, next, full, t),
            _ => V::code_scores::<TILE, AHEAD>(q, unit, at, next, full, t),
        }
    }
}

/// # Safety
/// As [`values`] for a tile of `n` vectors.
unsafe fn values_of<V: Loops, const AHEAD: bool>(n: usize, at: *const i8, next: *const u8, t: Tile) {
    // SAFETY: the caller's promise.
    unsafe {
        match n {
            1 => V::code_values::<1, 8, AHEAD>(at, next, t),
            2 => V::code_values::<2, 4, AHEAD>(at, next, t),
            3 => V::code_values::<3, 2, AHEAD>(at, next, t),
            4 => V::code_values::<4, 2, AHEAD>(at, next, t),
            5 => V::code_values::<5, 2, AHEAD>(at, next, t),
            _ => V::code_values::<TILE, 2, AHEAD>(at, next, t),
        }
    }
}

/// Codes of `q * scale`, a pair every `stride` pairs, and their unit; the unit is NaN if an element is not finite.
///
/// # Safety
/// The CPU can run `V`; `to` is valid for the pairs, `unit` for one; the length of `q` is a multiple of 8.
#[inline(always)]
pub(super) unsafe fn query<V: Ints>(q: &[f32], scale: f32, stride: usize, to: *mut [i16; 2], unit: *mut f32) {
    assert!(q.len().is_multiple_of(8));
    // SAFETY: the caller's promise; `i + 8 <= q.len()`.
    unsafe {
        let (scale, zero) = (V::splat(scale), V::splat(0.0));
        let (mut most, mut odd) = (zero, zero);
        for i in (0..q.len()).step_by(8) {
            let x = V::load(q.as_ptr().add(i)).mul(scale);
            // 0 for finite elements, else NaN.
            odd = x.fma(zero, odd);
            most = x.max(zero.sub(x).max(most));
        }
        let most = most.spread_greatest();
        let finite = !odd.to_array().iter().any(|x| x.is_nan());
        let fits = most.any_gt(V::splat(LEAST));
        let top = most.to_array()[0];
        *unit = if !finite { f32::NAN } else { top * (1.0 / MOST) };
        let inverse = if finite && fits { V::splat(MOST).div(most) } else { zero };
        let scale = if finite { scale } else { zero };
        for i in (0..q.len()).step_by(8) {
            let x = V::load(q.as_ptr().add(i)).mul(scale).mul(inverse);
            let mut codes = [[0i16; 2]; 8];
            V::store_i16(x, zero, codes.as_mut_ptr().cast());
            for (j, pair) in codes[..4].iter().enumerate() {
                *to.add((i / 2 + j) * stride) = *pair;
            }
        }
    }
}

/// Scores of all tokens of a block, from which the softmax goes on in registers to codes of weights if the rows see
/// the block in full; if not, scores are left in `w`.
///
/// # Safety
/// The CPU can run `V`; `q` is `[d / 2][N]`, `unit` `[N]`, `at` a (block, head) of int8, `t` holds `N` vectors.
#[inline(always)]
pub(super) unsafe fn scores<V: Rise, const N: usize, const AHEAD: bool>(
    q: *const [i16; 2],
    unit: *const f32,
    at: *const u8,
    next: *const u8,
    full: bool,
    t: Tile,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let k = at.add(SCALES).cast::<i8>();
        let mut acc = [[V::zeros(); 2]; N];
        if AHEAD {
            V::prefetch(next);
        }
        for i in (0..t.d / 2).step_by(UNROLL) {
            for i in i..i + UNROLL {
                if AHEAD && i.is_multiple_of(2) {
                    V::prefetch(next.wrapping_add(SCALES + i * 2 * BLOCK));
                }
                let (k0, k1) = (V::pairs(k.add(i * 2 * BLOCK)), V::pairs(k.add(i * 2 * BLOCK + BLOCK)));
                for v in 0..N {
                    let x = V::pair(q.add(i * N + v));
                    acc[v][0] = V::dot(acc[v][0], x, k0);
                    acc[v][1] = V::dot(acc[v][1], x, k1);
                }
            }
        }
        let scales = at.cast::<u16>();
        let (s0, s1) = (V::load_f16(scales), V::load_f16(scales.add(8)));
        for v in 0..N {
            let (t, unit) = (t.vector(v), V::splat(*unit.add(v)));
            let (x0, x1) = (V::floats(acc[v][0]).mul(unit.mul(s0)), V::floats(acc[v][1]).mul(unit.mul(s1)));
            x0.store(t.w);
            x1.store(t.w.add(8));
        }
        if full {
            for v in 0..N {
                let t = t.vector(v);
                let (e0, e1) = weigh(V::load(t.w), V::load(t.w.add(8)), t);
                V::load(t.l).add(e0.add(e1)).store(t.l);
                encode(e0, e1, scales.add(BLOCK), t);
            }
        }
    }
}

/// Pairs of columns per round of the loop over `d`, a divisor of 4.
const UNROLL: usize = 4;

/// Codes of 16 weights times the scales of V, in `w`, and their unit.
///
/// # Safety
/// The CPU can run `V`; `scales` are the block's 16 of V; `t` holds a vector.
#[inline(always)]
unsafe fn encode<V: Ints>(e0: V, e1: V, scales: *const u16, t: Tile) {
    // SAFETY: the caller's promise.
    unsafe {
        let (w0, w1) = (e0.mul(V::load_f16(scales)), e1.mul(V::load_f16(scales.add(8))));
        let top = w0.max(w1).spread_greatest();
        let some = top.any_gt(V::splat(LEAST));
        let inverse = if some { V::splat(MOST).div(top) } else { V::splat(0.0) };
        *t.unit = if some { top.to_array()[0] * (1.0 / MOST) } else { 0.0 };
        V::store_i16(w0.mul(inverse), w1.mul(inverse), t.w.cast());
    }
}

/// Softmax of one vector over the tokens that it sees: scores in `w` become codes of weights, 0 for the others.
///
/// # Safety
/// As [`encode`]; `sees` is within the block.
#[inline(always)]
pub(super) unsafe fn weigh_some<V: Rise>(sees: Range<usize>, scales: *const u16, t: Tile) {
    // SAFETY: the caller's promise.
    unsafe {
        if sees.is_empty() {
            *t.unit = 0.0;
            return;
        }
        let (none, zero) = (V::splat(f32::NEG_INFINITY), V::splat(0.0));
        let (x0, x1) = (keep(V::load(t.w), none, &sees, 0), keep(V::load(t.w.add(8)), none, &sees, 8));
        let (e0, e1) = weigh(x0, x1, t);
        let (e0, e1) = (keep(e0, zero, &sees, 0), keep(e1, zero, &sees, 8));
        V::load(t.l).add(e0.add(e1)).store(t.l);
        encode(e0, e1, scales, t);
    }
}

/// `o[v] += sum over the block's tokens of w[v][t] * values[t]`; nothing for vectors whose unit is 0.
///
/// # Safety
/// The CPU can run `V`; `t` holds `N` vectors, `at` is `[BLOCK / 2][d][2]`.
#[inline(always)]
pub(super) unsafe fn values<V: Ints, const N: usize, const STRIP: usize, const AHEAD: bool>(
    at: *const i8,
    next: *const u8,
    t: Tile,
) {
    let mut i = 0;
    // SAFETY: the caller's promise; strips end at or before d, a multiple of 8.
    unsafe {
        while i + 8 * STRIP <= t.d {
            strip::<V, N, STRIP, AHEAD>(at, next, i, t);
            i += 8 * STRIP;
        }
        while i < t.d {
            strip::<V, N, 1, AHEAD>(at, next, i, t);
            i += 8;
        }
    }
}

/// Columns `i..i + 8 * STRIP` of [`values`].
///
/// # Safety
/// As [`values`].
#[inline(always)]
pub(super) unsafe fn strip<V: Ints, const N: usize, const STRIP: usize, const AHEAD: bool>(
    at: *const i8,
    next: *const u8,
    i: usize,
    t: Tile,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[V::zeros(); STRIP]; N];
        for pair in 0..BLOCK / 2 {
            let row = 2 * (pair * t.d + i);
            if AHEAD && (STRIP >= 4 || i.is_multiple_of(32)) {
                for line in 0..(16 * STRIP).div_ceil(64) {
                    V::prefetch(next.wrapping_add(row + 64 * line));
                }
            }
            let mut x = [V::pairs(at.add(row)); STRIP];
            for c in 1..STRIP {
                x[c] = V::pairs(at.add(row + 16 * c));
            }
            for v in 0..N {
                let w = V::pair(t.w.add(v * BLOCK).cast::<[i16; 2]>().add(pair));
                for c in 0..STRIP {
                    acc[v][c] = V::dot(acc[v][c], w, x[c]);
                }
            }
        }
        for v in 0..N {
            let t = t.vector(v);
            if *t.unit == 0.0 {
                continue;
            }
            let unit = V::splat(*t.unit);
            for c in 0..STRIP {
                let o = t.o.add(i + 8 * c);
                V::floats(acc[v][c]).fma(unit, V::load(o)).store(o);
            }
        }
    }
}
