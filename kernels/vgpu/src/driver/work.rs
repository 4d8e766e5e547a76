//! What a stream does: launches, copies, fills. It is done at once, or becomes a node of a graph.
//!
//! A *lazy* device does it as late as it may: when somebody waits for it. Then what the host changes too early, or reads
//! before it is there, shows in the results, as it may on a real device and seldom does.
#![allow(non_snake_case)]

use std::ffi::{c_int, c_uint, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use super::module::{Function, function};
use super::{Code, Handle, INVALID_VALUE, NOT_SUPPORTED, State, api, device, put, state};
use crate::check::Reports;
use crate::check::global::{Sharing, Touched};
use crate::exec::bytes::Bytes;
use crate::exec::launch::Launch;
use crate::exec::warp::Shape;
use crate::memory::TAG;
use crate::settings::settings;
use crate::stats::KernelStats;

/// One piece of work.
#[derive(Clone)]
pub enum Work {
    Kernel(Kernel),
    Copy(Copy),
    Fill { to: u64, value: u32, width: usize, count: usize },
    Nothing,
}

/// A launch with its parameters.
#[derive(Clone)]
pub struct Kernel {
    pub function: Arc<Function>,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub dynamic: u32,
    pub params: Vec<u8>,
}

/// A copy; where its sides are.
#[derive(Clone)]
pub struct Copy {
    to: u64,
    from: u64,
    bytes: usize,
    to_device: bool,
    from_device: bool,
}

/// Does work now, or notes it for the graph that the stream is captured into.
pub fn submit(stream: Handle, work: Work) -> Result<(), Code> {
    super::stream::check(stream)?;
    check(&work)?;
    let capture = {
        let mut state = state();
        let capture = state.capture_of(stream)?;
        if let Some(capture) = capture {
            let handle = state.handle();
            let node = super::graph::Node { handle, work: work.clone() };
            state.captures.get_mut(&capture).ok_or(INVALID_VALUE)?.nodes.push(node);
        }
        capture
    };
    if capture.is_some() { Ok(()) } else { begin(work) }
}

/// Does work that was looked at, now or when it is waited for.
pub fn begin(work: Work) -> Result<(), Code> {
    let lazy = settings().lazy;
    if !lazy {
        finish()?;
        return run(&work);
    }
    let mut state = state();
    if let Some(code) = state.sticky {
        return Err(code);
    }
    state.submitted += 1;
    state.queue.push_back(work);
    Ok(())
}

/// Does all work that waits.
pub fn finish() -> Result<(), Code> {
    let submitted = state().submitted;
    finish_until(submitted)
}

/// Does the first so many pieces of all work, of all streams, in the order in which it was submitted: one that all streams
/// allow.
pub fn finish_until(count: u64) -> Result<(), Code> {
    static TURN: Mutex<()> = Mutex::new(());
    // Who comes second waits for what the first one does.
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        let work = {
            let mut state = state();
            if state.done >= count {
                return Ok(());
            }
            state.done += 1;
            state.queue.pop_front()
        };
        if let Some(work) = work {
            run(&work)?;
        }
    }
}

/// Copies and fills that wait must not happen while something is captured.
fn submit_and_wait(work: Work) -> Result<(), Code> {
    super::stream::outside_of_captures()?;
    check(&work)?;
    finish()?;
    run(&work)
}

/// Looks at work before it is done.
pub fn check(work: &Work) -> Result<(), Code> {
    match work {
        Work::Kernel(kernel) => kernel.check(),
        Work::Copy(copy) => copy.check(&state()),
        Work::Fill { to, width, count, .. } => {
            let bytes = width.checked_mul(*count).ok_or(INVALID_VALUE)?;
            let found = state().memory.find(*to, bytes as u64).is_some();
            if found && to % *width as u64 == 0 { Ok(()) } else { Err(INVALID_VALUE) }
        }
        Work::Nothing => Ok(()),
    }
}

