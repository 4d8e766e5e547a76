//! From PTX text to code that the interpreter runs.
//!
//! `lex` makes tokens, `parse` statements with operands, `lower` instructions of the machine in `exec`. A modifier
//! or an opcode that nobody asked about is an error with its line: nothing is skipped in silence.

pub mod lex;
pub mod lower;
pub mod module;
pub mod parse;
pub mod types;

pub use module::{Kernel, Module};

/// What is wrong with a module, and in which line of its text (from 1; 0: no line in particular).
#[derive(Debug, Clone, PartialEq)]
pub struct PtxError {
    pub line: u32,
    pub what: String,
}

impl PtxError {
    pub fn new(line: u32, what: impl Into<String>) -> PtxError {
        PtxError { line, what: what.into() }
    }
}
