//! A GGUF of architecture `llama` as a Hugging Face checkpoint: config, tensor names, row order.
//!
//! One family path serves both formats: what llama.cpp's converter did is undone here, exactly.
//! It permuted the rows of q and k (see [`Rows::Interleaved`]), which moves codes and scales as they
//! are, and it turned Llama 3's rope scaling into a tensor of factors.

use quern_models::{
    Generation,
    spec::{Rope, RopeScaling},
};
use serde_json::{Map, Value as Json, json};

use super::{Gguf, Tensor, Value};
use crate::{
    Malformed,
    source::{Checkpoint, Dtype, RawTensor, Rows, gguf_tokenizer},
};

/// Turns a parsed file into a checkpoint.
pub fn checkpoint<'a>(gguf: &Gguf<'a>, name: &str) -> Result<Checkpoint<'a>, Malformed> {
    let arch = gguf.text("general.architecture")?;
    if arch != "llama" {
        return Err(Malformed::Unsupported {
            what: format!("a GGUF of architecture {arch}"),
            next: "this version imports GGUF files of architecture llama; convert the safetensors version if its \
                   family is supported"
                .into(),
        });
    }
    if gguf.meta.get("split.count").and_then(Value::whole).is_some_and(|n| n > 1) {
        return Err(Malformed::Unsupported {
            what: "one part of a split GGUF".into(),
            next: "join the parts first: llama-gguf-split --merge FIRST-PART OUT.gguf".into(),
        });
    }
    let config = config(gguf)?;
    let head_dim = config["head_dim"].as_u64().unwrap_or(0) as usize;
    let mut tensors = std::collections::BTreeMap::new();
    for t in gguf.tensors.iter().filter(|t| t.name != ROPE_FACTORS) {
        let (name, rows) = rename(t, head_dim)?;
        let raw = RawTensor { dtype: t.dtype, shape: t.shape.clone(), bytes: t.bytes, rows };
        if tensors.insert(name.clone(), raw).is_some() {
            let same = |other: &&Tensor| rename(other, head_dim).is_ok_and(|r| r.0 == name);
            let first = gguf.tensors.iter().find(same).map_or("another", |other| other.name);
            let got = format!("{first} and {}; keep one of them", t.name);
            return Err(Malformed::field("tensor names", format!("one that means {name}"), got));
        }
    }
    let mut notes = vec![];
    let tokenizer = gguf_tokenizer::tokenizer_json(gguf, &mut notes)?;
    Ok(Checkpoint {
        name: name.into(),
        tensors,
        config,
        quant_config: None,
        tokenizer,
        chat_template: gguf.optional("tokenizer.chat_template").map(String::from),
        generation: generation(gguf, &mut notes)?,
        licence: gguf.optional("general.license").map(String::from),
        model: gguf.optional("general.name").map(String::from),
        gguf: true,
        notes,
    })
}

/// Tensor that holds Llama 3's rope scaling, one divisor per frequency.
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// The metadata as a `config.json`.
fn config(gguf: &Gguf) -> Result<Json, Malformed> {
    let size = |key: &str| gguf.whole(&format!("llama.{key}"));
    let hidden = size("embedding_length")?.ok_or_else(|| missing("llama.embedding_length"))?;
    let heads = size("attention.head_count")?.ok_or_else(|| missing("llama.attention.head_count"))?;
    if heads == 0 {
        return Err(Malformed::field("llama.attention.head_count", "at least 1", 0));
    }
    let kv_heads = size("attention.head_count_kv")?.unwrap_or(heads);
    let head_dim = size("attention.key_length")?.unwrap_or(hidden / heads);
    for (key, neutral) in [
        ("attention.value_length", head_dim),
        ("rope.dimension_count", head_dim),
        ("expert_count", 0),
        ("attention.sliding_window", 0),
    ] {
        if let Some(got) = size(key)?.filter(|&v| v != neutral) {
            return Err(Malformed::Unsupported {
                what: format!("llama.{key} is {got} where this version can run only {neutral}"),
                next: "the model would compute something else; convert another model".into(),
            });
        }
    }
    if head_dim == 0 || head_dim % 2 != 0 {
        return Err(Malformed::field("head dimension", "an even number", head_dim));
    }
    let eps = gguf.float("llama.attention.layer_norm_rms_epsilon")?;
    let vocab = match gguf.tensors.iter().find(|t| t.name == "token_embd.weight") {
        Some(Tensor { shape, .. }) => shape[0],
        None => return Err(Malformed::field("tensor token_embd.weight", "present", "missing")),
    };
    let has = |name: &str| gguf.tensors.iter().any(|t| t.name == name);
    let mut config = json!({
        "model_type": "llama",
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": size("feed_forward_length")?.ok_or_else(|| missing("llama.feed_forward_length"))?,
        "num_hidden_layers": size("block_count")?.ok_or_else(|| missing("llama.block_count"))?,
        "vocab_size": vocab,
        "rms_norm_eps": eps.ok_or_else(|| missing("llama.attention.layer_norm_rms_epsilon"))?,
        "rope_parameters": rope(gguf, head_dim)?,
        "tie_word_embeddings": !has("output.weight"),
        "attention_bias": has("blk.0.attn_q.bias"),
        "mlp_bias": has("blk.0.ffn_gate.bias"),
    });
    if let Some(context) = size("context_length")? {
        config["max_position_embeddings"] = context.into();
    }
    Ok(config)
}

