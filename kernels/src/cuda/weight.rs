//! Weights of linear layers in device memory.
//!
//! Codes, scales, zeros and minima lie as in the file (P64, models/FORMAT.md). Floats depend on the form of the
//! activations:
//!
//! - **f32 form**: rows as the file has them. So it is in the int8 form, in which floats and e4m3 codes read f32.
//! - **f16 form**: f16, rounded to nearest even, whatever type the file has. Tiles like those of 8-bit codes: rows
//!   padded to 64, columns to 64, `half p*64*Kpad + quad*256 + (row % 64)*4 + [0, 2, 1, 3][column % 4]`; padding is
//!   zero. Values below f16's smallest normal number lose bits (at most 3e-8 of absolute error); a value beyond its
//!   largest is an error.

use std::sync::Arc;

use quern_models::{FloatType, Mini, Planes, SUPER, Scheme, TensorView, ZeroKind};

use super::{
    Args, Buffer, CudaError, Device, DevicePtr, Upload,
    acts::Form,
    layout::{self, WeightRef},
    ptx,
};
use crate::cpu::acts::{BLOCK, Mode, SMALL_BLOCK, block};

/// A weight on the device.
pub struct Weight {
    /// Output rows.
    pub n: usize,
    /// Columns.
    pub k: usize,
    /// Columns with their padding: what it reads of its input.
    pub k_pad: usize,
    /// What the numbers are in the file.
    pub scheme: Scheme,
    /// Form of the activations that it is multiplied with: in the int8 form f32 for what is no integer.
    pub form: Form,
    pub(super) device: WeightRef,
    _memory: Buffer<u8>,
}

/// Most columns whose products are added before a scale comes in.
const FOLD: usize = 128;

/// Bytes of rows that are converted at a time.
const CHUNK: usize = 16 << 20;

/// Experts begin at multiples of so many bytes, as allocations do.
const TOGETHER: usize = 256;

impl Weight {
    /// Bytes that [`Weight::upload`] takes and keeps.
    pub fn bytes(view: &TensorView, form: Form) -> usize {
        match (view.scheme, form) {
            (Scheme::Float(_), Form::F16) => halves(view.n, view.k),
            _ => planes(view).total as usize,
        }
    }

    /// What a weight reads of its input in a form.
    fn reads(scheme: Scheme, form: Form) -> Form {
        match form {
            Form::Int8 if block(scheme, Mode::Int8).is_none() => Form::F32,
            _ => form,
        }
    }

    /// Columns of a block of activations in the int8 form.
    pub(super) fn block(&self) -> usize {
        block(self.scheme, Mode::Int8).unwrap_or(0)
    }

    /// Copies a tensor of the file to the device. Converting floats takes up to 16 MiB (or 64 rows) more meanwhile.
    pub fn upload(upload: &mut Upload, view: &TensorView, form: Form) -> Result<Weight, CudaError> {
        let mut memory = Buffer::new(&upload.device().clone(), "weights", Weight::bytes(view, form))?;
        let (device, k_pad) = Weight::upload_into(upload, view, form, &mut memory, 0)?;
        let form = Weight::reads(view.scheme, form);
        Ok(Weight { n: view.n, k: view.k, k_pad, scheme: view.scheme, form, device, _memory: memory })
    }

    /// The same of all experts' in one piece of memory, in equal steps: they must be alike. The result is the first, whose
    /// memory the others share.
    pub fn upload_experts(upload: &mut Upload, views: &[TensorView], form: Form) -> Result<Weight, CudaError> {
        let first = &views[0];
        let alike = |view: &TensorView| (view.scheme, view.n, view.k) == (first.scheme, first.n, first.k);
        if let Some(other) = views.iter().find(|view| !alike(view)) {
            return Err(CudaError::Model {
                what: "experts of a layer",
                expected: format!("all stored as the first, {}", first.scheme),
                got: other.scheme.to_string(),
            });
        }
        let step = Weight::step(first, form);
        let mut memory = Buffer::new(&upload.device().clone(), "weights", step.saturating_mul(views.len()))?;
        let (mut device, k_pad) = Weight::upload_into(upload, first, form, &mut memory, 0)?;
        for (e, view) in views.iter().enumerate().skip(1) {
            Weight::upload_into(upload, view, form, &mut memory, e * step)?;
        }
        device.step = step as u64;
        let form = Weight::reads(first.scheme, form);
        Ok(Weight { n: first.n, k: first.k, k_pad, scheme: first.scheme, form, device, _memory: memory })
    }

