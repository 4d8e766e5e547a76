//! Memory of a device, and memory of the host that a device reads without a detour.

use std::{
    ffi::c_void,
    marker::PhantomData,
    ops::{Deref, DerefMut},
    sync::Arc,
};

use cudarc::driver::{result, sys};
use half::f16;

use super::{CudaError, Device, error::is_memory};

/// Values that are the same bytes on both sides.
///
/// # Safety
/// `repr(C)` or primitive, no padding that is read as a value, every bit pattern is valid.
pub unsafe trait Pod: Copy + Send + 'static {}

macro_rules! pod {
    ($($t:ty),*) => { $(
        // SAFETY: a primitive of which every bit pattern is valid.
        unsafe impl Pod for $t {}
    )* };
}
pod!(u8, i8, u16, u32, i32, u64, f32, f16, [u32; 4]);

/// An address on the device, as kernels take it. Copying it keeps nothing alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct DevicePtr(pub u64);

// SAFETY: a number.
unsafe impl Pod for DevicePtr {}

impl DevicePtr {
    /// No memory: an operand that is not there.
    pub const NULL: DevicePtr = DevicePtr(0);
}

/// `len` values in device memory, not initialised.
pub struct Buffer<T: Pod> {
    device: Arc<Device>,
    ptr: u64,
    len: usize,
    of: PhantomData<T>,
}

impl<T: Pod> Buffer<T> {
    /// Takes memory; `what` says what for if there is none. An empty buffer takes one value's room.
    pub fn new(device: &Arc<Device>, what: &'static str, len: usize) -> Result<Buffer<T>, CudaError> {
        device.bind()?;
        let bytes = len.max(1).saturating_mul(size_of::<T>());
        // SAFETY: a context is current; the memory is owned by the buffer from here on.
        let ptr = unsafe { result::malloc_sync(bytes) }.map_err(|e| {
            if !is_memory(&e) {
                return CudaError::call("cuMemAlloc", e);
            }
            let (free, total) = result::mem_get_info().unwrap_or((0, 0));
            CudaError::Memory { what, bytes, free, total }
        })?;
        Ok(Buffer { device: device.clone(), ptr, len, of: PhantomData })
    }

    /// Values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of value `at`, which may be the end.
    pub fn at(&self, at: usize) -> DevicePtr {
        assert!(at <= self.len, "value {at} of {}", self.len);
        DevicePtr(self.ptr + (at * size_of::<T>()) as u64)
    }

    /// Address of the first value.
    pub fn ptr(&self) -> DevicePtr {
        self.at(0)
    }

    /// Sets all bytes, in the order of the device's stream.
    pub fn fill(&mut self, byte: u8) -> Result<(), CudaError> {
        if self.is_empty() {
            return Ok(());
        }
        self.device.bind()?;
        // SAFETY: the range is this buffer's.
        unsafe { result::memset_d8_async(self.ptr, byte, self.len * size_of::<T>(), self.device.stream()) }
            .map_err(|e| CudaError::call("cuMemsetD8Async", e))
    }

    /// Copies `from` to the values from `at` on and waits for it.
    pub fn write(&mut self, at: usize, from: &[T]) -> Result<(), CudaError> {
        assert!(at + from.len() <= self.len, "{} values at {at} of {}", from.len(), self.len);
        self.device.bind()?;
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: the range is this buffer's, and `from` outlives the call, which ends when the copy has.
        unsafe { result::memcpy_htod_async(self.at(at).0, from, self.device.stream()) }
            .map_err(|e| CudaError::call("cuMemcpyHtoDAsync", e))?;
        self.device.synchronize()
    }

    /// Copies the values from `at` on to `to` and waits for it.
    pub fn read(&self, at: usize, to: &mut [T]) -> Result<(), CudaError> {
        assert!(at + to.len() <= self.len, "{} values at {at} of {}", to.len(), self.len);
        self.device.bind()?;
        if to.is_empty() {
            return Ok(());
        }
        // SAFETY: the range is this buffer's, and `to` outlives the call, which ends when the copy has.
        unsafe { result::memcpy_dtoh_async(to, self.at(at).0, self.device.stream()) }
            .map_err(|e| CudaError::call("cuMemcpyDtoHAsync", e))?;
        self.device.synchronize()
    }

    /// All values.
    pub fn to_vec(&self) -> Result<Vec<T>, CudaError>
    where
        T: Default,
    {
        let mut to = vec![T::default(); self.len];
        self.read(0, &mut to)?;
        Ok(to)
    }

