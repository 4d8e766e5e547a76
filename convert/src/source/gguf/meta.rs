//! Typed access to metadata: a value that is there has the right type, or is an error that names its key.

use super::{Gguf, Value};
use crate::Malformed;

/// The error for a key that must be there.
pub(super) fn missing(key: &str) -> Malformed {
    Malformed::field(format!("metadata {key}"), "present", "missing")
}

impl<'a> Gguf<'a> {
    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.iter().any(|t| t.name == name)
    }

    /// A whole number, absent or of the right type; an array counts when all its elements are equal.
    pub fn whole(&self, key: &str) -> Result<Option<u64>, Malformed> {
        let one = match self.meta.get(key) {
            None => return Ok(None),
            Some(Value::Numbers(n)) => {
                let mut all = n.iter();
                all.next().filter(|first| all.all(|v| v == *first))
            }
            Some(v) => Some(v.clone()),
        };
        let whole = one.as_ref().and_then(Value::whole).filter(|&n| n <= u32::MAX as u64);
        whole.map(Some).ok_or_else(|| Malformed::field(key, "one whole number below 2^32", self.shown(key)))
    }

    /// A number, absent or of the right type.
    pub fn float(&self, key: &str) -> Result<Option<f64>, Malformed> {
        match self.meta.get(key) {
            None => Ok(None),
            Some(Value::Float(f)) if f.is_finite() => Ok(Some(*f)),
            Some(_) => Err(Malformed::field(key, "a finite float", self.shown(key))),
        }
    }

    /// A flag, absent or of the right type.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, Malformed> {
        match self.meta.get(key) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(_) => Err(Malformed::field(key, "a flag", self.shown(key))),
        }
    }

    /// Text that must be there.
    pub fn text(&self, key: &str) -> Result<&'a str, Malformed> {
        self.optional(key).ok_or_else(|| Malformed::field(key, "text", self.shown(key)))
    }

    /// Text, if it is there.
    pub fn optional(&self, key: &str) -> Option<&'a str> {
        match self.meta.get(key) {
            Some(Value::Text(s)) => Some(s),
            _ => None,
        }
    }

    /// A value for messages.
    pub(crate) fn shown(&self, key: &str) -> String {
        match self.meta.get(key) {
            None => "nothing".into(),
            Some(Value::Texts(v)) => format!("{} texts", v.len()),
            Some(Value::Numbers(v)) => format!("{} numbers", v.len()),
            Some(v) => format!("{v:?}"),
        }
    }
}
