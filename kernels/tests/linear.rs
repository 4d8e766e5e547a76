//! Linear kernels: every table against the reference, bit for bit, and row by row.
//!
//! The reference knows one activation row at a time, so equality for every batch size also proves
//! that a row does not depend on its batch; `rows_do_not_depend_on_their_batch` says so by itself.

mod pack;

use pack::{Packed, Rng};
use quern_kernels::cpu::acts::{Acts, Forms, Mode};
use quern_kernels::cpu::isa::Isa;
use quern_kernels::cpu::linear::{Scratch, linear_panel};
use quern_kernels::reference;
use quern_models::{FloatType, PANEL, Scheme, ZeroKind};
use std::ops::Range;

const BATCHES: [usize; 11] = [1, 2, 3, 4, 5, 6, 8, 13, 17, 33, 70];
const ROWS: usize = 70;

/// `[m][n]` by kernels, rows cut at `cuts`.
fn compute(isa: &Isa, w: &Packed, acts: &Acts, mode: Mode, cuts: &[Range<usize>]) -> Vec<f32> {
    let view = w.view();
    let mut y = vec![f32::NAN; acts.m() * w.n];
    let mut scratch = Scratch::new();
    for panel in 0..view.panels() {
        for rows in cuts {
            let mut tile = vec![f32::NAN; rows.len() * PANEL];
            linear_panel(isa, &view, acts, mode, panel, rows.clone(), &mut tile, &mut scratch);
            let n = (w.n - panel * PANEL).min(PANEL);
            for (row, tile) in rows.clone().zip(tile.chunks_exact(PANEL)) {
                y[row * w.n + panel * PANEL..][..n].copy_from_slice(&tile[..n]);
                if let Scheme::Float(_) = w.scheme {
                    assert!(tile[n..].iter().all(|v| v.to_bits() == 0), "unused columns are zero");
                }
            }
        }
    }
    y
}

fn acts(isa: &Isa, x: &[f32], k: usize, forms: Forms) -> Acts {
    let mut acts = Acts::new();
    acts.reset(x.len() / k, k, forms);
    acts.write(isa, x);
    acts
}

/// Bits, with one NaN for all NaNs.
fn bits(y: &[f32]) -> Vec<u32> {
    y.iter().map(|v| if v.is_nan() { 0x7fc0_0000 } else { v.to_bits() }).collect()
}

/// `[rows][n]` by the reference.
fn expected(w: &Packed, x: &[f32], mode: Mode, forms: Forms) -> Vec<f32> {
    let row = |x: &[f32]| match (w.scheme, mode) {
        (Scheme::Int { .. }, Mode::Int8) => {
            let block = forms.block.expect("the int8 form has blocks");
            reference::linear::int8(&w.view(), &reference::linear::quantize(x, block), block)
        }
        _ => reference::linear::f32(&w.view(), x),
    };
    x.chunks_exact(w.k).flat_map(row).collect()
}

/// Every table, every batch size.
fn check(w: &Packed, x: &[f32], mode: Mode, forms: Forms) {
    let want = bits(&expected(w, x, mode, forms));
    for isa in Isa::available() {
        for m in BATCHES {
            let acts = acts(isa, &x[..m * w.k], w.k, forms);
            let got = bits(&compute(isa, w, &acts, mode, std::slice::from_ref(&(0..m))));
            if let Some(i) = (0..m * w.n).find(|i| got[*i] != want[*i]) {
                panic!(
                    "{} {} {mode:?} {forms:?} [{}, {}] m={m}: row {} output {}: {:e}, want {:e}",
                    isa.name,
                    w.scheme,
                    w.n,
                    w.k,
                    i / w.n,
                    i % w.n,
                    f32::from_bits(got[i]),
                    f32::from_bits(want[i])
                );
            }
        }
    }
}

fn int(bits: u8, group: u32, zero: ZeroKind, scale: FloatType) -> Scheme {
    Scheme::Int { bits, group, zero, scale }
}

const ZEROS: [ZeroKind; 3] = [ZeroKind::Mid, ZeroKind::Code, ZeroKind::Min];
const SCALES: [FloatType; 3] = [FloatType::F16, FloatType::BF16, FloatType::F32];
const SHAPES: [(usize, usize); 6] = [(1, 1), (7, 33), (64, 128), (65, 200), (130, 320), (16, 1536)];

