//! Tools: what a client declares, how the model's family writes calls, and calls found in what it writes.
//!
//! For one request: [`ToolSet::read`] the fields `tools`, `tool_choice` and `parallel_tool_calls`; give the template
//! the tools under [`ToolSet::argument`], or, where that is `None` (the template knows no tools), put
//! [`ToolSet::system_text`] in front of the system message; take [`ToolSet::constraint`] as the constraint of every
//! choice; and pass the text of each choice through a [`ToolCallParser`] of its own ([`ToolSet::parser`]).
//! The text of a token is that of [`ToolSet::text_of`] where it is `Some`: some families mark calls by control tokens,
//! which are not shown otherwise. A choice that ends with `stop` and made calls ends with `tool_calls`.
//!
//! The family is told by the template's text, because that is where a model's calls are written down for it:
//!
//! | in the template | calls look like |
//! |:--|:--|
//! | `[TOOL_CALLS]` | `[TOOL_CALLS] [{"name": ..., "arguments": {...}}]` (Mistral) |
//! | `<tool_call>` | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen, SmolLM3) |
//! | `"parameters":` and `ipython` | `{"name": ..., "parameters": {...}}` at the answer's very beginning (Llama 3) |
//! | none of them | as Hermes; the format is explained in [`ToolSet::system_text`] |

mod parser;

use serde_json::{Map, Value, json};

pub use parser::{Part, ToolCallParser};

use crate::{
    engine::Constraint,
    grammar::{GrammarError, GrammarFactory},
    text::TextModel,
};

/// Most tools of a request, as OpenAI has it.
const MOST_TOOLS: usize = 128;

/// Calls of one answer, where there may be several.
const MOST_CALLS: usize = 16;

/// How a family writes calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// One object between `<tool_call>` tags for each call.
    Hermes,
    /// An object with `parameters`, and nothing else.
    Llama,
    /// A list after `[TOOL_CALLS]`.
    Mistral,
}

impl Style {
    /// The style of a model.
    pub fn of(text: &TextModel) -> Style {
        if text.template_mentions("[TOOL_CALLS]") {
            Style::Mistral
        } else if text.template_mentions("<tool_call>") {
            Style::Hermes
        } else if text.template_mentions("\"parameters\":") && text.template_mentions("ipython") {
            Style::Llama
        } else {
            Style::Hermes
        }
    }

    /// What a call begins with, and ends with.
    fn marks(self) -> (&'static str, &'static str) {
        match self {
            Style::Hermes => ("<tool_call>", "</tool_call>"),
            Style::Llama => ("<|python_tag|>", ""),
            Style::Mistral => ("[TOOL_CALLS]", ""),
        }
    }

    fn arguments(self) -> &'static str {
        if self == Style::Llama { "parameters" } else { "arguments" }
    }
}

/// Whether calls are made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Choice {
    /// No.
    None,
    /// As the model likes.
    Auto,
    /// At least one.
    Required,
    /// Of this tool.
    Named(String),
}

/// The tools of a request.
#[derive(Debug, Clone)]
pub struct ToolSet {
    shown: Value,
    tools: Vec<Tool>,
    choice: Choice,
    parallel: bool,
    style: Style,
    /// Control tokens that mark calls, with their texts.
    marks: Vec<(u32, &'static str)>,
    argument: Option<&'static str>,
}

#[derive(Debug, Clone)]
struct Tool {
    name: String,
    parameters: Value,
}

impl ToolSet {
    /// Reads the fields of a request; `None` without tools. Errors name the field and what is wrong with it.
    pub fn read(
        tools: Option<&Value>,
        tool_choice: Option<&Value>,
        parallel: Option<bool>,
        text: &TextModel,
    ) -> Result<Option<ToolSet>, (String, String)> {
        let list = match tools {
            None | Some(Value::Null) => &[],
            Some(Value::Array(list)) => list.as_slice(),
            Some(_) => return Err(wrong("tools", "expected a list of tools")),
        };
        if list.len() > MOST_TOOLS {
            return Err(wrong("tools", &format!("{} tools, at most {MOST_TOOLS} are accepted", list.len())));
        }
        let tools: Vec<Tool> = list.iter().enumerate().map(|(i, t)| tool(t, i)).collect::<Result<_, _>>()?;
        if let Some(i) = (1..tools.len()).find(|&i| tools[..i].iter().any(|t| t.name == tools[i].name)) {
            return Err(wrong(&format!("tools[{i}].function.name"), "two tools have this name"));
        }
        let choice = choice(tool_choice, &tools)?;
        if tools.is_empty() {
            return Ok(None);
        }
        let style = Style::of(text);
        let argument = match () {
            () if !text.template_mentions("tools") => None,
            () if text.template_mentions("xml_tools") => Some("xml_tools"),
            () => Some("tools"),
        };
        let (begin, end) = style.marks();
        let tokenizer = text.tokenizer();
        let control =
            |mark: &'static str| tokenizer.id_of(mark).filter(|&id| tokenizer.is_special(id)).map(|id| (id, mark));
        let marks = [begin, end].into_iter().filter(|m| !m.is_empty()).filter_map(control).collect();
        let parallel = parallel.unwrap_or(true) && style != Style::Llama;
        Ok(Some(ToolSet { shown: Value::Array(list.to_vec()), tools, choice, parallel, style, marks, argument }))
    }

