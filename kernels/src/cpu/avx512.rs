//! AVX-512 with VNNI: integer weights times int8 activations; everything else is AVX2's.
//!
//! `vpdpbusd` multiplies the unsigned codes of 16 rows as they lie and widens by itself, so one
//! loop serves int4 and int8, any number of rows, and no sum can overflow. (e2m1 is AVX2's as well.)
//! Never executed so far: no machine of ours has it. [`Isa::best`] therefore passes it by.

// A register tile is indexed alike where it is loaded, summed and stored.
#![allow(clippy::needless_range_loop)]

use super::acts::{Acts, Int8, MR};
use super::avx2::{self, middles, prefetch, widen};
use super::isa::{Isa, Level};
use super::linear::{IntPanel, Meta, SPAN, Scratch};
use quern_models::{PANEL, ZeroKind};
use std::arch::x86_64::*;
use std::ops::Range;

pub(crate) static ISA: Isa = Isa {
    name: "avx512",
    level: Level::Avx512,
    executed: false,
    detected: || {
        avx2::detected()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
    },
    int4_int8: panel::<4>,
    int8_int8: panel::<8>,
    peak,
    strips: false,
    ..avx2::ISA
};

/// # Safety
/// The instructions exist; shapes as [`super::linear::linear_panel`] checks them.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn panel<const BITS: usize>(
    w: &IntPanel,
    a: &Acts,
    rows: Range<usize>,
    tile: &mut [f32],
    scratch: &mut Scratch,
) {
    if w.mini.is_some() {
        // SAFETY: the caller's promises; AVX-512 includes AVX2.
        return unsafe { (avx2::ISA.int4_int8)(w, a, rows, tile, scratch) };
    }
    let (a, block) = (a.int8(w.block), w.block);
    let quad_bytes = BITS * 32;
    tile.fill(0.0);
    middles(w, 0, &mut scratch.meta);
    for b0 in (0..a.blocks()).step_by(SPAN / block) {
        let count = (a.blocks() - b0).min(SPAN / block);
        widen(w, b0, count, 0, &mut scratch.meta);
        let codes = &w.codes[b0 * block / 4 * quad_bytes..][..count * block / 4 * quad_bytes];
        for (i, codes) in codes.chunks_exact(block / 4 * quad_bytes).enumerate() {
            for first in rows.clone().step_by(MR) {
                let at = Block { a, first, b: b0 + i, slot: scratch.meta.slot[i], min: w.zero == ZeroKind::Min };
                // SAFETY: the instructions exist; `codes` are one block's; the rows are in `a` and `tile`.
                unsafe {
                    let y = tile.as_mut_ptr().add((first - rows.start) * PANEL);
                    match (rows.end - first).min(MR) {
                        1 => at.rows::<BITS, 1>(codes.as_ptr(), &scratch.meta, y),
                        2 => at.rows::<BITS, 2>(codes.as_ptr(), &scratch.meta, y),
                        3 => at.rows::<BITS, 3>(codes.as_ptr(), &scratch.meta, y),
                        _ => at.rows::<BITS, 4>(codes.as_ptr(), &scratch.meta, y),
                    }
                }
            }
        }
    }
}

/// One block of activation columns for one block of activation rows.
struct Block<'a> {
    a: &'a Int8,
    first: usize,
    b: usize,
    slot: usize,
    min: bool,
}

