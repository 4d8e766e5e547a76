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
//! | `[TOOL_CALLS]` and `[ARGS]` | `[TOOL_CALLS]name[ARGS]{...}` (Mistral, since 2025) |
//! | `[TOOL_CALLS]` | `[TOOL_CALLS] [{"name": ..., "arguments": {...}}]` (Mistral before) |
//! | `<function=` and `<tool_call>` | `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>` (Qwen3-Coder) |
//! | `<tool_call>` | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen, SmolLM3) |
//! | `"parameters":` and `ipython` | `{"name": ..., "parameters": {...}}` at the answer's very beginning (Llama 3) |
//! | none of them | as Hermes; the format is explained in [`ToolSet::system_text`] |

mod parameter;
mod parser;

use std::sync::Arc;

use serde_json::{Map, Value, json};

use parameter::Kind;
pub use parser::{Part, ToolCallParser};

use crate::{
    engine::Constraint,
    grammar::{GrammarError, GrammarFactory, lark_string, prepared},
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
    /// `[TOOL_CALLS]`, name, `[ARGS]` and an object for each call.
    MistralArgs,
    /// `<function=name>` and parameters between `<tool_call>` tags for each call.
    Qwen,
}

impl Style {
    /// The style of a model.
    pub fn of(text: &TextModel) -> Style {
        if text.template_mentions("[TOOL_CALLS]") {
            if text.template_mentions("[ARGS]") { Style::MistralArgs } else { Style::Mistral }
        } else if text.template_mentions("<tool_call>") && text.template_mentions("<function=") {
            Style::Qwen
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
            Style::Hermes | Style::Qwen => ("<tool_call>", "</tool_call>"),
            Style::Llama => ("<|python_tag|>", ""),
            Style::Mistral | Style::MistralArgs => ("[TOOL_CALLS]", ""),
        }
    }

    /// Marks within a call.
    fn inner_marks(self) -> &'static [&'static str] {
        if self == Style::MistralArgs { &["[ARGS]", "[CALL_ID]"] } else { &[] }
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

/// What an answer may be beside calls.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Free {
    /// Nothing.
    No,
    /// Any text.
    Text,
    /// JSON of a schema.
    Json,
}

