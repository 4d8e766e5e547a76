//! A Hugging Face model directory: which files hold the tensors, and what the other files say.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
};

use quern_models::{Generation, map::Mapped};
use serde::Deserialize;
use serde_json::Value;

use super::{Checkpoint, RawTensor, Source, map, name_of, pickled, quantizer, safetensors};
use crate::{
    ConvertError, Malformed,
    tokenizer::settings::{self, Settings},
};

/// Most bytes of a JSON or text file, but for the tokenizer: far more than any has.
const MOST: u64 = 64 << 20;
/// Most bytes of tokenizer.json.
const MOST_TOKENIZER: u64 = 512 << 20;

/// The files beside the tensors that [`read`] looks at, there or not.
pub(super) fn beside(dir: &Path) -> impl Iterator<Item = PathBuf> {
    let named = [
        "config.json",
        "tokenizer.json",
        "tokenizer.model",
        "vocab.json",
        "merges.txt",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "generation_config.json",
        "quantize_config.json",
        "quant_config.json",
        "chat_template.jinja",
        "chat_template.json",
        "README.md",
    ];
    named.into_iter().map(|name| dir.join(name)).chain(more_templates(dir))
}

/// The templates of `additional_chat_templates`, in order.
fn more_templates(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir.join("additional_chat_templates")).into_iter().flatten().flatten();
    let mut paths: Vec<_> = entries.map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e == "jinja")).collect();
    paths.sort();
    paths
}

/// Finds and maps the tensor files of a directory.
///
/// An index names its shards; without one it is `model.safetensors`, or the only .safetensors file
/// whatever its name, or the only .gguf model, in one file or in parts (which is also taken where no config.json stands beside
/// the .safetensors).
pub(super) fn open(dir: &Path) -> Result<Source, ConvertError> {
    let mut names = vec![];
    for entry in fs::read_dir(dir).map_err(|source| ConvertError::Io { path: dir.into(), source })? {
        let entry = entry.map_err(|source| ConvertError::Io { path: dir.into(), source })?;
        names.push(entry.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    if names.iter().any(|n| n == "adapter_config.json") && !names.iter().any(|n| n == "config.json") {
        let next = "give the model it belongs to; to use both, merge them into a float checkpoint first";
        return Err(source_error(dir, "an adapter (LoRA or EoRA), not a model", next));
    }
    if names.iter().any(|n| n == "qmodel.pt") {
        let next = "convert the float checkpoint with --quant int4 instead";
        return Err(source_error(dir, "an HQQ checkpoint (qmodel.pt, a PyTorch pickle), which is not imported", next));
    }
    let ending = |end: &str| names.iter().filter(|n| n.ends_with(end)).cloned().collect::<Vec<_>>();
    let main = ["model.safetensors.index.json", "model.safetensors"].into_iter().find(|m| names.iter().any(|n| n == m));
    let indices = ending(".safetensors.index.json");
    let singles = ending(".safetensors");
    let ggufs = super::gguf::models(ending(".gguf"));
    let chosen = match (main, &indices[..], &singles[..], &ggufs[..]) {
        (Some(main), ..) => main,
        (None, _, _, [one]) if !names.iter().any(|n| n == "config.json") => one,
        (None, [one], ..) | (None, [], [one], _) | (None, [], [], [one]) => one,
        (None, [], [], []) => return Err(nothing(dir, &names)),
        _ => {
            let files = if ggufs.is_empty() { singles.join(", ") } else { [singles, ggufs].concat().join(", ") };
            return Err(source_error(
                dir,
                format!("several tensor files and no index ({files})"),
                "name the one to convert",
            ));
        }
    };
    let path = dir.join(chosen);
    if chosen.ends_with(".gguf") {
        return Ok(Source::Gguf(super::gguf::open(&path, map(&path)?)?));
    }
    if chosen.ends_with(".index.json") {
        return open_index(dir, &path);
    }
    Ok(Source::Directory { dir: dir.into(), shards: vec![(path.clone(), map(&path)?)], index: None })
}

/// Maps the shards that an index names.
pub(super) fn open_index(dir: &Path, path: &Path) -> Result<Source, ConvertError> {
    let index = json(path)?;
    let map_of = index.get("weight_map").and_then(Value::as_object);
    let map_of = map_of.ok_or_else(|| file(path, Malformed::field("weight_map", "an object", "none")))?;
    let mut weights = BTreeMap::new();
    let mut shards: Vec<(PathBuf, Mapped)> = vec![];
    for (tensor, shard) in map_of {
        let plain = shard.as_str().filter(|s| Path::new(s).file_name().is_some_and(|n| n == *s));
        let shard = plain.ok_or_else(|| {
            file(path, Malformed::field(format!("weight_map: {tensor}"), "the name of a file beside the index", shard))
        })?;
        let at = dir.join(shard);
        if !shards.iter().any(|(p, _)| *p == at) {
            if !at.exists() {
                let what = format!("the index needs {shard} (for {tensor}), which is not there");
                return Err(source_error(dir, what, "download the missing file"));
            }
            shards.push((at.clone(), map(&at)?));
        }
        weights.insert(tensor.clone(), shard.to_string());
    }
    if shards.is_empty() {
        return Err(file(path, Malformed::field("weight_map", "at least one tensor", "none")));
    }
    Ok(Source::Directory { dir: dir.into(), shards, index: Some((path.into(), weights)) })
}

/// Parses the mapped files and reads the JSON files beside them.
pub(super) fn read<'a>(
    dir: &Path,
    shards: &'a [(PathBuf, Mapped)],
    index: Option<&(PathBuf, BTreeMap<String, String>)>,
) -> Result<Checkpoint<'a>, ConvertError> {
    let tensors = tensors(shards, index)?;
    let path = dir.join("config.json");
    if !path.exists() {
        return Err(source_error(dir, "no config.json beside the tensors", "download the whole model directory"));
    }
    let config = json(&path)?;
    let tokenizer_config = optional_json(&dir.join("tokenizer_config.json"))?.unwrap_or_default();
    let mut notes = vec![];
    let tokenizer = tokenizer(dir, &config, &tokenizer_config, &mut notes)?;
    let generation = generation(dir, &config, &tokenizer_config, tokenizer.as_deref(), &mut notes)?;
    let model = config.get("_name_or_path").or(config.get("_model_name_or_path")).and_then(Value::as_str);
    Ok(Checkpoint {
        name: name_of(if dir == Path::new(".") { &shards[0].0 } else { dir }),
        tensors,
        quant_config: quant_config(dir, &config)?,
        tokenizer,
        chat_template: chat_template(dir, &tokenizer_config, &mut notes)?,
        generation,
        licence: licence(dir)?,
        model: model.filter(|m| !m.is_empty()).map(String::from),
        gguf: false,
        notes,
        config,
    })
}

