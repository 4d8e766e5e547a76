//! Armv8 NEON with dot products: integer weights times int8 activations, and float weights.
//!
//! Small on purpose, and never executed so far: no machine of ours has it, so [`Isa::best`] passes
//! it by. Exact mode and the quantizer are the scalar ones. `sdot` and `fcvtl` are written as
//! assembly, because their intrinsics are not in every toolchain we build with.

// A register tile is indexed alike where it is loaded, summed and stored.
#![allow(clippy::needless_range_loop)]

use super::acts::{Acts, Int8, MR};
use super::isa::{Isa, Level};
use super::linear::{FloatPanel, IntPanel, Meta, Scratch};
use super::mini::E2M1;
use super::scalar;
use quern_models::{FloatType, PANEL, ZeroKind};
use std::arch::aarch64::*;
use std::arch::{asm, is_aarch64_feature_detected};
use std::ops::Range;

pub(crate) static ISA: Isa = Isa {
    name: "neon",
    level: Level::Neon,
    executed: false,
    detected: || is_aarch64_feature_detected!("neon") && is_aarch64_feature_detected!("dotprod"),
    quantize: scalar::quantize,
    int4_int8: panel::<4>,
    int4_f32: scalar::int_f32,
    int8_int8: panel::<8>,
    int8_f32: scalar::int_f32,
    float,
};

/// # Safety
/// The instructions exist; shapes as [`super::linear::linear_panel`] checks them.
#[target_feature(enable = "neon,dotprod")]
unsafe fn panel<const BITS: usize>(
    w: &IntPanel,
    a: &Acts,
    rows: Range<usize>,
    tile: &mut [f32],
    scratch: &mut Scratch,
) {
    let (a, block) = (a.int8(w.block), w.block);
    let block_bytes = block / 4 * BITS * 32;
    tile.fill(0.0);
    for b in 0..a.blocks() {
        let g = b * block / w.group;
        if b == 0 || g != (b - 1) * block / w.group {
            widen(w, g, &mut scratch.meta);
        }
        let codes = &w.codes[b * block_bytes..][..block_bytes];
        for first in rows.clone().step_by(MR) {
            let at = Block { a, first, b, min: w.zero == ZeroKind::Min, e2m1: w.mini.is_some() };
            for strip in 0..4 {
                // SAFETY: the instructions exist; `codes` are the block's; the rows are in `a` and `tile`.
                unsafe {
                    let y = tile.as_mut_ptr().add((first - rows.start) * PANEL);
                    match (rows.end - first).min(MR) {
                        1 => at.rows::<BITS, 1>(codes.as_ptr(), strip, &scratch.meta, y),
                        2 => at.rows::<BITS, 2>(codes.as_ptr(), strip, &scratch.meta, y),
                        3 => at.rows::<BITS, 3>(codes.as_ptr(), strip, &scratch.meta, y),
                        _ => at.rows::<BITS, 4>(codes.as_ptr(), strip, &scratch.meta, y),
                    }
                }
            }
        }
    }
}

/// Scales, zeros and minima of one group into slot 0. 8-bit codes are made signed, zeros likewise.
fn widen(w: &IntPanel, g: usize, meta: &mut Meta) {
    let bias = if w.bits == 8 { 128 } else { 0 };
    for r in 0..PANEL {
        meta.s[0][r] = w.scale_at(r, g);
        meta.z[0][r] = w.zero_at(r, g) - bias;
        meta.m[0][r] = w.min_at(r, g);
    }
}

/// One block of activation columns for one block of activation rows.
struct Block<'a> {
    a: &'a Int8,
    first: usize,
    b: usize,
    min: bool,
    /// Codes are looked up.
    e2m1: bool,
}

impl Block<'_> {
    /// `R` activation rows against 16 weight rows; adds to `y[R][64]`.
    ///
    /// # Safety
    /// The rows and the block are in `a`, its codes at `w`; `y` has `R` rows; `strip < 4`.
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn rows<const BITS: usize, const R: usize>(&self, w: *const u8, strip: usize, meta: &Meta, y: *mut f32) {
        let q = self.a.q_ptr(self.first, self.b);
        let mut t = [[vdupq_n_s32(0); 4]; R];
        for quad in 0..self.a.block() / 4 {
            // SAFETY: the caller's promises.
            unsafe {
                let codes = weights::<BITS>(w.add(quad * BITS * 32), strip, self.e2m1);
                for r in 0..R {
                    let a = q.add((quad * R + r) * 4).cast::<i32>().read_unaligned();
                    let a = vreinterpretq_s8_s32(vdupq_n_s32(a));
                    for v in 0..4 {
                        t[r][v] = sdot(t[r][v], codes[v], a);
                    }
                }
            }
        }
        for v in 0..4 {
            let c = strip * 16 + v * 4;
            let (s, z, m) = meta.at(0, c);
            // SAFETY: `c` is at most 60; the rows are in `a`; `y` by the caller's promise.
            unsafe {
                let (s, z, m) = (vld1q_f32(s), vld1q_s32(z), vld1q_f32(m));
                for r in 0..R {
                    let scale = *self.a.scale_ptr(self.first + r, self.b);
                    let sum = vdupq_n_s32(*self.a.sum_ptr(self.first + r, self.b));
                    let y = y.add(r * PANEL + c);
                    let t = vcvtq_f32_s32(vmlsq_s32(t[r][v], z, sum));
                    let mut out = vfmaq_f32(vld1q_f32(y), t, vmulq_n_f32(s, scale));
                    if self.min {
                        out = vfmaq_f32(out, vmulq_n_f32(m, scale), vcvtq_f32_s32(sum));
                    }
                    vst1q_f32(y, out);
                }
            }
        }
    }
}

