//! What the stored zero-points of a GPTQ model mean: decided from all of them, because labels lie.

use super::Hint;
use crate::ConvertError;

/// What stored zero-points mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Convention {
    /// The middle code, whichever version wrote them; of a tensor, that none are stored.
    Mid,
    /// The zero itself (`gptq_v2`).
    Stored,
    /// One less than the zero, written by subtracting 0x11111111 from whole words with borrow (`gptq`).
    Less,
}

/// What the zero-points of one tensor look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    /// None stored.
    Absent,
    /// All one below the middle: symmetric, version 1.
    Low,
    /// All the middle: symmetric, version 2.
    Mid,
    /// Anything else: asymmetric.
    Mixed,
}

/// Decides what the zero-points of a whole model mean, from the values of all its tensors.
///
/// All fields 7 (127) is a symmetric file of version 1, all 8 (128) one of version 2, whatever the
/// label says; otherwise the model is asymmetric and only the label tells. Tensors that contradict
/// each other or the label are an error: guessing would shift every weight of some of them.
pub fn convention(patterns: &[(&str, Pattern)], hint: &Hint) -> Result<Convention, ConvertError> {
    let first = |p: Pattern| patterns.iter().find(|x| x.1 == p).map(|x| x.0);
    let conflict = |a: &str, what_a: &str, b: &str, what_b: &str| {
        let what = "zero-points";
        Err(ConvertError::tensor(&format!("{a}.qzeros"), what, format!("{what_b}, as {b} has"), what_a))
    };
    let (low, mid, mixed) = (first(Pattern::Low), first(Pattern::Mid), first(Pattern::Mixed));
    if let (Some(low), Some(mid)) = (low, mid) {
        return conflict(mid, "all the middle code (version 2)", low, "all one below the middle (version 1)");
    }
    let Some(mixed) = mixed else { return Ok(Convention::Mid) };
    if let Some(absent) = first(Pattern::Absent) {
        return conflict(absent, "none; is the download complete?", mixed, "stored ones that differ");
    }
    if hint.sym == Some(true) && !hint.per_module {
        let expected = format!("one value, as {} says sym", hint.file);
        return Err(ConvertError::tensor(&format!("{mixed}.qzeros"), "zero-points", expected, "different ones"));
    }
    match (hint.zeros_as_stored, low, mid) {
        (true, Some(low), _) => {
            conflict(low, "all one below the middle (version 1)", mixed, "values of a version 2 file")
        }
        (false, _, Some(mid)) => conflict(mid, "all the middle code (version 2)", mixed, "values of a version 1 file"),
        (true, ..) => Ok(Convention::Stored),
        (false, ..) => Ok(Convention::Less),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hint(label: &str) -> Hint {
        Hint::new("config.json", &serde_json::json!({"quant_method": "gptq", "checkpoint_format": label})).unwrap()
    }

    #[test]
    fn values_decide_before_labels() {
        use Pattern::*;
        let decide = |patterns: &[Pattern], label: &str| {
            let named: Vec<_> = patterns.iter().map(|&p| ("m", p)).collect();
            convention(&named, &hint(label)).map_err(|e| e.to_string())
        };
        assert_eq!(decide(&[Low, Low, Absent], "gptq"), Ok(Convention::Mid));
        assert_eq!(decide(&[Absent, Absent], "gptq"), Ok(Convention::Mid));
        assert!(decide(&[Mixed, Absent], "gptq").unwrap_err().contains("got none"));
        assert_eq!(decide(&[Mid, Mid], "gptq"), Ok(Convention::Mid)); // vllm#38966
        assert_eq!(decide(&[Low, Low], "gptq_v2"), Ok(Convention::Mid));
        assert_eq!(decide(&[Mixed, Low], "gptq"), Ok(Convention::Less));
        assert_eq!(decide(&[Mixed, Mid], "gptq_v2"), Ok(Convention::Stored));
        assert!(decide(&[Mid, Low], "gptq").unwrap_err().contains("version 1"));
        assert!(decide(&[Mixed, Low], "gptq_v2").is_err());
        assert!(decide(&[Mixed, Mid], "gptq").is_err());
        let named = [("a", Mixed), ("b", Absent), ("c", Low)];
        let text = convention(&named, &hint("gptq")).unwrap_err().to_string();
        assert!(text.contains("tensor b.qzeros: zero-points: expected stored ones that differ, as a has"), "{text}");
        let sym = Hint { sym: Some(true), ..hint("gptq") };
        assert!(convention(&[("m", Mixed)], &sym).unwrap_err().to_string().contains("sym"));
    }
}
