//! GPTQ tensors of a module: the inverse of [`crate::import::gptq`].
//!
//! Codes are an LSB-first bitstream down each column of `qweight` and along each row of `qzeros`.
//! Version 1 stores zero-points less one: whole words minus 0x11111111 (0x55555555 for 2 bits,
//! 0x01010101 for 8), with borrow across fields, and field by field for 3 bits, as gptqmodel 7.7
//! (`convert_gptq_v2_to_v1_format_module`) writes and reads it.

use std::collections::BTreeMap;

use quern_models::{FloatType, ZeroKind};
use rayon::prelude::*;
use serde_json::{Map, Value, json};

use super::{
    items::{Coded, Item, Role},
    part::Part,
};
use crate::{ConvertError, source::Dtype};

/// How zero-points are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GptqFormat {
    /// Less one (`gptq`).
    V1,
    /// As they are (`gptq_v2`).
    V2,
}

impl GptqFormat {
    /// Name in configs.
    pub fn name(self) -> &'static str {
        match self {
            GptqFormat::V1 => "gptq",
            GptqFormat::V2 => "gptq_v2",
        }
    }
}

/// Why a tensor is no GPTQ tensor; nothing if it can be one.
pub fn obstacle(item: &Item) -> Option<&'static str> {
    match item.coded() {
        None => Some("GPTQ holds integers with one scale per group"),
        Some(c) if c.zero == ZeroKind::Min => Some("GPTQ holds integer zero-points, not minima"),
        Some(_) => None,
    }
}

/// The tensors of a module that [`obstacle`] finds nothing against.
pub fn parts<'a>(item: &'a Item<'a>, format: GptqFormat) -> Vec<Part<'a>> {
    let coded = item.coded().expect("obstacle() found plain integers");
    let (n, k, groups, bits) = (item.n, item.k, coded.groups(), bits(item, &coded) as usize);
    // A symmetric code of fewer bits lies in the middle of the file's range; see the import.
    let shift = if coded.zero == ZeroKind::Mid { (1u8 << (coded.bits - 1)) - (1 << (bits - 1)) } else { 0 };
    let name = |part: &str| format!("{}.{part}", item.module);
    let words = (n * bits).div_ceil(32);
    let scale = coded.scale;
    vec![
        Part::new(name("qweight"), Dtype::I32, &[(k * bits).div_ceil(32), n], n * 4, move |word, out| {
            for (row, out) in out.chunks_exact_mut(4).enumerate() {
                let packed = field_word(word, bits, k, |col| coded.code(row, col).wrapping_sub(shift));
                out.copy_from_slice(&packed.to_le_bytes());
            }
            Ok(())
        }),
        Part::new(name("qzeros"), Dtype::I32, &[groups, words], words * 4, move |group, out| {
            for (word, out) in out.chunks_exact_mut(4).enumerate() {
                let zero = |row: usize| coded.zero(row, group).wrapping_sub(shift);
                let packed = match (format, ones(bits)) {
                    (GptqFormat::V2, _) => field_word(word, bits, n, zero),
                    (GptqFormat::V1, Some(ones)) => field_word(word, bits, n, zero).wrapping_sub(ones),
                    (GptqFormat::V1, None) => field_word(word, bits, n, |row| zero(row).wrapping_sub(1)),
                };
                out.copy_from_slice(&packed.to_le_bytes());
            }
            Ok(())
        }),
        Part::new(name("scales"), Dtype::Float(scale), &[groups, n], n * scale.size(), move |group, out| {
            let mut bytes = Vec::with_capacity(out.len());
            (0..n).for_each(|row| scale.push(coded.scale(row, group), &mut bytes));
            out.copy_from_slice(&bytes);
            Ok(())
        }),
        Part::new(name("g_idx"), Dtype::I32, &[k], k * 4, move |_, out| {
            for (col, out) in out.chunks_exact_mut(4).enumerate() {
                out.copy_from_slice(&(coded.group_at(col) as u32).to_le_bytes());
            }
            Ok(())
        }),
    ]
}

/// Word `word` of a bitstream of `count` fields.
fn field_word(word: usize, bits: usize, count: usize, field: impl Fn(usize) -> u8) -> u32 {
    let (start, mask) = (word * 32, (1u32 << bits) - 1);
    let mut packed = 0;
    for i in start / bits..count.min((start + 32).div_ceil(bits)) {
        let value = field(i) as u32 & mask;
        // A field of 3 bits may begin in the word before.
        packed |= if i * bits < start { value >> (start - i * bits) } else { value << (i * bits - start) };
    }
    packed
}

/// One in every field of a word; `None` where fields straddle words.
fn ones(bits: usize) -> Option<u32> {
    match bits {
        2 => Some(0x5555_5555),
        4 => Some(0x1111_1111),
        8 => Some(0x0101_0101),
        _ => None,
    }
}

