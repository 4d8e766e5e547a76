//! Attention over the paged cache: against the f64 oracle, and bit for bit against itself in every other guise.

use quern_kernels::cpu::attend::{
    At, Chunk, Params, Scratch, Workspace, attend, attend_rows, attend_split, merge, partial_len, splits,
};
use quern_kernels::cpu::kv::{BLOCK, KvLayer, KvMemory, KvType};
use quern_kernels::cpu::lanes::Simd;
use quern_kernels::reference::ops as oracle;
use quern_kernels::team::{Disjoint, Team};

/// Small fast generator; the tests need variety, not quality.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    /// Roughly normal.
    fn float(&mut self) -> f32 {
        let mut unit = || (self.bits() >> 40) as f32 / (1u64 << 24) as f32;
        (unit() + unit() + unit() - 1.5) * 2.0
    }
    fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }
}

/// A cache of two layers with one sequence in layer 1, its blocks scattered, everything else NaN.
struct Case {
    kv: KvMemory,
    table: Vec<u32>,
    /// `[tokens, heads * d]`, one query per token.
    q: Vec<f32>,
    params: Params,
    tokens: usize,
}

impl Case {
    fn new(kind: KvType, kv_heads: usize, group: usize, d: usize, tokens: usize) -> Case {
        let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ (d * 64 + group) as u64);
        let shape = KvLayer { kv_heads, head_dim: d };
        let held = tokens.div_ceil(BLOCK);
        let blocks = held + 3;
        let kv = KvMemory::new(&[shape, shape], blocks, kind).expect("fits");
        let nan = vec![f32::NAN; d];
        for layer in 0..2 {
            for block in 0..blocks as u32 {
                for i in 0..BLOCK * kv_heads {
                    // SAFETY: one thread.
                    unsafe { kv.append(layer, block, i / kv_heads, i % kv_heads, &nan, &nan) };
                }
            }
        }
        let mut table: Vec<u32> = (0..blocks as u32).collect();
        for i in (1..blocks).rev() {
            table.swap(i, random.bits() as usize % (i + 1));
        }
        table.truncate(held);
        for t in 0..tokens {
            for h in 0..kv_heads {
                let (k, v) = (random.floats(d), random.floats(d));
                // SAFETY: one thread.
                unsafe { kv.append(1, table[t / BLOCK], t % BLOCK, h, &k, &v) };
            }
        }
        let heads = kv_heads * group;
        let q = random.floats(tokens * heads * d);
        // Larger than 1 / sqrt(d), so that the running maximum moves often.
        let params = Params { layer: 1, heads, scale: 2.0 / (d as f32).sqrt(), window: None };
        Case { kv, table, q, params, tokens }
    }

    fn width(&self) -> usize {
        self.params.heads * self.kv.layer(1).head_dim
    }

    fn chunk(&self, pos0: usize, rows: usize) -> Chunk<'_> {
        assert!(pos0 + rows <= self.tokens);
        let stride = self.width();
        Chunk { q: &self.q[pos0 * stride..], stride, rows, pos0, table: &self.table }
    }

    fn attend(&self, simd: Simd, team: &Team, chunks: &[Chunk]) -> Vec<f32> {
        let rows: usize = chunks.iter().map(|c| c.rows).sum();
        let mut out = vec![f32::NAN; rows * self.width()];
        // SAFETY: nobody appends.
        unsafe { attend(simd, team, &mut Workspace::default(), &self.kv, &self.params, chunks, &mut out) };
        out
    }

    /// One row alone, on one thread.
    fn alone(&self, simd: Simd, pos: usize) -> Vec<f32> {
        self.attend(simd, &Team::new(1), &[self.chunk(pos, 1)])
    }

    fn check_oracle(&self, chunk: &Chunk, row: usize, got: &[f32]) {
        for (i, (want, &got)) in oracle::attention(&self.kv, &self.params, chunk, row).iter().zip(got).enumerate() {
            // Values lie within +-3.
            let bound = 2e-6 * 3.0;
            assert!(
                (want - got as f64).abs() <= bound,
                "pos {} element {i}: {got}, expected {want}, {:?}",
                chunk.pos0 + row,
                self.params
            );
        }
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

const CHUNKS: [(usize, usize); 15] = [
    (0, 1),
    (0, 2),
    (1, 3),
    (15, 1),
    (15, 7),
    (16, 1),
    (17, 2),
    (255, 1),
    (255, 3),
    (256, 2),
    (257, 64),
    (511, 1),
    (700, 7),
    (0, 300),
    (407, 300),
];

/// Every chunk of `CHUNKS` against the oracle, and every row of it against the row alone in portable code.
fn conform(kind: KvType, kv_heads: usize, group: usize, d: usize, window: Option<usize>) {
    let mut case = Case::new(kind, kv_heads, group, d, 707);
    case.params.window = window;
    let width = case.width();
    let teams = [Team::new(1), Team::new(3)];
    let mut alone = vec![None; case.tokens];
    for (pos0, rows) in CHUNKS {
        // Portable code is slow where the CPU's own fma is not compiled in.
        if rows >= 300 && d * kv_heads * group > 256 {
            continue;
        }
        let chunk = case.chunk(pos0, rows);
        for simd in Simd::available() {
            for team in &teams[..if simd == Simd::PORTABLE { 1 } else { 2 }] {
                let got = case.attend(simd, team, &[chunk]);
                for (r, got) in got.chunks(width).enumerate() {
                    let want = alone[pos0 + r].get_or_insert_with(|| case.alone(Simd::PORTABLE, pos0 + r));
                    let what = || format!("{} {kind:?} group {group} d {d} pos {}", simd.name(), pos0 + r);
                    assert_eq!(bits(got), bits(want), "{}", what());
                }
            }
        }
        for r in [0, rows / 2, rows - 1] {
            let got = alone[pos0 + r].as_ref().expect("computed above");
            case.check_oracle(&chunk, r, got);
        }
    }
}

#[test]
fn every_head_size_and_group() {
    conform(KvType::F16, 3, 1, 16, None);
    conform(KvType::F16, 2, 3, 64, None);
    conform(KvType::F16, 1, 4, 80, None);
    conform(KvType::F16, 1, 7, 128, None);
    conform(KvType::F16, 1, 2, 192, None);
    conform(KvType::F16, 1, 1, 256, None);
    conform(KvType::F16, 1, 16, 24, None);
    conform(KvType::F32, 2, 3, 32, None);
    conform(KvType::F32, 1, 7, 96, None);
    conform(KvType::F32, 1, 12, 8, None);
    conform(KvType::F32, 1, 5, 256, None);
}

#[test]
fn every_window() {
    for window in [1, 5, 16, 17, 100, 300, 1000] {
        conform(KvType::F16, 1, 3, 32, Some(window));
        conform(KvType::F32, 2, 1, 40, Some(window));
        conform(KvType::F16, 1, 7, 16, Some(window));
    }
}

#[test]
fn later_tokens_do_not_matter() {
    // The same row with its successors in the cache, and with NaN in their place.
    for pos in [0, 3, 15, 16, 100, 255, 256, 300] {
        let full = Case::new(KvType::F16, 2, 3, 64, 301);
        let short = Case::new(KvType::F16, 2, 3, 64, 301);
        let nan = vec![f32::NAN; 64];
        for t in pos + 1..304 {
            for h in 0..2 {
                // SAFETY: one thread.
                unsafe { short.kv.append(1, short.table[t / BLOCK], t % BLOCK, h, &nan, &nan) };
            }
        }
        for simd in Simd::available() {
            let (a, b) = (full.alone(simd, pos), short.alone(simd, pos));
            assert!(a.iter().all(|x| x.is_finite()));
            assert_eq!(bits(&a), bits(&b), "pos {pos}");
            let first = pos.saturating_sub(10);
            let chunk = full.attend(simd, &Team::new(1), &[full.chunk(first, 301 - first)]);
            assert_eq!(bits(&chunk[(pos - first) * full.width()..][..full.width()]), bits(&b), "pos {pos}");
        }
    }
}

#[test]
fn any_chunking_gives_the_same_bits() {
    let case = Case::new(KvType::F16, 2, 3, 64, 600);
    let simd = Simd::detect();
    let team = Team::new(2);
    let whole = case.attend(simd, &team, &[case.chunk(0, 600)]);
    for size in [1, 2, 3, 7, 64, 300] {
        let chunks: Vec<_> = (0..600).step_by(size).map(|p| case.chunk(p, size.min(600 - p))).collect();
        assert_eq!(bits(&case.attend(simd, &team, &chunks)), bits(&whole), "chunks of {size}");
    }
}

#[test]
fn units_equal_the_whole() {
    let mut case = Case::new(KvType::F16, 2, 3, 64, 900);
    let d = 64;
    for window in [None, Some(300)] {
        case.params.window = window;
        let chunk = case.chunk(509, 5);
        let width = case.width();
        for simd in Simd::available() {
            let want = case.attend(simd, &Team::new(1), &[chunk]);
            let mut scratch = Scratch::default();
            let mut by_rows = vec![f32::NAN; 5 * width];
            let out = Disjoint::new(&mut by_rows);
            for kv_head in 0..2 {
                for rows in [0..1, 1..4, 4..4, 4..5] {
                    let at = At { start: 0, stride: width };
                    // SAFETY: one thread.
                    unsafe {
                        attend_rows(simd, &case.kv, &case.params, &chunk, rows, kv_head, &mut scratch, &out, at);
                    }
                }
            }
            assert_eq!(bits(&by_rows), bits(&want));

            let all = splits(509, window).start..splits(513, window).end;
            let mut partials = vec![f32::NAN; 5 * 6 * all.len() * partial_len(d)];
            let store = Disjoint::new(&mut partials);
            for split in all.clone().rev() {
                for kv_head in 0..2 {
                    for rows in [0..2, 2..5] {
                        // SAFETY: one thread.
                        unsafe {
                            let (kv, params) = (&case.kv, &case.params);
                            attend_split(simd, kv, params, &chunk, rows, kv_head, split, &mut scratch, &store, 0);
                        }
                    }
                }
            }
            for r in 0..5 {
                let seen = splits(509 + r, window);
                for h in 0..6 {
                    let from = ((r * 6 + h) * all.len() + seen.start - all.start) * partial_len(d);
                    let mut got = vec![0.0; d];
                    merge(simd, &partials[from..from + seen.len() * partial_len(d)], &mut got);
                    assert_eq!(bits(&got), bits(&want[r * width + h * d..][..d]), "row {r} head {h}");
                }
            }
        }
    }
}

#[test]
fn a_step_of_many_sequences_equals_each_alone() {
    let case = Case::new(KvType::F16, 3, 3, 64, 900);
    let chunks = [case.chunk(899, 1), case.chunk(3, 1), case.chunk(100, 50), case.chunk(700, 4), case.chunk(0, 0)];
    for threads in [1, 2, 5] {
        let team = Team::new(threads);
        let got = case.attend(Simd::detect(), &team, &chunks);
        let mut want = vec![];
        for c in &chunks {
            want.extend((c.pos0..c.pos0 + c.rows).flat_map(|p| case.alone(Simd::detect(), p)));
        }
        assert_eq!(bits(&got), bits(&want), "{threads} threads");
    }
}

#[test]
fn nan_in_a_seen_token_shows() {
    let case = Case::new(KvType::F16, 1, 3, 64, 40);
    let nan = vec![f32::NAN; 64];
    // SAFETY: one thread.
    unsafe { case.kv.append(1, case.table[1], 4, 0, &nan, &nan) };
    for simd in Simd::available() {
        assert!(case.alone(simd, 19).iter().all(|x| x.is_finite()));
        assert!(case.alone(simd, 20).iter().all(|x| x.is_nan()));
    }
}

#[test]
fn large_values_stay_finite() {
    let case = Case::new(KvType::F16, 1, 1, 16, 20);
    // SAFETY: one thread.
    unsafe { case.kv.append(1, case.table[0], 3, 0, &[1e30; 16], &[-1e30; 16]) };
    let (k, v) = case.kv.read(1, case.table[0], 3, 0);
    assert!(k.iter().all(|&x| x == 65504.0) && v.iter().all(|&x| x == -65504.0));
    for simd in Simd::available() {
        assert!(case.alone(simd, 19).iter().all(|x| x.is_finite()));
    }
}

#[test]
fn cache_keeps_what_was_written() {
    let shapes = [KvLayer { kv_heads: 2, head_dim: 8 }, KvLayer { kv_heads: 1, head_dim: 24 }];
    for kind in [KvType::F16, KvType::F32] {
        assert_eq!(KvMemory::block_bytes(&shapes, kind), 2 * BLOCK * (2 * 8 + 24) * kind.size());
        let kv = KvMemory::new(&shapes, 4, kind).expect("fits");
        let value =
            |layer, block: u32, slot, head, i| (layer * 1000 + block as usize * 200 + slot * 9 + head * 4 + i) as f32;
        let each = |f: &mut dyn FnMut(usize, u32, usize, usize, usize)| {
            for (layer, shape) in shapes.iter().enumerate() {
                for block in 0..4 {
                    for slot in 0..BLOCK {
                        (0..shape.kv_heads).for_each(|h| f(layer, block, slot, h, shape.head_dim));
                    }
                }
            }
        };
        each(&mut |layer, block, slot, h, d| {
            assert_eq!(kv.read(layer, block, slot, h), (vec![0.0; d], vec![0.0; d]));
        });
        each(&mut |layer, block, slot, h, d| {
            let k: Vec<f32> = (0..d).map(|i| value(layer, block, slot, h, i)).collect();
            let v: Vec<f32> = k.iter().map(|x| -x).collect();
            // SAFETY: one thread.
            unsafe { kv.append(layer, block, slot, h, &k, &v) };
        });
        // SAFETY: one thread.
        unsafe { kv.copy_block(3, 1) };
        each(&mut |layer, block, slot, h, d| {
            let from = if block == 1 { 3 } else { block };
            let (k, v) = kv.read(layer, block, slot, h);
            for i in 0..d {
                assert_eq!((k[i], v[i]), (value(layer, from, slot, h, i), -value(layer, from, slot, h, i)));
            }
        });
    }
    assert!(KvMemory::new(&shapes, usize::MAX / 100, KvType::F32).is_none());
}
