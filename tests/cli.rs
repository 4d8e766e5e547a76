//! The program as its users meet it: what each command prints, what it refuses and in which words.

mod bench;
mod convert;
mod eval;
mod export;
mod info;
mod run;

use std::{path::PathBuf, process::Stdio};

use crate::support::{
    Scratch, fixture,
    model::kept,
    program::{Ran, arg, command, quern},
};

/// A converted fixture, and the folder it lies in.
fn converted(name: &str) -> (Scratch, PathBuf) {
    let scratch = Scratch::new("cli");
    kept(&fixture(name), &scratch);
    let path = scratch.at("model.qrn");
    (scratch, path)
}

#[test]
fn help_and_version_are_not_errors() {
    quern(&["--help"]).ok().prints(&[
        "convert",
        "export",
        "run",
        "serve",
        "bench",
        "eval",
        "info",
        "0 done, 1 failed, 2 wrong usage",
    ]);
    quern(&["--version"]).ok().prints(&[env!("CARGO_PKG_VERSION")]);
    for name in ["convert", "export", "run", "serve", "bench", "eval", "info"] {
        quern(&[name, "--help"]).ok().prints(&["Usage: quern", name]);
    }
}

#[test]
fn wrong_usage_is_status_2() {
    quern::<&str>(&[]).misused(&["Usage"]);
    quern(&["fly"]).misused(&["fly"]);
    for name in ["convert", "export", "run", "serve", "bench", "eval", "info"] {
        quern(&[name]).misused(&["required", "Usage"]);
        quern(&[name, "x", "--colour"]).misused(&["--colour"]);
    }
}

#[test]
fn files_that_are_no_models_are_refused_by_every_command() {
    let scratch = Scratch::new("cli-files");
    let text = scratch.write("notes.qrn", "not a model at all, but long enough to have a header of 64 bytes or more");
    let empty = scratch.write("empty.qrn", "");
    let missing = scratch.at("missing.qrn");
    let logits = scratch.at("logits.safetensors");
    let commands = |file: &PathBuf| {
        let file = arg(file).to_string();
        let list = |args: &[&str]| args.iter().map(|a| a.replace("FILE", &file)).collect::<Vec<_>>();
        [
            list(&["info", "FILE"]),
            list(&["export", "FILE", "--to", "float", "--out", arg(&logits)]),
            list(&["run", "FILE", "-p", "x"]),
            list(&["eval", "FILE", "--ids", "1", "--logits", arg(&logits)]),
            list(&["bench", "FILE"]),
        ]
    };
    for args in commands(&text) {
        quern(&args).fails(&["notes.qrn", "not a .qrn file", "quern convert"]);
    }
    // A checkpoint is what people try first.
    let gguf = fixture("gguf/llama-f32/model.gguf");
    let folder = fixture("models/llama");
    for (source, what) in [(&gguf, "got a GGUF file"), (&folder, "got a folder")] {
        for args in commands(source) {
            quern(&args).fails(&["expected a .qrn file", what, "convert it first: quern convert"]);
        }
    }
    for args in commands(&empty) {
        quern(&args).fails(&["empty.qrn", "empty"]);
    }
    for args in commands(&missing) {
        let ran = quern(&args).fails(&["missing.qrn", "No such file"]);
        assert_eq!(ran.err.matches("missing.qrn").count(), 1, "the path is named once: {}", ran.err);
    }
    assert!(!logits.exists());
}

#[test]
fn a_full_disk_is_an_error() {
    let (scratch, file) = converted("models/llama");
    let out = scratch.at("logits.safetensors");
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    for args in [
        &["info", arg(&file)][..],
        &["eval", arg(&file), "--ids", "1", "--logits", arg(&out)],
        &["run", arg(&file), "-p", "Hello", "-n", "2"],
    ] {
        let child = command(args).stdout(full()).stderr(Stdio::piped()).spawn().unwrap();
        Ran::new(child.wait_with_output().unwrap()).fails(&["stdout", "No space left"]);
    }
    quern(&["eval", arg(&file), "--ids", "1", "--logits", "/dev/full"]).fails(&["/dev/full", "not a regular file"]);
}

#[test]
fn a_reader_who_went_away_ends_the_program_quietly() {
    let (scratch, file) = converted("models/smollm2-gptq-2layer");
    let (source, out) = (fixture("models/llama"), scratch.at("again.qrn"));
    let logits = scratch.at("logits.safetensors");
    for args in [
        &["info", arg(&file), "--tensors"][..],
        &["info", arg(&file), "--json"],
        &["convert", arg(&source), "--out", arg(&out)],
        &["eval", arg(&file), "--ids", "1,2,3", "--logits", arg(&logits)],
        &["run", arg(&file), "-p", "Hello", "-n", "20", "--ignore-eos"],
        &["run", arg(&file), "-p", "Hello", "-n", "3", "--json"],
        &["bench", arg(&file), "-p", "4", "-n", "2", "-r", "1"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = command(args);
        let child = command.stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
        let ran = Ran::new(child.wait_with_output().unwrap());
        assert_eq!(ran.code, Some(0), "{args:?}: {ran:?}");
        assert!(!ran.err.to_lowercase().contains("pipe"), "{args:?}: {ran:?}");
    }
}
