//! A layer as llama and its relatives have it, in models and in heads: sizes by the config's keys, and the modules.

use super::{Config, FamilyError, Rule, RuleKind, Take, Tensors, decoder::Usual, names::padded, rope};
use crate::spec::{Act, Attn, Layer, Mlp, Norm, Rope};

/// What all layers have alike.
pub(super) struct Sizes {
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub inner: usize,
    pub act: Act,
    pub eps: f32,
    /// Factor on the scores.
    pub scale: f32,
    pub rope: Rope,
    /// Of layers that see a window, where theirs differs.
    pub local_rope: Option<Rope>,
}

/// What a layer has besides.
pub(super) struct Parts<'a> {
    /// Its first norm's module, if it has one.
    pub norm: Option<&'a str>,
    /// Inputs of q, k and v.
    pub width: usize,
    /// Tokens seen, if not all.
    pub window: Option<usize>,
    /// q and k are turned.
    pub turned: bool,
    /// Biases of q, k and v; of o; of the MLP.
    pub qkv_bias: bool,
    pub o_bias: bool,
    pub mlp_bias: bool,
    /// Norms of the heads of q and k.
    pub qk_norm: bool,
    /// Soft cap of the scores.
    pub cap: Option<f32>,
    /// Norms of what attention and the MLP give; then the norm before the MLP has another name.
    pub post_norms: bool,
    /// Norms multiply by one plus their weights.
    pub one_plus: bool,
    /// Its MLP is a mixture.
    pub experts: Option<&'a Experts>,
}

/// A mixture of experts, and what its modules are called.
pub(super) struct Experts {
    pub count: usize,
    pub top: usize,
    pub inner: usize,
    pub normalized: bool,
    /// The router's module, what stands before an expert's number, and its gate, up and down.
    pub router: &'static str,
    pub each: &'static str,
    pub names: [&'static str; 3],
}

impl Sizes {
    /// Reads them, and the longest context; `up` is the MLP's module of a layer, which shows padding.
    pub fn read(
        config: &Config,
        tensors: &dyn Tensors,
        up: &str,
        usual: &Usual,
    ) -> Result<(Sizes, usize), FamilyError> {
        let (hidden, heads) = (config.size("hidden_size")?, config.size("num_attention_heads")?);
        let inner = config.size("intermediate_size")?;
        let context = config.size_or("max_position_embeddings", Some(usual.context))?;
        let (rope, local_rope, context) = match usual.local_theta {
            None => {
                let (rope, context) = rope::read(config, usual.theta, context)?;
                (rope, None, context)
            }
            Some(local) => {
                let ([rope, local], context) = rope::by_type(config, [usual.theta, local], context)?;
                (rope, Some(local), context)
            }
        };
        let head_dim = config.size_or("head_dim", Some(usual.head_dim.unwrap_or(hidden / heads)))?;
        let sizes = Sizes {
            hidden,
            heads,
            kv_heads: config.size_or("num_key_value_heads", Some(heads))?,
            head_dim,
            inner: padded(config, "intermediate_size", inner, tensors, up, false)?,
            act: config.act("hidden_act", Act::Silu)?,
            eps: config.float_or("rms_norm_eps", 1e-6)?,
            scale: 1.0 / (head_dim as f32).sqrt(),
            rope,
            local_rope,
        };
        Ok((sizes, context))
    }

    /// The norm of all norms.
    pub fn norm(&self) -> Norm {
        Norm::Rms { eps: self.eps }
    }

    /// A layer.
    pub fn layer(&self, parts: &Parts) -> Layer {
        let rope = self.local_rope.as_ref().filter(|_| parts.window.is_some()).unwrap_or(&self.rope);
        let post = || parts.post_norms.then(|| self.norm());
        Layer {
            attn_norm: parts.norm.map_or(Norm::Identity, |_| self.norm()),
            attn: Attn::Gqa {
                heads: self.heads,
                kv_heads: self.kv_heads,
                head_dim: self.head_dim,
                scale: self.scale,
                rope: parts.turned.then(|| rope.clone()),
                window: parts.window,
                cap: parts.cap,
                sinks: false,
                qk_norm: parts.qk_norm.then(|| self.norm()),
                qkv_bias: parts.qkv_bias,
                o_bias: parts.o_bias,
                attn_order: false,
                o_order: false,
            },
            attn_post_norm: post(),
            mlp_norm: self.norm(),
            mlp: match parts.experts {
                None => Mlp::Gated { inner: self.inner, act: self.act, bias: parts.mlp_bias, mlp_order: false },
                Some(&Experts { count, top, inner, normalized, .. }) => {
                    Mlp::Experts { experts: count, top, inner, act: self.act, normalized }
                }
            },
            mlp_post_norm: post(),
        }
    }

    /// Its rules: the spec's names begin with `to`, the source's modules with `from`.
    pub fn rules(&self, parts: &Parts, to: &str, from: &str) -> Vec<Rule> {
        let (hidden, inner, head_dim) = (self.hidden, self.inner, self.head_dim);
        let (q, kv) = (self.heads * head_dim, self.kv_heads * head_dim);
        let mut rules = vec![];
        let mut rule = |name: &str, module: &str, kind| {
            let (target, source) = (format!("{to}.{name}"), format!("{from}.{module}"));
            rules.push(Rule { target, source, kind, take: Take::WHOLE });
        };
        let linears = [
            ("q", "self_attn.q_proj", q, parts.width, parts.qkv_bias),
            ("k", "self_attn.k_proj", kv, parts.width, parts.qkv_bias),
            ("v", "self_attn.v_proj", kv, parts.width, parts.qkv_bias),
            ("o", "self_attn.o_proj", hidden, q, parts.o_bias),
            ("gate", "mlp.gate_proj", inner, hidden, parts.mlp_bias),
            ("up", "mlp.up_proj", inner, hidden, parts.mlp_bias),
            ("down", "mlp.down_proj", hidden, inner, parts.mlp_bias),
        ];
        let own = if parts.experts.is_some() { &linears[..4] } else { &linears };
        for &(name, module, n, k, bias) in own {
            rule(name, module, RuleKind::Linear { n, k });
            if bias {
                rule(&format!("{name}_bias"), module, RuleKind::Bias { n });
            }
        }
        if let Some(&Experts { count, inner, router, each, names, .. }) = parts.experts {
            rule("router", router, RuleKind::Router { n: count, k: hidden });
            for e in 0..count {
                let shapes = [("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)];
                for ((name, n, k), module) in shapes.into_iter().zip(names) {
                    rule(&format!("experts.{e}.{name}"), &format!("{each}.{e}.{module}"), RuleKind::Linear { n, k });
                }
            }
        }
        let weights = |n| if parts.one_plus { RuleKind::OnePlus { n } } else { RuleKind::Vector { n } };
        if let Some(norm) = parts.norm {
            rule("attn_norm", norm, weights(hidden));
        }
        if parts.post_norms {
            rule("attn_post_norm", "post_attention_layernorm", weights(hidden));
            rule("mlp_norm", "pre_feedforward_layernorm", weights(hidden));
            rule("mlp_post_norm", "post_feedforward_layernorm", weights(hidden));
        } else {
            rule("mlp_norm", "post_attention_layernorm", weights(hidden));
        }
        if parts.qk_norm {
            rule("q_norm", "self_attn.q_norm", weights(head_dim));
            rule("k_norm", "self_attn.k_norm", weights(head_dim));
        }
        rules
    }
}
