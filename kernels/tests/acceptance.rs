//! The rules of speculation, against toy models whose distributions are known.
//!
//! Everything has a fixed seed, so a test passes always or never; bounds are where chance would exceed them about once
//! in a million cases.

use quern_kernels::sample::{
    Distribution, Draft, History, SampleError, SamplingParams, gumbel, matching, matching_path, rejection,
    rejection_path, sample_allowed,
};

/// SplitMix64's output function: a hash good enough for toys.
fn hash(words: &[u64]) -> u64 {
    words.iter().fold(0x9E37_79B9_7F4A_7C15, |state, &word| {
        let mut x = (state ^ word).wrapping_add(0x9E37_79B9_7F4A_7C15);
        x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ x >> 31
    })
}

/// From 0 to below 1.
fn share(words: &[u64]) -> f64 {
    (hash(words) >> 11) as f64 / (1u64 << 53) as f64
}

/// A language model whose logits are a function of the last two tokens, and what may be said of the text's length.
#[derive(Clone, Copy)]
struct Toy {
    seed: u64,
    vocab: usize,
    /// How peaked it is.
    size: f64,
    /// Whether a set of allowed tokens goes with each text.
    masked: bool,
}

impl Toy {
    fn key(&self, text: &[u32]) -> u64 {
        let last = |back: usize| text.len().checked_sub(back).map_or(u64::MAX, |at| u64::from(text[at]));
        hash(&[self.seed, last(1), last(2), self.vocab as u64])
    }

    fn logits(&self, text: &[u32]) -> Vec<f32> {
        let key = self.key(text);
        // Sums of two shares: most are near the middle; some are equal.
        let logit = |t: u64| self.size * (share(&[key, t]) + share(&[key, t, 1]) - 1.0);
        (0..self.vocab as u64).map(|t| (logit(t) * 64.0).round() as f32 / 64.0).collect()
    }

    /// About two thirds of the tokens, and always the last.
    fn allowed(&self, text: &[u32]) -> Option<Vec<u32>> {
        let key = self.key(text);
        let word = |w: usize| (hash(&[key, w as u64, 7]) | hash(&[key, w as u64, 8]) & 0x5555_5555) as u32;
        let mut words: Vec<u32> = (0..self.vocab.div_ceil(32)).map(word).collect();
        words[(self.vocab - 1) / 32] |= 1 << ((self.vocab - 1) % 32);
        self.masked.then_some(words)
    }

    fn sample(&self, text: &[u32], prompt_len: usize, params: &SamplingParams) -> u32 {
        let history = History { tokens: text, prompt_len };
        let allowed = self.allowed(text);
        let position = text.len() as u64;
        let got = sample_allowed(&mut self.logits(text), params, history, position, None, allowed.as_deref());
        got.expect("a token").token
    }

    fn distribution(
        &self,
        text: &[u32],
        prompt_len: usize,
        params: &SamplingParams,
    ) -> Result<Distribution, SampleError> {
        let history = History { tokens: text, prompt_len };
        Distribution::of(&mut self.logits(text), params, history, self.allowed(text).as_deref())
    }

