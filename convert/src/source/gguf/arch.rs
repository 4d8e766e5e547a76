//! Architectures: which Hugging Face family a GGUF's is, and what its names and keys are there.
//!
//! llama.cpp's converter permuted the rows of q and k for some architectures (see [`Rows::Interleaved`]), which
//! moves codes and scales as they are; turned GPT-2's linear layers to outputs first; and left out what follows
//! from the architecture, such as the layers of SmolLM3 that have no rope.

use serde_json::{Value as Json, json};

use super::{Gguf, Tensor, meta::missing, rope};
use crate::{Malformed, source::Rows};

/// An architecture that is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arch {
    Llama,
    Qwen2,
    Qwen3,
    SmolLm3,
    Gemma2,
    Gemma3,
    Gpt2,
}

const ALL: [Arch; 7] = [Arch::Llama, Arch::Qwen2, Arch::Qwen3, Arch::SmolLm3, Arch::Gemma2, Arch::Gemma3, Arch::Gpt2];

/// Modules of a layer: GGUF's name, Hugging Face's, whether its rows may be permuted.
type Modules = &'static [(&'static str, &'static str, bool)];

const LLAMA_LAYER: Modules = &[
    ("attn_norm", "input_layernorm", false),
    ("attn_q", "self_attn.q_proj", true),
    ("attn_k", "self_attn.k_proj", true),
    ("attn_v", "self_attn.v_proj", false),
    ("attn_q_norm", "self_attn.q_norm", false),
    ("attn_k_norm", "self_attn.k_norm", false),
    ("attn_output", "self_attn.o_proj", false),
    ("ffn_norm", "post_attention_layernorm", false),
    ("ffn_gate", "mlp.gate_proj", false),
    ("ffn_up", "mlp.up_proj", false),
    ("ffn_down", "mlp.down_proj", false),
];

const GEMMA_LAYER: Modules = &[
    ("attn_norm", "input_layernorm", false),
    ("attn_q", "self_attn.q_proj", false),
    ("attn_k", "self_attn.k_proj", false),
    ("attn_v", "self_attn.v_proj", false),
    ("attn_q_norm", "self_attn.q_norm", false),
    ("attn_k_norm", "self_attn.k_norm", false),
    ("attn_output", "self_attn.o_proj", false),
    ("post_attention_norm", "post_attention_layernorm", false),
    ("ffn_norm", "pre_feedforward_layernorm", false),
    ("ffn_gate", "mlp.gate_proj", false),
    ("ffn_up", "mlp.up_proj", false),
    ("ffn_down", "mlp.down_proj", false),
    ("post_ffw_norm", "post_feedforward_layernorm", false),
];

const GPT2_LAYER: Modules = &[
    ("attn_norm", "ln_1", false),
    ("attn_qkv", "attn.c_attn", false),
    ("attn_output", "attn.c_proj", false),
    ("ffn_norm", "ln_2", false),
    ("ffn_up", "mlp.c_fc", false),
    ("ffn_down", "mlp.c_proj", false),
];

/// Modules outside the layers.
type Outside = &'static [(&'static str, &'static str)];

const LLAMA_OUTSIDE: Outside =
    &[("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")];

const GPT2_OUTSIDE: Outside = &[
    ("token_embd", "transformer.wte"),
    ("position_embd", "transformer.wpe"),
    ("output_norm", "transformer.ln_f"),
    ("output", "lm_head"),
];

/// The metadata under an architecture's name.
pub(super) struct Keys<'g, 'a> {
    pub gguf: &'g Gguf<'a>,
    arch: &'static str,
}

impl Keys<'_, '_> {
    /// The whole key, for messages.
    pub fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.arch)
    }

    pub fn size(&self, key: &str) -> Result<Option<u64>, Malformed> {
        self.gguf.whole(&self.name(key))
    }

    pub fn float(&self, key: &str) -> Result<Option<f64>, Malformed> {
        self.gguf.float(&self.name(key))
    }

    pub fn optional(&self, key: &str) -> Option<&str> {
        self.gguf.optional(&self.name(key))
    }

    /// A size that must be there.
    fn needed(&self, key: &str) -> Result<u64, Malformed> {
        self.size(key)?.ok_or_else(|| missing(&self.name(key)))
    }

    /// Refuses a size that changes the mathematics.
    fn only(&self, key: &str, neutral: u64) -> Result<(), Malformed> {
        match self.size(key)?.filter(|&v| v != neutral) {
            None => Ok(()),
            Some(got) => Err(Malformed::Unsupported {
                what: format!("{} is {got} where this version can run only {neutral}", self.name(key)),
                next: "the model would compute something else; convert another model".into(),
            }),
        }
    }
}

