//! Codes times int8 activations on AMX: many rows, tiles of 16 activation rows x 16 weight rows.
//!
//! `tdpbssd` multiplies a tile `[16 rows][block]` of activations by one `[block / 4][16 weight rows][4]` of weights;
//! P64 holds codes of a panel in just this order, four tiles beside each other, and activations are plain rows
//! ([`crate::cpu::acts`]). A tile's product is of one activation block, so it is stored, scaled and added to the outputs
//! before the next. Codes are unpacked to signed bytes once a span: the integer that means zero is subtracted there,
//! unless it does not fit a byte (int8 with stored zeros or minima).
//!
//! What was measured of the processor, and shapes the loop (ARCHITECTURE.md): a product takes 16 cycles, but is there
//! only after 52, and a tile's store waits for it and holds up what follows, so a product is stored after the next
//! one was asked for. While tile instructions are about, 512-bit multiplications and conversions take place on one port
//! instead of two; additions do not, so integers become floats by two additions ([`MAGIC`]). Loads of tiles cost more
//! than their bytes: four tiles of activations stay in registers for the four strips of a span. Products of a strip of
//! 16 weight rows alternate with folds of the strip before it, tile by tile.
//!
//! Instructions: Intel's Architecture Instruction Set Extensions Programming Reference, chapter 3 (AMX); they have
//! no stable intrinsics, so they are assembly. No compiled code uses tile registers, so none are saved.

use super::ints::{self, FP4, INT4, INT8, factors};
use super::*;
use crate::cpu::acts::{Acts, Int8, TILE};
use crate::cpu::avx2::{CODE, MID, MIN, middles, prefetch};
use crate::cpu::linear::{IntPanel, Meta, SPAN, Scratch};
use crate::cpu::mini::E2M1;
use quern_models::{PANEL, ZeroKind};
use std::arch::asm;
use std::ops::Range;

pub(crate) static ISA: Isa =
    Isa { name: "amx", detected, int4_int8: panel, int8_int8: panel, peak, rows: 128, plain: enough, ..super::ISA };

/// So many rows are worth unpacking spans: fewer are left to `vpdpbusd`, and so are those that would leave a second
/// tile all but empty.
fn enough(m: usize) -> bool {
    m == TILE || m >= TILE + 4
}

/// 1.5 * 2^23. An integer below 2^22, added to the bits of this float, is added to its value.
const MAGIC: f32 = 12_582_912.0;

/// Bytes of an unpacked span of 16 weight rows.
const STRIP: usize = TILE * SPAN;

/// The processor has AMX for int8, the system saves its registers, and lets this process use them.
fn detected() -> bool {
    use std::sync::OnceLock;
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| super::detected() && has_amx() && permitted())
}

/// CPUID leaf 7: AMX-TILE and AMX-INT8.
fn has_amx() -> bool {
    let leaf = |n| __cpuid_count(n, 0);
    leaf(0).eax >= 7 && leaf(7).edx >> 24 & 3 == 3
}

