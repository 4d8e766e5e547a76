//! `quern run`: one answer, a chat in the terminal, or a file of prompts.
//!
//! Everything below works on any [`Generator`]; only [`main`] knows the real engine. Text goes to
//! stdout, everything about it (timings, notes) to stderr.

mod answer;
mod args;
mod batch;
mod chat;

use std::fmt::Display;
use std::io::{self, ErrorKind, IsTerminal, Read, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use quern_models::{FormatError, ModelFile};

use super::draft::Misfit;
use crate::engine::{Engine, EngineError, EngineOptions, Generator, OpenError};
use crate::text::{Message, PromptError, TextModel, printable};

pub use args::RunArgs;
use args::Settings;

/// Why `quern run` failed.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The model file.
    #[error("{}{source}", if matches!(source, FormatError::Io { .. }) { String::new() } else { format!("{}: ", path.display()) })]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: FormatError,
    },
    /// A checkpoint in place of a model file.
    #[error("{0}")]
    Checkpoint(String),
    /// The file can only be used by token ids.
    #[error("{}: the file has no tokenizer; convert the checkpoint again from a folder with tokenizer.json", path.display())]
    NoTokenizer {
        /// The file.
        path: PathBuf,
    },
    /// The engine could not be made.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A flag whose value makes no sense.
    #[error("{flag}: {reason}")]
    Flag {
        /// The flag.
        flag: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// A default of the file that makes no sense, and no flag replaces it.
    #[error("{}: the file's sampling defaults cannot be used: {reason}; give {flag}", path.display())]
    Defaults {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
        /// What helps.
        flag: String,
    },
    /// The prompt.
    #[error(transparent)]
    Prompt(#[from] PromptError),
    /// The prompt does not fit.
    #[error(
        "the prompt has {prompt} tokens and the context holds {context}, of which the answer needs at least 1; \
         the model was made for up to {most} tokens: {}",
        if context < most { "raise --ctx, or shorten the prompt" } else { "shorten the prompt" }
    )]
    ContextFull {
        /// Tokens in the prompt.
        prompt: usize,
        /// Tokens the engine has room for.
        context: usize,
        /// Tokens the model can use.
        most: usize,
    },
    /// The engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A file or stream that could not be read or written.
    #[error("{name}: {source}")]
    Io {
        /// Path, or stdin or stdout.
        name: String,
        /// What happened.
        source: io::Error,
    },
    /// An output file of something else.
    #[error("{}: line {line} is {}, expected a result of this command; give another --out", path.display(), printable(found))]
    OtherOutput {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What it is.
        found: String,
    },
    /// Rows of a file of prompts that could not be answered.
    #[error(
        "{answered} rows answered, {failed} of them with an error, {skipped} were there already; the same command tries \
         those with an error again"
    )]
    Rows {
        /// Rows that this run answered, or tried to.
        answered: usize,
        /// Those with an error.
        failed: usize,
        /// Rows that an earlier run had answered.
        skipped: usize,
    },
    /// Ctrl-C while answering one prompt.
    #[error("interrupted: the answer is not complete")]
    Cut,
    /// Ctrl-C while answering a file of prompts.
    #[error("interrupted: {done} rows were written in this run; the same command goes on with the rest")]
    Interrupted {
        /// Rows written.
        done: usize,
    },
}

/// A loaded model, ready to answer.
struct Session<'a, G> {
    engine: &'a mut G,
    text: &'a TextModel,
    settings: &'a Settings,
    /// Tokens the model was made for.
    most_context: usize,
    /// Set by Ctrl-C.
    interrupted: Arc<AtomicBool>,
    load: Duration,
    /// Numeric mode, instruction set and threads.
    device: String,
}