/// Bits of a code in the checkpoint: those of the source if the file has its codes and zero-points as they were.
///
/// The file has asymmetric ones of GPTQ unmoved, and those of compressed-tensors in the middle of its range. GPTQ would
/// read the latter unmoved from narrow fields, another file, so they stay as wide as they are.
fn bits(item: &Item, coded: &Coded) -> u8 {
    let Some(bits) = item.source_bits().filter(|_| coded.bits == 4) else { return coded.bits };
    let fits = |code: u8| code >> bits == 0;
    let row_fits = |row: usize| {
        (0..coded.groups()).all(|g| fits(coded.zero(row, g))) && (0..item.k).all(|col| fits(coded.code(row, col)))
    };
    if coded.zero == ZeroKind::Mid || (0..item.n).into_par_iter().all(row_fits) { bits } else { coded.bits }
}

/// What quantization_config says of the modules in `quantized` and, float though they are linear, in `floats`.
pub fn config(quantized: &[&Item], floats: &[&Item], format: GptqFormat, tools: &[Value]) -> Value {
    let own = |item: &'_ &Item| {
        let c = item.coded().expect("only plain integers become GPTQ tensors");
        (bits(item, &c), if c.groups() == 1 { -1 } else { c.group as i64 }, c.zero == ZeroKind::Mid)
    };
    let all: Vec<(u8, i64, bool)> = quantized.iter().map(own).collect();
    let bits = most(all.iter().map(|x| x.0)).unwrap_or(4);
    // One group is the whole row, whatever a model's group is.
    let group = most(all.iter().map(|x| x.1).filter(|&g| g > 0)).unwrap_or(-1);
    let mut dynamic = Map::new();
    for (item, &(own_bits, own_group, _)) in quantized.iter().zip(&all) {
        let mut change = Map::new();
        if own_bits != bits {
            change.insert("bits".into(), own_bits.into());
        }
        let whole = own_group < 0 && group as usize >= item.k;
        if own_group != group && !whole {
            change.insert("group_size".into(), own_group.into());
        }
        if !change.is_empty() {
            dynamic.insert(format!("+:{}", exactly(&item.module)), change.into());
        }
    }
    for item in floats {
        dynamic.insert(format!("-:{}", exactly(&item.module)), json!({}));
    }
    let mut config = json!({
        "bits": bits,
        "group_size": group,
        "desc_act": quantized.iter().any(|i| i.ordered()),
        "sym": all.iter().all(|x| x.2),
        "lm_head": quantized.iter().any(|i| i.role == Role::Head),
        "quant_method": "gptq",
        "checkpoint_format": format.name(),
        "format": format.name(),
        "pack_dtype": "int32",
        "meta": { "quantizer": tools },
    });
    if !dynamic.is_empty() {
        config["dynamic"] = dynamic.into();
    }
    config
}

/// A regular expression for one module's name.
fn exactly(module: &str) -> String {
    format!("^{}$", module.replace('.', "\\."))
}

/// The value that occurs most often, the first of them in a tie.
fn most<T: Ord + Copy>(values: impl Iterator<Item = T>) -> Option<T> {
    let mut counts = BTreeMap::new();
    values.for_each(|v| *counts.entry(v).or_insert(0usize) += 1);
    counts.into_iter().max_by_key(|&(value, count)| (count, std::cmp::Reverse(value))).map(|(value, _)| value)
}

/// What the user should know about scales that are no f16 numbers.
pub fn scale_note(quantized: &[&Item]) -> Option<String> {
    let other = |i: &&&Item| i.coded().is_some_and(|c| c.scale != FloatType::F16);
    let first = quantized.iter().find(other)?;
    let kind = first.coded()?.scale.name();
    let count = quantized.iter().filter(other).count();
    Some(format!(
        "{count} tensor(s), the first is {}, have scales that f16 cannot hold: written as {kind}, other tools may round them",
        first.module
    ))
}

/// An error for a tensor that cannot be exported as asked.
pub fn refuse(item: &Item, why: &str, next: &str) -> ConvertError {
    ConvertError::unsupported(format!("tensor {} is {}: {why}", item.module, item.scheme()), next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_a_bitstream() {
        let codes: Vec<u8> = (0..96).map(|i| (i * 5 + i / 7) as u8).collect();
        for bits in [2usize, 3, 4, 8] {
            let words: Vec<u32> = (0..(96 * bits) / 32).map(|w| field_word(w, bits, 96, |i| codes[i])).collect();
            for (i, code) in codes.iter().enumerate() {
                // Bit by bit, the definition.
                let bit = |b: usize| words[b / 32] >> (b % 32) & 1;
                let got = (0..bits).fold(0, |v, b| v | bit(i * bits + b) << b);
                assert_eq!(got, *code as u32 & ((1 << bits) - 1), "{bits} bits, field {i}");
            }
        }
        // 8 fields of 3 bits end within the first word.
        assert_eq!(field_word(0, 3, 8, |_| 7), 0xff_ffff);
    }

    #[test]
    fn the_commonest_value_is_the_models() {
        assert_eq!(most([4, 8, 4, 8, 8].into_iter()), Some(8));
        assert_eq!(most([8, 4].into_iter()), Some(4));
        assert_eq!(most(Vec::<u8>::new().into_iter()), None);
    }
}
