//! Passes of heads of a small random model.

use std::sync::Arc;

use quern_kernels::{
    exec::{Chunk, ChunkOutput, Executor, Fed, HeadExecutor, Mask, Output, Plan, tree_mask},
    sample::{History, SamplingParams, sample_allowed},
};
use quern_models::ModelFile;

/// Tokens of a text.
pub const TEXT: usize = 23;

/// The model's states of a text, `[TEXT][width]`, in the widths of the head; computed in chunks of `size`.
pub fn states(executor: &mut dyn Executor, text: &[u32], size: usize) -> Vec<f32> {
    let mut all = vec![];
    for (i, tokens) in text.chunks(size).enumerate() {
        let chunk = Chunk { tokens, start: i * size, blocks: &[3, 4], mask: Mask::Causal, output: Output::None };
        let ticket = executor.submit(&Plan { chunks: vec![chunk] }).unwrap();
        executor.collect(ticket).unwrap();
        all.extend_from_slice(executor.states().unwrap());
    }
    all
}

/// Logits by the model's tokens: of all rows of a text that the model computed, in chunks of some sizes with others
/// beside, then of rows that read what the head gave.
pub fn run(
    head: &mut dyn HeadExecutor,
    text: &[u32],
    states: &[f32],
    width: usize,
    sizes: &[usize],
    others: usize,
) -> Vec<f32> {
    let rows = TEXT - 4;
    let (mut logits, mut at, mut step, mut own) = (vec![], 0, 0, vec![]);
    let beside: Vec<[u32; 2]> = (0..others as u32).map(|o| [20 + 2 * o, 21 + 2 * o]).collect();
    while at < TEXT - 1 {
        let fed_own = at >= rows;
        let n = if fed_own { 1 } else { sizes[step % sizes.len()].min(rows - at) };
        let mut chunks: Vec<Chunk> = vec![];
        let mut fed: Vec<&[f32]> = vec![];
        for (o, blocks) in beside.iter().enumerate() {
            let n = if fed_own { 1 } else { 1 + o % 3 };
            chunks.push(Chunk {
                tokens: &text[o..o + n],
                start: o,
                blocks,
                mask: Mask::Causal,
                output: Output::Logits { from: 0 },
            });
            fed.push(if fed_own { &own } else { &states[o * width..(o + n) * width] });
        }
        let tokens = &text[at + 1..at + 1 + n];
        chunks.push(Chunk {
            tokens,
            start: at,
            blocks: &[9, 2],
            mask: Mask::Causal,
            output: Output::Logits { from: 0 },
        });
        fed.push(if fed_own { &own } else { &states[at * width..(at + n) * width] });
        let fed = if fed_own { Fed::Own(fed) } else { Fed::Model(fed) };
        let got = head.guess(&Plan { chunks }, &fed).unwrap().pop().unwrap();
        let ChunkOutput::Logits(got) = got else { panic!("no logits") };
        logits.extend(got);
        let all = head.own().unwrap();
        own = all[all.len() - all.len().min(72)..].to_vec();
        (at, step) = (at + n, step + 1);
    }
    logits
}

/// Logits of a head's own tokens.
pub fn of_own(logits: &[f32], vocab: usize, known: usize) -> Vec<f32> {
    if vocab == known {
        return logits.to_vec();
    }
    let row = |row: &[f32]| {
        let own = (0..vocab).map(|i| 3 * i + 1);
        assert!(row.iter().enumerate().all(|(t, l)| l.is_finite() == (t % 3 == 1 && t / 3 < vocab)), "{row:?}");
        own.map(|t| row[t]).collect::<Vec<f32>>()
    };
    logits.chunks_exact(known).flat_map(row).collect()
}

/// All guesses of every row.
pub fn medusa_rows(head: &mut dyn HeadExecutor, text: &[u32], states: &[f32], width: usize) -> Vec<f32> {
    let mut all = vec![];
    for p in 0..TEXT - 4 {
        let chunk = Chunk {
            tokens: &text[p + 1..p + 2],
            start: p,
            blocks: &[9, 2],
            mask: Mask::Causal,
            output: Output::Logits { from: 0 },
        };
        let fed = Fed::Model(vec![&states[p * width..(p + 1) * width]]);
        let ChunkOutput::Logits(got) = head.guess(&Plan { chunks: vec![chunk] }, &fed).unwrap().remove(0) else {
            panic!("no logits")
        };
        all.extend(got);
    }
    all
}

