//! A GGUF file of version 3, where GGUF holds the numbers exactly.
//!
//! Symmetric 4-bit integers become Q4_0 and 8-bit ones Q8_0 (a group of more than 32 columns repeats
//! its scale), minima become Q4_1, and so do 4-bit zero-points where `-scale * zero` is an f16
//! number. Rows of q and k are permuted as llama.cpp has them for architecture
//! `llama`; `qwen2` and `qwen3` have them in order.

use std::{
    fs::{self, File},
    io::{BufWriter, Write},
    path::{Path, PathBuf},
    time::Instant,
};

use half::f16;
use quern_models::{
    FloatType, ZeroKind,
    format::{create_sibling, destination},
    spec::{Act, Attn, Layer, Mlp, Rope, RopeScaling},
};
use rayon::prelude::*;

use super::{
    Model, Writing, check, gguf_tokenizer, gptq,
    items::{Coded, Item, Role},
    part::{Part, failed},
    rows,
};
use crate::{
    ConvertError, Progress, Report,
    source::{Block, Dtype, Rows},
    threads::Threads,
};

/// Tensors begin on a multiple of this.
const ALIGNMENT: usize = 32;

/// Writes the model to one file.
pub fn export(
    model: &Model,
    out: &Path,
    force: bool,
    threads: &Threads,
    progress: &mut dyn Progress,
    start: Instant,
) -> Result<Report, ConvertError> {
    if out.symlink_metadata().is_ok() && !force {
        return Err(ConvertError::Exists { path: out.into() });
    }
    let arch = architecture(model)?;
    let mut meta = Metadata::default();
    about(model, arch, &mut meta);
    gguf_tokenizer::write(model, &mut meta)?;
    let mut parts = vec![];
    for item in model.items {
        parts.push(threads.run(|| tensor(item, arch))?);
    }
    if let Some(factors) = rope_factors(arch.layer)? {
        let name = "rope_freqs.weight".to_string();
        let kind = FloatType::F32;
        parts.push(Part::new(name, Dtype::Float(kind), &[factors.len()], factors.len() * 4, move |_, out| {
            let mut bytes = vec![];
            factors.iter().for_each(|&f| kind.push(f, &mut bytes));
            out.copy_from_slice(&bytes);
            Ok(())
        }));
    }
    let table: Vec<_> =
        rows(model.items.iter().zip(&parts).map(|(i, p)| (p.dtype.name().into(), i, std::slice::from_ref(p))));
    meta.u32("general.file_type", file_type(&table[0].scheme));

    model.undamaged()?;
    let io = |source| failed(out, source);
    let target = destination(out).map_err(io)?;
    let (path, file) = create_sibling(&target)?;
    let temp = Temp { path, done: false };
    let mut writer = BufWriter::with_capacity(1 << 20, file);
    writer.write_all(&header(meta, &parts)).map_err(io)?;
    let mut written = Writing::new(&parts);
    for part in &parts {
        threads.run(|| part.write(&mut writer, &temp.path))?;
        let padding = part.bytes().next_multiple_of(ALIGNMENT as u64) - part.bytes();
        writer.write_all(&[0; ALIGNMENT][..padding as usize]).map_err(io)?;
        written.done(part, progress)?;
    }
    let file: File = writer.into_inner().map_err(|e| io(e.into_error()))?;
    file.sync_all().map_err(io)?;
    let verified = check::check(&temp.path, model.file, model.items, threads, progress)?;
    let file_bytes = file.metadata().map_err(io)?.len();
    temp.finish(&target)?;
    let seconds = start.elapsed().as_secs_f64();
    Ok(Report { path: out.into(), method: "gguf", rows: table, file_bytes, verified, seconds, head: None })
}

/// A file that goes away unless it is finished.
struct Temp {
    path: PathBuf,
    done: bool,
}