    /// Bytes from one expert to the next.
    fn step(view: &TensorView, form: Form) -> usize {
        Weight::bytes(view, form).next_multiple_of(TOGETHER)
    }

    /// Copies it to a part of `memory`; what kernels know of it there, and columns with their padding.
    fn upload_into(
        upload: &mut Upload,
        view: &TensorView,
        form: Form,
        memory: &mut Buffer<u8>,
        start: usize,
    ) -> Result<(WeightRef, usize), CudaError> {
        let device = upload.device().clone();
        let form = Weight::reads(view.scheme, form);
        let k_pad = match (view.scheme, form) {
            (Scheme::Order, _) => {
                return Err(CudaError::Model {
                    what: "a linear layer's weight",
                    expected: "codes or floats".into(),
                    got: view.scheme.to_string(),
                });
            }
            (Scheme::Float(kind), Form::F16) => {
                floats(upload, &device, view, kind, memory, start)?;
                view.k.next_multiple_of(64)
            }
            (Scheme::Float(_), Form::F32) => {
                upload.put_into(memory, start, view.codes)?;
                view.k
            }
            _ => {
                let p = planes(view);
                let parts = [(p.codes, view.codes), (p.scales, view.scales), (p.zeros, view.zeros)];
                for ((at, _), bytes) in parts.into_iter().chain([(p.supers, view.supers)]) {
                    upload.put_into(memory, start + at as usize, bytes)?;
                }
                view.k.next_multiple_of(group(view.scheme))
            }
        };
        let p = planes(view);
        let at = |(at, len): (u64, u64)| if len == 0 { DevicePtr::NULL } else { memory.at(start + at as usize) };
        let group = group(view.scheme);
        let (code, zero, scale) = kinds(view.scheme, form);
        let device = WeightRef {
            codes: memory.at(start),
            scales: at(p.scales),
            zeros: at(p.zeros),
            supers: at(p.supers),
            step: 0,
            n: view.n as u32,
            k: view.k as u32,
            k_pad: k_pad as u32,
            group: group as u32,
            groups: (k_pad / group) as u32,
            fold: fold(group, form) as u32,
            code,
            zero,
            scale,
            row_supers: k_pad.div_ceil(SUPER) as u32,
        };
        Ok((device, k_pad))
    }

    /// 64-row panels.
    pub(super) fn panels(&self) -> usize {
        self.n.div_ceil(64)
    }
}

/// Planes of a tensor of a mapped file.
fn planes(view: &TensorView) -> Planes {
    view.scheme.planes(view.n as u64, view.k as u64).expect("a view whose planes exist")
}

/// Bytes of the f16 form of floats.
fn halves(n: usize, k: usize) -> usize {
    n.next_multiple_of(64).saturating_mul(k.next_multiple_of(64)).saturating_mul(2)
}

/// Columns of a scale; 64 where there are none.
fn group(scheme: Scheme) -> usize {
    scheme.coded().map_or(64, |(_, group)| group)
}

/// The largest multiple of 16 up to [`FOLD`] that divides the group; in the int8 form, of whole blocks.
fn fold(group: usize, form: Form) -> usize {
    let unit = if form == Form::Int8 && group.is_multiple_of(BLOCK) { BLOCK } else { SMALL_BLOCK };
    let fold = (1..=FOLD / unit).rev().map(|f| f * unit).find(|f| group.is_multiple_of(*f));
    fold.expect("a group that is a multiple of 16")
}

