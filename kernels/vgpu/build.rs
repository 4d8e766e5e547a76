//! Gives the shared library the name that CUDA programs look for first, so that a loaded copy is found by it.
//! (A library whose SONAME is already loaded satisfies every later `dlopen` of that name.)

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
}
