//! Armv8 NEON with dot products, and with matrix multiplication of bytes (i8mm).
//!
//! A 16-byte load of P64 codes holds 4 consecutive columns of 4 rows, one row per 32-bit lane, and a
//! 16-byte load of activations 4 columns of 4 rows as well: `sdot` by element takes both as they lie.
//! Files: [`dot`] for codes with int8 activations, [`mmla`] for the same by i8mm, [`exact`] for codes
//! with f32 activations, [`float`], [`quantize`]. Instructions whose intrinsics are not in every
//! toolchain we build with are written as assembly.
//! Legend: `w` weights, `a` int8 activations, `x` f32 ones, `s` scales, `z` zero codes, `m` minima,
//! `y` outputs, `b` activation block, `r` activation row.

// A register tile is indexed alike where it is loaded, summed and stored.
#![allow(clippy::needless_range_loop)]

mod dot;
mod exact;
mod float;
mod mmla;
mod quantize;

use super::acts::Int8;
use super::isa::{Isa, Level};
use super::linear::{IntPanel, Meta, SPAN};
use super::mini::E2M1;
use quern_models::{FloatType, PANEL, ZeroKind};
use std::arch::aarch64::*;
use std::arch::{asm, is_aarch64_feature_detected};

pub(crate) static ISA: Isa = Isa {
    name: "neon",
    level: Level::Neon,
    executed: true,
    detected,
    quantize: quantize::block,
    plain: |_| false,
    int4_int8: dot::panel::<4>,
    int4_f32: exact::panel,
    int8_int8: dot::panel::<8>,
    int8_f32: exact::panel,
    float: float::panel,
    peak: dot_peak,
    strips: false,
    rows: 32,
};

pub(crate) static I8MM: Isa = Isa {
    name: "neon-i8mm",
    level: Level::NeonI8mm,
    detected: || detected() && is_aarch64_feature_detected!("i8mm"),
    int4_int8: mmla::panel::<4>,
    int8_int8: mmla::panel::<8>,
    peak: mmla_peak,
    ..ISA
};

fn detected() -> bool {
    is_aarch64_feature_detected!("neon") && is_aarch64_feature_detected!("dotprod")
}

/// From this many activation rows on, a span of codes is unpacked once for all of them. By counting
/// instructions: a block of 4 rows saves 4 to 10 of them, of the 10 to 18 that unpacking takes.
const SWEEP: usize = 16;

/// Bytes of an unpacked span of 16 rows.
const STRIP: usize = 16 * SPAN;

// How weights lie, as a const generic.
/// 4-bit codes as stored.
const INT4: u8 = 0;
/// 4-bit codes as stored, to be looked up.
const FP4: u8 = 1;
/// 8-bit codes as stored.
const INT8: u8 = 2;
/// One strip, unpacked.
const PLAIN: u8 = 3;

/// Bytes from one quad to the next.
const fn quad_bytes(source: u8) -> usize {
    match source {
        INT4 | FP4 => 128,
        INT8 => 256,
        _ => 64,
    }
}

/// Bytes of a strip of 16 rows of a quad as stored.
const fn strip_bytes(source: u8) -> usize {
    quad_bytes(source) / 4
}

/// What is subtracted from the sum of `u * a`, `u` being codes less a bias.
#[derive(Clone, Copy)]
struct Zeros {
    /// Each row of the weight has its own zero, in [`Meta::z`].
    stored: bool,
    /// The zero of all rows, less the bias.
    uniform: i32,
    /// A minimum is added.
    min: bool,
}

impl Zeros {
    fn of(w: &IntPanel, bias: i32) -> Zeros {
        let uniform = if w.zero == ZeroKind::Mid { w.middle() } else { 0 };
        Zeros { stored: w.zero == ZeroKind::Code, uniform: uniform - bias, min: w.zero == ZeroKind::Min }
    }
}

/// One block of activation rows against one span.
#[derive(Clone, Copy)]
struct Span<'a> {
    a: &'a Int8,
    /// First activation row.
    first: usize,
    /// First activation block and their count.
    b0: usize,
    count: usize,
    meta: &'a Meta,
    zeros: Zeros,
}

/// Four integers of 16 rows and a quad of columns: nibbles of two vectors in row order, or looked up.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn nibbles<const SOURCE: u8>(a: uint8x16_t, b: uint8x16_t) -> [uint8x16_t; 4] {
    let low = vdupq_n_u8(15);
    let codes = [vandq_u8(a, low), vandq_u8(b, low), vshrq_n_u8::<4>(a), vshrq_n_u8::<4>(b)];
    if SOURCE != FP4 {
        return codes;
    }
    // SAFETY: the table has 16 bytes.
    let table = unsafe { vld1q_u8(E2M1.as_ptr()) };
    codes.map(|c| vqtbl1q_u8(table, c))
}

