//! Text to tokens and back: tokenizer, streaming detokenizer, stop strings, chat templates.
//!
//! Nothing here knows the engine.

pub mod model;
pub mod stream;
pub mod template;
pub mod tokenizer;

pub use model::{PromptError, TextModel};
pub use stream::{StopStrings, TextStream, Utf8Stream};
pub use template::{ChatTemplate, Message, TemplateError};
pub use tokenizer::{Tokenizer, TokenizerError};
