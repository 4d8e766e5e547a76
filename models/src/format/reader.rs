//! Opening a file: every byte of the header is checked before anything is believed.
//!
//! After `open`, every tensor the spec needs is there with the right shape, its bytes are in bounds
//! and page-aligned, tensors do not overlap, and header and tensors cover the file exactly. Tensor
//! bytes themselves, but for orders and a head's tokens, are checked only by [`ModelFile::verify`]: opening must not read
//! gigabytes.

use std::{collections::HashMap, io, path::Path, sync::Arc};

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::{
    FormatError, TensorInfo,
    layout::{DRAFT, FIXED_LEN, Fixed, PAGE, SECTION_LEN, Section, SectionKind},
};
use crate::{
    Scheme, TensorView,
    map::{Mapped, ReadOnce},
    spec::{Generation, ModelSpec},
};

/// A mapped file and its parsed header.
#[derive(Debug)]
pub struct ModelFile {
    map: Mapped,
    header: Header,
    draft: Option<Arc<ModelFile>>,
}

/// Result of [`ModelFile::verify`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verified {
    /// Tensors whose hash was right.
    pub tensors: usize,
    /// Bytes hashed.
    pub bytes: u64,
}

/// A tensor of [`ModelFile::view_once`].
#[derive(Debug)]
pub struct TensorOnce<'a> {
    info: &'a TensorInfo,
    bytes: ReadOnce<'a>,
}

impl TensorOnce<'_> {
    /// The tensor.
    pub fn view(&self) -> TensorView<'_> {
        view(self.info, &self.bytes)
    }
}

fn view<'a>(info: &TensorInfo, bytes: &'a [u8]) -> TensorView<'a> {
    let (n, k) = info.shape();
    let view = TensorView::new(n as usize, k as usize, info.scheme, bytes);
    view.expect("read() checked that the planes fill the tensor's length")
}

#[derive(Debug)]
struct Header {
    fixed: Fixed,
    spec: ModelSpec,
    generation: Generation,
    provenance: serde_json::Value,
    sections: Vec<Section>,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
    /// End of the last tensor: of the file, but for a draft model.
    end: u64,
}

impl ModelFile {
    /// Maps and checks a file. Allocates for the parsed header, and a flag per column to check an order.
    pub fn open(path: &Path) -> Result<ModelFile, FormatError> {
        let map = Mapped::open(path).map_err(|source| FormatError::Io { path: path.into(), source })?;
        let header = Header::parse(&map)?;
        let draft = if header.fixed.required & DRAFT == 0 {
            None
        } else {
            let map = map.rest(header.end as usize);
            let map = map.map_err(|source| FormatError::Io { path: path.into(), source })?;
            let header = Header::parse(&map)?;
            Some(Arc::new(ModelFile { map, header, draft: None }))
        };
        Ok(ModelFile { map, header, draft })
    }

    /// The small model that the file has besides, to write ahead of this one.
    pub fn draft(&self) -> Option<&Arc<ModelFile>> {
        self.draft.as_ref()
    }

    /// The bytes of this model: all of the file, but for a draft model.
    pub(super) fn own(&self) -> &[u8] {
        &self.map[..self.header.end as usize]
    }

    /// Checks bytes as [`open`](Self::open) does, without a file: for tests and fuzzing.
    pub fn check(bytes: &[u8]) -> Result<(), FormatError> {
        Header::parse(bytes).map(drop)
    }

    /// The model as data.
    pub fn spec(&self) -> &ModelSpec {
        &self.header.spec
    }

    /// Recommended sampling and special tokens.
    pub fn generation(&self) -> &Generation {
        &self.header.generation
    }

    /// Where the file came from.
    pub fn provenance(&self) -> &serde_json::Value {
        &self.header.provenance
    }

    /// tokenizer.json, if the source had one.
    pub fn tokenizer_json(&self) -> Option<&[u8]> {
        self.section(SectionKind::Tokenizer)
    }

    /// The chat template's text, if the source had one.
    pub fn chat_template(&self) -> Option<&str> {
        let bytes = self.section(SectionKind::ChatTemplate)?;
        Some(std::str::from_utf8(bytes).expect("parse() checked that the template is UTF-8"))
    }

