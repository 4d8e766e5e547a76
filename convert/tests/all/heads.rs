//! Heads: every layout that is read, for the model that it is for, and what is refused.

use std::{fs, path::PathBuf};

use quern_convert::{ConvertError, Options, Progress, Quant, Report, Step, convert, convert_head, source::safetensors};
use quern_models::{
    ModelFile,
    spec::{Head, HeadKind, JoinedMethod, ModelSpec, Norm, States},
};
use serde_json::{Value, json};

use crate::made::*;

/// Notes of a conversion.
#[derive(Default)]
struct Notes(Vec<String>);

impl Progress for Notes {
    fn note(&mut self, text: &str) {
        self.0.push(text.into());
    }
    fn step(&mut self, _: &Step<'_>) {}
}

/// A head that may be changed, and its model.
struct Case {
    scratch: Scratch,
    config: Value,
    tensors: Tensors,
}

impl Case {
    /// A copy of the fixture `heads/NAME`.
    fn new(name: &str) -> Case {
        let dir = fixture(&format!("heads/{name}"));
        let file = if name == "medusa" { "medusa_lm_head.safetensors" } else { "model.safetensors" };
        let bytes = fs::read(dir.join(file)).unwrap();
        let kind = |dtype: &str| {
            ["F32", "F16", "BF16", "I64", "BOOL"].into_iter().find(|k| k.eq_ignore_ascii_case(dtype)).unwrap()
        };
        let parsed = safetensors::parse(&bytes).unwrap();
        let tensors = parsed.into_iter().map(|(name, raw)| {
            let shape = raw.shape.iter().map(|&d| d as usize).collect();
            (name, (kind(raw.dtype.name()), shape, raw.bytes.to_vec()))
        });
        let config = serde_json::from_slice(&fs::read(dir.join("config.json")).unwrap()).unwrap();
        Case { scratch: Scratch::new(name), config, tensors: tensors.collect() }
    }

    fn dir(&self) -> PathBuf {
        self.scratch.model()
    }

    /// The model, in its own subfolder.
    fn target(&self, name: &str, quant: Quant) -> ModelFile {
        let dir = self.scratch.0.join("target");
        fs::create_dir_all(&dir).unwrap();
        let (path, options) = (dir.join("model.qrn"), Options { quant, force: true, ..Options::default() });
        convert(&fixture(name), &path, &options, &mut ()).unwrap();
        ModelFile::open(&path).unwrap()
    }

