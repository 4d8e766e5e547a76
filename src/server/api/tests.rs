//! Endpoints on an engine that repeats its prompt: what is asked of it, and what becomes of its answers.

use std::{
    collections::BTreeMap,
    sync::Mutex,
    time::{Duration, Instant},
};

use bytes::Bytes;
use hyper::HeaderMap;
use quern_kernels::sample::SamplingParams;

use super::*;
use crate::{
    engine::{Event, Failure, Finish, Generator, Pooling, Request, worker::Worker},
    server::{ModelInfo, intake::Share},
    text::TextModel,
};

const TOKENIZER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/llama/tokenizer.json");
const TEMPLATE: &str = "{% for m in messages %}<{{ m.role[0] }}:{{ m.content }}>{% endfor %}\
    {% if add_generation_prompt %}>{{ suffix }}{% endif %}";
const EOS: u32 = 2;
const VOCAB: usize = 320;
const CONTEXT: usize = 300;

/// Answers every prompt with the prompt itself and EOS. A text that begins with `!` fails at its second token, one
/// with `~` never comes to an end, and never begins if it is `~~`.
struct Fake {
    next: u64,
    running: BTreeMap<u64, (Request, usize)>,
    ended: Vec<Event>,
    seen: Arc<Mutex<Vec<Request>>>,
    marks: [u32; 2],
}

impl Generator for Fake {
    fn add(&mut self, request: Request) -> Result<u64, EngineError> {
        self.seen.lock().unwrap().push(request.clone());
        self.next += 1;
        self.running.insert(self.next, (request, 0));
        Ok(self.next)
    }

    fn cancel(&mut self, request: u64) {
        if self.running.remove(&request).is_some() {
            self.ended.push(Event::Finished { request, finish: Finish::Cancelled });
        }
    }

    fn step(&mut self, events: &mut Vec<Event>) -> Result<bool, EngineError> {
        events.append(&mut self.ended);
        std::thread::sleep(Duration::from_micros(200));
        for (request, (r, at)) in std::mem::take(&mut self.running) {
            let text: Vec<u32> = r.prompt.iter().copied().filter(|&t| t != 1).collect();
            let [fails, hangs] = self.marks.map(|mark| text.first() == Some(&mark));
            if hangs && text.get(1) == text.first() {
                self.running.insert(request, (r, at));
                continue;
            }
            if at == 0 {
                events.push(Event::Started { request, cached: 2.min(r.prompt.len() - 1), at: Instant::now() });
                if let Some(n) = r.prompt_logprobs {
                    let of = |(i, &t): (usize, &u32)| (-(i as f32), (0..n as u32).map(|k| (t + k, -0.5)).collect());
                    events
                        .push(Event::Prompt { request, tokens: r.prompt.iter().enumerate().skip(1).map(of).collect() });
                }
            }
            if let Some(pooling) = r.embed {
                let first = if pooling == Pooling::Mean { 3.0 } else { -3.0 };
                events.push(Event::Embedding { request, values: vec![first, 4.0] });
                events.push(Event::Finished { request, finish: Finish::Stop });
                continue;
            }
            if r.max_tokens == 0 {
                events.push(Event::Finished { request, finish: Finish::Length });
                continue;
            }
            if fails && at == 1 {
                events.push(Event::Failed { request, error: Failure::Engine("as asked".into()) });
                continue;
            }
            let id = if hangs { text[0] } else { text.get(at).copied().unwrap_or(EOS) };
            let top = (0..r.logprobs.unwrap_or(0) as u32).map(|k| (id + k, -0.5 - k as f32)).collect();
            events.push(Event::Token { request, id, logprob: r.logprobs.map(|_| -0.5), top });
            if r.stop_ids.contains(&id) {
                events.push(Event::Finished { request, finish: Finish::Stop });
            } else if at + 1 == r.max_tokens && !hangs {
                events.push(Event::Finished { request, finish: Finish::Length });
            } else {
                self.running.insert(request, (r, at + 1));
            }
        }
        Ok(!self.running.is_empty())
    }

    fn max_context(&self) -> usize {
        CONTEXT
    }

    fn limits(&self) -> crate::engine::Limits {
        crate::engine::Limits { vocab: VOCAB, context: CONTEXT, hidden: 2, writer: None }
    }
}

struct Bench {
    state: Arc<State>,
    seen: Arc<Mutex<Vec<Request>>>,
    _worker: Worker,
}

impl Bench {
    fn new() -> Bench {
        Bench::with(Some(TEMPLATE), 64, None)
    }

    fn with(template: Option<&str>, most_waiting: usize, timeout: Option<Duration>) -> Bench {
        let json = std::fs::read(TOKENIZER).unwrap();
        let text = TextModel::new(&json, template, Some("<|bos|>"), Some("<|eos|>"), &[EOS]).unwrap();
        let id = |text_of: &str| *text.tokenizer().encode(text_of, true).unwrap().last().unwrap();
        let marks = [id("!"), id("~")];
        let seen = Arc::new(Mutex::new(vec![]));
        let fake = Fake { next: 0, running: BTreeMap::new(), ended: vec![], seen: seen.clone(), marks };
        let worker = Worker::start(Box::new(fake), most_waiting).unwrap();
        let model = ModelInfo {
            name: "tiny".into(),
            aliases: vec!["gpt-4/x".into()],
            created: 5,
            device: "fake".into(),
            defaults: SamplingParams { top_k: 7, ..SamplingParams::default() },
        };
        let state = Arc::new(State { timeout, ..State::new(worker.handle(), Arc::new(text), model) });
        Bench { state, seen, _worker: worker }
    }

    async fn call(&self, method: Method, path: &str, body: &[u8]) -> Reply {
        let call = Call {
            method,
            path: path.into(),
            query: None,
            headers: HeaderMap::new(),
            body: Bytes::copy_from_slice(body),
            share: Share::default(),
            id: "r7".into(),
            arrived: Instant::now(),
        };
        route(self.state.clone(), call).await
    }

    async fn post(&self, path: &str, body: Value) -> (u16, Value) {
        whole(self.call(Method::POST, path, body.to_string().as_bytes()).await)
    }

    async fn ok(&self, path: &str, body: Value) -> Value {
        let (status, value) = self.post(path, body).await;
        assert_eq!(status, 200, "{value:#}");
        value
    }

