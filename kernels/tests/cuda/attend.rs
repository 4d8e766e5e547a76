//! Attention over pages: against the oracle on the very keys and values that the pool holds, and a row's bits alone,
//! in chunks, in batches, under other cuts of the work.

use std::sync::Arc;

use quern_kernels::{
    cpu::{
        attend::{Chunk as OracleChunk, Params as OracleParams},
        kv::{KvLayer, KvMemory, KvType},
    },
    cuda::{
        Attend, Batch, Buffer, Device, KvPool,
        acts::{Acts, Form},
        attend::Params,
        batch::{Chunk, Shape},
        kv::BLOCK,
        ops::{Ops, RopeAppend},
    },
    exec::{Mask, NO_BLOCK, tree_mask},
    reference::ops as oracle,
};

use crate::common::{Random, Row, acts, bound, device, read_acts, up};

const KINDS: [KvType; 4] = [KvType::F16, KvType::F32, KvType::Int8, KvType::Fp8];
const FORMS: [Form; 3] = [Form::F16, Form::F32, Form::Int8];

/// One sequence in layer 1 of a pool whose blocks are scattered; every other token of the pool is NaN.
struct Case {
    device: Arc<Device>,
    ops: Ops,
    attend: Attend,
    pool: KvPool,
    /// The same keys and values.
    cpu: KvMemory,
    table: Vec<u32>,
    /// `[tokens][(heads + 2 kv_heads) * d]`.
    qkv: Vec<f32>,
    shape: Shape,
    scale: f32,
    cap: Option<f32>,
    /// `[heads]`, or empty.
    sinks: Vec<f32>,
}

