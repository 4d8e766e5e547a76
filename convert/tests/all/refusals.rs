//! What is not converted is refused by name, and leaves nothing behind.

use std::{fs, path::Path};

use quern_convert::{Options, Quant};
use quern_models::FloatType;
use serde_json::{Value, json};

use crate::made::*;

fn model(name: &str, change: impl FnOnce(&mut Value, &mut Tensors)) -> Scratch {
    let mut random = Random::new(11);
    let scratch = Scratch::new(name);
    let (mut config, mut tensors) = (config(), around(&mut random));
    for (_, module, n, k) in LINEARS {
        Chosen::new(&mut random, n, k, 4, 32, true).gptq(&mut tensors, module, true, FloatType::F16);
    }
    config["quantization_config"] = json!({ "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": true });
    change(&mut config, &mut tensors);
    write(&scratch.model(), &config, &tensors, "model.safetensors");
    scratch
}

const Q: &str = "model.layers.0.self_attn.q_proj";

#[test]
fn tensors_that_are_missing_or_too_many_are_named() {
    for part in ["qweight", "scales"] {
        let name = format!("{Q}.{part}");
        model(&format!("no-{part}"), |_, t| drop(t.remove(&name))).fails(Q);
    }
    model("no-norm", |_, t| drop(t.remove("model.norm.weight"))).fails("model.norm.weight");
    model("no-head", |_, t| drop(t.remove("lm_head.weight"))).fails("lm_head.weight");
    let extra = ("F32", vec![1], vec![0; 4]);
    model("extra", |_, t| drop(t.insert("vision.weight".into(), extra.clone()))).fails("vision.weight");
    let bias = ("F16", vec![HIDDEN], vec![1; 2 * HIDDEN]);
    model("bias", |_, t| drop(t.insert(format!("{Q}.bias"), bias.clone()))).fails(&format!("{Q}.bias"));
    let float = ("F32", vec![HIDDEN, HIDDEN], vec![0; 4 * HIDDEN * HIDDEN]);
    model("both", |_, t| drop(t.insert(format!("{Q}.weight"), float.clone()))).fails("both");
}

#[test]
fn shapes_and_config_must_agree() {
    model("bits", |c, _| c["quantization_config"]["bits"] = json!(8))
        .fails("bits: expected 8, as config.json says, got 4");
    model("group", |c, _| c["quantization_config"]["group_size"] = json!(64)).fails("64 columns");
    let index: Vec<u8> = (0..HIDDEN as u32).flat_map(|k| (k / 16).to_le_bytes()).collect();
    model("index", |_, t| drop(t.insert(format!("{Q}.g_idx"), ("I32", vec![HIDDEN], index))))
        .fails(&format!("{Q}.g_idx: groups: expected 0 to 1, as the scales have 2, got 2 for column 32"));
    model("method", |c, _| c["quantization_config"]["quant_method"] = json!("awq")).fails("awq, as config.json says");
    model("width", |c, _| c["hidden_size"] = json!(HIDDEN + 64)).fails("model.embed_tokens.weight: shape");
    model("heads", |c, _| c["num_attention_heads"] = json!(4)).fails("self_attn.q_proj.qweight: shape");
    model("family", |c, _| c["model_type"] = json!("mamba")).fails("model: config.json: model_type \"mamba\"");
    model("bias-config", |c, _| c["attention_bias"] = json!(true)).fails("q_proj.bias is missing");
}

#[test]
fn formats_of_later_versions_are_named() {
    model("marlin", |c, _| c["quantization_config"]["checkpoint_format"] = json!("marlin")).fails("marlin");
    model("float-zeros", |_, t| drop(t.insert(format!("{Q}.zeros"), ("F16", vec![0], vec![]))))
        .fails("float zero-points");
    model("i64", |_, t| {
        let (_, shape, bytes) = t[&format!("{Q}.qweight")].clone();
        t.insert(format!("{Q}.qweight"), ("I64", vec![shape[0], shape[1] / 2], bytes));
    })
    .fails("pack_dtype");
    model("f64", |_, t| drop(t.insert("model.norm.weight".into(), ("F64", vec![HIDDEN], vec![0; 8 * HIDDEN]))))
        .fails("F64");
}

