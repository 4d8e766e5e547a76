//! `ModelSpec`: a decoder as plain data, written into the file and executed by the runtime.
//!
//! A spec says which mechanism each layer uses and with which numbers. A runtime runs any file whose
//! mechanisms it knows, whatever family it came from: unknown fields or variants are an error when
//! the spec is read, never ignored.
//!
//! Tensor names: `embed`, `positions`, `norm`, `head` (absent when tied to `embed`), and per layer `i`
//! `layers.i.attn_norm`, `layers.i.{q,k,v,o}`, `layers.i.{q,k}_norm`, `layers.i.sinks`,
//! `layers.i.attn_post_norm`, `layers.i.mlp_norm`, `layers.i.{gate,up,down}`, `layers.i.mlp_post_norm`; of
//! experts `layers.i.router` and `layers.i.experts.e.{gate,up,down}`. A bias is `NAME_bias`, the order of columns `layers.i.{attn,o,mlp}_order`
//! and `head_order`. Which of them there are, the spec says ([`ModelSpec::tensors`]).

mod head;

use serde::{Deserialize, Serialize};

pub use head::{Head, HeadKind, JoinedMethod, OtherModel, States};

/// A whole decoder, or a head of one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// Family that made the spec; for people, the runtime does not look at it.
    pub family: String,
    /// Rows of the embedding and of the head.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Longest sequence the model was made for, tokens.
    pub max_context: usize,
    /// Layers, in order.
    pub layers: Vec<Layer>,
    /// Norm before the head.
    pub norm: Norm,
    /// The head reuses the embedding tensor.
    pub tied_head: bool,
    /// The head takes its input's columns in the order `head_order`.
    #[serde(default, skip_serializing_if = "is_false")]
    pub head_order: bool,
    /// Rows of a table of learned positions, of which row `p` is added to the embedding of the token at `p`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub positions: Option<usize>,
    /// Factor on the embedding of a token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embed_scale: Option<f32>,
    /// Soft cap of the logits: `cap * tanh(logit / cap)`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logit_cap: Option<f32>,
    /// It is no model: it guesses a model's tokens. The file says `guesses`.
    #[serde(rename = "guesses", default, skip_serializing_if = "Option::is_none")]
    pub draft_head: Option<Head>,
}

fn is_false(b: &bool) -> bool {
    !b
}

/// One decoder layer: `x += attn(norm(x)); x += mlp(norm(x))`, or `x += post_norm(attn(norm(x)))` and so for the MLP.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layer {
    /// Norm before attention.
    pub attn_norm: Norm,
    /// Attention.
    pub attn: Attn,
    /// Norm of what attention gives, its projection and bias included; RMS only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attn_post_norm: Option<Norm>,
    /// Norm before the MLP.
    pub mlp_norm: Norm,
    /// MLP.
    pub mlp: Mlp,
    /// Norm of what the MLP gives; RMS only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mlp_post_norm: Option<Norm>,
}

/// A normalisation with a weight vector.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Norm {
    /// `x / sqrt(mean(x^2) + eps) * w`.
    Rms {
        /// Added to the mean square.
        eps: f32,
    },
    /// `(x - mean(x)) / sqrt(var(x) + eps) * w + b`; `b` is the tensor `NAME_bias`.
    Layer {
        /// Added to the variance.
        eps: f32,
    },
    /// `x`: no norm, no weights. In heads only.
    Identity,
}

impl Norm {
    /// The number added before the root.
    pub fn eps(&self) -> f32 {
        match *self {
            Norm::Rms { eps } | Norm::Layer { eps } => eps,
            Norm::Identity => 0.0,
        }
    }

    /// Whether there are weights.
    pub fn weighted(&self) -> bool {
        !matches!(self, Norm::Identity)
    }

    /// Whether there is a bias.
    pub fn biased(&self) -> bool {
        matches!(self, Norm::Layer { .. })
    }
}

