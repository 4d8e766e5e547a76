//! `g_idx`: which group a column belongs to.
//!
//! It alone says in which order columns are; `desc_act` of the config does not (with `static_groups` they stay
//! where they are), but then the index must be there.

use crate::{
    ConvertError,
    source::{Dtype, RawTensor},
};

/// What an index says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Index {
    /// One group.
    One,
    /// Groups of so many columns, in order.
    Natural(usize),
    /// Groups of so many columns each, the last possibly of fewer, in any order: group of each column.
    Ordered(usize, Vec<u32>),
    /// Groups of different sizes: group of each column.
    Irregular(Vec<u32>),
}

impl Index {
    /// Group of a column.
    #[inline]
    pub fn group_of(&self, col: usize) -> usize {
        match self {
            Index::One => 0,
            Index::Natural(group) => col / group,
            Index::Ordered(_, index) | Index::Irregular(index) => index[col] as usize,
        }
    }

    /// Reads the index of `k` columns in `groups` groups.
    pub fn new(name: &str, raw: &RawTensor, k: usize, groups: usize) -> Result<Index, ConvertError> {
        if raw.dtype != Dtype::I32 || raw.shape != [k as u64] {
            let got = format!("{} {:?}", raw.dtype.name(), raw.shape);
            return Err(ConvertError::tensor(name, "type and shape", format!("i32 [{k}]"), got));
        }
        let mut index = Vec::with_capacity(k);
        for (col, b) in raw.bytes.chunks_exact(4).enumerate() {
            let stored = i32::from_le_bytes([b[0], b[1], b[2], b[3]]) as i64;
            // Some writers count groups from the end.
            let group = if stored < 0 { stored + groups as i64 } else { stored };
            if group < 0 || group >= groups as i64 {
                let got = format!("{stored} for column {col}; is the download damaged?");
                let expected = format!("0 to {}, as the scales have {groups}", groups - 1);
                return Err(ConvertError::tensor(name, "groups", expected, got));
            }
            index.push(group as u32);
        }
        if groups == 1 {
            return Ok(Index::One);
        }
        let mut sizes = vec![0; groups];
        index.iter().for_each(|&g| sizes[g as usize] += 1);
        if sizes[0] == k {
            let expected = format!("{groups} groups, as the scales have");
            let got = "zeros only; remove the tensor if the groups are in order";
            return Err(ConvertError::tensor(name, "groups", expected, got));
        }
        let (size, last) = (sizes[0], sizes[groups - 1]);
        if size == 0 || last == 0 || last > size || sizes[..groups - 1].iter().any(|&s| s != size) {
            return Ok(Index::Irregular(index));
        }
        let natural = index.iter().enumerate().all(|(col, &g)| g as usize == col / size);
        Ok(if natural { Index::Natural(size) } else { Index::Ordered(size, index) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Rows;

    #[test]
    fn an_index_says_what_its_groups_are() {
        let index = |g: &[i32], groups| {
            let bytes: Vec<u8> = g.iter().flat_map(|v| v.to_le_bytes()).collect();
            let shape = vec![g.len() as u64];
            let raw = RawTensor { dtype: Dtype::I32, shape, bytes: &bytes, rows: Rows::InOrder };
            Index::new("t.g_idx", &raw, g.len(), groups).map_err(|e| e.to_string())
        };
        assert_eq!(index(&[0, 0, 0, 1, 1], 2), Ok(Index::Natural(3)));
        assert_eq!(index(&[-2, -2, -1, -1], 2), Ok(Index::Natural(2)));
        assert_eq!(index(&[0, 1, 0, 1], 2), Ok(Index::Ordered(2, vec![0, 1, 0, 1])));
        assert_eq!(index(&[1, 1, 0, 0], 2), Ok(Index::Ordered(2, vec![1, 1, 0, 0])));
        assert_eq!(index(&[1, 0, 0, 0], 2), Ok(Index::Ordered(3, vec![1, 0, 0, 0])));
        assert_eq!(index(&[1, 0, 1, 1], 2), Ok(Index::Irregular(vec![1, 0, 1, 1])));
        assert_eq!(index(&[1, 1, 1, 1], 2), Ok(Index::Irregular(vec![1; 4])));
        assert_eq!(index(&[0, 0, 2, 2], 3), Ok(Index::Irregular(vec![0, 0, 2, 2])));
        assert_eq!(index(&[0, 0, 0, 0], 1), Ok(Index::One));
        assert!(index(&[0, 0, 0, 0], 2).unwrap_err().contains("zeros only"));
        let text = index(&[0, 0, 2, 1], 2).unwrap_err();
        assert!(text.contains("expected 0 to 1, as the scales have 2, got 2 for column 2"), "{text}");
        assert!(index(&[0, -3, 1, 1], 2).unwrap_err().contains("got -3 for column 1"));
        assert!(index(&[0, i32::MIN, 1, i32::MAX], 2).is_err());
    }
}
