//! Names and texts of errors, and finding functions by name.
#![allow(non_snake_case)]

use std::ffi::{CStr, c_char, c_int};

use super::{Code, Handle, INVALID_VALUE, NOT_FOUND, api, put};

/// Code, name, text.
const ERRORS: &[(Code, &CStr, &CStr)] = &[
    (0, c"CUDA_SUCCESS", c"no error"),
    (1, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
    (2, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
    (3, c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
    (4, c"CUDA_ERROR_DEINITIALIZED", c"driver shutting down"),
    (46, c"CUDA_ERROR_DEVICE_UNAVAILABLE", c"CUDA-capable device(s) is/are busy or unavailable"),
    (100, c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected"),
    (101, c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
    (200, c"CUDA_ERROR_INVALID_IMAGE", c"device kernel image is invalid"),
    (201, c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
    (209, c"CUDA_ERROR_NO_BINARY_FOR_GPU", c"no kernel image is available for execution on the device"),
    (214, c"CUDA_ERROR_ECC_UNCORRECTABLE", c"uncorrectable ECC error encountered"),
    (218, c"CUDA_ERROR_INVALID_PTX", c"a PTX JIT compilation failed"),
    (222, c"CUDA_ERROR_UNSUPPORTED_PTX_VERSION", c"the provided PTX was compiled with an unsupported toolchain."),
    (400, c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
    (500, c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
    (600, c"CUDA_ERROR_NOT_READY", c"device not ready"),
    (700, c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access was encountered"),
    (701, c"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", c"too many resources requested for launch"),
    (702, c"CUDA_ERROR_LAUNCH_TIMEOUT", c"the launch timed out and was terminated"),
    (710, c"CUDA_ERROR_ASSERT", c"device-side assert triggered"),
    (712, c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", c"part or all of the requested memory range is already mapped"),
    (713, c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", c"pointer does not correspond to a registered memory region"),
    (716, c"CUDA_ERROR_MISALIGNED_ADDRESS", c"misaligned address"),
    (719, c"CUDA_ERROR_LAUNCH_FAILED", c"unspecified launch failure"),
    (801, c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
    (802, c"CUDA_ERROR_SYSTEM_NOT_READY", c"system not yet initialized"),
    (900, c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", c"operation not permitted when stream is capturing"),
    (901, c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", c"operation failed due to a previous error during capture"),
    (903, c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", c"capture was not initiated in this stream"),
    (906, c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", c"operation would make the legacy stream depend on a capturing blocking stream"),
    (910, c"CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE", c"the graph update was not performed because it included changes which violated constraints specific to instantiated graph update"),
    (999, c"CUDA_ERROR_UNKNOWN", c"unknown error"),
];

fn find(code: Code) -> Result<&'static (Code, &'static CStr, &'static CStr), Code> {
    ERRORS.iter().find(|error| error.0 == code).ok_or(INVALID_VALUE)
}

api! {
    fn cuGetErrorName(code: Code, name: *mut *const c_char) needs Nothing {
        // SAFETY: the caller's promise.
        unsafe { put(name, find(code)?.1.as_ptr()) }
    }
    fn cuGetErrorString(code: Code, text: *mut *const c_char) needs Nothing {
        // SAFETY: the caller's promise.
        unsafe { put(text, find(code)?.2.as_ptr()) }
    }
    fn cuGetProcAddress_v2(name: *const c_char, to: *mut Handle, _version: c_int, _flags: u64, status: *mut c_int) needs Nothing {
        if name.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's promise: a string that ends with zero.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let found = super::lookup(&format!("{name}_v2")).or_else(|| super::lookup(&name));
        // SAFETY: the caller's promise.
        unsafe {
            put(to, found.unwrap_or(0) as Handle)?;
            if !status.is_null() {
                status.write(c_int::from(found.is_none()));
            }
        }
        found.map(|_| ()).ok_or(NOT_FOUND)
    }
    fn cuGetProcAddress(name: *const c_char, to: *mut Handle, version: c_int, flags: u64) needs Nothing {
        // SAFETY: the caller's promise.
        match unsafe { cuGetProcAddress_v2(name, to, version, flags, std::ptr::null_mut()) } {
            0 => Ok(()),
            code => Err(code),
        }
    }
}
