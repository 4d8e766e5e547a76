//! JSON schemas, before `llguidance` sees them: limits, and what it would pass over in silence.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use super::{GrammarError, short};

/// What stands between the parts of JSON: small models write spaces for ever where they may.
const SPACE: &str = r"[ ]{1,2}|\r?\n{1,2}[ \t]{0,32}";

/// Deeper than any schema of people.
const MOST_DEPTH: usize = 64;

/// Each distinct reference is one more level of the compiler's recursion.
const MOST_REFERENCES: usize = 1000;

/// More would be unrolled into the grammar.
const MOST_COUNT: u64 = 4096;

/// Optional properties of one object are alternatives that are followed at the same time.
const MOST_PROPERTIES: usize = 400;

/// Each is compared with each.
const MOST_PATTERNS: usize = 40;

/// Bytes of all regular expressions.
const MOST_EXPRESSIONS: usize = 8 << 10;

/// Keywords of any draft that restrict values and cannot be followed.
#[rustfmt::skip]
const UNSUPPORTED: [&str; 18] = [
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames", "dependencies",
    "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
    "$dynamicRef", "$recursiveRef", "x-guidance", "extends",
];

/// Keywords whose value is an object of schemas by name.
const NAMED: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];

/// Keywords whose value is a schema or a list of them.
const INNER: [&str; 7] = ["items", "prefixItems", "additionalItems", "additionalProperties", "allOf", "anyOf", "oneOf"];

const DRAFTS: [&str; 5] = [
    "https://json-schema.org/draft/2020-12/schema",
    "https://json-schema.org/draft/2019-09/schema",
    "http://json-schema.org/draft-07/schema",
    "http://json-schema.org/draft-06/schema",
    "http://json-schema.org/draft-04/schema",
];

/// The schema as the library should see it.
pub fn prepared(schema: &Value) -> Result<Value, GrammarError> {
    let invalid = |reason: String| GrammarError::Invalid { what: "the JSON schema", reason: super::reason(&reason) };
    depth(schema, 0).map_err(invalid)?;
    let mut object = match schema {
        Value::Bool(true) => Map::new(),
        Value::Object(object) => object.clone(),
        other => return Err(invalid(format!("expected an object, got {}", kind(other)))),
    };
    if let Some(draft) = object.remove("$schema") {
        let name = draft.as_str().unwrap_or_default().trim_end_matches('#');
        if !DRAFTS.contains(&name) {
            return Err(invalid(format!("`$schema` is {draft}, expected one of {}", DRAFTS.join(", "))));
        }
    }
    let schema = Value::Object(object);
    short("the JSON schema", schema.to_string().len(), super::MOST_BYTES)?;
    Check::default().schema(&schema, &mut Vec::new()).map_err(invalid)?;
    let mut schema = stripped(&schema);
    // The library's options travel in the schema; the client's own were refused above.
    schema["x-guidance"] = json!({ "whitespace_pattern": SPACE, "lenient": false });
    Ok(schema)
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

fn depth(value: &Value, level: usize) -> Result<(), String> {
    if level > MOST_DEPTH {
        return Err(format!("it is nested deeper than {MOST_DEPTH} levels"));
    }
    match value {
        Value::Array(items) => items.iter().try_for_each(|v| depth(v, level + 1)),
        Value::Object(fields) => fields.values().try_for_each(|v| depth(v, level + 1)),
        _ => Ok(()),
    }
}

#[derive(Default)]
struct Check<'a> {
    references: HashSet<&'a str>,
    patterns: usize,
    /// Bytes.
    expressions: usize,
    multiples: Vec<f64>,
}

impl<'a> Check<'a> {
    /// Refuses what cannot be followed, in a schema and those inside it.
    fn schema(&mut self, schema: &'a Value, path: &mut Vec<&'a str>) -> Result<(), String> {
        let Value::Object(fields) = schema else { return Ok(()) };
        for (key, value) in fields {
            path.push(key);
            self.keyword(key, value, fields, path)?;
            path.pop();
        }
        Ok(())
    }

