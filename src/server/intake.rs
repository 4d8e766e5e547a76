//! Memory for requests that are not understood yet: bodies being received, waiting for their turn, or being read.
//!
//! All connections share one budget. A request takes of it as its bytes come, so a promise costs nothing, and gives
//! everything back when it has become tokens (or is refused).

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use super::ApiError;

/// The budget.
#[derive(Debug)]
pub struct Intake {
    most: u64,
    held: AtomicU64,
}

impl Intake {
    /// Room for so many bytes.
    pub fn new(most: u64) -> Arc<Intake> {
        Arc::new(Intake { most, held: AtomicU64::new(0) })
    }

    /// Bytes that are taken.
    pub fn held(&self) -> u64 {
        self.held.load(Ordering::Acquire)
    }

    /// A request that has taken nothing yet.
    pub fn share(self: &Arc<Intake>) -> Share {
        Share { intake: Some(self.clone()), bytes: 0 }
    }

    /// Whether so many bytes could be taken beside those, and how to refuse if not.
    fn check(&self, bytes: u64, held: u64) -> Result<(), ApiError> {
        let most = self.most;
        if bytes > most {
            let message = format!(
                "reading the request takes {bytes} bytes of memory, at most {most} are there for all requests \
                 (--request-memory); send less at once"
            );
            return Err(ApiError {
                code: Some("request_too_large"),
                ..ApiError::new(413, "invalid_request_error", message)
            });
        }
        if held.saturating_add(bytes) > most {
            let message = format!(
                "requests that are being received or read hold {held} of {most} bytes (--request-memory), and this one \
                 needs {bytes}; try again later"
            );
            return Err(ApiError { retry_after: Some(1), ..ApiError::new(503, "overloaded_error", message) });
        }
        Ok(())
    }
}

/// A request's part of the budget, given back when it is dropped. The default has no budget to keep to.
#[derive(Debug, Default)]
pub struct Share {
    intake: Option<Arc<Intake>>,
    bytes: u64,
}

impl Share {
    /// Whether a body of so many bytes has room now.
    pub fn check(&self, bytes: u64) -> Result<(), ApiError> {
        self.intake.as_ref().map_or(Ok(()), |intake| intake.check(bytes, intake.held() - self.bytes))
    }

    /// Takes what is missing to `bytes` in all.
    pub fn grow(&mut self, bytes: u64) -> Result<(), ApiError> {
        let Some(intake) = &self.intake else { return Ok(()) };
        let more = bytes.saturating_sub(self.bytes);
        if more == 0 {
            return Ok(());
        }
        let own = self.bytes;
        let taken = intake.held.fetch_update(Ordering::AcqRel, Ordering::Acquire, |held| {
            intake.check(bytes, held - own).is_ok().then(|| held + more)
        });
        match taken {
            Ok(_) => self.bytes += more,
            Err(held) => intake.check(bytes, held - own)?,
        }
        Ok(())
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if let Some(intake) = &self.intake {
            intake.held.fetch_sub(self.bytes, Ordering::AcqRel);
        }
    }
}

/// Bytes that a JSON text may take while it is read: the text, the same in values, and a copy for the template.
pub fn reading(json: &[u8]) -> u64 {
    let (mut values, mut string, mut escape) = (1, false, false);
    for &byte in json {
        match byte {
            _ if escape => escape = false,
            b'\\' if string => escape = true,
            b'"' => string = !string,
            b',' | b'[' | b'{' if !string => values += 1,
            _ => {}
        }
    }
    2 * json.len() as u64 + values * size_of::<serde_json::Value>() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_taken_and_given_back() {
        let intake = Intake::new(100);
        let (mut one, mut other) = (intake.share(), intake.share());
        one.grow(60).unwrap();
        one.grow(10).unwrap();
        assert_eq!(intake.held(), 60);
        let error = other.grow(41).unwrap_err();
        assert_eq!((error.status, error.retry_after), (503, Some(1)));
        assert!(error.message.contains("60 of 100") && error.message.contains("needs 41"), "{}", error.message);
        other.grow(40).unwrap();
        assert_eq!(one.grow(61).unwrap_err().status, 503, "the other has the rest");
        drop(other);
        one.grow(100).unwrap();
        assert_eq!(one.grow(101).unwrap_err().status, 413, "never fits");
        assert_eq!(intake.share().check(1).unwrap_err().status, 503);
        drop(one);
        assert_eq!(intake.held(), 0);
        assert_eq!(intake.share().check(100), Ok(()));
        assert_eq!(Share::default().grow(u64::MAX), Ok(()));
    }

    #[test]
    fn values_cost_more_than_their_text() {
        let value = size_of::<serde_json::Value>() as u64;
        assert_eq!(reading(b"{\"a\":[1,2,3]}"), 26 + 5 * value);
        assert_eq!(reading(br#"["[[,,\"{{"]"#), 24 + 2 * value, "what stands in strings is text");
    }
}
