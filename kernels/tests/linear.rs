//! Linear kernels: every table against the reference, bit for bit, and row by row.
//!
//! The reference knows one activation row at a time, so equality for every batch size also proves
//! that a row does not depend on its batch; `rows_do_not_depend_on_their_batch` says so by itself.

mod pack;

use pack::{Packed, Rng};
use quern_kernels::cpu::acts::{Acts, Forms, Mode};
use quern_kernels::cpu::isa::Isa;
use quern_kernels::cpu::linear::{Scratch, linear_panel, linear_strips};
use quern_kernels::reference;
use quern_models::{FloatType, Mini, PANEL, Scheme, ZeroKind};
use std::ops::Range;

const BATCHES: [usize; 13] = [1, 2, 3, 4, 5, 6, 8, 13, 17, 28, 31, 65, 70];
const ROWS: usize = 70;

/// An emulated processor is slow: fewer shapes and batches, which still reach every loop.
fn emulated() -> bool {
    std::env::var_os("QUERN_EMULATED").is_some()
}

fn batches() -> &'static [usize] {
    if emulated() { &[1, 2, 3, 4, 7, 17, 18, 19] } else { &BATCHES }
}

fn shapes() -> &'static [(usize, usize)] {
    if emulated() { &[(7, 33), (65, 200)] } else { &SHAPES }
}

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
    acts.reset(isa, x.len() / k, k, forms);
    acts.write(isa, x);
    acts
}

/// Bits, with one NaN for all NaNs.
fn bits(y: &[f32]) -> Vec<u32> {
    y.iter().map(|v| if v.is_nan() { 0x7fc0_0000 } else { v.to_bits() }).collect()
}

/// `[rows][n]` by the reference.
fn expected(w: &Packed, x: &[f32], mode: Mode) -> Vec<f32> {
    let row = |x: &[f32]| match mode {
        Mode::Int8 => reference::linear::default(&w.view(), x),
        Mode::F32 => reference::linear::f32(&w.view(), x),
    };
    x.chunks_exact(w.k).flat_map(row).collect()
}

