//! Chat templates: Jinja as Hugging Face's `apply_chat_template` speaks it.
//!
//! Blocks are trimmed (`trim_blocks`, `lstrip_blocks`), `raise_exception`, `strftime_now`, loop
//! controls, Python's methods and Python's `tojson` exist, and `{% generation %}` marks nothing.
//! Dates are UTC (the program has no time zone data), where transformers takes local time.

mod date;
mod python;

use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, Value as Jinja};
use serde_json::{Map, Value};

pub use date::Date;

use super::printable;

/// Bounds the work of one rendering; a template that loops without end must not take the server
/// along. Long conversations with tools need well under a million.
const FUEL: u64 = 30_000_000;

/// Most bytes of a template; real ones have up to 30 000.
const MAX_SOURCE: usize = 64 << 10;

/// The library goes one call deeper for every operator of a chain, so a hostile template of
/// `MAX_SOURCE` bytes needs far more stack than a thread usually has. Untouched, it costs nothing.
const STACK: usize = 512 << 20;

/// Why a conversation could not be rendered.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The template is not the Jinja that we know.
    #[error("the chat template cannot be read: {}; `--raw` runs the model without it", printable(.0))]
    Syntax(String),
    /// The template refused the conversation (`raise_exception`).
    #[error("the model's chat template refuses this conversation: {}", printable(.0))]
    Refused(String),
    /// The template failed on this conversation.
    #[error("the chat template failed: {}", printable(.0))]
    Render(String),
    /// A message that is no object with a role.
    #[error("message {index} is {}, expected an object with a `role`", printable(found))]
    Message {
        /// Which one, from 0.
        index: usize,
        /// What it is.
        found: String,
    },
}

/// One message of a conversation: an object with a `role`, usually a `content`, and whatever else
/// the template knows (`tool_calls`, `name`, `reasoning_content`...), in order.
#[derive(Debug, Clone, PartialEq)]
pub struct Message(Map<String, Value>);

impl Message {
    /// A message of plain text.
    pub fn new(role: &str, content: &str) -> Message {
        Message(Map::from_iter([("role".to_string(), role.into()), ("content".to_string(), content.into())]))
    }

    /// Reads a list of message objects.
    pub fn list(messages: Value) -> Result<Vec<Message>, TemplateError> {
        let Value::Array(messages) = messages else {
            return Err(TemplateError::Message { index: 0, found: messages.to_string() });
        };
        let message = |(index, message)| match message {
            Value::Object(fields) if fields.get("role").is_some_and(Value::is_string) => Ok(Message(fields)),
            other => Err(TemplateError::Message { index, found: other.to_string() }),
        };
        messages.into_iter().enumerate().map(message).collect()
    }

    /// Who speaks.
    pub fn role(&self) -> &str {
        self.0.get("role").and_then(Value::as_str).unwrap_or_default()
    }

    /// What is said, where it is plain text.
    pub fn text(&self) -> Option<&str> {
        self.0.get("content").and_then(Value::as_str)
    }

    /// All fields.
    pub fn fields(&self) -> &Map<String, Value> {
        &self.0
    }
}

/// A compiled chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: Option<String>,
    eos: Option<String>,
}

impl ChatTemplate {
    /// Compiles a template; `bos` and `eos` are the texts of the model's tokens, where it has them.
    pub fn new(source: &str, bos: Option<&str>, eos: Option<&str>) -> Result<ChatTemplate, TemplateError> {
        ChatTemplate::with_clock(source, bos, eos, || Date::of(SystemTime::now()))
    }

