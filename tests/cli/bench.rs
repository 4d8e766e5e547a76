//! `quern bench`: rows that can be read by people and by programs.

use serde_json::json;

use super::converted;
use crate::support::{
    Scratch, fixture,
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

/// Two prompts, in a file beside the model.
fn prompts(scratch: &Scratch) -> std::path::PathBuf {
    scratch.write("prompts.txt", "=== one\nThe cat sat on the mat and the cat\n=== two\none two three one two\n")
}

/// The lines of `quern bench spec` with these flags, one thread.
fn spec(file: &std::path::Path, prompts: &std::path::Path, flags: &[&str]) -> Vec<serde_json::Value> {
    let usual = ["-n", "24", "-r", "2", "-t", "1", "-o", "json"];
    let args = ["bench", "spec", arg(file), "--prompts", arg(prompts)];
    quern(&[&args[..], &usual[..], flags].concat()).ok().json().as_array().unwrap().clone()
}

#[test]
fn guesses_are_right_as_often_as_asked() {
    let (scratch, file) = converted("models/llama-gptq-w4-g64-sym");
    let lines = spec(&file, &prompts(&scratch), &["--synthetic-acceptance-rate", "0,.5,1", "-k", "1,4,0"]);
    let names: Vec<&str> = lines.iter().map(|line| line["speculate"].as_str().unwrap()).collect();
    let of = |rate: &str| ["1", "4", ""].map(|k| format!("synthetic {rate}:{k}").trim_end_matches(':').to_string());
    assert_eq!(names, [vec!["off".to_string()], of("0").to_vec(), of("0.5").to_vec(), of("1").to_vec()].concat());
    let number = |i: usize, key: &str| lines[i][key].as_f64().unwrap_or_else(|| panic!("{key} of {}", lines[i]));
    // Of 23 tokens after the first, with 4 guesses a step that are all right: 4 steps of 5, and 3 more tokens.
    for (i, length) in [(0, 1.0), (1, 1.0), (2, 1.0), (7, 23.0 / 12.0), (8, 23.0 / 5.0)] {
        assert!((number(i, "acceptance_length") - length).abs() < 1e-9, "{}", lines[i]);
    }
    // (1 - r^5) / (1 - r) = 1.94 on long texts; the 92 tokens here bring about a tenth of noise.
    let half = number(5, "acceptance_length");
    assert!((1.4..2.6).contains(&half), "{half}");
    assert!(number(5, "drafted") > 2.0 * number(5, "accepted"));
    assert!(number(0, "tokens_per_second") > 0.0 && number(0, "first_token_ms") > 0.0);
}

#[test]
fn modes_and_files_stand_in_one_table() {
    let (scratch, file) = converted("models/llama-gptq-w4-g64-sym");
    let float = scratch.at("float.qrn");
    quern(&["convert", arg(&fixture("models/llama")), "--out", arg(&float)]).ok();
    let prompts = prompts(&scratch);
    let text = scratch.write("text.txt", "Some words to be scored, and then some other words. ".repeat(60));
    let flags =
        ["--modes", "int8,f32", "--text", arg(&text), "--chunks", "1", "--methods", "ngram:2", "--step-rows", "1,3"];
    let lines = spec(&file, &prompts, &flags);
    let names: Vec<_> = lines.iter().map(|line| (line["mode"].as_str(), line["speculate"].as_str())).collect();
    let [int8, f32] = [Some("int8"), Some("f32")];
    let [off, ngram] = [Some("off"), Some("ngram:2")];
    assert_eq!(names, [(int8, off), (int8, ngram), (f32, off), (f32, ngram)]);
    for line in [&lines[0], &lines[2]] {
        let rows: Vec<_> =
            line["steps"].as_array().unwrap().iter().map(|step| step["rows"].as_u64().unwrap()).collect();
        assert_eq!(rows, [1, 3]);
        assert!(line["steps"][1]["ms"].as_f64().unwrap() > 0.0, "{line}");
        assert!(line["numerics"].as_str().unwrap().contains(line["mode"].as_str().unwrap()), "{line}");
    }
    assert!(lines[1].get("steps").is_none());
    // As `quern eval` has it, of which float activations differ from exact mode in the cache only.
    let eval =
        ["--text", arg(&text), "--chunks", "1", "--against", arg(&file), "--modes", "default", "-t", "1", "-o", "json"];
    let eval = quern(&[&["eval", arg(&file)][..], &eval[..]].concat()).ok().json();
    assert_eq!(lines[0]["kl"], eval[0]["kl"]);
    assert!(lines[2]["kl"].as_f64().unwrap() < lines[0]["kl"].as_f64().unwrap());
    // Two files: float weights are one mode, and the distance is that from them.
    let args = ["bench", "spec", arg(&float), arg(&file), "--prompts", arg(&prompts), "-n", "8", "-r", "1", "-t", "1"];
    let more = ["--modes", "int8,f32", "--text", arg(&text), "--chunks", "1", "--against", arg(&float), "-k", "2"];
    let plot = scratch.at("plot.svg");
    let table = quern(&[&args[..], &more[..], &["--plot", arg(&plot)]].concat()).ok();
    table.prints(&[
        "| float, float |",
        "| model, int8 |",
        "| model, f32 |",
        "KL mean",
        "2 rows, ms",
        "\nmodel, int8:\n",
    ]);
    assert!(std::fs::read_to_string(plot).unwrap().contains("model, int8: ngram"));
}

#[test]
fn answers_before_are_guessed_from_where_that_is_asked() {
    let (scratch, file) = converted("models/llama-gptq-w4-g64-sym");
    // The same prompt twice: the second answer is known, but for what the first token leaves open.
    let prompts = scratch.write("prompts.txt", "a prompt of a few words\na prompt of a few words\n");
    let accepted = |flags: &[&str]| {
        let lines = spec(&file, &prompts, flags);
        lines[1]["accepted"].as_u64().unwrap()
    };
    let (own, past) = (accepted(&["--methods", "ngram:4"]), accepted(&["--methods", "suffix:4", "--past"]));
    // Two rounds; each forgets what the one before it has answered.
    assert!(past > own && past >= 2 * 12, "{past} and {own}");
    let args = ["bench", "spec", arg(&file), "--prompts", arg(&prompts)];
    let refused = |flags: &[&str], parts: &[&str]| {
        quern(&[&args[..], flags].concat()).misused(parts);
    };
    refused(&["--methods", "suffix"], &["suffix", "--past"]);
    refused(&["--methods", "draft"], &["--draft FILE"]);
    refused(&["--synthetic-acceptance-rate", "1.5"], &["0 to 1"]);
    refused(&["--modes", "int8,int8"], &["int8", "twice"]);
    refused(&["-k", "17"], &["0 to 16"]);
    refused(&["--step-rows", "65"], &["65", "1 to 64"]);
    refused(&["-n", "1"], &["at least 2"]);
    refused(&["--ctx", "64"], &["--ctx"]);
    quern(&[&args[..], &["--modes", "f16", "--device", "cpu"]].concat()).fails(&["f16"]);
}
