//! Times attention: decode at many depths and batches, and prefill.
//!
//! `cargo run --release -p quern-kernels --example attend_bench [words]` runs the cases whose line contains every
//! word, such as `decode int8 3x3`. The storage types of a case take turns, round by round, and a decode case also
//! times a plain read of as many bytes as its f16 cache holds, so that lines of one case can be compared although the
//! machine is shared. Best and median of 15 rounds, or of `ROUNDS` of the environment, are printed.

use std::{hint::black_box, time::Instant};

use quern_kernels::cpu::attend::{Chunk, Params, Workspace, attend};
use quern_kernels::cpu::kv::{BLOCK, KvLayer, KvMemory, KvType};
use quern_kernels::cpu::lanes::Simd;
use quern_kernels::exec::Mask;
use quern_kernels::team::{Team, split};

const KINDS: [KvType; 3] = [KvType::F16, KvType::Int8, KvType::F32];

/// Heads of a model.
#[derive(Clone, Copy)]
struct Shape {
    layers: usize,
    kv_heads: usize,
    /// Query heads per key/value head.
    group: usize,
    d: usize,
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let run = |line: &str| words.iter().all(|w| line.contains(w.as_str()));
    let simd = Simd::detect();
    println!("{}; best / median", simd.name());
    let shape = |layers, kv_heads, group, d| Shape { layers, kv_heads, group, d };
    let small = shape(30, 3, 3, 64);
    for threads in [1, 2] {
        for (shape, depth, sequences) in [
            (shape(1, 3, 3, 64), 256, 1),
            (small, 128, 1),
            (small, 512, 1),
            (small, 4096, 1),
            (small, 16384, 1),
            (shape(16, 8, 4, 64), 4096, 1),
            (shape(8, 8, 4, 128), 4096, 1),
            (shape(12, 2, 7, 64), 4096, 1),
            (shape(8, 8, 1, 64), 4096, 1),
            (small, 512, 16),
            (small, 2048, 8),
            (shape(8, 8, 4, 64), 2048, 8),
        ] {
            let line = format!("decode {} depth {depth} x {sequences} threads {threads}", name(shape));
            if run(&line) {
                decode(simd, &line, shape, depth, sequences, threads);
            }
        }
        for (shape, start, rows) in [
            (shape(1, 3, 3, 64), 0, 512),
            (shape(1, 3, 3, 64), 4096, 512),
            (shape(1, 8, 4, 64), 0, 512),
            (shape(1, 2, 7, 64), 0, 512),
            (shape(1, 2, 4, 128), 0, 512),
            (shape(1, 4, 1, 64), 0, 512),
            (shape(1, 1, 4, 256), 0, 512),
            (shape(30, 3, 3, 64), 4096, 4),
            (shape(30, 3, 3, 64), 4096, 16),
        ] {
            let line = format!("prefill {} start {start} rows {rows} threads {threads}", name(shape));
            if run(&line) {
                prefill(simd, &line, shape, start, rows, threads);
            }
        }
    }
}

fn name(s: Shape) -> String {
    format!("{}x{} heads d {} layers {}", s.kv_heads, s.group, s.d, s.layers)
}

/// A filled cache, its blocks in a scattered order.
fn cache(kind: KvType, shape: Shape, tokens: usize) -> (KvMemory, Vec<u32>) {
    let Shape { layers, kv_heads, d, .. } = shape;
    let blocks = tokens.div_ceil(BLOCK);
    let kv = KvMemory::new(&vec![KvLayer { kv_heads, head_dim: d }; layers], blocks, kind).expect("fits");
    let table: Vec<u32> = (0..blocks).map(|b| (b * 97 % blocks) as u32).collect();
    let mut unique = table.clone();
    unique.sort_unstable();
    unique.dedup();
    assert_eq!(unique.len(), blocks, "97 must not divide the number of blocks");
    let x: Vec<f32> = (0..d).map(|i| (i as f32 * 0.7).sin()).collect();
    for layer in 0..layers {
        for t in 0..tokens {
            for h in 0..kv_heads {
                let k: Vec<f32> = x.iter().map(|x| x * (t as f32 * 0.1).cos()).collect();
                // SAFETY: one thread.
                unsafe { kv.append(layer, table[t / BLOCK], t % BLOCK, h, &k, &x) };
            }
        }
    }
    (kv, table)
}

