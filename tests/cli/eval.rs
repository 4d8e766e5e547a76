//! `quern eval`: perplexity, distances between models, and logits that other programs can compare with.

mod quality;

use std::fs;

use super::converted;
use crate::support::{
    fixture,
    golden::{Golden, distance},
    program::{arg, quern},
};

#[test]
fn the_written_logits_are_the_golden_ones() {
    for name in ["models/llama", "models/llama-awq-w4-g64-gemm", "gguf/llama-q4_0"] {
        let dir = fixture(name);
        let golden = Golden::read(&dir);
        let source = if dir.join("model.gguf").exists() { format!("{name}/model.gguf") } else { name.to_string() };
        let (scratch, file) = converted(&source);
        let ids = golden.ids("input_ids").iter().map(u32::to_string).collect::<Vec<_>>();
        let list = scratch.write("ids.txt", ids.join(" ") + "\n");
        let out = scratch.at("logits.safetensors");
        let exact = ["--activations", "f32", "--kv", "f32"];
        for ids in [format!("@{}", arg(&list)), ids.join(",")] {
            let args = ["eval", arg(&file), "--ids", &ids, "--logits", arg(&out)];
            quern(&[&args[..], &exact].concat()).ok().prints(&["logits [56, 320]", "f32"]);
            let written = Golden::of(&fs::read(&out).unwrap());
            let (ours, theirs) = (written.floats("logits"), golden.floats("logits"));
            assert_eq!(ours.cols, theirs.cols);
            let apart = distance(&ours.data, &theirs.data);
            assert!(apart <= golden.exact_bound(theirs.range()), "{name}: {apart}");
        }
        // Default mode says so, and differs.
        quern(&["eval", arg(&file), "--ids", &ids.join(","), "--logits", arg(&out), "--threads", "1"])
            .ok()
            .prints(&["int8 activations, f16 KV", "1 thread"]);
        assert_eq!(fs::read(&out).unwrap().len() % 8, 0);
    }
}

#[test]
fn a_long_text_in_steps_is_the_same_text() {
    // More tokens than the command computes at once.
    let (scratch, file) = converted("models/llama");
    let ids: Vec<String> = (0..200).map(|i| (i * 7 % 320).to_string()).collect();
    let logits = |ids: &[String]| {
        let out = scratch.at("logits.safetensors");
        quern(&["eval", arg(&file), "--ids", &ids.join(","), "--logits", arg(&out)]).ok();
        Golden::of(&fs::read(&out).unwrap()).floats("logits").data.clone()
    };
    let (all, half) = (logits(&ids), logits(&ids[..90]));
    assert_eq!(all.len(), 200 * 320);
    assert_eq!(all[..half.len()], half, "a position does not know what follows it");
}

#[test]
fn ids_that_cannot_be_are_refused() {
    let (scratch, file) = converted("models/llama");
    let out = scratch.at("logits.safetensors");
    let eval = |ids: &str| quern(&["eval", arg(&file), "--ids", ids, "--logits", arg(&out)]);
    eval("1,320").misused(&["token 320", "320 tokens"]);
    eval("1,two").misused(&["--ids", "\"two\""]);
    eval(",").misused(&["--ids", "at least one"]);
    eval("@/nonexistent/ids").fails(&["/nonexistent/ids"]);
    eval(&"1,".repeat(300)).misused(&["300 tokens", "at most 256"]);
    assert!(!out.exists());
    let nowhere = scratch.at("no/such/folder/logits.safetensors");
    quern(&["eval", arg(&file), "--ids", "1", "--logits", arg(&nowhere)]).fails(&["no/such/folder", "No such file"]);
}

/// What is overwritten is replaced as a whole, and never the model or a device.
#[test]
fn the_output_is_a_file_of_its_own() {
    let (scratch, file) = converted("models/llama");
    let model = fs::read(&file).unwrap();
    quern(&["eval", arg(&file), "--ids", "1,2", "--logits", arg(&file)]).misused(&["the model's own file"]);
    let link = scratch.at("link.qrn");
    std::os::unix::fs::symlink(&file, &link).unwrap();
    quern(&["eval", arg(&link), "--ids", "1,2", "--logits", arg(&file)]).misused(&["the model's own file"]);
    assert!(fs::read(&file).unwrap() == model, "the model was touched");
    quern(&["eval", arg(&file), "--ids", "1", "--logits", "/dev/null"]).fails(&["/dev/null", "not a regular file"]);
    let out = scratch.write("old.safetensors", "old");
    quern(&["eval", arg(&file), "--ids", "1,2", "--logits", arg(&out)]).ok();
    assert_eq!(Golden::of(&fs::read(&out).unwrap()).floats("logits").data.len(), 2 * 320);
}

#[test]
fn what_is_read_is_not_written_over_and_has_an_end() {
    let (scratch, file) = converted("models/llama");
    let ids = scratch.write("ids.txt", "1,2,3");
    let given = format!("@{}", arg(&ids));
    quern(&["eval", arg(&file), "--ids", &given, "--logits", arg(&ids)]).misused(&["that is the file of --ids"]);
    assert_eq!(fs::read_to_string(&ids).unwrap(), "1,2,3");
    let out = scratch.at("out.safetensors");
    let endless = quern(&["eval", arg(&file), "--ids", "@/dev/zero", "--logits", arg(&out)]);
    endless.fails(&["/dev/zero: expected a regular file"]);
    quern(&["eval", arg(&file), "--text", "/dev/zero"]).fails(&["/dev/zero: expected a regular file"]);
}
