//! What heads guess in the engine, against heads that read each text anew; and Medusa's guesses that are drawn.

use std::{collections::BTreeMap, sync::Arc};

use quern::{
    draft::{Accept, Speculation},
    engine::{EngineOptions, Event, Generator, Request},
};
use quern_kernels::{
    exec::{Chunk, ChunkOutput, Executor, Fed, HeadExecutor, Mask, Output, Plan},
    sample::SamplingParams,
};
use quern_models::{ModelFile, spec::HeadKind};

use crate::{
    drafters::{HEADS, engine, with_head},
    support::{
        Scratch,
        model::{Run, answer, same_distribution},
    },
};

/// A head that has read nothing, and the model's states of a text.
struct Fresh<'a> {
    executor: Box<dyn Executor>,
    head: Box<dyn HeadExecutor>,
    file: &'a ModelFile,
    request: &'a Request,
}

const BLOCKS: &[u32] = &[1, 0, 5, 4, 3, 2, 6, 7, 8, 9, 10, 11];

impl<'a> Fresh<'a> {
    fn new(model: &Arc<ModelFile>, head: &'a Arc<ModelFile>, run: Run, request: &'a Request) -> Fresh<'a> {
        let mut executor = run.executor(model, BLOCKS.len());
        let head_executor = executor.head(head.clone()).unwrap();
        Fresh { executor, head: head_executor, file: head, request }
    }

    /// Tokens of one chunk.
    fn pass(
        &mut self,
        tokens: &[u32],
        start: usize,
        mask: Mask,
        history: Option<(usize, &[u32])>,
        fed: &Fed,
    ) -> Vec<u32> {
        let params = self.request.sampling.clone();
        let prompt_len = self.request.prompt.len();
        let output = history.map_or(Output::None, |(from, history)| Output::Tokens {
            from,
            params: &params,
            history,
            prompt_len,
            logprobs: None,
            allowed: None,
        });
        let chunk = Chunk { tokens, start, blocks: BLOCKS, mask, output };
        match self.head.guess(&Plan { chunks: vec![chunk] }, fed).unwrap().pop() {
            Some(ChunkOutput::Tokens(tokens)) => tokens.into_iter().map(|t| t.unwrap().token).collect(),
            _ => vec![],
        }
    }

    /// Guesses of what follows a text.
    fn guesses(mut self, text: &[u32], count: usize) -> Vec<u32> {
        let n = text.len();
        let chunk =
            Chunk { tokens: &text[..n - 1], start: 0, blocks: BLOCKS, mask: Mask::Causal, output: Output::None };
        let ticket = self.executor.submit(&Plan { chunks: vec![chunk] }).unwrap();
        self.executor.collect(ticket).unwrap();
        let states = self.executor.states().unwrap().to_vec();
        let head = self.file.spec().draft_head.clone().unwrap();
        let (all, width) = (Fed::Model(vec![&states]), head.width());
        let mut guesses = match head.kind {
            HeadKind::Medusa { .. } => {
                let last = Fed::Model(vec![&states[(n - 2) * width..]]);
                self.pass(&text[n - 1..], n - 2, Mask::Causal, Some((0, text)), &last)
            }
            HeadKind::Block { size, mask, .. } => {
                self.pass(&text[1..], 0, Mask::Causal, None, &all);
                let mut block = vec![mask; size];
                block[0] = text[n - 1];
                let history = [&text[..n - 1], &block].concat();
                self.pass(&block, n - 1, Mask::Full, Some((1, &history)), &Fed::Nothing)
            }
            HeadKind::Joined { .. } | HeadKind::Wide { .. } => {
                let mut guesses = self.pass(&text[1..], 0, Mask::Causal, Some((n - 2, text)), &all);
                while guesses.len() < count {
                    let own = self.head.own().unwrap();
                    let own = own[own.len() - self.file.spec().hidden..].to_vec();
                    let history = [text, &guesses].concat();
                    let (last, start) = (&history[history.len() - 1..], history.len() - 2);
                    let next = self.pass(last, start, Mask::Causal, Some((0, &history)), &Fed::Own(vec![&own]));
                    guesses.extend(next);
                }
                guesses
            }
        };
        guesses.truncate(count);
        guesses
    }
}

/// How many guesses each step of an answer had, and how many of them were right, if a head read the whole text each time.
fn steps(
    model: &Arc<ModelFile>,
    head: &Arc<ModelFile>,
    run: Run,
    request: &Request,
    answer: &[u32],
    k: usize,
) -> Vec<(usize, usize)> {
    let text = [&request.prompt[..], answer].concat();
    let (mut known, mut steps) = (request.prompt.len() + 1, vec![]);
    while known < text.len() {
        // The token that is chosen in any case needs no guess.
        let count = k.min(text.len() - known - 1);
        if count == 0 {
            break;
        }
        let guesses = Fresh::new(model, head, run, request).guesses(&text[..known], count);
        let right = guesses.iter().zip(&text[known..]).take_while(|(guess, token)| guess == token).count();
        steps.push((guesses.len(), right));
        known += right + 1;
    }
    steps
}

