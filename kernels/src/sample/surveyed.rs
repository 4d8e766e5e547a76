//! Choosing from a row whose panels were surveyed while the head computed them.
//!
//! The result is that of [`super::sample`], bit for bit: panels that cannot hold what is looked for are passed
//! over, and where an approximation leaves two answers open, the plain way is gone.

use quern_models::PANEL;

use super::{
    Candidate, History, SampleError, SamplingParams, Scaled, choose_penalized, cut, likelier, likeliest, mass, nans,
    noise::Draw, penalize,
};
use crate::cpu::{
    lanes::Simd,
    ops,
    survey::{Ask, mass_beyond, survey},
};

/// What a request wants to know of a row of logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Need {
    /// Only the likeliest token: the logits need not be kept.
    Best,
    /// The logits and surveys of their panels.
    Surveyed(Ask),
    /// The logits.
    Logits,
}

impl Need {
    /// For the token at `position`, as [`super::sample`] takes it.
    pub fn of(params: &SamplingParams, vocab: usize, position: u64, logprobs: Option<usize>) -> Need {
        let scale = params.scale();
        if logprobs.is_some() {
            Need::Logits
        } else if params.is_greedy() {
            let plain = !params.penalizes() && params.logit_bias.is_empty();
            if plain { Need::Best } else { Need::Surveyed(Ask::Max) }
        } else if params.top_k_of(vocab) < vocab {
            Need::Surveyed(Ask::Max)
        } else if params.top_p >= 1.0 {
            Need::Surveyed(Ask::Noise { scale, seed: params.seed, position })
        } else {
            Need::Surveyed(Ask::Mass { scale })
        }
    }
}

/// A row of logits with the surveys of its panels of 64.
#[derive(Debug)]
pub struct Surveyed<'a> {
    /// `[vocab]`.
    pub logits: &'a mut [f32],
    /// The largest logit of each panel, `[panels]`.
    pub max: &'a mut [f32],
    /// What else was asked of each panel, `[panels]`.
    pub more: &'a mut [f32],
}

/// Room to work in, kept between rows.
#[derive(Debug, Default)]
pub struct Scratch {
    /// Zeros, one per token.
    uses: Vec<u32>,
    /// Panels whose logits were changed.
    stale: Vec<bool>,
}

/// The token at `position`. `ask` must be what [`Need::of`] said and what the panels were asked.
pub fn choose_surveyed(
    simd: Simd,
    ask: Ask,
    mut row: Surveyed<'_>,
    params: &SamplingParams,
    history: History<'_>,
    position: u64,
    scratch: &mut Scratch,
) -> Result<u32, SampleError> {
    let vocab = row.logits.len();
    assert!(row.max.len() == vocab.div_ceil(PANEL) && row.more.len() == row.max.len(), "panels of {vocab} tokens");
    if vocab > 0 {
        let top = ops::argmax(simd, row.max);
        if row.max[top] == f32::INFINITY {
            return Err(SampleError::Infinite { token: row.first(top, f32::INFINITY) });
        }
    }
    row.change(simd, ask, params, history, scratch)?;
    let panel = if vocab > 0 { ops::argmax(simd, row.max) } else { 0 };
    let max = row.max.get(panel).copied().unwrap_or(f32::NEG_INFINITY);
    if max == f32::NEG_INFINITY {
        return Err(SampleError::NothingToChoose { vocab, nans: nans(row.logits) });
    }
    if params.is_greedy() || max == f32::INFINITY {
        return Ok(row.first(panel, max));
    }
    let scaled = Scaled::new(max, params);
    let chosen = match ask {
        Ask::Noise { .. } => row.draw(simd, panel, scaled, params, position, None).map(|c| c.token),
        Ask::Max => row.top(params.top_k_of(vocab), scaled).map(|kept| {
            let kept = if params.top_p < 1.0 { cut_share(kept, params.top_p) } else { kept };
            scaled.draw(kept, params, position)
        }),
        Ask::Mass { .. } => {
            let missing = f64::from(params.top_p) * row.mass(scaled);
            match row.nucleus(missing, scaled) {
                Some(kept) => Some(scaled.draw(kept, params, position)),
                None => row.draw_and_check(simd, panel, scaled, params, position, missing),
            }
        }
    };
    match chosen {
        Some(token) => Ok(token),
        None => choose_penalized(row.logits, params, position),
    }
}

