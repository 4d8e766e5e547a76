//! What llama and its relatives share: RMS norms, rotary embedding, grouped heads, a gated MLP, and the names of
//! their modules. A family reads the config into a [`Decoder`], sets what it does otherwise, and gets its plan.

use super::{
    Config, FamilyError, FamilyPlan, Rule, RuleKind, Take, Tensors,
    layer::{Experts, Parts, Sizes},
    names::{Place, padded},
};
use crate::spec::{MAX_LAYERS, ModelSpec};

pub(super) struct Decoder {
    place: Place,
    vocab: usize,
    sizes: Sizes,
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
    /// The mixture that layers have, and which of them have it.
    pub experts: Option<(Experts, Vec<bool>)>,
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
        let up = format!("{}layers.0.mlp.up_proj", place.base);
        let (sizes, max_context) = Sizes::read(config, tensors, &up, &usual)?;
        let layers = layers(config, "num_hidden_layers")?;
        let vocab = config.size("vocab_size")?;
        let embed = format!("{}embed_tokens", place.base);
        Ok(Decoder {
            vocab: padded(config, "vocab_size", vocab, tensors, &embed, false)?,
            sizes,
            max_context,
            tied: config.bool_or("tie_word_embeddings", usual.tied)?,
            qkv_bias: false,
            o_bias: false,
            mlp_bias: false,
            qk_norm: false,
            windows: vec![None; layers],
            ropes: vec![true; layers],
            experts: None,
            place,
        })
    }

    /// Rows of gate and up.
    pub fn inner(&self) -> usize {
        self.sizes.inner
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
        let layers = (0..self.windows.len()).map(|i| self.sizes.layer(&self.parts(i)));
        let spec = ModelSpec {
            family: family.into(),
            vocab: self.vocab,
            hidden: self.sizes.hidden,
            max_context: self.max_context,
            layers: layers.collect(),
            norm: self.sizes.norm(),
            tied_head: self.tied,
            head_order: false,
            positions: None,
            draft_head: None,
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

    /// What a layer has.
    fn parts(&self, i: usize) -> Parts<'_> {
        Parts {
            norm: Some("input_layernorm"),
            width: self.sizes.hidden,
            window: self.windows[i],
            turned: self.ropes[i],
            qkv_bias: self.qkv_bias,
            o_bias: self.o_bias,
            mlp_bias: self.mlp_bias,
            qk_norm: self.qk_norm,
            experts: self.experts.as_ref().filter(|(_, has)| has[i]).map(|(experts, _)| experts),
        }
    }

    fn rules(&self) -> Vec<Rule> {
        let (base, n, k) = (&self.place.base, self.vocab, self.sizes.hidden);
        let rule = |target: &str, source: String, kind| Rule { target: target.into(), source, kind, take: Take::WHOLE };
        let mut rules = vec![rule("embed", format!("{base}embed_tokens"), RuleKind::Embedding { n, k })];
        for i in 0..self.windows.len() {
            rules.extend(self.sizes.rules(&self.parts(i), &format!("layers.{i}"), &format!("{base}layers.{i}")));
        }
        rules.push(rule("norm", format!("{base}norm"), RuleKind::Vector { n: k }));
        rules.push(rule("head", self.place.head.clone(), RuleKind::Head { n, k }));
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
