//! Checkpoints made by the tests: a one-layer llama of any quantization, written as safetensors.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
};

use half::{bf16, f16};
use quern_convert::{ConvertError, Options, Report, convert};
use quern_models::{FloatType, ModelFile};
use serde_json::{Value, json};

/// Sizes of the model: hidden, inner, vocabulary.
pub const HIDDEN: usize = 64;
pub const INNER: usize = 96;
pub const VOCAB: usize = 70;

/// Linears of the layer: our name, source name, `[n, k]`.
pub const LINEARS: [(&str, &str, usize, usize); 7] = [
    ("layers.0.q", "model.layers.0.self_attn.q_proj", HIDDEN, HIDDEN),
    ("layers.0.k", "model.layers.0.self_attn.k_proj", 32, HIDDEN),
    ("layers.0.v", "model.layers.0.self_attn.v_proj", 32, HIDDEN),
    ("layers.0.o", "model.layers.0.self_attn.o_proj", HIDDEN, HIDDEN),
    ("layers.0.gate", "model.layers.0.mlp.gate_proj", INNER, HIDDEN),
    ("layers.0.up", "model.layers.0.mlp.up_proj", INNER, HIDDEN),
    ("layers.0.down", "model.layers.0.mlp.down_proj", HIDDEN, INNER),
];

/// Tensors to be written: dtype, shape, bytes.
pub type Tensors = BTreeMap<String, (&'static str, Vec<usize>, Vec<u8>)>;

/// A directory that goes away with the test.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Scratch {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("quern-convert-{}-{count}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(dir.join("model")).unwrap();
        Scratch(dir)
    }

    pub fn model(&self) -> PathBuf {
        self.0.join("model")
    }

    pub fn out(&self) -> PathBuf {
        self.0.join("out.qrn")
    }

    /// Converts the model; nothing must be left behind by a failure.
    pub fn convert(&self, options: &Options) -> Result<(Report, ModelFile), ConvertError> {
        self.convert_from(&self.model(), options)
    }

    pub fn convert_from(&self, source: &Path, options: &Options) -> Result<(Report, ModelFile), ConvertError> {
        let result = convert(source, &self.out(), options, &mut ());
        let files = fs::read_dir(&self.0).unwrap().filter(|e| e.as_ref().unwrap().path().is_file()).count();
        assert_eq!(files, result.is_ok() as usize, "files beside the model after {:?}", result.as_ref().err());
        let report = result?;
        let file = ModelFile::open(&report.path).unwrap();
        file.verify().unwrap();
        Ok((report, file))
    }

    pub fn fails(&self, expected: &str) {
        let text = self.convert(&Options::default()).expect_err("must fail").to_string();
        assert!(text.contains(expected), "expected {expected:?} in: {text}");
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// xorshift64*: the same numbers on every machine.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed * 2 + 1)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % n
    }

    /// In -1..1, on a grid that f16 and bf16 hold exactly.
    pub fn weight(&mut self) -> f32 {
        (self.below(255) as f32 - 127.0) / 128.0
    }
}

pub fn config() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 1, "vocab_size": VOCAB,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 128, "rope_theta": 10000.0,
        "tie_word_embeddings": false, "bos_token_id": 1, "eos_token_id": [2, 3],
    })
}

pub fn floats(kind: FloatType, values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![];
    values.iter().for_each(|&x| kind.push(x, &mut bytes));
    bytes
}

pub fn name_of(kind: FloatType) -> &'static str {
    match kind {
        FloatType::F32 => "F32",
        FloatType::F16 => "F16",
        FloatType::BF16 => "BF16",
    }
}

