//! The measured rows, for people and for scripts.

use serde_json::{Value, json};

use super::{
    protocol::Protocol,
    stats::{Distance, Estimate, Summary},
};
use crate::cli::size;

/// One file in one mode.
#[derive(Debug, Clone)]
pub struct Row {
    /// The file's name without folder and ending.
    pub model: String,
    /// Size of the file.
    pub bytes: u64,
    /// `exact`, `default`, or what differs from both.
    pub mode: String,
    /// Numeric mode and instruction set.
    pub describe: String,
    /// Windows scored.
    pub windows: usize,
    /// The numbers.
    pub summary: Summary,
}

/// What all rows have in common.
#[derive(Debug, Clone)]
pub struct About {
    /// The text's name; of saved predictions their file's.
    pub text: String,
    /// How it was scored.
    pub protocol: Protocol,
    /// Model and mode of the reference.
    pub reference: Option<(String, String)>,
    /// Whether every file has the same tokens.
    pub one_tokenization: bool,
}

/// A table with aligned columns, which is also Markdown.
pub fn markdown(about: &About, rows: &[Row]) -> String {
    let mut s = format!("{}, {}\n", about.text, about.protocol);
    let mut modes: Vec<&str> = vec![];
    for r in rows {
        if !modes.contains(&r.mode.as_str()) {
            modes.push(&r.mode);
            s += &format!("{}: {}\n", r.mode, r.describe);
        }
    }
    let mut head = vec!["file", "size", "mode", "tokens", "perplexity"];
    let mut cells: Vec<Vec<String>> = vec![];
    if let Some((model, mode)) = &about.reference {
        head.extend(["ln ratio", "KL mean", "median", "99 %", "max", "same top %", "Δp mean %", "Δp RMS %"]);
        if let Some((r, d)) = rows.first().and_then(|r| Some((r, r.summary.against.as_ref()?))) {
            let (name, tokens) = (format!("reference: {model}"), r.summary.tokens.to_string());
            let mut row = vec![name, String::new(), mode.clone(), tokens, d.perplexity.shown(4)];
            row.resize(head.len(), String::new());
            cells.push(row);
        }
    }
    cells.extend(rows.iter().map(row));
    s + "\n" + &aligned(&head, &cells) + "\n" + &legend(about)
}

fn row(r: &Row) -> Vec<String> {
    let s = &r.summary;
    let mut row = vec![r.model.clone(), size(r.bytes), r.mode.clone(), s.tokens.to_string(), s.perplexity.shown(4)];
    if let Some(d) = &s.against {
        let percent = |e: Estimate| e.percent().shown(3);
        row.extend([d.ln_ratio.shown(5), d.kl.shown(6)]);
        row.extend([d.kl_median, d.kl_99, d.kl_max].map(|x| format!("{x:.6}")));
        row.extend([d.same_top, d.delta_p, d.delta_p_rms].map(percent));
    }
    row
}

fn legend(about: &About) -> String {
    let mut s = "Perplexity of the scored tokens ± standard error.".to_string();
    if about.reference.is_some() {
        s += " ln ratio: ln(perplexity / reference's).\nKL divergence from the reference in nats. Same top: both find \
              the same token likeliest. Δp: change of the probability\nof the text's own token.";
    }
    s += "\n";
    if !about.one_tokenization {
        s += "The tokenizers of these files cut the text differently: their perplexities cannot be compared.\n";
    }
    s
}

/// Columns as wide as their widest cell; the first three are text.
fn aligned(head: &[&str], cells: &[Vec<String>]) -> String {
    let width = |i: usize| {
        let widest = cells.iter().map(|row| row[i].chars().count()).max();
        widest.unwrap_or(0).max(head[i].chars().count()).max(3)
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let line = |row: &[&str]| {
        let cell = |(i, text): (usize, &&str)| match LEFT.contains(&i) {
            true => format!(" {text:<0$} |", widths[i]),
            false => format!(" {text:>0$} |", widths[i]),
        };
        format!("|{}\n", row.iter().enumerate().map(cell).collect::<String>())
    };
    let rule = |(i, &w): (usize, &usize)| match LEFT.contains(&i) {
        true => format!(":{}|", "-".repeat(w + 1)),
        false => format!("{}:|", "-".repeat(w + 1)),
    };
    let mut s = line(head);
    s += &format!("|{}\n", widths.iter().enumerate().map(rule).collect::<String>());
    for row in cells {
        s += &line(&row.iter().map(String::as_str).collect::<Vec<_>>());
    }
    s
}

/// Columns of text.
const LEFT: [usize; 2] = [0, 2];

/// A list of objects, one per row; errors are standard errors, null for a single token.
pub fn json(about: &About, rows: &[Row]) -> Value {
    let one = |r: &Row| {
        let (p, s) = (about.protocol, &r.summary);
        let mut row = json!({
            "model": r.model, "model_bytes": r.bytes, "mode": r.mode, "numerics": r.describe, "text": about.text,
            "protocol": p.kind.name(), "context": p.context, "stride": p.stride, "windows": r.windows,
            "tokens": s.tokens, "nll": s.nll.value, "nll_error": s.nll.error,
            "perplexity": s.perplexity.value, "perplexity_error": s.perplexity.error,
        });
        if let (Some((model, mode)), Some(d)) = (&about.reference, &s.against) {
            row["reference"] = json!(model);
            row["reference_mode"] = json!(mode);
            distance(d).into_iter().for_each(|(key, value)| row[key] = value.into());
        }
        row
    };
    rows.iter().map(one).collect()
}

fn distance(d: &Distance) -> [(&'static str, f64); 15] {
    [
        ("reference_perplexity", d.perplexity.value),
        ("reference_perplexity_error", d.perplexity.error),
        ("ln_ratio", d.ln_ratio.value),
        ("ln_ratio_error", d.ln_ratio.error),
        ("kl", d.kl.value),
        ("kl_error", d.kl.error),
        ("kl_median", d.kl_median),
        ("kl_99", d.kl_99),
        ("kl_max", d.kl_max),
        ("same_top", d.same_top.value),
        ("same_top_error", d.same_top.error),
        ("delta_p", d.delta_p.value),
        ("delta_p_error", d.delta_p.error),
        ("delta_p_rms", d.delta_p_rms.value),
        ("delta_p_rms_error", d.delta_p_rms.error),
    ]
}