    /// The distribution from its definition, in f64, sorting everything: nothing of the code under test.
    fn exact(&self, text: &[u32], prompt_len: usize, params: &SamplingParams) -> Vec<f64> {
        let mut logits: Vec<f64> = self.logits(text).into_iter().map(f64::from).collect();
        if let Some(allowed) = self.allowed(text) {
            let forbidden = (0..self.vocab).filter(|t| allowed[t / 32] >> (t % 32) & 1 == 0);
            forbidden.for_each(|t| logits[t] = f64::NEG_INFINITY);
        }
        let f = |x: f32| f64::from(x);
        let first = params.penalty_last_n.map_or(0, |n| text.len().saturating_sub(n));
        for (token, logit) in logits.iter_mut().enumerate() {
            let of = |from: usize| text[from.min(text.len())..].iter().filter(|&&t| t as usize == token).count();
            if of(first) > 0 {
                let penalty = f(params.repetition_penalty);
                *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            }
            let outputs = of(first.max(prompt_len));
            if outputs > 0 {
                *logit -= f(params.presence_penalty) + f(params.frequency_penalty) * outputs as f64;
            }
        }
        params.logit_bias.iter().for_each(|&(token, bias)| logits[token as usize] += f(bias));
        let mut order: Vec<usize> = (0..self.vocab).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        if params.is_greedy() {
            order.truncate(1);
        }
        let temperature = if params.is_greedy() { 1.0 } else { f(params.temperature) };
        let weight = |t: usize| ((logits[t] - logits[order[0]]) / temperature).exp();
        let mut kept = order.clone();
        if params.top_k > 0 {
            kept.truncate(params.top_k as usize);
        }
        let total: f64 = kept.iter().map(|&t| weight(t)).sum();
        let mut larger = 0.0;
        kept.retain(|&t| {
            larger += weight(t);
            larger - weight(t) < f(params.top_p) * total
        });
        kept.retain(|&t| weight(t) >= f(params.min_p));
        let total: f64 = kept.iter().map(|&t| weight(t)).sum();
        let mut p = vec![0.0; self.vocab];
        kept.iter().for_each(|&t| p[t] = weight(t) / total);
        p
    }
}

/// Every knob of the sampler, alone and together.
fn samplers() -> Vec<SamplingParams> {
    let plain = SamplingParams::default();
    vec![
        plain.clone(),
        SamplingParams::greedy(),
        SamplingParams { temperature: 0.6, ..plain.clone() },
        SamplingParams { temperature: 1.7, ..plain.clone() },
        SamplingParams { top_k: 3, ..plain.clone() },
        SamplingParams { top_p: 0.8, ..plain.clone() },
        SamplingParams { min_p: 0.15, ..plain.clone() },
        SamplingParams { repetition_penalty: 1.3, ..plain.clone() },
        SamplingParams { presence_penalty: 0.7, frequency_penalty: 0.4, ..plain.clone() },
        SamplingParams { frequency_penalty: -0.3, penalty_last_n: Some(3), ..plain.clone() },
        SamplingParams { logit_bias: vec![(0, f32::NEG_INFINITY), (1, 0.8)], ..plain.clone() },
        SamplingParams { repetition_penalty: 1.2, presence_penalty: 0.5, ..SamplingParams::greedy() },
        SamplingParams {
            temperature: 0.9,
            top_k: 7,
            top_p: 0.9,
            min_p: 0.05,
            repetition_penalty: 1.1,
            presence_penalty: 0.2,
            frequency_penalty: 0.1,
            penalty_last_n: Some(16),
            logit_bias: vec![(1, -0.5)],
            seed: 0,
        },
    ]
}

/// Text that goes on from a prompt, one token at a time.
fn plain(toy: &Toy, params: &SamplingParams, prompt: &[u32], len: usize) -> Vec<u32> {
    let mut text = prompt.to_vec();
    while text.len() < len {
        text.push(toy.sample(&text, prompt.len(), params));
    }
    text
}

/// How tokens are guessed.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Guess {
    Right,
    Random,
    /// Right four times of five.
    Mostly,
    /// What follows an earlier occurrence of the last token.
    Lookup,
    /// A similar model with the same sampler, seed and positions.
    Similar,
}

fn guess(kind: Guess, toy: &Toy, params: &SamplingParams, prompt: usize, right: &[u32], text: &[u32]) -> u32 {
    let at = text.len();
    let die = [toy.seed, params.seed, at as u64, 99];
    let random = (hash(&die) % toy.vocab as u64) as u32;
    match kind {
        Guess::Right => right.get(at).copied().unwrap_or(0),
        Guess::Random => random,
        Guess::Mostly => right.get(at).copied().filter(|_| share(&die) < 0.8).unwrap_or(random),
        Guess::Lookup => {
            let seen = text[..at - 1].iter().rposition(|t| *t == text[at - 1]);
            seen.map_or(random, |i| text[i + 1])
        }
        Guess::Similar => Toy { size: toy.size * 0.8, ..*toy }.sample(text, prompt, params),
    }
}

