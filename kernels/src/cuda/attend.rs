//! Causal attention over the paged cache (`kernels/cuda/attend.cu`), into the form that the output projection reads.
//!
//! As everywhere here: only launches, geometry from sizes that the host knows; lengths and blocks are read from the
//! [`Batch`]. A row gets the same bits alone, in a chunk and in a batch, however the work is cut.

use std::sync::Arc;

use super::{
    Args, Batch, CudaError, Device, DevicePtr, Kernel, KvPool, Pod,
    acts::{Acts, Form},
    batch::{BLOCKS_PER_PROCESSOR, Cut, Shape},
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
    /// Of f16, int8 and fp8 caches, per size.
    wide: [[Kernel; 4]; 3],
    narrow: [[Kernel; 4]; 3],
    merge: Kernel,
    /// In the order of [`KvType`].
    plain: [Kernel; 4],
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
    /// Soft cap of the scores.
    pub cap: Option<f32>,
    /// f32 `[heads]`, a score of each query head that has no value, if there are any.
    pub sinks: Option<DevicePtr>,
}

/// The struct `Attend` of the source.
#[derive(Clone, Copy)]
#[repr(C)]
struct AttendArgs {
    qkv: DevicePtr,
    batch: DevicePtr,
    out: DevicePtr,
    states: DevicePtr,
    sinks: DevicePtr,
    pool: PoolArgs,
    scale: f32,
    cap: f32,
    twice: f32,
    kind: u32,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    window: u32,
}

// SAFETY: words of 64 bits, then eight of 32: no padding.
unsafe impl Pod for AttendArgs {}

impl Attend {
    /// Has the driver compile it.
    pub fn new(device: &Arc<Device>) -> Result<Attend, CudaError> {
        let kernel = |name| device.kernel(&ptx::ATTEND, name);
        let sizes = |[a, b, c, d]: [&'static str; 4]| -> Result<[Kernel; 4], CudaError> {
            Ok([kernel(a)?, kernel(b)?, kernel(c)?, kernel(d)?])
        };
        let attend = Attend {
            device: device.clone(),
            wide: [
                sizes(["wide_f16_32", "wide_f16_64", "wide_f16_128", "wide_f16_256"])?,
                sizes(["wide_int8_32", "wide_int8_64", "wide_int8_128", "wide_int8_256"])?,
                sizes(["wide_fp8_32", "wide_fp8_64", "wide_fp8_128", "wide_fp8_256"])?,
            ],
            narrow: [
                sizes(["narrow_f16_32", "narrow_f16_64", "narrow_f16_128", "narrow_f16_256"])?,
                sizes(["narrow_int8_32", "narrow_int8_64", "narrow_int8_128", "narrow_int8_256"])?,
                sizes(["narrow_fp8_32", "narrow_fp8_64", "narrow_fp8_128", "narrow_fp8_256"])?,
            ],
            merge: kernel("merge")?,
            plain: [
                kernel("attend_plain_f16")?,
                kernel("attend_plain_f32")?,
                kernel("attend_plain_int8")?,
                kernel("attend_plain_fp8")?,
            ],
        };
        for (cut, kernels) in [(Cut::Wide, &attend.wide), (Cut::Narrow, &attend.narrow)] {
            for (kind, kernels) in kernels.iter().enumerate() {
                for (kernel, size) in kernels.iter().zip(SIZES) {
                    let shared = shared(cut, size, kind > 0);
                    if !kernel.allow_shared(shared)? {
                        return Err(CudaError::Model {
                            what: "shared memory of a block",
                            expected: format!("at least {shared} bytes"),
                            got: format!("{} bytes", device.info().shared),
                        });
                    }
                }
            }
        }
        Ok(attend)
    }

    /// Attention of `m` rows, which are those that `batch` describes; `qkv`: f32
    /// `[m][(heads + 2 * kv_heads) * head_dim]`, its keys and values already in the cache. Column `j` of the result is
    /// column `order[j]`, u32 `[heads * head_dim]`, of the heads side by side.
    ///
    /// Computed on tensor cores where the cache is f16 or int8; in [`Form::F32`], and with such a cache, all is f32.
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
            sinks: params.sinks.unwrap_or(DevicePtr::NULL),
            pool: kv.args(params.layer),
            scale: params.scale,
            cap: params.cap.unwrap_or(0.0),
            twice: params.cap.map_or(0.0, |cap| 2.0 / cap),
            kind: batch.kind(&shape) as u32,
            heads: heads as u32,
            kv_heads: layer.kv_heads as u32,
            head_dim: head_dim as u32,
            window: params.window.map_or(u32::MAX, |w| w.min(u32::MAX as usize - 1) as u32),
        };
        let attended = batch.attended.ptr();
        let mut both = Args::new().with(args).with(attended);
        let tensor = match kv.kind() {
            KvType::F32 => None,
            KvType::F16 => Some(0),
            KvType::Int8 => Some(1),
            KvType::Fp8 => Some(2),
        };
        if let Some(kind) = tensor.filter(|_| to.form != Form::F32) {
            let kernels = match batch.cut() {
                Cut::Wide => &self.wide[kind],
                Cut::Narrow => &self.narrow[kind],
            };
            let size = SIZES.iter().position(|&s| s >= head_dim).expect("a head of at most 256, as the spec says");
            let resident = BLOCKS_PER_PROCESSOR * if SIZES[size] < 128 { 2 } else { 1 };
            let grid = [resident * self.device.info().processors, 1, 1];
            let shared = shared(batch.cut(), SIZES[size], kind > 0);
            let mut args = Args::new().with(args);
            // SAFETY: the kernel's parameters; the caller keeps what the addresses are of (module), and the batch
            // describes rows and blocks that are there.
            unsafe {
                self.device.launch(&kernels[size], grid, THREADS, shared, &mut args)?;
                self.device.launch(&self.merge, [m, heads, 1], MERGE_THREADS, 0, &mut both)?;
            }
        } else {
            let kernel = &self.plain[match kv.kind() {
                KvType::F16 => 0,
                KvType::F32 => 1,
                KvType::Int8 => 2,
                KvType::Fp8 => 3,
            }];
            // SAFETY: as above.
            unsafe { self.device.launch(kernel, [m, heads, 1], PLAIN_THREADS, 0, &mut both)? };
        }
        ops.rows(attended, order, heads * head_dim, to, m)
    }
}

/// Bytes of dynamic shared memory, as the source lays it out: stages of a step's keys and values; of wide tiles factors
/// of queries, scales of int8 keys, and queries that are not held in registers; of narrow ones scales and `Exchange`.
fn shared(cut: Cut, size: usize, codes: bool) -> usize {
    let (step, row) = (if size <= 128 { 32 } else { 16 }, size + 8);
    let stage = 2 * step * row * 2;
    match cut {
        Cut::Wide => 2 * stage + 64 * 4 + 2 * step * 4 + if size <= 128 { 0 } else { 64 * row * 2 },
        Cut::Narrow => {
            let stages = if codes { 2 } else { 4 };
            stages * (stage + step * 4) + 16 * (step + 8) * 2 + 4 * 16 * 4 + 16 * 4
        }
    }
}
