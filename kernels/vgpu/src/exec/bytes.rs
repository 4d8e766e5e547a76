//! Bytes that begin at a multiple of 16, as every access of a kernel within them is aligned relative to their start.

use std::ops::{Deref, DerefMut};

/// A fixed number of aligned bytes.
#[derive(Default)]
pub struct Bytes {
    words: Vec<u128>,
    len: usize,
}

impl Bytes {
    /// `len` zeros.
    pub fn new(len: usize) -> Bytes {
        Bytes { words: vec![0; len.div_ceil(16)], len }
    }
}

impl From<&[u8]> for Bytes {
    fn from(bytes: &[u8]) -> Bytes {
        let mut found = Bytes::new(bytes.len());
        found.copy_from_slice(bytes);
        found
    }
}

impl Deref for Bytes {
    type Target = [u8];

    #[inline(always)]
    fn deref(&self) -> &[u8] {
        // SAFETY: the words hold at least `len` bytes, and any bytes are valid.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), self.len) }
    }
}

impl DerefMut for Bytes {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), self.len) }
    }
}
