//! What the configs of compressed-tensors, FP8 and ModelOpt checkpoints say: claims to check against, and refusals.

use serde_json::Value;

use crate::ConvertError;

/// Claims about the quantized modules of a checkpoint; what differs between modules is not claimed.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Claims {
    /// File they stand in.
    pub file: String,
    /// Bits of the integers, of any module; empty if nothing is said.
    pub bits: Vec<u64>,
    /// Columns of a group.
    pub group: Option<usize>,
    /// Rows and columns of a block.
    pub block: Option<[usize; 2]>,
    /// What shares a scale: `tensor`, `channel`, `group`, `block`, ...
    pub strategy: Option<String>,
    /// Zero is in the middle.
    pub symmetric: Option<bool>,
    /// Activations are to be quantized.
    pub activations: bool,
    /// Keys and values are to be quantized.
    pub cache: bool,
}

impl Claims {
    /// Reads a config; refuses what the weights alone do not show.
    pub fn new(file: &str, config: &Value) -> Result<Claims, ConvertError> {
        let refuse = |found: String, next: &str| {
            Err(ConvertError::unsupported(format!("{file}: quantization format {found}"), next))
        };
        let groups: Vec<&Value> =
            config.get("config_groups").and_then(Value::as_object).map(|g| g.values().collect()).unwrap_or_default();
        let formats = groups.iter().chain([&config]).filter_map(|g| text(g, "format"));
        let sparsity = config.get("sparsity_config").and_then(|s| text(s, "format"));
        for name in formats.chain(sparsity) {
            if ["sparse", "marlin"].iter().any(|p| name.contains(p)) {
                return refuse(format!("{name}, with weights left out"), DENSE);
            }
        }
        if config.get("transform_config").is_some_and(transforms) {
            return refuse("with transform_config, rotations at run time".into(), DENSE);
        }
        let weights: Vec<&Value> = groups.iter().filter_map(|g| g.get("weights")).filter(|w| !w.is_null()).collect();
        let integer = |w: &&&Value| text(w, "type").is_none_or(|t| t == "int");
        let mut bits: Vec<u64> =
            weights.iter().filter(integer).filter_map(|w| w.get("num_bits").and_then(Value::as_u64)).collect();
        bits.sort_unstable();
        bits.dedup();
        let size = |v: &Value| v.as_u64().and_then(|v| usize::try_from(v).ok()).filter(|&v| v > 0);
        let pair = |v: Option<&Value>| match v.and_then(Value::as_array).map(Vec::as_slice) {
            Some([a, b]) => Some([size(a)?, size(b)?]),
            // "128x128", as early versions write it.
            _ => {
                let (a, b) = v?.as_str()?.split_once('x')?;
                Some([a.parse().ok().filter(|&a| a > 0)?, b.parse().ok().filter(|&b| b > 0)?])
            }
        };
        // Where the method is "fp8", a size that is not written is the default of transformers' FineGrainedFP8Config.
        let fp8 = ["quant_method", "method", "quantization_method"].iter().find_map(|k| text(config, k));
        let block = match config.get("weight_block_size") {
            None if fp8.as_deref() == Some("fp8") => Some([128, 128]),
            said => pair(said),
        };
        let groups_of = |key: &str| groups.iter().any(|g| g.get(key).is_some_and(|v| !v.is_null()));
        let dynamic = text(config, "activation_scheme").is_some();
        Ok(Claims {
            file: file.into(),
            bits,
            group: same(weights.iter().map(|w| w.get("group_size").and_then(size))),
            // Groups without one have scales a row or a tensor, which their shape tells.
            block: block.or(same(weights.iter().filter_map(|w| pair(w.get("block_structure"))).map(Some))),
            strategy: same(weights.iter().map(|w| text(w, "strategy"))),
            symmetric: same(weights.iter().map(|w| w.get("symmetric").and_then(Value::as_bool))),
            activations: groups_of("input_activations") || groups_of("output_activations") || dynamic,
            cache: ["kv_cache_scheme", "kv_cache_quant_algo"]
                .iter()
                .any(|k| config.get(k).is_some_and(|v| !v.is_null())),
        })
    }
}

