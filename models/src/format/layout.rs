//! The header's records: each is written and read in one place, so that they cannot disagree.
//!
//! FORMAT.md specifies every byte; `tests/format.rs` pins them.

use byteorder::{ByteOrder, LittleEndian as LE};

use super::FormatError;
use crate::{FloatType, Layout, Mini, Scheme, ZeroKind};

/// First bytes of every file; the line ends reveal a transfer that changed them.
pub const MAGIC: [u8; 8] = *b"QRN\r\n\x1a\n\0";
/// The only version so far.
pub const VERSION: u32 = 1;
/// Everything that starts on a page starts on a multiple of this.
pub const PAGE: u64 = 4096;
/// Required features this version understands; a file with any other bit is refused.
pub const KNOWN_REQUIRED: u64 = DRAFT;
/// Required feature: behind the last tensor follows another complete file, a small model that writes ahead of this one.
pub const DRAFT: u64 = 1;
/// Bytes of [`Fixed`].
pub const FIXED_LEN: usize = 64;
/// Bytes of one [`Section`].
pub const SECTION_LEN: usize = 24;
/// Longest tensor name.
pub const MAX_NAME: usize = 1024;

/// The first 64 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fixed {
    /// Features without which the file cannot be used.
    pub required: u64,
    /// Features that may be ignored.
    pub optional: u64,
    /// Bytes of the header, padding included; a multiple of [`PAGE`].
    pub header_len: u64,
    /// Bytes of the file.
    pub file_len: u64,
    /// Entries of the section table.
    pub sections: u32,
    /// Entries of the tensor table.
    pub tensors: u32,
    /// xxh3-64 of the header with these eight bytes zero.
    pub header_hash: u64,
}

impl Fixed {
    /// Writes into the first 64 bytes of `out`.
    pub fn encode(&self, out: &mut [u8]) {
        out[0..8].copy_from_slice(&MAGIC);
        LE::write_u32(&mut out[8..12], VERSION);
        LE::write_u32(&mut out[12..16], PAGE as u32);
        LE::write_u64(&mut out[16..24], self.required);
        LE::write_u64(&mut out[24..32], self.optional);
        LE::write_u64(&mut out[32..40], self.header_len);
        LE::write_u64(&mut out[40..48], self.file_len);
        LE::write_u32(&mut out[48..52], self.sections);
        LE::write_u32(&mut out[52..56], self.tensors);
        LE::write_u64(&mut out[56..64], self.header_hash);
    }

    /// Reads the first 64 bytes and checks all that can be checked without the rest.
    pub fn read(bytes: &[u8]) -> Result<Fixed, FormatError> {
        let b = bytes.get(..FIXED_LEN).ok_or(FormatError::Short {
            what: "the fixed header",
            expected: FIXED_LEN as u64,
            got: bytes.len() as u64,
        })?;
        if b[0..8] != MAGIC {
            return Err(FormatError::Magic { got: b[0..8].try_into().unwrap_or_default() });
        }
        let version = LE::read_u32(&b[8..12]);
        if version != VERSION {
            return Err(FormatError::Version { got: version });
        }
        let page = LE::read_u32(&b[12..16]);
        if page as u64 != PAGE {
            return Err(FormatError::field("page size", PAGE, page));
        }
        let fixed = Fixed {
            required: LE::read_u64(&b[16..24]),
            optional: LE::read_u64(&b[24..32]),
            header_len: LE::read_u64(&b[32..40]),
            file_len: LE::read_u64(&b[40..48]),
            sections: LE::read_u32(&b[48..52]),
            tensors: LE::read_u32(&b[52..56]),
            header_hash: LE::read_u64(&b[56..64]),
        };
        let unknown = fixed.required & !KNOWN_REQUIRED;
        if unknown != 0 {
            return Err(FormatError::Feature { bits: unknown });
        }
        if fixed.file_len != bytes.len() as u64 {
            return Err(FormatError::Length { expected: fixed.file_len, got: bytes.len() as u64 });
        }
        if !fixed.header_len.is_multiple_of(PAGE) || fixed.header_len == 0 || fixed.header_len > fixed.file_len {
            let expected = format!("a multiple of {PAGE} up to the file's {}", fixed.file_len);
            return Err(FormatError::field("header length", expected, fixed.header_len));
        }
        Ok(fixed)
    }
}

/// What a section holds. The numbers are the file's section ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
pub enum SectionKind {
    /// [`crate::spec::ModelSpec`] as JSON.
    Spec = 1,
    /// tokenizer.json of the `tokenizers` library.
    Tokenizer = 2,
    /// Chat template, Jinja text.
    ChatTemplate = 3,
    /// [`crate::spec::Generation`] as JSON.
    Generation = 4,
    /// Where the file came from, JSON.
    Provenance = 5,
    /// The tensor table.
    Tensors = 6,
}

