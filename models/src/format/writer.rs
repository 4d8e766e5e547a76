//! Writing a file: tensors are streamed once, the header is filled in at the end.
//!
//! Everything goes to a temporary sibling that takes the final name only when complete and on disk,
//! so an existing file is never damaged, not even under a process that has it mapped.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use xxhash_rust::xxh3::Xxh3;

use super::{
    FormatError, TensorInfo,
    layout::{FIXED_LEN, Fixed, MAX_NAME, PAGE, SECTION_LEN, Section, SectionKind},
    reader::header_hash,
    whole::WholeWriter,
};
use crate::{
    Scheme,
    spec::{Generation, ModelSpec},
};

/// Everything of a file but the tensors.
#[derive(Debug, Clone)]
pub struct Meta {
    /// The model as data.
    pub spec: ModelSpec,
    /// tokenizer.json.
    pub tokenizer: Option<Vec<u8>>,
    /// Chat template.
    pub chat_template: Option<String>,
    /// Recommended sampling and special tokens.
    pub generation: Generation,
    /// Where the file comes from: source, method, tools, licence.
    pub provenance: serde_json::Value,
}

/// A tensor to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorPlan {
    /// Name; see [`crate::spec`].
    pub name: String,
    /// `[n, k]` or `[n]`.
    pub dims: Vec<u64>,
    /// What the numbers are.
    pub scheme: Scheme,
}

/// Writes one file; see the module's text. Dropped before [`finish`](Self::finish), it leaves nothing.
#[derive(Debug)]
pub struct FileWriter {
    file: WholeWriter,
    temp: PathBuf,
    path: PathBuf,
    header: Vec<u8>,
    /// Where the tensor table starts in `header`.
    table_at: usize,
    tensors: Vec<TensorInfo>,
    /// Tensors written so far.
    written: usize,
    done: bool,
}

impl FileWriter {
    /// Plans the whole file and reserves the header.
    pub fn create(path: &Path, meta: &Meta, plans: Vec<TensorPlan>) -> Result<FileWriter, FormatError> {
        meta.spec.check()?;
        let tensors = plan_tensors(plans)?;
        let json = |section, value: Result<Vec<u8>, serde_json::Error>| {
            value.map_err(|source| FormatError::Json { section, source })
        };
        let mut table = vec![];
        tensors.iter().for_each(|t| t.encode(&mut table));
        let mut parts = vec![(SectionKind::Spec, json("model spec", serde_json::to_vec(&meta.spec))?)];
        parts.extend(meta.tokenizer.clone().map(|t| (SectionKind::Tokenizer, t)));
        parts.extend(meta.chat_template.clone().map(|t| (SectionKind::ChatTemplate, t.into_bytes())));
        parts.push((SectionKind::Generation, json("generation defaults", serde_json::to_vec(&meta.generation))?));
        parts.push((SectionKind::Provenance, json("provenance", serde_json::to_vec(&meta.provenance))?));
        parts.push((SectionKind::Tensors, table));

        let mut header = vec![0; FIXED_LEN];
        let mut at = (FIXED_LEN + parts.len() * SECTION_LEN) as u64;
        for (kind, bytes) in &parts {
            Section { kind: *kind, offset: at, len: bytes.len() as u64 }.encode(&mut header);
            at += bytes.len() as u64;
        }
        let mut table_at = 0;
        for (_, bytes) in &parts {
            table_at = header.len();
            header.extend_from_slice(bytes);
        }
        header.resize(header.len().next_multiple_of(PAGE as usize), 0);

        let mut at = header.len() as u64;
        let mut tensors = tensors;
        for t in &mut tensors {
            t.offset = at;
            at += t.owned();
        }
        let fixed = Fixed {
            required: 0,
            optional: 0,
            header_len: header.len() as u64,
            file_len: at,
            sections: parts.len() as u32,
            tensors: tensors.len() as u32,
            header_hash: 0,
        };
        fixed.encode(&mut header);

        let path = &destination(path).map_err(|source| FormatError::Io { path: path.into(), source })?;
        let (temp, file) = create_sibling(path)?;
        let io_error = |source| FormatError::Io { path: temp.clone(), source };
        let mut writer = FileWriter {
            file: WholeWriter::new(file),
            temp: temp.clone(),
            path: path.into(),
            header,
            table_at,
            tensors,
            written: 0,
            done: false,
        };
        // The header's place stays zero until finish(): an interrupted file cannot be taken for a whole one.
        let zeros = vec![0; writer.header.len()];
        writer.file.put(&zeros).map_err(io_error)?;
        Ok(writer)
    }

