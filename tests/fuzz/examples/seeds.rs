//! Writes the seeds. Run in this directory: `cargo run --release --example seeds`.

use std::{error::Error, fs, path::Path};

use quern_fuzz::{gguf, qrn, safetensors};
use quern_models::{
    FileWriter, FloatType, Generation, Meta, Scheme, TensorPlan, ZeroKind,
    spec::{Act, Attn, Layer, Mlp, ModelSpec, Norm, Rope, RopeScaling},
};

fn main() -> Result<(), Box<dyn Error>> {
    qrn_seeds()?;
    safetensors_seeds()?;
    gguf_seeds()
}

fn save(target: &str, name: &str, bytes: &[u8]) -> Result<(), Box<dyn Error>> {
    let dir = Path::new("seeds").join(target);
    fs::create_dir_all(&dir)?;
    Ok(fs::write(dir.join(name), bytes)?)
}

fn spec(scaling: RopeScaling, tied_head: bool) -> ModelSpec {
    let norm = Norm::Rms { eps: 1e-5 };
    let rope = Rope { theta: 10000.0, scaling };
    ModelSpec {
        family: "llama".into(),
        vocab: 70,
        hidden: 32,
        max_context: 128,
        layers: vec![Layer {
            attn_norm: norm.clone(),
            attn: Attn::Gqa { heads: 4, kv_heads: 2, head_dim: 8, scale: 0.5, rope: Some(rope), window: None, cap: None, sinks: false, qk_norm: None, qkv_bias: false, o_bias: false, attn_order: false, o_order: false },
            attn_post_norm: None,
            mlp_norm: norm.clone(),
            mlp: Mlp::Gated { inner: 48, act: Act::Silu, bias: false, mlp_order: false },
            mlp_post_norm: None,
        }],
        norm,
        tied_head,
        head_order: false,
        positions: None,
        embed_scale: None,
        logit_cap: None,
        draft_head: None,
    }
}

fn qrn_seeds() -> Result<(), Box<dyn Error>> {
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
    let llama3 = RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 64 };
    let path = std::env::temp_dir().join(format!("quern-seeds-{}", std::process::id()));
    let linear = RopeScaling::Linear { factor: 2.0 };
    let specs = [
        ("plain", spec(RopeScaling::None, false)),
        ("llama3-tied", spec(llama3, true)),
        ("linear", spec(linear, false)),
    ];
    for (name, spec) in specs {
        let needed = spec.tensors().into_iter();
        let plans: Vec<_> =
            needed.map(|t| TensorPlan { scheme: scheme(&t.name), name: t.name, dims: t.dims }).collect();
        let meta = Meta {
            spec: spec.clone(),
            tokenizer: Some(b"{\"model\":{}}".to_vec()),
            chat_template: Some("{{ messages }}".into()),
            generation: Generation { eos: vec![2], bos: Some(1), temperature: Some(0.5), ..Default::default() },
            provenance: serde_json::json!({"source": "test", "bits": 4}),
        };
        let mut writer = FileWriter::create(&path, &meta, plans.clone())?;
        for plan in &plans {
            let (n, k) = if plan.dims.len() == 2 { (plan.dims[0], plan.dims[1]) } else { (1, plan.dims[0]) };
            writer.write(&vec![0; plan.scheme.planes(n, k).ok_or("a size overflows")?.total as usize])?;
        }
        writer.finish()?;
        let file = fs::read(&path)?;
        fs::remove_file(&path)?;
        let last = file.iter().rposition(|&b| b != 0).ok_or("the file is zero")?;
        let head = &file[..=last];
        for mode in 0..2 {
            let seed = [&[mode][..], head].concat();
            assert!(qrn::passes(&seed));
            save("qrn", &format!("{name}-{mode}"), &seed)?;
        }
        let at = u64::from_le_bytes(head[64 + 5 * 24 + 8..][..8].try_into()?) as usize;
        let texts = [
            serde_json::to_string(&meta.spec)?,
            serde_json::to_string(&meta.generation)?,
            meta.provenance.to_string(),
            "{{ messages }}".into(),
            "{\"model\":{}}".into(),
        ];
        let texts = texts.map(|t| [t.as_bytes(), &[0xff]].concat()).concat();
        let table = &head[at..];
        for (mode, rest) in [(2u8, table), (3, &[0, 64, 65, 70, 75, 80, 110, 1, 2][..])] {
            for rotate in [0, 5] {
                let seed = [&[mode | rotate << 5], &texts[..], rest].concat();
                assert!(qrn::passes(&seed));
                save("qrn", &format!("{name}-{mode}-{rotate}"), &seed)?;
            }
        }
    }
    Ok(())
}

