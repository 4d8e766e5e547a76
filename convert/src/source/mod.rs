//! Checkpoints as they lie on disk: tensors by their Hugging Face names, and what goes with them.
//!
//! A source is opened in two steps, because tensors borrow from the maps: [`Source::open`] finds and
//! maps the files, [`Source::read`] parses them into a [`Checkpoint`].

pub mod directory;
pub mod gguf;
pub mod gguf_tokenizer;
mod quantizer;
pub mod safetensors;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use quern_models::{FloatType, Generation, map::Mapped};
use serde_json::Value;

pub use self::gguf::Block;
use crate::ConvertError;

/// Element type of a stored tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// A float we store as it is.
    Float(FloatType),
    /// 32-bit words: packed integers.
    I32,
    /// 64-bit integers: a shape.
    I64,
    /// Signed bytes: codes.
    I8,
    /// Bytes: two codes each, or exponents.
    U8,
    /// 8-bit floats: 4 bits of exponent, 3 of mantissa, no infinities.
    E4M3,
    /// Powers of two by their biased exponent.
    E8M0,
    /// A GGUF block type.
    Block(Block),
    /// A type that is read past but not imported: name and bits of an element.
    Other(&'static str, u64),
}

impl Dtype {
    /// Bits of an element; `None` for blocks.
    pub fn bits(self) -> Option<u64> {
        Some(match self {
            Dtype::Float(t) => 8 * t.size() as u64,
            Dtype::I32 => 32,
            Dtype::I64 => 64,
            Dtype::I8 | Dtype::U8 | Dtype::E4M3 | Dtype::E8M0 => 8,
            Dtype::Other(_, bits) => bits,
            Dtype::Block(_) => return None,
        })
    }

    /// Name for messages.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::Float(t) => t.name(),
            Dtype::I32 => "i32",
            Dtype::I64 => "i64",
            Dtype::I8 => "i8",
            Dtype::U8 => "u8",
            Dtype::E4M3 => "F8_E4M3",
            Dtype::E8M0 => "F8_E8M0",
            Dtype::Block(b) => b.name(),
            Dtype::Other(name, _) => name,
        }
    }
}

/// One tensor of a checkpoint.
#[derive(Debug, Clone)]
pub struct RawTensor<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Shape, slowest dimension first: `[n, k]` or `[n]`.
    pub shape: Vec<u64>,
    /// The elements, little-endian.
    pub bytes: &'a [u8],
    /// Order of the rows.
    pub rows: Rows,
}

/// Which stored row is row `r` of the tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    /// Row `r`.
    InOrder,
    /// llama.cpp's order of q and k rows: in every head the halves that rope pairs are interleaved,
    /// row `2i + j` of a stored head is row `j * head_dim/2 + i`.
    Interleaved {
        /// Rows of a head; even.
        head_dim: usize,
    },
}

impl Rows {
    /// Index of the stored row that is row `row`.
    #[inline]
    pub fn stored(self, row: usize) -> usize {
        match self {
            Rows::InOrder => row,
            Rows::Interleaved { head_dim } => {
                let (head, r) = (row / head_dim, row % head_dim);
                let (j, i) = (r / (head_dim / 2), r % (head_dim / 2));
                head * head_dim + 2 * i + j
            }
        }
    }
}

/// Everything a checkpoint says.
#[derive(Debug)]
pub struct Checkpoint<'a> {
    /// File or directory name, for messages and provenance.
    pub name: String,
    /// Tensors by Hugging Face name.
    pub tensors: BTreeMap<String, RawTensor<'a>>,
    /// config.json, or what a GGUF says in that form.
    pub config: Value,
    /// What the quantizer says about itself: file or files it stands in, and the object.
    pub quant_config: Option<(String, Value)>,
    /// tokenizer.json.
    pub tokenizer: Option<Vec<u8>>,
    /// Chat template.
    pub chat_template: Option<String>,
    /// Recommended sampling and special tokens.
    pub generation: Generation,
    /// Licence, by its SPDX name if the source gives that.
    pub licence: Option<String>,
    /// The model's own name.
    pub model: Option<String>,
    /// Read from a GGUF file.
    pub gguf: bool,
    /// What the user should know.
    pub notes: Vec<String>,
}

/// The mapped files of a checkpoint.
#[derive(Debug)]
pub enum Source {
    /// safetensors, in or out of a directory that says what they are.
    Directory {
        /// The directory.
        dir: PathBuf,
        /// Shards.
        shards: Vec<(PathBuf, Mapped)>,
        /// Tensor -> shard file name, by the index file named.
        index: Option<(PathBuf, BTreeMap<String, String>)>,
    },
    /// A GGUF file, or the parts of one in order.
    Gguf(Vec<(PathBuf, Mapped)>),
}

