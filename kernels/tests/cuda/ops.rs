//! Norms, activations, rope and append.

use half::f16;
use quern_kernels::{
    cpu::kv::{KvLayer, KvMemory, KvType},
    cuda::{
        KvPool,
        acts::Form,
        kv::{BLOCK, NO_PLACE},
        ops::{Norm, NormKind, Ops, RopeAppend},
    },
    reference::ops as oracle,
};
use quern_models::{Mini, spec::Act};

use crate::common::{Random, acts, bits, bound, close, device, read_acts, up};

const FORMS: [Form; 3] = [Form::F16, Form::F32, Form::Int8];
const COLUMNS: [usize; 9] = [1, 7, 8, 63, 64, 100, 576, 1001, 2052];

#[test]
fn norms_are_right_in_any_order_and_company() {
    let Some(device) = device("norms_are_right_in_any_order_and_company") else { return };
    let ops = Ops::new(&device).unwrap();
    for n in COLUMNS {
        let mut random = Random(n as u64 + 1);
        let (there, m) = (7, 5);
        let mut x = random.floats(there * n);
        x[3 * n..4 * n].iter_mut().for_each(|x| *x *= 1e5);
        let (w, b) = (random.floats(n), random.floats(n));
        let rows: Vec<u32> = (0..m).map(|_| random.bits() as u32 % there as u32).collect();
        let order = random.order(n);
        let (dx, dw, db, drows, dorder) =
            (up(&device, &x), up(&device, &w), up(&device, &b), up(&device, &rows), up(&device, &order));
        let kinds = [NormKind::Rms, NormKind::Layer, NormKind::Identity];
        let kinds = kinds.into_iter().flat_map(|kind| [(kind, true), (kind, false)]);
        for (form, (kind, gathered)) in FORMS.into_iter().flat_map(|f| kinds.clone().map(move |k| (f, k))) {
            let norm = Norm { kind, eps: 1e-5, weight: dw.ptr(), bias: (kind == NormKind::Layer).then(|| db.ptr()) };
            let to = acts(&device, form, m, n + 70);
            let (r, o) = (gathered.then(|| drows.ptr()), gathered.then(|| dorder.ptr()));
            ops.norm(dx.ptr(), r, &norm, o, n, &to, m).unwrap();
            let got = read_acts(&to, m, n);
            let plain = up(&device, &vec![f32::NAN; m * n]);
            ops.normed(dx.ptr(), r, &norm, n, plain.ptr(), m).unwrap();
            let plain = plain.to_vec().unwrap();
            for (i, got) in got.iter().enumerate() {
                let row = if gathered { rows[i] as usize } else { i };
                let x = &x[row * n..(row + 1) * n];
                let natural = match kind {
                    NormKind::Rms => oracle::rms_norm(x, &w, 1e-5),
                    NormKind::Layer => oracle::layer_norm(x, &w, &b, 1e-5),
                    NormKind::Identity => x.iter().map(|&x| x as f64).collect(),
                };
                // Of one element nothing but rounding is left, which the root of eps makes large.
                let bound = |want: f64| match kind {
                    NormKind::Rms => bound::RMS * want.abs(),
                    NormKind::Layer if n < 3 => 1e-3,
                    NormKind::Layer => bound::LAYER,
                    NormKind::Identity => 0.0,
                };
                let want: Vec<f64> = (0..n).map(|j| natural[if gathered { order[j] as usize } else { j }]).collect();
                close(got, form, &want, bound, &format!("{kind:?} {form:?} {n} row {i}"));
                for (got, want) in plain[i * n..(i + 1) * n].iter().zip(&natural) {
                    assert!((*got as f64 - want).abs() <= bound(*want), "{kind:?} {n}: {got}, expected {want}");
                }
                // The same row alone.
                let one = up(&device, &[row as u32]);
                let alone = acts(&device, form, 1, n + 70);
                ops.norm(dx.ptr(), Some(one.ptr()), &norm, o, n, &alone, 1).unwrap();
                assert_eq!(&read_acts(&alone, 1, n)[0], got, "{kind:?} {form:?} {n} row {i} alone");
            }
        }
    }
}

