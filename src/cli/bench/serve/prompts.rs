//! Prompts of known length: random common words, each of them one token where the server can say so.

use serde_json::json;

use super::{ServeBenchArgs, client::Client};
use crate::random::Random;

const WORDS: &str = "\
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one \
you were all her she there would their we him been has when who will no more if out so up said what its about than \
into them can only other time new some could these two may first then do any like my now over such our man me even \
most made after also did many must before back see through way where get much go well your know should down work \
year because come people just say each those take day good how long make here own under think great state right \
still use place world life again part number water small point house large end three high every home off need last \
change night light hand side eye head find call school form line group set play move different turn help start \
country between page letter mother answer study learn plant food sun four keep children city earth story saw far";

/// Fewer would make prompts alike.
const FEWEST: usize = 32;

/// Makes prompts; the same for the same seed.
pub struct Prompts {
    words: Vec<&'static str>,
    exact: bool,
    shared: String,
    seed: u64,
}

impl Prompts {
    /// Asks the server which words are one token.
    pub async fn new(client: &Client, args: &ServeBenchArgs) -> Prompts {
        let mut words: Vec<&str> = WORDS.split_whitespace().collect();
        words.sort_unstable();
        words.dedup();
        let single = single(client, &words).await;
        let exact = single.len() >= FEWEST;
        if exact {
            words = single;
        }
        let mut prompts = Prompts { words, exact, shared: String::new(), seed: args.seed };
        prompts.shared = prompts.text(args.shared_prefix, &mut Random::stream(args.seed, u64::MAX));
        prompts
    }

    /// Whether lengths are exact.
    pub fn exact(&self) -> bool {
        self.exact
    }

    /// The prompt of one request: what all begin with, and `tokens` of its own.
    pub fn prompt(&self, request: u64, tokens: usize) -> String {
        self.shared.clone()
            + &self.text(tokens, &mut Random::stream(self.seed, request.wrapping_mul(2).wrapping_add(1)))
    }

    fn text(&self, tokens: usize, random: &mut Random) -> String {
        (0..tokens).map(|_| format!(" {}", self.words[random.below(self.words.len())])).collect()
    }
}

async fn single<'a>(client: &Client, words: &[&'a str]) -> Vec<&'a str> {
    let count = async |text: String| {
        let body = json!({"content": text, "add_special": false});
        let answer = client.json("POST", "/tokenize", Some(&body)).await.ok()?;
        Some(answer["tokens"].as_array()?.len())
    };
    let mut found = vec![];
    // Neighbours must not merge either, so each is counted between two others.
    let Some(base) = count(" time time".into()).await else { return found };
    for &word in words {
        match count(format!(" time {word} time")).await {
            Some(n) if n == base + 1 => found.push(word),
            Some(_) => {}
            None => return vec![],
        }
    }
    found
}
