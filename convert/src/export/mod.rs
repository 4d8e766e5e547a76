//! The way back: a `.qrn` file as a checkpoint that other programs read.
//!
//! [`export`] writes a folder as Hugging Face has it (GPTQ, AWQ or floats) or one GGUF file. Codes,
//! scales and zero-points are the file's own; what a format cannot hold exactly is refused by name.
//! The export is read back by the importers and compared with the file before it takes its name.

mod awq;
mod beside;
mod check;
mod folder;
mod gguf;
mod gguf_tokenizer;
mod gptq;
mod items;
mod part;
mod shards;

use std::{collections::BTreeMap, path::Path, time::Instant};

use quern_models::{
    FloatType, FormatError, ModelFile,
    family::{self, RuleKind},
};
use serde_json::Value;

pub use gptq::GptqFormat;

use crate::{ConvertError, Phase, Progress, Report, Row, Step, pipeline::go_on, threads::Threads};
use folder::Folder;
use items::{Item, Role};
use part::Part;

/// What to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// A folder with GPTQ's packed integers.
    Gptq(GptqFormat),
    /// A folder with AWQ's packed integers (`gemm`).
    Awq,
    /// A folder of floats of this type; unless given, floats keep their type and integers become f32, which holds
    /// them exactly.
    Float(Option<FloatType>),
    /// A GGUF file.
    Gguf,
}

impl Format {
    /// Name as typed and printed.
    pub fn name(self) -> &'static str {
        match self {
            Format::Gptq(format) => format.name(),
            Format::Awq => "awq",
            Format::Float(_) => "float",
            Format::Gguf => "gguf",
        }
    }
}

/// Choices of an export.
#[derive(Debug, Clone, Copy)]
pub struct ExportOptions {
    /// What to write.
    pub format: Format,
    /// Replace an existing export.
    pub force: bool,
    /// Most bytes of a safetensors file, unless one tensor needs more.
    pub shard_bytes: u64,
}

impl ExportOptions {
    /// The usual shards, nothing replaced.
    pub fn new(format: Format) -> ExportOptions {
        ExportOptions { format, force: false, shard_bytes: 5_000_000_000 }
    }
}

/// Writes the model in the file at `path` to `out`: a folder, or one file for [`Format::Gguf`].
///
/// `out` appears only when the export has been read back and compared; an error or an interruption
/// leaves what was there before.
pub fn export(
    path: &Path,
    out: &Path,
    options: &ExportOptions,
    progress: &mut dyn Progress,
) -> Result<Report, ConvertError> {
    let start = Instant::now();
    let file = ModelFile::open(path).map_err(|e| unusable(path, e))?;
    if let Ok(there) = out.canonicalize()
        && path.canonicalize().is_ok_and(|p| p == there)
    {
        return Err(ConvertError::OwnSource { path: out.into() });
    }
    let config = source_config(path, &file)?;
    let mut family = family::plan(&config, &())
        .map_err(|source| ConvertError::Family { origin: path.display().to_string(), source })?;
    if family.rules.iter().any(|r| matches!(r.kind, RuleKind::OnePlus { .. })) {
        return Err(ConvertError::unsupported(
            format!("a {} model, whose checkpoints hold the weights of norms less one", family.spec.family),
            "this version exports no such model; the file itself is what it runs",
        ));
    }
    family.set_tied(file.spec().tied_head);
    let items = items::items(&file, &family)?;
    let model = Model { path, file: &file, config, items: &items };
    let threads = Threads::new()?;
    if options.format == Format::Gguf {
        return gguf::export(&model, out, options.force, &threads, progress, start);
    }
    if let Some(key) = other_parts(&model.config) {
        return Err(ConvertError::unsupported(
            format!("the source is a multimodal model ({key} in its config), of which the file has the text part"),
            "this version exports such a model with --to gguf only",
        ));
    }
    let mut tensors = tensors(&model, options.format)?;
    tensors.notes.iter().for_each(|n| progress.note(n));
    model.undamaged()?;
    let folder = Folder::create(out, options.force)?;
    beside::write(&folder, &model, &tensors)?;
    let mut written = Writing::new(&tensors.parts);
    let mut done = |part: &Part| written.done(part, progress);
    shards::write(&folder, &tensors.parts, options.shard_bytes, &threads, &mut done)?;
    let verified = check::check(folder.path(), &file, &items, &threads, progress)?;
    let file_bytes = folder.size()?;
    folder.finish()?;
    let rows = std::mem::take(&mut tensors.rows);
    Ok(Report {
        path: out.into(),
        method: options.format.name(),
        rows,
        file_bytes,
        verified,
        seconds: start.elapsed().as_secs_f64(),
        head: None,
    })
}

