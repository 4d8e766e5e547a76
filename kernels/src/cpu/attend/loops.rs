//! The inner loops of attention: scores, softmax and weighted values of one tile of query vectors against one block.
//!
//! What one vector goes through is the same in every tile: scores are one fma chain over `d`; the running sum keeps
//! eight lanes until the split ends; weighted values are one fma chain over tokens in ascending order.

// Loops over registers: indices are what must be unrolled.
#![allow(clippy::needless_range_loop)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m512, _mm256_loadu_si256, _mm512_cvtph_ps, _mm512_loadu_ps};
use std::ops::Range;

use super::super::kv::BLOCK;
#[cfg(target_arch = "x86_64")]
use super::super::lanes::Avx2;
#[cfg(target_arch = "aarch64")]
use super::super::lanes::Neon;
use super::super::lanes::{Lanes, Portable, exp2, greatest, soft_cap};
use super::ints::Ints;
#[cfg(target_arch = "x86_64")]
use super::wide::join;
use super::{codes, fp8};

/// Storage of elements in a block.
pub(super) trait Element {
    type Raw;
    const CONVERTED: bool;
    /// # Safety
    /// The CPU can run `V`; `p` is valid for reading 8 elements.
    unsafe fn load<V: Lanes>(p: *const Self::Raw) -> V;
    /// Two times eight elements.
    ///
    /// # Safety
    /// The CPU has AVX-512; `p` is valid for reading 16 elements.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_16(p: *const Self::Raw) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { join(Self::load::<Avx2>(p).raw(), Self::load::<Avx2>(p.add(8)).raw()) }
    }
    /// `acc[v] += x[v] * p`, each rounded once.
    ///
    /// # Safety
    /// As `load`.
    #[inline(always)]
    unsafe fn fma<V: Ints, const N: usize>(acc: &mut [V; N], x: [V; N], p: *const Self::Raw) {
        // SAFETY: the caller's promise.
        let k = unsafe { Self::load::<V>(p) };
        for v in 0..N {
            acc[v] = x[v].fma(k, acc[v]);
        }
    }
}

/// binary16.
pub(super) struct Half;
/// binary32.
pub(super) struct Single;

impl Element for Half {
    type Raw = u16;
    const CONVERTED: bool = true;
    #[inline(always)]
    unsafe fn load<V: Lanes>(p: *const u16) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_f16(p) }
    }
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_16(p: *const u16) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn fma<V: Ints, const N: usize>(acc: &mut [V; N], x: [V; N], p: *const u16) {
        // SAFETY: the caller's promise.
        unsafe {
            if let (Ok(acc), Ok(x)) = (<&mut [V; 3]>::try_from(&mut acc[..]), <[V; 3]>::try_from(&x[..])) {
                V::fma3_f16(acc, x, p);
                return;
            }
            let k = V::load_f16(p);
            for v in 0..N {
                acc[v] = x[v].fma(k, acc[v]);
            }
        }
    }
}

impl Element for Single {
    type Raw = f32;
    const CONVERTED: bool = false;
    #[inline(always)]
    unsafe fn load<V: Lanes>(p: *const f32) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load(p) }
    }
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_16(p: *const f32) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_ps(p) }
    }
}

/// The inner loops, compiled for one instruction set. They are the unit of code generation: what calls them is ordinary
/// code, so that a dozen tile shapes do not end up in one function. Each is the free function of the same name.
pub(super) trait Loops {
    /// Most vectors of a group that is taken through two blocks at once.
    const PAIRS: usize;

