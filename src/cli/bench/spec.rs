//! `quern bench spec`: what guessing ahead gains on given prompts, by method and number of guesses.
//!
//! One engine answers every prompt once without guesses and once with each method and number, in turns that begin
//! elsewhere for each prompt, so that what the machine does meanwhile hits all alike. Every request has a salt of its
//! own: none finds what another has computed, nor guesses from its answer. Answers are greedy, ignore the end of text
//! and must be the same.

use std::{
    error::Error,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use clap::Args;
use quern_kernels::sample::SamplingParams;
use quern_models::ModelFile;
use serde_json::json;

use super::super::{EngineArgs, Format, Usage, draft, open, positive, print, read_whole};
use crate::{
    draft::{Accept, Counts, MOST, Method, Speculation},
    engine::{Engine, EngineOptions, Event, Generator, Request},
    text::{Message, TextModel},
};

/// Flags of `quern bench spec`.
#[derive(Debug, Args)]
pub struct SpecBenchArgs {
    /// A .qrn file
    file: PathBuf,
    /// Texts to continue: what stands between lines that begin with `=== `, or each line of a file that has none
    #[arg(long, value_name = "FILE")]
    prompts: PathBuf,
    /// Prompts to take, the first of the file
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = positive)]
    count: usize,
    /// Most tokens of a prompt; the rest is left out, and with --chat the whole prompt
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = positive)]
    prompt_tokens: usize,
    /// Ask as a chat, by the model's template
    #[arg(long)]
    chat: bool,
    /// Tokens of an answer
    #[arg(short = 'n', long, value_name = "N", default_value_t = 50, value_parser = positive)]
    tokens: usize,
    /// What guesses [default: ngram and auto, and draft with --draft]
    #[arg(long, value_delimiter = ',')]
    methods: Vec<Speculation>,
    /// Guesses of a step; 0: as many as pay
    #[arg(short, value_delimiter = ',', default_value = "1,2,3,4,5,6,7,8,0")]
    k: Vec<usize>,
    /// Rounds over all prompts
    #[arg(short, long, default_value_t = 3, value_parser = positive)]
    rounds: usize,
    /// Draw speed against the number of guesses into this file
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// How to print
    #[arg(short, long, value_enum, default_value = "md")]
    output: Format,
    /// How the model is run; --speculate is not looked at.
    #[command(flatten)]
    engine: EngineArgs,
}

/// What one request took.
#[derive(Debug, Clone)]
struct Took {
    tokens: Vec<u32>,
    first: Duration,
    /// From the first token to the last.
    rest: Duration,
    counts: Counts,
}

/// A method and number of guesses, and its requests: `[prompt][round]`.
struct Row {
    speculation: Speculation,
    took: Vec<Vec<Took>>,
}

/// Runs the command.
pub fn main(args: SpecBenchArgs) -> Result<(), Box<dyn Error>> {
    let file = open(&args.file)?;
    let text =
        TextModel::of(&file)?.ok_or("the file has no tokenizer; convert it from a folder with tokenizer.json")?;
    let prompts = prompts(&args, &text)?;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0).saturating_add(args.tokens);
    if longest > file.spec().max_context {
        let most = file.spec().max_context;
        return Err(format!("prompt and answer have {longest} tokens, the model was made for at most {most}").into());
    }
    let small = match &args.engine.draft {
        Some(path) => Some(draft::open(path, &file)?),
        None => file.draft().cloned(),
    };
    let rows = rows(&args, small.as_deref())?;
    let options = EngineOptions { speculation: Speculation::OFF, context: longest, ..args.engine.options() };
    let mut engine = Engine::new(Arc::new(file), options)?;
    if let Some(small) = small {
        engine.with_draft(small, options)?;
    }
    let rows = measure(&mut engine, &prompts, rows, &args)?;
    let table: Vec<Line> = rows.iter().map(|row| Line::of(row, &rows[0])).collect();
    if let Some(path) = &args.plot {
        std::fs::write(path, plot(&table)).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    match args.output {
        Format::Json => print(&format!(
            "{}\n",
            serde_json::to_string_pretty(&json!(table.iter().map(Line::json).collect::<Vec<_>>()))?
        )),
        Format::Md => print(&markdown(&engine.describe(), prompts.len(), &args, &table)),
    }
}

