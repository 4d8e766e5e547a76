//! The end of a step: final norm and head of the rows that want logits.

use super::{Forward, Readers, linear::Linear};
use crate::{exec::Plan, team::Disjoint};

impl Forward {
    /// Final norm and head of the rows that want logits.
    pub(super) fn head(&mut self, plan: &Plan) -> &mut [f32] {
        let mut wanted = vec![];
        let mut row = 0;
        for c in &plan.chunks {
            wanted.extend(row + c.output.from(c.tokens.len())..row + c.tokens.len());
            row += c.tokens.len();
        }
        let vocab = self.spec().vocab;
        self.bufs.logits.resize(wanted.len() * vocab, 0.0);
        if wanted.is_empty() {
            return &mut self.bufs.logits;
        }
        self.norm_into_acts(Readers::Head, Some(&wanted), wanted.len());
        let w = self.file.view(self.head);
        let out = Disjoint::new(&mut self.bufs.logits);
        let store = |row: usize, at: usize, tile: &[f32]| {
            // SAFETY: a unit writes its own panel of its own rows.
            let to = unsafe { out.part(row * vocab + at..row * vocab + at + tile.len()) };
            to.copy_from_slice(tile);
        };
        let mut run = Linear {
            isa: self.isa,
            mode: self.mode,
            team: &self.team,
            regions: &mut self.regions,
            threads: &mut self.bufs.threads,
        };
        run.linears(std::slice::from_ref(&w), &self.bufs.acts, &store);
        &mut self.bufs.logits
    }
}
