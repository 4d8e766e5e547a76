//! What attention has to know of a step, in device memory: which rows belong to which sequence, its blocks, and how the
//! work is cut. Written once a step for all layers.
//!
//! Kernels find everything from one address that never changes, so a recorded graph serves every step with as many
//! rows, however long the contexts are. Layers that share a group size and a window share a list of tiles: a *kind*.
//!
//! ```text
//! header: rows, where row_chunks are, vectors of a tile, 0; per kind: tiles, where they are, where chunks are, 0
//! places: [m]          block * 16 + slot of each row, for the append
//! row_chunks: [m]      chunk of each row, or u32::MAX
//! per kind: chunks [8 words each], tiles [4 words each]      (structs of kernels/cuda/attend.cu)
//! copies: [.. 2]       places of tokens of paths, and where they lie one behind the other
//! tables: the blocks of each chunk
//! ```
//!
//! A tree becomes several chunks of the kernels.

use std::{borrow::Cow, ops::Range, sync::Arc};

use super::{
    Buffer, CudaError, Device, DevicePtr,
    kv::{BLOCK, NO_PLACE},
    stage::Stages,
};
use crate::exec::Mask;

/// Tokens of a split, as in the source.
pub const SPLIT: usize = 256;
/// Chunks of up to so many rows are computed in narrow tiles, if all of a step are.
const FEW: usize = 8;
const NONE: u32 = u32::MAX;

/// What attention of a layer looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Tokens that a row sees, itself included.
    pub window: Option<usize>,
}

impl Shape {
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Splits that the rows of a line see.
    fn splits(&self, line: &Line) -> Range<usize> {
        first_seen(line.last(0), self.window) / SPLIT..line.last(line.rows - 1) / SPLIT + 1
    }
}

/// How attention cuts a step: which kernel it needs. Both give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cut {
    /// Tiles of 16 vectors (row, query head): steps of few rows per sequence, always where each has one.
    Narrow,
    /// Tiles of 64.
    Wide,
}

impl Cut {
    fn of(lines: &[Line]) -> Cut {
        if lines.iter().all(|l| l.rows <= FEW) { Cut::Narrow } else { Cut::Wide }
    }

    fn vectors(self) -> usize {
        match self {
            Cut::Narrow => 16,
            Cut::Wide => 64,
        }
    }
}

/// New tokens of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct Chunk<'a> {
    /// Rows, at least one.
    pub rows: usize,
    /// Slot of the first.
    pub start: usize,
    /// Blocks of the sequence, at least up to the last row; those that no layer sees any more may be anything.
    pub blocks: &'a [u32],
    /// Which rows see each other; one that was checked.
    pub mask: Mask<'a>,
}

/// A step's description and the memory that its attention works in.
pub struct Batch {
    device: Arc<Device>,
    /// One per kind.
    kinds: Vec<Shape>,
    /// (row, slot) pairs there is room for.
    slots: usize,
    stages: Stages<u32>,
    words: Buffer<u32>,
    rows: usize,
    cut: Cut,
    /// Blocks that paths of trees are laid out in.
    spare: Range<u32>,
    /// Where the copies of the step are, and how many.
    copies: (usize, usize),
    /// f32 `[slots][heads * head_dim]`, of the widest layer.
    pub(super) partials: Buffer<f32>,
    /// f32 `[slots][heads][2]`.
    pub(super) states: Buffer<f32>,
    /// f32 `[rows][heads * head_dim]`.
    pub(super) attended: Buffer<f32>,
}

impl Batch {
    /// For steps of up to `rows` rows of a model whose layers look like `layers`.
    pub fn new(device: &Arc<Device>, layers: &[Shape], rows: usize) -> Result<Batch, CudaError> {
        let mut kinds: Vec<Shape> = vec![];
        for layer in layers {
            if !kinds.iter().any(|k| k.group() == layer.group() && k.window == layer.window) {
                kinds.push(*layer);
            }
        }
        let (slots, width, heads) = sizes(layers, rows);
        assert!(
            slots.saturating_mul(heads) < u32::MAX as usize,
            "{slots} slots of {heads} heads are counted in 32 bits"
        );
        let len = 1 << 16;
        Ok(Batch {
            device: device.clone(),
            kinds,
            slots,
            stages: Stages::new(device, len)?,
            words: Buffer::new(device, "a step's blocks", len)?,
            rows,
            cut: Cut::Narrow,
            spare: 0..0,
            copies: (0, 0),
            partials: Buffer::new(device, "attention", slots * width)?,
            states: Buffer::new(device, "attention", slots * heads * 2)?,
            attended: Buffer::new(device, "attention", rows * width)?,
        })
    }

