//! From token bytes to text that may be shown: whole characters only, and nothing of a stop string.
//!
//! Both machines give the same text however their input is cut into pieces.

/// Joins bytes to characters.
///
/// Gives what `String::from_utf8_lossy` would give for all bytes at once: bytes that belong to no
/// character become U+FFFD as soon as that is certain, an unfinished character waits.
#[derive(Debug, Clone, Default)]
pub struct Utf8Stream {
    /// The beginning of a character: at most 3 bytes between calls.
    waiting: Vec<u8>,
}

impl Utf8Stream {
    /// Takes more bytes and returns the characters that are complete now.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.waiting.extend_from_slice(bytes);
        let mut text = String::new();
        let mut rest = &self.waiting[..];
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    text.push_str(std::str::from_utf8(valid).expect("valid up to here"));
                    rest = after;
                    let Some(invalid) = error.error_len() else { break };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &rest[invalid..];
                }
            }
        }
        self.waiting = rest.to_vec();
        text
    }

    /// No more bytes will come: an unfinished character becomes U+FFFD.
    pub fn finish(&mut self) -> &'static str {
        if std::mem::take(&mut self.waiting).is_empty() { "" } else { "\u{FFFD}" }
    }
}

/// Finds the first stop string in a text that comes in pieces.
///
/// First is the one that ends first; of those that end together, the longest.
#[derive(Debug, Clone, Default)]
pub struct StopStrings {
    stops: Vec<String>,
    /// Text that is, or may become, the beginning of a stop string.
    held: String,
}

impl StopStrings {
    /// Empty strings are left out: they would stop every text before it begins.
    pub fn new(stops: impl IntoIterator<Item = String>) -> StopStrings {
        StopStrings { stops: stops.into_iter().filter(|s| !s.is_empty()).collect(), held: String::new() }
    }

    /// Takes more text; returns what may be shown now and whether a stop string has appeared.
    ///
    /// After a stop nothing is held: neither the stop string nor what follows it is ever returned.
    pub fn push(&mut self, text: &str) -> (String, bool) {
        self.held.push_str(text);
        let found = self.stops.iter().filter_map(|stop| {
            let start = self.held.find(stop.as_str())?;
            Some((start + stop.len(), start))
        });
        if let Some((_, start)) = found.min() {
            let mut shown = std::mem::take(&mut self.held);
            shown.truncate(start);
            return (shown, true);
        }
        let rest = self.held.split_off(self.showable());
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// No more text will come: what was held is ordinary text.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Where the longest end of `held` that begins a stop string starts.
    fn showable(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(1) - 1;
        let earliest = self.held.len().saturating_sub(longest);
        let starts = self.held.char_indices().map(|(at, _)| at).filter(|&at| at >= earliest);
        let begins = |at: &usize| self.stops.iter().any(|stop| stop.starts_with(&self.held[*at..]));
        starts.into_iter().find(begins).unwrap_or(self.held.len())
    }
}

/// Token bytes in, text to show out.
#[derive(Debug, Clone, Default)]
pub struct TextStream {
    utf8: Utf8Stream,
    stops: StopStrings,
    strip_space: bool,
    stopped: bool,
    /// Characters that came, and those of them that were returned.
    came: usize,
    shown: usize,
}

impl TextStream {
    /// `strip_space`: drop one space at the very beginning, for tokenizers that put one there.
    pub fn new(stops: impl IntoIterator<Item = String>, strip_space: bool) -> TextStream {
        TextStream { stops: StopStrings::new(stops), strip_space, ..TextStream::default() }
    }

    /// Takes the bytes of a token and returns the text that may be shown now.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        let text = self.utf8.push(bytes);
        self.show(&text)
    }

    /// No more tokens will come; returns the rest of the text.
    pub fn finish(&mut self) -> String {
        let text = self.utf8.finish();
        let mut shown = self.show(text);
        let held = self.stops.finish();
        self.shown += held.chars().count();
        shown.push_str(&held);
        shown
    }

    /// Whole characters that have come so far, shown, held back or dropped: where the next token begins.
    pub fn came(&self) -> usize {
        self.came
    }

    /// Characters that were returned so far: the others are held back, or were dropped behind a stop.
    pub fn shown(&self) -> usize {
        self.shown
    }

    /// Whether a stop string has appeared; everything after it is dropped.
    pub fn stopped(&self) -> bool {
        self.stopped
    }

