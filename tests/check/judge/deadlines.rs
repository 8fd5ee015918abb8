//! Rule "deadline": no lease is trusted for longer than a server keeps it.

use std::collections::HashMap;

use super::{Case, Hold, Verdict};
use crate::history::{Mode, Time};
use crate::observer::{Observation, ReaderEnd};
use crate::plan::Fault;

pub fn judge(case: &Case<'_>, verdict: &mut Verdict) {
    // In a quorum, single nodes may have missed a renewal.
    if case.plan.topology.nodes() > 1 {
        return;
    }
    let alone = case.record.observations.iter().map(Sample::Exclusive);
    let readers = case.record.reader_ends.iter().map(Sample::Reader);
    let mut observations: HashMap<(&str, Mode), Vec<Sample<'_>>> = HashMap::new();
    for observation in alone.chain(readers) {
        observations.entry(observation.at()).or_default().push(observation);
    }
    for observations in observations.values_mut() {
        observations.sort_by_key(Sample::from);
    }
    for hold in &case.holds {
        if let Some(observations) = observations.get(&(hold.lock.as_str(), hold.mode)) {
            compare(case, hold, observations, verdict);
        }
    }
}

/// What a server stored of a hold in either mode.
enum Sample<'a> {
    Exclusive(&'a Observation),
    Reader(&'a ReaderEnd),
}

impl<'a> Sample<'a> {
    fn at(&self) -> (&'a str, Mode) {
        match self {
            Sample::Exclusive(observation) => (&observation.lock, Mode::Exclusive),
            Sample::Reader(observation) => (&observation.lock, Mode::Shared),
        }
    }

    fn from(&self) -> Time {
        match self {
            Sample::Exclusive(observation) => observation.from,
            Sample::Reader(observation) => observation.from,
        }
    }

    /// If the observation shows this hold: its latest time, and the expiry of the hold then.
    fn ends(&self, hold: &Hold) -> Option<(Time, Time)> {
        match self {
            Sample::Exclusive(observation) => {
                hold.is_in(observation).then_some((observation.to, observation.ends))
            }
            Sample::Reader(observation) => {
                (observation.owner == hold.owner).then_some((observation.to, observation.ends.1))
            }
        }
    }
}

/// Compares each observation with the deadline that the lease had reported before it: the server
/// keeps the lease at least until then. Renewals since then only move the server's expiry further.
fn compare(case: &Case<'_>, hold: &Hold, observations: &[Sample<'_>], verdict: &mut Verdict) {
    let (Some(grant), Some(trusted_until)) = (hold.granted, hold.trusted_until()) else { return };
    let mut reported = hold.trusts.iter().copied().peekable();
    let mut trusted = grant.until;
    let first = observations.partition_point(|observation| observation.from() <= grant.at);
    for observation in &observations[first..] {
        while let Some((_, until)) = reported.next_if(|(at, _)| *at < observation.from()) {
            trusted = until;
        }
        if observation.from() > trusted_until {
            return;
        }
        let Some((to, ends)) = observation.ends(hold) else { continue };
        // A replaced master may come back with its old data before it is demoted.
        let replaced =
            || case.windows_during(observation.from(), to).any(|window| window.fault == Fault::Failover);
        if trusted > ends && case.lost_by(&hold.lock, hold.held_since(), to).is_none() && !replaced() {
            let text = format!(
                "{}: the lease reported {:.3} as its deadline before {:.3}, but the server keeps it until {:.3}",
                case.describe(hold),
                case.when(trusted),
                case.when(observation.from()),
                case.when(ends)
            );
            return verdict.violates("deadline", text);
        }
    }
}
