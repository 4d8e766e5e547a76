//! The JSON files beside the tensors: config, tokenizer, defaults.

use quern_models::FloatType;
use serde_json::{Map, Value, json};

use super::{Model, Tensors, folder::Folder};
use crate::ConvertError;

/// Writes them all.
pub fn write(folder: &Folder, model: &Model, tensors: &Tensors) -> Result<(), ConvertError> {
    folder.json("config.json", &config(model, tensors))?;
    if let Some(quantization) = &tensors.quantization {
        folder.json("quantize_config.json", quantization)?;
    }
    folder.json("generation_config.json", &generation(model))?;
    if let Some(tokenizer) = model.file.tokenizer_json() {
        folder.bytes("tokenizer.json", tokenizer)?;
        folder.json("tokenizer_config.json", &tokenizer_config(model, tokenizer))?;
    }
    Ok(())
}

/// The source's config with what became of its tensors.
fn config(model: &Model, tensors: &Tensors) -> Value {
    let mut config = model.config.clone();
    let map = config.as_object_mut().expect("source_config() checked it");
    map.shift_remove("torch_dtype");
    map.insert("dtype".into(), name(tensors.dtype).into());
    map.insert("tie_word_embeddings".into(), model.file.spec().tied_head.into());
    // Publishers pad: what counts is what the tensors have.
    let spec = model.file.spec();
    let dense = spec.layers.iter().find(|l| !l.mlp.routed()).map(|l| ("intermediate_size", l.mlp.inner()));
    for (key, size) in [("vocab_size", spec.vocab)].into_iter().chain(dense) {
        if let Some(said) = map.get_mut(key).filter(|v| v.is_u64()) {
            *said = size.into();
        }
    }
    let class = map.get("model_type").and_then(Value::as_str).and_then(architecture);
    if let (None, Some(class)) = (map.get("architectures"), class) {
        map.insert("architectures".into(), json!([class]));
    }
    let generation = model.file.generation();
    for (key, id) in [("bos_token_id", generation.bos), ("pad_token_id", generation.pad)] {
        if let Some(id) = id {
            map.entry(key).or_insert(id.into());
        }
    }
    if !generation.eos.is_empty() {
        map.entry("eos_token_id").or_insert(one_or_more(&generation.eos));
    }
    if let Some(quantization) = &tensors.quantization {
        map.insert("quantization_config".into(), quantization.clone());
    }
    config
}

/// A float type as configs name it.
fn name(kind: FloatType) -> &'static str {
    match kind {
        FloatType::F32 => "float32",
        FloatType::F16 => "float16",
        FloatType::BF16 => "bfloat16",
    }
}

/// The class that transformers has for a model_type; GGUF sources do not say.
fn architecture(model_type: &str) -> Option<&'static str> {
    Some(match model_type {
        "llama" => "LlamaForCausalLM",
        "mistral" => "MistralForCausalLM",
        "qwen2" => "Qwen2ForCausalLM",
        "qwen3" => "Qwen3ForCausalLM",
        "smollm3" => "SmolLM3ForCausalLM",
        "gpt2" => "GPT2LMHeadModel",
        "gpt_neo" => "GPTNeoForCausalLM",
        _ => return None,
    })
}

fn one_or_more(ids: &[u32]) -> Value {
    if let [one] = ids { (*one).into() } else { json!(ids) }
}

/// generation_config.json, which the import reads back as it was.
fn generation(model: &Model) -> Value {
    let g = model.file.generation();
    let mut map = Map::new();
    let mut put = |key: &str, value: Option<Value>| drop(value.map(|v| map.insert(key.into(), v)));
    put("bos_token_id", g.bos.map(Value::from));
    put("eos_token_id", (!g.eos.is_empty()).then(|| one_or_more(&g.eos)));
    put("pad_token_id", g.pad.map(Value::from));
    put("do_sample", g.do_sample.map(Value::from));
    put("temperature", g.temperature.map(float));
    put("top_k", g.top_k.map(Value::from));
    put("top_p", g.top_p.map(float));
    put("min_p", g.min_p.map(float));
    put("repetition_penalty", g.repetition_penalty.map(float));
    map.into()
}

/// A number in its shortest form: 0.6, not 0.6000000238418579.
fn float(x: f32) -> Value {
    x.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

/// What tokenizer.json does not say: special tokens by their roles, the template.
fn tokenizer_config(model: &Model, tokenizer: &[u8]) -> Value {
    let g = model.file.generation();
    let pad = g.pad.and_then(|id| text_of(tokenizer, id));
    let mut map = Map::new();
    let mut put = |key: &str, value: Option<Value>| drop(value.map(|v| map.insert(key.into(), v)));
    put("tokenizer_class", Some("PreTrainedTokenizerFast".into()));
    put("bos_token", g.bos_text.clone().map(Value::from));
    put("eos_token", g.eos_text.clone().map(Value::from));
    put("pad_token", pad.map(Value::from));
    put("model_max_length", Some(model.file.spec().max_context.into()));
    put("clean_up_tokenization_spaces", Some(false.into()));
    put("chat_template", model.file.chat_template().map(Value::from));
    map.into()
}

/// Text of an added token.
fn text_of(tokenizer: &[u8], id: u32) -> Option<String> {
    let tokenizer: Value = serde_json::from_slice(tokenizer).ok()?;
    let added = tokenizer.get("added_tokens")?.as_array()?;
    let token = added.iter().find(|t| t.get("id").and_then(Value::as_u64) == Some(id.into()))?;
    token.get("content")?.as_str().map(String::from)
}