/// Does work.
pub fn run(work: &Work) -> Result<(), Code> {
    let _device = device();
    if let Some(code) = state().sticky {
        return Err(code);
    }
    match work {
        Work::Kernel(kernel) => kernel.run(),
        Work::Copy(copy) => copy.run(),
        Work::Fill { to, value, width, count } => {
            let memory = state().memory.clone();
            let bytes = width * count;
            let number = memory.find(*to, bytes as u64).ok_or(INVALID_VALUE)?;
            let block = &memory.blocks()[number];
            if let Some(written) = &block.written {
                written.mark(to - block.base, bytes as u64);
            }
            let pattern = value.to_le_bytes();
            // SAFETY: the bytes lie in a block, which cannot be freed while the device is held.
            let target = unsafe { std::slice::from_raw_parts_mut((to & !TAG) as *mut u8, bytes) };
            if *width == 1 {
                target.fill(pattern[0]);
            } else {
                for cell in target.chunks_exact_mut(*width) {
                    cell.copy_from_slice(&pattern[..*width]);
                }
            }
            Ok(())
        }
        Work::Nothing => Ok(()),
    }
}

impl Copy {
    fn check(&self, state: &State) -> Result<(), Code> {
        for (at, on_device) in [(self.to, self.to_device), (self.from, self.from_device)] {
            let known = state.memory.find(at, self.bytes as u64).is_some();
            // An address of the device where one of the host must be, and the other way round.
            if on_device && !known || !on_device && (at & TAG != 0 || at == 0 && self.bytes > 0) {
                return Err(INVALID_VALUE);
            }
        }
        Ok(())
    }

    fn run(&self) -> Result<(), Code> {
        if self.bytes == 0 {
            return Ok(());
        }
        let bytes = self.bytes as u64;
        let memory = state().memory.clone();
        let block = |at: u64| memory.find(at, bytes).map(|number| &memory.blocks()[number]);
        let (to, from) = (block(self.to), block(self.from));
        let from_watched = from.and_then(|block| Some((block, block.written.as_ref()?)));
        if let Some((to, written)) = to.and_then(|block| Some((block, block.written.as_ref()?))) {
            let at = self.to - to.base;
            match from_watched {
                // What was not written stays so in the copy.
                Some((from, source)) if source.missing(self.from - from.base, bytes).is_some() => {
                    for byte in 0..bytes {
                        match source.missing(self.from - from.base + byte, 1) {
                            Some(_) => written.clear(at + byte, 1),
                            None => written.mark(at + byte, 1),
                        }
                    }
                }
                _ => written.mark(at, bytes),
            }
        } else if let Some((from, source)) = from_watched
            && settings().checks
            && let Some(first) = source.missing(self.from - from.base, bytes)
        {
            let what = format!(
                "uninitialised: a copy to the host of {bytes} bytes at byte {} of an allocation of {}, of which byte {first} was never written",
                self.from - from.base,
                from.len
            );
            note(&mut state(), what);
        }
        // SAFETY: sides on the device lie in blocks that cannot be freed while the device is held; the caller answers
        // for those of the host.
        unsafe { std::ptr::copy((self.from & !TAG) as *const u8, (self.to & !TAG) as *mut u8, self.bytes) };
        Ok(())
    }
}

/// Keeps a report, and prints it.
fn note(state: &mut State, what: String) {
    eprintln!("vgpu: {what}");
    state.reports.push(what);
}

impl Kernel {
    fn check(&self) -> Result<(), Code> {
        let [gx, gy, gz] = self.grid;
        let [bx, by, bz] = self.block;
        let threads = u64::from(bx) * u64::from(by) * u64::from(bz);
        if gx == 0 || gy == 0 || gz == 0 || gx > i32::MAX as u32 || gy > 65_535 || gz > 65_535 {
            return Err(INVALID_VALUE);
        }
        if u64::from(gx) * u64::from(gy) * u64::from(gz) > u64::from(u32::MAX) {
            return Err(NOT_SUPPORTED);
        }
        if threads == 0 || bx > 1024 || by > 1024 || bz > 64 || threads > u64::from(self.function.most_threads()) {
            return Err(INVALID_VALUE);
        }
        if self.dynamic > self.function.most_dynamic() {
            return Err(INVALID_VALUE);
        }
        Ok(())
    }

