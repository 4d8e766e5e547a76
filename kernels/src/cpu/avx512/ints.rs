//! int4, e2m1 and int8 weights, int8 activations: straight from the codes, 128 columns (a span) at a time.
//!
//! A panel is treated as two halves of 32 weight rows, in two vectors each. A load of int4 codes holds both vectors'
//! codes `l + 16 h`, low and high nibbles. They are not taken apart: one sum is of the bytes as they are, one of the
//! bytes without their low nibbles, which are 16 `h`; the difference is that of `l`. So a load costs one operation
//! more, not three.
//! The nibbles of a load belong to weight rows 0..8 and 16..24 (low) and 8..16 and 24..32 (high) of its half; sums,
//! outputs and factors keep this order ([`join`]) inside a span. int8 codes are in the order of the rows.

use super::*;
use crate::cpu::acts::{Acts, Int8, MR};
use crate::cpu::avx2::{Ahead, CODE, MID, MIN, middles, slots};
use crate::cpu::linear::{IntPanel, Meta, SPAN, Scratch};
use crate::cpu::mini::E2M1;
use quern_models::{FloatType, PANEL, ZeroKind};
use std::ops::Range;

/// What the codes are, as a const generic.
pub(super) const INT4: u8 = 0;
pub(super) const FP4: u8 = 1;
pub(super) const INT8: u8 = 2;

/// Up to so many activation rows read scales in place; widening them beforehand would cost more.
const SCALES_AT_MOST: usize = 1;

/// # Safety
/// The instructions of [`ISA`] exist; shapes as [`crate::cpu::linear::linear_panel`] checks them.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn panel(w: &IntPanel, a: &Acts, rows: Range<usize>, tile: &mut [f32], scratch: &mut Scratch) {
    let a = a.int8(w.block);
    let in_place = rows.len() <= SCALES_AT_MOST && w.scale == FloatType::F16 && w.supers.is_empty() && w.mini.is_none();
    let of = Panel { w, a, rows };
    // SAFETY: the caller's promises; scales are read in place only if they are plain f16.
    unsafe {
        match (w.bits, w.mini.is_some(), in_place) {
            (4, true, _) => of.blocks::<FP4, MID, false>(tile, scratch),
            (4, _, true) => of.zeros::<INT4, true>(tile, scratch),
            (4, _, false) => of.zeros::<INT4, false>(tile, scratch),
            (_, _, true) => of.zeros::<INT8, true>(tile, scratch),
            (_, _, false) => of.zeros::<INT8, false>(tile, scratch),
        }
    }
}

/// A panel and the activation rows that it is to meet.
struct Panel<'a> {
    w: &'a IntPanel<'a>,
    a: &'a Int8,
    rows: Range<usize>,
}

