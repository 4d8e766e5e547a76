//! One block of 32 or 16 floats to int8.

use crate::cpu::acts::{Quantum, TINY};
use crate::cpu::scalar::middle;
use std::arch::x86_64::*;

/// # Safety
/// AVX2 exists; `x` is 32 or 16 long; `to` is writable for its quads, `step` bytes apart.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn block(x: &[f32], to: *mut i8, step: usize) -> Quantum {
    // SAFETY: the caller's promises.
    unsafe { if x.len() == 32 { vectors::<4>(x, to, step) } else { vectors::<2>(x, to, step) } }
}

/// A block of `N` vectors, 4 or 2.
///
/// # Safety
/// As [`block`]; `x` is `8 * N` long.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn vectors<const N: usize>(x: &[f32], to: *mut i8, step: usize) -> Quantum {
    let zero = _mm256_setzero_ps();
    // SAFETY: the caller's promise.
    let load = |j: usize| if j < N { unsafe { _mm256_loadu_ps(x.as_ptr().add(j * 8)) } } else { zero };
    let v = [load(0), load(1), load(2), load(3)];
    let amax = largest(v);
    let (scale, inv) = match amax {
        a if !a.is_finite() => (f32::NAN, 0.0),
        a if a < TINY => (0.0, 0.0),
        a => (a / 127.0, 127.0 / a),
    };
    // Multiplying by zero would keep a NaN, whose conversion is -2^31.
    let keep = _mm256_castsi256_ps(_mm256_set1_epi32(if inv == 0.0 { 0 } else { -1 }));
    let inv = _mm256_set1_ps(inv);
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    let int = |v: __m256| _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_and_ps(v, keep), inv));
    let low = _mm256_packs_epi32(int(v[0]), int(v[1]));
    let high = if N == 4 { _mm256_packs_epi32(int(v[2]), int(v[3])) } else { _mm256_setzero_si256() };
    let quads = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
    // SAFETY: the caller's promise for `to`; the array has the vector's size.
    unsafe {
        if step != 4 {
            let mut words = [0i32; 8];
            _mm256_storeu_si256(words.as_mut_ptr().cast(), quads);
            for (j, word) in words[..2 * N].iter().enumerate() {
                to.add(j * step).cast::<i32>().write_unaligned(*word);
            }
        } else if N == 4 {
            _mm256_storeu_si256(to.cast(), quads);
        } else {
            _mm_storeu_si128(to.cast(), _mm256_castsi256_si128(quads));
        }
    }
    let sums = pair_sums(quads);
    Quantum { scale, sum: sums[0] + sums[1], middle: middle(sums) }
}

/// Sums of 8 quads: over their first two values, and over the other two.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn pair_sums(quads: __m256i) -> [i32; 2] {
    let pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), quads);
    let pairs = _mm_add_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256::<1>(pairs));
    let pairs = _mm_add_epi16(pairs, _mm_shuffle_epi32::<0x4e>(pairs));
    let both = _mm_cvtsi128_si32(_mm_add_epi16(pairs, _mm_shuffle_epi32::<0xb1>(pairs)));
    [both as i16 as i32, both >> 16]
}

/// Largest magnitude. As integers, magnitudes order like the floats they are, with infinities and
/// NaNs on top, where a floating maximum would lose a NaN.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn largest(v: [__m256; 4]) -> f32 {
    let magnitude = _mm256_set1_epi32(0x7fff_ffff);
    let size = |v: __m256| _mm256_and_si256(_mm256_castps_si256(v), magnitude);
    let top = _mm256_max_epi32(_mm256_max_epi32(size(v[0]), size(v[1])), _mm256_max_epi32(size(v[2]), size(v[3])));
    let top = _mm_max_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256::<1>(top));
    let top = _mm_max_epi32(top, _mm_shuffle_epi32::<0x4e>(top));
    f32::from_bits(_mm_cvtsi128_si32(_mm_max_epi32(top, _mm_shuffle_epi32::<0xb1>(top))) as u32)
}
