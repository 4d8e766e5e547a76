//! A module that was loaded: its kernels and variables.

use std::collections::HashMap;

use super::PtxError;
use super::lower::Lower;
use super::parse::{Operand, Tree, Variable, parse};
use super::types::{Reg, Space};
use crate::exec::Ins;
use crate::stats::Class;

/// A kernel's code and what it needs.
#[derive(Debug, Default)]
pub struct Kernel {
    pub name: String,
    pub code: Vec<Ins>,
    /// What each instruction is counted as.
    pub classes: Vec<Class>,
    /// Targets of `brx.idx`.
    pub tables: Vec<Vec<u32>>,
    pub regs32: usize,
    pub regs64: usize,
    pub preds: usize,
    pub consts32: Vec<(Reg, u32)>,
    pub consts64: Vec<(Reg, u64)>,
    /// Offset and size of each parameter.
    pub params: Vec<(usize, usize)>,
    pub param_bytes: usize,
    /// Static shared memory, in bytes, rounded up to 16.
    pub shared_bytes: usize,
    /// Local memory of a thread.
    pub local_bytes: usize,
    /// The largest block that was declared, or none.
    pub max_threads: Option<u32>,
}

/// What a module offers.
#[derive(Debug)]
pub struct Module {
    /// Major * 10 + minor of `.version`.
    pub version: u32,
    pub header: Header,
    pub kernels: HashMap<String, Kernel>,
    /// Address and size of each `.global` and `.const` variable.
    pub variables: HashMap<String, (u64, usize)>,
    pub lines: Vec<String>,
    /// PTX line, path and line of the source, from `.loc`.
    sources: Vec<(u32, String, u64)>,
}

/// What is known of a module before any of it is loaded.
#[derive(Debug)]
pub struct Header {
    /// Of the PTX.
    pub version: u32,
    /// Compute capability: major * 10 + minor.
    pub target: u32,
    /// `sm_90a`: for this very device only.
    pub exact: bool,
}

/// Gives a variable its place: bytes with their initial values, alignment; the device address or none.
pub type Place<'p> = dyn FnMut(&[u8], usize) -> Option<u64> + 'p;

/// Why a module was not loaded.
#[derive(Debug)]
pub enum LoadError {
    Ptx(PtxError),
    /// The header asks for more than there is.
    Refused(u32),
    OutOfMemory,
}

impl From<PtxError> for LoadError {
    fn from(error: PtxError) -> LoadError {
        LoadError::Ptx(error)
    }
}

impl Module {
    /// Parses `text`, asks `accept` about its header (an error code refuses it), places its variables and lowers
    /// its kernels.
    pub fn load(
        text: &str,
        accept: impl Fn(&Header) -> Result<(), u32>,
        place: &mut Place,
    ) -> Result<Module, LoadError> {
        let tree = parse(text)?;
        let header = header(&tree)?;
        accept(&header).map_err(LoadError::Refused)?;
        let mut variables = HashMap::new();
        for variable in tree.variables.iter().filter(|v| matches!(v.space, Space::Global | Space::Const)) {
            if variable.external {
                return Err(PtxError::new(variable.line, format!("`{}` is defined elsewhere", variable.name)).into());
            }
            let bytes = image(variable, &variables)?;
            let at = place(&bytes, variable.align).ok_or(LoadError::OutOfMemory)?;
            variables.insert(variable.name.clone(), (at, bytes.len()));
        }
        let mut kernels = HashMap::new();
        for function in tree.functions.iter().filter(|function| function.entry) {
            let kernel = Lower::kernel(&tree, &variables, function)?;
            kernels.insert(kernel.name.clone(), kernel);
        }
        let path = |number| {
            tree.files.iter().find(|file| file.0 == number).map_or_else(|| format!("file {number}"), |f| f.1.clone())
        };
        let sources = tree.locations.iter().map(|&(line, file, source)| (line, path(file), source)).collect();
        let lines = text.lines().map(str::to_string).collect();
        Ok(Module { version: tree.version, header, kernels, variables, lines, sources })
    }

    /// Where an instruction stands: `line 12: add.s32 ...; (a.cu:7)`.
    pub fn place(&self, line: u32) -> String {
        let text = self.lines.get((line as usize).wrapping_sub(1)).map_or("", |line| line.trim());
        let before = self.sources.partition_point(|source| source.0 <= line);
        let source = match before.checked_sub(1) {
            Some(at) => format!(" ({}:{})", self.sources[at].1, self.sources[at].2),
            None => String::new(),
        };
        format!("PTX line {line}: {text}{source}")
    }
}

fn header(tree: &Tree) -> Result<Header, PtxError> {
    let digits = tree.target.strip_prefix("sm_").unwrap_or("");
    let number = digits.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let target = number.parse().map_err(|_| PtxError::new(1, format!("`.target {}`: sm_NN expected", tree.target)))?;
    Ok(Header { version: tree.version, target, exact: number.len() < digits.len() })
}

/// The initial bytes of a variable; what has no value is zero.
fn image(variable: &Variable, known: &HashMap<String, (u64, usize)>) -> Result<Vec<u8>, PtxError> {
    let fail = |what: String| PtxError::new(variable.line, format!("`{}`: {what}", variable.name));
    if variable.size() > 1 << 28 {
        return Err(fail(format!("{} bytes in a module", variable.size())));
    }
    let size = variable.ty.size();
    let mut bytes = vec![0; variable.size()];
    if variable.init.len() * size > bytes.len() {
        return Err(fail(format!("{} values for {} bytes", variable.init.len(), bytes.len())));
    }
    for (at, value) in variable.init.iter().enumerate() {
        let bits = match value {
            Operand::Int(value) => *value,
            Operand::Single(bits) => u64::from(*bits),
            Operand::Double(bits) if size == 4 => u64::from((f64::from_bits(*bits) as f32).to_bits()),
            Operand::Double(bits) => *bits,
            Operand::Name(name) => known.get(name).ok_or_else(|| fail(format!("`{name}` is unknown")))?.0,
            Operand::Offset(base, offset) => match &**base {
                Operand::Name(name) => {
                    known.get(name).ok_or_else(|| fail(format!("`{name}` is unknown")))?.0.wrapping_add(*offset as u64)
                }
                other => return Err(fail(format!("{other:?} is not a value"))),
            },
            other => return Err(fail(format!("{other:?} is not a value"))),
        };
        bytes[at * size..][..size].copy_from_slice(&bits.to_le_bytes()[..size]);
    }
    Ok(bytes)
}
