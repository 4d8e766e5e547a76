//! Heads as their makers' code computes them: every fixture converted, and its golden drafts of four steps after the
//! prompt, and again after a rejection.

use std::{path::Path, sync::Arc};

use quern_convert::{Options, Quant, convert, convert_head};
use quern_kernels::{
    cpu::{acts::Mode, kv::KvType},
    exec::{Chunk, ChunkOutput, CpuExecutor, CpuOptions, Executor, Fed, HeadExecutor, Mask, Output, Plan},
    reference::head::{State, block, guesses},
};
use quern_models::{ModelFile, spec::HeadKind};

use crate::support::{
    Scratch, fixture,
    golden::{Golden, distance},
};

/// Tokens of the goldens' prompts; one more is sampled before the first drafts.
const PROMPT: usize = 21;

/// Largest distance, in the range of the drafts' logits.
const BOUND: f32 = 1e-4;

const BLOCKS: &[u32] = &[9, 2];

/// A fixture's model and its head.
fn files(name: &str, scratch: &Scratch) -> (Arc<ModelFile>, Arc<ModelFile>, Golden) {
    let dir = fixture(&format!("heads/{name}"));
    let golden = Golden::read(&dir);
    // Rounded, they would be further away.
    let options = Options { head_quant: Some(Quant::Keep), ..Options::default() };
    if name == "mimo" {
        let path = scratch.at("whole.qrn");
        convert(&dir, &path, &options, &mut ()).unwrap();
        let file = ModelFile::open(&path).unwrap();
        let head = file.draft().unwrap().clone();
        return (Arc::new(file), head, golden);
    }
    let target = fixture(golden.json["target"].as_str().unwrap());
    let [model, head] = ["model.qrn", "head.qrn"].map(|name| scratch.at(name));
    convert(&target, &model, &options, &mut ()).unwrap();
    let open = |path: &Path| Arc::new(ModelFile::open(path).unwrap());
    convert_head(&dir, &open(&model), &head, false, &options, &mut ()).unwrap();
    (open(&model), open(&head), golden)
}

/// A head that drafts, in exact mode.
struct Drafter<'a> {
    head: Box<dyn HeadExecutor>,
    file: &'a ModelFile,
    text: &'a [u32],
    states: &'a [f32],
}

impl<'a> Drafter<'a> {
    /// One chunk; its logits, of the head's own tokens.
    fn pass(&mut self, tokens: &[u32], start: usize, mask: Mask, from: Option<usize>, fed: &Fed) -> Vec<f32> {
        let output = from.map_or(Output::None, |from| Output::Logits { from });
        let chunk = Chunk { tokens, start, blocks: BLOCKS, mask, output };
        let mut got = self.head.guess(&Plan { chunks: vec![chunk] }, fed).unwrap();
        let Some(ChunkOutput::Logits(logits)) = got.pop() else { return vec![] };
        let known = self.file.spec().draft_head.as_ref().unwrap().model_vocab;
        let Some(tokens) = self.file.tensor("tokens") else { return logits };
        let own = |row: &[f32]| (0..tokens.k).map(|i| row[tokens.at(0, i) as usize]).collect::<Vec<f32>>();
        logits.chunks_exact(known).flat_map(own).collect()
    }

    /// The states of some positions.
    fn states(&self, from: usize, to: usize) -> Fed<'a> {
        let (all, width) = (self.states, self.file.spec().draft_head.as_ref().unwrap().width());
        Fed::Model(vec![&all[from * width..to * width]])
    }

    /// What the last `rows` rows gave for the next, `[rows][hidden]`.
    fn own(&mut self, rows: usize) -> Vec<f32> {
        let (own, hidden) = (self.head.own().unwrap(), self.file.spec().hidden);
        own[own.len() - rows * hidden..].to_vec()
    }

    /// Logits of the drafts after `n` tokens of the text, of which the states of the first `known` were read before, and
    /// what the head's rows gave for the next (of Medusa, none).
    fn step(&mut self, n: usize, known: usize, drafts: &[u32]) -> (Vec<f32>, Vec<f32>) {
        let text = self.text;
        let fed = self.states(known, n - 1);
        match self.file.spec().draft_head.as_ref().unwrap().kind {
            HeadKind::Medusa { .. } => {
                let fed = self.states(n - 2, n - 1);
                (self.pass(&text[n - 1..n], n - 2, Mask::Causal, Some(0), &fed), vec![])
            }
            HeadKind::Block { size, mask, .. } => {
                self.pass(&text[known + 1..n], known, Mask::Causal, None, &fed);
                let tokens: Vec<u32> = (0..size).map(|i| if i == 0 { text[n - 1] } else { mask }).collect();
                let logits = self.pass(&tokens, n - 1, Mask::Full, Some(1), &Fed::Nothing);
                (logits, self.own(size - 1))
            }
            HeadKind::Joined { .. } | HeadKind::Wide { .. } => {
                let mut logits = self.pass(&text[known + 1..n], known, Mask::Causal, Some(n - 2 - known), &fed);
                let mut all = self.own(1);
                for (i, draft) in drafts[..drafts.len() - 1].iter().enumerate() {
                    let own = self.own(1);
                    logits.extend(self.pass(&[*draft], n - 1 + i, Mask::Causal, Some(0), &Fed::Own(vec![&own])));
                    all.extend(self.own(1));
                }
                (logits, all)
            }
        }
    }
}