/// A block's scale and sum of one activation row.
#[derive(Clone, Copy)]
struct RowBlock {
    scale: f32,
    sum: i32,
}

impl Span<'_> {
    /// `R` rows of block `b` of the span.
    ///
    /// # Safety
    /// The rows and the block are in `a`.
    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn row_blocks<const R: usize>(&self, b: usize) -> [RowBlock; R] {
        let (sa, sums) = (self.a.scale_ptr(self.first, self.b0 + b), self.a.sum_ptr(self.first, self.b0 + b));
        let mut rows = [RowBlock { scale: 0.0, sum: 0 }; R];
        for r in 0..R {
            // SAFETY: the caller's promise.
            rows[r] = unsafe { RowBlock { scale: *sa.add(r), sum: *sums.add(r) } };
        }
        rows
    }

    /// `y = fma(t, s * scale, y)` on 16 outputs from row `c` of the panel on, then with a minimum
    /// `y = fma(m * scale, sum, y)`.
    ///
    /// # Safety
    /// `y` points at 16 elements; `c` is at most 48.
    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn fold(&self, t: [int32x4_t; 4], slot: usize, c: usize, row: RowBlock, y: *mut f32) {
        let (s, _, m) = self.meta.at(slot, c);
        // SAFETY: the caller's promises; a meta row has 64 elements.
        unsafe {
            let mut out = load16(y);
            let s = load16(s);
            for v in 0..4 {
                out[v] = vfmaq_f32(out[v], vcvtq_f32_s32(t[v]), vmulq_n_f32(s[v], row.scale));
            }
            if self.zeros.min {
                let m = load16(m);
                for v in 0..4 {
                    out[v] = vfmaq_n_f32(out[v], vmulq_n_f32(m[v], row.scale), row.sum as f32);
                }
            }
            for v in 0..4 {
                vst1q_f32(y.add(v * 4), out[v]);
            }
        }
    }
}

/// Sixteen f32.
///
/// # Safety
/// They are readable at `p`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn load16(p: *const f32) -> [float32x4_t; 4] {
    // SAFETY: the caller's promise.
    unsafe { [vld1q_f32(p), vld1q_f32(p.add(4)), vld1q_f32(p.add(8)), vld1q_f32(p.add(12))] }
}

/// Widens scales, stored zeros (less `bias`) and minima of blocks `b0..b0 + count` into `meta`.
#[target_feature(enable = "neon,dotprod")]
fn widen(w: &IntPanel, b0: usize, count: usize, bias: i32, meta: &mut Meta) {
    let mut slot = 0;
    for i in 0..count {
        let g = (b0 + i) * w.block / w.group;
        if i > 0 && g == (b0 + i - 1) * w.block / w.group {
            meta.slot[i] = slot;
            continue;
        }
        slot += (i > 0) as usize;
        meta.slot[i] = slot;
        if w.supers.is_empty() {
            let plane = g * PANEL * w.scale.size()..(g + 1) * PANEL * w.scale.size();
            floats(w.scale, &w.scales[plane.clone()], w.unit, &mut meta.s[slot]);
            if w.zero == ZeroKind::Min {
                floats(w.scale, &w.zeros[plane], 1.0, &mut meta.m[slot]);
            }
        } else {
            nested(w, w.scales, g, 0, &mut meta.s[slot]);
            if w.zero == ZeroKind::Min {
                nested(w, w.zeros, g, 1, &mut meta.m[slot]);
            }
        }
        match (w.zero, w.bits) {
            (ZeroKind::Code, 4) => zeros4(&w.zeros[g * 32..][..32], bias, &mut meta.z[slot]),
            (ZeroKind::Code, _) => {
                for (z, c) in meta.z[slot].iter_mut().zip(&w.zeros[g * PANEL..][..PANEL]) {
                    *z = *c as i32 - bias;
                }
            }
            (ZeroKind::Mid | ZeroKind::Min, _) => {}
        }
    }
}

/// 64 floats, widened, times `unit`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn floats(kind: FloatType, from: &[u8], unit: f32, to: &mut [f32; PANEL]) {
    assert_eq!(from.len(), PANEL * kind.size());
    for i in (0..PANEL).step_by(4) {
        // SAFETY: `from` has 64 elements by the assertion, `to` by its type.
        unsafe { vst1q_f32(to.as_mut_ptr().add(i), vmulq_n_f32(load4(kind, from.as_ptr(), i), unit)) }
    }
}

