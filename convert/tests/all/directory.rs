//! What stands beside the tensors: templates, special tokens, licences, in the places people put them.

use std::{fs, path::Path};

use quern_convert::{Options, Progress, Step, convert};
use quern_models::{FloatType, ModelFile};
use serde_json::{Value, json};

use crate::made::*;

/// Converts a float model with `files` beside it; the file and the notes.
fn beside(name: &str, files: &[(&str, &str)]) -> (ModelFile, Vec<String>) {
    struct Notes(Vec<String>);
    impl Progress for Notes {
        fn note(&mut self, text: &str) {
            self.0.push(text.into());
        }
        fn step(&mut self, step: &Step<'_>) {
            assert!(step.bytes_done <= step.bytes && step.tensors_done <= step.tensors);
        }
    }
    let scratch = Scratch::new(name);
    let dir = scratch.model();
    write(&dir, &config(), &float_model(&mut Random::new(31), FloatType::F16), "model.safetensors");
    for (path, text) in files {
        fs::create_dir_all(dir.join(path).parent().unwrap_or(Path::new("."))).unwrap();
        fs::write(dir.join(path), text).unwrap();
    }
    let mut notes = Notes(vec![]);
    convert(&dir, &scratch.out(), &Options::default(), &mut notes).unwrap();
    (ModelFile::open(&scratch.out()).unwrap(), notes.0)
}

/// Files and the template expected.
type Case<'a> = (&'a [(&'a str, &'a str)], Option<&'a str>);

#[test]
fn templates_are_found_in_all_their_places() {
    let string = json!({ "chat_template": "string" }).to_string();
    let list = json!({ "chat_template": [
        { "name": "tool_use", "template": "tools" }, { "name": "default", "template": "list" },
    ] });
    let odd = json!({ "chat_template": [{ "name": "rag", "template": "rag" }] }).to_string();
    let list = list.to_string();
    let cases: [Case; 8] = [
        (&[], None),
        (&[("chat_template.jinja", "file"), ("tokenizer_config.json", &string)], Some("file")),
        (&[("tokenizer_config.json", &string)], Some("string")),
        (&[("tokenizer_config.json", &list)], Some("list")),
        (&[("tokenizer_config.json", &odd)], Some("rag")),
        (&[("chat_template.json", &string)], Some("string")),
        (&[("additional_chat_templates/default.jinja", "more")], Some("more")),
        (&[("additional_chat_templates/tool_use.jinja", "tool"), ("tokenizer_config.json", "{}")], Some("tool")),
    ];
    for (i, (files, expected)) in cases.into_iter().enumerate() {
        let (file, notes) = beside(&format!("template-{i}"), files);
        assert_eq!(file.chat_template(), expected, "{files:?}");
        assert_eq!(notes.iter().any(|n| n.contains("default chat template")), matches!(expected, Some("rag" | "tool")));
    }
}

#[test]
fn generation_defaults_come_from_wherever_they_stand() {
    let own = json!({ "eos_token_id": [5, 6], "temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": true })
        .to_string();
    let tokens = json!({ "bos_token": null, "eos_token": { "content": "<end>", "special": true } }).to_string();
    let map = json!({ "bos_token": "<begin>" }).to_string();
    let files: [(&str, &str); 3] =
        [("generation_config.json", &own), ("tokenizer_config.json", &tokens), ("special_tokens_map.json", &map)];
    let (file, notes) = beside("generation", &files);
    let g = file.generation();
    assert_eq!((&g.eos[..], g.bos, g.temperature, g.top_k), (&[5, 6][..], Some(1), Some(0.6), Some(20)));
    assert_eq!((g.bos_text.as_deref(), g.eos_text.as_deref()), (Some("<begin>"), Some("<end>")));
    assert!(file.tokenizer_json().is_none() && notes.iter().any(|n| n.contains("no tokenizer.json")), "{notes:?}");
    assert_eq!(beside("generation-none", &[]).0.generation().eos, [2, 3]);
}

