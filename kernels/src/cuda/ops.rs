//! Row operations between linear layers: norms, activations, rope and the way into the cache (`kernels/cuda/ops.cu`).
//!
//! Every function only launches: no allocation, no waiting, geometry from sizes that the host knows, so that all can
//! be recorded in a graph. Addresses are those of buffers that the caller keeps and that have the stated shapes.

use std::sync::Arc;

use quern_models::spec::Act;

use super::{
    Args, CudaError, Device, DevicePtr, Kernel, KvPool, Pod,
    acts::{Acts, Form},
    kv::PoolArgs,
    ptx,
};
use crate::cpu::kv::{KvType, SCALES};

/// Threads of a block, as in the source.
const THREADS: usize = 256;
const ACT_THREADS: usize = 512;
/// Heads that a block of [`Ops::rope_append`] takes.
const HEADS: usize = 4;

/// Kernels for the same thing in the forms of activations: [`Form::F16`], [`Form::F32`], [`Form::Int8`].
type Forms = [Kernel; 3];

/// The operations, compiled for a device.
pub struct Ops {
    device: Arc<Device>,
    rms: Forms,
    layer: Forms,
    /// RMS, layer.
    rows_normed: [Kernel; 2],
    rows: Forms,
    copy: Kernel,
    norm_add: Kernel,
    soft_cap: Kernel,
    /// In the order of [`Act`].
    acts: [Forms; 3],
    /// In the order of [`KvType`].
    append: [Kernel; 4],
    copy_slots: Kernel,
}

/// Which norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// `(x * r) * weight`, `r = 1 / sqrt(mean(x^2) + eps)`.
    Rms,
    /// `((x - mean) * r) * weight + bias`, `r = 1 / sqrt(mean((x - mean)^2) + eps)`.
    Layer,
    /// `x`.
    Identity,
}

/// A norm's parameters on the device.
#[derive(Debug, Clone, Copy)]
pub struct Norm {
    /// Which.
    pub kind: NormKind,
    /// Added to the mean of squares.
    pub eps: f32,
    /// f32 `[hidden]`; not of [`NormKind::Identity`].
    pub weight: DevicePtr,
    /// f32 `[hidden]`; only of [`NormKind::Layer`], which needs it.
    pub bias: Option<DevicePtr>,
}

/// What happens to q, k and v before attention.
#[derive(Debug, Clone, Copy)]
pub struct RopeAppend {
    /// Cosines and sines, f32 `[m][head_dim / 2]`, if there is a rope.
    pub rope: Option<(DevicePtr, DevicePtr)>,
    /// RMS norms of the heads of q and of k before it: weights f32 `[head_dim]`, eps.
    pub norms: Option<(DevicePtr, DevicePtr, f32)>,
    /// u32 `[m]`: `block * 16 + slot` of each row, or [`NO_PLACE`](super::kv::NO_PLACE).
    pub places: DevicePtr,
    /// Query heads.
    pub heads: usize,
}

/// [`RopeAppend`] as the kernel takes it.
#[derive(Clone, Copy)]
#[repr(C)]
struct RopeArgs {
    qkv: DevicePtr,
    cos: DevicePtr,
    sin: DevicePtr,
    q_norm: DevicePtr,
    k_norm: DevicePtr,
    places: DevicePtr,
    pool: PoolArgs,
    eps: f32,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
}

// SAFETY: words of 64 bits, then four of 32: no padding.
unsafe impl Pod for RopeArgs {}

/// Slots to be copied, as the kernel takes them.
#[derive(Clone, Copy)]
#[repr(C)]
struct CopyArgs {
    pairs: DevicePtr,
    pool: PoolArgs,
    count: u32,
    each: u32,
    row: u32,
    skip: u32,
}

// SAFETY: words of 64 bits, then four of 32: no padding.
unsafe impl Pod for CopyArgs {}

impl Ops {
    /// Has the driver compile them.
    pub fn new(device: &Arc<Device>) -> Result<Ops, CudaError> {
        let kernel = |name| device.kernel(&ptx::OPS, name);
        let forms = |[half, single, int8]: [&'static str; 3]| -> Result<Forms, CudaError> {
            Ok([kernel(half)?, kernel(single)?, kernel(int8)?])
        };
        Ok(Ops {
            device: device.clone(),
            rms: forms(["rms_norm_f16", "rms_norm_f32", "rms_norm_int8"])?,
            layer: forms(["layer_norm_f16", "layer_norm_f32", "layer_norm_int8"])?,
            rows_normed: [kernel("rms_norm_rows")?, kernel("layer_norm_rows")?],
            rows: forms(["rows_f16", "rows_f32", "rows_int8"])?,
            copy: kernel("copy_rows")?,
            norm_add: kernel("rms_norm_add")?,
            soft_cap: kernel("soft_cap_rows")?,
            acts: [
                forms(["silu_f16", "silu_f32", "silu_int8"])?,
                forms(["gelu_f16", "gelu_f32", "gelu_int8"])?,
                forms(["gelu_tanh_f16", "gelu_tanh_f32", "gelu_tanh_int8"])?,
            ],
            append: [
                kernel("rope_append_f16")?,
                kernel("rope_append_f32")?,
                kernel("rope_append_int8")?,
                kernel("rope_append_fp8")?,
            ],
            copy_slots: kernel("copy_slots")?,
        })
    }