    /// # Safety
    /// As the free function; so for all.
    unsafe fn scores<E: Element, const N: usize, const AHEAD: bool>(
        q: *const f32,
        k: *const E::Raw,
        next: *const u8,
        full: bool,
        t: Tile,
    );
    /// # Safety
    /// See `scores`.
    unsafe fn two_scores<E: Element, const N: usize, const AHEAD: bool>(
        q: *const f32,
        k: [*const E::Raw; 2],
        next: [*const u8; 2],
        t: [Tile; 2],
    );
    /// # Safety
    /// See `scores`.
    unsafe fn weigh_all<const N: usize>(t: Tile);
    /// # Safety
    /// See `scores`.
    unsafe fn values<E: Element, const N: usize, const STRIP: usize, const AHEAD: bool>(
        tokens: Range<usize>,
        at: *const E::Raw,
        next: *const u8,
        t: Tile,
    );
    /// # Safety
    /// See `scores`.
    unsafe fn weigh_some(sees: Range<usize>, t: Tile);
    /// # Safety
    /// See `scores`.
    unsafe fn widen<E: Element>(from: *const E::Raw, next: *const E::Raw, to: *mut f32, n: usize);
    /// # Safety
    /// As [`fp8::keys`].
    unsafe fn widen_keys(at: *const u8, next: *const u8, to: *mut f32, d: usize);
    /// # Safety
    /// As [`fp8::values`].
    unsafe fn widen_values(at: *const u8, next: *const u8, to: *mut f32, d: usize);
    /// # Safety
    /// See `scores`.
    unsafe fn code_query(q: &[f32], scale: f32, stride: usize, to: *mut [i16; 2], unit: *mut f32);
    /// # Safety
    /// See `scores`.
    unsafe fn code_scores<const N: usize, const AHEAD: bool>(
        q: *const [i16; 2],
        unit: *const f32,
        at: *const u8,
        next: *const u8,
        full: bool,
        t: Tile,
    );
    /// # Safety
    /// See `scores`.
    unsafe fn code_some(sees: Range<usize>, scales: *const u16, t: Tile);
    /// # Safety
    /// See `scores`.
    unsafe fn code_values<const N: usize, const STRIP: usize, const AHEAD: bool>(
        at: *const i8,
        next: *const u8,
        t: Tile,
    );
    /// # Safety
    /// See `scores`.
    unsafe fn fold(m: &mut f32, l: &mut f32, o: &mut [f32], next: (f32, f32, &[f32]));
    /// # Safety
    /// See `scores`.
    unsafe fn normalize(l: f32, o: &mut [f32]);
    /// # Safety
    /// See `scores`.
    unsafe fn cap(vectors: usize, cap: f32, t: Tile);
    /// # Safety
    /// See `scores`.
    unsafe fn sink(m: f32, l: &mut f32, o: &mut [f32], sink: f32);
}

/// Lanes with a [`rise`] that is not inlined.
pub(super) trait Rise: Ints {
    /// # Safety
    /// As the free function.
    unsafe fn rise(top: Self, t: Tile) -> Self;
}

