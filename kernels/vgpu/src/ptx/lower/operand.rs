//! Operands become registers; constants become registers that hold them in every lane.

use super::{Lower, Lowered, Symbol};
use crate::exec::warp::{FALSE, SPECIAL, TRUE};
use crate::ptx::parse::Operand;
use crate::ptx::types::{LOCAL_WINDOW, NONE, PARAM_WINDOW, Reg, SHARED_WINDOW, Space, Ty};

/// Where an address comes from.
pub struct Address {
    pub reg: Reg,
    /// The register is a 64-bit one.
    pub wide: bool,
    pub off: i32,
    /// Where a variable that was named lies.
    pub space: Option<Space>,
    /// The place of a variable that was named.
    pub known: Option<u64>,
}

impl Lower<'_> {
    pub fn find(&self, name: &str) -> Option<Symbol> {
        let local = self.scopes.iter().rev().find_map(|scope| scope.get(name)).copied();
        local.or_else(|| self.module.get(name).map(|&(at, _)| Symbol::Address(Space::Global, at)))
    }

    /// The register with a constant in every lane.
    pub fn const32(&mut self, value: u32) -> Lowered<Reg> {
        if let Some(&reg) = self.known32.get(&value) {
            return Ok(reg);
        }
        let reg = self.new_register(Ty::B32)?;
        self.kernel.consts32.push((reg, value));
        self.known32.insert(value, reg);
        Ok(reg)
    }

    /// The 64-bit register with a constant in every lane.
    pub fn const64(&mut self, value: u64) -> Lowered<Reg> {
        if let Some(&reg) = self.known64.get(&value) {
            return Ok(reg);
        }
        let reg = self.new_register(Ty::B64)?;
        self.kernel.consts64.push((reg, value));
        self.known64.insert(value, reg);
        Ok(reg)
    }

    /// A destination; `_` is none. The register must lie in the bank of `ty`.
    pub fn dest(&mut self, operand: &Operand, ty: Ty) -> Lowered<Reg> {
        let Operand::Name(name) = operand else { return Err(format!("{operand:?} is not a register")) };
        if name == "_" {
            return Ok(NONE);
        }
        match self.find(name) {
            Some(Symbol::Register(of, reg)) if bank(of) == bank(ty) => Ok(reg),
            Some(Symbol::Register(of, _)) => Err(format!("`{name}` is a register of {of:?}, {ty:?} is needed")),
            _ => Err(format!("`{name}` is not a register")),
        }
    }

    /// A register and its declared type, for instructions that widen.
    pub fn register_of(&mut self, operand: &Operand) -> Lowered<(Ty, Reg)> {
        match operand {
            Operand::Name(name) if name == "_" => Ok((Ty::B32, NONE)),
            Operand::Name(name) => match self.find(name) {
                Some(Symbol::Register(ty, reg)) => Ok((ty, reg)),
                _ => Err(format!("`{name}` is not a register")),
            },
            other => Err(format!("{other:?} is not a register")),
        }
    }

    /// A source of type `ty`: a register, a special register, a variable's address or a constant.
    pub fn source(&mut self, operand: &Operand, ty: Ty) -> Lowered<Reg> {
        if ty == Ty::Pred {
            return self.predicate(operand);
        }
        match operand {
            Operand::Name(name) => self.named(name, 0, ty),
            Operand::Offset(base, offset) => match &**base {
                Operand::Name(name) => self.named(name, *offset, ty),
                other => Err(format!("{other:?} has no address")),
            },
            Operand::Int(value) => self.constant(*value, ty),
            Operand::Single(bits) => self.constant(u64::from(*bits), ty),
            Operand::Double(bits) if ty == Ty::F32 => {
                self.constant(u64::from((f64::from_bits(*bits) as f32).to_bits()), ty)
            }
            Operand::Double(bits) => self.constant(*bits, ty),
            other => Err(format!("{other:?} where one value is needed")),
        }
    }

    fn constant(&mut self, value: u64, ty: Ty) -> Lowered<Reg> {
        match ty.size() {
            8 => self.const64(value),
            4 => self.const32(value as u32),
            2 => self.const32(value as u32 & 0xffff),
            _ => self.const32(value as u32 & 0xff),
        }
    }

    fn named(&mut self, name: &str, offset: i64, ty: Ty) -> Lowered<Reg> {
        if let Some(at) = SPECIAL.iter().position(|special| *special == name).or(match name {
            "WARP_SZ" => Some(SPECIAL.len() - 1),
            _ => None,
        }) {
            if ty.wide() {
                return Err(format!("`{name}` is a 32-bit register"));
            }
            return Ok(at as Reg);
        }
        match self.find(name) {
            Some(Symbol::Register(of, reg)) if bank(of) == bank(ty) => Ok(reg),
            Some(Symbol::Register(of, _)) => Err(format!("`{name}` is a register of {of:?}, {ty:?} is needed")),
            Some(Symbol::Address(_, at)) => self.constant(at.wrapping_add(offset as u64), ty),
            Some(Symbol::Dynamic) if ty.wide() => {
                let reg = self.new_register(Ty::B64)?;
                self.dynamic64.push((reg, offset as u64));
                Ok(reg)
            }
            Some(Symbol::Dynamic) => {
                let reg = self.new_register(Ty::B32)?;
                self.dynamic32.push((reg, offset as u32));
                Ok(reg)
            }
            None => Err(format!("`{name}` is unknown")),
        }
    }

    /// A predicate, or the constants 0 and 1.
    pub fn predicate(&mut self, operand: &Operand) -> Lowered<Reg> {
        match operand {
            Operand::Int(0) => Ok(FALSE),
            Operand::Int(_) => Ok(TRUE),
            Operand::Name(_) => self.dest(operand, Ty::Pred),
            other => Err(format!("{other:?} is not a predicate")),
        }
    }

    /// A predicate that may be negated.
    pub fn condition(&mut self, operand: &Operand) -> Lowered<(Reg, bool)> {
        match operand {
            Operand::Not(inner) => Ok((self.predicate(inner)?, true)),
            plain => Ok((self.predicate(plain)?, false)),
        }
    }

    /// What is in brackets.
    pub fn address(&mut self, operand: &Operand) -> Lowered<Address> {
        let Operand::Address(base, offset) = operand else { return Err(format!("{operand:?} is not an address")) };
        let off = i32::try_from(*offset).map_err(|_| format!("an offset of {offset}"))?;
        if let Operand::Int(value) = **base {
            let reg = self.const64(value)?;
            return Ok(Address { reg, wide: true, off, space: None, known: None });
        }
        let Operand::Name(name) = &**base else { return Err(format!("{base:?} is not an address")) };
        match self.find(name) {
            Some(Symbol::Register(ty, reg)) if ty.size() >= 4 && ty != Ty::Pred => {
                Ok(Address { reg, wide: ty.wide(), off, space: None, known: None })
            }
            Some(Symbol::Address(space, at)) => {
                let reg = self.const64(at)?;
                Ok(Address { reg, wide: true, off, space: Some(space), known: Some(at) })
            }
            Some(Symbol::Dynamic) => {
                let reg = self.named(name, 0, Ty::B64)?;
                Ok(Address { reg, wide: true, off, space: Some(Space::Shared), known: None })
            }
            _ => Err(format!("`{name}` is not an address")),
        }
    }

    /// The registers of `{a, b}` or of one operand alone.
    pub fn vector<'o>(&self, operand: &'o Operand) -> Vec<&'o Operand> {
        match operand {
            Operand::Vector(parts) => parts.iter().collect(),
            one => vec![one],
        }
    }

    /// Four registers at most, the rest none.
    pub fn registers<const N: usize>(
        &mut self,
        operand: &Operand,
        count: usize,
        ty: Ty,
        dest: bool,
    ) -> Lowered<[Reg; N]> {
        let parts: Vec<Operand> = self.vector(operand).into_iter().cloned().collect();
        if parts.len() != count || count > N {
            return Err(format!("{count} registers are needed, got {}", parts.len()));
        }
        let mut regs = [NONE; N];
        for (reg, part) in regs.iter_mut().zip(&parts) {
            *reg = if dest { self.dest(part, ty)? } else { self.source(part, ty)? };
        }
        Ok(regs)
    }

    /// The generic address window of a space.
    pub fn window(space: Space) -> Option<u64> {
        match space {
            Space::Shared => Some(SHARED_WINDOW),
            Space::Local => Some(LOCAL_WINDOW),
            Space::Param => Some(PARAM_WINDOW),
            _ => None,
        }
    }
}

/// The bank of registers that a type lies in: 0 predicates, 1 up to 32 bits, 2 64 bits.
fn bank(ty: Ty) -> u8 {
    match ty {
        Ty::Pred => 0,
        _ if ty.wide() => 2,
        _ => 1,
    }
}
