//! Configs of every family, and of what is refused.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::*;
use crate::spec::{Act, Attn, Layer, Mlp, Norm, Rope, RopeScaling};

fn changed(mut config: Value, change: Value) -> Value {
    for (key, value) in change.as_object().into_iter().flatten() {
        config[key] = value.clone();
    }
    config
}

fn config(change: Value) -> Value {
    let llama = json!({
        "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 320, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256, "rope_theta": 500000.0, "tie_word_embeddings": true,
    });
    changed(llama, change)
}

fn gpt2(change: Value) -> Value {
    let gpt2 =
        json!({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 320, "n_positions": 128});
    changed(gpt2, change)
}

fn gpt_neo(change: Value) -> Value {
    let neo = json!({
        "model_type": "gpt_neo", "hidden_size": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 320,
        "max_position_embeddings": 128, "attention_types": [[["global", "local"], 1]], "window_size": 16,
    });
    changed(neo, change)
}

fn read(config: &Value) -> FamilyPlan {
    plan(config, &()).unwrap()
}

fn rope(change: Value) -> Rope {
    let Attn::Gqa { rope, .. } = read(&config(change)).spec.layers.remove(0).attn;
    rope.unwrap()
}

fn windows(config: &Value) -> Vec<Option<usize>> {
    let window = |l: crate::spec::Layer| match l.attn {
        Attn::Gqa { window, .. } => window,
    };
    read(config).spec.layers.into_iter().map(window).collect()
}

#[test]
fn rules_and_spec_name_the_same_tensors() {
    let all = [
        config(json!({})),
        config(json!({"attention_bias": true, "mlp_bias": true})),
        config(json!({"model_type": "mistral"})),
        config(json!({"model_type": "qwen2"})),
        config(json!({"model_type": "qwen3", "attention_bias": true})),
        config(json!({"model_type": "smollm3"})),
        config(json!({"model_type": "mixtral", "num_local_experts": 3})),
        config(json!({"model_type": "qwen3_moe", "num_experts": 9, "mlp_only_layers": [0], "attention_bias": true})),
        config(json!({"model_type": "gemma2"})),
        config(json!({"model_type": "gemma3_text"})),
        gpt2(json!({})),
        gpt_neo(json!({})),
    ];
    for (config, tied) in all.iter().flat_map(|c| [(c, true), (c, false)]) {
        let mut plan = read(config);
        assert!(plan.spec.tied_head && plan.warnings.is_empty(), "{:?}", plan.warnings);
        plan.set_tied(tied);
        let shape = |kind| match kind {
            RuleKind::Linear { n, k } | RuleKind::Embedding { n, k } => vec![n as u64, k as u64],
            RuleKind::Head { n, k } | RuleKind::Table { n, k } | RuleKind::Router { n, k } => vec![n as u64, k as u64],
            RuleKind::Vector { n } | RuleKind::OnePlus { n } => vec![n as u64],
            RuleKind::Bias { n } | RuleKind::Tokens { n, .. } => vec![n as u64],
        };
        let rules: BTreeMap<_, _> = plan.rules.iter().map(|r| (r.target.clone(), shape(r.kind))).collect();
        let needed: BTreeMap<_, _> = plan.spec.tensors().into_iter().map(|t| (t.name, t.dims)).collect();
        assert_eq!(rules, needed, "{}", plan.spec.family);
        assert_eq!(rules.len(), plan.rules.len());
    }
}

/// The numbers of a layer of Gemma: scale, window, base and factor of its rope, cap.
fn gemma(layer: &Layer) -> (f32, Option<usize>, f32, f32, Option<f32>) {
    let Attn::Gqa { scale, window, ref rope, cap, .. } = layer.attn;
    let rope = rope.as_ref().unwrap();
    let factor = if let RopeScaling::Linear { factor } = rope.scaling { factor } else { 1.0 };
    (scale, window, rope.theta, factor, cap)
}

