//! GGUF versions 2 and 3: metadata and tensors, without knowing any architecture.
//!
//! Total on any bytes: every length is checked against the bytes left, vectors grow as elements are
//! read (so a count can claim anything), numeric arrays stay slices of the file. Tensors must be
//! aligned, in bounds and disjoint.

use std::collections::{BTreeMap, HashSet};

use quern_models::FloatType;

use super::Block;
use crate::{Malformed, source::Dtype};

/// A parsed file, borrowing from its bytes.
#[derive(Debug)]
pub struct Gguf<'a> {
    /// Metadata.
    pub meta: BTreeMap<&'a str, Value<'a>>,
    /// Tensors, in file order.
    pub tensors: Vec<Tensor<'a>>,
}

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value<'a> {
    /// Any unsigned integer.
    Unsigned(u64),
    /// Any signed integer.
    Signed(i64),
    /// Either float.
    Float(f64),
    /// A flag.
    Bool(bool),
    /// Text.
    Text(&'a str),
    /// An array of texts.
    Texts(Vec<&'a str>),
    /// An array of numbers or flags.
    Numbers(Numbers<'a>),
}

/// An array of numbers as it lies in the file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Numbers<'a> {
    kind: Scalar,
    bytes: &'a [u8],
}

/// A tensor as the file describes it.
#[derive(Debug, Clone)]
pub struct Tensor<'a> {
    /// Name in the file.
    pub name: &'a str,
    /// Shape, slowest dimension first: the reverse of the file's order.
    pub shape: Vec<u64>,
    /// Element type.
    pub dtype: Dtype,
    /// The elements.
    pub bytes: &'a [u8],
}

/// Reads a file's bytes.
pub fn parse(bytes: &[u8]) -> Result<Gguf<'_>, Malformed> {
    let mut r = Reader { bytes, at: 0 };
    let magic = r.take(4, "the magic")?;
    if magic != b"GGUF" {
        return Err(Malformed::field("magic", "GGUF", format!("{magic:02x?}")));
    }
    match r.u32("the version")? {
        2 | 3 => {}
        v if v.swap_bytes() <= 0xffff => {
            return Err(Malformed::Unsupported {
                what: "a big-endian GGUF file".into(),
                next: "download the little-endian one, or convert it with gguf_convert_endian.py of llama.cpp".into(),
            });
        }
        v => return Err(Malformed::field("GGUF version", "2 or 3", v)),
    }
    let tensor_count = r.u64("the tensor count")?;
    let meta_count = r.u64("the metadata count")?;
    let mut meta = BTreeMap::new();
    for i in 0..meta_count {
        let key = r.text(&format!("metadata key {i}"))?;
        let value = r.value(key)?;
        if meta.insert(key, value).is_some() {
            return Err(Malformed::field("metadata keys", "each once", format!("{key} twice")));
        }
    }
    let mut infos = vec![];
    let mut names = HashSet::new();
    for i in 0..tensor_count {
        let info = r.tensor(i)?;
        if !names.insert(info.0) {
            return Err(Malformed::field("tensor names", "each once", format!("{} twice", info.0)));
        }
        infos.push(info);
    }
    let alignment = match meta.get("general.alignment") {
        None => 32,
        Some(Value::Unsigned(a)) if a.is_power_of_two() && (8..=1 << 20).contains(a) => *a,
        Some(v) => {
            return Err(Malformed::field("general.alignment", "a power of two from 8 to 2^20", format!("{v:?}")));
        }
    };
    let data_at = if infos.is_empty() { bytes.len() as u64 } else { (r.at as u64).next_multiple_of(alignment) };
    Ok(Gguf { meta, tensors: place(infos, bytes, data_at, alignment)? })
}

/// Name, shape, type and offset of a tensor.
type Info<'a> = (&'a str, Vec<u64>, Dtype, u64);

