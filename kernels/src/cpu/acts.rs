//! Activations as the linear kernels read them: `m` rows of `k` columns, as f32, as int8, or both.
//!
//! **f32 form**: plain rows, `stride` apart; columns past `k` are zero up to the stride.
//!
//! **int8 form**: one scale per (row, block of columns), values in -127..=127 rounded to nearest
//! even, scale = max|x| / 127. Blocks that hold no column below `k` do not exist: what they would add
//! is zero, so a kernel stops at [`Int8::blocks`] however far a weight's last group reaches. A block
//! whose max|x| is below 1e-35 counts as zero. A block that holds a NaN or an infinity gets a NaN
//! scale, which makes that row's results NaN and no other's.
//! Bytes: rows are taken [`MR`] at a time (the last rows `mb = m % MR`), block-major:
//! `byte(b, r, quad, kk) = b*m*B + (r/MR)*MR*B + (quad*mb + r%MR)*4 + kk`, so that one row is plain
//! and four rows are read as one stream. Where the table's kernels read tiles of rows, and there are rows enough, they
//! are all plain instead: `byte(b, r, quad, kk) = (b*m + r)*B + quad*4 + kk`. Scales and sums are `[blocks][m]`.
//! What the middle code 8 of int4 subtracts is kept ready as the start value of 16-bit sums:
//! `middles[blocks][m]` holds `-8 * sum` over the columns with `k % 4 < 2` (low 16 bits) and over the
//! others (high 16 bits).
//!
//! Blocks have 32 columns, or 16 for a weight whose group is no multiple of 32; weights that need
//! either may share an input, which is then held in both. What a weight reads depends on the weight
//! alone, so its results never depend on what it shares an input with. Measured with AVX2: one size
//! takes 0.5 ns a value, both 1.3; for 2048 columns that is 2 % of the q, k and v of one row of a 1B
//! model, where blocks of 16 for all would cost nested int4 weights 40 % (46 against 80 GMAC/s).
//!
//! Threads may fill different rows, or different blocks of a row, at the same time.

use super::buf::Buf;
use super::isa::Isa;
use quern_models::{Mini, Scheme};

/// Rows of an activation block, and of a register tile.
pub const MR: usize = 4;

/// Rows that a kernel of plain rows reads at a time.
pub(crate) const TILE: usize = 16;

/// Largest |x| of a block that is quantized to zeros; below it 127 / max|x| could overflow.
pub(crate) const TINY: f32 = 1e-35;

/// Columns that share an activation scale. Measured on SmolLM2 with groups of 64 (ARCHITECTURE.md):
/// blocks of 64 double the divergence from exact mode and gain 3 % of prefill speed.
pub const BLOCK: usize = 32;

/// The same for a weight whose groups are no multiple of [`BLOCK`]: no block crosses a group.
pub const SMALL_BLOCK: usize = 16;

/// What a run uses as activations of integer weights and of e2m1 codes. Other weights always take f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// One int8 scale per block of columns: the default.
    Int8,
    /// f32 rows and weights dequantized in f32 arithmetic: exact mode.
    F32,
}

/// Columns of the activation blocks that a weight of this scheme reads in this mode; `None` where it
/// reads f32: in exact mode, and always by floats and e4m3 codes.
pub fn block(scheme: Scheme, mode: Mode) -> Option<usize> {
    let (_, group) = scheme.coded()?;
    match scheme {
        _ if mode == Mode::F32 => None,
        Scheme::Mini { kind: Mini::E4M3, .. } => None,
        _ => Some(if group.is_multiple_of(BLOCK) { BLOCK } else { SMALL_BLOCK }),
    }
}

/// Which forms an [`Acts`] holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Forms {
    /// f32 rows.
    pub floats: bool,
    /// int8 in blocks of [`BLOCK`] columns.
    pub int8: bool,
    /// int8 in blocks of [`SMALL_BLOCK`] columns.
    pub int8_small: bool,
}

impl Forms {
    /// What a weight of this scheme reads in this mode.
    pub fn of(scheme: Scheme, mode: Mode) -> Forms {
        let block = block(scheme, mode);
        Forms { floats: block.is_none(), int8: block == Some(BLOCK), int8_small: block == Some(SMALL_BLOCK) }
    }

    /// What serves both, for weights that share an input.
    pub fn and(self, other: Forms) -> Forms {
        Forms {
            floats: self.floats || other.floats,
            int8: self.int8 || other.int8,
            int8_small: self.int8_small || other.int8_small,
        }
    }
}

