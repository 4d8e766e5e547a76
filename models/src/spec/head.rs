//! Heads: small networks that guess a model's next tokens from its states.
//!
//! A head is a spec of its own, in a file of its own (which may lie behind the model in one file). Row `p` of a head
//! reads token `p + 1` and the model's state of position `p`, has position `p` in its rope and in its cache, and
//! guesses token `p + 2`. The first pass has the model's states, of every row that the model computed since; each
//! further pass is one row that has the head's own output instead.
//!
//! Besides the tensors of its layers it has `embed` and `head` (if they are not the model's), `embed_norm`,
//! `state_norm`, `fuse` `[hidden][width of the states]`, `project` `[hidden][2 hidden]`, `tokens`
//! `[vocab]` (the model's token of each of its own, as numbers), and `guess.i.block.j`, `guess.i.head`.

use serde::{Deserialize, Serialize};

use super::{ModelSpec, Norm, SpecError, is_false};

/// What makes a spec one of a head.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Head {
    /// The model's states that it reads.
    pub states: States,
    /// Width of each of them: `hidden` of the model.
    pub model_hidden: usize,
    /// Tokens of the model.
    pub model_vocab: usize,
    /// What it does with them.
    pub kind: HeadKind,
    /// `embed` is the model's.
    #[serde(default, skip_serializing_if = "is_false")]
    pub shared_embed: bool,
    /// `head` is the model's.
    #[serde(default, skip_serializing_if = "is_false")]
    pub shared_head: bool,
    /// It knows some of the model's tokens: its token `i` is the model's `tokens[i]`.
    #[serde(default, skip_serializing_if = "is_false")]
    pub mapped: bool,
}

/// States of a model that a head reads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum States {
    /// Behind the final norm.
    Normed,
    /// The residual stream in front of some layers (with as many as there are: behind the last), side by side.
    Before {
        /// Which; ascending.
        layers: Vec<usize>,
    },
}

impl States {
    /// How many there are for a row.
    pub fn count(&self) -> usize {
        match self {
            States::Normed => 1,
            States::Before { layers } => layers.len(),
        }
    }
}

/// A kind of head.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum HeadKind {
    /// EAGLE-1 and MTP: `x = project([embed_norm(embedding), state_norm(state)])`, then layers.
    Joined {
        /// Where it is from.
        method: JoinedMethod,
        /// Norm of the embedding.
        embed_norm: Norm,
        /// Norm of the state.
        state_norm: Norm,
        /// The state comes first.
        #[serde(default, skip_serializing_if = "is_false")]
        state_first: bool,
        /// `project` has a bias.
        #[serde(default, skip_serializing_if = "is_false")]
        bias: bool,
        /// The embedding of the row at position 0 is zeros.
        #[serde(default, skip_serializing_if = "is_false")]
        zero_first: bool,
        /// What the next pass reads is behind the norm.
        #[serde(default, skip_serializing_if = "is_false")]
        normed: bool,
    },
    /// EAGLE-3: q, k and v of the first layer read `[embed_norm(embedding), state_norm(state)]`; the model's states
    /// go through `fuse` first. The first layer has no norm of its own.
    Wide {
        /// Norm of the embedding.
        embed_norm: Norm,
        /// Norm of the state.
        state_norm: Norm,
        /// The residual stream begins with the state behind its norm, instead of before it.
        #[serde(default, skip_serializing_if = "is_false")]
        normed_residual: bool,
        /// What the next pass reads is behind the norm.
        #[serde(default, skip_serializing_if = "is_false")]
        normed: bool,
    },
    /// Medusa: token `p + 2 + i` is `guess.i.head(x)`, `x` the state through `depth` blocks `x + silu(block(x) + bias)`.
    Medusa {
        /// Tokens that are guessed.
        guesses: usize,
        /// Blocks of each.
        depth: usize,
    },
    /// DFlash: keys and values of `state_norm(fuse(states))` are what the rows see, and a block of the last token and
    /// masks guesses at once; each row of the block sees the whole of it.
    Block {
        /// Rows of the block.
        size: usize,
        /// The token that stands for what is to be guessed.
        mask: u32,
        /// Norm of the fused states.
        state_norm: Norm,
    },
}

