//! One submission to the engine, read as text: tokens become characters, stop texts end an answer.
//!
//! Dropping a [`Run`] cancels what has not ended, and counts it as aborted.

use std::{collections::VecDeque, sync::Arc, time::Instant};

use quern_kernels::sample::SampleError;
use serde_json::{Value, json};

use super::refused;
use crate::{
    engine::{
        Event, Failure, Finish, Request, Score,
        worker::{Submission, Unread},
    },
    server::{ApiError, State, metrics::Done},
    text::TextStream,
    tools::ToolSet,
};

/// A token with its probability, where it was asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Chosen {
    /// The token.
    pub id: u32,
    /// Its logprob; `None` for the first token of a prompt.
    pub logprob: Option<f32>,
    /// The likeliest in its place.
    pub top: Vec<(u32, f32)>,
    /// Characters of the answer before it. Bytes of a character that is not complete yet count for nothing.
    pub offset: usize,
}

/// Something that happened to a choice.
#[derive(Debug, PartialEq)]
pub enum Update {
    /// Logprobs of the prompt: of each token but the first.
    Prompt(Vec<Score>),
    /// The text that may be shown since a token came, and the tokens that are certain to stay. A token whose text may
    /// become part of a stop text waits as long as that text does.
    Token(Vec<Chosen>, String),
    /// The vector of a text.
    Embedding(Vec<f32>),
    /// The end, and what was held back until now.
    End(Finish, Vec<Chosen>, String),
}

/// Requests in progress.
pub struct Run {
    state: Arc<State>,
    submission: Submission,
    arrived: Instant,
    choices: Vec<Choice>,
    marks: Option<ToolSet>,
    /// The first one that left the queue.
    started: Option<Instant>,
    ready: VecDeque<(usize, Update)>,
}

/// What was seen of one choice.
struct Choice {
    text: TextStream,
    /// Tokens whose text is held back, and whether they have any.
    held: VecDeque<(Chosen, bool)>,
    stop_ids: Vec<u32>,
    prompt: usize,
    cached: usize,
    generated: usize,
    drafted: usize,
    accepted: usize,
    /// Of the tokens of this step, the next so many were guessed.
    guessed: usize,
    started: Option<Instant>,
    first: Option<Instant>,
    last: Option<Instant>,
    ended: bool,
}

impl Run {
    /// Submits requests; each gets its own copy of `text`. The control tokens that mark calls of `marks` are text, too.
    pub fn start(
        state: Arc<State>,
        arrived: Instant,
        requests: Vec<Request>,
        text: &TextStream,
        marks: Option<ToolSet>,
    ) -> Result<Run, ApiError> {
        let choice = |r: &Request| Choice {
            text: text.clone(),
            held: VecDeque::new(),
            stop_ids: if r.ignore_eos { vec![] } else { r.stop_ids.clone() },
            prompt: r.prompt.len(),
            cached: 0,
            generated: 0,
            drafted: 0,
            accepted: 0,
            guessed: 0,
            started: None,
            first: None,
            last: None,
            ended: false,
        };
        let choices = requests.iter().map(choice).collect();
        let submission = state.engine.submit(requests).map_err(refused)?;
        Ok(Run { state, submission, arrived, choices, marks, started: None, ready: VecDeque::new() })
    }

    /// What happened next, and to which choice; `None` after the end of all.
    pub async fn next(&mut self) -> Result<Option<(usize, Update)>, ApiError> {
        loop {
            if let Some(ready) = self.ready.pop_front() {
                return Ok(Some(ready));
            }
            // What a stop text ended is over for the client before the engine's step is.
            if self.choices.iter().all(|c| c.ended) {
                return Ok(None);
            }
            let Some(event) = self.submission.next().await else {
                // The engine's thread is gone, and with it the events of what was open.
                return Err(server_error("the engine's thread has ended"));
            };
            self.take(event)?;
        }
    }

    fn take(&mut self, mut event: Event) -> Result<(), ApiError> {
        if let Event::Failed { error: error @ Failure::Unread { .. }, .. } = &event {
            // Of all choices together.
            return Err(failed(error));
        }
        let index = *event.request_mut();
        let at = index as usize;
        let now = Instant::now();
        let choice = &mut self.choices[at];
        if choice.ended {
            // It was cancelled by us.
            return Ok(());
        }
        match event {
            Event::Started { cached, at, .. } => {
                choice.cached = cached;
                choice.started = Some(at);
                self.started.get_or_insert(at);
            }
            Event::Guessed { drafted, accepted, .. } => {
                choice.drafted += drafted;
                choice.guessed = accepted;
            }
            Event::Prompt { tokens, .. } => self.ready.push_back((at, Update::Prompt(tokens))),
            Event::Embedding { values, .. } => self.ready.push_back((at, Update::Embedding(values))),
            Event::Token { id, logprob, top, .. } => {
                choice.generated += 1;
                // A stop text may end the answer within them.
                let guessed = choice.guessed.min(1);
                choice.guessed -= guessed;
                choice.accepted += guessed;
                if let Some(last) = choice.last.replace(now) {
                    self.state.metrics.token_gap(now - last);
                }
                choice.first.get_or_insert(now);
                let mark = self.marks.as_ref().and_then(|tools| tools.text_of(id));
                let bytes = match mark {
                    _ if choice.stop_ids.contains(&id) => vec![],
                    Some(mark) => mark.as_bytes().to_vec(),
                    None => self.state.text.shown_bytes(id),
                };
                let offset = choice.text.came();
                choice.held.push_back((Chosen { id, logprob, top, offset }, !bytes.is_empty()));
                let text = choice.text.push(&bytes);
                let stopped = choice.text.stopped();
                let tokens = choice.certain();
                self.ready.push_back((at, Update::Token(tokens, text)));
                if stopped {
                    self.submission.cancel(index);
                    self.end(at, Finish::Stop, "stop");
                }
            }
            Event::Finished { finish: Finish::Cancelled, .. } => {
                self.count(at, "abort");
                return Err(stopping());
            }
            Event::Finished { finish, .. } => {
                self.end(at, finish, if finish == Finish::Stop { "stop" } else { "length" });
            }
            Event::Failed { error, .. } => {
                self.count(at, "error");
                return Err(failed(&error));
            }
        }
        Ok(())
    }

