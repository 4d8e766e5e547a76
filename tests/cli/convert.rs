//! `quern convert`: the closing table, the verified line, and refusals.

use std::{fs, path::Path};

use serde_json::Value;

use crate::support::{
    Scratch, fixture,
    program::{Ran, arg, command, quern},
};

/// Weights of all linear layers, by a checkpoint's config.
fn linear_weights(dir: &Path) -> u64 {
    let config: Value = serde_json::from_slice(&fs::read(dir.join("config.json")).unwrap()).unwrap();
    let n = |key: &str| config[key].as_u64().unwrap();
    let (hidden, inner, head) = (n("hidden_size"), n("intermediate_size"), n("head_dim"));
    let attention = 2 * hidden * head * (n("num_attention_heads") + n("num_key_value_heads"));
    n("num_hidden_layers") * (attention + 3 * hidden * inner)
}

#[test]
fn the_summary_says_what_was_written_and_that_it_was_compared() {
    let scratch = Scratch::new("convert");
    for (name, scheme, zeros) in [
        ("llama-gptq-w4-g64-sym", "int4 g64 sym", false),
        ("llama-gptq-w4-g64-asym", "int4 g64 zero", true),
        ("llama-awq-w4-g32-gemm", "int4 g32 zero", true),
    ] {
        let source = fixture("models").join(name);
        let out = scratch.at(&format!("{name}.qrn"));
        let ran = quern(&["convert", arg(&source), "--out", arg(&out)]).ok();
        let codes = quern_convert::grouped(linear_weights(&source));
        let method = if name.contains("awq") { "(awq)" } else { "(gptq)" };
        let bytes = fs::metadata(&out).unwrap().len();
        let ran =
            ran.prints(&["bits/weight", scheme, "bf16", &format!("verified: {codes} codes"), "equal to the source"]);
        let ran = ran.prints(&[&format!("{} {method} in ", arg(&out)), &quern::cli::size(bytes)]);
        assert_eq!(ran.out.contains(" 0 zeros"), !zeros, "{}", ran.out);
    }
}

#[test]
fn float_weights_become_what_was_asked() {
    let scratch = Scratch::new("convert-quant");
    let source = fixture("models/llama");
    let convert = |flags: &[&str]| {
        let out = scratch.at("out.qrn");
        quern(&[&["convert", arg(&source), "--force", "--out", arg(&out)], flags].concat())
    };
    convert(&[]).ok().prints(&["bf16", "floats equal to the source", "(float)"]);
    convert(&["--quant", "f16"]).ok().prints(&["f16 values nearest to the source's floats"]);
    convert(&["--quant", "int8"]).ok().prints(&["int8 g128 sym", "codes nearest to the source's floats"]);
    // 96 columns of the down projection are no multiple of 64.
    convert(&["--quant", "int4"]).ok().prints(&["int4 g64 sym", "int4 g32 sym", "int8 g128 sym"]);
    let kept = convert(&["--quant", "int4", "--group", "32", "--lm-head", "keep"]).ok();
    assert!(!kept.out.contains("int8") && kept.out.contains("bf16"), "{}", kept.out);
    for group in ["0", "48", "-64", "x", "131072"] {
        convert(&["--quant", "int4", &format!("--group={group}")]).misused(&["--group", group]);
    }
    convert(&["--quant", "int3"]).misused(&["--quant", "keep, f16, int8, int4"]);
    // Integers stay what they are.
    let gptq = fixture("models/llama-gptq-w4-g64-sym");
    let out = scratch.at("gptq.qrn");
    let ran = quern(&["convert", arg(&gptq), "--quant", "int8", "--out", arg(&out)]).ok();
    ran.says(&["note:", "quantized already"]).prints(&["int4 g64 sym"]);
}

#[test]
fn the_output_is_named_after_the_model() {
    let scratch = Scratch::new("convert-name");
    let source = fixture("models/llama");
    let mut here = command(&["convert", arg(&source)]);
    let ran = Ran::of(here.current_dir(scratch.path())).ok();
    ran.prints(&["llama.qrn (float)"]);
    let folder = scratch.at("folder");
    fs::create_dir(&folder).unwrap();
    let gguf = fixture("gguf/llama-q4_0/model.gguf");
    quern(&["convert", arg(&gguf), "--out", arg(&folder)]).ok().prints(&["folder/llama-q4_0.qrn (gguf)"]);
    assert_eq!(scratch.names(), ["folder", "llama.qrn"]);
}

