//! `quern bench`: speed of prompts, generation, depth and batches, one row each; and of servers.

mod rows;
mod serve;
mod spec;
mod synthetic;

use std::{error::Error, path::PathBuf, sync::Arc};

use clap::{Args, Subcommand};
use quern_kernels::{
    cores::default_threads,
    cpu::{isa::Isa, probe},
    exec::{self, Device, ExecOptions},
    team::Team,
};
use quern_models::ModelFile;

use super::{Activations, Format, Kv, PlaceArgs, Usage, batch, open, positive, print, threads};
use rows::{Measured, Test};

/// Flags of `quern bench`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct BenchArgs {
    #[command(subcommand)]
    of: Option<Of>,
    /// A .qrn file
    #[arg(required_unless_present = "synthetic", conflicts_with = "synthetic")]
    file: Option<PathBuf>,
    /// Measure a model of this shape with random int4 weights: llama-1b, llama-3b, llama-8b or a config.json
    #[arg(long, value_name = "SHAPE")]
    synthetic: Option<String>,
    /// Group of the synthetic weights
    #[arg(long, default_value_t = 64, requires = "synthetic")]
    group: u32,
    /// Prompt lengths, tokens
    #[arg(short, long, value_delimiter = ',', default_value = "512")]
    prompt: Vec<usize>,
    /// Generation lengths, tokens
    #[arg(short = 'n', long, value_delimiter = ',', default_value = "128")]
    generate: Vec<usize>,
    /// Tokens already in the cache before each test
    #[arg(short, long, value_delimiter = ',', default_value = "0")]
    depth: Vec<usize>,
    /// Sequences that generate at the same time
    #[arg(short, long, value_delimiter = ',', default_value = "1", value_parser = batch)]
    batch: Vec<usize>,
    /// Threads [default: one per fast physical core that this process may use]
    #[arg(short, long, value_delimiter = ',', value_parser = threads)]
    threads: Vec<usize>,
    /// Measured repetitions of each test, after one that warms up
    #[arg(short, long, default_value_t = 5, value_parser = positive)]
    repetitions: usize,
    /// Where to run.
    #[command(flatten)]
    place: PlaceArgs,
    /// Activations of quantized weights [default: int8 on the CPU, f16 on a GPU]
    #[arg(long, value_enum)]
    activations: Option<Activations>,
    /// Keys and values
    #[arg(long, value_enum, default_value = "f16")]
    kv: Kv,
    /// How to print
    #[arg(short, long, value_enum, default_value = "md")]
    output: Format,
}

#[derive(Debug, Subcommand)]
enum Of {
    /// Measure a server: clients at once, or requests at a rate; latencies and throughput
    Serve(Box<serve::ServeBenchArgs>),
    /// Measure what guessing ahead gains, by method and number of guesses
    Spec(Box<spec::SpecBenchArgs>),
}

/// Runs the command.
pub fn main(args: BenchArgs) -> Result<(), Box<dyn Error>> {
    match args.of {
        Some(Of::Serve(args)) => return serve::main(*args),
        Some(Of::Spec(args)) => return spec::main(*args),
        None => {}
    }
    let (name, file) = match (&args.file, &args.synthetic) {
        (Some(path), _) => {
            let name = path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
            (name, open(path)?)
        }
        (None, Some(shape)) => (shape.clone(), synthetic::model(shape, args.group)?),
        (None, None) => unreachable!("clap asks for one of them"),
    };
    let file = Arc::new(file);
    let tests = tests(&args);
    let most = file.spec().max_context;
    if tests.is_empty() {
        return Err(Usage("--prompt 0 --generate 0: there is nothing to measure".into()).into());
    }
    if let Some(t) = tests.iter().find(|t| t.depth.saturating_add(t.tokens) > most) {
        let asked = t.depth.saturating_add(t.tokens);
        return Err(format!("{t}: {asked} tokens, the model was made for at most {most}").into());
    }
    let device = args.place.device();
    let threads = if args.threads.is_empty() { vec![0] } else { args.threads.clone() };
    let mut all = vec![];
    for threads in threads {
        let blocks = tests.iter().map(Test::blocks).max().unwrap_or(1);
        let options = ExecOptions {
            device,
            threads,
            blocks,
            activations: args.activations.map(Into::into),
            kv: args.kv.into(),
            rows: rows::STEP.max(args.batch.iter().copied().max().unwrap_or(1)),
            tree_blocks: 0,
            gpu_layers: args.place.gpu_layers,
        };
        let mut executor = exec::open(file.clone(), options, |_| {})?;
        let threads = if threads == 0 { default_threads() } else { threads };
        for test in &tests {
            all.push(rows::measure(&mut *executor, &file, *test, args.repetitions, threads, args.kv.into())?);
        }
        drop(executor);
        if device != Device::Cpu {
            continue;
        }
        // After the tests of these threads, because the probe's own memory must not count as theirs.
        let team = Team::new(threads);
        let bandwidth = probe::read_bandwidth(&team, PROBE_BYTES).unwrap_or(f64::NAN);
        let peak = probe::multiply_peak(Isa::best(), &team);
        for measured in all.iter_mut().filter(|m| m.threads == threads) {
            (measured.bandwidth, measured.peak) = (bandwidth, peak);
        }
    }
    match args.output {
        Format::Md => print(&markdown(&name, &file, &all)),
        Format::Json => print(&format!("{}\n", serde_json::to_string_pretty(&json(&name, &file, &all))?)),
    }
}