macro_rules! loops {
    ($lanes:ty $(, $feature:meta)?) => {
        impl Rise for $lanes {
            $(#[$feature])?
            #[inline(never)]
            unsafe fn rise(top: Self, t: Tile) -> Self {
                // SAFETY: the caller's promise.
                unsafe { rise::<Self>(top, t) }
            }
        }

        impl Loops for $lanes {
            const PAIRS: usize = 3;
            $(#[$feature])?
            unsafe fn scores<E: Element, const N: usize, const AHEAD: bool>(
                q: *const f32,
                k: *const E::Raw,
                next: *const u8,
                full: bool,
                t: Tile,
            ) {
                // SAFETY: the caller's promise; so for all.
                unsafe { scores::<Self, E, N, AHEAD>(q, k, next, full, t) }
            }
            $(#[$feature])?
            unsafe fn two_scores<E: Element, const N: usize, const AHEAD: bool>(
                q: *const f32,
                k: [*const E::Raw; 2],
                next: [*const u8; 2],
                t: [Tile; 2],
            ) {
                // SAFETY: see `scores`.
                unsafe { two_scores::<Self, E, N, AHEAD>(q, k, next, t) }
            }
            $(#[$feature])?
            unsafe fn weigh_all<const N: usize>(t: Tile) {
                // SAFETY: see `scores`.
                unsafe { weigh_all::<Self, N>(t) }
            }
            $(#[$feature])?
            unsafe fn values<E: Element, const N: usize, const STRIP: usize, const AHEAD: bool>(
                tokens: Range<usize>,
                at: *const E::Raw,
                next: *const u8,
                t: Tile,
            ) {
                // SAFETY: see `scores`.
                unsafe { values::<Self, E, N, STRIP, AHEAD>(tokens, at, next, t) }
            }
            $(#[$feature])?
            unsafe fn weigh_some(sees: Range<usize>, t: Tile) {
                // SAFETY: see `scores`.
                unsafe { weigh_some::<Self>(sees, t) }
            }
            $(#[$feature])?
            unsafe fn widen<E: Element>(from: *const E::Raw, next: *const E::Raw, to: *mut f32, n: usize) {
                // SAFETY: see `scores`.
                unsafe { widen::<Self, E>(from, next, to, n) }
            }
            $(#[$feature])?
            unsafe fn widen_keys(at: *const u8, next: *const u8, to: *mut f32, d: usize) {
                // SAFETY: see `scores`.
                unsafe { fp8::keys::<Self>(at, next, to, d) }
            }
            $(#[$feature])?
            unsafe fn widen_values(at: *const u8, next: *const u8, to: *mut f32, d: usize) {
                // SAFETY: see `scores`.
                unsafe { fp8::values::<Self>(at, next, to, d) }
            }
            $(#[$feature])?
            unsafe fn code_query(q: &[f32], scale: f32, stride: usize, to: *mut [i16; 2], unit: *mut f32) {
                // SAFETY: see `scores`.
                unsafe { codes::query::<Self>(q, scale, stride, to, unit) }
            }
            $(#[$feature])?
            unsafe fn code_scores<const N: usize, const AHEAD: bool>(
                q: *const [i16; 2],
                unit: *const f32,
                at: *const u8,
                next: *const u8,
                full: bool,
                t: Tile,
            ) {
                // SAFETY: see `scores`.
                unsafe { codes::scores::<Self, N, AHEAD>(q, unit, at, next, full, t) }
            }
            $(#[$feature])?
            unsafe fn code_some(sees: Range<usize>, scales: *const u16, t: Tile) {
                // SAFETY: see `scores`.
                unsafe { codes::weigh_some::<Self>(sees, scales, t) }
            }
            $(#[$feature])?
            unsafe fn code_values<const N: usize, const STRIP: usize, const AHEAD: bool>(
                at: *const i8,
                next: *const u8,
                t: Tile,
            ) {
                // SAFETY: see `scores`.
                unsafe { codes::values::<Self, N, STRIP, AHEAD>(at, next, t) }
            }
            $(#[$feature])?
            unsafe fn fold(m: &mut f32, l: &mut f32, o: &mut [f32], next: (f32, f32, &[f32])) {
                // SAFETY: see `scores`.
                unsafe { fold::<Self>(m, l, o, next) }
            }
            $(#[$feature])?
            unsafe fn normalize(l: f32, o: &mut [f32]) {
                // SAFETY: see `scores`.
                unsafe { normalize::<Self>(l, o) }
            }
            $(#[$feature])?
            unsafe fn cap(vectors: usize, cap: f32, t: Tile) {
                // SAFETY: see `scores`.
                unsafe { self::cap::<Self>(vectors, cap, t) }
            }
            $(#[$feature])?
            unsafe fn sink(m: f32, l: &mut f32, o: &mut [f32], sink: f32) {
                // SAFETY: see `scores`.
                unsafe { self::sink::<Self>(m, l, o, sink) }
            }
        }
    };
}

loops!(Portable);
#[cfg(target_arch = "x86_64")]
loops!(Avx2, target_feature(enable = "avx2,fma,f16c"));
#[cfg(target_arch = "aarch64")]
loops!(Neon);

/// Softmax state of some vectors.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// Scores, then weights of one block, `[vectors][BLOCK]`; codes of weights are as many i16.
    pub w: *mut f32,
    /// What a code of a weight stands for, `[vectors]`.
    pub unit: *mut f32,
    /// Running maximum, `[vectors]`.
    pub m: *mut f32,
    /// Running sum in lanes, `[vectors][8]`.
    pub l: *mut f32,
    /// Running weighted values, `[vectors][d]`.
    pub o: *mut f32,
    pub d: usize,
}

impl Tile {
    /// # Safety
    /// There is a vector `v`.
    #[inline(always)]
    pub unsafe fn vector(self, v: usize) -> Tile {
        // SAFETY: the caller's promise.
        unsafe {
            Tile {
                w: self.w.add(v * BLOCK),
                unit: self.unit.add(v),
                m: self.m.add(v),
                l: self.l.add(v * 8),
                o: self.o.add(v * self.d),
                d: self.d,
            }
        }
    }

    /// Copies what was summed for the first vectors of this state over that of another.
    ///
    /// # Safety
    /// There are so many vectors, in different memory.
    pub unsafe fn copy_to(self, other: Tile, vectors: usize) {
        assert_eq!(self.d, other.d);
        // SAFETY: the caller's promise.
        unsafe {
            std::ptr::copy_nonoverlapping(self.m, other.m, vectors);
            std::ptr::copy_nonoverlapping(self.l, other.l, 8 * vectors);
            std::ptr::copy_nonoverlapping(self.o, other.o, self.d * vectors);
        }
    }
}

/// `sum over i of q[i][v] * k[i][t]` for all tokens of the block: tokens are lanes and do not mix. If the rows see the
/// block in full, the scores go through the softmax in registers and weights are left in `w`; if not, scores are.
///
/// # Safety
/// The CPU can run `V`; `q` is `[d][N]`, `k` `[d][BLOCK]`, `t` holds `N` vectors.
#[inline(always)]
unsafe fn scores<V: Rise, E: Element, const N: usize, const AHEAD: bool>(
    q: *const f32,
    k: *const E::Raw,
    next: *const u8,
    full: bool,
    t: Tile,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[V::splat(0.0); 2]; N];
        for i in (0..t.d).step_by(UNROLL) {
            for i in i..i + UNROLL {
                if AHEAD && (i * BLOCK * size_of::<E::Raw>()).is_multiple_of(64) {
                    V::prefetch(next.wrapping_add(i * BLOCK * size_of::<E::Raw>()));
                }
                let (k0, k1) = (E::load::<V>(k.add(i * BLOCK)), E::load::<V>(k.add(i * BLOCK + 8)));
                for v in 0..N {
                    let x = V::splat(*q.add(i * N + v));
                    acc[v][0] = x.fma(k0, acc[v][0]);
                    acc[v][1] = x.fma(k1, acc[v][1]);
                }
            }
        }
        for v in 0..N {
            acc[v][0].store(t.vector(v).w);
            acc[v][1].store(t.vector(v).w.add(8));
        }
        if full {
            weigh_all::<V, N>(t);
        }
    }
}

/// Scores of two blocks at once, left in `w`: few vectors alone are too few chains to keep the multipliers busy.
///
/// # Safety
/// As [`scores`], twice.
#[inline(always)]
unsafe fn two_scores<V: Ints, E: Element, const N: usize, const AHEAD: bool>(
    q: *const f32,
    k: [*const E::Raw; 2],
    next: [*const u8; 2],
    t: [Tile; 2],
) {
    // SAFETY: the caller's promise.
    unsafe {
        // [block][half][vector]
        let mut acc = [[[V::splat(0.0); N]; 2]; 2];
        for i in 0..t[0].d {
            let mut x = [V::splat(0.0); N];
            for v in 0..N {
                x[v] = V::splat(*q.add(i * N + v));
            }
            for b in 0..2 {
                if AHEAD {
                    V::prefetch(next[b].wrapping_add(i * BLOCK * size_of::<E::Raw>()));
                }
                for half in 0..2 {
                    E::fma(&mut acc[b][half], x, k[b].add(i * BLOCK + 8 * half));
                }
            }
        }
        for b in 0..2 {
            for v in 0..N {
                let t = t[b].vector(v);
                acc[b][0][v].store(t.w);
                acc[b][1][v].store(t.w.add(8));
            }
        }
    }
}

/// Softmax of vectors that see the whole block: scores in `w` become weights.
///
/// # Safety
/// The CPU can run `V`; `t` holds `N` vectors.
#[inline(always)]
unsafe fn weigh_all<V: Rise, const N: usize>(t: Tile) {
    for v in 0..N {
        // SAFETY: the caller's promise.
        unsafe {
            let t = t.vector(v);
            let (e0, e1) = weigh(V::load(t.w), V::load(t.w.add(8)), t);
            V::load(t.l).add(e0.add(e1)).store(t.l);
            e0.store(t.w);
            e1.store(t.w.add(8));
        }
    }
}

/// Columns per round of the loop over `d`, a divisor of 8.
pub(super) const UNROLL: usize = 4;

/// Weights of 16 scores under the running maximum, which they may raise.
///
/// # Safety
/// The CPU can run `V`; `t` holds a vector.
#[inline(always)]
pub(super) unsafe fn weigh<V: Rise>(x0: V, x1: V, t: Tile) -> (V, V) {
    // SAFETY: the caller's promise.
    unsafe {
        let top = x0.max(x1);
        let mut m = V::splat(*t.m);
        if top.any_gt(m.add(V::splat(SLACK))) {
            m = V::rise(top, t);
        }
        (exp2(x0.sub(m)), exp2(x1.sub(m)))
    }
}

/// How far, in powers of two, scores may pass the running maximum before it is raised. Weights grow to 2^8 at most,
/// which f32 does not mind, and all but the first block of a split are usually spared the rescaling.
pub(super) const SLACK: f32 = 8.0;

/// Raises the running maximum to the greatest lane of `top` and scales what was summed under the old one.
///
/// # Safety
/// As [`weigh`].
#[inline(always)]
unsafe fn rise<V: Rise>(top: V, t: Tile) -> V {
    // SAFETY: the caller's promise.
    unsafe {
        let m = greatest(top);
        // Before the first score everything is 0.
        if *t.m > f32::NEG_INFINITY {
            let c = exp2(V::splat(*t.m - m));
            V::load(t.l).mul(c).store(t.l);
            for i in (0..t.d).step_by(8) {
                V::load(t.o.add(i)).mul(c).store(t.o.add(i));
            }
        }
        *t.m = m;
        V::splat(m)
    }
}

/// Softmax of one vector over the tokens that it sees: scores in `w` become weights, exactly 0 for the others.
///
/// # Safety
/// As [`weigh`]; `sees` is within the block.
#[inline(always)]
pub(super) unsafe fn weigh_some<V: Rise>(sees: Range<usize>, t: Tile) {
    // SAFETY: the caller's promise.
    unsafe {
        let (none, zero) = (V::splat(f32::NEG_INFINITY), V::splat(0.0));
        let (x0, x1) = (keep(V::load(t.w), none, &sees, 0), keep(V::load(t.w.add(8)), none, &sees, 8));
        let (e0, e1) = weigh(x0, x1, t);
        let (e0, e1) = (keep(e0, zero, &sees, 0), keep(e1, zero, &sees, 8));
        V::load(t.l).add(e0.add(e1)).store(t.l);
        e0.store(t.w);
        e1.store(t.w.add(8));
    }
}

/// `x` where the token `first + lane` is among `sees`, `other` elsewhere.
///
/// # Safety
/// The CPU can run `V`; `sees` is within the block, `first + 8` at most BLOCK.
#[inline(always)]
pub(super) unsafe fn keep<V: Lanes>(x: V, other: V, sees: &Range<usize>, first: usize) -> V {
    // SAFETY: the loads start at 0..=16 plus `first` of 32 elements.
    unsafe {
        let from = V::load(FROM.as_ptr().add(BLOCK - sees.start + first));
        let until = V::load(UNTIL.as_ptr().add(BLOCK - sees.end + first));
        until.select(from.select(x, other), other)
    }
}

/// `FROM[BLOCK - a + t]` is negative where `t >= a`.
static FROM: [f32; 2 * BLOCK] = halves(1.0, -1.0);
/// `UNTIL[BLOCK - b + t]` is negative where `t < b`.
static UNTIL: [f32; 2 * BLOCK] = halves(-1.0, 1.0);

const fn halves(low: f32, high: f32) -> [f32; 2 * BLOCK] {
    let mut a = [low; 2 * BLOCK];
    let mut i = BLOCK;
    while i < 2 * BLOCK {
        a[i] = high;
        i += 1;
    }
    a
}

/// `o[v] += w[v][t] * values[t]`, `t` ascending.
///
/// # Safety
/// The CPU can run `V`; `t` holds `N` vectors, `at` is `[BLOCK][d]`; tokens are below BLOCK.
#[inline(always)]
unsafe fn values<V: Ints, E: Element, const N: usize, const STRIP: usize, const AHEAD: bool>(
    tokens: Range<usize>,
    at: *const E::Raw,
    next: *const u8,
    t: Tile,
) {
    if tokens.is_empty() {
        return;
    }
    let mut i = 0;
    // SAFETY: the caller's promise; strips end at or before d, a multiple of 8.
    unsafe {
        // Known bounds let the compiler unroll the loop over tokens.
        while tokens == (0..BLOCK) && i + 8 * STRIP <= t.d {
            strip::<V, E, N, STRIP, AHEAD>(0..BLOCK, at, next, i, t);
            i += 8 * STRIP;
        }
        while i + 8 * STRIP <= t.d {
            strip::<V, E, N, STRIP, AHEAD>(tokens.clone(), at, next, i, t);
            i += 8 * STRIP;
        }
        while i < t.d {
            strip::<V, E, N, 1, AHEAD>(tokens.clone(), at, next, i, t);
            i += 8;
        }
    }
}

/// Columns `i..i + 8 * STRIP` of [`values`].
///
/// # Safety
/// As [`values`].
#[inline(always)]
pub(super) unsafe fn strip<V: Ints, E: Element, const N: usize, const STRIP: usize, const AHEAD: bool>(
    tokens: Range<usize>,
    at: *const E::Raw,
    next: *const u8,
    i: usize,
    tile: Tile,
) {
    let Tile { w, o, d, .. } = tile;
    // SAFETY: the caller's promise.
    unsafe {
        // [strip][vector]: a vector of values meets all weights before the next one is needed, or the other way round,
        // so that what waits in registers is the lesser of the two.
        let mut acc = [[V::splat(0.0); N]; STRIP];
        for v in 0..N {
            for c in 0..STRIP {
                acc[c][v] = V::load(o.add(v * d + i + 8 * c));
            }
        }
        for t in tokens {
            let row = t * d + i;
            if AHEAD {
                for line in 0..(8 * STRIP * size_of::<E::Raw>()).div_ceil(64) {
                    V::prefetch(next.wrapping_add(row * size_of::<E::Raw>() + 64 * line));
                }
            }
            if N < STRIP {
                let mut weights = [V::splat(0.0); N];
                for v in 0..N {
                    weights[v] = V::splat(*w.add(v * BLOCK + t));
                }
                for c in 0..STRIP {
                    E::fma(&mut acc[c], weights, at.add(row + 8 * c));
                }
                continue;
            }
            let mut x = [V::splat(0.0); STRIP];
            for c in 0..STRIP {
                x[c] = E::load::<V>(at.add(row + 8 * c));
            }
            for v in 0..N {
                let weight = V::splat(*w.add(v * BLOCK + t));
                for c in 0..STRIP {
                    acc[c][v] = weight.fma(x[c], acc[c][v]);
                }
            }
        }
        for v in 0..N {
            for c in 0..STRIP {
                acc[c][v].store(o.add(v * d + i + 8 * c));
            }
        }
    }
}

/// `to = from` as f32, `n` elements, a multiple of 8.
///
/// # Safety
/// The CPU can run `V`; both are valid for `n` elements.
#[inline(always)]
unsafe fn widen<V: Lanes, E: Element>(from: *const E::Raw, next: *const E::Raw, to: *mut f32, n: usize) {
    for i in (0..n).step_by(8) {
        V::prefetch(next.wrapping_add(i).cast());
        // SAFETY: the caller's promise.
        unsafe { E::load::<V>(from.add(i)).store(to.add(i)) };
    }
}

/// Folds the next split's `(m, l, o)` into the running one. Always left to right: not associative in f32.
///
/// # Safety
/// The CPU can run `V`. Both `o` have the same length, a multiple of 8.
#[inline(always)]
pub(super) unsafe fn fold<V: Lanes>(m: &mut f32, l: &mut f32, o: &mut [f32], next: (f32, f32, &[f32])) {
    assert!(o.len() == next.2.len() && o.len().is_multiple_of(8));
    let top = if next.0 > *m { next.0 } else { *m };
    // SAFETY: the caller's promise; the lengths were checked.
    unsafe {
        let (a, b) = (exp2(V::splat(*m - top)), exp2(V::splat(next.0 - top)));
        for i in (0..o.len()).step_by(8) {
            let scaled = b.mul(V::load(next.2.as_ptr().add(i)));
            a.fma(V::load(o.as_ptr().add(i)), scaled).store(o.as_mut_ptr().add(i));
        }
        *l = a.fma(V::splat(*l), b.mul(V::splat(next.1))).to_array()[0];
    }
    *m = top;
}

/// Caps the scores in `w`, whatever lies there for tokens that nobody sees.
///
/// # Safety
/// The CPU can run `V`; `t` holds so many vectors.
#[inline(always)]
pub(super) unsafe fn cap<V: Lanes>(vectors: usize, cap: f32, t: Tile) {
    let inverse = 1.0 / cap;
    for i in (0..vectors * BLOCK).step_by(8) {
        // SAFETY: the caller's promise.
        unsafe { soft_cap(V::load(t.w.add(i)), cap, inverse).store(t.w.add(i)) };
    }
}

/// Takes a score without a value into `(m, l, o)`; then `m` is no longer needed.
///
/// # Safety
/// The CPU can run `V`. The length is a multiple of 8.
#[inline(always)]
pub(super) unsafe fn sink<V: Lanes>(m: f32, l: &mut f32, o: &mut [f32], sink: f32) {
    assert!(o.len().is_multiple_of(8));
    let top = if sink > m { sink } else { m };
    // SAFETY: the caller's promise; i + 8 <= length.
    unsafe {
        let (a, b) = (exp2(V::splat(m - top)), exp2(V::splat(sink - top)));
        for i in (0..o.len()).step_by(8) {
            a.mul(V::load(o.as_ptr().add(i))).store(o.as_mut_ptr().add(i));
        }
        *l = a.fma(V::splat(*l), b).to_array()[0];
    }
}

/// `o /= l`.
///
/// # Safety
/// The CPU can run `V`. The length is a multiple of 8.
#[inline(always)]
pub(super) unsafe fn normalize<V: Lanes>(l: f32, o: &mut [f32]) {
    assert!(o.len().is_multiple_of(8));
    for i in (0..o.len()).step_by(8) {
        // SAFETY: the caller's promise; i + 8 <= length.
        unsafe { V::load(o.as_ptr().add(i)).div(V::splat(l)).store(o.as_mut_ptr().add(i)) };
    }
}
