//! Times the CUDA kernels at the shapes of real models, against what the device can do at most.
//!
//! `cargo run --release -p quern-kernels --example cuda_bench [--small] [words]` runs the cases whose line contains every
//! word, such as `int4 g128 4096x14336`, `by int8` or `attention decode`. Bandwidth and tensor peak are measured first; a row says
//! how much of each was reached (that of f16 for int8 activations, too). Medians of 9 launches, timed by events of the device. `--small` makes everything tiny:
//! for a virtual device, whose times mean nothing.

use std::{error::Error, sync::Arc};

use quern_kernels::{
    cpu::kv::{BLOCK, KvLayer, KvType},
    cuda::{
        Attend, Batch, Buffer, CudaError, Device, KvPool, Linear, Output, Upload, Weight,
        acts::{Acts, Form},
        attend::Params,
        batch::{Chunk, Shape},
        ops::Ops,
        peak,
    },
    exec::Mask,
};
use quern_models::{FloatType, Scheme, TensorView, ZeroKind};

/// Outputs and inputs of linear layers of 1B, 3B, 8B and 14B models, and a head.
const SHAPES: [(usize, usize); 9] = [
    (2048, 2048),
    (8192, 2048),
    (2048, 8192),
    (8192, 3072),
    (4096, 4096),
    (14336, 4096),
    (4096, 14336),
    (13824, 5120),
    (128256, 4096),
];
const ROWS: [usize; 10] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];

/// What the device does at most.
struct Limits {
    bytes: f64,
    macs: f64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let (flags, words): (Vec<String>, Vec<String>) = std::env::args().skip(1).partition(|a| a.starts_with("--"));
    let small = flags.iter().any(|f| f == "--small");
    let device = Device::open(0)?;
    let limits = Limits {
        bytes: peak::read_bandwidth(&device, if small { 1 << 20 } else { 1 << 30 })?,
        macs: peak::tensor_peak(&device, if small { 4 } else { 20_000 })?,
    };
    let info = device.info();
    println!("{}, {} multiprocessors, driver for CUDA {}", info.name, info.processors, info.driver);
    println!("reads {:.1} GB/s; {:.1} T multiply-adds a second in f16\n", limits.bytes / 1e9, limits.macs / 1e12);
    println!(
        "| case | rows | us | GB/s | % of bandwidth | T multiply-adds/s | % of peak |\n|:--|--:|--:|--:|--:|--:|--:|"
    );
    let int = |bits, group| Scheme::Int { bits, group, zero: ZeroKind::Mid, scale: FloatType::F16 };
    let schemes = [int(4, 128), int(4, 32), int(8, 128), Scheme::Float(FloatType::F16)];
    let (shapes, rows) = if small { (&[(128, 256)][..], &[1, 9, 64][..]) } else { (&SHAPES[..], &ROWS[..]) };
    let layers = |scheme: Scheme, form: Form, what: &str| -> Result<(), Box<dyn Error>> {
        for &(n, k) in shapes {
            let case = format!("{scheme}{what} {n}x{k}");
            if words.iter().all(|w| case.contains(w.as_str())) {
                linear(&device, &case, scheme, form, (n, k), rows, &limits)?;
            }
        }
        Ok(())
    };
    for scheme in schemes {
        layers(scheme, Form::F16, "")?;
    }
    let depths = if small { &[40][..] } else { &[512, 4096, 32768][..] };
    for &depth in depths {
        for kv in [KvType::F16, KvType::Int8] {
            for (rows, sequences) in [(1, 1), (1, 16), (if small { 20 } else { 512 }, 1)] {
                let what = if rows == 1 { "decode" } else { "prompt" };
                let case = format!("attention {what} {kv:?} 32/8 heads of 128, depth {depth} x {sequences}");
                if words.iter().all(|w| case.contains(w.as_str())) {
                    attention(&device, &case, kv, depth, rows, sequences, &limits)?;
                }
            }
        }
    }
    // Last, as there may not be time for all.
    for scheme in &schemes[..3] {
        layers(*scheme, Form::Int8, " by int8")?;
    }
    Ok(())
}

fn row(case: &str, rows: usize, ms: f32, bytes: f64, macs: f64, limits: &Limits) {
    let seconds = f64::from(ms) / 1e3;
    let (b, m) = (bytes / seconds, macs / seconds);
    println!(
        "| {case} | {rows} | {:.1} | {:.0} | {:.0} | {:.2} | {:.0} |",
        f64::from(ms) * 1e3,
        b / 1e9,
        100.0 * b / limits.bytes,
        m / 1e12,
        100.0 * m / limits.macs
    );
}

