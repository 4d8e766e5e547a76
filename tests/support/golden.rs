//! Golden numbers: `golden.safetensors` and `golden.json` beside a fixture.

use std::{collections::BTreeMap, fs, path::Path};

use quern_convert::source::{Dtype, RawTensor, safetensors};
use quern_models::FloatType;
use serde_json::{Value, json};

/// A golden file's tensors.
pub struct Golden {
    floats: BTreeMap<String, Floats>,
    ids: BTreeMap<String, Vec<u32>>,
    /// golden.json, or null.
    pub json: Value,
}

/// A float tensor, `[rows, cols]`; a vector is one row.
#[derive(Debug, Clone, PartialEq)]
pub struct Floats {
    pub cols: usize,
    pub data: Vec<f32>,
}

impl Golden {
    /// Reads what is in a fixture's folder.
    pub fn read(dir: &Path) -> Golden {
        let mut golden = Golden::of(&fs::read(dir.join("golden.safetensors")).unwrap());
        golden.json = serde_json::from_slice(&fs::read(dir.join("golden.json")).unwrap()).unwrap();
        golden
    }

    /// Reads a safetensors file's bytes.
    pub fn of(bytes: &[u8]) -> Golden {
        let (mut floats, mut ids) = (BTreeMap::new(), BTreeMap::new());
        for (name, raw) in safetensors::parse(bytes).unwrap() {
            match raw.dtype {
                Dtype::Float(kind) => {
                    let data = (0..raw.bytes.len() / kind.size()).map(|i| kind.read(raw.bytes, i)).collect();
                    let cols = raw.shape.last().map_or(1, |&cols| cols as usize);
                    floats.insert(name, Floats { cols, data });
                }
                Dtype::I64 => {
                    let id = |b: &[u8]| u32::try_from(i64::from_le_bytes(b.try_into().unwrap())).unwrap();
                    ids.insert(name, raw.bytes.chunks_exact(8).map(id).collect());
                }
                other => panic!("{name}: {other:?} in a golden file"),
            }
        }
        Golden { floats, ids, json: Value::Null }
    }

    pub fn floats(&self, name: &str) -> &Floats {
        self.floats.get(name).unwrap_or_else(|| panic!("{name} is not in the golden file"))
    }

    pub fn has(&self, name: &str) -> bool {
        self.floats.contains_key(name)
    }

    /// The float tensors whose names start with `prefix`, by the rest of their names.
    pub fn named(&self, prefix: &str) -> impl Iterator<Item = (&str, &Floats)> {
        self.floats.iter().filter_map(move |(name, floats)| Some((name.strip_prefix(prefix)?, floats)))
    }

    pub fn ids(&self, name: &str) -> &[u32] {
        self.ids.get(name).unwrap_or_else(|| panic!("{name} is not in the golden file"))
    }

    /// Logits on the dense weights, activations not rounded.
    pub fn weights_only(&self) -> &Floats {
        self.floats.get("logits_weight_only").unwrap_or_else(|| self.floats("logits"))
    }

    /// The continuation, and `logits`, are of activations that the checkpoint's own scheme rounds.
    pub fn rounds_activations(&self) -> bool {
        self.json["activation_quant"] == true
    }

    /// Dense weights of some modules, by the checkpoint's names: their first rows.
    pub fn dense(&self) -> impl Iterator<Item = (&str, &Floats)> {
        self.floats.iter().filter_map(|(name, floats)| Some((name.strip_prefix("dequant.")?, floats)))
    }

    /// The issue's bound for exact mode: 1e-5 of the range of logits, or 5 times what the golden
    /// itself moves when every weight moves by a millionth, whichever is larger.
    pub fn exact_bound(&self, range: f32) -> f32 {
        let noise = self.json.get("weight_noise_1e6_dev").and_then(Value::as_f64).unwrap_or(0.0) as f32;
        (1e-5 * range).max(5.0 * noise)
    }
}

impl Floats {
    pub fn rows(&self) -> impl Iterator<Item = &[f32]> {
        self.data.chunks_exact(self.cols)
    }

    pub fn range(&self) -> f32 {
        range(&self.data)
    }
}

/// Largest less smallest.
pub fn range(values: &[f32]) -> f32 {
    let (low, high) = values.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(l, h), &x| (l.min(x), h.max(x)));
    high - low
}

/// Largest difference; infinite where one side is NaN or the lengths differ.
pub fn distance(a: &[f32], b: &[f32]) -> f32 {
    if a.len() != b.len() {
        return f32::INFINITY;
    }
    let apart = |(a, b): (&f32, &f32)| if (a - b).is_nan() { f32::INFINITY } else { (a - b).abs() };
    a.iter().zip(b).map(apart).fold(0.0, f32::max)
}

/// Difference of the two largest.
pub fn margin(logits: &[f32]) -> f32 {
    let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for &x in logits {
        if x > first {
            (first, second) = (x, first);
        } else if x > second {
            second = x;
        }
    }
    first - second
}

/// A safetensors file of these tensors.
pub fn written(tensors: &BTreeMap<String, RawTensor>) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), vec![]);
    for (name, raw) in tensors {
        let (start, dtype) = (data.len(), raw.dtype.name().to_uppercase());
        data.extend_from_slice(raw.bytes);
        let entry = json!({ "dtype": dtype, "shape": raw.shape, "data_offsets": [start, data.len()] });
        header.insert(name.clone(), entry);
    }
    let header = Value::Object(header).to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
}

/// A whole safetensors file with one f16 tensor, byte for byte as the library's `save_file` with
/// metadata `{"format": "pt"}` writes it.
pub fn one_f16_tensor(name: &str, shape: [usize; 2], values: impl Iterator<Item = f32>) -> Vec<u8> {
    let [n, k] = shape;
    let header = format!(
        r#"{{"__metadata__":{{"format":"pt"}},"{name}":{{"dtype":"F16","shape":[{n},{k}],"data_offsets":[0,{}]}}}}"#,
        n * k * 2
    );
    let len = header.len().next_multiple_of(8);
    let mut bytes = (len as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(8 + len, b' ');
    values.for_each(|x| FloatType::F16.push(x, &mut bytes));
    assert_eq!(bytes.len(), 8 + len + n * k * 2);
    bytes
}
