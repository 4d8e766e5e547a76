//! AWQ's three byte orders give the same file, from integers that the tests chose.

use quern_convert::Options;
use quern_models::{FloatType, ModelFile, Scheme, ZeroKind};
use serde_json::{Value, json};

use crate::{fixtures::same_tensors, made::*};

fn awq_config(version: &str, group: i64) -> Value {
    let mut config = config();
    config["quantization_config"] =
        json!({ "quant_method": "awq", "bits": 4, "group_size": group, "version": version });
    config["intermediate_size"] = json!(128);
    config
}

/// Columns of scales that AutoAWQ's kernels want.
fn width(k: usize, group: usize) -> usize {
    let multiple = match group {
        16 => 8,
        32 => 4,
        64 => 2,
        _ => 1,
    };
    (k / group).div_ceil(8).next_multiple_of(multiple) * 8
}

/// The linears, with 128 columns for `down`: the fast order knows only whole blocks of 64.
fn linears() -> impl Iterator<Item = (&'static str, &'static str, usize, usize)> {
    LINEARS.into_iter().map(|(target, module, n, k)| {
        let wide = |d: usize| if d == INNER { 128 } else { d };
        (target, module, wide(n), wide(k))
    })
}

fn packed(name: &str, config: &Value, pack: impl Fn(&Chosen, &mut Tensors, &str), sym: bool, group: i64) -> ModelFile {
    let mut random = Random::new(41);
    let mut tensors = around(&mut random);
    let mut all = vec![];
    for (target, module, n, k) in linears() {
        let columns = if group < 0 { k } else { k.min(group as usize) };
        let mut chosen = Chosen::new(&mut random, n, k, 4, columns, sym);
        // No scale is zero, so that every zero-point is in the float that stands for it.
        chosen.scales.iter_mut().filter(|s| **s == 0.0).for_each(|s| *s = 1.0);
        pack(&chosen, &mut tensors, module);
        all.push((target, chosen));
    }
    let scratch = Scratch::new(name);
    write(&scratch.model(), config, &tensors, "model.safetensors");
    let (report, file) = scratch.convert(&Options::default()).unwrap();
    assert_eq!(report.method, "awq");
    for (target, chosen) in &all {
        let view = file.tensor(target).unwrap();
        for (row, col) in (0..chosen.n).flat_map(|row| (0..chosen.k).map(move |col| (row, col))) {
            assert_eq!(view.at(row, col), chosen.at(row, col), "{name} {target} [{row}, {col}]");
        }
    }
    file
}

#[test]
fn every_order_gives_the_same_file() {
    for group in [-1i64, 16, 32, 64, 128] {
        for sym in [true, false] {
            let columns = |c: &Chosen| width(c.k, c.group);
            let minus_sz = |c: &Chosen, i: usize| -(c.scales[i] * c.zeros[i] as f32);
            let gemm = packed("gemm", &awq_config("gemm", group), |c, t, m| c.awq(t, m, FloatType::F16), sym, group);
            for unsaid in [true, false] {
                // Without a claim the zeros after the last scale tell how many groups there are.
                let config = |version: &str| match unsaid {
                    true => json!({ "quant_method": "awq" }),
                    false => awq_config(version, group)["quantization_config"].clone(),
                };
                let config = |version: &str| {
                    let mut all = awq_config(version, group);
                    all["quantization_config"] = config(version);
                    all
                };
                let gemv = packed("gemv", &config("gemv"), |c, t, m| c.gemv(t, m, columns(c)), sym, group);
                same_tensors(&gemm, &gemv);
                for (version, zeros) in [("gemv_fast", "qzeros"), ("llm-awq", "scaled_zeros")] {
                    let pack =
                        |c: &Chosen, t: &mut Tensors, m: &str| c.fast(t, m, columns(c), zeros, |i| minus_sz(c, i));
                    same_tensors(&gemm, &packed(version, &config(version), pack, sym, group));
                }
            }
        }
    }
}

