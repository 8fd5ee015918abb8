//! Medians and percentiles.

use std::time::Duration;

/// How long each of some things took, in nanoseconds.
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

    /// In microseconds: what `part` of the samples do not exceed.
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

/// The one in the middle; the mean of two if there are two.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => values[count / 2],
        count => f64::midpoint(values[count / 2 - 1], values[count / 2]),
    }
}
