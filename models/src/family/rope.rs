//! Reading a rotary embedding: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`.
//!
//! Reference: transformers `modeling_rope_utils.py`.

use serde_json::{Map, Value};

use super::{Config, FamilyError, config::finite};
use crate::spec::{Rope, RopeScaling};

/// Keys of a rope table that are known; others are reported.
const ROPE_KEYS: &[&str] = &[
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "mrope_section",
    "mrope_interleaved",
    "max_position_embeddings",
    "finetuned",
];

/// A config's rope, and the longest sequence it is good for.
///
/// `theta` is the family's base where none is given, `context` its `max_position_embeddings`.
pub(super) fn read(config: &Config, theta: f32, context: usize) -> Result<(Rope, usize), FamilyError> {
    let found = ["rope_parameters", "rope_scaling"].map(|key| config.get(key).map(|v| (key, v)));
    let theta = config.float_or("rope_theta", theta)?;
    let [new, old] = found;
    // Where tables and the key beside them disagree, the old table counts before the new, and a table before the key:
    // `convert_rope_params_to_dict` of transformers 5.
    let old = old.filter(|(_, v)| v.as_object().is_none_or(|o| !o.is_empty()));
    let Some((key, value)) = old.or(new) else {
        return Ok((Rope { theta, scaling: RopeScaling::None }, context));
    };
    let map = value.as_object().ok_or_else(|| config.wrong(key, "an object", Some(value)))?;
    Table { config, key, map }.read(theta, context)
}

/// The ropes of layers that see everything and of those that see a window, each by its table in `rope_parameters`, or
/// `rope_scaling` and `rope_theta` for the first and `rope_local_base_freq` for the second; and the longest sequence.
///
/// `thetas` are the family's bases, of all layers and of those with a window. Reference: `convert_rope_params_to_dict`
/// of transformers' `configuration_gemma3.py`.
pub(super) fn by_type(config: &Config, thetas: [f32; 2], context: usize) -> Result<([Rope; 2], usize), FamilyError> {
    const NEW: [(&str, &str); 2] = [
        ("full_attention", "rope_parameters.full_attention"),
        ("sliding_attention", "rope_parameters.sliding_attention"),
    ];
    let thetas = [config.float_or("rope_theta", thetas[0])?, config.float_or("rope_local_base_freq", thetas[1])?];
    let new = config.get("rope_parameters");
    let tables = NEW.map(|(name, _)| new.and_then(|v| v.get(name)).filter(|v| !v.is_null()));
    if new.is_some_and(|v| !v.is_object()) || new.is_some() && tables == [None, None] {
        return Err(config.wrong("rope_parameters", "a table for each of full_attention and sliding_attention", new));
    }
    let old = config.get("rope_scaling").filter(|v| v.as_object().is_none_or(|o| !o.is_empty()));
    let mut most = context;
    let mut read = |i: usize| {
        let (key, theta) = (NEW[i].1, thetas[i]);
        let object =
            |key: &str, v: &'_ Value| v.as_object().cloned().ok_or_else(|| config.wrong(key, "an object", Some(v)));
        let mut map = tables[i].map_or(Ok(Map::new()), |v| object(key, v))?;
        if let Some(old) = old.filter(|_| i == 0) {
            map.extend(object("rope_scaling", old)?);
        }
        let (rope, longest) = Table { config, key, map: &map }.read(theta, context)?;
        most = most.max(longest);
        Ok(rope)
    };
    Ok(([read(0)?, read(1)?], most))
}

struct Table<'a, 'b> {
    config: &'b Config<'a>,
    key: &'static str,
    map: &'b Map<String, Value>,
}