/// An attention mechanism.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Attn {
    /// Softmax attention where `heads / kv_heads` query heads share a key/value head.
    Gqa {
        /// Query heads.
        heads: usize,
        /// Key/value heads; divides `heads`.
        kv_heads: usize,
        /// Elements of a head.
        head_dim: usize,
        /// Factor on `q . k`.
        scale: f32,
        /// Rotary embedding of q and k, if any.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        rope: Option<Rope>,
        /// Tokens that a token sees, itself included; all before it if there is none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        window: Option<usize>,
        /// Soft cap of the scores (`scale * q . k`) before the mask and the softmax: `cap * tanh(score / cap)`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cap: Option<f32>,
        /// Every query head has a score more, `sinks` `[heads]`, which takes part in the softmax and has no value. Neither
        /// scaled nor capped.
        #[serde(default, skip_serializing_if = "is_false")]
        sinks: bool,
        /// Norm of every head of q and of k before rope, weights `q_norm` and `k_norm` `[head_dim]`; RMS only.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        qk_norm: Option<Norm>,
        /// q, k and v have biases.
        #[serde(default, skip_serializing_if = "is_false")]
        qkv_bias: bool,
        /// o has a bias.
        #[serde(default, skip_serializing_if = "is_false")]
        o_bias: bool,
        /// q, k and v take their input's columns in the order `attn_order`.
        #[serde(default, skip_serializing_if = "is_false")]
        attn_order: bool,
        /// o takes its input's columns in the order `o_order`.
        #[serde(default, skip_serializing_if = "is_false")]
        o_order: bool,
    },
}

/// A rotary position embedding over the whole head, pairs `(i, i + head_dim/2)`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f32,
    /// Change of the frequencies for longer contexts.
    pub scaling: RopeScaling,
}

/// How rope frequencies are changed for contexts beyond the trained one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum RopeScaling {
    /// As trained.
    None,
    /// Every frequency divided by `factor`.
    Linear {
        /// Divisor.
        factor: f32,
    },
    /// YaRN: short wavelengths kept, long ones divided, a ramp between; cosines and sines times a factor
    /// (Peng et al. 2023; transformers `_compute_yarn_parameters`).
    Yarn {
        /// Divisor of the long wavelengths.
        factor: f32,
        /// Rotations within `original_context` above which a pair is kept.
        beta_fast: f32,
        /// Rotations below which a pair is divided.
        beta_slow: f32,
        /// Context length of the training.
        original_context: usize,
        /// Factor on cosines and sines.
        attention_factor: f32,
        /// The ramp's ends are rounded outwards to whole pairs.
        truncate: bool,
    },
    /// Llama 3.1's: long wavelengths divided, short ones kept, a ramp between.
    Llama3 {
        /// Divisor of the long wavelengths.
        factor: f32,
        /// Wavelengths beyond `original_context / low_freq_factor` are divided.
        low_freq_factor: f32,
        /// Wavelengths below `original_context / high_freq_factor` are kept.
        high_freq_factor: f32,
        /// Context length of the training.
        original_context: usize,
    },
}

/// A feed-forward block.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Mlp {
    /// `down(act(gate(x)) * up(x))`.
    Gated {
        /// Rows of gate and up.
        inner: usize,
        /// Activation of the gate.
        act: Act,
        /// gate, up and down have biases.
        #[serde(default, skip_serializing_if = "is_false")]
        bias: bool,
        /// gate and up take their input's columns in the order `mlp_order`.
        #[serde(default, skip_serializing_if = "is_false")]
        mlp_order: bool,
    },
    /// `down(act(up(x)))`.
    Plain {
        /// Rows of up.
        inner: usize,
        /// Activation.
        act: Act,
        /// up and down have biases.
        #[serde(default, skip_serializing_if = "is_false")]
        bias: bool,
        /// up takes its input's columns in the order `mlp_order`.
        #[serde(default, skip_serializing_if = "is_false")]
        mlp_order: bool,
    },
    /// Several gated blocks of which a router picks some for each token:
    /// `sum over the top of w_e * down_e(act(gate_e(x)) * up_e(x))`, `w = softmax(router(x))`. Of equal logits the lower
    /// expert is picked first. (Mixtral, Jiang et al. 2024; transformers `modeling_mixtral.py`.)
    Experts {
        /// Rows of the router.
        experts: usize,
        /// Experts picked for a token.
        top: usize,
        /// Rows of each gate and up.
        inner: usize,
        /// Activation of the gates.
        act: Act,
        /// The weights of those picked are divided by their sum: a softmax over them alone.
        #[serde(default, skip_serializing_if = "is_false")]
        normalized: bool,
    },
}