    /// The template's variable for [`ToolSet::shown`]: `tools`, or `xml_tools` (SmolLM3). `None`: it knows no tools.
    pub fn argument(&self) -> Option<&'static str> {
        self.argument
    }

    /// The tools as the client declared them.
    pub fn shown(&self) -> &Value {
        &self.shown
    }

    /// Whether calls are made.
    pub fn choice(&self) -> &Choice {
        &self.choice
    }

    /// Explains the tools to a model whose template does not.
    pub fn system_text(&self) -> String {
        let list: String = self.shown.as_array().into_iter().flatten().map(|tool| format!("{tool}\n")).collect();
        format!(
            "You may call functions to answer. Their signatures:\n<tools>\n{list}</tools>\nTo call one, write a JSON \
             object with its name and arguments within <tool_call></tool_call> tags:\n<tool_call>\n{{\"name\": \
             <function-name>, \"arguments\": <args-json-object>}}\n</tool_call>"
        )
    }

    /// The text of a control token that marks calls.
    pub fn text_of(&self, token: u32) -> Option<&'static str> {
        self.marks.iter().find(|(id, _)| *id == token).map(|(_, text)| *text)
    }

    /// Finds the calls in one answer. Without calls to be made it leaves the text as it is.
    pub fn parser(&self) -> ToolCallParser {
        let style = (self.choice != Choice::None).then_some(self.style);
        let most = if self.parallel { MOST_CALLS } else { 1 };
        ToolCallParser::new(style, self.tools.iter().map(|t| t.name.clone()).collect(), most)
    }

    /// What an answer must follow: free text until a call begins, which then is one of a declared tool with
    /// arguments of its schema; or, where calls are required, calls alone. `None` where none are to be made.
    pub fn constraint(&self, grammars: &GrammarFactory) -> Result<Option<Constraint>, GrammarError> {
        if self.choice == Choice::None {
            return Ok(None);
        }
        grammars.tools(&self.grammar()?).map(Some)
    }

    /// The grammar of an answer, as Lark. Each tool's schema stays a document of its own, for its `$ref`s.
    fn grammar(&self) -> Result<String, GrammarError> {
        let free = self.choice == Choice::Auto;
        let tools: Vec<(usize, &Tool)> = match &self.choice {
            Choice::Named(name) => self.tools.iter().enumerate().filter(|(_, t)| t.name == *name).collect(),
            _ => self.tools.iter().enumerate().collect(),
        };
        let (begin, end) = self.style.marks();
        let id = self.marks.iter().find(|(_, text)| *text == begin).map(|(id, _)| format!("<[{id}]>"));
        let end = match self.marks.iter().find(|(_, text)| *text == end && !text.is_empty()) {
            Some((id, _)) => format!(" NL? <[{id}]>"),
            None if end.is_empty() => String::new(),
            None => format!(" NL? {:?}", end),
        };
        let more = if self.parallel { MOST_CALLS - 1 } else { 0 };
        let mut lark = match (self.style, &id) {
            (Style::Llama, tag) => {
                // What begins with a brace is a call.
                let tag = tag.as_ref().map_or(String::new(), |tag| format!("{tag}? "));
                let text = if free { "TEXT? | " } else { "" };
                format!("start: {text}{tag}call\nTEXT: /([^{{ \\n]|[ \\n]+[^{{ \\n])(.|\\n)*/\n")
            }
            (Style::Mistral, id) => {
                let first = id.clone().unwrap_or_else(|| format!("{begin:?}"));
                let others = if more > 0 { format!(" (\",\" SP? call){{0,{more}}}") } else { String::new() };
                let calls = format!("SP? \"[\" NL? call{others} \"]\"");
                self.start(free, id.is_some(), begin, &first, &calls, None)
            }
            (Style::Hermes, id) => {
                let first = id.clone().unwrap_or_else(|| format!("{begin:?}"));
                let calls = format!("NL? call{end}");
                self.start(free, id.is_some(), begin, &first, &calls, Some(more))
            }
        };
        lark += "NL: /[ \\n]/\nSP: \" \"\n";
        let names: Vec<String> = tools.iter().map(|(i, _)| format!("call_{i}")).collect();
        lark += &format!("call: {}\n", names.join(" | "));
        let id = if self.style == Style::Mistral { "ID? " } else { "" };
        for (i, tool) in tools {
            let schema = crate::grammar::prepared(&tool.parameters)?;
            let name = tool.name.replace('.', "\\.").replace('-', "\\-");
            let arguments = self.style.arguments();
            let gap = "[ \\n]{0,2}";
            lark += &format!(
                "call_{i}: OPEN_{i} args_{i} {id}CLOSE\n\
                 OPEN_{i}: /\\{{{gap}\"name\"{gap}:{gap}\"{name}\"{gap},{gap}\"{arguments}\"{gap}:{gap}/\nargs_{i}: %json {schema}\n"
            );
        }
        lark += "CLOSE: /[ \\n]{0,2}\\}/\n";
        if !id.is_empty() {
            lark += "ID: /, ?\"id\": ?\"[a-zA-Z0-9]{9}\"/\n";
        }
        Ok(lark)
    }

    /// `control`: the mark is a token that no text contains. `more`: how often mark and calls may come again.
    fn start(&self, free: bool, control: bool, begin: &str, first: &str, calls: &str, more: Option<usize>) -> String {
        let again = match more {
            Some(more) if more > 0 => format!(" (NL? {first} {calls}){{0,{more}}}"),
            _ => String::new(),
        };
        match (free, control) {
            (false, _) => format!("start: {first} {calls}{again}\n"),
            (true, true) => format!("start: TEXT? ({first} {calls}{again})?\nTEXT: /(.|\\n)+/\n"),
            // The mark ends the text as soon as it is there, and no text contains it.
            (true, false) => {
                let mark = begin.replace('[', "\\[").replace(']', "\\]");
                format!(
                    "start: TEXT | \"\" | until {calls}{again}\nuntil[lazy]: /(.|\\n)*{mark}/\n\
                     TEXT: /(.|\\n)+/ & ~/(.|\\n)*{mark}(.|\\n)*/\n"
                )
            }
        }
    }
}

