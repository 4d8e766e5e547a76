//! One file of two: a model, and behind it a small one that writes ahead of it.

use std::{fs, path::Path};

use byteorder::{ByteOrder, LittleEndian as LE};

use super::{
    FormatError, ModelFile,
    layout::{DRAFT, FIXED_LEN},
    reader::header_hash,
    whole::WholeWriter,
    writer::{create_sibling, destination},
};

/// Writes `model` with `draft` behind it; draft models that the two have themselves are left out. `path` may be the
/// file of either: it is replaced when the new one is complete and on disk.
pub fn join(model: &ModelFile, draft: &ModelFile, path: &Path) -> Result<(), FormatError> {
    let all = model.file_len() + draft.file_len();
    let path = &destination(path).map_err(|source| FormatError::Io { path: path.into(), source })?;
    let (temp, file) = create_sibling(path)?;
    let write = || {
        let mut file = WholeWriter::new(file);
        for (of, required, len) in [(model, DRAFT, all), (draft, 0, draft.file_len())] {
            let (header, tensors) = of.own().split_at(of.header_len() as usize);
            file.put(&changed(header, required, len))?;
            file.put(tensors)?;
        }
        file.end()?.sync_all()
    };
    let written = write().and_then(|()| fs::rename(&temp, path));
    written.map_err(|source| {
        // The error to report is the first one.
        let _ = fs::remove_file(&temp);
        FormatError::Io { path: path.into(), source }
    })
}

/// A header of a file with another draft model, or none: its features, length and hash.
fn changed(header: &[u8], draft: u64, len: u64) -> Vec<u8> {
    let mut header = header.to_vec();
    let required = LE::read_u64(&header[16..24]) & !DRAFT | draft;
    LE::write_u64(&mut header[16..24], required);
    LE::write_u64(&mut header[40..48], len);
    let hash = header_hash(&header);
    LE::write_u64(&mut header[FIXED_LEN - 8..FIXED_LEN], hash);
    header
}