/// The likeliest of sorted candidates that hold the share `top_p` of their own mass.
fn cut_share(kept: Vec<Candidate>, top_p: f32) -> Vec<Candidate> {
    let missing = f64::from(top_p) * mass(&kept);
    cut(kept, missing)
}

impl Surveyed<'_> {
    fn panel(&self, panel: usize) -> &[f32] {
        &self.logits[panel * PANEL..self.logits.len().min((panel + 1) * PANEL)]
    }

    /// The first token of a panel that has this logit.
    fn first(&self, panel: usize, logit: f32) -> u32 {
        let at = self.panel(panel).iter().position(|&l| l == logit).expect("the maximum of the panel");
        (panel * PANEL + at) as u32
    }

    /// Applies penalties and biases, and surveys the panels that they changed once more.
    fn change(
        &mut self,
        simd: Simd,
        ask: Ask,
        params: &SamplingParams,
        history: History<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), SampleError> {
        if !params.penalizes() && params.logit_bias.is_empty() {
            return Ok(());
        }
        let Scratch { uses, stale } = scratch;
        stale.clear();
        stale.resize(self.max.len(), false);
        penalize(self.logits, params, history, uses, |token| stale[token as usize / PANEL] = true);
        for &(token, bias) in &params.logit_bias {
            let vocab = self.logits.len();
            *self.logits.get_mut(token as usize).ok_or(SampleError::BiasToken { token, vocab })? += bias;
            stale[token as usize / PANEL] = true;
        }
        for panel in stale.iter().enumerate().filter_map(|(panel, stale)| stale.then_some(panel)) {
            let found = survey(simd, ask, (panel * PANEL) as u32, self.panel(panel));
            (self.max[panel], self.more[panel]) = (found.max, found.more);
        }
        Ok(())
    }

    /// Draws from all tokens above the floor, or of those from the ones likelier than `than`; `None` where the bounds
    /// of the panels cannot be trusted.
    ///
    /// A bound was computed from `logit * scale` without subtracting the maximum. Both roundings together are below
    /// 2^-21 of the larger product, for a token within 30 of the maximum; one farther away has no chance, because
    /// noise lies between -3.2 and 22.9 and the maximum itself takes part.
    fn draw(
        &self,
        simd: Simd,
        likeliest: usize,
        scaled: Scaled,
        params: &SamplingParams,
        position: u64,
        than: Option<Candidate>,
    ) -> Option<Candidate> {
        let lifted = scaled.max * scaled.scale;
        if !lifted.is_finite() || !scaled.scale.is_finite() {
            return None;
        }
        let slack = 1e-3 + 2e-6 * (f64::from(lifted.abs()) + 30.0);
        let mut draw = Draw::new(params.seed, position);
        let take = |draw: &mut Draw, panel: usize| {
            let first = (panel * PANEL) as u32;
            let all = (first..).zip(self.panel(panel)).map(|(token, &l)| Candidate { token, logit: scaled.of(l) });
            let all = all.filter(|c| c.logit >= scaled.floor);
            all.filter(|c| than.is_none_or(|t| likelier(c, &t).is_lt())).for_each(|c| draw.offer(c));
        };
        // The panels that probably and certainly have something to offer.
        let loudest = ops::argmax(simd, self.more);
        take(&mut draw, loudest);
        take(&mut draw, likeliest);
        let floor = than.map_or(scaled.floor, |t| t.logit.max(scaled.floor));
        for (panel, (&more, &max)) in self.more.iter().zip(self.max.iter()).enumerate() {
            let bound = f64::from(more) - f64::from(lifted) + slack;
            if bound >= draw.sum() && panel != loudest && panel != likeliest && scaled.of(max) >= floor {
                take(&mut draw, panel);
            }
        }
        let token = draw.token();
        Some(Candidate { token, logit: scaled.of(self.logits[token as usize]) })
    }

    /// The `count` likeliest tokens, scaled, likeliest first; `None` where there are too few panels to tell.
    ///
    /// The `count` largest maxima belong to that many tokens, so nothing below the last of them is wanted. They are
    /// compared scaled, because scaling can make different logits equal.
    fn top(&self, count: usize, scaled: Scaled) -> Option<Vec<Candidate>> {
        if count > self.max.len() {
            return None;
        }
        let leaders = likeliest(self.max, count);
        let full = leaders.len() == count;
        let threshold = if full { scaled.of(leaders[count - 1].logit) } else { f32::NEG_INFINITY };
        let mut kept = Vec::with_capacity(4 * count);
        for (panel, _) in self.max.iter().enumerate().filter(|&(_, &max)| scaled.of(max) >= threshold) {
            for (token, &logit) in ((panel * PANEL) as u32..).zip(self.panel(panel)) {
                let logit = scaled.of(logit);
                if logit >= threshold && logit > f32::NEG_INFINITY {
                    kept.push(Candidate { token, logit });
                }
            }
        }
        if kept.len() > count {
            kept.select_nth_unstable_by(count - 1, likelier);
            kept.truncate(count);
        }
        kept.sort_unstable_by(likelier);
        Some(kept)
    }

    /// The mass of all tokens, within [`TOLERANCE`].
    fn mass(&self, scaled: Scaled) -> f64 {
        let shares = self.max.iter().zip(self.more.iter()).map(|(&max, &more)| match scaled.of(max) {
            // All panels of a vocabulary that is this far away hold less than the tolerance.
            far if far < -40.0 => 0.0,
            near => f64::from(more) * f64::from(near.exp()),
        });
        shares.sum()
    }

    /// The likeliest tokens that hold the mass `missing`, itself within [`TOLERANCE`]; `None` if they are many, or if
    /// it is too close to tell.
    fn nucleus(&self, missing: f64, scaled: Scaled) -> Option<Vec<Candidate>> {
        let mut kept = self.top(FEW, scaled)?;
        let mut held = 0.0;
        for i in 0..kept.len() {
            held += f64::from(kept[i].logit.exp());
            // What was held before is less than is missing by any reckoning.
            if held >= missing * (1.0 - TOLERANCE) {
                kept.truncate(i + 1);
                return (held >= missing * (1.0 + TOLERANCE)).then_some(kept);
            }
        }
        None
    }

    /// Draws from the nucleus without finding it: a token belongs to it if the likelier ones hold less than `missing`.
    /// One that does not rules out every token that is less likely. `None` if it is too close to tell.
    fn draw_and_check(
        &mut self,
        simd: Simd,
        likeliest: usize,
        scaled: Scaled,
        params: &SamplingParams,
        position: u64,
        missing: f64,
    ) -> Option<u32> {
        let ask = Ask::Noise { scale: scaled.scale, seed: params.seed, position };
        for panel in 0..self.max.len() {
            self.more[panel] = survey(simd, ask, (panel * PANEL) as u32, self.panel(panel)).more;
        }
        let mut than = None;
        for _ in 0..DRAWS {
            let drawn = self.draw(simd, likeliest, scaled, params, position, than)?;
            let (mut least, mut most) = (0.0, -f64::from(drawn.logit.exp()));
            for (panel, _) in self.max.iter().enumerate().filter(|&(_, &max)| scaled.of(max) >= drawn.logit) {
                let held = mass_beyond(simd, self.panel(panel), scaled.max, scaled.scale, drawn.logit);
                least += f64::from(held.0);
                most += f64::from(held.1);
            }
            if most * (1.0 + TOLERANCE) < missing * (1.0 - TOLERANCE) {
                return Some(drawn.token);
            }
            if least * (1.0 - TOLERANCE) <= missing * (1.0 + TOLERANCE) {
                return None;
            }
            than = Some(drawn);
        }
        None
    }
}

