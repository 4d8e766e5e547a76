//! The server's life: it listens, is loaded, answers, drains and ends; and who may connect.
//!
//! All connections live on one thread. At most `max_connections` are open: for one more, the connection that has
//! waited longest for its client to ask something is closed; where all are busy, the newcomer is told so (503). When
//! the process has no descriptor left for a connection, room is made in the same way, and accepting goes on.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    io,
    net::{SocketAddr, TcpListener as StdTcp},
    os::unix::{
        fs::{FileTypeExt, MetadataExt},
        net::{UnixListener as StdUnix, UnixStream as StdUnixStream},
    },
    path::{Path, PathBuf},
    rc::Rc,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use tokio::{
    net::{TcpListener, UnixListener},
    signal::unix::{SignalKind, signal},
    sync::{Notify, watch},
    task::{LocalSet, spawn_local},
    time::{sleep, timeout},
};

use super::{
    State,
    gate::Gate,
    http::{self, Connection},
    intake::Intake,
    log::Log,
    metrics,
    peer::{Peer, Progress, Turn},
};

/// How the server treats its clients.
#[derive(Debug, Clone)]
pub struct HttpOptions {
    /// Keys and origins.
    pub gate: Gate,
    /// Most bytes of a request's body.
    pub max_body: u64,
    /// Bytes of all requests that are being received or read.
    pub request_memory: u64,
    /// Most connections open at once.
    pub max_connections: usize,
    /// How long a client may take to send a head, to go on with a body, or to take some of an answer.
    pub client_timeout: Duration,
    /// How long a connection may wait for the next request.
    pub keep_alive: Duration,
    /// How long requests may go on after SIGTERM.
    pub drain: Duration,
}

/// Where the server is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Loading or answering.
    Open,
    /// No new requests; those in progress go on.
    Draining,
    /// Those in progress are ended.
    Cancelling,
    /// Connections close as soon as they can.
    Closing,
}

/// What all connections share.
pub struct Server {
    /// How clients are treated.
    pub options: HttpOptions,
    /// Where lines go.
    pub log: Arc<Log>,
    /// Memory for requests that are being received or read.
    pub intake: Arc<Intake>,
    state: OnceLock<Arc<State>>,
    stage: watch::Sender<Stage>,
    in_progress: AtomicUsize,
    changed: Notify,
    requests: Mutex<BTreeMap<u16, u64>>,
    socket_file: Mutex<Option<PathBuf>>,
}

impl Server {
    /// The model, once it is loaded.
    pub fn state(&self) -> Option<Arc<State>> {
        self.state.get().cloned()
    }

    /// Whether new requests are refused because the server is about to end.
    pub fn draining(&self) -> bool {
        *self.stage.borrow() > Stage::Open
    }

    /// Follows the server's life.
    pub fn stage(&self) -> watch::Receiver<Stage> {
        self.stage.subscribe()
    }

    /// Returns when requests in progress must end.
    pub async fn cancelled(&self) {
        let mut stage = self.stage();
        let _ = stage.wait_for(|&stage| stage >= Stage::Cancelling).await;
    }

    /// A request began.
    pub fn begin(&self) {
        self.in_progress.fetch_add(1, Ordering::AcqRel);
    }

    /// A request that began has ended.
    pub fn end(&self) {
        if self.in_progress.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.changed.notify_one();
        }
    }

    /// A request ended with this status.
    pub fn count(&self, status: u16) {
        *self.requests.lock().unwrap_or_else(PoisonError::into_inner).entry(status).or_default() += 1;
    }

    /// Requests that ended, by status.
    pub fn requests(&self) -> BTreeMap<u16, u64> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, stage: Stage) {
        self.stage.send_replace(stage);
    }

    async fn idle(&self) {
        while self.in_progress.load(Ordering::Acquire) > 0 {
            self.changed.notified().await;
        }
    }

    /// Removes the socket's file, if there is one, and finishes the log.
    fn clean_up(&self) {
        if let Some(path) = self.socket_file.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = std::fs::remove_file(path);
        }
        self.log.finish();
    }
}