/// Configs as their makers published them, of which the old ones leave most to the class.
#[test]
fn gemmas_are_read_as_published() {
    let two = read(&json!({"model_type": "gemma2", "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "intermediate_size": 9216,
        "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4,
        "query_pre_attn_scalar": 224, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 4096,
        "vocab_size": 256000, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "cache_implementation": "hybrid"}));
    assert!(two.warnings.is_empty() && two.spec.tied_head, "{:?}", two.warnings);
    assert_eq!((two.spec.embed_scale, two.spec.logit_cap), (Some(48.0), Some(30.0)));
    let scale = (1.0 / 224f64.sqrt()) as f32;
    assert_eq!(gemma(&two.spec.layers[0]), (scale, Some(4096), 10000.0, 1.0, Some(50.0)));
    assert_eq!(gemma(&two.spec.layers[1]), (scale, None, 10000.0, 1.0, Some(50.0)));
    // Gemma 3 4B: the text part of a multimodal model.
    let three = read(&json!({"model_type": "gemma3", "vision_config": {}, "text_config": {"hidden_size": 2560,
        "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}}));
    assert!(three.warnings.is_empty() && three.spec.tied_head, "{:?}", three.warnings);
    assert_eq!((three.spec.vocab, three.spec.max_context, three.spec.logit_cap), (262208, 131072, None));
    assert_eq!(gemma(&three.spec.layers[4]), (0.0625, Some(1024), 10000.0, 1.0, None));
    assert_eq!(gemma(&three.spec.layers[5]), (0.0625, None, 1e6, 8.0, None));
    // Gemma 3 1B, and what transformers 5 makes of it.
    let one = |change: Value| {
        let mut config = json!({"model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912,
            "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
            "vocab_size": 262144, "sliding_window": 512, "sliding_window_pattern": 6, "rope_scaling": null,
            "rope_theta": 1000000, "rope_local_base_freq": 10000});
        config.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        config
    };
    let old = read(&one(json!({})));
    assert_eq!(gemma(&old.spec.layers[5]), (0.0625, None, 1e6, 1.0, None));
    let new = read(&one(json!({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}}})));
    assert_eq!((gemma(&new.spec.layers[5]).2, gemma(&new.spec.layers[0]).2), (1e6, 5000.0));
    let flat = plan_error(&one(json!({"rope_parameters": {"rope_type": "default"}})));
    assert!(flat.contains("rope_parameters: expected a table for each"), "{flat}");
    let both = plan_error(&one(json!({"use_bidirectional_attention": true})));
    assert!(both.contains("use_bidirectional_attention is true"), "{both}");
}

#[test]
fn rope_is_read_in_the_old_and_the_new_way() {
    assert_eq!(rope(json!({})), Rope { theta: 500000.0, scaling: RopeScaling::None });
    let new = json!({"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}});
    assert_eq!(rope(new).theta, 20000.0);
    let linear = rope(json!({"rope_scaling": {"type": "linear", "factor": 4}}));
    assert_eq!(linear.scaling, RopeScaling::Linear { factor: 4.0 });
    let llama3 = json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}});
    assert!(matches!(rope(llama3).scaling, RopeScaling::Llama3 { original_context: 8192, .. }));
    let mrope = json!({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}});
    assert_eq!(rope(mrope).scaling, RopeScaling::None);
}

#[test]
fn yarn_is_read_as_transformers_does() {
    let yarn = |change: Value| {
        let table =
            changed(json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}), change);
        let plan = read(&config(json!({"rope_scaling": table})));
        let Attn::Gqa { rope, .. } = &plan.spec.layers[0].attn;
        (rope.clone().unwrap().scaling, plan.spec.max_context, plan.warnings.len())
    };
    let usual = RopeScaling::Yarn {
        factor: 4.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_context: 64,
        // 0.1 ln 4 + 1
        attention_factor: 1.138_629_4,
        truncate: true,
    };
    assert_eq!(yarn(json!({})), (usual.clone(), 256, 0));
    assert_eq!(yarn(json!({"factor": null, "beta_fast": 0})).0, usual);
    assert_eq!(yarn(json!({"factor": 8.0})).1, 512);
    let factor = |change| match yarn(change).0 {
        RopeScaling::Yarn { attention_factor, .. } => attention_factor,
        other => panic!("{other:?}"),
    };
    assert_eq!(factor(json!({"attention_factor": 1.5})), 1.5);
    assert_eq!(factor(json!({"mscale": 1.0, "mscale_all_dim": 1.0})), 1.0);
    assert_eq!(factor(json!({"mscale": 0.707, "mscale_all_dim": 0.0})), 1.138_629_4);
    assert_eq!(yarn(json!({"new_key": 1})).2, 1);
}

