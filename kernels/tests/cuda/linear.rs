//! Linear layers and rows of tables: every scheme at odd shapes against `TensorView::at` in f64, and every row bit for
//! bit against itself among other rows.

use std::sync::Arc;

use half::f16;
use quern_kernels::cuda::{
    Buffer, Device, Linear, Output, Upload, Weight,
    acts::{Acts, Form},
};
use quern_models::{FloatType, Mini, Scheme, TensorView, ZeroKind};

use super::common::{Random, bits, bound, device, up};
use super::pack::{Packed, Rng};

/// Rows that are computed at most.
pub const ROWS: usize = 70;

pub fn schemes() -> Vec<Scheme> {
    let int = |bits, group, zero, scale| Scheme::Int { bits, group, zero, scale };
    let (f32, f16, bf16) = (FloatType::F32, FloatType::F16, FloatType::BF16);
    let mut all = vec![];
    for bits in [4, 8] {
        for (zero, scale) in [(ZeroKind::Mid, f16), (ZeroKind::Code, bf16), (ZeroKind::Min, f32)] {
            all.extend([16, 32, 48, 64, 128, 144, 160].map(|group| int(bits, group, zero, scale)));
        }
        all.extend([int(bits, 32, ZeroKind::Min, f16), int(bits, 16, ZeroKind::Code, f16)]);
        for zero in [ZeroKind::Mid, ZeroKind::Min] {
            all.extend([16, 32].map(|group| Scheme::Nested { bits, group, zero }));
        }
    }
    for kind in [Mini::E2M1, Mini::E4M3] {
        all.extend([(16, f16), (32, bf16), (128, f32)].map(|(group, scale)| Scheme::Mini { kind, group, scale }));
    }
    all.extend([f32, f16, bf16].map(Scheme::Float));
    all
}

/// Outputs and columns: partial panels and groups, slices without columns, splits.
pub const SHAPES: [(usize, usize); 5] = [(1, 1), (7, 33), (65, 200), (130, 320), (16, 1100)];

pub fn weight(device: &Arc<Device>, view: &TensorView, form: Form) -> Weight {
    let mut upload = Upload::new(device, Box::new(|_| {})).expect("an upload");
    Weight::upload(&mut upload, view, form).expect("a weight")
}

/// What a form keeps of rows `[m][k]`, as f64 `[m][k]`, and the input itself.
fn input(device: &Arc<Device>, form: Form, x: &[f32], k: usize, columns: usize) -> (Vec<f64>, Acts) {
    let m = x.len() / k;
    let mut acts = Acts::new(device, form, m, columns).expect("memory");
    let stride = acts.stride;
    if form == Form::F32 {
        let mut padded = vec![0.0; m * stride];
        padded.chunks_mut(stride).zip(x.chunks(k)).for_each(|(to, from)| to[..k].copy_from_slice(from));
        acts.x.write(0, &padded).expect("written");
        return (x.iter().map(|&x| x as f64).collect(), acts);
    }
    let (mut kept, mut h, mut factors, mut sums) = (vec![], vec![f16::ZERO; m * stride], vec![], vec![]);
    for (x, h) in x.chunks(k).zip(h.chunks_mut(stride)) {
        let most = x.iter().fold(0f32, |m, x| m.max(x.abs()));
        // The largest becomes 256..512.
        let e = if most == 0.0 { 0 } else { (most.to_bits() >> 23) as i32 - 127 - 8 };
        let factor = 2f32.powi(e);
        let plain: Vec<f16> = x.iter().map(|x| f16::from_f32(x / factor)).collect();
        kept.extend(plain.iter().map(|h| h.to_f64() * factor as f64));
        plain.iter().enumerate().for_each(|(j, &v)| h[j / 4 * 4 + [0, 2, 1, 3][j % 4]] = v);
        factors.push(factor);
        sums.extend(h.chunks(16).map(|h| h.iter().map(|h| h.to_f32()).sum::<f32>()));
    }
    acts.h.write(0, &h).expect("written");
    acts.factors.write(0, &factors).expect("written");
    acts.sums.write(0, &sums).expect("written");
    (kept, acts)
}

/// What a weight's element is in a form, and the sizes of its parts, for the bound.
fn element(view: &TensorView, form: Form, n: usize, k: usize) -> (f64, f64) {
    let w = view.at(n, k) as f64;
    match (view.scheme, form) {
        (Scheme::Float(_), Form::F16) => {
            let h = f16::from_f64(w).to_f64();
            (h, h.abs())
        }
        (Scheme::Float(_) | Scheme::Order, _) => (w, w.abs()),
        _ => {
            let (_, group) = view.scheme.coded().expect("codes");
            let min = view.min(n, k / group) as f64;
            (w, (w - min).abs() + min.abs())
        }
    }
}

