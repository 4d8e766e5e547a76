//! Counts what Rust code allocates, so that a target can bound it.
//!
//! libFuzzer's own limits see a parser only beside the fuzzer's corpus; this sees the parser alone.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

thread_local! {
    static NOW: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
    static WORST: Cell<f64> = const { Cell::new(0.0) };
}

fn count(change: isize) {
    // Fails only while a thread ends, when nothing is measured.
    let _ = NOW.try_with(|now| {
        now.set(now.get() + change);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(now.get())));
    });
}

// SAFETY: every call goes to the system's allocator unchanged; counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, new: usize) -> *mut u8 {
        // The old and the new block can exist at once.
        count(new as isize);
        // SAFETY: the caller's promise.
        let moved = unsafe { System.realloc(at, layout, new) };
        count(-(layout.size() as isize));
        moved
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Runs `f`; panics if it ever held more than `base + per_byte * len` bytes at once.
///
/// With QUERN_FUZZ_WORST set, prints each new record of bytes per byte beyond `base`.
pub fn bounded<T>(what: &str, len: usize, base: usize, per_byte: usize, f: impl FnOnce() -> T) -> T {
    let before = NOW.get();
    PEAK.set(before);
    let result = f();
    let peak = (PEAK.get() - before) as usize;
    let ratio = peak.saturating_sub(base) as f64 / len.max(1) as f64;
    if ratio > WORST.get() {
        WORST.set(ratio);
        if std::env::var_os("QUERN_FUZZ_WORST").is_some() {
            eprintln!("{what}: {peak} bytes for an input of {len}: {ratio:.1} a byte beyond {base}");
        }
    }
    assert!(peak <= base + per_byte * len, "{what} held {peak} bytes for an input of {len}");
    result
}