#[test]
fn values_that_cannot_be_right_are_named() {
    model("nan-scale", |_, t| {
        let scales = &mut t.get_mut(&format!("{Q}.scales")).unwrap().2;
        scales[10..12].copy_from_slice(&half::f16::NAN.to_le_bytes());
    })
    .fails("scales: expected finite numbers, got NaN for row 5, group 0");
    // One tensor of a version 2 file among those of version 1.
    model("mixed-versions", |_, t| {
        t.get_mut(&format!("{Q}.qzeros")).unwrap().2.fill(0x88);
    })
    .fails(&format!("{Q}.qzeros: zero-points"));
    model("sym", |_, t| t.get_mut(&format!("{Q}.qzeros")).unwrap().2[0] = 0x12).fails("says sym");
}

#[test]
fn zero_points_are_not_made_up() {
    let missing = format!("tensor {Q}.qzeros is missing (config.json says that the model is not symmetric)");
    model("no-zeros", |c, t| {
        c["quantization_config"]["sym"] = json!(false);
        t.remove(&format!("{Q}.qzeros"));
    })
    .fails(&missing);
    // The config says nothing, but another tensor is asymmetric.
    let other = "model.layers.0.mlp.up_proj.qzeros";
    let unsaid = |c: &mut Value, t: &mut Tensors| {
        c["quantization_config"]["sym"] = Value::Null;
        t.get_mut(other).unwrap().2[0] = 0x12;
    };
    model("no-zeros-unsaid", |c, t| {
        unsaid(c, t);
        t.remove(&format!("{Q}.qzeros"));
    })
    .fails(&format!("tensor {Q}.qzeros: zero-points"));
    // The last six rows of the head (AutoGPTQ writes whole groups of 32 only) would have to be guessed.
    let cut = |tensors: &mut Tensors| {
        tensors.remove("lm_head.weight");
        let head = Chosen::new(&mut Random::new(14), VOCAB, HIDDEN, 4, 32, true);
        head.gptq(tensors, "lm_head", true, FloatType::F16);
        cut_zeros(tensors, "lm_head", VOCAB, 4);
    };
    model("cut-zeros", |c, t| {
        c["quantization_config"]["sym"] = json!(false);
        cut(t);
    })
    .fails("tensor lm_head.qzeros: shape: expected [2, 9], got [2, 8]");
    model("cut-zeros-unsaid", |c, t| {
        unsaid(c, t);
        cut(t);
    })
    .fails("tensor lm_head.qzeros: words of a row: expected 9, got 8");
}

#[test]
fn groups_of_columns_must_be_there() {
    let index = |name: &str, change: &dyn Fn(&mut Vec<i32>)| {
        let mut index: Vec<i32> = (0..HIDDEN as i32).map(|k| k / 32).collect();
        change(&mut index);
        let bytes = index.iter().flat_map(|v| v.to_le_bytes()).collect();
        model(name, |_, t| drop(t.insert(format!("{Q}.g_idx"), ("I32", vec![HIDDEN], bytes))))
    };
    let expected = format!("tensor {Q}.g_idx: groups: expected 0 to 1, as the scales have 2, got");
    index("beyond", &|i| i[5] = 2).fails(&format!("{expected} 2 for column 5; is the download damaged?"));
    index("before", &|i| i[0] = -3).fails(&format!("{expected} -3 for column 0"));
    index("far", &|i| i[63] = i32::MIN).fails(&format!("{expected} -2147483648 for column 63"));
    index("zeros", &|i| i.fill(0)).fails("zeros only; remove the tensor");
    let short = ("I32", vec![HIDDEN - 1], vec![0; 4 * (HIDDEN - 1)]);
    // An order of which one module's part did not come along would be another model.
    model("one-index", |_, t| drop(t.remove(&format!("{Q}.g_idx"))))
        .fails("q_proj.g_idx is missing (other modules have one)");
    let none = |config: &mut Value, t: &mut Tensors| {
        config["quantization_config"]["desc_act"] = true.into();
        t.retain(|name, _| !name.ends_with(".g_idx"));
    };
    model("no-index", none).fails("g_idx is missing (config.json says desc_act, so the columns have an order)");
    model("short-index", |_, t| drop(t.insert(format!("{Q}.g_idx"), short))).fails("expected i32 [64], got i32 [63]");
}

