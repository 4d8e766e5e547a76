//! Computed beginnings that outlive the program: `--cache-dir`.
//!
//! One file per model, KV type and way of computing, since keys and values of another are of no use:
//!
//! ```text
//! "QRNKEPT1", u32 bytes of a block, u32 length of the description, the description,
//! then blocks until the end: u32 1 + index of the block that stands before it in this file (0: none),
//!     u32 [BLOCK] tokens, the block's bytes, u64 xxh3 of this entry up to here
//! ```
//!
//! All little-endian. What cannot be used (another description, a cut-off end, a wrong hash) is left out and said. The
//! file is written beside and renamed, for its owner only; beginnings under a cache salt are never written.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufReader, BufWriter, Read, Write},
    path::{Path, PathBuf},
};

use quern_kernels::{cpu::kv::BLOCK, exec::Executor};
use quern_models::ModelFile;
use xxhash_rust::xxh3::Xxh3Default;

use super::EngineError;
use crate::sched::{KvPool, Node};

const MAGIC: &[u8; 8] = b"QRNKEPT1";

/// A file of computed beginnings.
pub(super) struct Keep {
    path: PathBuf,
    /// What the blocks must have been made with.
    made_with: String,
}

impl Keep {
    pub fn new(dir: PathBuf, file: &ModelFile, executor: &dyn Executor) -> Keep {
        let device = executor.describe();
        // Threads make no difference to what is computed.
        let device = match device.rsplit_once(", ") {
            Some((rest, last)) if last.contains(" thread") => rest,
            _ => &*device,
        };
        let made_with = format!("{:016x}, {device}, version {}", file.identity(), env!("CARGO_PKG_VERSION"));
        let name = format!("{:016x}.kept", xxhash_rust::xxh3::xxh3_64(made_with.as_bytes()));
        Keep { path: dir.join(name), made_with }
    }

    /// Fills idle blocks with what the file has; returns what to say.
    pub fn load(&self, pool: &mut KvPool, executor: &mut dyn Executor) -> String {
        let shown = self.path.display();
        match self.read(pool, executor) {
            Ok((blocks, None)) => format!("{shown}: {} tokens of computed beginnings", blocks * BLOCK),
            Ok((blocks, Some(cut))) => format!("{shown}: {} tokens of computed beginnings, then {cut}", blocks * BLOCK),
            Err(e) if e.kind() == io::ErrorKind::NotFound => format!("{shown}: nothing there yet"),
            Err(e) => format!("{shown}: not used: {e}"),
        }
    }

    /// Blocks restored, and why the rest was not.
    fn read(&self, pool: &mut KvPool, executor: &mut dyn Executor) -> io::Result<(usize, Option<String>)> {
        if !fs::metadata(&self.path)?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "expected a regular file, got something else"));
        }
        let mut from = BufReader::new(File::open(&self.path)?);
        let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_string());
        let mut head = [0; 16];
        from.read_exact(&mut head).map_err(|_| invalid("it is cut off"))?;
        let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]) as usize;
        if head[..8] != *MAGIC {
            return Err(invalid("expected a file of kept beginnings, got something else"));
        }
        let size = executor.block_bytes();
        let mut description = vec![0; word(12).min(4096)];
        from.read_exact(&mut description).map_err(|_| invalid("it is cut off"))?;
        if word(8) != size || description != self.made_with.as_bytes() {
            return Err(invalid("it was made with another model, way of computing or version"));
        }
        let mut entry = vec![0; 4 + 4 * BLOCK + size + 8];
        let mut nodes: Vec<Option<Node>> = vec![];
        let mut blocks = vec![];
        let end = loop {
            match fill(&mut from, &mut entry)? {
                0 => break None,
                n if n < entry.len() => break Some("a cut-off end".to_string()),
                _ => {}
            }
            let (body, sum) = entry.split_at(entry.len() - 8);
            if hash(body) != u64::from_le_bytes(sum.try_into().expect("eight bytes")) {
                break Some(format!("block {} is damaged", nodes.len()));
            }
            let words: Vec<u32> = body[..4 + 4 * BLOCK]
                .chunks_exact(4)
                .map(|b| u32::from_le_bytes(b.try_into().expect("four bytes")))
                .collect();
            let before = match words[0] {
                0 => Some(None),
                i => nodes.get(i as usize - 1).copied().flatten().map(Some),
            };
            let restored = before.and_then(|before| pool.restore(before, &words[1..]));
            if let Some((block, _)) = restored {
                executor.write_block(block, &body[4 + 4 * BLOCK..]).map_err(io::Error::other)?;
                blocks.push(block);
            }
            nodes.push(restored.map(|(_, node)| node));
        };
        // The file begins with what was used last.
        blocks.iter().rev().for_each(|&b| pool.touch(b));
        Ok((blocks.len(), end))
    }

    /// Writes what the pool remembers; returns what to say.
    pub fn save(&self, pool: &KvPool, executor: &mut dyn Executor) -> Result<String, EngineError> {
        let failed = |source| EngineError::Cache { path: self.path.clone(), source };
        let dir = self.path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(dir).map_err(failed)?;
        let part = self.path.with_extension(format!("{}.part", std::process::id()));
        let written = self.write(&part, pool, executor).and_then(|n| fs::rename(&part, &self.path).map(|()| n));
        let blocks = written.map_err(|e| {
            let _ = fs::remove_file(&part);
            failed(e)
        })?;
        Ok(format!("{}: {} tokens of computed beginnings kept", self.path.display(), blocks * BLOCK))
    }

    fn write(&self, path: &Path, pool: &KvPool, executor: &mut dyn Executor) -> io::Result<usize> {
        let mut options = OpenOptions::new();
        // Left over from a killed process of this number, or put there by somebody.
        let _ = fs::remove_file(path);
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let mut to = BufWriter::new(options.open(path)?);
        let size = executor.block_bytes();
        to.write_all(MAGIC)?;
        to.write_all(&(size as u32).to_le_bytes())?;
        to.write_all(&(self.made_with.len() as u32).to_le_bytes())?;
        to.write_all(self.made_with.as_bytes())?;
        let shared = pool.shared(usize::MAX);
        let mut entry = vec![0; 4 + 4 * BLOCK + size];
        for (block, before, tokens) in &shared {
            entry[..4].copy_from_slice(&before.map_or(0, |b| b as u32 + 1).to_le_bytes());
            for (to, token) in entry[4..].chunks_exact_mut(4).zip(*tokens) {
                to.copy_from_slice(&token.to_le_bytes());
            }
            executor.read_block(*block, &mut entry[4 + 4 * BLOCK..]).map_err(io::Error::other)?;
            to.write_all(&entry)?;
            to.write_all(&hash(&entry).to_le_bytes())?;
        }
        to.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
        Ok(shared.len())
    }
}

/// Reads until `to` is full or the file ends.
fn fill(from: &mut impl Read, to: &mut [u8]) -> io::Result<usize> {
    let mut at = 0;
    while at < to.len() {
        match from.read(&mut to[at..]) {
            Ok(0) => break,
            Ok(n) => at += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(at)
}

fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = Xxh3Default::new();
    hasher.update(bytes);
    hasher.digest()
}
