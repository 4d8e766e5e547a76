//! Row operations on f32: norms, rotary embedding, sums, softmax, argmax. (Activations: [`super::act`].)
//!
//! Each has one defined order of operations, the same for every instruction set: results are equal bit for bit.
//! Nothing here is parallel; callers cut rows or columns between threads. Elementwise results do not depend on where
//! a slice is cut.

#[cfg(target_arch = "x86_64")]
pub(super) use super::lanes::Avx2;
use super::lanes::{self, Lanes, Simd, exp, greatest, sum};
pub(super) use super::lanes::{Kind, Portable};

/// Runs an unsafe kernel `f::<V>` compiled for the instruction set of `$simd`.
macro_rules! on {
    ($simd:expr, $kernel:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn avx2($($arg: $type),*) $(-> $result)? {
            // SAFETY: the CPU has the features, or it could not run this function.
            unsafe { $kernel::<Avx2>($($arg),*) }
        }
        match $simd.kind() {
            // SAFETY: runs everywhere.
            Kind::Portable => unsafe { $kernel::<Portable>($($arg),*) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: these exist only where the features were detected.
            Kind::Avx2 | Kind::Avx512 => unsafe { avx2($($arg),*) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: part of every processor of this target.
            Kind::Neon => unsafe { $kernel::<$crate::cpu::lanes::Neon>($($arg),*) },
        }
    }};
}
pub(super) use on;

/// `out = (x * r) * weight` with `r = 1 / sqrt(mean(x * x) + eps)`; all `[n]`.
///
/// Squares are summed by fma in eight partial sums over `i % 8`, which are added as halves, quarters, pairs.
pub fn rms_norm(simd: Simd, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert!(x.len() == weight.len() && x.len() == out.len(), "{} {} {}", x.len(), weight.len(), out.len());
    on!(simd, rms_norm_in(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]))
}

/// `out = ((x - mean) * r) * weight + bias` with `r = 1 / sqrt(mean((x - mean)^2) + eps)`, the last two operations
/// rounded once; all `[n]`.
///
/// Both sums are taken like that of [`rms_norm`], the first by additions.
pub fn layer_norm(simd: Simd, x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) {
    let n = x.len();
    assert!(
        weight.len() == n && bias.len() == n && out.len() == n,
        "{n} {} {} {}",
        weight.len(),
        bias.len(),
        out.len()
    );
    on!(simd, layer_norm_in(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]))
}

/// Rotates the first `2 * cos.len()` elements of every head of `x`, `[heads, head_dim]`, pairing `i` with
/// `i + cos.len()` (Hugging Face's half-split order). `cos` and `sin` are those of the token's position.
///
/// `x0 * c - x1 * s` and `x1 * c + x0 * s`, every operation rounded.
pub fn rope(simd: Simd, x: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32]) {
    assert!(cos.len() == sin.len() && 2 * cos.len() <= head_dim, "{} of {head_dim}", cos.len());
    assert!(x.len().is_multiple_of(head_dim), "{} elements, heads of {head_dim}", x.len());
    on!(simd, rope_in(x: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32]))
}

/// `x += y`, both `[n]`.
pub fn add(simd: Simd, x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len());
    on!(simd, add_in(x: &mut [f32], y: &[f32]))
}

/// `x *= factor`.
pub fn scale(simd: Simd, x: &mut [f32], factor: f32) {
    on!(simd, scale_in(x: &mut [f32], factor: f32))
}

/// `x = cap * tanh(x / cap)`, for a positive cap.
pub fn soft_cap(simd: Simd, x: &mut [f32], cap: f32) {
    on!(simd, soft_cap_in(x: &mut [f32], cap: f32))
}

/// In place: `x = e^(x - max)`, then divided by their sum, which is taken like that of [`rms_norm`].
pub fn softmax(simd: Simd, x: &mut [f32]) {
    on!(simd, softmax_in(x: &mut [f32]))
}

/// Index of the greatest element, the first of equals; NaN never wins. 0 if there is nothing else.
pub fn argmax(simd: Simd, x: &[f32]) -> usize {
    on!(simd, argmax_in(x: &[f32]) -> usize)
}

