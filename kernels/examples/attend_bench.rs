//! Times attention at the shape of SmolLM2-135M: decode at depth 4096, all 30 layers, and a prefill of 512 tokens.
//!
//! `cargo run --release -p quern-kernels --example attend_bench`

use std::time::Instant;

use quern_kernels::cpu::attend::{Chunk, Params, Workspace, attend};
use quern_kernels::cpu::kv::{BLOCK, KvLayer, KvMemory, KvType};
use quern_kernels::cpu::lanes::Simd;
use quern_kernels::team::Team;

fn main() {
    let simd = Simd::detect();
    println!("{}", simd.name());
    for kind in [KvType::F16, KvType::F32] {
        decode(simd, kind, 30, 3, 3, 64, 4096, 1);
    }
    decode(simd, KvType::F16, 30, 3, 3, 64, 4096, 4);
    decode(simd, KvType::F16, 8, 8, 4, 128, 4096, 1);
    decode(simd, KvType::F16, 12, 2, 7, 64, 4096, 1);
    decode(simd, KvType::F16, 8, 8, 1, 64, 4096, 1);
    for (kv_heads, group, d) in [(3, 3, 64), (2, 4, 128), (2, 7, 64), (4, 1, 64), (1, 4, 256)] {
        for kind in [KvType::F16, KvType::F32] {
            prefill(simd, kind, kv_heads, group, d, 512);
        }
    }
    prefill(simd, KvType::F16, 3, 3, 64, 2048);
}

/// A filled cache of `layers` layers, its blocks in a scattered order.
fn cache(kind: KvType, layers: usize, kv_heads: usize, d: usize, tokens: usize) -> (KvMemory, Vec<u32>) {
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

/// One step of `rows` rows at the end of `tokens` tokens, through all layers.
fn decode(
    simd: Simd,
    kind: KvType,
    layers: usize,
    kv_heads: usize,
    group: usize,
    d: usize,
    tokens: usize,
    rows: usize,
) {
    let (kv, table) = cache(kind, layers, kv_heads, d, tokens);
    let heads = kv_heads * group;
    let q = vec![0.5; rows * heads * d];
    let mut out = vec![0.0; rows * heads * d];
    let bytes = 2 * layers * tokens * kv_heads * d * kind.size();
    for threads in [1, 2] {
        let team = Team::new(threads);
        let mut space = Workspace::default();
        let times = measure(25, || {
            for layer in 0..layers {
                let params = Params { layer, heads, scale: 0.125, window: None };
                let chunk = Chunk { q: &q, stride: heads * d, rows, pos0: tokens - rows, table: &table };
                // SAFETY: nobody appends.
                unsafe { attend(simd, &team, &mut space, &kv, &params, &[chunk], &mut out) };
            }
        });
        println!(
            "decode {kind:?} {kv_heads}x{group} heads d {d} depth {tokens} rows {rows} layers {layers} threads {threads}: \
             {:.2} ms median, {:.2} best, {:.1} GB/s",
            times.0 * 1e3,
            times.1 * 1e3,
            bytes as f64 / times.0 / 1e9
        );
    }
}

/// One chunk of `tokens` rows from position 0, one layer.
fn prefill(simd: Simd, kind: KvType, kv_heads: usize, group: usize, d: usize, tokens: usize) {
    let (kv, table) = cache(kind, 1, kv_heads, d, tokens);
    let heads = kv_heads * group;
    let q: Vec<f32> = (0..tokens * heads * d).map(|i| (i as f32).sin()).collect();
    let mut out = vec![0.0; q.len()];
    // q . k and w . v over the tokens that a row sees.
    let fmas = 2 * heads * d * tokens * (tokens + 1) / 2;
    for threads in [1, 2] {
        let team = Team::new(threads);
        let mut space = Workspace::default();
        let times = measure(25, || {
            let params = Params { layer: 0, heads, scale: 0.125, window: None };
            let chunk = Chunk { q: &q, stride: heads * d, rows: tokens, pos0: 0, table: &table };
            // SAFETY: nobody appends.
            unsafe { attend(simd, &team, &mut space, &kv, &params, &[chunk], &mut out) };
        });
        println!(
            "prefill {kind:?} {kv_heads}x{group} heads d {d} tokens {tokens} threads {threads}: {:.2} ms median, \
             {:.1} GFMA/s median, {:.1} best",
            times.0 * 1e3,
            fmas as f64 / times.0 / 1e9,
            fmas as f64 / times.1 / 1e9
        );
    }
}

/// Median and least time of one call, seconds.
fn measure(repetitions: usize, mut f: impl FnMut()) -> (f64, f64) {
    f();
    let mut times: Vec<f64> = (0..repetitions)
        .map(|_| {
            let start = Instant::now();
            f();
            start.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    (times[times.len() / 2], times[0])
}