/// Every table, every batch size.
fn check(w: &Packed, x: &[f32], mode: Mode, forms: Forms) {
    let most = batches().iter().max().expect("there are some");
    let want = bits(&expected(w, &x[..most * w.k], mode));
    for isa in Isa::available() {
        for &m in batches() {
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

fn nested(bits: u8, group: u32, zero: ZeroKind) -> Scheme {
    Scheme::Nested { bits, group, zero }
}

fn mini(kind: Mini, group: u32, scale: FloatType) -> Scheme {
    Scheme::Mini { kind, group, scale }
}

const EVERY_FORM: Forms = Forms { floats: true, int8: true, int8_small: true };

/// Both modes of a scheme of codes on every shape.
fn check_scheme(scheme: Scheme) {
    let (bits, group) = scheme.coded().expect("codes");
    let mut rng = Rng(group as u64 * 64 + bits as u64 + 7);
    for &(n, k) in shapes() {
        let w = Packed::random(&mut rng, n, k, scheme);
        let x: Vec<f32> = (0..ROWS * k).map(|_| rng.float() * 3.0).collect();
        for mode in [Mode::Int8, Mode::F32] {
            check(&w, &x, mode, Forms::of(scheme, mode));
        }
    }
}

/// `QUERN_TABLES`, where it is set, names the tables that this machine must have.
#[test]
fn every_table_that_is_expected_is_there() {
    let tables: Vec<_> = Isa::available().map(|isa| isa.name).collect();
    let expected = std::env::var("QUERN_TABLES").unwrap_or_else(|_| tables.join(","));
    assert_eq!(tables.join(","), expected);
    assert_eq!(tables.last(), Some(&"scalar"));
}

/// What the other tests cannot look at here is said, and counted as skipped.
#[test]
fn every_table_that_was_compiled_can_run_here() {
    let missing: Vec<_> = Isa::compiled().map(|isa| isa.name).filter(|name| Isa::by_name(name).is_none()).collect();
    if !missing.is_empty() {
        println!("SKIPPED kernels for {}: this processor cannot run them", missing.join(", "));
    }
}

#[test]
fn strips_of_a_panel_equal_the_whole_panel() {
    let mut rng = Rng(5);
    let x: Vec<f32> = (0..9 * 200).map(|_| rng.float() * 3.0).collect();
    for (scheme, mode) in [
        (int(4, 32, ZeroKind::Mid, FloatType::F16), Mode::Int8),
        (int(4, 48, ZeroKind::Code, FloatType::F32), Mode::Int8),
        (int(8, 32, ZeroKind::Min, FloatType::F16), Mode::Int8),
        (mini(Mini::E2M1, 32, FloatType::BF16), Mode::Int8),
        (int(4, 32, ZeroKind::Mid, FloatType::F16), Mode::F32),
        (Scheme::Float(FloatType::F16), Mode::F32),
    ] {
        let w = Packed::random(&mut rng, 64, 200, scheme);
        for isa in Isa::available() {
            for m in [1, 2, 3, 4, 9] {
                let acts = acts(isa, &x[..m * 200], 200, Forms::of(scheme, mode));
                let mut whole = vec![0.0; m * PANEL];
                let mut scratch = Scratch::new();
                linear_panel(isa, &w.view(), &acts, mode, 0, 0..m, &mut whole, &mut scratch);
                for strips in [0..1, 0..2, 1..3, 2..4, 3..4] {
                    let mut some = vec![f32::NAN; m * PANEL];
                    let of = (0, strips.clone());
                    linear_strips(isa, &w.view(), &acts, mode, of, 0..m, &mut some, &mut scratch);
                    for r in 0..m {
                        let part = r * PANEL + strips.start * 16..r * PANEL + strips.end * 16;
                        let equal = bits(&some[part.clone()]) == bits(&whole[part]);
                        assert!(equal, "{} {scheme} {mode:?} m={m} row {r} strips {strips:?}", isa.name);
                    }
                }
            }
        }
    }
}

#[test]
fn int4_equals_the_reference() {
    for (i, group) in [16, 32, 48, 64, 96, 128, 192, 1536].into_iter().enumerate() {
        for (j, zero) in ZEROS.into_iter().enumerate() {
            check_scheme(int(4, group, zero, SCALES[(i + j) % 3]));
        }
    }
}

#[test]
fn int8_equals_the_reference() {
    for (i, group) in [16, 32, 64, 80, 128, 192, 1536].into_iter().enumerate() {
        for (j, zero) in ZEROS.into_iter().enumerate() {
            check_scheme(int(8, group, zero, SCALES[(i + j) % 3]));
        }
    }
}

#[test]
fn nested_scales_equal_the_reference() {
    for bits in [4, 8] {
        for group in [16, 32] {
            for zero in [ZeroKind::Mid, ZeroKind::Min] {
                check_scheme(nested(bits, group, zero));
            }
        }
    }
}

#[test]
fn small_floats_equal_the_reference() {
    for (i, group) in [16, 32, 48, 128].into_iter().enumerate() {
        check_scheme(mini(Mini::E2M1, group, SCALES[i % 3]));
        check_scheme(mini(Mini::E4M3, group, SCALES[(i + 1) % 3]));
    }
}

/// What a weight reads depends on the weight alone, so an input that is held in more forms changes nothing.
#[test]
fn weights_that_share_an_input_do_not_affect_each_other() {
    let mut rng = Rng(5);
    let schemes = [
        int(4, 64, ZeroKind::Code, FloatType::F16),
        int(8, 128, ZeroKind::Code, FloatType::F16),
        nested(4, 32, ZeroKind::Min),
        nested(8, 16, ZeroKind::Mid),
        mini(Mini::E2M1, 16, FloatType::F16),
        mini(Mini::E4M3, 128, FloatType::F32),
        Scheme::Float(FloatType::BF16),
    ];
    let forms = schemes.map(|s| Forms::of(s, Mode::Int8)).into_iter().reduce(Forms::and);
    assert_eq!(forms, Some(EVERY_FORM));
    for scheme in schemes {
        let x: Vec<f32> = (0..ROWS * 200).map(|_| rng.float()).collect();
        let w = Packed::random(&mut rng, 65, 200, scheme);
        for mode in [Mode::Int8, Mode::F32] {
            check(&w, &x, mode, EVERY_FORM);
        }
    }
}

#[test]
#[should_panic(expected = "not held in blocks of 16")]
fn a_form_that_is_missing_is_noticed() {
    let w = Packed::random(&mut Rng(1), 64, 32, int(4, 16, ZeroKind::Mid, FloatType::F16));
    let forms = Forms { int8_small: false, ..EVERY_FORM };
    compute(Isa::best(), &w, &acts(Isa::best(), &[1.0; 32], 32, forms), Mode::Int8, std::slice::from_ref(&(0..1)));
}

/// No file should hold the code of NaN; if one does, the sum is NaN and nothing else.
#[test]
fn a_code_that_is_nan_gives_nan() {
    let mut rng = Rng(37);
    for code in [0x7f, 0xff] {
        let w = Packed::constant(&mut rng, 65, 40, mini(Mini::E4M3, 32, FloatType::F16), code);
        let x = [1.0; 40];
        for isa in Isa::available() {
            let acts = acts(isa, &x, 40, Forms::of(w.scheme, Mode::Int8));
            let y = compute(isa, &w, &acts, Mode::Int8, std::slice::from_ref(&(0..1)));
            assert!(y.iter().all(|y| y.is_nan()), "{isa:?} {code:#x}");
        }
    }
}

#[test]
fn extreme_codes_do_not_overflow() {
    let mut rng = Rng(11);
    let mut check_codes = |scheme: Scheme, codes: [u8; 2]| {
        let (n, k) = (65, 576);
        for code in codes {
            let w = Packed::constant(&mut rng, n, k, scheme, code);
            // Every value quantizes to 127 or -127, alike or alternating.
            for flip in [false, true] {
                let sign = |i: usize| if flip && i % 2 == 1 { -2.5 } else { 2.5 };
                let x: Vec<f32> = (0..ROWS * k).map(sign).collect();
                check(&w, &x, Mode::Int8, Forms::of(scheme, Mode::Int8));
            }
        }
    };
    for group in [16, 32, 64] {
        for zero in ZEROS {
            check_codes(int(4, group, zero, FloatType::F16), [0, 15]);
            check_codes(int(8, group, zero, FloatType::F16), [0, 255]);
        }
        // -6 and 6.
        check_codes(mini(Mini::E2M1, group, FloatType::F16), [15, 7]);
    }
}

#[test]
fn floats_equal_the_reference() {
    let mut rng = Rng(3);
    for kind in SCALES {
        for &(n, k) in shapes().iter().chain(&[(67, 77), (192, 576)]) {
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
        nested(4, 32, ZeroKind::Min),
        nested(8, 16, ZeroKind::Mid),
        mini(Mini::E2M1, 16, FloatType::F16),
        mini(Mini::E4M3, 128, FloatType::F32),
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
            for &m in batches() {
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
        nested(4, 16, ZeroKind::Min),
        mini(Mini::E2M1, 32, FloatType::BF16),
        mini(Mini::E4M3, 32, FloatType::BF16),
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
        for isa in Isa::available() {
            for m in [1, 2, 3, 4, 7, ROWS] {
                let acts = acts(isa, &x[..m * k], k, EVERY_FORM);
                for block in [32, 16] {
                    let form = acts.int8(block);
                    for row in 0..m {
                        let want = reference::linear::quantize(&x[row * k..(row + 1) * k], block);
                        let got: Vec<i8> = (0..want.q.len()).map(|c| form.value(row, c)).collect();
                        assert_eq!(got, want.q, "{isa:?} k={k} block={block} m={m} row={row}");
                        let (scales, sums): (Vec<f32>, Vec<i32>) =
                            (0..form.blocks()).map(|b| form.scale_and_sum(row, b)).unzip();
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
    let whole = acts(Isa::best(), &x, k, EVERY_FORM);
    let mut parts = Acts::new();
    parts.reset(Isa::best(), m, k, EVERY_FORM);
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
    for block in [32, 16] {
        let (parts, whole) = (parts.int8(block), whole.int8(block));
        for row in 0..m {
            assert!((0..whole.blocks() * block).all(|c| parts.value(row, c) == whole.value(row, c)));
            assert!((0..whole.blocks()).all(|b| parts.scale_and_sum(row, b) == whole.scale_and_sum(row, b)));
        }
    }
}
