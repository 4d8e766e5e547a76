//! `gemv`: a word holds eight columns of a row of W, lowest nibble first; zero-points likewise along the groups.
//!
//! Scales and zero-points have columns beyond the last group, up to a width that kernels want
//! (`calculate_zeros_width` of AutoAWQ: groups by eights, rounded up to 8, 4 or 2 of them for groups of 16, 32, 64).

use quern_models::{PANEL, ZeroKind};

use super::{
    super::{Coding, IntShape, Integers, Scales, Words, nibbles, rows_of},
    Packing, Parts, misfit,
};
use crate::ConvertError;

/// A tensor in the `gemv` order.
#[derive(Debug)]
pub struct Gemv<'a> {
    shape: IntShape,
    qweight: Words<'a>,
    qzeros: Words<'a>,
    scales: Scales<'a>,
}

impl<'a> Gemv<'a> {
    pub(super) fn new(parts: &Parts<'a, '_>) -> Result<Self, ConvertError> {
        let (n, k) = (parts.n, parts.k);
        let (name, raw) = parts.need("qweight")?;
        let (qweight, got) = Words::new(&name, raw)?;
        parts.multiples(&name, Packing::Gemv, 1, 8)?;
        parts.shaped(&name, got, [n, k / 8])?;
        let (name, raw) = parts.need("scales")?;
        // A claim for all modules says how many of the columns are groups; else those with a scale that is not zero.
        let scales = Scales::by_row(&name, raw, n, parts.said().map(|g| k.div_ceil(g)))?;
        let group = parts.group(&name, scales.groups())?;
        let width = raw.shape[1] as usize;
        let (name, raw) = parts.need("qzeros")?;
        let (qzeros, got) = Words::new(&name, raw)?;
        parts.shaped(&name, got, [n, width / 8])?;
        let mut tensor = Gemv {
            shape: IntShape {
                n,
                k,
                bits: 4,
                group,
                zero: ZeroKind::Code,
                scale: scales.stored(),
                coding: Coding::Plain,
            },
            qweight,
            qzeros,
            scales,
        };
        if width < 8 * scales.groups().div_ceil(8) {
            let expected = format!("at least {} for {} groups", scales.groups().div_ceil(8), scales.groups());
            return Err(ConvertError::tensor(&name, "words of a row", expected, width / 8));
        }
        let groups = scales.groups();
        if (0..n).all(|row| (0..groups).all(|g| tensor.zero(row, g) == 8)) {
            tensor.shape.zero = ZeroKind::Mid;
        }
        Ok(tensor)
    }
}

impl Integers for Gemv<'_> {
    fn shape(&self) -> IntShape {
        self.shape
    }

    fn code(&self, row: usize, col: usize) -> u8 {
        (self.qweight.at(row, col / 8) >> (col % 8 * 4)) as u8 & 15
    }

    fn scale(&self, row: usize, group: usize) -> f32 {
        self.scales.at(row, group)
    }

    fn zero(&self, row: usize, group: usize) -> u8 {
        (self.qzeros.at(row, group / 8) >> (group % 8 * 4)) as u8 & 15
    }

    fn misfit(&self) -> Option<String> {
        misfit(self.shape.group)
    }

    fn fill(&self, panel: usize, stride: usize, out: &mut [u8]) {
        for (r, out) in out.chunks_exact_mut(stride).enumerate().take(rows_of(self.shape.n, panel)) {
            for (w, out) in out[..self.shape.k].chunks_exact_mut(8).enumerate() {
                out.copy_from_slice(&nibbles(self.qweight.at(panel * PANEL + r, w)));
            }
        }
    }
}