#[test]
fn formats_are_known_by_their_tensors() {
    for (part, name) in [
        ("weight.absmax", "bitsandbytes"),
        ("weight.quant_map", "bitsandbytes"),
        ("weight.quant_state.bitsandbytes__nf4", "bitsandbytes"),
        ("SCB", "bitsandbytes"),
        ("W_q", "HQQ"),
        ("q_weight", "EXL2"),
        ("trellis", "EXL3"),
        ("codebooks", "AQLM"),
        ("centroids", "VPTQ"),
        ("Qidxs", "QuIP#"),
        ("dense_weights", "SpQR"),
        ("theta", "ParoQuant"),
        ("B", "Marlin"),
        ("lora_A", "adapter (LoRA or EoRA)"),
        ("lora_A.weight", "adapter (LoRA or EoRA)"),
    ] {
        let change = |c: &mut Value, t: &mut Tensors| {
            c.as_object_mut().unwrap().remove("quantization_config");
            t.retain(|name, _| !name.starts_with(Q));
            t.insert(format!("{Q}.{part}"), ("F16", vec![1], vec![0; 2]));
        };
        let scratch = model(&format!("part-{part}"), change);
        let text = scratch.convert(&Options::default()).err().unwrap().to_string();
        let next = text.contains("convert the");
        assert!(text.contains(&format!("tensor {Q}.{part}: ")) && text.contains(name) && next, "{text}");
    }
    model("act-scales", |_, t| drop(t.insert("model.layers.0.mlp.act.scales".into(), ("F16", vec![1], vec![0; 2]))))
        .fails("model.layers.0.mlp.act.scales: AWQ that divides what an activation gives");
    model("awq-columns", |c, t| {
        t.retain(|name, _| !name.contains("_proj."));
        for (_, module, n, k) in LINEARS {
            t.insert(format!("{module}.qweight"), ("I16", vec![n / 4, k], vec![0; n / 2 * k]));
            t.insert(format!("{module}.scales"), ("F16", vec![8, n], vec![0; 16 * n]));
            t.insert(format!("{module}.qzeros"), ("F16", vec![8, n], vec![0; 16 * n]));
        }
        c["quantization_config"] = json!({ "quant_method": "awq", "bits": 4, "version": "gemv_fast" });
    })
    .fails(
        "mlp.down_proj.qweight: shape: expected a multiple of 4 rows and 64 columns, as gemv_fast has, got a [64, 96]",
    );
    let dir = Scratch::new("adapter");
    fs::write(dir.model().join("adapter_config.json"), "{}").unwrap();
    fs::write(dir.model().join("adapter_model.safetensors"), safetensors(&Tensors::new())).unwrap();
    dir.fails("an adapter");
}

