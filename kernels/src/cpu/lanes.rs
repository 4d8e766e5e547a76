//! Eight f32 lanes: what attention and the elementwise operations are written in.
//!
//! Each kernel is written once, generic over `Lanes`, and compiled once per instruction set. Every operation here
//! is one correctly rounded IEEE operation per lane, and the kernels fix the order of operations, so all
//! instantiations give the same bits. The portable one is the specification.

/// Which instantiation to run. Safe functions may trust a value of this type: it exists only where the CPU can run it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Simd(Kind);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl Simd {
    /// Plain Rust; runs everywhere.
    pub const PORTABLE: Simd = Simd(Kind::Portable);

    /// The best one for this CPU.
    pub fn detect() -> Simd {
        Simd::available().last().copied().unwrap_or(Simd::PORTABLE)
    }

    /// The one of that name, if this CPU can run it.
    pub fn by_name(name: &str) -> Option<Simd> {
        Simd::available().into_iter().find(|simd| simd.name() == name)
    }

    /// Every one that this CPU can run, best last.
    pub fn available() -> Vec<Simd> {
        #[allow(unused_mut)]
        let mut found = vec![Simd::PORTABLE];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
            found.push(Simd(Kind::Avx2));
            if super::avx512::detected() {
                found.push(Simd(Kind::Avx512));
            }
        }
        // Part of every processor that this target is compiled for.
        #[cfg(target_arch = "aarch64")]
        found.push(Simd(Kind::Neon));
        found
    }

    /// `portable`, `avx2`, `avx512`, `neon`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Kind::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => "avx512",
            #[cfg(target_arch = "aarch64")]
            Kind::Neon => "neon",
        }
    }

    pub(crate) fn kind(self) -> Kind {
        self.0
    }
}

/// Eight f32 values. Having one proves that the CPU can run its operations, so only the constructors are unsafe.
pub(crate) trait Lanes: Copy {
    /// # Safety
    /// The CPU has the instruction set.
    unsafe fn splat(x: f32) -> Self;
    /// # Safety
    /// The CPU has the instruction set; `p` is valid for reading 8 elements.
    unsafe fn load(p: *const f32) -> Self;
    /// # Safety
    /// The CPU has the instruction set; `p` is valid for reading 8 f16.
    unsafe fn load_f16(p: *const u16) -> Self;
    /// 2^-8 times what eight e4m3 codes mean, none of which is NaN: each is an f16 but for the exponent's bias.
    ///
    /// # Safety
    /// The CPU has the instruction set; `p` is valid for reading 8 codes.
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> Self {
        // SAFETY: the caller's promise.
        let codes = unsafe { p.cast::<[u8; 8]>().read() };
        let halves = codes.map(|code| (u16::from(code) & 0x80) << 8 | (u16::from(code) & 0x7f) << 7);
        // SAFETY: the caller's promise; eight f16.
        unsafe { Self::load_f16(halves.as_ptr()) }
    }
    /// # Safety
    /// `p` is valid for writing 8 elements.
    unsafe fn store(self, p: *mut f32);
    fn add(self, b: Self) -> Self;
    fn sub(self, b: Self) -> Self;
    fn mul(self, b: Self) -> Self;
    fn div(self, b: Self) -> Self;
    /// `self * b + c`, rounded once.
    fn fma(self, b: Self, c: Self) -> Self;
    /// `c - self * b`, rounded once.
    fn fnma(self, b: Self, c: Self) -> Self;
    /// `if self > b { self } else { b }`: `b` wherever either is NaN.
    fn max(self, b: Self) -> Self;
    /// `if self < b { self } else { b }`: `b` wherever either is NaN.
    fn min(self, b: Self) -> Self;
    /// Whether any lane of `self` is greater than that of `b`.
    fn any_gt(self, b: Self) -> bool;
    /// `yes` where the sign bit of `self` is set, `no` elsewhere.
    fn select(self, yes: Self, no: Self) -> Self;
    /// 2^n for lanes that are `MAGIC + n`, n from -126 to 127. Any bits for NaN.
    fn exp2_of_magic(self) -> Self;
    fn to_array(self) -> [f32; 8];
    /// Asks for the cache line of `p`, which may be any address.
    fn prefetch(p: *const u8);
}

