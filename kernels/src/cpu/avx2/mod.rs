//! AVX2 + FMA + F16C.
//!
//! A 32-byte load of P64 codes holds 4 consecutive columns of 8 rows, one row per 32-bit lane, so
//! a lane is an output and no sum ever crosses lanes. Files: [`int4`] and [`int8`] with int8
//! activations, [`exact`] for integer weights with f32 activations, [`float`], [`quantize`].
//! Legend: `w` weights, `a` int8 activations, `x` f32 ones, `s` scales, `z` zero codes, `m` minima,
//! `y` outputs, `b` activation block, `r` activation row.

// A register tile is indexed alike where it is loaded, summed and stored.
#![allow(clippy::needless_range_loop)]

mod exact;
mod float;
mod int4;
mod int8;
mod quantize;

use super::isa::{Isa, Level};
use super::linear::{IntPanel, Meta};
use quern_models::{FloatType, PANEL, ZeroKind};
use std::arch::x86_64::*;

pub(crate) static ISA: Isa = Isa {
    name: "avx2",
    level: Level::Avx2,
    executed: true,
    detected,
    quantize: quantize::block,
    int4_int8: int4::panel,
    int4_f32: exact::panel,
    int8_int8: int8::panel,
    int8_f32: exact::panel,
    float: float::panel,
};

pub(super) fn detected() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

/// How far ahead of a load its cache line is asked for, bytes: 4-8 KiB measured best at m = 1.
const AHEAD: usize = 4096;

/// Asks for the cache line at `p`, which need not exist.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
#[allow(unused_unsafe)] // The intrinsic is unsafe in older toolchains.
pub(super) fn prefetch(p: *const u8) {
    // SAFETY: a prefetch never faults, whatever the address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
}

/// Eight f32 from memory.
///
/// # Safety
/// 32 bytes are readable at `p`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load(p: *const f32) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe { _mm256_loadu_ps(p) }
}

/// 32 bytes from memory.
///
/// # Safety
/// 32 bytes are readable at `p`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load_bytes(p: *const u8) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_loadu_si256(p.cast()) }
}

/// Four bytes in every lane.
///
/// # Safety
/// 4 bytes are readable at `p`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn quad(p: *const i8) -> __m256i {
    // SAFETY: the caller's promise.
    _mm256_set1_epi32(unsafe { p.cast::<i32>().read_unaligned() })
}

/// Eight elements of type `kind`, widened.
///
/// # Safety
/// Elements `i..i + 8` are readable at `p`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load8(kind: FloatType, p: *const u8, i: usize) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe {
        match kind {
            FloatType::F32 => _mm256_loadu_ps(p.cast::<f32>().add(i)),
            FloatType::F16 => _mm256_cvtph_ps(_mm_loadu_si128(p.add(i * 2).cast())),
            FloatType::BF16 => {
                let half = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(i * 2).cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(half))
            }
        }
    }
}

/// Widens scales, zeros and minima of blocks `b0..b0 + count` of `block` columns into `meta`.
///
/// Zeros are stored less `bias`, as 16-bit numbers in 32-bit lanes: a factor for `vpmaddwd`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn widen(w: &IntPanel, block: usize, b0: usize, count: usize, bias: i32, meta: &mut Meta) {
    let mut slot = 0;
    for i in 0..count {
        let g = (b0 + i) * block / w.group;
        if i > 0 && g == (b0 + i - 1) * block / w.group {
            meta.slot[i] = slot;
            continue;
        }
        slot += (i > 0) as usize;
        meta.slot[i] = slot;
        let scales = &w.scales[g * PANEL * w.scale.size()..][..PANEL * w.scale.size()];
        floats(w.scale, scales, &mut meta.s[slot]);
        match w.zero {
            ZeroKind::Mid => meta.z[slot].fill(((1 << (w.bits - 1)) - bias) & 0xffff),
            ZeroKind::Code if w.bits == 4 => zeros4(&w.zeros[g * 32..][..32], bias, &mut meta.z[slot]),
            ZeroKind::Code => {
                let zeros = &w.zeros[g * PANEL..][..PANEL];
                meta.z[slot].iter_mut().zip(zeros).for_each(|(z, c)| *z = (*c as i32 - bias) & 0xffff);
            }
            ZeroKind::Min => {
                meta.z[slot].fill(-bias & 0xffff);
                floats(w.scale, &w.zeros[g * PANEL * w.scale.size()..][..scales.len()], &mut meta.m[slot]);
            }
        }
    }
}

/// 64 floats, widened.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn floats(kind: FloatType, from: &[u8], to: &mut [f32; PANEL]) {
    assert_eq!(from.len(), PANEL * kind.size());
    for i in (0..PANEL).step_by(8) {
        // SAFETY: `from` has 64 elements by the assertion, `to` by its type.
        unsafe { _mm256_storeu_ps(to.as_mut_ptr().add(i), load8(kind, from.as_ptr(), i)) }
    }
}

/// 64 zero codes of 4 bits: byte `8i + l` holds rows `16i + l` (low) and `16i + 8 + l` (high).
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn zeros4(from: &[u8], bias: i32, to: &mut [i32; PANEL]) {
    for (byte, to) in from.chunks_exact(8).zip(to.chunks_exact_mut(16)) {
        for l in 0..8 {
            to[l] = ((byte[l] & 15) as i32 - bias) & 0xffff;
            to[8 + l] = ((byte[l] >> 4) as i32 - bias) & 0xffff;
        }
    }
}

/// Zero kinds as const generics, which cannot be a [`ZeroKind`].
const MID: u8 = 0;
const CODE: u8 = 1;
const MIN: u8 = 2;

/// A block's scale and sum of one activation row.
#[derive(Clone, Copy)]
struct RowBlock {
    scale: f32,
    sum: i32,
}

/// `y = fma(t - z * sum, s * scale, y)` on 8 outputs, then with a minimum `y = fma(m * scale, sum, y)`.
/// `SUB`: there is a `z` to subtract. `Z`: the zero kind.
///
/// # Safety
/// `s`, `z`, `m` and `y` point at 8 elements.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn fold<const SUB: bool, const Z: u8>(
    mut t: __m256i,
    s: *const f32,
    z: *const i32,
    m: *const f32,
    row: RowBlock,
    y: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let (scale, sum) = (_mm256_set1_ps(row.scale), _mm256_set1_epi32(row.sum));
        if SUB {
            // Zeros are 16-bit with an upper half of 0 and |sum| < 2^15: the product is exact.
            t = _mm256_sub_epi32(t, _mm256_madd_epi16(_mm256_loadu_si256(z.cast()), sum));
        }
        let mut out = _mm256_fmadd_ps(_mm256_cvtepi32_ps(t), _mm256_mul_ps(load(s), scale), load(y));
        if Z == MIN {
            out = _mm256_fmadd_ps(_mm256_mul_ps(load(m), scale), _mm256_cvtepi32_ps(sum), out);
        }
        _mm256_storeu_ps(y, out);
    }
}