#[test]
fn shards_and_their_index_must_agree() {
    let scratch = Scratch::new("shards");
    let dir = scratch.model();
    let tensors = float_model(&mut Random::new(13), FloatType::BF16);
    let (names, _): (Vec<_>, Vec<_>) = tensors.keys().cloned().partition(|n| n.contains("mlp"));
    let part =
        |inside: bool| tensors.clone().into_iter().filter(|t| names.contains(&t.0) == inside).collect::<Tensors>();
    write(&dir, &config(), &part(false), "model-00001-of-00002.safetensors");
    let files = |name: &String| format!("model-0000{}-of-00002.safetensors", 1 + names.contains(name) as u8);
    let mut weight_map: serde_json::Map<String, Value> = tensors.keys().map(|n| (n.clone(), files(n).into())).collect();
    let index = |map: &serde_json::Map<String, Value>| {
        fs::write(dir.join("model.safetensors.index.json"), json!({ "weight_map": map }).to_string()).unwrap();
    };
    index(&weight_map);
    scratch.fails("model-00002-of-00002.safetensors");
    fs::write(dir.join("model-00002-of-00002.safetensors"), safetensors(&part(true))).unwrap();
    let (report, _) = scratch.convert(&Options::default()).unwrap();
    assert_eq!(report.rows[0].tensors, tensors.len());
    fs::remove_file(scratch.out()).unwrap();

    let bytes = fs::read(dir.join("model-00002-of-00002.safetensors")).unwrap();
    fs::write(dir.join("model-00002-of-00002.safetensors"), &bytes[..bytes.len() - 1]).unwrap();
    scratch.fails("model-00002-of-00002.safetensors");
    fs::write(dir.join("model-00002-of-00002.safetensors"), b"").unwrap();
    scratch.fails("model-00002-of-00002.safetensors: the file is empty");
    fs::write(dir.join("model-00002-of-00002.safetensors"), &bytes).unwrap();

    weight_map.insert("model.norm.bias".into(), "model-00001-of-00002.safetensors".into());
    index(&weight_map);
    scratch.fails("model.norm.bias");
    weight_map.insert("model.norm.bias".into(), "../elsewhere.safetensors".into());
    index(&weight_map);
    scratch.fails("../elsewhere.safetensors");
    index(&serde_json::Map::new());
    scratch.fails("model.safetensors.index.json: weight_map: expected at least one tensor, got none");
}

#[test]
fn an_activation_order_is_refused_in_awq_too() {
    let awq = |name: &str, index: &dyn Fn(u32) -> u32| {
        model(name, |c, t| {
            t.retain(|name, _| !name.contains("_proj."));
            for (_, module, n, k) in LINEARS {
                Chosen::new(&mut Random::new(15), n, k, 4, 32, false).awq(t, module, FloatType::F16);
            }
            let index = (0..HIDDEN as u32).flat_map(|k| index(k).to_le_bytes()).collect();
            t.insert(format!("{Q}.g_idx"), ("I32", vec![HIDDEN], index));
            c["quantization_config"] = json!({ "quant_method": "awq", "bits": 4, "group_size": 32 });
        })
    };
    awq("awq-order", &|k| k / 32).convert(&Options::default()).unwrap();
    awq("awq-act-order", &|k| k % 2).fails(&format!("tensor {Q}.g_idx: groups: expected columns in order, got others"));
    awq("awq-index", &|k| k / 16).fails(&format!("tensor {Q}.g_idx: groups: expected 0 to 1"));
}

#[test]
fn floats_that_are_no_numbers_are_named() {
    for (i, name) in ["model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"].into_iter().enumerate() {
        for (quant, bad) in [(Quant::Keep, f32::NAN), (Quant::F16, f32::INFINITY), (Quant::Int8, f32::NEG_INFINITY)] {
            let options = Options { lm_head: Some(quant), ..Options::default() };
            let scratch = model(&format!("no-number-{i}-{quant:?}"), |_, t| {
                t.get_mut(name).unwrap().2[6..8].copy_from_slice(&half::bf16::from_f32(bad).to_le_bytes());
            });
            let text = scratch.convert(&options).err().unwrap().to_string();
            let named = text.contains(&format!("tensor {name}: weights: expected finite numbers"));
            assert!(named && text.contains("is the download damaged?"), "{text}");
            assert!(text.contains("[0, 3]") || quant == Quant::Int8 && text.contains("row 0, group 0"), "{text}");
        }
    }
}

