//! One byte a weight: int-quantized (i8 codes) and the FP8 formats (E4M3 codes), `weight` `[N, K]`.
//!
//! The scale is `weight_scale`, or `weight_scale_inv` in files of the "fp8" method, which is multiplied by as well,
//! whatever its name says. Its shape tells what shares one.

use quern_models::{Mini, PANEL, ZeroKind};
use rayon::prelude::*;

use super::{
    Claims, Grid, Parts, misfit,
    packed::{Zeros, claimed_zeros},
};
use crate::{
    ConvertError,
    import::{Coding, IntShape, Integers, rows_of},
    source::Dtype,
};

/// A tensor of bytes.
#[derive(Debug)]
pub struct Bytes<'a> {
    shape: IntShape,
    bytes: &'a [u8],
    /// Makes a code of a byte: signed -128..=127 becomes unsigned with the zero at 128.
    flip: u8,
    scales: Grid<'a>,
    zeros: Zeros<'a>,
}

impl<'a> Bytes<'a> {
    /// Takes the tensors of an `[n, k]` linear whose `weight` is of type i8 or E4M3.
    pub fn new(parts: &Parts<'a, '_>, n: usize, k: usize, claims: &Claims) -> Result<Self, ConvertError> {
        let (name, raw) = parts.need("weight")?;
        if raw.shape != [n as u64, k as u64] {
            let got = format!("{:?}; the checkpoint is not what its config says", raw.shape);
            return Err(ConvertError::tensor(&name, "shape", format!("[{n}, {k}]"), got));
        }
        let integers = raw.dtype == Dtype::I8;
        let inverse = parts.get("weight_scale_inv").is_some();
        let scales = parts.scales(if inverse { "weight_scale_inv" } else { "weight_scale" }, n, k, claims)?;
        let zeros = match parts.get("weight_zero_point") {
            Some((name, raw)) if integers => Zeros::bytes(&name, raw, n, scales.groups(), 8)?,
            None if integers => Zeros::absent(parts, claims)?,
            _ => Zeros::Mid,
        };
        if !integers {
            parts.no_zeros()?;
        }
        // All -1 is what a module has that is in no order of its own, and none of this format is.
        if let Some((name, raw)) = parts.get("weight_g_idx")
            && raw.bytes.iter().any(|&b| b != 0xff)
        {
            let got = "an order (act-order); quantize the model again as pack-quantized";
            return Err(ConvertError::tensor(&name, "groups", "columns in order", got));
        }
        let (group, scale) = (scales.group(), scales.stored());
        let (flip, coding) = if integers { (0x80, Coding::Plain) } else { (0, Coding::Mini(Mini::E4M3)) };
        let shape = IntShape { n, k, bits: 8, group, zero: ZeroKind::Mid, scale, coding };
        let mut bytes = Bytes { shape, bytes: raw.bytes, flip, scales, zeros };
        bytes.shape.zero = bytes.zeros.kind(&bytes);
        claimed_zeros(parts, bytes.shape.zero, claims)?;
        Ok(bytes)
    }
}

impl Integers for Bytes<'_> {
    fn shape(&self) -> IntShape {
        self.shape
    }

    fn code(&self, row: usize, col: usize) -> u8 {
        self.bytes[row * self.shape.k + col] ^ self.flip
    }

    fn scale(&self, row: usize, group: usize) -> f32 {
        self.scales.at(row, group)
    }

    fn zero(&self, row: usize, group: usize) -> u8 {
        self.zeros.value(row, group, self.shape.mid())
    }

    fn misfit(&self) -> Option<String> {
        misfit(self.shape.group)
    }

    fn check(&self, name: &str) -> Result<(), ConvertError> {
        if self.shape.coding == Coding::Plain {
            return Ok(());
        }
        let k = self.shape.k;
        let bad = |row: usize| self.bytes[row * k..][..k].iter().position(|b| b & 0x7f == 0x7f).map(|col| (row, col));
        match (0..self.shape.n).into_par_iter().find_map_first(bad) {
            None => Ok(()),
            Some((row, col)) => {
                let got = format!("NaN at [{row}, {col}]; is the download damaged?");
                Err(ConvertError::tensor(name, "weights", "numbers", got))
            }
        }
    }

    fn fill(&self, panel: usize, stride: usize, out: &mut [u8]) {
        let k = self.shape.k;
        for (r, out) in out.chunks_exact_mut(stride).enumerate().take(rows_of(self.shape.n, panel)) {
            let row = &self.bytes[(panel * PANEL + r) * k..][..k];
            out.iter_mut().zip(row).for_each(|(out, b)| *out = b ^ self.flip);
        }
    }
}
