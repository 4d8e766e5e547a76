//! Heads: what their rows begin with, and Medusa's guesses, which need no layers.
//!
//! Layouts and rules: `quern_models::spec::Head`.

use std::sync::Arc;

use quern_models::{ModelFile, TensorView, spec::HeadKind};

use super::{
    Forward,
    linear::{Linear, PerThread},
    tensors::{Input, index, vector},
};
use crate::{
    cpu::acts::Forms,
    exec::{ChunkOutput, Fed, Output, Plan},
    sample::{History, sample_allowed},
};

/// A matrix of one of several files.
pub(super) struct Tensor {
    file: Arc<ModelFile>,
    index: usize,
}

impl Tensor {
    pub fn new(file: &Arc<ModelFile>, name: &str) -> Tensor {
        Tensor { file: file.clone(), index: index(file, name) }
    }

    pub fn view(&self) -> TensorView<'_> {
        self.file.view(self.index)
    }
}

/// Tensors of a head besides those of its layers.
pub(super) struct Guess {
    fuse: Option<Tensor>,
    project: Option<Tensor>,
    project_bias: Vec<f32>,
    embed_norm: Option<Input>,
    state_norm: Option<Input>,
    medusa: Vec<Medusa>,
    /// The model's token of each of its own; empty: they are the same.
    pub tokens: Vec<u32>,
    wide: bool,
    block: bool,
    bufs: Buffers,
}

/// One of Medusa's heads: its blocks with their biases, and its head.
struct Medusa {
    blocks: Vec<(Tensor, Vec<f32>)>,
    head: Tensor,
}

#[derive(Default)]
struct Buffers {
    /// The states, fused, `[m][hidden]`.
    state: Vec<f32>,
    /// Embeddings of the tokens, `[m][hidden]`.
    embedding: Vec<f32>,
}

impl Guess {
    pub fn new(file: &Arc<ModelFile>) -> Option<Guess> {
        let head = file.spec().draft_head.as_ref()?;
        let tensor = |name: &str| Tensor::new(file, name);
        let input = |name: &str, norm| Some(Input::new(file, name, norm, None));
        let (embed_norm, state_norm) = match &head.kind {
            HeadKind::Joined { embed_norm, state_norm, .. } | HeadKind::Wide { embed_norm, state_norm, .. } => {
                (input("embed_norm", embed_norm), input("state_norm", state_norm))
            }
            HeadKind::Block { state_norm, .. } => (None, input("state_norm", state_norm)),
            HeadKind::Medusa { .. } => (None, None),
        };
        let (project, project_bias) = match head.kind {
            HeadKind::Joined { bias, .. } => {
                (Some(tensor("project")), if bias { vector(file, "project_bias") } else { vec![] })
            }
            _ => (None, vec![]),
        };
        let medusa = match head.kind {
            HeadKind::Medusa { guesses, depth } => (0..guesses)
                .map(|i| {
                    let block = |j| format!("guess.{i}.block.{j}");
                    let block = |j| (tensor(&block(j)), vector(file, &format!("{}_bias", block(j))));
                    Medusa { blocks: (0..depth).map(block).collect(), head: tensor(&format!("guess.{i}.head")) }
                })
                .collect(),
            _ => vec![],
        };
        let tokens = if head.mapped { vector(file, "tokens").iter().map(|&t| t as u32).collect() } else { vec![] };
        let (fuse, bufs) = (head.fuses().then(|| tensor("fuse")), Buffers::default());
        let wide = matches!(head.kind, HeadKind::Wide { .. });
        let block = matches!(head.kind, HeadKind::Block { .. });
        Some(Guess { wide, block, fuse, project, project_bias, embed_norm, state_norm, medusa, tokens, bufs })
    }

    /// It guesses a block at once.
    pub fn is_block(&self) -> bool {
        self.block
    }

    /// The first layer reads what [`Forward::begin`] made for it.
    pub fn is_wide(&self) -> bool {
        self.wide
    }
}

