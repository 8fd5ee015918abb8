//! Rule "decision": a majority of a quorum's nodes decides, and no minority does.

use std::time::Duration;

use super::{Case, Hold, Verdict};
use crate::history::FailureReason;
use crate::plan::{Fault, LOCAL_TURN, NODE_TIMEOUT};
use crate::run::Window;
use crate::workload::LOCKS;

/// If a minority is away for longer than this in all windows together, the other nodes must have
/// granted a lock.
const LONG_MINORITY: Duration = Duration::from_secs(2);

/// Of this number of requests for one lock, at least one must be granted.
const MANY_REQUESTS: usize = 20;

pub fn judge(case: &Case<'_>, verdict: &mut Verdict) {
    let windows = |fault: Fault| case.record.windows.iter().filter(move |window| window.fault == fault);
    for window in windows(Fault::Majority) {
        if let Some(hold) = granted_in(case, window).find(|hold| !may_be_passed_on(case, hold, window)) {
            verdict.violates("decision", format!("{} was granted by a minority", case.describe(hold)));
        }
    }
    let minorities: Vec<&Window> = windows(Fault::Minority).collect();
    let away = |window: &&Window| window.away.map_or(Duration::ZERO, |(from, to)| to.since(from));
    let together: Duration = minorities.iter().map(away).sum();
    if together > LONG_MINORITY && minorities.iter().all(|window| granted_in(case, window).next().is_none()) {
        let text = format!("a minority was away for {together:?}, and the other nodes granted no lock");
        verdict.violates("decision", text);
    }
    for (lock, _) in LOCKS {
        let of_lock = |hold: &&Hold| hold.lock == lock;
        let answered = minorities.iter().flat_map(|window| answered_in(case, window)).filter(of_lock);
        let refused: Vec<&Hold> = answered.filter(|hold| hold.granted.is_none()).collect();
        // Also to a request from before: where many wait, it may have waited for longer than this.
        let is_granted =
            minorities.iter().any(|window| case.holds.iter().filter(of_lock).any(decided_in(window)));
        if !is_granted && refused.len() >= MANY_REQUESTS {
            let text = format!(
                "a minority was away, and the other nodes granted {lock} to none of {} requests",
                refused.len()
            );
            verdict.violates("decision", text);
        }
        for hold in
            refused.iter().filter(|hold| matches!(hold.not_granted, Some((_, FailureReason::Failed(_)))))
        {
            let text = format!("{} failed, although only a minority was away", case.describe(hold));
            verdict.violates("decision", text);
        }
    }
}

/// The requests that began and ended while the nodes were away, without another fault on their
/// worker.
fn answered_in<'a>(case: &'a Case<'_>, window: &'a Window) -> impl Iterator<Item = &'a Hold> {
    let within = move |hold: &&Hold| {
        let (Some((from, to)), Some(end)) = (window.away, hold.asked_until()) else { return false };
        let hit = |other: &Window| other.place == Some(hold.place);
        hold.inside.is_none()
            && hold.wants > from
            && end < to
            && !case.windows_during(hold.wants - 2 * NODE_TIMEOUT, end).any(hit)
            && !case.were_silent(hold.wants, end)
    };
    case.holds.iter().filter(within)
}

/// The requests that began and were granted while the nodes were away.
fn granted_in<'a>(case: &'a Case<'_>, window: &'a Window) -> impl Iterator<Item = &'a Hold> {
    let within = move |hold: &&Hold| {
        let (Some((from, to)), Some(grant)) = (window.away, hold.granted) else { return false };
        hold.inside.is_none() && hold.wants > from && grant.at < to
    };
    case.holds.iter().filter(within)
}

/// Whether its client had the lock when the nodes left, and its turn may have lasted until then: a
/// hold is passed on without a request. A task may be late to receive it.
fn may_be_passed_on(case: &Case<'_>, hold: &Hold, window: &Window) -> bool {
    let (Some((from, _)), Some(grant)) = (window.away, hold.granted) else { return false };
    let around = from - 2 * LOCAL_TURN..from;
    let is_before = |other: &Hold| other.granted.is_some_and(|earlier| around.contains(&earlier.at));
    let has_turn = |other: &Hold| other.place == hold.place && other.lock == hold.lock && is_before(other);
    grant.at < from + 2 * LOCAL_TURN && case.holds.iter().any(has_turn)
}

/// Whether a request was granted while the nodes were away, and by the others: so long after they
/// left that no reply of theirs counted.
fn decided_in(window: &Window) -> impl Fn(&Hold) -> bool {
    let away = window.away;
    move |hold| {
        let (Some((from, to)), Some(grant)) = (away, hold.granted) else { return false };
        hold.inside.is_none() && grant.at > from + NODE_TIMEOUT && grant.at < to
    }
}