    async fn stream(&self, path: &str, mut body: Value) -> Vec<Value> {
        body["stream"] = true.into();
        let mut receiver = self.open(path, body).await;
        let mut out = vec![];
        while let Some(bytes) = receiver.recv().await {
            out.push(chunk(&bytes));
        }
        out
    }

    async fn open(&self, path: &str, body: Value) -> tokio::sync::mpsc::Receiver<Bytes> {
        match self.call(Method::POST, path, body.to_string().as_bytes()).await {
            Reply::Events(receiver) => receiver,
            other => panic!("{other:?}"),
        }
    }

    fn last(&self) -> Request {
        self.seen.lock().unwrap().last().unwrap().clone()
    }

    async fn idle(&self) {
        for _ in 0..2000 {
            if self.state.engine.open() == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        panic!("{} requests go on", self.state.engine.open());
    }
}

fn whole(reply: Reply) -> (u16, Value) {
    match reply {
        Reply::Whole { status, body, .. } => (status, serde_json::from_slice(&body).unwrap()),
        Reply::Events(_) => panic!("a stream"),
    }
}

fn chunk(bytes: &[u8]) -> Value {
    let text = std::str::from_utf8(bytes).unwrap();
    let data = text.strip_prefix("data: ").and_then(|t| t.strip_suffix("\n\n")).unwrap();
    assert!(!data.contains('\n'));
    if data == "[DONE]" { data.into() } else { serde_json::from_str(data).unwrap() }
}

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn hi(extra: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hi there"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn once(prompt: impl Into<Value>, extra: Value) -> Value {
    let mut body = json!({"prompt": prompt.into()});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn schema(schema: Value) -> Value {
    json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": schema}}})
}

fn tool() -> Value {
    let parameters = json!({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]});
    json!({"type": "function", "function": {"name": "add", "description": "d", "parameters": parameters}})
}

#[tokio::test]
async fn a_chat_has_openais_shape() {
    let bench = Bench::new();
    let got = bench.ok(CHAT, hi(json!({"model": "tiny"}))).await;
    let request = bench.last();
    let n = request.prompt.len();
    assert_eq!(
        (&got["id"], &got["object"], &got["model"]),
        (&json!("chatcmpl-r7"), &json!("chat.completion"), &json!("tiny"))
    );
    let choice = json!({
        "index": 0,
        "message": {"role": "assistant", "content": "<u:hi there>>", "refusal": null},
        "logprobs": null,
        "finish_reason": "stop",
    });
    assert_eq!(got["choices"], json!([choice]));
    let details = json!({"cached_tokens": 2});
    let usage = json!({"prompt_tokens": n, "completion_tokens": n + 1, "total_tokens": 2 * n + 1, "prompt_tokens_details": details});
    assert_eq!(got["usage"], usage);
    assert_eq!((&got["timings"]["cache_n"], &got["timings"]["prompt_n"]), (&json!(2), &json!(n - 2)));
    assert_eq!(got["timings"]["predicted_n"], json!(n + 1));
    assert!(got["created"].as_u64().unwrap() > 1_700_000_000 && got["system_fingerprint"].is_string());
    assert_eq!((request.max_tokens, request.sampling.top_k, request.stop_ids), (CONTEXT - n, 7, vec![EOS]));
}

#[tokio::test]
async fn a_stream_says_what_the_whole_answer_says() {
    let bench = Bench::new();
    let body = hi(
        json!({"n": 2, "stream_options": {"include_usage": true}, "logprobs": true, "top_logprobs": 1, "max_tokens": 6}),
    );
    let mut plain = body.clone();
    plain.as_object_mut().unwrap().remove("stream_options");
    let whole = bench.ok(CHAT, plain).await;
    let mut chunks = bench.stream(CHAT, body).await;
    assert_eq!(chunks.pop().unwrap(), "[DONE]");
    let usage = chunks.pop().unwrap();
    assert_eq!((&usage["choices"], &usage["usage"]), (&json!([]), &whole["usage"]));
    for at in 0..2 {
        let mine: Vec<&Value> = chunks.iter().map(|c| &c["choices"][0]).filter(|c| c["index"] == at).collect();
        assert_eq!(mine[0]["delta"], json!({"role": "assistant", "content": ""}));
        let text: String = mine.iter().filter_map(|c| c["delta"]["content"].as_str()).collect();
        assert_eq!(whole["choices"][at]["message"]["content"], text);
        let probs: Value = mine.iter().filter_map(|c| c["logprobs"]["content"].as_array()).flatten().cloned().collect();
        assert_eq!(whole["choices"][at]["logprobs"]["content"], probs);
        let ends: Vec<&Value> = mine.iter().map(|c| &c["finish_reason"]).filter(|f| !f.is_null()).collect();
        assert_eq!(ends, ["length"]);
        assert_eq!(mine.last().unwrap()["delta"], json!({}));
    }
    assert!(
        chunks
            .iter()
            .all(|c| c["object"] == "chat.completion.chunk" && c["usage"].is_null() && c.get("usage").is_some())
    );
    assert_eq!(chunks.iter().filter(|c| c.get("timings").is_some()).count(), 1);
    assert_eq!(chunks.last().unwrap()["timings"]["predicted_n"], 12);
}

#[tokio::test]
async fn texts_are_continued_alone_or_together() {
    let bench = Bench::new();
    let got = bench.ok(TEXT, once(json!(["one two", "three"]), json!({"n": 2, "seed": 10}))).await;
    assert_eq!((&got["object"], &got["id"]), (&json!("text_completion"), &json!("cmpl-r7")));
    let texts: Vec<&Value> = got["choices"].as_array().unwrap().iter().map(|c| &c["text"]).collect();
    assert_eq!(texts, ["one two", "one two", "three", "three"]);
    let seeds: Vec<u64> = bench.seen.lock().unwrap().iter().map(|r| r.sampling.seed).collect();
    assert_eq!(seeds, [10, 11, 10, 11]);
    let prompts: Vec<usize> = bench.seen.lock().unwrap().iter().map(|r| r.prompt.len()).collect();
    assert_eq!(got["usage"]["prompt_tokens"], prompts[0] + prompts[2]);

    let tokens = bench.last().prompt;
    for prompt in [json!(tokens), json!([tokens])] {
        let got = bench.ok(TEXT, once(prompt, json!({"max_tokens": CONTEXT - tokens.len()}))).await;
        assert_eq!(got["choices"][0]["text"], "three");
    }
    let chunks = bench.stream(TEXT, once("x y", json!({}))).await;
    let text: String = chunks.iter().filter_map(|c| c["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, "x y");
}

#[tokio::test]
async fn stop_texts_cut_the_answer_and_cancel_it() {
    let bench = Bench::new();
    for stop in [json!("e"), json!(["zz", "e"])] {
        let got = bench.ok(TEXT, once("~", json!({"stop": "~~~"}))).await;
        assert_eq!((&got["choices"][0]["text"], &got["choices"][0]["finish_reason"]), (&json!(""), &json!("stop")));
        let got = bench.ok(TEXT, once("a b c d e f g h", json!({"stop": stop}))).await;
        assert_eq!(
            (&got["choices"][0]["text"], &got["choices"][0]["finish_reason"]),
            (&json!("a b c d "), &json!("stop"))
        );
    }
    bench.idle().await;
    // Tokens that end are not shown; those of the model are ordinary where asked.
    let b = *bench.state.text.tokenizer().encode("a b", true).unwrap().last().unwrap();
    let got = bench.ok(TEXT, once("a b c", json!({"stop_token_ids": [b], "ignore_eos": true}))).await;
    assert!(!got["choices"][0]["text"].as_str().unwrap().contains('b'), "{got}");
    assert_eq!(bench.last().stop_ids, [b]);
}

#[tokio::test]
async fn logprobs_are_those_of_the_text_that_is_shown() {
    let bench = Bench::new();
    let tokenizer = bench.state.text.tokenizer();
    let text = "aé你 b🦀c the end";
    let tokens = tokenizer.encode(text, true).unwrap();
    let mut bytes = vec![];
    let mut places = vec![];
    for &id in &tokens {
        let whole = std::str::from_utf8(&bytes).map_or_else(|e| e.valid_up_to(), str::len);
        places.push(text[..whole].chars().count());
        bytes.extend(tokenizer.token_bytes(id).unwrap());
    }
    assert!(places.windows(2).any(|p| p[0] == p[1]), "no character of several tokens");
    let plain = bench.ok(TEXT, once(text, json!({"logprobs": 0}))).await;
    let offsets = |got: &Value| -> Vec<usize> {
        let list = got["choices"][0]["logprobs"]["text_offset"].as_array().unwrap();
        list.iter().map(|n| n.as_u64().unwrap() as usize).collect()
    };
    // The end-of-text token comes last.
    let all = [&places[..], &[text.chars().count()]].concat();
    assert_eq!(offsets(&plain), all);
    // Within a text that is repeated it is the same, and BOS is not in that text.
    let echo = bench.ok(TEXT, once(text, json!({"logprobs": 0, "echo": true}))).await;
    let bos = bench.last().prompt.len() - tokens.len();
    let behind = all.iter().map(|place| place + text.chars().count());
    let want: Vec<usize> = vec![0; bos].into_iter().chain(places.iter().copied()).chain(behind).collect();
    assert_eq!(offsets(&echo), want);
    // A stop text takes its tokens with it, whether it begins with one or within one.
    for stop in ["你", " b", "🦀c", "e end", "d"] {
        let cut = text.chars().count() - text[text.find(stop).unwrap()..].chars().count();
        let kept: Vec<usize> = places.iter().copied().take_while(|&place| place < cut).collect();
        for more in [json!({"logprobs": 0, "stop": stop}), json!({"logprobs": 0, "stop": [stop, "zzz"]})] {
            let got = bench.ok(TEXT, once(text, more.clone())).await;
            assert_eq!(got["choices"][0]["text"].as_str().unwrap().chars().count(), cut);
            assert_eq!(offsets(&got), kept, "{stop}");
            let chunks = bench.stream(TEXT, once(text, more)).await;
            assert_eq!(
                chunks.iter().flat_map(|c| if c.is_object() { offsets(c) } else { vec![] }).collect::<Vec<_>>(),
                kept
            );
        }
    }
    // What might have become a stop text and did not is there.
    assert_eq!(offsets(&bench.ok(TEXT, once(text, json!({"logprobs": 0, "stop": "end!"}))).await), all);
}

#[tokio::test]
async fn an_echo_comes_with_its_logprobs() {
    let bench = Bench::new();
    let got = bench.ok(TEXT, once("ab cd", json!({"echo": true, "logprobs": 1, "max_tokens": 0}))).await;
    let (choice, n) = (&got["choices"][0], bench.last().prompt.len());
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("ab cd"), &json!("length")));
    let logprobs = &choice["logprobs"];
    for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[list].as_array().unwrap().len(), n, "{list}");
    }
    assert_eq!((&logprobs["token_logprobs"][0], &logprobs["token_logprobs"][1]), (&Value::Null, &json!(-1.0)));
    assert_eq!(logprobs["top_logprobs"][0], Value::Null);
    assert_eq!(got["usage"]["completion_tokens"], 0);

    let got = bench.ok(TEXT, once("ab cd", json!({"echo": true, "logprobs": 0, "max_tokens": 2}))).await;
    assert!(got["choices"][0]["text"].as_str().unwrap().starts_with("ab cdab"), "{got}");
    assert_eq!(got["choices"][0]["logprobs"]["tokens"].as_array().unwrap().len(), n + 2);
    assert_eq!(got["choices"][0]["logprobs"]["token_logprobs"][n], json!(-0.5));
    let body = once("ab cd", json!({"echo": true, "max_tokens": 2}));
    let plain = bench.ok(TEXT, body.clone()).await;
    assert_eq!(plain["choices"][0]["text"], got["choices"][0]["text"]);
    let chunks = bench.stream(TEXT, body).await;
    let text: String = chunks.iter().filter_map(|c| c["choices"][0]["text"].as_str()).collect();
    assert_eq!(plain["choices"][0]["text"], text);
}

