//! `ldmatrix` and `mma.sync`, as the figures of the PTX manual lay their fragments out.
//!
//! Lane `4 g + q` holds, of an operand with rows of 32-bit words, the words `q` of row `g`: `g` counts rows of a and
//! of the result, and columns of b.

// Loops over lanes index several rows at once.
#![allow(clippy::needless_range_loop)]

use super::alu::number::{bf16_to_f32, e4m3_to_f32, e5m2_to_f32, f16_to_f32, f32_to_f16, tf32};
use super::lanes::Row;
use super::memory::{Way, each};
use super::{Cta, MmaKind, Warp};
use crate::check::shared::{Touch, waves};
use crate::check::{Fault, Kind};
use crate::ptx::types::Reg;

impl MmaKind {
    /// Registers of a, b, and of c and d.
    pub fn registers(self) -> (usize, usize, usize) {
        use MmaKind::*;
        match self {
            F16K16 | Bf16K16 | Tf32K8 | I8K32 { .. } | I4K64 { .. } | F8K32 { .. } => (4, 2, 4),
            F16K8 | Bf16K8 | Tf32K4 | I8K16 { .. } | I4K32 { .. } => (2, 1, 4),
            F16K16Half => (4, 2, 2),
            F16K8Half => (2, 1, 2),
        }
    }
}

