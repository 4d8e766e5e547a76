//! One answer: a request driven to its end, its text shown as it comes.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{RunError, Session, Settings};
use crate::engine::{Event, Finish, Generator, Request};
use crate::text::{TextModel, TextStream};

/// A finished answer.
#[derive(Debug)]
pub(super) struct Answer {
    pub text: String,
    pub end: End,
    pub timings: Timings,
    /// Every token, the one that ended the answer included.
    pub tokens: Vec<u32>,
    pub prompt_tokens: usize,
    /// Tokens that were guessed, and of them right.
    drafted: usize,
    accepted: usize,
    /// Tokens the engine had room for.
    context: usize,
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// The model's end-of-text token, or a stop text.
    Stop,
    /// --max-tokens.
    Length,
    /// The context is full.
    Context,
    /// Ctrl-C.
    Interrupted,
}

impl End {
    /// As JSON has it.
    pub fn name(self) -> &'static str {
        match self {
            End::Stop => "stop",
            End::Length => "length",
            End::Context => "context",
            End::Interrupted => "interrupted",
        }
    }
}

/// How long the parts of an answer took.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Timings {
    /// From the request to the first token.
    pub first: Duration,
    /// From the first token to the last.
    pub rest: Duration,
}

/// A request in progress: tokens in, text out.
pub(super) struct Running {
    pub text: String,
    pub tokens: Vec<u32>,
    stream: TextStream,
    prompt_tokens: usize,
    drafted: usize,
    accepted: usize,
    start: Instant,
    first: Option<Instant>,
    last: Option<Instant>,
}

impl Running {
    pub fn new(text: &TextModel, settings: &Settings, prompt_tokens: usize) -> Running {
        Running {
            text: String::new(),
            tokens: Vec::new(),
            stream: text.stream(&settings.stops),
            prompt_tokens,
            drafted: 0,
            accepted: 0,
            start: Instant::now(),
            first: None,
            last: None,
        }
    }

    /// Takes a token and returns the text to show; true: a stop text has appeared.
    pub fn token(&mut self, text: &TextModel, id: u32) -> (String, bool) {
        if self.stream.stopped() {
            return (String::new(), true); // computed before the engine heard of the stop
        }
        let now = Instant::now();
        self.first.get_or_insert(now);
        self.last = Some(now);
        self.tokens.push(id);
        let shown = self.stream.push(&text.shown_bytes(id));
        self.text.push_str(&shown);
        (shown, self.stream.stopped())
    }

    /// A step checked guesses, and so many were right.
    pub fn guessed(&mut self, drafted: usize, accepted: usize) {
        self.drafted += drafted;
        self.accepted += accepted;
    }

    /// The text that was still held back, and the answer.
    pub fn finish(mut self, finish: Finish, context: usize) -> (String, Answer) {
        let shown = self.stream.finish();
        self.text.push_str(&shown);
        let end = match finish {
            _ if self.stream.stopped() => End::Stop,
            Finish::Stop => End::Stop,
            Finish::Length => End::Length,
            Finish::Context => End::Context,
            Finish::Cancelled => End::Interrupted,
        };
        let first = self.first.unwrap_or_else(Instant::now);
        let timings =
            Timings { first: first - self.start, rest: self.last.map_or(Duration::ZERO, |last| last - first) };
        let Running { text, tokens, prompt_tokens, drafted, accepted, .. } = self;
        (shown, Answer { text, end, timings, tokens, prompt_tokens, drafted, accepted, context })
    }
}

/// The request for a prompt, if it fits.
pub(super) fn request(
    settings: &Settings,
    text: &TextModel,
    prompt: Vec<u32>,
    context: usize,
    most: usize,
) -> Result<Request, RunError> {
    if prompt.len() >= context {
        return Err(RunError::ContextFull { prompt: prompt.len(), context, most });
    }
    Ok(Request {
        prompt,
        max_tokens: settings.max_tokens,
        sampling: settings.sampling.clone(),
        stop_ids: text.stop_ids().to_vec(),
        ignore_eos: settings.ignore_eos,
        ..Request::default()
    })
}

