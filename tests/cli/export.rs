//! `quern export`: the way back, and that it leads to the same file.

use std::{fs, path::Path};

use quern_convert::{
    ExportOptions, Format, Options, convert,
    source::{Dtype, safetensors},
};
use quern_models::{FloatType, ModelFile};
use serde_json::Value;

use crate::support::{
    Scratch, fixture,
    model::kept,
    program::{arg, quern},
    skip,
};

/// Converts `source`, exports it with `flags`, converts the export; both files lie in the scratch folder.
fn there_and_back(scratch: &Scratch, source: &Path, flags: &[&str]) -> (ModelFile, ModelFile) {
    let (file, export, again) = (scratch.at("model.qrn"), scratch.at("export"), scratch.at("again.qrn"));
    kept(source, scratch);
    let ran = quern(&[&["export", arg(&file), "--out", arg(&export)], flags].concat()).ok();
    ran.prints(&["verified: ", "equal to the source", arg(&export)]);
    quern(&["convert", arg(&export), "--out", arg(&again)]).ok();
    (ModelFile::open(&file).unwrap(), ModelFile::open(&again).unwrap())
}

/// Every byte of every tensor is the same, and so is what goes with them.
#[track_caller]
fn equal(a: &ModelFile, b: &ModelFile) {
    let tensors = |f: &ModelFile| -> Vec<_> {
        f.tensors().iter().map(|t| (t.name.clone(), t.dims.clone(), t.scheme, t.hash)).collect()
    };
    assert_eq!(tensors(a), tensors(b));
    b.verify().unwrap();
    assert_eq!((a.spec(), a.generation()), (b.spec(), b.generation()));
    assert_eq!(a.chat_template(), b.chat_template());
    assert_eq!(a.tokenizer_json(), b.tokenizer_json());
}

/// Every tensor of a module has the bytes that the maker of the checkpoint gave it.
#[track_caller]
fn same_bytes(source: &Path, export: &Path, count: usize) {
    let read = |dir: &Path| fs::read(dir.join("model.safetensors")).unwrap();
    let (source, export) = (read(source), read(export));
    let (source, export) = (safetensors::parse(&source).unwrap(), safetensors::parse(&export).unwrap());
    assert_eq!(source.keys().collect::<Vec<_>>(), export.keys().collect::<Vec<_>>());
    let mut packed = 0;
    for (name, tensor) in &source {
        let ours = &export[name];
        assert_eq!(tensor.shape, ours.shape, "{name}");
        if let (Dtype::Float(theirs), Dtype::Float(kind)) = (tensor.dtype, ours.dtype) {
            // bf16 scales that f16 holds are f16 in the file.
            let count = tensor.bytes.len() / theirs.size();
            (0..count).for_each(|i| assert_eq!(theirs.read(tensor.bytes, i), kind.read(ours.bytes, i), "{name}"));
        } else {
            assert!(tensor.dtype == ours.dtype && tensor.bytes == ours.bytes, "{name}");
        }
        packed += name.ends_with("qweight") as usize;
    }
    assert_eq!(packed, count);
}