impl Cta<'_> {
    #[inline(always)]
    fn whole_warp(&self, w: &Warp, pc: u32, m: u32, what: &str) -> Result<(), Fault> {
        if m == !0 {
            return Ok(());
        }
        let lane = (!m).trailing_zeros() as usize;
        Err(self.fault(w, pc, lane, Kind::PartialWarp, &format!("{what} with lanes {m:#x} only")))
    }

    /// Loads `n` matrices of 8 rows of 16 bytes; lanes `8 j` to `8 j + 7` have the rows' addresses of matrix `j`.
    #[inline(always)]
    pub fn load_matrix<const WATCH: bool>(
        &mut self,
        w: &mut Warp,
        pc: u32,
        m: u32,
        n: usize,
        trans: bool,
        d: &[Reg; 4],
        at: &Row<u64>,
    ) -> Result<(), Fault> {
        self.whole_warp(w, pc, m, "ldmatrix")?;
        let rows = if n == 4 { !0 } else { (1u32 << (8 * n)) - 1 };
        self.shared_bounds(w, pc, rows, at, 16, Way::Load)?;
        if WATCH {
            self.watch_matrix(w, pc, rows, at);
        }
        for j in 0..n {
            let mut row = Row([0u32; 32]);
            if trans {
                // Lane 4 g + q: rows 2 q and 2 q + 1 of column g.
                for q in 0..4 {
                    let low = at.0[8 * j + 2 * q] as usize;
                    let high = at.0[8 * j + 2 * q + 1] as usize;
                    for g in 0..8 {
                        let half = |from: usize| {
                            u32::from(u16::from_le_bytes([self.shared[from + 2 * g], self.shared[from + 2 * g + 1]]))
                        };
                        row.0[4 * g + q] = half(low) | half(high) << 16;
                    }
                }
            } else {
                for g in 0..8 {
                    let from = at.0[8 * j + g] as usize;
                    let bytes = &self.shared[from..from + 16];
                    for q in 0..4 {
                        row.0[4 * g + q] =
                            u32::from_le_bytes([bytes[4 * q], bytes[4 * q + 1], bytes[4 * q + 2], bytes[4 * q + 3]]);
                    }
                }
            }
            w.r[d[j] as usize] = row;
        }
        Ok(())
    }

    #[cold]
    fn watch_matrix(&mut self, w: &Warp, pc: u32, rows: u32, at: &Row<u64>) {
        // One pass of 8 rows for each matrix at best; other lanes read the rows than those with the addresses, so a
        // read counts as every lane's.
        for j in (0..4).filter(|j| rows >> (8 * j) & 1 == 1) {
            let (passes, fewest) = waves(0xff << (8 * j), &at.0, 16);
            self.traffic.shared_waves += passes;
            self.traffic.shared_ideal += fewest;
        }
        self.traffic.shared_requests += 1;
        let Some(mut shadow) = self.shadow.take() else { return };
        for i in each(rows) {
            for q in 0..4 {
                let from = at.0[i] as usize + 4 * q;
                let thread = (w.id * 32 + (4 * (i as u32 % 8) + q as u32)) as u16;
                if let Some((kind, what)) = shadow.touch(from, 4, thread, &w.met, Touch::Read) {
                    self.report(w, pc, usize::from(thread % 32), kind, &format!("{what} (byte {from})"));
                }
            }
        }
        self.shadow = Some(shadow);
    }

    #[inline(always)]
    pub fn mma(
        &mut self,
        w: &mut Warp,
        pc: u32,
        m: u32,
        kind: MmaKind,
        d: &[Reg; 4],
        a: &[Reg; 4],
        b: &[Reg; 2],
        c: &[Reg; 4],
    ) -> Result<(), Fault> {
        self.whole_warp(w, pc, m, "mma")?;
        use MmaKind::*;
        match kind {
            F16K16 => singles(w, d, c, &halves::<4>(w, a, f16_to_f32), &halves::<2>(w, b, f16_to_f32)),
            Bf16K16 => singles(w, d, c, &halves::<4>(w, a, bf16_to_f32), &halves::<2>(w, b, bf16_to_f32)),
            F16K8 => singles(w, d, c, &halves::<2>(w, a, f16_to_f32), &halves::<1>(w, b, f16_to_f32)),
            Bf16K8 => singles(w, d, c, &halves::<2>(w, a, bf16_to_f32), &halves::<1>(w, b, bf16_to_f32)),
            F16K16Half => pairs(w, d, c, &halves::<4>(w, a, f16_to_f32), &halves::<2>(w, b, f16_to_f32)),
            F16K8Half => pairs(w, d, c, &halves::<2>(w, a, f16_to_f32), &halves::<1>(w, b, f16_to_f32)),
            Tf32K4 => slow_floats(w, d, a, b, c, 4, 1, |word, _| tf32(word), |word, _| tf32(word)),
            Tf32K8 => slow_floats(w, d, a, b, c, 8, 1, |word, _| tf32(word), |word, _| tf32(word)),
            F8K32 { a: x, b: y } => slow_floats(w, d, a, b, c, 32, 4, eight(x), eight(y)),
            I8K16 { a: x, b: y, sat } => bytes::<2>(w, d, a, b, c, x, y, sat),
            I8K32 { a: x, b: y, sat } => bytes::<4>(w, d, a, b, c, x, y, sat),
            I4K32 { a: x, b: y, sat } => nibbles(w, d, a, b, c, 32, x, y, sat),
            I4K64 { a: x, b: y, sat } => nibbles(w, d, a, b, c, 64, x, y, sat),
        }
        Ok(())
    }
}

/// An 8-bit float of a word: e5m2 or e4m3.
fn eight(e5m2: bool) -> impl Fn(u32, usize) -> f32 {
    move |word, at| {
        let byte = (word >> (8 * at)) as u8;
        if e5m2 { e5m2_to_f32(byte) } else { e4m3_to_f32(byte) }
    }
}

/// Registers of pairs as values: `[register][upper half][lane]`.
#[inline(always)]
fn halves<const N: usize>(w: &Warp, regs: &[Reg], value: impl Fn(u16) -> f32) -> [[[f32; 32]; 2]; N] {
    let mut found = [[[0.0; 32]; 2]; N];
    for (found, &reg) in found.iter_mut().zip(regs) {
        let row = &w.r[reg as usize].0;
        for i in 0..32 {
            found[0][i] = value(row[i] as u16);
        }
        for i in 0..32 {
            found[1][i] = value((row[i] >> 16) as u16);
        }
    }
    found
}

