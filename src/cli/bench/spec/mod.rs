//! `quern bench spec`: what guessing ahead gains on given prompts, by method, number of guesses, numeric mode and file.
//!
//! Every file in every mode (a [`Variant`]) is an engine of its own. Each answers every prompt once without guesses and
//! once with each method and number, in turns that begin elsewhere for each prompt, so that what the machine does
//! meanwhile hits all alike. Every request has a salt of its own: none finds what another has computed. Answers are
//! greedy, ignore the end of text and must be those of the same engine without guesses.

mod ask;
mod plot;
mod steps;
mod table;

use std::{
    error::Error,
    path::{Path, PathBuf},
    sync::Arc,
};

use clap::Args;
use quern_kernels::exec::{self, Device, Executor};
use quern_models::{ModelFile, Scheme, TensorInfo};

use super::super::{
    Activations, Format, Kv, PlaceArgs, Usage, draft, eval, open, positive, print, read_whole, threads,
};
use crate::{
    draft::{MOST, Method, Speculation},
    engine::{Engine, EngineOptions, OpenError},
    text::{Message, TextModel},
};
use ask::Row;
use steps::Steps;

/// Flags of `quern bench spec`.
#[derive(Debug, Args)]
#[command(after_help = "\
quern bench spec a.qrn --prompts p.txt                       methods and numbers of guesses
quern bench spec a.qrn --prompts p.txt --draft small.qrn --plot speed.svg
quern bench spec a.qrn --prompts p.txt --synthetic-acceptance-rate .5,.7,.9
quern bench spec a.qrn --prompts p.txt --modes int8,f32 --text t.txt
quern bench spec f16.qrn int4.qrn --prompts p.txt --text t.txt --against f16.qrn")]
pub struct SpecBenchArgs {
    /// A .qrn file, or several to compare
    #[arg(required = true)]
    file: Vec<PathBuf>,
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
    /// What guesses, also with a number or as a tree: eagle,eagle:4x16 [default: ngram, auto, and the small model or head;
    /// with --synthetic-acceptance-rate none]
    #[arg(long, value_delimiter = ',')]
    methods: Vec<Speculation>,
    /// Guesses of a step; 0: as many as pay
    #[arg(short, value_delimiter = ',', default_value = "1,2,3,4,5,6,7,8,0")]
    k: Vec<usize>,
    /// Measure without a method: guesses are taken from the answer, each of them right with this chance (0 to 1) if all
    /// before it are. The text stays the same
    #[arg(long, value_name = "RATE", value_delimiter = ',', value_parser = rate)]
    synthetic_acceptance_rate: Vec<f64>,
    /// Guess from the answers to the prompts before, too (suffix, auto), each method and number from its own of this round
    #[arg(long)]
    past: bool,
    /// Rounds over all prompts
    #[arg(short, long, default_value_t = 3, value_parser = positive)]
    rounds: usize,
    /// Activations of quantized weights to compare [default: int8 on the CPU, f16 on a GPU]
    #[arg(long, visible_alias = "activations", value_enum, value_delimiter = ',')]
    modes: Vec<Activations>,
    /// Rows of the steps that are timed: a step with K guesses has K + 1
    #[arg(long, value_name = "ROWS", value_delimiter = ',', default_value = "1,2,3,4,5,6,7,8", value_parser = positive)]
    step_rows: Vec<usize>,
    /// Text (UTF-8) for the perplexity of each file and mode and its KL divergence, as `quern eval` computes them
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// The KL divergence is that from this model in exact mode, or from predictions of `quern eval --save-logits`
    /// [default: each file from itself in exact mode]
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,
    /// Windows of 512 tokens of the text
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = positive)]
    chunks: usize,
    /// Draw speed against the number of guesses into this file
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// How to print
    #[arg(short, long, value_enum, default_value = "md")]
    output: Format,
    /// Where to run.
    #[command(flatten, next_help_heading = "Engine")]
    place: PlaceArgs,
    /// Threads [default: one per fast physical core that this process may use]
    #[arg(short, long, value_name = "N", value_parser = threads, help_heading = "Engine")]
    threads: Option<usize>,
    /// Keys and values
    #[arg(long, value_enum, default_value = "f16", help_heading = "Engine")]
    kv: Kv,
    /// A small model with the same tokens, or a head of this model, that guesses for it (a .qrn file) [default: the one in
    /// the file]
    #[arg(long, value_name = "FILE", help_heading = "Engine")]
    draft: Option<PathBuf>,
}