#[tokio::test]
async fn sampling_reaches_the_engine() {
    let bench = Bench::new();
    let fields = json!({
        "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1,
        "repeat_penalty": 1.5, "repeat_last_n": 9, "seed": 3, "logit_bias": {"5": -100, "6": 250, "7": 1.5},
        "max_completion_tokens": 4, "max_tokens": 9, "priority": -2, "cache_salt": "s", "user": "u", "unknown": [1],
        "best_of": 1, "modalities": ["text"], "chat_template_kwargs": {"suffix": "!"},
    });
    let got = bench.ok(CHAT, hi(fields)).await;
    assert_eq!(got["choices"][0]["finish_reason"], "length");
    let r = bench.last();
    let sampling = SamplingParams {
        temperature: 0.5,
        top_k: 0,
        top_p: 0.9,
        min_p: 0.1,
        repetition_penalty: 1.5,
        presence_penalty: 1.0,
        frequency_penalty: -1.0,
        penalty_last_n: Some(9),
        logit_bias: vec![(5, f32::NEG_INFINITY), (6, 100.0), (7, 1.5)],
        seed: 3,
    };
    assert_eq!(r.sampling, sampling);
    assert_eq!((r.max_tokens, r.priority, r.cache_salt.as_deref()), (4, -2, Some("s")));
    let text = bench.state.text.tokenizer().decode(&r.prompt, true).unwrap();
    assert_eq!(text, "<u:hi there>>!");
    // Without a seed, each request has its own.
    bench.ok(CHAT, hi(json!({}))).await;
    let first = bench.last().sampling.seed;
    bench.ok(CHAT, hi(json!({"seed": -1, "logit_bias": [[5, false], [6, 2]]}))).await;
    assert_ne!(bench.last().sampling.seed, first);
    assert_eq!(bench.last().sampling.logit_bias, [(5, f32::NEG_INFINITY), (6, 2.0)]);
}