    fn run(&self) -> Result<(), Code> {
        let (threads, checks, fatal, sharing, traffic, log, multiprocessors) = {
            let s = settings();
            (s.threads, s.checks, s.fatal, s.sharing, s.traffic, s.log, s.multiprocessors)
        };
        let memory = state().memory.clone();
        let kernel = self.function.kernel();
        let params = Bytes::from(self.params.as_slice());
        let launch = Launch {
            module: &self.function.module,
            kernel,
            shape: Shape {
                grid: self.grid,
                block: self.block,
                shared: kernel.shared_bytes as u32 + self.dynamic,
                dynamic: self.dynamic,
                multiprocessors,
            },
            params: &params,
            touched: (traffic || checks).then(|| Touched::new(&memory)),
            sharing: (checks && sharing).then(|| Sharing::new(&memory)),
            memory,
            checks,
            reports: Reports::default(),
        };
        let stats = launch.run(threads);
        let (found, mut code) = launch.reports.finish();
        let mut state = state();
        if log {
            log_launch(kernel.name.as_str(), self, &stats);
        }
        add(state.stats.entry(kernel.name.clone()).or_default(), stats);
        if fatal && !found.is_empty() {
            code = code.or(Some(719));
        }
        for what in found {
            note(&mut state, what);
        }
        match code {
            Some(code) => {
                state.sticky = Some(code);
                // The launch itself succeeds on a device; the error shows at the next call.
                Ok(())
            }
            None => Ok(()),
        }
    }
}

fn add(to: &mut KernelStats, more: KernelStats) {
    to.launches += more.launches;
    to.ctas += more.ctas;
    to.thread_instructions += more.thread_instructions;
    to.warp_instructions += more.warp_instructions;
    to.traffic.add(&more.traffic);
    to.unique_read += more.unique_read;
    to.unique_written += more.unique_written;
    to.nanoseconds += more.nanoseconds;
    for (class, count) in more.classes {
        *to.classes.entry(class).or_default() += count;
    }
}

fn log_launch(name: &str, kernel: &Kernel, stats: &KernelStats) {
    let milliseconds = stats.nanoseconds as f64 / 1e6;
    let rate = stats.thread_instructions as f64 * 1e3 / stats.nanoseconds.max(1) as f64;
    let each = stats.nanoseconds as f64 / stats.warp_instructions.max(1) as f64;
    let t = &stats.traffic;
    let ratio = |a: u64, b: u64| a as f64 / b.max(1) as f64;
    eprintln!(
        "vgpu: {name} grid {:?} block {:?}: {} thread instructions, {} of warps, {milliseconds:.2} ms of processor, \
         {rate:.0} M/s, {each:.1} ns per warp; sectors/ideal {:.2}, shared passes/ideal {:.2}, unique {} + {} bytes",
        kernel.grid,
        kernel.block,
        stats.thread_instructions,
        stats.warp_instructions,
        ratio(t.sectors, t.ideal),
        ratio(t.shared_waves, t.shared_ideal),
        stats.unique_read,
        stats.unique_written,
    );
}

/// The parameters of a launch, from pointers to each, or packed.
///
/// # Safety
/// `params` has a pointer to each parameter, or `extra` the documented list.
pub unsafe fn parameters(
    function: &Function,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Result<Vec<u8>, Code> {
    let kernel = function.kernel();
    let mut bytes = vec![0u8; kernel.param_bytes];
    if !params.is_null() {
        for (at, &(offset, size)) in kernel.params.iter().enumerate() {
            // SAFETY: the caller's promise.
            let from = unsafe { *params.add(at) };
            if from.is_null() {
                return Err(INVALID_VALUE);
            }
            // SAFETY: the caller's promise: as many bytes as the kernel's parameter has.
            unsafe { std::ptr::copy_nonoverlapping(from.cast(), bytes[offset..].as_mut_ptr(), size) };
        }
        return Ok(bytes);
    }
    if extra.is_null() {
        return if kernel.params.is_empty() { Ok(bytes) } else { Err(INVALID_VALUE) };
    }
    let (mut from, mut len) = (std::ptr::null::<u8>(), 0usize);
    // CU_LAUNCH_PARAM_BUFFER_POINTER is 1, _SIZE 2, _END 0.
    for at in (0..8).step_by(2) {
        // SAFETY: the caller's promise: pairs up to the end mark.
        unsafe {
            match *extra.add(at) as usize {
                1 => from = (*extra.add(at + 1)).cast(),
                2 => len = *(*extra.add(at + 1)).cast::<usize>(),
                _ => break,
            }
        }
    }
    if from.is_null() || len > bytes.len() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's promise: a buffer of `len` bytes.
    unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), len) };
    Ok(bytes)
}

/// `CUlaunchConfig` up to where attributes begin.
#[repr(C)]
pub struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    dynamic: c_uint,
    stream: Handle,
    attributes: *mut c_void,
    count: c_uint,
}

