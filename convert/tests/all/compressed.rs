//! compressed-tensors, FP8 and FP4 checkpoints made here: what comes out must be exactly what went in.

use quern_convert::{ConvertError, Options, Progress, Quant, Report, Step};
use quern_models::{FloatType, Mini, ModelFile, Scheme, ZeroKind};
use serde_json::{Value, json};

use crate::{made::*, synthetic::check};

/// Where zero-points are.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Zeros {
    None,
    Packed,
    Bytes,
}

/// Codes of `bits` bits in words, LSB first; `whole` does not let a code straddle two.
fn words(codes: &[u32], bits: usize, whole: bool) -> Vec<u32> {
    let at = |i: usize| if whole { (i / (32 / bits), i % (32 / bits) * bits) } else { (i * bits / 32, i * bits % 32) };
    let mut words = vec![0u32; at(codes.len() - 1).0 + 2];
    for (i, &code) in codes.iter().enumerate() {
        let (word, shift) = at(i);
        words[word] |= code << shift;
        words[word + 1] |= ((code as u64) << shift >> 32) as u32;
    }
    words.truncate(if whole { codes.len().div_ceil(32 / bits) } else { (codes.len() * bits).div_ceil(32) });
    words
}

fn put(tensors: &mut Tensors, name: String, kind: &'static str, shape: &[usize], bytes: Vec<u8>) {
    tensors.insert(name, (kind, shape.into(), bytes));
}

