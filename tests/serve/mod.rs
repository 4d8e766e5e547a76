//! The server: what its endpoints answer.

mod api;
mod hostile;
mod mixed;
pub mod server;
mod soak;