/// Both modes of an integer scheme on every shape.
fn check_int(bits: u8, group: u32, zero: ZeroKind, scale: FloatType) {
    let mut rng = Rng(group as u64 * 64 + bits as u64 + 7);
    let scheme = int(bits, group, zero, scale);
    for (n, k) in SHAPES {
        let w = Packed::random(&mut rng, n, k, scheme);
        let x: Vec<f32> = (0..ROWS * k).map(|_| rng.float() * 3.0).collect();
        for block in [32, 64].into_iter().filter(|b| group.is_multiple_of(*b)) {
            check(&w, &x, Mode::Int8, Forms { floats: false, block: Some(block as usize) });
        }
        check(&w, &x, Mode::F32, Forms::of(scheme, Mode::F32));
    }
}

#[test]
fn int4_equals_the_reference() {
    for (i, group) in [32, 64, 96, 128, 192, 1536].into_iter().enumerate() {
        for (j, zero) in ZEROS.into_iter().enumerate() {
            check_int(4, group, zero, SCALES[(i + j) % 3]);
        }
    }
}

#[test]
fn int8_equals_the_reference() {
    for (i, group) in [32, 64, 128, 192, 1536].into_iter().enumerate() {
        for (j, zero) in ZEROS.into_iter().enumerate() {
            check_int(8, group, zero, SCALES[(i + j) % 3]);
        }
    }
}

#[test]
fn both_forms_in_one_buffer() {
    let mut rng = Rng(5);
    for (bits, group) in [(4, 64), (8, 128)] {
        let scheme = int(bits, group, ZeroKind::Code, FloatType::F16);
        let x: Vec<f32> = (0..ROWS * 200).map(|_| rng.float()).collect();
        let w = Packed::random(&mut rng, 65, 200, scheme);
        for mode in [Mode::Int8, Mode::F32] {
            check(&w, &x, mode, Forms { floats: true, block: Some(32) });
        }
    }
}

#[test]
fn extreme_codes_do_not_overflow() {
    let mut rng = Rng(11);
    for bits in [4, 8] {
        for group in [32, 64, 128] {
            for zero in ZEROS {
                let (n, k) = (65, 576);
                let scheme = int(bits, group, zero, FloatType::F16);
                for code in [0, if bits == 4 { 15 } else { 255 }] {
                    let w = Packed::constant(&mut rng, n, k, scheme, code);
                    // Every value quantizes to 127 or -127, alike or alternating.
                    for flip in [false, true] {
                        let sign = |i: usize| if flip && i % 2 == 1 { -2.5 } else { 2.5 };
                        let x: Vec<f32> = (0..ROWS * k).map(sign).collect();
                        check(&w, &x, Mode::Int8, Forms::of(scheme, Mode::Int8));
                    }
                }
            }
        }
    }
}

#[test]
fn floats_equal_the_reference() {
    let mut rng = Rng(3);
    for kind in SCALES {
        for (n, k) in SHAPES.into_iter().chain([(67, 77), (192, 576)]) {
            let w = Packed::random(&mut rng, n, k, Scheme::Float(kind));
            let x: Vec<f32> = (0..ROWS * k).map(|_| rng.float() * 3.0).collect();
            check(&w, &x, Mode::Int8, Forms::of(w.scheme, Mode::Int8));
        }
    }
}

/// Conformance case of batch invariance, on the kernels alone.
#[test]
fn rows_do_not_depend_on_their_batch() {
    let mut rng = Rng(17);
    let k = 320;
    let schemes = [
        int(4, 32, ZeroKind::Mid, FloatType::F16),
        int(4, 64, ZeroKind::Min, FloatType::F16),
        int(8, 64, ZeroKind::Code, FloatType::F32),
        Scheme::Float(FloatType::F16),
    ];
    for scheme in schemes {
        let w = Packed::random(&mut rng, 130, k, scheme);
        let x: Vec<f32> = (0..ROWS * k).map(|_| rng.float()).collect();
        for (isa, mode) in Isa::available().flat_map(|isa| [(isa, Mode::Int8), (isa, Mode::F32)]) {
            let forms = Forms::of(scheme, mode);
            let alone: Vec<f32> = x
                .chunks_exact(k)
                .flat_map(|x| compute(isa, &w, &acts(isa, x, k, forms), mode, std::slice::from_ref(&(0..1))))
                .collect();
            for m in BATCHES {
                let acts = acts(isa, &x[..m * k], k, forms);
                let whole = compute(isa, &w, &acts, mode, std::slice::from_ref(&(0..m)));
                assert_eq!(bits(&whole), bits(&alone[..m * w.n]), "{isa:?} {scheme} {mode:?} m={m}");
                for chunk in [4, 12, 32] {
                    let cuts: Vec<_> = (0..m).step_by(chunk).map(|r| r..(r + chunk).min(m)).collect();
                    let cut = compute(isa, &w, &acts, mode, &cuts);
                    assert_eq!(bits(&cut), bits(&whole), "{isa:?} {scheme} {mode:?} m={m} chunk={chunk}");
                }
            }
        }
    }
}

