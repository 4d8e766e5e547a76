//! GGUF's block types as integers: 4-bit codes stay 4-bit, 5- and 6-bit ones become bytes, and scales of
//! two levels stay two. The value of every weight is the f32 that ggml computes, with multiplication and
//! addition rounded separately.

mod decode;

use quern_models::{FloatType, Mini, PANEL, ZeroKind};
use rayon::prelude::*;

use super::{Coding, IntShape, Integers, Level2, rows_of};
use crate::{
    ConvertError,
    source::{Block, RawTensor, Rows},
};

/// A tensor of blocks.
#[derive(Debug)]
pub struct Blocks<'a> {
    shape: IntShape,
    block: Block,
    bytes: &'a [u8],
    rows: Rows,
}

/// Bits, columns of a group, zero-point, form and type of the scales that a block type gets.
fn form(block: Block) -> (u8, usize, ZeroKind, Coding, FloatType) {
    use ZeroKind::{Mid, Min};
    match block {
        Block::Q4_0 => (4, 32, Mid, Coding::Plain, FloatType::F16),
        Block::Q4_1 => (4, 32, Min, Coding::Plain, FloatType::F16),
        Block::Q5_0 | Block::Q8_0 | Block::IQ4_NL => (8, 32, Mid, Coding::Plain, FloatType::F16),
        Block::Q5_1 => (8, 32, Min, Coding::Plain, FloatType::F16),
        Block::Q2_K => (4, 16, Min, Coding::Nested, FloatType::F16),
        Block::Q3_K => (4, 16, Mid, Coding::Nested, FloatType::F16),
        Block::Q4_K => (4, 32, Min, Coding::Nested, FloatType::F16),
        Block::Q5_K => (8, 32, Min, Coding::Nested, FloatType::F16),
        Block::Q6_K => (8, 16, Mid, Coding::Nested, FloatType::F16),
        Block::IQ4_XS => (8, 32, Mid, Coding::Nested, FloatType::F16),
        // bf16 holds every power of two that f32 does, f16 does not.
        Block::MXFP4 => (4, 32, Mid, Coding::Mini(Mini::E2M1), FloatType::BF16),
    }
}

impl<'a> Blocks<'a> {
    /// `raw` has `n` rows of `k` columns; its reader checked that the bytes are there.
    pub fn new(name: &str, raw: &RawTensor<'a>, block: Block, n: usize, k: usize) -> Result<Self, ConvertError> {
        let (bits, group, zero, coding, scale) = form(block);
        let shape = IntShape { n, k, bits, group, zero, scale, coding };
        let blocks = Blocks { shape, block, bytes: raw.bytes, rows: raw.rows };
        if let Some(row) = (0..n).into_par_iter().find_first(|&row| !blocks.finite(row)) {
            return Err(ConvertError::tensor(name, "scales", "finite numbers", format!("others in row {row}")));
        }
        Ok(blocks)
    }

    /// Whether all scales and minima of a row are numbers that leave the weights numbers.
    fn finite(&self, row: usize) -> bool {
        let nested = self.shape.coding == Coding::Nested;
        (0..self.shape.k).step_by(self.block.columns()).all(|col| {
            let b = self.block(row, col);
            if nested {
                return decode::nested(self.block, b, 0).iter().all(|l| l.upper.is_finite());
            }
            // 6 is the largest E2M1 value; f16 scales are far from f32's end.
            (decode::scale(self.block, b) * 6.0).is_finite() && decode::min(self.block, b).is_finite()
        })
    }

    /// The block that holds a column.
    fn block(&self, row: usize, col: usize) -> &'a [u8] {
        let size = self.block.bytes();
        let columns = self.block.columns();
        &self.bytes[(self.rows.stored(row) * (self.shape.k / columns) + col / columns) * size..][..size]
    }

    /// The block that holds a group.
    fn of_group(&self, row: usize, group: usize) -> &'a [u8] {
        self.block(row, group * self.shape.group)
    }
}

impl Integers for Blocks<'_> {
    fn shape(&self) -> IntShape {
        self.shape
    }

    fn source_bits(&self) -> u8 {
        self.block.bits()
    }

    fn code(&self, row: usize, col: usize) -> u8 {
        decode::code(self.block, self.block(row, col), col % self.block.columns())
    }

    fn scale(&self, row: usize, group: usize) -> f32 {
        decode::scale(self.block, self.of_group(row, group))
    }

    fn min(&self, row: usize, group: usize) -> f32 {
        decode::min(self.block, self.of_group(row, group))
    }

    fn nested(&self, row: usize, group: usize) -> [Level2; 2] {
        let groups = self.block.columns() / self.shape.group;
        decode::nested(self.block, self.of_group(row, group), group % groups)
    }

    fn fill(&self, panel: usize, stride: usize, out: &mut [u8]) {
        let (size, columns) = (self.block.bytes(), self.block.columns());
        for (r, out) in out.chunks_exact_mut(stride).enumerate().take(rows_of(self.shape.n, panel)) {
            let row = self.rows.stored(panel * PANEL + r) * (self.shape.k / columns) * size;
            let blocks = self.bytes[row..].chunks_exact(size);
            out[..self.shape.k]
                .chunks_exact_mut(columns)
                .zip(blocks)
                .for_each(|(o, b)| decode::unpack(self.block, b, o));
        }
    }
}

