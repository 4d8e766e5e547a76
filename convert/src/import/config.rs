//! What a quantizer says about its checkpoint: a hint to check against, and what we refuse by name.

use serde_json::Value;

use super::{awq::Packing, compressed::Claims};
use crate::ConvertError;

/// How integers are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// AutoGPTQ, GPTQModel, AutoRound: codes packed along the columns of W.
    Gptq,
    /// AutoAWQ: codes packed along the rows of W, but for its orders for other kernels.
    Awq,
    /// llm-compressor.
    Compressed,
    /// FP8 in blocks, as DeepSeek and Qwen publish it.
    Fp8,
    /// FP8 with a scale per row.
    FbgemmFp8,
    /// NVIDIA's ModelOpt.
    ModelOpt,
}

impl Method {
    /// Name as configs write it.
    pub fn name(self) -> &'static str {
        match self {
            Method::Gptq => "gptq",
            Method::Awq => "awq",
            Method::Compressed => "compressed-tensors",
            Method::Fp8 => "fp8",
            Method::FbgemmFp8 => "fbgemm_fp8",
            Method::ModelOpt => "modelopt",
        }
    }

    /// Whether the tensors are those of [`super::compressed`].
    pub fn is_compressed(self) -> bool {
        !matches!(self, Method::Gptq | Method::Awq)
    }
}

/// A quantizer's config, its many spellings reduced to one.
#[derive(Debug, Clone, Default)]
pub struct Hint {
    /// File it stands in.
    pub file: String,
    /// Method claimed.
    pub method: Option<Method>,
    /// Order of bytes claimed, of an AWQ checkpoint.
    pub packing: Option<Packing>,
    /// Bits claimed.
    pub bits: Option<u64>,
    /// Columns of a group claimed; `None` also for one group per row (-1).
    pub group: Option<usize>,
    /// Symmetric claimed.
    pub sym: Option<bool>,
    /// Zero-points are stored as they are (`gptq_v2` and later), not reduced by one (`gptq`).
    pub zeros_as_stored: bool,
    /// Modules may differ from the above.
    pub per_module: bool,
    /// Tools and versions.
    pub tools: Vec<String>,
    /// What compressed-tensors and its like claim.
    pub compressed: Claims,
}

/// Spellings of the bits of a code, the first that is there counts.
pub const BITS: &[&str] = &["bits", "w_bit", "wbits"];
/// Spellings of the columns of a group.
pub const GROUP: &[&str] = &["group_size", "q_group_size"];
/// Spellings of the checkpoint's format.
pub const FORMAT: &[&str] = &["checkpoint_format", "format", "version"];

