//! The device, numbers, and how close results must be.

use std::sync::Arc;

use quern_kernels::{
    cuda::{
        Buffer, Device, Pod,
        acts::{Acts, Form, Int8},
    },
    reference,
};

/// Largest error of each operation, relative to what its test says.
pub mod bound {
    /// Norms, f32, of the value: sums of squares lose little.
    pub const RMS: f64 = 1e-6;
    /// Absolute, for rows within +-3: differences from the mean cancel.
    pub const LAYER: f64 = 6e-6;
    /// Activations, f32, of the value times one plus its square: arguments of exponentials are rounded.
    pub const ACT: f64 = 5e-7;
    /// One rounding to f16, of the value.
    pub const HALF: f64 = 1.0 / 2048.0;
    /// What a row's largest magnitude leaves of its smallest values in f16.
    pub const HALF_ROW: f64 = 1.0 / (1u64 << 33) as f64;
    /// Linear layers on tensor cores, of the sum of the terms' sizes.
    pub const LINEAR_F16: f64 = 1e-6;
    /// Linear layers on integer tensor cores, of the same: sums of blocks are exact.
    pub const LINEAR_INT8: f64 = 5e-7;
    /// Linear layers in f32, of the same.
    pub const LINEAR_F32: f64 = 1e-6;
    /// Rope, absolute, for heads within +-3.
    pub const ROPE: f64 = 1e-6;
    /// Attention in f32, absolute, for values within +-3.
    pub const ATTEND_F32: f64 = 4e-6;
    /// Attention on tensor cores, absolute, for values within +-3: queries and weights are f16.
    pub const ATTEND_F16: f64 = 3e-3;
}

/// The device that tests run on: the virtual one, with every check on, or with `QUERN_CUDA_DEVICE=1` what the machine
/// has; `None`, said once, where there is none.
pub fn device(test: &str) -> Option<Arc<Device>> {
    if std::env::var_os("QUERN_CUDA_DEVICE").is_none() {
        static ONCE: std::sync::Once = std::sync::Once::new();
        ONCE.call_once(|| quern_vgpu::load().set("check", "fatal"));
    }
    match Device::open(0) {
        Ok(device) => Some(device),
        Err(e) if std::env::var_os("QUERN_CUDA_DEVICE").is_some() => panic!("{test}: {e}"),
        Err(e) => {
            println!("SKIPPED {test}: {e}");
            None
        }
    }
}

/// Small fast generator; the tests need variety, not quality.
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Roughly normal, within +-3.
    pub fn float(&mut self) -> f32 {
        let mut unit = || (self.bits() >> 40) as f32 / (1u64 << 24) as f32;
        (unit() + unit() + unit() - 1.5) * 2.0
    }

    pub fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }

    /// A permutation of `0..n`.
    pub fn order(&mut self, n: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..n as u32).collect();
        (1..n).rev().for_each(|i| order.swap(i, self.bits() as usize % (i + 1)));
        order
    }
}

pub fn up<T: Pod>(device: &Arc<Device>, values: &[T]) -> Buffer<T> {
    Buffer::of(device, "a test", values).expect("memory")
}

/// Activations with every byte of their memory set, to be overwritten.
pub fn acts(device: &Arc<Device>, form: Form, rows: usize, columns: usize) -> Acts {
    Acts::new(device, form, rows, columns).expect("memory")
}

/// A row of activations, in plain order.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// What is stored, as bits.
    pub stored: Vec<u32>,
    pub factor: f32,
    /// `[stride]`.
    pub values: Vec<f64>,
}

