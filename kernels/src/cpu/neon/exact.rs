//! Weights of codes, f32 activations: weights are dequantized exactly as `TensorView::at` says.
//!
//! A span of 64 columns is dequantized once, `[k % 4][k / 4][64 rows]` (16 KiB), and all rows sweep
//! over it. The four partial sums by `k % 4` never meet before the end, so they are four
//! independent products; they wait in memory, `[row][k % 4][64]`, between spans. A single row takes
//! e4m3 codes, which are no faster in another mode, straight from the registers they are decoded in.

use super::*;
use crate::cpu::acts::Acts;
use crate::cpu::linear::Scratch;
use quern_models::Mini;
use std::ops::Range;

/// Columns dequantized at a time.
const COLUMNS: usize = 64;
/// Elements between the weights of one `k % 4` and the next.
const LANE: usize = COLUMNS / 4 * PANEL;

/// # Safety
/// NEON exists; shapes as [`crate::cpu::linear::linear_panel`] checks them.
#[target_feature(enable = "neon,dotprod")]
pub(super) unsafe fn panel(w: &IntPanel, a: &Acts, rows: Range<usize>, tile: &mut [f32], scratch: &mut Scratch) {
    let m = rows.len();
    scratch.weights.reserve(4 * LANE);
    scratch.partial.reserve(m * 4 * PANEL);
    scratch.partial.slice_mut(m * 4 * PANEL).fill(0.0);
    let (weights, partial) = (scratch.weights.ptr(), scratch.partial.ptr());
    for k0 in (0..w.k).step_by(COLUMNS) {
        let columns = (w.k - k0).min(COLUMNS);
        let (b0, blocks) = (k0 / w.block, columns.div_ceil(w.block));
        widen(w, b0, blocks, 0, &mut scratch.meta);
        if m == 1 && w.mini == Some(Mini::E4M3) {
            // SAFETY: the row has the columns; the sums of one row were sized above.
            unsafe { one_row(w, k0, columns, &scratch.meta, a.row_ptr(rows.start).add(k0), partial) }
            continue;
        }
        for i in 0..blocks {
            // SAFETY: groups are whole multiples of blocks, so the codes of the block exist.
            unsafe { dequantize(w, b0 + i, &scratch.meta, i, weights) }
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
                        1 => multiply::<16, 1>(w, quads, x(r), a.stride(), p(r)),
                        2 => multiply::<8, 2>(w, quads, x(r), a.stride(), p(r)),
                        3 => multiply::<4, 3>(w, quads, x(r), a.stride(), p(r)),
                        4 | 5 => multiply::<4, 4>(w, quads, x(r), a.stride(), p(r)),
                        _ => multiply::<4, 6>(w, quads, x(r), a.stride(), p(r)),
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

/// Dequantizes block `b` of columns, which is block `i` of the span `to`.
///
/// # Safety
/// The codes exist, `to` has room for a span.
#[target_feature(enable = "neon,dotprod")]
unsafe fn dequantize(w: &IntPanel, b: usize, meta: &Meta, i: usize, to: *mut f32) {
    let (slot, quads) = (meta.slot[i], w.block / 4);
    let quad_bytes = w.bits as usize * 32;
    let codes = w.codes[b * quads * quad_bytes..][..quads * quad_bytes].as_ptr();
    let to = to.wrapping_add(i * quads * PANEL);
    let half = vdupq_n_f32(0.5);
    for v in 0..16 {
        let (s, z, m) = meta.at(slot, v * 4);
        // Vector v holds rows 4v..4v + 4: of 4 bits in one nibble, of 8 bits in bytes.
        let (at, high) = if w.bits == 4 { (v / 4 * 32 + v % 2 * 16, v % 4 >= 2) } else { (v * 16, false) };
        // SAFETY: a meta row has 64 elements; `codes` holds the quads; `to` by the caller's promise.
        unsafe {
            let (s, m) = (vld1q_f32(s), vld1q_f32(m));
            let z = if w.zero == ZeroKind::Code { vld1q_s32(z) } else { vdupq_n_s32(w.zero_at(0, 0)) };
            for q in 0..quads {
                let codes = vld1q_u8(codes.add(q * quad_bytes + at));
                let to = to.add(q * PANEL + v * 4);
                if w.mini == Some(Mini::E4M3) {
                    for (kk, value) in e4m3(codes).into_iter().enumerate() {
                        vst1q_f32(to.add(kk * LANE), vmulq_f32(s, value));
                    }
                    continue;
                }
                let ints = match (w.bits, high) {
                    (4, false) => vandq_u8(codes, vdupq_n_u8(15)),
                    (4, true) => vshrq_n_u8::<4>(codes),
                    _ => codes,
                };
                let ints = if w.mini.is_some() { vqtbl1q_u8(vld1q_u8(E2M1.as_ptr()), ints) } else { ints };
                for (kk, int) in columns(ints).into_iter().enumerate() {
                    let value = if w.zero == ZeroKind::Min {
                        vaddq_f32(vmulq_f32(s, vcvtq_f32_s32(int)), m)
                    } else if w.mini.is_some() {
                        vmulq_f32(s, vmulq_f32(vcvtq_f32_s32(vsubq_s32(int, z)), half))
                    } else {
                        vmulq_f32(s, vcvtq_f32_s32(vsubq_s32(int, z)))
                    };
                    vst1q_f32(to.add(kk * LANE), value);
                }
            }
        }
    }
}

/// Bytes `[4 rows][4 columns]` as numbers, by column.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn columns(bytes: uint8x16_t) -> [int32x4_t; 4] {
    let (v, low) = (vreinterpretq_u32_u8(bytes), vdupq_n_u32(255));
    [vandq_u32(v, low), vandq_u32(vshrq_n_u32::<8>(v), low), vandq_u32(vshrq_n_u32::<16>(v), low), vshrq_n_u32::<24>(v)]
        .map(|v| vreinterpretq_s32_u32(v))
}

/// Adds `columns` columns of e4m3 codes, from `k0` on, times one activation row to `p`, `[k % 4][64]`.
///
/// # Safety
/// The columns exist, those of `x` as well, at its start; `meta` is the span's; `p` has 4 * 64 elements.
#[target_feature(enable = "neon,dotprod")]
unsafe fn one_row(w: &IntPanel, k0: usize, columns: usize, meta: &Meta, x: *const f32, p: *mut f32) {
    let codes = w.codes[k0 * PANEL..][..columns.next_multiple_of(4) * PANEL].as_ptr();
    // Four vectors of 4 rows at a time: 64 bytes of a quad.
    for v in (0..16).step_by(4) {
        // SAFETY: the caller's promises; a meta row has 64 elements.
        unsafe {
            let p = |kk: usize, i: usize| p.add(kk * PANEL + (v + i) * 4);
            let mut acc = [[vdupq_n_f32(0.0); 4]; 4];
            for i in 0..4 {
                for kk in 0..4 {
                    acc[i][kk] = vld1q_f32(p(kk, i));
                }
            }
            for at in (0..columns).step_by(w.block) {
                let s = meta.at(meta.slot[at / w.block], v * 4).0;
                let s = [0, 4, 8, 12].map(|i| vld1q_f32(s.add(i)));
                let end = columns.min(at + w.block);
                let codes = |k: usize, i: usize| vld1q_u8(codes.add(k / 4 * 256 + (v + i) * 16));
                for k in (at..end / 4 * 4).step_by(4) {
                    let x = vld1q_f32(x.add(k));
                    for i in 0..4 {
                        let values = e4m3(codes(k, i)).map(|value| vmulq_f32(s[i], value));
                        acc[i][0] = vfmaq_laneq_f32::<0>(acc[i][0], values[0], x);
                        acc[i][1] = vfmaq_laneq_f32::<1>(acc[i][1], values[1], x);
                        acc[i][2] = vfmaq_laneq_f32::<2>(acc[i][2], values[2], x);
                        acc[i][3] = vfmaq_laneq_f32::<3>(acc[i][3], values[3], x);
                    }
                }
                for k in end / 4 * 4..end {
                    for i in 0..4 {
                        let value = vmulq_f32(s[i], e4m3(codes(k, i))[k % 4]);
                        acc[i][k % 4] = vfmaq_n_f32(acc[i][k % 4], value, *x.add(k));
                    }
                }
            }
            for i in 0..4 {
                for kk in 0..4 {
                    vst1q_f32(p(kk, i), acc[i][kk]);
                }
            }
        }
    }
}

/// Values of 4 rows and 4 columns of e4m3 codes, by column.
///
/// A code's bits, moved, are a half float 2^8 times too small (its exponent's bias is 15, not 7), and
/// what is subnormal in one is subnormal in the other.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn e4m3(codes: uint8x16_t) -> [float32x4_t; 4] {
    // Columns 1 and 3 of every row are upper bytes of 16-bit lanes as they lie, 0 and 2 lower ones.
    let odd = vreinterpretq_s16_u8(codes);
    let (even, odd) = (half(vshlq_n_s16::<8>(odd)), half(odd));
    let [zero, one] = halves(vuzp1q_u16(even, odd));
    let [two, three] = halves(vuzp2q_u16(even, odd));
    [zero, one, two, three].map(|v| vmulq_n_f32(v, 256.0))
}

/// Half floats, 2^8 times too small, of e4m3 codes in the upper bytes of 16-bit lanes.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn half(upper: int16x8_t) -> uint16x8_t {
    // Sign twice, 4 bits of exponent, 3 of mantissa, and what was below; the second sign and that go.
    let h = vandq_u16(vreinterpretq_u16_s16(vshrq_n_s16::<1>(upper)), vdupq_n_u16(0xbf80));
    // The code of NaN, and only it, carries into the top bit of the exponent.
    let carry = vandq_u16(vaddq_u16(h, vdupq_n_u16(0x80)), vdupq_n_u16(0x4000));
    vorrq_u16(h, carry)
}

