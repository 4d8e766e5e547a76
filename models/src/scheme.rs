//! What a stored tensor means (its scheme) and how its bytes lie (its layout).
//!
//! Every integer scheme has one meaning, whatever tool made it:
//! `w[n, k] = s[n, k / group] * (q[n, k] - z[n, k / group])`, or with a float minimum (GGUF Q4_1)
//! `w[n, k] = s[n, k / group] * q[n, k] + m[n, k / group]`. `q` and `z` are unsigned codes.
//! Codes may also be small floats (`w = s * value(q)`), and scales may have two levels.
//! The scheme says nothing about byte order; the layout says nothing about values.

use crate::{dtype::FloatType, p64::Shape};

/// Rows of a panel, the unit in which every kernel works.
pub const PANEL: usize = 64;

/// Alignment of every plane inside a tensor, bytes.
pub const PLANE_ALIGN: usize = 64;

/// Columns that share the upper level of a nested scale: a super-block of GGUF's k-quants.
pub const SUPER: usize = 256;

/// Where zero lies on the integer grid of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ZeroKind {
    /// The middle code: `z = 2^(bits-1)`; nothing is stored.
    Mid,
    /// An unsigned code of `bits` bits per (row, group).
    Code,
    /// A float minimum per (row, group), of the scale's type: `w = s * q + m`.
    Min,
}

impl ZeroKind {
    /// Name as printed.
    pub const fn name(self) -> &'static str {
        match self {
            ZeroKind::Mid => "sym",
            ZeroKind::Code => "zero",
            ZeroKind::Min => "min",
        }
    }
}

/// Codes that are small floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mini {
    /// 4 bits: sign, 2 of exponent, 1 of mantissa; 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
    /// (Open Compute Project, Microscaling Formats v1.0, 5.3.3).
    E2M1,
    /// 8 bits: sign, 4 of exponent (bias 7), 3 of mantissa; no infinities, 0x7f and 0xff are NaN
    /// (OCP 8-bit Floating Point Specification, E4M3).
    E4M3,
}

impl Mini {
    /// Bits of a code.
    pub const fn bits(self) -> u8 {
        match self {
            Mini::E2M1 => 4,
            Mini::E4M3 => 8,
        }
    }

    /// Name as printed.
    pub const fn name(self) -> &'static str {
        match self {
            Mini::E2M1 => "fp4",
            Mini::E4M3 => "fp8",
        }
    }

    /// The number that a code stands for; exact. Only the low [`bits`](Self::bits) of `code` count.
    pub fn value(self, code: u8) -> f32 {
        let (exponent_bits, mantissa_bits, bias) = match self {
            Mini::E2M1 => (2, 1, 1),
            Mini::E4M3 => (4, 3, 7),
        };
        let mantissa = (code & ((1 << mantissa_bits) - 1)) as f32;
        let exponent = (code >> mantissa_bits & ((1 << exponent_bits) - 1)) as i32;
        let one = (1 << mantissa_bits) as f32;
        let size = match exponent {
            _ if self == Mini::E4M3 && code & 0x7f == 0x7f => f32::NAN,
            0 => mantissa / one * 2f32.powi(1 - bias),
            e => (1.0 + mantissa / one) * 2f32.powi(e - bias),
        };
        if code >> (self.bits() - 1) & 1 == 1 { -size } else { size }
    }
}

