//! The file format: round trip, golden bytes, and damage of every kind.

#![allow(clippy::unwrap_used)]

use std::{fs, path::PathBuf};

use quern_models::{
    FileWriter, FloatType, FormatError, Generation, Meta, ModelFile, Scheme, TensorPlan, ZeroKind, join,
    spec::{Act, Attn, Layer, Mlp, ModelSpec, Norm, Rope, RopeScaling},
};

/// A one-layer model whose tensors use every scheme.
fn spec() -> ModelSpec {
    let norm = Norm::Rms { eps: 1e-5 };
    let rope = Rope { theta: 10000.0, scaling: RopeScaling::None };
    ModelSpec {
        family: "llama".into(),
        vocab: 70,
        hidden: 32,
        max_context: 128,
        layers: vec![Layer {
            attn_norm: norm.clone(),
            attn: Attn::Gqa {
                heads: 4,
                kv_heads: 2,
                head_dim: 8,
                scale: 0.5,
                rope: Some(rope),
                window: None,
                cap: None,
                sinks: false,
                qk_norm: None,
                qkv_bias: false,
                o_bias: false,
                attn_order: false,
                o_order: false,
            },
            attn_post_norm: None,
            mlp_norm: norm.clone(),
            mlp: Mlp::Gated { inner: 48, act: Act::Silu, bias: false, mlp_order: false },
            mlp_post_norm: None,
        }],
        norm,
        tied_head: false,
        head_order: false,
        positions: None,
        embed_scale: None,
        logit_cap: None,
        draft_head: None,
    }
}

fn plans() -> Vec<TensorPlan> {
    let int = |bits, zero, scale| Scheme::Int { bits, group: 32, zero, scale };
    let scheme = |name: &str| match name {
        "embed" => int(8, ZeroKind::Mid, FloatType::F16),
        "head" => int(8, ZeroKind::Code, FloatType::F32),
        "layers.0.q" => int(4, ZeroKind::Code, FloatType::F16),
        "layers.0.k" => int(4, ZeroKind::Min, FloatType::F16),
        "layers.0.v" => int(4, ZeroKind::Mid, FloatType::BF16),
        "layers.0.o" => Scheme::Float(FloatType::BF16),
        "layers.0.gate" => Scheme::Float(FloatType::F16),
        _ => Scheme::Float(FloatType::F32),
    };
    let needed = spec().tensors().into_iter();
    needed.map(|t| TensorPlan { scheme: scheme(&t.name), name: t.name, dims: t.dims }).collect()
}

/// Bytes of the i-th tensor: a pattern that differs between tensors.
fn bytes(plan: &TensorPlan, i: usize) -> Vec<u8> {
    let (n, k) = if plan.dims.len() == 2 { (plan.dims[0], plan.dims[1]) } else { (1, plan.dims[0]) };
    let len = plan.scheme.planes(n, k).unwrap().total;
    (0..len).map(|b| (b as usize * 7 + i) as u8).collect()
}

