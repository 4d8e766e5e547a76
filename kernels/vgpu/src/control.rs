//! What the library offers beyond the driver API: functions that tests find by name.

use std::ffi::{CStr, CString, c_char, c_int};

use crate::driver::{state, work::finish};
use crate::settings::settings;

/// Sets one thing by name; 1 if it was understood.
///
/// # Safety
/// Both are strings that end with zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vgpu_set(name: *const c_char, value: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    let (name, value) = unsafe { (CStr::from_ptr(name), CStr::from_ptr(value)) };
    c_int::from(settings().set(&name.to_string_lossy(), &value.to_string_lossy()))
}

/// Takes what was found: `reports` (a message on each line) or `stats` (a kernel on each line). To be given back to
/// [`vgpu_free`]; null for an unknown name.
///
/// # Safety
/// `what` is a string that ends with zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vgpu_take(what: *const c_char) -> *mut c_char {
    // SAFETY: the caller's promise.
    let what = unsafe { CStr::from_ptr(what) }.to_bytes();
    // What it says of work is known when that is done; an error shows at the next call.
    let _ = finish();
    let text = match what {
        b"reports" => {
            std::mem::take(&mut state().reports).iter().map(|line| line.replace('\n', " ")).collect::<Vec<_>>()
        }
        b"stats" => std::mem::take(&mut state().stats).iter().map(|(name, stats)| stats.line(name)).collect(),
        b"calls" => settings().calls.iter().map(|(name, count)| format!("{name}={count}")).collect(),
        b"used" => vec![state().used.to_string()],
        _ => return std::ptr::null_mut(),
    };
    CString::new(text.join("\n").replace('\0', " ")).map_or(std::ptr::null_mut(), CString::into_raw)
}

/// Frees what [`vgpu_take`] gave.
///
/// # Safety
/// `text` is from there and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vgpu_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: the caller's promise.
        drop(unsafe { CString::from_raw(text) });
    }
}
