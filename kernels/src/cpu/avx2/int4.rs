//! int4 and e2m1 weights, int8 activations.
//!
//! Few rows: straight from the nibbles, one pass over the codes, prefetched. Many rows: a span of
//! 128 columns is unpacked to bytes once (8 KiB, in L1) and all rows sweep over it.
//! A pair of products fits i16 (2*15*127 = 3810) and so do 8 such sums (30480), hence a widening
//! add once a block. The integers of e2m1 reach 28: their sums fit with 16 subtracted (24384), which
//! is what they end at whatever happens on the way.

use super::*;
use crate::cpu::acts::{Acts, Int8, MR};
use crate::cpu::linear::{SPAN, Scratch};
use std::arch::asm;
use std::ops::Range;

/// From this many rows on, unpacking a span pays.
const SWEEP: usize = 24;

/// Bytes of an unpacked span of 16 rows.
const STRIP: usize = 16 * SPAN;

/// # Safety
/// AVX2, FMA, F16C exist; shapes as [`crate::cpu::linear::linear_panel`] checks them.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn panel(w: &IntPanel, a: &Acts, rows: Range<usize>, tile: &mut [f32], scratch: &mut Scratch) {
    let a = a.int8(w.block);
    // SAFETY: the caller's promises.
    unsafe {
        match (w.zero, w.block) {
            (ZeroKind::Mid, 32) if w.mini.is_some() => spans::<FP4, 8>(w, a, rows, tile, scratch),
            (ZeroKind::Mid, _) if w.mini.is_some() => spans::<FP4, 4>(w, a, rows, tile, scratch),
            (ZeroKind::Mid, 32) => spans::<MID, 8>(w, a, rows, tile, scratch),
            (ZeroKind::Mid, _) => spans::<MID, 4>(w, a, rows, tile, scratch),
            (ZeroKind::Code, 32) => spans::<CODE, 8>(w, a, rows, tile, scratch),
            (ZeroKind::Code, _) => spans::<CODE, 4>(w, a, rows, tile, scratch),
            (ZeroKind::Min, 32) => spans::<MIN, 8>(w, a, rows, tile, scratch),
            (ZeroKind::Min, _) => spans::<MIN, 4>(w, a, rows, tile, scratch),
        }
    }
}

