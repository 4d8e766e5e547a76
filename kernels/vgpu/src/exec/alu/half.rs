//! f16, bf16 and their pairs. Every operation is computed so that one rounding remains.

use super::float::{max, min, saturate};
use super::number::{
    bf16_to_f32, exp2, f16_to_f32, f32_to_bf16, f32_to_f16, flush, fma_bf16, fma_f16, round_odd, two_sum,
};
use super::{FTZ, NAN, RELU, SAT};
use crate::exec::lanes::{direct, lanes, pick, test2, write_tests};
use crate::exec::{Args, Lanes, Warp};
use crate::ptx::types::Ty;

/// A 16-bit format: its values and roundings.
trait Format {
    fn value(bits: u16) -> f32;
    fn bits(value: f32) -> u16;
    fn fma(a: f32, b: f32, c: f32) -> f32;
    fn add(a: f32, b: f32) -> f32;
}

struct F16;
struct Bf16;

impl Format for F16 {
    #[inline(always)]
    fn value(bits: u16) -> f32 {
        f16_to_f32(bits)
    }
    #[inline(always)]
    fn bits(value: f32) -> u16 {
        f32_to_f16(value)
    }
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        fma_f16(a, b, c)
    }
    #[inline(always)]
    fn add(a: f32, b: f32) -> f32 {
        // 24 bits are more than twice 11 and 2: rounding twice gives the same.
        a + b
    }
}

impl Format for Bf16 {
    #[inline(always)]
    fn value(bits: u16) -> f32 {
        bf16_to_f32(bits)
    }
    #[inline(always)]
    fn bits(value: f32) -> u16 {
        f32_to_bf16(value)
    }
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        fma_bf16(a, b, c)
    }
    #[inline(always)]
    fn add(a: f32, b: f32) -> f32 {
        let (sum, rest) = two_sum(f64::from(a), f64::from(b));
        round_odd(sum, rest)
    }
}

#[inline(always)]
fn finish<T: Format>(value: f32, k: u32) -> u16 {
    let value = if k & SAT != 0 { saturate(value) } else { value };
    let value = if k & RELU != 0 && value < 0.0 { 0.0 } else { value };
    let bits = T::bits(value);
    // Only f16 has `.ftz`: denormals are below 2^-14.
    if k & FTZ != 0 && bits & 0x7c00 == 0 { bits & 0x8000 } else { bits }
}

#[inline(always)]
fn input<T: Format>(bits: u16, k: u32) -> f32 {
    let bits = if k & FTZ != 0 && bits & 0x7c00 == 0 { bits & 0x8000 } else { bits };
    T::value(bits)
}

#[inline(always)]
fn one<T: Format>(bits: u16, k: u32, f: impl Fn(f32) -> f32) -> u16 {
    finish::<T>(f(input::<T>(bits, k)), k)
}

#[inline(always)]
fn two<T: Format>(a: u16, b: u16, k: u32, f: impl Fn(f32, f32) -> f32) -> u16 {
    finish::<T>(f(input::<T>(a, k), input::<T>(b, k)), k)
}

#[inline(always)]
fn three<T: Format>(a: u16, b: u16, c: u16, k: u32) -> u16 {
    finish::<T>(T::fma(input::<T>(a, k), input::<T>(b, k), input::<T>(c, k)), k)
}

#[inline(always)]
fn extreme<T: Format>(a: u16, b: u16, k: u32, largest: bool) -> u16 {
    let (x, y) = (input::<T>(a, k), input::<T>(b, k));
    if x.is_nan() && y.is_nan() || k & NAN != 0 && (x.is_nan() || y.is_nan()) {
        return 0x7fff;
    }
    finish::<T>(if largest { max(x, y) } else { min(x, y) }, k)
}

/// Both halves of a register.
#[inline(always)]
fn pair(a: u32, b: u32, f: impl Fn(u16, u16) -> u16) -> u32 {
    u32::from(f(a as u16, b as u16)) | u32::from(f((a >> 16) as u16, (b >> 16) as u16)) << 16
}

macro_rules! per_type {
    ($ty:expr, $F:ident, $one:expr, $two:expr) => {
        match $ty {
            Ty::F16 => {
                type $F = F16;
                $one
            }
            Ty::Bf16 => {
                type $F = Bf16;
                $one
            }
            Ty::F16x2 => {
                type $F = F16;
                $two
            }
            Ty::Bf16x2 => {
                type $F = Bf16;
                $two
            }
            _ => return None,
        }
    };
}

/// One source.
pub fn unary(op: &str, ty: Ty) -> Option<Lanes> {
    macro_rules! function {
        ($f:expr) => {
            per_type!(
                ty,
                F,
                lanes!(map3k, |a: u16, _b: u32, _c: u32, k: u32| one::<F>(a, k, $f)),
                lanes!(map3k, |a: u32, _b: u32, _c: u32, k: u32| pair(a, a, |a, _| one::<F>(a, k, $f)))
            )
        };
    }
    Some(match (op, ty) {
        ("neg", Ty::F16 | Ty::Bf16) => lanes!(map1, |a: u16| a ^ 0x8000),
        ("neg", Ty::F16x2 | Ty::Bf16x2) => lanes!(map1, |a: u32| a ^ 0x8000_8000),
        ("abs", Ty::F16 | Ty::Bf16) => lanes!(map1, |a: u16| a & 0x7fff),
        ("abs", Ty::F16x2 | Ty::Bf16x2) => lanes!(map1, |a: u32| a & 0x7fff_7fff),
        ("ex2", _) => function!(exp2),
        ("tanh", _) => function!(f32::tanh),
        _ => return None,
    })
}

