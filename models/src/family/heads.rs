//! Heads: from a checkpoint of one, and the model that it is for, to a spec and the tensors to take.
//!
//! Which layout it is, and which biases and norms there are, is seen by the tensors; the config gives numbers. Sizes
//! that do not fit the model are errors: a head of another model would guess, but never right.

mod dflash;
mod eagle1;
mod eagle3;
mod medusa;
pub(super) mod mimo;

use serde_json::Value;

use super::{
    Config, FamilyError, FamilyPlan, Rule, RuleKind, Take, Tensors,
    decoder::Usual,
    layer::{Parts, Sizes},
    names::padded,
};
use crate::spec::{Head, HeadKind, Layer, ModelSpec, Norm, States};

/// A layout of heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadLayout {
    /// SafeAILab's EAGLE 1 and 2.
    Eagle1,
    /// EAGLE-3, by SafeAILab or as speculators stores it.
    Eagle3,
    /// MiMo's prediction layer.
    Mimo,
    /// Medusa's heads.
    Medusa,
    /// z-lab's DFlash.
    Dflash,
}

impl HeadLayout {
    /// The layout of a checkpoint that has a head, if any is known.
    pub fn of(config: &Value, tensors: &dyn Tensors) -> Option<HeadLayout> {
        let at = |module: &str| tensors.names().any(|name| module_base(name, module).is_some());
        // A block's drafter has a norm of what it fuses beside its layers, not in one.
        let dflash = config.get("dflash_config").is_some() || at("fc") && at("hidden_norm");
        Some(if at("mtp_layers.0.input_proj") {
            HeadLayout::Mimo
        } else if at("midlayer.self_attn.q_proj") || at("layers.0.hidden_norm") {
            HeadLayout::Eagle3
        } else if dflash {
            HeadLayout::Dflash
        } else if medusa::base(tensors).is_some() {
            HeadLayout::Medusa
        } else if at("fc") && at("layers.0.self_attn.q_proj") {
            HeadLayout::Eagle1
        } else {
            return None;
        })
    }

    /// For messages.
    pub fn name(self) -> &'static str {
        match self {
            HeadLayout::Eagle1 => "EAGLE",
            HeadLayout::Eagle3 => "EAGLE-3",
            HeadLayout::Mimo => "MiMo's prediction layer",
            HeadLayout::Medusa => "Medusa",
            HeadLayout::Dflash => "DFlash",
        }
    }
}

/// What stands before `module` in a tensor's name, if it is of that module of a head: parts of a multimodal model may
/// have the same names elsewhere.
fn module_base<'a>(name: &'a str, module: &str) -> Option<&'a str> {
    let (of, _) = name.rsplit_once('.')?;
    of.strip_suffix(module).filter(|base| ["", "model.", "medusa_head."].contains(base))
}

/// Reads the head of a checkpoint for `model`. A checkpoint that has none that is known is an error.
pub fn plan_head(config: &Value, tensors: &dyn Tensors, model: &ModelSpec) -> Result<FamilyPlan, FamilyError> {
    let outer = Config::new(config, "")?;
    if let Some(kind) = outer.get("speculators_model_type").filter(|kind| kind.as_str() != Some("eagle3")) {
        return Err(outer.unsupported("speculators_model_type", "eagle3", kind));
    }
    let layout = HeadLayout::of(config, tensors).ok_or(FamilyError::NoHead)?;
    let plan = match layout {
        HeadLayout::Eagle1 => eagle1::plan(config, tensors, model),
        HeadLayout::Eagle3 => eagle3::plan(config, tensors, model),
        HeadLayout::Mimo => mimo::head(config, tensors, model),
        HeadLayout::Medusa => medusa::plan(config, tensors, model),
        HeadLayout::Dflash => dflash::plan(config, tensors, model),
    }?;
    plan.spec.check().map_err(|e| FamilyError::Spec(e.to_string()))?;
    Ok(plan)
}

