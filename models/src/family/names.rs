//! Where the text model lies in a checkpoint: the prefix of its tensors, and the sizes that they have.

use std::collections::BTreeSet;

use super::{Config, FamilyError};

/// What a family may ask about the tensors of a checkpoint.
pub trait Tensors {
    /// Every tensor's name.
    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_>;

    /// Whether any name begins so.
    fn any(&self, prefix: &str) -> bool;

    /// Outputs of a module's weight, however it is packed; `None` if that cannot be said. A float weight that is
    /// `transposed` has its inputs first. Where a packing leaves a choice, `said` is taken if it may be.
    fn outputs(&self, module: &str, transposed: bool, said: usize) -> Option<usize>;
}

/// No checkpoint: the config alone decides.
impl Tensors for () {
    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(std::iter::empty())
    }

    fn any(&self, _: &str) -> bool {
        false
    }

    fn outputs(&self, _: &str, _: bool, _: usize) -> Option<usize> {
        None
    }
}

/// Parts of multimodal checkpoints that are not the text model, as components of tensor names.
pub(super) const OTHER_PARTS: &[&str] = &[
    "vision_tower",
    "vision_model",
    "vision_encoder",
    "vision_embed_tokens",
    "vision_language_adapter",
    "vision_projector",
    "visual",
    "image_newline",
    "img_processor",
    "img_projection",
    "multi_modal_projector",
    "mm_projector",
    "mlp1",
    "connector",
    "projector",
    "aligner",
    "resampler",
    "vpm",
    "apm",
    "audio_tower",
    "audio_model",
    "audio_encoder",
    "audio_projector",
    "audio_projection_layer",
    "embed_vision",
    "embed_audio",
    "talker",
    "token2wav",
    "code2wav",
];

/// The part of a multimodal checkpoint that a tensor belongs to, if it is not the text model.
pub(super) fn other_part(name: &str) -> Option<&str> {
    name.split('.').find(|part| OTHER_PARTS.contains(part))
}

/// Where the text model's modules begin.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// `model.`, `transformer.`, nothing, or `language_model.model.` and the like.
    pub base: String,
    /// The head's module.
    pub head: String,
}

impl Place {
    /// Finds the embedding called `embed` that has `layer0` beside it; `usual` if there is none.
    pub fn find(tensors: &dyn Tensors, embed: &str, layer0: &str, usual: &str) -> Place {
        let mut bases = BTreeSet::new();
        for name in tensors.names().filter(|n| other_part(n).is_none()) {
            let Some((module, _)) = name.rsplit_once('.') else { continue };
            if let Some(base) = module.strip_suffix(embed)
                && (base.is_empty() || base.ends_with('.'))
                && tensors.any(&format!("{base}{layer0}."))
            {
                bases.insert(base);
            }
        }
        let base = bases.into_iter().min_by_key(|b| (b.len(), *b)).unwrap_or(usual).to_string();
        // The head lies beside the model or above it.
        let mut above = base.as_str();
        let head = loop {
            let head = format!("{above}lm_head");
            if above.is_empty() || tensors.any(&format!("{head}.")) {
                break head;
            }
            above = above[..above.len() - 1].rfind('.').map_or("", |dot| &above[..=dot]);
        };
        Place { base, head }
    }
}

/// A size by the config, or by the tensor where they differ: publishers pad.
pub(super) fn padded(
    config: &Config,
    key: &str,
    said: usize,
    tensors: &dyn Tensors,
    module: &str,
    transposed: bool,
) -> Result<usize, FamilyError> {
    match tensors.outputs(module, transposed, said) {
        Some(found) if found != said && found > 0 => {
            config.warn(format!("config.json: {key} is {said}, but {module} has {found} rows: {found} is taken"));
            Ok(found)
        }
        _ => Ok(said),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Names(BTreeSet<&'static str>);

    impl Tensors for Names {
        fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
            Box::new(self.0.iter().copied())
        }
        fn any(&self, prefix: &str) -> bool {
            self.0.iter().any(|n| n.starts_with(prefix))
        }
        fn outputs(&self, _: &str, _: bool, _: usize) -> Option<usize> {
            None
        }
    }

    #[test]
    fn the_text_model_is_found_by_its_tensors() {
        let find = |names: &[&'static str]| {
            let place = Place::find(&Names(names.iter().copied().collect()), "embed_tokens", "layers.0", "model.");
            (place.base, place.head)
        };
        let is = |base: &str, head: &str| (base.to_string(), head.to_string());
        assert_eq!(find(&[]), is("model.", "lm_head"));
        let llava = ["language_model.model.embed_tokens.weight", "language_model.model.layers.0.a.weight"];
        assert_eq!(find(&llava), is("language_model.model.", "lm_head"));
        let headed = [&llava[..], &["language_model.lm_head.weight", "vision_tower.embed_tokens.weight"]].concat();
        assert_eq!(find(&headed), is("language_model.model.", "language_model.lm_head"));
        let new =
            ["model.language_model.embed_tokens.weight", "model.language_model.layers.0.a.weight", "lm_head.weight"];
        assert_eq!(find(&new), is("model.language_model.", "lm_head"));
        let omni = [
            "thinker.model.embed_tokens.weight",
            "thinker.model.layers.0.a.weight",
            "thinker.lm_head.weight",
            "talker.model.embed_tokens.weight",
            "talker.model.layers.0.a.weight",
        ];
        assert_eq!(find(&omni), is("thinker.model.", "thinker.lm_head"));
        assert_eq!(find(&["embed_tokens.weight", "layers.0.a.weight"]), is("", "lm_head"));
        assert_eq!(find(&["model.my_embed_tokens.weight", "model.layers.0.a.weight"]), is("model.", "lm_head"));
    }
}
