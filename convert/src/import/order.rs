//! Tensors whose rows or columns are taken in another order: act-order, and what it does to its neighbours.
//!
//! A column order comes from GPTQ's act-order: sorted by group, the columns of a tensor form groups again.
//! A row order undoes it where the tensor's input is another's output: the rows that make it are moved instead.

use std::sync::Arc;

use quern_models::PANEL;
use rayon::prelude::*;

use super::{IntShape, Integers, Level2, rows_of};

/// A permutation: place `i` takes what was at `order[i]`.
pub type Order = Arc<[u32]>;

/// Where the rows and columns of a tensor come from; `None` is the order of the source.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Arrange {
    /// Source row of a row.
    pub rows: Option<Order>,
    /// Source column of a column.
    pub cols: Option<Order>,
}

impl Arrange {
    /// Nothing is moved.
    pub fn is_natural(&self) -> bool {
        *self == Arrange::default()
    }

    /// Source row of a row.
    #[inline]
    pub fn row(&self, row: usize) -> usize {
        self.rows.as_ref().map_or(row, |o| o[row] as usize)
    }

    /// Source column of a column.
    #[inline]
    pub fn col(&self, col: usize) -> usize {
        self.cols.as_ref().map_or(col, |o| o[col] as usize)
    }
}

/// In which order the columns of a tensor may be stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Columns {
    /// In any: they share their scales.
    Any,
    /// As in the source.
    Natural,
    /// In this one, which makes its groups contiguous.
    Ordered(Order),
}

/// The stable order that sorts columns by the group of each.
pub fn sorted(index: &[u32]) -> Order {
    let mut order: Vec<u32> = (0..index.len() as u32).collect();
    order.sort_by_key(|&col| index[col as usize]);
    order.into()
}

/// A tensor with rows and columns moved. Definitions only; [`Ordered::decoded`] is what is written.
pub struct Ordered<'a> {
    inner: &'a dyn Integers,
    arrange: &'a Arrange,
}

impl<'a> Ordered<'a> {
    /// `arrange` is permutations of the rows and columns of `inner`.
    pub fn new(inner: &'a dyn Integers, arrange: &'a Arrange) -> Self {
        Ordered { inner, arrange }
    }

    /// Decodes all codes in the order of the source, a byte each, for a fast [`Integers::fill`].
    pub fn decoded(&self) -> Decoded<'_> {
        let IntShape { n, k, group, .. } = self.inner.shape();
        let stride = k.next_multiple_of(group);
        let mut codes = vec![self.inner.shape().mid(); n.next_multiple_of(PANEL) * stride];
        let panels = codes.par_chunks_mut(PANEL * stride).enumerate();
        panels.for_each(|(panel, codes)| self.inner.fill(panel, stride, codes));
        Decoded { ordered: self, codes, stride }
    }
}

impl Integers for Ordered<'_> {
    fn shape(&self) -> IntShape {
        self.inner.shape()
    }

    fn code(&self, row: usize, col: usize) -> u8 {
        self.inner.code(self.arrange.row(row), self.arrange.col(col))
    }

    fn group_of(&self, col: usize) -> usize {
        self.inner.group_of(self.arrange.col(col))
    }

    fn scale(&self, row: usize, group: usize) -> f32 {
        self.inner.scale(self.arrange.row(row), group)
    }

    fn zero(&self, row: usize, group: usize) -> u8 {
        self.inner.zero(self.arrange.row(row), group)
    }

    fn min(&self, row: usize, group: usize) -> f32 {
        self.inner.min(self.arrange.row(row), group)
    }

    fn nested(&self, row: usize, group: usize) -> [Level2; 2] {
        self.inner.nested(self.arrange.row(row), group)
    }
}

/// An [`Ordered`] tensor with its codes at hand.
pub struct Decoded<'a> {
    ordered: &'a Ordered<'a>,
    /// `[n][stride]`, in the order of the source.
    codes: Vec<u8>,
    stride: usize,
}

impl Integers for Decoded<'_> {
    fn shape(&self) -> IntShape {
        self.ordered.shape()
    }

    fn code(&self, row: usize, col: usize) -> u8 {
        self.ordered.code(row, col)
    }

    fn group_of(&self, col: usize) -> usize {
        self.ordered.group_of(col)
    }

    fn scale(&self, row: usize, group: usize) -> f32 {
        self.ordered.scale(row, group)
    }

    fn zero(&self, row: usize, group: usize) -> u8 {
        self.ordered.zero(row, group)
    }

    fn min(&self, row: usize, group: usize) -> f32 {
        self.ordered.min(row, group)
    }

    fn nested(&self, row: usize, group: usize) -> [Level2; 2] {
        self.ordered.nested(row, group)
    }

    fn fill(&self, panel: usize, stride: usize, out: &mut [u8]) {
        let (IntShape { n, k, .. }, arrange) = (self.shape(), self.ordered.arrange);
        for (r, out) in out.chunks_exact_mut(stride).enumerate().take(rows_of(n, panel)) {
            let codes = &self.codes[arrange.row(panel * PANEL + r) * self.stride..][..k];
            match &arrange.cols {
                None => out[..k].copy_from_slice(codes),
                Some(cols) => out.iter_mut().zip(cols.iter()).for_each(|(out, &col)| *out = codes[col as usize]),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use quern_models::{FloatType, TensorView, ZeroKind};

    use super::*;
    use crate::{import::Coding, pack};

    struct Made;

    impl Integers for Made {
        fn shape(&self) -> IntShape {
            let (zero, scale) = (ZeroKind::Code, FloatType::F16);
            IntShape { n: 70, k: 40, bits: 4, group: 16, zero, scale, coding: Coding::Plain }
        }
        fn code(&self, row: usize, col: usize) -> u8 {
            ((row * 5 + col * 3 + row * col) % 16) as u8
        }
        fn group_of(&self, col: usize) -> usize {
            // 0 2 1 0 2 1 ..., with 16, 16 and 8 columns.
            if col < 24 { [0, 2, 1][col % 3] } else { col % 2 }
        }
        fn scale(&self, row: usize, group: usize) -> f32 {
            (row + 100 * group) as f32
        }
        fn zero(&self, row: usize, group: usize) -> u8 {
            ((row + group) % 16) as u8
        }
    }

    #[test]
    fn moved_rows_and_columns_keep_their_values() {
        let index: Vec<u32> = (0..40).map(|c| Made.group_of(c) as u32).collect();
        let cols = sorted(&index);
        assert_eq!(cols[..3], [0, 3, 6]);
        let rows: Order = (0..70u32).map(|r| (r * 13 + 5) % 70).collect();
        for arrange in
            [Arrange { rows: None, cols: Some(cols.clone()) }, Arrange { rows: Some(rows), cols: Some(cols) }]
        {
            let ordered = Ordered::new(&Made, &arrange);
            let bytes = pack(&ordered.decoded());
            assert_eq!(bytes, pack(&ordered));
            let view = TensorView::new(70, 40, Made.shape().scheme(), &bytes).unwrap();
            for (row, col) in (0..70).flat_map(|r| (0..40).map(move |c| (r, c))) {
                assert_eq!(ordered.group_of(col), col / 16);
                assert_eq!(view.at(row, col), Made.value(arrange.row(row), arrange.col(col)), "[{row}, {col}]");
            }
        }
    }
}