    /// Norm of `m` rows of `x`, f32 `[..][hidden]`, into `to`: rows `rows`, u32 `[m]`, or the first `m`; column `j` of
    /// the result is column `order[j]`, u32 `[hidden]`, of the normed row.
    pub fn norm(
        &self,
        x: DevicePtr,
        rows: Option<DevicePtr>,
        norm: &Norm,
        order: Option<DevicePtr>,
        hidden: usize,
        to: &Acts,
        m: usize,
    ) -> Result<(), CudaError> {
        check(to, hidden, m);
        let kernels = match norm.kind {
            NormKind::Rms => &self.rms,
            NormKind::Layer => &self.layer,
            NormKind::Identity => return self.picked(x, rows, order, hidden, to, m),
        };
        let args = Args::new().with(x).with(or_null(rows)).with(norm.weight).with(bias(norm)).with(or_null(order));
        let mut args = args.with(hidden as u32).with(norm.eps).with(to.args());
        // SAFETY: the kernel's parameters; the caller keeps what the addresses are of (module).
        unsafe { self.device.launch(&kernels[form(to)], [m, 1, 1], THREADS, 0, &mut args) }
    }

    /// The same into `to`, f32 `[m][hidden]`, in natural order.
    pub fn normed(
        &self,
        x: DevicePtr,
        rows: Option<DevicePtr>,
        norm: &Norm,
        hidden: usize,
        to: DevicePtr,
        m: usize,
    ) -> Result<(), CudaError> {
        if norm.kind == NormKind::Identity {
            return self.copy(x, rows, hidden, to, hidden, m);
        }
        let kernel = &self.rows_normed[usize::from(norm.kind == NormKind::Layer)];
        let args = Args::new().with(x).with(or_null(rows)).with(norm.weight).with(bias(norm));
        let mut args = args.with(hidden as u32).with(norm.eps).with(to);
        // SAFETY: as in `norm`.
        unsafe { self.device.launch(kernel, [m, 1, 1], THREADS, 0, &mut args) }
    }

    /// `x += norm(y)` of an RMS norm; both f32 `[m][hidden]`.
    pub fn norm_add(&self, y: DevicePtr, norm: &Norm, hidden: usize, x: DevicePtr, m: usize) -> Result<(), CudaError> {
        assert!(norm.kind == NormKind::Rms, "{norm:?}");
        let mut args = Args::new().with(y).with(norm.weight).with(hidden as u32).with(norm.eps).with(x);
        // SAFETY: as in `norm`.
        unsafe { self.device.launch(&self.norm_add, [m, 1, 1], THREADS, 0, &mut args) }
    }

    /// `x = cap * tanh(x / cap)` of `m` rows of `columns`, f32, one behind the other.
    pub fn soft_cap(&self, x: DevicePtr, cap: f32, columns: usize, m: usize) -> Result<(), CudaError> {
        let mut args = Args::new().with(x).with(columns as u32).with(cap);
        // SAFETY: as in `norm`.
        unsafe { self.device.launch(&self.soft_cap, [m, columns.div_ceil(THREADS), 1], THREADS, 0, &mut args) }
    }

    /// Rows `x`, f32 `[m][columns]`, as they are: column `j` of the result is column `order[j]`.
    pub fn rows(
        &self,
        x: DevicePtr,
        order: Option<DevicePtr>,
        columns: usize,
        to: &Acts,
        m: usize,
    ) -> Result<(), CudaError> {
        self.picked(x, None, order, columns, to, m)
    }

    /// The same of the rows `rows`, u32 `[m]`.
    fn picked(
        &self,
        x: DevicePtr,
        rows: Option<DevicePtr>,
        order: Option<DevicePtr>,
        columns: usize,
        to: &Acts,
        m: usize,
    ) -> Result<(), CudaError> {
        check(to, columns, m);
        let args = Args::new().with(x).with(or_null(rows)).with(or_null(order));
        let mut args = args.with(columns as u32).with(to.args());
        // SAFETY: as in `norm`.
        unsafe { self.device.launch(&self.rows[form(to)], [m, 1, 1], THREADS, 0, &mut args) }
    }

