//! What an answer may be: `response_format`, the fields of llama-server and vLLM for the same, and tools.

use serde_json::{Map, Value, json};
use tokio::sync::oneshot;

use super::{fields::Fields, run::server_error};
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

/// A constraint to be made. Compiling takes its time, and its turn: one grammar after the other.
pub struct Form {
    path: String,
    make: Make,
    /// The schema, where it is one.
    schema: Option<Value>,
}

type Make = Box<dyn FnOnce(&GrammarFactory) -> Result<Option<Constraint>, GrammarError> + Send>;

impl Form {
    fn new(path: impl Into<String>, make: Make) -> Form {
        Form { path: path.into(), make, schema: None }
    }

    /// JSON of a schema.
    fn json(path: impl Into<String>, schema: Value) -> Form {
        let own = schema.clone();
        let make: Make = Box::new(move |grammars| grammars.json_schema(&own).map(Some));
        Form { schema: Some(schema), ..Form::new(path, make) }
    }

    /// Makes it on a thread of its own, so that whoever waits for a compiler keeps nobody's request from being read.
    pub async fn made(self, grammars: &GrammarFactory) -> Result<Option<Constraint>, ApiError> {
        let (sender, receiver) = oneshot::channel();
        let (Form { path, make, .. }, grammars) = (self, grammars.clone());
        let work = move || drop(sender.send(make(&grammars).map_err(|error| refuse(error, &path))));
        let spawned = std::thread::Builder::new().name("form".into()).spawn(work);
        spawned.map_err(|e| server_error(format!("no thread to read the grammar: {e}")))?;
        receiver.await.map_err(|_| server_error("the grammar could not be read: an error of the server"))?
    }
}

impl std::fmt::Debug for Form {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Form({})", self.path)
    }
}

/// The constraint of a text.
pub fn format(fields: Fields<'_>) -> Result<Option<Form>, ApiError> {
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
    let make = match name {
        "response_format" => return response_format(fields),
        "structured_outputs" => return structured(fields),
        "grammar" | "guided_grammar" => lark(fields, name)?,
        "guided_regex" => regex(fields, name)?,
        "guided_choice" => choice(fields, name)?,
        _ => return Ok(Some(Form::json(name, schema(fields, name)?))),
    };
    Ok(Some(Form::new(name, make)))
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

/// Text or an object; OpenAI's `json_schema` holds the schema, llama-server's `json_object` may have one beside it.
fn response_format(fields: Fields<'_>) -> Result<Option<Form>, ApiError> {
    let Some(map) = fields.object("response_format")? else { return Ok(None) };
    let format = Fields::inside(map, "response_format.");
    let (path, schema) = match format.text("type")? {
        Some("json_object") => match format.object("schema")? {
            None => ("response_format", json!({"type": "object"})),
            Some(_) => ("response_format.schema", schema(format, "schema")?),
        },
        Some("json_schema") => match format.object("json_schema")? {
            None => return Err(format.wrong("json_schema", "an object with a schema")),
            Some(inner) => {
                let inner = Fields::inside(inner, "response_format.json_schema.");
                ("response_format.json_schema.schema", schema(inner, "schema")?)
            }
        },
        _ => return Err(format.wrong("type", "text, json_object or json_schema")),
    };
    Ok(Some(Form::json(path, schema)))
}

/// vLLM's: exactly one of its fields.
fn structured(fields: Fields<'_>) -> Result<Option<Form>, ApiError> {
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
    let make = match field {
        "json" => return Ok(Some(Form::json(given.path(field), schema(given, field)?))),
        "regex" => regex(given, field)?,
        "choice" => choice(given, field)?,
        "grammar" => lark(given, field)?,
        _ if given.boolean(field)? == Some(true) => {
            return Ok(Some(Form::json(given.path(field), json!({"type": "object"}))));
        }
        _ => return Err(given.wrong(field, "true")),
    };
    Ok(Some(Form::new(given.path(field), make)))
}

/// A schema, as an object or as its JSON text.
fn schema(fields: Fields<'_>, name: &str) -> Result<Value, ApiError> {
    let expected = "a JSON schema: an object, or its text";
    match fields.get(name) {
        Some(value @ (Value::Object(_) | Value::Bool(_))) => Ok(value.clone()),
        Some(Value::String(text)) => match serde_json::from_str(text) {
            Ok(value @ Value::Object(_)) => Ok(value),
            _ => Err(fields.wrong(name, expected)),
        },
        _ => Err(fields.wrong(name, expected)),
    }
}

fn regex(fields: Fields<'_>, name: &str) -> Result<Make, ApiError> {
    let text = fields.text(name)?.unwrap_or_default().to_string();
    Ok(Box::new(move |grammars| grammars.regex(&text).map(Some)))
}

fn lark(fields: Fields<'_>, name: &str) -> Result<Make, ApiError> {
    let text = fields.text(name)?.unwrap_or_default().to_string();
    Ok(Box::new(move |grammars| grammars.lark(&text).map(Some)))
}

fn choice(fields: Fields<'_>, name: &str) -> Result<Make, ApiError> {
    let list = fields.list(name)?.map(Vec::as_slice).unwrap_or_default();
    let texts: Option<Vec<String>> = list.iter().map(|text| text.as_str().map(str::to_string)).collect();
    let texts = texts.ok_or_else(|| fields.wrong(name, "a list of strings"))?;
    Ok(Box::new(move |grammars| grammars.choice(&texts).map(Some)))
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
pub fn chat(fields: Fields<'_>, tools: Option<&ToolSet>) -> Result<Option<Form>, ApiError> {
    let format = format(fields)?;
    match tools.filter(|t| *t.choice() != Choice::None) {
        None => Ok(format),
        Some(_) if format.as_ref().is_some_and(|form| form.schema.is_none()) => {
            let name = FORMATS.iter().copied().find(|name| asks(fields, name)).unwrap_or_default();
            let message = format!(
                "{name} and tools are both given, expected one of them, a JSON schema, or tool_choice \"none\""
            );
            Err(ApiError::invalid(message).at(name))
        }
        Some(_) if fields.boolean("ignore_eos")?.unwrap_or(false) => {
            let message = "ignore_eos is true, expected false where tools may be called";
            Err(ApiError::invalid(message).at("ignore_eos"))
        }
        Some(tools) => {
            // As OpenAI does: what is no call is JSON of the schema. Where calls are required, nothing else is.
            let (tools, answer) = (tools.clone(), format.and_then(|form| form.schema));
            Ok(Some(Form::new("tools", Box::new(move |grammars| tools.constraint(grammars, answer.as_ref())))))
        }
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