#[test]
fn matching_changes_no_text() {
    let samplers = samplers();
    let guesses = [Guess::Right, Guess::Random, Guess::Mostly, Guess::Lookup, Guess::Similar];
    let mut counts = [(0usize, 0usize); 5];
    let mut tokens = 0;
    for seed in 0..6000u64 {
        let die = |what: u64, below: u64| hash(&[seed, what]) % below;
        let toy = Toy {
            seed,
            vocab: 2 + die(0, 49) as usize,
            size: [1.0, 4.0, 12.0][die(1, 3) as usize],
            masked: die(2, 4) == 0,
        };
        // Every sampler meets every guess.
        let params = SamplingParams { seed: hash(&[seed]), ..samplers[seed as usize % samplers.len()].clone() };
        let which = seed as usize / samplers.len() % guesses.len();
        let prompt: Vec<u32> = (0..=die(3, 5)).map(|i| die(10 + i, toy.vocab as u64) as u32).collect();
        let len = prompt.len() + 30;
        let right = plain(&toy, &params, &prompt, len);
        let mut text = prompt.clone();
        let mut step = 0;
        while text.len() < len {
            step += 1;
            let k = 1 + die(100 + step, 16) as usize;
            let mut drafts = Vec::new();
            let mut sampled = vec![toy.sample(&text, prompt.len(), &params)];
            let mut drafted = text.clone();
            for _ in 0..k {
                let draft = guess(guesses[which], &toy, &params, prompt.len(), &right, &drafted);
                drafts.push(draft);
                drafted.push(draft);
                sampled.push(toy.sample(&drafted, prompt.len(), &params));
            }
            let stand = matching(&drafts, &sampled);
            text.extend(&drafts[..stand]);
            text.push(sampled[stand]);
            // The right continuation is known to its end only.
            if text.len() < len {
                counts[which].0 += stand;
                counts[which].1 += k;
            }
        }
        text.truncate(len);
        assert_eq!(text, right, "seed {seed}: {:?}, vocabulary of {}, {params:?}", guesses[which], toy.vocab);
        tokens += 30;
    }
    // Both outcomes occurred everywhere, else equality would show nothing.
    let rates = counts.map(|(stood, drafted)| stood as f64 / drafted as f64);
    println!("{tokens} tokens; drafts that stood, by guess: {guesses:?} {rates:.3?}");
    assert_eq!(rates[0], 1.0);
    assert!(rates[1..].iter().all(|&rate| rate > 0.005 && rate < 0.9), "{rates:?}");
}

/// Where a drafter's tokens come from.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Source {
    /// Its likeliest token, without a distribution.
    Best,
    /// Any token, without a distribution: one that the target cannot draw as well as its likeliest.
    Any,
    /// Its own distribution, with noise of its own.
    Noise,
    /// Its own distribution, with the noise of the target's sampler.
    SameNoise,
}

/// A drafter: a toy with a sampler of its own.
struct Drafter {
    name: &'static str,
    toy: Toy,
    params: SamplingParams,
    from: Source,
}

impl Drafter {
    /// A draft after `text`, and what it was drawn from.
    fn draft(&self, text: &[u32], prompt_len: usize, seed: u64) -> (u32, Option<Distribution>) {
        let q = self.toy.distribution(text, prompt_len, &self.params).expect("a distribution");
        let position = text.len() as u64;
        match self.from {
            Source::Best => {
                // The first of the likeliest.
                let best = q.iter().reduce(|a, b| if b.1 > a.1 { b } else { a });
                (best.expect("a token").0, None)
            }
            Source::Any => ((hash(&[seed, position, 5]) % self.toy.vocab as u64) as u32, None),
            Source::Noise => (q.draw(hash(&[seed, 77]), position), Some(q)),
            Source::SameNoise => (q.draw(seed, position), Some(q)),
        }
    }
}

