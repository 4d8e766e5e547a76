//! Speed of the linear kernels on one thread: GMAC/s, and GB/s of weight bytes.
//!
//! `cargo run --release -p quern-kernels --example linear_bench [words]` runs the cases whose line
//! contains every word, such as `int4 g32 1536x576`; `f32` as a word of its own selects exact mode.
//! Each case is repeated for a fixed time; best and median are printed, because on a shared machine
//! only the best tells about the kernel. ENGINE_ISA picks the table. Activation quantization is
//! timed on its own line, not inside the others.

use quern_kernels::cpu::acts::{Acts, Forms, Mode};
use quern_kernels::cpu::isa::Isa;
use quern_kernels::cpu::linear::{Scratch, linear_panel};
use quern_models::{FloatType, Mini, PANEL, Scheme, TensorView, ZeroKind};
use std::hint::black_box;
use std::time::{Duration, Instant};

const SHAPES: [(usize, usize); 5] = [(576, 576), (1536, 576), (576, 1536), (49152, 576), (8192, 2048)];
const BATCHES: [usize; 8] = [1, 2, 4, 8, 16, 32, 64, 256];

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let isa = Isa::best();
    println!("table {isa:?}, 1 thread; best / median");
    let buffer = vec![1u8; 64 << 20];
    let (best, median) = time(|| {
        black_box(buffer.chunks_exact(8).fold(0, |s, b| s ^ word(b)));
    });
    println!("read 64 MiB: {:.1} / {:.1} GB/s", gb(64 << 20, best), gb(64 << 20, median));
    let int = |bits, group, zero| Scheme::Int { bits, group, zero, scale: FloatType::F16 };
    let nested = |bits, group, zero| Scheme::Nested { bits, group, zero };
    let mini = |kind, group, scale| Scheme::Mini { kind, group, scale };
    let cases = [
        (int(4, 32, ZeroKind::Mid), Mode::Int8),
        (int(4, 32, ZeroKind::Min), Mode::Int8),
        (int(4, 64, ZeroKind::Mid), Mode::Int8),
        (int(4, 128, ZeroKind::Code), Mode::Int8),
        (int(8, 32, ZeroKind::Mid), Mode::Int8),
        (int(8, 128, ZeroKind::Mid), Mode::Int8),
        (int(4, 16, ZeroKind::Mid), Mode::Int8),
        (int(8, 32, ZeroKind::Min), Mode::Int8),
        // Q4_K, Q2_K, Q3_K, Q5_K, Q6_K of GGUF.
        (nested(4, 32, ZeroKind::Min), Mode::Int8),
        (nested(4, 16, ZeroKind::Min), Mode::Int8),
        (nested(4, 16, ZeroKind::Mid), Mode::Int8),
        (nested(8, 32, ZeroKind::Min), Mode::Int8),
        (nested(8, 16, ZeroKind::Mid), Mode::Int8),
        // MXFP4, NVFP4, fp8.
        (mini(Mini::E2M1, 32, FloatType::BF16), Mode::Int8),
        (mini(Mini::E2M1, 16, FloatType::F32), Mode::Int8),
        (mini(Mini::E4M3, 128, FloatType::F32), Mode::F32),
        (mini(Mini::E2M1, 32, FloatType::BF16), Mode::F32),
        (nested(4, 32, ZeroKind::Min), Mode::F32),
        (int(4, 64, ZeroKind::Mid), Mode::F32),
        (int(8, 32, ZeroKind::Mid), Mode::F32),
        (Scheme::Float(FloatType::F16), Mode::F32),
        (Scheme::Float(FloatType::F32), Mode::F32),
    ];
    for (scheme, mode) in cases {
        for (n, k) in SHAPES {
            for m in BATCHES {
                let acts = if mode == Mode::Int8 { "int8" } else { "f32" };
                let name = format!("{scheme} x {acts}  {n}x{k}  m={m}");
                let has = |w: &String| name.split([' ', '=']).any(|part| part == w);
                if words.iter().all(has) {
                    run(isa, &name, scheme, mode, (n, k, m));
                }
            }
        }
    }
    if words.iter().all(|w| w == "quantize") {
        quantization(isa);
    }
}

fn run(isa: &Isa, name: &str, scheme: Scheme, mode: Mode, (n, k, m): (usize, usize, usize)) {
    let planes = scheme.planes(n as u64, k as u64).expect("sane sizes");
    let total = planes.total as usize;
    let mut bytes = vec![0u8; total + 4096];
    let skip = bytes.as_ptr().align_offset(4096);
    let mut seed = 7u32;
    for b in &mut bytes {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *b = (seed >> 24) as u8 & 0x33 | 8; // Also a tame float, of any type: neither huge nor subnormal.
    }
    let view = TensorView::new(n, k, scheme, &bytes[skip..]).expect("as many bytes as planned");
    let mut acts = Acts::new();
    acts.reset(isa, m, k, Forms::of(scheme, mode));
    let x: Vec<f32> = (0..m * k).map(|i| (i * 37 % 101) as f32 - 50.0).collect();
    acts.write(isa, &x);
    let mut scratch = Scratch::new();
    let mut tile = vec![0f32; isa.rows * PANEL];
    let (best, median) = time(|| {
        for rows in (0..m).step_by(isa.rows).map(|r| r..(r + isa.rows).min(m)) {
            for panel in 0..view.panels() {
                let tile = &mut tile[..rows.len() * PANEL];
                linear_panel(isa, &view, &acts, mode, panel, rows.clone(), tile, &mut scratch);
            }
        }
    });
    let macs = |t: Duration| (n * k * m) as f64 / t.as_secs_f64() / 1e9;
    println!(
        "{name:<44} {:7.1} / {:6.1} GMAC/s   {:6.1} / {:5.1} GB/s",
        macs(best),
        macs(median),
        gb(total, best),
        gb(total, median)
    );
}

fn quantization(isa: &Isa) {
    let (one, both) = (Forms { int8: true, ..Forms::default() }, Forms { int8: true, int8_small: true, floats: false });
    for (m, k, forms) in [(1, 576, one), (1, 1536, one), (256, 576, one), (256, 2048, one), (256, 2048, both)] {
        let x: Vec<f32> = (0..m * k).map(|i| (i * 37 % 101) as f32 - 50.0).collect();
        let mut acts = Acts::new();
        acts.reset(isa, m, k, forms);
        let (best, median) = time(|| acts.write(isa, black_box(&x)));
        let each = |t: Duration| t.as_secs_f64() * 1e9 / (m * k) as f64;
        let blocks = if forms.int8_small { "32 and 16" } else { "32" };
        println!("quantize m={m} k={k} blocks {blocks}: {:.2} / {:.2} ns per element", each(best), each(median));
    }
}

/// Best and median time of `f`, over a fifth of a second and at least 5 runs.
fn time(mut f: impl FnMut()) -> (Duration, Duration) {
    let start = Instant::now();
    let mut times = vec![];
    while times.len() < 5 || start.elapsed() < Duration::from_millis(200) {
        let t = Instant::now();
        f();
        times.push(t.elapsed());
    }
    times.sort();
    (times[0], times[times.len() / 2])
}

fn word(b: &[u8]) -> u64 {
    u64::from_le_bytes(b.try_into().expect("chunks of 8"))
}

fn gb(bytes: usize, t: Duration) -> f64 {
    bytes as f64 / t.as_secs_f64() / 1e9
}
