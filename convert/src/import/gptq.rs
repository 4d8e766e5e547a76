//! GPTQ: `qweight` i32 `[K*bits/32, N]`, `qzeros` i32 `[G, N*bits/32]`, `scales` `[G, N]`, `g_idx` i32 `[K]`.
//!
//! Codes are an LSB-first bitstream down each column of `qweight` (along K) and along each row of
//! `qzeros` (along N). What a stored zero-point means is decided once per model, from the values
//! ([`Convention`]): labels lie, and files of version 1 store `z - 1`.

use quern_models::{PANEL, ZeroKind};

use super::{Coding, IntShape, Integers, Scales, Words, config::Hint, group_of, nibbles, rows_of};
use crate::{
    ConvertError,
    source::{Checkpoint, Dtype, RawTensor},
};

/// A GPTQ tensor.
#[derive(Debug)]
pub struct Gptq<'a> {
    shape: IntShape,
    qweight: Words<'a>,
    qzeros: Option<Words<'a>>,
    scales: Scales<'a>,
    /// How this tensor's stored zero-points are read.
    convention: Convention,
}

/// What stored zero-points mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Convention {
    /// The middle code, whichever version wrote them; of a tensor, that none are stored.
    Mid,
    /// The zero itself (`gptq_v2`).
    Stored,
    /// One less than the zero, written by subtracting 0x11111111 from whole words with borrow (`gptq`).
    Less,
}

/// What the zero-points of one tensor look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    /// None stored.
    Absent,
    /// All one below the middle: symmetric, version 1.
    Low,
    /// All the middle: symmetric, version 2.
    Mid,
    /// Anything else: asymmetric.
    Mixed,
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
        let index = get("g_idx");
        let indexed = match &index {
            Some((origin, raw)) => group_by_index(origin, raw, k, scales.groups())?.map(|g| (g, origin.as_str())),
            None => None,
        };
        let said = hint.group.filter(|_| !hint.per_module);
        let group = group_of(&name, k, scales.groups(), indexed.or(said.map(|g| (g, hint.file.as_str()))))?;
        if let Some(said) = said.filter(|&g| k.div_ceil(g) != scales.groups()) {
            let expected = format!("{} groups of the {said} columns that {} says", k.div_ceil(said), hint.file);
            return Err(ConvertError::tensor(&name, "groups", expected, scales.groups()));
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
            Some((name, raw)) => Some(zero_words(&name, raw, n, bits, scales.groups(), !asymmetric)?),
        };
        let shape = IntShape { n, k, bits, group, zero: ZeroKind::Mid, scale: scales.stored(), coding: Coding::Plain };
        Ok(Gptq { shape, qweight, qzeros, scales, convention: Convention::Mid })
    }

    /// Looks at the stored zero-points.
    pub fn pattern(&self) -> Pattern {
        let Some(words) = &self.qzeros else { return Pattern::Absent };
        let mid = self.shape.mid();
        // AutoGPTQ drops the fields of the last N % 32 rows: only those that are there count.
        let n = self.shape.n.min(fields(words, self.shape.bits));
        if n == 0 {
            return Pattern::Absent;
        }
        let (mut low, mut middle) = (true, true);
        for g in 0..self.scales.groups() {
            for row in 0..n {
                let f = field(words, g, row, self.shape.bits);
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
        if model != Convention::Mid {
            let words = self.qzeros.as_ref().map_or(0, |w| w.cols);
            let needed = (self.shape.n * self.shape.bits as usize).div_ceil(32);
            if words < needed {
                let got = format!("{words}; the model is not symmetric, quantize it again with a current tool");
                return Err(ConvertError::tensor(&format!("{name}.qzeros"), "words of a row", needed, got));
            }
        }
        Ok(())
    }
}

impl Integers for Gptq<'_> {
    fn shape(&self) -> IntShape {
        self.shape
    }

    fn code(&self, row: usize, col: usize) -> u8 {
        let bit = col * self.shape.bits as usize;
        let word = self.qweight.at(bit / 32, row);
        (word >> (bit % 32)) as u8 & mask(self.shape.bits)
    }

    fn scale(&self, row: usize, group: usize) -> f32 {
        self.scales.at(row, group)
    }

    fn zero(&self, row: usize, group: usize) -> u8 {
        // Fields that AutoGPTQ dropped are those of a symmetric tensor.
        let stored = self.qzeros.as_ref().filter(|words| row < fields(words, self.shape.bits));
        match (self.convention, stored) {
            (Convention::Stored, Some(words)) => field(words, group, row, self.shape.bits),
            (Convention::Less, Some(words)) => {
                let bit = row * self.shape.bits as usize;
                let ones = if self.shape.bits == 8 { 0x0101_0101 } else { 0x1111_1111 };
                // The whole word: the writer's subtraction borrowed across its fields.
                let word = words.at(group, bit / 32).wrapping_add(ones);
                (word >> (bit % 32)) as u8 & mask(self.shape.bits)
            }
            _ => self.shape.mid(),
        }
    }

    fn fill(&self, panel: usize, stride: usize, out: &mut [u8]) {
        let per_word = 32 / self.shape.bits as usize;
        let words = self.shape.k.div_ceil(per_word);
        let (row0, rows) = (panel * PANEL, rows_of(self.shape.n, panel));
        // 64 columns at a time: one cache line of every row.
        let block = 64 / per_word;
        for w0 in (0..words).step_by(block) {
            for r in 0..rows {
                for w in w0..words.min(w0 + block) {
                    let word = self.qweight.at(w, row0 + r);
                    let at = r * stride + w * per_word;
                    let room = per_word.min(self.shape.k - w * per_word);
                    if self.shape.bits == 4 {
                        out[at..at + room].copy_from_slice(&nibbles(word)[..room]);
                    } else {
                        out[at..at + room].copy_from_slice(&word.to_le_bytes()[..room]);
                    }
                }
            }
        }
    }
}

