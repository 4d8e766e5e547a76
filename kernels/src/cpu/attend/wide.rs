//! The inner loops of attention on the sixteen lanes of AVX-512.
//!
//! Every lane goes through what it goes through in `loops` and `codes`: lanes of scores are the tokens of a block, lanes
//! of values are columns, and neither mix. Only the running sum has eight lanes by definition; to those the two halves
//! of sixteen weights are added as `loops` does. So the bits are the same.
//!
//! Thirty-two registers also hold twice the sums: scores of two blocks at once for every group, values of up to 64
//! columns of six vectors.

// Loops over registers: indices are what must be unrolled.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;
use std::ops::Range;

use super::super::kv::{BLOCK, SCALES};
use super::super::lanes::{Avx2, EXP2, Lanes, MAGIC};
use super::codes::{self, LEAST, MOST};
use super::fp8;
use super::ints::Ints;
use super::loops::{self, Element, Loops, Rise, SLACK, Tile, UNROLL};

/// AVX-512 F, BW, VL, DQ and VNNI, and what [`Avx2`] needs.
pub(super) struct Avx512;

/// Both halves of sixteen lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx2,fma,f16c")]
fn halves(x: __m512) -> [__m256; 2] {
    [_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x)]
}

/// Sixteen lanes of two halves.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx2,fma,f16c")]
pub(super) fn join(low: __m256, high: __m256) -> __m512 {
    _mm512_insertf32x8::<1>(_mm512_castps256_ps512(low), high)
}

/// [`super::super::lanes::exp2`] on sixteen lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn exp2(x: __m512) -> __m512 {
    // The constant first: NaN gives the second operand.
    let x = _mm512_max_ps(_mm512_set1_ps(-126.0), x);
    let magic = _mm512_set1_ps(MAGIC);
    let t = _mm512_add_ps(x, magic);
    let r = _mm512_sub_ps(x, _mm512_sub_ps(t, magic));
    let mut p = _mm512_set1_ps(EXP2[0]);
    for c in &EXP2[1..] {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(*c));
    }
    let n = _mm512_slli_epi32::<23>(_mm512_castps_si512(t));
    _mm512_mul_ps(p, _mm512_castsi512_ps(_mm512_add_epi32(n, _mm512_set1_epi32(127 << 23))))
}

/// Makes sure that the running maxima of `N` vectors cover their 16 scores in `w`.
///
/// # Safety
/// `t` holds `N` vectors.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn rise_all<const N: usize>(t: Tile) {
    // SAFETY: the caller's promise; the CPU has what `Avx2` needs.
    unsafe {
        for v in 0..N {
            let t = t.vector(v);
            let top = Avx2::load(t.w).max(Avx2::load(t.w.add(8)));
            if top.any_gt(Avx2::splat(*t.m).add(Avx2::splat(SLACK))) {
                Avx2::rise(top, t);
            }
        }
    }
}

/// Weights of 16 scores under the running maximum, which covers them; the running sum grows by them.
///
/// # Safety
/// `t` holds a vector.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn weights(t: Tile) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe {
        let e = exp2(_mm512_sub_ps(_mm512_loadu_ps(t.w), _mm512_set1_ps(*t.m)));
        let [e0, e1] = halves(e);
        _mm256_storeu_ps(t.l, _mm256_add_ps(_mm256_loadu_ps(t.l), _mm256_add_ps(e0, e1)));
        e
    }
}

