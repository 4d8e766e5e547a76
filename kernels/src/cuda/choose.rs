//! Choosing tokens where the logits are, so that only tokens come back (`kernels/cuda/choose.cu`).
//!
//! The likeliest token, that is. A request that samples, or has penalties, biases or logprobs, gets its logits to the
//! host, where [`crate::sample`] chooses: its noise is compared in f64, whose logarithms differ between libraries.

use std::sync::Arc;

use super::{Args, Buffer, CudaError, Device, DevicePtr, Kernel, ptx};
use crate::sample::SampleError;

/// Threads and tokens of a block, as in the source.
const THREADS: usize = 256;
const PART: usize = 4096;
/// Bytes of a part's result.
const FOUND: usize = 16;

/// The kernels, and what they note in between.
pub struct Choose {
    device: Arc<Device>,
    parts: Kernel,
    rows: Kernel,
    vocab: usize,
    most: usize,
    found: Buffer<u8>,
}

impl Choose {
    /// For up to `rows` rows of `vocab` logits at a time.
    pub fn new(device: &Arc<Device>, rows: usize, vocab: usize) -> Result<Choose, CudaError> {
        Ok(Choose {
            device: device.clone(),
            parts: device.kernel(&ptx::CHOOSE, "best_of_parts")?,
            rows: device.kernel(&ptx::CHOOSE, "best_of_rows")?,
            vocab,
            most: rows,
            found: Buffer::new(device, "the likeliest tokens", Choose::bytes(rows, vocab))?,
        })
    }

    /// Bytes of device memory that it takes.
    pub fn bytes(rows: usize, vocab: usize) -> usize {
        rows * vocab.div_ceil(PART) * FOUND
    }

    /// The likeliest token of `rows` rows of logits, f32 `[rows][vocab]`, to `to`, u32 `[rows][4]`, which [`read`]
    /// understands.
    pub fn best(&self, logits: DevicePtr, rows: usize, to: DevicePtr) -> Result<(), CudaError> {
        assert!(rows <= self.most, "{rows} rows of {}", self.most);
        let parts = self.vocab.div_ceil(PART);
        let mut first = Args::new().with(logits).with(self.vocab as u32).with(self.found.ptr());
        let mut second = Args::new().with(self.found.ptr()).with(parts as u32).with(to);
        // SAFETY: the kernels' parameters; the caller keeps logits and result, which have the stated shapes.
        unsafe {
            self.device.launch(&self.parts, [parts, rows, 1], THREADS, 0, &mut first)?;
            self.device.launch(&self.rows, [rows, 1, 1], 32, 0, &mut second)
        }
    }
}

/// What [`Choose::best`] found in a row of `vocab` logits.
pub fn read([token, logit, nans, there]: [u32; 4], vocab: usize) -> Result<u32, SampleError> {
    if there == 0 {
        return Err(SampleError::NothingToChoose { vocab, nans: nans as usize });
    }
    if f32::from_bits(logit) == f32::INFINITY {
        return Err(SampleError::Infinite { token });
    }
    Ok(token)
}
