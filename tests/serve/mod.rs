//! The server: what its endpoints answer.

mod api;
mod hostile;
mod server;
mod soak;
