//! pack-quantized: integers of 2 to 8 bits in 32-bit words, along the columns of W.
//!
//! `weight_packed` i32 `[N, words]`, `weight_scale` `[N, G]`, `weight_shape` i64 `[2]`, and if the zero lies elsewhere
//! than in the middle `weight_zero_point`: i32 `[words, G]`, packed along N, or i8 `[N, G]`, not packed (vllm#17862).
//! A code is the signed value plus `2^(bits-1)`. Words are an LSB-first bitstream; up to compressed-tensors 0.15 they
//! held whole codes only, `32 / bits` of them, which differs for 3, 5, 6 and 7 bits and shows in their number.
//!
//! `weight_g_idx` i32 `[K]` (act-order "group" of compressed-tensors before 0.16) is the group of each column; all -1
//! is what a module has that is not in such an order.
//!
//! The file has codes of 4 and 8 bits. Narrower ones keep their signed value: the middle stays the middle.

use quern_models::{PANEL, ZeroKind};

use super::{Claims, Grid, Parts, misfit};
use crate::{
    ConvertError,
    import::{
        Coding, IntShape, Integers, Words,
        gptq::index::Index,
        nibbles,
        order::{Columns, sorted},
        rows_of,
    },
    source::{Dtype, RawTensor},
};

/// A pack-quantized tensor.
#[derive(Debug)]
pub struct Packed<'a> {
    shape: IntShape,
    codes: Codes<'a>,
    scales: Grid<'a>,
    zeros: Zeros<'a>,
    index: Index,
}

/// Codes in words.
#[derive(Debug, Clone, Copy)]
struct Codes<'a> {
    words: Words<'a>,
    packing: Packing,
}

/// How codes lie in words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Packing {
    /// 2 to 8.
    bits: usize,
    /// A code may straddle two words.
    stream: bool,
}

/// Where zero lies.
#[derive(Debug, Clone, Copy)]
pub enum Zeros<'a> {
    /// In the middle.
    Mid,
    /// Codes packed along N, `[words, G]`.
    Packed(PackedZeros<'a>),
    /// Signed values `[rows, G]`; a single row is for all.
    Bytes {
        /// The values.
        bytes: &'a [u8],
        /// Values of a row.
        cols: usize,
        /// There are as many rows as the tensor has.
        rows: bool,
    },
}

/// Zero-points in words.
#[derive(Debug, Clone, Copy)]
pub struct PackedZeros<'a>(Codes<'a>);

impl Packing {
    /// Words of a row of `len` codes.
    fn words(self, len: usize) -> usize {
        if self.stream { (len * self.bits).div_ceil(32) } else { len.div_ceil(32 / self.bits) }
    }

    /// Code `i` of the words that `word` gives.
    #[inline]
    fn code(self, i: usize, word: impl Fn(usize) -> u32) -> u8 {
        let bits = self.bits;
        let (w, shift) =
            if self.stream { (i * bits / 32, i * bits % 32) } else { (i / (32 / bits), i % (32 / bits) * bits) };
        let mut code = word(w) >> shift;
        if shift + bits > 32 {
            code |= word(w + 1) << (32 - shift);
        }
        (code & ((1 << bits) - 1)) as u8
    }

