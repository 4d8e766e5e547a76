//! Float tensors: kept in their type, or rounded to f16.

use std::{borrow::Cow, ops::Range};

use half::{bf16, f16};
use quern_models::FloatType;
use rayon::prelude::*;

use super::order::Arrange;
use crate::{
    ConvertError,
    source::{Dtype, RawTensor, Rows},
};

/// A float matrix `[n, k]`; a vector is one row.
#[derive(Debug, Clone)]
pub struct Floats<'a> {
    /// Rows.
    pub n: usize,
    /// Columns.
    pub k: usize,
    /// Type in the source.
    pub kind: FloatType,
    bytes: &'a [u8],
    rows: Rows,
    /// Where rows and columns come from, after the order in which the source stores them.
    pub arrange: Arrange,
}

impl<'a> Floats<'a> {
    /// Checks type and shape; `shape` is `[n, k]` or `[n]`.
    pub fn new(name: &str, raw: &RawTensor<'a>, shape: &[usize]) -> Result<Self, ConvertError> {
        if raw.shape.iter().map(|&d| d as usize).ne(shape.iter().copied()) {
            let got = format!("{:?}; the checkpoint is not what its config says", raw.shape);
            return Err(ConvertError::tensor(name, "shape", format!("{shape:?}"), got));
        }
        let Dtype::Float(kind) = raw.dtype else {
            let got = format!("{}; save the checkpoint in one of these", raw.dtype.name());
            return Err(ConvertError::tensor(name, "type", "f32, f16 or bf16", got));
        };
        let (n, k) = match *shape {
            [n, k] => (n, k),
            [n] if raw.rows == Rows::InOrder => (1, n),
            _ => (shape.iter().product(), 1),
        };
        Ok(Floats { n, k, kind, bytes: raw.bytes, rows: raw.rows, arrange: Arrange::default() })
    }

    /// Element of a row.
    #[inline]
    pub fn at(&self, row: usize, col: usize) -> f32 {
        self.kind.read(self.bytes, self.rows.stored(self.arrange.row(row)) * self.k + self.arrange.col(col))
    }

    /// Elements `cols` of a row into `out`, which is emptied first.
    pub fn decode(&self, row: usize, cols: Range<usize>, out: &mut Vec<f32>) {
        out.clear();
        if self.arrange.cols.is_some() {
            return out.extend(cols.map(|col| self.at(row, col)));
        }
        let size = self.kind.size();
        let bytes = &self.row(row)[cols.start * size..cols.end * size];
        match self.kind {
            FloatType::F32 => out.extend(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
            FloatType::F16 => out.extend(bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32())),
            FloatType::BF16 => out.extend(bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32())),
        }
    }

    /// Bytes of a row, its columns in the order of the source.
    pub fn row(&self, row: usize) -> &'a [u8] {
        let size = self.k * self.kind.size();
        &self.bytes[self.rows.stored(self.arrange.row(row)) * size..][..size]
    }

    /// Checks that all elements are finite.
    pub fn finite(&self, name: &str) -> Result<(), ConvertError> {
        // The exponent, all ones in what is not finite, lies in the upper two bytes.
        let (size, exponent) = (self.kind.size(), if self.kind == FloatType::F16 { 0x7c00 } else { 0x7f80 });
        let bad = |e: &[u8]| u16::from_le_bytes([e[size - 2], e[size - 1]]) & exponent == exponent;
        let found = (0..self.n)
            .into_par_iter()
            .find_map_first(|row| self.row(row).chunks_exact(size).position(bad).map(|col| (row, col)));
        match found {
            None => Ok(()),
            Some((row, col)) => {
                let x = self.kind.read(self.row(row), col);
                let got = format!("{x} at [{row}, {col}]; is the download damaged?");
                Err(ConvertError::tensor(name, "weights", "finite numbers", got))
            }
        }
    }

    /// The elements as they are, in order. One that is not finite is an error.
    pub fn kept(&self, name: &str) -> Result<Cow<'a, [u8]>, ConvertError> {
        self.finite(name)?;
        if self.rows == Rows::InOrder && self.arrange.is_natural() {
            return Ok(Cow::Borrowed(self.bytes));
        }
        let mut out = Vec::with_capacity(self.bytes.len());
        for row in 0..self.n {
            match &self.arrange.cols {
                None => out.extend_from_slice(self.row(row)),
                Some(cols) => {
                    let (size, bytes) = (self.kind.size(), self.row(row));
                    cols.iter().for_each(|&col| out.extend_from_slice(&bytes[col as usize * size..][..size]));
                }
            }
        }
        Ok(Cow::Owned(out))
    }

    /// The elements rounded to f16. Values beyond its range are an error.
    pub fn rounded(&self, name: &str) -> Result<Vec<u8>, ConvertError> {
        self.finite(name)?;
        let mut out = Vec::with_capacity(self.n * self.k * 2);
        for row in 0..self.n {
            for col in 0..self.k {
                let x = self.at(row, col);
                let h = f16::from_f32(x);
                if !h.is_finite() {
                    let got = format!("{x} at [{row}, {col}]; keep the type with --quant keep");
                    return Err(ConvertError::tensor(name, "weights", "numbers that f16 can hold (up to 65504)", got));
                }
                out.extend_from_slice(&h.to_le_bytes());
            }
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_are_none_are_named() {
        for kind in [FloatType::F32, FloatType::F16, FloatType::BF16] {
            let floats = |values: &[f32], rows| {
                let mut bytes = vec![];
                values.iter().for_each(|&x| kind.push(x, &mut bytes));
                let raw = RawTensor { dtype: Dtype::Float(kind), shape: vec![4, 2], bytes: &bytes, rows };
                let floats = Floats::new("t", &raw, &[4, 2]).unwrap();
                let texts = [floats.kept("t").err(), floats.rounded("t").err()].map(|e| e.map(|e| e.to_string()));
                assert_eq!(texts[0], texts[1]);
                texts[0].clone()
            };
            let good = [0.0, -0.0, 1e-7, -1.0, 60000.0, 0.1, 3.0, 7.0];
            assert_eq!(floats(&good, Rows::InOrder), None);
            for (bad, shown) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf")] {
                let mut values = good;
                values[3] = bad;
                let text = floats(&values, Rows::InOrder).unwrap();
                let expected = format!("tensor t: weights: expected finite numbers, got {shown} at [1, 1]; is");
                assert!(text.contains(&expected), "{text}");
                // Stored row 1 is row 2.
                let text = floats(&values, Rows::Interleaved { head_dim: 4 }).unwrap();
                assert!(text.contains(&format!("got {shown} at [2, 1]")), "{text}");
            }
        }
    }
}
