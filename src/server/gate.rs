//! Who may ask: keys, origins of web pages, names of requests.
//!
//! Where no key is needed, a browser on this machine can be made to ask by any page that it shows: by a plain POST whose
//! answer the page cannot read, or, where the page's own name is pointed at this machine (DNS rebinding), as if the
//! page were this server's. The first has a foreign `Origin`, the second a foreign `Host`.

use std::{
    hash::{BuildHasher, RandomState},
    net::IpAddr,
    sync::atomic::{AtomicU64, Ordering},
};

use hyper::{
    HeaderMap, Method,
    header::{AUTHORIZATION, HOST, HeaderName, HeaderValue, ORIGIN},
};

use super::ApiError;
use crate::text::printable;

/// What needs no key: signs of life and load, which routers and dashboards read, and the page that asks for the key.
const OPEN: [&str; 4] = ["/", "/health", "/metrics", "/version"];

/// Keys and origins that were configured.
#[derive(Debug, Clone, Default)]
pub struct Gate {
    /// Any of these; none: everybody may ask.
    pub keys: Vec<String>,
    /// Origins of pages that may ask, or `*`; none: pages of this server only.
    pub origins: Vec<String>,
    /// Names of this server beside addresses and `localhost`, or `*`; `None`: any, where other machines may connect or
    /// no browser can.
    pub hosts: Option<Vec<String>>,
}

impl Gate {
    /// Refuses a request without a key that it needs.
    pub fn key(&self, path: &str, headers: &HeaderMap) -> Result<(), ApiError> {
        if self.keys.is_empty() || OPEN.contains(&path) {
            return Ok(());
        }
        let given = headers.get(AUTHORIZATION).map(HeaderValue::as_bytes);
        let token = given.and_then(|bytes| match bytes.split_at_checked(7) {
            Some((scheme, token)) if scheme.eq_ignore_ascii_case(b"bearer ") => Some(token.trim_ascii()),
            _ => None,
        });
        let known = |token: &[u8]| self.keys.iter().fold(false, |known, key| known | equal(key.as_bytes(), token));
        match token {
            Some(token) if known(token) => Ok(()),
            Some(_) => Err(unauthorized("the API key in the Authorization header is not one of this server's")),
            None => Err(unauthorized("this server needs an API key: send `Authorization: Bearer KEY`")),
        }
    }

    /// The origin of the page that asks, if it may read the answer.
    pub fn origin(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let origin = headers.get(ORIGIN)?;
        if self.origins.iter().any(|allowed| allowed == "*") {
            return Some(HeaderValue::from_static("*"));
        }
        self.origins.iter().any(|allowed| allowed.as_bytes() == origin.as_bytes()).then(|| origin.clone())
    }

    /// Refuses work for a foreign page: browsers send such requests although the page may not read the answer.
    pub fn page(&self, method: &Method, headers: &HeaderMap) -> Result<(), ApiError> {
        if self.keys.is_empty() {
            self.host(headers)?;
            let foreign = |origin: &&HeaderValue| self.origin(headers).is_none() && !own(origin, headers);
            if let Some(origin) = headers.get(ORIGIN).filter(foreign) {
                let origin = String::from_utf8_lossy(origin.as_bytes());
                return Err(forbidden(format!(
                    "a page of {} may not use this server; allow its origin with --cors",
                    printable(&origin)
                )));
            }
        }
        let foreign = headers.get("sec-fetch-site").is_some_and(|site| site == "cross-site");
        if !foreign || method != Method::POST || self.origin(headers).is_some() {
            return Ok(());
        }
        Err(forbidden("a page of another site may not use this server; allow its origin with --cors".into()))
    }

    /// Refuses a name that anybody may have pointed here. An address is nobody's name.
    fn host(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let (Some(hosts), Some(host)) = (&self.hosts, headers.get(HOST)) else { return Ok(()) };
        let host = String::from_utf8_lossy(host.as_bytes()).to_ascii_lowercase();
        let name = match host.strip_prefix('[') {
            Some(rest) => rest.split(']').next().unwrap_or_default(),
            None => host.split(':').next().unwrap_or_default().trim_end_matches('.'),
        };
        let ours = name == "localhost" || name.ends_with(".localhost") || name.parse::<IpAddr>().is_ok();
        if ours || hosts.iter().any(|known| known == "*" || known.eq_ignore_ascii_case(name)) {
            return Ok(());
        }
        let name = printable(name);
        Err(forbidden(format!("{name} is no name of this server; if it is one, give it with --allow-host {name}")))
    }
}

