//! One request in progress: what it wants of each step, and what it has got so far.

use std::time::{Duration, Instant};

use quern_kernels::{
    exec::{ChunkOutput, Output},
    sample::{
        Distribution, Draft, History, SampleError, Sampled, SamplingParams, logprobs, matching_path, rejection_path,
        sample_allowed,
    },
};

use super::{Failure, Finish, Grammar, Pooling, Request, Score, TokenSet, ahead::Ahead};
use crate::{
    draft::{Accept, Guess, Method},
    sched::Scheduled,
};

/// Masks of the guesses of a step usually take less; everybody waits for them.
const SLOW: Duration = Duration::from_millis(3);

/// So many times in a row they may take longer.
const PATIENCE: usize = 3;

/// A request in progress.
pub(super) struct Active {
    request: Request,
    /// Tokens generated.
    generated: usize,
    vocab: usize,
    /// What may come next, where there is a constraint.
    masks: Option<Masks>,
    ahead: Ahead,
    /// A copy of the constraint that follows the text, for guesses; made for the first.
    scout: Option<Box<dyn Grammar>>,
    /// So many times more, in a row, the masks of guesses may take long.
    patience: usize,
    /// Logprobs of the prompt so far, its first token left out.
    scores: Vec<Score>,
    scores_told: bool,
    /// Sum of the hidden states so far, and of how many.
    sum: (Vec<f64>, usize),
}

/// What may come next.
struct Masks {
    /// After the text, if that was asked.
    first: TokenSet,
    asked: bool,
    /// After some guesses.
    ahead: TokenSet,
    /// Of each row whose token is chosen in this step.
    words: Vec<u32>,
}

impl Masks {
    fn new(vocab: usize) -> Masks {
        let [first, ahead] = [TokenSet::new(vocab), TokenSet::new(vocab)];
        Masks { first, asked: false, ahead, words: vec![] }
    }
}

/// What a step gave a request.
pub(super) enum Got {
    /// The prompt goes on.
    Nothing,
    /// The prompt is done, and nothing else was wanted.
    PromptOnly,
    /// Its vector.
    Vector(Vec<f32>),
    /// The next tokens: right guesses, which are these of them, and one more, unless none could be chosen after them.
    Tokens { next: Vec<Sampled>, error: Option<SampleError>, path: Vec<usize> },
}

impl Active {
    pub fn new(request: Request, vocab: usize, ahead: Ahead) -> Active {
        let masks = request.constraint.is_some().then(|| Masks::new(vocab));
        Active {
            request,
            generated: 0,
            vocab,
            masks,
            ahead,
            scout: None,
            patience: PATIENCE,
            scores: vec![],
            scores_told: false,
            sum: (vec![], 0),
        }
    }

    /// Asks the constraint what may come after the text, once for each text.
    fn first(&mut self) -> Result<(), String> {
        if let (Some(constraint), Some(masks)) = (&mut self.request.constraint, &mut self.masks)
            && !masks.asked
        {
            masks.first.clear();
            constraint.0.allow(&mut masks.first)?;
            if masks.first.is_empty() {
                return Err("it allows no token".into());
            }
            masks.asked = true;
        }
        Ok(())
    }

    /// Asks the constraint what may come, after the text and after each guess; guesses that it does not allow are left out.
    pub fn mask(&mut self, guess: &mut Guess) -> Result<(), String> {
        self.first()?;
        let Some(masks) = &mut self.masks else { return Ok(()) };
        masks.words.clear();
        masks.words.extend_from_slice(masks.first.words());
        let mut kept = vec![false; guess.tokens.len()];
        let fits = |i: usize| guess.parent(i).is_none() && masks.first.contains(guess.tokens[i]);
        let scout = if (0..kept.len()).any(fits) { self.scout() } else { None };
        let (Some(scout), Some(masks)) = (scout, &mut self.masks) else {
            guess.keep(&kept);
            return Ok(());
        };
        let started = Instant::now();
        let words = masks.first.words().len();
        // The constraint after the text, and after each guess that it allows: with its row of the masks.
        let mut after = vec![Some((scout, 0))];
        for i in 0..kept.len() {
            after.push(None);
            let (parent, token) = (guess.parent(i).map_or(0, |parent| parent + 1), guess.tokens[i]);
            let last = !(i + 1..kept.len()).any(|other| guess.parent(other) == guess.parent(i));
            let above = match &after[parent] {
                Some((scout, row)) if !last => Some((scout.boxed_clone(), *row)),
                _ => after[parent].take(),
            };
            let Some((mut scout, row)) = above else { continue };
            let allowed = masks.words[row * words + token as usize / 32] >> (token % 32) & 1 == 1;
            if !allowed || scout.follow(token).is_err() || scout.ended() {
                continue;
            }
            masks.ahead.clear();
            // What cannot be said now may be said, or fail, when it is its turn.
            if scout.allow(&mut masks.ahead).is_err() || masks.ahead.is_empty() {
                continue;
            }
            after[i + 1] = Some((scout, masks.words.len() / words));
            masks.words.extend_from_slice(masks.ahead.words());
            kept[i] = true;
        }
        self.waited(started);
        guess.keep(&kept);
        Ok(())
    }