/// # Safety
/// The CPU can run `V`; so for all functions below.
#[inline(always)]
unsafe fn rms_norm_in<V: Lanes>(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        let (body, tail) = x.as_chunks::<8>();
        let mut p = V::splat(0.0);
        for x in body {
            let x = V::load(x.as_ptr());
            p = x.fma(x, p);
        }
        let x_tail = V::load(pad(tail).as_ptr());
        p = x_tail.fma(x_tail, p);
        let r = V::splat(1.0 / (sum(p) / x.len() as f32 + eps).sqrt());
        let (w_body, w_tail) = weight.as_chunks::<8>();
        let (out_body, out_tail) = out.as_chunks_mut::<8>();
        for ((x, w), out) in body.iter().zip(w_body).zip(out_body) {
            V::load(x.as_ptr()).mul(r).mul(V::load(w.as_ptr())).store(out.as_mut_ptr());
        }
        let last = x_tail.mul(r).mul(V::load(pad(w_tail).as_ptr()));
        out_tail.copy_from_slice(&last.to_array()[..tail.len()]);
    }
}

/// # Safety
/// See [`rms_norm_in`].
#[inline(always)]
unsafe fn layer_norm_in<V: Lanes>(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        let n = x.len() as f32;
        let (body, tail) = x.as_chunks::<8>();
        let mut p = V::splat(0.0);
        for x in body {
            p = p.add(V::load(x.as_ptr()));
        }
        let mean = V::splat(sum(p.add(V::load(pad(tail).as_ptr()))) / n);
        let mut p = V::splat(0.0);
        for x in body {
            let d = V::load(x.as_ptr()).sub(mean);
            p = d.fma(d, p);
        }
        let mut d = V::load(pad(tail).as_ptr()).sub(mean).to_array();
        d[tail.len()..].fill(0.0);
        let d_tail = V::load(d.as_ptr());
        p = d_tail.fma(d_tail, p);
        let r = V::splat(1.0 / (sum(p) / n + eps).sqrt());
        let (w_body, w_tail) = weight.as_chunks::<8>();
        let (b_body, b_tail) = bias.as_chunks::<8>();
        let (out_body, out_tail) = out.as_chunks_mut::<8>();
        for (((x, w), b), out) in body.iter().zip(w_body).zip(b_body).zip(out_body) {
            let normed = V::load(x.as_ptr()).sub(mean).mul(r);
            normed.fma(V::load(w.as_ptr()), V::load(b.as_ptr())).store(out.as_mut_ptr());
        }
        let last = d_tail.mul(r).fma(V::load(pad(w_tail).as_ptr()), V::load(pad(b_tail).as_ptr()));
        out_tail.copy_from_slice(&last.to_array()[..tail.len()]);
    }
}

/// # Safety
/// See [`rms_norm_in`].
#[inline(always)]
unsafe fn rope_in<V: Lanes>(x: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    for head in x.chunks_exact_mut(head_dim) {
        let (x0, x1) = head[..2 * half].split_at_mut(half);
        for i in (0..half).step_by(8) {
            let n = 8.min(half - i);
            let at = i..i + n;
            // SAFETY: the caller's promise.
            unsafe {
                let (a, b) = (V::load(pad(&x0[at.clone()]).as_ptr()), V::load(pad(&x1[at.clone()]).as_ptr()));
                let (c, s) = (V::load(pad(&cos[at.clone()]).as_ptr()), V::load(pad(&sin[at.clone()]).as_ptr()));
                x0[at.clone()].copy_from_slice(&a.mul(c).sub(b.mul(s)).to_array()[..n]);
                x1[at].copy_from_slice(&b.mul(c).add(a.mul(s)).to_array()[..n]);
            }
        }
    }
}

