//! The GGUF reader, and what makes config, tensor names, tokenizer and spec of its metadata.
//!
//! Input: byte 0 modulo 4 is the mode, then
//!
//! - 0: the file as it is;
//! - 1: the file's beginning; zeros follow;
//! - 2: an [`Arbitrary`] list of changes to a tiny model that is right; zeros follow;
//! - 3: the same for a model in two parts: a byte says how many tensors the first has, then come the changes.

use std::sync::LazyLock;

use arbitrary::{Arbitrary, Unstructured};
use quern_convert::{
    import::{Integers, blocks::Blocks},
    pack,
    source::{
        Block, Checkpoint, Dtype, Rows, gguf,
        gguf::{Gguf, Value},
    },
};
use quern_models::{
    family,
    spec::{Rope, RopeScaling},
};

use crate::{cut, extended, memory::bounded};

/// Zeros behind an input.
const TAIL: usize = 1 << 15;

/// One execution.
pub fn run(input: &[u8]) {
    if input.first().is_some_and(|mode| mode % 4 == 3) {
        return in_parts(&input[1..]);
    }
    let (head, len) = file(input);
    // Zeros can be read as empty texts, so they count.
    extended(&head, len, |bytes| match bounded("parse", len, 4 << 10, 16, || gguf::parse(bytes)) {
        Err(e) => assert!(!e.to_string().is_empty()),
        Ok(gguf) => used(&gguf, bytes),
    });
}

/// Two files of a model: joined they are as good as a whole file.
fn in_parts(input: &[u8]) {
    let [first, second] = parts(input);
    let (Ok(a), Ok(b)) = (gguf::parse(&first), gguf::parse(&second)) else { return };
    let count = a.tensors.len() + b.tensors.len();
    match gguf::join(vec![a, b]) {
        Err(e) => assert!(!e.to_string().is_empty()),
        Ok(model) => {
            assert_eq!(model.tensors.len(), count);
            read(&model, first.len() + second.len());
        }
    }
}

/// Whether the file (or the parts) made from an input becomes a model: for seeds.
pub fn passes(input: &[u8]) -> bool {
    if input.first().is_some_and(|mode| mode % 4 == 3) {
        let files = parts(&input[1..]);
        let parsed = files.iter().map(|bytes| gguf::parse(bytes).ok()).collect::<Option<Vec<_>>>();
        return parsed.and_then(|parts| gguf::join(parts).ok()).is_some_and(|model| planned(&model));
    }
    let (head, len) = file(input);
    extended(&head, len, |bytes| {
        gguf::parse(bytes).is_ok_and(|model| planned(&model))
    })
}

fn planned(model: &Gguf) -> bool {
    gguf::checkpoint(model, "m").is_ok_and(|c| family::plan(&c.config, &c).is_ok())
}

fn used(gguf: &Gguf, bytes: &[u8]) {
    let mut ranges = vec![];
    for t in &gguf.tensors {
        let range = t.bytes.as_ptr_range();
        assert!(range.start >= bytes.as_ptr() && range.end <= bytes.as_ptr_range().end && !t.bytes.is_empty());
        ranges.push(range.start as usize..range.end as usize);
    }
    ranges.sort_by_key(|r| r.start);
    assert!(ranges.windows(2).all(|w| w[0].end <= w[1].start), "tensors do not overlap");
    for value in gguf.meta.values() {
        if let Value::Numbers(n) = value {
            assert_eq!(n.iter().count(), n.len());
        }
    }
    read(gguf, bytes.len());
}

/// Makes a checkpoint and a plan of a model that takes `len` bytes.
fn read(gguf: &Gguf, len: usize) {
    // tokenizer.json spells out, twice, a token that takes nine bytes in the file: up to 166 a byte.
    let checkpoint = bounded("checkpoint", len, 64 << 10, 256, || gguf::checkpoint(gguf, "m"));
    let checkpoint = match checkpoint {
        Ok(checkpoint) => checkpoint,
        Err(e) => return assert!(!e.to_string().is_empty()),
    };
    let named = gguf.tensors.iter().filter(|t| t.name != "rope_freqs.weight").count();
    assert_eq!(checkpoint.tensors.len(), named, "no tensor takes the name of another");
    for t in checkpoint.tensors.values() {
        if let Rows::Interleaved { head_dim } = t.rows {
            let rows = t.shape[0] as usize;
            assert!(rows.is_multiple_of(head_dim));
            assert!(t.rows.stored(0) < rows && t.rows.stored(rows - 1) < rows);
        }
    }
    unpacked(&checkpoint);
    if let Some(json) = &checkpoint.tokenizer {
        serde_json::from_slice::<serde::de::IgnoredAny>(json).expect("tokenizer.json is JSON");
    }
    // At most 4096 layers, each with up to 20 rules of two names.
    match bounded("plan", len, 64 << 20, 16, || family::plan(&checkpoint.config, &checkpoint)) {
        Err(e) => assert!(!e.to_string().is_empty()),
        Ok(plan) => plan.spec.check().expect("a planned spec was checked"),
    }
}

