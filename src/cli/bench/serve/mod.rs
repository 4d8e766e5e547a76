//! `quern bench serve`: how fast any OpenAI-compatible server answers many clients.
//!
//! Terms are those of vLLM's benchmark: TTFT is the time to the first token, TPOT that of each further one on average
//! of a request, ITL the gaps between pieces of its text, E2EL the time of a whole request. Prompts are random common
//! words; where the server has `/tokenize`, only words that are one token, so that lengths are exact (the chat
//! template, and BOS where it is added, come on top). Answers are greedy and ignore the end of text, so that their
//! lengths are exact too and their texts comparable.

mod client;
mod load;
mod prompts;
mod report;

use std::{error::Error, path::PathBuf, time::Duration};

use clap::{Args, ValueEnum};

use super::super::{Format, Usage, positive, print};
use crate::random::Random;

/// Flags of `quern bench serve`.
#[derive(Debug, Clone, Args)]
pub struct ServeBenchArgs {
    /// Where the server is: http://127.0.0.1:8080
    #[arg(long, value_parser = client::Server::parse)]
    url: client::Server,
    /// What is asked
    #[arg(long, value_enum, default_value = "completions")]
    endpoint: Endpoint,
    /// Closed loop: clients that each send the next request when the last one is answered
    #[arg(short, long, default_value_t = 8, value_parser = positive, conflicts_with = "rate")]
    concurrency: usize,
    /// Open loop: requests per second, whatever the server does
    #[arg(long, value_parser = above_zero)]
    rate: Option<f64>,
    /// Shape of the gamma distribution of gaps between requests: 1 is Poisson, less comes in bursts
    #[arg(long, default_value_t = 1.0, requires = "rate", value_parser = above_zero)]
    burstiness: f64,
    /// Requests to send [default: 64, or as many as --seconds allow]
    #[arg(short = 'n', long, value_parser = positive)]
    requests: Option<usize>,
    /// Seconds after which no more are sent
    #[arg(long, value_parser = above_zero)]
    seconds: Option<f64>,
    /// Tokens of a prompt: N, or FROM-TO for random lengths
    #[arg(short, long, default_value = "128", value_parser = Range::parse)]
    input_tokens: Range,
    /// Tokens of an answer: N, or FROM-TO
    #[arg(short = 'g', long, default_value = "128", value_parser = Range::parse)]
    output_tokens: Range,
    /// Tokens that all prompts begin with, on top of --input-tokens
    #[arg(long, default_value_t = 0, value_name = "TOKENS")]
    shared_prefix: usize,
    /// Requests before the measured ones
    #[arg(long, default_value_t = 0, value_name = "REQUESTS")]
    warmup: usize,
    /// Send one long prompt of so many tokens while the others decode, and report what it does to them
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    intrude: Option<usize>,
    /// When to send it, seconds after the first request
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0, requires = "intrude", value_parser = above_zero)]
    intrude_after: f64,
    /// Model's name in requests [default: the first of /v1/models]
    #[arg(long)]
    model: Option<String>,
    /// Sent as `Authorization: Bearer`
    #[arg(long)]
    api_key: Option<String>,
    /// Of prompts, lengths and arrivals; another one asks what no cache has seen
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Seconds after which a request has failed
    #[arg(long, default_value_t = 600.0, value_parser = above_zero)]
    timeout: f64,
    /// Write each answer as a line of JSON, in the order of requests, to compare runs
    #[arg(long, value_name = "FILE")]
    save_texts: Option<PathBuf>,
    /// How to print
    #[arg(short, long, value_enum, default_value = "md")]
    output: Format,
}

/// What is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Endpoint {
    /// /v1/completions
    Completions,
    /// /v1/chat/completions, one user message
    Chat,
}

/// A number of tokens, or bounds of random ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    from: usize,
    to: usize,
}

impl Range {
    /// One of them.
    fn pick(self, random: &mut Random) -> usize {
        self.from + random.below(self.to - self.from + 1)
    }

