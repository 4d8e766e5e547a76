//! Checkpoints of any format, made from a float fixture: every linear layer of its decoder layers is
//! rounded to the format's grid and packed as the format's description says, in the most obvious way.
//!
//! Beside it goes a twin that holds the same numbers as plain f32: what is computed from both must agree.

use std::{collections::BTreeMap, fs, path::Path};

use quern_convert::source::{Dtype, safetensors};
use quern_models::{FloatType, Mini};
use serde_json::{Value, json};

/// One stored tensor: dtype as safetensors spells it, shape, bytes.
pub type Stored = (&'static str, Vec<usize>, Vec<u8>);

/// How linear layers are stored.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Format {
    /// As floats of this type.
    Float(FloatType),
    /// GPTQ.
    Gptq { bits: usize, sym: bool, v2: bool, act_order: bool },
    /// AWQ, gemm layout, 4 bits.
    AwqGemm,
    /// AWQ, gemv layout, 4 bits.
    AwqGemv,
    /// compressed-tensors pack-quantized.
    Packed { bits: usize, sym: bool },
    /// compressed-tensors int-quantized: 8 bits, a scale per row.
    Int8,
    /// compressed-tensors float-quantized: e4m3, a scale per row.
    Fp8Channel,
    /// Hugging Face fp8: e4m3, a scale per block.
    Fp8Block,
    /// compressed-tensors mxfp4-pack-quantized.
    Mxfp4,
}

/// Columns of a group.
const GROUP: usize = 32;

/// Rows and columns of an fp8 block.
const BLOCK: usize = 128;

/// A float matrix `[n, k]` of a linear layer.
struct Linear {
    n: usize,
    k: usize,
    w: Vec<f32>,
}

/// Writes the checkpoint into `packed` and its twin into `twin`; returns bits per weight of the linear layers.
///
/// `conv1d`: linear layers are stored `[k, n]` as floats, as GPT-2's are.
pub fn make(fixture: &Path, format: Format, conv1d: bool, packed: &Path, twin: &Path) -> f64 {
    let bytes = fs::read(fixture.join("model.safetensors")).unwrap();
    let source = safetensors::parse(&bytes).unwrap();
    let (mut ours, mut theirs) = (BTreeMap::new(), BTreeMap::new());
    let (mut weights, mut stored) = (0usize, 0usize);
    for (name, raw) in &source {
        let Dtype::Float(kind) = raw.dtype else { panic!("{name}: {:?}", raw.dtype) };
        let shape: Vec<usize> = raw.shape.iter().map(|&d| d as usize).collect();
        let values: Vec<f32> = (0..raw.bytes.len() / kind.size()).map(|i| kind.read(raw.bytes, i)).collect();
        // Routers are no linear layers to the tools.
        let linear = |m: &&str| shape.len() == 2 && in_layer(m) && !m.ends_with(".gate");
        let module = name.strip_suffix(".weight").filter(linear);
        let Some(module) = module else {
            ours.insert(name.clone(), floats(kind, &shape, &values));
            theirs.insert(name.clone(), floats(kind, &shape, &values));
            continue;
        };
        let (n, k) = if conv1d { (shape[1], shape[0]) } else { (shape[0], shape[1]) };
        let w = if conv1d { transpose(&values, k, n) } else { values };
        let (parts, rounded) = pack(format, module, &Linear { n, k, w });
        weights += n * k;
        for (part, mut tensor) in parts {
            // Orders and shapes are not weights.
            stored += if part.contains("idx") || part.contains("shape") { 0 } else { tensor.2.len() };
            if conv1d && matches!(format, Format::Float(_)) {
                let Format::Float(kind) = format else { unreachable!() };
                tensor = floats(kind, &[k, n], &transpose(&rounded, n, k));
            }
            ours.insert(format!("{module}.{part}"), tensor);
        }
        let (shape, rounded) = if conv1d { ([k, n], transpose(&rounded, n, k)) } else { ([n, k], rounded) };
        theirs.insert(name.clone(), floats(FloatType::F32, &shape, &rounded));
    }
    for (dir, tensors, quantization) in [(packed, &ours, quantization(format)), (twin, &theirs, Value::Null)] {
        fs::create_dir_all(dir).unwrap();
        let mut config: Value = serde_json::from_slice(&fs::read(fixture.join("config.json")).unwrap()).unwrap();
        if !quantization.is_null() {
            config["quantization_config"] = quantization;
        }
        fs::write(dir.join("config.json"), config.to_string()).unwrap();
        fs::copy(fixture.join("tokenizer.json"), dir.join("tokenizer.json")).unwrap();
        fs::write(dir.join("model.safetensors"), file(tensors)).unwrap();
    }
    stored as f64 * 8.0 / weights as f64
}

