//! Floats of 16 and 8 bits, and roundings that the processor does not offer. Everything here is exact and branch
//! free where it runs for all lanes.

use super::Round;

/// The value of an f16.
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    // Signed integers throughout: processors compare and convert those at once.
    let sign = (i32::from(bits) & 0x8000) << 16;
    let rest = i32::from(bits) & 0x7fff;
    let normal = (rest << 13) + (112 << 23);
    let denormal = (rest as f32 * (1.0 / 16_777_216.0)).to_bits() as i32;
    let special = 0x7f80_0000 | (rest & 0x3ff) << 13;
    let finite = if rest < 0x400 { denormal } else { normal };
    f32::from_bits((sign | if rest >= 0x7c00 { special } else { finite }) as u32)
}

/// The nearest f16, ties to even; NaN becomes 0x7fff as on the device.
#[inline(always)]
pub fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits() as i32;
    let sign = (bits >> 16) & 0x8000;
    let rest = bits & 0x7fff_ffff;
    let special = if rest > 0x7f80_0000 { 0x7fff } else { 0x7c00 | sign };
    // Adding a half aligns the last bit of a denormal with the last bit of the sum.
    let denormal = sign | ((f32::from_bits(rest as u32) + 0.5).to_bits() as i32).wrapping_sub(0x3f00_0000);
    let normal = sign | (rest.wrapping_add(0xfff + (rest >> 13 & 1)).wrapping_sub(112 << 23) >> 13);
    let finite = if rest < 0x3880_0000 { denormal } else { normal };
    (if rest >= 0x4780_0000 { special } else { finite }) as u16
}

/// The value of a bf16.
#[inline(always)]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The nearest bf16, ties to even; NaN becomes 0x7fff as on the device.
#[inline(always)]
pub fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let near = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    (if bits & 0x7fff_ffff > 0x7f80_0000 { 0x7fff } else { near }) as u16
}

/// `value` with denormals replaced by zeros of their sign.
#[inline(always)]
pub fn flush(value: f32) -> f32 {
    let bits = value.to_bits();
    f32::from_bits(if bits & 0x7f80_0000 == 0 { bits & 0x8000_0000 } else { bits })
}

/// The sum of two floats, and what its rounding left out.
#[inline(always)]
pub fn two_sum(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    let part = sum - a;
    (sum, (a - (sum - part)) + (b - part))
}

/// Rounds the exact value `value + rest` (`rest` below the last place of `value`) to f32.
#[inline(always)]
pub fn round_f32(value: f64, rest: f64, round: Round) -> f32 {
    let near = value as f32;
    if round == Round::Near || !value.is_finite() {
        return near;
    }
    // The sign of exact - near.
    let gap = value - f64::from(near);
    let gap = if gap != 0.0 { gap } else { rest };
    let step = match round {
        Round::Near => false,
        Round::Down => gap < 0.0,
        Round::Up => gap > 0.0,
        Round::Zero => (gap < 0.0 && value > 0.0) || (gap > 0.0 && value < 0.0),
    };
    if !step {
        return near;
    }
    if gap > 0.0 { near.next_up() } else { near.next_down() }
}

/// Rounds `value + rest` to f32 so that rounding it once more to at most 22 bits gives what one rounding gives:
/// to zero, with the last bit set where something was left out.
#[inline(always)]
pub fn round_odd(value: f64, rest: f64) -> f32 {
    if !value.is_finite() {
        return value as f32;
    }
    let down = round_f32(value, rest, Round::Zero);
    let exact = f64::from(down) == value && rest == 0.0;
    f32::from_bits(down.to_bits() | u32::from(!exact))
}

/// `a * b + c` of f16 values, rounded once to f16.
#[inline(always)]
pub fn fma_f16(a: f32, b: f32, c: f32) -> f32 {
    // 22 bits of product fit; the sum's error follows by Knuth's two-sum and decides the last bit.
    let product = a * b;
    let sum = product + c;
    let part = sum - product;
    let rest = (product - (sum - part)) + (c - part);
    // Round to odd: one step toward what was left out, unless the last bit is set already. (What is left of an
    // infinite sum is no number.)
    let bits = sum.to_bits();
    let inexact = (rest.to_bits() & 0x7fff_ffff).wrapping_sub(1) < 0x7f7f_ffff;
    let toward = 1u32.wrapping_sub((bits ^ rest.to_bits()) >> 31 << 1);
    let step = if inexact { toward } else { 0 };
    f32::from_bits(if bits & 1 == 1 { bits } else { bits.wrapping_add(step) })
}