    /// Lends blocks of the pool, which no sequence has, for paths of trees: a step needs [`tree_blocks`] of each.
    pub fn lend(&mut self, spare: Range<u32>) {
        self.spare = spare;
    }

    /// Bytes of device memory that [`Batch::new`] takes, but for what grows with the contexts (4 bytes per block).
    pub fn bytes(layers: &[Shape], rows: usize) -> usize {
        let (slots, width, heads) = sizes(layers, rows);
        4 * (slots * width + slots * heads * 2 + rows * width)
    }

    /// Describes the next step to the device, in the order of the stream: rows of the chunks in order, then rows up to
    /// `m` that belong to nobody. Returns whether the addresses changed, which makes recorded graphs useless; a graph
    /// also serves only steps of the same [`Batch::cut`].
    pub fn set(&mut self, chunks: &[Chunk], m: usize) -> Result<bool, CudaError> {
        assert!(m <= self.rows, "{m} rows of {}", self.rows);
        let lines = lines(chunks, self.spare.clone());
        self.cut = Cut::of(&lines.lines);
        let (words, copies) = describe(&self.kinds, &lines, m, self.slots, self.device.info().processors);
        self.copies = (copies, lines.copies.len());
        let moved = words.len() > self.words.len();
        if moved {
            let len = words.len().next_power_of_two();
            self.device.synchronize()?;
            // All or nothing: a failure leaves what was there.
            let words = Buffer::new(&self.device, "a step's blocks", len)?;
            self.stages = Stages::new(&self.device, len)?;
            self.words = words;
        }
        self.stages.send(&mut self.words, 0, words.len(), |to| to.copy_from_slice(&words))?;
        Ok(moved)
    }

    /// u32 `[m]`: where keys and values of each row go, for [`Ops::rope_append`](super::ops::Ops::rope_append).
    pub fn places(&self) -> DevicePtr {
        self.words.at(header(self.kinds.len()))
    }

    /// Tokens of paths that have to be copied in each layer before its attention: pairs of places, and how many; for
    /// [`Ops::copy_slots`](super::ops::Ops::copy_slots). `None`: nothing.
    pub fn copies(&self) -> Option<(DevicePtr, usize)> {
        let (at, count) = self.copies;
        (count > 0).then(|| (self.words.at(at), count))
    }

    /// How the step is cut that was set last.
    pub fn cut(&self) -> Cut {
        self.cut
    }

    pub(super) fn words(&self) -> DevicePtr {
        self.words.ptr()
    }

    /// Kind of a layer. Panics if [`Batch::new`] was not told of it.
    pub(super) fn kind(&self, layer: &Shape) -> usize {
        let same = |k: &Shape| k.group() == layer.group() && k.window == layer.window;
        self.kinds.iter().position(same).expect("a layer of the model")
    }

    /// Rows there is room for.
    pub fn rows(&self) -> usize {
        self.rows
    }
}

/// Slots, widest row of heads, most heads.
fn sizes(layers: &[Shape], rows: usize) -> (usize, usize, usize) {
    let width = layers.iter().map(|l| l.heads * l.head_dim).max().unwrap_or(0);
    let heads = layers.iter().map(|l| l.heads).max().unwrap_or(0);
    (rows.max(SLOTS), width, heads)
}

/// (row, slot) pairs at least: what a few rows in front of long contexts are cut into.
const SLOTS: usize = 2048;

fn header(kinds: usize) -> usize {
    4 + 4 * kinds
}

fn first_seen(pos: usize, window: Option<usize>) -> usize {
    window.map_or(0, |w| (pos + 1).saturating_sub(w))
}