    /// A buffer that holds `from`.
    pub fn of(device: &Arc<Device>, what: &'static str, from: &[T]) -> Result<Buffer<T>, CudaError> {
        let mut buffer = Buffer::new(device, what, from.len())?;
        buffer.write(0, from)?;
        Ok(buffer)
    }

    /// Copies pinned values to this buffer in the order of the stream, without waiting.
    ///
    /// # Safety
    /// `from` is not changed until the stream has got there.
    pub unsafe fn write_async(&mut self, at: usize, from: &Pinned<T>, len: usize) -> Result<(), CudaError> {
        assert!(at + len <= self.len && len <= from.len(), "{len} values at {at} of {}", self.len);
        self.device.bind()?;
        // SAFETY: both ranges were checked; the caller leaves `from` alone.
        unsafe { result::memcpy_htod_async(self.at(at).0, &from[..len], self.device.stream()) }
            .map_err(|e| CudaError::call("cuMemcpyHtoDAsync", e))
    }

    /// Copies values to pinned memory in the order of the stream, without waiting.
    ///
    /// # Safety
    /// `to` is neither read nor changed until the stream has got there.
    pub unsafe fn read_async(&self, at: usize, to: &mut Pinned<T>, len: usize) -> Result<(), CudaError> {
        assert!(at + len <= self.len && len <= to.len(), "{len} values at {at} of {}", self.len);
        self.device.bind()?;
        // SAFETY: both ranges were checked; the caller leaves `to` alone.
        unsafe { result::memcpy_dtoh_async(&mut to[..len], self.at(at).0, self.device.stream()) }
            .map_err(|e| CudaError::call("cuMemcpyDtoHAsync", e))
    }

    /// Copies values of a buffer, which may be this one, in the order of the stream; the ranges may not overlap.
    pub fn copy_within(&mut self, from: usize, to: usize, len: usize) -> Result<(), CudaError> {
        assert!(from + len <= self.len && to + len <= self.len, "{len} values from {from} to {to} of {}", self.len);
        assert!(from + len <= to || to + len <= from, "{len} values from {from} to {to} overlap");
        self.device.bind()?;
        let bytes = len * size_of::<T>();
        // SAFETY: both ranges are this buffer's and do not overlap.
        unsafe { result::memcpy_dtod_async(self.at(to).0, self.at(from).0, bytes, self.device.stream()) }
            .map_err(|e| CudaError::call("cuMemcpyDtoDAsync", e))
    }
}

impl<T: Pod> Drop for Buffer<T> {
    fn drop(&mut self) {
        // SAFETY: the memory is this buffer's; freeing waits for work that uses it. If the device is lost nothing is
        // left to free.
        let _ = self.device.bind().map(|()| unsafe { result::free_sync(self.ptr) });
    }
}

/// `len` values of host memory that the device reads and writes by itself; zero at first.
pub struct Pinned<T: Pod> {
    device: Arc<Device>,
    ptr: *mut T,
    len: usize,
}

// SAFETY: owned memory, shared by nobody.
unsafe impl<T: Pod> Send for Pinned<T> {}

impl<T: Pod> Pinned<T> {
    /// Takes memory.
    pub fn new(device: &Arc<Device>, len: usize) -> Result<Pinned<T>, CudaError> {
        device.bind()?;
        let bytes = len.max(1).saturating_mul(size_of::<T>());
        // SAFETY: a context is current; the memory is owned from here on.
        let ptr = unsafe { result::malloc_host(bytes, 0) }.map_err(|e| CudaError::call("cuMemHostAlloc", e))?;
        // SAFETY: `bytes` bytes are there.
        unsafe { std::ptr::write_bytes(ptr as *mut u8, 0, bytes) };
        Ok(Pinned { device: device.clone(), ptr: ptr as *mut T, len })
    }
}

impl<T: Pod> Deref for Pinned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `len` values, initialised; every bit pattern is valid.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }
}

impl<T: Pod> DerefMut for Pinned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }
}

impl<T: Pod> Drop for Pinned<T> {
    fn drop(&mut self) {
        // A copy may still be under way.
        let _ = self.device.synchronize();
        // SAFETY: the memory is this value's.
        let _ = unsafe { sys::cuMemFreeHost(self.ptr as *mut c_void) };
    }
}
