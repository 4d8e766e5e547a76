//! Weights of codes, f32 activations: weights are dequantized exactly as `TensorView::at` says.
//!
//! A span of 64 columns is dequantized once, `[k % 4][k / 4][64 rows]` (16 KiB), and all rows sweep
//! over it. The four partial sums by `k % 4` never meet before the end, so they are four
//! independent products; they wait in memory, `[row][k % 4][64]`, between spans. A single row takes
//! e4m3 codes, which are no faster in another mode, straight from the registers they are decoded in.

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
    middles(w, 0, &mut scratch.meta);
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

/// Dequantizes block `b` of columns, which is block `i` of the span `to`.
///
/// # Safety
/// The codes exist, `to` has room for a span.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dequantize(w: &IntPanel, b: usize, meta: &Meta, i: usize, to: *mut f32) {
    let (slot, quads) = (meta.slot[i], w.block / 4);
    let quad_bytes = w.bits as usize * 32;
    let codes = w.codes[b * quads * quad_bytes..][..quads * quad_bytes].as_ptr();
    let to = to.wrapping_add(i * quads * PANEL);
    for v in 0..8 {
        // SAFETY: a meta row has 64 elements; `codes` holds the quads; `to` by the caller's promise.
        unsafe {
            let s = load(meta.s[slot].as_ptr().add(v * 8));
            let z = _mm256_loadu_si256(meta.z[slot].as_ptr().add(v * 8).cast());
            let m = load(meta.m[slot].as_ptr().add(v * 8));
            for q in 0..quads {
                // Vector v holds rows 8v..8v+8: of 4 bits in one nibble, of 8 bits in bytes.
                let codes = codes.add(q * quad_bytes);
                let to = to.add(q * PANEL + v * 8);
                if w.mini == Some(Mini::E4M3) {
                    let values = e4m3(load_bytes(codes.add(v * 32)));
                    for kk in 0..4 {
                        _mm256_storeu_ps(to.add(kk * LANE), _mm256_mul_ps(s, values[kk]));
                    }
                    continue;
                }
                let mut lanes = if w.bits == 4 {
                    let both = load_bytes(codes.add(v / 2 * 32));
                    let one = if v % 2 == 0 { both } else { _mm256_srli_epi32::<4>(both) };
                    let one = _mm256_and_si256(one, _mm256_set1_epi8(15));
                    if w.mini.is_some() { e2m1(one) } else { one }
                } else {
                    load_bytes(codes.add(v * 32))
                };
                for kk in 0..4 {
                    let code = _mm256_and_si256(lanes, _mm256_set1_epi32(255));
                    lanes = _mm256_srli_epi32::<8>(lanes);
                    let value = if w.zero == ZeroKind::Min {
                        _mm256_add_ps(_mm256_mul_ps(s, _mm256_cvtepi32_ps(code)), m)
                    } else if w.mini.is_some() {
                        let twice = _mm256_cvtepi32_ps(_mm256_sub_epi32(code, z));
                        _mm256_mul_ps(s, _mm256_mul_ps(twice, _mm256_set1_ps(0.5)))
                    } else {
                        _mm256_mul_ps(s, _mm256_cvtepi32_ps(_mm256_sub_epi32(code, z)))
                    };
                    _mm256_storeu_ps(to.add(kk * LANE), value);
                }
            }
        }
    }
}