#[cfg(test)]
mod tests {
    use half::f16;
    use quern_models::TensorView;

    use super::*;
    use crate::{pack::pack, source::Dtype, verify};

    /// Bytes from a small generator, with scales of every size: huge, subnormal, negative, zero.
    fn bytes(block: Block, blocks: usize) -> Vec<u8> {
        let mut state = 7u64;
        let mut byte = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as u8
        };
        let mut all: Vec<u8> = (0..blocks * block.bytes()).map(|_| byte()).collect();
        let halves: &[usize] = match block {
            Block::Q4_1 | Block::Q5_1 | Block::Q4_K | Block::Q5_K => &[0, 2],
            Block::Q2_K => &[80, 82],
            Block::Q3_K => &[108],
            Block::Q6_K => &[208],
            Block::MXFP4 => &[],
            _ => &[0],
        };
        let extremes = [0x0000, 0x8000, 0x0001, 0x8001, 0x03ff, 0x7bff, 0xfbff, 0x3c00];
        for (i, b) in all.chunks_exact_mut(block.bytes()).enumerate() {
            for (j, &at) in halves.iter().enumerate() {
                let bits = extremes.get((i + 3 * j) % 16).copied().unwrap_or(0x1000 + (37 * i % 0x6000) as u16);
                b[at..at + 2].copy_from_slice(&f16::from_bits(bits).to_le_bytes());
            }
            if block == Block::MXFP4 {
                b[0] = [0, 1, 2, 127, 252, 120][i % 6];
            }
        }
        all
    }

    fn raw(block: Block, n: usize, k: usize, bytes: &[u8], rows: Rows) -> RawTensor<'_> {
        RawTensor { dtype: Dtype::Block(block), shape: vec![n as u64, k as u64], bytes, rows }
    }

    #[test]
    fn both_readings_of_a_block_are_one() {
        let (n, k) = (70, 512);
        for block in Block::ALL {
            let bytes = bytes(block, n * k / block.columns());
            for rows in [Rows::InOrder, Rows::Interleaved { head_dim: 10 }] {
                let blocks = Blocks::new("t", &raw(block, n, k, &bytes, rows), block, n, k).unwrap();
                let shape = blocks.shape();
                for panel in 0..2 {
                    let mut filled = vec![shape.mid(); PANEL * k];
                    blocks.fill(panel, k, &mut filled);
                    for (at, got) in filled.iter().enumerate().filter(|(at, _)| panel * PANEL + at / k < n) {
                        let (row, col) = (panel * PANEL + at / k, at % k);
                        assert_eq!(blocks.code(row, col), *got, "{block:?} [{row}, {col}]");
                        assert!(shape.bits == 8 || *got < 16);
                    }
                }
                let packed = pack(&blocks);
                let view = TensorView::new(n, k, shape.scheme(), &packed).unwrap();
                let verified = verify::integers("t", &blocks, &view).unwrap();
                assert_eq!(verified.scales, (n * k / shape.group) as u64);
            }
        }
    }

    #[test]
    fn scales_that_are_no_numbers_are_named() {
        let (n, k) = (5, 256);
        for (block, at) in [
            (Block::Q5_1, 2),
            (Block::Q4_K, 0),
            (Block::Q4_K, 2),
            (Block::Q2_K, 82),
            (Block::Q3_K, 108),
            (Block::Q6_K, 208),
            (Block::IQ4_XS, 0),
            (Block::MXFP4, 0),
        ] {
            let mut bytes = bytes(block, n * k / block.columns());
            let at = 3 * bytes.len() / n + at;
            // An infinity in f16; a power of two whose sixfold is beyond f32.
            bytes[at..at + 2].copy_from_slice(if block == Block::MXFP4 { &[253, 0] } else { &[0x00, 0x7c] });
            let raw = raw(block, n, k, &bytes, Rows::InOrder);
            let text = Blocks::new("t", &raw, block, n, k).unwrap_err().to_string();
            assert!(text.contains("scales: expected finite numbers, got others in row 3"), "{block:?}: {text}");
        }
    }
}
