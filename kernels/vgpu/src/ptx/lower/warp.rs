//! Instructions of a whole warp: shuffles, votes, matrices.

use super::mnemonic::Mnemonic;
use super::operand::Address;
use super::{Lower, Lowered};
use crate::exec::{MmaKind, Op, ReduxKind, Shuffle, ShuffleKind, Vote, VoteKind};
use crate::ptx::parse::Operand;
use crate::ptx::types::{NONE, Reg, Ty};

impl Lower<'_> {
    /// Lowers an instruction of this file; false if it is none.
    pub fn warp(&mut self, mn: &mut Mnemonic, o: &[Operand]) -> Lowered<bool> {
        match mn.base() {
            "shfl" => self.shuffle(mn, o)?,
            "vote" => self.vote(mn, o)?,
            "match" => self.matching(mn, o)?,
            "redux" => self.redux(mn, o)?,
            "activemask" => {
                mn.types();
                let [d] = o else { return Err("one operand expected".into()) };
                let d = self.dest(d, Ty::B32)?;
                self.emit(Op::ActiveMask(d))?;
            }
            "bar" | "barrier" => {
                mn.ignore(&["warp", "sync"]);
                let [mask] = o else { return Err("a mask expected".into()) };
                let mask = self.source(mask, Ty::B32)?;
                self.emit(Op::WarpSync(mask))?;
            }
            "ldmatrix" => self.ldmatrix(mn, o)?,
            "mma" => self.mma(mn, o)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn shuffle(&mut self, mn: &mut Mnemonic, o: &[Operand]) -> Lowered<()> {
        if !mn.has("sync") || o.len() != 5 {
            return Err("shfl without sync, or not of five operands".into());
        }
        mn.types();
        let kind = match mn.one_of(&["up", "down", "bfly", "idx"]) {
            Some("up") => ShuffleKind::Up,
            Some("down") => ShuffleKind::Down,
            Some("bfly") => ShuffleKind::Bfly,
            Some(_) => ShuffleKind::Idx,
            None => return Err("shfl without a kind".into()),
        };
        let (d, p) = match &o[0] {
            Operand::Pair(d, p) => (self.dest(d, Ty::B32)?, self.dest(p, Ty::Pred)?),
            d => (self.dest(d, Ty::B32)?, NONE),
        };
        let a = self.source(&o[1], Ty::B32)?;
        let b = self.source(&o[2], Ty::B32)?;
        let c = self.source(&o[3], Ty::B32)?;
        let mask = self.source(&o[4], Ty::B32)?;
        self.emit(Op::Shuffle(Shuffle { kind, d, p, a, b, c, mask }))
    }

    fn vote(&mut self, mn: &mut Mnemonic, o: &[Operand]) -> Lowered<()> {
        if !mn.has("sync") || o.len() != 3 {
            return Err("vote without sync, or not of three operands".into());
        }
        mn.types();
        let kind = match mn.one_of(&["ballot", "any", "all", "uni"]) {
            Some("ballot") => VoteKind::Ballot,
            Some("any") => VoteKind::Any,
            Some("all") => VoteKind::All,
            Some(_) => VoteKind::Uni,
            None => return Err("vote without a kind".into()),
        };
        let d = self.dest(&o[0], if kind == VoteKind::Ballot { Ty::B32 } else { Ty::Pred })?;
        let (p, negate) = self.condition(&o[1])?;
        let mask = self.source(&o[2], Ty::B32)?;
        self.emit(Op::Vote(Vote { kind, d, p, negate, mask }))
    }

    fn matching(&mut self, mn: &mut Mnemonic, o: &[Operand]) -> Lowered<()> {
        let ty = mn.ty()?;
        let all = mn.one_of(&["all", "any"]) == Some("all");
        if !mn.has("sync") || o.len() != 3 {
            return Err("match without sync, or not of three operands".into());
        }
        let (d, p) = match &o[0] {
            Operand::Pair(d, p) if all => (self.dest(d, Ty::B32)?, self.dest(p, Ty::Pred)?),
            d => (self.dest(d, Ty::B32)?, NONE),
        };
        let a = self.source(&o[1], ty)?;
        let mask = self.source(&o[2], Ty::B32)?;
        self.emit(Op::Match { d, a, mask, wide: ty.wide(), all, p })
    }

    fn redux(&mut self, mn: &mut Mnemonic, o: &[Operand]) -> Lowered<()> {
        let ty = mn.ty()?;
        if !mn.has("sync") || o.len() != 3 {
            return Err("redux without sync, or not of three operands".into());
        }
        let kind = match (mn.one_of(&["add", "min", "max", "and", "or", "xor"]), ty) {
            (Some("add"), Ty::U32 | Ty::S32) => ReduxKind::Add,
            (Some("min"), Ty::S32) => ReduxKind::MinS,
            (Some("max"), Ty::S32) => ReduxKind::MaxS,
            (Some("min"), Ty::U32) => ReduxKind::MinU,
            (Some("max"), Ty::U32) => ReduxKind::MaxU,
            (Some("and"), Ty::B32) => ReduxKind::And,
            (Some("or"), Ty::B32) => ReduxKind::Or,
            (Some("xor"), Ty::B32) => ReduxKind::Xor,
            (kind, ty) => return Err(format!("redux {kind:?} of {ty:?}")),
        };
        let d = self.dest(&o[0], ty)?;
        let a = self.source(&o[1], ty)?;
        let mask = self.source(&o[2], Ty::B32)?;
        self.emit(Op::Redux { kind, d, a, mask })
    }

    fn ldmatrix(&mut self, mn: &mut Mnemonic, o: &[Operand]) -> Lowered<()> {
        let [d, from] = o else { return Err("two operands expected".into()) };
        if !mn.has("sync") || !mn.has("m8n8") || !mn.has("aligned") {
            return Err("only ldmatrix.sync.aligned.m8n8 is known".into());
        }
        mn.ignore(&["shared", "shared::cta"]);
        mn.types();
        let trans = mn.has("trans");
        let n = match mn.one_of(&["x1", "x2", "x4"]) {
            Some("x1") => 1,
            Some("x2") => 2,
            Some(_) => 4,
            None => return Err("ldmatrix without a number of matrices".into()),
        };
        let d = self.registers(d, n, Ty::B32, true)?;
        let Address { reg, wide, off, .. } = self.address(from)?;
        self.emit(Op::LoadMatrix { n: n as u8, trans, d, addr: reg, wide, off })
    }

    fn mma(&mut self, mn: &mut Mnemonic, o: &[Operand]) -> Lowered<()> {
        if !mn.has("sync") || !mn.has("aligned") || !mn.has("row") || !mn.has("col") || o.len() != 4 {
            return Err("only mma.sync.aligned with a by rows and b by columns is known".into());
        }
        let shape = mn.one_of(&["m16n8k4", "m16n8k8", "m16n8k16", "m16n8k32", "m16n8k64"]);
        let shape = shape.ok_or("mma of unknown shape")?;
        let sat = mn.has("satfinite");
        // Types d, a, b, c; of 4-bit and 8-bit floats Ty knows no single ones.
        let narrow: Vec<&str> = ["e4m3", "e5m2", "s4", "u4"].into_iter().filter(|name| mn.has(name)).collect();
        let ty = mn.types();
        let signed = |at: usize| ty.get(at).is_some_and(|ty| ty.signed());
        use Ty::*;
        let kind = match (shape, ty.as_slice()) {
            ("m16n8k16", [F32, F16, F16, F32]) => MmaKind::F16K16,
            ("m16n8k8", [F32, F16, F16, F32]) => MmaKind::F16K8,
            ("m16n8k16", [F16, F16, F16, F16]) => MmaKind::F16K16Half,
            ("m16n8k8", [F16, F16, F16, F16]) => MmaKind::F16K8Half,
            ("m16n8k16", [F32, Bf16, Bf16, F32]) => MmaKind::Bf16K16,
            ("m16n8k8", [F32, Bf16, Bf16, F32]) => MmaKind::Bf16K8,
            ("m16n8k4", [F32, Tf32, Tf32, F32]) => MmaKind::Tf32K4,
            ("m16n8k8", [F32, Tf32, Tf32, F32]) => MmaKind::Tf32K8,
            ("m16n8k16", [S32, S8 | U8, S8 | U8, S32]) => MmaKind::I8K16 { a: signed(1), b: signed(2), sat },
            ("m16n8k32", [S32, S8 | U8, S8 | U8, S32]) => MmaKind::I8K32 { a: signed(1), b: signed(2), sat },
            ("m16n8k32", [S32, S32]) if narrow == ["s4"] => MmaKind::I4K32 { a: true, b: true, sat },
            ("m16n8k32", [S32, S32]) if narrow == ["u4"] => MmaKind::I4K32 { a: false, b: false, sat },
            ("m16n8k64", [S32, S32]) if narrow == ["s4"] => MmaKind::I4K64 { a: true, b: true, sat },
            ("m16n8k64", [S32, S32]) if narrow == ["u4"] => MmaKind::I4K64 { a: false, b: false, sat },
            ("m16n8k32", [F32, F32]) if narrow == ["e4m3"] => MmaKind::F8K32 { a: false, b: false },
            ("m16n8k32", [F32, F32]) if narrow == ["e5m2"] => MmaKind::F8K32 { a: true, b: true },
            (shape, ty) => return Err(format!("mma {shape} of {ty:?} {narrow:?}")),
        };
        let (na, nb, nc) = kind.registers();
        let d: [Reg; 4] = self.registers(&o[0], nc, B32, true)?;
        let a: [Reg; 4] = self.registers(&o[1], na, B32, false)?;
        let b: [Reg; 2] = self.registers(&o[2], nb, B32, false)?;
        let c: [Reg; 4] = self.registers(&o[3], nc, B32, false)?;
        self.emit(Op::Mma { kind, d, a, b, c })
    }
}
