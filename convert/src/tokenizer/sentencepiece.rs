//! SentencePiece's `tokenizer.model`: a protocol buffer (sentencepiece_model.proto, ModelProto).
//!
//! Total on any bytes: lengths are checked against the bytes left, pieces borrow from the file, and
//! fields that are not needed are stepped over.

use crate::Malformed;

/// What a model file says, as far as it decides the ids of a text.
#[derive(Debug, Clone, PartialEq)]
pub struct Model<'a> {
    /// The place in the list is the id.
    pub pieces: Vec<Piece<'a>>,
    /// How a text is cut.
    pub algorithm: Algorithm,
    /// A character without a piece becomes its bytes.
    pub byte_fallback: bool,
    /// Id of the token that begins a text.
    pub bos: Option<u32>,
    /// Id of the token that ends a text.
    pub eos: Option<u32>,
    /// What is done with a text first.
    pub normalizer: Normalizer<'a>,
}

/// An entry of the vocabulary.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Piece<'a> {
    /// Text, with `▁` for a space.
    pub text: &'a str,
    /// Log probability, or for byte pairs minus the rank.
    pub score: f32,
    /// What it is for.
    pub kind: Kind,
}

/// What a piece is for. The numbers are the format's, and those of a GGUF's `token_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Part of a text (1).
    Normal,
    /// Stands for characters that have no piece (2).
    Unknown,
    /// Says something about the text, is never part of it (3).
    Control,
    /// Always kept whole (4).
    UserDefined,
    /// Never given (5).
    Unused,
    /// A byte, `<0x0A>` (6).
    Byte,
}

impl Kind {
    /// The kind with a number; 0 is what some GGUF files write for normal pieces.
    pub fn of(number: u64) -> Option<Kind> {
        Some(match number {
            0 | 1 => Kind::Normal,
            2 => Kind::Unknown,
            3 => Kind::Control,
            4 => Kind::UserDefined,
            5 => Kind::Unused,
            6 => Kind::Byte,
            _ => return None,
        })
    }
}

/// How a text is cut into pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// The pieces with the largest sum of scores.
    Unigram,
    /// Merging from characters, the best scored pair first.
    Bpe,
}

/// What is done with a text first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Normalizer<'a> {
    /// Replacements of characters, compiled; empty: none.
    pub charsmap: &'a [u8],
    /// A space is put before the text.
    pub add_dummy_prefix: bool,
    /// Spaces at both ends are dropped, several become one.
    pub remove_extra_whitespaces: bool,
    /// A space is written as `▁`.
    pub escape_whitespaces: bool,
}

/// Reads a file's bytes.
pub fn parse(bytes: &[u8]) -> Result<Model<'_>, Malformed> {
    let mut pieces = vec![];
    let mut trainer = Trainer::default();
    let mut normalizer =
        Normalizer { charsmap: &[], add_dummy_prefix: true, remove_extra_whitespaces: true, escape_whitespaces: true };
    let mut fields = Fields { bytes, at: 0, what: "the SentencePiece model" };
    while let Some((number, value)) = fields.next()? {
        match (number, value) {
            (1, Field::Bytes(bytes)) => pieces.push(piece(bytes, pieces.len())?),
            (2, Field::Bytes(bytes)) => trainer.read(bytes)?,
            (3, Field::Bytes(bytes)) => normalizer.read(bytes)?,
            (1..=3, _) => {
                return Err(Malformed::field(format!("field {number} of the model"), "a message", "a number"));
            }
            _ => {}
        }
    }
    if pieces.is_empty() {
        return Err(Malformed::field("SentencePiece model: pieces", "at least one", "none"));
    }
    let unknown = pieces.iter().filter(|p| p.kind == Kind::Unknown).count();
    if unknown != 1 {
        return Err(Malformed::field("SentencePiece model: pieces of type unknown", "one", unknown));
    }
    let algorithm = match trainer.model_type {
        1 => Algorithm::Unigram,
        2 => Algorithm::Bpe,
        other => {
            let name =
                ["word", "char"].get((other as usize).wrapping_sub(3)).map_or(other.to_string(), |s| s.to_string());
            return Err(Malformed::Unsupported {
                what: format!("a SentencePiece model of type {name} (trainer_spec.model_type)"),
                next: "this version reads unigram and bpe; take a model with tokenizer.json".into(),
            });
        }
    };
    if trainer.space_at_end {
        return Err(Malformed::Unsupported {
            what: "a SentencePiece model with treat_whitespace_as_suffix".into(),
            next: "no tokenizer.json can say that; take a model with tokenizer.json".into(),
        });
    }
    let id = |id: i64| u32::try_from(id).ok().filter(|&id| (id as usize) < pieces.len());
    Ok(Model {
        algorithm,
        byte_fallback: trainer.byte_fallback,
        bos: id(trainer.bos),
        eos: id(trainer.eos),
        normalizer,
        pieces,
    })
}

