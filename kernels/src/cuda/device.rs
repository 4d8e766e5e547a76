//! A device: its properties, its context, the one stream on which everything runs in order, events and graphs.

use std::{
    collections::HashMap,
    ffi::c_int,
    sync::{Arc, Mutex, PoisonError},
};

use cudarc::driver::{
    result::{self, stream::StreamKind},
    sys::{self, CUdevice_attribute as Attribute},
};

use super::{CudaError, Kernel, driver, module};

/// What there is to know of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Number, as in `cuda:0`.
    pub ordinal: usize,
    /// Name the driver gives.
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Bytes of memory.
    pub memory: usize,
    /// Streaming multiprocessors.
    pub processors: usize,
    /// Bytes of shared memory that one block of threads may ask for.
    pub shared: usize,
    /// The device computes in the host's memory (Jetson, GB10).
    pub integrated: bool,
    /// CUDA version the driver speaks, `1000 * major + 10 * minor`.
    pub driver: i32,
}

/// Oldest compute capability that the kernels run on.
pub(super) const CAPABILITY: (i32, i32) = (8, 0);

/// All devices, in the driver's order.
pub fn devices() -> Result<Vec<DeviceInfo>, CudaError> {
    let version = driver::init()?;
    let count = result::device::get_count().map_err(|e| CudaError::call("cuDeviceGetCount", e))?;
    (0..count).map(|ordinal| info(ordinal, version)).collect()
}

fn info(ordinal: c_int, driver: i32) -> Result<DeviceInfo, CudaError> {
    let device = result::device::get(ordinal).map_err(|e| CudaError::call("cuDeviceGet", e))?;
    // SAFETY: a device of this process.
    let attribute = |a| unsafe { result::device::get_attribute(device, a) };
    let attribute = |a| attribute(a).map_err(|e| CudaError::call("cuDeviceGetAttribute", e));
    Ok(DeviceInfo {
        ordinal: ordinal as usize,
        name: result::device::get_name(device).map_err(|e| CudaError::call("cuDeviceGetName", e))?,
        capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        // SAFETY: a device of this process.
        memory: unsafe { result::device::total_mem(device) }.map_err(|e| CudaError::call("cuDeviceTotalMem", e))?,
        processors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize,
        shared: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize,
        integrated: attribute(Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED)? != 0,
        driver,
    })
}

/// A device in use. Everything runs on one stream, in the order it was asked for.
pub struct Device {
    info: DeviceInfo,
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    modules: Mutex<HashMap<&'static str, module::Module>>,
}

// SAFETY: handles of the driver, which any thread may use once the context is current (`bind`).
unsafe impl Send for Device {}
// SAFETY: as above; the driver locks what it must.
unsafe impl Sync for Device {}

impl Device {
    /// Takes a device into use.
    pub fn open(ordinal: usize) -> Result<Arc<Device>, CudaError> {
        let all = devices()?;
        if all.is_empty() {
            return Err(CudaError::NoDevice);
        }
        let there = all.len();
        let info = all.into_iter().nth(ordinal).ok_or(CudaError::Ordinal { asked: ordinal, there })?;
        if info.capability < CAPABILITY {
            return Err(CudaError::OldDevice { ordinal, name: info.name, capability: info.capability });
        }
        let device = result::device::get(ordinal as c_int).map_err(|e| CudaError::call("cuDeviceGet", e))?;
        // SAFETY: a device of this process; released in `drop`.
        let context = unsafe { result::primary_ctx::retain(device) }
            .map_err(|e| CudaError::call("cuDevicePrimaryCtxRetain", e))?;
        // SAFETY: the context was just retained.
        unsafe { result::ctx::set_current(context) }.map_err(|e| CudaError::call("cuCtxSetCurrent", e))?;
        let stream =
            result::stream::create(StreamKind::NonBlocking).map_err(|e| CudaError::call("cuStreamCreate", e))?;
        Ok(Arc::new(Device { info, device, context, stream, modules: Mutex::default() }))
    }

    /// Its properties.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Free and total bytes of memory now. In the host's memory, what files have cached counts as free: the system gives
    /// it up for the device, too, but the driver does not say so.
    pub fn memory(&self) -> Result<(usize, usize), CudaError> {
        self.bind()?;
        let (free, total) = result::mem_get_info().map_err(|e| CudaError::call("cuMemGetInfo", e))?;
        let host = crate::memory::available().filter(|_| self.info.integrated);
        Ok((host.map_or(free, |host| free.max(host as usize).min(total)), total))
    }

