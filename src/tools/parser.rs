//! Calls in what a model writes, as it writes it. All parts together are the same however the text is cut into pieces.
//!
//! A call is told as soon as its tool is certain, and its arguments as they come. Read are, whatever the family's own
//! way is: `{"name": ..., "arguments": {...}}` (also `parameters`), alone or in a list; `name[ARGS]{...}`; and
//! `<function=name>` with JSON or with `<parameter=key>value</parameter>`.

use std::sync::Arc;

use serde_json::Value;

use super::{
    Style, Tool,
    parameter::{self, Kind},
};

/// What is in an answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Part {
    /// Text for the reader.
    Content(String),
    /// A call begins.
    Call {
        /// Which one of the answer, from 0.
        index: usize,
        /// `call_` and 24 letters and digits, unlike every other.
        id: String,
        /// The tool.
        name: String,
    },
    /// More of the arguments of a call; all of them together are JSON, unless the answer was cut off.
    Arguments {
        /// Of which call.
        index: usize,
        /// As the model wrote it.
        text: String,
    },
}

/// Finds calls in the text of one answer. What looks like a call and is none (cut off before its tool is known, no
/// JSON, or of a tool that does not exist) is text, as the model wrote it.
#[derive(Debug, Clone)]
pub struct ToolCallParser {
    style: Option<Style>,
    tools: Arc<[Tool]>,
    most: usize,
    calls: usize,
    state: State,
    /// Nothing but space came since the last call.
    behind: bool,
    /// Text that was not decided upon.
    held: String,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum State {
    /// Nothing but space so far.
    Beginning,
    /// Text, until a call begins.
    Text,
    /// A mark has come, or the comma in a list of calls: what follows should be a call.
    Call { list: bool },
    /// JSON that is read when it is complete.
    Whole { scan: Scan, list: bool },
    /// The arguments of a call.
    Arguments { scan: Scan, then: Then },
    /// What is left of a call's object.
    Rest { scan: Scan, list: bool },
    /// In a list, behind a call.
    Next,
    /// Within `<function=...>`: parameters of that tool.
    Parameters { tool: usize, any: bool },
    /// Within a parameter that is text; `begun`: behind the line break that it begins with.
    Value { tool: usize, begun: bool },
    /// A text that ends a call.
    Close(&'static str),
    /// After a call, before its end mark.
    Behind,
    /// Text to the end.
    Plain,
}

/// What stands around arguments.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Then {
    /// An object of a call, which may stand in a list.
    Object { list: bool },
    /// Nothing more.
    Nothing,
    /// `</function>`
    Function,
}

/// Looks for the end of a JSON object or list: bytes that were looked at, brackets open, and where in a string.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Scan {
    seen: usize,
    depth: usize,
    string: bool,
    escape: bool,
}

impl Scan {
    /// Where it ends, if it does.
    fn end(&mut self, text: &str) -> Option<usize> {
        for (at, byte) in text.bytes().enumerate().skip(self.seen) {
            match byte {
                _ if self.escape => self.escape = false,
                b'\\' if self.string => self.escape = true,
                b'"' => self.string = !self.string,
                _ if self.string => {}
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return Some(at + 1);
                    }
                }
                _ => {}
            }
        }
        self.seen = text.len();
        None
    }
}

/// What a text begins with.
enum Head {
    /// A call of the tool with this number, whose arguments come after so many bytes.
    Call { tool: usize, length: usize },
    /// More text is needed to say.
    Unsure,
    /// Something else.
    Other,
}

const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";

impl ToolCallParser {
    /// `style`: `None` makes all of it text. `most`: calls of an answer.
    pub(super) fn new(style: Option<Style>, tools: Arc<[Tool]>, most: usize) -> ToolCallParser {
        let state = if style.is_some() { State::Beginning } else { State::Plain };
        ToolCallParser { style, tools, most, calls: 0, state, behind: false, held: String::new() }
    }

    /// Calls found so far.
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// Takes more text; returns what is certain now.
    pub fn push(&mut self, text: &str) -> Vec<Part> {
        self.held.push_str(text);
        let mut parts = vec![];
        while self.step(&mut parts) {}
        parts
    }