/// The product of a (16 rows) and b (8 columns): fused multiply-adds in the order of k, from zero.
#[inline(always)]
fn product<const NA: usize, const NB: usize>(a: &[[[f32; 32]; 2]; NA], b: &[[[f32; 32]; 2]; NB]) -> [[f32; 8]; 16] {
    // k = 8 t + 2 q + h lies in register t of b, and in registers 2 t (rows 0..8) and 2 t + 1 of a.
    let mut by_k = [[0.0f32; 8]; 16];
    for t in 0..NB {
        for q in 0..4 {
            for h in 0..2 {
                for g in 0..8 {
                    by_k[8 * t + 2 * q + h][g] = b[t][h][4 * g + q];
                }
            }
        }
    }
    let mut found = [[0.0f32; 8]; 16];
    for rows in 0..4 {
        let mut sums = [[0.0f32; 8]; 4];
        for t in 0..NB {
            for q in 0..4 {
                for h in 0..2 {
                    let column = &by_k[8 * t + 2 * q + h];
                    for r in 0..4 {
                        let row = 4 * rows + r;
                        let x = a[2 * t + row / 8][h][4 * (row % 8) + q];
                        for n in 0..8 {
                            sums[r][n] = x.mul_add(column[n], sums[r][n]);
                        }
                    }
                }
            }
        }
        found[4 * rows..4 * rows + 4].copy_from_slice(&sums);
    }
    found
}

/// Results in f32: register `r` holds row `g + 8 (r / 2)`, column `2 q + r % 2`.
#[inline(always)]
fn singles<const NA: usize, const NB: usize>(
    w: &mut Warp,
    d: &[Reg; 4],
    c: &[Reg; 4],
    a: &[[[f32; 32]; 2]; NA],
    b: &[[[f32; 32]; 2]; NB],
) {
    write_floats(w, d, c, &product(a, b));
}

#[inline(always)]
fn write_floats(w: &mut Warp, d: &[Reg; 4], c: &[Reg; 4], sums: &[[f32; 8]; 16]) {
    let mut rows = [Row([0u32; 32]); 4];
    for r in 0..4 {
        let old = &w.r[c[r] as usize];
        for g in 0..8 {
            for q in 0..4 {
                let i = 4 * g + q;
                rows[r].0[i] = (sums[g + 8 * (r / 2)][2 * q + r % 2] + f32::from_bits(old.0[i])).to_bits();
            }
        }
    }
    for r in 0..4 {
        w.r[d[r] as usize] = rows[r];
    }
}

/// Results in f16: register `r` holds columns `2 q` and `2 q + 1` of row `g + 8 r`.
#[inline(always)]
fn pairs<const NA: usize, const NB: usize>(
    w: &mut Warp,
    d: &[Reg; 4],
    c: &[Reg; 4],
    a: &[[[f32; 32]; 2]; NA],
    b: &[[[f32; 32]; 2]; NB],
) {
    let sums = product(a, b);
    let mut rows = [Row([0u32; 32]); 2];
    for r in 0..2 {
        let old = &w.r[c[r] as usize];
        for g in 0..8 {
            for q in 0..4 {
                let i = 4 * g + q;
                let half = |h: usize| {
                    let add = f16_to_f32((old.0[i] >> (16 * h)) as u16);
                    u32::from(f32_to_f16(sums[g + 8 * r][2 * q + h] + add))
                };
                rows[r].0[i] = half(0) | half(1) << 16;
            }
        }
    }
    for r in 0..2 {
        w.r[d[r] as usize] = rows[r];
    }
}

/// Kinds that are seldom: `per` values in a word, which `x` and `y` take out.
#[inline(never)]
fn slow_floats(
    w: &mut Warp,
    d: &[Reg; 4],
    a: &[Reg; 4],
    b: &[Reg; 2],
    c: &[Reg; 4],
    depth: usize,
    per: usize,
    x: impl Fn(u32, usize) -> f32,
    y: impl Fn(u32, usize) -> f32,
) {
    let mut sums = [[0.0f32; 8]; 16];
    for (row, sums) in sums.iter_mut().enumerate() {
        for (n, sum) in sums.iter_mut().enumerate() {
            for k in 0..depth {
                let (word_a, word_b, part) = words(w, a, b, row, n, k, per);
                *sum = x(word_a, part).mul_add(y(word_b, part), *sum);
            }
        }
    }
    write_floats(w, d, c, &sums);
}