#[test]
fn gptq_and_awq_come_back_byte_for_byte() {
    for (name, flags) in [
        ("llama-gptq-w4-g64-sym", ["--to", "gptq", "--format", "gptq"]),
        ("llama-gptq-w4-g128-sym", ["--to", "gptq", "--format", "gptq"]),
        ("qwen3_moe-gptq-w4-g32-sym", ["--to", "gptq", "--format", "gptq"]),
        ("llama-gptq-w4-g64-asym", ["--to", "gptq", "--format", "gptq"]),
        ("llama-gptq_v2-w4-g64-sym", ["--to", "gptq", "--format", "gptq_v2"]),
        ("llama-gptq-w2-g32-sym", ["--to", "gptq", "--format", "gptq"]),
        ("llama-gptq-w3-g32-sym", ["--to", "gptq", "--format", "gptq"]),
        ("llama-gptq_v2-w2-g64-asym", ["--to", "gptq", "--format", "gptq_v2"]),
        ("smollm2-gptq-2layer", ["--to", "gptq", "--format", "gptq"]),
        ("llama-awq-w4-g32-gemm", ["--to", "awq", "", ""]),
        ("llama-awq-w4-g64-gemm", ["--to", "awq", "", ""]),
    ] {
        let scratch = Scratch::new("export");
        let source = fixture("models").join(name);
        let flags: Vec<&str> = flags.into_iter().filter(|f| !f.is_empty()).collect();
        let (file, again) = there_and_back(&scratch, &source, &flags);
        equal(&file, &again);
        // Two layers of q, k, v and o, and of gate, up and down: once, or of four experts.
        let linears = if name.contains("moe") { 2 * (4 + 4 * 3) } else { 2 * (4 + 3) };
        same_bytes(&source, &scratch.at("export"), linears);
        let config = json(&scratch.at("export/config.json"));
        assert_eq!(config["quantization_config"], json(&scratch.at("export/quantize_config.json")), "{name}");
        let made = json(&source.join("quantize_config.json"));
        for key in ["bits", "group_size", "desc_act", "sym", "zero_point", "quant_method", "checkpoint_format"] {
            assert_eq!(config["quantization_config"].get(key), made.get(key), "{name}: {key}");
        }
    }
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn integers_change_the_format_but_not_the_codes() {
    for (name, to) in [
        ("models/llama-gptq-w4-g64-sym", "gptq_v2"),
        ("models/llama-gptq-w4-g64-asym", "gptq_v2"),
        ("models/llama-gptq-w3-g32-sym", "gptq_v2"),
        ("models/llama-gptq_v2-w2-g64-asym", "gptq"),
        ("models/llama-gptq_v2-w4-g32-asym-descact", "gptq"),
        ("models/llama-gptq-w4-g64-asym", "awq"),
        ("models/llama-gptq-w4-g128-sym", "awq"),
        ("models/llama-awq-w4-g64-gemm", "gptq"),
    ] {
        let scratch = Scratch::new("export-other");
        let flags: &[&str] = if to == "gptq_v2" { &["--to", "gptq", "--format", to] } else { &["--to", to] };
        let (file, again) = there_and_back(&scratch, &fixture(name), flags);
        equal(&file, &again);
    }
}

#[test]
fn columns_come_back_in_the_order_of_the_source() {
    for (name, format) in [("llama-gptq-w4-g32-sym-descact", "gptq"), ("llama-gptq_v2-w4-g32-asym-descact", "gptq_v2")]
    {
        let scratch = Scratch::new("export-order");
        let source = fixture("models").join(name);
        let (file, again) = there_and_back(&scratch, &source, &["--to", "gptq", "--format", format]);
        equal(&file, &again);
        assert!(file.tensor("layers.1.attn_order").is_some(), "{name} has no order");
        // What gate and up make was put in the order that down needs; attention is as its maker wrote it.
        let read = |dir: &Path| fs::read(dir.join("model.safetensors")).unwrap();
        let (source, export) = (read(&source), read(&scratch.at("export")));
        let (source, export) = (safetensors::parse(&source).unwrap(), safetensors::parse(&export).unwrap());
        let attention: Vec<_> = source.keys().filter(|n| n.contains("self_attn")).collect();
        assert_eq!(attention.len(), 2 * 4 * 4);
        attention.iter().for_each(|n| assert!(source[*n].bytes == export[*n].bytes, "{n}"));
        assert_eq!(json(&scratch.at("export/config.json"))["quantization_config"]["desc_act"], true);
    }
    // Floats are put back in order too, and formats that have none say so.
    let scratch = Scratch::new("export-order-floats");
    let (file, again) = there_and_back(&scratch, &fixture("models/llama-gptq-w4-g32-sym-descact"), &["--to", "float"]);
    let (q, order) = (file.tensor("layers.0.q").unwrap(), file.tensor("layers.0.attn_order").unwrap());
    let floats = again.tensor("layers.0.q").unwrap();
    for (row, col) in (0..q.n).flat_map(|row| (0..q.k).map(move |col| (row, col))) {
        assert_eq!(q.at(row, col), floats.at(row, order.order(col) as usize));
    }
    for to in ["awq", "gguf"] {
        let ran = quern(&["export", arg(&scratch.at("model.qrn")), "--to", to, "--out", arg(&scratch.at("other"))]);
        ran.fails(&["q_proj is int4 g32 sym", "order of columns (act-order)"]);
    }
}

#[test]
fn every_family_comes_back_as_it_was() {
    for name in ["gpt2", "gpt_neo", "mistral", "qwen2", "qwen3", "smollm3"] {
        let scratch = Scratch::new("export-family");
        let source = fixture("models").join(name);
        let (file, again) = there_and_back(&scratch, &source, &["--to", "float"]);
        equal(&file, &again);
        same_bytes(&source, &scratch.at("export"), 0);
    }
}

#[test]
fn integers_of_a_fused_module_come_back() {
    let scratch = Scratch::new("export-fused");
    let (file, out, again) = (scratch.at("model.qrn"), scratch.at("out"), scratch.at("again.qrn"));
    let quant = ["--quant", "int4", "--group", "32", "--lm-head", "keep"];
    quern(&[&["convert", arg(&fixture("models/gpt2")), "--out", arg(&file)], &quant[..]].concat()).ok();
    quern(&["export", arg(&file), "--to", "gptq", "--out", arg(&out)]).ok();
    let bytes = fs::read(out.join("model.safetensors")).unwrap();
    let tensors = safetensors::parse(&bytes).unwrap();
    let fused = &tensors["transformer.h.0.attn.c_attn.scales"];
    assert_eq!(fused.shape[1] % 3, 0, "q, k and v in one: {:?}", fused.shape);
    quern(&["convert", arg(&out), "--out", arg(&again)]).ok();
    equal(&ModelFile::open(&file).unwrap(), &ModelFile::open(&again).unwrap());
}

#[test]
fn handed_checkpoints_come_back() {
    let Some(shared) = std::env::var_os("QUERN_SHARED") else {
        return skip("handed_checkpoints_come_back", "QUERN_SHARED names the folder of handed fixtures");
    };
    let folder = Path::new(&shared).join("fixtures/tiny-quant");
    let mut names: Vec<String> =
        fs::read_dir(&folder).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.retain(|n| !n.contains("moe") && (n.contains("-gptq") || n.ends_with("-gemm")));
    names.sort();
    assert!(names.len() > 15, "{names:?}");
    for name in names {
        let scratch = Scratch::new("export-handed");
        let flags: &[&str] = match name.contains("awq") {
            true => &["--to", "awq"],
            false => &["--to", "gptq", "--format", if name.contains("_v2") { "gptq_v2" } else { "gptq" }],
        };
        let (file, again) = there_and_back(&scratch, &folder.join(&name), flags);
        equal(&file, &again);
    }
}

#[test]
fn floats_come_back_and_integers_as_the_numbers_they_stand_for() {
    for name in ["models/llama", "models/llama3-rope"] {
        let scratch = Scratch::new("export-float");
        let (file, again) = there_and_back(&scratch, &fixture(name), &["--to", "float"]);
        equal(&file, &again);
        assert_eq!(json(&scratch.at("export/config.json"))["dtype"], "bfloat16");
    }
    for name in ["models/llama-gptq-w4-g64-asym", "gguf/llama-q4_1/model.gguf"] {
        let scratch = Scratch::new("export-numbers");
        let (file, again) = there_and_back(&scratch, &fixture(name), &["--to", "float"]);
        for info in file.tensors() {
            let (a, b) = (file.tensor(&info.name).unwrap(), again.tensor(&info.name).unwrap());
            for row in 0..a.n {
                (0..a.k).for_each(|col| assert_eq!(a.at(row, col), b.at(row, col), "{} [{row}, {col}]", info.name));
            }
        }
        assert_eq!(json(&scratch.at("export/config.json"))["dtype"], "float32");
    }
    // f16 rounds, and says so.
    let (scratch, export) = (Scratch::new("export-f16"), "export");
    kept(&fixture("models/llama-gptq-w4-g64-sym"), &scratch);
    let (file, export) = (scratch.at("model.qrn"), scratch.at(export));
    let ran = quern(&["export", arg(&file), "--to", "float", "--dtype", "f16", "--out", arg(&export)]).ok();
    ran.prints(&["f16 values nearest to the source's floats"]);
    assert_eq!(json(&export.join("config.json"))["dtype"], "float16");
}

#[test]
fn gguf_comes_back() {
    for kind in ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1"] {
        let scratch = Scratch::new("export-gguf");
        let source = fixture(&format!("gguf/llama-{kind}/model.gguf"));
        let (file, again) = there_and_back(&scratch, &source, &["--to", "gguf"]);
        equal(&file, &again);
    }
}

