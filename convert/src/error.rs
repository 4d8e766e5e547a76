//! Why a checkpoint cannot be brought in. Every message says what, which, expected, got, and what to do next.

use std::{io, path::PathBuf};

use quern_models::{FormatError, family::FamilyError};

/// Why a conversion failed. Nothing is left under the output's name.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// [`crate::Progress::cancelled`] said so.
    #[error("interrupted; nothing was written")]
    Interrupted,
    /// The system refused.
    #[error("{path}: {source}")]
    Io {
        /// File concerned.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The source's path holds no checkpoint.
    #[error("{path}: {what}; {next}")]
    Source {
        /// Path concerned.
        path: PathBuf,
        /// What is wrong.
        what: String,
        /// What to do.
        next: String,
    },
    /// A file's bytes contradict its format.
    #[error("{path}: {source}")]
    File {
        /// File concerned.
        path: PathBuf,
        /// What its reader found.
        source: Malformed,
    },
    /// A format or feature that is not imported.
    #[error("{what}; {next}")]
    Unsupported {
        /// What was found and where.
        what: String,
        /// What to do instead.
        next: String,
    },
    /// A tensor that is not what it should be.
    #[error("tensor {tensor}: {what}: expected {expected}, got {got}")]
    Tensor {
        /// Tensor concerned, by the source's name.
        tensor: String,
        /// Property concerned.
        what: String,
        /// What would be right.
        expected: String,
        /// What was found.
        got: String,
    },
    /// The model needs a tensor that the source lacks.
    #[error("{origin}: tensor {tensor} is missing ({what}); is the download complete?")]
    Missing {
        /// Source concerned.
        origin: String,
        /// Tensor concerned, by the source's name.
        tensor: String,
        /// What it is needed for.
        what: String,
    },
    /// The source has tensors that no rule of the family uses.
    #[error(
        "{origin}: {count} tensor(s) have no place in the family {family}, the first is {first}; \
         the checkpoint is not what its config says"
    )]
    LeftOver {
        /// Source concerned.
        origin: String,
        /// Family concerned.
        family: String,
        /// First of them.
        first: String,
        /// How many.
        count: usize,
    },
    /// The output exists.
    #[error("{path} exists; remove it, choose another name with --out, or overwrite it with --force")]
    Exists {
        /// Output concerned.
        path: PathBuf,
    },
    /// The written file differs from the source: a bug of ours or a fault of the machine.
    #[error(
        "verification failed: tensor {tensor}, {what}: the source has {expected}, the file {got}; the file was removed"
    )]
    Verify {
        /// Tensor concerned, by our name.
        tensor: String,
        /// Element concerned.
        what: String,
        /// Value in the source.
        expected: String,
        /// Value in the file.
        got: String,
    },
    /// The export differs from the file it was made from: a bug of ours or a fault of the machine.
    #[error(
        "verification failed: tensor {tensor}, {what}: the file has {expected}, its export {got}; the export was removed"
    )]
    Exported {
        /// Tensor concerned, by our name.
        tensor: String,
        /// Element concerned.
        what: String,
        /// Value in the file.
        expected: String,
        /// Value in the export.
        got: String,
    },
    /// The file to export cannot be used.
    #[error("{path}: {source}")]
    Qrn {
        /// File concerned.
        path: PathBuf,
        /// What its reader found.
        source: FormatError,
    },
    /// The output would take the place of a file of the source.
    #[error("{path} is part of the source, which must stay as it is; choose another name with --out")]
    OwnSource {
        /// Output concerned.
        path: PathBuf,
    },
    /// The system starts no thread and the current one cannot be used either.
    #[error("threads for the conversion: expected at least one, got none: {source}; raise the limit (ulimit -u)")]
    Threads {
        /// What the thread pool said.
        source: rayon::ThreadPoolBuildError,
    },
    /// The family cannot honour the config.
    #[error("{origin}: {source}")]
    Family {
        /// Source concerned.
        origin: String,
        /// What the family found.
        source: FamilyError,
    },
    /// The file cannot be written.
    #[error(transparent)]
    Format(#[from] FormatError),
}

impl ConvertError {
    pub(crate) fn tensor(tensor: &str, what: impl ToString, expected: impl ToString, got: impl ToString) -> Self {
        ConvertError::Tensor {
            tensor: tensor.into(),
            what: what.to_string(),
            expected: expected.to_string(),
            got: got.to_string(),
        }
    }

    pub(crate) fn unsupported(what: impl ToString, next: impl ToString) -> Self {
        ConvertError::Unsupported { what: what.to_string(), next: next.to_string() }
    }
}

/// What a reader found wrong in the bytes of a file.
#[derive(Debug, thiserror::Error)]
pub enum Malformed {
    /// The file ends too early.
    #[error("{what} needs {needed} bytes, {left} are left; the file is cut short, download it again")]
    Short {
        /// Part concerned.
        what: String,
        /// Bytes needed.
        needed: u64,
        /// Bytes left.
        left: u64,
    },
    /// A field has a value it cannot have.
    #[error("{what}: expected {expected}, got {got}")]
    Field {
        /// Field concerned.
        what: String,
        /// What would be right.
        expected: String,
        /// What was found.
        got: String,
    },
    /// JSON that is none, or that lacks something.
    #[error("{what}: {source}")]
    Json {
        /// Part concerned.
        what: &'static str,
        /// What the parser said.
        source: serde_json::Error,
    },
    /// Well-formed, but not imported.
    #[error("{what}; {next}")]
    Unsupported {
        /// What was found.
        what: String,
        /// What to do instead.
        next: String,
    },
}

impl Malformed {
    pub(crate) fn field(what: impl ToString, expected: impl ToString, got: impl ToString) -> Self {
        Malformed::Field { what: what.to_string(), expected: expected.to_string(), got: got.to_string() }
    }
}