/// What the engine guesses is what a head guesses that reads the whole text: alone, and where a text goes on inside a
/// block that another, which began alike, has and whose head has not read it yet.
#[test]
fn guesses_are_those_of_a_head_that_reads_the_whole_text() {
    let (mut guessed, mut right) = (0, 0);
    for (name, model) in HEADS {
        let scratch = Scratch::new("heads-fresh");
        let (file, head) = with_head(name, model, &scratch);
        let method = head.spec().draft_head.as_ref().unwrap().method();
        let vocab = file.spec().vocab;
        for (run, length, before, k) in [
            (Run::Default, 5, 1, 2),
            (Run::Default, 12, 0, 3),
            (Run::Exact, 12, 1, 3),
            (Run::Default, 23, 2, 1),
            (Run::Default, 40, 3, 3),
        ] {
            let request = |seed| Request {
                prompt: (0..length).map(|j| ((j * j * 7 + 31) % vocab) as u32).collect(),
                max_tokens: 24,
                sampling: SamplingParams { temperature: 5.0, seed, ..SamplingParams::default() },
                ignore_eos: true,
                ..Request::default()
            };
            let speculation = format!("{method}:{k}").parse().unwrap();
            let options = EngineOptions { sequences: 2, speculation, ..run.engine() };
            let mut engine = engine(&file, options);
            engine.with_draft(head.clone(), options).unwrap();
            let requests = [request(3), request(4)];
            let mut events = vec![];
            let first = engine.add(requests[0].clone()).unwrap();
            for _ in 0..before {
                engine.step(&mut events).unwrap();
            }
            let second = engine.add(requests[1].clone()).unwrap();
            while engine.step(&mut events).unwrap() {}
            for (id, request) in [first, second].into_iter().zip(&requests) {
                let mut answer = vec![];
                let mut got = vec![];
                for event in &events {
                    match event {
                        Event::Token { request, id: token, .. } if *request == id => answer.push(*token),
                        Event::Guessed { request, drafted, accepted } if *request == id => {
                            got.push((*drafted, *accepted))
                        }
                        _ => {}
                    }
                }
                assert_eq!(answer.len(), request.max_tokens);
                let want = steps(&file, &head, run, request, &answer, k.min(3));
                assert_eq!(got, want, "{name}, {run:?}, {length} tokens, second after {before} steps, request {id}");
                guessed += got.iter().map(|step| step.0).sum::<usize>();
                right += got.iter().map(|step| step.1).sum::<usize>();
            }
        }
    }
    println!("{guessed} guesses, {right} right");
    assert!(guessed > 1000 && right > 50, "{guessed} {right}");
}

/// Guesses of Medusa's heads that are drawn and judged by rejection: frequencies of texts against those of plain sampling.
#[test]
fn rejection_with_medusa_leaves_frequencies_as_they_are() {
    let scratch = Scratch::new("medusa-rejection");
    let (file, head) = with_head("heads/medusa", "models/llama", &scratch);
    let tokens = [1, 4, 6, 10, 12];
    let request = |seed| Request {
        prompt: [tokens, tokens].concat(),
        max_tokens: 4,
        sampling: SamplingParams {
            temperature: 6.0,
            top_k: 5,
            seed,
            logit_bias: tokens.map(|token| (token, 30.0)).to_vec(),
            ..SamplingParams::default()
        },
        ignore_eos: true,
        ..Request::default()
    };
    let count = |speculation: Speculation| {
        let options = EngineOptions { sequences: 32, speculation, threads: 1, ..Run::Default.engine() };
        let mut engine = engine(&file, options);
        engine.with_draft(head.clone(), options).unwrap();
        let requests: Vec<Request> = (0..6000).map(request).collect();
        let mut counts = BTreeMap::new();
        for got in answer(&mut engine, &requests) {
            *counts.entry(got.tokens).or_insert(0u64) += 1;
        }
        (counts, engine.stats().guesses)
    };
    let (plain, _) = count(Speculation::OFF);
    let (got, guesses) = count(Speculation { accept: Accept::Rejection, ..("medusa:2".parse().unwrap()) });
    assert!(guesses.accepted > 2000 && guesses.accepted < guesses.drafted, "{guesses:?}");
    assert_ne!(got, plain, "the text is another one");
    same_distribution("medusa:2", &plain, &got);
}