/// Tokens among which the nucleus is looked for first.
const FEW: usize = 64;

/// Draws that may miss the nucleus. Each misses with the probability that it leaves out; where that is most of all,
/// the nucleus is small and was found.
const DRAWS: usize = 32;

/// Relative error of the mass of all tokens, from above: of what is summed here against the sum that `nucleus`
/// takes. Arguments of the exponentials are rounded twice in each, by at most 2^-23 of at most 25 (what lies
/// farther away is lost in the rest), the exponentials by 2^-22, and sums of 64 by 2^-20.
const TOLERANCE: f64 = 4e-5;

#[cfg(test)]
pub(super) mod tests {
    use super::{super::sample, *};

    /// A small generator: the tests need variety, not quality.
    pub struct Dice(pub u64);

    impl Dice {
        pub fn roll(&mut self, below: usize) -> usize {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) as usize % below
        }

        fn bell(&mut self) -> f32 {
            (0..6).map(|_| self.roll(1 << 20) as f32 / (1 << 20) as f32 - 0.5).sum()
        }

        pub fn of<T: Clone>(&mut self, choices: &[T]) -> T {
            choices[self.roll(choices.len())].clone()
        }
    }

    /// Logits as models give them, and as no model should.
    pub fn row(dice: &mut Dice) -> Vec<f32> {
        let len = dice.of(&[1, 2, 63, 64, 65, 300, 1000, 5000, 9000]);
        let size = dice.of(&[0.0, 0.1, 1.0, 3.0, 8.0, 1e4, 1e37]);
        let shift = dice.of(&[0.0, -20.0, 500.0]);
        let mut row: Vec<f32> = (0..len).map(|_| dice.bell() * size + shift).collect();
        match dice.roll(8) {
            0 => row.iter_mut().for_each(|l| *l = l.round()), // ties
            1 => (0..len / 3).for_each(|_| row[dice.roll(len)] = f32::NAN),
            2 => (0..len / 2).for_each(|_| row[dice.roll(len)] = f32::NEG_INFINITY),
            3 => row[dice.roll(len)] = dice.of(&[20.0, 1e3, 3e38, f32::INFINITY]),
            4 => (0..len).filter(|&i| i != len / 2).for_each(|i| row[i] = dice.of(&[f32::NAN, f32::NEG_INFINITY])),
            5 => row.fill(dice.of(&[f32::NAN, f32::NEG_INFINITY, 0.0, -0.0])),
            _ => {}
        }
        row
    }

    pub fn params(dice: &mut Dice, vocab: usize) -> SamplingParams {
        let mut p = SamplingParams {
            temperature: dice.of(&[0.0, 1.0, 1.0, 0.8, 0.1, 2e-5, 30.0]),
            top_k: dice.of(&[0, 0, 1, 2, 5, 40, 64, 1000]),
            top_p: dice.of(&[1.0, 1.0, 0.95, 0.5, 0.01, 0.999_99]),
            min_p: dice.of(&[0.0, 0.0, 0.05, 1.0]),
            seed: dice.roll(1 << 20) as u64,
            ..SamplingParams::default()
        };
        if dice.roll(3) == 0 {
            p.repetition_penalty = dice.of(&[1.0, 1.1, 0.5]);
            p.presence_penalty = dice.of(&[0.0, 0.5]);
            p.frequency_penalty = dice.of(&[0.0, -0.2]);
            p.penalty_last_n = dice.of(&[None, Some(3)]);
        }
        if dice.roll(4) == 0 {
            let bias = |dice: &mut Dice| (dice.roll(vocab + 1) as u32, dice.of(&[1.0, -5.0, f32::NEG_INFINITY, 100.0]));
            p.logit_bias = (0..4).map(|_| bias(dice)).collect();
        }
        p
    }

    fn surveyed(simd: Simd, ask: Ask, logits: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let panels = logits.chunks(PANEL).enumerate();
        panels.map(|(i, panel)| survey(simd, ask, (i * PANEL) as u32, panel)).map(|f| (f.max, f.more)).unzip()
    }

    #[test]
    fn surveyed_rows_give_what_plain_rows_give() {
        let (mut dice, mut scratch) = (Dice(3), Scratch::default());
        let (mut chosen, mut refused) = (0, 0);
        for round in 0..6000 {
            let logits = row(&mut dice);
            let p = params(&mut dice, logits.len());
            let tokens: Vec<u32> = (0..dice.roll(40)).map(|_| dice.roll(logits.len() + 2) as u32).collect();
            let history = History { tokens: &tokens, prompt_len: tokens.len() / 2 };
            let position = dice.roll(1000) as u64;
            let expected = sample(&mut logits.clone(), &p, history, position, None).map(|s| s.token);
            // Scratch grows with the vocabulary, and rows of other lengths follow.
            scratch.uses.clear();
            for simd in Simd::available() {
                let Need::Surveyed(ask) = Need::of(&p, logits.len(), position, None) else { continue };
                let (mut max, mut more) = surveyed(simd, ask, &logits);
                let mut logits = logits.clone();
                let row = Surveyed { logits: &mut logits, max: &mut max, more: &mut more };
                let got = choose_surveyed(simd, ask, row, &p, history, position, &mut scratch);
                assert_eq!(got, expected, "round {round}, {ask:?}, {p:?}");
            }
            match expected {
                Ok(_) => chosen += 1,
                Err(_) => refused += 1,
            }
        }
        assert!(chosen > 2000 && refused > 200, "{chosen} {refused}");
    }

    #[test]
    fn ordinary_rows_are_not_read_whole() {
        let mut dice = Dice(8);
        let mut logits: Vec<f32> = (0..50_000).map(|_| dice.bell() * 4.0).collect();
        (0..20).for_each(|i| logits[dice.roll(50_000)] = 10.0 + i as f32 * 0.3);
        for p in [
            SamplingParams { top_k: 40, ..SamplingParams::default() },
            SamplingParams { top_p: 0.9, temperature: 0.7, ..SamplingParams::default() },
            SamplingParams { min_p: 0.01, ..SamplingParams::default() },
        ] {
            let Need::Surveyed(ask) = Need::of(&p, logits.len(), 5, None) else { panic!("{p:?}") };
            let (mut max, mut more) = surveyed(Simd::PORTABLE, ask, &logits);
            let best = ops::argmax(Simd::PORTABLE, &max);
            let scaled = Scaled::new(max[best], &p);
            let row = Surveyed { logits: &mut logits, max: &mut max, more: &mut more };
            let found = match ask {
                Ask::Max => row.top(40, scaled).map(|kept| kept.len()),
                Ask::Mass { .. } => {
                    let missing = f64::from(p.top_p) * row.mass(scaled);
                    row.nucleus(missing, scaled).map(|kept| kept.len())
                }
                Ask::Noise { .. } => row.draw(Simd::PORTABLE, best, scaled, &p, 5, None).map(|c| c.token as usize),
            };
            assert!(found.is_some(), "{p:?}");
        }
    }

    #[test]
    fn a_wide_nucleus_is_not_built() {
        let mut dice = Dice(9);
        let logits: Vec<f32> = (0..50_000).map(|_| dice.bell() * 2.0).collect();
        let (mut told, mut rounds) = (0, 0);
        for top_p in [0.5, 0.95] {
            for position in 0..20 {
                let p = SamplingParams { top_p, ..SamplingParams::default() };
                let (mut max, mut more) = surveyed(Simd::PORTABLE, Ask::Mass { scale: 1.0 }, &logits);
                let best = ops::argmax(Simd::PORTABLE, &max);
                let scaled = Scaled::new(max[best], &p);
                let mut copy = logits.clone();
                let mut row = Surveyed { logits: &mut copy, max: &mut max, more: &mut more };
                let missing = f64::from(top_p) * row.mass(scaled);
                assert!(row.nucleus(missing, scaled).is_none());
                let token = row.draw_and_check(Simd::PORTABLE, best, scaled, &p, position, missing);
                rounds += 1;
                told += usize::from(token.is_some());
                let plain = sample(&mut logits.clone(), &p, History { tokens: &[], prompt_len: 0 }, position, None);
                assert!(token.is_none_or(|token| token == plain.unwrap().token), "{top_p} {position}");
            }
        }
        assert!(told > rounds * 9 / 10, "{told} of {rounds}");
    }

    #[test]
    fn needs_follow_the_parameters() {
        let greedy = SamplingParams::greedy();
        assert_eq!(Need::of(&greedy, 100, 7, None), Need::Best);
        assert_eq!(Need::of(&greedy, 100, 7, Some(0)), Need::Logits);
        for p in [
            SamplingParams { presence_penalty: 1.0, ..greedy.clone() },
            SamplingParams { logit_bias: vec![(1, 1.0)], ..greedy },
            SamplingParams { top_k: 99, ..SamplingParams::default() },
        ] {
            assert_eq!(Need::of(&p, 100, 7, None), Need::Surveyed(Ask::Max), "{p:?}");
        }
        let p = SamplingParams { temperature: 0.5, seed: 9, top_k: 100, ..SamplingParams::default() };
        let noise = Ask::Noise { scale: 2.0, seed: 9, position: 7 };
        assert_eq!(Need::of(&p, 100, 7, None), Need::Surveyed(noise));
        let p = SamplingParams { top_p: 0.5, ..p };
        assert_eq!(Need::of(&p, 100, 7, None), Need::Surveyed(Ask::Mass { scale: 2.0 }));
    }
}
