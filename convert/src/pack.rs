//! Packing integers into the file's P64 planes.

use half::f16;
use quern_models::{PANEL, SUPER, ZeroKind, p64::Shape};
use rayon::prelude::*;

use crate::import::{Coding, IntShape, Integers, rows_of};

/// Columns interleaved at a time: a cache line of every row.
const BLOCK: usize = 64;

/// The planes of a tensor, exactly [`quern_models::Scheme::planes`]' total bytes.
///
/// Panels are independent and packed in parallel; beside the result, a thread needs 64 rows of bytes.
pub fn pack<T: Integers + ?Sized>(tensor: &T) -> Vec<u8> {
    let shape = tensor.shape();
    let planes = shape.scheme().planes(shape.n as u64, shape.k as u64).expect("the source holds as many elements");
    let mut out = vec![0; planes.total as usize];
    let (codes, rest) = out.split_at_mut(planes.scales.0 as usize);
    let (scales, rest) = rest.split_at_mut((planes.zeros.0 - planes.scales.0) as usize);
    let (zeros, supers) = rest.split_at_mut((planes.supers.0 - planes.zeros.0) as usize);
    let scales = &mut scales[..planes.scales.1 as usize];
    let zeros = &mut zeros[..planes.zeros.1 as usize];
    let codes = &mut codes[..planes.codes.1 as usize];

    let stride = shape.k.next_multiple_of(shape.group);
    codes.par_chunks_mut(codes_of_panel(shape)).enumerate().for_each_init(
        || vec![0; PANEL * stride],
        |rows, (panel, out)| {
            // Padding holds the middle code; rows of an earlier panel must not show through.
            rows.fill(shape.mid());
            tensor.fill(panel, stride, rows);
            if shape.bits == 4 { interleave4(rows, stride, out) } else { interleave8(rows, stride, out) }
        },
    );
    if shape.coding == Coding::Nested {
        let levels = if shape.zero == ZeroKind::Min { 2 } else { 1 };
        let planes = [scales, zeros];
        for (level, plane) in planes.into_iter().enumerate().take(levels) {
            lower(shape, plane, |row, group| tensor.nested(row, group)[level].lower);
        }
        upper(shape, levels, supers, |row, group, level| tensor.nested(row, group)[level].upper);
        return out;
    }
    cells(shape, scales, |row, group| tensor.scale(row, group));
    match shape.zero {
        _ if shape.coding != Coding::Plain => {}
        ZeroKind::Mid => {}
        ZeroKind::Min => cells(shape, zeros, |row, group| tensor.min(row, group)),
        ZeroKind::Code => {
            let panel_bytes = shape.groups() * PANEL * shape.bits as usize / 8;
            zeros.par_chunks_mut(panel_bytes).enumerate().for_each(|(panel, out)| zeros_of_panel(tensor, panel, out));
        }
    }
    out
}

/// Fills a plane of scales or minima, `[panel][group][64]`; padding rows hold zero.
fn cells(shape: IntShape, plane: &mut [u8], value: impl Fn(usize, usize) -> f32 + Sync) {
    let panel_bytes = shape.groups() * PANEL * shape.scale.size();
    plane.par_chunks_mut(panel_bytes).enumerate().for_each_init(Vec::new, |bytes, (panel, out)| {
        bytes.clear();
        let rows = rows_of(shape.n, panel);
        for group in 0..shape.groups() {
            (0..rows).for_each(|r| shape.scale.push(value(panel * PANEL + r, group), bytes));
            (rows..PANEL).for_each(|_| shape.scale.push(0.0, bytes));
        }
        out.copy_from_slice(bytes);
    });
}

/// Fills a plane of the lower level, `[panel][group][64]` bytes; padding rows hold zero.
fn lower(shape: IntShape, plane: &mut [u8], value: impl Fn(usize, usize) -> i8 + Sync) {
    plane.par_chunks_mut(shape.groups() * PANEL).enumerate().for_each(|(panel, out)| {
        for (group, out) in out.chunks_exact_mut(PANEL).enumerate() {
            for (r, out) in out.iter_mut().enumerate().take(rows_of(shape.n, panel)) {
                *out = value(panel * PANEL + r, group) as u8;
            }
        }
    });
}

/// Fills the plane of the upper level, `[panel][super][levels][64]` f16; padding rows hold zero.
fn upper(shape: IntShape, levels: usize, plane: &mut [u8], value: impl Fn(usize, usize, usize) -> f16 + Sync) {
    let supers = (shape.groups() * shape.group).div_ceil(SUPER);
    plane.par_chunks_mut(supers * levels * PANEL * 2).enumerate().for_each(|(panel, out)| {
        for (i, out) in out.chunks_exact_mut(PANEL * 2).enumerate() {
            let group = i / levels * (SUPER / shape.group);
            for (r, out) in out.chunks_exact_mut(2).enumerate().take(rows_of(shape.n, panel)) {
                out.copy_from_slice(&value(panel * PANEL + r, group, i % levels).to_le_bytes());
            }
        }
    });
}

/// Zero codes of a panel; padding rows hold the middle code, as their codes do.
fn zeros_of_panel<T: Integers + ?Sized>(tensor: &T, panel: usize, out: &mut [u8]) {
    let shape = tensor.shape();
    // Every panel is laid out as the first.
    let at = Shape::new(PANEL, shape.k, shape.bits, shape.group);
    let mask = u8::MAX >> (8 - shape.bits);
    out.fill(if shape.bits == 4 { shape.mid() * 0x11 } else { shape.mid() });
    for group in 0..shape.groups() {
        for r in 0..rows_of(shape.n, panel) {
            let (byte, shift) = at.zero_at(r, group);
            out[byte] = out[byte] & !(mask << shift) | tensor.zero(panel * PANEL + r, group) << shift;
        }
    }
}

