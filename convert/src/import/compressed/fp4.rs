//! 4-bit floats, two in a byte with the lower column in the low nibble: MXFP4 and NVFP4.
//!
//! | | codes u8 `[N, K/2]` | scales | of the tensor |
//! |---|---|---|---|
//! | MXFP4 (compressed-tensors) | `weight_packed` | `weight_scale`, exponents `[N, K/32]` | |
//! | NVFP4 (compressed-tensors) | `weight_packed` | `weight_scale`, E4M3 `[N, K/16]` | divided by `weight_global_scale` |
//! | NVFP4 (ModelOpt) | `weight` | `weight_scale`, E4M3 `[N, K/16]` | times `weight_scale_2` |

use quern_models::{Mini, PANEL, ZeroKind};

use super::{Claims, Grid, Parts, grid::Kind};
use crate::{
    ConvertError,
    import::{Coding, IntShape, Integers, rows_of},
    source::Dtype,
};

/// A tensor of 4-bit floats.
#[derive(Debug)]
pub struct Fp4<'a> {
    shape: IntShape,
    bytes: &'a [u8],
    scales: Grid<'a>,
}

impl<'a> Fp4<'a> {
    /// Takes the tensors of an `[n, k]` linear; `part` holds the codes.
    pub fn new(parts: &Parts<'a, '_>, part: &str, n: usize, k: usize, claims: &Claims) -> Result<Self, ConvertError> {
        let (name, raw) = parts.need(part)?;
        if !k.is_multiple_of(2) || raw.shape != [n as u64, k as u64 / 2] {
            let expected = format!("[{n}, {k}/2] for a [{n}, {k}] linear");
            return Err(ConvertError::tensor(&name, "shape", expected, format!("{:?}", raw.shape)));
        }
        let bytes = raw.bytes;
        parts.check_shape(n, k)?;
        parts.no_zeros()?;
        let (name, raw) = parts.need("weight_scale")?;
        let (kind, group) = match raw.dtype {
            Dtype::U8 | Dtype::E8M0 => (Kind::Power, 32),
            Dtype::E4M3 if part == "weight" => (Kind::Multiplied(parts.scalar("weight_scale_2")?), 16),
            Dtype::E4M3 => (Kind::Divided(parts.scalar("weight_global_scale")?), 16),
            other => {
                let expected = "u8 exponents (MXFP4) or F8_E4M3 (NVFP4)";
                return Err(ConvertError::tensor(&name, "type", expected, other.name()));
            }
        };
        if raw.shape != [n as u64, k.div_ceil(group) as u64] {
            let expected = format!("[{n}, {}], groups of {group} columns", k.div_ceil(group));
            return Err(ConvertError::tensor(&name, "shape", expected, format!("{:?}", raw.shape)));
        }
        if let Some(said) = claims.group.filter(|&said| said != group) {
            let expected = format!("{said} columns, as {} says", claims.file);
            return Err(ConvertError::tensor(&name, "group", expected, format!("{group} by its type")));
        }
        let scales = Grid::new(&name, raw, kind, n, k, &Claims { group: Some(group), ..Claims::default() })?;
        let (scale, coding) = (scales.stored(), Coding::Mini(Mini::E2M1));
        let shape = IntShape { n, k, bits: 4, group: scales.group(), zero: ZeroKind::Mid, scale, coding };
        Ok(Fp4 { shape, bytes, scales })
    }
}

impl Integers for Fp4<'_> {
    fn shape(&self) -> IntShape {
        self.shape
    }

    fn code(&self, row: usize, col: usize) -> u8 {
        let byte = self.bytes[(row * self.shape.k + col) / 2];
        byte >> (col % 2 * 4) & 15
    }

    fn scale(&self, row: usize, group: usize) -> f32 {
        self.scales.at(row, group)
    }

    fn fill(&self, panel: usize, stride: usize, out: &mut [u8]) {
        let half = self.shape.k / 2;
        for (r, out) in out.chunks_exact_mut(stride).enumerate().take(rows_of(self.shape.n, panel)) {
            let row = &self.bytes[(panel * PANEL + r) * half..][..half];
            for (out, byte) in out.chunks_exact_mut(2).zip(row) {
                out.copy_from_slice(&[byte & 15, byte >> 4]);
            }
        }
    }
}
