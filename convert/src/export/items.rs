//! The tensors of a file under the names that their source had, columns in the source's order.

use std::collections::{BTreeMap, BTreeSet};

use quern_models::{
    FloatType, ModelFile, Scheme, TensorView, ZeroKind,
    family::{FamilyPlan, RuleKind},
    p64::Shape,
};

use crate::ConvertError;

/// A tensor of the file.
#[derive(Debug, Clone)]
pub struct Item<'a> {
    /// Our name.
    pub target: String,
    /// Module name in the source, without `.weight`.
    pub module: String,
    /// What the module is.
    pub role: Role,
    /// `[n, k]`, or `[n]` for a vector.
    pub dims: Vec<u64>,
    /// The numbers; a vector is one row.
    pub view: TensorView<'a>,
    /// Bits of the codes in the source, where they were fewer than the file's.
    pub source_bits: Option<u8>,
    /// Column of the file that is column `c` of the source; the same if there is none.
    place: Option<Vec<u32>>,
}

/// What a module is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// A matrix inside a layer.
    Linear,
    /// A table of which rows are taken.
    Embedding,
    /// The output head.
    Head,
    /// A vector.
    Vector,
}

/// A tensor of plain codes.
#[derive(Debug, Clone, Copy)]
pub struct Coded<'a> {
    item: &'a Item<'a>,
    at: Shape,
    /// Bits of a code in the file, 4 or 8.
    pub bits: u8,
    /// Columns of a group.
    pub group: usize,
    /// Zero-point kind.
    pub zero: ZeroKind,
    /// Type of the scales.
    pub scale: FloatType,
}

/// Every tensor of `file`, in the order of the family's rules. One that no rule makes is an error.
pub fn items<'a>(file: &'a ModelFile, family: &FamilyPlan) -> Result<Vec<Item<'a>>, ConvertError> {
    let mut items = vec![];
    let mut used = BTreeSet::new();
    let mut orders: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
    for info in file.tensors().iter().filter(|t| t.scheme == Scheme::Order) {
        let view = file.tensor(&info.name).expect("it is in the list of tensors");
        orders.insert(&info.name, inverse(&info.name, &view)?);
        used.insert(info.name.as_str());
    }
    for rule in &family.rules {
        let Some(index) = file.index(&rule.target) else {
            let what = format!("{} is not in the file, though its family has it", rule.target);
            return Err(ConvertError::unsupported(what, AGAIN));
        };
        let info = &file.tensors()[index];
        used.insert(info.name.as_str());
        let role = match rule.kind {
            RuleKind::Linear { .. } => Role::Linear,
            RuleKind::Embedding { .. } => Role::Embedding,
            RuleKind::Head { .. } => Role::Head,
            RuleKind::Vector { .. } => Role::Vector,
        };
        let place = order_of(&rule.target).and_then(|name| orders.get(name.as_str())).cloned();
        items.push(Item {
            target: rule.target.clone(),
            module: rule.source.clone(),
            role,
            dims: info.dims.clone(),
            view: file.view(index),
            source_bits: source_bits(file, &rule.target),
            place,
        });
    }
    match file.tensors().iter().find(|t| !used.contains(t.name.as_str())) {
        None => Ok(items),
        Some(t) => {
            let what = format!("tensor {} of the file has no name in a {} checkpoint", t.name, family.spec.family);
            Err(ConvertError::unsupported(what, AGAIN))
        }
    }
}

const AGAIN: &str = "the file was made by another version of quern; convert the checkpoint again";

/// Name of the order that a tensor's columns may have.
fn order_of(target: &str) -> Option<String> {
    if target == "head" {
        return Some("head_order".into());
    }
    let (layer, name) = target.rsplit_once('.')?;
    let order = match name {
        "q" | "k" | "v" => "attn_order",
        "o" => "o_order",
        "gate" | "up" => "mlp_order",
        _ => return None,
    };
    Some(format!("{layer}.{order}"))
}

/// For every column of the source, the column of the file that holds it.
fn inverse(name: &str, order: &TensorView) -> Result<Vec<u32>, ConvertError> {
    let mut place = vec![u32::MAX; order.k];
    for j in 0..order.k {
        let c = order.order(j) as usize;
        match place.get_mut(c) {
            Some(p) if *p == u32::MAX => *p = j as u32,
            _ => {
                let expected = format!("a permutation of 0..{}", order.k);
                return Err(ConvertError::tensor(name, "order", expected, format!("{c} at {j}")));
            }
        }
    }
    Ok(place)
}

/// What provenance says of codes that had fewer bits in the source.
fn source_bits(file: &ModelFile, target: &str) -> Option<u8> {
    let said = file.provenance().get("source_bits")?;
    let bits = said.as_u64().or_else(|| said.get(target)?.as_u64())?;
    u8::try_from(bits).ok().filter(|b| (2..4).contains(b))
}

impl<'a> Item<'a> {
    /// Whether the file has the columns in another order than the source.
    pub fn ordered(&self) -> bool {
        self.place.is_some()
    }

    /// Column of the file that holds column `col` of the source.
    #[inline]
    pub fn place(&self, col: usize) -> usize {
        self.place.as_ref().map_or(col, |p| p[col] as usize)
    }

    /// The number at a column of the source.
    pub fn at(&self, row: usize, col: usize) -> f32 {
        self.view.at(row, self.place(col))
    }

    /// Name of the float tensor in the source.
    pub fn weight(&self) -> String {
        format!("{}.weight", self.module)
    }

    /// The codes, if they are plain integers.
    pub fn coded(&'a self) -> Option<Coded<'a>> {
        let Scheme::Int { bits, group, zero, scale } = self.view.scheme else { return None };
        let group = group as usize;
        let at = Shape::new(self.view.n, self.view.k, bits, group);
        Some(Coded { item: self, at, bits, group, zero, scale })
    }
}

impl Coded<'_> {
    /// Groups of a row.
    pub fn groups(&self) -> usize {
        self.at.groups
    }

    /// Group of a column of the source.
    pub fn group_at(&self, col: usize) -> usize {
        self.item.place(col) / self.group
    }

    /// Code at a column of the source.
    #[inline]
    pub fn code(&self, row: usize, col: usize) -> u8 {
        self.at.code(self.item.view.codes, row, self.item.place(col))
    }

    /// Scale of a group of the file.
    #[inline]
    pub fn scale(&self, row: usize, group: usize) -> f32 {
        self.scale.read(self.item.view.scales, self.at.cell(row, group))
    }

    /// Zero code of a group; the middle code unless stored. Not for minima.
    #[inline]
    pub fn zero(&self, row: usize, group: usize) -> u8 {
        match self.zero {
            ZeroKind::Code => self.at.zero(self.item.view.zeros, row, group),
            ZeroKind::Mid | ZeroKind::Min => 1 << (self.bits - 1),
        }
    }

    /// Minimum of a group; 0 where none is stored.
    pub fn min(&self, row: usize, group: usize) -> f32 {
        self.item.view.min(row, group)
    }
}