/// Rows of a tree of guesses behind a text, and each again as the last of a chain that is its path: logits of both,
/// `[rows][tokens]`, and what both gave for the next. `own`: what the head reads, `[hidden]` of each row.
pub fn tree_and_paths(
    head: &mut dyn HeadExecutor,
    text: &[u32],
    states: &[f32],
    width: usize,
    own: &[Vec<f32>],
) -> [(Vec<f32>, Vec<f32>); 2] {
    let parents = [None, None, Some(0), Some(1), Some(1), Some(2)];
    let (start, hidden) = (TEXT - 7, own[0].len());
    let mut pass = |tokens: &[u32], start: usize, mask: Mask, from: usize, fed: Fed| {
        let output = Output::Logits { from };
        let chunk = Chunk { tokens, start, blocks: &[9, 2], mask, output };
        let got = head.guess(&Plan { chunks: vec![chunk] }, &fed).unwrap().remove(0);
        let ChunkOutput::Logits(got) = got else { panic!("no logits") };
        (got, head.own().unwrap().to_vec())
    };
    pass(&text[1..start + 1], 0, Mask::Causal, start - 1, Fed::Model(vec![&states[..start * width]]));
    let tokens = &text[start + 1..start + 7];
    let masks = tree_mask(&parents);
    let tree = pass(tokens, start, Mask::Tree(&masks), 0, Fed::Own(vec![&own.concat()]));
    let mut paths = (vec![], vec![]);
    for row in 0..parents.len() {
        let mut path: Vec<usize> = std::iter::successors(Some(row), |&row| parents[row]).collect();
        path.reverse();
        let tokens: Vec<u32> = path.iter().map(|&row| tokens[row]).collect();
        let fed: Vec<f32> = path.iter().flat_map(|&row| own[row].clone()).collect();
        let (logits, given) = pass(&tokens, start, Mask::Causal, path.len() - 1, Fed::Own(vec![&fed]));
        paths.0.extend(logits);
        paths.1.extend_from_slice(&given[given.len() - hidden..]);
    }
    [tree, paths]
}

/// The model's states, `[TEXT][width]`, and the logits of the block of [`block_head`](super::block_head) behind the first
/// `n` tokens of a text, which reads states in chunks of `size`, with other blocks beside; the tokens of those rows are
/// the plain sampler's.
pub fn block_of(
    executor: &mut dyn Executor,
    file: &Arc<ModelFile>,
    text: &[u32],
    n: usize,
    size: usize,
    others: u32,
) -> (Vec<f32>, Vec<f32>) {
    let width = 2 * 72;
    let mut head = executor.head(file.clone()).unwrap();
    let states = states(executor, text, size);
    for (i, tokens) in text[1..n + 1].chunks(size).enumerate() {
        let start = i * size;
        let fed = Fed::Model(vec![&states[start * width..(start + tokens.len()) * width]]);
        let (blocks, mask, output) = (&[9, 2][..], Mask::Causal, Output::None);
        head.guess(&Plan { chunks: vec![Chunk { tokens, start, blocks, mask, output }] }, &fed).unwrap();
    }
    let block = [text[n], 7, 7, 7, 7];
    let mut chunks: Vec<Chunk> = vec![];
    let beside: Vec<[u32; 1]> = (0..others).map(|o| [20 + o]).collect();
    for blocks in &beside {
        let (mask, output) = (Mask::Full, Output::Logits { from: 1 });
        chunks.push(Chunk { tokens: &block, start: 0, blocks, mask, output });
    }
    // What lies behind the text's blocks is the head's own memory, where it has some.
    let spare = head.spare();
    let table: Vec<u32> = if others > 0 { [9, 2].into_iter().chain(spare.take(1)).collect() } else { vec![9, 2] };
    let (mask, output) = (Mask::Full, Output::Logits { from: 1 });
    chunks.push(Chunk { tokens: &block, start: n, blocks: &table, mask, output });
    let got = head.guess(&Plan { chunks }, &Fed::Nothing).unwrap().pop().unwrap();
    let ChunkOutput::Logits(logits) = got else { panic!("no logits") };
    let history = [&text[..n], &block].concat();
    let warm = SamplingParams { temperature: 1.5, seed: 7, ..SamplingParams::greedy() };
    for params in [warm, SamplingParams::greedy()] {
        let output = Output::Tokens {
            from: 1,
            params: &params,
            history: &history,
            prompt_len: 1,
            logprobs: None,
            allowed: None,
        };
        let chunk = Chunk { tokens: &block, start: n, blocks: &table, mask, output };
        let got = head.guess(&Plan { chunks: vec![chunk] }, &Fed::Nothing).unwrap().remove(0);
        let ChunkOutput::Tokens(tokens) = got else { panic!("no tokens") };
        assert_eq!(tokens.len(), 4);
        for (i, (row, token)) in logits.chunks_exact(290).zip(tokens).enumerate() {
            let position = n + 1 + i;
            let history = History { tokens: &history[..position], prompt_len: 1 };
            let want = sample_allowed(&mut row.to_vec(), &params, history, position as u64, None, None);
            assert_eq!(token.unwrap().token, want.unwrap().token);
        }
    }
    (states, logits)
}
