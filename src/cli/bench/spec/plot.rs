//! Speed and the time to the first token against the number of guesses, as a picture.

use super::table::Line;
use crate::draft::Speculation;

const COLORS: [&str; 6] = ["#1b6ca8", "#c8553d", "#2a9d55", "#8e5bb5", "#b08900", "#444444"];

/// Where the first panel begins, and the size of each, in pixels.
const LEFT: f64 = 60.0;
const TOP: f64 = 40.0;
const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 300.0;

/// Lines of one variant and method.
struct Series<'a> {
    label: String,
    lines: Vec<&'a Line>,
}

/// Two panels: speed against that without guesses, and the time to the first token; a line for each method of each
/// variant. `names`: the variants'.
pub fn plot(names: &[String], lines: &[Line]) -> String {
    let series = series(names, lines);
    let most = lines.iter().filter_map(|line| line.speculation.fixed).max().unwrap_or(1) as f64;
    let height = 400.0 + 16.0 * series.len() as f64;
    let mut s = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 1060 {height}\" font-family=\"sans-serif\" \
         font-size=\"13\">\n<rect width=\"1060\" height=\"{height}\" fill=\"white\"/>\n"
    );
    for (panel, title) in ["speed against no guesses", "time to the first token, ms"].into_iter().enumerate() {
        let value = |line: &Line| if panel == 0 { line.gain[0] } else { line.first_ms };
        let x0 = LEFT + panel as f64 * 530.0;
        let highest = lines.iter().map(&value).fold(if panel == 0 { 1.0 } else { 1e-3 }, f64::max) * 1.1;
        let x = |k: f64| x0 + (k - 1.0) / (most - 1.0).max(1.0) * WIDTH;
        let y = |value: f64| TOP + HEIGHT * (1.0 - value / highest);
        let (right, bottom) = (x0 + WIDTH, TOP + HEIGHT);
        s += &format!("<text x=\"{x0}\" y=\"24\" font-size=\"15\">{title}</text>\n");
        s += &format!("<path d=\"M{x0} {TOP}V{bottom}H{right}\" fill=\"none\" stroke=\"#888\"/>\n");
        for tick in 0..=4 {
            let at = highest * f64::from(tick) / 4.0;
            let (x, y) = (x0 - 6.0, y(at) + 4.0);
            s += &format!("<text x=\"{x}\" y=\"{y:.1}\" text-anchor=\"end\">{at:.2}</text>\n");
        }
        for k in 1..=most as usize {
            let (x, y) = (x(k as f64), bottom + 18.0);
            s += &format!("<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">{k}</text>\n");
        }
        // Without guesses: the first variant's, in the second panel.
        let plain = y(value(&lines[0]));
        s += &format!("<path d=\"M{x0} {plain:.1}H{right}\" stroke=\"#888\" stroke-dasharray=\"4 4\"/>\n");
        for (i, Series { label, lines }) in series.iter().enumerate() {
            let color = COLORS[i % COLORS.len()];
            let point = |line: &&Line| {
                let (x, y) = (x(line.speculation.fixed? as f64), y(value(line)));
                Some((x, y))
            };
            let points: Vec<(f64, f64)> = lines.iter().filter_map(point).collect();
            let path = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect::<Vec<_>>().join(" ");
            s += &format!("<polyline points=\"{path}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"/>\n");
            for (x, y) in points {
                s += &format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.5\" fill=\"{color}\"/>\n");
            }
            let mut label = label.clone();
            if let Some(line) = lines.iter().find(|line| line.speculation.fixed.is_none()) {
                label += &format!(" (as many as pay: {:.2})", value(line));
                let (x, y) = (right + 8.0, y(value(line)));
                s += &format!("<circle cx=\"{x}\" cy=\"{y:.1}\" r=\"4\" fill=\"{color}\"/>\n");
            }
            let y = 392.0 + 16.0 * i as f64;
            s += &format!("<text x=\"{x0}\" y=\"{y}\" fill=\"{color}\">{label}</text>\n");
        }
        let (middle, y) = (x0 + WIDTH / 2.0, bottom + 34.0);
        s += &format!("<text x=\"{middle}\" y=\"{y}\" text-anchor=\"middle\">guesses of a step</text>\n");
    }
    s + "</svg>\n"
}

/// In the order in which they first come; what is without guesses is none.
fn series<'a>(names: &[String], lines: &'a [Line]) -> Vec<Series<'a>> {
    let key = |line: &Line| {
        let Speculation { method, tree, .. } = line.speculation;
        (line.variant, method, tree.is_some(), line.rate.map(f64::to_bits))
    };
    let mut series: Vec<Series> = vec![];
    for line in lines.iter().filter(|line| line.name != "off") {
        if let Some(of) = series.iter_mut().find(|of| key(of.lines[0]) == key(line)) {
            of.lines.push(line);
            continue;
        }
        let mut method = line.name.split(':').next().unwrap_or_default().to_string();
        if line.speculation.tree.is_some() {
            method += ", trees";
        }
        let label = if names.len() > 1 { format!("{}: {method}", names[line.variant]) } else { method };
        let label = label.replace('&', "&amp;").replace('<', "&lt;");
        series.push(Series { label, lines: vec![line] });
    }
    series
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::Counts;

    fn line(variant: usize, name: &str, rate: Option<f64>, gain: f64) -> Line {
        let speculation = name.parse().unwrap();
        let name = rate.map_or(name.to_string(), |rate| format!("synthetic {rate}"));
        let (gain, counts) = ([gain; 3], Counts::default());
        Line { variant, name, speculation, rate, speed: 1.0, gain, first_ms: 3.0, length: 1.0, counts }
    }

    #[test]
    fn a_line_for_each_method_of_each_variant() {
        let lines = [
            line(0, "off", None, 1.0),
            line(0, "ngram:1", None, 1.5),
            line(0, "auto", None, 1.1),
            line(0, "ngram:4", None, 2.0),
            line(0, "ngram:4", Some(0.5), 1.4),
            line(1, "off", None, 1.0),
            line(1, "ngram:2", None, 1.2),
        ];
        let picture = plot(&["a<b, int8".into(), "c, f32".into()], &lines);
        assert_eq!(picture.matches("<polyline").count(), 2 * 4);
        assert!(picture.starts_with("<svg") && picture.ends_with("</svg>\n") && !picture.contains("NaN"));
        for label in ["a&lt;b, int8: ngram<", "auto (as many as pay: 1.10)", "synthetic 0.5<", "c, f32: ngram<"] {
            assert!(picture.contains(label), "{label} in {picture}");
        }
        // One line alone has no spread.
        let alone = plot(&["a".into()], &lines[..1]);
        assert!(!alone.contains("NaN") && !alone.contains("inf") && !alone.contains("polyline"));
    }
}
