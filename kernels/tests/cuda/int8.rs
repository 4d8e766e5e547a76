//! Linear layers on integer tensor cores: every scheme at odd shapes against the CPU's definition, and every row bit for
//! bit against itself among other rows.

use std::sync::Arc;

use quern_kernels::{
    cuda::{
        Device, Linear, Output,
        acts::{Acts, Form},
        ops::Ops,
    },
    reference::linear::{Quantized, block, default, quantize},
};
use quern_models::{FloatType, Mini, Scheme, TensorView, ZeroKind};

use super::{
    common::{Random, bits, bound, device, up},
    linear::{SHAPES, run, schemes, weight},
    pack::{Packed, Rng},
};

/// Rows `[m][k]` as the device quantizes them, with everything that a weight may read.
fn input(device: &Arc<Device>, ops: &Ops, x: &[f32], k: usize, columns: usize) -> Acts {
    let m = x.len() / k;
    let acts = Acts::new(device, Form::Int8, m, columns).expect("memory");
    let x = up(device, x);
    ops.rows(x.ptr(), None, k, &acts, m).expect("run");
    device.synchronize().expect("done");
    acts
}

/// Sum of the sizes of what an output adds: blocks' sums, which are exact, and minima's.
fn sizes(view: &TensorView, x: &[f32]) -> Vec<f64> {
    let Some(columns) = block(view.scheme) else {
        return (0..view.n)
            .map(|n| x.iter().enumerate().map(|(k, x)| (view.at(n, k) * x).abs() as f64).sum())
            .collect();
    };
    let Quantized { q, scales, .. } = quantize(x, columns);
    let (_, group) = view.scheme.coded().expect("codes");
    let has_min =
        matches!(view.scheme, Scheme::Int { zero: ZeroKind::Min, .. } | Scheme::Nested { zero: ZeroKind::Min, .. });
    let row = |n: usize| {
        let block = |b: usize| {
            let at = b * columns;
            let min = if has_min { view.min(n, at / group) as f64 } else { 0.0 };
            let (mut dot, mut sum) = (0f64, 0f64);
            for (k, &q) in (at..view.k).zip(&q[at..at + columns]) {
                dot += (view.at(n, k) as f64 - min) * q as f64;
                sum += q as f64;
            }
            scales[b] as f64 * (dot.abs() + (min * sum).abs())
        };
        (0..scales.len()).map(block).sum()
    };
    (0..view.n).map(row).collect()
}

fn check(got: &[f32], view: &TensorView, x: &[f32], what: &str) -> f64 {
    let mut worst = 0f64;
    for (r, (got, x)) in got.chunks(view.n).zip(x.chunks(view.k)).enumerate() {
        for (n, ((got, want), size)) in got.iter().zip(default(view, x)).zip(sizes(view, x)).enumerate() {
            let (error, most) = ((*got as f64 - want as f64).abs(), bound::LINEAR_INT8 * size + 1e-37);
            assert!(error <= most, "{what}: row {r} output {n} is {got}, expected {want} +- {most:e}");
            worst = worst.max(if size > 0.0 { error / size } else { 0.0 });
        }
    }
    worst
}

#[test]
fn every_scheme_is_that_of_the_cpu() {
    let Some(device) = device("linear layers in int8") else { return };
    let (mut linear, ops) = (Linear::new(&device).expect("kernels"), Ops::new(&device).expect("kernels"));
    let mut worst = 0f64;
    for (i, scheme) in schemes().into_iter().enumerate() {
        for (j, (n, k)) in SHAPES.into_iter().enumerate() {
            let packed = Packed::random(&mut Rng(7 + i as u64), n, k, scheme);
            let weight = weight(&device, &packed.view(), Form::Int8);
            let m = [1, 3, 9, 34][(i + j) % 4];
            let mut random = Random(i as u64 + 99);
            let x: Vec<f32> = (0..m * k).map(|_| random.float() * 1000f32.powi((i % 5) as i32 - 2)).collect();
            let acts = input(&device, &ops, &x, k, weight.k_pad);
            let y = run(&device, &mut linear, &[&weight], &acts, m);
            worst = worst.max(check(&y, &packed.view(), &x, &format!("{scheme} [{n}, {k}] m = {m}")));
        }
    }
    println!("linear layers in int8: largest error {worst:e} of the terms' sum, allowed {:e}", bound::LINEAR_INT8);
}

