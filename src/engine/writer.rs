//! What writes guesses of its own, next to the model: a small model, or a head that reads the model's states.

use std::collections::BTreeMap;

use quern_kernels::{
    exec::{ChunkOutput, ExecError, Output},
    sample::{Distribution, History, SamplingParams},
};

use crate::{
    draft::{Limits, Method, Tree},
    sched::{Scheduled, Scheduler},
};

/// Something that writes guesses.
pub(super) trait Writer: Send {
    /// What it can do.
    fn ability(&self) -> Ability;

    /// Copies a block, as the model does, for a sequence that goes on inside it.
    fn copy_block(&mut self, scheduler: &Scheduler, from: u32, to: u32) -> Result<(), ExecError>;

    /// Reads what the step computes of prompts, and guesses for those that have room for guesses.
    fn write(&mut self, scheduler: &Scheduler, asked: &[Asked]) -> Result<BTreeMap<u64, Written>, ExecError>;

    /// Whether [`Writer::keep`] wants to be called.
    fn keeps(&self) -> bool {
        false
    }

    /// Gets the model's states of the rows of a step that is done, before the scheduler knows.
    fn keep(&mut self, _scheduler: &Scheduler, _shares: &[Scheduled], _states: &[f32]) {}

    /// A sequence's rows `from` of a tree, by their slots, have gone to the slots from `to` on.
    fn moved(&mut self, _id: u64, _from: &[usize], _to: usize) {}
}

/// What a writer can do.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ability {
    /// How users name it.
    pub method: Method,
    /// Seconds that a guess takes, or all of a step if they come at once; 0 where none was made yet.
    pub pass: f64,
    /// One pass gives all guesses of a step.
    pub at_once: bool,
    /// Longest text that it can guess from.
    pub context: usize,
    /// Most guesses at once, one behind the other.
    pub most: usize,
    /// It says how sure it is, of several guesses for one position.
    pub branches: bool,
}

/// A sequence that is guessed, and has a share of the step.
pub(super) struct Asked<'a> {
    /// The share, with room for guesses if some are wanted.
    pub share: Scheduled,
    /// Guesses one behind the other, at most.
    pub depth: usize,
    /// How a tree of them grows; `None`: a chain is wanted.
    pub shape: Option<Limits>,
    /// How tokens are chosen.
    pub params: &'a SamplingParams,
    /// Tokens of the prompt.
    pub prompt_len: usize,
    /// What tokens are drawn from is wanted with them.
    pub from: bool,
}

/// What was written.
pub(super) enum Written {
    /// Guesses one behind the other, and what each was drawn from where that is wanted.
    Chain(Vec<u32>, Vec<Distribution>),
    /// Guesses of which the best are to be chosen.
    Tree(Tree),
}

/// A text and the guesses behind it.
pub(super) struct Draft<'a> {
    params: &'a SamplingParams,
    prompt_len: usize,
    /// Text and guesses.
    pub text: Vec<u32>,
    /// Where the guesses begin.
    known: usize,
    /// Guesses still wanted.
    pub left: usize,
    /// What they were drawn from, where that is wanted.
    from: Option<Vec<Distribution>>,
}

impl<'a> Draft<'a> {
    /// None yet of as many as there is room for.
    pub fn new(asked: &Asked<'a>, text: &[u32]) -> Draft<'a> {
        let (known, left, from) = (text.len(), asked.depth, asked.from.then(Vec::new));
        Draft { params: asked.params, prompt_len: asked.prompt_len, text: text.to_vec(), known, left, from }
    }

    /// What is wanted of the row that gives the next guess.
    pub fn output(&self, from: usize) -> Output<'_> {
        self.output_of(from, &self.text)
    }

    /// The same, of rows that stand for more tokens than are known.
    pub fn output_of<'b>(&'b self, from: usize, history: &'b [u32]) -> Output<'b> {
        match self.from {
            Some(_) => Output::Logits { from },
            None => Output::Tokens {
                from,
                params: self.params,
                history,
                prompt_len: self.prompt_len,
                logprobs: None,
                allowed: None,
            },
        }
    }

    /// Takes the next guesses, of `vocab` tokens, from logits of `width` tokens; without one it is done.
    pub fn take(&mut self, output: ChunkOutput, vocab: usize, width: usize) {
        match output {
            ChunkOutput::Tokens(tokens) => {
                for next in tokens {
                    self.push(next.ok().map(|next| next.token), vocab);
                }
            }
            ChunkOutput::Logits(mut logits) => {
                for logits in logits.chunks_exact_mut(width) {
                    if self.left > 0 {
                        let token = self.draw(logits);
                        self.push(token, vocab);
                    }
                }
            }
            _ => self.left = 0,
        }
    }

    fn push(&mut self, token: Option<u32>, vocab: usize) {
        match token.filter(|&token| (token as usize) < vocab) {
            Some(token) if self.left > 0 => {
                self.left -= 1;
                self.text.push(token);
            }
            _ => self.left = 0,
        }
    }

    /// Draws a token and keeps what it was drawn from.
    fn draw(&mut self, logits: &mut [f32]) -> Option<u32> {
        let history = History { tokens: &self.text, prompt_len: self.prompt_len };
        let from = Distribution::of(logits, self.params, history, None).ok()?;
        let token = from.draw(self.params.seed, self.text.len() as u64);
        self.from.as_mut()?.push(from);
        Some(token)
    }

    /// The guesses.
    pub fn done(mut self) -> Written {
        let tokens = self.text.split_off(self.known);
        let mut from = self.from.unwrap_or_default();
        from.truncate(tokens.len());
        Written::Chain(tokens, from)
    }
}

/// Keeps a mean of how long a pass takes.
pub(super) fn mean(pass: &mut f64, took: f64) {
    *pass = if *pass == 0.0 { took } else { *pass + (took - *pass) * 0.1 };
}