/// The same by the slow oracle, without a cache.
fn oracle(model: &ModelFile, file: &ModelFile, golden: &Golden, n: usize, drafts: &[u32]) -> Vec<f32> {
    let head = file.spec().draft_head.as_ref().unwrap();
    let (text, states) = (golden.ids("tokens"), &golden.floats("states").data);
    let state = |p: usize| states[p * head.width()..(p + 1) * head.width()].to_vec();
    let mut rows: Vec<(u32, State)> = (0..n - 1).map(|p| (text[p + 1], State::Model(state(p)))).collect();
    match head.kind {
        HeadKind::Block { .. } => return block(file, model, &(0..n - 1).map(state).collect(), text[n - 1]),
        HeadKind::Medusa { .. } => return guesses(file, model, &rows[n - 2..]),
        _ => rows.extend(drafts[..drafts.len() - 1].iter().map(|&draft| (draft, State::Own))),
    }
    let all = guesses(file, model, &rows);
    all[(n - 2) * file.spec().vocab..].to_vec()
}

fn check(name: &str) {
    let scratch = Scratch::new("heads");
    let (model, file, golden) = files(name, &scratch);
    let options = CpuOptions { threads: 1, blocks: 64, mode: Mode::F32, kv: KvType::F32 };
    let mut executor = CpuExecutor::new(model.clone(), options).unwrap();
    let head = executor.head(file.clone()).unwrap();
    let (text, states) = (golden.ids("tokens"), golden.floats("states"));

    // The states are the model's.
    let output = Output::None;
    let chunk = Chunk { tokens: &text[..PROMPT + 2], start: 0, blocks: BLOCKS, mask: Mask::Causal, output };
    let ticket = executor.submit(&Plan { chunks: vec![chunk] }).unwrap();
    executor.collect(ticket).unwrap();
    let width = file.spec().draft_head.as_ref().unwrap().width();
    assert_eq!((states.cols, states.data.len()), (width, (PROMPT + 2) * width), "{name}");
    let off = distance(executor.states().unwrap(), &states.data);
    assert!(off <= BOUND * states.range(), "{name}: states are off by {off:e} of {}", states.range());

    let mut drafter = Drafter { head, file: &file, text, states: &states.data };
    for (step, n, known) in [("first", PROMPT + 1, 0), ("second", PROMPT + 3, PROMPT)] {
        let (want, ids) = (golden.floats(&format!("{step}.logits")), golden.ids(&format!("{step}.ids")));
        let bound = BOUND * want.range();
        let (got, own) = drafter.step(n, known, ids);
        assert_eq!(got.len(), want.data.len(), "{name}, {step}");
        let slow = oracle(&model, &file, &golden, n, ids);
        let (exact, slow) = (distance(&got, &want.data), distance(&slow, &want.data));
        println!(
            "{name}, {step}: {:.1e} of the range away, the oracle {:.1e}",
            exact / want.range(),
            slow / want.range()
        );
        assert!(exact <= bound && slow <= bound, "{name}, {step}: {exact:e}, oracle {slow:e}, bound {bound:e}");
        if !own.is_empty() {
            let want = golden.floats(&format!("{step}.hidden"));
            let off = distance(&own, &want.data);
            assert!(
                off <= BOUND * want.range(),
                "{name}, {step}: what rows gave is off by {off:e} of {}",
                want.range()
            );
        }
        // And the drafts are the golden's.
        for (row, &id) in got.chunks_exact(want.cols).zip(ids) {
            let best = (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
            let best = file.tensor("tokens").map_or(best as u32, |tokens| tokens.at(0, best) as u32);
            assert_eq!(best, id, "{name}, {step}");
        }
    }
}

#[test]
fn eagle1_drafts_as_its_makers_code() {
    check("eagle1");
    check("eagle1-no-bias");
}

#[test]
fn eagle3_drafts_as_its_makers_code() {
    check("eagle3");
    check("eagle3-speculators");
}

#[test]
fn mimo_drafts_as_its_makers_code() {
    check("mimo");
}

#[test]
fn medusa_drafts_as_its_makers_code() {
    check("medusa");
}

#[test]
fn dflash_drafts_as_its_makers_code() {
    check("dflash");
}
