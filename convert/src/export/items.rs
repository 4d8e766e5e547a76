//! The tensors of a file under the names that their source had, columns in the source's order.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use quern_models::{
    FloatType, ModelFile, Scheme, TensorView, ZeroKind,
    family::{FamilyPlan, RuleKind},
    p64::Shape,
};

use crate::ConvertError;

/// A tensor of the source, made of one or several tensors of the file.
#[derive(Debug, Clone)]
pub struct Item<'a> {
    /// Module name in the source.
    pub module: String,
    /// `weight` or `bias`.
    part: &'static str,
    /// What the module is.
    pub role: Role,
    /// `[n, k]`, or `[n]` for a vector.
    pub dims: Vec<usize>,
    /// Rows; 1 for a vector.
    pub n: usize,
    /// Columns.
    pub k: usize,
    /// As floats, the source has inputs first: `[k, n]`.
    pub transposed: bool,
    /// The rows, from the first to the last.
    pieces: Vec<Piece<'a>>,
}

/// A tensor of the file.
#[derive(Debug, Clone)]
pub struct Piece<'a> {
    /// Our name.
    pub target: String,
    /// The numbers; a vector is one row.
    pub view: TensorView<'a>,
    /// Bits of the codes in the source, where they were fewer than the file's.
    source_bits: Option<u8>,
    /// First row of the item.
    first: usize,
    /// Column of the file that is column `c` of the source; the same if there is none.
    place: Option<Arc<[u32]>>,
}

/// What a module is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// A matrix inside a layer.
    Linear,
    /// A table of which rows are taken, by tokens.
    Embedding,
    /// A table of which rows are taken, by positions.
    Table,
    /// The output head.
    Head,
    /// A vector.
    Vector,
}

/// A tensor of plain codes.
#[derive(Debug, Clone, Copy)]
pub struct Coded<'a> {
    item: &'a Item<'a>,
    /// Bits of a code in the file, 4 or 8.
    pub bits: u8,
    /// Columns of a group.
    pub group: usize,
    /// Zero-point kind.
    pub zero: ZeroKind,
    /// Type of the scales.
    pub scale: FloatType,
}