/// `p[r][n] = fma(w[q][n], x[r][4q], p[r][n])`, `q` ascending, for `R` rows; `N` vectors at a time.
///
/// # Safety
/// `w` is `[quads][64]`; `x` has `quads` elements 4 apart in each of `R` rows, `stride` apart; rows
/// of `p` are `4 * 64` apart.
#[target_feature(enable = "neon,dotprod")]
unsafe fn multiply<const N: usize, const R: usize>(
    w: *const f32,
    quads: usize,
    x: *const f32,
    stride: usize,
    p: *mut f32,
) {
    for v in (0..16).step_by(N) {
        // SAFETY: the caller's promises.
        unsafe {
            let p = |r: usize, n: usize| p.add(r * 4 * PANEL + (v + n) * 4);
            let mut acc = [[vdupq_n_f32(0.0); N]; R];
            for r in 0..R {
                for n in 0..N {
                    acc[r][n] = vld1q_f32(p(r, n));
                }
            }
            for q in 0..quads {
                let mut wide = [vdupq_n_f32(0.0); N];
                for n in 0..N {
                    wide[n] = vld1q_f32(w.add(q * PANEL + (v + n) * 4));
                }
                for r in 0..R {
                    let x = *x.add(r * stride + q * 4);
                    for n in 0..N {
                        acc[r][n] = vfmaq_n_f32(acc[r][n], wide[n], x);
                    }
                }
            }
            for r in 0..R {
                for n in 0..N {
                    vst1q_f32(p(r, n), acc[r][n]);
                }
            }
        }
    }
}
