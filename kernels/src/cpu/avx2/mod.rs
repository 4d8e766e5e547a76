//! AVX2 + FMA + F16C.
//!
//! A 32-byte load of P64 codes holds 4 consecutive columns of 8 rows, one row per 32-bit lane, so
//! a lane is an output and no sum ever crosses lanes. Files: [`int4`] and [`int8`] with int8
//! activations, [`exact`] for weights of codes with f32 activations, [`float`], [`quantize`]; [`vnni`] is a table of its own.
//! Legend: `w` weights, `a` int8 activations, `x` f32 ones, `s` scales, `z` zero codes, `m` minima,
//! `y` outputs, `b` activation block, `r` activation row.

// A register tile is indexed alike where it is loaded, summed and stored.
#![allow(clippy::needless_range_loop)]

mod dots;
mod exact;
mod float;
mod int4;
mod int8;
mod quantize;
pub(super) mod vnni;

use super::isa::{Isa, Level};
use super::linear::{IntPanel, Meta};
use super::mini::E2M1;
use quern_models::{FloatType, Mini, PANEL, ZeroKind};
use std::arch::x86_64::*;

pub(crate) static ISA: Isa = Isa {
    name: "avx2",
    level: Level::Avx2,
    executed: true,
    detected,
    quantize: quantize::block,
    plain: |_| false,
    int4_int8: int4::panel::<false>,
    int4_f32: exact::panel,
    int8_int8: int8::panel::<false>,
    int8_f32: exact::panel,
    float: float::panel,
    peak: dots::peak,
    strips: true,
    rows: 32,
};

pub(super) fn detected() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

/// How far ahead of a load its cache line is asked for, bytes: 4-8 KiB measured best at m = 1.
const AHEAD: usize = 4096;

/// The same for scales.
const SCALES_AHEAD: usize = 1024;

/// Up to so many activation rows read scales in place: they use each once or twice, and widening them beforehand would
/// cost as much as using them.
pub(super) const SCALES_AT_MOST: usize = 2;

/// The cache lines of the next span, asked for a few at a time: more at once than the cache can have outstanding would
/// stop the loads between them, and computing would wait for memory instead of hiding it.
pub(super) struct Ahead {
    at: *const u8,
    left: usize,
    /// Lines for each block of columns that is computed.
    each: usize,
}

impl Ahead {
    /// For `lines` from [`AHEAD`] after `codes` on, over so many calls of [`Ahead::ask`].
    pub fn new(codes: *const u8, lines: usize, calls: usize) -> Ahead {
        Ahead { at: codes.wrapping_add(AHEAD), left: lines, each: lines.div_ceil(calls) }
    }

    /// Asks for the next few.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub fn ask(&mut self) {
        for _ in 0..self.each.min(self.left) {
            prefetch(self.at);
            self.at = self.at.wrapping_add(64);
            self.left -= 1;
        }
    }
}

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

/// Zeros of all slots of `meta`, where none are stored; see [`widen`]. To be called before it, once a panel.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn middles(w: &IntPanel, bias: i32, meta: &mut Meta) {
    let z = if w.zero == ZeroKind::Mid { w.middle() } else { 0 };
    let z = _mm256_set1_epi32((z - bias) & 0xffff);
    for slot in &mut meta.z {
        for to in slot.chunks_exact_mut(8) {
            // SAFETY: a chunk has 8 elements.
            unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), z) }
        }
    }
}

/// Widens scales, stored zeros and minima of blocks `b0..b0 + count` into `meta`.
///
/// Zeros are kept less `bias`, as 16-bit numbers in 32-bit lanes: a factor for `vpmaddwd`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn widen(w: &IntPanel, b0: usize, count: usize, bias: i32, meta: &mut Meta) {
    slots(w, b0, count, bias, true, meta);
}

