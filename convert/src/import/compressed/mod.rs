//! Checkpoints of compressed-tensors (llm-compressor) and of the FP8 and FP4 formats with the same tensors.
//!
//! | stored as | what it is | becomes |
//! |---|---|---|
//! | `weight_packed` i32 | pack-quantized integers of 2 to 8 bits (`packed`) | int4, int8 |
//! | `weight_packed` u8 | MXFP4, NVFP4 (`fp4`) | fp4 |
//! | `weight` i8 | int-quantized, naive-quantized (`bytes`) | int8 |
//! | `weight` F8_E4M3 | float-quantized, fp8, fbgemm_fp8, ModelOpt FP8, MXFP8 (`bytes`) | fp8 |
//! | `weight` u8 | ModelOpt NVFP4 (`fp4`) | fp4 |
//!
//! The tensors decide; the config is checked against them ([`Claims`]). Codes and scales are kept exactly.
//! Formats: compressed-tensors 0.9 to 0.20 (`compressors/`), transformers `integrations/finegrained_fp8.py`.

mod bytes;
mod config;
mod fp4;
mod grid;
mod packed;

use std::{cell::RefCell, collections::BTreeSet};

pub use self::{bytes::Bytes, config::Claims, fp4::Fp4, grid::Grid, packed::Packed};

use self::grid::Kind;
use super::Integers;
use crate::{
    ConvertError,
    source::{Checkpoint, Dtype, RawTensor},
};

/// Why the file's schemes do not hold groups of so many columns, if they do not.
fn misfit(group: usize) -> Option<String> {
    (!group.is_multiple_of(16)).then(|| format!("groups of {group} columns are no multiple of 16"))
}

/// The tensors of a module.
#[derive(Debug)]
pub struct Parts<'a, 'b> {
    source: &'b Checkpoint<'a>,
    module: &'b str,
    /// Names of those that were read.
    read: RefCell<BTreeSet<String>>,
}

/// Parts of a module that say how its input or output is to be quantized.
const ACTIVATIONS: [&str; 7] = [
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "azp_adj",
    "output_scale",
    "output_zero_point",
    "activation_scale",
];

/// Parts of an attention, or of its projections, that say how keys and values are to be quantized.
const CACHE: [&str; 7] = ["k_scale", "v_scale", "q_scale", "prob_scale", "kv_scale", "k_zero_point", "v_zero_point"];

impl<'a, 'b> Parts<'a, 'b> {
    /// Those of `module`.
    pub fn new(source: &'b Checkpoint<'a>, module: &'b str) -> Self {
        Parts { source, module, read: RefCell::default() }
    }

