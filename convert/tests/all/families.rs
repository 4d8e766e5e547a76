//! Sources whose modules lie otherwise than ours: fused, transposed, in a multimodal model, padded.

use std::collections::BTreeMap;

use quern_convert::{Options, Progress, Quant, Step, convert};
use quern_models::{FloatType, ModelFile};
use serde_json::{Value, json};

use crate::made::*;

#[derive(Default)]
struct Notes(Vec<String>);

impl Progress for Notes {
    fn note(&mut self, text: &str) {
        self.0.push(text.into());
    }
    fn step(&mut self, _: &Step<'_>) {}
}

/// The file made from these tensors, and what was said (but that there is no tokenizer).
fn made(name: &str, config: &Value, tensors: &Tensors, options: &Options) -> (ModelFile, Vec<String>) {
    let scratch = Scratch::new(name);
    write(&scratch.model(), config, tensors, "model.safetensors");
    let mut notes = Notes::default();
    let report = convert(&scratch.model(), &scratch.out(), options, &mut notes);
    let report = report.unwrap_or_else(|e| panic!("{name}: {e}"));
    let file = ModelFile::open(&report.path).unwrap();
    file.verify().unwrap();
    notes.0.retain(|note| !note.starts_with("no tokenizer.json"));
    (file, notes.0)
}

fn same(a: &ModelFile, b: &ModelFile) {
    let hashes = |f: &ModelFile| f.tensors().iter().map(|t| (t.name.clone(), t.hash)).collect::<BTreeMap<_, _>>();
    assert_eq!(hashes(a), hashes(b));
    assert_eq!(a.spec(), b.spec());
}

/// Hidden, inner, vocabulary and positions of a GPT-2. Its three parts do not begin at panels of 64 rows.
const SIZES: [usize; 4] = [48, 80, 70, 32];

fn gpt2() -> Value {
    let [hidden, inner, vocab, positions] = SIZES;
    json!({
        "model_type": "gpt2", "n_embd": hidden, "n_head": 2, "n_layer": 1, "n_inner": inner, "vocab_size": vocab,
        "n_positions": positions, "activation_function": "gelu_new",
    })
}

/// Linear layers of a GPT-2: module, outputs, inputs.
const CONV1D: [(&str, usize, usize); 4] = [
    ("h.0.attn.c_attn", 3 * SIZES[0], SIZES[0]),
    ("h.0.attn.c_proj", SIZES[0], SIZES[0]),
    ("h.0.mlp.c_fc", SIZES[1], SIZES[0]),
    ("h.0.mlp.c_proj", SIZES[0], SIZES[1]),
];

/// Everything of a GPT-2 but the weights of its linear layers, in f16.
fn gpt2_around(random: &mut Random, prefix: &str) -> Tensors {
    let [hidden, _, vocab, positions] = SIZES;
    let mut tensors = Tensors::new();
    let mut put = |name: &str, shape: &[usize]| {
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| random.weight()).collect();
        tensors.insert(format!("{prefix}{name}"), ("F16", shape.into(), floats(FloatType::F16, &values)));
    };
    put("wte.weight", &[vocab, hidden]);
    put("wpe.weight", &[positions, hidden]);
    for norm in ["h.0.ln_1", "h.0.ln_2", "ln_f"] {
        put(&format!("{norm}.weight"), &[hidden]);
        put(&format!("{norm}.bias"), &[hidden]);
    }
    for (module, n, _) in CONV1D {
        put(&format!("{module}.bias"), &[n]);
    }
    // Masks that old checkpoints hold.
    put("h.0.attn.bias", &[1, 1, positions, positions]);
    put("h.0.attn.masked_bias", &[1]);
    tensors
}

/// Where each part of a module's outputs goes: our name, first row, rows.
fn parts(module: &str, n: usize) -> Vec<(&'static str, usize, usize)> {
    let third = n / 3;
    match module {
        "h.0.attn.c_attn" => vec![("q", 0, third), ("k", third, third), ("v", 2 * third, third)],
        "h.0.attn.c_proj" => vec![("o", 0, n)],
        "h.0.mlp.c_fc" => vec![("up", 0, n)],
        _ => vec![("down", 0, n)],
    }
}

