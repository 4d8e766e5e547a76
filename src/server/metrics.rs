//! What the server measured, for `/metrics`: Prometheus text under the names that vLLM's dashboards and the routers
//! in front of it scrape.

use std::{
    collections::{BTreeMap, HashMap},
    fmt::{Display, Write},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use crate::engine::Stats;

/// Counters and histograms; shared by all requests.
#[derive(Debug)]
pub struct Metrics {
    first_token: Histogram,
    gap: Histogram,
    whole: Histogram,
    queue: Histogram,
    prefill: Histogram,
    decode: Histogram,
    inference: Histogram,
    totals: Mutex<Totals>,
    /// Tokens of the requests that have not ended, by the moment of their arrival, which names them.
    open: Mutex<HashMap<Instant, Option<Usage>>>,
}

#[derive(Debug, Default, Clone)]
struct Totals {
    prompt: u64,
    generated: u64,
    reasons: BTreeMap<&'static str, u64>,
}

/// Tokens of a request, all its choices together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompts.
    pub prompt: usize,
    /// Those that were found in the prefix cache.
    pub cached: usize,
    /// Tokens generated.
    pub generated: usize,
}

/// One choice of a request, at its end.
#[derive(Debug, Clone, Copy)]
pub struct Done {
    /// The request's head had been read.
    pub arrived: Instant,
    /// It left the queue.
    pub started: Option<Instant>,
    /// Its first token came.
    pub first: Option<Instant>,
    /// Its last token came.
    pub last: Option<Instant>,
    /// Tokens of its prompt.
    pub prompt_tokens: usize,
    /// Those that were found in the prefix cache.
    pub cached: usize,
    /// Tokens it generated.
    pub generated: usize,
    /// `stop`, `length`, `abort` or `error`.
    pub reason: &'static str,
}

/// vLLM's, so that boards made for it work. Seconds.
const FIRST: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
const GAP: &[f64] =
    &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];
const WHOLE: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];

/// Why choices end, as the label has it: all are there from the start.
const REASONS: [&str; 4] = ["stop", "length", "abort", "error"];

impl Default for Metrics {
    fn default() -> Self {
        let [queue, prefill, decode, inference, whole] = std::array::from_fn(|_| Histogram::new(WHOLE));
        let reasons = REASONS.map(|reason| (reason, 0)).into();
        Metrics {
            first_token: Histogram::new(FIRST),
            gap: Histogram::new(GAP),
            whole,
            queue,
            prefill,
            decode,
            inference,
            totals: Mutex::new(Totals { reasons, ..Totals::default() }),
            open: Mutex::default(),
        }
    }
}

impl Metrics {
    /// A token came so long after the one before it.
    pub fn token_gap(&self, gap: Duration) {
        self.gap.add(gap);
    }

    /// A choice ended.
    pub fn done(&self, done: &Done) {
        let end = Instant::now();
        self.whole.add(end - done.arrived);
        if let Some(started) = done.started {
            self.queue.add(started.saturating_duration_since(done.arrived));
            self.inference.add(end - started);
            if let Some(first) = done.first {
                self.prefill.add(first - started);
            }
        }
        if let Some(first) = done.first {
            self.first_token.add(first.saturating_duration_since(done.arrived));
            self.decode.add(done.last.unwrap_or(first) - first);
        }
        let mut totals = lock(&self.totals);
        totals.prompt += done.prompt_tokens as u64;
        totals.generated += done.generated as u64;
        *totals.reasons.entry(done.reason).or_default() += 1;
        if let Some(usage) = lock(&self.open).get_mut(&done.arrived) {
            let usage = usage.get_or_insert_default();
            usage.prompt += done.prompt_tokens;
            usage.cached += done.cached;
            usage.generated += done.generated;
        }
    }

    /// A request arrived: its tokens are counted until [`Metrics::close`].
    pub fn open(&self, arrived: Instant) {
        lock(&self.open).insert(arrived, None);
    }

    /// The tokens of a request that ended, if the model was asked.
    pub fn close(&self, arrived: Instant) -> Option<Usage> {
        lock(&self.open).remove(&arrived).flatten()
    }

