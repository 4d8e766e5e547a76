//! `cvt`: from every type to every other.

use super::float::saturate;
use super::number::{
    bf16_to_f32, e4m3_to_f32, e5m2_to_f32, f16_to_f32, f32_to_bf16, f32_to_e4m3, f32_to_e5m2, f32_to_f16, flush,
    round_f32, round_odd,
};
use super::{FTZ, RELU, Round, SAT, round_of};
use crate::exec::Lanes;
use crate::exec::lanes::{direct, lanes};
use crate::ptx::types::Ty;

/// A float becomes an integer in between (`.rni` and the like), also where the result is a float.
pub const INTEGRAL: u32 = 64;
/// Overflow gives the largest finite value.
pub const SATFINITE: u32 = 128;

/// Rounds to an integer.
#[inline(always)]
fn integral(x: f64, k: u32) -> f64 {
    match round_of(k) {
        Round::Near => x.round_ties_even(),
        Round::Zero => x.trunc(),
        Round::Down => x.floor(),
        Round::Up => x.ceil(),
    }
}

/// The end of a conversion to f32.
#[inline(always)]
fn single(x: f64, rest: f64, k: u32) -> f32 {
    let x = if k & INTEGRAL != 0 { integral(x, k) } else { x };
    let y = if k & INTEGRAL != 0 { x as f32 } else { round_f32(x, rest, round_of(k)) };
    let y = if k & FTZ != 0 { flush(y) } else { y };
    if k & SAT != 0 { saturate(y) } else { y }
}

/// The end of a conversion to a 16-bit float: `bits` rounds to nearest, `value` is its inverse, `largest` the
/// largest finite one.
#[inline(always)]
fn half(x: f64, k: u32, bits: impl Fn(f32) -> u16, value: impl Fn(u16) -> f32, largest: u16) -> u16 {
    let x = if k & INTEGRAL != 0 { integral(x, k) } else { x };
    let x = if k & SAT != 0 { f64::from(saturate(round_odd(x, 0.0))) } else { x };
    let x = if k & RELU != 0 && x < 0.0 { 0.0 } else { x };
    let near = bits(round_odd(x, 0.0));
    let found = match round_of(k) {
        Round::Near => near,
        round if x.is_finite() => {
            let gap = x - f64::from(value(near));
            let step = match round {
                Round::Down => gap < 0.0,
                Round::Up => gap > 0.0,
                _ => (gap < 0.0 && x > 0.0) || (gap > 0.0 && x < 0.0),
            };
            // One step toward the exact value: away from zero where it is larger in magnitude.
            if !step {
                near
            } else if (gap > 0.0) == (near & 0x8000 == 0) {
                near + 1
            } else {
                near - 1
            }
        }
        _ => near,
    };
    if k & SATFINITE != 0 && !x.is_nan() && found & 0x7fff > largest { found & 0x8000 | largest } else { found }
}

#[inline(always)]
fn to_f16(x: f64, k: u32) -> u16 {
    half(x, k, f32_to_f16, f16_to_f32, 0x7bff)
}

#[inline(always)]
fn to_bf16(x: f64, k: u32) -> u16 {
    half(x, k, f32_to_bf16, bf16_to_f32, 0x7f7f)
}

/// Two floats to a pair, the first into the upper half.
#[inline(always)]
fn join(high: u16, low: u16) -> u32 {
    u32::from(high) << 16 | u32::from(low)
}

#[inline(always)]
fn join_f16(high: f32, low: f32) -> u32 {
    join(f32_to_f16(high), f32_to_f16(low))
}

#[inline(always)]
fn join_bf16(high: f32, low: f32) -> u32 {
    join(f32_to_bf16(high), f32_to_bf16(low))
}

/// Where `k` says which type the result has, for functions that serve several.
const KIND: u32 = 12;