#[test]
fn dynamic_rope_ends_where_it_would_begin() {
    let plan = read(&config(json!({"rope_scaling": {"type": "dynamic", "factor": 4.0}})));
    let Attn::Gqa { rope, .. } = &plan.spec.layers[0].attn;
    assert_eq!(rope.as_ref().unwrap().scaling, RopeScaling::None);
    assert_eq!(plan.spec.max_context, 256);
    assert!(plan.warnings.len() == 1 && plan.warnings[0].contains("256 tokens"), "{:?}", plan.warnings);
}

#[test]
fn windows_are_where_the_family_puts_them() {
    let mistral = |change| windows(&config(changed(json!({"model_type": "mistral"}), change)));
    assert_eq!(mistral(json!({"sliding_window": 16})), [Some(16); 2]);
    assert_eq!(mistral(json!({"sliding_window": null})), [None; 2]);
    assert_eq!(mistral(json!({})), [Some(4096); 2]);
    for family in ["qwen2", "qwen3"] {
        let qwen = |change| windows(&config(changed(json!({"model_type": family, "sliding_window": 16}), change)));
        assert_eq!(qwen(json!({"use_sliding_window": false, "max_window_layers": 1})), [None; 2]);
        assert_eq!(qwen(json!({"use_sliding_window": true, "max_window_layers": 1})), [None, Some(16)]);
        assert_eq!(qwen(json!({"use_sliding_window": true, "max_window_layers": 0})), [Some(16); 2]);
        // Silence is the class's 4096, null is none.
        let slides = json!({"model_type": family, "use_sliding_window": true, "max_window_layers": 1});
        assert_eq!(windows(&config(slides.clone())), [None, Some(4096)]);
        assert_eq!(windows(&config(changed(slides, json!({"sliding_window": null})))), [None; 2]);
        let types = json!({"layer_types": ["sliding_attention", "full_attention"]});
        assert_eq!(qwen(types), [Some(16), None]);
    }
    assert_eq!(windows(&gpt_neo(json!({}))), [None, Some(16)]);
    assert_eq!(windows(&gpt_neo(json!({"attention_types": [[["local"], 2]], "window_size": null}))), [Some(256); 2]);
}

#[test]
fn mixtures_are_in_the_layers_that_say_so() {
    let mlps = |change| read(&config(change)).spec.layers.into_iter().map(|l| l.mlp).collect::<Vec<_>>();
    let mixture = |experts, top, inner, normalized| Mlp::Experts { experts, top, inner, act: Act::Silu, normalized };
    let mixtral = mlps(json!({"model_type": "mixtral"}));
    assert_eq!(mixtral, [mixture(8, 2, 96, true), mixture(8, 2, 96, true)]);
    let qwen = |change| mlps(changed(json!({"model_type": "qwen3_moe", "num_hidden_layers": 4}), change));
    let mixed = |change| qwen(change).iter().map(Mlp::routed).collect::<Vec<_>>();
    assert_eq!(qwen(json!({}))[3], mixture(128, 8, 768, false));
    assert_eq!(mixed(json!({"mlp_only_layers": [0, 2]})), [false, true, false, true]);
    assert_eq!(mixed(json!({"decoder_sparse_step": 2})), [false, true, false, true]);
    assert_eq!(mixed(json!({"num_experts": 0})), [false; 4]);
    let error = plan_error(&config(json!({"model_type": "mixtral", "num_experts_per_tok": 9})));
    assert!(error.contains("layer 0: top is 9, expected 1 to 8"), "{error}");
    let many = json!({"model_type": "qwen3_moe", "num_hidden_layers": 4096, "num_experts": 4000000000u32});
    let error = plan_error(&config(many));
    assert!(error.contains("16384000000000 experts in all layers, expected up to 131072"), "{error}");
    let error = plan_error(&config(json!({"model_type": "qwen3_moe", "mlp_only_layers": "all"})));
    assert!(error.contains("mlp_only_layers: expected a list of whole numbers"), "{error}");
}

