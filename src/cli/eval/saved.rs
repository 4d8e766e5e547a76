//! A model's predictions in a file, so that others can be compared with it when it is not there.
//!
//! A safetensors file with three tensors, in this order and without gaps:
//!
//! | name | type | shape | what |
//! |---|---|---|---|
//! | `nll` | F64 | `[rows]` | `-ln p` of the text's own token |
//! | `tokens` | U32 | `[tokens]` | the text, up to the end of the last window |
//! | `codes` | U16 | `[rows, vocab]` | how far each token is behind the likeliest: `32 (code / 65535)^2` nats |
//!
//! Rows are the scored rows of the windows, in order. The metadata says `format` ([`FORMAT`]), `protocol`,
//! `context`, `stride`, `bos` (a token or empty), `text` (XXH3-64 of the bytes that the tokens stand for, in hex),
//! `model` and `mode`. A row's probabilities are `exp(-distance)`, divided by their sum. The square puts the
//! precision where the probability is: the error of a distance `d` is at most `8.7e-5 sqrt(d)`. What is more than
//! 32 nats behind (1.3e-14 as likely) counts as 32 nats behind.

use std::{
    error::Error,
    fs::File,
    io::{BufWriter, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use quern_models::format::{create_sibling, destination};
use serde_json::{Value, json};

use super::{
    protocol::{Kind, Protocol},
    task::Task,
};
use crate::text::printable;

/// The metadata's `format`.
pub const FORMAT: &str = "quern-predictions-1";

/// Longest JSON that is read.
const MAX_HEADER: u64 = 1 << 16;

/// Nats behind the likeliest token that the largest code stands for.
const FAR: f32 = 32.0;

/// Where the tensors are; offsets from the start of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Layout {
    rows: u64,
    vocab: u64,
    tokens: u64,
    /// Length of the JSON.
    header: u64,
}

impl Layout {
    fn nll(&self) -> u64 {
        8 + self.header
    }

    fn tokens(&self) -> u64 {
        self.nll() + 8 * self.rows
    }

    fn codes(&self) -> u64 {
        self.tokens() + 4 * self.tokens
    }

    /// `None`: more than can be counted.
    fn end(&self) -> Option<u64> {
        let codes = self.rows.checked_mul(self.vocab)?.checked_mul(2)?;
        self.rows.checked_mul(8)?.checked_add(self.tokens.checked_mul(4)?)?.checked_add(codes)?.checked_add(self.nll())
    }

    /// The header's entries of the tensors.
    fn tensors(&self) -> [(&'static str, Value); 3] {
        let Layout { rows, vocab, tokens, .. } = *self;
        let at = |from: u64, to: u64| [from - self.nll(), to - self.nll()];
        let (nll, ids, codes) =
            (at(self.nll(), self.tokens()), at(self.tokens(), self.codes()), self.codes() - self.nll());
        [
            ("nll", json!({"dtype": "F64", "shape": [rows], "data_offsets": nll})),
            ("tokens", json!({"dtype": "U32", "shape": [tokens], "data_offsets": ids})),
            (
                "codes",
                json!({"dtype": "U16", "shape": [rows, vocab], "data_offsets": [codes, codes + 2 * rows * vocab]}),
            ),
        ]
    }
}

/// Writes predictions; the file takes its name when it is complete, and goes away if it never is.
pub struct Writer {
    out: BufWriter<File>,
    temp: PathBuf,
    path: PathBuf,
    layout: Layout,
    nll: Vec<f64>,
    done: bool,
}

impl Writer {
    /// Begins a file for the predictions of a task.
    pub fn create(path: &Path, task: &Task, vocab: usize, model: &str, mode: &str) -> Result<Writer, Box<dyn Error>> {
        let shown = |e: &dyn std::fmt::Display| format!("--save-logits: {}: {e}", path.display());
        let path = destination(path).map_err(|e| shown(&e))?;
        let (temp, file) = create_sibling(&path).map_err(|e| shown(&e))?;
        let tokens = task.windows.last().map_or(0, |w| w.end);
        let mut layout = Layout { rows: task.rows() as u64, vocab: vocab as u64, tokens: tokens as u64, header: 0 };
        let protocol = task.protocol;
        let mut header = json!({"__metadata__": {
            "format": FORMAT, "protocol": protocol.kind.name(), "context": protocol.context.to_string(),
            "stride": protocol.stride.to_string(), "bos": task.bos.map_or(String::new(), |id| id.to_string()),
            "text": format!("{:016x}", task.text), "model": model, "mode": mode,
        }});
        for (name, entry) in layout.tensors() {
            header[name] = entry;
        }
        let mut header = header.to_string();
        header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
        layout.header = header.len() as u64;
        let mut writer =
            Writer { out: BufWriter::with_capacity(1 << 20, file), temp, path, layout, nll: vec![], done: false };
        writer.begin(&header, &task.tokens[..tokens]).map_err(|e| shown(&e))?;
        Ok(writer)
    }

    fn begin(&mut self, header: &str, tokens: &[u32]) -> std::io::Result<()> {
        self.out.write_all(&self.layout.header.to_le_bytes())?;
        self.out.write_all(header.as_bytes())?;
        // The losses' place; they are known at the end.
        std::io::copy(&mut std::io::repeat(0).take(8 * self.layout.rows), &mut self.out)?;
        tokens.iter().try_for_each(|id| self.out.write_all(&id.to_le_bytes()))
    }

    /// Appends rows of finite logits `[rows, vocab]` and the losses that belong to them.
    pub fn push(&mut self, logits: &[f32], nll: impl Iterator<Item = f64>) -> Result<(), Box<dyn Error>> {
        self.nll.extend(nll);
        let mut bytes = Vec::with_capacity(2 * self.layout.vocab as usize);
        for row in logits.chunks_exact(self.layout.vocab as usize) {
            let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            bytes.clear();
            bytes.extend(row.iter().flat_map(|x| code(most - x).to_le_bytes()));
            self.out.write_all(&bytes).map_err(|e| format!("{}: {e}", self.path.display()))?;
        }
        Ok(())
    }

    /// Completes the file.
    pub fn finish(mut self) -> Result<(), Box<dyn Error>> {
        let nll: Vec<u8> = self.nll.iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(nll.len() as u64, 8 * self.layout.rows, "a row was not pushed");
        let mut write = || -> std::io::Result<()> {
            self.out.seek(SeekFrom::Start(self.layout.nll()))?;
            self.out.write_all(&nll)?;
            self.out.flush()?;
            std::fs::rename(&self.temp, &self.path)
        };
        write().map_err(|e| format!("{}: {e}", self.path.display()))?;
        self.done = true;
        Ok(())
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if !self.done {
            // Nobody can be told; the error that brought us here is reported.
            let _ = std::fs::remove_file(&self.temp);
        }
    }
}

fn code(distance: f32) -> u16 {
    ((distance.min(FAR) / FAR).sqrt() * 65535.0).round() as u16
}

fn distance(code: u16) -> f32 {
    let part = f32::from(code) / 65535.0;
    FAR * part * part
}

/// An opened file of predictions.
#[derive(Debug)]
pub struct Saved {
    file: File,
    path: PathBuf,
    layout: Layout,
    /// What was scored.
    pub task: Task,
    /// Whose predictions they are.
    pub model: String,
    /// In which mode.
    pub mode: String,
}

impl Saved {
    /// Opens a file, and reads everything but the predictions.
    pub fn open(path: &Path) -> Result<Saved, Box<dyn Error>> {
        let shown = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
        let mut file = File::open(path).map_err(|e| shown(&e))?;
        let len = file.metadata().map_err(|e| shown(&e))?.len();
        let mut start = [0; 8];
        let header_len = match file.read_exact(&mut start) {
            Ok(()) => u64::from_le_bytes(start),
            Err(_) => u64::MAX,
        };
        let other = "neither a .qrn file nor predictions that --save-logits wrote";
        if header_len > MAX_HEADER.min(len.saturating_sub(8)) {
            return Err(shown(&other).into());
        }
        let mut header = vec![0; header_len as usize];
        file.read_exact(&mut header).map_err(|e| shown(&e))?;
        let header: Value = serde_json::from_slice(&header).map_err(|_| shown(&other))?;
        let text = |key: &str| header["__metadata__"][key].as_str();
        match text("format") {
            Some(FORMAT) => {}
            Some(later) if later.starts_with("quern-predictions-") => {
                let later = printable(later);
                return Err(shown(&format!("format {later}, this program reads {FORMAT}; update quern")).into());
            }
            _ => return Err(shown(&other).into()),
        }
        let damaged = |what: &str| shown(&format!("{what}: the file is damaged; save it again with --save-logits"));
        let number = |key: &str| text(key).and_then(|t| t.parse::<usize>().ok()).ok_or_else(|| damaged(key));
        let size = |name: &str, at: usize| header[name]["shape"][at].as_u64().ok_or_else(|| damaged(name));
        let layout = Layout {
            rows: size("codes", 0)?,
            vocab: size("codes", 1)?,
            tokens: size("tokens", 0)?,
            header: header_len,
        };
        let end = layout.end();
        if end != Some(len) {
            let expected = end.map_or("a size below 2^64".to_string(), |n| n.to_string());
            return Err(damaged(&format!("{len} bytes, expected {expected}")).into());
        }
        if let Some((name, _)) = layout.tensors().into_iter().find(|(name, entry)| header[name] != *entry) {
            return Err(damaged(&format!("tensor {name}")).into());
        }
        let kind = [Kind::LlamaCpp, Kind::Strided].into_iter().find(|k| Some(k.name()) == text("protocol"));
        let kind = kind.ok_or_else(|| damaged("protocol"))?;
        let protocol = Protocol::new(kind, number("context")?, Some(number("stride")?));
        let protocol = protocol.map_err(|e| damaged(&e))?;
        let bos = match text("bos").ok_or_else(|| damaged("bos"))? {
            "" => None,
            id => Some(id.parse().map_err(|_| damaged("bos"))?),
        };
        let hash = text("text").and_then(|t| u64::from_str_radix(t, 16).ok()).ok_or_else(|| damaged("text"))?;
        let named = |key: &str| printable(text(key).unwrap_or_default());
        let (model, mode) = (named("model"), named("mode"));
        // Their number was compared with the file's length.
        let mut bytes = vec![0; 4 * layout.tokens as usize];
        file.seek(SeekFrom::Start(layout.tokens())).and_then(|_| file.read_exact(&mut bytes)).map_err(|e| shown(&e))?;
        let tokens: Vec<u32> = bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let vocab = layout.vocab;
        if let Some(bad) = tokens.iter().chain(&bos).find(|&&id| u64::from(id) >= vocab) {
            return Err(damaged(&format!("token {bad}, the vocabulary has {vocab}")).into());
        }
        let windows = protocol.windows(tokens.len());
        let task = Task { protocol, tokens, bos, windows, text: hash };
        if task.rows() as u64 != layout.rows {
            let (got, expected) = (layout.rows, task.rows());
            return Err(damaged(&format!("{got} rows, expected {expected} for the {protocol}")).into());
        }
        Ok(Saved { file, path: path.into(), layout, task, model, mode })
    }

    /// Tokens of the vocabulary.
    pub fn vocab(&self) -> usize {
        self.layout.vocab as usize
    }

    /// Reads rows that are there: their logits `[rows, vocab]` less each row's largest, and their losses.
    pub fn rows(&mut self, first: usize, rows: usize) -> Result<(Vec<f32>, Vec<f64>), Box<dyn Error>> {
        let (first, vocab) = (first as u64, self.layout.vocab);
        let mut read = |at: u64, bytes: u64| -> std::io::Result<Vec<u8>> {
            let mut buffer = vec![0; bytes as usize];
            self.file.seek(SeekFrom::Start(at))?;
            self.file.read_exact(&mut buffer)?;
            Ok(buffer)
        };
        let shown = |e| format!("{}: {e}", self.path.display());
        let codes = read(self.layout.codes() + 2 * first * vocab, 2 * rows as u64 * vocab).map_err(shown)?;
        let nll = read(self.layout.nll() + 8 * first, 8 * rows as u64).map_err(shown)?;
        let logits = codes.chunks_exact(2).map(|b| -distance(u16::from_le_bytes([b[0], b[1]]))).collect();
        let nll: Vec<f64> =
            nll.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().expect("eight bytes"))).collect();
        if let Some(bad) = nll.iter().find(|x| !x.is_finite() || **x < 0.0) {
            return Err(format!("{}: a loss of {bad}: the file is damaged; save it again", self.path.display()).into());
        }
        Ok((logits, nll))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_keep_their_precision() {
        let mut previous = 0;
        for i in 0..40_000 {
            let d = i as f32 / 1000.0;
            let (code, back) = (code(d), distance(code(d)));
            assert!(code >= previous);
            previous = code;
            assert!((back - d.min(FAR)).abs() <= 8.7e-5 * d.min(FAR).sqrt() + 1e-6, "{d} {back}");
        }
        assert_eq!((code(0.0), code(1e30)), (0, u16::MAX));
    }
}
