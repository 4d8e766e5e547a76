//! What the bytes of a GGUF block mean, each type twice: code by code, as ggml's `dequantize_row_*`
//! (`ggml-quants.c`) reads them, and all codes of a block at once.
//!
//! `b` is always one block of [`Block::bytes`] bytes; `i` counts its columns, `g` its groups.

use half::f16;

use crate::{import::Level2, source::Block};

/// The signed bytes that IQ4_NL's and IQ4_XS's codes stand for (`kvalues_iq4nl` in `ggml-common.h`), plus 128.
const IQ4: [u8; 16] = [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241];

/// Our code of a column: unsigned, the zero of symmetric types on the middle code of 4 or 8 bits.
pub fn code(block: Block, b: &[u8], i: usize) -> u8 {
    // Halves of 16 bytes: low nibbles are columns 0..16, high ones 16..32.
    let nibble = |at: usize| b[at + i % 16] >> (i / 16 * 4) & 15;
    // Of a super-block: 32 columns in the low nibbles of 32 bytes, the next 32 in the high ones.
    let wide = |at: usize| b[at + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
    // Of a super-block: 128 columns in 32 bytes, two bits of each byte every 32 columns.
    let pair = |at: usize| b[at + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
    let bit = |at: usize| b[at + i / 8] >> (i % 8) & 1;
    match block {
        Block::Q4_0 => nibble(2),
        Block::Q4_1 => nibble(4),
        Block::Q5_0 => (nibble(6) | bit(2) << 4) + 112,
        Block::Q5_1 => nibble(8) | bit(4) << 4,
        Block::Q8_0 => b[2 + i] ^ 0x80,
        Block::Q2_K => pair(16),
        // -4..=3: the bit in the mask says that 4 is not to be taken off.
        Block::Q3_K => pair(32) + (b[i % 32] >> (i / 32) & 1) * 4 + 4,
        Block::Q4_K => wide(16),
        Block::Q5_K => wide(48) | (b[16 + i % 32] >> (i / 32) & 1) << 4,
        Block::Q6_K => {
            let low = b[i / 128 * 64 + i % 64] >> (i % 128 / 64 * 4) & 15;
            (low | pair(128) << 4) + 96
        }
        Block::IQ4_NL => IQ4[nibble(2) as usize],
        Block::IQ4_XS => IQ4[(b[8 + i / 32 * 16 + i % 16] >> (i % 32 / 16 * 4) & 15) as usize],
        Block::MXFP4 => nibble(1),
    }
}

/// Scale of a block with one scale.
pub fn scale(block: Block, b: &[u8]) -> f32 {
    match block {
        // 2^(e - 127): ggml halves the scale and doubles the values.
        Block::MXFP4 => match b[0] {
            0 => f32::from_bits(1 << 22),
            255 => f32::INFINITY,
            e => f32::from_bits((e as u32) << 23),
        },
        _ => half(b, 0).to_f32(),
    }
}

/// Minimum of a block with one scale.
pub fn min(block: Block, b: &[u8]) -> f32 {
    if matches!(block, Block::Q4_1 | Block::Q5_1) { half(b, 2).to_f32() } else { 0.0 }
}

/// Scale and minimum of a group of a super-block. Minima are subtracted in GGUF: the sign goes to the upper level.
pub fn nested(block: Block, b: &[u8], g: usize) -> [Level2; 2] {
    let level = |upper, lower: u8| Level2 { upper, lower: lower as i8 };
    let none = level(f16::ZERO, 0);
    match block {
        Block::Q2_K => [level(half(b, 80), b[g] & 15), level(-half(b, 82), b[g] >> 4)],
        Block::Q3_K => {
            let low = b[96 + g % 8] >> (g / 8 * 4) & 15;
            let high = b[104 + g % 4] >> (g / 4 * 2) & 3;
            [level(half(b, 108), (low | high << 4).wrapping_sub(32)), none]
        }
        Block::Q4_K | Block::Q5_K => {
            let packed = &b[4..16];
            let (scale, min) = if g < 4 {
                (packed[g] & 63, packed[g + 4] & 63)
            } else {
                let low = packed[g + 4];
                (low & 15 | packed[g - 4] >> 6 << 4, low >> 4 | packed[g] >> 6 << 4)
            };
            [level(half(b, 0), scale), level(-half(b, 2), min)]
        }
        Block::Q6_K => [level(half(b, 208), b[192 + g]), none],
        Block::IQ4_XS => {
            let low = b[4 + g / 2] >> (g % 2 * 4) & 15;
            let high = b[2 + g / 4] >> (g % 4 * 2) & 3;
            [level(half(b, 0), (low | high << 4).wrapping_sub(32)), none]
        }
        _ => [none; 2],
    }
}

fn half(b: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([b[at], b[at + 1]])
}

/// All codes of a block into `out`, of as many bytes as the block has columns.
pub fn unpack(block: Block, b: &[u8], out: &mut [u8]) {
    match block {
        Block::Q4_0 => nibbles(&b[2..], out),
        Block::Q4_1 => nibbles(&b[4..], out),
        Block::Q5_0 => {
            nibbles(&b[6..], out);
            bits(&b[2..6], out);
            out.iter_mut().for_each(|o| *o += 112);
        }
        Block::Q5_1 => {
            nibbles(&b[8..], out);
            bits(&b[4..8], out);
        }
        Block::Q8_0 => out.iter_mut().zip(&b[2..]).for_each(|(o, c)| *o = c ^ 0x80),
        Block::Q2_K => pairs(&b[16..80], out, |o, c| *o = c),
        Block::Q3_K => {
            pairs(&b[32..96], out, |o, c| *o = c + 4);
            masks(&b[..32], out, 2);
        }
        Block::Q4_K => wide(&b[16..], out),
        Block::Q5_K => {
            wide(&b[48..], out);
            masks(&b[16..48], out, 4);
        }
        Block::Q6_K => {
            for (out, low) in out.chunks_exact_mut(128).zip(b.chunks_exact(64)) {
                let (first, second) = out.split_at_mut(64);
                first.iter_mut().zip(low).for_each(|(o, c)| *o = c & 15);
                second.iter_mut().zip(low).for_each(|(o, c)| *o = c >> 4);
            }
            pairs(&b[128..192], out, |o, c| *o = (*o | c << 4) + 96);
        }
        Block::IQ4_NL => {
            nibbles(&b[2..], out);
            out.iter_mut().for_each(|o| *o = IQ4[*o as usize]);
        }
        Block::IQ4_XS => {
            out.chunks_exact_mut(32).zip(b[8..].chunks_exact(16)).for_each(|(out, codes)| nibbles(codes, out));
            out.iter_mut().for_each(|o| *o = IQ4[*o as usize]);
        }
        Block::MXFP4 => nibbles(&b[1..], out),
    }
}

/// 16 bytes: low nibbles are columns 0..16, high ones 16..32.
fn nibbles(codes: &[u8], out: &mut [u8]) {
    let (low, high) = out.split_at_mut(16);
    low.iter_mut().zip(codes).for_each(|(o, c)| *o = c & 15);
    high.iter_mut().zip(codes).for_each(|(o, c)| *o = c >> 4);
}

/// The fifth bit of 32 columns.
fn bits(mask: &[u8], out: &mut [u8]) {
    for (out, byte) in out.chunks_exact_mut(8).zip(mask) {
        out.iter_mut().enumerate().for_each(|(i, o)| *o |= (byte >> i & 1) << 4);
    }
}

/// 128 bytes: 32 columns in low nibbles, the next 32 in high ones.
fn wide(codes: &[u8], out: &mut [u8]) {
    for (out, codes) in out.chunks_exact_mut(64).zip(codes.chunks_exact(32)) {
        let (low, high) = out.split_at_mut(32);
        low.iter_mut().zip(codes).for_each(|(o, c)| *o = c & 15);
        high.iter_mut().zip(codes).for_each(|(o, c)| *o = c >> 4);
    }
}

/// 64 bytes: each 32 of them hold two bits of 128 columns, which `put` adds to the codes.
fn pairs(codes: &[u8], out: &mut [u8], put: impl Fn(&mut u8, u8)) {
    for (i, out) in out.chunks_exact_mut(32).enumerate() {
        let codes = &codes[i / 4 * 32..];
        out.iter_mut().zip(codes).for_each(|(o, c)| put(o, c >> (i % 4 * 2) & 3));
    }
}

/// 32 bytes: bit `i` of byte `l` belongs to column `32 i + l` and is worth `1 << place`.
fn masks(mask: &[u8], out: &mut [u8], place: u32) {
    for (i, out) in out.chunks_exact_mut(32).enumerate() {
        out.iter_mut().zip(mask).for_each(|(o, m)| *o += (m >> i & 1) << place);
    }
}