/// The rows to measure, without guesses first.
fn rows(args: &SpecBenchArgs, small: Option<&ModelFile>) -> Result<Vec<Row>, Usage> {
    let usual = || {
        let writer = small.map(|file| Method::of(file.spec()));
        let names = [Some(Method::Ngram), writer, Some(Method::Auto)];
        names.into_iter().flatten().map(|method| Speculation { method, ..Speculation::OFF }).collect()
    };
    let methods = if args.methods.is_empty() { usual() } else { args.methods.clone() };
    if args.tokens < 2 {
        return Err(Usage("--tokens: expected at least 2, the first is the prompt's".into()));
    }
    if args.engine.accept == Accept::Rejection {
        return Err(Usage("--accept rejection gives other texts, and here they are compared: expected exact".into()));
    }
    if let Some(k) = args.k.iter().find(|&&k| k > MOST) {
        return Err(Usage(format!("-k {k}: expected 0 to {MOST} guesses")));
    }
    for &method in &methods {
        draft::fits(method, small).map_err(|reason| Usage(format!("--methods: {reason}")))?;
    }
    let mut all = vec![Speculation::OFF];
    for method in methods.into_iter().filter(|m| m.method != Method::Off) {
        match method.fixed {
            Some(_) => all.push(method),
            None => all.extend(args.k.iter().map(|&k| Speculation { fixed: (k > 0).then_some(k), ..method })),
        }
    }
    Ok(all.into_iter().map(|speculation| Row { speculation, took: vec![] }).collect())
}

/// The first prompts of the file, as tokens.
fn prompts(args: &SpecBenchArgs, text: &TextModel) -> Result<Vec<Vec<u32>>, Box<dyn Error>> {
    let shown = args.prompts.display();
    let bytes = read_whole(&args.prompts)?;
    let all = String::from_utf8(bytes).map_err(|e| format!("{shown}: expected UTF-8, {e}"))?;
    let mut prompts = vec![];
    for prompt in texts(&all).into_iter().take(args.count) {
        let mut tokens = match args.chat {
            true => text.conversation(&[Message::new("user", prompt)], None, &serde_json::Map::new())?,
            false => text.tokenizer().encode_with_bos(prompt)?,
        };
        if !args.chat {
            tokens.truncate(args.prompt_tokens);
        }
        prompts.push(tokens);
    }
    prompts.retain(|tokens| !tokens.is_empty() && tokens.len() <= args.prompt_tokens);
    if prompts.is_empty() {
        return Err(format!("{shown}: expected at least one prompt of at most {} tokens", args.prompt_tokens).into());
    }
    Ok(prompts)
}

/// What stands between lines with `=== `, or the lines.
fn texts(all: &str) -> Vec<&str> {
    let (mut marks, mut at) = (vec![], 0);
    for line in all.split_inclusive('\n') {
        if line.starts_with("=== ") {
            marks.push((at, at + line.len()));
        }
        at += line.len();
    }
    let ends = marks.iter().skip(1).map(|mark| mark.0).chain([all.len()]);
    let parts: Vec<&str> = match marks.is_empty() {
        false => marks.iter().zip(ends).map(|(mark, end)| &all[mark.1..end]).collect(),
        true => all.lines().collect(),
    };
    parts.into_iter().map(str::trim).filter(|text| !text.is_empty()).collect()
}

fn measure(
    engine: &mut Engine,
    prompts: &[Vec<u32>],
    mut rows: Vec<Row>,
    args: &SpecBenchArgs,
) -> Result<Vec<Row>, Box<dyn Error>> {
    let mut salt = 0;
    let mut ask = |engine: &mut Engine, prompt: &[u32], speculation| {
        salt += 1;
        ask(engine, prompt, args.tokens, speculation, salt)
    };
    ask(engine, &prompts[0], Speculation::OFF)?;
    for round in 0..args.rounds {
        for (i, prompt) in prompts.iter().enumerate() {
            let count = rows.len();
            for turn in 0..count {
                let row = &mut rows[(turn + i + round) % count];
                row.took.resize_with(prompts.len(), Vec::new);
                row.took[i].push(ask(engine, prompt, row.speculation)?);
            }
            let want = rows[0].took[i][0].tokens.clone();
            if let Some(row) = rows.iter().find(|row| row.took[i].last().is_some_and(|took| took.tokens != want)) {
                return Err(format!("prompt {}: {} gives another text than off: a bug", i + 1, row.speculation).into());
            }
        }
    }
    Ok(rows)
}

