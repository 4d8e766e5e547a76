//! Paged KV bookkeeping: which block holds which tokens, and who holds it. No device memory lives here.
//!
//! A sequence's keys and values lie in fixed-size blocks. The pool hands blocks out, lets sequences with the same
//! beginning share them, and reuses the block unused for longest. It never touches a tensor, a clock or a lock.
//!
//! **The cache is a tree of texts.** A [`Node`] stands for everything before a block: the root is the empty text (one
//! per cache salt), and each full block that is remembered makes a node of its own. A block is found by the node
//! before it and its tokens, which are compared one by one, so two texts can never be taken for each other, as they
//! could where only hashes are chained. Blocks whose text has ended before they were full are remembered too: whoever
//! begins like them copies.
//!
//! Invariants, asserted by `KvPool::check` after every step of the simulations:
//! 1. A block is idle if and only if nobody holds it; the count of holders is that of the lists it stands in.
//! 2. Only computed tokens are remembered, a remembered block is never written to, and reuse forgets it first.
//! 3. Among idle blocks the forgotten ones come first, then those unused for longest; the end of a text goes before
//!    its beginning.

use std::collections::HashMap;

use xxhash_rust::xxh3::Xxh3Default;

/// In a list of blocks: one that was given back because no token to come sees it.
pub use quern_kernels::exec::NO_BLOCK;

/// What stands before a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Node(u64);

impl Node {
    /// The empty text, for everybody.
    pub const ROOT: Node = Node(0);

    /// The empty text of those who know `salt`. `secret` keeps others from finding a salt with the same node.
    pub fn salted(salt: &str, secret: u64) -> Node {
        // The highest bit tells it from nodes that blocks make.
        Node(xxhash_rust::xxh3::xxh3_64_with_seed(salt.as_bytes(), secret) | 1 << 63)
    }
}

/// Every KV block of one device.
#[derive(Debug)]
pub struct KvPool {
    block_tokens: usize,
    holders: Vec<u32>,
    idle: Idle,
    /// By block: what is remembered of it.
    texts: Vec<Option<Text>>,
    /// Full blocks by what stands before and a hash of their tokens.
    full: HashMap<(Node, u64), u32>,
    /// All remembered blocks by what stands before.
    after: HashMap<Node, Vec<u32>>,
    next: u64,
    /// Bits of a hash that are looked at: all, but for tests in which texts of one hash are to meet.
    hash_bits: u64,
}

/// What is remembered of a block.
#[derive(Debug)]
struct Text {
    before: Node,
    /// The text up to its end; of full blocks only.
    node: Option<Node>,
    tokens: Box<[u32]>,
}

/// A sequence cannot grow now; another has to give blocks back first.
#[derive(Debug, PartialEq, Eq)]
pub struct OutOfBlocks {
    /// Blocks missing.
    pub wanted: usize,
    /// Blocks idle.
    pub idle: usize,
}

/// The beginning of a text that is in the cache.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hit {
    /// Whole blocks, to be shared.
    pub blocks: Vec<u32>,
    /// The texts up to the end of each.
    pub nodes: Vec<Node>,
    /// A block of which the first tokens can be copied, and how many.
    pub part: Option<(u32, usize)>,
}

/// Most remembered blocks that are looked at for a common beginning.
const LOOKED_AT: usize = 256;

impl KvPool {
    /// A pool of `blocks` blocks of `block_tokens` tokens, all idle, nothing remembered.
    pub fn new(blocks: usize, block_tokens: usize) -> KvPool {
        let mut idle = Idle::new(blocks);
        (0..blocks as u32).for_each(|b| idle.push_last(b));
        KvPool {
            block_tokens,
            holders: vec![0; blocks],
            idle,
            texts: (0..blocks).map(|_| None).collect(),
            full: HashMap::new(),
            after: HashMap::new(),
            next: 1,
            hash_bits: u64::MAX,
        }
    }

