//! The server: what its endpoints answer.

mod api;
mod front;
mod hostile;
mod server;
mod soak;