/// A file in a numeric mode.
struct Variant {
    /// The file's name without folder and ending.
    model: String,
    /// Size of the file.
    bytes: u64,
    /// Activations, `float` where no weights are quantized.
    mode: String,
    /// Numeric mode, instruction set and threads.
    describe: String,
    engine: Engine,
    vocab: usize,
    /// The prompts in its tokens.
    prompts: Vec<Vec<u32>>,
    steps: Steps,
    /// Perplexity and KL divergence, where a text was given.
    quality: Option<eval::Summary>,
}

impl Variant {
    /// File and mode.
    fn name(&self) -> String {
        format!("{}, {}", self.model, self.mode)
    }
}

/// Runs the command.
pub fn main(args: SpecBenchArgs) -> Result<(), Box<dyn Error>> {
    check(&args)?;
    let device = args.place.device();
    let files = args.file.iter().map(|path| Ok((path.as_path(), Arc::new(open(path)?))));
    let files = files.collect::<Result<Vec<_>, Box<dyn Error>>>()?;
    let prompts = prompts(&args, &files)?;
    let (mut ready, mut smalls) = (vec![], vec![]);
    for ((path, file), prompts) in files.iter().zip(&prompts) {
        let small = match &args.draft {
            Some(small) => Some(draft::open(small, file).map_err(|e| format!("--draft: {e}"))?),
            None => file.draft().cloned(),
        };
        smalls.push(small.clone());
        ready.extend(in_all_modes(path, file, prompts, small, device, &args)?);
    }
    let rows = rows(&args, ready.len(), &smalls)?;
    let steps = steps::measure(&mut ready, &args.step_rows)?;
    let variants = ready.into_iter().zip(steps).map(|(ready, steps)| ready.variant(steps));
    let mut variants = variants.collect::<Result<Vec<_>, _>>()?;
    let rows = ask::measure(&mut variants, rows, &args)?;
    let lines = table::lines(&rows);
    if let Some(path) = &args.plot {
        let names: Vec<String> = variants.iter().map(Variant::name).collect();
        std::fs::write(path, plot::plot(&names, &lines)).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    match args.output {
        Format::Json => print(&format!("{}\n", serde_json::to_string_pretty(&table::json(&variants, &lines))?)),
        Format::Md => print(&table::markdown(&variants, &lines, &args)),
    }
}

/// Refuses flags that contradict each other, before anything is opened.
fn check(args: &SpecBenchArgs) -> Result<(), Usage> {
    let refused = |reason: String| Err(Usage(reason));
    if args.tokens < 2 {
        return refused("--tokens: expected at least 2, the first is the prompt's".into());
    }
    if let Some(k) = args.k.iter().find(|&&k| k > MOST) {
        return refused(format!("-k {k}: expected 0 to {MOST} guesses"));
    }
    if let Some(rows) = args.step_rows.iter().find(|&&rows| rows > steps::MOST) {
        return refused(format!("--step-rows {rows}: expected 1 to {}", steps::MOST));
    }
    if !args.past && args.methods.iter().any(|m| m.method == Method::Suffix) {
        return refused("--methods suffix: without answers before it is ngram; give --past for those".into());
    }
    if let Some(i) = (1..args.modes.len()).find(|&i| args.modes[..i].contains(&args.modes[i])) {
        let name = exec::Activations::from(args.modes[i]).name();
        return refused(format!("--modes: {name} is there twice"));
    }
    Ok(())
}

/// A variant before its engine is made.
struct Ready<'a> {
    model: String,
    file: Arc<ModelFile>,
    mode: String,
    executor: Box<dyn Executor>,
    options: EngineOptions,
    small: Option<Arc<ModelFile>>,
    prompts: &'a [Vec<u32>],
    quality: Option<eval::Summary>,
}

