//! The README's table of formats and families, made by trying each cell.
//!
//! A cell is a checkpoint: the family's float fixture with its linear layers in the row's format
//! ([`checkpoint::make`]), or a GGUF fixture. *exact*: codes, scales and values are the source's, in
//! at most a tenth more room; *widened*: the same values in more bits; *refused*: named by an error.
//! Exact-mode logits must be those of a twin that holds the same numbers as plain f32.
//! `QUERN_UPDATE=1` writes the table instead of comparing it.

use std::{collections::BTreeMap, env, fs, path::Path};

use quern_convert::{Options, convert, source::gguf};
use quern_models::{FloatType, ModelFile, Scheme, TensorInfo, ZeroKind};

use crate::support::{
    Scratch,
    checkpoint::{self, Format},
    fixture,
    golden::{Golden, distance, range},
    model::{self, Run, kept},
};

/// Families, by the folder of their float fixture. GPT-2 stores its layers transposed, so only GPTQ,
/// whose codes are not, has them quantized.
const FAMILIES: [(&str, &str, bool); 10] = [
    ("llama", "llama", false),
    ("mistral", "mistral", false),
    ("qwen2", "qwen2", false),
    ("qwen3", "qwen3", false),
    ("smollm3", "smollm3", false),
    ("gemma2", "gemma2", false),
    ("gemma3", "gemma3", false),
    ("mixtral", "mixtral", false),
    ("gpt2", "gpt2", true),
    ("gpt_neo", "gpt_neo", false),
];

const fn gptq(bits: usize, sym: bool, v2: bool, act_order: bool) -> Format {
    Format::Gptq { bits, sym, v2, act_order }
}

/// Rows of formats that are made here.
const ROWS: [(&str, Format); 21] = [
    ("float: F32", Format::Float(FloatType::F32)),
    ("float: F16", Format::Float(FloatType::F16)),
    ("float: BF16", Format::Float(FloatType::BF16)),
    ("GPTQ 8 bits", gptq(8, true, false, false)),
    ("GPTQ 4 bits", gptq(4, true, false, false)),
    ("GPTQ 4 bits, asymmetric", gptq(4, false, false, false)),
    ("GPTQ 4 bits, act-order", gptq(4, true, false, true)),
    ("GPTQ v2 4 bits, asymmetric, act-order", gptq(4, false, true, true)),
    ("GPTQ 3 bits", gptq(3, true, false, false)),
    ("GPTQ 3 bits, asymmetric", gptq(3, false, false, false)),
    ("GPTQ 2 bits", gptq(2, true, false, false)),
    ("AWQ gemm", Format::AwqGemm),
    ("AWQ gemv", Format::AwqGemv),
    ("compressed-tensors int8", Format::Packed { bits: 8, sym: true }),
    ("compressed-tensors int4", Format::Packed { bits: 4, sym: true }),
    ("compressed-tensors int4, asymmetric", Format::Packed { bits: 4, sym: false }),
    ("compressed-tensors int2", Format::Packed { bits: 2, sym: true }),
    ("compressed-tensors W8A8", Format::Int8),
    ("compressed-tensors FP8", Format::Fp8Channel),
    ("FP8 in blocks", Format::Fp8Block),
    ("compressed-tensors MXFP4", Format::Mxfp4),
];

const BEGIN: &str = "<!-- made by tests/supported.rs -->";
const END: &str = "<!-- end -->";