/// `[m][n]` and a bound of each by its terms.
fn expected(views: &[TensorView], x: &[f64], form: Form) -> Vec<Vec<(f64, f64)>> {
    let k = views[0].k;
    let elements: Vec<Vec<(f64, f64)>> =
        views.iter().flat_map(|v| (0..v.n).map(|n| (0..k).map(|k| element(v, form, n, k)).collect())).collect();
    let dot = |x: &[f64], w: &[(f64, f64)]| {
        w.iter().zip(x).fold((0.0, 0.0), |(y, size), ((w, s), x)| (y + w * x, size + s * x.abs()))
    };
    x.chunks(k).map(|x| elements.iter().map(|w| dot(x, w)).collect()).collect()
}

fn check(got: &[f32], want: &[Vec<(f64, f64)>], most: f64, what: &str) -> f64 {
    let mut worst = 0f64;
    for (r, (got, want)) in got.chunks(want[0].len()).zip(want).enumerate() {
        for (n, (&got, &(y, size))) in got.iter().zip(want).enumerate() {
            let error = (got as f64 - y).abs();
            assert!(
                error <= most * size + 1e-37,
                "{what}: row {r} output {n} is {got}, expected {y} +- {}",
                most * size
            );
            worst = worst.max(if size > 0.0 { error / size } else { 0.0 });
        }
    }
    worst
}

/// `m` rows from `from` on, copied to an input of their own.
fn cut(device: &Arc<Device>, acts: &Acts, from: usize, m: usize) -> Acts {
    let mut part = Acts::new(device, acts.form, m, acts.stride).expect("memory");
    fn copy<T: quern_kernels::cuda::Pod + Default>(from: &Buffer<T>, to: &mut Buffer<T>, start: usize) {
        let mut values = vec![T::default(); to.len()];
        from.read(start, &mut values).expect("read");
        to.write(0, &values).expect("written");
    }
    copy(&acts.h, &mut part.h, if acts.form == Form::F16 { from * acts.stride } else { 0 });
    copy(&acts.factors, &mut part.factors, if acts.form == Form::F16 { from } else { 0 });
    copy(&acts.sums, &mut part.sums, if acts.form == Form::F16 { from * acts.stride / 16 } else { 0 });
    copy(&acts.x, &mut part.x, if acts.form == Form::F32 { from * acts.stride } else { 0 });
    part
}

pub fn run(device: &Arc<Device>, linear: &mut Linear, weights: &[&Weight], acts: &Acts, m: usize) -> Vec<f32> {
    let columns: usize = weights.iter().map(|w| w.n).sum();
    let mut to = up(device, &vec![f32::NAN; m * columns]);
    linear.reserve(weights, m).expect("room");
    let out = Output::Store { to: to.ptr(), stride: columns, bias: None };
    linear.run(weights, acts, m, out).expect("run");
    let mut y = vec![0.0; m * columns];
    to.read(0, &mut y).expect("read");
    to.fill(0).expect("filled");
    y
}

fn conformance(form: Form, most: f64, test: &str) {
    let Some(device) = device(test) else { return };
    let mut linear = Linear::new(&device).expect("kernels");
    let mut worst = 0f64;
    for (i, scheme) in schemes().into_iter().enumerate() {
        for (n, k) in SHAPES {
            let mut rng = Rng(7 + i as u64);
            let packed = Packed::random(&mut rng, n, k, scheme);
            let view = packed.view();
            let weight = weight(&device, &view, form);
            // A few rows of every scheme, all tiles of tokens in the other test.
            let m = [1, 3, 9][i % 3];
            let mut random = Random(i as u64 + 99);
            let x: Vec<f32> = (0..m * k).map(|_| random.float() * 1000f32.powi((i % 5) as i32 - 2)).collect();
            let (kept, acts) = input(&device, form, &x, k, weight.k_pad);
            let y = run(&device, &mut linear, &[&weight], &acts, m);
            let what = format!("{form:?} {scheme} [{n}, {k}] m = {m}");
            worst = worst.max(check(&y, &expected(&[view], &kept, form), most, &what));
        }
    }
    println!("{test}: largest error {worst:e} of the terms' sum, allowed {most:e}");
}

#[test]
fn every_scheme_in_f16() {
    conformance(Form::F16, bound::LINEAR_F16, "linear layers on tensor cores");
}