fn tensors<'a>(
    shards: &'a [(PathBuf, Mapped)],
    index: Option<&(PathBuf, BTreeMap<String, String>)>,
) -> Result<BTreeMap<String, RawTensor<'a>>, ConvertError> {
    let mut all: BTreeMap<String, RawTensor<'a>> = BTreeMap::new();
    for (path, map) in shards {
        let mut here = safetensors::parse(map).map_err(|e| file(path, e))?;
        if let Some((index, weights)) = index {
            let name = name_of(path);
            for (tensor, _) in weights.iter().filter(|w| *w.1 == name) {
                if !here.contains_key(tensor) {
                    let what = format!("{} says that it holds {tensor}, it does not", name_of(index));
                    return Err(source_error(path, what, "download both files again"));
                }
            }
            // A copy in another shard than the index names is not looked at by other loaders either.
            here.retain(|tensor, _| weights.get(tensor).is_none_or(|w| *w == name));
        }
        for (tensor, raw) in here {
            if all.insert(tensor.clone(), raw).is_some() {
                return Err(source_error(path, format!("tensor {tensor} is in another shard too"), "keep one of them"));
            }
        }
    }
    Ok(all)
}

/// tokenizer.json, or what other vocabulary files say in that form.
fn tokenizer(
    dir: &Path,
    config: &Value,
    tokenizer_config: &Value,
    notes: &mut Vec<String>,
) -> Result<Option<Vec<u8>>, ConvertError> {
    let path = dir.join("tokenizer.json");
    if path.exists() {
        let bytes = bytes(&path, MOST_TOKENIZER)?;
        serde_json::from_slice::<serde::de::IgnoredAny>(&bytes)
            .map_err(|source| file(&path, Malformed::Json { what: "JSON", source }))?;
        return Ok(Some(bytes));
    }
    let settings = || -> Result<Settings, ConvertError> {
        Ok(Settings {
            config: tokenizer_config.clone(),
            special: optional_json(&dir.join("special_tokens_map.json"))?.unwrap_or_default(),
            added: optional_json(&dir.join("added_tokens.json"))?.unwrap_or_default(),
            model_type: config.get("model_type").and_then(Value::as_str).unwrap_or_default().into(),
        })
    };
    let path = dir.join("tokenizer.model");
    if path.exists() {
        let built = settings()?.sentencepiece(&bytes(&path, MOST)?, notes);
        return built.map(Some).map_err(|e| file(&path, e));
    }
    let (vocab, merges) = (dir.join("vocab.json"), dir.join("merges.txt"));
    if vocab.exists() && merges.exists() {
        let lines = String::from_utf8(bytes(&merges, MOST)?);
        let lines = lines.map_err(|e| file(&merges, Malformed::field("text", "UTF-8", e.utf8_error())))?;
        let built = settings()?.byte_level(&json(&vocab)?, &lines, notes);
        return built.map(Some).map_err(|e| file(&vocab, e));
    }
    if dir.join("tekken.json").exists() {
        let what = "a vocabulary in mistral-common's own form, which is not read";
        return Err(source_error(&dir.join("tekken.json"), what, settings::NEXT));
    }
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.ends_with(".tiktoken") {
            return Err(file(&entry.path(), settings::tiktoken(&name)));
        }
    }
    notes.push(
        "no tokenizer.json: the file can be run on token ids only; transformers makes one from other vocabulary files \
         (AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR))"
            .into(),
    );
    Ok(None)
}