impl Case {
    fn new(device: &Arc<Device>, kind: KvType, shape: Shape, tokens: usize) -> Case {
        let Shape { heads, kv_heads, head_dim: d, .. } = shape;
        let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ (d * 64 + heads) as u64);
        let layers = [KvLayer { kv_heads: 1, head_dim: 8 }, KvLayer { kv_heads, head_dim: d }];
        let held = tokens.div_ceil(BLOCK);
        let blocks = held + 3;
        let ops = Ops::new(device).expect("the device works");
        let pool = KvPool::with_spare(device, &layers, blocks, 160, kind).expect("the device works");
        let cpu = KvMemory::new(&layers, blocks, kind).expect("the device works");
        let mut table = random.order(blocks);
        table.truncate(held);
        let stride = (heads + 2 * kv_heads) * d;
        let qkv = random.floats(tokens * stride);
        let append = |qkv: &[f32], places: &[u32]| {
            let (dq, dp) = (up(device, qkv), up(device, places));
            let what = RopeAppend { rope: None, norms: None, places: dp.ptr(), heads };
            ops.rope_append(dq.ptr(), &what, &pool, 1, places.len()).expect("the device works");
            device.synchronize().expect("the device works");
        };
        let everywhere: Vec<u32> = (0..(blocks * BLOCK) as u32).collect();
        append(&vec![f32::NAN; everywhere.len() * stride], &everywhere);
        let place = |t: usize| table[t / BLOCK] * BLOCK as u32 + (t % BLOCK) as u32;
        append(&qkv, &(0..tokens).map(place).collect::<Vec<u32>>());
        for (t, row) in qkv.chunks(stride).enumerate() {
            for h in 0..kv_heads {
                let (k, v) = (&row[(heads + h) * d..][..d], &row[(heads + kv_heads + h) * d..][..d]);
                // SAFETY: one thread.
                unsafe { cpu.append(1, table[t / BLOCK], t % BLOCK, h, k, v) };
            }
        }
        let attend = Attend::new(device).expect("the device works");
        // Larger than 1 / sqrt(d), so that the running maximum moves often.
        let scale = 2.0 / (d as f32).sqrt();
        Case { device: device.clone(), ops, attend, pool, cpu, table, qkv, shape, scale, cap: None, sinks: vec![] }
    }

    fn stride(&self) -> usize {
        (self.shape.heads + 2 * self.shape.kv_heads) * self.shape.head_dim
    }

    fn width(&self) -> usize {
        self.shape.heads * self.shape.head_dim
    }

    /// Attention of rows of the sequence, as (start, rows), `spare` rows that belong to nobody behind them.
    fn run(&self, chunks: &[(usize, usize)], spare: usize, order: Option<&[u32]>, form: Form) -> Vec<Row> {
        let chunks: Vec<_> = chunks.iter().map(|&(start, rows)| (start, rows, Mask::Causal)).collect();
        self.run_masked(&chunks, spare, order, form)
    }

    /// The same, each chunk with a mask.
    fn run_masked(&self, chunks: &[(usize, usize, Mask)], spare: usize, order: Option<&[u32]>, form: Form) -> Vec<Row> {
        let stride = self.stride();
        let mut qkv = vec![];
        let mut tables = vec![];
        for &(start, rows, _) in chunks {
            qkv.extend_from_slice(&self.qkv[start * stride..(start + rows) * stride]);
            let mut table = self.table.clone();
            // Blocks that no row sees are never looked at.
            let passed = self.shape.window.map_or(0, |w| (start + 1).saturating_sub(w) / BLOCK);
            table[..passed].fill(NO_BLOCK);
            table[(start + rows).div_ceil(BLOCK)..].fill(NO_BLOCK);
            tables.push(table);
        }
        let rows: usize = chunks.iter().map(|c| c.1).sum();
        let m = rows + spare;
        qkv.resize(m * stride, f32::NAN);
        let dq = up(&self.device, &qkv);
        let mut batch = Batch::new(&self.device, &[self.shape], m).expect("the device works");
        let described = chunks.iter().zip(&tables);
        let chunks: Vec<Chunk> =
            described.map(|(&(start, rows, mask), blocks)| Chunk { rows, start, blocks, mask }).collect();
        batch.lend(self.pool.spare());
        batch.set(&chunks, m).expect("the device works");
        let dorder: Option<Buffer<u32>> = order.map(|o| up(&self.device, o));
        let to: Acts = acts(&self.device, form, m, self.width() + 64);
        let sinks = up(&self.device, &self.sinks);
        let Shape { heads, window, .. } = self.shape;
        let sinks_at = (!self.sinks.is_empty()).then(|| sinks.ptr());
        let params = Params { layer: 1, heads, scale: self.scale, window, cap: self.cap, sinks: sinks_at };
        let order = dorder.as_ref().map(Buffer::ptr);
        if let Some(copies) = batch.copies() {
            self.ops.copy_slots(copies, false, &self.pool, 1).expect("the device works");
        }
        self.attend.run(&self.ops, dq.ptr(), &self.pool, &params, &batch, order, &to, m).expect("the device works");
        let mut got = read_acts(&to, m, self.width());
        for row in got.drain(rows..) {
            assert!(row.values.iter().all(|&x| x == 0.0), "rows of nobody are zero");
        }
        got
    }

    /// Other queries, keys and values for the tokens from `start` on, in the pool too.
    fn put(&mut self, start: usize, qkv: &[f32]) {
        let (stride, table) = (self.stride(), &self.table);
        let place = |t: usize| table[t / BLOCK] * BLOCK as u32 + (t % BLOCK) as u32;
        let places: Vec<u32> = (start..start + qkv.len() / stride).map(place).collect();
        let (dq, dp) = (up(&self.device, qkv), up(&self.device, &places));
        let what = RopeAppend { rope: None, norms: None, places: dp.ptr(), heads: self.shape.heads };
        self.ops.rope_append(dq.ptr(), &what, &self.pool, 1, places.len()).expect("the device works");
        self.device.synchronize().expect("the device works");
        self.qkv[start * stride..][..qkv.len()].copy_from_slice(qkv);
    }

    fn check_oracle(&self, (pos0, rows): (usize, usize), row: usize, got: &Row, form: Form) {
        self.check_oracle_masked((pos0, rows, Mask::Causal), row, got, form);
    }

    fn check_oracle_masked(&self, chunk: (usize, usize, Mask), row: usize, got: &Row, form: Form) {
        let Shape { heads, window, .. } = self.shape;
        let (scale, cap, sinks) = (self.scale, self.cap, &self.sinks[..]);
        let params = OracleParams { layer: 1, heads, scale, window, cap, sinks };
        let (pos0, rows, mask) = chunk;
        let q = &self.qkv[pos0 * self.stride()..];
        let of = OracleChunk { q, stride: self.stride(), rows, pos0, table: &self.table, mask };
        let bound = match form {
            Form::F16 | Form::Int8 => bound::ATTEND_F16,
            Form::F32 => bound::ATTEND_F32,
        };
        for (i, (want, got)) in oracle::attention(&self.cpu, &params, &of, row).iter().zip(&got.values).enumerate() {
            let pos = pos0 + row;
            assert!((want - got).abs() <= bound, "pos {pos} element {i}: {got}, expected {want}, {:?}", self.shape);
        }
    }
}