#[test]
fn every_scheme_in_f32() {
    conformance(Form::F32, bound::LINEAR_F32, "linear layers in f32");
}

/// One of each kernel.
fn kinds() -> Vec<(Scheme, usize, usize)> {
    let (int, f16) = (|bits, group, zero, scale| Scheme::Int { bits, group, zero, scale }, FloatType::F16);
    let mini = |kind, group| Scheme::Mini { kind, group, scale: f16 };
    vec![
        (int(4, 32, ZeroKind::Code, f16), 130, 2100),
        (int(4, 48, ZeroKind::Min, f16), 65, 200),
        (int(8, 128, ZeroKind::Mid, f16), 64, 1100),
        (Scheme::Nested { bits: 8, group: 16, zero: ZeroKind::Mid }, 70, 520),
        (Scheme::Nested { bits: 4, group: 32, zero: ZeroKind::Min }, 70, 520),
        (mini(Mini::E2M1, 32), 65, 200),
        (mini(Mini::E2M1, 16), 65, 200),
        (mini(Mini::E4M3, 128), 65, 300),
        (mini(Mini::E4M3, 16), 65, 200),
        (Scheme::Float(FloatType::BF16), 65, 200),
    ]
}

#[test]
fn rows_do_not_depend_on_their_batch() {
    let Some(device) = device("rows of linear layers in batches") else { return };
    let mut linear = Linear::new(&device).expect("kernels");
    for form in [Form::F16, Form::F32] {
        for (scheme, n, k) in kinds() {
            let packed = Packed::random(&mut Rng(5), n, k, scheme);
            let weight = weight(&device, &packed.view(), form);
            let (kept, acts) = input(&device, form, &Random(3).floats(ROWS * k), k, weight.k_pad);
            let all = run(&device, &mut linear, &[&weight], &acts, ROWS);
            let most = if form == Form::F16 { bound::LINEAR_F16 } else { bound::LINEAR_F32 };
            check(&all, &expected(&[packed.view()], &kept, form), most, &format!("{form:?} {scheme}"));
            for (from, m) in [(0, 1), (69, 1), (3, 8), (5, 9), (1, 32), (30, 33), (6, 64)] {
                let part = cut(&device, &acts, from, m);
                let y = run(&device, &mut linear, &[&weight], &part, m);
                let same = bits(&y) == bits(&all[from * n..(from + m) * n]);
                assert!(same, "{form:?} {scheme}: {m} rows from {from} on are not those of {ROWS}");
            }
        }
    }
}

#[test]
fn many_rows_of_shared_panels_go_in_parts() {
    let Some(device) = device("many rows of a linear layer") else { return };
    let mut linear = Linear::new(&device).expect("kernels");
    let (n, k, m) = (5, 2048, 523);
    let scheme = Scheme::Int { bits: 4, group: 128, zero: ZeroKind::Code, scale: FloatType::F16 };
    let packed = Packed::random(&mut Rng(5), n, k, scheme);
    let weight = weight(&device, &packed.view(), Form::F16);
    assert!(linear.bytes(&[&weight], m) > 0, "a panel that blocks share");
    assert_eq!(linear.bytes(&[&weight], m), linear.bytes(&[&weight], 512));
    let (kept, acts) = input(&device, Form::F16, &Random(3).floats(m * k), k, k);
    let all = run(&device, &mut linear, &[&weight], &acts, m);
    check(&all, &expected(&[packed.view()], &kept, Form::F16), bound::LINEAR_F16, "many rows");
    for (from, m) in [(500, 23), (512, 1)] {
        let y = run(&device, &mut linear, &[&weight], &cut(&device, &acts, from, m), m);
        assert_eq!(bits(&y), bits(&all[from * n..(from + m) * n]), "{m} rows from {from} on");
    }
}

