//! How to bring a checkpoint in: readers, import, quantizers, writer.
#![forbid(unsafe_code)]
