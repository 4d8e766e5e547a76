//! Models in several files, `NAME-00001-of-00003.gguf` and so on (llama.cpp's `gguf-split`).
//!
//! Every part says in `split.no` and `split.count` where it stands; the first has the metadata. Any part
//! may be given; the others are found beside it by their names.

use std::{
    collections::{HashMap, HashSet},
    path::{Path, PathBuf},
};

use quern_models::map::Mapped;

use super::{Gguf, Value, checkpoint, parse};
use crate::{
    ConvertError, Malformed,
    source::{Checkpoint, map, name_of},
};

const NO: &str = "split.no";
const COUNT: &str = "split.count";

/// Finds and maps all parts of the model that `path` is a part of, in order; most models are one file.
pub fn open(path: &Path, first: Mapped) -> Result<Vec<(PathBuf, Mapped)>, ConvertError> {
    let file = |source| ConvertError::File { path: path.into(), source };
    let parsed = parse(&first).map_err(file)?;
    let place = place(&parsed).map_err(file)?;
    drop(parsed);
    let Some((no, count)) = place else { return Ok(vec![(path.into(), first)]) };
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let end = |no: u64| format!("-{:05}-of-{count:05}.gguf", no + 1);
    let Some(stem) = name.strip_suffix(&end(no)) else {
        return Err(ConvertError::Source {
            path: path.into(),
            what: format!("part {} of {count} of a model, but its name does not end in {}", no + 1, end(no)),
            next: "give all parts the names they had, or join them: llama-gguf-split --merge FIRST-PART OUT.gguf"
                .into(),
        });
    };
    let mut given = Some(first);
    let mut parts = vec![];
    for i in 0..count {
        let part = path.with_file_name(format!("{stem}{}", end(i)));
        let bytes = match given.take_if(|_| i == no) {
            Some(bytes) => bytes,
            None if !part.exists() => {
                return Err(ConvertError::Source {
                    path: part,
                    what: format!("part {} of {count} of the model is missing", i + 1),
                    next: "download it to where the others are".into(),
                });
            }
            None => map(&part)?,
        };
        parts.push((part, bytes));
    }
    Ok(parts)
}

/// The names without those that are a further part of a model already named.
pub fn models(names: Vec<String>) -> Vec<String> {
    let mut seen = HashSet::new();
    names.into_iter().filter(|name| family(name).is_none_or(|of| seen.insert(of))).collect()
}

/// What the names of all parts of a model have in common.
fn family(name: &str) -> Option<(String, String)> {
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, no) = rest.rsplit_once('-')?;
    let digits = |s: &str| s.len() == 5 && s.bytes().all(|b| b.is_ascii_digit());
    (digits(no) && digits(count)).then(|| (stem.into(), count.into()))
}

/// Parses all parts and makes a checkpoint of them, which is called as the first.
pub fn read(parts: &[(PathBuf, Mapped)]) -> Result<Checkpoint<'_>, ConvertError> {
    let Some((path, _)) = parts.first() else { unreachable!("a source has a file") };
    let mut parsed = vec![];
    for (path, bytes) in parts {
        parsed.push(parse(bytes).map_err(|source| ConvertError::File { path: path.clone(), source })?);
    }
    let model = join(parsed).and_then(|model| checkpoint(&model, &name_of(path)));
    model.map_err(|source| ConvertError::File { path: path.clone(), source })
}

/// One model of all its parts, in order: the first's metadata and everyone's tensors.
pub fn join(parts: Vec<Gguf<'_>>) -> Result<Gguf<'_>, Malformed> {
    let mut part_of = HashMap::new();
    for (i, part) in parts.iter().enumerate() {
        let alone = parts.len() == 1 && place(part)?.is_none();
        let stands = place(part)?.unwrap_or((0, 1));
        if !alone && stands != (i as u64, parts.len() as u64) {
            let got = format!("part {} of {}", stands.0 + 1, stands.1);
            let expected = format!("part {} of {}", i + 1, parts.len());
            return Err(Malformed::field(format!("{NO} and {COUNT} of part {}", i + 1), expected, got));
        }
        for t in &part.tensors {
            if let Some(other) = part_of.insert(t.name, i) {
                let got = format!("{} in parts {} and {}", t.name, other + 1, i + 1);
                return Err(Malformed::field("tensor names", "each once", got));
            }
        }
    }
    let mut parts = parts.into_iter();
    let Some(mut model) = parts.next() else { return Err(Malformed::field("parts", "at least one", 0)) };
    parts.for_each(|p| model.tensors.extend(p.tensors));
    let said = model.whole("split.tensors.count")?;
    if let Some(said) = said.filter(|&n| n != model.tensors.len() as u64) {
        return Err(Malformed::field(
            "split.tensors.count",
            format!("{said} tensors in all parts"),
            model.tensors.len(),
        ));
    }
    Ok(model)
}

/// Number (from 0) and count of a part; `None` for a whole model.
fn place(gguf: &Gguf) -> Result<Option<(u64, u64)>, Malformed> {
    // The format has 16 bits for both.
    let small = |key: &str| match gguf.meta.get(key).map(Value::whole) {
        None => Ok(None),
        Some(Some(n)) if n <= u16::MAX as u64 => Ok(Some(n)),
        Some(_) => Err(Malformed::field(key, "a whole number below 65536", gguf.shown(key))),
    };
    let Some(count) = small(COUNT)?.filter(|&n| n > 1) else { return Ok(None) };
    match small(NO)? {
        Some(no) if no < count => Ok(Some((no, count))),
        _ => Err(Malformed::field(NO, format!("a whole number below {count}"), gguf.shown(NO))),
    }
}