#[test]
fn weights_side_by_side_biases_and_sums() {
    let Some(device) = device("linear layers side by side") else { return };
    let mut linear = Linear::new(&device).expect("kernels");
    let int = |zero| Scheme::Int { bits: 4, group: 32, zero, scale: FloatType::F16 };
    let nested = Scheme::Nested { bits: 8, group: 16, zero: ZeroKind::Mid };
    // Kernels of one kind are one launch, others another.
    let sets: [&[(usize, Scheme)]; 3] = [
        &[(130, int(ZeroKind::Mid)), (64, int(ZeroKind::Code)), (3, int(ZeroKind::Min))],
        &[(65, int(ZeroKind::Mid)), (66, nested), (7, int(ZeroKind::Mid))],
        &[(64, Scheme::Float(FloatType::F16)), (1, Scheme::Float(FloatType::F16))],
    ];
    for form in [Form::F16, Form::F32] {
        for (set, k) in sets.iter().flat_map(|s| [(s, 96), (s, 2080)]) {
            let m = 3;
            let packed: Vec<Packed> = set.iter().map(|&(n, s)| Packed::random(&mut Rng(n as u64), n, k, s)).collect();
            let weights: Vec<Weight> = packed.iter().map(|p| weight(&device, &p.view(), form)).collect();
            let weights: Vec<&Weight> = weights.iter().collect();
            let columns: usize = set.iter().map(|s| s.0).sum();
            let (kept, acts) = input(&device, form, &Random(3).floats(m * k), k, weights[0].k_pad);
            let views: Vec<TensorView> = packed.iter().map(Packed::view).collect();
            let plain = run(&device, &mut linear, &weights, &acts, m);
            check(&plain, &expected(&views, &kept, form), bound::LINEAR_F16, &format!("{form:?} {k}"));

            let (bias, there, stride) = (Random(8).floats(columns), Random(9).floats(m * (columns + 5)), columns + 5);
            let (bias_up, to) = (up(&device, &bias), up(&device, &there));
            let out = Output::Add { to: to.ptr(), stride, bias: Some(bias_up.ptr()) };
            // As a step does it: recorded, then run.
            linear.reserve(&weights, m).expect("room");
            let graph = device.capture(|| linear.run(&weights, &acts, m, out)).expect("a graph");
            // SAFETY: weights, activations, bias and outputs are alive.
            unsafe { graph.launch() }.expect("launched");
            let mut got = vec![0.0; there.len()];
            to.read(0, &mut got).expect("read");
            for r in 0..m {
                for c in 0..stride {
                    let was = there[r * stride + c];
                    let want = if c < columns { was + (plain[r * columns + c] + bias[c]) } else { was };
                    assert_eq!(got[r * stride + c], want, "{form:?} k {k} row {r} column {c}");
                }
            }
        }
    }
}

#[test]
fn rows_of_tables_are_those_of_the_definition() {
    let Some(device) = device("rows of tables") else { return };
    let mut linear = Linear::new(&device).expect("kernels");
    let (n, k, tokens) = (70, 203, [69u32, 0, 5, 64, 64, 70]);
    let places = Packed::random(&mut Rng(2), 9, k, Scheme::Float(FloatType::F32));
    for form in [Form::F16, Form::F32] {
        for scheme in schemes() {
            let packed = Packed::random(&mut Rng(11), n, k, scheme);
            let table = weight(&device, &packed.view(), form);
            let positions = weight(&device, &places.view(), Form::F32);
            let (at, pos) = (up(&device, &tokens), up(&device, &[0u32, 8, 3, 3, 1, 2]));
            let to = up(&device, &vec![0f32; tokens.len() * k]);
            for (second, with) in [(None, false), (Some((&positions, pos.ptr())), true)] {
                linear.embed(&table, at.ptr(), second, 1.0, to.ptr(), tokens.len()).expect("run");
                let got = to.to_vec().expect("read");
                for (i, (row, &token)) in got.chunks(k).zip(&tokens).enumerate() {
                    if token as usize == n {
                        assert!(row.iter().all(|v| v.is_nan()), "a row that is not there");
                        continue;
                    }
                    for (c, got) in row.iter().enumerate() {
                        let mut want = packed.view().at(token as usize, c);
                        if matches!(scheme, Scheme::Float(_)) && form == Form::F16 {
                            want = f16::from_f32(want).to_f32();
                        }
                        if with {
                            want += places.view().at([0, 8, 3, 3, 1, 2][i], c);
                        }
                        assert_eq!(got.to_bits(), want.to_bits(), "{form:?} {scheme}: token {token} column {c}");
                    }
                }
            }
        }
    }
}

#[test]
fn floats_beyond_f16_are_refused() {
    let Some(device) = device("floats beyond f16") else { return };
    let mut bytes = vec![];
    (0..130).for_each(|i| FloatType::BF16.push(if i == 129 { 1e5 } else { -1.0 }, &mut bytes));
    let view = TensorView::new(2, 65, Scheme::Float(FloatType::BF16), &bytes).expect("a view");
    let mut upload = Upload::new(&device, Box::new(|_| {})).expect("an upload");
    let error = Weight::upload(&mut upload, &view, Form::F16).err().expect("an error").to_string();
    assert!(error.contains("65504") && error.contains("[2, 65] of bf16"), "{error}");
    assert!(Weight::upload(&mut upload, &view, Form::F32).is_ok());
}
