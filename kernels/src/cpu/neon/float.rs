//! Float weights, f32 activations: vectors run along the columns, the lanes of two are the partial
//! sums `k % 8`.

use super::*;
use crate::cpu::acts::Acts;
use crate::cpu::linear::{FloatPanel, Scratch};
use std::ops::Range;

/// From this many activation rows on, 16-bit weights are widened once and kept: every two rows widen
/// them again otherwise.
const WIDEN: usize = 6;

/// # Safety
/// NEON exists; shapes as [`crate::cpu::linear::linear_panel`] checks them.
#[target_feature(enable = "neon,dotprod")]
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
#[target_feature(enable = "neon,dotprod")]
unsafe fn typed<const T: u8>(w: &FloatPanel, a: &Acts, rows: Range<usize>, tile: &mut [f32], scratch: &mut Scratch) {
    if w.n < PANEL {
        tile.fill(0.0);
    }
    let size = kind(T).size();
    let mut n = 0;
    while n < w.n {
        let count = if w.n - n >= 4 { 4 } else { 1 };
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
#[target_feature(enable = "neon,dotprod")]
unsafe fn widen_row(kind: FloatType, from: *const u8, len: usize, to: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe {
        for i in (0..len / 4 * 4).step_by(4) {
            vst1q_f32(to.add(i), load4(kind, from, i));
        }
        let bytes = std::slice::from_raw_parts(from, len * kind.size());
        for i in len / 4 * 4..len {
            *to.add(i) = kind.read(bytes, i);
        }
    }
}

/// `count` (1 or 4) weight rows against all activation rows; `y[r * 64 + n]`.
///
/// # Safety
/// As [`typed`].
#[target_feature(enable = "neon,dotprod")]
unsafe fn block<const T: u8>(w: *const u8, count: usize, k: usize, a: &Acts, rows: Range<usize>, y: *mut f32) {
    for first in rows.clone().step_by(2) {
        // SAFETY: the caller's promises; the rows exist.
        unsafe {
            let x: [*const f32; 2] = std::array::from_fn(|r| a.row_ptr((first + r).min(rows.end - 1)));
            let y = y.add((first - rows.start) * PANEL);
            match (count, rows.end - first) {
                (4, 1) => dots::<T, 4, 1>(w, k, x, y),
                (4, _) => dots::<T, 4, 2>(w, k, x, y),
                (_, 1) => dots::<T, 1, 1>(w, k, x, y),
                (_, _) => dots::<T, 1, 2>(w, k, x, y),
            }
        }
    }
}

/// `y[r * 64 + n]` for `N` weight rows of `k` elements and `R` activation rows.
///
/// # Safety
/// The rows are readable for `k` elements; `y` writable.
#[target_feature(enable = "neon,dotprod")]
unsafe fn dots<const T: u8, const N: usize, const R: usize>(w: *const u8, k: usize, x: [*const f32; 2], y: *mut f32) {
    let size = kind(T).size();
    let mut acc = [[[vdupq_n_f32(0.0); 2]; R]; N];
    let whole = k / 8 * 8;
    // SAFETY: the caller's promises.
    unsafe {
        for i in (0..whole).step_by(8) {
            for n in 0..N {
                let w = w.add(n * k * size);
                let wide = match T {
                    F16 => halves(vreinterpretq_u16_u8(vld1q_u8(w.add(2 * i)))),
                    _ => [load4(kind(T), w, i), load4(kind(T), w, i + 4)],
                };
                for r in 0..R {
                    for h in 0..2 {
                        acc[n][r][h] = vfmaq_f32(acc[n][r][h], wide[h], vld1q_f32(x[r].add(i + 4 * h)));
                    }
                }
            }
        }
        for n in 0..N {
            let row = std::slice::from_raw_parts(w.add(n * k * size), k * size);
            for r in 0..R {
                let mut p = [0f32; 8];
                vst1q_f32(p.as_mut_ptr(), acc[n][r][0]);
                vst1q_f32(p.as_mut_ptr().add(4), acc[n][r][1]);
                for i in whole..k {
                    p[i % 8] = kind(T).read(row, i).mul_add(*x[r].add(i), p[i % 8]);
                }
                *y.add(r * PANEL + n) = ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]));
            }
        }
    }
}
