//! GGUF's block types whose codes we keep: names, ids and sizes. What their bytes mean: `import/blocks`.

/// A GGUF block type: consecutive columns of a row share scales.
///
/// Sizes and layouts are those of ggml's `ggml-common.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(non_camel_case_types)]
pub enum Block {
    /// 4 bits, zero in the middle, f16 scale.
    Q4_0,
    /// 4 bits, f16 scale and minimum.
    Q4_1,
    /// 5 bits, zero in the middle, f16 scale.
    Q5_0,
    /// 5 bits, f16 scale and minimum.
    Q5_1,
    /// 8 bits signed, f16 scale.
    Q8_0,
    /// 2 bits, scales and minima of 4 bits per 16 columns times f16 per 256.
    Q2_K,
    /// 3 bits, zero in the middle, signed scales of 6 bits per 16 columns times f16 per 256.
    Q3_K,
    /// 4 bits, scales and minima of 6 bits per 32 columns times f16 per 256.
    Q4_K,
    /// 5 bits, otherwise as Q4_K.
    Q5_K,
    /// 6 bits, zero in the middle, signed bytes as scales per 16 columns times f16 per 256.
    Q6_K,
    /// 4 bits that stand for 16 fixed signed bytes, f16 scale.
    IQ4_NL,
    /// The same bytes, signed scales of 6 bits per 32 columns times f16 per 256.
    IQ4_XS,
    /// 4-bit floats (E2M1), a power of two as scale.
    MXFP4,
}

impl Block {
    /// Every type, in no particular order.
    pub const ALL: [Block; 13] = [
        Block::Q4_0,
        Block::Q4_1,
        Block::Q5_0,
        Block::Q5_1,
        Block::Q8_0,
        Block::Q2_K,
        Block::Q3_K,
        Block::Q4_K,
        Block::Q5_K,
        Block::Q6_K,
        Block::IQ4_NL,
        Block::IQ4_XS,
        Block::MXFP4,
    ];

    /// Name, id in a file, columns and bytes of a block.
    const fn facts(self) -> (&'static str, u32, usize, usize) {
        match self {
            Block::Q4_0 => ("Q4_0", 2, 32, 18),
            Block::Q4_1 => ("Q4_1", 3, 32, 20),
            Block::Q5_0 => ("Q5_0", 6, 32, 22),
            Block::Q5_1 => ("Q5_1", 7, 32, 24),
            Block::Q8_0 => ("Q8_0", 8, 32, 34),
            Block::Q2_K => ("Q2_K", 10, 256, 84),
            Block::Q3_K => ("Q3_K", 11, 256, 110),
            Block::Q4_K => ("Q4_K", 12, 256, 144),
            Block::Q5_K => ("Q5_K", 13, 256, 176),
            Block::Q6_K => ("Q6_K", 14, 256, 210),
            Block::IQ4_NL => ("IQ4_NL", 20, 32, 18),
            Block::IQ4_XS => ("IQ4_XS", 23, 256, 136),
            Block::MXFP4 => ("MXFP4", 39, 32, 17),
        }
    }

    /// The type with an id.
    pub fn of(id: u32) -> Option<Block> {
        Block::ALL.into_iter().find(|b| b.facts().1 == id)
    }

    /// Name as GGUF's tools print it.
    pub const fn name(self) -> &'static str {
        self.facts().0
    }

    /// Bits of a code in the file.
    pub const fn bits(self) -> u8 {
        match self {
            Block::Q2_K => 2,
            Block::Q3_K => 3,
            Block::Q4_0 | Block::Q4_1 | Block::Q4_K | Block::IQ4_NL | Block::IQ4_XS | Block::MXFP4 => 4,
            Block::Q5_0 | Block::Q5_1 | Block::Q5_K => 5,
            Block::Q6_K => 6,
            Block::Q8_0 => 8,
        }
    }

    /// Columns of a block.
    pub const fn columns(self) -> usize {
        self.facts().2
    }

    /// Bytes of a block.
    pub const fn bytes(self) -> usize {
        self.facts().3
    }
}
