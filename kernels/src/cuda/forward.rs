//! One pass of a decoder on the device: embedding, layers, head; or the last layers and the head, behind layers that
//! are computed elsewhere.
//!
//! What differs from pass to pass (tokens, positions, places in the cache, angles) goes up in one copy; everything after
//! it is launches on one stream, in an order and with shapes that depend on the number of rows and on how attention's
//! work is cut. A pass of single tokens is recorded once per such shape and replayed as a graph.

mod guess;

use std::{collections::HashMap, ops::Range, sync::Arc};

use quern_models::{
    ModelFile, ModelSpec,
    spec::{Attn, Layer, Mlp, States},
};

use self::guess::{Guessing, Kept};
use super::{
    Buffer, CudaError, Device, DevicePtr, Graph, Pinned,
    acts::{ALL, Acts, Form},
    attend::{Attend, Params},
    batch::{self, Batch, Cut, Shape},
    choose::{Ask, Choose},
    device::Event,
    exec::{HEAD_ROWS, Part, table, widths},
    kv::KvPool,
    linear::{Linear, Output},
    model::{Block, Experts, Input, LayerWeights, MlpWeights, Model},
    ops::{Ops, RopeAppend},
    route::{self, Route},
    stage::Stages,
};
use crate::{
    cpu::acts::Forms,
    exec::{Angles, Fed, Plan},
    sample::Need,
};

/// A model on its device, or its last layers, or a head, their cache and the buffers of a pass.
pub(super) struct Forward {
    device: Arc<Device>,
    file: Arc<ModelFile>,
    model: Model,
    kv: KvPool,
    form: Form,
    linear: Linear,
    ops: Ops,
    attend: Attend,
    choose: Choose,
    mixing: Option<Mixing>,
    bufs: Buffers,
    rows: usize,
    /// Which half of the logits and of what is chosen from them belongs to the pass launched last.
    half: usize,
    guessing: Option<Guessing>,
    kept: Option<Kept>,
    /// Recorded passes of single tokens, by their number, how attention's work is cut, and whether states are fused.
    graphs: HashMap<(usize, Cut, bool), Graph>,
}

/// Slots that are moved by one copy.
const MOVED: usize = 64;

/// Most recorded passes; beyond it all are forgotten.
const MOST_GRAPHS: usize = 64;

/// Partial sums of a row, at most: a layer is cut only while it has fewer panels of 64 than 7/8 of the multiprocessors.
const MOST_PARTIALS: usize = 2 * 64 * 7 / 8 * 256;

/// Buffers of a pass. `m` rows.
struct Buffers {
    /// Slots that are moved in a sequence, from and to: `[MOVED][2]`.
    moves: Buffer<u32>,
    /// Tokens, positions, the rows that something is wanted of, and where tokens come from that the pass before
    /// chooses: `[4][rows]`.
    numbers: Buffer<u32>,
    numbers_host: Stages<u32>,
    /// Cosines, then sines, of each distinct rope: `[rows][head_dim / 2]`.
    angles: Buffer<f32>,
    angles_host: Stages<f32>,
    batch: Batch,
    /// Residual stream, `[m][hidden]`.
    x: Buffer<f32>,
    /// What comes from layers before, if they are elsewhere: `[rows][hidden]`.
    x_host: Option<Pinned<f32>>,
    /// Queries, keys, values side by side, `[m][q + 2 kv]`.
    qkv: Buffer<f32>,
    /// Gate and up side by side, `[m][2 inner]`, or up; what a half of a layer gives, `[m][hidden]`, where a norm is
    /// behind it.
    up: Buffer<f32>,
    /// Inputs of q, k, v, gate, up; of o; of down; of the head.
    hidden: Acts,
    attended: Acts,
    inner: Acts,
    last: Acts,
    /// `[halves][HEAD_ROWS][vocab]`.
    logits: Buffer<f32>,
    /// `[HEAD_ROWS][hidden]`.
    states: Buffer<f32>,
    /// `[halves][HEAD_ROWS][4]`.
    best: Buffer<u32>,
    /// What was chosen on its way to the host: one per half.
    chosen: Vec<Landing>,
}