/// Sum of the lanes in the one order used everywhere: halves, quarters, pairs.
#[inline(always)]
pub(crate) fn sum<V: Lanes>(v: V) -> f32 {
    let p = v.to_array();
    ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]))
}

/// Greatest lane; NaN lanes are passed over.
#[inline(always)]
pub(crate) fn greatest<V: Lanes>(v: V) -> f32 {
    let mut best = f32::NEG_INFINITY;
    for x in v.to_array() {
        best = if x > best { x } else { best };
    }
    best
}

/// e^x to about 1 ulp for x in [-87, 88]; the bounds' values outside; NaN for NaN.
#[inline(always)]
pub(crate) fn exp<V: Lanes>(x: V) -> V {
    // SAFETY: `x` exists, so the CPU has the instruction set.
    unsafe {
        // The constant first: max and min give their second operand for NaN.
        let x = V::splat(88.0).min(V::splat(-87.0).max(x));
        let t = x.fma(V::splat(std::f32::consts::LOG2_E), V::splat(MAGIC));
        let n = t.sub(V::splat(MAGIC));
        // ln 2 in two parts, the first short enough that n times it is exact.
        let r = n.fnma(V::splat(0.693_145_75), x);
        let r = n.fnma(V::splat(1.428_606_8e-6), r);
        polynomial(&EXP, r).mul(t.exp2_of_magic())
    }
}

/// 2^x to about 1 ulp for x in [-126, 0]; 2^-126 below; NaN for NaN.
#[inline(always)]
pub(crate) fn exp2<V: Lanes>(x: V) -> V {
    // SAFETY: `x` exists, so the CPU has the instruction set.
    unsafe {
        let x = V::splat(-126.0).max(x);
        let t = x.add(V::splat(MAGIC));
        let r = x.sub(t.sub(V::splat(MAGIC)));
        polynomial(&EXP2, r).mul(t.exp2_of_magic())
    }
}

/// `cap * tanh(x / cap)`, `x / cap` taken as `x * inverse`; NaN for NaN. `tanh y` is an odd polynomial below .625 and
/// `1 - 2 / (e^2|y| + 1)` from there on.
#[inline(always)]
pub(crate) fn soft_cap<V: Lanes>(x: V, cap: f32, inverse: f32) -> V {
    // SAFETY: `x` exists, so the CPU has the instruction set.
    unsafe {
        let (zero, one, two) = (V::splat(0.0), V::splat(1.0), V::splat(2.0));
        let y = x.mul(V::splat(inverse));
        let (size, square) = (y.select(zero.sub(y), y), y.mul(y));
        let near = polynomial(&TANH, square).mul(square).fma(y, y);
        let far = one.sub(two.div(exp(size.add(size)).add(one)));
        let far = y.select(zero.sub(far), far);
        size.sub(V::splat(0.625)).select(near, far).mul(V::splat(cap))
    }
}

/// `(tanh y - y) / y^3` in powers of `y^2` for |y| <= .625, highest first: least squares of the relative error of tanh at
/// 400 Chebyshev nodes, which stays below 1e-8.
const TANH: [f32; 5] = [-0.005_691_985_6, 0.020_626_292, -0.053_735_32, 0.133_313_82, -0.333_332_8];

/// Adding it rounds to an integer, which then stands in the lowest bits.
pub(crate) const MAGIC: f32 = 12_582_912.0;