/// `QUADS` of 4 columns make an activation block.
///
/// # Safety
/// As [`panel`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn spans<const Z: u8, const QUADS: usize>(
    w: &IntPanel,
    a: &Int8,
    rows: Range<usize>,
    tile: &mut [f32],
    scratch: &mut Scratch,
) {
    let block = QUADS * 4;
    let sweep = rows.len() >= SWEEP;
    scratch.bytes.reserve(4 * STRIP);
    tile.fill(0.0);
    middles(w, 0, &mut scratch.meta);
    for b0 in (0..a.blocks()).step_by(SPAN / block) {
        let count = (a.blocks() - b0).min(SPAN / block);
        widen(w, b0, count, 0, &mut scratch.meta);
        let codes = w.codes[b0 * block * 32..][..count * block * 32].as_ptr();
        let bytes = scratch.bytes.ptr();
        // SAFETY: `codes` are the span's, `bytes` has room for one; every block of rows below is in
        // `a` and in `tile`, because `rows` is.
        unsafe {
            if sweep {
                unpack::<Z>(codes, count * QUADS, bytes);
            }
            let strips = if sweep { 4 } else { 1 };
            for strip in 0..strips {
                for first in rows.clone().step_by(MR) {
                    let y = tile.as_mut_ptr().add((first - rows.start) * PANEL);
                    let ahead = if first == rows.start { AHEAD } else { 0 };
                    let at = Span { a, first, b0, count, meta: &scratch.meta };
                    let mb = (rows.end - first).min(MR);
                    if sweep {
                        let w = bytes.add(strip * STRIP);
                        match mb {
                            1 => at.rows::<Z, QUADS, false, 1, 1>(w, strip, 0, y),
                            2 => at.rows::<Z, QUADS, false, 1, 2>(w, strip, 0, y),
                            3 => at.rows::<Z, QUADS, false, 1, 3>(w, strip, 0, y),
                            _ => at.rows::<Z, QUADS, false, 1, 4>(w, strip, 0, y),
                        }
                        continue;
                    }
                    match mb {
                        1 => at.rows::<Z, QUADS, true, 4, 1>(codes, 0, ahead, y),
                        2 => {
                            for strip in [0, 2] {
                                at.rows::<Z, QUADS, true, 2, 2>(codes.add(strip * 32), strip, ahead, y);
                            }
                        }
                        3 => {
                            for strip in 0..4 {
                                at.rows::<Z, QUADS, true, 1, 3>(codes.add(strip * 32), strip, ahead, y);
                            }
                        }
                        _ => {
                            for strip in 0..4 {
                                at.rows::<Z, QUADS, true, 1, 4>(codes.add(strip * 32), strip, ahead, y);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Unpacks `quads` quads of codes into four strips `[quad][16 rows][4]` of integers in bytes.
///
/// # Safety
/// `from` is readable for the quads, `to` writable for four strips.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack<const Z: u8>(from: *const u8, quads: usize, to: *mut u8) {
    for q in 0..quads {
        // SAFETY: the caller's promises; `q` is below the 32 quads of a span.
        unsafe {
            let from = from.add(q * 128);
            prefetch(from.wrapping_add(AHEAD));
            prefetch(from.wrapping_add(AHEAD + 64));
            for strip in 0..4 {
                let [low, high] = nibbles::<Z>(load_bytes(from.add(strip * 32)));
                let to = to.add(strip * STRIP + q * 64);
                _mm256_storeu_si256(to.cast(), low);
                _mm256_storeu_si256(to.add(32).cast(), high);
            }
        }
    }
}

/// Integers of the low nibbles and of the high ones.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn nibbles<const Z: u8>(v: __m256i) -> [__m256i; 2] {
    let mask = _mm256_set1_epi8(15);
    let codes = [_mm256_and_si256(v, mask), _mm256_and_si256(_mm256_srli_epi16::<4>(v), mask)];
    if Z == FP4 { [e2m1(codes[0]), e2m1(codes[1])] } else { codes }
}

/// One block of activation rows against one span.
struct Span<'a> {
    a: &'a Int8,
    /// First activation row.
    first: usize,
    /// First activation block and their count.
    b0: usize,
    count: usize,
    meta: &'a Meta,
}

impl Span<'_> {
    /// `R` activation rows against `N` strips of 16 weight rows from `strip` on; adds to `y[R][64]`.
    /// `PACKED`: `w` are quads of nibbles, 128 bytes apart, else of unpacked bytes, 64 apart (`N` = 1).
    ///
    /// # Safety
    /// The rows and blocks are in `a`, the span's weights at `w`; `y` has `R` rows.
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn rows<const Z: u8, const QUADS: usize, const PACKED: bool, const N: usize, const R: usize>(
        &self,
        w: *const u8,
        strip: usize,
        ahead: usize,
        y: *mut f32,
    ) {
        let quad_bytes = if PACKED { 128 } else { 64 };
        let (a, m) = (self.a, self.a.m());
        let mut q = a.q_ptr(self.first, self.b0);
        let mut middles = a.middle_ptr(self.first, self.b0);
        let (mut sa, mut sums) = (a.scale_ptr(self.first, self.b0), a.sum_ptr(self.first, self.b0));
        let mut w = w;
        for slot in &self.meta.slot[..self.count] {
            // SAFETY: the caller's promises; a meta row has 64 elements, `strip + N <= 4`.
            unsafe {
                let t = dots::<Z, QUADS, PACKED, N, R>(w, q, middles, ahead);
                for n in 0..N {
                    for h in 0..2 {
                        let c = (strip + n) * 16 + h * 8;
                        let (s, z, m) = self.meta.at(*slot, c);
                        for r in 0..R {
                            let row = RowBlock { scale: *sa.add(r), sum: *sums.add(r) };
                            let (t, y) = (t[r][n][h], y.add(r * PANEL + c));
                            if Z == CODE {
                                fold::<true, Z>(t, s, z, m, row, y);
                            } else {
                                fold::<false, Z>(t, s, z, m, row, y);
                            }
                        }
                    }
                }
            }
            w = w.wrapping_add(QUADS * quad_bytes);
            q = q.wrapping_add(m * QUADS * 4);
            middles = middles.wrapping_add(m);
            (sa, sums) = (sa.wrapping_add(m), sums.wrapping_add(m));
        }
    }
}

/// `sum(u * a)` over one activation block: `[row][strip][low or high 8 rows]`, 8 outputs each.
/// With `Z` = MID, `sum((u - 8) * a)`: the 16-bit sums start at `middles`, and end within +-16256
/// however they wrap on the way. With FP4, likewise, `sum((u - 16) * a)`.
///
/// # Safety
/// `w`, `a` and `middles` are readable for the block.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dots<const Z: u8, const QUADS: usize, const PACKED: bool, const N: usize, const R: usize>(
    w: *const u8,
    a: *const i8,
    middles: *const i32,
    ahead: usize,
) -> [[[__m256i; 2]; N]; R] {
    let mut acc = [[[_mm256_setzero_si256(); 2]; N]; R];
    for q in 0..QUADS {
        // SAFETY: the caller's promise: quad `q` is in the block.
        unsafe {
            let w = w.add(q * if PACKED { 128 } else { 64 });
            let a = a.add(q * 4 * R);
            for n in 0..N {
                let [lo, hi] = if PACKED {
                    if ahead > 0 && n % 2 == 0 {
                        prefetch(w.wrapping_add(ahead + n * 32));
                    }
                    nibbles::<Z>(load_bytes(w.add(n * 32)))
                } else {
                    [load_bytes(w), load_bytes(w.add(32))]
                };
                for r in 0..R {
                    let a = quad(a.add(r * 4));
                    if q == 0 && (Z == MID || Z == FP4) {
                        let eight = _mm256_set1_epi32(*middles.add(r));
                        let start = if Z == MID { eight } else { _mm256_add_epi16(eight, eight) };
                        acc[r][n] = [start; 2];
                    }
                    if q == 0 && (Z == CODE || Z == MIN) {
                        acc[r][n] = [_mm256_maddubs_epi16(lo, a), _mm256_maddubs_epi16(hi, a)];
                    } else {
                        mac(&mut acc[r][n][0], lo, a);
                        mac(&mut acc[r][n][1], hi, a);
                    }
                }
            }
        }
    }
    for r in 0..R {
        for n in 0..N {
            for h in 0..2 {
                acc[r][n][h] = _mm256_madd_epi16(acc[r][n][h], _mm256_set1_epi16(1));
            }
        }
    }
    acc
}

/// `acc += maddubs(w, a)` on i16. As assembly, because LLVM otherwise reassociates the additions
/// into trees, hoists the products and spills them inside the loop (seen in the disassembly).
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn mac(acc: &mut __m256i, w: __m256i, a: __m256i) {
    // SAFETY: two register-only instructions of AVX2.
    unsafe {
        asm!(
            "vpmaddubsw {t}, {w}, {a}",
            "vpaddw {acc}, {acc}, {t}",
            t = out(ymm_reg) _, acc = inout(ymm_reg) *acc, w = in(ymm_reg) w, a = in(ymm_reg) a,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
}
