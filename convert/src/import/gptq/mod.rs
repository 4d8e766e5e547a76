//! GPTQ: `qweight` i32 `[K*bits/32, N]`, `qzeros` i32 `[G, N*bits/32]`, `scales` `[G, N]`, `g_idx` i32 `[K]`.
//!
//! Codes are an LSB-first bitstream down each column of `qweight` (along K) and along each row of
//! `qzeros` (along N). What a stored zero-point means is decided once per model, from the values
//! ([`Convention`]): labels lie, and files of version 1 store `z - 1`. Which group a column belongs to,
//! `g_idx` says ([`index`]).
//!
//! Codes of 2 and 3 bits are kept in fields of 4: as they are where zero-points are stored, else moved up so
//! that the middle code stays the middle code. Both keep every `q - z`.

pub mod index;
pub mod zeros;

use quern_models::{PANEL, ZeroKind};

use self::index::Index;
pub use self::zeros::{Convention, Pattern, convention};
use super::{
    Coding, IntShape, Integers, Scales, Words,
    config::Hint,
    group_of, nibbles,
    order::{Columns, sorted},
    rows_of,
};
use crate::{
    ConvertError,
    source::{Checkpoint, RawTensor},
};

/// A GPTQ tensor.
#[derive(Debug)]
pub struct Gptq<'a> {
    shape: IntShape,
    /// Bits of a code in the source: 2, 3, 4 or 8.
    bits: u8,
    qweight: Words<'a>,
    qzeros: Option<Words<'a>>,
    scales: Scales<'a>,
    index: Index,
    /// How this tensor's stored zero-points are read.
    convention: Convention,
    /// Added to codes and zero-points on the way into wider fields.
    up: u8,
}

impl<'a> Gptq<'a> {
    /// Takes the tensors of `module`, an `[n, k]` linear. The zero convention is set later.
    pub fn new(source: &Checkpoint<'a>, module: &str, n: usize, k: usize, hint: &Hint) -> Result<Self, ConvertError> {
        let get = |part: &str| {
            let name = format!("{module}.{part}");
            source.tensors.get(&name).map(|raw| (name, raw))
        };
        let need = |part: &str| {
            get(part).ok_or_else(|| ConvertError::Missing {
                origin: source.name.clone(),
                tensor: format!("{module}.{part}"),
                what: format!("{module} is quantized"),
            })
        };
        let (name, raw) = need("qweight")?;
        let (qweight, [rows, cols]) = Words::new(&name, raw)?;
        let bits = bits_of(&name, rows, cols, n, k, hint)?;
        let (name, raw) = need("scales")?;
        let scales = Scales::new(&name, raw, n)?;
        let groups = scales.groups();
        let indexed = match get("g_idx") {
            Some((origin, raw)) => Some((Index::new(&origin, raw, k, groups)?, origin)),
            None if groups > 1 && (hint.desc_act || source.tensors.keys().any(|name| name.ends_with(".g_idx"))) => {
                let why = match hint.desc_act {
                    true => format!("{} says desc_act, so the columns have an order", hint.file),
                    false => "other modules have one".into(),
                };
                let tensor = format!("{module}.g_idx");
                return Err(ConvertError::Missing { origin: source.name.clone(), tensor, what: why });
            }
            None => None,
        };
        let said = hint.group.filter(|_| !hint.per_module);
        let claimed = match &indexed {
            Some((Index::Natural(group) | Index::Ordered(group, _), origin)) => Some((*group, origin.as_str())),
            _ => said.map(|g| (g, hint.file.as_str())),
        };
        let group = match indexed {
            Some((Index::Irregular(_), _)) => k.div_ceil(groups),
            _ => group_of(&name, k, groups, claimed)?,
        };
        if let Some(said) = said.filter(|&g| k.div_ceil(g) != groups) {
            let expected = format!("{} groups of the {said} columns that {} says", k.div_ceil(said), hint.file);
            return Err(ConvertError::tensor(&name, "groups", expected, groups));
        }
        if let Some((name, _)) = get("zeros") {
            return Err(ConvertError::unsupported(
                format!("tensor {name}: float zero-points (GPTQ-for-LLaMa 2023)"),
                "quantize the model again with a current tool",
            ));
        }
        // Only the middle code needs no storing, so only a symmetric tensor may lack zero-points or the last of them.
        let asymmetric = hint.sym == Some(false) && !hint.per_module;
        let qzeros = match get("qzeros") {
            None if asymmetric => {
                return Err(ConvertError::Missing {
                    origin: source.name.clone(),
                    tensor: format!("{module}.qzeros"),
                    what: format!("{} says that the model is not symmetric", hint.file),
                });
            }
            None => None,
            Some((name, raw)) => Some(zero_words(&name, raw, n, bits, groups, !asymmetric)?),
        };
        let (kept, zero, coding) = (bits.max(4), ZeroKind::Mid, Coding::Plain);
        let shape = IntShape { n, k, bits: kept, group, zero, scale: scales.stored(), coding };
        let index = indexed.map_or(if groups == 1 { Index::One } else { Index::Natural(group) }, |(index, _)| index);
        let (convention, up) = (Convention::Mid, shape.mid() - mid(bits));
        Ok(Gptq { shape, bits, qweight, qzeros, scales, index, convention, up })
    }

