//! Loads, stores, atomics, copies and address conversions.

use super::mnemonic::Mnemonic;
use super::operand::Address;
use super::{Lower, Lowered};
use crate::exec::lanes::{Args, lanes};
use crate::exec::{Access, Atomic, AtomicKind, Op, ParamLoad};
use crate::ptx::parse::Operand;
use crate::ptx::types::{NONE, Reg, Space, Ty};

impl Lower<'_> {
    /// Lowers an instruction of this file; false if it is none.
    pub fn memory(&mut self, mn: &mut Mnemonic, o: &[Operand]) -> Lowered<bool> {
        match mn.base() {
            "ld" | "ldu" => self.load(mn, o)?,
            "st" => self.store(mn, o)?,
            "atom" | "red" => self.atomic(mn, o)?,
            "cvta" => self.cvta(mn, o)?,
            "isspacep" => self.isspacep(mn, o)?,
            "cp" => self.copy(mn, o)?,
            "membar" => {
                mn.ignore(&["cta", "gl", "sys"]);
                self.emit(Op::Fence)?;
            }
            "fence" => {
                mn.ignore(&["sc", "acq_rel", "acquire", "release", "cta", "gpu", "sys", "cluster"]);
                self.emit(Op::Fence)?;
            }
            "prefetch" | "prefetchu" | "applypriority" | "discard" => {
                mn.ignore(&["global", "local", "L1", "L2"]);
                mn.ignore_caches();
                self.emit(Op::Fence)?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// The state space that an opcode names, with its sub-qualifiers.
    fn space(&self, mn: &mut Mnemonic) -> Space {
        match mn.one_of(&["global", "shared", "shared::cta", "local", "param", "param::entry", "param::func", "const"])
        {
            Some("global") => Space::Global,
            Some("shared" | "shared::cta") => Space::Shared,
            Some("local") => Space::Local,
            Some("param" | "param::entry" | "param::func") => Space::Param,
            Some(_) => Space::Const,
            None => Space::Generic,
        }
    }

    fn hints(&self, mn: &mut Mnemonic) {
        mn.ignore(&[
            "ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "volatile", "relaxed", "acquire", "release", "acq_rel",
            "weak", "cta", "gpu", "sys", "cluster", "mmio",
        ]);
        mn.ignore_caches();
    }

    /// Elements, their registers, and the registers' common size; loads widen to it.
    fn elements(&mut self, mn: &mut Mnemonic, operand: &Operand, ty: Ty, dest: bool) -> Lowered<(u8, u8, [Reg; 4])> {
        let n = match mn.one_of(&["v2", "v4", "v8"]) {
            Some("v2") => 2,
            Some("v4") => 4,
            Some(_) => return Err("vectors of 8 need a later target".into()),
            None => 1,
        };
        let parts: Vec<Operand> = self.vector(operand).into_iter().cloned().collect();
        if parts.len() != n {
            return Err(format!("{n} registers are needed, got {}", parts.len()));
        }
        let mut regs = [NONE; 4];
        let mut ext = None;
        for (reg, part) in regs.iter_mut().zip(&parts) {
            let is_register = matches!(part, Operand::Name(name) if name != "_" && !name.starts_with("%t") && self.register_of(part).is_ok());
            if is_register {
                let (of, found) = self.register_of(part)?;
                if of == Ty::Pred || of.size() < ty.size() {
                    return Err(format!("{part:?} cannot hold {ty:?}"));
                }
                if ext.is_some_and(|ext| ext != of.size().max(2)) {
                    return Err("registers of different sizes in one access".into());
                }
                ext = Some(of.size().max(2));
                *reg = found;
            } else if dest {
                *reg = self.dest(part, ty)?;
            } else {
                *reg = self.source(part, ty)?;
            }
        }
        Ok((n as u8, ext.unwrap_or(ty.size().max(2)) as u8, regs))
    }

    fn load(&mut self, mn: &mut Mnemonic, o: &[Operand]) -> Lowered<()> {
        let [d, from] = o else { return Err(format!("{} operands of a load", o.len())) };
        let space = self.space(mn);
        self.hints(mn);
        let ty = mn.ty()?;
        let (n, ext, regs) = self.elements(mn, d, ty, true)?;
        let Address { reg, wide, off, space: named, known } = self.address(from)?;
        let size = ty.size() as u8;
        if let (Space::Param, Some(Space::Param), Some(at)) = (space, named, known) {
            let at = at.wrapping_add(off as u64) as u32;
            let bytes = u32::from(size) * u32::from(n);
            if at.saturating_add(bytes) as usize > self.kernel.param_bytes || !at.is_multiple_of(bytes) {
                return Err(format!("{bytes} bytes at {at} of {} of parameters", self.kernel.param_bytes));
            }
            return self.emit(Op::Param(ParamLoad { at, size, signed: ty.signed(), n, ext, regs }));
        }
        let space = place(space, named)?;
        self.emit(Op::Load(Access { space, size, signed: ty.signed(), n, ext, wide, addr: reg, off, regs }))
    }

    fn store(&mut self, mn: &mut Mnemonic, o: &[Operand]) -> Lowered<()> {
        let [to, from] = o else { return Err(format!("{} operands of a store", o.len())) };
        let space = self.space(mn);
        self.hints(mn);
        let ty = mn.ty()?;
        let (n, ext, regs) = self.elements(mn, from, ty, false)?;
        let Address { reg, wide, off, space: named, .. } = self.address(to)?;
        let space = place(space, named)?;
        if matches!(space, Space::Const | Space::Param) {
            return Err(format!("a store to {space:?}"));
        }
        let size = ty.size() as u8;
        self.emit(Op::Store(Access { space, size, signed: false, n, ext, wide, addr: reg, off, regs }))
    }

    fn atomic(&mut self, mn: &mut Mnemonic, o: &[Operand]) -> Lowered<()> {
        let space = self.space(mn);
        self.hints(mn);
        mn.ignore(&["noftz"]);
        let ty = mn.ty()?;
        let kind = match mn.one_of(&["add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"]) {
            Some("add") => AtomicKind::Add,
            Some("min") => AtomicKind::Min,
            Some("max") => AtomicKind::Max,
            Some("and") => AtomicKind::And,
            Some("or") => AtomicKind::Or,
            Some("xor") => AtomicKind::Xor,
            Some("exch") => AtomicKind::Exch,
            Some("cas") => AtomicKind::Cas,
            Some("inc") => AtomicKind::Inc,
            Some(_) => AtomicKind::Dec,
            None => return Err("an atomic without an operation".into()),
        };
        use Ty::*;
        let known = match kind {
            AtomicKind::Add => matches!(ty, U32 | S32 | U64 | S64 | F32 | F64 | F16 | F16x2 | Bf16 | Bf16x2),
            AtomicKind::Min | AtomicKind::Max => matches!(ty, U32 | S32 | U64 | S64),
            AtomicKind::Inc | AtomicKind::Dec => ty == U32,
            AtomicKind::Cas => matches!(ty, B16 | B32 | U32 | S32 | B64 | U64 | S64),
            _ => ty.integer() && ty.size() >= 4,
        };
        if !known {
            return Err(format!("atomic {kind:?} of {ty:?}"));
        }
        let first = usize::from(mn.base() == "atom");
        let needed = first + 2 + usize::from(kind == AtomicKind::Cas);
        if o.len() != needed {
            return Err(format!("{} operands, {needed} are needed", o.len()));
        }
        let d = if first == 1 { self.dest(&o[0], ty)? } else { NONE };
        let Address { reg, wide, off, space: named, .. } = self.address(&o[first])?;
        let space = place(space, named)?;
        let b = self.source(&o[first + 1], ty)?;
        let c = if kind == AtomicKind::Cas { self.source(&o[first + 2], ty)? } else { NONE };
        self.emit(Op::Atomic(Atomic { space, kind, ty, d, addr: reg, wide, off, b, c }))
    }

    /// To and from generic addresses, in which each space but global memory has a window.
    fn cvta(&mut self, mn: &mut Mnemonic, o: &[Operand]) -> Lowered<()> {
        let [d, a] = o else { return Err(format!("{} operands of cvta", o.len())) };
        let to = mn.has("to");
        let space = self.space(mn);
        let ty = mn.ty()?;
        if !ty.wide() {
            return Err("cvta of 32-bit addresses".into());
        }
        let x = Args { d: self.dest(d, ty)?, a: self.source(a, ty)?, ..Args::default() };
        let Some(window) = Self::window(space) else {
            return self.emit(Op::Lanes(lanes!(map1, |a: u64| a), x));
        };
        let x = Args { b: self.const64(window)?, ..x };
        let op = if to {
            lanes!(map2, |a: u64, b: u64| a.wrapping_sub(b))
        } else {
            lanes!(map2, |a: u64, b: u64| a.wrapping_add(b))
        };
        self.emit(Op::Lanes(op, x))
    }

    fn isspacep(&mut self, mn: &mut Mnemonic, o: &[Operand]) -> Lowered<()> {
        let [d, a] = o else { return Err(format!("{} operands of isspacep", o.len())) };
        let space = self.space(mn);
        let x = Args { d: self.dest(d, Ty::Pred)?, a: self.source(a, Ty::U64)?, ..Args::default() };
        let op = match space {
            Space::Shared => lanes!(test1, |a: u64| a >> 32 == crate::ptx::types::SHARED_WINDOW >> 32),
            Space::Local => lanes!(test1, |a: u64| a >> 32 == crate::ptx::types::LOCAL_WINDOW >> 32),
            Space::Global => lanes!(test1, |a: u64| a >> 62 == 1),
            other => return Err(format!("isspacep of {other:?}")),
        };
        self.emit(Op::Lanes(op, x))
    }

    fn copy(&mut self, mn: &mut Mnemonic, o: &[Operand]) -> Lowered<()> {
        if !mn.has("async") {
            return Err("cp without async".into());
        }
        if mn.has("commit_group") {
            return self.emit(Op::CopyCommit);
        }
        if mn.has("wait_all") {
            return self.emit(Op::CopyWait(0));
        }
        if mn.has("wait_group") {
            let [Operand::Int(n)] = o else { return Err("a constant number of groups expected".into()) };
            let n = u32::try_from(*n).map_err(|_| format!("{n} groups"))?;
            // wait_all counts what is not committed yet; wait_group 0 does not.
            return self.emit(Op::CopyWait(n.saturating_add(1)));
        }
        let whole = mn.has("cg");
        mn.ignore(&["ca", "global", "shared", "shared::cta"]);
        mn.ignore_caches();
        let Some(Operand::Int(n)) = o.get(2) else { return Err("a constant size expected".into()) };
        let n = *n;
        if !(matches!(n, 4 | 8) && !whole || n == 16) {
            return Err(format!("cp.async of {n} bytes"));
        }
        let to = self.address(&o[0])?;
        let from = self.address(&o[1])?;
        if !from.wide {
            return Err("a 32-bit global address".into());
        }
        let size = match o.get(3) {
            Some(size) => self.source(size, Ty::U32)?,
            None => self.const32(n as u32)?,
        };
        self.emit(Op::CopyAsync {
            n: n as u8,
            to: to.reg,
            to_wide: to.wide,
            to_off: to.off,
            from: from.reg,
            from_off: from.off,
            size,
        })
    }
}

/// The space of an access: what the opcode says, unless it names a variable that a caller keeps in local memory.
fn place(said: Space, named: Option<Space>) -> Lowered<Space> {
    match (said, named) {
        (Space::Param, Some(Space::Local)) => Ok(Space::Local),
        (Space::Const, Some(Space::Global)) => Ok(Space::Const),
        (Space::Generic, Some(space)) => Ok(space),
        (said, Some(named)) if said != named => Err(format!("a variable of {named:?} accessed as {said:?}")),
        (said, _) => Ok(said),
    }
}
