//! Which tokens of a text are scored, and with how much of the text before them.
//!
//! Perplexities of different protocols cannot be compared, so a protocol is named wherever a number is.
//! A position's logits predict the token after it: row `i` of a window is the prediction of token `i + 1`.

use std::fmt;

use clap::ValueEnum;

/// How a text is cut into windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// llama-perplexity's: windows without overlap that begin with BOS where the tokenizer adds it;
    /// only the second half of each is scored
    #[value(name = "llama.cpp")]
    LlamaCpp,
    /// That of transformers' documentation: windows that overlap, every token scored once
    Strided,
}

impl Kind {
    /// As flags and files name it.
    pub fn name(self) -> &'static str {
        match self {
            Kind::LlamaCpp => "llama.cpp",
            Kind::Strided => "strided",
        }
    }
}

/// A way to score a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Protocol {
    /// The rule.
    pub kind: Kind,
    /// Tokens of a window.
    pub context: usize,
    /// Tokens from the start of a window to the start of the next.
    pub stride: usize,
}

/// A part of the text that is computed on its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// First token.
    pub start: usize,
    /// Behind the last token.
    pub end: usize,
    /// First row that is scored, counted from `start`; the last is that of the token before the last.
    pub first: usize,
}

impl Window {
    /// Scored rows.
    pub fn rows(&self) -> usize {
        self.end - self.start - 1 - self.first
    }
}

impl Protocol {
    /// Refuses windows in which nothing can be scored; `stride` is for [`Kind::Strided`], by default half a window.
    pub fn new(kind: Kind, context: usize, stride: Option<usize>) -> Result<Protocol, String> {
        let least = match kind {
            Kind::LlamaCpp => 4,
            Kind::Strided => 2,
        };
        if context < least {
            return Err(format!("--context {context}: the {} protocol needs at least {least}", kind.name()));
        }
        let stride = match (kind, stride) {
            (Kind::LlamaCpp, Some(stride)) if stride != context => {
                return Err(format!("--stride {stride}: the llama.cpp protocol has none; give --protocol strided"));
            }
            (Kind::LlamaCpp, _) => context,
            (Kind::Strided, stride) => stride.unwrap_or(context / 2),
        };
        if stride == 0 || stride > context {
            return Err(format!("--stride {stride}: expected 1 to {context}, the tokens of a window"));
        }
        Ok(Protocol { kind, context, stride })
    }

    /// The windows of a text of so many tokens; none where it is too short.
    pub fn windows(&self, tokens: usize) -> Vec<Window> {
        let (context, stride) = (self.context, self.stride);
        let mut windows = vec![];
        match self.kind {
            // The last window is dropped unless it is full; rows context/2 .. context-2 are scored.
            Kind::LlamaCpp => {
                let window = |i| Window { start: i * context, end: (i + 1) * context, first: context / 2 };
                windows.extend((0..tokens / context).map(window));
            }
            // Each window scores what lies behind the window before it. Without overlap the first token of a
            // window has nothing before it and is not scored.
            Kind::Strided => {
                let (mut start, mut scored) = (0usize, 0);
                while scored < tokens {
                    let end = tokens.min(start.saturating_add(context));
                    windows.push(Window { start, end, first: scored.max(start + 1) - 1 - start });
                    (start, scored) = (start + stride, end);
                }
                windows.retain(|w| w.end - w.start > w.first + 1);
            }
        }
        windows
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let context = self.context;
        match self.kind {
            Kind::LlamaCpp => write!(f, "llama.cpp protocol: windows of {context} tokens, the second half scored"),
            Kind::Strided => write!(f, "strided protocol: windows of {context} tokens every {} tokens", self.stride),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn protocol(kind: Kind, context: usize, stride: Option<usize>) -> Protocol {
        Protocol::new(kind, context, stride).unwrap()
    }

    /// Absolute positions of the tokens that a protocol scores.
    fn scored(p: Protocol, tokens: usize) -> Vec<usize> {
        let of = |w: Window| (w.start + w.first + 1..w.end).collect::<Vec<_>>();
        p.windows(tokens).into_iter().flat_map(of).collect()
    }

    #[test]
    fn llama_cpp_scores_the_second_half() {
        let p = protocol(Kind::LlamaCpp, 8, None);
        assert_eq!(p.windows(7), []);
        assert_eq!(scored(p, 23), [5, 6, 7, 13, 14, 15]);
        assert!(p.windows(512).iter().all(|w| w.rows() == 3));
        assert_eq!(protocol(Kind::LlamaCpp, 512, None).windows(512)[0].rows(), 255);
    }

    #[test]
    fn strides_score_every_token_once() {
        for (context, stride, tokens) in [(8, 4, 30), (8, 4, 32), (8, 1, 9), (8, 7, 64), (5, 2, 3), (8, 4, 8)] {
            let p = protocol(Kind::Strided, context, Some(stride));
            assert_eq!(scored(p, tokens), (1..tokens).collect::<Vec<_>>(), "{p} {tokens}");
            assert!(p.windows(tokens).iter().all(|w| w.end - w.start <= context));
            let enough = |w: &Window| w.start == 0 || w.first + 1 >= context - stride;
            assert!(p.windows(tokens).iter().all(enough), "{p} {tokens}");
        }
        assert_eq!(protocol(Kind::Strided, 8, None).stride, 4);
        // Without overlap the first token of each window is lost, as in transformers' loss.
        assert_eq!(scored(protocol(Kind::Strided, 4, Some(4)), 9), [1, 2, 3, 5, 6, 7]);
        assert_eq!(protocol(Kind::Strided, 4, None).windows(1), []);
    }

    /// A text cut behind its last window has the same windows: saved logits rely on it.
    #[test]
    fn a_text_that_ends_with_a_window_has_the_same_windows() {
        for p in [protocol(Kind::LlamaCpp, 6, None), protocol(Kind::Strided, 6, Some(4))] {
            let all = p.windows(100);
            for n in 1..all.len() {
                assert_eq!(p.windows(all[n - 1].end), all[..n], "{p} {n}");
            }
        }
    }

    #[test]
    fn impossible_windows_are_refused() {
        for (kind, context, stride, part) in [
            (Kind::LlamaCpp, 3, None, "at least 4"),
            (Kind::Strided, 1, None, "at least 2"),
            (Kind::Strided, 8, Some(9), "1 to 8"),
            (Kind::Strided, 8, Some(0), "1 to 8"),
            (Kind::LlamaCpp, 8, Some(4), "--protocol strided"),
        ] {
            let error = Protocol::new(kind, context, stride).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}
