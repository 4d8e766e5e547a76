//! The CUDA kernels, executed by the virtual GPU: against the oracle, and bit for bit against themselves.

mod attend;
mod choose;
mod common;
mod exec;
mod heads;
mod int8;
mod linear;
mod ops;
mod split;

#[allow(dead_code)]
#[path = "../pack/mod.rs"]
mod pack;
#[path = "../support/mod.rs"]
mod support;
