//! Checkpoints of llm-compressor and of the FP8 formats, all of them as those tools wrote them.
//!
//! Too large to commit together: QUERN_SHARED names a folder with `fixtures/tiny-quant/NAME`. Those in `fixtures/models`
//! are compared by the tests of [`crate::parity`] as well.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use quern_convert::source::{Dtype, safetensors};
use quern_models::{FloatType, ModelFile, Scheme};

use crate::{
    parity::compare,
    support::{
        Scratch,
        golden::{Golden, written},
        model::kept,
        skip,
    },
};

/// Name, method, and scheme of the linears.
const CHECKPOINTS: [(&str, &str, &str); 19] = [
    ("llama-ct-w2a16-g32", "compressed-tensors", "int4 g32 sym"),
    ("llama-ct-w4a16-g128-preset", "compressed-tensors", "int4 g128 sym"),
    ("llama-ct-w4a16-g32-sym-actorder-weight", "compressed-tensors", "int4 g32 sym"),
    ("llama-ct-w4a16-g64-asym", "compressed-tensors", "int4 g64 zero"),
    ("llama-ct-w4a16-g64-asym-awq", "compressed-tensors", "int4 g64 zero"),
    ("llama-ct-w4a16-g64-sym", "compressed-tensors", "int4 g64 sym"),
    ("llama-ct-w8a16-g64", "compressed-tensors", "int8 g64 sym"),
    ("llama-ct-w8a8-int", "compressed-tensors", "int8 g128 sym"),
    ("llama-ct-fp8-block", "compressed-tensors", "fp8 g128"),
    ("llama-ct-fp8-dynamic", "compressed-tensors", "fp8 g128"),
    ("llama-ct-fp8-static", "compressed-tensors", "fp8 g128"),
    ("llama-ct-mxfp4", "compressed-tensors", "fp4 g32 bf16 scales"),
    ("llama-ct-mxfp4a16", "compressed-tensors", "fp4 g32 bf16 scales"),
    ("llama-ct-nvfp4a16", "compressed-tensors", "fp4 g16 f32 scales"),
    ("llama-fp8-finegrained-64", "fp8", "fp8 g64 f32 scales"),
    ("llama-ct-w4a16-g32-sym-actorder-group", "compressed-tensors", "int4 g32 sym"),
    ("qwen2-ct-w4a16-g64-asym-awq", "compressed-tensors", "int4 g64 zero"),
    ("qwen2-ct-w4a16-g64-sym", "compressed-tensors", "int4 g64 sym"),
    ("qwen2-ct-w8a8-int", "compressed-tensors", "int8 g128 sym"),
];

#[test]
fn every_checkpoint_gives_its_golden() {
    let Some(shared) = env::var_os("QUERN_SHARED") else {
        return skip("compressed::every_checkpoint_gives_its_golden", "set QUERN_SHARED to the shared folder");
    };
    for (name, method, scheme) in CHECKPOINTS {
        let dir = Path::new(&shared).join("fixtures/tiny-quant").join(name);
        let scratch = Scratch::new("compressed");
        let source = if name == "llama-fp8-finegrained-64" { unrounded(&dir, &scratch) } else { dir.clone() };
        let (report, file) = kept(&source, &scratch);
        assert_eq!(report.method, method, "{name}");
        assert!(report.rows.iter().any(|r| r.scheme == scheme), "{name}: {:?}", report.rows);
        let golden = Golden::read(&dir);
        weights(name, &file, &golden);
        growth(name, &dir, &file);
        compare(name, &file, &golden);
    }
}

/// The file's weights are those of the golden, bit for bit.
fn weights(name: &str, file: &ModelFile, golden: &Golden) {
    let mut compared = 0;
    // Act-order moves columns, and rows of what makes them.
    if file.tensors().iter().any(|t| t.scheme == Scheme::Order) {
        return;
    }
    for (module, dense) in golden.dense() {
        let view = file.tensor(&target(module)).unwrap();
        assert_eq!(dense.cols, view.k);
        for (row, dense) in dense.rows().enumerate() {
            for (col, wanted) in dense.iter().enumerate() {
                // Equal; zeros of the small floats have signs, those of other tools' sums do not.
                assert_eq!(view.at(row, col), *wanted, "{name} {module} [{row}, {col}]");
            }
        }
        compared += 1;
    }
    assert_eq!(compared, 2, "{name}");
}

fn target(module: &str) -> String {
    let (layer, rest) = module.strip_prefix("model.layers.").unwrap().split_once('.').unwrap();
    format!("layers.{layer}.{}", rest.rsplit('.').next().unwrap().strip_suffix("_proj").unwrap())
}

/// Bits of a quantized weight in the source and in the file.
fn growth(name: &str, dir: &Path, file: &ModelFile) {
    let bytes = fs::read(dir.join("model.safetensors")).unwrap();
    let tensors = safetensors::parse(&bytes).unwrap();
    let linear = |name: &&String| name.contains("_proj.weight");
    let source: usize = tensors.keys().filter(linear).map(|name| tensors[name].bytes.len()).sum();
    let (mut weights, mut ours) = (0, 0);
    for info in file.tensors().iter().filter(|t| t.scheme.coded().is_some()) {
        let (n, k) = info.shape();
        weights += n * k;
        ours += info.scheme.planes(n, k).unwrap().total;
    }
    let bits = |bytes: f64| bytes * 8.0 / weights as f64;
    println!("{name}: {:.3} bits a weight in the source, {:.3} in the file", bits(source as f64), bits(ours as f64));
}

/// The checkpoint with the base's own f16 embeddings, norms and head: the golden was computed with these, the file has
/// them rounded to bf16.
pub fn unrounded(dir: &Path, scratch: &Scratch) -> PathBuf {
    let copy = scratch.copy(dir, "unrounded");
    let (bytes, base) =
        (fs::read(dir.join("model.safetensors")), fs::read(dir.join("../_base/llama/model.safetensors")));
    let (bytes, base) = (bytes.unwrap(), base.unwrap());
    let (mut tensors, base) = (safetensors::parse(&bytes).unwrap(), safetensors::parse(&base).unwrap());
    for (name, raw) in &mut tensors {
        if raw.dtype == Dtype::Float(FloatType::BF16) {
            *raw = base[name].clone();
        }
    }
    let path = copy.join("model.safetensors");
    fs::remove_file(&path).unwrap();
    fs::write(path, written(&tensors)).unwrap();
    copy
}
