//! What an answer may be: `response_format`, `tools` and the fields of other servers for the same.

use serde_json::Value;

use super::fields::Fields;
use crate::{
    engine::Constraint,
    server::{ApiError, State},
};

/// Tools that the model may call.
#[derive(Debug, Default)]
pub struct Tools {
    shown: Option<Value>,
}

impl Tools {
    /// What the template is told.
    pub fn shown(&self) -> Option<&Value> {
        self.shown.as_ref()
    }
}

/// Fields of which nothing is supported.
const LATER: &[&str] = &[
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
pub fn format(fields: Fields<'_>, _state: &State) -> Result<Option<Constraint>, ApiError> {
    if fields.get("response_format").is_some_and(|f| f["type"] == "text") {
        return Ok(None);
    }
    match fields.any(LATER) {
        Some(name) => Err(ApiError::invalid(format!("{name} is not supported yet")).at(name)),
        None => Ok(None),
    }
}

/// The constraint of a message.
pub fn chat(fields: Fields<'_>, state: &State, _tools: &Tools) -> Result<Option<Constraint>, ApiError> {
    format(fields, state)
}

/// Reads the tools.
pub fn tools(fields: Fields<'_>) -> Result<Tools, ApiError> {
    match fields.list("tools")? {
        None => Ok(Tools::default()),
        Some(list) if list.is_empty() => Ok(Tools::default()),
        Some(_) => Err(ApiError::invalid("tools is not supported yet").at("tools")),
    }
}