impl Temp {
    fn finish(mut self, target: &Path) -> Result<(), ConvertError> {
        fs::rename(&self.path, target).map_err(|e| failed(target, e))?;
        self.done = true;
        Ok(())
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        if !self.done {
            // The caller already has an error to report.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// An architecture of llama.cpp, and the layer that all layers of the model are like.
#[derive(Clone, Copy)]
struct Arch<'a> {
    name: &'static str,
    layer: &'a Layer,
}

/// The architecture that computes what the spec says.
fn architecture<'a>(model: &Model<'a>) -> Result<Arch<'a>, ConvertError> {
    let spec = model.file.spec();
    let layer = &spec.layers[0];
    let Attn::Gqa { head_dim, scale, ref rope, window, ref qk_norm, qkv_bias, o_bias, .. } = layer.attn;
    let name = match (qkv_bias, qk_norm.is_some()) {
        (true, false) => "qwen2",
        (false, true) => "qwen3",
        _ => "llama",
    };
    let refuse = |what: String| {
        let what = format!("{} as a GGUF of architecture {name}, which has {what}", model.path.display());
        Err(ConvertError::unsupported(what, "export it with --to float and use llama.cpp's own converter"))
    };
    if let Some(i) = spec.layers.iter().position(|l| l != layer) {
        return refuse(format!("equal layers, and layer {i} differs from the first"));
    }
    let gated = matches!(layer.mlp, Mlp::Gated { act: Act::Silu, bias: false, .. });
    let norms = [&layer.attn_norm, &layer.mlp_norm].into_iter().chain(qk_norm);
    let checks = [
        (rope.is_some(), "rope"),
        (window.is_none(), "no window"),
        (qkv_bias == (name == "qwen2") && !o_bias, "no such biases"),
        (qk_norm.is_some() == (name == "qwen3"), "no norms of q and k"),
        (scale == 1.0 / (head_dim as f32).sqrt(), "the usual scale of attention"),
        (spec.positions.is_none(), "no learned positions"),
        (gated, "a gated MLP with silu, without biases"),
        (!spec.norm.biased(), "norms without biases"),
        (norms.into_iter().all(|n| *n == spec.norm), "one eps for all norms"),
    ];
    match checks.iter().find(|c| !c.0) {
        None => Ok(Arch { name, layer }),
        Some((_, what)) => refuse(what.to_string()),
    }
}

/// What the model is, as llama.cpp's loader asks for it.
fn about(model: &Model, arch: Arch, meta: &mut Metadata) {
    let spec = model.file.spec();
    let Attn::Gqa { heads, kv_heads, head_dim, ref rope, .. } = arch.layer.attn;
    let provenance = |key: &str| model.file.provenance().get(key).and_then(|v| v.as_str()).map(String::from);
    meta.text("general.architecture", arch.name);
    let name = provenance("model").or(provenance("source")).unwrap_or_default();
    meta.text("general.name", name.trim_end_matches(".gguf"));
    if let Some(licence) = provenance("licence") {
        meta.text("general.license", &licence);
    }
    meta.u32("general.quantization_version", 2);
    for (key, value) in [
        ("block_count", spec.layers.len()),
        ("context_length", spec.max_context),
        ("embedding_length", spec.hidden),
        ("feed_forward_length", arch.layer.mlp.inner()),
        ("attention.head_count", heads),
        ("attention.head_count_kv", kv_heads),
        ("attention.key_length", head_dim),
        ("attention.value_length", head_dim),
        ("rope.dimension_count", head_dim),
        ("vocab_size", spec.vocab),
    ] {
        meta.u32(&format!("{}.{key}", arch.name), value as u32);
    }
    let key = |key: &str| format!("{}.{key}", arch.name);
    meta.f32(&key("attention.layer_norm_rms_epsilon"), spec.norm.eps());
    if let Some(Rope { theta, scaling }) = rope {
        meta.f32(&key("rope.freq_base"), *theta);
        if let RopeScaling::Linear { factor } = scaling {
            meta.text(&key("rope.scaling.type"), "linear");
            meta.f32(&key("rope.scaling.factor"), *factor);
        }
    }
}

/// Divisors of the frequencies: Llama 3's scaling, which GGUF has as a tensor.
fn rope_factors(layer: &Layer) -> Result<Option<Vec<f32>>, ConvertError> {
    let Attn::Gqa { head_dim, rope: Some(rope), .. } = &layer.attn else { return Ok(None) };
    match rope.scaling {
        RopeScaling::None | RopeScaling::Linear { .. } => Ok(None),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            let usual = (low_freq_factor, high_freq_factor, original_context) == (1.0, 4.0, 8192);
            if !usual {
                return Err(ConvertError::unsupported(
                    format!(
                        "rope scaling llama3 with low_freq_factor {low_freq_factor}, high_freq_factor \
                         {high_freq_factor}, original context {original_context}: a GGUF holds the result only, which \
                         is read back as Llama 3's own 1, 4 and 8192"
                    ),
                    "export it with --to float and use llama.cpp's own converter",
                ));
            }
            let context = original_context as f64;
            let (low, high) = (low_freq_factor as f64, high_freq_factor as f64);
            let divisor = |i: usize| {
                let wavelength = std::f64::consts::TAU * (rope.theta as f64).powf((2 * i) as f64 / *head_dim as f64);
                let turns = context / wavelength;
                if turns > high {
                    return 1.0;
                }
                if turns < low {
                    return factor;
                }
                let smooth = (turns - low) / (high - low);
                (1.0 / ((1.0 - smooth) / factor as f64 + smooth)) as f32
            };
            Ok(Some((0..head_dim / 2).map(divisor).collect()))
        }
        ref other => Err(ConvertError::unsupported(
            format!("rope scaling {other:?}, which --to gguf does not write"),
            "export it with --to float and use llama.cpp's own converter",
        )),
    }
}

