//! The driver API as cudarc calls it: results, errors that stay, graphs, and what can be set.
//!
//! All tests are one process with one device, so each holds it for itself and leaves it as it was.

#![allow(clippy::unwrap_used)]

use std::ffi::{CString, c_int, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::result::{
    ctx, device, event, free_sync, function, graph, init, launch_kernel, malloc_host, malloc_sync, mem_get_info,
    memcpy_dtoh_sync, memcpy_htod_async, memcpy_htod_sync, memset_d8_async, memset_d8_sync, module, occupancy,
    primary_ctx, stream,
};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUfunction_attribute as FunctionAttribute, CUresult};
use quern_vgpu::VirtualGpu;

static ONE: Mutex<()> = Mutex::new(());

/// The device with a fresh context.
struct Gpu {
    gpu: &'static VirtualGpu,
    device: sys::CUdevice,
    stream: sys::CUstream,
    _one: MutexGuard<'static, ()>,
}

impl Gpu {
    fn new(settings: &[(&str, &str)]) -> Gpu {
        let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let gpu = quern_vgpu::load();
        for (name, value) in [("memory", "1G"), ("cc", "8.0"), ("driver", "12080"), ("check", "off"), ("lost", "0")] {
            gpu.set(name, value);
        }
        for (name, value) in [("fail", ""), ("integrated", "0"), ("traffic", "off"), ("sms", "8")] {
            gpu.set(name, value);
        }
        settings.iter().for_each(|(name, value)| gpu.set(name, value));
        gpu.reports();
        gpu.stats();
        init().unwrap();
        let device = device::get(0).unwrap();
        // SAFETY: the device is one that was found.
        unsafe { ctx::set_current(primary_ctx::retain(device).unwrap()).unwrap() };
        let stream = stream::create(stream::StreamKind::NonBlocking).unwrap();
        Gpu { gpu, device, stream, _one: one }
    }

    fn buffer(&self, words: &[u32]) -> u64 {
        // SAFETY: a context is current.
        unsafe {
            let at = malloc_sync(words.len() * 4).unwrap();
            memcpy_htod_sync(at, words).unwrap();
            at
        }
    }

    fn read(&self, at: u64, words: usize) -> Vec<u32> {
        let mut found = vec![0; words];
        // SAFETY: a context is current; the driver checks the address.
        unsafe { memcpy_dtoh_sync(&mut found, at).unwrap() };
        found
    }

    fn module(&self, text: &str) -> Result<sys::CUmodule, CUresult> {
        let text = CString::new(text).unwrap();
        // SAFETY: PTX that ends with a zero.
        unsafe { module::load_data(text.as_ptr().cast()) }.map_err(|error| error.0)
    }

    fn kernel(&self, body: &str) -> sys::CUfunction {
        let module = self.module(&ptx(body)).unwrap();
        // SAFETY: the module was loaded.
        unsafe { module::get_function(module, c"k".into()) }.unwrap()
    }

    /// Launches `k(a, n)` with 32 threads.
    fn launch(&self, kernel: sys::CUfunction, a: u64, n: u32, grid: u32, dynamic: u32) -> Result<(), CUresult> {
        let mut params = [(&raw const a).cast_mut().cast::<c_void>(), (&raw const n).cast_mut().cast()];
        // SAFETY: the kernel has these parameters.
        unsafe { launch_kernel(kernel, (grid, 1, 1), (32, 1, 1), dynamic, self.stream, &mut params) }
            .map_err(|error| error.0)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        self.gpu.set("lost", "0");
        // SAFETY: it was retained once; nothing of the context is used any more.
        unsafe { primary_ctx::release(self.device).unwrap() };
        self.gpu.set("check", "off");
    }
}

/// A kernel `k(a, n)`: `%d2` is the address of the thread's word in `a`, `%r2` is n.
fn ptx(body: &str) -> String {
    format!(
        ".version 8.0\n.target sm_80\n.address_size 64\n.extern .shared .align 4 .b8 more[];\n.visible .entry k(.param .u64 a, .param .u32 n)\n{{
         .reg .b64 %d<9>; .reg .b32 %r<9>; .reg .pred %p<9>; ld.param.u64 %d1, [a]; ld.param.u32 %r2, [n];
         mov.u32 %r1, %tid.x; mad.wide.u32 %d2, %r1, 4, %d1;\n{body}\nret;\n}}\n"
    )
}

