//! What a model is: the `.qrn` file, block layouts, specs, and families as data.
//!
//! Nothing here computes a model or knows a device; see ARCHITECTURE.md.

pub mod dtype;
pub mod p64;
pub mod scheme;

pub use dtype::FloatType;
pub use scheme::{Layout, PANEL, Planes, Scheme, TensorView, ZeroKind};