#[test]
fn other_architectures_of_gguf_come_back() {
    for name in ["qwen2", "qwen3"] {
        let scratch = Scratch::new("export-arch");
        let (file, again) = there_and_back(&scratch, &fixture("models").join(name), &["--to", "gguf"]);
        assert_eq!(file.spec().family, name);
        assert_eq!(file.spec(), again.spec());
        for info in file.tensors() {
            let (a, b) = (file.tensor(&info.name).unwrap(), again.tensor(&info.name).unwrap());
            for (row, col) in (0..a.n).flat_map(|row| (0..a.k).map(move |col| (row, col))) {
                assert_eq!(a.at(row, col), b.at(row, col), "{name}: {} [{row}, {col}]", info.name);
            }
        }
    }
}

#[test]
fn larger_groups_become_blocks_of_gguf() {
    let scratch = Scratch::new("export-blocks");
    let (file, again) = there_and_back(&scratch, &fixture("models/smollm2-gptq-2layer"), &["--to", "gguf"]);
    // Groups of 64 repeat their scales; the codes and what they stand for stay.
    let mut compared = 0;
    for info in file.tensors() {
        let (a, b) = (file.tensor(&info.name).unwrap(), again.tensor(&info.name).unwrap());
        compared += (info.scheme.to_string() == "int4 g64 sym" && b.scheme.to_string() == "int4 g32 sym") as usize;
        for row in 0..a.n {
            (0..a.k).for_each(|col| assert_eq!(a.at(row, col), b.at(row, col), "{} [{row}, {col}]", info.name));
        }
    }
    assert_eq!(compared, 14);
    assert_eq!(file.generation().eos, again.generation().eos);
}

