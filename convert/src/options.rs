//! What the caller chooses, what it is told on the way, and what it gets in the end.

use std::{fmt, path::PathBuf};

/// How float tensors are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quant {
    /// In the source's type.
    Keep,
    /// As f16.
    F16,
    /// As 8-bit integers.
    Int8,
    /// As 4-bit integers.
    Int4,
}

/// Choices of a conversion.
#[derive(Debug, Clone)]
pub struct Options {
    /// For the weights of linear layers that are float in the source; integers are kept as they are.
    pub quant: Quant,
    /// Columns that share a scale when we quantize; 64 for int4 and 128 for int8 unless given.
    ///
    /// Where it does not divide a tensor's columns, the largest of 128, 64 and 32 below it that does
    /// is used, and if none does, the last group is partial.
    pub group: Option<usize>,
    /// For float embeddings and output head. Unless given: int8 when the whole model is quantized
    /// from float, f16 with [`Quant::F16`], else [`Quant::Keep`].
    pub lm_head: Option<Quant>,
    /// A checkpoint with a head to take instead of one that the source has.
    pub head: Option<PathBuf>,
    /// For the weights of a head. Unless given: [`Quant::Int4`] where `quant` is that, else [`Quant::Int8`]: what a head
    /// says changes no text, and one in floats costs more time than it saves.
    pub head_quant: Option<Quant>,
    /// Replace an existing output.
    pub force: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options { quant: Quant::Keep, group: None, lm_head: None, head: None, head_quant: None, force: false }
    }
}

impl Options {
    /// What a head's float weights become.
    pub(crate) fn of_head(&self) -> Quant {
        self.head_quant.unwrap_or(match self.quant {
            Quant::Int4 => Quant::Int4,
            Quant::Keep | Quant::F16 | Quant::Int8 => Quant::Int8,
        })
    }
}

/// The two passes over the tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Read from the source and written.
    Write,
    /// Compared with the source.
    Verify,
}

/// How far a pass has come.
#[derive(Debug, Clone)]
pub struct Step<'a> {
    /// Which pass.
    pub phase: Phase,
    /// Tensor just finished, by our name.
    pub tensor: &'a str,
    /// Tensors finished.
    pub tensors_done: usize,
    /// Tensors in all.
    pub tensors: usize,
    /// Bytes of the output finished in this pass.
    pub bytes_done: u64,
    /// Bytes of all tensors of the output.
    pub bytes: u64,
}

/// Told how a conversion goes.
pub trait Progress {
    /// Something the user should know; not an error.
    fn note(&mut self, text: &str);
    /// One more tensor is done.
    fn step(&mut self, step: &Step<'_>);
    /// Asked before every tensor: `true` ends the conversion, which then leaves nothing behind.
    fn cancelled(&self) -> bool {
        false
    }
}

/// Tells nobody.
impl Progress for () {
    fn note(&mut self, _: &str) {}
    fn step(&mut self, _: &Step<'_>) {}
}

/// What was written.
#[derive(Debug, Clone)]
pub struct Report {
    /// The file.
    pub path: PathBuf,
    /// `gptq`, `awq`, `gguf` or `float`.
    pub method: &'static str,
    /// Tensors by scheme, largest first.
    pub rows: Vec<Row>,
    /// Bytes of the file.
    pub file_bytes: u64,
    /// What was compared with the source.
    pub verified: Verified,
    /// Wall-clock time.
    pub seconds: f64,
    /// Of the head that is in the file, too.
    pub head: Option<Box<Report>>,
}

impl Report {
    /// Weights of all tensors.
    pub fn weights(&self) -> u64 {
        self.rows.iter().map(|r| r.weights).sum()
    }

    /// Bits of the whole file per weight.
    pub fn bits_per_weight(&self) -> f64 {
        self.file_bytes as f64 * 8.0 / self.weights().max(1) as f64
    }
}

/// The tensors of one scheme.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// The scheme as printed.
    pub scheme: String,
    /// Tensors.
    pub tensors: usize,
    /// Weights of these tensors.
    pub weights: u64,
    /// Bytes of these tensors.
    pub bytes: u64,
}

/// Elements of the written file that were compared with the source, one by one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Verified {
    /// Integer codes equal to the source's.
    pub codes: u64,
    /// Scales equal to the source's.
    pub scales: u64,
    /// Stored zero-points equal to the source's.
    pub zeros: u64,
    /// Minima equal to the source's.
    pub minima: u64,
    /// Float elements equal to the source's.
    pub floats: u64,
    /// Floats equal to what the source's codes mean.
    pub values: u64,
    /// Codes that we made, each the nearest to its float weight.
    pub nearest: u64,
    /// Elements rounded to f16, each the nearest to its float weight.
    pub rounded: u64,
}

impl std::ops::AddAssign for Verified {
    fn add_assign(&mut self, o: Verified) {
        self.codes += o.codes;
        self.scales += o.scales;
        self.zeros += o.zeros;
        self.minima += o.minima;
        self.floats += o.floats;
        self.values += o.values;
        self.nearest += o.nearest;
        self.rounded += o.rounded;
    }
}

impl fmt::Display for Verified {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut equal = vec![];
        if self.codes > 0 {
            equal.push(format!("{} codes", grouped(self.codes)));
            equal.push(format!("{} scales", grouped(self.scales)));
            equal.push(format!("{} zeros", grouped(self.zeros)));
        }
        if self.minima > 0 {
            equal.push(format!("{} minima", grouped(self.minima)));
        }
        if self.floats > 0 {
            equal.push(format!("{} floats", grouped(self.floats)));
        }
        let mut parts = vec![];
        if !equal.is_empty() {
            parts.push(format!("{} equal to the source", equal.join(", ")));
        }
        if self.values > 0 {
            parts.push(format!("{} f32 values equal to what the source's codes mean", grouped(self.values)));
        }
        for (count, what) in [(self.nearest, "codes"), (self.rounded, "f16 values")] {
            if count > 0 {
                parts.push(format!("{} {what} nearest to the source's floats", grouped(count)));
            }
        }
        write!(f, "verified: {}", parts.join("; "))
    }
}

/// `1234567` as `1,234,567`.
pub fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verified_line_reads_as_a_sentence() {
        let v = Verified { codes: 106_954_752, scales: 1_671_168, floats: 12, ..Verified::default() };
        let line = "verified: 106,954,752 codes, 1,671,168 scales, 0 zeros, 12 floats equal to the source";
        assert_eq!(v.to_string(), line);
        assert_eq!([0, 999, 1000, 1234567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
    }
}