#[tokio::test]
async fn priorities_are_taken_where_the_server_takes_them() {
    let mut bench = Bench::new();
    bench.ok(TEXT, once("x", json!({"priority": -3}))).await;
    assert_eq!(bench.last().priority, -3);
    bench.idle().await;
    Arc::get_mut(&mut bench.state).unwrap().priorities = false;
    bench.ok(TEXT, once("x", json!({"priority": 0}))).await;
    let (status, value) = bench.post(CHAT, hi(json!({"priority": -3}))).await;
    assert_eq!((status, &value["error"]["param"]), (400, &json!("priority")), "{value}");
}

#[tokio::test]
async fn methods_are_taken_where_there_is_what_they_need() {
    let bench = Bench::new();
    bench.ok(TEXT, once("x", json!({"speculate": "ngram:4"}))).await;
    assert_eq!(bench.last().speculation.map(|s| s.to_string()).as_deref(), Some("ngram:4"));
    for method in ["draft", "draft:3", "eagle", "mtp"] {
        let (status, value) = bench.post(CHAT, hi(json!({"speculate": method}))).await;
        assert_eq!((status, &value["error"]["param"]), (400, &json!("speculate")), "{value}");
        assert!(value["error"]["message"].as_str().unwrap().contains("--draft"), "{value}");
    }
}

#[tokio::test]
async fn messages_of_all_kinds_reach_the_template() {
    let bench = Bench::new();
    let messages = json!([
        {"role": "developer", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "r", "tool_call_id": "c"},
    ]);
    let got = bench.ok(CHAT, json!({"messages": messages})).await;
    assert_eq!(got["choices"][0]["message"]["content"], "<s:be><u:a\nb><a:><t:r>>");

    let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}]);
    let got = bench.ok(CHAT, json!({"messages": messages, "add_generation_prompt": false})).await;
    assert_eq!(got["choices"][0]["message"]["content"], "<u:a><a:b >");
    let got = bench.ok(CHAT, json!({"messages": messages, "continue_final_message": true})).await;
    assert_eq!(got["choices"][0]["message"]["content"], "<u:a><a:b");

    let bench = Bench::with(
        Some("{% for m in messages %}{{ m.tool_calls[0].function.arguments.x }}{{ m.role[:3] }}{% endfor %}developer"),
        9,
        None,
    );
    let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 5}"}});
    let messages = json!([{"role": "assistant", "tool_calls": [call]}]);
    let got = bench.ok(CHAT, json!({"messages": messages})).await;
    assert_eq!(got["choices"][0]["message"]["content"], "5assdeveloper");
}

