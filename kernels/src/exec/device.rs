//! Where a model runs and how, and the executor for that.

use std::{fmt, str::FromStr, sync::Arc};

use quern_models::{ModelFile, ModelSpec};

use super::{CpuExecutor, CpuOptions, ExecError, Executor};
use crate::{
    cpu::{acts::Mode, kv::KvType},
    cuda::{self, CudaError, CudaExecutor, CudaOptions, CudaPlan, acts::Form},
};

/// Where a model runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// The processor.
    Cpu,
    /// An NVIDIA GPU, by the driver's number.
    Cuda(usize),
}

impl Device {
    /// The first GPU if there is one that can be used, else the CPU and why.
    pub fn auto() -> (Device, Option<CudaError>) {
        match cuda::usable() {
            Ok(ordinal) => (Device::Cuda(ordinal), None),
            Err(error) => (Device::Cpu, Some(error)),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(n) => write!(f, "cuda:{n}"),
        }
    }
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Device, String> {
        let ordinal = match text {
            "cpu" => return Ok(Device::Cpu),
            "cuda" => Some(0),
            _ => text.strip_prefix("cuda:").and_then(|n| n.parse().ok()),
        };
        ordinal.map(Device::Cuda).ok_or_else(|| format!("expected cpu, cuda or cuda:N, got {text:?}"))
    }
}

/// What linear layers multiply quantized weights with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activations {
    /// One int8 scale per row and block of columns; group dots are exact. The CPU's default.
    Int8,
    /// f16 and a power of two per row, sums in f32. The GPU's default.
    F16,
    /// f32 throughout: exact mode.
    F32,
}

impl Activations {
    /// What a device takes where nothing is said.
    pub fn usual(device: Device) -> Activations {
        match device {
            Device::Cpu => Activations::Int8,
            Device::Cuda(_) => Activations::F16,
        }
    }

    /// As flags name them.
    pub fn name(self) -> &'static str {
        match self {
            Activations::Int8 => "int8",
            Activations::F16 => "f16",
            Activations::F32 => "f32",
        }
    }
}

/// How a model is run.
#[derive(Debug, Clone, Copy)]
pub struct ExecOptions {
    /// Where.
    pub device: Device,
    /// Threads of the CPU; 0 takes one per fast physical core.
    pub threads: usize,
    /// KV blocks of 16 tokens.
    pub blocks: usize,
    /// Activations; `None` takes [`Activations::usual`].
    pub activations: Option<Activations>,
    /// Keys and values.
    pub kv: KvType,
    /// Tokens of a step that a GPU makes room for at once; more are possible and cost new memory.
    pub rows: usize,
}

/// Prepares a device for an opened file. `progress` is told how many bytes of weights went to the device.
pub fn open(
    file: Arc<ModelFile>,
    options: ExecOptions,
    progress: impl FnMut(usize) + 'static,
) -> Result<Box<dyn Executor>, ExecError> {
    let activations = options.activations.unwrap_or(Activations::usual(options.device));
    let ExecOptions { threads, blocks, kv, .. } = options;
    match options.device {
        Device::Cpu => {
            let mode = match activations {
                Activations::Int8 => Mode::Int8,
                Activations::F32 => Mode::F32,
                Activations::F16 => return Err(ExecError::Activations { device: Device::Cpu, activations }),
            };
            Ok(Box::new(CpuExecutor::new(file, CpuOptions { threads, blocks, mode, kv })?))
        }
        Device::Cuda(ordinal) => {
            let form = form(activations).ok_or(ExecError::Activations { device: options.device, activations })?;
            let options = CudaOptions { ordinal, blocks, form, kv, rows: options.rows };
            Ok(Box::new(CudaExecutor::new(file, options, Box::new(progress))?))
        }
    }
}

/// The device's form of activations, if it has it.
fn form(activations: Activations) -> Option<Form> {
    match activations {
        Activations::F16 => Some(Form::F16),
        Activations::F32 => Some(Form::F32),
        Activations::Int8 => None,
    }
}

/// What a model takes of a device's own memory, besides the cache, and what there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Bytes of weights.
    pub weights: u64,
    /// Bytes of the buffers of a step.
    pub scratch: u64,
    /// Bytes free now, if the device says so.
    pub free: Option<u64>,
}

/// Of the device of `options`; `None` for the CPU.
pub fn device_memory(file: &ModelFile, options: &ExecOptions) -> Option<DeviceMemory> {
    let Device::Cuda(ordinal) = options.device else { return None };
    let activations = options.activations.unwrap_or(Activations::usual(options.device));
    let ExecOptions { blocks, kv, rows, .. } = *options;
    let plan = CudaPlan::of(file, &CudaOptions { ordinal, blocks, form: form(activations)?, kv, rows });
    let free = cuda::Device::open(ordinal).and_then(|d| d.memory()).ok();
    let free = free.map(|(free, _)| free as u64);
    Some(DeviceMemory { weights: plan.weights as u64, scratch: plan.scratch as u64, free })
}

/// Bytes of one KV block of a model on a device.
pub fn block_bytes(spec: &ModelSpec, device: Device, kv: KvType) -> usize {
    match device {
        Device::Cpu => CpuExecutor::block_bytes(spec, kv),
        Device::Cuda(_) => CudaExecutor::block_bytes(spec, kv),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_as_they_are_written() {
        for device in [Device::Cpu, Device::Cuda(0), Device::Cuda(3)] {
            assert_eq!(device.to_string().parse(), Ok(device));
        }
        assert_eq!("cuda".parse(), Ok(Device::Cuda(0)));
        for bad in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "CPU"] {
            assert!(bad.parse::<Device>().is_err(), "{bad}");
        }
    }
}
