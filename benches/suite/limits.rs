//! [`Row`]: a figure of a client.

use serde::Serialize;

use super::record::Target;

/// What is measured of a client, with the limit for it.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) what: String,
    pub(crate) measured: f64,
    pub(crate) unit: &'static str,
    /// The limit, if there is one: at most this, or with `at_least`, at least.
    pub(crate) limit: Option<f64>,
    pub(crate) at_least: bool,
}

impl Row {
    pub(crate) fn at_most(what: impl Into<String>, measured: f64, unit: &'static str, limit: f64) -> Row {
        Row { what: what.into(), measured, unit, limit: Some(limit), at_least: false }
    }

    pub(crate) fn shown(what: impl Into<String>, measured: f64, unit: &'static str) -> Row {
        Row { what: what.into(), measured, unit, limit: None, at_least: false }
    }

    pub(crate) fn at_least(what: impl Into<String>, measured: f64, unit: &'static str, limit: f64) -> Row {
        Row { at_least: true, ..Row::at_most(what, measured, unit, limit) }
    }

    pub(crate) fn target(&self) -> Option<Target> {
        let Row { what, measured, unit, limit, at_least } = self;
        let limit = (*limit)?;
        let text = |word| format!("{what}: {word} {limit} {unit}");
        Some(match at_least {
            true => Target::at_least(text("at least"), *measured, limit),
            false => Target::at_most(text("at most"), *measured, limit),
        })
    }
}
