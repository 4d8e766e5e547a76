//! Some rows of a quantized tensor: q, k or v of a fused layer.

use quern_models::PANEL;

use super::{IntShape, Integers, Level2, order::Columns};
use crate::ConvertError;

/// `n` rows of a tensor from `first` on.
pub struct Part<'a> {
    of: Box<dyn Integers + 'a>,
    first: usize,
    n: usize,
}

impl<'a> Part<'a> {
    /// The rows must be there.
    pub fn new(of: Box<dyn Integers + 'a>, first: usize, n: usize) -> Part<'a> {
        assert!(first + n <= of.shape().n, "rows {first}.. of {}", of.shape().n);
        Part { of, first, n }
    }
}

impl Integers for Part<'_> {
    fn shape(&self) -> IntShape {
        IntShape { n: self.n, ..self.of.shape() }
    }

    fn code(&self, row: usize, col: usize) -> u8 {
        self.of.code(self.first + row, col)
    }

    fn group_of(&self, col: usize) -> usize {
        self.of.group_of(col)
    }

    fn scale(&self, row: usize, group: usize) -> f32 {
        self.of.scale(self.first + row, group)
    }

    fn zero(&self, row: usize, group: usize) -> u8 {
        self.of.zero(self.first + row, group)
    }

    fn min(&self, row: usize, group: usize) -> f32 {
        self.of.min(self.first + row, group)
    }

    fn nested(&self, row: usize, group: usize) -> [Level2; 2] {
        self.of.nested(self.first + row, group)
    }

    fn order(&self) -> Columns {
        self.of.order()
    }

    fn source_bits(&self) -> u8 {
        self.of.source_bits()
    }

    fn check(&self, name: &str) -> Result<(), ConvertError> {
        self.of.check(name)
    }

    fn misfit(&self) -> Option<String> {
        self.of.misfit()
    }

    fn value(&self, row: usize, col: usize) -> f32 {
        self.of.value(self.first + row, col)
    }

    fn fill(&self, panel: usize, stride: usize, out: &mut [u8]) {
        let rows = super::rows_of(self.n, panel);
        // A whole panel of the other tensor, or of its end, is filled as fast as there.
        let start = self.first + panel * PANEL;
        if start.is_multiple_of(PANEL) && super::rows_of(self.of.shape().n, start / PANEL) == rows {
            return self.of.fill(start / PANEL, stride, out);
        }
        let k = self.of.shape().k;
        for (r, row) in out.chunks_exact_mut(stride).enumerate().take(rows) {
            row[..k].iter_mut().enumerate().for_each(|(col, code)| *code = self.code(panel * PANEL + r, col));
        }
    }
}