    /// At most `most` tokens that the constraint leaves no choice about. Where there is a choice, this costs no more than
    /// the mask that the step needs anyway.
    pub fn forced(&mut self, most: usize) -> Vec<u32> {
        let mut tokens = vec![];
        // An error comes again when the step asks.
        if self.first().is_err() {
            return tokens;
        }
        let (Some(constraint), Some(masks)) = (&self.request.constraint, &self.masks) else { return tokens };
        let mut next = constraint.0.one_way(&masks.first);
        let Some(mut scout) = (if next.is_none() { None } else { self.scout() }) else { return tokens };
        let Some(masks) = &mut self.masks else { return tokens };
        let started = Instant::now();
        while let Some(token) = next {
            if tokens.len() == most || scout.follow(token).is_err() || scout.ended() || started.elapsed() > SLOW {
                break;
            }
            tokens.push(token);
            masks.ahead.clear();
            next = scout.allow(&mut masks.ahead).ok().and_then(|()| scout.one_way(&masks.ahead));
        }
        self.waited(started);
        tokens
    }

    /// Masks of guesses that take long three times in a row are too dear; once may be somebody else's work.
    fn waited(&mut self, since: Instant) {
        self.patience = if since.elapsed() > SLOW { self.patience.saturating_sub(1) } else { PATIENCE };
    }

    /// Whether guesses can be looked at by the constraint, if there is one.
    pub fn guided(&self) -> bool {
        self.request.constraint.is_none() || self.patience > 0
    }

    /// Goes ahead of the constraint: `None` where there is none, or where its masks have taken long.
    fn scout(&mut self) -> Option<Box<dyn Grammar>> {
        let constraint = self.request.constraint.as_ref().filter(|_| self.patience > 0)?;
        Some(self.scout.get_or_insert_with(|| constraint.0.scout()).boxed_clone())
    }

    /// How tokens are chosen, how long the prompt is, and whether it matters what guesses are drawn from, where the
    /// writer may write ahead.
    pub fn written(&self, writer: Method) -> Option<(&SamplingParams, usize, bool)> {
        let method = self.ahead.speculation.method;
        let may = self.request.embed.is_none() && method.allows(writer);
        may.then_some((&self.request.sampling, self.request.prompt.len(), self.rejects()))
    }

    /// Whether guesses are right with a probability, instead of by being the token that is chosen. With a constraint, some
    /// are kept back for what they are, which only the other rule allows.
    pub fn rejects(&self) -> bool {
        let rejection = self.ahead.speculation.accept == Accept::Rejection;
        rejection && !self.request.sampling.is_greedy() && self.request.constraint.is_none()
    }

    /// Whether a token ends the text.
    pub fn ends(&self, token: u32) -> bool {
        !self.request.ignore_eos && self.request.stop_ids.contains(&token)
    }

    /// Tokens that may still be generated; none where none are wanted.
    pub fn left(&self) -> usize {
        if self.request.embed.is_some() || self.scores_left() {
            return 0;
        }
        self.request.max_tokens.saturating_sub(self.generated)
    }

    /// What the caller expects from here on, at most `most` tokens; `None` where it expects nothing.
    pub fn expected(&self, most: usize) -> Option<Vec<u32>> {
        let known = |token: &u32| (*token as usize) < self.vocab;
        let all = self.request.expected.as_ref()?;
        Some(all.iter().copied().skip(self.generated).take(most).take_while(known).collect())
    }

    /// Tokens generated.
    pub fn generated(&self) -> usize {
        self.generated
    }

    /// What is known about guesses of its text.
    pub fn ahead(&self) -> &Ahead {
        &self.ahead
    }

    /// The same.
    pub fn ahead_mut(&mut self) -> &mut Ahead {
        &mut self.ahead
    }

