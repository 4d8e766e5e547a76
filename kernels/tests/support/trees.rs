//! Masks inside chunks, on any executor: rows of trees against their paths as plain chunks.

use quern_kernels::{
    exec::{Chunk, ChunkOutput, Executor, Mask, Output, Plan, tree_mask},
    sample::SamplingParams,
};

/// Random numbers below something.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 33) as usize % n
    }

    /// Parents of the rows of a tree with one root.
    pub fn parents(&mut self, rows: usize) -> Vec<Option<usize>> {
        let parent = |row: usize, r: &mut Random| if r.below(3) == 0 { row - 1 } else { r.below(row) };
        (0..rows).map(|row| (row > 0).then(|| parent(row, self))).collect()
    }

    pub fn tokens(&mut self, n: usize, vocab: usize) -> Vec<u32> {
        (0..n).map(|_| self.below(vocab) as u32).collect()
    }
}

/// What a chunk gives, computed beside two others of the same length.
pub fn give(executor: &mut dyn Executor, chunk: Chunk, alone: bool) -> ChunkOutput {
    let beside =
        |blocks, mask| Chunk { tokens: &[7, 8, 9], start: 4, blocks, mask, output: Output::Logits { from: 2 } };
    let chunks = if alone {
        vec![chunk]
    } else {
        vec![beside(&[61, 60], Mask::Tree(&[1, 3, 5])), chunk, beside(&[62, 60], Mask::Full)]
    };
    let at = chunks.len() / 2;
    let ticket = executor.submit(&Plan { chunks }).unwrap();
    executor.collect(ticket).unwrap().swap_remove(at)
}

/// Logits of the rows of a chunk.
pub fn logits(
    executor: &mut dyn Executor,
    tokens: &[u32],
    start: usize,
    blocks: &[u32],
    mask: Mask,
    alone: bool,
) -> Vec<f32> {
    let chunk = Chunk { tokens, start, blocks, mask, output: Output::Logits { from: 0 } };
    match give(executor, chunk, alone) {
        ChunkOutput::Logits(logits) => logits,
        other => panic!("{other:?}"),
    }
}

fn output<'a>(params: &'a SamplingParams, history: &'a [u32], prompt_len: usize) -> Output<'a> {
    Output::Tokens { from: 0, params, history, prompt_len, logprobs: None, allowed: None }
}

