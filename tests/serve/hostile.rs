//! Clients that break rules, are slow, leave or come in crowds; and how the server starts, refuses and ends.
//!
//! Every test ends with a server that still answers. Limits of time are generous: they only say that something
//! happens at all.

use std::{
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
    },
    time::Duration,
};

use serde_json::json;

use super::server::{Answer, Server, closed, half_close, model, request, text, with_files};
use crate::support::{
    Scratch,
    model::kept,
    program::{command, quern, wait_for},
};

/// A request that takes seconds, and whether it is streamed.
fn long(stream: bool) -> String {
    let body = json!({"prompt": "The harbour", "max_tokens": 7900, "ignore_eos": true, "stream": stream});
    request("POST", "/v1/completions", "x-request-id: long\r\n", &body.to_string())
}

/// Room for it.
const ROOM: [&str; 4] = ["--ctx", "8000", "--sequences", "2"];

/// The request named `long` was cancelled before its end.
#[track_caller]
fn was_cancelled(server: &Server) {
    server.wait_for_line(" long ");
    let line = server.line(" long ").unwrap();
    assert!(line.contains(" 499 "), "{line}");
    wait_for("the sequence to end", || server.metric("vllm:num_requests_running") == 0.0);
    assert!(server.metric("vllm:generation_tokens_total") < 7900.0);
    server.is_well();
}

#[track_caller]
fn wait_until_running(server: &Server) {
    wait_for("the request to run", || server.metric("vllm:num_requests_running") == 1.0);
}

#[test]
fn a_promised_length_costs_nothing() {
    let server = Server::start(&[]);
    let before = server.metric("process_resident_memory_bytes");
    for length in ["100000000000000", "18446744073709551615", "16777217"] {
        let head = format!("POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n");
        let mut stream = server.send(head);
        let answer = Answer::read(&mut stream);
        // The largest number there is means something else to HTTP libraries.
        if length.starts_with("184") {
            assert!([400, 413, 431].contains(&answer.status), "{answer:?}");
        } else {
            answer.refuses(413, length);
        }
        assert!(closed(&mut stream));
    }
    for length in ["-1", "1e3", "99999999999999999999999", "5, 6", ""] {
        let head = format!("POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n");
        Answer::read(&mut server.send(head)).refuses(400, "no HTTP/1.1");
    }
    assert!(server.metric("process_resident_memory_bytes") < before + 64e6);
    server.is_well();
}

#[test]
fn bodies_beyond_the_limit_are_not_read() {
    let server = Server::start(&["--max-body", "1000"]);
    let prompt = |n: usize| json!({"prompt": "a".repeat(n), "max_tokens": 1}).to_string();
    let fits = prompt(1000 - prompt(0).len());
    assert_eq!(server.ask("POST", "/v1/completions", "", &fits).status, 200);
    server.ask("POST", "/v1/completions", "", &format!("{fits} ")).refuses(413, "1001");
    // A client that waits for permission gets the refusal alone.
    let waits = "expect: 100-continue\r\ncontent-length: 1001\r\n";
    assert_eq!(Answer::read(&mut server.send(request("POST", "/v1/completions", waits, ""))).status, 413);
    // In chunks nothing is promised; the server stops reading when it has had enough.
    let mut stream = server.send(request("POST", "/v1/completions", "transfer-encoding: chunked\r\n", ""));
    let chunk = format!("4000\r\n{}\r\n", "a".repeat(0x4000));
    let sent = (0..64 << 10).take_while(|_| stream.write_all(chunk.as_bytes()).is_ok()).count();
    assert!(sent < 64 << 10, "a gigabyte was taken");
    server.wait_for_line(" 413 ");
    server.is_well();
}