    /// Prompt tokens whose logprobs are still to come.
    fn scores_left(&self) -> bool {
        let wanted = self.request.prompt_logprobs.is_some() && !self.scores_told;
        wanted && self.scores.len() + 1 < self.request.prompt.len()
    }

    /// Whether the step behind the next token can be planned without it, but for guesses: the text goes on if the token
    /// does not end it, and nothing is done with the token before the step.
    pub fn needs_no_token(&self, context: usize) -> bool {
        let r = &self.request;
        let plain = r.embed.is_none() && r.constraint.is_none() && r.logprobs.is_none() && !self.scores_left();
        let generated = self.generated + 1;
        plain && !r.sampling.penalizes() && generated < r.max_tokens && r.prompt.len() + generated < context
    }

    /// What is wanted of a share; `history` is the text up to its end.
    pub fn output<'a>(&'a self, share: Scheduled, history: &'a [u32]) -> Output<'a> {
        let last = share.count - 1;
        match self.request.embed {
            Some(Pooling::Mean) => return Output::Hidden { from: 0 },
            Some(Pooling::Last) if share.last => return Output::Hidden { from: last },
            Some(Pooling::Last) => return Output::None,
            None => {}
        }
        if self.scores_left() {
            return Output::Logits { from: 0 };
        }
        if !share.last || self.generated >= self.request.max_tokens {
            return Output::None;
        }
        if self.rejects() && share.guesses > 0 {
            return Output::Logits { from: last - share.guesses };
        }
        Output::Tokens {
            from: last - share.guesses,
            params: &self.request.sampling,
            history,
            prompt_len: self.request.prompt.len(),
            logprobs: self.request.logprobs,
            allowed: self.masks.as_ref().map(|masks| &masks.words[..]),
        }
    }

    /// Takes what a share from position `start` on gave; `tokens` are all of the sequence.
    pub fn take(
        &mut self,
        share: Scheduled,
        start: usize,
        output: ChunkOutput,
        tokens: &[u32],
    ) -> Result<Got, Failure> {
        match output {
            ChunkOutput::Tokens(sampled) => {
                let drafts = &tokens[tokens.len() - share.guesses..];
                let token = |row: usize| sampled[row].as_ref().ok().map(|sampled| sampled.token);
                let path = matching_path(drafts, &self.ahead.parents(share.guesses), token);
                // Behind a wrong guess nothing was asked.
                let mut sampled: Vec<Option<_>> = sampled.into_iter().map(Some).collect();
                let rows = [0].into_iter().chain(path.iter().map(|i| i + 1));
                let (mut next, mut error) = (vec![], None);
                for row in rows {
                    match sampled[row].take() {
                        Some(Ok(sampled)) => next.push(sampled),
                        Some(Err(reason)) => error = Some(reason),
                        None => {}
                    }
                }
                Ok(Got::Tokens { next, error, path })
            }
            ChunkOutput::Hidden(states) => Ok(self.pool(share, start, states)),
            ChunkOutput::Logits(rows) if share.guesses > 0 => Ok(self.verdict(share, rows, tokens)),
            ChunkOutput::Logits(rows) => self.score(share, start, rows, tokens),
            ChunkOutput::None if share.last && self.request.embed.is_none() => Ok(Got::PromptOnly),
            ChunkOutput::None | ChunkOutput::Unknown => Ok(Got::Nothing),
        }
    }

    fn pool(&mut self, share: Scheduled, start: usize, states: Vec<f32>) -> Got {
        if self.request.embed == Some(Pooling::Last) {
            return Got::Vector(states);
        }
        let hidden = states.len() / share.count;
        if start == 0 {
            self.sum = (vec![], 0); // again from the beginning, perhaps
        }
        self.sum.0.resize(hidden, 0.0);
        // One row after the other, so that chunks make no difference.
        for state in states.chunks_exact(hidden) {
            self.sum.0.iter_mut().zip(state).for_each(|(sum, x)| *sum += f64::from(*x));
        }
        self.sum.1 += share.count;
        if !share.last {
            return Got::Nothing;
        }
        let count = self.sum.1 as f64;
        Got::Vector(self.sum.0.iter().map(|sum| (sum / count) as f32).collect())
    }