#[test]
fn what_a_format_cannot_hold_is_refused_by_name() {
    let refused = |source: &str, convert: &[&str], flags: &[&str], words: &[&str]| {
        let scratch = Scratch::new("export-refused");
        let (source, file, out) = (fixture(source), scratch.at("model.qrn"), scratch.at("out"));
        quern(&[&["convert", arg(&source), "--out", arg(&file)], convert].concat()).ok();
        quern(&[&["export", arg(&file), "--out", arg(&out)], flags].concat()).fails(words);
        assert_eq!(scratch.names(), ["model.qrn"]);
    };
    let minima = ["model.layers.0.self_attn.q_proj is int4 g32 min", "minima", "--to float"];
    refused("gguf/llama-q4_1/model.gguf", &[], &["--to", "gptq"], &minima);
    refused("gguf/llama-q4_1/model.gguf", &[], &["--to", "awq"], &minima);
    // What the fast layout stores is `-scale * zero`, rounded: a minimum.
    let fast = ["q_proj is int4 g64 min", "minima", "--to float"];
    refused("models/llama-awq-w4-g64-gemv_fast", &[], &["--to", "awq"], &fast);
    refused("gguf/llama-q8_0/model.gguf", &[], &["--to", "awq"], &["q_proj is int8 g32 sym", "AWQ has 4 bits"]);
    refused("models/llama", &[], &["--to", "gptq"], &["no tensor that --to gptq could pack", "--quant int4"]);
    refused("models/llama3-rope", &[], &["--to", "gguf"], &["llama3", "original context 64", "--to float"]);
    refused("models/mistral", &[], &["--to", "gguf"], &["architecture llama, which has no window", "--to float"]);
    refused("models/gemma2", &[], &["--to", "float"], &["a gemma2 model", "norms less one"]);
    refused("models/gpt2", &[], &["--to", "gguf"], &["which has rope", "--to float"]);
    let asym = [
        "model.layers.0.self_attn.q_proj is int4 g64 zero",
        "no f16 number",
        "--to float, or GPTQ integers with --to gptq",
    ];
    refused("models/llama-gptq-w4-g64-asym", &[], &["--to", "gguf"], &asym);
    // The down projection has 96 columns, which 64 does not divide: its groups are 32.
    let groups = ["down_proj is int4 g32 sym", "one group for the whole model", "--to gptq"];
    refused("models/llama", &["--quant", "int4"], &["--to", "awq"], &groups);
}