/// Most experts of a layer.
pub const MAX_EXPERTS: usize = 1024;

/// Most experts of all layers: a list of their tensors stays small.
const MAX_ALL_EXPERTS: usize = 1 << 17;

/// Most experts that a token may have.
pub const MAX_TOP: usize = 64;

impl Mlp {
    /// Rows of the first layer, of one expert: inputs of `down`.
    pub fn inner(&self) -> usize {
        match *self {
            Mlp::Gated { inner, .. } | Mlp::Plain { inner, .. } | Mlp::Experts { inner, .. } => inner,
        }
    }

    /// Whether a router picks blocks.
    pub fn routed(&self) -> bool {
        matches!(self, Mlp::Experts { .. })
    }
}

/// An elementwise activation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Act {
    /// `x * sigmoid(x)`.
    Silu,
    /// `x * (1 + erf(x / sqrt 2)) / 2`.
    Gelu,
    /// `x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2`.
    GeluTanh,
}

/// A tensor that a spec needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Needed {
    /// Our name.
    pub name: String,
    /// `[n, k]`, or `[n]` for a vector.
    pub dims: Vec<u64>,
    /// A permutation ([`Scheme::Order`](crate::Scheme::Order)), not weights.
    pub order: bool,
}

/// A spec that contradicts itself or that this version cannot run.
#[derive(Debug, thiserror::Error)]
#[error("model spec: {0}")]
pub struct SpecError(pub String);

/// Largest value of any size in a spec: keeps every product of two sizes within 64 bits.
const MAX_SIZE: usize = 1 << 28;

/// Most layers of a model.
pub const MAX_LAYERS: usize = 4096;

