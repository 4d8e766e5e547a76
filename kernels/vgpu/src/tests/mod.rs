//! Tests of instructions and checks: small PTX texts, and what the PTX manual says that they do.

mod bugs;
mod convert;
mod float;
mod half;
mod int;
mod matrix;
mod memory;
mod parse;
mod warp;

use std::sync::Arc;

use crate::check::Reports;
use crate::check::global::{Sharing, Touched};
use crate::exec::bytes::Bytes;
use crate::exec::launch::Launch;
use crate::exec::warp::Shape;
use crate::memory::{Block, Memory, TAG, Written};
use crate::ptx::Module;
use crate::ptx::module::LoadError;
use crate::stats::KernelStats;

/// What a kernel `k(in, out)` left behind.
pub struct Outcome {
    pub out: Vec<u8>,
    pub reports: Vec<String>,
    /// Error code, if it did not end by itself.
    pub code: Option<u32>,
    pub stats: KernelStats,
}

impl Outcome {
    /// The output as 32-bit words.
    pub fn words(&self) -> Vec<u32> {
        self.out.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
    }

    /// The kernel ended, and nothing was found.
    pub fn clean(self) -> Outcome {
        assert_eq!((self.code, self.reports.as_slice()), (None, [].as_slice()));
        self
    }
}

/// A launch of a test.
pub struct Run<'r> {
    pub grid: u32,
    pub block: u32,
    pub dynamic: u32,
    pub input: &'r [u8],
    /// Bytes of output, which nobody wrote when the kernel begins.
    pub out: usize,
    pub checks: bool,
}

impl Default for Run<'_> {
    fn default() -> Self {
        Run { grid: 1, block: 32, dynamic: 0, input: &[0; 16], out: 128, checks: true }
    }
}

/// A module of one kernel `k(in, out)` with `body`, in which `%d0` is the address of the input, `%d1` that of the
/// output, `%t` the thread's number and `%d2` its 4 bytes of output. Registers: `%p`, `%h` (16 bits), `%r`, `%f`,
/// `%d`, `%g` (f64).
pub fn module(body: &str) -> String {
    module_with("", body)
}

/// The same, with declarations before it.
pub fn module_with(before: &str, body: &str) -> String {
    format!(
        ".version 8.7\n.target sm_90\n.address_size 64\n{before}\n\
         .visible .entry k(.param .u64 in, .param .u64 out)\n{{\n\
         .reg .pred %p<32>; .reg .b16 %h<64>; .reg .b32 %r<64>; .reg .f32 %f<64>; .reg .b64 %d<64>; .reg .f64 %g<64>;\n\
         .reg .b32 %t;\n\
         ld.param.u64 %d0, [in]; ld.param.u64 %d1, [out]; mov.u32 %t, %tid.x; mad.wide.u32 %d2, %t, 4, %d1;\n\
         {body}\nret;\n}}\n"
    )
}

/// Loads a module whose variables lie in memory that is never freed.
pub fn load(text: &str) -> Result<(Module, Vec<Block>), LoadError> {
    let mut blocks = Vec::new();
    let module = Module::load(text, |_| Ok(()), &mut |bytes, _| {
        let mut copy = Bytes::from(bytes);
        let base = copy.as_mut_ptr() as u64 | TAG;
        std::mem::forget(copy);
        let written = Written::new(bytes.len() as u64);
        written.mark(0, bytes.len() as u64);
        blocks.push(Block { base, len: bytes.len() as u64, written: Some(written) });
        Some(base)
    })?;
    Ok((module, blocks))
}