impl Forward {
    /// What the rows of a step begin with: the residual stream, and where the first layer of a head reads something
    /// else, that.
    pub(super) fn begin(&mut self, plan: &Plan, fed: &Fed) {
        let Some(mut guess) = self.guess.take() else { return self.embed(plan) };
        let file = self.file.clone();
        let head = file.spec().draft_head.as_ref().expect("it has tensors of a head");
        let (m, hidden) = (plan.rows(), file.spec().hidden);
        match fed {
            Fed::Model(states) => self.states_of_the_model(&mut guess, states, head.width(), m),
            Fed::Own(states) => guess.bufs.state = states.concat(),
            Fed::Nothing => guess.bufs.state.clear(),
        }
        match head.kind {
            HeadKind::Joined { state_first, zero_first, .. } => {
                self.embed(plan);
                if zero_first {
                    self.zero_first(plan);
                }
                std::mem::swap(&mut self.bufs.x, &mut guess.bufs.embedding);
                let project = guess.project.take().expect("a joined head projects");
                self.both(&guess, state_first, &[project.view()], &[], m);
                let mut x = std::mem::take(&mut self.bufs.x);
                self.dense(&project.view(), &guess.project_bias, &mut x);
                (self.bufs.x, guess.project) = (x, Some(project));
            }
            HeadKind::Wide { normed_residual, .. } => {
                self.embed(plan);
                std::mem::swap(&mut self.bufs.x, &mut guess.bufs.embedding);
                let readers = self.layers[0].qkv.map(|t| file.view(t));
                let order = self.layers[0].attn_in.order.clone();
                self.both(&guess, false, &readers, &order, m);
                self.bufs.x.clone_from(&guess.bufs.state);
                if normed_residual {
                    let norm = guess.state_norm.as_ref().expect("a wide head has it");
                    let rows = self.bufs.x.chunks_exact_mut(hidden).zip(guess.bufs.state.chunks_exact(hidden));
                    rows.for_each(|(x, state)| norm.norm(self.simd, state, x));
                }
            }
            HeadKind::Medusa { .. } => self.bufs.x.clone_from(&guess.bufs.state),
            HeadKind::Block { .. } => self.embed(plan),
        }
        self.guess = Some(guess);
    }

    /// The model's states of `m` rows, fused if the head does that.
    fn states_of_the_model(&mut self, guess: &mut Guess, states: &[&[f32]], width: usize, m: usize) {
        let Some(fuse) = &guess.fuse else {
            guess.bufs.state = states.concat();
            return;
        };
        let starts = states.iter().flat_map(|s| s.chunks_exact(width)).collect::<Vec<_>>();
        self.rows_into_acts(&[fuse.view()], width, m, &|row, out| out.copy_from_slice(starts[row]));
        let fuse = guess.fuse.take().expect("as above");
        self.dense(&fuse.view(), &[], &mut guess.bufs.state);
        guess.fuse = Some(fuse);
    }

    /// Embeddings of rows at position 0 are zeros.
    fn zero_first(&mut self, plan: &Plan) {
        let hidden = self.spec().hidden;
        let rows = plan.chunks.iter().flat_map(|c| (0..c.tokens.len()).map(|row| c.position(row)));
        for (x, position) in self.bufs.x.chunks_exact_mut(hidden).zip(rows) {
            if position == 0 {
                x.fill(0.0);
            }
        }
    }

    /// Normed embedding and normed state of each row side by side, in some order, as input of `readers`.
    fn both(&mut self, guess: &Guess, state_first: bool, readers: &[TensorView], order: &[u32], m: usize) {
        let (simd, hidden) = (self.simd, self.spec().hidden);
        let [embed, state] = [&guess.embed_norm, &guess.state_norm].map(|n| n.as_ref().expect("such a head has both"));
        self.rows_into_acts(readers, 2 * hidden, m, &|row, out| {
            let part = row * hidden..(row + 1) * hidden;
            let mut both = vec![0.0; 2 * hidden];
            let (first, second) = both.split_at_mut(hidden);
            let (e, s) = if state_first { (second, first) } else { (first, second) };
            embed.norm(simd, &guess.bufs.embedding[part.clone()], e);
            state.norm(simd, &guess.bufs.state[part], s);
            match order.is_empty() {
                true => out.copy_from_slice(&both),
                false => out.iter_mut().zip(order).for_each(|(out, &j)| *out = both[j as usize]),
            }
        });
    }

    /// `m` rows of `k` numbers that `fill` writes, as input of `readers`.
    fn rows_into_acts(
        &mut self,
        readers: &[TensorView],
        k: usize,
        m: usize,
        fill: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) {
        let forms = readers.iter().map(|w| Forms::of(w.scheme, self.mode)).reduce(Forms::and);
        self.bufs.acts.reset(self.isa, m, k, forms.expect("somebody reads it"));
        let (isa, acts) = (self.isa, &self.bufs.acts);
        let threads = PerThread::new(&mut self.bufs.threads);
        Self::rows(&self.team, &mut self.regions, m, &|t, row| {
            // SAFETY: `rows` gives each thread its own number.
            let buf = unsafe { threads.get(t) };
            buf.row.resize(k, 0.0);
            fill(row, &mut buf.row);
            // SAFETY: each row is written by one call only and read in later regions.
            unsafe { acts.write_row(isa, row, &buf.row) }
        });
    }