impl ModelSpec {
    /// Checks every size against every other, so that the runtime may rely on them.
    pub fn check(&self) -> Result<(), SpecError> {
        let size = |what: &str, v: usize, max: usize| {
            if v == 0 || v > max {
                return Err(SpecError(format!("{what} is {v}, expected 1 to {max}")));
            }
            Ok(())
        };
        if self.family.chars().any(char::is_control) {
            return Err(SpecError(format!("family {:?} has control characters", self.family)));
        }
        size("vocab", self.vocab, MAX_SIZE)?;
        size("hidden", self.hidden, MAX_SIZE)?;
        size("max_context", self.max_context, MAX_SIZE)?;
        match &self.draft_head {
            Some(head) => head.check(self)?,
            None => size("the number of layers", self.layers.len(), MAX_LAYERS)?,
        }
        if self.layers.len() > MAX_LAYERS {
            return Err(SpecError(format!("{} layers, expected 0 to {MAX_LAYERS}", self.layers.len())));
        }
        if let Some(rows) = self.positions {
            size("positions", rows, MAX_SIZE)?;
            if rows < self.max_context {
                let max = self.max_context;
                return Err(SpecError(format!("{rows} positions, expected at least max_context, {max}")));
            }
        }
        let positive = |what: &str, v: Option<f32>| match v {
            Some(v) if !(v > 0.0 && v.is_finite()) => {
                Err(SpecError(format!("{what} is {v}, expected a finite number above 0")))
            }
            _ => Ok(()),
        };
        positive("embed_scale", self.embed_scale)?;
        positive("logit_cap", self.logit_cap)?;
        if self.head_order && self.tied_head {
            return Err(SpecError("head_order and tied_head exclude each other".into()));
        }
        let norms = self.layers.iter().flat_map(|l| [&l.attn_norm, &l.mlp_norm]).chain([&self.norm]);
        let post = self.layers.iter().flat_map(|l| [&l.attn_post_norm, &l.mlp_post_norm]).flatten();
        let norms = norms.chain(post);
        let qk = self.layers.iter().filter_map(|l| match &l.attn {
            Attn::Gqa { qk_norm, .. } => qk_norm.as_ref(),
        });
        let heads = self.draft_head.iter().flat_map(Head::norms);
        for norm in norms.chain(qk).chain(heads) {
            if !norm.weighted() && self.draft_head.is_none() {
                return Err(SpecError("a model's layer without a norm, which only heads have".into()));
            }
            let eps = norm.eps();
            if !(eps.is_finite() && eps >= 0.0) {
                return Err(SpecError(format!("a norm's eps is {eps}, expected a finite number of at least 0")));
            }
        }
        let experts = self.layers.iter().map(|l| match l.mlp {
            Mlp::Experts { experts, .. } => experts,
            _ => 0,
        });
        let experts = experts.fold(0, usize::saturating_add);
        if experts > MAX_ALL_EXPERTS {
            return Err(SpecError(format!("{experts} experts in all layers, expected up to {MAX_ALL_EXPERTS}")));
        }
        for (i, layer) in self.layers.iter().enumerate() {
            let Attn::Gqa { heads, kv_heads, head_dim, scale, rope, window, cap, qk_norm, .. } = &layer.attn;
            size(&format!("layer {i}: heads"), *heads, 4096)?;
            size(&format!("layer {i}: kv_heads"), *kv_heads, 4096)?;
            if heads % kv_heads != 0 || heads / kv_heads > 64 {
                return Err(SpecError(format!(
                    "layer {i}: {kv_heads} kv_heads cannot serve {heads} heads (1 to 64 each)"
                )));
            }
            if *head_dim == 0 || head_dim % 8 != 0 || *head_dim > 256 {
                return Err(SpecError(format!(
                    "layer {i}: head_dim is {head_dim}, expected a multiple of 8 up to 256"
                )));
            }
            if !(*scale > 0.0 && scale.is_finite()) {
                return Err(SpecError(format!("layer {i}: scale {scale} must be finite and positive")));
            }
            if let Some(window) = window {
                size(&format!("layer {i}: window"), *window, MAX_SIZE)?;
            }
            positive(&format!("layer {i}: cap"), *cap)?;
            let post = [&layer.attn_post_norm, &layer.mlp_post_norm];
            if post.into_iter().flatten().any(|norm| norm.biased() || !norm.weighted()) {
                return Err(SpecError(format!("layer {i}: a norm of what a half gives must be an RMS norm")));
            }
            if qk_norm.as_ref().is_some_and(|norm| norm.biased() || !norm.weighted()) {
                return Err(SpecError(format!("layer {i}: the norm of q and k must be an RMS norm")));
            }
            if let Some(rope) = rope {
                rope.check().map_err(|e| SpecError(format!("layer {i}: {e}")))?;
            }
            size(&format!("layer {i}: inner"), layer.mlp.inner(), MAX_SIZE)?;
            if let Mlp::Experts { experts, top, .. } = layer.mlp {
                size(&format!("layer {i}: experts"), experts, MAX_EXPERTS)?;
                size(&format!("layer {i}: top"), top, MAX_TOP.min(experts))?;
                if self.draft_head.is_some() {
                    return Err(SpecError(format!("layer {i}: experts in a head, which this version cannot run")));
                }
                if layer.mlp_post_norm.is_some() {
                    return Err(SpecError(format!("layer {i}: a norm behind experts, which this version cannot run")));
                }
            }
        }
        Ok(())
    }