impl SectionKind {
    /// All kinds, in file order.
    pub const ALL: [SectionKind; 6] = [
        SectionKind::Spec,
        SectionKind::Tokenizer,
        SectionKind::ChatTemplate,
        SectionKind::Generation,
        SectionKind::Provenance,
        SectionKind::Tensors,
    ];

    /// Name for messages.
    pub fn name(self) -> &'static str {
        match self {
            SectionKind::Spec => "spec",
            SectionKind::Tokenizer => "tokenizer",
            SectionKind::ChatTemplate => "chat template",
            SectionKind::Generation => "generation defaults",
            SectionKind::Provenance => "provenance",
            SectionKind::Tensors => "tensor table",
        }
    }
}

/// One entry of the section table. Sections follow the table without gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Section {
    /// What it holds.
    pub kind: SectionKind,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

impl Section {
    /// Appends 24 bytes.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&(self.kind as u32).to_le_bytes());
        out.extend_from_slice(&0u32.to_le_bytes());
        out.extend_from_slice(&self.offset.to_le_bytes());
        out.extend_from_slice(&self.len.to_le_bytes());
    }

    /// Reads 24 bytes.
    pub fn read(b: &[u8]) -> Result<Section, FormatError> {
        let id = LE::read_u32(&b[0..4]);
        let kind = SectionKind::ALL.into_iter().find(|k| *k as u32 == id);
        let kind = kind.ok_or_else(|| FormatError::field("section kind", "1 to 6", id))?;
        let reserved = LE::read_u32(&b[4..8]);
        if reserved != 0 {
            return Err(FormatError::field("section's reserved field", 0, reserved));
        }
        Ok(Section { kind, offset: LE::read_u64(&b[8..16]), len: LE::read_u64(&b[16..24]) })
    }
}

/// One entry of the tensor table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name; see [`crate::spec`].
    pub name: String,
    /// `[n, k]`, or `[n]` for a vector.
    pub dims: Vec<u64>,
    /// What the numbers are.
    pub scheme: Scheme,
    /// How they lie.
    pub layout: Layout,
    /// First byte, from the start of the file; a multiple of [`PAGE`].
    pub offset: u64,
    /// Bytes of the planes. The tensor owns the zero bytes up to the next page as well.
    pub len: u64,
    /// xxh3-64 of the owned bytes, padding included.
    pub hash: u64,
}

impl TensorInfo {
    /// `(n, k)`; a vector is one row.
    pub fn shape(&self) -> (u64, u64) {
        match self.dims[..] {
            [n, k] => (n, k),
            [n] => (1, n),
            _ => unreachable!("dims has one or two entries: read() and the writer check it"),
        }
    }

    /// Bytes owned: the planes and the padding to the next page.
    pub fn owned(&self) -> u64 {
        self.len.next_multiple_of(PAGE)
    }