/// Scales (`level` 0, of plane `lower`) or minima (1) of group `g`, both levels multiplied.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn nested(w: &IntPanel, lower: &[u8], g: usize, level: usize, to: &mut [f32; PANEL]) {
    let upper = w.upper(g, level).unwrap_or(&[]);
    let lower = &lower[g * PANEL..][..PANEL];
    assert_eq!(upper.len(), PANEL * FloatType::F16.size());
    for i in (0..PANEL).step_by(8) {
        // SAFETY: `lower` and `upper` have 64 elements, `to` by its type.
        unsafe {
            let lower = vmovl_s8(vld1_s8(lower.as_ptr().add(i).cast()));
            let upper = halves(vld1q_u16(upper.as_ptr().add(2 * i).cast()));
            let (a, b) = (vmovl_s16(vget_low_s16(lower)), vmovl_high_s16(lower));
            vst1q_f32(to.as_mut_ptr().add(i), vmulq_f32(upper[0], vcvtq_f32_s32(a)));
            vst1q_f32(to.as_mut_ptr().add(i + 4), vmulq_f32(upper[1], vcvtq_f32_s32(b)));
        }
    }
}

/// 64 zero codes of 4 bits: byte `8i + l` holds rows `16i + l` (low) and `16i + 8 + l` (high).
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn zeros4(from: &[u8], bias: i32, to: &mut [i32; PANEL]) {
    for (byte, to) in from.chunks_exact(8).zip(to.chunks_exact_mut(16)) {
        for l in 0..8 {
            to[l] = (byte[l] & 15) as i32 - bias;
            to[8 + l] = (byte[l] >> 4) as i32 - bias;
        }
    }
}

/// Eight halves, widened.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn halves(h: uint16x8_t) -> [float32x4_t; 2] {
    let (low, high): (float32x4_t, float32x4_t);
    // SAFETY: two register-only instructions of base NEON.
    unsafe {
        asm!(
            "fcvtl {low:v}.4s, {h:v}.4h",
            "fcvtl2 {high:v}.4s, {h:v}.8h",
            low = out(vreg) low, high = lateout(vreg) high, h = in(vreg) h,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    [low, high]
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
            FloatType::F32 => vreinterpretq_f32_u8(vld1q_u8(p.add(4 * i))),
            FloatType::F16 => {
                let half = vreinterpret_u16_u8(vld1_u8(p.add(2 * i)));
                let wide: float32x4_t;
                asm!("fcvtl {o:v}.4s, {i:v}.4h", o = lateout(vreg) wide, i = in(vreg) half,
                    options(pure, nomem, nostack, preserves_flags));
                wide
            }
            FloatType::BF16 => {
                let half = vreinterpret_u16_u8(vld1_u8(p.add(2 * i)));
                vreinterpretq_f32_u32(vshll_n_u16::<16>(half))
            }
        }
    }
}

/// A round of one instruction on eight independent sums.
macro_rules! peak {
    ($name:ident, $instruction:literal, $each:literal, $feature:literal) => {
        /// # Safety
        /// The instruction exists.
        #[target_feature(enable = $feature)]
        unsafe fn $name(rounds: u64) -> u64 {
            for _ in 0..rounds {
                // SAFETY: registers only.
                unsafe {
                    asm!(
                        concat!($instruction, " v0.4s, v16.16b, v17.16b"),
                        concat!($instruction, " v1.4s, v16.16b, v17.16b"),
                        concat!($instruction, " v2.4s, v16.16b, v17.16b"),
                        concat!($instruction, " v3.4s, v16.16b, v17.16b"),
                        concat!($instruction, " v4.4s, v16.16b, v17.16b"),
                        concat!($instruction, " v5.4s, v16.16b, v17.16b"),
                        concat!($instruction, " v6.4s, v16.16b, v17.16b"),
                        concat!($instruction, " v7.4s, v16.16b, v17.16b"),
                        out("v0") _, out("v1") _, out("v2") _, out("v3") _,
                        out("v4") _, out("v5") _, out("v6") _, out("v7") _,
                        options(nomem, nostack, preserves_flags)
                    );
                }
            }
            rounds * 8 * $each
        }
    };
}

peak!(dot_peak, "sdot", 16, "neon,dotprod");
peak!(mmla_peak, "smmla", 32, "neon,i8mm");
