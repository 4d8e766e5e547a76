//! The driver's library: whether it is there, whether it has what is needed.
//!
//! cudarc looks functions up at their first call and panics where one is missing. Everything this package calls is
//! therefore looked up here first.

use std::sync::OnceLock;

use cudarc::driver::{result, sys};

use super::{CudaError, DRIVER_VERSION};

/// Every driver function that this package calls.
const NEEDED: [&str; 45] = [
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetUuid",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncSetAttribute",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuInit",
    "cuLaunchKernel",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemHostGetDevicePointer_v2",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadDataEx",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamSynchronize",
];

/// Loads the driver once and for all and returns the CUDA version it speaks.
pub(super) fn init() -> Result<i32, CudaError> {
    static READY: OnceLock<Result<i32, Refusal>> = OnceLock::new();
    READY.get_or_init(load).clone().map_err(CudaError::from)
}

/// Why the driver is of no use; what [`init`] remembers.
#[derive(Clone)]
enum Refusal {
    None,
    Symbol(&'static str),
    Old(i32),
    NoDevice,
    Call(String, String),
}

impl From<Refusal> for CudaError {
    fn from(refusal: Refusal) -> CudaError {
        match refusal {
            Refusal::None => CudaError::NoDriver,
            Refusal::Symbol(name) => CudaError::Symbol { name },
            Refusal::Old(found) => CudaError::OldDriver { found, needed: DRIVER_VERSION },
            Refusal::NoDevice => CudaError::NoDevice,
            Refusal::Call(name, text) => CudaError::Call { call: "cuInit", name, text, lost: false },
        }
    }
}

fn load() -> Result<i32, Refusal> {
    // SAFETY: loads the driver's library, whose initialisers are trusted.
    if !unsafe { sys::is_culib_present() } {
        return Err(Refusal::None);
    }
    // SAFETY: the library is there, so this does not panic; its functions are only looked up.
    let library = unsafe { sys::culib() };
    for name in NEEDED {
        // SAFETY: the symbol is not used.
        if unsafe { library.get::<*const ()>(name.as_bytes()) }.is_err() {
            return Err(Refusal::Symbol(name));
        }
    }
    result::init().map_err(|e| match e.0 {
        sys::CUresult::CUDA_ERROR_NO_DEVICE => Refusal::NoDevice,
        _ => {
            let (name, text) = super::error::explain(e);
            Refusal::Call(name, text)
        }
    })?;
    let mut version = 0;
    // SAFETY: writes one int.
    let status = unsafe { sys::cuDriverGetVersion(&mut version) }.result();
    match status {
        Err(e) => {
            let (name, text) = super::error::explain(e);
            Err(Refusal::Call(name, text))
        }
        Ok(()) if version < DRIVER_VERSION => Err(Refusal::Old(version)),
        Ok(()) => Ok(version),
    }
}
