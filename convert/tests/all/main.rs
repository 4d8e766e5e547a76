//! The converter from outside: fixtures of other tools, checkpoints made here, and hostile bytes.

mod fixtures;
mod gguf;
mod hostile;
mod made;
mod refusals;
mod synthetic;