    /// The packing that gives `words` words for `len` codes, of those that the config says.
    fn of(name: &str, words: usize, len: usize, claims: &Claims) -> Result<Packing, ConvertError> {
        // 7 bits in whole codes take the room of 8, so the usual widths come first.
        let all = [4, 8, 2, 3, 5, 6, 7].map(|bits| Packing { bits, stream: true });
        let old = [3, 5, 6, 7].map(|bits| Packing { bits, stream: false });
        let fits: Vec<Packing> = all.into_iter().chain(old).filter(|p| p.words(len) == words).collect();
        let said = &claims.bits;
        let found: Vec<&Packing> = fits.iter().filter(|p| said.is_empty() || said.contains(&(p.bits as u64))).collect();
        let expected = || match &said[..] {
            [] => format!("words for {len} codes of 2 to 8 bits"),
            bits => {
                let bits: Vec<String> = bits.iter().map(u64::to_string).collect();
                format!("words for {len} codes of {} bits, as {} says", bits.join(" or "), claims.file)
            }
        };
        match found[..] {
            [] => {
                let by_shape = fits.iter().map(|p| format!(" ({} bits)", p.bits)).next().unwrap_or_default();
                Err(ConvertError::tensor(name, "bits", expected(), format!("{words} words{by_shape}")))
            }
            // Whole codes and a bitstream can take the same room in very short rows only.
            [first, second, ..]
                if first.bits == second.bits && first.stream != second.stream && len > 32 / first.bits =>
            {
                let got = format!("{words} words for {len} codes, which two packings of {} bits give", first.bits);
                Err(ConvertError::tensor(name, "packing", "one that its width tells", got))
            }
            [first, ..] => Ok(*first),
        }
    }
}

impl<'a> Packed<'a> {
    /// Takes the tensors of an `[n, k]` linear.
    pub fn new(parts: &Parts<'a, '_>, n: usize, k: usize, claims: &Claims) -> Result<Self, ConvertError> {
        let (name, raw) = parts.need("weight_packed")?;
        let (words, [rows, cols]) = Words::new(&name, raw)?;
        if rows != n {
            let expected = format!("[{n}, words] for a [{n}, {k}] linear");
            return Err(ConvertError::tensor(&name, "shape", expected, format!("[{rows}, {cols}]")));
        }
        let packing = Packing::of(&name, cols, k, claims)?;
        parts.check_shape(n, k)?;
        let scales = parts.scales("weight_scale", n, k, claims)?;
        let index = match parts.get("weight_g_idx") {
            Some((name, raw)) if raw.bytes.iter().any(|&b| b != 0xff) => Index::new(&name, raw, k, scales.groups())?,
            // Act-order, of which this module's part did not come along.
            None if scales.groups() > 1 && parts.source.tensors.keys().any(|name| name.ends_with(".weight_g_idx")) => {
                parts.need("weight_g_idx")?;
                Index::Natural(scales.group())
            }
            _ => Index::Natural(scales.group()),
        };
        match &index {
            Index::Natural(size) | Index::Ordered(size, _) if *size != scales.group() => {
                let (name, _) = parts.need("weight_g_idx")?;
                let expected = format!("groups of {} columns", scales.group());
                return Err(ConvertError::tensor(&name, "groups", expected, format!("of {size}")));
            }
            _ => {}
        }
        let zeros = match parts.get("weight_zero_point") {
            None => Zeros::absent(parts, claims)?,
            Some((name, raw)) if raw.dtype == Dtype::I32 => {
                let (words, got) = Words::new(&name, raw)?;
                let expected = [packing.words(n), scales.groups()];
                if got != expected {
                    return Err(ConvertError::tensor(&name, "shape", format!("{expected:?}"), format!("{got:?}")));
                }
                Zeros::Packed(PackedZeros(Codes { words, packing }))
            }
            Some((name, raw)) => Zeros::bytes(&name, raw, n, scales.groups(), packing.bits)?,
        };
        let bits = if packing.bits > 4 { 8 } else { 4 };
        let (group, scale) = (scales.group(), scales.stored());
        let shape = IntShape { n, k, bits, group, zero: ZeroKind::Mid, scale, coding: Coding::Plain };
        let mut packed = Packed { shape, codes: Codes { words, packing }, scales, zeros, index };
        packed.shape.zero = packed.zeros.kind(&packed);
        claimed_zeros(parts, packed.shape.zero, claims)?;
        Ok(packed)
    }

    /// What is added to a code to keep its distance from the middle.
    fn shift(&self) -> u8 {
        self.shape.mid() - (1 << (self.codes.packing.bits - 1))
    }
}

