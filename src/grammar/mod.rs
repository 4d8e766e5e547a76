//! Grammars that answers must follow: JSON, JSON schemas, regular expressions, Lark grammars, choices.
//!
//! The `llguidance` crate computes which tokens may come next; here are its vocabulary, the limits that keep a
//! hostile grammar small, and what it would pass over in silence. Compiling takes milliseconds, for a hostile
//! grammar up to a second: call it where waiting is allowed, never on the engine's thread. One grammar is compiled
//! at a time, so that many hostile ones need no more memory than one.

mod schema;
mod vocabulary;

pub(crate) use schema::prepared;

use std::sync::{
    Arc, Mutex, OnceLock, PoisonError,
    atomic::{AtomicUsize, Ordering},
};
use std::time::{Duration, Instant};

use llguidance::{
    Matcher, ParserFactory,
    api::{ParserLimits, TopLevelGrammar},
    earley::SlicedBiasComputer,
    toktrie::InferenceCapabilities,
};
use serde_json::{Value, json};

use crate::{
    engine::{Constraint, Grammar, TokenSet},
    text::TextModel,
};

/// Why a grammar cannot be followed. The client can mend all but `Vocabulary`, and `Busy` by waiting.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum GrammarError {
    /// It cannot be read, asks for something that is not supported, or would be too expensive.
    #[error("{what} cannot be used: {reason}")]
    Invalid {
        /// `the JSON schema`, `the regular expression` ...
        what: &'static str,
        /// Bounded and printable.
        reason: String,
    },
    /// Too long to be looked at.
    #[error("{what} has {bytes} bytes, at most {most} are accepted")]
    Long {
        /// As above.
        what: &'static str,
        /// Its length.
        bytes: usize,
        /// The limit.
        most: usize,
    },
    /// Too many grammars wait to be compiled; later there may be room.
    #[error("{waiting} grammars wait to be compiled, at most {MOST_WAITING} may; try again in a second")]
    Busy {
        /// How many.
        waiting: usize,
    },
    /// The model's own tokens are the reason.
    #[error("this model cannot follow grammars: {0}")]
    Vocabulary(String),
}

/// Most bytes of a JSON schema (as compact text) and of all choices together.
pub const MOST_BYTES: usize = 256 << 10;

/// Most bytes of a Lark grammar. Expressions cost the square of their length: this one at worst 3 seconds.
pub const MOST_LARK: usize = 16 << 10;

/// Most bytes of a regular expression.
pub const MOST_EXPRESSION: usize = 4 << 10;

/// Grammars that may wait, each on a thread of its caller.
pub const MOST_WAITING: usize = 32;

/// Tokens that are tried on a new grammar.
const TRIED: usize = 8;

/// A token of everybody waits while a mask is computed; usually that is a quarter of a millisecond.
const SLOW: Duration = Duration::from_millis(20);

/// Most bytes of what is said about a grammar that cannot be used.
const MOST_REASON: usize = 400;

/// The library's recursion follows the grammar's; untouched stack costs nothing.
const STACK: usize = 512 << 20;

/// Makes constraints for one model. Cheap to clone; the vocabulary is prepared when the first grammar comes.
#[derive(Clone)]
pub struct GrammarFactory(Arc<Inner>);

struct Inner {
    text: Arc<TextModel>,
    vocab: usize,
    parsers: OnceLock<Result<ParserFactory, GrammarError>>,
    compiling: Mutex<()>,
    waiting: AtomicUsize,
}

impl std::fmt::Debug for GrammarFactory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarFactory").field("vocab", &self.0.vocab).finish_non_exhaustive()
    }
}

impl GrammarFactory {
    /// For a model that knows `vocab` tokens (rows of its head; the tokenizer may know fewer).
    pub fn new(text: Arc<TextModel>, vocab: usize) -> GrammarFactory {
        GrammarFactory(Arc::new(Inner {
            text,
            vocab,
            parsers: OnceLock::new(),
            compiling: Mutex::new(()),
            waiting: AtomicUsize::new(0),
        }))
    }

    /// Any JSON object.
    pub fn json_object(&self) -> Result<Constraint, GrammarError> {
        self.json_schema(&json!({ "type": "object" }))
    }

    /// JSON that fits a schema. Keywords that cannot be followed are refused; those that no draft knows are
    /// annotations, as the standard says. Properties come in the schema's order, and at most a line break with 32
    /// spaces stands between two parts, because small models would otherwise write spaces for ever.
    pub fn json_schema(&self, schema: &Value) -> Result<Constraint, GrammarError> {
        let schema = schema::prepared(schema)?;
        self.compile("the JSON schema", move || TopLevelGrammar::from_json_schema(schema))
    }