fn piece(bytes: &[u8], id: usize) -> Result<Piece<'_>, Malformed> {
    let mut piece = Piece { text: "", score: 0.0, kind: Kind::Normal };
    let mut fields = Fields { bytes, at: 0, what: "a piece" };
    let wrong =
        |what: &str, expected: &str, got: String| Malformed::field(format!("piece {id}: {what}"), expected, got);
    while let Some((number, value)) = fields.next()? {
        match (number, value) {
            (1, Field::Bytes(text)) => {
                let shown = || format!("{:02x?}", &text[..text.len().min(16)]);
                piece.text = std::str::from_utf8(text).map_err(|_| wrong("text", "UTF-8", shown()))?;
            }
            (2, Field::Fixed32(bits)) => piece.score = f32::from_bits(bits),
            (3, Field::Number(kind)) => {
                piece.kind = Kind::of(kind).ok_or_else(|| wrong("type", "1 to 6", kind.to_string()))?;
            }
            (1..=3, other) => return Err(wrong(&format!("field {number}"), "its type", format!("{other:?}"))),
            _ => {}
        }
    }
    if piece.text.is_empty() {
        return Err(wrong("text", "some", "none".into()));
    }
    if !piece.score.is_finite() {
        return Err(wrong("score", "a finite number", piece.score.to_string()));
    }
    Ok(piece)
}

/// TrainerSpec; fields that are absent have the values of the .proto file.
struct Trainer {
    model_type: u64,
    byte_fallback: bool,
    space_at_end: bool,
    bos: i64,
    eos: i64,
}

impl Default for Trainer {
    fn default() -> Trainer {
        Trainer { model_type: 1, byte_fallback: false, space_at_end: false, bos: 1, eos: 2 }
    }
}

impl Trainer {
    fn read(&mut self, bytes: &[u8]) -> Result<(), Malformed> {
        let mut fields = Fields { bytes, at: 0, what: "trainer_spec" };
        while let Some((number, value)) = fields.next()? {
            let Field::Number(value) = value else { continue };
            match number {
                3 => self.model_type = value,
                24 => self.space_at_end = value != 0,
                35 => self.byte_fallback = value != 0,
                // int32: a negative one is written as 64 bits.
                41 => self.bos = value as i64,
                42 => self.eos = value as i64,
                _ => {}
            }
        }
        Ok(())
    }
}

impl<'a> Normalizer<'a> {
    fn read(&mut self, bytes: &'a [u8]) -> Result<(), Malformed> {
        let mut fields = Fields { bytes, at: 0, what: "normalizer_spec" };
        while let Some(field) = fields.next()? {
            match field {
                (2, Field::Bytes(map)) => self.charsmap = map,
                (3, Field::Number(value)) => self.add_dummy_prefix = value != 0,
                (4, Field::Number(value)) => self.remove_extra_whitespaces = value != 0,
                (5, Field::Number(value)) => self.escape_whitespaces = value != 0,
                _ => {}
            }
        }
        Ok(())
    }
}

/// A field's value on the wire.
#[derive(Debug, Clone, Copy)]
enum Field<'a> {
    Number(u64),
    Fixed64,
    Bytes(&'a [u8]),
    Fixed32(u32),
}

/// The fields of a message, one after the other.
struct Fields<'a> {
    bytes: &'a [u8],
    at: usize,
    /// The message, for errors.
    what: &'static str,
}