impl Arch {
    /// The architecture that a file names.
    pub fn of(gguf: &Gguf) -> Result<Arch, Malformed> {
        let name = gguf.text("general.architecture")?;
        ALL.into_iter().find(|a| a.name() == name).ok_or_else(|| Malformed::Unsupported {
            what: format!("a GGUF of architecture {name}"),
            next: format!(
                "this version imports GGUF files of architecture {}; convert the safetensors version if its family \
                 is supported",
                ALL.map(Arch::name).join(", ")
            ),
        })
    }

    /// Name in metadata, and of the family.
    fn name(self) -> &'static str {
        match self {
            Arch::Llama => "llama",
            Arch::Qwen2 => "qwen2",
            Arch::Qwen3 => "qwen3",
            Arch::SmolLm3 => "smollm3",
            Arch::Gemma2 => "gemma2",
            Arch::Gemma3 => "gemma3",
            Arch::Gpt2 => "gpt2",
        }
    }

    fn keys<'g, 'a>(self, gguf: &'g Gguf<'a>) -> Keys<'g, 'a> {
        Keys { gguf, arch: self.name() }
    }

    /// Elements of a head of q and k.
    pub fn head_dim(self, gguf: &Gguf) -> Result<usize, Malformed> {
        let keys = self.keys(gguf);
        let heads = keys.needed("attention.head_count")?;
        if heads == 0 {
            return Err(Malformed::field(keys.name("attention.head_count"), "at least 1", 0));
        }
        let head_dim = match keys.size("attention.key_length")? {
            Some(said) => said,
            None => keys.needed("embedding_length")? / heads,
        };
        if head_dim == 0 || head_dim % 2 != 0 {
            return Err(Malformed::field("head dimension", "an even number", head_dim));
        }
        Ok(head_dim as usize)
    }

    /// The metadata as a `config.json`.
    pub fn config(self, gguf: &Gguf) -> Result<Json, Malformed> {
        let keys = self.keys(gguf);
        let head_dim = self.head_dim(gguf)? as u64;
        keys.only("attention.value_length", head_dim)?;
        keys.only("expert_count", 0)?;
        let embedding = gguf.tensors.iter().find(|t| t.name == "token_embd.weight");
        let Some(Tensor { shape, .. }) = embedding else {
            return Err(Malformed::field("tensor token_embd.weight", "present", "missing"));
        };
        let tied = !gguf.has("output.weight");
        if self == Arch::Gpt2 { gpt2(&keys, shape[0], tied) } else { self.llama(&keys, head_dim, shape[0], tied) }
    }

    /// The config of llama and its relatives.
    fn llama(self, keys: &Keys, head_dim: u64, vocab: u64, tied: bool) -> Result<Json, Malformed> {
        let heads = keys.needed("attention.head_count")?;
        let layers = keys.needed("block_count")?;
        keys.only("rope.dimension_count", head_dim)?;
        let eps = "attention.layer_norm_rms_epsilon";
        let mut config = json!({
            "model_type": self.name(),
            "hidden_size": keys.needed("embedding_length")?,
            "num_attention_heads": heads,
            "num_key_value_heads": keys.size("attention.head_count_kv")?.unwrap_or(heads),
            "head_dim": head_dim,
            "intermediate_size": keys.needed("feed_forward_length")?,
            "num_hidden_layers": layers,
            "vocab_size": vocab,
            "rms_norm_eps": keys.float(eps)?.ok_or_else(|| missing(&keys.name(eps)))?,
            "rope_parameters": rope::parameters(keys, head_dim)?,
            "tie_word_embeddings": tied,
        });
        if let Some(context) = keys.size("context_length")? {
            config["max_position_embeddings"] = context.into();
        }
        let window = keys.size("attention.sliding_window")?.filter(|&w| w != 0);
        match (self, window) {
            // Mistral has no architecture of its own in GGUF.
            (Arch::Llama, Some(window)) => {
                config["model_type"] = "mistral".into();
                config["sliding_window"] = window.into();
            }
            (Arch::Gemma2 | Arch::Gemma3, _) => gemma(self, keys, &mut config, window)?,
            (_, None) => {}
            _ => keys.only("attention.sliding_window", 0)?,
        }
        let has = |name: &str| keys.gguf.has(name);
        if config["model_type"] != "mistral" && self != Arch::Qwen2 {
            config["attention_bias"] = has("blk.0.attn_q.bias").into();
        }
        if matches!(self, Arch::Llama | Arch::SmolLm3) && config["model_type"] != "mistral" {
            config["mlp_bias"] = has("blk.0.ffn_gate.bias").into();
        }
        if self == Arch::SmolLm3 {
            // Not in the metadata: `llama_model_smollm3` has it as a constant.
            config["no_rope_layer_interval"] = 4.into();
        }
        Ok(config)
    }

    /// The Hugging Face name of a tensor and the order of its rows. Unknown names stay: the importer reports them.
    pub fn rename(self, t: &Tensor, head_dim: usize) -> Result<(String, Rows), Malformed> {
        let whole = |name: String| Ok((name, Rows::InOrder));
        let (outside, layer, base) = match self {
            Arch::Gpt2 => (GPT2_OUTSIDE, GPT2_LAYER, "transformer.h"),
            Arch::Gemma2 | Arch::Gemma3 => (LLAMA_OUTSIDE, GEMMA_LAYER, "model.layers"),
            _ => (LLAMA_OUTSIDE, LLAMA_LAYER, "model.layers"),
        };
        let Some((module, kind)) = t.name.rsplit_once('.').filter(|(_, kind)| ["weight", "bias"].contains(kind)) else {
            return whole(t.name.into());
        };
        if let Some((_, ours)) = outside.iter().find(|(theirs, _)| *theirs == module) {
            return whole(format!("{ours}.{kind}"));
        }
        let inside = module.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        let known = inside.and_then(|(i, module)| Some((i, layer.iter().find(|(theirs, ..)| *theirs == module)?)));
        let Some((i, (_, ours, permuted))) = known else { return whole(t.name.into()) };
        let name = format!("{base}.{i}.{ours}.{kind}");
        if !permuted || !matches!(self, Arch::Llama | Arch::SmolLm3) {
            return whole(name);
        }
        if !t.shape[0].is_multiple_of(head_dim as u64) {
            let expected = format!("a multiple of {head_dim}");
            return Err(Malformed::field(format!("tensor {}: rows", t.name), expected, t.shape[0]));
        }
        Ok((name, Rows::Interleaved { head_dim }))
    }
}

