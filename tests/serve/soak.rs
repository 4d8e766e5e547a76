//! Ten thousand requests, good and bad, from clients that behave and clients that do not.
//!
//! Every good answer is the one that the same request gets alone; afterwards nothing is left: no sequence, no block, no
//! file descriptor, and no more memory than before.

use std::{
    io::{Read, Write},
    time::Duration,
};

use serde_json::{Value, json};

use super::server::{Answer, Server, request};
use crate::support::{Random, program::wait_for};

const REQUESTS: usize = 10_000;
const CLIENTS: usize = 8;

/// Requests that have one right answer, some with beginnings in common.
fn good() -> Vec<(&'static str, Value)> {
    let mut random = Random::new(5);
    let stem: Vec<usize> = (0..90).map(|_| 300 + random.below(700)).collect();
    (0..48)
        .map(|i| {
            let mut prompt = stem[..[0, 7, 32, 60, 90][i % 5]].to_vec();
            prompt.extend((0..1 + random.below(12)).map(|_| 300 + random.below(700)));
            let tokens = 1 + i % 5;
            match i % 8 {
                6 => ("/v1/embeddings", json!({"input": prompt})),
                7 => {
                    let messages = json!([{"role": "user", "content": format!("Say {i}.")}]);
                    ("/v1/chat/completions", json!({"messages": messages, "max_tokens": tokens, "temperature": 0}))
                }
                kind => {
                    let temperature = if kind % 2 == 0 { 0.0 } else { 1.0 };
                    let n = if kind == 5 { 3 } else { 1 };
                    let body = json!({"prompt": prompt, "max_tokens": tokens, "temperature": temperature, "seed": i,
                        "n": n, "ignore_eos": true});
                    ("/v1/completions", body)
                }
            }
        })
        .collect()
}

/// Requests that are refused.
fn bad() -> Vec<(&'static str, String)> {
    let many: Vec<usize> = vec![5; 300];
    [
        ("/v1/completions", "{\"prompt\": ".to_string()),
        ("/v1/completions", json!({"prompt": [99_999_999]}).to_string()),
        ("/v1/completions", json!({"prompt": many}).to_string()),
        ("/v1/completions", json!({"prompt": "a", "temperature": -1}).to_string()),
        ("/v1/completions", json!({"prompt": "a", "n": 1000}).to_string()),
        ("/v1/chat/completions", json!({"messages": "hello"}).to_string()),
        ("/v1/embeddings", json!({}).to_string()),
        ("/v1/nothing", json!({}).to_string()),
    ]
    .into()
}

/// Six long answers at once in a cache for four: some have to give their blocks back, and the texts are the same.
fn crowd(server: &Server) {
    let ask = |seed: usize, n: usize| {
        let body = json!({"prompt": "The", "max_tokens": 120, "seed": seed, "n": n, "ignore_eos": true});
        let answer = server.post("/v1/completions", &body);
        assert_eq!(answer.status, 200, "{answer:?}");
        let choices = answer.json()["choices"].as_array().unwrap().clone();
        choices.iter().map(|c| c["text"].clone()).collect::<Vec<_>>()
    };
    let alone: Vec<Value> = (0..6).flat_map(|i| ask(40 + i, 1)).collect();
    assert_eq!(server.metric("vllm:num_preemptions_total"), 0.0);
    assert_eq!(ask(40, 6), alone);
    assert!(server.metric("vllm:num_preemptions_total") > 0.0, "the cache was too large to test anything");
}

/// What must be the same however often one asks.
fn essence(answer: &Answer) -> Value {
    let body = answer.json();
    match &body["data"] {
        Value::Null => body["choices"].clone(),
        data => data.clone(),
    }
}

/// One client's part; returns how many answers it compared.
fn client(server: &Server, seed: u64, count: usize, good: &[(&str, Value)], alone: &[Value]) -> usize {
    let (mut random, bad, mut compared) = (Random::new(seed), bad(), 0);
    for _ in 0..count {
        let i = random.below(good.len());
        let (path, body) = &good[i];
        match random.below(20) {
            0..=12 => {
                let answer = server.post(path, body);
                assert_eq!(answer.status, 200, "{body}: {answer:?}");
                assert_eq!(essence(&answer), alone[i], "{body}");
                compared += 1;
            }
            13..=15 => {
                let (path, body) = &bad[random.below(bad.len())];
                let answer = server.ask("POST", path, "", body);
                assert!((400..500).contains(&answer.status), "{body}: {answer:?}");
            }
            16 => drop(server.send(&request("POST", path, "", &body.to_string())[..40])),
            // Gone in the middle of a long answer.
            kind => {
                let long = json!({"prompt": "The", "max_tokens": 120, "stream": kind != 17, "ignore_eos": true});
                let mut stream = server.send(request("POST", "/v1/completions", "", &long.to_string()));
                if kind == 19 {
                    // A slow reader before that.
                    let mut some = [0; 100];
                    stream.read_exact(&mut some).unwrap();
                    std::thread::sleep(Duration::from_millis(random.below(20) as u64));
                }
                let _ = stream.flush();
            }
        }
    }
    compared
}

fn status(pid: u32, field: &str) -> usize {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim_start_matches(':').split_whitespace().next().unwrap().parse().unwrap()
}

fn files(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

#[test]
fn ten_thousand_requests_leave_nothing_behind() {
    // Room for two contexts only: blocks are taken back, beginnings forgotten.
    let flags = ["--ctx", "256", "--cache-tokens", "512", "--sequences", "16", "-t", "2", "--max-queue", "2000"];
    let mut server = Server::start(&flags);
    let good = good();
    let alone: Vec<Value> = good
        .iter()
        .map(|(path, body)| {
            let answer = server.post(path, body);
            assert_eq!(answer.status, 200, "{body}: {answer:?}");
            essence(&answer)
        })
        .collect();
    crowd(&server);
    let quiet = || wait_for("the server to be idle", || server.metric("vllm:num_requests_running") == 0.0);
    let pid = server.pid();
    quiet();
    let (open, mut memory, mut compared) = (files(pid), 0, 0);
    for part in 0..4 {
        let run = |client_number: usize| {
            let seed = (part * CLIENTS + client_number) as u64 + 1;
            client(&server, seed, REQUESTS / 4 / CLIENTS, &good, &alone)
        };
        let run = &run;
        compared += std::thread::scope(|scope| {
            let clients: Vec<_> = (0..CLIENTS).map(|c| scope.spawn(move || run(c))).collect();
            clients.into_iter().map(|c| c.join().unwrap()).sum::<usize>()
        });
        quiet();
        if part == 1 {
            memory = status(pid, "VmRSS");
        }
    }
    assert!(compared > REQUESTS / 2, "{compared}");
    wait_for("blocks to come back", || server.metric("vllm:kv_cache_usage_perc") == 0.0);
    assert_eq!(server.metric("vllm:num_requests_waiting"), 0.0);
    wait_for("connections to close", || files(pid) <= open + 1);
    let after = status(pid, "VmRSS");
    assert!(after < memory + (24 << 10), "{memory} kB resident after a half, {after} kB after all");
    assert!(server.metric("vllm:prefix_cache_hits_total") > 10_000.0);
    server.is_well();
    server.signal("TERM");
    let (ended, lines) = server.ended();
    assert!(ended.success(), "{ended:?}");
    let internal = lines.iter().find(|line| line.contains(" 500 ") || line.contains(" 503 "));
    assert!(internal.is_none(), "{internal:?}");
}