/// `a * b + c` of bf16 values, so that it can be rounded to bf16.
#[inline(always)]
pub fn fma_bf16(a: f32, b: f32, c: f32) -> f32 {
    let (sum, rest) = two_sum(f64::from(a) * f64::from(b), f64::from(c));
    round_odd(sum, rest)
}

/// The value of an e4m3 (no infinities; 0x7f is NaN).
#[inline(always)]
pub fn e4m3_to_f32(bits: u8) -> f32 {
    let magnitude = match bits & 0x7f {
        0x7f => f32::NAN,
        rest if rest < 8 => f32::from(rest) / 512.0,
        rest => f32::from_bits((u32::from(rest) << 20) + (120 << 23)),
    };
    if bits & 0x80 != 0 { -magnitude } else { magnitude }
}

/// The nearest e4m3, ties to even; what is larger than 448 becomes 448.
#[inline(always)]
pub fn f32_to_e4m3(value: f32) -> u8 {
    small_float(value, 3, 7, 0x7e, 0x7f)
}

/// The value of an e5m2.
#[inline(always)]
pub fn e5m2_to_f32(bits: u8) -> f32 {
    f16_to_f32(u16::from(bits) << 8)
}

/// The nearest e5m2, ties to even; what is larger than 57344 becomes 57344.
#[inline(always)]
pub fn f32_to_e5m2(value: f32) -> u8 {
    small_float(value, 2, 15, 0x7b, 0x7f)
}

fn small_float(value: f32, mantissa: u32, bias: i32, largest: u8, nan: u8) -> u8 {
    if value.is_nan() {
        return nan;
    }
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = f64::from(value.abs());
    // The unit in the last place: of the value's binade, or of denormals.
    let exponent = ((magnitude.to_bits() >> 52) as i32 - 1023).max(1 - bias);
    let unit = f64::powi(2.0, exponent - mantissa as i32);
    let steps = (magnitude / unit).round_ties_even();
    let code = f64::from((exponent + bias - 1) << mantissa) + steps;
    sign | if code > f64::from(largest) { largest } else { code as u8 }
}

/// An f32 with 10 bits of mantissa, as tensor cores read tf32.
#[inline(always)]
pub fn tf32(bits: u32) -> f32 {
    f32::from_bits(bits & 0xffff_e000)
}