/// Linux gives tile registers to processes that ask (`Documentation/arch/x86/xstate.rst`): 18 is their state.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_PRCTL: u64 = 158;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    let result: i64;
    // SAFETY: a system call that takes numbers and changes nothing but what this process may use; the kernel
    // overwrites rcx and r11.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result, in("rdi") ARCH_REQ_XCOMP_PERM, in("rsi") 18u64,
            lateout("rcx") _, lateout("r11") _,
            options(nostack)
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// # Safety
/// The instructions of [`ISA`] exist; shapes as [`crate::cpu::linear::linear_panel`] checks them.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn panel(w: &IntPanel, a: &Acts, rows: Range<usize>, tile: &mut [f32], scratch: &mut Scratch) {
    let of = Panel { w, a: a.int8(w.block), rows: rows.clone() };
    if !of.a.plain() {
        // SAFETY: the caller's promises.
        return unsafe { ints::panel(w, a, rows, tile, scratch) };
    }
    // SAFETY: the caller's promises.
    unsafe {
        match (w.bits, w.mini.is_some(), w.zero) {
            (4, true, _) => of.blocks::<FP4, MID>(tile, scratch),
            (4, _, ZeroKind::Mid) => of.blocks::<INT4, MID>(tile, scratch),
            (4, _, ZeroKind::Code) => of.blocks::<INT4, CODE>(tile, scratch),
            (4, _, ZeroKind::Min) => of.blocks::<INT4, MIN>(tile, scratch),
            (_, _, ZeroKind::Mid) => of.blocks::<INT8, MID>(tile, scratch),
            (_, _, ZeroKind::Code) => of.blocks::<INT8, CODE>(tile, scratch),
            (_, _, ZeroKind::Min) => of.blocks::<INT8, MIN>(tile, scratch),
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
    unsafe fn blocks<const K: u8, const Z: u8>(&self, tile: &mut [f32], scratch: &mut Scratch) {
        // SAFETY: the caller's promises.
        unsafe {
            match self.w.block {
                32 => self.spans::<K, Z, 8>(tile, scratch),
                _ => self.spans::<K, Z, 4>(tile, scratch),
            }
        }
    }

    /// `QUADS` of 4 columns make an activation block.
    ///
    /// # Safety
    /// As [`panel`]; rows are plain; `K`, `Z` and `QUADS` are the weight's.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn spans<const K: u8, const Z: u8, const QUADS: usize>(&self, tile: &mut [f32], scratch: &mut Scratch) {
        let (w, a, rows) = (self.w, self.a, self.rows.clone());
        let (block, quad) = (QUADS * 4, if K == INT8 { 256 } else { 128 });
        let bias = if K == INT8 { 128 } else { 0 };
        scratch.bytes.reserve(4 * STRIP + size_of::<Work>());
        let unpacked = scratch.bytes.ptr();
        // SAFETY: the buffer starts on a 64-byte boundary, as strips end, and has room for the work behind them, which
        // is numbers: any bytes are one, and all were written once.
        let work = unsafe { &mut *unpacked.add(4 * STRIP).cast::<Work>() };
        let groups = rows.len().div_ceil(TILE);
        scratch.partial.reserve(groups * TILE * PANEL);
        let sums = scratch.partial.ptr();
        configure(block);
        middles(w, bias, &mut scratch.meta);
        for b0 in (0..a.blocks()).step_by(SPAN / block) {
            let count = (a.blocks() - b0).min(SPAN / block);
            factors::<K, Z, false>(w, b0, count, bias, &mut scratch.meta);
            let codes = &w.codes[b0 * QUADS * quad..][..count * QUADS * quad];
            let ahead = codes.as_ptr().wrapping_add(codes.len());
            let span = Span { a, b0, count, w: unpacked, meta: &scratch.meta, ahead };
            // SAFETY: `unpacked` has room for a span; rows of groups are in `a`, because `rows` is, their sums in `sums`.
            unsafe {
                unpack::<K, Z, QUADS>(codes, &scratch.meta, unpacked);
                let sums = |group: usize, strip: usize| sums.add((group * 4 + strip) * TILE * TILE);
                work.last_to = work.nowhere.as_mut_ptr();
                work.units = 0;
                for group in 0..groups {
                    let first = rows.start + group * TILE;
                    work.load::<K, Z>(&span, group, first, (rows.end - first).min(TILE));
                    for strip in 0..4 {
                        let make = Some((first, strip));
                        let fold = match (group, strip) {
                            (0, 0) => None,
                            (_, 0) => Some((group - 1, 3, sums(group - 1, 3))),
                            _ => Some((group, strip - 1, sums(group, strip - 1))),
                        };
                        work.unit::<K, Z, QUADS>(&span, make, fold);
                    }
                }
                store_odd(work.last_to);
                work.unit::<K, Z, QUADS>(&span, None, Some((groups - 1, 3, sums(groups - 1, 3))));
            }
        }
        release();
        for (r, row) in tile.chunks_exact_mut(PANEL).enumerate() {
            // SAFETY: the row's group has sums; a row of the tile has 64 elements.
            unsafe { put::<K>(sums.add((r / TILE * 4 * TILE + r % TILE) * TILE), row.as_mut_ptr()) }
        }
    }
}

/// A row's outputs, whose strips are 16 rows apart at `from`, into the order of the weight.
///
/// # Safety
/// They are readable; `to` is writable for 64.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn put<const K: u8>(from: *const f32, to: *mut f32) {
    for half in 0..2 {
        // SAFETY: the caller's promises.
        unsafe {
            let strip = |i: usize| _mm512_loadu_ps(from.add((half * 2 + i) * TILE * TILE));
            let (mut low, mut high) = (strip(0), strip(1));
            if K != INT8 {
                // As `reorder_row`: the second and third quarter change places.
                let third = _mm512_shuffle_f32x4::<0b11_10_11_10>(low, high);
                low = _mm512_shuffle_f32x4::<0b01_00_01_00>(low, high);
                high = third;
            }
            _mm512_storeu_ps(to.add(half * 32), low);
            _mm512_storeu_ps(to.add(half * 32 + TILE), high);
        }
    }
}