/// A head that is being read: sizes, and the rules so far.
struct Reader<'a> {
    tensors: &'a dyn Tensors,
    model: &'a ModelSpec,
    /// What stands before the names of its modules.
    base: String,
    sizes: Sizes,
    hidden: usize,
    rules: Vec<Rule>,
    layers: Vec<Layer>,
}

impl<'a> Reader<'a> {
    /// Reads the sizes of layers like llama's; `layer0` is the first one's module, found in the tensors.
    fn new(
        config: &Config,
        tensors: &'a dyn Tensors,
        model: &'a ModelSpec,
        layer0: &str,
        theta: f32,
    ) -> Result<Self, FamilyError> {
        let q = format!("{layer0}.self_attn.q_proj");
        let base = tensors.names().find_map(|name| module_base(name, &q)).unwrap_or_default().to_string();
        let usual = Usual { theta, local_theta: None, context: model.max_context, head_dim: None, tied: false };
        let (sizes, _) = Sizes::read(config, tensors, &format!("{base}{layer0}.mlp.up_proj"), &usual)?;
        // What the tensors show, or a model's.
        for key in ["attention_bias", "mlp_bias", "qkv_bias", "bias", "tie_word_embeddings", "use_qk_norm"] {
            config.get(key);
        }
        Ok(Reader { hidden: sizes.hidden, sizes, base, tensors, model, rules: vec![], layers: vec![] })
    }

    /// The norm of all its norms.
    fn norm(&self) -> Norm {
        self.sizes.norm()
    }

    /// Whether a tensor of a module is there, or a module of this beginning.
    fn has(&self, name: &str) -> bool {
        self.tensors.any(&format!("{}{name}", self.base))
    }

    fn rule(&mut self, target: &str, module: &str, kind: RuleKind) {
        let source = format!("{}{module}", self.base);
        self.rules.push(Rule { target: target.into(), source, kind, take: Take::WHOLE });
    }

    /// A linear layer, with its bias if it is to have one.
    fn linear(&mut self, target: &str, module: &str, n: usize, k: usize, bias: bool) {
        self.rule(target, module, RuleKind::Linear { n, k });
        if bias {
            self.rule(&format!("{target}_bias"), module, RuleKind::Bias { n });
        }
    }

    fn vector(&mut self, target: &str, module: &str, n: usize) {
        self.rule(target, module, RuleKind::Vector { n });
    }

    /// The next layer: a module, what its q, k and v read, and its first norm (none: it has none).
    fn layer(&mut self, module: &str, width: usize, norm: Option<&str>) {
        let has = |part: &str| self.has(&format!("{module}.{part}"));
        let parts = Parts {
            norm,
            width,
            window: None,
            turned: true,
            qkv_bias: has("self_attn.q_proj.bias"),
            o_bias: has("self_attn.o_proj.bias"),
            mlp_bias: has("mlp.up_proj.bias"),
            experts: None,
            qk_norm: has("self_attn.q_norm."),
            cap: None,
            post_norms: false,
            one_plus: false,
        };
        let (to, from) = (format!("layers.{}", self.layers.len()), format!("{}{module}", self.base));
        self.rules.extend(self.sizes.rules(&parts, &to, &from));
        self.layers.push(self.sizes.layer(&parts));
    }

    /// Refuses a head whose width is not the model's.
    fn same_width(&self, config: &Config) -> Result<(), FamilyError> {
        if self.hidden == self.model.hidden {
            return Ok(());
        }
        let expected = format!("{}, the width of the model that the head is for", self.model.hidden);
        Err(config.wrong("hidden_size", &expected, config.get("hidden_size")))
    }

