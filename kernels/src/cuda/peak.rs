//! What a device can do at most: bytes read and f16 products on tensor cores, a second.

use std::sync::Arc;

use super::{Args, Buffer, CudaError, Device, ptx};

const THREADS: usize = 256;

/// Bytes a second of one pass over `bytes` bytes of device memory, the best of some.
pub fn read_bandwidth(device: &Arc<Device>, bytes: usize) -> Result<f64, CudaError> {
    let vectors = bytes / 16;
    let mut from = Buffer::<[u32; 4]>::new(device, "a bandwidth probe", vectors)?;
    from.fill(1)?;
    let to = Buffer::<u32>::new(device, "a bandwidth probe", 1)?;
    let kernel = device.kernel(&ptx::PEAK, "read_all")?;
    let grid = 8 * device.info().processors;
    let mut best = 0f64;
    for _ in 0..TRIES {
        let mut args = Args::new().with(from.ptr()).with(vectors as u64).with(to.ptr());
        // SAFETY: the kernel's parameters, of buffers that live on.
        let ms = device.timed(|| unsafe { device.launch(&kernel, [grid, 1, 1], THREADS, 0, &mut args) })?;
        best = best.max(16.0 * vectors as f64 / (f64::from(ms) / 1e3));
    }
    Ok(best)
}

/// Multiply-adds a second of f16 tensor-core instructions with f32 sums, on registers, the best of some.
pub fn tensor_peak(device: &Arc<Device>, turns: u32) -> Result<f64, CudaError> {
    let to = Buffer::<f32>::new(device, "a tensor-core probe", 1)?;
    let kernel = device.kernel(&ptx::PEAK, "multiply_all")?;
    let grid = 4 * device.info().processors;
    let warps = (grid * THREADS / 32) as f64;
    let mut best = 0f64;
    for _ in 0..TRIES {
        let mut args = Args::new().with(turns).with(to.ptr());
        // SAFETY: the kernel's parameters, of a buffer that lives on.
        let ms = device.timed(|| unsafe { device.launch(&kernel, [grid, 1, 1], THREADS, 0, &mut args) })?;
        best = best.max(warps * f64::from(turns) * 8.0 * 2048.0 / (f64::from(ms) / 1e3));
    }
    Ok(best)
}

const TRIES: usize = 5;
