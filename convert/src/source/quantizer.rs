//! What a quantizer says in config.json and in a file of its own (`quantize_config.json`, `quant_config.json`).
//!
//! transformers reads config.json, older tools the file. Where both stand they must not contradict each other in what
//! changes the numbers, and what only one of them says counts.

use serde_json::Value;

use crate::import::config::{BITS, FORMAT, GROUP};

/// The object in config.json, also in the text part of a multimodal model's; one that is null says nothing.
pub fn inside(config: &Value) -> Option<&Value> {
    let places =
        ["", "/text_config", "/language_config", "/llm_config", "/thinker_config", "/thinker_config/text_config"];
    let keys = ["quantization_config", "compression_config"];
    let all = places.iter().filter_map(|place| config.pointer(place));
    all.flat_map(|at| keys.iter().filter_map(|key| at.get(key))).find(|v| !v.is_null())
}

/// What the two say differently.
#[derive(Debug, PartialEq)]
pub struct Different {
    /// The setting.
    pub what: &'static str,
    /// Its value in config.json.
    pub config: String,
    /// Its value in the other file.
    pub own: String,
}

/// Both in one: a key of `config` counts, and what only `own` has is added.
pub fn both(config: &Value, own: &Value) -> Result<Value, Different> {
    let settings = [("bits", bits as fn(&Value) -> _), ("group_size", group), ("sym", sym), ("format", format)];
    for (what, read) in settings {
        if let (Some(config), Some(own)) = (read(config), read(own))
            && config != own
        {
            return Err(Different { what, config: config.to_string(), own: own.to_string() });
        }
    }
    let mut all = config.clone();
    if let (Some(all), Some(own)) = (all.as_object_mut(), own.as_object()) {
        for (key, value) in own {
            if all.get(key).is_none_or(Value::is_null) {
                all.insert(key.clone(), value.clone());
            }
        }
    }
    Ok(all)
}

/// The first of several spellings that says something.
fn any<'a>(from: &'a Value, keys: &[&str]) -> Option<&'a Value> {
    keys.iter().find_map(|key| from.get(key).filter(|v| !v.is_null() && v.as_str() != Some("")))
}

fn bits(from: &Value) -> Option<Value> {
    any(from, BITS).cloned()
}

/// Any size below one is one group per row.
fn group(from: &Value) -> Option<Value> {
    any(from, GROUP).map(|g| if g.as_i64().is_some_and(|g| g < 1) { (-1).into() } else { g.clone() })
}

fn sym(from: &Value) -> Option<Value> {
    any(from, &["sym"]).cloned().or_else(|| any(from, &["zero_point"])?.as_bool().map(|z| (!z).into()))
}

fn format(from: &Value) -> Option<Value> {
    let name = any(from, FORMAT)?;
    Some(match name.as_str().map(str::to_lowercase) {
        // Two names of one order.
        Some(name) if name == "llm-awq" => "gemv_fast".into(),
        Some(name) => name.into(),
        None => name.clone(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn nulls_hide_nothing() {
        let said = json!({ "bits": 4 });
        for config in [
            json!({ "quantization_config": said }),
            json!({ "quantization_config": null, "compression_config": said }),
            json!({ "quantization_config": null, "text_config": { "quantization_config": said } }),
            json!({ "text_config": null, "llm_config": { "quantization_config": said } }),
            json!({ "text_config": { "quantization_config": null }, "language_config": { "compression_config": said } }),
            json!({ "thinker_config": { "quantization_config": null, "text_config": { "quantization_config": said } } }),
        ] {
            assert_eq!(inside(&config), Some(&said), "{config}");
        }
        assert_eq!(inside(&json!({ "quantization_config": null, "text_config": {} })), None);
    }

    #[test]
    fn two_configs_must_agree_and_complete_each_other() {
        let config = json!({ "bits": 4, "group_size": -1, "sym": null, "checkpoint_format": "gptq_v2" });
        let own = json!({ "w_bit": 4, "q_group_size": 0, "zero_point": true, "desc_act": true, "format": "GPTQ_V2" });
        let all = both(&config, &own).unwrap();
        assert_eq!((&all["checkpoint_format"], &all["zero_point"]), (&"gptq_v2".into(), &true.into()));
        assert_eq!(all["desc_act"], true);
        let agree = |a: Value, b: Value| assert!(both(&a, &b).is_ok(), "{a} {b}");
        agree(json!({ "format": "gemv_fast", "sym": false }), json!({ "version": "llm-awq", "zero_point": true }));
        agree(json!({ "format": "gptq", "sym": true }), json!([]));
        for (what, a, b) in [
            ("bits", json!({ "bits": 4 }), json!({ "wbits": 3 })),
            ("group_size", json!({ "group_size": -1 }), json!({ "q_group_size": 128 })),
            ("sym", json!({ "sym": true }), json!({ "zero_point": true })),
            ("format", json!({ "checkpoint_format": "gptq" }), json!({ "format": "gptq_v2" })),
        ] {
            assert_eq!(both(&a, &b).unwrap_err().what, what);
            assert_eq!(both(&b, &a).unwrap_err().what, what);
        }
    }
}
