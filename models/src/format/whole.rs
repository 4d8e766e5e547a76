//! Writing a file in whole huge pages.
//!
//! What is written to a file stays in the system's cache, and later processes map it from there. Linux keeps it in
//! pieces as large as the writes were, up to the 2 MiB of a huge page, where the file system can (ext4 since Linux
//! 6.16, xfs, btrfs); a map of huge pages saves a page walk every 4 KiB (ARCHITECTURE.md).

use std::{
    fs::File,
    io::{self, Seek, SeekFrom, Write},
};

/// Bytes of a huge page on most processors, and of a write.
const HUGE: usize = 2 << 20;

/// A new file, written from its start; every write ends at a multiple of 2 MiB but the last.
#[derive(Debug)]
pub struct WholeWriter {
    file: File,
    /// Less than a huge page that is not written yet.
    rest: Vec<u8>,
}

impl WholeWriter {
    /// Of an empty file.
    pub fn new(file: File) -> WholeWriter {
        WholeWriter { file, rest: Vec::with_capacity(HUGE) }
    }

    /// Appends.
    pub fn put(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(HUGE - self.rest.len()));
            self.rest.extend_from_slice(now);
            bytes = later;
            if self.rest.len() == HUGE {
                self.file.write_all(&self.rest)?;
                self.rest.clear();
            }
        }
        Ok(())
    }

    /// Writes what is left; nothing should follow. The file is not yet on the disk.
    pub fn end(&mut self) -> io::Result<&File> {
        self.file.write_all(&self.rest)?;
        self.rest.clear();
        Ok(&self.file)
    }

    /// [`WholeWriter::end`], and `bytes` over the file's start.
    pub fn end_with_start(&mut self, bytes: &[u8]) -> io::Result<&File> {
        let mut file = self.end()?;
        file.seek(SeekFrom::Start(0))?;
        file.write_all(bytes)?;
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_was_put_is_there_in_order_and_the_start_is_the_last() {
        let path = std::env::temp_dir().join(format!("quern-whole-{}", std::process::id()));
        let mut writer = WholeWriter::new(File::create(&path).unwrap());
        let mut want = vec![];
        for (i, len) in [7, HUGE - 7, HUGE, 1, HUGE - 2, 2, 0, 3 * HUGE + 5].into_iter().enumerate() {
            let bytes: Vec<u8> = (0..len).map(|b| (b * 31 + i) as u8).collect();
            writer.put(&bytes).unwrap();
            want.extend(bytes);
        }
        want[..3].copy_from_slice(b"abc");
        writer.end_with_start(b"abc").unwrap();
        let got = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(got == want, "{} bytes, want {}", got.len(), want.len());
    }
}
