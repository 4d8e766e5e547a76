//! AWQ, `gemm` layout: `qweight` i32 `[K, N/8]`, `qzeros` i32 `[G, N/8]`, `scales` `[G, N]`, 4 bits.
//!
//! A word holds eight rows of W in the order 0 2 4 6 1 3 5 7, lowest nibble first. Zero-points are
//! stored as they are. The format has no activation order: a `g_idx` may only say what the shapes do.

use quern_models::{PANEL, ZeroKind};

use super::{
    Coding, IntShape, Integers, Scales, Words, config::Hint, gptq::group_by_index, group_of, nibbles, rows_of,
};
use crate::{ConvertError, source::Checkpoint};

/// Row (of eight) that nibble `i` holds.
const ROW_OF_NIBBLE: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
/// Nibble that holds row `r` (of eight).
const NIBBLE_OF_ROW: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// An AWQ tensor.
#[derive(Debug)]
pub struct Awq<'a> {
    shape: IntShape,
    qweight: Words<'a>,
    qzeros: Words<'a>,
    scales: Scales<'a>,
}

impl<'a> Awq<'a> {
    /// Takes the tensors of `module`, an `[n, k]` linear.
    pub fn new(source: &Checkpoint<'a>, module: &str, n: usize, k: usize, hint: &Hint) -> Result<Self, ConvertError> {
        let need = |part: &str| {
            let tensor = format!("{module}.{part}");
            match source.tensors.get(&tensor) {
                Some(raw) => Ok((tensor, raw)),
                None => Err(ConvertError::Missing {
                    origin: source.name.clone(),
                    tensor,
                    what: format!("{module} is quantized"),
                }),
            }
        };
        let shaped = |name: &str, got: [usize; 2], rows: usize| {
            if !n.is_multiple_of(8) || got != [rows, n / 8] {
                let expected = format!("[{rows}, {n}/8] for a [{n}, {k}] linear");
                return Err(ConvertError::tensor(name, "shape", expected, format!("{got:?}")));
            }
            Ok(())
        };
        let (name, raw) = need("qweight")?;
        let (qweight, got) = Words::new(&name, raw)?;
        shaped(&name, got, k)?;
        if let Some(said) = hint.bits.filter(|&b| b != 4 && !hint.per_module) {
            return Err(ConvertError::tensor(
                &name,
                "bits",
                format!("{said}, as {} says", hint.file),
                "4 by its shape",
            ));
        }
        let (name, raw) = need("scales")?;
        let scales = Scales::new(&name, raw, n)?;
        let said = hint.group.filter(|_| !hint.per_module);
        let index = format!("{module}.g_idx");
        let indexed = match source.tensors.get(&index) {
            Some(raw) => group_by_index(&index, raw, k, scales.groups())?.map(|g| (g, index.as_str())),
            None => None,
        };
        let group = group_of(&name, k, scales.groups(), indexed.or(said.map(|g| (g, hint.file.as_str()))))?;
        if let Some(said) = said.filter(|&g| k.div_ceil(g) != scales.groups()) {
            let expected = format!("{} groups of the {said} columns that {} says", k.div_ceil(said), hint.file);
            return Err(ConvertError::tensor(&name, "groups", expected, scales.groups()));
        }
        let (name, raw) = need("qzeros")?;
        let (qzeros, got) = Words::new(&name, raw)?;
        shaped(&name, got, scales.groups())?;
        // Symmetric in effect: nothing to store.
        let zero = if qzeros.iter().all(|w| w == 0x8888_8888) { ZeroKind::Mid } else { ZeroKind::Code };
        let shape = IntShape { n, k, bits: 4, group, zero, scale: scales.stored(), coding: Coding::Plain };
        Ok(Awq { shape, qweight, qzeros, scales })
    }
}

impl Integers for Awq<'_> {
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
        (self.qzeros.at(group, row / 8) >> shift) as u8 & 15
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
