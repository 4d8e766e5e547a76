//! The loop that runs a warp up to its next barrier or its end.

use super::lanes::Row;
#[cfg(target_arch = "x86_64")]
use super::lanes::wide_vectors;
use super::memory::{addresses, each};
use super::{Cta, Ins, Op, Warp};
use crate::check::{Fault, Kind};
use crate::ptx::types::{NONE, Reg};

/// Instructions of a warp after which the CTA's others may run: one that spins on shared memory must not do so alone.
const SLICE: u64 = 1 << 18;

impl Cta<'_> {
    /// Runs `w` until no lane can go on, or for a slice of time.
    pub fn run<const WATCH: bool>(&mut self, w: &mut Warp) -> Result<(), Fault> {
        #[cfg(target_arch = "x86_64")]
        if wide_vectors() {
            #[target_feature(enable = "avx2,fma,bmi1,bmi2,popcnt,lzcnt")]
            fn run<const WATCH: bool>(cta: &mut Cta, w: &mut Warp) -> Result<(), Fault> {
                cta.run_body::<WATCH>(w)
            }
            // SAFETY: the processor has these features.
            return unsafe { run::<WATCH>(self, w) };
        }
        // Seldom: it watches in any case, so that there is one version less to compile.
        self.run_plain(w)
    }

    #[inline(never)]
    fn run_plain(&mut self, w: &mut Warp) -> Result<(), Fault> {
        self.run_body::<true>(w)
    }

    #[inline(always)]
    fn run_body<const WATCH: bool>(&mut self, w: &mut Warp) -> Result<(), Fault> {
        let kernel = self.launch.kernel;
        let code: &[Ins] = &kernel.code;
        let mut spent = 0;
        'choose: loop {
            if spent >= SLICE {
                self.spent += spent;
                return Ok(());
            }
            let Some((mut pc, mut lanes, next)) = self.choose(w)? else {
                self.spent += spent;
                return Ok(());
            };
            loop {
                let ins = &code[pc as usize];
                let mut m = lanes;
                if ins.guard != NONE {
                    let p = w.p[ins.guard as usize];
                    m &= if ins.unless { !p } else { p };
                }
                let count = &mut self.counts[pc as usize];
                count.0 += 1;
                count.1 += u64::from(m.count_ones());
                spent += 1;
                let here = pc;
                pc += 1;
                if m != 0 {
                    match &ins.op {
                        // SAFETY: lowering chose a function that this processor can run.
                        Op::Lanes(run, x) => unsafe { run(w, x, m) },
                        Op::Param(x) => self.param(w, x, m),
                        Op::Load(x) => self.load::<WATCH>(w, here, x, m)?,
                        Op::Store(x) => self.store::<WATCH>(w, here, x, m)?,
                        Op::Atomic(x) => self.atomic::<WATCH>(w, here, x, m)?,
                        Op::Branch(to) => {
                            if m == lanes {
                                pc = *to;
                                if *to <= here && spent >= SLICE {
                                    park(w, lanes, pc);
                                    continue 'choose;
                                }
                            } else {
                                park(w, lanes & m, *to);
                                park(w, lanes & !m, pc);
                                continue 'choose;
                            }
                        }
                        Op::BranchTable(index, table) => {
                            let table = &kernel.tables[*table as usize];
                            park(w, lanes & !m, pc);
                            for lane in each(m) {
                                let at = w.r[*index as usize].0[lane] as usize;
                                let Some(&to) = table.get(at) else {
                                    let what = format!("branch {at} of {}", table.len());
                                    return Err(self.fault(w, here, lane, Kind::OutOfBounds, &what));
                                };
                                w.pcs[lane] = to;
                            }
                            continue 'choose;
                        }
                        Op::Exit => {
                            w.live &= !m;
                            lanes &= !m;
                            if lanes == 0 {
                                continue 'choose;
                            }
                        }
                        Op::Barrier(x) => {
                            if self.arrive(w, here, x, m, lanes)? {
                                park(w, lanes, pc);
                                continue 'choose;
                            }
                        }
                        Op::WarpSync(mask) => {
                            if self.must_park(w, *mask, m, lanes, here) {
                                continue 'choose;
                            }
                            if WATCH {
                                self.meet(w, w.r[*mask as usize].0[m.trailing_zeros() as usize] & m);
                            }
                        }
                        Op::Shuffle(x) => {
                            if self.must_park(w, x.mask, m, lanes, here) {
                                continue 'choose;
                            }
                            if WATCH {
                                self.watch_members(w, here, m, &w.r[x.mask as usize]);
                            }
                            self.shuffle::<WATCH>(w, here, x, m);
                        }
                        Op::Vote(x) => {
                            if self.must_park(w, x.mask, m, lanes, here) {
                                continue 'choose;
                            }
                            if WATCH {
                                self.watch_members(w, here, m, &w.r[x.mask as usize]);
                            }
                            self.vote(w, x, m);
                        }
                        Op::Match { d, a, mask, wide, all, p } => {
                            if self.must_park(w, *mask, m, lanes, here) {
                                continue 'choose;
                            }
                            if WATCH {
                                self.watch_members(w, here, m, &w.r[*mask as usize]);
                            }
                            self.matching(w, *d, *a, *wide, *all, *p, m);
                        }
                        Op::Redux { kind, d, a, mask } => {
                            if self.must_park(w, *mask, m, lanes, here) {
                                continue 'choose;
                            }
                            if WATCH {
                                self.watch_members(w, here, m, &w.r[*mask as usize]);
                            }
                            self.redux(w, *kind, *d, *a, m);
                        }
                        Op::ActiveMask(d) => super::lanes::store::<u32>(w, *d, Row([m; 32]), m),
                        Op::LoadMatrix { n, trans, d, addr, wide, off } => {
                            if self.must_gather(w, m, lanes, here) {
                                continue 'choose;
                            }
                            let at = addresses(w, *addr, *wide, *off);
                            self.load_matrix::<WATCH>(w, here, m, usize::from(*n), *trans, d, &at)?;
                        }
                        Op::Mma { kind, d, a, b, c } => {
                            if self.must_gather(w, m, lanes, here) {
                                continue 'choose;
                            }
                            self.mma(w, here, m, *kind, d, a, b, c)?;
                        }
                        Op::CopyAsync { n, to, to_wide, to_off, from, from_off, size } => {
                            let to = addresses(w, *to, *to_wide, *to_off);
                            self.copy_async::<WATCH>(w, here, m, *n, &to, (*from, *from_off), *size)?;
                        }
                        Op::CopyCommit => w.copies.commit(m),
                        Op::CopyWait(left) => self.copy_wait(w, m, left.checked_sub(1)),
                        Op::Fence => {}
                        Op::Trap => {
                            let lane = m.trailing_zeros() as usize;
                            return Err(self.fault(w, here, lane, Kind::Trap, "the kernel gave up"));
                        }
                        Op::Assert { at } => return Err(self.assertion(w, here, m, at)),
                    }
                }
                if pc >= next {
                    park(w, lanes, pc);
                    continue 'choose;
                }
            }
        }
    }

    /// The lanes to run: those at the lowest instruction; and the lowest of the others. None: nobody can go on.
    #[inline(always)]
    fn choose(&mut self, w: &mut Warp) -> Result<Option<(u32, u32, u32)>, Fault> {
        w.parked &= w.live;
        let mut ready = w.live & !w.held() & !w.parked;
        if ready == 0 && w.parked != 0 {
            ready = self.unpark(w)?;
        }
        if ready == 0 {
            return Ok(None);
        }
        let mut pc = u32::MAX;
        for i in 0..32 {
            let at = if ready >> i & 1 == 1 { w.pcs[i] } else { u32::MAX };
            pc = pc.min(at);
        }
        let (mut lanes, mut next) = (0u32, u32::MAX);
        for i in 0..32 {
            let on = ready >> i & 1 == 1;
            let here = on && w.pcs[i] == pc;
            lanes |= u32::from(here) << i;
            next = next.min(if on && !here { w.pcs[i] } else { u32::MAX });
        }
        Ok(Some((pc, lanes, next)))
    }

    /// Nobody runs and some wait at `.sync` instructions: those whose company is complete go on.
    #[cold]
    fn unpark(&mut self, w: &mut Warp) -> Result<u32, Fault> {
        let code = &self.launch.kernel.code;
        let mut rest = w.parked;
        while rest != 0 {
            let lane = rest.trailing_zeros() as usize;
            let pc = w.pcs[lane];
            let group = each(w.parked).filter(|&i| w.pcs[i] == pc).fold(0, |all, i| all | 1 << i);
            rest &= !group;
            let mask = match code[pc as usize].op {
                Op::Shuffle(x) => x.mask,
                Op::Vote(x) => x.mask,
                Op::Match { mask, .. } | Op::Redux { mask, .. } | Op::WarpSync(mask) => mask,
                _ => NONE,
            };
            let named = if mask == NONE { !0 } else { w.r[mask as usize].0[lane] };
            if named & w.live & !group == 0 {
                w.parked &= !group;
                return Ok(group);
            }
        }
        if w.waiting.is_some() {
            // Others of the warp are at a barrier and never come.
            let lane = w.parked.trailing_zeros() as usize;
            let what = format!("lanes {:#x} wait for lanes that wait at a barrier", w.parked);
            return Err(self.fault(w, w.pcs[lane], lane, Kind::Deadlock, &what));
        }
        let lane = w.parked.trailing_zeros() as usize;
        let what = format!("lanes {:#x} wait for each other at different instructions", w.parked);
        Err(self.fault(w, w.pcs[lane], lane, Kind::Deadlock, &what))
    }

    /// Whether lanes must wait here because others that their mask names have not come.
    #[inline(always)]
    fn must_park(&mut self, w: &mut Warp, mask: Reg, m: u32, lanes: u32, pc: u32) -> bool {
        let named = w.r[mask as usize].0[m.trailing_zeros() as usize] & w.live;
        if named & !m == 0 {
            return false;
        }
        self.wait_here(w, m, lanes, pc)
    }

    /// The same for instructions of the whole warp.
    #[inline(always)]
    fn must_gather(&mut self, w: &mut Warp, m: u32, lanes: u32, pc: u32) -> bool {
        if w.live & !m == 0 {
            return false;
        }
        self.wait_here(w, m, lanes, pc)
    }

    #[cold]
    fn wait_here(&mut self, w: &mut Warp, m: u32, lanes: u32, pc: u32) -> bool {
        // Lanes that the guard excludes do not come; those that wait come back to this instruction.
        park(w, lanes & !m, pc + 1);
        park(w, m, pc);
        w.parked |= m;
        self.counts[pc as usize].0 -= 1;
        self.counts[pc as usize].1 -= u64::from(m.count_ones());
        true
    }

    /// Lanes meet at `bar.warp.sync`.
    #[cold]
    fn meet(&mut self, w: &mut Warp, lanes: u32) {
        let Some(shadow) = &mut self.shadow else { return };
        let time = shadow.warp();
        for i in each(lanes) {
            for j in each(lanes) {
                w.met[i][j] = time;
            }
        }
    }

    #[cold]
    fn assertion(&mut self, w: &Warp, pc: u32, m: u32, at: &[u32; 3]) -> Fault {
        let lane = m.trailing_zeros() as usize;
        let local = |at: u32, bytes: usize| -> u64 {
            let from = lane * self.launch.kernel.local_bytes + at as usize;
            let mut value = [0; 8];
            if let Some(found) = w.local.get(from..from + bytes) {
                value[..bytes].copy_from_slice(found);
            }
            u64::from_le_bytes(value)
        };
        let (message, file, line) = (local(at[0], 8), local(at[1], 8), local(at[2], 4));
        let what = format!("{} ({}:{line})", self.launch.text(message), self.launch.text(file));
        self.fault(w, pc, lane, Kind::Assert, &what)
    }
}

/// Notes where lanes go on.
#[inline(always)]
fn park(w: &mut Warp, lanes: u32, pc: u32) {
    for i in 0..32 {
        w.pcs[i] = if lanes >> i & 1 == 1 { pc } else { w.pcs[i] };
    }
}
