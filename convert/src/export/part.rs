//! A tensor of the output, made row by row: a few megabytes are in memory at a time.

use std::{
    io::{self, Write},
    path::Path,
};

use quern_models::{FloatType, Scheme};
use rayon::prelude::*;

use super::items::Item;
use crate::{ConvertError, source::Dtype};

/// Bytes made before they are written.
const CHUNK: usize = 8 << 20;

/// Makes one row of a tensor: its index, and where its bytes go.
type Fill<'a> = Box<dyn Fn(usize, &mut [u8]) -> Result<(), ConvertError> + Send + Sync + 'a>;

/// A tensor of the output.
pub struct Part<'a> {
    /// Name in the output.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape, slowest dimension first.
    pub dims: Vec<u64>,
    row_bytes: usize,
    fill: Fill<'a>,
}

impl<'a> Part<'a> {
    /// `row_bytes` divide the tensor's bytes; rows are made in any order, by several threads.
    pub fn new(
        name: String,
        dtype: Dtype,
        dims: &[usize],
        row_bytes: usize,
        fill: impl Fn(usize, &mut [u8]) -> Result<(), ConvertError> + Send + Sync + 'a,
    ) -> Part<'a> {
        let dims = dims.iter().map(|&d| d as u64).collect();
        Part { name, dtype, dims, row_bytes, fill: Box::new(fill) }
    }

    /// The numbers of `item` as floats. One that `kind` cannot reach is an error.
    pub fn floats(name: String, item: &'a Item<'a>, kind: FloatType) -> Part<'a> {
        if item.transposed {
            return Part::new(
                name.clone(),
                Dtype::Float(kind),
                &[item.k, item.n],
                item.n * kind.size(),
                move |col, out| numbers(&name, kind, (0..item.n).map(|row| item.at(row, col)), out),
            );
        }
        let row_bytes = item.k * kind.size();
        let raw = item.whole().filter(|p| p.view.scheme == Scheme::Float(kind) && !p.ordered());
        Part::new(name.clone(), Dtype::Float(kind), &item.dims, row_bytes, move |row, out| {
            if let Some(piece) = raw {
                out.copy_from_slice(&piece.view.codes[row * row_bytes..][..row_bytes]);
                return Ok(());
            }
            numbers(&name, kind, (0..item.k).map(|col| item.at(row, col)), out)
        })
    }

    /// Bytes in all.
    pub fn bytes(&self) -> u64 {
        let elements: u64 = self.dims.iter().product();
        match self.dtype {
            Dtype::Block(b) => elements / b.columns() as u64 * b.bytes() as u64,
            other => elements * other.bits().unwrap_or(0) / 8,
        }
    }

    /// Makes one row.
    pub fn row(&self, row: usize, out: &mut [u8]) -> Result<(), ConvertError> {
        (self.fill)(row, out)
    }

    /// Appends the tensor to `out`, the file at `path`.
    pub fn write(&self, out: &mut impl Write, path: &Path) -> Result<(), ConvertError> {
        let rows = (self.bytes() / self.row_bytes as u64) as usize;
        let step = (CHUNK / self.row_bytes).max(1);
        let mut buffer = vec![];
        for first in (0..rows).step_by(step) {
            let count = step.min(rows - first);
            buffer.resize(count * self.row_bytes, 0);
            let made = buffer.par_chunks_mut(self.row_bytes).enumerate();
            made.try_for_each(|(i, row)| (self.fill)(first + i, row))?;
            out.write_all(&buffer).map_err(|source| failed(path, source))?;
        }
        Ok(())
    }
}

/// Writes numbers as `kind`, which must reach them.
fn numbers(name: &str, kind: FloatType, all: impl Iterator<Item = f32>, out: &mut [u8]) -> Result<(), ConvertError> {
    let mut bytes = Vec::with_capacity(out.len());
    for (i, x) in all.enumerate() {
        kind.push(x, &mut bytes);
        if x.is_finite() && !kind.read(&bytes, i).is_finite() {
            let expected = format!("numbers that {} can hold", kind.name());
            return Err(ConvertError::tensor(name, "weights", expected, format!("{x}; choose another --dtype")));
        }
    }
    out.copy_from_slice(&bytes);
    Ok(())
}

/// A file that cannot be written.
pub fn failed(path: &Path, source: io::Error) -> ConvertError {
    ConvertError::Io { path: path.into(), source }
}