const ADD: &str = "ld.global.u32 %r3, [%d2]; add.u32 %r3, %r3, %r2; st.global.u32 [%d2], %r3;";

#[test]
fn what_the_device_is() {
    let gpu = Gpu::new(&[("memory", "3M"), ("cc", "8.9"), ("sms", "24"), ("integrated", "1"), ("driver", "12040")]);
    assert_eq!(device::get_count().unwrap(), 1);
    assert_eq!(device::get(1).unwrap_err().0, CUresult::CUDA_ERROR_INVALID_DEVICE);
    assert!(device::get_name(gpu.device).unwrap().contains("Virtual GPU"));
    // SAFETY: the device was found.
    unsafe {
        assert_eq!(device::total_mem(gpu.device).unwrap(), 3 << 20);
        for (attribute, want) in [
            (Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 8),
            (Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 9),
            (Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 24),
            (Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED, 1),
            (Attribute::CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32),
            (Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 101_376),
            (Attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1),
            (Attribute::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1),
        ] {
            assert_eq!(device::get_attribute(gpu.device, attribute).unwrap(), want, "{attribute:?}");
        }
        let mut version = 0;
        sys::cuDriverGetVersion(&mut version).result().unwrap();
        assert_eq!(version, 12_040);
    }
    assert_ne!(device::get_uuid(gpu.device).unwrap().bytes, [0; 16]);
}