/// A safetensors file.
pub fn file(tensors: &BTreeMap<String, Stored>) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), vec![]);
    for (name, (dtype, shape, bytes)) in tensors {
        let from = data.len();
        data.extend_from_slice(bytes);
        header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": [from, data.len()]}));
    }
    let mut header = Value::from(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat()
}

fn in_layer(module: &str) -> bool {
    module.contains("layers.") || module.starts_with("h.") || module.contains(".h.")
}

fn transpose(w: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    (0..cols).flat_map(|c| (0..rows).map(move |r| w[r * cols + c])).collect()
}

fn floats(kind: FloatType, shape: &[usize], values: &[f32]) -> Stored {
    let mut bytes = vec![];
    values.iter().for_each(|&x| kind.push(x, &mut bytes));
    let dtype = match kind {
        FloatType::F32 => "F32",
        FloatType::F16 => "F16",
        FloatType::BF16 => "BF16",
    };
    (dtype, shape.to_vec(), bytes)
}

fn words(shape: [usize; 2], words: Vec<u32>) -> Stored {
    assert_eq!(words.len(), shape[0] * shape[1]);
    ("I32", shape.to_vec(), words.into_iter().flat_map(u32::to_le_bytes).collect())
}

/// Codes as an LSB-first bitstream over 32-bit words.
fn stream(codes: impl Iterator<Item = u8>, bits: usize, words: usize) -> Vec<u32> {
    let mut out = vec![0u32; words];
    for (i, code) in codes.enumerate() {
        let (word, at) = (i * bits / 32, i * bits % 32);
        out[word] |= (code as u32) << at;
        if at + bits > 32 {
            out[word + 1] |= (code as u32) >> (32 - at);
        }
    }
    out
}

/// Codes `[n][k]`, scales and zeros `[n][groups]`, and the dequantized weights.
struct Grid {
    codes: Vec<u8>,
    scales: Vec<f32>,
    zeros: Vec<u8>,
    groups: usize,
    rounded: Vec<f32>,
}

/// Rounds to `bits` with groups of `GROUP` columns, of which `group_of[k]` is the group of column `k`.
fn grid(l: &Linear, bits: usize, sym: bool, scale: FloatType, group_of: &[usize]) -> Grid {
    let (groups, top) = (group_of.iter().max().unwrap() + 1, (1 << bits) - 1);
    let mut grid =
        Grid { codes: vec![0; l.n * l.k], scales: vec![], zeros: vec![], groups, rounded: vec![0.0; l.n * l.k] };
    for n in 0..l.n {
        let row = &l.w[n * l.k..(n + 1) * l.k];
        for g in 0..groups {
            let of_group = |k: &usize| group_of[*k] == g;
            let (low, high) = (0..l.k).filter(of_group).fold((0f32, 0f32), |(a, b), k| (a.min(row[k]), b.max(row[k])));
            // Every third row has a negative scale where the zero is in the middle, as AutoRound writes it.
            let sign = if sym && n % 3 == 1 { -1.0 } else { 1.0 };
            let step = if sym { sign * 2.0 * low.abs().max(high) / top as f32 } else { (high - low) / top as f32 };
            let step = rounded(scale, if step == 0.0 { 1.0 } else { step });
            let zero = if sym { 1 << (bits - 1) } else { (-low / step).round().clamp(0.0, top as f32) as i32 };
            for k in (0..l.k).filter(of_group) {
                let code = ((row[k] / step).round() as i32 + zero).clamp(0, top);
                grid.codes[n * l.k + k] = code as u8;
                grid.rounded[n * l.k + k] = step * (code - zero) as f32;
            }
            grid.scales.push(step);
            grid.zeros.push(zero as u8);
        }
    }
    grid
}