/// A flat config has the text model's keys beside those of the other parts.
#[test]
fn half_of_a_multimodal_model_is_not_exported_as_a_folder() {
    let scratch = Scratch::new("export-flat");
    let (dir, file, out) = (scratch.at("vl"), scratch.at("model.qrn"), scratch.at("out"));
    fs::create_dir(&dir).unwrap();
    let source = fixture("models/qwen2");
    for entry in fs::read_dir(&source).unwrap().flatten() {
        fs::copy(entry.path(), dir.join(entry.file_name())).unwrap();
    }
    let mut config = json(&source.join("config.json"));
    config["model_type"] = "qwen2_vl".into();
    config["vision_config"] = serde_json::json!({ "depth": 2 });
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    quern(&["convert", arg(&dir), "--out", arg(&file)]).ok();
    for to in ["float", "gptq"] {
        let ran = quern(&["export", arg(&file), "--to", to, "--out", arg(&out)]);
        ran.fails(&["multimodal model (vision_config in its config)", "--to gguf only"]);
        assert!(!out.exists());
    }
}

#[test]
fn groups_that_differ_are_named_in_the_config() {
    let scratch = Scratch::new("export-dynamic");
    let (file, out, again) = (scratch.at("model.qrn"), scratch.at("out"), scratch.at("again.qrn"));
    let source = fixture("models/llama");
    quern(&["convert", arg(&source), "--quant", "int4", "--out", arg(&file)]).ok();
    let ran = quern(&["export", arg(&file), "--to", "gptq", "--out", arg(&out)]).ok();
    ran.says(&["tensor model.embed_tokens is int8 g128 sym", "written as the f32 numbers"]);
    let config = json(&out.join("quantize_config.json"));
    let own = &config["dynamic"][r"+:^model\.layers\.1\.mlp\.down_proj$"];
    assert_eq!((&config["group_size"], &own["group_size"]), (&64.into(), &32.into()), "{config}");
    assert_eq!(config["lm_head"], true);
    assert_eq!(config["dynamic"][r"+:^lm_head$"]["bits"], 8, "{config}");
    quern(&["convert", arg(&out), "--out", arg(&again)]).ok();
    let (a, b) = (ModelFile::open(&file).unwrap(), ModelFile::open(&again).unwrap());
    for info in a.tensors().iter().filter(|t| t.name != "embed") {
        let other = &b.tensors()[b.index(&info.name).unwrap()];
        assert_eq!((info.scheme, info.hash), (other.scheme, other.hash), "{}", info.name);
    }
}

#[test]
fn shards_are_cut_where_they_are_full() {
    let scratch = Scratch::new("export-shards");
    let (report, file) = kept(&fixture("models/llama-gptq-w4-g64-asym"), &scratch);
    let options = ExportOptions { shard_bytes: 100_000, ..ExportOptions::new(Format::Float(Some(FloatType::F32))) };
    let out = scratch.at("out");
    quern_convert::export(&report.path, &out, &options, &mut ()).unwrap();
    let index = json(&out.join("model.safetensors.index.json"));
    let names: std::collections::BTreeSet<&str> =
        index["weight_map"].as_object().unwrap().values().map(|v| v.as_str().unwrap()).collect();
    assert!(names.len() > 5, "{names:?}");
    for name in names {
        let bytes = fs::read(out.join(name)).unwrap();
        let tensors = safetensors::parse(&bytes).unwrap();
        let total: usize = tensors.values().map(|t| t.bytes.len()).sum();
        assert!(total <= 100_000 || tensors.len() == 1, "{name}: {total} bytes in {} tensors", tensors.len());
    }
    let again = convert(&out, &scratch.at("again.qrn"), &Options::default(), &mut ()).unwrap();
    assert_eq!(again.rows.iter().map(|r| r.tensors).sum::<usize>(), file.tensors().len());
}