fn ask(
    engine: &mut Engine,
    prompt: &[u32],
    tokens: usize,
    speculation: Speculation,
    salt: u64,
) -> Result<Took, Box<dyn Error>> {
    let start = Instant::now();
    engine.add(Request {
        prompt: prompt.to_vec(),
        max_tokens: tokens,
        sampling: SamplingParams::greedy(),
        ignore_eos: true,
        cache_salt: Some(salt.to_string()),
        speculation: Some(speculation),
        ..Request::default()
    })?;
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

/// A row's numbers: medians over prompts of medians over rounds.
struct Line {
    speculation: Speculation,
    speed: f64,
    /// Against the same prompt without guesses: median, lowest, highest.
    gain: [f64; 3],
    first_ms: f64,
    /// Tokens of a step.
    length: f64,
    counts: Counts,
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
            speculation: row.speculation,
            speed: median(row.took.iter().map(of).collect()),
            gain: [median(gains.clone()), gains[0], gains[gains.len() - 1]],
            first_ms: median(row.took.iter().map(first).collect()),
            length: tokens as f64 / steps.max(1) as f64,
            counts,
        }
    }

    fn json(&self) -> serde_json::Value {
        json!({
            "speculate": self.speculation.to_string(), "tokens_per_second": self.speed, "gain": self.gain[0],
            "gain_lowest": self.gain[1], "gain_highest": self.gain[2], "first_token_ms": self.first_ms,
            "acceptance_length": self.length, "drafts": self.counts.drafts, "drafted": self.counts.drafted,
            "accepted": self.counts.accepted, "accepted_per_position": self.counts.accepted_at,
        })
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let n = values.len();
    (values[(n - 1) / 2] + values[n / 2]) / 2.0
}

fn markdown(device: &str, prompts: usize, args: &SpecBenchArgs, table: &[Line]) -> String {
    let (tokens, rounds) = (args.tokens, args.rounds);
    let mut s = format!("{device}; {prompts} prompts, {tokens} tokens each, {rounds} rounds in turns\n\n");
    s += "| guesses | tokens/s | against off (lowest to highest) | first token, ms | tokens a step | right of guessed | right at 1, 2, 3 ... of steps that guessed |\n";
    s += "|:--|--:|--:|--:|--:|--:|:--|\n";
    for line in table {
        let Counts { drafts, drafted, accepted, accepted_at } = line.counts;
        let at: Vec<String> = accepted_at
            .iter()
            .take_while(|&&count| count > 0)
            .map(|&count| format!("{:.2}", count as f64 / drafts as f64))
            .collect();
        let right = if drafted == 0 { String::new() } else { format!("{accepted} of {drafted}") };
        s += &format!(
            "| {} | {:.1} | {:.2} ({:.2} to {:.2}) | {:.1} | {:.2} | {right} | {} |\n",
            line.speculation,
            line.speed,
            line.gain[0],
            line.gain[1],
            line.gain[2],
            line.first_ms,
            line.length,
            at.join(" ")
        );
    }
    s + "\nMedians over the prompts; every text was the same as without guesses. Tokens per second are those after the first.\n"
}

