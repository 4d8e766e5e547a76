//! Text to tokens and back: tokenizer, streaming detokenizer, stop strings, chat templates.
//!
//! Nothing here knows the engine.

mod bpe;
pub mod model;
pub mod stream;
pub mod template;
pub mod tokenizer;

pub use model::{Ending, PromptError, TextModel};
pub use stream::{StopStrings, TextStream, Utf8Stream};
pub(crate) use template::Date;
pub use template::{ChatTemplate, Message, TemplateError};
pub use tokenizer::{Tokenizer, TokenizerError};

/// Text of a file as it may be shown in a terminal: control characters are written out.
pub(crate) fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c.is_control() {
            true => out.extend(c.escape_default()),
            false => out.push(c),
        }
    }
    out
}
