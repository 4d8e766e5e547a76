//! One row of a batch: what it asks, and what it asks differently.

use serde_json::{Map, Value};

use super::{Key, Settings};
use crate::text::{Message, TextModel};

/// Fields of a row; a misspelt one must not pass unnoticed.
const FIELDS: [&str; 16] = [
    "id",
    "prompt",
    "messages",
    "tools",
    "template_args",
    "max_tokens",
    "stop",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "metadata",
];

/// A row that has a prompt or messages.
#[derive(Debug)]
pub(super) struct Row(Map<String, Value>);

/// Reads a row; the key is known even where the row is not usable.
pub(super) fn parse(line: &[u8], number: usize) -> (Key, Result<Row, String>) {
    let unnamed = Key { id: None, line: number };
    let fields = match serde_json::from_slice(line) {
        Ok(Value::Object(fields)) => fields,
        Ok(other) => return (unnamed, Err(format!("line {number} is {other}, expected a JSON object"))),
        Err(error) => return (unnamed, Err(format!("line {number} is no JSON: {error}"))),
    };
    let id = fields.get("id").filter(|id| id.is_string() || id.is_number()).cloned();
    let wrong_id = id.is_none() && fields.contains_key("id");
    let key = Key { id, line: number };
    if wrong_id {
        return (key, Err(format!("`id` is {}, expected a string or a number", fields["id"])));
    }
    if let Some(unknown) = fields.keys().find(|field| !FIELDS.contains(&field.as_str())) {
        let known = FIELDS.join(", ");
        return (
            key,
            Err(format!("unknown field `{unknown}`, expected some of {known}; `metadata` may hold anything")),
        );
    }
    match (fields.contains_key("prompt"), fields.contains_key("messages")) {
        (true, false) | (false, true) => (key, Ok(Row(fields))),
        (true, true) => (key, Err("the row has `prompt` and `messages`, expected one of them".to_string())),
        (false, false) => (key, Err("the row has neither `prompt` nor `messages`".to_string())),
    }
}

impl Row {
    /// Replaces settings by those of the row.
    pub fn apply(&self, settings: &mut Settings) -> Result<(), String> {
        let sampling = &mut settings.sampling;
        for (name, setting) in [
            ("temperature", &mut sampling.temperature),
            ("top_p", &mut sampling.top_p),
            ("min_p", &mut sampling.min_p),
            ("repetition_penalty", &mut sampling.repetition_penalty),
            ("presence_penalty", &mut sampling.presence_penalty),
            ("frequency_penalty", &mut sampling.frequency_penalty),
        ] {
            if let Some(value) = self.0.get(name) {
                *setting = value.as_f64().ok_or_else(|| format!("`{name}` is {value}, expected a number"))? as f32;
            }
        }
        if let Some(top_k) = self.count("top_k")? {
            sampling.top_k = u32::try_from(top_k).unwrap_or(u32::MAX);
        }
        if let Some(seed) = self.count("seed")? {
            sampling.seed = seed;
        }
        match self.count("max_tokens")? {
            Some(0) => return Err("`max_tokens` is 0, expected at least 1".to_string()),
            Some(most) => settings.max_tokens = usize::try_from(most).unwrap_or(usize::MAX),
            None => {}
        }
        match self.0.get("stop") {
            None => {}
            Some(Value::String(stop)) => settings.stops = vec![stop.clone()],
            Some(stops) => {
                let texts = serde_json::from_value(stops.clone());
                settings.stops =
                    texts.map_err(|_| format!("`stop` is {stops}, expected a string or a list of strings"))?;
            }
        }
        match self.0.get("template_args") {
            None => {}
            Some(Value::Object(args)) => settings.template_args.extend(args.clone()),
            Some(other) => return Err(format!("`template_args` is {other}, expected an object")),
        }
        settings.check()
    }

    /// The tokens that the row asks to be answered.
    pub fn prompt(&self, text: &TextModel, settings: &Settings) -> Result<Vec<u32>, String> {
        let tools = self.0.get("tools").filter(|tools| !tools.is_null());
        if !text.chats() && (tools.is_some() || !settings.template_args.is_empty()) {
            let what = if tools.is_some() { "tools" } else { "template_args" };
            return Err(crate::text::PromptError::NoTemplate { what }.to_string());
        }
        let prompt = match (self.0.get("messages"), self.0.get("prompt")) {
            (Some(messages), _) => {
                let mut messages = Message::list(messages.clone()).map_err(|error| error.to_string())?;
                if let Some(system) = &settings.system
                    && messages.first().is_none_or(|first| first.role() != "system")
                {
                    messages.insert(0, Message::new("system", system));
                }
                text.conversation(&messages, tools, &settings.template_args)
            }
            (None, Some(Value::String(prompt))) if text.chats() => {
                let mut messages: Vec<Message> = settings.system.iter().map(|s| Message::new("system", s)).collect();
                messages.push(Message::new("user", prompt));
                text.conversation(&messages, tools, &settings.template_args)
            }
            (None, Some(Value::String(prompt))) => text.continuation(prompt),
            (None, other) => return Err(format!("`prompt` is {}, expected a string", other.unwrap_or(&Value::Null))),
        };
        prompt.map_err(|error| error.to_string())
    }

    fn count(&self, name: &str) -> Result<Option<u64>, String> {
        match self.0.get(name) {
            None => Ok(None),
            Some(value) => {
                value.as_u64().map(Some).ok_or_else(|| format!("`{name}` is {value}, expected a whole number from 0"))
            }
        }
    }
}
