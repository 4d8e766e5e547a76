//! Calls in what a model writes, as it writes it. The parts are the same however the text is cut into pieces.

use serde_json::Value;

use super::Style;

/// What is in an answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Part {
    /// Text for the reader.
    Content(String),
    /// A whole call.
    Call {
        /// Which one of the answer, from 0.
        index: usize,
        /// `call_` and 24 letters and digits, unlike every other.
        id: String,
        /// The tool.
        name: String,
        /// JSON.
        arguments: String,
    },
}

/// Finds calls in the text of one answer. What looks like a call and is none (cut off, no JSON, or of a tool that
/// does not exist) is text, as the model wrote it.
#[derive(Debug, Clone)]
pub struct ToolCallParser {
    style: Option<Style>,
    names: Vec<String>,
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
    /// Within a call: bytes of `held` that were looked at, brackets open, and where in a string.
    Call { seen: usize, depth: usize, string: bool, escape: bool },
    /// After a call, before its end mark.
    Behind,
    /// Text to the end.
    Plain,
}

impl State {
    const CALL: State = State::Call { seen: 0, depth: 0, string: false, escape: false };
}

impl ToolCallParser {
    /// `style`: `None` makes all of it text. `most`: calls of an answer.
    pub fn new(style: Option<Style>, names: Vec<String>, most: usize) -> ToolCallParser {
        let state = if style.is_some() { State::Beginning } else { State::Plain };
        ToolCallParser { style, names, most, calls: 0, state, behind: false, held: String::new() }
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
        let begun = matches!(self.state, State::Call { .. });
        if begun {
            self.content(&mut parts, self.mark().to_string() + &rest);
        } else if !(self.behind && rest.trim().is_empty()) {
            self.content(&mut parts, rest);
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

    fn content(&self, parts: &mut Vec<Part>, text: String) {
        match parts.last_mut() {
            _ if text.is_empty() => {}
            Some(Part::Content(last)) => last.push_str(&text),
            _ => parts.push(Part::Content(text)),
        }
    }

    /// False when more text is needed.
    fn step(&mut self, parts: &mut Vec<Part>) -> bool {
        let Some(style) = self.style else {
            let text = std::mem::take(&mut self.held);
            self.content(parts, text);
            return false;
        };
        let (begin, end) = style.marks();
        match self.state {
            State::Plain => {
                let text = std::mem::take(&mut self.held);
                self.content(parts, text);
                false
            }
            State::Beginning if style == Style::Llama => {
                let text = self.held.trim_start();
                if text.starts_with('{') {
                    self.held = text.to_string();
                    self.state = State::CALL;
                } else if let Some(rest) = text.strip_prefix(begin) {
                    self.held = rest.to_string();
                } else if begin.starts_with(text) {
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
            State::Text => {
                if self.behind {
                    // Space between calls and behind them is no text.
                    self.held = self.held.trim_start().to_string();
                }
                let looking = style != Style::Llama && self.calls < self.most;
                if looking && let Some(at) = self.held.find(begin) {
                    let rest = self.held.split_off(at + begin.len());
                    let mut text = std::mem::replace(&mut self.held, rest);
                    text.truncate(at);
                    // Nor is space in front of a call.
                    self.content(parts, text.trim_end().to_string());
                    self.state = State::CALL;
                    return true;
                }
                // Held back: the beginning of a mark, and the space in front of it.
                let left = |at: usize| &self.held[at..];
                let starts = self.held.char_indices().map(|(at, _)| at);
                let mark = starts
                    .filter(|&at| looking && left(at).len() < begin.len())
                    .find(|&at| begin.starts_with(left(at)));
                let certain = self.held[..mark.unwrap_or(self.held.len())].trim_end().len();
                self.behind &= certain == 0;
                let rest = self.held.split_off(certain);
                let text = std::mem::replace(&mut self.held, rest);
                self.content(parts, text);
                false
            }
            State::Call { seen, depth, string, escape } => self.scan(seen, depth, string, escape, parts),
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

    fn scan(
        &mut self,
        seen: usize,
        mut depth: usize,
        mut string: bool,
        mut escape: bool,
        parts: &mut Vec<Part>,
    ) -> bool {
        for (at, byte) in self.held.bytes().enumerate().skip(seen) {
            match byte {
                _ if escape => escape = false,
                b'\\' if string => escape = true,
                b'"' => string = !string,
                _ if string => {}
                b'{' | b'[' => depth += 1,
                b'}' | b']' => {
                    depth = depth.saturating_sub(1);
                    if depth == 0 {
                        self.close(at + 1, parts);
                        return true;
                    }
                }
                b' ' | b'\n' | b'\r' | b'\t' => {}
                _ if depth == 0 => {
                    // No JSON: the mark was text.
                    let text = self.mark().to_string() + &std::mem::take(&mut self.held);
                    self.content(parts, text);
                    self.state = if self.style == Some(Style::Llama) { State::Plain } else { State::Text };
                    return false;
                }
                _ => {}
            }
        }
        self.state = State::Call { seen: self.held.len(), depth, string, escape };
        false
    }

    /// A value ends there.
    fn close(&mut self, end: usize, parts: &mut Vec<Part>) {
        let rest = self.held.split_off(end);
        let text = std::mem::replace(&mut self.held, rest);
        let calls = match serde_json::from_str(&text) {
            Ok(Value::Array(list)) => list,
            Ok(value) => vec![value],
            Err(_) => vec![],
        };
        let read: Option<Vec<(String, String)>> = calls.iter().map(|call| self.call(call)).collect();
        match read {
            Some(read) if !read.is_empty() => {
                for (name, arguments) in read.into_iter().take(self.most - self.calls) {
                    parts.push(Part::Call { index: self.calls, id: id(), name, arguments });
                    self.calls += 1;
                }
                (self.state, self.behind) = (State::Behind, true);
            }
            _ => {
                self.content(parts, self.mark().to_string() + &text);
                self.state = if self.style == Some(Style::Llama) { State::Plain } else { State::Text };
            }
        }
    }

    fn call(&self, call: &Value) -> Option<(String, String)> {
        let name = call["name"].as_str().filter(|name| self.names.iter().any(|n| n == name))?;
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
        Some((name.to_string(), arguments))
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
    use super::*;

    fn parts(style: Style, pieces: &[&str]) -> Vec<String> {
        let mut parser = ToolCallParser::new(Some(style), vec!["add".into(), "now".into()], 3);
        let mut all: Vec<Part> = pieces.iter().flat_map(|p| parser.push(p)).collect();
        all.extend(parser.finish());
        let mut shown: Vec<String> = vec![];
        for part in all {
            match part {
                Part::Content(text) => match shown.last_mut() {
                    Some(last) if last.starts_with("text ") => last.push_str(&text),
                    _ => shown.push(format!("text {text}")),
                },
                Part::Call { index, id, name, arguments } => {
                    assert!(id.len() == 29 && id.starts_with("call_"), "{id}");
                    shown.push(format!("{index} {name} {arguments}"));
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
        let add = r#"0 add {"a":"}]\" é","b":[1,{"c":2}]}"#;
        check(Style::Hermes, call, &[add]);
        check(Style::Hermes, &format!("I add.\n\n{call}\n"), &["text I add.", add]);
        let two = format!("{call}\n<tool_call>\n{{\"name\": \"now\"}}\n</tool_call>");
        check(Style::Hermes, &two, &[add, "1 now {}"]);
        check(Style::Hermes, &format!("{call} Done: 3\n{call}"), &[add, "text Done: 3", &add.replacen('0', "1", 1)]);
        check(Style::Hermes, &format!("{call} Done: <b>3</b> "), &[add, "text Done: <b>3</b> "]);
        check(Style::Hermes, "No <tool> at all <tool_cal", &["text No <tool> at all <tool_cal"]);
    }

    #[test]
    fn what_is_no_call_stays_text() {
        for text in [
            "<tool_call>{\"name\": \"other\", \"arguments\": {}}</tool_call>",
            "<tool_call>{\"name\": \"add\", \"arguments\": 3}</tool_call>",
            "<tool_call>{\"name\": \"add\", \"argum",
            "<tool_call>{\"name\" \"add\"}</tool_call>",
            "<tool_call>nothing</tool_call>",
            "a <tool_call>",
        ] {
            let shown = parts(Style::Hermes, &[text]);
            let without_space = |s: &str| s.replace([' ', '\n'], "");
            assert_eq!(shown.len(), 1, "{text}");
            assert_eq!(without_space(&shown[0]), format!("text{}", without_space(text)));
        }
    }

    #[test]
    fn llama_and_mistral_calls() {
        let llama = r#"{"name": "add", "parameters": {"a": 1}}"#;
        check(Style::Llama, llama, &[r#"0 add {"a":1}"#]);
        check(Style::Llama, &format!("\n<|python_tag|>{llama}"), &[r#"0 add {"a":1}"#]);
        check(Style::Llama, "Use {\"name\": \"add\"}", &["text Use {\"name\": \"add\"}"]);
        check(Style::Llama, r#"{"answer": 3} yes"#, &[r#"text {"answer": 3} yes"#]);
        let mistral = r#"[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}, {"name": "now", "arguments": {}}]"#;
        check(Style::Mistral, mistral, &[r#"0 add {"a":1}"#, "1 now {}"]);
        check(Style::Mistral, "[TOOL] [1]", &["text [TOOL] [1]"]);
    }

    #[test]
    fn calls_beyond_the_limit_are_left_out_and_others_are_text() {
        let call = r#"<tool_call>{"name": "now"}</tool_call>"#;
        let mut parser = ToolCallParser::new(Some(Style::Hermes), vec!["now".into()], 1);
        let found = parser.push(&[call, call].concat());
        assert_eq!(parser.calls(), 1);
        assert!(matches!(&found[1], Part::Content(text) if text == call));
        let mut none = ToolCallParser::new(None, vec!["now".into()], 1);
        assert_eq!(none.push(call), [Part::Content(call.into())]);
    }
}
