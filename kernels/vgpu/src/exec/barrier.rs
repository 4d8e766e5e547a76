//! Barriers of a CTA: when all that must come have come.

use super::warp::Waiting;
use super::{Barrier, BarrierKind, Cta, Op, Warp};
use crate::check::{Fault, Kind};
use crate::exec::lanes::{Row, store};

/// What has come to each of a CTA's 16 barriers by `bar.arrive`.
#[derive(Default)]
pub struct Arrivals {
    threads: [u32; 16],
    warps: [u32; 16],
}

impl Cta<'_> {
    /// Lanes `m` come to a barrier. `all`: the lanes that run this instruction, of which its guard may exclude some.
    #[inline(never)]
    pub fn arrive(&mut self, w: &mut Warp, pc: u32, x: &Barrier, m: u32, all: u32) -> Result<bool, Fault> {
        let lane = m.trailing_zeros() as usize;
        let id = w.r[x.id as usize].0[lane];
        let count = if x.count == crate::ptx::types::NONE { 0 } else { w.r[x.count as usize].0[lane] };
        if id >= 16 || count % 32 != 0 {
            let what = format!("barrier {id} of {count} threads: numbers are 0 to 15, threads come in 32");
            return Err(self.fault(w, pc, lane, Kind::Divergence, &what));
        }
        if m != all {
            let what = "a barrier under a predicate that not all lanes share";
            return Err(self.fault(w, pc, lane, Kind::Divergence, what));
        }
        if x.kind == BarrierKind::Arrive {
            let arrivals = &mut self.arrivals;
            arrivals.threads[id as usize] += 32;
            arrivals.warps[id as usize] |= 1 << w.id;
            return Ok(false);
        }
        let votes = if matches!(x.kind, BarrierKind::Sync) {
            0
        } else {
            let p = w.p[x.p as usize];
            if x.negate { !p } else { p }
        };
        match &mut w.waiting {
            None => w.waiting = Some(Waiting { lanes: m, pc, id, count, votes: votes & m }),
            Some(waiting) if waiting.pc == pc && waiting.id == id => {
                waiting.lanes |= m;
                waiting.votes |= votes & m;
            }
            Some(_) => {
                let what = "lanes of one warp wait at different barriers";
                return Err(self.fault(w, pc, lane, Kind::Divergence, what));
            }
        }
        Ok(true)
    }

    /// Lets go whom a complete barrier holds; false if none is complete.
    pub fn release(&mut self, warps: &mut [Warp]) -> Result<bool, Fault> {
        let mut found = false;
        for id in 0..16 {
            let held = warps.iter().filter(|w| w.waiting.is_some_and(|waiting| waiting.id == id));
            let Some(first) = held.clone().next() else { continue };
            let Some(waiting) = first.waiting else { continue };
            let live = warps.iter().filter(|w| !w.done());
            let threads = held.clone().count() as u32 * 32 + self.arrivals.threads[id as usize];
            let complete = if waiting.count == 0 {
                live.clone().all(|w| {
                    w.waiting.is_some_and(|waiting| waiting.id == id)
                        || self.arrivals.warps[id as usize] >> w.id & 1 == 1
                })
            } else {
                threads >= waiting.count
            };
            if !complete {
                continue;
            }
            found = true;
            self.check_barrier(warps, waiting);
            self.open(warps, waiting);
        }
        Ok(found)
    }

    fn check_barrier(&self, warps: &[Warp], waiting: Waiting) {
        if !self.launch.checks {
            return;
        }
        let held = || warps.iter().filter(|w| w.waiting.is_some_and(|other| other.id == waiting.id));
        if let Some(other) = held().find(|w| w.waiting.is_some_and(|other| other.pc != waiting.pc))
            && waiting.count == 0
        {
            self.report(other, waiting.pc, 0, Kind::Divergence, "warps meet at different barriers");
        }
        for w in held() {
            if w.held() != w.live {
                let what = format!("lanes {:#x} of the warp are elsewhere", w.live & !w.held());
                self.report(w, waiting.pc, 0, Kind::Divergence, &what);
            }
        }
        let threads = self.launch.shape.threads();
        for w in warps {
            let left = threads - w.id * 32;
            let whole = if left >= 32 { !0 } else { (1 << left) - 1 };
            if waiting.count == 0 && w.live != whole {
                let what = format!("lanes {:#x} of warp {} have exited", whole & !w.live, w.id);
                self.report(w, waiting.pc, 0, Kind::Divergence, &what);
            }
        }
    }

    fn open(&mut self, warps: &mut [Warp], waiting: Waiting) {
        let id = waiting.id as usize;
        let (mut any, mut all, mut count) = (false, true, 0);
        let (mut waits, mut everyone) = (0, true);
        for w in warps.iter() {
            match w.waiting {
                Some(other) if other.id == waiting.id => {
                    any |= other.votes != 0;
                    all &= other.votes == other.lanes;
                    count += other.votes.count_ones();
                    waits |= 1 << w.id;
                }
                _ => everyone &= w.done(),
            }
        }
        let time = self.shadow.as_mut().map(|shadow| {
            if everyone {
                shadow.barrier();
                0
            } else {
                shadow.partial(waits, waits | self.arrivals.warps[id])
            }
        });
        for w in warps.iter_mut() {
            let Some(other) = w.waiting.filter(|other| other.id == waiting.id) else { continue };
            if let Op::Barrier(x) = self.launch.kernel.code[other.pc as usize].op {
                match x.kind {
                    BarrierKind::Popc => store::<u32>(w, x.d, Row([count; 32]), other.lanes),
                    BarrierKind::And | BarrierKind::Or => {
                        let answer = if x.kind == BarrierKind::And { all } else { any };
                        let d = &mut w.p[x.d as usize];
                        *d = if answer { *d | other.lanes } else { *d & !other.lanes };
                    }
                    _ => {}
                }
            }
            if let Some(time) = time.filter(|&time| time != 0) {
                *w.met = [[time; 32]; 32];
            }
            w.waiting = None;
        }
        self.arrivals.threads[id] = 0;
        self.arrivals.warps[id] = 0;
    }
}
