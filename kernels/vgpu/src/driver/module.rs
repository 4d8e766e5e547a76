//! Modules and functions.
#![allow(non_snake_case)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use super::attributes::{PLAIN_SHARED, resident_threads, shared_memory};
use super::{
    Code, Handle, INVALID_HANDLE, INVALID_PTX, INVALID_VALUE, NO_BINARY, NOT_FOUND, OUT_OF_MEMORY, UNSUPPORTED_PTX,
    api, device, device_memory, put, state,
};
use crate::memory::TAG;
use crate::ptx::module::{Header, LoadError};
use crate::ptx::{Kernel, Module};
use crate::settings::settings;

/// A module, and the memory of its variables.
pub struct Loaded {
    pub module: Arc<Module>,
    blocks: Vec<u64>,
}

/// A kernel of a module.
pub struct Function {
    pub module: Arc<Module>,
    /// Handle of the module.
    of: usize,
    name: String,
    /// Dynamic shared memory that was asked for beyond what is always there.
    pub dynamic: AtomicU32,
}

impl Function {
    pub fn kernel(&self) -> &Kernel {
        &self.module.kernels[&self.name]
    }

    /// The most dynamic shared memory that a launch may ask for.
    pub fn most_dynamic(&self) -> u32 {
        let plain = PLAIN_SHARED.saturating_sub(self.kernel().shared_bytes as u32);
        self.dynamic.load(Relaxed).max(plain)
    }

    /// The largest block.
    pub fn most_threads(&self) -> u32 {
        self.kernel().max_threads.unwrap_or(1024).min(1024)
    }

    /// Blocks that fit on a multiprocessor, by threads and shared memory (registers are not known).
    fn resident(&self, threads: u32, dynamic: usize) -> u32 {
        let settings = settings();
        if threads == 0 || threads > self.most_threads() {
            return 0;
        }
        let by_threads = resident_threads(&settings) / threads.next_multiple_of(32);
        let shared = self.kernel().shared_bytes + dynamic + 1024;
        by_threads.min(shared_memory(&settings).1 / shared as u32).min(32)
    }
}

/// Where the JIT writes what it has to say.
struct Log {
    to: *mut u8,
    room: usize,
    /// The option's value, where the length goes.
    length: *mut *mut c_void,
}

impl Log {
    /// The error log of `cuModuleLoadDataEx`'s options.
    ///
    /// # Safety
    /// `options` and `values` have `count` entries, as documented.
    unsafe fn find(count: c_uint, options: *const c_uint, values: *mut *mut c_void) -> Log {
        const ERROR_LOG: c_uint = 5;
        const ERROR_LOG_BYTES: c_uint = 6;
        let mut log = Log { to: std::ptr::null_mut(), room: 0, length: std::ptr::null_mut() };
        if options.is_null() || values.is_null() {
            return log;
        }
        for at in 0..count as usize {
            // SAFETY: the caller's promise.
            unsafe {
                match *options.add(at) {
                    ERROR_LOG => log.to = (*values.add(at)).cast(),
                    ERROR_LOG_BYTES => {
                        log.room = *values.add(at) as u32 as usize;
                        log.length = values.add(at);
                    }
                    _ => {}
                }
            }
        }
        log
    }

    fn write(&self, text: &str) {
        if self.to.is_null() || self.room == 0 {
            return;
        }
        let len = text.len().min(self.room - 1);
        // SAFETY: the caller gave `room` bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), self.to, len);
            self.to.add(len).write(0);
            if !self.length.is_null() {
                self.length.write((len + 1) as *mut c_void);
            }
        }
    }
}

/// Whether the driver takes a module: its PTX version, and a device that is new enough.
fn accept(header: &Header) -> Result<(), Code> {
    let settings = settings();
    if header.version > settings.ptx_version() {
        return Err(UNSUPPORTED_PTX);
    }
    let fits = if header.exact { header.target == settings.capability } else { header.target <= settings.capability };
    if fits { Ok(()) } else { Err(NO_BINARY) }
}

