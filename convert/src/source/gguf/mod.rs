//! GGUF files: the container ([`parse()`]), its block types, files in several parts, and what a model's
//! metadata and names mean ([`checkpoint`]).

mod block;
mod model;
mod parse;

pub use block::Block;
pub use model::checkpoint;
pub use parse::{Gguf, Numbers, Tensor, Value, parse};
