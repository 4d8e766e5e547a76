//! A line on a terminal while weights go to a device; nothing elsewhere.

use std::{
    io::{IsTerminal, Write, stderr},
    time::{Duration, Instant},
};

use super::size;

/// The line. It goes away with the value.
struct Line {
    start: Instant,
    drawn: Option<Instant>,
    total: u64,
}

/// What to call with the bytes that are done, of a file of `total` bytes.
pub fn progress(total: u64) -> impl FnMut(usize) + 'static {
    let mut line = Line { start: Instant::now(), drawn: None, total };
    let terminal = stderr().is_terminal();
    move |done| {
        if terminal {
            line.show(done as u64);
        }
    }
}

impl Line {
    fn show(&mut self, done: u64) {
        let since = self.drawn.unwrap_or(self.start);
        // Nothing for what is done at once.
        if since.elapsed() < Duration::from_millis(200) {
            return;
        }
        self.drawn = Some(Instant::now());
        // A progress line that cannot be written is not worth failing for.
        let _ = write!(stderr(), "\r\x1b[K{}", text(done, self.total, self.start.elapsed()));
    }
}

fn text(done: u64, total: u64, spent: Duration) -> String {
    let rate = done as f64 / spent.as_secs_f64().max(1e-3);
    let percent = (100 * done).checked_div(total).unwrap_or(100).min(100);
    format!("uploading weights: {percent} % of {}, {}/s", size(total), size(rate as u64))
}

impl Drop for Line {
    fn drop(&mut self) {
        if self.drawn.is_some() {
            let _ = write!(stderr(), "\r\x1b[K");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_says_how_far_and_how_fast() {
        let second = Duration::from_secs(2);
        assert_eq!(text(500_000_000, 2_000_000_000, second), "uploading weights: 25 % of 2.00 GB, 250.0 MB/s");
        // Converted floats may be more than the file has.
        assert!(text(3, 2, second).contains("100 %") && text(0, 0, Duration::ZERO).contains("100 %"));
    }
}
