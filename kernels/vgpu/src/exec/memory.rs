//! Loads and stores.

// Loops over lanes index several rows at once.
#![allow(clippy::needless_range_loop)]

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};

use super::lanes::Row;
use super::{Access, Cta, ParamLoad, Warp};
use crate::check::global::{self, SHARED, UNWRITTEN};
use crate::check::shared::{Touch, waves};
use crate::check::{Fault, Kind};
use crate::memory::TAG;
use crate::ptx::types::{LOCAL_WINDOW, NONE, PARAM_WINDOW, Reg, SHARED_WINDOW, Space, WINDOW};

/// The lanes of a mask.
#[inline(always)]
pub fn each(mut lanes: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        if lanes == 0 {
            return None;
        }
        let lane = lanes.trailing_zeros() as usize;
        lanes &= lanes - 1;
        Some(lane)
    })
}

/// Addresses of all lanes: a register of either size, and an offset.
#[inline(always)]
pub fn addresses(w: &Warp, reg: Reg, wide: bool, off: i32) -> Row<u64> {
    let mut row = Row([0; 32]);
    if wide {
        let from = &w.q[reg as usize];
        for i in 0..32 {
            row.0[i] = from.0[i].wrapping_add(off as i64 as u64);
        }
    } else {
        let from = &w.r[reg as usize];
        for i in 0..32 {
            row.0[i] = u64::from(from.0[i].wrapping_add(off as u32));
        }
    }
    row
}

/// How an instruction touches memory, in words and for the checks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Load,
    /// A load of constants, which is not counted as traffic.
    Constant,
    Store,
    Atomic,
    Copy,
}

impl Way {
    pub fn name(self) -> &'static str {
        match self {
            Way::Load => "load",
            Way::Constant => "constant load",
            Way::Store => "store",
            Way::Atomic => "atomic",
            Way::Copy => "cp.async",
        }
    }
}

/// Reads an element of device memory that was checked to lie in an allocation, aligned.
///
/// # Safety
/// `at` points to `SIZE` bytes of a live allocation, aligned to `SIZE`. Other threads may write them at the same
/// time: accesses are atomic, so that a race of kernels is no race of ours.
#[inline(always)]
unsafe fn read<const SIZE: usize>(at: u64) -> u64 {
    // SAFETY: as the caller promises.
    unsafe {
        match SIZE {
            1 => u64::from((*(at as *const AtomicU8)).load(Relaxed)),
            2 => u64::from((*(at as *const AtomicU16)).load(Relaxed)),
            4 => u64::from((*(at as *const AtomicU32)).load(Relaxed)),
            _ => (*(at as *const AtomicU64)).load(Relaxed),
        }
    }
}

/// Writes an element.
///
/// # Safety
/// As for [`read`], and the allocation may be written.
#[inline(always)]
unsafe fn write<const SIZE: usize>(at: u64, value: u64) {
    // SAFETY: as the caller promises.
    unsafe {
        match SIZE {
            1 => (*(at as *const AtomicU8)).store(value as u8, Relaxed),
            2 => (*(at as *const AtomicU16)).store(value as u16, Relaxed),
            4 => (*(at as *const AtomicU32)).store(value as u32, Relaxed),
            _ => (*(at as *const AtomicU64)).store(value, Relaxed),
        }
    }
}

/// An element as a register of `ext` bytes holds it.
#[inline(always)]
fn extend(value: u64, size: u8, signed: bool, ext: u8) -> u64 {
    let value = if signed {
        let unused = 64 - 8 * u32::from(size);
        ((value << unused) as i64 >> unused) as u64
    } else {
        value
    };
    match ext {
        2 => value & 0xffff,
        4 => value & 0xffff_ffff,
        _ => value,
    }
}

