//! What templates expect of Python: `tojson` as `json.dumps` writes it, methods, exceptions.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value as Jinja};
use minijinja_contrib::pycompat;
use serde_json::{Map, Value};

/// Adds the functions, filters and methods of this module.
pub(super) fn install(environment: &mut Environment<'static>) {
    environment.add_function("raise_exception", |message: String| -> Result<Jinja, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Refusal(message)))
    });
    environment.add_filter("tojson", to_json);
    environment.set_unknown_method_callback(method);
    environment.set_formatter(|out, state, value| {
        if deeper(value, MAX_SHOWN) {
            let message = format!("a value is nested more than {MAX_SHOWN} deep");
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
        minijinja::escape_formatter(out, state, value)
    });
}

/// Deepest nesting of a value that is shown; loops can nest one millions deep.
const MAX_SHOWN: usize = 1000;

fn deeper(value: &Jinja, most: usize) -> bool {
    let deeper = |item: &Jinja| most == 0 || deeper(item, most - 1);
    match value.kind() {
        ValueKind::Seq => value.try_iter().is_ok_and(|mut items| items.any(|item| deeper(&item))),
        ValueKind::Map => {
            value.try_iter().is_ok_and(|mut keys| keys.any(|key| value.get_item(&key).is_ok_and(|item| deeper(&item))))
        }
        _ => false,
    }
}

/// A template value made from JSON.
pub(super) fn value(json: &Value) -> Jinja {
    match json {
        Value::Null => Jinja::from(()),
        Value::Bool(b) => Jinja::from(*b),
        Value::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(integer), _) => Jinja::from(integer),
            (_, Some(integer)) => Jinja::from(integer),
            _ => Jinja::from(n.as_f64().unwrap_or(f64::NAN)),
        },
        Value::String(s) => Jinja::from(s.as_str()),
        Value::Array(items) => items.iter().map(value).collect(),
        Value::Object(fields) => object(fields),
    }
}

/// A template value made from the fields of a JSON object, in their order.
pub(super) fn object(fields: &Map<String, Value>) -> Jinja {
    Jinja::from_pairs(fields.iter().map(|(name, field)| (name.as_str(), value(field))))
}

/// What the template said when it called `raise_exception`, if that is what went wrong.
pub(super) fn refusal(error: &Error) -> Option<String> {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = source {
        if let Some(Refusal(message)) = error.downcast_ref() {
            return Some(message.clone());
        }
        source = error.source();
    }
    None
}

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(String);

/// The methods of Python's strings, dicts and lists: minijinja's own set and a few more.
fn method(state: &mut State, value: &Jinja, name: &str, args: &[Jinja]) -> Result<Jinja, Error> {
    if let Some(text) = value.as_str()
        && let Some(result) = string_method(text, name, args)
    {
        return result;
    }
    match (value.kind(), name) {
        (ValueKind::Map | ValueKind::Seq, "copy") => Ok(value.clone()),
        (ValueKind::Map, "update" | "pop" | "popitem" | "clear" | "setdefault")
        | (ValueKind::Seq, "append" | "extend" | "insert" | "pop" | "remove" | "clear" | "sort" | "reverse") => {
            // transformers renders in Jinja's immutable sandbox, which forbids these, too.
            let message = format!("`{name}` changes a value, which chat templates may not");
            Err(Error::new(ErrorKind::InvalidOperation, message))
        }
        _ => pycompat::unknown_method_callback(state, value, name, args),
    }
}

fn string_method(text: &str, name: &str, args: &[Jinja]) -> Option<Result<Jinja, Error>> {
    let with = |f: &dyn Fn(&str) -> Jinja| from_args::<(&str,)>(args).map(|(arg,)| f(arg));
    let three = |parts: [&str; 3]| parts.into_iter().map(Jinja::from).collect::<Jinja>();
    let result = match name {
        "removeprefix" => with(&|prefix| text.strip_prefix(prefix).unwrap_or(text).into()),
        "removesuffix" => with(&|suffix| text.strip_suffix(suffix).unwrap_or(text).into()),
        "partition" => with(&|at| match text.split_once(at) {
            Some((before, after)) => three([before, at, after]),
            None => three([text, "", ""]),
        }),
        "rpartition" => with(&|at| match text.rsplit_once(at) {
            Some((before, after)) => three([before, at, after]),
            None => three(["", "", text]),
        }),
        "rsplit" => from_args::<(Option<&str>, Option<i64>)>(args).map(|(separator, limit)| {
            let limit = limit.and_then(|n| usize::try_from(n).ok()).map_or(usize::MAX, |n| n.saturating_add(1));
            let mut parts: Vec<&str> = match separator {
                Some(separator) => text.rsplitn(limit, separator).collect(),
                None => rsplit_whitespace(text, limit),
            };
            parts.reverse();
            parts.into_iter().map(Jinja::from).collect()
        }),
        "zfill" => from_args::<(usize,)>(args).map(|(width,)| {
            let (sign, digits) = text.split_at(usize::from(text.starts_with(['-', '+'])));
            let missing = width.min(1000).saturating_sub(text.chars().count());
            Jinja::from(format!("{sign}{}{digits}", "0".repeat(missing)))
        }),
        _ => return None,
    };
    Some(result)
}

