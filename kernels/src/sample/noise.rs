//! The sampler's noise: Gumbel variates from Philox4x32-10, keyed by seed, position and token.
//!
//! Definition (stable: texts of past versions depend on it). Philox4x32-10 (Salmon et al., SC11)
//! with key = (low, high half of the seed) and counter = (token / 4, low, high half of the position,
//! 0) gives four words; word `token % 4` is `x`. Then `u = (x + 0.5) / 2^32`, in f64, lies strictly
//! between 0 and 1, and the noise is `-ln(-ln(u))`.
//!
//! Speculation by rejection needs two more numbers per position and sibling, which must have nothing to do with the noise
//! of its tokens: the same function with a last counter word of 1 (`uniforms`). Philox permutes its counters, so no
//! two streams ever share a block.

use super::Candidate;

/// The Gumbel noise of one token.
pub fn gumbel(seed: u64, position: u64, token: u32) -> f64 {
    gumbel_of(philox(seed, position, token / 4)[token as usize % 4])
}

/// Two numbers in [0, 1) of a position and one of its guesses (0 where there is one), independent of each other, of those
/// of its siblings, and of the Gumbel noise of all its tokens.
///
/// Definition (stable, as above): the block of counter (sibling, low, high half of the position, 1); the first number is
/// the upper 53 bits of word 0 (upper half) and word 1, over 2^53, the second that of words 2 and 3.
pub(super) fn uniforms(seed: u64, position: u64, sibling: u32) -> [f64; 2] {
    let counter = [sibling, position as u32, (position >> 32) as u32, 1];
    let words = philox4x32_10(counter, [seed as u32, (seed >> 32) as u32]).map(u64::from);
    [words[0] << 32 | words[1], words[2] << 32 | words[3]].map(|x| (x >> 11) as f64 * (1.0 / (1u64 << 53) as f64))
}

/// `argmax(logit + noise)` over candidates offered one by one, in any order; of equal sums the lower token wins.
///
/// Hashing is cheap and logarithms are not, so a candidate's noise is computed only where a bound leaves it a
/// chance; the result is that of the plain argmax.
pub(super) struct Draw {
    seed: u64,
    position: u64,
    /// Token and sum.
    best: (u32, f64),
    /// token / 16 of the words, which is never u32::MAX.
    group: u32,
    words: [[u32; 4]; 4],
}

impl Draw {
    pub fn new(seed: u64, position: u64) -> Draw {
        Draw { seed, position, best: (0, f64::NEG_INFINITY), group: u32::MAX, words: [[0; 4]; 4] }
    }

    /// The winner so far; 0 if there was no candidate.
    pub fn token(&self) -> u32 {
        self.best.0
    }

    /// The winner's logit and noise.
    pub fn sum(&self) -> f64 {
        self.best.1
    }

    /// A candidate whose neighbours are probably offered next.
    pub fn offer(&mut self, Candidate { token, logit }: Candidate) {
        if self.group != token / 16 {
            self.group = token / 16;
            // Four at a time: a single one waits for its own multiplications.
            self.words = [0, 1, 2, 3].map(|block| philox(self.seed, self.position, self.group * 4 + block));
        }
        self.weigh(token, logit, self.words[token as usize / 4 % 4][token as usize % 4]);
    }

    /// A candidate from anywhere.
    pub fn offer_single(&mut self, Candidate { token, logit }: Candidate) {
        self.weigh(token, logit, philox(self.seed, self.position, token / 4)[token as usize % 4]);
    }

    #[inline]
    fn weigh(&mut self, token: u32, logit: f32, x: u32) {
        let logit = f64::from(logit);
        if beyond_hope(x, logit - self.best.1) {
            return;
        }
        let sum = logit + gumbel_of(x);
        if sum > self.best.1 || (sum == self.best.1 && token < self.best.0) {
            self.best = (token, sum);
        }
    }
}

/// [`Draw`] over candidates in the order of their tokens.
pub(super) fn draw(candidates: impl Iterator<Item = Candidate>, seed: u64, position: u64) -> u32 {
    let mut draw = Draw::new(seed, position);
    candidates.for_each(|c| draw.offer(c));
    draw.token()
}

/// True only where `ahead + gumbel_of(x) < 0` is certain.
///
/// `g = -ln(-ln(u)) >= -ahead` needs `-ln(u) <= e^ahead`, and `1 - u <= -ln(u)`, so `1 - u` above
/// `e^ahead` rules the token out. `2^y <= chord(y)`: between powers of two the chord, which is what
/// shifting `y` into the exponent and mantissa of a float computes, lies above the curve.
fn beyond_hope(x: u32, ahead: f64) -> bool {
    if ahead > -0.1 {
        return false;
    }
    let y = (ahead * std::f64::consts::LOG2_E).max(-120.0) as f32;
    let chord = f32::from_bits(((y + 127.0) * (1u32 << 23) as f32) as u32);
    let gap = (u32::MAX - x) as f32 * (1.0 / 4_294_967_296.0); // just below 1 - u
    gap > chord * 1.001 // the margin covers the rounding of y, gap and the shift
}

fn gumbel_of(x: u32) -> f64 {
    let u = (f64::from(x) + 0.5) * (1.0 / 4_294_967_296.0);
    -(-u.ln()).ln()
}

