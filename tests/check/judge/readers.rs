//! Rule "own end": a dead reader keeps the lock for no longer than its own lease, however long
//! other readers hold it.

use std::collections::HashMap;
use std::time::Duration;

use super::{Case, Hold, Verdict};
use crate::history::{Mode, Time};
use crate::plan::{Fault, Lane, TTL};

pub fn judge(case: &Case<'_>, verdict: &mut Verdict) {
    let mut owners: HashMap<(&str, &str), Vec<&Hold>> = HashMap::new();
    for hold in case.holds.iter().filter(|hold| hold.mode == Mode::Shared) {
        owners.entry((&hold.lock, &hold.owner)).or_default().push(hold);
    }
    // The expiry of each reader's hold on the server. Of its two bounds the earlier one is used:
    // with the later one, a hold that expires in time might be reported.
    let mut expiries: HashMap<(&str, &str), Time> = HashMap::new();
    for observation in case.record.reader_ends.iter().filter(|observation| !observation.is_alone) {
        let latest = expiries.entry((&observation.lock, &observation.owner)).or_insert(observation.ends.0);
        *latest = observation.ends.0.max(*latest);
    }
    for (reader, seen) in &expiries {
        let Some(holds) = owners.get(reader) else { continue };
        let Some(last) = holds.iter().map(|hold| last_renewal(case, hold)).collect::<Option<Vec<_>>>() else {
            continue;
        };
        let (Some(first), Some(last)) = (holds.iter().map(|hold| hold.wants).min(), last.into_iter().max())
        else {
            continue;
        };
        // A renewal may have been in flight, and then a request that follows from its reply: each
        // for up to a quarter of a TTL.
        let latest = last + TTL + TTL / 2;
        let late = |window: &crate::run::Window| {
            let delays = window.fault != Fault::WorkerKilled && window.place == Some(holds[0].place);
            delays || window.fault.lane() == Lane::Servers
        };
        let stalled: Duration = case
            .silences()
            .filter(|(from, to)| from <= seen && last <= *to)
            .map(|(from, to)| to.since(from))
            .sum();
        if *seen > latest + stalled && !case.windows_during(first - TTL / 2, last + TTL / 2).any(late) {
            let text = format!(
                "{}: the server keeps this reader until {:.3}, later than {:.3}",
                case.describe(holds[0]),
                case.when(*seen),
                case.when(latest + stalled)
            );
            verdict.violates("own end", text);
        }
    }
}

/// The last time at which a renewal may have been sent. `None`: the hold may still be renewed, or
/// is queued.
fn last_renewal(case: &Case<'_>, hold: &Hold) -> Option<Time> {
    let ends = hold.ends.map(|(at, _)| at).or(hold.not_granted.as_ref().map(|(at, _)| *at));
    let killed = || {
        let mut kills = case
            .record
            .windows
            .iter()
            .filter(|window| window.fault == Fault::WorkerKilled && window.place == Some(hold.place));
        let kill = kills.find(|window| window.end >= hold.worker_ended)?;
        hold.granted.map(|_| kill.start)
    };
    ends.or_else(killed)
}