impl<'a> Fields<'a> {
    /// Number and value of the next field; `None` at the end.
    fn next(&mut self) -> Result<Option<(u64, Field<'a>)>, Malformed> {
        if self.at == self.bytes.len() {
            return Ok(None);
        }
        let key = self.varint()?;
        let value = match key & 7 {
            0 => Field::Number(self.varint()?),
            1 => {
                self.take(8)?;
                Field::Fixed64
            }
            2 => {
                let len = self.varint()?;
                Field::Bytes(self.take(len)?)
            }
            5 => {
                let b = self.take(4)?;
                Field::Fixed32(u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            }
            other => {
                let what = format!("{}: wire type at byte {}", self.what, self.at);
                return Err(Malformed::field(what, "0, 1, 2 or 5", other));
            }
        };
        Ok(Some((key >> 3, value)))
    }

    /// Seven bits a byte, least significant first; at most ten bytes.
    fn varint(&mut self) -> Result<u64, Malformed> {
        let mut number = 0u64;
        for place in 0..10 {
            let byte = self.take(1)?[0];
            number |= u64::from(byte & 0x7f).checked_shl(7 * place).unwrap_or(0);
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(Malformed::field(format!("{}: number before byte {}", self.what, self.at), "at most ten bytes", "more"))
    }

    fn take(&mut self, len: u64) -> Result<&'a [u8], Malformed> {
        let left = &self.bytes[self.at..];
        if len > left.len() as u64 {
            return Err(Malformed::Short { what: self.what.into(), needed: len, left: left.len() as u64 });
        }
        self.at += len as usize;
        Ok(&left[..len as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(number: u64, bytes: &[u8]) -> Vec<u8> {
        [&[(number << 3 | 2) as u8, bytes.len() as u8], bytes].concat()
    }

    fn piece(text: &str, score: f32, kind: u8) -> Vec<u8> {
        field(1, &[&field(1, text.as_bytes())[..], &[0x15], &score.to_le_bytes(), &[0x18, kind]].concat())
    }

    /// Three pieces, byte pairs, no end token, a character map of two bytes.
    fn model() -> Vec<u8> {
        let trainer = [&[0x18, 2][..], &[0xd0, 0x02], &[0xff; 9], &[1], &[0x98, 0x02, 1]].concat();
        let normalizer = [&field(2, &[7, 8])[..], &[0x20, 0]].concat();
        [
            piece("<unk>", 0.0, 2),
            piece("▁a", -1.5, 1),
            piece("<0x0A>", 0.0, 6),
            field(2, &trainer),
            field(3, &normalizer),
        ]
        .concat()
    }

    #[test]
    fn reads_what_decides_the_ids() {
        let bytes = model();
        let read = parse(&bytes).unwrap();
        let texts: Vec<_> = read.pieces.iter().map(|p| (p.text, p.score, p.kind)).collect();
        assert_eq!(texts, [("<unk>", 0.0, Kind::Unknown), ("▁a", -1.5, Kind::Normal), ("<0x0A>", 0.0, Kind::Byte)]);
        assert_eq!((read.algorithm, read.byte_fallback), (Algorithm::Bpe, true));
        assert_eq!((read.bos, read.eos), (Some(1), None));
        let normalizer = Normalizer {
            charsmap: &[7, 8],
            add_dummy_prefix: true,
            remove_extra_whitespaces: false,
            escape_whitespaces: true,
        };
        assert_eq!(read.normalizer, normalizer);
    }

    #[test]
    fn any_bytes_give_an_error_or_a_model_not_a_panic() {
        let bytes = model();
        for cut in 0..bytes.len() {
            let _ = parse(&bytes[..cut]);
        }
        for at in 0..bytes.len() {
            for value in 0..=255 {
                let mut bad = bytes.clone();
                bad[at] = value;
                let _ = parse(&bad);
            }
            // A giant length or number anywhere.
            let giant = [&bytes[..at], &[0xff; 9], &[1], &bytes[at..]].concat();
            let _ = parse(&giant);
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let cases = [
            (vec![], "pieces: expected at least one, got none"),
            (piece("a", 0.0, 1), "pieces of type unknown: expected one, got 0"),
            (piece("a", f32::NAN, 2), "piece 0: score: expected a finite number"),
            (piece("a", 0.0, 9), "piece 0: type: expected 1 to 6, got 9"),
            (field(1, &field(1, &[0xff])), "piece 0: text: expected UTF-8, got [ff]"),
            (field(1, &[0x15, 0, 0, 0, 0]), "piece 0: text: expected some, got none"),
            ([&model()[..], &field(2, &[0x18, 4])].concat(), "a SentencePiece model of type char"),
            ([&model()[..], &field(2, &[0xc0, 1, 1])].concat(), "treat_whitespace_as_suffix"),
            (vec![0x0b], "wire type at byte 1: expected 0, 1, 2 or 5, got 3"),
            (vec![0x0a, 5, 1], "needs 5 bytes, 1 are left"),
            (vec![0xff; 20], "expected at most ten bytes"),
        ];
        for (bytes, message) in cases {
            let text = parse(&bytes).unwrap_err().to_string();
            assert!(text.contains(message), "{text}");
        }
    }
}
