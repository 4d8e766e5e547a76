//! Memory of the device and of the host: allocation, and what each address is.
#![allow(non_snake_case)]

use std::alloc::{Layout, alloc, dealloc};
use std::ffi::{c_int, c_uint};
use std::sync::Arc;

use super::{Code, Handle, INVALID_VALUE, OUT_OF_MEMORY, State, api, device, put, state};
use crate::exec::cta::FILL;
use crate::memory::{Block, TAG, Written};
use crate::settings::settings;

/// Whose memory a block is.
pub enum Owner {
    /// The device's: ours, to be freed with this layout.
    Device(Layout),
    /// The host's, allocated here.
    Host(Layout),
    /// The host's, registered by the program that owns it.
    Registered,
}

/// Allocations begin at multiples of this.
const ALIGN: usize = 512;
/// Blocks up to this size are filled with NaN, so that what nobody wrote does not look like a zero.
const FILLED: usize = 256 << 20;

fn insert(state: &mut State, block: Block, owner: Owner) {
    state.owners.insert(block.base, owner);
    Arc::make_mut(&mut state.memory).insert(block);
}

/// Device memory of `bytes`; its address.
pub fn allocate(state: &mut State, bytes: usize) -> Result<u64, Code> {
    let (limit, checks) = {
        let settings = settings();
        (settings.memory, settings.checks)
    };
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    let whole = (bytes as u64).next_multiple_of(ALIGN as u64);
    if state.used.saturating_add(whole) > limit {
        return Err(OUT_OF_MEMORY);
    }
    let layout = Layout::from_size_align(bytes, ALIGN).map_err(|_| OUT_OF_MEMORY)?;
    // SAFETY: the size is not zero.
    let host = unsafe { alloc(layout) };
    if host.is_null() {
        return Err(OUT_OF_MEMORY);
    }
    if bytes <= FILLED {
        // SAFETY: these bytes were allocated just now.
        unsafe { host.write_bytes(FILL, bytes) };
    }
    let base = host as u64 | TAG;
    let written = checks.then(|| Written::new(bytes as u64));
    insert(state, Block { base, len: bytes as u64, written }, Owner::Device(layout));
    state.used += whole;
    Ok(base)
}

/// Frees a block of the device.
pub fn free(state: &mut State, base: u64) -> Result<(), Code> {
    let Some(&Owner::Device(layout)) = state.owners.get(&base) else { return Err(INVALID_VALUE) };
    state.owners.remove(&base);
    Arc::make_mut(&mut state.memory).remove(base);
    state.used -= (layout.size() as u64).next_multiple_of(ALIGN as u64);
    // SAFETY: it was allocated with this layout, and nobody knows its address any more.
    unsafe { dealloc((base & !TAG) as *mut u8, layout) };
    Ok(())
}

/// Frees everything that was allocated here.
pub fn free_all(state: &mut State) {
    for (base, owner) in std::mem::take(&mut state.owners) {
        match owner {
            // SAFETY: each was allocated with its layout and is forgotten now.
            Owner::Device(layout) | Owner::Host(layout) => unsafe { dealloc((base & !TAG) as *mut u8, layout) },
            Owner::Registered => {}
        }
    }
    state.memory = Arc::default();
    state.used = 0;
}

fn allocate_host(state: &mut State, bytes: usize) -> Result<u64, Code> {
    let layout = Layout::from_size_align(bytes.max(1), 4096).map_err(|_| OUT_OF_MEMORY)?;
    // SAFETY: the size is not zero.
    let host = unsafe { alloc(layout) };
    if host.is_null() {
        return Err(OUT_OF_MEMORY);
    }
    let base = host as u64;
    insert(state, Block { base, len: bytes.max(1) as u64, written: None }, Owner::Host(layout));
    Ok(base)
}

fn new_device_block(bytes: usize, to: *mut u64) -> Result<(), Code> {
    super::stream::outside_of_captures()?;
    let at = allocate(&mut state(), bytes)?;
    // SAFETY: the caller's promise.
    unsafe { put(to, at) }
}

fn free_device_block(at: u64) -> Result<(), Code> {
    if at == 0 {
        return Ok(());
    }
    let _device = device();
    free(&mut state(), at)
}

fn new_host_block(bytes: usize, to: *mut Handle) -> Result<(), Code> {
    let at = allocate_host(&mut state(), bytes)?;
    // SAFETY: the caller's promise.
    unsafe { put(to, at as Handle) }
}

