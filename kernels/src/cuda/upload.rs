//! Bytes of a mapped file on their way to the device: two pinned buffers, of which one is filled while the other is
//! copied, so that reading the disk and crossing the bus overlap.

use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::{Buffer, CudaError, Device, Pinned};

/// Bytes of one of the two buffers.
const STAGE: usize = 4 << 20;

/// The way up.
pub struct Upload {
    device: Arc<Device>,
    stages: [Stage; 2],
    next: usize,
    /// Bytes copied so far.
    done: usize,
    progress: Box<dyn FnMut(usize)>,
}

struct Stage {
    bytes: Pinned<u8>,
    copied: sys::CUevent,
}

impl Upload {
    /// `progress` is told how many bytes are done, now and then.
    pub fn new(device: &Arc<Device>, progress: Box<dyn FnMut(usize)>) -> Result<Upload, CudaError> {
        let stage = || -> Result<Stage, CudaError> {
            let bytes = Pinned::new(device, STAGE)?;
            let copied = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
                .map_err(|e| CudaError::call("cuEventCreate", e))?;
            Ok(Stage { bytes, copied })
        };
        Ok(Upload { device: device.clone(), stages: [stage()?, stage()?], next: 0, done: 0, progress })
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// A buffer that will hold `bytes` once the stream has got there. It may be used by later launches at once.
    pub fn put(&mut self, what: &'static str, bytes: &[u8]) -> Result<Buffer<u8>, CudaError> {
        let mut to = Buffer::new(&self.device, what, bytes.len())?;
        self.put_into(&mut to, 0, bytes)?;
        Ok(to)
    }

    /// The same into a part of a buffer.
    pub fn put_into(&mut self, to: &mut Buffer<u8>, at: usize, bytes: &[u8]) -> Result<(), CudaError> {
        let mut at = at;
        for part in bytes.chunks(STAGE) {
            let stage = &mut self.stages[self.next];
            self.next = 1 - self.next;
            self.device.bind()?;
            // SAFETY: an event of this device; one that was never recorded is done.
            unsafe { result::event::synchronize(stage.copied) }
                .map_err(|e| CudaError::call("cuEventSynchronize", e))?;
            stage.bytes[..part.len()].copy_from_slice(part);
            // SAFETY: the stage is next changed after its event, which comes after this copy.
            unsafe { to.write_async(at, &stage.bytes, part.len())? };
            // SAFETY: event and stream are of this device.
            unsafe { result::event::record(stage.copied, self.device.stream()) }
                .map_err(|e| CudaError::call("cuEventRecord", e))?;
            at += part.len();
            self.done += part.len();
            (self.progress)(self.done);
        }
        Ok(())
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let _ = self.device.synchronize();
        for stage in &self.stages {
            // SAFETY: the events are this value's.
            let _ = unsafe { result::event::destroy(stage.copied) };
        }
    }
}
