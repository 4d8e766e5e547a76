//! What is known of each byte of shared memory: who wrote and read it last, and whether a barrier came in between.
//!
//! Time counts barriers. Two accesses are ordered if the threads met at a barrier since the earlier one: at a
//! barrier of the whole CTA, at one of some of its warps, or (within a warp) at `bar.warp.sync`. Nothing else
//! orders them; lanes of a warp do not run in lockstep.

use super::Kind;

/// An access that is remembered: thread (`warp * 32 + lane`) and time.
#[derive(Clone, Copy, Default, PartialEq)]
struct Access {
    thread: u16,
    time: u32,
}

#[derive(Clone, Copy, Default, PartialEq)]
struct Cell {
    write: Access,
    /// The last reader, the last one of another warp than that, and the last other lane of its warp.
    read: Access,
    far: Access,
    near: Access,
    /// Copies that are under way.
    copies: u8,
    atomic: bool,
}

/// How a byte is touched.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Touch {
    Read,
    /// A write; whether it changes the byte (two writers of the same value do no harm).
    Write {
        same: bool,
    },
    Atomic,
    /// `cp.async` begins; its bytes arrive later.
    Copy,
}

/// Shared memory of the CTA that runs.
pub struct SharedShadow {
    /// Four bytes each; the first stands for all where `whole` says so, as most accesses are of whole words.
    words: Vec<[Cell; 4]>,
    whole: Vec<bool>,
    now: u32,
    /// When this CTA began: what is older is of another.
    start: u32,
    /// When all warps met last, and when pairs of warps did: `pairs[me][other]`.
    all: u32,
    pairs: Box<[[u32; 32]; 32]>,
}

impl SharedShadow {
    pub fn new(bytes: usize) -> SharedShadow {
        let words = bytes.div_ceil(4);
        SharedShadow {
            words: vec![[Cell::default(); 4]; words],
            whole: vec![true; words],
            now: 1,
            start: 1,
            all: 0,
            pairs: Box::new([[0; 32]; 32]),
        }
    }

    /// A new CTA: what is older than now is of another.
    pub fn begin(&mut self) {
        self.now += 1;
        self.start = self.now;
    }

    /// All warps meet.
    pub fn barrier(&mut self) {
        self.now += 1;
        self.all = self.now;
    }

    /// Some warps meet: those of `waits` see what those of `comes` did before. Returns the time.
    pub fn partial(&mut self, waits: u32, comes: u32) -> u32 {
        self.now += 1;
        for me in (0..32).filter(|me| waits >> me & 1 == 1) {
            for other in (0..32).filter(|other| comes >> other & 1 == 1) {
                self.pairs[me][other] = self.now;
            }
        }
        self.now
    }

    /// Lanes of a warp meet; returns the time, which the warp notes for them.
    pub fn warp(&mut self) -> u32 {
        self.now += 1;
        self.now
    }

    fn ordered(&self, me: u16, met: &[[u32; 32]; 32], other: Access) -> bool {
        if other.time < self.start || other.thread == me || self.all > other.time {
            return true;
        }
        let (warp, lane) = (me / 32, me % 32);
        if other.thread / 32 == warp {
            met[lane as usize][other.thread as usize % 32] > other.time
        } else {
            self.pairs[warp as usize][other.thread as usize / 32] > other.time
        }
    }

    /// Notes an access of `thread` to `len` bytes; what is wrong with it, if anything. `met`: when pairs of lanes of
    /// its warp last met.
    pub fn touch(
        &mut self,
        at: usize,
        len: usize,
        thread: u16,
        met: &[[u32; 32]; 32],
        touch: Touch,
    ) -> Option<(Kind, &'static str)> {
        let mut wrong = None;
        self.each(at, len, |shadow, cell| {
            let (new, found) = shadow.cell(cell, thread, met, touch);
            wrong = wrong.or(found);
            new
        });
        wrong
    }

    /// The bytes of a copy of `thread` have arrived.
    pub fn arrive(&mut self, at: usize, len: usize, thread: u16) {
        self.each(at, len, |shadow, cell| Cell {
            copies: cell.copies.saturating_sub(1),
            write: Access { thread, time: shadow.now },
            ..cell
        });
    }

