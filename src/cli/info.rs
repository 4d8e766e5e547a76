//! `quern info`: what a file holds.

mod mechanisms;

use std::{collections::BTreeMap, error::Error, fmt::Write, path::PathBuf};

use clap::Args;
use quern_kernels::{cores::default_threads, cpu::isa::Isa, cuda};
use quern_models::{ModelFile, spec::Attn};
use serde_json::json;

use super::{one_line, open_any, print, size};

/// Flags of `quern info`.
#[derive(Debug, Args)]
pub struct InfoArgs {
    /// A .qrn file
    #[arg(required_unless_present = "devices")]
    file: Option<PathBuf>,
    /// List what models can run on here
    #[arg(long, conflicts_with_all = ["file", "tensors", "json", "verify"])]
    devices: bool,
    /// List every tensor
    #[arg(long)]
    tensors: bool,
    /// Print JSON (with every tensor if --tensors)
    #[arg(long)]
    json: bool,
    /// Read the whole file and compare every hash
    #[arg(long)]
    verify: bool,
}

/// Runs the command.
pub fn main(args: InfoArgs) -> Result<(), Box<dyn Error>> {
    let Some(path) = &args.file else { return print(&devices()) };
    let file = open_any(path)?;
    let verified =
        if args.verify { Some(file.verify().map_err(|e| format!("{}: {e}", path.display()))?) } else { None };
    if args.json {
        let mut all = json!({
            "file": path.display().to_string(),
            "bytes": file.file_len(),
            "draft_bytes": file.draft().map(|draft| draft.file_len()),
            "draft_spec": file.draft().map(|draft| draft.spec()),
            "spec": file.spec(),
            "generation": file.generation(),
            "provenance": file.provenance(),
            "tokenizer": file.tokenizer_json().map(<[u8]>::len),
            "chat_template": file.chat_template(),
            "schemes": schemes(&file).into_iter().map(|(name, s)| json!({
                "scheme": name, "tensors": s.tensors, "weights": s.weights, "bytes": s.bytes
            })).collect::<Vec<_>>(),
        });
        if args.tensors {
            let one = |t: &quern_models::TensorInfo| {
                json!({
                    "name": t.name, "shape": t.dims, "scheme": t.scheme.to_string(), "offset": t.offset,
                    "bytes": t.len, "xxh3": format!("{:016x}", t.hash),
                })
            };
            all["tensors"] = file.tensors().iter().map(one).collect();
        }
        if let Some(v) = verified {
            all["verified"] = json!({"tensors": v.tensors, "bytes": v.bytes});
        }
        return print(&format!("{}\n", serde_json::to_string_pretty(&all)?));
    }
    let mut text = summary(&path.display().to_string(), &file)?;
    if args.tensors {
        writeln!(text, "\n{:32} {:>16} {:24} {:>12} {:>14}", "tensor", "shape", "scheme", "bytes", "offset")?;
        for t in file.tensors() {
            let shape = t.dims.iter().map(u64::to_string).collect::<Vec<_>>().join(" x ");
            writeln!(text, "{:32} {shape:>16} {:24} {:>12} {:>14}", t.name, t.scheme.to_string(), t.len, t.offset)?;
        }
    }
    if let Some(v) = verified {
        writeln!(text, "verified     every hash is right: header and {} tensors, {} bytes", v.tensors, v.bytes)?;
    }
    print(&text)
}

/// One line a device, and why there is none of NVIDIA's if there is none.
fn devices() -> String {
    let mut text = format!("cpu      {}, {} threads by default\n", Isa::best().name, default_threads());
    match cuda::devices() {
        Ok(all) => {
            for d in all {
                let (major, minor) = d.capability;
                let kind = if d.integrated { "shares the host's memory" } else { "its own memory" };
                text += &format!(
                    "cuda:{:<3} {}, compute capability {major}.{minor}, {} ({kind}), {} multiprocessors, driver for CUDA {}.{}\n",
                    d.ordinal,
                    one_line(&d.name),
                    size(d.memory as u64),
                    d.processors,
                    d.driver / 1000,
                    d.driver % 1000 / 10
                );
            }
        }
        Err(error) => text += &format!("cuda     {}\n", one_line(&error.to_string())),
    }
    text
}

