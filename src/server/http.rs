//! One connection's requests: heads and bodies within limits, answers, and an end when the client goes away.
//!
//! A request's future and the body of its answer are dropped when the client is gone, which cancels what the engine
//! computes for it. A panic is an answer of status 500 to that request alone.

use std::{
    cell::Cell,
    future::Future,
    net::SocketAddr,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    rc::Rc,
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::{
    HeaderMap, Method, Request, Response,
    body::{Body, Frame, Incoming, SizeHint},
    header::{CACHE_CONTROL, CONNECTION, CONTENT_TYPE, HeaderName, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use serde_json::json;
use tokio::{
    sync::{Notify, mpsc::Receiver},
    time::{Sleep, sleep, timeout_at},
};

use super::{
    ApiError, Call, Reply, api, gate,
    intake::Share,
    listen::{Server, Stage},
    log::Line,
    metrics,
    peer::{Patience, Peer, Progress, Socket, Turn},
};

/// Most bytes of a request's head, and of what waits in memory to be sent.
const BUFFER: usize = 64 << 10;

/// Most headers of a request.
const HEADERS: usize = 100;

/// While a stream has nothing to say it sends a comment this often, which finds clients that are gone.
const PING: Duration = Duration::from_secs(1);

/// A connection, as the listener keeps it.
pub struct Connection {
    /// Whose turn it is.
    pub progress: Rc<Progress>,
    /// It was asked to make room for another one.
    pub leaving: Cell<bool>,
    /// Asks it.
    pub leave: Notify,
    /// Asks the request whose body is waited for.
    pub evict: Notify,
}

/// Serves one client until it or the server has had enough.
pub async fn serve(server: Arc<Server>, peer: Rc<Peer>, address: Option<SocketAddr>, connection: Rc<Connection>) {
    let options = &server.options;
    let patience = Patience { client: options.client_timeout, idle: options.keep_alive };
    let socket = Socket::new(peer.clone(), connection.progress.clone(), patience);
    let unread = Rc::new(Cell::new(false));
    let client = Client {
        server: server.clone(),
        peer: peer.clone(),
        address,
        connection: connection.clone(),
        progress: connection.progress.clone(),
        unread: unread.clone(),
    };
    let service = service_fn(|request| answer(client.clone(), request));
    let mut builder = http1::Builder::new();
    // The socket has the clocks, and `Peer::gone` looks for clients that left.
    builder.half_close(true).header_read_timeout(None).max_buf_size(BUFFER).max_headers(HEADERS);
    let mut http = pin!(builder.serve_connection(socket, service));
    let mut stage = server.stage();
    let mut closing = false;
    let result = loop {
        tokio::select! {
            biased;
            result = http.as_mut() => break result,
            () = connection.leave.notified() => {
                match connection.progress.get().0 {
                    // A request that has come is not lost.
                    Turn::Request => connection.leaving.set(false),
                    Turn::Body => connection.evict.notify_one(),
                    Turn::Idle | Turn::Head => return,
                }
            }
            _ = stage.wait_for(|&s| s == Stage::Closing), if !closing => {
                closing = true;
                http.as_mut().graceful_shutdown();
            }
        }
    };
    let parse = result.as_ref().err().filter(|error| error.is_parse() || error.is_parse_too_large());
    if let Some(error) = parse {
        let status = if error.is_parse_too_large() { 431 } else { 400 };
        server.count(status);
        let id = gate::request_id(&HeaderMap::new());
        let line = Line {
            id: &id,
            peer: address,
            method: "-",
            path: "-",
            status,
            bytes: 0,
            took: Duration::ZERO,
            usage: None,
        };
        server.log.request(&line);
    }
    if (parse.is_some() || unread.get()) && !connection.leaving.get() {
        connection.progress.set(Turn::Idle);
        tokio::select! {
            () = peer.linger() => {}
            () = connection.leave.notified() => {}
        }
    }
}

/// What all requests of a connection share.
#[derive(Clone)]
struct Client {
    server: Arc<Server>,
    peer: Rc<Peer>,
    address: Option<SocketAddr>,
    connection: Rc<Connection>,
    progress: Rc<Progress>,
    /// A body was left unread: closing at once would take the answer back.
    unread: Rc<Cell<bool>>,
}

async fn answer(client: Client, request: Request<Incoming>) -> Result<Response<Answer>, Gone> {
    client.progress.set(Turn::Request);
    let server = client.server.clone();
    let (head, body) = request.into_parts();
    let mut exchange = Exchange::new(&client, &head.method, head.uri.path(), &head.headers);
    let call = Call {
        method: head.method,
        path: head.uri.path().to_string(),
        query: head.uri.query().map(str::to_string),
        headers: head.headers,
        body: Bytes::new(),
        share: server.intake.share(),
        id: exchange.id.clone(),
        arrived: exchange.arrived,
    };
    let origin = server.options.gate.origin(&call.headers);
    let preflight = call.method == Method::OPTIONS
        && origin.is_some()
        && call.headers.contains_key("access-control-request-method");
    let mut extra = HeaderMap::new();
    let close = Cell::new(false);
    let reply = if preflight {
        gate::preflight(&call.headers, &mut extra);
        Reply::Whole { status: 204, content_type: "", headers: vec![], body: Bytes::new() }
    } else {
        // Where nothing is computed the client need not be looked for.
        let had_body = !body.is_end_stream();
        let work = reply(&client, call, body, &close);
        tokio::select! {
            biased;
            reply = work => reply.unwrap_or_else(|refused| {
                // What is left of the body is not worth reading.
                close.set(close.get() | had_body);
                refused.into()
            }),
            () = client.peer.clone().gone() => return Err(Gone),
            () = server.cancelled() => stopping().into(),
        }
    };
    let (status, content_type, headers, content) = match reply {
        Reply::Whole { status, content_type, headers, body } => {
            exchange.complete = true;
            exchange.bytes = body.len() as u64;
            (status, content_type, headers, Content::Whole(body))
        }
        Reply::Events(receiver) => {
            extra.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
            // Proxies that collect answers before they pass them on let this one through.
            extra.insert("x-accel-buffering", HeaderValue::from_static("no"));
            let stream = Events {
                receiver,
                ping: Box::pin(sleep(PING)),
                gone: Box::pin(client.peer.clone().gone()),
                cancelled: {
                    let server = server.clone();
                    Box::pin(async move { server.cancelled().await })
                },
                ended: false,
            };
            (200, "text/event-stream; charset=utf-8", vec![], Content::Events(stream))
        }
    };
    exchange.status = status;
    let id = HeaderValue::from_str(&exchange.id);
    let mut response = Response::new(Answer { content, exchange });
    *response.status_mut() = hyper::StatusCode::from_u16(status).unwrap_or(hyper::StatusCode::INTERNAL_SERVER_ERROR);
    let to = response.headers_mut();
    *to = extra;
    if !content_type.is_empty() {
        to.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    }
    for (name, value) in headers {
        if let Ok(value) = HeaderValue::from_str(&value) {
            to.insert(HeaderName::from_static(name), value);
        }
    }
    if let Ok(id) = id {
        to.insert(gate::REQUEST_ID, id);
    }
    if let Some(origin) = origin {
        gate::cors(to, origin);
    }
    if close.get() {
        client.unread.set(true);
    }
    if close.get() || server.draining() {
        to.insert(CONNECTION, HeaderValue::from_static("close"));
    }
    Ok(response)
}

/// The client went away before it had its answer.
#[derive(Debug, thiserror::Error)]
#[error("the client is gone")]
struct Gone;

/// What a request gets; `Err` where its body was not read to the end.
async fn reply(client: &Client, mut call: Call, body: Incoming, close: &Cell<bool>) -> Result<Reply, ApiError> {
    let server = &client.server;
    if let Some(reply) = own(server, &call) {
        close.set(!body.is_end_stream());
        return Ok(reply);
    }
    server.options.gate.key(&call.path, &call.headers)?;
    server.options.gate.page(&call.method, &call.headers)?;
    let Some(state) = server.state() else {
        let message = "the model is still being loaded; try again later";
        return Err(ApiError { retry_after: Some(1), ..ApiError::new(503, "overloaded_error", message) });
    };
    if server.draining() {
        return Err(stopping());
    }
    if !body.is_end_stream() {
        call.body = received(client, body, &mut call.share).await?;
    }
    let what = format!("{} {}", call.method, call.path);
    let routed = Caught(Box::pin(api::route(state, call))).await;
    Ok(routed.unwrap_or_else(|()| {
        server.log.event(&format!("an error of the server: the handler of {what} panicked"));
        ApiError::new(500, "server_error", "an error of the server; its log says more").into()
    }))
}

fn stopping() -> ApiError {
    let message = "the server is shutting down";
    ApiError { retry_after: Some(5), ..ApiError::new(503, "overloaded_error", message) }
}

/// Answers that do not need the model.
fn own(server: &Server, call: &Call) -> Option<Reply> {
    if !["/health", "/metrics", "/version"].contains(&call.path.as_str()) {
        return None;
    }
    if call.method != Method::GET && call.method != Method::HEAD {
        let message = format!("{} {}: expected GET", call.method, call.path);
        let mut reply = ApiError::new(405, "invalid_request_error", message).into();
        if let Reply::Whole { headers, .. } = &mut reply {
            headers.push(("allow", "GET, HEAD".into()));
        }
        return Some(reply);
    }
    Some(match call.path.as_str() {
        "/health" => health(server),
        "/version" => Reply::json(&json!({ "version": env!("CARGO_PKG_VERSION") })),
        _ => {
            let http = server.requests();
            let text = match server.state() {
                Some(state) => state.metrics.render(&state.engine.stats(), &state.model.name, &http),
                None => metrics::process(&http),
            };
            let content_type = "text/plain; version=0.0.4; charset=utf-8";
            Reply::Whole { status: 200, content_type, headers: vec![], body: text.into() }
        }
    })
}

/// Whether requests should be sent here.
fn health(server: &Server) -> Reply {
    let failure = server.state().and_then(|state| state.engine.failure());
    match (server.draining(), server.state(), failure) {
        (true, ..) => Reply::with_status(503, &json!({ "status": "draining" })),
        (_, None, _) => Reply::with_status(503, &json!({ "status": "loading" })),
        (_, _, Some(reason)) => Reply::with_status(503, &json!({ "status": "failed", "reason": reason })),
        _ => Reply::json(&json!({ "status": "ok" })),
    }
}

/// Reads a body, unless others need the connection more than a client that does not send.
async fn received(client: &Client, body: Incoming, share: &mut Share) -> Result<Bytes, ApiError> {
    client.progress.set(Turn::Body);
    let (options, connection) = (&client.server.options, &client.connection);
    let evicted = async {
        while !connection.leaving.get() {
            connection.evict.notified().await;
        }
    };
    let body = tokio::select! {
        biased;
        body = whole(body, options.max_body, options.client_timeout, share) => {
            connection.leaving.set(false);
            body
        }
        () = evicted => {
            let message = "all connections are in use, and this one made room: its body had not come yet";
            Err(ApiError { retry_after: Some(1), ..ApiError::new(503, "overloaded_error", message) })
        }
    };
    client.progress.set(Turn::Request);
    body
}

/// Reads a body; memory grows only with what has come.
async fn whole(body: Incoming, most: u64, patience: Duration, share: &mut Share) -> Result<Bytes, ApiError> {
    /// A body may take a second longer for each of these bytes that came.
    const SLOWEST: u64 = 32 << 10;
    let start = tokio::time::Instant::now();
    let too_large = |what: String| {
        let message = format!("the body has {what} bytes, at most {most} are taken (--max-body)");
        ApiError { code: Some("request_too_large"), ..ApiError::new(413, "invalid_request_error", message) }
    };
    let promised = body.size_hint().lower();
    if promised > most {
        return Err(too_large(promised.to_string()));
    }
    share.check(promised)?;
    let mut body = pin!(body);
    let (mut first, mut all) = (Bytes::new(), BytesMut::new());
    loop {
        let got = (first.len() + all.len()) as u64;
        let until = start + patience + Duration::from_secs(got / SLOWEST);
        let frame = match timeout_at(until, body.frame()).await {
            Err(_) => {
                let message = format!("the body did not come in time: {got} bytes in {:.0?}", start.elapsed());
                return Err(ApiError::new(408, "invalid_request_error", message));
            }
            Ok(None) => break,
            Ok(Some(Err(error))) => return Err(ApiError::invalid(format!("the body could not be read: {error}"))),
            Ok(Some(Ok(frame))) => frame,
        };
        let Ok(data) = frame.into_data() else { continue };
        if got + data.len() as u64 > most {
            return Err(too_large(format!("more than {most}")));
        }
        share.grow(got + data.len() as u64)?;
        if first.is_empty() && all.is_empty() {
            first = data;
        } else {
            all.extend_from_slice(&std::mem::take(&mut first));
            all.extend_from_slice(&data);
            // Room for more has been made.
            share.grow(all.capacity() as u64)?;
        }
    }
    Ok(if all.is_empty() { first } else { all.freeze() })
}

/// A future whose panic is an error.
struct Caught<F>(Pin<Box<F>>);

impl<F: Future> Future for Caught<F> {
    type Output = Result<F::Output, ()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        // After a panic the future is dropped and nobody looks at what it left behind.
        match catch_unwind(AssertUnwindSafe(|| self.0.as_mut().poll(cx))) {
            Ok(poll) => poll.map(Ok),
            Err(_) => Poll::Ready(Err(())),
        }
    }
}

/// A request from its head to the end of its answer; writes the line of the log when it is dropped.
struct Exchange {
    client: Client,
    id: String,
    method: Method,
    path: String,
    arrived: Instant,
    status: u16,
    bytes: u64,
    /// All of the answer was handed over to be sent.
    complete: bool,
}

impl Exchange {
    fn new(client: &Client, method: &Method, path: &str, headers: &HeaderMap) -> Exchange {
        let arrived = Instant::now();
        client.server.begin();
        if let Some(state) = client.server.state() {
            state.metrics.open(arrived);
        }
        Exchange {
            client: client.clone(),
            id: gate::request_id(headers),
            method: method.clone(),
            path: path.to_string(),
            arrived,
            status: 499,
            bytes: 0,
            complete: false,
        }
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        let server = &self.client.server;
        let status = if self.complete { self.status } else { 499 };
        let usage = server.state().and_then(|state| state.metrics.close(self.arrived));
        server.count(status);
        server.log.request(&Line {
            id: &self.id,
            peer: self.client.address,
            method: self.method.as_str(),
            path: &self.path,
            status,
            bytes: self.bytes,
            took: self.arrived.elapsed(),
            usage,
        });
        self.client.progress.set(Turn::Idle);
        server.end();
    }
}

/// The body of an answer.
struct Answer {
    content: Content,
    exchange: Exchange,
}

enum Content {
    Whole(Bytes),
    Events(Events),
}

struct Events {
    receiver: Receiver<Bytes>,
    ping: Pin<Box<Sleep>>,
    gone: Pin<Box<dyn Future<Output = ()>>>,
    cancelled: Pin<Box<dyn Future<Output = ()>>>,
    ended: bool,
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Gone;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Gone>>> {
        let Answer { content, exchange } = &mut *self;
        let events = match content {
            Content::Whole(bytes) if bytes.is_empty() => return Poll::Ready(None),
            Content::Whole(bytes) => return Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes))))),
            Content::Events(events) => events,
        };
        match events.poll(cx) {
            Poll::Ready(Some(Ok(bytes))) => {
                exchange.bytes += bytes.len() as u64;
                Poll::Ready(Some(Ok(Frame::data(bytes))))
            }
            Poll::Ready(None) => {
                exchange.complete = true;
                Poll::Ready(None)
            }
            Poll::Ready(Some(Err(gone))) => Poll::Ready(Some(Err(gone))),
            Poll::Pending => Poll::Pending,
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(&self.content, Content::Whole(bytes) if bytes.is_empty())
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Whole(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Content::Events(_) => SizeHint::default(),
        }
    }
}

impl Events {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Gone>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        if self.gone.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err(Gone)));
        }
        let restart = |ping: &mut Pin<Box<Sleep>>| ping.as_mut().reset(tokio::time::Instant::now() + PING);
        if let Poll::Ready(item) = self.receiver.poll_recv(cx) {
            restart(&mut self.ping);
            return Poll::Ready(item.map(Ok));
        }
        if self.cancelled.as_mut().poll(cx).is_ready() {
            self.ended = true;
            self.receiver.close();
            return Poll::Ready(Some(Ok(Bytes::from(format!("data: {}\n\n", stopping().body())))));
        }
        if self.ping.as_mut().poll(cx).is_ready() {
            restart(&mut self.ping);
            // The clock has to see this task once more.
            let _ = self.ping.as_mut().poll(cx);
            return Poll::Ready(Some(Ok(Bytes::from_static(b": ping\n\n"))));
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_of_one_future() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let late = async {
            tokio::task::yield_now().await;
            assert!(std::hint::black_box(false), "this panic is part of a test");
        };
        assert_eq!(runtime.block_on(Caught(Box::pin(late))), Err(()));
        assert_eq!(runtime.block_on(Caught(Box::pin(async { 7 }))), Ok(7));
    }
}
