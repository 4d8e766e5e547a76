//! The `.qrn` reader. Its header is hashed and exact in every length, so an input is mostly repaired first.
//!
//! Input: byte 0 is `mode | patches << 2 | rotate << 5`; then, but for mode 0, `patches` times three bytes (u16
//! place, xor) that change the header after all repairs but before it is hashed; then
//!
//! - mode 0: the file as it is;
//! - mode 1: the header's bytes; its fixed fields and the padding are made right;
//! - mode 2: five sections and the tensor table, divided by bytes ff (which no JSON has): spec, generation
//!   defaults, provenance, chat template, tokenizer. An empty one is left out, `rotate` changes their order.
//!   Offsets, lengths and counts are made right;
//! - mode 3: the same, but the table is made from the spec, with one byte a tensor to choose its scheme.
//!
//! Behind the input the file goes on in zeros up to the length it claims.

use std::fs;

use quern_models::{
    FloatType, ModelFile, ModelSpec, Scheme, TensorInfo, ZeroKind,
    format::{MAGIC, PAGE, VERSION},
};
use xxhash_rust::xxh3::xxh3_64;

use crate::{LONGEST, cut, extended, memory::bounded};

const FIXED: usize = 64;
const SECTION: usize = 24;
const RECORD: usize = 40;

/// One execution.
pub fn run(input: &[u8]) {
    let (head, len) = file(input);
    extended(&head, len, |bytes| {
        // In the provenance a JSON value of two bytes takes 72, and vectors double: up to 131 a byte.
        let checked = bounded("check", head.len(), 4 << 10, 160, || ModelFile::check(bytes));
        match checked {
            Err(e) => assert!(!e.to_string().is_empty()),
            // Files are slow: one in sixteen of those that passed is opened and used.
            Ok(()) if xxh3_64(input).is_multiple_of(16) => open(bytes),
            Ok(()) => {}
        }
    });
}

/// Whether the file made from an input passes: for seeds.
pub fn passes(input: &[u8]) -> bool {
    let (head, len) = file(input);
    extended(&head, len, |bytes| ModelFile::check(bytes).is_ok())
}

/// Uses all that a checked file promises.
fn open(bytes: &[u8]) {
    let path = std::env::temp_dir().join(format!("quern-fuzz-{}", std::process::id()));
    fs::write(&path, bytes).expect("a temporary file can be written");
    let file = ModelFile::open(&path).expect("what was checked can be opened");
    fs::remove_file(&path).expect("it was just written");
    for needed in file.spec().tensors() {
        let view = file.tensor(&needed.name).expect("every tensor of the spec is there");
        let (n, k) = if needed.dims.len() == 2 { (needed.dims[0], needed.dims[1]) } else { (1, needed.dims[0]) };
        assert_eq!((view.n as u64, view.k as u64), (n, k));
        assert_eq!(view.codes.as_ptr() as usize % PAGE as usize, 0);
        // The last element of every plane.
        let _ = view.at(view.n - 1, view.k - 1);
    }
    let mut at = file.header_len();
    for (i, info) in file.tensors().iter().enumerate() {
        assert_eq!((info.offset, file.index(&info.name)), (at, Some(i)));
        let view = file.view(i);
        assert!(view.codes.len() + view.scales.len() + view.zeros.len() <= info.len as usize);
        at += info.owned();
    }
    assert_eq!((at, at), (file.file_len(), bytes.len() as u64));
    let (_, _) = (file.tokenizer_json(), file.chat_template());
    let (_, _, _) = (file.generation(), file.provenance(), file.verify().is_ok());
}

/// Header and length of the file that an input stands for.
fn file(input: &[u8]) -> (Vec<u8>, usize) {
    let mut rest = input;
    let first = cut(&mut rest, 1).first().copied().unwrap_or(0);
    let (mode, patches, rotate) = (first & 3, (first >> 2 & 7) as usize, (first >> 5) as usize);
    if mode == 0 {
        let len = claimed(rest).filter(|&l| l >= rest.len()).unwrap_or(rest.len());
        return (rest.to_vec(), len);
    }
    let patches = cut(&mut rest, 3 * patches);
    let (mut head, len) = if mode == 1 { repaired(rest) } else { framed(rest, rotate, mode == 3) };
    for patch in patches.chunks_exact(3) {
        let at = u16::from_le_bytes([patch[0], patch[1]]) as usize % head.len();
        head[at] ^= patch[2];
    }
    head[56..64].fill(0);
    let hash = xxh3_64(&head);
    head[56..64].copy_from_slice(&hash.to_le_bytes());
    (head, len)
}

/// The file length in a header, if we make files that long.
fn claimed(head: &[u8]) -> Option<usize> {
    let len = u64::from_le_bytes(head.get(40..48)?.try_into().ok()?);
    (len <= LONGEST as u64).then_some(len as usize)
}

fn repaired(bytes: &[u8]) -> (Vec<u8>, usize) {
    let mut head = bytes.to_vec();
    head.resize(head.len().max(FIXED).next_multiple_of(PAGE as usize), 0);
    let len = claimed(&head).filter(|&l| l >= head.len()).unwrap_or(head.len());
    fix(&mut head, len);
    (head, len)
}