/// One step of `sequences` sequences with `depth` tokens each, through all layers.
fn decode(simd: Simd, line: &str, shape: Shape, depth: usize, sequences: usize, threads: usize) {
    let Shape { layers, kv_heads, group, d } = shape;
    let heads = kv_heads * group;
    let q = vec![0.5; heads * d];
    let mut out = vec![0.0; sequences * heads * d];
    let team = Team::new(threads);
    let caches = KINDS.map(|kind| cache(kind, shape, depth * sequences));
    let elements = 2 * layers * depth * sequences * kv_heads * d;
    let words = vec![1u64; elements / 4];
    let mut spaces = KINDS.map(|_| Workspace::default());
    let mut times = [const { vec![] }; KINDS.len() + 1];
    // Small cases need repetitions to be told from the clock.
    let repeat = (4_000_000 / elements).max(1);
    for _ in 0..rounds() {
        times[KINDS.len()].push(time(repeat, || read(&team, &words)));
        for (i, ((kv, table), space)) in caches.iter().zip(&mut spaces).enumerate() {
            times[i].push(time(repeat, || {
                for layer in 0..layers {
                    let params = Params { layer, heads, scale: 0.125, window: None, cap: None, sinks: &[] };
                    let chunks: Vec<Chunk> = table
                        .chunks(depth / BLOCK)
                        .map(|table| Chunk {
                            q: &q,
                            stride: heads * d,
                            rows: 1,
                            pos0: depth - 1,
                            table,
                            mask: Mask::Causal,
                        })
                        .collect();
                    // SAFETY: nobody appends.
                    unsafe { attend(simd, &team, space, kv, &params, &chunks, &mut out) };
                }
            }));
        }
    }
    let [.., reads] = &mut times;
    let plain = best_and_median(reads);
    println!("{line}: plain read {:.3} / {:.3} ms", plain.0 * 1e3, plain.1 * 1e3);
    for (kind, times) in KINDS.iter().zip(&mut times) {
        let (best, median) = best_and_median(times);
        let bytes = elements as f64 / d as f64 / 2.0 / BLOCK as f64 * block_head_bytes(*kind, d);
        println!(
            "    {kind:?}: {:.3} / {:.3} ms, {:.1} / {:.1} GB/s, {:.0} ns per block and head",
            best * 1e3,
            median * 1e3,
            bytes / best / 1e9,
            bytes / median / 1e9,
            best * 1e9 * threads as f64 * (2 * BLOCK * d) as f64 / elements as f64
        );
    }
}

fn block_head_bytes(kind: KvType, d: usize) -> f64 {
    KvMemory::block_bytes(&[KvLayer { kv_heads: 1, head_dim: d }], kind) as f64
}

/// Reads everything once, each thread its share.
fn read(team: &Team, words: &[u64]) {
    team.run(&|t| {
        let mut sums = [0u64; 16];
        let (chunks, _) = words[split(words.len(), team.threads(), t)].as_chunks::<16>();
        for chunk in chunks {
            for (sum, word) in sums.iter_mut().zip(chunk) {
                *sum ^= word;
            }
        }
        black_box(sums);
    });
}

/// One chunk of `rows` rows from position `start`, through all layers.
fn prefill(simd: Simd, line: &str, shape: Shape, start: usize, rows: usize, threads: usize) {
    let Shape { layers, kv_heads, group, d } = shape;
    let heads = kv_heads * group;
    let q: Vec<f32> = (0..rows * heads * d).map(|i| (i as f32).sin()).collect();
    let mut out = vec![0.0; q.len()];
    // q . k and w . v over the tokens that a row sees.
    let fmas = layers * 2 * heads * d * (rows * start + rows * (rows + 1) / 2);
    let team = Team::new(threads);
    let caches = KINDS.map(|kind| cache(kind, shape, start + rows));
    let mut spaces = KINDS.map(|_| Workspace::default());
    let mut times = [const { vec![] }; KINDS.len() + 1];
    for _ in 0..rounds() {
        times[KINDS.len()].push(time(1, || team.run(&|_| fma_peak(PEAK_ROUNDS))));
        for (i, ((kv, table), space)) in caches.iter().zip(&mut spaces).enumerate() {
            times[i].push(time(1, || {
                for layer in 0..layers {
                    let params = Params { layer, heads, scale: 0.125, window: None, cap: None, sinks: &[] };
                    let chunk = Chunk { q: &q, stride: heads * d, rows, pos0: start, table, mask: Mask::Causal };
                    // SAFETY: nobody appends.
                    unsafe { attend(simd, &team, space, kv, &params, &[chunk], &mut out) };
                }
            }));
        }
    }
    let [.., peaks] = &mut times;
    let (best, median) = best_and_median(peaks);
    let peak = (PEAK_ROUNDS * 12 * 8 * threads) as f64;
    println!("{line}: peak {:.1} / {:.1} GFMA/s", peak / best / 1e9, peak / median / 1e9);
    for (kind, times) in KINDS.iter().zip(&mut times) {
        let (best, median) = best_and_median(times);
        println!(
            "    {kind:?}: {:.3} / {:.3} ms, {:.1} / {:.1} GFMA/s",
            best * 1e3,
            median * 1e3,
            fmas as f64 / best / 1e9,
            fmas as f64 / median / 1e9
        );
    }
}

const PEAK_ROUNDS: usize = 100_000;

/// Twelve chains of fused multiply-adds in registers.
fn fma_peak(rounds: usize) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: just checked.
        unsafe { fma_peak_avx2(rounds) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = rounds;
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn fma_peak_avx2(rounds: usize) {
    use std::arch::x86_64::*;
    let mut acc = [_mm256_set1_ps(1.0); 12];
    let (a, b) = (black_box(_mm256_set1_ps(0.5)), black_box(_mm256_set1_ps(0.25)));
    for _ in 0..rounds {
        for x in &mut acc {
            *x = _mm256_fmadd_ps(*x, a, b);
        }
    }
    black_box(acc);
}

/// Rounds of a case: `ROUNDS` of the environment, else 15.
fn rounds() -> usize {
    std::env::var("ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(15)
}

/// Seconds of one call, the mean of `repeat`.
fn time(repeat: usize, mut f: impl FnMut()) -> f64 {
    let start = Instant::now();
    (0..repeat).for_each(|_| f());
    start.elapsed().as_secs_f64() / repeat as f64
}

fn best_and_median(times: &mut [f64]) -> (f64, f64) {
    times.sort_by(f64::total_cmp);
    (times[0], times[times.len() / 2])
}
