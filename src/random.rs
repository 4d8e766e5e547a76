//! Numbers without a pattern: the same for the same seed, or foreseen by nobody.

use std::hash::{BuildHasher, RandomState};

/// splitmix64 (Steele, Lea and Flood, 2014).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// The numbers of a seed.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// Numbers of the same seed for another purpose.
    pub fn stream(seed: u64, stream: u64) -> Random {
        let mut random = Random(seed ^ stream.wrapping_mul(0xA076_1D64_78BD_642F));
        random.next();
        random
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// From 0 up to `limit`, which is not among them.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    /// Between 0 and 1, neither of them.
    pub fn fraction(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }
}

/// A number that nobody can foresee, another one at every call.
pub fn unforeseen() -> u64 {
    RandomState::new().hash_one(0)
}

/// A seed where none was asked for: unforeseen, and exact in every JSON reader.
pub fn seed() -> u64 {
    unforeseen() % (1 << 53)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_splitmix64() {
        // The first two of seed 1234567, from the authors' program.
        let mut random = Random::new(1_234_567);
        assert_eq!((random.next(), random.next()), (6_457_827_717_110_365_317, 3_203_168_211_198_807_973));
    }

    #[test]
    fn streams_and_seeds_differ() {
        assert_ne!(Random::stream(1, 0).next(), Random::stream(1, 1).next());
        assert_ne!(seed(), seed());
        assert!(seed() < 1 << 53);
    }
}
