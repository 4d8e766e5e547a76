//! How to compute a model: the scalar oracle, the CPU kernels and the executor.
pub mod sample;

pub mod cores;
pub mod cpu;
pub mod cuda;
pub mod exec;
mod mask;
pub mod memory;
pub mod reference;
pub mod team;
