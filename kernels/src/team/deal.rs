//! Items dealt out in contiguous shares, whose rests others take over.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Line, parts::split};

/// What is left of every part's share.
///
/// The owner takes items from the front, one by one, so memory is read in order; whoever has finished takes half of
/// what another has left, from the back. A share is one word, the first item in the high half and the end in the low
/// one, so an item is taken once whatever happens in between. A range never comes back within a deal, so an exchange
/// that succeeds means what it says.
pub(super) struct Deal {
    shares: Vec<Line<AtomicU64>>,
}

impl Deal {
    pub fn new(parts: usize) -> Deal {
        Deal { shares: (0..parts).map(|_| Line(AtomicU64::new(0))).collect() }
    }

    /// Deals out `0..items`. Nobody may be taking items meanwhile.
    pub fn begin(&self, items: usize) {
        for (part, share) in self.shares.iter().enumerate() {
            // What starts the region publishes it.
            share.0.store(pack(split(items, self.shares.len(), part)), Ordering::Relaxed);
        }
    }

    /// Runs `f` on items until none is left that nobody took; `part` is the caller's own.
    pub fn run(&self, part: usize, f: &dyn Fn(usize)) {
        let own = &self.shares[part].0;
        loop {
            loop {
                // May pass the end by one, once: such a share is as empty as any.
                let share = unpack(own.fetch_add(1 << 32, Ordering::Relaxed));
                if share.is_empty() {
                    break;
                }
                f(share.start);
            }
            let others = (1..self.shares.len()).map(|i| &self.shares[(part + i) % self.shares.len()].0);
            let Some(taken) = others.into_iter().find_map(take_half) else { return };
            // Others may take from it in turn. Nobody changes an empty share but its owner.
            own.store(pack(taken), Ordering::Relaxed);
        }
    }
}

/// The back half of a share, the longer one; `None` if it is empty.
fn take_half(share: &AtomicU64) -> Option<Range<usize>> {
    let mut word = share.load(Ordering::Relaxed);
    loop {
        let left = unpack(word);
        if left.is_empty() {
            return None;
        }
        let middle = left.start + left.len() / 2;
        let rest = pack(left.start..middle);
        match share.compare_exchange_weak(word, rest, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return Some(middle..left.end),
            Err(now) => word = now,
        }
    }
}

/// Items are counted in 31 bits, so that a start beyond the end still fits.
pub(super) const MOST_ITEMS: usize = i32::MAX as usize;

fn pack(range: Range<usize>) -> u64 {
    (range.start as u64) << 32 | range.end as u64
}

fn unpack(word: u64) -> Range<usize> {
    (word >> 32) as usize..(word & 0xffff_ffff) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_come_from_the_back() {
        let share = AtomicU64::new(pack(3..8));
        assert_eq!(take_half(&share), Some(5..8));
        assert_eq!(take_half(&share), Some(4..5));
        assert_eq!(take_half(&share), Some(3..4));
        assert_eq!(take_half(&share), None);
        // As an owner leaves it.
        share.fetch_add(1 << 32, Ordering::Relaxed);
        assert_eq!(take_half(&share), None);
    }

    #[test]
    fn one_part_takes_over_all() {
        let deal = Deal::new(4);
        deal.begin(10);
        let order = std::cell::RefCell::new(vec![]);
        deal.run(1, &|i| order.borrow_mut().push(i));
        // Its own share 2..5 first, then the back halves of the others, from part 2 on.
        assert_eq!(order.borrow()[..5], [2, 3, 4, 6, 5]);
        order.borrow_mut().sort();
        assert_eq!(*order.borrow(), (0..10).collect::<Vec<_>>());
    }
}
