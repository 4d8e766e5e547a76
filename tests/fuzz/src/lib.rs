//! What the fuzz targets do with an input; also run on the seeds by `cargo test`. See README.md.

pub mod gguf;
pub mod memory;
pub mod qrn;
pub mod safetensors;

use std::cell::RefCell;

/// Longest file made from an input.
pub const LONGEST: usize = 1 << 20;

/// Calls `f` with `head` followed by zeros up to `len` bytes: tensors cost an input nothing.
pub fn extended<T>(head: &[u8], len: usize, f: impl FnOnce(&[u8]) -> T) -> T {
    thread_local!(static ZEROS: RefCell<Vec<u8>> = RefCell::new(vec![0; 2 * LONGEST]));
    ZEROS.with_borrow_mut(|zeros| {
        zeros[..head.len()].copy_from_slice(head);
        let result = f(&zeros[..len.max(head.len())]);
        zeros[..head.len()].fill(0);
        result
    })
}

/// Splits off the first `n` bytes, or what is there.
fn cut<'a>(bytes: &mut &'a [u8], n: usize) -> &'a [u8] {
    let (head, rest) = bytes.split_at(n.min(bytes.len()));
    *bytes = rest;
    head
}
