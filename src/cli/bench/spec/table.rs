//! What was measured, for people and for scripts.

use serde_json::{Map, Value, json};

use super::{
    super::median,
    SpecBenchArgs, Variant,
    ask::{Row, Took},
};
use crate::{
    cli::size,
    draft::{Counts, Speculation},
};

/// A row's numbers: medians over prompts of medians over rounds.
pub struct Line {
    pub variant: usize,
    pub name: String,
    pub speculation: Speculation,
    pub rate: Option<f64>,
    /// Tokens per second after the first.
    pub speed: f64,
    /// Against the same prompt without guesses: median, lowest, highest.
    pub gain: [f64; 3],
    /// Time to the first token, milliseconds.
    pub first_ms: f64,
    /// Tokens of a step.
    pub length: f64,
    pub counts: Counts,
}

/// The lines of all rows; of each variant, that without guesses comes first.
pub fn lines(rows: &[Row]) -> Vec<Line> {
    let variants = rows.chunk_by(|a, b| a.variant == b.variant);
    variants.flat_map(|of| of.iter().map(|row| Line::of(row, &of[0]))).collect()
}

impl Line {
    fn of(row: &Row, plain: &Row) -> Line {
        let speed = |took: &Took| (took.tokens.len() - 1) as f64 / took.rest.as_secs_f64().max(1e-9);
        let of = |rounds: &Vec<Took>| median(rounds.iter().map(speed).collect());
        let mut gains: Vec<f64> = row.took.iter().zip(&plain.took).map(|(row, plain)| of(row) / of(plain)).collect();
        gains.sort_by(f64::total_cmp);
        let mut counts = Counts::default();
        let (mut tokens, mut steps) = (0, 0);
        for took in row.took.iter().flatten() {
            counts.add(&took.counts);
            // The first token is the prompt's; each other came with a step of its own, or was guessed.
            tokens += took.tokens.len() - 1;
            steps += took.tokens.len() - 1 - (took.counts.accepted as usize).min(took.tokens.len() - 1);
        }
        let first = |rounds: &Vec<Took>| median(rounds.iter().map(|took| took.first.as_secs_f64() * 1e3).collect());
        Line {
            variant: row.variant,
            name: row.name(),
            speculation: row.speculation,
            rate: row.rate,
            speed: median(row.took.iter().map(of).collect()),
            gain: [median(gains.clone()), gains[0], gains[gains.len() - 1]],
            first_ms: median(row.took.iter().map(first).collect()),
            length: tokens as f64 / steps.max(1) as f64,
            counts,
        }
    }

    fn json(&self) -> Map<String, Value> {
        let values = json!({
            "speculate": self.name, "synthetic_acceptance_rate": self.rate, "tokens_per_second": self.speed,
            "gain": self.gain[0], "gain_lowest": self.gain[1], "gain_highest": self.gain[2],
            "first_token_ms": self.first_ms, "acceptance_length": self.length, "drafts": self.counts.drafts,
            "drafted": self.counts.drafted, "accepted": self.counts.accepted,
            "accepted_per_position": self.counts.accepted_at,
        });
        match values {
            Value::Object(values) => values,
            _ => unreachable!("it is one"),
        }
    }
}

/// A list of objects, one per line; what is known of a file in a mode is in that without guesses.
pub fn json(variants: &[Variant], lines: &[Line]) -> Value {
    let one = |line: &Line| {
        let of = &variants[line.variant];
        let mut values = line.json();
        values.insert("model".into(), of.model.clone().into());
        values.insert("mode".into(), of.mode.clone().into());
        if line.speculation == Speculation::OFF {
            let steps = of.steps.iter().map(|(rows, seconds)| json!({"rows": rows, "ms": seconds * 1e3}));
            values.insert("model_bytes".into(), of.bytes.into());
            values.insert("numerics".into(), of.describe.clone().into());
            values.insert("steps".into(), steps.collect());
            if let Some(quality) = &of.quality {
                values.insert("perplexity".into(), quality.perplexity.value.into());
                values.insert("perplexity_error".into(), quality.perplexity.error.into());
                if let Some(distance) = &quality.against {
                    values.insert("kl".into(), distance.kl.value.into());
                    values.insert("kl_error".into(), distance.kl.error.into());
                    values.insert("same_top".into(), distance.same_top.value.into());
                }
            }
        }
        Value::Object(values)
    };
    lines.iter().map(one).collect()
}

/// A table of the files and modes, and one of each's methods and numbers.
pub fn markdown(variants: &[Variant], lines: &[Line], args: &SpecBenchArgs) -> String {
    let (tokens, rounds, prompts) = (args.tokens, args.rounds, variants[0].prompts.len());
    let mut s = format!("{prompts} prompts, {tokens} tokens each, {rounds} rounds in turns\n\n");
    s += &summary(variants, lines);
    for of in lines.chunk_by(|a, b| a.variant == b.variant) {
        s += &match variants.len() {
            1 => "\n".into(),
            _ => format!("\n{}:\n\n", variants[of[0].variant].name()),
        };
        s += "| guesses | tokens/s | against off (lowest to highest) | first token, ms | tokens a step | right of guessed | right at 1, 2, 3 ... of steps that guessed |\n";
        s += "|:--|--:|--:|--:|--:|--:|:--|\n";
        s += &of.iter().map(line).collect::<String>();
    }
    s + "\nMedians over the prompts; every text was the same as without guesses. Tokens per second are those after the first.\n"
}