/// The key that shows that a config has other parts than text.
fn other_parts(config: &Value) -> Option<&'static str> {
    let nested = ["text_config", "llm_config", "language_config", "thinker_config"];
    // A flat config has the text model's keys beside these.
    let beside = ["vision_config", "audio_config"];
    nested.into_iter().chain(beside).find(|key| config.get(key).is_some_and(|v| !v.is_null()))
}

/// A model to be exported.
struct Model<'a> {
    path: &'a Path,
    file: &'a ModelFile,
    /// The source's config.json.
    config: Value,
    items: &'a [Item<'a>],
}

impl Model<'_> {
    /// Compares every hash, so that damage is found before it is copied.
    fn undamaged(&self) -> Result<(), ConvertError> {
        self.file.verify().map(drop).map_err(|e| unusable(self.path, e))
    }
}

/// Names the file, once.
fn unusable(path: &Path, source: FormatError) -> ConvertError {
    match source {
        FormatError::Io { .. } => source.into(),
        _ => ConvertError::Qrn { path: path.into(), source },
    }
}

/// The source's config.json, which the converter keeps among the provenance.
fn source_config(path: &Path, file: &ModelFile) -> Result<Value, ConvertError> {
    let config = file.provenance().get("config").filter(|c| c.is_object());
    config.cloned().ok_or_else(|| {
        ConvertError::unsupported(
            format!("{}: the config of its source is not in it (made by an earlier version)", path.display()),
            "convert the checkpoint again with this version, then export",
        )
    })
}

/// What goes into the safetensors files, and what is said about it.
struct Tensors<'a> {
    parts: Vec<Part<'a>>,
    rows: Vec<Row>,
    notes: Vec<String>,
    /// quantization_config.
    quantization: Option<Value>,
    /// Type of the model's floats, as configs name it.
    dtype: FloatType,
}

fn tensors<'a>(model: &Model<'a>, format: Format) -> Result<Tensors<'a>, ConvertError> {
    let items = model.items;
    if let Format::Float(asked) = format {
        let kind = |i: &Item| asked.unwrap_or_else(|| exact(i));
        let parts: Vec<Part> = items.iter().map(|i| Part::floats(i.float_name(), i, kind(i))).collect();
        let kinds: Vec<FloatType> = items.iter().map(kind).collect();
        let mixed = kinds.iter().any(|k| *k != kinds[0]);
        let dtype = if mixed { FloatType::F32 } else { kinds[0] };
        let rows = rows(items.iter().zip(&parts).map(|(i, p)| (p.dtype.name().into(), i, std::slice::from_ref(p))));
        return Ok(Tensors { parts, rows, notes: vec![], quantization: None, dtype });
    }
    let gptq = |i: &Item| if matches!(format, Format::Gptq(_)) { gptq::obstacle(i) } else { awq::obstacle(i) };
    let (mut quantized, mut floats, mut widened): (Vec<&Item>, Vec<&Item>, Vec<&Item>) = (vec![], vec![], vec![]);
    for item in items {
        // No tool reads packed embeddings; AWQ's read no packed head.
        let table =
            matches!(item.role, Role::Embedding | Role::Table) || item.role == Role::Head && format == Format::Awq;
        match gptq(item) {
            _ if item.float().is_some() => {
                if item.role == Role::Linear {
                    floats.push(item);
                }
            }
            _ if table => widened.push(item),
            None => quantized.push(item),
            Some(_) if item.role != Role::Linear => widened.push(item),
            Some(why) => return Err(gptq::refuse(item, why, "export it with --to float")),
        }
    }
    if quantized.is_empty() {
        return Err(ConvertError::unsupported(
            format!(
                "the file has no tensor that --to {} could pack",
                if format == Format::Awq { "awq" } else { "gptq" }
            ),
            "export it with --to float, or convert the checkpoint with --quant int4 first",
        ));
    }
    let mut notes: Vec<String> = widened.iter().map(|i| widened_note(i)).collect();
    notes.extend(gptq::scale_note(&quantized));
    let tools = model.tools();
    let quantization = match format {
        Format::Gptq(format) => gptq::config(&quantized, &floats, format, &tools),
        _ => {
            let group = awq::group(&quantized).map_err(|(item, why)| {
                gptq::refuse(item, &why, "export it with --to float, or GPTQ integers with --to gptq")
            })?;
            awq::config(group, &floats, &tools)
        }
    };
    let says = |key: &str, value: bool| quantization.get(key) == Some(&value.into());
    let own = |t: &Value| t.as_str().is_some_and(|t| t.starts_with("gptqmodel:"));
    if format == Format::Gptq(GptqFormat::V1) && says("sym", false) && !tools.iter().any(own) {
        notes.push(
            "gptqmodel opens asymmetric files of version 1 only if it made them itself; --format gptq_v2 is what it \
             opens otherwise"
                .into(),
        );
    }
    let mut parts = vec![];
    let mut names = vec![];
    for item in items {
        let first = parts.len();
        match format {
            _ if !quantized.iter().any(|q| std::ptr::eq(*q, item)) => {
                parts.push(Part::floats(item.float_name(), item, exact(item)));
            }
            Format::Gptq(format) => parts.extend(gptq::parts(item, format)),
            _ => parts.extend(awq::parts(item)),
        }
        let packed = parts.len() > first + 1;
        let name =
            if packed { format!("{} {}", format.name(), item.scheme()) } else { parts[first].dtype.name().into() };
        names.push((name, first..parts.len()));
    }
    let rows = rows(items.iter().zip(&names).map(|(i, (name, range))| (name.clone(), i, &parts[range.clone()])));
    // Tools compute in half precision; the tables say in which.
    let table = items.iter().find(|i| i.role == Role::Embedding).map(exact);
    let dtype = table.filter(|t| *t != FloatType::F32).unwrap_or(FloatType::F16);
    Ok(Tensors { parts, rows, notes, quantization: Some(quantization), dtype })
}