#[test]
fn a_row_that_is_not_finite_spoils_only_itself() {
    let mut rng = Rng(23);
    let k = 200;
    for scheme in [
        int(4, 32, ZeroKind::Mid, FloatType::F16),
        int(8, 64, ZeroKind::Min, FloatType::F16),
        Scheme::Float(FloatType::BF16),
    ] {
        let w = Packed::random(&mut rng, 64, k, scheme);
        let mut x: Vec<f32> = (0..ROWS * k).map(|_| rng.float()).collect();
        for (row, bad) in [(1, f32::NAN), (4, f32::INFINITY), (6, f32::NEG_INFINITY), (12, -f32::NAN)] {
            x[row * k + row * 9] = bad;
        }
        let forms = Forms::of(scheme, Mode::Int8);
        check(&w, &x, Mode::Int8, forms);
        for isa in Isa::available() {
            let acts = acts(isa, &x[..13 * k], k, forms);
            let y = compute(isa, &w, &acts, Mode::Int8, std::slice::from_ref(&(0..13)));
            for (row, y) in y.chunks_exact(w.n).enumerate() {
                let bad = [1, 4, 6, 12].contains(&row);
                assert!(y.iter().all(|v| v.is_finite() != bad), "{isa:?} {scheme} row {row}");
            }
        }
    }
}

#[test]
fn quantized_rows_equal_the_reference() {
    let mut rng = Rng(29);
    for k in [1, 31, 64, 100, 300, 576] {
        let mut x: Vec<f32> = (0..ROWS * k).map(|_| rng.float() * 100.0).collect();
        // Rows of zeros, of denormals, of huge values, of ties, and with a NaN.
        x[..k].fill(0.0);
        x[k..2 * k].fill(1e-39);
        x[2 * k..3 * k].fill(f32::MAX);
        x[3 * k..4 * k].iter_mut().enumerate().for_each(|(i, v)| *v = i as f32 * 0.5);
        x[4 * k] = 127.0;
        x[5 * k] = f32::NAN;
        for block in [32, 64] {
            for isa in Isa::available() {
                for m in [1, 2, 3, 4, 7, ROWS] {
                    let forms = Forms { floats: false, block: Some(block) };
                    let acts = acts(isa, &x[..m * k], k, forms);
                    for row in 0..m {
                        let want = reference::linear::quantize(&x[row * k..(row + 1) * k], block);
                        let got: Vec<i8> = (0..want.q.len()).map(|c| acts.int8(row, c)).collect();
                        assert_eq!(got, want.q, "{isa:?} k={k} block={block} m={m} row={row}");
                        let (scales, sums): (Vec<f32>, Vec<i32>) =
                            (0..acts.blocks()).map(|b| acts.scale_and_sum(row, b)).unzip();
                        assert_eq!(bits(&scales), bits(&want.scales));
                        assert_eq!(sums, want.sums);
                    }
                }
            }
        }
    }
}

#[test]
fn parts_may_be_written_by_several_threads() {
    let (m, k) = (9, 200);
    let mut rng = Rng(31);
    let x: Vec<f32> = (0..m * k).map(|_| rng.float()).collect();
    let forms = Forms { floats: true, block: Some(32) };
    let whole = acts(Isa::best(), &x, k, forms);
    let mut parts = Acts::new();
    parts.reset(m, k, forms);
    std::thread::scope(|scope| {
        for turn in 0..3 {
            let (parts, x) = (&parts, &x);
            scope.spawn(move || {
                for i in (0..m * k.div_ceil(64)).filter(|i| i % 3 == turn) {
                    let (row, part) = (i % m, i / m);
                    let columns = part * 64..(part * 64 + 64).min(k);
                    // SAFETY: each (row, part) has one writer, and nobody reads before the scope ends.
                    unsafe { parts.write_part(Isa::best(), row, part, &x[row * k..][columns]) }
                }
            });
        }
    });
    for row in 0..m {
        assert!((0..224).all(|c| parts.int8(row, c) == whole.int8(row, c)));
        assert!((0..7).all(|b| parts.scale_and_sum(row, b) == whole.scale_and_sum(row, b)));
    }
}