/// Everything but the linears, in bf16.
pub fn around(random: &mut Random) -> Tensors {
    let mut tensors = Tensors::new();
    let mut put = |name: &str, shape: &[usize]| {
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| random.weight()).collect();
        tensors.insert(name.into(), ("BF16", shape.into(), floats(FloatType::BF16, &values)));
    };
    put("model.embed_tokens.weight", &[VOCAB, HIDDEN]);
    put("lm_head.weight", &[VOCAB, HIDDEN]);
    put("model.norm.weight", &[HIDDEN]);
    put("model.layers.0.input_layernorm.weight", &[HIDDEN]);
    put("model.layers.0.post_attention_layernorm.weight", &[HIDDEN]);
    tensors
}

/// A whole float model of one type.
pub fn float_model(random: &mut Random, kind: FloatType) -> Tensors {
    let mut tensors = around(random);
    for (_, module, n, k) in LINEARS {
        let values: Vec<f32> = (0..n * k).map(|_| random.weight()).collect();
        tensors.insert(format!("{module}.weight"), (name_of(kind), vec![n, k], floats(kind, &values)));
    }
    tensors
}

/// Integers as a quantizer chose them, before any packing.
#[derive(Clone)]
pub struct Chosen {
    pub n: usize,
    pub k: usize,
    pub bits: usize,
    pub group: usize,
    /// Group of each column.
    pub index: Vec<u32>,
    /// `[n][k]`.
    pub codes: Vec<u32>,
    /// `[groups][n]`.
    pub zeros: Vec<u32>,
    /// `[groups][n]`.
    pub scales: Vec<f32>,
}

impl Chosen {
    /// Random codes and scales of both signs; zeros all over the range unless `sym`.
    pub fn new(random: &mut Random, n: usize, k: usize, bits: usize, group: usize, sym: bool) -> Chosen {
        let groups = k.div_ceil(group);
        let mid = 1 << (bits - 1);
        Chosen {
            n,
            k,
            bits,
            group,
            index: (0..k).map(|col| (col / group) as u32).collect(),
            codes: (0..n * k).map(|_| random.below(1 << bits) as u32).collect(),
            zeros: (0..groups * n).map(|_| if sym { mid } else { random.below(1 << bits) as u32 }).collect(),
            scales: (0..groups * n).map(|_| random.weight() / 64.0).collect(),
        }
    }

    /// Assigns the columns to groups.
    pub fn ordered(mut self, index: &[u32]) -> Chosen {
        self.index = index.to_vec();
        self
    }

    pub fn at(&self, row: usize, col: usize) -> f32 {
        let cell = self.index[col] as usize * self.n + row;
        self.scales[cell] * (self.codes[row * self.k + col] as f32 - self.zeros[cell] as f32)
    }

    /// LSB-first bitstreams: `fields[line][i]`, one line per row of words.
    fn stream(&self, lines: usize, len: usize, field: impl Fn(usize, usize) -> u32) -> Vec<Vec<u32>> {
        let line = |l| {
            let mut words = vec![0u32; (len * self.bits).div_ceil(32)];
            for i in 0..len {
                let bit = i * self.bits;
                words[bit / 32] |= field(l, i) << (bit % 32);
                if bit % 32 + self.bits > 32 {
                    words[bit / 32 + 1] |= field(l, i) >> (32 - bit % 32);
                }
            }
            words
        };
        (0..lines).map(line).collect()
    }

    /// Adds the GPTQ tensors of `module`. `v1` stores zeros as GPTQModel does: whole words minus 0x1...1.
    pub fn gptq(&self, tensors: &mut Tensors, module: &str, v1: bool, scale: FloatType) {
        let groups = self.k.div_ceil(self.group);
        let columns = self.stream(self.n, self.k, |row, col| self.codes[row * self.k + col]);
        let rows = columns[0].len();
        let qweight = (0..rows).flat_map(|r| columns.iter().map(move |c| c[r])).collect::<Vec<_>>();
        put_words(tensors, module, "qweight", [rows, self.n], &qweight);
        // Three bits cross words, so they are subtracted field by field.
        let less = if v1 && self.bits == 3 { 7 } else { 0 };
        let lines = self.stream(groups, self.n, |g, row| (self.zeros[g * self.n + row] + less) % (1 << self.bits));
        let ones = [0, 0, 0x5555_5555, 0, 0x1111_1111, 0, 0, 0, 0x0101_0101u32][self.bits];
        let zeros: Vec<u32> = lines.concat().into_iter().map(|w| if v1 { w.wrapping_sub(ones) } else { w }).collect();
        put_words(tensors, module, "qzeros", [groups, lines[0].len()], &zeros);
        let bytes = self.index.iter().flat_map(|v| v.to_le_bytes()).collect();
        tensors.insert(format!("{module}.g_idx"), ("I32", vec![self.k], bytes));
        self.put_scales(tensors, module, scale);
    }