impl Cta<'_> {
    /// Finds the allocation of `[low, high)`; remembers it for the next time.
    #[inline(always)]
    pub fn inside(&mut self, low: u64, high: u64) -> bool {
        if low >= self.block.0 && high <= self.block.1 {
            return true;
        }
        let memory = &self.launch.memory;
        match memory.find(low, high.wrapping_sub(low)) {
            Some(number) => {
                let block = &memory.blocks()[number];
                self.block = (block.base, block.base + block.len, number);
                true
            }
            None => false,
        }
    }

    /// Checks that every lane's bytes lie aligned in an allocation.
    #[inline(always)]
    pub fn global_bounds(
        &mut self,
        w: &Warp,
        pc: u32,
        m: u32,
        at: &Row<u64>,
        bytes: u64,
        align: u64,
        way: Way,
    ) -> Result<(), Fault> {
        let (mut low, mut high, mut bits) = (u64::MAX, 0, 0);
        for i in 0..32 {
            let on = m >> i & 1 == 1;
            let a = at.0[i];
            low = if on && a < low { a } else { low };
            high = if on && a > high { a } else { high };
            bits |= if on { a } else { 0 };
        }
        if bits & (align - 1) != 0 {
            return Err(self.misaligned(w, pc, m, at, align, "global", way));
        }
        if !self.inside(low, high.wrapping_add(bytes)) {
            for i in each(m) {
                let a = at.0[i];
                if a.checked_add(bytes).is_none_or(|end| !self.inside(a, end)) {
                    let near = self.launch.memory.nearest(a);
                    let what = format!("a global {} of {bytes} bytes at {a:#x}: {near}", way.name());
                    return Err(self.fault(w, pc, i, Kind::OutOfBounds, &what));
                }
            }
        }
        Ok(())
    }

    #[cold]
    fn misaligned(&self, w: &Warp, pc: u32, m: u32, at: &Row<u64>, align: u64, space: &str, way: Way) -> Fault {
        let lane = each(m).find(|&i| at.0[i] & (align - 1) != 0).unwrap_or(0);
        let what = format!("a {space} {} of {align} bytes at {:#x}", way.name(), at.0[lane]);
        self.fault(w, pc, lane, Kind::Misaligned, &what)
    }

    /// Counts and checks an access to global memory whose bounds are known to be right. For stores: before the bytes
    /// are written; `value` gives what a lane writes.
    #[cold]
    pub fn watch_global(
        &mut self,
        w: &Warp,
        pc: u32,
        m: u32,
        at: &Row<u64>,
        bytes: u64,
        way: Way,
        value: impl Fn(usize) -> [u8; 32],
    ) {
        let launch = self.launch;
        if way != Way::Constant {
            let (sectors, ideal) = global::sectors(m, &at.0, bytes);
            self.traffic.requests += 1;
            self.traffic.sectors += sectors;
            self.traffic.ideal += ideal;
            let moved = u64::from(m.count_ones()) * bytes;
            match way {
                Way::Store => self.traffic.written += moved,
                _ => self.traffic.read += moved,
            }
        }
        let writes = matches!(way, Way::Store | Way::Atomic);
        for i in each(m) {
            let a = at.0[i];
            if !self.inside(a, a + bytes) {
                continue;
            }
            let number = self.block.2;
            let block = &launch.memory.blocks()[number];
            if let (Some(touched), true) = (&launch.touched, way != Way::Constant) {
                touched.mark(number, block, a, bytes, writes);
            }
            if !launch.checks {
                continue;
            }
            if let Some(written) = &block.written {
                if way != Way::Store
                    && let Some(first) = written.missing(a - block.base, bytes)
                {
                    let what = format!("{} (byte {first} of an allocation of {})", UNWRITTEN.1, block.len);
                    self.report(w, pc, i, UNWRITTEN.0, &what);
                }
                if writes {
                    written.mark(a - block.base, bytes);
                }
            }
            if let Some(sharing) = &launch.sharing {
                let touch = match way {
                    Way::Store => {
                        let new = value(i);
                        let same = (0..bytes as usize).all(|at| {
                            // SAFETY: the bounds were checked.
                            (unsafe { read::<1>((a & !TAG) + at as u64) }) as u8 == new[at]
                        });
                        global::Touch::Write { same }
                    }
                    Way::Atomic => global::Touch::Atomic,
                    _ => global::Touch::Read,
                };
                if sharing.touch(number, a - block.base, bytes, self.number, touch) {
                    self.report(w, pc, i, SHARED.0, SHARED.1);
                }
            }
        }
    }

    /// Checks that every lane's bytes lie aligned in shared memory.
    #[inline(always)]
    pub fn shared_bounds(&self, w: &Warp, pc: u32, m: u32, at: &Row<u64>, bytes: u64, way: Way) -> Result<(), Fault> {
        let (mut high, mut bits) = (0, 0);
        for i in 0..32 {
            let a = if m >> i & 1 == 1 { at.0[i] } else { 0 };
            high = if a > high { a } else { high };
            bits |= a;
        }
        if bits & (bytes - 1) != 0 {
            return Err(self.misaligned(w, pc, m, at, bytes, "shared", way));
        }
        let size = self.shared.len() as u64;
        if high > size || size - high < bytes {
            let lane = each(m).find(|&i| at.0[i] > size || size - at.0[i] < bytes).unwrap_or(0);
            let what = format!("a shared {} of {bytes} bytes at {} of {size}", way.name(), at.0[lane]);
            return Err(self.fault(w, pc, lane, Kind::OutOfBounds, &what));
        }
        Ok(())
    }

    /// Counts and checks an access to shared memory, before it is done. `touch` gets a lane's bytes, and may write what
    /// the lane stores already, so that another lane of the instruction finds it there.
    #[cold]
    pub fn watch_shared(
        &mut self,
        w: &Warp,
        pc: u32,
        m: u32,
        at: &Row<u64>,
        bytes: u64,
        touch: impl Fn(&mut [u8], usize) -> Touch,
    ) {
        let (passes, fewest) = waves(m, &at.0, bytes as u32);
        self.traffic.shared_requests += 1;
        self.traffic.shared_waves += passes;
        self.traffic.shared_ideal += fewest;
        let Some(mut shadow) = self.shadow.take() else { return };
        for i in each(m) {
            let (from, len) = (at.0[i] as usize, bytes as usize);
            let thread = (w.id * 32 + i as u32) as u16;
            let how = touch(&mut self.shared[from..from + len], i);
            if let Some((kind, what)) = shadow.touch(from, len, thread, &w.met, how) {
                self.report(w, pc, i, kind, &format!("{what} (byte {from})"));
            }
        }
        self.shadow = Some(shadow);
    }

    /// The lanes of each space that generic addresses lead to, and what to take off the addresses.
    #[cold]
    fn spaces(&self, m: u32, at: &Row<u64>) -> [(Space, u32, u64); 4] {
        let mut found = [
            (Space::Global, 0, 0),
            (Space::Shared, 0, SHARED_WINDOW),
            (Space::Local, 0, LOCAL_WINDOW),
            (Space::Param, 0, PARAM_WINDOW),
        ];
        for i in each(m) {
            let space = match at.0[i] & !(WINDOW - 1) {
                SHARED_WINDOW => 1,
                LOCAL_WINDOW => 2,
                PARAM_WINDOW => 3,
                _ => 0,
            };
            found[space].1 |= 1 << i;
        }
        found
    }

    #[inline(always)]
    pub fn load<const WATCH: bool>(&mut self, w: &mut Warp, pc: u32, x: &Access, m: u32) -> Result<(), Fault> {
        let at = addresses(w, x.addr, x.wide, x.off);
        if x.space != Space::Generic {
            return self.load_from::<WATCH>(w, pc, x, x.space, m, &at);
        }
        for (space, lanes, base) in self.spaces(m, &at) {
            if lanes != 0 {
                let at = Row(at.0.map(|a| a.wrapping_sub(base)));
                self.load_from::<WATCH>(w, pc, x, space, lanes, &at)?;
            }
        }
        Ok(())
    }

    #[inline(always)]
    fn load_from<const WATCH: bool>(
        &mut self,
        w: &mut Warp,
        pc: u32,
        x: &Access,
        space: Space,
        m: u32,
        at: &Row<u64>,
    ) -> Result<(), Fault> {
        let bytes = u64::from(x.size) * u64::from(x.n);
        match space {
            Space::Shared => {
                self.shared_bounds(w, pc, m, at, bytes, Way::Load)?;
                if WATCH {
                    self.watch_shared(w, pc, m, at, bytes, |_, _| Touch::Read);
                }
                let base = self.shared.as_ptr() as u64;
                let at = Row(at.0.map(|a| base.wrapping_add(a)));
                // SAFETY: the bounds were checked, and shared memory begins at a multiple of 16.
                unsafe { gather(w, x, m, &at) };
            }
            Space::Local => {
                let size = self.launch.kernel.local_bytes as u64;
                let base = w.local.as_ptr() as u64;
                let mut host = Row([0; 32]);
                for i in each(m) {
                    self.private_bounds(w, pc, i, at.0[i], bytes, size, Way::Load)?;
                    host.0[i] = base + i as u64 * size + at.0[i];
                }
                // SAFETY: the bounds were checked.
                unsafe { gather(w, x, m, &host) };
            }
            Space::Param => {
                let size = self.launch.params.len() as u64;
                let base = self.launch.params.as_ptr() as u64;
                let mut host = Row([0; 32]);
                for i in each(m) {
                    self.private_bounds(w, pc, i, at.0[i], bytes, size, Way::Load)?;
                    host.0[i] = base + at.0[i];
                }
                // SAFETY: the bounds were checked.
                unsafe { gather(w, x, m, &host) };
            }
            _ => {
                let way = if space == Space::Const { Way::Constant } else { Way::Load };
                self.global_bounds(w, pc, m, at, bytes, bytes, way)?;
                if WATCH {
                    self.watch_global(w, pc, m, at, bytes, way, |_| [0; 32]);
                }
                let at = Row(at.0.map(|a| a & !TAG));
                // SAFETY: every lane's bytes lie in an allocation that lives as long as the launch.
                unsafe { gather(w, x, m, &at) };
            }
        }
        Ok(())
    }

    #[inline(always)]
    fn private_bounds(
        &self,
        w: &Warp,
        pc: u32,
        lane: usize,
        at: u64,
        bytes: u64,
        size: u64,
        way: Way,
    ) -> Result<(), Fault> {
        if at > size || size - at < bytes {
            let what = format!("a local {} of {bytes} bytes at {at} of {size}", way.name());
            return Err(self.fault(w, pc, lane, Kind::OutOfBounds, &what));
        }
        if at & (bytes - 1) != 0 {
            let what = format!("a local {} of {bytes} bytes at {at}", way.name());
            return Err(self.fault(w, pc, lane, Kind::Misaligned, &what));
        }
        Ok(())
    }

    #[inline(always)]
    pub fn store<const WATCH: bool>(&mut self, w: &mut Warp, pc: u32, x: &Access, m: u32) -> Result<(), Fault> {
        let at = addresses(w, x.addr, x.wide, x.off);
        if x.space != Space::Generic {
            return self.store_to::<WATCH>(w, pc, x, x.space, m, &at);
        }
        for (space, lanes, base) in self.spaces(m, &at) {
            if lanes != 0 {
                let at = Row(at.0.map(|a| a.wrapping_sub(base)));
                self.store_to::<WATCH>(w, pc, x, space, lanes, &at)?;
            }
        }
        Ok(())
    }

    #[inline(always)]
    fn store_to<const WATCH: bool>(
        &mut self,
        w: &mut Warp,
        pc: u32,
        x: &Access,
        space: Space,
        m: u32,
        at: &Row<u64>,
    ) -> Result<(), Fault> {
        let bytes = u64::from(x.size) * u64::from(x.n);
        match space {
            Space::Shared => {
                self.shared_bounds(w, pc, m, at, bytes, Way::Store)?;
                if WATCH {
                    self.watch_shared(w, pc, m, at, bytes, |old, i| {
                        let new = stored(w, x, i);
                        let same = *old == new[..old.len()];
                        old.copy_from_slice(&new[..old.len()]);
                        Touch::Write { same }
                    });
                }
                let base = self.shared.as_mut_ptr() as u64;
                let at = Row(at.0.map(|a| base.wrapping_add(a)));
                // SAFETY: the bounds were checked.
                unsafe { scatter(w, x, m, &at) };
            }
            Space::Local => {
                let size = self.launch.kernel.local_bytes as u64;
                let base = w.local.as_mut_ptr() as u64;
                let mut host = Row([0; 32]);
                for i in each(m) {
                    self.private_bounds(w, pc, i, at.0[i], bytes, size, Way::Store)?;
                    host.0[i] = base + i as u64 * size + at.0[i];
                }
                // SAFETY: the bounds were checked.
                unsafe { scatter(w, x, m, &host) };
            }
            Space::Param => {
                let lane = m.trailing_zeros() as usize;
                return Err(self.fault(w, pc, lane, Kind::OutOfBounds, "a store to kernel parameters"));
            }
            _ => {
                self.global_bounds(w, pc, m, at, bytes, bytes, Way::Store)?;
                if WATCH {
                    self.watch_global(w, pc, m, at, bytes, Way::Store, |i| stored(w, x, i));
                }
                let at = Row(at.0.map(|a| a & !TAG));
                // SAFETY: every lane's bytes lie in an allocation that lives as long as the launch.
                unsafe { scatter(w, x, m, &at) };
            }
        }
        Ok(())
    }

    /// The same parameters for all lanes.
    #[inline(always)]
    pub fn param(&self, w: &mut Warp, x: &ParamLoad, m: u32) {
        let size = usize::from(x.size);
        for k in 0..usize::from(x.n) {
            let mut bytes = [0; 8];
            let from = x.at as usize + k * size;
            bytes[..size].copy_from_slice(&self.launch.params[from..from + size]);
            let value = extend(u64::from_le_bytes(bytes), x.size, x.signed, x.ext);
            if x.ext == 8 {
                super::lanes::store::<u64>(w, x.regs[k], Row([value; 32]), m);
            } else {
                super::lanes::store::<u32>(w, x.regs[k], Row([value as u32; 32]), m);
            }
        }
    }
}