fn le(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

/// `[G][n]` as `[n][G]`.
fn transposed<T: Copy>(values: &[T], n: usize) -> Vec<T> {
    let groups = values.len() / n;
    (0..n * groups).map(|i| values[i % groups * n + i / groups]).collect()
}

/// Adds the pack-quantized tensors of `module`.
fn packed(c: &Chosen, tensors: &mut Tensors, module: &str, whole: bool, zeros: Zeros, scale: FloatType) {
    let groups = c.k.div_ceil(c.group);
    let name = |part: &str| format!("{module}.{part}");
    let rows: Vec<Vec<u32>> = c.codes.chunks(c.k).map(|row| words(row, c.bits, whole)).collect();
    put(tensors, name("weight_packed"), "I32", &[c.n, rows[0].len()], le(&rows.concat()));
    let shape = [c.n, c.k].iter().flat_map(|&d| (d as i64).to_le_bytes()).collect();
    put(tensors, name("weight_shape"), "I64", &[2], shape);
    let scales = floats(scale, &transposed(&c.scales, c.n));
    put(tensors, name("weight_scale"), name_of(scale), &[c.n, groups], scales);
    match zeros {
        Zeros::None => {}
        Zeros::Packed => {
            let columns: Vec<Vec<u32>> = c.zeros.chunks(c.n).map(|g| words(g, c.bits, whole)).collect();
            let len = columns[0].len();
            let all: Vec<u32> = (0..len).flat_map(|w| columns.iter().map(move |c| c[w])).collect();
            put(tensors, name("weight_zero_point"), "I32", &[len, groups], le(&all));
        }
        Zeros::Bytes => {
            let mid = 1 << (c.bits - 1);
            let bytes = transposed(&c.zeros, c.n).iter().map(|&z| (z as i32 - mid) as u8).collect();
            put(tensors, name("weight_zero_point"), "I8", &[c.n, groups], bytes);
        }
    }
}

fn config_of(format: &str, weights: Value) -> Value {
    let mut config = config();
    config["quantization_config"] = json!({
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": { "group_0": { "targets": ["Linear"], "weights": weights, "input_activations": null } },
    });
    config
}

/// Collects notes.
#[derive(Default)]
struct Notes(Vec<String>);

impl Progress for Notes {
    fn step(&mut self, _: &Step) {}

    fn note(&mut self, text: &str) {
        self.0.push(text.into());
    }
}

fn convert(scratch: &Scratch) -> Result<(Report, ModelFile, Vec<String>), ConvertError> {
    let mut notes = Notes::default();
    let options = Options { force: true, ..Options::default() };
    let report = quern_convert::convert(&scratch.model(), &scratch.out(), &options, &mut notes)?;
    let file = ModelFile::open(&report.path).unwrap();
    file.verify().unwrap();
    Ok((report, file, notes.0))
}

/// The file has narrow codes and their zero-points in the middle of its range, where narrow fields cannot hold them.
#[test]
fn narrow_asymmetric_integers_come_back_from_gptq() {
    use quern_convert::{ExportOptions, Format, GptqFormat};
    let mut random = Random::new(24);
    for bits in [2, 3] {
        for format in [GptqFormat::V1, GptqFormat::V2] {
            let scratch = Scratch::new("narrow");
            let mut tensors = around(&mut random);
            for (i, (_, module, n, k)) in LINEARS.into_iter().enumerate() {
                // One symmetric in effect, which does fit narrow fields.
                let chosen = Chosen::new(&mut random, n, k, bits, 32, i == 0);
                packed(&chosen, &mut tensors, module, false, Zeros::Bytes, FloatType::F16);
            }
            let weights = json!({ "num_bits": bits, "type": "int", "symmetric": false, "group_size": 32 });
            write(&scratch.model(), &config_of("pack-quantized", weights), &tensors, "model.safetensors");
            let (report, file, _) = convert(&scratch).unwrap();
            let (out, again) = (scratch.0.join("gptq"), scratch.0.join("again.qrn"));
            let options = ExportOptions::new(Format::Gptq(format));
            quern_convert::export(&report.path, &out, &options, &mut ())
                .unwrap_or_else(|e| panic!("{bits} {format:?}: {e}"));
            let said = std::fs::read_to_string(out.join("quantize_config.json")).unwrap();
            let said: Value = serde_json::from_str(&said).unwrap();
            assert_eq!(said["bits"], 4);
            assert_eq!(said["dynamic"].as_object().unwrap().len(), 1, "{said}");
            quern_convert::convert(&out, &again, &Options::default(), &mut ()).unwrap();
            let again = ModelFile::open(&again).unwrap();
            for (a, b) in file.tensors().iter().zip(again.tensors()) {
                assert_eq!((&a.name, a.scheme, a.hash), (&b.name, b.scheme, b.hash));
            }
        }
    }
}

#[test]
fn packed_integers_of_every_width_are_exact() {
    let mut random = Random::new(21);
    let scratch = Scratch::new("packed");
    let mut count = 0;
    for (i, bits) in (2..=8).flat_map(|b| [b; 8]).enumerate() {
        let whole = i % 2 == 1 && [3, 5, 6, 7].contains(&bits);
        let zeros = [Zeros::None, Zeros::Packed, Zeros::Bytes][i % 3];
        let scale = [FloatType::F16, FloatType::BF16, FloatType::F32][(i / 2) % 3];
        let group = [0, 32, 64, 16][i % 4];
        let mut tensors = around(&mut random);
        let mut all = vec![];
        for (target, module, n, k) in LINEARS {
            let columns = if group == 0 { k } else { group };
            let mut chosen = Chosen::new(&mut random, n, k, bits, columns, zeros == Zeros::None);
            if scale == FloatType::F32 {
                chosen.scales.iter_mut().for_each(|s| *s *= 1.0 + f32::EPSILON);
            }
            packed(&chosen, &mut tensors, module, whole, zeros, scale);
            all.push((target, chosen));
        }
        let said = if group == 0 { Value::Null } else { json!(group) };
        let sym = zeros == Zeros::None;
        let weights = json!({ "num_bits": bits, "type": "int", "symmetric": sym, "group_size": said });
        write(&scratch.model(), &config_of("pack-quantized", weights), &tensors, "model.safetensors");
        let (report, file, _) = convert(&scratch).unwrap_or_else(|e| panic!("{bits} {whole} {zeros:?}: {e}"));
        assert_eq!(report.method, "compressed-tensors");
        for (target, chosen) in &all {
            check(&file, target, chosen);
            let Scheme::Int { bits: stored, zero, scale: kept, .. } = file.tensor(target).unwrap().scheme else {
                panic!()
            };
            assert_eq!(stored, if bits > 4 { 8 } else { 4 });
            assert_eq!(zero, if sym { ZeroKind::Mid } else { ZeroKind::Code });
            assert_eq!(kept, if scale == FloatType::F32 { FloatType::F32 } else { FloatType::F16 });
        }
        assert_eq!(report.verified.codes, all.iter().map(|(_, c)| (c.n * c.k) as u64).sum::<u64>());
        count += 1;
    }
    assert_eq!(count, 56);
}

#[test]
fn modules_differ_and_the_head_may_be_quantized() {
    let mut random = Random::new(22);
    let scratch = Scratch::new("mixed");
    let mut tensors = around(&mut random);
    let mut all = vec![];
    for (i, (target, module, n, k)) in LINEARS.into_iter().enumerate() {
        let (bits, group) = [(4, 32), (8, k), (3, 16)][i % 3];
        let chosen = Chosen::new(&mut random, n, k, bits, group, true);
        packed(&chosen, &mut tensors, module, false, Zeros::None, FloatType::BF16);
        all.push((target, chosen));
    }
    tensors.remove("lm_head.weight");
    let head = Chosen::new(&mut random, VOCAB, HIDDEN, 8, HIDDEN, true);
    packed(&head, &mut tensors, "lm_head", false, Zeros::None, FloatType::BF16);
    all.push(("head", head));
    let mut config = config_of("mixed-precision", json!({ "num_bits": 4, "type": "int", "symmetric": true }));
    for bits in [8, 3] {
        config["quantization_config"]["config_groups"][format!("group_{bits}")] =
            json!({ "format": "pack-quantized", "weights": { "num_bits": bits, "type": "int", "symmetric": true } });
    }
    write(&scratch.model(), &config, &tensors, "model.safetensors");
    let (_, file, _) = convert(&scratch).unwrap();
    all.iter().for_each(|(target, chosen)| check(&file, target, chosen));
}

/// A model of one-byte weights: the linears' bytes are random, `scales` adds what goes with them.
fn bytes_model(
    random: &mut Random,
    kind: &'static str,
    scales: impl Fn(&mut Random, &mut Tensors, &str, usize, usize),
) -> Tensors {
    let mut tensors = around(random);
    for (_, module, n, k) in LINEARS {
        let byte = |random: &mut Random| match random.below(256) as u8 {
            nan if kind == "F8_E4M3" && nan & 0x7f == 0x7f => 0x80,
            byte => byte,
        };
        let bytes = (0..n * k).map(|_| byte(random)).collect();
        put(&mut tensors, format!("{module}.weight"), kind, &[n, k], bytes);
        scales(random, &mut tensors, module, n, k);
    }
    tensors
}

fn scales_of(random: &mut Random, count: usize) -> Vec<f32> {
    (0..count).map(|_| random.weight() / 64.0).collect()
}

/// Sign, exponent of bias 7, three bits of mantissa: the definition.
fn e4m3(code: u8) -> f32 {
    let (sign, e, m) = (if code & 0x80 == 0 { 1.0 } else { -1.0 }, (code >> 3 & 15) as i32, (code & 7) as f32);
    sign * if e == 0 { m / 8.0 * 2f32.powi(-6) } else { (1.0 + m / 8.0) * 2f32.powi(e - 7) }
}

fn e2m1(code: u8) -> f32 {
    let size = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][(code & 7) as usize];
    if code & 8 == 0 { size } else { -size }
}

