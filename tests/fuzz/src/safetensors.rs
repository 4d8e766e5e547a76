//! The safetensors reader.
//!
//! Input: byte 0 modulo 4 is the mode, then
//!
//! - 0: the file as it is;
//! - 1: u16 length of the data, then the JSON header; its length and the data, zeros, are made;
//! - 2: the JSON header; the data is as long as its offsets say;
//! - 3: an [`Arbitrary`] list of tensors from which a header is made that is mostly right.

use std::fmt::Write;

use arbitrary::{Arbitrary, Unstructured};
use quern_convert::source::safetensors::parse;

use crate::{LONGEST, cut, extended, memory::bounded};

/// One execution.
pub fn run(input: &[u8]) {
    file(input, |head, bytes| {
        let base = bytes.as_ptr_range();
        // An element of a shape takes two bytes of JSON and eight of memory, and vectors double: up to 12 a byte.
        match bounded("parse", head, 4 << 10, 32, || parse(bytes)) {
            Err(e) => assert!(!e.to_string().is_empty()),
            Ok(tensors) => {
                let header = u64::from_le_bytes(bytes[..8].try_into().expect("it was parsed")) as usize;
                let data: usize = tensors.values().map(|t| t.bytes.len()).sum();
                assert_eq!(8 + header + data, bytes.len(), "the tensors cover the data");
                for t in tensors.values() {
                    let range = t.bytes.as_ptr_range();
                    assert!(range.start >= base.start && range.end <= base.end);
                    let bits = t.dtype.bits().expect("safetensors has no blocks");
                    assert_eq!(t.shape.iter().product::<u64>() * bits, 8 * t.bytes.len() as u64);
                }
            }
        }
    });
}

/// Whether the file made from an input is read: for seeds.
pub fn passes(input: &[u8]) -> bool {
    file(input, |_, bytes| parse(bytes).is_ok())
}

/// Calls `f` with the length of what the input justifies and the file.
fn file<T>(input: &[u8], f: impl FnOnce(usize, &[u8]) -> T) -> T {
    let mut rest = input;
    let mode = cut(&mut rest, 1).first().copied().unwrap_or(0) % 4;
    let (header, data) = match mode {
        0 => return f(rest.len(), rest),
        1 => {
            let len = cut(&mut rest, 2).iter().rev().fold(0, |n, &b| n << 8 | b as usize);
            (rest.to_vec(), len)
        }
        2 => (rest.to_vec(), end(rest)),
        _ => made(rest),
    };
    let head = [&(header.len() as u64).to_le_bytes()[..], &header].concat();
    extended(&head, head.len() + data, |bytes| f(head.len(), bytes))
}

/// The largest end that a header names.
fn end(header: &[u8]) -> usize {
    let json: serde_json::Value = serde_json::from_slice(header).unwrap_or_default();
    let ends = json.as_object().into_iter().flatten().filter_map(|(_, t)| t.get("data_offsets")?.get(1)?.as_u64());
    ends.filter(|&e| e <= LONGEST as u64).max().unwrap_or(0) as usize
}

#[derive(Debug, Arbitrary)]
struct Tensor<'a> {
    name: &'a str,
    dtype: u8,
    shape: Vec<Size>,
    /// Moves the end and the next start.
    longer: Option<i8>,
    /// Moves the start only.
    later: Option<i8>,
    /// Put in front, not behind, what is there.
    front: bool,
}

#[derive(Debug, Arbitrary)]
enum Size {
    Small(u8),
    Any(u64),
    Power(u8),
}

const TYPES: [(&str, u64); 23] = [
    ("F32", 32),
    ("F16", 16),
    ("BF16", 16),
    ("I32", 32),
    ("F64", 64),
    ("I64", 64),
    ("U64", 64),
    ("U32", 32),
    ("I16", 16),
    ("U16", 16),
    ("I8", 8),
    ("U8", 8),
    ("BOOL", 8),
    ("F8_E4M3", 8),
    ("F8_E5M2", 8),
    ("F8_E8M0", 8),
    ("F8_E4M3FNUZ", 8),
    ("F8_E5M2FNUZ", 8),
    ("C64", 64),
    ("F6_E2M3", 6),
    ("F6_E3M2", 6),
    ("F4", 4),
    ("F33", 33),
];

/// A header and the length of its data.
fn made(bytes: &[u8]) -> (Vec<u8>, usize) {
    let tensors: Vec<Tensor> = Unstructured::new(bytes).arbitrary().unwrap_or_default();
    let mut entries = vec![];
    let mut at = 0u64;
    for t in tensors.iter().take(64) {
        let shape: Vec<u64> = t
            .shape
            .iter()
            .map(|s| match s {
                Size::Small(n) => *n as u64 % 17,
                Size::Any(n) => *n,
                Size::Power(n) => 1 << (n % 64),
            })
            .collect();
        let (dtype, bits) = TYPES[t.dtype as usize % TYPES.len()];
        let size = shape.iter().try_fold(bits, |n, &d| n.checked_mul(d)).unwrap_or(8) / 8;
        let start = at.wrapping_add_signed(t.later.unwrap_or(0).into());
        at = at.wrapping_add(size).wrapping_add_signed(t.longer.unwrap_or(0).into());
        let name = serde_json::to_string(t.name).expect("text can be written");
        let entry = format!(r#"{name}:{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{start},{at}]}}"#);
        entries.insert(if t.front { 0 } else { entries.len() }, entry);
    }
    let mut header = String::from("{");
    for (i, entry) in entries.iter().enumerate() {
        write!(header, "{}{entry}", if i > 0 { "," } else { "" }).expect("text can be written");
    }
    header.push('}');
    (header.into_bytes(), if at <= LONGEST as u64 { at as usize } else { 0 })
}
