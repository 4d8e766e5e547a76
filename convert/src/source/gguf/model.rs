//! A GGUF file as a Hugging Face checkpoint: config, tensor names, row order, special tokens.
//!
//! One family path serves both formats: what llama.cpp's converter did is undone here, exactly.

use std::collections::BTreeMap;

use quern_models::Generation;

use super::{Gguf, Tensor, Value, arch::Arch, rope::ROPE_FACTORS};
use crate::{
    Malformed,
    source::{Checkpoint, RawTensor, gguf_tokenizer},
};

/// Turns a parsed file (or the joined parts of one) into a checkpoint.
pub fn checkpoint<'a>(gguf: &Gguf<'a>, name: &str) -> Result<Checkpoint<'a>, Malformed> {
    let arch = Arch::of(gguf)?;
    let config = arch.config(gguf)?;
    let head_dim = arch.head_dim(gguf)?;
    let mut tensors = BTreeMap::new();
    for t in gguf.tensors.iter().filter(|t| t.name != ROPE_FACTORS) {
        let (name, rows) = arch.rename(t, head_dim)?;
        let raw = RawTensor { dtype: t.dtype, shape: t.shape.clone(), bytes: t.bytes, rows };
        if tensors.insert(name.clone(), raw).is_some() {
            let same = |other: &&Tensor| arch.rename(other, head_dim).is_ok_and(|r| r.0 == name);
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