/// A copy on the host of what was chosen, and the moment from which it is there.
struct Landing {
    values: Pinned<u32>,
    there: Event,
}

impl Landing {
    fn new(device: &Arc<Device>) -> Result<Landing, CudaError> {
        Ok(Landing { values: Pinned::new(device, 4 * HEAD_ROWS)?, there: Event::new(device)? })
    }
}

/// A pass may be launched while the results of the one before have not been looked at, if all layers are here: its logits
/// and choices have a half of their own. Heads, and layers behind others, have one.
fn halves(spec: &ModelSpec, first: usize) -> usize {
    if first == 0 && spec.draft_head.is_none() { 2 } else { 1 }
}

/// Sizes of the buffers.
struct Sizes {
    qkv: usize,
    up: usize,
    angles: usize,
    widths: [usize; 3],
}

impl Sizes {
    fn of(spec: &ModelSpec, layers: &[Layer], rows: usize, widths: [usize; 3], angles: usize) -> Sizes {
        let row = |attn: &Attn| {
            let (q, kv) = self::widths(attn);
            q + 2 * kv
        };
        let up = |mlp: &Mlp| match *mlp {
            Mlp::Gated { inner, .. } => 2 * inner,
            Mlp::Plain { inner, .. } => inner,
            Mlp::Experts { .. } => 0,
        };
        let half = |l: &Layer| match l.attn_post_norm.is_some() || l.mlp_post_norm.is_some() {
            true => spec.hidden,
            false => 0,
        };
        Sizes {
            qkv: rows * layers.iter().map(|l| row(&l.attn)).max().unwrap_or(0),
            up: rows * layers.iter().map(|l| up(&l.mlp).max(half(l))).max().unwrap_or(0),
            angles: rows * angles,
            widths,
        }
    }
}

impl Forward {
    pub fn new(
        device: Arc<Device>,
        file: Arc<ModelFile>,
        model: Model,
        kv: KvPool,
        form: Form,
        rows: usize,
    ) -> Result<Forward, CudaError> {
        let (spec, first) = (file.spec(), model.first);
        let both = |a: &Angles| 2 * a.pairs();
        let sizes = Sizes::of(spec, &spec.layers[first..], rows, model.widths(), model.angles.iter().map(both).sum());
        let ([hidden, attended, inner], forms) = (sizes.widths, model.forms());
        let halves = halves(spec, first);
        let what = "buffers of a step";
        let new = |len: usize| Buffer::<f32>::new(&device, what, len);
        let mut bufs = Buffers {
            moves: Buffer::new(&device, what, 2 * MOVED)?,
            numbers: Buffer::new(&device, what, 4 * rows)?,
            numbers_host: Stages::new(&device, 4 * rows)?,
            angles: new(sizes.angles)?,
            angles_host: Stages::new(&device, sizes.angles)?,
            batch: Batch::new(&device, &shapes(&spec.layers[first..]), rows)?,
            x: new(rows * spec.hidden)?,
            x_host: (first > 0).then(|| Pinned::new(&device, rows * spec.hidden)).transpose()?,
            qkv: new(sizes.qkv)?,
            up: new(sizes.up)?,
            hidden: Acts::with(&device, form, forms[0], rows, hidden)?,
            attended: Acts::with(&device, form, forms[1], rows, attended)?,
            inner: Acts::with(&device, form, forms[2], rows, inner)?,
            last: Acts::with(&device, form, forms[3], HEAD_ROWS, hidden)?,
            logits: new(halves * HEAD_ROWS * spec.vocab)?,
            states: new(HEAD_ROWS * spec.hidden)?,
            best: Buffer::new(&device, what, halves * 4 * HEAD_ROWS)?,
            chosen: (0..halves).map(|_| Landing::new(&device)).collect::<Result<_, _>>()?,
        };
        bufs.batch.lend(kv.spare());
        let mut linear = Linear::new(&device)?;
        let layers = model
            .layers
            .iter()
            .flat_map(|l| [l.qkv.iter().collect(), vec![&l.o], l.mlp_readers(), l.down().into_iter().collect()]);
        for group in layers.collect::<Vec<_>>() {
            linear.reserve(&group, rows)?;
        }
        if let Some(head) = model.head() {
            linear.reserve(&[head], HEAD_ROWS)?;
        }
        let mixing = Mixing::new(&device, &spec.layers[first..], &model, form, rows)?;
        let guessing = Guessing::new(&device, spec, &model, &mut linear, form, rows)?;
        let own = spec.draft_head.as_ref().map(|head| match head.feeds_normed() {
            true => States::Normed,
            false => States::Before { layers: vec![spec.layers.len()] },
        });
        let mut forward = Forward {
            linear,
            ops: Ops::new(&device)?,
            attend: Attend::new(&device)?,
            choose: Choose::new(&device, HEAD_ROWS, spec.vocab)?,
            mixing,
            device,
            file: file.clone(),
            model,
            kv,
            form,
            bufs,
            rows,
            half: 0,
            guessing,
            kept: None,
            graphs: HashMap::new(),
        };
        own.map(|own| forward.keep(own)).transpose()?;
        Ok(forward)
    }