    /// Applies the rule of rejection to guesses; `rows` are the logits after the text and after each.
    fn verdict(&self, share: Scheduled, mut rows: Vec<f32>, tokens: &[u32]) -> Got {
        let (known, vocab) = (tokens.len() - share.guesses, self.vocab);
        let (params, prompt_len) = (&self.request.sampling, self.request.prompt.len());
        let of = |i: usize, token: u32| Draft { token, from: self.ahead.from.get(i) };
        let drafts: Vec<Draft> = tokens[known..].iter().enumerate().map(|(i, &token)| of(i, token)).collect();
        let parents = self.ahead.parents(share.guesses);
        // The guesses up to the one of a row.
        let path = |row: usize| {
            let mut path: Vec<usize> = std::iter::successors(row.checked_sub(1), |&i| parents[i]).collect();
            path.reverse();
            path
        };
        let words = vocab.div_ceil(32);
        let mut told: Vec<Option<Vec<f32>>> = vec![None; share.guesses + 1];
        let mut last = 0;
        let target = |row: usize| {
            last = row;
            let logits = &mut rows[row * vocab..(row + 1) * vocab];
            if self.request.logprobs.is_some() {
                told[row] = Some(logits.to_vec());
            }
            let path = path(row).into_iter().map(|i| tokens[known + i]);
            let text: Vec<u32> = tokens[..known].iter().copied().chain(path).collect();
            let allowed = self.masks.as_ref().map(|masks| &masks.words[row * words..(row + 1) * words]);
            Distribution::of(logits, params, History { tokens: &text, prompt_len }, allowed)
        };
        let (path, next, error) = match rejection_path(&drafts, &parents, target, params.seed, known as u64) {
            Ok(found) => (found.accepted, Some(found.next), None),
            // All before it were right.
            Err(error) => (path(last), None, Some(error)),
        };
        let sampled = |(row, token): (usize, u32)| match (&told[row], self.request.logprobs) {
            (Some(logits), Some(n)) => {
                let (logprob, top) = logprobs(logits, token, n);
                Sampled { token, logprob: Some(logprob), top }
            }
            _ => Sampled { token, logprob: None, top: vec![] },
        };
        let rows = [0].into_iter().chain(path.iter().map(|i| i + 1));
        let all = path.iter().map(|&i| tokens[known + i]).chain(next);
        Got::Tokens { next: rows.zip(all).map(sampled).collect(), error, path }
    }

    fn score(&mut self, share: Scheduled, start: usize, mut rows: Vec<f32>, tokens: &[u32]) -> Result<Got, Failure> {
        let n = self.request.prompt_logprobs.unwrap_or(0);
        for (i, row) in rows.chunks_exact(self.vocab).enumerate() {
            let at = start + i + 1;
            if at < self.request.prompt.len() && at == self.scores.len() + 1 {
                self.scores.push(logprobs(row, tokens[at], n));
            }
        }
        if !share.last {
            return Ok(Got::Nothing);
        }
        if self.request.max_tokens == 0 {
            return Ok(Got::PromptOnly);
        }
        let row = rows.len() - self.vocab;
        let history = History { tokens, prompt_len: self.request.prompt.len() };
        let allowed = self.masks.as_ref().map(|masks| &masks.words[..]);
        let (params, position) = (&self.request.sampling, tokens.len() as u64);
        let next = sample_allowed(&mut rows[row..], params, history, position, self.request.logprobs, allowed)?;
        Ok(Got::Tokens { next: vec![next], error: None, path: vec![] })
    }

    /// Logprobs of the prompt, once they are complete.
    pub fn prompt_scores(&mut self) -> Option<Vec<Score>> {
        let complete = self.request.prompt_logprobs.is_some() && !self.scores_left();
        (complete && !std::mem::replace(&mut self.scores_told, true)).then(|| std::mem::take(&mut self.scores))
    }

    /// Follows a token; why the request ends with it, if it does.
    pub fn follow(&mut self, token: u32, context: usize) -> Result<Option<Finish>, String> {
        self.generated += 1;
        let r = &mut self.request;
        if !r.ignore_eos && r.stop_ids.contains(&token) {
            return Ok(Some(Finish::Stop));
        }
        if let Some(constraint) = &mut r.constraint {
            constraint.0.follow(token)?;
            if let Some(masks) = &mut self.masks {
                masks.asked = false;
            }
            if self.scout.as_mut().is_some_and(|scout| scout.follow(token).is_err()) {
                (self.scout, self.patience) = (None, 0);
            }
            if constraint.0.ended() {
                return Ok(Some(Finish::Stop));
            }
        }
        if self.generated >= r.max_tokens {
            return Ok(Some(Finish::Length));
        }
        Ok((r.prompt.len() + self.generated >= context).then_some(Finish::Context))
    }
}
