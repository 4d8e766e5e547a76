//! The CUDA driver API: what cudarc calls, under the names and numbers that NVIDIA documents.
//!
//! Work is done when it is submitted, in the order of submission, which is one of the orders that streams allow.
//! Handles are numbers, never pointers, so that a wrong one is an error. An error of a kernel is sticky, as on a
//! device: every later call returns it until the primary context is released.

mod attributes;
mod context;
mod device_memory;
mod error;
mod event;
mod graph;
mod module;
mod stream;
pub mod work;

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ffi::c_void;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};

use crate::memory::Memory;
use crate::settings::settings;
use crate::stats::KernelStats;

/// A `CUresult`.
pub type Code = u32;
/// Any handle.
pub type Handle = *mut c_void;

pub const SUCCESS: Code = 0;
pub const INVALID_VALUE: Code = 1;
pub const OUT_OF_MEMORY: Code = 2;
pub const NOT_INITIALIZED: Code = 3;
pub const INVALID_DEVICE: Code = 101;
pub const INVALID_CONTEXT: Code = 201;
pub const NO_BINARY: Code = 209;
pub const INVALID_PTX: Code = 218;
pub const UNSUPPORTED_PTX: Code = 222;
pub const INVALID_HANDLE: Code = 400;
pub const NOT_FOUND: Code = 500;
pub const NOT_READY: Code = 600;
pub const NOT_SUPPORTED: Code = 801;
pub const CAPTURE_UNSUPPORTED: Code = 900;
pub const CAPTURE_INVALIDATED: Code = 901;
pub const CAPTURE_UNMATCHED: Code = 903;
pub const CAPTURE_IMPLICIT: Code = 906;

/// Everything that calls share.
#[derive(Default)]
pub struct State {
    pub initialised: bool,
    /// How often the primary context was retained.
    pub retained: u32,
    /// The error of a kernel, which stays.
    pub sticky: Option<Code>,
    pub memory: Arc<Memory>,
    /// Device memory in use, in bytes.
    pub used: u64,
    /// What each block of memory is, by its address.
    pub owners: HashMap<u64, device_memory::Owner>,
    pub modules: BTreeMap<usize, module::Loaded>,
    pub functions: BTreeMap<usize, Arc<module::Function>>,
    pub streams: BTreeMap<usize, stream::Stream>,
    pub events: BTreeMap<usize, event::Event>,
    pub graphs: BTreeMap<usize, Vec<graph::Node>>,
    pub executables: BTreeMap<usize, Vec<graph::Node>>,
    pub captures: BTreeMap<usize, stream::Capture>,
    last_handle: usize,
    pub reports: Vec<String>,
    pub stats: BTreeMap<String, KernelStats>,
    /// Work that was submitted and waits until somebody waits for it, where the device is lazy; how much was ever
    /// submitted, and how much of it is done.
    pub queue: VecDeque<work::Work>,
    pub submitted: u64,
    pub done: u64,
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(Mutex::default);
/// Held while the device works: one thing at a time.
static DEVICE: Mutex<()> = Mutex::new(());

thread_local! {
    /// Whether this thread made the primary context its own.
    static CURRENT: Cell<bool> = const { Cell::new(false) };
}

/// The state, for as long as the guard lives.
pub fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// The device, for as long as the guard lives. Taken before [`state`], never while it is held.
pub fn device() -> MutexGuard<'static, ()> {
    DEVICE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl State {
    /// A new handle.
    pub fn handle(&mut self) -> usize {
        // Not zero, and not small: 1 and 2 are the special streams.
        self.last_handle += 16;
        self.last_handle + 0x1000
    }

    /// Forgets everything that belongs to the context.
    pub fn reset(&mut self) {
        device_memory::free_all(self);
        let (reports, stats, last) =
            (std::mem::take(&mut self.reports), std::mem::take(&mut self.stats), self.last_handle);
        *self = State { initialised: self.initialised, last_handle: last, reports, stats, ..State::default() };
    }
}

/// What a call needs before it does anything.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    Nothing,
    /// `cuInit`.
    Init,
    /// A current context without an error.
    Context,
}

/// Does what every call does first, then the call.
pub fn enter(name: &'static str, needs: Needs, call: impl FnOnce() -> Result<(), Code>) -> Code {
    if let Some(code) = settings().call(name) {
        return code;
    }
    if needs != Needs::Nothing {
        let state = state();
        if !state.initialised {
            return NOT_INITIALIZED;
        }
        if needs == Needs::Context {
            if state.retained == 0 || !CURRENT.get() {
                return INVALID_CONTEXT;
            }
            if let Some(code) = state.sticky {
                return code;
            }
        }
    }
    match call() {
        Ok(()) => SUCCESS,
        Err(code) => code,
    }
}

/// Writes a result through a pointer of the caller.
///
/// # Safety
/// `to` is null or points to a place for a `T`.
pub unsafe fn put<T>(to: *mut T, value: T) -> Result<(), Code> {
    if to.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's pointer is not null.
    unsafe { to.write(value) };
    Ok(())
}

/// Defines exported functions: `fn cuName(argument: type) needs Context { body }`, whose body gives a
/// `Result<(), Code>`.
macro_rules! api {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) needs $needs:ident $body:block)*) => {
        $(
            /// # Safety
            /// As NVIDIA documents: pointers are valid for what the call reads or writes through them.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $ty),*) -> $crate::driver::Code {
                $crate::driver::enter(stringify!($name), $crate::driver::Needs::$needs, move || $body)
            }
        )*
        /// The address of an exported function of this file.
        pub fn lookup(name: &str) -> Option<usize> {
            match name {
                $(stringify!($name) => Some($name as *const () as usize),)*
                _ => None,
            }
        }
    };
}
use api;

/// The address of an exported function by its name.
pub fn lookup(name: &str) -> Option<usize> {
    [
        attributes::lookup,
        context::lookup,
        device_memory::lookup,
        error::lookup,
        event::lookup,
        graph::lookup,
        module::lookup,
        stream::lookup,
        work::lookup,
    ]
    .iter()
    .find_map(|lookup| lookup(name))
}
