//! Instructions that each lane does for itself: rows of registers, and functions over them.
//!
//! A function is compiled twice, for the processor's base and for AVX2 with fused multiply-add; which one an
//! instruction calls is decided when it is lowered. The loops over 32 lanes vectorise by themselves.

use super::Warp;
use crate::ptx::types::{NONE, Reg};

/// 32 values, one for each lane.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub struct Row<T>(pub [T; 32]);

/// Operands of an instruction: destinations `d` and `e`, sources `a`, `b`, `c`, an immediate `k`.
#[derive(Clone, Copy, Debug)]
pub struct Args {
    pub d: Reg,
    pub e: Reg,
    pub a: Reg,
    pub b: Reg,
    pub c: Reg,
    pub k: u32,
}

impl Default for Args {
    fn default() -> Args {
        Args { d: NONE, e: NONE, a: NONE, b: NONE, c: NONE, k: 0 }
    }
}

/// Runs an instruction for the lanes of a mask. Unsafe to call only where the processor lacks what it was chosen
/// for, which [`pick`] rules out.
pub type Lanes = unsafe fn(&mut Warp, &Args, u32);

/// Whether the functions for AVX2 and FMA may run here.
#[cfg(target_arch = "x86_64")]
pub fn wide_vectors() -> bool {
    let vectors = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    let bits = is_x86_feature_detected!("bmi1") && is_x86_feature_detected!("bmi2");
    vectors && bits && is_x86_feature_detected!("popcnt") && is_x86_feature_detected!("lzcnt")
}

