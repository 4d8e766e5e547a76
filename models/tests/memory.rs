//! Opening a file allocates for its tables, not for its contents; weights stay in the shared map.
//! The only test of its binary, because it looks at the whole process.

#![allow(clippy::unwrap_used)]

use quern_models::{
    FileWriter, FloatType, Generation, Meta, ModelFile, Scheme, TensorPlan,
    spec::{Act, Attn, Layer, Mlp, ModelSpec, Norm, Rope, RopeScaling},
};

/// A line of /proc/self/status in kB; `None` on other systems.
fn status(name: &str) -> Option<i64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    text.lines().find_map(|l| l.strip_prefix(name))?.trim().trim_end_matches(" kB").parse().ok()
}

#[test]
fn opening_a_large_file_takes_little_memory() {
    if status("RssAnon:").is_none() {
        println!("SKIPPED memory::opening_a_large_file_takes_little_memory: needs /proc/self/status");
        return;
    }
    let norm = Norm::Rms { eps: 1e-5 };
    let rope = Rope { theta: 10000.0, scaling: RopeScaling::None };
    let spec = ModelSpec {
        family: "llama".into(),
        vocab: 16384,
        hidden: 1024,
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
        tied_head: true,
        head_order: false,
        positions: None,
        embed_scale: None,
        logit_cap: None,
        draft_head: None,
    };
    let float = Scheme::Float(FloatType::F32);
    let plans: Vec<_> =
        spec.tensors().into_iter().map(|t| TensorPlan { name: t.name, dims: t.dims, scheme: float }).collect();
    let meta = Meta {
        spec,
        tokenizer: Some(vec![b' '; 16 << 20]),
        chat_template: Some(" ".repeat(4 << 20)),
        generation: Generation::default(),
        provenance: serde_json::json!({}),
    };
    let path = std::env::temp_dir().join(format!("quern-memory-{}.qrn", std::process::id()));
    let mut writer = FileWriter::create(&path, &meta, plans.clone()).unwrap();
    for plan in plans {
        writer.write(&vec![1; plan.dims.iter().product::<u64>() as usize * 4]).unwrap();
    }
    writer.finish().unwrap();
    drop(meta);

    let before = status("RssAnon:").unwrap();
    let file = ModelFile::open(&path).unwrap();
    let opened = status("RssAnon:").unwrap() - before;
    file.verify().unwrap();
    let read = status("RssAnon:").unwrap() - before;
    assert!(file.file_len() > 84 << 20);
    assert!(opened < 1024 && read < 1024, "open allocated {opened} kB, reading everything {read} kB");
    std::fs::remove_file(path).unwrap();
}
