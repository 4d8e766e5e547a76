//! Codes that are small floats, as kernels take them: e2m1 as integers, e4m3 as a table.

use quern_models::Mini;
use std::sync::LazyLock;

/// `2 * value + 16` of an e2m1 code: an integer code of which 16 means zero, with half the scale.
/// (Any zero from 12 on gives the same sums; 16 is twice that of int4, see `acts`.)
pub(crate) const E2M1: [u8; 16] = [16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4];

/// The code of [`E2M1`] that means zero.
pub(crate) const E2M1_ZERO: i32 = 16;

/// Value of every e4m3 code.
pub(crate) static E4M3: LazyLock<[f32; 256]> = LazyLock::new(|| std::array::from_fn(|c| Mini::E4M3.value(c as u8)));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn twice_the_values_are_these_integers() {
        for (code, u) in E2M1.into_iter().enumerate() {
            assert_eq!(u as f32, 2.0 * Mini::E2M1.value(code as u8) + E2M1_ZERO as f32);
        }
    }
}
