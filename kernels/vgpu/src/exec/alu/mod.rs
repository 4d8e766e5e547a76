//! Arithmetic: which function runs an instruction of a type.

pub mod convert;
pub mod float;
pub mod half;
pub mod int;
pub mod number;

/// How a result is rounded; `k` of an instruction carries it in bits 2 and 3.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Round {
    /// To the nearest, ties to even.
    Near,
    /// To zero.
    Zero,
    /// Down.
    Down,
    /// Up.
    Up,
}

/// Bits of `k`: flush denormals, clamp to 0..1, ReLU, NaN wins in min and max.
pub const FTZ: u32 = 1;
pub const SAT: u32 = 2;
pub const RELU: u32 = 16;
pub const NAN: u32 = 32;

/// `k` for a rounding.
pub fn rounding(round: Round) -> u32 {
    (round as u32) << 2
}

/// The rounding in `k`.
#[inline(always)]
pub fn round_of(k: u32) -> Round {
    match k >> 2 & 3 {
        0 => Round::Near,
        1 => Round::Zero,
        2 => Round::Down,
        _ => Round::Up,
    }
}