/// Rows at, before and after edges of blocks, steps, tiles and splits.
const CHUNKS: [(usize, usize); 12] =
    [(0, 1), (0, 2), (1, 3), (15, 1), (15, 7), (16, 1), (255, 1), (255, 3), (257, 20), (511, 1), (600, 7), (0, 40)];

fn conform(kind: KvType, form: Form, kv_heads: usize, group: usize, d: usize, window: Option<usize>) {
    conform_as(kind, form, Shape { heads: kv_heads * group, kv_heads, head_dim: d, window }, None, &[]);
}

/// First and last row of every chunk against the oracle and against the row alone.
fn conform_as(kind: KvType, form: Form, shape: Shape, cap: Option<f32>, sinks: &[f32]) {
    let Some(device) = device("attention") else { return };
    let mut case = Case::new(&device, kind, shape, 610);
    (case.cap, case.sinks) = (cap, sinks.to_vec());
    let all = case.run(&CHUNKS, 3, None, form);
    let mut first = 0;
    for chunk in CHUNKS {
        let rows = &all[first..first + chunk.1];
        first += chunk.1;
        // In f32 every row and head is a block of its own.
        if form == Form::F16 {
            let apart = case.run(&[chunk], 0, None, form);
            assert_eq!(apart, rows, "{kind:?} {form:?} {shape:?} {chunk:?} without the others");
        }
        for (r, row) in rows.iter().enumerate().filter(|(r, _)| *r == 0 || r + 1 == chunk.1) {
            case.check_oracle(chunk, r, row, form);
            let alone = case.run(&[(chunk.0 + r, 1)], 0, None, form);
            assert_eq!(&alone[0], row, "{kind:?} {form:?} {shape:?} {chunk:?} row {r} alone");
        }
    }
}

#[test]
fn heads_and_groups_of_many_sizes() {
    for (i, (kv_heads, group, d)) in [
        (2, 1, 64),
        (1, 3, 8),
        (2, 4, 16),
        (1, 7, 128),
        (1, 2, 40),
        (1, 1, 256),
        (1, 5, 96),
        (1, 20, 32),
        (1, 3, 200),
        (1, 1, 104),
    ]
    .into_iter()
    .enumerate()
    {
        // Every kind in every form, not of every shape.
        conform(KINDS[[0, 2, 3][i % 3]], Form::F16, kv_heads, group, d, None);
        conform(KINDS[i % 4], Form::F32, kv_heads, group, d, None);
    }
}

#[test]
fn windows() {
    conform(KvType::F32, Form::F16, 1, 2, 16, Some(300));
    for (i, window) in [1, 2, 16, 33, 255, 256, 300, 5000].into_iter().enumerate() {
        conform(KINDS[[0, 2, 3][i % 3]], Form::F16, 1, 3, [32, 64, 16][i % 3], Some(window));
        if i % 2 == 0 {
            conform(KINDS[i / 2 % 4], Form::F32, 1, 2, [32, 16][i / 2 % 2], Some(window));
        }
    }
}

/// Caps far below and above the scores; sinks beyond every score, below all, and among them.
#[test]
fn soft_caps_and_sinks() {
    let sinks = [0.5, 30.0, -20.0, 4.0];
    for (i, (cap, sinks, window)) in [
        (Some(1.5), &sinks[..0], None),
        (Some(6.0), &sinks[..], Some(100)),
        (Some(50.0), &sinks[..0], Some(300)),
        (None, &sinks[..], None),
    ]
    .into_iter()
    .enumerate()
    {
        let shape = Shape { heads: 4, kv_heads: 2, head_dim: [64, 24, 128, 16][i], window };
        for kind in [KvType::F16, KvType::Int8, KvType::Fp8] {
            if i < 2 || kind == KvType::F16 {
                conform_as(kind, Form::F16, shape, cap, sinks);
            }
        }
        conform_as(KINDS[i], Form::F32, shape, cap, sinks);
    }
}