#[tokio::test]
async fn bad_requests_are_refused_by_field() {
    let bench = Bench::new();
    let long = vec!["word"; 200].join(" ");
    let image = json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]);
    let table: Vec<(&str, Value, u16, &str, &str)> = vec![
        (CHAT, json!({}), 400, "messages", "missing"),
        (CHAT, json!({"messages": "x"}), 400, "messages", "expected a list"),
        (CHAT, json!({"messages": []}), 400, "messages", "1 to"),
        (CHAT, json!({"messages": ["x"]}), 400, "messages[0]", "object with a role"),
        (CHAT, json!({"messages": [{"content": "x"}]}), 400, "messages[0].role", "expected system"),
        (CHAT, json!({"messages": [{"role": "usr", "content": "x"}]}), 400, "messages[0].role", "\"usr\""),
        (CHAT, json!({"messages": [{"role": "user"}]}), 400, "messages[0].content", "a string"),
        (CHAT, json!({"messages": [{"role": "user", "content": [3]}]}), 400, "messages[0].content[0]", "type"),
        (CHAT, json!({"messages": image}), 400, "messages[0].content[0].type", "images"),
        (CHAT, json!({"messages": [{"role": "user", "content": long}]}), 400, "messages", "context holds 300"),
        (CHAT, hi(json!({"max_tokens": 295})), 400, "messages", "295 more are asked for"),
        (CHAT, hi(json!({"max_tokens": 0})), 400, "max_tokens", "at least 1"),
        (CHAT, hi(json!({"max_tokens": "many"})), 400, "max_tokens", "\"many\""),
        (CHAT, hi(json!({"n": 0})), 400, "n", "1 to 128"),
        (CHAT, hi(json!({"n": 129})), 400, "n", "1 to 128"),
        (CHAT, hi(json!({"best_of": 3})), 400, "best_of", "not supported"),
        (CHAT, hi(json!({"temperature": -1})), 400, "temperature", "-1"),
        (CHAT, hi(json!({"temperature": "hot"})), 400, "temperature", "a number"),
        (CHAT, hi(json!({"temperature": 1e300})), 400, "temperature", "a number"),
        (CHAT, hi(json!({"top_p": 0})), 400, "top_p", "more than 0"),
        (CHAT, hi(json!({"repeat_penalty": 0})), 400, "repeat_penalty", "more than 0"),
        (CHAT, hi(json!({"top_k": 1.5})), 400, "top_k", "whole number"),
        (CHAT, hi(json!({"seed": "x"})), 400, "seed", "whole number"),
        (CHAT, hi(json!({"logit_bias": {"x": 1}})), 400, "logit_bias", "token ids"),
        (CHAT, hi(json!({"logit_bias": {"320": 1}})), 400, "logit_bias.320", "0 to 319"),
        (CHAT, hi(json!({"logit_bias": {"3": "y"}})), 400, "logit_bias.3", "-100"),
        (CHAT, hi(json!({"logit_bias": 3})), 400, "logit_bias", "object"),
        (CHAT, hi(json!({"stop": ""})), 400, "stop", "1 to"),
        (CHAT, hi(json!({"stop": vec!["x"; 33]})), 400, "stop", "at most 32"),
        (CHAT, hi(json!({"stop_token_ids": [-1]})), 400, "stop_token_ids[0]", "0 to 319"),
        (CHAT, hi(json!({"logprobs": true, "top_logprobs": 21})), 400, "top_logprobs", "0 to 20"),
        (CHAT, hi(json!({"top_logprobs": 2})), 400, "top_logprobs", "logprobs"),
        (CHAT, hi(json!({"stream": 1})), 400, "stream", "true or false"),
        (CHAT, hi(json!({"stream_options": {"include_usage": "y"}})), 400, "stream_options.include_usage", "true"),
        (CHAT, hi(json!({"response_format": "json"})), 400, "response_format", "an object"),
        (CHAT, hi(json!({"response_format": {"type": "yaml"}})), 400, "response_format.type", "json_schema"),
        (CHAT, hi(schema(json!(null))), 400, "response_format.json_schema.schema", "a JSON schema"),
        (CHAT, hi(schema(json!({"type": "word"}))), 400, "response_format.json_schema.schema", "word"),
        (CHAT, hi(json!({"json_schema": {"$ref": "#/no"}})), 400, "json_schema", "cannot be used"),
        (CHAT, hi(json!({"json_schema": "{"})), 400, "json_schema", "a JSON schema"),
        (CHAT, hi(json!({"grammar": "root ::= x"})), 400, "grammar", "Lark"),
        (CHAT, hi(json!({"guided_regex": "("})), 400, "guided_regex", "cannot be used"),
        (CHAT, hi(json!({"guided_choice": []})), 400, "guided_choice", "at least one"),
        (CHAT, hi(json!({"guided_choice": [3]})), 400, "guided_choice", "list of strings"),
        (CHAT, hi(json!({"guided_regex": "a", "guided_json": {}})), 400, "guided_regex", "both given"),
        (CHAT, hi(json!({"guided_regex": "a", "ignore_eos": true})), 400, "ignore_eos", "expected false"),
        (CHAT, hi(json!({"structured_outputs": {}})), 400, "structured_outputs", "0 of json"),
        (CHAT, hi(json!({"structured_outputs": {"regex": "("}})), 400, "structured_outputs.regex", "cannot"),
        (CHAT, hi(json!({"tools": [{"type": "x"}]})), 400, "tools[0].type", "function"),
        (CHAT, hi(json!({"tool_choice": "required"})), 400, "tool_choice", "no tools"),
        (CHAT, hi(json!({"tools": [tool()], "tool_choice": "sometimes"})), 400, "tool_choice", "auto"),
        (CHAT, hi(json!({"tools": [tool()], "guided_regex": "a"})), 400, "guided_regex", "tools"),
        (CHAT, hi(json!({"tools": [tool()], "ignore_eos": true})), 400, "ignore_eos", "tools"),
        (TEXT, once("x", json!({"guided_regex": "("})), 400, "guided_regex", "cannot be used"),
        (CHAT, hi(json!({"functions": [{}]})), 400, "functions", "not supported"),
        (CHAT, hi(json!({"mirostat": 2})), 400, "mirostat", "not supported"),
        (CHAT, hi(json!({"model": "gpt-5"})), 404, "model", "expected tiny or gpt-4/x"),
        (CHAT, hi(json!({"model": 3})), 400, "model", "a string"),
        (TEXT, json!({}), 400, "prompt", "missing"),
        (TEXT, once("", json!({"suffix": "x"})), 400, "suffix", "not supported"),
        (TEXT, once(json!([]), json!({})), 400, "prompt", "a list of strings"),
        (TEXT, once(json!([1, "x"]), json!({})), 400, "prompt[1]", "token id"),
        (TEXT, once(json!(["x", 1]), json!({})), 400, "prompt[1]", "a string or"),
        (TEXT, once(json!([[1], []]), json!({})), 400, "prompt[1]", "at least one"),
        (TEXT, once(json!([[1, 320]]), json!({})), 400, "prompt[0][1]", "0 to 319"),
        (TEXT, once("x", json!({"logprobs": 21})), 400, "logprobs", "0 to 20"),
        (TEXT, once("x", json!({"logprobs": true})), 400, "logprobs", "whole number"),
        (TEXT, once(vec!["x"; 2000], json!({"n": 2})), 400, "n", "at most"),
        (TEXT, once(vec![5; 301], json!({})), 400, "prompt", "301 tokens"),
        ("/v1/embeddings", json!({"input": ["x", vec![5; 301]]}), 400, "input[1]", "301 tokens"),
        ("/v1/embeddings", json!({"input": "x", "encoding_format": "hex"}), 400, "encoding_format", "base64"),
        ("/v1/embeddings", json!({"input": "x", "dimensions": 3}), 400, "dimensions", "expected 2"),
        ("/v1/embeddings", json!({"input": "x", "pooling": "cls"}), 400, "pooling", "mean or last"),
        ("/tokenize", json!({}), 400, "content", "missing"),
        ("/detokenize", json!({"tokens": [1, 320]}), 400, "tokens[1]", "0 to 319"),
    ];
    for (path, body, status, param, part) in table {
        let (got, value) = bench.post(path, body.clone()).await;
        let error = &value["error"];
        assert_eq!((got, error["param"].as_str()), (status, Some(param)), "{path} {body}: {value}");
        assert!(error["message"].as_str().unwrap().contains(part), "{part}: {value}");
        assert_eq!(error["type"], "invalid_request_error");
    }
    let (_, value) = bench.post(TEXT, once(vec![5; 301], json!({}))).await;
    assert_eq!(value["error"]["code"], "context_length_exceeded");
    let (_, value) = bench.post(TEXT, once("x", json!({"model": "y"}))).await;
    assert_eq!(value["error"]["code"], "model_not_found");
    for body in [&b""[..], b"{", b"[]", b"\xFF", &[b'['; 100_000]] {
        let (status, value) = whole(bench.call(Method::POST, CHAT, body).await);
        assert_eq!(status, 400, "{value}");
    }
    assert_eq!(whole(bench.call(Method::GET, CHAT, b"").await).0, 405);
    assert_eq!(whole(bench.call(Method::GET, "/v2", b"").await).0, 404);
    assert_eq!(bench.state.engine.open(), 0);
}

