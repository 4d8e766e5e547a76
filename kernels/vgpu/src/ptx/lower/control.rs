//! Branches, calls, exits and barriers of the CTA.

use std::collections::HashMap;

use super::mnemonic::Mnemonic;
use super::{Lower, Lowered, Symbol};
use crate::exec::{Barrier, BarrierKind, Op};
use crate::ptx::parse::Operand;
use crate::ptx::types::{NONE, Space, Ty};

/// Depth of functions in functions.
const MOST_DEPTH: usize = 32;

impl<'t> Lower<'t> {
    /// Lowers an instruction of this file; false if it is none.
    pub fn control(&mut self, mn: &mut Mnemonic, o: &'t [Operand]) -> Lowered<bool> {
        match mn.base() {
            "bra" => {
                mn.ignore(&["uni"]);
                let [Operand::Name(label)] = o else { return Err("a label expected".into()) };
                self.branches.push((self.kernel.code.len(), self.inside, label.clone(), self.line));
                self.emit(Op::Branch(0))?;
            }
            "brx" => {
                mn.ignore(&["idx", "uni"]);
                let [index, Operand::Name(name)] = o else { return Err("an index and a list expected".into()) };
                let reg = self.source(index, Ty::U32)?;
                let table = self.kernel.tables.len();
                self.kernel.tables.push(Vec::new());
                self.tables.push((table, self.inside, name.clone(), self.line));
                self.emit(Op::BranchTable(reg, table as u32))?;
            }
            "ret" if self.path.len() > 1 => {
                mn.ignore(&["uni"]);
                self.branches.push((self.kernel.code.len(), self.inside, "<end>".into(), self.line));
                self.emit(Op::Branch(0))?;
            }
            "ret" | "exit" => {
                mn.ignore(&["uni"]);
                self.emit(Op::Exit)?;
            }
            "trap" | "brkpt" => self.emit(Op::Trap)?,
            "nanosleep" => {
                mn.types();
                self.emit(Op::Fence)?;
            }
            "call" => self.call(mn, o)?,
            "bar" | "barrier" if !mn.has("warp") => self.barrier(mn, o)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn barrier(&mut self, mn: &mut Mnemonic, o: &[Operand]) -> Lowered<()> {
        mn.ignore(&["cta", "aligned"]);
        if mn.has("red") {
            let kind = match mn.one_of(&["popc", "and", "or"]) {
                Some("popc") => BarrierKind::Popc,
                Some("and") => BarrierKind::And,
                Some(_) => BarrierKind::Or,
                None => return Err("bar.red without an operation".into()),
            };
            mn.types();
            if !(3..=4).contains(&o.len()) {
                return Err(format!("{} operands of bar.red", o.len()));
            }
            let d = self.dest(&o[0], if kind == BarrierKind::Popc { Ty::U32 } else { Ty::Pred })?;
            let id = self.source(&o[1], Ty::U32)?;
            let count = if o.len() == 4 { self.source(&o[2], Ty::U32)? } else { NONE };
            let (p, negate) = self.condition(&o[o.len() - 1])?;
            return self.emit(Op::Barrier(Barrier { kind, id, count, d, p, negate }));
        }
        let kind = match mn.one_of(&["sync", "arrive"]) {
            Some("sync") => BarrierKind::Sync,
            Some(_) if o.len() == 2 => BarrierKind::Arrive,
            _ => return Err("a barrier of unknown kind".into()),
        };
        let id = match o.first() {
            Some(id) => self.source(id, Ty::U32)?,
            None => self.const32(0)?,
        };
        let count = match o.get(1) {
            Some(count) => self.source(count, Ty::U32)?,
            None => NONE,
        };
        self.emit(Op::Barrier(Barrier { kind, id, count, d: NONE, p: NONE, negate: false }))
    }

    /// `call (results), name, (arguments)`: the function's body is lowered here.
    fn call(&mut self, mn: &mut Mnemonic, o: &'t [Operand]) -> Lowered<()> {
        mn.ignore(&["uni"]);
        let list = |operand: &'t Operand| match operand {
            Operand::List(parts) => Ok(parts.as_slice()),
            other => Err(format!("{other:?} is not a list")),
        };
        let (results, name, arguments): (&[Operand], _, &[Operand]) = match o {
            [Operand::Name(name)] => (&[], name, &[]),
            [Operand::Name(name), arguments] => (&[], name, list(arguments)?),
            [results, Operand::Name(name)] => (list(results)?, name, &[]),
            [results, Operand::Name(name), arguments] => (list(results)?, name, list(arguments)?),
            _ => return Err("a call that is not understood".into()),
        };
        let places = |lower: &Self, list: &[Operand]| -> Lowered<Vec<u64>> {
            list.iter()
                .map(|operand| match operand {
                    Operand::Name(name) => match lower.find(name) {
                        Some(Symbol::Address(Space::Local, at)) => Ok(at),
                        _ => Err(format!("`{name}` is not a `.param` variable")),
                    },
                    other => Err(format!("{other:?} is not a `.param` variable")),
                })
                .collect()
        };
        let (results, arguments) = (places(self, results)?, places(self, arguments)?);
        if name == "__assertfail" && arguments.len() >= 3 {
            let at = [arguments[0] as u32, arguments[1] as u32, arguments[2] as u32];
            return self.emit(Op::Assert { at });
        }
        if name == "vprintf" {
            // Nothing is printed; the caller seldom looks at the result, which is left unwritten.
            return self.emit(Op::Fence);
        }
        let tree = self.tree;
        let function = tree
            .functions
            .iter()
            .find(|function| !function.entry && &function.name == name && function.body.is_some())
            .ok_or_else(|| format!("no function `{name}`"))?;
        if self.path.contains(name) || self.path.len() > MOST_DEPTH {
            return Err(format!("`{name}` calls itself"));
        }
        if function.params.len() != arguments.len() || function.results.len() != results.len() {
            return Err(format!("`{name}` has {} parameters, got {}", function.params.len(), arguments.len()));
        }
        if self.guard.0 != NONE {
            return Err("a call under a predicate".into());
        }
        let mut scope = HashMap::new();
        for (variable, at) in function.params.iter().chain(&function.results).zip(arguments.iter().chain(&results)) {
            scope.insert(variable.name.clone(), Symbol::Address(Space::Local, *at));
        }
        for (name, symbol) in &self.scopes[0] {
            // Shared variables of the module are everybody's.
            if matches!(symbol, Symbol::Address(Space::Shared, _) | Symbol::Dynamic) {
                scope.entry(name.clone()).or_insert(*symbol);
            }
        }
        let outer = (std::mem::replace(&mut self.scopes, vec![scope]), self.inside);
        self.inside = self.functions;
        self.functions += 1;
        self.path.push(name.clone());
        self.body(function.body.as_ref().expect("only functions with one were looked at"))?;
        let end = self.kernel.code.len() as u32;
        self.labels.insert((self.inside, "<end>".into()), end);
        self.path.pop();
        (self.scopes, self.inside) = outer;
        Ok(())
    }
}
