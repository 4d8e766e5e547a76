//! Reading `config.json`: typed access, and refusal of what would change the mathematics.

use std::{cell::RefCell, collections::BTreeSet};

use serde_json::{Map, Value};

use crate::spec::Act;

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
    #[error(
        "config.json: {key} {got:?} is not supported by this version (supported: {known}); take a model of one of these, or a later version"
    )]
    ModelType {
        /// `model_type`, where it stands.
        key: String,
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
    /// No layout of heads that we read.
    #[error(
        "no head that this version knows (EAGLE, EAGLE-3, MiMo's prediction layer, Medusa, DFlash) is in it; its tensors \
         show which it is"
    )]
    NoHead,
    /// The sizes contradict each other.
    #[error("config.json: {0}")]
    Spec(String),
}

/// A config that remembers which keys were read.
pub struct Config<'a> {
    map: &'a Map<String, Value>,
    /// Where it stands in config.json: empty, or `text_config.`.
    at: &'a str,
    read: RefCell<BTreeSet<&'a str>>,
    warnings: RefCell<Vec<String>>,
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
    "_name_or_path",
    "original_max_position_embeddings",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "embed_dropout",
    "resid_dropout",
    "classifier_dropout",
    "gradient_checkpointing",
    "cache_implementation",
    "n_ctx",
    "reorder_and_upcast_attn",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "output_router_logits",
    "router_aux_loss_coef",
    "router_jitter_noise",
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
    ("use_mrope", "false"),
    ("no_rope_layers", "null"),
    ("num_local_experts", "null"),
    ("num_experts", "null"),
    ("query_pre_attn_scalar", "null"),
    ("use_qk_norm", "false"),
    ("rope_interleaved", "false"),
    ("add_cross_attention", "false"),
    ("use_bidirectional_attention", "false"),
    ("alibi", "false"),
    ("scale_attn_by_inverse_layer_idx", "false"),
];

/// Largest whole number of a config: the product of two fits 64 bits.
const MOST: u64 = u32::MAX as u64;

impl<'a> Config<'a> {
    /// Wraps an object; `at` says where it stands in config.json.
    pub fn new(value: &'a Value, at: &'a str) -> Result<Self, FamilyError> {
        let map = value.as_object().ok_or(FamilyError::NotObject { got: kind(value) })?;
        Ok(Config { map, at, read: RefCell::default(), warnings: RefCell::default() })
    }

    /// Adds something that the user should know.
    pub fn warn(&self, text: impl Into<String>) {
        self.warnings.borrow_mut().push(text.into());
    }

    /// The error for a key that asks for mathematics this version does not have.
    pub fn unsupported(&self, key: &str, expected: &str, got: impl ToString) -> FamilyError {
        FamilyError::Unsupported { key: format!("{}{key}", self.at), expected: expected.into(), got: got.to_string() }
    }

    /// The error for a key that is missing or is not what it should be.
    pub fn wrong(&self, key: &str, expected: &str, got: Option<&Value>) -> FamilyError {
        let got = got.map_or("nothing".to_string(), |v| v.to_string());
        FamilyError::Key { key: format!("{}{key}", self.at), expected: expected.into(), got }
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
        value.and_then(Value::as_str).ok_or_else(|| self.wrong(key, "a string", value))
    }

    /// A size that must be there, from 1 to 2^32 - 1.
    pub fn size(&self, key: &str) -> Result<usize, FamilyError> {
        self.size_or(key, None)
    }

    /// A size, or `default` when absent.
    pub fn size_or(&self, key: &str, default: Option<usize>) -> Result<usize, FamilyError> {
        match (self.get(key), default) {
            (None, Some(d)) => Ok(d),
            (value, _) => {
                let n = value.and_then(Value::as_u64).filter(|n| (1..=MOST).contains(n));
                let expected = || format!("a whole number from 1 to {MOST}");
                n.map(|n| n as usize).ok_or_else(|| self.wrong(key, &expected(), value))
            }
        }
    }

    /// Whether the key is there, if only with `null`.
    pub fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// A whole number up to 2^32 - 1, or `default` when absent.
    pub fn whole_or(&self, key: &str, default: usize) -> Result<usize, FamilyError> {
        match self.get(key) {
            None => Ok(default),
            Some(v) => {
                let n = v.as_u64().filter(|&n| n <= MOST);
                let expected = || format!("a whole number from 0 to {MOST}");
                n.map(|n| n as usize).ok_or_else(|| self.wrong(key, &expected(), Some(v)))
            }
        }
    }

