//! One block of 32 or 16 floats to int8.

use crate::cpu::acts::{Quantum, TINY};
use crate::cpu::avx2::quantize::pair_sums;
use crate::cpu::scalar::middle;
use std::arch::x86_64::*;

/// # Safety
/// The instructions of [`super::ISA`] exist; `x` is 32 or 16 long; `to` is writable for its quads, `step` bytes apart.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub(super) unsafe fn block(x: &[f32], to: *mut i8, step: usize) -> Quantum {
    // SAFETY: the caller's promises.
    unsafe {
        let (quantum, quads) = if x.len() == 32 { with_quads::<2>(x) } else { with_quads::<1>(x) };
        if step != 4 {
            let mut words = [0i32; 8];
            _mm256_storeu_si256(words.as_mut_ptr().cast(), quads);
            for (j, word) in words[..x.len() / 4].iter().enumerate() {
                to.add(j * step).cast::<i32>().write_unaligned(*word);
            }
        } else if x.len() == 32 {
            _mm256_storeu_si256(to.cast(), quads);
        } else {
            _mm_storeu_si128(to.cast(), _mm256_castsi256_si128(quads));
        }
        quantum
    }
}

/// A block of `N` vectors, 2 or 1, as quads.
///
/// # Safety
/// As [`ints`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn with_quads<const N: usize>(x: &[f32]) -> (Quantum, __m256i) {
    // SAFETY: the caller's promise.
    let (quantum, ints) = unsafe { ints::<N>(x) };
    (quantum, quads(&ints))
}

/// Up to 32 integers as bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn quads(ints: &[__m512i]) -> __m256i {
    let bytes = |v: &__m512i| _mm512_cvtepi32_epi8(*v);
    _mm256_set_m128i(ints.get(1).map_or(_mm_setzero_si128(), bytes), bytes(&ints[0]))
}

/// The integers of a block of `N` vectors, 2 or 1.
///
/// # Safety
/// `x` is `16 * N` long.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn ints<const N: usize>(x: &[f32]) -> (Quantum, [__m512i; N]) {
    // Halves, because they may just have been stored as such: a wider load would wait for the cache.
    // SAFETY: the caller's promise.
    let half = |i: usize| unsafe { _mm256_loadu_ps(x.as_ptr().add(i * 8)) };
    let whole = |i: usize| _mm512_insertf32x8::<1>(_mm512_castps256_ps512(half(i * 2)), half(i * 2 + 1));
    let v: [__m512; N] = std::array::from_fn(whole);
    // As integers, magnitudes order like the floats they are, infinities and NaNs on top.
    let size = |v: __m512| _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fff_ffff));
    let top = v.iter().fold(_mm512_setzero_si512(), |top, v| _mm512_max_epi32(top, size(*v)));
    let amax = f32::from_bits(_mm512_reduce_max_epi32(top) as u32);
    let (scale, inv) = match amax {
        a if !a.is_finite() => (f32::NAN, 0.0),
        a if a < TINY => (0.0, 0.0),
        a => (a / 127.0, 127.0 / a),
    };
    // Multiplying by zero would keep a NaN, whose conversion is -2^31.
    let keep = if inv == 0.0 { 0 } else { 0xffff };
    let ints = v.map(|v| _mm512_cvtps_epi32(_mm512_maskz_mul_ps(keep, v, _mm512_set1_ps(inv))));
    let sums = pair_sums(quads(&ints));
    (Quantum { scale, sum: sums[0] + sums[1], middle: middle(sums) }, ints)
}