    /// Blocks there are.
    pub fn blocks(&self) -> usize {
        self.holders.len()
    }

    /// Tokens that fit when nobody else holds a block.
    pub fn room(&self) -> usize {
        self.blocks() * self.block_tokens
    }

    /// Tokens of a block.
    pub fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    /// Blocks nobody holds.
    pub fn idle(&self) -> usize {
        self.idle.len
    }

    /// Grows `held` until it can store `tokens` tokens, or leaves it untouched.
    pub fn grow(&mut self, held: &mut Vec<u32>, tokens: usize) -> Result<(), OutOfBlocks> {
        let wanted = tokens.div_ceil(self.block_tokens).saturating_sub(held.len());
        if wanted > self.idle() {
            return Err(OutOfBlocks { wanted, idle: self.idle() });
        }
        for _ in 0..wanted {
            let block = self.idle.pop_first().expect("counted");
            self.forget(block);
            self.holders[block as usize] = 1;
            held.push(block);
        }
        Ok(())
    }

    /// Takes all blocks back, the last one first: the end of a text is reused before its beginning.
    pub fn free(&mut self, held: &mut Vec<u32>) {
        while let Some(block) = held.pop() {
            self.release(block);
        }
    }

    /// Takes one block back; [`NO_BLOCK`] is none.
    pub fn release(&mut self, block: u32) {
        if block == NO_BLOCK {
            return;
        }
        let holders = &mut self.holders[block as usize];
        *holders -= 1;
        if *holders == 0 {
            match self.texts[block as usize] {
                Some(_) => self.idle.push_last(block),
                None => self.idle.push_first(block),
            }
        }
    }

    /// The longest beginning of `tokens` after `root` that is in the cache. Takes nothing.
    pub fn find(&self, root: Node, tokens: &[u32]) -> Hit {
        let mut hit = Hit::default();
        let mut before = root;
        let mut rest = tokens;
        while let Some((tokens, after)) = rest.split_at_checked(self.block_tokens) {
            let Some(block) = self.remembered(before, tokens) else { break };
            before = self.texts[block as usize].as_ref().and_then(|t| t.node).expect("full blocks make nodes");
            hit.blocks.push(block);
            hit.nodes.push(before);
            rest = after;
        }
        let candidates = self.after.get(&before).map_or(&[][..], |blocks| blocks);
        let common = |&block: &u32| {
            let text = self.texts[block as usize].as_ref().expect("remembered");
            (text.tokens.iter().zip(rest).take_while(|(a, b)| a == b).count(), block)
        };
        // The youngest: a long list has mostly old ones.
        let best = candidates.iter().rev().take(LOOKED_AT).map(common).max_by_key(|&(n, _)| n);
        hit.part = best.filter(|&(n, _)| n > 0).map(|(n, block)| (block, n));
        hit
    }

    /// Holds the whole blocks of a hit, and marks what will be copied as used.
    pub fn take(&mut self, hit: &Hit) {
        for &block in &hit.blocks {
            if self.holders[block as usize] == 0 {
                self.idle.remove(block);
            }
            self.holders[block as usize] += 1;
        }
        if let Some((block, _)) = hit.part {
            self.touch(block);
        }
    }

    /// Idle blocks that `hit` would hold.
    pub fn idle_of(&self, hit: &Hit) -> usize {
        hit.blocks.iter().filter(|&&b| self.holders[b as usize] == 0).count()
    }