    /// Replaces the cells of bytes; a word at once where it has one history and all of it is meant.
    #[inline(always)]
    fn each(&mut self, at: usize, len: usize, mut step: impl FnMut(&SharedShadow, Cell) -> Cell) {
        let end = at + len;
        for word in at / 4..end.div_ceil(4) {
            let (from, to) = (at.max(4 * word) - 4 * word, end.min(4 * word + 4) - 4 * word);
            let all = to - from == 4;
            if all && self.whole[word] {
                self.words[word][0] = step(self, self.words[word][0]);
                continue;
            }
            if self.whole[word] {
                self.words[word] = [self.words[word][0]; 4];
            }
            for byte in from..to {
                self.words[word][byte] = step(self, self.words[word][byte]);
            }
            let cells = &self.words[word];
            self.whole[word] = all && cells[1..].iter().all(|cell| *cell == cells[0]);
        }
    }

    /// What a byte's cell becomes by an access, and what is wrong with it.
    #[inline(always)]
    fn cell(
        &self,
        mut cell: Cell,
        thread: u16,
        met: &[[u32; 32]; 32],
        touch: Touch,
    ) -> (Cell, Option<(Kind, &'static str)>) {
        let mut wrong = None;
        let now = Access { thread, time: self.now };
        let fresh = cell.write.time >= self.start;
        if !fresh {
            cell.copies = 0;
        }
        if cell.copies > 0 && touch != Touch::Copy {
            wrong = Some((Kind::CopyWait, "bytes of a cp.async that nobody waited for"));
        }
        if !fresh && matches!(touch, Touch::Read | Touch::Atomic) {
            wrong = Some((Kind::Uninitialised, "a read of shared memory that nobody wrote"));
        }
        let both_atomic = touch == Touch::Atomic && cell.atomic;
        if !both_atomic && !self.ordered(thread, met, cell.write) && touch != (Touch::Write { same: true }) {
            let what = if touch == Touch::Read {
                "a read of shared memory after a write without a barrier"
            } else {
                "a write to shared memory after another without a barrier"
            };
            wrong = wrong.or(Some((Kind::Race, what)));
        }
        if touch == Touch::Read {
            if cell.read.time < self.start || cell.read.thread / 32 != thread / 32 {
                cell.far = cell.read;
                cell.near = Access::default();
            } else if cell.read.thread != thread {
                cell.near = cell.read;
            }
            cell.read = now;
            return (cell, wrong);
        }
        if !both_atomic && [cell.read, cell.far, cell.near].iter().any(|&read| !self.ordered(thread, met, read)) {
            wrong = wrong.or(Some((Kind::Race, "a write to shared memory after a read without a barrier")));
        }
        cell.write = now;
        cell.atomic = touch == Touch::Atomic;
        cell.copies = cell.copies.saturating_add(u8::from(touch == Touch::Copy));
        (cell, wrong)
    }
}

/// Passes over the 32 banks that an access of `bytes` per lane needs, and the fewest that could do.
pub fn waves(lanes: u32, at: &[u64; 32], bytes: u32) -> (u64, u64) {
    // Accesses of 8 and 16 bytes are done for a half and a quarter of the warp at a time.
    let group = (128 / bytes.max(4)).min(32);
    let (mut passes, mut fewest) = (0, 0);
    for first in (0..32).step_by(group as usize) {
        // At most 32 words: a group moves 128 bytes.
        let (mut words, mut count) = ([0u64; 64], 0);
        for lane in (first..first + group).filter(|lane| lanes >> lane & 1 == 1) {
            let from = at[lane as usize] / 4;
            let to = (at[lane as usize] + u64::from(bytes) - 1) / 4;
            for word in from..=to {
                words[count] = word;
                count += 1;
            }
        }
        let words = &mut words[..count];
        if !words.is_sorted() {
            words.sort_unstable();
        }
        let mut banks = [0u8; 32];
        let mut different = 0;
        for same in words.chunk_by(|a, b| a == b) {
            banks[(same[0] % 32) as usize] += 1;
            different += 1u64;
        }
        passes += u64::from(banks.iter().max().copied().unwrap_or(0));
        fewest += different.div_ceil(32);
    }
    (passes, fewest)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEVER: [[u32; 32]; 32] = [[0; 32]; 32];

    #[test]
    fn waves_of_usual_patterns() {
        let lanes = |f: fn(u64) -> u64| std::array::from_fn(|lane| f(lane as u64));
        assert_eq!(waves(!0, &lanes(|lane| lane * 4), 4), (1, 1));
        assert_eq!(waves(!0, &lanes(|lane| lane * 8), 4), (2, 1));
        assert_eq!(waves(!0, &lanes(|lane| lane * 128), 4), (32, 1));
        assert_eq!(waves(!0, &lanes(|_| 64), 4), (1, 1));
        assert_eq!(waves(!0, &lanes(|lane| lane * 16), 16), (4, 4));
        assert_eq!(waves(!0, &lanes(|lane| lane * 8), 8), (2, 2));
        assert_eq!(waves(!0, &lanes(|lane| lane * 2), 2), (1, 1));
        assert_eq!(waves(1, &lanes(|lane| lane * 128), 4), (1, 1));
        assert_eq!(waves(0, &lanes(|lane| lane), 4), (0, 0));
    }

    #[test]
    fn what_orders_accesses_of_two_warps() {
        let mut shadow = SharedShadow::new(64);
        let write = Touch::Write { same: false };
        shadow.begin();
        assert_eq!(shadow.touch(0, 4, 0, &NEVER, write), None);
        assert_eq!(shadow.touch(0, 4, 40, &NEVER, Touch::Read).unwrap().0, Kind::Race);
        shadow.barrier();
        assert_eq!(shadow.touch(0, 4, 40, &NEVER, Touch::Read), None);
        assert_eq!(shadow.touch(0, 4, 70, &NEVER, Touch::Read), None);
        assert_eq!(shadow.touch(0, 4, 70, &NEVER, write).unwrap().0, Kind::Race);
        // The reader of warp 1 is still remembered, though warp 2 read later.
        shadow.partial(1 << 2, 1 << 1);
        assert_eq!(shadow.touch(4, 4, 40, &NEVER, write), None);
        shadow.partial(1 << 2, 1 << 1);
        assert_eq!(shadow.touch(4, 4, 70, &NEVER, write), None);
        assert_eq!(shadow.touch(4, 4, 40, &NEVER, Touch::Read).unwrap().0, Kind::Race);
        shadow.begin();
        assert_eq!(shadow.touch(0, 4, 40, &NEVER, Touch::Read).unwrap().0, Kind::Uninitialised);
    }

    #[test]
    fn lanes_of_a_warp_need_a_warp_barrier() {
        let mut shadow = SharedShadow::new(64);
        let write = Touch::Write { same: false };
        shadow.begin();
        let mut met = NEVER;
        assert_eq!(shadow.touch(0, 4, 1, &met, write), None);
        assert_eq!(shadow.touch(0, 4, 2, &met, Touch::Read).unwrap().0, Kind::Race);
        let time = shadow.warp();
        met[2][1] = time;
        assert_eq!(shadow.touch(0, 4, 2, &met, Touch::Read), None);
        // A read, then a write of another lane of the same warp.
        assert_eq!(shadow.touch(0, 4, 1, &met, write).unwrap().0, Kind::Race);
    }

    #[test]
    fn copies_and_atomics() {
        let mut shadow = SharedShadow::new(64);
        shadow.begin();
        assert_eq!(shadow.touch(0, 16, 1, &NEVER, Touch::Copy), None);
        assert_eq!(shadow.touch(0, 4, 1, &NEVER, Touch::Read).unwrap().0, Kind::CopyWait);
        shadow.arrive(0, 16, 1);
        assert_eq!(shadow.touch(0, 4, 1, &NEVER, Touch::Read), None);
        assert_eq!(shadow.touch(0, 4, 2, &NEVER, Touch::Read).unwrap().0, Kind::Race);
        assert_eq!(shadow.touch(32, 4, 1, &NEVER, Touch::Write { same: false }), None);
        shadow.barrier();
        assert_eq!(shadow.touch(32, 4, 1, &NEVER, Touch::Atomic), None);
        assert_eq!(shadow.touch(32, 4, 77, &NEVER, Touch::Atomic), None);
        assert_eq!(shadow.touch(32, 4, 7, &NEVER, Touch::Read).unwrap().0, Kind::Race);
        // Everybody writes the same value.
        assert_eq!(shadow.touch(48, 4, 1, &NEVER, Touch::Write { same: false }), None);
        assert_eq!(shadow.touch(48, 4, 2, &NEVER, Touch::Write { same: true }), None);
    }
}