    /// Bytes of the buffers that [`Forward::new`] allocates for the layers from `first` on, and of those that uploading
    /// needs for a while, from above.
    pub fn scratch(file: &ModelFile, form: Form, first: usize, rows: usize) -> usize {
        let spec = file.spec();
        let layers = &spec.layers[first..];
        let wide = |k: usize| k.next_multiple_of(256);
        let q = layers.iter().map(|l| self::widths(&l.attn).0).max().unwrap_or(0);
        let inner = layers.iter().filter(|l| !l.mlp.routed()).map(|l| l.mlp.inner()).max().unwrap_or(0);
        let half = layers.iter().map(|l| {
            let Attn::Gqa { head_dim, .. } = l.attn;
            head_dim
        });
        let widths = [wide(spec.hidden), wide(q), wide(inner)];
        let sizes = Sizes::of(spec, layers, rows, widths, half.max().unwrap_or(0));
        let last = HEAD_ROWS * (halves(spec, first) * spec.vocab + spec.hidden);
        let floats = sizes.qkv + sizes.up + sizes.angles + rows * spec.hidden + last;
        let shared = spec.draft_head.as_ref().is_some_and(|head| head.shared_head);
        let held = if shared { ALL } else { Model::held(file, first) };
        let acts: usize = widths.iter().map(|&w| Acts::bytes(form, held, rows, w)).sum();
        // Partial sums, of a device with as many multiprocessors as any has; floats that are converted on their way up.
        let fixed = 4 * (rows * MOST_PARTIALS + 4 * rows + 8 * HEAD_ROWS + 2 * MOVED) + (48 << 20);
        let last = Acts::bytes(form, held, HEAD_ROWS, widths[0]);
        let guess = Guessing::bytes(spec, form, held, rows);
        let mixing = Mixing::bytes(layers, spec.hidden, form, held, rows);
        4 * floats + acts + last + Batch::bytes(&shapes(layers), rows) + fixed + guess + mixing
    }