/// `acc[b][v] = sum over i of q[i][v] * k[b][i]` of `B` blocks; lanes are tokens.
///
/// # Safety
/// As `loops::scores`, `B` times.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn sums<E: Element, const N: usize, const B: usize, const AHEAD: bool>(
    q: *const f32,
    k: [*const E::Raw; B],
    next: [*const u8; B],
    d: usize,
) -> [[__m512; N]; B] {
    let mut acc = [[_mm512_setzero_ps(); N]; B];
    for i in (0..d).step_by(UNROLL) {
        for i in i..i + UNROLL {
            let row = i * BLOCK * size_of::<E::Raw>();
            let mut keys = [_mm512_setzero_ps(); B];
            for b in 0..B {
                if AHEAD && row.is_multiple_of(64) {
                    Avx2::prefetch(next[b].wrapping_add(row));
                }
                // SAFETY: the caller's promise; so for all.
                keys[b] = unsafe { E::load_16(k[b].add(i * BLOCK)) };
            }
            for v in 0..N {
                // SAFETY: see above.
                let x = _mm512_set1_ps(unsafe { *q.add(i * N + v) });
                for b in 0..B {
                    acc[b][v] = _mm512_fmadd_ps(x, keys[b], acc[b][v]);
                }
            }
        }
    }
    acc
}

/// Columns `i..i + 16 * STRIP` of `loops::values`.
///
/// # Safety
/// As `loops::values`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn strip<E: Element, const N: usize, const STRIP: usize, const AHEAD: bool>(
    tokens: Range<usize>,
    at: *const E::Raw,
    next: *const u8,
    i: usize,
    t: Tile,
) {
    let Tile { w, o, d, .. } = t;
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); STRIP]; N];
        for v in 0..N {
            for c in 0..STRIP {
                acc[v][c] = _mm512_loadu_ps(o.add(v * d + i + 16 * c));
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
                x[c] = E::load_16(at.add(row + 16 * c));
            }
            for v in 0..N {
                let weight = _mm512_set1_ps(*w.add(v * BLOCK + t));
                for c in 0..STRIP {
                    acc[v][c] = _mm512_fmadd_ps(weight, x[c], acc[v][c]);
                }
            }
        }
        for v in 0..N {
            for c in 0..STRIP {
                _mm512_storeu_ps(o.add(v * d + i + 16 * c), acc[v][c]);
            }
        }
    }
}

/// Codes of 16 weights times the scales of V; see `codes::encode`.
///
/// # Safety
/// As there; `e` are the vector's weights.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn encode(e: __m512, scales: *const u16, t: Tile) {
    // SAFETY: the caller's promise; the CPU has what `Avx2` needs.
    unsafe {
        let w = _mm512_mul_ps(e, _mm512_cvtph_ps(_mm256_loadu_si256(scales.cast())));
        let [w0, w1] = halves(w).map(|x| Avx2::from_raw(x));
        let top = w0.max(w1).spread_greatest();
        let some = top.any_gt(Avx2::splat(LEAST));
        let inverse = if some { Avx2::splat(MOST).div(top) } else { Avx2::splat(0.0) };
        *t.unit = if some { _mm256_cvtss_f32(top.raw()) * (1.0 / MOST) } else { 0.0 };
        let codes = _mm512_cvtps_epi32(_mm512_mul_ps(w, join(inverse.raw(), inverse.raw())));
        _mm256_storeu_si256(t.w.cast(), _mm512_cvtsepi32_epi16(codes));
    }
}

/// Columns `i..i + 16 * STRIP` of `codes::values`.
///
/// # Safety
/// As there; the CPU has VNNI.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn code_strip<const N: usize, const STRIP: usize, const AHEAD: bool>(
    at: *const i8,
    next: *const u8,
    i: usize,
    t: Tile,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[_mm512_setzero_si512(); STRIP]; N];
        for pair in 0..BLOCK / 2 {
            let row = 2 * (pair * t.d + i);
            if AHEAD {
                for line in 0..(32 * STRIP).div_ceil(64) {
                    Avx2::prefetch(next.wrapping_add(row + 64 * line));
                }
            }
            let mut x = [_mm512_setzero_si512(); STRIP];
            for c in 0..STRIP {
                x[c] = pairs(at.add(row + 32 * c));
            }
            for v in 0..N {
                let w = _mm512_set1_epi32(t.w.add(v * BLOCK).cast::<i32>().add(pair).read());
                for c in 0..STRIP {
                    acc[v][c] = _mm512_dpwssd_epi32(acc[v][c], w, x[c]);
                }
            }
        }
        for v in 0..N {
            let t = t.vector(v);
            if *t.unit == 0.0 {
                continue;
            }
            let unit = _mm512_set1_ps(*t.unit);
            for c in 0..STRIP {
                let o = t.o.add(i + 16 * c);
                _mm512_storeu_ps(o, _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[v][c]), unit, _mm512_loadu_ps(o)));
            }
        }
    }
}

