//! `quern serve`: a model behind an HTTP endpoint.

use std::{
    error::Error,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use clap::{Args, ValueEnum};
use quern_models::{ModelFile, ModelSpec};

use super::{
    EngineArgs, Usage, draft, positive,
    run::{RunError, note},
    upload,
};
use crate::{
    draft::Method,
    engine::{Engine, EngineOptions, OpenError, defaults, worker::Worker},
    server::{
        ModelInfo, State,
        gate::Gate,
        listen::{HttpOptions, Listener, Running, most_files},
        log::{Log, Style},
    },
    text::TextModel,
};

/// Flags of `quern serve`.
#[derive(Debug, Args)]
#[command(
    after_help = "Without --api-key everybody who can connect may ask; there is no TLS: for other machines put a proxy \
    in front. SIGTERM and Ctrl-C let requests in progress finish (--drain-seconds); a second one ends at once."
)]
pub struct ServeArgs {
    /// A .qrn file
    pub file: PathBuf,

    /// Address to listen on
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1", help_heading = "Network")]
    pub host: String,
    /// Port to listen on; 0: any free one
    #[arg(long, value_name = "PORT", default_value_t = 8080, help_heading = "Network")]
    pub port: u16,
    /// Listen on a unix socket instead
    #[arg(long, value_name = "PATH", conflicts_with_all = ["host", "port"], help_heading = "Network")]
    pub unix_socket: Option<PathBuf>,
    /// Key that requests must show (Authorization: Bearer KEY); repeatable; others can see it in the process list
    #[arg(long, value_name = "KEY", help_heading = "Network")]
    pub api_key: Vec<String>,
    /// File with such keys, one per line
    #[arg(long, value_name = "FILE", help_heading = "Network")]
    pub api_key_file: Option<PathBuf>,
    /// Origin of web pages that may ask, e.g. `https://chat.example.org`, or *; repeatable
    #[arg(long, value_name = "ORIGIN", help_heading = "Network")]
    pub cors: Vec<String>,
    /// Another name of this server, for requests without --api-key that do not ask for localhost or an address; or *
    #[arg(long, value_name = "NAME", help_heading = "Network")]
    pub allow_host: Vec<String>,
    /// Most connections open at once [default: 1024, less where fewer files may be open]
    #[arg(long, value_name = "N", value_parser = positive, help_heading = "Network")]
    pub max_connections: Option<usize>,
    /// Most bytes of a request's body
    #[arg(long, value_name = "BYTES", default_value_t = 16 << 20, help_heading = "Network")]
    pub max_body: u64,
    /// Bytes of all requests together that are being received, wait to be read or are read; more are told to come back
    /// later (status 503)
    #[arg(long, value_name = "BYTES", default_value_t = 64 << 20, help_heading = "Network")]
    pub request_memory: u64,
    /// How long a client may take to send a request's head, to go on with its body, or to take some of the answer
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds, help_heading = "Network")]
    pub client_timeout: Duration,
    /// How long a connection may wait for the next request
    #[arg(long, value_name = "SECONDS", default_value = "75", value_parser = seconds, help_heading = "Network")]
    pub keep_alive: Duration,

    /// What the model is called [default: the file's name without .qrn]
    #[arg(long, value_name = "NAME", help_heading = "Requests")]
    pub model_name: Option<String>,
    /// Another name that requests may use; repeatable
    #[arg(long, value_name = "NAME", help_heading = "Requests")]
    pub alias: Vec<String>,
    /// Continue texts only, without the chat template
    #[arg(long, help_heading = "Requests")]
    pub raw: bool,
    /// Requests that may wait for the engine; more are told to come back later (status 429)
    #[arg(long, value_name = "N", default_value_t = 512, help_heading = "Requests")]
    pub max_queue: usize,
    /// Longest time of a request, from its arrival to its last token; 0: any
    #[arg(long, value_name = "SECONDS", default_value = "3600", value_parser = seconds_or_none, help_heading = "Requests")]
    pub timeout: Duration,
    /// Refuse requests with a `priority` of their own: where clients do not trust each other
    #[arg(long, help_heading = "Requests")]
    pub no_priority: bool,
    /// How long requests in progress may go on after SIGTERM
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds_or_none, help_heading = "Requests")]
    pub drain_seconds: Duration,
    /// How the lines on stderr look: one per request
    #[arg(long, value_enum, default_value = "text", help_heading = "Requests")]
    pub log: LogStyle,

    /// Requests computed at once, as far as the cache has room
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = super::batch, help_heading = "Engine")]
    pub sequences: usize,
    /// Tokens the KV cache holds, all requests and remembered beginnings together [default: 4 contexts]
    #[arg(long, value_name = "N", value_parser = positive, help_heading = "Engine")]
    pub cache_tokens: Option<usize>,
    /// Folder where computed beginnings are kept when the server ends, and found when it starts
    #[arg(long, value_name = "DIR", help_heading = "Engine")]
    pub cache_dir: Option<PathBuf>,
    /// Most tokens of a step, prompts and answers together [default: what takes 50 ms, beside the answers]
    #[arg(long, value_name = "N", value_parser = positive, help_heading = "Engine")]
    pub batch_tokens: Option<usize>,
    /// How the model is run.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// How lines look.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum LogStyle {
    /// For people
    Text,
    /// A JSON object per line
    Json,
}

