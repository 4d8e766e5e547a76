//! Checkpoints whose integers the tests chose: what comes out must be exactly these.

use quern_convert::{Options, Quant};
use quern_models::{FloatType, ModelFile, Scheme, ZeroKind};
use serde_json::{Value, json};

use crate::made::*;

fn gptq_config(format: &str, bits: usize, group: i64, sym: Option<bool>) -> Value {
    let mut config = config();
    config["quantization_config"] =
        json!({ "quant_method": "gptq", "bits": bits, "group_size": group, "checkpoint_format": format, "sym": sym });
    config
}

pub fn check(file: &ModelFile, target: &str, chosen: &Chosen) {
    let view = file.tensor(target).unwrap();
    for row in 0..chosen.n {
        for col in 0..chosen.k {
            assert_eq!(view.at(row, col), chosen.at(row, col), "{target} [{row}, {col}]");
        }
    }
}

#[test]
fn gptq_of_every_kind_is_exact() {
    let mut random = Random::new(1);
    for bits in [4, 8] {
        for group in [-1, 32, 64, 128] {
            for (label, sym, v1) in [
                ("gptq", true, true),
                ("gptq", true, false),
                ("gptq_v2", true, false),
                ("gptq", false, true),
                ("gptq_v2", false, false),
            ] {
                let scratch = Scratch::new(&format!("gptq-{bits}-{group}-{label}-{sym}-{v1}"));
                let mut tensors = around(&mut random);
                let mut all = vec![];
                for (target, module, n, k) in LINEARS {
                    let columns = if group < 0 { k } else { group as usize };
                    let chosen = Chosen::new(&mut random, n, k, bits, columns, sym);
                    chosen.gptq(&mut tensors, module, v1, FloatType::F16);
                    all.push((target, chosen));
                }
                write(&scratch.model(), &gptq_config(label, bits, group, Some(sym)), &tensors, "model.safetensors");
                let (report, file) = scratch.convert(&Options::default()).unwrap();
                assert_eq!(report.method, "gptq");
                for (target, chosen) in &all {
                    check(&file, target, chosen);
                }
                let Scheme::Int { zero, .. } = file.tensor("layers.0.q").unwrap().scheme else { panic!() };
                assert_eq!(zero, if sym { ZeroKind::Mid } else { ZeroKind::Code });
                let codes: usize = all.iter().map(|(_, c)| c.n * c.k).sum();
                assert_eq!(report.verified.codes, codes as u64);
            }
        }
    }
}

#[test]
fn a_borrow_between_zero_fields_is_undone() {
    // Zeros 0 borrow from their neighbour when one is subtracted from the whole word: z = [0, 8, ...] is stored as
    // [15, 6, ...]; adding one field by field would give 7 instead of 8.
    let mut random = Random::new(2);
    let scratch = Scratch::new("borrow");
    let mut tensors = around(&mut random);
    let mut all = vec![];
    for (target, module, n, k) in LINEARS {
        let mut chosen = Chosen::new(&mut random, n, k, 4, 32, false);
        chosen.zeros.iter_mut().enumerate().for_each(|(i, z)| *z = [0, 8, 0, 0, 15, 0, 1, 7][i % 8]);
        chosen.gptq(&mut tensors, module, true, FloatType::F16);
        all.push((target, chosen));
    }
    write(&scratch.model(), &gptq_config("gptq", 4, 32, Some(false)), &tensors, "gptq_model-4bit-32g.safetensors");
    let (report, file) = scratch.convert(&Options::default()).unwrap();
    all.iter().for_each(|(target, chosen)| check(&file, target, chosen));
    assert!(report.verified.zeros > 0);
}

#[test]
fn a_partial_last_group_is_exact_with_and_without_an_index() {
    // Columns of `down` are a group and a half; the config or the index says so.
    let mut random = Random::new(15);
    for (index, group) in [(true, 64), (true, 0), (false, 64)] {
        for sym in [true, false] {
            let scratch = Scratch::new(&format!("partial-{index}-{group}-{sym}"));
            let mut tensors = around(&mut random);
            let mut all = vec![];
            for (target, module, n, k) in LINEARS {
                let chosen = Chosen::new(&mut random, n, k, 4, 64, sym);
                chosen.gptq(&mut tensors, module, true, FloatType::F16);
                if !index {
                    tensors.remove(&format!("{module}.g_idx"));
                }
                all.push((target, chosen));
            }
            write(&scratch.model(), &gptq_config("gptq", 4, group, Some(sym)), &tensors, "model.safetensors");
            let (report, file) = scratch.convert(&Options::default()).unwrap();
            all.iter().for_each(|(target, chosen)| check(&file, target, chosen));
            let Scheme::Int { group, .. } = file.tensor("layers.0.down").unwrap().scheme else { panic!() };
            assert_eq!((group, report.verified.zeros > 0), (64, !sym));
        }
    }
}