    /// `out = w * acts + bias`, `[rows of acts][n]`.
    fn dense(&mut self, w: &TensorView, bias: &[f32], out: &mut Vec<f32>) {
        let mut run = Linear {
            isa: self.isa,
            mode: self.mode,
            team: &self.team,
            regions: &mut self.regions,
            threads: &mut self.bufs.threads,
        };
        run.store(std::slice::from_ref(w), &self.bufs.acts, bias, out);
    }

    /// Keys and values of the model's states for a block to see, with nothing back; `None`: it is another kind, or the
    /// block itself.
    pub(super) fn context(&mut self, plan: &Plan, fed: &Fed) -> Option<Vec<ChunkOutput>> {
        let Fed::Model(states) = fed else { return None };
        let mut guess = self.guess.take_if(|guess| guess.block)?;
        let file = self.file.clone();
        let (m, hidden) = (plan.rows(), file.spec().hidden);
        let width = file.spec().draft_head.as_ref().map_or(0, |head| head.width());
        self.states_of_the_model(&mut guess, states, width, m);
        let norm = guess.state_norm.as_ref().expect("a block's head has it");
        guess.bufs.embedding.resize(m * hidden, 0.0);
        for (to, state) in guess.bufs.embedding.chunks_exact_mut(hidden).zip(guess.bufs.state.chunks_exact(hidden)) {
            norm.norm(self.simd, state, to);
        }
        self.bufs.angles.iter_mut().for_each(|a| a.turn(plan));
        for i in 0..self.layers.len() {
            let readers = self.layers[i].qkv.map(|t| file.view(t));
            let order = self.layers[i].attn_in.order.clone();
            self.rows_into_acts(&readers, hidden, m, &|row, out| {
                let row = &guess.bufs.embedding[row * hidden..(row + 1) * hidden];
                match order.is_empty() {
                    true => out.copy_from_slice(row),
                    false => out.iter_mut().zip(&order).for_each(|(out, &j)| *out = row[j as usize]),
                }
            });
            self.qkv(i);
            self.rope_and_append(i, plan);
        }
        self.guess = Some(guess);
        Some(plan.chunks.iter().map(|_| ChunkOutput::None).collect())
    }

    /// What Medusa's heads guess after the last row of each chunk; `None`: it is another kind.
    pub(super) fn medusa(&mut self, plan: &Plan) -> Option<Vec<ChunkOutput>> {
        let guess = self.guess.take_if(|guess| !guess.medusa.is_empty())?;
        let (hidden, vocab) = (self.spec().hidden, self.spec().vocab);
        let mut end = 0;
        let last = plan.chunks.iter().map(|chunk| {
            end += chunk.tokens.len();
            end - 1
        });
        let last: Vec<usize> = last.collect();
        let mut outputs: Vec<ChunkOutput> = plan.chunks.iter().map(|chunk| empty(&chunk.output)).collect();
        let (mut y, mut more, mut logits) = (vec![], vec![], vec![]);
        for (i, Medusa { blocks, head }) in guess.medusa.iter().enumerate() {
            y.clear();
            last.iter().for_each(|&row| y.extend_from_slice(&self.bufs.x[row * hidden..(row + 1) * hidden]));
            for (block, bias) in blocks {
                self.rows_into_acts(&[block.view()], hidden, last.len(), &|row, out| {
                    out.copy_from_slice(&y[row * hidden..(row + 1) * hidden]);
                });
                self.dense(&block.view(), bias, &mut more);
                y.iter_mut().zip(&more).for_each(|(y, z)| *y += z / (1.0 + (-z).exp()));
            }
            self.rows_into_acts(&[head.view()], hidden, last.len(), &|row, out| {
                out.copy_from_slice(&y[row * hidden..(row + 1) * hidden]);
            });
            self.dense(&head.view(), &[], &mut logits);
            for ((chunk, output), logits) in plan.chunks.iter().zip(&mut outputs).zip(logits.chunks_exact_mut(vocab)) {
                match (output, &chunk.output) {
                    (ChunkOutput::Logits(all), _) => all.extend_from_slice(logits),
                    (ChunkOutput::Tokens(all), Output::Tokens { params, history, prompt_len, .. }) => {
                        let position = (history.len() + i) as u64;
                        let history = History { tokens: history, prompt_len: *prompt_len };
                        all.push(sample_allowed(logits, params, history, position, None, None));
                    }
                    _ => {}
                }
            }
        }
        self.guess = Some(guess);
        Some(outputs)
    }
}

/// Room for what a chunk wants.
fn empty(output: &Output) -> ChunkOutput {
    match output {
        Output::Tokens { .. } => ChunkOutput::Tokens(vec![]),
        Output::Logits { .. } | Output::Own { .. } => ChunkOutput::Logits(vec![]),
        Output::Hidden { .. } | Output::None => ChunkOutput::None,
    }
}