    /// Every tensor the runtime will ask for, in the order in which a step reads them.
    pub fn tensors(&self) -> Vec<Needed> {
        let mut all = vec![];
        let need = |all: &mut Vec<Needed>, name: String, dims: &[usize]| {
            all.push(Needed { name, dims: dims.iter().map(|&d| d as u64).collect(), order: false });
        };
        let order = |all: &mut Vec<Needed>, name: String, there: bool, k: usize| {
            if there {
                all.push(Needed { name, dims: vec![k as u64], order: true });
            }
        };
        let vectors = |all: &mut Vec<Needed>, names: &[&str], there: bool, at: &str, n: usize| {
            for name in names.iter().filter(|_| there) {
                need(all, format!("{at}{name}"), &[n]);
            }
        };
        let hidden = self.hidden;
        if self.embeds() {
            need(&mut all, "embed".into(), &[self.known_tokens(), hidden]);
        }
        if let Some(rows) = self.positions {
            need(&mut all, "positions".into(), &[rows, hidden]);
        }
        if let Some(head) = &self.draft_head {
            self.input_of(head, &mut all);
        }
        for (i, layer) in self.layers.iter().enumerate() {
            let Attn::Gqa {
                heads, kv_heads, head_dim, ref qk_norm, sinks, qkv_bias, o_bias, attn_order, o_order, ..
            } = layer.attn;
            let (q, kv) = (heads * head_dim, kv_heads * head_dim);
            let (inner, all, at) = (layer.mlp.inner(), &mut all, format!("layers.{i}."));
            let width = self.attn_width(i);
            vectors(all, &["attn_norm"], layer.attn_norm.weighted(), &at, hidden);
            vectors(all, &["attn_norm_bias"], layer.attn_norm.biased(), &at, hidden);
            order(all, format!("{at}attn_order"), attn_order, width);
            for (name, n) in [("q", q), ("k", kv), ("v", kv)] {
                need(all, format!("{at}{name}"), &[n, width]);
                vectors(all, &["_bias"], qkv_bias, &format!("{at}{name}"), n);
            }
            vectors(all, &["q_norm", "k_norm"], qk_norm.is_some(), &at, head_dim);
            vectors(all, &["sinks"], sinks, &at, heads);
            order(all, format!("{at}o_order"), o_order, q);
            need(all, format!("{at}o"), &[hidden, q]);
            vectors(all, &["o_bias"], o_bias, &at, hidden);
            vectors(all, &["attn_post_norm"], layer.attn_post_norm.is_some(), &at, hidden);
            vectors(all, &["mlp_norm"], layer.mlp_norm.weighted(), &at, hidden);
            vectors(all, &["mlp_norm_bias"], layer.mlp_norm.biased(), &at, hidden);
            let (names, bias, mlp_order) = match layer.mlp {
                Mlp::Gated { bias, mlp_order, .. } => (&["gate", "up"][..], bias, mlp_order),
                Mlp::Plain { bias, mlp_order, .. } => (&["up"][..], bias, mlp_order),
                Mlp::Experts { experts, .. } => {
                    need(all, format!("{at}router"), &[experts, hidden]);
                    for e in 0..experts {
                        need(all, format!("{at}experts.{e}.gate"), &[inner, hidden]);
                        need(all, format!("{at}experts.{e}.up"), &[inner, hidden]);
                        need(all, format!("{at}experts.{e}.down"), &[hidden, inner]);
                    }
                    continue;
                }
            };
            order(all, format!("{at}mlp_order"), mlp_order, hidden);
            for name in names {
                need(all, format!("{at}{name}"), &[inner, hidden]);
                vectors(all, &["_bias"], bias, &format!("{at}{name}"), inner);
            }
            need(all, format!("{at}down"), &[hidden, inner]);
            vectors(all, &["down_bias"], bias, &at, hidden);
            vectors(all, &["mlp_post_norm"], layer.mlp_post_norm.is_some(), &at, hidden);
        }
        vectors(&mut all, &["norm"], self.norm.weighted(), "", hidden);
        vectors(&mut all, &["norm_bias"], self.norm.biased(), "", hidden);
        if !self.tied_head && self.has_head() {
            order(&mut all, "head_order".into(), self.head_order, hidden);
            need(&mut all, "head".into(), &[self.vocab, hidden]);
        }
        all
    }