/// `str.rsplit()` of Python: runs of whitespace, at most `limit` parts, the last part first.
fn rsplit_whitespace(text: &str, limit: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text.trim_end();
    while !rest.is_empty() && parts.len() + 1 < limit {
        let word = rest.rsplit(char::is_whitespace).next().unwrap_or(rest);
        parts.push(word);
        rest = rest[..rest.len() - word.len()].trim_end();
    }
    if !rest.is_empty() {
        parts.push(rest);
    }
    parts
}

/// `json.dumps(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
fn to_json(value: &Jinja, kwargs: Kwargs) -> Result<Jinja, Error> {
    let indent = kwargs.get::<Option<Jinja>>("indent")?.filter(|indent| !indent.is_none());
    let indent = match indent {
        None => None,
        Some(indent) => Some(match (indent.as_str(), indent.as_i64()) {
            (Some(text), _) => text.to_string(),
            (None, Some(spaces)) => " ".repeat(spaces.clamp(0, 100) as usize),
            (None, None) => {
                let message = format!("tojson's indent is {indent}, expected a number or a string");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        }),
    };
    let separators = kwargs.get::<Option<Vec<String>>>("separators")?;
    let (item, key) = match separators.as_deref() {
        None => (if indent.is_some() { "," } else { ", " }, ": "),
        Some([item, key]) => (item.as_str(), key.as_str()),
        Some(_) => {
            let message = "tojson's separators are two strings: between items, and after a key";
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
    };
    let mut json = Json {
        out: String::new(),
        indent,
        item: item.to_string(),
        key: key.to_string(),
        ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        depth: 0,
    };
    kwargs.assert_all_used()?;
    json.write(value)?;
    Ok(Jinja::from(json.out))
}

/// Python's JSON writer.
struct Json {
    out: String,
    indent: Option<String>,
    item: String,
    key: String,
    ascii: bool,
    sort: bool,
    depth: usize,
}

/// Deepest nesting that is written as JSON; serde_json reads up to 128.
const MAX_DEPTH: usize = 128;

impl Json {
    fn write(&mut self, value: &Jinja) -> Result<(), Error> {
        if self.depth > MAX_DEPTH {
            let message = format!("a value is nested more than {MAX_DEPTH} deep");
            return Err(Error::new(ErrorKind::BadSerialization, message));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Jinja> = value.try_iter()?.collect();
                self.container('[', ']', items, |json, item| json.write(&item))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Jinja> = value.try_iter()?.collect();
                if self.sort {
                    keys.sort();
                }
                self.container('{', '}', keys, |json, key| {
                    let item = value.get_item(&key)?;
                    match key.kind() {
                        ValueKind::None => json.string("null"),
                        ValueKind::Bool => json.string(if key.is_true() { "true" } else { "false" }),
                        ValueKind::Number => json.string(&number(&key)),
                        _ => json.string(key.as_str().unwrap_or_default()),
                    }
                    json.out.push_str(&json.key.clone());
                    json.write(&item)
                })?;
            }
            kind => {
                let message = format!("a value of type {kind} cannot be written as JSON");
                return Err(Error::new(ErrorKind::BadSerialization, message));
            }
        }
        Ok(())
    }

    fn container(
        &mut self,
        open: char,
        close: char,
        items: Vec<Jinja>,
        mut write: impl FnMut(&mut Json, Jinja) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        let filled = !items.is_empty();
        self.depth += 1;
        for (index, item) in items.into_iter().enumerate() {
            if index > 0 {
                self.out.push_str(&self.item.clone());
            }
            self.line();
            write(self, item)?;
        }
        self.depth -= 1;
        if filled {
            self.line();
        }
        self.out.push(close);
        Ok(())
    }

    fn line(&mut self) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            self.out.push_str(&indent.repeat(self.depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.out, "\\u{unit:04x}"); // a String never fails
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// A number as Python's `repr` and `json.dumps` write it.
fn number(value: &Jinja) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(float) = f64::try_from(value.clone()) else { return value.to_string() };
    if float.is_nan() {
        return "NaN".to_string();
    }
    if float.is_infinite() {
        return if float > 0.0 { "Infinity" } else { "-Infinity" }.to_string();
    }
    // Rust's `{:e}` has the shortest digits that read back the same, as Python's repr has.
    let scientific = format!("{float:e}");
    let (digits, exponent) = scientific.split_once('e').expect("{:e} writes an e");
    let exponent: i32 = exponent.parse().expect("{:e} writes an integer after the e");
    if float != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = float.to_string();
    if plain.contains('.') { plain } else { plain + ".0" }
}