/// Answers one prompt; `show` gets the text as it comes.
pub(super) fn answer<G: Generator>(
    session: &mut Session<'_, G>,
    prompt: Vec<u32>,
    mut show: impl FnMut(&str) -> Result<(), RunError>,
) -> Result<Answer, RunError> {
    let (text, settings) = (session.text, session.settings);
    let context = session.engine.max_context();
    let mut running = Running::new(text, settings, prompt.len());
    let id = session.engine.add(request(settings, text, prompt, context, session.most_context)?)?;
    let mut events = Vec::new();
    let mut finish = None;
    while finish.is_none() {
        let more = session.engine.step(&mut events)?;
        if session.interrupted.load(Ordering::Relaxed) {
            session.engine.cancel(id);
        }
        for event in events.drain(..) {
            match event {
                Event::Token { request, id: token, .. } if request == id => {
                    let (shown, stopped) = running.token(text, token);
                    if stopped {
                        session.engine.cancel(id);
                    }
                    if let Err(gone) = if shown.is_empty() { Ok(()) } else { show(&shown) } {
                        // The engine goes on to serve others; it must not go on with this.
                        session.engine.cancel(id);
                        return Err(gone);
                    }
                }
                Event::Guessed { request, drafted, accepted } if request == id => running.guessed(drafted, accepted),
                Event::Finished { request, finish: how } if request == id => finish = Some(how),
                Event::Failed { request, error } if request == id => {
                    return Err(crate::engine::EngineError::from(error).into());
                }
                _ => {} // of a request that was given up
            }
        }
        assert!(more || finish.is_some(), "an idle engine has reported the end of every request");
    }
    let (shown, answer) = running.finish(finish.expect("the loop ends with it"), context);
    if !shown.is_empty() {
        show(&shown)?;
    }
    Ok(answer)
}

impl Answer {
    /// What `--json` prints.
    pub fn to_json<G>(&self, session: &Session<'_, G>) -> Value {
        let mut json = self.result();
        json["seed"] = session.settings.sampling.seed.into();
        json["timings"] = json!({
            "load_seconds": session.load.as_secs_f64(),
            "first_token_seconds": self.timings.first.as_secs_f64(),
            "prompt_tokens_per_second": self.prompt_speed(),
            "generation_tokens_per_second": self.speed(),
            "drafted": self.drafted,
            "accepted": self.accepted,
        });
        json
    }

    /// The answer without what differs from run to run.
    pub fn result(&self) -> Value {
        let (prompt, answer) = (self.prompt_tokens, self.tokens.len());
        json!({
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.end.name(),
            "usage": {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer},
        })
    }

    /// One line about the answer, and a second one where it is not complete.
    pub fn summary<G>(&self, session: &Session<'_, G>, load: Option<Duration>) -> String {
        let load =
            load.map_or(String::new(), |load| format!("{} | load {:.2} s | ", session.device, load.as_secs_f64()));
        let speed = |speed: Option<f64>| speed.map_or(String::new(), |speed| format!(", {speed:.1} tokens/s"));
        let mut line = format!(
            "[{load}first token {:.2} s | prompt {} tokens{} | answer {} tokens{}]",
            self.timings.first.as_secs_f64(),
            self.prompt_tokens,
            speed(self.prompt_speed()),
            self.tokens.len(),
            speed(self.speed()),
        );
        if self.drafted > 0 {
            line.truncate(line.len() - 1);
            line += &format!(" | guessed {}, right {}]", self.drafted, self.accepted);
        }
        if !session.settings.sampling.is_greedy() {
            line += &format!(" [seed {}]", session.settings.sampling.seed);
        }
        match self.end {
            End::Stop => {}
            End::Length => line += &format!("\n[cut off after {} tokens (--max-tokens)]", self.tokens.len()),
            End::Interrupted => line += "\n[interrupted]",
            End::Context => {
                let most = session.most_context;
                let hint = if self.context < most { "; raise --ctx" } else { "" };
                line += &format!(
                    "\n[cut off: the context is full with {} prompt + {} answer tokens of {}; the model was made for up \
                     to {most}{hint}]",
                    self.prompt_tokens,
                    self.tokens.len(),
                    self.context,
                );
            }
        }
        line
    }

    /// Prompt tokens per second, up to the first token of the answer.
    fn prompt_speed(&self) -> Option<f64> {
        rate(self.prompt_tokens, self.timings.first)
    }

    /// Tokens per second after the first, which belongs to the prompt's time.
    fn speed(&self) -> Option<f64> {
        rate(self.tokens.len().saturating_sub(1), self.timings.rest)
    }
}

fn rate(tokens: usize, time: Duration) -> Option<f64> {
    (tokens > 0 && !time.is_zero()).then(|| tokens as f64 / time.as_secs_f64())
}