/// Every tensor of `file` under its name in the source, in the order of the family's rules. One that no rule makes is
/// an error.
pub fn items<'a>(file: &'a ModelFile, family: &FamilyPlan) -> Result<Vec<Item<'a>>, ConvertError> {
    let mut items: Vec<Item> = vec![];
    let mut used = BTreeSet::new();
    let mut orders: BTreeMap<&str, Arc<[u32]>> = BTreeMap::new();
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
        let (view, target) = (file.view(index), rule.target.clone());
        let place = order_of(&target).and_then(|name| orders.get(name.as_str())).cloned();
        if let Some(place) = place.as_ref().filter(|p| p.len() != view.k) {
            return Err(ConvertError::tensor(&target, "columns", format!("{}, as its order has", place.len()), view.k));
        }
        let piece = Piece { source_bits: source_bits(file, &target), target, view, first: 0, place };
        let (role, part) = match rule.kind {
            RuleKind::Linear { .. } => (Role::Linear, "weight"),
            RuleKind::Router { .. } => (Role::Table, "weight"),
            RuleKind::Embedding { .. } => (Role::Embedding, "weight"),
            RuleKind::Table { .. } => (Role::Table, "weight"),
            RuleKind::Head { .. } => (Role::Head, "weight"),
            RuleKind::Vector { .. } | RuleKind::OnePlus { .. } => (Role::Vector, "weight"),
            RuleKind::Bias { .. } => (Role::Vector, "bias"),
            // Of heads, which are not exported.
            RuleKind::Tokens { .. } => continue,
        };
        let dims: Vec<usize> = info.dims.iter().map(|&d| d as usize).collect();
        // Rows of a module that holds several of our tensors follow each other.
        if rule.take.part.is_some()
            && let Some(item) = items.iter_mut().find(|i| i.module == rule.source && i.part == part)
        {
            if item.dims.len() != dims.len() || dims.len() == 2 && item.k != piece.view.k {
                let (expected, got) = (format!("that of {}", item.pieces[0].target), format!("{dims:?}"));
                return Err(ConvertError::tensor(&piece.target, "shape", expected, got));
            }
            item.push(piece);
            continue;
        }
        items.push(Item {
            module: rule.source.clone(),
            part,
            role,
            n: piece.view.n,
            k: piece.view.k,
            dims,
            transposed: rule.take.transposed,
            pieces: vec![piece],
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
fn inverse(name: &str, order: &TensorView) -> Result<Arc<[u32]>, ConvertError> {
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
    Ok(place.into())
}

/// What provenance says of codes that had fewer bits in the source.
fn source_bits(file: &ModelFile, target: &str) -> Option<u8> {
    let said = file.provenance().get("source_bits")?;
    let bits = said.as_u64().or_else(|| said.get(target)?.as_u64())?;
    u8::try_from(bits).ok().filter(|b| (2..4).contains(b))
}

impl<'a> Item<'a> {
    /// Adds the tensor that has the rows (or elements) after those that are there.
    fn push(&mut self, mut piece: Piece<'a>) {
        if let [n] = &mut self.dims[..] {
            piece.first = self.k;
            self.k += piece.view.k;
            *n = self.k;
        } else {
            piece.first = self.n;
            self.n += piece.view.n;
            self.dims[0] = self.n;
        }
        self.pieces.push(piece);
    }

    /// What the numbers are, for messages; see [`coded`](Self::coded).
    pub fn scheme(&self) -> Scheme {
        self.pieces[0].view.scheme
    }

    /// The only tensor of the file in it.
    pub fn whole(&self) -> Option<&Piece<'a>> {
        if let [one] = &self.pieces[..] { Some(one) } else { None }
    }

    /// The tensor of the file called `target`, if it is in here.
    pub fn piece(&self, target: &str) -> Option<&Piece<'a>> {
        self.pieces.iter().find(|p| p.target == target)
    }

    /// Whether the file has the columns in another order than the source.
    pub fn ordered(&self) -> bool {
        self.pieces.iter().any(|p| p.place.is_some())
    }

    /// The piece that holds a row, and which of its rows that is.
    #[inline]
    fn row(&self, row: usize) -> (&Piece<'a>, usize) {
        let last = self.pieces.iter().rfind(|p| p.first <= row).expect("the first piece begins at 0");
        (last, row - last.first)
    }

    /// The number at a column of the source.
    pub fn at(&self, row: usize, col: usize) -> f32 {
        if self.dims.len() == 1 {
            let (piece, col) = self.row(col);
            return piece.at(0, col);
        }
        let (piece, row) = self.row(row);
        piece.at(row, col)
    }

    /// Name of the float tensor in the source.
    pub fn float_name(&self) -> String {
        format!("{}.{}", self.module, self.part)
    }

    /// Bits of a code in the source.
    pub fn source_bits(&self) -> Option<u8> {
        self.pieces[0].source_bits.filter(|bits| self.pieces.iter().all(|p| p.source_bits == Some(*bits)))
    }

    /// The float type, if the numbers are floats.
    pub fn float(&self) -> Option<FloatType> {
        let Scheme::Float(kind) = self.scheme() else { return None };
        self.pieces.iter().all(|p| p.view.scheme == self.scheme()).then_some(kind)
    }

    /// The codes, if they are plain integers, in all pieces alike.
    pub fn coded(&'a self) -> Option<Coded<'a>> {
        let Scheme::Int { bits, group, zero, scale } = self.scheme() else { return None };
        let same = |p: &Piece| p.view.scheme == self.scheme() && p.place == self.pieces[0].place;
        if !self.pieces.iter().all(same) {
            return None;
        }
        Some(Coded { item: self, bits, group: group as usize, zero, scale })
    }
}

impl Piece<'_> {
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
}

impl Coded<'_> {
    /// Groups of a row.
    pub fn groups(&self) -> usize {
        self.item.k.div_ceil(self.group)
    }

    /// Group of a column of the source.
    pub fn group_at(&self, col: usize) -> usize {
        self.item.pieces[0].place(col) / self.group
    }

    fn shape(&self, piece: &Piece) -> Shape {
        Shape::new(piece.view.n, piece.view.k, self.bits, self.group)
    }

    /// Code at a column of the source.
    #[inline]
    pub fn code(&self, row: usize, col: usize) -> u8 {
        let (piece, row) = self.item.row(row);
        self.shape(piece).code(piece.view.codes, row, piece.place(col))
    }

    /// Scale of a group of the file.
    #[inline]
    pub fn scale(&self, row: usize, group: usize) -> f32 {
        let (piece, row) = self.item.row(row);
        self.scale.read(piece.view.scales, self.shape(piece).cell(row, group))
    }

    /// Zero code of a group; the middle code unless stored. Not for minima.
    #[inline]
    pub fn zero(&self, row: usize, group: usize) -> u8 {
        let (piece, row) = self.item.row(row);
        match self.zero {
            ZeroKind::Code => self.shape(piece).zero(piece.view.zeros, row, group),
            ZeroKind::Mid | ZeroKind::Min => 1 << (self.bits - 1),
        }
    }

    /// Minimum of a group; 0 where none is stored.
    pub fn min(&self, row: usize, group: usize) -> f32 {
        let (piece, row) = self.item.row(row);
        piece.view.min(row, group)
    }
}