/// Words of sixteen blocks from `block` on: `[j][i]` is word `j` of block `block + i`.
///
/// Written for vectors: words lie in 64-bit lanes whose upper halves may hold anything, as a widening product reads
/// the lower ones only.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
pub(crate) fn philox16(seed: u64, position: u64, block: u32) -> [[u32; 16]; 4] {
    let keys: [[u64; 2]; 10] = std::array::from_fn(|round| {
        let key = |half: u64, step: u32| u64::from((half as u32).wrapping_add(step.wrapping_mul(round as u32)));
        [key(seed, STEPS[0]), key(seed >> 32, STEPS[1])]
    });
    let mut words = [[0; 16]; 4];
    for i in 0..16 {
        let mut c = [u64::from(block) + i as u64, position, position >> 32, 0];
        for k in &keys {
            let a = (c[0] & 0xFFFF_FFFF) * u64::from(FACTORS[0]);
            let b = (c[2] & 0xFFFF_FFFF) * u64::from(FACTORS[1]);
            c = [b >> 32 ^ c[1] ^ k[0], b, a >> 32 ^ c[3] ^ k[1], a];
        }
        for j in 0..4 {
            words[j][i] = c[j] as u32;
        }
    }
    words
}

/// Factors of Philox's rounds, and steps of its key.
const FACTORS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Ten rounds of Philox4x32.
fn philox(seed: u64, position: u64, block: u32) -> [u32; 4] {
    philox4x32_10([block, position as u32, (position >> 32) as u32, 0], [seed as u32, (seed >> 32) as u32])
}

fn philox4x32_10(mut c: [u32; 4], mut k: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let a = u64::from(c[0]) * u64::from(FACTORS[0]);
        let b = u64::from(c[2]) * u64::from(FACTORS[1]);
        c = [(b >> 32) as u32 ^ c[1] ^ k[0], b as u32, (a >> 32) as u32 ^ c[3] ^ k[1], a as u32];
        k = [k[0].wrapping_add(STEPS[0]), k[1].wrapping_add(STEPS[1])];
    }
    c
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_matches_the_published_answers() {
        // Random123 kat_vectors, philox4x32 10.
        assert_eq!(philox4x32_10([0; 4], [0; 2]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(philox4x32_10([u32::MAX; 4], [u32::MAX; 2]), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
        assert_eq!(
            philox4x32_10([0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344], [0xa4093822, 0x299f31d0]),
            [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]
        );
    }

    #[test]
    fn sixteen_blocks_are_sixteen_times_one() {
        for (seed, position, block) in [(0, 0, 0), (u64::MAX / 5, 1 << 40 | 77, 12_345), (3, u64::MAX, u32::MAX - 3)] {
            let all = philox16(seed, position, block);
            for i in 0..16u32 {
                let one = philox(seed, position, block.wrapping_add(i));
                assert_eq!([0, 1, 2, 3].map(|j| all[j][i as usize]), one, "{seed} {position} {block} {i}");
            }
        }
    }

    #[test]
    fn noise_is_stable() {
        // Computed in Python from the definition above; a change here changes every sampled text.
        let golden = [
            (0, 0, 0, 0.08482025111138775),
            (0, 0, 3, 0.6896917866196346),
            (42, 7, 49151, 0.5957723055891596),
            (u64::MAX, 1 << 40, 151_935, -0.3215332449542071),
        ];
        for (seed, position, token, expected) in golden {
            let got = gumbel(seed, position, token);
            assert!((got - expected).abs() < 1e-12, "{seed} {position} {token}: {got:?}, expected {expected:?}");
        }
    }

    #[test]
    fn uniforms_are_stable() {
        // Computed in Python from the definition.
        let golden = [
            (0, 0, [0.17893146841678087, 0.9881725862237817]),
            (42, 7, [0.7986419908794998, 0.41702824533643246]),
            (u64::MAX, 1 << 40, [0.2746054002744829, 0.026607914702132307]),
        ];
        for (seed, position, expected) in golden {
            assert_eq!(uniforms(seed, position, 0), expected, "{seed} {position}");
            let others = [uniforms(seed, position, 1), uniforms(seed, position, 2)].concat();
            assert!(others.iter().all(|u| (0.0..1.0).contains(u) && !expected.contains(u)), "siblings have their own");
        }
    }

    #[test]
    fn extreme_words_give_finite_noise() {
        for x in [0, 1, u32::MAX - 1, u32::MAX] {
            assert!(gumbel_of(x).is_finite(), "{x}");
        }
    }

    #[test]
    fn the_bound_never_discards_a_winner() {
        for step in 0..4000 {
            let ahead = -f64::from(step) * 0.0075;
            for x in [u32::MAX, u32::MAX - 1, u32::MAX - 7, u32::MAX - 1000, u32::MAX - 1_000_000]
                .into_iter()
                .chain((0..64).map(|i| philox(9, step as u64, i)[0]))
            {
                assert!(!(beyond_hope(x, ahead) && ahead + gumbel_of(x) >= 0.0), "x {x} ahead {ahead}");
            }
        }
    }

    #[test]
    fn draw_is_the_plain_argmax() {
        for position in 0..300 {
            let logits: Vec<f32> = (0..999).map(|t| -(gumbel(1, position, t) as f32).abs() * 3.0).collect();
            let all = logits.iter().enumerate().map(|(t, &logit)| Candidate { token: t as u32, logit });
            let plain = (0..999u32)
                .max_by(|&a, &b| {
                    let sum = |t: u32| f64::from(logits[t as usize]) + gumbel(5, position, t);
                    sum(a).total_cmp(&sum(b)).then(b.cmp(&a))
                })
                .unwrap();
            assert_eq!(draw(all.clone(), 5, position), plain, "position {position}");
            let mut single = Draw::new(5, position);
            all.rev().for_each(|c| single.offer_single(c));
            assert_eq!(single.token(), plain, "position {position}");
        }
    }
}
