//! What a panel of logits holds, for a sampler that does not want to read the vocabulary again.
//!
//! The head computes 64 logits at a time. While they are at hand it notes their maximum and, where the request
//! draws, one number more; [`crate::sample`] then looks only at panels that can matter. The numbers are bounds
//! and approximations of known error, so the choice does not depend on them.

use quern_models::PANEL;

#[cfg(target_arch = "x86_64")]
use super::ops::Avx2;
use super::{
    lanes::{Lanes, Simd, exp, greatest, sum},
    ops::{Kind, Portable, on},
};
use crate::sample::philox16;

/// What is noted besides the maximum.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Ask {
    /// Nothing.
    Max,
    /// The largest `logit * scale + noise`, from above: less than 0.07 too much, unless one token is far ahead.
    Noise {
        /// One over the temperature.
        scale: f32,
        /// Of the request.
        seed: u64,
        /// Of the token that is drawn.
        position: u64,
    },
    /// The sum of `e^((logit - maximum) * scale)`.
    Mass {
        /// One over the temperature.
        scale: f32,
    },
}

/// What was noted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Found {
    /// The largest logit; NaN is passed over.
    pub max: f32,
    /// What [`Ask`] says, else 0.
    pub more: f32,
}

/// Surveys the panel that begins with token `first`, a multiple of 64; at most 64 logits.
pub fn survey(simd: Simd, ask: Ask, first: u32, logits: &[f32]) -> Found {
    let mut padded = [f32::NEG_INFINITY; PANEL];
    let panel: &[f32; PANEL] = match logits.try_into() {
        Ok(panel) => panel,
        Err(_) => {
            padded[..logits.len()].copy_from_slice(logits);
            &padded
        }
    };
    on!(simd, survey_in(ask: Ask, first: u32, panel: &[f32; PANEL]) -> Found)
}

/// Of a panel of at most 64 logits the sums of `e^x` with `x = (logit - max) * scale`, over all `x` greater than
/// `than`, and over those and its equals.
pub fn mass_beyond(simd: Simd, logits: &[f32], max: f32, scale: f32, than: f32) -> (f32, f32) {
    on!(simd, mass_beyond_in(logits: &[f32], max: f32, scale: f32, than: f32) -> (f32, f32))
}

/// # Safety
/// The CPU can run `V`.
#[inline(always)]
unsafe fn mass_beyond_in<V: Lanes>(logits: &[f32], max: f32, scale: f32, than: f32) -> (f32, f32) {
    let (lanes, tail) = logits.as_chunks::<8>();
    let mut rest = [f32::NEG_INFINITY; 8];
    rest[..tail.len()].copy_from_slice(tail);
    // SAFETY: the caller's promise; `load` reads the 8 elements of a chunk.
    unsafe {
        let (none, least) = (V::splat(0.0), V::splat(f32::NEG_INFINITY));
        let (max, scale, than) = (V::splat(max), V::splat(scale), V::splat(than));
        let (mut greater, mut all) = (none, none);
        for x in lanes.iter().chain([&rest]) {
            let x = V::load(x.as_ptr()).max(least).sub(max).mul(scale);
            let share = exp(x);
            // The sign of a difference of equals is positive.
            greater = greater.add(than.sub(x).select(share, none));
            all = all.add(x.sub(than).select(none, share));
        }
        (sum(greater), sum(all))
    }
}

/// # Safety
/// The CPU can run `V`.
#[inline(always)]
unsafe fn survey_in<V: Lanes>(ask: Ask, first: u32, panel: &[f32; PANEL]) -> Found {
    let (lanes, _) = panel.as_chunks::<8>();
    // SAFETY: the caller's promise; `load` reads the 8 elements of a chunk.
    unsafe {
        // NaN gives way to the second operand.
        let max = greatest(lanes.iter().fold(V::splat(f32::NEG_INFINITY), |m, x| V::load(x.as_ptr()).max(m)));
        let more = match ask {
            Ask::Max => 0.0,
            Ask::Noise { scale, seed, position } => loudest::<V>(panel, first, scale, seed, position),
            Ask::Mass { .. } if max == f32::NEG_INFINITY => 0.0,
            Ask::Mass { scale } => {
                let (least, max, scale) = (V::splat(f32::NEG_INFINITY), V::splat(max), V::splat(scale));
                let share = |x: &[f32; 8]| exp(V::load(x.as_ptr()).max(least).sub(max).mul(scale));
                sum(lanes.iter().fold(V::splat(0.0), |s, x| s.add(share(x))))
            }
        };
        Found { max, more }
    }
}

/// Upper bound of the largest `logit * scale + noise`.
///
/// The noise is `-ln(-ln(u))` with `u = (x + 0.5) / 2^32` for a random word `x`. With `w = 1 - u`, four terms of
/// the series of `-ln(1 - w)` are below it, and the chords of the logarithm between powers of two, which are what
/// the bits of a float read as an integer are, lie below the curve by at most 0.06 (natural units).
///
/// # Safety
/// The CPU can run `V`.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
unsafe fn loudest<V: Lanes>(panel: &[f32; PANEL], first: u32, scale: f32, seed: u64, position: u64) -> f32 {
    let words = philox16(seed, position, first / 4);
    // In the order of the words. Three plain loops: compilers make vectors of them, but not of one.
    let mut logits = [[0.0; 16]; 4];
    for i in 0..16 {
        for j in 0..4 {
            logits[j][i] = panel[4 * i + j];
        }
    }
    let (words, logits) = (words.as_flattened(), logits.as_flattened());
    let mut sums = [0.0; PANEL];
    for i in 0..PANEL {
        sums[i] = logits[i] * scale + noise_bound(words[i]);
    }
    let (sums, _) = sums.as_chunks::<8>();
    // SAFETY: the caller's promise; `load` reads the 8 elements of a chunk.
    let best = unsafe {
        // NaN gives way to the second operand.
        sums.iter().fold(V::splat(f32::NEG_INFINITY), |m, x| V::load(x.as_ptr()).max(m))
    };
    greatest(best)
}

