//! Codes times int8 activations on AMX: many rows, tiles of 16 activation rows x 16 weight rows.
//!
//! `tdpbssd` multiplies a tile `[16 rows][block]` of activations by one `[block / 4][16 weight rows][4]` of weights;
//! P64 holds codes of a panel in just this order, four tiles beside each other. A tile's product is of one activation
//! block, so it is stored, scaled and added to the outputs before the next: three vector operations a row, where
//! `vpdpbusd` needs twelve. Codes are unpacked to signed bytes once a span: the integer that means zero is subtracted
//! there, unless it does not fit a byte (int8 with stored zeros or minima).
//! Activations lie in groups of 4 rows, by quads ([`crate::cpu::acts`]); they are put into rows on the way.
//!
//! Instructions: Intel's Architecture Instruction Set Extensions Programming Reference, chapter 3 (AMX); they have
//! no stable intrinsics, so they are assembly. No compiled code uses tile registers, so none are saved.

use super::ints::{self, FP4, INT4, INT8, factors, reorder_row};
use super::*;
use crate::cpu::acts::{Acts, Int8, MR};
use crate::cpu::avx2::{CODE, MID, MIN, middles};
use crate::cpu::linear::{IntPanel, Meta, SPAN, Scratch};
use crate::cpu::mini::E2M1;
use quern_models::{PANEL, ZeroKind};
use std::arch::asm;
use std::ops::Range;

pub(crate) static ISA: Isa =
    Isa { name: "amx", detected, int4_int8: panel, int8_int8: panel, peak, rows: 128, ..super::ISA };

/// Fewer rows of a tile than this are left to `vpdpbusd`: a tile takes as long as so many.
const LEAST: usize = 12;

/// Fewer rows than this in all are left to it, too: unpacking a span costs as much as what is gained.
const FEW: usize = 24;

/// Rows of a tile: of activations, and weight rows of a vector.
const TILE: usize = 16;

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
    let end = match rows.len() % TILE {
        _ if rows.len() < FEW => rows.start,
        part if part < LEAST => rows.end - part,
        _ => rows.end,
    };
    let (tile, rest) = tile.split_at_mut((end - rows.start) * PANEL);
    if end < rows.end {
        // SAFETY: the caller's promises; `end` is a multiple of `TILE` from the start, so of `MR`.
        unsafe { ints::panel(w, a, end..rows.end, rest, scratch) };
    }
    if tile.is_empty() {
        return;
    }
    let of = Panel { w, a: a.int8(w.block), rows: rows.start..end };
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
    /// As [`panel`]; `K`, `Z` and `QUADS` are the weight's.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn spans<const K: u8, const Z: u8, const QUADS: usize>(&self, tile: &mut [f32], scratch: &mut Scratch) {
        let (w, a, rows) = (self.w, self.a, self.rows.clone());
        let (block, quad) = (QUADS * 4, if K == INT8 { 256 } else { 128 });
        let bias = if K == INT8 { 128 } else { 0 };
        scratch.bytes.reserve(4 * STRIP + size_of::<Group>());
        let bytes = scratch.bytes.ptr();
        // SAFETY: the buffer starts on a 64-byte boundary, as strips end, and has room for a group behind them, which is
        // numbers: any bytes are one, and all were written once.
        let group = unsafe { &mut *bytes.add(4 * STRIP).cast::<Group>() };
        tile.fill(0.0);
        configure(block);
        middles(w, bias, &mut scratch.meta);
        for b0 in (0..a.blocks()).step_by(SPAN / block) {
            let count = (a.blocks() - b0).min(SPAN / block);
            factors::<K, Z, false>(w, b0, count, bias, &mut scratch.meta);
            let codes = &w.codes[b0 * QUADS * quad..][..count * QUADS * quad];
            // SAFETY: `bytes` has room for a span; rows of the group are in `a` and in `tile`, because `rows` is.
            unsafe {
                unpack::<K, Z, QUADS>(codes, &scratch.meta, bytes);
                for first in rows.clone().step_by(TILE) {
                    let n = (rows.end - first).min(TILE);
                    group.load::<QUADS>(a, first, n, b0, count);
                    let y = &mut tile[(first - rows.start) * PANEL..][..n * PANEL];
                    if n == TILE {
                        group.multiply::<K, Z, QUADS>(bytes, count, &scratch.meta, y.as_mut_ptr());
                    } else {
                        let mut whole = [0.0; TILE * PANEL];
                        whole[..n * PANEL].copy_from_slice(y);
                        group.multiply::<K, Z, QUADS>(bytes, count, &scratch.meta, whole.as_mut_ptr());
                        y.copy_from_slice(&whole[..n * PANEL]);
                    }
                }
            }
        }
        release();
        if K != INT8 {
            tile.chunks_exact_mut(PANEL).for_each(|row| reorder_row(row.as_mut_ptr()));
        }
    }
}

