//! A running `quern serve`, and clients that speak HTTP byte by byte.

use std::{
    ffi::OsStr,
    io::{BufRead, BufReader, Read, Write},
    net::{Shutdown, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex},
    thread::JoinHandle,
    time::Duration,
};

use serde_json::Value;

use crate::support::{
    Scratch, fixture,
    model::kept,
    program::{arg, command, wait_for},
};

/// A model with room for thousands of tokens.
const MODEL: &str = "models/smollm2-gptq-2layer";

/// The server, and everything it said; ends with the test.
pub struct Server {
    child: Child,
    lines: Arc<Mutex<Vec<String>>>,
    reader: Option<JoinHandle<()>>,
    /// `127.0.0.1:40404`, or nothing for a unix socket.
    address: String,
    _scratch: Option<Scratch>,
}

/// A converted model in a folder of its own.
pub fn model() -> (Scratch, PathBuf) {
    let scratch = Scratch::new("serve");
    kept(&fixture(MODEL), &scratch);
    let path = scratch.at("model.qrn");
    (scratch, path)
}

impl Server {
    /// A server of a tiny model on a port of its own, ready to answer.
    pub fn start(flags: &[&str]) -> Server {
        let (scratch, file) = model();
        let mut server = Server::spawn(command(&[&["serve", arg(&file), "--port", "0"], flags].concat()));
        server._scratch = Some(scratch);
        server.wait_until_ready();
        server
    }

    /// Runs a command that serves.
    pub fn spawn(mut command: Command) -> Server {
        let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let lines = Arc::new(Mutex::new(vec![]));
        let (stderr, to) = (child.stderr.take().unwrap(), lines.clone());
        let read = move || BufReader::new(stderr).lines().for_each(|line| to.lock().unwrap().push(line.unwrap()));
        let reader = Some(std::thread::spawn(read));
        Server { child, lines, reader, address: String::new(), _scratch: None }
    }

    pub fn wait_until_ready(&mut self) {
        self.wait_for_line("listening on ");
        let line = self.line("listening on ").unwrap();
        let from = line.split("http://").nth(1).unwrap_or("");
        self.address = from.chars().take_while(|c| c.is_ascii_digit() || ".:".contains(*c)).collect();
    }

    /// The first line of the log with this text.
    pub fn line(&self, part: &str) -> Option<String> {
        self.lines.lock().unwrap().iter().find(|line| line.contains(part)).cloned()
    }

