//! Row operations: against f64, and bit for bit between instruction sets, at odd lengths.

use quern_kernels::cpu::act::{act, act_mul};
use quern_kernels::cpu::lanes::Simd;
use quern_kernels::cpu::ops::*;
use quern_kernels::reference::ops as oracle;
use quern_models::spec::Act;

const LENGTHS: [usize; 14] = [1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 576, 1001, 4096];

fn floats(n: usize, seed: u64) -> Vec<f32> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            ((x >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * 3.0
        })
        .collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Runs `f` on every instruction set, checks that the bits agree, and returns the result.
fn same_everywhere(f: impl Fn(Simd) -> Vec<f32>) -> Vec<f32> {
    let want = f(Simd::PORTABLE);
    for simd in Simd::available() {
        assert_eq!(bits(&f(simd)), bits(&want), "{}", simd.name());
    }
    want
}

fn close(got: &[f32], want: &[f64], relative: f64) {
    for (i, (&got, want)) in got.iter().zip(want).enumerate() {
        assert!((got as f64 - want).abs() <= relative * want.abs() + 1e-37, "element {i}: {got}, expected {want}");
    }
}

#[test]
fn rms_norm_is_right() {
    for n in LENGTHS {
        let (x, w) = (floats(n, n as u64), floats(n, 77));
        let got = same_everywhere(|simd| {
            let mut out = vec![f32::NAN; n];
            rms_norm(simd, &x, &w, 1e-5, &mut out);
            out
        });
        close(&got, &oracle::rms_norm(&x, &w, 1e-5), 1e-6);
    }
}

#[test]
fn rms_norm_sums_in_the_stated_order() {
    let x = floats(21, 5);
    let mut p = [0.0f32; 8];
    for (i, x) in x.iter().enumerate() {
        p[i % 8] = x.mul_add(*x, p[i % 8]);
    }
    let sum = ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]));
    let r = 1.0 / (sum / 21.0 + 1e-6).sqrt();
    let w = floats(21, 6);
    let mut out = vec![0.0; 21];
    rms_norm(Simd::detect(), &x, &w, 1e-6, &mut out);
    let want: Vec<f32> = x.iter().zip(&w).map(|(x, w)| (x * r) * w).collect();
    assert_eq!(bits(&out), bits(&want));
}

#[test]
fn rope_is_right() {
    for (head_dim, half) in [(64, 32), (80, 40), (96, 48), (128, 64), (80, 10), (64, 12), (16, 3), (8, 0), (256, 128)] {
        let x = floats(3 * head_dim, half as u64);
        let angles = floats(half, 9);
        let (cos, sin): (Vec<f32>, Vec<f32>) = angles.iter().map(|a| (a.cos(), a.sin())).unzip();
        let got = same_everywhere(|simd| {
            let mut x = x.clone();
            rope(simd, &mut x, head_dim, &cos, &sin);
            x
        });
        for (got, x) in got.chunks(head_dim).zip(x.chunks(head_dim)) {
            for (got, want) in got.iter().zip(oracle::rope(x, &cos, &sin)) {
                assert!((*got as f64 - want).abs() < 1e-6, "{got}, expected {want}");
            }
            assert_eq!(got[2 * half..], x[2 * half..], "unrotated part");
            for i in 0..half {
                let (c, s) = (cos[i], sin[i]);
                assert_eq!(got[i].to_bits(), (x[i] * c - x[i + half] * s).to_bits());
                assert_eq!(got[i + half].to_bits(), (x[i + half] * c + x[i] * s).to_bits());
            }
        }
    }
}

#[test]
fn layer_norm_is_right() {
    for n in LENGTHS {
        let (x, w, b) = (floats(n, n as u64), floats(n, 77), floats(n, 78));
        let got = same_everywhere(|simd| {
            let mut out = vec![f32::NAN; n];
            layer_norm(simd, &x, &w, &b, 1e-5, &mut out);
            out
        });
        for (i, (&got, want)) in got.iter().zip(oracle::layer_norm(&x, &w, &b, 1e-5)).enumerate() {
            // Of one or two elements nothing but rounding is left, which the root of eps makes large.
            let bound = if n < 3 { 1e-3 } else { 6e-6 };
            assert!((got as f64 - want).abs() < bound, "{n}, element {i}: {got}, expected {want}");
        }
    }
}

#[test]
fn layer_norm_of_a_constant_is_its_bias() {
    let got = same_everywhere(|simd| {
        let mut out = vec![f32::NAN; 13];
        layer_norm(simd, &[0.5; 13], &[3.0; 13], &floats(13, 4), 1e-5, &mut out);
        out
    });
    assert_eq!(got, floats(13, 4));
}

const ACTS: [Act; 3] = [Act::Silu, Act::Gelu, Act::GeluTanh];