/// Runs the command.
pub fn main(args: RunArgs) -> Result<(), RunError> {
    let start = Instant::now();
    let file = ModelFile::open(&args.file).map_err(|source| match super::checkpoint(&args.file, &source) {
        Some(text) => RunError::Checkpoint(text),
        None => RunError::File { path: args.file.clone(), source },
    })?;
    if let Some(text) = super::not_a_model(&args.file, &file) {
        return Err(RunError::Checkpoint(text));
    }
    let generation = file.generation();
    let settings = Settings::new(&args, generation, file.spec().vocab)?;
    let text = TextModel::of(&file)?;
    let mut text = text.ok_or_else(|| RunError::NoTokenizer { path: args.file.clone() })?;
    if args.raw {
        text = text.raw();
    }
    let sequences = if args.batch.is_some() { batch::IN_FLIGHT } else { 1 };
    let small = super::draft::of(&args.engine, &file, false);
    let small = small.map_err(|Misfit { flag, reason }| RunError::Flag { flag, reason })?;
    let options = EngineOptions { sequences, ..args.engine.options() };
    let options = args.engine.fitting(&file, super::draft::with_trees(options, &file, small.as_deref()))?;
    let most_context = file.spec().max_context;
    let progress = super::upload::progress(file.file_len());
    let mut engine = Engine::open(Arc::new(file), options, progress)?;
    super::draft::give(&mut engine, small, &args.engine, options)?;
    let device = engine.describe();
    let session = Session {
        engine: &mut engine,
        text: &text,
        settings: &settings,
        most_context,
        interrupted: Arc::default(),
        load: start.elapsed(),
        device,
    };
    match run(session, &args) {
        // Whoever read the answer went away; there is nobody to tell.
        Err(RunError::Io { source, .. }) if source.kind() == ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

fn run<G: Generator>(mut session: Session<'_, G>, args: &RunArgs) -> Result<(), RunError> {
    if !session.text.chats() {
        if args.system.is_some() || !session.settings.template_args.is_empty() {
            let what = if args.system.is_some() { "--system" } else { "--template-arg" };
            return Err(PromptError::NoTemplate { what }.into());
        }
        if !args.raw && args.batch.is_none() {
            note("[the model has no chat template: it continues your text]");
        }
    }
    session.settings.notes.iter().for_each(|text| note(format_args!("[{text}]")));
    if let (Some(rows), Some(out)) = (&args.batch, &args.out) {
        catch_ctrl_c(&session.interrupted)?;
        return batch::run(&mut session, rows, out);
    }
    let prompt = prompt(args)?;
    // Not before: Ctrl-C ends a program that waits for stdin.
    catch_ctrl_c(&session.interrupted)?;
    match prompt {
        Some(prompt) => once(&mut session, &prompt, args.json, &mut io::stdout().lock()),
        None if args.json => Err(RunError::Flag {
            flag: "--json",
            reason: "needs a prompt: -p TEXT, -f FILE or text on stdin".to_string(),
        }),
        None => chat::run(&mut session, &mut chat::Terminal::new()?, &mut io::stdout().lock()),
    }
}

/// Answers one prompt.
fn once<G: Generator>(
    session: &mut Session<'_, G>,
    prompt: &str,
    json: bool,
    out: &mut dyn Write,
) -> Result<(), RunError> {
    if prompt.is_empty() {
        return Err(PromptError::Empty.into());
    }
    let tokens = if session.text.chats() {
        let mut messages: Vec<Message> = session.settings.system.iter().map(|s| Message::new("system", s)).collect();
        // A final line break belongs to the file or the shell, not to the message.
        messages.push(Message::new("user", prompt.strip_suffix('\n').unwrap_or(prompt)));
        session.text.conversation(&messages, None, &session.settings.template_args)?
    } else {
        session.text.continuation(prompt)?
    };
    if json {
        let answer = answer::answer(session, tokens, |_| Ok(()))?;
        line(out, &answer.to_json(session).to_string())?;
        return complete(&answer);
    }
    let answer = answer::answer(session, tokens, |piece| show(out, piece))?;
    if !answer.text.ends_with('\n') {
        show(out, "\n")?;
    }
    note(answer.summary(session, Some(session.load)));
    complete(&answer)
}

/// An answer that Ctrl-C cut short is shown, but it is no success.
fn complete(answer: &answer::Answer) -> Result<(), RunError> {
    if answer.end == answer::End::Interrupted { Err(RunError::Cut) } else { Ok(()) }
}

/// Where the prompt comes from: flags, a file, or stdin that is no terminal. `None`: chat.
fn prompt(args: &RunArgs) -> Result<Option<String>, RunError> {
    if let Some(prompt) = &args.prompt {
        return Ok(Some(prompt.clone()));
    }
    if let Some(path) = &args.prompt_file {
        let read = std::fs::read_to_string(path);
        return read.map(Some).map_err(|source| RunError::Io { name: path.display().to_string(), source });
    }
    if io::stdin().is_terminal() {
        return Ok(None);
    }
    let mut text = String::new();
    let read = io::stdin().lock().read_to_string(&mut text);
    read.map_err(|source| RunError::Io { name: "stdin".to_string(), source })?;
    Ok(Some(text))
}

/// Writes a line to stderr, if anybody reads it: a note that is lost must not end an answer.
pub(crate) fn note(text: impl Display) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Writes text for a reader who is watching.
fn show(out: &mut dyn Write, text: &str) -> Result<(), RunError> {
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|source| RunError::Io { name: "stdout".to_string(), source })
}

fn line(out: &mut dyn Write, text: &str) -> Result<(), RunError> {
    show(out, &format!("{text}\n"))
}

/// Ctrl-C sets the flag; where the flag is still set, it ends the program.
fn catch_ctrl_c(interrupted: &Arc<AtomicBool>) -> Result<(), RunError> {
    use signal_hook::{consts::SIGINT, flag};
    // In this order: the second Ctrl-C finds the flag that the first one left.
    flag::register_conditional_shutdown(SIGINT, 130, interrupted.clone())
        .and_then(|_| flag::register(SIGINT, interrupted.clone()))
        .map(drop)
        .map_err(|source| RunError::Io { name: "Ctrl-C handler".to_string(), source })
}

#[cfg(test)]
mod tests;