    /// The embedding and the head: its own where they are there. `layer` is the config with the sizes, `outer` the
    /// one around it.
    fn ends(&self, layer: &Config, outer: &Config) -> Result<Ends, FamilyError> {
        // Beside its other modules, or outside of them all.
        let place = |module: &str| match self.has(&format!("{module}.")) {
            true => Some(format!("{}{module}", self.base)),
            false => self.tensors.any(&format!("{module}.")).then(|| module.to_string()),
        };
        let (embed, head, mapped) = (place("embed_tokens"), place("lm_head"), self.tensors.any("d2t"));
        let known = self.model.vocab;
        let said = layer.get("vocab_size");
        if let Some(embed) = &embed {
            self.vocabulary(layer, embed, self.tensors.outputs(embed, false, known).map(Value::from).as_ref())?;
        } else if said.is_some() {
            self.vocabulary(layer, "vocab_size", said)?;
        }
        let draft = outer.size_or("draft_vocab_size", Some(known))?;
        let vocab = match &head {
            Some(head) => padded(outer, "draft_vocab_size", draft, self.tensors, head, false)?,
            None if mapped => draft,
            None => known,
        };
        if !mapped {
            let head = head.as_deref().unwrap_or_default();
            self.vocabulary(outer, &format!("{head} without d2t"), Some(&vocab.into()))?;
        }
        let head = if mapped { head.or(Some("lm_head".into())) } else { head };
        Ok(Ends { embed, head, mapped, vocab })
    }

    /// Refuses a vocabulary that is not the model's.
    fn vocabulary(&self, config: &Config, what: &str, got: Option<&Value>) -> Result<(), FamilyError> {
        let known = self.model.vocab;
        match got {
            Some(got) if got.as_u64() != Some(known as u64) => {
                let expected = format!("{known} tokens, as the model has that the head is for");
                Err(config.wrong(what, &expected, Some(got)))
            }
            _ => Ok(()),
        }
    }

    /// The plan.
    fn plan(mut self, ends: Ends, family: &str, norm: Norm, states: States, kind: HeadKind) -> FamilyPlan {
        let (known, hidden) = (self.model.vocab, self.hidden);
        let Ends { embed, head, mapped, vocab } = ends;
        let guesses = Head {
            states,
            model_hidden: self.model.hidden,
            model_vocab: known,
            kind,
            shared_embed: embed.is_none(),
            shared_head: head.is_none(),
            mapped,
        };
        let tokens = mapped.then(|| "d2t".to_string());
        let all = [
            (embed, "embed", RuleKind::Embedding { n: known, k: hidden }),
            (head, "head", RuleKind::Head { n: vocab, k: hidden }),
            (tokens, "tokens", RuleKind::Tokens { n: vocab, known }),
        ];
        for (source, target, kind) in all {
            let rule = |source| Rule { target: target.into(), source, kind, take: Take::WHOLE };
            self.rules.extend(source.map(rule));
        }
        let spec = ModelSpec {
            family: family.into(),
            vocab,
            hidden,
            // What it was trained for does not bound the model: its rope goes on.
            max_context: self.model.max_context,
            layers: self.layers,
            norm,
            tied_head: false,
            head_order: false,
            positions: None,
            embed_scale: None,
            logit_cap: None,
            draft_head: Some(guesses),
        };
        let ignore = &["rotary_emb.inv_freq", "t2d"];
        FamilyPlan { spec, rules: self.rules, ignore, others: &[], within: None, head: None, warnings: vec![] }
    }
}

/// Where a head's embedding and its own head are, if it has them, and its tokens.
struct Ends {
    embed: Option<String>,
    head: Option<String>,
    mapped: bool,
    vocab: usize,
}

/// Layers that a config lists, as the layers in front of which the model's states are taken: `step` is 1 where the
/// list means what layers output. They must rise, for the order of the states is theirs.
fn layers_before(
    config: &Config,
    key: &str,
    list: &Value,
    step: usize,
    model: &ModelSpec,
) -> Result<Vec<usize>, FamilyError> {
    let most = model.layers.len();
    let ids = list.as_array().into_iter().flatten();
    let ids: Option<Vec<usize>> =
        ids.map(|id| Some(usize::try_from(id.as_u64()?).ok()?.saturating_add(step))).collect();
    match ids.filter(|ids| !ids.is_empty() && ids.is_sorted_by(|a, b| a < b) && ids.iter().all(|&l| l <= most)) {
        Some(ids) => Ok(ids),
        None => {
            let expected = format!("layers of the model, ascending, at most {}", most - step.min(most));
            Err(config.wrong(key, &expected, Some(list)))
        }
    }
}