#[test]
fn activations_are_right() {
    for (n, kind) in LENGTHS.into_iter().flat_map(|n| ACTS.map(|a| (n, a))) {
        let gate: Vec<f32> = floats(n, n as u64).iter().map(|x| x * 4.0).collect();
        let up = floats(n, 3);
        let got = same_everywhere(|simd| {
            let mut out = vec![f32::NAN; n];
            act_mul(simd, kind, &gate, &up, &mut out);
            out
        });
        // An exponent of up to 87 is rounded to f32 before it is raised.
        let relative = if kind == Act::Silu { 5e-7 } else { 4e-5 };
        for ((&got, &g), &u) in got.iter().zip(&gate).zip(&up) {
            let want = oracle::act(kind, g) * u as f64;
            // e^-87 is the smallest that the kernels know.
            assert!((got as f64 - want).abs() <= relative * want.abs() + 1e-36, "{kind:?} {g}: {got}, expected {want}");
        }
        let alone = same_everywhere(|simd| {
            let mut out = vec![f32::NAN; n];
            act(simd, kind, &gate, &mut out);
            out
        });
        assert_eq!(bits(&got), bits(&alone.iter().zip(&up).map(|(a, u)| a * u).collect::<Vec<_>>()));
        for (&got, &x) in alone.iter().zip(&gate) {
            let apart = (got as f64 - oracle::act(kind, x)).abs();
            assert!(apart <= 2.5e-7 * x.abs().max(1.0) as f64, "{kind:?} {x}: {got}, {apart:e} away");
        }
    }
}

#[test]
fn activations_at_the_ends() {
    let x = [0.0, -0.0, 1000.0, -1000.0, 88.5, -88.5, f32::INFINITY, f32::NAN, 1e-30];
    for kind in ACTS {
        let got = same_everywhere(|simd| {
            let mut out = vec![0.0; x.len()];
            act(simd, kind, &x, &mut out);
            out
        });
        assert_eq!(got[..3], [0.0, 0.0, 1000.0], "{kind:?}");
        assert!(got[3].abs() < 1e-30 && got[4] == 88.5 && got[5].abs() < 1e-30, "{kind:?}: {got:?}");
        assert!(got[6] == f32::INFINITY && got[7].is_nan() && got[8] == 5e-31, "{kind:?}: {got:?}");
    }
}

#[test]
fn exp_is_within_one_ulp() {
    // Through softmax of (0, x): e^x / (1 + e^x), so read e^x off silu instead: g / (silu(g)) - 1 loses bits. Use
    // the ratio of two softmax elements with a dominant first: l rounds to 1.
    let mut worst = 0.0f64;
    for i in 0..40_000 {
        let x = -17.4 - i as f32 * 0.0017;
        let got = same_everywhere(|simd| {
            let mut p = [0.0, x];
            softmax(simd, &mut p);
            p.to_vec()
        });
        assert_eq!(got[0], 1.0);
        worst = worst.max((got[1] as f64 / (x as f64).exp() - 1.0).abs());
    }
    assert!(worst < 1.2e-7, "{worst:e}");
}

#[test]
fn add_is_right() {
    for n in LENGTHS {
        let (x, y) = (floats(n, 1), floats(n, 2));
        let got = same_everywhere(|simd| {
            let mut x = x.clone();
            add(simd, &mut x, &y);
            x
        });
        assert_eq!(got, x.iter().zip(&y).map(|(x, y)| x + y).collect::<Vec<_>>());
    }
}

#[test]
fn softmax_is_right() {
    for n in LENGTHS {
        let x = floats(n, n as u64);
        let got = same_everywhere(|simd| {
            let mut x = x.clone();
            softmax(simd, &mut x);
            x
        });
        let mut want: Vec<f64> = x.iter().map(|&x| x as f64).collect();
        oracle::softmax(&mut want);
        close(&got, &want, 2e-6);
    }
}

#[test]
fn argmax_takes_the_first_and_never_nan() {
    let nan = f32::NAN;
    let low = f32::NEG_INFINITY;
    for simd in Simd::available() {
        assert_eq!(argmax(simd, &[]), 0);
        assert_eq!(argmax(simd, &[nan, nan]), 0);
        assert_eq!(argmax(simd, &[nan, low, nan]), 1);
        assert_eq!(argmax(simd, &[nan, 1.0, nan, 1.0]), 1);
        assert_eq!(argmax(simd, &[-0.0, 0.0]), 0);
        assert_eq!(argmax(simd, &[f32::INFINITY, nan]), 0);
        for n in [1, 5, 8, 255, 256, 257, 700, 5000] {
            let mut x = floats(n, n as u64);
            for place in [0, n / 2, n - 1] {
                x[place] = 10.0;
                x[(place + n / 3) % n] = nan;
                let want = x.iter().position(|&x| x == 10.0).unwrap_or(place);
                assert_eq!(argmax(simd, &x), if x.contains(&10.0) { want } else { argmax(Simd::PORTABLE, &x) });
            }
            let equal = vec![-2.0; n];
            assert_eq!(argmax(simd, &equal), 0);
        }
    }
}
