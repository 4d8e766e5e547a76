//! Ten thousand requests, good, bad, slow and abandoned, at once: every good one gets the answer that it gets alone,
//! and in the end the server holds no more than in the beginning.
//!
//! The cache is so small that requests wait, start again and lose what was remembered. What request `i` is depends on
//! `i` alone; when it comes depends on the machine.

use std::{
    fs,
    io::{BufReader, Read, Write},
    net::TcpStream,
    path::PathBuf,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use serde_json::{Value, json};

use super::server::{Answer, Server, request, text};
use crate::support::{
    Random, Scratch, fixture,
    model::kept,
    program::{command, wait_for},
};

const REQUESTS: usize = 10_000;
/// After these, caches and buffers are as full as they get.
const WARM: usize = 2_000;
const CLIENTS: usize = 16;
/// Threads that read requests: they start when they are needed, and end when they are not.
const READERS: f64 = 3.0;
/// Bytes by which resident memory may differ: those of allocators.
const MARGIN: f64 = 8e6;

const TEXT: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
const VECTOR: &str = "/v1/embeddings";

/// Tokens of the model.
const VOCAB: usize = 320;
const CONTEXT: usize = 128;

#[test]
fn answers_are_those_of_lone_requests_whatever_others_do() {
    let scratch = Scratch::new("soak");
    let file = model(&scratch);
    let flags = "--port 0 --ctx 128 --cache-tokens 256 --sequences 16 --threads 1 --max-body 20000 --batch-tokens 64";
    let flags: Vec<&str> = ["serve", text(&file)].into_iter().chain(flags.split(' ')).collect();
    let mut server = Server::spawn(command(&flags));
    server.wait_until_ready();
    let idle = sockets(&server);
    let cases = Cases::new(&server);
    let at_first = Held::by(&server, idle);
    let counts = ["vllm:num_preemptions_total", "vllm:prefix_cache_hits_total"];
    let counted = counts.map(|name| server.metric(name));

    let next = AtomicUsize::new(0);
    load(&server, &cases, &next, WARM);
    let warm = Held::by(&server, idle);
    load(&server, &cases, &next, REQUESTS);
    let last = Held::by(&server, idle);

    assert!(last.memory < warm.memory + MARGIN, "{warm:?} after {WARM} requests, {last:?} after {REQUESTS}");
    assert_eq!(last.files, at_first.files);
    assert!(last.threads <= at_first.threads + READERS, "{at_first:?}, {last:?}");
    // The load was one: there was too little room, beginnings were shared, clients left in the middle.
    for (name, before) in counts.into_iter().zip(counted) {
        assert!(server.metric(name) > before, "{name}");
    }
    let page = server.get("/metrics").body;
    let ended = |reason: &str| value(&page, &format!("finished_reason=\"{reason}\"}}")).unwrap();
    assert!(ended("abort") > 100.0 && ended("error") == 0.0, "{page}");
    let statuses: Vec<&str> = page.lines().filter(|line| line.starts_with("quern:http_requests_total{")).collect();
    assert!(statuses.iter().any(|line| line.contains("\"499\"")), "{statuses:?}");
    assert!(!statuses.iter().any(|line| line.contains("code=\"5")), "{statuses:?}");
    cases.good.iter().for_each(|case| case.check(&server.post(case.path, &case.body)));
    assert_eq!(server.get("/health").status, 200);
    server.signal("TERM");
    assert_eq!(server.ended().0.code(), Some(0));
}

/// A tiny model with a chat template.
fn model(scratch: &Scratch) -> PathBuf {
    let source = scratch.at("source");
    fs::create_dir(&source).unwrap();
    let files = "config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json";
    for name in files.split(' ') {
        fs::copy(fixture("models/llama").join(name), source.join(name)).unwrap();
    }
    let template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + ' ' }}{% endfor %}it:";
    fs::write(source.join("chat_template.jinja"), template).unwrap();
    kept(&source, scratch);
    scratch.at("model.qrn")
}

/// What the process holds while it has nothing to do.
#[derive(Debug)]
struct Held {
    memory: f64,
    files: f64,
    threads: f64,
}

