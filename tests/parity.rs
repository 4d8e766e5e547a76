//! Logits and greedy tokens of every committed fixture against the goldens of other libraries.
//!
//! Exact mode must be within the bound of [`Golden::exact_bound`] at all positions and give the
//! golden's greedy tokens; default mode must be within 5 % of the range.

use std::{path::Path, sync::Arc};

use quern_kernels::reference;
use quern_models::ModelFile;

use crate::support::{
    Scratch, fixture,
    golden::{Golden, distance, margin},
    model::{self, Run, Sequence, kept},
    skip,
};

/// Largest deviation of default mode, as a share of the logit range.
pub const DEFAULT_SHARE: f32 = 0.05;

#[test]
fn llama() {
    parity("models/llama", "float");
}

#[test]
fn llama3_rope() {
    parity("models/llama3-rope", "float");
}

#[test]
fn llama_yarn() {
    parity("models/llama-yarn", "float");
}

#[test]
fn mistral() {
    parity("models/mistral", "float");
}

#[test]
fn qwen2() {
    parity("models/qwen2", "float");
}

#[test]
fn qwen3() {
    parity("models/qwen3", "float");
}

#[test]
fn mixtral() {
    parity("models/mixtral", "float");
}

#[test]
fn qwen3_moe() {
    parity("models/qwen3_moe", "float");
}

#[test]
fn smollm3() {
    parity("models/smollm3", "float");
}

#[test]
fn gemma2() {
    parity("models/gemma2", "float");
}

#[test]
fn gemma3() {
    parity("models/gemma3", "float");
}

#[test]
fn mimo() {
    parity("heads/mimo", "float");
}

#[test]
fn gpt2() {
    parity("models/gpt2", "float");
}

#[test]
fn gpt_neo() {
    parity("models/gpt_neo", "float");
}

#[test]
fn gptq_g64_symmetric() {
    parity("models/llama-gptq-w4-g64-sym", "gptq");
}

#[test]
fn gptq_g64_asymmetric() {
    parity("models/llama-gptq-w4-g64-asym", "gptq");
}

#[test]
fn gptq_g128_symmetric() {
    parity("models/llama-gptq-w4-g128-sym", "gptq");
}

#[test]
fn gptq_v2() {
    parity("models/llama-gptq_v2-w4-g64-sym", "gptq");
}

#[test]
fn gptq_experts() {
    parity("models/qwen3_moe-gptq-w4-g32-sym", "gptq");
}

#[test]
fn gptq_two_real_layers() {
    parity("models/smollm2-gptq-2layer", "gptq");
}

#[test]
fn awq_g32() {
    parity("models/llama-awq-w4-g32-gemm", "awq");
}

#[test]
fn awq_g64() {
    parity("models/llama-awq-w4-g64-gemm", "awq");
}

#[test]
fn awq_gemv_fast() {
    parity("models/llama-awq-w4-g64-gemv_fast", "awq");
}

#[test]
fn gptq_two_bits() {
    parity("models/llama-gptq-w2-g32-sym", "gptq");
}

#[test]
fn gptq_two_bits_asymmetric() {
    parity("models/llama-gptq_v2-w2-g64-asym", "gptq");
}

#[test]
fn gptq_three_bits() {
    parity("models/llama-gptq-w3-g32-sym", "gptq");
}

#[test]
fn gptq_act_order() {
    parity("models/llama-gptq-w4-g32-sym-descact", "gptq");
}

#[test]
fn gptq_act_order_asymmetric() {
    parity("models/llama-gptq_v2-w4-g32-asym-descact", "gptq");
}

#[test]
fn compressed_w4_g64_asymmetric() {
    parity("models/llama-ct-w4a16-g64-asym", "compressed-tensors");
}

#[test]
fn compressed_w2_g32() {
    parity("models/llama-ct-w2a16-g32", "compressed-tensors");
}

#[test]
fn compressed_int8_rows() {
    parity("models/llama-ct-w8a8-int", "compressed-tensors");
}

#[test]
fn compressed_fp8_blocks() {
    parity("models/llama-ct-fp8-block", "compressed-tensors");
}

#[test]
fn compressed_mxfp4() {
    parity("models/llama-ct-mxfp4a16", "compressed-tensors");
}

/// Every GPTQ and AWQ checkpoint of the folder that QUERN_SHARED names, of families that there are.
#[test]
fn all_gptq_and_awq_checkpoints() {
    let Some(shared) = std::env::var_os("QUERN_SHARED") else {
        return skip("all_gptq_and_awq_checkpoints", "needs QUERN_SHARED=<folder with fixtures/tiny-quant>");
    };
    let mut count = 0;
    for entry in std::fs::read_dir(Path::new(&shared).join("fixtures/tiny-quant")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let Some((family, rest)) = name.split_once('-') else { continue };
        let method = ["gptq", "awq"].into_iter().find(|m| rest.starts_with(m));
        if let (Some(method), "llama" | "qwen2" | "qwen3_moe") = (method, family) {
            parity_of(&name, &path, method);
            count += 1;
        }
    }
    assert!(count >= 20, "{count} checkpoints");
}

#[test]
fn gguf_f32() {
    parity("gguf/llama-f32", "gguf");
}

#[test]
fn gguf_f16() {
    parity("gguf/llama-f16", "gguf");
}

#[test]
fn gguf_bf16() {
    parity("gguf/llama-bf16", "gguf");
}

#[test]
fn gguf_q8_0() {
    parity("gguf/llama-q8_0", "gguf");
}