impl Hint {
    /// Reads a config; refuses formats this version does not import.
    pub fn new(file: &str, config: &Value) -> Result<Hint, ConvertError> {
        let get = |keys: &[&str]| keys.iter().find_map(|k| config.get(k).filter(|v| !v.is_null()));
        let text = |keys: &[&str]| get(keys).and_then(Value::as_str).map(str::to_lowercase);
        let flag = |keys: &[&str]| get(keys).and_then(Value::as_bool);
        let said = text(&["quant_method", "method", "quantization_method"]);
        let format = text(FORMAT).unwrap_or_default();
        let packing = text(&["packing_format"]).unwrap_or_default();
        let refuse = |found: &str, next: &str| {
            Err(ConvertError::unsupported(format!("{file}: quantization format {found}"), next))
        };
        for name in [said.as_deref().unwrap_or_default(), &format, &packing] {
            if let Some((found, next)) = refused(name) {
                return refuse(found, next);
            }
        }
        if flag(&["is_marlin_format"]) == Some(true) {
            return refuse("marlin", PLAIN);
        }
        for key in ["rotation", "rotation_config", "adapter"] {
            if get(&[key]).is_some_and(|v| v.as_str() != Some("")) {
                return refuse(&format!("with {key}"), "the runtime would have to apply it; quantize again without it");
            }
        }
        let method = match said.as_deref() {
            Some("gptq") => Some(Method::Gptq),
            Some("awq") => Some(Method::Awq),
            Some("auto-round" | "intel/auto-round" | "autoround") => {
                Some(if packing.contains("awq") { Method::Awq } else { Method::Gptq })
            }
            Some("compressed-tensors" | "compressed_tensors") => Some(Method::Compressed),
            Some("fp8") => Some(Method::Fp8),
            Some("fbgemm_fp8") => Some(Method::FbgemmFp8),
            Some("modelopt" | "modelopt_fp4") => Some(Method::ModelOpt),
            None => None,
            Some(other) => {
                return refuse(
                    other,
                    "this version imports GPTQ, AWQ, compressed-tensors and FP8 checkpoints, float ones and GGUF",
                );
            }
        };
        let awq_order = match format.as_str() {
            _ if method != Some(Method::Awq) => None,
            _ if text(&["backend"]).is_some_and(|b| b == "llm-awq") => Some(Packing::Fast),
            "gemv_fast" | "llm-awq" => Some(Packing::Fast),
            "gemv" => Some(Packing::Gemv),
            "gemm" => Some(Packing::Gemm),
            "" => None,
            other => return refuse(&format!("awq {other}"), PLAIN),
        };
        // The 16-bit words of the fast order are a layout of their own.
        let int16 = |p: &str| awq_order == Some(Packing::Fast) && p == "int16";
        if let Some(pack) =
            text(&["pack_dtype"]).filter(|p| !["int32", "torch.int32"].contains(&p.as_str()) && !int16(p))
        {
            return refuse(&format!("packed in {pack}"), "quantize again with pack_dtype int32");
        }
        let auto_round = said.is_some_and(|s| s.contains("round"));
        if let Some(kind) = text(&["data_type"]).filter(|kind| auto_round && !kind.starts_with("int")) {
            return refuse(&format!("auto-round with {kind} weights"), LATER);
        }
        let less = packing.ends_with(":auto_gptq") || packing.ends_with(":gptq");
        let group = get(GROUP).and_then(Value::as_i64);
        let compressed = Claims::new(file, config)?;
        let tools = config.get("meta").and_then(|m| m.get("quantizer")).or(config.get("autoround_version"));
        Ok(Hint {
            file: file.into(),
            method,
            packing: awq_order,
            bits: get(BITS).and_then(Value::as_u64),
            group: group.and_then(|g| usize::try_from(g).ok()).filter(|&g| g > 0),
            sym: flag(&["sym"]).or(flag(&["zero_point"]).map(|z| !z)),
            zeros_as_stored: format == "gptq_v2" || auto_round && !less,
            per_module: ["dynamic", "extra_config"].iter().any(|k| get(&[k]).is_some_and(filled)),
            tools: tools.map(texts).unwrap_or_default(),
            compressed,
        })
    }
}

fn filled(value: &Value) -> bool {
    value.as_object().is_none_or(|o| !o.is_empty()) && value.as_array().is_none_or(|a| !a.is_empty())
}

fn texts(value: &Value) -> Vec<String> {
    match value {
        Value::String(s) => vec![s.clone()],
        Value::Array(a) => a.iter().filter_map(Value::as_str).map(String::from).collect(),
        _ => vec![],
    }
}

/// Formats refused by name, as `quant_method`, `format` or `packing_format` spell them, and what to do instead.
const REFUSED: [(&str, &str); 2] = [
    (
        "hqq aqlm vptq exl2 exl3 spqr quip quip# eetq higgs quanto torchao bitnet marlin marlin24 gptq_marlin \
         awq_marlin bitblas ipex gptq_p paroquant sinq qqq",
        PLAIN,
    ),
    ("bitsandbytes bitsandbytes_4bit bitsandbytes_8bit bnb mxfp4 nvfp4", LATER),
];
const PLAIN: &str =
    "take the model's ordinary GPTQ or AWQ (gemm) version, or convert the float checkpoint with --quant int4";
const LATER: &str = "its import comes with a later version; take a GPTQ or AWQ (gemm) version, or convert the float \
                     checkpoint with --quant int4";