    /// Remembers a held block: after `before` it has these computed tokens. Returns the text up to its end if it is
    /// full and remembered. Where the text is known already, the known block stays the one that is found; of two texts
    /// with one hash the second is not remembered.
    pub fn remember(&mut self, before: Node, tokens: &[u32], block: u32) -> Option<Node> {
        let full = tokens.len() == self.block_tokens;
        if full && let Some(known) = self.remembered(before, tokens) {
            return self.texts[known as usize].as_ref().and_then(|t| t.node);
        }
        let known = |b: &u32| self.texts[*b as usize].as_ref().is_some_and(|t| t.tokens.starts_with(tokens));
        let part_known = || self.after.get(&before).is_some_and(|b| b.iter().rev().take(LOOKED_AT).any(known));
        let taken = full && self.full.contains_key(&(before, self.hash(tokens)));
        if self.texts[block as usize].is_some() || taken || (!full && part_known()) {
            return None;
        }
        let node = full.then_some(Node(self.next));
        if full {
            self.next += 1;
            self.full.insert((before, self.hash(tokens)), block);
        }
        self.after.entry(before).or_default().push(block);
        self.texts[block as usize] = Some(Text { before, node, tokens: tokens.into() });
        node
    }

    /// Full blocks that everybody may share, each after the one that stands before it, with their tokens and the index
    /// in this list of what stands before; the most recently used first where room is short.
    pub fn shared(&self, most: usize) -> Vec<(u32, Option<usize>, &[u32])> {
        // From the newest: what stands before a block is never older than the block itself.
        let mut wanted: Vec<u32> = (0..self.blocks() as u32).filter(|&b| self.holders[b as usize] > 0).collect();
        wanted.extend(self.idle.backwards());
        let of_node: HashMap<Node, u32> = wanted.iter().filter_map(|&b| Some((self.node(b)?, b))).collect();
        let mut index = HashMap::new();
        let mut list = vec![];
        for block in wanted {
            // A block and all that stands before it, or nothing.
            let mut chain = vec![];
            let mut at = Some(block);
            let reached = loop {
                let Some(b) = at else { break false };
                let Some(Text { before, node: Some(_), .. }) = &self.texts[b as usize] else { break false };
                if index.contains_key(&b) {
                    break true;
                }
                chain.push(b);
                if *before == Node::ROOT {
                    break true;
                }
                at = of_node.get(before).copied();
            };
            if !reached || list.len() + chain.len() > most {
                continue;
            }
            for b in chain.into_iter().rev() {
                let text = self.texts[b as usize].as_ref().expect("seen above");
                let before = of_node.get(&text.before).and_then(|b| index.get(b)).copied();
                index.insert(b, list.len());
                list.push((b, before, &*text.tokens));
            }
        }
        list
    }

    /// Gives a text of [`KvPool::shared`] a block again, idle and remembered; `None` where no block is free of memories
    /// or the text is known. `before` is what this returned for the text before it. [`KvPool::touch`] the blocks from
    /// the last to the first afterwards.
    pub fn restore(&mut self, before: Option<Node>, tokens: &[u32]) -> Option<(u32, Node)> {
        let before = before.unwrap_or(Node::ROOT);
        if tokens.len() != self.block_tokens || self.remembered(before, tokens).is_some() {
            return None;
        }
        let block = self.idle.first().filter(|&b| self.texts[b as usize].is_none())?;
        self.idle.remove(block);
        let node = self.remember(before, tokens, block)?;
        self.idle.push_last(block);
        Some((block, node))
    }

    /// Marks an idle block as used now.
    pub fn touch(&mut self, block: u32) {
        if self.holders[block as usize] == 0 {
            self.idle.remove(block);
            self.idle.push_last(block);
        }
    }

    fn node(&self, block: u32) -> Option<Node> {
        self.texts[block as usize].as_ref()?.node
    }

    /// The full block with these tokens after `before`.
    fn remembered(&self, before: Node, tokens: &[u32]) -> Option<u32> {
        let &block = self.full.get(&(before, self.hash(tokens)))?;
        let text = self.texts[block as usize].as_ref().expect("remembered");
        (*text.tokens == *tokens).then_some(block)
    }

