//! Plots as SVG text.

use std::fmt::Write;

const WIDTH: f64 = 860.0;
const TOP: f64 = 56.0;
const LEFT: f64 = 64.0;

/// redlatch has the first colour, and the others take the rest in turn.
const OURS: &str = "#c0392b";
const OTHERS: [&str; 8] =
    ["#1f77b4", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#17a2b8", "#7f7f7f", "#bc8f00"];

/// A line of a chart. A missing value is a gap.
pub(crate) struct Series {
    pub(crate) label: String,
    pub(crate) is_ours: bool,
    pub(crate) values: Vec<Option<f64>>,
}

pub(crate) struct Bar {
    pub(crate) label: String,
    pub(crate) is_ours: bool,
    pub(crate) value: f64,
}

/// How values become heights.
#[derive(Clone, Copy)]
enum Scale {
    Linear { top: f64 },
    Log { bottom: f64, top: f64 },
}

impl Scale {
    /// A value as a part of the height.
    fn part(self, value: f64) -> f64 {
        match self {
            Scale::Linear { top } => value / top,
            Scale::Log { bottom, top } => (value.max(bottom) / bottom).log10() / (top / bottom).log10(),
        }
    }

    fn marks(self) -> Vec<f64> {
        match self {
            Scale::Linear { top } => (0..=5).map(|mark| top * f64::from(mark) / 5.0).collect(),
            Scale::Log { bottom, top } => std::iter::successors(Some(bottom), |mark| Some(mark * 10.0))
                .take_while(|mark| *mark <= top)
                .collect(),
        }
    }
}

/// Lines over a few sizes, which have equal distances. The labels are at the right ends.
pub(crate) fn lines(title: &str, sizes: (&str, &[usize]), series: &[Series], is_log: bool) -> String {
    let (height, width) = (400.0, WIDTH - LEFT - 230.0);
    let values = || series.iter().flat_map(|series| series.values.iter().flatten().copied());
    let most = values().fold(1.0, f64::max);
    let scale = match is_log {
        false => Scale::Linear { top: round_up(most) },
        true => {
            let least = values().filter(|value| *value > 0.0).fold(most, f64::min).max(1.0);
            Scale::Log { bottom: 10f64.powf(least.log10().floor()), top: 10f64.powf(most.log10().ceil()) }
        }
    };
    let x = |at: usize| LEFT + width * at as f64 / (sizes.1.len() - 1).max(1) as f64;
    let y = |value: f64| TOP + height * (1.0 - scale.part(value));
    let mut svg = head(title, TOP + height + 50.0);
    for mark in scale.marks() {
        let (at, right) = (y(mark), LEFT + width);
        let _ = writeln!(svg, r##"<path d="M{LEFT:.0} {at:.1}H{right:.0}" stroke="#ddd"/>"##);
        text(&mut svg, LEFT - 8.0, at + 4.0, "end", "#444", &thousands(mark));
    }
    for (at, size) in sizes.1.iter().enumerate() {
        text(&mut svg, x(at), TOP + height + 20.0, "middle", "#444", &size.to_string());
    }
    text(&mut svg, LEFT + width / 2.0, TOP + height + 40.0, "middle", "#444", sizes.0);
    let colors = colors(series.iter().map(|series| series.is_ours));
    let mut labels = Vec::new();
    for (series, color) in series.iter().zip(&colors) {
        let (mut path, mut last) = (String::new(), None);
        for (at, value) in series.values.iter().enumerate() {
            let Some(value) = value else { continue };
            let _ = write!(path, "{}{:.1} {:.1}", if path.is_empty() { 'M' } else { 'L' }, x(at), y(*value));
            let _ =
                writeln!(svg, r#"<circle cx="{:.1}" cy="{:.1}" r="3" fill="{color}"/>"#, x(at), y(*value));
            last = Some((at, y(*value)));
        }
        let stroke = if series.is_ours { 3.0 } else { 1.5 };
        let _ = writeln!(svg, r#"<path d="{path}" fill="none" stroke="{color}" stroke-width="{stroke}"/>"#);
        if let Some((at, y)) = last {
            labels.push((y, x(at), y, &series.label, color));
        }
    }
    // Labels at least a line apart, and none below the chart.
    labels.sort_by(|one, other| one.0.total_cmp(&other.0));
    let count = labels.len();
    let mut next = TOP;
    for (at, label) in labels.iter_mut().enumerate() {
        let last = TOP + height - 14.0 * (count - 1 - at) as f64;
        label.0 = label.0.min(last).max(next);
        next = label.0 + 14.0;
    }
    for (at, end, height, label, color) in labels {
        let right = LEFT + width + 24.0;
        let _ = writeln!(
            svg,
            r#"<path d="M{:.1} {height:.1}L{:.1} {at:.1}" stroke="{color}" stroke-width="0.6" stroke-dasharray="2"/>"#,
            end + 4.0,
            right - 4.0,
        );
        text(&mut svg, right, at + 4.0, "start", color, label);
    }
    svg + "</svg>\n"
}

/// Horizontal bars.
pub(crate) fn bars(title: &str, bars: &[Bar]) -> String {
    let (step, left) = (22.0, 230.0);
    let most = bars.iter().map(|bar| bar.value).fold(1.0, f64::max);
    let mut svg = head(title, TOP + step * bars.len() as f64 + 16.0);
    let colors = colors(bars.iter().map(|bar| bar.is_ours));
    for (at, (bar, color)) in bars.iter().zip(colors).enumerate() {
        let (y, width) = (TOP + step * at as f64, (WIDTH - left - 70.0) * bar.value / most);
        text(&mut svg, left - 8.0, y + 13.0, "end", "#222", &bar.label);
        let color = if bar.is_ours { color } else { OTHERS[0] };
        let _ =
            writeln!(svg, r#"<rect x="{left}" y="{y:.1}" width="{width:.1}" height="16" fill="{color}"/>"#);
        text(&mut svg, left + width + 6.0, y + 13.0, "start", "#222", &format!("{:.1}", bar.value));
    }
    svg + "</svg>\n"
}

fn head(title: &str, height: f64) -> String {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH:.0} {height:.0}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<title>{title}</title>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n"
    );
    let _ = writeln!(svg, r##"<text x="16" y="28" font-size="16" fill="#111">{title}</text>"##);
    svg
}

fn text(svg: &mut String, x: f64, y: f64, anchor: &str, color: &str, text: &str) {
    let _ =
        writeln!(svg, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" fill="{color}">{text}</text>"#);
}

fn colors(is_ours: impl Iterator<Item = bool>) -> Vec<&'static str> {
    let mut others = OTHERS.iter().cycle();
    is_ours.map(|is_ours| if is_ours { OURS } else { others.next().copied().unwrap_or(OURS) }).collect()
}

/// The next of 1, 2, 2.5 and 5 times a power of ten.
fn round_up(value: f64) -> f64 {
    let power = 10f64.powf(value.log10().floor());
    [1.0, 2.0, 2.5, 5.0, 10.0].map(|part| part * power).into_iter().find(|top| *top >= value).unwrap_or(value)
}

/// `12 k` for 12,000.
pub(crate) fn thousands(value: f64) -> String {
    match value {
        1_000_000.0.. => format!("{:.1} M", value / 1e6),
        10_000.0.. => format!("{:.0} k", value / 1e3),
        1_000.0.. => format!("{:.1} k", value / 1e3),
        _ => format!("{value:.0}"),
    }
}