    /// All of it as Prometheus text; `http`: requests by status.
    pub fn render(&self, stats: &Stats, model: &str, http: &BTreeMap<u16, u64>) -> String {
        let mut page = Page { text: String::new(), model: label(model) };
        let use_of_blocks = if stats.blocks == 0 { 0.0 } else { stats.blocks_held as f64 / stats.blocks as f64 };
        let hit_rate =
            if stats.prefix_queries == 0 { 0.0 } else { stats.prefix_hits as f64 / stats.prefix_queries as f64 };
        page.one("vllm:num_requests_running", "gauge", "Requests being computed.", stats.running);
        page.one("vllm:num_requests_waiting", "gauge", "Requests in the queue.", stats.waiting);
        page.one("vllm:kv_cache_usage_perc", "gauge", "KV cache in use, 1 is all of it.", use_of_blocks);
        page.one("vllm:gpu_cache_usage_perc", "gauge", "Old name of vllm:kv_cache_usage_perc.", use_of_blocks);
        page.head("vllm:cache_config_info", "gauge", "Size of the KV cache: tokens of a block, blocks.");
        let size = format!("block_size=\"{}\",num_gpu_blocks=\"{}\"", stats.block_tokens, stats.blocks);
        page.sample("vllm:cache_config_info", &size, 1);
        let (queries, hits) = (stats.prefix_queries, stats.prefix_hits);
        let asked = "Prompt tokens looked up in the prefix cache.";
        page.one("vllm:prefix_cache_queries_total", "counter", asked, queries);
        page.one("vllm:prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache.", hits);
        page.one("vllm:gpu_prefix_cache_queries_total", "counter", "Old name of the lookups.", queries);
        page.one("vllm:gpu_prefix_cache_hits_total", "counter", "Old name of the hits.", hits);
        page.one("vllm:gpu_prefix_cache_hit_rate", "gauge", "Share of prompt tokens found, since the start.", hit_rate);
        let again = "Times a request gave its blocks back and started again.";
        page.one("vllm:num_preemptions_total", "counter", again, stats.preemptions);
        let totals = lock(&self.totals).clone();
        page.one("vllm:prompt_tokens_total", "counter", "Tokens of prompts.", totals.prompt);
        page.one("vllm:generation_tokens_total", "counter", "Tokens generated.", totals.generated);
        page.head("vllm:request_success_total", "counter", "Choices that ended, by reason.");
        for (reason, count) in &totals.reasons {
            page.sample("vllm:request_success_total", &format!("finished_reason=\"{reason}\""), count);
        }
        for (name, help, histogram) in [
            ("vllm:time_to_first_token_seconds", "From a request's arrival to its first token.", &self.first_token),
            ("vllm:inter_token_latency_seconds", "Between two tokens of a choice.", &self.gap),
            ("vllm:e2e_request_latency_seconds", "From a request's arrival to its end.", &self.whole),
            ("vllm:request_queue_time_seconds", "In the queue.", &self.queue),
            ("vllm:request_prefill_time_seconds", "From leaving the queue to the first token.", &self.prefill),
            ("vllm:request_decode_time_seconds", "From the first token to the last.", &self.decode),
            ("vllm:request_inference_time_seconds", "From leaving the queue to the end.", &self.inference),
        ] {
            page.histogram(name, help, histogram);
        }
        let guesses = &stats.guesses;
        let (drafts, drafted) = ("Steps of a request that checked guesses.", "Tokens guessed.");
        page.one("vllm:spec_decode_num_drafts_total", "counter", drafts, guesses.drafts);
        page.one("vllm:spec_decode_num_draft_tokens_total", "counter", drafted, guesses.drafted);
        let right = "Tokens guessed right.";
        page.one("vllm:spec_decode_num_accepted_tokens_total", "counter", right, guesses.accepted);
        let name = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
        page.head(name, "counter", "Guesses that were right, by their place among those of a step.");
        for (position, count) in guesses.accepted_at.iter().enumerate() {
            page.sample(name, &format!("position=\"{position}\""), count);
        }
        page.one("quern:steps_total", "counter", "Steps of the engine.", stats.steps);
        let overlapped = "Steps that were started while the one before was under way.";
        page.one("quern:steps_overlapped_total", "counter", overlapped, stats.overlapped);
        page.one("quern:tokens_computed_total", "counter", "Tokens computed, prompts and answers.", stats.computed);
        page.text += &process(http);
        page.text
    }
}

