//! A model's weights on the device.

use std::sync::Arc;

use quern_models::{
    ModelFile,
    spec::{Act, Attn, Layer, Mlp, Norm},
};

use super::{
    Buffer, CudaError, Device, Upload,
    acts::Form,
    ops::{self, NormKind},
    weight::Weight,
};
use crate::{
    cpu::acts::{Forms, Mode},
    exec::Angles,
};

/// Everything a step reads besides the cache, of the layers from `first` on.
pub(super) struct Model {
    pub first: usize,
    pub layers: Vec<LayerWeights>,
    /// There where it is read: as a table in front of layer 0, or as the head.
    pub embed: Option<Weight>,
    pub positions: Option<Weight>,
    pub norm: Input,
    /// `None`: the embedding is the head.
    pub head: Option<Weight>,
    /// Distinct ropes; host only.
    pub angles: Vec<Angles>,
}

/// A norm and the order in which the linear layers behind it take its columns.
pub(super) struct Input {
    pub norm: Norm,
    /// `[hidden]`.
    pub weight: Buffer<f32>,
    /// `[hidden]`.
    pub bias: Option<Buffer<f32>>,
    /// `[hidden]`.
    pub order: Option<Buffer<u32>>,
}

impl Input {
    /// The norm as kernels take it.
    pub fn norm(&self) -> ops::Norm {
        ops::Norm {
            kind: if self.norm.biased() { NormKind::Layer } else { NormKind::Rms },
            eps: self.norm.eps(),
            weight: self.weight.ptr(),
            bias: self.bias.as_ref().map(Buffer::ptr),
        }
    }
}

/// One layer.
pub(super) struct LayerWeights {
    pub attn_in: Input,
    pub qkv: [Weight; 3],
    /// `[q + 2 kv]`.
    pub qkv_bias: Option<Buffer<f32>>,
    /// Weights of the norms of q's and k's heads, `[head_dim]` each, and eps.
    pub qk_norm: Option<(Buffer<f32>, Buffer<f32>, f32)>,
    /// Index of the [`Angles`].
    pub rope: Option<usize>,
    /// `[q]`.
    pub o_order: Option<Buffer<u32>>,
    pub o: Weight,
    pub o_bias: Option<Buffer<f32>>,
    pub mlp_in: Input,
    pub gate: Option<Weight>,
    pub up: Weight,
    /// `[inner]` or, gate's first, `[2 inner]`.
    pub up_bias: Option<Buffer<f32>>,
    pub act: Act,
    pub down: Weight,
    pub down_bias: Option<Buffer<f32>>,
}

impl Model {
    /// Tensors of the file that the layers from `first` on, and what is behind them, read; what is in front of layer 0
    /// belongs to it.
    pub fn tensors(file: &ModelFile, first: usize) -> impl Iterator<Item = usize> {
        let here = move |name: &str| match name {
            "embed" => first == 0 || file.spec().tied_head,
            "positions" => first == 0,
            _ => layer_of(name).is_none_or(|layer| layer >= first),
        };
        file.tensors().iter().enumerate().filter(move |(_, t)| here(&t.name)).map(|(i, _)| i)
    }

    /// Bytes on the device, before anything is uploaded.
    pub fn bytes(file: &ModelFile, form: Form, first: usize) -> usize {
        let bytes = |i: usize| {
            let view = file.view(i);
            let form = form_of(file, &file.tensors()[i].name, form);
            if view.n == 1 { 4 * view.k } else { Weight::bytes(&view, form) }
        };
        Model::tensors(file, first).map(bytes).sum()
    }

    /// What inputs of the int8 form hold at most: what any matrix on the device reads.
    pub fn held(file: &ModelFile, first: usize) -> Forms {
        let read = |i: usize| {
            let (view, form) = (file.view(i), form_of(file, &file.tensors()[i].name, Form::Int8));
            (view.n > 1 && form == Form::Int8).then(|| Forms::of(view.scheme, Mode::Int8))
        };
        Model::tensors(file, first).filter_map(read).fold(Forms::default(), Forms::and)
    }

    /// Uploads everything, in the order of the file's layers.
    pub fn upload(file: &Arc<ModelFile>, form: Form, first: usize, up: &mut Upload) -> Result<Model, CudaError> {
        let spec = file.spec();
        let mut load = Load { file, form, up };
        let embed = (first == 0 || spec.tied_head).then(|| load.matrix("embed")).transpose()?;
        let positions = spec.positions.filter(|_| first == 0).map(|_| load.matrix("positions")).transpose()?;
        let mut angles = vec![];
        let layers = spec.layers.iter().enumerate().skip(first).map(|(i, layer)| load.layer(i, layer, &mut angles));
        let layers = layers.collect::<Result<_, _>>()?;
        let norm = load.input("norm", &spec.norm, spec.head_order.then(|| "head_order".into()))?;
        let head = (!spec.tied_head).then(|| load.matrix("head")).transpose()?;
        Ok(Model { first, layers, embed, positions, norm, head, angles })
    }

    /// What logits are computed with.
    pub fn head(&self) -> &Weight {
        self.head.as_ref().or(self.embed.as_ref()).expect("a head of its own, or the embedding is there")
    }

    /// What the inputs of the linear layers hold in the int8 form: those of q, k, v, gate and up; of o; of down; of the
    /// head.
    pub fn forms(&self) -> [Forms; 4] {
        let of = |weights: &mut dyn Iterator<Item = &Weight>| {
            weights.map(|w| Forms::of(w.scheme, Mode::Int8)).fold(Forms::default(), Forms::and)
        };
        [
            of(&mut self.layers.iter().flat_map(|l| l.qkv.iter().chain(&l.gate).chain([&l.up]))),
            of(&mut self.layers.iter().map(|l| &l.o)),
            of(&mut self.layers.iter().map(|l| &l.down)),
            of(&mut [self.head()].into_iter()),
        ]
    }