/// Two to the `x`, within 2 units in the last place.
#[inline(always)]
pub fn exp2(x: f32) -> f32 {
    let clamped = x.clamp(-151.0, 129.0);
    // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
    let shifted = clamped + 12_582_912.0;
    let whole = shifted.to_bits().wrapping_sub(0x4b40_0000) as i32;
    let part = clamped - (shifted - 12_582_912.0);
    let mut sum = 1.525_273_4e-5f32;
    for factor in [1.540_353e-4, 1.333_355_8e-3, 9.618_129e-3, 5.550_411e-2, 2.402_265e-1, 6.931_472e-1, 1.0] {
        sum = sum.mul_add(part, factor);
    }
    // In two steps, so that denormal results come out.
    let half = whole >> 1;
    let scale = |power: i32| f32::from_bits(((power + 127) as u32) << 23);
    let result = sum * scale(half) * scale(whole - half);
    if x.is_nan() { x } else { result }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f16_values_round_trip_and_round_to_even() {
        for bits in 0..=u16::MAX {
            let value = f16_to_f32(bits);
            if value.is_nan() {
                assert_eq!(f32_to_f16(value), 0x7fff);
            } else {
                assert_eq!(f32_to_f16(value), bits, "{bits:#x}");
            }
        }
        assert_eq!(f16_to_f32(0x0001), 2f32.powi(-24));
        assert_eq!(f16_to_f32(0x3c00), 1.0);
        assert_eq!(f16_to_f32(0x7bff), 65504.0);
        // Halfway between 1 and its successor: to the even one; a little more: up.
        assert_eq!(f32_to_f16(1.0 + 2f32.powi(-11)), 0x3c00);
        assert_eq!(f32_to_f16(1.0 + 2f32.powi(-11) + 2f32.powi(-20)), 0x3c01);
        assert_eq!(f32_to_f16(65519.9), 0x7bff);
        assert_eq!(f32_to_f16(65520.0), 0x7c00);
        assert_eq!(f32_to_f16(-2f32.powi(-25)), 0x8000);
        assert_eq!(f32_to_f16(2f32.powi(-25) * 1.01), 0x0001);
    }

    #[test]
    fn bf16_rounds_to_even() {
        assert_eq!(f32_to_bf16(1.0), 0x3f80);
        assert_eq!(f32_to_bf16(f32::from_bits(0x3f80_8000)), 0x3f80);
        assert_eq!(f32_to_bf16(f32::from_bits(0x3f81_8000)), 0x3f82);
        assert_eq!(f32_to_bf16(f32::from_bits(0x7f7f_ffff)), 0x7f80);
        assert_eq!(f32_to_bf16(f32::NAN), 0x7fff);
    }

    #[test]
    fn directed_roundings_bracket_the_value() {
        let third = 1.0 / 3.0;
        let down = round_f32(third, 0.0, Round::Down);
        let up = round_f32(third, 0.0, Round::Up);
        assert!(f64::from(down) < third && third < f64::from(up));
        assert_eq!(down.next_up(), up);
        assert_eq!(round_f32(-third, 0.0, Round::Zero), -down);
        assert_eq!(round_f32(1.0, 1e-30, Round::Up), 1f32.next_up());
        assert_eq!(round_f32(1.0, -1e-30, Round::Zero), 1f32.next_down());
        assert_eq!(round_f32(1.0, 0.0, Round::Up), 1.0);
    }

    #[test]
    fn fma_of_halves_rounds_once() {
        // 1 + 2^-11 is a tie in f16; a tiny product on top decides it.
        let tiny = f16_to_f32(1);
        let got = f32_to_f16(fma_f16(tiny, tiny, 1.0 + 2f32.powi(-10)));
        assert_eq!(got, 0x3c01);
        // (1 + 2^-10)^2 = 1 + 2^-9 + 2^-20; minus 2^-20 of a larger sum stays a tie only if exact.
        let a = 1.0 + 2f32.powi(-10);
        assert_eq!(f32_to_f16(fma_f16(a, a, 0.0)), 0x3c02);
        let mut state = 7u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f16_to_f32((state >> 16) as u16)
        };
        for _ in 0..200_000 {
            let (a, b, c) = (next(), next(), next());
            if !(a.is_finite() && b.is_finite() && c.is_finite()) {
                continue;
            }
            // The same with 53 bits and an exact error: an independent way to round once.
            let (sum, rest) = two_sum(f64::from(a) * f64::from(b), f64::from(c));
            let want = f32_to_f16(round_odd(sum, rest));
            assert_eq!(f32_to_f16(fma_f16(a, b, c)), want, "{a} {b} {c}");
        }
    }

    #[test]
    fn small_floats() {
        assert_eq!(e4m3_to_f32(0x38), 1.0);
        assert_eq!(e4m3_to_f32(0x7e), 448.0);
        assert_eq!(e4m3_to_f32(0x01), 2f32.powi(-9));
        assert_eq!(e4m3_to_f32(0xff).to_bits() & 0x7fff_ffff, f32::NAN.to_bits());
        assert_eq!(e5m2_to_f32(0x3c), 1.0);
        for bits in 0..=255u8 {
            let (e4m3, e5m2) = (e4m3_to_f32(bits), e5m2_to_f32(bits));
            if e4m3.is_finite() {
                assert_eq!(f32_to_e4m3(e4m3), bits);
            }
            if e5m2.is_finite() {
                assert_eq!(f32_to_e5m2(e5m2), bits);
            }
        }
        assert_eq!(f32_to_e4m3(1e9), 0x7e);
        assert_eq!(f32_to_e4m3(-1e9), 0xfe);
        // 1.0625 is between 1 and 1.125: a tie, to even (1.0); 1.1875 a tie to 1.25.
        assert_eq!(f32_to_e4m3(1.0625), 0x38);
        assert_eq!(f32_to_e4m3(1.1875), 0x3a);
        assert_eq!(f32_to_e5m2(f32::INFINITY), 0x7b);
    }

    #[test]
    fn powers_of_two() {
        for whole in -149..=127 {
            assert_eq!(exp2(whole as f32), 2f64.powi(whole) as f32, "{whole}");
        }
        assert_eq!(exp2(128.0), f32::INFINITY);
        assert_eq!(exp2(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp2(-160.0), 0.0);
        assert_eq!(exp2(f32::NEG_INFINITY), 0.0);
        assert!(exp2(f32::NAN).is_nan());
        for step in -20_000..20_000 {
            let x = step as f32 * 0.003;
            let want = f64::from(x).exp2();
            assert!((f64::from(exp2(x)) - want).abs() <= want * 2.4e-7, "{x}");
        }
    }
}