/// Where clients connect.
#[derive(Debug)]
pub enum Listener {
    /// Over the network.
    Tcp(StdTcp),
    /// On this machine, by a file.
    Unix(StdUnix, PathBuf),
}

/// Why nobody can connect.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// An address.
    #[error(
        "cannot listen on {host} port {port}: {source}{}",
        if source.kind() == io::ErrorKind::AddrInUse { "; another program does; give another --port" } else { "" }
    )]
    Tcp {
        /// Name or address.
        host: String,
        /// Port.
        port: u16,
        /// What happened.
        source: io::Error,
    },
    /// A file.
    #[error("cannot listen on {}: {reason}", path.display())]
    Unix {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

impl Listener {
    /// The first address of a host that can be used; port 0 takes any free one.
    pub fn tcp(host: &str, port: u16) -> Result<Listener, BindError> {
        let failed = |source| BindError::Tcp { host: host.to_string(), port, source };
        StdTcp::bind((host, port)).map(Listener::Tcp).map_err(failed)
    }

    /// A socket in the file system, which only this user may use; a file left by a server that is gone is replaced.
    pub fn unix(path: &Path) -> Result<Listener, BindError> {
        let failed = |reason: String| BindError::Unix { path: path.to_path_buf(), reason };
        if let Ok(about) = std::fs::symlink_metadata(path) {
            if !about.file_type().is_socket() {
                return Err(failed("the file exists and is no socket".into()));
            }
            match StdUnixStream::connect(path) {
                Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
                    // Only the file that was looked at.
                    let same = std::fs::symlink_metadata(path).is_ok_and(|now| now.ino() == about.ino());
                    if same {
                        std::fs::remove_file(path).map_err(|e| failed(e.to_string()))?;
                    }
                }
                Ok(_) => return Err(failed("another program listens there".into())),
                Err(e) => return Err(failed(e.to_string())),
            }
        }
        let listener = StdUnix::bind(path).map_err(|e| failed(e.to_string()))?;
        let only_me = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(path, only_me).map_err(|e| failed(e.to_string()))?;
        Ok(Listener::Unix(listener, path.to_path_buf()))
    }

    /// As a client would name it.
    pub fn describe(&self) -> String {
        match self {
            Listener::Tcp(tcp) => match tcp.local_addr() {
                Ok(address) => format!("http://{address}"),
                Err(e) => e.to_string(),
            },
            Listener::Unix(_, path) => format!("unix:{}", path.display()),
        }
    }
}

/// A server whose thread is running.
pub struct Running {
    server: Arc<Server>,
    thread: JoinHandle<io::Result<()>>,
}

impl Running {
    /// Starts the thread. Until [`Running::ready`] every request is answered with status 503.
    pub fn start(listener: Listener, options: HttpOptions, log: Log) -> io::Result<Running> {
        metrics::started();
        let socket_file = match &listener {
            Listener::Unix(_, path) => Some(path.clone()),
            Listener::Tcp(_) => None,
        };
        let server = Arc::new(Server {
            intake: Intake::new(options.request_memory),
            options,
            log: Arc::new(log),
            state: OnceLock::new(),
            stage: watch::channel(Stage::Open).0,
            in_progress: AtomicUsize::new(0),
            changed: Notify::new(),
            requests: Mutex::default(),
            socket_file: Mutex::new(socket_file),
        });
        // Reading and tokenizing a request takes a thread for a moment. A large request may take one for long and a
        // large answer another (`Lanes`), and one is left for the others.
        const HELPERS: usize = 3;
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(HELPERS).build()?;
        let shared = server.clone();
        let run = move || {
            let local = LocalSet::new();
            let result = runtime.block_on(local.run_until(live(shared.clone(), listener)));
            drop(local);
            runtime.shutdown_background();
            shared.set(Stage::Closing);
            result
        };
        let thread = std::thread::Builder::new().name("http".into()).spawn(run)?;
        Ok(Running { server, thread })
    }