/// Speed against the number of guesses, a line for each method, and the time to the first token beside.
fn plot(table: &[Line]) -> String {
    const COLORS: [&str; 6] = ["#1b6ca8", "#c8553d", "#2a9d55", "#8e5bb5", "#b08900", "#444444"];
    let (width, height, left, top) = (420.0, 300.0, 60.0, 40.0);
    let mut methods: Vec<Method> = vec![];
    for line in &table[1..] {
        if !methods.contains(&line.speculation.method) {
            methods.push(line.speculation.method);
        }
    }
    let most = table.iter().filter_map(|line| line.speculation.fixed).max().unwrap_or(1) as f64;
    let mut s = String::from(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 1060 420\" font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"1060\" height=\"420\" fill=\"white\"/>\n",
    );
    for (panel, title) in ["speed against no guesses", "time to the first token, ms"].into_iter().enumerate() {
        let value = |line: &Line| if panel == 0 { line.gain[0] } else { line.first_ms };
        let x0 = left + panel as f64 * 530.0;
        let highest = table.iter().map(&value).fold(1.0, f64::max) * 1.1;
        let x = |k: f64| x0 + (k - 1.0) / (most - 1.0).max(1.0) * width;
        let y = |value: f64| top + height * (1.0 - value / highest);
        s += &format!("<text x=\"{x0}\" y=\"24\" font-size=\"15\">{title}</text>\n");
        s += &format!(
            "<path d=\"M{x0} {top}V{b}H{r}\" fill=\"none\" stroke=\"#888\"/>\n",
            b = top + height,
            r = x0 + width
        );
        for tick in 0..=4 {
            let at = highest * f64::from(tick) / 4.0;
            s += &format!("<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{at:.1}</text>\n", x0 - 6.0, y(at) + 4.0);
        }
        for k in 1..=most as usize {
            s += &format!(
                "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{k}</text>\n",
                x(k as f64),
                top + height + 18.0
            );
        }
        let plain = y(value(&table[0]));
        s += &format!("<path d=\"M{x0} {plain:.1}H{}\" stroke=\"#888\" stroke-dasharray=\"4 4\"/>\n", x0 + width);
        for (i, method) in methods.iter().enumerate() {
            let color = COLORS[i % COLORS.len()];
            let of = |line: &&Line| line.speculation.method == *method;
            let points: Vec<String> = table
                .iter()
                .filter(of)
                .filter_map(|line| Some(format!("{:.1},{:.1}", x(line.speculation.fixed? as f64), y(value(line)))))
                .collect();
            s += &format!(
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"/>\n",
                points.join(" ")
            );
            let name = Speculation { method: *method, ..Speculation::OFF };
            let mut label = name.to_string();
            if let Some(line) = table.iter().filter(of).find(|line| line.speculation.fixed.is_none()) {
                label += &format!(" (as many as pay: {:.2})", value(line));
                let at = y(value(line));
                s += &format!("<circle cx=\"{}\" cy=\"{at:.1}\" r=\"4\" fill=\"{color}\"/>\n", x0 + width + 8.0);
            }
            s += &format!("<text x=\"{}\" y=\"{}\" fill=\"{color}\">{label}</text>\n", x0, 384.0 + 16.0 * i as f64);
        }
    }
    s + "<text x=\"530\" y=\"372\" text-anchor=\"middle\">guesses of a step</text>\n</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_told_apart() {
        assert_eq!(texts("a\n\n b \n"), ["a", "b"]);
        assert_eq!(texts("# head\n=== one\na\nb\n\n=== two\nc\n"), ["a\nb", "c"]);
        assert_eq!(texts("=== one"), [""; 0]);
        assert_eq!(texts("=== one\nif (a === b) {}\n=== two\nd"), ["if (a === b) {}", "d"]);
    }

    #[test]
    fn lines_are_medians() {
        let took = |first, rest, accepted| Took {
            tokens: vec![1; 11],
            first: Duration::from_millis(first),
            rest: Duration::from_millis(rest),
            counts: {
                let mut counts = Counts::default();
                counts.note(6, accepted);
                counts
            },
        };
        let row = |speculation, took| Row { speculation, took };
        let plain = row(Speculation::OFF, vec![vec![took(5, 100, 0); 3], vec![took(7, 200, 0); 3]]);
        let ngram: Speculation = "ngram:2".parse().unwrap();
        let fast = row(ngram, vec![vec![took(5, 50, 5), took(5, 25, 5), took(5, 90, 5)], vec![took(7, 200, 5)]]);
        let line = Line::of(&fast, &plain);
        assert_eq!(line.gain, [1.5, 1.0, 2.0]);
        assert_eq!((line.first_ms, line.speed), (6.0, 125.0));
        assert_eq!(line.length, 2.0, "half of the tokens were guessed");
        let picture = plot(&[Line::of(&plain, &plain), line]);
        assert!(picture.contains("polyline") && picture.ends_with("</svg>\n") && !picture.contains("NaN"));
    }
}
