//! One block of 32 or 16 floats to int8, and to the wide form.

use crate::cpu::acts::{Quantum, TINY};
use crate::cpu::avx2::quantize::pair_sums;
use crate::cpu::scalar::middle;
use std::arch::x86_64::*;

/// # Safety
/// The instructions of [`super::ISA`] exist; `x` is 32 or 16 long; `to` is writable for its quads, `step` bytes apart.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub(super) unsafe fn block(x: &[f32], to: *mut i8, step: usize) -> Quantum {
    // SAFETY: the caller's promises.
    unsafe { if x.len() == 32 { vectors::<2>(x, to, step, None) } else { vectors::<1>(x, to, step, None) } }
}

/// The same, and the values as bf16, the columns of each four in the order 0, 2, 1, 3.
///
/// # Safety
/// As [`block`]; `wide` is writable for as many elements as `x` has.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub(super) unsafe fn wide(x: &[f32], to: *mut i8, step: usize, wide: *mut u16) -> Quantum {
    // SAFETY: the caller's promises.
    unsafe { if x.len() == 32 { vectors::<2>(x, to, step, Some(wide)) } else { vectors::<1>(x, to, step, Some(wide)) } }
}

/// A block of `N` vectors, 2 or 1.
///
/// # Safety
/// As [`block`] and [`wide()`]; `x` is `16 * N` long.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn vectors<const N: usize>(x: &[f32], to: *mut i8, step: usize, wide: Option<*mut u16>) -> Quantum {
    // SAFETY: the caller's promise.
    let v: [__m512; N] = std::array::from_fn(|i| unsafe { _mm512_loadu_ps(x.as_ptr().add(i * 16)) });
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
    let bytes = |i: usize| if i < N { _mm512_cvtepi32_epi8(ints[i]) } else { _mm_setzero_si128() };
    let quads = _mm256_set_m128i(bytes(1), bytes(0));
    // SAFETY: the caller's promises for `to` and `wide`; the arrays have the vectors' sizes.
    unsafe {
        if step != 4 {
            let mut words = [0i32; 8];
            _mm256_storeu_si256(words.as_mut_ptr().cast(), quads);
            for (j, word) in words[..4 * N].iter().enumerate() {
                to.add(j * step).cast::<i32>().write_unaligned(*word);
            }
        } else if N == 2 {
            _mm256_storeu_si256(to.cast(), quads);
        } else {
            _mm_storeu_si128(to.cast(), _mm256_castsi256_si128(quads));
        }
        if let Some(wide) = wide {
            // The upper half of a float is its bf16.
            let order: [u16; 32] = const { upper_halves() };
            let order = _mm512_loadu_si512(order.as_ptr().cast());
            let float = |i: usize| _mm512_castps_si512(_mm512_cvtepi32_ps(ints[i.min(N - 1)]));
            let halves = _mm512_permutex2var_epi16(float(0), order, float(1));
            if N == 2 {
                _mm512_storeu_si512(wide.cast(), halves);
            } else {
                _mm256_storeu_si256(wide.cast(), _mm512_castsi512_si256(halves));
            }
        }
    }
    let sums = pair_sums(quads);
    Quantum { scale, sum: sums[0] + sums[1], middle: middle(sums) }
}

/// Upper halves of 32 numbers of two vectors, those of each four in the order 0, 2, 1, 3.
const fn upper_halves() -> [u16; 32] {
    let (mut order, mut i) = ([0; 32], 0);
    while i < 32 {
        order[i] = [1, 5, 3, 7][i % 4] + (i / 4 * 8) as u16;
        i += 1;
    }
    order
}
