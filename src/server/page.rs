//! The page at `/`: a chat in one file, embedded in the program.

use bytes::Bytes;

use super::Reply;

const PAGE: &str = include_str!("page.html");

/// It loads nothing, talks to its own server only, and nobody may frame it. Script and style are in the file; text of
/// the model never becomes markup.
const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The page.
pub fn page() -> Reply {
    Reply::Whole {
        status: 200,
        content_type: "text/html; charset=utf-8",
        headers: vec![
            ("content-security-policy", POLICY.into()),
            ("x-content-type-options", "nosniff".into()),
            ("referrer-policy", "no-referrer".into()),
            ("cache-control", "no-cache".into()),
        ],
        body: Bytes::from_static(PAGE.as_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_small_and_needs_no_network() {
        assert!(PAGE.len() < 25_000, "{}", PAGE.len());
        for forbidden in
            ["http://", "https://", "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("]
        {
            assert!(!PAGE.contains(forbidden), "{forbidden}");
        }
    }
}