/// Runs the command.
pub fn main(args: ServeArgs) -> Result<(), Box<dyn Error>> {
    let mut options = http_options(&args)?;
    let file = open(&args.file)?;
    let listener = match &args.unix_socket {
        Some(path) => Listener::unix(path)?,
        None => Listener::tcp(&args.host, args.port)?,
    };
    let style = match args.log {
        LogStyle::Text => Style::Text,
        LogStyle::Json => Style::Json,
    };
    options.gate.hosts = matches!(listener, Listener::Tcp(_) if !reachable(&listener))
        .then(|| [args.allow_host.as_slice(), std::slice::from_ref(&args.host)].concat());
    let open_to_all = options.gate.keys.is_empty() && reachable(&listener);
    let address = listener.describe();
    let server = Running::start(listener, options, Log::start(style)?)?;
    server.log(&format!("loading {}, {}", args.file.display(), address));
    if open_to_all {
        server.log("other machines may connect and no key is needed; see --api-key");
    }
    let (worker, state) = match load(&args, file, &|line| server.log(line)) {
        Ok(loaded) => loaded,
        Err(error) => {
            server.abandon();
            return Err(error);
        }
    };
    let device = state.model.device.clone();
    server.ready(state);
    server.log(&format!("listening on {address} ({device})"));
    let result = server.wait();
    // What a failed engine has in its cache is not worth a file that was good.
    let failed = worker.handle().failure().is_some();
    if let Some(mut engine) = worker.stop()
        && !failed
        && let Some(kept) = engine.close()?
    {
        note(kept);
    }
    result.map_err(|e| format!("the server ended: {e}").into())
}

fn open(path: &Path) -> Result<ModelFile, Box<dyn Error>> {
    let file = super::open(path)?;
    if file.tokenizer_json().is_none() {
        return Err(RunError::NoTokenizer { path: path.to_path_buf() }.into());
    }
    Ok(file)
}

/// Makes the engine; takes its time for a large model.
fn load(args: &ServeArgs, file: ModelFile, say: &dyn Fn(&str)) -> Result<(Worker, State), Box<dyn Error>> {
    let most = file.spec().max_context;
    if args.engine.ctx > most {
        return Err(RunError::Open(OpenError::Context { asked: args.engine.ctx, most }).into());
    }
    let small = draft::of(&args.engine, &file, true).map_err(|e| Usage(e.to_string()))?;
    let options = draft::with_trees(engine_options(args, file.spec()), &file, small.as_deref());
    let options = args.engine.fitting(&file, options).map_err(RunError::Open)?;
    if options.batch_tokens == 1 && options.speculation.method != Method::Off {
        say("--batch-tokens 1 has no room for guesses: none are made");
    }
    let mut plan = Engine::memory(&file, &options).with_requests(args.request_memory);
    if let Some(small) = &small {
        plan = plan.with_draft(small, &options);
    }
    say(&plan.to_string());
    plan.check(options.context_of(file.spec()))?;
    let text = TextModel::of(&file)?;
    let mut text = text.ok_or_else(|| RunError::NoTokenizer { path: args.file.clone() })?;
    if args.raw {
        text = text.raw();
    }
    let defaults = defaults(file.generation());
    defaults
        .validate()
        .map_err(|e| format!("{}: the file's sampling defaults cannot be used: {e}", args.file.display()))?;
    let progress = upload::progress(file.file_len());
    let mut engine = Engine::open(Arc::new(file), options, progress).map_err(RunError::Open)?;
    draft::give(&mut engine, small, &args.engine, options).map_err(RunError::Open)?;
    if let Some(dir) = &args.cache_dir {
        say(&engine.keep_in(dir.clone()));
    }
    let model = ModelInfo {
        name: args.model_name.clone().unwrap_or_else(|| name_of(&args.file)),
        aliases: args.alias.clone(),
        created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        device: engine.describe(),
        defaults,
    };
    let worker = Worker::start(Box::new(engine), args.max_queue)?;
    let mut state = State::new(worker.handle(), Arc::new(text), model);
    state.priorities = !args.no_priority;
    state.timeout = (!args.timeout.is_zero()).then_some(args.timeout);
    Ok((worker, state))
}

