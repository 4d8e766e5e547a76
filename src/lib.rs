//! How to run a model: text, sampling, engine, commands.
#![forbid(unsafe_code)]
