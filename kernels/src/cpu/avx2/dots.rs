//! The integer dot products of one activation block, as assembly.
//!
//! Left to itself, LLVM reassociates the 16-bit additions into trees, moves loads of the whole block to its start and
//! spills most of them (seen in the disassembly: half of the instructions were stack traffic). The text below is
//! what the ports need: two vector operations a product (`vpmaddubsw`, `vpaddw`) on four pipes, and loads that fit
//! between them.
//!
//! Registers: ymm0-7 sums, ymm8 and ymm9 weights, ymm10 activations, ymm11 and ymm12 products, ymm13 the mask of a
//! nibble.

use std::arch::{asm, x86_64::*};

/// One row of activations at dword `$i` of a quad's, times the two vectors of weights; added to `$lo` and `$hi`.
macro_rules! row {
    ($at:expr, $i:literal, $lo:literal, $hi:literal) => {
        concat!("vpbroadcastd ymm10, dword ptr [{a} + ", $at, " + 4*", $i, "]\n", row!(@ $lo, $hi))
    };
    (@ $lo:literal, $hi:literal) => {
        concat!(
            "vpmaddubsw ymm11, ymm8, ymm10\n",
            "vpmaddubsw ymm12, ymm9, ymm10\n",
            "vpaddw ", $lo, ", ", $lo, ", ymm11\n",
            "vpaddw ", $hi, ", ", $hi, ", ymm12\n",
        )
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

/// Integers of 16 weight rows in bytes: quad `$q` of a strip.
macro_rules! bytes {
    ($q:literal) => {
        concat!("vmovdqa ymm8, [{w} + 64*", $q, "]\n", "vmovdqa ymm9, [{w} + 64*", $q, " + 32]\n")
    };
}

/// The same in nibbles: quads are 128 bytes apart; `$byte` skips strips.
macro_rules! nibbles {
    ($q:literal, $byte:literal) => {
        concat!(
            "vmovdqu ymm9, [{w} + 128*",
            $q,
            " + ",
            $byte,
            "]\n",
            "vpand ymm8, ymm9, ymm13\n",
            "vpsrlw ymm9, ymm9, 4\n",
            "vpand ymm9, ymm9, ymm13\n",
        )
    };
}

/// `$each!(q)` for every quad of half a block.
macro_rules! four {
    ($each:ident, $rows:tt, $first:tt) => {
        four!(@ $each, $rows, $first)
    };
    (@ $each:ident, $rows:tt, 0) => {
        concat!($each!($rows, 0), $each!($rows, 1), $each!($rows, 2), $each!($rows, 3))
    };
    (@ $each:ident, $rows:tt, 4) => {
        concat!($each!($rows, 4), $each!($rows, 5), $each!($rows, 6), $each!($rows, 7))
    };
}

/// One quad of a strip of bytes against `$rows` rows.
macro_rules! byte_quad {
    ($rows:tt, $q:literal) => {
        concat!(bytes!($q), rows!($rows, concat!("4*", $rows, "*", $q)))
    };
}

/// One quad of a strip of nibbles against `$rows` rows.
macro_rules! nibble_quad {
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

/// Runs `$text` on the sums of `$acc`, `[[__m256i; 2]; 4]`.
macro_rules! run {
    ($text:expr, $w:expr, $a:expr, $acc:expr) => {
        asm!(
            $text,
            w = in(reg) $w,
            a = in(reg) $a,
            in("ymm13") _mm256_set1_epi8(15),
            inout("ymm0") $acc[0][0], inout("ymm1") $acc[0][1],
            inout("ymm2") $acc[1][0], inout("ymm3") $acc[1][1],
            inout("ymm4") $acc[2][0], inout("ymm5") $acc[2][1],
            inout("ymm6") $acc[3][0], inout("ymm7") $acc[3][1],
            out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _, out("ymm12") _,
            options(pure, readonly, nostack, preserves_flags)
        )
    };
}

/// `acc[r][h] += sum over a block of u * a`, in 16-bit pairs of columns, for rows `r < R` of up to 4, and the low and
/// the high 8 weight rows of a strip.
///
/// Sums wrap; the caller starts them so that they end in range. `w`: `[QUADS][16 rows][4]` bytes on a 32-byte
/// boundary, or (`PACKED`) quads of nibbles, 128 bytes apart. `a`: `[QUADS][R][4]`.
///
/// # Safety
/// AVX2 exists; both are readable for `QUADS` quads, 8 or 4.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn strip<const QUADS: usize, const PACKED: bool, const R: usize>(
    w: *const u8,
    a: *const i8,
    acc: &mut [[__m256i; 2]; 4],
) {
    // SAFETY: the text reads the operands that the caller vouches for and writes registers only.
    unsafe {
        match (PACKED, R) {
            (false, 1) => run!(four!(byte_quad, 1, 0), w, a, acc),
            (false, 2) => run!(four!(byte_quad, 2, 0), w, a, acc),
            (false, 3) => run!(four!(byte_quad, 3, 0), w, a, acc),
            (false, _) => run!(four!(byte_quad, 4, 0), w, a, acc),
            (true, 1) => run!(four!(nibble_quad, 1, 0), w, a, acc),
            (true, 2) => run!(four!(nibble_quad, 2, 0), w, a, acc),
            (true, 3) => run!(four!(nibble_quad, 3, 0), w, a, acc),
            (true, _) => run!(four!(nibble_quad, 4, 0), w, a, acc),
        }
        if QUADS == 4 {
            return;
        }
        match (PACKED, R) {
            (false, 1) => run!(four!(byte_quad, 1, 4), w, a, acc),
            (false, 2) => run!(four!(byte_quad, 2, 4), w, a, acc),
            (false, 3) => run!(four!(byte_quad, 3, 4), w, a, acc),
            (false, _) => run!(four!(byte_quad, 4, 4), w, a, acc),
            (true, 1) => run!(four!(nibble_quad, 1, 4), w, a, acc),
            (true, 2) => run!(four!(nibble_quad, 2, 4), w, a, acc),
            (true, 3) => run!(four!(nibble_quad, 3, 4), w, a, acc),
            (true, _) => run!(four!(nibble_quad, 4, 4), w, a, acc),
        }
    }
}

/// The same for one row and all four strips of a panel: `acc[strip][h]`.
///
/// # Safety
/// As [`strip`], with nibbles.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn panel<const QUADS: usize>(w: *const u8, a: *const i8, acc: &mut [[__m256i; 2]; 4]) {
    // SAFETY: as in `strip`.
    unsafe {
        run!(four!(wide_quad, 1, 0), w, a, acc);
        if QUADS == 8 {
            run!(four!(wide_quad, 1, 4), w, a, acc);
        }
    }
}

/// The same for two rows and two neighbouring strips: `acc[strip * 2 + row][h]`.
///
/// # Safety
/// As [`strip`], with nibbles.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn pair<const QUADS: usize>(w: *const u8, a: *const i8, acc: &mut [[__m256i; 2]; 4]) {
    // SAFETY: as in `strip`.
    unsafe {
        run!(four!(pair_quad, 2, 0), w, a, acc);
        if QUADS == 8 {
            run!(four!(pair_quad, 2, 4), w, a, acc);
        }
    }
}

/// `vpmaddubsw` and `vpaddw` on eight independent sums: 256 multiply-adds a round.
///
/// # Safety
/// AVX2 exists.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn peak(rounds: u64) -> u64 {
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
                out("ymm11") _, out("ymm12") _,
                options(nomem, nostack, preserves_flags)
            );
        }
    }
    rounds * 256
}
