//! What is known of global memory: bytes nobody wrote, bytes that several CTAs of a launch touch, sectors.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use super::Kind;
use crate::memory::{Block, Memory};

/// A CTA's access that is remembered for a byte: 0 none, [`MANY`] several CTAs, otherwise its number and 1.
const MANY: u32 = 0x7fff_ffff;
/// In a writer: it was an atomic.
const ATOMIC: u32 = 1 << 31;
const PAGE: u64 = 4096;

/// Last writer (upper half) and reader of each byte of a page.
struct Page(Vec<AtomicU64>);

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

/// Who touched what in a launch: for each block its pages, which come to be when they are touched.
pub struct Sharing(Vec<Vec<OnceLock<Page>>>);

impl Sharing {
    pub fn new(memory: &Memory) -> Sharing {
        let pages = |block: &Arc<Block>| (0..block.len.div_ceil(PAGE)).map(|_| OnceLock::new()).collect();
        Sharing(memory.blocks().iter().map(pages).collect())
    }

    /// Notes an access of a CTA to bytes of block `number`, from byte `at` of it on; whether another CTA's access to
    /// one of them conflicts with it.
    pub fn touch(&self, number: usize, at: u64, len: u64, cta: u32, touch: Touch) -> bool {
        let me = (cta + 1) & MANY;
        let mut conflict = false;
        let mut at = at;
        let end = at + len;
        while at < end {
            let page = &self.0[number][(at / PAGE) as usize];
            let page = page.get_or_init(|| Page((0..PAGE).map(|_| AtomicU64::new(0)).collect()));
            let here = (end - at).min(PAGE - at % PAGE);
            for cell in &page.0[(at % PAGE) as usize..][..here as usize] {
                conflict |= Sharing::touch_byte(cell, me, touch);
            }
            at += here;
        }
        conflict
    }

    #[inline(always)]
    fn touch_byte(cell: &AtomicU64, me: u32, touch: Touch) -> bool {
        let old = cell.load(Relaxed);
        let (wrote, read) = ((old >> 32) as u32, old as u32);
        let other_wrote = wrote != 0 && wrote & MANY != me;
        let other_read = read != 0 && read != me;
        let (writer, reader, conflict) = match touch {
            Touch::Read => (wrote, if other_read { MANY } else { me }, other_wrote),
            Touch::Write { same } => {
                let writer = if other_wrote { MANY } else { me };
                (writer, read, other_wrote && (!same || wrote & ATOMIC != 0) || other_read)
            }
            Touch::Atomic => {
                let writer = ATOMIC | if other_wrote { MANY } else { me };
                (writer, read, other_wrote && wrote & ATOMIC == 0 || other_read)
            }
        };
        let new = u64::from(writer) << 32 | u64::from(reader);
        // Of two CTAs at the same moment one may be forgotten: the next access finds the other.
        if new != old {
            cell.store(new, Relaxed);
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

/// Sectors that an access of `bytes` (up to 16) per lane touches, and the fewest that could hold its different bytes.
pub fn sectors(lanes: u32, at: &[u64; 32], bytes: u64) -> (u64, u64) {
    let (mut found, mut starts) = ([0u64; 64], [0u64; 32]);
    let (mut sectors, mut different) = (0, 0);
    for lane in (0..32).filter(|lane| lanes >> lane & 1 == 1) {
        let (first, last) = (at[lane] / 32, (at[lane] + bytes - 1) / 32);
        found[sectors] = first;
        found[sectors + 1] = last;
        sectors += 1 + usize::from(last != first);
        starts[different] = at[lane];
        different += 1;
        // Neighbours mostly touch the sector before; what remains is sorted.
        if sectors >= 2 && found[sectors - 1] == found[sectors - 2] {
            sectors -= 1;
        }
    }
    (count_different(&mut found[..sectors]), (count_different(&mut starts[..different]) * bytes).div_ceil(32))
}

/// How many different values there are.
fn count_different(values: &mut [u64]) -> u64 {
    if !values.is_sorted() {
        values.sort_unstable();
    }
    values.chunk_by(|a, b| a == b).count() as u64
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
        let mut memory = Memory::default();
        memory.insert(Block { base: crate::memory::TAG, len: 10_000, written: None });
        let sharing = Sharing::new(&memory);
        let write = Touch::Write { same: false };
        assert!(!sharing.touch(0, 1000, 64, 0, write));
        assert!(!sharing.touch(0, 1000, 64, 0, Touch::Read));
        assert!(!sharing.touch(0, 1064, 4, 1, write));
        assert!(sharing.touch(0, 1063, 1, 1, Touch::Read));
        assert!(!sharing.touch(0, 2000, 4, 0, Touch::Read));
        assert!(!sharing.touch(0, 2000, 4, 1, Touch::Read));
        assert!(sharing.touch(0, 2000, 1, 1, write));
        assert!(!sharing.touch(0, 3000, 4, 0, Touch::Atomic));
        assert!(!sharing.touch(0, 3000, 4, 1, Touch::Atomic));
        assert!(sharing.touch(0, 3000, 4, 2, Touch::Read));
        assert!(!sharing.touch(0, 4000, 4, 0, write));
        assert!(!sharing.touch(0, 4000, 4, 1, Touch::Write { same: true }));
        assert!(sharing.touch(0, 4000, 4, 0, write));
    }
}