/// Codes and activations of the largest size: sums must stay exact.
#[test]
fn the_largest_sums_are_exact() {
    let Some(device) = device("largest sums in int8") else { return };
    let (mut linear, ops) = (Linear::new(&device).expect("kernels"), Ops::new(&device).expect("kernels"));
    let (n, k) = (64, 256);
    for (bits, group, zero) in
        [(8, 32, ZeroKind::Mid), (8, 128, ZeroKind::Code), (8, 16, ZeroKind::Min), (4, 64, ZeroKind::Code)]
    {
        for code in [0, 255] {
            let scheme = Scheme::Int { bits, group, zero, scale: FloatType::F32 };
            let packed = Packed::constant(&mut Rng(3), n, k, scheme, code);
            let weight = weight(&device, &packed.view(), Form::Int8);
            for sign in [1.0, -1.0] {
                let x = vec![sign * 3.25; 65 * k];
                let acts = input(&device, &ops, &x, k, k);
                for m in [1, 65] {
                    let y = run(&device, &mut linear, &[&weight], &acts, m);
                    check(&y, &packed.view(), &x[..m * k], &format!("{scheme} codes {code} m = {m}"));
                }
            }
        }
    }
}

/// Each kernel, and weights that read several forms of an input.
fn kinds() -> Vec<(Scheme, usize, usize)> {
    let int = |bits, group, zero| Scheme::Int { bits, group, zero, scale: FloatType::F16 };
    let mini = |kind, group| Scheme::Mini { kind, group, scale: FloatType::F16 };
    vec![
        (int(4, 32, ZeroKind::Code), 130, 2100),
        (int(4, 160, ZeroKind::Min), 65, 500),
        (int(4, 48, ZeroKind::Min), 65, 200),
        (int(8, 128, ZeroKind::Code), 64, 1100),
        (int(8, 64, ZeroKind::Min), 70, 300),
        (Scheme::Nested { bits: 8, group: 16, zero: ZeroKind::Mid }, 70, 520),
        (Scheme::Nested { bits: 4, group: 32, zero: ZeroKind::Min }, 70, 520),
        (mini(Mini::E2M1, 32), 65, 200),
        (mini(Mini::E2M1, 16), 65, 200),
        (mini(Mini::E4M3, 128), 65, 300),
        (Scheme::Float(FloatType::BF16), 65, 200),
    ]
}

#[test]
fn rows_in_int8_do_not_depend_on_their_batch() {
    let Some(device) = device("rows of linear layers in int8 in batches") else { return };
    let (mut linear, ops) = (Linear::new(&device).expect("kernels"), Ops::new(&device).expect("kernels"));
    const ROWS: usize = 71;
    for (scheme, n, k) in kinds() {
        let packed = Packed::random(&mut Rng(5), n, k, scheme);
        let weight = weight(&device, &packed.view(), Form::Int8);
        let mut x = Random(3).floats(ROWS * k);
        // What is no number stays in its row.
        x[4 * k + k / 2] = f32::NAN;
        x[20 * k] = f32::INFINITY;
        let all = run(&device, &mut linear, &[&weight], &input(&device, &ops, &x, k, weight.k_pad), ROWS);
        for r in 0..ROWS {
            let (x, y) = (&x[r * k..(r + 1) * k], &all[r * n..(r + 1) * n]);
            if r == 4 || (r == 20 && block(scheme).is_some()) {
                assert!(y.iter().all(|y| y.is_nan()), "{scheme} row {r}");
            } else if r != 20 {
                check(y, &packed.view(), x, &format!("{scheme} row {r}"));
            }
        }
        for (from, m) in [(0, 1), (69, 1), (3, 8), (5, 9), (1, 32), (30, 33), (6, 64)] {
            let part = input(&device, &ops, &x[from * k..(from + m) * k], k, weight.k_pad);
            let y = run(&device, &mut linear, &[&weight], &part, m);
            let same = y
                .iter()
                .zip(&all[from * n..(from + m) * n])
                .all(|(a, b)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()));
            assert!(same, "{scheme}: {m} rows from {from} on are not those of {ROWS}");
        }
    }
}