#[test]
fn the_readme_says_what_is_read() {
    let mut table =
        format!("| format | {} |\n|---|{}\n", FAMILIES.map(|f| f.0).join(" | "), "---|".repeat(FAMILIES.len()));
    // A thread per family: cells wait for the disk as much as for a core.
    let columns = std::thread::scope(|s| {
        let column = |(_, folder, conv1d)| s.spawn(move || ROWS.map(|(_, format)| cell(folder, format, conv1d)));
        FAMILIES.map(column).map(|t| t.join().unwrap())
    });
    for (row, (name, _)) in ROWS.iter().enumerate() {
        let cells: Vec<String> = columns.iter().map(|c| c[row].clone()).collect();
        table += &line(name, &cells);
    }
    for (name, cells) in gguf() {
        table += &line(&name, &cells);
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md");
    let readme = fs::read_to_string(&path).unwrap();
    let (before, rest) = readme.split_once(BEGIN).expect("README.md has the table's first mark");
    let (there, after) = rest.split_once(END).expect("README.md has the table's last mark");
    if env::var_os("QUERN_UPDATE").is_some() {
        fs::write(&path, format!("{before}{BEGIN}\n{table}{END}{after}")).unwrap();
        return;
    }
    assert_eq!(there.trim(), table.trim(), "README.md's table; QUERN_UPDATE=1 cargo test the_readme writes it");
}

/// Tries one cell.
fn cell(folder: &str, format: Format, conv1d: bool) -> String {
    if conv1d && !matches!(format, Format::Float(_) | Format::Gptq { .. }) {
        return "".into();
    }
    let dir = fixture("models").join(folder);
    let scratch = Scratch::new("supported");
    let (packed, twin) = (scratch.at("packed"), scratch.at("twin"));
    let bits = checkpoint::make(&dir, format, conv1d, &packed, &twin);
    let what = format!("{folder}, {format:?}");
    if let Err(e) = convert(&packed, &scratch.at("probe.qrn"), &Options::default(), &mut ()) {
        println!("{what}: {e}");
        return "refused".into();
    }
    let golden = Golden::read(&dir);
    let ids = golden.ids("input_ids");
    let (report, file) = kept(&packed, &scratch);
    let logits = model::logits(&file, Run::Exact, ids);
    let stored = bits_per_weight(&file);
    let expected_method = match format {
        Format::Float(_) => "float",
        Format::Gptq { .. } => "gptq",
        Format::AwqGemm | Format::AwqGemv => "awq",
        Format::Fp8Block => "fp8",
        _ => "compressed-tensors",
    };
    assert_eq!(report.method, expected_method, "{what}");
    drop(file);
    let other = Scratch::new("supported-twin");
    let (_, file) = kept(&twin, &other);
    let expected = model::logits(&file, Run::Exact, ids);
    let (off, range) = (distance(&logits, &expected), range(&expected));
    // Both are sums of the same products in another order.
    let bound = golden.exact_bound(range);
    println!(
        "{what}: {:.1e} of the range off, {bits:.2} bits per weight in the source, {stored:.2} in the file",
        off / range
    );
    assert!(off <= bound, "{what}: {:.1e} of the range off, bound {:.1e}", off / range, bound / range);
    sized(bits, stored)
}

/// What a cell says, and by what the file grows.
fn sized(bits: f64, stored: f64) -> String {
    if stored <= bits * 1.1 { "exact".into() } else { format!("widened {bits:.1} to {stored:.1} bits") }
}

/// A row; what its cells say of their size goes into its name where it is the same everywhere.
fn line(name: &str, cells: &[String]) -> String {
    let growth = cells.iter().find_map(|c| c.strip_prefix("widened "));
    if cells.iter().any(|c| c == "exact") {
        let cell = |c: &String| c.strip_prefix("widened ").map_or(c.clone(), |growth| format!("widened ({growth})"));
        return format!("| {name} | {} |\n", cells.iter().map(cell).collect::<Vec<_>>().join(" | "));
    }
    let name = growth.map_or(name.to_string(), |g| format!("{name} ({g})"));
    let short: Vec<&str> = cells.iter().map(|c| c.split(' ').next().unwrap_or_default()).collect();
    format!("| {name} | {} |\n", short.join(" | "))
}

/// Bits per weight of the linear layers of the decoder layers, padding not counted.
fn bits_per_weight(file: &ModelFile) -> f64 {
    let linear = |t: &&TensorInfo| t.name.starts_with("layers.") && t.dims.len() == 2 && !t.name.ends_with(".router");
    let (mut weights, mut bits) = (0.0, 0.0);
    for t in file.tensors().iter().filter(linear) {
        weights += (t.shape().0 * t.shape().1) as f64;
        bits += bits_of(t);
    }
    bits / weights
}

/// Bits of a tensor without what pads it.
fn bits_of(t: &TensorInfo) -> f64 {
    let (n, k) = t.shape();
    let weights = (n * k) as f64;
    let per_group = |group: u32, bits: usize| bits as f64 * (k as f64 / group as f64).ceil() * n as f64;
    match t.scheme {
        Scheme::Float(kind) => weights * 8.0 * kind.size() as f64,
        Scheme::Order => 0.0,
        Scheme::Int { bits, group, zero, scale } => {
            let zero = match zero {
                ZeroKind::Mid => 0,
                ZeroKind::Code => bits as usize,
                ZeroKind::Min => 8 * scale.size(),
            };
            weights * bits as f64 + per_group(group, 8 * scale.size() + zero)
        }
        Scheme::Nested { bits, group, zero } => {
            let levels = if zero == ZeroKind::Min { 2 } else { 1 };
            weights * bits as f64 + per_group(group, 8 * levels) + per_group(256, 16 * levels)
        }
        Scheme::Mini { kind, group, scale } => weights * kind.bits() as f64 + per_group(group, 8 * scale.size()),
    }
}

/// Rows of the GGUF fixtures, whose goldens `tests/parity.rs` compares: a cell for every type that one has.
fn gguf() -> Vec<(String, Vec<String>)> {
    const OURS: [(&str, &str); 8] = [
        ("attn_q", "q"),
        ("attn_qkv", "q"),
        ("attn_k", "k"),
        ("attn_v", "v"),
        ("attn_output", "o"),
        ("ffn_gate", "gate"),
        ("ffn_up", "up"),
        ("ffn_down", "down"),
    ];
    let mut rows: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for entry in fs::read_dir(fixture("gguf")).unwrap() {
        let dir = entry.unwrap().path();
        let scratch = Scratch::new("supported-gguf");
        let (_, file) = kept(&dir, &scratch);
        let family = FAMILIES.iter().position(|f| f.0 == file.spec().family).unwrap();
        for part in fs::read_dir(&dir).unwrap().map(|e| e.unwrap().path()) {
            if part.extension().is_none_or(|e| e != "gguf") {
                continue;
            }
            let bytes = fs::read(&part).unwrap();
            for t in &gguf::parse(&bytes).unwrap().tensors {
                let Some((layer, name)) = t.name.strip_prefix("blk.").and_then(|n| n.split_once('.')) else { continue };
                let module = name.strip_suffix(".weight").and_then(|n| OURS.iter().find(|o| o.0 == n));
                let Some((_, ours)) = module else { continue };
                let info = &file.tensors()[file.index(&format!("layers.{layer}.{ours}")).unwrap()];
                let weights: u64 = t.shape.iter().product();
                let (n, k) = info.shape();
                let bits = (t.bytes.len() * 8) as f64 / weights as f64;
                let row = rows.entry(format!("GGUF {}", t.dtype.name())).or_insert(vec![String::new(); FAMILIES.len()]);
                row[family] = sized(bits, bits_of(info) / (n * k) as f64);
            }
        }
    }
    rows.into_iter().collect()
}