impl Held {
    /// Waits until requests are gone, and the connections on which they came.
    #[track_caller]
    fn by(server: &Server, idle: usize) -> Held {
        for name in ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"] {
            wait_for(&format!("{name} to be 0"), || server.metric(name) == 0.0);
        }
        wait_for("connections to be closed", || sockets(server) == idle);
        let status = fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
        let field = |name: &str| value(&status.replace(" kB", "").replace('\t', " "), &format!("{name}:")).unwrap();
        let (memory, threads) = (field("VmRSS") * 1024.0, field("Threads"));
        Held { memory, files: server.metric("process_open_fds"), threads }
    }
}

/// Sockets that the process has open: connections and a few of its own.
fn sockets(server: &Server) -> usize {
    let files = fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap();
    let links = files.filter_map(|file| fs::read_link(file.unwrap().path()).ok());
    links.filter(|link| text(link).starts_with("socket:")).count()
}

/// The number at the end of the line with this text.
fn value(page: &str, part: &str) -> Option<f64> {
    page.lines().find(|line| line.contains(part))?.rsplit(' ').next()?.parse().ok()
}

/// Sends the requests up to number `end`.
fn load(server: &Server, cases: &Cases, next: &AtomicUsize, end: usize) {
    std::thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                let mut client = Client { server, stream: None };
                let more = || next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |i| (i < end).then_some(i + 1));
                while let Ok(i) = more() {
                    client.make(i, cases);
                }
            });
        }
    });
}

/// What is asked.
struct Cases {
    /// Requests with the answers they get alone.
    good: Vec<Case>,
    /// Requests that take a while, which nobody waits for.
    long: Vec<Value>,
    /// Bytes, and the status that they get.
    bad: Vec<(String, u16)>,
}

/// A request, and what alone it is answered with.
struct Case {
    path: &'static str,
    body: Value,
    wanted: Value,
}

impl Cases {
    fn new(server: &Server) -> Cases {
        let mut random = Random::new(1);
        let prompts = prompts(&mut random);
        let mut good = vec![];
        for (i, prompt) in prompts.iter().enumerate() {
            let greedy = json!({"prompt": prompt, "max_tokens": 1 + i % 8, "temperature": 0});
            good.push((TEXT, greedy));
            let mut body = json!({"prompt": prompt, "max_tokens": 1 + random.below(4), "temperature": 0});
            match i % 6 {
                0 => body["n"] = 2.into(),
                1 => body["logprobs"] = 2.into(),
                2 => body = json!({"prompt": prompt, "max_tokens": 4, "temperature": 1.2, "seed": i, "n": 3}),
                3 => body = json!({"prompt": [prompt, prompts[0]], "max_tokens": 3, "top_p": 0.9, "seed": i}),
                4 => body = json!({"prompt": prompt, "max_tokens": 48, "temperature": 0, "ignore_eos": true}),
                _ => body = json!({"prompt": prompt, "max_tokens": 2, "temperature": 0, "echo": true, "logprobs": 1}),
            }
            good.push((TEXT, body));
        }
        for (i, words) in ["the sea", "a door", "ten ships", "no answer"].into_iter().enumerate() {
            let messages = json!([{"role": "user", "content": words}]);
            good.push((CHAT, json!({"messages": messages, "max_tokens": 3 + i, "temperature": 0})));
            let seeded = json!({"messages": messages, "max_tokens": 4, "seed": i, "logprobs": true, "top_logprobs": 2});
            good.push((CHAT, seeded));
            let pooling = if i % 2 == 0 { "mean" } else { "last" };
            good.push((VECTOR, json!({"input": [words, prompts[i]], "pooling": pooling})));
        }
        let properties = json!({"a": {"type": "boolean"}});
        let schema = json!({"type": "object", "properties": properties, "required": ["a"]});
        let format = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}});
        let json = json!({"prompt": prompts[1], "max_tokens": 12, "temperature": 0, "response_format": format});
        good.push((TEXT, json));
        let long = |prompt| json!({"prompt": prompt, "max_tokens": 40, "ignore_eos": true, "temperature": 0});
        Cases {
            good: good.into_iter().enumerate().map(|(i, (path, body))| Case::new(server, i, path, body)).collect(),
            long: prompts.iter().map(long).collect(),
            bad: bad(),
        }
    }
}