    pub fn spec(&self) -> &ModelSpec {
        self.file.spec()
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub fn file(&self) -> &Arc<ModelFile> {
        &self.file
    }

    pub fn model(&self) -> &Model {
        &self.model
    }

    pub fn kv(&self) -> &KvPool {
        &self.kv
    }

    pub fn kv_mut(&mut self) -> &mut KvPool {
        &mut self.kv
    }

    pub fn form(&self) -> Form {
        self.form
    }

    /// Rows of the largest pass.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Runs the rows of a pass through all layers; they stay in the residual stream. `wanted` are those that
    /// [`Forward::normed`] and [`Forward::head`] will be asked for; `states` the residual stream, `[m][hidden]`, where
    /// the layers here are not the first; `fed` what a head reads; `from`, for each row of the pass, which row of what the
    /// pass before chooses is its token, or nothing where tokens are known. Returns before the device is done.
    pub fn layers(
        &mut self,
        plan: &Plan,
        pass: &[Part],
        wanted: &[u32],
        states: Option<&[f32]>,
        fed: &Fed,
        from: &[u32],
    ) -> Result<(), CudaError> {
        let m = self.upload(plan, pass, wanted, states, from)?;
        if !from.is_empty() {
            let chosen = self.bufs.best.at(self.half * 4 * HEAD_ROWS);
            let (tokens, from) = (self.bufs.numbers.at(0), self.bufs.numbers.at(3 * self.rows));
            self.choose.follow(tokens, from, chosen, m)?;
        }
        self.half = (self.half + 1) % self.bufs.chosen.len();
        let fused = self.feed(pass, fed)?;
        if pass.iter().any(|part| part.tokens.len() > 1) || self.bufs.batch.copies().is_some() {
            return self.launch(m, fused);
        }
        let key = (m, self.bufs.batch.cut(), fused);
        if let Some(graph) = self.graphs.get(&key) {
            // SAFETY: the buffers it was recorded with live as long as `self`, and never move.
            return unsafe { graph.launch() };
        }
        let device = self.device.clone();
        let graph = match device.capture(|| self.launch(m, fused)) {
            Ok(graph) => graph,
            Err(error) if error.is_lost() => return Err(error),
            // Recorded steps take memory; without, it goes on as well.
            Err(_) => {
                self.graphs.clear();
                return self.launch(m, fused);
            }
        };
        // SAFETY: as above.
        unsafe { graph.launch()? };
        if self.graphs.len() >= MOST_GRAPHS {
            self.graphs.clear();
        }
        self.graphs.insert(key, graph);
        Ok(())
    }

    /// Sends what the pass is to the device; returns its rows.
    fn upload(
        &mut self,
        plan: &Plan,
        pass: &[Part],
        wanted: &[u32],
        states: Option<&[f32]>,
        from: &[u32],
    ) -> Result<usize, CudaError> {
        if self.guessing.is_some() || states.is_some() {
            // Pinned copies of the last pass's states may still be on their way.
            self.device.synchronize()?;
        }
        let rows = self.rows;
        let mut m = 0;
        let (mut tokens, mut positions) = (vec![], vec![]);
        let mut chunks = vec![];
        for part in pass {
            let chunk = &plan.chunks[part.chunk];
            let (start, end) = (chunk.start + part.tokens.start, chunk.start + part.tokens.end);
            chunks.push(batch::Chunk { rows: part.tokens.len(), start, blocks: table(chunk, end), mask: chunk.mask });
            for row in part.tokens.clone() {
                tokens.push(chunk.tokens[row]);
                positions.push(chunk.position(row));
                m += 1;
            }
        }
        let Buffers { numbers, numbers_host, angles, angles_host, .. } = &mut self.bufs;
        let len = if from.is_empty() { 2 * rows + wanted.len() } else { 3 * rows + m };
        numbers_host.send(numbers, 0, len, |to| {
            to[..m].copy_from_slice(&tokens);
            to[rows..].iter_mut().zip(&positions).for_each(|(to, &position)| *to = position as u32);
            to[2 * rows..][..wanted.len()].copy_from_slice(wanted);
            if !from.is_empty() {
                to[3 * rows..].copy_from_slice(from);
            }
        })?;
        let pairs: Vec<usize> = self.model.angles.iter().map(Angles::pairs).collect();
        let len = 2 * rows * pairs.iter().sum::<usize>();
        self.model.angles.iter_mut().for_each(|angles| angles.turn_to(positions.iter().copied()));
        angles_host.send(angles, 0, len, |to| {
            let mut at = 0;
            for angles in &self.model.angles {
                let (cos, sin) = angles.all();
                let room = rows * angles.pairs();
                to[at..at + cos.len()].copy_from_slice(cos);
                to[at + room..at + room + sin.len()].copy_from_slice(sin);
                at += 2 * room;
            }
        })?;
        match (&mut self.bufs.x_host, states) {
            (Some(pinned), Some(states)) => {
                assert_eq!(states.len(), m * self.file.spec().hidden, "residual stream of {m} rows");
                pinned[..states.len()].copy_from_slice(states);
                // SAFETY: the pinned memory is next changed after the synchronisation at the top.
                unsafe { self.bufs.x.write_async(0, pinned, states.len())? };
            }
            (None, None) => {}
            _ => panic!("layers from {} on, residual stream from elsewhere: {}", self.model.first, states.is_some()),
        }
        if self.bufs.batch.set(&chunks, m)? {
            self.graphs.clear();
        }
        Ok(m)
    }

    /// All launches of the layers, for `m` rows; `fused`: states of a model go through `fuse` first.
    fn launch(&mut self, m: usize, fused: bool) -> Result<(), CudaError> {
        let ropes = self.ropes();
        let Forward { model, kv, linear, ops, attend, bufs, rows, file, guessing, kept, mixing, .. } = self;
        let (spec, rows) = (file.spec(), *rows);
        let hidden = spec.hidden;
        let (tokens, positions) = (bufs.numbers.at(0), bufs.numbers.at(rows));
        if let Some(guessing) = guessing {
            guessing.begin(model, linear, ops, [tokens, positions], bufs.x.ptr(), fused, m)?;
        } else if let (0, Some(embed)) = (model.first, &model.embed) {
            let table = model.positions.as_ref().map(|w| (w, positions));
            linear.embed(embed, tokens, table, spec.embed_scale.unwrap_or(1.0), bufs.x.ptr(), m)?;
        }
        // What a half of a layer gives goes to the residual stream, or, where a norm is behind it, beside it first.
        let gives = |bias: &Option<Buffer<f32>>, out: &Option<Input>| {
            let (stride, bias) = (hidden, bias.as_ref().map(Buffer::ptr));
            match out {
                None => Output::Add { to: bufs.x.ptr(), stride, bias },
                Some(_) => Output::Store { to: bufs.up.ptr(), stride, bias },
            }
        };
        let after = |ops: &Ops, out: &Option<Input>| match out {
            None => Ok(()),
            Some(out) => ops.norm_add(bufs.up.ptr(), &out.norm(), hidden, bufs.x.ptr(), m),
        };
        let last = model.layers.len();
        let kept = kept.as_ref();
        let keep = |i: usize| match kept {
            Some(kept) => kept.keep(ops, [i, last], &model.norm, bufs.x.ptr(), hidden, m),
            None => Ok(()),
        };
        for (i, (layer, shape)) in model.layers.iter().zip(&spec.layers[model.first..]).enumerate() {
            let Attn::Gqa { heads, scale, window, cap, .. } = shape.attn;
            keep(i)?;
            let input = match guessing {
                Some(guessing) if i == 0 && model.wide() => Some(&guessing.input),
                _ => {
                    norm(ops, &layer.attn_in, bufs.x.ptr(), None, &bufs.hidden, hidden, m)?;
                    None
                }
            };
            keys(linear, ops, kv, bufs, layer, &shape.attn, &ropes, input, i, m)?;
            if let Some(copies) = bufs.batch.copies() {
                ops.copy_slots(copies, false, kv, i)?;
            }
            let sinks = layer.sinks.as_ref().map(Buffer::ptr);
            let params = Params { layer: i, heads, scale, window, cap, sinks };
            let order = layer.o_order.as_ref().map(Buffer::ptr);
            attend.run(ops, bufs.qkv.ptr(), kv, &params, &bufs.batch, order, &bufs.attended, m)?;
            linear.run(&[&layer.o], &bufs.attended, m, gives(&layer.o_bias, &layer.attn_out))?;
            after(ops, &layer.attn_out)?;
            norm(ops, &layer.mlp_in, bufs.x.ptr(), None, &bufs.hidden, hidden, m)?;
            let inner = shape.mlp.inner();
            match (&layer.mlp, &*mixing) {
                (MlpWeights::One(block), _) => {
                    let Block { up, up_bias, act, down, down_bias } = &**block;
                    let (to, bias) = (bufs.up.ptr(), up_bias.as_ref().map(Buffer::ptr));
                    let out = Output::Store { to, stride: up.len() * inner, bias };
                    linear.run(&up.iter().collect::<Vec<_>>(), &bufs.hidden, m, out)?;
                    ops.act(to, *act, up.len() > 1, inner, &bufs.inner, m)?;
                    linear.run(&[down], &bufs.inner, m, gives(down_bias, &layer.mlp_out))?;
                    after(ops, &layer.mlp_out)?;
                }
                (MlpWeights::Experts(experts), Some(mixing)) => {
                    mixing.run(linear, ops, experts, &layer.mlp_in, bufs, [hidden, inner], m)?;
                }
                (MlpWeights::Experts(_), None) => unreachable!("there are buffers where there are experts"),
            }
        }
        keep(last)
    }

    /// Cosines and sines of each distinct rope.
    fn ropes(&self) -> Vec<(DevicePtr, DevicePtr)> {
        let mut at = 0;
        let of = |angles: &Angles| {
            let room = self.rows * angles.pairs();
            at += 2 * room;
            (self.bufs.angles.at(at - 2 * room), self.bufs.angles.at(at - room))
        };
        self.model.angles.iter().map(of).collect()
    }

    /// Moves keys and values from place to place (`block * 16 + slot`), in order.
    pub fn move_slots(&mut self, places: &[[u32; 2]]) -> Result<(), CudaError> {
        for some in places.chunks(MOVED) {
            self.bufs.moves.write(0, some.as_flattened())?;
            for layer in 0..self.kv.layers() {
                self.ops.copy_slots((self.bufs.moves.ptr(), some.len()), true, &self.kv, layer)?;
            }
        }
        Ok(())
    }

    /// Final norm of some of the wanted rows, at most [`HEAD_ROWS`]: `[rows][hidden]`.
    pub fn normed(&mut self, rows: Range<usize>) -> Result<Vec<f32>, CudaError> {
        let from = self.wanted(&rows);
        let hidden = self.spec().hidden;
        let (norm, to) = (self.model.norm.norm(), self.bufs.states.ptr());
        self.ops.normed(self.bufs.x.ptr(), Some(from), &norm, hidden, to, rows.len())?;
        let mut values = vec![0.0; rows.len() * hidden];
        self.bufs.states.read(0, &mut values)?;
        Ok(values)
    }

    /// Logits of some of the wanted rows, at most [`HEAD_ROWS`], of the head or the `guess`-th of Medusa's; they stay on
    /// the device until the next call.
    pub fn head(&mut self, rows: Range<usize>, guess: usize) -> Result<(), CudaError> {
        let from = self.wanted(&rows);
        let (vocab, m) = (self.spec().vocab, rows.len());
        self.last(from, guess, m)?;
        let to = self.bufs.logits.at(self.half * HEAD_ROWS * vocab);
        let head = self.model.heads_of(guess);
        self.linear.run(&[head], &self.bufs.last, m, Output::Store { to, stride: vocab, bias: None })?;
        self.spec().logit_cap.map_or(Ok(()), |cap| self.ops.soft_cap(to, cap, vocab, m))
    }

    /// Tokens of rows of the last call of [`Forward::head`], as [`choose::chosen`](super::choose::chosen) understands
    /// them. A row that was asked for has its penalties and biases from then on.
    pub fn choose(&mut self, asks: &[Ask]) -> Result<Vec<[u32; 4]>, CudaError> {
        self.choose_later(asks)?;
        self.chosen(self.half, asks.len())
    }

    /// The same, without waiting: [`Forward::chosen`] has them, of the [`Forward::half`] that it is now.
    pub fn choose_later(&mut self, asks: &[Ask]) -> Result<(), CudaError> {
        let (half, vocab) = (self.half, self.spec().vocab);
        let (logits, first) = (self.bufs.logits.at(half * HEAD_ROWS * vocab), half * 4 * HEAD_ROWS);
        let to = self.bufs.best.at(first);
        let plain =
            |(i, ask): (usize, &Ask)| ask.row == i && Need::of(ask.params, vocab, ask.position, None) == Need::Best;
        if asks.iter().enumerate().all(plain) {
            self.choose.best(logits, asks.len(), to)?;
        } else {
            self.choose.sample(logits, asks, to)?;
        }
        let landing = &mut self.bufs.chosen[half];
        // SAFETY: `chosen` reads it after the event; who has not read it, does not want it.
        unsafe { self.bufs.best.read_async(first, &mut landing.values, 4 * asks.len())? };
        landing.there.record()
    }

    /// What was chosen of `rows` rows of a half; waits for it.
    pub fn chosen(&self, half: usize, rows: usize) -> Result<Vec<[u32; 4]>, CudaError> {
        let Landing { values, there } = &self.bufs.chosen[half];
        there.wait()?;
        Ok(values[..4 * rows].as_chunks::<4>().0.to_vec())
    }

    /// The half of the pass launched last.
    pub fn half(&self) -> usize {
        self.half
    }

    /// Whether a pass may be launched before the results of the last one have been looked at.
    pub fn overlaps(&self) -> bool {
        self.bufs.chosen.len() > 1
    }

    /// Logits of the `i`-th row of the last call of [`Forward::head`] in a half.
    pub fn logits(&mut self, half: usize, i: usize) -> Result<Vec<f32>, CudaError> {
        let vocab = self.spec().vocab;
        let mut logits = vec![0.0; vocab];
        self.bufs.logits.read((half * HEAD_ROWS + i) * vocab, &mut logits)?;
        Ok(logits)
    }

    /// Where the numbers of some of the wanted rows are.
    fn wanted(&self, rows: &Range<usize>) -> DevicePtr {
        assert!(rows.len() <= HEAD_ROWS && rows.end <= self.rows, "rows {rows:?}");
        self.bufs.numbers.at(2 * self.rows + rows.start)
    }
}

/// Queries, keys and values of `m` rows, of which the last two go to their places in the cache. `input`: what they are
/// made of; `None`: the buffer of normed rows.
#[allow(clippy::too_many_arguments)]
fn keys(
    linear: &mut Linear,
    ops: &Ops,
    kv: &KvPool,
    bufs: &Buffers,
    layer: &LayerWeights,
    attn: &Attn,
    ropes: &[(DevicePtr, DevicePtr)],
    input: Option<&Acts>,
    at: usize,
    m: usize,
) -> Result<(), CudaError> {
    let Attn::Gqa { heads, .. } = *attn;
    let (q, kv_width) = widths(attn);
    let bias = layer.qkv_bias.as_ref().map(Buffer::ptr);
    let [wq, wk, wv] = &layer.qkv;
    let out = Output::Store { to: bufs.qkv.ptr(), stride: q + 2 * kv_width, bias };
    linear.run(&[wq, wk, wv], input.unwrap_or(&bufs.hidden), m, out)?;
    let norms = layer.qk_norm.as_ref().map(|(q, k, eps)| (q.ptr(), k.ptr(), *eps));
    let what = RopeAppend { rope: layer.rope.map(|i| ropes[i]), norms, places: bufs.batch.places(), heads };
    ops.rope_append(bufs.qkv.ptr(), &what, kv, at, m)
}

fn norm(
    ops: &Ops,
    input: &Input,
    x: DevicePtr,
    rows: Option<DevicePtr>,
    to: &Acts,
    hidden: usize,
    m: usize,
) -> Result<(), CudaError> {
    let order = input.order.as_ref().map(Buffer::ptr);
    ops.norm(x, rows, &input.norm(), order, hidden, to, m)
}

/// Buffers of mixtures of experts; each takes as many rows as the largest needs.
struct Mixing {
    route: Route,
    routes: route::Routes,
    /// `[rows][experts]`.
    logits: Buffer<f32>,
    /// Inputs of gates and ups, and of downs.
    hidden: Acts,
    inner: Acts,
    /// Gate and up side by side, `[room][2 inner]`.
    up: Buffer<f32>,
    /// `[room][hidden]`.
    out: Buffer<f32>,
}

impl Mixing {
    /// The largest number of experts, of a row's, and of an expert's inner columns.
    fn largest(layers: &[Layer]) -> Option<(route::Shape, usize)> {
        let shapes = layers.iter().filter_map(|l| match l.mlp {
            Mlp::Experts { experts, top, inner, .. } => Some((route::Shape { experts, top }, inner)),
            _ => None,
        });
        let larger = |a: route::Shape, b: route::Shape| route::Shape {
            experts: a.experts.max(b.experts),
            top: a.top.max(b.top),
        };
        shapes.reduce(|(a, inner), (b, other)| (larger(a, b), inner.max(other)))
    }