/// What does not depend on a model: HTTP requests by status, the process, the build.
pub fn process(http: &BTreeMap<u16, u64>) -> String {
    let mut page = Page { text: String::new(), model: String::new() };
    page.head("quern:http_requests_total", "counter", "HTTP requests that ended, by status; 499: the client left.");
    for (status, count) in http {
        let _ = writeln!(page.text, "quern:http_requests_total{{code=\"{status}\"}} {count}");
    }
    page.head("quern:build_info", "gauge", "The program's version.");
    let _ = writeln!(page.text, "quern:build_info{{version=\"{}\"}} 1", label(env!("CARGO_PKG_VERSION")));
    if let Some(bytes) = resident() {
        page.head("process_resident_memory_bytes", "gauge", "Resident memory.");
        let _ = writeln!(page.text, "process_resident_memory_bytes {bytes}");
    }
    if let Ok(files) = std::fs::read_dir("/proc/self/fd") {
        page.head("process_open_fds", "gauge", "Open files and connections.");
        let _ = writeln!(page.text, "process_open_fds {}", files.count());
    }
    page.head("process_start_time_seconds", "gauge", "When the server started, since 1970.");
    let _ = writeln!(page.text, "process_start_time_seconds {}", started());
    page.text
}

/// Seconds since 1970, when this was called first.
pub fn started() -> u64 {
    static AT: std::sync::OnceLock<u64> = std::sync::OnceLock::new();
    *AT.get_or_init(|| SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()))
}

/// Bytes of memory that this process holds.
fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

#[derive(Debug)]
struct Histogram {
    bounds: &'static [f64],
    values: Mutex<Values>,
}

#[derive(Debug, Clone)]
struct Values {
    /// One per bound, and one for what is beyond them.
    counts: Vec<u64>,
    sum: f64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Histogram {
        Histogram { bounds, values: Mutex::new(Values { counts: vec![0; bounds.len() + 1], sum: 0.0 }) }
    }

    fn add(&self, time: Duration) {
        let seconds = time.as_secs_f64();
        let mut values = lock(&self.values);
        values.counts[self.bounds.partition_point(|&bound| bound < seconds)] += 1;
        values.sum += seconds;
    }
}

/// The text while it is written.
struct Page {
    text: String,
    /// Escaped.
    model: String,
}

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &str, value: impl Display) {
        let comma = if labels.is_empty() { "" } else { "," };
        let _ = writeln!(self.text, "{name}{{model_name=\"{}\"{comma}{labels}}} {value}", self.model);
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: impl Display) {
        self.head(name, kind, help);
        self.sample(name, "", value);
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.head(name, "histogram", help);
        let values = lock(&histogram.values).clone();
        let mut below = 0;
        for (bound, count) in histogram.bounds.iter().zip(&values.counts) {
            below += count;
            self.sample(&format!("{name}_bucket"), &format!("le=\"{bound:?}\""), below);
        }
        let all: u64 = values.counts.iter().sum();
        self.sample(&format!("{name}_bucket"), "le=\"+Inf\"", all);
        self.sample(&format!("{name}_sum"), "", values.sum);
        self.sample(&format!("{name}_count"), "", all);
    }
}