    /// Looks at the stored zero-points.
    pub fn pattern(&self) -> Pattern {
        let Some(words) = &self.qzeros else { return Pattern::Absent };
        let mid = mid(self.bits);
        // AutoGPTQ drops the fields of the last N % 32 rows: only those that are there count.
        let n = self.shape.n.min(fields(words, self.bits));
        if n == 0 {
            return Pattern::Absent;
        }
        let (mut low, mut middle) = (true, true);
        for g in 0..self.scales.groups() {
            for row in 0..n {
                let f = self.stored(words, g, row);
                low &= f == mid - 1;
                middle &= f == mid;
            }
            if !low && !middle {
                return Pattern::Mixed;
            }
        }
        if low { Pattern::Low } else { Pattern::Mid }
    }

    /// Sets what the stored zero-points mean: `model` is the [`convention`] of all tensors, `pattern` this one's.
    pub fn set_convention(&mut self, name: &str, model: Convention, pattern: Pattern) -> Result<(), ConvertError> {
        // A symmetric tensor stores nothing in the file, in an asymmetric model too. What the source stores is still
        // read, by the version that its values show, so that verification finds any that is not the middle code.
        self.convention = match pattern {
            Pattern::Absent => Convention::Mid,
            Pattern::Low => Convention::Less,
            Pattern::Mid => Convention::Stored,
            Pattern::Mixed => model,
        };
        self.shape.zero = if pattern == Pattern::Mixed { ZeroKind::Code } else { ZeroKind::Mid };
        self.up = if pattern == Pattern::Mixed { 0 } else { self.shape.mid() - mid(self.bits) };
        if model != Convention::Mid {
            let words = self.qzeros.as_ref().map_or(0, |w| w.cols);
            let needed = (self.shape.n * self.bits as usize).div_ceil(32);
            if words < needed {
                let got = format!("{words}; the model is not symmetric, quantize it again with a current tool");
                return Err(ConvertError::tensor(&format!("{name}.qzeros"), "words of a row", needed, got));
            }
        }
        Ok(())
    }

    /// Field `row` of the zero-points of a group, as stored.
    fn stored(&self, words: &Words, group: usize, row: usize) -> u8 {
        field(self.bits, row, |w| words.at(group, w))
    }
}

impl Integers for Gptq<'_> {
    fn shape(&self) -> IntShape {
        self.shape
    }

    fn code(&self, row: usize, col: usize) -> u8 {
        field(self.bits, col, |w| self.qweight.at(w, row)) + self.up
    }

    fn group_of(&self, col: usize) -> usize {
        self.index.group_of(col)
    }

    fn scale(&self, row: usize, group: usize) -> f32 {
        self.scales.at(row, group)
    }

    fn zero(&self, row: usize, group: usize) -> u8 {
        // Fields that AutoGPTQ dropped are those of a symmetric tensor.
        let stored = self.qzeros.as_ref().filter(|words| row < fields(words, self.bits));
        let zero = match (self.convention, stored) {
            (Convention::Stored, Some(words)) => self.stored(words, group, row),
            // A field of 3 bits may cross words: writers subtract field by field.
            (Convention::Less, Some(words)) if self.bits == 3 => (self.stored(words, group, row) + 1) & 7,
            (Convention::Less, Some(words)) => {
                // The whole word: the writer's subtraction borrowed across its fields.
                let ones = u32::MAX / ((1 << self.bits) - 1);
                field(self.bits, row, |w| words.at(group, w).wrapping_add(ones))
            }
            _ => mid(self.bits),
        };
        zero + self.up
    }

    fn order(&self) -> Columns {
        match &self.index {
            Index::Ordered(_, index) => Columns::Ordered(sorted(index)),
            // Whichever: it is not stored by groups.
            Index::One | Index::Irregular(_) => Columns::Any,
            Index::Natural(_) => Columns::Natural,
        }
    }

    fn source_bits(&self) -> u8 {
        self.bits
    }

    fn misfit(&self) -> Option<String> {
        match &self.index {
            Index::Irregular(_) => Some("the groups of g_idx have different sizes".into()),
            _ if !self.shape.group.is_multiple_of(16) => {
                Some(format!("groups of {} columns are no multiple of 16", self.shape.group))
            }
            _ => None,
        }
    }

    fn fill(&self, panel: usize, stride: usize, out: &mut [u8]) {
        // 64 columns at a time: one cache line of every row.
        const BLOCK: usize = 64;
        let IntShape { k, .. } = self.shape;
        let (bits, row0) = (self.bits as usize, panel * PANEL);
        for k0 in (0..k).step_by(BLOCK) {
            let cols = BLOCK.min(k - k0);
            let words = (cols * bits).div_ceil(32);
            for r in 0..rows_of(self.shape.n, panel) {
                let out = &mut out[r * stride + k0..][..cols];
                let word = |w: usize| self.qweight.at(k0 * bits / 32 + w, row0 + r);
                match bits {
                    4 => out.chunks_mut(8).enumerate().for_each(|(w, out)| copy(out, nibbles(word(w)))),
                    8 => out.chunks_mut(4).enumerate().for_each(|(w, out)| copy(out, word(w).to_le_bytes())),
                    2 => out.chunks_mut(16).enumerate().for_each(|(w, out)| {
                        let word = word(w);
                        out.iter_mut().enumerate().for_each(|(i, out)| *out = (word >> (2 * i)) as u8 & 3);
                    }),
                    _ => {
                        // 32 codes are three words.
                        for (w, out) in out.chunks_mut(32).enumerate() {
                            let part =
                                |i: usize| if 3 * w + i < words { (word(3 * w + i) as u128) << (32 * i) } else { 0 };
                            let all = part(0) | part(1) | part(2);
                            out.iter_mut().enumerate().for_each(|(i, out)| *out = (all >> (3 * i)) as u8 & 7);
                        }
                    }
                }
                if self.up != 0 {
                    out.iter_mut().for_each(|code| *code += self.up);
                }
            }
        }
    }
}

