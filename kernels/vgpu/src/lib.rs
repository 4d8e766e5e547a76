//! A CUDA driver that runs PTX on the CPU, for tests on machines without a GPU.
//!
//! The package is a shared library whose functions have the names of NVIDIA's driver API, and a small Rust side to
//! load it into a test and to talk to it. The PTX that a program ships is executed, thread by thread, as the PTX
//! manual defines it; speed is not simulated. On request it looks for mistakes that a GPU hides (accesses outside of
//! memory, bytes nobody wrote, races, barriers that not everybody reaches), and it counts instructions and memory
//! traffic.
//!
//! In a test: [`load`] before the first use of the driver, then whatever uses cudarc runs here.
//! [`VirtualGpu::set`] changes what the device is, [`VirtualGpu::reports`] takes what was found. For a program that
//! cannot be changed: put [`library`] as `libcuda.so` into a folder on `LD_LIBRARY_PATH`, and use the environment:
//! `VGPU_CHECK=1` (or `fatal`: a mistake is an error of the kernel), `VGPU_TRAFFIC=1`, `VGPU_LOG=1`, `VGPU_THREADS`,
//! `VGPU_MEMORY=512M`, `VGPU_DRIVER_VERSION=12000`, `VGPU_SMS`, `VGPU_CC=8.6`, `VGPU_INTEGRATED=1`,
//! `VGPU_LAZY=1` (work is done when it is waited for), `VGPU_FAIL=cuMemAlloc_v2:3:2` (function, which call, error).
//!
//! What it does not do: CTAs run one after the other (a grid that waits for itself never ends), streams run in order
//! of submission, approximate functions and sums of tensor cores differ from a device's in their last bits, and
//! instructions that compute_80 lacks are not known (but for conversions and products of 8-bit floats).

mod check;
mod client;
mod control;
mod driver;
mod exec;
mod memory;
mod ptx;
mod settings;
mod stats;
#[cfg(test)]
mod tests;

pub use client::{KernelReport, VirtualGpu, library, load};
