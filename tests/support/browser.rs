//! A headless Chromium, spoken to by the DevTools protocol over two named pipes.

use std::{
    fs::{File, OpenOptions},
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::Scratch;

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// A browser with one page.
pub struct Browser {
    process: Child,
    commands: File,
    answers: Receiver<Value>,
    session: Value,
    next: u64,
    /// What the page wrote to its console, and exceptions.
    pub complaints: Vec<String>,
    _scratch: Scratch,
}

impl Browser {
    /// The browser that `QUERN_CHROMIUM` names.
    pub fn new() -> Option<Browser> {
        let program = PathBuf::from(std::env::var_os("QUERN_CHROMIUM")?);
        let scratch = Scratch::new("chromium");
        let (to, from) = (scratch.path().join("to"), scratch.path().join("from"));
        assert!(Command::new("mkfifo").args([&to, &from]).status().unwrap().success());
        // Opened both ways, a named pipe waits for nobody.
        let open = |path| OpenOptions::new().read(true).write(true).open(path).unwrap();
        let (commands, reader) = (open(&to), BufReader::new(open(&from)));
        // The shell gives it the pipes as file descriptors 3 and 4, where it looks for them.
        let script = "exec \"$1\" --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run \
                      --disable-background-networking --remote-debugging-pipe --user-data-dir=\"$4\" 3<\"$2\" 4>\"$3\"";
        let process = Command::new("sh")
            .args(["-c", script, "sh"])
            .args([&program, &to, &from, &scratch.path().join("profile")])
            .env("TMPDIR", scratch.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            for message in reader.split(0).map_while(Result::ok) {
                if sender.send(serde_json::from_slice(&message).unwrap()).is_err() {
                    break;
                }
            }
        });
        let session = Value::Null;
        let mut browser =
            Browser { process, commands, answers, session, next: 0, complaints: vec![], _scratch: scratch };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}))["targetId"].clone();
        let attached = browser.call("Target.attachToTarget", json!({"targetId": target, "flatten": true}));
        browser.session = attached["sessionId"].clone();
        for domain in ["Page.enable", "Runtime.enable", "Log.enable"] {
            browser.call(domain, json!({}));
        }
        Some(browser)
    }

    /// Calls a method of the protocol.
    pub fn call(&mut self, method: &str, params: Value) -> Value {
        self.next += 1;
        let mut message = json!({"id": self.next, "method": method, "params": params});
        if !self.session.is_null() {
            message["sessionId"] = self.session.clone();
        }
        self.commands.write_all(format!("{message}\0").as_bytes()).unwrap();
        loop {
            let answer = self.answers.recv_timeout(PATIENCE).unwrap_or_else(|e| panic!("{method}: {e}"));
            if answer["id"] == self.next {
                assert!(answer["error"].is_null(), "{method}: {answer}");
                return answer["result"].clone();
            }
            match answer["method"].as_str() {
                Some("Runtime.exceptionThrown") => self.complaints.push(answer["params"].to_string()),
                Some("Log.entryAdded") if answer["params"]["entry"]["level"] == "error" => {
                    self.complaints.push(answer["params"]["entry"]["text"].to_string());
                }
                _ => {}
            }
        }
    }

    /// Opens a page and waits until its script has run.
    pub fn open(&mut self, url: &str) {
        self.call("Page.navigate", json!({ "url": url }));
        self.until(&format!("document.readyState == 'complete' && location.href.startsWith('{url}')"));
    }

    /// The value of an expression on the page.
    pub fn value(&mut self, expression: &str) -> Value {
        let answer = self.call("Runtime.evaluate", json!({"expression": expression, "returnByValue": true}));
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {answer}");
        answer["result"]["value"].clone()
    }

    /// Waits until an expression is true.
    #[track_caller]
    pub fn until(&mut self, expression: &str) {
        let begun = Instant::now();
        while self.value(expression) != true {
            let page = || "document.body.innerText";
            if begun.elapsed() > PATIENCE {
                panic!("never {expression}: {}", self.value(page()));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Writes into what has the focus.
    pub fn write(&mut self, text: &str) {
        self.call("Input.insertText", json!({ "text": text }));
    }

    /// Presses a key; `modifiers`: 8 is Shift.
    pub fn press(&mut self, key: &str, code: u32, text: &str, modifiers: u32) {
        let common = json!({"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers});
        let mut down = common.clone();
        (down["type"], down["text"]) = ("keyDown".into(), text.into());
        self.call("Input.dispatchKeyEvent", down);
        let mut up = common;
        up["type"] = "keyUp".into();
        self.call("Input.dispatchKeyEvent", up);
    }

    /// A picture, into the folder that `QUERN_SCREENSHOTS` names.
    pub fn picture(&mut self, name: &str) {
        let Some(folder) = std::env::var_os("QUERN_SCREENSHOTS") else { return };
        let shot = self.call("Page.captureScreenshot", json!({"format": "png"}));
        let png = base64(shot["data"].as_str().unwrap());
        std::fs::write(PathBuf::from(folder).join(format!("{name}.png")), png).unwrap();
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn base64(text: &str) -> Vec<u8> {
    let value = |c: u8| match c {
        b'A'..=b'Z' => c - b'A',
        b'a'..=b'z' => c - b'a' + 26,
        b'0'..=b'9' => c - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let digits: Vec<u8> = text.bytes().filter(|&c| c != b'=').map(value).collect();
    let group = |group: &[u8]| {
        let bits = group.iter().fold(0u32, |bits, &d| bits << 6 | u32::from(d)) << (6 * (4 - group.len()));
        bits.to_be_bytes()[1..group.len()].to_vec()
    };
    digits.chunks(4).flat_map(group).collect()
}
