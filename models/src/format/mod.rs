//! The `.qrn` file: header records, a total reader and a streaming writer. See FORMAT.md.

mod join;
mod layout;
mod reader;
mod whole;
mod writer;

use std::{io, path::PathBuf};

pub use join::join;
pub use layout::{MAGIC, PAGE, SectionKind, TensorInfo, VERSION};
pub use reader::{ModelFile, TensorOnce, Verified};
pub use writer::{FileWriter, Meta, TensorPlan, create_sibling, destination};

/// Why a file cannot be used or written.
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    /// The system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// File concerned.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Not our file.
    #[error("not a .qrn file: it begins with {got:02x?}; convert a checkpoint with `quern convert`")]
    Magic {
        /// First bytes found.
        got: [u8; 8],
    },
    /// Written by a later program.
    #[error("format version {got}, this program reads version 1; update quern or convert the checkpoint again")]
    Version {
        /// Version found.
        got: u32,
    },
    /// The draft model in a file.
    #[error("the draft model: {source}")]
    Draft {
        /// What is wrong with it.
        source: Box<FormatError>,
    },
    /// Needs something this program lacks.
    #[error("the file needs features that this version does not know (bits {bits:#x}); update quern")]
    Feature {
        /// Unknown bits.
        bits: u64,
    },
    /// Cut or extended.
    #[error("the header says the file has {expected} bytes, it has {got}; copy or convert it again")]
    Length {
        /// Bytes by the header.
        expected: u64,
        /// Bytes there.
        got: u64,
    },
    /// Ends too early.
    #[error("{what} needs {expected} bytes, {got} are left")]
    Short {
        /// Part concerned.
        what: &'static str,
        /// Bytes needed.
        expected: u64,
        /// Bytes left.
        got: u64,
    },
    /// A header field has a value it cannot have.
    #[error("{field}: expected {expected}, got {got}")]
    Field {
        /// Field concerned.
        field: &'static str,
        /// What would be right.
        expected: String,
        /// What was found.
        got: String,
    },
    /// A tensor's field has a value it cannot have.
    #[error("tensor {tensor}: {field}: expected {expected}, got {got}")]
    Tensor {
        /// Tensor concerned.
        tensor: String,
        /// Field concerned.
        field: &'static str,
        /// What would be right.
        expected: String,
        /// What was found.
        got: String,
    },
    /// Bytes changed since they were written.
    #[error(
        "{what}: its hash is {got:016x}, the file says {expected:016x}; the file is damaged, copy or convert it again"
    )]
    Hash {
        /// Part concerned.
        what: String,
        /// Hash in the file.
        expected: u64,
        /// Hash of the bytes.
        got: u64,
    },
    /// A JSON section cannot be read.
    #[error("{section}: {source}")]
    Json {
        /// Section concerned.
        section: &'static str,
        /// What the parser said.
        source: serde_json::Error,
    },
    /// The spec contradicts itself.
    #[error(transparent)]
    Spec(#[from] crate::spec::SpecError),
}

impl FormatError {
    pub(crate) fn field(field: &'static str, expected: impl ToString, got: impl ToString) -> FormatError {
        FormatError::Field { field, expected: expected.to_string(), got: got.to_string() }
    }
}