#[test]
fn zero_points_that_auto_gptq_drops_are_the_middle_code() {
    let mut random = Random::new(16);
    for bits in [4, 8] {
        for v1 in [true, false] {
            let scratch = Scratch::new(&format!("cut-{bits}-{v1}"));
            let mut tensors = around(&mut random);
            for (_, module, n, k) in LINEARS {
                Chosen::new(&mut random, n, k, bits, 32, true).gptq(&mut tensors, module, v1, FloatType::F16);
            }
            tensors.remove("lm_head.weight");
            let head = Chosen::new(&mut random, VOCAB, HIDDEN, bits, 32, true);
            head.gptq(&mut tensors, "lm_head", v1, FloatType::F16);
            cut_zeros(&mut tensors, "lm_head", VOCAB, bits);
            write(&scratch.model(), &gptq_config("gptq", bits, 32, Some(true)), &tensors, "model.safetensors");
            let (_, file) = scratch.convert(&Options::default()).unwrap();
            check(&file, "head", &head);
        }
    }
    // Whole words, the last one partial, of an asymmetric head.
    for v1 in [true, false] {
        let scratch = Scratch::new(&format!("ragged-{v1}"));
        let mut tensors = around(&mut random);
        tensors.remove("lm_head.weight");
        let mut all = vec![("head", Chosen::new(&mut random, VOCAB, HIDDEN, 4, 32, false))];
        all[0].1.gptq(&mut tensors, "lm_head", v1, FloatType::F16);
        for (target, module, n, k) in LINEARS {
            let chosen = Chosen::new(&mut random, n, k, 4, 32, false);
            chosen.gptq(&mut tensors, module, v1, FloatType::F16);
            all.push((target, chosen));
        }
        let label = if v1 { "gptq" } else { "gptq_v2" };
        write(&scratch.model(), &gptq_config(label, 4, 32, Some(false)), &tensors, "model.safetensors");
        let (_, file) = scratch.convert(&Options::default()).unwrap();
        all.iter().for_each(|(target, chosen)| check(&file, target, chosen));
    }
}

#[test]
fn config_is_only_a_hint() {
    // No quantization config, no g_idx, no qzeros, all-zero biases: the tensors say enough.
    let mut random = Random::new(3);
    let scratch = Scratch::new("hint");
    let mut tensors = around(&mut random);
    let mut all = vec![];
    for (target, module, n, k) in LINEARS {
        let chosen = Chosen::new(&mut random, n, k, 4, 32, true);
        chosen.gptq(&mut tensors, module, true, FloatType::F16);
        tensors.remove(&format!("{module}.g_idx"));
        tensors.remove(&format!("{module}.qzeros"));
        tensors.insert(format!("{module}.bias"), ("F16", vec![n], vec![0; n * 2]));
        all.push((target, chosen));
    }
    tensors.insert("model.layers.0.self_attn.rotary_emb.inv_freq".into(), ("F32", vec![16], vec![1; 64]));
    write(&scratch.model(), &config(), &tensors, "model.safetensors");
    let (_, file) = scratch.convert(&Options::default()).unwrap();
    all.iter().for_each(|(target, chosen)| check(&file, target, chosen));
}

#[test]
fn a_head_may_be_quantized_and_modules_may_differ() {
    let mut random = Random::new(4);
    let scratch = Scratch::new("dynamic");
    let mut tensors = around(&mut random);
    tensors.remove("lm_head.weight");
    let head = Chosen::new(&mut random, VOCAB, HIDDEN, 8, 32, true);
    head.gptq(&mut tensors, "lm_head", true, FloatType::F16);
    for (i, (_, module, n, k)) in LINEARS.into_iter().enumerate() {
        let bits = if i == 2 { 8 } else { 4 };
        Chosen::new(&mut random, n, k, bits, 32, true).gptq(&mut tensors, module, true, FloatType::F16);
    }
    let mut config = gptq_config("gptq", 4, 32, Some(true));
    config["quantization_config"]["dynamic"] = json!({ "+:.*v_proj": { "bits": 8 }, "lm_head": { "bits": 8 } });
    // A tied model whose head is quantized is untied.
    config["tie_word_embeddings"] = json!(true);
    write(&scratch.model(), &config, &tensors, "model.safetensors");
    let (_, file) = scratch.convert(&Options { lm_head: Some(Quant::Int4), ..Options::default() }).unwrap();
    assert!(!file.spec().tied_head);
    check(&file, "head", &head);
    let schemes = ["layers.0.v", "layers.0.k", "embed"].map(|t| file.tensor(t).unwrap().scheme.to_string());
    assert_eq!(schemes, ["int8 g32 sym", "int4 g32 sym", "int4 g64 sym"]);
}

