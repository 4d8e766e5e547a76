//! Inputs of linear layers on the device: `m` rows of `k` columns, as the linear kernels read them.
//!
//! **f16 form** (the device's default mode): row `r` is `x[r] = 2^e * h[r]` with `h` in f16, rounded to nearest even.
//! The exponent is chosen per row so that the largest |h| is in `[256, 512)`: f16 then never overflows, whatever the
//! model's activations, and values down to 2^-32 of the largest keep some bits. Scaling by a power of two is exact.
//! Within every quad of columns the order is 0, 2, 1, 3: int4 codes are turned into f16 two at a time, from nibbles
//! 16 bits apart, which are those of columns 0 and 2 and those of 1 and 3.
//!
//! ```text
//! h:       f16 [rows][stride]
//! factors: f32 [rows]               2^e; NaN for a row that holds a NaN or an infinity
//! sums:    f32 [rows][stride / 16]  of the h of 16 columns, in any one fixed order (weights with minima need them)
//! ```
//!
//! **f32 form** (exact mode): `x: f32 [rows][stride]`, plain order.
//!
//! **int8 form** (the CPU's default mode): codes and a scale per row and block of columns, as [`crate::cpu::acts`] has
//! them, plain order. Blocks have 32 columns, or 16 for a weight whose group is no multiple of 32, and weights that no
//! integers stand for read f32; an input is kept in every form that a reader needs.
//!
//! ```text
//! q:      i8 [rows][stride]
//! levels: f32 [stride / block][rows, rounded up to a multiple of 2][2]  scale and sum of a block's codes
//! ```
//!
//! In all, columns from `k` to the stride are zero; the stride is a multiple of 64 and covers the padded columns of
//! every weight that reads the input. There is memory for `rows` rows; a step uses the first `m`.

use std::sync::Arc;

use half::f16;

use super::{Buffer, CudaError, Device, DevicePtr, Pod};
use crate::cpu::acts::{BLOCK, Forms, SMALL_BLOCK};

/// Everything that a weight may read in the int8 form.
pub(super) const ALL: Forms = Forms { floats: true, int8: true, int8_small: true };

/// Which form the linear layers of a run read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// f16 and a power of two per row, tensor cores, f32 sums: the default.
    F16,
    /// f32 throughout: exact mode.
    F32,
    /// int8 for weights of integers and e2m1 codes, exact sums of a block; f32 for others: the CPU's default mode.
    Int8,
}

/// Input of linear layers; a buffer to keep and reuse.
pub struct Acts {
    /// Which of the buffers below are used; the others have one value.
    pub form: Form,
    /// Rows there is memory for.
    pub rows: usize,
    /// Columns from one row to the next.
    pub stride: usize,
    /// `[rows][stride]`.
    pub h: Buffer<f16>,
    /// `[rows]`.
    pub factors: Buffer<f32>,
    /// `[rows][stride / 16]`.
    pub sums: Buffer<f32>,
    /// `[rows][stride]`.
    pub x: Buffer<f32>,
    /// Blocks of 32 columns.
    pub int8: Int8,
    /// Blocks of 16 columns.
    pub int8_small: Int8,
}

/// The int8 form in blocks of one size; empty if no reader needs it.
pub struct Int8 {
    /// `[rows][stride]`.
    pub q: Buffer<i8>,
    /// `[stride / block][rows, rounded up to a multiple of 2][2]`.
    pub levels: Buffer<f32>,
}

impl Int8 {
    fn new(device: &Arc<Device>, held: bool, rows: usize, stride: usize, block: usize) -> Result<Int8, CudaError> {
        let cells = if held { rows.saturating_mul(stride) } else { 0 };
        let levels = if held { (stride / block).saturating_mul(level_rows(rows)).saturating_mul(2) } else { 0 };
        let what = "activations";
        Ok(Int8 { q: Buffer::new(device, what, cells)?, levels: Buffer::new(device, what, levels)? })
    }
}

/// Rows that levels are laid out for: two of a block are copied at once.
fn level_rows(rows: usize) -> usize {
    rows.next_multiple_of(2)
}