/// Rows of trees against the ends of their paths as plain chunks, bit for bit, and against the oracle, as blocks that see
/// themselves are.
fn conform_masks(kind: KvType, form: Form, kv_heads: usize, group: usize, d: usize, window: Option<usize>) {
    let Some(device) = device("masks") else { return };
    let shape = Shape { heads: kv_heads * group, kv_heads, head_dim: d, window };
    let case = Case::new(&device, kind, shape, 580);
    let mut random = Random(d as u64 + 11);
    let mut plain = Case::new(&device, kind, shape, 580);
    for (start, rows) in [(0, 3), (9, 20), (252, 9), (510, if group == 1 { 64 } else { 12 })] {
        let parents: Vec<_> = (0..rows).map(|row| (row > 0).then(|| random.bits() as usize % row)).collect();
        let masks = tree_mask(&parents);
        let (tree, full) = ((start, rows, Mask::Tree(&masks)), (start, rows, Mask::Full));
        let all = case.run_masked(&[(40, 3, Mask::Causal), tree, full, tree], 3, None, form);
        let (trees, fulls) = (&all[3..3 + rows], &all[3 + rows..3 + 2 * rows]);
        assert_eq!(trees, &all[3 + 2 * rows..], "{kind:?} {form:?} {shape:?} at {start}: twice");
        assert_eq!(case.run_masked(&[full], 0, None, form), fulls, "{kind:?} {form:?} {shape:?} at {start}: alone");
        for row in [0, rows / 2, rows - 1] {
            case.check_oracle_masked(tree, row, &trees[row], form);
            case.check_oracle_masked(full, row, &fulls[row], form);
        }
        let stride = case.stride();
        for leaf in [rows - 1, rows / 2] {
            let path: Vec<usize> = (0..rows).filter(|&j| masks[leaf] >> j & 1 == 1).collect();
            let from = path.iter().flat_map(|j| &case.qkv[(start + j) * stride..][..stride]);
            let qkv: Vec<f32> = from.copied().collect();
            plain.put(start, &qkv);
            let want = plain.run(&[(start, path.len())], 0, None, form);
            for (want, &row) in want.iter().zip(&path) {
                assert_eq!(&trees[row], want, "{kind:?} {form:?} {shape:?}: row {row} at {start}");
            }
        }
        plain.put(start, &case.qkv[start * stride..(start + rows) * stride]);
    }
}

#[test]
fn masks() {
    for (i, (kv_heads, group, d, window)) in [
        (1, 1, 8, None),
        (2, 3, 40, None),
        (1, 8, 128, None),
        (1, 5, 24, Some(1)),
        (1, 2, 16, Some(33)),
        (1, 4, 64, Some(280)),
    ]
    .into_iter()
    .enumerate()
    {
        conform_masks(KINDS[[0, 2][i % 2]], Form::F16, kv_heads, group, d, window);
        if i % 2 == 0 {
            conform_masks(KINDS[i / 2], Form::F32, kv_heads, group, d, window);
        }
    }
}

#[test]
fn the_order_of_columns_is_that_which_was_asked_for() {
    let Some(device) = device("the_order_of_columns_is_that_which_was_asked_for") else { return };
    let shape = Shape { heads: 6, kv_heads: 2, head_dim: 24, window: None };
    let case = Case::new(&device, KvType::F16, shape, 40);
    let order = Random(4).order(case.width());
    for form in FORMS {
        let (plain, ordered) = (case.run(&[(20, 5)], 0, None, form), case.run(&[(20, 5)], 0, Some(&order), form));
        for (plain, ordered) in plain.iter().zip(&ordered) {
            assert_eq!(plain.factor, ordered.factor);
            let want: Vec<f64> = order.iter().map(|&j| plain.values[j as usize]).collect();
            assert_eq!(want, ordered.values[..case.width()]);
        }
    }
}

/// A token whose key or value is not a number is seen by later rows of its chunk, and by nobody before it.
#[test]
fn a_bad_token_reaches_only_those_who_see_it() {
    let Some(device) = device("a_bad_token_reaches_only_those_who_see_it") else { return };
    for kind in KINDS {
        let shape = Shape { heads: 2, kv_heads: 1, head_dim: 32, window: Some(20) };
        let mut case = Case::new(&device, kind, shape, 60);
        let good = case.run(&[(0, 60)], 0, None, Form::F16);
        let stride = case.stride();
        let bad = 30;
        let mut row = case.qkv[bad * stride..(bad + 1) * stride].to_vec();
        row[3 * 32 + 5] = f32::NAN;
        let (dq, dp) = (up(&device, &row), up(&device, &[case.table[1] * 16 + 14]));
        let what = RopeAppend { rope: None, norms: None, places: dp.ptr(), heads: 2 };
        case.ops.rope_append(dq.ptr(), &what, &case.pool, 1, 1).unwrap();
        // A query that is not a number spoils its own row.
        case.qkv[5 * stride] = f32::NAN;
        for (i, (got, good)) in case.run(&[(0, 60)], 0, None, Form::F16).iter().zip(&good).enumerate() {
            if i == 5 || (bad..bad + 20).contains(&i) {
                assert!(got.factor.is_nan(), "{kind:?} row {i} sees it");
            } else {
                assert_eq!(got, good, "{kind:?} row {i} does not see it");
            }
        }
    }
}