#[test]
fn awq_is_exact_and_scales_keep_what_f16_cannot_hold() {
    let mut random = Random::new(5);
    for kind in [FloatType::F16, FloatType::BF16, FloatType::F32] {
        for odd in [false, true] {
            let scratch = Scratch::new(&format!("awq-{}-{odd}", kind.name()));
            let mut tensors = around(&mut random);
            let mut all = vec![];
            for (target, module, n, k) in LINEARS {
                let mut chosen = Chosen::new(&mut random, n, k, 4, 32, false);
                if odd && kind != FloatType::F16 {
                    chosen.scales[n] = beyond_f16();
                }
                chosen.awq(&mut tensors, module, kind);
                all.push((target, chosen));
            }
            let mut config = config();
            config["quantization_config"] =
                json!({ "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": true, "version": "gemm" });
            write(&scratch.model(), &config, &tensors, "model.safetensors");
            let (report, file) = scratch.convert(&Options::default()).unwrap();
            all.iter().for_each(|(target, chosen)| check(&file, target, chosen));
            let Scheme::Int { scale, .. } = file.tensor("layers.0.down").unwrap().scheme else { panic!() };
            assert_eq!(scale, if odd { kind } else { FloatType::F16 });
            assert_eq!((report.method, report.verified.scales), ("awq", report.verified.zeros));
        }
    }
}

#[test]
fn modules_may_differ_in_awq_too() {
    let mut random = Random::new(17);
    let scratch = Scratch::new("awq-dynamic");
    let mut tensors = around(&mut random);
    let mut all = vec![];
    for (i, (target, module, n, k)) in LINEARS.into_iter().enumerate() {
        let chosen = Chosen::new(&mut random, n, k, 4, if i == 2 { 32 } else { 64 }, false);
        chosen.awq(&mut tensors, module, FloatType::F16);
        all.push((target, chosen));
    }
    // `down` has a group and a half of columns, which only a claim explains.
    let (target, module, n, k) = LINEARS[6];
    all[6] = (target, Chosen::new(&mut random, n, k, 4, 32, false));
    all[6].1.awq(&mut tensors, module, FloatType::F16);
    let mut config = config();
    config["quantization_config"] = json!({
        "quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4, "group_size": 64, "sym": false,
    });
    write(&scratch.model(), &config, &tensors, "model.safetensors");
    scratch.fails("columns that config.json says");
    config["quantization_config"]["extra_config"] = json!({ LINEARS[2].1: { "group_size": 32 } });
    config["quantization_config"]["bits"] = json!(8);
    write(&scratch.model(), &config, &tensors, "model.safetensors");
    let (_, file) = scratch.convert(&Options::default()).unwrap();
    all.iter().for_each(|(target, chosen)| check(&file, target, chosen));
    let schemes = ["layers.0.v", "layers.0.k"].map(|t| file.tensor(t).unwrap().scheme.to_string());
    assert_eq!(schemes, ["int4 g32 zero", "int4 g64 zero"]);
}

#[test]
fn symmetric_zeros_take_no_space_in_awq_either() {
    let mut random = Random::new(6);
    let scratch = Scratch::new("awq-sym");
    let mut tensors = around(&mut random);
    for (_, module, n, k) in LINEARS {
        Chosen::new(&mut random, n, k, 4, 32, true).awq(&mut tensors, module, FloatType::F16);
    }
    write(&scratch.model(), &config(), &tensors, "model.safetensors");
    let (report, file) = scratch.convert(&Options::default()).unwrap();
    assert_eq!(file.tensor("layers.0.q").unwrap().scheme.to_string(), "int4 g32 sym");
    assert_eq!(report.verified.zeros, 0);
}

#[test]
fn floats_are_kept_or_rounded() {
    let mut random = Random::new(7);
    for kind in [FloatType::F32, FloatType::F16, FloatType::BF16] {
        let scratch = Scratch::new(&format!("float-{}", kind.name()));
        let tensors = float_model(&mut random, kind);
        write(&scratch.model(), &config(), &tensors, "model.safetensors");
        let (report, file) = scratch.convert(&Options::default()).unwrap();
        assert_eq!(file.tensor("layers.0.q").unwrap().codes, tensors["model.layers.0.self_attn.q_proj.weight"].2);
        assert_eq!(report.verified.floats, report.weights());
        assert_eq!(file.generation().eos, [2, 3]);

        let options = Options { quant: Quant::F16, force: true, ..Options::default() };
        let (report, file) = scratch.convert(&options).unwrap();
        let schemes = ["layers.0.q", "embed", "norm"].map(|t| file.tensor(t).unwrap().scheme.to_string());
        assert_eq!(schemes, ["f16", "f16", "bf16"]);
        // bf16 embeddings and head are rounded, and so are linears that are not f16 already.
        assert!(report.verified.rounded >= (2 * VOCAB * HIDDEN) as u64);
    }
}