/// Sixty texts, ten to a beginning.
fn prompts(random: &mut Random) -> Vec<Vec<usize>> {
    let mut token = |count| (0..count).map(|_| 3 + random.below(VOCAB - 3)).collect::<Vec<_>>();
    let mut prompts = vec![];
    for stem in 0..6 {
        let stem = token(10 + stem * 9);
        for i in 0..10 {
            prompts.push([&stem[..stem.len() - i / 3], &token(1 + i)].concat());
        }
    }
    prompts
}

/// Requests that are wrong, and why.
fn bad() -> Vec<(String, u16)> {
    let post = |body: Value| (request("POST", TEXT, "", &body.to_string()), 400);
    let schema = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "tree"}}});
    vec![
        (request("POST", TEXT, "", "{\"prompt\": [1, 2"), 400),
        (request("POST", TEXT, "", "\u{fffd}"), 400),
        (request("POST", "/v1/nothing", "", "{}"), 404),
        (request("GET", "/v1/models/other", "", ""), 404),
        (request("GET", TEXT, "", ""), 405),
        (request("POST", TEXT, "content-length: 20001\r\n", ""), 413),
        post(json!({"max_tokens": 1})),
        post(json!({"prompt": [], "max_tokens": 1})),
        post(json!({"prompt": [5, VOCAB], "max_tokens": 1})),
        post(json!({"prompt": [[5], [5, 1u64 << 40]], "max_tokens": 1})),
        post(json!({"prompt": vec![5; CONTEXT + 1], "max_tokens": 1})),
        post(json!({"prompt": "a", "max_tokens": -1})),
        post(json!({"prompt": "a", "temperature": "hot"})),
        post(json!({"prompt": "a", "n": 0})),
        post(json!({"prompt": "a", "logit_bias": {"320": 1}})),
        post(json!({"prompt": "a", "response_format": schema})),
        (request("POST", CHAT, "", "{\"messages\": [{\"role\": 5}]}"), 400),
        (request("POST", VECTOR, "", "{\"input\": [[1], \"a\"], \"dimensions\": 3}"), 400),
    ]
}

impl Case {
    /// Asks, with a beginning that is shared with nobody.
    fn new(server: &Server, i: usize, path: &'static str, body: Value) -> Case {
        let mut alone = body.clone();
        alone["cache_salt"] = format!("alone {i}").into();
        let wanted = whole(&server.post(path, &alone));
        Case { path, body, wanted }
    }

    /// The bytes of the request for a stream, where there is one.
    fn streamed(&self) -> String {
        let mut body = self.body.clone();
        if self.path != VECTOR {
            body["stream"] = true.into();
        }
        request("POST", self.path, "", &body.to_string())
    }

    #[track_caller]
    fn check(&self, answer: &Answer) {
        assert_eq!(whole(answer), self.wanted, "{} {}", self.path, self.body);
    }

    /// The pieces of a stream say what the whole answer says.
    #[track_caller]
    fn check_stream(&self, answer: &Answer) {
        assert_eq!(answer.status, 200, "{answer:?}");
        let wanted = self.wanted["choices"].as_array().unwrap();
        let mut said = vec![(String::new(), Value::Null); wanted.len()];
        let mut done = false;
        // Comments keep connections open while nothing happens.
        for event in answer.body.split_terminator("\n\n").filter(|event| !event.starts_with(':')) {
            let data = event.strip_prefix("data: ").unwrap_or_else(|| panic!("{answer:?}"));
            assert!(!done, "{answer:?}");
            done = data == "[DONE]";
            if !done {
                let event: Value = serde_json::from_str(data).unwrap();
                for choice in event["choices"].as_array().unwrap_or_else(|| panic!("{answer:?}")) {
                    let (words, finish) = &mut said[choice["index"].as_u64().unwrap() as usize];
                    *words += choice["text"].as_str().or(choice["delta"]["content"].as_str()).unwrap_or("");
                    *finish = choice["finish_reason"].clone();
                }
            }
        }
        assert!(done, "{answer:?}");
        for (choice, (words, finish)) in wanted.iter().zip(said) {
            let whole = choice["text"].as_str().or(choice["message"]["content"].as_str()).unwrap();
            assert_eq!((words.as_str(), &finish), (whole, &choice["finish_reason"]), "{} {}", self.path, self.body);
        }
    }
}

