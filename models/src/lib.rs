//! What a model is: the `.qrn` file, block layouts, specs, and families as data.
//!
//! Nothing here computes a model or knows a device; see ARCHITECTURE.md.

pub mod dtype;
pub mod family;
pub mod format;
pub mod map;
pub mod p64;
pub mod scheme;
pub mod spec;

pub use dtype::FloatType;
pub use format::{FileWriter, FormatError, Meta, ModelFile, TensorInfo, TensorOnce, TensorPlan, join};
pub use scheme::{Layout, Mini, PANEL, Planes, SUPER, Scheme, TensorView, ZeroKind};
pub use spec::{Generation, ModelSpec};
