//! Read-only memory maps: the one unsafe line outside the kernels.

use std::{fs::File, io, ops::Deref, path::Path};

use memmap2::{Mmap, MmapOptions};

/// A file mapped read-only and shared, so that processes using the same file share its pages.
#[derive(Debug)]
pub struct Mapped {
    map: Mmap,
    file: File,
    /// Where the map starts in the file.
    start: u64,
}

/// A part of a mapped file, mapped once more, to be read once: when it goes away, the system is told that nobody needs
/// the part's pages, and takes those that no other map has in use. Until then they are a second copy of what was made
/// of them.
#[derive(Debug)]
pub struct ReadOnce<'a> {
    /// Always there until it is dropped.
    map: Option<Mmap>,
    file: &'a File,
    at: u64,
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
        let map = map(&file, MmapOptions::new())?;
        Ok(Mapped { map, file, start: 0 })
    }

    /// Maps what follows the first `at` bytes, as if it were a file. Panics if there is nothing.
    pub fn rest(&self, at: usize) -> io::Result<Mapped> {
        assert!(at < self.map.len(), "nothing follows {at} of {} bytes", self.map.len());
        let (file, start) = (self.file.try_clone()?, self.start + at as u64);
        let map = map(&file, MmapOptions::new().offset(start).len(self.map.len() - at).to_owned())?;
        Ok(Mapped { map, file, start })
    }

    /// Maps `len` bytes from `at` on once more. Panics if the file's map does not have them.
    pub fn read_once(&self, at: usize, len: usize) -> io::Result<ReadOnce<'_>> {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.map.len()), "{len} bytes at {at}");
        let at = self.start + at as u64;
        let map = map(&self.file, MmapOptions::new().offset(at).len(len).to_owned())?;
        Ok(ReadOnce { map: Some(map), file: &self.file, at })
    }
}

fn map(file: &File, options: MmapOptions) -> io::Result<Mmap> {
    // SAFETY: the map is read-only. Our own writer never changes a file in place (it writes a
    // sibling and renames), so the bytes stay as they are unless another program truncates the
    // file while it is in use, which no user of a shared map can prevent.
    let map = unsafe { options.map(file) }?;
    // Advice: where there are no huge pages, the map works as well. What is read from the disk comes in huge pages then.
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage);
    Ok(map)
}

impl Deref for Mapped {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}

impl Deref for ReadOnce<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.map.as_deref().expect("there until it is dropped")
    }
}

impl Drop for ReadOnce<'_> {
    fn drop(&mut self) {
        let len = self.len() as u64;
        // Before the advice: pages that are mapped are not given up.
        self.map = None;
        // Pages come in groups, of which one is given up as a whole or not at all, and which know nothing of tensors.
        let before = self.at.min(GROUP);
        // Advice: where it is not followed, the pages stay until others need them.
        #[cfg(target_os = "linux")]
        let _ = rustix::fs::fadvise(
            self.file,
            self.at - before,
            std::num::NonZeroU64::new(len + before),
            rustix::fs::Advice::DontNeed,
        );
        #[cfg(not(target_os = "linux"))]
        let _ = (self.file, len + before);
    }
}

/// Bytes of the largest group of pages that is usual.
const GROUP: u64 = 2 << 20;