/// Input of linear layers; a buffer to keep and reuse.
#[derive(Default)]
pub struct Acts {
    m: usize,
    k: usize,
    forms: Forms,
    stride: usize,
    x: Buf<f32>,
    int8: Int8,
    int8_small: Int8,
}

/// The int8 form in blocks of one size.
#[derive(Default)]
pub struct Int8 {
    m: usize,
    block: usize,
    blocks: usize,
    /// All rows are plain.
    plain: bool,
    q: Buf<i8>,
    scales: Buf<f32>,
    sums: Buf<i32>,
    middles: Buf<i32>,
}

/// What the quantizer knows of a block besides its values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Quantum {
    pub scale: f32,
    pub sum: i32,
    /// Start value as the file's head describes it.
    pub middle: i32,
}

impl Acts {
    /// Empty; nothing is allocated.
    pub fn new() -> Acts {
        Acts::default()
    }

    /// Makes room for `m` rows of `k` columns, all to be written again with this table. Allocates only to grow.
    pub fn reset(&mut self, isa: &Isa, m: usize, k: usize, forms: Forms) {
        self.m = m;
        self.k = k;
        self.forms = forms;
        self.stride = 0;
        if forms.floats {
            // Rows a multiple of 4 KiB apart would all fall into the same sets of the L1 cache.
            self.stride = k.next_multiple_of(16);
            self.stride += if self.stride.is_multiple_of(512) { 16 } else { 0 };
            self.x.reserve(m * self.stride);
        }
        if forms.int8 {
            self.int8.reset(isa, m, k, BLOCK);
        }
        if forms.int8_small {
            self.int8_small.reset(isa, m, k, SMALL_BLOCK);
        }
    }

    /// Rows.
    pub fn m(&self) -> usize {
        self.m
    }

    /// Columns.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Forms that the rows are kept in.
    pub fn forms(&self) -> Forms {
        self.forms
    }

    /// The int8 form in blocks of `block` columns; panics if it is not held.
    #[inline]
    pub fn int8(&self, block: usize) -> &Int8 {
        let (held, form) = match block {
            BLOCK => (self.forms.int8, &self.int8),
            _ => (self.forms.int8_small && block == SMALL_BLOCK, &self.int8_small),
        };
        assert!(held, "activations are not held in blocks of {block}: {:?}", self.forms);
        form
    }

    /// Writes every row of `x`, `[m][k]`.
    pub fn write(&mut self, isa: &Isa, x: &[f32]) {
        assert_eq!(x.len(), self.m * self.k);
        for row in 0..self.m {
            // SAFETY: `&mut self`: nobody else touches any row.
            unsafe { self.write_row(isa, row, &x[row * self.k..(row + 1) * self.k]) }
        }
    }

    /// Writes one row, `[k]`, in every form.
    ///
    /// # Safety
    /// While this runs, nobody else reads or writes this row. Other rows are free to be written.
    pub unsafe fn write_row(&self, isa: &Isa, row: usize, x: &[f32]) {
        assert_eq!(x.len(), self.k);
        for (i, part) in x.chunks(64).enumerate() {
            // SAFETY: the caller's promise for the row covers its parts.
            unsafe { self.write_part(isa, row, i, part) }
        }
    }

    /// Writes columns `64 * part ..` of one row in every form: 64 of them, or what is left of `k`.
    ///
    /// # Safety
    /// While this runs, nobody else reads or writes these columns of this row.
    pub unsafe fn write_part(&self, isa: &Isa, row: usize, part: usize, x: &[f32]) {
        let at = part * 64;
        assert!(row < self.m && at < self.k && x.len() == (self.k - at).min(64));
        if self.forms.floats {
            // The last part also clears what is left of the stride.
            let last = at + 64 >= self.k;
            let clear = if last { self.stride - at - x.len() } else { 0 };
            // SAFETY: all of it lies in this row, in columns that are the caller's alone.
            unsafe {
                let to = self.x.ptr().add(row * self.stride + at);
                std::ptr::copy_nonoverlapping(x.as_ptr(), to, x.len());
                std::ptr::write_bytes(to.add(x.len()), 0, clear);
            }
        }
        for (held, form) in [(self.forms.int8, &self.int8), (self.forms.int8_small, &self.int8_small)] {
            if held {
                // SAFETY: the caller's promise for the columns covers their blocks.
                unsafe { form.write(isa, row, at / form.block, x) }
            }
        }
    }

    /// Elements from one f32 row to the next.
    #[inline]
    pub(crate) fn stride(&self) -> usize {
        self.stride
    }

