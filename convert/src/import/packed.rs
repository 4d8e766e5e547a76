//! Parts that packed formats have in common: words of 32 bits, scales by groups, the size of a group.

use half::f16;
use quern_models::FloatType;

use crate::{
    ConvertError,
    source::{Dtype, RawTensor},
};

/// A float per (row, group): scales, or minima, as GPTQ and AWQ store them.
#[derive(Debug, Clone, Copy)]
pub struct Scales<'a> {
    kind: FloatType,
    bytes: &'a [u8],
    groups: usize,
    n: usize,
    /// Elements from a row to the next, and from a group to the next.
    strides: [usize; 2],
}

impl<'a> Scales<'a> {
    /// `[groups, n]`. Checks type, shape and that all are finite.
    pub fn new(name: &str, raw: &RawTensor<'a>, n: usize) -> Result<Self, ConvertError> {
        Scales::padded(name, raw, n, raw.shape.first().map(|&groups| groups as usize))
    }

    /// `[width, n]`, of which the first `groups` count; if not given, those before an end of zeros.
    pub fn padded(name: &str, raw: &RawTensor<'a>, n: usize, groups: Option<usize>) -> Result<Self, ConvertError> {
        Scales::of(name, raw, n, groups, 1)
    }

    /// `[n, width]`, likewise.
    pub fn by_row(name: &str, raw: &RawTensor<'a>, n: usize, groups: Option<usize>) -> Result<Self, ConvertError> {
        Scales::of(name, raw, n, groups, 0)
    }

    /// `axis` is that of the rows.
    fn of(name: &str, raw: &RawTensor<'a>, n: usize, groups: Option<usize>, axis: usize) -> Result<Self, ConvertError> {
        let Dtype::Float(kind) = raw.dtype else {
            return Err(ConvertError::tensor(name, "type", "f16, bf16 or f32", raw.dtype.name()));
        };
        let width = match raw.shape[..] {
            [rows, cols] if [rows, cols][axis] == n as u64 => [rows, cols][1 - axis] as usize,
            _ => 0,
        };
        let least = groups.unwrap_or(1);
        if width == 0 || width < least {
            let least = if least > 1 { format!("{least} groups") } else { "groups".into() };
            let expected = if axis == 1 { format!("[{least}, {n}]") } else { format!("[{n}, {least}]") };
            return Err(ConvertError::tensor(name, "shape", expected, format!("{:?}", raw.shape)));
        }
        let strides = if axis == 1 { [1, n] } else { [width, 1] };
        let mut scales = Scales { kind, bytes: raw.bytes, groups: groups.unwrap_or(width), n, strides };
        if groups.is_none() {
            let filled = |&g: &usize| (0..n).any(|row| scales.at(row, g) != 0.0);
            scales.groups = (0..width).rev().find(filled).map_or(1, |g| g + 1);
        }
        if let Some(i) = scales.values().position(|s| !s.is_finite()) {
            let (row, g) = if axis == 1 { (i % n, i / n) } else { (i / scales.groups, i % scales.groups) };
            let got = format!("{} for row {row}, group {g}", scales.at(row, g));
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
        self.kind.read(self.bytes, row * self.strides[0] + group * self.strides[1])
    }

    /// The type to store: f16 where it holds all of them exactly, else the source's own.
    pub fn stored(&self) -> FloatType {
        match self.kind {
            FloatType::F16 => FloatType::F16,
            other if self.values().any(|s| f16::from_f32(s).to_f32().to_bits() != s.to_bits()) => other,
            _ => FloatType::F16,
        }
    }

    /// All of them, in the order of the bytes.
    fn values(&self) -> impl Iterator<Item = f32> + '_ {
        let [row, group] = self.strides;
        let (lines, line, len) = if row == 1 { (self.groups, group, self.n) } else { (self.n, row, self.groups) };
        (0..lines).flat_map(move |l| (0..len).map(move |i| self.kind.read(self.bytes, l * line + i)))
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
/// that says it, is taken if it gives `groups`; without a claim the exact quotient or the power of two
/// that does. Where both do and differ, it is an error.
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
        None => match sizes(k, groups) {
            (Some(even), Some(power)) if even != power && even.is_multiple_of(16) => {
                return Err(ambiguous(name, "columns", k, groups, [even, power]));
            }
            (even, power) => power.or(even.filter(|g| g.is_multiple_of(16))).ok_or_else(|| {
                ConvertError::tensor(
                    name,
                    "groups",
                    "a number that a power of two of columns gives",
                    format!("{groups} for {k} columns"),
                )
            })?,
        },
    };
    Ok(group)
}

/// Sizes that cut `len` into `count` parts: the exact quotient, and a power of two with a last part that may be smaller.
pub(crate) fn sizes(len: usize, count: usize) -> (Option<usize>, Option<usize>) {
    let even = (count > 0 && count <= len && len.is_multiple_of(count)).then(|| len / count);
    (even, (4..16).map(|p| 1 << p).find(|&size| len.div_ceil(size) == count))
}

/// The error of a number of parts that two sizes give.
pub(crate) fn ambiguous(name: &str, what: &str, len: usize, count: usize, [a, b]: [usize; 2]) -> ConvertError {
    let expected = "a number that one size gives; say group_size or weight_block_size in the config";
    ConvertError::tensor(name, "groups", expected, format!("{count} for {len} {what}, which sizes of {a} and {b} give"))
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
        assert_eq!(group(128, 8, None), Ok(16));
        assert_eq!(group(80, 2, Some((40, "c"))), Ok(40));
        assert!(group(100, 99, None).is_err());
        let error = group(576, 3, None).unwrap_err();
        assert!(error.contains("3 for 576 columns, which sizes of 192 and 256 give"), "{error}");
        assert_eq!(group(576, 3, Some((192, "c"))), Ok(192));
    }

    #[test]
    fn nibbles_are_lowest_first() {
        assert_eq!(nibbles(0xfedc_ba98), [8, 9, 10, 11, 12, 13, 14, 15]);
    }
}