/// Unpacks a span into four strips `[quad][16 weight rows][4]` of signed bytes, weight rows in the order of
/// [`put`].
///
/// # Safety
/// `to` is writable for four strips.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn unpack<const K: u8, const Z: u8, const QUADS: usize>(codes: &[u8], meta: &Meta, to: *mut u8) {
    let low = _mm512_set1_epi8(15);
    // SAFETY: the table has 16 bytes.
    let table = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(E2M1.as_ptr().cast()) });
    for (q, quad) in codes.chunks_exact(if K == INT8 { 256 } else { 128 }).enumerate() {
        let zero = |v: usize| match (K, Z) {
            (INT4, MID) => _mm512_set1_epi8(8),
            (FP4, _) => _mm512_set1_epi8(16),
            (INT4, CODE) => {
                // SAFETY: a slot has 64 elements. A zero's low byte, four times.
                let z = unsafe { _mm512_loadu_si512(meta.at(meta.slot[q / QUADS], v * TILE).1.cast()) };
                let z = _mm512_or_si512(z, _mm512_slli_epi32::<8>(z));
                _mm512_or_si512(z, _mm512_slli_epi32::<16>(z))
            }
            _ => _mm512_setzero_si512(),
        };
        for part in 0..quad.len() / 64 {
            // SAFETY: `part` is in the quad; the caller's promise for `to`, and a span has 32 quads.
            unsafe {
                let v = _mm512_loadu_si512(quad.as_ptr().add(part * 64).cast());
                let put = |strip: usize, v: __m512i| _mm512_storeu_si512(to.add(strip * STRIP + q * 64).cast(), v);
                if K == INT8 {
                    put(part, _mm512_xor_si512(v, _mm512_set1_epi8(-128)));
                    continue;
                }
                let mut codes = [_mm512_and_si512(v, low), _mm512_and_si512(_mm512_srli_epi16::<4>(v), low)];
                for (i, codes) in codes.iter_mut().enumerate() {
                    if K == FP4 {
                        *codes = _mm512_shuffle_epi8(table, *codes);
                    }
                    if Z != MIN {
                        *codes = _mm512_sub_epi8(*codes, zero(part * 2 + i));
                    }
                    put(part * 2 + i, *codes);
                }
            }
        }
    }
}

/// One span of a panel and of the activations.
struct Span<'a> {
    a: &'a Int8,
    /// First activation block and their count.
    b0: usize,
    count: usize,
    /// Unpacked strips.
    w: *const u8,
    meta: &'a Meta,
    /// Codes of the next span, to be asked for.
    ahead: *const u8,
}

/// Blocks of a span, at most.
const BLOCKS: usize = SPAN / 16;

/// What a thread works with besides unpacked codes.
#[repr(C, align(64))]
struct Work {
    /// Products of two strips, by block: those of the next are computed while this one's are added up.
    products: [[[i32; TILE * TILE]; BLOCKS]; 2],
    /// Scales and sums of two groups of rows, `[block][row]`; of rows that do not exist, zero.
    scales: [[[f32; TILE]; BLOCKS]; 2],
    sums: [[[f32; TILE]; BLOCKS]; 2],
    /// Where the product that is not stored yet belongs; before the first, to `nowhere`.
    last_to: *mut i32,
    nowhere: [i32; TILE * TILE],
    /// Units of this span that were begun.
    units: usize,
}

