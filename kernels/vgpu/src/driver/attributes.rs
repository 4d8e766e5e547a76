//! The device: what it is and has.
#![allow(non_snake_case)]

use std::ffi::{c_char, c_int};

use super::{INVALID_DEVICE, INVALID_VALUE, api, put};
use crate::settings::{Settings, settings};

/// Its name.
const NAME: &[u8] = b"Virtual GPU (PTX on the CPU)\0";

/// Shared memory of a block by opting in, and of a multiprocessor.
pub fn shared_memory(settings: &Settings) -> (u32, u32) {
    match settings.capability {
        80 | 87 => (166_912, 167_936),
        90..=119 => (232_448, 233_472),
        _ => (101_376, 102_400),
    }
}

/// Shared memory of a block without.
pub const PLAIN_SHARED: u32 = 49_152;

/// Threads of a multiprocessor.
pub fn resident_threads(settings: &Settings) -> u32 {
    match settings.capability {
        86..=89 | 120.. => 1536,
        _ => 2048,
    }
}

fn attribute(number: c_int) -> Result<c_int, u32> {
    let settings = settings();
    let (opt_in, per_multiprocessor) = shared_memory(&settings);
    Ok(match number {
        1..=3 => 1024,
        4 => 64,
        5 => i32::MAX,
        6 | 7 => 65_535,
        8 => PLAIN_SHARED as c_int,
        9 => 65_536,
        10 => 32,
        11 => i32::MAX,
        12 | 82 => 65_536,
        13 | 36 => 1_000_000,
        14 => 512,
        15 | 19 | 31 | 41 | 83 | 89 | 95 | 99 | 115 => 1,
        16 => settings.multiprocessors as c_int,
        18 => c_int::from(settings.integrated),
        88 | 91 | 100 => c_int::from(settings.integrated),
        33 | 34 | 50 => 0,
        37 => 128,
        38 => 4 << 20,
        39 => resident_threads(&settings) as c_int,
        40 => 1,
        75 => (settings.capability / 10) as c_int,
        76 => (settings.capability % 10) as c_int,
        81 => per_multiprocessor as c_int,
        97 => opt_in as c_int,
        106 => 32,
        111 => 1024,
        _ if (1..=200).contains(&number) => 0,
        _ => return Err(INVALID_VALUE),
    })
}

fn only(device: c_int) -> Result<(), u32> {
    if device == 0 { Ok(()) } else { Err(INVALID_DEVICE) }
}

api! {
    fn cuDriverGetVersion(version: *mut c_int) needs Nothing {
        // SAFETY: the caller's promise.
        unsafe { put(version, settings().driver as c_int) }
    }
    fn cuDeviceGetCount(count: *mut c_int) needs Init {
        // SAFETY: the caller's promise.
        unsafe { put(count, 1) }
    }
    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) needs Init {
        only(ordinal)?;
        // SAFETY: the caller's promise.
        unsafe { put(device, 0) }
    }
    fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) needs Init {
        only(device)?;
        if name.is_null() || len < 1 {
            return Err(INVALID_VALUE);
        }
        let len = NAME.len().min(len as usize);
        // SAFETY: the caller's promise: `len` bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(NAME.as_ptr().cast(), name, len);
            name.add(len - 1).write(0);
        }
        Ok(())
    }
    fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: c_int) needs Init {
        only(device)?;
        // SAFETY: the caller's promise.
        unsafe { put(uuid, *b"quern-virtualgpu") }
    }
    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) needs Init {
        only(device)?;
        // SAFETY: the caller's promise.
        unsafe { put(uuid, *b"quern-virtualgpu") }
    }
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) needs Init {
        only(device)?;
        // SAFETY: the caller's promise.
        unsafe { put(bytes, settings().memory as usize) }
    }
    fn cuDeviceGetAttribute(value: *mut c_int, number: c_int, device: c_int) needs Init {
        only(device)?;
        // SAFETY: the caller's promise.
        unsafe { put(value, attribute(number)?) }
    }
    fn cuDeviceComputeCapability(major: *mut c_int, minor: *mut c_int, device: c_int) needs Init {
        only(device)?;
        // SAFETY: the caller's promise.
        unsafe {
            put(major, attribute(75)?)?;
            put(minor, attribute(76)?)
        }
    }
    fn cuDeviceCanAccessPeer(can: *mut c_int, _device: c_int, _peer: c_int) needs Init {
        // SAFETY: the caller's promise.
        unsafe { put(can, 0) }
    }
    fn cuDeviceGetPCIBusId(id: *mut c_char, len: c_int, device: c_int) needs Init {
        only(device)?;
        let text = b"0000:00:00.0\0";
        if id.is_null() || (len as usize) < text.len() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's promise: `len` bytes.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast(), id, text.len()) };
        Ok(())
    }
}