fn copy(to: u64, from: u64, bytes: usize, to_device: bool, from_device: bool) -> Work {
    Work::Copy(Copy { to, from, bytes, to_device, from_device })
}

/// A copy whose sides show by their addresses.
fn any_copy(to: u64, from: u64, bytes: usize) -> Work {
    copy(to, from, bytes, to & TAG != 0, from & TAG != 0)
}

fn fill(to: u64, value: u32, width: usize, count: usize) -> Work {
    if count == 0 { Work::Nothing } else { Work::Fill { to, value, width, count } }
}

api! {
    fn cuLaunchKernel(
        handle: Handle,
        grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        dynamic: c_uint,
        stream: Handle,
        params: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) needs Context {
        let function = function(handle)?;
        // SAFETY: the caller's promise.
        let params = unsafe { parameters(&function, params, extra)? };
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        submit(stream, Work::Kernel(Kernel { function, grid, block, dynamic, params }))
    }
    fn cuLaunchKernelEx(config: *const LaunchConfig, handle: Handle, params: *mut *mut c_void, extra: *mut *mut c_void) needs Context {
        if config.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's promise.
        let config = unsafe { &*config };
        let function = function(handle)?;
        // SAFETY: the caller's promise.
        let params = unsafe { parameters(&function, params, extra)? };
        let (grid, block, dynamic) = (config.grid, config.block, config.dynamic);
        submit(config.stream, Work::Kernel(Kernel { function, grid, block, dynamic, params }))
    }
    fn cuLaunchCooperativeKernel(
        _handle: Handle,
        _grid_x: c_uint, _grid_y: c_uint, _grid_z: c_uint,
        _block_x: c_uint, _block_y: c_uint, _block_z: c_uint,
        _dynamic: c_uint,
        _stream: Handle,
        _params: *mut *mut c_void,
    ) needs Context {
        // CTAs run one after the other: a grid that waits for itself never ends.
        Err(NOT_SUPPORTED)
    }
    fn cuMemcpy(to: u64, from: u64, bytes: usize) needs Context {
        submit_and_wait(any_copy(to, from, bytes))
    }
    fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: Handle) needs Context {
        submit(stream, any_copy(to, from, bytes))
    }
    fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) needs Context {
        submit_and_wait(copy(to, from as u64, bytes, true, false))
    }
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) needs Context {
        submit_and_wait(copy(to as u64, from, bytes, false, true))
    }
    fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) needs Context {
        submit_and_wait(copy(to, from, bytes, true, true))
    }
    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: Handle) needs Context {
        submit(stream, copy(to, from as u64, bytes, true, false))
    }
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: Handle) needs Context {
        submit(stream, copy(to as u64, from, bytes, false, true))
    }
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle) needs Context {
        submit(stream, copy(to, from, bytes, true, true))
    }
    fn cuMemcpyPeerAsync(to: u64, _to_context: Handle, from: u64, _from_context: Handle, bytes: usize, stream: Handle) needs Context {
        submit(stream, copy(to, from, bytes, true, true))
    }
    fn cuMemsetD8_v2(to: u64, value: u8, count: usize) needs Context {
        submit_and_wait(fill(to, value.into(), 1, count))
    }
    fn cuMemsetD16_v2(to: u64, value: u16, count: usize) needs Context {
        submit_and_wait(fill(to, value.into(), 2, count))
    }
    fn cuMemsetD32_v2(to: u64, value: c_uint, count: usize) needs Context {
        submit_and_wait(fill(to, value, 4, count))
    }
    fn cuMemsetD8Async(to: u64, value: u8, count: usize, stream: Handle) needs Context {
        submit(stream, fill(to, value.into(), 1, count))
    }
    fn cuMemsetD16Async(to: u64, value: u16, count: usize, stream: Handle) needs Context {
        submit(stream, fill(to, value.into(), 2, count))
    }
    fn cuMemsetD32Async(to: u64, value: c_uint, count: usize, stream: Handle) needs Context {
        submit(stream, fill(to, value, 4, count))
    }
    fn cuPointerGetAttribute(value: *mut c_int, attribute: c_int, at: u64) needs Context {
        // CU_POINTER_ATTRIBUTE_MEMORY_TYPE is 2: 1 the host's, 2 the device's.
        if attribute != 2 || state().memory.find(at, 1).is_none() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's promise.
        unsafe { put(value, if at & TAG != 0 { 2 } else { 1 }) }
    }
}
