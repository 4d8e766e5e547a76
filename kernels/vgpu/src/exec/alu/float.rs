//! f32 and f64. Without modifiers an operation is the processor's own; with them it takes the longer way through
//! `k`. Approximate functions are computed well, so their last bits differ from a device's.

// Comparisons of PTX that hold for NaN are the negations of those that do not.
#![allow(clippy::neg_cmp_op_on_partial_ord, clippy::double_comparisons)]

use super::number::{exp2, flush, round_f32, two_sum};
use super::{FTZ, NAN, SAT, round_of};
use crate::exec::Lanes;
use crate::exec::lanes::{direct, lanes};
use crate::ptx::types::Ty;

#[inline(always)]
fn input(x: f32, k: u32) -> f32 {
    if k & FTZ != 0 { flush(x) } else { x }
}

/// The end of every operation: flush, clamp.
#[inline(always)]
pub fn output(x: f32, k: u32) -> f32 {
    let x = input(x, k);
    if k & SAT != 0 { saturate(x) } else { x }
}

/// Clamped to 0..1, NaN to 0.
#[inline(always)]
pub fn saturate(x: f32) -> f32 {
    if x > 0.0 { if x < 1.0 { x } else { 1.0 } } else { 0.0 }
}

#[inline(always)]
fn add(a: f32, b: f32, k: u32) -> f32 {
    let (a, b) = (input(a, k), input(b, k));
    let (sum, rest) = two_sum(f64::from(a), f64::from(b));
    output(round_f32(sum, rest, round_of(k)), k)
}

#[inline(always)]
fn mul(a: f32, b: f32, k: u32) -> f32 {
    output(round_f32(f64::from(input(a, k)) * f64::from(input(b, k)), 0.0, round_of(k)), k)
}

#[inline(always)]
fn fma(a: f32, b: f32, c: f32, k: u32) -> f32 {
    let (a, b, c) = (input(a, k), input(b, k), input(c, k));
    if round_of(k) == super::Round::Near {
        return output(a.mul_add(b, c), k);
    }
    let (sum, rest) = two_sum(f64::from(a) * f64::from(b), f64::from(c));
    output(round_f32(sum, rest, round_of(k)), k)
}

/// The quotient in a direction: its error's sign follows from an exact remainder.
#[inline(always)]
fn div(a: f32, b: f32, k: u32) -> f32 {
    let (a, b) = (f64::from(input(a, k)), f64::from(input(b, k)));
    let quotient = a / b;
    let rest = if quotient.is_finite() && b != 0.0 { (-quotient).mul_add(b, a) / b } else { 0.0 };
    output(round_f32(quotient, rest, round_of(k)), k)
}

#[inline(always)]
fn sqrt(a: f32, k: u32) -> f32 {
    let a = f64::from(input(a, k));
    let root = a.sqrt();
    let rest = if root.is_finite() && root > 0.0 { (-root).mul_add(root, a) / (2.0 * root) } else { 0.0 };
    output(round_f32(root, rest, round_of(k)), k)
}

/// The larger number; of a number and NaN the number, and +0 over -0.
#[inline(always)]
pub fn max(a: f32, b: f32) -> f32 {
    if a.is_nan() {
        b
    } else if b.is_nan() {
        a
    } else if a == b {
        f32::from_bits(a.to_bits() & b.to_bits())
    } else if a > b {
        a
    } else {
        b
    }
}

/// The smaller number; of a number and NaN the number, and -0 under +0.
#[inline(always)]
pub fn min(a: f32, b: f32) -> f32 {
    if a.is_nan() {
        b
    } else if b.is_nan() {
        a
    } else if a == b {
        f32::from_bits(a.to_bits() | b.to_bits())
    } else if a < b {
        a
    } else {
        b
    }
}

#[inline(always)]
fn extreme(a: f32, b: f32, k: u32, largest: bool) -> f32 {
    let (a, b) = (input(a, k), input(b, k));
    if a.is_nan() && b.is_nan() || k & NAN != 0 && (a.is_nan() || b.is_nan()) {
        return f32::from_bits(0x7fff_ffff);
    }
    if largest { max(a, b) } else { min(a, b) }
}