/// Decides what the zero-points of a whole model mean, from the values of all its tensors.
///
/// All fields 7 (127) is a symmetric file of version 1, all 8 (128) one of version 2, whatever the
/// label says; otherwise the model is asymmetric and only the label tells. Tensors that contradict
/// each other or the label are an error: guessing would shift every weight of some of them.
pub fn convention(patterns: &[(&str, Pattern)], hint: &Hint) -> Result<Convention, ConvertError> {
    let first = |p: Pattern| patterns.iter().find(|x| x.1 == p).map(|x| x.0);
    let conflict = |a: &str, what_a: &str, b: &str, what_b: &str| {
        let what = "zero-points";
        Err(ConvertError::tensor(&format!("{a}.qzeros"), what, format!("{what_b}, as {b} has"), what_a))
    };
    let (low, mid, mixed) = (first(Pattern::Low), first(Pattern::Mid), first(Pattern::Mixed));
    if let (Some(low), Some(mid)) = (low, mid) {
        return conflict(mid, "all the middle code (version 2)", low, "all one below the middle (version 1)");
    }
    let Some(mixed) = mixed else { return Ok(Convention::Mid) };
    if let Some(absent) = first(Pattern::Absent) {
        return conflict(absent, "none; is the download complete?", mixed, "stored ones that differ");
    }
    if hint.sym == Some(true) && !hint.per_module {
        let expected = format!("one value, as {} says sym", hint.file);
        return Err(ConvertError::tensor(&format!("{mixed}.qzeros"), "zero-points", expected, "different ones"));
    }
    match (hint.zeros_as_stored, low, mid) {
        (true, Some(low), _) => {
            conflict(low, "all one below the middle (version 1)", mixed, "values of a version 2 file")
        }
        (false, _, Some(mid)) => conflict(mid, "all the middle code (version 2)", mixed, "values of a version 1 file"),
        (true, ..) => Ok(Convention::Stored),
        (false, ..) => Ok(Convention::Less),
    }
}

/// Bits of a code, from the shape of `qweight`.
fn bits_of(name: &str, rows: usize, cols: usize, n: usize, k: usize, hint: &Hint) -> Result<u8, ConvertError> {
    let by_shape = [2usize, 3, 4, 8].into_iter().find(|b| cols == n && (k * b).div_ceil(32) == rows);
    let Some(bits) = by_shape else {
        let expected = format!("[{k}*bits/32, {n}] for a [{n}, {k}] linear");
        return Err(ConvertError::tensor(name, "shape", expected, format!("[{rows}, {cols}]")));
    };
    if let Some(said) = hint.bits.filter(|&b| b != bits as u64 && !hint.per_module) {
        return Err(ConvertError::tensor(
            name,
            "bits",
            format!("{said}, as {} says", hint.file),
            format!("{bits} by its shape"),
        ));
    }
    if bits < 4 {
        return Err(ConvertError::unsupported(
            format!("tensor {name}: {bits}-bit codes"),
            "this version imports 4 and 8 bits; take a 4-bit version, or convert the float checkpoint with --quant int4",
        ));
    }
    Ok(bits as u8)
}

