//! Weights of small integers, int8 activations, by `sdot`.
//!
//! Few rows: straight from the codes, one pass over them. Many rows: a span of 128 columns is
//! unpacked to signed bytes once (8 KiB, in L1) and all rows sweep over it. Codes of 8 bits are made
//! signed (`u - 128`, and zeros likewise).

use super::*;
use crate::cpu::acts::{Acts, MR};
use crate::cpu::linear::Scratch;
use std::ops::Range;

/// # Safety
/// NEON and dot products exist; shapes as [`crate::cpu::linear::linear_panel`] checks them.
#[target_feature(enable = "neon,dotprod")]
pub(super) unsafe fn panel<const BITS: usize>(
    w: &IntPanel,
    a: &Acts,
    rows: Range<usize>,
    tile: &mut [f32],
    scratch: &mut Scratch,
) {
    let a = a.int8(w.block);
    // SAFETY: the caller's promises.
    unsafe {
        match (BITS, w.mini.is_some(), w.block) {
            (4, false, 32) => spans::<INT4, 8>(w, a, rows, tile, scratch),
            (4, false, _) => spans::<INT4, 4>(w, a, rows, tile, scratch),
            (4, true, 32) => spans::<FP4, 8>(w, a, rows, tile, scratch),
            (4, true, _) => spans::<FP4, 4>(w, a, rows, tile, scratch),
            (_, _, 32) => spans::<INT8, 8>(w, a, rows, tile, scratch),
            (_, _, _) => spans::<INT8, 4>(w, a, rows, tile, scratch),
        }
    }
}

/// `QUADS` of 4 columns make an activation block.
///
/// # Safety
/// As [`panel`].
#[target_feature(enable = "neon,dotprod")]
unsafe fn spans<const SOURCE: u8, const QUADS: usize>(
    w: &IntPanel,
    a: &Int8,
    rows: Range<usize>,
    tile: &mut [f32],
    scratch: &mut Scratch,
) {
    let block = QUADS * 4;
    let bias = if SOURCE == INT8 { 128 } else { 0 };
    let sweep = rows.len() >= SWEEP;
    scratch.bytes.reserve(4 * STRIP);
    tile.fill(0.0);
    let zeros = Zeros::of(w, bias);
    let bytes = scratch.bytes.ptr();
    for b0 in (0..a.blocks()).step_by(SPAN / block) {
        let count = (a.blocks() - b0).min(SPAN / block);
        widen(w, b0, count, bias, &mut scratch.meta);
        let quads = quad_bytes(SOURCE);
        let codes = w.codes[b0 * QUADS * quads..][..count * QUADS * quads].as_ptr();
        if sweep {
            // SAFETY: `codes` are the span's, `bytes` has room for one.
            unsafe { unpack::<SOURCE>(codes, count * QUADS, bytes) }
        }
        for strip in 0..if sweep { 4 } else { 1 } {
            for first in rows.clone().step_by(MR) {
                let at = Span { a, first, b0, count, meta: &scratch.meta, zeros };
                // SAFETY: every block of rows is in `a` and in `tile`, because `rows` is; the weights
                // are the span's.
                unsafe {
                    let y = tile.as_mut_ptr().add((first - rows.start) * PANEL);
                    let unpacked = bytes.add(strip * STRIP);
                    match ((rows.end - first).min(MR), sweep) {
                        (1, true) => at.dots::<PLAIN, QUADS, 1, 1>(unpacked, strip, y),
                        (2, true) => at.dots::<PLAIN, QUADS, 1, 2>(unpacked, strip, y),
                        (3, true) => at.dots::<PLAIN, QUADS, 1, 3>(unpacked, strip, y),
                        (_, true) => at.dots::<PLAIN, QUADS, 1, 4>(unpacked, strip, y),
                        (1, false) => at.dots::<SOURCE, QUADS, 4, 1>(codes, 0, y),
                        (2, false) => {
                            at.dots::<SOURCE, QUADS, 2, 2>(codes, 0, y);
                            at.dots::<SOURCE, QUADS, 2, 2>(codes, 2, y);
                        }
                        (3, false) => (0..4).for_each(|strip| at.dots::<SOURCE, QUADS, 1, 3>(codes, strip, y)),
                        (_, false) => (0..4).for_each(|strip| at.dots::<SOURCE, QUADS, 1, 4>(codes, strip, y)),
                    }
                }
            }
        }
    }
}

/// Unpacks `quads` quads of codes into four strips `[quad][16 rows][4]` of signed bytes.
///
/// # Safety
/// `from` is readable for the quads, `to` writable for four strips.
#[target_feature(enable = "neon,dotprod")]
unsafe fn unpack<const SOURCE: u8>(from: *const u8, quads: usize, to: *mut u8) {
    for q in 0..quads {
        for strip in 0..4 {
            // SAFETY: the caller's promises; `q` is below the 32 quads of a span.
            unsafe {
                let from = from.add(q * quad_bytes(SOURCE) + strip * strip_bytes(SOURCE));
                let to = to.add(strip * STRIP + q * 64);
                for (v, w) in weights::<SOURCE>(from).into_iter().enumerate() {
                    vst1q_s8(to.add(v * 16).cast(), w);
                }
            }
        }
    }
}

