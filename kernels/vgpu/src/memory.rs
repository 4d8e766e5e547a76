//! The device's memory as kernels see it: blocks at addresses that no host pointer has.
//!
//! A device address is the host address of the bytes with one bit more, so that a program which takes one for a
//! pointer faults, and one that passes a pointer for a device address is found out.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

/// The bit that device addresses have and host addresses do not.
pub const TAG: u64 = 1 << 62;

/// One allocation.
#[derive(Debug)]
pub struct Block {
    /// Device address of its first byte.
    pub base: u64,
    pub len: u64,
    /// Which bytes were ever written; none: not watched, as memory of the host.
    pub written: Option<Written>,
}

/// A bit for each byte of a block.
#[derive(Debug)]
pub struct Written(Vec<AtomicU8>);

impl Written {
    pub fn new(len: u64) -> Written {
        Written((0..len.div_ceil(8)).map(|_| AtomicU8::new(0)).collect())
    }

    /// Notes that bytes were written.
    pub fn mark(&self, at: u64, len: u64) {
        let mut at = at;
        let end = at + len;
        while at < end {
            let (cell, first) = (&self.0[(at / 8) as usize], at % 8);
            let bits = (end - at).min(8 - first);
            let mask = (((1u32 << bits) - 1) << first) as u8;
            if cell.load(Relaxed) & mask != mask {
                cell.fetch_or(mask, Relaxed);
            }
            at += bits;
        }
    }

    /// Forgets that they were.
    pub fn clear(&self, at: u64, len: u64) {
        for byte in at..at + len {
            self.0[(byte / 8) as usize].fetch_and(!(1 << (byte % 8)), Relaxed);
        }
    }

    /// The first byte of these that nobody wrote.
    pub fn missing(&self, at: u64, len: u64) -> Option<u64> {
        let mut at = at;
        let end = at + len;
        while at < end {
            let first = at % 8;
            let bits = (end - at).min(8 - first);
            let mask = (((1u32 << bits) - 1) << first) as u8;
            let lacking = !self.0[(at / 8) as usize].load(Relaxed) & mask;
            if lacking != 0 {
                return Some(at - first + u64::from(lacking.trailing_zeros()));
            }
            at += bits;
        }
        None
    }
}

/// All blocks by address.
#[derive(Debug, Default, Clone)]
pub struct Memory {
    blocks: Vec<Arc<Block>>,
}

impl Memory {
    pub fn blocks(&self) -> &[Arc<Block>] {
        &self.blocks
    }

    pub fn insert(&mut self, block: Block) {
        let at = self.blocks.partition_point(|other| other.base < block.base);
        self.blocks.insert(at, Arc::new(block));
    }

    /// Takes out the block that begins at `base`.
    pub fn remove(&mut self, base: u64) -> Option<Arc<Block>> {
        let at = self.blocks.binary_search_by_key(&base, |block| block.base).ok()?;
        Some(self.blocks.remove(at))
    }

    /// Number of the block that holds all of these bytes.
    pub fn find(&self, at: u64, len: u64) -> Option<usize> {
        let number = self.blocks.partition_point(|block| block.base <= at).checked_sub(1)?;
        let block = &self.blocks[number];
        // Both are below 2^63: the sums cannot wrap.
        (at - block.base).checked_add(len).filter(|&end| end <= block.len).map(|_| number)
    }

    /// The block nearest to an address: what an error message can say about it.
    pub fn nearest(&self, at: u64) -> String {
        let number = self.blocks.partition_point(|block| block.base <= at);
        let before = number.checked_sub(1).map(|number| &self.blocks[number]);
        match before {
            Some(block) if at - block.base < block.len + 4096 => {
                format!("byte {} of an allocation of {}", at - block.base, block.len)
            }
            _ if at & TAG == 0 => "not a device address".to_string(),
            _ => "in no allocation".to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_bytes_are_known_one_by_one() {
        let written = Written::new(100);
        assert_eq!(written.missing(0, 100), Some(0));
        written.mark(3, 17);
        assert_eq!(written.missing(3, 17), None);
        assert_eq!(written.missing(3, 18), Some(20));
        assert_eq!(written.missing(2, 4), Some(2));
        written.mark(0, 100);
        assert_eq!(written.missing(0, 100), None);
        written.clear(50, 1);
        assert_eq!(written.missing(8, 80), Some(50));
    }

    #[test]
    fn blocks_are_found_whole() {
        let mut memory = Memory::default();
        memory.insert(Block { base: TAG | 4096, len: 100, written: None });
        memory.insert(Block { base: TAG | 1024, len: 8, written: None });
        assert_eq!(memory.find(TAG | 1024, 8), Some(0));
        assert_eq!(memory.find(TAG | 1025, 8), None);
        assert_eq!(memory.find(TAG | 4195, 1), Some(1));
        assert_eq!(memory.find(TAG | 4196, 0), Some(1));
        assert_eq!(memory.find(TAG | 4196, 1), None);
        assert_eq!(memory.find(12, 1), None);
        assert!(memory.remove(TAG | 4097).is_none());
        assert!(memory.remove(TAG | 4096).is_some());
        assert_eq!(memory.find(TAG | 4195, 1), None);
    }
}
