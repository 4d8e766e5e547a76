//! Which instructions there are: one static table of kernels per instruction set.
//!
//! A table is chosen once, at run time; loops over panels, threads and layers live above it.
//! Every table gives the same bits as the scalar one, so a table is a matter of speed only.

use super::acts::{Acts, Quantum};
use super::lanes::Simd;
use super::linear::{FloatPanel, IntPanel, Scratch};
use super::scalar;
use std::ops::Range;
use std::sync::OnceLock;

/// Instruction sets that kernels are written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Level {
    /// Plain Rust.
    Scalar,
    /// AVX2, FMA, F16C.
    Avx2,
    /// The above and AVX-VNNI.
    AvxVnni,
    /// Those of `Avx2` and AVX-512 F, BW, DQ, VL, VNNI; with or without AMX.
    Avx512,
    /// Armv8 NEON with dot products.
    Neon,
    /// The above and matrix multiplication of bytes.
    NeonI8mm,
}

/// int8 quantization of one block: `x` is a whole block, quads go to `to`, `step` bytes apart.
pub(crate) type Quantize = unsafe fn(x: &[f32], to: *mut i8, step: usize) -> Quantum;
/// `tile[r][0..64]` = outputs of a panel of an integer weight for activation row `rows.start + r`.
pub(crate) type IntLinear = unsafe fn(&IntPanel, &Acts, Range<usize>, &mut [f32], &mut Scratch);
/// The same for a float weight.
pub(crate) type FloatLinear = unsafe fn(&FloatPanel, &Acts, Range<usize>, &mut [f32], &mut Scratch);

/// The table's int8 multiply-add on registers alone, so many rounds; returns the multiply-adds done.
pub(crate) type Peak = unsafe fn(rounds: u64) -> u64;

/// Kernels of one instruction set.
///
/// The function pointers are unsafe: the instructions must exist (so a table is handed out only
/// where they were detected), and sizes must have been checked ([`super::linear::linear_panel`]).
pub struct Isa {
    /// As printed, and as `ENGINE_ISA` names it.
    pub name: &'static str,
    /// For other modules' own tables.
    pub level: Level,
    /// Whether our tests ran these kernels, on hardware or emulated; [`Isa::best`] takes no other.
    pub executed: bool,
    pub(crate) detected: fn() -> bool,
    pub(crate) quantize: Quantize,
    pub(crate) int4_int8: IntLinear,
    pub(crate) int4_f32: IntLinear,
    pub(crate) int8_int8: IntLinear,
    pub(crate) int8_f32: IntLinear,
    pub(crate) float: FloatLinear,
    pub(crate) peak: Peak,
    /// int8 values of so many activation rows are kept as plain rows ([`super::acts`]).
    pub(crate) plain: fn(m: usize) -> bool,
    /// Kernels of integer weights compute the wanted half of a panel only.
    pub(crate) strips: bool,
    /// Most activation rows of a unit of work: what a panel's codes are unpacked for.
    pub rows: usize,
}

/// Compiled for this architecture, fastest first.
static TABLES: &[&Isa] = &[
    #[cfg(target_arch = "x86_64")]
    &super::avx512::amx::ISA,
    #[cfg(target_arch = "x86_64")]
    &super::avx512::ISA,
    #[cfg(target_arch = "x86_64")]
    &super::avx2::vnni::ISA,
    #[cfg(target_arch = "x86_64")]
    &super::avx2::ISA,
    #[cfg(target_arch = "aarch64")]
    &super::neon::I8MM,
    #[cfg(target_arch = "aarch64")]
    &super::neon::ISA,
    &scalar::ISA,
];

impl Isa {
    /// The fastest table that this machine can run and that our tests have run.
    ///
    /// `ENGINE_ISA` overrides it, for tests; a name that is unknown or cannot run here panics.
    pub fn best() -> &'static Isa {
        static BEST: OnceLock<&'static Isa> = OnceLock::new();
        BEST.get_or_init(|| match std::env::var("ENGINE_ISA") {
            Ok(name) => Isa::by_name(&name).unwrap_or_else(|| panic!("ENGINE_ISA={name}: not available here")),
            Err(_) => Isa::available().find(|isa| isa.executed).unwrap_or(&scalar::ISA),
        })
    }

    /// Lanes for attention and elementwise kernels that go with this table.
    pub fn simd(&self) -> Simd {
        match self.level {
            Level::Scalar => Simd::PORTABLE,
            Level::Avx2 | Level::AvxVnni => Simd::by_name("avx2").unwrap_or(Simd::PORTABLE),
            Level::Avx512 | Level::Neon | Level::NeonI8mm => Simd::detect(),
        }
    }

    /// Every table of this program, fastest first.
    pub fn compiled() -> impl Iterator<Item = &'static Isa> {
        TABLES.iter().copied()
    }

    /// Those that this machine can run, the never executed ones included.
    pub fn available() -> impl Iterator<Item = &'static Isa> {
        Isa::compiled().filter(|isa| (isa.detected)())
    }

    /// The table of that name, if this machine can run it.
    pub fn by_name(name: &str) -> Option<&'static Isa> {
        Isa::available().find(|isa| isa.name == name)
    }
}

impl std::fmt::Debug for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_table_was_executed_and_scalar_is_always_there() {
        assert!(Isa::best().executed || std::env::var("ENGINE_ISA").is_ok());
        assert_eq!(Isa::available().last().map(|i| i.level), Some(Level::Scalar));
        assert!(Isa::by_name("mmx").is_none());
    }
}
