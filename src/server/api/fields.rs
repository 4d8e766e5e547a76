//! The fields of a JSON request, one by one: typed, in range, or an error that names field, expected and got.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::server::ApiError;

/// An object of a request; `null` is as good as absent.
#[derive(Debug, Clone, Copy)]
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Where it stands in the request: empty, or `response_format.`
    at: &'a str,
}

impl<'a> Fields<'a> {
    /// The request itself.
    pub fn new(map: &'a Map<String, Value>) -> Fields<'a> {
        Fields { map, at: "" }
    }

    /// An object inside it; `at` ends in a dot.
    pub fn inside(map: &'a Map<String, Value>, at: &'a str) -> Fields<'a> {
        Fields { map, at }
    }

    /// The name that errors give to a field.
    pub fn path(&self, name: &str) -> String {
        format!("{}{name}", self.at)
    }

    /// A field of any type.
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|v| !v.is_null())
    }

    /// The first of several names that is given.
    pub fn any(&self, names: &[&'static str]) -> Option<&'static str> {
        names.iter().copied().find(|name| self.get(name).is_some())
    }

    /// A field of the wrong type or out of range.
    pub fn wrong(&self, name: &str, expected: &str) -> ApiError {
        wrong(&self.path(name), self.get(name).unwrap_or(&Value::Null), expected)
    }

    /// `true` or `false`.
    pub fn boolean(&self, name: &str) -> Result<Option<bool>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.wrong(name, "true or false"))
    }

    /// A number.
    pub fn number(&self, name: &str) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let number = value.as_f64().map(|x| x as f32).filter(|x| x.is_finite());
        number.map(Some).ok_or_else(|| self.wrong(name, "a number"))
    }

    /// A whole number within a range; `8.0` is one.
    pub fn integer(&self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let whole = integer(value).filter(|n| range.contains(n));
        whole.map(Some).ok_or_else(|| self.wrong(name, &whole_number(&range)))
    }

    /// A text.
    pub fn text(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong(name, "a string"))
    }

    /// An object.
    pub fn object(&self, name: &str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_object().map(Some).ok_or_else(|| self.wrong(name, "an object"))
    }

    /// A list.
    pub fn list(&self, name: &str) -> Result<Option<&'a Vec<Value>>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_array().map(Some).ok_or_else(|| self.wrong(name, "a list"))
    }
}

/// The whole number that a value is.
pub fn integer(value: &Value) -> Option<i64> {
    // Floats are whole numbers only where they can tell them apart.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    let float = || value.as_f64().filter(|x| x.fract() == 0.0 && x.abs() <= EXACT).map(|x| x as i64);
    // Seeds may use all 64 bits.
    value.as_i64().or_else(|| value.as_u64().map(|n| n as i64)).or_else(float)
}

/// A value that is not what it must be.
pub fn wrong(path: &str, got: &Value, expected: &str) -> ApiError {
    ApiError::invalid(format!("{path} is {}, expected {expected}", short(got))).at(path)
}

/// A value in a message: never longer than a line.
pub fn short(value: &Value) -> String {
    const MOST: usize = 60;
    // Printing a long list only to cut it off would be work for nothing.
    let text = match value {
        Value::Array(list) if list.len() > 8 => return format!("a list of {} entries", list.len()),
        Value::Object(map) if map.len() > 8 => return format!("an object of {} fields", map.len()),
        Value::String(text) if text.len() > 4 * MOST => return format!("a string of {} bytes", text.len()),
        value => value.to_string(),
    };
    match text.char_indices().nth(MOST) {
        None => text,
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}

fn whole_number(range: &RangeInclusive<i64>) -> String {
    match (*range.start(), *range.end()) {
        (i64::MIN, i64::MAX) => "a whole number".into(),
        (from, i64::MAX) => format!("a whole number of at least {from}"),
        (from, to) => format!("a whole number from {from} to {to}"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_are_typed_and_errors_name_them() {
        let value = json!({"t": 0.5, "n": 3.0, "s": "x", "b": true, "null": null, "big": u64::MAX, "half": 1.5});
        let map = value.as_object().unwrap();
        let f = Fields::new(map);
        assert_eq!(f.number("t"), Ok(Some(0.5)));
        assert_eq!(f.integer("n", 1..=5), Ok(Some(3)));
        assert_eq!(f.integer("big", i64::MIN..=i64::MAX), Ok(Some(-1)));
        assert_eq!(
            (f.text("s"), f.boolean("b"), f.text("null"), f.text("none")),
            (Ok(Some("x")), Ok(Some(true)), Ok(None), Ok(None))
        );
        let error = f.integer("n", 4..=5).unwrap_err();
        assert_eq!((error.status, error.param.as_deref()), (400, Some("n")));
        assert_eq!(error.message, "n is 3.0, expected a whole number from 4 to 5");
        assert_eq!(
            f.integer("half", 0..=i64::MAX).unwrap_err().message,
            "half is 1.5, expected a whole number of at least 0"
        );
        assert_eq!(Fields::inside(map, "x.").text("b").unwrap_err().param.as_deref(), Some("x.b"));
        assert_eq!(f.any(&["u", "s", "t"]), Some("s"));
    }

    #[test]
    fn long_values_are_not_repeated() {
        assert_eq!(short(&json!(vec![0; 100])), "a list of 100 entries");
        assert!(short(&json!("é".repeat(100))).len() < 200);
        assert_eq!(short(&json!("x".repeat(1000))), "a string of 1000 bytes");
        assert!(short(&json!({"a": "x".repeat(1000)})).len() < 100);
    }
}
