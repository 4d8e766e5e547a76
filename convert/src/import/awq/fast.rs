//! `gemv_fast` and `llm-awq`: 16-bit words of four columns, eight apart, of one row; four rows to a line.
//!
//! In a line of 64 words (64 columns of four rows), row `r` has words `16r..16r+16`; its columns `c` and `c + 8`,
//! `c + 16`, `c + 24` of each 32 share word `c % 8 + 8 * (c / 32)`, lowest nibble first. (`pack_intweight` of AutoAWQ
//! and llm-awq, its three permutations put together.)
//!
//! The zero-point is stored as a float, `m = -s * z` rounded to f16, and the weight is `s * q + m`: that is what the
//! format's kernels compute, not `s * (q - z)`. Both are equal where `-s * z` needs no rounding, which holds for
//! symmetric tensors (`z` is 8): where every `m` of a tensor is such a product, `z` is stored, else all of its `m`
//! as minima.

use quern_models::{FloatType, PANEL, ZeroKind};

use super::{
    super::{Coding, IntShape, Integers, Scales, rows_of},
    Packing, Parts, misfit,
};
use crate::{ConvertError, source::Dtype};

/// A tensor in the `gemv_fast` order.
#[derive(Debug)]
pub struct Fast<'a> {
    shape: IntShape,
    /// `[N/4, K]` words of 16 bits.
    bytes: &'a [u8],
    scales: Scales<'a>,
    minima: Scales<'a>,
}

impl<'a> Fast<'a> {
    pub(super) fn new(parts: &Parts<'a, '_>) -> Result<Self, ConvertError> {
        let (n, k) = (parts.n, parts.k);
        let (name, raw) = parts.need("qweight")?;
        parts.multiples(&name, Packing::Fast, 4, 64)?;
        if !matches!(raw.dtype, Dtype::Other("I16", _)) || raw.shape != [n as u64 / 4, k as u64] {
            let (expected, got) = (format!("i16 [{n}/4, {k}]"), format!("{} {:?}", raw.dtype.name(), raw.shape));
            return Err(ConvertError::tensor(&name, "type and shape", expected, got));
        }
        let bytes = raw.bytes;
        let (name, raw) = parts.need("scales")?;
        let scales = Scales::padded(&name, raw, n, parts.said().map(|g| k.div_ceil(g)))?;
        let group = parts.group(&name, scales.groups())?;
        let (name, zeros) = match parts.get("scaled_zeros") {
            Some(found) => found,
            None => parts.need("qzeros")?,
        };
        if zeros.shape != raw.shape {
            let (expected, got) = (format!("{:?}, as the scales have", raw.shape), format!("{:?}", zeros.shape));
            return Err(ConvertError::tensor(&name, "shape", expected, got));
        }
        let minima = Scales::padded(&name, zeros, n, Some(scales.groups()))?;
        let (bits, coding) = (4, Coding::Plain);
        let shape = IntShape { n, k, bits, group, zero: ZeroKind::Code, scale: scales.stored(), coding };
        let mut tensor = Fast { shape, bytes, scales, minima };
        let cells = || (0..n).flat_map(|row| (0..scales.groups()).map(move |g| (row, g)));
        // Products of f32 scales would be rounded on one side only.
        let short = scales.stored() != FloatType::F32;
        if !(short && cells().all(|(row, g)| tensor.zero_of(row, g).is_some())) {
            tensor.shape.zero = ZeroKind::Min;
            tensor.shape.scale = match (scales.stored(), minima.stored()) {
                (a, b) if a == b => a,
                _ => FloatType::F32,
            };
        } else if cells().all(|(row, g)| tensor.zero(row, g) == 8) {
            tensor.shape.zero = ZeroKind::Mid;
        }
        Ok(tensor)
    }

    /// The code whose product with the scale is the stored float zero-point, if there is one.
    fn zero_of(&self, row: usize, group: usize) -> Option<u8> {
        let (scale, min) = (self.scales.at(row, group) as f64, self.minima.at(row, group) as f64);
        // With a scale of 0 the group is 0 whatever the zero-point, or the minimum.
        let zero = if scale == 0.0 { 8.0 } else { (-min / scale).round() };
        // f64 holds the product exactly, whatever the floats are.
        ((0.0..=15.0).contains(&zero) && -(scale * zero) == min).then_some(zero as u8)
    }

    fn word(&self, line: usize, i: usize) -> u16 {
        let at = (line * self.shape.k + i) * 2;
        u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]])
    }
}

impl Integers for Fast<'_> {
    fn shape(&self) -> IntShape {
        self.shape
    }

    fn code(&self, row: usize, col: usize) -> u8 {
        let word = self.word(row / 4, col / 64 * 64 + row % 4 * 16 + col % 64 / 32 * 8 + col % 8);
        (word >> (col % 32 / 8 * 4)) as u8 & 15
    }

    fn scale(&self, row: usize, group: usize) -> f32 {
        self.scales.at(row, group)
    }

    fn zero(&self, row: usize, group: usize) -> u8 {
        self.zero_of(row, group).unwrap_or(8)
    }

    fn min(&self, row: usize, group: usize) -> f32 {
        self.minima.at(row, group)
    }

    fn misfit(&self) -> Option<String> {
        misfit(self.shape.group)
    }

    fn fill(&self, panel: usize, stride: usize, out: &mut [u8]) {
        for (r, out) in out.chunks_exact_mut(stride).enumerate().take(rows_of(self.shape.n, panel)) {
            let row = panel * PANEL + r;
            for (block, out) in out[..self.shape.k].chunks_exact_mut(32).enumerate() {
                let at = block / 2 * 64 + row % 4 * 16 + block % 2 * 8;
                for c in 0..8 {
                    let word = self.word(row / 4, at + c);
                    (0..4).for_each(|i| out[8 * i + c] = (word >> (4 * i)) as u8 & 15);
                }
            }
        }
    }
}
