//! How to run a model: text, scheduler, engine, commands.
#![forbid(unsafe_code)]

pub mod cli;
pub mod draft;
pub mod engine;
pub mod grammar;
pub mod random;
pub mod sched;
pub mod server;
pub mod text;
pub mod tools;
