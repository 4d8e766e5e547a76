//! Bytes of a mapped file on their way to the device: two pinned buffers, of which one is filled while the other is
//! copied, so that reading the disk and crossing the bus overlap.

use std::sync::Arc;

use super::{Buffer, CudaError, Device, stage::Stages};

/// Bytes of one of the two buffers.
const STAGE: usize = 4 << 20;

/// The way up.
pub struct Upload {
    device: Arc<Device>,
    stages: Stages<u8>,
    /// Bytes copied so far.
    done: usize,
    progress: Box<dyn FnMut(usize)>,
}

impl Upload {
    /// `progress` is told how many bytes are done, now and then.
    pub fn new(device: &Arc<Device>, progress: Box<dyn FnMut(usize)>) -> Result<Upload, CudaError> {
        Ok(Upload { device: device.clone(), stages: Stages::new(device, STAGE)?, done: 0, progress })
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
            self.stages.send(to, at, part.len(), |to| to.copy_from_slice(part))?;
            at += part.len();
            self.done += part.len();
            (self.progress)(self.done);
        }
        Ok(())
    }
}
