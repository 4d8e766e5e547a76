//! A model's weights on the device, or a head's.

mod guess;

use std::sync::Arc;

use quern_models::{
    ModelFile,
    spec::{Act, Attn, HeadKind, Layer, Mlp, Norm},
};

use super::{
    Buffer, CudaError, Device, DevicePtr, Upload,
    acts::Form,
    ops::{self, NormKind},
    route,
    weight::Weight,
};

pub(super) use guess::Guess;

use crate::{
    cpu::acts::{Forms, Mode},
    exec::Angles,
};

/// Everything a step reads besides the cache, of the layers from `first` on.
pub(super) struct Model {
    pub first: usize,
    pub layers: Vec<LayerWeights>,
    /// There where it is read: as a table in front of layer 0, or as the head. A head may share it, and the next.
    pub embed: Option<Arc<Weight>>,
    pub positions: Option<Weight>,
    pub norm: Input,
    /// `None`: the embedding is the head, or there is none (Medusa).
    pub head: Option<Arc<Weight>>,
    /// Distinct ropes; host only.
    pub angles: Vec<Angles>,
    /// Of a head: what it has besides.
    pub guess: Option<Guess>,
}

/// A norm and the order in which the linear layers behind it take its columns.
pub(super) struct Input {
    pub norm: Norm,
    /// `[hidden]`; not of an identity.
    pub weight: Option<Buffer<f32>>,
    /// `[hidden]`.
    pub bias: Option<Buffer<f32>>,
    /// `[hidden]`.
    pub order: Option<Buffer<u32>>,
}