    /// Tokens that may come in.
    pub fn known_tokens(&self) -> usize {
        self.draft_head.as_ref().map_or(self.vocab, |head| head.model_vocab)
    }

    /// Numbers that q, k and v of a layer read.
    pub fn attn_width(&self, layer: usize) -> usize {
        let wide = layer == 0 && matches!(self.draft_head, Some(Head { kind: HeadKind::Wide { .. }, .. }));
        if wide { 2 * self.hidden } else { self.hidden }
    }

    /// Whether there is a tensor `embed`.
    fn embeds(&self) -> bool {
        let own = |head: &Head| !head.shared_embed && !matches!(head.kind, HeadKind::Medusa { .. });
        self.draft_head.as_ref().is_none_or(own)
    }

    /// Whether there is a tensor `head` if it is not `embed`.
    fn has_head(&self) -> bool {
        let own = |head: &Head| !head.shared_head && !matches!(head.kind, HeadKind::Medusa { .. });
        self.draft_head.as_ref().is_none_or(own)
    }

    /// Tensors of a head besides those of its layers.
    fn input_of(&self, head: &Head, all: &mut Vec<Needed>) {
        let mut need = |name: String, dims: &[usize]| {
            all.push(Needed { name, dims: dims.iter().map(|&d| d as u64).collect(), order: false });
        };
        let hidden = self.hidden;
        if head.fuses() {
            need("fuse".into(), &[hidden, head.width()]);
        }
        for (name, norm) in ["embed_norm", "state_norm"].iter().rev().zip(head.norms().into_iter().rev()) {
            if norm.weighted() {
                need(name.to_string(), &[hidden]);
            }
            if norm.biased() {
                need(format!("{name}_bias"), &[hidden]);
            }
        }
        if let HeadKind::Joined { bias, .. } = head.kind {
            need("project".into(), &[hidden, 2 * hidden]);
            if bias {
                need("project_bias".into(), &[hidden]);
            }
        }
        if let HeadKind::Medusa { guesses, depth } = head.kind {
            for i in 0..guesses {
                for j in 0..depth {
                    need(format!("guess.{i}.block.{j}"), &[hidden, hidden]);
                    need(format!("guess.{i}.block.{j}_bias"), &[hidden]);
                }
                need(format!("guess.{i}.head"), &[self.vocab, hidden]);
            }
        }
        if head.mapped {
            need("tokens".into(), &[self.vocab]);
        }
    }
}

