//! Element types of float data, and how to read one element as f32.

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// How a float is stored, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FloatType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// The upper half of a binary32.
    BF16,
}

impl FloatType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            FloatType::F32 => 4,
            FloatType::F16 | FloatType::BF16 => 2,
        }
    }

    /// Name as printed and as written in the file's JSON.
    pub const fn name(self) -> &'static str {
        match self {
            FloatType::F32 => "f32",
            FloatType::F16 => "f16",
            FloatType::BF16 => "bf16",
        }
    }

    /// Element `i` of `bytes` as f32; exact for every type. Panics when out of range, like indexing.
    #[inline]
    pub fn read(self, bytes: &[u8], i: usize) -> f32 {
        match self {
            FloatType::F32 => {
                let b = &bytes[i * 4..i * 4 + 4];
                f32::from_le_bytes([b[0], b[1], b[2], b[3]])
            }
            FloatType::F16 => f16::from_le_bytes([bytes[i * 2], bytes[i * 2 + 1]]).to_f32(),
            FloatType::BF16 => bf16::from_le_bytes([bytes[i * 2], bytes[i * 2 + 1]]).to_f32(),
        }
    }

    /// Appends `x` rounded to nearest even.
    #[inline]
    pub fn push(self, x: f32, out: &mut Vec<u8>) {
        match self {
            FloatType::F32 => out.extend_from_slice(&x.to_le_bytes()),
            FloatType::F16 => out.extend_from_slice(&f16::from_f32(x).to_le_bytes()),
            FloatType::BF16 => out.extend_from_slice(&bf16::from_f32(x).to_le_bytes()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_reads_what_it_pushed() {
        for t in [FloatType::F32, FloatType::F16, FloatType::BF16] {
            let mut bytes = vec![];
            for x in [0.0, -1.5, 0.015625, 240.0] {
                t.push(x, &mut bytes);
            }
            assert_eq!(bytes.len(), 4 * t.size());
            assert_eq!([0, 1, 2, 3].map(|i| t.read(&bytes, i)), [0.0, -1.5, 0.015625, 240.0]);
        }
    }
}
