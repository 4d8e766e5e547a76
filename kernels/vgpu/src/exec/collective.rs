//! Instructions in which the lanes of a warp exchange values.

use super::lanes::{Row, store};
use super::memory::each;
use super::{Cta, ReduxKind, Shuffle, ShuffleKind, Vote, VoteKind, Warp};
use crate::check::Kind;
use crate::ptx::types::{NONE, Reg};

impl Cta<'_> {
    /// Checks who takes part: every lane in the mask must be there, and every lane that is there in the mask.
    #[cold]
    pub fn watch_members(&self, w: &Warp, pc: u32, m: u32, mask: &Row<u32>) {
        let first = m.trailing_zeros() as usize;
        let named = mask.0[first];
        if let Some(lane) = each(m).find(|&i| mask.0[i] >> i & 1 == 0) {
            self.report(w, pc, lane, Kind::PartialWarp, &format!("a lane that its own mask {named:#x} leaves out"));
        }
        if let Some(lane) = each(m).find(|&i| mask.0[i] != named) {
            let what = format!("masks {named:#x} and {:#x} in one instruction", mask.0[lane]);
            self.report(w, pc, lane, Kind::PartialWarp, &what);
        }
        let missing = named & !m;
        if missing != 0 {
            let gone = if missing & w.live == 0 { "have exited" } else { "do not come" };
            let what = format!("lanes {missing:#x} of the mask {named:#x} {gone}");
            self.report(w, pc, first, Kind::PartialWarp, &what);
        }
    }

    #[inline(always)]
    pub fn shuffle<const WATCH: bool>(&mut self, w: &mut Warp, pc: u32, x: &Shuffle, m: u32) {
        let (a, b, c) = (w.r[x.a as usize], &w.r[x.b as usize], &w.r[x.c as usize]);
        let mut row = a;
        let mut inside = 0u32;
        let mut absent = 0u32;
        for i in 0..32usize {
            let lane = i as u32;
            let segment = c.0[i] >> 8 & 31;
            let clamp = c.0[i] & 31;
            let most = (lane & segment) | (clamp & !segment);
            let least = lane & segment;
            let by = b.0[i] & 31;
            let (from, ok) = match x.kind {
                ShuffleKind::Up => (lane.wrapping_sub(by), lane as i32 - by as i32 >= most as i32),
                ShuffleKind::Down => (lane + by, lane + by <= most),
                ShuffleKind::Bfly => (lane ^ by, lane ^ by <= most),
                ShuffleKind::Idx => {
                    let from = least | (by & !segment);
                    (from, from <= most)
                }
            };
            let from = if ok { from & 31 } else { lane };
            inside |= u32::from(ok) << i;
            absent |= (!m >> from & 1) << i;
            row.0[i] = a.0[from as usize];
        }
        if WATCH && absent & m != 0 {
            let lane = (absent & m).trailing_zeros() as usize;
            self.report(w, pc, lane, Kind::PartialWarp, "a shuffle from a lane that takes no part");
        }
        store::<u32>(w, x.d, row, m);
        if x.p != NONE {
            let p = &mut w.p[x.p as usize];
            *p = (*p & !m) | (inside & m);
        }
    }

    #[inline(always)]
    pub fn vote(&mut self, w: &mut Warp, x: &Vote, m: u32) {
        let p = w.p[x.p as usize];
        let yes = if x.negate { !p } else { p } & m;
        let answer = match x.kind {
            VoteKind::Ballot => return store::<u32>(w, x.d, Row([yes; 32]), m),
            VoteKind::Any => yes != 0,
            VoteKind::All => yes == m,
            VoteKind::Uni => yes == m || yes == 0,
        };
        let d = &mut w.p[x.d as usize];
        *d = if answer { *d | m } else { *d & !m };
    }

    #[inline(never)]
    pub fn matching(&mut self, w: &mut Warp, d: Reg, a: Reg, wide: bool, all: bool, p: Reg, m: u32) {
        let value = |w: &Warp, i: usize| if wide { w.q[a as usize].0[i] } else { w.r[a as usize].0[i].into() };
        let mut row = Row([0; 32]);
        let mut same = true;
        for i in each(m) {
            row.0[i] = each(m).filter(|&j| value(w, j) == value(w, i)).fold(0, |found, j| found | 1 << j);
            same &= row.0[i] == m;
        }
        if all {
            row = Row([if same { m } else { 0 }; 32]);
            if p != NONE {
                let p = &mut w.p[p as usize];
                *p = if same { *p | m } else { *p & !m };
            }
        }
        store::<u32>(w, d, row, m);
    }

    #[inline(never)]
    pub fn redux(&mut self, w: &mut Warp, kind: ReduxKind, d: Reg, a: Reg, m: u32) {
        let a = &w.r[a as usize];
        let all = each(m).map(|i| a.0[i]).reduce(|x, y| match kind {
            ReduxKind::Add => x.wrapping_add(y),
            ReduxKind::MinS => (x as i32).min(y as i32) as u32,
            ReduxKind::MaxS => (x as i32).max(y as i32) as u32,
            ReduxKind::MinU => x.min(y),
            ReduxKind::MaxU => x.max(y),
            ReduxKind::And => x & y,
            ReduxKind::Or => x | y,
            ReduxKind::Xor => x ^ y,
        });
        store::<u32>(w, d, Row([all.unwrap_or(0); 32]), m);
    }
}
