//! One client's connection: bytes in and out with time limits, and whether the client is still there.
//!
//! A client that has closed its sending half counts as gone, as it does for nginx and for Go's server: a closed
//! connection cannot be told from a half-closed one without sending something. It gets [`GRACE`] all the same, so
//! that what is answered at once reaches clients that send a request and close.

use std::{
    cell::Cell,
    io::{self, ErrorKind, IoSlice},
    os::fd::AsFd,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, ready},
    time::Duration,
};

use hyper::rt::{Read, ReadBufCursor, Write};
use tokio::{
    io::Interest,
    net::{TcpStream, UnixStream},
    time::{Instant, Sleep, sleep, sleep_until, timeout},
};

use super::ApiError;

/// A client is looked for this often, and not before this time has passed since its request.
pub const GRACE: Duration = Duration::from_millis(100);

/// Bytes read at once.
const CHUNK: usize = 16 << 10;

/// A connected socket.
#[derive(Debug)]
pub enum Peer {
    /// Over the network.
    Tcp(TcpStream),
    /// On this machine.
    Unix(UnixStream),
}

macro_rules! either {
    ($peer:expr, $stream:ident => $do:expr) => {
        match $peer {
            Peer::Tcp($stream) => $do,
            Peer::Unix($stream) => $do,
        }
    };
}

impl Peer {
    /// Returns when the client has closed the connection, or its half of it; looks every [`GRACE`].
    pub async fn gone(self: Rc<Self>) {
        loop {
            sleep(GRACE).await;
            // Returns at once where bytes wait to be read, e.g. the next request of a pipeline.
            match either!(&*self, s => s.ready(Interest::READABLE).await) {
                Ok(ready) if !ready.is_read_closed() => {}
                _ => return,
            }
        }
    }

    /// What is sent is sent; lets the client read it before the connection is reset for what it goes on sending.
    pub async fn linger(&self) {
        const MOST: usize = 4 << 20;
        let _ = self.shut_down();
        let mut scratch = [0; CHUNK];
        let mut left = MOST;
        let drained = async {
            while left > 0 && either!(self, s => s.readable().await).is_ok() {
                match either!(self, s => s.try_read(&mut scratch)) {
                    Ok(0) => return,
                    Ok(n) => left = left.saturating_sub(n),
                    Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                    Err(_) => return,
                }
            }
        };
        let _ = timeout(Duration::from_secs(1), drained).await;
    }

    /// Sends what fits into the socket's buffer.
    pub fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        either!(self, s => s.try_write(bytes))
    }

    fn shut_down(&self) -> io::Result<()> {
        // A shared stream of tokio's cannot be shut down; another name of the same socket can.
        match self {
            Peer::Tcp(s) => {
                std::net::TcpStream::from(s.as_fd().try_clone_to_owned()?).shutdown(std::net::Shutdown::Write)
            }
            Peer::Unix(s) => std::os::unix::net::UnixStream::from(s.as_fd().try_clone_to_owned()?)
                .shutdown(std::net::Shutdown::Write),
        }
    }
}

/// Whose turn it is on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// The client may send a request, and has sent nothing of it.
    Idle,
    /// The client sends the head of a request.
    Head,
    /// The client sends the body of a request.
    Body,
    /// A request that has come is being read, computed or answered.
    Request,
}

/// The state of a connection, as seen from several places.
#[derive(Debug)]
pub struct Progress(Cell<(Turn, Instant)>);

impl Progress {
    /// A connection that has just been made: the client is to send a head.
    pub fn connected() -> Progress {
        Progress(Cell::new((Turn::Head, Instant::now())))
    }

    /// Whose turn it is, and since when.
    pub fn get(&self) -> (Turn, Instant) {
        self.0.get()
    }

    /// Whose turn it is from now on.
    pub fn set(&self, turn: Turn) {
        self.0.set((turn, Instant::now()));
    }
}

/// How long a connection waits.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// For the whole head of a request, and for the client to take anything at all of an answer.
    pub client: Duration,
    /// For the next request.
    pub idle: Duration,
}

/// A [`Peer`] as hyper wants it. Reading and writing fail with [`ErrorKind::TimedOut`] when patience is over.
pub struct Socket {
    peer: Rc<Peer>,
    progress: Rc<Progress>,
    patience: Patience,
    /// Until when bytes may come.
    reading: Option<(Instant, Pin<Box<Sleep>>)>,
    /// Until when the client may take some.
    writing: Option<Pin<Box<Sleep>>>,
}

impl Socket {
    /// Waits so long, depending on `progress`.
    pub fn new(peer: Rc<Peer>, progress: Rc<Progress>, patience: Patience) -> Socket {
        Socket { peer, progress, patience, reading: None, writing: None }
    }

