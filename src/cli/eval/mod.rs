//! `quern eval`: how good a model is (perplexity of a text), how far from another (KL divergence, same top
//! token), and logits for comparison with other programs.

mod logits;
mod measure;
mod protocol;
mod saved;
mod score;
mod stats;
mod table;
mod task;

use std::{
    error::Error,
    fs::File,
    io::Read,
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicBool},
};

use clap::{Args, ValueEnum};
use quern_kernels::{
    cpu::kv::KvType,
    exec::{self, Device},
};
use quern_models::{ModelFile, format::MAGIC};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    flag,
};

use super::{Activations, Format, Kv, PlaceArgs, Usage, open, positive, print, threads};
use crate::text::Tokenizer;
pub use measure::stem;
use measure::{EXACT, Place, Progress, Reference, Runner, Setting, measure};
use protocol::{Kind, Protocol};
use saved::{Saved, Writer};
pub use stats::Summary;
use table::{About, Row};
use task::{Limits, Task, tokenizer};

/// Flags of `quern eval`.
#[derive(Debug, Args)]
#[command(after_help = "\
quern eval a.qrn b.qrn --text t.txt                      perplexity, both modes of both files
quern eval a.qrn --text t.txt --against float.qrn        and distance from another model, in exact mode
quern eval float.qrn --text t.txt --save-logits p.safetensors
quern eval a.qrn --against p.safetensors                 the same without that model
quern eval a.qrn --ids 1,2,3 --logits out.safetensors    logits of given tokens")]
pub struct EvalArgs {
    /// .qrn files
    #[arg(required = true)]
    file: Vec<PathBuf>,
    /// What is scored.
    #[command(flatten)]
    scope: Scope,
    /// Write the predictions of one file in one mode, exact if none is given: 2 bytes per scored token
    /// and token of the vocabulary
    #[arg(long, value_name = "OUT.safetensors")]
    save_logits: Option<PathBuf>,
    /// Numeric modes to measure side by side [default: exact,default]
    #[arg(long, value_enum, value_delimiter = ',', conflicts_with_all = ["activations", "kv"])]
    modes: Vec<Named>,
    /// How to print
    #[arg(short, long, value_enum, default_value = "md")]
    output: Format,
    /// Token ids, separated by commas, instead of a text; @FILE reads them from a file
    #[arg(long, value_name = "1,2,3", requires = "logits", conflicts_with_all = [
        "text", "protocol", "context", "stride", "chunks", "tokens", "against", "save_logits", "modes", "output",
    ])]
    ids: Option<String>,
    /// Where to write float32 logits [tokens, vocab] of --ids, as a safetensors file with one tensor "logits"
    #[arg(long, value_name = "OUT.safetensors", requires = "ids")]
    logits: Option<PathBuf>,
    /// Where to run.
    #[command(flatten)]
    place: PlaceArgs,
    /// Activations of quantized weights, instead of --modes [default: int8 on the CPU, f16 on a GPU]
    #[arg(long, value_enum)]
    activations: Option<Activations>,
    /// Keys and values, instead of --modes [default: f16]
    #[arg(long, value_enum)]
    kv: Option<Kv>,
    /// Threads [default: one per fast physical core that this process may use]
    #[arg(short, long, value_parser = threads)]
    threads: Option<usize>,
}

/// Flags of what is scored, and against what.
#[derive(Debug, Clone, Default, Args)]
struct Scope {
    /// Text to score (UTF-8)
    #[arg(long, value_name = "FILE", required_unless_present_any = ["ids", "against"])]
    text: Option<PathBuf>,
    /// How the text is cut into windows [default: llama.cpp, or that of --against]
    #[arg(long, value_enum)]
    protocol: Option<Kind>,
    /// Tokens of a window [default: llama.cpp 512, strided 2048, at most what the model was made for]
    #[arg(short, long, value_name = "N", value_parser = positive)]
    context: Option<usize>,
    /// Tokens from window to window, with --protocol strided [default: half a window]
    #[arg(long, value_name = "N", value_parser = positive)]
    stride: Option<usize>,
    /// Only the first windows
    #[arg(long, value_name = "N", value_parser = positive)]
    chunks: Option<usize>,
    /// Only the first tokens of the text
    #[arg(long, value_name = "N", value_parser = positive)]
    tokens: Option<usize>,
    /// Also the distance from this model in exact mode, or from what --save-logits wrote
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,
}

