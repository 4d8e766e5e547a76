//! GGUF files of a model that also exists as safetensors: names, row order, blocks, tokenizer.

use std::fs;

use quern_convert::{Options, Quant, source};
use quern_models::{FloatType, ModelFile, Scheme, spec::Attn};
use serde_json::{Value, json};

use crate::made::{Scratch, fixture};

fn open(path: &str, options: &Options) -> ModelFile {
    let scratch = Scratch::new(&path.replace('/', "-"));
    scratch.convert_from(&fixture(path), options).unwrap().1
}

#[test]
fn float_ggufs_are_the_safetensors_model() {
    let original = open("models/llama", &Options::default());
    for (kind, exact) in [("f32", true), ("bf16", true), ("f16", false)] {
        let file = open(&format!("gguf/llama-{kind}"), &Options::default());
        assert_eq!(file.spec(), original.spec());
        for info in original.tensors() {
            let (a, b) = (original.tensor(&info.name).unwrap(), file.tensor(&info.name).unwrap());
            for (row, col) in (0..a.n).flat_map(|r| (0..a.k).map(move |c| (r, c))) {
                let (expected, got) = (a.at(row, col), b.at(row, col));
                let expected = if exact { expected } else { half::f16::from_f32(expected).to_f32() };
                assert_eq!(got, expected, "{kind} {} [{row}, {col}]", info.name);
            }
        }
    }
}

#[test]
fn blocks_are_near_the_weights_they_were_made_of() {
    let original = open("models/llama", &Options::default());
    for (kind, linear, embed, steps) in [
        ("q8_0", "int8 g32 sym", "int8 g32 sym", 0.57),
        ("q4_0", "int4 g32 sym", "int8 g32 sym", 1.01),
        ("q4_1", "int4 g32 min", "int8 g32 sym", 0.57),
    ] {
        let file = open(&format!("gguf/llama-{kind}"), &Options { quant: Quant::Int8, ..Options::default() });
        assert_eq!(file.tensor("layers.1.k").unwrap().scheme.to_string(), linear);
        assert_eq!(file.tensor("embed").unwrap().scheme.to_string(), embed);
        for info in file.tensors() {
            let (a, b) = (original.tensor(&info.name).unwrap(), file.tensor(&info.name).unwrap());
            let Scheme::Int { group, scale, .. } = b.scheme else { continue };
            let at = quern_models::p64::Shape::new(b.n, b.k, 4, group as usize);
            for (row, col) in (0..a.n).flat_map(|r| (0..a.k).map(move |c| (r, c))) {
                let step = scale.read(b.scales, at.cell(row, col / 32)).abs();
                let off = (a.at(row, col) - b.at(row, col)).abs();
                // Scales and minima are rounded to f16 themselves: 127 of them make .06 of a step.
                assert!(off <= steps * step, "{kind} {} [{row}, {col}]: {off}, step {step}", info.name);
            }
        }
    }
}

#[test]
fn the_vocabulary_becomes_the_tokenizer_again() {
    let original: Value = serde_json::from_slice(&fs::read(fixture("models/llama/tokenizer.json")).unwrap()).unwrap();
    let file = open("gguf/llama-q4_0", &Options::default());
    let rebuilt: Value = serde_json::from_slice(file.tokenizer_json().unwrap()).unwrap();
    assert_eq!(rebuilt["model"]["merges"], original["model"]["merges"]);
    let vocab = |v: &Value| v["model"]["vocab"].as_object().unwrap().clone();
    for (token, id) in vocab(&original) {
        assert_eq!(vocab(&rebuilt)[&token], id);
    }
    assert_eq!(rebuilt["added_tokens"], original["added_tokens"]);
    assert_eq!(rebuilt["pre_tokenizer"]["pretokenizers"][0], json!({ "type": "Digits", "individual_digits": true }));
    assert_eq!(rebuilt["pre_tokenizer"]["pretokenizers"][1]["use_regex"], true);
}

