//! What attention needs beside the eight f32 lanes: exact dot products of pairs of i16 into eight i32, and steps whose
//! registers must be counted.

#[cfg(target_arch = "x86_64")]
use super::super::lanes::Avx2;
#[cfg(target_arch = "aarch64")]
use super::super::lanes::Neon;
use super::super::lanes::{Lanes, MAGIC, Portable};

/// Integer operations of a CPU that has the `Lanes`.
pub(super) trait Ints: Lanes {
    /// Eight pairs of i16.
    type Pairs: Copy;
    /// Eight i32.
    type Sums: Copy;
    /// # Safety
    /// The CPU has the instruction set.
    unsafe fn zeros() -> Self::Sums;
    /// # Safety
    /// The CPU has the instruction set; `p` is valid for reading 16 elements.
    unsafe fn pairs(p: *const i8) -> Self::Pairs;
    /// The same pair eight times.
    ///
    /// # Safety
    /// The CPU has the instruction set; `p` is valid for reading.
    unsafe fn pair(p: *const [i16; 2]) -> Self::Pairs;
    /// `sums + a[0] * b[0] + a[1] * b[1]`, which must fit.
    ///
    /// # Safety
    /// The CPU has the instruction set.
    unsafe fn dot(sums: Self::Sums, a: Self::Pairs, b: Self::Pairs) -> Self::Sums;
    /// # Safety
    /// The CPU has the instruction set.
    unsafe fn floats(sums: Self::Sums) -> Self;
    /// Sixteen values within +-32767, rounded to nearest even. Any codes for NaN.
    ///
    /// # Safety
    /// `p` is valid for writing 16 elements.
    unsafe fn store_i16(low: Self, high: Self, p: *mut i16);
    /// `acc[v] += x[v] * p`, each rounded once.
    ///
    /// # Safety
    /// The CPU has the instruction set; `p` is valid for reading 8 f16.
    #[inline(always)]
    unsafe fn fma3_f16(acc: &mut [Self; 3], x: [Self; 3], p: *const u16) {
        // SAFETY: the caller's promise.
        let k = unsafe { Self::load_f16(p) };
        for v in 0..3 {
            acc[v] = x[v].fma(k, acc[v]);
        }
    }
    /// The greatest lane, none of which is NaN, in all lanes. Any values if one is.
    fn spread_greatest(self) -> Self;
}

/// In plain Rust, which compilers turn into vectors, for any lanes.
macro_rules! plain {
    ($lanes:ty) => {
        impl Ints for $lanes {
            type Pairs = [[i16; 2]; 8];
            type Sums = [i32; 8];
            #[inline(always)]
            unsafe fn zeros() -> [i32; 8] {
                [0; 8]
            }
            #[inline(always)]
            unsafe fn pairs(p: *const i8) -> [[i16; 2]; 8] {
                // SAFETY: the caller's promise.
                unsafe { p.cast::<[[i8; 2]; 8]>().read() }.map(|pair| pair.map(i16::from))
            }
            #[inline(always)]
            unsafe fn pair(p: *const [i16; 2]) -> [[i16; 2]; 8] {
                // SAFETY: the caller's promise.
                [unsafe { *p }; 8]
            }
            #[inline(always)]
            unsafe fn dot(sums: [i32; 8], a: [[i16; 2]; 8], b: [[i16; 2]; 8]) -> [i32; 8] {
                let product = |l: usize, j: usize| i32::from(a[l][j]) * i32::from(b[l][j]);
                std::array::from_fn(|l| sums[l].wrapping_add(product(l, 0)).wrapping_add(product(l, 1)))
            }
            #[inline(always)]
            unsafe fn floats(sums: [i32; 8]) -> Self {
                // SAFETY: the caller's promise; the array holds 8 elements.
                unsafe { <$lanes>::load(sums.map(|x| x as f32).as_ptr()) }
            }
            #[inline(always)]
            unsafe fn store_i16(low: Self, high: Self, p: *mut i16) {
                for (half, x) in [low, high].into_iter().enumerate() {
                    let codes = x.to_array().map(|x| (x + MAGIC).to_bits() as i16);
                    // SAFETY: the caller's promise.
                    unsafe { p.add(8 * half).cast::<[i16; 8]>().write(codes) };
                }
            }
            #[inline(always)]
            fn spread_greatest(self) -> Self {
                // SAFETY: `self` exists, so the CPU has the instruction set.
                unsafe { <$lanes>::splat(super::super::lanes::greatest(self)) }
            }
        }
    };
}

