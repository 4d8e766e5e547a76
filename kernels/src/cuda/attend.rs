//! Causal attention over the paged cache (`kernels/cuda/attend.cu`), into the form that the output projection reads.
//!
//! As everywhere here: only launches, geometry from sizes that the host knows; lengths and blocks are read from the
//! [`Batch`]. A row gets the same bits alone, in a chunk and in a batch, however the work is cut.

use std::sync::Arc;

use super::{
    Args, Batch, CudaError, Device, DevicePtr, Kernel, KvPool, Pod,
    acts::{Acts, Form},
    batch::{BLOCKS_PER_PROCESSOR, Shape},
    kv::PoolArgs,
    ops::Ops,
    ptx,
};
use crate::cpu::kv::KvType;

/// Threads of a block, as in the source.
const THREADS: usize = 128;
const MERGE_THREADS: usize = 64;
const PLAIN_THREADS: usize = 128;
/// Padded head sizes that the tensor-core kernels are compiled for.
const SIZES: [usize; 4] = [32, 64, 128, 256];

/// Attention, compiled for a device.
pub struct Attend {
    device: Arc<Device>,
    /// Of f16 and int8 caches, per size.
    tensor: [[Kernel; 4]; 2],
    merge: Kernel,
    /// In the order of [`KvType`].
    plain: [Kernel; 3],
}

/// What is the same for every sequence of one layer.
#[derive(Debug, Clone, Copy)]
pub struct Params {
    /// Layer of the cache.
    pub layer: usize,
    /// Query heads; a multiple of the layer's key/value heads.
    pub heads: usize,
    /// Factor on `q . k`.
    pub scale: f32,
    /// A row sees only the last so many tokens, itself included; at least 1.
    pub window: Option<usize>,
}

/// The struct `Attend` of the source.
#[derive(Clone, Copy)]
#[repr(C)]
struct AttendArgs {
    qkv: DevicePtr,
    batch: DevicePtr,
    out: DevicePtr,
    states: DevicePtr,
    pool: PoolArgs,
    scale: f32,
    kind: u32,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    window: u32,
}

// SAFETY: words of 64 bits, then six of 32: no padding.
unsafe impl Pod for AttendArgs {}

impl Attend {
    /// Has the driver compile it.
    pub fn new(device: &Arc<Device>) -> Result<Attend, CudaError> {
        let kernel = |name| device.kernel(&ptx::ATTEND, name);
        let attend = Attend {
            device: device.clone(),
            tensor: [
                [
                    kernel("attend_f16_32")?,
                    kernel("attend_f16_64")?,
                    kernel("attend_f16_128")?,
                    kernel("attend_f16_256")?,
                ],
                [
                    kernel("attend_int8_32")?,
                    kernel("attend_int8_64")?,
                    kernel("attend_int8_128")?,
                    kernel("attend_int8_256")?,
                ],
            ],
            merge: kernel("merge")?,
            plain: [kernel("attend_plain_f16")?, kernel("attend_plain_f32")?, kernel("attend_plain_int8")?],
        };
        for kernels in &attend.tensor {
            for (kernel, size) in kernels.iter().zip(SIZES) {
                let shared = shared(size);
                if !kernel.allow_shared(shared)? {
                    return Err(CudaError::Model {
                        what: "shared memory of a block",
                        expected: format!("at least {shared} bytes"),
                        got: format!("{} bytes", device.info().shared),
                    });
                }
            }
        }
        Ok(attend)
    }

    /// Attention of `m` rows, which are those that `batch` describes; `qkv`: f32
    /// `[m][(heads + 2 * kv_heads) * head_dim]`, its keys and values already in the cache. Column `j` of the result is
    /// column `order[j]`, u32 `[heads * head_dim]`, of the heads side by side.
    ///
    /// [`Form::F16`] computes on tensor cores where the cache is f16 or int8; otherwise all is f32.
    pub fn run(
        &self,
        ops: &Ops,
        qkv: DevicePtr,
        kv: &KvPool,
        params: &Params,
        batch: &Batch,
        order: Option<DevicePtr>,
        to: &Acts,
        m: usize,
    ) -> Result<(), CudaError> {
        let layer = kv.layer(params.layer);
        let (heads, head_dim) = (params.heads, layer.head_dim);
        let shape = Shape { heads, kv_heads: layer.kv_heads, head_dim, window: params.window };
        assert!(m <= batch.rows() && params.window != Some(0), "{m} rows of {}, {shape:?}", batch.rows());
        let args = AttendArgs {
            qkv,
            batch: batch.words(),
            out: batch.partials.ptr(),
            states: batch.states.ptr(),
            pool: kv.args(params.layer),
            scale: params.scale,
            kind: batch.kind(&shape) as u32,
            heads: heads as u32,
            kv_heads: layer.kv_heads as u32,
            head_dim: head_dim as u32,
            window: params.window.map_or(u32::MAX, |w| w.min(u32::MAX as usize - 1) as u32),
        };
        let attended = batch.attended.ptr();
        let mut both = Args::new().with(args).with(attended);
        let tensor = match (to.form, kv.kind()) {
            (Form::F16, KvType::F16) => Some(&self.tensor[0]),
            (Form::F16, KvType::Int8) => Some(&self.tensor[1]),
            _ => None,
        };
        if let Some(kernels) = tensor {
            let size = SIZES.iter().position(|&s| s >= head_dim).expect("a head of at most 256, as the spec says");
            let resident = BLOCKS_PER_PROCESSOR * if SIZES[size] < 128 { 2 } else { 1 };
            let grid = [resident * self.device.info().processors, 1, 1];
            let mut args = Args::new().with(args);
            // SAFETY: the kernel's parameters; the caller keeps what the addresses are of (module), and the batch
            // describes rows and blocks that are there.
            unsafe {
                self.device.launch(&kernels[size], grid, THREADS, shared(SIZES[size]), &mut args)?;
                self.device.launch(&self.merge, [m, heads, 1], MERGE_THREADS, 0, &mut both)?;
            }
        } else {
            let kernel = &self.plain[match kv.kind() {
                KvType::F16 => 0,
                KvType::F32 => 1,
                KvType::Int8 => 2,
            }];
            // SAFETY: as above.
            unsafe { self.device.launch(kernel, [m, heads, 1], PLAIN_THREADS, 0, &mut both)? };
        }
        ops.rows(attended, order, heads * head_dim, to, m)
    }
}

/// Bytes of dynamic shared memory for a padded head size (`Shape` of the source): two steps of keys and values, two of
/// int8 scales, and queries where they are not held in registers.
fn shared(size: usize) -> usize {
    let (step, row) = (if size <= 128 { 32 } else { 16 }, size + 8);
    let queries = if size <= 128 { 0 } else { 64 * row * 2 };
    2 * 2 * step * row * 2 + 2 * step * 4 + queries
}
