//! The commands. Flags are declared here and in the commands' own files; what they do is elsewhere.

pub mod bench;
pub mod convert;
pub mod draft;
pub mod eval;
pub mod export;
pub mod info;
pub mod run;
pub mod serve;
pub mod upload;

use std::{
    error::Error,
    ffi::OsString,
    path::{Path, PathBuf},
};

use clap::{Args, Parser, Subcommand, ValueEnum};
use quern_kernels::{
    cpu::kv::KvType,
    cuda::CudaError,
    exec::{self, Device, ExecError},
};
use quern_models::{FormatError, ModelFile};

use crate::draft::{Accept, Speculation};
use crate::engine::{Engine, EngineOptions, OpenError};

/// Quantized language models in one file, run on a CPU or an NVIDIA GPU.
#[derive(Debug, Parser)]
#[command(
    name = "quern",
    version,
    max_term_width = 100,
    after_help = "Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted."
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Turn a checkpoint (GPTQ, AWQ, compressed-tensors, FP8, GGUF, float) into a .qrn file
    Convert(convert::ConvertArgs),
    /// Turn a .qrn file into a checkpoint for other programs (GPTQ, AWQ, float, GGUF)
    Export(export::ExportArgs),
    /// Answer a prompt, chat, or answer a file of prompts
    Run(run::RunArgs),
    /// Serve a model over HTTP, with OpenAI's interface
    Serve(serve::ServeArgs),
    /// Measure speed: prompts, generation, depth, batches
    Bench(bench::BenchArgs),
    /// Measure quality: perplexity of a text, distance from another model; write logits
    Eval(eval::EvalArgs),
    /// Show what a file holds, and check it
    Info(info::InfoArgs),
}

/// Activations of integer weights, as flags name them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Activations {
    /// Exact mode: weights are dequantized, nothing is rounded to integers
    F32,
    /// The CPU's default mode: one int8 scale per row and block of columns
    Int8,
    /// The GPU's default mode: half precision, a power of two per row
    F16,
}

impl From<Activations> for exec::Activations {
    fn from(a: Activations) -> exec::Activations {
        match a {
            Activations::F32 => exec::Activations::F32,
            Activations::Int8 => exec::Activations::Int8,
            Activations::F16 => exec::Activations::F16,
        }
    }
}

/// A device, as flags name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceFlag {
    /// The first GPU that can be used, else the CPU.
    Auto,
    /// This one.
    Given(Device),
}

impl std::str::FromStr for DeviceFlag {
    type Err = String;

    fn from_str(text: &str) -> Result<DeviceFlag, String> {
        match text {
            "auto" => Ok(DeviceFlag::Auto),
            _ => text.parse().map(DeviceFlag::Given).map_err(|e: String| e.replace("expected", "expected auto,")),
        }
    }
}

/// Flags about where a model runs.
#[derive(Debug, Clone, Copy, Args)]
pub struct PlaceArgs {
    /// Where to run: cpu, cuda, cuda:N or auto [default: auto, the first GPU that can be used, else the CPU]
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<DeviceFlag>,
    /// Layers on the GPU (also -ngl): the last N and the head, the others on the CPU; 0: all on the CPU [default: all]
    #[arg(long, value_name = "N", visible_alias = "n-gpu-layers")]
    pub gpu_layers: Option<usize>,
}

impl PlaceArgs {
    /// The device that is meant. Whoever gives the GPU layers wants one; with none of them it is the CPU.
    pub fn device(&self) -> Device {
        match (self.device, self.gpu_layers) {
            (_, Some(0)) => Device::Cpu,
            (Some(DeviceFlag::Given(device)), _) => device,
            // Where there is none, opening the first says why.
            (_, Some(_)) => match Device::auto() {
                (Device::Cpu, _) => Device::Cuda(0),
                (device, _) => device,
            },
            (flag, None) => device(flag),
        }
    }
}