#[inline(always)]
fn max64(a: f64, b: f64) -> f64 {
    if a.is_nan() || b > a { b } else { a }
}

#[inline(always)]
fn min64(a: f64, b: f64) -> f64 {
    if a.is_nan() || b < a { b } else { a }
}

/// One source; `k` with flags means the longer way.
pub fn unary(op: &str, ty: Ty, k: u32) -> Option<Lanes> {
    if ty == Ty::F64 {
        return Some(match op {
            "neg" => lanes!(map1, |a: f64| -a),
            "abs" => lanes!(map1, |a: f64| a.abs()),
            "rcp" => lanes!(map1, |a: f64| 1.0 / a),
            "sqrt" => lanes!(map1, |a: f64| a.sqrt()),
            "rsqrt" => lanes!(map1, |a: f64| 1.0 / a.sqrt()),
            _ => return None,
        });
    }
    if ty != Ty::F32 {
        return None;
    }
    let plain = k == 0;
    Some(match op {
        "neg" if plain => lanes!(map1, |a: f32| -a),
        "neg" => lanes!(map3k, |a: f32, _b: u32, _c: u32, k: u32| output(-a, k)),
        "abs" if plain => lanes!(map1, |a: f32| a.abs()),
        "abs" => lanes!(map3k, |a: f32, _b: u32, _c: u32, k: u32| output(a.abs(), k)),
        "rcp" if plain => lanes!(map1, |a: f32| 1.0 / a),
        "rcp" => lanes!(map3k, |a: f32, _b: u32, _c: u32, k: u32| div(1.0, a, k)),
        "sqrt" if plain => lanes!(map1, |a: f32| a.sqrt()),
        "sqrt" => lanes!(map3k, |a: f32, _b: u32, _c: u32, k: u32| sqrt(a, k)),
        "rsqrt" => lanes!(map3k, |a: f32, _b: u32, _c: u32, k: u32| {
            output((1.0 / f64::from(input(a, k)).sqrt()) as f32, k)
        }),
        "ex2" if plain => direct!(exp2, f32 => f32),
        "ex2" if k == FTZ => {
            #[inline(always)]
            fn flushed(a: f32) -> f32 {
                flush(exp2(flush(a)))
            }
            direct!(flushed, f32 => f32)
        }
        "ex2" => lanes!(map3k, |a: f32, _b: u32, _c: u32, k: u32| output(exp2(input(a, k)), k)),
        "lg2" => lanes!(map3k, |a: f32, _b: u32, _c: u32, k: u32| output(input(a, k).log2(), k)),
        "sin" => lanes!(map3k, |a: f32, _b: u32, _c: u32, k: u32| output(input(a, k).sin(), k)),
        "cos" => lanes!(map3k, |a: f32, _b: u32, _c: u32, k: u32| output(input(a, k).cos(), k)),
        "tanh" => lanes!(map1, |a: f32| a.tanh()),
        _ => return None,
    })
}

/// Two sources.
pub fn binary(op: &str, ty: Ty, k: u32) -> Option<Lanes> {
    if ty == Ty::F64 {
        return Some(match op {
            "add" => lanes!(map2, |a: f64, b: f64| a + b),
            "sub" => lanes!(map2, |a: f64, b: f64| a - b),
            "mul" => lanes!(map2, |a: f64, b: f64| a * b),
            "div" => lanes!(map2, |a: f64, b: f64| a / b),
            "min" => lanes!(map2, |a: f64, b: f64| min64(a, b)),
            "max" => lanes!(map2, |a: f64, b: f64| max64(a, b)),
            "copysign" => lanes!(map2, |a: f64, b: f64| b.copysign(a)),
            _ => return None,
        });
    }
    if ty != Ty::F32 {
        return None;
    }
    let plain = k == 0;
    Some(match op {
        "add" if plain => lanes!(map2, |a: f32, b: f32| a + b),
        "add" => lanes!(map3k, |a: f32, b: f32, _c: u32, k: u32| add(a, b, k)),
        "sub" if plain => lanes!(map2, |a: f32, b: f32| a - b),
        "sub" => lanes!(map3k, |a: f32, b: f32, _c: u32, k: u32| add(a, -b, k)),
        "mul" if plain => lanes!(map2, |a: f32, b: f32| a * b),
        "mul" => lanes!(map3k, |a: f32, b: f32, _c: u32, k: u32| mul(a, b, k)),
        "div" if plain => lanes!(map2, |a: f32, b: f32| a / b),
        "div" => lanes!(map3k, |a: f32, b: f32, _c: u32, k: u32| div(a, b, k)),
        "min" => lanes!(map3k, |a: f32, b: f32, _c: u32, k: u32| extreme(a, b, k, false)),
        "max" => lanes!(map3k, |a: f32, b: f32, _c: u32, k: u32| extreme(a, b, k, true)),
        // The sign of the first with the magnitude of the second.
        "copysign" => lanes!(map2, |a: f32, b: f32| b.copysign(a)),
        _ => return None,
    })
}