fn refused(name: &str) -> Option<(&str, &'static str)> {
    let listed = REFUSED.iter().find(|(names, _)| names.split_whitespace().any(|n| n == name));
    // auto_round:fp8, auto_round:llm_compressor, ...
    let nested =
        name.split_once(':').filter(|(_, rest)| !["auto_gptq", "gptq", "auto_awq", "awq", "gptqmodel"].contains(rest));
    listed.map(|(_, next)| (name, *next)).or(nested.map(|_| (name, LATER)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn spellings_of_all_years_are_one() {
        let hint = |v| Hint::new("c", &v).unwrap();
        let old = hint(
            json!({"wbits": 4, "q_group_size": 128, "zero_point": true, "quant_method": "awq", "version": "GEMM"}),
        );
        assert_eq!((old.bits, old.group, old.sym, old.method), (Some(4), Some(128), Some(false), Some(Method::Awq)));
        let new = hint(
            json!({"bits": 8, "group_size": -1, "sym": true, "quant_method": "gptq", "checkpoint_format": "gptq_v2",
            "meta": {"quantizer": ["gptqmodel:7.7.0"]}, "dynamic": {}}),
        );
        assert_eq!((new.bits, new.group, new.zeros_as_stored, new.per_module), (Some(8), None, true, false));
        assert_eq!(new.tools, ["gptqmodel:7.7.0"]);
        let fast = hint(json!({"quant_method": "awq", "version": "gemv_fast", "pack_dtype": "int16"}));
        assert_eq!(fast.packing, Some(Packing::Fast));
        let llm = hint(json!({"quant_method": "awq", "version": "gemm", "backend": "llm-awq"}));
        assert_eq!((llm.packing, old.packing), (Some(Packing::Fast), Some(Packing::Gemm)));
        let round = hint(json!({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4}));
        assert_eq!((round.method, round.zeros_as_stored), (Some(Method::Gptq), false));
        assert!(hint(json!({"quant_method": "auto-round", "packing_format": "auto_round:gptqmodel"})).zeros_as_stored);
    }

    #[test]
    fn other_formats_are_refused_by_name() {
        let cases = [
            (json!({"quant_method": "bitsandbytes", "load_in_4bit": true}), "bitsandbytes"),
            (json!({"quant_method": "hqq"}), "hqq"),
            (json!({"quant_method": "aqlm"}), "aqlm"),
            (json!({"quant_method": "vptq"}), "vptq"),
            (json!({"quant_method": "exl2"}), "exl2"),
            (json!({"quant_method": "exl3"}), "exl3"),
            (json!({"quant_method": "gptq", "checkpoint_format": "marlin"}), "marlin"),
            (json!({"quant_method": "gptq", "is_marlin_format": true}), "marlin"),
            (json!({"quant_method": "gptq", "format": "gptq_p"}), "gptq_p"),
            (json!({"quant_method": "compressed-tensors", "format": "marlin-24"}), "marlin-24"),
            (json!({"quant_method": "awq", "version": "other"}), "awq other"),
            (json!({"quant_method": "awq", "version": "gemm", "pack_dtype": "int16"}), "int16"),
            (json!({"quant_method": "gptq", "pack_dtype": "int16"}), "int16"),
            (json!({"quant_method": "gptq", "rotation": "hadamard"}), "rotation"),
            (json!({"quant_method": "auto-round", "packing_format": "auto_round:fp8"}), "auto_round"),
            (json!({"quant_method": "auto-round", "data_type": "mx_fp"}), "auto-round with mx_fp weights"),
            (json!({"quant_method": "auto-round", "rotation_config": {"block": 32}}), "rotation_config"),
            (json!({"quant_method": "gptq", "adapter": {"name": "lora", "rank": 32}}), "adapter"),
            (json!({"quant_method": "paroquant"}), "paroquant"),
            (json!({"quant_method": "bitblas"}), "bitblas"),
            (json!({"quant_method": "gptq", "checkpoint_format": "bitblas"}), "bitblas"),
            (json!({"quant_method": "marlin"}), "marlin"),
            (json!({"quant_method": "awq", "version": "marlin"}), "marlin"),
            (json!({"quant_method": "sinq"}), "sinq"),
            (json!({"quant_method": "quip#"}), "quip#"),
            (json!({"quant_method": "spqr"}), "spqr"),
            (json!({"quant_method": "qqq"}), "qqq"),
            (json!({"quant_method": "something"}), "something"),
        ];
        for (config, name) in cases {
            let text = Hint::new("config.json", &config).unwrap_err().to_string();
            assert!(text.contains(name) && text.contains("config.json"), "{config}: {text}");
        }
    }
}
