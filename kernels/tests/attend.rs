//! Attention over the paged cache: against the f64 oracle, and bit for bit against itself in every other guise.

use quern_kernels::cpu::attend::{
    At, Chunk, Params, Scratch, Workspace, attend, attend_rows, attend_split, merge, partial_len, splits,
};
use quern_kernels::cpu::kv::{BLOCK, KvLayer, KvMemory, KvType};
use quern_kernels::cpu::lanes::Simd;
use quern_kernels::exec::{Mask, tree_mask};
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

const KINDS: [KvType; 4] = [KvType::F16, KvType::F32, KvType::Int8, KvType::Fp8];

/// A cache of two layers with one sequence in layer 1, its blocks scattered, everything else NaN.
struct Case {
    kv: KvMemory,
    table: Vec<u32>,
    /// `[tokens, heads * d]`, one query per token.
    q: Vec<f32>,
    params: Params<'static>,
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
        let params = Params { layer: 1, heads, scale: 2.0 / (d as f32).sqrt(), window: None, cap: None, sinks: &[] };
        Case { kv, table, q, params, tokens }
    }

    fn width(&self) -> usize {
        self.params.heads * self.kv.layer(1).head_dim
    }

    fn chunk(&self, pos0: usize, rows: usize) -> Chunk<'_> {
        assert!(pos0 + rows <= self.tokens);
        let stride = self.width();
        Chunk { q: &self.q[pos0 * stride..], stride, rows, pos0, table: &self.table, mask: Mask::Causal }
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
            // Values lie within +-3. What queries and weights lose as 16-bit codes.
            let bound = if self.kv.kind() == KvType::Int8 { 3e-4 } else { 2e-6 * 3.0 };
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

/// What the other tests cannot look at here is said, and counted as skipped.
#[test]
fn lanes_that_were_compiled_can_run_here() {
    let compiled: &[&str] = match std::env::consts::ARCH {
        "x86_64" => &["portable", "avx2", "avx512"],
        "aarch64" => &["portable", "neon"],
        _ => &["portable"],
    };
    let missing: Vec<_> = compiled.iter().copied().filter(|name| Simd::by_name(name).is_none()).collect();
    if !missing.is_empty() {
        println!("SKIPPED lanes of {}: this processor cannot run them", missing.join(", "));
    }
    assert!(Simd::available().iter().all(|simd| compiled.contains(&simd.name())));
}

/// Sinks of up to 21 heads: some beyond every score, some below them all.
const SINKS: [f32; 21] = [
    0.0, 3.0, -2.0, 12.0, -40.0, 1.5, 60.0, 0.25, -0.5, 5.0, 7.0, -8.0, 2.0, 30.0, -1.0, 4.0, 9.0, -3.0, 0.5, 6.0, 20.0,
];

/// Every chunk of `CHUNKS` against the oracle, and every row of it against the row alone in portable code.
fn conform(kind: KvType, kv_heads: usize, group: usize, d: usize, window: Option<usize>) {
    conform_as(kind, kv_heads, group, d, |params| params.window = window);
}

/// The same with other parameters.
fn conform_as(kind: KvType, kv_heads: usize, group: usize, d: usize, change: impl Fn(&mut Params<'static>)) {
    let mut case = Case::new(kind, kv_heads, group, d, 707);
    change(&mut case.params);
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
    conform(KvType::Int8, 3, 1, 16, None);
    conform(KvType::Int8, 2, 3, 64, None);
    conform(KvType::Int8, 1, 4, 80, None);
    conform(KvType::Int8, 1, 7, 128, None);
    conform(KvType::Int8, 1, 2, 192, None);
    conform(KvType::Int8, 1, 1, 256, None);
    conform(KvType::Int8, 1, 12, 8, None);
    conform(KvType::Int8, 1, 16, 24, None);
    conform(KvType::Fp8, 3, 1, 16, None);
    conform(KvType::Fp8, 2, 3, 64, None);
    conform(KvType::Fp8, 1, 7, 128, None);
    conform(KvType::Fp8, 1, 12, 8, None);
    conform(KvType::Fp8, 1, 16, 24, None);
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
        conform(KvType::Int8, 2, 3, 40, Some(window));
        conform(KvType::Int8, 1, 7, 16, Some(window));
        conform(KvType::Fp8, 2, 3, 40, Some(window));
    }
}