/// Names of joined heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JoinedMethod {
    /// EAGLE-1 and 2.
    Eagle,
    /// Multi-token prediction.
    Mtp,
}

impl Head {
    /// Numbers of a row's states.
    pub fn width(&self) -> usize {
        self.states.count() * self.model_hidden
    }

    /// The method's name.
    pub fn method(&self) -> &'static str {
        match self.kind {
            HeadKind::Joined { method: JoinedMethod::Mtp, .. } => "mtp",
            HeadKind::Joined { .. } | HeadKind::Wide { .. } => "eagle",
            HeadKind::Medusa { .. } => "medusa",
            HeadKind::Block { .. } => "dflash",
        }
    }

    /// Whether the model's states go through `fuse`.
    pub fn fuses(&self) -> bool {
        matches!(self.kind, HeadKind::Wide { .. } | HeadKind::Block { .. })
    }

    /// Whether what it outputs is fed to its next pass, behind the norm or before it.
    pub fn feeds_normed(&self) -> bool {
        matches!(self.kind, HeadKind::Joined { normed: true, .. } | HeadKind::Wide { normed: true, .. })
    }

    /// Whether it is for a model like this one: its width, its tokens, its layers, and what it shares.
    pub fn fits(&self, model: &ModelSpec) -> Result<(), OtherModel> {
        if self.shared_embed && model.embed_scale.is_some() || self.shared_head && model.logit_cap.is_some() {
            return Err(OtherModel::Changed);
        }
        let layers = match &self.states {
            States::Before { layers } => layers.iter().copied().max().unwrap_or(0),
            States::Normed => 0,
        };
        let got = [model.hidden, model.vocab, model.layers.len()];
        if [self.model_hidden, self.model_vocab] == got[..2] && layers <= got[2] {
            return Ok(());
        }
        Err(OtherModel::Sizes { expected: [self.model_hidden, self.model_vocab, layers], got })
    }

    /// Checks what this spec of a head says.
    pub(super) fn check(&self, spec: &ModelSpec) -> Result<(), SpecError> {
        let bad = |what: String| Err(SpecError(format!("head: {what}")));
        for (what, n) in [("model_hidden", self.model_hidden), ("model_vocab", self.model_vocab)] {
            if n == 0 || n > super::MAX_SIZE {
                return bad(format!("{what} is {n}, expected 1 to {}", super::MAX_SIZE));
            }
        }
        if let States::Before { layers } = &self.states {
            let rising = layers.is_sorted_by(|a, b| a < b);
            if layers.is_empty()
                || layers.len() > MOST_STATES
                || !rising
                || layers.iter().any(|&l| l > super::MAX_LAYERS)
            {
                return bad(format!("states before layers {layers:?}, expected 1 to {MOST_STATES}, ascending"));
            }
        }
        if !self.fuses() && self.width() != spec.hidden {
            return bad(format!("states of {} numbers, expected hidden, {}", self.width(), spec.hidden));
        }
        if (self.shared_embed || self.shared_head) && self.model_hidden != spec.hidden {
            return bad(format!("it shares tensors of width {}, expected hidden, {}", self.model_hidden, spec.hidden));
        }
        let known = if self.mapped { spec.vocab <= self.model_vocab } else { spec.vocab == self.model_vocab };
        if !known || self.mapped && self.model_vocab > 1 << 24 {
            let (vocab, all) = (spec.vocab, self.model_vocab);
            return bad(format!("{vocab} tokens of the model's {all}, mapped: {}", self.mapped));
        }
        if self.shared_head && (self.mapped || spec.tied_head) || spec.positions.is_some() || spec.head_order {
            return bad("a shared head with a map or tied, learned positions, or an order of the head".into());
        }
        if spec.tied_head && (self.shared_embed || self.mapped) {
            return bad("a tied head with a shared embedding or a map".into());
        }
        if spec.embed_scale.is_some() || spec.logit_cap.is_some() {
            return bad("a factor on its embeddings or a cap of its logits, which only models have".into());
        }
        let medusa = matches!(self.kind, HeadKind::Medusa { .. });
        if spec.layers.is_empty() != medusa {
            return bad(format!("{} layers, kind {}", spec.layers.len(), self.method()));
        }
        if medusa && (self.mapped || self.shared_embed || self.shared_head) {
            return bad("Medusa's heads have all of the model's tokens, matrices of their own, and no embedding".into());
        }
        match self.kind {
            HeadKind::Medusa { guesses, depth }
                if guesses == 0 || guesses > 64 || depth > 16 || spec.norm != Norm::Identity || spec.tied_head =>
            {
                return bad(format!("{guesses} guesses of {depth} blocks, expected 1 to 64 and 0 to 16, no norm"));
            }
            HeadKind::Wide { .. } if spec.layers[0].attn_norm != Norm::Identity => {
                return bad("the first layer has a norm; it reads what is normed already".into());
            }
            HeadKind::Block { size, mask, .. } if !(2..=64).contains(&size) || mask as usize >= self.model_vocab => {
                return bad(format!(
                    "blocks of {size} with mask {mask}, expected 2 to 64 and one of the model's tokens"
                ));
            }
            _ => {}
        }
        Ok(())
    }

    /// Its norms.
    pub(super) fn norms(&self) -> Vec<&Norm> {
        match &self.kind {
            HeadKind::Joined { embed_norm, state_norm, .. } | HeadKind::Wide { embed_norm, state_norm, .. } => {
                vec![embed_norm, state_norm]
            }
            HeadKind::Block { state_norm, .. } => vec![state_norm],
            HeadKind::Medusa { .. } => vec![],
        }
    }
}

