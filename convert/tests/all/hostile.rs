//! Damaged files: an error or a result, never a panic, never more memory than the bytes justify.

use std::fs;

use quern_convert::source::{gguf, safetensors};

use crate::made::{Random, fixture};

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
