//! How many tokens a step may have, from how long steps took.

use std::time::Duration;

use crate::sched::{Budget, LOGIT_ROWS};

/// How long a step with answers in it should take: everybody who reads one waits so long while others' prompts are
/// computed.
const STEP: f64 = 0.05;

/// Bounds of a budget that nobody chose.
const LEAST: usize = 32;
const MOST: usize = 2048;

/// Steps of only prompts: more tokens would not be computed faster, and whoever comes waits for the step to end.
const PROMPTS: usize = 512;

/// Keeps the budget in step with the machine.
#[derive(Debug)]
pub struct Pace {
    /// Chosen by the user.
    fixed: Option<usize>,
    /// Tokens a second of steps with prompts; 0 before the first.
    rate: f64,
    budget: Budget,
}

impl Pace {
    /// 0: by measurement.
    pub fn new(tokens: usize) -> Pace {
        let budget =
            if tokens == 0 { Budget { mixed: 64, prompts: PROMPTS, logits: LOGIT_ROWS } } else { tokens.into() };
        Pace { fixed: (tokens > 0).then_some(tokens), rate: 0.0, budget }
    }

    /// The budget of a step in which so many sequences run. One that nobody chose is for prompts: answers come on top,
    /// so that many of them leave prompts their part.
    pub fn budget(&self, running: usize) -> Budget {
        let answers = if self.fixed.is_some() { 0 } else { running };
        Budget { mixed: self.budget.mixed + answers, ..self.budget }
    }

    /// A step took so long, `prompts` of its tokens being those of prompts.
    pub fn took(&mut self, tokens: usize, prompts: usize, time: Duration) {
        // Steps of a few rows, or of mostly answers, say nothing about prompts.
        if self.fixed.is_some() || tokens < LEAST || prompts * 2 < tokens {
            return;
        }
        let rate = tokens as f64 / time.as_secs_f64().max(1e-6);
        self.rate = if self.rate == 0.0 { rate } else { 0.75 * self.rate + 0.25 * rate };
        let mixed = (self.rate * STEP) as usize / LEAST * LEAST;
        let mixed = mixed.clamp(LEAST, MOST);
        self.budget = Budget { mixed, prompts: PROMPTS.max(mixed), logits: LOGIT_ROWS };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_budget_follows_the_machine() {
        let first = Budget { mixed: 64, prompts: 512, logits: LOGIT_ROWS };
        let mut pace = Pace::new(0);
        assert_eq!(pace.budget(0), first);
        pace.took(8, 8, Duration::from_secs(1));
        assert_eq!(pace.budget(0), first, "few tokens say nothing");
        pace.took(64, 20, Duration::from_secs(1));
        assert_eq!(pace.budget(0), first, "answers say nothing");
        pace.took(512, 512, Duration::from_millis(250));
        assert_eq!(pace.budget(0), Budget { mixed: 96, prompts: 512, logits: LOGIT_ROWS });
        assert_eq!(pace.budget(40), Budget { mixed: 136, prompts: 512, logits: LOGIT_ROWS }, "answers come on top");
        for _ in 0..20 {
            pace.took(64, 60, Duration::from_secs(10));
        }
        assert_eq!(pace.budget(0).mixed, LEAST);
        for _ in 0..40 {
            pace.took(512, 512, Duration::from_micros(10));
        }
        assert_eq!(pace.budget(0), Budget { mixed: MOST, prompts: MOST, logits: LOGIT_ROWS });
    }

    #[test]
    fn a_chosen_budget_stays() {
        let mut pace = Pace::new(7);
        pace.took(512, 512, Duration::from_millis(1));
        assert_eq!(pace.budget(5), Budget::from(7));
    }
}