/// Integers of 16 rows and 4 columns as signed bytes: four vectors of 4 rows, in row order.
///
/// # Safety
/// A strip of a quad is readable at `w`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn weights<const SOURCE: u8>(w: *const u8) -> [int8x16_t; 4] {
    // SAFETY: the caller's promise: two vectors of nibbles, or four of bytes.
    let load = |i: usize| unsafe { vld1q_u8(w.add(i * 16)) };
    let vectors = match SOURCE {
        INT4 | FP4 => nibbles::<SOURCE>(load(0), load(1)),
        INT8 => [0, 1, 2, 3].map(|i| veorq_u8(load(i), vdupq_n_u8(128))),
        _ => [0, 1, 2, 3].map(load),
    };
    vectors.map(|v| vreinterpretq_s8_u8(v))
}

impl Span<'_> {
    /// `R` activation rows against `N` strips of 16 weight rows from `strip` on; adds to `y[R][64]`.
    ///
    /// # Safety
    /// The rows and blocks are in `a`; the span's weights at `w`, of all strips or, PLAIN, of the one;
    /// `y` has `R` rows; `strip + N <= 4`.
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn dots<const SOURCE: u8, const QUADS: usize, const N: usize, const R: usize>(
        &self,
        w: *const u8,
        strip: usize,
        y: *mut f32,
    ) {
        let m = self.a.m();
        let mut q = self.a.q_ptr(self.first, self.b0);
        let mut w = if SOURCE == PLAIN { w } else { w.wrapping_add(strip * strip_bytes(SOURCE)) };
        for (b, slot) in self.meta.slot[..self.count].iter().enumerate() {
            let z = self.meta.at(*slot, strip * 16).1;
            // SAFETY: the caller's promises; a meta row has 64 elements.
            unsafe {
                let rows = self.row_blocks::<R>(b);
                let mut t = rows.map(|row| [[vdupq_n_s32(-self.zeros.uniform * row.sum); 4]; N]);
                if self.zeros.stored {
                    for n in 0..N {
                        for v in 0..4 {
                            let z = vnegq_s32(vld1q_s32(z.add(n * 16 + v * 4)));
                            for r in 0..R {
                                t[r][n][v] = vmulq_n_s32(z, rows[r].sum);
                            }
                        }
                    }
                }
                for g in 0..QUADS / 4 {
                    let mut a = [vdupq_n_s8(0); R];
                    for r in 0..R {
                        a[r] = vld1q_s8(q.add((g * R + r) * 16));
                    }
                    let w = w.wrapping_add(g * 4 * quad_bytes(SOURCE));
                    quad::<SOURCE, 0, N, R>(&mut t, w, &a);
                    quad::<SOURCE, 1, N, R>(&mut t, w, &a);
                    quad::<SOURCE, 2, N, R>(&mut t, w, &a);
                    quad::<SOURCE, 3, N, R>(&mut t, w, &a);
                }
                for r in 0..R {
                    for n in 0..N {
                        let c = (strip + n) * 16;
                        self.fold(t[r][n], *slot, c, rows[r], y.add(r * PANEL + c));
                    }
                }
            }
            w = w.wrapping_add(QUADS * quad_bytes(SOURCE));
            q = q.wrapping_add(m * QUADS * 4);
        }
    }
}

/// Adds quad `Q` of four to the sums `[row][strip][4 vectors]`.
///
/// # Safety
/// Four quads are readable at `w`; `a` are their activations, `[quad][R][4]`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn quad<const SOURCE: u8, const Q: usize, const N: usize, const R: usize>(
    t: &mut [[[int32x4_t; 4]; N]; R],
    w: *const u8,
    a: &[int8x16_t; R],
) {
    for n in 0..N {
        // SAFETY: the caller's promise.
        let w = unsafe { weights::<SOURCE>(w.add(Q * quad_bytes(SOURCE) + n * strip_bytes(SOURCE))) };
        // Not a loop: the compiler does not unroll one of assembly, and then keeps the sums in memory.
        row::<Q, 0, N, R>(t, n, w, a);
        row::<Q, 1, N, R>(t, n, w, a);
        row::<Q, 2, N, R>(t, n, w, a);
        row::<Q, 3, N, R>(t, n, w, a);
    }
}

/// Row `I` of [`quad`] and strip `n`, if there is one.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn row<const Q: usize, const I: usize, const N: usize, const R: usize>(
    t: &mut [[[int32x4_t; 4]; N]; R],
    n: usize,
    w: [int8x16_t; 4],
    a: &[int8x16_t; R],
) {
    if I >= R {
        return;
    }
    let (t, a) = (&mut t[I][n], a[(Q * R + I) / 4]);
    *t = match (Q * R + I) % 4 {
        0 => [sdot::<0>(t[0], w[0], a), sdot::<0>(t[1], w[1], a), sdot::<0>(t[2], w[2], a), sdot::<0>(t[3], w[3], a)],
        1 => [sdot::<1>(t[0], w[0], a), sdot::<1>(t[1], w[1], a), sdot::<1>(t[2], w[2], a), sdot::<1>(t[3], w[3], a)],
        2 => [sdot::<2>(t[0], w[0], a), sdot::<2>(t[1], w[1], a), sdot::<2>(t[2], w[2], a), sdot::<2>(t[3], w[3], a)],
        _ => [sdot::<3>(t[0], w[0], a), sdot::<3>(t[1], w[1], a), sdot::<3>(t[2], w[2], a), sdot::<3>(t[3], w[3], a)],
    };
}

/// `acc[lane] += dot(w[4 lane ..], a[4 E ..])`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot<const E: usize>(mut acc: int32x4_t, w: int8x16_t, a: int8x16_t) -> int32x4_t {
    // SAFETY: one register-only instruction of the dotprod extension.
    unsafe {
        asm!(
            "sdot {acc:v}.4s, {w:v}.16b, {a:v}.4b[{e}]",
            acc = inout(vreg) acc, w = in(vreg) w, a = in(vreg) a, e = const E,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    acc
}