    /// Writes the next tensor of the plan: all its planes, as [`Scheme::planes`] places them.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), FormatError> {
        let Some(info) = self.tensors.get_mut(self.written) else {
            return Err(FormatError::field("tensors written", self.written, self.written + 1));
        };
        if bytes.len() as u64 != info.len {
            return Err(FormatError::Tensor {
                tensor: info.name.clone(),
                field: "bytes written",
                expected: info.len.to_string(),
                got: bytes.len().to_string(),
            });
        }
        let padding = [0u8; PAGE as usize];
        let padding = &padding[..(info.owned() - info.len) as usize];
        let mut hash = Xxh3::new();
        hash.update(bytes);
        hash.update(padding);
        info.hash = hash.digest();
        let io_error = |source| FormatError::Io { path: self.temp.clone(), source };
        self.file.put(bytes).map_err(io_error)?;
        self.file.put(padding).map_err(io_error)?;
        self.written += 1;
        Ok(())
    }

    /// Fills in the header and flushes: the temporary file is now complete and can be opened for checks.
    pub fn seal(&mut self) -> Result<&Path, FormatError> {
        if self.written != self.tensors.len() {
            return Err(FormatError::field("tensors written", self.tensors.len(), self.written));
        }
        let mut table = vec![];
        self.tensors.iter().for_each(|t| t.encode(&mut table));
        self.header[self.table_at..self.table_at + table.len()].copy_from_slice(&table);
        let hash = header_hash(&self.header);
        self.header[FIXED_LEN - 8..FIXED_LEN].copy_from_slice(&hash.to_le_bytes());
        let io_error = |source| FormatError::Io { path: self.temp.clone(), source };
        self.file.end_with_start(&self.header).map_err(io_error)?;
        Ok(&self.temp)
    }

    /// Seals, writes through to the disk and gives the file its name.
    pub fn finish(mut self) -> Result<(), FormatError> {
        self.seal()?;
        let synced = self.file.end().and_then(File::sync_all);
        synced.map_err(|source| FormatError::Io { path: self.temp.clone(), source })?;
        fs::rename(&self.temp, &self.path).map_err(|source| FormatError::Io { path: self.path.clone(), source })?;
        self.done = true;
        Ok(())
    }
}

impl Drop for FileWriter {
    fn drop(&mut self) {
        if !self.done {
            // Nothing to do about a failure here: the caller already has an error to report.
            let _ = fs::remove_file(&self.temp);
        }
    }
}

fn plan_tensors(plans: Vec<TensorPlan>) -> Result<Vec<TensorInfo>, FormatError> {
    let mut tensors = Vec::with_capacity(plans.len());
    for plan in plans {
        let bad = |field, expected: String, got: String| FormatError::Tensor {
            tensor: plan.name.clone(),
            field,
            expected,
            got,
        };
        if plan.name.is_empty() || plan.name.len() > MAX_NAME {
            return Err(bad("length of the name", format!("1 to {MAX_NAME}"), plan.name.len().to_string()));
        }
        let (n, k) = match plan.dims[..] {
            [n, k] if n > 0 && k > 0 => (n, k),
            [n] if n > 0 => (1, n),
            _ => return Err(bad("dimensions", "one or two, none zero".into(), format!("{:?}", plan.dims))),
        };
        let planes = plan.scheme.planes(n, k);
        let len =
            planes.ok_or_else(|| bad("shape", "a size below 2^64 bytes".into(), format!("{:?}", plan.dims)))?.total;
        let layout = plan.scheme.layout();
        tensors.push(TensorInfo {
            name: plan.name,
            dims: plan.dims,
            scheme: plan.scheme,
            layout,
            offset: 0,
            len,
            hash: 0,
        });
    }
    Ok(tensors)
}

/// Where a file written to `path` goes: a link is followed, and what exists must be a regular file, as
/// renaming onto a device, a pipe or a socket would replace it.
pub fn destination(path: &Path) -> io::Result<PathBuf> {
    let Ok(own) = fs::symlink_metadata(path) else { return Ok(path.into()) };
    let path = if own.is_symlink() { fs::canonicalize(path)? } else { path.into() };
    if !fs::metadata(&path)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "exists and is not a regular file; give another name"));
    }
    Ok(path)
}

/// A new file beside `path`. Its name holds the process id and a number, because a file that a killed
/// process of the same id left behind must not be in the way.
pub fn create_sibling(path: &Path) -> Result<(PathBuf, File), FormatError> {
    let mut attempt = 0;
    loop {
        let mut name = path.file_name().unwrap_or_default().to_os_string();
        name.push(format!(".{}.{attempt}.part", std::process::id()));
        let temp = path.with_file_name(name);
        match File::options().read(true).write(true).create_new(true).open(&temp) {
            Ok(file) => return Ok((temp, file)),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && attempt < 100 => attempt += 1,
            Err(source) => return Err(FormatError::Io { path: temp, source }),
        }
    }
}