/// A model that a head is not for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OtherModel {
    /// Hidden size, vocabulary, layers; of layers at least as many.
    #[error(
        "the head is for another model: expected hidden size {}, vocabulary {} and at least {} layers, got {}, {} and \
         {}; take a head that was trained for this model",
        expected[0], expected[1], expected[2], got[0], got[1], got[2]
    )]
    Sizes {
        /// Of the model that it is for.
        expected: [usize; 3],
        /// Of the model at hand.
        got: [usize; 3],
    },
    /// The model scales its embeddings or caps its logits.
    #[error(
        "the head shares the embedding or the output head of a model that scales embeddings or caps logits (Gemma), and \
         this version's heads do neither; take a head with tensors of its own, or a small model with --draft"
    )]
    Changed,
}

/// Most states of a row.
const MOST_STATES: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    const WIDE: &str = r#"{"family":"eagle3","vocab":8,"hidden":16,"max_context":64,"layers":[{
        "attn_norm":{"kind":"identity"},
        "attn":{"kind":"gqa","heads":2,"kv_heads":1,"head_dim":8,"scale":0.5},
        "mlp_norm":{"kind":"rms","eps":1e-5},
        "mlp":{"kind":"gated","inner":8,"act":"silu"}}],
        "norm":{"kind":"rms","eps":1e-5},"tied_head":false,
        "guesses":{"states":{"kind":"before","layers":[1,2,3]},"model_hidden":16,"model_vocab":32,
            "kind":{"kind":"wide","embed_norm":{"kind":"rms","eps":1e-5},"state_norm":{"kind":"rms","eps":1e-5}},
            "shared_embed":true,"mapped":true}}"#;

    fn tensors(spec: &ModelSpec) -> Vec<(String, Vec<u64>)> {
        spec.tensors().into_iter().map(|t| (t.name, t.dims)).collect()
    }

    #[test]
    fn a_wide_head_has_wide_readers() {
        let spec: ModelSpec = serde_json::from_str(WIDE).unwrap();
        spec.check().unwrap();
        let all = tensors(&spec);
        let dims = |name: &str| all.iter().find(|(n, _)| n == name).map(|(_, dims)| &dims[..]);
        assert_eq!(dims("embed"), None);
        assert_eq!(dims("layers.0.attn_norm"), None);
        assert_eq!(dims("fuse"), Some(&[16, 48][..]));
        assert_eq!(dims("layers.0.q"), Some(&[16, 32][..]));
        assert_eq!(dims("layers.0.gate"), Some(&[8, 16][..]));
        assert_eq!(dims("head"), Some(&[8, 16][..]));
        assert_eq!(dims("tokens"), Some(&[8][..]));
    }

    #[test]
    fn a_head_is_for_one_model() {
        let spec: ModelSpec = serde_json::from_str(WIDE).unwrap();
        let head = spec.draft_head.clone().unwrap();
        let like = |hidden, vocab, layers| {
            let layers = vec![spec.layers[0].clone(); layers];
            head.fits(&ModelSpec { hidden, vocab, layers, draft_head: None, ..spec.clone() }).map_err(|e| e.to_string())
        };
        assert_eq!((like(16, 32, 3), like(16, 32, 4)), (Ok(()), Ok(())));
        let expected =
            "the head is for another model: expected hidden size 16, vocabulary 32 and at least 3 layers, got ";
        for (sizes, got) in
            [((24, 32, 3), "24, 32 and 3;"), ((16, 33, 3), "16, 33 and 3;"), ((16, 32, 2), "16, 32 and 2;")]
        {
            let error = like(sizes.0, sizes.1, sizes.2).unwrap_err();
            assert!(error.starts_with(&format!("{expected}{got}")), "{error}");
        }
    }

    #[test]
    fn what_is_changed_in_the_model_is_not_shared() {
        let spec: ModelSpec = serde_json::from_str(WIDE).unwrap();
        let head = spec.draft_head.clone().unwrap();
        let layers = vec![spec.layers[0].clone(); 3];
        let mut model = ModelSpec { vocab: 32, layers, draft_head: None, ..spec.clone() };
        assert_eq!(head.fits(&model), Ok(()));
        // It shares the embedding and has a head of its own.
        model.logit_cap = Some(30.0);
        assert_eq!(head.fits(&model), Ok(()));
        model.embed_scale = Some(4.0);
        assert_eq!(head.fits(&model), Err(OtherModel::Changed));
        for change in [|s: &mut ModelSpec| s.logit_cap = Some(30.0), |s: &mut ModelSpec| s.embed_scale = Some(4.0)] {
            let mut spec = spec.clone();
            change(&mut spec);
            assert!(spec.check().is_err());
        }
    }

    #[test]
    fn what_does_not_fit_together_is_refused() {
        let cases = [
            ("\"layers\":[1,2,3]", "\"layers\":[]"),
            ("\"layers\":[1,2,3]", "\"layers\":[2,2]"),
            ("\"mapped\":true", "\"mapped\":false"),
            ("\"shared_embed\":true", "\"shared_embed\":true,\"shared_head\":true"),
            ("\"attn_norm\":{\"kind\":\"identity\"}", "\"attn_norm\":{\"kind\":\"rms\",\"eps\":1e-5}"),
            ("\"model_vocab\":32", "\"model_vocab\":0"),
            ("\"model_hidden\":16", "\"model_hidden\":24"),
            ("\"tied_head\":false", "\"tied_head\":true"),
        ];
        for (from, to) in cases {
            assert!(WIDE.contains(from), "{from}");
            let spec: ModelSpec = serde_json::from_str(&WIDE.replace(from, to)).unwrap();
            assert!(spec.check().is_err(), "{to}");
        }
        // A model has norms, and layers.
        let mut spec: ModelSpec = serde_json::from_str(WIDE).unwrap();
        spec.draft_head = None;
        assert!(spec.check().is_err());
    }
}
