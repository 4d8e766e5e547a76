//! GGUF's block types whose integers we keep: Q4_0, Q4_1 and Q8_0, groups of 32 columns.

use half::f16;
use quern_models::{FloatType, PANEL, ZeroKind};
use rayon::prelude::*;

use super::{Coding, IntShape, Integers, rows_of};
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

impl<'a> Blocks<'a> {
    /// `raw` has `n` rows of `k` columns; its reader checked that the bytes are there.
    pub fn new(name: &str, raw: &RawTensor<'a>, block: Block, n: usize, k: usize) -> Result<Self, ConvertError> {
        let (bits, zero) = match block {
            Block::Q4_0 => (4, ZeroKind::Mid),
            Block::Q4_1 => (4, ZeroKind::Min),
            Block::Q8_0 => (8, ZeroKind::Mid),
        };
        let shape = IntShape { n, k, bits, group: 32, zero, scale: FloatType::F16, coding: Coding::Plain };
        let blocks = Blocks { shape, block, bytes: raw.bytes, rows: raw.rows };
        let finite =
            |&row: &usize| (0..k / 32).all(|g| blocks.scale(row, g).is_finite() && blocks.min(row, g).is_finite());
        if let Some(row) = (0..n).into_par_iter().find_first(|row| !finite(row)) {
            return Err(ConvertError::tensor(name, "scales", "finite numbers", format!("others in row {row}")));
        }
        Ok(blocks)
    }

    fn block(&self, row: usize, group: usize) -> &'a [u8] {
        let size = self.block.bytes();
        &self.bytes[(self.rows.stored(row) * (self.shape.k / 32) + group) * size..][..size]
    }
}

impl Integers for Blocks<'_> {
    fn shape(&self) -> IntShape {
        self.shape
    }

    fn code(&self, row: usize, col: usize) -> u8 {
        let block = self.block(row, col / 32);
        let i = col % 32;
        let nibble = |codes: &[u8]| codes[i % 16] >> (i / 16 * 4) & 15;
        match self.block {
            Block::Q4_0 => nibble(&block[2..]),
            Block::Q4_1 => nibble(&block[4..]),
            // Signed -128..=127 becomes unsigned with the zero at 128.
            Block::Q8_0 => block[2 + i].wrapping_add(128),
        }
    }

    fn scale(&self, row: usize, group: usize) -> f32 {
        let b = self.block(row, group);
        f16::from_le_bytes([b[0], b[1]]).to_f32()
    }

    fn min(&self, row: usize, group: usize) -> f32 {
        match self.block {
            Block::Q4_1 => {
                let b = self.block(row, group);
                f16::from_le_bytes([b[2], b[3]]).to_f32()
            }
            Block::Q4_0 | Block::Q8_0 => 0.0,
        }
    }

    fn fill(&self, panel: usize, stride: usize, out: &mut [u8]) {
        let codes_at = if self.block == Block::Q4_1 { 4 } else { 2 };
        for r in 0..rows_of(self.shape.n, panel) {
            for group in 0..self.shape.k / 32 {
                let codes = &self.block(panel * PANEL + r, group)[codes_at..];
                let out = &mut out[r * stride + group * 32..][..32];
                if self.block == Block::Q8_0 {
                    out.iter_mut().zip(codes).for_each(|(o, c)| *o = c ^ 0x80);
                } else {
                    let (low, high) = out.split_at_mut(16);
                    low.iter_mut().zip(codes).for_each(|(o, c)| *o = c & 15);
                    high.iter_mut().zip(codes).for_each(|(o, c)| *o = c >> 4);
                }
            }
        }
    }
}