/// Rows as the kernels see them: behind each other in one table.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Line {
    rows: usize,
    /// Last token that the first row sees.
    first: usize,
    /// 1: each row sees one token more than the row before; 0: all the same.
    step: usize,
    /// Which table.
    table: usize,
}

impl Line {
    /// Last token that a row sees.
    fn last(&self, row: usize) -> usize {
        self.first + row * self.step
    }
}

/// Chunks as the kernels see them.
struct Lines<'a> {
    lines: Vec<Line>,
    /// Blocks.
    tables: Vec<Cow<'a, [u32]>>,
    /// Where keys and values of each row go.
    places: Vec<u32>,
    /// Tokens that have to be copied, from place to place.
    copies: Vec<[u32; 2]>,
}

/// What the chunks are for the kernels. Rows of a tree whose path does not lie in the chunk's first slots get a table in
/// which it does, as in a plain sequence: from the path's first block that is not the sequence's own on, blocks are
/// lent, and tokens are copied there. Rows of one path share a table.
fn lines<'a>(chunks: &[Chunk<'a>], mut spare: Range<u32>) -> Lines<'a> {
    let mut all = Lines { lines: vec![], tables: vec![], places: vec![], copies: vec![] };
    for chunk in chunks {
        let place = |slot: usize| chunk.blocks[slot / BLOCK] * BLOCK as u32 + (slot % BLOCK) as u32;
        all.places.extend((chunk.start..chunk.start + chunk.rows).map(place));
        let own = all.tables.len();
        let end = (chunk.start + chunk.rows).div_ceil(BLOCK);
        all.tables.push(Cow::Borrowed(&chunk.blocks[..end]));
        let Mask::Tree(masks) = chunk.mask else {
            let full = chunk.mask == Mask::Full;
            let (first, step) = if full { (chunk.start + chunk.rows - 1, 0) } else { (chunk.start, 1) };
            all.lines.push(Line { rows: chunk.rows, first, step, table: own });
            continue;
        };
        let paths = Paths::of(masks);
        for &end in &paths.ends {
            let path: Vec<usize> = chunk.mask.path(end).collect();
            let blocks = own_blocks(masks[end], chunk.start);
            let mut table = chunk.blocks[..blocks.start].to_vec();
            for block in blocks {
                let lent = spare.next().expect("the caller cut the plan by the blocks that there are");
                table.push(lent);
                for token in block * BLOCK..((block + 1) * BLOCK).min(chunk.start + path.len()) {
                    let from = token.checked_sub(chunk.start).map_or(token, |depth| chunk.start + path[depth]);
                    all.copies.push([place(from), lent * BLOCK as u32 + (token % BLOCK) as u32]);
                }
            }
            all.tables.push(Cow::Owned(table));
        }
        let lines = all.lines.len();
        for row in 0..chunk.rows {
            let first = chunk.start + chunk.mask.depth(row);
            let table = own + paths.of[row].map_or(0, |path| 1 + path);
            match all.lines[lines..].last_mut() {
                Some(line) if line.table == table && line.last(line.rows) == first => line.rows += 1,
                _ => all.lines.push(Line { rows: 1, first, step: 1, table }),
            }
        }
    }
    all
}

/// Paths of a tree that do not lie in its first slots one behind the other.
struct Paths {
    /// Last row of each.
    ends: Vec<usize>,
    /// On which of them each row lies; none: where it is, it lies right.
    of: Vec<Option<usize>>,
}

impl Paths {
    fn of(masks: &[u64]) -> Paths {
        let mut paths = Paths { ends: vec![], of: vec![None; masks.len()] };
        for (row, &mask) in masks.iter().enumerate().rev() {
            if mask.trailing_ones() as usize == row + 1 {
                continue;
            }
            let with = paths.ends.iter().position(|&end| masks[end] >> row & 1 == 1);
            paths.of[row] = with.or(Some(paths.ends.len()));
            if with.is_none() {
                paths.ends.push(row);
            }
        }
        paths
    }
}