/// The float type that holds a tensor's numbers exactly.
fn exact(item: &Item) -> FloatType {
    item.float().unwrap_or(FloatType::F32)
}

fn widened_note(item: &Item) -> String {
    format!(
        "tensor {} is {}, for which the format has no room: written as the f32 numbers it stands for",
        item.module,
        item.scheme()
    )
}

impl Model<'_> {
    /// Who made the integers and who wrote them, as configs name tools. gptqmodel opens asymmetric files of version 1
    /// only if it is named itself.
    fn tools(&self) -> Vec<Value> {
        let made = self.file.provenance().get("tools").and_then(Value::as_array).cloned().unwrap_or_default();
        let own = format!("quern:{}", env!("CARGO_PKG_VERSION"));
        made.into_iter().filter(|t| t.is_string() && *t != own).chain([own.clone().into()]).collect()
    }
}

/// Tensors by what they became, largest first.
fn rows<'p, 'a: 'p>(all: impl Iterator<Item = (String, &'p Item<'a>, &'p [Part<'a>])>) -> Vec<Row> {
    let mut rows: BTreeMap<String, Row> = BTreeMap::new();
    for (scheme, item, parts) in all {
        let row = rows.entry(scheme.clone()).or_insert(Row { scheme, tensors: 0, weights: 0, bytes: 0 });
        row.tensors += 1;
        row.weights += item.dims.iter().product::<usize>() as u64;
        row.bytes += parts.iter().map(Part::bytes).sum::<u64>();
    }
    let mut rows: Vec<Row> = rows.into_values().collect();
    rows.sort_by_key(|r| std::cmp::Reverse(r.bytes));
    rows
}

/// Counts tensors and bytes written.
struct Writing {
    tensors: usize,
    tensors_done: usize,
    bytes: u64,
    bytes_done: u64,
}

impl Writing {
    fn new(parts: &[Part]) -> Writing {
        let bytes = parts.iter().map(Part::bytes).sum();
        Writing { tensors: parts.len(), tensors_done: 0, bytes, bytes_done: 0 }
    }

    fn done(&mut self, part: &Part, progress: &mut dyn Progress) -> Result<(), ConvertError> {
        self.tensors_done += 1;
        self.bytes_done += part.bytes();
        progress.step(&Step {
            phase: Phase::Write,
            tensor: &part.name,
            tensors_done: self.tensors_done,
            tensors: self.tensors,
            bytes_done: self.bytes_done,
            bytes: self.bytes,
        });
        go_on(progress)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn other_parts_show_in_nested_and_flat_configs() {
        for key in ["text_config", "llm_config", "language_config", "thinker_config", "vision_config", "audio_config"] {
            assert_eq!(other_parts(&json!({ "model_type": "qwen2_vl", key: { "depth": 2 } })), Some(key));
            assert_eq!(other_parts(&json!({ "model_type": "qwen2", key: null })), None);
        }
    }
}