#[test]
fn soft_caps_and_sinks() {
    for (cap, sinks, window) in [
        (Some(1.5), &SINKS[..0], None),
        (Some(6.0), &SINKS[..], Some(17)),
        (Some(50.0), &SINKS[..0], Some(300)),
        (None, &SINKS[..], None),
        (None, &SINKS[..], Some(100)),
    ] {
        let change = |params: &mut Params<'static>| {
            let sinks = if sinks.is_empty() { sinks } else { &sinks[..params.heads] };
            (params.cap, params.sinks, params.window) = (cap, sinks, window);
        };
        conform_as(KvType::F16, 2, 3, 40, change);
        conform_as(KvType::F16, 1, 7, 128, change);
        conform_as(KvType::F16, 1, 1, 256, change);
        conform_as(KvType::F32, 2, 1, 32, change);
        conform_as(KvType::F32, 1, 12, 8, change);
        conform_as(KvType::Int8, 3, 1, 16, change);
        conform_as(KvType::Int8, 1, 7, 64, change);
        conform_as(KvType::Fp8, 2, 3, 40, change);
        conform_masks_as(KvType::F16, 2, 3, 24, change);
        conform_masks_as(KvType::Int8, 1, 5, 16, change);
    }
}

/// Masks of a random tree; the first rows are often a chain, where guesses are surest.
fn random_tree(random: &mut Random, rows: usize) -> Vec<u64> {
    let parent = |row: usize, random: &mut Random| match random.bits() % 8 {
        _ if row == 0 => None,
        0 if random.bits().is_multiple_of(4) => None,
        0..3 => Some(row - 1),
        _ => Some(random.bits() as usize % row),
    };
    let parents: Vec<_> = (0..rows).map(|row| parent(row, random)).collect();
    tree_mask(&parents)
}

/// A case like another, in which the tokens of a row's path lie one behind the other from `start` on, NaN behind them.
fn straightened(of: &Case, start: usize, mask: u64) -> Case {
    let layer = of.kv.layer(1);
    let (d, group) = (layer.head_dim, of.params.heads / layer.kv_heads);
    let mut case = Case::new(of.kv.kind(), layer.kv_heads, group, d, of.tokens);
    case.params = of.params;
    let nan = vec![f32::NAN; d];
    let path: Vec<usize> = (0..64).filter(|j| mask >> j & 1 == 1).map(|j| start + j).collect();
    let place = |t: usize| (of.table[t / BLOCK], t % BLOCK);
    for h in 0..layer.kv_heads {
        for t in start..case.table.len() * BLOCK {
            // SAFETY: one thread.
            unsafe { case.kv.append(1, place(t).0, place(t).1, h, &nan, &nan) };
        }
    }
    for (i, &t) in path.iter().enumerate() {
        for h in 0..layer.kv_heads {
            let (k, v) = of.kv.read(1, place(t).0, place(t).1, h);
            // SAFETY: one thread.
            unsafe { case.kv.append(1, place(start + i).0, place(start + i).1, h, &k, &v) };
        }
    }
    case
}

/// Trees and blocks against the oracle; every row of a tree against the last row of its path as a plain chunk, bit for
/// bit, on every instruction set, whole and in splits, beside other chunks.
fn conform_masks(kind: KvType, kv_heads: usize, group: usize, d: usize, window: Option<usize>) {
    conform_masks_as(kind, kv_heads, group, d, |params| params.window = window);
}