/// One tensor under llama.cpp's name, in its order of rows.
fn tensor<'a>(item: &'a Item<'a>, arch: Arch) -> Result<Part<'a>, ConvertError> {
    let Some((name, target)) = item.whole().and_then(|p| Some((name(&p.target)?, &p.target))) else {
        return Err(gptq::refuse(item, "the architecture has no such tensor", "export it with --to float"));
    };
    let Attn::Gqa { head_dim, .. } = arch.layer.attn;
    let permuted = arch.name == "llama" && (target.ends_with(".q") || target.ends_with(".k"));
    let rows = if permuted { Rows::Interleaved { head_dim } } else { Rows::InOrder };
    // Row of the item that each stored row holds.
    let mut row_of = vec![0; item.n];
    (0..item.n).for_each(|row| row_of[rows.stored(row)] = row);
    let place = move |stored: usize| row_of[stored];

    if item.role == Role::Vector {
        // llama.cpp computes with norms and biases as f32.
        return Ok(Part::floats(name, item, FloatType::F32));
    }
    if let Some(kind) = item.float() {
        let whole = Part::floats(name.clone(), item, kind);
        let dims = [item.n, item.k];
        return Ok(Part::new(name, Dtype::Float(kind), &dims, item.k * kind.size(), move |stored, out| {
            whole.row(place(stored), out)
        }));
    }
    let block = block(item)?;
    let coded = item.coded().expect("block() found plain integers");
    let row_bytes = item.k / 32 * block.bytes();
    Ok(Part::new(name, Dtype::Block(block), &[item.n, item.k], row_bytes, move |stored, out| {
        for (i, out) in out.chunks_exact_mut(block.bytes()).enumerate() {
            fill(&coded, block, place(stored), i * 32, out);
        }
        Ok(())
    }))
}

/// The block type that holds a tensor of integers exactly.
fn block(item: &Item) -> Result<Block, ConvertError> {
    let refuse = |why: &str| Err(gptq::refuse(item, why, "export it with --to float, or GPTQ integers with --to gptq"));
    let Some(c) = item.coded() else { return refuse("--to gguf writes integers with one scale per group") };
    if item.ordered() {
        return refuse("GGUF has no order of columns (act-order)");
    }
    if !item.k.is_multiple_of(32) || !c.group.is_multiple_of(32) {
        return refuse("a block of GGUF is 32 columns");
    }
    if c.scale != FloatType::F16 {
        return refuse("blocks of GGUF have f16 scales");
    }
    match (c.bits, c.zero) {
        (4, ZeroKind::Mid) => Ok(Block::Q4_0),
        (8, ZeroKind::Mid) => Ok(Block::Q8_0),
        (4, ZeroKind::Min) => Ok(Block::Q4_1),
        (4, ZeroKind::Code) => {
            let inexact = |&row: &usize| (0..c.groups()).any(|g| minimum(&c, row, g).is_none());
            match (0..item.n).into_par_iter().find_first(inexact) {
                None => Ok(Block::Q4_1),
                Some(row) => refuse(&format!("the minimum that Q4_1 needs in row {row} is no f16 number")),
            }
        }
        _ => refuse("8-bit blocks of GGUF are symmetric"),
    }
}

/// What Q4_1 adds to `scale * code`, if it is an f16 number.
fn minimum(coded: &Coded, row: usize, group: usize) -> Option<f16> {
    let exact = match coded.zero {
        ZeroKind::Min => coded.min(row, group),
        _ => -(coded.scale(row, group) * coded.zero(row, group) as f32),
    };
    Some(f16::from_f32(exact)).filter(|m| m.to_f32() == exact)
}

/// One block: 32 columns of `row` from `col`.
fn fill(coded: &Coded, block: Block, row: usize, col: usize, out: &mut [u8]) {
    let group = col / coded.group;
    out[..2].copy_from_slice(&f16::from_f32(coded.scale(row, group)).to_le_bytes());
    let code = |i: usize| coded.code(row, col + i);
    if block == Block::Q8_0 {
        // Unsigned with the zero at 128 becomes signed.
        (0..32).for_each(|i| out[2 + i] = code(i) ^ 0x80);
        return;
    }
    let mut at = 2;
    if block == Block::Q4_1 {
        let m = minimum(coded, row, group).expect("block() checked every minimum");
        out[2..4].copy_from_slice(&m.to_le_bytes());
        at = 4;
    }
    (0..16).for_each(|i| out[at + i] = code(i) | code(i + 16) << 4);
}

