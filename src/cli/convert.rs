//! `quern convert`: flags, a progress line, the closing table. The work is `quern_convert`'s.

use std::{
    error::Error,
    io::{IsTerminal, Write, stderr},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use clap::{Args, ValueEnum};
use quern_convert::{
    ConvertError, Options, Phase, Progress, Quant, Report, Step, convert, convert_head, grouped, spec_of,
};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use quern_models::{ModelFile, ModelSpec, join, spec::Head};

use super::{Usage, draft, open, open_any, print, size};
use crate::text::TextModel;

/// Flags of `quern convert`.
#[derive(Debug, Args)]
#[command(
    after_help = "The codes and scales of quantized sources (GPTQ, AWQ, compressed-tensors, FP8, FP4, GGUF) are kept; \
--quant is for float weights. The file takes its name only after every element has been compared with the source."
)]
pub struct ConvertArgs {
    /// Model directory (config.json, *.safetensors), or a .safetensors or .gguf file
    source: PathBuf,
    /// Where to write: a file, or a directory to put NAME.qrn in [default: NAME.qrn]
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// What float weights become
    #[arg(long, value_enum, default_value = "keep")]
    quant: QuantArg,
    /// Columns that share a scale in --quant int4 (default 64) and int8 (default 128)
    ///
    /// A multiple of 32. Where it does not divide a tensor's columns, the largest of 128, 64 and 32
    /// below it that does is used, else the last group is partial.
    #[arg(long, value_name = "COLUMNS", value_parser = group)]
    group: Option<usize>,
    /// What float embeddings and output head become [default: int8 with --quant int4 or int8, else as --quant; keep for quantized sources]
    #[arg(long, value_enum)]
    lm_head: Option<QuantArg>,
    /// A small .qrn file with the same tokens, to be put into the new one and to write ahead of it (see run
    /// --speculate); SOURCE may then be a .qrn file, too
    #[arg(long, value_name = "FILE")]
    draft: Option<PathBuf>,
    /// A head of this model that guesses for it (EAGLE, EAGLE-3, Medusa, DFlash, MiMo's prediction layer): a directory,
    /// a .safetensors or a .qrn file, to be put into the new one instead of one that the source has; SOURCE may then be
    /// a .qrn file, too
    #[arg(long, value_name = "HEAD", conflicts_with = "draft")]
    head: Option<PathBuf>,
    /// What a head's float weights become; that changes how often it guesses right, never the text [default: int8, int4
    /// with --quant int4]
    #[arg(long, value_enum, value_name = "QUANT")]
    head_quant: Option<QuantArg>,
    /// SOURCE is a head of this .qrn file's model: make a file of its own, for --draft
    #[arg(long = "for", value_name = "MODEL", conflicts_with_all = ["draft", "head"])]
    model: Option<PathBuf>,
    /// Replace an existing file
    #[arg(long)]
    force: bool,
}

/// [`Quant`] as flags name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum QuantArg {
    /// As the source stores them
    Keep,
    /// Half precision
    F16,
    /// 8-bit integers, rounded to nearest
    Int8,
    /// 4-bit integers, rounded to nearest
    Int4,
}

impl From<QuantArg> for Quant {
    fn from(arg: QuantArg) -> Quant {
        match arg {
            QuantArg::Keep => Quant::Keep,
            QuantArg::F16 => Quant::F16,
            QuantArg::Int8 => Quant::Int8,
            QuantArg::Int4 => Quant::Int4,
        }
    }
}

fn group(text: &str) -> Result<usize, String> {
    let group: usize = text.parse().map_err(|_| "expected a number".to_string())?;
    if group == 0 || !group.is_multiple_of(32) || group > 1 << 16 {
        return Err("expected a multiple of 32 up to 65536".into());
    }
    Ok(group)
}

