//! HTTP to the server: connections that are used again, streams of events, and when each piece of text came.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Request, Response, body::Incoming, client::conn::http1::SendRequest};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;

use super::{Endpoint, ServeBenchArgs};

/// Most bytes of an answer that is read whole.
const MOST_BODY: usize = 64 << 20;

/// Most bytes of one event.
const MOST_EVENT: usize = 1 << 20;

/// `http://host:port/path`
#[derive(Debug, Clone, PartialEq)]
pub struct Server {
    address: String,
    path: String,
}

impl Server {
    /// Reads a URL.
    pub fn parse(url: &str) -> Result<Server, String> {
        let rest = url.strip_prefix("http://").ok_or("expected a URL that begins with http:// (TLS is not spoken)")?;
        let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
        let named = !host.is_empty() && host.bytes().all(|b| b.is_ascii_graphic() && b != b'@');
        if !named || !path.bytes().all(|b| b.is_ascii_graphic()) {
            return Err("expected http://HOST:PORT".into());
        }
        let port = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        let address = if port { host.to_string() } else { format!("{host}:80") };
        // Clients of OpenAI name `/v1`; paths here do so themselves.
        let path = path.trim_end_matches('/').trim_end_matches("v1").trim_end_matches('/');
        Ok(Server { address, path: if path.is_empty() { String::new() } else { format!("/{path}") } })
    }
}

/// What one request came to.
#[derive(Debug, Clone, Default)]
pub struct Answer {
    /// When each piece of text came.
    pub times: Vec<Instant>,
    /// When all had come.
    pub end: Option<Instant>,
    /// The text.
    pub text: String,
    /// Counts, where the server gave them.
    pub usage: Option<Value>,
}

/// A way to the server; clones share its connections.
#[derive(Clone)]
pub struct Client {
    server: Server,
    endpoint: Endpoint,
    model: String,
    key: Option<String>,
    timeout: Duration,
    idle: Arc<Mutex<Vec<SendRequest<Full<Bytes>>>>>,
}

impl Client {
    /// Asks the server for its model.
    pub async fn new(args: &ServeBenchArgs, timeout: Duration) -> Result<Client, String> {
        let mut client = Client {
            server: args.url.clone(),
            endpoint: args.endpoint,
            model: String::new(),
            key: args.api_key.clone(),
            timeout,
            idle: Arc::default(),
        };
        client.model = match &args.model {
            Some(name) => name.clone(),
            None => {
                let models = client.json("GET", "/v1/models", None).await;
                let models = models.map_err(|e| format!("{}: GET /v1/models: {e}", client.server.address))?;
                models["data"][0]["id"].as_str().unwrap_or("default").to_string()
            }
        };
        Ok(client)
    }