impl Panel<'_> {
    /// # Safety
    /// As [`Panel::spans`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn zeros<const K: u8, const P: bool>(&self, tile: &mut [f32], scratch: &mut Scratch) {
        // SAFETY: the caller's promises.
        unsafe {
            match self.w.zero {
                ZeroKind::Mid => self.blocks::<K, MID, P>(tile, scratch),
                ZeroKind::Code => self.blocks::<K, CODE, P>(tile, scratch),
                ZeroKind::Min => self.blocks::<K, MIN, P>(tile, scratch),
            }
        }
    }

    /// # Safety
    /// As [`Panel::spans`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn blocks<const K: u8, const Z: u8, const P: bool>(&self, tile: &mut [f32], scratch: &mut Scratch) {
        // SAFETY: the caller's promises.
        unsafe {
            match self.w.block {
                32 => self.spans::<K, Z, 8, P>(tile, scratch),
                _ => self.spans::<K, Z, 4, P>(tile, scratch),
            }
        }
    }

    /// `P`: scales and minima are read in place, as f16. `QUADS` of 4 columns make an activation block.
    ///
    /// # Safety
    /// As [`panel`]; `K`, `Z` and `QUADS` are the weight's; with `P` its scales are f16 and not nested.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn spans<const K: u8, const Z: u8, const QUADS: usize, const P: bool>(
        &self,
        tile: &mut [f32],
        scratch: &mut Scratch,
    ) {
        let (w, a, rows) = (self.w, self.a, self.rows.clone());
        let (block, quad) = (QUADS * 4, if K == INT8 { 256 } else { 128 });
        let halves = w.strips.start / 2..w.strips.end.div_ceil(2);
        tile.fill(0.0);
        middles(w, 0, &mut scratch.meta);
        for b0 in (0..a.blocks()).step_by(SPAN / block) {
            let count = (a.blocks() - b0).min(SPAN / block);
            factors::<K, Z, P>(w, b0, count, 0, &mut scratch.meta);
            let codes = w.codes[b0 * QUADS * quad..][..count * QUADS * quad].as_ptr();
            let passes = rows.len().div_ceil(MR) * halves.len();
            let mut ahead = Ahead::new(codes, count * QUADS * quad / 64, passes * count);
            let at = Span { w, a, b0, count, meta: &scratch.meta };
            for first in rows.clone().step_by(MR) {
                let y = tile[(first - rows.start) * PANEL..].as_mut_ptr();
                let mb = (rows.end - first).min(MR);
                // SAFETY: `codes` are the span's; every block of rows is in `a` and in `tile`, because `rows` is.
                unsafe {
                    if mb <= 2 && halves.len() == 2 {
                        match mb {
                            1 => at.rows::<K, Z, QUADS, P, 2, 1>(codes, first, 0, &mut ahead, y),
                            _ => at.rows::<K, Z, QUADS, false, 2, 2>(codes, first, 0, &mut ahead, y),
                        }
                        continue;
                    }
                    for half in halves.clone() {
                        match mb {
                            1 => at.rows::<K, Z, QUADS, P, 1, 1>(codes, first, half, &mut ahead, y),
                            2 => at.rows::<K, Z, QUADS, false, 1, 2>(codes, first, half, &mut ahead, y),
                            3 => at.rows::<K, Z, QUADS, false, 1, 3>(codes, first, half, &mut ahead, y),
                            _ => at.rows::<K, Z, QUADS, false, 1, 4>(codes, first, half, &mut ahead, y),
                        }
                    }
                }
            }
        }
        if K != INT8 {
            tile.chunks_exact_mut(PANEL).for_each(|row| reorder_row(row.as_mut_ptr()));
        }
    }
}

/// Widens scales, minima and zeros (less `bias`) of a span into `meta`, in the order of the sums. `P`: zeros only.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn factors<const K: u8, const Z: u8, const P: bool>(
    w: &IntPanel,
    b0: usize,
    count: usize,
    bias: i32,
    meta: &mut Meta,
) {
    let plain = w.scale == FloatType::F16 && w.supers.is_empty() && K != FP4;
    slots(w, b0, count, bias, !P && !plain, meta);
    if K != INT8 {
        reorder::<Z>(meta, count, !P && !plain);
    }
    if !P && plain {
        plain_scales::<K, Z>(w, b0 * w.block / w.group, count, meta);
    }
}

/// Widens f16 scales and minima of a span, whose first group is `g`, into the order of the sums.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn plain_scales<const K: u8, const Z: u8>(w: &IntPanel, g: usize, count: usize, meta: &mut Meta) {
    for slot in 0..=meta.slot[count - 1] {
        for c in [0, 32] {
            let at = ((g + slot) * PANEL + c) * 2..((g + slot) * PANEL + c + 32) * 2;
            // SAFETY: a slot of the meta has 64 elements.
            unsafe {
                let s = widen::<K>(&w.scales[at.clone()]);
                _mm512_storeu_ps(meta.s[slot].as_mut_ptr().add(c), s[0]);
                _mm512_storeu_ps(meta.s[slot].as_mut_ptr().add(c + 16), s[1]);
                if Z == MIN {
                    let m = widen::<K>(&w.zeros[at]);
                    _mm512_storeu_ps(meta.m[slot].as_mut_ptr().add(c), m[0]);
                    _mm512_storeu_ps(meta.m[slot].as_mut_ptr().add(c + 16), m[1]);
                }
            }
        }
    }
}