impl Drafter {
    /// Different drafts after `text`, at most `count`, and what they were drawn from in this order.
    fn siblings(&self, text: &[u32], prompt_len: usize, seed: u64, count: usize) -> (Vec<u32>, Option<Distribution>) {
        let q = self.toy.distribution(text, prompt_len, &self.params).expect("a distribution");
        let position = text.len() as u64;
        let mut order: Vec<(u32, f64)> = q.iter().collect();
        let ranked = |by: &dyn Fn(u32, f64) -> f64, order: &mut Vec<(u32, f64)>| {
            order.sort_by(|a, b| by(b.0, b.1).total_cmp(&by(a.0, a.1)).then(a.0.cmp(&b.0)));
        };
        match self.from {
            Source::Best => ranked(&|_, p| p, &mut order),
            Source::Any => {
                order = (0..self.toy.vocab as u32).map(|t| (t, 0.0)).collect();
                ranked(&|token, _| share(&[seed, position, token.into(), 6]), &mut order);
            }
            Source::Noise => ranked(&|token, p| p.ln() + gumbel(hash(&[seed, 77]), position, token), &mut order),
            Source::SameNoise => ranked(&|token, p| p.ln() + gumbel(seed, position, token), &mut order),
        }
        let drawn = matches!(self.from, Source::Noise | Source::SameNoise);
        (order.into_iter().take(count).map(|(token, _)| token).collect(), drawn.then_some(q))
    }
}

/// Drafters for a target with its parameters: bad, good and perfect ones.
fn drafters(target: Toy, params: &SamplingParams) -> Vec<Drafter> {
    let other = Toy { seed: target.seed ^ 0xABCD, ..target };
    let open = Toy { masked: false, ..target };
    // Only tokens that the target cannot draw, where it has a mask or a bias, and unlikely ones elsewhere.
    let bias = (0..target.vocab as u32).step_by(2).map(|t| (t, f32::NEG_INFINITY)).collect();
    let disjoint = SamplingParams { logit_bias: bias, ..SamplingParams::default() };
    let warm = SamplingParams { temperature: params.temperature.max(0.5) * 1.5, ..SamplingParams::default() };
    let few = SamplingParams { top_k: 2, ..params.clone() };
    let with = |name, toy, params: &SamplingParams, from| Drafter { name, toy, params: params.clone(), from };
    vec![
        with("the likeliest", target, params, Source::Best),
        with("any token", target, params, Source::Any),
        with("equal", target, params, Source::Noise),
        with("equal, same noise", target, params, Source::SameNoise),
        with("close", Toy { size: target.size * 0.7, ..open }, &warm, Source::Noise),
        with("close, same noise", Toy { size: target.size * 0.7, ..open }, &warm, Source::SameNoise),
        with("unrelated", other, params, Source::Noise),
        with("unrelated, same noise", other, params, Source::SameNoise),
        with("half of the tokens", open, &disjoint, Source::SameNoise),
        with("two tokens", open, &few, Source::Noise),
    ]
}

/// Text by one of the rules, `k` drafts at a time, and whether the very first draft stood.
fn speculate(
    rule: Rule,
    toy: &Toy,
    params: &SamplingParams,
    drafter: &Drafter,
    prompt: &[u32],
    len: usize,
    k: usize,
) -> (Vec<u32>, bool) {
    let mut text = prompt.to_vec();
    let mut first = None;
    while text.len() < len {
        let start = text.len();
        let mut drafted = text.clone();
        let mut from = Vec::new();
        for _ in 0..k {
            let (token, q) = drafter.draft(&drafted, prompt.len(), params.seed);
            drafted.push(token);
            from.push(q);
        }
        let (stand, next) = match rule {
            Rule::Matching => {
                let sampled: Vec<u32> =
                    (start..=start + k).map(|to| toy.sample(&drafted[..to], prompt.len(), params)).collect();
                let stand = matching(&drafted[start..], &sampled);
                (stand, sampled[stand])
            }
            Rule::Rejection => {
                let drafts = drafted[start..].iter().zip(&from);
                let drafts: Vec<_> = drafts.map(|(&token, q)| Draft { token, from: q.as_ref() }).collect();
                let target = |i: usize| toy.distribution(&drafted[..start + i], prompt.len(), params);
                let verdict = rejection(&drafts, target, params.seed, start as u64).expect("a token");
                (verdict.accepted, verdict.next)
            }
        };
        first.get_or_insert(stand > 0);
        text.extend(&drafted[start..start + stand]);
        text.push(next);
    }
    text.truncate(len);
    (text, first.unwrap_or_default())
}

