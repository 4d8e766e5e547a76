//! The feed-forward half of a layer: one block for all rows. A mixture of several: [`super::experts`].

use quern_models::PANEL;

use super::{
    Forward, Readers,
    attention::Half,
    linear::{Linear, PerThread},
    tensors::{Block, MlpTensors, add_bias},
};
use crate::cpu::{act, acts::Forms, linear::linear_panel};

impl Forward {
    /// The whole half, added to the residual stream.
    pub(super) fn feed_forward(&mut self, layer: usize, m: usize) {
        match &self.layers[layer].mlp {
            MlpTensors::One(_) => {
                self.norm_into_acts(Readers::Mlp(layer), None, m);
                self.up(layer, m);
                self.down(layer);
            }
            MlpTensors::Experts(_) => self.mixture(layer, m),
        }
    }

    /// Up, and gate if there is one; what is activated goes panel by panel into `inner`, quantized where it is
    /// computed.
    fn up(&mut self, layer: usize, m: usize) {
        let tensors = self.layers[layer].block();
        let (gate, up) = (tensors.gate.map(|t| self.file.view(t)), self.file.view(tensors.up));
        self.bufs.inner.reset(self.isa, m, up.n, Forms::of(self.file.view(tensors.down).scheme, self.mode));
        let (isa, simd, mode, kind) = (self.isa, self.simd, self.mode, tensors.act);
        let (acts, inner) = (&self.bufs.acts, &self.bufs.inner);
        let threads = PerThread::new(&mut self.bufs.threads);
        Linear::units(isa, &self.team, &mut self.regions, up.panels(), m, &|t, panel, rows| {
            // SAFETY: `units` gives each thread its own number.
            let buf = unsafe { threads.get(t) };
            buf.tile.resize(rows.len() * PANEL, 0.0);
            linear_panel(isa, &up, acts, mode, panel, rows.clone(), &mut buf.tile, &mut buf.linear);
            if let Some(gate) = &gate {
                buf.tile2.resize(rows.len() * PANEL, 0.0);
                linear_panel(isa, gate, acts, mode, panel, rows.clone(), &mut buf.tile2, &mut buf.linear);
            }
            let width = (up.n - panel * PANEL).min(PANEL);
            let mut product = [0.0; PANEL];
            let product = &mut product[..width];
            for (i, row) in rows.enumerate() {
                let part = i * PANEL..i * PANEL + width;
                let up = &mut buf.tile[part.clone()];
                add_bias(up, &tensors.up_bias, panel * PANEL);
                if gate.is_some() {
                    let gate = &mut buf.tile2[part];
                    add_bias(gate, &tensors.gate_bias, panel * PANEL);
                    act::act_mul(simd, kind, gate, up, product);
                } else {
                    act::act(simd, kind, up, product);
                }
                // SAFETY: a unit writes its own 64 columns of its own rows, read in later regions.
                unsafe { inner.write_part(isa, row, panel, product) }
            }
        });
    }

    fn down(&mut self, layer: usize) {
        let file = self.file.clone();
        let Block { down, .. } = *self.layers[layer].block();
        self.add_linear(&file.view(down), layer, Half::Mlp);
    }
}
