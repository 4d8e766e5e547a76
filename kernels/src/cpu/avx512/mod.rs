//! AVX-512 with VNNI: codes times int8 activations. Other linear kernels are AVX2's; attention's sixteen lanes are in
//! `attend/wide.rs`.
//!
//! `vpdpbusd` multiplies unsigned codes by signed activations, four columns of 16 weight rows at a time, and adds to
//! 32-bit sums: nothing can overflow and nothing need be widened. Legend as in [`super::avx2`].

// A register tile is indexed alike where it is loaded, summed and stored.
#![allow(clippy::needless_range_loop)]

pub(super) mod amx;
mod ints;

use super::avx2;
use super::isa::{Isa, Level};
use std::arch::x86_64::*;

pub(crate) static ISA: Isa = Isa {
    name: "avx512",
    level: Level::Avx512,
    executed: true,
    detected,
    int4_int8: ints::panel,
    int8_int8: ints::panel,
    peak,
    ..avx2::ISA
};

pub(super) fn detected() -> bool {
    avx2::detected()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vnni")
}

/// `vpdpbusd` on ten independent sums, as many as its latency and two ports take: 640 multiply-adds a round.
///
/// # Safety
/// The instructions exist.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn peak(rounds: u64) -> u64 {
    let (w, a) = (_mm512_set1_epi8(3), std::hint::black_box(_mm512_set1_epi8(1)));
    let mut acc = [_mm512_setzero_si512(); 10];
    for _ in 0..rounds {
        for acc in &mut acc {
            // SAFETY: registers only. As assembly, because the sums of a constant could be computed beforehand.
            unsafe {
                std::arch::asm!(
                    "vpdpbusd {acc}, {w}, {a}",
                    acc = inout(zmm_reg) *acc, w = in(zmm_reg) w, a = in(zmm_reg) a,
                    options(pure, nomem, nostack, preserves_flags)
                );
            }
        }
    }
    std::hint::black_box(acc);
    rounds * 640
}