/// Highest power first.
///
/// # Safety
/// The CPU can run `V`.
#[inline(always)]
pub(crate) unsafe fn polynomial<V: Lanes>(c: &[f32], r: V) -> V {
    // SAFETY: the caller's promise.
    unsafe {
        let mut p = V::splat(c[0]);
        for c in &c[1..] {
            p = p.fma(r, V::splat(*c));
        }
        p
    }
}

/// e^r for |r| <= ln 2 / 2: least relative error (4e-9) with the last two fixed, so e^0 is 1.
const EXP: [f32; 7] = [0.001_381_446_7, 0.008_368_781, 0.041_668_393, 0.166_665_2, 0.499_999_94, 1.0, 1.0];

/// 2^r for |r| <= 1/2: least relative error (6e-9) with the last two fixed, so 2^0 is 1.
pub(crate) const EXP2: [f32; 7] =
    [0.000_153_925_46, 0.001_338_944_5, 0.009_618_276, 0.055_503_644, 0.240_226_49, std::f32::consts::LN_2, 1.0];

/// The specification.
#[derive(Clone, Copy)]
pub(crate) struct Portable([f32; 8]);

impl Portable {
    #[inline(always)]
    fn zip(self, b: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Portable(std::array::from_fn(|i| f(self.0[i], b.0[i])))
    }
}