impl Input {
    /// The norm as kernels take it.
    pub fn norm(&self) -> ops::Norm {
        ops::Norm {
            kind: match self.norm {
                Norm::Rms { .. } => NormKind::Rms,
                Norm::Layer { .. } => NormKind::Layer,
                Norm::Identity => NormKind::Identity,
            },
            eps: self.norm.eps(),
            weight: self.weight.as_ref().map_or(DevicePtr::NULL, Buffer::ptr),
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
    /// `[heads]`.
    pub sinks: Option<Buffer<f32>>,
    /// Index of the [`Angles`].
    pub rope: Option<usize>,
    /// `[q]`.
    pub o_order: Option<Buffer<u32>>,
    pub o: Weight,
    pub o_bias: Option<Buffer<f32>>,
    /// Norm of what attention gives.
    pub attn_out: Option<Input>,
    pub mlp_in: Input,
    pub mlp: MlpWeights,
    /// Norm of what the MLP gives.
    pub mlp_out: Option<Input>,
}

/// The feed-forward half of a layer.
pub(super) enum MlpWeights {
    One(Box<Block>),
    Experts(Box<Experts>),
}

/// One block for all tokens.
pub(super) struct Block {
    /// Gate, if there is one, and up.
    pub up: Vec<Weight>,
    /// `[inner]` or, gate's first, `[2 inner]`.
    pub up_bias: Option<Buffer<f32>>,
    pub act: Act,
    pub down: Weight,
    pub down_bias: Option<Buffer<f32>>,
}

/// A mixture.
pub(super) struct Experts {
    pub router: Weight,
    /// Gates and ups.
    pub up: [Weight; 2],
    pub act: Act,
    pub down: Weight,
    pub shape: route::Shape,
    pub normalized: bool,
}

impl LayerWeights {
    fn block(&self) -> Option<&Block> {
        match &self.mlp {
            MlpWeights::One(block) => Some(block),
            MlpWeights::Experts(_) => None,
        }
    }

    pub fn experts(&self) -> Option<&Experts> {
        match &self.mlp {
            MlpWeights::Experts(experts) => Some(experts),
            MlpWeights::One(_) => None,
        }
    }

    /// What reads the rows in front of the MLP behind their norm, side by side; of a mixture its router.
    pub fn mlp_readers(&self) -> Vec<&Weight> {
        match &self.mlp {
            MlpWeights::One(block) => block.up.iter().collect(),
            MlpWeights::Experts(experts) => vec![&experts.router],
        }
    }

    /// What reads the inside of the MLP, but for experts.
    pub fn down(&self) -> Option<&Weight> {
        self.block().map(|block| &block.down)
    }
}

impl Model {
    /// Tensors of the file that the layers from `first` on, and what is behind them, read; what is in front of layer 0
    /// belongs to it.
    pub fn tensors(file: &ModelFile, first: usize) -> impl Iterator<Item = usize> {
        let here = move |name: &str| match name {
            // The host maps tokens.
            "tokens" => false,
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
        let embed = (first == 0 || spec.tied_head).then(|| load.matrix("embed").map(Arc::new)).transpose()?;
        let positions = spec.positions.filter(|_| first == 0).map(|_| load.matrix("positions")).transpose()?;
        let mut angles = vec![];
        let layers = spec.layers.iter().enumerate().skip(first).map(|(i, layer)| load.layer(i, layer, &mut angles));
        let layers = layers.collect::<Result<_, _>>()?;
        let norm = load.input("norm", &spec.norm, spec.head_order.then(|| "head_order".into()))?;
        let head = (!spec.tied_head).then(|| load.matrix("head").map(Arc::new)).transpose()?;
        Ok(Model { first, layers, embed, positions, norm, head, angles, guess: None })
    }

    /// Uploads a head of the model in `of`, and shares what the two have in common.
    pub fn upload_head(
        &self,
        of: &Arc<ModelFile>,
        file: &Arc<ModelFile>,
        form: Form,
        up: &mut Upload,
    ) -> Result<Model, CudaError> {
        let spec = file.spec();
        let head = spec.draft_head.as_ref().expect("the caller has a head");
        // The order in which the model's head takes its columns, small enough to be there twice.
        let mut of_model = Load { file: of, form, up };
        let order = of_model.order((head.shared_head && of.spec().head_order).then(|| "head_order".into()))?;
        let mut load = Load { file, form, up };
        let medusa = matches!(head.kind, HeadKind::Medusa { .. });
        let own = |load: &mut Load, name: &str| load.matrix(name).map(Arc::new);
        let embed = match (medusa, head.shared_embed) {
            (true, _) => None,
            (_, true) => self.embed.clone(),
            _ => Some(own(&mut load, "embed")?),
        };
        let guess = Some(load.guess(head)?);
        let mut angles = vec![];
        let layers = spec.layers.iter().enumerate().map(|(i, layer)| load.layer(i, layer, &mut angles));
        let layers = layers.collect::<Result<_, _>>()?;
        let mut norm = load.input("norm", &spec.norm, None)?;
        norm.order = order;
        let weight = match (medusa, head.shared_head, spec.tied_head) {
            (true, ..) => None,
            (_, true, _) => self.head.clone().or(self.embed.clone()),
            (.., true) => None,
            _ => Some(own(&mut load, "head")?),
        };
        Ok(Model { first: 0, layers, embed, positions: None, norm, head: weight, angles, guess })
    }

    /// What logits are computed with, if it is one matrix.
    pub fn head(&self) -> Option<&Weight> {
        self.head.as_deref().or(self.embed.as_deref())
    }

    /// The same, or of the `guess`-th of Medusa's.
    pub fn heads_of(&self, guess: usize) -> &Weight {
        let medusa = self.guess.as_ref().and_then(|g| g.medusa.get(guess)).map(|m| &m.head);
        medusa.or(self.head()).expect("a head, Medusa's, or the embedding is there")
    }

    /// Everything that reads rows behind the final norm.
    pub fn heads(&self) -> impl Iterator<Item = &Weight> {
        self.head().into_iter().chain(self.guess.iter().flat_map(Guess::medusa_weights))
    }

    /// Whether the first layer's q, k and v read what a head makes for them.
    pub fn wide(&self) -> bool {
        self.guess.as_ref().is_some_and(|guess| matches!(guess.head.kind, HeadKind::Wide { .. }))
    }

    /// What reads the rows in front of attention and of the MLP behind their norms.
    fn readers(&self) -> impl Iterator<Item = &Weight> {
        let wide = self.wide();
        let qkv = move |i: usize, l: &LayerWeights| l.qkv.len() * usize::from(i > 0 || !wide);
        self.layers.iter().enumerate().flat_map(move |(i, l)| l.qkv.iter().take(qkv(i, l)).chain(l.mlp_readers()))
    }

    /// What the inputs of the linear layers hold in the int8 form: those of q, k, v, gate and up; of o; of down; of the
    /// head.
    pub fn forms(&self) -> [Forms; 4] {
        let of = |weights: &mut dyn Iterator<Item = &Weight>| {
            weights.map(|w| Forms::of(w.scheme, Mode::Int8)).fold(Forms::default(), Forms::and)
        };
        [
            of(&mut self.readers()),
            of(&mut self.layers.iter().map(|l| &l.o)),
            of(&mut self.layers.iter().filter_map(LayerWeights::down)),
            of(&mut self.heads()),
        ]
    }

    /// The largest padded width of all linear inputs that are as wide as the residual stream, as attention's output,
    /// and as the MLP's inside.
    pub fn widths(&self) -> [usize; 3] {
        let hidden = self.readers().chain(self.heads());
        [
            hidden.map(|w| w.k_pad).max().unwrap_or(0),
            self.layers.iter().map(|l| l.o.k_pad).max().unwrap_or(0),
            self.layers.iter().filter_map(LayerWeights::down).map(|w| w.k_pad).max().unwrap_or(0),
        ]
    }

    /// The same of mixtures: forms and widths of the inputs of gates and ups, and of downs. `None` if there is none.
    pub fn of_experts(&self) -> Option<[(Forms, usize); 2]> {
        let all: Vec<&Experts> = self.layers.iter().filter_map(LayerWeights::experts).collect();
        let of = |weights: &mut dyn Iterator<Item = &Weight>| {
            weights.fold((Forms::default(), 0), |(forms, width), w| {
                (forms.and(Forms::of(w.scheme, Mode::Int8)), width.max(w.k_pad))
            })
        };
        let inputs = of(&mut all.iter().flat_map(|e| &e.up));
        let inner = of(&mut all.iter().map(|e| &e.down));
        (!all.is_empty()).then_some([inputs, inner])
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
            weight: self.vectors(norm.weighted(), &[name.into()])?,
            bias: self.vectors(norm.biased(), &[format!("{name}_bias")])?,
            order: self.order(order)?,
        })
    }

    /// The norm of what a half of a layer gives, if there is one.
    fn after(&mut self, name: &str, norm: &Option<Norm>) -> Result<Option<Input>, CudaError> {
        norm.as_ref().map(|norm| self.input(name, norm, None)).transpose()
    }

    fn layer(&mut self, i: usize, layer: &Layer, angles: &mut Vec<Angles>) -> Result<LayerWeights, CudaError> {
        let name = |name: &str| format!("layers.{i}.{name}");
        let Attn::Gqa { head_dim, ref rope, ref qk_norm, sinks, qkv_bias, o_bias, attn_order, o_order, .. } =
            layer.attn;
        let mlp_order = match layer.mlp {
            Mlp::Gated { mlp_order, .. } | Mlp::Plain { mlp_order, .. } => mlp_order,
            Mlp::Experts { .. } => false,
        };
        let order = |there: bool, tensor: &str| there.then(|| name(tensor));
        Ok(LayerWeights {
            attn_in: self.input(&name("attn_norm"), &layer.attn_norm, order(attn_order, "attn_order"))?,
            qkv: [self.matrix(&name("q"))?, self.matrix(&name("k"))?, self.matrix(&name("v"))?],
            qkv_bias: self.vectors(qkv_bias, &["q_bias", "k_bias", "v_bias"].map(name))?,
            qk_norm: match qk_norm {
                Some(norm) => Some((self.vector(&name("q_norm"))?, self.vector(&name("k_norm"))?, norm.eps())),
                None => None,
            },
            sinks: self.vectors(sinks, &[name("sinks")])?,
            rope: rope.as_ref().map(|rope| Angles::of(angles, rope, head_dim)),
            o_order: self.order(order(o_order, "o_order"))?,
            o: self.matrix(&name("o"))?,
            o_bias: self.vectors(o_bias, &[name("o_bias")])?,
            attn_out: self.after(&name("attn_post_norm"), &layer.attn_post_norm)?,
            mlp_in: self.input(&name("mlp_norm"), &layer.mlp_norm, order(mlp_order, "mlp_order"))?,
            mlp: match layer.mlp {
                Mlp::Gated { act, bias, .. } => MlpWeights::One(Box::new(self.block(i, &["gate", "up"], act, bias)?)),
                Mlp::Plain { act, bias, .. } => MlpWeights::One(Box::new(self.block(i, &["up"], act, bias)?)),
                Mlp::Experts { experts, top, act, normalized, .. } => MlpWeights::Experts(Box::new(Experts {
                    router: self.matrix(&name("router"))?,
                    up: [self.experts(i, experts, "gate")?, self.experts(i, experts, "up")?],
                    act,
                    down: self.experts(i, experts, "down")?,
                    shape: route::Shape { experts, top },
                    normalized,
                })),
            },
            mlp_out: self.after(&name("mlp_post_norm"), &layer.mlp_post_norm)?,
        })
    }

    fn block(&mut self, i: usize, ups: &[&str], act: Act, bias: bool) -> Result<Block, CudaError> {
        let name = |name: &str| format!("layers.{i}.{name}");
        Ok(Block {
            up: ups.iter().map(|up| self.matrix(&name(up))).collect::<Result<_, _>>()?,
            up_bias: self.vectors(bias, &ups.iter().map(|up| name(&format!("{up}_bias"))).collect::<Vec<_>>())?,
            act,
            down: self.matrix(&name("down"))?,
            down_bias: self.vectors(bias, &[name("down_bias")])?,
        })
    }

    /// Weights of all experts of layer `i`.
    fn experts(&mut self, i: usize, experts: usize, name: &str) -> Result<Weight, CudaError> {
        let all: Vec<usize> = (0..experts).map(|e| self.index(&format!("layers.{i}.experts.{e}.{name}"))).collect();
        if self.up.device().info().integrated
            && let Ok(once) = all.iter().map(|&i| self.file.view_once(i)).collect::<Result<Vec<_>, _>>()
        {
            return Weight::upload_experts(
                self.up,
                &once.iter().map(|once| once.view()).collect::<Vec<_>>(),
                self.form,
            );
        }
        Weight::upload_experts(self.up, &all.iter().map(|&i| self.file.view(i)).collect::<Vec<_>>(), self.form)
    }
}