/// [`widen`]; scales and minima only if `wide`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn slots(w: &IntPanel, b0: usize, count: usize, bias: i32, wide: bool, meta: &mut Meta) {
    let mut slot = 0;
    for i in 0..count {
        let g = (b0 + i) * w.block / w.group;
        if i > 0 && g == (b0 + i - 1) * w.block / w.group {
            meta.slot[i] = slot;
            continue;
        }
        slot += (i > 0) as usize;
        meta.slot[i] = slot;
        // A kilobyte ahead: codes are asked for, and without it scales would be what is waited for.
        let scale = if w.supers.is_empty() { w.scale.size() } else { 1 };
        for line in (0..PANEL * scale).step_by(64) {
            prefetch(w.scales.as_ptr().wrapping_add(g * PANEL * scale + SCALES_AHEAD + line));
        }
        if !wide {
        } else if w.supers.is_empty() {
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
        if w.zero == ZeroKind::Code && w.bits == 4 {
            zeros4(&w.zeros[g * 32..][..32], bias, &mut meta.z[slot]);
        } else if w.zero == ZeroKind::Code {
            for (z, c) in meta.z[slot].iter_mut().zip(&w.zeros[g * PANEL..][..PANEL]) {
                *z = (*c as i32 - bias) & 0xffff;
            }
        }
    }
}

/// 64 floats, widened, times `unit`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn floats(kind: FloatType, from: &[u8], unit: f32, to: &mut [f32; PANEL]) {
    assert_eq!(from.len(), PANEL * kind.size());
    let unit = _mm256_set1_ps(unit);
    for i in (0..PANEL).step_by(8) {
        // SAFETY: `from` has 64 elements by the assertion, `to` by its type.
        unsafe {
            let wide = _mm256_mul_ps(load8(kind, from.as_ptr(), i), unit);
            _mm256_storeu_ps(to.as_mut_ptr().add(i), wide);
        }
    }
}

/// Scales (`level` 0, of plane `lower`) or minima (1) of group `g`, both levels multiplied.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn nested(w: &IntPanel, lower: &[u8], g: usize, level: usize, to: &mut [f32; PANEL]) {
    let upper = w.upper(g, level).unwrap_or(&[]);
    let lower = &lower[g * PANEL..][..PANEL];
    assert_eq!(upper.len(), PANEL * FloatType::F16.size());
    for i in (0..PANEL).step_by(8) {
        // SAFETY: `lower` and `upper` have 64 elements, `to` by its type.
        unsafe {
            let lower = _mm256_cvtepi8_epi32(_mm_loadl_epi64(lower.as_ptr().add(i).cast()));
            let upper = load8(FloatType::F16, upper.as_ptr(), i);
            _mm256_storeu_ps(to.as_mut_ptr().add(i), _mm256_mul_ps(upper, _mm256_cvtepi32_ps(lower)));
        }
    }
}

/// 64 zero codes of 4 bits: byte `8i + l` holds rows `16i + l` (low) and `16i + 8 + l` (high).
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn zeros4(from: &[u8], bias: i32, to: &mut [i32; PANEL]) {
    let (low, bias) = (_mm256_set1_epi32(15), _mm256_set1_epi32(bias));
    let word = |z: __m256i| _mm256_and_si256(_mm256_sub_epi32(z, bias), _mm256_set1_epi32(0xffff));
    for (bytes, to) in from.chunks_exact(8).zip(to.chunks_exact_mut(16)) {
        // SAFETY: 8 bytes are read, 16 elements written.
        unsafe {
            let both = _mm256_cvtepu8_epi32(_mm_loadl_epi64(bytes.as_ptr().cast()));
            let to = to.as_mut_ptr();
            _mm256_storeu_si256(to.cast(), word(_mm256_and_si256(both, low)));
            _mm256_storeu_si256(to.add(8).cast(), word(_mm256_srli_epi32::<4>(both)));
        }
    }
}

/// The integers of e2m1 codes 0..16 (nibbles in bytes).
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn e2m1(codes: __m256i) -> __m256i {
    // SAFETY: the table has 16 bytes.
    let table = unsafe { _mm_loadu_si128(E2M1.as_ptr().cast()) };
    _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes)
}