const DENSE: &str = "take a dense version without such transforms, or convert the float checkpoint with --quant int4";

fn text(value: &Value, key: &str) -> Option<String> {
    value.get(key).and_then(Value::as_str).map(str::to_lowercase)
}

/// Whether a transform_config asks for anything.
fn transforms(config: &Value) -> bool {
    match config {
        Value::Object(o) => {
            o.get("config_groups").unwrap_or(config).as_object().is_none_or(|groups| !groups.is_empty())
        }
        other => !other.is_null(),
    }
}

/// What all say, if they say the same.
fn same<T: PartialEq>(mut all: impl Iterator<Item = Option<T>>) -> Option<T> {
    let first = all.next()??;
    all.all(|other| other.as_ref() == Some(&first)).then_some(first)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn claims(config: Value) -> Result<Claims, String> {
        Claims::new("config.json", &config).map_err(|e| e.to_string())
    }

    #[test]
    fn groups_that_agree_are_a_claim() {
        let group = |bits: u64, size: i64, activations: Value| {
            json!({
                "targets": ["Linear"], "input_activations": activations,
                "weights": {"num_bits": bits, "type": "int", "symmetric": true, "group_size": size}
            })
        };
        let one = claims(json!({ "format": "pack-quantized", "sparsity_config": {}, "transform_config": {},
            "config_groups": {"group_0": group(4, 128, Value::Null)} }));
        let one = one.unwrap();
        assert_eq!(
            (&one.bits[..], one.group, one.symmetric, one.activations),
            (&[4][..], Some(128), Some(true), false)
        );
        let two = claims(json!({ "format": "mixed-precision", "kv_cache_scheme": {"num_bits": 8},
            "config_groups": {"a": group(8, -1, json!({"num_bits": 8})), "b": group(4, 128, Value::Null)} }));
        let two = two.unwrap();
        assert_eq!((&two.bits[..], two.group, two.symmetric), (&[4, 8][..], None, Some(true)));
        assert!(two.activations && two.cache);
        let fp8 =
            claims(json!({"quant_method": "fp8", "weight_block_size": [128, 64], "activation_scheme": "dynamic"}));
        assert_eq!(fp8.unwrap().block, Some([128, 64]));
        assert_eq!(claims(json!({"weight_block_size": [0, 1e30]})).unwrap().block, None);
        assert_eq!(claims(json!({"quant_method": "fp8"})).unwrap().block, Some([128, 128]));
        assert_eq!(claims(json!({"quant_method": "fp8", "weight_block_size": null})).unwrap().block, None);
        assert_eq!(claims(json!({"quant_method": "compressed-tensors"})).unwrap().block, None);
        let blocks = |all: &[Value]| {
            let all: Vec<Value> = all.iter().map(|b| json!({"weights": {"block_structure": b}})).collect();
            claims(json!({"config_groups": {"a": all[0], "b": all[1]}})).unwrap().block
        };
        assert_eq!(blocks(&[json!([128, 64]), Value::Null]), Some([128, 64]));
        assert_eq!(blocks(&[Value::Null, json!("128x64")]), Some([128, 64]));
        assert_eq!(blocks(&[json!([128, 64]), json!([64, 64])]), None);
    }

    #[test]
    fn what_weights_do_not_show_is_refused() {
        for (config, name) in [
            (json!({"format": "marlin-24"}), "marlin-24"),
            (json!({"sparsity_config": {"format": "sparse-24-bitmask"}}), "sparse-24-bitmask"),
            (json!({"config_groups": {"g": {"format": "sparse-bitmask"}}}), "sparse-bitmask"),
            (json!({"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}), "transform_config"),
        ] {
            let text = claims(config).unwrap_err();
            assert!(text.contains(name) && text.contains("config.json"), "{text}");
        }
        // Sparse weights that are stored dense are dense.
        claims(json!({"sparsity_config": {"format": "dense", "sparsity_structure": "2:4"}})).unwrap();
        claims(json!({"transform_config": {"config_groups": {}}})).unwrap();
    }
}
