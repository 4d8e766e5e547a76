//! Packing integers into the file's P64 planes.

use half::{bf16, f16};
use quern_models::{FloatType, PANEL, ZeroKind};
use rayon::prelude::*;

use crate::import::{IntShape, Integers, rows_of};

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
    let (scales, zeros) = rest.split_at_mut((planes.zeros.0 - planes.scales.0) as usize);
    let scales = &mut scales[..planes.scales.1 as usize];
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
    let cells = shape.groups() * PANEL;
    scales.par_chunks_mut(cells * shape.scale.size()).enumerate().for_each(|(panel, out)| {
        each_cell(shape, panel, |row, group, cell| put(out, shape.scale, cell, tensor.scale(row, group)));
    });
    match shape.zero {
        ZeroKind::Mid => {}
        ZeroKind::Min => {
            zeros.par_chunks_mut(cells * shape.scale.size()).enumerate().for_each(|(panel, out)| {
                each_cell(shape, panel, |row, group, cell| put(out, shape.scale, cell, tensor.min(row, group)));
            });
        }
        ZeroKind::Code => {
            zeros.par_chunks_mut(cells * shape.bits as usize / 8).enumerate().for_each(|(panel, out)| {
                zeros_of_panel(tensor, panel, out);
            });
        }
    }
    out
}

/// Calls `f(row, group, cell)` for every cell of a panel that is not padding.
fn each_cell(shape: IntShape, panel: usize, mut f: impl FnMut(usize, usize, usize)) {
    for group in 0..shape.groups() {
        for r in 0..rows_of(shape.n, panel) {
            f(panel * PANEL + r, group, group * PANEL + r);
        }
    }
}

/// Zero codes of a panel; padding rows hold the middle code, as their codes do.
fn zeros_of_panel<T: Integers + ?Sized>(tensor: &T, panel: usize, out: &mut [u8]) {
    let shape = tensor.shape();
    if shape.bits == 8 {
        out.fill(shape.mid());
        each_cell(shape, panel, |row, group, cell| out[cell] = tensor.zero(row, group));
        return;
    }
    out.fill(shape.mid() * 0x11);
    each_cell(shape, panel, |row, group, cell| {
        let r = cell % PANEL;
        let (byte, shift) = (group * 32 + r / 16 * 8 + r % 8, r % 16 / 8 * 4);
        out[byte] = out[byte] & !(15 << shift) | tensor.zero(row, group) << shift;
    });
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

/// Writes element `i`; `kind` holds `x` exactly.
fn put(plane: &mut [u8], kind: FloatType, i: usize, x: f32) {
    match kind {
        FloatType::F32 => plane[i * 4..][..4].copy_from_slice(&x.to_le_bytes()),
        FloatType::F16 => plane[i * 2..][..2].copy_from_slice(&f16::from_f32(x).to_le_bytes()),
        FloatType::BF16 => plane[i * 2..][..2].copy_from_slice(&bf16::from_f32(x).to_le_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use quern_models::{TensorView, p64::Shape};

    use super::*;

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
    }

    #[test]
    fn every_element_lies_where_the_layout_says() {
        for (n, k, group) in [(64, 64, 32), (70, 96, 64), (1, 32, 32), (130, 40, 128), (192, 256, 256)] {
            for bits in [4, 8] {
                for zero in [ZeroKind::Mid, ZeroKind::Code, ZeroKind::Min] {
                    for scale in [FloatType::F16, FloatType::F32] {
                        check(Made(IntShape { n, k, bits, group, zero, scale }));
                    }
                }
            }
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
