//! `/v1/chat/completions`: conversations.

use serde_json::{Map, Value, json};

use super::{
    answer::{Kind, Task},
    constrain,
    fields::{Fields, short, wrong},
    input::{fits, refuse},
    params::{MOST_LOGPROBS, Params},
};
use crate::{
    server::{ApiError, State},
    text::{Ending, Message},
    tools::ToolSet,
};

/// Most messages of a conversation.
const MOST_MESSAGES: usize = 16384;

/// Reads a request.
pub fn parse(fields: Fields<'_>, state: &State) -> Result<Task, ApiError> {
    let params = Params::parse(fields, state, 1)?;
    let logprobs = logprobs(fields)?;
    let tools = constrain::tools(fields, state)?;
    let prompt = prompt(fields, state, tools.as_ref())?;
    let form = constrain::chat(fields, tools.as_ref())?;
    let mut requests = params.requests(&prompt, state, "messages")?;
    for request in &mut requests {
        request.logprobs = logprobs;
    }
    Ok(Task {
        kind: Kind::Chat { tools },
        requests,
        form,
        n: params.n,
        stops: params.stops,
        stream: params.stream,
        include_usage: params.include_usage,
    })
}

fn logprobs(fields: Fields<'_>) -> Result<Option<usize>, ApiError> {
    let top = fields.integer("top_logprobs", 0..=MOST_LOGPROBS)?;
    match (fields.boolean("logprobs")?.unwrap_or(false), top) {
        (true, top) => Ok(Some(top.unwrap_or(0) as usize)),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => {
            Err(ApiError::invalid("top_logprobs is given, expected logprobs to be true").at("top_logprobs"))
        }
    }
}

/// The tokens of a conversation; the fields of `/tokenize` are the same.
pub fn prompt(fields: Fields<'_>, state: &State, tools: Option<&ToolSet>) -> Result<Vec<u32>, ApiError> {
    let list = match fields.list("messages")? {
        Some(list) if !list.is_empty() && list.len() <= MOST_MESSAGES => list,
        Some(_) => return Err(fields.wrong("messages", &format!("a list of 1 to {MOST_MESSAGES} messages"))),
        None => return Err(ApiError::invalid("messages is missing, expected a list of messages").at("messages")),
    };
    let messages = list.iter().enumerate().map(|(i, m)| message(m, &format!("messages[{i}]"), state));
    let mut messages = messages.collect::<Result<Vec<Value>, _>>()?;
    let mut extra: Map<String, Value> = fields.object("chat_template_kwargs")?.cloned().unwrap_or_default();
    if let Some(effort) = fields.text("reasoning_effort")? {
        extra.entry("reasoning_effort").or_insert_with(|| effort.into());
    }
    let go_on = fields.boolean("continue_final_message")?.unwrap_or(false);
    let ask = fields.boolean("add_generation_prompt")?;
    let ending = match (go_on, ask) {
        (true, Some(true)) => {
            let message = "continue_final_message and add_generation_prompt are both true, expected at most one";
            return Err(ApiError::invalid(message).at("continue_final_message"));
        }
        (true, _) if list.last().is_some_and(|m| m["role"] != "assistant") => {
            let message = "continue_final_message is true, expected the last message to be the assistant's";
            return Err(ApiError::invalid(message).at("continue_final_message"));
        }
        (true, _) => Ending::Continue,
        (false, Some(false)) => Ending::Nothing,
        (false, _) => Ending::Ask,
    };
    let tools = constrain::show(tools, &mut messages, &mut extra);
    let messages =
        Message::list(messages.into()).map_err(|error| ApiError::invalid(error.to_string()).at("messages"))?;
    let text = state.text.render(&messages, tools, &extra, ending).map_err(|error| refuse(error, "messages"))?;
    fits(&text, state, "messages")?;
    state.text.rendered(&text).map_err(|error| refuse(error, "messages"))
}

/// A message as templates expect it: content as one text, arguments of calls as objects.
fn message(value: &Value, path: &str, state: &State) -> Result<Value, ApiError> {
    let Some(map) = value.as_object() else { return Err(wrong(path, value, "an object with a role")) };
    let at = format!("{path}.");
    let fields = Fields::inside(map, &at);
    let role = match fields.text("role")? {
        Some(role @ ("system" | "user" | "assistant" | "tool" | "function")) => role,
        // OpenAI's new name for the system; few templates know it.
        Some("developer") => {
            if state.text.template_mentions("developer") {
                "developer"
            } else {
                "system"
            }
        }
        Some(_) => return Err(fields.wrong("role", "system, developer, user, assistant or tool")),
        None => return Err(fields.wrong("role", "system, developer, user, assistant or tool")),
    };
    let calls = fields.list("tool_calls")?;
    let content = match fields.get("content") {
        None if role == "assistant" => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let part = |(i, part)| text_part(part, &format!("{path}.content[{i}]"));
            let texts: Vec<&str> = parts.iter().enumerate().map(part).collect::<Result<_, _>>()?;
            texts.join("\n")
        }
        _ => return Err(fields.wrong("content", "a string, or a list of text parts")),
    };
    let mut out = map.clone();
    out.insert("role".into(), role.into());
    out.insert("content".into(), content.into());
    if let Some(calls) = calls {
        let call = |(i, call): (usize, &Value)| tool_call(call, &format!("{path}.tool_calls[{i}]"));
        out.insert("tool_calls".into(), calls.iter().enumerate().map(call).collect::<Result<_, _>>()?);
    }
    // Templates take its presence for calls.
    if out.get("tool_calls").is_some_and(|calls| calls.is_null() || *calls == json!([])) {
        out.remove("tool_calls");
    }
    Ok(Value::Object(out))
}

fn text_part<'a>(part: &'a Value, path: &str) -> Result<&'a str, ApiError> {
    match part["type"].as_str() {
        Some("text" | "input_text" | "output_text") => match part["text"].as_str() {
            Some(text) => Ok(text),
            None => Err(wrong(&format!("{path}.text"), &part["text"], "a string")),
        },
        Some("refusal") => match part["refusal"].as_str() {
            Some(text) => Ok(text),
            None => Err(wrong(&format!("{path}.refusal"), &part["refusal"], "a string")),
        },
        Some(kind) => {
            let kind = short(&kind.into());
            let message =
                format!("{path}.type is {kind}, expected \"text\": images, sound and files are not supported");
            Err(ApiError::invalid(message).at(format!("{path}.type")))
        }
        None => Err(wrong(path, part, "an object with a type and a text")),
    }
}

/// A call that the assistant made. OpenAI's clients send arguments as JSON text; templates write objects out.
fn tool_call(call: &Value, path: &str) -> Result<Value, ApiError> {
    let name = &call["function"]["name"];
    if !name.is_string() {
        return Err(wrong(&format!("{path}.function.name"), name, "a string"));
    }
    let mut out = call.clone();
    if let Some(text) = call["function"]["arguments"].as_str()
        && let Ok(arguments @ Value::Object(_)) = serde_json::from_str(text)
    {
        // What a model wrote badly stays as it wrote it.
        out["function"]["arguments"] = arguments;
    }
    Ok(out)
}
