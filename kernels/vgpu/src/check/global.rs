//! What is known of global memory: bytes nobody wrote, bytes that several CTAs of a launch touch, sectors.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};

use super::Kind;
use crate::memory::{Block, Memory};

/// A CTA's access that is remembered for a byte: 0 none, [`MANY`] several CTAs, otherwise its number and 1.
const MANY: u32 = 0x7fff_ffff;
/// In a writer: it was an atomic.
const ATOMIC: u32 = 1 << 31;
const PAGE: u64 = 1024;

/// Last writer and reader of each byte of a page.
struct Page {
    cells: Vec<(AtomicU32, AtomicU32)>,
}

/// How a CTA touches global memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Touch {
    Read,
    /// A write; whether the bytes were the same before.
    Write {
        same: bool,
    },
    Atomic,
}

/// Who touched what in a launch.
pub struct Sharing {
    pages: Vec<Mutex<HashMap<u64, Arc<Page>>>>,
}

impl Default for Sharing {
    fn default() -> Sharing {
        Sharing { pages: (0..64).map(|_| Mutex::default()).collect() }
    }
}

impl Sharing {
    fn page(&self, number: u64) -> Arc<Page> {
        let shard = &self.pages[(number % 64) as usize];
        let mut pages = shard.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let new = || Arc::new(Page { cells: (0..PAGE).map(|_| Default::default()).collect() });
        pages.entry(number).or_insert_with(new).clone()
    }

    /// Notes an access of a CTA; whether another CTA's access to one of the bytes conflicts with it.
    pub fn touch(&self, at: u64, len: u64, cta: u32, touch: Touch) -> bool {
        let me = (cta + 1) & MANY;
        let mut conflict = false;
        let mut page = self.page(at / PAGE);
        let mut number = at / PAGE;
        for byte in at..at + len {
            if byte / PAGE != number {
                number = byte / PAGE;
                page = self.page(number);
            }
            let (writer, reader) = &page.cells[(byte % PAGE) as usize];
            let wrote = writer.load(Relaxed);
            let other_wrote = wrote != 0 && wrote & MANY != me;
            match touch {
                Touch::Read => {
                    conflict |= other_wrote;
                    let read = reader.load(Relaxed);
                    if read == 0 {
                        reader.store(me, Relaxed);
                    } else if read != me {
                        reader.store(MANY, Relaxed);
                    }
                }
                Touch::Write { same } => {
                    let read = reader.load(Relaxed);
                    conflict |= other_wrote && (!same || wrote & ATOMIC != 0) || read != 0 && read != me;
                    writer.store(if other_wrote { MANY } else { me }, Relaxed);
                }
                Touch::Atomic => {
                    let read = reader.load(Relaxed);
                    conflict |= other_wrote && wrote & ATOMIC == 0 || read != 0 && read != me;
                    writer.store(ATOMIC | if other_wrote { MANY } else { me }, Relaxed);
                }
            }
        }
        conflict
    }
}

/// The sectors of a block that a launch read and wrote, one bit each.
struct Sectors([Vec<AtomicU64>; 2]);

/// Sectors of all blocks.
pub struct Touched {
    blocks: Vec<OnceLock<Sectors>>,
}

impl Touched {
    pub fn new(memory: &Memory) -> Touched {
        Touched { blocks: memory.blocks().iter().map(|_| OnceLock::new()).collect() }
    }

    /// Notes that bytes of block `number` were touched.
    pub fn mark(&self, number: usize, block: &Block, at: u64, len: u64, write: bool) {
        let sectors = self.blocks[number].get_or_init(|| {
            let words = (block.len / 32 + 2).div_ceil(64) as usize;
            Sectors([0, 1].map(|_| (0..words).map(|_| AtomicU64::new(0)).collect()))
        });
        // Sectors lie on the device's own grid, which blocks begin on.
        let from = (at - block.base) / 32;
        let to = (at - block.base + len - 1) / 32;
        for sector in from..=to {
            let word = &sectors.0[usize::from(write)][(sector / 64) as usize];
            let bit = 1 << (sector % 64);
            if word.load(Relaxed) & bit == 0 {
                word.fetch_or(bit, Relaxed);
            }
        }
    }

    /// Bytes of all sectors that were read, and written.
    pub fn bytes(&self) -> (u64, u64) {
        let count = |which: usize| -> u64 {
            let blocks = self.blocks.iter().filter_map(OnceLock::get);
            blocks.flat_map(|sectors| &sectors.0[which]).map(|word| u64::from(word.load(Relaxed).count_ones())).sum()
        };
        (count(0) * 32, count(1) * 32)
    }
}

/// Sectors that an access of `bytes` per lane touches, and the fewest that could hold its different bytes.
pub fn sectors(lanes: u32, at: &[u64; 32], bytes: u64) -> (u64, u64) {
    let mut found: Vec<u64> = Vec::with_capacity(64);
    let mut starts: Vec<u64> = Vec::with_capacity(32);
    for lane in (0..32).filter(|lane| lanes >> lane & 1 == 1) {
        found.extend(at[lane] / 32..=(at[lane] + bytes - 1) / 32);
        starts.push(at[lane]);
    }
    found.sort_unstable();
    found.dedup();
    starts.sort_unstable();
    starts.dedup();
    (found.len() as u64, (starts.len() as u64 * bytes).div_ceil(32))
}

/// The report of bytes that nobody wrote.
pub const UNWRITTEN: (Kind, &str) = (Kind::Uninitialised, "a read of global memory that nobody wrote");
/// The report of a conflict between CTAs.
pub const SHARED: (Kind, &str) =
    (Kind::CtaRace, "two CTAs of a launch touch a byte of global memory, and one writes it without an atomic");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sectors_of_usual_patterns() {
        let lanes = |f: fn(u64) -> u64| std::array::from_fn(|lane| f(lane as u64));
        assert_eq!(sectors(!0, &lanes(|lane| lane * 4), 4), (4, 4));
        assert_eq!(sectors(!0, &lanes(|lane| lane * 16), 16), (16, 16));
        assert_eq!(sectors(!0, &lanes(|lane| lane * 64), 4), (32, 4));
        assert_eq!(sectors(!0, &lanes(|_| 8), 4), (1, 1));
        assert_eq!(sectors(!0, &lanes(|lane| lane * 4 + 16), 4), (5, 4));
        assert_eq!(sectors(0b101, &lanes(|lane| lane * 4), 4), (1, 1));
    }

    #[test]
    fn conflicts_between_ctas() {
        let sharing = Sharing::default();
        let write = Touch::Write { same: false };
        assert!(!sharing.touch(1000, 64, 0, write));
        assert!(!sharing.touch(1000, 64, 0, Touch::Read));
        assert!(!sharing.touch(1064, 4, 1, write));
        assert!(sharing.touch(1063, 1, 1, Touch::Read));
        assert!(!sharing.touch(2000, 4, 0, Touch::Read));
        assert!(!sharing.touch(2000, 4, 1, Touch::Read));
        assert!(sharing.touch(2000, 1, 1, write));
        assert!(!sharing.touch(3000, 4, 0, Touch::Atomic));
        assert!(!sharing.touch(3000, 4, 1, Touch::Atomic));
        assert!(sharing.touch(3000, 4, 2, Touch::Read));
        assert!(!sharing.touch(4000, 4, 0, write));
        assert!(!sharing.touch(4000, 4, 1, Touch::Write { same: true }));
        assert!(sharing.touch(4000, 4, 0, write));
    }
}
