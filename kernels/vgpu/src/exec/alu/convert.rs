//! `cvt`: from every type to every other.

use super::float::saturate;
use super::number::{
    bf16_to_f32, e4m3_to_f32, e5m2_to_f32, f16_to_f32, f32_to_bf16, f32_to_e4m3, f32_to_e5m2, f32_to_f16, flush,
    round_f32, round_odd,
};
use super::{FTZ, RELU, Round, SAT, round_of};
use crate::exec::Lanes;
use crate::exec::lanes::lanes;
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

/// NaN and out of range as PTX has it: NaN is 0, but the smallest for 64 bits; everything else is clamped.
#[inline(always)]
fn to_wide(x: f64) -> bool {
    x.is_nan()
}

macro_rules! from_float {
    ($to:expr, $src:ty, $value:expr) => {
        match $to {
            Ty::U8 => lanes!(map3k, |a: $src, _b: u32, _c: u32, k: u32| integral($value(a, k), k) as u8),
            Ty::S8 => lanes!(map3k, |a: $src, _b: u32, _c: u32, k: u32| integral($value(a, k), k) as i8),
            Ty::U16 => lanes!(map3k, |a: $src, _b: u32, _c: u32, k: u32| integral($value(a, k), k) as u16),
            Ty::S16 => lanes!(map3k, |a: $src, _b: u32, _c: u32, k: u32| integral($value(a, k), k) as i16),
            Ty::U32 => lanes!(map3k, |a: $src, _b: u32, _c: u32, k: u32| integral($value(a, k), k) as u32),
            Ty::S32 => lanes!(map3k, |a: $src, _b: u32, _c: u32, k: u32| integral($value(a, k), k) as i32),
            Ty::U64 => lanes!(map3k, |a: $src, _b: u32, _c: u32, k: u32| {
                let x = integral($value(a, k), k);
                if to_wide(x) { 1u64 << 63 } else { x as u64 }
            }),
            Ty::S64 => lanes!(map3k, |a: $src, _b: u32, _c: u32, k: u32| {
                let x = integral($value(a, k), k);
                if to_wide(x) { i64::MIN } else { x as i64 }
            }),
            Ty::F32 => lanes!(map3k, |a: $src, _b: u32, _c: u32, k: u32| single($value(a, k), 0.0, k)),
            Ty::F64 => lanes!(map3k, |a: $src, _b: u32, _c: u32, k: u32| {
                let x = $value(a, k);
                if k & INTEGRAL != 0 { integral(x, k) } else { x }
            }),
            Ty::F16 => lanes!(map3k, |a: $src, _b: u32, _c: u32, k: u32| to_f16($value(a, k), k)),
            Ty::Bf16 => lanes!(map3k, |a: $src, _b: u32, _c: u32, k: u32| to_bf16($value(a, k), k)),
            _ => return None,
        }
    };
}

