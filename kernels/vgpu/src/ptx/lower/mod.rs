//! Lowering: statements become instructions of the machine.
//!
//! Names become registers, labels become instruction numbers, and functions are put in place of their calls (there
//! is no recursion and no call through a pointer). What a caller passes lies in its local memory, where the callee's
//! parameters point to.

mod alu;
mod control;
mod memory;
mod mnemonic;
mod operand;
mod warp;

use std::collections::HashMap;

use super::PtxError;
use super::module::Kernel;
use super::parse::{Function, Instruction, Operand, Statement, Tree, Variable};
use super::types::{NONE, Reg, Space, Ty};
use crate::exec::warp::SPECIAL;
use crate::exec::{Ins, Op};
use crate::stats::Class;
use mnemonic::Mnemonic;

type Lowered<T> = Result<T, String>;

/// What a name means.
#[derive(Clone, Copy, Debug)]
pub enum Symbol {
    Register(Ty, Reg),
    Address(Space, u64),
    /// The beginning of dynamic shared memory, which lies behind all static one.
    Dynamic,
}

/// The state of lowering one kernel.
pub struct Lower<'t> {
    tree: &'t Tree,
    module: &'t HashMap<String, (u64, usize)>,
    kernel: Kernel,
    scopes: Vec<HashMap<String, Symbol>>,
    known32: HashMap<u32, Reg>,
    known64: HashMap<u64, Reg>,
    dynamic32: Vec<(Reg, u32)>,
    dynamic64: Vec<(Reg, u64)>,
    /// Labels of each function that was put in place, by its number.
    labels: HashMap<(usize, String), u32>,
    targets: HashMap<(usize, String), Vec<String>>,
    /// Branches whose labels were not known yet: instruction, function, label, line.
    branches: Vec<(usize, usize, String, u32)>,
    tables: Vec<(usize, usize, String, u32)>,
    /// Number of the function that is being lowered, and of functions so far.
    inside: usize,
    functions: usize,
    /// Names of functions from the kernel down to the present one.
    path: Vec<String>,
    guard: (Reg, bool),
    line: u32,
    class: Class,
}

/// Instructions of a kernel with all functions in place: more is a mistake.
const MOST_CODE: usize = 1 << 22;
/// Bytes of shared memory that can be declared: more than any device has.
const MOST_SHARED: usize = 1 << 20;
/// Bytes of local memory of one thread.
const MOST_LOCAL: usize = 1 << 19;

impl<'t> Lower<'t> {
    /// Lowers one `.entry`.
    pub fn kernel(
        tree: &'t Tree,
        module: &'t HashMap<String, (u64, usize)>,
        function: &'t Function,
    ) -> Result<Kernel, PtxError> {
        let kernel = Kernel {
            name: function.name.clone(),
            regs32: SPECIAL.len(),
            preds: 3,
            max_threads: function.max_threads,
            ..Kernel::default()
        };
        let mut lower = Lower {
            tree,
            module,
            kernel,
            scopes: vec![HashMap::new()],
            known32: HashMap::new(),
            known64: HashMap::new(),
            dynamic32: Vec::new(),
            dynamic64: Vec::new(),
            labels: HashMap::new(),
            targets: HashMap::new(),
            branches: Vec::new(),
            tables: Vec::new(),
            inside: 0,
            functions: 1,
            path: vec![function.name.clone()],
            guard: (NONE, false),
            line: function.line,
            class: Class::Other,
        };
        let failed = |line, what: String| PtxError::new(line, format!("kernel `{}`: {what}", function.name));
        lower.whole(function).map_err(|what| failed(lower.line, what))?;
        Ok(lower.kernel)
    }

    fn whole(&mut self, function: &'t Function) -> Lowered<()> {
        for variable in self.tree.variables.iter().filter(|variable| variable.space == Space::Shared) {
            self.declare(variable)?;
        }
        for param in &function.params {
            let at = self.kernel.param_bytes.next_multiple_of(param.align);
            self.kernel.params.push((at, param.size()));
            self.kernel.param_bytes = at + param.size();
            if self.kernel.param_bytes > 1 << 15 {
                return Err("more than 32 KiB of parameters".into());
            }
            self.name(&param.name, Symbol::Address(Space::Param, at as u64));
        }
        let body = function.body.as_ref().ok_or("a kernel without a body")?;
        self.body(body)?;
        self.guard = (NONE, false);
        self.class = Class::Branch;
        self.emit(Op::Exit)?;
        self.resolve()
    }