fn same(a: &[f32], b: &[f32]) -> bool {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// In a context of so many tokens, trees of so many rows: each row has the bits that it has at the end of its path in a
/// plain chunk; tokens are chosen by the path; and after a path was accepted, the sequence goes on as a plain one. At most
/// so many paths of each tree are looked at.
pub fn trees_are_their_paths(
    executor: &mut dyn Executor,
    vocab: usize,
    sizes: &[(usize, usize)],
    most: usize,
    what: &str,
) {
    let mut random = Random(42);
    // Blocks of the sequence with the tree, and of the plain ones.
    let (a, b): (Vec<u32>, Vec<u32>) = (0..12).map(|i| (3 + 4 * i, 4 + 4 * i)).unzip();
    let warm = SamplingParams {
        temperature: 1.5,
        top_k: 50,
        seed: 9,
        frequency_penalty: 0.7,
        repetition_penalty: 1.2,
        ..SamplingParams::default()
    };
    for &(context, rows) in sizes {
        let what = format!("{what}, {rows} rows after {context}");
        let past = random.tokens(context, vocab);
        let guesses = random.tokens(rows, vocab);
        let masks = tree_mask(&random.parents(rows));
        let mask = Mask::Tree(&masks);
        if context > 0 {
            logits(executor, &past, 0, &a, Mask::Causal, true);
        }
        let tree = logits(executor, &guesses, context, &a, mask, true);
        assert!(tree.iter().all(|x| x.is_finite()), "{what}");
        let beside = logits(executor, &guesses, context, &a, mask, false);
        assert!(same(&tree, &beside), "{what}: beside others");
        let all: Vec<u32> = past.iter().chain(&guesses).copied().collect();
        let chunk = Chunk { tokens: &guesses, start: context, blocks: &a, mask, output: output(&warm, &all, context) };
        let ChunkOutput::Tokens(chosen) = give(executor, chunk, false) else { panic!("no tokens") };

        let leaf = |row: usize| !masks[row + 1..].iter().any(|m| m >> row & 1 == 1);
        let leaves: Vec<usize> = (0..rows).filter(|&row| leaf(row)).collect();
        let leaves: Vec<usize> = leaves.iter().copied().step_by(leaves.len().div_ceil(most)).collect();
        for &leaf in &leaves {
            let path: Vec<usize> = (0..rows).filter(|&j| mask.sees(leaf, j)).collect();
            let text: Vec<u32> = past.iter().copied().chain(path.iter().map(|&j| guesses[j])).collect();
            let plain = logits(executor, &text, 0, &b, Mask::Causal, true);
            let chunk = Chunk {
                tokens: &text,
                start: 0,
                blocks: &b,
                mask: Mask::Causal,
                output: output(&warm, &text, context),
            };
            let ChunkOutput::Tokens(plain_chosen) = give(executor, chunk, true) else { panic!("no tokens") };
            for (depth, &row) in path.iter().enumerate() {
                let want = &plain[(context + depth) * vocab..][..vocab];
                assert!(same(&tree[row * vocab..][..vocab], want), "{what}: row {row} of the path to {leaf}");
                assert_eq!(chosen[row], plain_chosen[context + depth], "{what}: token of row {row}");
            }
        }

        // The last computed path is that of the last leaf; `b` has it plain.
        let path: Vec<usize> = (0..rows).filter(|&j| mask.sees(leaves[leaves.len() - 1], j)).collect();
        let from: Vec<usize> = path.iter().map(|j| context + j).collect();
        executor.move_rows(&a, &from, context).unwrap();
        let next = random.tokens(4, vocab);
        let got = logits(executor, &next, context + path.len(), &a, Mask::Causal, true);
        let want = logits(executor, &next, context + path.len(), &b, Mask::Causal, true);
        assert!(same(&got, &want), "{what}: after a path was accepted");
    }
}

/// A tree that is a chain is a plain chunk.
pub fn chains_are_plain(executor: &mut dyn Executor, vocab: usize, sizes: &[(usize, usize)], what: &str) {
    let blocks: Vec<u32> = (0..12).map(|i| 50 - 3 * i).collect();
    let mut random = Random(5);
    for &(context, rows) in sizes {
        let (past, guesses) = (random.tokens(context, vocab), random.tokens(rows, vocab));
        if context > 0 {
            logits(executor, &past, 0, &blocks, Mask::Causal, true);
        }
        let masks = tree_mask(&(0..rows).map(|row| row.checked_sub(1)).collect::<Vec<_>>());
        let want = logits(executor, &guesses, context, &blocks, Mask::Causal, true);
        for alone in [true, false] {
            let got = logits(executor, &guesses, context, &blocks, Mask::Tree(&masks), alone);
            assert!(same(&got, &want), "{what}, {rows} rows after {context}");
        }
    }
}

/// Logits of a context and of a block behind it whose rows see each other; in company as well, which is the same.
pub fn full_block(executor: &mut dyn Executor, tokens: &[u32], start: usize) -> Vec<f32> {
    let blocks: Vec<u32> = (0..12).map(|i| 50 - 3 * i).collect();
    let mut all = if start > 0 { logits(executor, &tokens[..start], 0, &blocks, Mask::Causal, true) } else { vec![] };
    let block = logits(executor, &tokens[start..], start, &blocks, Mask::Full, true);
    assert!(same(&logits(executor, &tokens[start..], start, &blocks, Mask::Full, false), &block), "in company");
    all.extend(block);
    all
}

/// Masks and moves that are bugs of the caller.
pub fn wrong_masks_are_refused(executor: &mut dyn Executor) {
    let mut error = |rows: usize, mask| {
        let tokens = vec![1; rows];
        let chunk = Chunk { tokens: &tokens, start: 0, blocks: &[0, 1, 2, 3, 4], mask, output: Output::None };
        executor.submit(&Plan { chunks: vec![chunk] }).unwrap_err().to_string()
    };
    assert!(error(65, Mask::Full).contains("rows of a chunk with a mask: expected at most 64, got 65"));
    assert!(error(2, Mask::Tree(&[1])).contains("words of the mask: expected 2, one per row, got 1"));
    assert!(error(2, Mask::Tree(&[1, 1])).contains("expected a row that sees itself, got 0b1 for row 1"));
    assert!(error(2, Mask::Tree(&[3, 3])).contains("no later row seen, unless the whole block is Mask::Full"));
    assert!(error(3, Mask::Tree(&[1, 3, 6])).contains("what its parent, row 1, sees (0b11), and itself"));
    let mut error = |blocks: &[u32], from: &[usize], to| executor.move_rows(blocks, from, to).unwrap_err().to_string();
    assert!(error(&[0], &[5, 5], 2).contains("slots in order: expected above 5, got 5"));
    assert!(error(&[0], &[5, 6], 6).contains("a slot's new place: expected at most 5"));
    assert!(error(&[0], &[5, 16], 5).contains("block of a slot: expected one below 64 for slot 16, got none"));
    assert!(error(&[64], &[5], 5).contains("block of a slot: expected one below 64 for slot 5, got 64"));
    executor.move_rows(&[], &[], 5).unwrap();
    executor.move_rows(&[0, 9], &[3, 17], 3).unwrap();
}
