//! When requests are sent: by clients that wait for their answers, or at times of their own.

use std::{
    cell::RefCell,
    rc::Rc,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tokio::task::LocalSet;

use super::{
    ServeBenchArgs,
    client::{Answer, Client},
    gap,
    prompts::Prompts,
};
use crate::random::Random;

/// Most requests of a run, for those without another bound.
const MOST: usize = 1_000_000;

/// Seeds of prompts that are not measured.
const WARMUP: u64 = 1 << 40;
const INTRUDER: u64 = 1 << 41;

/// Tokens that the intruder's answer has.
const INTRUDER_TOKENS: usize = 16;

/// One request that has ended.
#[derive(Debug)]
pub struct Done {
    /// Its place in the order of sending.
    pub index: usize,
    /// When it was sent.
    pub sent: Instant,
    /// Tokens asked for.
    pub asked: usize,
    /// What came.
    pub answer: Answer,
    /// Why it failed.
    pub error: Option<String>,
}

impl Done {
    /// Tokens of the answer: as the server counts, or else pieces of text.
    pub fn tokens(&self) -> usize {
        let counted = self.answer.usage.as_ref().and_then(|u| u["completion_tokens"].as_u64());
        counted.map_or(self.answer.times.len(), |n| n as usize)
    }

    /// For `--save-texts`.
    pub fn line(&self) -> Value {
        json!({"index": self.index, "text": self.answer.text, "error": self.error})
    }
}

/// All requests of a run.
#[derive(Debug)]
pub struct Outcome {
    /// Measured ones, in the order of sending.
    pub done: Vec<Done>,
    /// The long prompt, where there was one.
    pub intruder: Option<Done>,
    /// From the first request to the last answer.
    pub took: Duration,
}

/// Sends everything and waits for it.
pub async fn run(
    args: &ServeBenchArgs,
    client: &Client,
    prompts: &Prompts,
) -> Result<Outcome, Box<dyn std::error::Error>> {
    let shared = Shared { args, client, prompts };
    for i in 0..args.warmup as u64 {
        let done = shared.send(WARMUP + i, 0, args.input_tokens.from, args.output_tokens.from).await;
        if let Some(error) = done.error {
            return Err(format!("a request before the measured ones failed: {error}").into());
        }
    }
    let begun = Instant::now();
    let intruder = async {
        let tokens = args.intrude?;
        tokio::time::sleep(Duration::from_secs_f64(args.intrude_after)).await;
        Some(shared.send(INTRUDER, 0, tokens, INTRUDER_TOKENS).await)
    };
    let load = async {
        match args.rate {
            Some(rate) => shared.open(rate, begun).await,
            None => shared.closed(begun).await,
        }
    };
    let (intruder, mut done) = tokio::join!(intruder, load);
    let took = begun.elapsed();
    done.sort_by_key(|d| d.index);
    Ok(Outcome { done, intruder, took })
}

struct Shared<'a> {
    args: &'a ServeBenchArgs,
    client: &'a Client,
    prompts: &'a Prompts,
}

impl Shared<'_> {
    async fn send(&self, seed: u64, index: usize, input: usize, output: usize) -> Done {
        let prompt = self.prompts.prompt(seed, input);
        let sent = Instant::now();
        let (answer, error) = self.client.generate(&prompt, output).await;
        Done { index, sent, asked: output, answer, error }
    }

    /// Lengths depend on the place alone, so that runs at other speeds ask the same.
    async fn numbered(&self, index: usize) -> Done {
        let mut random = Random::stream(self.args.seed, 2 * index as u64);
        let (input, output) = (self.args.input_tokens.pick(&mut random), self.args.output_tokens.pick(&mut random));
        self.send(index as u64, index, input, output).await
    }

    fn most(&self) -> usize {
        self.args.requests.unwrap_or(if self.args.seconds.is_some() { MOST } else { 64 })
    }

    fn over(&self, begun: Instant) -> bool {
        self.args.seconds.is_some_and(|s| begun.elapsed().as_secs_f64() >= s)
    }

    async fn closed(&self, begun: Instant) -> Vec<Done> {
        let next = RefCell::new(0);
        let client = async || {
            let mut done = vec![];
            loop {
                let index = next.replace_with(|n| *n + 1);
                if index >= self.most() || self.over(begun) {
                    return done;
                }
                done.push(self.numbered(index).await);
            }
        };
        all((0..self.args.concurrency).map(|_| client())).await.into_iter().flatten().collect()
    }

    async fn open(&self, rate: f64, begun: Instant) -> Vec<Done> {
        let mut random = Random::stream(self.args.seed, u64::MAX - 1);
        let mut at = Duration::ZERO;
        let local = LocalSet::new();
        let done = Rc::new(RefCell::new(vec![]));
        local
            .run_until(async {
                let mut tasks = vec![];
                for index in 0..self.most() {
                    // Times are absolute: a late start does not shift those behind it.
                    tokio::time::sleep_until((begun + at).into()).await;
                    if self.over(begun) {
                        break;
                    }
                    at += Duration::from_secs_f64(gap(&mut random, self.args.burstiness) / rate);
                    let (args, client, done) = (self.args.clone(), self.client.clone(), done.clone());
                    let mut random = Random::stream(self.args.seed, 2 * index as u64);
                    let (input, output) = (args.input_tokens.pick(&mut random), args.output_tokens.pick(&mut random));
                    let prompt = self.prompts.prompt(index as u64, input);
                    tasks.push(tokio::task::spawn_local(async move {
                        let sent = Instant::now();
                        let (answer, error) = client.generate(&prompt, output).await;
                        done.borrow_mut().push(Done { index, sent, asked: output, answer, error });
                    }));
                }
                for task in tasks {
                    let _ = task.await;
                }
            })
            .await;
        done.take()
    }
}

/// Waits for all at the same time.
async fn all<T>(work: impl Iterator<Item = impl Future<Output = T>>) -> Vec<T> {
    let mut work: Vec<_> = work.map(|w| (Box::pin(w), None)).collect();
    std::future::poll_fn(|context| {
        let mut ready = true;
        for (future, result) in work.iter_mut().filter(|(_, result)| result.is_none()) {
            match future.as_mut().poll(context) {
                std::task::Poll::Ready(value) => *result = Some(value),
                std::task::Poll::Pending => ready = false,
            }
        }
        if ready { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    work.into_iter().filter_map(|(_, result)| result).collect()
}
