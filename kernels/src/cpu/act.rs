//! Activations of the feed-forward block, elementwise.
//!
//! As in [`super::ops`], each has one defined order of operations, and so the same bits everywhere. Results do not
//! depend on where a slice is cut.

use quern_models::spec::Act;

use super::lanes::{Lanes, Simd, exp, polynomial};
#[cfg(target_arch = "x86_64")]
use super::ops::Avx2;
use super::ops::{Kind, Portable, on, pad};

/// `out = act(x)`, both `[n]`.
pub fn act(simd: Simd, kind: Act, x: &[f32], out: &mut [f32]) {
    assert_eq!(x.len(), out.len());
    on!(simd, act_in(kind: Act, x: &[f32], out: &mut [f32]))
}

/// `out = act(gate) * up`, all `[n]`.
pub fn act_mul(simd: Simd, kind: Act, gate: &[f32], up: &[f32], out: &mut [f32]) {
    assert!(gate.len() == up.len() && up.len() == out.len(), "{} {} {}", gate.len(), up.len(), out.len());
    on!(simd, act_mul_in(kind: Act, gate: &[f32], up: &[f32], out: &mut [f32]))
}

/// # Safety
/// The CPU can run `V`.
#[inline(always)]
unsafe fn act_in<V: Lanes>(kind: Act, x: &[f32], out: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        let ((x, x_tail), (out, out_tail)) = (x.as_chunks::<8>(), out.as_chunks_mut::<8>());
        for (x, out) in x.iter().zip(out) {
            lanes(kind, V::load(x.as_ptr())).store(out.as_mut_ptr());
        }
        let last = lanes(kind, V::load(pad(x_tail).as_ptr())).to_array();
        out_tail.copy_from_slice(&last[..x_tail.len()]);
    }
}

/// # Safety
/// The CPU can run `V`.
#[inline(always)]
unsafe fn act_mul_in<V: Lanes>(kind: Act, gate: &[f32], up: &[f32], out: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        let ((g, g_tail), (u, u_tail)) = (gate.as_chunks::<8>(), up.as_chunks::<8>());
        let (out, out_tail) = out.as_chunks_mut::<8>();
        for ((g, u), out) in g.iter().zip(u).zip(out) {
            lanes(kind, V::load(g.as_ptr())).mul(V::load(u.as_ptr())).store(out.as_mut_ptr());
        }
        let last = lanes(kind, V::load(pad(g_tail).as_ptr())).mul(V::load(pad(u_tail).as_ptr()));
        out_tail.copy_from_slice(&last.to_array()[..g_tail.len()]);
    }
}

#[inline(always)]
fn lanes<V: Lanes>(kind: Act, x: V) -> V {
    match kind {
        Act::Silu => silu(x),
        Act::Gelu => gelu(x),
        Act::GeluTanh => gelu_tanh(x),
    }
}

/// `x / (1 + e^-x)`.
#[inline(always)]
fn silu<V: Lanes>(x: V) -> V {
    // SAFETY: `x` exists, so the CPU can run V.
    let (zero, one) = unsafe { (V::splat(0.0), V::splat(1.0)) };
    x.div(one.add(exp(zero.sub(x))))
}

/// `x (1 + tanh u) / 2` with `u = sqrt(2 / pi) (x + 0.044715 x^3)`, as `x / (1 + e^-2u)`: the same function without
/// the cancellation of `1 + tanh u` for negative `u`.
#[inline(always)]
fn gelu_tanh<V: Lanes>(x: V) -> V {
    // SAFETY: `x` exists, so the CPU can run V.
    let (one, cube, scale) = unsafe { (V::splat(1.0), V::splat(0.044715), V::splat(-TWO_SQRT_2_OVER_PI)) };
    let u = x.mul(x).fma(cube, one).mul(x).mul(scale);
    x.div(one.add(exp(u)))
}

/// `2 sqrt(2 / pi)`.
const TWO_SQRT_2_OVER_PI: f32 = 1.595_769;

/// `x (1 + erf(x / sqrt 2)) / 2`, from the complementary error function of `z = |x| / sqrt 2`:
/// `erfc(z) = t e^(P(t) - z^2)` with `t = 1 / (1 + z / 2)`.
#[inline(always)]
fn gelu<V: Lanes>(x: V) -> V {
    // SAFETY: `x` exists, so the CPU can run V.
    let (zero, half, one, root) =
        unsafe { (V::splat(0.0), V::splat(0.5), V::splat(1.0), V::splat(std::f32::consts::FRAC_1_SQRT_2)) };
    let z = x.select(zero.sub(x), x).mul(root);
    let t = one.div(half.fma(z, one));
    // SAFETY: as above.
    let p = unsafe { polynomial(&ERFC, t) }.mul(t.sub(one));
    let tail = t.mul(exp(z.fnma(z, p))).mul(half);
    x.mul(x.select(tail, one.sub(tail)))
}

/// `P(t) / (t - 1)`, highest power first: least squares at 400 Chebyshev nodes of `t` for z from 0 to 9.5, within
/// 5e-8 of the logarithm.
const ERFC: [f32; 9] = [
    0.137_135_01,
    -0.502_363_6,
    0.559_672_36,
    -0.013_808_897,
    -0.193_063_66,
    -0.140_491_11,
    -0.122_937_9,
    0.267_194_96,
    1.265_428_7,
];