    /// Adds the AWQ gemm tensors of `module`.
    pub fn awq(&self, tensors: &mut Tensors, module: &str, scale: FloatType) {
        let groups = self.k.div_ceil(self.group);
        // Nibble i of a word is row 8c + ORDER[i].
        const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
        let word = |at: &dyn Fn(usize) -> u32, c: usize| (0..8).fold(0, |w, i| w | at(8 * c + ORDER[i]) << (4 * i));
        let pack = |lines: usize, at: &dyn Fn(usize, usize) -> u32| {
            let line = |l: usize| (0..self.n / 8).map(move |c| word(&|row| at(l, row), c)).collect::<Vec<_>>();
            (0..lines).flat_map(line).collect::<Vec<u32>>()
        };
        let qweight = pack(self.k, &|col, row| self.codes[row * self.k + col]);
        put_words(tensors, module, "qweight", [self.k, self.n / 8], &qweight);
        let qzeros = pack(groups, &|g, row| self.zeros[g * self.n + row]);
        put_words(tensors, module, "qzeros", [groups, self.n / 8], &qzeros);
        self.put_scales(tensors, module, scale);
    }

    /// Adds the AWQ gemv tensors of `module`: words of eight columns, `width` columns of scales and zero-points.
    pub fn gemv(&self, tensors: &mut Tensors, module: &str, width: usize) {
        let groups = self.k.div_ceil(self.group);
        let word = |at: &dyn Fn(usize) -> u32| (0..8).fold(0, |w, i| w | at(i) << (4 * i));
        let qweight: Vec<u32> = (0..self.n)
            .flat_map(|row| (0..self.k / 8).map(move |c| (row, c)))
            .map(|(row, c)| word(&|i| self.codes[row * self.k + 8 * c + i]))
            .collect();
        put_words(tensors, module, "qweight", [self.n, self.k / 8], &qweight);
        let zero = |row: usize, g: usize| if g < groups { self.zeros[g * self.n + row] } else { 0 };
        let qzeros: Vec<u32> = (0..self.n)
            .flat_map(|row| (0..width / 8).map(move |c| (row, c)))
            .map(|(row, c)| word(&|i| zero(row, 8 * c + i)))
            .collect();
        put_words(tensors, module, "qzeros", [self.n, width / 8], &qzeros);
        let scale = |row: usize, g: usize| if g < groups { self.scales[g * self.n + row] } else { 0.0 };
        let scales: Vec<f32> = (0..self.n * width).map(|i| scale(i / width, i % width)).collect();
        let bytes = floats(FloatType::F16, &scales);
        tensors.insert(format!("{module}.scales"), ("F16", vec![self.n, width], bytes));
    }