fn codes_of_panel(shape: IntShape) -> usize {
    PANEL * shape.k.next_multiple_of(shape.group) * shape.bits as usize / 8
}

/// Rows `[64][stride]` of 4-bit codes into quads of 128 bytes: rows r and r+8 share a byte.
fn interleave4(rows: &[u8], stride: usize, out: &mut [u8]) {
    for k0 in (0..stride).step_by(BLOCK) {
        for r in (0..PANEL).filter(|r| r % 16 < 8) {
            let (low, high) = (&rows[r * stride..][..stride], &rows[(r + 8) * stride..][..stride]);
            for k in (k0..stride.min(k0 + BLOCK)).step_by(4) {
                let to = &mut out[k / 4 * 128 + r / 16 * 32 + r % 8 * 4..][..4];
                for ((to, low), high) in to.iter_mut().zip(&low[k..k + 4]).zip(&high[k..k + 4]) {
                    *to = low | high << 4;
                }
            }
        }
    }
}

/// Rows `[64][stride]` of 8-bit codes into quads of 256 bytes.
fn interleave8(rows: &[u8], stride: usize, out: &mut [u8]) {
    for k0 in (0..stride).step_by(BLOCK) {
        for r in 0..PANEL {
            let row = &rows[r * stride..][..stride];
            for k in (k0..stride.min(k0 + BLOCK)).step_by(4) {
                out[k / 4 * 256 + r / 8 * 32 + r % 8 * 4..][..4].copy_from_slice(&row[k..k + 4]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use quern_models::{FloatType, Mini, TensorView};

    use super::*;
    use crate::import::Level2;

    struct Made(IntShape);

    impl Integers for Made {
        fn shape(&self) -> IntShape {
            self.0
        }
        fn code(&self, row: usize, col: usize) -> u8 {
            ((row * 31 + col * 7 + row * col) % (1 << self.0.bits)) as u8
        }
        fn scale(&self, row: usize, group: usize) -> f32 {
            (row as f32 - 3.0) * 0.5 + group as f32
        }
        fn zero(&self, row: usize, group: usize) -> u8 {
            ((row + 3 * group) % (1 << self.0.bits)) as u8
        }
        fn min(&self, row: usize, group: usize) -> f32 {
            group as f32 - row as f32
        }
        fn nested(&self, row: usize, group: usize) -> [Level2; 2] {
            let block = group / (SUPER / self.0.group);
            let level = |upper: usize, lower| Level2 { upper: f16::from_f32(upper as f32 / 8.0), lower };
            [level(row + 3 * block, (row + 5 * group) as i8), level(row * 2 + block + 1, (7 * group) as i8 - row as i8)]
        }
    }

    #[test]
    fn every_element_lies_where_the_layout_says() {
        for (n, k, group) in [(64, 64, 32), (70, 96, 64), (1, 32, 32), (130, 40, 128), (192, 256, 256)] {
            for bits in [4, 8] {
                for zero in [ZeroKind::Mid, ZeroKind::Code, ZeroKind::Min] {
                    for scale in [FloatType::F16, FloatType::F32] {
                        check(Made(IntShape { n, k, bits, group, zero, scale, coding: Coding::Plain }));
                    }
                }
            }
        }
        for (n, k, group) in [(64, 256, 16), (70, 512, 32), (1, 272, 16)] {
            for (bits, zero) in [(4, ZeroKind::Mid), (4, ZeroKind::Min), (8, ZeroKind::Mid), (8, ZeroKind::Min)] {
                let scale = FloatType::F16;
                check(Made(IntShape { n, k, bits, group, zero, scale, coding: Coding::Nested }));
            }
        }
        for (kind, group) in [(Mini::E2M1, 32), (Mini::E2M1, 16), (Mini::E4M3, 128)] {
            let (bits, zero, scale) = (kind.bits(), ZeroKind::Mid, FloatType::BF16);
            check(Made(IntShape { n: 70, k: 96, bits, group, zero, scale, coding: Coding::Mini(kind) }));
        }
    }

    fn check(made: Made) {
        let s = made.0;
        let bytes = pack(&made);
        let view = TensorView::new(s.n, s.k, s.scheme(), &bytes).unwrap();
        let at = Shape::new(s.n, s.k, s.bits, s.group);
        for row in 0..at.n_pad {
            for col in 0..at.k_pad {
                let expected = if row < s.n && col < s.k { made.code(row, col) } else { s.mid() };
                assert_eq!(at.code(view.codes, row, col), expected, "{s:?} [{row}, {col}]");
            }
            for g in 0..at.groups {
                let real = row < s.n;
                if s.coding == Coding::Nested {
                    let value = |level: usize| {
                        let l = made.nested(row, g)[level];
                        if real { l.upper.to_f32() * l.lower as f32 } else { 0.0 }
                    };
                    assert_eq!(view.scale(row, g), value(0));
                    assert_eq!(view.min(row, g), if s.zero == ZeroKind::Min { value(1) } else { 0.0 });
                    continue;
                }
                let scale = s.scale.read(view.scales, at.cell(row, g));
                assert_eq!(scale, if real { made.scale(row, g) } else { 0.0 });
                match s.zero {
                    ZeroKind::Mid => assert!(view.zeros.is_empty()),
                    ZeroKind::Code => {
                        assert_eq!(at.zero(view.zeros, row, g), if real { made.zero(row, g) } else { s.mid() })
                    }
                    ZeroKind::Min => {
                        let min = s.scale.read(view.zeros, at.cell(row, g));
                        assert_eq!(min, if real { made.min(row, g) } else { 0.0 });
                    }
                }
            }
        }
    }
}