#[tokio::test]
async fn a_model_without_template_continues_text_only() {
    let bench = Bench::with(None, 9, None);
    let (status, value) = bench.post(CHAT, hi(json!({}))).await;
    assert_eq!(status, 400);
    assert!(value["error"]["message"].as_str().unwrap().contains("/v1/completions"), "{value}");
    assert_eq!(bench.ok(TEXT, once("x", json!({}))).await["choices"][0]["text"], "x");
}

#[tokio::test]
async fn models_have_names_and_aliases() {
    let bench = Bench::new();
    let (_, list) = whole(bench.call(Method::GET, "/v1/models", b"").await);
    let ids: Vec<&Value> = list["data"].as_array().unwrap().iter().map(|m| &m["id"]).collect();
    assert_eq!(ids, ["tiny", "gpt-4/x"]);
    assert_eq!((&list["data"][1]["parent"], &list["data"][0]["max_model_len"]), (&json!("tiny"), &json!(CONTEXT)));
    for path in ["/v1/models/gpt-4/x", "/v1/models/gpt-4%2Fx"] {
        assert_eq!(whole(bench.call(Method::GET, path, b"").await).1["id"], "gpt-4/x");
    }
    let (status, value) = whole(bench.call(Method::GET, "/v1/models/other%2", b"").await);
    assert_eq!((status, &value["error"]["code"]), (404, &json!("model_not_found")));
    bench.ok(TEXT, once("x", json!({"model": "gpt-4/x"}))).await;
}

#[tokio::test]
async fn texts_become_vectors() {
    let bench = Bench::new();
    let got = bench.ok("/v1/embeddings", json!({"input": ["a", "b c"], "dimensions": 2})).await;
    assert_eq!(got["data"][0], json!({"object": "embedding", "index": 0, "embedding": [0.6, 0.8]}));
    assert_eq!(got["data"][1]["index"], 1);
    let tokens: usize = bench.seen.lock().unwrap().iter().map(|r| r.prompt.len()).sum();
    assert_eq!(got["usage"], json!({"prompt_tokens": tokens, "total_tokens": tokens}));
    let got =
        bench.ok("/v1/embeddings", json!({"input": [5, 6], "encoding_format": "base64", "pooling": "last"})).await;
    let bytes: Vec<u8> = [-0.6f32, 0.8].iter().flat_map(|x| x.to_le_bytes()).collect();
    assert_eq!(got["data"][0]["embedding"], "mpkZv83MTD8=", "{bytes:02x?}");
}

#[tokio::test]
async fn tokens_and_texts_are_each_others_inverse() {
    let bench = Bench::new();
    let got = bench.ok("/tokenize", json!({"content": "hé", "with_pieces": true})).await;
    let list = got["tokens"].as_array().unwrap();
    assert_eq!(got["count"], list.len());
    assert!(list.iter().all(|t| t["id"].is_u64() && (t["piece"].is_string() || t["piece"].is_array())), "{got}");
    let plain = bench.ok("/tokenize", json!({"content": "hé"})).await["tokens"].clone();
    let with_bos = bench.ok("/tokenize", json!({"prompt": "hé", "return_token_strs": true})).await;
    assert_eq!(with_bos["tokens"].as_array().unwrap().len(), with_bos["token_strs"].as_array().unwrap().len());
    let added = bench.ok("/tokenize", json!({"content": "hé", "add_special": true})).await;
    assert_eq!(added["tokens"], with_bos["tokens"]);
    let back = bench.ok("/detokenize", json!({"tokens": plain})).await;
    assert_eq!(back, json!({"content": "hé", "prompt": "hé"}));
    let chat = bench.ok("/tokenize", hi(json!({}))).await;
    bench.ok(CHAT, hi(json!({}))).await;
    assert_eq!(chat["tokens"], json!(bench.last().prompt));
}

#[tokio::test]
async fn texts_that_cannot_fit_are_not_tokenized() {
    let bench = Bench::new();
    let most = CONTEXT * bench.state.text.tokenizer().longest_token();
    let refused = |(status, value): (u16, Value), part: &str| {
        assert_eq!(status, 400, "{value}");
        assert!(value["error"]["message"].as_str().unwrap().contains(part), "{part}: {value}");
        value
    };
    let long = "a".repeat(most + 1);
    for (path, body) in [
        (TEXT, once(long.clone(), json!({}))),
        (TEXT, once(json!(["x", long]), json!({}))),
        (CHAT, json!({"messages": [{"role": "user", "content": long}]})),
        ("/tokenize", json!({"messages": [{"role": "user", "content": long}]})),
        ("/v1/embeddings", json!({"input": long})),
    ] {
        let value = refused(bench.post(path, body).await, "a token stands for at most");
        assert_eq!(value["error"]["code"], "context_length_exceeded");
    }
    // One byte less is looked at, as far as needed.
    assert!(most > 4 * CONTEXT, "{most}");
    let value = refused(bench.post(TEXT, once("a".repeat(most), json!({}))).await, "more than 600 tokens in");
    assert_eq!(value["error"]["code"], "context_length_exceeded");
    refused(bench.post(TEXT, once("a".repeat(500), json!({}))).await, "the prompt has 500 tokens");
    // What only looks long is taken.
    let special = "<|eos|>".repeat(CONTEXT - 10);
    assert!(special.len() > 4 * CONTEXT);
    bench.ok(TEXT, once(special, json!({"max_tokens": 1}))).await;
    refused(bench.post("/tokenize", json!({"content": "a".repeat((1 << 20) + 1)})).await, "1048576 are taken");
    refused(bench.post("/detokenize", json!({"tokens": vec![70; (1 << 18) + 1]})).await, "262144 are taken");
    assert_eq!(bench.ok("/tokenize", json!({"content": long})).await["count"], most + 1);
}

/// Ends within moments, or waits for something.
async fn waits<T>(work: &mut (impl Future<Output = T> + Unpin)) -> bool {
    tokio::time::timeout(Duration::from_millis(200), work).await.is_err()
}