/// Two sources; `k` without flags takes the short way, whose functions are inlined so that they vectorise.
pub fn binary(op: &str, ty: Ty, k: u32) -> Option<Lanes> {
    macro_rules! function {
        ($f:expr) => {
            if k == 0 {
                per_type!(
                    ty,
                    F,
                    {
                        #[inline(always)]
                        fn short(a: u16, b: u16) -> u16 {
                            two::<F>(a, b, 0, $f)
                        }
                        direct!(short, u16, u16 => u16)
                    },
                    {
                        #[inline(always)]
                        fn short(a: u32, b: u32) -> u32 {
                            let low = two::<F>(a as u16, b as u16, 0, $f);
                            let high = two::<F>((a >> 16) as u16, (b >> 16) as u16, 0, $f);
                            u32::from(low) | u32::from(high) << 16
                        }
                        direct!(short, u32, u32 => u32)
                    }
                )
            } else {
                per_type!(
                    ty,
                    F,
                    lanes!(map3k, |a: u16, b: u16, _c: u32, k: u32| two::<F>(a, b, k, $f)),
                    lanes!(map3k, |a: u32, b: u32, _c: u32, k: u32| pair(a, b, |a, b| two::<F>(a, b, k, $f)))
                )
            }
        };
    }
    macro_rules! extremes {
        ($largest:literal) => {
            per_type!(
                ty,
                F,
                lanes!(map3k, |a: u16, b: u16, _c: u32, k: u32| extreme::<F>(a, b, k, $largest)),
                lanes!(map3k, |a: u32, b: u32, _c: u32, k: u32| pair(a, b, |a, b| extreme::<F>(a, b, k, $largest)))
            )
        };
    }
    Some(match op {
        "add" => function!(F::add),
        "sub" => function!(|a, b: f32| F::add(a, -b)),
        "mul" => function!(|a, b| a * b),
        "min" => extremes!(false),
        "max" => extremes!(true),
        _ => return None,
    })
}

/// `fma`.
pub fn fused(ty: Ty, k: u32) -> Option<Lanes> {
    #[inline(always)]
    fn both<T: Format>(a: u32, b: u32, c: u32, k: u32) -> u32 {
        let low = three::<T>(a as u16, b as u16, c as u16, k);
        let high = three::<T>((a >> 16) as u16, (b >> 16) as u16, (c >> 16) as u16, k);
        u32::from(low) | u32::from(high) << 16
    }
    #[inline(always)]
    fn short_one<T: Format>(a: u16, b: u16, c: u16) -> u16 {
        three::<T>(a, b, c, 0)
    }
    #[inline(always)]
    fn short_both<T: Format>(a: u32, b: u32, c: u32) -> u32 {
        both::<T>(a, b, c, 0)
    }
    if k == 0 {
        return Some(per_type!(
            ty,
            F,
            direct!(short_one::<F>, u16, u16, u16 => u16),
            direct!(short_both::<F>, u32, u32, u32 => u32)
        ));
    }
    Some(per_type!(
        ty,
        F,
        lanes!(map3k, |a: u16, b: u16, c: u16, k: u32| three::<F>(a, b, c, k)),
        lanes!(map3k, |a: u32, b: u32, c: u32, k: u32| both::<F>(a, b, c, k))
    ))
}

/// A comparison by its relation (`k` from bit 8) of any floats; `ftz`: f32 with denormals flushed.
pub fn compare(ty: Ty, ftz: bool) -> Option<Lanes> {
    macro_rules! body {
        ($ty:ty, $value:expr) => {{
            #[inline(always)]
            fn body(w: &mut Warp, x: &Args, m: u32) {
                let relation = x.k >> 8;
                test2(w, x, m, |a: $ty, b: $ty| related($value(a), $value(b), relation))
            }
            pick!(body)
        }};
    }
    Some(match ty {
        Ty::F32 if ftz => body!(f32, flush),
        Ty::F64 => body!(f64, f64::from),
        Ty::F16 => body!(u16, f16_to_f32),
        Ty::Bf16 => body!(u16, bf16_to_f32),
        _ => return None,
    })
}

/// The comparisons of floats by number, for pairs: bit 0 less, 1 equal, 2 greater, 3 unordered.
pub fn relation(op: &str) -> Option<u32> {
    Some(match op {
        "lt" => 1,
        "eq" => 2,
        "le" => 3,
        "gt" => 4,
        "ne" => 5,
        "ge" => 6,
        "num" => 7,
        "nan" => 8,
        "ltu" => 9,
        "equ" => 10,
        "leu" => 11,
        "gtu" => 12,
        "neu" => 13,
        "geu" => 14,
        _ => return None,
    })
}