    /// Text that a regular expression (of Rust's `regex` crate, without look-around) matches from end to end.
    pub fn regex(&self, expression: &str) -> Result<Constraint, GrammarError> {
        let what = "the regular expression";
        short(what, expression.len(), MOST_EXPRESSION)?;
        let expression = expression.to_string();
        self.compile(what, move || TopLevelGrammar::from_regex(&expression))
    }

    /// Text of a grammar in llguidance's variant of Lark.
    pub fn lark(&self, grammar: &str) -> Result<Constraint, GrammarError> {
        let what = "the grammar";
        short(what, grammar.len(), MOST_LARK)?;
        if grammar.contains("::=") {
            let reason = "it looks like GBNF (`::=`), expected Lark: `start: \"yes\" | \"no\"`".into();
            return Err(GrammarError::Invalid { what, reason });
        }
        if grammar.trim().is_empty() {
            return Err(GrammarError::Invalid { what, reason: "it is empty, expected a `start` rule".into() });
        }
        let grammar = grammar.to_string();
        self.compile(what, move || TopLevelGrammar::from_lark(grammar))
    }

    /// One of these texts.
    pub fn choice<S: AsRef<str>>(&self, choices: &[S]) -> Result<Constraint, GrammarError> {
        let what = "the list of choices";
        short(what, choices.iter().map(|c| c.as_ref().len() + 1).sum(), MOST_BYTES)?;
        if choices.is_empty() || choices.iter().any(|c| c.as_ref().is_empty()) {
            return Err(GrammarError::Invalid { what, reason: "expected at least one text, and none empty".into() });
        }
        let texts: Vec<String> = choices.iter().map(|c| lark_string(c.as_ref())).collect();
        self.compile(what, move || {
            TopLevelGrammar::from_lark(format!("start: CHOICE\nCHOICE: {}", texts.join("\n | ")))
        })
    }

    /// The grammar of [`crate::tools`].
    pub(crate) fn tools(&self, grammar: &str) -> Result<Constraint, GrammarError> {
        let what = "the tools' JSON schemas";
        short(what, grammar.len(), 2 * MOST_BYTES)?;
        let grammar = grammar.to_string();
        self.compile(what, move || TopLevelGrammar::from_lark(grammar))
    }

    /// The text side of the model.
    pub fn text(&self) -> &TextModel {
        &self.0.text
    }

    fn compile(
        &self,
        what: &'static str,
        grammar: impl FnOnce() -> TopLevelGrammar + Send,
    ) -> Result<Constraint, GrammarError> {
        let inner = &*self.0;
        let waiting = Waiting::new(&inner.waiting)?;
        // Nothing is behind this lock that a panic could leave half done.
        let _one = inner.compiling.lock().unwrap_or_else(PoisonError::into_inner);
        drop(waiting);
        let work = || {
            let parsers = inner.parsers.get_or_init(|| parsers(&inner.text, inner.vocab));
            let parsers = parsers.as_ref().map_err(GrammarError::clone)?;
            let invalid = |e: String| GrammarError::Invalid { what, reason: reason(&e) };
            let parser = parsers.create_parser(grammar()).map_err(|e| invalid(format!("{e:#}")))?;
            let walk = Walk { matcher: Matcher::new(Ok(parser)) };
            walk.clone().try_out(inner.vocab).map_err(invalid)?;
            Ok(Constraint(Box::new(walk)))
        };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("grammar".into()).stack_size(STACK).spawn_scoped(scope, work);
            let failed = |reason: String| Err(GrammarError::Invalid { what, reason });
            match thread {
                Ok(thread) => thread.join().unwrap_or_else(|_| failed("its compiler gave up".into())),
                Err(e) => failed(format!("no thread to compile it: {e}")),
            }
        })
    }
}

/// A place among those who wait.
struct Waiting<'a>(&'a AtomicUsize);

impl Waiting<'_> {
    fn new(count: &AtomicUsize) -> Result<Waiting<'_>, GrammarError> {
        let waiting = count.fetch_add(1, Ordering::AcqRel);
        let place = Waiting(count);
        if waiting >= MOST_WAITING { Err(GrammarError::Busy { waiting }) } else { Ok(place) }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

fn parsers(text: &TextModel, vocab: usize) -> Result<ParserFactory, GrammarError> {
    let tokens = vocabulary::environment(text, vocab)?;
    let slices = SlicedBiasComputer::json_slices();
    let mut factory = ParserFactory::new(&tokens, InferenceCapabilities::default(), &slices)
        .map_err(|e| GrammarError::Vocabulary(reason(&e.to_string())))?;
    factory.quiet();
    *factory.limits_mut() = ParserLimits {
        max_grammar_size: 200_000,
        step_max_items: 20_000,
        // 1 to 2 kB each.
        max_lexer_states: 30_000,
        verbose_errors: false,
        ..ParserLimits::default()
    };
    Ok(factory)
}

