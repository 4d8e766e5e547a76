//! The oracle: the slowest obvious code, which everything fast is tested against.

pub mod forward;
pub mod head;
pub mod linear;
pub mod ops;