/// Code, zero and scale kinds as kernels know them.
fn kinds(scheme: Scheme, form: Form) -> (u32, u32, u32) {
    let zero = |z| match z {
        ZeroKind::Mid => layout::ZERO_MID,
        ZeroKind::Code => layout::ZERO_CODE,
        ZeroKind::Min => layout::ZERO_MIN,
    };
    let scale = |s| match s {
        FloatType::F32 => layout::SCALE_F32,
        FloatType::F16 => layout::SCALE_F16,
        FloatType::BF16 => layout::SCALE_BF16,
    };
    let int = |bits| if bits == 4 { layout::CODE_INT4 } else { layout::CODE_INT8 };
    match scheme {
        Scheme::Int { bits, zero: z, scale: s, .. } => (int(bits), zero(z), scale(s)),
        Scheme::Nested { bits, zero: z, .. } => (int(bits), zero(z), layout::SCALE_NESTED),
        Scheme::Mini { kind: Mini::E2M1, scale: s, .. } => (layout::CODE_E2M1, layout::ZERO_MID, scale(s)),
        Scheme::Mini { kind: Mini::E4M3, scale: s, .. } => (layout::CODE_E4M3, layout::ZERO_MID, scale(s)),
        Scheme::Float(_) | Scheme::Order if form == Form::F16 => {
            (layout::CODE_HALVES, layout::ZERO_MID, layout::SCALE_NONE)
        }
        Scheme::Float(FloatType::F16) => (layout::CODE_F16, layout::ZERO_MID, layout::SCALE_NONE),
        Scheme::Float(FloatType::BF16) => (layout::CODE_BF16, layout::ZERO_MID, layout::SCALE_NONE),
        Scheme::Float(FloatType::F32) | Scheme::Order => (layout::CODE_F32, layout::ZERO_MID, layout::SCALE_NONE),
    }
}

/// Floats in the f16 form, converted on the device, from `at` on.
fn floats(
    upload: &mut Upload,
    device: &Arc<Device>,
    view: &TensorView,
    kind: FloatType,
    memory: &mut Buffer<u8>,
    at: usize,
) -> Result<(), CudaError> {
    let kernel = device.kernel(&ptx::ROWS, "pack_halves")?;
    let beyond = Buffer::<u32>::of(device, "weights", &[0])?;
    let row = view.k * kind.size();
    let rows = (CHUNK / row.max(1) / 64 * 64).clamp(64, view.n.next_multiple_of(64));
    let mut raw = Buffer::<u8>::new(device, "weights to convert", rows.min(view.n) * row)?;
    let code = kinds(Scheme::Float(kind), Form::F32).0;
    for start in (0..view.n).step_by(rows) {
        let count = rows.min(view.n - start);
        upload.put_into(&mut raw, 0, &view.codes[start * row..(start + count) * row])?;
        let mut args = Args::new()
            .with(raw.ptr())
            .with(code)
            .with(count as u32)
            .with(view.k as u32)
            .with(memory.at(at + start * view.k.next_multiple_of(64) * 2))
            .with(beyond.ptr());
        let quads = view.k.next_multiple_of(64) / 4;
        // SAFETY: `raw` holds `count` rows; from `start` on, `memory` has room for the panels of as many.
        unsafe { device.launch(&kernel, [quads.div_ceil(4), count.div_ceil(64), 1], 256, 0, &mut args)? };
    }
    let mut found = [0];
    beyond.read(0, &mut found)?;
    if found[0] != 0 {
        return Err(CudaError::Model {
            what: "a float weight",
            expected: "values up to 65504".into(),
            got: format!("one beyond in a tensor [{}, {}] of {}", view.n, view.k, kind.name()),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folds_divide_their_groups() {
        let groups = [16, 32, 48, 64, 80, 128, 144, 160, 176, 256, 4096, 4800];
        let (halves, ints) = (groups.map(|g| fold(g, Form::F16)), groups.map(|g| fold(g, Form::Int8)));
        assert_eq!(halves, [16, 32, 48, 64, 80, 128, 48, 80, 16, 128, 128, 96]);
        // Where a block has 32 columns, a fold has whole ones.
        assert_eq!(ints, [16, 32, 48, 64, 80, 128, 48, 32, 16, 128, 128, 96]);
        assert!(groups.iter().zip(halves).zip(ints).all(|((group, half), int)| group % half == 0 && group % int == 0));
    }
}