/// What the library says, without its state and backtrace.
fn reason(text: &str) -> String {
    let text = text.split("\n<").next().unwrap_or_default().trim();
    let text = match text {
        "NoExtensionBias" => "no text fits it",
        text if text.starts_with("oneOf constraints") => "alternatives of `oneOf` may both fit; use `anyOf`",
        text => text,
    };
    let text = text.replace('\n', " ");
    let mut text = crate::text::printable(text.trim_start_matches("panic: "));
    if let Some((end, _)) = text.char_indices().find(|(at, _)| *at >= MOST_REASON) {
        text.truncate(end);
        text.push_str(" ...");
    }
    text
}

fn short(what: &'static str, bytes: usize, most: usize) -> Result<(), GrammarError> {
    if bytes > most { Err(GrammarError::Long { what, bytes, most }) } else { Ok(()) }
}

/// A text as a terminal of Lark: JSON's escapes are Lark's.
pub(crate) fn lark_string(text: &str) -> String {
    Value::from(text).to_string()
}

/// One answer on its way through a grammar.
#[derive(Clone)]
struct Walk {
    matcher: Matcher,
}

impl Walk {
    /// Some steps, so that a grammar that exceeds the limits soon is refused and not its answer cut.
    fn try_out(mut self, vocab: usize) -> Result<(), String> {
        let mut allowed = TokenSet::new(vocab);
        for _ in 0..TRIED {
            let took = self.time(&mut allowed)?;
            if took > SLOW {
                let (took, most) = (took.as_millis(), SLOW.as_millis());
                return Err(format!(
                    "it takes {took} ms to tell which token may come next, at most {most} are accepted"
                ));
            }
            let first = allowed.words().iter().enumerate().find(|(_, word)| **word != 0);
            match first {
                Some((i, word)) if !self.ended() => self.follow(i as u32 * 32 + word.trailing_zeros())?,
                _ => break,
            }
        }
        Ok(())
    }

    /// How long a mask takes: where that is long, the best of three, because the machine may be busy.
    fn time(&self, allowed: &mut TokenSet) -> Result<Duration, String> {
        let mut best = Duration::MAX;
        for _ in 0..3 {
            let mut copy = self.clone();
            allowed.clear();
            let begun = Instant::now();
            copy.allow(allowed)?;
            best = best.min(begun.elapsed());
            if best <= SLOW {
                break;
            }
        }
        Ok(best)
    }
}

impl Grammar for Walk {
    fn allow(&mut self, allowed: &mut TokenSet) -> Result<(), String> {
        let mask = self.matcher.compute_mask_or_eos().map_err(|e| reason(&e.to_string()))?;
        allowed.insert_words(mask.as_slice());
        Ok(())
    }

    /// The library knows forced bytes, too, but asking it binds the matcher to them, without any limit.
    fn one_way(&self, allowed: &TokenSet) -> Option<u32> {
        if let Some(token) = allowed.only() {
            return Some(token);
        }
        let env = self.matcher.tok_env().ok()?;
        let trie = env.tok_trie();
        let mut longest: (u32, &[u8]) = (0, &[]);
        for token in allowed.tokens() {
            let bytes = trie.token(token);
            if bytes.starts_with(longest.1) {
                longest = (token, bytes);
            } else if !longest.1.starts_with(bytes) {
                return None;
            }
        }
        (!longest.1.is_empty()).then_some(longest.0)
    }

    fn scout(&self) -> Box<dyn Grammar> {
        Box::new(Walk { matcher: self.matcher.deep_clone() })
    }

    fn follow(&mut self, token: u32) -> Result<(), String> {
        let env = self.matcher.tok_env().map_err(|e| reason(&e.to_string()))?;
        let end = env.tok_trie().eos_tokens().contains(&token);
        if self.matcher.is_stopped() {
            return if end { Ok(()) } else { Err("the answer is complete, nothing may follow".into()) };
        }
        if end && !self.matcher.is_accepting().map_err(|e| reason(&e.to_string()))? {
            return Err("the answer may not end here".into());
        }
        self.matcher.consume_token(token).map_err(|e| reason(&e.to_string()))
    }

    fn ended(&self) -> bool {
        self.matcher.is_stopped()
    }

    fn boxed_clone(&self) -> Box<dyn Grammar> {
        Box::new(self.clone())
    }
}

#[cfg(test)]
mod tests;
