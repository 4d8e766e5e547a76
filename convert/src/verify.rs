//! Comparing a written tensor with its source, element by element.
//!
//! The file is read through the layout's own definition ([`Shape::code`]) and the source through the
//! format's ([`Integers::code`]); neither goes through the code that packed the file. Which
//! row or column of the source is meant, and the value of a widened weight, is the same function on both sides.

use std::ops::Range;

use half::f16;
use quern_models::{FloatType, PANEL, SUPER, Scheme, TensorView, ZeroKind, p64::Shape};
use rayon::prelude::*;

use crate::{
    ConvertError, Verified,
    import::{Coding, IntShape, Integers, float::Floats, order::Ordered, rtn},
};

/// Compares every code, scale, zero-point and minimum of an imported tensor.
pub fn integers<T: Integers + ?Sized>(name: &str, source: &T, view: &TensorView) -> Result<Verified, ConvertError> {
    let s = source.shape();
    check_scheme(name, view, s.scheme(), s.n, s.k)?;
    groups(name, source)?;
    each_panel(s.n, |rows| {
        // In tiles of 64 columns, so that neither side's order is far from memory's.
        (0..s.k).step_by(64).try_for_each(|col| codes(name, source, view, rows.clone(), col..s.k.min(col + 64)))?;
        cells(name, source, view, rows)
    })?;
    Ok(compared(s))
}

/// The same for a tensor whose rows and columns were moved, by whole columns: a column's codes lie together in the
/// source, wherever its rows went.
pub fn moved(name: &str, source: &Ordered, view: &TensorView) -> Result<Verified, ConvertError> {
    let s = source.shape();
    check_scheme(name, view, s.scheme(), s.n, s.k)?;
    groups(name, source)?;
    let blocks = (0..s.k.div_ceil(64)).into_par_iter();
    blocks.try_for_each(|b| codes(name, source, view, 0..s.n, b * 64..s.k.min((b + 1) * 64)))?;
    each_panel(s.n, |rows| cells(name, source, view, rows))?;
    Ok(compared(s))
}

/// Checks that every column has come into its group.
fn groups<T: Integers + ?Sized>(name: &str, source: &T) -> Result<(), ConvertError> {
    let s = source.shape();
    match (0..s.k).find(|&col| source.group_of(col) != col / s.group) {
        None => Ok(()),
        Some(col) => Err(differ(name, format!("group of column {col}"), source.group_of(col), col / s.group)),
    }
}

/// Compares the codes of some rows and columns.
fn codes<T: Integers + ?Sized>(
    name: &str,
    source: &T,
    view: &TensorView,
    rows: Range<usize>,
    cols: Range<usize>,
) -> Result<(), ConvertError> {
    let s = source.shape();
    let at = Shape::new(s.n, s.k, s.bits, s.group);
    for row in rows {
        for col in cols.clone() {
            let (expected, got) = (source.code(row, col), at.code(view.codes, row, col));
            if expected != got {
                return Err(differ(name, format!("code [{row}, {col}]"), expected, got));
            }
        }
    }
    Ok(())
}

/// Compares scales, zero-points and minima of some rows.
fn cells<T: Integers + ?Sized>(
    name: &str,
    source: &T,
    view: &TensorView,
    rows: Range<usize>,
) -> Result<(), ConvertError> {
    let s = source.shape();
    let at = Shape::new(s.n, s.k, s.bits, s.group);
    for row in rows {
        for g in 0..s.groups() {
            let cell = at.cell(row, g);
            if s.coding == Coding::Nested {
                nested(name, source, view, row, g)?;
                continue;
            }
            let (expected, got) = (source.scale(row, g), s.scale.read(view.scales, cell));
            if expected.to_bits() != got.to_bits() {
                return Err(differ(name, format!("scale [{row}, {g}]"), expected, got));
            }
            let (expected, got) = match s.zero {
                _ if s.coding != Coding::Plain => continue,
                // Not stored in the file: those that the source stores must all be what the scheme implies.
                ZeroKind::Mid => (source.zero(row, g), s.mid()),
                ZeroKind::Code => (source.zero(row, g), at.zero(view.zeros, row, g)),
                ZeroKind::Min => {
                    let (expected, got) = (source.min(row, g), s.scale.read(view.zeros, cell));
                    if expected.to_bits() != got.to_bits() {
                        return Err(differ(name, format!("minimum [{row}, {g}]"), expected, got));
                    }
                    continue;
                }
            };
            if expected != got {
                return Err(differ(name, format!("zero-point [{row}, {g}]"), expected, got));
            }
        }
    }
    Ok(())
}

fn compared(s: IntShape) -> Verified {
    let cells = (s.n * s.groups()) as u64;
    let count = |kind| if s.zero == kind { cells } else { 0 };
    Verified {
        codes: (s.n * s.k) as u64,
        scales: cells,
        zeros: count(ZeroKind::Code),
        minima: count(ZeroKind::Min),
        ..Verified::default()
    }
}

