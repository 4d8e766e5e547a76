//! How long steps take, and how many guesses are worth it.

/// Times of steps by their rows, relative to a step of one row: measured as steps are made, so that it is the machine
/// as it is now, with whatever else runs on it.
///
/// A time is `scale * ratio[rows]`. The scale follows every step quickly, because contexts grow and clocks change; a
/// ratio changes slowly, where steps of different sizes alternate. No ratio stays for good: a size that is not made any
/// more because it was found slow, once or long ago, comes back to what is supposed of it, and is tried again.
#[derive(Debug, Clone)]
pub struct Times {
    /// Seconds of a step of one row; 0 before the first step.
    scale: f64,
    /// Of steps of 1, 2 ... rows, where one was measured.
    ratios: [Option<Ratio>; KNOWN],
    /// Steps since the last one of one row.
    since: usize,
}

/// What is known of steps of so many rows.
#[derive(Debug, Clone, Copy)]
struct Ratio {
    ratio: f64,
    /// How many were measured, up to [`MANY`].
    count: f64,
    /// Steps of other sizes since the last one.
    idle: usize,
}

/// A ratio changes by the last one's share of so many measurements.
const MANY: f64 = 10.0;

/// A step counts as at most so many times as slow or as fast as expected: somebody may have had the machine meanwhile.
const AT_MOST: f64 = 1.5;

/// Ratios are measured while there was a step of one row not longer ago than so many steps: what changes in a run of
/// larger ones is the machine, as far as one can tell.
const LATELY: usize = 16;

/// A size that was not made for so many steps may be another one by now: so much is left, after each further step, of
/// what its ratio is above what is supposed.
const IDLE: usize = 256;
const KEPT: f64 = 0.998;

/// Rows up to which times are measured; beyond they go on as they went up to there.
const KNOWN: usize = 64;

/// What a row more costs, in steps of one row, where nothing was measured.
const GUESSED: f64 = 0.08;

impl Default for Times {
    fn default() -> Times {
        let mut ratios = [None; KNOWN];
        ratios[0] = Some(Ratio { ratio: 1.0, count: MANY, idle: 0 });
        Times { scale: 0.0, ratios, since: 0 }
    }
}

impl Times {
    /// A step of so many rows took so many seconds.
    pub fn note(&mut self, rows: usize, seconds: f64) {
        if !(1..=KNOWN).contains(&rows) || seconds.is_nan() || seconds <= 0.0 {
            return;
        }
        let ratio = self.ratio(rows);
        if self.scale == 0.0 {
            self.scale = seconds / ratio;
            return;
        }
        let seen = (seconds / self.scale).clamp(ratio / AT_MOST, ratio * AT_MOST);
        self.since = if rows == 1 { 0 } else { self.since + 1 };
        for (i, known) in self.ratios.iter_mut().enumerate().skip(1) {
            let supposed = 1.0 + GUESSED * i as f64;
            let Some(known) = known.as_mut().filter(|_| i + 1 != rows) else { continue };
            known.idle += 1;
            if known.idle > IDLE && known.ratio > supposed {
                known.ratio = supposed + (known.ratio - supposed) * KEPT;
            }
        }
        let mut follows = 1.0;
        if rows > 1 && self.since <= LATELY {
            let known = self.ratios[rows - 1].get_or_insert(Ratio { ratio, count: 0.0, idle: 0 });
            known.idle = 0;
            // What is supposed counts as one measurement.
            known.count = (known.count + 1.0).min(MANY);
            follows = (known.count - 1.0) / (MANY - 1.0);
            known.ratio += (seen - ratio) / (known.count + 1.0);
        }
        // What a size that is hardly known takes says little about the others.
        self.scale += (seen / self.ratio(rows) - 1.0) * self.scale * 0.2 * follows;
    }

    /// A time in steps of one row.
    pub fn relative(&self, seconds: f64) -> f64 {
        if self.scale > 0.0 { seconds / self.scale } else { 0.0 }
    }

    /// What a row more costs a step of so many rows, in steps of one row: the mean of the next eight, never below 0.
    pub fn slope(&self, rows: usize) -> f64 {
        const NEXT: usize = 8;
        ((self.ratio(rows + NEXT) - self.ratio(rows)) / NEXT as f64).max(0.0)
    }

    /// Time of a step of so many rows in steps of one row.
    pub fn ratio(&self, rows: usize) -> f64 {
        let rows = rows.max(1);
        let known = |rows: &usize| self.ratios[rows - 1].map(|known| (*rows as f64, known.ratio));
        let at = rows as f64;
        let Some(below) = (1..=rows.min(KNOWN)).rev().find_map(|rows| known(&rows)) else { return 1.0 };
        if below.0 == at {
            return below.1;
        }
        match (rows..=KNOWN).find_map(|rows| known(&rows)) {
            Some(above) => below.1 + (above.1 - below.1) * (at - below.0) / (above.0 - below.0),
            None => {
                // At least as steep as on average so far: many rows are never cheaper than few.
                let slope = if below.0 > 1.0 { (below.1 - 1.0) / (below.0 - 1.0) } else { GUESSED };
                below.1 + slope.max(0.0) * (at - below.0)
            }
        }
    }
}

