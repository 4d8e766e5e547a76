//! Memory for kernels: aligned to a cache line, grown and never shrunk.
//!
//! A [`Buf`] hands out raw pointers from `&self`, because threads of a team fill disjoint parts of
//! one buffer; who may touch what, and when, is stated by the type that owns the buffer.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::marker::PhantomData;
use std::ptr::NonNull;

/// Alignment of every buffer, bytes: a cache line and the widest vector.
const ALIGN: usize = 64;

/// Numbers for which any bytes are a value, so that zeroed memory is initialised memory.
pub trait Plain: Copy + Send + Sync + 'static {}
impl Plain for u8 {}
impl Plain for i8 {}
impl Plain for i32 {}
impl Plain for f32 {}

/// `room` elements on a 64-byte boundary.
pub struct Buf<T: Plain> {
    ptr: NonNull<T>,
    room: usize,
    owns: PhantomData<T>,
}

// SAFETY: a Buf owns plain memory; through `&Buf` only a raw pointer can be had, whose use is unsafe.
unsafe impl<T: Plain> Send for Buf<T> {}
// SAFETY: as above.
unsafe impl<T: Plain> Sync for Buf<T> {}

impl<T: Plain> Buf<T> {
    /// Nothing yet.
    pub const fn new() -> Self {
        Buf { ptr: NonNull::dangling(), room: 0, owns: PhantomData }
    }

    /// Room for at least `len` elements. Contents are kept only if there was room already, else zero.
    pub fn reserve(&mut self, len: usize) {
        if len <= self.room {
            return;
        }
        // Growth by half again keeps a slowly growing batch from reallocating at every step.
        let room = len.max(self.room + self.room / 2);
        let layout = Self::layout(room);
        // SAFETY: the layout's size is not zero, because `room >= len > 0`.
        let new = unsafe { alloc_zeroed(layout) };
        let Some(new) = NonNull::new(new.cast::<T>()) else { handle_alloc_error(layout) };
        *self = Buf { ptr: new, room, owns: PhantomData };
    }

    /// First element; valid for as many elements as were ever reserved.
    #[inline]
    pub fn ptr(&self) -> *mut T {
        self.ptr.as_ptr()
    }

    /// The first `len` elements, exclusively.
    pub fn slice_mut(&mut self, len: usize) -> &mut [T] {
        assert!(len <= self.room);
        // SAFETY: `room` elements are allocated and initialised, and `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), len) }
    }

    fn layout(room: usize) -> Layout {
        let bytes = room.checked_mul(size_of::<T>()).expect("a buffer's size fits in usize");
        Layout::from_size_align(bytes, ALIGN).expect("64 is a power of two and the size is sane")
    }
}

impl<T: Plain> Default for Buf<T> {
    fn default() -> Self {
        Buf::new()
    }
}

impl<T: Plain> Drop for Buf<T> {
    fn drop(&mut self) {
        if self.room > 0 {
            // SAFETY: allocated in `reserve` with this very layout.
            unsafe { dealloc(self.ptr.as_ptr().cast(), Self::layout(self.room)) }
        }
    }
}