/// Compares the values of a tensor of codes that is stored as floats.
pub fn values(name: &str, source: &Ordered, view: &TensorView) -> Result<Verified, ConvertError> {
    let s = source.shape();
    check_scheme(name, view, Scheme::Float(FloatType::F32), s.n, s.k)?;
    each_panel(s.n, |rows| {
        for (row, col) in rows.flat_map(|row| (0..s.k).map(move |col| (row, col))) {
            let (expected, got) = (source.value(row, col), view.at(row, col));
            if expected.to_bits() != got.to_bits() {
                return Err(differ(name, format!("value [{row}, {col}]"), expected, got));
            }
        }
        Ok(())
    })?;
    Ok(Verified { values: (s.n * s.k) as u64, ..Verified::default() })
}

/// Compares an order of columns, and checks that it is one.
pub fn order(name: &str, source: &[u32], view: &TensorView) -> Result<Verified, ConvertError> {
    check_scheme(name, view, Scheme::Order, 1, source.len())?;
    let mut seen = vec![false; source.len()];
    for (i, &expected) in source.iter().enumerate() {
        let got = view.order(i);
        if got != expected {
            return Err(differ(name, format!("place {i}"), expected, got));
        }
        if seen.get(got as usize) != Some(&false) {
            return Err(differ(name, format!("place {i}"), "a column that has none yet", got));
        }
        seen[got as usize] = true;
    }
    Ok(Verified::default())
}

/// Compares the model's tokens of a head's own.
pub fn tokens(name: &str, source: &[u32], view: &TensorView) -> Result<Verified, ConvertError> {
    check_scheme(name, view, Scheme::Float(FloatType::F32), 1, source.len())?;
    for (i, &expected) in source.iter().enumerate() {
        let got = view.at(0, i);
        if got as f64 != expected as f64 {
            return Err(differ(name, format!("token {i}"), expected, got));
        }
    }
    Ok(Verified { floats: source.len() as u64, ..Verified::default() })
}

/// Compares both levels of a group's scale and minimum.
fn nested<T: Integers + ?Sized>(
    name: &str,
    source: &T,
    view: &TensorView,
    row: usize,
    g: usize,
) -> Result<(), ConvertError> {
    let s = source.shape();
    let at = Shape::new(s.n, s.k, s.bits, s.group);
    let (cell, block) = (at.cell(row, g), g * s.group / SUPER);
    let levels = if s.zero == ZeroKind::Min { 2 } else { 1 };
    for (level, plane) in [view.scales, view.zeros].into_iter().enumerate().take(levels) {
        let expected = source.nested(row, g)[level];
        let upper = FloatType::F16.read(view.supers, at.super_at(row, block, levels, level));
        let (lower, what) = (plane[cell] as i8, ["scale", "minimum"][level]);
        if expected.lower != lower || expected.upper.to_f32().to_bits() != upper.to_bits() {
            let expected = format!("{} * {}", expected.upper, expected.lower);
            return Err(differ(name, format!("{what} [{row}, {g}]"), expected, format!("{upper} * {lower}")));
        }
    }
    Ok(())
}

/// Checks that every code we chose is the nearest one to its weight, and every scale what the rule says.
pub fn nearest(name: &str, floats: &Floats, s: IntShape, view: &TensorView) -> Result<Verified, ConvertError> {
    check_scheme(name, view, s.scheme(), s.n, s.k)?;
    let at = Shape::new(s.n, s.k, s.bits, s.group);
    let mid = s.mid() as i32;
    each_panel(s.n, |rows| {
        let mut weights = vec![];
        for row in rows {
            for g in 0..s.groups() {
                let cols = g * s.group..s.k.min((g + 1) * s.group);
                floats.decode(row, cols.clone(), &mut weights);
                let scale = s.scale.read(view.scales, at.cell(row, g));
                let expected = rtn::scale_of(&s, rtn::extreme(&weights));
                if expected.to_bits() != scale.to_bits() {
                    return Err(differ(name, format!("scale [{row}, {g}]"), expected, scale));
                }
                for (col, weight) in cols.zip(&weights) {
                    let code = at.code(view.codes, row, col);
                    let steps = weight / scale;
                    let off = steps - (code as i32 - mid) as f32;
                    let beyond = code as i32 == 2 * mid - 1 && off > 0.0 || code == 0 && off < 0.0;
                    let right = if scale == 0.0 { code as i32 == mid } else { off.abs() <= 0.500001 || beyond };
                    if !right {
                        return Err(differ(
                            name,
                            format!("code [{row}, {col}]"),
                            format!("{steps} steps"),
                            code as i32 - mid,
                        ));
                    }
                }
            }
        }
        Ok(())
    })?;
    Ok(Verified { nearest: (s.n * s.k) as u64, ..Verified::default() })
}