/// Text by one of the rules with trees of two levels, and how often a draft that was not the first of its siblings stood.
fn speculate_trees(
    rule: Rule,
    toy: &Toy,
    params: &SamplingParams,
    drafter: &Drafter,
    prompt: &[u32],
    len: usize,
    widths: [usize; 4],
) -> (Vec<u32>, usize) {
    let mut text = prompt.to_vec();
    let mut later = 0;
    while text.len() < len {
        let start = text.len();
        let (mut drafts, mut parents, mut from, mut paths) = (vec![], vec![], vec![], vec![text.clone()]);
        let mut row = 0;
        // After the text, and after the first three drafts.
        while row < widths.len().min(paths.len()) {
            let path = paths[row].clone();
            let (tokens, q) = drafter.siblings(&path, prompt.len(), params.seed, widths[row]);
            for token in tokens {
                drafts.push(token);
                parents.push(row.checked_sub(1));
                from.push(q.clone());
                paths.push([&path[..], &[token]].concat());
            }
            row += 1;
        }
        let (path, next) = match rule {
            Rule::Matching => {
                let sampled = |row: usize| Some(toy.sample(&paths[row], prompt.len(), params));
                let path = matching_path(&drafts, &parents, sampled);
                let end = path.last().map_or(0, |last| last + 1);
                (path, sampled(end).expect("a token"))
            }
            Rule::Rejection => {
                let of = |(i, q): (usize, &Option<Distribution>)| (drafts[i], q.clone());
                let all: Vec<_> = from.iter().enumerate().map(of).collect();
                let all: Vec<_> = all.iter().map(|(token, q)| Draft { token: *token, from: q.as_ref() }).collect();
                let target = |row: usize| toy.distribution(&paths[row], prompt.len(), params);
                let path = rejection_path(&all, &parents, target, params.seed, start as u64).expect("a token");
                (path.accepted, path.next)
            }
        };
        later += path.iter().filter(|&&i| parents[..i].contains(&parents[i])).count();
        text.extend(path.iter().map(|&i| drafts[i]));
        text.push(next);
    }
    text.truncate(len);
    (text, later)
}

/// Numbers of siblings: after the text, and after the first three drafts.
const WIDTHS: [[usize; 4]; 4] = [[2, 2, 1, 0], [3, 1, 2, 1], [1, 3, 0, 1], [4, 0, 2, 2]];

#[test]
fn trees_by_matching_change_no_text() {
    let mut later = 0;
    for (toy, params) in cases() {
        for drafter in drafters(toy, &params) {
            for seed in 0..60 {
                let params = SamplingParams { seed, ..params.clone() };
                let widths = WIDTHS[seed as usize % 4];
                let (text, of_later) = speculate_trees(Rule::Matching, &toy, &params, &drafter, &[1, 0], 20, widths);
                assert_eq!(text, plain(&toy, &params, &[1, 0], 20), "{}, {params:?}", drafter.name);
                later += of_later;
            }
        }
    }
    assert!(later > 5000, "{later}");
}

