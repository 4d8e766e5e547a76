//! placeholder
use super::isa::{Isa, Level};
use super::scalar;
pub(crate) static ISA: Isa = Isa { name: "avx512", level: Level::Avx512, executed: false, detected: || false, ..scalar::ISA };