/// The bytes that a lane stores.
fn stored(w: &Warp, x: &Access, lane: usize) -> [u8; 32] {
    let mut bytes = [0; 32];
    let size = usize::from(x.size);
    for k in 0..usize::from(x.n) {
        let reg = x.regs[k] as usize;
        let value = if x.ext == 8 { w.q[reg].0[lane] } else { u64::from(w.r[reg].0[lane]) };
        bytes[k * size..][..size].copy_from_slice(&value.to_le_bytes()[..size]);
    }
    bytes
}

/// Loads the elements of all lanes.
///
/// # Safety
/// Each lane of `m` has `x.size * x.n` bytes at its host address, aligned to elements.
#[inline(always)]
unsafe fn gather(w: &mut Warp, x: &Access, m: u32, at: &Row<u64>) {
    /// # Safety
    /// As for `gather`, with elements of `SIZE` bytes.
    #[inline(always)]
    unsafe fn all<const SIZE: usize>(w: &mut Warp, x: &Access, m: u32, at: &Row<u64>) {
        for k in 0..usize::from(x.n) {
            if x.regs[k] == NONE {
                continue;
            }
            let reg = x.regs[k] as usize;
            let off = (k * SIZE) as u64;
            if x.ext == 8 {
                let row = &mut w.q[reg].0;
                for i in each(m) {
                    // SAFETY: as the caller promises.
                    row[i] = extend(unsafe { read::<SIZE>(at.0[i] + off) }, x.size, x.signed, 8);
                }
            } else if SIZE == 4 && m == !0 {
                let row = &mut w.r[reg].0;
                for i in 0..32 {
                    // SAFETY: as the caller promises.
                    row[i] = unsafe { read::<4>(at.0[i] + off) } as u32;
                }
            } else {
                let row = &mut w.r[reg].0;
                for i in each(m) {
                    // SAFETY: as the caller promises.
                    row[i] = extend(unsafe { read::<SIZE>(at.0[i] + off) }, x.size, x.signed, x.ext) as u32;
                }
            }
        }
    }
    // SAFETY: as the caller promises.
    unsafe {
        match x.size {
            1 => all::<1>(w, x, m, at),
            2 => all::<2>(w, x, m, at),
            4 => all::<4>(w, x, m, at),
            _ => all::<8>(w, x, m, at),
        }
    }
}

