//! The sampler's noise: Gumbel variates from Philox4x32-10, keyed by seed, position and token.
//!
//! Definition (stable: texts of past versions depend on it). Philox4x32-10 (Salmon et al., SC11)
//! with key = (low, high half of the seed) and counter = (token / 4, low, high half of the position,
//! 0) gives four words; word `token % 4` is `x`. Then `u = (x + 0.5) / 2^32`, in f64, lies strictly
//! between 0 and 1, and the noise is `-ln(-ln(u))`.

use super::Candidate;

/// The Gumbel noise of one token.
pub fn gumbel(seed: u64, position: u64, token: u32) -> f64 {
    gumbel_of(philox(seed, position, token / 4)[token as usize % 4])
}

/// `argmax(logit + noise)`; of equal sums the lower token wins.
///
/// Candidates must not be empty. Hashing is cheap and logarithms are not, so a candidate's noise is
/// computed only where a bound leaves it a chance; the result is that of the plain argmax.
pub(super) fn draw(candidates: impl Iterator<Item = Candidate>, seed: u64, position: u64) -> u32 {
    let mut best = (0, f64::NEG_INFINITY); // (token, sum)
    let mut group = u32::MAX; // token / 16, which is never u32::MAX
    let mut words = [[0; 4]; 4];
    for Candidate { token, logit } in candidates {
        if group != token / 16 {
            group = token / 16;
            // Four at a time: a single one waits for its own multiplications.
            words = [0, 1, 2, 3].map(|block| philox(seed, position, group * 4 + block));
        }
        let x = words[token as usize / 4 % 4][token as usize % 4];
        let logit = f64::from(logit);
        if beyond_hope(x, logit - best.1) {
            continue;
        }
        let sum = logit + gumbel_of(x);
        if sum > best.1 || (sum == best.1 && token < best.0) {
            best = (token, sum);
        }
    }
    best.0
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

/// Ten rounds of Philox4x32.
fn philox(seed: u64, position: u64, block: u32) -> [u32; 4] {
    philox4x32_10([block, position as u32, (position >> 32) as u32, 0], [seed as u32, (seed >> 32) as u32])
}

fn philox4x32_10(mut c: [u32; 4], mut k: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let a = u64::from(c[0]) * 0xD251_1F53;
        let b = u64::from(c[2]) * 0xCD9E_8D57;
        c = [(b >> 32) as u32 ^ c[1] ^ k[0], b as u32, (a >> 32) as u32 ^ c[3] ^ k[1], a as u32];
        k = [k[0].wrapping_add(0x9E37_79B9), k[1].wrapping_add(0xBB67_AE85)];
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
            assert_eq!(draw(all, 5, position), plain, "position {position}");
        }
    }
}
