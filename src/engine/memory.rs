//! What memory an engine needs, part by part, and what there is: known before anything is allocated.

use std::fmt;

use quern_kernels::{
    cpu::kv::BLOCK,
    cuda::MOST_ROWS,
    exec::{self, Device, DeviceMemory, HostMemory},
    memory::available,
};
use quern_models::{
    ModelFile, ModelSpec,
    spec::{Attn, HeadKind, Mlp},
};

use super::{EngineOptions, head::MANY};
use crate::{draft::Accept, sched::LOGIT_ROWS};

/// Bytes, part by part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Where.
    pub device: Device,
    /// The mapped file; on a GPU what is uploaded.
    pub weights: u64,
    /// Keys and values; touched as they fill.
    pub cache: u64,
    /// Activations, logits, the program itself: an estimate from above.
    pub scratch: u64,
    /// Requests that a server receives and reads.
    pub requests: u64,
    /// What the system can give: free memory and file pages, within this process's limit. `None` if it does not say.
    pub available: Option<u64>,
    /// Tokens that the cache holds.
    pub tokens: usize,
    /// Bytes of a token's keys and values.
    pub token_bytes: u64,
    /// Most layers that would fit the GPU, if not all of those do that are to be there.
    pub gpu_layers: Option<usize>,
    /// Of a GPU that has some of the layers: the plan of the others, on the CPU.
    pub host: Option<Box<MemoryPlan>>,
    /// All layers are in this plan.
    pub whole: bool,
}

/// A plan that does not fit.
#[derive(Debug, thiserror::Error)]
#[error(
    "{} {}: {} weights, {} cache for {} tokens, {} scratch{}; {} are there; {advice}",
    plan.who(), size(plan.needed()), size(plan.weights), size(plan.cache), plan.tokens, size(plan.scratch), plan.of_requests(", "),
    size(plan.available.unwrap_or(0))
)]
pub struct TooLarge {
    plan: Box<MemoryPlan>,
    advice: String,
}

impl MemoryPlan {
    pub(super) fn new(file: &ModelFile, options: &EngineOptions) -> MemoryPlan {
        let spec = file.spec();
        let blocks = options.blocks_of(spec);
        let plan = |device, weights, block: u64, scratch, available| MemoryPlan {
            device,
            weights,
            cache: block.saturating_mul(blocks as u64),
            scratch,
            requests: 0,
            available,
            tokens: blocks.saturating_mul(BLOCK),
            token_bytes: block / BLOCK as u64,
            gpu_layers: None,
            host: None,
            whole: true,
        };
        let there = exec::device_memory(file, &options.exec(spec));
        let Some(DeviceMemory { weights, block, scratch: buffers, free, layers, host, shared }) = there else {
            let block = exec::block_bytes(spec, options.kv) as u64;
            let scratch = scratch(spec, rows_of(spec, options), logits_of(spec, options));
            return plan(options.device, file.file_len(), block, scratch, available());
        };
        let host = host.map(|HostMemory { weights, block }| {
            // A step is cut into the GPU's passes, and logits are there.
            let scratch = scratch(spec, options.rows().min(MOST_ROWS), 0);
            Box::new(MemoryPlan { whole: false, ..plan(Device::Cpu, weights, block, scratch, available()) })
        });
        let with = |n: &usize| MemoryPlan::new(file, &EngineOptions { gpu_layers: Some(*n), ..*options });
        let mut plan = MemoryPlan {
            gpu_layers: layers.filter(|n| with(n).fits()),
            whole: host.is_none(),
            host,
            ..plan(options.device, weights, block, buffers, free)
        };
        let used = plan.needed();
        if let Some(host) = plan.host.as_mut().filter(|_| shared) {
            host.available = host.available.map(|there| there.saturating_sub(used));
        }
        plan
    }

    /// Whether everything has room, where the system says how much there is.
    pub fn fits(&self) -> bool {
        self.available.is_none_or(|there| there >= self.needed()) && self.host.as_ref().is_none_or(|host| host.fits())
    }

    /// The plan of an engine with a small model or a head besides, which has as many blocks.
    pub fn with_draft(self, file: &ModelFile, options: &EngineOptions) -> MemoryPlan {
        let mut small = MemoryPlan::new(file, &EngineOptions { gpu_layers: None, ..*options });
        if let Some(head) = &file.spec().draft_head {
            // States of a step, kept by the model and by the head, and those of each text that wait to be read.
            let rows = 2 * options.rows() + options.sequences.saturating_mul(MANY);
            small.scratch = small.scratch.saturating_add(4 * (rows as u64).saturating_mul(head.width() as u64));
        }
        let block = small.token_bytes * BLOCK as u64;
        MemoryPlan {
            weights: self.weights.saturating_add(small.weights),
            cache: self.cache.saturating_add(block.saturating_mul((self.tokens / BLOCK) as u64)),
            scratch: self.scratch.saturating_add(small.scratch),
            token_bytes: self.token_bytes + small.token_bytes,
            ..self
        }
    }

