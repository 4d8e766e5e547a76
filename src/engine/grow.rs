//! A tree of guesses while a head writes it.
//!
//! A level costs a pass. Each has the rows of all levels before it, too: a head's rows see every key in front of their
//! chunk, so what is of another path has to be in the chunk, where the mask keeps them apart. That is a head's layer for
//! some rows more; only new rows go through the output head, which is most of the work.

use quern_kernels::{
    exec::{Chunk, ChunkOutput, MOST_MASKED, Mask, Output, spread, tree_mask},
    sample::{History, SamplingParams, choices},
};

use super::writer::Asked;
use crate::draft::{Limits, Tree};

/// Tokens of a head.
#[derive(Clone, Copy)]
pub(super) struct Vocab<'a> {
    /// How many the head has, and the model.
    pub own: usize,
    pub model: usize,
    /// The model's token of each of its own; empty: they are the same.
    pub tokens: &'a [u32],
}

/// A tree, and the rows of its nodes that have got children.
pub(super) struct Growing {
    tree: Tree,
    params: SamplingParams,
    prompt_len: usize,
    /// The text, which the tree hangs on.
    text: Vec<u32>,
    /// Levels still wanted.
    left: usize,
    /// Rows that there is memory for.
    room: usize,
    /// Nodes that have a row, in the order of the rows; the last `new` of them are computed for the first time.
    rows: Vec<usize>,
    new: usize,
    tokens: Vec<u32>,
    mask: Vec<u64>,
    /// What the row of the text gave for the next, and what each row of the last pass gave, `[hidden]`.
    root: Vec<f32>,
    own: Vec<f32>,
    /// What the rows of the next pass read, `[rows][hidden]`.
    fed: Vec<f32>,
}

impl Growing {
    /// Nothing yet. Where guesses are judged by rejection they are chosen, not drawn: what a tree leaves out depends on
    /// what it has.
    pub fn new(asked: &Asked, limits: Limits, text: &[u32]) -> Growing {
        let mut params = asked.params.clone();
        if asked.from {
            params.temperature = 0.0;
        }
        let (rows, tokens, mask) = (vec![], vec![], vec![]);
        let (root, own, fed) = (vec![], vec![], vec![]);
        let (prompt_len, text, left, room) = (asked.prompt_len, text.to_vec(), asked.depth, asked.share.guesses);
        let tree = Tree::new(limits);
        Growing { tree, params, prompt_len, text, left, room, rows, new: 0, tokens, mask, root, own, fed }
    }

    /// Takes what was computed: logits of the new rows, `[rows][vocab]`, at first of the text's last one, and what all
    /// rows gave for the next.
    pub fn take(&mut self, output: ChunkOutput, own: Vec<f32>, vocab: Vocab) {
        let ChunkOutput::Logits(mut logits) = output else { return self.left = 0 };
        let new: Vec<Option<usize>> = match self.rows.len() {
            0 => vec![None],
            rows => self.rows[rows - self.new..].iter().copied().map(Some).collect(),
        };
        let choices: Vec<Vec<(u32, f64)>> = new
            .iter()
            .zip(logits.chunks_exact_mut(vocab.own))
            .map(|(&node, logits)| self.choices(logits, &self.path(node), 0, vocab))
            .collect();
        self.tree.grow(new.into_iter().zip(choices.iter().map(|choices| &choices[..])));
        (if self.rows.is_empty() { &mut self.root } else { &mut self.own }).clone_from(&own);
        self.left = self.left.saturating_sub(1);
    }

    /// Takes the logits of all positions, `[guesses][vocab]`, of which each is guessed by itself.
    pub fn take_all(&mut self, output: ChunkOutput, vocab: Vocab) {
        let ChunkOutput::Logits(mut logits) = output else { return self.left = 0 };
        let mut parents = vec![None];
        for (i, logits) in logits.chunks_exact_mut(vocab.own).take(self.left).enumerate() {
            let choices = self.choices(logits, &[], i, vocab);
            self.tree.grow(parents.iter().map(|&parent| (parent, &choices[..])));
            parents = self.tree.frontier(self.tree.limits().nodes).into_iter().map(Some).collect();
        }
        self.left = 0;
    }

    /// What may come `ahead` tokens behind the text and a path; nothing where that cannot be said.
    fn choices(&self, logits: &mut [f32], path: &[u32], ahead: usize, vocab: Vocab) -> Vec<(u32, f64)> {
        let text = [&self.text[..], path].concat();
        let history = History { tokens: &text, prompt_len: self.prompt_len };
        let position = (text.len() + ahead) as u64;
        let (params, width) = (&self.params, self.tree.limits().width);
        // Penalties and biases are of the model's tokens.
        if !vocab.tokens.is_empty() && (params.penalizes() || !params.logit_bias.is_empty()) {
            let mut all = vec![];
            spread(vocab.tokens, logits, vocab.model, &mut all);
            return choices(&mut all, &[], params, history, position, width).unwrap_or_default();
        }
        choices(logits, vocab.tokens, params, history, position, width).unwrap_or_default()
    }

    /// Tokens of the path to a node.
    fn path(&self, node: Option<usize>) -> Vec<u32> {
        let parent = |&node: &usize| self.tree.node(node).1;
        let mut path: Vec<u32> = std::iter::successors(node, parent).map(|node| self.tree.node(node).0).collect();
        path.reverse();
        path
    }

    /// Gets the next pass ready; false: the tree is done. `leaves`: most ends of paths of a pass.
    pub fn next(&mut self, hidden: usize, leaves: usize) -> bool {
        let width = self.tree.limits().width;
        let room = self.room.min(MOST_MASKED).saturating_sub(self.rows.len());
        let mut frontier = if self.left == 0 { vec![] } else { self.tree.frontier(width.min(room)) };
        while !frontier.is_empty() && self.leaves(&frontier) > leaves {
            frontier.pop();
        }
        if frontier.is_empty() {
            return false;
        }
        self.new = frontier.len();
        self.rows.append(&mut frontier);
        let row = |node: usize| self.rows.iter().position(|&other| other == node).expect("it got children");
        let parents: Vec<Option<usize>> = self.rows.iter().map(|&node| self.tree.node(node).1.map(row)).collect();
        self.mask = tree_mask(&parents);
        self.tokens = self.rows.iter().map(|&node| self.tree.node(node).0).collect();
        let state = |parent: &Option<usize>| match *parent {
            Some(row) => &self.own[row * hidden..(row + 1) * hidden],
            None => &self.root[..],
        };
        self.fed = parents.iter().flat_map(state).copied().collect();
        true
    }

    /// Ends of paths of the rows that there would be.
    fn leaves(&self, more: &[usize]) -> usize {
        let all = || self.rows.iter().chain(more);
        all().filter(|&&node| !all().any(|&other| self.tree.node(other).1 == Some(node))).count()
    }

    /// The next pass of a text that has these blocks.
    pub fn chunk<'a>(&'a self, blocks: &'a [u32]) -> Chunk<'a> {
        let output = Output::Own { from: self.rows.len() - self.new };
        // A head's row has the position of the state that it reads, one before its token.
        Chunk { tokens: &self.tokens, start: self.text.len() - 1, blocks, mask: Mask::Tree(&self.mask), output }
    }

    /// What its rows read.
    pub fn fed(&self) -> &[f32] {
        &self.fed
    }

    /// The tree.
    pub fn done(self) -> Tree {
        self.tree
    }
}
