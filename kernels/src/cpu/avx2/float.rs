//! Float weights, f32 activations: vectors run along the columns, a lane is a partial sum `k % 8`.
//! Nothing is prefetched: row streams are what hardware prefetchers know, and asking made it slower.

use super::*;
use crate::cpu::acts::Acts;
use crate::cpu::linear::{FloatPanel, Scratch};
use std::ops::Range;

/// From this many activation rows on, 16-bit weights are widened once and kept.
const WIDEN: usize = 6;

/// # Safety
/// AVX2, FMA, F16C exist; shapes as [`crate::cpu::linear::linear_panel`] checks them.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn panel(w: &FloatPanel, a: &Acts, rows: Range<usize>, tile: &mut [f32], scratch: &mut Scratch) {
    // SAFETY: the caller's promises.
    unsafe {
        match w.kind {
            FloatType::F32 => typed::<F32>(w, a, rows, tile, scratch),
            FloatType::F16 => typed::<F16>(w, a, rows, tile, scratch),
            FloatType::BF16 => typed::<BF16>(w, a, rows, tile, scratch),
        }
    }
}

// A const generic cannot be a FloatType.
const F32: u8 = 0;
const F16: u8 = 1;
const BF16: u8 = 2;

/// The element type that a const generic stands for.
const fn kind(k: u8) -> FloatType {
    match k {
        F32 => FloatType::F32,
        F16 => FloatType::F16,
        _ => FloatType::BF16,
    }
}

/// # Safety
/// As [`panel`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn typed<const T: u8>(w: &FloatPanel, a: &Acts, rows: Range<usize>, tile: &mut [f32], scratch: &mut Scratch) {
    if w.n < PANEL {
        tile.fill(0.0);
    }
    let size = kind(T).size();
    let step = if rows.len() == 1 { 8 } else { 4 };
    let mut n = 0;
    while n < w.n {
        let count = if w.n - n >= step { step } else { 1 };
        let part = w.rows[n * w.k * size..][..count * w.k * size].as_ptr();
        // SAFETY: `count` weight rows start at `part`; rows of `a` and `tile` are the caller's.
        unsafe {
            let y = tile.as_mut_ptr().add(n);
            if T != F32 && rows.len() >= WIDEN {
                scratch.weights.reserve(count * w.k);
                let wide = scratch.weights.ptr();
                widen_row(kind(T), part, count * w.k, wide);
                block::<F32>(wide.cast(), count, w.k, a, rows.clone(), y);
            } else {
                block::<T>(part, count, w.k, a, rows.clone(), y);
            }
        }
        n += count;
    }
}

/// `len` elements to f32.
///
/// # Safety
/// `from` is readable and `to` writable for `len` elements.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn widen_row(kind: FloatType, from: *const u8, len: usize, to: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe {
        for i in (0..len / 8 * 8).step_by(8) {
            _mm256_storeu_ps(to.add(i), load8(kind, from, i));
        }
        let bytes = std::slice::from_raw_parts(from, len * kind.size());
        for i in len / 8 * 8..len {
            *to.add(i) = kind.read(bytes, i);
        }
    }
}

/// `count` (1, 4 or 8) weight rows against all activation rows; `y[r * 64 + n]`.
///
/// # Safety
/// As [`typed`]; 8 weight rows only with one activation row.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn block<const T: u8>(w: *const u8, count: usize, k: usize, a: &Acts, rows: Range<usize>, y: *mut f32) {
    let mut first = rows.start;
    while first < rows.end {
        let left = rows.end - first;
        // Four are two and two, which need fewer loads than three and one.
        let step = if left == 4 { 2 } else { left.min(3) };
        // SAFETY: the caller's promises; the rows exist.
        unsafe {
            let x: [*const f32; 3] = std::array::from_fn(|r| a.row_ptr((first + r).min(rows.end - 1)));
            let y = y.add((first - rows.start) * PANEL);
            match (count, step) {
                (8, _) => dots::<T, 8, 1>(w, k, x, y),
                (4, 1) => dots::<T, 4, 1>(w, k, x, y),
                (4, 2) => dots::<T, 4, 2>(w, k, x, y),
                (4, _) => dots::<T, 4, 3>(w, k, x, y),
                (_, 1) => dots::<T, 1, 1>(w, k, x, y),
                (_, 2) => dots::<T, 1, 2>(w, k, x, y),
                (_, _) => dots::<T, 1, 3>(w, k, x, y),
            }
        }
        first += step;
    }
}

/// `y[r * 64 + n]` for `N` weight rows of `k` elements and `R` activation rows.
///
/// # Safety
/// The rows are readable for `k` elements, those of `x` up to the next multiple of 8; `y` writable.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dots<const T: u8, const N: usize, const R: usize>(w: *const u8, k: usize, x: [*const f32; 3], y: *mut f32) {
    let size = kind(T).size();
    let mut acc = [[_mm256_setzero_ps(); R]; N];
    let whole = k / 8 * 8;
    // SAFETY: the caller's promises.
    unsafe {
        for i in (0..whole).step_by(8) {
            let xs: [__m256; R] = std::array::from_fn(|r| load(x[r].add(i)));
            for n in 0..N {
                let w = load8(kind(T), w.add(n * k * size), i);
                for r in 0..R {
                    acc[n][r] = _mm256_fmadd_ps(w, xs[r], acc[n][r]);
                }
            }
        }
        if whole < k {
            // Lanes past the end must keep their sum as it is, the sign of a zero included.
            let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let real = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32((k - whole) as i32), lane));
            for n in 0..N {
                let row = std::slice::from_raw_parts(w.add(n * k * size), k * size);
                let mut tail = [0f32; 8];
                for i in whole..k {
                    tail[i - whole] = kind(T).read(row, i);
                }
                let w = load(tail.as_ptr());
                for r in 0..R {
                    let sum = _mm256_fmadd_ps(w, load(x[r].add(whole)), acc[n][r]);
                    acc[n][r] = _mm256_blendv_ps(acc[n][r], sum, real);
                }
            }
        }
        for r in 0..R {
            for n in 0..N {
                *y.add(r * PANEL + n) = reduce(acc[n][r]);
            }
        }
    }
}

/// `((p0+p4) + (p2+p6)) + ((p1+p5) + (p3+p7))`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn reduce(p: __m256) -> f32 {
    let p = _mm_add_ps(_mm256_castps256_ps128(p), _mm256_extractf128_ps::<1>(p));
    let p = _mm_add_ps(p, _mm_movehl_ps(p, p));
    _mm_cvtss_f32(_mm_add_ss(p, _mm_shuffle_ps::<1>(p, p)))
}
