//! The text side of one model: its tokenizer and template, and where its answers end.

use quern_models::ModelFile;
use serde_json::{Map, Value};

use super::{ChatTemplate, Message, TemplateError, TextStream, Tokenizer, TokenizerError};

/// Why a conversation or text could not become a prompt.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    /// Text and tokens.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The template.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// A conversation for a model that only continues text.
    #[error("the model has no chat template, so {what} cannot be used; give the prompt as plain text (--raw)")]
    NoTemplate {
        /// What needs a template.
        what: &'static str,
    },
    /// The template does not write the last message as it is.
    #[error("the chat template does not write the last message word for word, so it cannot be continued")]
    NotContinued,
    /// Nothing to answer.
    #[error("the prompt is empty, expected at least one token of text")]
    Empty,
}

/// How the text of a conversation ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// With what makes the model write the next message.
    Ask,
    /// With the last message.
    Nothing,
    /// Within the last message, so that the model goes on with it.
    Continue,
}

/// What turns text into prompts for a model, and its tokens into text.
#[derive(Debug)]
pub struct TextModel {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    stop_ids: Vec<u32>,
}

impl TextModel {
    /// `bos` and `eos` are the texts that the template sees; `stop_ids` end an answer.
    pub fn new(
        tokenizer_json: &[u8],
        template: Option<&str>,
        bos: Option<&str>,
        eos: Option<&str>,
        stop_ids: &[u32],
    ) -> Result<TextModel, PromptError> {
        let tokenizer = Tokenizer::from_json(tokenizer_json)?;
        let template = template.map(|source| ChatTemplate::new(source, bos, eos)).transpose()?;
        Ok(TextModel { tokenizer, template, stop_ids: stop_ids.to_vec() })
    }

    /// The text side of a file; `None` where it has no tokenizer.
    pub fn of(file: &ModelFile) -> Result<Option<TextModel>, PromptError> {
        let Some(json) = file.tokenizer_json() else { return Ok(None) };
        let g = file.generation();
        TextModel::new(json, file.chat_template(), g.bos_text.as_deref(), g.eos_text.as_deref(), &g.eos).map(Some)
    }

    /// The same model without its template: it continues text.
    pub fn raw(self) -> TextModel {
        TextModel { template: None, ..self }
    }

    /// Whether a word stands in the chat template, such as the name of a role.
    pub fn template_mentions(&self, word: &str) -> bool {
        self.template.as_ref().is_some_and(|template| template.mentions(word))
    }

    /// Whether the model answers conversations, rather than continuing text.
    pub fn chats(&self) -> bool {
        self.template.is_some()
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Tokens that end an answer.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// The prompt that asks for the next message of a conversation.
    pub fn conversation(
        &self,
        messages: &[Message],
        tools: Option<&Value>,
        extra: &Map<String, Value>,
    ) -> Result<Vec<u32>, PromptError> {
        self.rendered(&self.render(messages, tools, extra, Ending::Ask)?)
    }

    /// A conversation as the text of a prompt that ends as it is told to.
    pub fn render(
        &self,
        messages: &[Message],
        tools: Option<&Value>,
        extra: &Map<String, Value>,
        ending: Ending,
    ) -> Result<String, PromptError> {
        let template = self.template.as_ref().ok_or(PromptError::NoTemplate { what: "a conversation" })?;
        let mut text = template.render(messages, tools, ending == Ending::Ask, extra)?;
        if ending == Ending::Continue {
            // Templates close a message, and most trim it.
            let last = messages.last().and_then(Message::text).unwrap_or_default().trim_end();
            let start = text.rfind(last).filter(|_| !last.is_empty()).ok_or(PromptError::NotContinued)?;
            text.truncate(start + last.len());
        }
        Ok(text)
    }

    /// The prompt of a rendered conversation.
    pub fn rendered(&self, text: &str) -> Result<Vec<u32>, PromptError> {
        // The template writes BOS itself, where the model wants it.
        some(self.tokenizer.encode(text, true)?)
    }

    /// The prompt that continues a text, with BOS where the tokenizer adds it.
    pub fn continuation(&self, text: &str) -> Result<Vec<u32>, PromptError> {
        some(self.tokenizer.encode_with_bos(text)?)
    }

    /// The bytes that a generated token adds to the answer: none for control tokens.
    pub fn shown_bytes(&self, token: u32) -> Vec<u8> {
        match self.tokenizer.is_special(token) || self.stop_ids.contains(&token) {
            true => Vec::new(),
            // A token beyond the tokenizer's (a padding row of the model) has no text.
            false => self.tokenizer.token_bytes(token).unwrap_or_default(),
        }
    }

    /// A detokenizer for one answer.
    pub fn stream(&self, stops: &[String]) -> TextStream {
        // A text that is continued keeps its space; an answer of its own has none to begin with.
        TextStream::new(stops.iter().cloned(), self.chats() && self.tokenizer.strips_leading_space())
    }
}

fn some(prompt: Vec<u32>) -> Result<Vec<u32>, PromptError> {
    if prompt.is_empty() { Err(PromptError::Empty) } else { Ok(prompt) }
}
