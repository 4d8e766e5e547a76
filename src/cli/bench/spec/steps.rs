//! How long a step takes by the rows in it: what a guess costs.

use std::{
    error::Error,
    time::{Duration, Instant},
};

use quern_kernels::{
    exec::{Chunk, Executor, Mask, Output, Plan},
    sample::SamplingParams,
};

use super::{super::median, Ready};

/// Most rows of a step.
pub const MOST: usize = 64;

/// Rows and the median of the seconds of their steps.
pub type Steps = Vec<(usize, f64)>;

/// Rounds over all numbers of rows: at least, at most, and how long.
const ROUNDS: (usize, usize, Duration) = (3, 25, Duration::from_secs(10));

/// Times steps of so many rows behind each variant's longest prompt, in turns with those of the other variants. A row is
/// a token of the prompt again, of which the next is chosen, as in a step that checks guesses. Numbers that find no room
/// in a context are left out.
pub fn measure(variants: &mut [Ready<'_>], rows: &[usize]) -> Result<Vec<Steps>, Box<dyn Error>> {
    let room = variants.iter().map(|v| v.options.context).min().unwrap_or(0);
    let rows: Vec<usize> = rows.iter().copied().filter(|&rows| rows < room).collect();
    let mut texts = vec![];
    for Ready { executor, prompts, options, .. } in variants.iter_mut() {
        let prompt = prompts.iter().max_by_key(|prompt| prompt.len()).map_or(&[][..], |prompt| prompt);
        let text: Vec<u32> = prompt.iter().copied().cycle().take(options.context).collect();
        let depth = prompt.len().min(options.context - rows.iter().max().unwrap_or(&0));
        step(&mut **executor, &text[..depth], 0, Output::None)?;
        texts.push((text, depth));
    }
    let mut times = vec![vec![vec![]; rows.len()]; variants.len()];
    let started = Instant::now();
    let (least, most, enough) = ROUNDS;
    // The first round warms up.
    for round in 0..=most {
        if round > least && started.elapsed() > enough {
            break;
        }
        // Each round begins elsewhere, so that what interrupts at intervals hits all alike.
        for turn in 0..rows.len() {
            let i = (turn + round) % rows.len();
            let rows = rows[i];
            for ((variant, (text, depth)), times) in variants.iter_mut().zip(&texts).zip(&mut times) {
                let (history, prompt_len, params) = (&text[..depth + rows], *depth, &SamplingParams::greedy());
                let output = Output::Tokens { from: 0, params, history, prompt_len, logprobs: None, allowed: None };
                let took = step(&mut *variant.executor, history, *depth, output)?;
                if round > 0 {
                    times[i].push(took.as_secs_f64());
                }
            }
        }
    }
    let of = |times: Vec<Vec<f64>>| rows.iter().copied().zip(times.into_iter().map(median)).collect();
    Ok(times.into_iter().map(of).collect())
}

/// Computes what follows the first `start` tokens.
fn step(
    executor: &mut dyn Executor,
    text: &[u32],
    start: usize,
    output: Output<'_>,
) -> Result<Duration, Box<dyn Error>> {
    let blocks: Vec<u32> = (0..executor.blocks() as u32).collect();
    let begun = Instant::now();
    let chunk = Chunk { tokens: &text[start..], start, blocks: &blocks, mask: Mask::Causal, output };
    let ticket = executor.submit(&Plan { chunks: vec![chunk] })?;
    executor.collect(ticket)?;
    Ok(begun.elapsed())
}