/// Less than this share more is not worth being wrong about.
const MARGIN: f64 = 1.02;

/// How many guesses of each sequence to check in a step of `rows` rows besides, so that the tokens it is expected to
/// bring, `answers` without guesses, come fastest. `offers`: of each sequence how likely each guess is right if all
/// before it are.
///
/// A guess is worth the more, the likelier all up to it are right; the likeliest of all sequences are taken first, as
/// many as make the tokens per time largest.
pub fn lengths(times: &Times, rows: usize, answers: usize, most: usize, offers: &[Vec<f64>]) -> Vec<usize> {
    let products = |offer: &Vec<f64>| {
        let all = offer.iter().scan(1.0, |all, chance| {
            *all *= chance;
            Some(*all)
        });
        all.collect()
    };
    let values: Vec<Vec<f64>> = offers.iter().map(products).collect();
    worth(times, rows, answers, most, &values)
}

/// As [`lengths`], of guesses that need not follow each other: `values` are, of each sequence, how likely each guess and
/// all that it hangs on are right, the largest first.
pub fn worth(times: &Times, rows: usize, answers: usize, most: usize, values: &[Vec<f64>]) -> Vec<usize> {
    let of = |(i, values): (usize, &Vec<f64>)| values.iter().map(|&value| (value, i)).collect::<Vec<_>>();
    let mut order: Vec<(f64, usize)> = values.iter().enumerate().flat_map(of).collect();
    // Stable: of one sequence the earlier guess comes first, as it is at least as likely.
    order.sort_by(|a, b| b.0.total_cmp(&a.0));
    let speed = |tokens: f64, guesses: usize| tokens / times.ratio(rows + guesses);
    let mut tokens = answers as f64;
    let (mut best, mut count) = (speed(tokens, 0) * MARGIN, 0);
    for (i, (chance, _)) in order.iter().take(most).enumerate() {
        tokens += chance;
        if speed(tokens, i + 1) > best {
            (best, count) = (speed(tokens, i + 1), i + 1);
        }
    }
    let mut lengths = vec![0; values.len()];
    order[..count].iter().for_each(|&(_, i)| lengths[i] += 1);
    lengths
}

