//! One block of 32 or 16 floats to int8.

use crate::cpu::acts::{Quantum, TINY};
use crate::cpu::scalar::middle;
use std::arch::aarch64::*;

/// # Safety
/// NEON exists; `x` is 32 or 16 long; `to` is writable for its quads, `step` bytes apart.
#[target_feature(enable = "neon,dotprod")]
pub(crate) unsafe fn block(x: &[f32], to: *mut i8, step: usize) -> Quantum {
    // SAFETY: the caller's promises.
    unsafe { if x.len() == 32 { vectors::<2>(x, to, step) } else { vectors::<1>(x, to, step) } }
}

/// A block of 16 values, `N` times.
///
/// # Safety
/// As [`block`]; `x` is `16 * N` long.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn vectors<const N: usize>(x: &[f32], to: *mut i8, step: usize) -> Quantum {
    assert_eq!(x.len(), 16 * N);
    let mut v = [[vdupq_n_f32(0.0); 4]; N];
    for n in 0..N {
        for i in 0..4 {
            // SAFETY: in range by the assertion.
            v[n][i] = unsafe { vld1q_f32(x.as_ptr().add(n * 16 + i * 4)) };
        }
    }
    // As integers, magnitudes order like the floats they are, with infinities and NaNs on top.
    let mut top = vdupq_n_u32(0);
    for v in v.as_flattened() {
        top = vmaxq_u32(top, vreinterpretq_u32_f32(vabsq_f32(*v)));
    }
    let (scale, inv) = match f32::from_bits(vmaxvq_u32(top)) {
        a if !a.is_finite() => (f32::NAN, 0.0),
        a if a < TINY => (0.0, 0.0),
        a => (a / 127.0, 127.0 / a),
    };
    // Nearest, ties to even; times zero, what is not finite becomes a NaN, whose conversion is 0.
    let int = |v: float32x4_t| vcvtnq_s32_f32(vmulq_n_f32(v, inv));
    let mut pairs = vdupq_n_s16(0);
    for (n, v) in v.iter().enumerate() {
        let low = vcombine_s16(vmovn_s32(int(v[0])), vmovn_s32(int(v[1])));
        let high = vcombine_s16(vmovn_s32(int(v[2])), vmovn_s32(int(v[3])));
        let quads = vcombine_s8(vmovn_s16(low), vmovn_s16(high));
        pairs = vpadalq_s8(pairs, quads);
        // SAFETY: the caller's promise for `to`.
        unsafe {
            if step == 4 {
                vst1q_s8(to.add(n * 16), quads);
                continue;
            }
            let (to, words) = (to.add(n * 4 * step), vreinterpretq_s32_s8(quads));
            to.cast::<i32>().write_unaligned(vgetq_lane_s32::<0>(words));
            to.add(step).cast::<i32>().write_unaligned(vgetq_lane_s32::<1>(words));
            to.add(2 * step).cast::<i32>().write_unaligned(vgetq_lane_s32::<2>(words));
            to.add(3 * step).cast::<i32>().write_unaligned(vgetq_lane_s32::<3>(words));
        }
    }
    // Even lanes are sums over k % 4 < 2, odd ones over the others; at most 8 * 2 * 127 in all.
    let halves = vadd_s16(vget_low_s16(pairs), vget_high_s16(pairs));
    let low = vget_lane_s16::<0>(halves) as i32 + vget_lane_s16::<2>(halves) as i32;
    let high = vget_lane_s16::<1>(halves) as i32 + vget_lane_s16::<3>(halves) as i32;
    Quantum { scale, sum: low + high, middle: middle([low, high]) }
}
