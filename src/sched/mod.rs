//! What runs next, and which KV block belongs to whom. Pure: no clock, thread, model or tensor.

pub mod kv;
pub mod plan;

pub use kv::{Hit, KvPool, NO_BLOCK, Node, OutOfBlocks};
pub use plan::{Arrival, Budget, Counts, LOGIT_ROWS, Scheduled, Scheduler, Sequence, Step, UNKNOWN};
