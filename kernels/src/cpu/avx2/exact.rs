//! Integer weights, f32 activations: weights are dequantized exactly as `TensorView::at` says.
//!
//! A span of 64 columns is dequantized once, `[k % 4][k / 4][64 rows]` (16 KiB), and all rows sweep
//! over it. The four partial sums by `k % 4` never meet before the end, so they are four
//! independent products; they wait in memory, `[row][k % 4][64]`, between spans.

use super::*;
use crate::cpu::acts::Acts;
use crate::cpu::linear::Scratch;
use std::ops::Range;

/// Columns dequantized at a time.
const COLUMNS: usize = 64;
/// Elements between the weights of one `k % 4` and the next.
const LANE: usize = COLUMNS / 4 * PANEL;

/// # Safety
/// AVX2, FMA, F16C exist; shapes as [`crate::cpu::linear::linear_panel`] checks them.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn panel(w: &IntPanel, a: &Acts, rows: Range<usize>, tile: &mut [f32], scratch: &mut Scratch) {
    let m = rows.len();
    scratch.weights.reserve(4 * LANE);
    scratch.partial.reserve(m * 4 * PANEL);
    scratch.partial.slice_mut(m * 4 * PANEL).fill(0.0);
    let (weights, partial) = (scratch.weights.ptr(), scratch.partial.ptr());
    for k0 in (0..w.k).step_by(COLUMNS) {
        let columns = (w.k - k0).min(COLUMNS);
        let halves = columns.div_ceil(32);
        widen(w, 32, k0 / 32, halves, 0, &mut scratch.meta);
        for half in 0..halves {
            // SAFETY: groups are whole multiples of 32 columns, so the codes of the half exist.
            unsafe { dequantize(w, k0 / 32 + half, &scratch.meta, half, weights) }
        }
        for kk in 0..columns.min(4) {
            let quads = (columns - kk).div_ceil(4);
            // SAFETY: `quads` columns `k0 + kk + 4q` exist in every row of `a`; the buffers were
            // sized above.
            unsafe {
                let w = weights.add(kk * LANE);
                let x = |r: usize| a.row_ptr(rows.start + r).add(k0 + kk);
                let p = |r: usize| partial.add((r * 4 + kk) * PANEL);
                let mut r = 0;
                while r < m {
                    match m - r {
                        1 => multiply::<8, 1>(w, quads, x(r), a.stride(), p(r)),
                        2 => multiply::<4, 2>(w, quads, x(r), a.stride(), p(r)),
                        3 => multiply::<2, 3>(w, quads, x(r), a.stride(), p(r)),
                        4 | 5 => multiply::<2, 4>(w, quads, x(r), a.stride(), p(r)),
                        _ => multiply::<2, 6>(w, quads, x(r), a.stride(), p(r)),
                    }
                    r += match m - r {
                        4 | 5 => 4,
                        left => left.min(6),
                    };
                }
            }
        }
    }
    for (p, y) in scratch.partial.slice_mut(m * 4 * PANEL).chunks_exact(4 * PANEL).zip(tile.chunks_exact_mut(PANEL)) {
        for n in 0..PANEL {
            y[n] = (p[n] + p[PANEL + n]) + (p[2 * PANEL + n] + p[3 * PANEL + n]);
        }
    }
}

/// Dequantizes 32 columns, `part` of them before, into the half `half` of `to`.
///
/// # Safety
/// The codes exist, `to` has room for a span.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dequantize(w: &IntPanel, part: usize, meta: &Meta, half: usize, to: *mut f32) {
    let slot = meta.slot[half];
    let quad_bytes = w.bits as usize * 32;
    let codes = w.codes[part * 8 * quad_bytes..][..8 * quad_bytes].as_ptr();
    let mask = _mm256_set1_epi32((1 << w.bits) - 1);
    for v in 0..8 {
        // SAFETY: a meta row has 64 elements; `codes` holds 8 quads; `to` by the caller's promise.
        unsafe {
            let s = load(meta.s[slot].as_ptr().add(v * 8));
            let z = _mm256_loadu_si256(meta.z[slot].as_ptr().add(v * 8).cast());
            let m = load(meta.m[slot].as_ptr().add(v * 8));
            for q in 0..8 {
                // Vector v holds rows 8v..8v+8: of int4 in one nibble, of int8 in bytes.
                let codes = codes.add(q * quad_bytes);
                let mut lanes = if w.bits == 4 {
                    let both = load_bytes(codes.add(v / 2 * 32));
                    if v % 2 == 0 { both } else { _mm256_srli_epi32::<4>(both) }
                } else {
                    load_bytes(codes.add(v * 32))
                };
                for kk in 0..4 {
                    let code = _mm256_and_si256(lanes, mask);
                    lanes = _mm256_srli_epi32::<8>(lanes);
                    let value = if w.zero == ZeroKind::Min {
                        _mm256_add_ps(_mm256_mul_ps(s, _mm256_cvtepi32_ps(code)), m)
                    } else {
                        _mm256_mul_ps(s, _mm256_cvtepi32_ps(_mm256_sub_epi32(code, z)))
                    };
                    _mm256_storeu_ps(to.add(kk * LANE + (half * 8 + q) * PANEL + v * 8), value);
                }
            }
        }
    }
}

/// `p[r][n] = fma(w[q][n], x[r][4q], p[r][n])`, `q` ascending, for `R` rows; `N` vectors at a time.
///
/// # Safety
/// `w` is `[quads][64]`; `x` has `quads` elements 4 apart in each of `R` rows, `stride` apart; rows
/// of `p` are `4 * 64` apart.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn multiply<const N: usize, const R: usize>(
    w: *const f32,
    quads: usize,
    x: *const f32,
    stride: usize,
    p: *mut f32,
) {
    for v in (0..8).step_by(N) {
        // SAFETY: the caller's promises.
        unsafe {
            let mut acc = [[_mm256_setzero_ps(); N]; R];
            for r in 0..R {
                for n in 0..N {
                    acc[r][n] = load(p.add(r * 4 * PANEL + (v + n) * 8));
                }
            }
            for q in 0..quads {
                let w: [__m256; N] = std::array::from_fn(|n| load(w.add(q * PANEL + (v + n) * 8)));
                for r in 0..R {
                    let x = _mm256_set1_ps(*x.add(r * stride + q * 4));
                    for n in 0..N {
                        acc[r][n] = _mm256_fmadd_ps(w[n], x, acc[r][n]);
                    }
                }
            }
            for r in 0..R {
                for n in 0..N {
                    _mm256_storeu_ps(p.add(r * 4 * PANEL + (v + n) * 8), acc[r][n]);
                }
            }
        }
    }
}
