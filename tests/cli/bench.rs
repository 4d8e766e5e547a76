//! `quern bench`: rows that can be read by people and by programs.

use serde_json::json;

use super::converted;
use crate::support::{
    Scratch,
    program::{Ran, arg, command, quern},
};

#[test]
fn json_rows_have_the_numbers() {
    let (_scratch, file) = converted("models/llama-gptq-w4-g64-sym");
    let flags = ["-p", "8,3", "-n", "4", "-d", "0,16", "-b", "1,2", "-r", "2", "-t", "1", "-o", "json"];
    let rows = quern(&[&["bench", arg(&file)], &flags[..]].concat()).ok().json();
    let rows = rows.as_array().unwrap();
    let tests: Vec<&str> = rows.iter().map(|row| row["test"].as_str().unwrap()).collect();
    assert_eq!(tests, ["pp8", "pp3", "tg4", "tg4 x 2", "pp8 @ d16", "pp3 @ d16", "tg4 @ d16", "tg4 @ d16 x 2"]);
    for row in rows {
        assert!(row["tokens_per_second"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["read_bandwidth"].as_f64().unwrap() > 1e8, "{row}");
        assert!(row["peak_memory"].as_u64().unwrap() > 1_000_000, "{row}");
        assert_eq!(row["samples"].as_array().unwrap().len(), 2, "{row}");
        assert_eq!((row["threads"].as_u64(), row["model"].as_str()), (Some(1), Some("model")), "{row}");
        let generates = row["test"].as_str().unwrap().starts_with("tg");
        assert_eq!(row["bytes_per_second"].is_number(), generates, "{row}");
        assert!(row["mode"].as_str().unwrap().contains("int8"), "{row}");
    }
}

#[test]
fn the_table_has_a_row_per_test() {
    let (_scratch, file) = converted("models/llama-gptq-w4-g64-sym");
    let ran = quern(&["bench", arg(&file), "-p", "8", "-n", "4", "-r", "1", "-t", "1,2"]).ok();
    let rows: Vec<Vec<&str>> = ran
        .out
        .lines()
        .filter_map(|line| line.strip_prefix('|')?.strip_suffix('|'))
        .map(|line| line.split('|').map(str::trim).collect())
        .collect();
    assert!(rows.iter().all(|row| row.len() == rows[0].len()), "{}", ran.out);
    let names: Vec<(&str, &str)> = rows[2..].iter().map(|row| (row[0], row[1])).collect();
    assert_eq!(names, [("1", "pp8"), ("1", "tg4"), ("2", "pp8"), ("2", "tg4")]);
    assert!(rows[2..].iter().all(|row| row[2].parse::<f64>().unwrap() > 0.0), "{}", ran.out);
    ran.prints(&["int8 activations, f16 KV", "tokens/s", "read bandwidth"]);
}

#[test]
fn a_shape_can_be_measured_without_a_model() {
    let scratch = Scratch::new("bench");
    let config = json!({
        "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 256, "vocab_size": 512, "max_position_embeddings": 256,
        "rope_theta": 10000.0, "tie_word_embeddings": false,
    });
    let path = scratch.write("config.json", config.to_string());
    let small = ["-p", "4", "-n", "2", "-r", "1", "-o", "json"];
    let mut bench = command(&[&["bench", "--synthetic", arg(&path)], &small[..]].concat());
    let rows = Ran::of(bench.env("TMPDIR", scratch.path())).ok().json();
    assert_eq!(rows.as_array().unwrap().len(), 2);
    // 4-bit weights: well below a byte each.
    assert!(rows[0]["model_bytes"].as_u64().unwrap() < 500_000, "{}", rows[0]);
    assert_eq!(scratch.names(), ["config.json"], "the synthetic model is gone");

    quern(&["bench", "--synthetic", "llama-9b"]).misused(&["llama-9b", "llama-1b, llama-3b, llama-8b"]);
    quern(&["bench", "--synthetic", "missing.json"]).fails(&["missing.json", "No such file"]);
    quern(&["bench", "--synthetic", arg(&path), "--group", "48"]).misused(&["--group", "48"]);
}

#[test]
fn tests_that_cannot_be_run_are_refused() {
    let (_scratch, file) = converted("models/llama");
    let bench = |flags: &[&str]| quern(&[&["bench", arg(&file)], flags].concat());
    bench(&["-p", "400", "-n", "0"]).fails(&["pp400", "400 tokens", "at most 256"]);
    bench(&["-p", "0", "-n", "8", "-d", "250"]).fails(&["tg8 @ d250", "258 tokens"]);
    bench(&["-p", "x"]).misused(&["--prompt"]);
    bench(&["-o", "csv"]).misused(&["md", "json"]);
    bench(&["--synthetic", "llama-1b"]).misused(&["cannot be used with"]);
}

#[test]
fn zeros_are_wrong_usage() {
    let (_scratch, file) = converted("models/llama");
    for flag in ["--batch", "--threads", "--repetitions"] {
        quern(&["bench", arg(&file), flag, "0"]).misused(&[flag]);
    }
}

#[test]
fn sizes_beyond_reason_are_refused() {
    let (_scratch, file) = converted("models/llama");
    let bench = |flags: &[&str]| quern(&[&["bench", arg(&file)], flags].concat());
    bench(&["-p", "0", "-n", "1", "-d", "18446744073709551615"]).fails(&["tg1 @ d18446744073709551615", "at most 256"]);
    bench(&["-b", "4097"]).misused(&["4097", "1 to 4096"]);
    bench(&["-p", "0", "-n", "0"]).misused(&["nothing to measure"]);
    quern(&["bench", "--synthetic", "llama-1b", "--group", "1048576"]).misused(&["1048576", "65536"]);
}
