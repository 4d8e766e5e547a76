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
    pub sizes: Sizes,
    max_context: usize,
    tied: bool,
    /// Biases of q, k and v; of o; of the MLP.
    pub qkv_bias: bool,
    pub o_bias: bool,
    pub mlp_bias: bool,
    /// Norms of the heads of q and k.
    pub qk_norm: bool,
    /// Soft cap of the scores, and of the logits.
    pub cap: Option<f32>,
    pub logit_cap: Option<f32>,
    /// Factor on embeddings.
    pub embed_scale: Option<f32>,
    /// Norms of what attention and the MLP give.
    pub post_norms: bool,
    /// Norms multiply by one plus their weights.
    pub one_plus: bool,
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
    /// Base of the rope of layers that see a window, where the config has two.
    pub local_theta: Option<f32>,
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
            cap: None,
            logit_cap: None,
            embed_scale: None,
            post_norms: false,
            one_plus: false,
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
        let slides = slides(config, layers)?;
        let slides = slides.unwrap_or_else(|| (0..layers).map(|i| on && window && implied(i)).collect());
        if slides.contains(&true) {
            let window = config.size_or("sliding_window", silent.then_some(4096))?;
            self.windows = slides.iter().map(|&s| s.then_some(window)).collect();
        }
        Ok(())
    }

    /// Reads `layer_types` and `sliding_window`, which is 4096 where the config is silent. Where the types are not given,
    /// layer `i` slides if `implied(i)`.
    pub fn alternating(&mut self, config: &Config, implied: impl Fn(usize) -> bool) -> Result<(), FamilyError> {
        let layers = self.windows.len();
        let window = config.size_or("sliding_window", (!config.has("sliding_window")).then_some(4096))?;
        let slides = slides(config, layers)?.unwrap_or_else(|| (0..layers).map(implied).collect());
        self.windows = slides.iter().map(|&s| s.then_some(window)).collect();
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
            embed_scale: self.embed_scale,
            logit_cap: self.logit_cap,
            draft_head: None,
        };
        let warnings = config.finish()?;
        // Before a list is made of as many tensors as the config says.
        spec.check().map_err(|e| FamilyError::Spec(e.to_string()))?;
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
            cap: self.cap,
            post_norms: self.post_norms,
            one_plus: self.one_plus,
        }
    }

    fn rules(&self) -> Vec<Rule> {
        let (base, n, k) = (&self.place.base, self.vocab, self.sizes.hidden);
        let rule = |target: &str, source: String, kind| Rule { target: target.into(), source, kind, take: Take::WHOLE };
        let mut rules = vec![rule("embed", format!("{base}embed_tokens"), RuleKind::Embedding { n, k })];
        for i in 0..self.windows.len() {
            rules.extend(self.sizes.rules(&self.parts(i), &format!("layers.{i}"), &format!("{base}layers.{i}")));
        }
        let norm = if self.one_plus { RuleKind::OnePlus { n: k } } else { RuleKind::Vector { n: k } };
        rules.push(rule("norm", format!("{base}norm"), norm));
        rules.push(rule("head", self.place.head.clone(), RuleKind::Head { n, k }));
        rules
    }
}

/// Which layers slide, by `layer_types`; `None` where the config has none.
fn slides(config: &Config, layers: usize) -> Result<Option<Vec<bool>>, FamilyError> {
    let Some(types) = config.strings("layer_types", layers)? else { return Ok(None) };
    let slides = types.iter().map(|t| match *t {
        "full_attention" => Ok(false),
        "sliding_attention" => Ok(true),
        other => {
            let expected = "full_attention and sliding_attention";
            Err(config.unsupported("layer_types", expected, format!("{other:?}")))
        }
    });
    slides.collect::<Result<_, _>>().map(Some)
}

/// The number of layers, by this key.
pub(super) fn layers(config: &Config, key: &str) -> Result<usize, FamilyError> {
    match config.size(key)? {
        n if n > MAX_LAYERS => Err(FamilyError::Spec(format!("{key} is {n}, expected 1 to {MAX_LAYERS}"))),
        n => Ok(n),
    }
}