fn dir(test: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("quern-format-{test}-{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    dir
}

fn write(path: &std::path::Path) {
    let generation = Generation { eos: vec![2], bos: Some(1), temperature: Some(0.5), ..Default::default() };
    let meta = Meta {
        spec: spec(),
        tokenizer: Some(b"{\"model\":{}}".to_vec()),
        chat_template: Some("{{ messages }}".into()),
        generation,
        provenance: serde_json::json!({"source": "test"}),
    };
    let plans = plans();
    let mut writer = FileWriter::create(path, &meta, plans.clone()).unwrap();
    for (i, plan) in plans.iter().enumerate() {
        writer.write(&bytes(plan, i)).unwrap();
    }
    writer.finish().unwrap();
}

fn sample(test: &str) -> Vec<u8> {
    let dir = dir(test);
    let path = dir.join("m.qrn");
    write(&path);
    let bytes = fs::read(&path).unwrap();
    fs::remove_dir_all(dir).unwrap();
    bytes
}

#[test]
fn a_tensor_that_is_read_once_is_the_tensor() {
    let path = dir("once").join("m.qrn");
    write(&path);
    let file = ModelFile::open(&path).unwrap();
    for (i, plan) in plans().iter().enumerate() {
        let want = bytes(plan, i);
        let once = file.view_once(i).unwrap();
        let (view, whole) = (once.view(), file.view(i));
        assert_eq!((view.n, view.k, view.scheme), (whole.n, whole.k, whole.scheme));
        assert_eq!(view.codes, &want[..view.codes.len()], "{}", plan.name);
        assert_eq!((view.codes, view.scales, view.zeros), (whole.codes, whole.scales, whole.zeros), "{}", plan.name);
        drop(once);
        // What was given up is read again.
        assert_eq!(file.view(i).codes, file.view_once(i).unwrap().view().codes, "{}", plan.name);
        assert_eq!(file.view(i).codes, &want[..file.view(i).codes.len()], "{}", plan.name);
    }
    file.verify().unwrap();
    fs::remove_dir_all(dir("once")).unwrap();
}

#[test]
fn what_was_written_is_read() {
    let dir = dir("round");
    let path = dir.join("m.qrn");
    write(&path);
    let file = ModelFile::open(&path).unwrap();
    assert_eq!(file.spec(), &spec());
    assert_eq!(file.tokenizer_json(), Some(&b"{\"model\":{}}"[..]));
    assert_eq!(file.chat_template(), Some("{{ messages }}"));
    assert_eq!(file.generation().eos, [2]);
    assert_eq!(file.generation().temperature, Some(0.5));
    assert_eq!(file.provenance()["source"], "test");
    for (i, plan) in plans().iter().enumerate() {
        let want = bytes(plan, i);
        let view = file.tensor(&plan.name).unwrap();
        assert_eq!(view.scheme, plan.scheme, "{}", plan.name);
        assert_eq!(view.codes, &want[..view.codes.len()], "{}", plan.name);
        assert_eq!(view.codes.as_ptr() as usize % 4096, 0, "{} is page-aligned", plan.name);
        assert!(
            want.ends_with(view.zeros)
                && (view.zeros.is_empty() == !matches!(plan.name.as_str(), "head" | "layers.0.q" | "layers.0.k"))
        );
    }
    let verified = file.verify().unwrap();
    assert_eq!((verified.tensors, verified.bytes), (plans().len(), file.file_len()));
    assert!(file.tensor("layers.1.q").is_none());
    fs::remove_dir_all(dir).unwrap();
}

/// The first bytes of the file, spelled out as FORMAT.md does; the rest by hash.
#[test]
fn golden_bytes() {
    let file = sample("golden");
    assert_eq!(&file[..16], b"QRN\r\n\x1a\n\0\x01\0\0\0\0\x10\0\0");
    assert_eq!(&file[16..32], &[0; 16], "no feature bits");
    assert_eq!(&file[32..40], &4096u64.to_le_bytes(), "header length");
    assert_eq!(&file[40..48], &(file.len() as u64).to_le_bytes());
    assert_eq!(&file[48..56], &[6, 0, 0, 0, 12, 0, 0, 0], "six sections, twelve tensors");
    assert_eq!(&file[64..80], &[1, 0, 0, 0, 0, 0, 0, 0, 208, 0, 0, 0, 0, 0, 0, 0], "spec follows the table");
    let table = u64::from_le_bytes(file[64 + 5 * 24 + 8..64 + 5 * 24 + 16].try_into().unwrap()) as usize;
    let record = &file[table..];
    // embed: name of 5 bytes, 2 dims, P64, integer, 8 bits, mid zero, f16 scales, group 32.
    assert_eq!(&record[..16], &[5, 0, 2, 1, 1, 8, 0, 1, 32, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(&record[16..24], &4096u64.to_le_bytes(), "offset");
    assert_eq!(&record[24..32], &(128 * 32 + 128 * 2u64).to_le_bytes(), "length: two panels and their scales");
    assert_eq!(&record[40..61], b"\x46\0\0\0\0\0\0\0\x20\0\0\0\0\0\0\0embed");
    assert_eq!(xxhash_rust::xxh3::xxh3_64(&file), 15038422205609196708, "bytes of the whole file");
}

#[test]
fn every_prefix_is_refused() {
    let file = sample("prefix");
    let header = u64::from_le_bytes(file[32..40].try_into().unwrap()) as usize;
    for len in (0..header).chain((header..file.len()).step_by(97)) {
        assert!(ModelFile::check(&file[..len]).is_err(), "prefix of {len} bytes");
    }
    ModelFile::check(&file).unwrap();
    let longer = [&file[..], &[0]].concat();
    assert!(matches!(ModelFile::check(&longer), Err(FormatError::Length { .. })));
}

#[test]
fn every_flipped_header_byte_is_refused() {
    let mut file = sample("flip");
    for i in 0..4096 {
        for mask in [1, 0x80, 0xff] {
            file[i] ^= mask;
            assert!(ModelFile::check(&file).is_err(), "byte {i} ^ {mask:#x}");
            file[i] ^= mask;
        }
    }
}

/// A header whose hash was made right again, so that the checks behind the hash are reached.
#[test]
fn flips_behind_a_right_hash_do_not_panic() {
    let good = sample("rehash");
    let mut refused = 0;
    for i in 0..4096 {
        for mask in [1u8, 0x80, 0xff] {
            let mut file = good.clone();
            file[i] ^= mask;
            file[56..64].fill(0);
            let hash = xxhash_rust::xxh3::xxh3_64(&file[..4096]);
            file[56..64].copy_from_slice(&hash.to_le_bytes());
            refused += ModelFile::check(&file).is_err() as usize;
        }
    }
    assert!(refused > 4096, "only {refused} of 12288 changes were noticed behind the hash");
}

/// A head that knows some of the model's tokens says which: they must be the model's.
#[test]
fn tokens_of_a_head_are_the_models() {
    let spec: ModelSpec = serde_json::from_value(serde_json::json!({
        "family": "eagle3", "vocab": 8, "hidden": 16, "max_context": 64,
        "layers": [{
            "attn_norm": {"kind": "identity"},
            "attn": {"kind": "gqa", "heads": 2, "kv_heads": 1, "head_dim": 8, "scale": 0.5},
            "mlp_norm": {"kind": "rms", "eps": 1e-5},
            "mlp": {"kind": "gated", "inner": 8, "act": "silu"},
        }],
        "norm": {"kind": "rms", "eps": 1e-5}, "tied_head": false,
        "guesses": {
            "states": {"kind": "before", "layers": [1, 2]}, "model_hidden": 16, "model_vocab": 32,
            "kind": {
                "kind": "wide",
                "embed_norm": {"kind": "rms", "eps": 1e-5}, "state_norm": {"kind": "rms", "eps": 1e-5},
            },
            "shared_embed": true, "mapped": true,
        },
    }))
    .unwrap();
    let (dir, meta) = (dir("tokens"), |spec| Meta {
        spec,
        tokenizer: None,
        chat_template: None,
        generation: Generation::default(),
        provenance: serde_json::json!({}),
    });
    let path = dir.join("head.qrn");
    let open = |tokens: [f32; 8]| {
        let scheme = Scheme::Float(FloatType::F32);
        let needed = spec.tensors().into_iter();
        let plans: Vec<_> = needed.map(|t| TensorPlan { scheme, name: t.name, dims: t.dims }).collect();
        let mut writer = FileWriter::create(&path, &meta(spec.clone()), plans.clone()).unwrap();
        for (i, plan) in plans.iter().enumerate() {
            let tokens: Vec<u8> = tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
            writer.write(&if plan.name == "tokens" { tokens } else { bytes(plan, i) }).unwrap();
        }
        writer.finish().unwrap();
        ModelFile::open(&path).map(drop).map_err(|e| e.to_string())
    };
    open([0.0, 1.0, 5.0, 7.0, 9.0, 10.0, 30.0, 31.0]).unwrap();
    for (bad, shown) in [(32.0, "32"), (-1.0, "-1"), (2.5, "2.5"), (f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        let mut tokens = [0.0, 1.0, 5.0, 7.0, 9.0, 10.0, 30.0, 31.0];
        tokens[6] = bad;
        let expected = "tensor tokens: elements: expected whole numbers below 32, the model's tokens, got ";
        assert_eq!(open(tokens), Err(format!("{expected}{shown} at 6")));
    }
    fs::remove_dir_all(dir).unwrap();
}

/// Two models in one file: each is what it was, and nothing of either can be changed unnoticed.
#[test]
fn a_draft_model_follows() {
    let dir = dir("draft");
    let [large, small, both, again] = ["l.qrn", "s.qrn", "b.qrn", "a.qrn"].map(|name| dir.join(name));
    write(&large);
    write(&small);
    let open = |path: &PathBuf| ModelFile::open(path).unwrap();
    join(&open(&large), &open(&small), &both).unwrap();
    let (file, plain) = (open(&both), open(&large));
    let draft = file.draft().unwrap();
    assert_eq!((file.file_len(), draft.file_len()), (plain.file_len(), plain.file_len()));
    assert_eq!(fs::metadata(&both).unwrap().len(), 2 * plain.file_len());
    assert_eq!((file.verify().unwrap().tensors, plain.draft().is_none()), (2 * plans().len(), true));
    for (i, plan) in plans().iter().enumerate() {
        for one in [&file, &**draft] {
            let (want, once) = (plain.view(i), one.view_once(i).unwrap());
            assert_eq!((one.view(i).codes, one.view(i).scales), (want.codes, want.scales), "{}", plan.name);
            assert_eq!((once.view().codes, once.view().zeros), (want.codes, want.zeros), "{}", plan.name);
        }
    }
    // In place, and with files that have drafts themselves: only the models count.
    join(&file, &file, &again).unwrap();
    join(&open(&again), &open(&again), &again).unwrap();
    assert_eq!(fs::read(&again).unwrap(), fs::read(&both).unwrap());
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 4, "nothing is left behind");
    // Damage.
    let good = fs::read(&both).unwrap();
    let half = good.len() / 2;
    for at in (0..good.len()).step_by(311).chain([half, half + 16, half + 40, good.len() - 1]) {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        fs::write(&again, &bad).unwrap();
        assert!(ModelFile::open(&again).and_then(|file| file.verify()).is_err(), "byte {at}");
    }
    for len in [half, half + 1, half + 4096, good.len() - 4096, good.len() - 1] {
        assert!(ModelFile::check(&good[..len]).is_err(), "{len} bytes");
    }
    let rehashed = |mut bytes: Vec<u8>| {
        let len = (bytes.len() as u64).to_le_bytes();
        bytes[40..48].copy_from_slice(&len);
        bytes[56..64].fill(0);
        let hash = xxhash_rust::xxh3::xxh3_64(&bytes[..plain.header_len() as usize]);
        bytes[56..64].copy_from_slice(&hash.to_le_bytes());
        ModelFile::check(&bytes).unwrap_err().to_string()
    };
    // A draft that is none, is missing, or has a draft.
    assert!(rehashed([&good[..half], &[7; 4096][..]].concat()).contains("the draft model: not a .qrn file"));
    assert!(rehashed(good[..half].to_vec()).contains("the draft model"));
    assert!(rehashed([&good[..half], &good].concat()).contains("draft models of a draft model"));
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn verify_finds_any_flipped_bit() {
    let dir = dir("verify");
    let path = dir.join("m.qrn");
    write(&path);
    let good = fs::read(&path).unwrap();
    for at in (4096..good.len()).step_by(613).chain([good.len() - 1]) {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        fs::write(&path, &bad).unwrap();
        let err = ModelFile::open(&path).unwrap().verify().unwrap_err();
        assert!(matches!(err, FormatError::Hash { .. }), "byte {at}: {err}");
    }
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn an_unfinished_write_leaves_nothing_and_keeps_the_old_file() {
    let dir = dir("unfinished");
    let path = dir.join("m.qrn");
    fs::write(&path, b"old").unwrap();
    let meta = Meta {
        spec: spec(),
        tokenizer: None,
        chat_template: None,
        generation: Generation::default(),
        provenance: serde_json::json!({}),
    };
    let mut writer = FileWriter::create(&path, &meta, plans()).unwrap();
    assert!(writer.write(b"wrong size").is_err());
    assert!(writer.seal().is_err(), "a tensor is missing");
    drop(writer);
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
    assert_eq!(fs::read(&path).unwrap(), b"old");
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn messages_name_the_field_and_the_next_step() {
    let file = sample("messages");
    let text = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut f = file.clone();
        change(&mut f);
        ModelFile::check(&f).unwrap_err().to_string()
    };
    assert!(text(&|f| f[0] = b'G').contains("quern convert"));
    assert!(text(&|f| f[8] = 2).contains("version 2"));
    assert!(text(&|f| f[16] = 2).contains("update quern"));
    assert!(text(&|f| f.truncate(5000)).contains("5000"));
    assert!(text(&|f| f[300] ^= 1).contains("damaged"));
}
