//! The converter from outside: fixtures of other tools, checkpoints made here, and hostile bytes.

// A panic is how a test fails, in helpers too.
#![allow(clippy::unwrap_used)]

mod awq;
mod blocks;
mod compressed;
mod directory;
mod families;
mod fixtures;
mod gguf;
mod gptq;
mod heads;
mod hostile;
mod made;
mod refusals;
mod synthetic;