/// Whether an origin is the server's own, under the name by which the client (or the proxy's client) knows it.
fn own(origin: &HeaderValue, headers: &HeaderMap) -> bool {
    let origin = origin.as_bytes();
    let Some(at) = origin.windows(3).position(|three| three == b"://") else { return false };
    let same = |name: &HeaderValue| name.as_bytes().eq_ignore_ascii_case(&origin[at + 3..]);
    headers.get(HOST).is_some_and(same) || headers.get("x-forwarded-host").is_some_and(same)
}

fn forbidden(message: String) -> ApiError {
    ApiError::new(403, "permission_error", message)
}

/// Headers that let a page read an answer.
pub fn cors(headers: &mut HeaderMap, origin: HeaderValue) {
    headers.insert("access-control-allow-origin", origin);
    headers.insert("access-control-expose-headers", HeaderValue::from_static("x-request-id, retry-after"));
    headers.append("vary", HeaderValue::from_static("origin"));
}

/// Headers that answer a page's question whether it may ask.
pub fn preflight(asked: &HeaderMap, headers: &mut HeaderMap) {
    let given = asked.get("access-control-request-headers");
    let allowed = given.cloned().unwrap_or_else(|| HeaderValue::from_static("authorization, content-type"));
    headers.insert("access-control-allow-methods", HeaderValue::from_static("GET, POST, OPTIONS"));
    headers.insert("access-control-allow-headers", allowed);
    headers.insert("access-control-max-age", HeaderValue::from_static("600"));
}

/// Takes as long for any two texts of the same lengths.
fn equal(key: &[u8], given: &[u8]) -> bool {
    let differs = (0..given.len()).fold(0, |differs, i| differs | given[i] ^ key[i % key.len().max(1)]);
    std::hint::black_box(differs) == 0 && key.len() == given.len()
}

fn unauthorized(message: &str) -> ApiError {
    ApiError { code: Some("invalid_api_key"), ..ApiError::new(401, "authentication_error", message) }
}

/// The header with a request's name.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The client's name for a request if it can stand in logs and headers, or a fresh one.
pub fn request_id(headers: &HeaderMap) -> String {
    const MOST: usize = 128;
    let sane = |c: &u8| c.is_ascii_alphanumeric() || b"-_.:/+=@".contains(c);
    let given = headers.get(REQUEST_ID).map(HeaderValue::as_bytes);
    match given.filter(|id| (1..=MOST).contains(&id.len()) && id.iter().all(sane)) {
        Some(id) => String::from_utf8_lossy(id).into_owned(),
        None => fresh_id(),
    }
}

