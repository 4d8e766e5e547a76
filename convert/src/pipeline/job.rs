//! One tensor of the output: where its numbers come from, how they are written and compared.

use quern_models::{FileWriter, FloatType, Scheme, TensorPlan, TensorView};

use crate::{
    ConvertError, Verified,
    import::{IntShape, Integers, float::Floats, gptq::Gptq, part::Part, rtn::Rtn},
    pack::pack,
    verify,
};

/// One tensor of the output.
pub(super) struct Job<'a> {
    /// Our name.
    pub target: String,
    /// The source's name, for messages.
    pub origin: String,
    pub dims: Vec<u64>,
    pub data: Data<'a>,
    /// First row, where only some rows of a tensor of codes are taken.
    pub first: Option<usize>,
    /// How it was quantized, if it was.
    pub method: Option<&'static str>,
}

/// Where a tensor's numbers come from.
pub(super) enum Data<'a> {
    Gptq(Gptq<'a>),
    /// Any other tensor of codes.
    Codes(Box<dyn Integers + 'a>),
    /// Stored as `stored`: the source's type or f16.
    Float {
        floats: Floats<'a>,
        stored: FloatType,
    },
    /// Quantized by us.
    Rtn {
        floats: Floats<'a>,
        shape: IntShape,
    },
}

impl Job<'_> {
    pub fn scheme(&self) -> Scheme {
        match &self.data {
            Data::Gptq(t) => t.shape().scheme(),
            Data::Codes(t) => t.shape().scheme(),
            Data::Float { stored, .. } => Scheme::Float(*stored),
            Data::Rtn { shape, .. } => shape.scheme(),
        }
    }

    pub fn plan(&self) -> TensorPlan {
        TensorPlan { name: self.target.clone(), dims: self.dims.clone(), scheme: self.scheme() }
    }

    pub fn weights(&self) -> u64 {
        self.dims.iter().product()
    }

    pub fn bytes(&self) -> u64 {
        let (n, k) = if let [n, k] = self.dims[..] { (n, k) } else { (1, self.weights()) };
        self.scheme().planes(n, k).map_or(0, |p| p.total)
    }

    pub fn write(&self, writer: &mut FileWriter) -> Result<(), ConvertError> {
        match &self.data {
            Data::Gptq(t) => writer.write(&self.rows_of(t, |t| pack(t)))?,
            Data::Codes(t) => writer.write(&self.rows_of(&**t, |t| pack(t)))?,
            Data::Float { floats, stored } if *stored == floats.kind => writer.write(&floats.kept(&self.origin)?)?,
            Data::Float { floats, .. } => writer.write(&floats.rounded(&self.origin)?)?,
            Data::Rtn { floats, shape } => writer.write(&pack(&Rtn::new(&self.origin, floats.clone(), *shape)?))?,
        }
        Ok(())
    }

    pub fn verify(&self, view: &TensorView) -> Result<Verified, ConvertError> {
        match &self.data {
            Data::Gptq(t) => self.rows_of(t, |t| verify::integers(&self.target, t, view)),
            Data::Codes(t) => self.rows_of(&**t, |t| verify::integers(&self.target, t, view)),
            Data::Float { floats, stored } => verify::floats(&self.target, floats, *stored, view),
            Data::Rtn { floats, shape } => verify::nearest(&self.target, floats, *shape, view),
        }
    }

    /// What `f` makes of the rows that are taken.
    fn rows_of<R>(&self, all: &dyn Integers, f: impl FnOnce(&dyn Integers) -> R) -> R {
        match self.first {
            Some(first) => f(&Part::new(all, first, self.dims[0] as usize)),
            None => f(all),
        }
    }
}