fn load(image: *const c_void, to: *mut Handle, log: &Log) -> Result<(), Code> {
    if image.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's promise: an image of at least four bytes.
    let magic = unsafe { *image.cast::<[u8; 4]>() };
    if magic == *b"\x7fELF" || magic == [0x50, 0xed, 0x55, 0xba] {
        log.write("this is machine code, which nothing here runs; load the PTX");
        return Err(NO_BINARY);
    }
    // SAFETY: the caller's promise: PTX ends with a zero.
    let text = unsafe { CStr::from_ptr(image.cast()) }.to_string_lossy();
    let mut blocks = Vec::new();
    let mut place = |bytes: &[u8], _align: usize| {
        let mut state = state();
        let at = device_memory::allocate(&mut state, bytes.len().max(1)).ok()?;
        blocks.push(at);
        // SAFETY: the block was allocated just now with this size.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), (at & !TAG) as *mut u8, bytes.len()) };
        if let Some(number) = state.memory.find(at, bytes.len() as u64)
            && let Some(written) = &state.memory.blocks()[number].written
        {
            written.mark(0, bytes.len() as u64);
        }
        Some(at)
    };
    let module = match known(&text) {
        Some(module) => accept(&module.header).map(|()| module).map_err(LoadError::Refused),
        None => Module::load(&text, accept, &mut place).map(Arc::new),
    };
    if let (Ok(module), true) = (&module, blocks.is_empty()) {
        remember(&text, module);
    }
    let mut state = state();
    match module {
        Ok(module) => {
            let handle = state.handle();
            state.modules.insert(handle, Loaded { module, blocks });
            // SAFETY: the caller's promise.
            unsafe { put(to, handle as Handle) }
        }
        Err(error) => {
            for block in blocks {
                device_memory::free(&mut state, block)?;
            }
            Err(match error {
                LoadError::Ptx(error) => {
                    let line = text.lines().nth((error.line as usize).wrapping_sub(1)).unwrap_or("").trim();
                    let message = format!("PTX line {}: {}: {line}", error.line, error.what);
                    eprintln!("vgpu: {message}");
                    log.write(&message);
                    INVALID_PTX
                }
                LoadError::Refused(code) => {
                    log.write("the module is for a later driver or another device");
                    code
                }
                LoadError::OutOfMemory => OUT_OF_MEMORY,
            })
        }
    }
}

/// Modules without variables are the same wherever they are loaded: reading them once is enough, and programs that
/// open a device again and again (tests) read them often.
static READ: Mutex<Vec<(String, Arc<Module>)>> = Mutex::new(Vec::new());

fn known(text: &str) -> Option<Arc<Module>> {
    let read = READ.lock().unwrap_or_else(PoisonError::into_inner);
    read.iter().find(|(of, _)| of == text).map(|(_, module)| module.clone())
}

fn remember(text: &str, module: &Arc<Module>) {
    /// More than a program has.
    const MOST: usize = 32;
    let mut read = READ.lock().unwrap_or_else(PoisonError::into_inner);
    if read.len() < MOST && !read.iter().any(|(of, _)| of == text) {
        read.push((text.to_string(), module.clone()));
    }
}

/// The function of a handle.
pub fn function(handle: Handle) -> Result<Arc<Function>, Code> {
    state().functions.get(&(handle as usize)).cloned().ok_or(INVALID_HANDLE)
}

fn find_function(to: *mut Handle, module: Handle, name: *const c_char) -> Result<(), Code> {
    if name.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's promise: a string that ends with zero.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    let mut state = state();
    let of = module as usize;
    let module = state.modules.get(&of).ok_or(INVALID_HANDLE)?.module.clone();
    if !module.kernels.contains_key(&name) {
        return Err(NOT_FOUND);
    }
    let handle = state.handle();
    state.functions.insert(handle, Arc::new(Function { module, of, name, dynamic: AtomicU32::new(0) }));
    // SAFETY: the caller's promise.
    unsafe { put(to, handle as Handle) }
}

fn attribute(number: c_int, function: &Function) -> Result<c_int, Code> {
    let kernel = function.kernel();
    Ok(match number {
        0 => function.most_threads() as c_int,
        1 => kernel.shared_bytes as c_int,
        2 => 0,
        3 => kernel.local_bytes as c_int,
        // The register count is the assembler's matter; this is a usual one.
        4 => 64,
        5 | 6 => function.module.version as c_int,
        7 => 0,
        8 => function.most_dynamic() as c_int,
        9 => -1,
        _ => return Err(INVALID_VALUE),
    })
}

