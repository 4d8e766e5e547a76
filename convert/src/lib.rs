//! How to bring a checkpoint in: readers, import, quantizers, writer.
//!
//! [`convert`] reads a GPTQ, AWQ or float checkpoint (safetensors) or a GGUF file and writes one
//! `.qrn` file, then compares every element of it with the source. Integers stay the integers they
//! are; where no scheme of the file can hold them, the f32 values that they mean are stored, with a note. Readers take any bytes without panicking and without
//! allocating more than the bytes justify ([`source::safetensors::parse`], [`source::gguf::parse`]).
#![forbid(unsafe_code)]

mod error;
pub mod export;
pub mod import;
mod options;
mod pack;
mod pipeline;
pub mod source;
mod threads;
pub mod tokenizer;
mod verify;

pub use error::{ConvertError, Malformed};
pub use export::{ExportOptions, Format, GptqFormat, export};
pub use options::{Options, Phase, Progress, Quant, Report, Row, Step, Verified, grouped};
pub use pack::pack;
pub use pipeline::{convert, convert_head, spec_of};