/// Blocks of a path's own: from that of its first token on which does not lie where it would in a plain sequence.
fn own_blocks(mask: u64, start: usize) -> Range<usize> {
    (start + mask.trailing_ones() as usize) / BLOCK..(start + mask.count_ones() as usize).div_ceil(BLOCK)
}

/// Lent blocks that a chunk at `start` with such a mask needs.
pub fn tree_blocks(mask: &Mask, start: usize) -> usize {
    let Mask::Tree(masks) = mask else { return 0 };
    Paths::of(masks).ends.iter().map(|&end| own_blocks(masks[end], start).len()).sum()
}

/// A part of the work: vectors from `vector` on of a chunk, in front of one split or of all.
struct Tile {
    chunk: usize,
    vector: usize,
    split: Option<usize>,
    /// Keys.
    cost: usize,
}

/// The words of the module's comment, and where the copies are.
fn describe(kinds: &[Shape], all: &Lines, m: usize, slots: usize, processors: usize) -> (Vec<u32>, usize) {
    let lines = &all.lines;
    let mut words = vec![0; header(kinds.len())];
    words.extend_from_slice(&all.places);
    let chunk_of = |(i, line): (usize, &Line)| std::iter::repeat_n(i as u32, line.rows);
    let mut row_chunks: Vec<u32> = lines.iter().enumerate().flat_map(chunk_of).collect();
    assert!(row_chunks.len() <= m, "{} rows of {m}", row_chunks.len());
    words.resize(header(kinds.len()) + m, NO_PLACE);
    row_chunks.resize(m, NONE);
    align(&mut words);
    let vectors = Cut::of(lines).vectors();
    (words[0], words[1], words[2]) = (m as u32, words.len() as u32, vectors as u32);
    words.append(&mut row_chunks);
    align(&mut words);
    let mut tables: Vec<usize> = vec![];
    for (kind, shape) in kinds.iter().enumerate() {
        let (tiles, placed) = cut(shape, lines, vectors, slots, processors);
        words[4 + 4 * kind + 2] = words.len() as u32;
        let mut first = 0;
        for (line, (partials, cut)) in lines.iter().zip(placed) {
            tables.push(words.len() + 3);
            let seen = shape.splits(line);
            let slots = if cut { seen.len() } else { 1 };
            let chunk = [first, line.rows, line.first, 0, partials, slots, seen.start, line.step];
            words.extend(chunk.map(|w| w as u32));
            first += line.rows;
        }
        (words[4 + 4 * kind], words[4 + 4 * kind + 1]) = (tiles.len() as u32, words.len() as u32);
        for tile in tiles {
            let split = tile.split.map_or(NONE, |s| s as u32);
            words.extend([tile.chunk as u32, tile.vector as u32, split, 0]);
        }
    }
    let copies = words.len();
    words.extend(all.copies.as_flattened());
    let mut at = vec![];
    for table in &all.tables {
        at.push(words.len() as u32);
        words.extend_from_slice(table);
    }
    for (place, line) in tables.into_iter().zip(lines.iter().cycle()) {
        words[place] = at[line.table];
    }
    (words, copies)
}

fn align(words: &mut Vec<u32>) {
    words.resize(words.len().next_multiple_of(4), 0);
}