fn fresh_id() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    static KEY: std::sync::OnceLock<RandomState> = std::sync::OnceLock::new();
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{:016x}", KEY.get_or_init(RandomState::new).hash_one(count))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let value = |text: &str| HeaderValue::from_str(text).expect("a header's value");
        pairs.iter().map(|(name, text)| (HeaderName::from_static(name), value(text))).collect()
    }

    #[test]
    fn keys_are_compared_whole() {
        let gate = Gate { keys: vec!["alpha".into(), "be".into()], ..Gate::default() };
        let status = |path: &str, value: &str| {
            gate.key(path, &headers(&[("authorization", value)])).map_err(|error| error.status)
        };
        for good in ["Bearer alpha", "bearer be", "BEARER  alpha "] {
            assert_eq!(status("/v1/models", good), Ok(()), "{good}");
        }
        for bad in ["Bearer alph", "Bearer alphaa", "Bearer bebe", "Bearer ", "Bearer", "alpha", "Basic alpha", ""] {
            assert_eq!(status("/v1/models", bad), Err(401), "{bad}");
        }
        assert_eq!(status("/health", "x"), Ok(()));
        assert_eq!(status("/healthy", "x"), Err(401));
        assert_eq!(gate.key("/tokenize", &HeaderMap::new()).map_err(|e| e.status), Err(401));
        assert_eq!(Gate::default().key("/tokenize", &HeaderMap::new()), Ok(()));
    }

    #[test]
    fn pages_are_let_in_by_origin() {
        let gate = Gate { origins: vec!["https://a.example".into()], ..Gate::default() };
        let page = |origin, site| headers(&[("origin", origin), ("sec-fetch-site", site)]);
        let (ours, foreign) = (page("https://a.example", "cross-site"), page("https://b.example", "cross-site"));
        assert_eq!(gate.origin(&ours), Some(HeaderValue::from_static("https://a.example")));
        assert_eq!(gate.origin(&foreign), None);
        assert_eq!(gate.page(&Method::POST, &ours), Ok(()));
        assert_eq!(gate.page(&Method::POST, &foreign).map_err(|e| e.status), Err(403));
        assert_eq!(gate.page(&Method::GET, &foreign).map_err(|e| e.status), Err(403));
        let keyed = Gate { keys: vec!["k".into()], ..gate.clone() };
        assert_eq!(keyed.page(&Method::GET, &foreign), Ok(()), "the page knows no key");
        assert_eq!(keyed.page(&Method::POST, &foreign).map_err(|e| e.status), Err(403));
        assert_eq!(gate.page(&Method::POST, &HeaderMap::new()), Ok(()));
        let any = Gate { origins: vec!["*".into()], ..gate };
        assert_eq!(any.origin(&foreign), Some(HeaderValue::from_static("*")));
    }

    #[test]
    fn pages_of_other_ports_and_other_names_are_foreign() {
        let gate = Gate { hosts: Some(vec!["box".into()]), ..Gate::default() };
        let status = |gate: &Gate, pairs: &[(&'static str, &str)]| {
            gate.page(&Method::POST, &headers(pairs)).map_err(|error| error.status)
        };
        for host in
            ["localhost", "LOCALHOST:8080", "a.localhost", "127.0.0.1:8080", "[::1]:8080", "192.168.1.7", "Box:1"]
        {
            let own = format!("http://{host}");
            assert_eq!(status(&gate, &[("host", host)]), Ok(()), "{host}");
            assert_eq!(status(&gate, &[("host", host), ("origin", &own)]), Ok(()), "{host}");
            for origin in ["http://localhost:3000", "https://b.example", "null", "", "://", "http://"] {
                assert_eq!(status(&gate, &[("host", host), ("origin", origin)]), Err(403), "{host} {origin}");
            }
        }
        for host in
            ["b.example", "b.example:8080", "127.0.0.1.b.example", "localhost.b.example", "xlocalhost", "[b]:1", ""]
        {
            let own = format!("http://{host}");
            assert_eq!(status(&gate, &[("host", host), ("origin", &own)]), Err(403), "{host}");
        }
        // Without a name it is no browser; where others may connect, any name may be right.
        assert_eq!(status(&gate, &[]), Ok(()));
        assert_eq!(status(&Gate::default(), &[("host", "b.example"), ("origin", "http://b.example")]), Ok(()));
        assert_eq!(status(&Gate { hosts: Some(vec!["*".into()]), ..gate.clone() }, &[("host", "b.example")]), Ok(()));
        // A proxy that has a name of its own says which one was asked.
        let proxied = [("host", "box"), ("x-forwarded-host", "c.example"), ("origin", "https://c.example")];
        assert_eq!(status(&gate, &proxied), Ok(()));
    }

    #[test]
    fn only_harmless_names_are_taken_over() {
        assert_eq!(request_id(&headers(&[("x-request-id", "a-1_B.c:2")])), "a-1_B.c:2");
        for bad in ["", "a b", "ü", "a\"b", &"x".repeat(129)] {
            let id = request_id(&headers(&[("x-request-id", bad)]));
            assert!(id.len() == 16 && id != bad, "{bad}");
        }
        assert_ne!(request_id(&HeaderMap::new()), request_id(&HeaderMap::new()));
    }
}
