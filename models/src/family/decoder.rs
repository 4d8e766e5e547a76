//! What llama and its relatives share: RMS norms, rotary embedding, grouped heads, a gated MLP, and the names of
//! their modules. A family reads the config into a [`Decoder`], sets what it does otherwise, and gets its plan.

use super::{
    Config, FamilyError, FamilyPlan, Rule, RuleKind, Take, Tensors,
    names::{Place, padded},
    rope,
};
use crate::spec::{Act, Attn, Layer, MAX_LAYERS, Mlp, ModelSpec, Norm, Rope};

pub(super) struct Decoder {
    place: Place,
    vocab: usize,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    pub head_dim: usize,
    inner: usize,
    act: Act,
    eps: f32,
    rope: Rope,
    max_context: usize,
    tied: bool,
    /// Biases of q, k and v; of o; of the MLP.
    pub qkv_bias: bool,
    pub o_bias: bool,
    pub mlp_bias: bool,
    /// Norms of the heads of q and k.
    pub qk_norm: bool,
    /// Per layer: tokens seen.
    pub windows: Vec<Option<usize>>,
    /// Per layer: whether q and k are turned.
    pub ropes: Vec<bool>,
}

/// What a family assumes where the config is silent.
pub(super) struct Usual {
    pub theta: f32,
    pub context: usize,
    /// Elements of a head; `hidden / heads` if none.
    pub head_dim: Option<usize>,
    pub tied: bool,
}

impl Decoder {
    pub fn read(config: &Config, tensors: &dyn Tensors, usual: Usual) -> Result<Decoder, FamilyError> {
        let place = Place::find(tensors, "embed_tokens", "layers.0", "model.");
        let hidden = config.size("hidden_size")?;
        let heads = config.size("num_attention_heads")?;
        let layers = layers(config, "num_hidden_layers")?;
        let inner = config.size("intermediate_size")?;
        let up = format!("{}layers.0.mlp.up_proj", place.base);
        let vocab = config.size("vocab_size")?;
        let embed = format!("{}embed_tokens", place.base);
        let context = config.size_or("max_position_embeddings", Some(usual.context))?;
        let (rope, max_context) = rope::read(config, usual.theta, context)?;
        Ok(Decoder {
            vocab: padded(config, "vocab_size", vocab, tensors, &embed, false)?,
            hidden,
            heads,
            kv_heads: config.size_or("num_key_value_heads", Some(heads))?,
            head_dim: config.size_or("head_dim", Some(usual.head_dim.unwrap_or(hidden / heads)))?,
            inner: padded(config, "intermediate_size", inner, tensors, &up, false)?,
            act: config.act("hidden_act", Act::Silu)?,
            eps: config.float_or("rms_norm_eps", 1e-6)?,
            rope,
            max_context,
            tied: config.bool_or("tie_word_embeddings", usual.tied)?,
            qkv_bias: false,
            o_bias: false,
            mlp_bias: false,
            qk_norm: false,
            windows: vec![None; layers],
            ropes: vec![true; layers],
            place,
        })
    }

    /// Reads `attention_bias` (of q, k, v and o).
    pub fn attention_bias(&mut self, config: &Config) -> Result<(), FamilyError> {
        self.qkv_bias = config.bool_or("attention_bias", false)?;
        self.o_bias = self.qkv_bias;
        Ok(())
    }

    /// Reads `layer_types` and `sliding_window`, 4096 where the config is silent. Where the types are not given, layer
    /// `i` slides if `implied(i)` and `use_sliding_window`; a window of `null` is none.
    pub fn sliding(&mut self, config: &Config, implied: impl Fn(usize) -> bool) -> Result<(), FamilyError> {
        let layers = self.windows.len();
        let on = config.bool_or("use_sliding_window", false)?;
        let silent = on && !config.has("sliding_window");
        let window = silent || config.get("sliding_window").is_some();
        let slides: Vec<bool> = match config.strings("layer_types", layers)? {
            None => (0..layers).map(|i| on && window && implied(i)).collect(),
            Some(types) => {
                let slides = types.iter().map(|t| match *t {
                    "full_attention" => Ok(false),
                    "sliding_attention" => Ok(true),
                    other => {
                        let expected = "full_attention and sliding_attention";
                        Err(config.unsupported("layer_types", expected, format!("{other:?}")))
                    }
                });
                slides.collect::<Result<_, _>>()?
            }
        };
        if slides.contains(&true) {
            let window = config.size_or("sliding_window", silent.then_some(4096))?;
            self.windows = slides.iter().map(|&s| s.then_some(window)).collect();
        }
        Ok(())
    }