#[test]
fn many_rows_in_int8_go_in_parts() {
    let Some(device) = device("many rows of a linear layer in int8") else { return };
    let (mut linear, ops) = (Linear::new(&device).expect("kernels"), Ops::new(&device).expect("kernels"));
    let (n, k, m) = (5, 2048, 523);
    let scheme = Scheme::Int { bits: 4, group: 128, zero: ZeroKind::Code, scale: FloatType::F16 };
    let packed = Packed::random(&mut Rng(5), n, k, scheme);
    let weight = weight(&device, &packed.view(), Form::Int8);
    assert!(linear.bytes(&[&weight], m) > 0, "a panel that blocks share");
    let x = Random(3).floats(m * k);
    let all = run(&device, &mut linear, &[&weight], &input(&device, &ops, &x, k, k), m);
    check(&all, &packed.view(), &x, "many rows");
    for (from, m) in [(500, 23), (512, 1)] {
        let part = input(&device, &ops, &x[from * k..(from + m) * k], k, k);
        let y = run(&device, &mut linear, &[&weight], &part, m);
        assert_eq!(bits(&y), bits(&all[from * n..(from + m) * n]), "{m} rows from {from} on");
    }
}

/// Weights of every form beside each other: each gives what it gives alone.
#[test]
fn weights_of_all_forms_share_an_input() {
    let Some(device) = device("weights that share an input in int8") else { return };
    let (mut linear, ops) = (Linear::new(&device).expect("kernels"), Ops::new(&device).expect("kernels"));
    let (k, m) = (320, 3);
    let schemes = [
        (66, Scheme::Int { bits: 4, group: 64, zero: ZeroKind::Code, scale: FloatType::F16 }),
        (65, Scheme::Mini { kind: Mini::E2M1, group: 16, scale: FloatType::BF16 }),
        (7, Scheme::Float(FloatType::F16)),
    ];
    let packed = schemes.map(|(n, scheme)| Packed::random(&mut Rng(n as u64), n, k, scheme));
    let weights = [0, 1, 2].map(|i: usize| weight(&device, &packed[i].view(), Form::Int8));
    let x = Random(3).floats(m * k);
    let acts = input(&device, &ops, &x, k, k);
    let columns = 66 + 65 + 7;
    let alone: Vec<Vec<f32>> = weights.iter().map(|w| run(&device, &mut linear, &[w], &acts, m)).collect();
    let (there, bias) = (Random(9).floats(m * columns), Random(8).floats(columns));
    let (to, up_bias) = (up(&device, &there), up(&device, &bias));
    let all: Vec<_> = weights.iter().collect();
    linear.reserve(&all, m).expect("room");
    let out = Output::Add { to: to.ptr(), stride: columns, bias: Some(up_bias.ptr()) };
    linear.run(&all, &acts, m, out).expect("run");
    let got = to.to_vec().expect("read");
    for r in 0..m {
        let side = alone.iter().zip(schemes).flat_map(|(y, (n, _))| y[r * n..(r + 1) * n].to_vec());
        for (c, y) in side.enumerate() {
            let at = r * columns + c;
            assert_eq!(got[at], there[at] + (y + bias[c]), "row {r} column {c}");
        }
    }
}