/// The first `m` rows; checks what the form promises: factor, sums, zeros from `columns` on. Of the int8 form, which
/// the tests have with everything that a weight may read, the rows are those of f32, and codes, scales and sums must be
/// bit for bit what the definition makes of them.
pub fn read_acts(acts: &Acts, m: usize, columns: usize) -> Vec<Row> {
    let stride = acts.stride;
    let mut rows = vec![];
    if acts.form != Form::F16 {
        let mut x = vec![0.0; m * stride];
        acts.x.read(0, &mut x).expect("read");
        if acts.form == Form::Int8 {
            quantized(&acts.int8, 32, &x, stride);
            quantized(&acts.int8_small, 16, &x, stride);
        }
        for x in x.chunks(stride) {
            assert!(x[columns..].iter().all(|&x| x == 0.0), "padding");
            let (stored, values) = (bits(x), x.iter().map(|&x| x as f64).collect());
            rows.push(Row { stored, factor: 1.0, values });
        }
        return rows;
    }
    let (mut h, mut factors, mut sums) = (vec![half::f16::ZERO; m * stride], vec![0.0; m], vec![0.0; m * stride / 16]);
    acts.h.read(0, &mut h).expect("read");
    acts.factors.read(0, &mut factors).expect("read");
    acts.sums.read(0, &mut sums).expect("read");
    for ((h, &factor), sums) in h.chunks(stride).zip(&factors).zip(sums.chunks(stride / 16)) {
        let plain: Vec<f64> = (0..stride).map(|j| h[j / 4 * 4 + [0, 2, 1, 3][j % 4]].to_f64()).collect();
        assert!(plain[columns..].iter().all(|&x| x == 0.0), "padding");
        for (sum, h) in sums.iter().zip(plain.chunks(16)) {
            let exact: f64 = h.iter().sum();
            let size: f64 = h.iter().map(|h| h.abs()).sum();
            assert!((*sum as f64 - exact).abs() <= size * 1e-6, "sum {sum}, expected {exact}");
        }
        if factor.is_finite() {
            assert!(factor > 0.0 && factor.to_bits().trailing_zeros() >= 23, "{factor} is no power of two");
            let most = plain.iter().fold(0f64, |m, h| m.max(h.abs()));
            assert!(
                most == 0.0 || (256.0..=512.0).contains(&most) || factor < 1e-29,
                "largest {most}, factor {factor}"
            );
        }
        let stored = h.iter().map(|h| h.to_bits().into()).collect();
        rows.push(Row { stored, factor, values: plain.iter().map(|h| h * factor as f64).collect() });
    }
    rows
}

/// Looks whether codes, scales and sums are those of rows `x`, `[m][stride]`.
fn quantized(got: &Int8, block: usize, x: &[f32], stride: usize) {
    let m = x.len() / stride;
    let mut q = vec![0i8; m * stride];
    got.q.read(0, &mut q).expect("read");
    let (blocks, all) = (stride / block, got.levels.len() / (stride / block) / 2);
    let levels: Vec<f32> = (0..blocks)
        .flat_map(|b| {
            let mut row = vec![0.0; 2 * m];
            got.levels.read(b * all * 2, &mut row).expect("read");
            row
        })
        .collect();
    for (r, (x, q)) in x.chunks(stride).zip(q.chunks(stride)).enumerate() {
        let want = reference::linear::quantize(x, block);
        assert_eq!(q, want.q, "codes of row {r} in blocks of {block}");
        for b in 0..blocks {
            let [scale, sum] = [levels[(b * m + r) * 2], levels[(b * m + r) * 2 + 1]];
            let same = scale.to_bits() == want.scales[b].to_bits() || (scale.is_nan() && want.scales[b].is_nan());
            assert!(same, "scale {scale} of row {r} block {b} of {block}, expected {}", want.scales[b]);
            assert_eq!(sum, want.sums[b] as f32, "sum of row {r} block {b} of {block}");
        }
    }
}

/// Every value of a row within `bound(want)` of what is wanted, and within what the form loses.
pub fn close(row: &Row, form: Form, want: &[f64], bound: impl Fn(f64) -> f64, what: &str) {
    let most = want.iter().fold(0f64, |m, w| m.max(w.abs()));
    for (i, (&got, &want)) in row.values.iter().zip(want).enumerate() {
        let form = if form == Form::F16 { bound::HALF * want.abs() + bound::HALF_ROW * most } else { 0.0 };
        let error = (got - want).abs();
        assert!(error <= bound(want) + form + 1e-37, "{what}: element {i} is {got}, expected {want}");
    }
}

pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}