    /// Appends the record.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let (kind, code, zero, scale, group) = match self.scheme {
            Scheme::Float(t) => (0, float_id(t), 0, 0, 0),
            Scheme::Int { bits, group, zero, scale } => (1, bits, zero_id(zero), float_id(scale), group),
            Scheme::Nested { bits, group, zero } => (2, bits, zero_id(zero), 0, group),
            Scheme::Mini { kind, group, scale } => (3, mini_id(kind), 0, float_id(scale), group),
            Scheme::Order => (4, 0, 0, 0, 0),
        };
        out.extend_from_slice(&(self.name.len() as u16).to_le_bytes());
        out.extend_from_slice(&[self.dims.len() as u8, self.layout as u8, kind, code, zero, scale]);
        out.extend_from_slice(&group.to_le_bytes());
        out.extend_from_slice(&0u32.to_le_bytes());
        for v in [self.offset, self.len, self.hash].iter().chain(&self.dims) {
            out.extend_from_slice(&v.to_le_bytes());
        }
        out.extend_from_slice(self.name.as_bytes());
    }

    /// Reads the record at the front of `table` and moves `table` past it.
    pub fn read(table: &mut &[u8]) -> Result<TensorInfo, FormatError> {
        let fixed = take(table, 40)?;
        let name_len = LE::read_u16(&fixed[0..2]) as usize;
        let (ndim, layout, kind, code, zero, scale) = (fixed[2], fixed[3], fixed[4], fixed[5], fixed[6], fixed[7]);
        let group = LE::read_u32(&fixed[8..12]);
        let reserved = LE::read_u32(&fixed[12..16]);
        let (offset, len, hash) =
            (LE::read_u64(&fixed[16..24]), LE::read_u64(&fixed[24..32]), LE::read_u64(&fixed[32..40]));
        if !(1..=2).contains(&ndim) {
            return Err(FormatError::field("number of dimensions", "1 or 2", ndim));
        }
        if name_len == 0 || name_len > MAX_NAME {
            return Err(FormatError::field("length of a tensor name", format!("1 to {MAX_NAME}"), name_len));
        }
        let dims = take(table, 8 * ndim as usize)?.chunks_exact(8).map(LE::read_u64).collect::<Vec<_>>();
        let name = std::str::from_utf8(take(table, name_len)?)
            .map_err(|_| FormatError::field("tensor name", "UTF-8", "other bytes"))?
            .to_string();
        if name.chars().any(char::is_control) {
            return Err(FormatError::field("tensor name", "no control characters", name.escape_debug()));
        }
        let bad = |field: &'static str, expected: &str, got: u64| FormatError::Tensor {
            tensor: name.clone(),
            field,
            expected: expected.to_string(),
            got: got.to_string(),
        };
        if reserved != 0 {
            return Err(bad("reserved field", "0", reserved as u64));
        }
        if dims.contains(&0) {
            return Err(bad("dimension", "at least 1", 0));
        }
        let float = |field, id: u8| float_of(id).ok_or_else(|| bad(field, "0 (f32), 1 (f16) or 2 (bf16)", id as u64));
        let unused = |fields: &[(&'static str, u64)]| match fields.iter().find(|f| f.1 != 0) {
            Some(&(field, got)) => Err(bad(field, "0, this scheme has none", got)),
            None => Ok(()),
        };
        let bits = || if code == 4 || code == 8 { Ok(code) } else { Err(bad("bits", "4 or 8", code as u64)) };
        let columns = || {
            let right = group > 0 && group % 16 == 0;
            if right { Ok(group) } else { Err(bad("group", "a multiple of 16", group as u64)) }
        };
        let zeros = |kinds: &'static [ZeroKind], expected| {
            let found = kinds.iter().find(|&&k| zero_id(k) == zero);
            found.copied().ok_or_else(|| bad("zero kind", expected, zero as u64))
        };
        let (no_zero, no_scale, no_group) =
            (("zero kind", zero as u64), ("scale type", scale as u64), ("group", group as u64));
        let scheme = match kind {
            0 => {
                unused(&[no_zero, no_scale, no_group])?;
                Scheme::Float(float("element type", code)?)
            }
            1 => Scheme::Int {
                bits: bits()?,
                group: columns()?,
                zero: zeros(&[ZeroKind::Mid, ZeroKind::Code, ZeroKind::Min], "0, 1 or 2")?,
                scale: float("scale type", scale)?,
            },
            2 => {
                unused(&[no_scale])?;
                if group != 16 && group != 32 {
                    return Err(bad("group", "16 or 32", group as u64));
                }
                let zero = zeros(&[ZeroKind::Mid, ZeroKind::Min], "0 or 2")?;
                Scheme::Nested { bits: bits()?, group, zero }
            }
            3 => {
                unused(&[no_zero])?;
                let found = [Mini::E2M1, Mini::E4M3].into_iter().find(|&k| mini_id(k) == code);
                let kind = found.ok_or_else(|| bad("small float type", "0 (e2m1) or 1 (e4m3)", code as u64))?;
                Scheme::Mini { kind, group: columns()?, scale: float("scale type", scale)? }
            }
            4 => {
                unused(&[("element type", code as u64), no_zero, no_scale, no_group])?;
                if ndim != 1 {
                    return Err(bad("dimensions of an order", "1", ndim as u64));
                }
                Scheme::Order
            }
            _ => {
                return Err(bad(
                    "scheme",
                    "0 (float), 1 (integer), 2 (nested), 3 (small float) or 4 (order)",
                    kind as u64,
                ));
            }
        };
        if layout != scheme.layout() as u8 {
            return Err(bad("layout", &(scheme.layout() as u8).to_string(), layout as u64));
        }
        let info = TensorInfo { name: name.clone(), dims, scheme, layout: scheme.layout(), offset, len, hash };
        let (n, k) = info.shape();
        let planes = scheme.planes(n, k).ok_or_else(|| bad("shape", "a size below 2^64 bytes", n))?;
        if planes.total != len {
            return Err(bad("length in bytes", &planes.total.to_string(), len));
        }
        Ok(info)
    }
}

fn take<'a>(table: &mut &'a [u8], len: usize) -> Result<&'a [u8], FormatError> {
    let short = FormatError::Short { what: "the tensor table", expected: len as u64, got: table.len() as u64 };
    let (head, rest) = table.split_at_checked(len).ok_or(short)?;
    *table = rest;
    Ok(head)
}

fn zero_id(zero: ZeroKind) -> u8 {
    match zero {
        ZeroKind::Mid => 0,
        ZeroKind::Code => 1,
        ZeroKind::Min => 2,
    }
}

fn mini_id(kind: Mini) -> u8 {
    match kind {
        Mini::E2M1 => 0,
        Mini::E4M3 => 1,
    }
}

fn float_id(t: FloatType) -> u8 {
    match t {
        FloatType::F32 => 0,
        FloatType::F16 => 1,
        FloatType::BF16 => 2,
    }
}

fn float_of(id: u8) -> Option<FloatType> {
    [FloatType::F32, FloatType::F16, FloatType::BF16].get(id as usize).copied()
}
