//! Asking every engine every prompt, with each method and number of guesses.

use std::{
    error::Error,
    sync::Arc,
    time::{Duration, Instant},
};

use quern_kernels::sample::SamplingParams;

use super::{SpecBenchArgs, Variant};
use crate::{
    draft::{Counts, Past, Speculation},
    engine::{Engine, Event, Generator, Request},
    random::Random,
};

/// What one request took.
#[derive(Debug, Clone)]
pub struct Took {
    pub tokens: Vec<u32>,
    /// To the first token.
    pub first: Duration,
    /// From the first token to the last.
    pub rest: Duration,
    pub counts: Counts,
}

/// A variant, a method and number of guesses, and its requests.
pub struct Row {
    /// Index of the variant.
    pub variant: usize,
    pub speculation: Speculation,
    /// Chance that a guess is right, where they are taken from the answer.
    pub rate: Option<f64>,
    /// `[prompt][round]`.
    pub took: Vec<Vec<Took>>,
    /// Its own answers of the round.
    past: Past,
}

impl Row {
    pub fn new(variant: usize, speculation: Speculation, rate: Option<f64>) -> Row {
        Row { variant, speculation, rate, took: vec![], past: Past::default() }
    }

    /// As tables show it: `off`, `ngram:4`, `synthetic 0.7:4`.
    pub fn name(&self) -> String {
        let fixed = |k| format!(":{k}");
        match self.rate {
            Some(rate) => format!("synthetic {rate}{}", self.speculation.fixed.map_or(String::new(), fixed)),
            None => self.speculation.to_string(),
        }
    }
}

/// Puts every prompt to every row in turns, `rounds` times.
pub fn measure(variants: &mut [Variant], mut rows: Vec<Row>, args: &SpecBenchArgs) -> Result<Vec<Row>, Box<dyn Error>> {
    let mut salt = 0u64;
    let mut request = |prompt: &[u32], speculation| {
        salt += 1;
        Request {
            prompt: prompt.to_vec(),
            max_tokens: args.tokens,
            sampling: SamplingParams::greedy(),
            ignore_eos: true,
            cache_salt: Some(salt.to_string()),
            speculation: Some(speculation),
            shares: Some(args.past),
            ..Request::default()
        }
    };
    // The answers that rows with a rate are told; one of each variant warms up in any case.
    let mut answers: Vec<Vec<Vec<u32>>> = vec![];
    for variant in variants.iter_mut() {
        let count = if args.synthetic_acceptance_rate.is_empty() { 1 } else { variant.prompts.len() };
        let mut of = vec![];
        for prompt in &variant.prompts[..count] {
            of.push(ask(&mut variant.engine, request(prompt, Speculation::OFF))?.tokens);
        }
        answers.push(of);
    }
    let prompts = variants[0].prompts.len();
    rows.iter_mut().for_each(|row| row.took.resize_with(prompts, Vec::new));
    for round in 0..args.rounds {
        rows.iter_mut().for_each(|row| row.past = Past::default());
        for i in 0..prompts {
            let count = rows.len();
            for turn in 0..count {
                let row = &mut rows[(turn + i + round) % count];
                let Variant { engine, prompts, vocab, .. } = &mut variants[row.variant];
                let mut request = request(&prompts[i], row.speculation);
                if let Some(rate) = row.rate {
                    // The same mistakes for every number of guesses.
                    let random = Random::stream(round as u64, i as u64);
                    request.expected = Some(spoilt(&answers[row.variant][i], rate, *vocab, random));
                }
                engine.exchange_past(&mut row.past);
                let took = ask(engine, request);
                engine.exchange_past(&mut row.past);
                row.took[i].push(took?);
            }
            for of in rows.chunk_by(|a, b| a.variant == b.variant) {
                let want = &of[0].took[i][0].tokens;
                if let Some(row) = of.iter().find(|row| row.took[i].last().is_some_and(|took| took.tokens != *want)) {
                    let name = row.name();
                    return Err(format!("prompt {}: {name} gives another text than off: a bug", i + 1).into());
                }
            }
        }
    }
    Ok(rows)
}

/// An answer in which each token is right with a chance, else any other.
fn spoilt(answer: &[u32], rate: f64, vocab: usize, mut random: Random) -> Arc<[u32]> {
    let other = |token: u32, random: &mut Random| match vocab {
        0 | 1 => token,
        _ => ((token as usize + 1 + random.below(vocab - 1)) % vocab) as u32,
    };
    let spoil = |&token: &u32| if random.fraction() < rate { token } else { other(token, &mut random) };
    answer.iter().map(spoil).collect()
}

fn ask(engine: &mut Engine, request: Request) -> Result<Took, Box<dyn Error>> {
    let start = Instant::now();
    engine.add(request)?;
    let (mut first, mut events) = (None, vec![]);
    let mut took = Took { tokens: vec![], first: Duration::ZERO, rest: Duration::ZERO, counts: Counts::default() };
    loop {
        let more = engine.step(&mut events)?;
        for event in events.drain(..) {
            match event {
                Event::Token { id, .. } => {
                    first.get_or_insert_with(Instant::now);
                    took.tokens.push(id);
                }
                Event::Guessed { drafted, accepted, .. } => took.counts.note(drafted, accepted),
                Event::Failed { error, .. } => return Err(error.into()),
                _ => {}
            }
        }
        if !more {
            break;
        }
    }
    let first = first.ok_or("no token came")?;
    (took.first, took.rest) = (first - start, first.elapsed());
    Ok(took)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_spoilt_as_often_as_asked() {
        let answer: Vec<u32> = (0..10_000).map(|i| i % 7).collect();
        for rate in [0.0, 0.3, 0.7, 1.0] {
            let got = spoilt(&answer, rate, 7, Random::new(3));
            assert!(got.iter().all(|&token| token < 7));
            let right = got.iter().zip(&answer).filter(|(a, b)| a == b).count() as f64 / 1e4;
            // Four standard deviations; nothing is right by accident.
            assert!((right - rate).abs() <= 0.02, "{right} of {rate}");
        }
        assert_eq!(*spoilt(&[0, 0], 0.0, 1, Random::new(1)), [0, 0], "there is no other token");
    }

    #[test]
    fn rows_have_names() {
        let name = |text: &str, rate| Row::new(0, text.parse().unwrap(), rate).name();
        assert_eq!((name("off", None), name("ngram:4", None)), ("off".into(), "ngram:4".into()));
        assert_eq!(
            (name("ngram:4", Some(0.7)), name("ngram", Some(1.0))),
            ("synthetic 0.7:4".into(), "synthetic 1".into())
        );
    }
}
