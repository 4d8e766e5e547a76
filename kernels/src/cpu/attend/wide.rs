//! The inner loops on sixteen lanes, for tiles of several vectors on a CPU with AVX-512 F.
//!
//! The bits are those of `loops`: tokens of a block, and columns of values, are lanes that do not mix, so one register
//! holds what two hold there. Sums of weights keep their eight lanes.

// Loops over registers: indices are what must be unrolled.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;
use std::ops::Range;

use super::super::kv::BLOCK;
use super::super::lanes::{Avx2, Avx512, EXP2, Lanes, MAGIC};
use super::loops::{Element, Loops, SLACK, Tile, UNROLL, strip};
use super::tile::WIDE_TILE;

/// Calls `$f::<E, n, ..>` for a number of vectors up to [`WIDE_TILE`].
macro_rules! by_vectors {
    ($n:expr, $f:ident, $ahead:ident, [$($vectors:literal: $($strip:literal)?),*], $args:tt) => {
        match $n {
            $($vectors => $f::<E, $vectors, $($strip,)? $ahead> $args,)*
            n => unreachable!("a tile of {n} vectors, at most {WIDE_TILE}"),
        }
    };
}

/// `Loops::scores` for a tile of 4 to 12 vectors.
///
/// # Safety
/// As there; the CPU has AVX-512 F, AVX2, FMA and F16C.
pub(super) unsafe fn scores_of<E: Element, const AHEAD: bool>(
    n: usize,
    q: *const f32,
    k: *const E::Raw,
    next: *const u8,
    full: bool,
    t: Tile,
) {
    // SAFETY: the caller's promise.
    unsafe { by_vectors!(n, scores, AHEAD, [4:, 5:, 6:, 7:, 8:, 9:, 10:, 11:, 12:], (q, k, next, full, t)) }
}

/// `Loops::values` for a tile of 4 to 12 vectors.
///
/// # Safety
/// As there; the CPU has AVX-512 F, AVX2, FMA and F16C.
pub(super) unsafe fn values_of<E: Element, const AHEAD: bool>(
    n: usize,
    tokens: Range<usize>,
    at: *const E::Raw,
    next: *const u8,
    t: Tile,
) {
    if tokens.is_empty() {
        return;
    }
    // Strips as wide as the registers allow.
    // SAFETY: the caller's promise.
    unsafe {
        by_vectors!(
            n,
            values,
            AHEAD,
            [4: 4, 5: 4, 6: 4, 7: 2, 8: 2, 9: 2, 10: 2, 11: 2, 12: 2],
            (tokens, at, next, t)
        );
    }
}

/// `to = from` as f32, `n` elements, a multiple of 16.
///
/// # Safety
/// The CPU has AVX-512 F; both are valid for `n` elements.
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
pub(super) unsafe fn widen<E: Element>(from: *const E::Raw, next: *const E::Raw, to: *mut f32, n: usize) {
    for i in (0..n).step_by(16) {
        Avx2::prefetch(next.wrapping_add(i).cast());
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_ps(to.add(i), E::load_wide(from.add(i))) };
    }
}

/// # Safety
/// As [`scores_of`].
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
unsafe fn scores<E: Element, const N: usize, const AHEAD: bool>(
    q: *const f32,
    k: *const E::Raw,
    next: *const u8,
    full: bool,
    t: Tile,
) {
    // SAFETY: the caller's promise: `q` is `[d][N]`, `k` `[d][BLOCK]`, `t` holds `N` vectors.
    unsafe {
        let mut acc = [_mm512_setzero_ps(); N];
        for i in (0..t.d).step_by(UNROLL) {
            for i in i..i + UNROLL {
                if AHEAD && (i * BLOCK * size_of::<E::Raw>()).is_multiple_of(64) {
                    Avx2::prefetch(next.wrapping_add(i * BLOCK * size_of::<E::Raw>()));
                }
                let k = E::load_wide(k.add(i * BLOCK));
                for v in 0..N {
                    acc[v] = _mm512_fmadd_ps(_mm512_set1_ps(*q.add(i * N + v)), k, acc[v]);
                }
            }
        }
        for v in 0..N {
            let t = t.vector(v);
            let w = if full { weigh(acc[v], t) } else { acc[v] };
            _mm512_storeu_ps(t.w, w);
        }
    }
}