    /// No more text will come; returns the rest.
    pub fn finish(&mut self) -> Vec<Part> {
        let mut parts = vec![];
        let rest = std::mem::take(&mut self.held);
        match self.state {
            State::Call { list: false } | State::Whole { list: false, .. } => {
                content(&mut parts, self.mark().to_string() + &rest);
            }
            State::Beginning | State::Text | State::Behind | State::Plain
                if !(self.behind && rest.trim().is_empty()) =>
            {
                content(&mut parts, rest);
            }
            // Within a call, or in a list of some: what is cut off there is no text.
            _ => {}
        }
        self.state = State::Plain;
        parts
    }

    /// What began the call that is being read, where it was text of its own.
    fn mark(&self) -> &'static str {
        match self.style {
            Some(style) if style != Style::Llama => style.marks().0,
            _ => "",
        }
    }

    /// False when more text is needed.
    fn step(&mut self, parts: &mut Vec<Part>) -> bool {
        let Some(style) = self.style else {
            content(parts, std::mem::take(&mut self.held));
            return false;
        };
        let (begin, end) = style.marks();
        match self.state {
            State::Plain => {
                content(parts, std::mem::take(&mut self.held));
                false
            }
            State::Beginning if style == Style::Llama => {
                let text = self.held.trim_start();
                if text.starts_with('{') || text.starts_with(FUNCTION) {
                    self.held = text.to_string();
                    self.state = State::Call { list: false };
                } else if let Some(rest) = text.strip_prefix(begin) {
                    self.held = rest.to_string();
                } else if begin.starts_with(text) || FUNCTION.starts_with(text) {
                    return false;
                } else {
                    self.state = State::Plain;
                }
                true
            }
            State::Beginning => {
                self.state = State::Text;
                true
            }
            State::Text => self.text(begin, style != Style::Llama, parts),
            State::Call { list } => self.call(list, parts),
            State::Whole { mut scan, list } => match scan.end(&self.held) {
                Some(end) => {
                    self.close(end, list, parts);
                    true
                }
                None => {
                    self.state = State::Whole { scan, list };
                    false
                }
            },
            State::Arguments { mut scan, then } => {
                let end = scan.end(&self.held);
                let text = self.cut(end.unwrap_or(self.held.len()));
                self.arguments(parts, text);
                self.state = match (end, then) {
                    (None, _) => State::Arguments { scan: Scan { seen: 0, ..scan }, then },
                    (Some(_), Then::Object { list }) => {
                        State::Rest { scan: Scan { depth: 1, ..Scan::default() }, list }
                    }
                    (Some(_), Then::Nothing) => self.done(false),
                    (Some(_), Then::Function) => State::Close(FUNCTION_END),
                };
                end.is_some()
            }
            State::Rest { mut scan, list } => {
                let end = scan.end(&self.held);
                self.cut(end.unwrap_or(self.held.len()));
                self.state = match end {
                    Some(_) => self.done(list),
                    None => State::Rest { scan: Scan { seen: 0, ..scan }, list },
                };
                end.is_some()
            }
            State::Next => {
                let text = self.held.trim_start();
                let (rest, state) = match text.as_bytes().first() {
                    None => return false,
                    Some(b',') if self.calls < self.most => (&text[1..], State::Call { list: true }),
                    Some(b']') => (&text[1..], State::Behind),
                    // No list any more, or more calls than there may be.
                    Some(_) => (text, State::Plain),
                };
                self.held = rest.to_string();
                self.state = state;
                true
            }
            State::Parameters { tool, any } => self.parameter(tool, any, parts),
            State::Value { tool, begun } => self.value(tool, begun, parts),
            State::Close(mark) => {
                let text = self.held.trim_start();
                let Some(rest) = text.strip_prefix(mark).or((!mark.starts_with(text)).then_some(text)) else {
                    return false;
                };
                self.held = rest.to_string();
                self.state = self.done(false);
                true
            }
            State::Behind => {
                let text = self.held.trim_start();
                if let Some(rest) = text.strip_prefix(end) {
                    self.held = rest.to_string();
                } else if end.starts_with(text) {
                    return false;
                }
                self.state = State::Text;
                true
            }
        }
    }

    /// Text, until a call begins.
    fn text(&mut self, begin: &str, marked: bool, parts: &mut Vec<Part>) -> bool {
        if self.behind {
            // Space between calls and behind them is no text.
            self.held = self.held.trim_start().to_string();
        }
        let looking = marked && self.calls < self.most;
        if looking && let Some(at) = self.held.find(begin) {
            let mut text = self.cut(at + begin.len());
            text.truncate(at);
            // Nor is space in front of a call.
            content(parts, text.trim_end().to_string());
            self.state = State::Call { list: false };
            return true;
        }
        // Held back: the beginning of a mark, and the space in front of it.
        let left = |at: usize| &self.held[at..];
        let starts = self.held.char_indices().map(|(at, _)| at);
        let mark = starts.filter(|&at| looking && left(at).len() < begin.len()).find(|&at| begin.starts_with(left(at)));
        let certain = self.held[..mark.unwrap_or(self.held.len())].trim_end().len();
        self.behind &= certain == 0;
        content(parts, self.cut(certain));
        false
    }

    /// What should be a call.
    fn call(&mut self, within: bool, parts: &mut Vec<Part>) -> bool {
        let text = self.held.trim_start();
        let space = self.held.len() - text.len();
        let Some(&form) = text.as_bytes().first() else { return false };
        let (head, before) = match form {
            // A list is one as soon as its first call is certain.
            b'[' if !within => {
                let inner = text[1..].trim_start();
                (self.object(inner), text.len() - inner.len())
            }
            b'{' => (self.object(text), 0),
            b'<' => (self.function(text), 0),
            _ => (self.named(text), 0),
        };
        match head {
            Head::Unsure => false,
            Head::Call { tool, length } => {
                self.cut(space + before + length);
                self.begin(tool, parts);
                let object = Then::Object { list: within || form == b'[' };
                let json = self.held.starts_with('{');
                self.state = match form {
                    b'{' | b'[' => State::Arguments { scan: Scan::default(), then: object },
                    b'<' if json => State::Arguments { scan: Scan::default(), then: Then::Function },
                    b'<' => State::Parameters { tool, any: false },
                    _ => State::Arguments { scan: Scan::default(), then: Then::Nothing },
                };
                true
            }
            Head::Other if form == b'{' || form == b'[' => {
                // Its parts may stand in another order.
                self.cut(space);
                self.state = State::Whole { scan: Scan::default(), list: within };
                true
            }
            Head::Other if within => {
                self.state = State::Plain;
                true
            }
            // The mark was text, and what follows may have another one.
            Head::Other => self.no_call(parts, self.mark().to_string()),
        }
    }

    /// `{"name": "...", "arguments": {`
    fn object(&self, text: &str) -> Head {
        let mut reader = Reader(text);
        let mut pattern = || {
            reader.literal("{")?;
            reader.literal("\"name\"")?;
            reader.literal(":")?;
            reader.literal("\"")?;
            let name = reader.until('"')?;
            reader.literal(",")?;
            reader.either(&["\"arguments\"", "\"parameters\""])?;
            reader.literal(":")?;
            reader.ahead("{")?;
            Ok(name)
        };
        let name = pattern();
        self.head(name, text.len() - reader.0.len())
    }

    /// `<function=name>`, and the first byte of what follows.
    fn function(&self, text: &str) -> Head {
        let mut reader = Reader(text);
        let mut pattern = || {
            reader.literal(FUNCTION)?;
            let name = reader.until('>')?;
            reader.ahead("")?;
            Ok(name)
        };
        let name = pattern();
        self.head(name, text.len() - reader.0.len())
    }

    /// `name[ARGS]{`, or with `[CALL_ID]` and an id between.
    fn named(&self, text: &str) -> Head {
        let mut reader = Reader(text);
        let mut pattern = || {
            let name = reader.until('[')?;
            if reader.either(&["CALL_ID]", "ARGS]"])? == "CALL_ID]" {
                reader.until('[')?;
                reader.literal("ARGS]")?;
            }
            reader.ahead("{")?;
            Ok(name)
        };
        let name = pattern();
        self.head(name, text.len() - reader.0.len())
    }

    fn head(&self, name: Result<&str, Head>, length: usize) -> Head {
        match name {
            Ok(name) => self.tool(name).map_or(Head::Other, |tool| Head::Call { tool, length }),
            Err(head) => head,
        }
    }

    fn tool(&self, name: &str) -> Option<usize> {
        self.tools.iter().position(|tool| tool.name == name.trim())
    }

    /// More of a parameter that is text.
    fn value(&mut self, tool: usize, begun: bool, parts: &mut Vec<Part>) -> bool {
        if !begun {
            if self.held.is_empty() {
                return false;
            }
            self.cut(usize::from(self.held.starts_with('\n')));
            self.state = State::Value { tool, begun: true };
        }
        let escaped = |text: &str| {
            let json = Value::from(text).to_string();
            json[1..json.len() - 1].to_string()
        };
        if let Some(end) = self.held.find(PARAMETER_END) {
            let text = self.cut(end);
            self.cut(PARAMETER_END.len());
            self.arguments(parts, escaped(text.strip_suffix('\n').unwrap_or(&text)) + "\"");
            self.state = State::Parameters { tool, any: true };
            return true;
        }
        // The line break in front of the end, and the end, may have begun.
        let begins = |at: usize| {
            let left = &self.held[at..];
            PARAMETER_END.starts_with(left.strip_prefix('\n').unwrap_or(left))
        };
        let from = self.held.len().saturating_sub(PARAMETER_END.len() + 1);
        let certain = self.held.char_indices().map(|(at, _)| at).find(|&at| at >= from && begins(at));
        let text = self.cut(certain.unwrap_or(self.held.len()));
        self.arguments(parts, escaped(&text));
        false
    }

    /// One `<parameter=key>value</parameter>`, or the end of them.
    fn parameter(&mut self, tool: usize, any: bool, parts: &mut Vec<Part>) -> bool {
        let text = self.held.trim_start();
        let space = self.held.len() - text.len();
        if let Some(body) = text.strip_prefix(PARAMETER) {
            let before = if any { ", " } else { "{" };
            let named = body.split_once('>').map(|(key, _)| key.to_string());
            if let Some(key) = named.filter(|key| parameter::kind(&self.tools[tool].parameters, key) == Kind::Text) {
                self.cut(space + PARAMETER.len() + key.len() + 1);
                self.arguments(parts, format!("{before}{}: \"", Value::from(key)));
                self.state = State::Value { tool, begun: false };
                return true;
            }
            let Some((body, _)) = body.split_once(PARAMETER_END) else { return false };
            let end = PARAMETER.len() + body.len();
            let (key, value) = body.split_once('>').unwrap_or((body, ""));
            let value = value.strip_prefix('\n').unwrap_or(value);
            let value = value.strip_suffix('\n').unwrap_or(value);
            let value = parameter::value(&self.tools[tool].parameters, key, value);
            let text = format!("{before}{}: {value}", Value::from(key));
            self.cut(space + end + PARAMETER_END.len());
            self.arguments(parts, text);
            self.state = State::Parameters { tool, any: true };
            return true;
        }
        if PARAMETER.starts_with(text) || (FUNCTION_END.starts_with(text) && text != FUNCTION_END) {
            return false;
        }
        self.arguments(parts, if any { "}" } else { "{}" }.to_string());
        self.state = State::Close(FUNCTION_END);
        true
    }

    /// A value ends there that is read as a whole: calls, or none.
    fn close(&mut self, end: usize, list: bool, parts: &mut Vec<Part>) {
        let text = self.cut(end);
        let calls = match serde_json::from_str(&text) {
            Ok(Value::Array(calls)) if !list => calls,
            Ok(value) => vec![value],
            Err(_) => vec![],
        };
        let read: Option<Vec<(usize, String)>> = calls.iter().map(|call| self.read(call)).collect();
        match read {
            Some(read) if !read.is_empty() => {
                for (tool, arguments) in read.into_iter().take(self.most - self.calls) {
                    self.begin(tool, parts);
                    self.arguments(parts, arguments);
                }
                self.state = self.done(list);
            }
            _ if list => {
                content(parts, text);
                self.state = State::Next;
            }
            _ => {
                self.no_call(parts, self.mark().to_string() + &text);
            }
        }
    }

    fn read(&self, call: &Value) -> Option<(usize, String)> {
        let tool = self.tool(call["name"].as_str()?)?;
        let arguments = ["arguments", "parameters"].iter().map(|key| &call[*key]).find(|v| !v.is_null());
        let arguments = match arguments {
            None => "{}".to_string(),
            Some(object @ Value::Object(_)) => object.to_string(),
            // Written as JSON in a string.
            Some(Value::String(text)) if serde_json::from_str::<Value>(text).is_ok_and(|v| v.is_object()) => {
                text.clone()
            }
            Some(_) => return None,
        };
        Some((tool, arguments))
    }

    /// What looked like a call is text.
    fn no_call(&mut self, parts: &mut Vec<Part>, text: String) -> bool {
        content(parts, text);
        self.behind = false;
        self.state = if self.style == Some(Style::Llama) { State::Plain } else { State::Text };
        true
    }

    fn begin(&mut self, tool: usize, parts: &mut Vec<Part>) {
        parts.push(Part::Call { index: self.calls, id: id(), name: self.tools[tool].name.clone() });
        self.calls += 1;
    }

    fn arguments(&self, parts: &mut Vec<Part>, more: String) {
        match parts.last_mut() {
            _ if more.is_empty() => {}
            Some(Part::Arguments { text, .. }) => text.push_str(&more),
            _ => parts.push(Part::Arguments { index: self.calls - 1, text: more }),
        }
    }

    /// After a call.
    fn done(&mut self, list: bool) -> State {
        self.behind = true;
        if list { State::Next } else { State::Behind }
    }

    /// Takes the first bytes of what is held.
    fn cut(&mut self, bytes: usize) -> String {
        let rest = self.held.split_off(bytes);
        std::mem::replace(&mut self.held, rest)
    }
}

