//! Which rows of a chunk see each other: a chain of tokens, a block whose rows all see each other, or a tree of guesses.
//!
//! A row's keys, in order, are all tokens before the chunk and then the rows of the chunk that it sees. What it computes
//! is, to the bit, what the last token of a plain sequence with just these keys would: a layer's window counts in that
//! list, and a row of a tree gives what decoding its path token by token gives, whatever stands beside the path.

/// Rows of a chunk with [`Mask::Full`] or [`Mask::Tree`], at most.
pub const MOST_MASKED: usize = 64;

/// Which rows of its own chunk a row sees; what lies before the chunk, all rows see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mask<'a> {
    /// Itself and the rows before it.
    #[default]
    Causal,
    /// All rows, the later ones too: the block of a drafter that guesses several tokens at once. Row `i` has position
    /// `start + i`. A layer's window ends at the last row of the block, whichever row looks.
    Full,
    /// Itself and its ancestors in a tree of rows, or in several trees side by side. Bit `j` of word `i` says whether
    /// row `i` sees row `j`. Parents come before their children. Row `i` has position `start + depth`, 0 for a root,
    /// and its keys and values go to slot `start + i`; those of an accepted path are moved together afterwards
    /// ([`Executor::move_rows`](crate::exec::Executor::move_rows)).
    Tree(&'a [u64]),
}

impl Mask<'_> {
    /// How far a row's position is from that of the chunk's first row.
    pub fn depth(&self, row: usize) -> usize {
        match self {
            Mask::Causal | Mask::Full => row,
            Mask::Tree(masks) => (masks[row].count_ones() as usize).saturating_sub(1),
        }
    }

    /// Whether a row of a chunk sees another.
    pub fn sees(&self, row: usize, other: usize) -> bool {
        match self {
            Mask::Causal => other <= row,
            Mask::Full => true,
            Mask::Tree(masks) => masks[row] >> other & 1 == 1,
        }
    }

    /// The rows of a path: those that `row` sees, itself the last, of a tree; all up to `row` otherwise.
    pub(crate) fn path(&self, row: usize) -> impl Iterator<Item = usize> + use<> {
        let mask = match self {
            Mask::Tree(masks) => masks[row],
            _ => 0,
        };
        let rows = if mask == 0 { 0..row + 1 } else { 0..64 - mask.leading_zeros() as usize };
        rows.filter(move |&j| mask == 0 || mask >> j & 1 == 1)
    }

    /// Index of the last of the keys that a row sees, counted from the chunk's start in the order of the row's keys.
    pub(crate) fn last(&self, rows: usize, row: usize) -> usize {
        match self {
            Mask::Full => rows - 1,
            _ => self.depth(row),
        }
    }

    /// Positions that the rows take: one more than the greatest depth.
    pub(crate) fn positions(&self, rows: usize) -> usize {
        match self {
            Mask::Tree(_) => (0..rows).map(|row| self.depth(row) + 1).max().unwrap_or(0),
            _ => rows,
        }
    }

    /// Refuses what is no mask of so many rows: what is wrong, what would be right, what there is.
    pub(crate) fn check(&self, rows: usize) -> Result<(), (&'static str, String, String)> {
        if *self == Mask::Causal {
            return Ok(());
        }
        if rows > MOST_MASKED {
            return Err(("rows of a chunk with a mask", format!("at most {MOST_MASKED}"), rows.to_string()));
        }
        let Mask::Tree(masks) = *self else { return Ok(()) };
        if masks.len() != rows {
            return Err(("words of the mask", format!("{rows}, one per row"), masks.len().to_string()));
        }
        for (row, &mask) in masks.iter().enumerate() {
            let own = 1u64 << row;
            let wrong = |expected: String| Err(("mask of a row", expected, format!("{mask:#b} for row {row}")));
            if mask & own == 0 {
                return wrong("a row that sees itself".into());
            }
            if mask & !(own | (own - 1)) != 0 {
                return wrong("no later row seen, unless the whole block is Mask::Full".into());
            }
            let before = mask & !own;
            if before == 0 {
                continue;
            }
            // Its parent is the last row before it that it sees; a path has no other rows than the parent's path.
            let parent = 63 - before.leading_zeros() as usize;
            if before != masks[parent] {
                return wrong(format!("what its parent, row {parent}, sees ({:#b}), and itself", masks[parent]));
            }
        }
        Ok(())
    }
}

/// Words of a [`Mask::Tree`]: row `i` hangs on row `parents[i]`, which comes before it, or is a root.
///
/// Panics on a parent that does not come before its child, and on more than [`MOST_MASKED`] rows.
pub fn tree_mask(parents: &[Option<usize>]) -> Vec<u64> {
    assert!(parents.len() <= MOST_MASKED, "{} rows of a tree", parents.len());
    let mut masks: Vec<u64> = vec![];
    for (row, parent) in parents.iter().enumerate() {
        let above = parent.map_or(0, |p| {
            assert!(p < row, "row {row} hangs on row {p}");
            masks[p]
        });
        masks.push(above | 1 << row);
    }
    masks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_say_who_sees_whom() {
        let masks = tree_mask(&[None, Some(0), Some(0), Some(2), None, Some(4)]);
        assert_eq!(masks, [0b1, 0b11, 0b101, 0b1101, 0b10000, 0b110000]);
        let tree = Mask::Tree(&masks);
        tree.check(6).unwrap();
        assert_eq!([0, 1, 2, 3, 4, 5].map(|r| tree.depth(r)), [0, 1, 1, 2, 0, 1]);
        assert_eq!(tree.path(3).collect::<Vec<_>>(), [0, 2, 3]);
        assert_eq!(tree.positions(6), 3);
        assert!(tree.sees(3, 2) && !tree.sees(3, 1));
        let chain: Vec<u64> = tree_mask(&[None].into_iter().chain((0..63).map(Some)).collect::<Vec<_>>());
        assert_eq!(chain[63], u64::MAX);
        assert_eq!(Mask::Tree(&chain).path(63).count(), 64);
        assert_eq!(Mask::Causal.path(2).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!((Mask::Full.last(5, 1), Mask::Causal.last(5, 1), Mask::Full.depth(1)), (4, 1, 1));
    }

    #[test]
    fn masks_that_do_not_fit_are_refused() {
        let error = |mask: Mask, rows| mask.check(rows).unwrap_err();
        assert_eq!(error(Mask::Full, 65).2, "65");
        assert_eq!(error(Mask::Tree(&[1; 65]), 65).0, "rows of a chunk with a mask");
        assert_eq!(error(Mask::Tree(&[1]), 2).0, "words of the mask");
        assert_eq!(error(Mask::Tree(&[]), 1).2, "0");
        assert!(error(Mask::Tree(&[1, 1]), 2).1.contains("itself"));
        assert!(error(Mask::Tree(&[3, 2]), 2).1.contains("no later row"));
        assert!(error(Mask::Tree(&[1, 2, 7]), 3).1.contains("row 1, sees (0b10)"));
        assert!(error(Mask::Tree(&[1, 3, 6]), 3).1.contains("row 1, sees (0b11)"));
        for (mask, rows) in [(Mask::Full, 64), (Mask::Causal, 1000), (Mask::Tree(&[1, 2, 4]), 3)] {
            mask.check(rows).unwrap();
        }
    }
}