    /// The model is loaded.
    pub fn ready(&self, mut state: State) {
        let log = self.server.log.clone();
        state.note = Arc::new(move |message| log.event(message));
        let _ = self.server.state.set(Arc::new(state));
    }

    /// A line for the log.
    pub fn log(&self, message: &str) {
        self.server.log.event(message);
    }

    /// Returns when the server has drained.
    pub fn wait(self) -> io::Result<()> {
        let result = self.thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread of the server panicked")));
        self.server.clean_up();
        result
    }

    /// Gives up: the model could not be loaded.
    pub fn abandon(self) {
        self.server.clean_up();
    }
}

/// Signals that end the server.
struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    fn new() -> io::Result<Signals> {
        Ok(Signals { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// The next one's number.
    async fn next(&mut self) -> i32 {
        tokio::select! {
            _ = self.terminate.recv() => SignalKind::terminate().as_raw_value(),
            _ = self.interrupt.recv() => SignalKind::interrupt().as_raw_value(),
        }
    }
}

async fn live(server: Arc<Server>, listener: Listener) -> io::Result<()> {
    let mut signals = Signals::new()?;
    let accepting = Accepting::new(server.clone());
    let accept = spawn_local(accept(accepting.clone(), Socket::new(listener)?));
    signals.next().await;
    let Some(state) = server.state() else {
        // Nothing is in progress, and the thread that loads cannot be stopped otherwise.
        server.log.event("stopped while loading");
        server.clean_up();
        std::process::exit(0);
    };
    state.engine.drain();
    server.set(Stage::Draining);
    let (open, patience) = (server.in_progress.load(Ordering::Acquire), server.options.drain);
    server.log.event(&format!("draining: {open} requests in progress, for at most {} s", patience.as_secs()));
    let drained = async {
        if timeout(patience, server.idle()).await.is_err() {
            let open = server.in_progress.load(Ordering::Acquire);
            server.log.event(&format!("cancelling {open} requests that have not ended in time"));
        }
        server.set(Stage::Cancelling);
        let _ = timeout(LAST, server.idle()).await;
        server.set(Stage::Closing);
        let _ = timeout(LAST, accepting.empty()).await;
    };
    tokio::select! {
        () = drained => {}
        number = signals.next() => {
            server.log.event("stopped at once");
            server.clean_up();
            std::process::exit(128 + number);
        }
    }
    accept.abort();
    server.log.event("stopped");
    Ok(())
}

/// For answers that say that the server ends, and for closing connections.
const LAST: Duration = Duration::from_secs(2);

/// A listener, as the thread of the server uses it.
enum Socket {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Socket {
    fn new(listener: Listener) -> io::Result<Socket> {
        Ok(match listener {
            Listener::Tcp(tcp) => {
                tcp.set_nonblocking(true)?;
                Socket::Tcp(TcpListener::from_std(tcp)?)
            }
            Listener::Unix(unix, _) => {
                unix.set_nonblocking(true)?;
                Socket::Unix(UnixListener::from_std(unix)?)
            }
        })
    }

    async fn accept(&self) -> io::Result<(Peer, Option<SocketAddr>)> {
        match self {
            Socket::Tcp(tcp) => {
                let (stream, address) = tcp.accept().await?;
                // Tokens go out as they come.
                stream.set_nodelay(true)?;
                Ok((Peer::Tcp(stream), Some(address)))
            }
            Socket::Unix(unix) => Ok((Peer::Unix(unix.accept().await?.0), None)),
        }
    }
}

/// Connections that are open.
struct Accepting {
    server: Arc<Server>,
    open: RefCell<BTreeMap<u64, Rc<Connection>>>,
    refusing: Cell<usize>,
    changed: Notify,
}

impl Accepting {
    fn new(server: Arc<Server>) -> Rc<Accepting> {
        Rc::new(Accepting { server, open: RefCell::default(), refusing: Cell::new(0), changed: Notify::new() })
    }

    /// Whether no connection may be added.
    fn full(&self) -> bool {
        let staying = self.open.borrow().values().filter(|c| !c.leaving.get()).count();
        staying >= self.server.options.max_connections
    }

    /// Closes the connection that has waited longest for its client, of those that wait for the rest of a request only
    /// where no other is left; false where all have a whole request in progress.
    fn make_room(&self) -> bool {
        let open = self.open.borrow();
        let waiting = open.values().filter_map(|c| match c.progress.get() {
            (Turn::Request, _) => None,
            (turn, since) => (!c.leaving.get()).then_some(((turn == Turn::Body, since), c)),
        });
        let Some((_, connection)) = waiting.min_by_key(|(order, _)| *order) else { return false };
        connection.leaving.set(true);
        connection.leave.notify_one();
        true
    }

    async fn empty(&self) {
        while !self.open.borrow().is_empty() || self.refusing.get() > 0 {
            self.changed.notified().await;
        }
    }
}

async fn accept(accepting: Rc<Accepting>, socket: Socket) {
    let server = accepting.server.clone();
    let mut stage = server.stage();
    let mut starved = false;
    for id in 0.. {
        let accepted = tokio::select! {
            accepted = socket.accept() => accepted,
            _ = stage.wait_for(|&stage| stage == Stage::Closing) => return,
        };
        match accepted {
            Ok((peer, address)) => {
                starved = false;
                if accepting.full() && !accepting.make_room() {
                    refuse(&accepting, peer);
                } else {
                    connect(&accepting, id, peer, address);
                }
            }
            Err(e) if no_descriptors(&e) => {
                if !std::mem::replace(&mut starved, true) {
                    server.log.event(&format!("cannot accept connections: {e}; see ulimit -n and --max-connections"));
                }
                accepting.make_room();
                sleep(Duration::from_millis(20)).await;
            }
            // The client went away before it was accepted, or the network says so.
            Err(_) => sleep(Duration::from_millis(1)).await,
        }
    }
}

/// The process or the machine has too many files open, or no memory for a connection.
fn no_descriptors(error: &io::Error) -> bool {
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    const ENOBUFS: i32 = 105;
    const ENOMEM: i32 = 12;
    matches!(error.raw_os_error(), Some(EMFILE | ENFILE | ENOBUFS | ENOMEM))
}

fn connect(accepting: &Rc<Accepting>, id: u64, peer: Peer, address: Option<SocketAddr>) {
    let connection = Rc::new(Connection {
        progress: Rc::new(Progress::connected()),
        leaving: Cell::new(false),
        leave: Notify::new(),
        evict: Notify::new(),
    });
    accepting.open.borrow_mut().insert(id, connection.clone());
    let accepting = accepting.clone();
    spawn_local(async move {
        let left = Left { accepting, id };
        http::serve(left.accepting.server.clone(), Rc::new(peer), address, connection).await;
        drop(left);
    });
}

/// Takes a connection from the list, however it ended.
struct Left {
    accepting: Rc<Accepting>,
    id: u64,
}

impl Drop for Left {
    fn drop(&mut self) {
        self.accepting.open.borrow_mut().remove(&self.id);
        self.accepting.changed.notify_one();
    }
}

/// Tells a client that there are too many.
fn refuse(accepting: &Rc<Accepting>, peer: Peer) {
    /// So many have time to read it.
    const MOST: usize = 32;
    let body = super::ApiError::new(503, "overloaded_error", "all connections are in use; try again later").body();
    let body = body.to_string();
    let text = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n\
         connection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    accepting.server.count(503);
    let _ = peer.try_write(text.as_bytes());
    if accepting.refusing.get() < MOST {
        accepting.refusing.set(accepting.refusing.get() + 1);
        let accepting = accepting.clone();
        spawn_local(async move {
            peer.linger().await;
            accepting.refusing.set(accepting.refusing.get() - 1);
            accepting.changed.notify_one();
        });
    }
}

/// Descriptors that this process may have open.
pub fn most_files() -> Option<usize> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}
