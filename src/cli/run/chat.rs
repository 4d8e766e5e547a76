//! A conversation in the terminal.
//!
//! The whole conversation is rendered again for every turn: templates may look back, and some
//! rewrite what was said before.

use std::io::Write;
use std::sync::atomic::Ordering;

use rustyline::error::ReadlineError;

use super::answer::{End, answer};
use super::{RunError, Session, note, show};
use crate::engine::Generator;
use crate::text::Message;

const HELP: &str = "\
/reset   forget the conversation (the system prompt stays)
/exit    leave (also Ctrl-D, or Ctrl-C twice)
/help    this list
A line that ends in \\ goes on in the next one. Ctrl-C ends an answer. A message that begins with / needs a space first.
";

/// What was typed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Typed {
    Line(String),
    /// Ctrl-C.
    Interrupt,
    /// Ctrl-D, or the end of input.
    End,
}

/// Where lines come from: a terminal, or a list in tests.
pub(super) trait Lines {
    fn read(&mut self, prompt: &str) -> Result<Typed, RunError>;
}

/// Lines typed at a terminal, with editing and a history that lasts as long as the program.
pub(super) struct Terminal(rustyline::DefaultEditor);

impl Terminal {
    pub fn new() -> Result<Terminal, RunError> {
        rustyline::DefaultEditor::new().map(Terminal).map_err(broken)
    }
}

impl Lines for Terminal {
    fn read(&mut self, prompt: &str) -> Result<Typed, RunError> {
        match self.0.readline(prompt) {
            Ok(line) => {
                self.0.add_history_entry(&line).map_err(broken)?;
                Ok(Typed::Line(line))
            }
            Err(ReadlineError::Interrupted) => Ok(Typed::Interrupt),
            Err(ReadlineError::Eof) => Ok(Typed::End),
            Err(error) => Err(broken(error)),
        }
    }
}

fn broken(error: ReadlineError) -> RunError {
    let source = match error {
        ReadlineError::Io(source) => source,
        other => std::io::Error::other(other),
    };
    RunError::Io { name: "terminal".to_string(), source }
}

/// Talks until the user leaves.
pub(super) fn run<G: Generator>(
    session: &mut Session<'_, G>,
    lines: &mut dyn Lines,
    out: &mut dyn Write,
) -> Result<(), RunError> {
    note(format_args!("[{} tokens of context; /help lists the commands]", session.engine.max_context()));
    let mut messages = opening(session);
    let mut load = Some(session.load);
    while let Some(text) = message(lines)? {
        match text.as_str() {
            "" => continue,
            "/exit" | "/quit" => break,
            "/help" => {
                show(out, HELP)?;
                continue;
            }
            "/reset" => {
                messages = opening(session);
                note("[forgotten]");
                continue;
            }
            // A space before the slash says that it is no command.
            command if command.starts_with('/') => {
                note(format_args!(
                    "[no command {command}; /help lists them, and a message that begins with / needs a space first]"
                ));
                continue;
            }
            _ => {}
        }
        messages.push(Message::new("user", text.trim()));
        let prompt = if session.text.chats() {
            session.text.conversation(&messages, None, &session.settings.template_args)
        } else {
            session.text.continuation(&text)
        };
        session.interrupted.store(false, Ordering::Relaxed);
        let answered =
            prompt.map_err(RunError::from).and_then(|prompt| answer(session, prompt, |piece| show(out, piece)));
        session.interrupted.store(false, Ordering::Relaxed);
        match answered {
            Ok(answer) => {
                show(out, if answer.text.ends_with('\n') { "" } else { "\n" })?;
                note(answer.summary(session, load.take()));
                if answer.end == End::Context {
                    note("[/reset begins a new conversation]");
                }
                // What an interrupted answer said was said: the next turn goes on from there.
                messages.push(Message::new("assistant", &answer.text));
            }
            Err(error @ (RunError::Prompt(_) | RunError::ContextFull { .. })) => {
                // The conversation goes on without what could not be answered.
                note(format_args!("[{error}]"));
                if matches!(error, RunError::ContextFull { .. }) {
                    note("[the message was not added; /reset begins a new conversation]");
                }
                messages.pop();
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn opening<G>(session: &Session<'_, G>) -> Vec<Message> {
    session.settings.system.iter().map(|system| Message::new("system", system)).collect()
}

/// The next message, over as many lines as end in a backslash; `None`: the user left.
fn message(lines: &mut dyn Lines) -> Result<Option<String>, RunError> {
    let mut text = String::new();
    let mut interrupts = 0;
    loop {
        match lines.read(if text.is_empty() { "> " } else { ". " })? {
            Typed::End => return Ok(None),
            Typed::Interrupt => {
                interrupts += 1;
                if interrupts > 1 {
                    return Ok(None);
                }
                text.clear();
                note("[Ctrl-C again, or /exit, to leave]");
            }
            Typed::Line(line) => match line.strip_suffix('\\') {
                Some(begun) => {
                    text.push_str(begun);
                    text.push('\n');
                    interrupts = 0;
                }
                None => {
                    text.push_str(&line);
                    return Ok(Some(text.trim_end().to_string()));
                }
            },
        }
    }
}
