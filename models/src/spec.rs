//! `ModelSpec`: a decoder as plain data, written into the file and executed by the runtime.
//!
//! A spec says which mechanism each layer uses and with which numbers. A runtime runs any file whose
//! mechanisms it knows, whatever family it came from: unknown fields or variants are an error when
//! the spec is read, never ignored.
//!
//! Tensor names: `embed`, `norm`, `head` (absent when tied to `embed`), and per layer `i`
//! `layers.i.attn_norm`, `layers.i.{q,k,v,o}`, `layers.i.mlp_norm`, `layers.i.{gate,up,down}`.

use serde::{Deserialize, Serialize};

/// A whole decoder.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// Family that made the spec; for people, the runtime does not look at it.
    pub family: String,
    /// Rows of the embedding and of the head.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Longest sequence the model was made for, tokens.
    pub max_context: usize,
    /// Layers, in order.
    pub layers: Vec<Layer>,
    /// Norm before the head.
    pub norm: Norm,
    /// The head reuses the embedding tensor.
    pub tied_head: bool,
}

/// One decoder layer: `x += attn(norm(x)); x += mlp(norm(x))`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layer {
    /// Norm before attention.
    pub attn_norm: Norm,
    /// Attention.
    pub attn: Attn,
    /// Norm before the MLP.
    pub mlp_norm: Norm,
    /// MLP.
    pub mlp: Mlp,
}

/// A normalisation with a weight vector.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Norm {
    /// `x / sqrt(mean(x^2) + eps) * w`.
    Rms {
        /// Added to the mean square.
        eps: f32,
    },
}

/// An attention mechanism.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Attn {
    /// Softmax attention where `heads / kv_heads` query heads share a key/value head.
    Gqa {
        /// Query heads.
        heads: usize,
        /// Key/value heads; divides `heads`.
        kv_heads: usize,
        /// Elements of a head.
        head_dim: usize,
        /// Factor on `q . k`.
        scale: f32,
        /// Rotary embedding of q and k.
        rope: Rope,
    },
}

/// A rotary position embedding over the whole head, pairs `(i, i + head_dim/2)`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f32,
    /// Change of the frequencies for longer contexts.
    pub scaling: RopeScaling,
}

/// How rope frequencies are changed for contexts beyond the trained one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum RopeScaling {
    /// As trained.
    None,
    /// Every frequency divided by `factor`.
    Linear {
        /// Divisor.
        factor: f32,
    },
    /// Llama 3.1's: long wavelengths divided, short ones kept, a ramp between.
    Llama3 {
        /// Divisor of the long wavelengths.
        factor: f32,
        /// Wavelengths beyond `original_context / low_freq_factor` are divided.
        low_freq_factor: f32,
        /// Wavelengths below `original_context / high_freq_factor` are kept.
        high_freq_factor: f32,
        /// Context length of the training.
        original_context: usize,
    },
}

/// A feed-forward block.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Mlp {
    /// `down(act(gate(x)) * up(x))`.
    Gated {
        /// Rows of gate and up.
        inner: usize,
        /// Activation of the gate.
        act: Act,
    },
}

/// An elementwise activation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Act {
    /// `x * sigmoid(x)`.
    Silu,
}

/// A tensor that a spec needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Needed {
    /// Our name.
    pub name: String,
    /// `[n, k]`, or `[n]` for a vector.
    pub dims: Vec<u64>,
}

/// A spec that contradicts itself or that this version cannot run.
#[derive(Debug, thiserror::Error)]
#[error("model spec: {0}")]
pub struct SpecError(pub String);

/// Largest value of any size in a spec: keeps every product of two sizes within 64 bits.
const MAX_SIZE: usize = 1 << 28;

/// Most layers of a model.
pub const MAX_LAYERS: usize = 4096;

impl ModelSpec {
    /// Checks every size against every other, so that the runtime may rely on them.
    pub fn check(&self) -> Result<(), SpecError> {
        let size = |what: &str, v: usize, max: usize| {
            if v == 0 || v > max {
                return Err(SpecError(format!("{what} is {v}, expected 1 to {max}")));
            }
            Ok(())
        };
        if self.family.chars().any(char::is_control) {
            return Err(SpecError(format!("family {:?} has control characters", self.family)));
        }
        size("vocab", self.vocab, MAX_SIZE)?;
        size("hidden", self.hidden, MAX_SIZE)?;
        size("max_context", self.max_context, MAX_SIZE)?;
        size("the number of layers", self.layers.len(), MAX_LAYERS)?;
        let norms = self.layers.iter().flat_map(|l| [&l.attn_norm, &l.mlp_norm]).chain([&self.norm]);
        for Norm::Rms { eps } in norms {
            if !(eps.is_finite() && *eps >= 0.0) {
                return Err(SpecError(format!("a norm's eps is {eps}, expected a finite number of at least 0")));
            }
        }
        for (i, layer) in self.layers.iter().enumerate() {
            let Attn::Gqa { heads, kv_heads, head_dim, scale, rope } = &layer.attn;
            size(&format!("layer {i}: heads"), *heads, 4096)?;
            size(&format!("layer {i}: kv_heads"), *kv_heads, 4096)?;
            if heads % kv_heads != 0 || heads / kv_heads > 64 {
                return Err(SpecError(format!(
                    "layer {i}: {kv_heads} kv_heads cannot serve {heads} heads (1 to 64 each)"
                )));
            }
            if *head_dim == 0 || head_dim % 8 != 0 || *head_dim > 256 {
                return Err(SpecError(format!(
                    "layer {i}: head_dim is {head_dim}, expected a multiple of 8 up to 256"
                )));
            }
            if !(*scale > 0.0 && scale.is_finite() && rope.theta.is_finite() && rope.theta > 0.0) {
                return Err(SpecError(format!(
                    "layer {i}: scale {scale} and rope theta {} must be finite and positive",
                    rope.theta
                )));
            }
            let factors = match rope.scaling {
                RopeScaling::None => vec![],
                RopeScaling::Linear { factor } => vec![factor],
                RopeScaling::Llama3 { factor, low_freq_factor: low, high_freq_factor: high, original_context } => {
                    vec![factor, low, high - low, original_context as f32]
                }
            };
            if !factors.iter().all(|f| f.is_finite() && *f > 0.0) {
                let what = "factors must be finite and positive, high_freq_factor above low_freq_factor";
                return Err(SpecError(format!("layer {i}: rope scaling {:?}: {what}", rope.scaling)));
            }
            let Mlp::Gated { inner, .. } = &layer.mlp;
            size(&format!("layer {i}: inner"), *inner, MAX_SIZE)?;
        }
        Ok(())
    }