    /// The integers or small floats of an `[n, k]` module; `None` if its tensors are of another format.
    pub fn take(&self, n: usize, k: usize, claims: &Claims) -> Result<Option<Box<dyn Integers + 'a>>, ConvertError> {
        let packed = self.get("weight_packed");
        let weight = self.get("weight");
        if let (Some((name, _)), Some(_)) = (&packed, &weight) {
            return Err(ConvertError::tensor(name, "form", "packed codes or a weight", "both"));
        }
        let codes: Box<dyn Integers + 'a> = match (packed, weight) {
            (Some((_, raw)), _) if raw.dtype == Dtype::U8 => Box::new(Fp4::new(self, "weight_packed", n, k, claims)?),
            (Some(_), _) => Box::new(Packed::new(self, n, k, claims)?),
            (None, Some((name, raw))) => match raw.dtype {
                Dtype::I8 | Dtype::E4M3 => Box::new(Bytes::new(self, n, k, claims)?),
                Dtype::U8 if self.get("weight_scale").is_some() => Box::new(Fp4::new(self, "weight", n, k, claims)?),
                Dtype::Other(kind, 8) if kind.starts_with("F8_") => {
                    return Err(ConvertError::unsupported(
                        format!("tensor {name}: weights of type {kind}"),
                        "this version imports the 8-bit floats F8_E4M3; take such a version, or the float checkpoint",
                    ));
                }
                _ => return Ok(None),
            },
            (None, None) => return Ok(None),
        };
        Ok(Some(codes))
    }

    /// Whether [`take`](Self::take) would take the module.
    pub fn present(&self) -> bool {
        let whole = |(_, raw): (String, &RawTensor)| match raw.dtype {
            Dtype::U8 => self.get("weight_scale").is_some(),
            other => matches!(other, Dtype::I8 | Dtype::E4M3),
        };
        self.get("weight_packed").is_some() || self.get("weight").is_some_and(whole)
    }

    /// Names of the tensors that [`take`](Self::take) read; others of the module have no place in its format.
    pub fn names(self) -> BTreeSet<String> {
        self.read.into_inner()
    }

    fn name(&self, part: &str) -> String {
        format!("{}.{part}", self.module)
    }

    fn get(&self, part: &str) -> Option<(String, &RawTensor<'a>)> {
        let (name, raw) = self.source.tensors.get_key_value(&self.name(part))?;
        self.read.borrow_mut().insert(name.clone());
        Some((name.clone(), raw))
    }

    fn need(&self, part: &str) -> Result<(String, &RawTensor<'a>), ConvertError> {
        self.get(part).ok_or_else(|| ConvertError::Missing {
            origin: self.source.name.clone(),
            tensor: self.name(part),
            what: format!("{} is quantized", self.module),
        })
    }

    fn scales(&self, part: &str, n: usize, k: usize, claims: &Claims) -> Result<Grid<'a>, ConvertError> {
        let (name, raw) = self.need(part)?;
        Grid::new(&name, raw, Kind::of(&name, raw)?, n, k, claims)
    }

    /// Checks `weight_shape`, if it is there.
    fn check_shape(&self, n: usize, k: usize) -> Result<(), ConvertError> {
        self.get("weight_shape").map_or(Ok(()), |(name, raw)| packed::shape_says(&name, raw, n, k))
    }

    /// An error if there are zero-points of floats other than zeros, which early versions stored.
    fn no_zeros(&self) -> Result<(), ConvertError> {
        match self.get("weight_zero_point") {
            Some((name, raw)) if raw.bytes.iter().any(|&b| b & 0x7f != 0) => {
                Err(ConvertError::tensor(&name, "zero-points", "none, or zeros, for floats", "others"))
            }
            _ => Ok(()),
        }
    }

    /// A single float.
    fn scalar(&self, part: &str) -> Result<f32, ConvertError> {
        let (name, raw) = self.need(part)?;
        match raw.dtype {
            Dtype::Float(kind) if raw.bytes.len() == kind.size() => Ok(kind.read(raw.bytes, 0)),
            other => {
                let got = format!("{} {:?}", other.name(), raw.shape);
                Err(ConvertError::tensor(&name, "type and shape", "a single float", got))
            }
        }
    }
}

/// Gives their place to tensors that do not change the weights, and says so.
///
/// These are scales for activations and for the cache, which this program computes in its own modes, and scales beside
/// weights that are not quantized, which some writers leave there uninitialized.
pub fn set_aside(source: &Checkpoint, claims: &Claims, used: &mut BTreeSet<String>, notes: &mut Vec<String>) {
    let (mut activations, mut cache, mut idle) = (claims.activations, claims.cache, vec![]);
    for name in source.tensors.keys().filter(|name| !used.contains(*name)).cloned().collect::<Vec<_>>() {
        let Some((module, part)) = name.rsplit_once('.') else { continue };
        let float = source.tensors.get(&format!("{module}.weight")).is_some_and(|w| matches!(w.dtype, Dtype::Float(_)));
        if ACTIVATIONS.contains(&part) {
            activations = true;
        } else if CACHE.contains(&part) {
            cache = true;
        } else if ["weight_scale", "weight_scale_inv", "weight_zero_point"].contains(&part) && float {
            idle.push(name.clone());
        } else {
            continue;
        }
        used.insert(name);
    }
    if activations {
        notes.push(
            "the checkpoint asks for quantized activations: its weights are kept as they are, activations are computed \
             in this program's own modes"
                .into(),
        );
    }
    if cache {
        notes.push("the checkpoint asks for a quantized KV cache: its scales are not used".into());
    }
    if let Some(first) = idle.first() {
        notes.push(format!(
            "{} scale(s) beside weights that are plain floats are ignored, the first is {first}",
            idle.len()
        ));
    }
}