/// What Gemma's config has besides. llama.cpp knows the scale of scores by the size of the model alone: that of 27B comes
/// from its width, every other one from the head (`llama_model_gemma2`, `llama_model_gemma3`).
fn gemma(arch: Arch, keys: &Keys, config: &mut Json, window: Option<u64>) -> Result<(), Malformed> {
    let largest = if arch == Arch::Gemma2 { 46 } else { 62 };
    let (hidden, heads) = (keys.needed("embedding_length")?, keys.needed("attention.head_count")?);
    let scalar =
        if keys.needed("block_count")? == largest { (hidden / heads).into() } else { config["head_dim"].clone() };
    config["query_pre_attn_scalar"] = scalar;
    if let Some(window) = window {
        config["sliding_window"] = window.into();
    }
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if let Some(cap) = keys.float(key)? {
            // Where it is off.
            config[key] = if cap == 0.0 { Json::Null } else { cap.into() };
        }
    }
    if arch == Arch::Gemma3 {
        config["model_type"] = "gemma3_text".into();
        if let Some(pattern) = keys.size("attention.sliding_window_pattern")? {
            config["sliding_window_pattern"] = pattern.into();
        }
        let local = keys.float("rope.freq_base_swa")?.unwrap_or(10000.0);
        let mut all = config["rope_parameters"].take();
        if keys.float("rope.freq_base")?.is_none() {
            all["rope_theta"] = 1e6.into();
        }
        config["rope_parameters"] = json!({
            "full_attention": all,
            "sliding_attention": { "rope_type": "default", "rope_theta": local },
        });
    }
    Ok(())
}

/// GPT-2's config. Its activation is not in the metadata: llama.cpp runs the tanh form, which the family assumes.
fn gpt2(keys: &Keys, vocab: u64, tied: bool) -> Result<Json, Malformed> {
    let (hidden, heads) = (keys.needed("embedding_length")?, keys.needed("attention.head_count")?);
    keys.only("attention.head_count_kv", heads)?;
    keys.only("attention.key_length", hidden / heads)?;
    let eps = "attention.layer_norm_epsilon";
    Ok(json!({
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_head": heads,
        "n_layer": keys.needed("block_count")?,
        "n_inner": keys.needed("feed_forward_length")?,
        "n_positions": keys.needed("context_length")?,
        "vocab_size": vocab,
        "layer_norm_epsilon": keys.float(eps)?.ok_or_else(|| missing(&keys.name(eps)))?,
        "tie_word_embeddings": tied,
    }))
}