    /// The model's name.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// A request whose answer is read whole.
    pub async fn json(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value, String> {
        let work = async {
            let (response, _) = self.send(method, path, body).await?;
            let status = response.status();
            let body = Limited::new(response.into_body(), MOST_BODY).collect().await;
            let body = body.map_err(|_| "the answer broke off")?.to_bytes();
            match status.is_success() {
                true => serde_json::from_slice(&body).map_err(|e| format!("the answer is no JSON: {e}")),
                false => Err(format!("HTTP {}", status.as_u16())),
            }
        };
        tokio::time::timeout(self.timeout, work).await.unwrap_or_else(|_| Err("timeout".into()))
    }

    /// A generation; errors are short, because they are counted by their text.
    pub async fn generate(&self, prompt: &str, tokens: usize) -> (Answer, Option<String>) {
        let mut answer = Answer::default();
        let work = self.stream(prompt, tokens, &mut answer);
        let result = tokio::time::timeout(self.timeout, work).await.unwrap_or_else(|_| Err("timeout".into()));
        answer.end = Some(Instant::now());
        let error = match result {
            Ok(()) if answer.times.is_empty() => Some("an answer without text".into()),
            result => result.err(),
        };
        (answer, error)
    }

    async fn stream(&self, prompt: &str, tokens: usize, answer: &mut Answer) -> Result<(), String> {
        let mut body = json!({
            "model": self.model, "max_tokens": tokens, "temperature": 0, "ignore_eos": true,
            "stream": true, "stream_options": {"include_usage": true},
        });
        let path = match self.endpoint {
            Endpoint::Completions => {
                body["prompt"] = prompt.into();
                "/v1/completions"
            }
            Endpoint::Chat => {
                body["messages"] = json!([{"role": "user", "content": prompt}]);
                "/v1/chat/completions"
            }
        };
        let (response, sender) = self.send("POST", path, Some(&body)).await?;
        if !response.status().is_success() {
            return Err(format!("HTTP {}", response.status().as_u16()));
        }
        let mut body = response.into_body();
        let mut waiting: Vec<u8> = vec![];
        let mut finished = false;
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| "the stream broke off")?;
            let now = Instant::now();
            waiting.extend_from_slice(frame.data_ref().map_or(&[], |data| &data[..]));
            while let Some(end) = waiting.iter().position(|&b| b == b'\n') {
                let line: Vec<u8> = waiting.drain(..=end).collect();
                let Some(data) = line.strip_prefix(b"data:") else { continue };
                if data.trim_ascii() == b"[DONE]" {
                    finished = true;
                } else {
                    event(data, now, answer)?;
                }
            }
            if waiting.len() > MOST_EVENT {
                return Err("an event without end".into());
            }
        }
        if !finished {
            return Err("the stream broke off".into());
        }
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(sender);
        Ok(())
    }

    async fn send(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> Result<(Response<Incoming>, SendRequest<Full<Bytes>>), String> {
        let text = Bytes::from(body.map_or(String::new(), Value::to_string));
        let request = || {
            let mut request = Request::builder()
                .method(method)
                .uri(format!("{}{path}", self.server.path))
                .header("host", &self.server.address)
                .header("content-type", "application/json");
            if let Some(key) = &self.key {
                request = request.header("authorization", format!("Bearer {key}"));
            }
            request.body(Full::new(text.clone())).map_err(|e| e.to_string())
        };
        // A connection that was closed meanwhile fails before anything is answered.
        loop {
            let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let Some(mut sender) = idle else { break };
            if sender.ready().await.is_ok()
                && let Ok(response) = sender.send_request(request()?).await
            {
                return Ok((response, sender));
            }
        }
        let stream = TcpStream::connect(&self.server.address).await.map_err(|e| format!("connect: {}", e.kind()))?;
        let _ = stream.set_nodelay(true);
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(|_| "connect: no HTTP")?;
        tokio::spawn(connection);
        let response = sender.send_request(request()?).await.map_err(|_| "the connection broke off")?;
        Ok((response, sender))
    }
}

fn event(data: &[u8], now: Instant, answer: &mut Answer) -> Result<(), String> {
    let value: Value = serde_json::from_slice(data).map_err(|_| "an event that is no JSON")?;
    if !value["error"].is_null() {
        return Err("an error in the stream".into());
    }
    if value["usage"].is_object() {
        answer.usage = Some(value["usage"].clone());
    }
    let choice = &value["choices"][0];
    let parts = [&choice["text"], &choice["delta"]["content"], &choice["delta"]["reasoning_content"]];
    let text: String = parts.iter().filter_map(|part| part.as_str()).collect();
    if !text.is_empty() {
        answer.times.push(now);
        answer.text += &text;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_read_with_and_without_path() {
        let server = |address: &str, path: &str| Ok(Server { address: address.into(), path: path.into() });
        assert_eq!(Server::parse("http://127.0.0.1:8080"), server("127.0.0.1:8080", ""));
        assert_eq!(Server::parse("http://host/"), server("host:80", ""));
        assert_eq!(Server::parse("http://host:1/v1/"), server("host:1", ""));
        assert_eq!(Server::parse("http://host:1/a/b"), server("host:1", "/a/b"));
        assert_eq!(Server::parse("http://[::1]:9"), server("[::1]:9", ""));
        for bad in ["https://host", "host:80", "http://", "http://a b", "http://u@h"] {
            assert!(Server::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn events_of_both_endpoints_are_read() {
        let mut answer = Answer::default();
        for data in [
            r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#,
            r#"{"choices":[{"delta":{"content":"a"}}],"usage":null}"#,
            r#"{"choices":[{"text":"b"}]}"#,
            r#"{"choices":[],"usage":{"completion_tokens":2}}"#,
        ] {
            event(data.as_bytes(), Instant::now(), &mut answer).unwrap();
        }
        assert_eq!((answer.text.as_str(), answer.times.len()), ("ab", 2));
        assert_eq!(answer.usage.as_ref().unwrap()["completion_tokens"], 2);
        assert!(event(br#"{"error":{"message":"x"}}"#, Instant::now(), &mut answer).is_err());
        assert!(event(b"{", Instant::now(), &mut answer).is_err());
    }
}
