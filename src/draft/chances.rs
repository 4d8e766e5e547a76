//! How often guesses turn out right, by where they come from.
//!
//! What stood twice with the last twenty tokens the same goes on the same more often than what has one token in
//! common; by how much depends on the text. So there is a rate for each source and each length of what is the same,
//! counted over all requests, and from which each request's own counts soon take over.

/// What made a guess.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The text itself.
    Own,
    /// Earlier answers.
    Others,
    /// The grammar.
    Grammar,
    /// A small model or a head.
    Model,
    /// The caller.
    Given,
    /// A head that says how sure it is.
    Sure,
}

impl Source {
    /// A small model or a head.
    fn is_written(self) -> bool {
        matches!(self, Source::Model | Source::Sure)
    }
}

/// A source, and how sure it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    source: Source,
    bucket: u8,
}

const SOURCES: usize = 6;

/// Upper ends of the ranges of lengths that are told apart.
const LENGTHS: [usize; 9] = [1, 2, 3, 4, 6, 8, 12, 20, 32];

const BUCKETS: usize = LENGTHS.len() + 1;

/// Upper ends of the ranges of how sure a head is, and what is expected in each.
const SURE: [f64; BUCKETS - 1] = [0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95];
const SO_OFTEN: [f64; BUCKETS] = [0.01, 0.035, 0.075, 0.15, 0.27, 0.42, 0.6, 0.78, 0.9, 0.97];

/// How often a head that is so sure is right.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sure([f64; BUCKETS]);

impl Sure {
    /// The chance of a guess that the head gives such a share.
    pub fn chance(&self, share: f64) -> f64 {
        self.0[Place::sure(share).bucket as usize]
    }
}

impl Place {
    /// Whether a small model or a head wrote it.
    pub fn is_written(&self) -> bool {
        self.source == Source::Model
    }

    /// A guess of a source, after so many tokens that are the same (guessed ones among them), or, of a grammar or a model,
    /// the so-and-so-many-th of a step.
    pub fn new(source: Source, same: usize) -> Place {
        Place { source, bucket: LENGTHS.partition_point(|&most| most < same) as u8 }
    }

    /// A guess of which a head is so sure, from 0 to 1, if all before it are right.
    pub fn sure(share: f64) -> Place {
        Place { source: Source::Sure, bucket: SURE.partition_point(|&most| most < share) as u8 }
    }

    /// Whether it is of a head that says how sure it is.
    pub fn is_sure(self) -> bool {
        self.source == Source::Sure
    }

    fn index(self) -> usize {
        self.source as usize * BUCKETS + self.bucket as usize
    }

    /// What is expected before anything was counted.
    fn prior(self) -> f64 {
        const SAME: [f64; BUCKETS] = [0.15, 0.3, 0.45, 0.55, 0.65, 0.72, 0.8, 0.85, 0.9, 0.93];
        match self.source {
            Source::Own | Source::Others => SAME[self.bucket as usize],
            Source::Grammar => 0.9,
            Source::Model | Source::Given => 0.6,
            Source::Sure => SO_OFTEN[self.bucket as usize],
        }
    }
}

/// Guesses that were right, of those that were tried.
#[derive(Debug, Clone, Copy, Default)]
struct Rate {
    right: f64,
    tried: f64,
}

/// Counts of one request, or of all.
#[derive(Debug, Clone)]
pub struct Chances {
    rates: [Rate; SOURCES * BUCKETS],
    /// As many tries as the estimate that is started from counts for.
    weight: f64,
    /// What is left of older counts at each try.
    keeps: f64,
    /// The same of what a small model or a head writes: how often that is right depends less on the text than on the
    /// head, and whether to ask it at all depends on this alone, so that chance should not have much to say.
    written: (f64, f64),
}

impl Chances {
    /// Counts of all requests.
    pub fn of_all() -> Chances {
        Chances { rates: [Rate::default(); SOURCES * BUCKETS], weight: 10.0, keeps: 0.998, written: (10.0, 0.998) }
    }