    fn forget(&mut self, block: u32) {
        let Some(text) = self.texts[block as usize].take() else { return };
        if text.node.is_some() {
            self.full.remove(&(text.before, self.hash(&text.tokens)));
        }
        if let Some(blocks) = self.after.get_mut(&text.before) {
            blocks.retain(|&b| b != block);
            if blocks.is_empty() {
                self.after.remove(&text.before);
            }
        }
    }

    fn hash(&self, tokens: &[u32]) -> u64 {
        let mut hasher = Xxh3Default::new();
        tokens.iter().for_each(|t| hasher.update(&t.to_le_bytes()));
        hasher.digest() & self.hash_bits
    }

    /// Panics unless the invariants hold; `held` are all lists of all sequences.
    #[cfg(test)]
    pub fn check<'a>(&'a self, held: impl Iterator<Item = &'a Vec<u32>>) {
        let mut holders = vec![0; self.blocks()];
        held.flatten().filter(|&&b| b != NO_BLOCK).for_each(|&b| holders[b as usize] += 1);
        assert_eq!(holders, self.holders, "holders");
        let idle: Vec<u32> = self.idle.backwards().collect();
        assert_eq!(idle.len(), self.idle.len);
        let mut seen = vec![false; self.blocks()];
        for &b in &idle {
            assert!(!std::mem::replace(&mut seen[b as usize], true), "block {b} is idle twice");
        }
        for (b, seen) in seen.iter().enumerate() {
            assert_eq!(*seen, holders[b] == 0, "block {b} has {} holders", holders[b]);
        }
        let known = idle.iter().rev().skip_while(|&&b| self.texts[b as usize].is_none());
        assert!(known.into_iter().all(|&b| self.texts[b as usize].is_some()), "forgotten blocks come first: {idle:?}");
        let full = self.texts.iter().flatten().filter(|t| t.node.is_some()).count();
        assert_eq!(full, self.full.len());
        let all: usize = self.after.values().map(Vec::len).sum();
        assert_eq!(all, self.texts.iter().flatten().count());
        for (&(before, key), &b) in &self.full {
            let text = self.texts[b as usize].as_ref().expect("remembered");
            assert!(text.before == before && self.hash(&text.tokens) == key && text.tokens.len() == self.block_tokens);
        }
    }
}

/// Idle blocks in the order of their reuse: a list through arrays, so that any of them can leave at once.
#[derive(Debug)]
struct Idle {
    /// By block, and last the ring's anchor: who comes before and after.
    links: Vec<(u32, u32)>,
    len: usize,
}

impl Idle {
    fn new(blocks: usize) -> Idle {
        let anchor = blocks as u32;
        Idle { links: vec![(anchor, anchor); blocks + 1], len: 0 }
    }

    fn anchor(&self) -> u32 {
        (self.links.len() - 1) as u32
    }

    fn first(&self) -> Option<u32> {
        (self.len > 0).then(|| self.links[self.anchor() as usize].1)
    }

    fn pop_first(&mut self) -> Option<u32> {
        let first = self.first()?;
        self.remove(first);
        Some(first)
    }

    fn push_first(&mut self, block: u32) {
        let next = self.links[self.anchor() as usize].1;
        self.link(self.anchor(), block, next);
    }

    fn push_last(&mut self, block: u32) {
        let before = self.links[self.anchor() as usize].0;
        self.link(before, block, self.anchor());
    }

    fn link(&mut self, before: u32, block: u32, next: u32) {
        self.links[block as usize] = (before, next);
        self.links[before as usize].1 = block;
        self.links[next as usize].0 = block;
        self.len += 1;
    }

    fn remove(&mut self, block: u32) {
        let (before, next) = self.links[block as usize];
        self.links[before as usize].1 = next;
        self.links[next as usize].0 = before;
        self.len -= 1;
    }

    /// From the one that is reused last.
    fn backwards(&self) -> impl Iterator<Item = u32> {
        let mut at = self.anchor();
        (0..self.len).map(move |_| {
            at = self.links[at as usize].0;
            at
        })
    }
}

#[cfg(test)]
mod tests;