/// Compares every element of every linear.
fn same(file: &ModelFile, what: &str, expected: impl Fn(&str, usize, usize, usize) -> f32) {
    for (target, module, n, k) in LINEARS {
        let view = file.tensor(target).unwrap();
        for (row, col) in (0..n).flat_map(|row| (0..k).map(move |col| (row, col))) {
            let wanted = expected(module, k, row, col);
            assert_eq!(view.at(row, col), wanted, "{what}: {target} [{row}, {col}]");
        }
    }
}

#[test]
fn bytes_are_integers() {
    let mut random = Random::new(23);
    let scratch = Scratch::new("int8");
    for (i, format) in ["int-quantized", "naive-quantized"].into_iter().cycle().take(8).enumerate() {
        let zeros = i >= 4;
        let shape = move |n: usize, k: usize| match i % 4 {
            0 => vec![1],
            1 => vec![n],
            2 => vec![n, 1],
            _ => vec![n, k / 32],
        };
        let tensors = bytes_model(&mut random, "I8", |random, t, module, n, k| {
            let shape = shape(n, k);
            let count = shape.iter().product();
            put(
                t,
                format!("{module}.weight_scale"),
                "BF16",
                &shape,
                floats(FloatType::BF16, &scales_of(random, count)),
            );
            if zeros {
                let bytes = (0..count).map(|_| random.below(256) as u8).collect();
                put(t, format!("{module}.weight_zero_point"), "I8", &shape, bytes);
            }
            put(t, format!("{module}.input_scale"), "F32", &[1], 1f32.to_le_bytes().into());
        });
        let weights = json!({ "num_bits": 8, "type": "int", "symmetric": !zeros });
        write(&scratch.model(), &config_of(format, weights), &tensors, "model.safetensors");
        let (report, file, notes) = convert(&scratch).unwrap();
        assert_eq!(report.method, "compressed-tensors");
        assert_eq!(notes.iter().filter(|n| n.contains("quantized activations")).count(), 1, "{notes:?}");
        same(&file, format, |module, k, row, col| {
            let (_, shape, scales) = &tensors[&format!("{module}.weight_scale")];
            let cell = match i % 4 {
                0 => 0,
                3 => row * shape[1] + col / 32,
                _ => row,
            };
            let zero = if zeros { tensors[&format!("{module}.weight_zero_point")].2[cell] as i8 as f32 } else { 0.0 };
            let q = tensors[&format!("{module}.weight")].2[row * k + col] as i8 as f32;
            FloatType::BF16.read(scales, cell) * (q - zero)
        });
    }
}