/// 32 f16 of a half, as its two vectors.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn widen<const K: u8>(from: &[u8]) -> [__m512; 2] {
    assert_eq!(from.len(), 64);
    // SAFETY: 64 bytes are there.
    let v = unsafe { _mm512_loadu_si512(from.as_ptr().cast()) };
    // Eight of them are a quarter of the vector.
    let v = if K == INT8 { v } else { _mm512_shuffle_i64x2::<0b11_01_10_00>(v, v) };
    [_mm512_cvtph_ps(_mm512_castsi512_si256(v)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(v))]
}

/// Brings the factors of a span of 4-bit codes into the order of the sums.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn reorder<const Z: u8>(meta: &mut Meta, count: usize, wide: bool) {
    for slot in 0..=meta.slot[count - 1] {
        if wide {
            reorder_row(meta.s[slot].as_mut_ptr());
        }
        if wide && Z == MIN {
            reorder_row(meta.m[slot].as_mut_ptr());
        }
        if Z == CODE {
            reorder_row(meta.z[slot].as_mut_ptr().cast());
        }
    }
}

/// One row of 64, into the order of the sums or back: each half's second and third quarter change places.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn reorder_row(p: *mut f32) {
    for half in [p, p.wrapping_add(32)] {
        // SAFETY: private to this table, which passes rows of 64 elements of 4 bytes.
        unsafe {
            let both = [join(half), join(half.add(8))];
            _mm512_storeu_ps(half, both[0]);
            _mm512_storeu_ps(half.add(16), both[1]);
        }
    }
}

/// `p[0..8]` and `p[16..24]`: a vector of nibbles' rows.
///
/// # Safety
/// Both are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn join(p: *const f32) -> __m512 {
    // SAFETY: the caller's promise.
    let (low, high) = unsafe { (_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(16))) };
    _mm512_insertf32x8::<1>(_mm512_castps256_ps512(low), high)
}

/// One span of a panel.
struct Span<'a> {
    w: &'a IntPanel<'a>,
    a: &'a Int8,
    /// First activation block and their count.
    b0: usize,
    count: usize,
    meta: &'a Meta,
}

/// Sums or outputs of up to 4 pairs (half, row), of their two vectors.
type Pairs<T> = [[T; 2]; 4];

impl Span<'_> {
    /// `R` activation rows from `first` on against `N` halves from `half` on; adds to `y[R][64]`. `N * R` is at most 4.
    ///
    /// # Safety
    /// The rows and blocks are in `a`, the span's codes at `w`; `y` has `R` rows.
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn rows<const K: u8, const Z: u8, const QUADS: usize, const P: bool, const N: usize, const R: usize>(
        &self,
        w: *const u8,
        first: usize,
        half: usize,
        ahead: &mut Ahead,
        y: *mut f32,
    ) {
        let (a, m) = (self.a, self.a.m());
        let (quad, wide) = if K == INT8 { (256, 128) } else { (128, 64) };
        let (mut w, mut q) = (w.wrapping_add(half * wide), a.q_ptr(first, self.b0));
        let (mut sa, mut sums) = (a.scale_ptr(first, self.b0), a.sum_ptr(first, self.b0));
        let mut held: Pairs<__m512> = [[_mm512_setzero_ps(); 2]; 4];
        // SAFETY: the caller's promise.
        unsafe { exchange::<N, R, false>(y, half, &mut held) };
        for (i, slot) in self.meta.slot[..self.count].iter().enumerate() {
            // SAFETY: the caller's promises; a meta row has 64 elements, `half + N <= 2`; `in_place` says what
            // `Factors::halves` needs.
            unsafe {
                ahead.ask();
                let t = dots::<K, Z, QUADS, N, R>(w, q, sums);
                for n in 0..N {
                    let c = (half + n) * 32;
                    let of = if P {
                        let g = (self.b0 + i) * QUADS * 4 / self.w.group;
                        Factors::halves::<K, Z>(self.w, g, self.meta, *slot, c)
                    } else {
                        Factors::wide::<Z>(self.meta, *slot, c)
                    };
                    for r in 0..R {
                        let (scale, sum) = (_mm512_set1_ps(*sa.add(r)), _mm512_set1_epi32(*sums.add(r)));
                        for v in 0..2 {
                            let y = &mut held[n * R + r][v];
                            *y = fold::<Z>(t[n * R + r][v], of[v], scale, sum, *y);
                        }
                    }
                }
            }
            w = w.wrapping_add(QUADS * quad);
            q = q.wrapping_add(m * QUADS * 4);
            (sa, sums) = (sa.wrapping_add(m), sums.wrapping_add(m));
        }
        // SAFETY: the caller's promise.
        unsafe { exchange::<N, R, true>(y, half, &mut held) };
    }
}