/// Totals of one scheme.
#[derive(Default)]
struct Total {
    tensors: usize,
    weights: u64,
    bytes: u64,
}

fn schemes(file: &ModelFile) -> BTreeMap<String, Total> {
    let mut all = BTreeMap::<String, Total>::new();
    for t in file.tensors() {
        let total = all.entry(t.scheme.to_string()).or_default();
        total.tensors += 1;
        total.weights += t.dims.iter().product::<u64>();
        total.bytes += t.len;
    }
    all
}

fn summary(name: &str, file: &ModelFile) -> Result<String, std::fmt::Error> {
    let spec = file.spec();
    let schemes = schemes(file);
    let weights: u64 = schemes.values().map(|t| t.weights).sum();
    let bytes: u64 = schemes.values().map(|t| t.bytes).sum();
    let mut s = String::new();
    writeln!(
        s,
        "{name}: {}, {:.1} M weights, {:.2} bits each",
        size(file.file_len()),
        weights as f64 / 1e6,
        bytes as f64 * 8.0 / weights as f64
    )?;
    let what = if spec.draft_head.is_some() { "head of     " } else { "model       " };
    let (layers, widths) = spec.layers.first().map_or_else(Default::default, |layer| {
        let Attn::Gqa { heads, kv_heads, head_dim, .. } = layer.attn;
        let dense = spec.layers.iter().find(|l| !l.mlp.routed());
        let inner = dense.map_or(String::new(), |l| format!("inner {}, ", l.mlp.inner()));
        let widths = format!("{heads}/{kv_heads} heads of {head_dim}, {inner}");
        (format!("{}, ", mechanisms::layers(spec)), widths)
    });
    writeln!(
        s,
        "{what} {}, {layers}hidden {}, {widths}vocabulary {}, context {}",
        spec.family, spec.hidden, spec.vocab, spec.max_context
    )?;
    if let Some(head) = &spec.draft_head {
        writeln!(s, "guesses      {}", mechanisms::head(head, spec))?;
    }
    if let Some(draft) = file.draft() {
        let (spec, size) = (draft.spec(), size(draft.file_len()));
        match &spec.draft_head {
            Some(head) => writeln!(s, "head behind  {size} more: {}; {}", spec.family, mechanisms::head(head, spec))?,
            None => {
                let layers = mechanisms::layers(spec);
                writeln!(s, "draft model  {size} more: {}, {layers}, hidden {}", spec.family, spec.hidden)?;
            }
        }
    }
    if !spec.layers.is_empty() {
        writeln!(s, "attention    {}", mechanisms::attention(spec))?;
        writeln!(s, "mlp          {}", mechanisms::mlp(spec))?;
    }
    for (scheme, t) in &schemes {
        writeln!(
            s,
            "weights      {scheme:20} {:>4} tensors {:>8.1} M weights {:>10}",
            t.tensors,
            t.weights as f64 / 1e6,
            size(t.bytes)
        )?;
    }
    let text = |p: bool, yes: String| if p { yes } else { "none".into() };
    if spec.draft_head.is_none() {
        writeln!(s, "head         {}", if spec.tied_head { "tied to the embedding" } else { "its own" })?;
        writeln!(
            s,
            "tokenizer    {}",
            text(file.tokenizer_json().is_some(), size(file.tokenizer_json().map_or(0, <[u8]>::len) as u64))
        )?;
        writeln!(s, "template     {}", text(file.chat_template().is_some(), "chat".into()))?;
        writeln!(s, "defaults     {}", serde_json::to_string(file.generation()).unwrap_or_default())?;
    }
    let mut from = file.provenance().clone();
    // What an export needs is long; --json has it.
    ["config", "source_bits"].iter().for_each(|key| drop(from.as_object_mut().and_then(|map| map.shift_remove(*key))));
    writeln!(s, "from         {from}")?;
    Ok(s)
}