impl Integers for Packed<'_> {
    fn shape(&self) -> IntShape {
        self.shape
    }

    fn code(&self, row: usize, col: usize) -> u8 {
        self.codes.packing.code(col, |w| self.codes.words.at(row, w)) + self.shift()
    }

    fn group_of(&self, col: usize) -> usize {
        self.index.group_of(col)
    }

    fn scale(&self, row: usize, group: usize) -> f32 {
        self.scales.at(row, group)
    }

    fn order(&self) -> Columns {
        match &self.index {
            Index::Ordered(_, index) => Columns::Ordered(sorted(index)),
            Index::Natural(_) if self.scales.groups() > 1 => Columns::Natural,
            _ => Columns::Any,
        }
    }

    fn source_bits(&self) -> u8 {
        self.codes.packing.bits as u8
    }

    fn misfit(&self) -> Option<String> {
        match &self.index {
            Index::Irregular(_) => Some("groups of different sizes".into()),
            _ => misfit(self.shape.group),
        }
    }

    fn zero(&self, row: usize, group: usize) -> u8 {
        match self.zeros {
            Zeros::Packed(PackedZeros(Codes { words, packing })) => {
                packing.code(row, |w| words.at(w, group)) + self.shift()
            }
            other => other.value(row, group, self.shape.mid()),
        }
    }

    fn fill(&self, panel: usize, stride: usize, out: &mut [u8]) {
        let (bits, k) = (self.codes.packing.bits, self.shape.k);
        for (r, out) in out.chunks_exact_mut(stride).enumerate().take(rows_of(self.shape.n, panel)) {
            let row = panel * PANEL + r;
            let out = &mut out[..k];
            match bits {
                4 => out.chunks_mut(8).enumerate().for_each(|(w, out)| {
                    out.copy_from_slice(&nibbles(self.codes.words.at(row, w))[..out.len()]);
                }),
                8 => out.chunks_mut(4).enumerate().for_each(|(w, out)| {
                    out.copy_from_slice(&self.codes.words.at(row, w).to_le_bytes()[..out.len()]);
                }),
                _ => out.iter_mut().enumerate().for_each(|(col, out)| *out = self.code(row, col)),
            }
        }
    }
}

/// A tensor that the config calls symmetric has its zero in the middle.
pub fn claimed_zeros(parts: &Parts, zero: ZeroKind, claims: &Claims) -> Result<(), ConvertError> {
    if claims.symmetric == Some(true) && zero != ZeroKind::Mid {
        let expected = format!("the middle code, as {} says symmetric", claims.file);
        return Err(ConvertError::tensor(&parts.name("weight_zero_point"), "zero-points", expected, "others"));
    }
    Ok(())
}

impl<'a> Zeros<'a> {
    /// None stored: the tensor must be symmetric.
    pub fn absent(parts: &Parts<'a, '_>, claims: &Claims) -> Result<Self, ConvertError> {
        if claims.symmetric == Some(false) {
            return Err(ConvertError::Missing {
                origin: parts.source.name.clone(),
                tensor: parts.name("weight_zero_point"),
                what: format!("{} says that the model is not symmetric", claims.file),
            });
        }
        Ok(Zeros::Mid)
    }

    /// Signed values of `bits` bits, one for each group of a row or fewer.
    pub fn bytes(name: &str, raw: &RawTensor<'a>, n: usize, groups: usize, bits: usize) -> Result<Self, ConvertError> {
        let got = || format!("{} {:?}", raw.dtype.name(), raw.shape);
        let (rows, cols) = match raw.shape[..] {
            [] => (1, 1),
            [r] => (r as usize, 1),
            [r, c] => (r as usize, c as usize),
            _ => (0, 0),
        };
        if raw.dtype != Dtype::I8 || ![1, n].contains(&rows) || cols != groups {
            return Err(ConvertError::tensor(name, "type and shape", format!("i8 [{n}, {groups}]"), got()));
        }
        let low = -(1i32 << (bits - 1));
        if let Some(z) = raw.bytes.iter().map(|&b| b as i8 as i32).find(|z| !(low..-low).contains(z)) {
            return Err(ConvertError::tensor(name, "zero-points", format!("{low} to {}", -low - 1), z));
        }
        Ok(Zeros::Bytes { bytes: raw.bytes, cols, rows: rows == n })
    }