/// The number of a type in `k`.
fn kind(ty: Ty) -> Option<u32> {
    Some(match ty {
        Ty::U8 => 0,
        Ty::S8 => 1,
        Ty::U16 => 2,
        Ty::S16 => 3,
        Ty::U32 => 4,
        Ty::S32 => 5,
        Ty::U64 => 6,
        Ty::S64 => 7,
        Ty::F16 => 8,
        Ty::Bf16 => 9,
        Ty::F32 => 10,
        _ => return None,
    })
}

/// A float as the integer type that `k` names, as it lies in a register: NaN is 0, but the smallest for 64 bits;
/// everything else is clamped.
#[inline(always)]
fn integer(x: f64, k: u32) -> u64 {
    let x = integral(x, k);
    match k >> KIND & 15 {
        0 => u64::from(x as u8),
        1 => u64::from(x as i8 as u8),
        2 => u64::from(x as u16),
        3 => u64::from(x as i16 as u16),
        4 => u64::from(x as u32),
        5 => u64::from(x as i32 as u32),
        _ if x.is_nan() => 1 << 63,
        6 => x as u64,
        _ => x as i64 as u64,
    }
}

/// An integer clamped to the type that `k` names, as it lies in a register.
#[inline(always)]
fn clamped(x: i128, k: u32) -> u64 {
    let to = |low: i128, high: i128| x.max(low).min(high);
    match k >> KIND & 15 {
        0 => to(0, 0xff) as u64,
        1 => to(-0x80, 0x7f) as u8 as u64,
        2 => to(0, 0xffff) as u64,
        3 => to(-0x8000, 0x7fff) as u16 as u64,
        4 => to(0, u32::MAX as i128) as u64,
        5 => to(i32::MIN as i128, i32::MAX as i128) as u32 as u64,
        6 => to(0, u64::MAX as i128) as u64,
        _ => to(i64::MIN as i128, i64::MAX as i128) as u64,
    }
}

/// An integer as the float of up to 32 bits that `k` names, rounded as `k` says.
#[inline(always)]
fn float(x: i128, k: u32) -> u32 {
    // 64-bit integers: what the f64 leaves out decides directed roundings.
    let near = x as f64;
    match k >> KIND & 15 {
        8 => to_f16(near, k).into(),
        9 => to_bf16(near, k).into(),
        _ => single(near, (x - near as i128) as f64, k).to_bits(),
    }
}

macro_rules! from_float {
    ($to:expr, $src:ty, $value:expr) => {
        match $to {
            Ty::F32 => lanes!(map3k, |a: $src, _b: u32, _c: u32, k: u32| single($value(a, k), 0.0, k)),
            Ty::F64 => lanes!(map3k, |a: $src, _b: u32, _c: u32, k: u32| {
                let x = $value(a, k);
                if k & INTEGRAL != 0 { integral(x, k) } else { x }
            }),
            Ty::F16 => lanes!(map3k, |a: $src, _b: u32, _c: u32, k: u32| to_f16($value(a, k), k)),
            Ty::Bf16 => lanes!(map3k, |a: $src, _b: u32, _c: u32, k: u32| to_bf16($value(a, k), k)),
            _ if $to.wide() => lanes!(map3k, |a: $src, _b: u32, _c: u32, k: u32| integer($value(a, k), k)),
            _ => lanes!(map3k, |a: $src, _b: u32, _c: u32, k: u32| integer($value(a, k), k) as u32),
        }
    };
}

macro_rules! from_int {
    ($to:expr, $k:expr, $src:ty) => {
        match ($to, $k) {
            (Ty::F64, _) => lanes!(map1, |a: $src| a as f64),
            (Ty::F32, 0) => lanes!(map1, |a: $src| a as f32),
            (Ty::F32 | Ty::F16 | Ty::Bf16, _) => {
                lanes!(map3k, |a: $src, _b: u32, _c: u32, k: u32| float(a as i128, k))
            }
            // Without clamping only the size of the result matters.
            (Ty::U8 | Ty::S8, 0) => lanes!(map1, |a: $src| a as u8),
            (Ty::U16 | Ty::S16, 0) => lanes!(map1, |a: $src| a as u16),
            (Ty::U32 | Ty::S32, 0) => lanes!(map1, |a: $src| a as u32),
            (Ty::U64 | Ty::S64, 0) => lanes!(map1, |a: $src| a as u64),
            (to, _) if to.wide() => lanes!(map3k, |a: $src, _b: u32, _c: u32, k: u32| clamped(a as i128, k)),
            _ => lanes!(map3k, |a: $src, _b: u32, _c: u32, k: u32| clamped(a as i128, k) as u32),
        }
    };
}