#[test]
fn norms_are_added_and_caps_are_soft() {
    let Some(device) = device("norms_are_added_and_caps_are_soft") else { return };
    let ops = Ops::new(&device).unwrap();
    for n in COLUMNS {
        let mut random = Random(n as u64 + 2);
        let m = 3;
        let (mut x, y, w) = (random.floats(m * n), random.floats(m * n), random.floats(n));
        x[0] = 40.0;
        x[m * n - 1] = -1e-4;
        let (dx, dy, dw) = (up(&device, &x), up(&device, &y), up(&device, &w));
        ops.soft_cap(dx.ptr(), 2.5, n, m).unwrap();
        let capped = dx.to_vec().unwrap();
        for (x, got) in x.iter().zip(&capped) {
            let want = oracle::capped(*x as f64, Some(2.5));
            assert!((*got as f64 - want).abs() <= 4e-7 * want.abs(), "{x} becomes {got}, expected {want}");
        }
        let norm = Norm { kind: NormKind::Rms, eps: 1e-5, weight: dw.ptr(), bias: None };
        ops.norm_add(dy.ptr(), &norm, n, dx.ptr(), m).unwrap();
        for (i, got) in dx.to_vec().unwrap().chunks(n).enumerate() {
            let row = i * n..(i + 1) * n;
            let added = oracle::rms_norm(&y[row.clone()], &w, 1e-5);
            for ((got, x), add) in got.iter().zip(&capped[row]).zip(added) {
                let want = *x as f64 + add;
                assert!(
                    (*got as f64 - want).abs() <= bound::RMS * (x.abs() as f64 + add.abs()),
                    "{got}, expected {want}"
                );
            }
        }
    }
}

#[test]
fn rows_go_over_in_any_order_and_a_bad_one_stays_alone() {
    let Some(device) = device("rows_go_over_in_any_order_and_a_bad_one_stays_alone") else { return };
    let ops = Ops::new(&device).unwrap();
    for n in COLUMNS {
        let mut random = Random(n as u64);
        let m = 6;
        let mut x = random.floats(m * n);
        x[n + n / 2] = f32::NAN;
        x[2 * n + n / 3] = f32::NEG_INFINITY;
        x[3 * n..4 * n].fill(0.0);
        x[4 * n..5 * n].iter_mut().for_each(|x| *x *= 1e35);
        x[5 * n..].iter_mut().for_each(|x| *x *= 1e-20);
        let order = random.order(n);
        let (dx, dorder) = (up(&device, &x), up(&device, &order));
        for (form, ordered) in FORMS.into_iter().flat_map(|f| [(f, true), (f, false)]) {
            let to = acts(&device, form, m, n);
            ops.rows(dx.ptr(), ordered.then(|| dorder.ptr()), n, &to, m).unwrap();
            for (i, got) in read_acts(&to, m, n).iter().enumerate() {
                let column = |j: usize| if ordered { order[j] as usize } else { j };
                let want: Vec<f64> = (0..n).map(|j| x[i * n + column(j)] as f64).collect();
                if (1..3).contains(&i) && form == Form::F16 {
                    assert!(got.factor.is_nan() && got.stored.iter().all(|&h| h == 0), "row {i}");
                } else if (1..3).contains(&i) {
                    assert_eq!(got.stored[..n], bits(&want.iter().map(|&w| w as f32).collect::<Vec<_>>()));
                } else {
                    close(got, form, &want, |_| 0.0, &format!("{form:?} {n} row {i}"));
                }
            }
        }
    }
}

