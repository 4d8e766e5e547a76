//! P64: the byte order of integer tensors.
//!
//! Rows are cut into panels of 64, columns into quads of 4; a panel is stored quad by quad.
//! With `p = n / 64`, `r = n % 64`, `quad = k / 4`, `kk = k % 4`, `Kpad` = k rounded up to the group:
//!
//! - 4 bits, a quad is 128 bytes: `byte = p*32*Kpad + quad*128 + (r/16)*32 + (r%8)*4 + kk`,
//!   in the low nibble for `r % 16 < 8`, in the high nibble otherwise;
//! - 8 bits, a quad is 256 bytes: `byte = p*64*Kpad + quad*256 + (r/8)*32 + (r%8)*4 + kk`.
//! - scales and minima: `[panel][group][64]`, row order.
//! - zero codes: 4 bits `[panel][group][32 bytes]`, byte `(r/16)*8 + r%8`, nibble as for codes;
//!   8 bits `[panel][group][64]`, row order.
//!
//! - upper level of nested scales, f16: `[panel][super][64]`, row order; with minima
//!   `[panel][super][2][64]`, scales first.
//!
//! So every 32-bit lane of a vector load holds four consecutive k of one row: a dot-product lane,
//! for AVX2, AVX-512 and NEON alike. Rows and columns that pad a panel or a group have scale 0
//! (minimum 0); their codes are the middle code.

/// Shape of a P64 tensor, for address arithmetic.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    bits: usize,
    /// Columns rounded up to the group.
    pub k_pad: usize,
    /// Groups of a row.
    pub groups: usize,
    /// Rows rounded up to 64.
    pub n_pad: usize,
}

impl Shape {
    /// `bits` is 4 or 8, `group` divides nothing in particular: the last group may be partial.
    pub fn new(n: usize, k: usize, bits: u8, group: usize) -> Self {
        let k_pad = k.next_multiple_of(group);
        Shape { bits: bits as usize, k_pad, groups: k_pad / group, n_pad: n.next_multiple_of(64) }
    }

    /// Byte index and shift of the code of `(row, col)`.
    #[inline]
    pub fn code_at(&self, row: usize, col: usize) -> (usize, u32) {
        let (p, r, quad, kk) = (row / 64, row % 64, col / 4, col % 4);
        if self.bits == 4 {
            let byte = p * 32 * self.k_pad + quad * 128 + r / 16 * 32 + r % 8 * 4 + kk;
            (byte, (r % 16 / 8 * 4) as u32)
        } else {
            (p * 64 * self.k_pad + quad * 256 + r / 8 * 32 + r % 8 * 4 + kk, 0)
        }
    }

    /// Code of `(row, col)`.
    #[inline]
    pub fn code(&self, codes: &[u8], row: usize, col: usize) -> u8 {
        let (byte, shift) = self.code_at(row, col);
        if self.bits == 4 { codes[byte] >> shift & 15 } else { codes[byte] }
    }

    /// Element index of the scale (or minimum) of `(row, group)`.
    #[inline]
    pub fn cell(&self, row: usize, group: usize) -> usize {
        (row / 64 * self.groups + group) * 64 + row % 64
    }

    /// Element index of the upper level `level` of `(row, super-block)`, of `levels` that are stored.
    #[inline]
    pub fn super_at(&self, row: usize, block: usize, levels: usize, level: usize) -> usize {
        ((row / 64 * self.supers() + block) * levels + level) * 64 + row % 64
    }

    /// Super-blocks of a row.
    #[inline]
    pub fn supers(&self) -> usize {
        self.k_pad.div_ceil(crate::scheme::SUPER)
    }

    /// Byte index and shift of the zero code of `(row, group)`.
    #[inline]
    pub fn zero_at(&self, row: usize, group: usize) -> (usize, u32) {
        let (p, r) = (row / 64, row % 64);
        if self.bits == 4 {
            ((p * self.groups + group) * 32 + r / 16 * 8 + r % 8, (r % 16 / 8 * 4) as u32)
        } else {
            (self.cell(row, group), 0)
        }
    }

    /// Zero code of `(row, group)`.
    #[inline]
    pub fn zero(&self, zeros: &[u8], row: usize, group: usize) -> u8 {
        let (byte, shift) = self.zero_at(row, group);
        if self.bits == 4 { zeros[byte] >> shift & 15 } else { zeros[byte] }
    }
}