/// What the numbers of a tensor are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// Plain floats.
    Float(FloatType),
    /// Unsigned codes with one scale per (row, group of columns).
    Int {
        /// 4 or 8.
        bits: u8,
        /// Columns that share a scale; a multiple of 16.
        group: u32,
        /// Zero-point kind.
        zero: ZeroKind,
        /// Type of the scales (and minima).
        scale: FloatType,
    },
    /// Unsigned codes whose scales have two levels, as GGUF's k-quants: a signed byte per (row, group)
    /// times an f16 per (row, [`SUPER`] columns). `s = d * sub`, and with [`ZeroKind::Min`]
    /// `m = dmin * sub_min`: products that f32 holds exactly.
    Nested {
        /// 4 or 8.
        bits: u8,
        /// Columns that share a byte; 16 or 32.
        group: u32,
        /// [`ZeroKind::Mid`] or [`ZeroKind::Min`].
        zero: ZeroKind,
    },
    /// Codes that are small floats, with one scale per (row, group of columns): `w = s * value(q)`.
    Mini {
        /// Which floats.
        kind: Mini,
        /// Columns that share a scale; a multiple of 16.
        group: u32,
        /// Type of the scales.
        scale: FloatType,
    },
    /// A permutation of `0..k`, u32: which column of a layer's input a column of its weights takes.
    Order,
}

/// How the bytes of a tensor lie. The numbers are the file's layout ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Layout {
    /// Row-major elements; floats and orders.
    Rows = 0,
    /// 64-row panels, k-quad outermost; codes. See [`crate::p64`].
    P64 = 1,
}

/// Byte ranges of a tensor's planes, relative to the tensor's start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Planes {
    /// Codes, or the elements of a float tensor: (offset, length).
    pub codes: (u64, u64),
    /// Scales; empty for floats.
    pub scales: (u64, u64),
    /// Zero codes or minima; empty unless stored.
    pub zeros: (u64, u64),
    /// Upper level of nested scales, then of nested minima; empty unless nested.
    pub supers: (u64, u64),
    /// Bytes in all.
    pub total: u64,
}

impl Scheme {
    /// Layout this version writes for the scheme.
    pub fn layout(self) -> Layout {
        if self.coded().is_some() { Layout::P64 } else { Layout::Rows }
    }

    /// Bits of a code and columns of a group; `None` where there are no codes.
    pub fn coded(self) -> Option<(u8, usize)> {
        match self {
            Scheme::Int { bits, group, .. } | Scheme::Nested { bits, group, .. } => Some((bits, group as usize)),
            Scheme::Mini { kind, group, .. } => Some((kind.bits(), group as usize)),
            Scheme::Float(_) | Scheme::Order => None,
        }
    }

    /// Where the planes of an `[n, k]` tensor lie; `None` when a size overflows.
    pub fn planes(self, n: u64, k: u64) -> Option<Planes> {
        let Some((bits, group)) = self.coded() else {
            let size = if let Scheme::Float(t) = self { t.size() as u64 } else { 4 };
            let len = n.checked_mul(k)?.checked_mul(size)?;
            let none = (len, 0);
            return Some(Planes { codes: (0, len), scales: none, zeros: none, supers: none, total: len });
        };
        let (bits, group) = (bits as u64, group as u64);
        let rows = n.checked_next_multiple_of(PANEL as u64)?;
        let cols = k.checked_next_multiple_of(group)?;
        let cells = rows.checked_mul(cols / group)?;
        let codes = rows.checked_mul(cols)?.checked_mul(bits)? / 8;
        let (scale, zero, supers) = match self {
            Scheme::Int { zero, scale, .. } => (scale.size() as u64, zero, 0),
            Scheme::Mini { scale, .. } => (scale.size() as u64, ZeroKind::Mid, 0),
            _ => {
                let Scheme::Nested { zero, .. } = self else { return None };
                let levels = if zero == ZeroKind::Min { 2 } else { 1 };
                (1, zero, rows.checked_mul(cols.div_ceil(SUPER as u64))?.checked_mul(2 * levels)?)
            }
        };
        let scales = cells.checked_mul(scale)?;
        let zeros = match zero {
            ZeroKind::Mid => 0,
            ZeroKind::Code => cells.checked_mul(bits)? / 8,
            ZeroKind::Min => scales,
        };
        // Every plane that is there starts aligned; one that is not there takes no room.
        let mut end = codes;
        let mut plane = |len: u64| {
            let at = if len == 0 { end } else { end.checked_next_multiple_of(PLANE_ALIGN as u64)? };
            end = at.checked_add(len)?;
            Some((at, len))
        };
        let (scales, zeros, supers) = (plane(scales)?, plane(zeros)?, plane(supers)?);
        Some(Planes { codes: (0, codes), scales, zeros, supers, total: end })
    }
}