/// Finds every tensor's bytes and checks that none overlap.
fn place<'a>(
    infos: Vec<Info<'a>>,
    bytes: &'a [u8],
    data_at: u64,
    alignment: u64,
) -> Result<Vec<Tensor<'a>>, Malformed> {
    let mut ranges = vec![];
    let mut tensors = vec![];
    for (name, shape, dtype, offset) in infos {
        let field = |expected: &str, got: String| Malformed::field(format!("tensor {name}"), expected, got);
        if offset % alignment != 0 {
            return Err(field(&format!("an offset that is a multiple of {alignment}"), offset.to_string()));
        }
        let size = bytes_of(dtype, &shape)
            .ok_or_else(|| field(&format!("a shape that {} can store", dtype.name()), format!("{shape:?}")))?;
        let start = data_at.checked_add(offset);
        let end = start.and_then(|s| s.checked_add(size));
        let (Some(start), Some(end)) = (start, end.filter(|&e| e <= bytes.len() as u64)) else {
            let left = (bytes.len() as u64).saturating_sub(start.unwrap_or(u64::MAX));
            return Err(Malformed::Short { what: format!("tensor {name}"), needed: size, left });
        };
        ranges.push((start, end, name));
        tensors.push(Tensor { name, shape, dtype, bytes: &bytes[start as usize..end as usize] });
    }
    ranges.sort();
    for pair in ranges.windows(2) {
        if pair[1].0 < pair[0].1 {
            return Err(Malformed::field(
                "tensor ranges",
                "disjoint",
                format!("{} and {} overlap", pair[0].2, pair[1].2),
            ));
        }
    }
    Ok(tensors)
}

/// Bytes of a tensor; `None` when they overflow or a row is no whole number of blocks.
fn bytes_of(dtype: Dtype, shape: &[u64]) -> Option<u64> {
    let elements = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d))?;
    match dtype {
        Dtype::Block(b) => {
            let columns = b.columns() as u64;
            (shape.last()? % columns == 0).then_some(elements / columns)?.checked_mul(b.bytes() as u64)
        }
        other => elements.checked_mul(other.bits()? / 8),
    }
}

/// Type of a metadata scalar.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Scalar {
    Unsigned(usize),
    Signed(usize),
    Float(usize),
    Bool,
}

impl Scalar {
    fn of(id: u32) -> Option<Scalar> {
        Some(match id {
            0 => Scalar::Unsigned(1),
            1 => Scalar::Signed(1),
            2 => Scalar::Unsigned(2),
            3 => Scalar::Signed(2),
            4 => Scalar::Unsigned(4),
            5 => Scalar::Signed(4),
            6 => Scalar::Float(4),
            7 => Scalar::Bool,
            10 => Scalar::Unsigned(8),
            11 => Scalar::Signed(8),
            12 => Scalar::Float(8),
            _ => return None,
        })
    }

    fn size(self) -> usize {
        match self {
            Scalar::Unsigned(n) | Scalar::Signed(n) | Scalar::Float(n) => n,
            Scalar::Bool => 1,
        }
    }

    /// `bytes` has [`size`](Self::size) bytes.
    fn read<'a>(self, bytes: &[u8]) -> Value<'a> {
        let mut wide = [0; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        let unsigned = u64::from_le_bytes(wide);
        match self {
            Scalar::Unsigned(_) => Value::Unsigned(unsigned),
            Scalar::Signed(n) => {
                let unused = 64 - 8 * n as u32;
                Value::Signed((unsigned << unused) as i64 >> unused)
            }
            Scalar::Float(4) => Value::Float(f32::from_bits(unsigned as u32) as f64),
            Scalar::Float(_) => Value::Float(f64::from_bits(unsigned)),
            Scalar::Bool => Value::Bool(unsigned != 0),
        }
    }
}

impl<'a> Numbers<'a> {
    /// Elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.kind.size()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The elements as they lie in the file.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The elements, one by one.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let kind = self.kind;
        self.bytes.chunks_exact(kind.size()).map(move |b| kind.read(b))
    }
}