    /// As [`ChatTemplate::new`], with the clock that `strftime_now` reads.
    pub fn with_clock(
        source: &str,
        bos: Option<&str>,
        eos: Option<&str>,
        clock: impl Fn() -> Date + Send + Sync + 'static,
    ) -> Result<ChatTemplate, TemplateError> {
        if source.len() > MAX_SOURCE {
            let message = format!("it has {} bytes, expected at most {MAX_SOURCE}", source.len());
            return Err(TemplateError::Syntax(message));
        }
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.expect("Jinja's own delimiters"));
        environment.set_fuel(Some(FUEL));
        python::install(&mut environment);
        environment.add_function("strftime_now", move |format: &str| clock().format(format));
        let source = without_generation_marks(source);
        deep(|| {
            let added = environment.add_template_owned(NAME, source.clone());
            added.map_err(|error| TemplateError::Syntax(describe(&error, &source)))
        })?;
        Ok(ChatTemplate { environment, bos: bos.map(String::from), eos: eos.map(String::from) })
    }

    /// The text of a conversation.
    ///
    /// `extra`: variables of the template's own, such as `enable_thinking`; they may replace
    /// `bos_token`, `eos_token` and `documents`, but not the other arguments.
    pub fn render(
        &self,
        messages: &[Message],
        tools: Option<&Value>,
        add_generation_prompt: bool,
        extra: &Map<String, Value>,
    ) -> Result<String, TemplateError> {
        deep(|| self.render_here(messages, tools, add_generation_prompt, extra))
    }

    /// Whether a word stands in the template.
    pub fn mentions(&self, word: &str) -> bool {
        self.environment.get_template(NAME).is_ok_and(|template| template.source().contains(word))
    }

    fn render_here(
        &self,
        messages: &[Message],
        tools: Option<&Value>,
        add_generation_prompt: bool,
        extra: &Map<String, Value>,
    ) -> Result<String, TemplateError> {
        let template = self.environment.get_template(NAME).expect("added by the constructor");
        let mut variables = std::collections::BTreeMap::<&str, Jinja>::new();
        variables.insert("documents", Jinja::from(()));
        for (name, token) in [("bos_token", &self.bos), ("eos_token", &self.eos)] {
            // Left undefined where the model has none, as transformers does.
            token.iter().for_each(|token| drop(variables.insert(name, Jinja::from(token.as_str()))));
        }
        variables.extend(extra.iter().map(|(name, value)| (name.as_str(), python::value(value))));
        variables.insert("messages", messages.iter().map(|m| python::object(&m.0)).collect());
        variables.insert("tools", tools.map_or(Jinja::from(()), python::value));
        variables.insert("add_generation_prompt", Jinja::from(add_generation_prompt));
        template.render(Jinja::from_pairs(variables)).map_err(|error| match python::refusal(&error) {
            Some(message) => TemplateError::Refused(message),
            None => TemplateError::Render(describe(&error, template.source())),
        })
    }
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("bos", &self.bos).field("eos", &self.eos).finish_non_exhaustive()
    }
}

/// Works on a thread with a deep stack.
fn deep<T: Send>(work: impl FnOnce() -> Result<T, TemplateError> + Send) -> Result<T, TemplateError> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, work);
        let thread = thread.map_err(|error| TemplateError::Render(format!("no thread for it: {error}")))?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

const NAME: &str = "chat template";

/// `{% generation %}` tells trainers which tokens the assistant wrote. An `if` in its place keeps
/// the whitespace rules of a block, and every line where it was.
fn without_generation_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end + 2);
        let word = tag[2..end].trim_matches(['-', '+']).trim();
        match word {
            "generation" => out.push_str(&tag.replacen(word, "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen(word, "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out + rest
}

/// What happened, on which line, and the line itself.
fn describe(error: &minijinja::Error, source: &str) -> String {
    let mut text = match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    };
    if error.kind() == ErrorKind::OutOfFuel {
        text = "it does not come to an end".to_string();
    }
    if let Some(number) = error.line() {
        let line = source.lines().nth(number.saturating_sub(1)).unwrap_or_default().trim();
        // Many templates are a single line of thousands of letters.
        let shown: String = line.chars().take(100).collect();
        let more = if shown.len() < line.len() { "..." } else { "" };
        text = format!("line {number}: {text} in `{shown}{more}`");
    }
    text
}

#[cfg(test)]
mod tests;