    fn keyword(
        &mut self,
        key: &str,
        value: &'a Value,
        fields: &Map<String, Value>,
        path: &mut Vec<&'a str>,
    ) -> Result<(), String> {
        let here = |path: &[&str]| format!("#/{}", path.join("/"));
        if UNSUPPORTED.contains(&key) && !empty(key, value, fields) {
            return Err(format!("`{}` is not supported", here(path)));
        }
        self.count(key, value).map_err(|what| format!("`{}`: {what}", here(path)))?;
        if NAMED.contains(&key) {
            for (name, inner) in value.as_object().into_iter().flatten() {
                path.push(name);
                self.schema(inner, path)?;
                path.pop();
            }
        } else if INNER.contains(&key) {
            match value {
                Value::Array(list) => list.iter().try_for_each(|inner| self.schema(inner, path))?,
                other => self.schema(other, path)?,
            }
        } else if key.starts_with("min") || key.starts_with("max") {
            let most = match key {
                "minItems" | "maxItems" | "minProperties" | "maxProperties" => MOST_COUNT,
                "minLength" | "maxLength" => 1 << 16,
                _ => return Ok(()),
            };
            if value.as_f64().is_some_and(|n| n > most as f64) {
                return Err(format!("`{}` is {value}, at most {most} is supported", here(path)));
            }
        }
        Ok(())
    }

    /// What many places may have together.
    fn count(&mut self, key: &str, value: &'a Value) -> Result<(), String> {
        let names = value.as_object();
        let few = |what: &str, n: usize, most: usize| match n > most {
            true => Err(format!("{n} {what}, at most {most} are supported")),
            false => Ok(()),
        };
        match key {
            "properties" => few("properties of one object", names.map_or(0, Map::len), MOST_PROPERTIES)?,
            "patternProperties" => {
                self.patterns += names.map_or(0, Map::len);
                self.expressions += names.map_or(0, |n| n.keys().map(String::len).sum());
                few("patterns", self.patterns, MOST_PATTERNS)?;
            }
            "pattern" => self.expressions += value.as_str().map_or(0, str::len),
            "$ref" => {
                self.references.extend(value.as_str());
                few("different references", self.references.len(), MOST_REFERENCES)?;
            }
            "multipleOf" => {
                let value = value.as_f64().unwrap_or(f64::NAN).abs();
                if !self.multiples.contains(&value) {
                    self.multiples.push(value);
                }
                if !countable(&self.multiples) {
                    return Err("too large, too many digits, or too many different ones in one schema".into());
                }
            }
            _ => {}
        }
        few("bytes of regular expressions", self.expressions, MOST_EXPRESSIONS)
    }
}

/// Whether numbers with up to 6 digits after the point have a common multiple that the library's 32 bits count.
fn countable(values: &[f64]) -> bool {
    let whole = |scale: f64| values.iter().all(|v| (v * scale - (v * scale).round()).abs() < 1e-9 * v * scale);
    let scale = (0..=6).map(|digits| 10f64.powi(digits)).find(|&scale| whole(scale));
    scale
        .is_some_and(|scale| values.iter().map(|v| v * scale).product::<f64>() < 4e8 && values.iter().all(|&v| v > 0.0))
}

/// Whether an unsupported keyword restricts nothing.
fn empty(key: &str, value: &Value, fields: &Map<String, Value>) -> bool {
    match key {
        "uniqueItems" => value == false,
        "if" => !fields.contains_key("then") && !fields.contains_key("else"),
        "then" | "else" => !fields.contains_key("if"),
        "dependencies" | "dependentRequired" | "dependentSchemas" => *value == json!({}),
        "unevaluatedItems" | "unevaluatedProperties" => value == true,
        _ => false,
    }
}

