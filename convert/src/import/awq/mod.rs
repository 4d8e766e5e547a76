//! AWQ, 4 bits, in any of its three byte orders.
//!
//! | | `qweight` | zero-points | `scales` |
//! |---|---|---|---|
//! | [`gemm`] | i32 `[K, N/8]` | `qzeros` i32 `[G, N/8]` | `[G, N]` |
//! | [`gemv`] | i32 `[N, K/8]` | `qzeros` i32 `[N, W/8]` | `[N, W]`, `W >= G` |
//! | [`fast`] (`gemv_fast`, `llm-awq`) | i16 `[N/4, K]` | `qzeros` or `scaled_zeros` f16 `[W, N]` | `[W, N]` |
//!
//! Zero-points are stored as they are, in the last order as `-s * z`. The format has no activation order: a `g_idx`
//! may only say what the shapes do.

pub mod fast;
pub mod gemm;
pub mod gemv;

use std::{cell::RefCell, collections::BTreeSet};

use self::{fast::Fast, gemm::Gemm, gemv::Gemv};
use super::{Integers, config::Hint, gptq::index::Index, group_of};
use crate::{
    ConvertError,
    source::{Checkpoint, Dtype, RawTensor},
};

/// A byte order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// AutoAWQ's usual one.
    Gemm,
    /// Codes along the rows of W.
    Gemv,
    /// Four rows interleaved, for kernels that read 16-bit words.
    Fast,
}

impl Packing {
    /// Name as configs write it.
    pub fn name(self) -> &'static str {
        match self {
            Packing::Gemm => "gemm",
            Packing::Gemv => "gemv",
            Packing::Fast => "gemv_fast",
        }
    }

    /// The one that the shapes of an `[n, k]` linear's tensors fit, `claimed` if several do.
    pub fn of(
        qweight: &RawTensor,
        scales: Option<&RawTensor>,
        [n, k]: [usize; 2],
        claimed: Option<Packing>,
    ) -> Option<Packing> {
        let is = |rows: usize, cols: usize| qweight.shape == [rows as u64, cols as u64];
        let scales_have = |axis: usize| scales.is_none_or(|s| s.shape.get(axis) == Some(&(n as u64)));
        // Where both are as long: nobody makes groups of less than eight columns.
        let of_eight =
            scales.is_none_or(|s| s.shape.first().is_some_and(|&groups| groups <= k as u64 / 8 || groups == 1));
        let fits = |packing: &Packing| match packing {
            Packing::Fast => matches!(qweight.dtype, Dtype::Other("I16", _)) && is(n / 4, k),
            Packing::Gemm => qweight.dtype == Dtype::I32 && is(k, n / 8) && scales_have(1) && of_eight,
            Packing::Gemv => qweight.dtype == Dtype::I32 && is(n, k / 8) && scales_have(0),
        };
        claimed.into_iter().chain([Packing::Fast, Packing::Gemm, Packing::Gemv]).find(fits)
    }
}

/// The tensors of one module, before their order is known.
struct Parts<'a, 'b> {
    source: &'b Checkpoint<'a>,
    module: &'b str,
    n: usize,
    k: usize,
    hint: &'b Hint,
    /// Names of those that were read.
    read: RefCell<BTreeSet<String>>,
}

/// What came of a module's tensors, and the names of those that were read.
pub type Opened<'a> = (Box<dyn Integers + 'a>, BTreeSet<String>);

/// Takes the tensors of `module`, an `[n, k]` linear.
pub fn open<'a>(
    source: &Checkpoint<'a>,
    module: &str,
    n: usize,
    k: usize,
    hint: &Hint,
) -> Result<Opened<'a>, ConvertError> {
    let parts = Parts { source, module, n, k, hint, read: RefCell::default() };
    let (name, raw) = parts.need("qweight")?;
    if let Some(said) = hint.bits.filter(|&b| b != 4 && !hint.per_module) {
        let expected = format!("{said}, as {} says", hint.file);
        return Err(ConvertError::tensor(&name, "bits", expected, "4 by its shape"));
    }
    let scales = parts.get("scales").map(|s| s.1);
    let packing = match Packing::of(raw, scales, [n, k], hint.packing) {
        Some(fits) => fits,
        // The one that its error messages are to name.
        None => match (raw.dtype, hint.packing) {
            (Dtype::Other("I16", _), _) => Packing::Fast,
            (_, said) => said.filter(|&p| p != Packing::Fast).unwrap_or(Packing::Gemm),
        },
    };
    if let Some(said) = hint.packing.filter(|&p| p != packing) {
        let expected = format!("{}, as {} says", said.name(), hint.file);
        let got = format!("{} {:?} like {}", raw.dtype.name(), raw.shape, packing.name());
        return Err(ConvertError::tensor(&name, "layout", expected, got));
    }
    let codes: Box<dyn Integers + 'a> = match packing {
        Packing::Gemm => Box::new(Gemm::new(&parts)?),
        Packing::Gemv => Box::new(Gemv::new(&parts)?),
        Packing::Fast => Box::new(Fast::new(&parts)?),
    };
    Ok((codes, parts.read.into_inner()))
}