impl Lanes for Portable {
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Portable([x; 8])
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller's promise; no alignment beyond f32's is needed.
        Portable(unsafe { p.cast::<[f32; 8]>().read() })
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self {
        // SAFETY: the caller's promise.
        let bits = unsafe { p.cast::<[u16; 8]>().read() };
        Portable(widen(bits))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<[f32; 8]>().write(self.0) }
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        self.zip(b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, b: Self) -> Self {
        self.zip(b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        self.zip(b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, b: Self) -> Self {
        self.zip(b, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        Portable(std::array::from_fn(|i| self.0[i].mul_add(b.0[i], c.0[i])))
    }
    #[inline(always)]
    fn fnma(self, b: Self, c: Self) -> Self {
        Portable(std::array::from_fn(|i| (-self.0[i]).mul_add(b.0[i], c.0[i])))
    }
    #[inline(always)]
    fn max(self, b: Self) -> Self {
        self.zip(b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, b: Self) -> Self {
        self.zip(b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn any_gt(self, b: Self) -> bool {
        (0..8).any(|i| self.0[i] > b.0[i])
    }
    #[inline(always)]
    fn select(self, yes: Self, no: Self) -> Self {
        Portable(std::array::from_fn(|i| if self.0[i].is_sign_negative() { yes.0[i] } else { no.0[i] }))
    }
    #[inline(always)]
    fn exp2_of_magic(self) -> Self {
        Portable(self.0.map(|t| f32::from_bits((t.to_bits() << 23).wrapping_add(1.0f32.to_bits()))))
    }
    #[inline(always)]
    fn to_array(self) -> [f32; 8] {
        self.0
    }
    #[inline(always)]
    fn prefetch(_: *const u8) {}
}

/// Not inlined: the conversion is long, and what matters for speed is not here.
#[inline(never)]
fn widen(bits: [u16; 8]) -> [f32; 8] {
    bits.map(|b| half::f16::from_bits(b).to_f32())
}

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use super::Lanes;

    /// AVX2, FMA and F16C. Methods inline into callers compiled for them.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx2(__m256);

    /// One intrinsic as a safe method.
    macro_rules! op {
        ($($name:ident($($arg:ident),*) = $intrinsic:ident;)*) => {$(
            #[inline(always)]
            fn $name(self, $($arg: Self),*) -> Self {
                // SAFETY: `self` exists, so the CPU has the instruction set.
                Avx2(unsafe { $intrinsic(self.0, $($arg.0),*) })
            }
        )*};
    }

    impl Avx2 {
        /// # Safety
        /// The CPU has the instruction set.
        #[inline(always)]
        pub(crate) unsafe fn from_raw(x: __m256) -> Self {
            Avx2(x)
        }
        #[inline(always)]
        pub(crate) fn raw(self) -> __m256 {
            self.0
        }
    }

    impl Lanes for Avx2 {
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: the caller's promise.
            Avx2(unsafe { _mm256_set1_ps(x) })
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            // SAFETY: the caller's promise.
            Avx2(unsafe { _mm256_loadu_ps(p) })
        }
        #[inline(always)]
        unsafe fn load_f16(p: *const u16) -> Self {
            // SAFETY: the caller's promise.
            Avx2(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) })
        }
        #[inline(always)]
        unsafe fn load_e4m3(p: *const u8) -> Self {
            // SAFETY: the caller's promise. Codes lie in the upper bytes: the sign stays, the others go one to the right.
            unsafe {
                let codes = _mm_unpacklo_epi8(_mm_setzero_si128(), _mm_loadl_epi64(p.cast()));
                let rest = _mm_and_si128(_mm_srli_epi16::<1>(codes), _mm_set1_epi16(0x3f80));
                let sign = _mm_and_si128(codes, _mm_set1_epi16(0x8000u16 as i16));
                Avx2(_mm256_cvtph_ps(_mm_or_si128(sign, rest)))
            }
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            // SAFETY: the caller's promise.
            unsafe { _mm256_storeu_ps(p, self.0) }
        }
        op! {
            add(b) = _mm256_add_ps;
            sub(b) = _mm256_sub_ps;
            mul(b) = _mm256_mul_ps;
            div(b) = _mm256_div_ps;
            max(b) = _mm256_max_ps;
            min(b) = _mm256_min_ps;
            fma(b, c) = _mm256_fmadd_ps;
            fnma(b, c) = _mm256_fnmadd_ps;
        }
        #[inline(always)]
        fn any_gt(self, b: Self) -> bool {
            // SAFETY: `self` exists, so the CPU has the instruction set.
            unsafe { _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(self.0, b.0)) != 0 }
        }
        #[inline(always)]
        fn select(self, yes: Self, no: Self) -> Self {
            // SAFETY: `self` exists, so the CPU has the instruction set.
            Avx2(unsafe { _mm256_blendv_ps(no.0, yes.0, self.0) })
        }
        #[inline(always)]
        fn exp2_of_magic(self) -> Self {
            // SAFETY: `self` exists, so the CPU has the instruction set.
            unsafe {
                let n = _mm256_slli_epi32::<23>(_mm256_castps_si256(self.0));
                Avx2(_mm256_castsi256_ps(_mm256_add_epi32(n, _mm256_set1_epi32(127 << 23))))
            }
        }
        #[inline(always)]
        fn to_array(self) -> [f32; 8] {
            let mut a = [0.0; 8];
            // SAFETY: `self` exists, so the CPU has the instruction set; `a` holds 8 elements.
            unsafe { _mm256_storeu_ps(a.as_mut_ptr(), self.0) }
            a
        }
        #[inline(always)]
        fn prefetch(p: *const u8) {
            // SAFETY: a hint; it never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
        }
    }
}

#[cfg(target_arch = "aarch64")]
pub(crate) use neon::Neon;

#[cfg(target_arch = "aarch64")]
mod neon {
    use std::arch::aarch64::*;
    use std::arch::asm;

    use super::Lanes;

    /// Two vectors of four. NEON is in every processor of this target, so its operations are always there.
    #[derive(Clone, Copy)]
    pub(crate) struct Neon(float32x4_t, float32x4_t);

    /// One intrinsic on either half, as a safe method.
    macro_rules! op {
        ($($name:ident = $intrinsic:ident;)*) => {$(
            #[inline(always)]
            fn $name(self, b: Self) -> Self {
                // SAFETY: every processor of this target has NEON.
                unsafe { Neon($intrinsic(self.0, b.0), $intrinsic(self.1, b.1)) }
            }
        )*};
    }

