//! From the tensors of a checkpoint to integers with scales, whatever tool packed them.
//!
//! Every quantized tensor reduces to one form, `w = s * (q - z)` or `w = s * q + m` with unsigned
//! codes ([`Integers`]). An importer offers it twice: as definitions, one element at a time and as
//! plain as the format's description, and as a fast fill of 64 rows. The file is written from the
//! second and verified against the first.

pub mod awq;
pub mod blocks;
pub mod config;
pub mod float;
pub mod gptq;
pub mod part;
pub mod rtn;

use half::f16;
use quern_models::{FloatType, Mini, PANEL, Scheme, ZeroKind};

use crate::{ConvertError, source::Dtype, source::RawTensor};

/// What the numbers of a quantized tensor are, and its shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IntShape {
    /// Rows.
    pub n: usize,
    /// Columns.
    pub k: usize,
    /// 4 or 8.
    pub bits: u8,
    /// Columns that share a scale; a multiple of 32.
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

/// Scales `[groups][n]` as GPTQ and AWQ store them.
#[derive(Debug, Clone, Copy)]
pub struct Scales<'a> {
    kind: FloatType,
    bytes: &'a [u8],
    groups: usize,
    n: usize,
}

impl<'a> Scales<'a> {
    /// Checks type, shape and that all are finite.
    pub fn new(name: &str, raw: &RawTensor<'a>, n: usize) -> Result<Self, ConvertError> {
        let Dtype::Float(kind) = raw.dtype else {
            return Err(ConvertError::tensor(name, "type", "f16, bf16 or f32", raw.dtype.name()));
        };
        let [groups, cols] = raw.shape[..] else {
            return Err(ConvertError::tensor(name, "shape", format!("[groups, {n}]"), format!("{:?}", raw.shape)));
        };
        if cols != n as u64 || groups == 0 {
            return Err(ConvertError::tensor(name, "shape", format!("[groups, {n}]"), format!("{:?}", raw.shape)));
        }
        let scales = Scales { kind, bytes: raw.bytes, groups: groups as usize, n };
        if let Some(i) = scales.iter().position(|s| !s.is_finite()) {
            let got = format!("{} for row {}, group {}", kind.read(raw.bytes, i), i % n, i / n);
            return Err(ConvertError::tensor(name, "scales", "finite numbers", got));
        }
        Ok(scales)
    }

    /// Groups of a row.
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// Scale of a group.
    #[inline]
    pub fn at(&self, row: usize, group: usize) -> f32 {
        self.kind.read(self.bytes, group * self.n + row)
    }

    /// The type to store: f16 where it holds all of them exactly, else the source's own.
    pub fn stored(&self) -> FloatType {
        match self.kind {
            FloatType::F16 => FloatType::F16,
            other if self.iter().any(|s| f16::from_f32(s).to_f32().to_bits() != s.to_bits()) => other,
            _ => FloatType::F16,
        }
    }

    fn iter(&self) -> impl Iterator<Item = f32> + '_ {
        (0..self.groups * self.n).map(|i| self.kind.read(self.bytes, i))
    }
}

/// A tensor of 32-bit words `[rows, cols]`, as packed codes come.
#[derive(Debug, Clone, Copy)]
pub struct Words<'a> {
    bytes: &'a [u8],
    /// Words of a row.
    pub cols: usize,
}

impl<'a> Words<'a> {
    /// Checks the type and that there are two dimensions, which are returned.
    pub fn new(name: &str, raw: &RawTensor<'a>) -> Result<(Self, [usize; 2]), ConvertError> {
        if raw.dtype != Dtype::I32 {
            let got = format!("{} (pack_dtype); quantize again with pack_dtype int32", raw.dtype.name());
            return Err(ConvertError::tensor(name, "type of packed codes", "i32", got));
        }
        let [rows, cols] = raw.shape[..] else {
            return Err(ConvertError::tensor(name, "shape", "two dimensions", format!("{:?}", raw.shape)));
        };
        Ok((Words { bytes: raw.bytes, cols: cols as usize }, [rows as usize, cols as usize]))
    }

    /// One word.
    #[inline]
    pub fn at(&self, row: usize, col: usize) -> u32 {
        let b = &self.bytes[(row * self.cols + col) * 4..][..4];
        u32::from_le_bytes([b[0], b[1], b[2], b[3]])
    }

    /// All words, row by row.
    pub fn iter(&self) -> impl Iterator<Item = u32> + use<'a> {
        self.bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
    }
}

/// The eight nibbles of a word as bytes, lowest first.
#[inline]
pub(crate) fn nibbles(word: u32) -> [u8; 8] {
    let x = word as u64;
    let x = (x | x << 16) & 0x0000_ffff_0000_ffff;
    let x = (x | x << 8) & 0x00ff_00ff_00ff_00ff;
    ((x | x << 4) & 0x0f0f_0f0f_0f0f_0f0f).to_le_bytes()
}

/// Columns of a group, from the number of groups and, where that leaves a choice, what is claimed.
///
/// One group is the whole row, rounded up to 32 columns. Otherwise `claimed`, with the file or tensor
/// that says it, is taken if it gives `groups`; without a claim the only power of two that does, or the
/// exact quotient.
pub(crate) fn group_of(
    name: &str,
    k: usize,
    groups: usize,
    claimed: Option<(usize, &str)>,
) -> Result<usize, ConvertError> {
    let gives = |g: usize| g > 0 && k.div_ceil(g) == groups;
    let group = match claimed {
        _ if groups == 1 => k.next_multiple_of(32),
        Some((g, _)) if gives(g) => g,
        Some((g, origin)) => {
            let got = format!("{groups} for {k} columns");
            let expected = format!("{} groups of the {g} columns that {origin} says", k.div_ceil(g.max(1)));
            return Err(ConvertError::tensor(name, "groups", expected, got));
        }
        None if k.is_multiple_of(groups) && (k / groups).is_multiple_of(16) => k / groups,
        None => (4..16).map(|p| 1 << p).find(|&g| gives(g)).ok_or_else(|| {
            ConvertError::tensor(
                name,
                "groups",
                "a number that a power of two of columns gives",
                format!("{groups} for {k} columns"),
            )
        })?,
    };
    if group % 32 != 0 {
        return Err(ConvertError::unsupported(
            format!("tensor {name}: a group of {group} columns"),
            "this version imports groups that are a multiple of 32; quantize again with group_size 32, 64 or 128",
        ));
    }
    Ok(group)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_come_from_shapes() {
        let group = |k, groups, claimed| group_of("t", k, groups, claimed).map_err(|e| e.to_string());
        assert_eq!(group(576, 5, None), Ok(128)); // partial: 4.5 groups
        assert_eq!(group(576, 9, None), Ok(64));
        assert_eq!(group(576, 6, None), Ok(96));
        assert_eq!(group(576, 5, Some((128, "c"))), Ok(128));
        assert_eq!(group(576, 1, Some((64, "c"))), Ok(576));
        assert_eq!(group(100, 1, None), Ok(128));
        let error = group(576, 9, Some((128, "t.g_idx"))).unwrap_err();
        assert!(error.contains("expected 5 groups of the 128 columns that t.g_idx says, got 9"), "{error}");
        assert!(group(128, 8, None).unwrap_err().contains("a group of 16 columns"));
        assert!(group(100, 99, None).is_err());
    }

    #[test]
    fn nibbles_are_lowest_first() {
        assert_eq!(nibbles(0xfedc_ba98), [8, 9, 10, 11, 12, 13, 14, 15]);
    }
}
