//! Numbers on their way to the device: two pinned copies, of which one is filled while the other is being sent.

use std::sync::Arc;

use super::{Buffer, CudaError, Device, Pinned, Pod, device::Event};

/// The two copies.
pub(super) struct Stages<T: Pod> {
    stages: [Stage<T>; 2],
    next: usize,
}

/// A copy on the host, and the moment after which it may be written again.
struct Stage<T: Pod> {
    values: Pinned<T>,
    copied: Event,
}

impl<T: Pod> Stage<T> {
    fn new(device: &Arc<Device>, len: usize) -> Result<Stage<T>, CudaError> {
        Ok(Stage { values: Pinned::new(device, len)?, copied: Event::new(device)? })
    }
}

impl<T: Pod> Stages<T> {
    /// For up to `len` values at a time.
    pub fn new(device: &Arc<Device>, len: usize) -> Result<Stages<T>, CudaError> {
        Ok(Stages { stages: [Stage::new(device, len)?, Stage::new(device, len)?], next: 0 })
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
        stage.copied.wait()?;
        fill(&mut stage.values[..len]);
        // SAFETY: the stage is next changed after its event, which comes after this copy.
        unsafe { to.write_async(at, &stage.values, len)? };
        stage.copied.record()
    }
}
