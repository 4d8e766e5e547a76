//! Cutting things into parts: ranges of a count, and a slice whose parts go to different threads.

use std::{marker::PhantomData, ops::Range};

/// Part `index` of `total` things cut into `parts` contiguous ranges whose lengths differ by at most one.
pub fn split(total: usize, parts: usize, index: usize) -> Range<usize> {
    total * index / parts..total * (index + 1) / parts
}

/// A slice that the threads of a region fill at places that do not overlap.
pub struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: it is a `&mut [T]` whose parts go to different threads, as `chunks_mut` would hand them out.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}
// SAFETY: as above; every access goes through `part`, whose contract forbids overlap.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    /// Takes the slice for as long as parts of it may be handed out.
    pub fn new(slice: &'a mut [T]) -> Self {
        Disjoint { start: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// Elements of the whole slice.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the slice has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements of `range`. Panics when out of bounds, like indexing.
    ///
    /// # Safety
    /// While the result is alive, no other part that shares an element with it may be alive, on any thread.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "part {range:?} of {} elements", self.len);
        // SAFETY: in bounds by the line above, unshared by the caller's promise, alive for 'a >= &self.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.end - range.start) }
    }
}
