//! How to compute a model: the scalar oracle, the CPU kernels and the executor.
pub mod sample;

pub mod cores;
pub mod cpu;
pub mod cuda;
pub mod exec;
pub mod memory;
pub mod reference;
pub mod team;
