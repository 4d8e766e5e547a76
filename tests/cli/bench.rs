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

/// A server that answers every generation with as many words as were asked for, and refuses each fifth.
fn fake_server() -> String {
    use std::{
        io::{BufRead, BufReader, Read, Write},
        net::TcpListener,
        sync::atomic::{AtomicUsize, Ordering},
    };
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    let serve = |mut stream: std::net::TcpStream| -> std::io::Result<()> {
        stream.set_nodelay(true)?;
        let mut reader = BufReader::new(stream.try_clone()?);
        loop {
            let (mut head, mut line) = (String::new(), String::new());
            while reader.read_line(&mut line)? > 2 {
                head += &std::mem::take(&mut line).to_lowercase();
            }
            if head.is_empty() {
                return Ok(());
            }
            let length =
                head.split("content-length: ").nth(1).map_or(0, |l| l.lines().next().unwrap().parse().unwrap());
            let mut body = vec![0; length];
            reader.read_exact(&mut body)?;
            let whole = |text: &str| format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{text}", text.len());
            let request: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
            if head.starts_with("get /v1/models") {
                stream.write_all(whole(r#"{"data": [{"id": "fake"}]}"#).as_bytes())?;
            } else if head.starts_with("post /tokenize") {
                let words: Vec<&str> = request["content"].as_str().unwrap().split_whitespace().collect();
                stream.write_all(whole(&json!({ "tokens": words }).to_string()).as_bytes())?;
            } else if COUNT.fetch_add(1, Ordering::Relaxed) % 5 == 4 {
                stream.write_all(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n")?;
            } else {
                assert!(head.starts_with("post /v1/completions"), "{head}");
                assert_eq!((&request["stream"], &request["ignore_eos"]), (&json!(true), &json!(true)));
                let (prompt, tokens) = (request["prompt"].as_str().unwrap(), request["max_tokens"].as_u64().unwrap());
                let mut chunk = |text: String| {
                    std::thread::sleep(std::time::Duration::from_millis(2));
                    write!(stream, "{:x}\r\n{text}\r\n", text.len())
                };
                for i in 0..tokens {
                    let head = if i == 0 { "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" } else { "" };
                    let event = format!("data: {}\n\n", json!({"choices": [{"text": format!(" {i}")}]}));
                    if i == 0 {
                        reader.get_ref().write_all(head.as_bytes())?;
                    }
                    chunk(event)?;
                }
                let usage = json!({"prompt_tokens": prompt.split_whitespace().count(), "completion_tokens": tokens,
                    "prompt_tokens_details": {"cached_tokens": 3}});
                chunk(format!("data: {}\n\ndata: [DONE]\n\n", json!({"choices": [], "usage": usage})))?;
                write!(stream, "0\r\n\r\n")?;
            }
        }
    };
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            std::thread::spawn(move || serve(stream.unwrap()));
        }
    });
    url
}

#[test]
fn a_server_is_measured_by_clients_and_at_a_rate() {
    let url = fake_server();
    let scratch = Scratch::new("bench-serve");
    let texts = scratch.path().join("texts.jsonl");
    let common =
        ["bench", "serve", "--url", &url, "-n", "25", "-i", "4-6", "-g", "3", "--shared-prefix", "10", "-o", "json"];
    let closed = ["-c", "3", "--save-texts", arg(&texts)];
    let open = ["--rate", "200", "--burstiness", "0.5"];
    for more in [&closed[..], &open[..]] {
        let report = quern(&[&common[..], more].concat()).ok().json();
        assert_eq!((&report["model"], &report["exact_lengths"]), (&json!("fake"), &json!(true)), "{report}");
        assert_eq!((&report["completed"], &report["failed"]), (&json!(20), &json!(5)), "{report}");
        assert_eq!(report["errors"], json!({"HTTP 429": 5}));
        assert_eq!((&report["generated_tokens"], &report["cached_tokens"]), (&json!(60), &json!(60)));
        let prompts = report["prompt_tokens"].as_u64().unwrap();
        assert!((20 * 14..=20 * 16).contains(&prompts), "{report}");
        let of = |name: &str, which: &str| report[name][which].as_f64().unwrap();
        assert!(of("itl_ms", "p50") >= 2.0 && of("ttft_ms", "p50") <= of("e2el_ms", "p50"), "{report}");
        assert!(of("e2el_ms", "mean") >= 8.0 && of("e2el_ms", "p99") <= of("e2el_ms", "max"), "{report}");
    }
    let lines = std::fs::read_to_string(&texts).unwrap();
    assert_eq!(lines.lines().count(), 25);
    assert_eq!(lines.lines().filter(|l| l.contains(r#""text":" 0 1 2""#)).count(), 20, "{lines}");
    let table = quern(&[
        "bench",
        "serve",
        "--url",
        &url,
        "-n",
        "2",
        "-g",
        "2",
        "-i",
        "3",
        "--intrude",
        "9",
        "--intrude-after",
        "0.01",
    ]);
    assert!(table.ok().out.contains("Long prompt of 9 tokens"));
}

#[test]
fn a_server_that_is_not_there_is_an_error() {
    let ran = quern(&["bench", "serve", "--url", "http://127.0.0.1:1"]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.err.contains("connect: connection refused"), "{}", ran.err);
    assert_eq!(quern(&["bench", "serve", "--url", "https://127.0.0.1"]).code, Some(2));
}