    fn new(
        device: &Arc<Device>,
        layers: &[Layer],
        model: &Model,
        form: Form,
        rows: usize,
    ) -> Result<Option<Mixing>, CudaError> {
        let (Some((shape, inner)), Some([(forms, width), (inner_forms, inner_width)])) =
            (Mixing::largest(layers), model.of_experts())
        else {
            return Ok(None);
        };
        let (what, room) = ("experts of a step", shape.room(rows));
        // Rows that no expert has are activated like the others.
        let mut up = Buffer::new(device, what, room * 2 * inner)?;
        up.fill(0)?;
        Ok(Some(Mixing {
            route: Route::new(device)?,
            routes: route::Routes::new(device, shape, rows)?,
            logits: Buffer::new(device, what, rows * shape.experts)?,
            hidden: Acts::with(device, form, forms, room, width)?,
            inner: Acts::with(device, form, inner_forms, room, inner_width)?,
            up,
            out: Buffer::new(device, what, room * width)?,
        }))
    }

    /// Bytes of those buffers and of the tables of experts, from above.
    fn bytes(layers: &[Layer], hidden: usize, form: Form, held: Forms, rows: usize) -> usize {
        let Some((shape, inner)) = Mixing::largest(layers) else { return 0 };
        let (room, wide) = (shape.room(rows), |k: usize| k.next_multiple_of(256));
        let acts = Acts::bytes(form, held, room, wide(hidden)) + Acts::bytes(form, held, room, wide(inner));
        let floats = rows * shape.experts + room * (2 * inner + wide(hidden));
        let tables = layers.len() * shape.experts * 3 * 512;
        route::Routes::bytes(shape, rows) + 4 * floats + acts + tables
    }