/// A checked schema without the keywords that restrict nothing, which the library would refuse.
fn stripped(schema: &Value) -> Value {
    let Value::Object(fields) = schema else { return schema.clone() };
    let inner = |(key, value): (&String, &Value)| {
        let value = match value {
            Value::Object(named) if NAMED.contains(&key.as_str()) => {
                named.iter().map(|(name, v)| (name.clone(), stripped(v))).collect()
            }
            Value::Array(list) if INNER.contains(&key.as_str()) => list.iter().map(stripped).collect(),
            value if INNER.contains(&key.as_str()) => stripped(value),
            value => value.clone(),
        };
        (key.clone(), value)
    };
    fields.iter().filter(|(key, _)| !UNSUPPORTED.contains(&key.as_str())).map(inner).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(schema: Value) -> String {
        prepared(&schema).unwrap_err().to_string()
    }

    #[test]
    fn what_cannot_be_followed_is_named_with_its_place() {
        let inner = json!({"type": "object", "properties": {"a": {"type": "array", "items": {"not": {}}}}});
        assert!(refused(inner).contains("`#/properties/a/items/not`"));
        assert!(refused(json!({"$defs": {"x": {"uniqueItems": true}}})).contains("`#/$defs/x/uniqueItems`"));
        assert!(refused(json!({"anyOf": [{"propertyNames": {}}]})).contains("propertyNames"));
        assert!(refused(json!({"x-guidance": {"lenient": true}})).contains("x-guidance"));
        assert!(refused(json!({"$schema": "http://json-schema.org/draft-03/schema#"})).contains("draft-03"));
        assert!(refused(json!({"minItems": 1e9})).contains("at most 4096"));
        assert!(refused(json!([1])).contains("an array"));
        assert!(refused(json!(false)).contains("a boolean"));
    }

    #[test]
    fn keywords_that_say_nothing_are_left_out_and_names_are_no_keywords() {
        let schema = json!({
            "$schema": "http://json-schema.org/draft-07/schema#", "uniqueItems": false, "if": {},
            "properties": {"not": {"type": "string"}, "if": {"uniqueItems": false}}, "enum": [{"not": 1}],
        });
        let mut expected = json!({"properties": {"not": {"type": "string"}, "if": {}}, "enum": [{"not": 1}]});
        let got = prepared(&schema).unwrap();
        expected["x-guidance"] = got["x-guidance"].clone();
        assert_eq!(got, expected);
    }

    #[test]
    fn size_depth_and_references_are_limited() {
        let deep = (0..MOST_DEPTH).fold(json!({}), |inner, _| json!({ "items": inner }));
        assert!(prepared(&deep).is_ok());
        assert!(refused(json!({ "items": deep })).contains("deeper than 64"));
        let names: Vec<Value> = (0..1001).map(|i| json!({ "$ref": format!("#/{i}") })).collect();
        assert!(refused(json!({ "anyOf": names })).contains("1001 different references"));
        let many = |n: usize| (0..n).map(|i| (format!("p{i}"), json!({}))).collect::<Map<String, Value>>();
        assert!(prepared(&json!({ "properties": many(400) })).is_ok());
        assert!(refused(json!({ "properties": many(401) })).contains("401 properties"));
        assert!(refused(json!({ "patternProperties": many(41) })).contains("41 patterns"));
        assert!(refused(json!({ "pattern": "a?".repeat(5000) })).contains("10000 bytes"));
    }

    #[test]
    fn multiples_are_counted_exactly_or_not_at_all() {
        assert!(countable(&[0.01, 0.5, 100.0]) && countable(&[7.0]) && countable(&[0.000001]));
        assert!(!countable(&[999_999_937.0]) && !countable(&[1e-300]) && !countable(&[0.0]) && !countable(&[f64::NAN]));
        assert!(!countable(&[99_991.0, 99_989.0]) && !countable(&[std::f64::consts::PI]));
        let long = "x".repeat(super::super::MOST_BYTES);
        assert!(refused(json!({ "title": long })).contains("bytes, at most"));
    }
}