fn set_attribute(function: &Function, number: c_int, value: c_int) -> Result<(), Code> {
    match number {
        8 => {
            let most = shared_memory(&settings()).0 as usize - function.kernel().shared_bytes.min(49_152);
            if value < 0 || value as usize > most {
                return Err(INVALID_VALUE);
            }
            function.dynamic.store(value as u32, Relaxed);
            Ok(())
        }
        9 if (-1..=100).contains(&value) => Ok(()),
        _ => Err(INVALID_VALUE),
    }
}

fn occupancy(to: *mut c_int, handle: Handle, threads: c_int, dynamic: usize) -> Result<(), Code> {
    let function = function(handle)?;
    let blocks = function.resident(u32::try_from(threads).map_err(|_| INVALID_VALUE)?, dynamic);
    // SAFETY: the caller's promise.
    unsafe { put(to, blocks as c_int) }
}

const NO_LOG: Log = Log { to: std::ptr::null_mut(), room: 0, length: std::ptr::null_mut() };

api! {
    fn cuModuleLoadData(to: *mut Handle, image: *const c_void) needs Context {
        load(image, to, &NO_LOG)
    }
    fn cuModuleLoadDataEx(to: *mut Handle, image: *const c_void, count: c_uint, options: *const c_uint, values: *mut *mut c_void) needs Context {
        // SAFETY: the caller's promise.
        let log = unsafe { Log::find(count, options, values) };
        load(image, to, &log)
    }
    fn cuModuleLoad(to: *mut Handle, path: *const c_char) needs Context {
        if path.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's promise: a string that ends with zero.
        let path = unsafe { CStr::from_ptr(path) }.to_string_lossy().into_owned();
        let mut image = std::fs::read(path).map_err(|_| 301u32)?;
        image.extend([0; 4]);
        load(image.as_ptr().cast(), to, &NO_LOG)
    }
    fn cuModuleUnload(module: Handle) needs Context {
        let _ = super::work::finish();
        let _device = device();
        let mut state = state();
        let loaded = state.modules.remove(&(module as usize)).ok_or(INVALID_HANDLE)?;
        state.functions.retain(|_, function| function.of != module as usize);
        loaded.blocks.into_iter().try_for_each(|block| device_memory::free(&mut state, block))
    }
    fn cuModuleGetFunction(to: *mut Handle, module: Handle, name: *const c_char) needs Context {
        find_function(to, module, name)
    }
    fn cuModuleGetGlobal_v2(at: *mut u64, bytes: *mut usize, module: Handle, name: *const c_char) needs Context {
        if name.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's promise: a string that ends with zero.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let state = state();
        let module = &state.modules.get(&(module as usize)).ok_or(INVALID_HANDLE)?.module;
        let &(found, len) = module.variables.get(&*name).ok_or(NOT_FOUND)?;
        // SAFETY: the caller's promise; null means that one is not wanted.
        unsafe {
            if !at.is_null() {
                at.write(found);
            }
            if !bytes.is_null() {
                bytes.write(len);
            }
        }
        Ok(())
    }
    fn cuFuncGetAttribute(value: *mut c_int, number: c_int, handle: Handle) needs Context {
        let function = function(handle)?;
        // SAFETY: the caller's promise.
        unsafe { put(value, attribute(number, &function)?) }
    }
    fn cuFuncSetAttribute(handle: Handle, number: c_int, value: c_int) needs Context {
        set_attribute(&*function(handle)?, number, value)
    }
    fn cuFuncSetCacheConfig(handle: Handle, _config: c_int) needs Context {
        function(handle).map(|_| ())
    }
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(to: *mut c_int, handle: Handle, threads: c_int, dynamic: usize) needs Context {
        occupancy(to, handle, threads, dynamic)
    }
    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(to: *mut c_int, handle: Handle, threads: c_int, dynamic: usize, _flags: c_uint) needs Context {
        occupancy(to, handle, threads, dynamic)
    }
    fn cuOccupancyAvailableDynamicSMemPerBlock(to: *mut usize, handle: Handle, blocks: c_int, _threads: c_int) needs Context {
        let function = function(handle)?;
        let settings = settings();
        let each = shared_memory(&settings).1 as usize / blocks.max(1) as usize;
        let free = each.saturating_sub(1024 + function.kernel().shared_bytes);
        // SAFETY: the caller's promise.
        unsafe { put(to, free.min(shared_memory(&settings).0 as usize)) }
    }
}
