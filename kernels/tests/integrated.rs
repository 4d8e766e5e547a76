//! Devices that compute in the host's memory, as the virtual GPU pretends to: weights are there once.

#![allow(clippy::unwrap_used, dead_code)]

#[path = "support/mod.rs"]
mod support;

use std::{ffi::c_void, fs::File};

use memmap2::Mmap;
use quern_kernels::{
    cpu::kv::KvType,
    cuda::Device,
    exec::{self, ExecOptions},
    memory,
};
use quern_models::{FloatType, ModelFile, Scheme, ZeroKind, spec::Mlp};
use support::{deviation, int, path, plain, run, tokens, written};

unsafe extern "C" {
    /// Of the C library: bit 0 of each byte of `to` says whether a page is in memory.
    fn mincore(at: *mut c_void, len: usize, to: *mut u8) -> i32;
}

/// Bytes of a file that the system has in memory.
fn cached(file: &File) -> usize {
    const PAGE: usize = 4096;
    // SAFETY: nobody changes the file.
    let map = unsafe { Mmap::map(file) }.unwrap();
    let mut pages = vec![0u8; map.len().div_ceil(PAGE)];
    // SAFETY: the range is the map's, and `pages` has a byte for each page (more where pages are larger).
    let status = unsafe { mincore(map.as_ptr() as *mut c_void, map.len(), pages.as_mut_ptr()) };
    assert_eq!(status, 0);
    pages.iter().filter(|&&page| page & 1 == 1).count() * PAGE
}

/// One after the other, as the setting is of the whole process.
#[test]
fn weights_are_in_memory_once() {
    let gpu = quern_vgpu::load();
    gpu.set("check", "fatal");
    let mut spec = plain(false);
    for layer in &mut spec.layers {
        layer.mlp = match layer.mlp {
            Mlp::Gated { act, .. } => Mlp::Gated { inner: 80_000, act, bias: false, mlp_order: false },
            ref other => other.clone(),
        };
    }
    let path = path("integrated");
    written(&path, int(4, 32, ZeroKind::Mid), Scheme::Float(FloatType::F16), spec);
    let options = ExecOptions {
        device: exec::Device::Cuda(0),
        threads: 1,
        blocks: 64,
        activations: None,
        kv: KvType::F16,
        rows: 64,
        tree_blocks: 0,
        gpu_layers: None,
    };
    let (file, tokens) = (File::open(&path).unwrap(), tokens(5));
    let len = file.metadata().unwrap().len() as usize;
    let logits = |integrated: &str| {
        gpu.set("integrated", integrated);
        let model = std::sync::Arc::new(ModelFile::open(&path).unwrap());
        let mut executor = exec::open(model, options, |_| {}).unwrap();
        let cached = cached(&file);
        (run(&mut *executor, &tokens, &[5], 0), cached)
    };
    let ((want, before), (got, after)) = (logits("0"), logits("1"));
    assert_eq!(deviation(&got, &want), 0.0);
    assert!(before > len / 10 * 9, "{before} of {len} bytes are cached after they were read");
    // Of pages that lie in groups of 2 MiB, those at the ends of what was given up may stay.
    // A file system in memory gives up nothing.
    let once = ModelFile::open(&path).unwrap();
    (0..once.tensors().len()).for_each(|i| drop(once.view_once(i).unwrap()));
    if cached(&file) > len / 10 * 9 {
        println!("SKIPPED weights_are_in_memory_once: the file system of {} keeps its pages", path.display());
    } else {
        assert!(after < len / 4, "{after} of {len} bytes are still cached");
    }
    std::fs::remove_file(&path).unwrap();

    // The driver's free memory does not count what files have cached; no more than there is is had.
    let there = |memory: &str, integrated: &str| {
        gpu.set("memory", memory);
        gpu.set("integrated", integrated);
        Device::open(0).unwrap().memory().unwrap()
    };
    let (free, total) = there("64M", "1");
    assert_eq!((free, total), (64 << 20, 64 << 20));
    let (free, total) = there("1000000G", "0");
    assert_eq!(free, total);
    let fill = quern_kernels::cuda::Buffer::<u8>::new(&Device::open(0).unwrap(), "a test", 32 << 20).unwrap();
    let host = memory::available().unwrap() as usize;
    // Of 64 MB the driver says that half is used, of the host's memory much more can be had.
    assert_eq!(there("64M", "0").0, 32 << 20);
    assert_eq!(there("64M", "1").0, host.min(64 << 20));
    drop(fill);
}