#[test]
fn trees_by_rejection_follow_the_distribution() {
    const RUNS: u64 = 5000;
    let mut later = 0;
    for (case, (toy, params)) in cases().into_iter().enumerate() {
        let depth = if toy.vocab <= 7 { 3 } else { 2 };
        let prompt = [1u32, 0];
        let p = joint(&toy, &params, &prompt, depth);
        for (i, drafter) in drafters(toy, &params).into_iter().enumerate() {
            let widths = WIDTHS[(case + i) % 4];
            let mut counts = vec![0; p.len()];
            for run in 0..RUNS {
                let params = SamplingParams { seed: run, ..params.clone() };
                let of = speculate_trees(Rule::Rejection, &toy, &params, &drafter, &prompt, 2 + depth, widths);
                later += of.1;
                let cell = of.0[2..].iter().fold(0, |cell, &token| cell * toy.vocab + token as usize);
                counts[cell] += 1;
            }
            let what = format!("trees {widths:?}, {}, vocabulary of {}, {params:?}", drafter.name, toy.vocab);
            check_cells(&what, &counts, &p);
        }
    }
    assert!(later > 50_000, "{later}");
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Rule {
    Matching,
    Rejection,
}

/// Counts of cells against their probabilities. Cells that would be nearly empty are counted together; one without
/// probability must be empty.
fn check_cells(what: &str, counts: &[u64], p: &[f64]) {
    let draws: u64 = counts.iter().sum();
    let (mut chi, mut free) = (0.0, -1.0);
    let mut rest = (0.0, 0.0);
    let mut add = |count: f64, mean: f64| {
        chi += (count - mean).powi(2) / mean;
        free += 1.0;
    };
    for (cell, (&count, &p)) in counts.iter().zip(p).enumerate() {
        let mean = p * draws as f64;
        if p == 0.0 {
            assert_eq!(count, 0, "{what}: cell {cell} cannot be drawn");
        } else if mean < 5.0 {
            rest = (rest.0 + count as f64, rest.1 + mean);
        } else {
            add(count as f64, mean);
        }
    }
    if rest.1 >= 5.0 {
        add(rest.0, rest.1);
    }
    // Mean `free`, deviation sqrt(2 free); five deviations and a little for the skew of small ones.
    let bound = free + 5.0 * (2.0f64 * f64::max(free, 1.0)).sqrt() + 3.0;
    assert!(chi <= bound, "{what}: chi² {chi:.1} of {free} degrees, at most {bound:.1}");
}

/// Probabilities of all texts of `depth` tokens, in the order of their digits.
fn joint(toy: &Toy, params: &SamplingParams, prompt: &[u32], depth: usize) -> Vec<f64> {
    let mut texts = vec![(prompt.to_vec(), 1.0)];
    for _ in 0..depth {
        let longer = texts.into_iter().flat_map(|(text, p)| {
            let next = if p > 0.0 { toy.exact(&text, prompt.len(), params) } else { vec![0.0; toy.vocab] };
            next.into_iter().enumerate().map(move |(token, q)| {
                let text = text.iter().copied().chain([token as u32]).collect();
                (text, p * q)
            })
        });
        texts = longer.collect();
    }
    texts.into_iter().map(|(_, p)| p).collect()
}

/// A fifth of the samplers for each vocabulary: all of them over all vocabularies.
fn cases() -> Vec<(Toy, SamplingParams)> {
    let samplers = samplers();
    let of = |(i, vocab): (usize, usize)| {
        let toy = Toy { seed: 40 + i as u64, vocab, size: 4.0, masked: i % 3 == 2 };
        (toy, samplers[i % samplers.len()].clone())
    };
    [2, 3, 4, 5, 7, 10, 16, 23, 33, 50, 2, 6, 50, 4].into_iter().enumerate().map(of).collect()
}

#[test]
fn distributions_are_what_is_defined() {
    for (toy, params) in cases() {
        for text in [vec![0u32], vec![1, 0, 1, 1], vec![0, 1, 1, 0, 0]] {
            let got = toy.distribution(&text, 2.min(text.len()), &params).expect("a distribution");
            for (token, p) in toy.exact(&text, 2.min(text.len()), &params).into_iter().enumerate() {
                let got = got.probability(token as u32);
                assert!((got == 0.0) == (p == 0.0) && (got - p).abs() < 1e-6, "{token}: {got} {p}, {params:?}");
            }
        }
    }
}

/// Texts of three tokens (two where there are many), of which drafts decide the first two at once.
fn check_rule(rule: Rule) {
    const RUNS: u64 = 5000;
    for (toy, params) in cases() {
        let depth = if toy.vocab <= 7 { 3 } else { 2 };
        let prompt = [1u32, 0];
        let p = joint(&toy, &params, &prompt, depth);
        for drafter in drafters(toy, &params) {
            let mut counts = vec![0; p.len()];
            for run in 0..RUNS {
                let params = SamplingParams { seed: run, ..params.clone() };
                let text = speculate(rule, &toy, &params, &drafter, &prompt, 2 + depth, 2).0;
                let cell = text[2..].iter().fold(0, |cell, &token| cell * toy.vocab + token as usize);
                counts[cell] += 1;
            }
            check_cells(&format!("{rule:?}, {}, vocabulary of {}, {params:?}", drafter.name, toy.vocab), &counts, &p);
        }
    }
}

#[test]
fn texts_by_matching_follow_the_distribution() {
    check_rule(Rule::Matching);
}

#[test]
fn texts_by_rejection_follow_the_distribution() {
    check_rule(Rule::Rejection);
}

#[test]
fn texts_by_rejection_without_drafts_are_the_plain_ones() {
    for (toy, params) in cases() {
        let drafter = &drafters(toy, &params)[0];
        for seed in 0..50 {
            let params = SamplingParams { seed, ..params.clone() };
            let (text, _) = speculate(Rule::Rejection, &toy, &params, drafter, &[1, 0], 20, 0);
            assert_eq!(text, plain(&toy, &params, &[1, 0], 20));
        }
    }
}

/// How often a first draft stands, against what theory says.
#[test]
fn drafts_stand_as_often_as_theory_says() {
    const RUNS: u64 = 5000;
    let mut ratios = Vec::new();
    for (toy, params) in cases() {
        let prompt = [1u32, 0];
        let p = toy.exact(&prompt, 2, &params);
        for drafter in drafters(toy, &params) {
            let q = drafter.toy.exact(&prompt, 2, &drafter.params);
            let both = (0..toy.vocab).filter(|&t| p[t] > 0.0 && q[t] > 0.0);
            let overlap: f64 = both.clone().map(|t| p[t].min(q[t])).sum();
            let rejection = match drafter.from {
                Source::Best => p[(0..toy.vocab).rev().max_by(|&a, &b| q[a].total_cmp(&q[b])).expect("a token")],
                Source::Any => 1.0 / toy.vocab as f64,
                Source::Noise | Source::SameNoise => overlap,
            };
            // Of exponential races with rates p and q and the same noise, both are won by t where no other token is
            // faster in either: with probability 1 / sum of max(p / p_t, q / q_t).
            let race = |t: usize| (0..toy.vocab).map(|s| (p[s] / p[t]).max(q[s] / q[t])).sum::<f64>();
            let coupled: f64 = both.map(|t| 1.0 / race(t)).sum();
            let bound = overlap / (2.0 - overlap); // (1 - d) / (1 + d), d = 1 - overlap
            assert!(coupled >= bound - 1e-12 && coupled <= overlap + 1e-12, "{coupled} {bound} {overlap}");
            let matching = match drafter.from {
                Source::Best | Source::Any => rejection,
                Source::Noise => (0..toy.vocab).map(|t| p[t] * q[t]).sum(),
                Source::SameNoise => coupled,
            };
            if drafter.from == Source::SameNoise && overlap > 0.0 && overlap < 1.0 - 1e-9 {
                ratios.push(matching / overlap);
            }
            for (rule, expected) in [(Rule::Matching, matching), (Rule::Rejection, rejection)] {
                let stood = (0..RUNS).filter(|&run| {
                    let params = SamplingParams { seed: run, ..params.clone() };
                    speculate(rule, &toy, &params, &drafter, &prompt, 3, 1).1
                });
                let got = stood.count() as f64 / RUNS as f64;
                let deviation = (expected * (1.0 - expected) / RUNS as f64).max(0.0).sqrt();
                let what = format!("{rule:?}, {}, vocabulary of {}, {params:?}", drafter.name, toy.vocab);
                assert!((got - expected).abs() <= 5.0 * deviation + 1e-6, "{what}: {got}, expected {expected}");
            }
        }
    }
    ratios.sort_by(f64::total_cmp);
    let (least, median, pairs) = (ratios[0], ratios[ratios.len() / 2], ratios.len());
    println!(
        "same noise, p and q differ ({pairs} pairs): matching accepts at least {least:.3} and in the median \
         {median:.3} of what rejection does"
    );
}
