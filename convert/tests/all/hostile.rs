//! Damaged files: an error or a result, never a panic, never more memory than the bytes justify.

use std::fs;

use quern_convert::Options;
use quern_convert::source::{gguf, safetensors};

use quern_models::FloatType;
use serde_json::json;

use crate::made::*;

fn read_gguf(bytes: &[u8]) -> bool {
    gguf::parse(bytes).is_ok_and(|g| gguf::checkpoint(&g, "t").is_ok())
}

#[test]
fn damaged_ggufs() {
    let bytes = fs::read(fixture("gguf/llama-q4_0/model.gguf")).unwrap();
    assert!(read_gguf(&bytes));
    let header = 20_000.min(bytes.len());
    for cut in (0..header).step_by(61).chain([0, 1, 7, 8, 23, 24]) {
        assert!(!read_gguf(&bytes[..cut]), "cut at {cut}");
    }
    let mut random = Random::new(21);
    for _ in 0..2000 {
        let mut bad = bytes[..].to_vec();
        for _ in 0..1 + random.below(3) {
            let at = random.below(header as u64) as usize;
            bad[at] = random.below(256) as u8;
        }
        read_gguf(&bad);
    }
    for _ in 0..1000 {
        let mut bad = bytes[..].to_vec();
        let at = random.below(header as u64 - 8) as usize;
        bad[at..at + 8].copy_from_slice(&[u64::MAX, 1 << 62, 1 << 33, 1 << 20][random.below(4) as usize].to_le_bytes());
        read_gguf(&bad);
    }
}

#[test]
fn damaged_safetensors() {
    let bytes = fs::read(fixture("models/llama-gptq-w4-g64-sym/model.safetensors")).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    assert!(safetensors::parse(&bytes).is_ok());
    for cut in 0..header {
        assert!(safetensors::parse(&bytes[..cut]).is_err(), "cut at {cut}");
    }
    let mut random = Random::new(22);
    for _ in 0..3000 {
        let mut bad = bytes.clone();
        bad[random.below(header as u64) as usize] = random.below(256) as u8;
        let _ = safetensors::parse(&bad);
    }
}

/// Damages one part of a packed checkpoint at a time: its type, its shape, its values. What comes out is an error, or
/// a file that equals its source (a changed code is a code).
#[test]
fn damaged_packed_tensors() {
    let mut random = Random::new(23);
    let mut refused = 0;
    for round in 0..400 {
        let mut tensors = around(&mut random);
        let awq = round % 4;
        for (_, module, n, k) in LINEARS {
            let chosen = Chosen::new(&mut random, n, k, 4, 32, round % 3 == 0);
            match awq {
                0 | 1 => chosen.gptq(&mut tensors, module, true, FloatType::F16),
                2 => chosen.awq(&mut tensors, module, FloatType::F16),
                _ => chosen.gemv(&mut tensors, module, 32),
            }
        }
        let names: Vec<String> = tensors.keys().filter(|n| n.contains("_proj.")).cloned().collect();
        let name = &names[random.below(names.len() as u64) as usize];
        let (dtype, shape, bytes) = tensors.get_mut(name).unwrap();
        match random.below(5) {
            0 => *dtype = ["F16", "I16", "BF16"][random.below(3) as usize],
            1 => shape.reverse(),
            2 => shape.iter_mut().for_each(|d| *d = d.div_ceil(2)),
            3 => *shape = vec![shape.iter().product(), 1, 1],
            _ => (0..8).for_each(|_| {
                let at = random.below(bytes.len() as u64) as usize;
                bytes[at] = random.below(256) as u8;
            }),
        }
        let size = if matches!(*dtype, "F16" | "I16" | "BF16") { 2 } else { 4 };
        bytes.resize(shape.iter().product::<usize>() * size, 0);
        let mut config = config();
        if round % 2 == 0 {
            let method = if awq < 2 { "gptq" } else { "awq" };
            config["quantization_config"] = json!({ "quant_method": method, "bits": 4, "group_size": 32 });
        }
        let scratch = Scratch::new("damaged-packed");
        write(&scratch.model(), &config, &tensors, "model.safetensors");
        if let Err(error) = scratch.convert(&Options::default()) {
            let text = error.to_string();
            assert!(!text.contains('\n') && !text.contains("verification failed"), "{name}: {text}");
            refused += 1;
        }
    }
    assert!((200..400).contains(&refused), "{refused} of 400 are refused");
}
