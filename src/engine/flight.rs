//! Steps under way: the next one is started before the tokens of the last one are known.
//!
//! Between two steps a device would wait for the host: for tokens to come back, for what becomes of them, for the next
//! plan. Where the device can ([`Executor::has_next`](quern_kernels::exec::Executor::has_next)), the next step is
//! submitted while it computes: what a step of single tokens looks like does not depend on which tokens they are, and the
//! device finds them where it chose them. The host then looks at the last step's tokens, and the caller hands them out,
//! while the next one runs.
//!
//! That is for steps in which every running sequence gets its next token and nothing else: nobody waits or starts, none
//! is at its last token, none guesses, no constraint, penalty or logprob needs the token on the host. What is not known
//! is whether a text ends with its token; the row behind such an end is computed for nothing. A row that read a token
//! which the device did not know is computed again. Either way nothing but time is lost: a row writes to its own slot,
//! which is written again before it is read.

use std::time::Instant;

use quern_kernels::exec::{ChunkOutput, Ticket};

use super::{
    EngineError, Event,
    run::{Engine, failed, plan},
};
use crate::sched::{Scheduled, UNKNOWN};

/// A step that was submitted.
pub(super) struct Flight {
    pub ticket: Ticket,
    pub shares: Vec<Scheduled>,
    /// When it was submitted.
    pub start: Instant,
    /// Guesses were looked for before it: there is nothing new to look at until its tokens are known.
    pub asked: bool,
    /// The scheduler takes it for computed, with tokens that are not known.
    pub told: bool,
}

impl Engine {
    /// Starts the step behind the one under way, if it can be started now.
    pub(super) fn next(&mut self, flight: &mut Flight) -> Result<Option<Flight>, EngineError> {
        if !self.executor.has_next() || self.writer.is_some() {
            return Ok(None);
        }
        // Whose text has ended, or was cancelled, has a row there that nobody waits for.
        let live = |share: &&Scheduled| self.active.contains_key(&share.id);
        let shares: Vec<Scheduled> = flight.shares.iter().filter(live).copied().collect();
        let goes_on =
            |share: &Scheduled| share.last && share.guesses == 0 && self.active[&share.id].needs_no_token(self.context);
        if shares.is_empty() || !self.scheduler.is_steady(shares.len()) || !shares.iter().all(goes_on) {
            return Ok(None);
        }
        if !flight.asked {
            let budget = self.pace.budget(shares.len());
            if !self.guesser.guess(&self.scheduler, &mut self.active, budget, self.context).is_empty() {
                return Ok(None);
            }
        }
        shares.iter().for_each(|&share| self.scheduler.computed(share, &[UNKNOWN]));
        flight.told = true;
        let step = self.scheduler.schedule(|_| 0);
        debug_assert!(step.copies.is_empty() && step.started.is_empty() && step.shares.len() == shares.len());
        let place = |share: &Scheduled| flight.shares.iter().position(|before| before.id == share.id);
        let from: Vec<usize> = step.shares.iter().filter_map(place).collect();
        let plan = plan(&self.scheduler, &self.active, &step.shares);
        let start = Instant::now();
        let ticket = self.executor.submit_next(&plan, &from).map_err(failed)?;
        Ok(ticket.map(|ticket| Flight { ticket, shares: step.shares, start, asked: false, told: false }))
    }

    /// Waits for a step and takes what it gave.
    pub(super) fn land(&mut self, flight: Flight, events: &mut Vec<Event>) -> Result<(), EngineError> {
        let Flight { ticket, shares, start, asked, told } = flight;
        let outputs = self.executor.collect(ticket).map_err(failed)?;
        if let Some(writer) = self.writer.as_mut().filter(|writer| writer.keeps()) {
            writer.keep(&self.scheduler, &shares, self.executor.states().map_err(failed)?);
        }
        let took = start.max(self.landed).elapsed();
        self.landed = Instant::now();
        let tokens = shares.iter().map(|s| s.count).sum();
        self.stats.steps += 1;
        self.stats.overlapped += u64::from(!asked);
        self.stats.computed += tokens as u64;
        let prompts = shares.iter().map(|s| s.count - s.guesses).filter(|&count| count > 1).sum();
        self.pace.took(tokens, prompts, took);
        if prompts == 0 {
            self.guesser.took(tokens, took.as_secs_f64());
        }
        for (share, output) in shares.into_iter().zip(outputs) {
            if self.active.contains_key(&share.id) && !matches!(output, ChunkOutput::Unknown) {
                self.receive(share, output, told, events)?;
            }
        }
        Ok(())
    }

    /// Waits for a step whose tokens nobody waits for.
    pub(super) fn forget(&mut self) -> Result<(), EngineError> {
        if let Some(flight) = self.flight.take() {
            self.executor.collect(flight.ticket).map_err(failed)?;
        }
        Ok(())
    }
}