#[test]
fn an_existing_file_is_replaced_only_when_asked() {
    let scratch = Scratch::new("convert-force");
    let (source, out) = (fixture("models/llama"), scratch.write("model.qrn", "mine"));
    quern(&["convert", arg(&source), "--out", arg(&out)]).fails(&["model.qrn exists", "--force"]);
    assert_eq!(fs::read(&out).unwrap(), b"mine");
    quern(&["convert", arg(&source), "--out", arg(&out), "--force"]).ok();
    quern(&["info", arg(&out), "--verify"]).ok();
    // An error leaves even a file that may be replaced as it was.
    let before = fs::read(&out).unwrap();
    let broken = scratch.copy(&source, "broken");
    fs::remove_file(broken.join("config.json")).unwrap();
    quern(&["convert", arg(&broken), "--out", arg(&out), "--force"]).fails(&["no config.json"]);
    assert_eq!(fs::read(&out).unwrap(), before);
    assert_eq!(scratch.names(), ["broken", "model.qrn"]);
}

/// Fails with these words and leaves nothing behind.
fn refused(source: &str, words: &[&str]) {
    let scratch = Scratch::new("convert-refused");
    let out = scratch.at("out.qrn");
    quern(&["convert", source, "--out", arg(&out)]).fails(words);
    assert_eq!(scratch.names(), [""; 0], "{source}");
}

#[test]
fn what_is_no_checkpoint_is_refused() {
    let scratch = Scratch::new("convert-sources");
    refused(arg(&scratch.at("missing")), &["missing", "no such file or directory"]);
    refused("HuggingFaceTB/SmolLM2-135M", &["no such file or directory", "hf download HuggingFaceTB/SmolLM2-135M"]);
    let empty = scratch.at("empty");
    fs::create_dir(&empty).unwrap();
    refused(arg(&empty), &["empty", "no .safetensors and no .gguf file in it"]);
    let text = scratch.write("notes.txt", "It was a dark and stormy night.");
    refused(arg(&text), &["notes.txt"]);
    let pickle = scratch.write("pickle/pytorch_model.bin", b"PK\x03\x04");
    refused(arg(&pickle), &["PyTorch pickle", "safetensors version"]);
    refused(arg(pickle.parent().unwrap()), &["PyTorch pickle"]);
    let done = scratch.at("done.qrn");
    quern(&["convert", arg(&fixture("models/llama")), "--out", arg(&done)]).ok();
    refused(arg(&done), &["done.qrn", "a .qrn file"]);
}