    /// The plan; checks the rest of the config.
    pub fn plan(self, config: &Config, family: &str) -> Result<FamilyPlan, FamilyError> {
        let norm = Norm::Rms { eps: self.eps };
        let layer = |(&window, &turned): (&Option<usize>, &bool)| Layer {
            attn_norm: norm.clone(),
            attn: Attn::Gqa {
                heads: self.heads,
                kv_heads: self.kv_heads,
                head_dim: self.head_dim,
                scale: 1.0 / (self.head_dim as f32).sqrt(),
                rope: turned.then(|| self.rope.clone()),
                window,
                qk_norm: self.qk_norm.then(|| norm.clone()),
                qkv_bias: self.qkv_bias,
                o_bias: self.o_bias,
                attn_order: false,
                o_order: false,
            },
            mlp_norm: norm.clone(),
            mlp: Mlp::Gated { inner: self.inner, act: self.act, bias: self.mlp_bias, mlp_order: false },
        };
        let spec = ModelSpec {
            family: family.into(),
            vocab: self.vocab,
            hidden: self.hidden,
            max_context: self.max_context,
            layers: self.windows.iter().zip(&self.ropes).map(layer).collect(),
            norm: norm.clone(),
            tied_head: self.tied,
            head_order: false,
            positions: None,
            guesses: None,
        };
        let warnings = config.finish()?;
        Ok(FamilyPlan {
            rules: self.rules(),
            spec,
            ignore: &["rotary_emb.inv_freq"],
            others: &[],
            within: None,
            head: None,
            warnings,
        })
    }

    fn rules(&self) -> Vec<Rule> {
        let (hidden, inner, head_dim) = (self.hidden, self.inner, self.head_dim);
        let (q, kv) = (self.heads * head_dim, self.kv_heads * head_dim);
        let mut rules = vec![];
        let mut rule = |target: String, source: String, kind| {
            rules.push(Rule { target, source, kind, take: Take::WHOLE });
        };
        let base = &self.place.base;
        rule("embed".into(), format!("{base}embed_tokens"), RuleKind::Embedding { n: self.vocab, k: hidden });
        for i in 0..self.windows.len() {
            let (to, from) = (format!("layers.{i}"), format!("{base}layers.{i}"));
            let mut linear = |name: &str, module: &str, n, k, bias| {
                rule(format!("{to}.{name}"), format!("{from}.{module}"), RuleKind::Linear { n, k });
                if bias {
                    rule(format!("{to}.{name}_bias"), format!("{from}.{module}"), RuleKind::Bias { n });
                }
            };
            linear("q", "self_attn.q_proj", q, hidden, self.qkv_bias);
            linear("k", "self_attn.k_proj", kv, hidden, self.qkv_bias);
            linear("v", "self_attn.v_proj", kv, hidden, self.qkv_bias);
            linear("o", "self_attn.o_proj", hidden, q, self.o_bias);
            linear("gate", "mlp.gate_proj", inner, hidden, self.mlp_bias);
            linear("up", "mlp.up_proj", inner, hidden, self.mlp_bias);
            linear("down", "mlp.down_proj", hidden, inner, self.mlp_bias);
            let mut vector = |name: &str, module: &str, n| {
                rule(format!("{to}.{name}"), format!("{from}.{module}"), RuleKind::Vector { n });
            };
            vector("attn_norm", "input_layernorm", hidden);
            vector("mlp_norm", "post_attention_layernorm", hidden);
            if self.qk_norm {
                vector("q_norm", "self_attn.q_norm", head_dim);
                vector("k_norm", "self_attn.k_norm", head_dim);
            }
        }
        rule("norm".into(), format!("{base}norm"), RuleKind::Vector { n: hidden });
        rule("head".into(), self.place.head.clone(), RuleKind::Head { n: self.vocab, k: hidden });
        rules
    }
}

/// The number of layers, by this key.
pub(super) fn layers(config: &Config, key: &str) -> Result<usize, FamilyError> {
    match config.size(key)? {
        n if n > MAX_LAYERS => Err(FamilyError::Spec(format!("{key} is {n}, expected 1 to {MAX_LAYERS}"))),
        n => Ok(n),
    }
}
