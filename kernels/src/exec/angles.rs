//! Rotary embedding: one table of cosines and sines a step for all layers with the same rope.

use quern_models::spec::Rope;

use super::Plan;

/// Frequencies of a rope, and `[m][head_dim / 2]` cosines and sines of a step's rows.
pub(crate) struct Angles {
    rope: Rope,
    head_dim: usize,
    inv_freq: Vec<f32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Angles {
    /// Index of the angles of a rope, shared with earlier layers where equal.
    pub fn of(all: &mut Vec<Angles>, rope: &Rope, head_dim: usize) -> usize {
        if let Some(i) = all.iter().position(|a| a.rope == *rope && a.head_dim == head_dim) {
            return i;
        }
        let inv_freq = rope.inv_freq(head_dim);
        all.push(Angles { rope: rope.clone(), head_dim, inv_freq, cos: vec![], sin: vec![] });
        all.len() - 1
    }

    /// Computes every row's angles. The product is rounded to f32 first, as the reference library does.
    pub fn turn(&mut self, plan: &Plan) {
        self.turn_to(plan.chunks.iter().flat_map(|c| (0..c.tokens.len()).map(|row| c.position(row))));
    }

    /// The same for rows at these positions.
    pub fn turn_to(&mut self, positions: impl Iterator<Item = usize>) {
        let factor = self.rope.attention_factor();
        self.cos.clear();
        self.sin.clear();
        for position in positions {
            for &f in &self.inv_freq {
                let angle = (position as f32 * f) as f64;
                self.cos.push(angle.cos() as f32 * factor);
                self.sin.push(angle.sin() as f32 * factor);
            }
        }
    }

    /// Pairs of a head: half of its elements.
    pub fn pairs(&self) -> usize {
        self.inv_freq.len()
    }

    /// All cosines and sines, `[m][head_dim / 2]` each.
    pub fn all(&self) -> (&[f32], &[f32]) {
        (&self.cos, &self.sin)
    }

    /// Cosines and sines of a row, `[head_dim / 2]` each.
    pub fn row(&self, row: usize) -> (&[f32], &[f32]) {
        let part = row * self.inv_freq.len()..(row + 1) * self.inv_freq.len();
        (&self.cos[part.clone()], &self.sin[part])
    }
}
