//! Tests of the whole program: what files become, what is computed from them, what the user reads.
//!
//! One binary. A test that cannot run prints `SKIPPED name: reason`, and CI counts those lines.
#![allow(clippy::unwrap_used)]
#![forbid(unsafe_code)]

mod cli;
mod compressed;
mod cuda;
mod drafters;
mod fresh;
mod handed;
mod heads;
mod lossless;
mod offload;
mod overlap;
mod page;
mod parity;
mod real;
mod serve;
mod serving;
mod sources;
mod speculation;
mod support;
mod supported;
mod tokenizers;
