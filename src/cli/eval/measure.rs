//! Running a model, and the reference beside it, over the windows of a text.
//!
//! Window by window, a few rows at a time: neither all logits of a text nor those of a window are ever in memory.
//! The modes of a file and the reference take turns on the same rows.

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

use quern_kernels::{
    cores::default_threads,
    cpu::{kv::BLOCK, kv::KvType},
    exec::{self, Activations, Chunk, ChunkOutput, Device, ExecError, ExecOptions, Executor, Mask, Output, Plan},
};
use quern_models::ModelFile;

use super::{
    Interrupted,
    saved::{Saved, Writer},
    score::{self, Score, score},
    task::Task,
};

/// What others are compared with.
#[derive(Debug)]
pub enum Reference {
    /// A model, in exact mode.
    Model(PathBuf, Arc<ModelFile>),
    /// Its predictions.
    Saved(Saved),
}

impl Reference {
    /// Tokens of the vocabulary.
    pub fn vocab(&self) -> usize {
        match self {
            Reference::Model(_, file) => file.spec().vocab,
            Reference::Saved(saved) => saved.vocab(),
        }
    }
}

/// A device, and how many layers it has if that is a GPU and not all are there.
pub type Place = (Device, Option<usize>);

/// One model in one mode.
pub struct Runner {
    executor: Box<dyn Executor>,
    blocks: Vec<u32>,
    /// For messages: file and mode.
    name: String,
}

impl Runner {
    /// Room for windows of `context` tokens.
    pub fn new(
        name: String,
        file: &Arc<ModelFile>,
        (device, gpu_layers): Place,
        (activations, kv): (Option<Activations>, KvType),
        context: usize,
        threads: usize,
    ) -> Result<Runner, ExecError> {
        let blocks = context.div_ceil(BLOCK);
        let options = ExecOptions { device, threads, blocks, activations, kv, rows: STEP, tree_blocks: 0, gpu_layers };
        let executor = exec::open(file.clone(), options, |_| {})?;
        Ok(Runner { executor, blocks: (0..blocks as u32).collect(), name })
    }

    /// Numeric mode and instruction set.
    pub fn describe(&self) -> String {
        self.executor.describe()
    }

    /// Computes the next tokens of a window.
    fn step(&mut self, tokens: &[u32], start: usize, output: Output<'_>) -> Result<Vec<f32>, ExecError> {
        let ticket = self.executor.submit(&Plan {
            chunks: vec![Chunk { tokens, start, blocks: &self.blocks, mask: Mask::Causal, output }],
        })?;
        match self.executor.collect(ticket)?.pop() {
            Some(ChunkOutput::Logits(logits)) => Ok(logits),
            _ => Ok(vec![]),
        }
    }
}

/// A reference that is ready.
enum Ready<'a> {
    Model(Box<Runner>),
    Saved(&'a mut Saved),
}

/// Where and how to run.
pub struct Setting<'a> {
    /// The text.
    pub task: &'a Task,
    /// Size of the vocabulary.
    pub vocab: usize,
    /// The device.
    pub place: Place,
    /// Threads; 0: as many as the executor takes.
    pub threads: usize,
    /// Set by Ctrl-C.
    pub interrupted: &'a AtomicBool,
}

