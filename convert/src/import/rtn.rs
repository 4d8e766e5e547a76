//! Rounding to nearest: the plain quantizer for float checkpoints, no calibration.
//!
//! Per group, the scale is the element of largest magnitude (with its sign) divided by the lowest
//! code, `s = w / -8` for 4 bits: that element becomes code 0 exactly and nothing is clipped by more
//! than one step on the other side. Measured on SmolLM2 at group 64 (reference/quantization.md §4.5):
//! KL divergence .360 against .446 for the usual `2 max|w| / 15`. Scales may be negative.
//!
//! Scales are f16, but f32 for a tensor with a group so small that its scale would be zero or lose
//! digits as f16.

use half::f16;
use quern_models::{FloatType, PANEL, ZeroKind};
use rayon::prelude::*;

use super::{Coding, IntShape, Integers, float::Floats, rows_of};
use crate::ConvertError;

/// A float tensor seen as integers.
#[derive(Debug)]
pub struct Rtn<'a> {
    shape: IntShape,
    floats: Floats<'a>,
    /// `[n][groups]`, rounded to the type in the file.
    scales: Vec<f32>,
}

/// Shape and meaning of `floats` once quantized. Looks at all of them, for the type of the scales.
pub fn shape(floats: &Floats, bits: u8, group: usize) -> IntShape {
    let shape = IntShape {
        n: floats.n,
        k: floats.k,
        bits,
        group,
        zero: ZeroKind::Mid,
        scale: FloatType::F16,
        coding: Coding::Plain,
    };
    let lossy = |largest: f32| {
        // More than an f16 loses to rounding while it is normal: the scale is far into its subnormals.
        // (What is not a number is an error when the tensor is quantized.)
        let scale = largest / shape.mid() as f32;
        scale.abs() < 1.0 && (f16::from_f32(scale).to_f32() - scale).abs() > scale.abs() / 64.0
    };
    let small = (0..shape.n).into_par_iter().map_init(Vec::new, |weights, row| {
        floats.decode(row, 0..shape.k, weights);
        weights.chunks(group).any(|w| lossy(extreme(w)))
    });
    if small.any(|row| row) { IntShape { scale: FloatType::F32, ..shape } } else { shape }
}

/// Scale of a group by its `extreme`, rounded to the type in the file. As f32 only magnitudes that are zero for
/// every purpose (below 1e-42) give zero.
pub fn scale_of(shape: &IntShape, largest: f32) -> f32 {
    let scale = largest / -(shape.mid() as f32);
    if shape.scale == FloatType::F16 { f16::from_f32(scale).to_f32() } else { scale }
}

/// Group for `k` columns: `asked` if it divides them, else the largest of 128, 64 and 32 below it
/// that does, else `asked` with a partial last group.
pub fn group_for(k: usize, asked: usize) -> usize {
    [asked, 128, 64, 32].into_iter().find(|&g| g <= asked && k.is_multiple_of(g)).unwrap_or(asked)
}

impl<'a> Rtn<'a> {
    /// Computes the scales; `shape` is [`shape`]'s. A weight that is not finite, or too large for an f16 scale, is an
    /// error.
    pub fn new(name: &str, floats: Floats<'a>, shape: IntShape) -> Result<Self, ConvertError> {
        let (groups, group) = (shape.groups(), shape.group);
        let mut scales = vec![0.0; shape.n * groups];
        scales.par_chunks_mut(groups).enumerate().try_for_each_init(Vec::new, |weights, (row, scales)| {
            floats.decode(row, 0..shape.k, weights);
            for (g, scale) in scales.iter_mut().enumerate() {
                let largest = extreme(&weights[g * group..shape.k.min((g + 1) * group)]);
                *scale = scale_of(&shape, largest);
                if !scale.is_finite() || !largest.is_finite() {
                    let next = match largest.is_finite() {
                        true => "keep the floats with --quant keep",
                        false => "is the download damaged?",
                    };
                    let got = format!("{largest} in row {row}, group {g}; {next}");
                    return Err(ConvertError::tensor(name, "weights", "finite numbers that f16 scales can reach", got));
                }
            }
            Ok(())
        })?;
        Ok(Rtn { shape, floats, scales })
    }
}

/// Element of largest magnitude, NaN if there is one.
pub(crate) fn extreme(weights: &[f32]) -> f32 {
    weights.iter().fold(0.0f32, |best, &x| if x.is_nan() || x.abs() > best.abs() { x } else { best })
}

/// Nearest code: `steps` is the weight in scales, at most `4 * mid` in magnitude.
#[inline]
fn nearest(steps: f32, mid: f32) -> u8 {
    // 1.5 * 2^23: adding it leaves no room for a fraction, so the sum is rounded to an even integer.
    // The same as round_ties_even(), which is a library call where SSE4.1 is not assumed.
    const ROUND: f32 = 12_582_912.0;
    ((steps + ROUND) - ROUND + mid).clamp(0.0, 2.0 * mid - 1.0) as u8
}