/// The device that `--device auto` means, or nothing. Where a GPU cannot be used, stderr says why in one line; that
/// there is none is worth a line only to those who typed the flag.
fn device(flag: Option<DeviceFlag>) -> Device {
    let (device, error) = Device::auto();
    let expected = flag.is_none() && matches!(error, Some(CudaError::NoDriver | CudaError::NoDevice));
    if let Some(error) = error.filter(|_| !expected) {
        eprintln!("device: {device} ({})", one_line(&error.to_string()));
    }
    device
}

/// Keys and values, as flags name them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kv {
    /// Half precision
    F16,
    /// Single precision (exact mode)
    F32,
    /// Half the memory of f16: one scale per token and head
    Int8,
    /// The same as 8-bit floats (e4m3)
    Fp8,
}

impl From<Kv> for KvType {
    fn from(kv: Kv) -> KvType {
        match kv {
            Kv::F16 => KvType::F16,
            Kv::F32 => KvType::F32,
            Kv::Int8 => KvType::Int8,
            Kv::Fp8 => KvType::Fp8,
        }
    }
}

/// Flags of the commands that run an engine.
#[derive(Debug, Clone, Args)]
pub struct EngineArgs {
    /// Tokens the context holds, prompt and answer [default: the model's, at most 4096]
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true, help_heading = "Engine")]
    pub ctx: usize,
    /// Where to run.
    #[command(flatten, next_help_heading = "Engine")]
    pub place: PlaceArgs,
    /// Threads [default: one per fast physical core that this process may use]
    #[arg(short, long, value_name = "N", value_parser = threads, help_heading = "Engine")]
    pub threads: Option<usize>,
    /// Activations of quantized weights [default: int8 on the CPU, f16 on a GPU]
    #[arg(long, value_enum, help_heading = "Engine")]
    pub activations: Option<Activations>,
    /// Keys and values
    #[arg(long, value_enum, default_value = "f16", help_heading = "Engine")]
    pub kv: Kv,
    /// Guess tokens ahead, METHOD, METHOD:K or METHOD:KxN: off, ngram (the text's own repetitions), suffix (and earlier
    /// answers'), grammar (what it leaves no choice about), draft, eagle, mtp, medusa, dflash (the file of --draft, or what
    /// the model has), auto (what pays most). The text is the same in any case. K: always so many, instead of as many as
    /// pay; KxN, of a head: a tree of up to N guesses, at most K of them one behind the other
    #[arg(long, value_name = "METHOD", default_value = "auto", help_heading = "Engine")]
    pub speculate: Speculation,
    /// When a guess is right: exact, if it is what would have been chosen anyway (the text is the same as without), or
    /// rejection (Leviathan et al.: another text, of the same distribution, which depends on more than the seed; answers
    /// with a grammar stay exact)
    #[arg(long, value_name = "RULE", default_value = "exact", help_heading = "Engine")]
    pub accept: Accept,
    /// A small model with the same tokens, or a head of this model, that guesses for it (a .qrn file)
    #[arg(long, value_name = "FILE", help_heading = "Engine")]
    pub draft: Option<PathBuf>,
}

impl EngineArgs {
    /// The options, on the CPU if nobody insists on the GPU and the model does not fit it; stderr says so.
    pub fn fitting(&self, file: &ModelFile, options: EngineOptions) -> Result<EngineOptions, OpenError> {
        options.exec(file.spec()).check(file.spec())?;
        let insists = matches!(self.place.device, Some(DeviceFlag::Given(_))) || self.place.gpu_layers.is_some();
        let plan = (!insists && options.device != Device::Cpu).then(|| Engine::memory(file, &options));
        let Some(plan) = plan.filter(|plan| !plan.fits()) else {
            return Ok(options);
        };
        let fitting = plan.gpu_layers.map_or(String::new(), |n| format!("; --gpu-layers {n} would fit"));
        eprintln!("device: cpu ({plan}{fitting})");
        Ok(EngineOptions { device: Device::Cpu, ..options })
    }