/// A numeric mode by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Named {
    /// Nothing is rounded: f32 activations, f32 keys and values
    Exact,
    /// As the other commands run: int8 activations (f16 on a GPU), f16 keys and values
    Default,
}

/// Ctrl-C.
#[derive(Debug, thiserror::Error)]
#[error("interrupted: what is not in the table was not measured; --chunks N takes less time")]
pub struct Interrupted;

/// A numeric mode and its name in the table.
type Numerics = (String, (Option<exec::Activations>, KvType));

/// Runs the command.
pub fn main(args: EvalArgs) -> Result<(), Box<dyn Error>> {
    let kv = args.kv.unwrap_or(Kv::F16);
    let (device, gpu_layers) = (args.place.device(), args.place.gpu_layers);
    if let (Some(ids), Some(out)) = (&args.ids, &args.logits) {
        let [file] = &args.file[..] else {
            return Err(Usage(format!("--ids: expected one file, got {}", args.file.len())).into());
        };
        return logits::main(file, ids, out, (device, gpu_layers), args.activations, kv, args.threads);
    }
    let modes = modes(&args, device, kv)?;
    if let Some(out) = &args.save_logits {
        check_output(out, &args, modes.len())?;
    }
    let files = args.file.iter().map(|path| Ok((path.as_path(), Arc::new(open(path)?))));
    let files = files.collect::<Result<Vec<_>, Box<dyn Error>>>()?;
    let text = args.scope.text.as_deref().map(read_text).transpose()?;
    let mut reference = args.scope.against.as_deref().map(reference).transpose()?;
    let most = files.iter().map(|(path, file)| (*path, file.spec().max_context));
    let theirs = reference.iter().filter_map(|r| match r {
        Reference::Model(path, file) => Some((path.as_path(), file.spec().max_context)),
        Reference::Saved(_) => None,
    });
    let most = most.chain(theirs);
    let (shortest, most) = most.min_by_key(|&(_, tokens)| tokens).expect("clap asks for a file");
    let protocol = protocol(&args.scope, reference.as_ref(), (shortest, most))?;
    let common = common(&args.scope, reference.as_ref(), text.as_deref(), protocol)?;
    let interrupted = Arc::new(AtomicBool::new(false));
    // In this order: the second Ctrl-C finds the flag that the first one left.
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        flag::register_conditional_shutdown(signal, 130, interrupted.clone())
            .and_then(|_| flag::register(signal, interrupted.clone()))
            .map_err(|e| format!("signal handler: {e}"))?;
    }
    let run = Run {
        scope: &args.scope,
        files: args.file.len(),
        save_logits: args.save_logits.as_deref(),
        modes: &modes,
        protocol,
        common,
        text: text.as_deref(),
        place: (device, gpu_layers),
        threads: args.threads.unwrap_or(0),
        interrupted: &interrupted,
    };
    let (mut rows, mut tokens, mut one_tokenization) = (vec![], None, true);
    let result = files.iter().enumerate().try_for_each(|(i, (path, file))| {
        let task = run.task(path, file, reference.as_ref())?;
        rows.extend(run.file(i, path, file, &task, reference.as_mut())?);
        one_tokenization &= *tokens.get_or_insert_with(|| task.tokens.clone()) == task.tokens;
        Ok(())
    });
    // What is complete is shown even if the next file failed.
    if !rows.is_empty() {
        let about = run.about(reference.as_ref(), one_tokenization);
        print(&match args.output {
            Format::Md => table::markdown(&about, &rows),
            Format::Json => format!("{}\n", serde_json::to_string_pretty(&table::json(&about, &rows))?),
        })?;
    }
    result
}

