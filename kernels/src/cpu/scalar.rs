//! The table that runs anywhere. Correct first; fast enough to test with.

use super::acts::{Acts, BLOCK, Quantum, TINY};
use super::isa::{Isa, Level};
use super::linear::{FloatPanel, IntPanel, Scratch};
use quern_models::{PANEL, ZeroKind};
use std::ops::Range;

pub(crate) static ISA: Isa = Isa {
    name: "scalar",
    level: Level::Scalar,
    executed: true,
    detected: || true,
    quantize,
    plain: |_| false,
    int4_int8: int_int8,
    int4_f32: int_f32,
    int8_int8: int_int8,
    int8_f32: int_f32,
    float,
    peak,
    strips: false,
    rows: 32,
};

/// # Safety
/// `to` is writable for the quads of a block of `x.len()` values, `step` bytes apart.
pub(crate) unsafe fn quantize(x: &[f32], to: *mut i8, step: usize) -> Quantum {
    // As integers, magnitudes order like the floats they are, with infinities and NaNs on top.
    let top = x.iter().map(|v| v.to_bits() & 0x7fff_ffff).max().unwrap_or(0);
    let amax = f32::from_bits(top);
    let (scale, inv) = match amax {
        a if !a.is_finite() => (f32::NAN, 0.0),
        a if a < TINY => (0.0, 0.0),
        a => (a / 127.0, 127.0 / a),
    };
    // Over k % 4 < 2, and over the others.
    let mut sums = [0i32; 2];
    for (i, v) in x.iter().enumerate() {
        let q = if inv == 0.0 { 0 } else { (v * inv).round_ties_even() as i8 };
        sums[i % 4 / 2] += q as i32;
        // SAFETY: the caller's promise.
        unsafe { *to.add(i / 4 * step + i % 4) = q }
    }
    Quantum { scale, sum: sums[0] + sums[1], middle: middle(sums) }
}

/// `-8 * sum` of both sums, as two 16-bit numbers, which they fit.
pub(crate) fn middle([low, high]: [i32; 2]) -> i32 {
    (-8 * low) & 0xffff | (-8 * high) << 16
}

/// # Safety
/// Shapes as [`super::linear::linear_panel`] checks them.
unsafe fn int_int8(w: &IntPanel, a: &Acts, rows: Range<usize>, tile: &mut [f32], _: &mut Scratch) {
    tile.fill(0.0);
    let (a, block) = (a.int8(w.block), w.block);
    let mut ints = [[0i32; BLOCK]; PANEL];
    for b in 0..a.blocks() {
        let g = b * block / w.group;
        for (r, ints) in ints.iter_mut().enumerate() {
            (0..block).for_each(|k| ints[k] = w.int_at(r, b * block + k));
        }
        for (row, tile) in rows.clone().zip(tile.chunks_exact_mut(PANEL)) {
            let mut q = [0i32; BLOCK];
            (0..block).for_each(|k| q[k] = a.value(row, b * block + k) as i32);
            let (sa, sum) = a.scale_and_sum(row, b);
            for (r, y) in tile.iter_mut().enumerate() {
                let dot: i32 = ints[r].iter().zip(&q).map(|(int, q)| int * q).sum();
                *y = ((dot - w.zero_at(r, g) * sum) as f32).mul_add(w.scale_at(r, g) * sa, *y);
                if w.zero == ZeroKind::Min {
                    *y = (w.min_at(r, g) * sa).mul_add(sum as f32, *y);
                }
            }
        }
    }
}

/// # Safety
/// Shapes as [`super::linear::linear_panel`] checks them.
pub(super) unsafe fn int_f32(w: &IntPanel, a: &Acts, rows: Range<usize>, tile: &mut [f32], scratch: &mut Scratch) {
    scratch.weights.reserve(w.k);
    for r in 0..PANEL {
        let weights = scratch.weights.slice_mut(w.k);
        w.weights(r, weights);
        for (i, row) in rows.clone().enumerate() {
            // SAFETY: the row exists and is readable for k columns.
            let x = unsafe { std::slice::from_raw_parts(a.row_ptr(row), w.k) };
            let mut p = [0f32; 4];
            for k in 0..w.k {
                p[k % 4] = weights[k].mul_add(x[k], p[k % 4]);
            }
            tile[i * PANEL + r] = (p[0] + p[1]) + (p[2] + p[3]);
        }
    }
}

/// # Safety
/// Shapes as [`super::linear::linear_panel`] checks them.
unsafe fn float(w: &FloatPanel, a: &Acts, rows: Range<usize>, tile: &mut [f32], _: &mut Scratch) {
    tile.fill(0.0);
    for (i, row) in rows.enumerate() {
        // SAFETY: the row exists and is readable for k columns.
        let x = unsafe { std::slice::from_raw_parts(a.row_ptr(row), w.k) };
        for r in 0..w.n {
            let mut p = [0f32; 8];
            for (k, x) in x.iter().enumerate() {
                p[k % 8] = w.kind.read(w.rows, r * w.k + k).mul_add(*x, p[k % 8]);
            }
            tile[i * PANEL + r] = ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]));
        }
    }
}

/// Sums of products of bytes, as far as the compiler takes them.
///
/// # Safety
/// None: the type is shared with tables that need instructions.
pub(super) unsafe fn peak(rounds: u64) -> u64 {
    let (w, a) = ([3u8; 256], [1i8; 256]);
    for _ in 0..rounds {
        let (w, a) = (std::hint::black_box(&w), std::hint::black_box(&a));
        std::hint::black_box(w.iter().zip(a).map(|(w, a)| *w as i32 * *a as i32).sum::<i32>());
    }
    rounds * 256
}