#[test]
fn activations_are_right() {
    let Some(device) = device("activations_are_right") else { return };
    let ops = Ops::new(&device).unwrap();
    for inner in COLUMNS {
        let m = 3;
        let mut random = Random(inner as u64 + 9);
        for (act, gated) in [Act::Silu, Act::Gelu, Act::GeluTanh].into_iter().flat_map(|a| [(a, true), (a, false)]) {
            let width = if gated { 2 * inner } else { inner };
            let x: Vec<f32> = random.floats(m * width).iter().map(|x| x * 3.0).collect();
            for form in FORMS {
                let dx = up(&device, &x);
                let to = acts(&device, form, m, inner);
                ops.act(dx.ptr(), act, gated, inner, &to, m).unwrap();
                for (i, got) in read_acts(&to, m, inner).iter().enumerate() {
                    let (gate, factors) = x[i * width..(i + 1) * width].split_at(inner);
                    let factor = |j: usize| if gated { factors[j] as f64 } else { 1.0 };
                    let want: Vec<f64> =
                        gate.iter().enumerate().map(|(j, &g)| oracle::act(act, g) * factor(j)).collect();
                    let most = gate.iter().fold(0f32, |m, g| m.max(g.abs())) as f64;
                    let bound = |want: f64| bound::ACT * want.abs() * (1.0 + most * most);
                    close(got, form, &want, bound, &format!("{act:?} {form:?} {inner} row {i}"));
                    let alone = acts(&device, form, 1, inner);
                    let dx = up(&device, &x[i * width..(i + 1) * width]);
                    ops.act(dx.ptr(), act, gated, inner, &alone, 1).unwrap();
                    assert_eq!(&read_acts(&alone, 1, inner)[0], got, "{act:?} {form:?} {inner} row {i} alone");
                }
            }
        }
    }
}

