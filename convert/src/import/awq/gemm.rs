//! `gemm`: a word holds eight rows of W in the order 0 2 4 6 1 3 5 7, lowest nibble first.

use quern_models::{PANEL, ZeroKind};

use super::{
    super::{Coding, IntShape, Integers, Scales, Words, nibbles, rows_of},
    Packing, Parts, misfit,
};
use crate::ConvertError;

/// Row (of eight) that nibble `i` holds.
const ROW_OF_NIBBLE: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
/// Nibble that holds row `r` (of eight).
const NIBBLE_OF_ROW: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// A tensor in the `gemm` order.
#[derive(Debug)]
pub struct Gemm<'a> {
    shape: IntShape,
    qweight: Words<'a>,
    /// Absent where all are the middle code.
    qzeros: Option<Words<'a>>,
    scales: Scales<'a>,
}

impl<'a> Gemm<'a> {
    pub(super) fn new(parts: &Parts<'a, '_>) -> Result<Self, ConvertError> {
        let (n, k) = (parts.n, parts.k);
        let (name, raw) = parts.need("qweight")?;
        let (qweight, got) = Words::new(&name, raw)?;
        parts.multiples(&name, Packing::Gemm, 8, 1)?;
        parts.shaped(&name, got, [k, n / 8])?;
        let (name, raw) = parts.need("scales")?;
        let scales = Scales::new(&name, raw, n)?;
        let group = parts.group(&name, scales.groups())?;
        let qzeros = match parts.get("qzeros") {
            // Nothing to store: symmetric.
            None if parts.hint.sym == Some(true) => None,
            _ => {
                let (name, raw) = parts.need("qzeros")?;
                let (qzeros, got) = Words::new(&name, raw)?;
                parts.shaped(&name, got, [scales.groups(), n / 8])?;
                Some(qzeros)
            }
        };
        let differ = qzeros.is_some_and(|words| words.iter().any(|w| w != 0x8888_8888));
        let zero = if differ { ZeroKind::Code } else { ZeroKind::Mid };
        let shape = IntShape { n, k, bits: 4, group, zero, scale: scales.stored(), coding: Coding::Plain };
        Ok(Gemm { shape, qweight, qzeros, scales })
    }
}

impl Integers for Gemm<'_> {
    fn shape(&self) -> IntShape {
        self.shape
    }

    fn code(&self, row: usize, col: usize) -> u8 {
        let shift = 4 * NIBBLE_OF_ROW[row % 8];
        (self.qweight.at(col, row / 8) >> shift) as u8 & 15
    }

    fn scale(&self, row: usize, group: usize) -> f32 {
        self.scales.at(row, group)
    }

    fn zero(&self, row: usize, group: usize) -> u8 {
        let shift = 4 * NIBBLE_OF_ROW[row % 8];
        self.qzeros.map_or(8, |words| (words.at(group, row / 8) >> shift) as u8 & 15)
    }

    fn misfit(&self) -> Option<String> {
        misfit(self.shape.group)
    }

    fn fill(&self, panel: usize, stride: usize, out: &mut [u8]) {
        let (row0, rows) = (panel * PANEL, rows_of(self.shape.n, panel));
        // 64 columns at a time: one cache line of every row.
        for k0 in (0..self.shape.k).step_by(64) {
            for r in (0..rows).step_by(8) {
                for k in k0..self.shape.k.min(k0 + 64) {
                    let codes = nibbles(self.qweight.at(k, (row0 + r) / 8));
                    for (i, code) in codes.into_iter().enumerate() {
                        out[(r + ROW_OF_NIBBLE[i]) * stride + k] = code;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_nibble_orders_are_inverse() {
        for row in 0..8 {
            assert_eq!(ROW_OF_NIBBLE[NIBBLE_OF_ROW[row]], row);
        }
    }
}