impl std::fmt::Display for Scheme {
    /// `f16`, `int4 g64 sym`, `int4 g64 zero`, `int4 g32 min`, `int8 g16 sym nested`, `fp4 g32`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Scheme::Float(t) => f.write_str(t.name()),
            Scheme::Order => f.write_str("order"),
            Scheme::Nested { bits, group, zero } => write!(f, "int{bits} g{group} {} nested", zero.name()),
            Scheme::Int { bits, group, zero, scale } => {
                write!(f, "int{bits} g{group} {}", zero.name())?;
                scales(f, *scale)
            }
            Scheme::Mini { kind, group, scale } => {
                write!(f, "{} g{group}", kind.name())?;
                scales(f, *scale)
            }
        }
    }
}

/// Says the type of scales that are not the usual f16.
fn scales(f: &mut std::fmt::Formatter<'_>, scale: FloatType) -> std::fmt::Result {
    if scale == FloatType::F16 { Ok(()) } else { write!(f, " {} scales", scale.name()) }
}

/// A tensor's meaning, shape and bytes, borrowed from a mapped file.
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    /// Output rows; 1 for a vector.
    pub n: usize,
    /// Columns (the reduced dimension).
    pub k: usize,
    /// What the numbers are.
    pub scheme: Scheme,
    /// How they lie.
    pub layout: Layout,
    /// Codes or elements; starts on a 64-byte boundary (4096 in a file).
    pub codes: &'a [u8],
    /// Scales plane.
    pub scales: &'a [u8],
    /// Zero codes or minima plane.
    pub zeros: &'a [u8],
    /// Upper level of nested scales and minima.
    pub supers: &'a [u8],
}

impl<'a> TensorView<'a> {
    /// Splits `bytes` into planes. `None` if `bytes` is shorter than the scheme needs for `[n, k]`.
    pub fn new(n: usize, k: usize, scheme: Scheme, bytes: &'a [u8]) -> Option<Self> {
        let p = scheme.planes(n as u64, k as u64)?;
        let cut = |(at, len): (u64, u64)| bytes.get(at as usize..(at as usize).checked_add(len as usize)?);
        Some(TensorView {
            n,
            k,
            scheme,
            layout: scheme.layout(),
            codes: cut(p.codes)?,
            scales: cut(p.scales)?,
            zeros: cut(p.zeros)?,
            supers: cut(p.supers)?,
        })
    }

    /// 64-row panels, the last one possibly partial.
    pub fn panels(&self) -> usize {
        self.n.div_ceil(PANEL)
    }

    /// Value at `(row, col)` in f32 arithmetic. Slow; the definition that every kernel is tested against.
    pub fn at(&self, row: usize, col: usize) -> f32 {
        let Some((bits, group)) = self.scheme.coded() else {
            return match self.scheme {
                Scheme::Float(t) => t.read(self.codes, row * self.k + col),
                _ => self.order(col) as f32,
            };
        };
        let shape = Shape::new(self.n, self.k, bits, group);
        let (q, g) = (shape.code(self.codes, row, col), col / group);
        let s = self.scale(row, g);
        let zero = match self.scheme {
            Scheme::Mini { kind, .. } => return s * kind.value(q),
            Scheme::Int { zero, .. } | Scheme::Nested { zero, .. } => zero,
            Scheme::Float(_) | Scheme::Order => unreachable!("returned above"),
        };
        match zero {
            ZeroKind::Mid => s * (q as f32 - (1u32 << (bits - 1)) as f32),
            ZeroKind::Code => s * (q as f32 - shape.zero(self.zeros, row, g) as f32),
            // Two rounded operations, as ggml's dequantize_row_q4_1 and dequantize_row_q4_K do.
            ZeroKind::Min => s * q as f32 + self.min(row, g),
        }
    }