fn wrong(field: &str, what: &str) -> (String, String) {
    (field.to_string(), format!("{field}: {what}"))
}

fn tool(tool: &Value, i: usize) -> Result<Tool, (String, String)> {
    let at = format!("tools[{i}]");
    if tool["type"] != "function" {
        return Err(wrong(&format!("{at}.type"), "expected \"function\""));
    }
    let function = &tool["function"];
    let named = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    let name = match function["name"].as_str() {
        Some(name) if (1..=64).contains(&name.len()) && name.chars().all(named) => name.to_string(),
        _ => {
            let what = "expected 1 to 64 letters, digits, dots, dashes and underscores";
            return Err(wrong(&format!("{at}.function.name"), what));
        }
    };
    let parameters = match &function["parameters"] {
        Value::Null => json!({"type": "object", "properties": {}, "additionalProperties": false}),
        Value::Object(schema) => {
            let mut schema: Map<String, Value> = schema.clone();
            schema.entry("type").or_insert_with(|| "object".into());
            if schema["type"] != "object" {
                return Err(wrong(&format!("{at}.function.parameters.type"), "expected \"object\""));
            }
            Value::Object(schema)
        }
        _ => return Err(wrong(&format!("{at}.function.parameters"), "expected a JSON schema of an object")),
    };
    Ok(Tool { name, parameters })
}

fn choice(choice: Option<&Value>, tools: &[Tool]) -> Result<Choice, (String, String)> {
    let some = |choice| match tools.is_empty() {
        true => Err(wrong("tool_choice", "there are no tools to choose from")),
        false => Ok(choice),
    };
    let expected =
        "expected \"none\", \"auto\", \"required\" or {\"type\": \"function\", \"function\": {\"name\": ...}}";
    match choice {
        None | Some(Value::Null) => Ok(Choice::Auto),
        Some(Value::String(word)) => match word.as_str() {
            "none" => Ok(Choice::None),
            "auto" => Ok(Choice::Auto),
            "required" => some(Choice::Required),
            _ => Err(wrong("tool_choice", expected)),
        },
        Some(object) => match object["function"]["name"].as_str() {
            Some(name) if tools.iter().any(|t| t.name == name) => Ok(Choice::Named(name.to_string())),
            Some(_) => Err(wrong("tool_choice.function.name", "no tool has this name")),
            None => Err(wrong("tool_choice", expected)),
        },
    }
}

#[cfg(test)]
mod tests;