/// Every small tensor of blocks can be packed, or has scales that are no numbers.
fn unpacked(checkpoint: &Checkpoint) {
    for (name, t) in &checkpoint.tensors {
        if let (Dtype::Block(block), &[n, k]) = (t.dtype, &t.shape[..])
            && n * k <= 1 << 13
            && let Ok(blocks) = Blocks::new(name, t, block, n as usize, k as usize)
        {
            let planes = blocks.shape().scheme().planes(n, k).expect("the file holds as many elements");
            assert_eq!(pack(&blocks).len() as u64, planes.total);
        }
    }
}

fn file(input: &[u8]) -> (Vec<u8>, usize) {
    let mut rest = input;
    let head = match cut(&mut rest, 1).first().copied().unwrap_or(0) % 4 {
        0 => return (rest.to_vec(), rest.len()),
        1 => rest.to_vec(),
        _ => changed(Model::tiny(), rest),
    };
    let len = head.len() + TAIL;
    (head, len)
}

/// A change to the tiny model.
#[derive(Debug, Arbitrary)]
enum Change<'a> {
    Set(Text<'a>, Data<'a>),
    Remove(u8),
    Tensor { at: u8, name: Text<'a>, dims: Dims, kind: u8, offset: Option<u32> },
    Dims(u8, Dims),
    Kind(u8, u8),
    Offset(u8, u64),
    RemoveTensor(u8),
    Counts(i8, i8),
    Version(u32),
    Arch(u8),
}

#[derive(Debug, Arbitrary)]
enum Text<'a> {
    Known(u8),
    Any(&'a str),
}

#[derive(Debug, Arbitrary)]
enum Dims {
    Vector(u8),
    Small(u8, u8),
    Blocks(u8, u8),
    Any([u64; 2]),
    Many(u8),
}

