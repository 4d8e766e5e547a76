//! What an answer may be: `response_format`, the fields of llama-server and vLLM for the same, and tools.

use serde_json::{Map, Value};

use super::fields::Fields;
use crate::{
    engine::Constraint,
    grammar::{GrammarError, GrammarFactory},
    server::{ApiError, State},
    tools::{Choice, ToolSet},
};

/// Fields that each say what the whole answer is.
const FORMATS: &[&str] = &[
    "response_format",
    "grammar",
    "json_schema",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
];

/// The constraint of a text.
pub fn format(fields: Fields<'_>, state: &State) -> Result<Option<Constraint>, ApiError> {
    let given: Vec<&str> = FORMATS.iter().copied().filter(|name| asks(fields, name)).collect();
    let name = match given[..] {
        [] => return Ok(None),
        [name] => name,
        [one, other, ..] => {
            let message = format!("{one} and {other} are both given, expected one of them");
            return Err(ApiError::invalid(message).at(other));
        }
    };
    if fields.boolean("ignore_eos")?.unwrap_or(false) {
        let message = format!("ignore_eos is true, expected false where {name} says when the answer is complete");
        return Err(ApiError::invalid(message).at("ignore_eos"));
    }
    let grammars = &state.grammars;
    let (path, made) = match name {
        "response_format" => return response_format(fields, grammars),
        "structured_outputs" => return structured(fields, grammars),
        "grammar" | "guided_grammar" => (name, lark(fields, name, grammars)?),
        "guided_regex" => (name, regex(fields, name, grammars)?),
        "guided_choice" => (name, choice(fields, name, grammars)?),
        _ => (name, schema(fields, name, grammars)?),
    };
    made.map(Some).map_err(|error| refuse(error, path))
}

/// Whether a field is there and says anything.
fn asks(fields: Fields<'_>, name: &str) -> bool {
    match (name, fields.get(name)) {
        (_, None) => false,
        ("response_format", Some(format)) => format["type"] != "text",
        // Clients of llama-server send empty ones.
        (_, Some(value)) => *value != "",
    }
}

type Made = Result<Constraint, GrammarError>;

/// Text or an object; OpenAI's `json_schema` holds the schema, llama-server's `json_object` may have one beside it.
fn response_format(fields: Fields<'_>, grammars: &GrammarFactory) -> Result<Option<Constraint>, ApiError> {
    let Some(map) = fields.object("response_format")? else { return Ok(None) };
    let format = Fields::inside(map, "response_format.");
    let (path, made) = match format.text("type")? {
        Some("json_object") => match format.object("schema")? {
            None => ("response_format", grammars.json_object()),
            Some(_) => ("response_format.schema", schema(format, "schema", grammars)?),
        },
        Some("json_schema") => match format.object("json_schema")? {
            None => return Err(format.wrong("json_schema", "an object with a schema")),
            Some(inner) => {
                let inner = Fields::inside(inner, "response_format.json_schema.");
                ("response_format.json_schema.schema", schema(inner, "schema", grammars)?)
            }
        },
        _ => return Err(format.wrong("type", "text, json_object or json_schema")),
    };
    made.map(Some).map_err(|error| refuse(error, path))
}

/// vLLM's: exactly one of its fields.
fn structured(fields: Fields<'_>, grammars: &GrammarFactory) -> Result<Option<Constraint>, ApiError> {
    const KNOWN: &[&str] = &["json", "regex", "choice", "grammar", "json_object"];
    let name = "structured_outputs";
    let Some(map) = fields.object(name)? else { return Ok(None) };
    let given = Fields::inside(map, "structured_outputs.");
    let fields: Vec<&str> = KNOWN.iter().copied().filter(|known| given.get(known).is_some()).collect();
    let [field] = fields[..] else {
        return Err(
            ApiError::invalid(format!("{name} has {} of {}, expected one", fields.len(), KNOWN.join(", "))).at(name)
        );
    };
    let made = match field {
        "json" => schema(given, field, grammars)?,
        "regex" => regex(given, field, grammars)?,
        "choice" => choice(given, field, grammars)?,
        "grammar" => lark(given, field, grammars)?,
        _ if given.boolean(field)? == Some(true) => grammars.json_object(),
        _ => return Err(given.wrong(field, "true")),
    };
    made.map(Some).map_err(|error| refuse(error, &given.path(field)))
}

