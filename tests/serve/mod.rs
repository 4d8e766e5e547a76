//! The server: what its endpoints answer.

mod api;
mod hostile;
mod mixed;
mod server;
mod soak;
