//! `d2t`: the model's token of each of a head's own, as EAGLE-3 heads store it.
//!
//! Token `i` of the head is token `i + d2t[i]` of the model; some files have the model's token itself. Which it is, the
//! values say: both readings must be tokens of the model, each once; where both are, `t2d` decides (a flag for each
//! token of the model: whether the head has it), and without it they are distances, as they are meant to be.

use crate::{
    ConvertError,
    source::{Dtype, RawTensor},
};

/// The model's tokens of `n` of a head, of `known` that there are.
pub fn read(
    name: &str,
    raw: &RawTensor,
    n: usize,
    known: usize,
    t2d: Option<&RawTensor>,
) -> Result<Vec<u32>, ConvertError> {
    if raw.shape != [n as u64] {
        return Err(ConvertError::tensor(name, "shape", format!("[{n}], as lm_head"), format!("{:?}", raw.shape)));
    }
    let given: Vec<i64> = match raw.dtype {
        Dtype::I64 => raw.bytes.as_chunks().0.iter().map(|&b| i64::from_le_bytes(b)).collect(),
        Dtype::I32 => raw.bytes.as_chunks().0.iter().map(|&b| i32::from_le_bytes(b).into()).collect(),
        other => return Err(ConvertError::tensor(name, "type", "i64 or i32", other.name())),
    };
    let distances: Vec<i64> = given.iter().zip(0..).map(|(d, i)| d.saturating_add(i)).collect();
    let flags = t2d.filter(|raw| raw.shape == [known as u64] && raw.bytes.len() == known);
    let flagged = |ids: &[u32]| {
        let had = |flags: &RawTensor| flags.bytes.iter().filter(|&&flag| flag != 0).count();
        flags.is_some_and(|flags| had(flags) == n && ids.iter().all(|&id| flags.bytes[id as usize] != 0))
    };
    match (tokens(&distances, known), tokens(&given, known)) {
        (Ok(as_distances), Ok(as_given)) if flagged(&as_given) && !flagged(&as_distances) => Ok(as_given),
        (Ok(ids), _) | (Err(_), Ok(ids)) => Ok(ids),
        (Err((i, why)), Err(_)) => {
            let expected = format!("distances to tokens of the model, each once, of {known}");
            let got = format!("{} at {i}, which is token {} of the model{why}", given[i], distances[i]);
            Err(ConvertError::tensor(name, "values", expected, got))
        }
    }
}

/// The tokens, if each is one of the model's and comes once; else the first that does not, and why.
fn tokens(ids: &[i64], known: usize) -> Result<Vec<u32>, (usize, &'static str)> {
    let mut seen = vec![false; known];
    let token = |(i, &id): (usize, &i64)| {
        let at = usize::try_from(id).ok().filter(|&id| id < known).ok_or((i, ""))?;
        match std::mem::replace(&mut seen[at], true) {
            true => Err((i, " once more")),
            false => Ok(at as u32),
        }
    };
    ids.iter().enumerate().map(token).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Rows;

    fn of(d2t: &[i64], known: usize, t2d: Option<&[u8]>) -> Result<Vec<u32>, String> {
        let bytes: Vec<u8> = d2t.iter().flat_map(|d| d.to_le_bytes()).collect();
        let raw = |dtype, n: usize, bytes| RawTensor { dtype, shape: vec![n as u64], bytes, rows: Rows::InOrder };
        let t2d = t2d.map(|flags| raw(Dtype::Other("BOOL", 8), flags.len(), flags));
        read("d2t", &raw(Dtype::I64, d2t.len(), &bytes), d2t.len(), known, t2d.as_ref()).map_err(|e| e.to_string())
    }

    #[test]
    fn distances_and_tokens_are_told_apart() {
        // 0, 1, 4, 9 as distances.
        assert_eq!(of(&[0, 0, 2, 6], 10, None), Ok(vec![0, 1, 4, 9]));
        // 0, 3, 7, 9 as they are: the last would be token 12.
        assert_eq!(of(&[0, 3, 7, 9], 10, None), Ok(vec![0, 3, 7, 9]));
        // Both are possible: the flags decide, and without them it is distances.
        assert_eq!(of(&[0, 1, 3], 10, None), Ok(vec![0, 2, 5]));
        assert_eq!(of(&[0, 1, 3], 10, Some(&[1, 1, 0, 1, 0, 0, 0, 0, 0, 0])), Ok(vec![0, 1, 3]));
        assert_eq!(of(&[0, 1, 3], 10, Some(&[1, 0, 1, 0, 0, 1, 0, 0, 0, 0])), Ok(vec![0, 2, 5]));
        // Flags of another vocabulary say nothing.
        assert_eq!(of(&[0, 1, 3], 10, Some(&[1, 1, 0, 1])), Ok(vec![0, 2, 5]));
        // Not in order.
        assert_eq!(of(&[3, -1, 0], 4, None), Ok(vec![3, 0, 2]));
    }

    #[test]
    fn what_is_no_token_is_named() {
        let text = of(&[0, 20, -9], 10, None).unwrap_err();
        assert!(text.contains("20 at 1, which is token 21 of the model"), "{text}");
        let text = of(&[0, -1, 30], 10, None).unwrap_err();
        assert!(text.contains("-1 at 1, which is token 0 of the model once more"), "{text}");
        of(&[i64::MAX, i64::MAX, i64::MIN], 10, None).unwrap_err();
    }
}