#[test]
fn what_is_there_is_replaced_only_when_asked() {
    let scratch = Scratch::new("export-force");
    kept(&fixture("models/llama-awq-w4-g32-gemm"), &scratch);
    let (file, out) = (scratch.at("model.qrn"), scratch.at("out"));
    let export = |flags: &[&str]| quern(&[&["export", arg(&file), "--out", arg(&out)], flags].concat());
    fs::create_dir(&out).unwrap();
    export(&["--to", "awq"]).ok();
    export(&["--to", "awq"]).fails(&["out exists", "--force"]);
    export(&["--to", "float", "--force"]).ok();
    assert!(!out.join("quantize_config.json").exists());
    // What no export wrote is not removed.
    let mine = scratch.write("out/thesis.tex", "mine");
    export(&["--to", "awq", "--force"]).fails(&["thesis.tex", "choose another name"]);
    assert_eq!(fs::read(&mine).unwrap(), b"mine");
    let whole = scratch.write("whole", "mine");
    quern(&["export", arg(&file), "--to", "awq", "--out", arg(&whole), "--force"]).fails(&["is no folder"]);
    quern(&["export", arg(&file), "--to", "gguf", "--out", arg(&file), "--force"]).fails(&["part of the source"]);
    assert_eq!(scratch.names(), ["model.qrn", "out", "whole"]);
}

#[test]
fn an_interrupted_export_leaves_nothing() {
    struct Stop;
    impl quern_convert::Progress for Stop {
        fn note(&mut self, _: &str) {}
        fn step(&mut self, _: &quern_convert::Step<'_>) {}
        fn cancelled(&self) -> bool {
            true
        }
    }
    let scratch = Scratch::new("export-stop");
    let (report, _) = kept(&fixture("models/llama"), &scratch);
    for format in [Format::Float(None), Format::Gguf] {
        let error = quern_convert::export(&report.path, &scratch.at("out"), &ExportOptions::new(format), &mut Stop);
        assert!(error.unwrap_err().to_string().contains("interrupted"));
        assert_eq!(scratch.names(), ["model.qrn"]);
    }
}

#[test]
fn flags_that_do_not_belong_together_are_misuse() {
    let scratch = Scratch::new("export-flags");
    let file = scratch.at("model.qrn");
    let export = |flags: &[&str]| quern(&[&["export", arg(&file)], flags].concat());
    export(&["--to", "awq", "--format", "gptq_v2"]).misused(&["--format is for --to gptq"]);
    export(&["--to", "gptq", "--dtype", "f16"]).misused(&["--dtype is for --to float"]);
    export(&["--to", "onnx"]).misused(&["gptq", "awq", "float", "gguf"]);
    export(&[]).misused(&["--to"]);
    export(&["--to", "gptq"]).fails(&["model.qrn", "No such file"]);
}

#[test]
fn a_file_without_its_sources_config_says_so() {
    use quern_models::{FileWriter, Meta, TensorPlan};
    let scratch = Scratch::new("export-old");
    let (_, file) = kept(&fixture("models/llama"), &scratch);
    let mut provenance = file.provenance().clone();
    provenance.as_object_mut().unwrap().remove("config").unwrap();
    let meta = Meta {
        spec: file.spec().clone(),
        tokenizer: None,
        chat_template: None,
        generation: file.generation().clone(),
        provenance,
    };
    let plan =
        |t: &quern_models::TensorInfo| TensorPlan { name: t.name.clone(), dims: t.dims.clone(), scheme: t.scheme };
    let old = scratch.at("old.qrn");
    let mut writer = FileWriter::create(&old, &meta, file.tensors().iter().map(plan).collect()).unwrap();
    (0..file.tensors().len()).for_each(|i| writer.write(file.view(i).codes).unwrap());
    writer.finish().unwrap();
    let ran = quern(&["export", arg(&old), "--to", "float", "--out", arg(&scratch.at("out"))]);
    ran.fails(&["old.qrn", "the config of its source is not in it", "convert the checkpoint again"]);
}