/// The value of a label.
fn label(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// What is behind these locks is whole at any time.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Samples by name with labels; panics where the text is not what Prometheus reads.
    fn parsed(text: &str) -> HashMap<String, f64> {
        let (mut samples, mut kinds) = (HashMap::new(), HashMap::new());
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').expect("a name and a kind");
                assert!(["gauge", "counter", "histogram"].contains(&kind), "{line}");
                assert_eq!(kinds.insert(name.to_string(), kind.to_string()), None, "twice: {line}");
            } else if !line.starts_with("# HELP ") {
                let (series, value) = line.rsplit_once(' ').expect("a series and a value");
                let name = series.split('{').next().expect("a name");
                let parts = ["_bucket", "_sum", "_count"];
                let base = parts.iter().find_map(|part| name.strip_suffix(part)).unwrap_or(name);
                let kind = kinds.get(name).or_else(|| kinds.get(base)).unwrap_or_else(|| panic!("no TYPE: {line}"));
                assert!(name == base || kind == "histogram" || kinds.contains_key(name), "{line}");
                assert!(name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == ':'), "{line}");
                let value = value.parse().unwrap_or_else(|_| panic!("no number: {line}"));
                assert_eq!(samples.insert(series.to_string(), value), None, "twice: {line}");
            }
        }
        samples
    }

    #[test]
    fn the_text_says_what_was_measured() {
        let metrics = Metrics::default();
        let arrived = Instant::now() - Duration::from_secs(3);
        let at = |millis| Some(arrived + Duration::from_millis(millis));
        metrics.open(arrived);
        let done = Done {
            arrived,
            started: at(1000),
            first: at(1500),
            last: at(2500),
            prompt_tokens: 40,
            cached: 16,
            generated: 5,
            reason: "length",
        };
        metrics.done(&done);
        metrics.done(&Done { started: None, first: None, last: None, generated: 0, reason: "abort", ..done });
        metrics.token_gap(Duration::from_millis(25));
        metrics.token_gap(Duration::from_secs(100));
        assert_eq!(metrics.close(arrived), Some(Usage { prompt: 80, cached: 32, generated: 5 }));
        assert_eq!(metrics.close(arrived), None);
        let stats = Stats {
            running: 2,
            waiting: 3,
            block_tokens: 16,
            blocks: 8,
            blocks_held: 2,
            prefix_queries: 40,
            prefix_hits: 16,
            ..Stats::default()
        };
        let text = metrics.render(&stats, "a\"b\\c\nd", &[(200, 4)].into());
        let samples = parsed(&text);
        let get = |name: &str, more: &str| {
            let series = format!("{name}{{model_name=\"a\\\"b\\\\c\\nd\"{more}}}");
            *samples.get(&series).unwrap_or_else(|| panic!("no {series} in\n{text}"))
        };
        for (name, value) in [
            ("vllm:num_requests_running", 2.0),
            ("vllm:num_requests_waiting", 3.0),
            ("vllm:kv_cache_usage_perc", 0.25),
            ("vllm:gpu_cache_usage_perc", 0.25),
            ("vllm:gpu_prefix_cache_hit_rate", 0.4),
            ("vllm:prompt_tokens_total", 80.0),
            ("vllm:generation_tokens_total", 5.0),
            ("vllm:time_to_first_token_seconds_sum", 1.5),
            ("vllm:request_queue_time_seconds_sum", 1.0),
            ("vllm:request_prefill_time_seconds_sum", 0.5),
            ("vllm:request_decode_time_seconds_sum", 1.0),
            ("vllm:inter_token_latency_seconds_count", 2.0),
            ("vllm:e2e_request_latency_seconds_count", 2.0),
            ("vllm:request_inference_time_seconds_count", 1.0),
        ] {
            assert_eq!(get(name, ""), value, "{name}");
        }
        assert_eq!(get("vllm:cache_config_info", ",block_size=\"16\",num_gpu_blocks=\"8\""), 1.0);
        assert_eq!(get("vllm:request_success_total", ",finished_reason=\"abort\""), 1.0);
        assert_eq!(get("vllm:request_success_total", ",finished_reason=\"stop\""), 0.0);
        // A bound belongs to its bucket; what is beyond all of them is only in the last.
        for (bound, count) in [("0.01", 0.0), ("0.025", 1.0), ("80.0", 1.0), ("+Inf", 2.0)] {
            assert_eq!(get("vllm:inter_token_latency_seconds_bucket", &format!(",le=\"{bound}\"")), count, "{bound}");
        }
        assert_eq!(samples["quern:http_requests_total{code=\"200\"}"], 4.0);
        assert!(samples["process_resident_memory_bytes"] > 1e6);
    }

    #[test]
    fn the_board_asks_for_what_there_is() {
        let text = Metrics::default().render(&Stats::default(), "m", &[(200, 1)].into());
        let samples = parsed(&text);
        let board: serde_json::Value = serde_json::from_str(include_str!("grafana.json")).expect("JSON");
        let mut asked = 0;
        for target in
            board["panels"].as_array().expect("panels").iter().flat_map(|p| p["targets"].as_array().expect("targets"))
        {
            let expr = target["expr"].as_str().expect("an expression");
            let word = |c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':');
            let names = expr.split(word).filter(|w| ["vllm:", "quern:", "process_"].iter().any(|p| w.starts_with(p)));
            for name in names {
                asked += 1;
                assert!(samples.keys().any(|s| s.split('{').next() == Some(name)), "{name} of {expr}");
            }
        }
        assert!(asked > 20, "{asked}");
    }
}
