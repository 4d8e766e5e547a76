//! int4 and e2m1 weights, int8 activations.
//!
//! Straight from the nibbles, 128 columns (a span) at a time, prefetched. Unpacking a span to bytes first was measured
//! 10 to 20 % slower from 4 to 256 rows: its stores cost more than three operations a quad for every four rows. Only
//! e2m1 codes, which are looked up, are unpacked for many rows.
//! A pair of products fits i16 (2*15*127 = 3810) and so do 8 such sums (30480), hence a widening
//! add once a block. The integers of e2m1 reach 28: their sums fit with 16 subtracted (24384), which
//! is what they end at whatever happens on the way.

use super::*;
use crate::cpu::acts::{Acts, Int8, MR};
use crate::cpu::linear::{SPAN, Scratch};
use std::arch::asm;
use std::ops::Range;

/// From this many rows on, unpacking a span of e2m1 codes pays.
const SWEEP: usize = 24;

/// Bytes of an unpacked span of 16 rows.
const STRIP: usize = 16 * SPAN;

/// `V`: with AVX-VNNI.
///
/// # Safety
/// AVX2, FMA, F16C exist, and AVX-VNNI with `V`; shapes as [`crate::cpu::linear::linear_panel`] checks them.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn panel<const V: bool>(
    w: &IntPanel,
    a: &Acts,
    rows: Range<usize>,
    tile: &mut [f32],
    scratch: &mut Scratch,
) {
    let a = a.int8(w.block);
    // SAFETY: the caller's promises.
    unsafe {
        match (w.zero, w.block) {
            (ZeroKind::Mid, 32) if w.mini.is_some() => spans::<false, FP4, 8>(w, a, rows, tile, scratch),
            (ZeroKind::Mid, _) if w.mini.is_some() => spans::<false, FP4, 4>(w, a, rows, tile, scratch),
            (ZeroKind::Mid, 32) => spans::<V, MID, 8>(w, a, rows, tile, scratch),
            (ZeroKind::Mid, _) => spans::<V, MID, 4>(w, a, rows, tile, scratch),
            (ZeroKind::Code, 32) => spans::<V, CODE, 8>(w, a, rows, tile, scratch),
            (ZeroKind::Code, _) => spans::<V, CODE, 4>(w, a, rows, tile, scratch),
            (ZeroKind::Min, 32) => spans::<V, MIN, 8>(w, a, rows, tile, scratch),
            (ZeroKind::Min, _) => spans::<V, MIN, 4>(w, a, rows, tile, scratch),
        }
    }
}