/// Beyond the last level of cache of the machines we know.
const PROBE_BYTES: usize = 256 << 20;

fn tests(args: &BenchArgs) -> Vec<Test> {
    let mut tests = vec![];
    for &depth in &args.depth {
        for &tokens in args.prompt.iter().filter(|&&p| p > 0) {
            tests.push(Test { generate: false, tokens, depth, batch: 1 });
        }
        for &tokens in args.generate.iter().filter(|&&n| n > 0) {
            tests.extend(args.batch.iter().map(|&batch| Test { generate: true, tokens, depth, batch }));
        }
    }
    tests
}

fn markdown(name: &str, file: &ModelFile, all: &[Measured]) -> String {
    let size = super::size(file.file_len());
    let mode = all.first().map_or("", |m| m.mode.as_str());
    let mut s = format!("{name}, {size}, {mode}\n\n");
    s += "| threads | test | tokens/s | ± | GB/s of weights+KV | % of read bandwidth | GMAC/s | % of int8 peak | peak memory MB |\n";
    s += "|--:|:--|--:|--:|--:|--:|--:|--:|--:|\n";
    for m in all {
        let read = m
            .bytes_per_second
            .map_or((String::new(), String::new()), |b| (format!("{:.1}", b / 1e9), percent(b, m.bandwidth)));
        s += &format!(
            "| {} | {} | {:.1} | {:.1} | {} | {} | {:.1} | {} | {:.0} |\n",
            m.threads,
            m.test,
            m.median,
            m.deviation,
            read.0,
            read.1,
            m.macs_per_second / 1e9,
            percent(m.macs_per_second, m.peak),
            m.peak_memory as f64 / 1e6
        );
    }
    let mut limits: Vec<(usize, f64, f64)> = all.iter().map(|m| (m.threads, m.bandwidth, m.peak)).collect();
    limits.dedup_by_key(|l| l.0);
    s += "\n";
    // Of a GPU, limits are not measured here.
    for (threads, bandwidth, peak) in limits.into_iter().filter(|l| !l.1.is_nan()) {
        let (gb, gmac) = (bandwidth / 1e9, peak / 1e9);
        s += &format!(
            "This machine, {threads} thread{}: reads {gb:.1} GB/s, multiplies {gmac:.0} GMAC/s in int8 registers.\n",
            if threads == 1 { "" } else { "s" }
        );
    }
    s + "Median of the repetitions ± their standard deviation; ppN: a prompt of N tokens, tgN: N tokens generated,\n@ dN: with N tokens in the cache, x N: N sequences at once (tokens of all). GMAC/s counts the linear layers.\nBandwidth and peak were measured in this run; no kernel reaches the peak, which loads and scales nothing.\n"
}

/// The middle one, or the mean of both.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let n = values.len();
    (values[(n - 1) / 2] + values[n / 2]) / 2.0
}

/// A share of a limit that was measured, or nothing.
fn percent(of: f64, limit: f64) -> String {
    if limit.is_nan() { String::new() } else { format!("{:.0}", 100.0 * of / limit) }
}

fn json(name: &str, file: &ModelFile, all: &[Measured]) -> serde_json::Value {
    let one = |m: &Measured| {
        serde_json::json!({
            "model": name, "model_bytes": file.file_len(), "mode": m.mode, "threads": m.threads,
            "test": m.test.to_string(), "tokens_per_second": m.median, "deviation": m.deviation, "samples": m.samples,
            "bytes_per_second": m.bytes_per_second, "read_bandwidth": m.bandwidth,
            "macs_per_second": m.macs_per_second, "int8_peak": m.peak, "peak_memory": m.peak_memory,
        })
    };
    all.iter().map(one).collect()
}