impl Acts {
    /// Memory for `rows` rows of up to `columns` columns (the largest padded width of all readers); the int8 form with
    /// everything that any weight could read.
    pub fn new(device: &Arc<Device>, form: Form, rows: usize, columns: usize) -> Result<Acts, CudaError> {
        Acts::with(device, form, ALL, rows, columns)
    }

    /// The same; of the int8 form only what `held` names.
    pub fn with(device: &Arc<Device>, form: Form, held: Forms, rows: usize, columns: usize) -> Result<Acts, CudaError> {
        let stride = columns.next_multiple_of(64);
        let cells = rows.saturating_mul(stride);
        let (halves, floats, held) = match form {
            Form::F16 => (cells, 0, Forms::default()),
            Form::F32 => (0, cells, Forms::default()),
            Form::Int8 => (0, if held.floats { cells } else { 0 }, held),
        };
        let what = "activations";
        Ok(Acts {
            form,
            rows,
            stride,
            h: Buffer::new(device, what, halves)?,
            factors: Buffer::new(device, what, if form == Form::F16 { rows } else { 0 })?,
            sums: Buffer::new(device, what, halves / 16)?,
            x: Buffer::new(device, what, floats)?,
            int8: Int8::new(device, held.int8, rows, stride, BLOCK)?,
            int8_small: Int8::new(device, held.int8_small, rows, stride, SMALL_BLOCK)?,
        })
    }

    /// Bytes that [`Acts::with`] takes.
    pub fn bytes(form: Form, held: Forms, rows: usize, columns: usize) -> usize {
        let cells = rows.saturating_mul(columns.next_multiple_of(64));
        let levels = level_rows(rows).saturating_mul(columns.next_multiple_of(64));
        let part = |held: bool, bytes: usize| if held { bytes } else { 0 };
        match form {
            Form::F16 => cells.saturating_mul(2) + cells / 4 + rows * 4,
            Form::F32 => cells.saturating_mul(4),
            Form::Int8 => part(held.floats, cells.saturating_mul(4))
                .saturating_add(part(held.int8, cells.saturating_add(levels / BLOCK * 8)))
                .saturating_add(part(held.int8_small, cells.saturating_add(levels / SMALL_BLOCK * 8))),
        }
    }

    /// Whether a weight of this form finds what it reads; in the int8 form, in blocks of `block` columns.
    pub(super) fn serves(&self, form: Form, block: usize) -> bool {
        match form {
            Form::F16 => self.form == Form::F16,
            Form::F32 => !self.x.is_empty() || self.rows == 0,
            Form::Int8 => !self.blocks(block).q.is_empty() || self.rows == 0,
        }
    }

    /// The int8 form in blocks of a size.
    pub(super) fn blocks(&self, block: usize) -> &Int8 {
        if block == BLOCK { &self.int8 } else { &self.int8_small }
    }

    /// Rows that levels are laid out for.
    pub(super) fn level_rows(&self) -> usize {
        level_rows(self.rows)
    }

    /// As kernels that write rows take it.
    pub(super) fn args(&self) -> ActsArgs {
        ActsArgs {
            h: or_null(&self.h),
            factors: or_null(&self.factors),
            sums: or_null(&self.sums),
            x: or_null(&self.x),
            int8: [or_null(&self.int8.q), or_null(&self.int8.levels)],
            int8_small: [or_null(&self.int8_small.q), or_null(&self.int8_small.levels)],
            stride: self.stride as u32,
            rows: self.level_rows() as u32,
        }
    }
}

/// Address of a buffer, if there is anything in it.
pub(super) fn or_null<T: Pod>(buffer: &Buffer<T>) -> DevicePtr {
    if buffer.is_empty() { DevicePtr::NULL } else { buffer.ptr() }
}

/// The struct `Acts` of `kernels/cuda/acts.h`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct ActsArgs {
    h: DevicePtr,
    factors: DevicePtr,
    sums: DevicePtr,
    x: DevicePtr,
    int8: [DevicePtr; 2],
    int8_small: [DevicePtr; 2],
    stride: u32,
    rows: u32,
}

// SAFETY: words of 64 bits, then two of 32: no padding.
unsafe impl Pod for ActsArgs {}