/// The same with other parameters.
fn conform_masks_as(kind: KvType, kv_heads: usize, group: usize, d: usize, change: impl Fn(&mut Params<'static>)) {
    let mut random = Random(0x2545_f491_4f6c_dd1d ^ (d * 8 + group) as u64);
    let mut case = Case::new(kind, kv_heads, group, d, 640);
    change(&mut case.params);
    let width = case.width();
    let team = Team::new(3);
    for (start, rows) in
        [(0, 1), (0, 5), (3, 64), (16, 17), (31, 2), (250, 33), (255, 1), (256, 9), (509, 13), (570, 64)]
    {
        let masks = random_tree(&mut random, rows);
        let tree = Chunk { mask: Mask::Tree(&masks), ..case.chunk(start, rows) };
        let full = Chunk { mask: Mask::Full, ..case.chunk(start, rows) };
        let before = case.chunk(40, 3);
        let tall = case.attend(Simd::PORTABLE, &Team::new(1), &[tree]);
        let wide = case.attend(Simd::PORTABLE, &Team::new(1), &[full]);
        for simd in Simd::available() {
            let got = case.attend(simd, &team, &[full, before, tree]);
            let (got_full, got_tree) = (&got[..rows * width], &got[(rows + 3) * width..]);
            assert_eq!(bits(got_full), bits(&wide), "{} {kind:?} group {group} d {d} start {start}", simd.name());
            assert_eq!(bits(got_tree), bits(&tall), "{} {kind:?} group {group} d {d} start {start}", simd.name());
        }
        for row in 0..rows {
            let plain = straightened(&case, start, masks[row]);
            let pos = start + masks[row].count_ones() as usize - 1;
            let q = &case.q[(start + row) * width..];
            let one = Chunk { q, stride: width, rows: 1, pos0: pos, table: &plain.table, mask: Mask::Causal };
            let want = plain.attend(Simd::detect(), &Team::new(1), &[one]);
            let got = &tall[row * width..(row + 1) * width];
            assert!(got.iter().all(|x| x.is_finite()));
            assert_eq!(bits(got), bits(&want), "{kind:?} group {group} d {d} {:?} row {row} at {start}", case.params);
            if row % 7 == 0 || row + 1 == rows {
                case.check_oracle(&tree, row, got);
                case.check_oracle(&full, row, &wide[row * width..(row + 1) * width]);
            }
        }
    }
}

#[test]
fn a_row_of_a_tree_is_the_end_of_its_path() {
    for kind in KINDS {
        conform_masks(kind, 1, 1, 8, None);
        conform_masks(kind, 2, 3, 24, None);
        conform_masks(kind, 1, 8, 16, None);
        conform_masks(kind, 1, 5, 128, None);
        conform_masks(kind, 1, 7, 16, Some(1));
        conform_masks(kind, 2, 2, 16, Some(9));
        conform_masks(kind, 1, 4, 40, Some(40));
        conform_masks(kind, 1, 1, 64, Some(300));
    }
}

/// A tree that is a chain is a plain chunk.
#[test]
fn a_chain_gives_the_bits_of_a_plain_chunk() {
    for kind in KINDS {
        for window in [None, Some(1), Some(20), Some(280)] {
            let mut case = Case::new(kind, 2, 3, 40, 640);
            case.params.window = window;
            for (start, rows) in [(0, 3), (13, 64), (240, 40), (500, 64), (576, 64)] {
                let parents: Vec<Option<usize>> = (0..rows).map(|row: usize| row.checked_sub(1)).collect();
                let masks = tree_mask(&parents);
                let plain = case.chunk(start, rows);
                let tree = Chunk { mask: Mask::Tree(&masks), ..plain };
                for simd in Simd::available() {
                    let want = case.attend(simd, &Team::new(1), &[plain]);
                    assert_eq!(bits(&case.attend(simd, &Team::new(2), &[tree])), bits(&want), "{kind:?} {start}");
                }
            }
        }
    }
}

#[test]
fn slots_move_with_all_that_is_theirs() {
    for kind in KINDS {
        let case = Case::new(kind, 2, 3, 24, 100);
        let place = |t: usize| (case.table[t / BLOCK], t % BLOCK);
        let read = |t: usize, h: usize| {
            let (k, v) = case.kv.read(1, place(t).0, place(t).1, h);
            [bits(&k), bits(&v)]
        };
        let all: Vec<_> = (0..100).map(|t| [read(t, 0), read(t, 1)]).collect();
        for (from, to) in [(17, 15), (18, 16), (99, 18), (40, 40)] {
            // SAFETY: one thread.
            unsafe { case.kv.copy_slot(place(from), place(to)) };
        }
        for (t, was) in all.iter().enumerate() {
            let from = [(15, 17), (16, 18), (18, 99)].iter().find(|(to, _)| *to == t).map_or(t, |(_, from)| *from);
            let want = if from == t { was } else { &all[from] };
            assert_eq!(&[read(t, 0), read(t, 1)], want, "{kind:?} token {t}");
        }
    }
}

#[test]
fn later_tokens_do_not_matter() {
    for kind in KINDS {
        // The same row with its successors in the cache, and with NaN in their place.
        for pos in [0, 3, 15, 16, 100, 255, 256, 300] {
            let full = Case::new(kind, 2, 3, 64, 301);
            let short = Case::new(kind, 2, 3, 64, 301);
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
}

#[test]
fn any_chunking_gives_the_same_bits() {
    for kind in KINDS {
        let case = Case::new(kind, 2, 3, 64, 600);
        let simd = Simd::detect();
        let team = Team::new(2);
        let whole = case.attend(simd, &team, &[case.chunk(0, 600)]);
        for size in [1, 2, 3, 7, 64, 300] {
            let chunks: Vec<_> = (0..600).step_by(size).map(|p| case.chunk(p, size.min(600 - p))).collect();
            assert_eq!(bits(&case.attend(simd, &team, &chunks)), bits(&whole), "chunks of {size}");
        }
    }
}

#[test]
fn units_equal_the_whole() {
    for kind in KINDS {
        let mut case = Case::new(kind, 2, 3, 64, 900);
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
                        merge(simd, &partials[from..from + seen.len() * partial_len(d)], None, &mut got);
                        assert_eq!(bits(&got), bits(&want[r * width + h * d..][..d]), "row {r} head {h}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_step_of_many_sequences_equals_each_alone() {
    for kind in KINDS {
        let case = Case::new(kind, 3, 3, 64, 900);
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
}

#[test]
fn nan_shows_to_those_who_see_it() {
    let nan = {
        let mut x = vec![0.5; 64];
        x[7] = f32::NAN;
        x
    };
    for kind in KINDS {
        for (k, v) in [(&nan, &nan), (&nan, &vec![1.0; 64]), (&vec![1.0; 64], &nan)] {
            let (case, clean) = (Case::new(kind, 2, 3, 64, 300), Case::new(kind, 2, 3, 64, 300));
            // SAFETY: one thread.
            unsafe { case.kv.append(1, case.table[1], 4, 0, k, v) };
            for simd in Simd::available() {
                assert_eq!(bits(&case.alone(simd, 19)), bits(&clean.alone(simd, 19)), "{kind:?}");
                for pos in [20, 31, 299] {
                    let (got, clean) = (case.alone(simd, pos), clean.alone(simd, pos));
                    // Three heads share the key/value head with the NaN, in whole or in the column that has it.
                    for head in got[..3 * 64].chunks(64) {
                        let whole = k[7].is_nan() || matches!(kind, KvType::Int8 | KvType::Fp8);
                        let shows = |i: usize| whole || i == 7;
                        assert!((0..64).all(|i| head[i].is_nan() == shows(i)), "{kind:?} pos {pos}: {head:?}");
                    }
                    assert_eq!(bits(&got[3 * 64..]), bits(&clean[3 * 64..]), "{kind:?} pos {pos}");
                }
            }
        }
    }
}

#[test]
fn a_query_that_is_not_finite_spoils_its_head_only() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut case = Case::new(KvType::Int8, 1, 3, 64, 40);
        let clean = Case::new(KvType::Int8, 1, 3, 64, 40);
        let at = 30 * case.width() + 64 + 5;
        case.q[at] = bad;
        for simd in Simd::available() {
            let (got, clean) = (case.attend(simd, &Team::new(1), &[case.chunk(20, 20)]), &clean);
            let want = clean.attend(simd, &Team::new(1), &[clean.chunk(20, 20)]);
            for (i, (got, want)) in got.chunks(64).zip(want.chunks(64)).enumerate() {
                match i == 10 * 3 + 1 {
                    true => assert!(got.iter().all(|x| x.is_nan())),
                    false => assert_eq!(bits(got), bits(want), "vector {i}"),
                }
            }
        }
    }
}

#[test]
fn large_values_stay_finite() {
    for (kind, most) in [(KvType::F16, 65504.0), (KvType::Int8, 127.0 * 65504.0), (KvType::Fp8, 448.0 * 65504.0)] {
        for (k, v) in [(1e30, -1e30), (f32::INFINITY, f32::NEG_INFINITY)] {
            let case = Case::new(kind, 1, 1, 16, 20);
            // SAFETY: one thread.
            unsafe { case.kv.append(1, case.table[0], 3, 0, &[k; 16], &[v; 16]) };
            let (k, v) = case.kv.read(1, case.table[0], 3, 0);
            assert!(k.iter().all(|&x| x == most) && v.iter().all(|&x| x == -most));
            for simd in Simd::available() {
                assert!(case.alone(simd, 19).iter().all(|x| x.is_finite()));
            }
        }
    }
}

#[test]
fn int8_keeps_each_element_to_half_a_code() {
    let shape = KvLayer { kv_heads: 1, head_dim: 64 };
    let kv = KvMemory::new(&[shape], 1, KvType::Int8).expect("fits");
    let mut random = Random(7);
    // Down to where the scale is a subnormal f16, and 0.
    for size in [1e6, 1000.0, 1.0, 1e-3, 1e-5, 1e-7, 0.0] {
        for slot in 0..BLOCK {
            let (k, v) = (random.floats(64), random.floats(64));
            let [k, v] = [k, v].map(|x| x.iter().map(|x| x * size).collect::<Vec<f32>>());
            // SAFETY: one thread.
            unsafe { kv.append(0, 0, slot, 0, &k, &v) };
            let (got_k, got_v) = kv.read(0, 0, slot, 0);
            for (want, got) in [(k, got_k), (v, got_v)] {
                let most = want.iter().fold(0.0f32, |a, x| a.max(x.abs()));
                // The scale is rounded up to an f16: by 2^-10 of itself, or by the least f16.
                let bound = 0.5 * (most / 127.0 * 1.001 + 6e-8);
                for (want, got) in want.iter().zip(&got) {
                    assert!((want - got).abs() <= bound, "{want} became {got}, greatest {most}");
                }
            }
        }
    }
}

/// Three bits of mantissa: half a unit is a sixteenth of an element, or of the least normal code.
#[test]
fn fp8_keeps_each_element_to_a_sixteenth() {
    let shape = KvLayer { kv_heads: 1, head_dim: 64 };
    let kv = KvMemory::new(&[shape], 1, KvType::Fp8).expect("fits");
    let mut random = Random(8);
    for size in [1e6, 1000.0, 1.0, 1e-3, 0.0] {
        for slot in 0..BLOCK {
            let (k, v) = (random.floats(64), random.floats(64));
            // Small elements beside large ones.
            let spread = |x: &[f32]| x.iter().map(|x| x * x * x * size).collect::<Vec<f32>>();
            let [k, v] = [spread(&k), spread(&v)];
            // SAFETY: one thread.
            unsafe { kv.append(0, 0, slot, 0, &k, &v) };
            let (got_k, got_v) = kv.read(0, 0, slot, 0);
            for (want, got) in [(k, got_k), (v, got_v)] {
                let most = want.iter().fold(0.0f32, |a, x| a.max(x.abs()));
                let least = most / 448.0 / 64.0 * 1.01 + 1e-9;
                for (want, got) in want.iter().zip(&got) {
                    assert!((want - got).abs() <= want.abs().max(least) / 16.0 * 1.001, "{want} became {got}");
                }
            }
        }
    }
}

#[test]
fn weights_that_vanish_leave_no_trace() {
    // A block of values 0, whose codes have no scale, and a token far above all others.
    for kind in KINDS {
        let case = Case::new(kind, 1, 3, 64, 300);
        for t in 16..32 {
            // SAFETY: one thread.
            unsafe { case.kv.append(1, case.table[t / BLOCK], t % BLOCK, 0, &[0.1; 64], &[0.0; 64]) };
        }
        let k: Vec<f32> = case.q[299 * case.width()..][..64].iter().map(|x| x * 50.0).collect();
        // SAFETY: one thread.
        unsafe { case.kv.append(1, case.table[2], 3, 0, &k, &[1.0; 64]) };
        for simd in Simd::available() {
            let got = case.alone(simd, 299);
            assert!(got[..64].iter().all(|x| (x - 1.0).abs() < 1e-3), "{kind:?}: {:?}", &got[..64]);
            assert_eq!(bits(&got), bits(&case.alone(Simd::PORTABLE, 299)));
            let all = case.attend(simd, &Team::new(2), &[case.chunk(0, 300)]);
            assert_eq!(bits(&all[299 * case.width()..]), bits(&got));
        }
    }
}

#[test]
fn cache_keeps_what_was_written() {
    let shapes = [KvLayer { kv_heads: 2, head_dim: 8 }, KvLayer { kv_heads: 1, head_dim: 24 }];
    for (kind, bytes) in [
        (KvType::F16, 2 * BLOCK * (2 * 8 + 24) * 2),
        (KvType::F32, 2 * BLOCK * (2 * 8 + 24) * 4),
        (KvType::Int8, 2 * BLOCK * (2 * (8 + 2) + 24 + 2)),
        (KvType::Fp8, 2 * BLOCK * (2 * (8 + 2) + 24 + 2)),
    ] {
        assert_eq!(KvMemory::block_bytes(&shapes, kind), bytes);
        let kv = KvMemory::new(&shapes, 4, kind).expect("fits");
        // All of them are codes times a scale that is a power of two.
        let value = |layer, block: u32, slot, head, i| {
            let number = layer * 1000 + block as usize * 200 + slot * 9 + head * 4 + i;
            match (kind, i) {
                (KvType::Fp8, 0) => 448.0,
                // Four significant bits.
                (KvType::Fp8, _) => (number % 31) as f32 - 15.0,
                (_, 0) => 127.0,
                _ => (number % 255) as f32 - 127.0,
            }
        };
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