api! {
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) needs Context {
        let memory = settings().memory;
        // SAFETY: the caller's promise.
        unsafe {
            put(free, memory.saturating_sub(state().used) as usize)?;
            put(total, memory as usize)
        }
    }
    fn cuMemAlloc_v2(to: *mut u64, bytes: usize) needs Context {
        new_device_block(bytes, to)
    }
    fn cuMemAllocAsync(to: *mut u64, bytes: usize, stream: Handle) needs Context {
        super::stream::check(stream)?;
        new_device_block(bytes, to)
    }
    fn cuMemAllocFromPoolAsync(to: *mut u64, bytes: usize, _pool: Handle, stream: Handle) needs Context {
        super::stream::check(stream)?;
        new_device_block(bytes, to)
    }
    fn cuMemFree_v2(at: u64) needs Context {
        super::stream::outside_of_captures()?;
        let _ = super::work::finish();
        free_device_block(at)
    }
    fn cuMemFreeAsync(at: u64, stream: Handle) needs Context {
        super::stream::check(stream)?;
        let _ = super::work::finish();
        free_device_block(at)
    }
    fn cuMemAllocManaged(to: *mut u64, bytes: usize, _flags: c_uint) needs Context {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let at = allocate_host(&mut state(), bytes)?;
        // SAFETY: the caller's promise.
        unsafe { put(to, at) }
    }
    fn cuMemHostAlloc(to: *mut Handle, bytes: usize, _flags: c_uint) needs Context {
        new_host_block(bytes, to)
    }
    fn cuMemAllocHost_v2(to: *mut Handle, bytes: usize) needs Context {
        new_host_block(bytes, to)
    }
    fn cuMemFreeHost(at: Handle) needs Context {
        let _ = super::work::finish();
        let _device = device();
        let mut state = state();
        let base = at as u64;
        let Some(&Owner::Host(layout)) = state.owners.get(&base) else { return Err(INVALID_VALUE) };
        state.owners.remove(&base);
        Arc::make_mut(&mut state.memory).remove(base);
        // SAFETY: it was allocated with this layout; the caller gives it up.
        unsafe { dealloc(at.cast(), layout) };
        Ok(())
    }
    fn cuMemHostRegister_v2(at: Handle, bytes: usize, _flags: c_uint) needs Context {
        if at.is_null() || bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let mut state = state();
        let (base, len) = (at as u64, bytes as u64);
        if state.memory.blocks().iter().any(|block| block.base < base + len && base < block.base + block.len) {
            return Err(712);
        }
        insert(&mut state, Block { base, len, written: None }, Owner::Registered);
        Ok(())
    }
    fn cuMemHostUnregister(at: Handle) needs Context {
        let _device = device();
        let mut state = state();
        let base = at as u64;
        if !matches!(state.owners.get(&base), Some(Owner::Registered)) {
            return Err(713);
        }
        state.owners.remove(&base);
        Arc::make_mut(&mut state.memory).remove(base);
        Ok(())
    }
    fn cuMemHostGetDevicePointer_v2(to: *mut u64, host: Handle, flags: c_uint) needs Context {
        // Addresses are unified: mapped memory has the same one on both sides.
        if flags != 0 || state().memory.find(host as u64, 1).is_none() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's promise.
        unsafe { put(to, host as u64) }
    }
    fn cuMemHostGetFlags(flags: *mut c_uint, _host: Handle) needs Context {
        // SAFETY: the caller's promise.
        unsafe { put(flags, 2) }
    }
    fn cuMemGetAddressRange_v2(base: *mut u64, len: *mut usize, at: u64) needs Context {
        let state = state();
        let number = state.memory.find(at, 1).ok_or(INVALID_VALUE)?;
        let block = &state.memory.blocks()[number];
        // SAFETY: the caller's promise; null means that one is not wanted.
        unsafe {
            if !base.is_null() {
                base.write(block.base);
            }
            if !len.is_null() {
                len.write(block.len as usize);
            }
        }
        Ok(())
    }
    fn cuMemAdvise_v2(_at: u64, _bytes: usize, _advice: c_int, _location: u64) needs Context {
        Ok(())
    }
    fn cuMemPrefetchAsync_v2(_at: u64, _bytes: usize, _location: u64, _flags: c_uint, stream: Handle) needs Context {
        super::stream::check(stream)
    }
    fn cuDeviceGetDefaultMemPool(pool: *mut Handle, _device: c_int) needs Init {
        // SAFETY: the caller's promise.
        unsafe { put(pool, 0x30 as Handle) }
    }
    fn cuDeviceGetMemPool(pool: *mut Handle, _device: c_int) needs Init {
        // SAFETY: the caller's promise.
        unsafe { put(pool, 0x30 as Handle) }
    }
    fn cuMemPoolSetAttribute(_pool: Handle, _attribute: c_int, _value: Handle) needs Init {
        Ok(())
    }
    fn cuMemPoolTrimTo(_pool: Handle, _bytes: usize) needs Init {
        Ok(())
    }
}