fn check_parts(file: &ModelFile, module: &str, n: usize, k: usize, at: impl Fn(usize, usize) -> f32) {
    for (name, first, rows) in parts(module, n) {
        let view = file.tensor(&format!("layers.0.{name}")).unwrap();
        assert_eq!((view.n, view.k), (rows, k));
        for (row, col) in (0..rows).flat_map(|row| (0..k).map(move |col| (row, col))) {
            assert_eq!(view.at(row, col), at(first + row, col), "{name} [{row}, {col}]");
        }
    }
}

#[test]
fn fused_and_transposed_layers_of_gpt2_are_taken_apart() {
    for prefix in ["transformer.", ""] {
        let mut random = Random::new(5);
        let mut tensors = gpt2_around(&mut random, prefix);
        let mut weights = vec![];
        for (module, n, k) in CONV1D {
            // As stored: inputs first.
            let values: Vec<f32> = (0..n * k).map(|_| random.weight()).collect();
            let stored = ("F16", vec![k, n], floats(FloatType::F16, &values));
            tensors.insert(format!("{prefix}{module}.weight"), stored);
            weights.push(values);
        }
        for quant in [Quant::Keep, Quant::F16] {
            let options = Options { quant, ..Options::default() };
            let (file, notes) = made("gpt2", &gpt2(), &tensors, &options);
            assert_eq!(notes, Vec::<String>::new());
            for ((module, n, k), values) in CONV1D.iter().zip(&weights) {
                check_parts(&file, module, *n, *k, |row, col| values[col * n + row]);
                for (name, first, rows) in parts(module, *n) {
                    let bias = file.tensor(&format!("layers.0.{name}_bias")).unwrap();
                    let (_, _, stored) = &tensors[&format!("{prefix}{module}.bias")];
                    let at = |row| FloatType::F16.read(stored, first + row);
                    assert!((0..rows).all(|row| bias.at(0, row) == at(row)), "{name}_bias");
                }
            }
            let spec = file.spec();
            assert!(spec.tied_head && spec.positions == Some(SIZES[3]) && spec.max_context == SIZES[3]);
        }
        // Rounded by us: the converter's own verification compares every code.
        let options = Options { quant: Quant::Int4, group: Some(32), ..Options::default() };
        let (file, _) = made("gpt2-int4", &gpt2(), &tensors, &options);
        assert_eq!(file.tensor("layers.0.v").unwrap().scheme.to_string(), "int4 g32 sym");
        assert_eq!(file.tensor("positions").unwrap().scheme.to_string(), "f16");
    }
}

#[test]
fn fused_layers_of_gptq_are_taken_apart_code_by_code() {
    let mut random = Random::new(6);
    for sym in [true, false] {
        let mut tensors = gpt2_around(&mut random, "transformer.");
        let mut all = vec![];
        for (module, n, k) in CONV1D {
            // One group of the whole row; its padding to 32 columns is not stored.
            let chosen = Chosen::new(&mut random, n, k, 4, k.next_multiple_of(32), sym);
            chosen.gptq(&mut tensors, &format!("transformer.{module}"), true, FloatType::F16);
            all.push((module, chosen));
        }
        let mut config = gpt2();
        config["quantization_config"] = json!({"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": sym});
        let (file, _) = made("gpt2-gptq", &config, &tensors, &Options::default());
        for (module, chosen) in &all {
            check_parts(&file, module, chosen.n, chosen.k, |row, col| chosen.at(row, col));
        }
    }
}