    fn convert(&self, model: &ModelFile, options: &Options) -> Result<(Report, ModelFile, Vec<String>), ConvertError> {
        write(&self.dir(), &self.config, &self.tensors, "model.safetensors");
        let (out, mut notes) = (self.scratch.out(), Notes::default());
        let result = convert_head(&self.dir(), model, &out, false, options, &mut notes);
        let files = fs::read_dir(&self.scratch.0).unwrap().filter(|e| e.as_ref().unwrap().path().is_file()).count();
        assert_eq!(files, result.is_ok() as usize, "{:?}", result.as_ref().err());
        let report = result?;
        let file = ModelFile::open(&out).unwrap();
        file.verify().unwrap();
        fs::remove_file(&out).unwrap();
        Ok((report, file, notes.0))
    }
}

const TARGETS: [(&str, &str); 6] = [
    ("eagle1", "models/llama"),
    ("eagle1-no-bias", "models/llama"),
    ("eagle3", "models/llama"),
    ("eagle3-speculators", "models/smollm3"),
    ("medusa", "models/llama"),
    ("dflash", "models/smollm3"),
];

fn of(name: &str) -> (ModelSpec, Head, Vec<String>, Vec<String>) {
    let case = Case::new(name);
    let model = case.target(TARGETS.iter().find(|t| t.0 == name).unwrap().1, Quant::Keep);
    let (_, file, notes) = case.convert(&model, &Options::default()).unwrap();
    let names = file.tensors().iter().map(|t| t.name.clone()).filter(|n| !n.starts_with("layers.")).collect();
    assert!(file.tokenizer_json().is_none() && file.chat_template().is_none());
    (file.spec().clone(), file.spec().draft_head.clone().unwrap(), names, notes)
}

fn rms(eps: f32) -> Norm {
    Norm::Rms { eps }
}

#[test]
fn every_layout_becomes_what_its_makers_compute() {
    let before = |layers: &[usize]| States::Before { layers: layers.to_vec() };
    let joined = |bias| HeadKind::Joined {
        method: JoinedMethod::Eagle,
        embed_norm: Norm::Identity,
        state_norm: Norm::Identity,
        state_first: false,
        bias,
        zero_first: false,
        normed: false,
    };
    let wide = |eps, normed_residual| HeadKind::Wide {
        embed_norm: rms(eps),
        state_norm: rms(eps),
        normed_residual,
        normed: false,
    };
    let all = [
        ("eagle1", "eagle", States::Normed, joined(true), rms(1e-3), &["project", "project_bias"][..], (true, true)),
        ("eagle1-no-bias", "eagle", States::Normed, joined(false), rms(1e-3), &["project"], (true, true)),
        (
            "eagle3",
            "eagle3",
            before(&[0, 1, 2]),
            wide(1e-3, false),
            rms(1e-3),
            &["fuse", "embed_norm", "state_norm", "norm", "head", "tokens"],
            (true, false),
        ),
        (
            "eagle3-speculators",
            "eagle3",
            before(&[0, 1, 2]),
            wide(1e-6, true),
            rms(1e-6),
            &["fuse", "embed_norm", "state_norm", "norm", "head", "tokens"],
            (true, false),
        ),
        (
            "dflash",
            "dflash",
            before(&[1, 2]),
            HeadKind::Block { size: 4, mask: 319, state_norm: rms(1e-3) },
            rms(1e-3),
            &["fuse", "state_norm", "norm"],
            (true, true),
        ),
    ];
    for (name, family, states, kind, mlp_norm, tensors, shared) in all {
        let (spec, head, names, _) = of(name);
        assert_eq!((&*spec.family, &head.states, &head.kind), (family, &states, &kind), "{name}");
        assert_eq!((head.shared_embed, head.shared_head), shared, "{name}");
        assert_eq!(spec.layers[0].mlp_norm, mlp_norm, "{name}");
        let first = if family == "dflash" { rms(1e-3) } else { Norm::Identity };
        assert_eq!(spec.layers[0].attn_norm, first, "{name}");
        assert_eq!(spec.norm.weighted(), family != "eagle", "{name}");
        assert_eq!(names, tensors, "{name}");
        assert_eq!((head.model_hidden, head.model_vocab, spec.max_context), (128, 320, 256), "{name}");
    }
    let (_, _, _, notes) = of("eagle3-speculators");
    assert!(notes.len() == 1 && notes[0].contains("model's own"), "{notes:?}");
    let (spec, head, names, _) = of("medusa");
    assert_eq!((head.kind, head.states), (HeadKind::Medusa { guesses: 3, depth: 1 }, States::Normed));
    assert!(spec.layers.is_empty() && names.len() == 9, "{names:?}");
}

#[test]
fn tokens_are_mapped_whichever_way_they_are_stored() {
    let mut case = Case::new("eagle3");
    let model = case.target("models/llama", Quant::Keep);
    let tokens = |case: &Case| {
        let (report, file, _) = case.convert(&model, &Options::default()).unwrap();
        assert!(report.verified.floats > 0);
        let view = file.tensor("tokens").unwrap();
        (0..view.k).map(|i| view.at(0, i) as i64).collect::<Vec<_>>()
    };
    let ids = tokens(&case);
    let t2d = case.tensors["t2d"].2.clone();
    let flagged: Vec<i64> = (0..320).filter(|&i| t2d[i as usize] != 0).collect();
    assert_eq!(ids, flagged);
    case.tensors.get_mut("d2t").unwrap().2 = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    assert_eq!(tokens(&case), ids);
    case.tensors.remove("t2d");
    assert_eq!(tokens(&case), ids);
}

#[test]
fn what_does_not_fit_is_named() {
    type Change = fn(&mut Case);
    let cases: &[(&str, Change, &str)] = &[
        ("eagle3", |c| drop(c.tensors.remove("fc.weight")), "fc.weight is missing"),
        ("eagle3", |c| drop(c.tensors.remove("norm.weight")), "norm.weight is missing"),
        ("eagle3", |c| drop(c.tensors.remove("lm_head.weight")), "lm_head.weight is missing"),
        ("eagle3", |c| drop(c.tensors.remove("d2t")), "lm_head without d2t"),
        ("eagle3", |c| drop(c.tensors.remove("midlayer.hidden_norm.weight")), "midlayer.hidden_norm.weight is missing"),
        ("eagle3", |c| drop(c.tensors.remove("midlayer.mlp.down_proj.weight")), "down_proj.weight is missing"),
        ("eagle3", |c| drop(c.tensors.insert("input_norm.weight".into(), ("F32", vec![1], vec![1; 4]))), "input_norm"),
        ("eagle3", |c| drop(c.tensors.insert("midlayer.x".into(), ("F32", vec![1], vec![1; 4]))), "midlayer.x"),
        ("eagle3", |c| c.config["hidden_size"] = json!(64), "shares tensors of width 128, expected hidden, 64"),
        ("eagle3", |c| c.config["target_hidden_size"] = json!(256), "target_hidden_size: expected 128"),
        ("eagle3", |c| c.config["vocab_size"] = json!(321), "vocab_size: expected 320 tokens"),
        ("eagle3", |c| c.config["norm_before_fc"] = json!(true), "norm_before_fc"),
        ("eagle3", |c| c.config["num_hidden_layers"] = json!(2), "layers.1."),
        ("eagle3", |c| c.config["num_hidden_layers"] = json!(1u64 << 40), "num_hidden_layers"),
        ("eagle3", |c| c.config["num_attention_heads"] = json!(3), "head_dim is 42"),
        ("eagle3", |c| c.config["eagle_aux_hidden_state_layer_ids"] = json!([0, 1, 3]), "at most 2"),
        ("eagle3", |c| c.config["eagle_aux_hidden_state_layer_ids"] = json!([1, 0, 2]), "ascending"),
        ("eagle3", |c| c.config["eagle_aux_hidden_state_layer_ids"] = json!([0, 1]), "fc.weight: shape"),
        ("eagle3", |c| c.config["eagle_aux_hidden_state_layer_ids"] = json!("all"), "eagle_aux_hidden_state_layer_ids"),
        ("eagle3", |c| c.config["eagle_aux_hidden_state_layer_ids"] = json!(null), "not given, so the usual ones"),
        ("eagle3", |c| c.config["speculators_model_type"] = json!("peagle"), "speculators_model_type"),
        ("eagle3", |c| c.tensors.get_mut("d2t").unwrap().2[0] = 255, "d2t: values"),
        ("eagle3", |c| c.tensors.get_mut("d2t").unwrap().1 = vec![48, 2], "d2t: shape"),
        ("eagle3", |c| c.tensors.get_mut("d2t").unwrap().2[7] = 128, "d2t: values"),
        ("eagle1", |c| c.config["hidden_size"] = json!(64), "hidden_size: expected 128"),
        ("eagle1", |c| drop(c.tensors.remove("layers.0.self_attn.o_proj.weight")), "o_proj.weight is missing"),
        (
            "eagle1",
            |c| c.tensors.get_mut("embed_tokens.weight").unwrap().1 = vec![160, 256],
            "embed_tokens: expected 320",
        ),
        ("medusa", |c| drop(c.tensors.remove("1.1.weight")), "1.1.weight is missing"),
        ("medusa", |c| drop(c.tensors.remove("1.0.linear.bias")), "1.0.linear.bias is missing"),
        ("medusa", |c| drop(c.tensors.remove("1.0.linear.weight")), "1.0.linear.weight is missing"),
        ("medusa", |c| c.tensors.get_mut("0.1.weight").unwrap().1 = vec![160, 256], "0.1: expected 320"),
        ("dflash", |c| c.config["dflash_config"]["mask_token_id"] = json!(320), "mask"),
        ("dflash", |c| c.config["dflash_config"]["mask_token_id"] = json!(-1), "dflash_config.mask_token_id"),
        ("dflash", |c| c.config["dflash_config"]["causal"] = json!(true), "dflash_config.causal"),
        (
            "dflash",
            |c| c.config["dflash_config"]["target_layer_ids"] = json!([0, 99]),
            "dflash_config.target_layer_ids",
        ),
        ("dflash", |c| c.config["layer_types"] = json!(["full_attention", "sliding_attention"]), "layer_types"),
        ("dflash", |c| c.config["block_size"] = json!(1), "blocks of 1"),
        ("dflash", |c| drop(c.tensors.remove("hidden_norm.weight")), "hidden_norm.weight is missing"),
        ("eagle1", |c| c.tensors.retain(|n, _| !n.starts_with("fc")), "no head that this version knows"),
    ];
    let mut wrong = vec![];
    for (name, change, expected) in cases {
        let mut case = Case::new(name);
        let model = case.target(TARGETS.iter().find(|t| t.0 == *name).unwrap().1, Quant::Keep);
        change(&mut case);
        let text = case.convert(&model, &Options::default()).err().map(|e| e.to_string()).unwrap_or_default();
        if !text.contains(expected) {
            wrong.push(format!("{name}: expected {expected:?} in: {text:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // Another model.
    let case = Case::new("eagle1-no-bias");
    let model = case.target("heads/mimo", Quant::Keep);
    let text = case.convert(&model, &Options::default()).err().unwrap().to_string();
    assert!(text.contains("hidden_size: expected 64, the width of the model"), "{text}");
}

#[test]
fn layers_of_the_model_are_named_in_several_ways() {
    let mut case = Case::new("eagle3");
    let model = case.target("models/llama", Quant::Keep);
    // NVIDIA's: what layers output.
    case.config.as_object_mut().unwrap().remove("eagle_aux_hidden_state_layer_ids");
    case.config["eagle_config"] = json!({"eagle_aux_hidden_state_layer_ids": [0, 1]});
    let fc = case.tensors.get_mut("fc.weight").unwrap();
    *fc = ("F16", vec![128, 256], fc.2[..128 * 256 * 2].to_vec());
    let (_, file, _) = case.convert(&model, &Options::default()).unwrap();
    let head = file.spec().draft_head.clone().unwrap();
    assert_eq!(head.states, States::Before { layers: vec![1, 2] });
}

#[test]
fn copies_of_the_models_tensors_are_left_out() {
    for (quant, change, shared) in
        [(Quant::Keep, 0, true), (Quant::Int4, 0, true), (Quant::Int8, 0, true), (Quant::Int4, 0x80, false)]
    {
        let mut case = Case::new("eagle1");
        let model = case.target("models/llama", quant);
        case.tensors.get_mut("embed_tokens.weight").unwrap().2.iter_mut().skip(1).step_by(2).for_each(|b| *b ^= change);
        let (_, file, notes) = case.convert(&model, &Options::default()).unwrap();
        assert_eq!(file.spec().draft_head.as_ref().unwrap().shared_embed, shared, "{quant:?} {change}");
        assert_eq!(file.tensor("embed").is_none(), shared);
        assert_eq!(notes.iter().any(|n| n.contains("embed_tokens.weight is the model's own")), shared, "{notes:?}");
    }
}

#[test]
fn a_head_is_quantized_unless_asked_otherwise() {
    let case = Case::new("eagle3");
    let model = case.target("models/llama", Quant::Keep);
    let scheme = |options: &Options| {
        let (_, file, _) = case.convert(&model, options).unwrap();
        ["layers.0.q", "head", "norm", "tokens"]
            .map(|name| file.tensors().iter().find(|t| t.name == name).unwrap().scheme.to_string())
    };
    let quant = |quant, head_quant| Options { quant, head_quant, ..Options::default() };
    assert_eq!(scheme(&quant(Quant::Keep, Some(Quant::Keep))), ["f16", "f16", "f16", "f32"]);
    assert_eq!(scheme(&quant(Quant::Int8, Some(Quant::Keep)))[0], "f16");
    let ways = [
        (Quant::Keep, None, "int8"),
        (Quant::F16, None, "int8"),
        (Quant::Int8, None, "int8"),
        (Quant::Int4, None, "int4"),
        (Quant::Int4, Some(Quant::Int8), "int8"),
        (Quant::Keep, Some(Quant::Int4), "int4"),
    ];
    for (model, head, expected) in ways {
        let [q, lm_head, norm, tokens] = scheme(&quant(model, head));
        assert!(q.starts_with(expected) && lm_head.starts_with(expected), "{model:?} {head:?}: {q} {lm_head}");
        assert_eq!([norm, tokens], ["f16", "f32"]);
    }
}

#[test]
fn a_models_own_head_is_kept_and_can_be_grafted() {
    let case = Case::new("mimo");
    let convert_to = |name: &str, options: &Options| {
        write(&case.dir(), &case.config, &case.tensors, "model.safetensors");
        let (out, mut notes) = (case.scratch.0.join(name), Notes::default());
        convert(&case.dir(), &out, options, &mut notes).map(|report| (report, ModelFile::open(&out).unwrap(), notes.0))
    };
    let (report, whole, notes) = convert_to("whole.qrn", &Options::default()).unwrap();
    whole.verify().unwrap();
    let head = whole.draft().unwrap();
    assert_eq!((&*whole.spec().family, whole.spec().layers.len()), ("mimo", 2));
    assert!(whole.tokenizer_json().is_some() || notes.iter().any(|n| n.contains("no tokenizer")));
    let rms = || rms(1e-5);
    let guesses = head.spec().draft_head.clone().unwrap();
    let kind = HeadKind::Joined {
        method: JoinedMethod::Mtp,
        embed_norm: rms(),
        state_norm: rms(),
        state_first: true,
        bias: false,
        zero_first: true,
        normed: true,
    };
    assert_eq!((guesses.kind, guesses.states), (kind, States::Before { layers: vec![2] }));
    assert!(guesses.shared_embed && guesses.shared_head);
    assert_eq!(report.head.unwrap().file_bytes, head.file_len());
    assert!(!notes.iter().any(|n| n.contains("num_nextn_predict_layers")), "{notes:?}");

    // The same from a checkpoint without it, and from one that has only the head.
    let mut bare = Case::new("mimo");
    bare.tensors.retain(|name, _| !name.contains("mtp_layers"));
    write(&bare.dir(), &bare.config, &bare.tensors, "model.safetensors");
    let (out, mut notes) = (bare.scratch.out(), Notes::default());
    convert(&bare.dir(), &out, &Options::default(), &mut notes).unwrap();
    let model = ModelFile::open(&out).unwrap();
    assert!(model.draft().is_none());
    assert!(notes.0.iter().any(|n| n.contains("num_nextn_predict_layers is 1, but there is none")), "{:?}", notes.0);
    for only in [false, true] {
        let mut from = Case::new("mimo");
        from.tensors.retain(|name, _| !only || name.contains("mtp_layers"));
        let (_, file, _) = from.convert(&model, &Options::default()).unwrap();
        assert_eq!(file.spec(), head.spec());
        let same =
            |t: &quern_models::TensorInfo| file.tensor(&t.name).unwrap().codes == head.tensor(&t.name).unwrap().codes;
        assert!(head.tensors().iter().all(same));
        let all = Options { force: true, ..Options::default() };
        convert_head(&from.dir(), &model, &out, true, &all, &mut ()).unwrap();
        let both = ModelFile::open(&out).unwrap();
        both.verify().unwrap();
        assert_eq!(both.draft().unwrap().spec(), head.spec());
    }

    // In the same conversion, and damaged: nothing is left behind.
    let options = Options { head: Some(fixture("heads/mimo")), ..Options::default() };
    let (_, again, notes) = convert_to("given.qrn", &options).unwrap();
    assert_eq!(again.draft().unwrap().spec(), head.spec());
    assert!(notes.iter().any(|n| n.contains("left out for the one of --head")), "{notes:?}");
    let options = Options { head: Some(fixture("heads/eagle3")), ..Options::default() };
    let text = convert_to("bad.qrn", &options).map(|_| ()).unwrap_err().to_string();
    assert!(text.contains("eagle3: config.json"), "{text}");
    assert!(fs::read_dir(&case.scratch.0).unwrap().all(|e| !e.unwrap().file_name().to_string_lossy().contains("bad")));
    let mut extra = Case::new("mimo");
    extra.tensors.insert("model.mtp_layers.1.input_proj.weight".into(), ("F32", vec![1], vec![1; 4]));
    write(&extra.dir(), &extra.config, &extra.tensors, "model.safetensors");
    extra.scratch.fails("model.mtp_layers.1.input_proj.weight");
    let mut less = Case::new("mimo");
    less.tensors.remove("model.mtp_layers.0.final_layernorm.weight");
    write(&less.dir(), &less.config, &less.tensors, "model.safetensors");
    less.scratch.fails("final_layernorm.weight is missing");
}

#[test]
fn what_is_no_model_or_no_safetensors_says_what_to_do() {
    for (name, _) in TARGETS {
        let case = Case::new(name);
        write(&case.dir(), &case.config, &case.tensors, "model.safetensors");
        case.scratch.fails("not a model; put it into its model's file (quern convert MODEL --head DIR)");
    }
    // Parts of a multimodal model are no head.
    let mut case = Case::new("mimo");
    case.config["vision_config"] = json!({});
    for name in ["vision_tower.fc.weight", "visual.0.0.linear.weight", "vision_tower.hidden_norm.weight"] {
        case.tensors.insert(name.into(), ("F32", vec![1], vec![1; 4]));
    }
    case.tensors.retain(|name, _| !name.contains("mtp_layers"));
    write(&case.dir(), &case.config, &case.tensors, "model.safetensors");
    case.scratch.convert(&Options::default()).unwrap();
    let case = Case::new("eagle1");
    let model = case.target("models/llama", Quant::Keep);
    for name in ["pytorch_model.bin", "medusa_lm_head.pt"] {
        let dir = case.scratch.0.join("pickle");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join(name), b"PK\x03\x04").unwrap();
        fs::write(dir.join("config.json"), case.config.to_string()).unwrap();
        for source in [dir.clone(), dir.join(name)] {
            let (out, options) = (case.scratch.out(), Options::default());
            let text = convert_head(&source, &model, &out, false, &options, &mut ()).err().unwrap().to_string();
            assert!(text.contains(&format!("torch.load(\"{name}\"")) && text.contains("save_file"), "{text}");
        }
        fs::remove_dir_all(&dir).unwrap();
    }
}
