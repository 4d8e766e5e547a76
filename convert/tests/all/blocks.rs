//! Block types against gguf-py (and through it ggml): the same f32 of every weight.

use std::fs;

use quern_convert::{
    import::blocks::Blocks,
    pack,
    source::{Block, Dtype, RawTensor, Rows, safetensors},
};
use quern_models::{FloatType, TensorView};

use crate::made::fixture;

#[test]
fn weights_are_ggmls_bit_for_bit() {
    let bytes = fs::read(fixture("golden/gguf_blocks.safetensors")).unwrap();
    let golden = safetensors::parse(&bytes).unwrap();
    for block in Block::ALL {
        let (name, n, k) = (block.name(), golden[&format!("{}.values", block.name())].shape[0], block.columns());
        let values = &golden[&format!("{name}.values")];
        let raw = RawTensor {
            dtype: Dtype::Block(block),
            shape: vec![n, k as u64],
            bytes: golden[&format!("{name}.blocks")].bytes,
            rows: Rows::InOrder,
        };
        assert_eq!(raw.bytes.len(), n as usize * block.bytes(), "{name}");
        let blocks = Blocks::new(name, &raw, block, n as usize, k).unwrap();
        let packed = pack(&blocks);
        let view = TensorView::new(n as usize, k, quern_convert::import::Integers::shape(&blocks).scheme(), &packed);
        let view = view.unwrap();
        for (row, col) in (0..n as usize).flat_map(|r| (0..k).map(move |c| (r, c))) {
            let expected = FloatType::F32.read(values.bytes, row * k + col);
            let got = view.at(row, col);
            // E2M1 has a negative zero, ggml's table for it does not.
            let same = expected.to_bits() == got.to_bits() || block == Block::MXFP4 && expected == got;
            assert!(same, "{name} [{row}, {col}]: expected {expected:e}, got {got:e}");
        }
    }
}
