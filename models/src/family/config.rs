//! Reading `config.json`: typed access, and refusal of what would change the mathematics.

use std::{cell::RefCell, collections::BTreeSet};

use serde_json::{Map, Value};

use crate::spec::{Rope, RopeScaling};

/// Why a config cannot be turned into a spec.
#[derive(Debug, thiserror::Error)]
pub enum FamilyError {
    /// Not an object.
    #[error("config.json: expected an object, got {got}")]
    NotObject {
        /// What it was.
        got: &'static str,
    },
    /// A family we do not read.
    #[error("config.json: model_type {got:?} is not supported by this version (supported: {known})")]
    ModelType {
        /// Family found.
        got: String,
        /// Families known.
        known: String,
    },
    /// A key is missing or has the wrong type.
    #[error("config.json: {key}: expected {expected}, got {got}")]
    Key {
        /// Key concerned.
        key: String,
        /// What would be right.
        expected: String,
        /// What was found.
        got: String,
    },
    /// A key asks for mathematics this version does not have.
    #[error(
        "config.json: {key} is {got}, this version can run only {expected}; the model would compute something else"
    )]
    Unsupported {
        /// Key concerned.
        key: String,
        /// What this version runs.
        expected: String,
        /// What was found.
        got: String,
    },
    /// The sizes contradict each other.
    #[error("config.json: {0}")]
    Spec(String),
}

/// A config that remembers which keys were read.
pub struct Config<'a> {
    map: &'a Map<String, Value>,
    read: RefCell<BTreeSet<&'a str>>,
}

/// Keys that change nothing in a forward pass, of any family. What a family reads does not belong here.
const HARMLESS: &[&str] = &[
    "architectures",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "is_llama_config",
    "model_type",
    "pad_token_id",
    "pretraining_tp",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
    "transformers.js_config",
    "unk_token_id",
    "use_cache",
    "attention_dropout",
    "hidden_dropout",
    "name_or_path",
    "unsloth_version",
    "unsloth_fixed",
    "task_specific_params",
    "id2label",
    "label2id",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "max_length",
    "temperature",
    "top_p",
    "top_k",
    "do_sample",
    "repetition_penalty",
    "chunk_size_feed_forward",
    "is_encoder_decoder",
    "is_decoder",
    "num_beams",
    "problem_type",
    "tokenizer_class",
];

/// Keys of other mechanisms and the one value under which they change nothing.
const NEUTRAL: &[(&str, &str)] = &[
    ("attention_bias", "false"),
    ("mlp_bias", "false"),
    ("qkv_bias", "false"),
    ("use_bias", "false"),
    ("partial_rotary_factor", "1.0"),
    ("sliding_window", "null"),
    ("use_sliding_window", "false"),
    ("attn_logit_softcapping", "null"),
    ("final_logit_softcapping", "null"),
    ("logit_scale", "1.0"),
    ("embedding_multiplier", "1.0"),
    ("residual_multiplier", "1.0"),
    ("attention_multiplier", "null"),
    ("logits_scaling", "1.0"),
    ("no_rope_layers", "null"),
    ("num_local_experts", "null"),
    ("num_experts", "null"),
    ("query_pre_attn_scalar", "null"),
    ("use_qk_norm", "false"),
    ("rope_interleaved", "false"),
];

impl<'a> Config<'a> {
    /// Wraps a parsed `config.json`.
    pub fn new(value: &'a Value) -> Result<Self, FamilyError> {
        let map = value.as_object().ok_or(FamilyError::NotObject { got: kind(value) })?;
        Ok(Config { map, read: RefCell::default() })
    }