/// Adds `columns` columns of e4m3 codes, from `k0` on, times one activation row to `p`, `[k % 4][64]`.
///
/// # Safety
/// The columns exist, those of `x` as well, at its start; `meta` is the span's; `p` has 4 * 64 elements.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn one_row(w: &IntPanel, k0: usize, columns: usize, meta: &Meta, x: *const f32, p: *mut f32) {
    let codes = w.codes[k0 * PANEL..][..columns.next_multiple_of(4) * PANEL].as_ptr();
    for v in 0..8 {
        // SAFETY: the caller's promises; a meta row has 64 elements.
        unsafe {
            let mut acc = [_mm256_setzero_ps(); 4];
            for kk in 0..4 {
                acc[kk] = load(p.add(kk * PANEL + v * 8));
            }
            for at in (0..columns).step_by(w.block) {
                let s = load(meta.s[meta.slot[at / w.block]].as_ptr().add(v * 8));
                let end = columns.min(at + w.block);
                for k in (at..end / 4 * 4).step_by(4) {
                    let codes = codes.add(k * PANEL + v * 32);
                    if v % 2 == 0 {
                        prefetch(codes.wrapping_add(AHEAD));
                    }
                    let values = e4m3(load_bytes(codes));
                    for kk in 0..4 {
                        acc[kk] =
                            _mm256_fmadd_ps(_mm256_mul_ps(s, values[kk]), _mm256_set1_ps(*x.add(k + kk)), acc[kk]);
                    }
                }
                for k in end / 4 * 4..end {
                    let values = e4m3(load_bytes(codes.add(k / 4 * 256 + v * 32)));
                    let (w, x) = (_mm256_mul_ps(s, values[k % 4]), _mm256_set1_ps(*x.add(k)));
                    acc[k % 4] = _mm256_fmadd_ps(w, x, acc[k % 4]);
                }
            }
            for kk in 0..4 {
                _mm256_storeu_ps(p.add(kk * PANEL + v * 8), acc[kk]);
            }
        }
    }
}

/// Values of 8 rows and 4 columns of e4m3 codes, by column.
///
/// A code's bits, moved, are a float once its exponent's bias is raised from 7 to 127; except where
/// there is no exponent (zero and subnormals, which weights hardly ever are) and for NaN.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn e4m3(codes: __m256i) -> [__m256; 4] {
    // Magnitudes 0..8 and 127 are those whose successor, in 7 bits, is below 9.
    let next = _mm256_and_si256(_mm256_add_epi8(codes, _mm256_set1_epi8(1)), _mm256_set1_epi8(127));
    if _mm256_movemask_epi8(_mm256_cmpgt_epi8(_mm256_set1_epi8(9), next)) != 0 {
        return any_e4m3(codes);
    }
    [
        normal(_mm256_slli_epi32::<24>(codes)),
        normal(_mm256_slli_epi32::<16>(codes)),
        normal(_mm256_slli_epi32::<8>(codes)),
        normal(codes),
    ]
}

/// Values of e4m3 codes in the uppermost bytes of 32-bit lanes, which have an exponent and are not NaN.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn normal(upper: __m256i) -> __m256 {
    let bits = _mm256_and_si256(_mm256_srai_epi32::<4>(upper), _mm256_set1_epi32(0x87f0_0000_u32 as i32));
    _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32((127 - 7) << 23)))
}

/// Values of any e4m3 codes, by column.
///
/// A code's bits, moved, are a half float 2^8 times too small (its exponent's bias is 15, not 7), and
/// what is subnormal in one is subnormal in the other: the conversion takes either without a penalty.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
fn any_e4m3(codes: __m256i) -> [__m256; 4] {
    // Bytes [row][column] become [column][row], columns 0 and 1 in the lower 128-bit lane.
    let by_column = _mm256_setr_epi8(
        0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,
    );
    let join = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    let codes = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(codes, by_column), join);
    let zero = _mm256_setzero_si256();
    let (even, odd) = (half(_mm256_unpacklo_epi8(zero, codes)), half(_mm256_unpackhi_epi8(zero, codes)));
    [
        value(_mm256_castsi256_si128(even)),
        value(_mm256_castsi256_si128(odd)),
        value(_mm256_extracti128_si256::<1>(even)),
        value(_mm256_extracti128_si256::<1>(odd)),
    ]
}

/// Half floats, 2^8 times too small, of e4m3 codes in the upper bytes of 16-bit lanes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn half(upper: __m256i) -> __m256i {
    // Sign twice, 4 bits of exponent, 3 of mantissa, zeros; then the second sign goes.
    let h = _mm256_and_si256(_mm256_srai_epi16::<1>(upper), _mm256_set1_epi16(!0x4000));
    // The code of NaN, and only it, carries into the top bit of the exponent.
    let carry = _mm256_and_si256(_mm256_add_epi16(h, _mm256_set1_epi16(0x80)), _mm256_set1_epi16(0x4000));
    _mm256_or_si256(h, carry)
}

/// Such half floats at their size.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn value(half: __m128i) -> __m256 {
    _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0))
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