#[test]
fn memory_is_counted_and_ends() {
    let gpu = Gpu::new(&[("memory", "1M")]);
    // SAFETY: a context is current; sizes fit.
    unsafe {
        let first = malloc_sync(600_000).unwrap();
        assert_eq!(malloc_sync(600_000).unwrap_err().0, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        assert_eq!(malloc_sync(0).unwrap_err().0, CUresult::CUDA_ERROR_INVALID_VALUE);
        let (free, total) = mem_get_info().unwrap();
        assert_eq!((total, total - free), (1 << 20, 600_064));
        assert_eq!(gpu.gpu.used(), 600_064);
        free_sync(first).unwrap();
        assert_eq!(free_sync(first).unwrap_err().0, CUresult::CUDA_ERROR_INVALID_VALUE);
        assert_eq!(gpu.gpu.used(), 0);
        let again = malloc_sync(1 << 20).unwrap();
        assert_eq!(memset_d8_sync(again, 1, (1 << 20) + 1).unwrap_err().0, CUresult::CUDA_ERROR_INVALID_VALUE);
        // A pointer of the host for one of the device, and the other way round.
        let host = [7u32; 4];
        let wrong = memcpy_htod_sync(host.as_ptr() as u64, &host).unwrap_err();
        assert_eq!(wrong.0, CUresult::CUDA_ERROR_INVALID_VALUE);
        assert_eq!(sys::cuMemcpyHtoD_v2(again, again as *const c_void, 4), CUresult::CUDA_ERROR_INVALID_VALUE);
    }
}

#[test]
fn copies_and_fills() {
    let gpu = Gpu::new(&[]);
    let at = gpu.buffer(&[1, 2, 3, 4]);
    // SAFETY: the bytes are there.
    unsafe {
        memset_d8_async(at + 4, 0xab, 4, gpu.stream).unwrap();
        sys::cuMemsetD32Async(at + 8, 77, 1, gpu.stream).result().unwrap();
        sys::cuMemcpyDtoDAsync_v2(at + 12, at, 4, gpu.stream).result().unwrap();
        memcpy_htod_async(at, &[9u32], gpu.stream).unwrap();
        stream::synchronize(gpu.stream).unwrap();
    }
    assert_eq!(gpu.read(at, 4), [9, 0xabab_abab, 77, 1]);
}

#[test]
fn modules_that_are_refused() {
    let gpu = Gpu::new(&[("driver", "12000")]);
    assert_eq!(gpu.module(&ptx(ADD).replace("8.0", "8.1")), Err(CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION));
    assert_eq!(gpu.module(&ptx(ADD).replace("sm_80", "sm_86")), Err(CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU));
    assert_eq!(gpu.module(&ptx(ADD).replace("sm_80", "sm_75a")), Err(CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU));
    assert_eq!(gpu.module(&ptx("what.is this;")), Err(CUresult::CUDA_ERROR_INVALID_PTX));
    assert_eq!(gpu.module("\x7fELF"), Err(CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU));
    let module = gpu.module(&ptx(ADD)).unwrap();
    // SAFETY: the module was loaded; the log has as many bytes as it says.
    unsafe {
        let missing = module::get_function(module, c"other".into()).unwrap_err();
        assert_eq!(missing.0, CUresult::CUDA_ERROR_NOT_FOUND);
        module::unload(module).unwrap();
        assert_eq!(module::unload(module).unwrap_err().0, CUresult::CUDA_ERROR_INVALID_HANDLE);
        let mut log = [0u8; 300];
        let mut options =
            [sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER, sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        let mut values = [log.as_mut_ptr().cast::<c_void>(), 300 as *mut c_void];
        let text = CString::new(ptx("what.is %r1, %r2;")).unwrap();
        let mut module = std::ptr::null_mut();
        let code =
            sys::cuModuleLoadDataEx(&mut module, text.as_ptr().cast(), 2, options.as_mut_ptr(), values.as_mut_ptr());
        assert_eq!(code, CUresult::CUDA_ERROR_INVALID_PTX);
        let log = String::from_utf8_lossy(&log[..values[1] as usize - 1]).into_owned();
        assert!(log.contains("PTX line 9") && log.contains("what.is %r1, %r2;"), "{log}");
    }
}

#[test]
fn variables_of_modules() {
    let gpu = Gpu::new(&[]);
    let text = ptx("ld.const.u32 %r4, [table+4]; st.global.u32 [%d1], %r4; st.global.u32 [place], %r4;")
        .replace(".visible .entry", ".const .u32 table[2] = {5, 6}; .global .u32 place;\n.visible .entry");
    let module = gpu.module(&text).unwrap();
    let at = gpu.buffer(&[0; 32]);
    // SAFETY: the module was loaded.
    unsafe {
        let kernel = module::get_function(module, c"k".into()).unwrap();
        gpu.launch(kernel, at, 0, 1, 0).unwrap();
        assert_eq!(gpu.read(at, 1), [6]);
        let (place, size) = module::get_global(module, c"place".into()).unwrap();
        assert_eq!((size, gpu.read(place, 1)), (4, vec![6]));
        let (table, _) = module::get_global(module, c"table".into()).unwrap();
        memcpy_htod_sync(table + 4, &[60u32]).unwrap();
        gpu.launch(kernel, at, 0, 1, 0).unwrap();
        assert_eq!(gpu.read(at, 1), [60]);
    }
}

#[test]
fn launches_within_limits() {
    let gpu = Gpu::new(&[]);
    let kernel = gpu.kernel(ADD);
    let at = gpu.buffer(&[1; 32]);
    gpu.launch(kernel, at, 5, 1, 0).unwrap();
    assert_eq!(gpu.read(at, 32), [6; 32]);
    assert_eq!(gpu.launch(kernel, at, 5, 0, 0), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    // More than 48 KiB must be asked for first.
    assert_eq!(gpu.launch(kernel, at, 5, 1, 49_153), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    let dynamic = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // SAFETY: the kernel was found.
    unsafe {
        let most = function::set_function_attribute(kernel, dynamic, 200_000).unwrap_err();
        assert_eq!(most.0, CUresult::CUDA_ERROR_INVALID_VALUE);
        function::set_function_attribute(kernel, dynamic, 100_000).unwrap();
        gpu.launch(kernel, at, 5, 1, 100_000).unwrap();
        let threads = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
        assert_eq!(function::get_function_attribute(kernel, threads).unwrap(), 1024);
        assert_eq!(occupancy::max_active_block_per_multiprocessor(kernel, 1024, 0).unwrap(), 2);
        assert_eq!(occupancy::max_active_block_per_multiprocessor(kernel, 32, 80_000).unwrap(), 2);
    }
    let wrong = 0x40 as sys::CUfunction;
    assert_eq!(gpu.launch(wrong, at, 5, 1, 0), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    assert_eq!(gpu.read(at, 1), [11]);
}

#[test]
fn a_kernels_error_stays_until_the_context_goes() {
    let out_of_bounds = "st.global.u32 [%d2+4096], %r2;";
    {
        let gpu = Gpu::new(&[]);
        let at = gpu.buffer(&[1; 32]);
        gpu.launch(gpu.kernel(out_of_bounds), at, 5, 1, 0).unwrap();
        // SAFETY: the stream was created.
        let found = unsafe { stream::synchronize(gpu.stream) }.unwrap_err();
        assert_eq!(found.0, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        assert!(found.to_string().contains("ILLEGAL_ADDRESS"), "{found}");
        assert_eq!(ctx::synchronize().unwrap_err().0, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        // SAFETY: it fails before it does anything.
        unsafe { assert_eq!(malloc_sync(4).unwrap_err().0, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS) };
        let reports = gpu.gpu.reports();
        assert!(reports[0].starts_with("out of bounds: a global store of 4 bytes"), "{reports:?}");
    }
    let gpu = Gpu::new(&[]);
    assert_eq!(gpu.read(gpu.buffer(&[3]), 1), [3]);
}

#[test]
fn a_mistake_can_be_an_error() {
    let racy = "mov.u32 %r4, more; st.shared.u32 [%r4], %r1; ld.shared.u32 %r5, [%r4]; st.global.u32 [%d2], %r5;";
    for (check, error) in [("off", None), ("on", None), ("fatal", Some(CUresult::CUDA_ERROR_LAUNCH_FAILED))] {
        let gpu = Gpu::new(&[("check", check)]);
        let at = gpu.buffer(&[1; 32]);
        gpu.launch(gpu.kernel(racy), at, 5, 1, 4).unwrap();
        assert_eq!(ctx::synchronize().err().map(|error| error.0), error, "{check}");
        assert_eq!(gpu.gpu.reports().iter().any(|report| report.starts_with("race: ")), check != "off");
    }
}

#[test]
fn unwritten_memory_is_found_on_the_way_to_the_host() {
    let gpu = Gpu::new(&[("check", "on")]);
    // SAFETY: the bytes are there.
    unsafe {
        let at = malloc_sync(64).unwrap();
        memset_d8_sync(at, 0, 16).unwrap();
        gpu.read(at, 4);
        assert_eq!(gpu.gpu.reports(), [""; 0]);
        gpu.read(at, 5);
        assert!(gpu.gpu.reports()[0].contains("byte 16 was never written"));
        // A copy of such bytes is no better.
        let other = malloc_sync(64).unwrap();
        sys::cuMemcpyDtoD_v2(other, at + 8, 16).result().unwrap();
        gpu.read(other, 2);
        assert_eq!(gpu.gpu.reports(), [""; 0]);
        gpu.read(other, 3);
        assert!(gpu.gpu.reports()[0].contains("byte 8 was never written"));
    }
}

#[test]
fn graphs_do_it_again() {
    let gpu = Gpu::new(&[]);
    let kernel = gpu.kernel(ADD);
    let at = gpu.buffer(&[1; 32]);
    // SAFETY: handles are those that were given.
    unsafe {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        stream::begin_capture(gpu.stream, mode).unwrap();
        let active = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE;
        assert_eq!(stream::is_capturing(gpu.stream).unwrap(), active);
        gpu.launch(kernel, at, 5, 1, 0).unwrap();
        memset_d8_async(at, 0, 4, gpu.stream).unwrap();
        // A second stream takes part after it waited for an event of the first.
        let other = stream::create(stream::StreamKind::NonBlocking).unwrap();
        let mark = event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).unwrap();
        event::record(mark, gpu.stream).unwrap();
        stream::wait_event(other, mark, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT).unwrap();
        memset_d8_async(at + 4, 1, 4, other).unwrap();
        event::record(mark, other).unwrap();
        stream::wait_event(gpu.stream, mark, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT).unwrap();
        let captured = stream::end_capture(gpu.stream).unwrap();
        assert_eq!(gpu.read(at, 2), [1, 1]);
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let executable = graph::instantiate(captured, flags).unwrap();
        graph::upload(executable, gpu.stream).unwrap();
        for _ in 0..2 {
            graph::launch(executable, gpu.stream).unwrap();
        }
        stream::synchronize(gpu.stream).unwrap();
        assert_eq!(gpu.read(at, 3), [0, 0x0101_0101, 11]);
        // Other parameters for the kernel.
        let mut count = 0;
        sys::cuGraphGetNodes(captured, std::ptr::null_mut(), &mut count).result().unwrap();
        assert_eq!(count, 3);
        let mut nodes = [std::ptr::null_mut(); 3];
        sys::cuGraphGetNodes(captured, nodes.as_mut_ptr(), &mut count).result().unwrap();
        let n = 100u32;
        let mut list = [(&raw const at).cast_mut().cast::<c_void>(), (&raw const n).cast_mut().cast()];
        let mut params: sys::CUDA_KERNEL_NODE_PARAMS = std::mem::zeroed();
        params.func = kernel;
        (params.gridDimX, params.gridDimY, params.gridDimZ) = (1, 1, 1);
        (params.blockDimX, params.blockDimY, params.blockDimZ) = (32, 1, 1);
        params.kernelParams = list.as_mut_ptr();
        sys::cuGraphExecKernelNodeSetParams_v2(executable, nodes[0], &params).result().unwrap();
        assert!(sys::cuGraphExecKernelNodeSetParams_v2(executable, nodes[1], &params).result().is_err());
        graph::launch(executable, gpu.stream).unwrap();
        assert_eq!(gpu.read(at, 3), [0, 0x0101_0101, 111]);
        graph::exec_destroy(executable).unwrap();
        graph::destroy(captured).unwrap();
        assert_eq!(graph::destroy(captured).unwrap_err().0, CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
}

#[test]
fn a_capture_fails_by_what_it_cannot_hold() {
    let gpu = Gpu::new(&[]);
    let at = gpu.buffer(&[1; 32]);
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    // SAFETY: handles are those that were given.
    unsafe {
        for call in 0..3 {
            stream::begin_capture(gpu.stream, mode).unwrap();
            let code = match call {
                0 => stream::synchronize(gpu.stream).unwrap_err().0,
                1 => malloc_sync(64).unwrap_err().0,
                _ => memset_d8_sync(at, 0, 4).unwrap_err().0,
            };
            assert_eq!(code, CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "{call}");
            let after = memset_d8_async(at, 0, 4, gpu.stream).unwrap_err().0;
            assert_eq!(after, CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
            let end = stream::end_capture(gpu.stream).unwrap_err().0;
            assert_eq!(end, CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
            memset_d8_async(at, 0, 4, gpu.stream).unwrap();
        }
    }
}

#[test]
fn events_and_streams() {
    let gpu = Gpu::new(&[]);
    // SAFETY: handles are those that were given, or wrong on purpose: they are numbers.
    unsafe {
        let (a, b) = (
            event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).unwrap(),
            event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).unwrap(),
        );
        assert_eq!(event::elapsed(a, b).unwrap_err().0, CUresult::CUDA_ERROR_INVALID_HANDLE);
        event::record(a, gpu.stream).unwrap();
        gpu.launch(gpu.kernel(ADD), gpu.buffer(&[1; 32]), 5, 1, 0).unwrap();
        event::record(b, gpu.stream).unwrap();
        event::synchronize(b).unwrap();
        assert!(event::query(b).is_ok());
        assert!(event::elapsed(a, b).unwrap() >= 0.0);
        event::destroy(a).unwrap();
        assert_eq!(event::record(a, gpu.stream).unwrap_err().0, CUresult::CUDA_ERROR_INVALID_HANDLE);
        let extra = stream::create(stream::StreamKind::Default).unwrap();
        stream::destroy(extra).unwrap();
        assert_eq!(stream::synchronize(extra).unwrap_err().0, CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
}

#[test]
fn threads_need_a_current_context() {
    let gpu = Gpu::new(&[]);
    let context = ctx::get_current().unwrap().unwrap() as usize;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(ctx::synchronize().unwrap_err().0, CUresult::CUDA_ERROR_INVALID_CONTEXT);
            // SAFETY: the context lives.
            unsafe { ctx::set_current(context as sys::CUcontext).unwrap() };
            ctx::synchronize().unwrap();
        });
    });
    drop(gpu);
}

#[test]
fn calls_fail_as_told() {
    let gpu = Gpu::new(&[("fail", "cuMemAlloc_v2:2:2")]);
    // SAFETY: a context is current.
    unsafe {
        malloc_sync(16).unwrap();
        assert_eq!(malloc_sync(16).unwrap_err().0, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        malloc_sync(16).unwrap();
    }
    let before = gpu.gpu.calls()["cuCtxSynchronize"];
    ctx::synchronize().unwrap();
    assert_eq!(gpu.gpu.calls()["cuCtxSynchronize"], before + 1);
    gpu.gpu.set("lost", "999");
    assert_eq!(ctx::synchronize().unwrap_err().0, CUresult::CUDA_ERROR_UNKNOWN);
    assert_eq!(device::get_count().unwrap_err().0, CUresult::CUDA_ERROR_UNKNOWN);
}

#[test]
fn kernels_reach_memory_of_the_host() {
    let gpu = Gpu::new(&[]);
    let kernel = gpu.kernel(ADD);
    let mut own = vec![1u32; 64];
    // SAFETY: the memory lives longer than its registration.
    unsafe {
        let pinned = malloc_host(128, sys::CU_MEMHOSTALLOC_DEVICEMAP).unwrap().cast::<u32>();
        for i in 0..32 {
            pinned.add(i).write(i as u32);
        }
        let mut at = 0;
        sys::cuMemHostGetDevicePointer_v2(&mut at, pinned.cast(), 0).result().unwrap();
        gpu.launch(kernel, at, 5, 1, 0).unwrap();
        assert_eq!(pinned.add(31).read(), 36);
        sys::cuMemFreeHost(pinned.cast()).result().unwrap();
        let flags: c_uint = 2;
        sys::cuMemHostRegister_v2(own.as_mut_ptr().cast(), 256, flags).result().unwrap();
        let twice = sys::cuMemHostRegister_v2(own.as_mut_ptr().cast(), 4, flags);
        assert_eq!(twice, CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        gpu.launch(kernel, own.as_mut_ptr() as u64, 5, 1, 0).unwrap();
        assert_eq!((own[31], own[32]), (6, 1));
        sys::cuMemHostUnregister(own.as_mut_ptr().cast()).result().unwrap();
        gpu.launch(kernel, own.as_mut_ptr() as u64, 5, 1, 0).unwrap();
    }
    assert_eq!(ctx::synchronize().unwrap_err().0, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
}

#[test]
fn what_is_counted() {
    let gpu = Gpu::new(&[("traffic", "on")]);
    // Every second word: twice the sectors that the bytes need; and shared memory at a stride of two.
    let body = "mad.wide.u32 %d3, %r1, 8, %d1; ld.global.u32 %r3, [%d3]; shl.b32 %r4, %r1, 3; mov.u32 %r5, more; add.u32 %r4, %r4, %r5;
        st.shared.u32 [%r4], %r3;";
    let at = gpu.buffer(&[0; 64]);
    gpu.launch(gpu.kernel(body), at, 0, 3, 256).unwrap();
    let stats = gpu.gpu.stats();
    let k = &stats["k"];
    let counts = ["launches", "ctas", "requests", "sectors", "ideal_sectors", "read", "unique_read", "unique_written"];
    assert_eq!(counts.map(|name| k.count(name)), [1, 3, 3, 24, 12, 3 * 128, 256, 0]);
    assert_eq!(["shared_requests", "shared_waves", "shared_ideal"].map(|name| k.count(name)), [3, 6, 3]);
    assert_eq!((k.class("ld.global"), k.class("st.shared"), k.class("mma")), (3, 3, 0));
    assert_eq!(k.count("thread_instructions"), 32 * k.count("warp_instructions"));
    assert_eq!(k.ratio("sectors", "ideal_sectors"), 2.0);
    assert!(gpu.gpu.stats().is_empty());
}

#[test]
fn names_of_errors_and_functions() {
    let _gpu = Gpu::new(&[]);
    let text = CUresult::CUDA_ERROR_OUT_OF_MEMORY.result().unwrap_err();
    assert_eq!(text.error_name().unwrap(), c"CUDA_ERROR_OUT_OF_MEMORY");
    assert_eq!(text.error_string().unwrap(), c"out of memory");
    let find = quern_vgpu::load().symbol(c"cuGetProcAddress_v2");
    type Find = unsafe extern "C" fn(*const std::ffi::c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> u32;
    // SAFETY: the function of this name has this type.
    unsafe {
        let find = std::mem::transmute::<*mut c_void, Find>(find);
        let (mut at, mut status) = (std::ptr::null_mut(), 9);
        assert_eq!((find(c"cuMemAlloc".as_ptr(), &mut at, 12_000, 0, &mut status), status), (0, 0));
        assert_eq!(at, quern_vgpu::load().symbol(c"cuMemAlloc_v2"));
        assert_eq!(find(c"cuNothing".as_ptr(), &mut at, 12_000, 0, &mut status), 500);
    }
}
