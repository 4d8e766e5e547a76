//! One block of 32 or 64 floats to int8.

use crate::cpu::acts::{Quantum, TINY};
use crate::cpu::scalar::middle;
use std::arch::x86_64::*;

/// # Safety
/// AVX2 exists; `x` is 32 or 64 long; `to` is writable for its quads, `step` bytes apart.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn block(x: &[f32], to: *mut i8, step: usize) -> Quantum {
    let amax = largest(x);
    let (scale, inv) = match amax {
        a if !a.is_finite() => (f32::NAN, 0.0),
        a if a < TINY => (0.0, 0.0),
        a => (a / 127.0, 127.0 / a),
    };
    // Multiplying by zero would keep a NaN, whose conversion is -2^31.
    let keep = _mm256_castsi256_ps(_mm256_set1_epi32(if inv == 0.0 { 0 } else { -1 }));
    let inv = _mm256_set1_ps(inv);
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    let mut sums = [0i32; 2];
    for (i, x) in x.chunks_exact(32).enumerate() {
        // SAFETY: `x` has 32 elements, `j < 4`.
        let int = |j: usize| unsafe { _mm256_and_ps(_mm256_loadu_ps(x.as_ptr().add(j * 8)), keep) };
        let int = |j: usize| _mm256_cvtps_epi32(_mm256_mul_ps(int(j), inv));
        let low = _mm256_packs_epi32(int(0), int(1));
        let high = _mm256_packs_epi32(int(2), int(3));
        let quads = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
        let [low, high] = pair_sums(quads);
        sums = [sums[0] + low, sums[1] + high];
        // SAFETY: the caller's promise for `to`; the array has the vector's size.
        unsafe {
            if step == 4 {
                _mm256_storeu_si256(to.add(i * 32).cast(), quads);
            } else {
                let mut words = [0i32; 8];
                _mm256_storeu_si256(words.as_mut_ptr().cast(), quads);
                for (j, word) in words.iter().enumerate() {
                    to.add((i * 8 + j) * step).cast::<i32>().write_unaligned(*word);
                }
            }
        }
    }
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
fn largest(x: &[f32]) -> f32 {
    let magnitude = _mm256_set1_epi32(0x7fff_ffff);
    let mut top = [_mm256_setzero_si256(); 4];
    for x in x.chunks_exact(32) {
        for (j, top) in top.iter_mut().enumerate() {
            // SAFETY: `x` has 32 elements.
            let v = unsafe { _mm256_loadu_si256(x.as_ptr().add(j * 8).cast()) };
            *top = _mm256_max_epi32(*top, _mm256_and_si256(v, magnitude));
        }
    }
    let top = _mm256_max_epi32(_mm256_max_epi32(top[0], top[1]), _mm256_max_epi32(top[2], top[3]));
    let top = _mm_max_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256::<1>(top));
    let top = _mm_max_epi32(top, _mm_shuffle_epi32::<0x4e>(top));
    f32::from_bits(_mm_cvtsi128_si32(_mm_max_epi32(top, _mm_shuffle_epi32::<0xb1>(top))) as u32)
}
