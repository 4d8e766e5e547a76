//! Steps that are launched and looked at later, and steps launched behind them that read the tokens they choose.
//!
//! What makes it possible: everything runs in the order of one stream; what goes up has two pinned copies; logits and
//! choices have two halves, so that a step's are there until it is collected though the next one runs; and tokens are
//! chosen on the device, so that the next step finds them there. Where the device leaves a choice to the host, the step
//! behind has read another token, and its row says so ([`ChunkOutput::Unknown`]).

use super::{
    CudaExecutor, Got, Guesses, HEAD_ROWS, Wanted,
    choose::{self, Ask, Chosen},
    passes, plain, wanted,
};
use crate::{
    cuda::CudaError,
    exec::{ChunkOutput, Fed, Mask, Output, Plan, Ticket},
    sample::{SamplingParams, finish},
};

/// A step under way.
pub(super) struct Later {
    pub number: u64,
    /// Half of the logits and choices.
    half: usize,
    /// One per chunk.
    got: Vec<Got>,
    /// Rows that are chosen from, in the order of the choices.
    asked: Vec<Asked>,
    /// Of a step that reads tokens of the one before: for each chunk, which of that one's rows.
    from: Vec<u32>,
    /// Chunks whose token was not known.
    unknown: Vec<bool>,
}

struct Asked {
    chunk: usize,
    params: SamplingParams,
    position: u64,
}

impl Later {
    /// Whether all rows have read tokens that were known.
    pub fn is_known(&self) -> bool {
        !self.unknown.contains(&true)
    }

    /// The row of the choices that chunk `chunk` ends with.
    fn last_of(&self, chunk: usize) -> Option<u32> {
        self.asked.iter().rposition(|asked| asked.chunk == chunk).map(|row| row as u32)
    }
}

/// Whether the tokens of a chunk are chosen without the host.
fn is_plain(output: &Output) -> bool {
    matches!(output, Output::None | Output::Tokens { logprobs: None, allowed: None, .. })
}

impl CudaExecutor {
    /// Launches a checked plan whose results can wait; `None`: it is none, and nothing was launched. `from`: chunks of
    /// the step under way that choose the tokens of these; empty where tokens are known.
    pub(super) fn submit_later(&mut self, plan: &Plan, from: &[usize]) -> Result<Option<Ticket>, CudaError> {
        let is_head = self.forward.spec().draft_head.is_some();
        if is_head || plan.chunks.is_empty() || !plan.chunks.iter().all(|c| is_plain(&c.output)) {
            return Ok(None);
        }
        let mut passes = passes(plan, self.forward.rows(), self.forward.kv().spare().len());
        let (Some(pass), true) = (passes.pop(), passes.is_empty()) else { return Ok(None) };
        let (_, rows) = wanted(plan, &pass, false);
        if rows.is_empty() || rows.len() > HEAD_ROWS {
            return Ok(None);
        }
        let Some(source) = self.source(plan, from) else { return Ok(None) };
        let vocab = self.forward.spec().vocab;
        let none = Guesses::of(self.forward.model());
        let histories: Vec<_> = rows.iter().map(|r| r.history(&plan.chunks[r.chunk], none)).collect();
        let ask = |(i, row): (usize, &Wanted)| row.ask(&plan.chunks[row.chunk], &histories[i], i, 0, none, vocab);
        let asks: Vec<Ask> = rows.iter().enumerate().filter_map(ask).collect();
        if asks.len() < rows.len() {
            return Ok(None);
        }
        let numbers: Vec<u32> = rows.iter().map(|wanted| wanted.row).collect();
        self.states.clear();
        self.forward.layers(plan, &pass, &numbers, None, &Fed::Nothing, &source)?;
        self.waiting = plan.rows();
        self.forward.head(0..rows.len(), 0)?;
        let mut got: Vec<Got> = plan.chunks.iter().map(|c| Got::new(&c.output)).collect();
        match self.forward.choose_later(&asks) {
            Ok(()) => {}
            // Many penalties need memory; without, the host chooses.
            Err(CudaError::Memory { .. }) if from.is_empty() => {
                self.choose(plan, &rows, 0, &mut got)?;
                return Ok(Some(self.ready.put(got.into_iter().map(Got::done).collect())));
            }
            Err(error) => return Err(error),
        }
        let asked = asks.iter().zip(&rows);
        let asked =
            asked.map(|(ask, row)| Asked { chunk: row.chunk, params: ask.params.clone(), position: ask.position });
        let number = self.ready.number();
        let (half, unknown) = (self.forward.half(), vec![false; plan.chunks.len()]);
        self.later.push_back(Later { number, half, got, asked: asked.collect(), from: source, unknown });
        Ok(Some(Ticket(number)))
    }

    /// Rows of the choices of the step under way that chunks of the next one read; `None` where they cannot.
    fn source(&self, plan: &Plan, from: &[usize]) -> Option<Vec<u32>> {
        if from.is_empty() {
            return Some(vec![]);
        }
        let before = self.later.back()?;
        let follows = |(chunk, &of): (&crate::exec::Chunk, &usize)| {
            let penalizes = matches!(chunk.output, Output::Tokens { params, .. } if params.penalizes());
            let plain = chunk.tokens.len() == 1 && chunk.mask == Mask::Causal && !penalizes;
            before.last_of(of).filter(|_| plain)
        };
        (from.len() == plan.chunks.len()).then_some(())?;
        plan.chunks.iter().zip(from).map(follows).collect()
    }

    /// Waits for the oldest step under way.
    pub(super) fn land(&mut self) -> Result<(), CudaError> {
        let Some(mut later) = self.later.pop_front() else { return Ok(()) };
        let vocab = self.forward.spec().vocab;
        let found = self.forward.chosen(later.half, later.asked.len())?;
        // Rows whose token the next step has not read.
        let mut missed = vec![];
        for (i, (asked, &found)) in later.asked.iter().zip(&found).enumerate() {
            let token = match choose::chosen(found, vocab) {
                _ if later.unknown[asked.chunk] => {
                    missed.push(i as u32);
                    continue;
                }
                Ok(Chosen::Token(token)) => Ok(token),
                Ok(Chosen::Host) => {
                    missed.push(i as u32);
                    finish(&mut self.forward.logits(later.half, i)?, &asked.params, asked.position)
                }
                Err(error) => Err(error),
            };
            later.got[asked.chunk].token(token.map(plain));
        }
        if let Some(next) = self.later.front_mut() {
            for (unknown, row) in next.unknown.iter_mut().zip(&next.from) {
                *unknown = missed.contains(row);
            }
        }
        let output = |(got, unknown): (Got, bool)| if unknown { ChunkOutput::Unknown } else { got.done() };
        let outputs = later.got.into_iter().zip(later.unknown).map(output).collect();
        self.ready.keep(later.number, outputs);
        Ok(())
    }

    /// Waits for all.
    pub(super) fn land_all(&mut self) -> Result<(), CudaError> {
        while !self.later.is_empty() {
            self.land()?;
        }
        Ok(())
    }
}