/// A schema, as an object or as its JSON text.
fn schema(fields: Fields<'_>, name: &str, grammars: &GrammarFactory) -> Result<Made, ApiError> {
    let expected = "a JSON schema: an object, or its text";
    match fields.get(name) {
        Some(value @ (Value::Object(_) | Value::Bool(_))) => Ok(grammars.json_schema(value)),
        Some(Value::String(text)) => match serde_json::from_str(text) {
            Ok(value @ Value::Object(_)) => Ok(grammars.json_schema(&value)),
            _ => Err(fields.wrong(name, expected)),
        },
        _ => Err(fields.wrong(name, expected)),
    }
}

fn regex(fields: Fields<'_>, name: &str, grammars: &GrammarFactory) -> Result<Made, ApiError> {
    Ok(grammars.regex(fields.text(name)?.unwrap_or_default()))
}

fn lark(fields: Fields<'_>, name: &str, grammars: &GrammarFactory) -> Result<Made, ApiError> {
    Ok(grammars.lark(fields.text(name)?.unwrap_or_default()))
}

fn choice(fields: Fields<'_>, name: &str, grammars: &GrammarFactory) -> Result<Made, ApiError> {
    let list = fields.list(name)?.map(Vec::as_slice).unwrap_or_default();
    let texts: Option<Vec<&str>> = list.iter().map(Value::as_str).collect();
    let texts = texts.ok_or_else(|| fields.wrong(name, "a list of strings"))?;
    Ok(grammars.choice(&texts))
}

/// A grammar that cannot be followed, or not now.
fn refuse(error: GrammarError, path: &str) -> ApiError {
    if let GrammarError::Busy { .. } = error {
        let busy = ApiError::new(429, "rate_limit_error", error.to_string());
        return ApiError { retry_after: Some(1), ..busy };
    }
    ApiError::invalid(error.to_string()).at(path)
}

/// The tools of a conversation; `None` where none are declared.
pub fn tools(fields: Fields<'_>, state: &State) -> Result<Option<ToolSet>, ApiError> {
    let parallel = fields.boolean("parallel_tool_calls")?;
    ToolSet::read(fields.get("tools"), fields.get("tool_choice"), parallel, &state.text)
        .map_err(|(path, message)| ApiError::invalid(message).at(path))
}

/// The constraint of a message.
pub fn chat(fields: Fields<'_>, state: &State, tools: Option<&ToolSet>) -> Result<Option<Constraint>, ApiError> {
    let format = format(fields, state)?;
    match tools.filter(|t| *t.choice() != Choice::None) {
        None => Ok(format),
        Some(_) if format.is_some() => {
            let name = FORMATS.iter().copied().find(|name| asks(fields, name)).unwrap_or_default();
            let message = format!("{name} and tools are both given, expected one of them, or tool_choice \"none\"");
            Err(ApiError::invalid(message).at(name))
        }
        Some(_) if fields.boolean("ignore_eos")?.unwrap_or(false) => {
            let message = "ignore_eos is true, expected false where tools may be called";
            Err(ApiError::invalid(message).at("ignore_eos"))
        }
        Some(tools) => tools.constraint(&state.grammars).map_err(|error| refuse(error, "tools")),
    }
}

/// Tells the model about its tools: returns what the template is given as `tools`.
///
/// Templates that know them under another name get that variable, those that know none a system message.
pub fn show<'a>(
    tools: Option<&'a ToolSet>,
    messages: &mut Vec<Value>,
    extra: &mut Map<String, Value>,
) -> Option<&'a Value> {
    let tools = tools.filter(|t| *t.choice() != Choice::None)?;
    match tools.argument() {
        Some("tools") => return Some(tools.shown()),
        Some(name) => {
            extra.insert(name.to_string(), tools.shown().clone());
        }
        None => match messages.first_mut().filter(|m| m["role"] == "system") {
            Some(first) => {
                let text = first["content"].as_str().unwrap_or_default();
                first["content"] = format!("{}\n\n{text}", tools.system_text()).into();
            }
            None => {
                let system = [("role", "system".to_string()), ("content", tools.system_text())];
                let system = system.into_iter().map(|(k, v)| (k.to_string(), v.into())).collect();
                messages.insert(0, Value::Object(system));
            }
        },
    }
    None
}