#[test]
fn eight_bit_floats_are_exact() {
    let mut random = Random::new(24);
    let scratch = Scratch::new("fp8");
    let weights = json!({ "num_bits": 8, "type": "float", "symmetric": true });
    let block =
        |b: [usize; 2]| json!({ "quant_method": "fp8", "weight_block_size": b, "activation_scheme": "dynamic" });
    let compressed = config_of("float-quantized", weights)["quantization_config"].clone();
    let cases: [(&str, Value, &str, FloatType, [usize; 2]); 10] = [
        ("weight_scale", compressed.clone(), "compressed-tensors", FloatType::BF16, [0, 0]),
        ("weight_scale", compressed, "compressed-tensors", FloatType::F16, [1, 0]),
        ("weight_scale", json!({ "quant_method": "fbgemm_fp8" }), "fbgemm_fp8", FloatType::F32, [1, 0]),
        (
            "weight_scale",
            json!({ "quant_method": "modelopt", "quant_algo": "FP8" }),
            "modelopt",
            FloatType::F32,
            [0, 0],
        ),
        ("weight_scale_inv", block([128, 128]), "fp8", FloatType::F32, [128, 128]),
        ("weight_scale_inv", block([64, 64]), "fp8", FloatType::BF16, [64, 64]),
        ("weight_scale_inv", block([48, 32]), "fp8", FloatType::F32, [48, 32]),
        // Blocks that no group of the file holds: stored as the values that they mean.
        ("weight_scale_inv", block([32, 40]), "fp8", FloatType::F32, [32, 40]),
        // No config at all: blocks are found by their number.
        ("weight_scale_inv", Value::Null, "compressed-tensors", FloatType::F32, [32, 32]),
        ("weight_scale", Value::Null, "compressed-tensors", FloatType::F32, [0, 0]),
    ];
    for (part, quantization, method, kind, [down, along]) in cases {
        let shape = |n: usize, k: usize| match (down, along) {
            (0, _) if method == "modelopt" => vec![],
            (0, _) => vec![1],
            (_, 0) => vec![n, 1],
            _ => vec![n.div_ceil(down), k.div_ceil(along)],
        };
        let tensors = bytes_model(&mut random, "F8_E4M3", |random, t, module, n, k| {
            let shape = shape(n, k);
            let scales = scales_of(random, shape.iter().product());
            put(t, format!("{module}.{part}"), name_of(kind), &shape, floats(kind, &scales));
        });
        let mut config = config();
        config["quantization_config"] = quantization;
        write(&scratch.model(), &config, &tensors, "model.safetensors");
        let (report, file, _) = convert(&scratch).unwrap_or_else(|e| panic!("{part} {method} {down} {along}: {e}"));
        assert_eq!(report.method, method);
        same(&file, method, |module, k, row, col| {
            let scales = &tensors[&format!("{module}.{part}")].2;
            let cell = match (down, along) {
                (0, _) => 0,
                (_, 0) => row,
                _ => row / down * k.div_ceil(along) + col / along,
            };
            e4m3(tensors[&format!("{module}.weight")].2[row * k + col]) * kind.read(scales, cell)
        });
        if along == 40 {
            assert_eq!(file.tensor("layers.0.down").unwrap().scheme, Scheme::Float(FloatType::F32));
            continue;
        }
        let Scheme::Mini { kind, group, .. } = file.tensor("layers.0.down").unwrap().scheme else { panic!() };
        assert_eq!((kind, group as usize), (Mini::E4M3, if along == 0 || along > INNER { INNER } else { along }));
    }
}