/// One file, and what it is compared with.
pub struct Beside<'a> {
    /// The file.
    pub file: &'a Path,
    /// A model, which runs in exact mode, or saved predictions.
    pub against: &'a Path,
    /// The text; none with saved predictions.
    pub text: Option<&'a Path>,
    /// Windows of the text, by llama.cpp's protocol.
    pub chunks: usize,
    /// Where to run.
    pub place: Place,
    /// Threads.
    pub threads: Option<usize>,
}

/// Perplexity of a file in each numeric mode, and the distance of its predictions, for other commands.
pub fn beside(of: &Beside<'_>, modes: &[(Option<exec::Activations>, KvType)]) -> Result<Vec<Summary>, Box<dyn Error>> {
    let scope = Scope {
        text: of.text.map(PathBuf::from),
        chunks: Some(of.chunks),
        against: Some(of.against.into()),
        ..Scope::default()
    };
    let named = |&numerics: &(Option<exec::Activations>, KvType)| {
        (numerics.0.map_or("default", exec::Activations::name).to_string(), numerics)
    };
    let modes: Vec<Numerics> = modes.iter().map(named).collect();
    let file = Arc::new(open(of.file)?);
    let text = of.text.map(read_text).transpose()?;
    let mut reference = reference(of.against)?;
    let most = match &reference {
        Reference::Model(path, other) if other.spec().max_context < file.spec().max_context => {
            (path.as_path(), other.spec().max_context)
        }
        _ => (of.file, file.spec().max_context),
    };
    let protocol = protocol(&scope, Some(&reference), most)?;
    let common = common(&scope, Some(&reference), text.as_deref(), protocol)?;
    let interrupted = AtomicBool::new(false);
    let run = Run {
        scope: &scope,
        files: 1,
        save_logits: None,
        modes: &modes,
        protocol,
        common,
        text: text.as_deref(),
        place: of.place,
        threads: of.threads.unwrap_or(0),
        interrupted: &interrupted,
    };
    let task = run.task(of.file, &file, Some(&reference))?;
    let rows = run.file(0, of.file, &file, &task, Some(&mut reference))?;
    Ok(rows.into_iter().map(|row| row.summary).collect())
}

/// What is the same for every file.
struct Run<'a> {
    scope: &'a Scope,
    /// How many files there are.
    files: usize,
    save_logits: Option<&'a Path>,
    modes: &'a [Numerics],
    protocol: Protocol,
    /// The reference's tokens, if there is one.
    common: Option<Task>,
    text: Option<&'a str>,
    place: Place,
    /// 0: as many as are usual.
    threads: usize,
    interrupted: &'a AtomicBool,
}

