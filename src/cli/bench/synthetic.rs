//! Models of a given shape with random int4 weights, to measure speed without a download.
//!
//! The file is written to the system's temporary folder, mapped and deleted at once.

use std::{
    error::Error,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use quern_models::{FileWriter, FloatType, Generation, Meta, ModelFile, Scheme, TensorPlan, ZeroKind, family};
use serde_json::{Value, json};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    flag,
};

use crate::cli::{Usage, size};

/// Llama 3 shapes by name, or the shape of a `config.json`.
fn config(shape: &str) -> Result<Value, Box<dyn Error>> {
    let llama = |hidden, layers, heads, kv_heads, inner| {
        json!({
            "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "intermediate_size": inner, "vocab_size": 128256,
            "max_position_embeddings": 8192, "rope_theta": 500000.0, "tie_word_embeddings": hidden < 4096,
        })
    };
    match shape {
        "llama-1b" => Ok(llama(2048, 16, 32, 8, 8192)),
        "llama-3b" => Ok(llama(3072, 28, 24, 8, 8192)),
        "llama-8b" => Ok(llama(4096, 32, 32, 8, 14336)),
        path if path.ends_with(".json") => {
            let text = std::fs::read_to_string(path).map_err(|e| format!("--synthetic: {path}: {e}"))?;
            Ok(serde_json::from_str(&text).map_err(|e| format!("--synthetic: {path}: {e}"))?)
        }
        other => {
            let known = "llama-1b, llama-3b, llama-8b or a file that ends in .json";
            Err(Usage(format!("--synthetic: {other:?} is not {known}")).into())
        }
    }
}

/// Writes and opens a model with random weights: int4 layers, int8 embedding and head.
pub fn model(shape: &str, group: u32) -> Result<ModelFile, Box<dyn Error>> {
    if group == 0 || !group.is_multiple_of(32) || group > 1 << 16 {
        return Err(Usage(format!("--group: {group} is not a multiple of 32 up to 65536")).into());
    }
    let plan = family::plan(&config(shape)?, &())?;
    let scheme = |name: &str, dims: &[u64]| match (name, dims.len()) {
        (_, 1) => Scheme::Float(FloatType::F32),
        ("embed" | "head", _) => Scheme::Int { bits: 8, group: 32, zero: ZeroKind::Mid, scale: FloatType::F16 },
        _ => Scheme::Int { bits: 4, group, zero: ZeroKind::Mid, scale: FloatType::F16 },
    };
    let needed = plan.spec.tensors().into_iter();
    let plans: Vec<_> =
        needed.map(|t| TensorPlan { scheme: scheme(&t.name, &t.dims), name: t.name, dims: t.dims }).collect();
    let meta = Meta {
        spec: plan.spec,
        tokenizer: None,
        chat_template: None,
        generation: Generation::default(),
        provenance: json!({"source": "random weights", "shape": shape}),
    };
    let path: PathBuf = std::env::temp_dir().join(format!("quern-synthetic-{}.qrn", std::process::id()));
    let bytes: u64 = plans.iter().map(|p| planes(p).map_or(u64::MAX, |p| p.total)).fold(0, u64::saturating_add);
    if bytes > MOST_BYTES {
        let (asked, most) = (size(bytes), size(MOST_BYTES));
        return Err(Usage(format!("--synthetic: {shape} needs {asked} on the disk, expected at most {most}")).into());
    }
    // While the file has a name, a signal ends the writing (which removes it); afterwards it ends the program.
    let (interrupted, unlinked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        flag::register(signal, interrupted.clone())?;
        flag::register_conditional_default(signal, unlinked.clone())?;
    }
    let mut writer = FileWriter::create(&path, &meta, plans.clone())?;
    let mut state = 0x9e3779b97f4a7c15u64;
    for plan in &plans {
        if interrupted.load(Ordering::Relaxed) {
            return Err("interrupted; nothing was left behind".into());
        }
        writer.write(&random_tensor(plan, &mut state))?;
    }
    writer.finish()?;
    let file = ModelFile::open(&path);
    // The map keeps the bytes; nothing is left behind even if the measurement is interrupted.
    std::fs::remove_file(&path)?;
    unlinked.store(true, Ordering::Relaxed);
    Ok(file?)
}

/// Disk space that a synthetic model may take: a 400B model at four bits.
const MOST_BYTES: u64 = 256_000_000_000;

fn planes(plan: &TensorPlan) -> Option<quern_models::Planes> {
    let (n, k) = if plan.dims.len() == 2 { (plan.dims[0], plan.dims[1]) } else { (1, plan.dims[0]) };
    plan.scheme.planes(n, k)
}

fn random_tensor(plan: &TensorPlan, state: &mut u64) -> Vec<u8> {
    let planes = planes(plan).expect("FileWriter::create accepted the plan");
    let k = plan.dims[plan.dims.len() - 1];
    let mut bytes = vec![0; planes.total as usize];
    if let Scheme::Float(_) = plan.scheme {
        // Norm weights of one keep activations in a sane range.
        bytes.chunks_exact_mut(4).for_each(|b| b.copy_from_slice(&1f32.to_le_bytes()));
        return bytes;
    }
    let (codes, rest) = bytes.split_at_mut(planes.codes.1 as usize);
    for chunk in codes.chunks_mut(8) {
        *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let mixed = *state ^ (*state >> 29);
        chunk.copy_from_slice(&mixed.to_le_bytes()[..chunk.len()]);
    }
    let at = (planes.scales.0 - planes.codes.1) as usize;
    let scale = half::f16::from_f32(0.5 / (k as f32).sqrt() / 8.0).to_le_bytes();
    rest[at..at + planes.scales.1 as usize].chunks_exact_mut(2).for_each(|b| b.copy_from_slice(&scale));
    bytes
}