impl Value<'_> {
    /// A whole number that is not negative, of any integer type.
    pub fn whole(&self) -> Option<u64> {
        match self {
            Value::Unsigned(n) => Some(*n),
            Value::Signed(n) => u64::try_from(*n).ok(),
            _ => None,
        }
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: u64, what: &str) -> Result<&'a [u8], Malformed> {
        let left = &self.bytes[self.at..];
        if len > left.len() as u64 {
            return Err(Malformed::Short { what: what.into(), needed: len, left: left.len() as u64 });
        }
        self.at += len as usize;
        Ok(&left[..len as usize])
    }

    fn u32(&mut self, what: &str) -> Result<u32, Malformed> {
        let b = self.take(4, what)?;
        Ok(u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
    }

    fn u64(&mut self, what: &str) -> Result<u64, Malformed> {
        let low = self.u32(what)? as u64;
        Ok(low | (self.u32(what)? as u64) << 32)
    }

    fn text(&mut self, what: &str) -> Result<&'a str, Malformed> {
        let len = self.u64(what)?;
        let bytes = self.take(len, what)?;
        std::str::from_utf8(bytes)
            .map_err(|_| Malformed::field(what, "UTF-8", format!("{:02x?}", &bytes[..bytes.len().min(16)])))
    }

    fn value(&mut self, key: &str) -> Result<Value<'a>, Malformed> {
        match self.u32(key)? {
            8 => Ok(Value::Text(self.text(key)?)),
            9 => self.array(key),
            id => {
                let kind = Scalar::of(id).ok_or_else(|| Malformed::field(format!("{key}: type"), "0 to 12", id))?;
                Ok(kind.read(self.take(kind.size() as u64, key)?))
            }
        }
    }

    fn array(&mut self, key: &str) -> Result<Value<'a>, Malformed> {
        let id = self.u32(key)?;
        let count = self.u64(key)?;
        if id == 8 {
            let mut texts = vec![];
            for _ in 0..count {
                texts.push(self.text(key)?);
            }
            return Ok(Value::Texts(texts));
        }
        let kind = Scalar::of(id)
            .ok_or_else(|| Malformed::field(format!("{key}: element type"), "a number, a flag or text", id))?;
        let len = count.saturating_mul(kind.size() as u64);
        Ok(Value::Numbers(Numbers { kind, bytes: self.take(len, key)? }))
    }

    fn tensor(&mut self, i: u64) -> Result<Info<'a>, Malformed> {
        let name = self.text(&format!("the name of tensor {i}"))?;
        let dims = self.u32(name)?;
        if !(1..=4).contains(&dims) {
            return Err(Malformed::field(format!("tensor {name}: dimensions"), "1 to 4", dims));
        }
        let mut shape = vec![];
        for _ in 0..dims {
            shape.push(self.u64(name)?);
        }
        shape.reverse();
        if shape.contains(&0) {
            return Err(Malformed::field(format!("tensor {name}: shape"), "no zero", format!("{shape:?}")));
        }
        let id = self.u32(name)?;
        let dtype = dtype(id).map_err(|unknown| Malformed::Unsupported {
            what: format!("tensor {name} has GGUF type {unknown}"),
            next: format!(
                "this version imports F32, F16, BF16, {}; take such a file of the model, or convert the safetensors \
                 version",
                Block::ALL.map(Block::name).join(", ")
            ),
        })?;
        Ok((name, shape, dtype, self.u64(name)?))
    }
}