/// The group that `g_idx` spells out; `None` for a single group, whatever the index says.
pub(super) fn group_by_index(
    name: &str,
    raw: &RawTensor,
    k: usize,
    groups: usize,
) -> Result<Option<usize>, ConvertError> {
    if raw.dtype != Dtype::I32 || raw.shape != [k as u64] {
        let got = format!("{} {:?}", raw.dtype.name(), raw.shape);
        return Err(ConvertError::tensor(name, "type and shape", format!("i32 [{k}]"), got));
    }
    if groups == 1 {
        return Ok(None);
    }
    let index = raw.bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    // Some writers count groups from the end.
    let index: Vec<i64> = index.map(|g| if g < 0 { g as i64 + groups as i64 } else { g as i64 }).collect();
    let group = index.iter().take_while(|&&g| g == 0).count();
    if group == k {
        let expected = format!("{groups} groups, as the scales have");
        return Err(ConvertError::tensor(
            name,
            "groups",
            expected,
            "zeros only; remove the tensor if the groups are in order",
        ));
    }
    let trivial = group > 0 && index.iter().enumerate().all(|(i, &g)| g == (i / group) as i64);
    if !trivial {
        return Err(ConvertError::unsupported(
            format!("tensor {name}: columns are assigned to groups out of order (act-order, desc_act)"),
            "its import comes with a later version; quantize again with desc_act=false, or take a version without act-order",
        ));
    }
    Ok(Some(group))
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

/// Field `row` of the bitstream in row `group`.
fn field(words: &Words, group: usize, row: usize, bits: u8) -> u8 {
    let bit = row * bits as usize;
    (words.at(group, bit / 32) >> (bit % 32)) as u8 & mask(bits)
}

fn mask(bits: u8) -> u8 {
    (0xffu32 >> (8 - bits)) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hint(label: &str) -> Hint {
        Hint::new("config.json", &serde_json::json!({"quant_method": "gptq", "checkpoint_format": label})).unwrap()
    }

    #[test]
    fn values_decide_before_labels() {
        use Pattern::*;
        let decide = |patterns: &[Pattern], label: &str| {
            let named: Vec<_> = patterns.iter().map(|&p| ("m", p)).collect();
            convention(&named, &hint(label)).map_err(|e| e.to_string())
        };
        assert_eq!(decide(&[Low, Low, Absent], "gptq"), Ok(Convention::Mid));
        assert_eq!(decide(&[Absent, Absent], "gptq"), Ok(Convention::Mid));
        assert!(decide(&[Mixed, Absent], "gptq").unwrap_err().contains("got none"));
        assert_eq!(decide(&[Mid, Mid], "gptq"), Ok(Convention::Mid)); // vllm#38966
        assert_eq!(decide(&[Low, Low], "gptq_v2"), Ok(Convention::Mid));
        assert_eq!(decide(&[Mixed, Low], "gptq"), Ok(Convention::Less));
        assert_eq!(decide(&[Mixed, Mid], "gptq_v2"), Ok(Convention::Stored));
        assert!(decide(&[Mid, Low], "gptq").unwrap_err().contains("version 1"));
        assert!(decide(&[Mixed, Low], "gptq_v2").is_err());
        assert!(decide(&[Mixed, Mid], "gptq").is_err());
        let named = [("a", Mixed), ("b", Absent), ("c", Low)];
        let text = convention(&named, &hint("gptq")).unwrap_err().to_string();
        assert!(text.contains("tensor b.qzeros: zero-points: expected stored ones that differ, as a has"), "{text}");
        let sym = Hint { sym: Some(true), ..hint("gptq") };
        assert!(convention(&[("m", Mixed)], &sym).unwrap_err().to_string().contains("sym"));
    }

    #[test]
    fn bits_come_from_the_shape() {
        let bits = |rows, said: Option<u64>| bits_of("t", rows, 8, 8, 96, &Hint { bits: said, ..Hint::default() });
        assert_eq!(bits(12, None).unwrap(), 4);
        assert_eq!(bits(24, Some(8)).unwrap(), 8);
        assert!(bits(24, Some(4)).unwrap_err().to_string().contains("8 by its shape"));
        assert!(bits(9, None).unwrap_err().to_string().contains("3-bit"));
        assert!(bits(13, None).unwrap_err().to_string().contains("[96*bits/32, 8]"));
    }

    #[test]
    fn only_ordered_groups_pass() {
        let index = |g: &[i32]| {
            let bytes: Vec<u8> = g.iter().flat_map(|v| v.to_le_bytes()).collect();
            let raw = RawTensor {
                dtype: Dtype::I32,
                shape: vec![g.len() as u64],
                bytes: &bytes,
                rows: crate::source::Rows::InOrder,
            };
            group_by_index("t.g_idx", &raw, g.len(), 2).map_err(|e| e.to_string())
        };
        assert_eq!(index(&[0, 0, 0, 1, 1]), Ok(Some(3)));
        assert_eq!(index(&[-2, -2, -1, -1]), Ok(Some(2)));
        assert!(index(&[0, 1, 0, 1]).unwrap_err().contains("act-order"));
        assert!(index(&[0, 0, 0, 0]).unwrap_err().contains("zeros only"));
        assert!(index(&[1, 1, 0, 0]).is_err());
    }
}