/// Stores the elements of all lanes, lane by lane.
///
/// # Safety
/// As for [`gather`]; the bytes may be written.
#[inline(always)]
unsafe fn scatter(w: &Warp, x: &Access, m: u32, at: &Row<u64>) {
    /// # Safety
    /// As for `scatter`, with elements of `SIZE` bytes.
    #[inline(always)]
    unsafe fn all<const SIZE: usize>(w: &Warp, x: &Access, m: u32, at: &Row<u64>) {
        for k in 0..usize::from(x.n) {
            let reg = x.regs[k] as usize;
            let off = (k * SIZE) as u64;
            if x.ext == 8 {
                let row = &w.q[reg].0;
                for i in each(m) {
                    // SAFETY: as the caller promises.
                    unsafe { write::<SIZE>(at.0[i] + off, row[i]) };
                }
            } else {
                let row = &w.r[reg].0;
                for i in each(m) {
                    // SAFETY: as the caller promises.
                    unsafe { write::<SIZE>(at.0[i] + off, u64::from(row[i])) };
                }
            }
        }
    }
    // SAFETY: as the caller promises.
    unsafe {
        match x.size {
            1 => all::<1>(w, x, m, at),
            2 => all::<2>(w, x, m, at),
            4 => all::<4>(w, x, m, at),
            _ => all::<8>(w, x, m, at),
        }
    }
}
