//! What a head has besides its layers.

use quern_models::spec::{Head, HeadKind, Norm};

use super::{Input, Load};
use crate::{
    cpu::acts::{Forms, Mode},
    cuda::{Buffer, CudaError, weight::Weight},
};

/// Tensors of a head besides those of its layers.
pub(in crate::cuda) struct Guess {
    pub head: Head,
    pub fuse: Option<Weight>,
    pub project: Option<Weight>,
    pub project_bias: Option<Buffer<f32>>,
    pub embed_norm: Option<Input>,
    pub state_norm: Option<Input>,
    /// Per guess.
    pub medusa: Vec<MedusaWeights>,
    /// The model's token of each of its own; empty: they are the same. Host only.
    pub tokens: Vec<u32>,
}

/// One of Medusa's heads.
pub(in crate::cuda) struct MedusaWeights {
    /// With their biases, `[hidden]`.
    pub blocks: Vec<(Weight, Buffer<f32>)>,
    pub head: Weight,
}

impl Guess {
    /// All that Medusa's rows go through.
    pub fn medusa_weights(&self) -> impl Iterator<Item = &Weight> {
        self.medusa.iter().flat_map(|m| m.blocks.iter().map(|(w, _)| w).chain([&m.head]))
    }

    /// What the input of `fuse`, of `project` or of a wide first layer holds in the int8 form, and its widest row.
    pub fn input(&self, first: &[&Weight]) -> (Forms, usize) {
        let readers = || self.fuse.iter().chain(&self.project).chain(first.iter().copied());
        let forms = readers().map(|w| Forms::of(w.scheme, Mode::Int8)).fold(Forms::default(), Forms::and);
        (forms, readers().map(|w| w.k_pad).max().unwrap_or(0))
    }
}

impl Load<'_> {
    pub(super) fn guess(&mut self, head: &Head) -> Result<Guess, CudaError> {
        let mut input = |name: &str, norm: &Norm| self.input(name, norm, None).map(Some);
        let (embed_norm, state_norm) = match &head.kind {
            HeadKind::Joined { embed_norm, state_norm, .. } | HeadKind::Wide { embed_norm, state_norm, .. } => {
                (input("embed_norm", embed_norm)?, input("state_norm", state_norm)?)
            }
            HeadKind::Block { state_norm, .. } => (None, input("state_norm", state_norm)?),
            HeadKind::Medusa { .. } => (None, None),
        };
        let fuse = head.fuses().then(|| self.matrix("fuse")).transpose()?;
        let (project, project_bias) = match head.kind {
            HeadKind::Joined { bias, .. } => {
                (Some(self.matrix("project")?), self.vectors(bias, &["project_bias".into()])?)
            }
            _ => (None, None),
        };
        let mut medusa = vec![];
        if let HeadKind::Medusa { guesses, depth } = head.kind {
            for i in 0..guesses {
                let mut block = |j: usize| {
                    let name = format!("guess.{i}.block.{j}");
                    Ok::<_, CudaError>((self.matrix(&name)?, self.vector(&format!("{name}_bias"))?))
                };
                let blocks = (0..depth).map(&mut block).collect::<Result<_, _>>()?;
                medusa.push(MedusaWeights { blocks, head: self.matrix(&format!("guess.{i}.head"))? });
            }
        }
        let tokens = if head.mapped { self.values("tokens").iter().map(|&t| t as u32).collect() } else { vec![] };
        Ok(Guess { head: head.clone(), fuse, project, project_bias, embed_norm, state_norm, medusa, tokens })
    }
}