/// Scores of each runner, one per scored row of the task.
///
/// `sink` takes the rows of the only runner.
pub fn measure(
    setting: &Setting<'_>,
    runners: &mut [Runner],
    reference: Option<&mut Reference>,
    mut sink: Option<&mut Writer>,
    progress: &mut Progress,
) -> Result<Vec<Vec<Score>>, Box<dyn Error>> {
    let Setting { task, vocab, place, threads, .. } = *setting;
    let cores = if threads == 0 { default_threads() } else { threads };
    let mut reference = match reference {
        None => None,
        Some(Reference::Saved(saved)) => Some(Ready::Saved(saved)),
        Some(Reference::Model(name, file)) => {
            let name = format!("{}, exact", name.display());
            Some(Ready::Model(Box::new(Runner::new(name, file, place, EXACT, task.protocol.context, threads)?)))
        }
    };
    let mut scores: Vec<Vec<Score>> = runners.iter().map(|_| Vec::with_capacity(task.rows())).collect();
    let most = (CHUNK_BYTES / (4 * vocab)).clamp(16, 256);
    let mut done = 0;
    for (number, window) in task.windows.iter().enumerate() {
        let (tokens, next) = task.window(window);
        for at in (0..window.first).step_by(STEP) {
            let part = &tokens[at..window.first.min(at + STEP)];
            let own = match &mut reference {
                Some(Ready::Model(runner)) => Some(&mut **runner),
                _ => None,
            };
            for runner in own.into_iter().chain(runners.iter_mut()) {
                setting.go_on()?;
                runner.step(part, at, Output::None)?;
            }
        }
        for at in (window.first..tokens.len()).step_by(most) {
            let rows = at..tokens.len().min(at + most);
            let (part, next) = (&tokens[rows.clone()], &next[rows]);
            let bad = |name: &str, row: usize| {
                let position = window.start + at + row;
                let help =
                    "the weights are damaged or overflow; `quern info FILE --verify` tells whether the file is whole";
                format!("{name}: the logits after token {position} of the text are not finite: {help}")
            };
            setting.go_on()?;
            let theirs = match &mut reference {
                None => None,
                Some(Ready::Saved(saved)) => {
                    let (logits, nll) = saved.rows(done, part.len())?;
                    Some((logits, Some(nll)))
                }
                Some(Ready::Model(runner)) => {
                    let logits = runner.step(part, at, Output::Logits { from: 0 })?;
                    if let Some(i) = logits.iter().position(|x| !x.is_finite()) {
                        return Err(bad(&runner.name, i / vocab).into());
                    }
                    Some((logits, None))
                }
            };
            let theirs = theirs.as_ref().map(|(logits, nll)| score::Reference { logits, nll: nll.as_deref() });
            for (runner, scores) in runners.iter_mut().zip(&mut scores) {
                setting.go_on()?;
                let logits = runner.step(part, at, Output::Logits { from: 0 })?;
                let new = score(&logits, next, theirs, cores).map_err(|row| bad(&runner.name, row))?;
                if let Some(sink) = sink.as_deref_mut() {
                    sink.push(&logits, new.iter().map(|s| s.nll))?;
                }
                scores.extend(new);
            }
            done += part.len();
            progress.show(number, task.windows.len(), done, task.rows(), &scores);
        }
    }
    Ok(scores)
}

/// Exact mode.
pub const EXACT: (Option<Activations>, KvType) = (Some(Activations::F32), KvType::F32);

/// Tokens of a step that needs no logits.
const STEP: usize = 256;

/// Bytes of logits of a step; a step has 16 rows or more, whatever they take.
const CHUNK_BYTES: usize = 32 << 20;

impl Setting<'_> {
    fn go_on(&self) -> Result<(), Interrupted> {
        if self.interrupted.load(Ordering::Relaxed) { Err(Interrupted) } else { Ok(()) }
    }
}

/// One line on a terminal, rewritten in place; nothing elsewhere.
pub struct Progress {
    terminal: bool,
    start: Instant,
    drawn: Option<Instant>,
    /// What is measured.
    pub what: String,
}

impl Progress {
    /// For one file.
    pub fn new(what: String) -> Progress {
        Progress { terminal: stderr().is_terminal(), start: Instant::now(), drawn: None, what }
    }

    fn show(&mut self, window: usize, windows: usize, done: usize, rows: usize, scores: &[Vec<Score>]) {
        if !self.terminal || self.drawn.is_some_and(|t| t.elapsed() < Duration::from_millis(100)) {
            return;
        }
        self.drawn = Some(Instant::now());
        let perplexity = |s: &Vec<Score>| {
            let sum: f64 = s.iter().map(|s| s.nll).sum();
            format!("{:.3}", (sum / s.len().max(1) as f64).exp())
        };
        let so_far = scores.iter().map(perplexity).collect::<Vec<_>>().join(", ");
        let spent = self.start.elapsed().as_secs_f64();
        let left = spent * (rows - done) as f64 / done.max(1) as f64;
        let text = format!("{}: window {}/{windows}, perplexity {so_far}, {left:.0} s left", self.what, window + 1);
        // A progress line that cannot be written is not worth failing for.
        let _ = write!(stderr(), "\r\x1b[K{text}");
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.drawn.is_some() {
            let _ = write!(stderr(), "\r\x1b[K");
        }
    }
}

/// The file's name without folder and ending.
pub fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}