#[test]
fn small_floats_in_small_groups_are_exact() {
    let mut random = Random::new(25);
    let scratch = Scratch::new("fp4");
    for (format, method) in [
        ("mxfp4-pack-quantized", "compressed-tensors"),
        ("mxfp8", "compressed-tensors"),
        ("nvfp4-pack-quantized", "compressed-tensors"),
        ("modelopt", "modelopt"),
    ] {
        let (fp8, group) = (format == "mxfp8", if format.starts_with("mx") { 32 } else { 16 });
        let part = if ["mxfp8", "modelopt"].contains(&format) { "weight" } else { "weight_packed" };
        let mut tensors = around(&mut random);
        for (_, module, n, k) in LINEARS {
            let name = |part: &str| format!("{module}.{part}");
            let width = if fp8 { k } else { k / 2 };
            let byte = |random: &mut Random| random.below(if fp8 { 127 } else { 256 }) as u8;
            let bytes = (0..n * width).map(|_| byte(&mut random)).collect();
            put(&mut tensors, name(part), if fp8 { "F8_E4M3" } else { "U8" }, &[n, width], bytes);
            let cells = n * k / group;
            if group == 32 {
                // All exponents that are numbers, 0 among them.
                let bytes = (0..cells).map(|i| if i < 2 { [0, 254][i] } else { random.below(255) as u8 }).collect();
                put(&mut tensors, name("weight_scale"), "U8", &[n, k / 32], bytes);
            } else {
                let bytes = (0..cells).map(|_| random.below(127) as u8).collect();
                put(&mut tensors, name("weight_scale"), "F8_E4M3", &[n, k / 16], bytes);
                let (part, shape): (_, &[usize]) =
                    if method == "modelopt" { ("weight_scale_2", &[]) } else { ("weight_global_scale", &[1]) };
                let global = 1000.0 + random.below(1000) as f32 / 7.0;
                let global = if method == "modelopt" { 1.0 / global } else { global };
                put(&mut tensors, name(part), "F32", shape, global.to_le_bytes().into());
            }
        }
        let mut config = config_of(format, json!({ "num_bits": 4, "type": "float", "group_size": group }));
        config["quantization_config"]["quant_method"] = json!(method);
        write(&scratch.model(), &config, &tensors, "model.safetensors");
        let (report, file, _) = convert(&scratch).unwrap_or_else(|e| panic!("{format}: {e}"));
        assert_eq!(report.method, method);
        same(&file, format, |module, k, row, col| {
            let bytes = |part: &str| &tensors[&format!("{module}.{part}")].2;
            let byte = bytes("weight_scale")[row * (k / group) + col / group];
            let float = |part| FloatType::F32.read(bytes(part), 0);
            let scale = match format {
                _ if group == 32 => 2f64.powi(byte as i32 - 127) as f32,
                "modelopt" => e4m3(byte) * float("weight_scale_2"),
                _ => e4m3(byte) / float("weight_global_scale"),
            };
            let code = bytes(part)[if fp8 { row * k + col } else { (row * k + col) / 2 }];
            scale * if fp8 { e4m3(code) } else { e2m1(code >> (col % 2 * 4) & 15) }
        });
    }
}