    /// The plan of a server that gives so many bytes to requests that are not computed yet.
    /// On a GPU they do not count: they are in the host's memory, and the plan is of the device's.
    pub fn with_requests(self, requests: u64) -> MemoryPlan {
        let host = self.host.map(|host| Box::new(host.with_requests(requests)));
        let requests = if self.device == Device::Cpu { requests } else { 0 };
        MemoryPlan { requests, host, ..self }
    }

    /// Who needs it, for errors.
    fn who(&self) -> String {
        if self.whole { "the model needs".into() } else { format!("the layers on {} need", self.device) }
    }

    /// All parts together.
    pub fn needed(&self) -> u64 {
        self.weights.saturating_add(self.cache).saturating_add(self.beside())
    }

    /// What is needed beside weights and cache.
    fn beside(&self) -> u64 {
        self.scratch.saturating_add(self.requests)
    }

    /// The part of requests, where there is one.
    fn of_requests(&self, before: &str) -> String {
        if self.requests == 0 { String::new() } else { format!("{before}{} requests", size(self.requests)) }
    }

    /// Refuses a plan that does not fit; `context` are the tokens that the cache must hold at least.
    pub fn check(&self, context: usize) -> Result<(), TooLarge> {
        let Some(available) = self.available.filter(|&a| a < self.needed()) else {
            return self.host.as_ref().map_or(Ok(()), |host| host.check(context));
        };
        let left = available.saturating_sub(self.weights.saturating_add(self.beside()));
        let tokens = (left / self.token_bytes.max(1)) as usize / BLOCK * BLOCK;
        let advice = if tokens >= context {
            format!("--cache-tokens {tokens} would fit")
        } else if tokens >= 256 {
            format!("--ctx {tokens} --cache-tokens {tokens} would fit, --kv int8 halves the cache")
        } else {
            "close other programs, or take a smaller model".to_string()
        };
        let advice = match self.gpu_layers {
            None => advice,
            Some(n) if tokens < 256 => format!("--gpu-layers {n} would fit"),
            Some(n) => format!("{advice}, and so would --gpu-layers {n}"),
        };
        Err(TooLarge { plan: Box::new(self.clone()), advice })
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let &MemoryPlan { device, weights, cache, scratch, tokens, .. } = self;
        let [w, c, s, all] = [weights, cache, scratch, self.needed()].map(size);
        match device {
            Device::Cpu if self.whole => write!(f, "memory: {w} weights (mapped) + up to {c} cache")?,
            Device::Cpu => write!(f, "of the CPU: {w} weights (mapped) + up to {c} cache")?,
            _ => write!(f, "memory of {device}: {w} weights + {c} cache")?,
        }
        write!(f, " ({tokens} tokens) + about {s} scratch")?;
        write!(f, "{} = {all}", self.of_requests(" + up to "))?;
        if let Some(there) = self.available {
            write!(f, "; {} are there", size(there))?;
        }
        self.host.as_ref().map_or(Ok(()), |host| write!(f, "; {host}"))
    }
}

/// Rows of the largest step; a head reads those of a step, and what it has not read of every text, at once.
fn rows_of(spec: &ModelSpec, options: &EngineOptions) -> usize {
    let unread = if spec.draft_head.is_some() { options.sequences.saturating_mul(MANY) } else { 0 };
    options.rows().saturating_add(unread)
}

/// Logits that are there at once: of a model those of one row per sequence and of the rows of prompts that keep theirs.
/// Of a head those of its own tokens, and by the model's tokens those of all guesses; if they are judged by rejection, with
/// what each was drawn from (16 bytes a token, like four logits).
fn logits_of(spec: &ModelSpec, options: &EngineOptions) -> usize {
    let Some(head) = &spec.draft_head else { return spec.vocab.saturating_mul(options.sequences + LOGIT_ROWS) };
    // No more are guessed in a step.
    let sequences = options.sequences.min(LOGIT_ROWS);
    let (own, guesses) = match head.kind {
        HeadKind::Medusa { guesses, .. } => (sequences, sequences * guesses),
        HeadKind::Block { size, .. } => (LOGIT_ROWS.max(size), LOGIT_ROWS.max(size)),
        HeadKind::Joined { .. } | HeadKind::Wide { .. } => (LOGIT_ROWS, LOGIT_ROWS),
    };
    // Trees are made of logits, whatever the rule.
    let given = match options.speculation.accept {
        Accept::Exact => guesses,
        Accept::Rejection => guesses + 4 * LOGIT_ROWS,
    };
    own * spec.vocab + given * head.model_vocab
}