/// How many guesses of each sequence a small model or a head should write, where so many cost as much as `cost` steps of
/// one row, and of which such a share is checked in the mean: of a tree it may be more than all. As [`lengths`], but all
/// get as many.
pub fn depth(
    times: &Times,
    rows: usize,
    answers: usize,
    most: usize,
    cost: impl Fn(usize) -> f64,
    checked: f64,
    offers: &[Vec<f64>],
) -> usize {
    let speed = |depth: usize| {
        let sum = |offer: &Vec<f64>| {
            let (mut all, mut sum) = (1.0, 0.0);
            for chance in &offer[..depth.min(offer.len())] {
                all *= chance;
                sum += all;
            }
            sum
        };
        let tokens = answers as f64 + offers.iter().map(sum).sum::<f64>();
        let guesses: usize = offers.iter().map(|offer| depth.min(offer.len())).sum();
        let without = times.ratio(rows);
        let with = without + (times.ratio(rows + guesses) - without) * checked;
        tokens / (with + if depth == 0 { 0.0 } else { cost(depth) })
    };
    let longest = offers.iter().map(Vec::len).max().unwrap_or(0);
    let fits = |depth: &usize| offers.iter().map(|offer| offer.len().min(*depth)).sum::<usize>() <= most;
    let best = (1..=longest).filter(fits).max_by(|&a, &b| speed(a).total_cmp(&speed(b)));
    best.filter(|&depth| speed(depth) > speed(0) * MARGIN).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of steps of which each row more takes so much.
    fn measured(each: f64) -> Times {
        let mut times = Times::default();
        for _ in 0..200 {
            for rows in (2..=16).flat_map(|rows| [1, rows]) {
                times.note(rows, 1.0 + each * (rows as f64 - 1.0));
            }
        }
        times
    }

    /// Nothing that was measured once is believed for ever, and nothing is learned of a size from steps of that size alone.
    #[test]
    fn a_slow_step_is_no_end() {
        let mut times = measured(0.2);
        for _ in 0..20 {
            [1.0, 9.0].into_iter().zip([1, 2]).for_each(|(seconds, rows)| times.note(rows, seconds));
        }
        assert!(times.ratio(2) > 2.0, "{}", times.ratio(2));
        (0..5000).for_each(|_| times.note(1, 1.0));
        assert!(times.ratio(2) < 1.1, "{}", times.ratio(2));
        let mut times = measured(0.2);
        for i in 0..3000 {
            times.note(3, if i % 50 == 0 { 4.0 } else { 1.4 });
        }
        assert!((times.ratio(3) / 1.4 - 1.0).abs() < 0.05, "{}", times.ratio(3));
    }

    #[test]
    fn times_are_learned() {
        let mut times = Times::default();
        assert!((times.ratio(1), times.ratio(11)) == (1.0, 1.0 + 10.0 * GUESSED));
        let real = |rows: usize| 0.005 * (1.0 + 0.3 * (rows as f64 - 1.0));
        for _ in 0..100 {
            [1, 5, 2, 9].into_iter().for_each(|rows| times.note(rows, real(rows)));
        }
        for rows in [1, 2, 3, 5, 7, 9, 30, 100] {
            let want = real(rows) / real(1);
            assert!((times.ratio(rows) / want - 1.0).abs() < 0.01, "{rows}: {} of {want}", times.ratio(rows));
        }
        // All steps become twice as slow, for whatever reason: nothing is worth more or less.
        for _ in 0..50 {
            [1, 5].into_iter().for_each(|rows| times.note(rows, 2.0 * real(rows)));
        }
        assert!((times.ratio(5) / 2.2 - 1.0).abs() < 0.1, "{}", times.ratio(5));
        let before = times.ratio(5);
        times.note(5, 1.0);
        assert!(times.ratio(5) < before * 1.4, "one slow step says little");
        [(0, 1.0), (65, 1.0), (3, 0.0), (3, f64::NAN)].into_iter().for_each(|(rows, t)| times.note(rows, t));
        assert!(times.ratio(3).is_finite() && times.ratio(usize::MAX).is_finite());
    }

    #[test]
    fn guesses_are_worth_what_they_bring() {
        let times = measured(0.2);
        let of = |rows, answers, offers: &[&[f64]]| {
            let offers: Vec<Vec<f64>> = offers.iter().map(|o| o.to_vec()).collect();
            lengths(&times, rows, answers, 64, &offers)
        };
        assert_eq!(of(1, 1, &[&[]]), [0]);
        assert_eq!(of(1, 1, &[&[0.1, 0.9]]), [0], "less likely than it costs");
        assert_eq!(of(1, 1, &[&[0.9; 16]])[0], 7, "the more, the less likely");
        assert_eq!(of(1, 1, &[&[1.0; 16]]), [16]);
        // Where a step is long anyway, a row more costs little; where many answer, they would all wait for it.
        assert_eq!(of(16, 1, &[&[0.5]]), [1]);
        assert_eq!(of(16, 16, &[&[0.5]]), [0]);
        let both = of(2, 2, &[&[0.95; 16], &[0.3; 16]]);
        assert!(both[0] > 3 && both[1] == 0, "{both:?}");
        assert_eq!(lengths(&times, 1, 1, 3, &[vec![1.0; 9]]), [3]);
        // A second guess for the same position is worth its chance, as any other.
        assert!((times.slope(1) - 0.2).abs() < 0.01);
        assert_eq!(worth(&times, 1, 1, 64, &[vec![0.6, 0.5, 0.36, 0.1]]), [3]);
        assert_eq!(worth(&times, 1, 1, 64, &[vec![0.6, 0.1, 0.06]]), [1]);
        assert_eq!(worth(&times, 2, 2, 64, &[vec![0.2, 0.1], vec![0.9, 0.8]]), [0, 2]);
    }

    #[test]
    fn a_small_model_writes_as_much_as_pays() {
        let times = measured(0.2);
        let each = |pass: f64| move |depth: usize| pass * depth as f64;
        let of = |pass, chance: f64| depth(&times, 1, 1, 64, each(pass), 1.0, &[vec![chance; 16]]);
        assert_eq!(of(0.0, 0.9), lengths(&times, 1, 1, 64, &[vec![0.9; 16]])[0]);
        assert!(of(0.1, 0.9) < of(0.0, 0.9) && of(0.1, 0.9) > 0);
        assert_eq!((of(0.1, 0.2), of(0.9, 0.9)), (0, 0), "wrong, or slow");
        assert_eq!(
            depth(&times, 2, 2, 5, each(0.01), 1.0, &[vec![1.0; 16], vec![1.0; 16]]),
            2,
            "no more than have room"
        );
        assert_eq!(depth(&times, 1, 1, 64, each(0.1), 1.0, &[]), 0);
        assert_eq!(depth(&times, 1, 1, 64, each(0.1), 1.0, &[vec![1.0; 3]]), 3);
        // Rows that are not checked cost nothing.
        let rare = |checked| depth(&times, 1, 1, 64, each(0.1), checked, &[vec![0.25; 4]]);
        assert_eq!((rare(1.0), rare(0.3)), (0, 1));
        // One pass for all: where it pays at all, so does each more.
        let whole = |pass: f64| depth(&times, 1, 1, 64, |_| pass, 1.0, &[vec![0.9; 8]]);
        assert!(whole(0.5) >= of(0.5, 0.9) && whole(50.0) == 0);
    }
}