/// Tiles of one kind, the costly first, and per chunk its first (row, slot) and whether its context is cut into splits:
/// it is where a tile in front of all of it would hold everything up, and there is room. Any cut gives the same bits.
fn cut(
    shape: &Shape,
    lines: &[Line],
    vectors: usize,
    room: usize,
    processors: usize,
) -> (Vec<Tile>, Vec<(usize, bool)>) {
    let group = shape.group();
    let keys = |line: &Line, vector: usize| {
        let last = (line.rows * group).min(vector + vectors) - 1;
        first_seen(line.last(vector / group), shape.window)..line.last(last / group) + 1
    };
    let whole = |line: &Line| (0..line.rows * group).step_by(vectors);
    let cost = |line: &Line| whole(line).map(|v| keys(line, v).len()).sum::<usize>();
    let total = lines.iter().map(cost).sum::<usize>() * shape.kv_heads;
    let mut left: usize = lines.iter().map(|l| l.rows).sum();
    let (mut tiles, mut placed, mut used) = (vec![], vec![], 0);
    for (i, chunk) in lines.iter().enumerate() {
        left -= chunk.rows;
        let slots = shape.splits(chunk).len();
        let longest = whole(chunk).map(|v| keys(chunk, v).len()).max().unwrap_or(0);
        let fits = used + chunk.rows * slots + left <= room;
        let cut = slots > 1 && fits && longest * BLOCKS_PER_PROCESSOR * processors > total;
        placed.push((used, cut));
        used += chunk.rows * if cut { slots } else { 1 };
        for vector in whole(chunk) {
            let keys = keys(chunk, vector);
            if !cut {
                tiles.push(Tile { chunk: i, vector, split: None, cost: keys.len() });
                continue;
            }
            for split in keys.start / SPLIT..(keys.end - 1) / SPLIT + 1 {
                let cost = keys.end.min((split + 1) * SPLIT) - keys.start.max(split * SPLIT);
                tiles.push(Tile { chunk: i, vector, split: Some(split), cost });
            }
        }
    }
    tiles.sort_by_key(|t| std::cmp::Reverse(t.cost));
    (tiles, placed)
}

