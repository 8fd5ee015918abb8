//! No lease is trusted for longer than a server keeps it.

use std::collections::HashMap;

use super::{Case, Hold, Verdict};
use crate::history::{Mode, Time};
use crate::observer::{Observation, ReaderEnd};
use crate::plan::Fault;

pub fn judge(case: &Case<'_>, verdict: &mut Verdict) {
    // Of a quorum, some nodes may have missed a renewal.
    if case.plan.topology.nodes() > 1 {
        return;
    }
    let alone = case.record.observations.iter().map(Look::Alone);
    let readers = case.record.reader_ends.iter().map(Look::Reader);
    let mut looks: HashMap<(&str, Mode), Vec<Look<'_>>> = HashMap::new();
    for look in alone.chain(readers) {
        looks.entry(look.at()).or_default().push(look);
    }
    for looks in looks.values_mut() {
        looks.sort_by_key(Look::from);
    }
    for hold in &case.holds {
        if let Some(looks) = looks.get(&(hold.lock.as_str(), hold.mode)) {
            conservative(case, hold, looks, verdict);
        }
    }
}

/// What a server said of a hold of either mode.
enum Look<'a> {
    Alone(&'a Observation),
    Reader(&'a ReaderEnd),
}

impl<'a> Look<'a> {
    fn at(&self) -> (&'a str, Mode) {
        match self {
            Look::Alone(look) => (&look.lock, Mode::Exclusive),
            Look::Reader(look) => (&look.lock, Mode::Shared),
        }
    }

    fn from(&self) -> Time {
        match self {
            Look::Alone(look) => look.from,
            Look::Reader(look) => look.from,
        }
    }

    /// When it looked at the latest, and when a hold ended then, if it was this one.
    fn ends(&self, hold: &Hold) -> Option<(Time, Time)> {
        match self {
            Look::Alone(look) => hold.is_in(look).then_some((look.to, look.ends)),
            Look::Reader(look) => (look.owner == hold.owner).then_some((look.to, look.ends.1)),
        }
    }
}

/// What a lease said before somebody looked: until then the server has it, whatever was renewed since.
fn conservative(case: &Case<'_>, hold: &Hold, looks: &[Look<'_>], verdict: &mut Verdict) {
    let (Some(grant), Some(given_up)) = (hold.granted, hold.trusted_until()) else { return };
    let mut said = hold.trusts.iter().copied().peekable();
    let mut trusted = grant.until;
    let first = looks.partition_point(|look| look.from() <= grant.at);
    for look in &looks[first..] {
        while let Some((_, until)) = said.next_if(|(at, _)| *at < look.from()) {
            trusted = until;
        }
        if look.from() > given_up {
            return;
        }
        let Some((to, ends)) = look.ends(hold) else { continue };
        // A master that was replaced may come back, with what it had, before it is told.
        let replaced = || case.windows_during(look.from(), to).any(|window| window.fault == Fault::Failover);
        if trusted > ends && case.lost_by(&hold.lock, hold.held_since(), to).is_none() && !replaced() {
            let text = format!(
                "{}: it said until {:.3} before {:.3}, and the server had it until {:.3}",
                case.say(hold),
                case.when(trusted),
                case.when(look.from()),
                case.when(ends)
            );
            return verdict.violates("deadline", text);
        }
    }
}
