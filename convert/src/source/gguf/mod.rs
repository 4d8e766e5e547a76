//! GGUF files: the container ([`parse()`]), its block types, files in several parts ([`join`]), and what a model's
//! metadata and names mean ([`checkpoint`]).

mod arch;
mod block;
mod meta;
mod model;
mod parse;
mod rope;
mod split;

pub use block::Block;
pub use model::checkpoint;
pub use parse::{Gguf, Numbers, Tensor, Value, parse};
pub use split::join;
pub(super) use split::{models, open, read};