    /// Makes the device the calling thread's; everything below begins with it.
    pub(super) fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context lives as long as `self`.
        unsafe { result::ctx::set_current(self.context) }.map_err(|e| CudaError::call("cuCtxSetCurrent", e))
    }

    pub(super) fn stream(&self) -> sys::CUstream {
        self.stream
    }

    /// Waits for everything that was asked for.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: the stream is this device's.
        unsafe { result::stream::synchronize(self.stream) }.map_err(|e| CudaError::call("cuStreamSynchronize", e))
    }

    /// A kernel of a module, which is loaded when it is first asked for.
    pub fn kernel(&self, ptx: &module::Ptx, name: &'static str) -> Result<Kernel, CudaError> {
        self.bind()?;
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if !modules.contains_key(ptx.name) {
            modules.insert(ptx.name, module::Module::load(ptx)?);
        }
        modules[ptx.name].kernel(name, self.info.shared)
    }

    /// Starts a kernel: `grid` blocks of `block` threads with `shared` bytes of dynamic shared memory each.
    ///
    /// # Safety
    /// `args` are the kernel's parameters in order, and every address among them is of live memory as large as the
    /// kernel's contract says, until the stream has got past this launch.
    pub unsafe fn launch(
        &self,
        kernel: &Kernel,
        grid: [usize; 3],
        block: usize,
        shared: usize,
        args: &mut super::Args,
    ) -> Result<(), CudaError> {
        self.bind()?;
        let [x, y, z] = grid.map(|g| u32::try_from(g).expect("a grid below 2^32"));
        let (grid, block) = ((x, y, z), (block as u32, 1, 1));
        // SAFETY: the caller's promise.
        unsafe { result::launch_kernel(kernel.function, grid, block, shared as u32, self.stream, args.pointers()) }
            .map_err(|e| CudaError::call(kernel.name, e))
    }

    /// Records what `f` launches instead of running it. What `f` allocates or waits for is an error.
    pub fn capture(self: &Arc<Self>, f: impl FnOnce() -> Result<(), CudaError>) -> Result<Graph, CudaError> {
        self.bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is this device's and nothing is being captured.
        unsafe { result::stream::begin_capture(self.stream, mode) }
            .map_err(|e| CudaError::call("cuStreamBeginCapture", e))?;
        let done = f();
        // SAFETY: capture began above.
        let graph = unsafe { result::stream::end_capture(self.stream) };
        if let (Err(_), Ok(graph)) = (&done, &graph) {
            // SAFETY: nobody else has the handle.
            let _ = unsafe { result::graph::destroy(*graph) };
        }
        done?;
        let graph = graph.map_err(|e| CudaError::call("cuStreamEndCapture", e))?;
        let mut exec = std::ptr::null_mut();
        // SAFETY: the graph is whole; flags 0.
        let status = unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0) }.result();
        // SAFETY: an instantiated graph does not need the one it was made of.
        let _ = unsafe { result::graph::destroy(graph) };
        status.map_err(|e| CudaError::call("cuGraphInstantiate", e))?;
        Ok(Graph { device: self.clone(), exec })
    }

    /// Milliseconds between two moments of the stream: `f` runs between them. Waits for the end.
    pub fn timed(&self, f: impl FnOnce() -> Result<(), CudaError>) -> Result<f32, CudaError> {
        self.bind()?;
        let event = || result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let fail = |e| CudaError::call("cuEvent", e);
        let (start, end) = (event().map_err(fail)?, event().map_err(fail)?);
        // SAFETY: events and stream live until the end of this function.
        unsafe { result::event::record(start, self.stream) }.map_err(fail)?;
        f()?;
        // SAFETY: as above.
        unsafe {
            result::event::record(end, self.stream).map_err(fail)?;
            result::event::synchronize(end).map_err(fail)?;
            let ms = result::event::elapsed(start, end).map_err(fail);
            let _ = (result::event::destroy(start), result::event::destroy(end));
            ms
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.bind().is_err() {
            return;
        }
        self.modules.lock().unwrap_or_else(PoisonError::into_inner).clear();
        // SAFETY: nothing uses the stream or the context any more: buffers and graphs hold an `Arc` of the device.
        unsafe {
            let _ = result::stream::destroy(self.stream);
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

/// A moment of the stream.
pub(super) struct Event {
    device: Arc<Device>,
    event: sys::CUevent,
}

// SAFETY: a handle of the driver.
unsafe impl Send for Event {}

impl Event {
    /// One that was never recorded: waiting for it is no wait.
    pub fn new(device: &Arc<Device>) -> Result<Event, CudaError> {
        device.bind()?;
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
            .map_err(|e| CudaError::call("cuEventCreate", e))?;
        Ok(Event { device: device.clone(), event })
    }

    /// It is when everything has been done that was asked for up to now.
    pub fn record(&self) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: event and stream are of this device.
        unsafe { result::event::record(self.event, self.device.stream) }
            .map_err(|e| CudaError::call("cuEventRecord", e))
    }

    /// Waits until it has been.
    pub fn wait(&self) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: an event of this device.
        unsafe { result::event::synchronize(self.event) }.map_err(|e| CudaError::call("cuEventSynchronize", e))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event is this value's.
        let _ = self.device.bind().map(|()| unsafe { result::event::destroy(self.event) });
    }
}

/// A recorded sequence of launches.
pub struct Graph {
    device: Arc<Device>,
    exec: sys::CUgraphExec,
}

// SAFETY: a handle of the driver.
unsafe impl Send for Graph {}

impl Graph {
    /// Runs it.
    ///
    /// # Safety
    /// Every address that was recorded is still of the memory it was of.
    pub unsafe fn launch(&self) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: graph and stream are of one device; the caller's promise.
        unsafe { result::graph::launch(self.exec, self.device.stream) }.map_err(|e| CudaError::call("cuGraphLaunch", e))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: the handle is this value's.
        let _ = self.device.bind().map(|()| unsafe { result::graph::exec_destroy(self.exec) });
    }
}
