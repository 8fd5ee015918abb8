//! Who stands in a queue and wants nothing any more: he is found out only when the claim is over that he is granted.

use std::time::Duration;

use super::{Case, Hold};
use crate::history::{Mode, Time};
use crate::plan::{Fault, TTL};
use crate::support::Topology;

/// As `lua/README.md` has it.
const QUEUES_LAST: Duration = Duration::from_secs(60);

/// For how long a lock is kept for who looks now and then: ten of his looks.
const CLAIM_OF_LOOKERS: Duration = Duration::from_secs(1);

pub struct Ghost {
    mode: Mode,
    /// From when he wants nothing.
    since: Time,
    claim: Duration,
}

/// Of all who ever wanted a lock.
pub fn of(case: &Case<'_>, holds: &[&Hold]) -> Vec<Ghost> {
    let queued: Vec<&&Hold> = holds.iter().filter(|hold| hold.may_queue()).collect();
    let mut ghosts = Vec::new();
    for hold in queued.iter().filter(|hold| hold.asked_until().is_none()) {
        // A server knows who is told by it and does not listen any more; one of a cluster does not know who listens to others.
        let claim = match (hold.is_told, case.plan.topology) {
            (true, Topology::Cluster) => TTL,
            (true, _) => continue,
            (false, _) => CLAIM_OF_LOOKERS,
        };
        ghosts.push(Ghost { mode: hold.mode, since: hold.worker_ended, claim });
    }
    // A server that is set back, and a replica that was behind, has those in its queue who have been granted it since. Who is
    // told gives it back.
    let old = |fault: Fault| matches!(fault, Fault::ServerSetBack | Fault::NodeSetBack | Fault::Failover);
    for window in case.record.windows.iter().filter(|window| old(window.fault)) {
        let back = window.away.map_or(window.end, |(_, to)| to);
        let was_queued = |hold: &&&&Hold| {
            !hold.is_told && hold.wants < back && hold.asked_until().is_some_and(|at| at > window.start)
        };
        let its = queued.iter().filter(was_queued);
        ghosts.extend(its.map(|hold| Ghost { mode: hold.mode, since: back, claim: CLAIM_OF_LOOKERS }));
    }
    ghosts
}

/// How long they may keep a lock from everybody else between two times.
pub fn claims(ghosts: &[Ghost], holds: &[&Hold], from: Time, to: Time) -> Duration {
    let left: Vec<&Ghost> = ghosts
        .iter()
        .filter(|ghost| ghost.since < to && to.since(ghost.since) < QUEUES_LAST)
        .filter(|ghost| !is_past(ghost, holds, from))
        .collect();
    let its = |mode: Mode| left.iter().filter(move |ghost| ghost.mode == mode);
    let writers = its(Mode::Exclusive).count();
    // Those who read are granted it together, unless somebody between them writes.
    let readers = its(Mode::Shared).count().min(writers + 1);
    let longest = left.iter().map(|ghost| ghost.claim).max().unwrap_or_default();
    longest * u32::try_from(writers + readers).unwrap_or(u32::MAX)
}

/// Whether somebody who asked later for the same has had it: who queues is served in turn.
fn is_past(ghost: &Ghost, holds: &[&Hold], at: Time) -> bool {
    holds.iter().any(|hold| {
        let later = hold.inside.is_none() && hold.mode == ghost.mode && hold.wants > ghost.since;
        later && hold.may_queue() && hold.granted.is_some_and(|grant| grant.at < at)
    })
}
