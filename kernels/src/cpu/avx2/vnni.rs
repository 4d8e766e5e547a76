//! AVX-VNNI: AVX2 with `vpdpbusd`, on processors without AVX-512 (Alder Lake and later, N100; Zen 5 has both).
//!
//! The sums of [`super::dots`] in one instruction instead of two, in 32 bits, so nothing need be widened. Of int4 the
//! bytes are summed as they are and without their low nibbles, as in `avx512/ints.rs`: the difference is that of the
//! low nibbles. Everything else is AVX2's. As assembly, for the reasons given in [`super::dots`].
//!
//! Registers: ymm0-7 sums, ymm8 and ymm9 weights, ymm10 activations, ymm13 the mask of a high nibble.

use super::*;
use std::arch::asm;

pub(crate) static ISA: Isa = Isa {
    name: "avxvnni",
    level: Level::AvxVnni,
    detected: || super::detected() && is_x86_feature_detected!("avxvnni"),
    int4_int8: int4::panel::<true>,
    int8_int8: int8::panel::<true>,
    peak,
    ..super::ISA
};

/// One row of activations times the two vectors of weights; added to `$lo` and `$hi`.
macro_rules! row {
    ($at:expr, $i:literal, $lo:literal, $hi:literal) => {
        concat!("vpbroadcastd ymm10, dword ptr [{a} + ", $at, " + 4*", $i, "]\n", row!(@ $lo, $hi))
    };
    (@ $lo:literal, $hi:literal) => {
        concat!("{{vex}} vpdpbusd ", $lo, ", ymm8, ymm10\n", "{{vex}} vpdpbusd ", $hi, ", ymm9, ymm10\n")
    };
}

/// `$rows` rows against the weights in ymm8 and ymm9.
macro_rules! rows {
    (1, $at:expr) => {
        row!($at, 0, "ymm0", "ymm1")
    };
    (2, $at:expr) => {
        concat!(rows!(1, $at), row!($at, 1, "ymm2", "ymm3"))
    };
    (3, $at:expr) => {
        concat!(rows!(2, $at), row!($at, 2, "ymm4", "ymm5"))
    };
    (4, $at:expr) => {
        concat!(rows!(3, $at), row!($at, 3, "ymm6", "ymm7"))
    };
}

/// Quad `$q` of a strip of nibbles: the bytes, and their high nibbles; `$byte` skips strips.
macro_rules! nibbles {
    ($q:literal, $byte:literal) => {
        concat!("vmovdqu ymm8, [{w} + 128*", $q, " + ", $byte, "]\n", "vpand ymm9, ymm8, ymm13\n")
    };
}

/// `$each!(rows, q)` for four quads.
macro_rules! four {
    ($each:ident, $rows:tt) => {
        concat!($each!($rows, 0), $each!($rows, 1), $each!($rows, 2), $each!($rows, 3))
    };
}

/// One quad of a strip against `$rows` rows.
macro_rules! strip_quad {
    ($rows:tt, $q:literal) => {
        concat!(nibbles!($q, 0), rows!($rows, concat!("4*", $rows, "*", $q)))
    };
}

/// One quad of four strips against one row.
macro_rules! wide_quad {
    ($rows:tt, $q:literal) => {
        concat!(
            nibbles!($q, 0),
            row!(concat!("4*", $q), 0, "ymm0", "ymm1"),
            nibbles!($q, 32),
            row!(concat!("4*", $q), 0, "ymm2", "ymm3"),
            nibbles!($q, 64),
            row!(concat!("4*", $q), 0, "ymm4", "ymm5"),
            nibbles!($q, 96),
            row!(concat!("4*", $q), 0, "ymm6", "ymm7"),
        )
    };
}

/// One quad of two strips against two rows: sums `[strip][row]`.
macro_rules! pair_quad {
    ($rows:tt, $q:literal) => {
        concat!(
            nibbles!($q, 0),
            row!(concat!("8*", $q), 0, "ymm0", "ymm1"),
            row!(concat!("8*", $q), 1, "ymm2", "ymm3"),
            nibbles!($q, 32),
            row!(concat!("8*", $q), 0, "ymm4", "ymm5"),
            row!(concat!("8*", $q), 1, "ymm6", "ymm7"),
        )
    };
}

/// One quad of two vectors of int8 codes against `$rows` rows.
macro_rules! byte_quad {
    ($rows:tt, $q:literal) => {
        concat!(
            "vmovdqu ymm8, [{w} + 256*",
            $q,
            "]\n",
            "vmovdqu ymm9, [{w} + 256*",
            $q,
            " + 32]\n",
            rows!($rows, concat!("4*", $rows, "*", $q)),
        )
    };
}