impl Run<'_> {
    /// Measures one file in every mode.
    fn file(
        &self,
        index: usize,
        path: &Path,
        file: &Arc<ModelFile>,
        task: &Task,
        reference: Option<&mut Reference>,
    ) -> Result<Vec<Row>, Box<dyn Error>> {
        let vocab = file.spec().vocab;
        let (name, threads) = (stem(path), self.threads);
        let runner = |(mode, numerics): &Numerics| {
            Runner::new(
                format!("{}, {mode}", path.display()),
                file,
                self.place,
                *numerics,
                self.protocol.context,
                threads,
            )
        };
        let mut runners = self.modes.iter().map(runner).collect::<Result<Vec<_>, _>>()?;
        let mut sink = match self.save_logits {
            Some(out) => Some(Writer::create(out, task, vocab, &name, &self.modes[0].0)?),
            None => None,
        };
        let setting = Setting { task, vocab, place: self.place, threads, interrupted: self.interrupted };
        let count = self.files;
        let what = if count > 1 { format!("{name} ({} of {count})", index + 1) } else { name.clone() };
        let mut progress = Progress::new(what);
        let scores = measure(&setting, &mut runners, reference, sink.as_mut(), &mut progress);
        drop(progress);
        let scores = scores?;
        if let Some(sink) = sink {
            sink.finish()?;
        }
        let row = |(((mode, _), runner), scores): ((&Numerics, &Runner), &Vec<_>)| Row {
            model: name.clone(),
            bytes: file.file_len(),
            mode: mode.clone(),
            describe: runner.describe(),
            windows: task.windows.len(),
            summary: Summary::new(scores),
        };
        Ok(self.modes.iter().zip(&runners).zip(&scores).map(row).collect())
    }

    /// What is scored: the reference's tokens, which must mean the same to the file, or the file's own.
    fn task(&self, path: &Path, file: &ModelFile, reference: Option<&Reference>) -> Result<Task, Box<dyn Error>> {
        let own = tokenizer(path, file)?;
        let vocab = file.spec().vocab;
        let (Some(common), Some(reference)) = (&self.common, reference) else {
            return own_task(self.scope, &own, self.text, self.protocol, (path, vocab));
        };
        let help = "KL divergence needs models of one vocabulary";
        if vocab != reference.vocab() {
            let (path, theirs) = (path.display(), reference.vocab());
            return Err(format!("{path}: the vocabulary has {vocab} tokens, the reference's {theirs}; {help}").into());
        }
        if common.bytes(&own) != common.text {
            let path = path.display();
            return Err(format!("{path}: the reference's tokens are another text in this vocabulary; {help}").into());
        }
        let mut task = common.clone();
        task.windows.truncate(self.scope.chunks.unwrap_or(usize::MAX));
        Ok(task)
    }

    fn about(&self, reference: Option<&Reference>, one_tokenization: bool) -> About {
        let name = self.scope.text.as_ref().or(self.scope.against.as_ref());
        About {
            text: name.map_or_else(String::new, |p| p.file_name().unwrap_or(p.as_os_str()).to_string_lossy().into()),
            protocol: self.protocol,
            reference: reference.map(|r| match r {
                Reference::Model(path, _) => (stem(path), "exact".into()),
                Reference::Saved(saved) => (saved.model.clone(), saved.mode.clone()),
            }),
            one_tokenization,
        }
    }
}

/// The modes that flags ask for.
fn modes(args: &EvalArgs, device: Device, kv: Kv) -> Result<Vec<Numerics>, Box<dyn Error>> {
    let named = |mode: Named| match mode {
        Named::Exact => ("exact".to_string(), EXACT),
        Named::Default => ("default".to_string(), (None, KvType::F16)),
    };
    if args.activations.is_some() || args.kv.is_some() {
        let usual = exec::Activations::usual(device);
        // On two devices, what is usual differs.
        let unsaid = if args.place.gpu_layers.is_none() { Some(usual) } else { None };
        let activations = args.activations.map(Into::into).or(unsaid);
        let name = match (activations, kv) {
            (Some(exec::Activations::F32), Kv::F32) => "exact".to_string(),
            (a, Kv::F16) if a.is_none_or(|a| a == usual) => "default".to_string(),
            (a, kv) => format!("{}, {} KV", a.map_or("default", exec::Activations::name), KvType::from(kv).name()),
        };
        return Ok(vec![(name, (activations, kv.into()))]);
    }
    let all = if args.save_logits.is_some() { &[Named::Exact][..] } else { &[Named::Exact, Named::Default] };
    let asked = if args.modes.is_empty() { all } else { &args.modes };
    let twice = (1..asked.len()).find(|&i| asked[..i].contains(&asked[i]));
    match twice {
        Some(i) => Err(Usage(format!("--modes: {} is there twice", named(asked[i]).0)).into()),
        None => Ok(asked.iter().copied().map(named).collect()),
    }
}

/// `--save-logits` writes one row of the table, and over nothing that is read.
fn check_output(out: &Path, args: &EvalArgs, modes: usize) -> Result<(), Usage> {
    let flag = "--save-logits";
    if args.file.len() != 1 || modes != 1 {
        let got = format!("{} files in {modes} modes", args.file.len());
        return Err(Usage(format!("{flag}: expected one file in one mode, got {got}; give --modes exact")));
    }
    let same = |path: &&PathBuf| out.canonicalize().is_ok_and(|out| path.canonicalize().is_ok_and(|p| p == out));
    match args.file.iter().chain(&args.scope.text).chain(&args.scope.against).find(same) {
        Some(path) => Err(Usage(format!("{flag}: {} is read by this command; give another name", path.display()))),
        None => Ok(()),
    }
}

