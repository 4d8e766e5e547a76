//! `atom` and `red`, one lane after the other.

use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering::SeqCst};

use super::alu::number::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use super::lanes::Row;
use super::memory::{Way, addresses, each};
use super::{Atomic, AtomicKind, Cta, Warp};
use crate::check::Fault;
use crate::check::shared::Touch;
use crate::memory::TAG;
use crate::ptx::types::{NONE, SHARED_WINDOW, Space, Ty, WINDOW};

impl Cta<'_> {
    #[inline(never)]
    pub fn atomic<const WATCH: bool>(&mut self, w: &mut Warp, pc: u32, x: &Atomic, m: u32) -> Result<(), Fault> {
        let at = addresses(w, x.addr, x.wide, x.off);
        let bytes = x.ty.size() as u64;
        let (shared, global) = match x.space {
            Space::Shared => (m, 0),
            Space::Generic => {
                let window =
                    each(m).filter(|&i| at.0[i] & !(WINDOW - 1) == SHARED_WINDOW).fold(0, |all, i| all | 1 << i);
                (window, m & !window)
            }
            _ => (0, m),
        };
        let mut host = Row([0; 32]);
        if shared != 0 {
            let base = if x.space == Space::Generic { SHARED_WINDOW } else { 0 };
            let at = Row(at.0.map(|a| a.wrapping_sub(base)));
            self.shared_bounds(w, pc, shared, &at, bytes, Way::Atomic)?;
            if WATCH {
                self.watch_shared(w, pc, shared, &at, bytes, |_, _| Touch::Atomic);
            }
            for i in each(shared) {
                host.0[i] = self.shared.as_mut_ptr() as u64 + at.0[i];
            }
        }
        if global != 0 {
            self.global_bounds(w, pc, global, &at, bytes, bytes, Way::Atomic)?;
            if WATCH {
                self.watch_global(w, pc, global, &at, bytes, Way::Atomic, |_| [0; 32]);
            }
            for i in each(global) {
                host.0[i] = at.0[i] & !TAG;
            }
        }
        for i in each(m) {
            let get = |w: &Warp, reg: u16| match reg {
                NONE => 0,
                _ if bytes == 8 => w.q[reg as usize].0[i],
                _ => u64::from(w.r[reg as usize].0[i]),
            };
            let (b, c) = (get(w, x.b), get(w, x.c));
            let step = |old: u64| Some(apply(x.kind, x.ty, old, b, c));
            let at = host.0[i];
            // SAFETY: the bounds and the alignment were checked; others touch these bytes by atomics too.
            let old = unsafe {
                match bytes {
                    2 => (*(at as *const AtomicU16))
                        .fetch_update(SeqCst, SeqCst, |old| step(old.into()).map(|new| new as u16))
                        .map(u64::from)
                        .unwrap_or_default(),
                    4 => (*(at as *const AtomicU32))
                        .fetch_update(SeqCst, SeqCst, |old| step(old.into()).map(|new| new as u32))
                        .map(u64::from)
                        .unwrap_or_default(),
                    _ => (*(at as *const AtomicU64)).fetch_update(SeqCst, SeqCst, step).unwrap_or_default(),
                }
            };
            if x.d != NONE {
                if bytes == 8 {
                    w.q[x.d as usize].0[i] = old;
                } else {
                    w.r[x.d as usize].0[i] = old as u32;
                }
            }
        }
        Ok(())
    }
}

/// What an atomic leaves in memory.
fn apply(kind: AtomicKind, ty: Ty, old: u64, b: u64, c: u64) -> u64 {
    let half = |old: u64, b: u64, value: fn(u16) -> f32, bits: fn(f32) -> u16| {
        u64::from(bits(value(old as u16) + value(b as u16)))
    };
    let pair = |value: fn(u16) -> f32, bits: fn(f32) -> u16| {
        half(old, b, value, bits) | half(old >> 16, b >> 16, value, bits) << 16
    };
    match (kind, ty) {
        (AtomicKind::Add, Ty::F32) => (f32::from_bits(old as u32) + f32::from_bits(b as u32)).to_bits().into(),
        (AtomicKind::Add, Ty::F64) => (f64::from_bits(old) + f64::from_bits(b)).to_bits(),
        (AtomicKind::Add, Ty::F16) => half(old, b, f16_to_f32, f32_to_f16),
        (AtomicKind::Add, Ty::Bf16) => half(old, b, bf16_to_f32, f32_to_bf16),
        (AtomicKind::Add, Ty::F16x2) => pair(f16_to_f32, f32_to_f16),
        (AtomicKind::Add, Ty::Bf16x2) => pair(bf16_to_f32, f32_to_bf16),
        (AtomicKind::Add, _) => old.wrapping_add(b),
        (AtomicKind::Min, Ty::S32) => (old as i32).min(b as i32) as u32 as u64,
        (AtomicKind::Max, Ty::S32) => (old as i32).max(b as i32) as u32 as u64,
        (AtomicKind::Min, Ty::S64) => (old as i64).min(b as i64) as u64,
        (AtomicKind::Max, Ty::S64) => (old as i64).max(b as i64) as u64,
        (AtomicKind::Min, _) => old.min(b),
        (AtomicKind::Max, _) => old.max(b),
        (AtomicKind::And, _) => old & b,
        (AtomicKind::Or, _) => old | b,
        (AtomicKind::Xor, _) => old ^ b,
        (AtomicKind::Exch, _) => b,
        (AtomicKind::Cas, _) => {
            if old == b {
                c
            } else {
                old
            }
        }
        (AtomicKind::Inc, _) => {
            if old >= b {
                0
            } else {
                old + 1
            }
        }
        (AtomicKind::Dec, _) => {
            if old == 0 || old > b {
                b
            } else {
                old - 1
            }
        }
    }
}
