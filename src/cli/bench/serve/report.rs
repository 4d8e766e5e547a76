//! What came out, as a table and as JSON.

use std::{collections::BTreeMap, time::Instant};

use serde_json::{Value, json};

use super::{ServeBenchArgs, load::Done, load::Outcome};

/// Numbers of one kind, milliseconds, sorted.
#[derive(Debug, Default)]
struct Series(Vec<f64>);

impl Series {
    fn new(values: impl Iterator<Item = f64>) -> Series {
        let mut values: Vec<f64> = values.map(|seconds| 1e3 * seconds).collect();
        values.sort_by(f64::total_cmp);
        Series(values)
    }

    fn mean(&self) -> f64 {
        self.0.iter().sum::<f64>() / self.0.len() as f64
    }

    /// Nearest rank: a value that was measured.
    fn percentile(&self, percent: f64) -> f64 {
        let rank = (percent / 100.0 * self.0.len() as f64).ceil() as usize;
        self.0.get(rank.max(1) - 1).copied().unwrap_or(f64::NAN)
    }

    fn row(&self) -> [f64; 5] {
        [self.mean(), self.percentile(50.0), self.percentile(90.0), self.percentile(99.0), self.percentile(100.0)]
    }

    fn json(&self) -> Value {
        let [mean, p50, p90, p99, max] = self.row();
        json!({"mean": mean, "p50": p50, "p90": p90, "p99": p99, "max": max})
    }
}