/// Queries and scores far beyond what f16 holds.
#[test]
fn large_queries_keep_their_meaning() {
    let Some(device) = device("large_queries_keep_their_meaning") else { return };
    let shape = Shape { heads: 2, kv_heads: 1, head_dim: 64, window: None };
    let mut case = Case::new(&device, KvType::F16, shape, 50);
    let before = case.run(&[(49, 1)], 0, None, Form::F16);
    for power in [40, -40] {
        let factor = 2f32.powi(power);
        case.qkv.iter_mut().for_each(|x| *x *= factor);
        case.scale /= factor;
        assert_eq!(case.run(&[(49, 1)], 0, None, Form::F16), before, "2^{power}");
        case.qkv.iter_mut().for_each(|x| *x /= factor);
        case.scale *= factor;
    }
}

/// Long contexts in front of one row are cut into splits, in front of many they are not: same bits.
#[test]
fn cuts_do_not_show() {
    let Some(device) = device("cuts_do_not_show") else { return };
    for (kind, window) in [(KvType::F16, None), (KvType::Int8, Some(700))] {
        let shape = Shape { heads: 4, kv_heads: 1, head_dim: 16, window };
        let case = Case::new(&device, kind, shape, 2100);
        let rows: Vec<(usize, usize)> = (0..5).map(|i| (2095 - 400 * i, 1)).collect();
        let alone: Vec<Row> = rows.iter().flat_map(|&r| case.run(&[r], 0, None, Form::F16)).collect();
        // So many that each is done by one block of threads.
        let many: Vec<(usize, usize)> = rows.iter().cycle().take(400).copied().collect();
        for (i, got) in case.run(&many, 0, None, Form::F16).iter().enumerate() {
            assert_eq!(got, &alone[i % 5], "{kind:?} {i}");
        }
        case.check_oracle(rows[1], 0, &alone[1], Form::F16);
    }
}

/// A recorded graph serves later steps of as many rows, with longer contexts and other blocks.
#[test]
fn a_graph_serves_growing_contexts() {
    let Some(device) = device("a_graph_serves_growing_contexts") else { return };
    let shape = Shape { heads: 3, kv_heads: 1, head_dim: 64, window: None };
    let case = Case::new(&device, KvType::F16, shape, 400);
    let stride = case.stride();
    let mut batch = Batch::new(&device, &[shape], 2).unwrap();
    let mut dq: Buffer<f32> = Buffer::new(&device, "a test", 2 * stride).unwrap();
    let to = acts(&device, Form::F16, 2, case.width());
    let params = Params { layer: 1, heads: 3, scale: case.scale, window: None, cap: None, sinks: None };
    let step = |batch: &Batch, dq: &Buffer<f32>| {
        case.attend.run(&case.ops, dq.ptr(), &case.pool, &params, batch, None, &to, 2)
    };
    let set = |batch: &mut Batch, dq: &mut Buffer<f32>, starts: [usize; 2]| {
        for (i, start) in starts.into_iter().enumerate() {
            dq.write(i * stride, &case.qkv[start * stride..(start + 1) * stride]).unwrap();
        }
        let chunk = |start| Chunk { rows: 1, start, blocks: &case.table, mask: Mask::Causal };
        assert!(!batch.set(&starts.map(chunk), 2).unwrap(), "room for small steps");
    };
    set(&mut batch, &mut dq, [3, 20]);
    let graph = device.capture(|| step(&batch, &dq)).unwrap();
    for starts in [[3, 20], [4, 255], [256, 399], [9, 9]] {
        set(&mut batch, &mut dq, starts);
        // SAFETY: batch, queries, pool and result are as they were.
        unsafe { graph.launch().unwrap() };
        let got = read_acts(&to, 2, case.width());
        for (got, start) in got.iter().zip(starts) {
            let want = case.run(&[(start, 1)], 0, None, Form::F16);
            assert_eq!(got.stored, want[0].stored[..got.stored.len()], "row at {start}");
        }
    }
}
