//! Numbers on their way to the device: two pinned copies, of which one is filled while the other is being sent.

use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::{Buffer, CudaError, Device, Pinned, Pod};

/// The two copies.
pub(super) struct Stages<T: Pod> {
    device: Arc<Device>,
    stages: [Stage<T>; 2],
    next: usize,
}

/// A copy on the host, and the event after which it may be written again.
struct Stage<T: Pod> {
    values: Pinned<T>,
    copied: sys::CUevent,
}

// SAFETY: a handle of the driver.
unsafe impl<T: Pod> Send for Stage<T> {}

impl<T: Pod> Stage<T> {
    fn new(device: &Arc<Device>, len: usize) -> Result<Stage<T>, CudaError> {
        let values = Pinned::new(device, len)?;
        let copied = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
            .map_err(|e| CudaError::call("cuEventCreate", e))?;
        Ok(Stage { values, copied })
    }
}

impl<T: Pod> Drop for Stage<T> {
    fn drop(&mut self) {
        // SAFETY: the event is this value's.
        let _ = unsafe { result::event::destroy(self.copied) };
    }
}

impl<T: Pod> Stages<T> {
    /// For up to `len` values at a time.
    pub fn new(device: &Arc<Device>, len: usize) -> Result<Stages<T>, CudaError> {
        Ok(Stages { device: device.clone(), stages: [Stage::new(device, len)?, Stage::new(device, len)?], next: 0 })
    }

    /// Sends `len` values, which `fill` writes, to those of `to` from `at` on, in the order of the stream. Waits only
    /// for the copy before the last.
    pub fn send(
        &mut self,
        to: &mut Buffer<T>,
        at: usize,
        len: usize,
        fill: impl FnOnce(&mut [T]),
    ) -> Result<(), CudaError> {
        let stage = &mut self.stages[self.next];
        self.next = 1 - self.next;
        self.device.bind()?;
        // SAFETY: an event of this device; one that was never recorded is done.
        unsafe { result::event::synchronize(stage.copied) }.map_err(|e| CudaError::call("cuEventSynchronize", e))?;
        fill(&mut stage.values[..len]);
        // SAFETY: the stage is next changed after its event, which comes after this copy.
        unsafe { to.write_async(at, &stage.values, len)? };
        // SAFETY: event and stream are of this device.
        unsafe { result::event::record(stage.copied, self.device.stream()) }
            .map_err(|e| CudaError::call("cuEventRecord", e))
    }
}
