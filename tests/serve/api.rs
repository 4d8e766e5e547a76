//! Endpoints on a real engine: the same answer alone and under load, streamed and whole.

use std::{
    env,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use hyper::{HeaderMap, Method};
use quern::{
    engine::{Engine, EngineOptions, defaults, worker::Worker},
    server::{Call, ModelInfo, Reply, State, api, intake::Share},
    text::TextModel,
};
use serde_json::{Value, json};

use super::server as program;
use crate::support::{Scratch, fixture, model::kept, skip};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

/// The two-layer slice of SmolLM2, which writes nonsense, but always the same.
struct Server {
    state: Arc<State>,
    _worker: Worker,
    _scratch: Scratch,
}

impl Server {
    fn new() -> Server {
        let scratch = Scratch::new("serve-api");
        let (_, file) = kept(&fixture("models/smollm2-gptq-2layer"), &scratch);
        let text = TextModel::of(&file).unwrap().unwrap();
        let model = ModelInfo { name: "slice".into(), defaults: defaults(file.generation()), ..ModelInfo::default() };
        // Small steps, so that prompts are cut and requests mix.
        let options =
            EngineOptions { threads: 1, context: 512, sequences: 6, batch_tokens: 16, ..EngineOptions::default() };
        let worker = Worker::start(Box::new(Engine::new(file, options).unwrap()), 64).unwrap();
        let state = Arc::new(State::new(worker.handle(), Arc::new(text), model));
        Server { state, _worker: worker, _scratch: scratch }
    }

    /// Runs on a runtime as the server has it.
    fn run(work: impl AsyncFnOnce(Server)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(work(Server::new()));
    }

    async fn call(&self, path: &str, body: Value) -> Reply {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let call = Call {
            method: Method::POST,
            path: path.into(),
            query: None,
            headers: HeaderMap::new(),
            body: Bytes::from(body.to_string()),
            share: Share::default(),
            id: format!("r{}", COUNT.fetch_add(1, Ordering::Relaxed)),
            arrived: Instant::now(),
        };
        api::route(self.state.clone(), call).await
    }

    async fn ok(&self, path: &str, body: Value) -> Value {
        match self.call(path, body).await {
            Reply::Whole { status, body, .. } => {
                let value: Value = serde_json::from_slice(&body).unwrap();
                assert_eq!(status, 200, "{value:#}");
                value
            }
            Reply::Events(_) => panic!("a stream"),
        }
    }

    async fn chunks(&self, path: &str, body: Value) -> Vec<Value> {
        let Reply::Events(mut events) = self.call(path, with(body, json!({"stream": true}))).await else {
            panic!("no stream");
        };
        let mut out = vec![];
        while let Some(bytes) = events.recv().await {
            let text = std::str::from_utf8(&bytes).unwrap();
            let data = text.strip_prefix("data: ").unwrap().trim_end();
            if data != "[DONE]" {
                out.push(serde_json::from_str(data).unwrap());
            }
        }
        out
    }

    async fn idle(&self) {
        for _ in 0..5000 {
            if self.state.engine.open() == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        panic!("requests go on");
    }
}

fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn wild(seed: u64) -> Value {
    json!({
        "messages": [{"role": "user", "content": "Tell me about the sea."}],
        "temperature": 1.3, "top_p": 0.98, "seed": seed, "max_tokens": 40, "frequency_penalty": 0.3,
    })
}

fn answers(body: &Value) -> Vec<String> {
    let choices = body["choices"].as_array().unwrap().iter();
    let text = |c: &Value| c["message"]["content"].as_str().or(c["text"].as_str()).unwrap().to_string();
    choices.map(text).collect()
}

#[test]
fn a_seed_decides_whatever_else_runs() {
    Server::run(async |server| {
        let alone = answers(&server.ok(CHAT, wild(7)).await);
        assert!(alone[0].len() > 20, "{alone:?}");
        let other = |i: u64| {
            let body = with(wild(100 + i), json!({"max_tokens": 20 + i, "n": 1 + i % 3}));
            server.ok(CHAT, with(body, json!({"messages": [{"role": "user", "content": "x ".repeat(9 * i as usize)}]})))
        };
        let (among, ..) = tokio::join!(
            server.ok(CHAT, wild(7)),
            other(1),
            other(2),
            other(3),
            other(4),
            other(5),
            other(6),
            other(7),
            other(8),
        );
        assert_eq!(answers(&among), alone);
        assert_ne!(answers(&server.ok(CHAT, wild(8)).await), alone);
    });
}

#[test]
fn choices_are_those_of_the_following_seeds() {
    Server::run(async |server| {
        let three = answers(&server.ok(CHAT, with(wild(20), json!({"n": 3}))).await);
        for (i, choice) in (0..).zip(&three) {
            assert_eq!(answers(&server.ok(CHAT, wild(20 + i)).await), [choice.as_str()]);
        }
        assert!(three[0] != three[1] && three[1] != three[2]);
        // Several prompts: each as if it were alone.
        let body = |prompt: Value| json!({"prompt": prompt, "n": 2, "seed": 3, "temperature": 1.5, "max_tokens": 12});
        let both = answers(&server.ok(TEXT, body(json!(["One day", "At sea, "]))).await);
        let one = answers(&server.ok(TEXT, body("One day".into())).await);
        let two = answers(&server.ok(TEXT, body("At sea, ".into())).await);
        assert_eq!(both, [one, two].concat());
    });
}

#[test]
fn a_stream_is_the_whole_answer_in_pieces() {
    Server::run(async |server| {
        for (seed, stop) in [(1, json!(null)), (2, json!(["e", "\n"])), (3, json!(" the"))] {
            let body = with(wild(seed), json!({"stop": stop, "n": 2, "temperature": 2.0}));
            let whole = server.ok(CHAT, body.clone()).await;
            let chunks = server.chunks(CHAT, with(body, json!({"stream_options": {"include_usage": true}}))).await;
            for (at, answer) in answers(&whole).into_iter().enumerate() {
                let mine = chunks.iter().filter_map(|c| c["choices"].get(0)).filter(|c| c["index"] == at);
                let text: String = mine.clone().filter_map(|c| c["delta"]["content"].as_str()).collect();
                assert_eq!(text, answer);
                let finish = mine.map(|c| &c["finish_reason"]).find(|f| !f.is_null());
                assert_eq!(finish, Some(&whole["choices"][at]["finish_reason"]));
            }
            let usage = &chunks.last().unwrap()["usage"];
            assert_eq!(usage["prompt_tokens"], whole["usage"]["prompt_tokens"]);
            assert_eq!(usage["completion_tokens"], whole["usage"]["completion_tokens"]);
        }
        server.idle().await;
    });
}

#[test]
fn a_stop_text_cuts_what_would_have_come() {
    Server::run(async |server| {
        let body = json!({"prompt": "The harbour was quiet", "temperature": 0, "max_tokens": 60});
        let full = answers(&server.ok(TEXT, body.clone()).await).remove(0);
        let stop: String = full.chars().skip(25).take(4).collect();
        let cut = server.ok(TEXT, with(body, json!({"stop": [stop, "never appears"]}))).await;
        assert_eq!(answers(&cut)[0], full[..full.find(&stop).unwrap()]);
        assert_eq!(cut["choices"][0]["finish_reason"], "stop");
        assert!(cut["usage"]["completion_tokens"].as_u64().unwrap() < 60);
        server.idle().await;
    });
}

#[test]
fn logprobs_are_those_of_the_tokens() {
    Server::run(async |server| {
        let body = json!({
            "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 12, "ignore_eos": true,
            "logprobs": true, "top_logprobs": 20,
        });
        let got = server.ok(CHAT, body).await;
        let entries = got["choices"][0]["logprobs"]["content"].as_array().unwrap();
        assert_eq!(entries.len(), 12);
        let mut bytes = vec![];
        for entry in entries {
            let top = entry["top_logprobs"].as_array().unwrap();
            assert_eq!((top.len(), &top[0]["token"]), (20, &entry["token"]));
            assert_eq!(top[0]["logprob"], entry["logprob"]);
            let sum: f64 = top.iter().map(|t| t["logprob"].as_f64().unwrap().exp()).sum();
            assert!(sum > 0.0 && sum <= 1.0 + 1e-5, "{sum}");
            assert!(top.windows(2).all(|w| w[0]["logprob"].as_f64() >= w[1]["logprob"].as_f64()));
            bytes.extend(entry["bytes"].as_array().unwrap().iter().map(|b| b.as_u64().unwrap() as u8));
        }
        assert_eq!(got["choices"][0]["message"]["content"], String::from_utf8_lossy(&bytes).as_ref());
        assert_eq!(got["usage"]["completion_tokens"], 12);
        let total = got["usage"]["total_tokens"].as_u64().unwrap();
        assert_eq!(total, got["usage"]["prompt_tokens"].as_u64().unwrap() + 12);

        // Bans hold, and a bias of 100 decides.
        let first = entries[0]["bytes"].clone();
        let id = server.ok("/tokenize", json!({"content": entries[0]["token"]})).await["tokens"][0].to_string();
        let body = json!({"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 1});
        let bias = |x: i32| json!({"logit_bias": {id.as_str(): x}, "logprobs": true});
        let banned = server.ok(CHAT, with(body.clone(), bias(-100))).await;
        assert_ne!(banned["choices"][0]["logprobs"]["content"][0]["bytes"], first);
        let forced = server.ok(CHAT, with(with(body, json!({"temperature": 2.0})), bias(100))).await;
        assert_eq!(forced["choices"][0]["logprobs"]["content"][0]["bytes"], first);
    });
}

#[test]
fn a_conversation_is_cut_where_the_context_ends() {
    Server::run(async |server| {
        let body = json!({"prompt": "a", "temperature": 0, "ignore_eos": true});
        let got = server.ok(TEXT, body).await;
        assert_eq!(
            (&got["choices"][0]["finish_reason"], &got["usage"]["total_tokens"]),
            (&json!("length"), &json!(512))
        );
    });
}

#[test]
fn the_official_client_works() {
    const CHECKS: [&str; 7] = ["models", "chat", "completions", "echo", "errors", "forms", "vectors"];
    let Ok(python) = env::var("QUERN_OPENAI_PYTHON") else {
        return skip("the_official_client_works", "needs QUERN_OPENAI_PYTHON=python that has the openai package");
    };
    let server = program::Server::start(&["--ctx", "512", "--batch-tokens", "16", "--sequences", "6"]);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/serve/openai_client.py");
    let out = Command::new(python).args([script, &server.url()]).args(CHECKS).stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{text}\n{}", String::from_utf8_lossy(&out.stderr));
    assert_eq!(text.lines().filter(|line| line.starts_with("ok ")).count(), CHECKS.len(), "{text}");
    server.is_well();
}

#[test]
fn steps_of_one_token_have_no_room_for_guesses() {
    let line = "--batch-tokens 1 has no room for guesses: none are made";
    let server = program::Server::start(&["--ctx", "128", "--batch-tokens", "1"]);
    assert!(server.line(line).is_some());
    for flags in [["--batch-tokens", "2", "--speculate", "auto"], ["--batch-tokens", "1", "--speculate", "off"]] {
        let server = program::Server::start(&[&["--ctx", "128"], &flags[..]].concat());
        assert!(server.line("no room for guesses").is_none(), "{flags:?}");
    }
}

#[test]
fn an_echo_has_the_logprobs_of_what_was_generated() {
    Server::run(async |server| {
        let prompt =
            server.ok("/tokenize", json!({"prompt": "The harbour was quiet that evening"})).await["tokens"].clone();
        let body = json!({"temperature": 0, "logprobs": 2, "ignore_eos": true});
        let got = server.ok(TEXT, with(body.clone(), json!({"prompt": prompt, "max_tokens": 20}))).await;
        let written = &got["choices"][0]["logprobs"];
        let mut all = prompt.clone();
        for name in written["tokens"].as_array().unwrap() {
            let token = server.ok("/tokenize", json!({"content": name})).await["tokens"].clone();
            assert_eq!(token.as_array().unwrap().len(), 1, "{name}");
            all.as_array_mut().unwrap().push(token[0].clone());
        }
        let again = server.ok(TEXT, with(body, json!({"prompt": all, "echo": true, "max_tokens": 0}))).await;
        let read = &again["choices"][0]["logprobs"];
        let n = prompt.as_array().unwrap().len();
        let tail = |list: &str| read[list].as_array().unwrap()[n..].to_vec();
        for list in ["tokens", "token_logprobs", "top_logprobs"] {
            assert_eq!(Value::from(tail(list)), written[list], "{list}");
        }
        assert_eq!(read["token_logprobs"][0], Value::Null);
    });
}

#[test]
fn vectors_are_the_same_alone_and_together() {
    Server::run(async |server| {
        let long = "word and word ".repeat(20);
        let embed = async |input: Value, pooling: &str| {
            let body = json!({"input": input, "pooling": pooling});
            server.ok("/v1/embeddings", body).await["data"].as_array().unwrap().clone()
        };
        for pooling in ["mean", "last"] {
            let all = embed(json!(["The sea", long, "The sea"]), pooling).await;
            assert_eq!(all[0]["embedding"], all[2]["embedding"]);
            assert_ne!(all[0]["embedding"], all[1]["embedding"]);
            for (i, text) in ["The sea", &long].into_iter().enumerate() {
                assert_eq!(embed(json!(text), pooling).await[0]["embedding"], all[i]["embedding"], "{pooling} {i}");
            }
            let squares = all[1]["embedding"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap().powi(2));
            assert!((squares.sum::<f64>() - 1.0).abs() < 1e-5);
        }
        assert_ne!(embed(json!("The sea"), "mean").await, embed(json!("The sea"), "last").await);
    });
}

#[test]
fn answers_keep_to_their_schema() {
    Server::run(async |server| {
        let schema = json!({
            "type": "object",
            "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "boolean"}},
            "required": ["kind", "legs"],
            "additionalProperties": false,
        });
        let format =
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "pet", "schema": schema}}});
        let body = with(with(wild(1), format), json!({"n": 6, "max_tokens": 120}));
        let (forms, free) = tokio::join!(server.ok(CHAT, body), server.ok(CHAT, wild(7)));
        for answer in answers(&forms) {
            let pet: Value = serde_json::from_str(&answer).unwrap();
            assert!(pet["kind"] == "cat" || pet["kind"] == "dog", "{pet}");
            assert!(pet["legs"].is_boolean() && pet.as_object().unwrap().len() == 2, "{pet}");
        }
        assert!(forms["choices"].as_array().unwrap().iter().all(|c| c["finish_reason"] == "stop"));
        assert_eq!(answers(&free), answers(&server.ok(CHAT, wild(7)).await));
        let words = server.ok(TEXT, json!({"prompt": "Yes or no?", "guided_choice": ["yes", "no"], "n": 4})).await;
        assert!(answers(&words).iter().all(|w| w == "yes" || w == "no"), "{words}");
    });
}
