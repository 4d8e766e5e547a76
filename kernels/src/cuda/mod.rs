//! The CUDA backend: driver, device memory, kernels of `kernels/cuda`, and the executor that runs a model on them.
//!
//! The driver is loaded when a device is first asked for, so that one program runs with and without it. Kernels are
//! in the program as PTX (`kernels/ptx`), which the driver compiles for its device.

pub mod acts;
pub mod attend;
pub mod batch;
mod buffer;
pub mod choose;
mod device;
mod driver;
mod error;
mod exec;
mod forward;
pub mod heads;
pub mod kv;
mod layout;
mod linear;
mod model;
mod module;
pub mod ops;
pub mod peak;
pub mod ptx;
pub mod route;
mod stage;
mod upload;
mod weight;

pub use attend::Attend;
pub use batch::Batch;
pub use buffer::{Buffer, DevicePtr, Pinned, Pod};
pub use choose::Choose;
pub use device::{Device, DeviceInfo, Graph, devices};
pub use error::CudaError;
pub use exec::{CudaExecutor, CudaHead, CudaOptions, CudaPlan, HEAD_ROWS, MOST_ROWS};
pub use kv::KvPool;
pub use linear::{Linear, Output, Tiles};
pub use module::{Args, Kernel, Ptx};
pub use upload::Upload;
pub use weight::Weight;

/// Tensors of the file that go to a device which has the layers from `first` on.
pub(crate) fn tensors(file: &quern_models::ModelFile, first: usize) -> impl Iterator<Item = usize> {
    model::Model::tensors(file, first)
}

/// Oldest CUDA version a driver may speak, as `1000 * major + 10 * minor`: that of the PTX (ISA 8.0).
pub const DRIVER_VERSION: i32 = 12000;

/// The driver's own version that came with [`DRIVER_VERSION`].
const DRIVER_NAME: &str = "525";

/// The first device that can be used, or why there is none.
pub fn usable() -> Result<usize, CudaError> {
    let all = devices()?;
    if let Some(device) = all.iter().find(|d| d.capability >= device::CAPABILITY) {
        return Ok(device.ordinal);
    }
    let first = all.into_iter().next().ok_or(CudaError::NoDevice)?;
    Err(CudaError::OldDevice { ordinal: 0, name: first.name, capability: first.capability })
}