impl Block<'_> {
    /// `R` activation rows against the panel; adds to `y[R][64]`.
    ///
    /// # Safety
    /// The rows and the block are in `a`, its codes at `w`; `y` has `R` rows.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn rows<const BITS: usize, const R: usize>(&self, w: *const u8, meta: &Meta, y: *mut f32) {
        let q = self.a.q_ptr(self.first, self.b);
        let mut t = [[_mm512_setzero_si512(); 4]; R];
        for quad in 0..self.a.block() / 4 {
            // SAFETY: the caller's promises.
            unsafe {
                let codes = weights::<BITS>(w.add(quad * BITS * 32));
                for r in 0..R {
                    let a = _mm512_set1_epi32(q.add((quad * R + r) * 4).cast::<i32>().read_unaligned());
                    for v in 0..4 {
                        t[r][v] = _mm512_dpbusd_epi32(t[r][v], codes[v], a);
                    }
                }
            }
        }
        for v in 0..4 {
            // Rows of the vector's two halves.
            let (low, high) =
                if BITS == 4 { (v / 2 * 32 + v % 2 * 8, v / 2 * 32 + v % 2 * 8 + 16) } else { (v * 16, v * 16 + 8) };
            let (s, z, m) = meta.at(self.slot, 0);
            // SAFETY: `low` and `high` are at most 56; the rows are in `a`; `y` by the caller's promise.
            unsafe {
                let z = _mm512_castps_si512(join(z.cast(), low, high));
                let (s, m) = (join(s, low, high), join(m, low, high));
                for r in 0..R {
                    let scale = _mm512_set1_ps(*self.a.scale_ptr(self.first + r, self.b));
                    let sum = _mm512_set1_epi32(*self.a.sum_ptr(self.first + r, self.b));
                    let y = y.add(r * PANEL);
                    let t = _mm512_sub_epi32(t[r][v], _mm512_mullo_epi32(z, sum));
                    let scaled = _mm512_mul_ps(s, scale);
                    let mut out = _mm512_fmadd_ps(_mm512_cvtepi32_ps(t), scaled, join(y, low, high));
                    if self.min {
                        out = _mm512_fmadd_ps(_mm512_mul_ps(m, scale), _mm512_cvtepi32_ps(sum), out);
                    }
                    _mm256_storeu_ps(y.add(low), _mm512_castps512_ps256(out));
                    let upper = _mm512_extractf64x4_pd::<1>(_mm512_castps_pd(out));
                    _mm256_storeu_ps(y.add(high), _mm256_castpd_ps(upper));
                }
            }
        }
    }
}

/// Codes of 64 rows and 4 columns: four vectors of 16 rows.
///
/// # Safety
/// A quad of codes is readable at `w`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn weights<const BITS: usize>(w: *const u8) -> [__m512i; 4] {
    const AHEAD: usize = 4096;
    // SAFETY: the caller's promise.
    let load = |i: usize| unsafe { _mm512_loadu_si512(w.add(i * 64).cast()) };
    for line in 0..BITS / 2 {
        prefetch(w.wrapping_add(AHEAD + line * 64));
    }
    if BITS == 8 {
        return [load(0), load(1), load(2), load(3)];
    }
    let low = _mm512_set1_epi8(15);
    let (a, b) = (load(0), load(1));
    [
        _mm512_and_si512(a, low),
        _mm512_and_si512(_mm512_srli_epi16::<4>(a), low),
        _mm512_and_si512(b, low),
        _mm512_and_si512(_mm512_srli_epi16::<4>(b), low),
    ]
}

/// `p[low..low + 8]` and `p[high..high + 8]`.
///
/// # Safety
/// Both are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn join(p: *const f32, low: usize, high: usize) -> __m512 {
    // SAFETY: the caller's promise.
    let (low, high) = unsafe { (_mm256_loadu_ps(p.add(low)), _mm256_loadu_ps(p.add(high))) };
    let low = _mm512_castpd256_pd512(_mm256_castps_pd(low));
    _mm512_castpd_ps(_mm512_insertf64x4::<1>(low, _mm256_castps_pd(high)))
}

/// `vpdpbusd` on eight independent sums: 512 multiply-adds a round.
///
/// # Safety
/// The instructions exist.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn peak(rounds: u64) -> u64 {
    let (w, a) = (_mm512_set1_epi8(3), _mm512_set1_epi8(1));
    let mut acc = [_mm512_setzero_si512(); 8];
    for _ in 0..rounds {
        for acc in &mut acc {
            *acc = _mm512_dpbusd_epi32(*acc, w, std::hint::black_box(a));
        }
    }
    std::hint::black_box(acc);
    rounds * 512
}