/// Median milliseconds of 9 runs after one that warms up.
fn time(device: &Arc<Device>, mut f: impl FnMut(usize) -> Result<(), CudaError>) -> Result<f32, CudaError> {
    f(0)?;
    let mut all = (1..=9).map(|i| device.timed(|| f(i))).collect::<Result<Vec<f32>, _>>()?;
    all.sort_by(f32::total_cmp);
    Ok(all[4])
}

fn linear(
    device: &Arc<Device>,
    case: &str,
    scheme: Scheme,
    form: Form,
    (n, k): (usize, usize),
    rows: &[usize],
    limits: &Limits,
) -> Result<(), Box<dyn Error>> {
    let planes = scheme.planes(n as u64, k as u64).expect("sane sizes");
    let bytes: Vec<u8> = (0..planes.total).map(|i| ((i * 2654435761) >> 13) as u8 & 0x3b).collect();
    let view = TensorView::new(n, k, scheme, &bytes).expect("as many bytes as it needs");
    // Several copies take turns, so that none is found in the device's cache.
    let copies = (CACHE / planes.total as usize + 1).min(16);
    let mut upload = Upload::new(device, Box::new(|_| {}))?;
    let weights = (0..copies).map(|_| Weight::upload(&mut upload, &view, form));
    let weights = weights.collect::<Result<Vec<_>, _>>()?;
    drop(upload);
    let most = rows.iter().copied().max().unwrap_or(1);
    let mut acts = Acts::new(device, form, most, weights[0].k_pad)?;
    acts.h.fill(0x11)?;
    acts.factors.fill(0x3f)?;
    acts.sums.fill(0)?;
    for blocks in [&mut acts.int8, &mut acts.int8_small] {
        blocks.q.fill(0x11)?;
        blocks.levels.fill(0)?;
    }
    let to = Buffer::<f32>::new(device, "outputs", most * n)?;
    let mut linear = Linear::new(device)?;
    linear.reserve(&[&weights[0]], most)?;
    for &m in rows {
        let ms = time(device, |i| {
            let out = Output::Store { to: to.ptr(), stride: n, bias: None };
            linear.run(&[&weights[i % copies]], &acts, m, out)
        })?;
        let input = if form == Form::Int8 { k + k / 4 } else { 2 * k };
        let moved = planes.total as f64 + (m * (input + 4 * n)) as f64;
        row(case, m, ms, moved, (m * n * k) as f64, limits);
    }
    Ok(())
}

/// Bytes beyond the last cache of any device there is.
const CACHE: usize = 192 << 20;

fn attention(
    device: &Arc<Device>,
    case: &str,
    kind: KvType,
    depth: usize,
    rows: usize,
    sequences: usize,
    limits: &Limits,
) -> Result<(), Box<dyn Error>> {
    let shape = Shape { heads: 32, kv_heads: 8, head_dim: 128, window: None };
    let (heads, kv_heads, d) = (shape.heads, shape.kv_heads, shape.head_dim);
    let each = (depth + rows).div_ceil(BLOCK);
    let kv = KvPool::new(device, &[KvLayer { kv_heads, head_dim: d }], each * sequences, kind)?;
    let m = rows * sequences;
    let mut qkv = Buffer::<f32>::new(device, "queries", m * (heads + 2 * kv_heads) * d)?;
    qkv.fill(0x3e)?;
    let tables: Vec<Vec<u32>> =
        (0..sequences).map(|s| (0..each).map(|i| (i * sequences + s) as u32).collect()).collect();
    let chunks: Vec<Chunk> =
        tables.iter().map(|blocks| Chunk { rows, start: depth, blocks, mask: Mask::Causal }).collect();
    let mut batch = Batch::new(device, &[shape], m)?;
    batch.set(&chunks, m)?;
    let to = Acts::new(device, Form::F16, m, heads * d)?;
    let (ops, attend) = (Ops::new(device)?, Attend::new(device)?);
    let params = Params { layer: 0, heads, scale: 0.088, window: None, cap: None, sinks: None };
    let ms = time(device, |_| attend.run(&ops, qkv.ptr(), &kv, &params, &batch, None, &to, m))?;
    let keys = sequences as f64 * (depth as f64 + rows as f64 / 2.0);
    let bytes = keys * kv.bytes_of_block() as f64 / BLOCK as f64;
    row(case, m, ms, bytes, 2.0 * (rows * heads * d) as f64 * keys, limits);
    Ok(())
}