/// A file in every mode that is asked for.
fn in_all_modes<'a>(
    path: &Path,
    file: &Arc<ModelFile>,
    prompts: &'a [Vec<u32>],
    small: Option<Arc<ModelFile>>,
    device: Device,
    args: &SpecBenchArgs,
) -> Result<Vec<Ready<'a>>, Box<dyn Error>> {
    let context = prompts.iter().map(Vec::len).max().unwrap_or(0).saturating_add(args.tokens);
    let most = file.spec().max_context;
    if context > most {
        let asked = format!("prompt and answer have {context} tokens");
        return Err(format!("{}: {asked}, it was made for at most {most}", path.display()).into());
    }
    let quantized = |tensor: &TensorInfo| !matches!(tensor.scheme, Scheme::Float(_) | Scheme::Order);
    let float = !file.tensors().iter().any(quantized);
    let modes: Vec<Option<Activations>> = match &args.modes[..] {
        // They are all one where no weights are quantized.
        modes if modes.is_empty() || float => vec![modes.first().copied()],
        modes => modes.iter().copied().map(Some).collect(),
    };
    // On two devices, what is usual differs.
    let usual = if args.place.gpu_layers.is_none() { exec::Activations::usual(device).name() } else { "default" };
    let mut ready = vec![];
    for (mode, quality) in modes.iter().zip(quality(path, &modes, device, args)?) {
        let options = EngineOptions {
            device,
            gpu_layers: args.place.gpu_layers,
            threads: args.threads.unwrap_or(0),
            context,
            // With no block to spare, the last guesses would find no room.
            cache_tokens: context + steps::MOST,
            activations: mode.map(Into::into),
            kv: args.kv.into(),
            speculation: Speculation::OFF,
            ..EngineOptions::default()
        };
        let options = draft::with_trees(options, file, small.as_deref());
        let executor = exec::open(file.clone(), options.exec(file.spec()), |_| {})?;
        let mode = mode.map_or(usual, |mode| exec::Activations::from(mode).name());
        let mode = if float { "float" } else { mode }.to_string();
        let (model, file, small) = (eval::stem(path), file.clone(), small.clone());
        ready.push(Ready { model, file, mode, executor, options, small, prompts, quality });
    }
    Ok(ready)
}

impl Ready<'_> {
    fn variant(self, steps: Steps) -> Result<Variant, OpenError> {
        let Ready { model, file, mode, executor, options, small, prompts, quality } = self;
        let (describe, bytes, vocab) = (executor.describe(), file.file_len(), file.spec().vocab);
        let mut engine = Engine::with_executor(file, executor, options);
        if let Some(small) = small {
            engine.with_draft(small, options)?;
        }
        let prompts = prompts.to_vec();
        Ok(Variant { model, bytes, mode, describe, engine, vocab, prompts, steps, quality })
    }
}

/// Perplexity and KL divergence of a file in each mode, where they are asked for.
fn quality(
    path: &Path,
    modes: &[Option<Activations>],
    device: Device,
    args: &SpecBenchArgs,
) -> Result<Vec<Option<eval::Summary>>, Box<dyn Error>> {
    if args.text.is_none() && args.against.is_none() {
        return Ok(vec![None; modes.len()]);
    }
    let numerics: Vec<_> = modes.iter().map(|mode| (mode.map(Into::into), args.kv.into())).collect();
    let of = eval::Beside {
        file: path,
        against: args.against.as_deref().unwrap_or(path),
        text: args.text.as_deref(),
        chunks: args.chunks,
        place: (device, args.place.gpu_layers),
        threads: args.threads,
    };
    Ok(eval::beside(&of, &numerics)?.into_iter().map(Some).collect())
}

