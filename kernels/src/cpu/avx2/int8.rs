//! int8 weights, int8 activations.
//!
//! Codes are made signed (`q - 128`, and zeros likewise), then `|w| * (a with w's sign)`: a pair of
//! products is at most 2*128*127 = 32512, which fits i16 but leaves no room to add another, so every
//! pair is widened at once. Codes are read in place for any number of rows: there is nothing to unpack.

use super::*;
use crate::cpu::acts::{Acts, Int8, MR};
use crate::cpu::linear::{SPAN, Scratch};
use std::ops::Range;

/// From this many rows on, strips of weight rows go outermost.
const SWEEP: usize = 24;

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
        match w.zero {
            ZeroKind::Mid => spans::<V, MID>(w, a, rows, tile, scratch),
            ZeroKind::Code => spans::<V, CODE>(w, a, rows, tile, scratch),
            ZeroKind::Min => spans::<V, MIN>(w, a, rows, tile, scratch),
        }
    }
}

/// # Safety
/// As [`panel`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn spans<const V: bool, const Z: u8>(
    w: &IntPanel,
    a: &Int8,
    rows: Range<usize>,
    tile: &mut [f32],
    scratch: &mut Scratch,
) {
    let block = a.block();
    tile.fill(0.0);
    middles(w, 128, &mut scratch.meta);
    for b0 in (0..a.blocks()).step_by(SPAN / block) {
        let count = (a.blocks() - b0).min(SPAN / block);
        widen(w, b0, count, 128, &mut scratch.meta);
        let codes = w.codes[b0 * block * 64..][..count * block * 64].as_ptr();
        // Few rows: one pass over the codes. Many: 16 weight rows at a time, whose 2 KiB of a span
        // stay in the L1 cache with the activations and the outputs.
        let step = if rows.len() < SWEEP { w.strips.len() } else { 1 };
        for strip in w.strips.clone().step_by(step) {
            let vectors = strip * 2..(strip + step) * 2;
            for first in rows.clone().step_by(MR) {
                let at = Span { a, first, b0, count, block, meta: &scratch.meta };
                let ahead = if first == rows.start { AHEAD } else { 0 };
                // SAFETY: `codes` are the span's; the block of rows is in `a` and in `tile`.
                unsafe {
                    let y = tile.as_mut_ptr().add((first - rows.start) * PANEL);
                    match (rows.end - first).min(MR) {
                        1 if step == 4 => at.rows::<V, Z, 8, 1>(codes, 0..8, ahead, y),
                        1 => at.rows::<V, Z, 2, 1>(codes, vectors.clone(), ahead, y),
                        2 => at.rows::<V, Z, 2, 2>(codes, vectors.clone(), ahead, y),
                        3 => at.rows::<V, Z, 2, 3>(codes, vectors.clone(), ahead, y),
                        _ => at.rows::<V, Z, 2, 4>(codes, vectors.clone(), ahead, y),
                    }
                }
            }
        }
    }
}

/// One block of activation rows against one span.
struct Span<'a> {
    a: &'a Int8,
    /// First activation row.
    first: usize,
    /// First activation block, their count and their columns.
    b0: usize,
    count: usize,
    block: usize,
    meta: &'a Meta,
}

impl Span<'_> {
    /// `R` activation rows against `vectors` of 8 weight rows, `N` at a time; adds to `y[R][64]`.
    ///
    /// # Safety
    /// The rows and blocks are in `a`, the span's codes at `w`; `y` has `R` rows.
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn rows<const V: bool, const Z: u8, const N: usize, const R: usize>(
        &self,
        w: *const u8,
        vectors: Range<usize>,
        ahead: usize,
        y: *mut f32,
    ) {
        let (a, m) = (self.a, self.a.m());
        let mut q = a.q_ptr(self.first, self.b0);
        let (mut sa, mut sums) = (a.scale_ptr(self.first, self.b0), a.sum_ptr(self.first, self.b0));
        let mut w = w;
        for slot in &self.meta.slot[..self.count] {
            for v in vectors.clone().step_by(N) {
                // SAFETY: the caller's promises; a meta row has 64 elements.
                unsafe {
                    let (w, quads) = (w.add(v * 32), self.block / 4);
                    let t =
                        if V { sums_of::<N, R>(w, q, sums, quads, ahead) } else { dots::<N, R>(w, q, quads, ahead) };
                    for n in 0..N {
                        let c = (v + n) * 8;
                        let of = Factors::wide(self.meta, *slot, c);
                        for r in 0..R {
                            let row = RowBlock { scale: *sa.add(r), sum: *sums.add(r) };
                            let (t, y) = (t[r][n], y.add(r * PANEL + c));
                            let out = if Z == MID {
                                fold::<false, Z>(t, of, row, load(y))
                            } else {
                                fold::<true, Z>(t, of, row, load(y))
                            };
                            _mm256_storeu_ps(y, out);
                        }
                    }
                }
            }
            w = w.wrapping_add(self.block * 64);
            q = q.wrapping_add(m * self.block);
            (sa, sums) = (sa.wrapping_add(m), sums.wrapping_add(m));
        }
    }
}

/// [`dots`] with AVX-VNNI.
///
/// # Safety
/// As [`dots`]; AVX-VNNI exists, `sums` has the rows.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn sums_of<const N: usize, const R: usize>(
    w: *const u8,
    a: *const i8,
    sums: *const i32,
    quads: usize,
    ahead: usize,
) -> [[__m256i; N]; R] {
    let mut total = [[_mm256_setzero_si256(); N]; R];
    for n in (0..N).step_by(2) {
        if ahead > 0 {
            (0..quads).for_each(|q| prefetch(w.wrapping_add(q * 256 + n * 32 + ahead)));
        }
        // SAFETY: the caller's promise.
        let pair = unsafe { vnni::bytes::<R>(w.wrapping_add(n * 32), a, sums, quads) };
        for r in 0..R {
            (total[r][n], total[r][n + 1]) = (pair[r][0], pair[r][1]);
        }
    }
    total
}

/// `sum((q - 128) * a)` over one activation block of `quads` quads: `[row][vector]`, 8 outputs each.
///
/// # Safety
/// `w` and `a` are readable for the block.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dots<const N: usize, const R: usize>(
    w: *const u8,
    a: *const i8,
    quads: usize,
    ahead: usize,
) -> [[__m256i; N]; R] {
    let (ones, middle) = (_mm256_set1_epi16(1), _mm256_set1_epi8(-128));
    let mut total = [[_mm256_setzero_si256(); N]; R];
    for q in 0..quads {
        // SAFETY: the caller's promise: quad `q` is in the block.
        unsafe {
            let (w, a) = (w.add(q * 256), a.add(q * 4 * R));
            for n in 0..N {
                if ahead > 0 && n % 2 == 0 {
                    prefetch(w.wrapping_add(ahead + n * 32));
                }
                let v = _mm256_xor_si256(load_bytes(w.add(n * 32)), middle);
                let size = _mm256_abs_epi8(v);
                for r in 0..R {
                    let pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(quad(a.add(r * 4)), v));
                    total[r][n] = _mm256_add_epi32(total[r][n], _mm256_madd_epi16(pairs, ones));
                }
            }
        }
    }
    total
}