/// `fma` and `mad`.
pub fn fused(ty: Ty, k: u32) -> Option<Lanes> {
    Some(match ty {
        Ty::F64 => lanes!(map3, |a: f64, b: f64, c: f64| a.mul_add(b, c)),
        Ty::F32 if k == 0 => lanes!(map3, |a: f32, b: f32, c: f32| a.mul_add(b, c)),
        Ty::F32 => lanes!(map3k, |a: f32, b: f32, c: f32, k: u32| fma(a, b, c, k)),
        _ => return None,
    })
}

/// `testp`.
pub fn test(op: &str, ty: Ty) -> Option<Lanes> {
    Some(match (op, ty) {
        ("finite", Ty::F32) => lanes!(test1, |a: f32| a.is_finite()),
        ("infinite", Ty::F32) => lanes!(test1, |a: f32| a.is_infinite()),
        ("number", Ty::F32) => lanes!(test1, |a: f32| !a.is_nan()),
        ("notanumber", Ty::F32) => lanes!(test1, |a: f32| a.is_nan()),
        ("normal", Ty::F32) => lanes!(test1, |a: f32| a.is_normal()),
        ("subnormal", Ty::F32) => lanes!(test1, |a: f32| a.is_subnormal()),
        ("finite", Ty::F64) => lanes!(test1, |a: f64| a.is_finite()),
        ("infinite", Ty::F64) => lanes!(test1, |a: f64| a.is_infinite()),
        ("number", Ty::F64) => lanes!(test1, |a: f64| !a.is_nan()),
        ("notanumber", Ty::F64) => lanes!(test1, |a: f64| a.is_nan()),
        ("normal", Ty::F64) => lanes!(test1, |a: f64| a.is_normal()),
        ("subnormal", Ty::F64) => lanes!(test1, |a: f64| a.is_subnormal()),
        _ => return None,
    })
}

/// A comparison of f32; of other floats, and with denormals flushed, `half::compare`.
pub fn compare(op: &str) -> Option<Lanes> {
    Some(match op {
        "eq" => lanes!(test2, |a: f32, b: f32| a == b),
        // Of ordered numbers: false where one is NaN.
        "ne" => lanes!(test2, |a: f32, b: f32| a < b || a > b),
        "lt" => lanes!(test2, |a: f32, b: f32| a < b),
        "le" => lanes!(test2, |a: f32, b: f32| a <= b),
        "gt" => lanes!(test2, |a: f32, b: f32| a > b),
        "ge" => lanes!(test2, |a: f32, b: f32| a >= b),
        "equ" => lanes!(test2, |a: f32, b: f32| !(a < b || a > b)),
        "neu" => lanes!(test2, |a: f32, b: f32| a != b),
        "ltu" => lanes!(test2, |a: f32, b: f32| !(a >= b)),
        "leu" => lanes!(test2, |a: f32, b: f32| !(a > b)),
        "gtu" => lanes!(test2, |a: f32, b: f32| !(a <= b)),
        "geu" => lanes!(test2, |a: f32, b: f32| !(a < b)),
        "num" => lanes!(test2, |a: f32, b: f32| !a.is_nan() && !b.is_nan()),
        "nan" => lanes!(test2, |a: f32, b: f32| a.is_nan() || b.is_nan()),
        _ => return None,
    })
}