    fn parse(text: &str) -> Result<Range, String> {
        let number = |t: &str| t.parse::<usize>().ok().filter(|n| (1..=1 << 20).contains(n));
        let (from, to) = text.split_once('-').unwrap_or((text, text));
        match (number(from), number(to)) {
            (Some(from), Some(to)) if from <= to => Ok(Range { from, to }),
            _ => Err("expected a number of tokens from 1 to 1048576, or two as FROM-TO".into()),
        }
    }
}

fn above_zero(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|x: &f64| x.is_finite() && *x > 0.0).ok_or_else(|| "expected a number above 0".into())
}

/// Runs the command.
pub fn main(args: ServeBenchArgs) -> Result<(), Box<dyn Error>> {
    if args.requests.is_none() && args.seconds.is_none() && args.intrude.is_some() && args.rate.is_some() {
        return Err(Usage("--intrude with --rate needs --requests or --seconds".into()).into());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (outcome, model, exact) = runtime.block_on(async {
        let client = client::Client::new(&args, Duration::from_secs_f64(args.timeout)).await?;
        let prompts = prompts::Prompts::new(&client, &args).await;
        let outcome = load::run(&args, &client, &prompts).await?;
        Ok::<_, Box<dyn Error>>((outcome, client.model().to_string(), prompts.exact()))
    })?;
    if let Some(path) = &args.save_texts {
        let lines: String = outcome.done.iter().map(|d| format!("{}\n", d.line())).collect();
        std::fs::write(path, lines).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    let report = report::Report::new(&args, &outcome, crate::cli::one_line(&model), exact);
    match args.output {
        Format::Md => print(&report.markdown())?,
        Format::Json => print(&format!("{}\n", serde_json::to_string_pretty(&report.json())?))?,
    }
    match outcome.done.iter().any(|d| d.error.is_none()) {
        true => Ok(()),
        false => Err("no request was answered".into()),
    }
}

/// A gap between requests: gamma distributed, with mean 1 (Marsaglia and Tsang, 2000).
pub fn gap(random: &mut Random, shape: f64) -> f64 {
    if shape < 1.0 {
        let boost = random.fraction().powf(1.0 / shape);
        return gap(random, shape + 1.0) * boost * (shape + 1.0) / shape;
    }
    let d = shape - 1.0 / 3.0;
    let c = 1.0 / (9.0 * d).sqrt();
    loop {
        let normal = (-2.0 * random.fraction().ln()).sqrt() * (std::f64::consts::TAU * random.fraction()).cos();
        let v = (1.0 + c * normal).powi(3);
        if v > 0.0 && random.fraction().ln() < 0.5 * normal * normal + d - d * v + d * v.ln() {
            return d * v / shape;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_have_the_mean_and_variance_of_their_shape() {
        for shape in [0.25, 1.0, 4.0] {
            let mut random = Random::stream(1, 2);
            let gaps: Vec<f64> = (0..40_000).map(|_| gap(&mut random, shape)).collect();
            let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
            let variance = gaps.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
            assert!((mean - 1.0).abs() < 0.05, "{shape}: {mean}");
            assert!((variance * shape - 1.0).abs() < 0.1, "{shape}: {variance}");
        }
    }

    #[test]
    fn lengths_are_a_number_or_a_range() {
        assert_eq!(Range::parse("7"), Ok(Range { from: 7, to: 7 }));
        assert_eq!(Range::parse("7-9"), Ok(Range { from: 7, to: 9 }));
        for bad in ["", "0", "9-7", "a", "1-2-3", "-3", "99999999"] {
            assert!(Range::parse(bad).is_err(), "{bad}");
        }
        let mut random = Random::stream(0, 0);
        let seen: Vec<usize> = (0..200).map(|_| Range { from: 7, to: 9 }.pick(&mut random)).collect();
        assert!(seen.iter().all(|n| (7..=9).contains(n)) && [7, 8, 9].iter().all(|n| seen.contains(n)));
    }
}