#[inline(always)]
fn from_single(a: f32, k: u32) -> f64 {
    f64::from(if k & FTZ != 0 { flush(a) } else { a })
}

#[inline(always)]
fn from_double(a: f64, _: u32) -> f64 {
    a
}

#[inline(always)]
fn from_f16(a: u16, _: u32) -> f64 {
    f64::from(f16_to_f32(a))
}

#[inline(always)]
fn from_bf16(a: u16, _: u32) -> f64 {
    f64::from(bf16_to_f32(a))
}

/// The conversion between two types and its `k`, which goes in with rounding and flags; `two`: it has two sources.
pub fn convert(to: Ty, from: Ty, k: u32, two: bool) -> Option<(Lanes, u32)> {
    let run = if two { pairs(to, from, k) } else { single_source(to, from, k) }?;
    Some((run, k | kind(to).unwrap_or(0) << KIND))
}

fn single_source(to: Ty, from: Ty, k: u32) -> Option<Lanes> {
    const NEAR: u32 = INTEGRAL;
    const ZERO: u32 = INTEGRAL | (Round::Zero as u32) << 2;
    // The usual ones, short.
    match (to, from, k) {
        (Ty::F32, Ty::F16, 0) => return Some(direct!(f16_to_f32, u16 => f32)),
        (Ty::F32, Ty::Bf16, 0) => return Some(direct!(bf16_to_f32, u16 => f32)),
        (Ty::F16, Ty::F32, 0) => return Some(direct!(f32_to_f16, f32 => u16)),
        (Ty::Bf16, Ty::F32, 0) => return Some(direct!(f32_to_bf16, f32 => u16)),
        (Ty::F32, Ty::S32, 0) => return Some(lanes!(map1, |a: i32| a as f32)),
        (Ty::F32, Ty::U32, 0) => return Some(lanes!(map1, |a: u32| a as f32)),
        (Ty::S32, Ty::F32, NEAR) => return Some(lanes!(map1, |a: f32| a.round_ties_even() as i32)),
        (Ty::S32, Ty::F32, ZERO) => return Some(lanes!(map1, |a: f32| a as i32)),
        (Ty::U32, Ty::F32, NEAR) => return Some(lanes!(map1, |a: f32| a.round_ties_even() as u32)),
        (Ty::U32, Ty::F32, ZERO) => return Some(lanes!(map1, |a: f32| a as u32)),
        (Ty::S8, Ty::F32, NEAR) => return Some(lanes!(map1, |a: f32| a.round_ties_even() as i8)),
        (Ty::F32, Ty::F32, NEAR) => return Some(lanes!(map1, |a: f32| a.round_ties_even())),
        (Ty::Tf32, Ty::F32, _) => return Some(lanes!(map3k, |a: f32, _b: u32, _c: u32, k: u32| round_tf32(a, k))),
        (Ty::F16x2, Ty::E4m3x2, _) => {
            return Some(lanes!(map3k, |a: u16, _b: u32, _c: u32, k: u32| small_pair(a, k, e4m3_to_f32)));
        }
        (Ty::F16x2, Ty::E5m2x2, _) => {
            return Some(lanes!(map3k, |a: u16, _b: u32, _c: u32, k: u32| small_pair(a, k, e5m2_to_f32)));
        }
        (Ty::E4m3x2, Ty::F16x2, _) => {
            return Some(lanes!(map3k, |a: u32, _b: u32, _c: u32, k: u32| {
                small_join(f16_to_f32((a >> 16) as u16), f16_to_f32(a as u16), k, f32_to_e4m3)
            }));
        }
        (Ty::E5m2x2, Ty::F16x2, _) => {
            return Some(lanes!(map3k, |a: u32, _b: u32, _c: u32, k: u32| {
                small_join(f16_to_f32((a >> 16) as u16), f16_to_f32(a as u16), k, f32_to_e5m2)
            }));
        }
        _ => {}
    }
    Some(match from {
        Ty::U8 => from_int!(to, k, u8),
        Ty::S8 => from_int!(to, k, i8),
        Ty::U16 => from_int!(to, k, u16),
        Ty::S16 => from_int!(to, k, i16),
        Ty::U32 => from_int!(to, k, u32),
        Ty::S32 => from_int!(to, k, i32),
        Ty::U64 => from_int!(to, k, u64),
        Ty::S64 => from_int!(to, k, i64),
        Ty::F32 => from_float!(to, f32, from_single),
        Ty::F64 => from_float!(to, f64, from_double),
        Ty::F16 => from_float!(to, u16, from_f16),
        Ty::Bf16 => from_float!(to, u16, from_bf16),
        _ => return None,
    })
}