#[test]
fn bodies_share_a_budget() {
    let server = Server::start(&["--request-memory", "100000"]);
    assert!(server.line("+ up to 100.0 kB requests").is_some(), "{:?}", server.line("memory: "));
    let body = json!({"content": "a".repeat(40_000)}).to_string();
    let (part, rest) = body.split_at(30_000);
    // What is promised takes nothing, what came does.
    let head =
        |length: usize| format!("POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n");
    let _promised = server.send(head(90_000));
    let mut slow = server.send(head(body.len()) + part);
    let mut chunked = server.send(request("POST", "/tokenize", "transfer-encoding: chunked\r\n", ""));
    wait_for("the budget to be used", || {
        let answer = server.ask("POST", "/tokenize", "", &" ".repeat(80_000));
        assert!([400, 503].contains(&answer.status), "{answer:?}");
        answer.status == 503 && answer.header("retry-after") == Some("1")
    });
    chunked.write_all(format!("13880\r\n{}\r\n", " ".repeat(80_000)).as_bytes()).unwrap();
    Answer::read(&mut chunked).refuses(503, "--request-memory");
    // Beside it there is room for others, and it comes to its end.
    server.is_well();
    slow.write_all(rest.as_bytes()).unwrap();
    assert_eq!(Answer::read(&mut slow).status, 200);
    // What is short and has many values is large in memory.
    let many = json!({"prompt": vec![5; 5000], "max_tokens": 1}).to_string();
    server.ask("POST", "/v1/completions", "", &many).refuses(413, "--request-memory");
    assert_eq!(server.post("/tokenize", &json!({"content": "a".repeat(40_000)})).status, 200);
}

#[test]
fn heads_without_bodies_make_room() {
    let server = Server::start(&["--max-connections", "4"]);
    // A head that has been read when this returns: whoever's has not is not known to have asked anything.
    let begin = || {
        let head = "POST /tokenize HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 99\r\n\r\n";
        let (mut stream, goes_on) = (server.send(head), b"HTTP/1.1 100 Continue\r\n\r\n");
        let mut interim = [0; 25];
        stream.read_exact(&mut interim).expect("an interim answer");
        assert_eq!(&interim, goes_on);
        stream
    };
    let mut silent: Vec<TcpStream> = (0..12).map(|_| begin()).collect();
    server.is_well();
    Answer::read(&mut silent[0]).refuses(503, "made room");
    assert!(closed(&mut silent[0]));
    // Whoever was there before and waits for its next request goes first.
    drop(silent);
    let mut begun = begin();
    begun.write_all(b"{").unwrap();
    wait_for("silent connections to be closed", || server.metric("process_open_fds") < 24.0);
    let idle: Vec<TcpStream> = (0..6).map(|_| server.connect()).collect();
    server.is_well();
    begun.write_all(format!("\"content\": \"{}\"}}", "a".repeat(99 - 15)).as_bytes()).unwrap();
    assert_eq!(Answer::read(&mut begun).status, 200);
    drop(idle);
}

#[test]
fn heads_are_bounded() {
    let server = Server::start(&[]);
    let before = server.metric("process_resident_memory_bytes");
    let mut stream = server.send("GET /health HTTP/1.1\r\nhost: localhost\r\n");
    let line = format!("x-long: {}\r\n", "h".repeat(8000));
    let sent = (0..8000).take_while(|_| stream.write_all(line.as_bytes()).is_ok()).count();
    assert!(sent < 8000, "64 MB of head were taken");
    server.wait_for_line(" 431 ");
    // One endless line, and many short ones.
    let mut stream = server.send(format!("GET /{} HTTP/1.1\r\n\r\n", "p".repeat(100_000)));
    let answer = Answer::try_read(&mut stream);
    assert!(answer.as_ref().is_ok_and(|a| [414, 431].contains(&a.status)), "{answer:?}");
    let many: String = (0..200).map(|i| format!("h{i}: 1\r\n")).collect();
    Answer::read(&mut server.send(request("GET", "/health", &many, ""))).refuses(431, "100 headers");
    assert!(server.metric("process_resident_memory_bytes") < before + 32e6);
    server.is_well();
}