/// The made llama inside a multimodal model: names as several writers have them.
#[test]
fn the_text_part_of_a_multimodal_model_is_the_model() {
    let plain = float_model(&mut Random::new(7), FloatType::BF16);
    let (want, _) = made("plain", &config(), &plain, &Options::default());
    for (base, head) in [
        ("language_model.model.", "language_model.lm_head."),
        ("model.language_model.", "lm_head."),
        ("model.text_model.", "lm_head."),
        ("thinker.model.", "thinker.lm_head."),
    ] {
        let rename = |name: &String| match name.strip_prefix("model.") {
            Some(rest) => format!("{base}{rest}"),
            None => name.replace("lm_head.", head),
        };
        let mut tensors: Tensors = plain.iter().map(|(name, t)| (rename(name), t.clone())).collect();
        let other = ("F32", vec![2], vec![1; 8]);
        for name in ["vision_tower.layers.0.weight", "vision_tower.embed.weight", "model.multi_modal_projector.bias"] {
            tensors.insert(name.into(), other.clone());
        }
        let mut wrapper = json!({"model_type": "llava", "vision_config": {"depth": 2}, "image_token_index": 3});
        wrapper["text_config"] = config();
        let (got, notes) = made("wrapped", &wrapper, &tensors, &Options::default());
        same(&got, &want);
        let text = "its text part is taken, 3 tensor(s) of multi_modal_projector, vision_tower are not";
        assert!(notes.len() == 1 && notes[0].contains(text), "{notes:?}");
        // What is no known part is still an error.
        tensors.insert("mystery.weight".into(), other);
        let scratch = Scratch::new("left-over");
        write(&scratch.model(), &wrapper, &tensors, "model.safetensors");
        scratch.fails("1 tensor(s) have no place in the family llama, the first is mystery.weight");
    }
}

/// A publisher padded the embedding and the MLP; the config says what there was before.
#[test]
fn padded_sizes_come_from_the_tensors() {
    let check = |name: &str, tensors: &Tensors, quantization: Option<Value>| {
        let mut smaller = config();
        smaller["vocab_size"] = json!(VOCAB - 6);
        smaller["intermediate_size"] = json!(INNER - 32);
        if let Some(quantization) = quantization {
            smaller["quantization_config"] = quantization;
        }
        let (file, notes) = made(name, &smaller, tensors, &Options::default());
        assert_eq!((file.spec().vocab, file.spec().layers[0].mlp.inner()), (VOCAB, INNER));
        let said = |text: &str| notes.iter().any(|n| n.contains(text));
        assert!(said("vocab_size is 64, but") && said(&format!("up_proj has {INNER} rows")), "{notes:?}");
    };
    check("padded", &float_model(&mut Random::new(8), FloatType::F16), None);
    for method in ["gptq", "awq"] {
        let mut random = Random::new(9);
        let mut tensors = around(&mut random);
        for (_, module, n, k) in LINEARS {
            let chosen = Chosen::new(&mut random, n, k, 4, 32, false);
            match method {
                "gptq" => chosen.gptq(&mut tensors, module, true, FloatType::F16),
                _ => chosen.awq(&mut tensors, module, FloatType::F16),
            }
        }
        let quantization = json!({"quant_method": method, "bits": 4, "group_size": 32, "version": "gemm"});
        check(&format!("padded-{method}"), &tensors, Some(quantization));
    }
}

/// All-zero biases that a quantizer added are ignored; others have no place.
#[test]
fn qwen2_takes_its_biases_and_no_others() {
    let mut random = Random::new(10);
    let mut tensors = float_model(&mut random, FloatType::F16);
    let mut bias = |tensors: &mut Tensors, module: &str, n: usize, zero: bool| {
        let values: Vec<f32> = (0..n).map(|_| if zero { 0.0 } else { random.weight() }).collect();
        let name = format!("model.layers.0.{module}.bias");
        tensors.insert(name, ("F32", vec![n], floats(FloatType::F32, &values)));
    };
    for (module, n) in [("self_attn.q_proj", HIDDEN), ("self_attn.k_proj", 32), ("self_attn.v_proj", 32)] {
        bias(&mut tensors, module, n, false);
    }
    bias(&mut tensors, "self_attn.o_proj", HIDDEN, true);
    let mut qwen2 = config();
    qwen2["model_type"] = json!("qwen2");
    let (file, notes) = made("qwen2", &qwen2, &tensors, &Options::default());
    assert!(notes.is_empty() && file.tensor("layers.0.k_bias").is_some() && file.tensor("layers.0.o_bias").is_none());
    bias(&mut tensors, "self_attn.o_proj", HIDDEN, false);
    let scratch = Scratch::new("qwen2-o");
    write(&scratch.model(), &qwen2, &tensors, "model.safetensors");
    scratch.fails("the first is model.layers.0.self_attn.o_proj.bias");
}