/// `QUADS` of 4 columns make an activation block.
///
/// # Safety
/// As [`panel`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn spans<const V: bool, const Z: u8, const QUADS: usize>(
    w: &IntPanel,
    a: &Int8,
    rows: Range<usize>,
    tile: &mut [f32],
    scratch: &mut Scratch,
) {
    let block = QUADS * 4;
    let sweep = Z == FP4 && rows.len() >= SWEEP;
    let in_place = rows.len() <= SCALES_AT_MOST && w.scale == FloatType::F16 && w.supers.is_empty() && w.mini.is_none();
    scratch.bytes.reserve(4 * STRIP);
    tile.fill(0.0);
    middles(w, 0, &mut scratch.meta);
    for b0 in (0..a.blocks()).step_by(SPAN / block) {
        let count = (a.blocks() - b0).min(SPAN / block);
        slots(w, b0, count, 0, !in_place, &mut scratch.meta);
        let codes = w.codes[b0 * block * 32..][..count * block * 32].as_ptr();
        let bytes = scratch.bytes.ptr();
        // SAFETY: `codes` are the span's, `bytes` has room for one; every block of rows below is in
        // `a` and in `tile`, because `rows` is.
        unsafe {
            if sweep {
                unpack::<Z>(codes, count * QUADS, bytes);
            }
            let strips = w.strips.len();
            let last = match rows.len() % MR {
                1 if strips == 4 => 1,
                2 => strips.div_ceil(2),
                0 => 0,
                _ => strips,
            };
            let passes = rows.len() / MR * strips + last;
            let lines = count * QUADS * 2;
            let mut ahead = Ahead::new(codes, lines, passes * count);
            if sweep {
                for strip in w.strips.clone() {
                    for first in rows.clone().step_by(MR) {
                        let y = tile.as_mut_ptr().add((first - rows.start) * PANEL);
                        let at = Span { w, a, first, b0, count, in_place, meta: &scratch.meta };
                        let bytes = bytes.add(strip * STRIP);
                        match (rows.end - first).min(MR) {
                            1 => at.rows::<V, Z, QUADS, false, 1, 1>(bytes, strip, &mut ahead, y),
                            2 => at.rows::<V, Z, QUADS, false, 1, 2>(bytes, strip, &mut ahead, y),
                            3 => at.rows::<V, Z, QUADS, false, 1, 3>(bytes, strip, &mut ahead, y),
                            _ => at.rows::<V, Z, QUADS, false, 1, 4>(bytes, strip, &mut ahead, y),
                        }
                    }
                }
                continue;
            }
            for first in rows.clone().step_by(MR) {
                let y = tile.as_mut_ptr().add((first - rows.start) * PANEL);
                let at = Span { w, a, first, b0, count, in_place, meta: &scratch.meta };
                let mb = (rows.end - first).min(MR);
                if mb == 1 && w.strips == (0..4) {
                    at.rows::<V, Z, QUADS, true, 4, 1>(codes, 0, &mut ahead, y);
                    continue;
                }
                let mut strip = w.strips.start;
                while strip < w.strips.end {
                    let codes = codes.add(strip * 32);
                    if mb == 2 && strip.is_multiple_of(2) && strip + 1 < w.strips.end {
                        at.rows::<V, Z, QUADS, true, 2, 2>(codes, strip, &mut ahead, y);
                        strip += 2;
                        continue;
                    }
                    match mb {
                        1 => at.rows::<V, Z, QUADS, true, 1, 1>(codes, strip, &mut ahead, y),
                        2 => at.rows::<V, Z, QUADS, true, 1, 2>(codes, strip, &mut ahead, y),
                        3 => at.rows::<V, Z, QUADS, true, 1, 3>(codes, strip, &mut ahead, y),
                        _ => at.rows::<V, Z, QUADS, true, 1, 4>(codes, strip, &mut ahead, y),
                    }
                    strip += 1;
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
    w: &'a IntPanel<'a>,
    a: &'a Int8,
    /// First activation row.
    first: usize,
    /// First activation block and their count.
    b0: usize,
    count: usize,
    /// Scales and minima are read in place, as f16.
    in_place: bool,
    meta: &'a Meta,
}

impl Span<'_> {
    /// `R` activation rows against `N` strips of 16 weight rows from `strip` on; adds to `y[R][64]`.
    /// `PACKED`: `w` are quads of nibbles, 128 bytes apart, else of unpacked bytes, 64 apart (`N` = 1).
    /// `N * R` is at most 4.
    ///
    /// # Safety
    /// The rows and blocks are in `a`, the span's weights at `w`; `y` has `R` rows.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn rows<
        const V: bool,
        const Z: u8,
        const QUADS: usize,
        const PACKED: bool,
        const N: usize,
        const R: usize,
    >(
        &self,
        w: *const u8,
        strip: usize,
        ahead: &mut Ahead,
        y: *mut f32,
    ) {
        let quad_bytes = if PACKED { 128 } else { 64 };
        let (a, m) = (self.a, self.a.m());
        let mut q = a.q_ptr(self.first, self.b0);
        let mut middles = a.middle_ptr(self.first, self.b0);
        let (mut sa, mut sums) = (a.scale_ptr(self.first, self.b0), a.sum_ptr(self.first, self.b0));
        let (mut w, mut held) = (w, [[_mm256_setzero_ps(); 2]; 4]);
        // SAFETY: the caller's promise.
        unsafe { exchange::<N, R, false>(y, strip, &mut held) };
        for (i, slot) in self.meta.slot[..self.count].iter().enumerate() {
            // SAFETY: the caller's promises; a meta row has 64 elements, `strip + N <= 4`; `in_place` says what
            // `Factors::halves` needs.
            unsafe {
                if PACKED {
                    ahead.ask();
                }
                let t = if V {
                    vnni::nibbles::<Z, QUADS, N, R>(w, q, sums)
                } else {
                    dots::<Z, QUADS, PACKED, N, R>(w, q, middles)
                };
                for n in 0..N {
                    for h in 0..2 {
                        let c = (strip + n) * 16 + h * 8;
                        let of = if R <= SCALES_AT_MOST && self.in_place {
                            let g = (self.b0 + i) * QUADS * 4 / self.w.group;
                            Factors::halves::<Z>(self.w, g, self.meta, *slot, c)
                        } else {
                            Factors::wide(self.meta, *slot, c)
                        };
                        for r in 0..R {
                            let row = RowBlock { scale: *sa.add(r), sum: *sums.add(r) };
                            let (t, y) = (t[n * R + r][h], &mut held[n * R + r][h]);
                            *y = if Z == CODE {
                                fold::<true, Z>(t, of, row, *y)
                            } else {
                                fold::<false, Z>(t, of, row, *y)
                            };
                        }
                    }
                }
            }
            w = w.wrapping_add(QUADS * quad_bytes);
            q = q.wrapping_add(m * QUADS * 4);
            middles = middles.wrapping_add(m);
            (sa, sums) = (sa.wrapping_add(m), sums.wrapping_add(m));
        }
        // SAFETY: the caller's promise.
        unsafe { exchange::<N, R, true>(y, strip, &mut held) };
    }
}

/// `sum(u * a)` over one activation block: `[strip * R + row][low or high 8 rows]`, 8 outputs each.
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
) -> [[__m256i; 2]; 4] {
    let mut acc = [[_mm256_setzero_si256(); 2]; 4];
    // SAFETY: the caller's promises.
    unsafe {
        for r in 0..R {
            let eight = _mm256_set1_epi32(*middles.add(r));
            let start = match Z {
                MID => eight,
                FP4 => _mm256_add_epi16(eight, eight),
                _ => _mm256_setzero_si256(),
            };
            for n in 0..N {
                acc[n * R + r] = [start; 2];
            }
        }
        match (PACKED, N) {
            (true, _) if Z == FP4 => looked_up::<QUADS, N, R>(w, a, &mut acc),
            (true, 4) => dots::panel::<QUADS>(w, a, &mut acc),
            (true, 2) => dots::pair::<QUADS>(w, a, &mut acc),
            _ => dots::strip::<QUADS, PACKED, R>(w, a, &mut acc),
        }
    }
    for n in 0..N * R {
        for h in 0..2 {
            acc[n][h] = _mm256_madd_epi16(acc[n][h], _mm256_set1_epi16(1));
        }
    }
    acc
}

/// The sums of [`dots`] for packed e2m1 codes.
///
/// # Safety
/// As [`dots`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn looked_up<const QUADS: usize, const N: usize, const R: usize>(
    w: *const u8,
    a: *const i8,
    acc: &mut [[__m256i; 2]; 4],
) {
    for q in 0..QUADS {
        for n in 0..N {
            // SAFETY: the caller's promise: quad `q` is in the block.
            unsafe {
                let [lo, hi] = nibbles::<FP4>(load_bytes(w.add(q * 128 + n * 32)));
                for r in 0..R {
                    let a = quad(a.add((q * R + r) * 4));
                    mac(&mut acc[n * R + r][0], lo, a);
                    mac(&mut acc[n * R + r][1], hi, a);
                }
            }
        }
    }
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