/// Runs `$text` on the sums of `$acc`, `[[__m256i; 2]; 4]`.
macro_rules! run {
    ($text:expr, $w:expr, $a:expr, $acc:expr) => {
        asm!(
            $text,
            w = in(reg) $w,
            a = in(reg) $a,
            in("ymm13") _mm256_set1_epi8(-16),
            inout("ymm0") $acc[0][0], inout("ymm1") $acc[0][1],
            inout("ymm2") $acc[1][0], inout("ymm3") $acc[1][1],
            inout("ymm4") $acc[2][0], inout("ymm5") $acc[2][1],
            inout("ymm6") $acc[3][0], inout("ymm7") $acc[3][1],
            out("ymm8") _, out("ymm9") _, out("ymm10") _,
            options(pure, readonly, nostack, preserves_flags)
        )
    };
}

/// `sum(u * a)` over one activation block of int4 codes, less `8 * sum(a)` with `Z` = MID: `[strip * R + row][low or
/// high 8 rows]`, for `N` strips and `R` rows, at most 4 pairs.
///
/// # Safety
/// AVX-VNNI exists; `w`, `a` and `sums` are readable for the block.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn nibbles<const Z: u8, const QUADS: usize, const N: usize, const R: usize>(
    w: *const u8,
    a: *const i8,
    sums: *const i32,
) -> [[__m256i; 2]; 4] {
    let mut acc = [[_mm256_setzero_si256(); 2]; 4];
    for r in 0..R {
        if Z == MID {
            // Of bytes `l + 16 h` and of `16 h`, where 8 means zero.
            // SAFETY: the caller's promise.
            let less = _mm256_set1_epi32(unsafe { *sums.add(r) }.wrapping_neg());
            let high = _mm256_slli_epi32::<7>(less);
            let start = [_mm256_add_epi32(high, _mm256_slli_epi32::<3>(less)), high];
            (0..N).for_each(|n| acc[n * R + r] = start);
        }
    }
    for q in (0..QUADS).step_by(4) {
        let (w, a) = (w.wrapping_add(q * 128), a.wrapping_add(q * 4 * R));
        // SAFETY: the text reads four quads, which the caller vouches for, and writes registers only.
        unsafe {
            match (N, R) {
                (4, _) => run!(four!(wide_quad, 1), w, a, acc),
                (2, _) => run!(four!(pair_quad, 2), w, a, acc),
                (_, 1) => run!(four!(strip_quad, 1), w, a, acc),
                (_, 2) => run!(four!(strip_quad, 2), w, a, acc),
                (_, 3) => run!(four!(strip_quad, 3), w, a, acc),
                _ => run!(four!(strip_quad, 4), w, a, acc),
            }
        }
    }
    for [low, high] in &mut acc[..N * R] {
        *low = _mm256_sub_epi32(*low, *high);
        *high = _mm256_srai_epi32::<4>(*high);
    }
    acc
}

/// `sum((q - 128) * a)` over one activation block of int8 codes: `[row][vector]`, for two vectors and `R` rows.
///
/// # Safety
/// As [`nibbles`]; `quads` is a multiple of 4.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn bytes<const R: usize>(
    w: *const u8,
    a: *const i8,
    sums: *const i32,
    quads: usize,
) -> [[__m256i; 2]; 4] {
    let mut acc = [[_mm256_setzero_si256(); 2]; 4];
    for r in 0..R {
        // SAFETY: the caller's promise.
        let less = _mm256_set1_epi32(unsafe { *sums.add(r) }.wrapping_neg());
        acc[r] = [_mm256_slli_epi32::<7>(less); 2];
    }
    for q in (0..quads).step_by(4) {
        let (w, a) = (w.wrapping_add(q * 256), a.wrapping_add(q * 4 * R));
        // SAFETY: as in `nibbles`.
        unsafe {
            match R {
                1 => run!(four!(byte_quad, 1), w, a, acc),
                2 => run!(four!(byte_quad, 2), w, a, acc),
                3 => run!(four!(byte_quad, 3), w, a, acc),
                _ => run!(four!(byte_quad, 4), w, a, acc),
            }
        }
    }
    acc
}

/// `vpdpbusd` on eight independent sums: 256 multiply-adds a round.
///
/// # Safety
/// AVX-VNNI exists.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn peak(rounds: u64) -> u64 {
    let mut acc = [[_mm256_setzero_si256(); 2]; 4];
    for _ in 0..rounds {
        // SAFETY: registers only.
        unsafe {
            asm!(
                row!(@ "ymm0", "ymm1"), row!(@ "ymm2", "ymm3"), row!(@ "ymm4", "ymm5"), row!(@ "ymm6", "ymm7"),
                in("ymm8") _mm256_set1_epi8(3), in("ymm9") _mm256_set1_epi8(5), in("ymm10") _mm256_set1_epi8(1),
                inout("ymm0") acc[0][0], inout("ymm1") acc[0][1],
                inout("ymm2") acc[1][0], inout("ymm3") acc[1][1],
                inout("ymm4") acc[2][0], inout("ymm5") acc[2][1],
                inout("ymm6") acc[3][0], inout("ymm7") acc[3][1],
                options(nomem, nostack, preserves_flags)
            );
        }
    }
    rounds * 256
}
