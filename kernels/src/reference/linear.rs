//! What a linear layer computes. This is the specification; every kernel gives these very bits.
//!
//! One row of activations at a time, so that nothing here can depend on a batch: [`default`] in default
//! mode, [`f32()`] in exact mode.

use quern_models::{Mini, Scheme, TensorView, ZeroKind, p64::Shape};

/// One row quantized to int8: values, and per block of columns a scale and the sum of the values.
pub struct Quantized {
    /// `[blocks * block]`; columns past the row's end are zero.
    pub q: Vec<i8>,
    /// `[blocks]`.
    pub scales: Vec<f32>,
    /// `[blocks]`.
    pub sums: Vec<i32>,
}

/// Quantizes a row in blocks of `block` columns: scale = max|x| / 127, values rounded to nearest,
/// ties to even. A block below 1e-35 is zero; a block that is not finite has a NaN scale.
pub fn quantize(x: &[f32], block: usize) -> Quantized {
    let mut out = Quantized { q: vec![], scales: vec![], sums: vec![] };
    for part in x.chunks(block) {
        let finite = part.iter().all(|v| v.is_finite());
        let amax = part.iter().fold(0f32, |m, v| m.max(v.abs()));
        let zero = !finite || amax < 1e-35;
        let q = |i: usize| match part.get(i) {
            Some(v) if !zero => (v * (127.0 / amax)).round_ties_even() as i8,
            _ => 0,
        };
        out.q.extend((0..block).map(q));
        out.scales.push(if !finite {
            f32::NAN
        } else if zero {
            0.0
        } else {
            amax / 127.0
        });
        out.sums.push((0..block).map(|i| q(i) as i32).sum());
    }
    out
}

/// One row through a weight in default mode: int8 activations where [`block`] names a size, else f32.
pub fn default(w: &TensorView, x: &[f32]) -> Vec<f32> {
    match block(w.scheme) {
        Some(block) => int8(w, &quantize(x, block), block),
        None => f32(w, x),
    }
}

/// Columns of an activation block in default mode: 32 where they divide the weight's group, else 16,
/// which always do. Weights that are floats, or codes of floats that no small integers stand for
/// (e4m3), have none.
pub fn block(scheme: Scheme) -> Option<usize> {
    match scheme {
        Scheme::Float(_) | Scheme::Order | Scheme::Mini { kind: Mini::E4M3, .. } => None,
        Scheme::Int { group, .. } | Scheme::Nested { group, .. } | Scheme::Mini { group, .. } => {
            Some(if group % 32 == 0 { 32 } else { 16 })
        }
    }
}

/// A weight of small integers and int8 activations. Per block of columns, ascending:
/// `t = sum(u * a) - z * sum(a)`, exact; `y = fma(t, s * sa, y)`; and with a minimum (`z = 0`) also
/// `y = fma(m * sa, sum(a), y)`. `u` are the codes. Codes e2m1 are halves of integers: there
/// `u = 2 * value + 12`, `z = 12`, and half the scale is `s`.
pub fn int8(w: &TensorView, x: &Quantized, block: usize) -> Vec<f32> {
    let (bits, group) = w.scheme.coded().unwrap_or_else(|| panic!("{} has no codes", w.scheme));
    let shape = Shape::new(w.n, w.k, bits, group);
    let code = |n: usize, k: usize| match w.scheme {
        Scheme::Mini { kind, .. } => (2.0 * kind.value(shape.code(w.codes, n, k)) + 12.0) as i32,
        _ => shape.code(w.codes, n, k) as i32,
    };
    let (zero, middle, unit) = match w.scheme {
        Scheme::Int { zero, .. } | Scheme::Nested { zero, .. } => (zero, 1 << (bits - 1), 1.0),
        Scheme::Mini { kind: Mini::E2M1, .. } => (ZeroKind::Mid, 12, 0.5),
        _ => panic!("{} is not made of small integers", w.scheme),
    };
    let row = |n: usize| {
        let mut y = 0f32;
        for (b, (sa, sum)) in x.scales.iter().zip(&x.sums).enumerate() {
            let g = b * block / group;
            let dot: i32 = (b * block..(b + 1) * block).map(|k| code(n, k) * x.q[k] as i32).sum();
            let z = match zero {
                ZeroKind::Mid => middle,
                ZeroKind::Code => shape.zero(w.zeros, n, g) as i32,
                ZeroKind::Min => 0,
            };
            y = ((dot - z * sum) as f32).mul_add(w.scale(n, g) * unit * sa, y);
            if zero == ZeroKind::Min {
                y = (w.min(n, g) * sa).mul_add(*sum as f32, y);
            }
        }
        y
    };
    (0..w.n).map(row).collect()
}

/// Any weight and f32 activations. Column `k` adds to partial sum `k % 4` of a weight of codes, or
/// `k % 8` of a float one, by fma, ascending; then the partial sums are added as a fixed tree.
pub fn f32(w: &TensorView, x: &[f32]) -> Vec<f32> {
    let row = |n: usize| {
        let partial = |count: usize| {
            let mut p = [0f32; 8];
            for (k, x) in x.iter().enumerate() {
                p[k % count] = w.at(n, k).mul_add(*x, p[k % count]);
            }
            p
        };
        match w.scheme {
            Scheme::Int { .. } | Scheme::Nested { .. } | Scheme::Mini { .. } | Scheme::Order => {
                let p = partial(4);
                (p[0] + p[1]) + (p[2] + p[3])
            }
            Scheme::Float(_) => {
                let p = partial(8);
                ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]))
            }
        }
    };
    (0..w.n).map(row).collect()
}
