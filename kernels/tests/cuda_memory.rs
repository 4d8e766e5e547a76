//! Memory of heads on the virtual GPU, in a process of its own: nobody else takes or gives back any.

#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;

use quern_kernels::{
    cpu::kv::KvType,
    cuda::{self, CudaExecutor, CudaOptions, CudaPlan, acts::Form},
    exec::{Chunk, Device, ExecOptions, Executor, Mask, Output, Plan, device_memory},
};
use quern_models::{FloatType, ModelFile, Scheme, ZeroKind, spec::Norm};
use support::{heads, int, made, plain};

fn options(form: Form, kv: KvType, rows: usize) -> CudaOptions {
    CudaOptions { ordinal: 0, blocks: 64, form, kv, rows, tree_blocks: 0 }
}

fn executor(file: &Arc<ModelFile>, form: Form, kv: KvType, rows: usize) -> CudaExecutor {
    CudaExecutor::new(file.clone(), options(form, kv, rows), Box::new(|_| {})).unwrap()
}

/// What is planned is what is there, and what a head needs besides what it shares.
#[test]
fn memory_of_heads_is_counted() {
    quern_vgpu::load().set("check", "fatal");
    let gpu = cuda::Device::open(0).unwrap();
    let (f16, int4) = (Scheme::Float(FloatType::F16), int(4, 32, ZeroKind::Mid));
    let model = made("cu-head-memory", int4, int(8, 32, ZeroKind::Mid), plain(true));
    for (form, kv) in [(Form::F16, KvType::F16), (Form::Int8, KvType::F16), (Form::F32, KvType::F32)] {
        for (kind, spec) in heads() {
            let layers = spec.layers.len();
            let file = made(&format!("cu-memory-{kind}"), int4, f16, spec);
            let mut executor = executor(&model, form, kv, 64);
            let plan = CudaPlan::of(&file, &options(form, kv, 64), 0);
            let (before, _) = gpu.memory().unwrap();
            let head = executor.head(file.clone()).unwrap();
            let (after, _) = gpu.memory().unwrap();
            let (taken, planned) = (before - after, plan.total());
            assert!((1..=planned).contains(&taken), "{kind} {form:?}: {taken} bytes taken, {planned} planned");
            // Code of the kernels is counted once, with the model.
            assert!(planned < taken + (160 << 20), "{kind} {form:?}: {taken} bytes taken, {planned} planned");
            assert_eq!(plan.cache, 64 * layers * executor.block_bytes() / 2, "{kind} {form:?}");
            drop(head);
            let device = ExecOptions {
                device: Device::Cuda(0),
                threads: 1,
                blocks: 64,
                activations: None,
                kv: KvType::F16,
                rows: 64,
                tree_blocks: 0,
                gpu_layers: None,
            };
            // Whoever plans memory before there is an executor gets the same.
            if form == Form::F16 {
                let memory = device_memory(&file, &device).unwrap();
                assert_eq!((memory.weights, memory.scratch), (plan.weights as u64, plan.scratch as u64), "{kind}");
            }
        }
    }
    states_are_copied_when_wanted(&model);
    // A head that is larger than what is left: the model's cache leaves less than the head's takes, and is not touched.
    let mut large = heads().remove(3).1;
    large.layers = vec![large.layers[0].clone(); 64];
    large.layers.iter_mut().for_each(|l| l.attn_norm = Norm::Identity);
    let (free, _) = gpu.memory().unwrap();
    let block = CudaExecutor::block_bytes(&large, KvType::F16, 0);
    let blocks = free / block + 1;
    let few = CudaOptions { blocks, ..options(Form::F16, KvType::F16, 8) };
    let mut executor = CudaExecutor::new(model.clone(), few, Box::new(|_| {})).unwrap();
    let error = executor.head(made("cu-large", int4, f16, large)).err().unwrap().to_string();
    assert!(error.starts_with("the head needs ") && error.contains(" are free: "), "{error}");
    // The model goes on, and keeps nothing.
    let chunk = Chunk { tokens: &[5], start: 0, blocks: &[0], mask: Mask::Causal, output: Output::None };
    let ticket = executor.submit(&Plan { chunks: vec![chunk] }).unwrap();
    executor.collect(ticket).unwrap();
    assert!(executor.states().unwrap().is_empty());
}

/// A step without outputs copies nothing to the host, with a head or without, until somebody asks for states.
fn states_are_copied_when_wanted(model: &Arc<ModelFile>) {
    let f16 = Scheme::Float(FloatType::F16);
    let mut executor = executor(model, Form::F16, KvType::F16, 64);
    let step = |executor: &mut CudaExecutor, start| {
        let chunk = Chunk { tokens: &[5, 6], start, blocks: &[0], mask: Mask::Causal, output: Output::None };
        let ticket = executor.submit(&Plan { chunks: vec![chunk] }).unwrap();
        executor.collect(ticket).unwrap();
    };
    step(&mut executor, 0);
    let _head = executor.head(made("cu-wanted", f16, f16, heads().remove(0).1)).unwrap();
    assert!(executor.states().unwrap().is_empty(), "of a step before the head");
    let copies = || quern_vgpu::load().calls().get("cuMemcpyDtoHAsync_v2").copied().unwrap_or(0);
    let before = copies();
    step(&mut executor, 2);
    assert_eq!(copies(), before);
    assert_eq!(executor.states().unwrap().len(), 2 * 72);
    assert_eq!((executor.states().unwrap().len(), copies()), (2 * 72, before + 1));
}
