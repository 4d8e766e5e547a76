//! Attention over e4m3 codes: a (block, head) becomes f32 under its scales, exactly, and is then what one of f32 is.

use super::super::kv::{BLOCK, SCALES};
use super::super::lanes::Lanes;
use super::loops::{Loops, Single};
use super::tile::{Group, State, Storage, all_scores, all_values};

/// e4m3 codes with scales.
pub(super) struct Small;

impl Storage for Small {
    unsafe fn queries<V: Loops>(g: &Group, s: &State) {
        // SAFETY: the caller's promise.
        unsafe { Single::queries::<V>(g, s) }
    }

    unsafe fn block<V: Loops>(g: &Group, s: &State, start: usize, at: *const u8, next: *const u8) {
        let (d, full, wide) = (s.all.d, g.full(0, g.rows - 1, start), s.wide);
        // SAFETY: the caller's promise; `wide` has room for a block's keys or values.
        unsafe {
            V::widen_keys(at, next, wide, d);
            all_scores::<V, Single>(g, s, start, full, wide, wide);
            V::widen_values(at, next, wide, d);
            all_values::<V, Single>(g, s, start, full, wide, wide);
        }
    }
}

/// What `load_e4m3` leaves out.
const UP: f32 = 256.0;

/// Keys of a (block, head), `[d][BLOCK]`, under the scales of their tokens. A code has 4 significant bits and a scale 11:
/// their products are exact.
///
/// # Safety
/// The CPU can run `V`; `at` is a (block, head) of heads of `d`, `to` has room for `BLOCK * d`.
#[inline(always)]
pub(super) unsafe fn keys<V: Lanes>(at: *const u8, next: *const u8, to: *mut f32, d: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        let scales = [V::load_f16(at.cast()), V::load_f16(at.cast::<u16>().add(8))];
        let scales = scales.map(|scale| scale.mul(V::splat(UP)));
        V::prefetch(next);
        for i in 0..d {
            let row = i * BLOCK;
            V::prefetch(next.wrapping_add(SCALES + row));
            for (half, scale) in scales.into_iter().enumerate() {
                V::load_e4m3(at.add(SCALES + row + 8 * half)).mul(scale).store(to.add(row + 8 * half));
            }
        }
    }
}

/// Values of a (block, head), `[BLOCK][d]`, under the scales of their tokens.
///
/// # Safety
/// As [`keys`].
#[inline(always)]
pub(super) unsafe fn values<V: Lanes>(at: *const u8, next: *const u8, to: *mut f32, d: usize) {
    // SAFETY: the caller's promise; scales of values lie behind those of keys.
    unsafe {
        for t in 0..BLOCK {
            let scale = half::f16::from_bits(at.cast::<u16>().add(BLOCK + t).read()).to_f32();
            let scale = V::splat(scale * UP);
            for i in (0..d).step_by(8) {
                let place = SCALES + BLOCK * d + t * d + i;
                V::prefetch(next.wrapping_add(place));
                V::load_e4m3(at.add(place)).mul(scale).store(to.add(t * d + i));
            }
        }
    }
}
