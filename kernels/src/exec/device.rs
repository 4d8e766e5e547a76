//! Where a model runs and how, and the executor for that.

use std::{fmt, str::FromStr, sync::Arc};

use quern_models::{ModelFile, ModelSpec};

use super::{CpuExecutor, CpuOptions, ExecError, Executor, SplitExecutor, kv_layers};
use crate::{
    cpu::{
        acts::Mode,
        kv::{KvMemory, KvType},
    },
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
    /// KV blocks more that a GPU has for trees of guesses ([`Mask::Tree`](super::Mask::Tree)): one or two for each leaf
    /// of the trees of a step but the first. The CPU needs none.
    pub tree_blocks: usize,
    /// Layers on the GPU, the last ones; those before are on the CPU, and with none everything is. `None`: all.
    pub gpu_layers: Option<usize>,
}

/// Who computes which layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Cpu,
    Cuda(usize),
    /// The layers from `first` on are on the GPU; not 0, and less than there are.
    Split {
        ordinal: usize,
        first: usize,
    },
}

impl ExecOptions {
    /// Refuses more layers on the GPU than there are.
    pub fn check(&self, spec: &ModelSpec) -> Result<(), ExecError> {
        self.place(spec).map(drop)
    }

    fn place(&self, spec: &ModelSpec) -> Result<Place, ExecError> {
        let layers = spec.layers.len();
        let most = if self.device == Device::Cpu { 0 } else { layers };
        if let Some(asked) = self.gpu_layers.filter(|&n| n > most) {
            return Err(ExecError::GpuLayers { asked, most });
        }
        Ok(match (self.device, self.gpu_layers.unwrap_or(most)) {
            (Device::Cpu, _) => Place::Cpu,
            // A head may have no layers.
            (Device::Cuda(ordinal), n) if n == layers => Place::Cuda(ordinal),
            (_, 0) => Place::Cpu,
            (Device::Cuda(ordinal), n) => Place::Split { ordinal, first: layers - n },
        })
    }

    /// Activations of the CPU's layers, or of the GPU's in form, where a model is on both.
    fn split(&self) -> Result<(Mode, Form), ExecError> {
        match self.activations {
            None => Ok((Mode::Int8, Form::F16)),
            Some(Activations::F32) => Ok((Mode::F32, Form::F32)),
            Some(Activations::Int8) => Ok((Mode::Int8, Form::Int8)),
            Some(activations) => Err(ExecError::SplitActivations { device: self.device, activations }),
        }
    }
}

/// Prepares a device for an opened file. `progress` is told how many bytes of weights went to the device.
pub fn open(
    file: Arc<ModelFile>,
    options: ExecOptions,
    progress: impl FnMut(usize) + 'static,
) -> Result<Box<dyn Executor>, ExecError> {
    let ExecOptions { threads, blocks, kv, rows, tree_blocks, .. } = options;
    if file.spec().draft_head.is_some() {
        let (expected, got) = ("to be given beside its model".into(), "it alone".into());
        return Err(ExecError::Head { what: "guesses for a model", expected, got });
    }
    match options.place(file.spec())? {
        Place::Cpu => {
            let activations = options.activations.unwrap_or(Activations::Int8);
            let mode = match activations {
                Activations::Int8 => Mode::Int8,
                Activations::F32 => Mode::F32,
                Activations::F16 => return Err(ExecError::Activations { device: Device::Cpu, activations }),
            };
            Ok(Box::new(CpuExecutor::new(file, CpuOptions { threads, blocks, mode, kv })?))
        }
        Place::Cuda(ordinal) => {
            let form = form(options.activations.unwrap_or(Activations::F16));
            let options = CudaOptions { ordinal, blocks, form, kv, rows, tree_blocks };
            Ok(Box::new(CudaExecutor::new(file, options, Box::new(progress))?))
        }
        Place::Split { ordinal, first } => {
            let (mode, form) = options.split()?;
            let cpu = CpuOptions { threads, blocks, mode, kv };
            let cuda = CudaOptions { ordinal, blocks, form, kv, rows, tree_blocks };
            Ok(Box::new(SplitExecutor::new(file, first, cpu, cuda, Box::new(progress))?))
        }
    }
}

/// A GPU's form of activations.
fn form(activations: Activations) -> Form {
    match activations {
        Activations::F16 => Form::F16,
        Activations::F32 => Form::F32,
        Activations::Int8 => Form::Int8,
    }
}

/// What a model takes of a device's own memory, and what there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Bytes of weights.
    pub weights: u64,
    /// Bytes of a KV block.
    pub block: u64,
    /// Bytes of the buffers of a step.
    pub scratch: u64,
    /// Bytes free now, if the device says so.
    pub free: Option<u64>,
    /// Most layers that would fit, fewer than were asked for, if those do not.
    pub layers: Option<usize>,
    /// What layers on the CPU take of the host's memory.
    pub host: Option<HostMemory>,
    /// The device's memory is the host's.
    pub shared: bool,
}

/// What a model takes of the host's memory where its first layers are on the CPU, besides the buffers of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostMemory {
    /// Bytes of weights, mapped.
    pub weights: u64,
    /// Bytes of a KV block.
    pub block: u64,
}

/// Of the device of `options`; `None` for the CPU, and for options that no device has.
pub fn device_memory(file: &ModelFile, options: &ExecOptions) -> Option<DeviceMemory> {
    let spec = file.spec();
    let (ordinal, first, form) = match options.place(spec).ok()? {
        Place::Cpu => return None,
        Place::Cuda(ordinal) => (ordinal, 0, form(options.activations.unwrap_or(Activations::F16))),
        Place::Split { ordinal, first } => (ordinal, first, options.split().ok()?.1),
    };
    let ExecOptions { blocks, kv, rows, tree_blocks, .. } = *options;
    let cuda = CudaOptions { ordinal, blocks, form, kv, rows, tree_blocks };
    let plan = CudaPlan::of(file, &cuda, first);
    let device = cuda::Device::open(ordinal).ok();
    let free = device.as_ref().and_then(|d| d.memory().ok()).map(|(free, _)| free);
    let full = free.filter(|&free| free < plan.total());
    let of_layers = |i: &usize| file.tensors()[*i].name.starts_with("layers.");
    let bytes = |first: usize| cuda::tensors(file, first).filter(of_layers).map(|i| file.tensors()[i].len).sum::<u64>();
    let tables = ["embed", "positions"].iter().filter_map(|name| file.index(name)).map(|i| file.tensors()[i].len);
    Some(DeviceMemory {
        weights: plan.weights as u64,
        block: CudaExecutor::block_bytes(spec, kv, first) as u64,
        scratch: plan.scratch as u64,
        free: free.map(|free| free as u64),
        layers: full.and_then(|free| CudaPlan::fitting(file, &cuda, first, free)),
        host: (first > 0).then(|| HostMemory {
            weights: bytes(0) - bytes(first) + tables.sum::<u64>(),
            block: KvMemory::block_bytes(&kv_layers(spec)[..first], kv) as u64,
        }),
        shared: device.is_some_and(|d| d.info().integrated),
    })
}

/// Bytes of one KV block of a model, wherever its layers are.
pub fn block_bytes(spec: &ModelSpec, kv: KvType) -> usize {
    KvMemory::block_bytes(&kv_layers(spec), kv)
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