    #[track_caller]
    pub fn wait_for_line(&self, part: &str) {
        let so = || self.line(part).is_some();
        wait_for(&format!("{part:?} in the log: {:?}", self.lines.lock().unwrap()), so);
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    /// A connection on which these bytes were sent.
    pub fn send(&self, bytes: impl AsRef<[u8]>) -> TcpStream {
        let mut stream = self.connect();
        stream.write_all(bytes.as_ref()).unwrap();
        stream
    }

    /// The answer to a request on a connection of its own.
    pub fn ask(&self, method: &str, path: &str, headers: &str, body: &str) -> Answer {
        Answer::read(&mut self.send(request(method, path, &format!("{headers}connection: close\r\n"), body)))
    }

    pub fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, "", "")
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.ask("POST", path, "", &body.to_string())
    }

    /// The value of the first sample of a metric.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").body;
        let of = |line: &str| {
            line.strip_prefix(name)?.starts_with(['{', ' ']).then(|| line.rsplit(' ').next()?.parse().ok())?
        };
        text.lines().find_map(of).unwrap_or_else(|| panic!("no {name} in {text}"))
    }

    /// The server answers, and nothing is left of earlier requests.
    #[track_caller]
    pub fn is_well(&self) {
        let body = serde_json::json!({"prompt": "The harbour", "max_tokens": 3, "temperature": 0, "ignore_eos": true});
        let answer = self.post("/v1/completions", &body);
        assert_eq!(answer.status, 200, "{answer:?}");
        assert_eq!(answer.json()["usage"]["completion_tokens"], 3);
        wait_for("requests to end", || self.metric("vllm:num_requests_running") == 0.0);
    }

    /// Sends a signal: TERM, INT.
    pub fn signal(&self, name: &str) {
        let kill = Command::new("sh").args(["-c", &format!("kill -{name} {}", self.pid())]).status().unwrap();
        assert!(kill.success());
    }

    /// How it ended, and its log; a minute at most.
    #[track_caller]
    pub fn ended(&mut self) -> (ExitStatus, Vec<String>) {
        let mut status = None;
        for _ in 0..6000 {
            status = self.child.try_wait().unwrap();
            if status.is_some() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let status = status.unwrap_or_else(|| panic!("the server does not end: {:?}", self.lines.lock().unwrap()));
        self.reader.take().unwrap().join().unwrap();
        let lines = self.lines.lock().unwrap().clone();
        assert!(!lines.iter().any(|line| line.contains("panicked")), "{lines:#?}");
        (status, lines)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The bytes of a request.
pub fn request(method: &str, path: &str, headers: &str, body: &str) -> String {
    let length = if body.is_empty() { String::new() } else { format!("content-length: {}\r\n", body.len()) };
    format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\n{headers}{length}\r\n{body}")
}

/// What came back.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    /// In lower case.
    pub head: String,
    pub body: String,
}

impl Answer {
    /// Reads one answer, and not a byte more than that where it says how long it is.
    #[track_caller]
    pub fn read(stream: &mut impl Read) -> Answer {
        Answer::try_read(stream).unwrap_or_else(|e| panic!("no answer: {e}"))
    }

    pub fn try_read(stream: &mut impl Read) -> std::io::Result<Answer> {
        let mut head = vec![];
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            head.push(byte[0]);
        }
        let head = String::from_utf8(head).unwrap().to_ascii_lowercase();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let mut answer = Answer { status, head, body: String::new() };
        let mut body = vec![];
        match answer.header("content-length").map(|n| n.parse::<usize>().unwrap()) {
            Some(length) => {
                body.resize(length, 0);
                stream.read_exact(&mut body)?;
            }
            None if status == 204 => {}
            None if answer.header("transfer-encoding") == Some("chunked") => body = chunks(stream)?,
            None => {
                stream.read_to_end(&mut body)?;
            }
        }
        answer.body = String::from_utf8(body).unwrap();
        Ok(answer)
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        let of = |line: &str| -> Option<usize> { line.strip_prefix(name)?.strip_prefix(": ").map(str::len) };
        self.head.lines().find_map(|line| of(line).map(|n| &line[line.len() - n..]))
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e} in {self:?}"))
    }

    /// It must be an error in OpenAI's shape.
    #[track_caller]
    pub fn refuses(self, status: u16, part: &str) -> Answer {
        assert_eq!(self.status, status, "{self:?}");
        let message = self.json()["error"]["message"].as_str().unwrap_or_else(|| panic!("{self:?}")).to_string();
        assert!(message.contains(part), "{part:?} is not in {message:?}");
        assert!(self.json()["error"]["type"].is_string());
        self
    }
}

/// A body in chunks, put together.
fn chunks(stream: &mut impl Read) -> std::io::Result<Vec<u8>> {
    let mut body = vec![];
    loop {
        let mut line = vec![];
        while !line.ends_with(b"\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            line.push(byte[0]);
        }
        let size = usize::from_str_radix(std::str::from_utf8(&line).unwrap().trim_end(), 16).unwrap();
        let start = body.len();
        body.resize(start + size + 2, 0);
        stream.read_exact(&mut body[start..])?;
        assert!(body.ends_with(b"\r\n"));
        body.truncate(start + size);
        if size == 0 {
            return Ok(body);
        }
    }
}

/// Whether the other side has closed the connection, whatever it sent before; waits for that.
pub fn closed(stream: &mut TcpStream) -> bool {
    let mut rest = vec![];
    match stream.read_to_end(&mut rest) {
        Ok(_) => true,
        Err(e) => !matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut),
    }
}

/// Ends the sending half.
pub fn half_close(stream: &TcpStream) {
    stream.shutdown(Shutdown::Write).unwrap();
}

/// The program with a limit of open files.
pub fn with_files(files: usize, args: &[&str]) -> Command {
    let mut command = Command::new("sh");
    let script = format!("ulimit -n {files} && exec \"$0\" \"$@\"");
    command.args(["-c", &script]).arg(OsStr::new(env!("CARGO_BIN_EXE_quern"))).args(args).stdin(Stdio::null());
    command
}

/// A path as text.
pub fn text(path: &Path) -> &str {
    arg(path)
}