/// The words with element (`row`, `k`) of a and (`k`, `n`) of b, and its place in them. 4 `per` values of k lie in a
/// register of b; of a the odd registers hold rows 8 to 15.
#[inline(always)]
fn words(w: &Warp, a: &[Reg; 4], b: &[Reg; 2], row: usize, n: usize, k: usize, per: usize) -> (u32, u32, usize) {
    let (t, q, part) = (k / (4 * per), k / per % 4, k % per);
    let word_a = w.r[a[2 * t + row / 8] as usize].0[4 * (row % 8) + q];
    let word_b = w.r[b[t] as usize].0[4 * n + q];
    (word_a, word_b, part)
}

#[inline(always)]
fn write_ints(w: &mut Warp, d: &[Reg; 4], c: &[Reg; 4], sums: &[[i32; 8]; 16], sat: bool) {
    let mut rows = [Row([0u32; 32]); 4];
    for r in 0..4 {
        let old = &w.r[c[r] as usize];
        for g in 0..8 {
            for q in 0..4 {
                let (i, sum) = (4 * g + q, sums[g + 8 * (r / 2)][2 * q + r % 2]);
                let old = old.0[i] as i32;
                rows[r].0[i] = if sat { old.saturating_add(sum) } else { old.wrapping_add(sum) } as u32;
            }
        }
    }
    for r in 0..4 {
        w.r[d[r] as usize] = rows[r];
    }
}

/// 8-bit integers, `N` registers of a.
#[inline(always)]
fn bytes<const N: usize>(
    w: &mut Warp,
    d: &[Reg; 4],
    a: &[Reg; 4],
    b: &[Reg; 2],
    c: &[Reg; 4],
    signed_a: bool,
    signed_b: bool,
    sat: bool,
) {
    let byte = |word: u32, at: usize, signed: bool| {
        let byte = (word >> (8 * at)) as u8;
        if signed { i32::from(byte as i8) } else { i32::from(byte) }
    };
    // Columns of b by k, so that 8 columns are done at once.
    let mut by_k = [[0i32; 8]; 32];
    for t in 0..N / 2 {
        let row = &w.r[b[t] as usize].0;
        for q in 0..4 {
            for at in 0..4 {
                for g in 0..8 {
                    by_k[16 * t + 4 * q + at][g] = byte(row[4 * g + q], at, signed_b);
                }
            }
        }
    }
    let mut sums = [[0i32; 8]; 16];
    for (row, sums) in sums.iter_mut().enumerate() {
        for t in 0..N / 2 {
            let word = &w.r[a[2 * t + row / 8] as usize].0;
            for q in 0..4 {
                for at in 0..4 {
                    let x = byte(word[4 * (row % 8) + q], at, signed_a);
                    let column = &by_k[16 * t + 4 * q + at];
                    for n in 0..8 {
                        sums[n] += x * column[n];
                    }
                }
            }
        }
    }
    write_ints(w, d, c, &sums, sat);
}

/// 4-bit integers.
#[inline(never)]
fn nibbles(
    w: &mut Warp,
    d: &[Reg; 4],
    a: &[Reg; 4],
    b: &[Reg; 2],
    c: &[Reg; 4],
    depth: usize,
    signed_a: bool,
    signed_b: bool,
    sat: bool,
) {
    let nibble = |word: u32, at: usize, signed: bool| {
        let bits = (word >> (4 * at) & 15) as i32;
        if signed { (bits << 28) >> 28 } else { bits }
    };
    let mut sums = [[0i32; 8]; 16];
    for (row, sums) in sums.iter_mut().enumerate() {
        for (n, sum) in sums.iter_mut().enumerate() {
            for k in 0..depth {
                let (word_a, word_b, part) = words(w, a, b, row, n, k, 8);
                *sum += nibble(word_a, part, signed_a) * nibble(word_b, part, signed_b);
            }
        }
    }
    write_ints(w, d, c, &sums, sat);
}