/// Fetches the outputs of `R` rows and `N` halves from `half` on, `[half * R + row]`, or puts them back.
///
/// # Safety
/// `y` has `R` rows of 64.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn exchange<const N: usize, const R: usize, const BACK: bool>(
    y: *mut f32,
    half: usize,
    held: &mut Pairs<__m512>,
) {
    for n in 0..N {
        for r in 0..R {
            for v in 0..2 {
                let held = &mut held[n * R + r][v];
                // SAFETY: the caller's promise; `half + N <= 2`.
                unsafe {
                    let at = y.add(r * PANEL + (half + n) * 32 + v * 16);
                    if BACK {
                        _mm512_storeu_ps(at, *held);
                    } else {
                        *held = _mm512_loadu_ps(at);
                    }
                }
            }
        }
    }
}

/// `sum(u * a)` over one activation block, less `middle * sum(a)` with `Z` = MID: `[half * R + row][vector]`.
///
/// # Safety
/// `w`, `a` and `sums` are readable for the block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn dots<const K: u8, const Z: u8, const QUADS: usize, const N: usize, const R: usize>(
    w: *const u8,
    a: *const i8,
    sums: *const i32,
) -> Pairs<__m512i> {
    let mut acc = [[_mm512_setzero_si512(); 2]; 4];
    if Z == MID {
        for r in 0..R {
            // SAFETY: the caller's promise.
            let less = _mm512_set1_epi32(unsafe { *sums.add(r) }.wrapping_neg());
            let start = match K {
                // Of bytes `l + 16 h` and of `16 h`, where 8 means zero.
                INT4 => {
                    let high = _mm512_slli_epi32::<7>(less);
                    [_mm512_add_epi32(high, _mm512_slli_epi32::<3>(less)), high]
                }
                FP4 => [_mm512_slli_epi32::<4>(less); 2],
                _ => [_mm512_slli_epi32::<7>(less); 2],
            };
            for n in 0..N {
                acc[n * R + r] = start;
            }
        }
    }
    let (quad, wide) = if K == INT8 { (256, 128) } else { (128, 64) };
    for q in 0..QUADS {
        for n in 0..N {
            // SAFETY: the caller's promise: quad `q` is in the block.
            unsafe {
                let u = codes::<K>(w.add(q * quad + n * wide));
                for r in 0..R {
                    let a = _mm512_set1_epi32(a.add((q * R + r) * 4).cast::<i32>().read_unaligned());
                    for v in 0..2 {
                        acc[n * R + r][v] = _mm512_dpbusd_epi32(acc[n * R + r][v], u[v], a);
                    }
                }
            }
        }
    }
    if K == INT4 {
        for [low, high] in &mut acc[..N * R] {
            *low = _mm512_sub_epi32(*low, *high);
            *high = _mm512_srai_epi32::<4>(*high);
        }
    }
    acc
}

