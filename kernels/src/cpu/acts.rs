//! Activations as the linear kernels read them: `m` rows of `k` columns, as f32, as int8, or both.
//!
//! **f32 form**: plain rows, `stride` apart; columns past `k` are zero up to the stride.
//!
//! **int8 form**: one scale per (row, block of 32 or 64 columns), values in -127..=127 rounded to
//! nearest even, scale = max|x| / 127. Blocks that hold no column below `k` do not exist: what they
//! would add is zero, so a kernel stops at [`Acts::blocks`] however far a weight's last group
//! reaches. A block whose max|x| is below 1e-35 counts as zero. A block that holds a NaN or an
//! infinity gets a NaN scale, which makes that row's results NaN and no other's.
//! Bytes: rows are taken [`MR`] at a time (the last rows `mb = m % MR`), block-major:
//! `byte(b, r, quad, kk) = b*m*B + (r/MR)*MR*B + (quad*mb + r%MR)*4 + kk`, so that one row is plain
//! and four rows are read as one stream. Scales and sums are `[blocks][m]`.
//! With blocks of 32, what the middle code 8 of int4 subtracts is kept ready as the start value of
//! 16-bit sums: `middles[blocks][m]` holds `-8 * sum` over the columns with `k % 4 < 2` (low 16
//! bits) and over the others (high 16 bits).
//!
//! Threads may fill different rows, or different blocks of a row, at the same time.

use super::buf::Buf;
use super::isa::Isa;
use quern_models::Scheme;

/// Rows of an activation block, and of a register tile.
pub const MR: usize = 4;

/// Largest |x| of a block that is quantized to zeros; below it 127 / max|x| could overflow.
pub(crate) const TINY: f32 = 1e-35;

/// Columns that share an activation scale. Measured on SmolLM2 with groups of 64 (ARCHITECTURE.md):
/// blocks of 64 double the divergence from exact mode and gain 3 % of prefill speed.
pub const BLOCK: usize = 32;

/// What a run uses as activations of integer weights. Float weights always take f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// One int8 scale per block of columns: the default.
    Int8,
    /// f32 rows and weights dequantized in f32 arithmetic: exact mode.
    F32,
}

/// Which forms an [`Acts`] holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Forms {
    /// f32 rows.
    pub floats: bool,
    /// int8 in blocks of this many columns: 32 or 64.
    pub block: Option<usize>,
}

impl Forms {
    /// What a weight of this scheme reads in this mode.
    pub fn of(scheme: Scheme, mode: Mode) -> Forms {
        match scheme {
            Scheme::Int { .. } if mode == Mode::Int8 => Forms { floats: false, block: Some(BLOCK) },
            _ => Forms { floats: true, block: None },
        }
    }

    /// What serves both, for weights that share an input: the smaller block divides both groups.
    pub fn and(self, other: Forms) -> Forms {
        let block = match (self.block, other.block) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        Forms { floats: self.floats || other.floats, block }
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
    /// Start value as the file's head describes it; meaningless for a block of 64.
    pub middle: i32,
}

impl Acts {
    /// Empty; nothing is allocated.
    pub fn new() -> Acts {
        Acts::default()
    }

    /// Makes room for `m` rows of `k` columns, all to be written again. Allocates only to grow.
    pub fn reset(&mut self, m: usize, k: usize, forms: Forms) {
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
        if let Some(block) = forms.block {
            assert!(block == 32 || block == 64, "activation block {block}: 32 or 64");
            let blocks = k.div_ceil(block);
            self.q.reserve(m * blocks * block);
            self.scales.reserve(m * blocks);
            self.sums.reserve(m * blocks);
            self.middles.reserve(m * blocks);
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

    /// Columns of an int8 block; 0 without the int8 form.
    #[inline]
    pub fn block(&self) -> usize {
        self.forms.block.unwrap_or(0)
    }

    /// int8 blocks of a row that hold a real column.
    #[inline]
    pub fn blocks(&self) -> usize {
        self.forms.block.map_or(0, |b| self.k.div_ceil(b))
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
        let Some(block) = self.forms.block else { return };
        for (i, x) in x.chunks(block).enumerate() {
            let mut padded = [0.0; 64];
            let x = if x.len() == block {
                x
            } else {
                padded[..x.len()].copy_from_slice(x);
                &padded[..block]
            };
            let b = at / block + i;
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

    /// Byte of the first quad of (row, block), and bytes from one quad to the next.
    #[inline]
    fn quads(&self, row: usize, b: usize) -> (usize, usize) {
        let (first, block) = (row / MR * MR, self.block());
        let mb = (self.m - first).min(MR);
        (b * self.m * block + first * block + row % MR * 4, mb * 4)
    }

    /// One int8 value.
    #[inline]
    pub fn int8(&self, row: usize, col: usize) -> i8 {
        assert!(row < self.m && col < self.blocks() * self.block());
        let (to, step) = self.quads(row, col / self.block());
        let in_block = col % self.block();
        // SAFETY: in range by the assertion; initialised, if only with zeros.
        unsafe { *self.q.ptr().add(to + in_block / 4 * step + in_block % 4) }
    }

    /// Scale and sum of one int8 block.
    #[inline]
    pub fn scale_and_sum(&self, row: usize, b: usize) -> (f32, i32) {
        assert!(row < self.m && b < self.blocks());
        let i = b * self.m + row;
        // SAFETY: in range by the assertion.
        unsafe { (*self.scales.ptr().add(i), *self.sums.ptr().add(i)) }
    }

    /// int8 values of rows `first..` (`first` a multiple of [`MR`]) in block `b`.
    #[inline]
    pub(crate) fn q_ptr(&self, first: usize, b: usize) -> *const i8 {
        self.q.ptr().wrapping_add((b * self.m + first) * self.block())
    }

    /// Scales of rows `row..` in block `b`.
    #[inline]
    pub(crate) fn scale_ptr(&self, row: usize, b: usize) -> *const f32 {
        self.scales.ptr().wrapping_add(b * self.m + row)
    }

    /// Sums of the int8 values of rows `row..` in block `b`.
    #[inline]
    pub(crate) fn sum_ptr(&self, row: usize, b: usize) -> *const i32 {
        self.sums.ptr().wrapping_add(b * self.m + row)
    }

    /// Start values of the sums of rows `row..` in block `b` of 32 columns.
    #[inline]
    pub(crate) fn middle_ptr(&self, row: usize, b: usize) -> *const i32 {
        self.middles.ptr().wrapping_add(b * self.m + row)
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