impl<'a> Parts<'a, '_> {
    fn get(&self, part: &str) -> Option<(String, &RawTensor<'a>)> {
        let (name, raw) = self.source.tensors.get_key_value(&format!("{}.{part}", self.module))?;
        self.read.borrow_mut().insert(name.clone());
        Some((name.clone(), raw))
    }

    fn need(&self, part: &str) -> Result<(String, &RawTensor<'a>), ConvertError> {
        self.get(part).ok_or_else(|| ConvertError::Missing {
            origin: self.source.name.clone(),
            tensor: format!("{}.{part}", self.module),
            what: format!("{} is quantized", self.module),
        })
    }

    /// Columns of a group that the config claims for every module.
    fn said(&self) -> Option<usize> {
        self.hint.group.filter(|_| !self.hint.per_module)
    }

    /// Columns of a group, by the number of `groups` that the scales (`name`) have, a `g_idx` and the config.
    fn group(&self, name: &str, groups: usize) -> Result<usize, ConvertError> {
        let index = self.index(groups)?;
        let indexed = index.as_ref().map(|(group, name)| (*group, name.as_str()));
        let said = self.said().map(|g| (g, self.hint.file.as_str()));
        let group = group_of(name, self.k, groups, indexed.or(said))?;
        self.check_groups(name, groups)?;
        Ok(group)
    }

    /// An error unless the config's claim gives `groups`.
    fn check_groups(&self, name: &str, groups: usize) -> Result<(), ConvertError> {
        match self.said().filter(|&g| self.k.div_ceil(g) != groups) {
            None => Ok(()),
            Some(said) => {
                let file = &self.hint.file;
                let expected = format!("{} groups of the {said} columns that {file} says", self.k.div_ceil(said));
                Err(ConvertError::tensor(name, "groups", expected, groups))
            }
        }
    }

    /// The group that a `g_idx` spells out, if there is one: the format knows no other order.
    fn index(&self, groups: usize) -> Result<Option<(usize, String)>, ConvertError> {
        let Some((name, raw)) = self.get("g_idx") else { return Ok(None) };
        match Index::new(&name, raw, self.k, groups)? {
            Index::One => Ok(None),
            Index::Natural(group) => Ok(Some((group, name))),
            Index::Ordered(..) | Index::Irregular(_) => {
                let got = "others; AWQ has no act-order, quantize the model again";
                Err(ConvertError::tensor(&name, "groups", "columns in order", got))
            }
        }
    }

    fn shaped(&self, name: &str, got: [usize; 2], expected: [usize; 2]) -> Result<(), ConvertError> {
        if got != expected {
            let expected = format!("{expected:?} for a [{}, {}] linear", self.n, self.k);
            return Err(ConvertError::tensor(name, "shape", expected, format!("{got:?}")));
        }
        Ok(())
    }

    /// An error unless rows and columns come in multiples that the byte order can hold.
    fn multiples(&self, name: &str, packing: Packing, rows: usize, cols: usize) -> Result<(), ConvertError> {
        if !self.n.is_multiple_of(rows) || !self.k.is_multiple_of(cols) {
            let expected = format!("a multiple of {rows} rows and {cols} columns, as {} has", packing.name());
            let got = format!("a [{}, {}] linear", self.n, self.k);
            return Err(ConvertError::tensor(name, "shape", expected, got));
        }
        Ok(())
    }
}

/// Why the file's schemes cannot hold groups of `group` columns, if so.
fn misfit(group: usize) -> Option<String> {
    (!group.is_multiple_of(16)).then(|| format!("groups of {group} columns are no multiple of 16"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Rows;

    #[test]
    fn shapes_tell_the_orders_apart() {
        let raw = |dtype, shape: [u64; 2]| RawTensor { dtype, shape: shape.into(), bytes: &[], rows: Rows::InOrder };
        let of = |dtype, shape, scales: [u64; 2], claimed| {
            let scales = raw(Dtype::Float(quern_models::FloatType::F16), scales);
            Packing::of(&raw(dtype, shape), Some(&scales), [64, 64], claimed)
        };
        let i16 = Dtype::Other("I16", 16);
        assert_eq!(of(i16, [16, 64], [16, 64], None), Some(Packing::Fast));
        assert_eq!(of(Dtype::I32, [64, 8], [2, 64], None), Some(Packing::Gemm));
        assert_eq!(of(Dtype::I32, [64, 8], [64, 32], None), Some(Packing::Gemv));
        assert_eq!(of(Dtype::I32, [64, 8], [64, 64], None), Some(Packing::Gemv));
        assert_eq!(of(Dtype::I32, [64, 8], [8, 64], Some(Packing::Gemv)), Some(Packing::Gemm));
        assert_eq!(of(Dtype::I32, [8, 64], [2, 64], None), None);
    }
}
