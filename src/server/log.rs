//! One line per request and per event, on stderr; never a word of a prompt or an answer.
//!
//! Lines are written by a thread of their own, so that a slow reader of the log does not stop the server: what it has
//! no room for is left out and counted.

use std::{
    io::Write,
    net::SocketAddr,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread::JoinHandle,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde_json::json;

use super::metrics::Usage;
use crate::text::{Date, printable};

/// How lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// For people.
    Text,
    /// A JSON object per line.
    Json,
}

/// A request that has ended.
#[derive(Debug)]
pub struct Line<'a> {
    /// Names it.
    pub id: &'a str,
    /// Who asked; `None`: over a unix socket.
    pub peer: Option<SocketAddr>,
    /// GET, POST ...
    pub method: &'a str,
    /// Without the query, which may hold secrets.
    pub path: &'a str,
    /// HTTP status; 499: the client went away before the answer was complete.
    pub status: u16,
    /// Bytes of the body that were handed over to be sent.
    pub bytes: u64,
    /// From its head to its end.
    pub took: Duration,
    /// Tokens, where the model was asked.
    pub usage: Option<Usage>,
}

/// The way to the log.
#[derive(Debug)]
pub struct Log {
    style: Style,
    lines: Mutex<Option<SyncSender<String>>>,
    left_out: AtomicU64,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Log {
    /// Starts the thread that writes.
    pub fn start(style: Style) -> std::io::Result<Log> {
        const WAITING: usize = 1024;
        let (lines, received) = sync_channel(WAITING);
        let thread = std::thread::Builder::new().name("log".into()).spawn(move || write_all(received))?;
        Ok(Log { style, lines: Mutex::new(Some(lines)), left_out: AtomicU64::new(0), thread: Mutex::new(Some(thread)) })
    }

    /// A request ended.
    pub fn request(&self, line: &Line<'_>) {
        let text = match self.style {
            Style::Text => text(line, SystemTime::now()),
            Style::Json => json(line, SystemTime::now()),
        };
        self.send(text);
    }

    /// Something else happened.
    pub fn event(&self, message: &str) {
        let time = stamp(SystemTime::now());
        self.send(match self.style {
            Style::Text => format!("{time} {}", printable(message)),
            Style::Json => json!({ "time": time, "message": message }).to_string(),
        });
    }

    fn send(&self, line: String) {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(lines) = lines.as_ref() else { return };
        let left_out = self.left_out.swap(0, Ordering::AcqRel);
        if left_out > 0 && lines.try_send(format!("({left_out} lines of the log were left out)")).is_err() {
            self.left_out.fetch_add(left_out + 1, Ordering::AcqRel);
        } else if lines.try_send(line).is_err() {
            self.left_out.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Writes what waits, a second at most, and ends.
    pub fn finish(&self) {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).take();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let until = std::time::Instant::now() + Duration::from_secs(1);
            while !thread.is_finished() && std::time::Instant::now() < until {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    }
}

fn write_all(lines: Receiver<String>) {
    for mut line in lines {
        line.push('\n');
        // Nobody listens: the server goes on.
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
}

/// `2026-11-30T04:23:55.123Z`
fn stamp(time: SystemTime) -> String {
    let millis = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.subsec_millis());
    format!("{}.{millis:03}Z", Date::of(time).format("%Y-%m-%dT%H:%M:%S"))
}

fn shown(path: &str) -> String {
    const MOST: usize = 200;
    let end = path.char_indices().nth(MOST).map_or(path.len(), |(at, _)| at);
    printable(&path[..end])
}

fn peer(line: &Line<'_>) -> String {
    line.peer.map_or_else(|| "unix".into(), |peer| peer.to_string())
}

fn text(line: &Line<'_>, now: SystemTime) -> String {
    let Line { id, method, status, bytes, took, .. } = line;
    let mut text = format!(
        "{} {id} {} {method} {} {status} {bytes} B {:.1} ms",
        stamp(now),
        peer(line),
        shown(line.path),
        took.as_secs_f64() * 1e3
    );
    if let Some(Usage { prompt, cached, generated }) = line.usage {
        text += &format!(" prompt {prompt} cached {cached} generated {generated}");
    }
    text
}

fn json(line: &Line<'_>, now: SystemTime) -> String {
    let mut object = json!({
        "time": stamp(now),
        "id": line.id,
        "peer": peer(line),
        "method": line.method,
        "path": shown(line.path),
        "status": line.status,
        "bytes": line.bytes,
        "ms": (line.took.as_secs_f64() * 1e4).round() / 10.0,
    });
    if let Some(Usage { prompt, cached, generated }) = line.usage {
        object["prompt_tokens"] = prompt.into();
        object["cached_tokens"] = cached.into();
        object["generated_tokens"] = generated.into();
    }
    object.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_everything_and_no_control_characters() {
        let line = Line {
            id: "r1",
            peer: Some(([127, 0, 0, 1], 99).into()),
            method: "POST",
            path: "/a\u{1b}[2J\nb",
            status: 200,
            bytes: 12,
            took: Duration::from_micros(1540),
            usage: Some(Usage { prompt: 7, cached: 3, generated: 2 }),
        };
        let now = UNIX_EPOCH + Duration::from_millis(1_800_000_000_042);
        assert_eq!(
            text(&line, now),
            "2027-01-15T08:00:00.042Z r1 127.0.0.1:99 POST /a\\u{1b}[2J\\nb 200 12 B 1.5 ms prompt 7 cached 3 generated 2"
        );
        let json: serde_json::Value = serde_json::from_str(&json(&line, now)).expect("a line of JSON");
        assert_eq!(
            (json["status"].as_u64(), json["ms"].as_f64(), json["cached_tokens"].as_u64()),
            (Some(200), Some(1.5), Some(3))
        );
        let long = Line { path: &"é".repeat(1000), peer: None, usage: None, ..line };
        assert!(text(&long, now).len() < 500 && text(&long, now).contains(" unix POST "));
    }
}