    /// Every tensor, in file order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.header.tensors
    }

    /// Length of the file, bytes, without a draft model in it.
    pub fn file_len(&self) -> u64 {
        self.header.end
    }

    /// Hash of the header, and so of the model: the header holds a hash of every tensor.
    pub fn identity(&self) -> u64 {
        self.header.fixed.header_hash
    }

    /// Length of the header, bytes.
    pub fn header_len(&self) -> u64 {
        self.header.fixed.header_len
    }

    /// A tensor by name. Every tensor of [`ModelSpec::tensors`] is there.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        Some(self.view(self.index(name)?))
    }

    /// Index of a tensor in [`tensors`](Self::tensors).
    pub fn index(&self, name: &str) -> Option<usize> {
        self.header.by_name.get(name).copied()
    }

    /// A tensor by its index: cheap enough to be asked at every use.
    pub fn view(&self, index: usize) -> TensorView<'_> {
        let info = &self.header.tensors[index];
        view(info, &self.map[info.offset as usize..(info.offset + info.len) as usize])
    }

    /// A tensor that is read once, for a device that has its copy in the same memory: when the value goes away, the
    /// system is told that the file's pages are not needed. They are read from the file again if they are, after all.
    pub fn view_once(&self, index: usize) -> io::Result<TensorOnce<'_>> {
        let info = &self.header.tensors[index];
        Ok(TensorOnce { info, bytes: self.map.read_once(info.offset as usize, info.len as usize)? })
    }

    /// Hashes every tensor. The first difference is an error that names the tensor.
    pub fn verify(&self) -> Result<Verified, FormatError> {
        let mut bytes = self.header.fixed.header_len;
        for info in &self.header.tensors {
            let owned = &self.map[info.offset as usize..(info.offset + info.owned()) as usize];
            let got = xxh3_64(owned);
            if got != info.hash {
                return Err(FormatError::Hash { what: format!("tensor {}", info.name), expected: info.hash, got });
            }
            bytes += info.owned();
        }
        let mut verified = Verified { tensors: self.header.tensors.len(), bytes };
        if let Some(draft) = &self.draft {
            let of = |error| FormatError::Draft { source: Box::new(error) };
            let draft = draft.verify().map_err(of)?;
            verified.tensors += draft.tensors;
            verified.bytes += draft.bytes;
        }
        Ok(verified)
    }

    fn section(&self, kind: SectionKind) -> Option<&[u8]> {
        let s = self.header.sections.iter().find(|s| s.kind == kind)?;
        Some(&self.map[s.offset as usize..(s.offset + s.len) as usize])
    }
}

impl Header {
    fn parse(bytes: &[u8]) -> Result<Header, FormatError> {
        let fixed = Fixed::read(bytes)?;
        let header = &bytes[..fixed.header_len as usize];
        let got = header_hash(header);
        if got != fixed.header_hash {
            return Err(FormatError::Hash { what: "the header".into(), expected: fixed.header_hash, got });
        }
        let (sections, used) = read_sections(header, fixed.sections)?;
        let part = |kind: SectionKind| {
            let s = sections.iter().find(|s| s.kind == kind);
            s.map(|s| &header[s.offset as usize..(s.offset + s.len) as usize])
        };
        let need = |kind: SectionKind| part(kind).ok_or_else(|| FormatError::field("sections", kind.name(), "none"));
        let json = |section, source| FormatError::Json { section, source };
        let spec: ModelSpec = serde_json::from_slice(need(SectionKind::Spec)?).map_err(|e| json("model spec", e))?;
        spec.check()?;
        let generation =
            serde_json::from_slice(need(SectionKind::Generation)?).map_err(|e| json("generation defaults", e))?;
        let provenance = serde_json::from_slice(need(SectionKind::Provenance)?).map_err(|e| json("provenance", e))?;
        if part(SectionKind::ChatTemplate).is_some_and(|t| std::str::from_utf8(t).is_err()) {
            return Err(FormatError::field("chat template", "UTF-8", "other bytes"));
        }
        let tensors = read_tensors(need(SectionKind::Tensors)?, fixed.tensors)?;
        if header[used..].iter().any(|&b| b != 0) {
            return Err(FormatError::field("bytes after the last section", "zeros", "other bytes"));
        }
        let end = check_cover(&tensors, fixed)?;
        if fixed.required & DRAFT != 0 {
            let of = |error| FormatError::Draft { source: Box::new(error) };
            Header::parse_draft(&bytes[end as usize..]).map_err(of)?;
        }
        let mut by_name = HashMap::with_capacity(tensors.len());
        for (i, t) in tensors.iter().enumerate() {
            if by_name.insert(t.name.clone(), i).is_some() {
                return Err(FormatError::field("tensor names", "each once", format!("{} twice", t.name)));
            }
        }
        for need in spec.tensors() {
            let info = by_name.get(&need.name).map(|&i| &tensors[i]);
            let got = info.map_or("no such tensor".to_string(), |t| format!("{:?}", t.dims));
            if info.is_none_or(|t| t.dims != need.dims) {
                return Err(FormatError::Tensor {
                    tensor: need.name,
                    field: "shape",
                    expected: format!("{:?}", need.dims),
                    got,
                });
            }
            let info = info.expect("tested above");
            if (info.scheme == Scheme::Order) != need.order {
                let expected = if need.order { "order" } else { "weights" }.into();
                let got = info.scheme.to_string();
                return Err(FormatError::Tensor { tensor: need.name, field: "scheme", expected, got });
            }
            if need.order {
                check_order(info, &bytes[info.offset as usize..][..info.len as usize])?;
            }
        }
        if let Some(head) = spec.draft_head.as_ref().filter(|head| head.mapped) {
            let info = &tensors[by_name["tokens"]];
            check_tokens(info, &bytes[info.offset as usize..][..info.len as usize], head.model_vocab)?;
        }
        Ok(Header { fixed, spec, generation, provenance, sections, tensors, by_name, end })
    }