/// What does not depend on time, or on what was cached.
#[track_caller]
fn whole(answer: &Answer) -> Value {
    assert_eq!(answer.status, 200, "{answer:?}");
    let all = answer.json();
    let tokens = (&all["usage"]["prompt_tokens"], &all["usage"]["completion_tokens"]);
    json!({"choices": all["choices"], "data": all["data"], "tokens": tokens})
}

/// Somebody with a connection.
struct Client<'a> {
    server: &'a Server,
    stream: Option<BufReader<TcpStream>>,
}

impl Client<'_> {
    /// Request number `i`.
    fn make(&mut self, i: usize, cases: &Cases) {
        let random = &mut Random::new(1 << 32 | i as u64);
        match random.below(100) {
            0..8 => {
                let (bytes, status) = of(random, &cases.bad);
                let answer = self.ask(bytes);
                assert_eq!(answer.status, *status, "{bytes} {answer:?}");
                assert!(answer.json()["error"]["message"].is_string(), "{answer:?}");
            }
            8..20 => {
                let body = of(random, &cases.long).clone();
                self.leave(body, random);
            }
            20..22 => self.read_slowly(of(random, &cases.good)),
            22..24 => self.write_slowly(of(random, &cases.good)),
            24..52 => self.stream(of(random, &cases.good)),
            _ => {
                let case = of(random, &cases.good);
                case.check(&self.ask(&request("POST", case.path, "", &case.body.to_string())));
            }
        }
    }

    /// An answer, on the connection of the answer before if that is still open.
    fn ask(&mut self, bytes: &str) -> Answer {
        let mut stream = self.stream.take().unwrap_or_else(|| BufReader::new(self.server.connect()));
        stream.get_mut().write_all(bytes.as_bytes()).unwrap();
        let answer = Answer::read(&mut stream);
        self.stream = (answer.header("connection") != Some("close")).then_some(stream);
        answer
    }

    fn stream(&mut self, case: &Case) {
        let answer = self.ask(&case.streamed());
        if case.path == VECTOR { case.check(&answer) } else { case.check_stream(&answer) }
    }

    /// Leaves somewhere in the middle.
    fn leave(&mut self, mut body: Value, random: &mut Random) {
        body["stream"] = (random.below(2) == 0).into();
        let bytes = request("POST", TEXT, "", &body.to_string());
        match random.below(4) {
            0 => drop(self.server.send(&bytes[..random.below(bytes.len())])),
            1 => drop(self.server.send(&bytes)),
            2 => {
                let stream = self.server.send(&bytes);
                std::thread::sleep(Duration::from_millis(random.below(20) as u64));
                drop(stream);
            }
            _ => {
                let mut stream = self.server.send(&bytes);
                stream.read_exact(&mut vec![0; 1 + random.below(400)]).unwrap();
            }
        }
    }

    fn read_slowly(&self, case: &Case) {
        let answer = Answer::read(&mut Slowly(self.server.send(case.streamed())));
        if case.path == VECTOR { case.check(&answer) } else { case.check_stream(&answer) }
    }

    fn write_slowly(&self, case: &Case) {
        let bytes = request("POST", case.path, "", &case.body.to_string());
        let mut stream = self.server.connect();
        for part in bytes.as_bytes().chunks(bytes.len() / 5 + 1) {
            stream.write_all(part).unwrap();
            std::thread::sleep(Duration::from_millis(2));
        }
        case.check(&Answer::read(&mut BufReader::new(stream)));
    }
}

/// Takes a few bytes at a time, with pauses.
struct Slowly(TcpStream);

impl Read for Slowly {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        std::thread::sleep(Duration::from_micros(100));
        let most = into.len().min(16);
        self.0.read(&mut into[..most])
    }
}

/// Any one of a list.
fn of<'a, T>(random: &mut Random, list: &'a [T]) -> &'a T {
    &list[random.below(list.len())]
}