impl Integers for Rtn<'_> {
    fn shape(&self) -> IntShape {
        self.shape
    }

    fn code(&self, row: usize, col: usize) -> u8 {
        let mid = self.shape.mid() as f32;
        let scale = self.scale(row, col / self.shape.group);
        if scale == 0.0 {
            return self.shape.mid();
        }
        nearest(self.floats.at(row, col) / scale, mid)
    }

    fn scale(&self, row: usize, group: usize) -> f32 {
        self.scales[row * self.shape.groups() + group]
    }

    fn fill(&self, panel: usize, stride: usize, out: &mut [u8]) {
        let IntShape { k, group, .. } = self.shape;
        let mid = self.shape.mid() as f32;
        let mut weights = Vec::with_capacity(k);
        for (r, codes) in out.chunks_exact_mut(stride).enumerate().take(rows_of(self.shape.n, panel)) {
            let row = panel * PANEL + r;
            self.floats.decode(row, 0..k, &mut weights);
            for (g, (codes, weights)) in codes[..k].chunks_mut(group).zip(weights.chunks(group)).enumerate() {
                let scale = self.scale(row, g);
                // A group of zeros keeps the middle code, which is there already.
                if scale != 0.0 {
                    codes.iter_mut().zip(weights).for_each(|(code, w)| *code = nearest(w / scale, mid));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::{Dtype, RawTensor, Rows};

    fn made<'a>(raw: &RawTensor<'a>) -> Result<Rtn<'a>, ConvertError> {
        let floats = Floats::new("t", raw, &[1, raw.shape[1] as usize], quern_models::family::Take::WHOLE).unwrap();
        let shape = shape(&floats, 4, 32);
        Rtn::new("t", floats, shape)
    }

    #[test]
    fn groups_too_small_for_f16_scales_have_f32_ones() {
        for (largest, scale) in
            [(1e-3, FloatType::F16), (4e-4, FloatType::F16), (3e-6, FloatType::F32), (1e-9, FloatType::F32)]
        {
            let values: Vec<f32> = (0..64).map(|i| if i < 32 { 0.5 } else { largest / (i - 31) as f32 }).collect();
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            let shape = vec![1, 64];
            let raw = RawTensor { dtype: Dtype::Float(FloatType::F32), shape, bytes: &bytes, rows: Rows::InOrder };
            let rtn = made(&raw).unwrap();
            assert_eq!(rtn.shape().scale, scale, "{largest}");
            for (col, w) in values.into_iter().enumerate() {
                let step = rtn.scale(0, col / 32);
                let got = step * (rtn.code(0, col) as f32 - 8.0);
                assert!((got - w).abs() <= step.abs() * 0.51, "{largest} [{col}]: {got} for {w}");
            }
        }
        let bytes = [0; 4 * 32];
        let raw =
            RawTensor { dtype: Dtype::Float(FloatType::F32), shape: vec![1, 32], bytes: &bytes, rows: Rows::InOrder };
        assert_eq!(made(&raw).unwrap().shape().scale, FloatType::F16);
    }

    #[test]
    fn groups_fall_back_to_what_divides() {
        assert_eq!(group_for(576, 128), 64);
        assert_eq!(group_for(576, 64), 64);
        assert_eq!(group_for(96, 64), 32);
        assert_eq!(group_for(100, 64), 64);
        assert_eq!(group_for(1024, 256), 256);
        assert_eq!(group_for(128, 256), 128);
    }

    #[test]
    fn the_largest_weight_is_exact_and_all_are_nearest() {
        let values = [-0.5f32, 0.25, 0.5, 0.0625, -0.03, 0.46875, 0.437, 0.0];
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let raw =
            RawTensor { dtype: Dtype::Float(FloatType::F32), shape: vec![1, 8], bytes: &bytes, rows: Rows::InOrder };
        let rtn = made(&raw).unwrap();
        assert_eq!(rtn.scale(0, 0), 0.0625);
        let codes: Vec<u8> = (0..8).map(|c| rtn.code(0, c)).collect();
        assert_eq!(codes, [0, 12, 15, 9, 8, 15, 15, 8]);
    }

    #[test]
    fn weights_that_are_no_numbers_are_named() {
        for bad in [f32::NAN, f32::INFINITY, 1e9] {
            let bytes: Vec<u8> = [0.0, bad].iter().flat_map(|v| v.to_le_bytes()).collect();
            let raw = RawTensor {
                dtype: Dtype::Float(FloatType::F32),
                shape: vec![1, 2],
                bytes: &bytes,
                rows: Rows::InOrder,
            };
            let text = made(&raw).unwrap_err().to_string();
            assert!(text.contains("row 0, group 0"), "{text}");
            assert_eq!(text.contains("damaged"), !bad.is_finite(), "{text}");
        }
    }
}