#[test]
fn what_does_not_change_weights_is_set_aside_with_a_note() {
    let mut random = Random::new(26);
    let scratch = Scratch::new("aside");
    let mut tensors = bytes_model(&mut random, "F8_E4M3", |_, t, module, _, _| {
        put(t, format!("{module}.weight_scale"), "F32", &[1], 0.5f32.to_le_bytes().into());
    });
    let one = |t: &mut Tensors, name: &str| put(t, name.into(), "F32", &[1], f32::NAN.to_le_bytes().into());
    for name in ["q_proj.input_scale", "k_proj.k_scale", "v_proj.v_scale", "k_scale", "k_proj.output_scale"] {
        one(&mut tensors, &format!("model.layers.0.self_attn.{name}"));
    }
    // Garbage beside a float weight.
    let v = "model.layers.0.self_attn.v_proj";
    let values = floats(FloatType::BF16, &scales_of(&mut random, 32 * HIDDEN));
    put(&mut tensors, format!("{v}.weight"), "BF16", &[32, HIDDEN], values.clone());
    one(&mut tensors, &format!("{v}.weight_scale"));
    write(&scratch.model(), &config(), &tensors, "model.safetensors");
    let (_, file, notes) = convert(&scratch).unwrap();
    assert_eq!(file.tensor("layers.0.v").unwrap().codes[..values.len()], values[..]);
    for what in ["quantized activations", "quantized KV cache", &format!("the first is {v}.weight_scale")] {
        assert_eq!(notes.iter().filter(|n| n.contains(what)).count(), 1, "{what}: {notes:?}");
    }
    // But not what has no place at all.
    one(&mut tensors, "vision.weight");
    write(&scratch.model(), &config(), &tensors, "model.safetensors");
    assert!(convert(&scratch).err().unwrap().to_string().contains("vision.weight"));
}

/// A symmetric 4-bit model with groups of 32 columns, changed.
fn model(name: &str, change: impl FnOnce(&mut Value, &mut Tensors)) -> Scratch {
    let mut random = Random::new(27);
    let scratch = Scratch::new(name);
    let mut tensors = around(&mut random);
    for (_, module, n, k) in LINEARS {
        let chosen = Chosen::new(&mut random, n, k, 4, 32, false);
        packed(&chosen, &mut tensors, module, false, Zeros::Packed, FloatType::BF16);
    }
    let weights = json!({ "num_bits": 4, "type": "int", "symmetric": false, "group_size": 32 });
    let mut config = config_of("pack-quantized", weights);
    change(&mut config, &mut tensors);
    write(&scratch.model(), &config, &tensors, "model.safetensors");
    scratch
}

const Q: &str = "model.layers.0.self_attn.q_proj";