fn read_text(path: &Path) -> Result<String, Box<dyn Error>> {
    let bytes = super::read_whole(path)?;
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        format!("{}: not UTF-8 text: byte {at} begins no character; convert it to UTF-8", path.display()).into()
    })
}

/// Opens what others are compared with, a model or predictions.
fn reference(path: &Path) -> Result<Reference, Box<dyn Error>> {
    let mut start = [0; MAGIC.len()];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut start));
    if read.is_ok() && start == MAGIC {
        return Ok(Reference::Model(path.into(), Arc::new(open(path)?)));
    }
    Ok(Reference::Saved(Saved::open(path)?))
}

/// The protocol: that of saved predictions, or what flags say. `most`: which file holds how few tokens.
fn protocol(args: &Scope, reference: Option<&Reference>, most: (&Path, usize)) -> Result<Protocol, Box<dyn Error>> {
    let (path, most) = (most.0.display(), most.1);
    let saved = match reference {
        Some(Reference::Saved(saved)) => Some(saved.task.protocol),
        _ => None,
    };
    let protocol = match saved {
        Some(p) => {
            let differs = args.protocol.is_some_and(|kind| kind != p.kind)
                || args.context.is_some_and(|context| context != p.context)
                || args.stride.is_some_and(|stride| stride != p.stride);
            if differs {
                let help = "leave out --protocol, --context and --stride, or save again with them";
                return Err(Usage(format!("--against: the predictions were saved with the {p}; {help}")).into());
            }
            if args.tokens.is_some() {
                let help = "give --chunks N instead";
                return Err(Usage(format!("--tokens: saved predictions have their own; {help}")).into());
            }
            p
        }
        None => {
            let kind = args.protocol.unwrap_or(Kind::LlamaCpp);
            let usual = match kind {
                Kind::LlamaCpp => 512,
                Kind::Strided => 2048,
            };
            Protocol::new(kind, args.context.unwrap_or(most.min(usual)), args.stride).map_err(Usage)?
        }
    };
    if protocol.context > most {
        let asked = protocol.context;
        return Err(Usage(format!("windows of {asked} tokens: {path} was made for at most {most}")).into());
    }
    Ok(protocol)
}

/// The reference's tokens: those it was saved with, or those of its tokenizer.
fn common(
    args: &Scope,
    reference: Option<&Reference>,
    text: Option<&str>,
    protocol: Protocol,
) -> Result<Option<Task>, Box<dyn Error>> {
    match reference {
        None => Ok(None),
        Some(Reference::Model(path, file)) => {
            let task = own_task(args, &tokenizer(path, file)?, text, protocol, (path, file.spec().vocab));
            task.map(Some)
        }
        Some(Reference::Saved(saved)) => {
            if args.text.is_some() {
                let help = "leave out --text, or save the predictions of this text";
                return Err(Usage(format!("--text: saved predictions have their own; {help}")).into());
            }
            Ok(Some(saved.task.clone()))
        }
    }
}

/// The text as a file's tokenizer has it; `of`: the file and the size of its vocabulary.
fn own_task(
    args: &Scope,
    tokenizer: &Tokenizer,
    text: Option<&str>,
    protocol: Protocol,
    of: (&Path, usize),
) -> Result<Task, Box<dyn Error>> {
    let (Some(name), Some(text)) = (&args.text, text) else {
        return Err(Usage("--against with a model needs a text: give --text FILE".into()).into());
    };
    let task = Task::new(tokenizer, text, name, protocol, Limits { tokens: args.tokens, chunks: args.chunks })?;
    let (path, vocab) = (of.0.display(), of.1);
    match task.tokens.iter().chain(&task.bos).find(|&&id| id as usize >= vocab) {
        Some(id) => {
            let got = format!("the tokenizer gives token {id}, the model has {vocab}");
            Err(format!("{path}: {got}; the file holds the tokenizer of another model: convert it again").into())
        }
        None => Ok(task),
    }
}