/// # Safety
/// See [`rms_norm_in`].
#[inline(always)]
unsafe fn add_in<V: Lanes>(x: &mut [f32], y: &[f32]) {
    let (x, x_tail) = x.as_chunks_mut::<8>();
    let (y, y_tail) = y.as_chunks::<8>();
    for (x, y) in x.iter_mut().zip(y) {
        // SAFETY: the caller's promise.
        unsafe { V::load(x.as_ptr()).add(V::load(y.as_ptr())).store(x.as_mut_ptr()) };
    }
    for (x, y) in x_tail.iter_mut().zip(y_tail) {
        *x += y;
    }
}

/// # Safety
/// See [`rms_norm_in`].
#[inline(always)]
unsafe fn scale_in<V: Lanes>(x: &mut [f32], factor: f32) {
    let (x, tail) = x.as_chunks_mut::<8>();
    for x in x {
        // SAFETY: the caller's promise.
        unsafe { V::load(x.as_ptr()).mul(V::splat(factor)).store(x.as_mut_ptr()) };
    }
    tail.iter_mut().for_each(|x| *x *= factor);
}

/// # Safety
/// See [`rms_norm_in`].
#[inline(always)]
unsafe fn soft_cap_in<V: Lanes>(x: &mut [f32], cap: f32) {
    let inverse = 1.0 / cap;
    let (x, tail) = x.as_chunks_mut::<8>();
    // SAFETY: the caller's promise; so for all.
    unsafe {
        for x in x {
            lanes::soft_cap(V::load(x.as_ptr()), cap, inverse).store(x.as_mut_ptr());
        }
        let last = lanes::soft_cap(V::load(pad(tail).as_ptr()), cap, inverse).to_array();
        tail.copy_from_slice(&last[..tail.len()]);
    }
}

/// # Safety
/// See [`rms_norm_in`].
#[inline(always)]
unsafe fn softmax_in<V: Lanes>(x: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        let (body, tail) = x.as_chunks_mut::<8>();
        let mut top = V::splat(f32::NEG_INFINITY);
        for x in body.iter() {
            top = V::load(x.as_ptr()).max(top);
        }
        let none = [f32::NEG_INFINITY; 8];
        let mut last = none;
        last[..tail.len()].copy_from_slice(tail);
        top = V::load(last.as_ptr()).max(top);
        let top = V::splat(greatest(top));
        let mut p = V::splat(0.0);
        for x in body.iter_mut() {
            let e = exp(V::load(x.as_ptr()).sub(top));
            p = p.add(e);
            e.store(x.as_mut_ptr());
        }
        let e = exp(V::load(last.as_ptr()).sub(top)).to_array();
        tail.copy_from_slice(&e[..tail.len()]);
        let l = V::splat(sum(p.add(V::load(pad(tail).as_ptr()))));
        for x in body {
            V::load(x.as_ptr()).div(l).store(x.as_mut_ptr());
        }
        let last = V::load(pad(tail).as_ptr()).div(l).to_array();
        tail.copy_from_slice(&last[..tail.len()]);
    }
}

/// # Safety
/// See [`rms_norm_in`].
#[inline(always)]
unsafe fn argmax_in<V: Lanes>(x: &[f32]) -> usize {
    // The first stretch that holds the maximum is found by vectors, the element in it one by one.
    const STRETCH: usize = 256;
    let (mut best, mut at) = (f32::NEG_INFINITY, 0);
    for (i, stretch) in x.chunks(STRETCH).enumerate() {
        // SAFETY: the caller's promise.
        let top = unsafe {
            let (body, tail) = stretch.as_chunks::<8>();
            let mut top = V::splat(f32::NEG_INFINITY);
            for x in body {
                top = V::load(x.as_ptr()).max(top);
            }
            tail.iter().fold(greatest(top), |top, &x| if x > top { x } else { top })
        };
        if top > best {
            (best, at) = (top, i * STRETCH);
        }
    }
    x[at..].iter().position(|&x| x == best).map_or(0, |i| at + i)
}

/// Up to 8 elements and zeros behind them.
#[inline(always)]
pub(super) fn pad(tail: &[f32]) -> [f32; 8] {
    let mut a = [0.0; 8];
    a[..tail.len()].copy_from_slice(tail);
    a
}
