//! Scales of a tensor, in whatever shape and type they come: one for all, one a row, a group or a block.

use half::f16;
use quern_models::{FloatType, Mini};
use rayon::prelude::*;

use super::{
    super::{ambiguous, group_of, sizes},
    Claims,
};
use crate::{
    ConvertError,
    source::{Dtype, RawTensor},
};

/// Scales `[stored rows, groups]`; several rows of the tensor may share a stored one.
#[derive(Debug, Clone, Copy)]
pub struct Grid<'a> {
    kind: Kind,
    bytes: &'a [u8],
    /// Scales in all.
    count: usize,
    /// Scales of a stored row: groups of a row.
    cols: usize,
    /// Rows of the tensor that share a stored one.
    rows: usize,
    /// Columns that share a scale.
    group: usize,
}

/// How a scale is stored.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// A float.
    Float(FloatType),
    /// A byte `e` for `2^(e-127)`; 255 is NaN (OCP Microscaling Formats v1.0, E8M0).
    Power,
    /// An E4M3 float, divided by the tensor's own scale (compressed-tensors).
    Divided(f32),
    /// An E4M3 float times the tensor's own scale (ModelOpt).
    Multiplied(f32),
}

impl Kind {
    /// How scales of a type that needs no other number are stored.
    pub fn of(name: &str, raw: &RawTensor) -> Result<Kind, ConvertError> {
        match raw.dtype {
            Dtype::Float(kind) => Ok(Kind::Float(kind)),
            Dtype::U8 | Dtype::E8M0 => Ok(Kind::Power),
            other => Err(ConvertError::tensor(name, "type", "f16, bf16, f32 or u8 exponents", other.name())),
        }
    }
}

impl<'a> Grid<'a> {
    /// Scales of an `[n, k]` tensor, their meaning told by their shape: one element, `[n]`, `[n, groups]`, or one a block.
    /// Those that are not finite are an error.
    pub fn new(
        name: &str,
        raw: &RawTensor<'a>,
        kind: Kind,
        n: usize,
        k: usize,
        claims: &Claims,
    ) -> Result<Self, ConvertError> {
        let (stored, cols) = match raw.shape[..] {
            [] => (1, 1),
            [r] => (r as usize, 1),
            [r, c] => (r as usize, c as usize),
            _ => (0, 0),
        };
        let wrong = |expected: String| ConvertError::tensor(name, "shape", expected, format!("{:?}", raw.shape));
        if stored == 0 || cols == 0 {
            return Err(wrong(format!("one scale, [{n}], [{n}, groups] or blocks of a [{n}, {k}] linear")));
        }
        let claimed = claims.group.map(|g| (g, claims.file.as_str()));
        let (rows, group) = match claims.block.map(|b| (b, [n.div_ceil(b[0]), k.div_ceil(b[1])])) {
            Some(([down, along], by)) if [stored, cols] == by => {
                (down, group_of(name, k, cols, Some((along, claims.file.as_str())))?)
            }
            // One for all, or one a row: of a module that is not in blocks.
            _ if stored * cols == 1 || stored == n => (n / stored, group_of(name, k, cols, claimed)?),
            Some(([down, along], by)) => {
                let blocks =
                    format!("blocks of {down} by {along} that {} says, if only by leaving the size out", claims.file);
                return Err(wrong(format!("{by:?} for a [{n}, {k}] linear in {blocks}")));
            }
            None if ["tensor", "channel"].iter().any(|s| claims.strategy.as_deref() == Some(s)) => {
                let said = claims.strategy.as_deref().unwrap_or_default();
                return Err(wrong(format!("one scale or [{n}], as {} says {said}", claims.file)));
            }
            None => {
                let rows = match stored {
                    1 => n,
                    _ => block(name, n, stored)?,
                };
                let usual = claimed.or((k.div_ceil(USUAL) == cols).then_some((USUAL, "the usual block")));
                (rows, group_of(name, k, cols, usual)?)
            }
        };
        let count = stored * cols;
        let grid = Grid { kind, bytes: raw.bytes, count, cols, rows, group };
        let bad = |&i: &usize| !grid.value(i).is_finite();
        if let Some(i) = (0..count).into_par_iter().find_first(bad) {
            let got = format!("{} for row {}, group {}", grid.value(i), i / cols * rows, i % cols);
            return Err(ConvertError::tensor(name, "scales", "finite numbers", got));
        }
        Ok(grid)
    }

    /// Columns that share a scale.
    pub fn group(&self) -> usize {
        self.group
    }

    /// Groups of a row.
    pub fn groups(&self) -> usize {
        self.cols
    }

    /// Scale of a group of a row of the tensor.
    #[inline]
    pub fn at(&self, row: usize, group: usize) -> f32 {
        self.value(row / self.rows * self.cols + group)
    }

    /// The type to store: f16 where it holds all of them exactly, else the source's own; bf16 for powers of two.
    pub fn stored(&self) -> FloatType {
        let own = match self.kind {
            Kind::Float(kind) => kind,
            // Every one is exact, 2^-127 as a subnormal.
            Kind::Power => return FloatType::BF16,
            Kind::Divided(_) | Kind::Multiplied(_) => FloatType::F32,
        };
        let rounds = |i: usize| {
            let x = self.value(i);
            f16::from_f32(x).to_f32().to_bits() != x.to_bits()
        };
        if own != FloatType::F16 && (0..self.count).into_par_iter().any(rounds) { own } else { FloatType::F16 }
    }

