//! Read-only memory maps: the one unsafe line outside the kernels.

use std::{fs::File, io, ops::Deref, path::Path};

/// A file mapped read-only and shared, so that processes using the same file share its pages.
#[derive(Debug)]
pub struct Mapped {
    map: memmap2::Mmap,
}

impl Mapped {
    /// Maps the whole file. An empty file is an error, as nothing can be mapped.
    pub fn open(path: &Path) -> io::Result<Mapped> {
        // Asked before opening: opening a pipe would wait for somebody to write into it.
        if !std::fs::metadata(path)?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        let file = File::open(path)?;
        if file.metadata()?.len() == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file is empty"));
        }
        // SAFETY: the map is read-only. Our own writer never changes a file in place (it writes a
        // sibling and renames), so the bytes stay as they are unless another program truncates the
        // file while it is in use, which no user of a shared map can prevent.
        let map = unsafe { memmap2::Mmap::map(&file)? };
        Ok(Mapped { map })
    }
}

impl Deref for Mapped {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}