    /// Every tensor the runtime will ask for, in the order in which a step reads them.
    pub fn tensors(&self) -> Vec<Needed> {
        let mut all = vec![];
        let mut need = |name: String, dims: &[usize]| {
            all.push(Needed { name, dims: dims.iter().map(|&d| d as u64).collect() });
        };
        need("embed".into(), &[self.vocab, self.hidden]);
        for (i, layer) in self.layers.iter().enumerate() {
            let Attn::Gqa { heads, kv_heads, head_dim, .. } = layer.attn;
            let (q, kv) = (heads * head_dim, kv_heads * head_dim);
            let Mlp::Gated { inner, .. } = layer.mlp;
            need(format!("layers.{i}.attn_norm"), &[self.hidden]);
            need(format!("layers.{i}.q"), &[q, self.hidden]);
            need(format!("layers.{i}.k"), &[kv, self.hidden]);
            need(format!("layers.{i}.v"), &[kv, self.hidden]);
            need(format!("layers.{i}.o"), &[self.hidden, q]);
            need(format!("layers.{i}.mlp_norm"), &[self.hidden]);
            need(format!("layers.{i}.gate"), &[inner, self.hidden]);
            need(format!("layers.{i}.up"), &[inner, self.hidden]);
            need(format!("layers.{i}.down"), &[self.hidden, inner]);
        }
        need("norm".into(), &[self.hidden]);
        if !self.tied_head {
            need("head".into(), &[self.vocab, self.hidden]);
        }
        all
    }
}

impl Rope {
    /// Angles per position for the `head_dim / 2` pairs, f32.
    ///
    /// Computed in f64 and rounded once; the reference library computes in f32, a difference of
    /// about one unit in the last place. Llama 3's ramp is transformers'
    /// `_compute_llama3_parameters` (modeling_rope_utils.py).
    pub fn inv_freq(&self, head_dim: usize) -> Vec<f32> {
        (0..head_dim / 2)
            .map(|i| {
                let base = (self.theta as f64).powf(-((2 * i) as f64) / head_dim as f64);
                match self.scaling {
                    RopeScaling::None => base as f32,
                    RopeScaling::Linear { factor } => (base / factor as f64) as f32,
                    RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                        let (factor, low, high) = (factor as f64, low_freq_factor as f64, high_freq_factor as f64);
                        let context = original_context as f64;
                        let wavelen = std::f64::consts::TAU / base;
                        let freq = if wavelen > context / low {
                            base / factor
                        } else if wavelen < context / high {
                            base
                        } else {
                            let smooth = (context / wavelen - low) / (high - low);
                            (1.0 - smooth) * base / factor + smooth * base
                        };
                        freq as f32
                    }
                }
            })
            .collect()
    }
}

/// What a model's authors recommend for generation, and its special tokens.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Generation {
    /// Sampling temperature.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f32>,
    /// Keep the k most likely tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<u32>,
    /// Keep the most likely tokens that together reach this probability.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f32>,
    /// Keep tokens at least this fraction as likely as the most likely one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_p: Option<f32>,
    /// Divides (multiplies) positive (negative) logits of tokens seen before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repetition_penalty: Option<f32>,
    /// Whether the authors sample at all; false means greedy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub do_sample: Option<bool>,
    /// Tokens that end an answer.
    pub eos: Vec<u32>,
    /// Token that begins a text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bos: Option<u32>,
    /// Padding token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pad: Option<u32>,
    /// Text of the beginning token, as templates use it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bos_text: Option<String>,
    /// Text of the end token, as templates use it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eos_text: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_rope_keeps_short_and_divides_long_wavelengths() {
        let plain = Rope { theta: 500000.0, scaling: RopeScaling::None }.inv_freq(128);
        let scaling =
            RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192 };
        let scaled = Rope { theta: 500000.0, scaling }.inv_freq(128);
        assert_eq!(scaled[0], 1.0);
        assert_eq!(scaled[63], plain[63] / 8.0);
        assert!(scaled.windows(2).all(|w| w[1] < w[0]));
    }

    #[test]
    fn an_unknown_field_is_refused() {
        let err = serde_json::from_str::<Norm>(r#"{"kind":"rms","eps":1e-5,"bias":true}"#).unwrap_err();
        assert!(err.to_string().contains("bias"), "{err}");
    }
}