fn rounded(kind: FloatType, x: f32) -> f32 {
    let mut bytes = vec![];
    kind.push(x, &mut bytes);
    kind.read(&bytes, 0)
}

fn in_order(k: usize) -> Vec<usize> {
    (0..k).map(|k| k / GROUP).collect()
}

/// The parts of a packed layer and the weights they stand for.
fn pack(format: Format, module: &str, l: &Linear) -> (Vec<(&'static str, Stored)>, Vec<f32>) {
    let (n, k) = (l.n, l.k);
    match format {
        Format::Float(kind) => {
            let values: Vec<f32> = l.w.iter().map(|&x| rounded(kind, x)).collect();
            (vec![("weight", floats(kind, &[n, k], &values))], values)
        }
        Format::Gptq { bits, sym, v2, act_order } => {
            let groups = if act_order { shuffled(module, k) } else { in_order(k) };
            let g = grid(l, bits, sym, FloatType::F16, &groups);
            gptq(l, &g, bits, v2, &groups)
        }
        Format::AwqGemm | Format::AwqGemv => {
            let g = grid(l, 4, false, FloatType::F16, &in_order(k));
            (if format == Format::AwqGemm { gemm(l, &g) } else { gemv(l, &g) }, g.rounded)
        }
        Format::Packed { bits, sym } => {
            let g = grid(l, bits, sym, FloatType::BF16, &in_order(k));
            let width = (k * bits).div_ceil(32);
            let row = |n: usize| stream(g.codes[n * k..(n + 1) * k].iter().copied(), bits, width);
            let shape = [n as i64, k as i64].into_iter().flat_map(i64::to_le_bytes).collect();
            let mut parts = vec![
                ("weight_packed", words([n, width], (0..n).flat_map(row).collect())),
                ("weight_scale", floats(FloatType::BF16, &[n, g.groups], &g.scales)),
                ("weight_shape", ("I64", vec![2], shape)),
            ];
            if !sym {
                let height = (n * bits).div_ceil(32);
                let column = |i: usize| stream((0..n).map(|n| g.zeros[n * g.groups + i]), bits, height);
                let columns: Vec<Vec<u32>> = (0..g.groups).map(column).collect();
                let all = (0..height).flat_map(|h| columns.iter().map(move |c| c[h])).collect();
                parts.push(("weight_zero_point", words([height, g.groups], all)));
            }
            (parts, g.rounded)
        }
        Format::Int8 => {
            let g = grid(l, 8, true, FloatType::BF16, &vec![0; k]);
            let signed = g.codes.iter().map(|c| c.wrapping_sub(128)).collect();
            (
                vec![
                    ("weight", ("I8", vec![n, k], signed)),
                    ("weight_scale", floats(FloatType::BF16, &[n, 1], &g.scales)),
                ],
                g.rounded,
            )
        }
        Format::Fp8Channel => {
            let (codes, scales, rounded) = fp8(l, FloatType::BF16, 1, k);
            (
                vec![
                    ("weight", ("F8_E4M3", vec![n, k], codes)),
                    ("weight_scale", floats(FloatType::BF16, &[n, 1], &scales)),
                ],
                rounded,
            )
        }
        Format::Fp8Block => {
            let (codes, scales, rounded) = fp8(l, FloatType::F32, BLOCK, BLOCK);
            let shape = [n.div_ceil(BLOCK), k.div_ceil(BLOCK)];
            (
                vec![
                    ("weight", ("F8_E4M3", vec![n, k], codes)),
                    ("weight_scale_inv", floats(FloatType::F32, &shape, &scales)),
                ],
                rounded,
            )
        }
        Format::Mxfp4 => mxfp4(l),
    }
}

/// A group for every column, the same for layers that share an input; groups have equal sizes.
fn shuffled(module: &str, k: usize) -> Vec<usize> {
    let last = module.rsplit('.').next().unwrap();
    let seed = match last {
        "q_proj" | "k_proj" | "v_proj" | "c_attn" => 5,
        "gate_proj" | "up_proj" | "c_fc" => 7,
        _ if module.contains("attn") => 11,
        _ => 13,
    };
    let mut order: Vec<usize> = (0..k).collect();
    order.sort_by_key(|&i| (i * 2654435761 * seed) % 1009);
    let mut groups = vec![0; k];
    order.into_iter().enumerate().for_each(|(at, column)| groups[column] = at / GROUP);
    groups
}

fn gptq(l: &Linear, g: &Grid, bits: usize, v2: bool, groups: &[usize]) -> (Vec<(&'static str, Stored)>, Vec<f32>) {
    let (n, k) = (l.n, l.k);
    let height = (k * bits).div_ceil(32);
    let columns: Vec<Vec<u32>> = (0..n).map(|n| stream((0..k).map(|k| g.codes[n * l.k + k]), bits, height)).collect();
    let qweight = (0..height).flat_map(|h| columns.iter().map(move |c| c[h])).collect();
    let width = (n * bits).div_ceil(32);
    let mut qzeros: Vec<u32> = vec![];
    for i in 0..g.groups {
        let row = stream((0..n).map(|n| g.zeros[n * g.groups + i]), bits, width);
        // Version 1 stores one less, by subtracting a word of ones with borrow; 3 bits do not fill a word.
        let ones = [0, 0, 0x5555_5555u32, 0, 0x1111_1111, 0, 0, 0, 0x0101_0101][bits];
        qzeros.extend(match (v2, bits) {
            (true, _) => row,
            (false, 3) => stream((0..n).map(|n| g.zeros[n * g.groups + i].wrapping_sub(1) & 7), 3, width),
            (false, _) => row.into_iter().map(|w| w.wrapping_sub(ones)).collect(),
        });
    }
    let scales: Vec<f32> = (0..g.groups).flat_map(|i| (0..n).map(move |n| g.scales[n * g.groups + i])).collect();
    let index = groups.iter().flat_map(|&g| (g as i32).to_le_bytes()).collect();
    let parts = vec![
        ("qweight", words([height, n], qweight)),
        ("qzeros", words([g.groups, width], qzeros)),
        ("scales", floats(FloatType::F16, &[g.groups, n], &scales)),
        ("g_idx", ("I32", vec![k], index)),
    ];
    (parts, g.rounded.clone())
}

fn gemm(l: &Linear, g: &Grid) -> Vec<(&'static str, Stored)> {
    const NIBBLE_OF_ROW: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];
    let (n, k) = (l.n, l.k);
    let word = |code: &dyn Fn(usize) -> u8, c: usize| {
        (0..8).fold(0u32, |w, r| w | (code(c * 8 + r) as u32) << (4 * NIBBLE_OF_ROW[r]))
    };
    let qweight = (0..k).flat_map(|k| (0..n / 8).map(move |c| word(&|n| g.codes[n * l.k + k], c))).collect();
    let qzeros = (0..g.groups).flat_map(|i| (0..n / 8).map(move |c| word(&|n| g.zeros[n * g.groups + i], c))).collect();
    let scales: Vec<f32> = (0..g.groups).flat_map(|i| (0..n).map(move |n| g.scales[n * g.groups + i])).collect();
    vec![
        ("qweight", words([k, n / 8], qweight)),
        ("qzeros", words([g.groups, n / 8], qzeros)),
        ("scales", floats(FloatType::F16, &[g.groups, n], &scales)),
    ]
}

fn gemv(l: &Linear, g: &Grid) -> Vec<(&'static str, Stored)> {
    let (n, k) = (l.n, l.k);
    // Words of zero-points of a row: whole ones, padded to a multiple of 4 for groups of 32.
    let width = g.groups.div_ceil(8).next_multiple_of(4);
    let qweight = (0..n).flat_map(|n| stream(g.codes[n * k..(n + 1) * k].iter().copied(), 4, k / 8)).collect();
    let zeros = |n: usize| stream(g.zeros[n * g.groups..(n + 1) * g.groups].iter().copied(), 4, width);
    let scale = |n: usize, i: usize| if i < g.groups { g.scales[n * g.groups + i] } else { 0.0 };
    let scales: Vec<f32> = (0..n).flat_map(|n| (0..width * 8).map(move |i| scale(n, i))).collect();
    vec![
        ("qweight", words([n, k / 8], qweight)),
        ("qzeros", words([n, width], (0..n).flat_map(zeros).collect())),
        ("scales", floats(FloatType::F16, &[n, width * 8], &scales)),
    ]
}

/// Codes `[n][k]`, scales by block of `rows` x `cols`, and the weights they stand for.
fn fp8(l: &Linear, scale: FloatType, rows: usize, cols: usize) -> (Vec<u8>, Vec<f32>, Vec<f32>) {
    let (mut codes, mut scales, mut out) = (vec![0; l.n * l.k], vec![], vec![0.0; l.n * l.k]);
    for n0 in (0..l.n).step_by(rows) {
        for k0 in (0..l.k).step_by(cols) {
            let block: Vec<usize> =
                (n0..l.n.min(n0 + rows)).flat_map(|n| (k0..l.k.min(k0 + cols)).map(move |k| n * l.k + k)).collect();
            let top = block.iter().fold(1e-6f32, |m, &i| m.max(l.w[i].abs()));
            let s = rounded(scale, top / 448.0);
            for i in block {
                codes[i] = nearest(Mini::E4M3, l.w[i] / s);
                out[i] = s * Mini::E4M3.value(codes[i]);
            }
            scales.push(s);
        }
    }
    (codes, scales, out)
}

/// The code whose value is nearest.
fn nearest(kind: Mini, x: f32) -> u8 {
    let codes = (0..=u8::MAX).filter(|&c| (c as u16) < 1 << kind.bits() && !kind.value(c).is_nan());
    codes.min_by(|&a, &b| (kind.value(a) - x).abs().total_cmp(&(kind.value(b) - x).abs())).unwrap()
}

fn mxfp4(l: &Linear) -> (Vec<(&'static str, Stored)>, Vec<f32>) {
    let (n, k) = (l.n, l.k);
    let (mut packed, mut exponents, mut out) = (vec![], vec![], vec![]);
    for row in l.w.chunks(k) {
        for group in row.chunks(GROUP) {
            let top = group.iter().fold(1e-30f32, |m, x| m.max(x.abs()));
            let e = (top / 6.0).log2().ceil() as i32;
            let s = 2f32.powi(e);
            exponents.push((e + 127) as u8);
            let codes: Vec<u8> = group.iter().map(|x| nearest(Mini::E2M1, x / s)).collect();
            out.extend(codes.iter().map(|&c| s * Mini::E2M1.value(c)));
            packed.extend(codes.chunks(2).map(|c| c[0] | c[1] << 4));
        }
    }
    let parts = vec![
        ("weight_packed", ("U8", vec![n, k / 2], packed)),
        ("weight_scale", ("U8", vec![n, k / GROUP], exponents)),
    ];
    (parts, out)
}

/// What the maker's tool says in config.json.
fn quantization(format: Format) -> Value {
    let compressed = |format: &str, weights: Value, activations: Value| {
        let group = json!({"targets": ["Linear"], "weights": weights, "input_activations": activations});
        json!({"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ["lm_head"]})
    };
    match format {
        Format::Float(_) => Value::Null,
        Format::Gptq { bits, sym, v2, act_order } => json!({"quant_method": "gptq", "bits": bits, "group_size": GROUP,
            "sym": sym, "desc_act": act_order, "checkpoint_format": if v2 { "gptq_v2" } else { "gptq" }}),
        Format::AwqGemm => json!({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": true,
            "version": "gemm"}),
        Format::AwqGemv => json!({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": true,
            "version": "gemv"}),
        Format::Packed { bits, sym } => compressed(
            "pack-quantized",
            json!({"num_bits": bits, "type": "int", "symmetric": sym, "strategy": "group", "group_size": GROUP}),
            Value::Null,
        ),
        Format::Int8 => compressed(
            "int-quantized",
            json!({"num_bits": 8, "type": "int", "symmetric": true, "strategy": "channel"}),
            json!({"num_bits": 8, "type": "int", "symmetric": true, "strategy": "token", "dynamic": true}),
        ),
        Format::Fp8Channel => compressed(
            "float-quantized",
            json!({"num_bits": 8, "type": "float", "symmetric": true, "strategy": "channel"}),
            json!({"num_bits": 8, "type": "float", "symmetric": true, "strategy": "token", "dynamic": true}),
        ),
        Format::Fp8Block => json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK]}),
        Format::Mxfp4 => compressed(
            "mxfp4-pack-quantized",
            json!({"num_bits": 4, "type": "float", "symmetric": true, "strategy": "group", "group_size": GROUP,
                "scale_dtype": "torch.uint8"}),
            Value::Null,
        ),
    }
}
