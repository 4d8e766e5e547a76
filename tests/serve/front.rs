//! Endpoints behind a plain HTTP server on a port of its own, for clients that are other programs.

use std::{convert::Infallible, net::SocketAddr, sync::Arc, time::Instant};

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::{
    Request, Response,
    body::{Body, Frame, Incoming},
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use quern::server::{Call, Reply, State, api};
use tokio::{net::TcpListener, sync::mpsc::Receiver};

/// Serves until the runtime ends; returns the address.
pub async fn serve(state: Arc<State>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let state = state.clone();
            tokio::spawn(async move {
                let service = service_fn(move |request| answer(state.clone(), request));
                let _ =
                    hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(socket), service).await;
            });
        }
    });
    address
}

async fn answer(state: Arc<State>, request: Request<Incoming>) -> Result<Response<Events>, hyper::Error> {
    let (head, body) = request.into_parts();
    let call = Call {
        method: head.method,
        path: head.uri.path().into(),
        query: head.uri.query().map(Into::into),
        headers: head.headers,
        body: body.collect().await?.to_bytes(),
        id: "test".into(),
        arrived: Instant::now(),
    };
    let (status, kind, body) = match api::route(state, call).await {
        Reply::Whole { status, content_type, body, .. } => {
            let (sender, receiver) = tokio::sync::mpsc::channel(1);
            sender.send(body).await.unwrap();
            (status, content_type, receiver)
        }
        Reply::Events(events) => (200, "text/event-stream", events),
    };
    Ok(Response::builder().status(status).header("content-type", kind).body(Events(body)).unwrap())
}

/// A body of pieces as they come.
struct Events(Receiver<Bytes>);

impl Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|bytes| bytes.map(|b| Ok(Frame::data(b))))
    }
}