    /// What they say to an engine.
    pub fn options(&self) -> EngineOptions {
        EngineOptions {
            device: self.place.device(),
            gpu_layers: self.place.gpu_layers,
            threads: self.threads.unwrap_or(0),
            context: self.ctx,
            activations: self.activations.map(Into::into),
            kv: self.kv.into(),
            speculation: Speculation { accept: self.accept, ..self.speculate },
            ..EngineOptions::default()
        }
    }
}

/// How rows of numbers are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// A table
    Md,
    /// A list of objects
    Json,
}

/// What was typed, with `-ngl` for `--gpu-layers`, as llama.cpp has it: a short flag of several letters.
pub fn arguments(typed: impl Iterator<Item = OsString>) -> Vec<OsString> {
    const SHORT: &str = "-ngl";
    let mut flags = true;
    let mut argument = |typed: OsString| {
        flags = flags && typed != "--";
        let rest = typed.to_str().filter(|_| flags).and_then(|text| text.strip_prefix(SHORT));
        match rest.filter(|rest| rest.is_empty() || rest.starts_with('=')) {
            Some(rest) => format!("--gpu-layers{rest}").into(),
            None => typed,
        }
    };
    typed.map(&mut argument).collect()
}

/// Runs the command that was typed.
pub fn main(cli: Cli) -> Result<(), Box<dyn Error>> {
    match cli.command {
        Command::Convert(args) => convert::main(args),
        Command::Export(args) => export::main(args),
        Command::Run(args) => run::main(args).map_err(Into::into),
        Command::Serve(args) => serve::main(args),
        Command::Bench(args) => bench::main(args),
        Command::Eval(args) => eval::main(args),
        Command::Info(args) => info::main(args),
    }
}

/// A command line that cannot be meant; exit status 2, as for one that cannot be parsed.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Usage(pub String);

