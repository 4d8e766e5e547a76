//! Parameters that a model writes as text between tags: what the schema says about them.

use serde_json::{Map, Value};

/// How the text of a parameter is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// As it stands.
    Text,
    /// As JSON.
    Json,
    /// As JSON where it is some, else as it stands.
    Either,
}

/// How a parameter of a tool is meant, whose parameters have this schema.
pub(super) fn kind(parameters: &Value, key: &str) -> Kind {
    let Some(schema) = schema(parameters, key) else { return Kind::Either };
    let texts = |values: &Value| values.as_array().is_some_and(|values| values.iter().all(Value::is_string));
    match schema.get("type") {
        Some(Value::String(kind)) if kind == "string" => Kind::Text,
        Some(Value::String(_)) => Kind::Json,
        Some(Value::Array(kinds)) if kinds.iter().all(|kind| kind != "string") => Kind::Json,
        _ if schema.get("enum").is_some_and(texts) || schema.get("const").is_some_and(Value::is_string) => Kind::Text,
        _ => Kind::Either,
    }
}

/// The schema of a parameter, with a reference to the tool's definitions followed.
pub(super) fn schema<'a>(parameters: &'a Value, key: &str) -> Option<&'a Map<String, Value>> {
    /// References to references.
    const MOST: usize = 8;
    let mut schema = &parameters["properties"][key];
    for _ in 0..MOST {
        match schema["$ref"].as_str().and_then(|path| path.strip_prefix('#')) {
            Some(path) => schema = parameters.pointer(path)?,
            None => break,
        }
    }
    schema.as_object()
}

/// The JSON that a text means.
pub(super) fn value(parameters: &Value, key: &str, text: &str) -> String {
    let json = |text: &str| serde_json::from_str::<Value>(text).is_ok().then(|| text.trim().to_string());
    let meant = if kind(parameters, key) == Kind::Text { None } else { json(text) };
    meant.unwrap_or_else(|| Value::from(text).to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn texts_mean_what_the_schema_says() {
        let parameters = json!({
            "properties": {"s": {"type": "string"}, "n": {"$ref": "#/$defs/n"}, "e": {"enum": ["1", "2"]}, "any": {},
                "maybe": {"type": ["integer", "null"]}, "loop": {"$ref": "#/properties/loop"}, "none": {"$ref": "#/x"}},
            "$defs": {"n": {"$ref": "#/$defs/m"}, "m": {"type": "number"}},
        });
        for (key, text, want) in [
            ("s", "12", "\"12\""),
            ("s", "a\"b\n", "\"a\\\"b\\n\""),
            ("n", " 12", "12"),
            ("n", "twelve", "\"twelve\""),
            ("e", "1", "\"1\""),
            ("any", "[1, {}]", "[1, {}]"),
            ("any", "[1", "\"[1\""),
            ("any", "\"a\"", "\"a\""),
            ("maybe", "null", "null"),
            ("loop", "1", "1"),
            ("none", "x", "\"x\""),
            ("unknown", "true", "true"),
        ] {
            assert_eq!(value(&parameters, key, text), want, "{key}: {text}");
        }
    }
}