    fn end(&mut self, at: usize, finish: Finish, reason: &'static str) {
        let choice = &mut self.choices[at];
        let rest = choice.text.finish();
        // What a stop text dropped has no tokens, either.
        let tokens = if choice.text.stopped() { vec![] } else { choice.held.drain(..).map(|(t, _)| t).collect() };
        self.ready.push_back((at, Update::End(finish, tokens, rest)));
        self.count(at, reason);
    }

    /// Counts the end of a choice.
    fn count(&mut self, at: usize, reason: &'static str) {
        let choice = &mut self.choices[at];
        choice.ended = true;
        self.state.metrics.done(&Done {
            arrived: self.arrived,
            started: choice.started,
            first: choice.first,
            last: choice.last,
            prompt_tokens: choice.prompt,
            cached: choice.cached,
            generated: choice.generated,
            reason,
        });
    }

    /// The tokens that the engine has given and nobody has read.
    pub fn unread(&self) -> Arc<Unread> {
        self.submission.unread()
    }

    /// How many choices there are.
    pub fn choices(&self) -> usize {
        self.choices.len()
    }

    /// Token counts, as far as it has come; `n` choices of a prompt count their prompt once.
    pub fn usage(&self, n: usize) -> Value {
        let (prompt, cached, generated) = self.counts(n);
        json!({
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        })
    }

    /// Prompt tokens, those of them found in the cache, and generated tokens.
    fn counts(&self, n: usize) -> (usize, usize, usize) {
        let prompts = || self.choices.chunks(n.max(1));
        let prompt = prompts().map(|c| c[0].prompt).sum();
        // What the first choice computes, the others of its prompt find: that is no reuse of earlier work.
        let cached = prompts().filter_map(|c| c.iter().filter(|c| c.started.is_some()).map(|c| c.cached).min()).sum();
        (prompt, cached, self.choices.iter().map(|c| c.generated).sum())
    }

    /// What took how long, as llama-server reports it: computing the prompts until the first token, then the answers.
    pub fn timings(&self, n: usize) -> Value {
        let (prompt, cached, generated) = self.counts(n);
        let computed = prompt - cached;
        let first = self.choices.iter().filter_map(|c| c.first).min();
        let last = self.choices.iter().filter_map(|c| c.last).max();
        let between = |from: Option<Instant>, to: Option<Instant>| match (from, to) {
            (Some(from), Some(to)) => (to - from).as_secs_f64() * 1e3,
            _ => 0.0,
        };
        let (prompt_ms, predicted_ms) = (between(self.started, first), between(first, last));
        let ratio = |a: f64, b: f64| if b > 0.0 { rounded(a / b) } else { 0.0 };
        let mut timings = json!({
            "cache_n": cached,
            "prompt_n": computed,
            "prompt_ms": rounded(prompt_ms),
            "prompt_per_token_ms": ratio(prompt_ms, computed as f64),
            "prompt_per_second": ratio(1e3 * computed as f64, prompt_ms),
            "predicted_n": generated,
            "predicted_ms": rounded(predicted_ms),
            "predicted_per_token_ms": ratio(predicted_ms, generated as f64),
            "predicted_per_second": ratio(1e3 * generated as f64, predicted_ms),
        });
        let drafted: usize = self.choices.iter().map(|c| c.drafted).sum();
        if drafted > 0 {
            timings["draft_n"] = json!(drafted);
            timings["draft_n_accepted"] = json!(self.choices.iter().map(|c| c.accepted).sum::<usize>());
        }
        timings
    }
}

impl Choice {
    /// The tokens before which, and of which, text has been shown. One without text (a control token) stays where what
    /// comes before it does.
    fn certain(&mut self) -> Vec<Chosen> {
        let shown = self.text.shown();
        let stays = |(token, has_text): &(Chosen, bool)| token.offset < shown + usize::from(!has_text);
        let mut tokens = vec![];
        while self.held.front().is_some_and(stays) {
            tokens.extend(self.held.pop_front().map(|(token, _)| token));
        }
        tokens
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        for at in 0..self.choices.len() {
            if !self.choices[at].ended {
                self.count(at, "abort");
            }
        }
    }
}

fn rounded(x: f64) -> f64 {
    (x * 1e3).round() / 1e3
}

/// Why a request failed on its way: by what it asked for, or by the model or the engine.
pub fn failed(error: &Failure) -> ApiError {
    let message = error.to_string();
    match error {
        // Numbers were there, and every one of them was forbidden.
        Failure::Sample(SampleError::NothingToChoose { nans: 0, .. }) | Failure::Constraint(_) => {
            ApiError::invalid(message)
        }
        Failure::Unread { .. } => {
            ApiError { code: Some("answer_not_read"), ..ApiError::new(408, "invalid_request_error", message) }
        }
        Failure::Sample(_) | Failure::Engine(_) => server_error(message),
    }
}

/// Status 500.
pub fn server_error(message: impl Into<String>) -> ApiError {
    ApiError::new(500, "server_error", message)
}

fn stopping() -> ApiError {
    ApiError::new(503, "service_unavailable_error", "the server stops and has ended this request")
}