#[test]
fn a_source_is_not_overwritten() {
    let scratch = model("own-source", |_, _| {});
    let dir = scratch.model();
    fs::write(dir.join("tokenizer.json"), "{}").unwrap();
    let tensors = dir.join("model.safetensors");
    let link = scratch.0.join("link.qrn");
    let options = Options { force: true, ..Options::default() };
    let kept = |source: &Path, out: &Path| {
        let before = fs::read(out).unwrap();
        let text = quern_convert::convert(source, out, &options, &mut ()).unwrap_err().to_string();
        assert!(text.contains(&format!("{} is part of the source", out.display())), "{text}");
        assert_eq!(fs::read(out).unwrap(), before);
    };
    kept(&dir, &tensors);
    kept(&tensors, &tensors);
    kept(&dir, &dir.join("../model/config.json"));
    kept(&tensors, &dir.join("tokenizer.json"));
    let gguf = scratch.0.join("m.gguf");
    fs::copy(fixture("gguf/llama-q4_0/model.gguf"), &gguf).unwrap();
    kept(&gguf, &gguf);
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(&tensors, &link).unwrap();
        kept(&dir, &link);
        fs::remove_file(&link).unwrap();
        // A link that leads nowhere exists.
        std::os::unix::fs::symlink(scratch.0.join("nowhere"), &link).unwrap();
        let text = quern_convert::convert(&dir, &link, &Options::default(), &mut ()).unwrap_err().to_string();
        assert!(text.contains("link.qrn exists"), "{text}");
    }
    // An earlier result in the source's directory is not part of it.
    for _ in 0..2 {
        quern_convert::convert(&dir, &dir.join("model.qrn"), &options, &mut ()).unwrap();
    }
}

#[test]
fn sources_that_are_no_checkpoint_are_explained() {
    let scratch = Scratch::new("sources");
    let dir = scratch.model();
    scratch.fails("no .safetensors and no .gguf");
    fs::write(dir.join("pytorch_model.bin"), b"PK\x03\x04").unwrap();
    scratch.fails("pickle");
    fs::write(dir.join("qmodel.pt"), b"PK\x03\x04").unwrap();
    scratch.fails("HQQ");
    fs::remove_file(dir.join("qmodel.pt")).unwrap();
    let text = |path: &str| scratch.convert_from(path.as_ref(), &Options::default()).err().unwrap().to_string();
    assert!(text(&dir.join("pytorch_model.bin").to_string_lossy()).contains("safe_serialization"));
    assert!(text("HuggingFaceTB/SmolLM2-135M").contains("hf download HuggingFaceTB/SmolLM2-135M"));
    assert!(text("/nowhere/at/all").contains("no such file"));
    fs::write(dir.join("a.safetensors"), b"").unwrap();
    fs::write(dir.join("b.safetensors"), b"").unwrap();
    scratch.fails("several tensor files");
    fs::remove_file(dir.join("b.safetensors")).unwrap();
    scratch.fails("empty");
    fs::write(dir.join("a.safetensors"), safetensors(&Tensors::new())).unwrap();
    scratch.fails("no config.json");
}

#[test]
fn an_existing_file_is_kept_unless_forced_and_whatever_happens() {
    let scratch = model("force", |_, _| {});
    fs::write(scratch.out(), b"precious").unwrap();
    let text =
        quern_convert::convert(&scratch.model(), &scratch.out(), &Options::default(), &mut ()).unwrap_err().to_string();
    assert!(text.contains("--force"), "{text}");
    let bad = Options { force: true, group: Some(48), quant: Quant::Int4, ..Options::default() };
    assert!(quern_convert::convert(&scratch.model(), &scratch.out(), &bad, &mut ()).is_err());
    assert_eq!(fs::read(scratch.out()).unwrap(), b"precious");
    let good = Options { force: true, ..Options::default() };
    scratch.convert(&good).unwrap();
}