fn line(line: &Line) -> String {
    let Counts { drafts, drafted, accepted, accepted_at } = line.counts;
    let at: Vec<String> = accepted_at
        .iter()
        .take_while(|&&count| count > 0)
        .map(|&count| format!("{:.2}", count as f64 / drafts as f64))
        .collect();
    let right = if drafted == 0 { String::new() } else { format!("{accepted} of {drafted}") };
    let ([gain, lowest, highest], name, at) = (line.gain, &line.name, at.join(" "));
    let (speed, first, length) = (line.speed, line.first_ms, line.length);
    format!(
        "| {name} | {speed:.1} | {gain:.2} ({lowest:.2} to {highest:.2}) | {first:.1} | {length:.2} | {right} | {at} |\n"
    )
}

/// Files and modes: what a row costs, what guesses gain at best, how good the model is.
fn summary(variants: &[Variant], lines: &[Line]) -> String {
    let mut s = String::new();
    for variant in variants {
        s += &format!("{}: {}, {}\n", variant.name(), size(variant.bytes), variant.describe);
    }
    let rows = variants[0].steps.iter().map(|(rows, _)| rows.to_string()).collect::<Vec<_>>();
    let quality = variants.iter().any(|v| v.quality.is_some());
    let mut head: Vec<String> = vec!["file, mode".into()];
    head.extend(rows.iter().map(|rows| format!("{rows} row{}, ms", if rows == "1" { "" } else { "s" })));
    head.extend(["off, tokens/s", "fastest", "tokens/s", "against off"].map(String::from));
    head.extend(["perplexity", "KL mean", "same top %"].map(String::from).into_iter().filter(|_| quality));
    s += &format!("\n| {} |\n|:--|{}\n", head.join(" | "), "--:|".repeat(head.len() - 1));
    for (variant, of) in variants.iter().zip(lines.chunk_by(|a, b| a.variant == b.variant)) {
        let one = variant.steps.first().map_or(1.0, |(_, seconds)| *seconds);
        let mut cells = vec![variant.name()];
        cells.extend(variant.steps.iter().map(|(_, t)| format!("{:.2} ({:.2})", t * 1e3, t / one)));
        let fastest = of.iter().max_by(|a, b| a.speed.total_cmp(&b.speed)).unwrap_or(&of[0]);
        cells.extend([
            format!("{:.1}", of[0].speed),
            fastest.name.clone(),
            format!("{:.1}", fastest.speed),
            format!("{:.2}", fastest.gain[0]),
        ]);
        if let Some(quality) = &variant.quality {
            let against = quality.against.as_ref();
            cells.push(quality.perplexity.shown(4));
            cells.push(against.map_or(String::new(), |d| d.kl.shown(6)));
            cells.push(against.map_or(String::new(), |d| d.same_top.percent().shown(2)));
        }
        s += &format!("| {} |\n", cells.join(" | "));
    }
    s + "\nSteps of so many rows: milliseconds (against the first column), behind the longest prompt.\n"
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn took(first: u64, rest: u64, accepted: usize) -> Took {
        let mut counts = Counts::default();
        counts.note(6, accepted);
        let [first, rest] = [first, rest].map(Duration::from_millis);
        Took { tokens: vec![1; 11], first, rest, counts }
    }

    fn row(variant: usize, name: &str, took: Vec<Vec<Took>>) -> Row {
        let mut row = Row::new(variant, name.parse().unwrap(), None);
        row.took = took;
        row
    }

    #[test]
    fn lines_are_medians() {
        let plain = row(0, "off", vec![vec![took(5, 100, 0); 3], vec![took(7, 200, 0); 3]]);
        let fast = [vec![took(5, 50, 5), took(5, 25, 5), took(5, 90, 5)], vec![took(7, 200, 5)]];
        // Another variant is compared with itself.
        let other = [row(1, "off", vec![vec![took(5, 50, 0)]]), row(1, "ngram", vec![vec![took(5, 25, 3)]])];
        let [other, guessed] = other;
        let lines = lines(&[plain, row(0, "ngram:2", fast.to_vec()), other, guessed]);
        assert_eq!(lines[1].gain, [1.5, 1.0, 2.0]);
        assert_eq!((lines[1].first_ms, lines[1].speed), (6.0, 125.0));
        assert_eq!(lines[1].length, 2.0, "half of the tokens were guessed");
        assert_eq!((lines[2].gain[0], lines[3].gain[0]), (1.0, 2.0));
        assert!(line(&lines[1]).starts_with("| ngram:2 | 125.0 | 1.50 (1.00 to 2.00) | 6.0 | 2.00 | 20 of 24 |"));
    }
}