/// The first codes of `from`: all, but at the end of a row.
#[inline]
fn copy<const L: usize>(out: &mut [u8], from: [u8; L]) {
    match <&mut [u8; L]>::try_from(&mut *out) {
        Ok(out) => *out = from,
        Err(_) => out.copy_from_slice(&from[..out.len()]),
    }
}

/// Whether `raw` has the shape of an `[n, k]` linear's codes.
pub fn fits(raw: &RawTensor, n: usize, k: usize) -> bool {
    let [rows, cols] = raw.shape[..] else { return false };
    cols == n as u64 && BITS.iter().any(|&b| words(k, b) == Some(rows as usize))
}

/// Bits that a code may have, the likeliest first.
const BITS: [usize; 4] = [4, 8, 3, 2];

/// Words of `k` codes.
fn words(k: usize, bits: usize) -> Option<usize> {
    Some(k.checked_mul(bits)?.div_ceil(32))
}

/// Bits of a code, from the shape of `qweight`.
fn bits_of(name: &str, rows: usize, cols: usize, n: usize, k: usize, hint: &Hint) -> Result<u8, ConvertError> {
    let gives = |b: usize| cols == n && words(k, b) == Some(rows);
    // The claimed ones first: of a few columns only, several give the same number of words.
    let said = hint.bits.filter(|_| !hint.per_module);
    let claimed = said.and_then(|b| usize::try_from(b).ok());
    let Some(bits) = claimed.into_iter().chain(BITS).find(|&b| BITS.contains(&b) && gives(b)) else {
        let expected = format!("[{k}*bits/32, {n}] for a [{n}, {k}] linear and 2, 3, 4 or 8 bits");
        return Err(ConvertError::tensor(name, "shape", expected, format!("[{rows}, {cols}]")));
    };
    if let Some(said) = said.filter(|&b| b != bits as u64) {
        let (expected, got) = (format!("{said}, as {} says", hint.file), format!("{bits} by its shape"));
        return Err(ConvertError::tensor(name, "bits", expected, got));
    }
    Ok(bits as u8)
}

fn zero_words<'a>(
    name: &str,
    raw: &RawTensor<'a>,
    n: usize,
    bits: u8,
    groups: usize,
    may_be_cut: bool,
) -> Result<Words<'a>, ConvertError> {
    let (words, [rows, cols]) = Words::new(name, raw)?;
    let (whole, cut) = ((n * bits as usize).div_ceil(32), n / 32 * bits as usize);
    if rows != groups || (cols != whole && !(may_be_cut && cols == cut)) {
        return Err(ConvertError::tensor(name, "shape", format!("[{groups}, {whole}]"), format!("[{rows}, {cols}]")));
    }
    Ok(words)
}

/// Fields of a row.
fn fields(words: &Words, bits: u8) -> usize {
    words.cols * 32 / bits as usize
}

/// Field `i` of an LSB-first bitstream.
#[inline]
fn field(bits: u8, i: usize, word: impl Fn(usize) -> u32) -> u8 {
    let bit = i * bits as usize;
    let (w, shift) = (bit / 32, bit as u32 % 32);
    let mut value = word(w) >> shift;
    if shift + bits as u32 > 32 {
        value |= word(w + 1) << (32 - shift);
    }
    value as u8 & (u8::MAX >> (8 - bits))
}

/// The middle code.
fn mid(bits: u8) -> u8 {
    1 << (bits - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_come_from_the_shape() {
        let bits = |rows, said: Option<u64>| bits_of("t", rows, 8, 8, 96, &Hint { bits: said, ..Hint::default() });
        assert_eq!(bits(12, None).unwrap(), 4);
        assert_eq!(bits(24, Some(8)).unwrap(), 8);
        assert!(bits(24, Some(4)).unwrap_err().to_string().contains("8 by its shape"));
        assert_eq!((bits(9, None).unwrap(), bits(6, None).unwrap()), (3, 2));
        assert!(bits(13, None).unwrap_err().to_string().contains("[96*bits/32, 8]"));
    }
}
