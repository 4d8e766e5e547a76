//! Rows of an embedding table, dequantized.

use super::mini::E4M3;
use quern_models::p64::Shape;
use quern_models::{Mini, Scheme, TensorView, ZeroKind};

/// Row `row` of `table` in f32, `[k]`, equal to [`TensorView::at`] element by element.
pub fn embed_row(table: &TensorView, row: usize, out: &mut [f32]) {
    assert_eq!(out.len(), table.k, "columns of the output, columns of the table");
    let Some((bits, group)) = table.scheme.coded() else {
        match table.scheme {
            Scheme::Float(t) => {
                let bytes = &table.codes[row * table.k * t.size()..(row + 1) * table.k * t.size()];
                out.iter_mut().enumerate().for_each(|(i, o)| *o = t.read(bytes, i));
            }
            _ => out.iter_mut().enumerate().for_each(|(i, o)| *o = table.at(row, i)),
        }
        return;
    };
    let shape = Shape::new(table.n, table.k, bits, group);
    let codes = |g: usize| (g * group..).map(|k| shape.code(table.codes, row, k));
    for (g, out) in out.chunks_mut(group).enumerate() {
        let s = table.scale(row, g);
        match table.scheme {
            Scheme::Mini { kind: Mini::E4M3, .. } => {
                out.iter_mut().zip(codes(g)).for_each(|(o, q)| *o = s * E4M3[q as usize])
            }
            Scheme::Mini { kind: Mini::E2M1, .. } => {
                let values: [f32; 16] = std::array::from_fn(|c| s * Mini::E2M1.value(c as u8));
                out.iter_mut().zip(codes(g)).for_each(|(o, q)| *o = values[q as usize]);
            }
            Scheme::Int { zero: ZeroKind::Min, .. } | Scheme::Nested { zero: ZeroKind::Min, .. } => {
                let m = table.min(row, g);
                out.iter_mut().zip(codes(g)).for_each(|(o, q)| *o = s * q as f32 + m);
            }
            Scheme::Int { zero: ZeroKind::Code, .. } => {
                let z = shape.zero(table.zeros, row, g) as f32;
                out.iter_mut().zip(codes(g)).for_each(|(o, q)| *o = s * (q as f32 - z));
            }
            _ => {
                let z = (1u32 << (bits - 1)) as f32;
                out.iter_mut().zip(codes(g)).for_each(|(o, q)| *o = s * (q as f32 - z));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quern_models::FloatType;

    /// Every code, zero and scale occurs, the floats that are no numbers included.
    #[test]
    fn rows_equal_the_definition() {
        let (n, k) = (70, 300);
        let mut schemes = vec![Scheme::Float(FloatType::F32), Scheme::Float(FloatType::F16)];
        for (bits, group) in [(4, 16), (4, 32), (4, 48), (8, 16), (8, 32), (8, 128)] {
            for zero in [ZeroKind::Mid, ZeroKind::Code, ZeroKind::Min] {
                schemes.push(Scheme::Int { bits, group, zero, scale: FloatType::BF16 });
                if zero != ZeroKind::Code && group <= 32 {
                    schemes.push(Scheme::Nested { bits, group, zero });
                }
            }
            let kind = if bits == 4 { Mini::E2M1 } else { Mini::E4M3 };
            schemes.push(Scheme::Mini { kind, group, scale: FloatType::F32 });
        }
        let mut state = 1u64;
        for scheme in schemes {
            let len = scheme.planes(n, k).expect("a small tensor").total as usize;
            let byte = || {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 56) as u8
            };
            let bytes: Vec<u8> = std::iter::repeat_with(byte).take(len).collect();
            let table = TensorView::new(n as usize, k as usize, scheme, &bytes).expect("as long as planned");
            let mut out = vec![0.0; k as usize];
            for row in 0..n as usize {
                embed_row(&table, row, &mut out);
                for (i, got) in out.iter().enumerate() {
                    let want = table.at(row, i);
                    let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                    assert!(same, "{scheme} [{row}, {i}]: {got:e}, want {want:e}");
                }
            }
        }
    }
}