/// The one place where flags become the engine's options.
fn engine_options(args: &ServeArgs, spec: &ModelSpec) -> EngineOptions {
    let options = EngineOptions {
        sequences: args.sequences,
        batch_tokens: args.batch_tokens.unwrap_or(0),
        ..args.engine.options()
    };
    let contexts = CONTEXTS.min(args.sequences).saturating_mul(options.context_of(spec));
    EngineOptions { cache_tokens: args.cache_tokens.unwrap_or(contexts), ..options }
}

/// Whole contexts that the cache has room for where nothing is said.
const CONTEXTS: usize = 4;

fn http_options(args: &ServeArgs) -> Result<HttpOptions, Box<dyn Error>> {
    /// Connections where nothing is said.
    const CONNECTIONS: usize = 1024;
    /// Descriptors for everything else.
    const SPARE: usize = 32;
    let fitting = most_files().map_or(CONNECTIONS, |files| files.saturating_sub(SPARE).clamp(1, CONNECTIONS));
    let mut keys = args.api_key.clone();
    if let Some(path) = &args.api_key_file {
        let text = String::from_utf8(super::read_whole(path)?)
            .map_err(|_| format!("{}: expected text, one key per line", path.display()))?;
        let before = keys.len();
        keys.extend(text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_string));
        if keys.len() == before {
            return Err(format!("{}: expected a key per line, the file has none", path.display()).into());
        }
    }
    if keys.iter().any(|key| key.is_empty() || !key.bytes().all(|b| b.is_ascii_graphic())) {
        return Err(Usage("--api-key: a key is made of visible ASCII characters without spaces".into()).into());
    }
    if let Some(origin) = args.cors.iter().find(|o| *o != "*" && (!o.contains("://") || o.ends_with('/'))) {
        let text = format!("--cors {origin}: expected an origin such as https://chat.example.org (no path), or *");
        return Err(Usage(text).into());
    }
    Ok(HttpOptions {
        gate: Gate { keys, origins: args.cors.clone(), hosts: None },
        max_body: args.max_body,
        request_memory: args.request_memory,
        max_connections: args.max_connections.unwrap_or(fitting),
        client_timeout: args.client_timeout,
        keep_alive: args.keep_alive,
        drain: args.drain_seconds,
    })
}

fn reachable(listener: &Listener) -> bool {
    let Listener::Tcp(tcp) = listener else { return false };
    tcp.local_addr().is_ok_and(|address| match address.ip() {
        IpAddr::V4(ip) => !ip.is_loopback(),
        IpAddr::V6(ip) => !ip.is_loopback(),
    })
}

fn name_of(path: &Path) -> String {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    name.strip_suffix(".qrn").unwrap_or(&name).to_string()
}

/// A time in seconds; also parts of one.
fn seconds(text: &str) -> Result<Duration, String> {
    seconds_or_none(text).and_then(|time| match time.is_zero() {
        true => Err("expected more than 0 seconds".into()),
        false => Ok(time),
    })
}

fn seconds_or_none(text: &str) -> Result<Duration, String> {
    const MOST: f64 = 1e7;
    let seconds = text.parse().ok().filter(|s| (0.0..=MOST).contains(s));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| format!("expected a number of seconds from 0 to {MOST}"))
}
