//! What the rows of a head begin with, and Medusa's blocks (`kernels/cuda/heads.cu`). As [`super::ops`]: functions only
//! launch, and addresses are the caller's.

use std::sync::Arc;

use super::{
    Args, CudaError, Device, DevicePtr, Kernel, Pod,
    acts::Acts,
    ops::{Norm, NormKind, form},
    ptx,
};

/// Threads of a block, as in the source.
const THREADS: usize = 256;

/// The operations, compiled for a device.
pub struct HeadOps {
    device: Arc<Device>,
    /// In the forms of activations.
    join: [Kernel; 3],
    add_silu: Kernel,
}

/// Rows and their norm.
#[derive(Debug, Clone, Copy)]
pub struct Half {
    /// f32 `[m][hidden]`.
    pub x: DevicePtr,
    /// Their norm.
    pub norm: Norm,
}

/// Embeddings and states, to be put side by side.
#[derive(Debug, Clone, Copy)]
pub struct Join {
    /// Embeddings.
    pub embedding: Half,
    /// States.
    pub state: Half,
    /// The states come first.
    pub state_first: bool,
    /// Column `j` of the result is column `order[j]` of both together, u32 `[2 hidden]`.
    pub order: Option<DevicePtr>,
    /// u32 `[m]`: the embedding of a row at position 0 is zeros, in front of its norm.
    pub zero_first: Option<DevicePtr>,
}

/// [`Half`] as the kernel takes it.
#[derive(Clone, Copy)]
#[repr(C)]
struct HalfArgs {
    x: DevicePtr,
    weight: DevicePtr,
    bias: DevicePtr,
    kind: u32,
    eps: f32,
}

/// [`Join`] as the kernel takes it.
#[derive(Clone, Copy)]
#[repr(C)]
struct JoinArgs {
    halves: [HalfArgs; 2],
    order: DevicePtr,
    positions: DevicePtr,
    n: u32,
    state_first: u32,
}

// SAFETY: words of 64 bits and pairs of words of 32: no padding.
unsafe impl Pod for JoinArgs {}

impl Half {
    fn args(&self) -> HalfArgs {
        let kind = match self.norm.kind {
            NormKind::Rms => 0,
            NormKind::Layer => 1,
            NormKind::Identity => 2,
        };
        assert!(kind != 1 || self.norm.bias.is_some(), "a layer norm has a bias");
        let bias = self.norm.bias.unwrap_or(DevicePtr::NULL);
        HalfArgs { x: self.x, weight: self.norm.weight, bias, kind, eps: self.norm.eps }
    }
}

impl HeadOps {
    /// Has the driver compile them.
    pub fn new(device: &Arc<Device>) -> Result<HeadOps, CudaError> {
        let kernel = |name| device.kernel(&ptx::HEADS, name);
        Ok(HeadOps {
            device: device.clone(),
            join: [kernel("join_f16")?, kernel("join_f32")?, kernel("join_int8")?],
            add_silu: kernel("add_silu")?,
        })
    }

    /// Normed embeddings and normed states of `m` rows side by side, `[m][2 hidden]`.
    pub fn join(&self, what: &Join, hidden: usize, to: &Acts, m: usize) -> Result<(), CudaError> {
        assert!(
            m <= to.rows && 2 * hidden <= to.stride,
            "{m} rows of {hidden} twice into {} of {}",
            to.rows,
            to.stride
        );
        let join = JoinArgs {
            halves: [what.embedding.args(), what.state.args()],
            order: what.order.unwrap_or(DevicePtr::NULL),
            positions: what.zero_first.unwrap_or(DevicePtr::NULL),
            n: hidden as u32,
            state_first: u32::from(what.state_first),
        };
        let mut args = Args::new().with(join).with(to.args());
        // SAFETY: the kernel's parameters; the caller keeps what the addresses are of (`ops`).
        unsafe { self.device.launch(&self.join[form(to)], [m, 1, 1], THREADS, 0, &mut args) }
    }

    /// `to += silu(x)`, both f32 `[m][columns]`.
    pub fn add_silu(&self, x: DevicePtr, columns: usize, to: DevicePtr, m: usize) -> Result<(), CudaError> {
        let mut args = Args::new().with(x).with(columns as u32).with(to);
        // SAFETY: as in `join`.
        unsafe { self.device.launch(&self.add_silu, [m, 1, 1], THREADS, 0, &mut args) }
    }
}