/// Unpacks a span into four strips `[quad][16 weight rows][4]` of signed bytes, weight rows in the order of
/// [`reorder_row`].
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

/// A span of up to 16 activation rows, as tiles; rows that do not exist are anything finite.
#[repr(C, align(64))]
struct Group {
    /// `[block][row][columns]`.
    a: [i8; TILE * SPAN],
    /// `[block][row]`.
    scales: [[f32; TILE]; SPAN / 16],
    sums: [[i32; TILE]; SPAN / 16],
    /// Products of two strips, by block: those of the next are computed while this one's are added up.
    products: [[[i32; TILE * TILE]; SPAN / 16]; 2],
}

impl Group {
    /// Takes `n` rows from `first` on, blocks `b0..b0 + count`.
    ///
    /// # Safety
    /// They are in `a`; `first` is a multiple of [`MR`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn load<const QUADS: usize>(&mut self, a: &Int8, first: usize, n: usize, b0: usize, count: usize) {
        let block = QUADS * 4;
        let some = 0xffffu16 >> (TILE - n);
        // Dwords (quad, row) of four rows to (row, quad).
        let of = |row: i32, quads: i32| -> [i32; 16] {
            std::array::from_fn(|i| (i as i32 % quads) * 4 + row + i as i32 / quads)
        };
        // SAFETY: arrays of 16.
        let index = |to: [i32; 16]| unsafe { _mm512_loadu_si512(to.as_ptr().cast()) };
        let index = if QUADS == 8 { [index(of(0, 8)), index(of(2, 8))] } else { [index(of(0, 4)); 2] };
        for i in 0..count {
            // SAFETY: the caller's promise; lanes that are masked out are not read.
            unsafe {
                let s = _mm512_maskz_loadu_ps(some, a.scale_ptr(first, b0 + i));
                _mm512_storeu_ps(self.scales[i].as_mut_ptr(), s);
                let s = _mm512_maskz_loadu_epi32(some, a.sum_ptr(first, b0 + i));
                _mm512_storeu_si512(self.sums[i].as_mut_ptr().cast(), s);
                for r in (0..n).step_by(MR) {
                    let from = a.q_ptr(first + r, b0 + i);
                    let to = self.a.as_mut_ptr().add((i * TILE + r) * block);
                    let mb = (a.m() - first - r).min(MR);
                    if mb < MR {
                        for (row, quad) in (0..mb).flat_map(|row| (0..QUADS).map(move |quad| (row, quad))) {
                            let v = from.add((quad * mb + row) * 4).cast::<i32>().read_unaligned();
                            to.add(row * block + quad * 4).cast::<i32>().write_unaligned(v);
                        }
                        continue;
                    }
                    let low = _mm512_loadu_si512(from.cast());
                    if QUADS == 4 {
                        _mm512_storeu_si512(to.cast(), _mm512_permutexvar_epi32(index[0], low));
                        continue;
                    }
                    let high = _mm512_loadu_si512(from.add(64).cast());
                    _mm512_storeu_si512(to.cast(), _mm512_permutex2var_epi32(low, index[0], high));
                    _mm512_storeu_si512(to.add(64).cast(), _mm512_permutex2var_epi32(low, index[1], high));
                }
            }
        }
    }

    /// Adds the span's part to `y[16][64]`, weight rows in the order of `w`.
    ///
    /// # Safety
    /// `w` are the span's unpacked strips; `y` has 16 rows; tiles are configured for the block.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn multiply<const K: u8, const Z: u8, const QUADS: usize>(
        &mut self,
        w: *const u8,
        count: usize,
        meta: &Meta,
        y: *mut f32,
    ) {
        // SAFETY: the caller's promises.
        unsafe { self.products::<QUADS>(w, count, 0) }
        for strip in 0..4 {
            if strip < 3 {
                // SAFETY: the caller's promises.
                unsafe { self.products::<QUADS>(w, count, strip + 1) }
            }
            let mut held = [_mm512_setzero_ps(); TILE];
            for r in 0..TILE {
                // SAFETY: the caller's promise.
                held[r] = unsafe { _mm512_loadu_ps(y.add(r * PANEL + strip * TILE)) };
            }
            for (i, slot) in meta.slot[..count].iter().enumerate() {
                let (s, z, m) = meta.at(*slot, strip * TILE);
                let products = &self.products[strip % 2][i];
                // SAFETY: a slot has 64 elements, a product 16 x 16.
                unsafe {
                    let (s, m) = (_mm512_loadu_ps(s), _mm512_loadu_ps(m));
                    let z = _mm512_loadu_si512(z.cast());
                    for r in 0..TILE {
                        let scale = _mm512_set1_ps(self.scales[i][r]);
                        let mut t = _mm512_loadu_si512(products.as_ptr().add(r * TILE).cast());
                        if K == INT8 && Z != MID {
                            // As in `ints`: the zero is a 16-bit number with an upper half of 0.
                            t = _mm512_sub_epi32(t, _mm512_madd_epi16(z, _mm512_set1_epi32(self.sums[i][r])));
                        }
                        held[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(t), _mm512_mul_ps(s, scale), held[r]);
                        if Z == MIN {
                            let sum = _mm512_cvtepi32_ps(_mm512_set1_epi32(self.sums[i][r]));
                            held[r] = _mm512_fmadd_ps(_mm512_mul_ps(m, scale), sum, held[r]);
                        }
                    }
                }
            }
            for r in 0..TILE {
                // SAFETY: the caller's promise.
                unsafe { _mm512_storeu_ps(y.add(r * PANEL + strip * TILE), held[r]) }
            }
        }
    }

    /// Products of a strip, by block.
    ///
    /// # Safety
    /// As [`Group::multiply`].
    #[inline]
    unsafe fn products<const QUADS: usize>(&mut self, w: *const u8, count: usize, strip: usize) {
        let block = QUADS * 4;
        for i in 0..count {
            // SAFETY: the caller's promises: the block's tiles are in `a` and `w`.
            unsafe {
                let a = self.a.as_ptr().add(i * TILE * block);
                let w = w.add(strip * STRIP + i * QUADS * 64);
                product(i % 2 == 1, a, block, w, self.products[strip % 2][i].as_mut_ptr());
            }
        }
    }
}

