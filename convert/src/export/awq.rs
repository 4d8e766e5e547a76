//! AWQ tensors of a module in the `gemm` layout: the inverse of [`crate::import::awq`].

use quern_models::{FloatType, ZeroKind};
use serde_json::{Value, json};

use super::{items::Item, part::Part};
use crate::source::Dtype;

/// Row (of eight) that nibble `i` of a word holds.
const ROW_OF_NIBBLE: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// Why a tensor is no AWQ tensor; nothing if it can be one.
pub fn obstacle(item: &Item) -> Option<&'static str> {
    let Some(coded) = item.coded() else { return Some("AWQ holds integers with one scale per group") };
    if coded.bits != 4 {
        return Some("AWQ has 4 bits");
    }
    if coded.zero == ZeroKind::Min {
        return Some("AWQ holds integer zero-points, not minima");
    }
    if coded.scale != FloatType::F16 {
        return Some("AWQ has f16 scales");
    }
    if item.ordered() {
        return Some("AWQ has no order of columns (act-order)");
    }
    if !item.n.is_multiple_of(8) {
        return Some("AWQ packs eight rows into a word");
    }
    if coded.groups() > 1 && !item.k.is_multiple_of(coded.group) {
        return Some("AWQ has no partial groups");
    }
    None
}

/// The tensors of a module that [`obstacle`] finds nothing against.
pub fn parts<'a>(item: &'a Item<'a>) -> Vec<Part<'a>> {
    let coded = item.coded().expect("obstacle() found plain integers");
    let (n, k, groups) = (item.n, item.k, coded.groups());
    let name = |part: &str| format!("{}.{part}", item.module);
    let word = |rows: usize, nibble: &dyn Fn(usize) -> u8| {
        let nibbles = ROW_OF_NIBBLE.iter().enumerate();
        nibbles.fold(0u32, |word, (i, r)| word | (nibble(rows * 8 + r) as u32) << (4 * i))
    };
    vec![
        Part::new(name("qweight"), Dtype::I32, &[k, n / 8], n / 2, move |col, out| {
            for (rows, out) in out.chunks_exact_mut(4).enumerate() {
                out.copy_from_slice(&word(rows, &|row| coded.code(row, col)).to_le_bytes());
            }
            Ok(())
        }),
        Part::new(name("qzeros"), Dtype::I32, &[groups, n / 8], n / 2, move |group, out| {
            for (rows, out) in out.chunks_exact_mut(4).enumerate() {
                out.copy_from_slice(&word(rows, &|row| coded.zero(row, group)).to_le_bytes());
            }
            Ok(())
        }),
        Part::new(name("scales"), Dtype::Float(FloatType::F16), &[groups, n], n * 2, move |group, out| {
            let mut bytes = Vec::with_capacity(out.len());
            (0..n).for_each(|row| FloatType::F16.push(coded.scale(row, group), &mut bytes));
            out.copy_from_slice(&bytes);
            Ok(())
        }),
    ]
}

/// Columns of a group, -1 for whole rows; the tensor that has others than the rest is an error.
pub fn group<'a>(quantized: &[&'a Item<'a>]) -> Result<i64, (&'a Item<'a>, String)> {
    let own = |i: &Item| i.coded().map(|c| (c.groups() > 1).then_some(c.group)).unwrap_or_default();
    let Some(group) = quantized.iter().find_map(|i| own(i)) else { return Ok(-1) };
    let fits = |i: &Item| own(i).map_or(i.k <= group, |g| g == group);
    match quantized.iter().find(|i| !fits(i)) {
        None => Ok(group as i64),
        Some(i) => Err((i, format!("AWQ has one group for the whole model, which is {group} in others"))),
    }
}

/// What quantization_config says.
pub fn config(group: i64, floats: &[&Item], tools: &[Value]) -> Value {
    let kept: Vec<&str> = floats.iter().map(|i| i.module.as_str()).collect();
    json!({
        "bits": 4,
        "group_size": group,
        "zero_point": true,
        "quant_method": "awq",
        "version": "gemm",
        "checkpoint_format": "gemm",
        "format": "gemm",
        "desc_act": false,
        "lm_head": false,
        "pack_dtype": "int32",
        "modules_to_not_convert": if kept.is_empty() { Value::Null } else { json!(kept) },
        "meta": { "quantizer": tools },
    })
}
