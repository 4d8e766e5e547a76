//! The CPU backend.

pub mod act;
pub mod acts;
pub mod attend;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod buf;
pub mod embed;
pub mod isa;
pub mod kv;
pub mod lanes;
pub mod linear;
mod mini;
#[cfg(target_arch = "aarch64")]
mod neon;
pub mod ops;
pub mod probe;
pub mod route;
mod scalar;
pub mod survey;
