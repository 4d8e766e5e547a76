//! Formats that are known by the names of their tensors, whether or not a config says what they are.

use crate::{ConvertError, source::Checkpoint};

const PLAIN: &str = "take the model's ordinary GPTQ or AWQ version, or convert the float checkpoint with --quant int4";
const MERGE: &str = "convert the model without it, or merge it into the float checkpoint first";

/// What is not imported, the last parts of tensor names that only it has, and what to do instead.
const REFUSED: &[(&str, &[&str], &str)] = &[
    ("quantization format bitsandbytes", &["absmax", "quant_map", "nested_absmax", "nested_quant_map", "SCB"], PLAIN),
    ("quantization format bitsandbytes", &["bitsandbytes__nf4", "bitsandbytes__fp4"], PLAIN),
    ("quantization format HQQ", &["W_q"], PLAIN),
    ("quantization format EXL2", &["q_weight", "q_scale_max", "q_group_map", "q_invperm"], PLAIN),
    ("quantization format EXL3", &["trellis", "suh", "svh"], PLAIN),
    ("quantization format AQLM", &["codebooks"], PLAIN),
    ("quantization format VPTQ", &["centroids", "res_centroids", "outlier_centroids"], PLAIN),
    ("quantization format QuIP#", &["Qidxs", "Qidxs_0", "SU", "SV"], PLAIN),
    ("quantization format SpQR", &["dense_weights", "row_offsets", "in_perm"], PLAIN),
    ("quantization format ParoQuant", &["theta", "pairs", "channel_scales"], PLAIN),
    ("quantization format Marlin", &["B", "B_24", "B_meta"], PLAIN),
    ("an adapter (LoRA or EoRA)", &["lora_A", "lora_B"], MERGE),
];

/// Refuses a checkpoint with tensors of a format that is not imported.
pub fn by_tensors(checkpoint: &Checkpoint) -> Result<(), ConvertError> {
    for name in checkpoint.tensors.keys() {
        if name.ends_with("act.scales") {
            return Err(ConvertError::unsupported(
                format!("tensor {name}: AWQ that divides what an activation gives"),
                format!("this version has no such division; {PLAIN}"),
            ));
        }
        // Adapters of PEFT name their tensors MODULE.lora_A.weight.
        let base = name.strip_suffix(".weight").filter(|base| base.ends_with("lora_A") || base.ends_with("lora_B"));
        let last = base.unwrap_or(name).rsplit('.').next().unwrap_or_default();
        if let Some((what, _, next)) = REFUSED.iter().find(|(_, parts, _)| parts.contains(&last)) {
            return Err(ConvertError::unsupported(format!("tensor {name}: {what}"), next));
        }
    }
    Ok(())
}