#[tokio::test]
async fn long_work_leaves_threads_for_short_work() {
    let bench = Bench::new();
    let text = "a".repeat(200 << 10);
    let many: Vec<[u32; 2]> = (0..2048).map(|i| [70, 3 + i % 300]).collect();
    let logprobs = once("ab ".repeat(60), json!({"echo": true, "logprobs": 20, "max_tokens": 20}));
    let read = bench.state.lanes.read.clone().acquire_owned().await.unwrap();
    let write = bench.state.lanes.write.clone().acquire_owned().await.unwrap();
    let mut large_text = Box::pin(bench.ok("/tokenize", json!({"content": text})));
    let mut large_answer = Box::pin(bench.ok("/v1/embeddings", json!({"input": many})));
    let mut large_logprobs = Box::pin(bench.ok(TEXT, logprobs.clone()));
    assert!(waits(&mut large_text).await && waits(&mut large_answer).await && waits(&mut large_logprobs).await);
    let mut streamed = logprobs.clone();
    streamed["stream"] = true.into();
    let mut stream = bench.open(TEXT, streamed).await;
    assert!(waits(&mut Box::pin(stream.recv())).await);
    // Small ones go on.
    bench.ok("/tokenize", json!({"content": "a"})).await;
    bench.ok("/v1/embeddings", json!({"input": "a"})).await;
    bench.ok(TEXT, once("a", json!({"logprobs": 1}))).await;
    drop(write);
    let (answer, logprobs) = (large_answer.await, large_logprobs.await);
    assert_eq!(answer["data"][2047], json!({"object": "embedding", "index": 2047, "embedding": [0.6, 0.8]}));
    assert!(stream.recv().await.is_some());
    assert!(logprobs["choices"][0]["logprobs"]["tokens"].as_array().unwrap().len() > 100);
    assert!(waits(&mut large_text).await);
    drop(read);
    assert_eq!(large_text.await["count"], 200 << 10);
}

#[tokio::test]
async fn who_leaves_is_not_answered_any_more() {
    let bench = Bench::new();
    // A stream whose reader goes away.
    let mut events = bench.open(TEXT, once("~", json!({"stream": true}))).await;
    assert!(events.recv().await.is_some());
    assert_eq!(bench.state.engine.open(), 1);
    drop(events);
    bench.idle().await;
    // One that has not been answered at all, and cannot be written to.
    let events = bench.open(TEXT, once("~~", json!({"stream": true}))).await;
    drop(events);
    bench.idle().await;
    // A reader that stands still: the channel is full.
    let events = bench.open(TEXT, once("~", json!({"stream": true}))).await;
    while events.len() < events.max_capacity() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop(events);
    bench.idle().await;
    // Whole answers: the future is dropped.
    let body = once("~", json!({})).to_string();
    let call = bench.call(Method::POST, TEXT, body.as_bytes());
    assert!(tokio::time::timeout(Duration::from_millis(50), call).await.is_err());
    bench.idle().await;
}

#[tokio::test]
async fn an_answer_that_nobody_reads_is_ended() {
    let mut bench = Bench::new();
    let notes = Arc::new(Mutex::new(vec![]));
    let to = notes.clone();
    let state = Arc::get_mut(&mut bench.state).unwrap();
    state.note = Arc::new(move |note| to.lock().unwrap().push(note.to_string()));
    let body = once("~", json!({"n": 128, "stream": true, "logprobs": 20}));
    let events = bench.open(TEXT, body).await;
    bench.idle().await;
    assert_eq!(events.len(), events.max_capacity());
    let notes = notes.lock().unwrap();
    assert!(notes.len() == 1 && notes[0].starts_with("cmpl-r7: the answer was ended: 4"), "{notes:?}");
}

#[tokio::test]
async fn unread_tokens_end_a_request_of_which_a_choice_has_ended() {
    let bench = Bench::new();
    let tokens = |text: &str| bench.state.text.tokenizer().encode(text, true).unwrap();
    let request = |text: &str| Request {
        prompt: tokens(text),
        max_tokens: CONTEXT,
        stop_ids: vec![EOS],
        logprobs: Some(20),
        ..Request::default()
    };
    let requests = [vec![request("x")], vec![request("~"); 63]].concat();
    let text = crate::text::TextStream::default();
    let mut run = run::Run::start(bench.state.clone(), Instant::now(), requests, &text, None).unwrap();
    while !matches!(run.next().await.unwrap(), Some((0, run::Update::End(..)))) {}
    run.unread().over().await;
    // What was read before it was too much may still come.
    let error = loop {
        if let Err(error) = run.next().await {
            break error;
        }
    };
    assert_eq!((error.status, error.code), (408, Some("answer_not_read")));
    drop(run);
    bench.idle().await;
}

/// As vLLM does: the request fails as a whole, and what it began is ended.
#[tokio::test]
async fn one_failing_choice_fails_its_request() {
    let bench = Bench::new();
    for prompt in [json!(["x y", "! z", "~"]), json!(["~", "! z"])] {
        let (status, value) = bench.post(TEXT, once(prompt.clone(), json!({}))).await;
        assert_eq!((status, &value["error"]["type"]), (500, &json!("server_error")), "{value}");
        bench.idle().await;
        let chunks = bench.stream(TEXT, once(prompt, json!({}))).await;
        let errors = chunks.iter().filter(|c| c.get("error").is_some()).count();
        assert!(errors == 1 && chunks.last().unwrap().get("error").is_some(), "{chunks:?}");
        bench.idle().await;
    }
    assert_eq!(bench.ok(TEXT, once("x", json!({}))).await["choices"][0]["text"], "x");
}

#[tokio::test]
async fn requests_that_take_too_long_are_ended() {
    let bench = Bench::with(Some(TEMPLATE), 9, Some(Duration::from_millis(60)));
    let (status, value) = bench.post(TEXT, once("~", json!({}))).await;
    assert_eq!((status, &value["error"]["code"]), (504, &json!("timeout")), "{value}");
    let chunks = bench.stream(TEXT, once("~~", json!({}))).await;
    assert_eq!((chunks.len(), &chunks[0]["error"]["code"]), (1, &json!("timeout")), "{chunks:?}");
    bench.idle().await;
    assert_eq!(bench.ok(TEXT, once("x", json!({}))).await["choices"][0]["text"], "x");
}

#[tokio::test]
async fn failures_are_told_before_and_within_a_stream() {
    let bench = Bench::new();
    let (status, value) = bench.post(TEXT, once("! x", json!({}))).await;
    assert_eq!((status, &value["error"]["type"]), (500, &json!("server_error")), "{value}");
    assert!(value["error"]["message"].as_str().unwrap().contains("as asked"));
    let chunks = bench.stream(TEXT, once("! x", json!({}))).await;
    assert!(chunks.last().unwrap()["error"]["message"].as_str().unwrap().contains("as asked"), "{chunks:?}");
    bench.idle().await;
}