    /// The largest padded width of all linear inputs that are as wide as the residual stream, as attention's output,
    /// and as the MLP's inside.
    pub fn widths(&self) -> [usize; 3] {
        let hidden = self.layers.iter().flat_map(|l| l.qkv.iter().chain(&l.gate).chain([&l.up])).chain([self.head()]);
        [
            hidden.map(|w| w.k_pad).max().unwrap_or(0),
            self.layers.iter().map(|l| l.o.k_pad).max().unwrap_or(0),
            self.layers.iter().map(|l| l.down.k_pad).max().unwrap_or(0),
        ]
    }
}

/// The layer that a tensor is part of.
fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("layers.")?.split('.').next()?.parse().ok()
}

/// The form of a matrix: tables of which rows are only looked up stay as the file has them.
fn form_of(file: &ModelFile, name: &str, form: Form) -> Form {
    match name {
        "positions" => Form::F32,
        "embed" if !file.spec().tied_head => Form::F32,
        _ => form,
    }
}

/// On the way up.
struct Load<'a> {
    file: &'a Arc<ModelFile>,
    form: Form,
    up: &'a mut Upload,
}

impl Load<'_> {
    fn index(&self, name: &str) -> usize {
        self.file.index(name).expect("ModelFile::open checked every tensor of the spec")
    }

    fn matrix(&mut self, name: &str) -> Result<Weight, CudaError> {
        let (form, index) = (form_of(self.file, name, self.form), self.index(name));
        // Where the device's memory is the host's, weights and the file's pages would fill it twice.
        if self.up.device().info().integrated
            && let Ok(once) = self.file.view_once(index)
        {
            return Weight::upload(self.up, &once.view(), form);
        }
        Weight::upload(self.up, &self.file.view(index), form)
    }

    fn values(&self, name: &str) -> Vec<f32> {
        let view = self.file.view(self.index(name));
        (0..view.k).map(|i| view.at(0, i)).collect()
    }

    fn device(&self) -> Arc<Device> {
        self.up.device().clone()
    }

    fn vector(&mut self, name: &str) -> Result<Buffer<f32>, CudaError> {
        Buffer::of(&self.device(), "a vector of the model", &self.values(name))
    }

    /// Vectors side by side; none where they are not there.
    fn vectors(&mut self, there: bool, names: &[String]) -> Result<Option<Buffer<f32>>, CudaError> {
        let all = || names.iter().flat_map(|n| self.values(n)).collect::<Vec<_>>();
        there.then(|| Buffer::of(&self.device(), "a vector of the model", &all())).transpose()
    }

    fn order(&mut self, name: Option<String>) -> Result<Option<Buffer<u32>>, CudaError> {
        let columns = |name: String| {
            let view = self.file.view(self.index(&name));
            (0..view.k).map(|i| view.order(i)).collect::<Vec<u32>>()
        };
        name.map(|n| Buffer::of(&self.device(), "an order of columns", &columns(n))).transpose()
    }

    fn input(&mut self, name: &str, norm: &Norm, order: Option<String>) -> Result<Input, CudaError> {
        Ok(Input {
            norm: norm.clone(),
            weight: self.vector(name)?,
            bias: self.vectors(norm.biased(), &[format!("{name}_bias")])?,
            order: self.order(order)?,
        })
    }

    fn layer(&mut self, i: usize, layer: &Layer, angles: &mut Vec<Angles>) -> Result<LayerWeights, CudaError> {
        let name = |name: &str| format!("layers.{i}.{name}");
        let Attn::Gqa { head_dim, ref rope, ref qk_norm, qkv_bias, o_bias, attn_order, o_order, .. } = layer.attn;
        let (gated, act, bias, mlp_order) = match layer.mlp {
            Mlp::Gated { act, bias, mlp_order, .. } => (true, act, bias, mlp_order),
            Mlp::Plain { act, bias, mlp_order, .. } => (false, act, bias, mlp_order),
        };
        let up_bias = if gated { &["gate_bias", "up_bias"][..] } else { &["up_bias"] };
        let order = |there: bool, tensor: &str| there.then(|| name(tensor));
        Ok(LayerWeights {
            attn_in: self.input(&name("attn_norm"), &layer.attn_norm, order(attn_order, "attn_order"))?,
            qkv: [self.matrix(&name("q"))?, self.matrix(&name("k"))?, self.matrix(&name("v"))?],
            qkv_bias: self.vectors(qkv_bias, &["q_bias", "k_bias", "v_bias"].map(name))?,
            qk_norm: match qk_norm {
                Some(norm) => Some((self.vector(&name("q_norm"))?, self.vector(&name("k_norm"))?, norm.eps())),
                None => None,
            },
            rope: rope.as_ref().map(|rope| Angles::of(angles, rope, head_dim)),
            o_order: self.order(order(o_order, "o_order"))?,
            o: self.matrix(&name("o"))?,
            o_bias: self.vectors(o_bias, &[name("o_bias")])?,
            mlp_in: self.input(&name("mlp_norm"), &layer.mlp_norm, order(mlp_order, "mlp_order"))?,
            gate: gated.then(|| self.matrix(&name("gate"))).transpose()?,
            up: self.matrix(&name("up"))?,
            up_bias: self.vectors(bias, &up_bias.iter().map(|b| name(b)).collect::<Vec<_>>())?,
            act,
            down: self.matrix(&name("down"))?,
            down_bias: self.vectors(bias, &[name("down_bias")])?,
        })
    }
}