macro_rules! from_int {
    ($to:expr, $sat:expr, $src:ty) => {
        match ($to, $sat) {
            (Ty::U8, false) => lanes!(map1, |a: $src| a as u8),
            (Ty::S8, false) => lanes!(map1, |a: $src| a as i8),
            (Ty::U16, false) => lanes!(map1, |a: $src| a as u16),
            (Ty::S16, false) => lanes!(map1, |a: $src| a as i16),
            (Ty::U32, false) => lanes!(map1, |a: $src| a as u32),
            (Ty::S32, false) => lanes!(map1, |a: $src| a as i32),
            (Ty::U64, false) => lanes!(map1, |a: $src| a as u64),
            (Ty::S64, false) => lanes!(map1, |a: $src| a as i64),
            (Ty::U8, true) => lanes!(map1, |a: $src| clamp(a as i128, 0, 255) as u8),
            (Ty::S8, true) => lanes!(map1, |a: $src| clamp(a as i128, -128, 127) as i8),
            (Ty::U16, true) => lanes!(map1, |a: $src| clamp(a as i128, 0, 65535) as u16),
            (Ty::S16, true) => lanes!(map1, |a: $src| clamp(a as i128, -32768, 32767) as i16),
            (Ty::U32, true) => lanes!(map1, |a: $src| clamp(a as i128, 0, u32::MAX as i128) as u32),
            (Ty::S32, true) => lanes!(map1, |a: $src| clamp(a as i128, i32::MIN as i128, i32::MAX as i128) as i32),
            (Ty::U64, true) => lanes!(map1, |a: $src| clamp(a as i128, 0, u64::MAX as i128) as u64),
            (Ty::S64, true) => lanes!(map1, |a: $src| clamp(a as i128, i64::MIN as i128, i64::MAX as i128) as i64),
            (Ty::F32, _) => lanes!(map3k, |a: $src, _b: u32, _c: u32, k: u32| {
                if k == 0 {
                    a as f32
                } else {
                    // 64-bit integers: what the f64 leaves out decides directed roundings.
                    let near = a as f64;
                    single(near, (a as i128 - near as i128) as f64, k)
                }
            }),
            (Ty::F64, _) => lanes!(map1, |a: $src| a as f64),
            (Ty::F16, _) => lanes!(map3k, |a: $src, _b: u32, _c: u32, k: u32| to_f16(a as f64, k)),
            (Ty::Bf16, _) => lanes!(map3k, |a: $src, _b: u32, _c: u32, k: u32| to_bf16(a as f64, k)),
            _ => return None,
        }
    };
}

#[inline(always)]
fn clamp(x: i128, low: i128, high: i128) -> i128 {
    x.max(low).min(high)
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

/// The conversion between two types; `k` holds rounding and flags, `two` says that there are two sources.
pub fn convert(to: Ty, from: Ty, k: u32, two: bool) -> Option<Lanes> {
    if two {
        return pairs(to, from, k);
    }
    // The usual ones, short.
    match (to, from, k) {
        (Ty::F32, Ty::F16, 0) => return Some(lanes!(map1, |a: u16| f16_to_f32(a))),
        (Ty::F32, Ty::Bf16, 0) => return Some(lanes!(map1, |a: u16| bf16_to_f32(a))),
        (Ty::F16, Ty::F32, 0) => return Some(lanes!(map1, |a: f32| f32_to_f16(a))),
        (Ty::Bf16, Ty::F32, 0) => return Some(lanes!(map1, |a: f32| f32_to_bf16(a))),
        (Ty::F32, Ty::S32, 0) => return Some(lanes!(map1, |a: i32| a as f32)),
        (Ty::F32, Ty::U32, 0) => return Some(lanes!(map1, |a: u32| a as f32)),
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
    let sat = k & SAT != 0;
    Some(match from {
        Ty::U8 => from_int!(to, sat, u8),
        Ty::S8 => from_int!(to, sat, i8),
        Ty::U16 => from_int!(to, sat, u16),
        Ty::S16 => from_int!(to, sat, i16),
        Ty::U32 => from_int!(to, sat, u32),
        Ty::S32 => from_int!(to, sat, i32),
        Ty::U64 => from_int!(to, sat, u64),
        Ty::S64 => from_int!(to, sat, i64),
        Ty::F32 => from_float!(to, f32, from_single),
        Ty::F64 => from_float!(to, f64, from_double),
        Ty::F16 => from_float!(to, u16, from_f16),
        Ty::Bf16 => from_float!(to, u16, from_bf16),
        _ => return None,
    })
}

fn pairs(to: Ty, from: Ty, _k: u32) -> Option<Lanes> {
    Some(match (to, from) {
        (Ty::F16x2, Ty::F32) if _k == 0 => lanes!(map2, |a: f32, b: f32| join(f32_to_f16(a), f32_to_f16(b))),
        (Ty::Bf16x2, Ty::F32) if _k == 0 => lanes!(map2, |a: f32, b: f32| join(f32_to_bf16(a), f32_to_bf16(b))),
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