/// The rows to measure of each variant, without guesses first; `smalls`: the small model or head of each file.
fn rows(args: &SpecBenchArgs, variants: usize, smalls: &[Option<Arc<ModelFile>>]) -> Result<Vec<Row>, Usage> {
    let usual = || {
        if !args.synthetic_acceptance_rate.is_empty() {
            return vec![];
        }
        // What all files have.
        let writers = smalls.iter().map(|file| file.as_ref().map(|file| Method::of(file.spec())));
        let writer = writers.reduce(|a, b| a.filter(|_| a == b)).flatten();
        let names = [Some(Method::Ngram), writer, Some(Method::Auto)];
        names.into_iter().flatten().map(|method| Speculation { method, ..Speculation::OFF }).collect()
    };
    let methods: Vec<Speculation> = if args.methods.is_empty() { usual() } else { args.methods.clone() };
    for (&method, small) in methods.iter().flat_map(|method| smalls.iter().map(move |small| (method, small))) {
        draft::fits(method, small.as_deref(), args.draft.is_some())
            .map_err(|reason| Usage(format!("--methods: {reason}")))?;
    }
    let numbers = |of: Speculation| args.k.iter().map(move |&k| Speculation { fixed: (k > 0).then_some(k), ..of });
    let mut all = vec![(Speculation::OFF, None)];
    for method in methods.into_iter().filter(|m| m.method != Method::Off) {
        match method.fixed {
            Some(_) => all.push((method, None)),
            None => all.extend(numbers(method).map(|of| (of, None))),
        }
    }
    // What the caller expects needs a method that guesses, and whose own work is small.
    let given = Speculation { method: Method::Ngram, ..Speculation::OFF };
    for &rate in &args.synthetic_acceptance_rate {
        all.extend(numbers(given).map(|of| (of, Some(rate))));
    }
    let of = |variant| all.iter().map(move |&(speculation, rate)| Row::new(variant, speculation, rate));
    Ok((0..variants).flat_map(of).collect())
}

/// The first prompts, in the tokens of each file: those that fit in all.
fn prompts(args: &SpecBenchArgs, files: &[(&Path, Arc<ModelFile>)]) -> Result<Vec<Vec<Vec<u32>>>, Box<dyn Error>> {
    let shown = args.prompts.display();
    let bytes = read_whole(&args.prompts)?;
    let all = String::from_utf8(bytes).map_err(|e| format!("{shown}: expected UTF-8, {e}"))?;
    let mut prompts: Vec<Vec<Vec<u32>>> = vec![];
    for (path, file) in files {
        let help = "no tokenizer in it; convert it from a folder with tokenizer.json";
        let text = TextModel::of(file)?.ok_or_else(|| format!("{}: {help}", path.display()))?;
        let tokens = |prompt| -> Result<Vec<u32>, Box<dyn Error>> {
            if args.chat {
                return Ok(text.conversation(&[Message::new("user", prompt)], None, &serde_json::Map::new())?);
            }
            let mut tokens = text.tokenizer().encode_with_bos(prompt)?;
            tokens.truncate(args.prompt_tokens);
            Ok(tokens)
        };
        prompts.push(texts(&all).into_iter().take(args.count).map(tokens).collect::<Result<_, _>>()?);
    }
    let count = prompts.first().map_or(0, Vec::len);
    let fits = |of: &Vec<Vec<u32>>, i: usize| (1..=args.prompt_tokens).contains(&of[i].len());
    let kept: Vec<bool> = (0..count).map(|i| prompts.iter().all(|of| fits(of, i))).collect();
    for of in &mut prompts {
        let mut kept = kept.iter();
        of.retain(|_| *kept.next().expect("as many as there are prompts"));
    }
    if prompts.first().is_none_or(Vec::is_empty) {
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

fn rate(text: &str) -> Result<f64, String> {
    let rate = text.parse().ok().filter(|rate| (0.0..=1.0).contains(rate));
    rate.ok_or_else(|| "expected a number from 0 to 1".into())
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
    fn rates_are_chances() {
        assert_eq!((rate("0"), rate(".7"), rate("1.0")), (Ok(0.0), Ok(0.7), Ok(1.0)));
        for bad in ["-0.1", "1.01", "70%", "nan", "inf", ""] {
            assert!(rate(bad).unwrap_err().contains("0 to 1"), "{bad}");
        }
    }
}