fn safetensors_seeds() -> Result<(), Box<dyn Error>> {
    let two = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"I32","shape":[1],"data_offsets":[4,8]},"a":{"dtype":"F16","shape":[2,1],"data_offsets":[0,4]}}"#;
    let layer = r#"{"m.q.qweight":{"dtype":"I32","shape":[4,32],"data_offsets":[0,512]},"m.q.qzeros":{"dtype":"I32","shape":[1,4],"data_offsets":[512,528]},"m.q.scales":{"dtype":"F16","shape":[1,32],"data_offsets":[528,592]},"m.q.g_idx":{"dtype":"I32","shape":[32],"data_offsets":[592,720]},"e":{"dtype":"BF16","shape":[],"data_offsets":[720,722]},"z":{"dtype":"F4","shape":[0,7],"data_offsets":[722,722]}}   "#;
    let whole = |h: &str, data: usize| [&(h.len() as u64).to_le_bytes()[..], h.as_bytes(), &vec![7; data]].concat();
    let seeds = [
        ("whole", [&[0][..], &whole(two, 8)].concat()),
        ("whole-layer", [&[0][..], &whole(layer, 722)].concat()),
        ("empty", [&[0][..], &whole("{}", 0)].concat()),
        ("header", [&[1, 8, 0][..], two.as_bytes()].concat()),
        ("header-layer", [&[2][..], layer.as_bytes()].concat()),
        ("made", vec![3, b'n', 1, 1, 0, 0, 0, 0, 4, 0, 0, 1, 0, 1, 0, 1, 5]),
    ];
    for (name, seed) in seeds {
        assert!(name == "made" || safetensors::passes(&seed), "{name}");
        save("safetensors", name, &seed)?;
    }
    Ok(())
}

fn gguf_seeds() -> Result<(), Box<dyn Error>> {
    let tiny = gguf::tiny();
    let old = [&tiny[..4], &[2], &tiny[5..]].concat();
    // llama-bpe adds a beginning token, so this has a post-processor; the others do not.
    let named = |pre: &str| {
        let at = tiny.windows(9).position(|w| w == b"llama-bpe").ok_or("no pre-tokenizer")?;
        let (before, after) = (&tiny[..at - 8], &tiny[at + 9..]);
        Ok::<_, Box<dyn Error>>([before, &(pre.len() as u64).to_le_bytes(), pre.as_bytes(), after].concat())
    };
    let files =
        [("llama-bpe", tiny.clone()), ("version-2", old), ("qwen2", named("qwen2")?), ("smollm", named("smollm")?)];
    for (name, file) in files {
        let seed = [&[1][..], &file].concat();
        assert!(gguf::passes(&seed), "{name}");
        save("gguf", name, &seed)?;
    }
    // Llama 3's rope factors, in front so that their bytes follow the header.
    let seed = [&[1][..], &gguf::llama3()].concat();
    assert!(gguf::passes(&seed), "llama3");
    save("gguf", "llama3", &seed)?;
    // Wide enough for super-blocks, of which zeros follow the header.
    let seed = [&[1][..], &gguf::super_blocks()].concat();
    assert!(gguf::passes(&seed), "super-blocks");
    save("gguf", "super-blocks", &seed)?;
    assert!(gguf::passes(&[3, 5]), "parts");
    save("gguf", "parts", &[3, 5])?;
    assert!(gguf::passes(&[2]));
    save("gguf", "changes", &[2])?;

    // Every kind of value, two tensors with their bytes.
    let text = |s: &str| [&(s.len() as u64).to_le_bytes()[..], s.as_bytes()].concat();
    let mut b = [&b"GGUF"[..], &3u32.to_le_bytes(), &2u64.to_le_bytes(), &14u64.to_le_bytes()].concat();
    let sizes = [1usize, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8];
    for (id, size) in sizes.iter().enumerate().filter(|(_, s)| **s > 0) {
        b.extend([text(&format!("k{id}")), (id as u32).to_le_bytes().into(), vec![1; *size]].concat());
    }
    b.extend([&text("list")[..], &[9, 0, 0, 0, 8, 0, 0, 0], &2u64.to_le_bytes(), &text("x"), &text("yz")].concat());
    b.extend([&text("numbers")[..], &[9, 0, 0, 0, 2, 0, 0, 0], &3u64.to_le_bytes(), &[1, 0, 2, 0, 3, 1]].concat());
    b.extend([&text("general.alignment")[..], &[4, 0, 0, 0, 64, 0, 0, 0]].concat());
    for (name, offset) in [("t", 0u64), ("u", 64)] {
        let (two, rows, one) = (2u32.to_le_bytes(), 32u64.to_le_bytes(), 1u64.to_le_bytes());
        b.extend([&text(name)[..], &two, &rows, &one, &2u32.to_le_bytes(), &offset.to_le_bytes()].concat());
    }
    b.resize(b.len().next_multiple_of(64), 0);
    b.extend([1; 82]);
    save("gguf", "values", &[&[0][..], &b].concat())
}