/// Integers of 16 rows and 4 columns as signed bytes: four vectors of 4 rows, in row order.
///
/// # Safety
/// A quad of codes is readable at `w`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn weights<const BITS: usize>(w: *const u8, strip: usize, e2m1: bool) -> [int8x16_t; 4] {
    let signed = |v: uint8x16_t| vreinterpretq_s8_u8(v);
    if BITS == 8 {
        // SAFETY: the caller's promise: a strip is 64 of the quad's 256 bytes.
        let load = |i: usize| unsafe { vld1q_u8(w.add(strip * 64 + i * 16)) };
        let middle = vdupq_n_u8(128);
        return [0, 1, 2, 3].map(|i| signed(veorq_u8(load(i), middle)));
    }
    // SAFETY: the caller's promise: a strip is 32 of the quad's 128 bytes.
    let (a, b) = unsafe { (vld1q_u8(w.add(strip * 32)), vld1q_u8(w.add(strip * 32 + 16))) };
    let low = vdupq_n_u8(15);
    let codes = [vandq_u8(a, low), vandq_u8(b, low), vshrq_n_u8::<4>(a), vshrq_n_u8::<4>(b)];
    if e2m1 {
        // SAFETY: the table has 16 bytes.
        let table = unsafe { vld1q_u8(E2M1.as_ptr()) };
        return codes.map(|c| signed(vqtbl1q_u8(table, c)));
    }
    codes.map(signed)
}

/// `acc[lane] += dot(w[4 lane ..], a[4 lane ..])`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot(mut acc: int32x4_t, w: int8x16_t, a: int8x16_t) -> int32x4_t {
    // SAFETY: one register-only instruction of the dotprod extension.
    unsafe {
        asm!(
            "sdot {acc:v}.4s, {w:v}.16b, {a:v}.16b",
            acc = inout(vreg) acc, w = in(vreg) w, a = in(vreg) a,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    acc
}

/// Float weights: two vectors are the eight partial sums.
///
/// # Safety
/// The instructions exist; shapes as [`super::linear::linear_panel`] checks them.
#[target_feature(enable = "neon,dotprod")]
unsafe fn float(w: &FloatPanel, a: &Acts, rows: Range<usize>, tile: &mut [f32], _: &mut Scratch) {
    tile.fill(0.0);
    let size = w.kind.size();
    let whole = w.k / 8 * 8;
    for (i, row) in rows.enumerate() {
        let x = a.row_ptr(row);
        for n in 0..w.n {
            let bytes = &w.rows[n * w.k * size..][..w.k * size];
            let mut p = [vdupq_n_f32(0.0); 2];
            for k in (0..whole).step_by(4) {
                // SAFETY: columns `k..k + 4` exist in both rows.
                unsafe {
                    let w = load4(w.kind, bytes.as_ptr(), k);
                    p[k / 4 % 2] = vfmaq_f32(p[k / 4 % 2], w, vld1q_f32(x.add(k)));
                }
            }
            let mut sums = [0f32; 8];
            // SAFETY: the array holds both vectors; `k` is a column of both rows.
            unsafe {
                vst1q_f32(sums.as_mut_ptr(), p[0]);
                vst1q_f32(sums.as_mut_ptr().add(4), p[1]);
                for k in whole..w.k {
                    sums[k % 8] = w.kind.read(bytes, k).mul_add(*x.add(k), sums[k % 8]);
                }
            }
            let p = sums;
            tile[i * PANEL + n] = ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]));
        }
    }
}

/// Four elements of type `kind`, widened.
///
/// # Safety
/// Elements `i..i + 4` are readable at `p`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn load4(kind: FloatType, p: *const u8, i: usize) -> float32x4_t {
    // SAFETY: the caller's promise; `fcvtl` is a register-only instruction of base NEON.
    unsafe {
        match kind {
            FloatType::F32 => vld1q_f32(p.cast::<f32>().add(i)),
            FloatType::F16 => {
                let half = vld1_u16(p.cast::<u16>().add(i));
                let wide: float32x4_t;
                asm!("fcvtl {o:v}.4s, {i:v}.4h", o = out(vreg) wide, i = in(vreg) half,
                    options(pure, nomem, nostack, preserves_flags));
                wide
            }
            FloatType::BF16 => {
                let half = vmovl_u16(vld1_u16(p.cast::<u16>().add(i)));
                vreinterpretq_f32_u32(vshlq_n_u32::<16>(half))
            }
        }
    }
}