impl Rope {
    /// Checks that all numbers make sense together.
    fn check(&self) -> Result<(), String> {
        if !(self.theta.is_finite() && self.theta > 0.0) {
            return Err(format!("rope theta {} must be finite and positive", self.theta));
        }
        let factors = match self.scaling {
            RopeScaling::None => vec![],
            RopeScaling::Linear { factor } => vec![factor],
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_context, attention_factor, .. } => {
                vec![factor, beta_fast, beta_slow, original_context as f32, attention_factor, self.theta - 1.0]
            }
            RopeScaling::Llama3 { factor, low_freq_factor: low, high_freq_factor: high, original_context } => {
                vec![factor, low, high - low, original_context as f32]
            }
        };
        if !factors.iter().all(|f| f.is_finite() && *f > 0.0) {
            let what = "factors must be finite and positive, high_freq_factor above low_freq_factor, \
                        with YaRN theta above 1";
            return Err(format!("rope scaling {:?}: {what}", self.scaling));
        }
        Ok(())
    }

    /// Factor on cosines and sines.
    pub fn attention_factor(&self) -> f32 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } => attention_factor,
            _ => 1.0,
        }
    }

    /// Angles per position for the `head_dim / 2` pairs, f32.
    ///
    /// Computed in f64 and rounded once; the reference library computes in f32, a difference of
    /// about one unit in the last place. Llama 3's ramp is transformers'
    /// `_compute_llama3_parameters` (modeling_rope_utils.py).
    pub fn inv_freq(&self, head_dim: usize) -> Vec<f32> {
        (0..head_dim / 2)
            .map(|i| {
                let base = (self.theta as f64).powf(-((2 * i) as f64) / head_dim as f64);
                match self.scaling {
                    RopeScaling::None => base as f32,
                    RopeScaling::Linear { factor } => (base / factor as f64) as f32,
                    RopeScaling::Yarn { factor, beta_fast, beta_slow, original_context, truncate, .. } => {
                        let dim = head_dim as f64;
                        // The pair that turns `rotations` times within the original context.
                        let pair = |rotations: f32| {
                            let length = original_context as f64 / (rotations as f64 * std::f64::consts::TAU);
                            dim * length.ln() / (2.0 * (self.theta as f64).ln())
                        };
                        let (low, high) = (pair(beta_fast), pair(beta_slow));
                        let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
                        let (low, high) = (low.max(0.0), high.min(dim - 1.0));
                        let high = if low == high { high + 0.001 } else { high };
                        let divided = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                        (base / factor as f64 * divided + base * (1.0 - divided)) as f32
                    }
                    RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                        let (factor, low, high) = (factor as f64, low_freq_factor as f64, high_freq_factor as f64);
                        let context = original_context as f64;
                        let wavelen = std::f64::consts::TAU / base;
                        let freq = if wavelen > context / low {
                            base / factor
                        } else if wavelen < context / high {
                            base
                        } else {
                            let smooth = (context / wavelen - low) / (high - low);
                            (1.0 - smooth) * base / factor + smooth * base
                        };
                        freq as f32
                    }
                }
            })
            .collect()
    }
}

