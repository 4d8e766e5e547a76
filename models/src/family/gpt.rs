//! What GPT-2 and GPT-Neo share: layer norms with biases, learned positions, a plain MLP, a head tied to the
//! embedding. Their attention differs, so each gives its own layers and rules.

use super::{
    Config, FamilyError, FamilyPlan, Rule, RuleKind, Take, Tensors,
    names::{Place, padded},
};
use crate::spec::{Act, Attn, Layer, Mlp, ModelSpec, Norm};

pub(super) struct Gpt {
    place: Place,
    pub hidden: usize,
    pub heads: usize,
    pub inner: usize,
    pub context: usize,
    /// Float weights of the linear layers have their inputs first.
    pub transposed: bool,
    rules: Vec<Rule>,
    layers: Vec<Layer>,
}

impl Gpt {
    pub fn new(tensors: &dyn Tensors, hidden: usize, heads: usize, inner: usize, context: usize) -> Gpt {
        let place = Place::find(tensors, "wte", "h.0", "transformer.");
        Gpt { place, hidden, heads, inner, context, transposed: false, rules: vec![], layers: vec![] }
    }

    /// Elements of a head; they must divide the width.
    pub fn head_dim(&self) -> Result<usize, FamilyError> {
        match self.hidden % self.heads {
            0 => Ok(self.hidden / self.heads),
            _ => Err(FamilyError::Spec(format!("{} heads do not divide a width of {}", self.heads, self.hidden))),
        }
    }

    /// A rule for a module of the next layer.
    pub fn rule(&mut self, name: &str, module: &str, kind: RuleKind, part: Option<(usize, usize)>) {
        let i = self.layers.len();
        let transposed = self.transposed && matches!(kind, RuleKind::Linear { .. });
        let take = Take { transposed, part };
        let source = format!("{}h.{i}.{module}", self.place.base);
        self.rules.push(Rule { target: format!("layers.{i}.{name}"), source, kind, take });
    }

    /// A linear layer and its bias.
    pub fn linear(&mut self, name: &str, module: &str, n: usize, k: usize, part: Option<(usize, usize)>) {
        self.rule(name, module, RuleKind::Linear { n, k }, part);
        self.rule(&format!("{name}_bias"), module, RuleKind::Bias { n }, part);
    }

    /// Finishes a layer whose attention has its rules.
    pub fn layer(&mut self, attn: Attn, act: Act, eps: f32) {
        let (hidden, inner) = (self.hidden, self.inner);
        self.linear("up", "mlp.c_fc", inner, hidden, None);
        self.linear("down", "mlp.c_proj", hidden, inner, None);
        for (name, module) in [("attn_norm", "ln_1"), ("mlp_norm", "ln_2")] {
            self.rule(name, module, RuleKind::Vector { n: hidden }, None);
            self.rule(&format!("{name}_bias"), module, RuleKind::Bias { n: hidden }, None);
        }
        let norm = Norm::Layer { eps };
        let mlp = Mlp::Plain { inner, act, bias: true, mlp_order: false };
        self.layers.push(Layer {
            attn_norm: norm.clone(),
            attn,
            attn_post_norm: None,
            mlp_norm: norm,
            mlp,
            mlp_post_norm: None,
        });
    }

    /// The plan; checks the rest of the config.
    pub fn plan(self, config: &Config, tensors: &dyn Tensors, family: &str) -> Result<FamilyPlan, FamilyError> {
        let (hidden, context, base) = (self.hidden, self.context, &self.place.base);
        let vocab = padded(config, "vocab_size", config.size("vocab_size")?, tensors, &format!("{base}wte"), false)?;
        let rule = |target: &str, source: String, kind| Rule { target: target.into(), source, kind, take: Take::WHOLE };
        let mut rules = vec![
            rule("embed", format!("{base}wte"), RuleKind::Embedding { n: vocab, k: hidden }),
            rule("positions", format!("{base}wpe"), RuleKind::Table { n: context, k: hidden }),
        ];
        rules.extend(self.rules);
        rules.push(rule("norm", format!("{base}ln_f"), RuleKind::Vector { n: hidden }));
        rules.push(rule("norm_bias", format!("{base}ln_f"), RuleKind::Bias { n: hidden }));
        rules.push(rule("head", self.place.head, RuleKind::Head { n: vocab, k: hidden }));
        let eps = self.layers.first().map_or(1e-5, |l| l.attn_norm.eps());
        let spec = ModelSpec {
            family: family.into(),
            vocab,
            hidden,
            max_context: context,
            layers: self.layers,
            norm: Norm::Layer { eps },
            tied_head: config.bool_or("tie_word_embeddings", true)?,
            head_order: false,
            positions: Some(context),
            embed_scale: None,
            logit_cap: None,
            draft_head: None,
        };
        // Masks that old checkpoints hold.
        let ignore = &["attn.bias", "attn.masked_bias", "attention.bias", "attention.masked_bias"];
        Ok(FamilyPlan { spec, rules, ignore, others: &[], within: None, head: None, warnings: config.finish()? })
    }
}