/// Makes the fixed fields right that do not need a choice.
fn fix(head: &mut [u8], len: usize) {
    let header_len = head.len() as u64;
    head[0..8].copy_from_slice(&MAGIC);
    head[8..12].copy_from_slice(&VERSION.to_le_bytes());
    head[12..16].copy_from_slice(&(PAGE as u32).to_le_bytes());
    head[16..24].fill(0);
    head[32..40].copy_from_slice(&header_len.to_le_bytes());
    head[40..48].copy_from_slice(&(len as u64).to_le_bytes());
}

fn framed(bytes: &[u8], rotate: usize, derive: bool) -> (Vec<u8>, usize) {
    let mut parts: Vec<&[u8]> = bytes.splitn(6, |&b| b == 0xff).collect();
    parts.resize(6, &[]);
    let mut table = if derive { derived(parts[0], parts[5]) } else { parts[5].to_vec() };
    // Kinds in the order of the parts.
    let kinds = [1u32, 4, 5, 3, 2, 6];
    let there = |i: usize| i == 5 || !parts[i].is_empty();
    let order: Vec<usize> = (0..6).map(|i| (i + rotate) % 6).filter(|&i| there(i)).collect();
    let content: usize = order.iter().map(|&i| if i == 5 { table.len() } else { parts[i].len() }).sum();
    let mut at = FIXED + SECTION * order.len();
    let header_len = (at + content).next_multiple_of(PAGE as usize);
    let (tensors, end) = place(&mut table, header_len as u64);
    let part = |i: usize| if i == 5 { &table[..] } else { parts[i] };

    let mut head = vec![0; FIXED];
    for &i in &order {
        head.extend(kinds[i].to_le_bytes());
        head.extend([0; 4]);
        head.extend((at as u64).to_le_bytes());
        head.extend((part(i).len() as u64).to_le_bytes());
        at += part(i).len();
    }
    order.iter().for_each(|&i| head.extend(part(i)));
    head.resize(header_len, 0);
    let len = if end <= LONGEST as u64 { end as usize } else { LONGEST }.max(header_len);
    fix(&mut head, len);
    head[48..52].copy_from_slice(&(order.len() as u32).to_le_bytes());
    head[52..56].copy_from_slice(&tensors.to_le_bytes());
    (head, len)
}

/// Makes offsets and lengths in a table right; returns the number of records and the end of the last tensor.
fn place(table: &mut [u8], mut at: u64) -> (u32, u64) {
    let mut count = 0;
    let mut rest = table;
    while rest.len() >= RECORD {
        let (name, dims) = (u16::from_le_bytes([rest[0], rest[1]]) as usize, rest[2] as usize % 4);
        let record = RECORD + 8 * dims + name;
        if record > rest.len() {
            break;
        }
        let (this, others) = rest.split_at_mut(record);
        let dim = |i: usize| u64::from_le_bytes(this[RECORD + 8 * i..][..8].try_into().expect("eight bytes"));
        let (n, k) = if dims == 2 { (dim(0), dim(1)) } else { (1, if dims == 0 { 0 } else { dim(0) }) };
        let planes = scheme(this).and_then(|s| s.planes(n, k));
        this[16..24].copy_from_slice(&at.to_le_bytes());
        if let Some(planes) = planes {
            this[24..32].copy_from_slice(&planes.total.to_le_bytes());
            at = planes.total.checked_next_multiple_of(PAGE).and_then(|l| l.checked_add(at)).unwrap_or(u64::MAX);
        }
        count += 1;
        rest = others;
    }
    (count, at)
}

fn scheme(record: &[u8]) -> Option<Scheme> {
    let float = |id: u8| [FloatType::F32, FloatType::F16, FloatType::BF16].get(id as usize).copied();
    let group = u32::from_le_bytes(record[8..12].try_into().expect("four bytes"));
    match record[4] {
        0 => Some(Scheme::Float(float(record[5])?)),
        _ if group == 0 => None,
        _ => {
            let zero = [ZeroKind::Mid, ZeroKind::Code, ZeroKind::Min].get(record[6] as usize).copied()?;
            Some(Scheme::Int { bits: record[5], group, zero, scale: float(record[7])? })
        }
    }
}

/// The table of the tensors that a spec needs.
fn derived(spec: &[u8], choices: &[u8]) -> Vec<u8> {
    let mut table = vec![];
    let Ok(spec) = serde_json::from_slice::<ModelSpec>(spec) else { return table };
    if spec.check().is_err() || spec.layers.len() > 8 {
        return table;
    }
    for (i, needed) in spec.tensors().into_iter().enumerate() {
        let scheme = chosen(if choices.is_empty() { 0 } else { choices[i % choices.len()] });
        let (name, dims, layout) = (needed.name, needed.dims, scheme.layout());
        TensorInfo { name, dims, scheme, layout, offset: 0, len: 0, hash: 0 }.encode(&mut table);
    }
    table
}

fn chosen(byte: u8) -> Scheme {
    let float = |i: u8| [FloatType::F32, FloatType::F16, FloatType::BF16][i as usize % 3];
    if byte < 64 {
        return Scheme::Float(float(byte));
    }
    let zero = [ZeroKind::Mid, ZeroKind::Code, ZeroKind::Min][(byte >> 2) as usize % 3];
    let bits = if byte & 1 == 0 { 4 } else { 8 };
    Scheme::Int { bits, group: 32 << (byte >> 1 & 1), zero, scale: float(byte >> 5) }
}
