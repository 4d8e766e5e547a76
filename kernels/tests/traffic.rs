//! What linear kernels move and execute, counted by the virtual GPU. A process of its own: counts are of a process.

#[allow(dead_code)]
mod pack;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use pack::{Packed, Rng};
use quern_kernels::{
    cpu::acts::Mode,
    cuda::{
        Buffer, Device, Linear, Output, Upload, Weight,
        acts::{Acts, Form},
        route::{Route, Routes, Shape},
    },
};
use quern_models::{FloatType, Scheme, ZeroKind};
use quern_vgpu::KernelReport;

/// One at a time: counts are of the process.
static ALONE: Mutex<()> = Mutex::new(());

/// Runs a layer of inputs that are zero and counts, by kernel.
fn count(
    device: &Arc<Device>,
    linear: &mut Linear,
    packed: &Packed,
    form: Form,
    m: usize,
) -> BTreeMap<String, KernelReport> {
    let gpu = quern_vgpu::load();
    let (n, k) = (packed.n, packed.k);
    let mut upload = Upload::new(device, Box::new(|_| {})).expect("an upload");
    let weight = Weight::upload(&mut upload, &packed.view(), form).expect("a weight");
    let mut acts = Acts::new(device, form, m, k).expect("memory");
    acts.h.fill(0).expect("filled");
    acts.factors.fill(0).expect("filled");
    acts.sums.fill(0).expect("filled");
    for blocks in [&mut acts.int8, &mut acts.int8_small] {
        blocks.q.fill(0).expect("filled");
        blocks.levels.fill(0).expect("filled");
    }
    let to = Buffer::<f32>::new(device, "outputs", m * n).expect("memory");
    linear.reserve(&[&weight], m).expect("room");
    let out = Output::Store { to: to.ptr(), stride: n, bias: None };
    gpu.set("traffic", "on");
    gpu.stats();
    linear.run(&[&weight], &acts, m, out).expect("run");
    device.synchronize().expect("done");
    gpu.set("traffic", "off");
    gpu.stats()
}

/// The main loop of the kernel for many tokens: instructions of 32 columns of one fold after the first, in which a warp
/// has 32 of tensor cores. Two sizes of groups and of layers tell it from what comes once a fold and once a layer.
#[test]
fn every_fourth_instruction_is_of_tensor_cores() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    quern_vgpu::load().set("sms", "4");
    let device = Device::open(0).expect("the virtual GPU");
    let mut linear = Linear::new(&device).expect("kernels");
    for (bits, zero, most) in [(4, ZeroKind::Mid, 4.0), (4, ZeroKind::Code, 4.0), (8, ZeroKind::Mid, 4.0)] {
        let mut of = |group: u32, k: usize| {
            let scheme = Scheme::Int { bits, group, zero, scale: FloatType::F16 };
            let stats = count(&device, &mut linear, &Packed::random(&mut Rng(1), 256, k, scheme), Form::F16, 64);
            let (_, report) = stats.iter().find(|(kernel, _)| kernel.starts_with("wide")).expect("a kernel");
            (report.count("warp_instructions") as f64, report.class("mma") as f64)
        };
        let (long, short) = ((of(128, 8192), of(128, 4096)), (of(64, 8192), of(64, 4096)));
        let (by_128, by_64) = (long.0.0 - long.1.0, short.0.0 - short.1.0);
        let mma = long.0.1 - long.1.1;
        // Twice the folds.
        let folds = by_64 - by_128;
        let loop_ = (by_128 - folds) / mma;
        println!(
            "int{bits} {zero:?}: {loop_:.2} instructions of the main loop per one of tensor cores, groups of 128 {:.2}",
            by_128 / mma
        );
        assert!(loop_ <= most, "int{bits} {zero:?}: {loop_}, expected {most}");
    }
}

/// The same in integers, where a block of 32 columns is scaled: an instruction of tensor cores makes four sums of a
/// thread, and each is made a number and added. What else there is, is counted against that.
#[test]
fn integer_instructions_are_of_tensor_cores_and_scales() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    quern_vgpu::load().set("sms", "4");
    let device = Device::open(0).expect("the virtual GPU");
    let mut linear = Linear::new(&device).expect("kernels");
    for (bits, group, zero, most) in [
        (4, 128, ZeroKind::Mid, 24.0),
        (4, 128, ZeroKind::Code, 24.0),
        (4, 32, ZeroKind::Mid, 34.0),
        (8, 128, ZeroKind::Mid, 24.0),
    ] {
        let scheme = Scheme::Int { bits, group, zero, scale: FloatType::F16 };
        let mut of = |k: usize| {
            let packed = Packed::random(&mut Rng(1), 256, k, scheme);
            let stats = count(&device, &mut linear, &packed, Form::Int8, 64);
            let (_, report) = stats.iter().find(|(kernel, _)| kernel.starts_with("wide")).expect("a kernel");
            (report.count("warp_instructions") as f64, report.class("mma") as f64)
        };
        let (long, short) = (of(8192), of(4096));
        let per = (long.0 - short.0) / (long.1 - short.1);
        println!("int8 mode, {scheme}: {per:.2} instructions of the main loop per one of tensor cores");
        assert!(per <= most, "{scheme}: {per}, expected {most}");
    }
}