/// The type with an id, or the name of one we do not import.
fn dtype(id: u32) -> Result<Dtype, String> {
    // By id; a dash is one that is imported, or was never used.
    const NAMES: &str = "- - - - - - - - - Q8_1 - - - - - Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S - IQ3_S IQ2_S - I8 I16 - I64 \
                         F64 IQ1_M - Q4_0_4_4 Q4_0_4_8 Q4_0_8_8 TQ1_0 TQ2_0 IQ4_NL_4_4 IQ4_NL_4_8 IQ4_NL_8_8 - NVFP4";
    Ok(match id {
        0 => Dtype::Float(FloatType::F32),
        1 => Dtype::Float(FloatType::F16),
        30 => Dtype::Float(FloatType::BF16),
        26 => Dtype::I32,
        _ => match Block::of(id) {
            Some(block) => Dtype::Block(block),
            None => {
                let name = NAMES.split_whitespace().nth(id as usize).filter(|n| *n != "-");
                return Err(name.map_or_else(|| format!("number {id}"), String::from));
            }
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(s: &str) -> Vec<u8> {
        [&(s.len() as u64).to_le_bytes()[..], s.as_bytes()].concat()
    }

    /// Two keys, a text array, and two tensors of type `id`.
    fn file(id: u32) -> Vec<u8> {
        let mut b = b"GGUF".to_vec();
        b.extend(3u32.to_le_bytes());
        b.extend(2u64.to_le_bytes());
        b.extend(3u64.to_le_bytes());
        b.extend([&text("a")[..], &[5, 0, 0, 0], &(-3i32).to_le_bytes()].concat());
        b.extend([&text("list")[..], &[9, 0, 0, 0, 8, 0, 0, 0], &2u64.to_le_bytes(), &text("x"), &text("yz")].concat());
        b.extend([&text("numbers")[..], &[9, 0, 0, 0, 2, 0, 0, 0], &3u64.to_le_bytes(), &[1, 0, 2, 0, 3, 1]].concat());
        for (name, offset) in [("t", 0u64), ("u", 32)] {
            b.extend(text(name));
            b.extend(2u32.to_le_bytes());
            b.extend(32u64.to_le_bytes());
            b.extend(1u64.to_le_bytes());
            b.extend(id.to_le_bytes());
            b.extend(offset.to_le_bytes());
        }
        b.resize(b.len().next_multiple_of(32), 0);
        b.extend((0..50).map(|i| i as u8));
        b
    }

    #[test]
    fn reads_metadata_and_tensors() {
        let bytes = file(2);
        let gguf = parse(&bytes).unwrap();
        assert_eq!(gguf.meta["a"], Value::Signed(-3));
        assert_eq!(gguf.meta["list"], Value::Texts(vec!["x", "yz"]));
        let Value::Numbers(numbers) = &gguf.meta["numbers"] else { panic!() };
        assert_eq!(numbers.iter().map(|v| v.whole().unwrap()).collect::<Vec<_>>(), [1, 2, 259]);
        assert_eq!((gguf.tensors[1].name, &gguf.tensors[1].shape[..]), ("u", &[1, 32][..]));
        assert_eq!(gguf.tensors[1].bytes[0], 32);
        assert_eq!(gguf.tensors[0].bytes.len(), 18);
    }

    #[test]
    fn any_bytes_give_an_error_not_a_panic() {
        let bytes = file(2);
        for cut in 0..bytes.len() {
            parse(&bytes[..cut]).unwrap_err();
        }
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut bad = bytes.clone();
                bad[at] ^= 1 << bit;
                let _ = parse(&bad);
            }
            // A giant length anywhere: at every place that holds one, this must end quickly.
            if at + 8 <= bytes.len() {
                for giant in [u64::MAX, 1 << 62, 1 << 40] {
                    let mut bad = bytes.clone();
                    bad[at..at + 8].copy_from_slice(&giant.to_le_bytes());
                    let _ = parse(&bad);
                }
            }
        }
    }

    #[test]
    fn what_is_not_read_is_named() {
        let mut big = file(2);
        big[4..8].copy_from_slice(&3u32.to_be_bytes());
        let mut old = file(2);
        old[4] = 1;
        let cases = [
            (big, "big-endian"),
            (old, "GGUF version: expected 2 or 3, got 1"),
            (file(16), "tensor t has GGUF type IQ2_XXS"),
            (file(99), "type number 99"),
            ([file(8), vec![0; 16]].concat(), "overlap"),
            (file(0), "tensor t needs 128 bytes"),
            (b"PK\x03\x04".to_vec(), "magic: expected GGUF"),
        ];
        for (bytes, message) in cases {
            let text = parse(&bytes).unwrap_err().to_string();
            assert!(text.contains(message), "{text}");
        }
    }
}