#[inline(always)]
fn related<T: PartialOrd>(a: T, b: T, relation: u32) -> bool {
    let found = if a < b {
        1
    } else if a == b {
        2
    } else if a > b {
        4
    } else {
        8
    };
    found & relation != 0
}

/// `setp` of pairs: the lower halves into `d`, the upper into `e`. `k`: how to combine, and from bit 8 the relation.
pub fn compare_pairs(ty: Ty) -> Option<Lanes> {
    macro_rules! body {
        ($value:path) => {{
            #[inline(always)]
            fn body(w: &mut Warp, x: &Args, m: u32) {
                let (a, b) = (w.r[x.a as usize], w.r[x.b as usize]);
                let (mut low, mut high) = (0, 0);
                for i in 0..32 {
                    let (a, b) = (a.0[i], b.0[i]);
                    low |= u32::from(related($value(a as u16), $value(b as u16), x.k >> 8)) << i;
                    high |= u32::from(related($value((a >> 16) as u16), $value((b >> 16) as u16), x.k >> 8)) << i;
                }
                write_tests(w, x, m, low, high);
            }
            pick!(body)
        }};
    }
    Some(match ty {
        Ty::F16x2 => body!(f16_to_f32),
        Ty::Bf16x2 => body!(bf16_to_f32),
        _ => return None,
    })
}

/// `set`: `k` from bit 8 the relation, and bit 0 for 1.0 instead of ones, bit 1 to flush denormals.
pub fn set(to: Ty, from: Ty) -> Option<Lanes> {
    #[inline(always)]
    fn word(hit: bool, k: u32) -> u32 {
        if !hit {
            0
        } else if k & 1 != 0 {
            1f32.to_bits()
        } else {
            !0
        }
    }
    #[inline(always)]
    fn half(hit: bool, one: u16) -> u16 {
        if hit { one } else { 0 }
    }
    macro_rules! pairs {
        ($value:path, $one:expr) => {
            lanes!(map3k, |a: u32, b: u32, _c: u32, k: u32| {
                pair(a, b, |a, b| half(related($value(a), $value(b), k >> 8), if k & 1 != 0 { $one } else { 0xffff }))
            })
        };
    }
    Some(match (to.size(), from) {
        (4, Ty::F32) => lanes!(map3k, |a: f32, b: f32, _c: u32, k: u32| {
            let (a, b) = if k & 2 != 0 { (flush(a), flush(b)) } else { (a, b) };
            word(related(a, b, k >> 8), k)
        }),
        (4, Ty::F64) => lanes!(map3k, |a: f64, b: f64, _c: u32, k: u32| {
            let order = if a < b {
                1
            } else if a == b {
                2
            } else if a > b {
                4
            } else {
                8
            };
            word(order & (k >> 8) != 0, k)
        }),
        (4, Ty::F16) => {
            lanes!(map3k, |a: u16, b: u16, _c: u32, k: u32| { word(related(f16_to_f32(a), f16_to_f32(b), k >> 8), k) })
        }
        (4, Ty::Bf16) => lanes!(map3k, |a: u16, b: u16, _c: u32, k: u32| {
            word(related(bf16_to_f32(a), bf16_to_f32(b), k >> 8), k)
        }),
        (2, Ty::F16) => lanes!(map3k, |a: u16, b: u16, _c: u32, k: u32| {
            half(related(f16_to_f32(a), f16_to_f32(b), k >> 8), if k & 1 != 0 { 0x3c00 } else { 0xffff })
        }),
        (2, Ty::Bf16) => lanes!(map3k, |a: u16, b: u16, _c: u32, k: u32| {
            half(related(bf16_to_f32(a), bf16_to_f32(b), k >> 8), if k & 1 != 0 { 0x3f80 } else { 0xffff })
        }),
        (4, Ty::F16x2) => pairs!(f16_to_f32, 0x3c00),
        (4, Ty::Bf16x2) => pairs!(bf16_to_f32, 0x3f80),
        (4, Ty::S32) => lanes!(map3k, |a: i32, b: i32, _c: u32, k: u32| word(ordered(a, b) & (k >> 8) != 0, k)),
        (4, Ty::U32 | Ty::B32) => {
            lanes!(map3k, |a: u32, b: u32, _c: u32, k: u32| word(ordered(a, b) & (k >> 8) != 0, k))
        }
        (4, Ty::S64) => lanes!(map3k, |a: i64, b: i64, _c: u32, k: u32| word(ordered(a, b) & (k >> 8) != 0, k)),
        (4, Ty::U64 | Ty::B64) => {
            lanes!(map3k, |a: u64, b: u64, _c: u32, k: u32| word(ordered(a, b) & (k >> 8) != 0, k))
        }
        _ => return None,
    })
}

#[inline(always)]
fn ordered<T: PartialOrd>(a: T, b: T) -> u32 {
    if a < b {
        1
    } else if a > b {
        4
    } else {
        2
    }
}