#[test]
fn linear_layers_move_what_they_must() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let gpu = quern_vgpu::load();
    // As many multiprocessors as panels: nobody shares a panel, as in wide layers.
    gpu.set("sms", "4");
    let device = Device::open(0).expect("the virtual GPU");
    let mut linear = Linear::new(&device).expect("kernels");
    let int = |bits, group, zero| Scheme::Int { bits, group, zero, scale: FloatType::F16 };
    let nested = |bits, group, zero| Scheme::Nested { bits, group, zero };
    let (half, ints) = (Form::F16, Form::Int8);
    let schemes = [
        ("int4", half, int(4, 128, ZeroKind::Mid)),
        ("int4", half, int(4, 32, ZeroKind::Code)),
        ("int4", half, nested(4, 32, ZeroKind::Min)),
        ("int8", half, int(8, 32, ZeroKind::Mid)),
        ("int8", half, nested(8, 16, ZeroKind::Mid)),
        ("halves", half, Scheme::Float(FloatType::F16)),
        ("four_int8", ints, int(4, 128, ZeroKind::Mid)),
        ("four_int8", ints, nested(4, 32, ZeroKind::Min)),
        ("eight_int8", ints, int(8, 32, ZeroKind::Mid)),
        ("eight_int8", ints, nested(8, 16, ZeroKind::Mid)),
    ];
    let (n, k) = (256, 4096);
    println!(
        "[{n}, {k}]               m  kernel               bytes/least  sectors/least  passes/least  instructions/mma"
    );
    for (name, form, scheme) in schemes {
        let packed = Packed::random(&mut Rng(1), n, k, scheme);
        for m in [1, 8, 16, 64] {
            let stats = count(&device, &mut linear, &packed, form, m);
            let (kernel, report) = stats.iter().find(|(kernel, _)| kernel.contains(name)).expect("a kernel");
            let ratio = |a: &str, b: &str| report.count(a) as f64 / report.count(b).max(1) as f64;
            // Weights, inputs and outputs once.
            let input = match form {
                Form::Int8 => k + k / quern_kernels::cpu::acts::block(scheme, Mode::Int8).expect("blocks") * 8,
                _ => k * 2,
            };
            let least = Weight::bytes(&packed.view(), form) + m * input + m * n * 4;
            let moved: u64 = stats.values().map(|r| r.count("unique_read") + r.count("unique_written")).sum();
            let bytes = moved as f64 / least as f64;
            let (sectors, passes) = (ratio("sectors", "ideal_sectors"), ratio("shared_waves", "shared_ideal"));
            let per_mma = report.count("warp_instructions") as f64 / report.class("mma") as f64;
            println!("{scheme:<22} {m:>3}  {kernel:<19} {bytes:>8.3} {sectors:>14.3} {passes:>13.3} {per_mma:>17.2}");
            if m == 1 {
                assert!(bytes <= 1.05, "{scheme} m = {m}: {bytes} of the bytes that must move");
            }
            assert!(passes <= 1.1, "{scheme} m = {m}: {passes} passes over shared memory");
            assert!(sectors <= 1.2, "{scheme} m = {m}: {sectors} sectors");
        }
    }
}

/// Of a layer of experts only those move that some row has, once each while a tile holds their rows.
#[test]
fn experts_move_what_was_picked() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let gpu = quern_vgpu::load();
    gpu.set("sms", "4");
    let device = Device::open(0).expect("the virtual GPU");
    let (linear, route) = (Linear::new(&device).expect("kernels"), Route::new(&device).expect("kernels"));
    let (n, k, shape) = (128, 2048, Shape { experts: 6, top: 2 });
    let scheme = Scheme::Int { bits: 4, group: 64, zero: ZeroKind::Mid, scale: FloatType::F16 };
    let experts: Vec<Packed> =
        (0..shape.experts).map(|e| Packed::random(&mut Rng(e as u64 + 1), n, k, scheme)).collect();
    let views: Vec<_> = experts.iter().map(Packed::view).collect();
    // The two that each row picks: three experts of six in all, of 1, 5 and 6 rows.
    let picks = [[4, 1], [4, 5], [5, 4], [5, 4], [4, 5], [5, 4]];
    let m = picks.len();
    let mut logits = vec![0.0; m * shape.experts];
    for (row, [first, second]) in picks.into_iter().enumerate() {
        logits[row * shape.experts + first] = 2.0;
        logits[row * shape.experts + second] = 1.0;
    }
    let logits = Buffer::of(&device, "logits", &logits).expect("memory");
    let routes = Routes::new(&device, shape, m).expect("memory");
    for form in [Form::F16, Form::Int8] {
        let mut upload = Upload::new(&device, Box::new(|_| {})).expect("an upload");
        let weight = Weight::upload_experts(&mut upload, &views, form).expect("weights");
        let room = shape.room(m);
        let mut acts = Acts::new(&device, form, room, k).expect("memory");
        acts.h.fill(0).expect("filled");
        acts.factors.fill(0).expect("filled");
        acts.sums.fill(0).expect("filled");
        acts.int8.q.fill(0).expect("filled");
        acts.int8.levels.fill(0).expect("filled");
        let to = Buffer::<f32>::new(&device, "outputs", room * n).expect("memory");
        let tiles = route.run(logits.ptr(), shape, true, false, &routes, m).expect("routes");
        device.synchronize().expect("done");
        gpu.set("traffic", "on");
        gpu.stats();
        linear.run_experts(&[&weight], &acts, &tiles, to.ptr(), n).expect("run");
        device.synchronize().expect("done");
        gpu.set("traffic", "off");
        let stats = gpu.stats();
        let moved: u64 = stats.values().map(|r| r.count("unique_read") + r.count("unique_written")).sum();
        let input = if form == Form::Int8 { k + k / 32 * 8 } else { k * 2 };
        let pairs = m * shape.top;
        let least = 3 * Weight::bytes(&views[0], form) + pairs * (input + n * 4);
        let ratio = moved as f64 / least as f64;
        println!("3 of 6 experts [{n}, {k}] {scheme}, {pairs} rows, {form:?}: {ratio:.3} of the bytes that must move");
        assert!((0.99..=1.05).contains(&ratio), "{form:?}: {moved} bytes, {least} must move");
    }
}