impl<'b> Table<'_, 'b> {
    /// A rope, and the longest sequence it is good for.
    fn read(&self, theta: f32, context: usize) -> Result<(Rope, usize), FamilyError> {
        let (config, key) = (self.config, self.key);
        let theta = self.number("rope_theta", Some(theta))?;
        let original = match config.get("original_max_position_embeddings") {
            Some(_) => config.size("original_max_position_embeddings")?,
            None => self.number("original_max_position_embeddings", Some(context as f32))? as usize,
        };
        let mut most = context;
        let scaling = match self.kind()? {
            // Text has the same position in all of mrope's sections, so it is turned as without them.
            "default" | "mrope" => RopeScaling::None,
            "linear" => RopeScaling::Linear { factor: self.number("factor", None)? },
            // Beyond the trained context, the base follows the length of the sequence so far: a token's key then depends
            // on when it was computed, and a cache or a chunk would change the result. Up to there it is plain rope.
            "dynamic" => {
                config.warn(format!(
                    "config.json: {key}: dynamic scaling is not used, so the context ends at the {context} tokens that \
                     need none"
                ));
                RopeScaling::None
            }
            "llama3" => RopeScaling::Llama3 {
                factor: self.number("factor", None)?,
                low_freq_factor: self.number("low_freq_factor", None)?,
                high_freq_factor: self.number("high_freq_factor", None)?,
                original_context: original,
            },
            "yarn" => {
                let factor = self.number("factor", Some(context as f32 / original as f32))?;
                most = context.max((original as f64 * factor as f64) as usize);
                RopeScaling::Yarn {
                    factor,
                    beta_fast: self.positive("beta_fast", 32.0)?,
                    beta_slow: self.positive("beta_slow", 1.0)?,
                    original_context: original,
                    attention_factor: self.attention_factor(factor)?,
                    truncate: self.flag("truncate", true)?,
                }
            }
            other => {
                let expected = "default, linear, dynamic, llama3 or yarn";
                return Err(config.unsupported(&format!("{key}.rope_type"), expected, format!("{other:?}")));
            }
        };
        self.finish()?;
        Ok((Rope { theta, scaling }, most))
    }

    fn get(&self, name: &str) -> Option<&'b Value> {
        self.map.get(name).filter(|v| !v.is_null())
    }

    fn wrong(&self, name: &str, expected: &str) -> FamilyError {
        self.config.wrong(&format!("{}.{name}", self.key), expected, self.get(name))
    }

    fn number(&self, name: &str, default: Option<f32>) -> Result<f32, FamilyError> {
        match (self.get(name).map(finite), default) {
            (Some(Some(n)), _) => Ok(n),
            (None, Some(d)) => Ok(d),
            _ => Err(self.wrong(name, "a number that fits 32 bits")),
        }
    }

    /// A number of which 0 means the default.
    fn positive(&self, name: &str, default: f32) -> Result<f32, FamilyError> {
        let n = self.number(name, Some(default))?;
        Ok(if n == 0.0 { default } else { n })
    }

    fn flag(&self, name: &str, default: bool) -> Result<bool, FamilyError> {
        let value = self.get(name).map_or(Some(default), Value::as_bool);
        value.ok_or_else(|| self.wrong(name, "true or false"))
    }

    fn kind(&self) -> Result<&'b str, FamilyError> {
        match ["rope_type", "type"].iter().find_map(|k| self.get(k)) {
            None if self.map.contains_key("factor") => Err(self.wrong("rope_type", "a string")),
            None => Ok("default"),
            Some(v) => {
                v.as_str().ok_or_else(|| self.config.wrong(&format!("{}.rope_type", self.key), "a string", Some(v)))
            }
        }
    }

    /// YaRN's factor on cosines and sines.
    fn attention_factor(&self, factor: f32) -> Result<f32, FamilyError> {
        let mscale = |m: f32| if factor <= 1.0 { 1.0 } else { 0.1 * m as f64 * (factor as f64).ln() + 1.0 };
        let (all, one) = (self.number("mscale_all_dim", Some(0.0))?, self.number("mscale", Some(0.0))?);
        let usual = if one != 0.0 && all != 0.0 { mscale(one) / mscale(all) } else { mscale(1.0) };
        self.number("attention_factor", Some(usual as f32))
    }

    /// Refuses what would change the mathematics; what nobody knows is a warning.
    fn finish(&self) -> Result<(), FamilyError> {
        let (config, key) = (self.config, self.key);
        if let Some(part) = self.get("partial_rotary_factor").filter(|v| v.as_f64() != Some(1.0)) {
            return Err(config.unsupported(&format!("{key}.partial_rotary_factor"), "1.0", part));
        }
        for (name, value) in self.map.iter().filter(|(_, v)| !v.is_null()) {
            if value.is_object() {
                return Err(config.unsupported(&format!("{key}.{name}"), "one rope for all layers", value));
            }
            if !ROPE_KEYS.contains(&name.as_str()) {
                config.warn(format!("config.json: {key}.{name} is not known to this version and was not used"));
            }
        }
        Ok(())
    }
}