    fn value(&self, i: usize) -> f32 {
        match self.kind {
            Kind::Float(kind) => kind.read(self.bytes, i),
            Kind::Power => power(self.bytes[i]),
            Kind::Divided(by) => Mini::E4M3.value(self.bytes[i]) / by,
            Kind::Multiplied(by) => Mini::E4M3.value(self.bytes[i]) * by,
        }
    }
}

/// `2^(e-127)`; NaN for 255.
fn power(e: u8) -> f32 {
    match e {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        e => f32::from_bits((e as u32) << 23),
    }
}

/// Rows and columns of nearly every block that is published.
const USUAL: usize = 128;

/// The size of blocks that nothing claims, of which `stored` cover `n` rows: 128 if that fits, else the only one of the
/// quotient and a power of two that does.
fn block(name: &str, n: usize, stored: usize) -> Result<usize, ConvertError> {
    match sizes(n, stored) {
        _ if n.div_ceil(USUAL) == stored => Ok(USUAL),
        (Some(even), Some(power)) if even != power => Err(ambiguous(name, "rows", n, stored, [even, power])),
        (even, power) => power.or(even).ok_or_else(|| {
            let expected =
                format!("{n} rows, or a number that a block size gives; say weight_block_size in the config");
            ConvertError::tensor(name, "shape", expected, format!("{stored} for {n} rows"))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Rows;

    fn grid<'a>(shape: &[u64], bytes: &'a [u8], n: usize, k: usize, claims: &Claims) -> Result<Grid<'a>, String> {
        let raw = RawTensor { dtype: Dtype::Float(FloatType::F32), shape: shape.into(), bytes, rows: Rows::InOrder };
        Grid::new("t", &raw, Kind::Float(FloatType::F32), n, k, claims).map_err(|e| e.to_string())
    }

    #[test]
    fn shapes_say_what_shares_a_scale() {
        let bytes: Vec<u8> = (1..13u32).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let claims = Claims::default();
        let at = |shape: &[u64], n, k, claims: &Claims, row, group| {
            let count = shape.iter().product::<u64>() as usize;
            let grid = grid(shape, &bytes[..count * 4], n, k, claims).unwrap();
            (grid.at(row, group), grid.group())
        };
        assert_eq!(at(&[], 4, 96, &claims, 3, 0), (1.0, 96));
        assert_eq!(at(&[1], 4, 96, &claims, 3, 0), (1.0, 96));
        assert_eq!(at(&[4], 4, 96, &claims, 3, 0), (4.0, 96));
        assert_eq!(at(&[4, 1], 4, 96, &claims, 3, 0), (4.0, 96));
        assert_eq!(at(&[4, 3], 4, 96, &claims, 2, 1), (8.0, 32));
        // Blocks of 64 by 32, the last rows and columns partial.
        assert_eq!(at(&[3, 2], 130, 60, &claims, 129, 1), (6.0, 32));
        let blocks = Claims { block: Some([48, 32]), ..Claims::default() };
        assert_eq!(at(&[3, 2], 130, 60, &blocks, 47, 1), (2.0, 32));
        assert_eq!(at(&[3, 2], 130, 60, &blocks, 48, 1), (4.0, 32));
        // A row each, in a model of which other modules are in blocks.
        assert_eq!(at(&[10, 1], 10, 60, &blocks, 9, 0), (10.0, 64));
        let text = grid(&[2, 2], &bytes[..16], 130, 60, &blocks).unwrap_err();
        assert!(text.contains("expected [3, 2] for a [130, 60] linear in blocks of 48 by 32"), "{text}");
        assert!(grid(&[5, 1], &bytes[..20], 4, 96, &claims).is_err());
        assert!(grid(&[1, 1, 1], &bytes[..4], 4, 96, &claims).is_err());
        assert!(grid(&[0], &[], 4, 96, &claims).is_err());
    }

    #[test]
    fn blocks_that_two_sizes_give_are_the_usual_or_an_error() {
        let bytes: Vec<u8> = (1..13u32).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let none = Claims::default();
        let of = |shape: &[u64], n, k, claims: &Claims| grid(shape, &bytes[..16], n, k, claims);
        let rows = |grid: Grid| (0..192).map(|row| grid.at(row, 0)).take_while(|&s| s == 1.0).count();
        // 192 rows in 2 blocks are 128 and 64, or twice 96.
        let usual = of(&[2, 2], 192, 192, &none).unwrap();
        assert_eq!((rows(usual), usual.group()), (128, 128));
        let claims = Claims { block: Some([96, 96]), ..Claims::default() };
        let said = of(&[2, 2], 192, 192, &claims).unwrap();
        assert_eq!((rows(said), said.group()), (96, 96));
        // 96 in 2: 48 or 64.
        let text = of(&[2, 2], 96, 192, &none).unwrap_err();
        assert!(text.contains("2 for 96 rows, which sizes of 48 and 64 give"), "{text}");
        assert!(text.contains("weight_block_size"), "{text}");
        let text = of(&[2, 2], 192, 96, &none).unwrap_err();
        assert!(text.contains("2 for 96 columns, which sizes of 48 and 64 give"), "{text}");
    }

    #[test]
    fn powers_of_two_are_exact_in_bf16() {
        for e in 0..255u8 {
            assert_eq!(power(e) as f64, 2f64.powi(e as i32 - 127), "{e}");
            assert_eq!(half::bf16::from_f32(power(e)).to_f32(), power(e), "{e}");
        }
        assert!(power(255).is_nan());
    }
}