#[derive(Debug, Arbitrary)]
enum Data<'a> {
    U32(u32),
    Small(u8),
    I32(i32),
    U64(u64),
    F32(f32),
    F64(f64),
    Bool(bool),
    Text(Text<'a>),
    Texts(Vec<Text<'a>>),
    Numbers { kind: u8, bytes: &'a [u8] },
    Raw { kind: u8, bytes: &'a [u8] },
}

/// Keys, values and names that the importer looks for.
const KNOWN: &str = "general.architecture general.alignment general.name general.license split.count \
    split.no split.tensors.count qwen3 smollm3 position_embd.weight blk.0.attn_qkv.weight blk.0.attn_qkv.bias \
    blk.0.attn_q_norm.weight blk.0.attn_k_norm.weight blk.0.attn_norm.bias llama.attention.layer_norm_epsilon \
    llama.rope.scaling.original_context_length llama.rope.scaling.attn_factor llama.rope.scaling.yarn_ext_factor \
    llama.rope.scaling.yarn_log_multiplier llama.rope.scaling.yarn_beta_fast llama.rope.scaling.yarn_beta_slow \
    llama.block_count llama.context_length llama.embedding_length llama.feed_forward_length \
    llama.attention.head_count llama.attention.head_count_kv llama.attention.key_length \
    llama.attention.value_length llama.attention.layer_norm_rms_epsilon llama.attention.sliding_window \
    llama.expert_count llama.rope.dimension_count llama.rope.freq_base llama.rope.scaling.factor \
    llama.rope.scaling.type llama.rope.scale_linear llama.vocab_size tokenizer.ggml.model tokenizer.ggml.pre \
    tokenizer.ggml.tokens tokenizer.ggml.merges tokenizer.ggml.token_type tokenizer.ggml.bos_token_id \
    tokenizer.ggml.eos_token_id tokenizer.ggml.eot_token_id tokenizer.ggml.eom_token_id \
    tokenizer.ggml.padding_token_id tokenizer.ggml.add_bos_token tokenizer.ggml.add_eos_token \
    tokenizer.chat_template llama gpt2 default smollm gpt-2 llama-bpe llama3 llama-v3 qwen2 linear none yarn \
    token_embd.weight output_norm.weight output.weight rope_freqs.weight blk.0.attn_norm.weight \
    blk.0.ffn_norm.weight blk.0.attn_q.weight blk.0.attn_k.weight blk.0.attn_v.weight blk.0.attn_output.weight \
    blk.0.ffn_gate.weight blk.0.ffn_up.weight blk.0.ffn_down.weight blk.0.attn_q.bias blk.0.ffn_gate.bias \
    blk.1.attn_q.weight blk.x blk. blk..attn_q. model.embed_tokens.weight a b ab <|eot_id|> <|im_end|> <|end|> <end_of_turn>";

impl Text<'_> {
    fn get(&self) -> &str {
        match self {
            Text::Known(i) => {
                static WORDS: LazyLock<Vec<&str>> =
                    LazyLock::new(|| KNOWN.split_whitespace().chain(["a b", ""]).collect());
                WORDS[*i as usize % WORDS.len()]
            }
            Text::Any(s) => s,
        }
    }
}

impl Dims {
    fn get(&self) -> Vec<u64> {
        match *self {
            Dims::Vector(n) => vec![n as u64],
            Dims::Small(a, b) => vec![a as u64, b as u64],
            Dims::Blocks(a, b) => vec![32 * (a as u64 % 17), b as u64 % 64],
            Dims::Any([a, b]) => vec![a, b],
            Dims::Many(n) => vec![1; n as usize % 6],
        }
    }
}

impl Data<'_> {
    /// The type and the bytes.
    fn put(&self, out: &mut Vec<u8>) {
        let mut kind = |id: u32, bytes: &[u8]| {
            out.extend(id.to_le_bytes());
            out.extend(bytes);
        };
        match self {
            Data::U32(n) => kind(4, &n.to_le_bytes()),
            Data::Small(n) => kind(4, &(*n as u32).to_le_bytes()),
            Data::I32(n) => kind(5, &n.to_le_bytes()),
            Data::U64(n) => kind(10, &n.to_le_bytes()),
            Data::F32(x) => kind(6, &x.to_le_bytes()),
            Data::F64(x) => kind(12, &x.to_le_bytes()),
            Data::Bool(b) => kind(7, &[*b as u8]),
            Data::Text(t) => kind(8, &text(t.get())),
            Data::Texts(list) => {
                kind(9, &8u32.to_le_bytes());
                out.extend((list.len() as u64).to_le_bytes());
                list.iter().for_each(|t| out.extend(text(t.get())));
            }
            Data::Numbers { kind: id, bytes } => {
                let id = *id as usize % 13;
                let size = [1, 1, 2, 2, 4, 4, 4, 1, 1, 1, 8, 8, 8][id];
                kind(9, &(id as u32).to_le_bytes());
                out.extend(((bytes.len() / size) as u64).to_le_bytes());
                out.extend(&bytes[..bytes.len() / size * size]);
            }
            Data::Raw { kind: id, bytes } => kind(*id as u32, bytes),
        }
    }
}

fn text(s: &str) -> Vec<u8> {
    [&(s.len() as u64).to_le_bytes()[..], s.as_bytes()].concat()
}

/// Metadata, each with its type, and tensors with dimensions in the file's order, type and offset.
#[derive(Default)]
struct Model {
    meta: Vec<(String, Vec<u8>)>,
    tensors: Vec<(String, Vec<u64>, u32, Option<u64>)>,
}

impl Model {
    fn set(&mut self, key: &str, data: Data) {
        let mut bytes = vec![];
        data.put(&mut bytes);
        match self.meta.iter_mut().find(|m| m.0 == key) {
            Some(m) => m.1 = bytes,
            None => self.meta.push((key.into(), bytes)),
        }
    }

    /// One layer, 32 wide, a head of 16 and six tokens.
    fn tiny() -> Model {
        let mut m = Model::default();
        let word = |s| Data::Text(Text::Any(s));
        m.set("general.architecture", word("llama"));
        m.set("general.name", word("tiny"));
        m.set("llama.block_count", Data::U32(1));
        m.set("llama.context_length", Data::U32(64));
        m.set("llama.embedding_length", Data::U32(32));
        m.set("llama.feed_forward_length", Data::U32(32));
        m.set("llama.attention.head_count", Data::U32(2));
        m.set("llama.attention.head_count_kv", Data::U32(1));
        m.set("llama.attention.layer_norm_rms_epsilon", Data::F32(1e-5));
        m.set("llama.rope.freq_base", Data::F32(10000.0));
        m.set("tokenizer.ggml.model", word("gpt2"));
        m.set("tokenizer.ggml.pre", word("llama-bpe"));
        let list = |all: [&'static str; 6]| Data::Texts(all.into_iter().map(Text::Any).collect());
        m.set("tokenizer.ggml.tokens", list(["<s>", "</s>", "a", "b", "ab", "<|im_end|>"]));
        m.set("tokenizer.ggml.merges", Data::Texts(vec![Text::Any("a b"), Text::Any("ab b")]));
        let types = [3, 0, 0, 0, 4, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0];
        m.set("tokenizer.ggml.token_type", Data::Numbers { kind: 5, bytes: &types });
        m.set("tokenizer.ggml.bos_token_id", Data::U32(0));
        m.set("tokenizer.ggml.eos_token_id", Data::U32(1));
        m.set("tokenizer.chat_template", word("{{ messages }}"));
        let mut tensor = |name: &str, dims: &[u64], kind| m.tensors.push((name.into(), dims.into(), kind, None));
        tensor("token_embd.weight", &[32, 6], 8);
        tensor("output_norm.weight", &[32], 0);
        tensor("blk.0.attn_norm.weight", &[32], 0);
        tensor("blk.0.attn_q.weight", &[32, 32], 2);
        tensor("blk.0.attn_k.weight", &[32, 16], 3);
        tensor("blk.0.attn_v.weight", &[32, 16], 8);
        tensor("blk.0.attn_output.weight", &[32, 32], 2);
        tensor("blk.0.ffn_norm.weight", &[32], 0);
        tensor("blk.0.ffn_gate.weight", &[32, 32], 1);
        tensor("blk.0.ffn_up.weight", &[32, 32], 30);
        tensor("blk.0.ffn_down.weight", &[32, 32], 3);
        m
    }

    fn encode(&self, version: u32, counts: (i8, i8)) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(version.to_le_bytes());
        out.extend((self.tensors.len() as u64).wrapping_add_signed(counts.0.into()).to_le_bytes());
        out.extend((self.meta.len() as u64).wrapping_add_signed(counts.1.into()).to_le_bytes());
        for (key, value) in &self.meta {
            out.extend(text(key));
            out.extend(value);
        }
        let mut at = 0u64;
        for (name, dims, kind, offset) in &self.tensors {
            out.extend(text(name));
            out.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend(offset.unwrap_or(at).to_le_bytes());
            let elements = dims.iter().fold(1u64, |n, &d| n.saturating_mul(d));
            let size = match (kind, Block::of(*kind)) {
                (1 | 30, _) => elements.saturating_mul(2),
                (_, Some(block)) => (elements / block.columns() as u64).saturating_mul(block.bytes() as u64),
                _ => elements.saturating_mul(4),
            };
            at = at.saturating_add(size).checked_next_multiple_of(32).unwrap_or(0);
        }
        out
    }
}

/// The tiny model's file, for seeds.
pub fn tiny() -> Vec<u8> {
    Model::tiny().encode(3, (0, 0))
}

/// The same with Llama 3's rope scaling, for seeds: the factors lie first and follow the header.
pub fn llama3() -> Vec<u8> {
    let scaling =
        RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192 };
    let frequencies = |scaling| Rope { theta: 500000.0, scaling }.inv_freq(16);
    let factors = frequencies(RopeScaling::None).into_iter().zip(frequencies(scaling)).map(|(plain, s)| plain / s);
    let mut model = Model::tiny();
    model.set("llama.rope.freq_base", Data::F32(500000.0));
    model.tensors.insert(0, ("rope_freqs.weight".into(), vec![8], 0, None));
    let mut file = model.encode(3, (0, 0));
    file.resize(file.len().next_multiple_of(32), 0);
    factors.for_each(|f| file.extend(f.to_le_bytes()));
    file
}

