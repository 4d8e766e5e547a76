//! Weights of small integers, int8 activations, by `usmmla` of the i8mm extension: 2 rows of unsigned
//! bytes times 2 of signed ones, 8 columns deep. Codes need no sign, so 8-bit ones are taken as they lie.
//!
//! Two quads, zipped lane by lane, are pairs of rows of 8 columns: weights `[2 rows][8]` and
//! activations `[2 rows][8]`. A block of one or three rows is filled up with a row of zeros, which
//! costs less than a kernel of its own; a single row is left to `sdot`.

use super::*;
use crate::cpu::acts::{Acts, MR};
use crate::cpu::linear::Scratch;
use std::ops::Range;

/// # Safety
/// NEON, dot products and i8mm exist; shapes as [`crate::cpu::linear::linear_panel`] checks them.
#[target_feature(enable = "neon,dotprod,i8mm")]
pub(super) unsafe fn panel<const BITS: usize>(
    w: &IntPanel,
    a: &Acts,
    rows: Range<usize>,
    tile: &mut [f32],
    scratch: &mut Scratch,
) {
    // SAFETY: the caller's promises.
    unsafe {
        if rows.len() == 1 {
            return dot::panel::<BITS>(w, a, rows, tile, scratch);
        }
        let a = a.int8(w.block);
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
#[target_feature(enable = "neon,dotprod,i8mm")]
unsafe fn spans<const SOURCE: u8, const QUADS: usize>(
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
    let zeros = Zeros::of(w, 0);
    let bytes = scratch.bytes.ptr();
    for b0 in (0..a.blocks()).step_by(SPAN / block) {
        let count = (a.blocks() - b0).min(SPAN / block);
        widen(w, b0, count, 0, &mut scratch.meta);
        let quads = quad_bytes(SOURCE);
        let codes = w.codes[b0 * QUADS * quads..][..count * QUADS * quads].as_ptr();
        for strip in 0..4 {
            let codes = codes.wrapping_add(strip * strip_bytes(SOURCE));
            if sweep {
                // SAFETY: `codes` are the span's, `bytes` has room for a strip.
                unsafe { unpack::<SOURCE>(codes, count * QUADS, bytes) }
            }
            for first in rows.clone().step_by(MR) {
                let at = Span { a, first, b0, count, meta: &scratch.meta, zeros };
                // SAFETY: every block of rows is in `a` and in `tile`, because `rows` is; the weights
                // are the span's.
                unsafe {
                    let y = tile.as_mut_ptr().add((first - rows.start) * PANEL);
                    match ((rows.end - first).min(MR), sweep) {
                        (1, true) => at.products::<PLAIN, QUADS, 1, 1>(bytes, strip, y),
                        (2, true) => at.products::<PLAIN, QUADS, 2, 1>(bytes, strip, y),
                        (3, true) => at.products::<PLAIN, QUADS, 3, 2>(bytes, strip, y),
                        (_, true) => at.products::<PLAIN, QUADS, 4, 2>(bytes, strip, y),
                        (1, false) => at.products::<SOURCE, QUADS, 1, 1>(codes, strip, y),
                        (2, false) => at.products::<SOURCE, QUADS, 2, 1>(codes, strip, y),
                        (3, false) => at.products::<SOURCE, QUADS, 3, 2>(codes, strip, y),
                        (_, false) => at.products::<SOURCE, QUADS, 4, 2>(codes, strip, y),
                    }
                }
            }
        }
    }
}

/// Unpacks a strip of `quads` quads of codes into `[two quads][8 pairs of rows][2][8]` bytes.
///
/// # Safety
/// `from` is readable for the strip of the quads, `to` writable for a strip.
#[target_feature(enable = "neon,dotprod,i8mm")]
unsafe fn unpack<const SOURCE: u8>(from: *const u8, quads: usize, to: *mut u8) {
    for q in (0..quads).step_by(2) {
        // SAFETY: the caller's promises; `q` is below the 32 quads of a span, which are even.
        unsafe {
            let pairs = weights::<SOURCE>(from.add(q * quad_bytes(SOURCE)));
            for (i, w) in pairs.into_iter().enumerate() {
                vst1q_u8(to.add(q * 64 + i * 16), w);
            }
        }
    }
}

/// Integers of 16 rows and 8 columns, two rows a vector.
///
/// # Safety
/// A strip of two quads is readable at `w`.
#[inline]
#[target_feature(enable = "neon,dotprod,i8mm")]
unsafe fn weights<const SOURCE: u8>(w: *const u8) -> [uint8x16_t; 8] {
    // SAFETY: the caller's promise: two or four vectors a quad.
    let load = |q: usize, i: usize| unsafe { vld1q_u8(w.add(q * quad_bytes(SOURCE) + i * 16)) };
    let pairs = |i: usize| zip(load(0, i), load(1, i));
    match SOURCE {
        INT4 | FP4 => {
            // Zipped as nibbles: what is in a byte goes the same way.
            let ([a, b], [c, d]) = (pairs(0), pairs(1));
            let ([a, b, a8, b8], [c, d, c8, d8]) = (nibbles::<SOURCE>(a, b), nibbles::<SOURCE>(c, d));
            [a, b, c, d, a8, b8, c8, d8]
        }
        INT8 => {
            let ([a, b], [c, d], [e, f], [g, h]) = (pairs(0), pairs(1), pairs(2), pairs(3));
            [a, b, c, d, e, f, g, h]
        }
        _ => [0, 1, 2, 3, 4, 5, 6, 7].map(|i| load(0, i)),
    }
}

/// Quads of four rows, joined: rows 0 and 1, rows 2 and 3, 8 columns each.
#[inline]
#[target_feature(enable = "neon,dotprod,i8mm")]
fn zip(a: uint8x16_t, b: uint8x16_t) -> [uint8x16_t; 2] {
    let (a, b) = (vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b));
    [vreinterpretq_u8_u32(vzip1q_u32(a, b)), vreinterpretq_u8_u32(vzip2q_u32(a, b))]
}

/// A quad of `R` activation rows, zeros behind it.
///
/// # Safety
/// `4 * R` bytes are readable at `a`.
#[inline]
#[target_feature(enable = "neon,dotprod,i8mm")]
unsafe fn activations<const R: usize>(a: *const i8) -> uint8x16_t {
    let a = a.cast::<u32>();
    // SAFETY: the caller's promise.
    unsafe {
        let word = |i: usize| a.add(i).read_unaligned();
        let two = || vcombine_u8(vld1_u8(a.cast()), vdup_n_u8(0));
        match R {
            1 => vreinterpretq_u8_u32(vsetq_lane_u32::<0>(word(0), vdupq_n_u32(0))),
            2 => two(),
            3 => vreinterpretq_u8_u32(vsetq_lane_u32::<2>(word(2), vreinterpretq_u32_u8(two()))),
            _ => vld1q_u8(a.cast()),
        }
    }
}

impl Span<'_> {
    /// `R` activation rows, `P` pairs of them, against 16 weight rows; adds to `y[R][64]`.
    ///
    /// # Safety
    /// The rows and blocks are in `a`, the strip's weights of the span at `w`; `y` has `R` rows; `strip < 4`.
    #[target_feature(enable = "neon,dotprod,i8mm")]
    unsafe fn products<const SOURCE: u8, const QUADS: usize, const R: usize, const P: usize>(
        &self,
        mut w: *const u8,
        strip: usize,
        y: *mut f32,
    ) {
        let m = self.a.m();
        let mut q = self.a.q_ptr(self.first, self.b0);
        let c = strip * 16;
        for (b, slot) in self.meta.slot[..self.count].iter().enumerate() {
            let z = self.meta.at(*slot, c).1;
            // SAFETY: the caller's promises; a meta row has 64 elements.
            unsafe {
                let rows = self.row_blocks::<R>(b);
                let mut t = [[vdupq_n_s32(0); 8]; P];
                for two in 0..QUADS / 2 {
                    let at = q.add(two * 8 * R);
                    let a = zip(activations::<R>(at), activations::<R>(at.add(4 * R)));
                    let w = weights::<SOURCE>(w.wrapping_add(two * 2 * quad_bytes(SOURCE)));
                    for p in 0..P {
                        for i in 0..8 {
                            t[p][i] = usmmla(t[p][i], w[i], a[p]);
                        }
                    }
                }
                // Not a loop, which the compiler would not unroll, keeping the sums in memory.
                self.row::<0, R, P>(&t, z, *slot, c, &rows, y);
                self.row::<1, R, P>(&t, z, *slot, c, &rows, y);
                self.row::<2, R, P>(&t, z, *slot, c, &rows, y);
                self.row::<3, R, P>(&t, z, *slot, c, &rows, y);
            }
            w = w.wrapping_add(QUADS * quad_bytes(SOURCE));
            q = q.wrapping_add(m * QUADS * 4);
        }
    }

    /// Folds the sums of row `I`, if there is one, into its 16 outputs; `t` is `[pair of rows][pair of weight rows]`.
    ///
    /// # Safety
    /// As [`Span::products`]; `z` points at 16 elements, `c` is at most 48.
    #[inline]
    #[target_feature(enable = "neon,dotprod,i8mm")]
    unsafe fn row<const I: usize, const R: usize, const P: usize>(
        &self,
        t: &[[int32x4_t; 8]; P],
        z: *const i32,
        slot: usize,
        c: usize,
        rows: &[RowBlock; R],
        y: *mut f32,
    ) {
        if I >= R {
            return;
        }
        let row = rows[I];
        // Two pairs of weight rows, `[weight row][activation row]` each.
        let one = |v: usize| {
            let (a, b) = (t[I / 2][2 * v], t[I / 2][2 * v + 1]);
            if I % 2 == 0 { vuzp1q_s32(a, b) } else { vuzp2q_s32(a, b) }
        };
        let mut t = [one(0), one(1), one(2), one(3)];
        // SAFETY: the caller's promises.
        unsafe {
            if self.zeros.stored {
                for v in 0..4 {
                    t[v] = vmlsq_n_s32(t[v], vld1q_s32(z.add(v * 4)), row.sum);
                }
            } else {
                let zero = vdupq_n_s32(self.zeros.uniform * row.sum);
                t = t.map(|t| vsubq_s32(t, zero));
            }
            self.fold(t, slot, c, row, y.add(I * PANEL + c));
        }
    }
}

/// `acc[i][j] += dot(w[i], a[j])` of 2 rows of 8 bytes each.
#[inline]
#[target_feature(enable = "neon,dotprod,i8mm")]
fn usmmla(mut acc: int32x4_t, w: uint8x16_t, a: uint8x16_t) -> int32x4_t {
    // SAFETY: one register-only instruction of the i8mm extension.
    unsafe {
        asm!(
            "usmmla {acc:v}.4s, {w:v}.16b, {a:v}.16b",
            acc = inout(vreg) acc, w = in(vreg) w, a = in(vreg) a,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    acc
}