/// Runs kernel `k` of a module.
pub fn run_text(text: &str, run: Run) -> Outcome {
    let (module, blocks) = load(text).unwrap_or_else(|error| panic!("{error:?} in\n{text}"));
    let mut input = Bytes::from(run.input);
    let mut out = Bytes::new(run.out);
    out.fill(crate::exec::cta::FILL);
    let mut memory = Memory::default();
    for block in blocks {
        memory.insert(block);
    }
    let written = Written::new(run.input.len() as u64);
    written.mark(0, run.input.len() as u64);
    let (from, to) = (input.as_mut_ptr() as u64 | TAG, out.as_mut_ptr() as u64 | TAG);
    memory.insert(Block { base: from, len: run.input.len() as u64, written: Some(written) });
    memory.insert(Block { base: to, len: run.out as u64, written: Some(Written::new(run.out as u64)) });
    let params = Bytes::from([from.to_le_bytes(), to.to_le_bytes()].concat().as_slice());
    let kernel = &module.kernels["k"];
    let memory = Arc::new(memory);
    let launch = Launch {
        module: &module,
        kernel,
        shape: Shape {
            grid: [run.grid, 1, 1],
            block: [run.block, 1, 1],
            shared: kernel.shared_bytes as u32 + run.dynamic,
            dynamic: run.dynamic,
            multiprocessors: 4,
        },
        params: &params,
        touched: run.checks.then(|| Touched::new(&memory)),
        sharing: run.checks.then(|| Sharing::new(&memory)),
        memory,
        checks: run.checks,
        reports: Reports::default(),
    };
    let stats = launch.run(2);
    let (reports, code) = launch.reports.finish();
    Outcome { out: out.to_vec(), reports, code, stats }
}

/// Runs a body, see [`module`].
pub fn run(body: &str, run: Run) -> Outcome {
    run_text(&module(body), run)
}

/// What is wrong with a body that cannot be loaded, and in which line of it.
pub fn refused(text: &str) -> (u32, String) {
    match load(text) {
        Err(LoadError::Ptx(error)) => (error.line, error.what),
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("accepted:\n{text}"),
    }
}

/// One instruction with constants, and its result. The text gives the kinds of operands: `h` 16 bits, `r` 32 bits,
/// `d` 64 bits, `p` a predicate (0 or 1); the first is the destination. What is no such letter stays.
pub type Case<'c> = (&'c str, &'c [u64], u64);

/// Runs instructions and compares their results.
pub fn cases(table: &[Case]) {
    let mut body = String::new();
    for (at, &(text, sources, _)) in table.iter().enumerate() {
        let (opcode, operands) = text.split_once(' ').expect("an opcode and operands");
        let mut values = sources.iter();
        let mut names = Vec::new();
        for (number, kind) in operands.split(',').map(str::trim).enumerate() {
            let name = match kind {
                "h" | "r" | "d" | "p" => format!("%{kind}{}", number + 10),
                other => other.to_string(),
            };
            if number > 0 && matches!(kind, "h" | "r" | "d" | "p") {
                let value = values.next().unwrap_or_else(|| panic!("{text}: too few values"));
                body += &match kind {
                    "h" => format!("mov.b16 {name}, {value};"),
                    "r" => format!("mov.b32 {name}, {value};"),
                    "d" => format!("mov.b64 {name}, {value};"),
                    _ => format!("mov.pred {name}, {value};"),
                };
            }
            names.push(name);
        }
        assert!(values.next().is_none(), "{text}: too many values");
        body += &format!("{opcode} {};\n", names.join(", "));
        let slot = at * 8;
        body += &match &names[0][..2] {
            "%h" => format!("cvt.u64.u16 %d40, {}; st.global.u64 [%d1+{slot}], %d40;\n", names[0]),
            "%r" => format!("cvt.u64.u32 %d40, {}; st.global.u64 [%d1+{slot}], %d40;\n", names[0]),
            "%p" => format!("selp.u64 %d40, 1, 0, {}; st.global.u64 [%d1+{slot}], %d40;\n", names[0]),
            _ => format!("st.global.u64 [%d1+{slot}], {};\n", names[0]),
        };
    }
    let outcome = run(&body, Run { block: 1, out: table.len() * 8, ..Run::default() }).clean();
    for (at, &(text, sources, want)) in table.iter().enumerate() {
        let got = u64::from_le_bytes(outcome.out[at * 8..][..8].try_into().unwrap());
        assert_eq!(got, want, "{text} of {sources:x?}: {got:#x}, expected {want:#x}");
    }
}

/// The bits of an f32, as a case takes them.
pub const fn f(value: f32) -> u64 {
    value.to_bits() as u64
}

/// The bits of an f64.
pub const fn g(value: f64) -> u64 {
    value.to_bits()
}

/// A negative 32-bit integer.
pub const fn s(value: i32) -> u64 {
    value as u32 as u64
}

/// A negative 64-bit integer.
pub const fn l(value: i64) -> u64 {
    value as u64
}