    /// Scale of `(row, group)`; 1 for floats.
    pub fn scale(&self, row: usize, group: usize) -> f32 {
        let Some((bits, columns)) = self.scheme.coded() else { return 1.0 };
        let shape = Shape::new(self.n, self.k, bits, columns);
        let cell = shape.cell(row, group);
        match self.scheme {
            Scheme::Int { scale, .. } | Scheme::Mini { scale, .. } => scale.read(self.scales, cell),
            _ => {
                let d =
                    FloatType::F16.read(self.supers, shape.super_at(row, group * columns / SUPER, self.levels(), 0));
                d * self.scales[cell] as i8 as f32
            }
        }
    }

    /// Minimum of `(row, group)`; 0 where none is stored.
    pub fn min(&self, row: usize, group: usize) -> f32 {
        let Some((bits, columns)) = self.scheme.coded() else { return 0.0 };
        let shape = Shape::new(self.n, self.k, bits, columns);
        let cell = shape.cell(row, group);
        match self.scheme {
            Scheme::Int { zero: ZeroKind::Min, scale, .. } => scale.read(self.zeros, cell),
            Scheme::Nested { zero: ZeroKind::Min, .. } => {
                let dmin = FloatType::F16.read(self.supers, shape.super_at(row, group * columns / SUPER, 2, 1));
                dmin * self.zeros[cell] as i8 as f32
            }
            _ => 0.0,
        }
    }

    /// Upper levels that a nested scheme stores: of scales, or of scales and minima.
    fn levels(&self) -> usize {
        if matches!(self.scheme, Scheme::Nested { zero: ZeroKind::Min, .. }) { 2 } else { 1 }
    }

    /// Element `i` of a [`Scheme::Order`].
    pub fn order(&self, i: usize) -> u32 {
        let b = &self.codes[i * 4..i * 4 + 4];
        u32::from_le_bytes([b[0], b[1], b[2], b[3]])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_floats_have_the_values_of_their_standards() {
        let e2m1: Vec<f32> = (0..8).map(|c| Mini::E2M1.value(c)).collect();
        assert_eq!(e2m1, [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
        assert_eq!(Mini::E2M1.value(15), -6.0);
        let e4m3 = |c| Mini::E4M3.value(c);
        assert_eq!([e4m3(0x7e), e4m3(0xfe), e4m3(0x38), e4m3(0x01)], [448.0, -448.0, 1.0, 0.001953125]);
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
        assert_eq!((e4m3(0x08), e4m3(0x07)), (0.015625, 0.013671875));
    }

    #[test]
    fn planes_are_aligned_and_end_with_the_tensor() {
        let nested = |bits, group, zero| Scheme::Nested { bits, group, zero }.planes(70, 512).unwrap();
        let p = nested(8, 16, ZeroKind::Mid);
        assert_eq!((p.codes.1, p.scales.1, p.zeros.1, p.supers.1), (128 * 512, 128 * 32, 0, 128 * 2 * 2));
        assert_eq!(p.total, p.supers.0 + p.supers.1);
        let p = nested(4, 32, ZeroKind::Min);
        assert_eq!((p.codes.1, p.scales.1, p.zeros.1, p.supers.1), (64 * 512, 128 * 16, 128 * 16, 128 * 2 * 2 * 2));
        let p = Scheme::Mini { kind: Mini::E2M1, group: 32, scale: FloatType::BF16 }.planes(1, 40).unwrap();
        assert_eq!((p.codes.1, p.scales.1, p.total), (64 * 32, 64 * 2 * 2, 64 * 32 + 256));
        assert_eq!(Scheme::Order.planes(1, 5).unwrap().total, 20);
    }
}