/// Float zero-points between codes are minima: `w = s * q + m`.
#[test]
fn zero_points_that_are_no_codes_are_minima() {
    let mut random = Random::new(42);
    let mut tensors = around(&mut random);
    let mut all = vec![];
    for (target, module, n, k) in linears() {
        let mut chosen = Chosen::new(&mut random, n, k, 4, 32, false);
        chosen.scales[0] = 0.0;
        let minima: Vec<f32> = (0..chosen.scales.len()).map(|_| random.weight()).collect();
        chosen.fast(&mut tensors, module, width(k, 32), "qzeros", |i| minima[i]);
        all.push((target, chosen, minima));
    }
    let scratch = Scratch::new("minima");
    write(&scratch.model(), &awq_config("gemv_fast", 32), &tensors, "model.safetensors");
    let (report, file) = scratch.convert(&Options::default()).unwrap();
    assert!(report.verified.minima > 0 && report.verified.zeros == 0);
    for (target, chosen, minima) in &all {
        let view = file.tensor(target).unwrap();
        assert!(matches!(view.scheme, Scheme::Int { zero: ZeroKind::Min, scale: FloatType::F16, .. }));
        for (row, col) in (0..chosen.n).flat_map(|row| (0..chosen.k).map(move |col| (row, col))) {
            let cell = col / 32 * chosen.n + row;
            let expected = chosen.scales[cell] * chosen.codes[row * chosen.k + col] as f32 + minima[cell];
            assert_eq!(view.at(row, col), expected, "{target} [{row}, {col}]");
        }
    }
}

#[test]
fn an_order_must_be_the_one_claimed() {
    let fails = |version: &str, expected: &str| {
        let mut random = Random::new(43);
        let mut tensors = around(&mut random);
        for (_, module, n, k) in linears() {
            Chosen::new(&mut random, n, k, 4, 32, false).awq(&mut tensors, module, FloatType::F16);
        }
        let scratch = Scratch::new("claimed");
        write(&scratch.model(), &awq_config(version, 32), &tensors, "model.safetensors");
        scratch.fails(expected);
    };
    fails("gemv", "q_proj.qweight: layout: expected gemv, as config.json says, got i32 [64, 8] like gemm");
    fails("gemv_fast", "q_proj.qweight: layout: expected gemv_fast, as config.json says");
    fails("other", "quantization format awq other");
}

#[test]
fn an_index_out_of_order_and_strays_are_named() {
    let model = |order: &str, part: &str, value: (&'static str, Vec<usize>, Vec<u8>)| {
        let mut random = Random::new(44);
        let mut tensors = around(&mut random);
        for (_, module, n, k) in linears() {
            let c = Chosen::new(&mut random, n, k, 4, 32, false);
            match order {
                "gemm" => c.awq(&mut tensors, module, FloatType::F16),
                "gemv" => c.gemv(&mut tensors, module, width(k, 32)),
                _ => c.fast(&mut tensors, module, width(k, 32), "qzeros", |i| -(c.scales[i] * c.zeros[i] as f32)),
            };
        }
        tensors.insert(format!("model.layers.0.self_attn.q_proj.{part}"), value);
        let scratch = Scratch::new("index");
        write(&scratch.model(), &awq_config(order, 32), &tensors, "model.safetensors");
        scratch
    };
    let index = |group: &dyn Fn(i32) -> i32| {
        ("I32", vec![HIDDEN], (0..HIDDEN as i32).flat_map(|col| group(col).to_le_bytes()).collect())
    };
    for order in ["gemm", "gemv", "gemv_fast"] {
        model(order, "g_idx", index(&|col| col / 32)).convert(&Options::default()).unwrap();
        model(order, "g_idx", index(&|col| 1 - col / 32)).fails("AWQ has no act-order");
    }
    for order in ["gemm", "gemv"] {
        model(order, "scaled_zeros", ("F16", vec![2, 2], vec![0; 8])).fails("q_proj.scaled_zeros");
    }
    model("gemv_fast", "weight_scale", ("F16", vec![1], vec![0; 2])).fails("q_proj.weight_scale");
}