/// A GGUF of so many tensors, up to the list of them.
fn bytes_of(entries: &[(&str, Meta)], tensors: usize) -> Vec<u8> {
    let text = |s: &str| [&(s.len() as u64).to_le_bytes()[..], s.as_bytes()].concat();
    let mut b = b"GGUF\x03\0\0\0".to_vec();
    b.extend((tensors as u64).to_le_bytes());
    b.extend((entries.len() as u64).to_le_bytes());
    for (key, value) in entries {
        b.extend(text(key));
        match value {
            Meta::Text(s) => b.extend([&[8, 0, 0, 0], &text(s)[..]].concat()),
            Meta::Texts(list) => {
                b.extend([9, 0, 0, 0, 8, 0, 0, 0]);
                b.extend((list.len() as u64).to_le_bytes());
                list.iter().for_each(|s| b.extend(text(s)));
            }
            Meta::Number(n) => b.extend([&[4, 0, 0, 0], &n.to_le_bytes()[..]].concat()),
            Meta::Numbers(list) => {
                b.extend([9, 0, 0, 0, 5, 0, 0, 0]);
                b.extend((list.len() as u64).to_le_bytes());
                list.iter().for_each(|n| b.extend(n.to_le_bytes()));
            }
            Meta::Float(f) => b.extend([&[6, 0, 0, 0], &f.to_le_bytes()[..]].concat()),
            Meta::Flag(f) => b.extend([7, 0, 0, 0, *f as u8]),
        }
    }
    b
}

/// A GGUF of small tensors that is valid up to where the metadata is looked at.
fn bytes(entries: &[(&str, Meta)], tensors: &[&str]) -> Vec<u8> {
    let text = |s: &str| [&(s.len() as u64).to_le_bytes()[..], s.as_bytes()].concat();
    let mut b = bytes_of(entries, tensors.len());
    const SIZE: usize = 3 * 32 * 4;
    for (i, name) in tensors.iter().enumerate() {
        let at = (i * SIZE) as u64;
        b.extend(text(name));
        b.extend([&[2, 0, 0, 0], &32u64.to_le_bytes()[..], &3u64.to_le_bytes(), &[0; 4], &at.to_le_bytes()].concat());
    }
    b.resize(b.len().next_multiple_of(32) + tensors.len() * SIZE, 0);
    b
}

