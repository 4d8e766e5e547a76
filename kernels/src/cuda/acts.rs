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
//! In both, columns from `k` to the stride are zero; the stride is a multiple of 64 and covers the padded columns of
//! every weight that reads the input. There is memory for `rows` rows; a step uses the first `m`.

use std::sync::Arc;

use half::f16;

use super::{Buffer, CudaError, Device, DevicePtr, Pod};

/// Which form the linear layers of a run read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// f16 and a power of two per row, tensor cores, f32 sums: the default.
    F16,
    /// f32 throughout: exact mode.
    F32,
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
}

impl Acts {
    /// Memory for `rows` rows of up to `columns` columns (the largest padded width of all readers).
    pub fn new(device: &Arc<Device>, form: Form, rows: usize, columns: usize) -> Result<Acts, CudaError> {
        let stride = columns.next_multiple_of(64);
        let cells = rows.saturating_mul(stride);
        let (halves, floats) = match form {
            Form::F16 => (cells, 0),
            Form::F32 => (0, cells),
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
        })
    }

    /// Bytes that [`Acts::new`] takes.
    pub fn bytes(form: Form, rows: usize, columns: usize) -> usize {
        let cells = rows.saturating_mul(columns.next_multiple_of(64));
        match form {
            Form::F16 => cells.saturating_mul(2) + cells / 4 + rows * 4,
            Form::F32 => cells.saturating_mul(4),
        }
    }

    /// As kernels that write rows take it.
    pub(super) fn args(&self) -> ActsArgs {
        ActsArgs {
            h: self.h.ptr(),
            factors: self.factors.ptr(),
            sums: self.sums.ptr(),
            x: self.x.ptr(),
            stride: self.stride as u32,
            unused: 0,
        }
    }
}

/// The struct `Acts` of `kernels/cuda/acts.h`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct ActsArgs {
    h: DevicePtr,
    factors: DevicePtr,
    sums: DevicePtr,
    x: DevicePtr,
    stride: u32,
    unused: u32,
}

// SAFETY: words of 64 bits, then two of 32: no padding.
unsafe impl Pod for ActsArgs {}