/// Sixteen pairs of codes as pairs of i16.
///
/// # Safety
/// `p` is valid for reading 32 elements.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn pairs(p: *const i8) -> __m512i {
    // SAFETY: the caller's promise.
    _mm512_cvtepi8_epi16(unsafe { _mm256_loadu_si256(p.cast()) })
}

/// Most columns of a strip of values, in registers.
const STRIP: usize = 4;

impl Loops for Avx512 {
    const PAIRS: usize = usize::MAX;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    unsafe fn scores<E: Element, const N: usize, const AHEAD: bool>(
        q: *const f32,
        k: *const E::Raw,
        next: *const u8,
        full: bool,
        t: Tile,
    ) {
        // SAFETY: the caller's promise; so for all.
        unsafe {
            let [acc] = sums::<E, N, 1, AHEAD>(q, [k], [next], t.d);
            for v in 0..N {
                _mm512_storeu_ps(t.vector(v).w, acc[v]);
            }
            if full {
                Self::weigh_all::<N>(t);
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    unsafe fn two_scores<E: Element, const N: usize, const AHEAD: bool>(
        q: *const f32,
        k: [*const E::Raw; 2],
        next: [*const u8; 2],
        t: [Tile; 2],
    ) {
        // SAFETY: see `scores`.
        unsafe {
            let acc = sums::<E, N, 2, AHEAD>(q, k, next, t[0].d);
            for b in 0..2 {
                for v in 0..N {
                    _mm512_storeu_ps(t[b].vector(v).w, acc[b][v]);
                }
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    unsafe fn weigh_all<const N: usize>(t: Tile) {
        // SAFETY: see `scores`.
        unsafe {
            rise_all::<N>(t);
            for v in 0..N {
                let t = t.vector(v);
                _mm512_storeu_ps(t.w, weights(t));
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    unsafe fn values<E: Element, const N: usize, const EIGHTS: usize, const AHEAD: bool>(
        tokens: Range<usize>,
        at: *const E::Raw,
        next: *const u8,
        t: Tile,
    ) {
        if tokens.is_empty() {
            return;
        }
        let mut i = 0;
        // SAFETY: see `scores`; strips end at or before d, a multiple of 8.
        unsafe {
            while i + 16 * STRIP <= t.d {
                strip::<E, N, STRIP, AHEAD>(tokens.clone(), at, next, i, t);
                i += 16 * STRIP;
            }
            while i + 16 <= t.d {
                strip::<E, N, 1, AHEAD>(tokens.clone(), at, next, i, t);
                i += 16;
            }
            if i < t.d {
                loops::strip::<Avx2, E, N, 1, AHEAD>(tokens, at, next, i, t);
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    unsafe fn weigh_some(sees: Range<usize>, t: Tile) {
        // SAFETY: see `scores`.
        unsafe { loops::weigh_some::<Avx2>(sees, t) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    unsafe fn widen<E: Element>(from: *const E::Raw, next: *const E::Raw, to: *mut f32, n: usize) {
        let mut i = 0;
        while i + 16 <= n {
            Avx2::prefetch(next.wrapping_add(i).cast());
            // SAFETY: see `scores`.
            unsafe { _mm512_storeu_ps(to.add(i), E::load_16(from.add(i))) };
            i += 16;
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    unsafe fn widen_keys(at: *const u8, next: *const u8, to: *mut f32, d: usize) {
        // SAFETY: see `scores`.
        unsafe { fp8::keys::<Avx2>(at, next, to, d) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    unsafe fn widen_values(at: *const u8, next: *const u8, to: *mut f32, d: usize) {
        // SAFETY: see `scores`.
        unsafe { fp8::values::<Avx2>(at, next, to, d) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    unsafe fn code_query(q: &[f32], scale: f32, stride: usize, to: *mut [i16; 2], unit: *mut f32) {
        // SAFETY: see `scores`.
        unsafe { codes::query::<Avx2>(q, scale, stride, to, unit) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn code_scores<const N: usize, const AHEAD: bool>(
        q: *const [i16; 2],
        unit: *const f32,
        at: *const u8,
        next: *const u8,
        full: bool,
        t: Tile,
    ) {
        // SAFETY: see `scores`.
        unsafe {
            let k = at.add(SCALES).cast::<i8>();
            // Two chains a vector: their sum is exact in any order.
            let mut acc = [[_mm512_setzero_si512(); 2]; N];
            if AHEAD {
                Avx2::prefetch(next);
            }
            for i in (0..t.d / 2).step_by(4) {
                for i in i..i + 4 {
                    if AHEAD && i.is_multiple_of(2) {
                        Avx2::prefetch(next.wrapping_add(SCALES + i * 2 * BLOCK));
                    }
                    let keys = pairs(k.add(i * 2 * BLOCK));
                    for v in 0..N {
                        let x = _mm512_set1_epi32(q.add(i * N + v).cast::<i32>().read_unaligned());
                        acc[v][i % 2] = _mm512_dpwssd_epi32(acc[v][i % 2], x, keys);
                    }
                }
            }
            let scales = _mm512_cvtph_ps(_mm256_loadu_si256(at.cast()));
            for v in 0..N {
                let sum = _mm512_cvtepi32_ps(_mm512_add_epi32(acc[v][0], acc[v][1]));
                let unit = _mm512_mul_ps(_mm512_set1_ps(*unit.add(v)), scales);
                _mm512_storeu_ps(t.vector(v).w, _mm512_mul_ps(sum, unit));
            }
            if full {
                rise_all::<N>(t);
                for v in 0..N {
                    let t = t.vector(v);
                    encode(weights(t), at.cast::<u16>().add(BLOCK), t);
                }
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    unsafe fn code_some(sees: Range<usize>, scales: *const u16, t: Tile) {
        // SAFETY: see `scores`.
        unsafe { codes::weigh_some::<Avx2>(sees, scales, t) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn code_values<const N: usize, const EIGHTS: usize, const AHEAD: bool>(
        at: *const i8,
        next: *const u8,
        t: Tile,
    ) {
        let mut i = 0;
        // SAFETY: see `scores`; strips end at or before d, a multiple of 8.
        unsafe {
            while i + 16 * STRIP <= t.d {
                code_strip::<N, STRIP, AHEAD>(at, next, i, t);
                i += 16 * STRIP;
            }
            while i + 16 <= t.d {
                code_strip::<N, 1, AHEAD>(at, next, i, t);
                i += 16;
            }
            if i < t.d {
                codes::strip::<Avx2, N, 1, AHEAD>(at, next, i, t);
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    unsafe fn fold(m: &mut f32, l: &mut f32, o: &mut [f32], next: (f32, f32, &[f32])) {
        // SAFETY: see `scores`.
        unsafe { loops::fold::<Avx2>(m, l, o, next) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    unsafe fn normalize(l: f32, o: &mut [f32]) {
        // SAFETY: see `scores`.
        unsafe { loops::normalize::<Avx2>(l, o) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    unsafe fn cap(vectors: usize, cap: f32, t: Tile) {
        // SAFETY: see `scores`.
        unsafe { loops::cap::<Avx2>(vectors, cap, t) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    unsafe fn sink(m: f32, l: &mut f32, o: &mut [f32], sink: f32) {
        // SAFETY: see `scores`.
        unsafe { loops::sink::<Avx2>(m, l, o, sink) }
    }
}