#[test]
fn smollm3_turns_three_layers_of_four() {
    let turned = |change| {
        let plan = read(&config(changed(json!({"model_type": "smollm3", "num_hidden_layers": 5}), change)));
        let turned = |l: &crate::spec::Layer| matches!(&l.attn, Attn::Gqa { rope: Some(_), .. });
        plan.spec.layers.iter().map(turned).collect::<Vec<_>>()
    };
    assert_eq!(turned(json!({})), [true, true, true, false, true]);
    assert_eq!(turned(json!({"no_rope_layer_interval": 2})), [true, false, true, false, true]);
    assert_eq!(turned(json!({"no_rope_layers": [0, 1, 1, 1, 0, 1]})), [false, true, true, true, false]);
    let slides = json!({"model_type": "smollm3", "use_sliding_window": true, "sliding_window": 8,
        "no_rope_layer_interval": 2});
    assert_eq!(windows(&config(slides)), [None, Some(8)]);
}

#[test]
fn gpts_have_their_own_scales_and_sizes() {
    let scales = |config: &Value| {
        let scale = |l: crate::spec::Layer| match l.attn {
            Attn::Gqa { scale, .. } => scale,
        };
        read(config).spec.layers.into_iter().map(scale).collect::<Vec<_>>()
    };
    let root = 1.0 / 32f32.sqrt();
    assert_eq!(scales(&gpt2(json!({}))), [root, root]);
    assert_eq!(scales(&gpt2(json!({"scale_attn_weights": false}))), [1.0, 1.0]);
    assert_eq!(scales(&gpt2(json!({"scale_attn_by_inverse_layer_idx": true}))), [root, root / 2.0]);
    assert_eq!(scales(&gpt_neo(json!({}))), [1.0, 1.0]);
    let plan = read(&gpt2(json!({"activation_function": "gelu"})));
    assert_eq!((plan.spec.positions, plan.spec.max_context), (Some(128), 128));
    assert_eq!(plan.spec.norm, Norm::Layer { eps: 1e-5 });
    assert_eq!(plan.spec.layers[0].mlp, Mlp::Plain { inner: 256, act: Act::Gelu, bias: true, mlp_order: false });
    let q = plan.rules.iter().find(|r| r.target == "layers.1.v").unwrap();
    assert_eq!(
        (q.source.as_str(), q.take),
        ("transformer.h.1.attn.c_attn", Take { transposed: true, part: Some((128, 192)) })
    );
}

/// Sizes by module.
struct Sizes(BTreeMap<&'static str, usize>);

impl Tensors for Sizes {
    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(std::iter::empty())
    }
    fn any(&self, _: &str) -> bool {
        false
    }
    fn outputs(&self, module: &str, _: bool, _: usize) -> Option<usize> {
        self.0.get(module).copied()
    }
}

#[test]
fn padded_sizes_come_from_the_tensors() {
    let sizes = Sizes(BTreeMap::from([("model.embed_tokens", 384), ("model.layers.0.mlp.up_proj", 128)]));
    let plan = plan(&config(json!({})), &sizes).unwrap();
    assert_eq!((plan.spec.vocab, plan.spec.layers[1].mlp.inner()), (384, 128));
    assert_eq!(plan.warnings.len(), 2);
    assert!(plan.warnings.iter().any(|w| w.contains("vocab_size is 320, but model.embed_tokens has 384 rows")));
}

#[test]
fn the_text_part_of_a_multimodal_config_is_taken() {
    let mut text = config(json!({"model_type": "mistral", "sliding_window": null}));
    for key in ["vocab_size", "tie_word_embeddings"] {
        text.as_object_mut().unwrap().remove(key);
    }
    let plan = read(&json!({"model_type": "llava", "text_config": text, "vision_config": {}, "new_key": 1}));
    assert_eq!((plan.spec.vocab, plan.spec.family.as_str()), (32000, "mistral"));
    assert!(plan.others.contains(&"vision_tower") && plan.spec.tied_head && plan.warnings.is_empty());
    assert_eq!(windows(&json!({"text_config": text})), [None; 2]);
    let untied = read(&json!({"text_config": text, "tie_word_embeddings": false}));
    assert!(!untied.spec.tied_head);
    let omni = json!({"thinker_config": {"text_config": config(json!({"model_type": "qwen2"}))}});
    assert_eq!(read(&omni).spec.family, "qwen2");
    let flat = read(&config(json!({"model_type": "qwen2_vl", "vision_config": {"depth": 2}})));
    assert!(flat.others.contains(&"visual") && flat.warnings.is_empty());
    assert!(read(&config(json!({}))).others.is_empty());
    let error = |config: Value| plan_error(&config);
    assert!(
        error(json!({"text_config": {"model_type": "gemma3n_text"}}))
            .contains("text_config.model_type \"gemma3n_text\"")
    );
    // Its text model sees the whole prompt from each token.
    let pali = json!({"model_type": "paligemma", "text_config": config(json!({"model_type": "gemma2"}))});
    assert!(error(pali).contains("paligemma"));
    assert!(error(json!({"text_config": config(json!({"hidden_act": "relu"}))})).contains("text_config.hidden_act"));
}

