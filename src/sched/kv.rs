//! Paged KV bookkeeping: which blocks are idle. No device memory lives here.
//!
//! Invariant, asserted by `KvPool::check` in tests: every block is idle or held by exactly one
//! sequence. (Sharing of prefixes comes with the server.)

/// Every KV block of one device.
#[derive(Debug)]
pub struct KvPool {
    block_tokens: usize,
    blocks: usize,
    /// Blocks nobody holds; the last is taken first.
    idle: Vec<u32>,
}

/// A sequence cannot grow now; another has to give blocks back first.
#[derive(Debug, PartialEq, Eq)]
pub struct OutOfBlocks {
    /// Blocks missing.
    pub wanted: usize,
    /// Blocks idle.
    pub idle: usize,
}

impl KvPool {
    /// A pool of `blocks` blocks of `block_tokens` tokens, all idle.
    pub fn new(blocks: usize, block_tokens: usize) -> KvPool {
        KvPool { block_tokens, blocks, idle: (0..blocks as u32).rev().collect() }
    }

    /// Tokens that fit when nobody else holds a block.
    pub fn room(&self) -> usize {
        self.blocks * self.block_tokens
    }

    /// Tokens of a block.
    pub fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    /// Blocks nobody holds.
    pub fn idle(&self) -> usize {
        self.idle.len()
    }

    /// Grows `held` until it can store `tokens` tokens, or leaves it untouched.
    pub fn grow(&mut self, held: &mut Vec<u32>, tokens: usize) -> Result<(), OutOfBlocks> {
        let wanted = tokens.div_ceil(self.block_tokens).saturating_sub(held.len());
        if wanted > self.idle.len() {
            return Err(OutOfBlocks { wanted, idle: self.idle.len() });
        }
        held.extend(self.idle.drain(self.idle.len() - wanted..).rev());
        Ok(())
    }

    /// Takes all blocks back, the last one first, so that the front of a text is reused last.
    pub fn free(&mut self, held: &mut Vec<u32>) {
        self.idle.append(held);
    }

    /// Panics unless `held`, all lists of all sequences, and the idle blocks are a partition.
    #[cfg(test)]
    pub fn check<'a>(&'a self, held: impl Iterator<Item = &'a Vec<u32>>) {
        let mut seen = vec![0; self.blocks];
        for &b in held.flatten().chain(self.idle.iter()) {
            seen[b as usize] += 1;
        }
        assert!(seen.iter().all(|&n| n == 1), "a block is lost or held twice: {seen:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growing_is_all_or_nothing() {
        let mut pool = KvPool::new(3, 16);
        let (mut a, mut b) = (vec![], vec![]);
        pool.grow(&mut a, 17).unwrap();
        assert_eq!(a, [0, 1]);
        assert_eq!(pool.grow(&mut b, 33), Err(OutOfBlocks { wanted: 3, idle: 1 }));
        assert!(b.is_empty());
        pool.grow(&mut b, 16).unwrap();
        pool.check([&a, &b].into_iter());
        pool.grow(&mut a, 32).unwrap();
        assert_eq!(pool.grow(&mut a, 33), Err(OutOfBlocks { wanted: 1, idle: 0 }));
        pool.free(&mut b);
        pool.free(&mut a);
        assert_eq!(pool.idle(), 3);
        let mut c = vec![];
        pool.grow(&mut c, 16).unwrap();
        assert_eq!(c, [1], "the last block of `a` goes first");
        pool.free(&mut c);
        pool.check([&a, &b].into_iter());
    }
}