#[test]
fn a_model_of_another_family_is_named() {
    let scratch = Scratch::new("convert-family");
    let dir = scratch.copy(&fixture("models/llama"), "mamba");
    let config = fs::read_to_string(dir.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["model_type"] = "mamba".into();
    config["architectures"] = serde_json::json!(["MambaForCausalLM"]);
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    refused(arg(&dir), &["model_type", "mamba", "llama"]);
}

#[test]
fn damaged_tensors_are_refused_by_name() {
    let scratch = Scratch::new("convert-damage");
    let dir = scratch.copy(&fixture("models/llama"), "model");
    let path = dir.join("model.safetensors");
    let good = fs::read(&path).unwrap();
    let with = |bytes: &[u8], words: &[&str]| {
        fs::write(&path, bytes).unwrap();
        refused(arg(&dir), words);
    };
    with(&good[..good.len() - 1], &["model.safetensors", "cut short"]);
    with(&good[..100], &["model.safetensors", "header", "cut short"]);
    with(&good[..5], &["model.safetensors", "header's length"]);
    with(&[&good[..], b"more"].concat(), &["model.safetensors", "bytes of all tensors"]);
    with(&[&u64::MAX.to_le_bytes(), &good[8..]].concat(), &["model.safetensors", "header length"]);
    let header = String::from_utf8_lossy(&good[8..]).find("\"dtype\"").unwrap() + 8;
    let mut bad = good.clone();
    bad[header] = b'!';
    with(&bad, &["model.safetensors", "header"]);
    // A tensor that the model needs under another name.
    let at = good.windows(9).position(|w| w == b"down_proj").unwrap();
    let mut bad = good.clone();
    bad[at] = b'b';
    with(&bad, &["down_proj"]);
}

#[test]
fn a_name_from_the_source_cannot_forge_a_line() {
    let scratch = Scratch::new("forged");
    let dir = scratch.copy(&fixture("models/llama"), "model");
    let config = fs::read_to_string(dir.join("config.json")).unwrap();
    let forged = config.replacen('{', r#"{"quantization_config": {"quant_method": "x\nquern: done \u001b[2J"},"#, 1);
    fs::write(dir.join("config.json"), forged).unwrap();
    let ran = quern(&["convert", arg(&dir), "--out", arg(&scratch.at("x.qrn"))]);
    let ran = ran.fails(&["quantization format"]);
    assert_eq!(ran.err.lines().count(), 1, "{}", ran.err);
    assert!(!ran.err.contains('\u{1b}'), "{:?}", ran.err);
}

#[test]
fn a_draft_model_goes_into_the_file() {
    let scratch = Scratch::new("convert-draft");
    let [small, both, joined] = ["small.qrn", "both.qrn", "joined.qrn"].map(|name| scratch.at(name));
    let source = fixture("models/smollm2-gptq-2layer");
    quern(&["convert", arg(&source), "-o", arg(&small)]).ok();
    quern(&["convert", arg(&source), "-o", arg(&both), "--draft", arg(&small)]).ok().prints(&["with a draft model of"]);
    quern(&["info", arg(&both), "--verify"]).ok().prints(&["draft model", "llama, 2 layers"]);
    let answer = |flags: &[&str]| {
        let asked = ["run", arg(&both), "-p", "hello", "--temperature", "0.8", "--seed", "4", "--max-tokens", "40"];
        quern(&[&asked[..], flags].concat()).ok()
    };
    let (plain, guessed) = (answer(&["--speculate", "off"]), answer(&["--speculate", "draft:4"]));
    assert_eq!(plain.out, guessed.out);
    assert!(guessed.err.contains("guessed") && !plain.err.contains("guessed"), "{} {}", guessed.err, plain.err);
    // A file as the source needs a name, and is replaced only when asked.
    let join = |flags: &[&str]| quern(&[&["convert", arg(&small), "--draft", arg(&small)], flags].concat());
    join(&[]).misused(&["--out"]);
    join(&["-o", arg(&joined)]).ok();
    join(&["-o", arg(&joined)]).fails(&["exists", "--force"]);
    join(&["-o", arg(&joined), "--force"]).ok();
    assert_eq!(fs::read(&joined).unwrap().len() as u64, 2 * fs::metadata(&small).unwrap().len());
    // Other tokens, and no draft at all.
    let other = scratch.at("other.qrn");
    quern(&["convert", arg(&fixture("models/llama")), "-o", arg(&other)]).ok();
    let refused = quern(&["convert", arg(&small), "--draft", arg(&other), "-o", arg(&joined), "--force"]);
    refused.fails(&["--draft", "the same tokens"]);
    quern(&["run", arg(&small), "--draft", arg(&other), "-p", "x"]).misused(&["--draft", "the same tokens"]);
    quern(&["run", arg(&small), "--speculate", "draft", "-p", "x"])
        .misused(&["--speculate: draft needs a small model", "--draft FILE"]);
    let own = quern(&["run", arg(&both), "--speculate", "eagle", "-p", "x"]);
    own.misused(&["--speculate: eagle needs a head of the kind eagle, and what the file has is a small model"]);
    let given = ["run", arg(&small), "--draft", arg(&small), "--speculate", "medusa", "-p", "x"];
    quern(&given)
        .misused(&["--speculate: medusa needs a head of the kind medusa, and that of --draft is a small model"]);
    quern(&["run", arg(&small), "--speculate", "nonsense", "-p", "x"]).misused(&["expected off, auto"]);
    quern(&["run", arg(&small), "--accept", "maybe", "-p", "x"]).misused(&["exact or rejection"]);
}

#[test]
fn a_head_goes_into_the_file_or_beside_it() {
    let scratch = Scratch::new("convert-head");
    let [model, head, both, again, none] =
        ["model.qrn", "head.qrn", "both.qrn", "again.qrn", "none.qrn"].map(|name| scratch.at(name));
    let [llama, eagle, mimo] = ["models/llama", "heads/eagle3", "heads/mimo"].map(fixture);
    quern(&["convert", arg(&llama), "-o", arg(&model)]).ok();
    // A file of its own, quantized; into a copy of the model's file from there and from the checkpoint; in one go.
    let own = ["convert", arg(&eagle), "--for", arg(&model), "-o", arg(&head), "--head-quant", "int4"];
    quern(&own).ok().prints(&["int4", "codes nearest"]);
    quern(&["info", arg(&head), "--verify"]).ok().prints(&[
        "head of      eagle3, 1 layer",
        "eagle, from states before layers 0, 1, 2 of width 128; knows 96 of 320 tokens; the embedding is the model's",
    ]);
    let said = ["with a head (eagle) of"];
    quern(&["convert", arg(&model), "--head", arg(&head), "-o", arg(&both)]).ok().prints(&said);
    quern(&["convert", arg(&model), "--head", arg(&eagle), "-o", arg(&both)]).fails(&["exists", "--force"]);
    quern(&["convert", arg(&model), "--head", arg(&eagle), "-o", arg(&both), "--force"]).ok().prints(&said);
    let once = quern(&["convert", arg(&llama), "--head", arg(&eagle), "-o", arg(&again)]).ok().prints(&said);
    once.prints(&["codes nearest to the source's floats"]);
    assert_eq!(fs::metadata(&both).unwrap().len(), fs::metadata(&again).unwrap().len());
    quern(&["info", arg(&both), "--verify"]).ok().prints(&["llama, 2 layers", "head behind", "eagle3; eagle, from"]);
    quern(&["convert", arg(&mimo), "-o", arg(&again), "--force"]).ok().prints(&["with a head (mtp) of"]);
    // A head is no model.
    for command in ["run", "eval", "bench", "export"] {
        let more: &[&str] = match command {
            "run" => &["-p", "x"],
            "eval" => &["--text", arg(&head)],
            "export" => &["--to", "float"],
            _ => &[],
        };
        quern(&[&[command, arg(&head)], more].concat()).fails(&["expected a model, got a head (eagle)", "--draft"]);
    }
    quern(&["convert", arg(&eagle), "-o", arg(&none)]).fails(&["a head (EAGLE-3), not a model", "--head", "--for"]);
    quern(&["convert", arg(&model), "--head", arg(&model), "-o", arg(&none)]).misused(&["a model, not a head"]);
    quern(&["convert", arg(&model), "--head", arg(&eagle)]).misused(&["--out"]);
    quern(&["convert", arg(&llama), "--head", arg(&eagle), "--draft", arg(&head)]).misused(&["cannot be used with"]);
    let other = ["convert", arg(&again), "--head", arg(&head), "-o", arg(&none)];
    quern(&other).fails(&["--head: the head is for another model", "expected hidden size 128, vocabulary 320"]);
    assert!(!none.exists());
    // Before the work, which takes minutes.
    let other = quern(&["convert", arg(&mimo), "--head", arg(&head), "-o", arg(&none)]);
    let other = other.fails(&["--head: the head is for another model", "expected hidden size 128, vocabulary 320"]);
    assert!(!none.exists() && other.out.is_empty(), "{}", other.out);
    // A damaged head, or model, is found before a file is replaced.
    let damaged = scratch.at("damaged.qrn");
    for good in [&head, &model] {
        let mut bytes = fs::read(good).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&damaged, bytes).unwrap();
        let [source, of] = if good == &head { [&both, &damaged] } else { [&damaged, &head] };
        let before = fs::read(&both).unwrap();
        quern(&["convert", arg(source), "--head", arg(of), "-o", arg(&both), "--force"]).fails(&["its hash is"]);
        assert_eq!(before, fs::read(&both).unwrap());
    }
    // The model alone goes out again, and says so.
    let out = scratch.at("float");
    let exported = quern(&["export", arg(&both), "--to", "float", "-o", arg(&out)]).ok();
    assert!(exported.err.contains("the head behind the model is left out"), "{}", exported.err);
}