/// `t[16][16] = a[16][block] x w[block / 4][16][4]`. Neighbouring calls take different registers (`odd`).
///
/// # Safety
/// Tiles are configured for the block; everything is readable, `t` writable.
#[inline]
unsafe fn product(odd: bool, a: *const i8, block: usize, w: *const u8, t: *mut i32) {
    macro_rules! tiles {
        ($t:literal, $a:literal, $w:literal) => {
            asm!(
                concat!("tilezero ", $t),
                concat!("tileloadd ", $a, ", [{a} + {row}]"),
                concat!("tileloadd ", $w, ", [{w} + {line}]"),
                concat!("tdpbssd ", $t, ", ", $a, ", ", $w),
                concat!("tilestored [{t} + {line}], ", $t),
                a = in(reg) a, row = in(reg) block, w = in(reg) w, line = in(reg) 64usize, t = in(reg) t,
                options(nostack, preserves_flags)
            )
        };
    }
    // SAFETY: the caller's promises.
    unsafe {
        if odd {
            tiles!("tmm3", "tmm4", "tmm5");
        } else {
            tiles!("tmm0", "tmm1", "tmm2");
        }
    }
}

/// What `ldtilecfg` reads: rows and bytes a row of each tile.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes: [u16; 16],
    rows: [u8; 16],
}

/// Tiles 0 and 3 are products, 1 and 4 activations, 2 and 5 weights of blocks of `block` columns.
fn configure(block: usize) {
    let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], bytes: [0; 16], rows: [0; 16] };
    for at in [0, 3] {
        (config.rows[at], config.bytes[at]) = (16, 64);
        (config.rows[at + 1], config.bytes[at + 1]) = (16, block as u16);
        (config.rows[at + 2], config.bytes[at + 2]) = (block as u8 / 4, 64);
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