    impl Lanes for Neon {
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: every processor of this target has NEON; so for all.
            unsafe { Neon(vdupq_n_f32(x), vdupq_n_f32(x)) }
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            // SAFETY: the caller's promise.
            unsafe { Neon(vld1q_f32(p), vld1q_f32(p.add(4))) }
        }
        #[inline(always)]
        unsafe fn load_f16(p: *const u16) -> Self {
            let (low, high): (float32x4_t, float32x4_t);
            // SAFETY: the caller's promise; then two register-only instructions of base NEON, whose
            // intrinsics are not in every toolchain we build with.
            unsafe {
                asm!(
                    "fcvtl {low:v}.4s, {h:v}.4h",
                    "fcvtl2 {high:v}.4s, {h:v}.8h",
                    low = out(vreg) low, high = lateout(vreg) high, h = in(vreg) vld1q_u16(p),
                    options(pure, nomem, nostack, preserves_flags)
                );
            }
            Neon(low, high)
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            // SAFETY: the caller's promise.
            unsafe {
                vst1q_f32(p, self.0);
                vst1q_f32(p.add(4), self.1);
            }
        }
        op! {
            add = vaddq_f32;
            sub = vsubq_f32;
            mul = vmulq_f32;
            div = vdivq_f32;
        }
        #[inline(always)]
        fn fma(self, b: Self, c: Self) -> Self {
            // SAFETY: see `splat`.
            unsafe { Neon(vfmaq_f32(c.0, self.0, b.0), vfmaq_f32(c.1, self.1, b.1)) }
        }
        #[inline(always)]
        fn fnma(self, b: Self, c: Self) -> Self {
            // SAFETY: see `splat`.
            unsafe { Neon(vfmsq_f32(c.0, self.0, b.0), vfmsq_f32(c.1, self.1, b.1)) }
        }
        // The instructions of these names give NaN wherever either is NaN.
        #[inline(always)]
        fn max(self, b: Self) -> Self {
            // SAFETY: see `splat`.
            let max = |a, b| unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) };
            Neon(max(self.0, b.0), max(self.1, b.1))
        }
        #[inline(always)]
        fn min(self, b: Self) -> Self {
            // SAFETY: see `splat`.
            let min = |a, b| unsafe { vbslq_f32(vcltq_f32(a, b), a, b) };
            Neon(min(self.0, b.0), min(self.1, b.1))
        }
        #[inline(always)]
        fn any_gt(self, b: Self) -> bool {
            // SAFETY: see `splat`.
            unsafe { vmaxvq_u32(vorrq_u32(vcgtq_f32(self.0, b.0), vcgtq_f32(self.1, b.1))) != 0 }
        }
        #[inline(always)]
        fn select(self, yes: Self, no: Self) -> Self {
            // SAFETY: see `splat`.
            let select = |x, yes, no| unsafe { vbslq_f32(vcltzq_s32(vreinterpretq_s32_f32(x)), yes, no) };
            Neon(select(self.0, yes.0, no.0), select(self.1, yes.1, no.1))
        }
        #[inline(always)]
        fn exp2_of_magic(self) -> Self {
            // SAFETY: see `splat`.
            let exp2 = |t| unsafe {
                let n = vshlq_n_s32::<23>(vreinterpretq_s32_f32(t));
                vreinterpretq_f32_s32(vaddq_s32(n, vdupq_n_s32(127 << 23)))
            };
            Neon(exp2(self.0), exp2(self.1))
        }
        #[inline(always)]
        fn to_array(self) -> [f32; 8] {
            let mut a = [0.0; 8];
            // SAFETY: `a` holds 8 elements.
            unsafe { self.store(a.as_mut_ptr()) }
            a
        }
        #[inline(always)]
        fn prefetch(p: *const u8) {
            // SAFETY: a hint; it never faults.
            unsafe { asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(readonly, nostack, preserves_flags)) }
        }
    }
}