fn rope(gguf: &Gguf, head_dim: u64) -> Result<Map<String, Json>, Malformed> {
    let theta = gguf.float("llama.rope.freq_base")?.unwrap_or(10000.0);
    let factor = gguf.float("llama.rope.scaling.factor")?.or(gguf.float("llama.rope.scale_linear")?);
    let kind = gguf.optional("llama.rope.scaling.type").unwrap_or(if factor.is_some() { "linear" } else { "none" });
    let mut rope = Map::new();
    rope.insert("rope_theta".into(), theta.into());
    if let Some(t) = gguf.tensors.iter().find(|t| t.name == ROPE_FACTORS) {
        rope.insert("rope_type".into(), "llama3".into());
        rope.insert("factor".into(), llama3(t, theta, head_dim)?.into());
        rope.insert("low_freq_factor".into(), LOW_FREQ.into());
        rope.insert("high_freq_factor".into(), HIGH_FREQ.into());
        rope.insert("original_max_position_embeddings".into(), ORIGINAL_CONTEXT.into());
        return Ok(rope);
    }
    match (kind, factor) {
        ("linear", Some(factor)) if factor != 1.0 => {
            rope.insert("rope_type".into(), "linear".into());
            rope.insert("factor".into(), factor.into());
        }
        ("linear" | "none", _) => {
            rope.insert("rope_type".into(), "default".into());
        }
        // The family refuses it by this name.
        (other, _) => {
            rope.insert("rope_type".into(), other.into());
        }
    }
    Ok(rope)
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

/// The Hugging Face name of a tensor and the order of its rows. Unknown names stay: the importer reports them.
fn rename(t: &Tensor, head_dim: usize) -> Result<(String, Rows), Malformed> {
    let whole = |name: &str| Ok((name.to_string(), Rows::InOrder));
    match t.name {
        "token_embd.weight" => return whole("model.embed_tokens.weight"),
        "output_norm.weight" => return whole("model.norm.weight"),
        "output.weight" => return whole("lm_head.weight"),
        _ => {}
    }
    let parts = t.name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    let Some((layer, (module, kind))) = parts.and_then(|(i, rest)| Some((i, rest.rsplit_once('.')?))) else {
        return whole(t.name);
    };
    let (ours, permuted) = match module {
        "attn_norm" => ("input_layernorm", false),
        "ffn_norm" => ("post_attention_layernorm", false),
        "attn_q" => ("self_attn.q_proj", true),
        "attn_k" => ("self_attn.k_proj", true),
        "attn_v" => ("self_attn.v_proj", false),
        "attn_output" => ("self_attn.o_proj", false),
        "ffn_gate" => ("mlp.gate_proj", false),
        "ffn_up" => ("mlp.up_proj", false),
        "ffn_down" => ("mlp.down_proj", false),
        _ => return whole(t.name),
    };
    if permuted && !t.shape[0].is_multiple_of(head_dim as u64) {
        return Err(Malformed::field(
            format!("tensor {}: rows", t.name),
            format!("a multiple of {head_dim}"),
            t.shape[0],
        ));
    }
    let rows = if permuted { Rows::Interleaved { head_dim } } else { Rows::InOrder };
    Ok((format!("model.layers.{layer}.{ours}.{kind}"), rows))
}

/// Control tokens that end a turn, whatever the metadata says of them: the ones llama.cpp looks for by text.
const END_OF_TURN: [&str; 4] = ["<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"];

fn generation(gguf: &Gguf, notes: &mut Vec<String>) -> Result<Generation, Malformed> {
    let id = |key: &str| gguf.whole(&format!("tokenizer.ggml.{key}_token_id")).map(|v| v.map(|v| v as u32));
    let mut eos: Vec<u32> = vec![];
    for key in ["eos", "eot", "eom"] {
        eos.extend(id(key)?.filter(|v| !eos.contains(v)));
    }
    let tokens = match gguf.meta.get("tokenizer.ggml.tokens") {
        Some(Value::Texts(tokens)) => &tokens[..],
        _ => &[],
    };
    if let Some(Value::Numbers(types)) = gguf.meta.get("tokenizer.ggml.token_type") {
        for (id, (token, kind)) in (0u32..).zip(tokens.iter().zip(types.iter())) {
            if END_OF_TURN.contains(token) && kind.whole() == Some(3) && !eos.contains(&id) {
                eos.push(id);
                notes.push(format!(
                    "{token} ({id}) ends an answer too: the GGUF has it as a control token, but not among its end tokens"
                ));
            }
        }
    }
    let text = |id: Option<u32>| tokens.get(id? as usize).map(|t| t.to_string());
    Ok(Generation {
        bos_text: text(id("bos")?),
        eos_text: text(id("eos")?),
        bos: id("bos")?,
        pad: id("padding")?,
        eos,
        ..Generation::default()
    })
}

fn missing(key: &str) -> Malformed {
    Malformed::field(format!("metadata {key}"), "present", "missing")
}

impl<'a> Gguf<'a> {
    /// A whole number, absent or of the right type; an array counts when all its elements are equal.
    pub fn whole(&self, key: &str) -> Result<Option<u64>, Malformed> {
        let one = match self.meta.get(key) {
            None => return Ok(None),
            Some(Value::Numbers(n)) => {
                let mut all = n.iter();
                all.next().filter(|first| all.all(|v| v == *first))
            }
            Some(v) => Some(v.clone()),
        };
        let whole = one.as_ref().and_then(Value::whole).filter(|&n| n <= u32::MAX as u64);
        whole.map(Some).ok_or_else(|| Malformed::field(key, "one whole number below 2^32", self.shown(key)))
    }

    /// A number, absent or of the right type.
    pub fn float(&self, key: &str) -> Result<Option<f64>, Malformed> {
        match self.meta.get(key) {
            None => Ok(None),
            Some(Value::Float(f)) if f.is_finite() => Ok(Some(*f)),
            Some(_) => Err(Malformed::field(key, "a finite float", self.shown(key))),
        }
    }

    /// A flag, absent or of the right type.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, Malformed> {
        match self.meta.get(key) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(_) => Err(Malformed::field(key, "a flag", self.shown(key))),
        }
    }

    /// Text that must be there.
    pub fn text(&self, key: &str) -> Result<&'a str, Malformed> {
        self.optional(key).ok_or_else(|| Malformed::field(key, "text", self.shown(key)))
    }

    /// Text, if it is there.
    pub fn optional(&self, key: &str) -> Option<&'a str> {
        match self.meta.get(key) {
            Some(Value::Text(s)) => Some(s),
            _ => None,
        }
    }

    /// A value for messages.
    pub(in crate::source) fn shown(&self, key: &str) -> String {
        match self.meta.get(key) {
            None => "nothing".into(),
            Some(Value::Texts(v)) => format!("{} texts", v.len()),
            Some(Value::Numbers(v)) => format!("{} numbers", v.len()),
            Some(v) => format!("{v:?}"),
        }
    }
}