/// llama.cpp's name of one of our tensors.
fn name(target: &str) -> Option<String> {
    let whole = match target {
        "embed" => "token_embd",
        "norm" => "output_norm",
        "head" => "output",
        _ => {
            let (layer, name) = target.strip_prefix("layers.")?.split_once('.')?;
            let theirs = match name {
                "attn_norm" => "attn_norm",
                "mlp_norm" => "ffn_norm",
                "q" => "attn_q",
                "k" => "attn_k",
                "v" => "attn_v",
                "o" => "attn_output",
                "gate" => "ffn_gate",
                "up" => "ffn_up",
                "down" => "ffn_down",
                "q_norm" => "attn_q_norm",
                "k_norm" => "attn_k_norm",
                "q_bias" => return Some(format!("blk.{layer}.attn_q.bias")),
                "k_bias" => return Some(format!("blk.{layer}.attn_k.bias")),
                "v_bias" => return Some(format!("blk.{layer}.attn_v.bias")),
                _ => return None,
            };
            return Some(format!("blk.{layer}.{theirs}.weight"));
        }
    };
    Some(format!("{whole}.weight"))
}

/// llama.cpp's number for what a file mostly holds.
fn file_type(name: &str) -> u32 {
    match name {
        "f32" => 0,
        "f16" => 1,
        "Q4_0" => 2,
        "Q4_1" => 3,
        "Q8_0" => 7,
        _ => 32,
    }
}

/// ggml's number of a type.
fn type_id(dtype: Dtype) -> u32 {
    match dtype {
        Dtype::Float(FloatType::F32) => 0,
        Dtype::Float(FloatType::F16) => 1,
        Dtype::Float(FloatType::BF16) => 30,
        Dtype::Block(Block::Q4_0) => 2,
        Dtype::Block(Block::Q4_1) => 3,
        Dtype::Block(Block::Q8_0) => 8,
        _ => unreachable!("tensor() makes floats and blocks"),
    }
}

/// Keys and values, encoded.
#[derive(Default)]
pub struct Metadata {
    count: u64,
    bytes: Vec<u8>,
}

impl Metadata {
    /// A 32-bit number.
    pub fn u32(&mut self, key: &str, value: u32) {
        self.key(key, 4);
        self.bytes.extend(value.to_le_bytes());
    }

    /// A float.
    pub fn f32(&mut self, key: &str, value: f32) {
        self.key(key, 6);
        self.bytes.extend(value.to_le_bytes());
    }

    /// A flag.
    pub fn flag(&mut self, key: &str, value: bool) {
        self.key(key, 7);
        self.bytes.push(value.into());
    }

    /// Text.
    pub fn text(&mut self, key: &str, value: &str) {
        self.key(key, 8);
        string(value, &mut self.bytes);
    }

    /// An array of texts.
    pub fn texts<'t>(&mut self, key: &str, values: impl ExactSizeIterator<Item = &'t str>) {
        self.key(key, 9);
        self.bytes.extend(8u32.to_le_bytes());
        self.bytes.extend((values.len() as u64).to_le_bytes());
        values.for_each(|v| string(v, &mut self.bytes));
    }

    /// An array of 32-bit numbers.
    pub fn i32s(&mut self, key: &str, values: &[i32]) {
        self.key(key, 9);
        self.bytes.extend(5u32.to_le_bytes());
        self.bytes.extend((values.len() as u64).to_le_bytes());
        values.iter().for_each(|v| self.bytes.extend(v.to_le_bytes()));
    }

    fn key(&mut self, key: &str, kind: u32) {
        self.count += 1;
        string(key, &mut self.bytes);
        self.bytes.extend(kind.to_le_bytes());
    }
}

fn string(text: &str, out: &mut Vec<u8>) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// Everything before the tensors' bytes.
fn header(meta: Metadata, parts: &[Part]) -> Vec<u8> {
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend((parts.len() as u64).to_le_bytes());
    out.extend(meta.count.to_le_bytes());
    out.extend(meta.bytes);
    let mut at = 0;
    for part in parts {
        string(&part.name, &mut out);
        out.extend((part.dims.len() as u32).to_le_bytes());
        part.dims.iter().rev().for_each(|d| out.extend(d.to_le_bytes()));
        out.extend(type_id(part.dtype).to_le_bytes());
        out.extend(u64::to_le_bytes(at));
        at += part.bytes().next_multiple_of(ALIGNMENT as u64);
    }
    out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
    out
}