/// The template, in the places transformers looks for it, in its order.
fn chat_template(
    dir: &Path,
    tokenizer_config: &Value,
    notes: &mut Vec<String>,
) -> Result<Option<String>, ConvertError> {
    let text = |path: &Path| {
        let text = String::from_utf8(bytes(path, MOST)?);
        text.map(Some).map_err(|e| file(path, Malformed::field("text", "UTF-8", e.utf8_error())))
    };
    for name in ["chat_template.jinja", "additional_chat_templates/default.jinja"] {
        if dir.join(name).exists() {
            return text(&dir.join(name));
        }
    }
    if let Some(found) = one_of(tokenizer_config.get("chat_template"), notes) {
        return Ok(Some(found));
    }
    let legacy = optional_json(&dir.join("chat_template.json"))?.unwrap_or_default();
    if let Some(found) = one_of(legacy.get("chat_template"), notes) {
        return Ok(Some(found));
    }
    match &more_templates(dir)[..] {
        [] => Ok(None),
        [first, ..] => {
            notes.push(format!("no default chat template: {} is used", name_of(first)));
            text(first)
        }
    }
}

/// A template given as a string, as `{name: template}` or as a list of `{name, template}`.
fn one_of(value: Option<&Value>, notes: &mut Vec<String>) -> Option<String> {
    let named: Vec<(&str, &str)> = match value? {
        Value::String(s) => return Some(s.clone()),
        Value::Object(o) => o.iter().filter_map(|(n, t)| Some((n.as_str(), t.as_str()?))).collect(),
        Value::Array(list) => {
            list.iter().filter_map(|e| Some((e.get("name")?.as_str()?, e.get("template")?.as_str()?))).collect()
        }
        _ => vec![],
    };
    let (name, template) = named.iter().find(|(n, _)| *n == "default").or(named.first())?;
    if *name != "default" {
        notes.push(format!("no default chat template: the one named {name} is used"));
    }
    Some(template.to_string())
}

/// What the quantizer wrote: in config.json, in a file of its own, or in both, which must agree.
fn quant_config(dir: &Path, config: &Value) -> Result<Option<(String, Value)>, ConvertError> {
    let mut own = None;
    for name in ["quantize_config.json", "quant_config.json"] {
        if let Some(found) = optional_json(&dir.join(name))?.filter(|v| !v.is_null()) {
            own = Some((name, found));
            break;
        }
    }
    match (own, quantizer::inside(config)) {
        (None, inside) => Ok(inside.map(|v| ("config.json".into(), v.clone()))),
        (Some((name, own)), None) => Ok(Some((name.into(), own))),
        (Some((name, own)), Some(inside)) => match quantizer::both(inside, &own) {
            Ok(all) => Ok(Some((format!("config.json (with {name})"), all))),
            Err(d) => Err(source_error(
                dir,
                format!("config.json says {} {}, {name} says {}", d.what, d.config, d.own),
                "one of them is of another checkpoint: download the model again, or remove the wrong file or value",
            )),
        },
    }
}