    /// As a code whose middle is `mid`; only for those that are not packed.
    pub fn value(&self, row: usize, group: usize, mid: u8) -> u8 {
        match *self {
            Zeros::Bytes { bytes, cols, rows } => {
                bytes[if rows { row * cols + group } else { group }].wrapping_add(mid)
            }
            _ => mid,
        }
    }

    /// Symmetric in effect: nothing to store.
    pub fn kind(&self, tensor: &dyn Integers) -> ZeroKind {
        let shape = tensor.shape();
        let mut cells = (0..shape.n).flat_map(|row| (0..shape.groups()).map(move |group| (row, group)));
        let mid = matches!(self, Zeros::Mid) || cells.all(|(row, group)| tensor.zero(row, group) == shape.mid());
        if mid { ZeroKind::Mid } else { ZeroKind::Code }
    }
}

/// Checks `weight_shape`.
pub(super) fn shape_says(name: &str, raw: &RawTensor, n: usize, k: usize) -> Result<(), ConvertError> {
    let said: Vec<i64> = match raw.dtype {
        Dtype::I64 => raw.bytes.chunks_exact(8).map(|b| b.iter().rev().fold(0, |v, &b| v << 8 | b as i64)).collect(),
        Dtype::I32 => raw.bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]) as i64).collect(),
        other => return Err(ConvertError::tensor(name, "type", "i64", other.name())),
    };
    if said != [n as i64, k as i64] {
        let got = format!("{said:?}; the checkpoint is not what its config says");
        return Err(ConvertError::tensor(name, "value", format!("[{n}, {k}]"), got));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths_tell_packings() {
        let of = |words, len, bits: &[u64]| {
            let claims = Claims { bits: bits.into(), file: "c".into(), ..Claims::default() };
            Packing::of("t", words, len, &claims).map(|p| (p.bits, p.stream)).map_err(|e| e.to_string())
        };
        for bits in 2..=8 {
            for len in [64usize, 128, 576, 4096] {
                let (dense, old) = (len * bits / 32, len.div_ceil(32 / bits));
                assert_eq!(of(dense, len, &[]), Ok((bits, true)));
                assert_eq!(of(dense, len, &[bits as u64]), Ok((bits, true)));
                assert_eq!(of(old, len, &[bits as u64]), Ok((bits, old == dense)));
                assert_eq!(of(old, len, &[]), Ok(if bits == 7 { (8, true) } else { (bits, old == dense) }));
            }
        }
        assert_eq!(of(24, 96, &[4, 8]), Ok((8, true)));
        let text = of(24, 96, &[4]).unwrap_err();
        assert!(text.contains("96 codes of 4 bits, as c says, got 24 words (8 bits)"), "{text}");
        assert!(of(25, 96, &[]).unwrap_err().contains("2 to 8 bits"));
        assert!(of(4, 33, &[3]).unwrap_err().contains("two packings of 3 bits"));
        assert_eq!(of(1, 10, &[3]), Ok((3, true)));
    }

    #[test]
    fn codes_straddle_words_or_do_not() {
        // Codes 0..8 and again, 3 bits each.
        let stream: u128 = (0..32u128).fold(0, |s, i| s | (i % 8) << (3 * i));
        let words = |w: usize| (stream >> (32 * w)) as u32;
        let whole = |w: usize| (0..10).fold(0u32, |s, i| s | ((10 * w as u32 + i) % 8) << (3 * i));
        for i in 0..32 {
            assert_eq!(Packing { bits: 3, stream: true }.code(i, words), i as u8 % 8);
            assert_eq!(Packing { bits: 3, stream: false }.code(i, whole), i as u8 % 8);
        }
    }
}
