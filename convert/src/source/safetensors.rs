//! safetensors: an 8-byte length, a JSON header, and the tensors' bytes.
//!
//! Total on any bytes, and as strict as the format's own library: every range has the size its dtype
//! and shape ask for, and the ranges cover the data exactly, without gaps or overlaps.

use std::{collections::BTreeMap, fmt};

use quern_models::FloatType;
use serde::{
    Deserialize, Deserializer,
    de::{Error, IgnoredAny, MapAccess, Visitor},
};

use super::{Dtype, RawTensor, Rows};
use crate::Malformed;

/// Longest header the format's library accepts.
const MAX_HEADER: u64 = 100_000_000;

/// Reads a file's bytes.
pub fn parse(bytes: &[u8]) -> Result<BTreeMap<String, RawTensor<'_>>, Malformed> {
    let short = |what: &str, needed, left: usize| Malformed::Short { what: what.into(), needed, left: left as u64 };
    let (len, rest) = bytes.split_first_chunk::<8>().ok_or_else(|| short("the header's length", 8, bytes.len()))?;
    let header_len = u64::from_le_bytes(*len);
    if header_len > MAX_HEADER {
        return Err(Malformed::field("safetensors header length", format!("at most {MAX_HEADER}"), header_len));
    }
    let (header, data) = rest
        .split_at_checked(header_len as usize)
        .ok_or_else(|| short("the safetensors header", header_len, rest.len()))?;
    let header: Header =
        serde_json::from_slice(header).map_err(|source| Malformed::Json { what: "safetensors header", source })?;

    let mut entries = header.0;
    entries.sort_by_key(|a| a.1.data_offsets);
    let mut at = 0;
    let mut tensors = BTreeMap::new();
    for (name, entry) in entries {
        let dtype = dtype(&entry.dtype).ok_or_else(|| {
            Malformed::field(format!("tensor {name}: dtype"), "one of the safetensors types", &entry.dtype)
        })?;
        let [start, end] = entry.data_offsets;
        if start != at || end < start {
            let got = format!("{start}..{end}");
            return Err(Malformed::field(format!("tensor {name}: bytes"), format!("a range that begins at {at}"), got));
        }
        let need = bytes_of(dtype, &entry.shape);
        if need != Some(end - start) {
            let expected =
                need.map_or("a size below 2^64".into(), |n| format!("{n} for {} {:?}", dtype.name(), entry.shape));
            return Err(Malformed::field(format!("tensor {name}: bytes"), expected, end - start));
        }
        let slice = data
            .get(start as usize..end as usize)
            .ok_or_else(|| short(&format!("tensor {name}"), end - start, data.len().saturating_sub(start as usize)))?;
        at = end;
        tensors.insert(name, RawTensor { dtype, shape: entry.shape, bytes: slice, rows: Rows::InOrder });
    }
    if at != data.len() as u64 {
        return Err(Malformed::field("bytes of all tensors", data.len(), at));
    }
    Ok(tensors)
}

/// Bytes of a tensor; `None` on overflow or a fraction of a byte.
fn bytes_of(dtype: Dtype, shape: &[u64]) -> Option<u64> {
    let bits = dtype.bits()?;
    let elements = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d))?;
    let bits = elements.checked_mul(bits)?;
    (bits % 8 == 0).then_some(bits / 8)
}

fn dtype(name: &str) -> Option<Dtype> {
    #[rustfmt::skip]
    const OTHER: [(&str, u64); 13] = [
        ("F64", 64), ("U64", 64), ("U32", 32), ("I16", 16), ("U16", 16), ("BOOL", 8),
        ("F8_E5M2", 8), ("F8_E4M3FNUZ", 8), ("F8_E5M2FNUZ", 8), ("C64", 64), ("F6_E2M3", 6), ("F6_E3M2", 6), ("F4", 4),
    ];
    Some(match name {
        "F32" => Dtype::Float(FloatType::F32),
        "F16" => Dtype::Float(FloatType::F16),
        "BF16" => Dtype::Float(FloatType::BF16),
        "I32" => Dtype::I32,
        "I64" => Dtype::I64,
        "I8" => Dtype::I8,
        "U8" => Dtype::U8,
        "F8_E4M3" => Dtype::E4M3,
        "F8_E8M0" => Dtype::E8M0,
        _ => OTHER.iter().find(|o| o.0 == name).map(|o| Dtype::Other(o.0, o.1))?,
    })
}