fn content(parts: &mut Vec<Part>, text: String) {
    match parts.last_mut() {
        _ if text.is_empty() => {}
        Some(Part::Content(last)) => last.push_str(&text),
        _ => parts.push(Part::Content(text)),
    }
}

/// Reads the head of a call; fails with what is known then.
struct Reader<'a>(&'a str);

impl<'a> Reader<'a> {
    /// This text, after any space.
    fn literal(&mut self, what: &'static str) -> Result<(), Head> {
        self.either(&[what]).map(drop)
    }

    /// One of these texts, after any space.
    fn either(&mut self, all: &[&'static str]) -> Result<&'static str, Head> {
        let text = self.0.trim_start();
        for what in all {
            if let Some(rest) = text.strip_prefix(what) {
                self.0 = rest;
                return Ok(what);
            }
        }
        Err(if all.iter().any(|what| what.starts_with(text)) { Head::Unsure } else { Head::Other })
    }

    /// Any space, and then something that begins so, and stays.
    fn ahead(&mut self, what: &str) -> Result<(), Head> {
        self.0 = self.0.trim_start();
        match self.0 {
            "" => Err(Head::Unsure),
            text if text.starts_with(what) => Ok(()),
            _ => Err(Head::Other),
        }
    }

    /// A name, up to this character, which is left out.
    fn until(&mut self, end: char) -> Result<&'a str, Head> {
        const MOST: usize = 128;
        let named = |c: char| c.is_ascii_alphanumeric() || "_-. ".contains(c);
        match self.0.char_indices().find(|&(at, c)| !named(c) || at > MOST) {
            None => Err(Head::Unsure),
            Some((at, c)) if c == end => {
                let name = &self.0[..at];
                self.0 = &self.0[at + c.len_utf8()..];
                Ok(name)
            }
            Some(_) => Err(Head::Other),
        }
    }
}

/// Unlike every other of this process, and hardly like one of another.
fn id() -> String {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("call_{:016x}{:08x}", crate::random::unforeseen(), NEXT.fetch_add(1, Ordering::Relaxed) as u32)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parser(style: Option<Style>, most: usize) -> ToolCallParser {
        let add = json!({"type": "object", "properties": {"a": {"type": "string"}, "b": {}, "n": {"type": "integer"}}});
        let tool = |name: &str, parameters: &Value| Tool { name: name.into(), parameters: parameters.clone() };
        ToolCallParser::new(style, vec![tool("add", &add), tool("now", &json!({}))].into(), most)
    }

    fn parts(style: Style, pieces: &[&str]) -> Vec<String> {
        let mut parser = parser(Some(style), 3);
        let mut all: Vec<Part> = pieces.iter().flat_map(|p| parser.push(p)).collect();
        all.extend(parser.finish());
        let mut shown: Vec<String> = vec![];
        for part in all {
            match part {
                Part::Content(text) => match shown.last_mut() {
                    Some(last) if last.starts_with("text ") => last.push_str(&text),
                    _ => shown.push(format!("text {text}")),
                },
                Part::Call { index, id, name } => {
                    assert!(id.len() == 29 && id.starts_with("call_"), "{id}");
                    shown.push(format!("{index} {name} "));
                }
                Part::Arguments { index, text } => {
                    let last = shown.last_mut().filter(|last| last.starts_with(&index.to_string()));
                    last.unwrap_or_else(|| panic!("arguments of no call: {text:?}")).push_str(&text);
                }
            }
        }
        shown
    }

    fn check(style: Style, text: &str, expected: &[&str]) {
        assert_eq!(parts(style, &[text]), expected, "{text:?}");
        let characters: Vec<String> = text.chars().map(String::from).collect();
        let one_by_one: Vec<&str> = characters.iter().map(String::as_str).collect();
        assert_eq!(parts(style, &one_by_one), expected, "{text:?} by characters");
        for cut in (0..text.len()).filter(|&cut| text.is_char_boundary(cut)) {
            assert_eq!(parts(style, &[&text[..cut], &text[cut..]]), expected, "{text:?} cut at {cut}");
        }
    }

    #[test]
    fn hermes_calls_are_found_in_any_pieces() {
        let call = r#"<tool_call>{"name": "add", "arguments": {"a": "}]\" é", "b": [1, {"c": 2}]}}</tool_call>"#;
        let add = r#"0 add {"a": "}]\" é", "b": [1, {"c": 2}]}"#;
        check(Style::Hermes, call, &[add]);
        check(Style::Hermes, &format!("I add.\n\n{call}\n"), &["text I add.", add]);
        let two = format!("{call}\n<tool_call>\n{{\"name\": \"now\"}}\n</tool_call>");
        check(Style::Hermes, &two, &[add, "1 now {}"]);
        check(Style::Hermes, &format!("{call} Done: 3\n{call}"), &[add, "text Done: 3", &add.replacen('0', "1", 1)]);
        check(Style::Hermes, &format!("{call} Done: <b>3</b> "), &[add, "text Done: <b>3</b> "]);
        check(Style::Hermes, "No <tool> at all <tool_cal", &["text No <tool> at all <tool_cal"]);
        // In another order it is read when it is complete; what a string holds is JSON all the same.
        let other = r#"<tool_call>{"arguments": {"n": 1}, "name": "add"}</tool_call>"#;
        check(Style::Hermes, other, &[r#"0 add {"n":1}"#]);
        let string = r#"<tool_call>{"name": "add", "arguments": "{\"n\": 1}"}</tool_call>"#;
        check(Style::Hermes, string, &[r#"0 add {"n": 1}"#]);
        check(Style::Hermes, &format!("<tool_call>nothing {call}"), &["text <tool_call>nothing", add]);
    }

    #[test]
    fn arguments_come_as_they_are_written() {
        let mut parser = parser(Some(Style::Hermes), 3);
        let mut push = |text: &str| -> Vec<String> {
            let show = |part: Part| match part {
                Part::Content(text) => format!("text {text}"),
                Part::Call { index, name, .. } => format!("{index} {name}"),
                Part::Arguments { index, text } => format!("{index} + {text}"),
            };
            parser.push(text).into_iter().map(show).collect()
        };
        assert_eq!(push("<tool_call>{\"name\": \"add\", \"arg"), Vec::<String>::new());
        assert_eq!(push("uments\": {"), ["0 add", "0 + {"]);
        assert_eq!(push("\"a\": \"some"), ["0 + \"a\": \"some"]);
        assert_eq!(push(" text}\"}"), ["0 + \u{20}text}\"}"]);
        assert_eq!(push("}\n</tool_call>"), Vec::<String>::new());
        assert_eq!(push("<tool_call>\n<function=add>\n<parameter=n>\n12\n</parameter>"), ["1 add", "1 + {\"n\": 12"]);
        assert_eq!(push("<parameter=a>"), ["1 + , \"a\": \""]);
        assert_eq!(push("\nfn \"x\"() {\n"), ["1 + fn \\\"x\\\"() {"]);
        assert_eq!(push("</para"), Vec::<String>::new());
        assert_eq!(push("graph>\n\n</parameter>"), ["1 + \\n</paragraph>\\n\""]);
        assert_eq!(push("\n</function>"), ["1 + }"]);
        // Cut off: what there is.
        assert_eq!(push("\n</tool_call>\n<tool_call>{\"name\": \"now\", \"arguments\": {\"x"), ["2 now", "2 + {\"x"]);
        assert_eq!(parser.finish(), []);
    }

    #[test]
    fn what_is_no_call_stays_text() {
        for text in [
            "<tool_call>{\"name\": \"other\", \"arguments\": {}}</tool_call>",
            "<tool_call>{\"name\": \"add\", \"arguments\": 3}</tool_call>",
            "<tool_call>{\"name\": \"add\", \"argum",
            "<tool_call>{\"name\" \"add\"}</tool_call>",
            "<tool_call>nothing</tool_call>",
            "<tool_call><function=other><parameter=a>1</parameter></function></tool_call>",
            "<tool_call><function=add",
            "<tool_call>other[ARGS]{}</tool_call>",
            "<tool_call>[]</tool_call>",
            "<tool_call>[{\"name\": \"other\", \"arguments\": {}}]</tool_call>",
            "a <tool_call>",
        ] {
            let without_space = |s: &str| s.replace([' ', '\n'], "");
            for shown in [parts(Style::Hermes, &[text]), parts(Style::Hermes, &[&text[..13], &text[13..]])] {
                assert_eq!(shown.len(), 1, "{text}");
                assert_eq!(without_space(&shown[0]), format!("text{}", without_space(text)));
            }
        }
    }

    #[test]
    fn parameters_are_of_the_kind_that_the_schema_says() {
        let call = "<tool_call>\n<function=add>\n<parameter=a>\n12\n</parameter>\n<parameter=b>\nx < \"y\"\n\n\
                    </parameter>\n<parameter=n>\n-3\n</parameter>\n</function>\n</tool_call>";
        let add = r#"0 add {"a": "12", "b": "x < \"y\"\n", "n": -3}"#;
        check(Style::Qwen, call, &[add]);
        check(Style::Hermes, &format!("So:\n{call}\n"), &["text So:", add]);
        let none = "<tool_call>\n<function=now>\n</function>\n</tool_call>";
        check(Style::Qwen, &format!("{call}\n{none} Done."), &[add, "1 now {}", "text Done."]);
        // Marks may be left out at the end.
        check(Style::Qwen, &call.replace("\n</function>\n</tool_call>", ""), &[&add[..add.len() - 1]]);
        check(Style::Qwen, &call.replace("\n</function>", ""), &[add]);
    }

    #[test]
    fn llama_and_mistral_calls() {
        let llama = r#"{"name": "add", "parameters": {"a": 1}}"#;
        check(Style::Llama, llama, &[r#"0 add {"a": 1}"#]);
        check(Style::Llama, &format!("\n<|python_tag|>{llama}"), &[r#"0 add {"a": 1}"#]);
        check(Style::Llama, "<function=add>{\"a\": 1}</function>", &[r#"0 add {"a": 1}"#]);
        check(Style::Llama, "<function=other>{\"a\": 1}</function>", &["text <function=other>{\"a\": 1}</function>"]);
        check(Style::Llama, "Use {\"name\": \"add\"}", &["text Use {\"name\": \"add\"}"]);
        check(Style::Llama, r#"{"answer": 3} yes"#, &[r#"text {"answer": 3} yes"#]);
        let mistral = r#"[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}, {"name": "now", "arguments": {}}]"#;
        check(Style::Mistral, mistral, &[r#"0 add {"a": 1}"#, "1 now {}"]);
        check(Style::Mistral, "[TOOL] [1]", &["text [TOOL] [1]"]);
        let newer = r#"Well.[TOOL_CALLS]add[ARGS]{"a": "[x]"}[TOOL_CALLS]now[CALL_ID]abc123[ARGS]{}"#;
        for style in [Style::Mistral, Style::MistralArgs] {
            check(style, newer, &["text Well.", r#"0 add {"a": "[x]"}"#, "1 now {}"]);
        }
    }

    #[test]
    fn calls_beyond_the_limit_are_text() {
        let call = r#"<tool_call>{"name": "now"}</tool_call>"#;
        let mut one = parser(Some(Style::Hermes), 1);
        let found = one.push(&[call, call].concat());
        assert_eq!(one.calls(), 1);
        assert!(matches!(&found[2], Part::Content(text) if text == call), "{found:?}");
        let mut none = parser(None, 1);
        assert_eq!(none.push(call), [Part::Content(call.into())]);
    }
}