    /// f32 row, readable for `k` rounded up to 16 columns.
    #[inline]
    pub(crate) fn row_ptr(&self, row: usize) -> *const f32 {
        self.x.ptr().wrapping_add(row * self.stride)
    }
}

impl Int8 {
    fn reset(&mut self, isa: &Isa, m: usize, k: usize, block: usize) {
        let blocks = k.div_ceil(block);
        (self.m, self.block, self.blocks) = (m, block, blocks);
        self.plain = (isa.plain)(m);
        // A tile of plain rows is read whole, past the last one.
        self.q.reserve((m * blocks + if self.plain { TILE } else { 0 }) * block);
        self.scales.reserve(m * blocks);
        self.sums.reserve(m * blocks);
        self.middles.reserve(m * blocks);
    }

    /// Quantizes blocks `b..` of one row, as many as `x` has.
    ///
    /// # Safety
    /// While this runs, nobody else reads or writes these blocks of this row, which exist.
    unsafe fn write(&self, isa: &Isa, row: usize, b: usize, x: &[f32]) {
        for (b, x) in (b..).zip(x.chunks(self.block)) {
            let mut padded = [0.0; BLOCK];
            let x = if x.len() == self.block {
                x
            } else {
                padded[..x.len()].copy_from_slice(x);
                &padded[..self.block]
            };
            let (to, step) = self.quads(row, b);
            // SAFETY: `x` has `block` columns; the quads of (row, b) lie in `q`, for the caller
            // alone; an Isa exists only where its instructions do.
            unsafe {
                let quantum = (isa.quantize)(x, self.q.ptr().add(to), step);
                *self.scales.ptr().add(b * self.m + row) = quantum.scale;
                *self.sums.ptr().add(b * self.m + row) = quantum.sum;
                *self.middles.ptr().add(b * self.m + row) = quantum.middle;
            }
        }
    }

    /// Rows.
    #[inline]
    pub fn m(&self) -> usize {
        self.m
    }

    /// Columns of a block.
    #[inline]
    pub fn block(&self) -> usize {
        self.block
    }

    /// Blocks of a row that hold a real column.
    #[inline]
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Byte of the first quad of (row, block), and bytes from one quad to the next.
    #[inline]
    fn quads(&self, row: usize, b: usize) -> (usize, usize) {
        if self.plain {
            return ((b * self.m + row) * self.block, 4);
        }
        let first = row / MR * MR;
        let mb = (self.m - first).min(MR);
        ((b * self.m + first) * self.block + row % MR * 4, mb * 4)
    }

    /// One value.
    #[inline]
    pub fn value(&self, row: usize, col: usize) -> i8 {
        assert!(row < self.m && col < self.blocks * self.block);
        let (to, step) = self.quads(row, col / self.block);
        let in_block = col % self.block;
        // SAFETY: in range by the assertion; initialised, if only with zeros.
        unsafe { *self.q.ptr().add(to + in_block / 4 * step + in_block % 4) }
    }

    /// Scale and sum of one block.
    #[inline]
    pub fn scale_and_sum(&self, row: usize, b: usize) -> (f32, i32) {
        assert!(row < self.m && b < self.blocks);
        let i = b * self.m + row;
        // SAFETY: in range by the assertion.
        unsafe { (*self.scales.ptr().add(i), *self.sums.ptr().add(i)) }
    }

    /// Rows are plain: a tile of [`TILE`] is readable from any of them.
    #[inline]
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub(crate) fn plain(&self) -> bool {
        self.plain
    }

    /// Values of rows `first..` in block `b`; if they are not plain, `first` is a multiple of [`MR`].
    #[inline]
    pub(crate) fn q_ptr(&self, first: usize, b: usize) -> *const i8 {
        self.q.ptr().wrapping_add((b * self.m + first) * self.block)
    }

    /// Scales of rows `row..` in block `b`.
    #[inline]
    pub(crate) fn scale_ptr(&self, row: usize, b: usize) -> *const f32 {
        self.scales.ptr().wrapping_add(b * self.m + row)
    }

    /// Sums of the values of rows `row..` in block `b`.
    #[inline]
    pub(crate) fn sum_ptr(&self, row: usize, b: usize) -> *const i32 {
        self.sums.ptr().wrapping_add(b * self.m + row)
    }

    /// Start values of the sums of rows `row..` in block `b`.
    #[inline]
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub(crate) fn middle_ptr(&self, row: usize, b: usize) -> *const i32 {
        self.middles.ptr().wrapping_add(b * self.m + row)
    }
}
