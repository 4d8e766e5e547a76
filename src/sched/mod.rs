//! What runs next, and which KV block belongs to whom. Pure: no clock, thread, model or tensor.

pub mod kv;
pub mod plan;

pub use kv::{KvPool, OutOfBlocks};
pub use plan::{Scheduled, Scheduler, Sequence};
