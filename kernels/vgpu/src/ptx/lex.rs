//! Tokens of PTX text, each with its line.

use super::PtxError;

/// One token.
#[derive(Debug, Clone, PartialEq)]
pub enum Token<'t> {
    /// A name, directive, opcode or register: `.reg`, `ld.global.v4.u32`, `%tid.x`, `$L__BB0_1`.
    Word(&'t str),
    /// An integer, wrapped to 64 bits; no sign.
    Int(u64),
    /// `0f3F800000`.
    Single(u32),
    /// `0d3FF0000000000000`, or a decimal fraction.
    Double(u64),
    /// One character of punctuation.
    Mark(char),
    /// A quoted string, without its quotes.
    Text(&'t str),
}

/// All tokens of `text` with their lines, from 1.
pub fn tokens(text: &str) -> Result<Vec<(Token<'_>, u32)>, PtxError> {
    let bytes = text.as_bytes();
    let mut found = Vec::with_capacity(text.len() / 4);
    let (mut at, mut line) = (0, 1);
    while at < bytes.len() {
        let byte = bytes[at];
        let start = at;
        match byte {
            b'\n' => {
                line += 1;
                at += 1;
            }
            _ if byte.is_ascii_whitespace() => at += 1,
            b'/' if bytes[at..].starts_with(b"//") => {
                while at < bytes.len() && bytes[at] != b'\n' {
                    at += 1;
                }
            }
            b'/' if bytes[at..].starts_with(b"/*") => {
                let end = text[at..].find("*/").ok_or_else(|| PtxError::new(line, "a comment does not end"))?;
                line += text[at..at + end].matches('\n').count() as u32;
                at += end + 2;
            }
            b'"' => {
                let end = text[at + 1..].find('"').ok_or_else(|| PtxError::new(line, "a string does not end"))?;
                found.push((Token::Text(&text[at + 1..at + 1 + end]), line));
                at += end + 2;
            }
            b'0'..=b'9' => {
                while at < bytes.len() && (bytes[at].is_ascii_alphanumeric() || bytes[at] == b'.') {
                    at += 1;
                }
                let token = number(&text[start..at])
                    .ok_or_else(|| PtxError::new(line, format!("`{}` is not a number", &text[start..at])))?;
                found.push((token, line));
            }
            _ if word_byte(byte) => {
                while at < bytes.len() && (word_byte(bytes[at]) || bytes[at..].starts_with(b"::")) {
                    at += if bytes[at] == b':' { 2 } else { 1 };
                }
                found.push((Token::Word(&text[start..at]), line));
            }
            _ if byte.is_ascii() => {
                found.push((Token::Mark(byte as char), line));
                at += 1;
            }
            _ => return Err(PtxError::new(line, "a character that is not ASCII")),
        }
    }
    Ok(found)
}

fn word_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'%' | b'.')
}

fn number(text: &str) -> Option<Token<'static>> {
    if let Some(hex) = text.strip_prefix("0f").or_else(|| text.strip_prefix("0F")) {
        return u32::from_str_radix(hex, 16).ok().map(Token::Single);
    }
    if let Some(hex) = text.strip_prefix("0d").or_else(|| text.strip_prefix("0D")) {
        return u64::from_str_radix(hex, 16).ok().map(Token::Double);
    }
    let digits = text.trim_end_matches('U');
    let radix = |prefix: &str, radix| {
        let rest = digits.strip_prefix(prefix)?;
        u64::from_str_radix(rest, radix).ok().map(Token::Int)
    };
    if let Some(token) = radix("0x", 16).or_else(|| radix("0X", 16)).or_else(|| radix("0b", 2)) {
        return Some(token);
    }
    if digits.contains('.') {
        return digits.parse::<f64>().ok().map(|value| Token::Double(value.to_bits()));
    }
    digits.parse().ok().map(Token::Int)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(text: &str) -> Vec<Token<'_>> {
        tokens(text).unwrap().into_iter().map(|(token, _)| token).collect()
    }

    #[test]
    fn words_keep_their_dots_and_double_colons() {
        let got = plain("@%p1 ld.global.L1::no_allocate.L2::128B.v4.u32 {%r1,_}, [%rd1+-16];");
        let want = [
            Token::Mark('@'),
            Token::Word("%p1"),
            Token::Word("ld.global.L1::no_allocate.L2::128B.v4.u32"),
            Token::Mark('{'),
            Token::Word("%r1"),
            Token::Mark(','),
            Token::Word("_"),
            Token::Mark('}'),
            Token::Mark(','),
            Token::Mark('['),
            Token::Word("%rd1"),
            Token::Mark('+'),
            Token::Mark('-'),
            Token::Int(16),
            Token::Mark(']'),
            Token::Mark(';'),
        ];
        assert_eq!(got, want);
        assert_eq!(plain("$L__BB0_1: ret;")[..2], [Token::Word("$L__BB0_1"), Token::Mark(':')]);
    }

    #[test]
    fn numbers_in_every_spelling() {
        assert_eq!(
            plain("0f3F800000 0d3FF0000000000000 0x1fU 12 0b101 1.5"),
            [
                Token::Single(0x3f80_0000),
                Token::Double(0x3ff0_0000_0000_0000),
                Token::Int(31),
                Token::Int(12),
                Token::Int(5),
                Token::Double(1.5f64.to_bits())
            ]
        );
    }

    #[test]
    fn lines_are_counted_through_comments() {
        let got = tokens("// one\n/* two\nthree */ a\n\"b c\"").unwrap();
        assert_eq!(got, [(Token::Word("a"), 3), (Token::Text("b c"), 4)]);
        assert_eq!(tokens("a\n/* b").unwrap_err().line, 2);
        assert_eq!(tokens("a\n0x").unwrap_err().line, 2);
        assert!(tokens("\u{e9}").is_err());
    }
}