    /// Nothing has come: that is fine for a while.
    fn unread(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let until = match self.progress.get() {
            (Turn::Idle, since) => since + self.patience.idle,
            (Turn::Head, since) => since + self.patience.client,
            // Whoever reads the body has a clock of its own.
            (Turn::Body | Turn::Request, _) => return Poll::Pending,
        };
        let fresh = || (until, Box::pin(sleep_until(until)));
        let (set, sleep) = self.reading.get_or_insert_with(fresh);
        if *set != until {
            *set = until;
            sleep.as_mut().reset(until);
        }
        ready!(sleep.as_mut().poll(cx));
        Poll::Ready(Err(ErrorKind::TimedOut.into()))
    }

    /// What to send instead of bytes that no handler of ours has written.
    fn refusal(&self, slices: &[IoSlice<'_>]) -> Option<String> {
        const MOST: usize = 512;
        let ours = matches!(self.progress.get().0, Turn::Body | Turn::Request);
        if ours || slices.iter().map(|slice| slice.len()).sum::<usize>() > MOST {
            return None;
        }
        let head: Vec<u8> = slices.iter().flat_map(|slice| slice.iter().copied()).collect();
        explained(std::str::from_utf8(&head).ok()?)
    }

    fn write_with(
        &mut self,
        cx: &mut Context<'_>,
        mut write: impl FnMut(&Peer) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            if either!(&*self.peer, s => s.poll_write_ready(cx))?.is_pending() {
                let client = self.patience.client;
                let sleep = self.writing.get_or_insert_with(|| Box::pin(sleep(client)));
                ready!(sleep.as_mut().poll(cx));
                return Poll::Ready(Err(ErrorKind::TimedOut.into()));
            }
            match write(&self.peer) {
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(e) => return Poll::Ready(Err(e)),
                Ok(n) => {
                    self.writing = None;
                    // The end of a long answer may be on its way when its request has ended.
                    if self.progress.get().0 == Turn::Idle {
                        self.progress.set(Turn::Idle);
                    }
                    return Poll::Ready(Ok(n));
                }
            }
        }
    }
}

impl Read for Socket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, mut buf: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        let mut chunk = [0; CHUNK];
        let most = buf.remaining().min(CHUNK);
        loop {
            if either!(&*self.peer, s => s.poll_read_ready(cx))?.is_pending() {
                return self.unread(cx);
            }
            match either!(&*self.peer, s => s.try_read(&mut chunk[..most])) {
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(e) => return Poll::Ready(Err(e)),
                Ok(n) => {
                    if n > 0 && n < most {
                        // A short read has emptied the socket: let `gone` sleep until something happens.
                        let none = || Err::<(), _>(ErrorKind::WouldBlock.into());
                        let _ = either!(&*self.peer, s => s.try_io(Interest::READABLE, none));
                    }
                    if n > 0 && self.progress.get().0 == Turn::Idle {
                        self.progress.set(Turn::Head);
                    }
                    buf.put_slice(&chunk[..n]);
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}

impl Write for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.refusal(&[IoSlice::new(bytes)]) {
            Some(text) => self.write_with(cx, |peer| peer.try_write(text.as_bytes()).map(|_| bytes.len())),
            None => self.write_with(cx, |peer| peer.try_write(bytes)),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        // Without a descriptor to spare the socket is closed a little later, by dropping it.
        let _ = self.peer.shut_down();
        Poll::Ready(Ok(()))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.refusal(slices) {
            Some(text) => {
                let all = slices.iter().map(|slice| slice.len()).sum();
                self.write_with(cx, |peer| peer.try_write(text.as_bytes()).map(|_| all))
            }
            None => self.write_with(cx, |peer| either!(peer, s => s.try_write_vectored(slices))),
        }
    }
}

/// What a client reads whose request could not be parsed: hyper's answer to that is a head alone.
fn explained(head: &str) -> Option<String> {
    let status = head.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok()?;
    let message = match status {
        400 => "the request is no HTTP/1.1 that can be understood: its first line, a header or a length is wrong",
        414 => "the address in the request's first line is too long",
        431 => "the head of the request is too large: more than 64 KiB, or more than 100 headers",
        _ => return None,
    };
    if !head.ends_with("\r\n\r\n") || !head.contains("content-length: 0\r\n") {
        return None;
    }
    let line = head.lines().next()?;
    let body = ApiError::new(status, "invalid_request_error", message).body().to_string();
    let length = body.len();
    Some(format!(
        "{line}\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_alone_is_explained_and_nothing_else() {
        let bare = "HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
        let text = explained(bare).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 431 ") && head.ends_with(&format!("content-length: {}", body.len())));
        assert!(body.contains("invalid_request_error") && body.contains("100 headers"), "{body}");
        for other in [
            bare.replace("431", "200"),
            bare.replace(": 0", ": 7"),
            format!("{bare}more"),
            format!(" {bare}"),
            "data: HTTP/1.1 400\n\n".into(),
        ] {
            assert_eq!(explained(&other), None, "{other}");
        }
    }
}