impl Work {
    /// Takes scales and sums of `n` rows from `first` on.
    ///
    /// # Safety
    /// They are in the span's activations.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn load<const K: u8, const Z: u8>(&mut self, span: &Span, group: usize, first: usize, n: usize) {
        let some = 0xffffu16 >> (TILE - n);
        for i in 0..span.count {
            // SAFETY: the caller's promise; lanes that are masked out are not read.
            unsafe {
                let s = _mm512_maskz_loadu_ps(some, span.a.scale_ptr(first, span.b0 + i));
                _mm512_storeu_ps(self.scales[group % 2][i].as_mut_ptr(), s);
                if Z == MIN || K == INT8 && Z != MID {
                    let s = _mm512_maskz_loadu_epi32(some, span.a.sum_ptr(first, span.b0 + i));
                    _mm512_storeu_ps(self.sums[group % 2][i].as_mut_ptr(), _mm512_cvtepi32_ps(s));
                }
            }
        }
    }

    /// Makes the products of a strip and the rows from `first` on, `(first, strip)`, block by block, and meanwhile adds
    /// those of the unit before to its outputs, `(group, strip, y[16][16])`. The last product is left in its register:
    /// `last_to` says where it belongs.
    ///
    /// # Safety
    /// Rows, blocks and outputs exist; tiles are configured for the block; strip 0 of a group comes first.
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn unit<const K: u8, const Z: u8, const QUADS: usize>(
        &mut self,
        span: &Span,
        make: Option<(usize, usize)>,
        fold: Option<(usize, usize, *mut f32)>,
    ) {
        let (group, folded, y) = fold.unwrap_or((0, 3, std::ptr::null_mut()));
        let (first, made) = make.unwrap_or((0, 0));
        let fresh = QUADS == 4 || made == 0;
        let a = span.a.q_ptr(first, span.b0);
        let next = span.a.m() * QUADS * 4;
        let w = span.w.wrapping_add(made * STRIP);
        // The first four units ask for 4 KiB: 128 columns of 4 bits.
        let asked = self.units * 1024;
        self.units += 1;
        let mut held = [_mm512_setzero_ps(); TILE];
        if fold.is_some() && span.b0 > 0 {
            for r in 0..TILE {
                // SAFETY: the caller's promise.
                held[r] = unsafe { _mm512_loadu_ps(y.add(r * TILE)) };
            }
        }
        macro_rules! step {
            ($i:expr, $product:ident) => {
                if $i < span.count {
                    let i = $i;
                    if asked < 4096 {
                        for line in 0..4 {
                            prefetch(span.ahead.wrapping_add(asked + (i * 4 + line) * 64));
                        }
                    }
                    if make.is_some() {
                        let (a, w) = (a.wrapping_add(i * next), w.wrapping_add(i * QUADS * 64));
                        // SAFETY: the caller's promises: the block's tiles are in `a` and `w`.
                        unsafe { $product(fresh, a, QUADS * 4, w, self.last_to) }
                        self.last_to = self.products[made % 2][i].as_mut_ptr();
                    }
                    if fold.is_some() {
                        // SAFETY: a slot has 64 elements, a product 16 x 16.
                        unsafe { self.fold::<K, Z>(span, i, group, folded, &mut held) }
                    }
                }
            };
        }
        for at in (0..32 / QUADS).step_by(4) {
            step!(at, product_0);
            step!(at + 1, product_1);
            step!(at + 2, product_2);
            step!(at + 3, product_3);
        }
        if make.is_some() && span.count % 2 == 1 {
            // The next unit begins with this product's register.
            // SAFETY: the place is the product's.
            unsafe { store_even(self.last_to) }
            self.last_to = self.nowhere.as_mut_ptr();
        }
        if fold.is_some() {
            for r in 0..TILE {
                // SAFETY: the caller's promise.
                unsafe { _mm512_storeu_ps(y.add(r * TILE), held[r]) }
            }
        }
    }

    /// Adds a block's product, of a strip and a group, to its outputs by row.
    ///
    /// # Safety
    /// The block is the span's.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn fold<const K: u8, const Z: u8>(
        &self,
        span: &Span,
        i: usize,
        group: usize,
        strip: usize,
        held: &mut [__m512; TILE],
    ) {
        let (s, z, m) = span.meta.at(span.meta.slot[i], strip * TILE);
        let (products, scales) = (&self.products[strip % 2][i], &self.scales[group % 2][i]);
        let sums = &self.sums[group % 2][i];
        // SAFETY: a slot has 64 elements, a product 16 x 16.
        unsafe {
            let (s, m) = (_mm512_loadu_ps(s), _mm512_loadu_ps(m));
            // Zeros are 16-bit numbers with an upper half of 0.
            let z = _mm512_slli_epi32::<16>(_mm512_loadu_si512(z.cast()));
            let z = _mm512_cvtepi32_ps(_mm512_srai_epi32::<16>(z));
            let magic = _mm512_set1_ps(MAGIC);
            for r in 0..TILE {
                let scale = _mm512_set1_ps(scales[r]);
                let t = _mm512_loadu_si512(products.as_ptr().add(r * TILE).cast());
                let t = _mm512_castsi512_ps(_mm512_add_epi32(t, _mm512_castps_si512(magic)));
                let mut t = _mm512_sub_ps(t, magic);
                if K == INT8 && Z != MID {
                    // Integers below 2^24: exact.
                    t = _mm512_fnmadd_ps(z, _mm512_set1_ps(sums[r]), t);
                }
                held[r] = _mm512_fmadd_ps(t, _mm512_mul_ps(s, scale), held[r]);
                if Z == MIN {
                    held[r] = _mm512_fmadd_ps(_mm512_mul_ps(m, scale), _mm512_set1_ps(sums[r]), held[r]);
                }
            }
        }
    }
}