#[test]
fn contradictions_of_packed_integers_are_named() {
    let weights = |c: &mut Value, key: &str, value: Value| {
        c["quantization_config"]["config_groups"]["group_0"]["weights"][key] = value;
    };
    let set = |t: &mut Tensors, part: &str, kind, shape: &[usize], bytes: usize| {
        put(t, format!("{Q}.{part}"), kind, shape, vec![0; bytes]);
    };
    for part in ["weight_scale", "weight_zero_point"] {
        let name = format!("{Q}.{part}");
        model("missing", |_, t| drop(t.remove(&name))).fails(&format!("tensor {name} is missing"));
    }
    model("packed", |_, t| drop(t.remove(&format!("{Q}.weight_packed")))).fails(&format!("{Q}.weight is missing"));
    model("bits", |c, _| weights(c, "num_bits", json!(8)))
        .fails("64 codes of 8 bits, as config.json says, got 8 words");
    model("group", |c, _| weights(c, "group_size", json!(64))).fails("64 columns that config.json says");
    model("symmetric", |c, _| weights(c, "symmetric", json!(true)))
        .fails("zero-points: expected the middle code, as config.json says symmetric, got others");
    model("shape", |_, t| {
        let bytes = [64i64, 65].iter().flat_map(|d| d.to_le_bytes()).collect();
        put(t, format!("{Q}.weight_shape"), "I64", &[2], bytes);
    })
    .fails(&format!("tensor {Q}.weight_shape: value: expected [64, 64], got [64, 65]"));
    model("shape-type", |_, t| set(t, "weight_shape", "F32", &[2], 8)).fails("weight_shape: type: expected i64");
    model("shape-long", |_, t| set(t, "weight_shape", "I64", &[3], 24)).fails("weight_shape: value");
    model("shape-none", |_, t| set(t, "weight_shape", "I64", &[0], 0)).fails("weight_shape: value");
    model("rows", |_, t| set(t, "weight_packed", "I32", &[63, 8], 63 * 32)).fails("expected [64, words]");
    model("width", |_, t| set(t, "weight_packed", "I32", &[64, 9], 64 * 36)).fails("weight_packed: bits");
    model("empty", |_, t| set(t, "weight_packed", "I32", &[64, 0], 0)).fails("weight_packed: bits");
    model("flat", |_, t| set(t, "weight_packed", "I32", &[512], 2048)).fails("two dimensions");
    model("type", |_, t| set(t, "weight_packed", "I64", &[64, 4], 2048)).fails("type of packed codes: expected i32");
    model("scale-type", |_, t| set(t, "weight_scale", "I32", &[64, 2], 512)).fails("weight_scale: type");
    model("scale-rows", |_, t| set(t, "weight_scale", "BF16", &[65, 2], 260)).fails("weight_scale: shape");
    model("scale-none", |_, t| set(t, "weight_scale", "BF16", &[64, 0], 0)).fails("weight_scale: shape");
    model("scale-3d", |_, t| set(t, "weight_scale", "BF16", &[1, 64, 2], 256)).fails("weight_scale: shape");
    model("zero-shape", |_, t| set(t, "weight_zero_point", "I32", &[2, 8], 64)).fails("weight_zero_point: shape");
    model("zero-type", |_, t| set(t, "weight_zero_point", "F16", &[64, 2], 256)).fails("weight_zero_point: type");
    model("zero-range", |_, t| {
        put(t, format!("{Q}.weight_zero_point"), "I8", &[64, 2], vec![8; 128]);
    })
    .fails("weight_zero_point: zero-points: expected -8 to 7, got 8");
    model("nan", |_, t| {
        t.get_mut(&format!("{Q}.weight_scale")).unwrap().2[4..6].copy_from_slice(&[0xc0, 0x7f]);
    })
    .fails("scales: expected finite numbers, got NaN for row 1, group 0");
    model("both", |_, t| set(t, "weight", "F32", &[64, 64], 4 * 4096)).fails("both");
    for part in ["weight_scale_inv", "weight_scale_2", "weight_global_scale"] {
        model("stray", |_, t| set(t, part, "F32", &[1], 4)).fails(&format!("{Q}.{part}"));
    }
    model("method", |c, _| c["quantization_config"] = json!({"quant_method": "gptq"}))
        .fails("gptq, as config.json says");
    model("sparse", |c, _| c["quantization_config"]["sparsity_config"] = json!({"format": "sparse-24-bitmask"}))
        .fails("sparse-24-bitmask");
    model("hadamard", |c, _| c["quantization_config"]["transform_config"] = json!({"config_groups": {"u": {}}}))
        .fails("transform_config");
}