/// Codes of a half panel's quad: for int4 the bytes as they are, and without their low nibbles.
///
/// # Safety
/// A half's quad is readable at `w`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn codes<const K: u8>(w: *const u8) -> [__m512i; 2] {
    // SAFETY: the caller's promise; the table has 16 bytes.
    unsafe {
        let v = _mm512_loadu_si512(w.cast());
        match K {
            INT4 => [v, _mm512_and_si512(v, _mm512_set1_epi8(-16))],
            FP4 => {
                let (low, table) = (_mm512_set1_epi8(15), _mm_loadu_si128(E2M1.as_ptr().cast()));
                let table = _mm512_broadcast_i32x4(table);
                let high = _mm512_and_si512(_mm512_srli_epi16::<4>(v), low);
                [_mm512_shuffle_epi8(table, _mm512_and_si512(v, low)), _mm512_shuffle_epi8(table, high)]
            }
            _ => [v, _mm512_loadu_si512(w.add(64).cast())],
        }
    }
}

/// `fma(t - z * sum, s * scale, y)` on 16 outputs, then with a minimum `fma(m * scale, sum, y)`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn fold<const Z: u8>(mut t: __m512i, of: Factors, scale: __m512, sum: __m512i, y: __m512) -> __m512 {
    if Z == CODE {
        // Zeros are 16-bit with an upper half of 0 and |sum| < 2^15: the product is exact.
        t = _mm512_sub_epi32(t, _mm512_madd_epi16(of.z, sum));
    }
    let out = _mm512_fmadd_ps(_mm512_cvtepi32_ps(t), _mm512_mul_ps(of.s, scale), y);
    if Z == MIN {
        return _mm512_fmadd_ps(_mm512_mul_ps(of.m, scale), _mm512_cvtepi32_ps(sum), out);
    }
    out
}

/// Scales, zeros and minima of 16 outputs; what the scheme lacks is anything.
#[derive(Clone, Copy)]
struct Factors {
    s: __m512,
    z: __m512i,
    m: __m512,
}

impl Factors {
    /// Of a half's two vectors, from row `c` of the panel on, widened and in order.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    fn wide<const Z: u8>(meta: &Meta, slot: usize, c: usize) -> [Factors; 2] {
        [0, 1].map(|v| {
            let (s, z, m) = meta.at(slot, c + v * 16);
            // SAFETY: `slot` and `c` come from this module's loops: the 16 elements are the meta's.
            unsafe {
                let s = _mm512_loadu_ps(s);
                let z = if Z == CODE { _mm512_loadu_si512(z.cast()) } else { _mm512_setzero_si512() };
                Factors { s, z, m: if Z == MIN { _mm512_loadu_ps(m) } else { s } }
            }
        })
    }

    /// The same, scales and minima straight from their f16 planes: group `g`.
    ///
    /// # Safety
    /// The panel's scales, and minima if `Z` says so, are f16 and not nested; the group exists.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn halves<const K: u8, const Z: u8>(
        w: &IntPanel,
        g: usize,
        meta: &Meta,
        slot: usize,
        c: usize,
    ) -> [Factors; 2] {
        // SAFETY: the caller's promise: 32 halves from `c` on are the group's.
        let at = |plane: &[u8]| unsafe {
            widen::<K>(std::slice::from_raw_parts(plane.as_ptr().add((g * PANEL + c) * 2), 64))
        };
        let s = at(w.scales);
        let m = if Z == MIN { at(w.zeros) } else { s };
        [0, 1].map(|v| {
            let z = meta.at(slot, c + v * 16).1;
            // SAFETY: as in `wide`.
            let z = if Z == CODE { unsafe { _mm512_loadu_si512(z.cast()) } } else { _mm512_setzero_si512() };
            Factors { s: s[v], z, m: m[v] }
        })
    }
}