/// Tensors in the header's order. A name that comes twice is an error, not overwritten.
struct Header(Vec<(String, Entry)>);

#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut names = std::collections::HashSet::new();
                let mut entries = vec![];
                while let Some(name) = map.next_key::<String>()? {
                    if !names.insert(name.clone()) {
                        return Err(A::Error::custom(format!("tensor {name} comes twice")));
                    }
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        let entry = map.next_value().map_err(|e| A::Error::custom(format!("tensor {name}: {e}")))?;
                        entries.push((name, entry));
                    }
                }
                Ok(Header(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data: &[u8]) -> Vec<u8> {
        [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
    }

    const TWO: &str = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"I32","shape":[1],"data_offsets":[4,8]},"a":{"dtype":"F16","shape":[2,1],"data_offsets":[0,4]}}"#;

    #[test]
    fn reads_tensors_whatever_their_order() {
        let bytes = file(TWO, &[1, 2, 3, 4, 5, 6, 7, 8]);
        let tensors = parse(&bytes).unwrap();
        assert_eq!(tensors["a"].bytes, [1, 2, 3, 4]);
        assert_eq!((tensors["b"].dtype, &tensors["b"].shape[..]), (Dtype::I32, &[1][..]));
    }

    #[test]
    fn any_bytes_give_an_error_not_a_panic() {
        let bytes = file(TWO, &[0; 8]);
        for cut in 0..bytes.len() {
            parse(&bytes[..cut]).unwrap_err();
        }
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut bad = bytes.clone();
                bad[at] ^= 1 << bit;
                let _ = parse(&bad);
            }
        }
        for len in [u64::MAX, MAX_HEADER + 1, MAX_HEADER, 1 << 40] {
            let mut bad = bytes.clone();
            bad[..8].copy_from_slice(&len.to_le_bytes());
            parse(&bad).unwrap_err();
        }
    }

    #[test]
    fn contradictions_are_named() {
        let one = |entry: &str| format!(r#"{{"t":{entry}}}"#);
        let huge = one(r#"{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}"#);
        let cases = [
            (one(r#"{"dtype":"F32","shape":[2],"data_offsets":[0,4]}"#), "tensor t: bytes: expected 8"),
            (one(r#"{"dtype":"F32","shape":[1],"data_offsets":[4,8]}"#), "begins at 0"),
            (one(r#"{"dtype":"F32","shape":[1],"data_offsets":[4,0]}"#), "begins at 0"),
            (one(r#"{"dtype":"F32","shape":[1],"data_offsets":[0,-4]}"#), "tensor t"),
            (one(r#"{"dtype":"F33","shape":[1],"data_offsets":[0,4]}"#), "F33"),
            (one(r#"{"dtype":"F4","shape":[1],"data_offsets":[0,1]}"#), "tensor t"),
            (one(r#"{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#), "tensor t needs 8 bytes, 4 are left"),
            (huge, "below 2^64"),
            ("{}".into(), "bytes of all tensors: expected 4, got 0"),
            (r#"{"t":1}"#.into(), "tensor t"),
            (r#"{"t":{"dtype":"F16","shape":[1],"data_offsets":[0,2]},"t":{"dtype":"F16","shape":[1],"data_offsets":[2,4]}}"#.into(), "tensor t comes twice"),
        ];
        for (header, message) in cases {
            let text = parse(&file(&header, &[0; 4])).unwrap_err().to_string();
            assert!(text.contains(message), "{header}: {text}");
        }
    }
}
