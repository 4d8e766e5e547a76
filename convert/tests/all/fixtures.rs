//! Checkpoints made by other tools: our numbers must be theirs.

use std::{fs, ops::Add};

use quern_convert::{Options, source::safetensors};
use quern_models::{FloatType, ModelFile};

use crate::made::{Scratch, fixture};

const QUANTIZED: [&str; 18] = [
    "llama-ct-w4a16-g64-asym",
    "llama-ct-w2a16-g32",
    "llama-ct-w8a8-int",
    "llama-ct-fp8-block",
    "llama-ct-mxfp4a16",
    "llama-gptq-w4-g64-sym",
    "llama-gptq-w4-g64-asym",
    "llama-gptq-w4-g128-sym",
    "llama-gptq_v2-w4-g64-sym",
    "llama-awq-w4-g64-gemm",
    "llama-awq-w4-g32-gemm",
    "llama-gptq-w2-g32-sym",
    "llama-gptq-w3-g32-sym",
    "llama-gptq-w4-g32-sym-descact",
    "llama-gptq_v2-w2-g64-asym",
    "llama-gptq_v2-w4-g32-asym-descact",
    "llama-awq-w4-g64-gemv_fast",
    "smollm2-gptq-2layer",
];

/// Our name of a source module.
fn target(module: &str) -> String {
    let (layer, rest) = module.strip_prefix("model.layers.").unwrap().split_once('.').unwrap();
    let ours = rest.rsplit('.').next().unwrap().strip_suffix("_proj").unwrap();
    format!("layers.{layer}.{ours}")
}

#[test]
fn dequantized_weights_are_those_of_the_tools() {
    for name in QUANTIZED {
        let scratch = Scratch::new(name);
        let (report, file) = scratch.convert_from(&fixture(&format!("models/{name}")), &Options::default()).unwrap();
        let method =
            if name.contains("-ct-") { "compressed-tensors" } else { ["gptq", "awq"][name.contains("awq") as usize] };
        assert_eq!(report.method, method);
        assert!(report.verified.codes > 0 && report.verified.floats > 0, "{}", report.verified);
        let golden = fs::read(fixture(&format!("models/{name}/golden.safetensors"))).unwrap();
        let golden = safetensors::parse(&golden).unwrap();
        let model = fs::read(fixture(&format!("models/{name}/model.safetensors"))).unwrap();
        let model = safetensors::parse(&model).unwrap();
        let mut compared = 0;
        for (key, raw) in golden.iter().filter(|g| g.0.starts_with("dequant.")) {
            let view = file.tensor(&target(&key["dequant.".len()..])).unwrap();
            assert_eq!(raw.shape, [32, view.k as u64]);
            // In act-order the file's columns are the source's, sorted by group. (`down` of the fixtures, whose rows
            // are where they were.)
            let index = model.get(&key.replace("dequant.", "").add(".g_idx"));
            let index = index.map(|raw| raw.bytes.chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())));
            let index: Vec<i32> = index.map_or(vec![0; view.k], Iterator::collect);
            let mut from: Vec<usize> = (0..view.k).collect();
            from.sort_by_key(|&col| index[col]);
            for row in 0..32 {
                for (col, &from) in from.iter().enumerate() {
                    let expected = FloatType::F32.read(raw.bytes, row * view.k + from);
                    // Within one rounding: some tools multiply in another order.
                    assert!(
                        (view.at(row, col) - expected).abs() <= expected.abs() * 1e-6,
                        "{name} {key} [{row}, {col}]"
                    );
                }
            }
            compared += 1;
        }
        assert_eq!(compared, 2, "{name}");
    }
}

#[test]
fn both_gptq_versions_of_a_model_give_the_same_file() {
    let open = |name: &str| {
        let scratch = Scratch::new(&format!("versions-{name}"));
        scratch.convert_from(&fixture(&format!("models/{name}")), &Options::default()).unwrap().1
    };
    same_tensors(&open("llama-gptq-w4-g64-sym"), &open("llama-gptq_v2-w4-g64-sym"));
}