#[test]
fn gguf_q4_0() {
    parity("gguf/llama-q4_0", "gguf");
}

#[test]
fn gguf_q4_1() {
    parity("gguf/llama-q4_1", "gguf");
}

#[test]
fn gguf_q4_k_m() {
    parity("gguf/llama-q4_k_m", "gguf");
}

#[test]
fn gguf_q5_k_in_two_parts() {
    parity("gguf/llama-q5_k-split", "gguf");
}

#[test]
fn gguf_mixed_blocks() {
    parity("gguf/llama-mixed", "gguf");
}

#[test]
fn gguf_yarn() {
    parity("gguf/llama-yarn", "gguf");
}

#[test]
fn gguf_qwen2() {
    parity("gguf/qwen2-q5", "gguf");
}

#[test]
fn gguf_qwen3() {
    parity("gguf/qwen3-q8_0", "gguf");
}

#[test]
fn gguf_smollm3() {
    parity("gguf/smollm3-q4_0", "gguf");
}

#[test]
fn gguf_gpt2() {
    parity("gguf/gpt2-q4_1", "gguf");
}

#[test]
fn every_fixture_has_a_test() {
    let named = include_str!("parity.rs");
    for folder in ["models", "gguf"] {
        for entry in std::fs::read_dir(fixture(folder)).unwrap() {
            let name = format!("\"{folder}/{}\"", entry.unwrap().file_name().to_string_lossy());
            assert!(named.contains(&name), "{name} has no parity test");
        }
    }
}

fn parity(name: &str, method: &str) {
    parity_of(name, &fixture(name), method);
}

fn parity_of(name: &str, dir: &Path, method: &str) {
    let golden = Golden::read(dir);
    let scratch = Scratch::new("parity");
    let gguf = dir.join("model.gguf");
    let source: &Path = if gguf.exists() { &gguf } else { dir };
    let (report, file) = kept(source, &scratch);
    assert_eq!(report.method, method, "{name}");

    compare(name, &file, &golden);
}

/// Whether logits of a mode that rounds are near enough. Where experts are picked, rounding may pick another one at some
/// position, and tokens behind it see that: three quarters of the positions must be near.
pub fn rounding_fits(file: &ModelFile, got: &[f32], want: &[f32], bound: f32) -> bool {
    let vocab = file.spec().vocab;
    let far = got.chunks(vocab).zip(want.chunks(vocab)).filter(|(got, want)| distance(got, want) > bound).count();
    let routed = file.spec().layers.iter().any(|l| l.mlp.routed());
    far == 0 || routed && far * 4 <= got.len() / vocab
}

/// Logits of exact and default mode, at once and one by one, and greedy tokens.
pub fn compare(name: &str, file: &Arc<ModelFile>, golden: &Golden) {
    let (prompt, logits) = (golden.ids("input_ids"), golden.weights_only());
    let range = logits.range();
    let bound = golden.exact_bound(range);
    let exact = distance(&model::logits(file, Run::Exact, prompt), &logits.data);
    // The slow oracle on the first tokens: it costs a fraction of a second for each.
    let first = &prompt[..prompt.len().min(24)];
    let oracle = distance(&reference::forward::logits(file, first), &logits.data[..first.len() * logits.cols]);
    let rounded = model::logits(file, Run::Default, prompt);
    let quick = distance(&rounded, &logits.data);

    // The cache and one token at a time: along the golden's own continuation, or along the prompt's second half where
    // the continuation is that of rounded activations.
    let (ids, steps) = (golden.ids("greedy_ids"), golden.floats("greedy_logits"));
    let half = prompt.len() / 2;
    let (start, next, wanted): (_, _, Vec<&[f32]>) = if golden.rounds_activations() {
        (&prompt[..half], &prompt[half..], logits.rows().skip(half - 1).collect())
    } else {
        (prompt, ids, steps.rows().collect())
    };
    let mut sequence = Sequence::new(file, Run::Exact, start.len() + next.len());
    let mut decode = 0f32;
    let mut last = sequence.push(start).split_off((start.len() - 1) * logits.cols);
    for (id, wanted) in next.iter().zip(wanted) {
        decode = decode.max(distance(&last, wanted));
        last = sequence.push(&[*id]);
    }

    // And the engine's own loop; below a margin of twice the bound either token would be right.
    let margins: Vec<f32> = steps.rows().map(margin).collect();
    let decided = margins.iter().position(|&m| m <= 2.0 * bound).unwrap_or(ids.len());
    let decided = if golden.rounds_activations() { 0 } else { decided };
    let greedy = model::greedy(file, Run::Exact, &[prompt.to_vec()], ids.len()).remove(0).tokens;
    let agree = greedy.iter().zip(ids).take_while(|(a, b)| a == b).count();

    let part = |x: f32| x / range;
    let measured = format!(
        "{name}: range {range:.2}, bound {:.2e} of it; exact {:.2e}, one by one {:.2e}, \
         oracle {:.2e}, default {:.2e}; greedy {agree} of \
         {} equal, {decided} of them decided by a margin above twice the bound",
        part(bound),
        part(exact),
        part(decode),
        part(oracle),
        part(quick),
        ids.len(),
    );
    println!("{measured}");
    assert!(exact <= bound && decode <= bound && oracle <= bound, "{measured}");
    assert!(rounding_fits(file, &rounded, &logits.data, DEFAULT_SHARE * range), "{measured}");
    assert!(agree >= decided, "{measured}: {greedy:?}, golden {ids:?}");
}