/// Upper bound of the noise of a word.
#[inline(always)]
fn noise_bound(x: u32) -> f32 {
    let w = ((!x >> 1) as i32 as f32 + 0.25) * (1.0 / (1u32 << 31) as f32);
    let y = w * (1.0 + w * (0.5 + w * (0.333_333_3 + w * 0.25)));
    let log2 = y.to_bits() as i32 as f32 * (1.0 / (1u32 << 23) as f32) - 127.0;
    -log2 * std::f32::consts::LN_2
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::gumbel;

    /// Panels of several kinds: ordinary, flat, with NaN and infinities, short, huge.
    fn panels() -> Vec<Vec<f32>> {
        let wave = |len: usize, size: f32| (0..len).map(|i| ((i * 7919) % 613) as f32 * size - 3.0).collect::<Vec<_>>();
        let mut odd = wave(64, 0.03);
        (odd[3], odd[17], odd[40]) = (f32::NAN, f32::NEG_INFINITY, f32::NAN);
        vec![wave(64, 0.02), wave(64, 0.0), odd, wave(1, 0.5), wave(37, 0.05), vec![f32::NAN; 64], wave(64, 1e30)]
    }

    #[test]
    fn maxima_are_exact() {
        for simd in Simd::available() {
            for panel in panels() {
                let max = panel.iter().copied().filter(|x| !x.is_nan()).fold(f32::NEG_INFINITY, f32::max);
                for ask in [Ask::Max, Ask::Mass { scale: 1.0 }, Ask::Noise { scale: 1.0, seed: 1, position: 2 }] {
                    assert_eq!(survey(simd, ask, 64, &panel).max, max, "{simd:?} {ask:?}");
                }
            }
        }
    }

    #[test]
    fn noise_is_bounded_from_above_and_closely() {
        for simd in Simd::available() {
            for (round, panel) in (0..400).flat_map(|round| panels().into_iter().take(5).map(move |p| (round, p))) {
                let (seed, position, first) =
                    ((u64::MAX / 3).wrapping_mul(round), (1 << 33) + round, round as u32 * 64);
                for scale in [1.0, 0.3, 20.0] {
                    let sums = panel.iter().zip(first..).filter(|(l, _)| !l.is_nan());
                    let sums = sums.map(|(&l, t)| f64::from(l) * f64::from(scale) + gumbel(seed, position, t));
                    let exact = sums.fold(f64::NEG_INFINITY, f64::max);
                    let got = f64::from(survey(simd, Ask::Noise { scale, seed, position }, first, &panel).more);
                    // Noise far below zero, which wins only where one token is all, is bounded less closely.
                    let close = if panel.len() == 64 && scale < 1.0 { 0.07 } else { 2.5 };
                    assert!(got >= exact - 1e-4 && got <= exact + close, "{simd:?} {got} {exact}");
                }
            }
            let nothing = survey(simd, Ask::Noise { scale: 1.0, seed: 0, position: 0 }, 0, &[f32::NAN; 64]);
            assert_eq!(nothing.more, f32::NEG_INFINITY);
        }
    }

    #[test]
    fn extreme_words_are_bounded() {
        let exact = |x: u32| -(-((f64::from(x) + 0.5) / 4_294_967_296.0).ln()).ln();
        for x in (0..2000).map(|i| u32::MAX - i).chain(0..2000).chain((0..100_000).map(|i| i * 42_949)) {
            assert!(f64::from(noise_bound(x)) >= exact(x) - 1e-4, "{x}: {} {}", noise_bound(x), exact(x));
        }
    }

    #[test]
    fn masses_beyond_a_logit_are_close() {
        for simd in Simd::available() {
            for panel in panels().into_iter().take(6) {
                let scaled = |l: f32| (l - 30.0) * 0.7;
                for than in panel.iter().copied().filter(|l| l.is_finite()).map(scaled).chain([-25.3, 0.0]) {
                    let (greater, all) = mass_beyond(simd, &panel, 30.0, 0.7, than);
                    let mass = |f: &dyn Fn(f32) -> bool| -> f64 {
                        panel
                            .iter()
                            .map(|&l| scaled(l))
                            .filter(|&x| f(x))
                            .map(|x| f64::from(x.clamp(-87.0, 88.0)).exp())
                            .sum()
                    };
                    for (got, exact) in [(greater, mass(&|x| x > than)), (all, mass(&|x| x >= than))] {
                        assert!((f64::from(got) - exact).abs() <= 1e-5 * exact, "{simd:?} {than} {got} {exact}");
                    }
                }
            }
        }
    }

    #[test]
    fn masses_are_close() {
        for simd in Simd::available() {
            for panel in panels() {
                for scale in [1.0, 0.1, 7.0] {
                    let got = survey(simd, Ask::Mass { scale }, 0, &panel);
                    let terms = panel.iter().filter(|l| !l.is_nan() && got.max > f32::NEG_INFINITY);
                    let exact: f64 = terms.map(|&l| (f64::from(l - got.max) * f64::from(scale)).exp()).sum();
                    assert!((f64::from(got.more) - exact).abs() <= 1e-5 * exact, "{simd:?} {got:?} {exact}");
                }
            }
        }
    }
}