plain!(Portable);
#[cfg(target_arch = "aarch64")]
plain!(Neon);

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::{asm, x86_64::*};

    use super::{Avx2, Ints};

    impl Ints for Avx2 {
        type Pairs = __m256i;
        type Sums = __m256i;
        #[inline(always)]
        unsafe fn zeros() -> __m256i {
            // SAFETY: the caller's promise; so for all.
            unsafe { _mm256_setzero_si256() }
        }
        #[inline(always)]
        unsafe fn pairs(p: *const i8) -> __m256i {
            // SAFETY: see `zeros`.
            unsafe { _mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast())) }
        }
        #[inline(always)]
        unsafe fn pair(p: *const [i16; 2]) -> __m256i {
            // SAFETY: see `zeros`.
            unsafe { _mm256_set1_epi32(p.cast::<i32>().read_unaligned()) }
        }
        #[inline(always)]
        unsafe fn dot(sums: __m256i, a: __m256i, b: __m256i) -> __m256i {
            // SAFETY: see `zeros`.
            unsafe { add_dot(sums, a, b) }
        }
        #[inline(always)]
        unsafe fn floats(sums: __m256i) -> Self {
            // SAFETY: see `zeros`; an __m256 holds 8 floats.
            unsafe { Avx2::from_raw(_mm256_cvtepi32_ps(sums)) }
        }
        #[inline(always)]
        unsafe fn store_i16(low: Self, high: Self, p: *mut i16) {
            // SAFETY: see `zeros`. Packing works on halves: quarters 0, 2, 1, 3 are in order.
            unsafe {
                let (low, high) = (_mm256_cvtps_epi32(low.raw()), _mm256_cvtps_epi32(high.raw()));
                let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(low, high));
                _mm256_storeu_si256(p.cast(), packed);
            }
        }
        #[inline(always)]
        unsafe fn fma3_f16(acc: &mut [Self; 3], x: [Self; 3], p: *const u16) {
            // SAFETY: see `zeros`; `p` is valid for reading 16 bytes.
            let sums = unsafe { add_products(acc.map(Avx2::raw), x.map(Avx2::raw), p) };
            // SAFETY: see `zeros`.
            *acc = sums.map(|x| unsafe { Avx2::from_raw(x) });
        }
        #[inline(always)]
        fn spread_greatest(self) -> Self {
            // SAFETY: `self` exists, so the CPU has the instruction set.
            unsafe {
                let x = self.raw();
                let x = _mm256_max_ps(x, _mm256_permute2f128_ps::<1>(x, x));
                let x = _mm256_max_ps(x, _mm256_permute_ps::<0b01_00_11_10>(x));
                Avx2::from_raw(_mm256_max_ps(x, _mm256_permute_ps::<0b10_11_00_01>(x)))
            }
        }
    }

    /// Left to itself the compiler adds up products of several rounds first and runs out of registers.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn add_dot(mut sums: __m256i, a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: two instructions on registers.
        unsafe {
            asm!(
                "vpmaddwd {product}, {a}, {b}",
                "vpaddd {sums}, {sums}, {product}",
                product = out(ymm_reg) _, a = in(ymm_reg) a, b = in(ymm_reg) b, sums = inout(ymm_reg) sums,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        sums
    }

    /// Twelve sums, three factors and this one register are all there are. Left to itself the compiler loads ahead and
    /// keeps sums in memory, a longer way round than the loop itself.
    ///
    /// # Safety
    /// `p` is valid for reading 16 bytes.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn add_products(acc: [__m256; 3], x: [__m256; 3], p: *const u16) -> [__m256; 3] {
        let [mut a, mut b, mut c] = acc;
        // SAFETY: registers, and the caller's 16 bytes.
        unsafe {
            asm!(
                "vcvtph2ps {k}, xmmword ptr [{p}]",
                "vfmadd231ps {a}, {x}, {k}",
                "vfmadd231ps {b}, {y}, {k}",
                "vfmadd231ps {c}, {z}, {k}",
                k = out(ymm_reg) _, p = in(reg) p, x = in(ymm_reg) x[0], y = in(ymm_reg) x[1], z = in(ymm_reg) x[2],
                a = inout(ymm_reg) a, b = inout(ymm_reg) b, c = inout(ymm_reg) c,
                options(pure, readonly, nostack, preserves_flags)
            );
        }
        [a, b, c]
    }
}
