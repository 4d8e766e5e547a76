//! Rope metadata as a config's `rope_parameters`.

use quern_models::spec::{Rope, RopeScaling};
use serde_json::{Map, Value as Json};

use super::{Tensor, arch::Keys, meta::missing};
use crate::{Malformed, source::Dtype};

/// Tensor that holds Llama 3's rope scaling, one divisor per frequency.
pub(super) const ROPE_FACTORS: &str = "rope_freqs.weight";

/// `rope_parameters` of an architecture.
pub(super) fn parameters(keys: &Keys, head_dim: u64) -> Result<Map<String, Json>, Malformed> {
    let theta = keys.float("rope.freq_base")?.unwrap_or(10000.0);
    let factor = keys.float("rope.scaling.factor")?.or(keys.float("rope.scale_linear")?);
    // llama.cpp takes 0 for "not set".
    let factor = factor.filter(|&f| f != 0.0);
    let kind = keys.optional("rope.scaling.type").unwrap_or(if factor.is_some() { "linear" } else { "none" });
    let mut rope = Map::new();
    let mut put = |key: &str, value: Json| drop(rope.insert(key.into(), value));
    put("rope_theta", theta.into());
    if let Some(t) = keys.gguf.tensors.iter().find(|t| t.name == ROPE_FACTORS) {
        if !matches!((kind, factor), ("none", _) | ("linear", None | Some(1.0))) {
            return Err(Malformed::Unsupported {
                what: format!("{ROPE_FACTORS} and {} {kind} together", keys.name("rope.scaling.type")),
                next: "this version applies one of them, so the model would compute something else; convert the \
                       checkpoint that it was made from"
                    .into(),
            });
        }
        put("rope_type", "llama3".into());
        put("factor", llama3(t, theta, head_dim)?.into());
        put("low_freq_factor", LOW_FREQ.into());
        put("high_freq_factor", HIGH_FREQ.into());
        put("original_max_position_embeddings", ORIGINAL_CONTEXT.into());
        return Ok(rope);
    }
    match (kind, factor) {
        ("linear", Some(factor)) if factor != 1.0 => {
            put("rope_type", "linear".into());
            put("factor", factor.into());
        }
        ("linear" | "none", _) => put("rope_type", "default".into()),
        ("yarn", factor) => {
            let factor = factor.ok_or_else(|| missing(&keys.name("rope.scaling.factor")))?;
            put("rope_type", "yarn".into());
            put("factor", factor.into());
            put("attention_factor", attention_factor(keys, factor)?.into());
            let context = keys.size("rope.scaling.original_context_length")?.or(keys.size("context_length")?);
            let context = context.ok_or_else(|| missing(&keys.name("rope.scaling.original_context_length")))?;
            put("original_max_position_embeddings", context.into());
            put("beta_fast", keys.float("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0).into());
            put("beta_slow", keys.float("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0).into());
        }
        // The family refuses it by this name.
        (other, _) => put("rope_type", other.into()),
    }
    Ok(rope)
}

/// Factor on cosines and sines, as `llama_context` and `rope_yarn` of llama.cpp make it in the end.
fn attention_factor(keys: &Keys, factor: f64) -> Result<f64, Malformed> {
    // A negative number stands for "not set"; others mix scaled and plain angles in another way.
    if let Some(mix) = keys.float("rope.scaling.yarn_ext_factor")?.filter(|&x| x >= 0.0 && x != 1.0) {
        return Err(Malformed::Unsupported {
            what: format!("{} is {mix} where this version can run only 1", keys.name("rope.scaling.yarn_ext_factor")),
            next: "the model would compute something else; convert another model".into(),
        });
    }
    let scale = |times: f64| if factor <= 1.0 { 1.0 } else { 0.1 * times * factor.ln() + 1.0 };
    let all = keys.float("rope.scaling.yarn_log_multiplier")?.filter(|&x| x != 0.0);
    let base = all.map_or(scale(1.0), |all| scale(1.0) / scale(all));
    Ok(base * keys.float("rope.scaling.attn_factor")?.unwrap_or(1.0))
}

/// Llama 3's own choices, the same in every model released so far.
const LOW_FREQ: f64 = 1.0;
const HIGH_FREQ: f64 = 4.0;
const ORIGINAL_CONTEXT: usize = 8192;

/// The scaling factor that gives the divisors in `t`.
fn llama3(t: &Tensor, theta: f64, head_dim: u64) -> Result<f64, Malformed> {
    let half = (head_dim / 2) as usize;
    let bad = |got: String| Malformed::Unsupported {
        what: format!("tensor {ROPE_FACTORS} holds rope factors other than Llama 3's: {got}"),
        next: "convert the safetensors version of the model".into(),
    };
    let Dtype::Float(float) = t.dtype else { return Err(bad(t.dtype.name().into())) };
    if t.shape != [half as u64] {
        return Err(bad(format!("shape {:?} where [{half}] is needed", t.shape)));
    }
    let got: Vec<f32> = (0..half).map(|i| float.read(t.bytes, i)).collect();
    let factor = got.iter().copied().fold(1.0, f32::max);
    let plain = Rope { theta: theta as f32, scaling: RopeScaling::None }.inv_freq(head_dim as usize);
    let (low_freq_factor, high_freq_factor) = (LOW_FREQ as f32, HIGH_FREQ as f32);
    let scaling = RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context: ORIGINAL_CONTEXT };
    let scaled = Rope { theta: theta as f32, scaling }.inv_freq(head_dim as usize);
    let close = |i: usize| (plain[i] / scaled[i] / got[i] - 1.0).abs() < 1e-4;
    if (0..half).all(close) { Ok(factor as f64) } else { Err(bad(format!("largest {factor}"))) }
}