/// The tiny model 256 wide, with super-blocks: for seeds.
pub fn super_blocks() -> Vec<u8> {
    let mut m = Model::tiny();
    m.set("llama.embedding_length", Data::U32(256));
    m.set("llama.attention.key_length", Data::U32(16));
    m.tensors.clear();
    let mut tensor = |name: &str, dims: &[u64], kind| m.tensors.push((name.into(), dims.into(), kind, None));
    tensor("token_embd.weight", &[256, 6], 14);
    tensor("output_norm.weight", &[256], 1);
    tensor("blk.0.attn_norm.weight", &[256], 1);
    tensor("blk.0.attn_q.weight", &[256, 32], 12);
    tensor("blk.0.attn_k.weight", &[256, 16], 13);
    tensor("blk.0.attn_v.weight", &[256, 16], 10);
    tensor("blk.0.attn_output.weight", &[32, 256], 6);
    tensor("blk.0.ffn_norm.weight", &[256], 0);
    tensor("blk.0.ffn_gate.weight", &[256, 32], 11);
    tensor("blk.0.ffn_up.weight", &[256, 32], 23);
    tensor("blk.0.ffn_down.weight", &[32, 256], 39);
    m.encode(3, (0, 0))
}

/// Two parts of the tiny model: the first byte says how many tensors the first has; then the changes to each.
fn parts(input: &[u8]) -> [Vec<u8>; 2] {
    let mut rest = input;
    let first = cut(&mut rest, 1).first().copied().unwrap_or(4) as usize;
    let half = cut(&mut rest, input.len() / 2);
    let mut parts = [Model::tiny(), Model::default()];
    let all = parts[0].tensors.len();
    parts[1].tensors = parts[0].tensors.split_off(first % (all + 1));
    for (i, part) in parts.iter_mut().enumerate() {
        part.set("split.no", Data::U32(i as u32));
        part.set("split.count", Data::U32(2));
    }
    parts[0].set("split.tensors.count", Data::U32(all as u32));
    let [a, b] = parts;
    [changed(a, half), changed(b, rest)].map(|mut bytes| {
        bytes.resize(bytes.len() + TAIL, 0);
        bytes
    })
}

