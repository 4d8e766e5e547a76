//! `--batch`: a file of prompts in, a file of answers out, one JSON object a line.
//!
//! Answers are appended as they are finished and carry the row's `id` (or line number), so a run
//! that was cut short goes on where it stopped. A row that cannot be answered becomes an error
//! object; it never ends the run.

mod row;

use std::collections::{HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::atomic::Ordering;

use serde_json::{Value, json};

use super::answer::{Running, request};
use super::{RunError, Session, Settings};
use crate::engine::{Event, Generator};
use row::Row;

/// Rows that are answered at once.
pub(super) const IN_FLIGHT: usize = 16;

/// Answers every row of `rows` that `out` does not have yet.
pub(super) fn run<G: Generator>(session: &mut Session<'_, G>, rows: &Path, out: &Path) -> Result<(), RunError> {
    let (mut output, done) = open_output(out)?;
    let mut seen = HashMap::new();
    let mut skipped = 0;
    let input = File::open(rows).map_err(|source| io(rows, source))?;
    let mut lines = BufReader::new(input).split(b'\n').enumerate();
    let mut running: HashMap<u64, (Key, Running)> = HashMap::new();
    let (mut written, mut failed) = (0, 0);
    let mut write = |key: &Key, result: Value| -> Result<(), RunError> {
        written += 1;
        failed += usize::from(result.get("error").is_some());
        let line = format!("{}\n", key.add_to(result));
        output.write_all(line.as_bytes()).and_then(|()| output.flush()).map_err(|source| io(out, source))
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
            if line.trim_ascii().is_empty() {
                continue;
            }
            let (key, row) = row::parse(&line, index + 1);
            if done.contains(&key.name()) {
                skipped += 1;
                continue;
            }
            if let Some(first) = seen.insert(key.name(), index + 1) {
                write(&key.repeated(), error(format!("{} was used on line {first}", key.name())))?;
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
            }
        }
    }
    eprintln!("[{written} rows answered, {failed} of them with an error, {skipped} were there already]");
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

/// Opens the output for appending and returns the names of the rows it has.
///
/// A last line without its line break was cut short by a crash: it is removed and answered again.
fn open_output(path: &Path) -> Result<(File, HashSet<String>), RunError> {
    let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
    let mut file = opened.map_err(|source| io(path, source))?;
    let mut text = Vec::new();
    file.read_to_end(&mut text).map_err(|source| io(path, source))?;
    let complete = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
    let other = |index: usize, line: &[u8]| {
        let found = String::from_utf8_lossy(line).chars().take(60).collect();
        RunError::OtherOutput { path: path.to_path_buf(), line: index + 1, found }
    };
    let mut done = HashSet::new();
    for (index, line) in text[..complete].split(|&byte| byte == b'\n').enumerate() {
        if line.trim_ascii().is_empty() {
            continue;
        }
        let row: Option<Value> = serde_json::from_slice(line).ok();
        let key = row.as_ref().and_then(|row| {
            Some(Key { id: row.get("id").cloned(), line: usize::try_from(row.get("line")?.as_u64()?).ok()? })
        });
        done.insert(key.ok_or_else(|| other(index, line))?.name());
    }
    // Only what this command began to write may be removed.
    let rest = &text[complete..];
    if !rest.starts_with(BEGINNING) && !BEGINNING.starts_with(rest) {
        return Err(other(text[..complete].iter().filter(|&&byte| byte == b'\n').count(), rest));
    }
    let end = complete as u64;
    file.set_len(end).and_then(|()| file.seek(SeekFrom::Start(end))).map_err(|source| io(path, source))?;
    Ok((file, done))
}

fn io(path: &Path, source: std::io::Error) -> RunError {
    RunError::Io { name: path.display().to_string(), source }
}