#[tokio::test]
async fn a_full_queue_and_a_stopping_server_say_so() {
    let bench = Bench::with(Some(TEMPLATE), 1, None);
    let waits = bench.open(TEXT, once("~~", json!({"stream": true}))).await;
    match bench.call(Method::POST, TEXT, once("x", json!({})).to_string().as_bytes()).await {
        Reply::Whole { status, headers, body, .. } => {
            assert_eq!((status, headers), (429, vec![("retry-after", "1".to_string())]), "{body:?}");
        }
        other => panic!("{other:?}"),
    }
    drop(waits);
    bench.idle().await;
    bench.ok(TEXT, once("x", json!({}))).await;
    bench.state.engine.drain();
    let (status, value) = bench.post(TEXT, once("x", json!({}))).await;
    assert_eq!((status, &value["error"]["type"]), (503, &json!("service_unavailable_error")));
}

#[tokio::test]
async fn formats_constrain_the_answer() {
    let bench = Bench::new();
    for format in [
        json!({"response_format": {"type": "json_object"}}),
        json!({"response_format": {"type": "json_object", "schema": {"type": "object"}}}),
        schema(json!({"type": "object", "properties": {"a": {"type": "integer"}}})),
        json!({"json_schema": {"type": "integer"}}),
        json!({"guided_json": "{\"type\": \"integer\"}"}),
        json!({"guided_regex": "[a-z]+"}),
        json!({"guided_choice": ["yes", "no"]}),
        json!({"grammar": "start: \"yes\" | \"no\""}),
        json!({"structured_outputs": {"choice": ["yes"]}}),
        json!({"structured_outputs": {"json_object": true}}),
    ] {
        bench.ok(CHAT, hi(format.clone())).await;
        assert!(bench.last().constraint.is_some(), "{format}");
        bench.ok(TEXT, once("x", format)).await;
        assert!(bench.last().constraint.is_some());
    }
    for none in [json!({"response_format": {"type": "text"}}), json!({"grammar": ""}), json!({"guided_json": null})] {
        bench.ok(CHAT, hi(none)).await;
        assert!(bench.last().constraint.is_none());
    }
}

/// Answers with the last message.
const LAST: &str = "{{ messages[-1].content }}";

#[tokio::test]
async fn calls_are_found_whole_and_streamed() {
    let bench = Bench::with(Some(LAST), 9, None);
    let call = r#"<tool_call>{"name": "add", "arguments": {"x": 5}}</tool_call>"#;
    let body = |text: String, more: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": text}], "tools": [tool()]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    for (text, content) in [(call.to_string(), None), (format!("Well: {call}"), Some("Well: "))] {
        let got = bench.ok(CHAT, body(text.clone(), json!({}))).await;
        let choice = &got["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{got}");
        assert_eq!(choice["message"]["content"].as_str().map(str::trim), content.map(str::trim));
        let calls = choice["message"]["tool_calls"].as_array().unwrap();
        assert_eq!((calls.len(), &calls[0]["type"], calls[0].get("index")), (1, &json!("function"), None));
        assert_eq!(calls[0]["function"]["name"], "add");
        let arguments: Value = serde_json::from_str(calls[0]["function"]["arguments"].as_str().unwrap()).unwrap();
        assert_eq!(arguments, json!({"x": 5}));
        assert!(bench.last().constraint.is_some());

        let chunks = bench.stream(CHAT, body(text, json!({}))).await;
        let deltas = || chunks.iter().filter_map(|c| c["choices"].get(0)).map(|c| &c["delta"]);
        let called: Vec<&Value> = deltas().filter_map(|d| d["tool_calls"].as_array()).flatten().collect();
        assert!(called.iter().all(|call| call["index"] == 0) && called.len() > 2, "{called:?}");
        assert_eq!((&called[0]["type"], &called[0]["function"]["name"]), (&json!("function"), &json!("add")));
        assert!(called[1..].iter().all(|call| call.get("id").is_none() && call["function"].get("name").is_none()));
        let arguments: String = called.iter().filter_map(|call| call["function"]["arguments"].as_str()).collect();
        assert_eq!(calls[0]["function"]["arguments"], arguments);
        let streamed: String = deltas().filter_map(|d| d["content"].as_str()).collect();
        assert_eq!(streamed.trim(), content.unwrap_or_default().trim());
        let ends = chunks.iter().filter_map(|c| c["choices"][0]["finish_reason"].as_str());
        assert_eq!(ends.collect::<Vec<_>>(), ["tool_calls"]);
    }
    // Not asked for: text.
    let got = bench.ok(CHAT, body(call.into(), json!({"tool_choice": "none"}))).await;
    assert_eq!(
        (&got["choices"][0]["message"]["content"], &got["choices"][0]["finish_reason"]),
        (&json!(call), &json!("stop"))
    );
    assert!(bench.last().constraint.is_none());
}

#[tokio::test]
async fn templates_are_told_about_tools() {
    let text = |bench: &Bench| bench.state.text.tokenizer().decode(&bench.last().prompt, true).unwrap();
    let ask = json!({"messages": [{"role": "user", "content": "q"}], "tools": [tool()], "max_tokens": 1});
    let bench =
        Bench::with(Some("{% for t in tools %}{{ t.function.name }}{% endfor %}{{ messages | length }}"), 9, None);
    bench.ok(CHAT, ask.clone()).await;
    assert_eq!(text(&bench), "add1");
    let mut none = ask.clone();
    none["tool_choice"] = "none".into();
    bench.ok(CHAT, none).await;
    assert_eq!(text(&bench), "1");
    // One that knows nothing of them gets a system message, before what is there.
    let bench = Bench::with(
        Some("{{ messages[0].content[:18] }}{{ messages[0].content[-3:] }}{{ messages | length }}"),
        9,
        None,
    );
    bench.ok(CHAT, ask.clone()).await;
    assert!(text(&bench).starts_with("You may call funct") && text(&bench).ends_with('2'), "{}", text(&bench));
    let mut with_system = ask;
    with_system["messages"] = json!([{"role": "system", "content": "End"}, {"role": "user", "content": "q"}]);
    bench.ok(CHAT, with_system).await;
    assert_eq!(text(&bench), "You may call functEnd2");
}