/// Zero kinds as const generics, which cannot be a [`ZeroKind`].
pub(super) const MID: u8 = 0;
pub(super) const CODE: u8 = 1;
pub(super) const MIN: u8 = 2;
/// The middle code of e2m1, whose codes are looked up.
const FP4: u8 = 3;

/// A block's scale and sum of one activation row.
#[derive(Clone, Copy)]
struct RowBlock {
    scale: f32,
    sum: i32,
}

/// `fma(t - z * sum, s * scale, y)` on 8 outputs, then with a minimum `fma(m * scale, sum, y)`.
/// `SUB`: there is a `z` to subtract. `Z`: the zero kind.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn fold<const SUB: bool, const Z: u8>(mut t: __m256i, of: Factors, row: RowBlock, y: __m256) -> __m256 {
    let (scale, sum) = (_mm256_set1_ps(row.scale), _mm256_set1_epi32(row.sum));
    if SUB {
        // Zeros are 16-bit with an upper half of 0 and |sum| < 2^15: the product is exact.
        t = _mm256_sub_epi32(t, _mm256_madd_epi16(of.z, sum));
    }
    let out = _mm256_fmadd_ps(_mm256_cvtepi32_ps(t), _mm256_mul_ps(of.s, scale), y);
    if Z == MIN {
        return _mm256_fmadd_ps(_mm256_mul_ps(of.m, scale), _mm256_cvtepi32_ps(sum), out);
    }
    out
}

/// Scales, zeros and minima of 8 outputs; what the scheme lacks is anything.
#[derive(Clone, Copy)]
struct Factors {
    s: __m256,
    z: __m256i,
    m: __m256,
}

impl Factors {
    /// From row `c` of the panel on, widened.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn wide(meta: &Meta, slot: usize, c: usize) -> Factors {
        let (s, z, m) = meta.at(slot, c);
        // SAFETY: `slot` and `c` come from this module's loops: the 8 elements are the meta's.
        unsafe { Factors { s: load(s), z: _mm256_loadu_si256(z.cast()), m: load(m) } }
    }

    /// The same, scales and minima straight from their f16 planes: group `g`.
    ///
    /// # Safety
    /// The panel's scales, and minima if `Z` says so, are f16 and not nested; the group exists.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn halves<const Z: u8>(w: &IntPanel, g: usize, meta: &Meta, slot: usize, c: usize) -> Factors {
        let z = meta.at(slot, c).1;
        // SAFETY: the caller's promise; zeros as in `wide`.
        unsafe {
            let s = load8(FloatType::F16, w.scales.as_ptr(), g * PANEL + c);
            let m = if Z == MIN { load8(FloatType::F16, w.zeros.as_ptr(), g * PANEL + c) } else { s };
            Factors { s, z: _mm256_loadu_si256(z.cast()), m }
        }
    }
}

/// Outputs of up to 4 (strip, row) pairs, low and high 8 weight rows.
///
/// A tile is fetched once a span and put back at its end: outputs are 256 bytes from row to row, and stores
/// between the loads of a block slow both down where they meet in the lowest 12 bits of an address (ARCHITECTURE.md).
type Outputs = [[__m256; 2]; 4];

/// Fetches the outputs of `R` rows and `N` strips from `strip` on, `[strip * R + row]`, or puts them back.
///
/// # Safety
/// `y` has `R` rows of 64.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn exchange<const N: usize, const R: usize, const BACK: bool>(y: *mut f32, strip: usize, held: &mut Outputs) {
    for n in 0..N {
        for r in 0..R {
            for h in 0..2 {
                // SAFETY: the caller's promise; `strip + N <= 4`.
                unsafe {
                    let at = y.add(r * PANEL + (strip + n) * 16 + h * 8);
                    if BACK {
                        _mm256_storeu_ps(at, held[n * R + r][h]);
                    } else {
                        held[n * R + r][h] = load(at);
                    }
                }
            }
        }
    }
}
