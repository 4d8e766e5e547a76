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
//! tables: the blocks of each chunk
//! ```

use std::sync::Arc;

use super::{
    Buffer, CudaError, Device, DevicePtr,
    kv::{BLOCK, NO_PLACE},
    stage::Stages,
};

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

    /// Splits that the rows of a chunk see.
    fn splits(&self, chunk: &Chunk) -> std::ops::Range<usize> {
        first_seen(chunk.start, self.window) / SPLIT..(chunk.start + chunk.rows - 1) / SPLIT + 1
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
    fn of(chunks: &[Chunk]) -> Cut {
        if chunks.iter().all(|c| c.rows <= FEW) { Cut::Narrow } else { Cut::Wide }
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
    /// Position of the first.
    pub start: usize,
    /// Blocks of the sequence, at least up to the last row; those that no layer sees any more may be anything.
    pub blocks: &'a [u32],
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
            partials: Buffer::new(device, "attention", slots * width)?,
            states: Buffer::new(device, "attention", slots * heads * 2)?,
            attended: Buffer::new(device, "attention", rows * width)?,
        })
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
        self.cut = Cut::of(chunks);
        let words = describe(&self.kinds, chunks, m, self.slots, self.device.info().processors);
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

/// A part of the work: vectors from `vector` on of a chunk, in front of one split or of all.
struct Tile {
    chunk: usize,
    vector: usize,
    split: Option<usize>,
    /// Keys.
    cost: usize,
}

/// The words of the module's comment.
fn describe(kinds: &[Shape], chunks: &[Chunk], m: usize, slots: usize, processors: usize) -> Vec<u32> {
    let mut words = vec![0; header(kinds.len())];
    let mut row_chunks = vec![];
    for (i, chunk) in chunks.iter().enumerate() {
        for pos in chunk.start..chunk.start + chunk.rows {
            words.push(chunk.blocks[pos / BLOCK] * BLOCK as u32 + (pos % BLOCK) as u32);
            row_chunks.push(i as u32);
        }
    }
    assert!(row_chunks.len() <= m, "{} rows of {m}", row_chunks.len());
    words.resize(header(kinds.len()) + m, NO_PLACE);
    row_chunks.resize(m, NONE);
    align(&mut words);
    let vectors = Cut::of(chunks).vectors();
    (words[0], words[1], words[2]) = (m as u32, words.len() as u32, vectors as u32);
    words.append(&mut row_chunks);
    align(&mut words);
    let mut tables: Vec<usize> = vec![];
    for (kind, shape) in kinds.iter().enumerate() {
        let (tiles, placed) = cut(shape, chunks, vectors, slots, processors);
        words[4 + 4 * kind + 2] = words.len() as u32;
        let mut first = 0;
        for (chunk, (partials, cut)) in chunks.iter().zip(placed) {
            tables.push(words.len() + 3);
            let seen = shape.splits(chunk);
            let slots = if cut { seen.len() } else { 1 };
            words.extend([first, chunk.rows, chunk.start, 0, partials, slots, seen.start, 0].map(|w| w as u32));
            first += chunk.rows;
        }
        (words[4 + 4 * kind], words[4 + 4 * kind + 1]) = (tiles.len() as u32, words.len() as u32);
        for tile in tiles {
            let split = tile.split.map_or(NONE, |s| s as u32);
            words.extend([tile.chunk as u32, tile.vector as u32, split, 0]);
        }
    }
    for (i, chunk) in chunks.iter().enumerate() {
        let at = words.len() as u32;
        (0..kinds.len()).for_each(|kind| words[tables[kind * chunks.len() + i]] = at);
        words.extend_from_slice(&chunk.blocks[..(chunk.start + chunk.rows).div_ceil(BLOCK)]);
    }
    words
}

fn align(words: &mut Vec<u32>) {
    words.resize(words.len().next_multiple_of(4), 0);
}

/// Tiles of one kind, the costly first, and per chunk its first (row, slot) and whether its context is cut into splits:
/// it is where a tile in front of all of it would hold everything up, and there is room. Any cut gives the same bits.
fn cut(
    shape: &Shape,
    chunks: &[Chunk],
    vectors: usize,
    room: usize,
    processors: usize,
) -> (Vec<Tile>, Vec<(usize, bool)>) {
    let group = shape.group();
    let keys = |chunk: &Chunk, vector: usize| {
        let last = (chunk.rows * group).min(vector + vectors) - 1;
        first_seen(chunk.start + vector / group, shape.window)..chunk.start + last / group + 1
    };
    let whole = |chunk: &Chunk| (0..chunk.rows * group).step_by(vectors);
    let cost = |chunk: &Chunk| whole(chunk).map(|v| keys(chunk, v).len()).sum::<usize>();
    let total = chunks.iter().map(cost).sum::<usize>() * shape.kv_heads;
    let mut left: usize = chunks.iter().map(|c| c.rows).sum();
    let (mut tiles, mut placed, mut used) = (vec![], vec![], 0);
    for (i, chunk) in chunks.iter().enumerate() {
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

    fn shape(group: usize, window: Option<usize>) -> Shape {
        Shape { heads: 2 * group, kv_heads: 2, head_dim: 64, window }
    }

    /// Every (row, head of the group, visible split) is covered once, whatever the cut.
    #[test]
    fn tiles_cover_what_rows_see_once() {
        let blocks: Vec<u32> = (0..200).collect();
        let chunk = |start, rows| Chunk { start, rows, blocks: &blocks };
        let chunks = [chunk(0, 1), chunk(700, 33), chunk(255, 2), chunk(3000, 1), chunk(1, 300)];
        for shape in [shape(1, None), shape(7, None), shape(64, Some(40)), shape(4, Some(512)), shape(3, Some(1))] {
            for (room, processors, vectors) in [(5000, 100, 64), (337, 100, 16), (400, 100, 64), (5000, 1, 16)] {
                let (tiles, placed) = cut(&shape, &chunks, vectors, room, processors);
                let mut used = 0;
                for (chunk, (at, cut)) in chunks.iter().zip(&placed) {
                    assert_eq!(*at, used);
                    used += chunk.rows * if *cut { shape.splits(chunk).len() } else { 1 };
                }
                assert!(used <= room, "{used} of {room}");
                for (i, chunk) in chunks.iter().enumerate() {
                    for v in 0..chunk.rows * shape.group() {
                        let pos = chunk.start + v / shape.group();
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
        let one = [Chunk { start: 5000, rows: 1, blocks: &blocks }];
        let (tiles, placed) = cut(&shape(4, None), &one, 16, SLOTS, 100);
        assert_eq!((tiles.len(), placed[0].1), (20, true));
        let many = [Chunk { start: 600, rows: 1, blocks: &blocks }; 300];
        let (tiles, placed) = cut(&shape(4, None), &many, 16, SLOTS, 100);
        assert_eq!((tiles.len(), placed[7]), (300, (7, false)));
    }

    #[test]
    fn the_words_say_where_everything_is() {
        let (a, b) = ([9, 8, 7], [3]);
        let chunks = [Chunk { start: 30, rows: 4, blocks: &a }, Chunk { start: 2, rows: 1, blocks: &b }];
        let kinds = [shape(1, None), shape(2, Some(8))];
        let w = describe(&kinds, &chunks, 6, 100, 10);
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
}