#[test]
fn contradictions_of_floats_are_named() {
    let fp8 = |name: &str, change: &dyn Fn(&mut Value, &mut Tensors)| {
        let mut random = Random::new(28);
        let scratch = Scratch::new(name);
        let mut tensors = bytes_model(&mut random, "F8_E4M3", |_, t, module, n, k| {
            let shape = [n.div_ceil(32), k.div_ceil(32)];
            let scales = vec![0.5; shape.iter().product()];
            put(t, format!("{module}.weight_scale_inv"), "F32", &shape, floats(FloatType::F32, &scales));
        });
        let mut config = config();
        config["quantization_config"] = json!({ "quant_method": "fp8", "weight_block_size": [32, 32] });
        change(&mut config, &mut tensors);
        write(&scratch.model(), &config, &tensors, "model.safetensors");
        scratch
    };
    fp8("right", &|_, _| {}).convert(&Options { quant: Quant::Keep, ..Options::default() }).unwrap();
    fp8("nan-code", &|_, t| t.get_mut(&format!("{Q}.weight")).unwrap().2[65] = 0xff)
        .fails(&format!("tensor {Q}.weight: weights: expected numbers, got NaN at [1, 1]"));
    fp8("nan-scale", &|_, t| {
        t.get_mut(&format!("{Q}.weight_scale_inv")).unwrap().2[8..12].copy_from_slice(&f32::NAN.to_le_bytes());
    })
    .fails("got NaN for row 32, group 0");
    fp8("no-scale", &|_, t| drop(t.remove(&format!("{Q}.weight_scale_inv")))).fails("weight_scale is missing");
    fp8("blocks", &|c, _| c["quantization_config"]["weight_block_size"] = json!([64, 32]))
        .fails("blocks of 64 by 32 that config.json says");
    for strategy in ["tensor", "channel"] {
        fp8("strategy", &|c, _| {
            let weights = json!({ "num_bits": 8, "type": "float", "symmetric": true, "strategy": strategy });
            c["quantization_config"] = config_of("float-quantized", weights)["quantization_config"].clone();
        })
        .fails(&format!("expected one scale or [64], as config.json says {strategy}, got [2, 2]"));
    }
    fp8("e5m2", &|_, t| {
        let (_, shape, bytes) = t[&format!("{Q}.weight")].clone();
        t.insert(format!("{Q}.weight"), ("F8_E5M2", shape, bytes));
    })
    .fails("weights of type F8_E5M2");
    fp8("shape", &|_, t| put(t, format!("{Q}.weight"), "F8_E4M3", &[32, 128], vec![0; 4096])).fails("weight: shape");
    for part in ["weight_scale", "weight_scale_2", "weight_global_scale"] {
        fp8("stray", &|_, t| put(t, format!("{Q}.{part}"), "F32", &[1], vec![0; 4])).fails(&format!("{Q}.{part}"));
    }
    fp8("order", &|_, t| put(t, format!("{Q}.weight_g_idx"), "I32", &[64], vec![0; 256])).fails("weight_g_idx: groups");
    fp8("no-order", &|_, t| put(t, format!("{Q}.weight_g_idx"), "I32", &[64], vec![0xff; 256]))
        .convert(&Options::default())
        .unwrap();
    fp8("default", &|c, _| drop(c["quantization_config"].as_object_mut().unwrap().remove("weight_block_size")))
        .fails("blocks of 128 by 128");
    fp8("zeros", &|_, t| put(t, format!("{Q}.weight_zero_point"), "I8", &[1], vec![3])).fails("zero-points");

    let fp4 = |name: &str, part: &str, kind: &'static str, shape: [usize; 2], fill: u8| {
        let mut random = Random::new(29);
        let scratch = Scratch::new(name);
        let mut tensors = around(&mut random);
        for (_, module, n, k) in LINEARS {
            put(&mut tensors, format!("{module}.weight_packed"), "U8", &[n, k / 2], vec![0x21; n * k / 2]);
            put(&mut tensors, format!("{module}.weight_scale"), "U8", &[n, k / 32], vec![120; n * k / 32]);
        }
        put(&mut tensors, format!("{Q}.{part}"), kind, &shape, vec![fill; shape[0] * shape[1]]);
        write(&scratch.model(), &config(), &tensors, "model.safetensors");
        scratch
    };
    fp4("mx-right", "weight_scale", "F8_E8M0", [64, 2], 1).convert(&Options::default()).unwrap();
    fp4("mx-nan", "weight_scale", "U8", [64, 2], 255).fails("got NaN for row 0, group 0");
    fp4("mx-groups", "weight_scale", "U8", [64, 4], 1).fails("groups of 32 columns");
    fp4("mx-width", "weight_packed", "U8", [64, 64], 1).fails("weight_packed: shape");
    fp4("mx-scale", "weight_scale", "I8", [64, 2], 1).fails("weight_scale: type");
    fp4("mx-global", "weight_global_scale", "U8", [1, 1], 1).fails("q_proj.weight_global_scale");
    fp4("mx-zeros", "weight_zero_point", "I8", [1, 1], 3).fails("zero-points");
    fp4("nv-global", "weight_scale", "F8_E4M3", [64, 4], 1).fails("weight_global_scale is missing");
}