    /// Rows of `x`, f32 `[..][columns]`, as they are into `to`, f32 `[m][stride]`: rows `rows`, u32 `[m]`, or the first
    /// `m`.
    pub fn copy(
        &self,
        x: DevicePtr,
        rows: Option<DevicePtr>,
        columns: usize,
        to: DevicePtr,
        stride: usize,
        m: usize,
    ) -> Result<(), CudaError> {
        assert!(columns <= stride, "rows of {columns} every {stride}");
        let args = Args::new().with(x).with(or_null(rows)).with(columns as u32);
        let mut args = args.with(to).with(stride as u32);
        // SAFETY: as in `norm`.
        unsafe { self.device.launch(&self.copy, [m, 1, 1], THREADS, 0, &mut args) }
    }

    /// `act(gate) * up` or `act(x)`: of `gate_up`, f32 `[m][2 * inner]` with the gate first, or `[m][inner]`. The first
    /// `inner` columns of every row are overwritten.
    pub fn act(
        &self,
        gate_up: DevicePtr,
        act: Act,
        gated: bool,
        inner: usize,
        to: &Acts,
        m: usize,
    ) -> Result<(), CudaError> {
        check(to, inner, m);
        let kernels = &self.acts[match act {
            Act::Silu => 0,
            Act::Gelu => 1,
            Act::GeluTanh => 2,
        }];
        let mut args = Args::new().with(gate_up).with(inner as u32).with(u32::from(gated)).with(to.args());
        // SAFETY: as in `norm`.
        unsafe { self.device.launch(&kernels[form(to)], [m, 1, 1], ACT_THREADS, 0, &mut args) }
    }

    /// Norms of heads, rope (pairs `i` and `i + head_dim / 2`), both in place in `qkv`, f32
    /// `[m][(heads + 2 * kv_heads) * head_dim]`, and keys and values into the pool.
    pub fn rope_append(
        &self,
        qkv: DevicePtr,
        what: &RopeAppend,
        kv: &KvPool,
        layer: usize,
        m: usize,
    ) -> Result<(), CudaError> {
        let shape = kv.layer(layer);
        let (cos, sin) = what.rope.unwrap_or((DevicePtr::NULL, DevicePtr::NULL));
        let (q_norm, k_norm, eps) = what.norms.unwrap_or((DevicePtr::NULL, DevicePtr::NULL, 0.0));
        let mut args = Args::new().with(RopeArgs {
            qkv,
            cos,
            sin,
            q_norm,
            k_norm,
            places: what.places,
            pool: kv.args(layer),
            eps,
            heads: what.heads as u32,
            kv_heads: shape.kv_heads as u32,
            head_dim: shape.head_dim as u32,
        });
        let kernel = &self.append[match kv.kind() {
            KvType::F16 => 0,
            KvType::F32 => 1,
            KvType::Int8 => 2,
            KvType::Fp8 => 3,
        }];
        let grid = [m, (what.heads + shape.kv_heads).div_ceil(HEADS), 1];
        // SAFETY: as in `norm`; places are of the pool's blocks.
        unsafe { self.device.launch(kernel, grid, HEADS * 32, 0, &mut args) }
    }
}

impl Ops {
    /// Copies keys and values of one layer: `pairs`, u32 `[count][2]`, are places (`block * 16 + slot`) from and to.
    /// `in_order`: one after the other, so that what was read may be written later on; else at once, and no place is
    /// both read and written.
    pub fn copy_slots(
        &self,
        (pairs, count): (DevicePtr, usize),
        in_order: bool,
        kv: &KvPool,
        layer: usize,
    ) -> Result<(), CudaError> {
        if count == 0 {
            return Ok(());
        }
        let shape = kv.layer(layer);
        let (bytes, skip) = match kv.kind() {
            KvType::F16 => (2, 0),
            KvType::F32 => (4, 0),
            KvType::Int8 | KvType::Fp8 => (1, SCALES),
        };
        let each = if in_order { count } else { 1 };
        let mut args = Args::new().with(CopyArgs {
            pairs,
            pool: kv.args(layer),
            count: count as u32,
            each: each as u32,
            row: (shape.head_dim * bytes) as u32,
            skip: skip as u32,
        });
        let grid = [count.div_ceil(each), shape.kv_heads, 1];
        // SAFETY: as in `norm`; places are of the pool's blocks.
        unsafe { self.device.launch(&self.copy_slots, grid, 64, 0, &mut args) }
    }
}

pub(super) fn form(to: &Acts) -> usize {
    match to.form {
        Form::F16 => 0,
        Form::F32 => 1,
        Form::Int8 => 2,
    }
}

fn check(to: &Acts, columns: usize, m: usize) {
    assert!(m <= to.rows && columns <= to.stride, "{m} rows of {columns} into {} of {}", to.rows, to.stride);
}

fn or_null(ptr: Option<DevicePtr>) -> DevicePtr {
    ptr.unwrap_or(DevicePtr::NULL)
}

fn bias(norm: &Norm) -> DevicePtr {
    assert!(norm.kind != NormKind::Layer || norm.bias.is_some(), "a layer norm has a bias");
    or_null(norm.bias)
}
