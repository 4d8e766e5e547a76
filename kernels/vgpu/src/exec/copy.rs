//! `cp.async`: copies whose bytes arrive when a thread waits for them, and not before.

use super::lanes::Row;
use super::memory::{Way, addresses, each};
use super::{Cta, Warp};
use crate::check::Fault;
use crate::check::shared::Touch;
use crate::memory::TAG;
use crate::ptx::types::Reg;

/// A copy under way.
struct Copy {
    lane: u8,
    bytes: u8,
    /// Bytes to read; the rest becomes zeros.
    size: u8,
    /// Number of the lane's group.
    group: u32,
    to: u32,
    /// Device address.
    from: u64,
}

/// Copies of a warp, and how many groups each lane has committed.
#[derive(Default)]
pub struct Copies {
    list: Vec<Copy>,
    groups: [u32; 32],
}

impl Copies {
    pub fn clear(&mut self) {
        self.list.clear();
        self.groups = [0; 32];
    }

    pub fn commit(&mut self, m: u32) {
        for lane in each(m) {
            self.groups[lane] += 1;
        }
    }
}

impl Cta<'_> {
    #[inline(never)]
    pub fn copy_async<const WATCH: bool>(
        &mut self,
        w: &mut Warp,
        pc: u32,
        m: u32,
        bytes: u8,
        to: &Row<u64>,
        from: (Reg, i32),
        size: Reg,
    ) -> Result<(), Fault> {
        let from = addresses(w, from.0, true, from.1);
        let sizes = w.r[size as usize];
        let reading = each(m).filter(|&i| sizes.0[i] > 0).fold(0, |all, i| all | 1 << i);
        let len = u64::from(bytes);
        if reading != 0 {
            // Only what is read must be there, but the address is one of all bytes.
            if each(reading).all(|i| sizes.0[i] >= len as u32) {
                self.global_bounds(w, pc, reading, &from, len, len, Way::Copy)?;
                if WATCH {
                    self.watch_global(w, pc, reading, &from, len, Way::Copy, |_| [0; 32]);
                }
            } else {
                for i in each(reading) {
                    let part = u64::from(sizes.0[i]).min(len);
                    self.global_bounds(w, pc, 1 << i, &from, part, len, Way::Copy)?;
                    if WATCH {
                        self.watch_global(w, pc, 1 << i, &from, part, Way::Copy, |_| [0; 32]);
                    }
                }
            }
        }
        self.shared_bounds(w, pc, m, to, len, Way::Copy)?;
        if WATCH {
            self.watch_shared(w, pc, m, to, len, |_, _| Touch::Copy);
        }
        for i in each(m) {
            w.copies.list.push(Copy {
                lane: i as u8,
                bytes,
                size: sizes.0[i].min(len as u32) as u8,
                group: w.copies.groups[i],
                to: to.0[i] as u32,
                from: from.0[i],
            });
        }
        Ok(())
    }

    /// Waits until at most `left` committed groups are under way; `None`: until nothing is.
    #[inline(never)]
    pub fn copy_wait(&mut self, w: &mut Warp, m: u32, left: Option<u32>) {
        let mut copies = std::mem::take(&mut w.copies);
        copies.list.retain(|copy| {
            let lane = usize::from(copy.lane);
            let due = match left {
                None => true,
                Some(left) => copy.group < copies.groups[lane].saturating_sub(left),
            };
            if m >> lane & 1 == 0 || !due {
                return true;
            }
            let (to, bytes, size) = (copy.to as usize, usize::from(copy.bytes), usize::from(copy.size));
            let target = &mut self.shared[to..to + bytes];
            target[size..].fill(0);
            // SAFETY: the bounds of both sides were checked when the copy began, and neither shared memory nor the
            // allocation has changed its size since.
            unsafe {
                std::ptr::copy_nonoverlapping((copy.from & !TAG) as *const u8, target.as_mut_ptr(), size);
            }
            if let Some(shadow) = &mut self.shadow {
                shadow.arrive(to, bytes, (w.id * 32 + u32::from(copy.lane)) as u16);
            }
            false
        });
        w.copies = copies;
    }
}