    /// The header of a draft model, which has none of its own.
    fn parse_draft(bytes: &[u8]) -> Result<Header, FormatError> {
        if Fixed::read(bytes)?.required & DRAFT != 0 {
            return Err(FormatError::field("draft models of a draft model", 0, 1));
        }
        Header::parse(bytes)
    }
}

/// An order must be a permutation: the runtime takes columns by it.
fn check_order(info: &TensorInfo, bytes: &[u8]) -> Result<(), FormatError> {
    let mut seen = vec![false; bytes.len() / 4];
    for (i, b) in bytes.chunks_exact(4).enumerate() {
        let column = u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        let new = seen.get_mut(column as usize).is_some_and(|s| !std::mem::replace(s, true));
        if !new {
            return Err(FormatError::Tensor {
                tensor: info.name.clone(),
                field: "elements",
                expected: format!("every number below {} once", bytes.len() / 4),
                got: format!("{column} at {i}"),
            });
        }
    }
    Ok(())
}

/// A head's tokens, `[vocab]`, must be of the model's `known`: the runtime takes logits by them.
fn check_tokens(info: &TensorInfo, bytes: &[u8], known: usize) -> Result<(), FormatError> {
    let tokens = view(info, bytes);
    let is_token = |t: f32| t >= 0.0 && t < known as f32 && t.fract() == 0.0;
    match (0..tokens.k).map(|i| tokens.at(0, i)).enumerate().find(|&(_, t)| !is_token(t)) {
        None => Ok(()),
        Some((i, token)) => Err(FormatError::Tensor {
            tensor: info.name.clone(),
            field: "elements",
            expected: format!("whole numbers below {known}, the model's tokens"),
            got: format!("{token} at {i}"),
        }),
    }
}

/// xxh3-64 of a header with its own hash field taken as zero.
pub(super) fn header_hash(header: &[u8]) -> u64 {
    let mut hash = Xxh3::new();
    hash.update(&header[..FIXED_LEN - 8]);
    hash.update(&[0; 8]);
    hash.update(&header[FIXED_LEN..]);
    hash.digest()
}

/// Reads the section table; sections must follow it without gaps, each kind at most once.
fn read_sections(header: &[u8], count: u32) -> Result<(Vec<Section>, usize), FormatError> {
    if count as usize > SectionKind::ALL.len() {
        return Err(FormatError::field("number of sections", "at most 6", count));
    }
    let table_end = FIXED_LEN + count as usize * SECTION_LEN;
    let table = header.get(FIXED_LEN..table_end).ok_or(FormatError::Short {
        what: "the section table",
        expected: table_end as u64,
        got: header.len() as u64,
    })?;
    let mut at = table_end as u64;
    let mut sections: Vec<Section> = Vec::with_capacity(count as usize);
    for record in table.chunks_exact(SECTION_LEN) {
        let s = Section::read(record)?;
        if sections.iter().any(|o| o.kind == s.kind) {
            return Err(FormatError::field("sections", "each once", format!("{} twice", s.kind.name())));
        }
        if s.offset != at {
            return Err(FormatError::field("section offset", at, s.offset));
        }
        at = at.checked_add(s.len).filter(|&end| end <= header.len() as u64).ok_or(FormatError::Short {
            what: s.kind.name(),
            expected: s.len,
            got: header.len() as u64 - at,
        })?;
        sections.push(s);
    }
    Ok((sections, at as usize))
}

fn read_tensors(mut table: &[u8], count: u32) -> Result<Vec<TensorInfo>, FormatError> {
    // A record has at least 49 bytes, so a hostile count cannot make us allocate more than the file has.
    if count as usize > table.len() / 49 {
        return Err(FormatError::Short {
            what: "the tensor table",
            expected: count as u64 * 49,
            got: table.len() as u64,
        });
    }
    let mut tensors = Vec::with_capacity(count as usize);
    for _ in 0..count {
        tensors.push(TensorInfo::read(&mut table)?);
    }
    if !table.is_empty() {
        return Err(FormatError::field("bytes after the last tensor record", 0, table.len()));
    }
    Ok(tensors)
}

/// Tensors must follow the header and each other page by page and end with the file, or where a draft model begins.
/// Returns the end.
fn check_cover(tensors: &[TensorInfo], fixed: Fixed) -> Result<u64, FormatError> {
    let mut at = fixed.header_len;
    for t in tensors {
        if t.offset != at {
            return Err(FormatError::Tensor {
                tensor: t.name.clone(),
                field: "offset",
                expected: at.to_string(),
                got: t.offset.to_string(),
            });
        }
        let owned = t.len.checked_next_multiple_of(PAGE);
        at = owned.and_then(|o| at.checked_add(o)).filter(|&end| end <= fixed.file_len).ok_or_else(|| {
            FormatError::Tensor {
                tensor: t.name.clone(),
                field: "length in bytes",
                expected: format!("at most {}", fixed.file_len - at),
                got: t.len.to_string(),
            }
        })?;
    }
    if fixed.required & DRAFT == 0 && at != fixed.file_len {
        return Err(FormatError::field("end of the last tensor", fixed.file_len, at));
    }
    Ok(at)
}