/// `$name`: `$t[16][16] = a[16][block] x w[block / 4][16][4]`, `row` bytes a row of `a`, whose tile `$a` is loaded if it
/// is `fresh` and else still there; then the product before this one, in `$last`, is stored.
///
/// # Safety
/// Tiles are configured for the block; everything is readable, `last` writable for `[16][16]`.
macro_rules! product {
    ($name:ident, $t:literal, $w:literal, $a:literal, $last:literal) => {
        #[inline(always)]
        unsafe fn $name(fresh: bool, a: *const i8, row: usize, w: *const u8, last: *mut i32) {
            // SAFETY: the caller's promises.
            unsafe {
                if fresh {
                    asm!(
                        concat!("tileloadd ", $a, ", [{a} + {row}]"),
                        a = in(reg) a, row = in(reg) row,
                        options(nostack, preserves_flags)
                    )
                }
                asm!(
                    concat!("tileloadd ", $w, ", [{w} + {line}]"),
                    concat!("tilezero ", $t),
                    concat!("tdpbssd ", $t, ", ", $a, ", ", $w),
                    concat!("tilestored [{last} + {line}], ", $last),
                    w = in(reg) w, line = in(reg) 64usize, last = in(reg) last,
                    options(nostack, preserves_flags)
                )
            }
        }
    };
}
product!(product_0, "tmm0", "tmm2", "tmm4", "tmm1");
product!(product_1, "tmm1", "tmm3", "tmm5", "tmm0");
product!(product_2, "tmm0", "tmm2", "tmm6", "tmm1");
product!(product_3, "tmm1", "tmm3", "tmm7", "tmm0");

/// `$name`: stores the product `$t`.
///
/// # Safety
/// `to` is writable for `[16][16]`.
macro_rules! store {
    ($name:ident, $t:literal) => {
        #[inline(always)]
        unsafe fn $name(to: *mut i32) {
            // SAFETY: the caller's promise.
            unsafe {
                asm!(
                    concat!("tilestored [{to} + {line}], ", $t),
                    to = in(reg) to, line = in(reg) 64usize,
                    options(nostack, preserves_flags)
                )
            }
        }
    };
}
store!(store_even, "tmm0");
store!(store_odd, "tmm1");

/// What `ldtilecfg` reads: rows and bytes a row of each tile.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes: [u16; 16],
    rows: [u8; 16],
}

/// Tiles 0 and 1 are products, 2 and 3 weights, the others activations of blocks of `block` columns.
fn configure(block: usize) {
    let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], bytes: [0; 16], rows: [0; 16] };
    for at in 0..8 {
        (config.rows[at], config.bytes[at]) = match at {
            0 | 1 => (16, 64),
            2 | 3 => (block as u8 / 4, 64),
            _ => (16, block as u16),
        };
    }
    // SAFETY: called by this table's kernels only, so the instruction exists; the configuration is valid.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, preserves_flags, readonly)) }
}

/// Gives the tile registers back: what is in use must be saved at every switch of threads.
fn release() {
    // SAFETY: as in `configure`.
    unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) }
}

/// `tdpbssd` of whole tiles, on four products: 65,536 multiply-adds a round.
///
/// # Safety
/// The instructions exist.
unsafe fn peak(rounds: u64) -> u64 {
    let rounds = rounds / 64;
    let (bytes, rows) = ([64; 16], [16; 16]);
    let config = Config { palette: 1, start_row: 0, reserved: [0; 14], bytes: cut(bytes), rows: cut(rows) };
    // SAFETY: tile registers only.
    unsafe {
        asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, preserves_flags, readonly));
        for _ in 0..rounds {
            asm!(
                "tdpbssd tmm0, tmm4, tmm5",
                "tdpbssd tmm1, tmm4, tmm5",
                "tdpbssd tmm2, tmm4, tmm5",
                "tdpbssd tmm3, tmm4, tmm5",
                options(nostack, preserves_flags, nomem)
            );
        }
    }
    release();
    rounds * 4 * 16 * 16 * 64
}

/// There are eight tiles; fields of others must be zero.
fn cut<T: Default + Copy>(mut of: [T; 16]) -> [T; 16] {
    of[8..].fill(T::default());
    of
}
