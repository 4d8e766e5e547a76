//! Arithmetic, logic, moves, comparisons and conversions.

use super::mnemonic::Mnemonic;
use super::{Lower, Lowered};
use crate::exec::Op;
use crate::exec::alu::{FTZ, NAN, RELU, Round, SAT, convert, float, half, int, rounding};
use crate::exec::lanes::{Args, Lanes};
use crate::exec::warp::{FALSE, TRUE};
use crate::ptx::parse::Operand;
use crate::ptx::types::{NONE, Ty};

const COMPARISONS: [&str; 18] = [
    "eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan",
];

impl Lower<'_> {
    /// Lowers an instruction of this file; false if it is none.
    pub fn alu(&mut self, mn: &mut Mnemonic, o: &[Operand]) -> Lowered<bool> {
        match mn.base() {
            "mov" => self.mov(mn, o)?,
            "cvt" => self.cvt(mn, o)?,
            "setp" => self.setp(mn, o)?,
            "set" => self.set(mn, o)?,
            "selp" => {
                let ty = mn.ty()?;
                self.count(o, 4)?;
                let x = Args {
                    d: self.dest(&o[0], ty)?,
                    a: self.source(&o[1], ty)?,
                    b: self.source(&o[2], ty)?,
                    c: self.predicate(&o[3])?,
                    ..Args::default()
                };
                self.lanes(int::select(ty), x, "selp", ty)?;
            }
            "slct" => {
                mn.ignore(&["ftz"]);
                let [ty, by] = mn.types()[..] else { return Err("slct of two types expected".into()) };
                self.count(o, 4)?;
                let name = match (ty.size(), by) {
                    (4, Ty::S32) => "slct32",
                    (8, Ty::S32) => "slct64",
                    (4, Ty::F32) => "slct32f",
                    (8, Ty::F32) => "slct64f",
                    _ => return Err(format!("slct of {ty:?} by {by:?}")),
                };
                let x = Args {
                    d: self.dest(&o[0], ty)?,
                    a: self.source(&o[1], ty)?,
                    b: self.source(&o[2], ty)?,
                    c: self.source(&o[3], by)?,
                    ..Args::default()
                };
                self.lanes(int::ternary(name, ty), x, name, ty)?;
            }
            "and" | "or" | "xor" | "not" => self.logic(mn, o)?,
            "add" | "sub" | "min" | "max" | "div" | "rem" | "copysign" => self.binary(mn, o)?,
            "mul" | "mul24" => self.mul(mn, o)?,
            "mad" | "fma" => self.mad(mn, o)?,
            "addc" | "subc" => self.carry(mn, o)?,
            "shl" | "shr" => {
                let ty = mn.ty()?;
                self.count(o, 3)?;
                let x = Args {
                    d: self.dest(&o[0], ty)?,
                    a: self.source(&o[1], ty)?,
                    b: self.source(&o[2], Ty::U32)?,
                    ..Args::default()
                };
                self.lanes(int::binary(mn.base(), ty), x, mn.base(), ty)?;
            }
            "neg" | "abs" | "cnot" | "popc" | "clz" | "brev" | "bfind" | "rcp" | "sqrt" | "rsqrt" | "sin" | "cos"
            | "lg2" | "ex2" | "tanh" => self.unary(mn, o)?,
            "testp" => {
                let ty = mn.ty()?;
                let op = mn.one_of(&["finite", "infinite", "number", "notanumber", "normal", "subnormal"]);
                self.count(o, 2)?;
                let x = Args { d: self.dest(&o[0], Ty::Pred)?, a: self.source(&o[1], ty)?, ..Args::default() };
                self.lanes(op.and_then(|op| float::test(op, ty)), x, "testp", ty)?;
            }
            "bfe" => {
                let ty = mn.ty()?;
                self.count(o, 4)?;
                let x = Args {
                    d: self.dest(&o[0], ty)?,
                    a: self.source(&o[1], ty)?,
                    b: self.source(&o[2], Ty::U32)?,
                    c: self.source(&o[3], Ty::U32)?,
                    ..Args::default()
                };
                self.lanes(int::ternary("bfe", ty), x, "bfe", ty)?;
            }
            "bfi" => {
                let ty = mn.ty()?;
                self.count(o, 5)?;
                let x = Args {
                    d: self.dest(&o[0], ty)?,
                    a: self.source(&o[1], ty)?,
                    b: self.source(&o[2], ty)?,
                    c: self.source(&o[3], Ty::U32)?,
                    k: self.source(&o[4], Ty::U32)?.into(),
                    ..Args::default()
                };
                self.lanes(int::insert(ty), x, "bfi", ty)?;
            }
            "shf" | "prmt" | "sad" | "bmsk" => self.bits(mn, o)?,
            "lop3" => {
                mn.types();
                self.count(o, 5)?;
                let Operand::Int(table) = o[4] else { return Err("a constant table expected".into()) };
                let x = Args { k: table as u32 & 255, ..self.sources3(o, Ty::B32)? };
                self.emit(Op::Lanes(int::lop3(table as u8), x))?;
            }
            "dp4a" | "dp2a" => {
                let [a, b] = mn.types()[..] else { return Err("two types expected".into()) };
                let high = match (mn.base(), mn.one_of(&["lo", "hi"])) {
                    ("dp4a", None) => false,
                    ("dp2a", Some(part)) => part == "hi",
                    _ => return Err("lo or hi expected".into()),
                };
                self.count(o, 4)?;
                let (a, b) = (a == Ty::S32, b == Ty::S32);
                let k = u32::from(a) | u32::from(b) << 1 | u32::from(high) << 2;
                let x = Args { k, ..self.sources3(o, Ty::B32)? };
                self.lanes(int::dot(mn.base(), a, b), x, mn.base(), Ty::B32)?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn count(&self, o: &[Operand], needed: usize) -> Lowered<()> {
        if o.len() == needed { Ok(()) } else { Err(format!("{} operands, {needed} are needed", o.len())) }
    }

    fn lanes(&mut self, found: Option<Lanes>, x: Args, name: &str, ty: Ty) -> Lowered<()> {
        let run = found.ok_or_else(|| format!("`{name}` of {ty:?} is not known"))?;
        self.emit(Op::Lanes(run, x))
    }

    fn sources3(&mut self, o: &[Operand], ty: Ty) -> Lowered<Args> {
        Ok(Args {
            d: self.dest(&o[0], ty)?,
            a: self.source(&o[1], ty)?,
            b: self.source(&o[2], ty)?,
            c: self.source(&o[3], ty)?,
            ..Args::default()
        })
    }

    fn sources2(&mut self, o: &[Operand], ty: Ty) -> Lowered<Args> {
        self.count(o, 3)?;
        Ok(Args {
            d: self.dest(&o[0], ty)?,
            a: self.source(&o[1], ty)?,
            b: self.source(&o[2], ty)?,
            // Functions of three sources run two of them with something that is always there.
            c: 0,
            ..Args::default()
        })
    }

    /// Flags of floating point instructions. Rounding of f64 is to the nearest only.
    fn float_flags(&self, mn: &mut Mnemonic, ty: Ty) -> Lowered<u32> {
        let mut k = 0;
        if let Some(round) = mn.one_of(&["rn", "rz", "rm", "rp"]) {
            let round = match round {
                "rn" => Round::Near,
                "rz" => Round::Zero,
                "rm" => Round::Down,
                _ => Round::Up,
            };
            if round != Round::Near && ty != Ty::F32 {
                return Err(format!("directed rounding of {ty:?}"));
            }
            k |= rounding(round);
        }
        for (name, flag) in [("ftz", FTZ), ("sat", SAT), ("relu", RELU), ("NaN", NAN)] {
            if mn.has(name) {
                k |= flag;
            }
        }
        mn.ignore(&["approx", "full", "noftz"]);
        Ok(k)
    }

    fn mov(&mut self, mn: &mut Mnemonic, o: &[Operand]) -> Lowered<()> {
        let ty = mn.ty()?;
        self.count(o, 2)?;
        if ty == Ty::Pred {
            let x = Args { d: self.dest(&o[0], ty)?, a: self.predicate(&o[1])?, b: FALSE, ..Args::default() };
            return self.lanes(int::predicates("or"), x, "mov", ty);
        }
        let kind = |parts: usize| match (ty.size(), parts) {
            (4, 2) => Ok((0, Ty::B16)),
            (8, 2) => Ok((1, Ty::B32)),
            (8, 4) => Ok((2, Ty::B16)),
            (2, 2) => Ok((3, Ty::B8)),
            _ => Err(format!("mov of {parts} parts of {ty:?}")),
        };
        match (&o[0], &o[1]) {
            (Operand::Vector(parts), from) => {
                let (kind, part) = kind(parts.len())?;
                let a = self.source(from, ty)?;
                // The source may be a destination as well; a part must not overwrite what the next one reads.
                let dests = parts.iter().map(|one| self.dest(one, part)).collect::<Lowered<Vec<_>>>()?;
                let last = dests.iter().position(|&d| d == a && part.wide() == ty.wide());
                let order = (0..dests.len()).filter(|&at| Some(at) != last).chain(last);
                for at in order.collect::<Vec<_>>() {
                    if dests[at] == NONE {
                        continue;
                    }
                    let x = Args { d: dests[at], a, ..Args::default() };
                    self.lanes(int::unpack(kind, at), x, "mov", ty)?;
                }
                Ok(())
            }
            (to, Operand::Vector(parts)) => {
                let (kind, part) = kind(parts.len())?;
                let d = self.dest(to, ty)?;
                let regs = parts.iter().map(|one| self.source(one, part)).collect::<Lowered<Vec<_>>>()?;
                let x = Args {
                    d,
                    a: regs[0],
                    b: regs[1],
                    c: regs.get(2).copied().unwrap_or(0),
                    k: regs.get(3).copied().unwrap_or(0).into(),
                    ..Args::default()
                };
                self.emit(Op::Lanes(int::pack(kind), x))
            }
            (to, from) => {
                let x = Args { d: self.dest(to, ty)?, a: self.source(from, ty)?, ..Args::default() };
                self.lanes(int::unary("mov", ty), x, "mov", ty)
            }
        }
    }

    fn logic(&mut self, mn: &mut Mnemonic, o: &[Operand]) -> Lowered<()> {
        let ty = mn.ty()?;
        let base = mn.base();
        if ty == Ty::Pred {
            let (op, b) = match base {
                "not" => ("xor", TRUE),
                other => (other, self.predicate(o.get(2).ok_or("three operands expected")?)?),
            };
            let x = Args { d: self.dest(&o[0], ty)?, a: self.predicate(&o[1])?, b, ..Args::default() };
            return self.lanes(int::predicates(op), x, base, ty);
        }
        if base == "not" {
            self.count(o, 2)?;
            let x = Args { d: self.dest(&o[0], ty)?, a: self.source(&o[1], ty)?, ..Args::default() };
            return self.lanes(int::unary("not", ty), x, base, ty);
        }
        let x = self.sources2(o, ty)?;
        self.lanes(int::binary(base, ty), x, base, ty)
    }

    fn binary(&mut self, mn: &mut Mnemonic, o: &[Operand]) -> Lowered<()> {
        let ty = mn.ty()?;
        let base = mn.base();
        if mn.has("cc") {
            return self.with_carry(base == "sub", false, true, ty, o);
        }
        let x = self.sources2(o, ty)?;
        if ty.integer() {
            let name = match (base, mn.has("sat")) {
                ("add", true) => "add.sat",
                ("sub", true) => "sub.sat",
                (base, _) => base,
            };
            return self.lanes(int::binary(name, ty), x, name, ty);
        }
        let k = self.float_flags(mn, ty)?;
        let found = float::binary(base, ty, k).or_else(|| half::binary(base, ty, k));
        self.lanes(found, Args { k, ..x }, base, ty)
    }

    fn mul(&mut self, mn: &mut Mnemonic, o: &[Operand]) -> Lowered<()> {
        let ty = mn.ty()?;
        if !ty.integer() {
            let k = self.float_flags(mn, ty)?;
            let x = Args { k, ..self.sources2(o, ty)? };
            return self.lanes(float::binary("mul", ty, k).or_else(|| half::binary("mul", ty, k)), x, "mul", ty);
        }
        let name = match (mn.base(), mn.one_of(&["lo", "hi", "wide"])) {
            ("mul", Some("lo")) => "mul.lo",
            ("mul", Some("hi")) => "mul.hi",
            ("mul", Some(_)) => "mul.wide",
            ("mul24", Some("lo")) => "mul24.lo",
            _ => return Err("lo, hi or wide expected".into()),
        };
        self.count(o, 3)?;
        let to = if name == "mul.wide" { widened(ty)? } else { ty };
        let x = Args {
            d: self.dest(&o[0], to)?,
            a: self.source(&o[1], ty)?,
            b: self.source(&o[2], ty)?,
            ..Args::default()
        };
        self.lanes(int::binary(name, ty), x, name, ty)
    }

    fn mad(&mut self, mn: &mut Mnemonic, o: &[Operand]) -> Lowered<()> {
        let ty = mn.ty()?;
        self.count(o, 4)?;
        if !ty.integer() {
            let k = self.float_flags(mn, ty)?;
            let x = Args { k, ..self.sources3(o, ty)? };
            return self.lanes(float::fused(ty, k).or_else(|| half::fused(ty, k)), x, "fma", ty);
        }
        let name = match mn.one_of(&["lo", "hi", "wide"]) {
            Some("lo") => "mad.lo",
            Some("hi") => "mad.hi",
            Some(_) => "mad.wide",
            None => return Err("lo, hi or wide expected".into()),
        };
        let to = if name == "mad.wide" { widened(ty)? } else { ty };
        let x = Args {
            d: self.dest(&o[0], to)?,
            a: self.source(&o[1], ty)?,
            b: self.source(&o[2], ty)?,
            c: self.source(&o[3], to)?,
            ..Args::default()
        };
        self.lanes(int::ternary(name, ty), x, name, ty)
    }

    fn carry(&mut self, mn: &mut Mnemonic, o: &[Operand]) -> Lowered<()> {
        let ty = mn.ty()?;
        let writes = mn.has("cc");
        self.with_carry(mn.base() == "subc", true, writes, ty, o)
    }

    fn with_carry(&mut self, minus: bool, reads: bool, writes: bool, ty: Ty, o: &[Operand]) -> Lowered<()> {
        let k = u32::from(reads) | u32::from(writes) << 1 | u32::from(minus) << 2;
        let x = Args { k, ..self.sources2(o, ty)? };
        self.lanes(int::carry(ty), x, "addc", ty)
    }

    fn unary(&mut self, mn: &mut Mnemonic, o: &[Operand]) -> Lowered<()> {
        let ty = mn.ty()?;
        let base = mn.base();
        self.count(o, 2)?;
        let to = if matches!(base, "popc" | "clz" | "bfind") { Ty::U32 } else { ty };
        let x = Args { d: self.dest(&o[0], to)?, a: self.source(&o[1], ty)?, b: 0, c: 0, ..Args::default() };
        if ty.integer() {
            let name = if mn.has("shiftamt") { "bfind_shift" } else { base };
            return self.lanes(int::unary(name, ty), x, base, ty);
        }
        let k = self.float_flags(mn, ty)?;
        let found = float::unary(base, ty, k).or_else(|| half::unary(base, ty));
        self.lanes(found, Args { k, ..x }, base, ty)
    }

    fn bits(&mut self, mn: &mut Mnemonic, o: &[Operand]) -> Lowered<()> {
        let ty = mn.ty()?;
        let name = match mn.base() {
            "shf" => match (mn.one_of(&["l", "r"]), mn.one_of(&["wrap", "clamp"])) {
                (Some("l"), Some("wrap")) => "shf.l.wrap",
                (Some("l"), Some(_)) => "shf.l.clamp",
                (Some(_), Some("wrap")) => "shf.r.wrap",
                (Some(_), Some(_)) => "shf.r.clamp",
                _ => return Err("a direction and wrap or clamp expected".into()),
            },
            "prmt" => match mn.one_of(&["f4e", "b4e", "rc8", "rc16", "ecl", "ecr"]) {
                Some("f4e") => "prmt.f4e",
                Some("b4e") => "prmt.b4e",
                Some("rc8") => "prmt.rc8",
                Some("rc16") => "prmt.rc16",
                Some("ecl") => "prmt.ecl",
                Some(_) => "prmt.ecr",
                None => "prmt",
            },
            "bmsk" => {
                let name = match mn.one_of(&["clamp", "wrap"]) {
                    Some("wrap") => "bmsk.wrap",
                    _ => "bmsk.clamp",
                };
                let x = self.sources2(o, ty)?;
                return self.lanes(int::binary(name, ty), x, name, ty);
            }
            _ => "sad",
        };
        self.count(o, 4)?;
        let x = self.sources3(o, ty)?;
        self.lanes(int::ternary(name, ty), x, name, ty)
    }

    fn cvt(&mut self, mn: &mut Mnemonic, o: &[Operand]) -> Lowered<()> {
        let [to, from] = mn.types()[..] else { return Err("cvt of two types expected".into()) };
        let mut k = 0;
        let rounded = mn.one_of(&["rni", "rzi", "rmi", "rpi", "rna", "rn", "rz", "rm", "rp"]);
        k |= match rounded {
            Some("rni") => convert::INTEGRAL,
            Some("rzi") => convert::INTEGRAL | rounding(Round::Zero),
            Some("rmi") => convert::INTEGRAL | rounding(Round::Down),
            Some("rpi") => convert::INTEGRAL | rounding(Round::Up),
            Some("rna") => convert::TIES_AWAY,
            Some("rz") => rounding(Round::Zero),
            Some("rm") => rounding(Round::Down),
            Some("rp") => rounding(Round::Up),
            _ => 0,
        };
        let flags = [("ftz", FTZ), ("sat", SAT), ("relu", RELU), ("satfinite", convert::SATFINITE)];
        for (name, flag) in flags {
            if mn.has(name) {
                k |= flag;
            }
        }
        if to.integer() && from.integer() {
            k &= SAT;
        } else if to.integer() {
            k |= convert::INTEGRAL;
        }
        let two = o.len() == 3;
        if !two {
            self.count(o, 2)?;
        }
        let d = self.cvt_dest(&o[0], to)?;
        let x = Args {
            d,
            a: self.cvt_source(&o[1], from)?,
            b: if two { self.source(&o[2], from)? } else { 0 },
            c: 0,
            k,
            ..Args::default()
        };
        self.convert(to, from, x, two)?;
        // A destination may be wider than the type: the value is extended to it.
        let declared = self.register_of(&o[0])?.0;
        if to.integer() && declared.size() > to.size() && to.signed() {
            let whole = match declared.size() {
                2 => Ty::S16,
                4 => Ty::S32,
                _ => Ty::S64,
            };
            let x = Args { d, a: d, b: 0, c: 0, ..Args::default() };
            self.convert(whole, to, x, false)?;
        }
        Ok(())
    }

    fn convert(&mut self, to: Ty, from: Ty, x: Args, two: bool) -> Lowered<()> {
        let (run, k) =
            convert::convert(to, from, x.k, two).ok_or_else(|| format!("cvt of {from:?} to {to:?} is not known"))?;
        self.emit(Op::Lanes(run, Args { k, ..x }))
    }

    /// A register of any size that holds the type, if it is not in the bank of 64 bits.
    fn cvt_dest(&mut self, operand: &Operand, ty: Ty) -> Lowered<u16> {
        let (declared, reg) = self.register_of(operand)?;
        if reg != NONE && (declared.size() < ty.size() || declared.wide() != ty.wide() || declared == Ty::Pred) {
            return Err(format!("a register of {declared:?} for a result of {ty:?}"));
        }
        Ok(reg)
    }

    fn cvt_source(&mut self, operand: &Operand, ty: Ty) -> Lowered<u16> {
        self.source(operand, ty)
    }

    /// The comparison operator and how its result combines with a predicate.
    fn comparison(&mut self, mn: &mut Mnemonic) -> Lowered<(&'static str, u32)> {
        let op = mn.one_of(&COMPARISONS).ok_or("a comparison expected")?;
        let combine = match mn.one_of(&["and", "or", "xor"]) {
            Some("or") => 1,
            Some("xor") => 2,
            _ => 0,
        };
        Ok((op, combine))
    }

    fn setp(&mut self, mn: &mut Mnemonic, o: &[Operand]) -> Lowered<()> {
        let ty = mn.ty()?;
        let ftz = mn.has("ftz");
        let (op, mut k) = self.comparison(mn)?;
        if !(3..=4).contains(&o.len()) {
            return Err(format!("{} operands of setp", o.len()));
        }
        let (d, e) = match &o[0] {
            Operand::Pair(p, q) => (self.dest(p, Ty::Pred)?, self.dest(q, Ty::Pred)?),
            p => (self.dest(p, Ty::Pred)?, NONE),
        };
        let c = match o.get(3) {
            Some(other) => {
                let (c, negate) = self.condition(other)?;
                k |= u32::from(negate) << 2;
                c
            }
            None => NONE,
        };
        let (a, b) = (self.source(&o[1], ty)?, self.source(&o[2], ty)?);
        let found = if ty.integer() {
            int::compare(op, ty)
        } else if ty == Ty::F32 && !ftz {
            float::compare(op)
        } else {
            k |= half::relation(op).ok_or_else(|| format!("setp.{op} of {ty:?}"))? << 8;
            if matches!(ty, Ty::F16x2 | Ty::Bf16x2) { half::compare_pairs(ty) } else { half::compare(ty, ftz) }
        };
        self.lanes(found, Args { d, e, a, b, c, k }, "setp", ty)
    }

    fn set(&mut self, mn: &mut Mnemonic, o: &[Operand]) -> Lowered<()> {
        let types = mn.types();
        let [to, from] = types[..] else { return Err("set of two types expected".into()) };
        let ftz = mn.has("ftz");
        let (op, _) = self.comparison(mn)?;
        self.count(o, 3)?;
        let relation = match (op, from.signed()) {
            ("lo", _) => "lt",
            ("ls", _) => "le",
            ("hi", _) => "gt",
            ("hs", _) => "ge",
            (op, _) => op,
        };
        let relation = half::relation(relation).ok_or_else(|| format!("set.{op}"))?;
        let one = matches!(to, Ty::F32 | Ty::F16 | Ty::F16x2 | Ty::Bf16 | Ty::Bf16x2);
        let k = relation << 8 | u32::from(one) | u32::from(ftz) << 1;
        let x = Args {
            d: self.dest(&o[0], to)?,
            a: self.source(&o[1], from)?,
            b: self.source(&o[2], from)?,
            c: 0,
            k,
            ..Args::default()
        };
        self.lanes(half::set(to, from), x, "set", from)
    }
}

fn widened(ty: Ty) -> Lowered<Ty> {
    Ok(match ty {
        Ty::U16 => Ty::U32,
        Ty::S16 => Ty::S32,
        Ty::U32 => Ty::U64,
        Ty::S32 => Ty::S64,
        other => return Err(format!("wide of {other:?}")),
    })
}
