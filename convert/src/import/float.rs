//! Float tensors: kept in their type, or rounded to f16.

use std::{borrow::Cow, ops::Range};

use half::{bf16, f16};
use quern_models::{FloatType, family::Take};
use rayon::prelude::*;

use super::order::Arrange;
use crate::{
    ConvertError,
    source::{Dtype, RawTensor, Rows},
};

/// A float matrix `[n, k]`, all or some rows of a stored one; a vector is one row.
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
    /// Stored row that is row 0.
    first: usize,
    /// Stored as `[k, columns]`: an element's row is its column there.
    columns: Option<usize>,
    /// Where rows and columns come from, after the order in which the source stores them.
    pub arrange: Arrange,
}

impl<'a> Floats<'a> {
    /// Checks type and shape; `shape` is `[n, k]` or `[n]` of what `take` takes from the tensor.
    pub fn new(name: &str, raw: &RawTensor<'a>, shape: &[usize], take: Take) -> Result<Self, ConvertError> {
        let (first, all) = take.part.unwrap_or((0, shape[0]));
        let mut stored = shape.to_vec();
        stored[0] = all;
        if take.transposed {
            stored.reverse();
        }
        if raw.shape.iter().map(|&d| d as usize).ne(stored.iter().copied()) {
            let got = format!("{:?}; the checkpoint is not what its config says", raw.shape);
            return Err(ConvertError::tensor(name, "shape", format!("{stored:?}"), got));
        }
        let Dtype::Float(kind) = raw.dtype else {
            let got = format!("{}; save the checkpoint in one of these", raw.dtype.name());
            return Err(ConvertError::tensor(name, "type", "f32, f16 or bf16", got));
        };
        if take.transposed && raw.rows != Rows::InOrder {
            let next = "convert the safetensors version of the model";
            return Err(ConvertError::unsupported(format!("tensor {name}: transposed, with rows out of order"), next));
        }
        // A vector is one row, but for one whose elements are to be found row by row.
        let (n, k, bytes, first) = match *shape {
            [n, k] => (n, k, raw.bytes, first),
            [n] if raw.rows == Rows::InOrder => (1, n, &raw.bytes[first * kind.size()..(first + n) * kind.size()], 0),
            _ => (shape.iter().product(), 1, raw.bytes, first),
        };
        let (columns, arrange) = (take.transposed.then_some(all), Arrange::default());
        Ok(Floats { n, k, kind, bytes, rows: raw.rows, first, columns, arrange })
    }

    /// Index of an element in the stored tensor, by its column in the source.
    #[inline]
    fn index(&self, row: usize, source_col: usize) -> usize {
        let row = self.first + self.arrange.row(row);
        match self.columns {
            Some(columns) => source_col * columns + row,
            None => self.rows.stored(row) * self.k + source_col,
        }
    }

    /// Element of a row.
    #[inline]
    pub fn at(&self, row: usize, col: usize) -> f32 {
        self.kind.read(self.bytes, self.index(row, self.arrange.col(col)))
    }

    /// Elements `cols` of a row into `out`, which is emptied first.
    pub fn decode(&self, row: usize, cols: Range<usize>, out: &mut Vec<f32>) {
        out.clear();
        if self.arrange.cols.is_some() || self.columns.is_some() {
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
    pub fn row(&self, row: usize) -> Cow<'a, [u8]> {
        let size = self.kind.size();
        if self.columns.is_some() {
            let element = |col| &self.bytes[self.index(row, col) * size..][..size];
            return Cow::Owned((0..self.k).flat_map(element).copied().collect());
        }
        Cow::Borrowed(&self.bytes[self.index(row, 0) * size..][..self.k * size])
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
                let x = self.kind.read(&self.row(row), col);
                let got = format!("{x} at [{row}, {col}]; is the download damaged?");
                Err(ConvertError::tensor(name, "weights", "finite numbers", got))
            }
        }
    }

    /// The elements as they are, in order. One that is not finite is an error.
    pub fn kept(&self, name: &str) -> Result<Cow<'a, [u8]>, ConvertError> {
        self.finite(name)?;
        let size = self.kind.size();
        if self.rows == Rows::InOrder && self.columns.is_none() && self.arrange.is_natural() {
            let row = self.k * size;
            return Ok(Cow::Borrowed(&self.bytes[self.first * row..][..self.n * row]));
        }
        let mut out = Vec::with_capacity(self.n * self.k * size);
        for row in 0..self.n {
            let bytes = self.row(row);
            match &self.arrange.cols {
                None => out.extend_from_slice(&bytes),
                Some(cols) => cols.iter().for_each(|&col| out.extend_from_slice(&bytes[col as usize * size..][..size])),
            }
        }
        Ok(Cow::Owned(out))
    }

    /// One plus each element, in f32. An element that is not finite is an error.
    pub fn plus_one(&self, name: &str) -> Result<Vec<u8>, ConvertError> {
        self.finite(name)?;
        let places = (0..self.n).flat_map(|row| (0..self.k).map(move |col| (row, col)));
        Ok(places.flat_map(|(row, col)| (1.0 + self.at(row, col)).to_le_bytes()).collect())
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
                let floats = Floats::new("t", &raw, &[4, 2], Take::WHOLE).unwrap();
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

    #[test]
    fn parts_and_transposed_tensors_are_read_where_they_lie() {
        let bytes: Vec<u8> = (0..24).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let raw = |shape: &[u64]| RawTensor {
            dtype: Dtype::Float(FloatType::F32),
            shape: shape.to_vec(),
            bytes: &bytes,
            rows: Rows::InOrder,
        };
        let check = |stored: &[u64], shape: &[usize], take, expected: &[f32]| {
            let floats = Floats::new("t", &raw(stored), shape, take).unwrap();
            let mut out = vec![];
            for row in 0..floats.n {
                floats.decode(row, 0..floats.k, &mut out);
                let at: Vec<f32> = (0..floats.k).map(|col| floats.at(row, col)).collect();
                assert_eq!((&out, &at[..]), (&at, &expected[row * floats.k..][..floats.k]));
            }
            let kept: Vec<u8> = expected.iter().flat_map(|x| x.to_le_bytes()).collect();
            assert_eq!(*floats.kept("t").unwrap(), kept);
        };
        let part = |transposed| Take { transposed, part: Some((2, 6)) };
        check(&[6, 4], &[2, 4], part(false), &[8., 9., 10., 11., 12., 13., 14., 15.]);
        check(&[4, 6], &[2, 4], part(true), &[2., 8., 14., 20., 3., 9., 15., 21.]);
        check(&[24], &[3], Take { transposed: false, part: Some((20, 24)) }, &[20., 21., 22.]);
        let wrong = Floats::new("t", &raw(&[6, 4]), &[2, 4], part(true)).unwrap_err().to_string();
        assert!(wrong.contains("expected [4, 6], got [6, 4]"), "{wrong}");
    }
}
