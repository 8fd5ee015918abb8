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
    // When each reader's hold expires on the server. Of the two bounds, the earlier one: otherwise
    // the rule might count a hold as too long that is not.
    let mut kept: HashMap<(&str, &str), Time> = HashMap::new();
    for observation in case.record.reader_ends.iter().filter(|observation| !observation.alone) {
        let latest = kept.entry((&observation.lock, &observation.owner)).or_insert(observation.ends.0);
        *latest = observation.ends.0.max(*latest);
    }
    for (reader, seen) in &kept {
        let Some(holds) = owners.get(reader) else { continue };
        let Some(last) = holds.iter().map(|hold| given_up(case, hold)).collect::<Option<Vec<_>>>() else {
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
            .record
            .stalls
            .iter()
            .filter(|(from, to)| *from <= *seen && last <= *to)
            .map(|(from, to)| to.since(*from))
            .sum();
        if *seen > latest + stalled && !case.windows_during(first - TTL / 2, last + TTL / 2).any(late) {
            let text = format!("{} is kept until {:.3}", case.describe(holds[0]), case.when(*seen));
            verdict.violates("own end", text);
        }
    }
}

/// When the last renewal may have left. `None`: the hold may still be renewed, or is queued.
fn given_up(case: &Case<'_>, hold: &Hold) -> Option<Time> {
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