    /// A list of whole numbers; empty when absent.
    pub fn wholes(&self, key: &str) -> Result<Vec<usize>, FamilyError> {
        let Some(value) = self.get(key) else { return Ok(vec![]) };
        let whole = |v: &Value| v.as_u64().filter(|&n| n <= MOST).map(|n| n as usize);
        let list = value.as_array().and_then(|list| list.iter().map(whole).collect());
        list.ok_or_else(|| self.wrong(key, "a list of whole numbers", Some(value)))
    }

    /// A finite number, or `default` when absent.
    pub fn float_or(&self, key: &str, default: f32) -> Result<f32, FamilyError> {
        match self.get(key) {
            None => Ok(default),
            Some(v) => finite(v).ok_or_else(|| self.wrong(key, "a number that fits 32 bits", Some(v))),
        }
    }

    /// A number, `null` for none, or `default` when absent.
    pub fn float_or_none(&self, key: &str, default: Option<f32>) -> Result<Option<f32>, FamilyError> {
        match self.has(key) {
            false => Ok(default),
            true => self.get(key).map(|_| self.float_or(key, 0.0)).transpose(),
        }
    }

    /// A flag, or `default` when absent.
    pub fn bool_or(&self, key: &str, default: bool) -> Result<bool, FamilyError> {
        match self.get(key) {
            None => Ok(default),
            Some(v) => v.as_bool().ok_or_else(|| self.wrong(key, "true or false", Some(v))),
        }
    }

    /// A list of `len` or more strings, of which the first `len` count; `None` when absent.
    pub fn strings(&self, key: &str, len: usize) -> Result<Option<Vec<&'a str>>, FamilyError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let list = value.as_array().filter(|l| l.len() >= len);
        let list = list.and_then(|l| l[..len].iter().map(Value::as_str).collect());
        list.map(Some).ok_or_else(|| self.wrong(key, &format!("a list of {len} strings"), Some(value)))
    }

    /// An activation by the name that transformers gives it; `usual` when absent.
    pub fn act(&self, key: &str, usual: Act) -> Result<Act, FamilyError> {
        match self.get(key).map_or(Ok(None), |_| self.str(key).map(Some))? {
            None => Ok(usual),
            Some("silu" | "swish") => Ok(Act::Silu),
            Some("gelu") => Ok(Act::Gelu),
            Some("gelu_new" | "gelu_pytorch_tanh" | "gelu_fast") => Ok(Act::GeluTanh),
            Some(other) => Err(self.unsupported(key, "silu, gelu or gelu_new", format!("{other:?}"))),
        }
    }

    /// Checks what the family did not read: neutral values of known mechanisms pass, others are
    /// errors; keys nobody knows are returned as warnings.
    pub fn finish(&self) -> Result<Vec<String>, FamilyError> {
        let read = self.read.borrow();
        let mut warnings = self.warnings.take();
        for (key, value) in self.map {
            if read.contains(key.as_str()) || value.is_null() || key.starts_with('_') {
                continue;
            }
            if let Some((_, neutral)) = NEUTRAL.iter().find(|(k, _)| k == key) {
                let same = serde_json::from_str::<Value>(neutral)
                    .is_ok_and(|n| n == *value || (n.is_number() && n.as_f64() == value.as_f64()));
                if !same {
                    return Err(self.unsupported(key, neutral, value));
                }
            } else if key == "layer_types" {
                let plain = |v: &Value| v.as_str() == Some("full_attention");
                if !value.as_array().is_some_and(|all| all.iter().all(plain)) {
                    return Err(self.unsupported(key, "full_attention in every layer", value));
                }
            } else if !HARMLESS.contains(&key.as_str()) {
                let at = self.at;
                warnings.push(format!("config.json: {at}{key} is not known to this version and was not used"));
            }
        }
        Ok(warnings)
    }
}

/// A number as f32, unless it is too large for one.
pub(super) fn finite(v: &Value) -> Option<f32> {
    v.as_f64().map(|x| x as f32).filter(|x| x.is_finite())
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