#[derive(Clone)]
enum Meta {
    Text(&'static str),
    Texts(&'static [&'static str]),
    Number(u32),
    Numbers(&'static [i32]),
    Float(f32),
    Flag(bool),
}

fn base() -> Vec<(&'static str, Meta)> {
    vec![
        ("general.architecture", Meta::Text("llama")),
        ("llama.block_count", Meta::Number(1)),
        ("llama.embedding_length", Meta::Number(32)),
        ("llama.feed_forward_length", Meta::Number(32)),
        ("llama.attention.head_count", Meta::Number(1)),
        ("llama.attention.layer_norm_rms_epsilon", Meta::Float(1e-5)),
        ("tokenizer.ggml.model", Meta::Text("gpt2")),
        ("tokenizer.ggml.pre", Meta::Text("qwen2")),
        ("tokenizer.ggml.tokens", Meta::Texts(&["<s>", "a", "\u{120}b"])),
        ("tokenizer.ggml.token_type", Meta::Numbers(&[3, 1, 4])),
        ("tokenizer.ggml.merges", Meta::Texts(&[])),
        ("tokenizer.ggml.bos_token_id", Meta::Number(0)),
        ("tokenizer.ggml.eos_token_id", Meta::Number(0)),
        ("tokenizer.ggml.eot_token_id", Meta::Number(1)),
    ]
}

/// What `base` says with some entries changed or added.
fn read<R>(
    changes: &[(&'static str, Meta)],
    tensors: &[&str],
    look: impl Fn(source::Checkpoint) -> R,
) -> Result<R, String> {
    let mut entries = base();
    entries.retain(|e| changes.iter().all(|c| c.0 != e.0));
    entries.extend_from_slice(changes);
    let bytes = bytes(&entries, tensors);
    let gguf = source::gguf::parse(&bytes).map_err(|e| e.to_string())?;
    source::gguf::checkpoint(&gguf, "t").map(look).map_err(|e| e.to_string())
}

/// Config, tokenizer and end tokens with one entry changed or added.
fn with(key: &'static str, value: Meta) -> Result<(Value, Value, Vec<u32>), String> {
    read(&[(key, value)], &["token_embd.weight"], |checkpoint| {
        let tokenizer = serde_json::from_slice(&checkpoint.tokenizer.unwrap_or(b"null".into())).unwrap();
        (checkpoint.config, tokenizer, checkpoint.generation.eos)
    })
}

#[test]
fn turns_end_at_the_tokens_that_are_known_to_end_them() {
    let tokens = Meta::Texts(&["<s>", "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|im_start|>"]);
    let end = |types: &'static [i32]| {
        let changes = [("tokenizer.ggml.tokens", tokens.clone()), ("tokenizer.ggml.token_type", Meta::Numbers(types))];
        read(&changes, &["token_embd.weight"], |c| (c.generation.eos, c.notes)).unwrap()
    };
    // 0 and 1 are named by the metadata; ordinary (1) and user-defined (4) tokens are text.
    let (eos, notes) = end(&[3, 3, 3, 3, 3, 3]);
    assert_eq!(eos, [0, 1, 2, 3, 4]);
    assert_eq!(notes.len(), 3);
    assert!(notes[0].contains("<|im_end|> (2) ends an answer too"), "{notes:?}");
    let (eos, notes) = end(&[3, 1, 1, 4, 3, 3]);
    assert_eq!((&eos[..], notes.len()), (&[0, 1, 4][..], 1));
}

#[test]
fn two_tensors_of_one_name_are_an_error() {
    let tensors = ["token_embd.weight", "output_norm.weight", "blk.0.ffn_up.weight"];
    assert_eq!(read(&[], &tensors, |c| c.tensors.len()), Ok(3));
    for (gguf, ours) in [("output_norm", "model.norm"), ("blk.0.ffn_up", "model.layers.0.mlp.up_proj")] {
        let (gguf, ours) = (format!("{gguf}.weight"), format!("{ours}.weight"));
        for pair in [[&gguf, &ours], [&ours, &gguf]] {
            let text = read(&[], &["token_embd.weight", pair[0], pair[1]], |_| ()).unwrap_err();
            assert!(text.contains(&format!("one that means {ours}, got {} and {}", pair[0], pair[1])), "{text}");
        }
    }
}

#[test]
fn pre_tokenizers_are_those_the_names_stand_for() {
    let pre = |name| with("tokenizer.ggml.pre", Meta::Text(name)).map(|r| r.1);
    let qwen2 = pre("qwen2").unwrap();
    assert_eq!(qwen2["normalizer"]["type"], "NFC");
    let regex = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    assert_eq!(qwen2["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"], regex);
    assert_eq!(qwen2["post_processor"], Value::Null);
    assert_eq!(qwen2["added_tokens"][1]["special"], false);
    let llama = pre("llama-bpe").unwrap();
    let split = llama["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"].as_str().unwrap().to_string();
    assert_eq!(split, regex.replace(r"|\p{N}|", r"|\p{N}{1,3}|"));
    assert_eq!(llama["model"]["ignore_merges"], true);
    assert_eq!(llama["post_processor"]["single"][0]["SpecialToken"]["id"], "<s>");
    assert_eq!(pre("gpt-2").unwrap()["pre_tokenizer"]["type"], "ByteLevel");
    assert_eq!(pre("tekken").unwrap()["model"]["ignore_merges"], true);
    let error = pre("chameleon").unwrap_err();
    assert!(error.contains("pre-tokenizer chameleon") && error.contains("knows a.x-4.0, "), "{error}");
    let bos = with("tokenizer.ggml.add_bos_token", Meta::Flag(true)).unwrap().1;
    assert_eq!(bos["post_processor"]["special_tokens"]["<s>"]["ids"], json!([0]));
    assert_eq!(bos["post_processor"]["pair"].as_array().unwrap().len(), 4);
}

#[test]
fn metadata_becomes_a_config_or_a_refusal() {
    let (config, _, eos) = with("llama.context_length", Meta::Number(77)).unwrap();
    assert_eq!((&config["max_position_embeddings"], &config["num_key_value_heads"]), (&json!(77), &json!(1)));
    assert_eq!((&config["tie_word_embeddings"], &config["vocab_size"]), (&json!(true), &json!(3)));
    assert_eq!(config["rms_norm_eps"].as_f64().unwrap() as f32, 1e-5);
    assert_eq!(eos, [0, 1]);
    let linear = with("llama.rope.scaling.factor", Meta::Float(4.0)).unwrap().0;
    assert_eq!(linear["rope_parameters"]["rope_type"], "linear");
    for (key, value, message) in [
        ("general.architecture", Meta::Text("gemma3n"), "architecture gemma3n"),
        ("tokenizer.ggml.model", Meta::Text("llama"), "tokenizer.ggml.scores: expected 3 numbers, got nothing"),
        ("tokenizer.ggml.model", Meta::Text("bert"), "a vocabulary of kind bert (WordPiece"),
        ("llama.expert_count", Meta::Number(8), "expert_count"),
        ("llama.rope.dimension_count", Meta::Number(16), "rope.dimension_count"),
        ("llama.attention.head_count", Meta::Number(0), "head_count"),
        ("llama.attention.head_count", Meta::Text("many"), "head_count"),
        ("llama.attention.head_count_kv", Meta::Numbers(&[1, 2]), "head_count_kv"),
        ("llama.attention.layer_norm_rms_epsilon", Meta::Float(f32::NAN), "epsilon"),
        ("tokenizer.ggml.token_type", Meta::Numbers(&[1]), "token_type"),
        ("tokenizer.ggml.merges", Meta::Texts(&["ab"]), "merges"),
        ("tokenizer.ggml.merges", Meta::Texts(&["a b"]), "\"b\" is not in the vocabulary"),
        ("tokenizer.ggml.tokens", Meta::Texts(&["a", "a", "b"]), "twice"),
    ] {
        let text = with(key, value).unwrap_err();
        assert!(text.contains(message), "{key}: {text}");
    }
}

/// Base metadata under another architecture's name.
fn base_of(arch: &'static str) -> Vec<(&'static str, Meta)> {
    let other = |(key, value): (&'static str, Meta)| match key.strip_prefix("llama.") {
        Some(rest) => (format!("{arch}.{rest}").leak() as &'static str, value),
        None if key == "general.architecture" => (key, Meta::Text(arch)),
        None => (key, value),
    };
    base().into_iter().map(other).collect()
}

/// Config and tensor names of an architecture.
fn arch(arch: &'static str, more: &[(&'static str, Meta)], tensors: &[&str]) -> Result<(Value, Vec<String>), String> {
    let mut entries = base_of(arch);
    entries.retain(|e| more.iter().all(|m| m.0 != e.0));
    let bytes = bytes(&[&entries[..], more].concat(), tensors);
    let gguf = source::gguf::parse(&bytes).map_err(|e| e.to_string())?;
    let checkpoint = source::gguf::checkpoint(&gguf, "t").map_err(|e| e.to_string())?;
    Ok((checkpoint.config, checkpoint.tensors.into_keys().collect()))
}

#[test]
fn architectures_are_families() {
    let tensors = ["token_embd.weight", "output.weight", "blk.0.attn_k_norm.weight", "blk.0.attn_q.bias"];
    let (qwen3, names) = arch("qwen3", &[("qwen3.attention.key_length", Meta::Number(8))], &tensors).unwrap();
    assert_eq!((&qwen3["model_type"], &qwen3["head_dim"]), (&json!("qwen3"), &json!(8)));
    assert_eq!((&qwen3["attention_bias"], &qwen3["tie_word_embeddings"]), (&json!(true), &json!(false)));
    let layer = "model.layers.0.self_attn";
    assert_eq!(
        names,
        [
            "lm_head.weight",
            "model.embed_tokens.weight",
            &format!("{layer}.k_norm.weight"),
            &format!("{layer}.q_proj.bias")
        ]
    );
    let (qwen2, _) = arch("qwen2", &[], &tensors).unwrap();
    assert_eq!((&qwen2["model_type"], qwen2.get("attention_bias")), (&json!("qwen2"), None));
    let (smollm3, _) = arch("smollm3", &[], &["token_embd.weight"]).unwrap();
    assert_eq!((&smollm3["no_rope_layer_interval"], &smollm3["tie_word_embeddings"]), (&json!(4), &json!(true)));
    let gpt2 = [("gpt2.context_length", Meta::Number(9)), ("gpt2.attention.layer_norm_epsilon", Meta::Float(1e-5))];
    let tensors = ["token_embd.weight", "position_embd.weight", "blk.0.attn_qkv.bias", "blk.0.ffn_up.weight"];
    let (config, names) = arch("gpt2", &gpt2, &tensors).unwrap();
    assert_eq!((&config["n_positions"], &config["n_inner"], &config["n_head"]), (&json!(9), &json!(32), &json!(1)));
    let layer = "transformer.h.0";
    let ours = [&format!("{layer}.attn.c_attn.bias"), &format!("{layer}.mlp.c_fc.weight"), "transformer.wpe.weight"];
    assert_eq!(names[..3], ours);
    let (mistral, _) =
        arch("llama", &[("llama.attention.sliding_window", Meta::Number(16))], &["token_embd.weight"]).unwrap();
    assert_eq!((&mistral["model_type"], &mistral["sliding_window"]), (&json!("mistral"), &json!(16)));
    let window = arch("qwen2", &[("qwen2.attention.sliding_window", Meta::Number(16))], &["token_embd.weight"]);
    assert!(window.unwrap_err().contains("qwen2.attention.sliding_window is 16"));
    let text = arch("gemma3n", &[], &["token_embd.weight"]).unwrap_err();
    let known = "llama, qwen2, qwen3, smollm3, gemma2, gemma3, gpt2";
    assert!(text.contains("architecture gemma3n") && text.contains(known), "{text}");
    // Sizes of Gemma 2 27B, whose scale comes from its width.
    let large = [("gemma2.block_count", Meta::Number(46)), ("gemma2.attention.key_length", Meta::Number(8))];
    let (large, _) = arch("gemma2", &large, &["token_embd.weight"]).unwrap();
    assert_eq!((&large["query_pre_attn_scalar"], &large["head_dim"]), (&json!(32), &json!(8)));
}

/// The fixtures of Gemma as llama.cpp's converter stores such models: other names, one added to the weights of norms.
#[test]
fn gemma_ggufs_are_the_safetensors_model() {
    for (family, layers) in [("gemma2", 2), ("gemma3", 3)] {
        let dir = fixture(&format!("models/{family}"));
        let bytes = fs::read(dir.join("model.safetensors")).unwrap();
        let stored = source::safetensors::parse(&bytes).unwrap();
        let key = |name: &str| format!("{family}.{name}").leak() as &'static str;
        let mut entries = vec![
            ("general.architecture", Meta::Text(family)),
            (key("block_count"), Meta::Number(layers)),
            (key("context_length"), Meta::Number(256)),
            (key("embedding_length"), Meta::Number(128)),
            (key("feed_forward_length"), Meta::Number(96)),
            (key("attention.head_count"), Meta::Number(4)),
            (key("attention.head_count_kv"), Meta::Number(2)),
            (key("attention.key_length"), Meta::Number(32)),
            (key("attention.value_length"), Meta::Number(32)),
            (key("attention.layer_norm_rms_epsilon"), Meta::Float(1e-6)),
            (key("attention.sliding_window"), Meta::Number(16)),
            ("tokenizer.ggml.model", Meta::Text("none")),
        ];
        if family == "gemma2" {
            entries.push((key("attn_logit_softcapping"), Meta::Float(6.0)));
            entries.push((key("final_logit_softcapping"), Meta::Float(12.0)));
        } else {
            entries.push((key("attention.sliding_window_pattern"), Meta::Number(3)));
            entries.push((key("rope.freq_base"), Meta::Float(1e6)));
            entries.push((key("rope.scaling.type"), Meta::Text("linear")));
            entries.push((key("rope.scaling.factor"), Meta::Float(8.0)));
        }
        let names = [
            ("model.embed_tokens", "token_embd"),
            ("model.norm", "output_norm"),
            ("model.layers.", "blk."),
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", "post_attention_norm"),
            ("pre_feedforward_layernorm", "ffn_norm"),
            ("post_feedforward_layernorm", "post_ffw_norm"),
            ("self_attn.q_proj", "attn_q"),
            ("self_attn.k_proj", "attn_k"),
            ("self_attn.v_proj", "attn_v"),
            ("self_attn.o_proj", "attn_output"),
            ("self_attn.q_norm", "attn_q_norm"),
            ("self_attn.k_norm", "attn_k_norm"),
            ("mlp.gate_proj", "ffn_gate"),
            ("mlp.up_proj", "ffn_up"),
            ("mlp.down_proj", "ffn_down"),
        ];
        let (mut table, mut data) = (vec![], vec![]);
        for (name, t) in &stored {
            let plus = if name.ends_with("norm.weight") { 1.0 } else { 0.0 };
            let name = names.iter().fold(name.clone(), |name, (from, to)| name.replace(from, to));
            table.extend([&(name.len() as u64).to_le_bytes()[..], name.as_bytes()].concat());
            table.extend((t.shape.len() as u32).to_le_bytes());
            t.shape.iter().rev().for_each(|d| table.extend(d.to_le_bytes()));
            table.extend([&[0; 4][..], &(data.len() as u64).to_le_bytes()].concat());
            let value = |b: &[u8]| half::bf16::from_le_bytes([b[0], b[1]]).to_f32() + plus;
            data.extend(t.bytes.chunks_exact(2).flat_map(|b| value(b).to_le_bytes()));
            data.resize(data.len().next_multiple_of(32), 0);
        }
        let mut gguf = bytes_of(&entries, stored.len());
        gguf.extend(table);
        gguf.resize(gguf.len().next_multiple_of(32), 0);
        gguf.extend(data);
        let scratch = Scratch::new(&format!("gemma-gguf-{family}"));
        let path = scratch.model().join("model.gguf");
        fs::write(&path, gguf).unwrap();
        let file = scratch.convert_from(&path, &Options::default()).unwrap().1;
        let original = open(&format!("models/{family}"), &Options::default());
        // The scale of scores is not in such files; the fixture's is another than its size would have.
        let mut expected = original.spec().clone();
        for layer in &mut expected.layers {
            let Attn::Gqa { scale, .. } = &mut layer.attn;
            *scale = (1.0 / 32f64.sqrt()) as f32;
        }
        assert_eq!(file.spec(), &expected);
        for info in original.tensors() {
            let (a, b) = (original.tensor(&info.name).unwrap(), file.tensor(&info.name).unwrap());
            for (row, col) in (0..a.n).flat_map(|r| (0..a.k).map(move |c| (r, c))) {
                assert_eq!(a.at(row, col), b.at(row, col), "{family} {} [{row}, {col}]", info.name);
            }
        }
    }
}

#[test]
fn yarn_is_what_llama_cpp_makes_of_it() {
    let yarn = |more: &[(&'static str, Meta)]| {
        let said = [
            ("llama.rope.scaling.type", Meta::Text("yarn")),
            ("llama.rope.scaling.factor", Meta::Float(4.0)),
            ("llama.rope.scaling.original_context_length", Meta::Number(77)),
        ];
        let said = [&said[..], more].concat();
        arch("llama", &said, &["token_embd.weight"]).map(|(config, _)| config["rope_parameters"].clone())
    };
    let rope = yarn(&[]).unwrap();
    assert_eq!((&rope["rope_type"], &rope["factor"]), (&json!("yarn"), &json!(4.0)));
    assert_eq!(rope["original_max_position_embeddings"], 77);
    assert_eq!((&rope["beta_fast"], &rope["beta_slow"]), (&json!(32.0), &json!(1.0)));
    let usual = 0.1 * 4f64.ln() + 1.0;
    assert_eq!(rope["attention_factor"], usual);
    let half = yarn(&[("llama.rope.scaling.attn_factor", Meta::Float(0.5))]).unwrap();
    assert_eq!(half["attention_factor"], usual / 2.0);
    let all = yarn(&[("llama.rope.scaling.yarn_log_multiplier", Meta::Float(1.0))]).unwrap();
    assert_eq!(all["attention_factor"], 1.0);
    let mixed = yarn(&[("llama.rope.scaling.yarn_ext_factor", Meta::Float(0.5))]).unwrap_err();
    assert!(mixed.contains("yarn_ext_factor is 0.5"), "{mixed}");
    // Two scalings at once: one of them would be lost.
    let said = [("llama.rope.scaling.type", Meta::Text("linear")), ("llama.rope.scaling.factor", Meta::Float(4.0))];
    let both = arch("llama", &said, &["token_embd.weight", "rope_freqs.weight"]).unwrap_err();
    assert!(both.contains("rope_freqs.weight and llama.rope.scaling.type linear together"), "{both}");
    let other = with("llama.rope.scaling.type", Meta::Text("longrope")).unwrap().0;
    assert_eq!(other["rope_parameters"]["rope_type"], "longrope");
}

/// Metadata and tensors of a part.
type Part<'a> = (&'a [(&'static str, Meta)], &'a [&'a str]);

/// Writes the parts of a split model, the first with `base` besides; `None` leaves one out.
fn parts(scratch: &Scratch, all: &[Option<Part>]) -> std::path::PathBuf {
    for (i, part) in all.iter().enumerate() {
        let Some((meta, tensors)) = part else { continue };
        let meta = if i == 0 { [&base()[..], meta].concat() } else { meta.to_vec() };
        let name = format!("m-{:05}-of-{:05}.gguf", i + 1, all.len());
        fs::write(scratch.model().join(name), bytes(&meta, tensors)).unwrap();
    }
    scratch.model().join(format!("m-00001-of-{:05}.gguf", all.len()))
}

/// What `split.no`, `split.count` and `split.tensors.count` say.
fn place(no: u32, count: u32, tensors: u32) -> Vec<(&'static str, Meta)> {
    vec![
        ("split.no", Meta::Number(no)),
        ("split.count", Meta::Number(count)),
        ("split.tensors.count", Meta::Number(tensors)),
    ]
}

#[test]
fn any_part_of_a_model_is_the_model() {
    let whole = fixture("gguf/llama-q5_k-split");
    let names = |path: &std::path::Path| {
        let source = source::Source::open(path).unwrap();
        let files = source.paths();
        let checkpoint = source.read().unwrap();
        (files.len(), checkpoint.name, checkpoint.tensors.into_keys().collect::<Vec<_>>())
    };
    let (files, name, tensors) = names(&whole);
    assert_eq!((files, name.as_str(), tensors.len()), (2, "model-00001-of-00002.gguf", 12));
    for part in ["model-00001-of-00002.gguf", "model-00002-of-00002.gguf"] {
        assert_eq!(names(&whole.join(part)), (files, name.clone(), tensors.clone()));
    }
}

#[test]
fn parts_that_do_not_fit_are_named() {
    let embed = &["token_embd.weight"][..];
    let (first, second) = (place(0, 2, 2), place(1, 2, 2));
    let error = |all: &[Option<Part>]| {
        let scratch = Scratch::new("parts");
        let path = parts(&scratch, all);
        match source::Source::open(&path) {
            Ok(source) => source.read().map(|c| c.tensors.len()).map_err(|e| e.to_string()),
            Err(e) => Err(e.to_string()),
        }
    };
    let good = Some((&second[..], &["output.weight"][..]));
    assert_eq!(error(&[Some((&first, embed)), good]), Ok(2));
    for (all, message) in [
        ([Some((&first[..], embed)), None], "m-00002-of-00002.gguf: part 2 of 2 of the model is missing"),
        ([Some((&first, embed)), Some((&second, embed))], "token_embd.weight in parts 1 and 2"),
        ([Some((&first, embed)), Some((&first, &["output.weight"]))], "expected part 2 of 2, got part 1 of 2"),
        ([Some((&first, embed)), Some((&[], &["output.weight"]))], "expected part 2 of 2, got part 1 of 1"),
        ([Some((&place(0, 2, 3), embed)), good], "expected 3 tensors in all parts, got 2"),
        ([Some((&place(2, 2, 2), embed)), good], "split.no: expected a whole number below 2"),
        ([Some((&place(0, 70000, 2), embed)), good], "split.count: expected a whole number below 65536"),
        ([Some((&place(0, 3, 2), embed)), good], "its name does not end in -00001-of-00003.gguf"),
    ] {
        let text = error(&all).unwrap_err();
        assert!(text.contains(message), "{message}: {text}");
    }
    let scratch = Scratch::new("renamed");
    let path = scratch.model().join("model.gguf");
    fs::write(&path, bytes(&[&base()[..], &first].concat(), embed)).unwrap();
    let text = source::Source::open(&path).unwrap_err().to_string();
    assert!(text.contains("part 1 of 2 of a model, but its name does not end in -00001-of-00002.gguf"), "{text}");
}

#[test]
fn what_the_family_refuses_names_the_file() {
    let scratch = Scratch::new("gguf-family");
    let mut entries = base();
    entries.push(("llama.attention.head_count_kv", Meta::Number(2)));
    let path = scratch.model().join("x.gguf");
    fs::write(&path, bytes(&entries, &["token_embd.weight"])).unwrap();
    let text = scratch.convert_from(&path, &Options::default()).err().unwrap().to_string();
    assert!(text.starts_with("x.gguf: config.json: "), "{text}");
}

#[test]
fn the_largest_weights_of_a_file_are_counted_once() {
    let scratch = Scratch::new("counts");
    let (report, file) = scratch.convert_from(&fixture("gguf/llama-q4_1/model.gguf"), &Options::default()).unwrap();
    assert_eq!(report.weights(), file.tensors().iter().map(|t| t.dims.iter().product::<u64>()).sum::<u64>());
    assert_eq!(report.file_bytes, fs::metadata(scratch.out()).unwrap().len());
    assert!(report.verified.minima > 0 && report.verified.minima < report.verified.scales);
    assert_eq!(FloatType::F16.size(), 2);
}