impl Source {
    /// Finds and maps the files of `path`: a directory, a .safetensors or a .gguf file.
    pub fn open(path: &Path) -> Result<Source, ConvertError> {
        let kind = std::fs::metadata(path).map_err(|source| {
            if source.kind() == std::io::ErrorKind::NotFound {
                no_such(path)
            } else {
                ConvertError::Io { path: path.into(), source }
            }
        })?;
        if kind.is_dir() {
            return directory::open(path);
        }
        let map = map(path)?;
        if map.starts_with(b"GGUF") {
            return Ok(Source::Gguf(gguf::open(path, map)?));
        }
        if map.starts_with(&quern_models::format::MAGIC) {
            return Err(ConvertError::Source {
                path: path.into(),
                what: "a .qrn file, the result of a conversion".into(),
                next: "use it as it is, or give the checkpoint it was made from".into(),
            });
        }
        refuse_pickle(path, &map)?;
        let dir = match path.parent() {
            Some(p) if !p.as_os_str().is_empty() => p,
            _ => Path::new("."),
        };
        if path.to_string_lossy().ends_with(".safetensors.index.json") {
            return directory::open_index(dir, path);
        }
        Ok(Source::Directory { dir: dir.into(), shards: vec![(path.into(), map)], index: None })
    }

    /// The files that [`Source::read`] looks at; those beside the tensors may be missing.
    pub fn paths(&self) -> Vec<PathBuf> {
        match self {
            Source::Directory { dir, shards, index } => {
                let tensors = shards.iter().map(|s| &s.0).chain(index.iter().map(|i| &i.0)).cloned();
                tensors.chain(directory::beside(dir)).collect()
            }
            Source::Gguf(parts) => parts.iter().map(|p| p.0.clone()).collect(),
        }
    }

    /// Parses the files.
    pub fn read(&self) -> Result<Checkpoint<'_>, ConvertError> {
        match self {
            Source::Directory { dir, shards, index } => directory::read(dir, shards, index.as_ref()),
            Source::Gguf(parts) => gguf::read(parts),
        }
    }
}

/// Last part of a path, for messages.
pub(crate) fn name_of(path: &Path) -> String {
    let absolute = path.canonicalize().unwrap_or_else(|_| path.into());
    // A symbolic link is called what the user calls it, unless that is `.` or `..`.
    let name = path.file_name().or(absolute.file_name());
    name.map_or_else(|| path.display().to_string(), |n| n.to_string_lossy().into_owned())
}

pub(crate) fn map(path: &Path) -> Result<Mapped, ConvertError> {
    Mapped::open(path).map_err(|source| ConvertError::Io { path: path.into(), source })
}

/// Refuses files that run code when loaded, and what else is no checkpoint we read.
fn refuse_pickle(path: &Path, bytes: &[u8]) -> Result<(), ConvertError> {
    let name = path.to_string_lossy().to_lowercase();
    let pickle = [".bin", ".pt", ".pth", ".ckpt", ".pkl"].iter().any(|e| name.ends_with(e));
    if pickle || bytes.starts_with(b"PK\x03\x04") || bytes.starts_with(&[0x80, 0x02]) {
        return Err(pickled(path));
    }
    Ok(())
}

pub(crate) fn pickled(path: &Path) -> ConvertError {
    ConvertError::Source {
        path: path.into(),
        what: "a PyTorch pickle, which can run code when it is loaded and is not read".into(),
        next: "take the safetensors version of the model, or load it once in transformers and call \
               save_pretrained(..., safe_serialization=True)"
            .into(),
    }
}

fn no_such(path: &Path) -> ConvertError {
    let name = path.to_string_lossy();
    let next = if name.split('/').count() == 2 && !name.starts_with(['.', '/']) {
        format!("if it is a model on the hub, download it first: hf download {name} --local-dir {}", name_of(path))
    } else {
        "give a directory with config.json and *.safetensors, or a .gguf file".into()
    };
    ConvertError::Source { path: path.into(), what: "no such file or directory".into(), next }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interleaved_rows_are_undone() {
        // llama.cpp: reshape(heads, 2, half).swapaxes(1, 2): stored row 2i+j of a head holds row j*half+i.
        let rows = Rows::Interleaved { head_dim: 6 };
        let stored: Vec<usize> = (0..12).map(|r| rows.stored(r)).collect();
        assert_eq!(stored, [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
    }
}
