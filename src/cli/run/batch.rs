//! `--batch`: a file of prompts in, a file of answers out, one JSON object a line.
//!
//! Answers are appended as they are finished and carry the row's `id` (or line number), so a run
//! that was cut short goes on where it stopped. A row that cannot be answered becomes an error
//! object; it never ends the run, but the run then fails, and the next one tries the row again: of
//! several lines for one row the last one counts.

mod row;

use std::collections::{HashMap, HashSet};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::path::Path;
use std::sync::atomic::Ordering;

use serde_json::{Value, json};

use super::answer::{Running, request};
use super::{RunError, Session, Settings, note};
use crate::engine::{Event, Generator};
use row::Row;

/// Rows that are answered at once.
pub(super) const IN_FLIGHT: usize = 16;

/// Answers every row of `rows` that `out` does not have yet.
pub(super) fn run<G: Generator>(session: &mut Session<'_, G>, rows: &Path, out: &Path) -> Result<(), RunError> {
    // First: where there is nothing to read, there is no output to make.
    let input = File::open(rows).map_err(|source| io(rows, source))?;
    if input.metadata().is_ok_and(|input| input.is_dir()) {
        return Err(io(rows, ErrorKind::IsADirectory.into()));
    }
    let Output { mut file, done, errors } = Output::open(out)?;
    let mut seen = HashMap::new();
    let mut skipped = 0;
    let mut lines = BufReader::new(input).split(b'\n').enumerate();
    let mut running: HashMap<u64, (Key, Running)> = HashMap::new();
    let (mut written, mut same, mut failed) = (0, 0, 0);
    let mut write = |key: &Key, result: Value| -> Result<(), RunError> {
        if let Some(error) = result.get("error") {
            failed += 1;
            if errors.get(&key.name()) == Some(error) {
                same += 1; // nothing new to say
                return Ok(());
            }
        }
        written += 1;
        let line = format!("{}\n", key.add_to(result));
        file.write_all(line.as_bytes()).and_then(|()| file.flush()).map_err(|source| io(out, source))
    };
    let mut events = Vec::new();
    let mut left = true;
    loop {
        while left && running.len() < IN_FLIGHT {
            let Some((index, line)) = lines.next() else {
                left = false;
                break;
            };
            let line = line.map_err(|source| io(rows, source))?;
            let mark = if index == 0 { BYTE_ORDER_MARK } else { b"" };
            let line = line.strip_prefix(mark).unwrap_or(&line);
            if line.trim_ascii().is_empty() {
                continue;
            }
            let (key, row) = row::parse(line, index + 1);
            if let Some(&first) = seen.get(&key.name()) {
                write(&key.repeated(), error(format!("{} was used on line {first}", key.name())))?;
                continue;
            }
            seen.insert(key.name(), index + 1);
            if done.contains(&key.name()) {
                skipped += 1;
                continue;
            }
            match row.and_then(|row| start(session, row, index)) {
                Ok((request, row)) => drop(running.insert(request, (key, row))),
                Err(reason) => write(&key, error(reason))?,
            }
        }
        if running.is_empty() {
            break;
        }
        session.engine.step(&mut events)?;
        if session.interrupted.load(Ordering::Relaxed) {
            return Err(RunError::Interrupted { done: written });
        }
        for event in events.drain(..) {
            match event {
                Event::Token { request, id, .. } => {
                    if let Some((_, row)) = running.get_mut(&request)
                        && row.token(session.text, id).1
                    {
                        session.engine.cancel(request);
                    }
                }
                Event::Finished { request, finish } => {
                    if let Some((key, row)) = running.remove(&request) {
                        let context = session.engine.max_context();
                        write(&key, row.finish(finish, context).1.result())?;
                    }
                }
                Event::Failed { request, error: reason } => {
                    if let Some((key, _)) = running.remove(&request) {
                        write(&key, error(reason.to_string()))?;
                    }
                }
                Event::Started { .. } | Event::Prompt { .. } | Event::Embedding { .. } | Event::Guessed { .. } => {}
            }
        }
    }
    let answered = written + same;
    if failed > 0 {
        return Err(RunError::Rows { answered, failed, skipped });
    }
    note(format_args!("[{answered} rows answered, 0 of them with an error, {skipped} were there already]"));
    Ok(())
}

/// What names a row.
#[derive(Debug, Clone)]
struct Key {
    id: Option<Value>,
    /// From 1.
    line: usize,
}

