//! One tensor of the output: where its numbers come from, how they are written and compared.

use quern_models::{FileWriter, FloatType, Scheme, TensorPlan, TensorView};

use rayon::prelude::*;

use crate::{
    ConvertError, Verified,
    import::{
        IntShape, Integers,
        float::Floats,
        gptq::Gptq,
        order::{Arrange, Order, Ordered},
        part::Part,
        rtn::Rtn,
    },
    pack::pack,
    verify,
};

/// One tensor of the output.
pub(crate) struct Job<'a> {
    /// Our name.
    pub target: String,
    /// The source's name, for messages.
    pub origin: String,
    pub dims: Vec<u64>,
    pub data: Data<'a>,
    /// Rows of a tensor of codes that are still to be cut out: first, and how many. Floats take them themselves.
    pub part: Option<(usize, usize)>,
    /// Where rows and columns come from; floats have their own.
    pub arrange: Arrange,
    /// How it was quantized, if it was.
    pub method: Option<&'static str>,
}

/// Where a tensor's numbers come from.
pub(crate) enum Data<'a> {
    /// A GPTQ tensor whose zero-points are still to be understood; then it is one of codes.
    Gptq(Gptq<'a>),
    /// A tensor of codes.
    Codes(Box<dyn Integers + 'a>),
    /// A tensor of codes that is stored as the f32 values they mean.
    Values(Box<dyn Integers + 'a>),
    /// An order of columns.
    Order(Order),
    /// Tokens of the model, stored as f32.
    Tokens(Vec<u32>),
    /// Stored as `stored`: the source's type or f16.
    Float { floats: Floats<'a>, stored: FloatType },
    /// Stored as f32, one added to each.
    OnePlus(Floats<'a>),
    /// Quantized by us.
    Rtn { floats: Floats<'a>, shape: IntShape },
}

impl<'a> Job<'a> {
    /// An order of columns, as a tensor of the output.
    pub fn order(target: String, order: Order) -> Job<'a> {
        let dims = vec![order.len() as u64];
        Job {
            origin: target.clone(),
            target,
            dims,
            data: Data::Order(order),
            part: None,
            arrange: Arrange::default(),
            method: None,
        }
    }

    /// Cuts the wanted rows out of a tensor of codes; of a GPTQ tensor, when its zero-points are understood.
    pub fn cut(&mut self) {
        let Some((first, n)) = self.part.filter(|_| matches!(self.data, Data::Codes(_))) else { return };
        if let Data::Codes(all) = std::mem::replace(&mut self.data, Data::Order(Order::default())) {
            self.data = Data::Codes(Box::new(Part::new(all, first, n)));
            self.part = None;
        }
    }

    /// The integers that are stored, if they are.
    pub fn codes(&self) -> Option<&(dyn Integers + 'a)> {
        match &self.data {
            Data::Gptq(t) => Some(t),
            Data::Codes(t) => Some(&**t),
            _ => None,
        }
    }

    pub fn scheme(&self) -> Scheme {
        match &self.data {
            Data::Gptq(t) => t.shape().scheme(),
            Data::Codes(t) => t.shape().scheme(),
            Data::Values(_) | Data::Tokens(_) | Data::OnePlus(_) => Scheme::Float(FloatType::F32),
            Data::Order(_) => Scheme::Order,
            Data::Float { stored, .. } => Scheme::Float(*stored),
            Data::Rtn { shape, .. } => shape.scheme(),
        }
    }

    pub fn plan(&self) -> TensorPlan {
        TensorPlan { name: self.target.clone(), dims: self.dims.clone(), scheme: self.scheme() }
    }

    /// Weights that the tensor holds; an order and a list of tokens have none.
    pub fn weights(&self) -> u64 {
        if matches!(self.data, Data::Order(_) | Data::Tokens(_)) { 0 } else { self.dims.iter().product() }
    }

    pub fn bytes(&self) -> u64 {
        let (n, k) = if let [n, k] = self.dims[..] { (n, k) } else { (1, self.dims.iter().product()) };
        self.scheme().planes(n, k).map_or(0, |p| p.total)
    }

    pub fn write(&self, writer: &mut FileWriter) -> Result<(), ConvertError> {
        if let Data::Codes(t) | Data::Values(t) = &self.data {
            t.check(&self.origin)?;
        }
        match &self.data {
            Data::Gptq(t) => writer.write(&pack(t))?,
            Data::Codes(t) if self.arrange.is_natural() => writer.write(&pack(&**t))?,
            Data::Codes(t) => writer.write(&pack(&Ordered::new(&**t, &self.arrange).decoded()))?,
            Data::Values(t) => writer.write(&values(&Ordered::new(&**t, &self.arrange)))?,
            Data::Order(order) => writer.write(&order.iter().flat_map(|col| col.to_le_bytes()).collect::<Vec<u8>>())?,
            Data::Tokens(ids) => {
                writer.write(&ids.iter().flat_map(|&id| (id as f32).to_le_bytes()).collect::<Vec<u8>>())?
            }
            Data::Float { floats, stored } if *stored == floats.kind => writer.write(&floats.kept(&self.origin)?)?,
            Data::Float { floats, .. } => writer.write(&floats.rounded(&self.origin)?)?,
            Data::OnePlus(floats) => writer.write(&floats.plus_one(&self.origin)?)?,
            Data::Rtn { floats, shape } => writer.write(&pack(&Rtn::new(&self.origin, floats.clone(), *shape)?))?,
        }
        Ok(())
    }

    pub fn verify(&self, view: &TensorView) -> Result<Verified, ConvertError> {
        match &self.data {
            Data::Gptq(t) => verify::integers(&self.target, t, view),
            Data::Codes(t) if self.arrange.is_natural() => verify::integers(&self.target, &**t, view),
            Data::Codes(t) => verify::moved(&self.target, &Ordered::new(&**t, &self.arrange), view),
            Data::Values(t) => verify::values(&self.target, &Ordered::new(&**t, &self.arrange), view),
            Data::Order(order) => verify::order(&self.target, order, view),
            Data::Tokens(ids) => verify::tokens(&self.target, ids, view),
            Data::Float { floats, stored } => verify::floats(&self.target, floats, *stored, view),
            Data::OnePlus(floats) => verify::one_plus(&self.target, floats, view),
            Data::Rtn { floats, shape } => verify::nearest(&self.target, floats, *shape, view),
        }
    }
}

/// What the codes mean, f32, row by row.
fn values(tensor: &dyn Integers) -> Vec<u8> {
    let IntShape { n, k, .. } = tensor.shape();
    let mut bytes = vec![0; n * k * 4];
    bytes.par_chunks_mut(k * 4).enumerate().for_each(|(row, bytes)| {
        for (col, out) in bytes.chunks_exact_mut(4).enumerate() {
            out.copy_from_slice(&tensor.value(row, col).to_le_bytes());
        }
    });
    bytes
}