    /// Adds the AWQ gemv_fast tensors of `module`, as AutoAWQ's `pack_intweight` permutes them; `zero(i)` is the
    /// stored float of cell `i` of `[groups][n]`.
    pub fn fast(&self, tensors: &mut Tensors, module: &str, width: usize, zeros: &str, zero: impl Fn(usize) -> f32) {
        let (n, k) = (self.n, self.k);
        let mut codes = self.codes.clone();
        for block in codes.chunks_exact_mut(32) {
            // reshape(4, 4, 2).transpose(1, 0, 2), then each eight to [0, 2, 4, 6, 1, 3, 5, 7].
            let old = block.to_vec();
            for (a, b, c) in (0..4).flat_map(|a| (0..4).flat_map(move |b| (0..2).map(move |c| (a, b, c)))) {
                block[b * 8 + a * 2 + c] = old[a * 8 + b * 2 + c];
            }
            for eight in block.chunks_exact_mut(8) {
                let old = eight.to_vec();
                (0..8).for_each(|i| eight[i] = old[[0, 2, 4, 6, 1, 3, 5, 7][i]]);
            }
        }
        // Four rows to a line, in blocks of 64 columns; four neighbours to a word.
        let mut words: Vec<u8> = vec![];
        for (line, block) in (0..n / 4).flat_map(|line| (0..k / 64).map(move |block| (line, block))) {
            let four = (0..4).flat_map(|r| codes[(4 * line + r) * k + 64 * block..][..64].iter().copied());
            let four: Vec<u32> = four.collect();
            for nibbles in four.chunks_exact(4) {
                let word = nibbles.iter().enumerate().fold(0u16, |w, (i, &q)| w | (q as u16) << (4 * i));
                words.extend_from_slice(&word.to_le_bytes());
            }
        }
        tensors.insert(format!("{module}.qweight"), ("I16", vec![n / 4, k], words));
        let cells = self.k.div_ceil(self.group) * n;
        let mut put = |part: &str, value: &dyn Fn(usize) -> f32| {
            let values: Vec<f32> = (0..width * n).map(|i| if i < cells { value(i) } else { 0.0 }).collect();
            tensors.insert(format!("{module}.{part}"), ("F16", vec![width, n], floats(FloatType::F16, &values)));
        };
        put("scales", &|i| self.scales[i]);
        put(zeros, &zero);
    }

    fn put_scales(&self, tensors: &mut Tensors, module: &str, kind: FloatType) {
        let shape = vec![self.k.div_ceil(self.group), self.n];
        tensors.insert(format!("{module}.scales"), (name_of(kind), shape, floats(kind, &self.scales)));
    }
}

fn put_words(tensors: &mut Tensors, module: &str, part: &str, shape: [usize; 2], words: &[u32]) {
    let bytes = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    tensors.insert(format!("{module}.{part}"), ("I32", shape.into(), bytes));
}

/// Cuts the zero-points of an `[n, k]` module as AutoGPTQ does: `n / 32 * bits` words of a group.
pub fn cut_zeros(tensors: &mut Tensors, module: &str, n: usize, bits: usize) {
    let (_, shape, bytes) = tensors.get_mut(&format!("{module}.qzeros")).unwrap();
    let (whole, cut) = (shape[1], n / 32 * bits);
    *bytes = bytes.chunks_exact(4 * whole).flat_map(|row| &row[..4 * cut]).copied().collect();
    shape[1] = cut;
}

/// Writes config.json and the tensors as `file` into a model directory.
pub fn write(dir: &Path, config: &Value, tensors: &Tensors, file: &str) {
    fs::write(dir.join("config.json"), serde_json::to_vec(config).unwrap()).unwrap();
    fs::write(dir.join(file), safetensors(tensors)).unwrap();
}

pub fn safetensors(tensors: &Tensors) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut data = vec![];
    for (name, (dtype, shape, bytes)) in tensors {
        let start = data.len();
        data.extend_from_slice(bytes);
        header.insert(name.clone(), json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, data.len()] }));
    }
    let header = serde_json::to_vec(&header).unwrap();
    [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat()
}

/// Values that f16 cannot hold: only bf16's range has them.
pub fn beyond_f16() -> f32 {
    let x = bf16::from_f32(1e-9).to_f32();
    assert_ne!(f16::from_f32(x).to_f32(), x);
    x
}

/// A folder of the repository's fixtures.
pub fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(path)
}
