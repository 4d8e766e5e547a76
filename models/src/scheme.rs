//! What a stored tensor means (its scheme) and how its bytes lie (its layout).
//!
//! Every integer scheme has one meaning, whatever tool made it:
//! `w[n, k] = s[n, k / group] * (q[n, k] - z[n, k / group])`, or with a float minimum (GGUF Q4_1)
//! `w[n, k] = s[n, k / group] * q[n, k] + m[n, k / group]`. `q` and `z` are unsigned codes.
//! The scheme says nothing about byte order; the layout says nothing about values.

use crate::dtype::FloatType;

/// Rows of a panel, the unit in which every kernel works.
pub const PANEL: usize = 64;

/// Alignment of every plane inside a tensor, bytes.
pub const PLANE_ALIGN: usize = 64;

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

/// What the numbers of a tensor are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// Plain floats.
    Float(FloatType),
    /// Unsigned codes with one scale per (row, group of columns).
    Int {
        /// 4 or 8.
        bits: u8,
        /// Columns that share a scale; a multiple of 32.
        group: u32,
        /// Zero-point kind.
        zero: ZeroKind,
        /// Type of the scales (and minima).
        scale: FloatType,
    },
}

/// How the bytes of a tensor lie. The numbers are the file's layout ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Layout {
    /// Row-major elements; floats only.
    Rows = 0,
    /// 64-row panels, k-quad outermost; integers only. See [`crate::p64`].
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
    /// Bytes in all.
    pub total: u64,
}

impl Scheme {
    /// Layout this version writes for the scheme.
    pub fn layout(self) -> Layout {
        match self {
            Scheme::Float(_) => Layout::Rows,
            Scheme::Int { .. } => Layout::P64,
        }
    }

    /// Where the planes of an `[n, k]` tensor lie; `None` when a size overflows.
    pub fn planes(self, n: u64, k: u64) -> Option<Planes> {
        let align = |x: u64| x.checked_next_multiple_of(PLANE_ALIGN as u64);
        match self {
            Scheme::Float(t) => {
                let len = n.checked_mul(k)?.checked_mul(t.size() as u64)?;
                Some(Planes { codes: (0, len), scales: (len, 0), zeros: (len, 0), total: len })
            }
            Scheme::Int { bits, group, zero, scale } => {
                let rows = n.checked_next_multiple_of(PANEL as u64)?;
                let cols = k.checked_next_multiple_of(group as u64)?;
                let cells = rows.checked_mul(cols / group as u64)?;
                let codes = rows.checked_mul(cols)?.checked_mul(bits as u64)? / 8;
                let scales = cells.checked_mul(scale.size() as u64)?;
                let zeros = match zero {
                    ZeroKind::Mid => 0,
                    ZeroKind::Code => cells.checked_mul(bits as u64)? / 8,
                    ZeroKind::Min => scales,
                };
                let at_scales = align(codes)?;
                let at_zeros = align(at_scales.checked_add(scales)?)?;
                let total = at_zeros.checked_add(zeros)?;
                Some(Planes { codes: (0, codes), scales: (at_scales, scales), zeros: (at_zeros, zeros), total })
            }
        }
    }
}

impl std::fmt::Display for Scheme {
    /// `f16`, `int4 g64 sym`, `int4 g64 zero`, `int4 g32 min`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Scheme::Float(t) => f.write_str(t.name()),
            Scheme::Int { bits, group, zero, scale } => {
                let zero = match zero {
                    ZeroKind::Mid => "sym",
                    ZeroKind::Code => "zero",
                    ZeroKind::Min => "min",
                };
                write!(f, "int{bits} g{group} {zero}")?;
                if *scale != FloatType::F16 {
                    write!(f, " {} scales", scale.name())?;
                }
                Ok(())
            }
        }
    }
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
        })
    }

    /// 64-row panels, the last one possibly partial.
    pub fn panels(&self) -> usize {
        self.n.div_ceil(PANEL)
    }

    /// Value at `(row, col)` in f32 arithmetic. Slow; the definition that every kernel is tested against.
    pub fn at(&self, row: usize, col: usize) -> f32 {
        match self.scheme {
            Scheme::Float(t) => t.read(self.codes, row * self.k + col),
            Scheme::Int { bits, group, zero, scale } => {
                let g = col / group as usize;
                let cells = crate::p64::Shape::new(self.n, self.k, bits, group as usize);
                let q = cells.code(self.codes, row, col) as f32;
                let s = scale.read(self.scales, cells.cell(row, g));
                match zero {
                    ZeroKind::Mid => s * (q - (1u32 << (bits - 1)) as f32),
                    ZeroKind::Code => s * (q - cells.zero(self.zeros, row, g) as f32),
                    // Two rounded operations, as ggml's dequantize_row_q4_1 does.
                    ZeroKind::Min => s * q + scale.read(self.zeros, cells.cell(row, g)),
                }
            }
        }
    }
}