/// The tools of a request.
#[derive(Debug, Clone)]
pub struct ToolSet {
    shown: Value,
    tools: Arc<[Tool]>,
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
        let tools: Arc<[Tool]> = list.iter().enumerate().map(|(i, t)| tool(t, i)).collect::<Result<_, _>>()?;
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
        let marks = [begin, end].into_iter().chain(style.inner_marks().iter().copied());
        let marks = marks.filter(|m| !m.is_empty()).filter_map(control).collect();
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
        ToolCallParser::new(style, self.tools.clone(), most)
    }

    /// What an answer must follow: free text until a call begins, which then is one of a declared tool with
    /// arguments of its schema; or, where calls are required, calls alone. With the schema of an `answer` it is calls
    /// or JSON of that schema, as OpenAI has it. `None` where no calls are to be made.
    pub fn constraint(
        &self,
        grammars: &GrammarFactory,
        answer: Option<&Value>,
    ) -> Result<Option<Constraint>, GrammarError> {
        if self.choice == Choice::None {
            return Ok(None);
        }
        grammars.tools(&self.grammar(answer)?).map(Some)
    }

    /// The grammar of an answer, as Lark. Each tool's schema stays a document of its own, for its `$ref`s.
    fn grammar(&self, answer: Option<&Value>) -> Result<String, GrammarError> {
        let free = match (&self.choice, answer) {
            (Choice::Auto, None) => Free::Text,
            (Choice::Auto, Some(_)) => Free::Json,
            _ => Free::No,
        };
        let tools: Vec<(usize, &Tool)> = match &self.choice {
            Choice::Named(name) => self.tools.iter().enumerate().filter(|(_, t)| t.name == *name).collect(),
            _ => self.tools.iter().enumerate().collect(),
        };
        let (begin, end) = self.style.marks();
        let id = self.control(begin);
        let end = match end {
            "" => String::new(),
            mark => format!(" NL? {}", self.control(mark).unwrap_or_else(|| format!("{mark:?}"))),
        };
        let more = if self.parallel { MOST_CALLS - 1 } else { 0 };
        let mut lark = match (self.style, &id) {
            (Style::Llama, tag) => {
                // What begins with a brace is a call.
                let tag = tag.as_ref().map_or(String::new(), |tag| format!("{tag}? "));
                let text = match free {
                    Free::Text => "TEXT? | ",
                    Free::Json => "answer | ",
                    Free::No => "",
                };
                format!("start: {text}{tag}call\nTEXT: /([^{{ \\n]|[ \\n]+[^{{ \\n])(.|\\n)*/\n")
            }
            (Style::Mistral, id) => {
                let first = id.clone().unwrap_or_else(|| format!("{begin:?}"));
                let others = if more > 0 { format!(" (\",\" SP? call){{0,{more}}}") } else { String::new() };
                let calls = format!("SP? \"[\" NL? call{others} \"]\"");
                self.start(free, id.is_some(), begin, &first, &calls, None)
            }
            (Style::MistralArgs, id) => {
                let first = id.clone().unwrap_or_else(|| format!("{begin:?}"));
                self.start(free, id.is_some(), begin, &first, "SP? call", Some(more))
            }
            (Style::Hermes | Style::Qwen, id) => {
                let first = id.clone().unwrap_or_else(|| format!("{begin:?}"));
                let calls = format!("NL? call{end}");
                self.start(free, id.is_some(), begin, &first, &calls, Some(more))
            }
        };
        if let (Free::Json, Some(schema)) = (free, answer) {
            lark += &format!("answer: %json {}\n", prepared(schema)?);
        }
        lark += "NL: /[ \\n]/\nSP: \" \"\n";
        let names: Vec<String> = tools.iter().map(|(i, _)| format!("call_{i}")).collect();
        lark += &format!("call: {}\n", names.join(" | "));
        let id = if self.style == Style::Mistral { "ID? " } else { "" };
        for (i, tool) in tools {
            let schema = prepared(&tool.parameters)?;
            match self.style {
                Style::Qwen => {
                    lark += &tagged(i, tool)?;
                    continue;
                }
                Style::MistralArgs => {
                    let mark = self.control("[ARGS]").unwrap_or_else(|| "\"[ARGS]\"".into());
                    let name = lark_string(&tool.name);
                    lark += &format!("call_{i}: {name} {mark} args_{i}\nargs_{i}: %json {schema}\n");
                    continue;
                }
                Style::Llama if free == Free::Json => {
                    // Beside other JSON a call is made of the same pieces as that.
                    let name = lark_string(&format!("\"{}\"", tool.name));
                    lark += &format!(
                        "call_{i}: \"{{\" GAP? \"\\\"name\\\"\" GAP? \":\" GAP? {name} GAP? \",\" GAP? \"\\\"parameters\\\"\" GAP? \":\" \
                         GAP? args_{i} GAP? \"}}\"\nargs_{i}: %json {schema}\n"
                    );
                    continue;
                }
                Style::Hermes | Style::Llama | Style::Mistral => {}
            }
            let name = tool.name.replace('.', "\\.").replace('-', "\\-");
            let arguments = self.style.arguments();
            let gap = "[ \\n]{0,2}";
            lark += &format!(
                "call_{i}: OPEN_{i} args_{i} {id}CLOSE\n\
                 OPEN_{i}: /\\{{{gap}\"name\"{gap}:{gap}\"{name}\"{gap},{gap}\"{arguments}\"{gap}:{gap}/\nargs_{i}: %json {schema}\n"
            );
        }
        if self.style == Style::Llama && free == Free::Json {
            lark += "GAP: /[ \\n]{1,2}/\n";
        } else if !matches!(self.style, Style::Qwen | Style::MistralArgs) {
            lark += "CLOSE: /[ \\n]{0,2}\\}/\n";
        }
        if !id.is_empty() {
            lark += "ID: /, ?\"id\": ?\"[a-zA-Z0-9]{9}\"/\n";
        }
        Ok(lark)
    }

    /// A mark as a token, where it is one.
    fn control(&self, mark: &str) -> Option<String> {
        self.marks.iter().find(|(_, text)| *text == mark).map(|(id, _)| format!("<[{id}]>"))
    }

    /// `control`: the mark is a token that no text contains. `more`: how often mark and calls may come again.
    fn start(&self, free: Free, control: bool, begin: &str, first: &str, calls: &str, more: Option<usize>) -> String {
        let again = match more {
            Some(more) if more > 0 => format!(" (NL? {first} {calls}){{0,{more}}}"),
            _ => String::new(),
        };
        match (free, control) {
            (Free::No, _) => format!("start: {first} {calls}{again}\n"),
            (Free::Json, _) => format!("start: answer | {first} {calls}{again}\n"),
            (Free::Text, true) => format!("start: TEXT? ({first} {calls}{again})?\nTEXT: /(.|\\n)+/\n"),
            // The mark ends the text as soon as it is there, and no text contains it.
            (Free::Text, false) => {
                let mark = begin.replace('[', "\\[").replace(']', "\\]");
                format!(
                    "start: TEXT | \"\" | until {calls}{again}\nuntil[lazy]: /(.|\\n)*{mark}/\n\
                     TEXT: /(.|\\n)+/ & ~/(.|\\n)*{mark}(.|\\n)*/\n"
                )
            }
        }
    }
}

