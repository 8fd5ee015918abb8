//! Medians and percentiles.

use std::time::Duration;

/// Measured durations, in nanoseconds.
#[derive(Debug, Default)]
pub(crate) struct Samples(Vec<u64>);

impl Samples {
    pub(crate) fn push(&mut self, took: Duration) {
        self.0.push(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }

    pub(crate) fn append(&mut self, other: Samples) {
        self.0.extend(other.0);
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The duration, in microseconds, that `part` of the samples do not exceed.
    pub(crate) fn quantile(&mut self, part: f64) -> f64 {
        if self.0.is_empty() {
            return f64::NAN;
        }
        let rank = ((self.0.len() - 1) as f64 * part).round() as usize;
        let (_, value, _) = self.0.select_nth_unstable(rank);
        *value as f64 / 1_000.0
    }

    pub(crate) fn median(&mut self) -> f64 {
        self.quantile(0.5)
    }
}

/// The median: the mean of the two middle values if their number is even.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => values[count / 2],
        count => f64::midpoint(values[count / 2 - 1], values[count / 2]),
    }
}