    fn body(&mut self, body: &'t [Statement]) -> Lowered<()> {
        for statement in body {
            match statement {
                Statement::Open => self.scopes.push(HashMap::new()),
                Statement::Close => {
                    self.scopes.pop();
                }
                Statement::Registers(ty, name, count) => match count {
                    None => self.register(*ty, name)?,
                    Some(count) => {
                        for at in 0..*count {
                            self.register(*ty, &format!("{name}{at}"))?;
                        }
                    }
                },
                Statement::Variable(variable) => {
                    self.line = variable.line;
                    self.declare(variable)?;
                }
                Statement::Label(label) => {
                    let at = self.kernel.code.len() as u32;
                    if self.labels.insert((self.inside, label.clone()), at).is_some() {
                        return Err(format!("label `{label}` twice"));
                    }
                }
                Statement::Targets(name, labels) => {
                    self.targets.insert((self.inside, name.clone()), labels.clone());
                }
                Statement::Instruction(instruction) => self.instruction(instruction)?,
            }
        }
        Ok(())
    }

    fn register(&mut self, ty: Ty, name: &str) -> Lowered<()> {
        let reg = self.new_register(ty)?;
        self.name(name, Symbol::Register(ty, reg));
        Ok(())
    }

    fn name(&mut self, name: &str, symbol: Symbol) {
        self.scopes.last_mut().expect("a scope is always open").insert(name.to_string(), symbol);
    }

    fn new_register(&mut self, ty: Ty) -> Lowered<Reg> {
        let bank = match ty {
            Ty::Pred => &mut self.kernel.preds,
            _ if ty.wide() => &mut self.kernel.regs64,
            _ => &mut self.kernel.regs32,
        };
        if *bank >= usize::from(NONE) {
            return Err("more than 65,534 registers".into());
        }
        *bank += 1;
        Ok((*bank - 1) as Reg)
    }

    fn declare(&mut self, variable: &Variable) -> Lowered<()> {
        if variable.external && variable.count == 0 {
            self.name(&variable.name, Symbol::Dynamic);
            return Ok(());
        }
        // What is passed to a function lies in local memory too.
        let shared = variable.space == Space::Shared;
        let (end, most) = if shared {
            (&mut self.kernel.shared_bytes, MOST_SHARED)
        } else {
            (&mut self.kernel.local_bytes, MOST_LOCAL)
        };
        let at = end.next_multiple_of(variable.align);
        if at + variable.size() > most {
            return Err(format!("`{}`: {} bytes are more than there can be", variable.name, variable.size()));
        }
        *end = at + variable.size();
        let space = if shared { Space::Shared } else { Space::Local };
        self.name(&variable.name, Symbol::Address(space, at as u64));
        Ok(())
    }

    fn emit(&mut self, op: Op) -> Lowered<()> {
        if self.kernel.code.len() >= MOST_CODE {
            return Err(format!("more than {MOST_CODE} instructions"));
        }
        let (guard, unless) = self.guard;
        self.kernel.code.push(Ins { op, guard, unless, line: self.line });
        self.kernel.classes.push(self.class);
        Ok(())
    }

    fn instruction(&mut self, instruction: &'t Instruction) -> Lowered<()> {
        self.line = instruction.line;
        self.guard = match &instruction.guard {
            Some((name, unless)) => (self.predicate(&Operand::Name(name.clone()))?, *unless),
            None => (NONE, false),
        };
        self.class = Class::of(&instruction.parts);
        let mut mnemonic = Mnemonic::new(&instruction.parts);
        let known = self.control(&mut mnemonic, &instruction.operands)?
            || self.warp(&mut mnemonic, &instruction.operands)?
            || self.memory(&mut mnemonic, &instruction.operands)?
            || self.alu(&mut mnemonic, &instruction.operands)?;
        if !known {
            return Err(format!("unknown instruction `{}`", instruction.parts.join(".")));
        }
        mnemonic.finish()
    }

    /// Fills in what is known only at the end: targets of branches, the place of dynamic shared memory.
    fn resolve(&mut self) -> Lowered<()> {
        for (at, function, label, line) in std::mem::take(&mut self.branches) {
            self.line = line;
            let to = self.label(function, &label)?;
            self.kernel.code[at].op = Op::Branch(to);
        }
        for (table, function, name, line) in std::mem::take(&mut self.tables) {
            self.line = line;
            let labels = self.targets.get(&(function, name.clone())).cloned();
            let labels = labels.ok_or_else(|| format!("no branch targets `{name}`"))?;
            let targets = labels.iter().map(|label| self.label(function, label)).collect::<Lowered<_>>()?;
            self.kernel.tables[table] = targets;
        }
        self.kernel.shared_bytes = self.kernel.shared_bytes.next_multiple_of(16);
        self.kernel.local_bytes = self.kernel.local_bytes.next_multiple_of(16);
        let base = self.kernel.shared_bytes as u64;
        for &(reg, offset) in &self.dynamic32 {
            self.kernel.consts32.push((reg, offset.wrapping_add(base as u32)));
        }
        for &(reg, offset) in &self.dynamic64 {
            self.kernel.consts64.push((reg, offset.wrapping_add(base)));
        }
        Ok(())
    }

    fn label(&self, function: usize, label: &str) -> Lowered<u32> {
        self.labels.get(&(function, label.to_string())).copied().ok_or_else(|| format!("no label `{label}`"))
    }
}