impl Key {
    /// Rows with an id are known by it, others by their line.
    fn name(&self) -> String {
        match &self.id {
            Some(id) => format!("id {id}"),
            None => format!("line {}", self.line),
        }
    }

    /// The key of a row whose id is taken: known by its line alone.
    fn repeated(&self) -> Key {
        Key { id: None, line: self.line }
    }

    fn add_to(&self, result: Value) -> Value {
        let mut named = json!({"line": self.line});
        if let Some(id) = &self.id {
            named["id"] = id.clone();
        }
        if let (Value::Object(named), Value::Object(result)) = (&mut named, result) {
            named.extend(result);
        }
        named
    }
}

fn start<G: Generator>(session: &mut Session<'_, G>, row: Row, index: usize) -> Result<(u64, Running), String> {
    let mut settings: Settings = session.settings.clone();
    // Rows with the same prompt are different samples, the same ones whenever they are drawn.
    settings.sampling.seed = settings.sampling.seed.wrapping_add(index as u64);
    row.apply(&mut settings)?;
    let prompt = row.prompt(session.text, &settings)?;
    let running = Running::new(session.text, &settings, prompt.len());
    let context = session.engine.max_context();
    let request = request(&settings, session.text, prompt, context, session.most_context).map_err(|e| e.to_string())?;
    let id = session.engine.add(request).map_err(|e| e.to_string())?;
    Ok((id, running))
}

fn error(reason: String) -> Value {
    json!({"error": {"message": reason}})
}

/// How every result begins.
const BEGINNING: &[u8] = b"{\"line\":";

/// Some editors begin a file with it.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// The output, and what it has.
struct Output {
    /// Only this process writes it, at its end.
    file: File,
    /// Names of the rows that are answered.
    done: HashSet<String>,
    /// Errors of the rows that could not be answered.
    errors: HashMap<String, Value>,
}

impl Output {
    /// Opens the output for appending.
    ///
    /// A last line without its line break was cut short by a crash, which may leave zeros where
    /// the rest should be: it is removed and answered again.
    fn open(path: &Path) -> Result<Output, RunError> {
        if std::fs::metadata(path).is_ok_and(|there| !there.is_file()) {
            return Err(io(path, std::io::Error::other("no regular file; give another --out")));
        }
        let opened = OpenOptions::new().read(true).append(true).create(true).open(path);
        let mut file = opened.map_err(|source| io(path, source))?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => {
                return Err(io(path, std::io::Error::other("another process is writing it; give another --out")));
            }
            // Some file systems have no locks.
            Ok(()) | Err(TryLockError::Error(_)) => {}
        }
        let mut text = Vec::new();
        file.read_to_end(&mut text).map_err(|source| io(path, source))?;
        let complete = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        let other = |index: usize, line: &[u8]| {
            let found = String::from_utf8_lossy(line).chars().take(60).collect();
            RunError::OtherOutput { path: path.to_path_buf(), line: index + 1, found }
        };
        let (mut done, mut errors) = (HashSet::new(), HashMap::new());
        for (index, line) in text[..complete].split(|&byte| byte == b'\n').enumerate() {
            if line.trim_ascii().is_empty() {
                continue;
            }
            let row: Option<Value> = serde_json::from_slice(line).ok();
            let key = row.as_ref().and_then(|row| {
                Some(Key { id: row.get("id").cloned(), line: usize::try_from(row.get("line")?.as_u64()?).ok()? })
            });
            let name = key.ok_or_else(|| other(index, line))?.name();
            match row.as_ref().and_then(|row| row.get("error")) {
                Some(error) => {
                    done.remove(&name);
                    errors.insert(name, error.clone());
                }
                None => {
                    errors.remove(&name);
                    done.insert(name);
                }
            }
        }
        // Only what this command began to write may be removed.
        let rest = &text[complete..];
        let begun = &rest[..rest.iter().rposition(|&byte| byte != 0).map_or(0, |at| at + 1)];
        if !begun.starts_with(BEGINNING) && !BEGINNING.starts_with(begun) {
            return Err(other(text[..complete].iter().filter(|&&byte| byte == b'\n').count(), rest));
        }
        file.set_len(complete as u64).map_err(|source| io(path, source))?;
        Ok(Output { file, done, errors })
    }
}

fn io(path: &Path, source: std::io::Error) -> RunError {
    RunError::Io { name: path.display().to_string(), source }
}