#[test]
fn the_end_token_is_looked_up_by_its_text_where_no_id_is_given() {
    let mut silent = config();
    silent.as_object_mut().unwrap().remove("eos_token_id");
    let silent = silent.to_string();
    let tokens = json!({ "eos_token": "<end>" }).to_string();
    let added = |text: &str| json!({ "added_tokens": [{ "id": 4, "content": "<s>" }, { "id": 7, "content": text }] });
    let (known, unknown) = (added("<end>").to_string(), added("<other>").to_string());
    for (name, config, tokenizer, expected) in [
        ("eos-text", Some(&silent[..]), &known[..], &[7][..]),
        ("eos-id", None, &known, &[2, 3]),
        ("eos-unknown", Some(&silent), &unknown, &[]),
        ("eos-no-list", Some(&silent), "{}", &[]),
    ] {
        let mut files = vec![("tokenizer_config.json", &tokens[..]), ("tokenizer.json", tokenizer)];
        files.extend(config.map(|c| ("config.json", c)));
        let (file, notes) = beside(name, &files);
        assert_eq!(file.generation().eos, expected, "{name}");
        assert_eq!(notes.iter().any(|n| n.contains("answers end at <end> (7)")), expected == [7], "{name}: {notes:?}");
    }
}

#[test]
fn licences_come_from_the_model_card() {
    let licence = |card: &str| {
        let (file, _) = beside(&format!("licence-{}", card.len()), &[("README.md", card)]);
        file.provenance().get("licence").and_then(Value::as_str).map(String::from)
    };
    assert_eq!(licence("---\ntags:\n- x\nlicense: apache-2.0\n---\n# Model").as_deref(), Some("apache-2.0"));
    assert_eq!(licence("---\nlicense: other\nlicense_name: 'qwen-research'\n---\n").as_deref(), Some("qwen-research"));
    assert_eq!(licence("# Model\nlicense: mit\n"), None);
}

#[test]
fn files_beside_the_tensors_are_regular_and_of_bounded_size() {
    for (name, most) in [
        ("config.json", 8u64),
        ("generation_config.json", 8),
        ("chat_template.jinja", 8),
        ("README.md", 8),
        ("model.safetensors.index.json", 32),
        ("tokenizer.json", 512),
    ] {
        let scratch = Scratch::new(&format!("size-{name}"));
        let path = scratch.model().join(name);
        write(&scratch.model(), &config(), &float_model(&mut Random::new(33), FloatType::F16), "model.safetensors");
        // Sparse: takes no space.
        fs::File::create(&path).unwrap().set_len((most << 20) + 1).unwrap();
        scratch.fails(&format!("{name}: size: expected at most {} bytes, got {}", most << 20, (most << 20) + 1));
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        scratch.fails(&format!("{name}: not a regular file"));
        #[cfg(unix)]
        {
            fs::remove_dir(&path).unwrap();
            std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
            scratch.fails(&format!("{name}: not a regular file"));
        }
    }
}

#[test]
fn downloads_that_went_wrong_are_called_so() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 1\n";
    for name in ["model.safetensors", "config.json", "tokenizer.json"] {
        for (bytes, what) in [(pointer, "a Git LFS pointer, not"), ("\n<!DOCTYPE html><html>", "a web page, not")] {
            let scratch = Scratch::new("went-wrong");
            write(&scratch.model(), &config(), &float_model(&mut Random::new(34), FloatType::F16), "model.safetensors");
            fs::write(scratch.model().join(name), bytes).unwrap();
            scratch.fails(&format!("{name}: {what} the file itself; download the file again"));
        }
    }
    let scratch = Scratch::new("no-index");
    for shard in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"] {
        write(&scratch.model(), &config(), &float_model(&mut Random::new(34), FloatType::F16), shard);
    }
    scratch.fails("model.safetensors.index.json, which says where each tensor is, is not there; download the missing");
}

#[test]
fn a_broken_json_beside_the_tensors_is_named() {
    let scratch = Scratch::new("broken-json");
    write(&scratch.model(), &config(), &float_model(&mut Random::new(32), FloatType::F16), "model.safetensors");
    fs::write(scratch.model().join("tokenizer.json"), "{").unwrap();
    scratch.fails("tokenizer.json: JSON");
}