/// What a model's authors recommend for generation, and its special tokens.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Generation {
    /// Sampling temperature.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f32>,
    /// Keep the k most likely tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<u32>,
    /// Keep the most likely tokens that together reach this probability.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f32>,
    /// Keep tokens at least this fraction as likely as the most likely one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_p: Option<f32>,
    /// Divides (multiplies) positive (negative) logits of tokens seen before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repetition_penalty: Option<f32>,
    /// Whether the authors sample at all; false means greedy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub do_sample: Option<bool>,
    /// Tokens that end an answer.
    pub eos: Vec<u32>,
    /// Token that begins a text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bos: Option<u32>,
    /// Padding token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pad: Option<u32>,
    /// Text of the beginning token, as templates use it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bos_text: Option<String>,
    /// Text of the end token, as templates use it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eos_text: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_rope_keeps_short_and_divides_long_wavelengths() {
        let plain = Rope { theta: 500000.0, scaling: RopeScaling::None }.inv_freq(128);
        let scaling =
            RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192 };
        let scaled = Rope { theta: 500000.0, scaling }.inv_freq(128);
        assert_eq!(scaled[0], 1.0);
        assert_eq!(scaled[63], plain[63] / 8.0);
        assert!(scaled.windows(2).all(|w| w[1] < w[0]));
    }

    /// Numbers of transformers 5.24 (`LlamaRotaryEmbedding.inv_freq`), heads of 32.
    #[test]
    fn frequencies_are_those_of_transformers() {
        let yarn = |factor, beta_fast, beta_slow, original_context, truncate| RopeScaling::Yarn {
            factor,
            beta_fast,
            beta_slow,
            original_context,
            attention_factor: 1.0,
            truncate,
        };
        let cases = [
            (
                10000.0,
                RopeScaling::Linear { factor: 4.0 },
                [
                    0.25,
                    0.14058533,
                    0.079056941,
                    0.044456985,
                    0.025,
                    0.014058532,
                    0.0079056947,
                    0.0044456986,
                    0.0024999999,
                    0.0014058533,
                    0.00079056947,
                    0.00044456986,
                    0.00025000001,
                    0.00014058533,
                    7.9056947e-05,
                    4.4456985e-05,
                ],
            ),
            (
                10000.0,
                yarn(4.0, 32.0, 1.0, 64, true),
                [
                    1.0,
                    0.47799012,
                    0.22135943,
                    0.097805366,
                    0.039999999,
                    0.014058532,
                    0.0079056947,
                    0.0044456986,
                    0.0024999999,
                    0.0014058533,
                    0.00079056947,
                    0.00044456986,
                    0.00025000001,
                    0.00014058533,
                    7.9056947e-05,
                    4.4456985e-05,
                ],
            ),
            (
                1e6,
                yarn(8.0, 16.0, 2.0, 4096, false),
                [
                    1.0,
                    0.42169651,
                    0.17782794,
                    0.074989416,
                    0.031622779,
                    0.0099120783,
                    0.0021367006,
                    0.00029642173,
                    0.00012500001,
                    5.2712061e-05,
                    2.2228493e-05,
                    9.373678e-06,
                    3.9528468e-06,
                    1.6669018e-06,
                    7.0292668e-07,
                    2.9642172e-07,
                ],
            ),
            (
                10000.0,
                RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 64 },
                [
                    1.0,
                    0.56234133,
                    0.24438459,
                    0.064309873,
                    0.013042256,
                    0.0070292661,
                    0.0039528473,
                    0.0022228493,
                    0.00125,
                    0.00070292666,
                    0.00039528473,
                    0.00022228493,
                    0.00012500001,
                    7.0292663e-05,
                    3.9528473e-05,
                    2.2228493e-05,
                ],
            ),
        ];
        for (theta, scaling, want) in cases {
            let got = Rope { theta, scaling: scaling.clone() }.inv_freq(32);
            for (got, want) in got.iter().zip(want) {
                let apart: f64 = *got as f64 / want - 1.0;
                assert!(apart.abs() < 1e-6, "{scaling:?}: {got}, expected {want}");
            }
        }
    }

    /// A file of before these mechanisms: what it does not say is what it always was.
    #[test]
    fn old_specs_are_read_as_before() {
        let old = r#"{"family":"llama","vocab":8,"hidden":8,"max_context":64,"layers":[{
            "attn_norm":{"kind":"rms","eps":1e-5},
            "attn":{"kind":"gqa","heads":1,"kv_heads":1,"head_dim":8,"scale":0.5,
                "rope":{"theta":10000.0,"scaling":{"kind":"none"}}},
            "mlp_norm":{"kind":"rms","eps":1e-5},
            "mlp":{"kind":"gated","inner":8,"act":"silu"}}],
            "norm":{"kind":"rms","eps":1e-5},"tied_head":true}"#;
        let spec: ModelSpec = serde_json::from_str(old).unwrap();
        spec.check().unwrap();
        assert_eq!(spec.tensors().len(), 1 + 9 + 1);
        assert!(spec.tensors().iter().all(|t| !t.order && !t.name.ends_with("_bias")));
        let again = serde_json::to_string(&spec).unwrap();
        for absent in ["bias", "window", "positions", "cap\"", "sinks", "post_norm", "embed_scale"] {
            assert!(!again.contains(absent), "{absent}: {again}");
        }
    }

    #[test]
    fn an_unknown_field_is_refused() {
        let err = serde_json::from_str::<Norm>(r#"{"kind":"rms","eps":1e-5,"bias":true}"#).unwrap_err();
        assert!(err.to_string().contains("bias"), "{err}");
    }
}