fn pairs(to: Ty, from: Ty, _k: u32) -> Option<Lanes> {
    Some(match (to, from) {
        (Ty::F16x2, Ty::F32) if _k == 0 => direct!(join_f16, f32, f32 => u32),
        (Ty::Bf16x2, Ty::F32) if _k == 0 => direct!(join_bf16, f32, f32 => u32),
        (Ty::F16x2, Ty::F32) => {
            lanes!(map3k, |a: f32, b: f32, _c: u32, k: u32| join(to_f16(a.into(), k), to_f16(b.into(), k)))
        }
        (Ty::Bf16x2, Ty::F32) => {
            lanes!(map3k, |a: f32, b: f32, _c: u32, k: u32| join(to_bf16(a.into(), k), to_bf16(b.into(), k)))
        }
        (Ty::E4m3x2, Ty::F32) => {
            lanes!(map3k, |a: f32, b: f32, _c: u32, k: u32| small_join(a, b, k, f32_to_e4m3))
        }
        (Ty::E5m2x2, Ty::F32) => {
            lanes!(map3k, |a: f32, b: f32, _c: u32, k: u32| small_join(a, b, k, f32_to_e5m2))
        }
        _ => return None,
    })
}

#[inline(always)]
fn small_join(high: f32, low: f32, k: u32, bits: impl Fn(f32) -> u8) -> u16 {
    let relu = |x: f32| if k & RELU != 0 && x < 0.0 { 0.0 } else { x };
    u16::from(bits(relu(high))) << 8 | u16::from(bits(relu(low)))
}

#[inline(always)]
fn small_pair(a: u16, k: u32, value: impl Fn(u8) -> f32) -> u32 {
    let relu = |x: f32| if k & RELU != 0 && x < 0.0 { 0.0 } else { x };
    join(f32_to_f16(relu(value((a >> 8) as u8))), f32_to_f16(relu(value(a as u8))))
}

/// To 10 bits of mantissa: `.rna` (k 0 here) rounds ties away from zero, `.rn` and `.rz` as ever.
#[inline(always)]
fn round_tf32(a: f32, k: u32) -> u32 {
    let bits = a.to_bits();
    if !a.is_finite() {
        return if a.is_nan() { 0x7fff_ffff } else { bits };
    }
    let added = match (k & TIES_AWAY != 0, round_of(k)) {
        (true, _) => 0x1000,
        (_, Round::Near) => 0xfff + (bits >> 13 & 1),
        _ => 0,
    };
    let found = bits.wrapping_add(added) & 0xffff_e000;
    if k & RELU != 0 && a < 0.0 { 0 } else { found }
}

/// `.rna`.
pub const TIES_AWAY: u32 = 256;
