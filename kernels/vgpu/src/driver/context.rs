//! Initialisation and the primary context.
#![allow(non_snake_case)]

use std::ffi::{c_int, c_uint};

use super::{CURRENT, Handle, INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, api, put, state};

/// The only context.
const CONTEXT: Handle = 0x20 as Handle;

fn make_current(context: Handle) -> Result<(), u32> {
    if context.is_null() {
        CURRENT.set(false);
        return Ok(());
    }
    if context != CONTEXT {
        return Err(INVALID_CONTEXT);
    }
    CURRENT.set(true);
    Ok(())
}

fn one_device(device: c_int) -> Result<(), u32> {
    if device == 0 { Ok(()) } else { Err(INVALID_DEVICE) }
}

api! {
    fn cuInit(flags: c_uint) needs Nothing {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        state().initialised = true;
        Ok(())
    }
    fn cuDevicePrimaryCtxRetain(context: *mut Handle, device: c_int) needs Init {
        one_device(device)?;
        let mut state = state();
        if let Some(code) = state.sticky {
            return Err(code);
        }
        state.retained += 1;
        // SAFETY: the caller's promise.
        unsafe { put(context, CONTEXT) }
    }
    fn cuDevicePrimaryCtxRelease_v2(device: c_int) needs Init {
        one_device(device)?;
        // An error of the work is nobody's any more.
        let _ = super::work::finish();
        let _device = super::device();
        let mut state = state();
        match state.retained {
            0 => return Err(INVALID_CONTEXT),
            1 => state.reset(),
            _ => state.retained -= 1,
        }
        Ok(())
    }
    fn cuDevicePrimaryCtxReset_v2(device: c_int) needs Init {
        one_device(device)?;
        let _device = super::device();
        let mut state = state();
        let retained = state.retained;
        state.reset();
        state.retained = retained;
        Ok(())
    }
    fn cuDevicePrimaryCtxSetFlags_v2(device: c_int, _flags: c_uint) needs Init {
        one_device(device)
    }
    fn cuDevicePrimaryCtxGetState(device: c_int, flags: *mut c_uint, active: *mut c_int) needs Init {
        one_device(device)?;
        // SAFETY: the caller's promise.
        unsafe {
            put(flags, 0)?;
            put(active, c_int::from(state().retained > 0))
        }
    }
    fn cuCtxSetCurrent(context: Handle) needs Init {
        make_current(context)
    }
    fn cuCtxPushCurrent_v2(context: Handle) needs Init {
        make_current(context)
    }
    fn cuCtxPopCurrent_v2(context: *mut Handle) needs Init {
        CURRENT.set(false);
        // SAFETY: the caller's promise.
        unsafe { put(context, CONTEXT) }
    }
    fn cuCtxGetCurrent(context: *mut Handle) needs Init {
        // SAFETY: the caller's promise.
        unsafe { put(context, if CURRENT.get() { CONTEXT } else { std::ptr::null_mut() }) }
    }
    fn cuCtxGetDevice(device: *mut c_int) needs Context {
        // SAFETY: the caller's promise.
        unsafe { put(device, 0) }
    }
    fn cuCtxSynchronize() needs Context {
        super::stream::outside_of_captures()?;
        super::work::finish()
    }
    fn cuCtxSetLimit(_limit: c_int, _value: usize) needs Context {
        Ok(())
    }
    fn cuCtxGetLimit(value: *mut usize, _limit: c_int) needs Context {
        // SAFETY: the caller's promise.
        unsafe { put(value, 0) }
    }
    fn cuCtxSetCacheConfig(_config: c_int) needs Context {
        Ok(())
    }
    fn cuCtxGetCacheConfig(config: *mut c_int) needs Context {
        // SAFETY: the caller's promise.
        unsafe { put(config, 0) }
    }
    fn cuCtxSetFlags(_flags: c_uint) needs Context {
        Ok(())
    }
    fn cuCtxGetFlags(flags: *mut c_uint) needs Context {
        // SAFETY: the caller's promise.
        unsafe { put(flags, 0) }
    }
    fn cuCtxGetApiVersion(_context: Handle, version: *mut c_uint) needs Init {
        // SAFETY: the caller's promise.
        unsafe { put(version, 3020) }
    }
    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) needs Context {
        // SAFETY: the caller's promise.
        unsafe {
            put(least, 0)?;
            put(greatest, -5)
        }
    }
    fn cuProfilerStart() needs Context {
        Ok(())
    }
    fn cuProfilerStop() needs Context {
        Ok(())
    }
}
