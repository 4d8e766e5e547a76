//! The folder that an export becomes: filled under another name, then renamed.
//!
//! What is there already is replaced only when asked, and only if it is empty or holds nothing but
//! what an export writes.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use serde_json::Value;

use super::part::failed;
use crate::ConvertError;

/// Names of an export's files beside the tensors.
const NAMES: [&str; 7] = [
    "config.json",
    "generation_config.json",
    "quantize_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
];

/// A folder being filled. Dropped before [`finish`](Self::finish), it leaves nothing.
#[derive(Debug)]
pub struct Folder {
    temp: PathBuf,
    out: PathBuf,
    done: bool,
}

impl Folder {
    /// Makes the folder beside `out`.
    pub fn create(out: &Path, force: bool) -> Result<Folder, ConvertError> {
        let out = &named(out)?;
        replaceable(out, force)?;
        let temp = beside(out, "part", |path| fs::create_dir(path))?;
        Ok(Folder { temp, out: out.into(), done: false })
    }

    /// Where the files are until [`finish`](Self::finish).
    pub fn path(&self) -> &Path {
        &self.temp
    }

    /// Path of a file in it.
    pub fn at(&self, name: &str) -> PathBuf {
        self.temp.join(name)
    }

    /// Writes a file.
    pub fn bytes(&self, name: &str, bytes: &[u8]) -> Result<(), ConvertError> {
        let path = self.at(name);
        let written = fs::File::create_new(&path).and_then(|mut file| {
            file.write_all(bytes)?;
            file.sync_all()
        });
        written.map_err(|e| failed(&path, e))
    }

    /// Writes a file of indented JSON.
    pub fn json(&self, name: &str, value: &Value) -> Result<(), ConvertError> {
        self.bytes(name, format!("{value:#}\n").as_bytes())
    }

    /// Bytes of all files.
    pub fn size(&self) -> Result<u64, ConvertError> {
        let sizes = fs::read_dir(&self.temp)
            .and_then(|entries| entries.map(|e| Ok(e?.metadata()?.len())).sum::<io::Result<u64>>());
        sizes.map_err(|e| failed(&self.temp, e))
    }

    /// Gives the folder its name. What had it is moved away first and removed afterwards.
    pub fn finish(mut self) -> Result<(), ConvertError> {
        // Again: something may have come meanwhile.
        replaceable(&self.out, true)?;
        let old = match self.out.exists() {
            true => Some(beside(&self.out, "old", |path| fs::rename(&self.out, path))?),
            false => None,
        };
        if let Err(e) = fs::rename(&self.temp, &self.out) {
            // Back to how it was; if that fails too, the old folder lies beside.
            old.iter().for_each(|old| drop(fs::rename(old, &self.out)));
            return Err(failed(&self.out, e));
        }
        self.done = true;
        match old {
            Some(old) => fs::remove_dir_all(&old).map_err(|e| failed(&old, e)),
            None => Ok(()),
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if !self.done {
            // Nothing to do about a failure here: the caller already has an error to report.
            let _ = fs::remove_dir_all(&self.temp);
        }
    }
}

/// A path with a last part that can be renamed: `.` and links are followed.
fn named(out: &Path) -> Result<PathBuf, ConvertError> {
    let plain = out.file_name().is_some() && !out.is_symlink();
    if plain { Ok(out.into()) } else { out.canonicalize().map_err(|e| failed(out, e)) }
}

/// Whether `out` may be given to an export.
fn replaceable(out: &Path, force: bool) -> Result<(), ConvertError> {
    if out.symlink_metadata().is_err() {
        return Ok(());
    }
    let refuse = |what: String| {
        Err(ConvertError::Source { path: out.into(), what, next: "choose another name with --out".into() })
    };
    if !out.is_dir() {
        return refuse("is no folder, and this export is one".into());
    }
    let mut empty = true;
    for entry in fs::read_dir(out).map_err(|e| failed(out, e))? {
        let name = entry.map_err(|e| failed(out, e))?.file_name().to_string_lossy().into_owned();
        let shard = name.starts_with("model-") && name.ends_with(".safetensors");
        if force && !shard && !NAMES.contains(&name.as_str()) {
            return refuse(format!("has a file that no export wrote ({name}), and --force would remove it"));
        }
        empty = false;
    }
    if empty || force { Ok(()) } else { Err(ConvertError::Exists { path: out.into() }) }
}

/// A free name beside `out` that `make` could take. It holds the process id and a number, because what a
/// killed process of the same id left behind must not be in the way.
fn beside(out: &Path, kind: &str, make: impl Fn(&Path) -> io::Result<()>) -> Result<PathBuf, ConvertError> {
    let mut attempt = 0;
    loop {
        let mut name = out.file_name().unwrap_or_default().to_os_string();
        name.push(format!(".{}.{attempt}.{kind}", std::process::id()));
        let path = out.with_file_name(name);
        match if path.exists() { Err(io::ErrorKind::AlreadyExists.into()) } else { make(&path) } {
            Ok(()) => return Ok(path),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && attempt < 100 => attempt += 1,
            Err(e) => return Err(failed(&path, e)),
        }
    }
}