/// Weights of 16 scores of a vector that sees all of them, under the running maximum, which they may raise; adds them to
/// the running sum.
///
/// # Safety
/// As [`scores_of`]; `t` holds a vector.
#[inline]
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
unsafe fn weigh(x: __m512, t: Tile) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe {
        let [x0, x1] = halves(x);
        let top = x0.max(x1);
        if top.any_gt(Avx512::splat(*t.m).add(Avx512::splat(SLACK))) {
            Avx512::rise(top, t);
        }
        let e = exp2(_mm512_sub_ps(x, _mm512_set1_ps(*t.m)));
        let [e0, e1] = halves(e);
        Avx512::load(t.l).add(e0.add(e1)).store(t.l);
        e
    }
}

/// Lanes 0 to 7 and 8 to 15.
#[inline]
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
fn halves(x: __m512) -> [Avx512; 2] {
    let high = _mm512_castpd_ps(_mm512_castpd256_pd512(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(x))));
    // SAFETY: this function runs where there is AVX2.
    [x, high].map(|x| Avx512(unsafe { Avx2::from_raw(_mm512_castps512_ps256(x)) }))
}

/// 2^x, operation for operation that of `lanes`.
#[inline]
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
fn exp2(x: __m512) -> __m512 {
    let magic = _mm512_set1_ps(MAGIC);
    let x = _mm512_max_ps(_mm512_set1_ps(-126.0), x);
    let t = _mm512_add_ps(x, magic);
    let r = _mm512_sub_ps(x, _mm512_sub_ps(t, magic));
    let mut p = _mm512_set1_ps(EXP2[0]);
    for c in &EXP2[1..] {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(*c));
    }
    let n = _mm512_slli_epi32::<23>(_mm512_castps_si512(t));
    _mm512_mul_ps(p, _mm512_castsi512_ps(_mm512_add_epi32(n, _mm512_set1_epi32(127 << 23))))
}

/// # Safety
/// As [`values_of`].
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
unsafe fn values<E: Element, const N: usize, const STRIP: usize, const AHEAD: bool>(
    tokens: Range<usize>,
    at: *const E::Raw,
    next: *const u8,
    t: Tile,
) {
    let mut i = 0;
    // SAFETY: the caller's promise; strips end at or before d, a multiple of 8.
    unsafe {
        // Known bounds let the compiler unroll the loop over tokens.
        while tokens == (0..BLOCK) && i + 16 * STRIP <= t.d {
            wide_strip::<E, N, STRIP, AHEAD>(0..BLOCK, at, next, i, t);
            i += 16 * STRIP;
        }
        while i + 16 * STRIP <= t.d {
            wide_strip::<E, N, STRIP, AHEAD>(tokens.clone(), at, next, i, t);
            i += 16 * STRIP;
        }
        while i + 16 <= t.d {
            wide_strip::<E, N, 1, AHEAD>(tokens.clone(), at, next, i, t);
            i += 16;
        }
        if i < t.d {
            strip::<Avx512, E, N, 1, AHEAD>(tokens, at, next, i, t);
        }
    }
}

/// Columns `i..i + 16 * STRIP` of [`values`].
///
/// # Safety
/// As [`values`].
#[inline]
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
unsafe fn wide_strip<E: Element, const N: usize, const STRIP: usize, const AHEAD: bool>(
    tokens: Range<usize>,
    at: *const E::Raw,
    next: *const u8,
    i: usize,
    tile: Tile,
) {
    let Tile { w, o, d, .. } = tile;
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); N]; STRIP];
        for v in 0..N {
            for c in 0..STRIP {
                acc[c][v] = _mm512_loadu_ps(o.add(v * d + i + 16 * c));
            }
        }
        for t in tokens {
            let row = t * d + i;
            if AHEAD {
                for line in 0..(16 * STRIP * size_of::<E::Raw>()).div_ceil(64) {
                    Avx2::prefetch(next.wrapping_add(row * size_of::<E::Raw>() + 64 * line));
                }
            }
            let mut x = [_mm512_setzero_ps(); STRIP];
            for c in 0..STRIP {
                x[c] = E::load_wide(at.add(row + 16 * c));
            }
            for v in 0..N {
                let weight = _mm512_set1_ps(*w.add(v * BLOCK + t));
                for c in 0..STRIP {
                    acc[c][v] = _mm512_fmadd_ps(weight, x[c], acc[c][v]);
                }
            }
        }
        for v in 0..N {
            for c in 0..STRIP {
                _mm512_storeu_ps(o.add(v * d + i + 16 * c), acc[c][v]);
            }
        }
    }
}
