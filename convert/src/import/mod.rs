//! From the tensors of a checkpoint to integers with scales, whatever tool packed them.
//!
//! Every quantized tensor reduces to `w = s * (q - z)` or `w = s * q + m` with unsigned codes, or to
//! `w = s * value(q)` with small floats ([`Integers`]). An importer offers it twice: as definitions, one element at a time and as
//! plain as the format's description, and as a fast fill of 64 rows. The file is written from the
//! second and verified against the first.

pub mod awq;
pub mod blocks;
pub mod compressed;
pub mod config;
pub mod float;
pub mod gptq;
pub mod order;
mod packed;
pub mod part;
pub mod refused;
pub mod rtn;
pub mod tokens;

use half::f16;
use quern_models::{FloatType, Mini, PANEL, Scheme, ZeroKind};

use self::order::Columns;
pub use self::packed::{Scales, Words};
pub(crate) use self::packed::{ambiguous, group_of, nibbles, sizes};
use crate::ConvertError;

/// What the numbers of a quantized tensor are, and its shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IntShape {
    /// Rows.
    pub n: usize,
    /// Columns.
    pub k: usize,
    /// 4 or 8.
    pub bits: u8,
    /// Columns that share a scale; a multiple of 16.
    pub group: usize,
    /// Zero-point kind.
    pub zero: ZeroKind,
    /// Type in which scales (and minima) are stored; holds every one of them exactly.
    pub scale: FloatType,
    /// What codes and scales are.
    pub coding: Coding,
}

/// What the codes and scales of a tensor are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coding {
    /// Integers with a scale per group.
    Plain,
    /// Integers whose scales have two levels; `scale` does not count.
    Nested,
    /// Small floats with a scale per group; `zero` does not count.
    Mini(Mini),
}

/// A scale (or minimum) of two levels: `upper * lower`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Level2 {
    /// Of the super-block.
    pub upper: f16,
    /// Of the group.
    pub lower: i8,
}

impl IntShape {
    /// Groups of a row, the last one possibly partial.
    pub fn groups(&self) -> usize {
        self.k.div_ceil(self.group)
    }

    /// The middle code.
    pub fn mid(&self) -> u8 {
        1 << (self.bits - 1)
    }

    /// The scheme in the file.
    pub fn scheme(&self) -> Scheme {
        let group = self.group as u32;
        match self.coding {
            Coding::Plain => Scheme::Int { bits: self.bits, group, zero: self.zero, scale: self.scale },
            Coding::Nested => Scheme::Nested { bits: self.bits, group, zero: self.zero },
            Coding::Mini(kind) => Scheme::Mini { kind, group, scale: self.scale },
        }
    }
}

/// A quantized tensor, read from wherever it lies.
pub trait Integers: Send + Sync {
    /// Shape and meaning.
    fn shape(&self) -> IntShape;

    /// Code of an element. The definition.
    fn code(&self, row: usize, col: usize) -> u8;

    /// Group of a column, which [`order`](Self::order) puts in place. The definition.
    fn group_of(&self, col: usize) -> usize {
        col / self.shape().group
    }

    /// Scale of a group.
    fn scale(&self, row: usize, group: usize) -> f32;

    /// Zero-point of a group; the middle code unless stored.
    fn zero(&self, _row: usize, _group: usize) -> u8 {
        self.shape().mid()
    }

    /// Minimum of a group; only for [`ZeroKind::Min`].
    fn min(&self, _row: usize, _group: usize) -> f32 {
        0.0
    }

    /// Scale and minimum of a group by their levels; only for [`Coding::Nested`].
    fn nested(&self, _row: usize, _group: usize) -> [Level2; 2] {
        [Level2 { upper: f16::ZERO, lower: 0 }; 2]
    }

    /// The order in which columns have to be stored so that groups are contiguous.
    fn order(&self) -> Columns {
        if self.shape().groups() == 1 { Columns::Any } else { Columns::Natural }
    }

    /// Bits of a code in the source.
    fn source_bits(&self) -> u8 {
        self.shape().bits
    }

    /// Why the file's schemes cannot hold the tensor, so that its [`value`](Self::value)s are stored instead.
    fn misfit(&self) -> Option<String> {
        None
    }

    /// The number that an element is, in f32 arithmetic as [`quern_models::TensorView::at`] does it.
    fn value(&self, row: usize, col: usize) -> f32 {
        let (shape, code, group) = (self.shape(), self.code(row, col), self.group_of(col));
        if let Coding::Mini(kind) = shape.coding {
            return self.scale(row, group) * kind.value(code);
        }
        let (scale, min) = match shape.coding {
            Coding::Nested => self.nested(row, group).map(|l| l.upper.to_f32() * l.lower as f32).into(),
            _ => (self.scale(row, group), self.min(row, group)),
        };
        match shape.zero {
            ZeroKind::Min => scale * code as f32 + min,
            _ => scale * (code as f32 - self.zero(row, group) as f32),
        }
    }

    /// Looks for codes that stand for no number. Reads all of them.
    fn check(&self, _name: &str) -> Result<(), ConvertError> {
        Ok(())
    }

    /// Codes of the rows of a panel into `out`, `[rows][stride]`, the first `k` of every row. What is not written
    /// keeps the middle code that `out` comes with.
    fn fill(&self, panel: usize, stride: usize, out: &mut [u8]) {
        let shape = self.shape();
        for (r, row) in out.chunks_exact_mut(stride).enumerate().take(rows_of(shape.n, panel)) {
            for (col, code) in row[..shape.k].iter_mut().enumerate() {
                *code = self.code(panel * PANEL + r, col);
            }
        }
    }
}

/// Rows of a panel that exist.
pub(crate) fn rows_of(n: usize, panel: usize) -> usize {
    (n - panel * PANEL).min(PANEL)
}