/// Runs the command.
pub fn main(args: ConvertArgs) -> Result<(), Box<dyn Error>> {
    let qrn = |path: &Path| path.extension().is_some_and(|e| e == "qrn");
    // A head may be a file already.
    let made = args.draft.as_deref().or(args.head.as_deref().filter(|path| qrn(path)));
    // Before the work, which takes minutes.
    let small = made.map(open_any).transpose()?;
    if let (Some(path), Some(small)) = (&args.head, &small)
        && small.spec().draft_head.is_none()
    {
        return Err(Usage(format!("--head {0}: a model, not a head; --draft {0} takes it", path.display())).into());
    }
    let options = Options {
        quant: args.quant.into(),
        group: args.group,
        lm_head: args.lm_head.map(Quant::from),
        head: args.head.clone().filter(|_| small.is_none()),
        head_quant: args.head_quant.map(Quant::from),
        force: args.force,
    };
    let (source, beside) = (&args.source, args.draft.is_some() || args.head.is_some());
    let flag = if args.draft.is_some() { "--draft" } else { "--head" };
    if beside && qrn(source) {
        let what = if args.draft.is_some() { "a draft model" } else { "a head" };
        let out = args.out.ok_or_else(|| Usage(format!("a .qrn file with {what} needs a new name: --out FILE")))?;
        if out.exists() && !args.force {
            return Err(format!("{}: the file exists; --force replaces it", out.display()).into());
        }
        let Some(head) = &options.head else {
            let small = small.as_ref().expect("what is not converted was opened");
            return joined(source, small, flag, &out);
        };
        let model = open(source)?;
        return behind(&with_line(|line| convert_head(head, &model, &out, true, &options, line))?);
    }
    let out = match args.out {
        Some(dir) if dir.is_dir() => dir.join(name(source)),
        Some(file) => file,
        None => name(source).into(),
    };
    if let Some(model) = &args.model {
        let model = open(model)?;
        return print(&closing(&with_line(|line| convert_head(source, &model, &out, false, &options, line))?));
    }
    // Of a head that is a file already; that of a checkpoint is planned with the model.
    if let Some(head) = small.as_ref().and_then(|small| small.spec().draft_head.as_ref()) {
        head.fits(&spec_of(source)?).map_err(|reason| format!("{flag}: {reason}"))?;
    }
    let report = with_line(|line| {
        let report = convert(source, &out, &options, line)?;
        line.clear();
        if let Some(reason) = text_trouble(&report.path) {
            line.note(&format!("the weights are fine, but `quern run` will refuse the text side: {reason}"));
        }
        Ok(report)
    })?;
    print(&closing(&report))?;
    match (&small, &report.head) {
        (Some(small), _) => {
            let without = |e| format!("{e}; {} has the model alone", report.path.display()).into();
            joined(&report.path, small, flag, &report.path).map_err(without)
        }
        (None, Some(head)) => behind(head),
        (None, None) => Ok(()),
    }
}

/// Runs a conversion with a progress line.
fn with_line(work: impl FnOnce(&mut Line) -> Result<Report, ConvertError>) -> Result<Report, Box<dyn Error>> {
    let mut line = Line::new()?;
    let result = work(&mut line);
    line.clear();
    Ok(result?)
}

/// Checks a file with a head that was converted, and says so.
fn behind(head: &Report) -> Result<(), Box<dyn Error>> {
    let (out, bytes) = (&head.path, head.file_bytes);
    let file = open(out)?;
    file.verify().map_err(|e| format!("{}: {e}", out.display()))?;
    print(&format!("{}\n", head.verified))?;
    print(&added(out, file.draft().map_or("a head", |head| kind(head.spec())), bytes))
}

fn added(out: &Path, what: &str, bytes: u64) -> String {
    format!("{}: with {what} of {}\n", out.display(), size(bytes))
}

/// What a file behind a model is.
fn kind(spec: &ModelSpec) -> &'static str {
    match spec.draft_head.as_ref().map(Head::method) {
        None => "a draft model",
        Some("eagle") => "a head (eagle)",
        Some("mtp") => "a head (mtp)",
        Some("medusa") => "a head (medusa)",
        Some("dflash") => "a head (dflash)",
        Some(_) => "a head",
    }
}

/// Puts a small model into a copy of a file, or into the file.
fn joined(model: &Path, small: &ModelFile, flag: &str, out: &Path) -> Result<(), Box<dyn Error>> {
    let file = open(model)?;
    draft::check(&file, small).map_err(|reason| format!("{flag}: {reason}"))?;
    // The new file may take the place of the old one, so damage is found before.
    file.verify().map_err(|e| format!("{}: {e}", model.display()))?;
    small.verify().map_err(|e| format!("{flag}: {e}"))?;
    join(&file, small, out).map_err(|e| e.to_string())?;
    open(out)?.verify().map_err(|e| format!("{}: {e}", out.display()))?;
    print(&added(out, kind(small.spec()), small.file_len()))
}

/// Why the file's tokenizer or chat template cannot be used, if so: better known now than on the box.
fn text_trouble(path: &Path) -> Option<String> {
    let file = open(path).ok()?;
    TextModel::of(&file).err().map(|e| e.to_string())
}

/// `NAME.qrn`, from the source's own name or, where that says nothing, its directory's.
fn name(source: &Path) -> String {
    let absolute = source.canonicalize().unwrap_or_else(|_| source.into());
    let own = |p: &Path| p.file_name().map(|n| n.to_string_lossy().into_owned());
    let mut name = own(source).or(own(&absolute)).unwrap_or_else(|| "model".into());
    if !absolute.is_dir() {
        let stem = [".safetensors.index.json", ".safetensors", ".gguf"].iter().find_map(|e| name.strip_suffix(e));
        name = stem.unwrap_or(&name).to_string();
        if name == "model" || name.starts_with("model-0") {
            name = absolute.parent().and_then(own).unwrap_or(name);
        }
    }
    name + ".qrn"
}