/// Buffers of the largest step: so many rows of every width, so many logits, and a fixed part.
fn scratch(spec: &ModelSpec, rows: usize, logits: usize) -> u64 {
    let widest = spec.layers.iter().map(|layer| {
        let Attn::Gqa { heads, kv_heads, head_dim, .. } = layer.attn;
        // Experts: the input again, the inside and the output of each, and what the router says.
        let mlp = match layer.mlp {
            Mlp::Gated { inner, .. } | Mlp::Plain { inner, .. } => 2 * inner,
            Mlp::Experts { experts, top, inner, .. } => top * (2 * spec.hidden + 2 * inner) + spec.hidden + experts,
        };
        // What a half of a layer gives, where a norm is behind it.
        let half = layer.attn_post_norm.is_some() || layer.mlp_post_norm.is_some();
        (2 * heads + 2 * kv_heads) * head_dim + mlp + if half { spec.hidden } else { 0 }
    });
    // What a head's rows begin with: embedding, state, both side by side, and the model's states.
    let begin = spec.draft_head.as_ref().map_or(0, |head| 4 * spec.hidden + head.width());
    let row = 3 * spec.hidden + begin + widest.max().unwrap_or(0);
    let numbers = (rows as u64).saturating_mul(row as u64).saturating_add(logits as u64);
    numbers.saturating_mul(4).saturating_add(32 << 20)
}

fn size(bytes: u64) -> String {
    crate::cli::size(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_that_does_not_fit_says_what_would() {
        let plan = |available| MemoryPlan {
            device: Device::Cpu,
            weights: 100_000_000,
            cache: 400_000_000,
            scratch: 50_000_000,
            requests: 0,
            available,
            tokens: 20_000,
            token_bytes: 20_000,
            gpu_layers: None,
            host: None,
            whole: true,
        };
        assert!(plan(Some(550_000_000)).check(4096).is_ok() && plan(None).check(4096).is_ok());
        let said = |available| plan(Some(available)).check(4096).unwrap_err().to_string();
        let some = said(400_000_000);
        assert!(some.contains("550.0 MB: 100.0 MB weights, 400.0 MB cache for 20000 tokens"), "{some}");
        assert!(some.ends_with("400.0 MB are there; --cache-tokens 12496 would fit"), "{some}");
        assert!(said(180_000_000).contains("--ctx 1488 --cache-tokens 1488"), "{}", said(180_000_000));
        let with = plan(Some(400_000_000)).with_requests(100_000_000);
        let text = with.check(4096).unwrap_err().to_string();
        assert!(text.contains("650.0 MB") && text.contains("50.0 MB scratch, 100.0 MB requests; "), "{text}");
        assert!(text.ends_with("--cache-tokens 7488 would fit"), "{text}");
        assert!(with.to_string().contains("50.0 MB scratch + up to 100.0 MB requests = 650.0 MB"), "{with}");
        assert!(said(120_000_000).contains("smaller model"));
    }

    #[test]
    fn a_plan_of_two_devices_is_of_both() {
        let side = |device, available| MemoryPlan {
            device,
            weights: 100_000_000,
            cache: 400_000_000,
            scratch: 50_000_000,
            requests: 0,
            available: Some(available),
            tokens: 20_000,
            token_bytes: 20_000,
            gpu_layers: None,
            host: None,
            whole: false,
        };
        let both = |gpu, cpu| MemoryPlan {
            gpu_layers: Some(3),
            host: Some(Box::new(side(Device::Cpu, cpu))),
            ..side(Device::Cuda(0), gpu)
        };
        let said = |gpu, cpu| both(gpu, cpu).check(4096).unwrap_err().to_string();
        let (enough, some, none) = (550_000_000, 400_000_000, 1_000_000);
        assert!(both(enough, enough).check(4096).is_ok() && both(enough, enough).fits());
        assert!(!both(some, enough).fits() && !both(enough, some).fits());
        let text = said(some, enough);
        assert!(text.starts_with("the layers on cuda:0 need 550.0 MB: "), "{text}");
        assert!(text.ends_with("--cache-tokens 12496 would fit, and so would --gpu-layers 3"), "{text}");
        assert!(said(none, none).ends_with("1.0 MB are there; --gpu-layers 3 would fit"), "{}", said(none, none));
        let text = said(enough, some);
        assert!(text.starts_with("the layers on cpu need ") && text.ends_with("12496 would fit"), "{text}");
        let with = both(enough, enough).with_requests(1_000_000);
        let text = with.check(4096).unwrap_err().to_string();
        assert!(text.contains("need 551.0 MB: ") && text.contains(", 1.0 MB requests; 550.0 MB are there"), "{text}");
        let text = with.to_string();
        assert!(text.starts_with("memory of cuda:0: 100.0 MB weights + 400.0 MB cache (20000 tokens) + "), "{text}");
        assert!(
            text.contains("; 550.0 MB are there; of the CPU: 100.0 MB weights (mapped) + up to 400.0 MB"),
            "{text}"
        );
    }
}