#[test]
fn slow_clients_lose_their_turn() {
    let server = Server::start(&["--client-timeout", "1", "--keep-alive", "1"]);
    // A head, byte by byte.
    let mut stream = server.send("GET /health HTTP/1.1\r\n");
    let mut sent = 0;
    while sent < 600 && stream.write_all(b"x").is_ok() {
        sent += 1;
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(sent < 600, "a slow head was waited for");
    // Nothing at all.
    assert!(closed(&mut server.connect()));
    // A body that stops.
    let mut stream = server.send("POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n{");
    Answer::read(&mut stream).refuses(408, "1 bytes");
    assert!(closed(&mut stream));
    // No second request.
    let mut stream = server.send(request("GET", "/health", "", ""));
    assert_eq!(Answer::read(&mut stream).status, 200);
    assert!(closed(&mut stream));
    server.is_well();
}

#[test]
fn a_crowd_that_says_nothing_keeps_nobody_out() {
    // This process has descriptors for other tests, too.
    let files = fs::read_to_string("/proc/self/limits").unwrap();
    let files = files.lines().find(|l| l.starts_with("Max open files")).unwrap();
    let files: usize = files.split_whitespace().nth(3).unwrap().parse().unwrap_or(usize::MAX);
    let crowd = files.saturating_sub(400).min(1000);
    let server = Server::start(&["--max-connections", &(crowd + 10).to_string()]);
    let idle: Vec<TcpStream> = (0..crowd).map(|_| server.connect()).collect();
    server.is_well();
    assert!(server.metric("process_open_fds") > crowd as f64);
    drop(idle);
    server.is_well();
}

#[test]
fn newcomers_replace_those_who_wait() {
    let server = Server::start(&[&ROOM[..], &["--max-connections", "3"]].concat());
    let mut idle: Vec<TcpStream> = (0..30).map(|_| server.send("GET /health HT")).collect();
    server.is_well();
    assert!(closed(&mut idle[0]));
    drop(idle);
    // Where all are busy there is no room.
    let mut busy: Vec<TcpStream> = (0..2).map(|_| server.send(long(true))).collect();
    wait_for("both to run", || server.metric("vllm:num_requests_running") == 2.0);
    busy.push(server.send(long(true)));
    wait_for("a refusal", || {
        let mut stream = server.connect();
        let _ = stream.write_all(request("GET", "/health", "", "").as_bytes());
        Answer::try_read(&mut stream).is_ok_and(|answer| answer.status == 503 && answer.body.contains("in use"))
    });
    drop(busy);
    wait_for("room", || {
        let mut stream = server.connect();
        let _ = stream.write_all(request("GET", "/health", "", "").as_bytes());
        Answer::try_read(&mut stream).is_ok_and(|answer| answer.status == 200)
    });
    was_cancelled(&server);
}

#[test]
fn without_descriptors_accepting_goes_on() {
    let (_scratch, file) = model();
    let args = ["serve", text(&file), "--port", "0", "--max-connections", "1000"];
    let mut server = Server::spawn(with_files(40, &args));
    server.wait_until_ready();
    for _ in 0..2 {
        let crowd: Vec<TcpStream> = (0..100).map(|_| server.send("GET /health HT")).collect();
        server.wait_for_line("cannot accept connections");
        server.is_well();
        drop(crowd);
        server.is_well();
    }
    server.signal("TERM");
    assert_eq!(server.ended().0.code(), Some(0));
}

#[test]
fn clients_that_leave_are_noticed() {
    // Closed while computed, without and with a stream.
    for stream in [false, true] {
        let server = Server::start(&ROOM);
        let client = server.send(long(stream));
        wait_until_running(&server);
        drop(client);
        was_cancelled(&server);
    }
    // Half-closed: gone, too; what can be answered at once is.
    let server = Server::start(&ROOM);
    let mut client = server.send(long(false));
    half_close(&client);
    assert!(closed(&mut client));
    was_cancelled(&server);
    let mut client = server.send(request("GET", "/health", "", ""));
    half_close(&client);
    assert_eq!(Answer::read(&mut client).status, 200);
    // Reset: something is left unread when it is closed.
    let server = Server::start(&ROOM);
    let mut client = server.send(long(true));
    client.read_exact(&mut [0; 300]).unwrap();
    client.peek(&mut [0]).unwrap();
    drop(client);
    was_cancelled(&server);
    // With the next request already sent.
    let server = Server::start(&ROOM);
    let client = server.send(long(false) + "GET /health HTTP/1.1\r\n");
    wait_until_running(&server);
    drop(client);
    was_cancelled(&server);
}

#[test]
fn requests_follow_each_other_on_a_connection() {
    let server = Server::start(&[]);
    let body = json!({"prompt": "The harbour", "max_tokens": 3, "temperature": 0}).to_string();
    let named = |id: &str, method, path, body| request(method, path, &format!("x-request-id: {id}\r\n"), body);
    let all = [
        named("a", "GET", "/health", ""),
        named("b", "POST", "/v1/completions", &body),
        named("c", "DELETE", "/health", ""),
        named("d", "GET", "/nothing", ""),
        named("e", "GET", "/v1/models", ""),
    ];
    let mut stream = server.send(all.concat());
    for (id, status) in [("a", 200), ("b", 200), ("c", 405), ("d", 404), ("e", 200)] {
        let answer = Answer::read(&mut stream);
        assert_eq!((answer.header("x-request-id"), answer.status), (Some(id), status), "{answer:?}");
    }
    server.is_well();
}

#[test]
fn chunks_are_read_and_malformed_ones_refused() {
    let server = Server::start(&["--client-timeout", "2"]);
    let body = json!({"prompt": "The harbour", "max_tokens": 3}).to_string();
    let chunked = |body: &str| request("POST", "/v1/completions", "transfer-encoding: chunked\r\n", "") + body;
    let (a, b) = body.split_at(7);
    let good = format!("7\r\n{a}\r\n{:x};ext=1\r\n{b}\r\n0\r\ntrailer: x\r\n\r\n", b.len());
    assert_eq!(Answer::read(&mut server.send(chunked(&good))).status, 200);
    for bad in ["zz\r\n", "\r\n\r\n", "-1\r\n", "fffffffffffffffff\r\n", "5\r\nabcdefgh\r\n0\r\n\r\n"] {
        let answer = Answer::read(&mut server.send(chunked(bad)));
        assert_eq!(answer.status, 400, "{bad:?}: {answer:?}");
    }
    // A chunk of all there is, and one that never comes.
    let answer = Answer::try_read(&mut server.send(chunked("ffffffffffffffff\r\nabc")));
    drop(server.send(chunked("5\r\nab")));
    assert!(answer.is_err() || answer.is_ok_and(|a| [400, 408, 413].contains(&a.status)));
    server.is_well();
}

#[test]
fn nonsense_is_refused() {
    let server = Server::start(&["--client-timeout", "2"]);
    let binary: Vec<u8> = (0..=255).cycle().take(4096).collect();
    for bytes in [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc".to_vec(),
        b"GET\r\n\r\n".to_vec(),
        b"GET / HTTP/9.9\r\n\r\n".to_vec(),
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n".to_vec(),
        b"GET / HTTP/1.1\r\nnul: \0\r\n\r\n".to_vec(),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        binary,
    ] {
        let mut stream = server.send(&bytes);
        let answer = Answer::try_read(&mut stream);
        assert!(!answer.as_ref().is_ok_and(|a| a.status < 400), "{bytes:?}: {answer:?}");
    }
    let not_json = server.ask("POST", "/v1/completions", "", "{\"prompt\": ");
    not_json.refuses(400, "JSON");
    let answer = server.ask("DELETE", "/v1/completions", "", "");
    assert_eq!((answer.status, answer.header("allow")), (405, Some("post")));
    let answer = server.ask("POST", "/health", "", "{}");
    assert_eq!((answer.status, answer.header("allow")), (405, Some("get, head")));
    let answer = server.ask("HEAD", "/no\u{1b}such", "", "");
    assert!([400, 404].contains(&answer.status));
    server.is_well();
}

#[test]
fn a_reader_that_takes_nothing_is_dropped() {
    let (scratch, file) = model();
    let socket = scratch.at("s");
    let flags = ["serve", text(&file), "--unix-socket", text(&socket), "--client-timeout", "1"];
    let mut server = Server::spawn(command(&flags));
    server.wait_until_ready();
    // Megabytes of an answer do not fit into a socket.
    let body = json!({"content": "a b c d ".repeat(100_000)}).to_string();
    let mut stream = UnixStream::connect(&socket).unwrap();
    stream.write_all(request("POST", "/tokenize", "", &body).as_bytes()).unwrap();
    server.wait_for_line("/tokenize 200");
    let open = || {
        let mut stream = UnixStream::connect(&socket).unwrap();
        stream.write_all(request("GET", "/metrics", "connection: close\r\n", "").as_bytes()).unwrap();
        let text = Answer::read(&mut stream).body;
        let line = text.lines().find_map(|l| l.strip_prefix("process_open_fds ")).unwrap().to_string();
        line.parse::<usize>().unwrap()
    };
    let before = open();
    wait_for("the connection to be closed", || open() < before);
    let mut all = vec![];
    let _ = stream.read_to_end(&mut all);
    let head = all.windows(4).position(|w| w == b"\r\n\r\n").unwrap();
    let length = String::from_utf8_lossy(&all[..head]).to_ascii_lowercase();
    let length: usize = length.split("content-length: ").nth(1).unwrap().lines().next().unwrap().parse().unwrap();
    assert!(all.len() - head - 4 < length, "all of it arrived");
}

#[test]
fn requests_may_take_so_long_and_no_longer() {
    let server = Server::start(&[&ROOM[..], &["--timeout", "0.2"]].concat());
    Answer::read(&mut server.send(long(false))).refuses(504, "--timeout");
    let streamed =
        Answer::read(&mut server.send(long(true).replace("x-request-id", "connection: close\r\nx-request-id")));
    assert_eq!(streamed.status, 200);
    let last = streamed.body.lines().filter_map(|line| line.strip_prefix("data: ")).next_back().unwrap();
    let last: serde_json::Value = serde_json::from_str(last).unwrap();
    assert_eq!(last["error"]["code"], "timeout", "{last}");
    wait_for("the sequences to end", || server.metric("vllm:num_requests_running") == 0.0);
    assert!(server.metric("vllm:generation_tokens_total") < 7900.0);
    server.is_well();
}

#[test]
fn requests_beyond_the_queue_are_told_to_come_later() {
    let server = Server::start(&["--ctx", "8000", "--sequences", "1", "--max-queue", "1"]);
    let running = server.send(long(true));
    wait_until_running(&server);
    let waiting = server.send(long(true));
    wait_for("a request to wait", || server.metric("vllm:num_requests_waiting") == 1.0);
    let answer = server.post("/v1/completions", &json!({"prompt": "a", "max_tokens": 1})).refuses(429, "--max-queue");
    assert_eq!(answer.header("retry-after"), Some("1"));
    assert_eq!(answer.json()["error"]["code"], "rate_limit_exceeded");
    // What needs no engine is answered.
    assert_eq!(server.post("/tokenize", &json!({"content": "a"})).status, 200);
    drop((running, waiting));
    wait_for("the sequences to end", || server.metric("vllm:num_requests_running") == 0.0);
    server.is_well();
}

#[test]
fn keys_are_asked_for() {
    let scratch = Scratch::new("keys");
    let file = scratch.write("keys", "first-key\n\n  second-key  \n");
    let server = Server::start(&["--api-key-file", text(&file), "--api-key", "third"]);
    for path in ["/health", "/metrics", "/version", "/"] {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
    server.get("/v1/models").refuses(401, "Authorization");
    server.ask("GET", "/v1/models", "authorization: Bearer first-ke\r\n", "").refuses(401, "not one of");
    server.ask("POST", "/tokenize", "", "{}").refuses(401, "Authorization");
    for key in ["first-key", "second-key", "third"] {
        let answer = server.ask("GET", "/v1/models", &format!("authorization: Bearer {key}\r\n"), "");
        assert_eq!(answer.status, 200, "{key}");
    }
    let empty = scratch.write("empty", "\n");
    let (_model, file) = model();
    quern(&["serve", text(&file), "--api-key-file", text(&empty)]).fails(&["expected a key per line"]);
    quern(&["serve", text(&file), "--api-key", "a b"]).misused(&["--api-key"]);
    quern(&["serve", text(&file), "--cors", "example.org"]).misused(&["--cors", "https://"]);
}

#[test]
fn pages_of_other_sites_ask_only_where_allowed() {
    let asks = "access-control-request-method: POST\r\naccess-control-request-headers: x-a, authorization\r\n";
    let foreign = "origin: https://b.example\r\n";
    let server = Server::start(&[]);
    let answer = server.ask("OPTIONS", "/v1/models", &format!("{foreign}{asks}"), "");
    assert_eq!((answer.status, answer.header("access-control-allow-origin")), (403, None));
    let answer = server.ask("GET", "/v1/models", foreign, "").refuses(403, "--cors");
    assert_eq!(answer.header("access-control-allow-origin"), None);
    server.ask("POST", "/tokenize", &format!("{foreign}sec-fetch-site: cross-site\r\n"), "{}").refuses(403, "--cors");
    // A plain POST, as any page on this machine may send it, to this address or to a name that is pointed at it.
    let asks_by = |host: &str, origin: &str| {
        let head = format!("host: {host}\r\norigin: {origin}\r\ncontent-type: text/plain\r\n");
        let body = "{\"content\": \"a\"}";
        let text = format!(
            "POST /tokenize HTTP/1.1\r\n{head}content-length: {}\r\nconnection: close\r\n\r\n{body}",
            body.len()
        );
        Answer::read(&mut server.send(text))
    };
    asks_by("127.0.0.1:8080", "http://127.0.0.1:3000").refuses(403, "http://127.0.0.1:3000");
    asks_by("127.0.0.1:8080", "null").refuses(403, "--cors");
    asks_by("b.example:8080", "http://b.example:8080").refuses(403, "--allow-host b.example");
    // Its own page, and programs.
    assert_eq!(asks_by("127.0.0.1:8080", "http://127.0.0.1:8080").status, 200);
    for host in ["localhost", "127.0.0.1:1", "[::1]:8080"] {
        for path in ["/", "/v1/models", "/health"] {
            let text = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
            assert_eq!(Answer::read(&mut server.send(text)).status, 200, "{host} {path}");
        }
    }
    let named = "GET /v1/models HTTP/1.1\r\nhost: chat.example\r\nconnection: close\r\n\r\n";
    Answer::read(&mut server.send(named)).refuses(403, "--allow-host chat.example");
    let probe = named.replace("/v1/models", "/health");
    assert_eq!(Answer::read(&mut server.send(probe)).status, 200);
    let other = Server::start(&["--allow-host", "chat.example"]);
    assert_eq!(Answer::read(&mut other.send(named)).status, 200);
    let keyed = Server::start(&["--api-key", "k"]);
    Answer::read(&mut keyed.send(named)).refuses(401, "API key");
    let server = Server::start(&["--cors", "https://b.example", "--api-key", "k"]);
    let answer = server.ask("OPTIONS", "/v1/models", &format!("{foreign}{asks}"), "");
    assert_eq!((answer.status, answer.header("access-control-allow-origin")), (204, Some("https://b.example")));
    assert_eq!(answer.header("access-control-allow-headers"), Some("x-a, authorization"));
    // A refusal can be read, too.
    let answer = server.ask("GET", "/v1/models", foreign, "");
    assert_eq!((answer.status, answer.header("access-control-allow-origin")), (401, Some("https://b.example")));
    let other = server.ask("OPTIONS", "/v1/models", &format!("origin: https://c.example\r\n{asks}"), "");
    assert_eq!(other.header("access-control-allow-origin"), None);
}

#[test]
fn requests_have_names_and_lines() {
    let server = Server::start(&["--log", "json"]);
    let secret = "a very private prompt";
    let body = json!({"prompt": secret, "max_tokens": 2, "ignore_eos": true}).to_string();
    let answer = server.ask("POST", "/v1/completions?key=hidden", "x-request-id: mine-1\r\n", &body);
    assert_eq!((answer.status, answer.header("x-request-id")), (200, Some("mine-1")));
    server.wait_for_line("mine-1");
    let line: serde_json::Value = serde_json::from_str(&server.line("mine-1").unwrap()).unwrap();
    assert_eq!((&line["status"], &line["generated_tokens"], &line["method"]), (&json!(200), &json!(2), &json!("POST")));
    assert_eq!(line["path"], "/v1/completions");
    assert!(line["time"].as_str().unwrap().ends_with('Z') && line["ms"].as_f64().unwrap() > 0.0);
    let forged = server.ask("GET", "/health", "x-request-id: a b\"c\r\n", "");
    assert_eq!(forged.header("x-request-id").unwrap().len(), 16);
    assert_eq!((server.line(secret), server.line("hidden")), (None, None));
    assert!(server.metric("quern:http_requests_total") >= 2.0);
}

#[test]
fn it_drains_and_ends() {
    let mut server = Server::start(&[&ROOM[..], &["--drain-seconds", "300"]].concat());
    let body = json!({"prompt": "The harbour", "max_tokens": 2000, "ignore_eos": true, "stream": true});
    let mut stream = server.send(request("POST", "/v1/completions", "", &body.to_string()));
    let mut idle = server.send(request("GET", "/health", "", ""));
    assert_eq!(Answer::read(&mut idle).status, 200);
    wait_until_running(&server);
    server.signal("TERM");
    server.wait_for_line("draining: 1 ");
    let health = server.get("/health");
    assert_eq!((health.status, &health.json()["status"]), (503, &json!("draining")));
    let refused = server.post("/v1/completions", &body).refuses(503, "shutting down");
    assert!(refused.header("retry-after").is_some());
    let answer = Answer::read(&mut stream);
    assert!(answer.body.contains("data: [DONE]"), "{}", answer.body.len());
    assert!(closed(&mut idle));
    let (status, lines) = server.ended();
    assert_eq!(status.code(), Some(0), "{lines:?}");
}

#[test]
fn what_does_not_end_in_time_is_cancelled() {
    let mut server = Server::start(&[&ROOM[..], &["--drain-seconds", "0"]].concat());
    let mut stream = server.send(long(true));
    let mut whole = server.send(long(false));
    wait_for("both to run", || server.metric("vllm:num_requests_running") == 2.0);
    server.signal("INT");
    let answer = Answer::read(&mut stream);
    assert!(answer.body.contains("data: {\"error\":") && !answer.body.contains("[DONE]"), "{answer:?}");
    Answer::read(&mut whole).refuses(503, "shutting down");
    let (status, lines) = server.ended();
    assert_eq!(status.code(), Some(0), "{lines:?}");
    assert!(lines.iter().any(|line| line.contains("cancelling 2 requests")), "{lines:?}");
    // Whoever cannot wait says so twice.
    let mut server = Server::start(&[&ROOM[..], &["--drain-seconds", "300"]].concat());
    let _stream = server.send(long(true));
    wait_until_running(&server);
    server.signal("TERM");
    server.wait_for_line("draining");
    server.signal("TERM");
    assert_eq!(server.ended().0.code(), Some(143));
}

#[test]
fn a_unix_socket_is_made_replaced_and_removed() {
    let (scratch, file) = model();
    let socket = scratch.at("quern.sock");
    let serve = ["serve", text(&file), "--unix-socket", text(&socket)];
    // Left by a server that is gone.
    drop(UnixListener::bind(&socket).unwrap());
    assert!(socket.exists());
    let mut server = Server::spawn(command(&serve));
    server.wait_until_ready();
    assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    let mut stream = UnixStream::connect(&socket).unwrap();
    stream.write_all(request("GET", "/health", "x-request-id: u\r\n", "").as_bytes()).unwrap();
    assert_eq!(Answer::read(&mut stream).status, 200);
    server.wait_for_line(" u unix GET");
    quern(&serve).fails(&["quern.sock", "another program listens"]);
    server.signal("TERM");
    assert_eq!(server.ended().0.code(), Some(0));
    assert!(!socket.exists());
    let other = scratch.write("file", "text");
    quern(&["serve", text(&file), "--unix-socket", text(&other)]).fails(&["no socket"]);
    assert_eq!(fs::read(&other).unwrap(), b"text");
}

#[test]
fn what_cannot_be_served_is_said() {
    let (scratch, file) = model();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let serve = |more: &[&str]| quern(&[&["serve", text(&file)], more].concat());
    serve(&["--port", &port]).fails(&["cannot listen on 127.0.0.1", &port, "give another --port"]);
    serve(&["--host", "256.1.1.1", "--port", "0"]).fails(&["cannot listen on 256.1.1.1"]);
    serve(&["--port", "0", "--ctx", "999999"]).misused(&["--ctx 999999"]);
    serve(&["--port", "70000"]).misused(&["--port"]);
    serve(&["--timeout", "soon"]).misused(&["--timeout"]);
    serve(&["--unix-socket", "x", "--port", "1"]).misused(&["--unix-socket"]);
    quern(&["serve", text(&scratch.at("none.qrn"))]).fails(&["none.qrn"]);
    let source = scratch.copy(&crate::support::fixture("models/llama"), "bare");
    fs::remove_file(source.join("tokenizer.json")).unwrap();
    let bare = Scratch::new("bare");
    kept(&source, &bare);
    quern(&["serve", text(&bare.at("model.qrn")), "--port", "0"]).fails(&["no tokenizer"]);
}

/// Grammars are compiled one after the other; whoever else comes is not kept waiting by them.
#[test]
fn slow_grammars_keep_nobody_from_being_answered() {
    let server = Server::start(&[]);
    let slow = serde_json::json!({"prompt": "a", "max_tokens": 1, "grammar": format!("start: A\nA: {}", "\"a\"? ".repeat(3000))});
    let slow = request("POST", "/v1/completions", "connection: close\r\n", &slow.to_string());
    // One is compiled, 32 wait, and the last ones are told to come back.
    let mut asking: Vec<_> = (0..40).map(|_| server.send(&slow)).collect();
    let busy = asking.iter_mut().rev().map(Answer::read).find(|answer| answer.status == 429).unwrap();
    assert_eq!(busy.header("retry-after"), Some("1"));
    server.is_well();
    drop(asking);
    server.is_well();
}