/// The numbers of a run.
pub struct Report<'a> {
    args: &'a ServeBenchArgs,
    model: String,
    seconds: f64,
    completed: usize,
    errors: BTreeMap<String, usize>,
    prompt: u64,
    cached: u64,
    generated: usize,
    short: usize,
    counted: bool,
    exact: bool,
    series: [(&'static str, Series); 4],
    intruder: Option<Intruder>,
}

/// What a long prompt did.
struct Intruder {
    error: Option<String>,
    first: f64,
    /// The longest gap of the others while it was computed, milliseconds.
    gap: f64,
}

impl<'a> Report<'a> {
    /// `exact`: prompts have the length that was asked for.
    pub fn new(args: &'a ServeBenchArgs, outcome: &Outcome, model: String, exact: bool) -> Report<'a> {
        let good: Vec<&Done> = outcome.done.iter().filter(|d| d.error.is_none()).collect();
        let mut errors = BTreeMap::new();
        outcome.done.iter().filter_map(|d| d.error.clone()).for_each(|e| *errors.entry(e).or_default() += 1);
        let usage = |d: &&Done, field: &str| d.answer.usage.as_ref().map_or(0, |u| u[field].as_u64().unwrap_or(0));
        let cached = |d: &&Done| {
            let details = d.answer.usage.as_ref().map(|u| u["prompt_tokens_details"]["cached_tokens"].as_u64());
            details.flatten().unwrap_or(0)
        };
        let first = |d: &&Done| (d.answer.times[0] - d.sent).as_secs_f64();
        let whole = |d: &&Done| d.answer.end.map_or(f64::NAN, |end| (end - d.sent).as_secs_f64());
        let tpot = |d: &&Done| (d.tokens() > 1).then(|| (whole(d) - first(d)) / (d.tokens() - 1) as f64);
        let gaps = good.iter().flat_map(|d| d.answer.times.windows(2)).map(|w| (w[1] - w[0]).as_secs_f64());
        let series = [
            ("TTFT", Series::new(good.iter().map(first))),
            ("TPOT", Series::new(good.iter().filter_map(tpot))),
            ("ITL", Series::new(gaps)),
            ("E2EL", Series::new(good.iter().map(whole))),
        ];
        Report {
            args,
            model,
            seconds: outcome.took.as_secs_f64(),
            completed: good.len(),
            errors,
            prompt: good.iter().map(|d| usage(d, "prompt_tokens")).sum(),
            cached: good.iter().map(cached).sum(),
            generated: good.iter().map(|d| d.tokens()).sum(),
            short: good.iter().filter(|d| d.tokens() < d.asked).count(),
            counted: good.iter().all(|d| d.answer.usage.is_some()),
            exact,
            series,
            intruder: outcome.intruder.as_ref().map(|i| Intruder::new(i, &outcome.done)),
        }
    }

    fn load(&self) -> String {
        match self.args.rate {
            Some(rate) => format!("{rate} requests/s (burstiness {})", self.args.burstiness),
            None => format!("{} clients", self.args.concurrency),
        }
    }

    /// For people.
    pub fn markdown(&self) -> String {
        let failed: usize = self.errors.values().sum();
        let per = |n: f64| n / self.seconds;
        let mut s = format!(
            "{}: {}, {} answered, {failed} failed, {:.1} s\n\n",
            self.model,
            self.load(),
            self.completed,
            self.seconds
        );
        s += "| ms | mean | p50 | p90 | p99 | max |\n|:--|--:|--:|--:|--:|--:|\n";
        for (name, series) in &self.series {
            let cells: String = series.row().iter().map(|x| format!(" {x:.1} |")).collect();
            s += &format!("| {name} |{cells}\n");
        }
        s += &format!(
            "\n{:.1} tokens/s generated ({} tokens), {:.1} tokens/s of prompts ({} tokens, {} of them cached), {:.2} requests/s\n",
            per(self.generated as f64),
            self.generated,
            per(self.prompt as f64),
            self.prompt,
            self.cached,
            per(self.completed as f64)
        );
        for (error, count) in &self.errors {
            s += &format!("{count} x {error}\n");
        }
        if self.short > 0 {
            s += &format!("{} answers were shorter than asked for\n", self.short);
        }
        if !self.counted {
            s += "The server did not count tokens: pieces of text were counted.\n";
        }
        if !self.exact {
            s += "The server has no /tokenize: prompts are of about the length asked for.\n";
        }
        if let Some(i) = &self.intruder {
            s += &match &i.error {
                Some(error) => format!("The long prompt failed: {error}\n"),
                None => format!(
                    "Long prompt of {} tokens: its TTFT {:.1} ms, the others' longest gap meanwhile {:.1} ms\n",
                    self.args.intrude.unwrap_or(0),
                    i.first,
                    i.gap
                ),
            };
        }
        s
    }

    /// For programs; times are milliseconds.
    pub fn json(&self) -> Value {
        let args = self.args;
        let mut value = json!({
            "model": self.model,
            "concurrency": args.rate.is_none().then_some(args.concurrency),
            "rate": args.rate,
            "seed": args.seed,
            "shared_prefix": args.shared_prefix,
            "input_tokens": [args.input_tokens.from, args.input_tokens.to],
            "output_tokens": [args.output_tokens.from, args.output_tokens.to],
            "seconds": self.seconds,
            "completed": self.completed,
            "failed": self.errors.values().sum::<usize>(),
            "errors": self.errors,
            "prompt_tokens": self.prompt,
            "cached_tokens": self.cached,
            "generated_tokens": self.generated,
            "counted_by_server": self.counted,
            "exact_lengths": self.exact,
            "requests_per_second": self.completed as f64 / self.seconds,
            "generated_per_second": self.generated as f64 / self.seconds,
            "longest_gap_ms": self.series[2].1.percentile(100.0),
        });
        for (name, series) in &self.series {
            value[format!("{}_ms", name.to_lowercase())] = series.json();
        }
        if let Some(i) = &self.intruder {
            value["intruder"] =
                json!({"tokens": args.intrude, "ttft_ms": i.first, "longest_gap_ms": i.gap, "error": i.error});
        }
        value
    }
}

impl Intruder {
    fn new(intruder: &Done, others: &[Done]) -> Intruder {
        let first = intruder.answer.times.first().copied();
        let window = (intruder.sent, first.unwrap_or_else(Instant::now));
        Intruder {
            error: intruder.error.clone(),
            first: first.map_or(f64::NAN, |first| 1e3 * (first - intruder.sent).as_secs_f64()),
            gap: others.iter().map(|d| longest(&d.answer.times, window)).fold(0.0, f64::max),
        }
    }
}

/// The longest gap between pieces that touches a window of time, milliseconds.
fn longest(times: &[Instant], (from, to): (Instant, Instant)) -> f64 {
    let touching = times.windows(2).filter(|w| w[1] >= from && w[0] <= to);
    touching.map(|w| 1e3 * (w[1] - w[0]).as_secs_f64()).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn percentiles_are_measured_values() {
        let series = Series::new((1..=200).rev().map(f64::from));
        assert_eq!(series.row(), [100_500.0, 100_000.0, 180_000.0, 198_000.0, 200_000.0]);
        assert!(Series::default().percentile(50.0).is_nan());
        assert_eq!(Series::new([0.002].into_iter()).row(), [2.0; 5]);
    }

    #[test]
    fn only_gaps_that_touch_the_window_count() {
        let begun = Instant::now();
        let at = |ms: u64| begun + Duration::from_millis(ms);
        let times = [0, 500, 520, 900, 910, 1910].map(at);
        assert_eq!(longest(&times, (at(510), at(905))), 380.0);
        assert_eq!(longest(&times, (at(915), at(920))), 1000.0);
        assert_eq!(longest(&times, (at(2000), at(2100))), 0.0);
    }
}
