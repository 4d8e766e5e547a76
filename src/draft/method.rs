//! What guesses, as users name it.

use std::{fmt, str::FromStr};

use quern_models::{ModelSpec, spec::Head};

use super::{MOST, MOST_NODES};

/// What guesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Method {
    /// Nothing.
    Off,
    /// Everything there is, whatever pays most.
    #[default]
    Auto,
    /// What followed the same tokens earlier in the same text (prompt lookup).
    Ngram,
    /// The same, and earlier answers to others.
    Suffix,
    /// What the grammar of the answer leaves no choice about.
    Grammar,
    /// What a small model would say.
    Draft,
    /// What a head of EAGLE-1 or 3 reads from the model's states.
    Eagle,
    /// The same of a head for multi-token prediction.
    Mtp,
    /// The same of Medusa's heads.
    Medusa,
    /// The same of a head that writes a block at once.
    Dflash,
}

impl Method {
    const ALL: [(&'static str, Method); 10] = [
        ("off", Method::Off),
        ("auto", Method::Auto),
        ("ngram", Method::Ngram),
        ("suffix", Method::Suffix),
        ("grammar", Method::Grammar),
        ("draft", Method::Draft),
        ("eagle", Method::Eagle),
        ("mtp", Method::Mtp),
        ("medusa", Method::Medusa),
        ("dflash", Method::Dflash),
    ];

    /// How users name it.
    pub fn name(self) -> &'static str {
        Method::ALL.iter().find(|(_, method)| *method == self).map_or("", |(name, _)| name)
    }

    /// The method of a head.
    pub fn of_head(head: &Head) -> Method {
        Method::ALL.iter().find(|(name, _)| *name == head.method()).map_or(Method::Draft, |(_, method)| *method)
    }

    /// The method of a file that guesses for a model: a small model, or a head.
    pub fn of(spec: &ModelSpec) -> Method {
        spec.draft_head.as_ref().map_or(Method::Draft, Method::of_head)
    }

    /// Whether it needs a file that guesses.
    pub fn needs_file(self) -> bool {
        matches!(self, Method::Draft | Method::Eagle | Method::Mtp | Method::Medusa | Method::Dflash)
    }

    /// Whether it guesses several tokens for one position: what says how sure it is of each.
    pub fn branches(self) -> bool {
        matches!(self, Method::Eagle | Method::Mtp | Method::Medusa | Method::Dflash)
    }

    /// Whether a file of the method `writer` may guess.
    pub fn allows(self, writer: Method) -> bool {
        self == Method::Auto || self == writer
    }
}

/// When a guess is right.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Accept {
    /// If it is the token that would have been chosen: the text is the same as without guesses.
    #[default]
    Exact,
    /// With the probability that leaves the distribution of the text as it is (Leviathan et al., Chen et al.): another
    /// text than without guesses, of the same quality.
    Rejection,
}

/// How an answer is guessed ahead: `METHOD`, `METHOD:K` or `METHOD:KxN`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Speculation {
    /// What guesses.
    pub method: Method,
    /// So many tokens, where there is a guess, whether or not they pay; `None`: as many as pay. Of a request beside others
    /// it is the most.
    pub fixed: Option<usize>,
    /// They are paths of a tree of so many guesses in all; `None`: one path, or whatever pays.
    pub tree: Option<usize>,
    /// When a guess is right.
    pub accept: Accept,
}

impl FromStr for Accept {
    type Err = String;

    fn from_str(text: &str) -> Result<Accept, String> {
        match text {
            "exact" => Ok(Accept::Exact),
            "rejection" => Ok(Accept::Rejection),
            _ => Err("expected exact or rejection".into()),
        }
    }
}

impl Speculation {
    /// What texts are understood.
    pub const EXPECTED: &str = "off, auto, ngram, suffix, grammar, draft, eagle, mtp, medusa or dflash, or one of them with a \
                                number of guesses from 1 to 16: ngram:4; of eagle, mtp, medusa and dflash also a tree of up to 63 guesses: \
                                eagle:4x16";

    /// No guesses.
    pub const OFF: Speculation = Speculation { method: Method::Off, fixed: None, tree: None, accept: Accept::Exact };
}

impl FromStr for Speculation {
    type Err = String;

    fn from_str(text: &str) -> Result<Speculation, String> {
        let (name, count) = match text.split_once(':') {
            Some((name, count)) => (name, Some(count)),
            None => (text, None),
        };
        let method = Method::ALL.iter().find(|(known, _)| *known == name).map(|(_, method)| *method);
        let wrong = || format!("expected {}", Speculation::EXPECTED);
        let number = |text: &str, from: usize, to: usize| {
            text.parse().ok().filter(|n| (from..=to).contains(n)).ok_or_else(wrong)
        };
        let method = method.ok_or_else(wrong)?;
        let (count, nodes) = match count.map(|count| (count, count.split_once('x'))) {
            Some((_, Some((count, nodes)))) => (Some(count), Some(nodes)),
            Some((count, None)) => (Some(count), None),
            None => (None, None),
        };
        let fixed = count.map(|count| number(count, 1, MOST)).transpose()?;
        // A path alone is no tree.
        let tree = nodes.map(|nodes| number(nodes, fixed.unwrap_or(0).max(2), MOST_NODES)).transpose()?;
        if method == Method::Off && fixed.is_some() {
            return Err(format!("{}; off takes no number", wrong()));
        }
        if tree.is_some() && !method.branches() {
            return Err(format!("{}; {name} has no trees", wrong()));
        }
        Ok(Speculation { method, fixed, tree, accept: Accept::Exact })
    }
}

impl fmt::Display for Speculation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.method.name();
        match (self.fixed, self.tree) {
            (Some(count), Some(nodes)) => write!(f, "{name}:{count}x{nodes}"),
            (Some(count), None) => write!(f, "{name}:{count}"),
            _ => f.write_str(name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_have_names() {
        assert!(Method::ALL.iter().all(|(name, _)| Speculation::EXPECTED.contains(name)));
        assert!(Speculation::EXPECTED.contains(&format!("to {MOST}")));
        for (name, method) in Method::ALL {
            let speculation: Speculation = name.parse().unwrap();
            assert_eq!(
                (speculation, speculation.to_string()),
                (Speculation { method, ..Speculation::OFF }, name.to_string())
            );
        }
        let four: Speculation = "ngram:4".parse().unwrap();
        assert_eq!((four.fixed, four.to_string().as_str()), (Some(4), "ngram:4"));
        let tree: Speculation = "eagle:4x16".parse().unwrap();
        assert_eq!((tree.fixed, tree.tree, tree.to_string().as_str()), (Some(4), Some(16), "eagle:4x16"));
        assert!(Speculation::EXPECTED.contains(&format!("up to {MOST_NODES}")));
        for bad in
            ["eagle:4x3", "eagle:1x1", "eagle:4x64", "eagle:x16", "eagle:4x", "ngram:4x16", "auto:4x16", "eagle:4x8x8"]
        {
            let error = bad.parse::<Speculation>().unwrap_err();
            assert!(error.starts_with("expected off, auto"), "{bad}: {error}");
        }
        for bad in ["", "Ngram", "ngram:", "ngram:0", "ngram:17", "ngram:-1", "ngram:4:4", "off:2", "Eagle", "\u{1b}"] {
            let error = bad.parse::<Speculation>().unwrap_err();
            assert!(error.starts_with("expected off, auto"), "{error}");
        }
    }
}