    /// Counts of one request, whose text may change its kind.
    pub fn of_one() -> Chances {
        Chances { rates: [Rate::default(); SOURCES * BUCKETS], weight: 4.0, keeps: 0.95, written: (16.0, 0.98) }
    }

    /// A guess was right, or not.
    pub fn note(&mut self, place: Place, right: bool) {
        let keeps = if place.source.is_written() { self.written.1 } else { self.keeps };
        let rate = &mut self.rates[place.index()];
        rate.right = rate.right * keeps + f64::from(right);
        rate.tried = rate.tried * keeps + 1.0;
    }

    /// Forgets a part of what was counted, so that what has never been right lately is tried again.
    pub fn fade(&mut self) {
        for rate in &mut self.rates {
            rate.right *= 0.9;
            rate.tried *= 0.9;
        }
    }

    /// A small model or a head was not asked: what is known of it is that much older.
    pub fn rest(&mut self) {
        let keeps = 1.0 - (1.0 - self.written.1) / 2.0;
        for source in [Source::Model, Source::Sure] {
            for rate in &mut self.rates[source as usize * BUCKETS..][..BUCKETS] {
                rate.right *= keeps;
                rate.tried *= keeps;
            }
        }
    }

    /// How likely a guess is right if all before it are.
    pub fn of(&self, place: Place, all: &Chances) -> f64 {
        let start = all.or(place, place.prior());
        self.or(place, start)
    }

    /// How often heads are right, by how sure they are.
    pub fn sure(&self, all: &Chances) -> Sure {
        Sure(std::array::from_fn(|bucket| self.of(Place { source: Source::Sure, bucket: bucket as u8 }, all)))
    }

    fn or(&self, place: Place, start: f64) -> f64 {
        let rate = self.rates[place.index()];
        let weight = if place.source.is_written() { self.written.0 } else { self.weight };
        (rate.right + weight * start) / (rate.tried + weight)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_tell_lengths_apart() {
        let buckets: Vec<u8> = (1..40).map(|n| Place::new(Source::Own, n).bucket).collect();
        assert!(buckets.is_sorted() && buckets[0] == 0 && buckets[38] as usize == BUCKETS - 1);
        let mut seen = std::collections::BTreeSet::new();
        for source in [Source::Own, Source::Others, Source::Grammar, Source::Model, Source::Given] {
            for n in LENGTHS.into_iter().chain([99]) {
                assert!(seen.insert(Place::new(source, n).index()));
            }
        }
        let shares = SO_OFTEN.map(Place::sure);
        assert!(shares.iter().enumerate().all(|(i, place)| place.bucket as usize == i && seen.insert(place.index())));
        assert_eq!(seen.last(), Some(&(SOURCES * BUCKETS - 1)));
        assert_eq!([Place::sure(0.0).bucket, Place::sure(1.0).bucket], [0, 9]);
    }

    #[test]
    fn counts_take_over() {
        let place = Place::new(Source::Own, 2);
        let (mut one, mut all) = (Chances::of_one(), Chances::of_all());
        assert_eq!(one.of(place, &all), 0.3);
        (0..100).for_each(|_| all.note(place, true));
        assert!(one.of(place, &all) > 0.9, "others' texts say so");
        assert_eq!(one.of(Place::new(Source::Own, 3), &all), 0.45, "of this place only");
        assert_eq!(one.sure(&all).chance(0.6), 0.6);
        (0..100).for_each(|_| all.note(Place::sure(0.6), false));
        assert!(one.sure(&all).chance(0.55) < 0.1 && one.sure(&all).chance(0.75) == 0.78);
        (0..30).for_each(|_| one.note(place, false));
        assert!(one.of(place, &all) < 0.25, "this one's says otherwise");
        let low = all.of(place, &Chances::of_all());
        (0..30).for_each(|_| all.fade());
        assert!(all.of(place, &Chances::of_all()) < low, "and is forgotten");
    }
}