/// The version of a body (`fn(&mut Warp, &Args, u32)`, inlined) that this processor can run.
macro_rules! pick {
    ($body:path) => {{
        use $crate::exec::{Args, Lanes, Warp};
        fn plain(w: &mut Warp, x: &Args, m: u32) {
            $body(w, x, m)
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,bmi1,bmi2,popcnt,lzcnt")]
        fn wide(w: &mut Warp, x: &Args, m: u32) {
            $body(w, x, m)
        }
        #[cfg(target_arch = "x86_64")]
        let chosen = if $crate::exec::lanes::wide_vectors() { wide as Lanes } else { plain as Lanes };
        #[cfg(not(target_arch = "x86_64"))]
        let chosen = plain as Lanes;
        chosen
    }};
}

/// `lanes!(map2, |a: u32, b: u32| a & b)`: an instruction that maps each lane's sources to its destination.
macro_rules! lanes {
    ($map:ident, $f:expr) => {{
        #[inline(always)]
        fn body(w: &mut $crate::exec::Warp, x: &$crate::exec::Args, m: u32) {
            $crate::exec::lanes::$map(w, x, m, $f)
        }
        $crate::exec::lanes::pick!(body)
    }};
}

/// `direct!(f, A, B, C => D)`: like `lanes!` with a function, which is inlined for certain where the compiler would
/// think it too long. For what is long and often called.
macro_rules! direct {
    ($f:path, $a:ty => $d:ty) => {{
        #[inline(always)]
        fn body(w: &mut $crate::exec::Warp, x: &$crate::exec::Args, m: u32) {
            use $crate::exec::lanes::{Lane, store};
            let a = <$a as Lane>::row(w, x.a);
            let mut row = <$d as Lane>::ZERO;
            for i in 0..32 {
                row.0[i] = $f(<$a as Lane>::lift(a.0[i])).bits_of();
            }
            store::<$d>(w, x.d, row, m);
        }
        $crate::exec::lanes::pick!(body)
    }};
    ($f:path, $a:ty, $b:ty => $d:ty) => {{
        #[inline(always)]
        fn body(w: &mut $crate::exec::Warp, x: &$crate::exec::Args, m: u32) {
            use $crate::exec::lanes::{Lane, store};
            let (a, b) = (<$a as Lane>::row(w, x.a), <$b as Lane>::row(w, x.b));
            let mut row = <$d as Lane>::ZERO;
            for i in 0..32 {
                row.0[i] = $f(<$a as Lane>::lift(a.0[i]), <$b as Lane>::lift(b.0[i])).bits_of();
            }
            store::<$d>(w, x.d, row, m);
        }
        $crate::exec::lanes::pick!(body)
    }};
    ($f:path, $a:ty, $b:ty, $c:ty => $d:ty) => {{
        #[inline(always)]
        fn body(w: &mut $crate::exec::Warp, x: &$crate::exec::Args, m: u32) {
            use $crate::exec::lanes::{Lane, store};
            let (a, b, c) = (<$a as Lane>::row(w, x.a), <$b as Lane>::row(w, x.b), <$c as Lane>::row(w, x.c));
            let mut row = <$d as Lane>::ZERO;
            for i in 0..32 {
                let (a, b, c) = (<$a as Lane>::lift(a.0[i]), <$b as Lane>::lift(b.0[i]), <$c as Lane>::lift(c.0[i]));
                row.0[i] = $f(a, b, c).bits_of();
            }
            store::<$d>(w, x.d, row, m);
        }
        $crate::exec::lanes::pick!(body)
    }};
}
pub(crate) use {direct, lanes, pick};

/// A type that lies in registers.
pub trait Lane: Copy {
    type Raw: Copy;
    const ZERO: Row<Self::Raw>;
    fn row(w: &Warp, r: Reg) -> &Row<Self::Raw>;
    fn row_mut(w: &mut Warp, r: Reg) -> &mut Row<Self::Raw>;
    fn lift(raw: Self::Raw) -> Self;
    fn bits_of(self) -> Self::Raw;
    fn select(take: bool, new: Self::Raw, old: Self::Raw) -> Self::Raw;
}

macro_rules! lane {
    ($ty:ty, $raw:ty, $bank:ident, $from:expr, $to:expr) => {
        impl Lane for $ty {
            type Raw = $raw;
            const ZERO: Row<$raw> = Row([0; 32]);
            #[inline(always)]
            fn row(w: &Warp, r: Reg) -> &Row<$raw> {
                &w.$bank[r as usize]
            }
            #[inline(always)]
            fn row_mut(w: &mut Warp, r: Reg) -> &mut Row<$raw> {
                &mut w.$bank[r as usize]
            }
            #[inline(always)]
            fn lift(raw: $raw) -> Self {
                ($from)(raw)
            }
            #[inline(always)]
            fn bits_of(self) -> $raw {
                ($to)(self)
            }
            #[inline(always)]
            fn select(take: bool, new: $raw, old: $raw) -> $raw {
                let keep = <$raw>::from(take).wrapping_neg();
                (new & keep) | (old & !keep)
            }
        }
    };
}

lane!(u32, u32, r, |raw| raw, |v| v);
lane!(i32, u32, r, |raw| raw as i32, |v| v as u32);
lane!(f32, u32, r, f32::from_bits, f32::to_bits);
lane!(u16, u32, r, |raw| raw as u16, u32::from);
lane!(i16, u32, r, |raw| raw as i16, |v| v as u16 as u32);
lane!(u8, u32, r, |raw| raw as u8, u32::from);
lane!(i8, u32, r, |raw| raw as i8, |v| v as u8 as u32);
lane!(u64, u64, q, |raw| raw, |v| v);
lane!(i64, u64, q, |raw| raw as i64, |v| v as u64);
lane!(f64, u64, q, f64::from_bits, f64::to_bits);

/// Writes the lanes of `m`.
#[inline(always)]
pub fn store<D: Lane>(w: &mut Warp, r: Reg, row: Row<D::Raw>, m: u32) {
    if r == NONE {
        return;
    }
    let old = D::row_mut(w, r);
    if m == !0 {
        *old = row;
    } else {
        for i in 0..32 {
            old.0[i] = D::select(m >> i & 1 == 1, row.0[i], old.0[i]);
        }
    }
}

#[inline(always)]
pub fn map1<A: Lane, D: Lane>(w: &mut Warp, x: &Args, m: u32, f: impl Fn(A) -> D) {
    let a = A::row(w, x.a);
    let mut row = D::ZERO;
    for i in 0..32 {
        row.0[i] = f(A::lift(a.0[i])).bits_of();
    }
    store::<D>(w, x.d, row, m);
}

#[inline(always)]
pub fn map2<A: Lane, B: Lane, D: Lane>(w: &mut Warp, x: &Args, m: u32, f: impl Fn(A, B) -> D) {
    let (a, b) = (A::row(w, x.a), B::row(w, x.b));
    let mut row = D::ZERO;
    for i in 0..32 {
        row.0[i] = f(A::lift(a.0[i]), B::lift(b.0[i])).bits_of();
    }
    store::<D>(w, x.d, row, m);
}

#[inline(always)]
pub fn map3<A: Lane, B: Lane, C: Lane, D: Lane>(w: &mut Warp, x: &Args, m: u32, f: impl Fn(A, B, C) -> D) {
    let (a, b, c) = (A::row(w, x.a), B::row(w, x.b), C::row(w, x.c));
    let mut row = D::ZERO;
    for i in 0..32 {
        row.0[i] = f(A::lift(a.0[i]), B::lift(b.0[i]), C::lift(c.0[i])).bits_of();
    }
    store::<D>(w, x.d, row, m);
}

/// Like [`map3`], with the immediate.
#[inline(always)]
pub fn map3k<A: Lane, B: Lane, C: Lane, D: Lane>(w: &mut Warp, x: &Args, m: u32, f: impl Fn(A, B, C, u32) -> D) {
    let k = x.k;
    map3(w, x, m, |a, b, c| f(a, b, c, k));
}

/// Four sources: the fourth is in the register that `k` names.
#[inline(always)]
pub fn map4<A: Lane, B: Lane, C: Lane, E: Lane, D: Lane>(w: &mut Warp, x: &Args, m: u32, f: impl Fn(A, B, C, E) -> D) {
    let (a, b, c, e) = (A::row(w, x.a), B::row(w, x.b), C::row(w, x.c), E::row(w, x.k as Reg));
    let mut row = D::ZERO;
    for i in 0..32 {
        row.0[i] = f(A::lift(a.0[i]), B::lift(b.0[i]), C::lift(c.0[i]), E::lift(e.0[i])).bits_of();
    }
    store::<D>(w, x.d, row, m);
}

/// Two sources and a choice by the predicate `c`.
#[inline(always)]
pub fn choose<A: Lane>(w: &mut Warp, x: &Args, m: u32, _: impl Fn(A)) {
    let (a, b, p) = (A::row(w, x.a), A::row(w, x.b), w.p[x.c as usize]);
    let mut row = A::ZERO;
    for i in 0..32 {
        row.0[i] = A::select(p >> i & 1 == 1, a.0[i], b.0[i]);
    }
    store::<A>(w, x.d, row, m);
}

/// A comparison of `a` and `b` into the predicates `d` and (its opposite) `e`, combined with the predicate `c`.
/// `k`: 0 and, 1 or, 2 xor; + 4: with the opposite of `c`.
#[inline(always)]
pub fn test2<A: Lane, B: Lane>(w: &mut Warp, x: &Args, m: u32, f: impl Fn(A, B) -> bool) {
    let (a, b) = (A::row(w, x.a), B::row(w, x.b));
    let mut t = 0u32;
    for i in 0..32 {
        t |= u32::from(f(A::lift(a.0[i]), B::lift(b.0[i]))) << i;
    }
    write_tests(w, x, m, t, !t);
}

/// The predicates that a comparison yields: its result and its opposite, each combined.
#[inline(always)]
pub fn write_tests(w: &mut Warp, x: &Args, m: u32, hit: u32, miss: u32) {
    let combine = |t: u32, w: &Warp| {
        if x.c == NONE {
            return t;
        }
        let other = w.p[x.c as usize] ^ if x.k & 4 != 0 { !0 } else { 0 };
        match x.k & 3 {
            0 => t & other,
            1 => t | other,
            _ => t ^ other,
        }
    };
    let (hit, miss) = (combine(hit, w), combine(miss, w));
    for (reg, value) in [(x.d, hit), (x.e, miss)] {
        if reg != NONE {
            let p = &mut w.p[reg as usize];
            *p = (*p & !m) | (value & m);
        }
    }
}

/// A test of one source into the predicate `d`.
#[inline(always)]
pub fn test1<A: Lane>(w: &mut Warp, x: &Args, m: u32, f: impl Fn(A) -> bool) {
    let a = A::row(w, x.a);
    let mut t = 0u32;
    for i in 0..32 {
        t |= u32::from(f(A::lift(a.0[i]))) << i;
    }
    let p = &mut w.p[x.d as usize];
    *p = (*p & !m) | (t & m);
}

/// Predicates `a` and `b` into `d`.
#[inline(always)]
pub fn logic(w: &mut Warp, x: &Args, m: u32, f: impl Fn(u32, u32) -> u32) {
    let t = f(w.p[x.a as usize], w.p[x.b as usize]);
    let p = &mut w.p[x.d as usize];
    *p = (*p & !m) | (t & m);
}