    fn show(&mut self, text: &str) -> String {
        if self.stopped || text.is_empty() {
            return String::new();
        }
        let text = match std::mem::take(&mut self.strip_space) {
            true => text.strip_prefix(' ').unwrap_or(text),
            false => text,
        };
        self.came += text.chars().count();
        let (shown, stopped) = self.stops.push(text);
        self.stopped = stopped;
        self.shown += shown.chars().count();
        shown
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    fn pieces<'a>(random: &mut Random, mut bytes: &'a [u8]) -> Vec<&'a [u8]> {
        let mut pieces = Vec::new();
        while !bytes.is_empty() {
            let (piece, rest) = bytes.split_at(random.below(bytes.len().min(6)) + 1);
            pieces.push(piece);
            bytes = rest;
        }
        pieces
    }

    #[test]
    fn bytes_in_any_pieces_give_the_lossy_text() {
        let mut random = Random::new(1);
        let interesting =
            [b'a', b' ', 0xC3, 0xA9, 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 0xC0, 0xED, 0xB0, 0xF4];
        for _ in 0..3000 {
            let bytes: Vec<u8> = (0..random.below(24)).map(|_| interesting[random.below(interesting.len())]).collect();
            let mut stream = Utf8Stream::default();
            let mut text = String::new();
            for piece in pieces(&mut random, &bytes) {
                text += &stream.push(piece);
                assert!(stream.waiting.len() <= 3);
            }
            text += stream.finish();
            assert_eq!(text, String::from_utf8_lossy(&bytes), "{bytes:?}");
        }
    }

    #[test]
    fn a_character_appears_when_it_is_complete_and_not_before() {
        let mut stream = Utf8Stream::default();
        let shown: Vec<String> = "é你😀!".bytes().map(|b| stream.push(&[b])).collect();
        assert_eq!(shown, ["", "é", "", "", "你", "", "", "", "😀", "!"]);
        assert_eq!(stream.finish(), "");
        // Certain at once: 0xFF begins no character, and 'a' ends one that was begun.
        assert_eq!(stream.push(&[0xFF]), "\u{FFFD}");
        assert_eq!(stream.push(&[0xE4, 0xBD]), "");
        assert_eq!(stream.push(b"a"), "\u{FFFD}a");
        assert_eq!(stream.push(&[0xE4, 0xBD]), "");
        assert_eq!(stream.finish(), "\u{FFFD}");
        assert_eq!(stream.finish(), "");
    }

    /// The slow definition: the first end, and of equal ends the longest.
    fn cut<'a>(text: &'a str, stops: &[String]) -> (&'a str, bool) {
        for end in (0..=text.len()).filter(|&end| text.is_char_boundary(end)) {
            let longest =
                stops.iter().filter(|s| !s.is_empty() && text[..end].ends_with(s.as_str())).map(String::len).max();
            if let Some(len) = longest {
                return (&text[..end - len], true);
            }
        }
        (text, false)
    }

    #[test]
    fn stops_are_found_in_any_pieces_and_never_shown() {
        let mut random = Random::new(2);
        let letters = ['a', 'b', 'c', 'é', '你'];
        let word = |random: &mut Random, limit: usize| -> String {
            (0..random.below(limit)).map(|_| letters[random.below(letters.len())]).collect()
        };
        let mut stopped = 0;
        for _ in 0..5000 {
            let text = word(&mut random, 30);
            let stops: Vec<String> = (0..random.below(4)).map(|_| word(&mut random, 5)).collect();
            let (expected, found) = cut(&text, &stops);
            let mut stream = TextStream::new(stops.clone(), false);
            let mut shown = String::new();
            for piece in pieces(&mut random, text.as_bytes()) {
                shown += &stream.push(piece);
                assert_eq!(stream.shown(), shown.chars().count());
                assert!(stream.came() >= stream.shown() && stream.came() <= text.chars().count());
                assert!(expected.starts_with(&shown), "{shown:?} of {text:?} with {stops:?}");
            }
            assert_eq!(stream.stopped(), found, "{text:?} with {stops:?}");
            shown += &stream.finish();
            assert_eq!(shown, expected, "{text:?} with {stops:?}");
            assert_eq!(stream.shown(), shown.chars().count());
            assert!(found || stream.came() == stream.shown());
            stopped += usize::from(found);
        }
        assert!((1000..4500).contains(&stopped), "{stopped}");
    }

    #[test]
    fn only_what_may_begin_a_stop_is_held_back() {
        let mut stops = StopStrings::new(["\n\nUser:".to_string(), "END".to_string()]);
        assert_eq!(stops.push("Hello\n"), ("Hello".to_string(), false));
        assert_eq!(stops.push("\nU"), (String::new(), false));
        assert_eq!(stops.push("nder E"), ("\n\nUnder ".to_string(), false));
        assert_eq!(stops.push("N"), (String::new(), false));
        assert_eq!(stops.push("D and more"), (String::new(), true));
        assert_eq!(stops.finish(), "");
    }

    #[test]
    fn without_stops_nothing_is_held() {
        let mut stream = TextStream::new(["".to_string()], false);
        assert_eq!(stream.push(b"abc"), "abc");
        assert!(!stream.stopped());
    }

    #[test]
    fn the_text_after_a_stop_is_dropped() {
        let mut stream = TextStream::new(["X".to_string()], false);
        assert_eq!(stream.push(b"a X b"), "a ");
        assert!(stream.stopped());
        assert_eq!(stream.push(b"more"), "");
        assert_eq!(stream.finish(), "");
    }

    #[test]
    fn one_leading_space_is_stripped_where_asked() {
        let mut stream = TextStream::new([], true);
        assert_eq!(stream.push(b""), "");
        assert_eq!(stream.push(b"  a"), " a");
        assert_eq!(stream.push(b" b"), " b");
        let mut stream = TextStream::new([], true);
        assert_eq!(stream.push(b"a b"), "a b");
    }
}