fn plan_error(config: &Value) -> String {
    plan(config, &()).unwrap_err().to_string()
}

#[test]
fn what_would_change_the_mathematics_is_refused_by_name() {
    for (change, words) in [
        (json!({"model_type": "mamba"}), "model_type \"mamba\""),
        (json!({"qkv_bias": true}), "qkv_bias is true"),
        (json!({"hidden_act": "relu"}), "hidden_act"),
        (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor is 0.5"),
        (json!({"sliding_window": 16}), "sliding_window is 16"),
        (json!({"layer_types": ["full_attention", "sliding_attention"]}), "layer_types is"),
        (json!({"model_type": "qwen2", "layer_types": ["full_attention", "linear_attention"]}), "linear_attention"),
        (json!({"model_type": "qwen2", "layer_types": ["full_attention"]}), "layer_types: expected a list of 2"),
        (json!({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}), "sliding_window"),
        (json!({"model_type": "smollm3", "no_rope_layers": [1]}), "no_rope_layers"),
        (json!({"rope_scaling": {"type": "longrope", "factor": 2}}), "default, linear, dynamic, llama3 or yarn"),
        (json!({"rope_scaling": {"type": "yarn", "factor": 0}}), "must be finite and positive"),
        (json!({"rope_scaling": {"type": "yarn", "factor": 2, "truncate": 1}}), "truncate: expected true or false"),
        (json!({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}), "rope_parameters.full_attention"),
        (json!({"rope_parameters": {"partial_rotary_factor": 0.25}}), "partial_rotary_factor is 0.25"),
        (json!({"rope_scaling": {"type": "linear"}}), "rope_scaling.factor"),
        (json!({"rope_scaling": {"type": "linear", "factor": 0}}), "must be finite and positive"),
        (json!({"rope_scaling": {"rope_type": 3}}), "rope_type: expected a string"),
        (json!({"rms_norm_eps": -1.0}), "eps is -1"),
        (json!({"rms_norm_eps": 1e39}), "rms_norm_eps: expected a number that fits 32 bits"),
        (json!({"rope_scaling": {"factor": 8.0}}), "rope_type: expected a string"),
        (json!({"rope_scaling": "linear"}), "rope_scaling: expected an object"),
        (json!({"hidden_size": "64"}), "hidden_size"),
        (json!({"num_hidden_layers": 1_000_000_000}), "num_hidden_layers is 1000000000, expected 1 to 4096"),
        (
            json!({"hidden_size": 1_000_000_000_000u64}),
            "hidden_size: expected a whole number from 1 to 4294967295, got 1",
        ),
        (json!({"num_key_value_heads": 3}), "kv_heads"),
        (json!({"head_dim": 7}), "head_dim"),
    ] {
        let error = plan_error(&config(change));
        assert!(error.contains(words), "{words}: {error}");
    }
    for (config, words) in [
        (gpt2(json!({"add_cross_attention": true})), "add_cross_attention is true"),
        (gpt2(json!({"activation_function": "relu"})), "activation_function"),
        (gpt2(json!({"n_head": 3})), "3 heads do not divide a width of 64"),
        (gpt2(json!({"scale_attn_weights": "no"})), "scale_attn_weights: expected true or false"),
        (gpt_neo(json!({"attention_types": [[["global"], 3]]})), "attention_types: expected lists"),
        (gpt_neo(json!({"attention_types": [[["global", "flat"], 1]]})), "attention_types"),
        (gpt_neo(json!({"attention_types": null})), "attention_types"),
        (json!([]), "expected an object"),
        (json!({}), "model_type: expected a string"),
    ] {
        let error = plan_error(&config);
        assert!(error.contains(words), "{words}: {error}");
    }
    assert!(plan_error(&config(json!({"model_type": "x"}))).contains("supported: llama, mistral, qwen2, "));
    let plan = read(&config(json!({"qkv_bias": false, "brand_new_key": 3})));
    assert!(plan.warnings.len() == 1 && plan.warnings[0].contains("brand_new_key"));
}