/// Exit status of an error.
pub fn exit_code(error: &(dyn Error + 'static)) -> u8 {
    let exec = |error: &ExecError| matches!(error, ExecError::GpuLayers { .. });
    let flag = match error.downcast_ref() {
        Some(run::RunError::Open(OpenError::Exec(error))) => exec(error),
        Some(error) => matches!(error, run::RunError::Flag { .. } | run::RunError::Open(OpenError::Context { .. })),
        None => error.downcast_ref().is_some_and(exec),
    };
    let interrupted = matches!(error.downcast_ref(), Some(run::RunError::Cut | run::RunError::Interrupted { .. }))
        || error.is::<eval::Interrupted>()
        || matches!(error.downcast_ref(), Some(quern_convert::ConvertError::Interrupted));
    match (flag || error.is::<Usage>(), interrupted) {
        (true, _) => 2,
        (_, true) => 130,
        _ => 1,
    }
}

/// A message as one line of bounded length: names in it may come from a hostile file.
pub fn one_line(text: &str) -> String {
    const MOST: usize = 2000;
    let text = crate::text::printable(text);
    match text.char_indices().nth(MOST) {
        None => text,
        Some((end, _)) => format!("{} ... ({} bytes more)", &text[..end], text.len() - end),
    }
}

/// Most bytes of a text that is read whole.
const MOST_TEXT: u64 = 1 << 30;

/// The bytes of a file that the user named: a regular one, and not beyond a gigabyte.
fn read_whole(path: &Path) -> Result<Vec<u8>, String> {
    let shown = path.display();
    let about = std::fs::metadata(path).map_err(|e| format!("{shown}: {e}"))?;
    if !about.is_file() {
        return Err(format!("{shown}: expected a regular file, got something else"));
    }
    if about.len() > MOST_TEXT {
        return Err(format!("{shown}: expected at most {MOST_TEXT} bytes, got {}", about.len()));
    }
    std::fs::read(path).map_err(|e| format!("{shown}: {e}"))
}

/// Most threads that can be asked for.
const MAX_THREADS: usize = 1024;

fn threads(text: &str) -> Result<usize, String> {
    let n = text.parse().ok().filter(|n| (1..=MAX_THREADS).contains(n));
    n.ok_or_else(|| format!("expected a number of threads from 1 to {MAX_THREADS}"))
}

/// Most sequences of a benchmark.
const MAX_BATCH: usize = 4096;

fn batch(text: &str) -> Result<usize, String> {
    let n = text.parse().ok().filter(|n| (1..=MAX_BATCH).contains(n));
    n.ok_or_else(|| format!("expected a number of sequences from 1 to {MAX_BATCH}"))
}

/// Largest number of a flag that counts something: sums of some fit a usize.
const MAX_COUNT: usize = 1 << 40;

fn positive(text: &str) -> Result<usize, String> {
    let n = text.parse().ok().filter(|n| (1..=MAX_COUNT).contains(n));
    n.ok_or_else(|| format!("expected a whole number from 1 to {MAX_COUNT}"))
}

/// Opens a model file; the message names it once. A head is refused: it runs only beside its model.
pub fn open(path: &Path) -> Result<ModelFile, Box<dyn Error>> {
    let file = open_any(path)?;
    match not_a_model(path, &file) {
        Some(text) => Err(text.into()),
        None => Ok(file),
    }
}

/// Why a file is no model, if it is a head.
fn not_a_model(path: &Path, file: &ModelFile) -> Option<String> {
    let head = file.spec().draft_head.as_ref()?;
    let (shown, method) = (path.display(), head.method());
    Some(format!(
        "{shown}: expected a model, got a head ({method}), which guesses for its model: give the model, and --draft {shown} \
         beside it"
    ))
}

/// Opens a file of a model or a head.
pub fn open_any(path: &Path) -> Result<ModelFile, Box<dyn Error>> {
    ModelFile::open(path).map_err(|e| match (checkpoint(path, &e), &e) {
        (Some(text), _) => text.into(),
        (None, FormatError::Io { .. }) => e.into(),
        _ => format!("{}: {e}", path.display()).into(),
    })
}

/// What to do with a checkpoint that was taken for a model file, if that is the error's reason.
fn checkpoint(path: &Path, error: &FormatError) -> Option<String> {
    let what = match error {
        FormatError::Io { .. } if path.is_dir() => "a folder",
        FormatError::Magic { got } if got.starts_with(b"GGUF") => "a GGUF file",
        _ => return None,
    };
    let shown = path.display();
    Some(format!("{shown}: expected a .qrn file, got {what}; convert it first: quern convert {shown}"))
}

/// Writes to stdout; a reader that went away (`quern info | head`) ends the program quietly.
pub fn print(text: &str) -> Result<(), Box<dyn Error>> {
    use std::io::Write;
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        result => result.map_err(|e| format!("stdout: {e}").into()),
    }
}

/// `92.4 MB`, decimal units as disks have them.
pub fn size(bytes: u64) -> String {
    match bytes {
        0..1_000 => format!("{bytes} B"),
        1_000..1_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.2} GB", bytes as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_flag_of_several_letters() {
        let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        let typed = |text| arguments(words(text).into_iter());
        assert_eq!(typed("run m.qrn -ngl 5 -n 3"), words("run m.qrn --gpu-layers 5 -n 3"));
        assert_eq!(typed("run -ngl=5 m"), words("run --gpu-layers=5 m"));
        for other in ["run -ngl5 m", "run -n gl", "run -- -ngl", "run --ngl 5"] {
            assert_eq!(typed(other), words(other));
        }
    }

    #[test]
    fn counts_have_two_bounds() {
        assert_eq!((positive("1"), positive("1099511627776")), (Ok(1), Ok(1 << 40)));
        for bad in ["0", "-1", "1.5", "", "1099511627777", "1000000000000000000000"] {
            assert_eq!(positive(bad).unwrap_err(), "expected a whole number from 1 to 1099511627776", "{bad}");
        }
    }
}