/// A call with its parameters between tags, in the schema's order. Numbers, lists and the like follow their schemas,
/// texts their lists of values; other restrictions of texts are not looked at.
fn tagged(i: usize, tool: &Tool) -> Result<String, GrammarError> {
    let none = Map::new();
    let properties = tool.parameters["properties"].as_object().unwrap_or(&none);
    let required = tool.parameters["required"].as_array().map_or(&[][..], Vec::as_slice);
    let (mut call, mut rules) = (format!("call_{i}: {}", lark_string(&format!("<function={}>\n", tool.name))), vec![]);
    for (k, key) in properties.keys().enumerate() {
        let optional = if required.iter().any(|name| name == key) { "" } else { "?" };
        call += &format!(" p_{i}_{k}{optional}");
        let open = lark_string(&format!("<parameter={key}>\n"));
        let schema = parameter::schema(&tool.parameters, key).unwrap_or(&none);
        let free = format!("free_{i}");
        let value = match (parameter::kind(&tool.parameters, key), schema.get("enum"), schema.get("const")) {
            (Kind::Text, Some(Value::Array(texts)), _) => {
                let texts: Vec<String> = texts.iter().filter_map(Value::as_str).map(lark_string).collect();
                format!("({}) {}", texts.join(" | "), lark_string(TAG_END))
            }
            (Kind::Text, _, Some(Value::String(text))) => format!("{} {}", lark_string(text), lark_string(TAG_END)),
            (Kind::Text, ..) => free,
            (Kind::Either, ..) if schema.is_empty() => free,
            _ => {
                let mut schema = schema.clone();
                for place in ["$defs", "definitions"] {
                    schema.extend(tool.parameters.get(place).map(|all| (place.to_string(), all.clone())));
                }
                let schema = prepared(&schema.into())?;
                rules.push(format!("v_{i}_{k}: %json {schema}\n"));
                format!("v_{i}_{k} {}", lark_string(TAG_END))
            }
        };
        rules.push(format!("p_{i}_{k}: {open} {value}\n"));
    }
    // Shortest first: a text ends with the first end there is.
    rules.push(format!("free_{i}[lazy]: /(.|\\n)*\\n<\\x2fparameter>\\n/\n"));
    Ok(format!("{call} \"</function>\"\n{}", rules.concat()))
}

/// Ends a parameter.
const TAG_END: &str = "\n</parameter>\n";

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