#[test]
fn rounding_to_nearest_stays_within_half_a_step() {
    let mut random = Random::new(8);
    for (quant, bits, group) in
        [(Quant::Int4, 4, None), (Quant::Int8, 8, None), (Quant::Int4, 4, Some(32)), (Quant::Int4, 4, Some(256))]
    {
        let scratch = Scratch::new(&format!("rtn-{bits}-{group:?}"));
        let tensors = float_model(&mut random, FloatType::F32);
        write(&scratch.model(), &config(), &tensors, "model.safetensors");
        let (report, file) = scratch.convert(&Options { quant, group, ..Options::default() }).unwrap();
        for (target, module, n, k) in LINEARS {
            let view = file.tensor(target).unwrap();
            let Scheme::Int { bits: got, group: columns, .. } = view.scheme else { panic!() };
            assert_eq!(got, bits);
            let asked = group.unwrap_or(if bits == 4 { 64 } else { 128 });
            let expected = if asked == 32 || k == INNER { 32 } else { 64 };
            assert_eq!(columns, expected, "{target} for {asked}");
            let source = &tensors[&format!("{module}.weight")].2;
            for row in 0..n {
                for g in 0..k / columns as usize {
                    let cols = g * columns as usize..(g + 1) * columns as usize;
                    let weights: Vec<f32> = cols.clone().map(|c| FloatType::F32.read(source, row * k + c)).collect();
                    let largest = weights.iter().fold(0f32, |m, w| m.max(w.abs()));
                    let step = largest / (1 << (bits - 1)) as f32;
                    for (col, w) in cols.zip(&weights) {
                        let off = (view.at(row, col) - w).abs();
                        // The far end of the range may be clipped by one step.
                        let bound = if w.abs() > largest - step { step } else { step / 2.0 };
                        assert!(off <= bound * 1.002, "{target} [{row}, {col}]: {off} with a step of {step}");
                    }
                }
            }
        }
        let schemes = ["embed", "head", "norm"].map(|t| file.tensor(t).unwrap().scheme.to_string());
        let columns = if group == Some(32) { 32 } else { 64 };
        assert_eq!(schemes, [format!("int8 g{columns} sym"), format!("int8 g{columns} sym"), "bf16".into()]);
        assert!(report.verified.nearest > 0 && report.verified.codes == 0);
        assert_eq!(file.provenance()["quantizer"]["name"], "rtn");
    }
}

#[test]
fn weights_too_small_for_f16_scales_are_not_lost() {
    let mut random = Random::new(18);
    let mut tensors = float_model(&mut random, FloatType::F32);
    let (_, module, n, k) = LINEARS[0];
    let weights: Vec<f32> = (0..n * k).map(|i| random.weight() * if i < k { 1e-12 } else { 1.0 }).collect();
    tensors.get_mut(&format!("{module}.weight")).unwrap().2 = floats(FloatType::F32, &weights);
    for quant in [Quant::Int4, Quant::Int8] {
        let scratch = Scratch::new(&format!("small-{quant:?}"));
        write(&scratch.model(), &config(), &tensors, "model.safetensors");
        let (_, file) = scratch.convert(&Options { quant, ..Options::default() }).unwrap();
        let Scheme::Int { scale, .. } = file.tensor("layers.0.q").unwrap().scheme else { panic!() };
        let Scheme::Int { scale: other, .. } = file.tensor("layers.0.k").unwrap().scheme else { panic!() };
        assert_eq!((scale, other), (FloatType::F32, FloatType::F16));
        let view = file.tensor("layers.0.q").unwrap();
        for (col, w) in weights[..k].iter().enumerate() {
            assert!((view.at(0, col) - w).abs() <= 1e-12 / 8.0, "[0, {col}]");
        }
    }
}

#[test]
fn tied_heads_are_decided_by_presence() {
    let mut random = Random::new(9);
    let scratch = Scratch::new("tied");
    let mut tensors = float_model(&mut random, FloatType::BF16);
    let mut tied = config();
    tied["tie_word_embeddings"] = json!(true);
    let again = Options { force: true, ..Options::default() };
    let convert = |config: &Value, tensors: &Tensors| {
        write(&scratch.model(), config, tensors, "model.safetensors");
        let (_, file) = scratch.convert(&again).unwrap();
        (file.spec().tied_head, file.tensor("head").is_some())
    };
    assert_eq!(convert(&tied, &tensors), (false, true)); // present and different
    let embed = tensors["model.embed_tokens.weight"].clone();
    tensors.insert("lm_head.weight".into(), embed);
    assert_eq!(convert(&tied, &tensors), (true, false)); // present and equal
    assert_eq!(convert(&config(), &tensors), (false, true)); // not tied by the config
    tensors.remove("lm_head.weight");
    assert_eq!(convert(&tied, &tensors), (true, false));
}