    /// A key's value; `null` counts as absent.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        let (key, value) = self.map.get_key_value(key)?;
        self.read.borrow_mut().insert(key);
        Some(value).filter(|v| !v.is_null())
    }

    /// A string that must be there.
    pub fn str(&self, key: &str) -> Result<&'a str, FamilyError> {
        let value = self.get(key);
        value.and_then(Value::as_str).ok_or_else(|| wrong(key, "a string", value))
    }

    /// A size that must be there, at least 1.
    pub fn size(&self, key: &str) -> Result<usize, FamilyError> {
        self.size_or(key, None)
    }

    /// A size, or `default` when absent.
    pub fn size_or(&self, key: &str, default: Option<usize>) -> Result<usize, FamilyError> {
        match (self.get(key), default) {
            (None, Some(d)) => Ok(d),
            (value, _) => {
                let n = value.and_then(Value::as_u64).filter(|&n| n > 0 && n <= u32::MAX as u64);
                n.map(|n| n as usize).ok_or_else(|| wrong(key, "a whole number of at least 1", value))
            }
        }
    }

    /// A finite number, or `default` when absent.
    pub fn float_or(&self, key: &str, default: f32) -> Result<f32, FamilyError> {
        match self.get(key) {
            None => Ok(default),
            Some(v) => finite(v).ok_or_else(|| wrong(key, "a number that fits 32 bits", Some(v))),
        }
    }

    /// A flag, or `default` when absent.
    pub fn bool_or(&self, key: &str, default: bool) -> Result<bool, FamilyError> {
        match self.get(key) {
            None => Ok(default),
            Some(v) => v.as_bool().ok_or_else(|| wrong(key, "true or false", Some(v))),
        }
    }

    /// Rotary embedding from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`.
    pub fn rope(&self) -> Result<Rope, FamilyError> {
        let (key, table) = match (self.get("rope_parameters"), self.get("rope_scaling")) {
            (Some(v), _) => {
                ("rope_parameters", v.as_object().ok_or_else(|| wrong("rope_parameters", "an object", Some(v)))?)
            }
            (None, Some(v)) => {
                ("rope_scaling", v.as_object().ok_or_else(|| wrong("rope_scaling", "an object", Some(v)))?)
            }
            (None, None) => {
                return Ok(Rope { theta: self.float_or("rope_theta", 10000.0)?, scaling: RopeScaling::None });
            }
        };
        let number = |name: &str, default: Option<f32>| {
            let value = table.get(name).filter(|v| !v.is_null());
            match (value.map(finite), default) {
                (Some(Some(n)), _) => Ok(n),
                (None, Some(d)) => Ok(d),
                _ => Err(wrong(&format!("{key}.{name}"), "a number that fits 32 bits", value)),
            }
        };
        let theta = match self.get("rope_theta") {
            Some(_) => self.float_or("rope_theta", 10000.0)?,
            None => number("rope_theta", Some(10000.0))?,
        };
        let named = ["rope_type", "type"].iter().find_map(|k| table.get(*k).filter(|v| !v.is_null()));
        let kind = match named {
            None if table.contains_key("factor") => return Err(wrong(&format!("{key}.rope_type"), "a string", None)),
            None => "default",
            Some(v) => v.as_str().ok_or_else(|| wrong(&format!("{key}.rope_type"), "a string", Some(v)))?,
        };
        let scaling = match kind {
            "default" => RopeScaling::None,
            "linear" => RopeScaling::Linear { factor: number("factor", None)? },
            "llama3" => RopeScaling::Llama3 {
                factor: number("factor", None)?,
                low_freq_factor: number("low_freq_factor", None)?,
                high_freq_factor: number("high_freq_factor", None)?,
                original_context: number("original_max_position_embeddings", None)? as usize,
            },
            other => {
                return Err(FamilyError::Unsupported {
                    key: format!("{key}.rope_type"),
                    expected: "default, linear or llama3".into(),
                    got: format!("{other:?}"),
                });
            }
        };
        if table.get("partial_rotary_factor").and_then(Value::as_f64).is_some_and(|f| f != 1.0) {
            return Err(FamilyError::Unsupported {
                key: format!("{key}.partial_rotary_factor"),
                expected: "1.0".into(),
                got: table["partial_rotary_factor"].to_string(),
            });
        }
        Ok(Rope { theta, scaling })
    }

    /// Checks what the family did not read: neutral values of known mechanisms pass, others are
    /// errors; keys nobody knows are returned as warnings.
    pub fn finish(&self) -> Result<Vec<String>, FamilyError> {
        let read = self.read.borrow();
        let mut warnings = vec![];
        for (key, value) in self.map {
            if read.contains(key.as_str()) || value.is_null() || key.starts_with('_') {
                continue;
            }
            if let Some((_, neutral)) = NEUTRAL.iter().find(|(k, _)| k == key) {
                let same = serde_json::from_str::<Value>(neutral)
                    .is_ok_and(|n| n == *value || (n.is_number() && n.as_f64() == value.as_f64()));
                if !same {
                    let (key, expected) = (key.clone(), neutral.to_string());
                    return Err(FamilyError::Unsupported { key, expected, got: value.to_string() });
                }
            } else if !HARMLESS.contains(&key.as_str()) {
                warnings.push(format!("config.json: {key} is not known to this version and was not used"));
            }
        }
        Ok(warnings)
    }
}

/// A number as f32, unless it is too large for one.
fn finite(v: &Value) -> Option<f32> {
    v.as_f64().map(|x| x as f32).filter(|x| x.is_finite())
}

fn wrong(key: &str, expected: &str, got: Option<&Value>) -> FamilyError {
    let got = got.map_or("nothing".to_string(), |v| v.to_string());
    FamilyError::Key { key: key.into(), expected: expected.into(), got }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a flag",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