fn generation(
    dir: &Path,
    config: &Value,
    tokenizer_config: &Value,
    tokenizer: Option<&[u8]>,
    notes: &mut Vec<String>,
) -> Result<Generation, ConvertError> {
    let own = optional_json(&dir.join("generation_config.json"))?.unwrap_or_default();
    let map = optional_json(&dir.join("special_tokens_map.json"))?.unwrap_or_default();
    // Recommendations only: a value of another type than expected is passed over.
    let float = |key: &str| own.get(key).and_then(Value::as_f64).map(|f| f as f32);
    let ids = |key: &str| {
        let list = |v: &Value| match v {
            Value::Array(a) => a.iter().filter_map(id).collect(),
            v => id(v).into_iter().collect::<Vec<u32>>(),
        };
        [&own, config].into_iter().filter_map(|c| c.get(key).map(list)).find(|l| !l.is_empty()).unwrap_or_default()
    };
    let token = |key: &str| {
        [tokenizer_config, &map].into_iter().find_map(|c| {
            let value = c.get(key)?;
            value.as_str().or_else(|| value.get("content")?.as_str()).map(String::from)
        })
    };
    let (mut eos, eos_text) = (ids("eos_token_id"), token("eos_token"));
    if let (true, Some(text), Some(tokenizer)) = (eos.is_empty(), &eos_text, tokenizer)
        && let Some(id) = added_token(tokenizer, text)
    {
        eos.push(id);
        notes.push(format!(
            "neither generation_config.json nor config.json has eos_token_id: answers end at {text} ({id}), the \
             tokenizer's eos_token"
        ));
    }
    Ok(Generation {
        temperature: float("temperature"),
        top_k: own.get("top_k").and_then(id),
        top_p: float("top_p"),
        min_p: float("min_p"),
        repetition_penalty: float("repetition_penalty"),
        do_sample: own.get("do_sample").and_then(Value::as_bool),
        eos,
        bos: ids("bos_token_id").first().copied(),
        pad: ids("pad_token_id").first().copied(),
        bos_text: token("bos_token"),
        eos_text,
    })
}

/// Id of a token by its text, among the `added_tokens` of a tokenizer.json.
fn added_token(tokenizer: &[u8], text: &str) -> Option<u32> {
    #[derive(Deserialize)]
    struct Added {
        added_tokens: Vec<Value>,
    }
    let added = serde_json::from_slice::<Added>(tokenizer).ok()?.added_tokens;
    added.iter().find(|t| t.get("content").and_then(Value::as_str) == Some(text)).and_then(|t| id(t.get("id")?))
}

fn id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|v| u32::try_from(v).ok())
}

/// `license:` of the model card's front matter.
fn licence(dir: &Path) -> Result<Option<String>, ConvertError> {
    let path = dir.join("README.md");
    if !path.exists() {
        return Ok(None);
    }
    Ok(String::from_utf8(bytes(&path, MOST)?).ok().and_then(|card| licence_of(&card)))
}

fn licence_of(card: &str) -> Option<String> {
    let front = card.strip_prefix("---")?.split("\n---").next()?;
    let value = |key: &str| {
        front.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':').map(|v| v.trim().trim_matches(['"', '\''])))
    };
    match value("license") {
        Some("other") => value("license_name").or(Some("other")).map(String::from),
        found => found.filter(|v| !v.is_empty()).map(String::from),
    }
}

/// Why a directory has nothing to convert.
fn nothing(dir: &Path, names: &[String]) -> ConvertError {
    let pickle = names
        .iter()
        .find(|n| [".bin", ".pt", ".pth", ".ckpt"].iter().any(|e| n.ends_with(e)) && *n != "training_args.bin");
    match pickle {
        Some(name) => pickled(&dir.join(name)),
        None => source_error(dir, "no .safetensors and no .gguf file in it", "give the directory that holds the model"),
    }
}

fn source_error(path: &Path, what: impl ToString, next: &str) -> ConvertError {
    ConvertError::Source { path: path.into(), what: what.to_string(), next: next.into() }
}

fn file(path: &Path, source: Malformed) -> ConvertError {
    ConvertError::File { path: path.into(), source }
}

/// A whole regular file of at most `most` bytes.
fn bytes(path: &Path, most: u64) -> Result<Vec<u8>, ConvertError> {
    let io = |source| ConvertError::Io { path: path.into(), source };
    // Asked before opening: opening a pipe would wait for somebody to write into it.
    let about = fs::metadata(path).map_err(io)?;
    if !about.is_file() {
        return Err(io(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")));
    }
    let mut bytes = vec![];
    if about.len() <= most {
        // Not more than that even if the file grows.
        fs::File::open(path).and_then(|f| f.take(most + 1).read_to_end(&mut bytes)).map_err(io)?;
    }
    let size = about.len().max(bytes.len() as u64);
    if size > most {
        let what = format!("size: expected at most {most} bytes, got {size}");
        return Err(source_error(path, what, "no model has such a file; download it again"));
    }
    Ok(bytes)
}

fn json(path: &Path) -> Result<Value, ConvertError> {
    serde_json::from_slice(&bytes(path, MOST)?).map_err(|source| file(path, Malformed::Json { what: "JSON", source }))
}

fn optional_json(path: &Path) -> Result<Option<Value>, ConvertError> {
    if path.exists() { json(path).map(Some) } else { Ok(None) }
}