/// llm-awq's own name for the float zero-points; otherwise the same format.
#[test]
fn llm_awq_is_gemv_fast_by_another_name() {
    let open = |name: &str, change: &dyn Fn(Vec<u8>) -> Vec<u8>| {
        let scratch = Scratch::new(&format!("llm-awq-{name}"));
        let source = fixture("models/llama-awq-w4-g64-gemv_fast");
        for part in ["config.json", "quantize_config.json"] {
            let config = fs::read_to_string(source.join(part)).unwrap();
            fs::write(scratch.model().join(part), config.replace("gemv_fast", name)).unwrap();
        }
        let model = change(fs::read(source.join("model.safetensors")).unwrap());
        fs::write(scratch.model().join("model.safetensors"), model).unwrap();
        scratch.convert(&Options::default()).unwrap().1
    };
    let renamed = |bytes: Vec<u8>| {
        let (len, rest) = bytes.split_first_chunk::<8>().unwrap();
        let (header, data) = rest.split_at(u64::from_le_bytes(*len) as usize);
        let header = String::from_utf8(header.to_vec()).unwrap().replace(".qzeros", ".scaled_zeros");
        [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
    };
    same_tensors(&open("gemv_fast", &|bytes| bytes), &open("llm-awq", &renamed));
}

#[test]
fn what_stands_beside_the_tensors_comes_along() {
    let scratch = Scratch::new("beside");
    let source = fixture("models/smollm2-gptq-2layer");
    let (_, file) = scratch.convert_from(&source, &Options::default()).unwrap();
    assert_eq!(file.tokenizer_json().unwrap(), fs::read(source.join("tokenizer.json")).unwrap());
    assert_eq!(file.chat_template().unwrap(), fs::read_to_string(source.join("chat_template.jinja")).unwrap());
    let generation = file.generation();
    assert_eq!((&generation.eos[..], generation.bos, generation.do_sample), (&[2][..], Some(1), Some(true)));
    assert_eq!(generation.eos_text.as_deref(), Some("<|im_end|>"));
    let provenance = file.provenance();
    assert_eq!(provenance["source"], "smollm2-gptq-2layer");
    assert_eq!(
        (&provenance["method"], &provenance["bits"], &provenance["group"]),
        (&"gptq".into(), &4.into(), &64.into())
    );
    assert_eq!(provenance["tools"][0], "gptqmodel:7.7.0");
    assert!(file.spec().tied_head);
}

/// Every tensor of two files is the same.
pub fn same_tensors(a: &ModelFile, b: &ModelFile) {
    assert_eq!(a.spec(), b.spec());
    for info in a.tensors() {
        let (x, y) = (a.tensor(&info.name).unwrap(), b.tensor(&info.name).unwrap());
        assert_eq!((x.scheme, x.codes, x.scales, x.zeros), (y.scheme, y.codes, y.scales, y.zeros), "{}", info.name);
    }
}

/// config.json and quantize_config.json of one checkpoint.
#[test]
fn two_quantizer_configs_complete_each_other_or_are_refused() {
    let source = fixture("models/llama-gptq_v2-w4-g32-asym-descact");
    let (_, expected) = Scratch::new("config-one").convert_from(&source, &Options::default()).unwrap();
    let scratch = Scratch::new("config-two");
    for name in ["config.json", "model.safetensors"] {
        fs::copy(source.join(name), scratch.model().join(name)).unwrap();
    }
    let own = |text: &str| fs::write(scratch.model().join("quantize_config.json"), text).unwrap();
    // Without the format, which would make the zero-points one more.
    own(r#"{"bits": 4, "group_size": 32, "sym": false, "desc_act": true}"#);
    let (_, file) = scratch.convert(&Options::default()).unwrap();
    same_tensors(&file, &expected);
    fs::remove_file(scratch.out()).unwrap();
    for (text, said) in [
        (r#"{"checkpoint_format": "gptq"}"#, r#"config.json says format "gptq_v2", quantize_config.json says "gptq""#),
        (r#"{"group_size": 64}"#, "config.json says group_size 32, quantize_config.json says 64"),
        (r#"{"sym": true}"#, "config.json says sym false, quantize_config.json says true"),
        (r#"{"bits": 3}"#, "config.json says bits 4, quantize_config.json says 3"),
    ] {
        own(text);
        scratch.fails(said);
    }
}