/// The closing table, one row per scheme.
pub(super) fn closing(report: &Report) -> String {
    let row = |scheme: &str, tensors: usize, weights: u64, bytes: u64| {
        // Orders of columns are no weights.
        let bits = if weights == 0 { String::new() } else { format!("{:.2}", bytes as f64 * 8.0 / weights as f64) };
        format!("{scheme:<24} {tensors:>8} {:>15} {:>10} {bits:>12}\n", grouped(weights), size(bytes))
    };
    let mut text =
        format!("{:<24} {:>8} {:>15} {:>10} {:>12}\n", "scheme", "tensors", "weights", "size", "bits/weight");
    for r in &report.rows {
        text += &row(&r.scheme, r.tensors, r.weights, r.bytes);
    }
    let tensors = report.rows.iter().map(|r| r.tensors).sum();
    text += &row("file", tensors, report.weights(), report.file_bytes);
    text += &format!("{}\n{} ({}) in {:.1} s\n", report.verified, report.path.display(), report.method, report.seconds);
    text
}

/// One line on a terminal, rewritten in place; nothing elsewhere but the notes.
pub(super) struct Line {
    /// Set by Ctrl-C, SIGTERM and a terminal that went away.
    interrupted: Arc<AtomicBool>,
    terminal: bool,
    phase: Option<(Phase, Instant)>,
    drawn: Option<Instant>,
}

impl Line {
    /// Says so to the work when a signal asks the program to end.
    pub(super) fn new() -> Result<Line, Box<dyn Error>> {
        let interrupted = Arc::new(AtomicBool::new(false));
        for signal in [SIGHUP, SIGINT, SIGTERM] {
            signal_hook::flag::register(signal, interrupted.clone()).map_err(|e| format!("signal handler: {e}"))?;
        }
        Ok(Line { interrupted, terminal: stderr().is_terminal(), phase: None, drawn: None })
    }

    pub(super) fn clear(&mut self) {
        if self.drawn.take().is_some() {
            // A progress line that cannot be written is not worth failing for.
            let _ = write!(stderr(), "\r\x1b[K");
        }
    }
}

impl Progress for Line {
    fn cancelled(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }

    fn note(&mut self, text: &str) {
        self.clear();
        let _ = writeln!(stderr(), "note: {}", super::one_line(text));
    }

    fn step(&mut self, step: &Step<'_>) {
        let now = Instant::now();
        let start = match self.phase {
            Some((phase, start)) if phase == step.phase => start,
            _ => self.phase.insert((step.phase, now)).1,
        };
        let last = step.tensors_done == step.tensors;
        let recent = self.drawn.is_some_and(|t| now - t < Duration::from_millis(100));
        if !self.terminal || recent && !last {
            return;
        }
        self.drawn = Some(now);
        let _ = write!(stderr(), "\r\x1b[K{}", line(step, now - start));
    }
}

fn line(step: &Step<'_>, spent: Duration) -> String {
    let verb = match step.phase {
        Phase::Write => "writing",
        Phase::Verify => "verifying",
    };
    let share = step.bytes_done as f64 / step.bytes.max(1) as f64;
    let left = spent.as_secs_f64() * (1.0 - share) / share.max(1e-9);
    let eta = if step.bytes_done == step.bytes { String::new() } else { format!(", {left:.0} s left") };
    let (done, all) = (size(step.bytes_done), size(step.bytes));
    format!(
        "{verb} {}/{} {:.0} % ({done} of {all}){eta}  {}",
        step.tensors_done,
        step.tensors,
        share * 100.0,
        step.tensor
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_are_named_after_the_model() {
        assert_eq!(name(Path::new("/nowhere/SmolLM2-135M.Q4_1.gguf")), "SmolLM2-135M.Q4_1.qrn");
        assert_eq!(name(Path::new("/nowhere/llama/model.safetensors")), "llama.qrn");
        assert_eq!(name(Path::new("/nowhere/llama/model-00001-of-00002.safetensors")), "llama.qrn");
        assert_eq!(name(Path::new("/nowhere/llama/gptq_model-4bit-128g.safetensors")), "gptq_model-4bit-128g.qrn");
    }

    #[test]
    fn the_progress_line_says_how_long() {
        let step = Step {
            phase: Phase::Write,
            tensor: "layers.3.down",
            tensors_done: 30,
            tensors: 272,
            bytes_done: 25_000_000,
            bytes: 100_000_000,
        };
        let text = line(&step, Duration::from_secs(2));
        assert_eq!(text, "writing 30/272 25 % (25.0 MB of 100.0 MB), 6 s left  layers.3.down");
    }
}