fn changed(mut model: Model, bytes: &[u8]) -> Vec<u8> {
    let (mut version, mut counts) = (3, (0, 0));
    let mut data = Unstructured::new(bytes);
    for _ in 0..64 {
        if data.is_empty() {
            break;
        }
        let Ok(change) = data.arbitrary::<Change>() else { break };
        let tensors = &mut model.tensors;
        let place = |i: u8, len: usize| i as usize % len.max(1);
        match change {
            Change::Set(key, value) => model.set(key.get(), value),
            Change::Remove(i) if !model.meta.is_empty() => drop(model.meta.remove(place(i, model.meta.len()))),
            Change::Tensor { at, name, dims, kind, offset } => {
                let tensor = (name.get().into(), dims.get(), kind as u32 % 42, offset.map(u64::from));
                tensors.insert(place(at, tensors.len() + 1), tensor);
            }
            Change::RemoveTensor(i) if !tensors.is_empty() => drop(tensors.remove(place(i, tensors.len()))),
            Change::Dims(i, _) | Change::Kind(i, _) | Change::Offset(i, _) if !tensors.is_empty() => {
                let i = place(i, tensors.len());
                match change {
                    Change::Dims(_, dims) => tensors[i].1 = dims.get(),
                    Change::Kind(_, kind) => tensors[i].2 = kind as u32 % 42,
                    Change::Offset(_, at) => tensors[i].3 = Some(at),
                    _ => unreachable!("the outer pattern"),
                }
            }
            Change::Counts(a, b) => counts = (a, b),
            Change::Version(v) => version = v,
            Change::Arch(i) => {
                let arch = ["llama", "qwen2", "qwen3", "smollm3", "gpt2"][i as usize % 5];
                model.set("general.architecture", Data::Text(Text::Any(arch)));
                for (key, _) in &mut model.meta {
                    if let Some(rest) = key.strip_prefix("llama.") {
                        *key = format!("{arch}.{rest}");
                    }
                }
            }
            _ => {}
        }
    }
    model.encode(version, counts)
}