/// Blocks of threads that a multiprocessor runs at once, about.
pub(super) const BLOCKS_PER_PROCESSOR: usize = 2;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::tree_mask;

    fn shape(group: usize, window: Option<usize>) -> Shape {
        Shape { heads: 2 * group, kv_heads: 2, head_dim: 64, window }
    }

    /// Every (row, head of the group, visible split) is covered once, whatever the cut.
    #[test]
    fn tiles_cover_what_rows_see_once() {
        let blocks: Vec<u32> = (0..200).collect();
        let chunk = |start, rows, mask| Chunk { start, rows, blocks: &blocks, mask };
        let causal =
            [(0, 1), (700, 33), (255, 2), (3000, 1), (1, 300)].map(|(start, rows)| (start, rows, Mask::Causal));
        let masks = tree_mask(&[None, Some(0), Some(0), Some(1), Some(2), None]);
        let masked = [(511, 6, Mask::Tree(&masks)), (250, 20, Mask::Full)];
        let chunks: Vec<Chunk> =
            causal.iter().chain(&masked).map(|&(start, rows, mask)| chunk(start, rows, mask)).collect();
        let all = lines(&chunks, 1000..1010);
        let chunks = &all.lines;
        for shape in [shape(1, None), shape(7, None), shape(64, Some(40)), shape(4, Some(512)), shape(3, Some(1))] {
            for (room, processors, vectors) in [(5000, 100, 64), (365, 100, 16), (400, 100, 64), (5000, 1, 16)] {
                let (tiles, placed) = cut(&shape, chunks, vectors, room, processors);
                let mut used = 0;
                for (chunk, (at, cut)) in chunks.iter().zip(&placed) {
                    assert_eq!(*at, used);
                    used += chunk.rows * if *cut { shape.splits(chunk).len() } else { 1 };
                }
                assert!(used <= room, "{used} of {room}");
                for (i, chunk) in chunks.iter().enumerate() {
                    for v in 0..chunk.rows * shape.group() {
                        let pos = chunk.last(v / shape.group());
                        let of = |t: &&Tile| t.chunk == i && (t.vector..t.vector + vectors).contains(&v);
                        let mut seen: Vec<_> = tiles.iter().filter(of).map(|t| t.split).collect();
                        if !placed[i].1 {
                            assert_eq!(seen, [None]);
                            continue;
                        }
                        seen.sort();
                        let sees = first_seen(pos, shape.window) / SPLIT..pos / SPLIT + 1;
                        let all: Vec<usize> = seen.iter().map(|s| s.expect("a split")).collect();
                        assert!(sees.clone().all(|s| all.contains(&s)), "{all:?}, {sees:?}");
                        assert!(all.windows(2).all(|w| w[0] + 1 == w[1]), "{all:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_long_context_is_cut_and_many_short_ones_are_not() {
        let blocks: Vec<u32> = (0..400).collect();
        let chunk = |start| Chunk { start, rows: 1, blocks: &blocks, mask: Mask::Causal };
        let (tiles, placed) = cut(&shape(4, None), &lines(&[chunk(5000)], 0..0).lines, 16, SLOTS, 100);
        assert_eq!((tiles.len(), placed[0].1), (20, true));
        let (tiles, placed) = cut(&shape(4, None), &lines(&[chunk(600); 300], 0..0).lines, 16, SLOTS, 100);
        assert_eq!((tiles.len(), placed[7]), (300, (7, false)));
    }

    #[test]
    fn the_words_say_where_everything_is() {
        let (a, b) = ([9, 8, 7], [3]);
        let chunk = |start, rows, blocks| Chunk { start, rows, blocks, mask: Mask::Causal };
        let all = lines(&[chunk(30, 4, &a[..]), chunk(2, 1, &b)], 0..0);
        let kinds = [shape(1, None), shape(2, Some(8))];
        let (w, _) = describe(&kinds, &all, 6, 100, 10);
        assert_eq!((w[0], w[2]), (6, 16));
        let places = header(2);
        assert_eq!(w[places..places + 6], [8 * 16 + 14, 8 * 16 + 15, 7 * 16, 7 * 16 + 1, 3 * 16 + 2, NO_PLACE]);
        assert_eq!(w[w[1] as usize..w[1] as usize + 6], [0, 0, 0, 0, 1, NONE]);
        for kind in 0..2 {
            let [tiles, at, of, _] = w[4 + 4 * kind..8 + 4 * kind] else { panic!() };
            assert_eq!((tiles, at % 4, of % 4), (2, 0, 0));
            assert_eq!(w[at as usize..at as usize + 8], [0, 0, NONE, 0, 1, 0, NONE, 0]);
            let second = &w[of as usize + 8..of as usize + 16];
            assert_eq!([second[0], second[1], second[2], second[4], second[5]], [4, 1, 2, 4, 1]);
            assert_eq!(w[second[3] as usize], 3);
            let first = w[of as usize + 3] as usize;
            assert_eq!(w[first..first + 3], a);
        }
    }

    /// Tables in which the paths of a tree lie one behind the other.
    #[test]
    fn paths_are_laid_out_in_lent_blocks() {
        let blocks = [9, 8, 7];
        // 0 1 2 are a chain in their own slots, 14 to 16; 3 hangs on 0, 4 on 3, 5 is another root.
        let masks = tree_mask(&[None, Some(0), Some(1), Some(0), Some(3), None]);
        let tree = Chunk { rows: 6, start: 14, blocks: &blocks, mask: Mask::Tree(&masks) };
        let plain = Chunk { rows: 1, start: 3, blocks: &[5], mask: Mask::Causal };
        assert_eq!(tree_blocks(&tree.mask, 14), 3);
        let all = lines(&[tree, plain], 20..23);
        let place = |block: u32, slot: u32| block * 16 + slot;
        assert_eq!(all.places[..3], [place(9, 14), place(9, 15), place(8, 0)]);
        assert_eq!(all.tables[..], [&[9, 8][..], &[20], &[21, 22], &[5]]);
        let line = |rows, first, table| Line { rows, first, step: 1, table };
        assert_eq!(all.lines, [line(3, 14, 0), line(2, 15, 2), line(1, 14, 1), line(1, 3, 3)]);
        let to = |block, slots: std::ops::Range<u32>| slots.map(move |slot| place(block, slot));
        let context = (0..14).map(|slot| place(9, slot));
        let from = context.clone().chain([place(8, 3)]).chain(context).chain([place(9, 14), place(8, 1), place(8, 2)]);
        let copies: Vec<[u32; 2]> =
            from.zip(to(20, 0..15).chain(to(21, 0..16)).chain(to(22, 0..1))).map(|(a, b)| [a, b]).collect();
        assert_eq!(all.copies, copies);
        let (words, at) = describe(&[shape(1, None)], &all, 8, 100, 10);
        assert_eq!(words[at..at + 2], copies[0]);
        assert_eq!(tree_blocks(&Mask::Full, 14) + tree_blocks(&Mask::Tree(&[1, 3, 7]), 14), 0);
    }
}