/// Places of a block's elements are those of the pool's documentation; codes and scales are the CPU's.
#[test]
fn heads_are_normed_turned_and_stored() {
    let Some(device) = device("heads_are_normed_turned_and_stored") else { return };
    let ops = Ops::new(&device).unwrap();
    for (heads, kv_heads, d) in [(4, 2, 64), (3, 1, 8), (9, 3, 40), (2, 2, 256), (5, 5, 128)] {
        let mut random = Random(d as u64 * 5 + heads as u64);
        let (m, stride, half) = (5, (heads + 2 * kv_heads) * d, d / 2);
        let mut qkv = random.floats(m * stride);
        // A value that f16 cannot hold, and a token with a NaN in its first value.
        qkv[stride + heads * d] = 1e6;
        qkv[2 * stride + (heads + kv_heads) * d + 3] = f32::NAN;
        let (cos, sin): (Vec<f32>, Vec<f32>) = random.floats(m * half).iter().map(|a| (a.cos(), a.sin())).unzip();
        let (q_norm, k_norm) = (random.floats(d), random.floats(d));
        let layers = [KvLayer { kv_heads: 1, head_dim: 16 }, KvLayer { kv_heads, head_dim: d }];
        let places: [(u32, usize); 5] = [(2, 15), (0, 0), (1, 7), (1, 8), (3, 3)];
        let mut words: Vec<u32> = places.iter().map(|(b, s)| b * BLOCK as u32 + *s as u32).collect();
        words[4] = NO_PLACE;
        let dplaces = up(&device, &words);
        for kind in [KvType::F16, KvType::F32, KvType::Int8, KvType::Fp8] {
            for (turns, norms) in [(true, true), (true, false), (false, true), (false, false)] {
                let mut pool = KvPool::new(&device, &layers, 5, kind).unwrap();
                let (dq, dc, ds) = (up(&device, &qkv), up(&device, &cos), up(&device, &sin));
                let (dqn, dkn) = (up(&device, &q_norm), up(&device, &k_norm));
                let what = RopeAppend {
                    rope: turns.then(|| (dc.ptr(), ds.ptr())),
                    norms: norms.then(|| (dqn.ptr(), dkn.ptr(), 1e-6)),
                    places: dplaces.ptr(),
                    heads,
                };
                ops.rope_append(dq.ptr(), &what, &pool, 1, m).unwrap();
                let got = dq.to_vec().unwrap();
                let cpu = KvMemory::new(&layers, 5, kind).unwrap();
                for row in 0..m {
                    let (from, got) = (&qkv[row * stride..][..stride], &got[row * stride..][..stride]);
                    for h in 0..heads + kv_heads {
                        let (x, got) = (&from[h * d..][..d], &got[h * d..][..d]);
                        let weight = if h < heads { &q_norm } else { &k_norm };
                        let normed: Vec<f32> = match norms {
                            true => oracle::rms_norm(x, weight, 1e-6).iter().map(|&x| x as f32).collect(),
                            false => x.to_vec(),
                        };
                        let (c, s) = (&cos[row * half..][..half], &sin[row * half..][..half]);
                        let want = match turns {
                            true => oracle::rope(&normed, c, s),
                            false => normed.iter().map(|&x| x as f64).collect(),
                        };
                        let most = want.iter().fold(1f64, |m, w| m.max(w.abs()));
                        for (got, want) in got.iter().zip(want) {
                            let bound = (bound::ROPE + if norms { bound::RMS } else { 0.0 }) * most;
                            assert!(
                                (*got as f64 - want).abs() <= bound,
                                "{heads} {d} {kind:?} head {h}: {got}, {want}"
                            );
                        }
                    }
                    assert_eq!(bits(&got[(heads + kv_heads) * d..]), bits(&from[(heads + kv_heads) * d..]), "values");
                    if row == 4 {
                        continue;
                    }
                    let (block, slot) = places[row];
                    let mut bytes = vec![0; pool.bytes_of_block()];
                    pool.read_block(block, &mut bytes).unwrap();
                    for h in 0..kv_heads {
                        let (k, v) = (&got[(heads + h) * d..][..d], &got[(heads + kv_heads + h) * d..][..d]);
                        // SAFETY: one thread.
                        unsafe { cpu.append(1, block, slot, h, k, v) };
                        let (mut k, mut v) = cpu.read(1, block, slot, h);
                        if kind == KvType::F16 && row == 2 && h == 0 {
                            (k, v) = (vec![f32::NAN; d], vec![0.0; d]);
                        }
                        let at = kind.head_bytes(16) + h * kind.head_bytes(d);
                        let stored = read_token(kind, &bytes[at..at + kind.head_bytes(d)], slot, d);
                        let same = |a: &[f32], b: &[f32]| {
                            a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan())
                        };
                        assert!(
                            same(&stored.0, &k) && same(&stored.1, &v),
                            "{kind:?} row {row} head {h}: {stored:?}, expected {k:?} {v:?}"
                        );
                    }
                }
                // The block that nobody wrote to, and copies.
                let mut bytes = vec![1; pool.bytes_of_block()];
                pool.read_block(4, &mut bytes).unwrap();
                assert!(bytes.iter().all(|&b| b == 0));
                pool.copy_block(1, 4).unwrap();
                let mut first = vec![1; pool.bytes_of_block()];
                pool.read_block(1, &mut first).unwrap();
                pool.read_block(4, &mut bytes).unwrap();
                assert_eq!(bytes, first);
                bytes.reverse();
                pool.write_block(0, &bytes).unwrap();
                pool.read_block(0, &mut first).unwrap();
                assert_eq!(bytes, first);
            }
        }
    }
}

/// Key and value of a token from the bytes of a (block, layer, head).
fn read_token(kind: KvType, bytes: &[u8], slot: usize, d: usize) -> (Vec<f32>, Vec<f32>) {
    let half_at = |at: usize| f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32();
    let element = |part: usize, i: usize| {
        let place = (part * BLOCK + slot) * d + i;
        match kind {
            KvType::F16 => half_at(2 * place),
            KvType::F32 => f32::from_le_bytes(bytes[4 * place..4 * place + 4].try_into().expect("four bytes")),
            KvType::Int8 => bytes[4 * BLOCK + place] as i8 as f32 * half_at(2 * (part * BLOCK + slot)),
            KvType::Fp8 => Mini::E4M3.value(bytes[4 * BLOCK + place]) * half_at(2 * (part * BLOCK + slot)),
        }
    };
    ((0..d).map(|i| element(0, i)).collect(), (0..d).map(|i| element(1, i)).collect())
}