/// Compares every element of a float tensor, kept or rounded to f16.
pub fn floats(name: &str, source: &Floats, stored: FloatType, view: &TensorView) -> Result<Verified, ConvertError> {
    check_scheme(name, view, Scheme::Float(stored), source.n, source.k)?;
    let size = stored.size();
    each_panel(source.n, |rows| {
        for row in rows {
            let got = &view.codes[row * source.k * size..][..source.k * size];
            if stored == source.kind && source.arrange.cols.is_none() && *got == *source.row(row) {
                continue;
            }
            for col in 0..source.k {
                let (expected, got) = (source.at(row, col), stored.read(got, col));
                let expected = if stored == source.kind { expected } else { f16::from_f32(expected).to_f32() };
                if expected.to_bits() != got.to_bits() {
                    return Err(differ(name, format!("element [{row}, {col}]"), expected, got));
                }
            }
        }
        Ok(())
    })?;
    let count = (source.n * source.k) as u64;
    Ok(if stored == source.kind {
        Verified { floats: count, ..Verified::default() }
    } else {
        Verified { rounded: count, ..Verified::default() }
    })
}

/// Compares a vector with one plus each element of its source, added in f64 and rounded once.
pub fn one_plus(name: &str, source: &Floats, view: &TensorView) -> Result<Verified, ConvertError> {
    check_scheme(name, view, Scheme::Float(FloatType::F32), 1, source.n * source.k)?;
    for i in 0..view.k {
        let (row, col) = (i / source.k, i % source.k);
        let (expected, got) = (1.0 + source.at(row, col) as f64, view.at(0, i));
        if (expected as f32).to_bits() != got.to_bits() {
            return Err(differ(name, format!("element [{i}]"), expected, got));
        }
    }
    Ok(Verified { floats: view.k as u64, ..Verified::default() })
}

fn each_panel(n: usize, check: impl Fn(Range<usize>) -> Result<(), ConvertError> + Sync) -> Result<(), ConvertError> {
    (0..n.div_ceil(PANEL)).into_par_iter().try_for_each(|p| check(p * PANEL..n.min((p + 1) * PANEL)))
}

fn check_scheme(name: &str, view: &TensorView, scheme: Scheme, n: usize, k: usize) -> Result<(), ConvertError> {
    // A vector is one row in the file, whatever it was in the source.
    if view.scheme != scheme || view.n * view.k != n * k {
        let expected = format!("{scheme} [{n}, {k}]");
        return Err(differ(
            name,
            "scheme and shape".into(),
            expected,
            format!("{} [{}, {}]", view.scheme, view.n, view.k),
        ));
    }
    Ok(())
}

fn differ(tensor: &str, what: String, expected: impl ToString, got: impl ToString) -> ConvertError {
    ConvertError::Verify { tensor: tensor.into(), what, expected: expected.to_string(), got: got.to_string() }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use quern_models::Generation;

    use super::*;
    use crate::{
        import::{
            config::Hint,
            gptq::{Convention, Gptq, Pattern},
        },
        pack,
        source::{Checkpoint, Dtype, RawTensor, Rows},
    };

    /// Verifies a symmetric `[40, 32]` GPTQ tensor with these zero-points, whatever their pattern really is.
    fn symmetric(zeros: &[u32], pattern: Pattern) -> Result<Verified, String> {
        let (codes, scales) = (vec![0x5a; 4 * 40 * 4], f16::ONE.to_le_bytes().repeat(40));
        let zeros: Vec<u8> = zeros.iter().flat_map(|w| w.to_le_bytes()).collect();
        let raw = |dtype, shape: [usize; 2], bytes| {
            let shape = shape.map(|d| d as u64).to_vec();
            RawTensor { dtype, shape, bytes, rows: Rows::InOrder }
        };
        let tensors = [
            ("qweight", raw(Dtype::I32, [4, 40], &codes[..])),
            ("scales", raw(Dtype::Float(FloatType::F16), [1, 40], &scales)),
            ("qzeros", raw(Dtype::I32, [1, zeros.len() / 4], &zeros)),
        ];
        let source = Checkpoint {
            name: "made".into(),
            tensors: tensors.into_iter().map(|(part, raw)| (format!("m.{part}"), raw)).collect::<BTreeMap<_, _>>(),
            config: serde_json::Value::Null,
            quant_config: None,
            tokenizer: None,
            chat_template: None,
            generation: Generation::default(),
            licence: None,
            model: None,
            gguf: false,
            notes: vec![],
        };
        let mut tensor = Gptq::new(&source, "m", 40, 32, &Hint::default()).map_err(|e| e.to_string())?;
        tensor.set_convention("m", Convention::Mid, pattern).map_err(|e| e.to_string())?;
        let bytes = pack(&tensor);
        let view = TensorView::new(40, 32, tensor.shape().scheme(), &bytes).unwrap();
        integers("t", &tensor, &view).map_err(|e| e.to_string())
    }

    #[test]
    fn zero_points_that_the_file_implies_are_read_in_the_source() {
        for (word, pattern) in [(0x7777_7777, Pattern::Low), (0x8888_8888, Pattern::Mid)] {
            let verified = symmetric(&[word; 5], pattern).unwrap();
            assert_eq!((verified.codes, verified.zeros), (40 * 32, 0));
            symmetric(&[word; 4], pattern).unwrap();
            for row in 0..40 {
                let mut zeros = [word; 5];
                zeros[row / 8] ^= 1 << (row % 8 * 4);
                let text = symmetric(&zeros, pattern).unwrap_err();
                assert!(text.contains(&format!("zero-point [{row}, 0]")), "{text}");
            }
        }
    }
}