    /// The feed-forward half of a layer, added to the residual stream.
    #[allow(clippy::too_many_arguments)]
    fn run(
        &self,
        linear: &mut Linear,
        ops: &Ops,
        experts: &Experts,
        input: &Input,
        bufs: &Buffers,
        [hidden, inner]: [usize; 2],
        m: usize,
    ) -> Result<(), CudaError> {
        let Experts { router, up, act, down, shape, normalized } = experts;
        let out = Output::Store { to: self.logits.ptr(), stride: shape.experts, bias: None };
        linear.run(&[router], &bufs.hidden, m, out)?;
        let exact = up.iter().chain([down]).any(|w| w.form == Form::F32);
        let tiles = self.route.run(self.logits.ptr(), *shape, *normalized, exact, &self.routes, m)?;
        let (room, rows) = (shape.room(m), Some(self.routes.rows.ptr()));
        norm(ops, input, bufs.x.ptr(), rows, &self.hidden, hidden, room)?;
        linear.run_experts(&up.each_ref(), &self.hidden, &tiles, self.up.ptr(), 2 * inner)?;
        ops.act(self.up.ptr(), *act, true, inner, &self.inner, room)?;
        linear.run_experts(&[down], &self.inner, &tiles, self.out.ptr(), hidden)?;
        self.route.sum(self.out.ptr(), &self.routes, shape.top, hidden, bufs.x.ptr(), m)
    }
}

/// What attention of each layer looks like.
fn shapes(layers: &[Layer]) -> Vec<Shape> {
    let shape = |attn: &Attn| {
        let Attn::Gqa { heads, kv_heads, head_dim, window, .. } = *attn;
        Shape { heads, kv_heads, head_dim, window }
    };
    layers.iter().map(|l| shape(&l.attn)).collect()
}
