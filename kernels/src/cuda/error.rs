//! What can go wrong with a CUDA device, said so that a person knows what to do.

use cudarc::driver::{DriverError, sys::CUresult};

/// A device that cannot be used, or a call that failed.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// The driver's library is not on this machine.
    #[error(
        "no NVIDIA driver here (libcuda.so.1 cannot be loaded): install one of version {} or later, or run with --device cpu",
        super::DRIVER_NAME
    )]
    NoDriver,
    /// The library lacks a function that is needed.
    #[error(
        "the NVIDIA driver here has no function {name}: version {} or later is needed; update it, or run with --device cpu",
        super::DRIVER_NAME
    )]
    Symbol {
        /// The function.
        name: &'static str,
    },
    /// The driver is older than the kernels.
    #[error(
        "the NVIDIA driver here speaks CUDA {}.{}, the kernels need {}.{} (driver {} or later): update it, or run with --device cpu",
        found / 1000, found % 1000 / 10, needed / 1000, needed % 1000 / 10, super::DRIVER_NAME
    )]
    OldDriver {
        /// What the driver reports: 1000 * major + 10 * minor.
        found: i32,
        /// What is needed, in the same form.
        needed: i32,
    },
    /// There is a driver and no device.
    #[error("the NVIDIA driver sees no device: run with --device cpu")]
    NoDevice,
    /// A device that is not there was asked for.
    #[error("there is no device cuda:{asked}: expected a number below {there}; `quern info --devices` lists them")]
    Ordinal {
        /// The number asked for.
        asked: usize,
        /// Devices there are.
        there: usize,
    },
    /// The device is older than the kernels.
    #[error(
        "cuda:{ordinal} ({name}) has compute capability {}.{}, the kernels need 8.0 or later (Ampere): run with --device cpu",
        capability.0, capability.1
    )]
    OldDevice {
        /// Its number.
        ordinal: usize,
        /// Its name.
        name: String,
        /// Its compute capability.
        capability: (i32, i32),
    },
    /// Memory of the device is used up.
    #[error("{what}: {bytes} bytes of device memory cannot be had, {free} of {total} are free: {advice}", advice = MEMORY_ADVICE)]
    Memory {
        /// What the memory was for.
        what: &'static str,
        /// Bytes asked for.
        bytes: usize,
        /// Bytes free now.
        free: usize,
        /// Bytes of the device.
        total: usize,
    },
    /// A model that does not fit.
    #[error(
        "{what} needs {} bytes of device memory: {weights} weights, {cache} cache, {scratch} scratch; {free} of {total} are free: {fitting}{advice}",
        weights + cache + scratch, fitting = layers.map_or(String::new(), |n| format!("--gpu-layers {n} would fit; or ")),
        advice = MEMORY_ADVICE
    )]
    Plan {
        /// What does not fit.
        what: &'static str,
        /// Bytes of weights.
        weights: usize,
        /// Bytes of keys and values.
        cache: usize,
        /// Bytes of buffers.
        scratch: usize,
        /// Bytes free now.
        free: usize,
        /// Bytes of the device.
        total: usize,
        /// Layers that would fit, where it is a matter of layers.
        layers: Option<usize>,
    },
    /// The driver refuses the kernels.
    #[error("the driver refuses the kernels of `{module}`: {name} ({text}){}", if log.is_empty() { String::new() } else { format!("\n{log}") })]
    Module {
        /// Name of the module.
        module: &'static str,
        /// The driver's name of the error.
        name: String,
        /// The driver's explanation.
        text: String,
        /// What its compiler says.
        log: String,
    },
    /// A call failed.
    #[error("{call}: {name} ({text}){}", if *lost { "; this process cannot use the device any more: start it again" } else { "" })]
    Call {
        /// The driver's function, or what was being done.
        call: &'static str,
        /// The driver's name of the error.
        name: String,
        /// The driver's explanation.
        text: String,
        /// Whether the device can be used no longer by this process.
        lost: bool,
    },
    /// A model that the device cannot run.
    #[error("cuda: {what}: expected {expected}, got {got}: run with --device cpu")]
    Model {
        /// What the device cannot do.
        what: &'static str,
        /// What it can.
        expected: String,
        /// What the model has.
        got: String,
    },
}

const MEMORY_ADVICE: &str =
    "use a smaller context or fewer sequences, --kv int8, --device cpu, or end other programs on the device";

impl CudaError {
    /// Whether the device can be used no longer by this process.
    pub fn is_lost(&self) -> bool {
        matches!(self, CudaError::Call { lost: true, .. })
    }

    /// A call's failure.
    pub(super) fn call(call: &'static str, error: DriverError) -> CudaError {
        let (name, text) = explain(error);
        // Errors of kernels and of the device stay; the others are of one call.
        let lost = matches!(error.0 as u32, 46 | 214 | 220 | 226 | 700..=702 | 714..=719 | 999);
        CudaError::Call { call, name, text, lost }
    }
}

/// The driver's name and text of an error.
pub(super) fn explain(DriverError(code): DriverError) -> (String, String) {
    let text = |s: Result<&std::ffi::CStr, DriverError>| s.map(|s| s.to_string_lossy().into_owned());
    let error = DriverError(code);
    (
        text(error.error_name()).unwrap_or_else(|_| format!("CUresult {}", code as u32)),
        text(error.error_string()).unwrap_or_else(|_| "unknown".into()),
    )
}

/// Whether an error says that memory is used up.
pub(super) fn is_memory(error: &DriverError) -> bool {
    error.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY
}
